"""The types of values: a dtype and a shape, printed as `f32[s0, 4]`."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from hopflow.dtypes import DType, float64, int64
from hopflow.symbolic.size import Size, SymInt

Shape: TypeAlias = tuple[Size, ...]


@dataclass(frozen=True, slots=True)
class TensorType:
    """`dtype[shape]`. `weak` marks what came from Python numbers alone: its dtype gives
    way in promotion. It is no part of the text, and layout is no part of the type."""

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
        """Whether all sizes are numbers."""
        return SymInt not in map(type, self.shape)

    def with_shape(self, shape: Sequence[Size]) -> "TensorType":
        return TensorType(self.dtype, tuple(shape), self.weak)

    def strong(self) -> "TensorType":
        return TensorType(self.dtype, self.shape) if self.weak else self

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


_shared: dict[tuple[str, Shape, bool], TensorType] = {}
_MOST_SHARED = 1 << 12


def shared(type_: TensorType) -> TensorType:
    """One object for equal types of known sizes: what tells types by identity, to find
    what it knows of them, finds it."""
    if not type_.is_static:
        return type_
    key = (type_.dtype.short, type_.shape, type_.weak)
    known = _shared.get(key)
    if known is None:
        if len(_shared) >= _MOST_SHARED:
            _shared.clear()
        known = _shared[key] = type_
    return known


SYMBOL_TYPE = TensorType(int64, weak=True)
"""The type of a shape symbol passed as a value; weak, as Python's integers are."""

FLOAT_TYPE = TensorType(float64, weak=True)
"""The type of a Python float that is an input, or computed from such."""


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


def same_type(a: TensorType, b: TensorType) -> bool:
    return a.dtype is b.dtype and same_shape(a.shape, b.shape)


def may_be(a: TensorType, b: TensorType) -> bool:
    """Whether a value of one type may be one of the other: no size that is known of
    both differs."""
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
    expected: Sequence[TensorType], found: Sequence[TensorType]
) -> tuple[str, str] | None:
    """Both rows of types as messages print them, if values of the one may not be those
    of the other."""
    if len(expected) == len(found) and all(map(may_be, expected, found)):
        return None
    wanted, got = (", ".join(map(str, row)) for row in (expected, found))
    return f"({wanted})", f"({got})"
