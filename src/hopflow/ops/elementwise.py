"""Elementwise arithmetic, comparison and bit operations, with one record each.

A plain composition of operations is a function, not a primitive.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from hopflow import dtypes
from hopflow.bind import Operand, Value
from hopflow.errors import DivisionError, HopflowError, PowerError
from hopflow.graph.core import Constant
from hopflow.graph.types import TensorType
from hopflow.loop_ir import expr
from hopflow.loop_ir.expr import Expr, cast, compare, const
from hopflow.loop_ir.kernels import Check, Pointwise, elements
from hopflow.loop_ir.kernels import Operand as Lowerable
from hopflow.loop_ir.scalars import array_function
from hopflow.ops import scalar
from hopflow.ops.convert import apply, as_value, astype, convert, copy
from hopflow.ops.deferred import aligned
from hopflow.ops.logic import (
    bitwise_and,
    bitwise_invert,
    bitwise_left_shift,
    bitwise_or,
    bitwise_right_shift,
    bitwise_xor,
    equal,
    greater,
    greater_equal,
    isfinite,
    isinf,
    isnan,
    less,
    less_equal,
    logical_and,
    logical_not,
    logical_or,
    logical_xor,
    not_equal,
    select,
    signbit,
    where,
)
from hopflow.ops.opdef import (
    HALVES,
    OPERATIONS,
    OpDef,
    Reference,
    as_operand,
    convert_to,
    promoted_as,
)
from hopflow.ops.rules import (
    Array,
    any_dtype,
    as_flag,
    broadcast_shapes,
    elementwise,
    floating,
    integral,
    numeric,
    pointwise,
    real_floating,
)
from hopflow.symbolic.size import SymInt

__all__ = [
    "abs",
    "add",
    "astype",
    "bitwise_and",
    "bitwise_invert",
    "bitwise_left_shift",
    "bitwise_or",
    "bitwise_right_shift",
    "bitwise_xor",
    "ceil",
    "clip",
    "conj",
    "convert",
    "copy",
    "copysign",
    "divide",
    "equal",
    "floor",
    "floor_divide",
    "greater",
    "greater_equal",
    "imag",
    "isclose",
    "isfinite",
    "isinf",
    "isnan",
    "less",
    "less_equal",
    "logical_and",
    "logical_not",
    "logical_or",
    "logical_xor",
    "maximum",
    "minimum",
    "multiply",
    "nan_to_num",
    "negative",
    "nextafter",
    "not_equal",
    "positive",
    "pow",
    "real",
    "reciprocal",
    "remainder",
    "round",
    "sign",
    "signbit",
    "square",
    "subtract",
    "trunc",
    "where",
]


def _not_of_halves(name: str) -> Reference:
    return Reference(
        *(f"numpy.{name}", f"jax.numpy.{name}"),
        not_in_jax=HALVES,
    )


# --- arithmetic -----------------------------------------------------------------------


add: Final[OpDef] = elementwise(
    "add",
    "`x1 + x2`; integers wrap.",
    np.add,
    expr.add,
    jvp=(lambda t, out, x, y: t, lambda t, out, x, y: t),
    transpose=(lambda ct, x, y: ct, lambda ct, x, y: ct),
)
subtract: Final[OpDef] = elementwise(
    "subtract",
    "`x1 - x2`; integers wrap.",
    np.subtract,
    expr.sub,
    jvp=(lambda t, out, x, y: t, lambda t, out, x, y: negative(t)),
    transpose=(lambda ct, x, y: ct, lambda ct, x, y: negative(ct)),
)
multiply: Final[OpDef] = elementwise(
    "multiply",
    "`x1 * x2`; integers wrap.",
    np.multiply,
    expr.mul,
    jvp=(lambda t, out, x, y: t * y, lambda t, out, x, y: x * t),
    transpose=(lambda ct, x, y: ct * y, lambda ct, x, y: x * ct),
)
divide: Final[OpDef] = elementwise(
    "divide",
    "`x1 / x2`; integers become the default float.",
    np.divide,
    expr.div,
    promote=floating,
    jvp=(lambda t, out, x, y: t / y, lambda t, out, x, y: -t * (out / y)),
    transpose=(lambda ct, x, y: ct / y, None),
)
negative: Final[OpDef] = elementwise(
    "negative",
    "`-x`; unsigned integers wrap.",
    np.negative,
    lambda x: expr.unary("neg", x),
    arity=1,
    jvp=(lambda t, out, x: negative(t),),
    transpose=(lambda ct, x: negative(ct),),
)
abs: Final[OpDef] = elementwise(
    "abs",
    "The absolute value; the smallest integer of a dtype stays as it is.",
    np.abs,
    lambda x: x if x.dtype.kind == "u" else expr.unary("abs", x),
    arity=1,
    jvp=(lambda t, out, x: t * where(greater_equal(x, 0), 1.0, -1.0),),
)
sign: Final[OpDef] = elementwise(
    "sign",
    "-1, 0 or 1; 0 for -0.0, and NaN for NaN.",
    np.sign,
    scalar.sign,
    arity=1,
    jvp=(None,),
)


def _share(out: Any, operand: Any, other: Any) -> Value:
    """Return an operand's share in an extremum's derivative: 0, 1, or 1/2 if tied."""
    return where(equal(operand, out), where(equal(other, out), 0.5, 1.0), 0.0)


_EXTREMUM: Final = (
    lambda t, out, x, y: t * _share(out, x, y),
    lambda t, out, x, y: t * _share(out, y, x),
)
maximum: Final[OpDef] = elementwise(
    "maximum",
    "The larger of `x1` and `x2`; a NaN if either is one.",
    np.maximum,
    scalar.maximum,
    promote=any_dtype,
    jvp=_EXTREMUM,
)
minimum: Final[OpDef] = elementwise(
    "minimum",
    "The smaller of `x1` and `x2`; a NaN if either is one.",
    np.minimum,
    scalar.minimum,
    promote=any_dtype,
    jvp=_EXTREMUM,
)


def positive(x: Any, /) -> Value:
    """Return `+x`: a copy.

    Raises:
        DTypeError: `x` is a bool.
    """
    [operand] = _numbers("positive", x)
    return apply(copy, operand)


def real(x: Any, /) -> Value:
    """Return the real part of `x`: a copy, as no dtype is complex."""
    return apply(copy, as_value(as_operand("real", 0, x)))


def imag(x: Any, /) -> Value:
    """Return the imaginary part of `x`: zeros, as no dtype is complex."""
    value = as_value(as_operand("imag", 0, x))
    zero = Constant(0, TensorType(value.type.dtype, (), value.type.weak))
    return apply(select, Constant(True, TensorType(dtypes.bool_)), zero, value)


def conj(x: Any, /) -> Value:
    """Return the complex conjugate of `x`: a copy, as no dtype is complex."""
    return apply(copy, as_value(as_operand("conj", 0, x)))


def _numbers(name: str, *args: Any) -> list[Operand]:
    """Return operands of a common numeric dtype, whose shapes broadcast."""
    values = [as_operand(name, i, a) for i, a in enumerate(args)]
    dtype, weak = numeric(name, [promoted_as(v.type) for v in values])
    return aligned(name, [convert_to(v, dtype, weak=weak) for v in values])


def square(x: Any, /) -> Value:
    """Return `x * x`."""
    [operand] = _numbers("square", x)
    return apply(multiply, operand, operand)


def reciprocal(x: Any, /) -> Value:
    """Return `1 / x`; integers become the default float."""
    result: Value = divide(1, x)
    return result


def clip(x: Any, /, min: Any = None, max: Any = None) -> Value:
    """Return `x` limited to `min` from below, then to `max` from above.

    Args:
        x: T[*s].
        min, max: Bounds, which broadcast with `x` and promote; None is no bound. Where
            `min > max`, the result is `max`.

    >>> hf.clip(hf.asarray([-1, 2, 5]), 0, 3)
    Tensor([0, 2, 3], i64[3])
    """
    result = positive(x) if min is None and max is None else x
    if min is not None:
        result = maximum(result, min)
    if max is not None:
        result = minimum(result, max)
    return result


# --- division of integers and floats --------------------------------------------------

unchecked_floor_divide: Final[OpDef] = elementwise(
    "floor_divide",
    "`floor(x1 / x2)`; an integer divided by 0 gives 0.",
    np.floor_divide,
    scalar.floor_divide,
    low=1.0,
    high=6.0,
    jvp=(None, None),
    reference=_not_of_halves("floor_divide"),  # JAX floors a rounded quotient
)
unchecked_remainder: Final[OpDef] = elementwise(
    "remainder",
    "`x1 - x2 * floor(x1 / x2)`; an integer modulo 0 gives 0.",
    np.remainder,
    scalar.remainder,
    low=1.0,
    high=6.0,
    jvp=(
        lambda t, out, x, y: t,
        lambda t, out, x, y: -t * floor_divide(x, y),
    ),
    reference=_not_of_halves("remainder"),
)


class _Requirement(NamedTuple):
    """A condition on second operands, which holds for those that meet a first one.

    kind    the kind of the trap, and so of the error of compiled code
    run     whether it holds for all elements of an array
    holds   the condition on one element, in compiled code
    error   makes the error of eager code, from the operation's name and the operand
    """

    kind: Literal["divide", "power"]
    run: Callable[[Array], Any]
    holds: Callable[[Expr], Expr]
    error: Callable[[str, Array], HopflowError]


_DIVISOR: Final = _Requirement(
    "divide",
    lambda y: y.all(),
    lambda y: compare("ne", y, const(0, y.dtype)),
    lambda name, _: DivisionError(
        f"{name}: an integer is divided by 0. Replace zeros first, as with "
        "`hf.where(y == 0, 1, y)`."
    ),
)
_EXPONENT: Final = _Requirement(
    "power",
    lambda y: (y >= 0).all(),
    lambda y: compare("ge", y, const(0, y.dtype)),
    lambda name, y: PowerError(name, int(y.min())),
)


def _checked_run(
    name: str, run: Callable[..., Any], required: _Requirement
) -> Callable[..., Any]:
    def checked(x: Array, y: Array) -> Any:
        if not required.run(y) and 0 not in broadcast_shapes(name, x.shape, y.shape):
            raise required.error(name, y)
        return run(x, y)

    return checked


def _checked_lower(
    fn: Callable[[Expr, Expr], Expr], required: _Requirement
) -> Callable[..., Pointwise]:
    def lower(types: Sequence[TensorType], x: Lowerable, y: Lowerable) -> Pointwise:
        base: Pointwise = pointwise(fn)(types, x, y)
        if required.kind == "power" and y.type.dtype.kind == "u":
            return base
        # Each element of `y` is tested once, unless the result may be empty.
        result = types[0].shape
        fixed = all(isinstance(n, int) and n > 0 for n in result)
        shape = y.type.shape if fixed else result
        test = Check(
            required.kind,
            shape,
            lambda at: required.holds(elements(y, at)),
            lambda at: (cast(elements(y, at), dtypes.int64),),
        )
        return Pointwise(base.element, checks=(test,))

    return lower


def _checked(
    name: str,
    doc: str,
    run: Callable[..., Any],
    fn: Callable[[Expr, Expr], Expr],
    required: _Requirement,
    low: float = 1.0,
) -> OpDef:
    """Return an operation on integers that traps on some second operands."""
    return elementwise(
        f"checked_{name}",
        doc,
        _checked_run(name, run, required),
        None,
        promote=integral,
        lower=_checked_lower(fn, required),
        effects=frozenset({"trap"}),
        low=low,
        high=6.0,
        reference=Reference(f"numpy.{name}", f"jax.numpy.{name}"),
    )


def _checked_division(op: OpDef, fn: Callable[[Expr, Expr], Expr]) -> OpDef:
    doc = f"{op.run.__doc__} Stops where an integer is divided by 0."
    return _checked(op.name, doc, op.run, fn, _DIVISOR)


checked_floor_divide: Final = _checked_division(
    unchecked_floor_divide, scalar.floor_divide
)
checked_remainder: Final = _checked_division(unchecked_remainder, scalar.remainder)


def _divide(op: OpDef, checked: OpDef, name: str, x1: Any, x2: Any) -> Value:
    x, y = _numbers(name, x1, x2)
    # The operation may trap only if the divisor may be 0.
    safe = not y.type.dtype.is_integer or (isinstance(y, Constant) and y.value != 0)
    return apply(op if safe else checked, x, y)


def floor_divide(x1: Any, x2: Any, /) -> Value:
    """Return `floor(x1 / x2)` of integers or floats.

    Raises:
        DTypeError: both are bools.
        DivisionError: an integer is divided by 0 (in the run).

    >>> hf.floor_divide(hf.asarray([7, -7]), 2)
    Tensor([ 3, -4], i64[2])
    """
    return _divide(unchecked_floor_divide, checked_floor_divide, "floor_divide", x1, x2)


def remainder(x1: Any, x2: Any, /) -> Value:
    """Return `x1 - x2 * floor(x1 / x2)`, which has the sign of `x2`.

    Raises:
        DTypeError: both are bools.
        DivisionError: an integer is divided by 0 (in the run).

    >>> hf.remainder(hf.asarray([7, -7]), 3)
    Tensor([1, 2], i64[2])
    """
    return _divide(unchecked_remainder, checked_remainder, "remainder", x1, x2)


# --- powers ---------------------------------------------------------------------------


def _log_of_base(x: Any) -> Any:
    # By name, as `math` imports this module. For 0 the derivative is 0, as the power
    # is.
    return OPERATIONS["log"](where(equal(x, 0), 1.0, x))


power: Final[OpDef] = elementwise(
    "pow",
    "`x1 ** x2`, of floats.",
    array_function("pow"),
    scalar.math_call("pow"),
    promote=real_floating,
    jvp=(
        lambda t, out, x, y: t * (y * power(x, y - 1)),
        lambda t, out, x, y: t * (_log_of_base(x) * out),
    ),
    ulps=4,
    reference=Reference("numpy.pow", "jax.numpy.pow", jax_ulps=16),
)
integer_power: Final = _checked(
    "pow",
    "`x1 ** x2`, of integers; results wrap. Stops where an exponent is negative.",
    np.power,
    scalar.integer_power,
    _EXPONENT,
    low=0.0,
)


def pow(x1: Any, x2: Any, /) -> Value:
    """Return `x1 ** x2`.

    A power by a Python integer is a chain of multiplications. Powers of integers wrap,
    as products do. A negative power of an integer is an error, as in NumPy, because it
    is no integer.

    Raises:
        DTypeError: both are bools.
        PowerError: an integer has a negative exponent (in the run, if that is a
            tensor).

    >>> hf.pow(hf.asarray([1.0, 2.0, 3.0]), 2)
    Tensor([1., 4., 9.], f32[3])
    """
    base = as_operand("pow", 0, x1)
    if isinstance(x2, SymInt) and base.type.dtype.is_integer:
        if x2.hint is None:
            return _unknown_power(base, x2)
        x2 = int(x2)  # the sign decides whether it is an error
    if type(x2) is not int:
        x, y = _numbers("pow", x1, x2)
        if x.type.dtype.is_integer:
            return apply(integer_power, x, y)
        is_integer = as_operand("pow", 1, x2).type.dtype.is_integer
        if isinstance(x, Value) and is_integer:
            # x**0 has derivative 0, also at x = 0.
            x = where(equal(as_value(y), 0), 1.0, x)
        return apply(power, x, y)
    kinds = [promoted_as(base.type), (dtypes.DEFAULT_INT, True)]
    dtype, weak = numeric("pow", kinds)
    x = convert_to(base, dtype, weak=weak)
    if x2 < 0 and dtype.is_integer:
        raise PowerError("pow", x2)
    if x2 == 0:  # the result is 1, even for NaN
        one = Constant(1, TensorType(dtype, (), weak))
        return apply(select, Constant(True, TensorType(dtypes.bool_)), one, x)
    return _integer_power(x, x2)


def _unknown_power(base: Operand, exponent: SymInt) -> Value:
    """Return an integer to a power that only the run knows. The power is computed in
    int64, whose low bits are those of narrower integers that wrap."""
    operands = [
        convert_to(x, dtypes.int64) for x in (base, as_operand("", 1, exponent))
    ]
    result = apply(integer_power, *operands)
    weak = {"weak": True} if base.type.weak else {}
    return apply(convert, result, dtype=base.type.dtype, **weak)


def _integer_power(x: Operand, exponent: int) -> Value:
    """Return `x` to a non-zero power, by repeated squaring."""
    result: Operand | None = None
    remaining = -exponent if exponent < 0 else exponent
    while remaining:
        if remaining & 1:
            result = x if result is None else apply(multiply, result, x)
        remaining >>= 1
        if remaining:
            x = apply(multiply, x, x)
    assert result is not None
    if exponent < 0:
        one = Constant(1.0, TensorType(result.type.dtype, (), result.type.weak))
        return apply(divide, one, result)
    return apply(copy, result) if exponent == 1 else as_value(result)


copysign: Final[OpDef] = elementwise(
    "copysign",
    "The magnitude of `x1` with the sign of `x2`.",
    np.copysign,
    lambda x, y: expr.binary("copysign", x, y),
    promote=floating,
    jvp=(
        lambda t, out, x, y: t * where(equal(less(x, 0), signbit(y)), 1.0, -1.0),
        None,
    ),
)
nextafter: Final[OpDef] = elementwise(
    "nextafter",
    "The next float from `x1` towards `x2`.",
    array_function("nextafter"),
    scalar.next_after,
    promote=floating,
    widen=False,
    jvp=(lambda t, out, x, y: t, None),  # `x1`, up to one unit in the last place
    reference=_not_of_halves("nextafter"),  # JAX does not have it on CPUs
)


# --- rounding -------------------------------------------------------------------------


def _rounding(name: str, doc: str, run: np.ufunc, machine: str) -> OpDef:
    return elementwise(
        name,
        f"{doc} Integers are returned as they are.",
        lambda x: run(x) if dtypes.as_dtype(x.dtype).is_float else x,
        lambda x: expr.unary(machine, x) if x.dtype.is_float else x,
        arity=1,
        jvp=(None,),
        reference=Reference(f"numpy.{run.__name__}", f"jax.numpy.{name}"),
    )


floor: Final = _rounding(
    "floor", "The largest integer not above `x`.", np.floor, "floor"
)
ceil: Final = _rounding("ceil", "The smallest integer not below `x`.", np.ceil, "ceil")
trunc: Final = _rounding("trunc", "`x` without its fractional part.", np.trunc, "trunc")
round: Final = _rounding(
    "round", "The nearest integer; halves round to even.", np.rint, "rint"
)


def round_to(x: Any, decimals: int) -> Value:
    """Round `x` to decimals as NumPy does: by scaling with a power of 10."""
    operand = as_value(as_operand("round", 0, x))
    if decimals == 0 or (decimals > 0 and not operand.type.dtype.is_float):
        result: Value = round(operand)
        return result
    scale = 10.0 ** (decimals if decimals > 0 else -decimals)
    if decimals > 0:
        return divide(round(multiply(operand, scale)), scale)  # type: ignore[no-any-return]
    tens = multiply(round(divide(operand, scale)), scale)
    return astype(tens, operand.type.dtype, copy=False)


def nan_to_num(
    x: Any, /, *, nan: float = 0.0, posinf: Any = None, neginf: Any = None
) -> Value:
    """Return `x` with NaNs and infinities replaced.

    Args:
        x: A tensor or a number.
        nan: The replacement of NaNs.
        posinf, neginf: The replacements of infinities; None: the largest and the
            smallest finite number of the dtype.

    >>> hf.nan_to_num(hf.asarray([1.0, np.nan]), nan=-1.0)
    Tensor([ 1., -1.], f32[2])
    """
    [operand] = map(as_value, _numbers("nan_to_num", x))
    dtype = operand.type.dtype
    if not dtype.is_float:
        return apply(copy, operand)
    info = dtypes.finfo(dtype)
    upper = info.max if posinf is None else posinf
    lower = info.min if neginf is None else neginf
    result = where(isnan(operand), nan, operand)
    result = where(equal(operand, math.inf), upper, result)
    return where(equal(operand, -math.inf), lower, result)


def isclose(
    x1: Any, x2: Any, /, *, rtol: Any = 1e-5, atol: Any = 1e-8, equal_nan: bool = False
) -> Value:
    """Return whether `|x1 - x2| <= atol + rtol * |x2|`, or both are the same infinity.

    Args:
        x1, x2: T[*s], T[*t], which broadcast.
        rtol, atol: Numbers or tensors, which broadcast with them.
        equal_nan: Whether two NaNs are close.
    """
    x, y = map(as_value, divide.operands((x1, x2)))
    distance = abs(subtract(x, y))
    is_near = less_equal(distance, add(atol, multiply(rtol, abs(y))))
    finite = logical_and(isfinite(x), isfinite(y))
    close = where(finite, is_near, equal(x, y))
    if as_flag("isclose", "equal_nan", equal_nan):
        close = logical_or(close, logical_and(isnan(x), isnan(y)))
    return close
