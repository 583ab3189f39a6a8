"""`check`: stop the program with the user's message unless a condition holds."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from hopflow import dtypes
from hopflow.bind import Operand as Argument
from hopflow.bind import Value, bind, current
from hopflow.errors import (
    ArgumentTypeError,
    DTypeError,
)
from hopflow.graph.types import TensorType
from hopflow.loop_ir.kernels import Check, Effect, Operand
from hopflow.ops import batching
from hopflow.ops.messages import Message, check_error
from hopflow.ops.opdef import OpDef, Sample, as_operand, strong_constant
from hopflow.ops.rules import Array, as_integer, as_symbol
from hopflow.symbolic.boolean import SymBool
from hopflow.symbolic.size import Size


def _infer(test: TensorType, *_sides: TensorType, **_: Any) -> tuple[TensorType, ...]:
    if test.dtype is not dtypes.bool_:
        raise DTypeError(
            f"check: `condition` must be of dtype bool, and is {test}. Compare "
            "it: `hf.check(n != 0, ...)`."
        )
    return ()


def _run(test: Array, *sides: Array, **params: Any) -> tuple[()]:
    if not np.all(test):
        raise check_error(params, values=[int(side) for side in sides])
    return ()


def _lower(_types: Any, test: Operand, *sides: Operand, **_: Any) -> Effect:
    holds = Check(
        "check",
        test.type.shape,
        lambda at: test[at],
        lambda _: tuple([side[()] for side in sides]),
    )
    return Effect((holds,))


def _batch(
    op: OpDef, size: Size, batched: tuple[bool, ...], *operands: Argument, **params: Any
) -> Sequence[Value]:
    """Batch the check; sides that differ between elements are left out of its error."""
    kept = operands if not any(batched[1:]) else operands[:1]
    return bind(op, [batching.in_batch(size, batched[0], kept[0]), *kept[1:]], params)


# `check(condition, left, right)`: the sides of the comparison `condition`, for the
# error, may be omitted.
check_op: Final = OpDef(
    name="check",
    promote=None,
    infer=_infer,
    run=_run,
    lower=_lower,
    effects=frozenset({"trap"}),
    batch=_batch,
    samples=(
        Sample(("bool[]",), {"message": Message("not so")}, (dtypes.bool_,), 1, 1),
    ),
)


def check(condition: Any, message: str) -> None:
    """Stop the program with a `CheckError` unless `condition` holds everywhere.

    After it, a trace takes a condition on symbolic numbers (sizes, `item`) as a fact.

    Args:
        condition: A bool, a tensor bool[*s], or a comparison of symbolic numbers.
        message: The text of the error.

    Raises:
        CheckError: it does not hold (in the run, also if the program is compiled).
        DTypeError: `condition` is not bool.

    >>> hf.check(hf.ones(3) > 0, "positive numbers only")
    """
    if not isinstance(message, str):
        raise ArgumentTypeError(
            f"check: `message` must be a string, and is `{type(message).__name__}`."
        )
    if isinstance(condition, SymBool):
        current().expect(condition, message)
        return
    bind(
        check_op,
        [strong_constant(as_operand("check", "condition", condition))],
        {"message": Message(message)},
    )


def check_is_size(n: Any, *, min: int = 0, max: int | None = None) -> None:
    """Promise that an integer is a size; stop with a `CheckError` if it is not.

    Args:
        n: An int, an integer tensor of no axes, or a symbolic number such as
            `x.item()`, which a trace takes to be a size from then on.
        min, max: The promised range, ends included.

    Raises:
        CheckError: it is not (in the run, also if the program is compiled).
        ArgumentTypeError: `n` is no integer, or a tensor of another dtype or with axes.
    """
    n = as_symbol("check_is_size", "n", n)
    if isinstance(n, int):
        check(n < 1 << 63, f"check_is_size: `n` is {n}, which int64 cannot hold")
    least = as_integer("check_is_size", "min", min)
    conditions: list[bool | SymBool] = [n >= least]
    if max is not None:
        conditions.append(n <= as_integer("check_is_size", "max", max))
    end = "" if max is None else f" to {max}"
    for condition in conditions:
        check(condition, f"check_is_size: `n` must be a size from {least}{end}")
