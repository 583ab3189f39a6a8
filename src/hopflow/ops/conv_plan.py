"""How the compiler computes a convolution: `composed`, and the choices it makes.

Of one group, `m` output channels are m rows of weights, each of `k` elements (channels
times window), and the result has n columns, one for each place of the window. The ways:

- Written out: each element of the result is an expression of k products, which the
  compiler computes as vectors of places. Each vector of the input serves one output
  channel only, so this is for few of them, and not many products.
- A product of matrices (`windows.matmul_windows`). Several axes of places are one axis
  in memory if the places between them, where a window would cross an edge, are computed
  too, and left out afterwards. How many axes are merged, and whether the batch is the
  innermost of them, is chosen by the number of vectors that this takes.
- A sum for each element, in vectors along the window: for windows of which there are
  few places, as in the gradient of a filter.

All ways but the last read an input that has been padded before. A large input with
zeros between its elements, as the gradient of a convolution with a stride has, is
convolved in pieces that meet no zeros. Integers are never a product of matrices, and
16-bit floats are computed in float32.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import gcd, prod
from typing import Any, Final, TypeAlias

from hopflow import dtypes
from hopflow.graph.types import Shape, TensorType, is_one, is_zero, same_size
from hopflow.ops.convert import convert
from hopflow.ops.joining import concat_op
from hopflow.ops.matmul import BLAS_TYPES
from hopflow.ops.views import reshape, slice_, transpose
from hopflow.ops.windows import (
    is_less,
    matmul_windows,
    not_negative,
    part_of,
    window_layout,
    window_offsets,
)
from hopflow.symbolic.size import Size

Insert: TypeAlias = Callable[..., Any]
"""(operation, *operands, **params) -> its result, in the graph that is compiled."""

FEW_OUTPUTS: Final = 4
"""Output channels of a group, fewer than which are not a product of matrices."""
LONGEST_SUM: Final = 160
"""Products that are written out."""
LONGEST_IN_ROWS: Final = 48
"""The same along long rows of float32, where a product of matrices takes as long for
more, or less, and less to compile."""
LONG_ROW: Final = 2048
"""Columns of a long row."""
SPLIT: Final = 1 << 20
"""Multiplications of a convolution that is worth being several."""
MOST_PIECES: Final = 16
"""The most convolutions that one becomes."""
SMALL: Final = 1 << 12
"""Multiplications that no product of matrices is worth."""
CALL: Final = 1 << 12
"""The cost of a call of a routine, in multiplications."""
READ: Final = 8
"""The cost of reading a weight, which each call does, in multiplications."""
MOVE: Final = 16
"""The cost of copying an element to another order of axes, in multiplications."""
WASTE: Final = 4
"""The ratio of computed to needed places above which a sum along the window is better.
"""
WASTE_OF_FEW: Final = 1.5
"""The same for few output channels, if the products have long rows; one of short rows
is never better, if any place is wasted."""
TYPICAL: Final = 64
"""The assumed value of a symbolic size, and of a symbolic batch."""


@dataclass(frozen=True)
class Conv:
    """A convolution: the types and params of the primitive."""

    x: TensorType
    w: TensorType
    strides: tuple[int, ...]
    before: Shape
    sizes: Shape
    dilation: tuple[int, ...]
    input_dilation: tuple[int, ...]
    groups: Size

    @property
    def rank(self) -> int:
        return len(self.strides)

    @property
    def batch(self) -> Size:
        return self.x.shape[0]

    @property
    def window(self) -> Shape:
        return self.w.shape[2:]

    @property
    def outputs(self) -> Size:
        """The output channels of a group."""
        return part_of(self.w.shape[0], self.groups)

    @property
    def products(self) -> Size:
        """The number of products in an element of the result."""
        return prod(self.w.shape[1:], start=1)

    @property
    def longest_sum(self) -> int:
        """The greatest number of products that are written out."""
        has_rows = self.strides == (1,) and _typical(*self.sizes) >= LONG_ROW
        pays = has_rows and self.x.dtype is dtypes.float32
        return LONGEST_IN_ROWS if pays else LONGEST_SUM

    @property
    def lengths(self) -> Shape:
        """The elements from the first to the last that the windows cover."""
        quads = zip(self.sizes, self.window, self.strides, self.dilation, strict=True)
        return tuple([(m - 1) * s + (k - 1) * d + 1 for m, k, s, d in quads])

    @property
    def is_padded(self) -> bool:
        """Whether windows may cover what is no element of the input."""
        inputs = zip(self.x.shape[2:], self.before, self.lengths, strict=True)
        return any(d > 1 for d in self.input_dilation) or not all(
            is_less(0, low) is False and is_less(n, length - low) is False
            for n, low, length in inputs
        )

    @property
    def shifts(self) -> list[Size]:
        """How many rows further than the first the last row of a window is."""
        return [
            not_negative(k - 1) * d // s
            for k, d, s in zip(self.window, self.dilation, self.strides, strict=True)
        ]

    @property
    def phases(self) -> tuple[int, ...]:
        """How many different remainders by the stride the places of a window have."""
        triples = zip(self.window, self.dilation, self.strides, strict=True)
        return tuple([1 if is_one(k) else s // gcd(s, d) for k, d, s in triples])


@dataclass(frozen=True)
class Plan:
    """How a convolution becomes products of matrices.

    merged       how many of the last axes are merged into one axis of columns
    batch_last   whether the batch is the last of the merged axes
    """

    merged: int
    batch_last: bool


def _typical(*sizes: Size) -> int:
    return prod(n if isinstance(n, int) else TYPICAL for n in sizes)


def is_written_out(x: TensorType, w: TensorType, params: dict[str, Any]) -> bool:
    """Return whether an element is an expression of all its products: if there are few,
    and nothing is padded."""
    conv = Conv(x, w, **params)
    is_short = isinstance(conv.products, int) and 0 < conv.products <= conv.longest_sum
    return is_short and not conv.is_padded


def axis_to_split(conv: Conv) -> int | None:
    """Return an axis along which elements of the input are at a distance, if it pays to
    convolve each remainder of the places by it alone; else None."""
    work = _typical(conv.batch, conv.w.shape[0], *conv.sizes, conv.products)
    if conv.x.dtype not in BLAS_TYPES or work < SPLIT:
        return None
    pieces = prod(conv.input_dilation)
    if not 1 < pieces <= MOST_PIECES or any(s > 1 for s in conv.strides):
        return None
    known = all(isinstance(n, int) for n in (*conv.before, *conv.window))
    axes = [a for a, d in enumerate(conv.input_dilation) if d > 1]
    return axes[0] if known else None


def plan_of(conv: Conv) -> Plan | None:
    """Return the best plan; None if a product of matrices does not pay."""
    if conv.x.dtype not in BLAS_TYPES:
        return None
    m, k = _typical(conv.outputs), _typical(conv.products)
    needed = _typical(conv.groups, conv.batch, *conv.sizes)
    if needed * m * k <= SMALL or (m < FEW_OUTPUTS and k <= conv.longest_sum):
        return None
    lanes = 64 // conv.x.dtype.itemsize
    best: tuple[int, Plan] | None = None
    for merged in range(conv.rank, 0, -1):
        for batch_last in (False, True):
            plan = Plan(merged, batch_last)
            calls, columns = _calls_and_columns(conv, plan)
            computed = calls * -(-columns // lanes) * lanes
            cost = (computed + calls * READ) * m * k + calls * CALL
            cost += _moved(conv) * MOVE if batch_last else 0
            if best is None or cost < best[0]:
                best, waste = (cost, plan), computed / needed
                has_rows = columns >= LONG_ROW
    assert best is not None
    is_long = _typical(conv.window[-1]) >= lanes
    of_few = WASTE_OF_FEW if has_rows else 1
    most = WASTE if m >= FEW_OUTPUTS else of_few
    return None if is_long and waste > most else best[1]


def _moved(conv: Conv) -> int:
    """Return how many elements are moved if the batch is the last axis."""
    result = _typical(conv.batch, conv.w.shape[0], *conv.sizes)
    return result + _typical(*conv.x.shape)


def _calls_and_columns(conv: Conv, plan: Plan) -> tuple[int, int]:
    outer = conv.rank - plan.merged
    columns = _typical(conv.sizes[outer], *_inner_rows(conv, plan))
    calls = _typical(conv.groups, *conv.sizes[:outer])
    if plan.batch_last:
        return calls, columns * _typical(conv.batch)
    return calls * _typical(conv.batch), columns


def _inner_rows(conv: Conv, plan: Plan) -> list[Size]:
    """Return the sizes of the merged axes after the first, with the places where a
    window crosses an edge."""
    inner = slice(conv.rank - plan.merged + 1, None)
    pairs = zip(conv.sizes[inner], conv.shifts[inner], strict=True)
    return [m + shift for m, shift in pairs]


# --- as other operations --------------------------------------------------------------


def composed(insert: Insert, op: Any, x: Any, w: Any, **params: Any) -> Any:
    """Return a convolution in terms of other operations; None: it is left as it is."""
    conv = Conv(x.type, w.type, **params)
    sizes = (*x.type.shape, *w.type.shape, *conv.sizes)
    if any(map(is_zero, sizes)) or not conv.rank:
        return None
    dtype = x.type.dtype
    if dtype.is_float and dtype.bits == 16:
        wide = [insert(convert, v, dtype=dtypes.float32) for v in (x, w)]
        return insert(convert, insert(op, *wide, **params), dtype=dtype)
    axis = axis_to_split(conv)
    if axis is not None:
        return _split(insert, op, x, w, conv, axis)
    plan = plan_of(conv)
    if plan is not None:
        return _product(insert, x, w, conv, plan)
    if not conv.is_padded or _typical(conv.products) > conv.longest_sum:
        return None
    layout = _layout(insert, x, conv, (1,) * conv.rank, conv.lengths)
    padded = insert(reshape, layout, shape=(*x.type.shape[:2], *conv.lengths))
    zeros, ones = (0,) * conv.rank, (1,) * conv.rank
    return insert(op, padded, w, **{**params, "before": zeros, "input_dilation": ones})


def _split(insert: Insert, op: Any, x: Any, w: Any, conv: Conv, axis: int) -> Any:
    """Return a convolution of an input with zeros between its elements as several of
    the input itself: places at one remainder by the distance of the elements meet the
    same part of the window, and nothing else but zeros."""
    distance, step = conv.input_dilation[axis], conv.dilation[axis]
    low, k = conv.before[axis], conv.window[axis]
    assert isinstance(low, int)
    assert isinstance(k, int)
    period = distance // gcd(distance, step)
    count, at = -(-conv.sizes[axis] // distance), axis + 2
    shape = list(w.type.shape)
    parts = []
    for place in range(distance):
        meets = (t for t in range(period) if (place + t * step - low) % distance == 0)
        first = next(meets, k)
        shape[at] = taps = max(0, -((first - k) // period))
        kept = insert(
            slice_,
            w,
            starts=_at(conv, at, min(first, k - 1) if taps else 0, 0),
            sizes=tuple(shape),
            steps=_at(conv, at, period, 1),
        )
        params = {
            "strides": conv.strides,
            "before": _replaced(
                conv.before, axis, -((place + first * step - low) // distance)
            ),
            "sizes": _replaced(conv.sizes, axis, count),
            "dilation": _replaced(conv.dilation, axis, step // gcd(distance, step)),
            "input_dilation": _replaced(conv.input_dilation, axis, 1),
            "groups": conv.groups,
        }
        part = insert(op, x, kept, **params)
        lengths = part.type.shape
        parts.append(
            insert(reshape, part, shape=(*lengths[: at + 1], 1, *lengths[at + 1 :]))
        )
    whole = insert(concat_op, *parts, axis=at + 1)
    full = (*lengths[:at], count * distance, *lengths[at + 1 :])
    zeros, ones = (0,) * len(full), (1,) * len(full)
    sizes = (*lengths[:at], conv.sizes[axis], *lengths[at + 1 :])
    whole = insert(reshape, whole, shape=full)
    return insert(slice_, whole, starts=zeros, sizes=sizes, steps=ones)


def _at(conv: Conv, axis: int, value: int, otherwise: int) -> tuple[int, ...]:
    return tuple([value if a == axis else otherwise for a in range(conv.rank + 2)])


def _replaced(values: tuple[Any, ...], axis: int, value: Any) -> tuple[Any, ...]:
    return (*values[:axis], value, *values[axis + 1 :])


def _layout(
    insert: Insert,
    x: Any,
    conv: Conv,
    strides: tuple[int, ...],
    rows: Shape,
    **changes: Any,
) -> Any:
    params = {"groups": 1, "phases": (1,) * conv.rank, "batch_last": False, **changes}
    return insert(
        window_layout,
        x,
        before=conv.before,
        dilation=conv.input_dilation,
        strides=strides,
        rows=rows,
        **params,
    )


def _product(insert: Insert, x: Any, w: Any, conv: Conv, plan: Plan) -> Any:
    """Return a convolution as products of matrices."""
    outer = conv.rank - plan.merged
    lengths = [m + shift for m, shift in zip(conv.sizes, conv.shifts, strict=True)]
    if plan.merged > 1:  # what is read for the places that are left out
        lengths[outer] = lengths[outer] + 1
    if not plan.batch_last and _is_laid_out(conv, lengths):
        channels = conv.w.shape[1]
        laid_out = (conv.batch, conv.groups, channels, *conv.phases, *lengths)
        layout = insert(reshape, x, shape=laid_out)
    else:
        layout = _layout(
            *(insert, x, conv, conv.strides, tuple(lengths)),
            groups=conv.groups,
            phases=conv.phases,
            batch_last=plan.batch_last,
        )
    offsets = insert(window_offsets, **_offsets(conv, plan, lengths))
    # The axes of the batch of products: examples, groups if there are several, which
    # are an axis of the weights then, and places of outer axes.
    lead = _lead(conv, plan)
    shape: Shape = (conv.sizes[outer], *_inner_rows(conv, plan))
    if plan.batch_last:
        shape = (*shape, conv.batch)
    weights, of_weights = w, tuple[int, ...]()
    if not is_one(conv.groups):
        split = (conv.groups, conv.outputs, *conv.w.shape[1:])
        weights, of_weights = insert(reshape, w, shape=split), (len(lead) - 1,)
    of_offsets = range(len(lead), len(lead) + outer)
    result = insert(
        matmul_windows,
        *(weights, layout, offsets),
        batch=(*lead, *conv.sizes[:outer]),
        batch_axes=(of_weights, tuple(range(len(lead))), tuple(of_offsets)),
        shape=shape,
    )
    return _places(insert, result, conv, plan)


def _lead(conv: Conv, plan: Plan) -> Shape:
    """Return the first axes of a product: examples, unless they are its last axis, and
    groups, if there are several."""
    examples = () if plan.batch_last else (conv.batch,)
    return examples if is_one(conv.groups) else (*examples, conv.groups)


def _is_laid_out(conv: Conv, lengths: Sequence[Size]) -> bool:
    """Return whether an input has the elements of its layout in their order."""
    is_plain = all(d == 1 for d in (*conv.strides, *conv.input_dilation))
    pairs = zip(conv.x.shape[2:], lengths, strict=True)
    return (
        is_plain
        and all(map(is_zero, conv.before))
        and all(same_size(n, length) for n, length in pairs)
    )


def _offsets(conv: Conv, plan: Plan, rows: Sequence[Size]) -> dict[str, Any]:
    """Return the params of the offsets: of outer places, channels, and the window."""
    outer, channels = conv.rank - plan.merged, conv.w.shape[1]
    last = conv.batch if plan.batch_last else 1
    lengths = [channels, *conv.phases, *rows, last]
    distances = [prod(lengths[a + 1 :], start=1) for a in range(len(lengths) - 1)]
    of_channel, of_phases = distances[0], distances[1 : conv.rank + 1]
    of_rows = distances[conv.rank + 1 :]
    # Only multiples of the common divisor are phases.
    pairs = list(zip(conv.dilation, conv.strides, strict=True))
    others = outer + 1
    return {
        "sizes": (*conv.sizes[:outer], channels, *conv.window),
        "steps": (*[1] * others, *(d // gcd(s, d) for d, s in pairs)),
        "strides": (*[1] * others, *(s // gcd(s, d) for d, s in pairs)),
        "of_phases": (*[0] * others, *of_phases),
        "of_rows": (*of_rows[:outer], of_channel, *of_rows),
    }


def _places(insert: Insert, result: Any, conv: Conv, plan: Plan) -> Any:
    """Return the places of a product in order, without those that are left out."""
    outer, lead = conv.rank - plan.merged, len(_lead(conv, plan))
    channel, has_groups = lead + outer, not is_one(conv.groups)
    outer_axes = range(lead, channel)
    inner_axes = range(channel + 1, channel + 1 + plan.merged)
    batch = result.type.ndim - 1 if plan.batch_last else 0
    groups = (lead - 1,) if has_groups else ()
    order = (batch, *groups, channel, *outer_axes, *inner_axes)
    if order != tuple(range(len(order))):
        result = insert(transpose, result, axes=order)
    sizes = (conv.groups,) if has_groups else ()
    shape = (conv.batch, *sizes, conv.outputs, *conv.sizes)
    if not all(map(same_size, result.type.shape, shape)):
        starts, steps = (0,) * len(shape), (1,) * len(shape)
        result = insert(slice_, result, starts=starts, sizes=shape, steps=steps)
    if has_groups:
        shape = (conv.batch, conv.w.shape[0], *conv.sizes)
        result = insert(reshape, result, shape=shape)
    return result
