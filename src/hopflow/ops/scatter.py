"""Scatter, which writes what `gather` reads; and sums by segment."""

from collections.abc import Callable, Sequence
from functools import partial, reduce
from math import prod
from typing import Any, Final, Literal

import numpy as np

from hopflow import dtypes
from hopflow.bind import Operand as Argument
from hopflow.bind import Value, bind
from hopflow.dtypes import DTypeLike
from hopflow.errors import ShapeError
from hopflow.graph.core import Constant
from hopflow.graph.types import Shape, TensorType
from hopflow.loop_ir import expr
from hopflow.loop_ir.expr import Expr, Index, binary
from hopflow.loop_ir.kernels import Operand, Scatter
from hopflow.ops import batching, scalar
from hopflow.ops.convert import apply, as_value, astype
from hopflow.ops.creation import fill, positions, sizes_of, zeros
from hopflow.ops.deferred import matched
from hopflow.ops.elementwise import divide, multiply, subtract
from hopflow.ops.gather import (
    TRAP,
    Layout,
    Types,
    batched_indices,
    check_indices,
    check_of,
    gather,
    gather_clip,
    in_bounds,
    in_range,
    position_of,
    run_positions,
    type_of,
    wrapped,
)
from hopflow.ops.logic import equal, logical_and, where
from hopflow.ops.opdef import OPERATIONS, OpDef, Sample
from hopflow.ops.rules import (
    Array,
    as_size,
    normalize_axis,
    optional_dtype,
    require_dtype,
)
from hopflow.ops.views import (
    as_tensor,
    concrete,
    numpy_slices,
    part,
    reshaped,
    strided,
    zeros_of,
)
from hopflow.symbolic.size import Size

Combine = Literal["set", "add", "mul", "min", "max"]


# --- scatter --------------------------------------------------------------------------


_BOOLEAN: Final = {"add": "or", "mul": "and", "min": "and", "max": "or"}


def _combine(
    combine: Combine, dtype: dtypes.DType
) -> Callable[[Expr, Expr], Expr] | None:
    if combine == "set":
        return None
    if dtype.kind == "b":
        return lambda old, new: binary(_BOOLEAN[combine], old, new)
    if combine in ("min", "max"):
        return scalar.minimum if combine == "min" else scalar.maximum
    return lambda old, new: binary(combine, old, new)


COMBINES: Final[dict[str, Any]] = {
    "add": np.add,
    "mul": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
}
"""NumPy's ufuncs for the ways to combine, except "set"."""


def _check_scatter(
    name: str, base: TensorType, update: TensorType, layout: Layout, starts: Shape
) -> None:
    require_dtype(name, [update], (base.dtype,))
    window = len(layout.space)
    if len(starts) != len(layout.rest):
        raise ShapeError(f"{name}: {len(starts)} starts for the axes {layout.rest}.")
    leading = update.shape[:window]
    if update.ndim != window + len(layout.rest) or not all(
        m == n for m, n in zip(leading, layout.space, strict=True)
    ):
        raise ShapeError(
            f"{name}: `update` must begin with the axes {layout.space} of the indices, "
            f"have {len(layout.rest)} more, and is {update}."
        )


def _run_keep(indices: Sequence[Array], layout: Layout) -> Array | None:
    """Return a mask of the updates that are in range; None: all of them."""
    space: Any = layout.space
    keep = np.ones(space, np.bool_)
    for i, n in zip(indices, layout.sizes, strict=True):
        keep &= (i >= 0) & (i < n)
    return None if keep.all() else keep


def _infer(
    name: str,
    base: TensorType,
    update: TensorType,
    *indices: TensorType,
    axes: tuple[int, ...],
    batch: int,
    starts: Shape,
    **_: Any,
) -> TensorType:
    layout = Layout(name, base, indices, axes, batch)
    _check_scatter(name, base, update, layout, starts)
    return TensorType(base.dtype, base.shape, base.weak and update.weak)


def _run(
    name: str,
    checked: bool,
    base: Array,
    update: Array,
    *indices: Array,
    axes: tuple[int, ...],
    batch: int,
    starts: tuple[int, ...],
    steps: tuple[int, ...],
    combine: Combine,
) -> Array:
    result = np.array(base)
    layout = Layout(name, type_of(result), [type_of(i) for i in indices], axes, batch)
    if checked:
        keep = None
        positions = run_positions(name, indices, axes, result.shape)
    else:
        keep = _run_keep(indices, layout)
        positions = [np.asarray(i).astype(np.int64) for i in indices]
    # Contiguous, so that NumPy visits them in row-major order and the last update wins.
    where = [np.ascontiguousarray(p) for p in layout.numpy_key(positions)]
    update = np.asarray(update)
    if keep is not None:
        where, update = [p[keep] for p in where], update[keep]
    target = np.transpose(result, layout.rest_last)  # a view
    window = numpy_slices(starts, update.shape[update.ndim - len(starts) :], steps)
    key: Any = (*where, *window)
    if combine == "set":
        target[key] = update
    else:
        COMBINES[combine].at(target, key, update)
    return result


def _lower(
    name: str,
    checked: bool,
    _types: Types,
    base: Operand,
    update: Operand,
    *indices: Operand,
    axes: tuple[int, ...],
    batch: int,
    starts: Shape,
    steps: tuple[int, ...],
    combine: Combine,
) -> Scatter:
    layout = Layout(name, base.type, [i.type for i in indices], axes, batch)
    window = len(layout.space)

    def position(u: Index) -> Index:
        loaded = layout.at_indices(indices, u)
        pairs = zip(loaded, layout.sizes, strict=True)
        normal = [wrapped(e, n) if checked else position_of(e) for e, n in pairs]
        return layout.source(u, normal, strided(u[window:], starts, steps))

    def keep(u: Index) -> Expr:
        loaded = zip(layout.at_indices(indices, u), layout.sizes, strict=True)
        return expr.all_of([in_range(e, n, wraps=False) for e, n in loaded])

    check = check_of(indices, layout.sizes, layout.space) if checked else None
    return Scatter(
        base=base,
        space=update.type.shape,
        position=position,
        value=lambda u: update[u],
        combine=_combine(combine, base.type.dtype),
        keep=None if checked or not indices else keep,
        checks=(check,) if check else (),
    )


# --- derivatives ---


def _jvp(
    name: str,
    tangents: Any,
    results: Any,
    base: Any,
    update: Any,
    *indices: Any,
    combine: Combine,
    **place: Any,
) -> tuple[Value]:
    op = OPERATIONS[name]
    [out] = results
    t, u, *_ = (
        v if isinstance(v, Value) else zeros_of(x)
        for v, x in zip(tangents[:2], (base, update), strict=True)
    )
    if combine in ("set", "add"):
        return (apply(op, t, u, *indices, combine=combine, **place),)
    if combine == "mul":
        kept = apply(op, t, update, *indices, combine=combine, **place)
        if not isinstance(tangents[1], Value):
            return (kept,)
        parts = multiply(u, _other_factors(op, base, update, indices, **place))
        return (apply(op, kept, parts, *indices, combine="add", **place),)
    # The mean of the tangents of all elements that equal the extremum.
    read = _read(op, out, update, indices, **place)
    pairs = ((as_value(base), out), (as_value(update), read))
    hits = [astype(equal(v, w), out.dtype) for v, w in pairs]
    weighted = [multiply(v, hit) for v, hit in zip((t, u), hits, strict=True)]
    total, count = (
        apply(op, *v, *indices, combine="add", **place) for v in (weighted, hits)
    )
    return (divide(total, count),)


def _other_factors(
    op: OpDef, base: Any, update: Any, indices: Sequence[Any], **place: Any
) -> Value:
    """Return the product of the other factors for each element of `update`: the old
    value, and the other updates of the same element."""
    base, update = as_value(base), as_value(update)
    is_zero = equal(update, 0)

    def total(start: Any, parts: Any, combine: Combine) -> Any:
        totals = apply(op, start, parts, *indices, combine=combine, **place)
        return _read(op, totals, update, indices, **place)

    def others(parts: Any) -> Any:
        return subtract(total(zeros_of(base), parts, "add"), parts)

    factors = where(is_zero, 1.0, update)
    quotient = divide(total(base, factors, "mul"), factors)
    zeros = others(astype(is_zero, base.dtype))
    # A single zero needs its tangent for second derivatives; products of two vanish.
    zero = where(equal(zeros, 1), others(where(is_zero, update, 0.0)), 0.0)
    return where(equal(zeros, 0), quotient, multiply(quotient, zero))


def _transpose(
    name: str,
    cotangents: Any,
    base: Any,
    update: Any,
    *indices: Any,
    combine: Combine,
    **place: Any,
) -> list[Any]:
    op = OPERATIONS[name]
    [ct] = cotangents
    none = [None] * len(indices)
    if combine == "mul":
        kept = apply(op, ct, update, *indices, combine=combine, **place)
        return [kept, None, *none]
    ct_update = None
    if not isinstance(update, Value):
        ct_update = _read(op, ct, update, indices, **place)
        stays = _stays(op, base, update, indices, combine, **place)
        ct_update = ct_update if stays is None else where(stays, ct_update, 0.0)
    if combine == "set":
        ct = apply(op, ct, zeros_of(update), *indices, combine=combine, **place)
    return [ct, ct_update, *none]


def _read(
    op: OpDef,
    x: Any,
    update: Any,
    indices: Sequence[Any],
    *,
    axes: tuple[int, ...],
    batch: int,
    starts: Shape,
    steps: tuple[int, ...],
) -> Any:
    """Return the elements of `x` that `update` is written to; any if dropped."""
    rest = [a for a in range(batch, x.ndim) if a not in axes]
    sizes = update.type.shape[update.type.ndim - len(rest) :]
    for axis, start, n, step in zip(rest, starts, sizes, steps, strict=True):
        x = part(x, axis, start, n, step)
    if not indices:
        return x
    reader = gather if op is scatter else gather_clip
    return apply(reader, x, *indices, axes=axes, batch=batch)


def _stays(
    op: OpDef,
    base: Any,
    update: Any,
    indices: Sequence[Any],
    combine: Combine,
    axes: tuple[int, ...],
    **place: Any,
) -> Any:
    """Return a mask of the updates that are in range and not overwritten.

    None: all of them.
    """
    if not indices or (combine == "add" and op is scatter):
        return None
    shape = update.type.shape
    if combine == "add":
        tests = [
            equal(in_bounds(i, base.type.shape[a]), i)
            for i, a in zip(map(as_value, indices), axes, strict=True)
        ]
        inside: Any = reduce(logical_and, tests)
        return reshaped(inside, inside.shape + (1,) * len(place["starts"]))
    number = reshaped(positions((prod(shape, start=1),), 0), shape)
    none = apply(fill, Constant(-1, number.type.with_shape(())), shape=base.type.shape)
    place["axes"] = axes
    written = apply(op, none, number, *indices, combine="set", **place)
    return equal(_read(op, written, update, indices, **place), number)


def _batch(
    op: OpDef,
    size: Size,
    batched: tuple[bool, ...],
    base: Argument,
    update: Argument,
    *indices: Argument,
    axes: tuple[int, ...],
    batch: int,
    **window: Any,
) -> Sequence[Value]:
    args = [
        batching.in_batch(size, batched[0], base),
        batching.in_batch(size, batched[1], update),
        *batched_indices(size, batched[2:], indices),
    ]
    moved = tuple([axis + 1 for axis in axes])
    return bind(op, args, {"axes": moved, "batch": batch + 1, **window})


def _scatter_op(
    name: str, doc: str, *, checked: bool, samples: tuple[Sample, ...]
) -> OpDef:
    run = partial(_run, name, checked)
    run.__doc__ = doc
    return OpDef(
        name=name,
        promote=None,
        # T[*b, *s], T[*b, *w, *rest], i[*b, *w]... -> T[*b, *s]
        infer=partial(_infer, name),
        run=run,
        lower=partial(_lower, name, checked),
        jvp=partial(_jvp, name),
        transpose=partial(_transpose, name),
        effects=TRAP if checked else frozenset(),
        batch=_batch,
        samples=samples,
    )


def _scatter_samples(combine: Combine, kinds: tuple[dtypes.DType, ...]) -> list[Sample]:
    rows = {"batch": 0, "combine": combine}
    window = {"starts": (0,), "steps": (1,)}
    none: dict[str, Any] = {"starts": (), "steps": ()}
    return [
        Sample(
            ("T[5, 4]", "T[6, 4]", "i64[6]"), {"axes": (0,), **window, **rows}, kinds
        ),
        Sample(("T[4]", "T[]", "i32[]"), {"axes": (0,), **none, **rows}),
        Sample(
            ("T[4, 6]", "T[3, 2]", "i64[3]"),
            {"axes": (0,), **rows, "starts": (5,), "steps": (-2,)},
        ),
        Sample(
            ("T[2, 4]", "T[2, 3]", "i64[2, 3]"),
            {"axes": (1,), **none, **rows, "batch": 1},
        ),
    ]


_SCATTER_SAMPLES: Final = (
    *_scatter_samples("set", dtypes.ALL),
    *_scatter_samples("add", dtypes.ALL),
    *_scatter_samples("mul", dtypes.FLOATS),
    *_scatter_samples("min", dtypes.ALL),
    *_scatter_samples("max", dtypes.ALL),
)

scatter: Final = _scatter_op(
    "scatter",
    """`base` with `update` combined into it at `indices` along `axes`.

    Along the other axes an update covers what begins at `starts` in steps of `steps`.
    Updates of one element are applied in row-major order. A negative index counts from
    the end; one out of range is an `IndexingError`.
    """,
    checked=True,
    samples=_SCATTER_SAMPLES,
)
scatter_drop: Final = _scatter_op(
    "scatter_drop",
    """`scatter` that leaves out updates whose indices are negative or too large.""",
    checked=False,
    samples=_SCATTER_SAMPLES,
)


# --- sums by segment ------------------------------------------------------------------


def segment_sum(data: Any, segment_ids: Any, num_segments: Size | None = None) -> Value:
    """Return the sums of the rows of `data` with equal segment ids.

    Rows are added in order; a row whose id is negative or too large is dropped.

    Args:
        data: A tensor T[n, *s].
        segment_ids: The segment of each row, i[n], in any order.
        num_segments: The number of sums. None: one more than the largest id, which then
            must not be traced.

    Returns:
        T[num_segments, *s].

    Raises:
        DTypeError: `segment_ids` are no integers.
        ShapeError: there is not an id for each row.
        TraceError: `num_segments` is None, and `segment_ids` is traced.

    >>> hf.segment_sum(hf.asarray([1, 2, 3]), hf.asarray([0, 1, 0]))
    Tensor([4, 2], i64[2])
    """
    data = as_tensor("segment_sum", data)
    ids = as_tensor("segment_sum", segment_ids, 1)
    check_indices("segment_sum", [ids.type])
    if data.ndim and ids.ndim == 1:
        data, ids = matched("segment_sum", (data, ids), (0, 0))
    if ids.ndim != 1 or not data.ndim or not data.shape[0] == ids.shape[0]:
        raise ShapeError(
            "segment_sum: `segment_ids` must have a number for each row of `data`, and "
            f"they are {ids.type} and {data.type}."
        )
    if num_segments is None:
        remedy = "Give `num_segments`."
        elements = concrete("segment_sum", ids, remedy)
        num_segments = max(int(elements.max(initial=-1)) + 1, 0)
    count = as_size("segment_sum", num_segments, "num_segments")
    rest = data.shape[1:]
    sums = sizes_of("segment_sum", (count, *rest), data.type.dtype)
    return apply(
        scatter_drop,
        zeros(sums, dtype=data.type.dtype),
        data,
        ids,
        axes=(0,),
        batch=0,
        starts=(0,) * len(rest),
        steps=(1,) * len(rest),
        combine="add",
    )


def one_hot(
    indices: Any,
    num_classes: Size,
    /,
    *,
    dtype: DTypeLike | None = None,
    axis: int = -1,
) -> Value:
    """Return ones at `indices` along a new axis, and zeros elsewhere.

    An index that is negative or too large gives zeros only.

    Args:
        indices: Integers i[*s].
        num_classes: The size of the new axis.
        dtype: The dtype of the result; None: the default float.
        axis: The position of the new axis in the result.

    Raises:
        AxisError: the result has no such axis.
        DTypeError: `indices` are no integers.

    >>> hf.one_hot(hf.asarray([2, 0]), 3)
    Tensor([[0., 0., 1.],
            [1., 0., 0.]], f32[2, 3])
    """
    target = optional_dtype("one_hot", dtype, dtypes.DEFAULT_FLOAT)
    indices = as_tensor("one_hot", indices)
    check_indices("one_hot", [indices.type])
    ndim = indices.ndim + 1
    axis = normalize_axis("one_hot", axis, ndim)
    count = as_size("one_hot", num_classes, "num_classes")
    shape = (*indices.shape[:axis], 1, *indices.shape[axis:])
    line = tuple(count if a == axis else 1 for a in range(ndim))
    # In i64, as classes would wrap in a small dtype such as i8.
    wide = (
        indices
        if indices.type.dtype is dtypes.uint64
        else astype(indices, dtypes.int64, copy=False)
    )
    sizes_of("one_hot", (*indices.shape, count), target)
    classes = positions(line, axis, wide.type.dtype)
    return astype(equal(reshaped(wide, shape), classes), target)
