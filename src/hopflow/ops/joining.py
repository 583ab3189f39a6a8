"""Joining, padding and rolling: concat, stack, unstack, pad, roll."""

from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, Final

import numpy as np

from hopflow import dtypes
from hopflow.bind import Operand as Argument
from hopflow.bind import Value, bind
from hopflow.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    DTypeError,
    ShapeError,
)
from hopflow.graph.core import Constant
from hopflow.graph.types import Shape, TensorType
from hopflow.loop_ir import expr
from hopflow.loop_ir.expr import (
    Expr,
    Index,
    binary,
    compare,
    const,
    extent,
    index,
    select,
)
from hopflow.loop_ir.kernels import Operand, Pointwise
from hopflow.ops import batching
from hopflow.ops.convert import apply, as_value, convert
from hopflow.ops.creation import iota
from hopflow.ops.deferred import matched
from hopflow.ops.elementwise import remainder, subtract
from hopflow.ops.gather import gather_clip
from hopflow.ops.opdef import OpDef, Sample, convert_to
from hopflow.ops.rules import (
    Array,
    any_dtype,
    as_shape,
    as_size,
    is_one,
    is_zero,
    normalize_axis,
    one_of,
)
from hopflow.ops.views import (
    Types,
    as_tensor,
    moved,
    part,
    reshaped,
    several,
    show,
    sliced,
    stored,
    update_slice,
    zeros_of,
)
from hopflow.symbolic.size import Size

# --- concat ---------------------------------------------------------------------------


def _concat_infer(*types: TensorType, axis: int) -> TensorType:
    if not types:
        raise ArgumentValueError("concat: needs at least one tensor, and has none.")
    first = types[0]
    total: Size = 0
    for type_ in types:
        if type_.dtype is not first.dtype:
            raise DTypeError(f"concat: dtypes {first.dtype} and {type_.dtype} differ.")
        if not 0 <= axis < type_.ndim == first.ndim or not all(
            a == axis or n == m
            for a, (n, m) in enumerate(zip(first.shape, type_.shape, strict=True))
        ):
            raise ShapeError(
                f"concat: tensors must have equal sizes but for axis {axis}, and "
                f"{first} and {type_} have not."
            )
        total = total + type_.shape[axis]
    shape = (*first.shape[:axis], total, *first.shape[axis + 1 :])
    return TensorType(first.dtype, shape, all(t.weak for t in types))


def _concat_run(*arrays: Array, axis: int) -> Array:
    """The tensors, concatenated along `axis`."""
    return np.concatenate(arrays, axis=axis)


def _concat_lower(types: Types, *operands: Operand, axis: int) -> Pointwise:
    parts = [o for o in operands if not is_zero(o.type.shape[axis])]
    ends = list(accumulate((o.type.shape[axis] for o in parts), initial=0))

    def local(number: int, at: Index) -> Index:
        """Return the index into one operand."""
        position = expr.sub(at[axis], extent(ends[number]))
        if is_one(parts[number].type.shape[axis]):
            position = index(0)
        return (*at[:axis], position, *at[axis + 1 :])

    def choose(low: int, high: int, at: Index, valid: Expr) -> Expr:
        """Return the element from one of these operands, if `valid` holds."""
        if high - low == 1:
            return parts[low].where(valid, local(low, at), zero)
        middle = (low + high) // 2
        before = compare("lt", at[axis], extent(ends[middle]))
        after = expr.unary("not", before)
        first = choose(low, middle, at, binary("and", valid, before))
        second = choose(middle, high, at, binary("and", valid, after))
        return select(before, first, second)

    if not parts:  # the result is empty
        return Pointwise(lambda at: operands[0][at], is_view=True)
    zero, always = const(0, types[0].dtype), const(True, dtypes.bool_)
    return Pointwise(lambda at: choose(0, len(parts), at, always))


def _concat_transpose(cotangents: Any, *operands: Any, axis: int) -> list[Any]:
    [ct] = cotangents
    sizes = [o.type.shape[axis] for o in operands]
    starts = accumulate(sizes, initial=0)
    return [part(ct, axis, at, n) for at, n in zip(starts, sizes, strict=False)]


concat_op: Final = OpDef(
    name="concat",
    promote=any_dtype,
    infer=_concat_infer,  # T[*s, n, *t], T[*s, m, *t] -> T[*s, n + m, *t]
    run=_concat_run,
    lower=_concat_lower,
    jvp="linear",
    transpose=_concat_transpose,
    batch=batching.per_example(axis=batching.of_axis),
    samples=(
        Sample(("T[2, 3]", "T[2, 1]", "T[2, 2]"), {"axis": 1}, dtypes.ALL),
        Sample(("T[2]", "T[0]", "T[3]"), {"axis": 0}),
        Sample(("T[0]",), {"axis": 0}),
    ),
)


def concat(arrays: Sequence[Any], /, *, axis: int | None = 0) -> Value:
    """Join tensors along an existing axis.

    Args:
        arrays: One or more tensors T[*s]; they are promoted to a common dtype.
        axis: The axis along which sizes may differ; None: they are flattened first.

    Raises:
        ArgumentValueError: `arrays` is empty.
        AxisError: the tensors have no such axis.
        ShapeError: their sizes along another axis differ.

    >>> hf.concat([hf.asarray([1, 2]), hf.asarray([3])])
    Tensor([1, 2, 3], i64[3])
    """
    tensors = _tensors("concat", arrays)
    if axis is None:
        return _call(concat_op, [reshaped(t, (t.type.size,)) for t in tensors], axis=0)
    axis = normalize_axis("concat", axis, tensors[0].ndim)
    others = [a for a in range(tensors[0].ndim) if a != axis]
    return _call(concat_op, _alike("concat", tensors, others), axis=axis)


def _call(op: OpDef, tensors: Sequence[Any], **params: Any) -> Value:
    result: Value = op(*tensors, **params)
    return result


def _tensors(name: str, arrays: Any) -> list[Any]:
    if isinstance(arrays, Value):  # a stack of tensors
        arrays = unstack(arrays)
    if not isinstance(arrays, Sequence | np.ndarray) or isinstance(
        arrays, str | bytes | range
    ):
        raise ArgumentTypeError(
            f"{name}: `arrays` must be a sequence of tensors, and is "
            f"`{type(arrays).__name__}`."
        )
    if not len(arrays):
        raise ArgumentValueError(f"{name}: `arrays` must have a tensor, and is empty.")
    return [as_tensor(name, a, i) for i, a in enumerate(arrays)]


def _alike(name: str, tensors: list[Any], axes: Iterable[int]) -> list[Any]:
    """Return tensors of equal sizes along axes; the run checks unbacked ones."""
    if all(t.ndim == tensors[0].ndim for t in tensors):
        for axis in axes:
            tensors = matched(name, tensors, [axis] * len(tensors))
    return tensors


def stack(arrays: Sequence[Any], /, *, axis: int = 0) -> Value:
    """Join tensors of equal shape along a new axis: T[*s], ... -> T[n, *s] for axis 0.

    Raises:
        ArgumentValueError: `arrays` is empty.
        AxisError: the result has no such axis.
        ShapeError: the shapes differ.

    >>> hf.stack([hf.asarray([1, 2]), hf.asarray([3, 4])], axis=1)
    Tensor([[1, 3],
            [2, 4]], i64[2, 2])
    """
    tensors = _tensors("stack", arrays)
    tensors = _alike("stack", tensors, range(tensors[0].ndim))
    first = tensors[0]
    for tensor in tensors:
        if tensor.ndim != first.ndim or not all(
            n == m for n, m in zip(first.shape, tensor.shape, strict=True)
        ):
            raise ShapeError(
                "stack: tensors must have one shape, and have "
                f"{show(first.shape)} and {show(tensor.shape)}."
            )
    axis = normalize_axis("stack", axis, first.ndim + 1)
    shape = (*first.shape[:axis], 1, *first.shape[axis:])
    return _call(concat_op, [reshaped(t, shape) for t in tensors], axis=axis)


def unstack(x: Any, /, *, axis: int = 0) -> tuple[Value, ...]:
    """Return the slices of `x` along `axis`, each without that axis, as views.

    Raises:
        AxisError: `x` has no such axis.
        DataDependentError: the size of the axis is only known at run time.
    """
    x = as_tensor("unstack", x)
    axis = normalize_axis("unstack", axis, x.ndim)
    n = x.shape[axis]
    rest = (*x.shape[:axis], *x.shape[axis + 1 :])
    return tuple(reshaped(part(x, axis, i, 1), rest) for i in range(n))


# --- pad ------------------------------------------------------------------------------


def _pad_infer(
    x: TensorType, value: TensorType, *, before: Shape, after: Shape
) -> TensorType:
    if not len(before) == len(after) == x.ndim or value.ndim:
        raise ShapeError(f"pad: {x} needs {x.ndim} widths on each side, and a scalar.")
    if value.dtype is not x.dtype:
        raise DTypeError(f"pad: {x} cannot be padded with {value}.")
    sizes = zip(x.shape, before, after, strict=True)
    return x.with_shape([n + b + a for n, b, a in sizes]).strong()


def _pad_run(
    x: Array, value: Array, *, before: tuple[int, ...], after: tuple[int, ...]
) -> Array:
    """`x` padded with `value`."""
    shape = tuple(b + n + a for n, b, a in zip(x.shape, before, after, strict=True))
    result = np.full(shape, value, x.dtype)
    inner: Any = tuple(slice(b, b + n) for n, b in zip(x.shape, before, strict=True))
    result[inner] = x
    return result


def _pad_lower(
    _types: Types, x: Operand, value: Operand, *, before: Shape, after: Shape
) -> Pointwise:
    def element(at: Index) -> Expr:
        tests, source = [], []
        for i, n, b, a in zip(at, x.type.shape, before, after, strict=True):
            if not is_zero(b):
                tests.append(compare("ge", i, extent(b)))
            if not is_zero(a):
                tests.append(compare("lt", i, extent(b + n)))
            source.append(expr.sub(i, extent(b)))
        return x.where(expr.all_of(tests), tuple(source), value[()])

    if any(map(is_zero, x.type.shape)):
        return Pointwise(lambda _: value[()])
    return Pointwise(element)


def _inner(ct: Any, x: Any, _value: Any, *, before: Shape, **_: Shape) -> Any:
    return sliced(ct, before, x.type.shape, (1,) * len(before))


def _pad_batch(
    op: OpDef,
    size: Size,
    batched: tuple[bool, ...],
    x: Argument,
    value: Argument,
    *,
    before: Shape,
    after: Shape,
) -> Sequence[Value]:
    widths = {"before": (0, *before), "after": (0, *after)}
    x = batching.in_batch(size, batched[0], x)
    if not batched[1]:
        return bind(op, [x, value], widths)
    # Pad with 0, then select the values of each batch element.
    inside = batching.op_of("full", Constant(True, _BOOL), shape=x.type.shape)
    [inside] = bind(op, [inside, Constant(False, _BOOL)], widths)
    [padded] = bind(op, [x, Constant(0, TensorType(x.type.dtype))], widths)
    value = batching.after_examples(value, len(before))
    return [batching.op_of("where", inside, padded, value)]


_BOOL: Final = TensorType(dtypes.bool_)


_pad: Final = OpDef(
    name="pad",
    promote=None,
    infer=_pad_infer,  # T[*s], T[] -> T[*(before + s + after)]
    run=_pad_run,
    lower=_pad_lower,
    jvp="linear",
    transpose=(
        _inner,
        # Zero the inner part instead of subtracting its sum, which would round.
        lambda ct, x, value, before, after: update_slice(
            ct, zeros_of(x), starts=before, steps=(1,) * len(before)
        ),
    ),
    batch=_pad_batch,
    samples=(
        Sample(("T[2, 3]", "T[]"), {"before": (1, 0), "after": (2, 1)}, dtypes.ALL),
        Sample(("T[0]", "T[]"), {"before": (1,), "after": (2,)}),
        Sample(("T[]", "T[]"), {"before": (), "after": ()}),
    ),
)


def pad(
    x: Any, pad_width: Any, mode: str = "constant", *, constant_values: Any = 0
) -> Value:
    """Return `x` padded with `constant_values`.

    Args:
        x: T[*s].
        pad_width: The number of elements to add: a number for all sides, a pair
            (before, after) for all axes, or a pair for each axis.
        mode: Only "constant".
        constant_values: The scalar to pad with.

    Raises:
        ArgumentValueError: the mode is another, a width is negative, or there is not a
            pair for each axis.
        DTypeError: the dtype of `x` cannot hold the scalar.
        ShapeError: `constant_values` is no scalar.

    >>> hf.pad(hf.asarray([1, 2]), (1, 0))
    Tensor([0, 1, 2], i64[3])
    """
    one_of("pad", "mode", mode, ("constant",))
    x = as_tensor("pad", x)
    value = stored("pad", constant_values, x.type.dtype, "constant_values")
    if value.type.ndim:
        raise ShapeError(
            f"pad: `constant_values` must be a scalar, and is {value.type}."
        )
    pairs = _pad_pairs(pad_width, x.ndim)
    return apply(
        _pad,
        x,
        value,
        before=tuple(p[0] for p in pairs),
        after=tuple(p[1] for p in pairs),
    )


def _pad_pairs(pad_width: Any, ndim: int) -> list[tuple[Size, Size]]:
    if not isinstance(pad_width, tuple | list):
        n = as_size("pad", pad_width, "pad_width")
        return [(n, n)] * ndim
    if len(pad_width) == 2 and not any(isinstance(p, tuple | list) for p in pad_width):
        before, after = (as_size("pad", n, "pad_width") for n in pad_width)
        return [(before, after)] * ndim
    pairs = [as_shape("pad", p, "pad_width") for p in pad_width]
    if len(pairs) == 1:
        pairs *= ndim
    if len(pairs) != ndim or any(len(p) not in (1, 2) for p in pairs):
        raise ArgumentValueError(
            f"pad: `pad_width` must have a pair for each of {ndim} axes, and is "
            f"{pad_width}."
        )
    return [(p[0], p[-1]) for p in pairs]


# --- roll -----------------------------------------------------------------------------


def _roll_infer(x: TensorType, shift: TensorType, **_: int) -> TensorType:
    if not shift.dtype.is_integer or shift.ndim:
        raise DTypeError(f"roll: `shift` must be an integer scalar, and is {shift}.")
    return x


def _roll_run(x: Array, shift: Array, *, axis: int) -> Array:
    """`x` shifted cyclically by `shift` along `axis`."""
    return np.roll(x, int(shift), axis)


def _roll_lower(types: Types, x: Operand, shift: Operand, *, axis: int) -> Pointwise:
    # If the size may be 0 in the run, nothing is read then, but the remainder must not
    # trap.
    n = x.type.shape[axis]
    period = extent(n) if isinstance(n, int) else binary("max", extent(n), index(1))
    zero = const(0, types[0].dtype)

    def element(at: Index) -> Expr:
        """Select from two contiguous runs, each of which can be vectorised."""
        amount = expr.floor_mod(expr.cast(shift[()], dtypes.int64), period)
        position = expr.sub(at[axis], amount)
        entered = compare("lt", at[axis], amount)
        around = (*at[:axis], expr.add(position, period), *at[axis + 1 :])
        inner = (*at[:axis], position, *at[axis + 1 :])
        stayed = x.where(expr.unary("not", entered), inner, zero)
        return select(entered, x.where(entered, around, zero), stayed)

    if is_zero(n):
        return Pointwise(lambda at: x[at], is_view=True)
    return Pointwise(element)


def _wide(shift: Any) -> Any:
    """Return a shift in int64, which can be negated."""
    return apply(convert, shift, dtype=dtypes.int64)


def _roll_batch(
    op: OpDef,
    size: Size,
    batched: tuple[bool, ...],
    x: Argument,
    shift: Argument,
    *,
    axis: int,
) -> Sequence[Value]:
    if not batched[1]:
        return bind(op, [x, shift], {"axis": axis + 1})
    x = batching.in_batch(size, batched[0], x)
    n = x.type.shape[axis + 1]
    if is_zero(n):
        return [as_value(x)]
    at = apply(iota, shape=(1, n), axis=1, dtype=dtypes.int64)
    shift = batching.after_examples(convert_to(shift, dtypes.int64), 1)
    source = remainder(subtract(at, shift), n)
    rolled = apply(gather_clip, x, source, axes=(axis + 1,), batch=1)
    return [moved(rolled, 1, axis + 1)]


_roll: Final[OpDef] = OpDef(
    name="roll",
    promote=None,
    infer=_roll_infer,  # T[*s], i[] -> T[*s]
    run=_roll_run,
    lower=_roll_lower,
    jvp="linear",
    transpose=(
        lambda ct, x, shift, axis: _roll(ct, -_wide(shift), axis=axis),
        None,
    ),
    batch=_roll_batch,
    samples=(
        Sample(("T[2, 5]", "i64[]"), {"axis": 1}, dtypes.ALL, -9.0, 9.0),
        Sample(("T[0]", "i32[]"), {"axis": 0}),
    ),
)


def roll(x: Any, /, shift: Any, *, axis: Any = None) -> Value:
    """Shift elements cyclically along axes.

    Args:
        x: T[*s].
        shift: An integer (or an integer scalar tensor), or one for each axis.
        axis: An axis or a tuple of axes; None: along the flattened tensor.

    Raises:
        ArgumentValueError: there are not as many shifts as axes.
        AxisError: `x` has no such axis.
        DTypeError: a shift is no integer.

    >>> hf.roll(hf.asarray([1, 2, 3]), 1)
    Tensor([3, 1, 2], i64[3])
    """
    x = as_tensor("roll", x)
    if axis is None:
        if isinstance(shift, tuple | list):
            shift = _only(shift)
        flat: Any = roll(reshaped(x, (x.type.size,)), shift, axis=0)
        return reshaped(flat, x.shape)  # type: ignore[no-any-return]
    axes = [normalize_axis("roll", a, x.ndim) for a in several(axis)]
    shifts = several(shift)
    if len(shifts) == 1:
        shifts *= len(axes)
    if len(axes) == 1:
        axes *= len(shifts)
    if len(shifts) != len(axes):
        raise ArgumentValueError(
            f"roll: {len(shifts)} shifts for {len(axes)} axes. Give one for each."
        )
    for amount, along in zip(shifts, axes, strict=True):
        x = _roll(x, amount, axis=along)
    return x  # type: ignore[no-any-return]


def _only(shift: Sequence[Any]) -> Any:
    if len(shift) != 1:
        raise ArgumentValueError(
            f"roll: {len(shift)} shifts for a flattened tensor. Name as many axes."
        )
    return shift[0]
