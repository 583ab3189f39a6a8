"""Comparison, bit operations, tests and selection."""

from typing import Any, Final

import numpy as np

from hopflow import dtypes
from hopflow.bind import Operand, Value
from hopflow.graph.core import Constant
from hopflow.graph.types import TensorType
from hopflow.loop_ir.expr import binary, unary
from hopflow.loop_ir.expr import select as choose
from hopflow.ops import batching, scalar
from hopflow.ops.convert import apply
from hopflow.ops.deferred import aligned
from hopflow.ops.opdef import (
    OpDef,
    Reference,
    Sample,
    as_operand,
    convert_to,
    promoted_as,
)
from hopflow.ops.rules import (
    Array,
    any_dtype,
    broadcast_shapes,
    check_arity,
    elementwise,
    floating,
    integral,
    integral_or_boolean,
    numeric,
    pointwise,
    require_dtype,
)

# --- comparison -----------------------------------------------------------------------


def _comparison(name: str, doc: str, run: Any, expression: str) -> OpDef:
    return elementwise(
        name,
        doc,
        run,
        scalar.comparison(expression),
        promote=any_dtype,
        result=dtypes.bool_,
        compares=True,
    )


equal: Final = _comparison("equal", "`x1 == x2`, by element.", np.equal, "eq")
not_equal: Final = _comparison(
    "not_equal", "`x1 != x2`, by element.", np.not_equal, "ne"
)
less: Final = _comparison("less", "`x1 < x2`, by element.", np.less, "lt")
less_equal: Final = _comparison(
    "less_equal", "`x1 <= x2`, by element.", np.less_equal, "le"
)
greater: Final = _comparison("greater", "`x1 > x2`, by element.", np.greater, "gt")
greater_equal: Final = _comparison(
    "greater_equal", "`x1 >= x2`, by element.", np.greater_equal, "ge"
)


# --- bits -----------------------------------------------------------------------------


bitwise_and: Final = elementwise(
    "bitwise_and",
    "`x1 & x2`, of integers or bools.",
    np.bitwise_and,
    lambda x, y: binary("and", x, y),
    promote=integral_or_boolean,
)
bitwise_or: Final = elementwise(
    "bitwise_or",
    "`x1 | x2`, of integers or bools.",
    np.bitwise_or,
    lambda x, y: binary("or", x, y),
    promote=integral_or_boolean,
)
bitwise_xor: Final = elementwise(
    "bitwise_xor",
    "`x1 ^ x2`, of integers or bools.",
    np.bitwise_xor,
    lambda x, y: binary("xor", x, y),
    promote=integral_or_boolean,
)
bitwise_invert: Final = elementwise(
    "bitwise_invert",
    "`~x`, of integers or bools.",
    np.bitwise_not,
    lambda x: unary("not", x),
    arity=1,
    promote=integral_or_boolean,
)
bitwise_left_shift: Final = elementwise(
    "bitwise_left_shift",
    "`x1 << x2`; 0 where `x2` is negative, or the width of the type or more.",
    np.left_shift,
    scalar.shift_left,
    promote=integral,
)
bitwise_right_shift: Final = elementwise(
    "bitwise_right_shift",
    """`x1 >> x2`, which repeats the sign of a signed integer.

    Only sign bits where `x2` is negative, or the width of the type or more.
    """,
    np.right_shift,
    scalar.shift_right,
    promote=integral,
)


# --- tests ----------------------------------------------------------------------------


def _test(name: str, doc: str, run: Any, fn: Any) -> OpDef:
    return elementwise(
        name, doc, run, fn, arity=1, promote=numeric, result=dtypes.bool_, widen=False
    )


isnan: Final = _test("isnan", "Whether each element is NaN.", np.isnan, scalar.is_nan)
isinf: Final = _test(
    "isinf", "Whether each element is an infinity.", np.isinf, scalar.is_inf
)
isfinite: Final = _test(
    "isfinite",
    "Whether each element is neither infinite nor NaN.",
    np.isfinite,
    scalar.is_finite,
)
signbit: Final = elementwise(
    "signbit",
    "Whether the sign bit of each element is set, also of zeros and NaNs.",
    np.signbit,
    scalar.sign_bit,
    arity=1,
    promote=floating,
    result=dtypes.bool_,
    widen=False,
)


# --- logic ----------------------------------------------------------------------------


def as_bool(name: str, position: int, x: Any) -> Operand:
    """Return an operand as bools: anything but 0 is True."""
    return convert_to(as_operand(name, position, x), dtypes.bool_)


def logical_and(x1: Any, x2: Any, /) -> Value:
    """Return `x1 and x2` by element; anything but 0 is True."""
    operands = [as_bool("logical_and", i, x) for i, x in enumerate((x1, x2))]
    return apply(bitwise_and, *aligned("logical_and", operands))


def logical_or(x1: Any, x2: Any, /) -> Value:
    """Return `x1 or x2` by element; anything but 0 is True."""
    operands = [as_bool("logical_or", i, x) for i, x in enumerate((x1, x2))]
    return apply(bitwise_or, *aligned("logical_or", operands))


def logical_xor(x1: Any, x2: Any, /) -> Value:
    """Return whether exactly one of `x1` and `x2` is True; anything but 0 is."""
    operands = [as_bool("logical_xor", i, x) for i, x in enumerate((x1, x2))]
    return apply(bitwise_xor, *aligned("logical_xor", operands))


def logical_not(x: Any, /) -> Value:
    """Return `not x` by element; anything but 0 is True."""
    return apply(bitwise_invert, as_bool("logical_not", 0, x))


# --- choice ---------------------------------------------------------------------------


def _select_infer(*types: TensorType) -> TensorType:
    check_arity("where", types, 3)
    test, x, y = types
    require_dtype("where", [test], (dtypes.bool_,))
    require_dtype("where", [y], (x.dtype,))
    shape = broadcast_shapes("where", test.shape, x.shape, y.shape)
    return TensorType(x.dtype, shape, x.weak and y.weak)


def _select_run(test: Array, x: Array, y: Array) -> Array:
    # The docstring is that of the operation, in the names of the public function.
    """`x1` where `condition` holds, else `x2`."""
    return np.where(test, x, y)


def _select(test: Any, x: Any, y: Any) -> Value:
    """Return `x` where `test` holds, else `y`; one that is no tensor counts as 0."""
    tensor = x if isinstance(x, Value) else y
    zero = Constant(0.0, TensorType(tensor.dtype))
    values = (v if isinstance(v, Value) else zero for v in (x, y))
    return apply(select, test, *values)


def _select_jvp(tangents: Any, _results: Any, test: Any, *_: Any) -> tuple[Value]:
    # Tangents are selected instead of multiplied by 0, as one of a branch not taken may
    # be infinite.
    return (_select(test, *tangents[1:]),)


select: Final = OpDef(
    name="where",
    promote=None,
    infer=_select_infer,
    run=_select_run,
    lower=pointwise(choose),
    jvp=_select_jvp,
    transpose=(
        None,
        lambda ct, test, x, y: _select(test, ct, None),
        lambda ct, test, x, y: _select(test, None, ct),
    ),
    is_cheap=True,
    batch=batching.pointwise,
    reference=Reference("numpy.where", "jax.numpy.where"),
    samples=(
        Sample(("bool[3, 1]", "T[3, 4]", "T[4]"), dtypes=dtypes.ALL),
        Sample(("bool[]", "T[2]", "T[]")),
        Sample(("bool[0]", "T[0]", "T[]")),
    ),
)


def where(condition: Any, x1: Any, x2: Any, /) -> Value:
    """Return `x1` where `condition` holds, else `x2`.

    Args:
        condition: bool[*s]; in other dtypes, anything but 0 is True.
        x1, x2: T[*t], T[*u]; the three broadcast, and these two promote.

    Raises:
        ShapeError: the shapes do not broadcast.

    >>> hf.where(hf.asarray([True, False]), 1, hf.asarray([2.0, 3.0]))
    Tensor([1., 3.], f32[2])
    """
    test = as_bool("where", 0, condition)
    values = [as_operand("where", i, v) for i, v in ((1, x1), (2, x2))]
    dtype, weak = any_dtype("where", [promoted_as(v.type) for v in values])
    converted = [convert_to(v, dtype, weak=weak) for v in values]
    return apply(select, *aligned("where", [test, *converted]))
