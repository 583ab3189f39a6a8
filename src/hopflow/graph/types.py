"""The types of values: a dtype and a shape, printed as `f32[s0, 4]`."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from hopflow.dtypes import DType, float64, int64
from hopflow.symbolic.scalars import terms_of
from hopflow.symbolic.size import Size, SymInt

Shape: TypeAlias = tuple[Size, ...]


@dataclass(frozen=True, slots=True)
class TensorType:
    """`dtype[shape]`.

    A `weak` type comes from Python numbers alone: its dtype gives way in promotion.
    Text and comparisons ignore it. The layout is not part of the type.
    """

    dtype: DType
    shape: Shape = ()
    weak: bool = field(default=False, compare=False)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> Size:
        """The number of elements."""
        total: Size = 1
        for n in self.shape:
            total = total * n
        return total

    @property
    def is_static(self) -> bool:
        """Whether all sizes are numbers, not symbols."""
        return SymInt not in map(type, self.shape)

    def with_shape(self, shape: Sequence[Size]) -> "TensorType":
        return TensorType(self.dtype, tuple(shape), self.weak)

    def strong(self) -> "TensorType":
        return TensorType(self.dtype, self.shape) if self.weak else self

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


_shared: dict[tuple[str, Shape, bool], TensorType] = {}
_MAX_SHARED = 1 << 12


def shared(type_: TensorType) -> TensorType:
    """Return the same object for equal static types, for memo tables that are keyed
    by the identity of types."""
    if not type_.is_static:
        return type_
    key = (type_.dtype.short, type_.shape, type_.weak)
    canonical = _shared.get(key)
    if canonical is None:
        if len(_shared) >= _MAX_SHARED:
            _shared.clear()
        canonical = _shared[key] = type_
    return canonical


SYMBOL_TYPE = TensorType(int64, weak=True)
"""The type of a symbol that is passed as a value: weak, like a Python int."""

FLOAT_TYPE = TensorType(float64, weak=True)
"""The type of a Python float that is an input, or computed from inputs."""


def same_size(a: Size, b: Size) -> bool:
    """Whether two sizes are provably equal; never raises."""
    if isinstance(a, SymInt):
        return a.same(b)
    return b.same(a) if isinstance(b, SymInt) else a == b


def is_one(size: Size) -> bool:
    """Whether a size is provably 1."""
    return same_size(size, 1)


def is_zero(size: Size) -> bool:
    """Whether a size is provably 0."""
    return same_size(size, 0)


def same_shape(a: Shape, b: Shape) -> bool:
    return a is b or (len(a) == len(b) and all(map(same_size, a, b)))


def common_shape(shapes: Sequence[Shape]) -> Shape | None:
    """Return the shape of all that are no scalars, if it is one; None: there is none,
    or only facts could prove it. It asks nothing about symbols."""
    first, *others = [shape for shape in shapes if shape] or [()]
    is_common = all([_is_written_alike(first, other) for other in others])
    return first if first and is_common else None


def _is_written_alike(a: Shape, b: Shape) -> bool:
    """Whether two shapes are the same expressions."""
    return a is b or (
        len(a) == len(b)
        and all(
            [n is m or terms_of(n) == terms_of(m) for n, m in zip(a, b, strict=True)]
        )
    )


def same_type(a: TensorType, b: TensorType) -> bool:
    return a.dtype is b.dtype and same_shape(a.shape, b.shape)


def may_be(a: TensorType, b: TensorType) -> bool:
    """Whether a value may be of both types: no sizes that are numbers differ."""
    return (
        a.dtype is b.dtype
        and a.ndim == b.ndim
        and all(
            n == m
            for n, m in zip(a.shape, b.shape, strict=True)
            if isinstance(n, int) and isinstance(m, int)
        )
    )


def differing(
    expected: Sequence[TensorType], actual: Sequence[TensorType]
) -> tuple[str, str] | None:
    """Return both lists of types as text if values of the one cannot be of the
    other, else None."""
    if len(expected) == len(actual) and all(map(may_be, expected, actual)):
        return None
    expected_text, actual_text = (
        ", ".join(map(str, row)) for row in (expected, actual)
    )
    return f"({expected_text})", f"({actual_text})"
