"""Elements of a row at strides: the layout of tensors that share memory."""

from math import prod
from typing import Any, NamedTuple

from hopflow.bind import Value
from hopflow.ops.convert import apply
from hopflow.ops.creation import positions
from hopflow.ops.elementwise import add, multiply
from hopflow.ops.gather import gather_clip
from hopflow.ops.scatter import scatter_drop
from hopflow.ops.views import part, reshaped, transposed, update_slice


class StridedPlace(NamedTuple):
    """The layout of a tensor in a row; offset and strides count elements."""

    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def axes(self) -> list[int]:
        """The axes of sizes other than 1, by falling strides."""
        axes = [a for a, n in enumerate(self.shape) if n != 1]
        return sorted(axes, key=lambda a: -abs(self.strides[a]))

    @property
    def step(self) -> int | None:
        """The distance of neighbours in the order of `axes`; None if it varies."""
        axes = self.axes
        step = self.strides[axes[-1]] if axes else 1
        expected = step
        for axis in reversed(axes):
            if self.strides[axis] != expected:
                return None
            expected *= self.shape[axis]
        return step or None  # a broadcast has stride 0

    def indices(self) -> Any:
        """Return the position in the row of each element."""
        at: Any = positions((1,) * len(self.shape), 0) if self.shape else 0
        for axis, stride in enumerate(self.strides):
            at = add(at, multiply(positions(self.shape, axis), stride))
        return add(at, self.offset)


def take_strided(row: Any, place: StridedPlace) -> Value:
    """Return the tensor that is at `place` in the row-major elements of `row`."""
    row = reshaped(row, (row.type.size,))
    step, axes = place.step, place.axes
    if step is None:
        return apply(gather_clip, row, place.indices(), axes=(0,), batch=0)
    run = part(row, 0, place.offset, place.size, step)
    kept = sorted(axes)
    tensor = reshaped(run, tuple(place.shape[a] for a in axes))
    tensor = transposed(tensor, [axes.index(a) for a in kept])
    return reshaped(tensor, place.shape)  # type: ignore[no-any-return]


def put_strided(row: Any, new: Any, place: StridedPlace) -> Value:
    """Return `row` with the tensor `new` at `place` in its row-major elements."""
    shape = row.shape
    return reshaped(_put(reshaped(row, (row.type.size,)), new, place), shape)  # type: ignore[no-any-return]


def _put(row: Any, new: Any, place: StridedPlace) -> Value:
    step, axes = place.step, place.axes
    if step is None:
        window: dict[str, Any] = {"starts": (), "steps": (), "combine": "set"}
        at = place.indices()
        return apply(scatter_drop, row, new, at, axes=(0,), batch=0, **window)
    kept = sorted(axes)
    tensor = reshaped(new, tuple(place.shape[a] for a in kept))
    run = reshaped(transposed(tensor, [kept.index(a) for a in axes]), (place.size,))
    return apply(update_slice, row, run, starts=(place.offset,), steps=(step,))
