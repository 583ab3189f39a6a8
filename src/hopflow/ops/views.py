"""Primitives that move elements: reshape, transpose, broadcast_to, slice, update_slice.

All but `update_slice`, which writes through a slice, are views: they share memory with
their operand, and their `unview` writes a new value of the view back. `manipulation`
has the public functions.
"""

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from operator import mul as times
from typing import Any, Final

import numpy as np

from hopflow import dtypes
from hopflow.bind import Operand as Argument
from hopflow.bind import Value, bind, current
from hopflow.errors import (
    AxisError,
    DTypeError,
    IndexingError,
    ReadOnlyError,
    ShapeError,
    TraceError,
)
from hopflow.graph.core import Constant
from hopflow.graph.types import Shape, TensorType, same_size
from hopflow.loop_ir.expr import Expr, Index, add, binary, div, extent, index, mul
from hopflow.loop_ir.kernels import Operand, Pointwise, Scatter, elements
from hopflow.ops import batching
from hopflow.ops.convert import apply, as_value
from hopflow.ops.deferred import fitted
from hopflow.ops.opdef import OpDef, Sample, as_default, as_operand, convert_to
from hopflow.ops.rules import Array, is_one, is_zero, require_dtype
from hopflow.ops.sizes import fits
from hopflow.symbolic.size import Size, SymInt

Types = Sequence[TensorType]


def show(shape: Shape) -> str:
    """Return a shape as messages print it."""
    return f"[{', '.join(map(str, shape))}]"


# --- reshape --------------------------------------------------------------------------


def _reshape_infer(x: TensorType, *, shape: Shape) -> TensorType:
    total: Size = prod(shape, start=1)
    if not total == x.size:  # an undecidable comparison raises
        raise ShapeError(
            f"reshape: a tensor of shape {show(x.shape)} has {x.size} elements, and "
            f"`shape` {show(shape)} has {total}. Both must have the same number."
        )
    return x.with_shape(shape)


def _reshape_run(x: Array, *, shape: tuple[int, ...]) -> Array:
    """The elements of `x`, in row-major order, in another shape."""
    return np.asarray(x).reshape(shape)


def reshape_groups(
    new: Shape, old: Shape
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return the shortest runs of axes of `new` and `old` with equal element counts.

    Axes of size 1 are in no run. An index into `new` is converted to one into `old` run
    by run, so that only merged or split axes cost arithmetic. If equality of sizes is
    unknown (two symbols), the last run has all the remaining axes.
    """
    news = [axis for axis, n in enumerate(new) if not is_one(n)]
    olds = [axis for axis, n in enumerate(old) if not is_one(n)]
    new_totals = list(accumulate((new[a] for a in news), times))
    old_totals = list(accumulate((old[a] for a in olds), times))
    groups = []
    begin_new = begin_old = 0
    for end_new, total in enumerate(new_totals, start=1):
        for end_old in range(begin_old + 1, len(olds) + 1):
            if same_size(total, old_totals[end_old - 1]):
                groups.append(
                    (tuple(news[begin_new:end_new]), tuple(olds[begin_old:end_old]))
                )
                begin_new, begin_old = end_new, end_old
                break
    if begin_new < len(news) and begin_old < len(olds):
        groups.append((tuple(news[begin_new:]), tuple(olds[begin_old:])))
    return groups


def _merged(at: Index, shape: Shape) -> Expr:
    """Return the row-major position of index `at` in `shape`."""
    position = at[0]
    for i, n in zip(at[1:], shape[1:], strict=True):
        position = add(mul(position, extent(n)), i)
    return position


def _split(position: Expr, shape: Shape) -> list[Expr]:
    """Return the index of a row-major `position` in `shape`. Positions are
    non-negative, so truncating division is correct."""
    digits = []
    for n in reversed(shape[1:]):
        digits.append(binary("rem", position, extent(n)))
        position = div(position, extent(n))
    return [position, *reversed(digits)]


def _reshape_lower(_types: Types, x: Operand, *, shape: Shape) -> Pointwise:
    old = x.type.shape
    groups = [] if any(map(is_zero, old)) else reshape_groups(shape, old)

    def element(at: Index) -> Expr:
        source = [index(0)] * len(old)
        for news, olds in groups:
            position = _merged(
                tuple(at[a] for a in news), tuple(shape[a] for a in news)
            )
            digits = _split(position, tuple(old[a] for a in olds))
            for axis, digit in zip(olds, digits, strict=True):
                source[axis] = digit
        return x[tuple(source)]

    return Pointwise(element, is_view=True)


def _reshape_unview(base: Value, new: Value, **_: Any) -> Value:
    result: Value = reshape(new, shape=base.shape)
    return result


reshape: Final = OpDef(
    name="reshape",
    promote=None,
    infer=_reshape_infer,  # T[*s] -> T[*shape]
    run=_reshape_run,
    lower=_reshape_lower,
    unview=_reshape_unview,
    is_cheap=True,
    batch=batching.per_example(shape=batching.of_shape),
    samples=(
        Sample(("T[2, 6]",), {"shape": (3, 4)}, dtypes.ALL),
        Sample(("T[2, 3, 4]",), {"shape": (6, 1, 4)}, dtypes.FLOATS),
        Sample(("T[]",), {"shape": (1, 1)}),
        Sample(("T[0, 3]",), {"shape": (3, 0, 2)}),
    ),
)


# --- transpose ------------------------------------------------------------------------


def _transpose_infer(x: TensorType, *, axes: tuple[int, ...]) -> TensorType:
    if sorted(axes) != list(range(x.ndim)):
        raise AxisError(
            f"transpose: `axes` must name each of the {x.ndim} axes of {x} once, and "
            f"is {axes}."
        )
    return x.with_shape([x.shape[a] for a in axes])


def _transpose_run(x: Array, *, axes: tuple[int, ...]) -> Array:
    """`x` with its axes in the order `axes`."""
    return np.transpose(x, axes)


def inverse(axes: Sequence[int]) -> tuple[int, ...]:
    """Return the inverse permutation of `axes`."""
    return tuple(sorted(range(len(axes)), key=axes.__getitem__))


def _transpose_lower(_types: Types, x: Operand, *, axes: tuple[int, ...]) -> Pointwise:
    back = inverse(axes)
    return Pointwise(lambda at: x[tuple(at[a] for a in back)], is_view=True)


def _transpose_unview(_base: Value, new: Value, *, axes: tuple[int, ...]) -> Value:
    result: Value = transpose(new, axes=inverse(axes))
    return result


transpose: Final = OpDef(
    name="transpose",
    promote=None,
    infer=_transpose_infer,  # T[*s] -> T[s[axes[0]], s[axes[1]], ...]
    run=_transpose_run,
    lower=_transpose_lower,
    unview=_transpose_unview,
    is_cheap=True,
    batch=batching.per_example(axes=batching.of_order),
    samples=(
        Sample(("T[2, 3]",), {"axes": (1, 0)}, dtypes.ALL),
        Sample(("T[2, 3, 4]",), {"axes": (2, 0, 1)}),
        Sample(("T[]",), {"axes": ()}),
    ),
)


# --- broadcast_to ---------------------------------------------------------------------


def _broadcast_infer(x: TensorType, *, shape: Shape) -> TensorType:
    extra = len(shape) - x.ndim
    broadcasts = extra >= 0 and all(
        fits(n, m) for n, m in zip(x.shape, shape[extra:], strict=True)
    )
    if not broadcasts:
        raise ShapeError(
            f"broadcast_to: a tensor of shape {show(x.shape)} does not broadcast to "
            f"{show(shape)}. Each axis, counted from the last, must have the size that "
            "is wanted, or 1."
        )
    return x.with_shape(shape)


def _broadcast_run(x: Array, *, shape: tuple[int, ...]) -> Array:
    """`x` repeated along new axes and along its axes of size 1, without a copy."""
    return np.broadcast_to(x, shape)


def _broadcast_lower(_types: Types, x: Operand, **_: Any) -> Pointwise:
    return Pointwise(lambda at: elements(x, at), is_view=True)


def _broadcast_unview(base: Value, _new: Value, *, shape: Shape) -> Value:
    raise ReadOnlyError(
        f"cannot write into a broadcast tensor (from {show(base.shape)} to "
        f"{show(shape)}): several of its elements are one. Write into a copy of it: "
        "`x = x.copy()`."
    )


def _broadcast_batch(
    op: OpDef, size: Size, _batched: Any, x: Argument, *, shape: Shape
) -> Sequence[Value]:
    x = batching.after_examples(x, len(shape))
    return bind(op, [x], {"shape": (size, *shape)})


broadcast_to: Final = OpDef(
    name="broadcast_to",
    promote=None,
    infer=_broadcast_infer,  # T[*s] -> T[*shape]
    run=_broadcast_run,
    lower=_broadcast_lower,
    unview=_broadcast_unview,
    transpose=(lambda ct, x, **_: ct,),
    is_cheap=True,
    batch=_broadcast_batch,
    samples=(
        Sample(("T[3, 1]",), {"shape": (2, 3, 4)}, dtypes.ALL),
        Sample(("T[]",), {"shape": (2,)}),
        Sample(("T[1, 2]",), {"shape": (0, 2)}),
    ),
)


# --- slice and update_slice -----------------------------------------------------------


def check_slice(
    name: str,
    x: TensorType,
    starts: Sequence[Size],
    sizes: Sequence[Size],
    steps: Sequence[int],
) -> None:
    """Check that `starts`, `sizes` and `steps`, one for each axis, stay within `x`.

    Symbolic sizes are not checked here, but by the caller.

    Raises:
        ShapeError: there is not one of each for every axis.
        IndexingError: an element is out of bounds.
    """
    if not len(starts) == len(sizes) == len(steps) == x.ndim:
        raise ShapeError(
            f"{name}: {x} needs {x.ndim} starts, sizes and steps, and was given "
            f"{len(starts)}, {len(sizes)} and {len(steps)}."
        )
    for axis, (n, start, size, step) in enumerate(
        zip(x.shape, starts, sizes, steps, strict=True)
    ):
        if not (
            isinstance(n, int) and isinstance(start, int) and isinstance(size, int)
        ):
            continue
        last = start + (size - 1) * step
        if size < 0 or (size > 0 and not (0 <= start < n and 0 <= last < n)):
            raise IndexingError(
                f"{name}: axis {axis} has size {n}, and {size} element(s) from {start} "
                f"in steps of {step} are not all within."
            )


def _slice_infer(
    x: TensorType, *, starts: Shape, sizes: Shape, steps: tuple[int, ...]
) -> TensorType:
    check_slice("slice", x, starts, sizes, steps)
    return x.with_shape(sizes)


def numpy_slices(
    starts: Sequence[int], sizes: Sequence[int], steps: Sequence[int]
) -> tuple[slice, ...]:
    """Return the Python slices of `sizes` elements from `starts` in `steps`."""
    slices = []
    for start, size, step in zip(starts, sizes, steps, strict=True):
        stop = start + size * step
        # A negative stop would count from the end; None means down to the first
        # element.
        slices.append(slice(start, None if stop < 0 else stop, step))
        if size == 0:
            slices[-1] = slice(0, 0, step)
    return tuple(slices)


def _slice_run(
    x: Array, *, starts: tuple[int, ...], sizes: tuple[int, ...], steps: tuple[int, ...]
) -> Array:
    """`sizes[a]` elements along each axis `a`, from `starts[a]` by `steps[a]`."""
    key: Any = (*numpy_slices(starts, sizes, steps), ...)
    view: Array = np.asarray(x)[key]
    return view


def strided(at: Index, starts: Sequence[Size], steps: Sequence[int]) -> Index:
    """Return the index into a tensor for index `at` into its slice."""
    return tuple(
        add(mul(i, index(step)), extent(start))
        for i, start, step in zip(at, starts, steps, strict=True)
    )


def _slice_lower(
    _types: Types, x: Operand, *, starts: Shape, steps: tuple[int, ...], **_: Any
) -> Pointwise:
    return Pointwise(lambda at: x[strided(at, starts, steps)], is_view=True)


def _slice_unview(
    base: Value, new: Value, *, starts: Shape, steps: tuple[int, ...], **_: Any
) -> Value:
    result: Value = update_slice(base, new, starts=starts, steps=steps)
    return result


slice_: Final = OpDef(
    name="slice",
    promote=None,
    infer=_slice_infer,  # T[*s] -> T[*sizes]
    run=_slice_run,
    lower=_slice_lower,
    unview=_slice_unview,
    is_cheap=True,
    batch=batching.per_example(
        starts=batching.of_starts, sizes=batching.of_shape, steps=batching.of_steps
    ),
    samples=(
        Sample(
            ("T[4, 5]",),
            {"starts": (1, 4), "sizes": (2, 3), "steps": (1, -2)},
            dtypes.ALL,
        ),
        Sample(("T[6]",), {"starts": (5,), "sizes": (6,), "steps": (-1,)}),
        Sample(("T[3]",), {"starts": (0,), "sizes": (0,), "steps": (1,)}),
        Sample(("T[]",), {"starts": (), "sizes": (), "steps": ()}),
    ),
)


def check_update(name: str, base: TensorType, update: TensorType) -> None:
    """Check that an update has the dtype and rank of the tensor it is written to.

    Raises:
        DTypeError: the dtypes differ.
        ShapeError: the ranks differ.
    """
    require_dtype(name, [update], (base.dtype,))
    if update.ndim != base.ndim:
        raise ShapeError(
            f"{name}: `update` must have rank {base.ndim}, and is {update}."
        )


def _update_slice_infer(
    base: TensorType, new: TensorType, *, starts: Shape, steps: tuple[int, ...]
) -> TensorType:
    check_update("update_slice", base, new)
    check_slice("update_slice", base, starts, new.shape, steps)
    return TensorType(base.dtype, base.shape, base.weak and new.weak)


def _update_slice_run(
    base: Array, new: Array, *, starts: tuple[int, ...], steps: tuple[int, ...]
) -> Array:
    """`base` with a slice of it replaced by `new`."""
    result: Array = np.array(base)
    key: Any = (*numpy_slices(starts, np.shape(new), steps), ...)
    result[key] = new
    return result


def _update_slice_lower(
    _types: Types, base: Operand, new: Operand, *, starts: Shape, steps: tuple[int, ...]
) -> Scatter:
    return Scatter(
        base=base,
        space=new.type.shape,
        position=lambda u: strided(u, starts, steps),
        value=lambda u: new[u],
    )


update_slice: Final[OpDef] = OpDef(
    name="update_slice",
    promote=None,
    infer=_update_slice_infer,  # T[*s], T[*t] -> T[*s]
    run=_update_slice_run,
    lower=_update_slice_lower,
    jvp="linear",
    transpose=(
        lambda ct, base, new, **at: update_slice(ct, zeros_of(new), **at),
        lambda ct, base, new, **at: slice_(ct, sizes=new.type.shape, **at),
    ),
    batch=batching.per_example(starts=batching.of_starts, steps=batching.of_steps),
    samples=(
        Sample(
            ("T[4, 5]", "T[2, 3]"),
            {"starts": (1, 4), "steps": (1, -2)},
            dtypes.ALL,
        ),
        Sample(("T[3]", "T[0]"), {"starts": (0,), "steps": (1,)}),
        Sample(("T[]", "T[]"), {"starts": (), "steps": ()}),
    ),
)


def zeros_of(x: Any) -> Value:
    """Return zeros of the shape and dtype of `x`, as a broadcast scalar."""
    zero = Constant(0.0, TensorType(x.type.dtype))
    return apply(broadcast_to, zero, shape=x.type.shape)


# --- shortcuts: no operation where nothing moves --------------------------------------


def reshaped(x: Any, shape: Shape) -> Any:
    """Return `x` in `shape`; `x` itself if it has that shape."""
    same = len(shape) == x.ndim and all(map(same_size, x.shape, shape))
    return x if same else reshape(x, shape=shape)


def transposed(x: Any, axes: Sequence[int]) -> Any:
    """Return `x` with its axes in the order `axes`; `x` itself if nothing moves."""
    axes = tuple(axes)
    return x if axes == tuple(range(x.ndim)) else transpose(x, axes=axes)


def moved(x: Any, source: int, target: int) -> Any:
    """Return `x` with the axis `source` at `target`; both count from the front."""
    axes = [a for a in range(x.ndim) if a != source]
    axes.insert(target, source)
    return transposed(x, axes)


def broadcasted(x: Any, shape: Shape, name: str = "broadcast_to") -> Any:
    """Return `x` broadcast to `shape`; `x` itself if it has that shape.

    Args:
        name: The public function, for the error of a check that is left to the run.
    """
    if SymInt in map(type, (*x.shape, *shape)):
        x = fitted(name, x, shape)
    same = len(shape) == x.ndim and all(map(same_size, x.shape, shape))
    return x if same else broadcast_to(x, shape=shape)


def sliced(x: Any, starts: Shape, sizes: Shape, steps: tuple[int, ...]) -> Any:
    """Return a slice of `x`; `x` itself if the slice is all of it."""
    whole = (
        all(is_zero(start) for start in starts)
        and all(map(same_size, x.shape, sizes))
        and all(step == 1 for step in steps)
    )
    return x if whole else slice_(x, starts=starts, sizes=sizes, steps=steps)


def part(x: Any, axis: int, start: Size, size: Size, step: int = 1) -> Any:
    """Return `size` elements of `x` along an axis, from `start` in steps of `step`."""
    starts: list[Size] = [0] * x.ndim
    sizes, steps = list(x.shape), [1] * x.ndim
    starts[axis], sizes[axis], steps[axis] = start, size, step
    return sliced(x, tuple(starts), tuple(sizes), tuple(steps))


# --- arguments of public functions ----------------------------------------------------


def as_tensor(name: str, arg: Any, argument: int | str = 0) -> Any:
    """Return an argument of a public function as a tensor; numbers get rank 0.

    Raises:
        ArgumentTypeError: it is neither a tensor, nor an array, nor a number.
    """
    return as_value(as_default(as_operand(name, argument, arg), weak=True))


def several(value: Any) -> list[Any]:
    """Return an argument, which may be a single value or a sequence, as a list."""
    return list(value) if isinstance(value, tuple | list) else [value]


_RANK: Final = {"b": 0, "u": 1, "i": 2, "f": 3}


def stored(
    name: str, value: Any, dtype: dtypes.DType, argument: int | str = 1
) -> Argument:
    """Return `value` as an operand that can be written into a tensor of `dtype`.

    It is converted if its kind is not above that of `dtype` (bool, unsigned, signed,
    floating), as by NumPy's "same_kind" casting. A weak integer fits every integer
    dtype, and 0 and 1 count as bools.

    Raises:
        ArgumentTypeError: `value` is neither a tensor, nor an array, nor a number.
        ArgumentRangeError: a Python integer does not fit `dtype`.
        DTypeError: its kind is above that of `dtype`.
    """
    operand = as_operand(name, argument, value)
    source = operand.type
    kind = "u" if source.weak and source.dtype.kind == "i" else source.dtype.kind
    number = operand.value if isinstance(operand, Constant) else None
    if isinstance(value, SymInt) and value.hint in (0, 1) and value == value.hint:
        number = value.hint  # recorded as a guard
    if kind == "u" and number in (0, 1):
        kind = "b"
    if _RANK[kind] > _RANK[dtype.kind]:
        raise DTypeError(
            f"{name}: a value of dtype {source.dtype.name} cannot be written into a "
            f"tensor of dtype {dtype.name}. Convert it with `hf.astype`."
        )
    return convert_to(operand, dtype)


def concrete(name: str, x: Any, remedy: str) -> Array:
    """Return the elements of a tensor whose values decide the size of a result.

    Raises:
        TraceError: it is traced; `remedy` says what to use instead.
    """
    elements = known_elements(name, x, remedy)
    if elements is None:
        raise unsized(name, x, remedy)
    return elements


def known_elements(name: str, x: Any, remedy: str) -> Array | None:
    """Return the elements of a tensor whose values decide a size; None if it is traced.

    Raises:
        TraceError: it is traced, and no trace is active that could have such sizes.
    """
    try:
        array: Array = x._concrete(name)
    except TraceError as error:
        if current().is_eager:
            raise unsized(name, x, remedy) from error
        return None
    return array


def unsized(name: str, x: Any, remedy: str) -> TraceError:
    """Return the error for a size that depends on the values of a traced tensor."""
    return TraceError(
        f"{name}: the size of the result depends on the values of a traced tensor "
        f"({x.type}), which are only known when the graph runs. {remedy}"
    )
