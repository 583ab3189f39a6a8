"""`item` and `dim_size`: nodes that define symbols by values of the run."""

from math import inf
from typing import Any, Final

import numpy as np

from hopflow import dtypes
from hopflow.bind import bind
from hopflow.errors import CheckError, DTypeError
from hopflow.graph.types import SYMBOL_TYPE, TensorType
from hopflow.loop_ir import expr
from hopflow.loop_ir.expr import Expr, Index
from hopflow.loop_ir.kernels import Check, Operand, Pointwise
from hopflow.ops import batching
from hopflow.ops.opdef import OpDef, Sample
from hopflow.ops.rules import Array
from hopflow.ops.views import Types
from hopflow.symbolic.ranges import NON_NEGATIVE, ValueRange


def _is_checked(min: float = -inf, max: float = inf, known: bool = False) -> bool:
    return not known and (min, max) != (-inf, inf)


def range_params(allowed: ValueRange, *, known: bool) -> dict[str, Any]:
    """Return the params of an `item` whose symbol has this range."""
    ends = {"min": (allowed.low, -inf), "max": (allowed.high, inf)}
    params: dict[str, Any] = {k: v for k, (v, free) in ends.items() if v != free}
    return {**params, "known": True} if known and params else params


def range_fault(subject: str, value: int, allowed: ValueRange) -> str:
    """Describe a value that is out of its range."""
    low, high = allowed.low, allowed.high
    least = [f"at least {low}"] if low != -inf else []
    most = [f"at most {high}"] if high != inf else []
    return f"{subject} is {value}, and must be {' and '.join(least + most)}."


def _infer(x: TensorType, **_: Any) -> TensorType:
    if x.shape or x.dtype.is_float:
        raise DTypeError(
            f"item: a symbol is the value of an integer of no axes, and not of {x}."
        )
    return SYMBOL_TYPE


def _run(
    x: Array, *, min: float = -inf, max: float = inf, known: bool = False
) -> Array:
    """The integer in a tensor without axes."""
    value = int(x)
    if not known and not min <= value <= max:
        raise CheckError(range_fault("item: it", value, ValueRange(min, max)))
    return np.asarray(value, np.int64)


def _lower(_types: Types, x: Operand, **params: Any) -> Pointwise:
    value = expr.cast(x[()], dtypes.int64)
    allowed = ValueRange(params.get("min", -inf), params.get("max", inf))
    if x.type.dtype is dtypes.uint64:
        allowed &= NON_NEGATIVE  # values beyond i64 are negative after the cast

    def holds(_: Index) -> Expr:
        tests = []
        if allowed.low != -inf:
            tests.append(expr.compare("ge", value, expr.index(int(allowed.low))))
        if allowed.high != inf:
            tests.append(expr.compare("le", value, expr.index(int(allowed.high))))
        return expr.all_of(tests)

    check = Check("range", (), holds, lambda _: (value,))
    return Pointwise(lambda _: value, (check,) if _is_checked(**params) else ())


# `item(x, min=-inf, max=inf, known=False)`: `min` and `max` are the symbol's range. The
# program stops at an integer out of it, unless `known` says that there is none.
item: Final = OpDef(
    name="item",
    promote=None,
    infer=_infer,  # i[] -> i64[]
    run=_run,
    lower=_lower,
    node_effects=lambda params: frozenset({"trap"} if _is_checked(**params) else ()),
    samples=(
        Sample(("T[]",), {}, (*dtypes.INTEGERS, dtypes.bool_)),
        Sample(("T[]",), {"max": 100}, (dtypes.bool_, dtypes.uint8), 0, 100),
    ),
)


def _dim_size_batch(
    op: OpDef, _size: Any, _batched: Any, x: Any, *, axis: int
) -> list[batching.Same]:
    [size] = bind(op, [x], {"axis": axis + 1})
    return [batching.Same(size)]


# `dim_size(x, axis)`: the symbol is the size of an axis of an operator's result.
dim_size: Final = OpDef(
    name="dim_size",
    promote=None,
    infer=lambda _x, axis: SYMBOL_TYPE,
    run=lambda x, *, axis: np.asarray(x.shape[axis], np.int64),
    lower=lambda _types, x, *, axis: Pointwise(
        lambda _: expr.extent(x.type.shape[axis])
    ),
    batch=_dim_size_batch,
    samples=(Sample(("T[3, 4]",), {"axis": 1}),),
)
