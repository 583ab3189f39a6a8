"""Rules that families of operations share: promotion, types, shapes, arguments.

`elementwise` makes the record of an elementwise operation from its NumPy implementation
and a scalar expression; other families use the parts.
"""

import operator
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Final, TypeAlias

import numpy as np

from hopflow import dtypes
from hopflow.bind import Value, current
from hopflow.devices import DEVICES
from hopflow.dtypes import DType, DTypeLike
from hopflow.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    AxisError,
    DeviceError,
    DTypeError,
    ShapeError,
)
from hopflow.graph.types import Shape, TensorType, common_shape, is_one, is_zero
from hopflow.loop_ir.expr import Expr, Index
from hopflow.loop_ir.kernels import Operand, Pointwise, elements
from hopflow.ops import batching
from hopflow.ops.deferred import aligned
from hopflow.ops.opdef import Infer, OpDef, Promotion, Reference, Rules, Sample
from hopflow.ops.sizes import agreed, less
from hopflow.symbolic.boolean import SymBool
from hopflow.symbolic.size import Size, SymInt, free_symbols

__all__ = [
    "Array",
    "any_dtype",
    "as_flag",
    "as_integer",
    "as_shape",
    "as_size",
    "as_symbol",
    "boolean",
    "broadcast",
    "broadcast_shapes",
    "check_device",
    "comparison",
    "elementwise",
    "floating",
    "integral",
    "integral_or_boolean",
    "is_one",
    "is_zero",
    "normalize_axes",
    "normalize_axis",
    "numeric",
    "one_of",
    "optional_dtype",
    "pointwise",
    "real_floating",
    "require_dtype",
    "required_dtype",
    "same",
]

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
Typed: TypeAlias = Sequence[tuple[DType, bool]]
"""Operands as (dtype, weak)."""


# --- promotion ------------------------------------------------------------------------


NUMERIC: Final = dtypes.INTEGERS + dtypes.FLOATS
BITS: Final = (dtypes.bool_, *dtypes.INTEGERS)

_KINDS: Final[dict[tuple[DType, ...], str]] = {
    dtypes.ALL: "of any dtype",
    NUMERIC: "numeric",
    dtypes.FLOATS: "floating",
    dtypes.INTEGERS: "integers",
    BITS: "integers or bools",
    (dtypes.bool_,): "bools",
}


@cache
def _members(allowed: tuple[DType, ...]) -> frozenset[DType]:
    """Return dtypes as a set: a tuple would be compared with one after another."""
    return frozenset(allowed)


def _kind(allowed: tuple[DType, ...]) -> str:
    return _KINDS.get(allowed) or " or ".join(d.name for d in allowed)


def require_dtype(
    name: str, types: Sequence[TensorType], allowed: tuple[DType, ...]
) -> None:
    """Check that every operand's dtype is one of `allowed`.

    Raises:
        DTypeError: a dtype is not allowed.
    """
    members = _members(allowed)
    for type_ in types:
        if type_.dtype not in members:
            raise _wrong_kind(name, [t.dtype for t in types], allowed)


def _wrong_kind(
    name: str, actual: Sequence[DType], allowed: tuple[DType, ...]
) -> DTypeError:
    are = " and ".join(d.name for d in actual)
    return DTypeError(
        f"{name}: operands must be {_kind(allowed)}, and are {are}. "
        "Convert them with `hf.astype`."
    )


def _promotion(allowed: tuple[DType, ...], *, to_float: bool = False) -> Promotion:
    """Return the promotion to a common dtype, which must be one of `allowed`."""

    def promote(
        name: str, operands: Sequence[tuple[DType, bool]]
    ) -> tuple[DType, bool]:
        dtype, weak = dtypes.promote(*operands)
        if to_float and not dtype.is_float:
            dtype = dtypes.DEFAULT_FLOAT
        if dtype not in _members(allowed):
            raise _wrong_kind(name, [d for d, _ in operands], allowed)
        return dtype, weak

    return promote


any_dtype: Final = _promotion(dtypes.ALL)
same: Final = any_dtype
numeric: Final = _promotion(NUMERIC)
real_floating: Final = _promotion(dtypes.FLOATS)
"""Only floats: an integer is an error."""
floating: Final = _promotion(dtypes.FLOATS, to_float=True)
"""Integers and bools become the default float, as in JAX."""
integral: Final = _promotion(dtypes.INTEGERS)
integral_or_boolean: Final = _promotion(BITS)
boolean: Final = _promotion((dtypes.bool_,))

_ALLOWED: Final[dict[Promotion, tuple[DType, ...]]] = {
    any_dtype: dtypes.ALL,
    numeric: NUMERIC,
    real_floating: dtypes.FLOATS,
    floating: dtypes.FLOATS,
    integral: dtypes.INTEGERS,
    integral_or_boolean: BITS,
    boolean: (dtypes.bool_,),
}


def required_dtype(name: str, dtype: DTypeLike, argument: str = "dtype") -> DType:
    """Return the dtype that an argument of a public function names.

    Raises:
        DTypeError: it names none. A tensor has a dtype, but does not name it.
    """
    if type(dtype) is DType:
        return dtype
    if not isinstance(dtype, np.dtype | str | type):
        raise DTypeError(
            f"{name}: `{argument}` must be a dtype, such as `hf.float32`, and is "
            f"`{type(dtype).__name__}`."
        )
    try:
        return dtypes.as_dtype(dtype)
    except DTypeError as error:
        raise DTypeError(f"{name}: `{argument}`: {error}") from None


def optional_dtype(name: str, dtype: DTypeLike | None, default: DType) -> DType:
    """Return the `dtype=` argument of the function `name`, or `default` for None.

    Raises:
        DTypeError: there is no such dtype.
    """
    return default if dtype is None else required_dtype(name, dtype)


# --- types and shapes -----------------------------------------------------------------


def broadcast_shapes(name: str, *shapes: Shape) -> Shape:
    """Return the shape that `shapes` broadcast to, for the operation `name`.

    Raises:
        ShapeError: two sizes differ, and neither is 1.
        DataDependentError: only a run can tell whether two sizes agree.
    """
    if (shared := common_shape(shapes)) is not None:
        return shared
    ndim = max(map(len, shapes), default=0)
    result: list[Size] = [1] * ndim
    for shape in shapes:
        offset = ndim - len(shape)
        for axis, size in enumerate(shape, start=offset):
            other = result[axis]
            common = agreed(other, size)
            if common is None:
                shown = " and ".join(f"[{', '.join(map(str, s))}]" for s in shapes)
                raise ShapeError(
                    f"{name}: shapes {shown} do not broadcast: along axis "
                    f"{axis - ndim}, {other} != {size}. Sizes must agree, or be 1; "
                    "add an axis of size 1 with `hf.expand_dims`."
                )
            result[axis] = common
    return tuple(result)


def broadcast(
    name: str,
    allowed: tuple[DType, ...] = dtypes.ALL,
    *,
    arity: int | None = None,
    result: DType | None = None,
) -> Infer:
    """Return the `infer` of elementwise operations: T[*s], T[*t] -> T[*u].

    Args:
        allowed: The dtypes that T may be.
        arity: The number of operands; None: one or more.
        result: The result's dtype, if it is not T.
    """

    def infer(*types: TensorType, **options: Any) -> TensorType:
        if options:  # NumPy's function may have them
            raise ArgumentTypeError(f"{name}: has no argument `{next(iter(options))}`.")
        check_arity(name, types, arity)
        require_dtype(name, types, allowed)
        dtype = types[0].dtype
        if any(t.dtype is not dtype for t in types):
            shown = " and ".join(t.dtype.name for t in types)
            raise DTypeError(f"{name}: operands must have one dtype, and have {shown}.")
        return TensorType(
            result or dtype,
            broadcast_shapes(name, *(t.shape for t in types)),
            all(t.weak for t in types) and result is None,
        )

    return infer


def comparison(name: str, allowed: tuple[DType, ...] = dtypes.ALL) -> Infer:
    """Return the `infer` of a comparison: T[*s], T[*t] -> bool[*u]."""
    return broadcast(name, allowed, arity=2, result=dtypes.bool_)


def check_arity(name: str, types: Sequence[TensorType], arity: int | None) -> None:
    """Check the number of operands.

    Raises:
        ArgumentTypeError: it is not `arity` (or it is 0).
    """
    if (not types) if arity is None else len(types) != arity:
        expected = "at least one operand" if arity is None else f"{arity} operand(s)"
        raise ArgumentTypeError(
            f"{name}: takes {expected}, and was given {len(types)}."
        )


# --- arguments of public functions ----------------------------------------------------


def normalize_axis(name: str, axis: Any, ndim: int, argument: str = "axis") -> int:
    """Return `axis`, counted from the front.

    Raises:
        ArgumentTypeError: it is not an integer.
        AxisError: a tensor of `ndim` axes has no such axis.
    """
    number = as_integer(name, argument, axis)
    if not -ndim <= number < ndim:
        has = f"axes {-ndim} to {ndim - 1}" if ndim else "no axes"
        raise AxisError(
            f"{name}: `{argument}` is {number}, and a tensor of rank {ndim} has {has}."
        )
    return number % ndim


def normalize_axes(
    name: str, axis: Any, ndim: int, argument: str = "axis"
) -> tuple[int, ...]:
    """Return `axis` (an int, several, or None for all) as axes counted from the front.

    Raises:
        ArgumentTypeError: it is none of these.
        AxisError: a tensor of `ndim` axes has no such axis, or one is named twice.
    """
    if axis is None:
        return tuple(range(ndim))
    if not isinstance(axis, tuple | list):
        return (normalize_axis(name, axis, ndim, argument),)
    axes = tuple(normalize_axis(name, a, ndim, argument) for a in axis)
    if len(set(axes)) != len(axes):
        raise AxisError(f"{name}: `{argument}` is {axis}, and names an axis twice.")
    return axes


def as_integer(name: str, argument: str, value: Any) -> int:
    """Return an argument as a Python int; a bool is no integer.

    Raises:
        ArgumentTypeError: it is not an integer.
    """
    if not isinstance(value, bool | np.bool_):
        try:
            return operator.index(value)
        except TypeError:
            pass
    raise ArgumentTypeError(
        f"{name}: `{argument}` must be an int, and is `{type(value).__name__}`."
    )


def as_flag(name: str, argument: str, value: Any) -> bool:
    """Return an argument as a Python bool.

    Raises:
        ArgumentTypeError: it is not a bool.
    """
    if not isinstance(value, bool | np.bool_):
        raise ArgumentTypeError(
            f"{name}: `{argument}` must be a bool, and is `{type(value).__name__}`."
        )
    return bool(value)


def one_of(name: str, argument: str, value: Any, choices: Sequence[str]) -> str:
    """Return an argument that must be one of `choices`.

    Raises:
        ArgumentTypeError: it is not a string.
        ArgumentValueError: it is another string.
    """
    *most, last = (repr(c) for c in choices)
    words = f"{', '.join(most)} or {last}" if most else last
    if not isinstance(value, str):
        raise ArgumentTypeError(
            f"{name}: `{argument}` must be {words}, and is `{type(value).__name__}`."
        )
    if value not in choices:
        raise ArgumentValueError(
            f"{name}: `{argument}` must be {words}, and is {value!r}."
        )
    return value


def as_symbol(name: str, argument: str, value: Any) -> int | SymInt:
    """Return an integer, or a tensor that holds one, as an int or a symbolic number.

    Raises:
        ArgumentTypeError: it is neither.
    """
    if isinstance(value, Value):
        if value.shape or not value.type.dtype.is_integer:
            raise ArgumentTypeError(
                f"{name}: `{argument}` must be an int, or an integer tensor of no "
                f"axes, and is a tensor {value.type}."
            )
        value = current().symbol_of(value)
    return value if isinstance(value, SymInt) else as_integer(name, argument, value)


def as_size(name: str, size: Any, argument: str = "shape") -> Size:
    """Return a size as a non-negative int or a symbolic size.

    Raises:
        ArgumentTypeError: it is not an integer.
        ArgumentValueError: it is negative.
    """
    number = as_symbol(name, argument, size)
    if isinstance(number, SymInt):
        _expect_size(name, number, argument)
    elif number < 0:
        raise _negative(name, argument, number)
    return number


def _expect_size(name: str, size: SymInt, argument: str) -> None:
    """Ensure that a symbolic size is non-negative: by facts, a guard, or the run."""
    negative: Any = less(size, 0)
    if negative is None:
        if current().is_eager or all(s.env is None for s in free_symbols(size)):
            return  # the caller, or the graph's creator, guarantees it
        negative = size < 0
        if isinstance(negative, SymBool) and size.hint is None:
            message = f"{name}: `{argument}` must not be negative"
            current().expect(~negative, message)
            return
    if negative:
        raise _negative(name, argument, size)


def _negative(name: str, argument: str, size: Size) -> ArgumentValueError:
    return ArgumentValueError(
        f"{name}: `{argument}` must not be negative, and has {size}."
    )


def as_shape(name: str, shape: Any, argument: str = "shape") -> Shape:
    """Return a shape as a tuple of sizes; a single size is a shape too.

    Raises:
        ArgumentTypeError: a size is not an integer.
        ArgumentValueError: a size is negative.
    """
    if isinstance(shape, tuple | list):
        return tuple(as_size(name, n, argument) for n in shape)
    return (as_size(name, shape, argument),)


def check_device(name: str, device: Any) -> None:
    """Check the `device=` argument of a function that makes a tensor.

    Raises:
        DeviceError: it is neither None nor the name of a device.
    """
    names = [entry.name for entry in DEVICES]
    if device is not None and not (isinstance(device, str) and device in names):
        raise DeviceError(
            f"{name}: there is no device {device!r}; tensors live on "
            f"{' or '.join(map(repr, names))}."
        )


# --- elementwise records --------------------------------------------------------------


def pointwise(fn: Callable[..., Expr]) -> Callable[..., Pointwise]:
    """Return the `lower` of an elementwise operation whose scalar implementation is
    `fn(*expressions, **params)`; operands are broadcast."""

    def lower(
        _types: Sequence[TensorType], *operands: Operand, **params: Any
    ) -> Pointwise:
        def element(at: Index) -> Expr:
            return fn(*(elements(o, at) for o in operands), **params)

        return Pointwise(element)

    return lower


def in_float32(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return `run` with 16-bit floats computed in float32 and not yet rounded back."""

    def widened(*arrays: Array, **params: Any) -> Any:
        for array in arrays:
            if array.itemsize == 2 and array.dtype in _HALVES:
                break
        else:
            return run(*arrays, **params)
        wide = [a.astype(np.float32) if a.dtype in _HALVES else a for a in arrays]
        return run(*wide, **params)

    return widened


_HALVES: Final = frozenset({dtypes.float16.dtype, dtypes.bfloat16.dtype})


def _typed_run(
    run: Callable[..., Any], result: DType | None, doc: str
) -> Callable[..., Array]:
    """Return `run` with results of dtype `result`; None: the operands' dtype."""

    def run_as(*arrays: Array, **params: Any) -> Array:
        value = np.asarray(run(*arrays, **params))
        dtype = result.dtype if result else arrays[0].dtype
        return value if value.dtype is dtype else value.astype(dtype, copy=False)

    run_as.__doc__ = doc
    return run_as


_SAMPLE_SHAPES: Final = {
    1: (("T[3, 4]",), ("T[]",), ("T[2, 0]",)),
    2: (("T[3, 4]", "T[4]"), ("T[2, 1]", "T[3]"), ("T[]", "T[0]")),
    3: (("T[3, 4]", "T[4]", "T[]"), ("T[0]", "T[1]", "T[]")),
}


def _samples(arity: int, *rest: Any) -> tuple[Sample, ...]:
    return tuple([Sample(shapes, *rest) for shapes in _SAMPLE_SHAPES[arity]])


def elementwise(
    name: str,
    doc: str,
    run: Callable[..., Any],
    fn: Callable[..., Expr] | None,
    *,
    arity: int = 2,
    promote: Promotion = numeric,
    result: DType | None = None,
    low: float = -3.0,
    high: float = 3.0,
    widen: bool = True,
    lower: Callable[..., Any] | None = None,
    effects: frozenset[str] = frozenset(),
    params: dict[str, Any] | None = None,
    compares: bool = False,
    jvp: Rules | None = None,
    transpose: Rules | None = None,
    ulps: int = 0,
    reference: Reference | None = None,
) -> OpDef:
    """Return the record of an elementwise operation.

    Args:
        name: Its unique name.
        doc: Its docstring.
        run: Its implementation on NumPy arrays of one dtype.
        fn: Its implementation on scalar expressions; None if `lower` is passed.
        arity: The number of operands.
        promote: One of this module's promotions.
        result: The result's dtype, if it is not the operands'.
        low, high: The range of values in samples.
        widen: Whether to pass 16-bit floats to `run` as float32.
        lower: A complete lowering rule, in place of `fn`.
        params: The static parameters of the samples.
        effects, compares, jvp, transpose, ulps: See `OpDef`.
        reference: See `OpDef`; None: those of this name in NumPy and `jax.numpy`.
    """
    allowed = _ALLOWED[promote]
    run_as = _typed_run(in_float32(run) if widen else run, result, doc)
    if lower is None:
        assert fn is not None
        lower = pointwise(fn)
    return OpDef(
        name=name,
        promote=promote,
        infer=broadcast(name, allowed, arity=arity, result=result),
        run=run_as,
        lower=lower,
        effects=effects,
        compares=compares,
        jvp=jvp,
        transpose=transpose,
        align=aligned if arity > 1 else None,
        is_cheap=True,
        batch=batching.pointwise,
        ulps=ulps,
        reference=reference or Reference(f"numpy.{name}", f"jax.numpy.{name}"),
        samples=_samples(arity, params or {}, allowed, low, high),
    )
