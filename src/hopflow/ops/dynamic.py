"""Views at positions that only the run knows, as integer scalars.

dynamic_index   drops some axes; an index out of range stops the program
dynamic_slice, dynamic_update_slice   a window that is clamped to lie within the
                tensor, as in JAX
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from hopflow import dtypes
from hopflow.bind import Operand as Argument
from hopflow.bind import Value, bind
from hopflow.errors import ArgumentTypeError, ShapeError
from hopflow.graph.core import Constant
from hopflow.graph.types import Shape, TensorType, same_size
from hopflow.loop_ir import expr
from hopflow.loop_ir.expr import Expr, Index, binary, extent, index
from hopflow.loop_ir.kernels import Operand, Pointwise, Scatter
from hopflow.ops import batching
from hopflow.ops.convert import apply, as_value
from hopflow.ops.creation import positions
from hopflow.ops.deferred import with_elements
from hopflow.ops.elementwise import add, maximum, minimum, subtract
from hopflow.ops.gather import (
    TRAP,
    Layout,
    Types,
    check_indices,
    check_of,
    gather,
    gather_clip,
    run_positions,
    wrapped,
)
from hopflow.ops.logic import less, where
from hopflow.ops.opdef import OpDef, Sample, as_operand, convert_to, strong_constant
from hopflow.ops.rules import Array, as_shape
from hopflow.ops.scatter import scatter
from hopflow.ops.sizes import is_unbacked
from hopflow.ops.sizes import less as less_size
from hopflow.ops.views import as_tensor, check_update, stored, transposed, zeros_of
from hopflow.symbolic.size import Size

# --- dynamic_index --------------------------------------------------------------------


def _require_scalars(name: str, indices: Types) -> None:
    check_indices(name, indices)
    for i in indices:
        if i.ndim:
            raise ShapeError(f"{name}: an index must be a scalar here, and is {i}.")


def _dynamic_index_infer(
    x: TensorType, *indices: TensorType, axes: tuple[int, ...]
) -> TensorType:
    _require_scalars("dynamic_index", indices)
    return x.with_shape(Layout("dynamic_index", x, indices, axes, 0).selected)


def _dynamic_index_run(x: Array, *indices: Array, axes: tuple[int, ...]) -> Array:
    """The elements of `x` at integer scalars along `axes`, which are dropped.

    A negative index counts from the end; one out of range is an `IndexingError`.
    """
    x = np.asarray(x)
    at = zip(run_positions("index", indices, axes, x.shape), axes, strict=True)
    positions = {axis: int(i) for i, axis in at}
    view: Array = x[(*(positions.get(a, slice(None)) for a in range(x.ndim)), ...)]
    return view


def _dynamic_index_lower(
    _types: Types, x: Operand, *indices: Operand, axes: tuple[int, ...]
) -> Pointwise:
    layout = Layout("dynamic_index", x.type, [i.type for i in indices], axes, 0)

    def element(at: Index) -> Expr:
        pairs = zip(layout.at_indices(indices, at), layout.sizes, strict=True)
        return x[layout.source(at, [wrapped(e, n) for e, n in pairs])]

    check = check_of(indices, layout.sizes, ())
    return Pointwise(element, (check,) if check else (), is_view=True)


def _dynamic_index_unview(
    base: Value, new: Value, *indices: Argument, axes: tuple[int, ...]
) -> Value:
    rest = base.ndim - len(axes)
    window = {"starts": (0,) * rest, "steps": (1,) * rest}
    return apply(
        scatter, base, new, *indices, axes=axes, batch=0, combine="set", **window
    )


def _dynamic_index_batch(
    op: OpDef,
    size: Size,
    batched: tuple[bool, ...],
    *operands: Argument,
    axes: tuple[int, ...],
) -> Sequence[Value]:
    if any(batched[1:]):
        assert gather.batch is not None
        return gather.batch(gather, size, batched, *operands, axes=axes, batch=0)
    return bind(op, operands, {"axes": tuple([axis + 1 for axis in axes])})


dynamic_index: Final = OpDef(
    name="dynamic_index",
    promote=None,
    infer=_dynamic_index_infer,  # T[*s], i[]... -> T[*rest of s]
    run=_dynamic_index_run,
    lower=_dynamic_index_lower,
    unview=_dynamic_index_unview,
    effects=TRAP,
    is_cheap=True,
    batch=_dynamic_index_batch,
    samples=(
        Sample(("T[4, 3]", "i64[]"), {"axes": (0,)}, dtypes.ALL),
        Sample(("T[4, 2, 5]", "i32[]", "i64[]"), {"axes": (0, 2)}),
        Sample(("T[4]", "u8[]"), {"axes": (0,)}, low=0.0),
    ),
)


# --- dynamic_slice, dynamic_update_slice ----------------------------------------------


def _check_window(name: str, x: TensorType, starts: Types, sizes: Shape) -> None:
    _require_scalars(name, starts)
    if not len(starts) == len(sizes) == x.ndim:
        raise ShapeError(
            f"{name}: {x} needs {x.ndim} starts and sizes, and was given {len(starts)} "
            f"and {len(sizes)}."
        )
    for axis, (n, size) in enumerate(zip(x.shape, sizes, strict=True)):
        is_known = not (is_unbacked(n) or is_unbacked(size))
        if (n < size or size < 0) if is_known else less_size(n, size):
            raise ShapeError(
                f"{name}: {size} elements do not fit axis {axis}, which has {n}."
            )


def _window(starts: Sequence[Operand], sizes: Shape, shape: Shape) -> list[Expr]:
    """Return the start of the window, clamped so that it lies within the tensor."""
    clamped = []
    for start, size, n in zip(starts, sizes, shape, strict=True):
        last = extent(n - size)
        low = binary("max", wrapped(start[()], n), index(0))
        clamped.append(index(0) if same_size(size, n) else binary("min", low, last))
    return clamped


def _run_window(
    starts: Sequence[Array], sizes: Sequence[int], shape: Sequence[int]
) -> tuple[slice, ...]:
    slices = []
    for start, size, n in zip(starts, sizes, shape, strict=True):
        begin = int(start) + (n if start < 0 else 0)
        begin = min(max(begin, 0), n - size)
        slices.append(slice(begin, begin + size))
    return tuple(slices)


def _dynamic_slice_infer(
    x: TensorType, *starts: TensorType, sizes: Shape
) -> TensorType:
    _check_window("dynamic_slice", x, starts, sizes)
    return x.with_shape(sizes)


def _dynamic_slice_run(x: Array, *starts: Array, sizes: tuple[int, ...]) -> Array:
    """`sizes` elements of `x` from `starts`, clamped to lie within `x`."""
    x = np.asarray(x)
    key: Any = (*_run_window(starts, sizes, x.shape), ...)
    return np.asarray(x[key])


def _shifted(at: Index, starts: Sequence[Expr]) -> Index:
    return tuple(expr.add(i, start) for i, start in zip(at, starts, strict=True))


def _dynamic_slice_lower(
    _types: Types, x: Operand, *starts: Operand, sizes: Shape
) -> Pointwise:
    return Pointwise(
        lambda at: x[_shifted(at, _window(starts, sizes, x.type.shape))], is_view=True
    )


def _dynamic_slice_unview(
    base: Value, new: Value, *starts: Argument, **_: Any
) -> Value:
    return apply(update_window, base, new, *starts)


class _Positions:
    """The positions of windows whose starts differ between batch elements.

    axes   the axes along which a window may start elsewhere than at 0
    order  the axes of a window: the batch axis, then `axes`, then the others
    """

    def __init__(
        self,
        size: Size,
        batched: Sequence[bool],
        starts: Sequence[Argument],
        sizes: Shape,
        shape: Shape,
    ) -> None:
        full = list(map(same_size, sizes, shape))
        self.axes = tuple([a for a, whole in enumerate(full) if not whole])
        self.order = (
            0,
            *(a + 1 for a in sorted(range(len(full)), key=full.__getitem__)),
        )
        self.indices = [
            _positions_along(start, b, sizes[a], shape[a], (k, len(self.axes)))
            for k, a in enumerate(self.axes)
            for start, b in [(starts[a], batched[a])]
        ]
        self.batched = [batched[a] for a in self.axes]


def _positions_along(
    start: Argument, batched: bool, size: Size, n: Size, place: tuple[int, int]
) -> Value:
    """Return a window's positions along an axis: [*batch, 1, size, 1], by `place`."""
    begin = convert_to(start, dtypes.int64)
    begin = where(less(begin, 0), add(begin, n), begin)
    begin = minimum(maximum(begin, 0), subtract(n, size))
    k, count = place
    shape = (*(1,) * k, size, *(1,) * (count - k - 1))
    along = positions(shape, k)
    begin = batching.after_examples(begin, count) if batched else begin
    result: Value = add(begin, along)
    return result


def _dynamic_slice_batch(
    op: OpDef,
    size: Size,
    batched: tuple[bool, ...],
    x: Argument,
    *starts: Argument,
    sizes: Shape,
) -> Sequence[Value]:
    if not any(batched[1:]):
        return bind(op, [x, _FIRST, *starts], {"sizes": (size, *sizes)})
    x = batching.in_batch(size, batched[0], x)
    at = _Positions(size, batched[1:], starts, sizes, x.type.shape[1:])
    assert gather_clip.batch is not None
    [windows] = gather_clip.batch(
        gather_clip, size, (True, *at.batched), x, *at.indices, axes=at.axes, batch=0
    )
    return [transposed(windows, _inverse(at.order))]


_FIRST: Final = Constant(0, TensorType(dtypes.int64))


def _inverse(order: Sequence[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


window: Final = OpDef(
    name="dynamic_slice",
    promote=None,
    infer=_dynamic_slice_infer,  # T[*s], i[]... -> T[*sizes]
    run=_dynamic_slice_run,
    lower=_dynamic_slice_lower,
    unview=_dynamic_slice_unview,
    batch=_dynamic_slice_batch,
    samples=(
        Sample(("T[4, 5]", "i64[]", "i32[]"), {"sizes": (2, 5)}, dtypes.ALL),
        Sample(("T[2]", "i64[]"), {"sizes": (1,)}),
        Sample(("T[]",), {"sizes": ()}),
    ),
)


def _dynamic_update_infer(
    x: TensorType, update: TensorType, *starts: TensorType
) -> TensorType:
    check_update("dynamic_update_slice", x, update)
    _check_window("dynamic_update_slice", x, starts, update.shape)
    return TensorType(x.dtype, x.shape, x.weak and update.weak)


def _dynamic_update_run(x: Array, update: Array, *starts: Array) -> Array:
    """`x` with `update` written from `starts`, clamped so that it lies within `x`."""
    result: Array = np.array(x)
    key: Any = (*_run_window(starts, np.shape(update), result.shape), ...)
    result[key] = update
    return result


def _dynamic_update_lower(
    _types: Types, x: Operand, update: Operand, *starts: Operand
) -> Scatter:
    sizes = update.type.shape
    return Scatter(
        base=x,
        space=sizes,
        position=lambda u: _shifted(u, _window(starts, sizes, x.type.shape)),
        value=lambda u: update[u],
    )


def _dynamic_update_transpose(
    cotangents: Any, _x: Any, update: Any, *starts: Any
) -> list[Any]:
    [ct] = cotangents
    ct_x = apply(update_window, ct, zeros_of(update), *starts)
    ct_update = apply(window, ct, *starts, sizes=update.type.shape)
    return [ct_x, ct_update, *[None] * len(starts)]


def _dynamic_update_batch(
    op: OpDef,
    size: Size,
    batched: tuple[bool, ...],
    x: Argument,
    update: Argument,
    *starts: Argument,
) -> Sequence[Value]:
    base = batching.in_batch(size, batched[0], x)
    new = as_value(batching.in_batch(size, batched[1], update))
    if not any(batched[2:]):
        return bind(op, [base, new, _FIRST, *starts], {})
    at = _Positions(size, batched[2:], starts, new.shape[1:], base.type.shape[1:])
    rest = len(starts) - len(at.axes)
    assert scatter.batch is not None
    return scatter.batch(
        scatter,
        size,
        (True, True, *at.batched),
        base,
        transposed(new, at.order),
        *at.indices,
        axes=at.axes,
        batch=0,
        combine="set",
        starts=(0,) * rest,
        steps=(1,) * rest,
    )


update_window: Final = OpDef(
    name="dynamic_update_slice",
    promote=None,
    infer=_dynamic_update_infer,  # T[*s], T[*t], i[]... -> T[*s]
    run=_dynamic_update_run,
    lower=_dynamic_update_lower,
    jvp="linear",
    transpose=_dynamic_update_transpose,
    batch=_dynamic_update_batch,
    samples=(
        Sample(("T[4, 5]", "T[2, 5]", "i64[]", "i32[]"), {}, dtypes.ALL),
        Sample(("T[2]", "T[1]", "i64[]"), {}),
        Sample(("T[]", "T[]"), {}),
    ),
)


# --- public functions -----------------------------------------------------------------


def _starts(name: str, start_indices: Any) -> list[Argument]:
    if isinstance(start_indices, Value | np.ndarray):
        raise ArgumentTypeError(
            f"{name}: `start_indices` must be a tuple of integers or integer scalars, "
            "and is one tensor. Take it apart with `hf.unstack`."
        )
    many = isinstance(start_indices, tuple | list)
    starts = start_indices if many else (start_indices,)
    return [strong_constant(as_operand(name, i, s)) for i, s in enumerate(starts)]


def _with_room(name: str, x: Any, shape: Shape, sizes: Shape) -> Any:
    """Return `x` for a window in `shape`; the run checks unbacked sizes."""
    for axis, (n, size) in enumerate(zip(shape, sizes, strict=False)):
        x = with_elements(x, n, size, f"{name}: the window must fit axis {axis}")
    return x


def dynamic_slice(x: Any, start_indices: Any, slice_sizes: Any) -> Value:
    """Return a window of `x` that begins at integer scalars, as a view.

    Args:
        x: T[*s].
        start_indices: An integer or an integer scalar tensor for each axis. A negative
            one counts from the end. A window that would not lie within `x` is moved.
        slice_sizes: The size of the window along each axis.

    Returns:
        T[*slice_sizes].

    Raises:
        DTypeError: a start is no integer.
        ShapeError: there is not a start and a size for each axis, or the window is
            larger than `x`.

    >>> hf.dynamic_slice(hf.arange(5), (hf.asarray(3),), (2,))
    Tensor([3, 4], i64[2])
    """
    tensor = as_tensor("dynamic_slice", x)
    sizes = as_shape("dynamic_slice", slice_sizes, "slice_sizes")
    tensor = _with_room("dynamic_slice", tensor, tensor.shape, sizes)
    return apply(window, tensor, *_starts("dynamic_slice", start_indices), sizes=sizes)


def dynamic_update_slice(x: Any, update: Any, start_indices: Any) -> Value:
    """Return `x` with `update` written at integer scalars.

    Args:
        x: T[*s].
        update: The window to write, with as many axes as `x`.
        start_indices: As for `dynamic_slice`.

    Raises:
        DTypeError: a start is no integer, or `x` cannot hold `update`.
        ShapeError: there is not a start for each axis, or `update` is larger than `x`.
    """
    name = "dynamic_update_slice"
    tensor = as_tensor(name, x)
    new = stored(name, update, tensor.type.dtype)
    if isinstance(new, Value):
        new = _with_room(name, new, tensor.shape, new.shape)
    return apply(update_window, tensor, new, *_starts(name, start_indices))
