"""Gather, which reads at integer arrays, and what it shares with `scatter`.

gather        integer arrays index some axes; out of range stops the program
gather_clip   the nearest element in range if an index is outside

Where an index must be in range, a negative one counts from the end, as in Python.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, Final

import numpy as np

from hopflow import dtypes
from hopflow.bind import Operand as Argument
from hopflow.bind import Value, bind
from hopflow.errors import AxisError, DTypeError, IndexingError, ShapeError
from hopflow.graph.types import Shape, TensorType
from hopflow.loop_ir import expr
from hopflow.loop_ir.expr import Expr, Index, binary, cast, compare, extent, index
from hopflow.loop_ir.kernels import Check, Operand, Pointwise, broadcast_index
from hopflow.ops import batching
from hopflow.ops.convert import apply, as_value, astype
from hopflow.ops.elementwise import maximum, minimum
from hopflow.ops.opdef import OPERATIONS, OpDef, Sample
from hopflow.ops.rules import Array, broadcast_shapes, is_zero
from hopflow.ops.sizes import may_be_zero
from hopflow.ops.views import zeros_of
from hopflow.symbolic.size import Size

Types = Sequence[TensorType]
TRAP: Final = frozenset({"trap"})


# --- positions ------------------------------------------------------------------------


def position_of(e: Expr) -> Expr:
    """Return an index of any integer dtype as i64; a u64 beyond i64 saturates."""
    if e.dtype is dtypes.uint64:
        e = binary("min", e, expr.const(np.iinfo(np.int64).max, e.dtype))
    return cast(e, dtypes.int64)


def wrapped(e: Expr, size: Size) -> Expr:
    position = position_of(e)
    return position if e.dtype.kind == "u" else expr.wrap_index(position, extent(size))


def clipped(e: Expr, size: Size) -> Expr:
    high = binary("min", position_of(e), expr.sub(extent(size), index(1)))
    return binary("max", high, index(0))


def in_range(e: Expr, size: Size, *, wraps: bool) -> Expr:
    n = extent(size)
    below = compare("lt", position_of(e), n)
    if e.dtype.kind == "u":
        return below
    lowest = expr.sub(index(0), n) if wraps else index(0)
    return binary("and", compare("ge", position_of(e), lowest), below)


def check_of(
    indices: Sequence[Operand], sizes: Sequence[Size], shape: Shape
) -> Check | None:
    """Return the check that all `indices` (broadcast to `shape`) are in range."""
    if not indices:
        return None

    def values(at: Index) -> list[Expr]:
        return [i[broadcast_index(at, i.type.shape)] for i in indices]

    def holds(at: Index) -> Expr:
        tests = zip(values(at), sizes, strict=True)
        return expr.all_of([in_range(e, n, wraps=True) for e, n in tests])

    def reported(at: Index) -> tuple[Expr, ...]:
        """Return the first index that is out of range, and the size of its axis."""
        *others, (e, n) = zip(values(at), sizes, strict=True)
        position, size = cast(e, dtypes.int64), extent(n)
        for e, n in reversed(others):
            inside = in_range(e, n, wraps=True)
            position = expr.select(inside, position, cast(e, dtypes.int64))
            size = expr.select(inside, size, extent(n))
        return position, size

    return Check("index", shape, holds, reported)


def run_positions(
    name: str, indices: Sequence[Array], axes: Sequence[int], shape: Sequence[int]
) -> list[Array]:
    """Return indices for NumPy, checked if they select anything.

    Raises:
        IndexingError: one is out of range.
    """
    pairs = zip(indices, axes, strict=True) if all(i.size for i in indices) else ()
    for i, axis in pairs:
        n = shape[axis]
        outside = (i < -n) | (i >= n) if i.dtype.kind == "i" else i >= n
        if np.any(outside):
            worst = np.asarray(i)[np.asarray(outside)].flat[0]
            raise IndexingError(
                f"{name}: index {worst} is out of range for axis {axis} of size {n}."
            )
    return [np.asarray(i).astype(np.intp) for i in indices]


def check_indices(name: str, indices: Types) -> None:
    """Check that all indices are integers.

    Raises:
        DTypeError: an index has another dtype.
    """
    for i in indices:
        if not i.dtype.is_integer:
            raise DTypeError(
                f"{name}: an index must be of an integer dtype, and is {i}. Convert it "
                "with `hf.astype`."
            )


# --- gather ---------------------------------------------------------------------------


class Layout:
    """The correspondence between the axes of a tensor, its indices and the selection.

    tensor     [*batch, ...]      where `axes` are indexed, and `rest` are not
    indices    [*batch, *window]  after broadcasting
    selection  [*batch, *window, *rest]
    """

    def __init__(
        self, name: str, x: TensorType, indices: Types, axes: Sequence[int], batch: int
    ) -> None:
        check_indices(name, indices)
        if len(indices) != len(axes) or len(set(axes)) != len(axes):
            raise AxisError(f"{name}: {len(indices)} indices for the axes {axes}.")
        if not 0 <= batch <= x.ndim or any(not batch <= a < x.ndim for a in axes):
            raise AxisError(f"{name}: {x} with {batch} batch axes has no axes {axes}.")
        self.shape, self.axes, self.batch = x.shape, tuple(axes), batch
        self.sizes = tuple(x.shape[a] for a in axes)
        self.rest = tuple(a for a in range(batch, x.ndim) if a not in axes)
        leading = x.shape[:batch]
        self.space: Shape = (
            broadcast_shapes(name, *(i.shape for i in indices)) if indices else leading
        )
        if len(self.space) < batch or not all(
            m == n for m, n in zip(self.space, leading, strict=False)
        ):
            raise ShapeError(
                f"{name}: the first {batch} axes of the indices must be those of {x}, "
                f"and are {self.space[:batch]}."
            )

    @property
    def selected(self) -> Shape:
        return (*self.space, *(self.shape[a] for a in self.rest))

    def source(
        self, at: Index, positions: Sequence[Expr], rest: Sequence[Expr] | None = None
    ) -> Index:
        """Return the index into the tensor for index `at` into the selection."""
        rest = at[len(self.space) :] if rest is None else rest
        by_axis = dict(enumerate(at[: self.batch]))
        by_axis.update(zip(self.axes, positions, strict=True))
        by_axis.update(zip(self.rest, rest, strict=True))
        return tuple(by_axis[a] for a in range(len(self.shape)))

    def at_indices(self, indices: Sequence[Operand], at: Index) -> list[Expr]:
        window = at[: len(self.space)]
        return [i[broadcast_index(window, i.type.shape)] for i in indices]

    def numpy_key(self, positions: Sequence[Array]) -> tuple[Array, ...]:
        """Return NumPy's key into the tensor with its `rest` axes moved last. All its
        arrays have the shape `space`."""
        space: Any = self.space  # ints in the run
        grid = np.indices(space, sparse=True)[: self.batch]
        return tuple(np.broadcast_to(i, space) for i in (*grid, *positions))

    @property
    def rest_last(self) -> tuple[int, ...]:
        return (*range(self.batch), *self.axes, *self.rest)


def _gather_transpose(
    checked: bool,
    cotangents: Any,
    x: Any,
    *indices: Any,
    axes: tuple[int, ...],
    batch: int,
) -> list[Any]:
    """Add the cotangents up at the positions that the elements came from."""
    [ct] = cotangents
    rest = x.ndim - batch - len(axes)
    window = {"starts": (0,) * rest, "steps": (1,) * rest, "combine": "add"}
    if not checked:
        indices = tuple(
            in_bounds(i, x.shape[a]) for i, a in zip(indices, axes, strict=True)
        )
    # By name: `scatter` imports this module.
    op = OPERATIONS["scatter" if checked else "scatter_drop"]
    back = apply(op, zeros_of(x), ct, *indices, axes=axes, batch=batch, **window)
    return [back, *[None] * len(indices)]


def in_bounds(i: Any, size: Size) -> Value:
    """Return an index clamped into an axis, as `gather_clip` does."""
    i = as_value(i)
    if i.dtype is not dtypes.uint64:
        i = astype(i, dtypes.int64, copy=False)
    moved: Value = minimum(maximum(i, 0), size - 1)
    return moved


def batched_indices(
    size: Size, batched: Sequence[bool], indices: Sequence[Argument]
) -> list[Argument]:
    """Return indices with the batch on the first axis of their common shape."""
    pairs = list(zip(batched, indices, strict=True))
    if indices and not any(batched):
        pairs[0] = True, batching.in_batch(size, False, indices[0])
    ndim = max((batching.rank(i, b) for b, i in pairs), default=0)
    return [batching.after_examples(i, ndim) if b else i for b, i in pairs]


def _batch(
    op: OpDef,
    size: Size,
    batched: tuple[bool, ...],
    x: Argument,
    *indices: Argument,
    axes: tuple[int, ...],
    batch: int,
) -> Sequence[Value]:
    if not (batched[0] or batch):  # all batch elements read the same tensor
        positions = batched_indices(size, batched[1:], indices)
        return bind(op, [x, *positions], {"axes": axes, "batch": 0})
    args = batched_indices(size, batched[1:], indices)
    args = [batching.in_batch(size, batched[0], x), *args]
    moved = tuple([axis + 1 for axis in axes])
    return bind(op, args, {"axes": moved, "batch": batch + 1})


def _gather_op(
    name: str, doc: str, *, checked: bool, samples: tuple[Sample, ...]
) -> OpDef:
    def infer(
        x: TensorType, *indices: TensorType, axes: tuple[int, ...], batch: int
    ) -> TensorType:
        layout = Layout(name, x, indices, axes, batch)
        empty = any(map(is_zero, layout.sizes))
        if empty and not checked and not any(map(is_zero, layout.space)):
            raise IndexingError(f"{name}: {x} has no elements along the axes {axes}.")
        return x.with_shape(layout.selected)

    def run(x: Array, *indices: Array, axes: tuple[int, ...], batch: int) -> Array:
        x = np.asarray(x)
        layout = Layout(name, type_of(x), [type_of(i) for i in indices], axes, batch)
        if checked:
            positions = run_positions(name, indices, axes, x.shape)
        else:
            positions = [
                _run_clip(i, x.shape[a]) for i, a in zip(indices, axes, strict=True)
            ]
        selected: Any = layout.selected
        if 0 in selected:  # NumPy cannot take from an empty axis
            return np.zeros(selected, x.dtype)
        if len(axes) == 1 and not batch:  # much faster than general indexing
            loaded: Array = np.asarray(np.take(x, positions[0], axis=axes[0]))
            order = range(axes[0], axes[0] + len(layout.space))
            return np.moveaxis(loaded, tuple(order), tuple(range(len(layout.space))))
        key: Any = layout.numpy_key(positions)
        picked: Array = np.transpose(x, layout.rest_last)[key]
        return picked

    def lower(
        _types: Types, x: Operand, *indices: Operand, axes: tuple[int, ...], batch: int
    ) -> Pointwise:
        layout = Layout(name, x.type, [i.type for i in indices], axes, batch)
        normal = wrapped if checked else clipped
        empty = [] if checked else [n for n in layout.sizes if may_be_zero(n)]

        def element(at: Index) -> Expr:
            loaded = layout.at_indices(indices, at)
            positions = [
                normal(e, n) for e, n in zip(loaded, layout.sizes, strict=True)
            ]
            source = layout.source(at, positions)
            if not empty:
                return x[source]
            some = expr.all_of([compare("gt", extent(n), index(0)) for n in empty])
            return x.where(some, source, expr.const(0, x.type.dtype))

        check = check_of(indices, layout.sizes, layout.space) if checked else None
        return Pointwise(element, (check,) if check else ())

    run.__doc__ = doc
    return OpDef(
        name=name,
        promote=None,
        infer=infer,  # T[*b, *s], i[*b, *w]... -> T[*b, *w, *rest of s]
        run=run,
        lower=lower,
        jvp="linear",
        transpose=partial(_gather_transpose, checked),
        effects=TRAP if checked else frozenset(),
        batch=_batch,
        samples=samples,
    )


def type_of(x: Array) -> TensorType:
    return TensorType(dtypes.as_dtype(x.dtype), x.shape)


def _run_clip(i: Array, size: int) -> Array:
    if i.dtype.kind == "u":
        i = np.minimum(i, np.asarray(max(size - 1, 0), np.uint64))
    return np.asarray(np.clip(np.asarray(i).astype(np.int64), 0, max(size - 1, 0)))


_GATHER_SAMPLES: Final = (
    Sample(("T[5, 4]", "i64[3]"), {"axes": (0,), "batch": 0}, dtypes.ALL),
    Sample(("T[2, 4]", "i32[2, 1]"), {"axes": (1,), "batch": 0}),
    Sample(("T[4, 2, 5]", "i64[3]", "i8[2, 1]"), {"axes": (0, 2), "batch": 0}),
    Sample(("T[3, 5]", "i64[3, 2]"), {"axes": (1,), "batch": 1}),
    Sample(("T[4]", "i64[]"), {"axes": (0,), "batch": 0}),
    Sample(("T[4, 0]", "i64[2]"), {"axes": (0,), "batch": 0}),
)

gather: Final = _gather_op(
    "gather",
    """The elements of `x` at `indices` along `axes`.

    The first `batch` axes of `x` and of the indices are the same. A negative index
    counts from the end; one out of range is an `IndexingError`.
    """,
    checked=True,
    samples=_GATHER_SAMPLES,
)
gather_clip: Final = _gather_op(
    "gather_clip",
    """The elements of `x` at `indices` along `axes`, clamped into range.

    The first `batch` axes of `x` and of the indices are the same.
    """,
    checked=False,
    samples=_GATHER_SAMPLES,
)
