"""Symbolic zeros: tangents and cotangents that are materialised only when read."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from hopflow.bind import Value
from hopflow.graph.types import TensorType, same_shape
from hopflow.ops.creation import zeros
from hopflow.ops.elementwise import add
from hopflow.ops.manipulation import broadcast_to, reshape
from hopflow.ops.reduce import sum as reduce_sum


@dataclass(frozen=True, slots=True)
class Zero:
    """A symbolic zero: a tangent or cotangent of this type that is zero."""

    type: TensorType


@dataclass(frozen=True, slots=True)
class Unknown:
    """The linear operand of a transposed operation: it has a type, and no value."""

    type: TensorType

    @property
    def shape(self) -> Any:
        return self.type.shape

    @property
    def ndim(self) -> int:
        return self.type.ndim

    @property
    def dtype(self) -> Any:
        return self.type.dtype


Tangent: TypeAlias = Value | Zero
LinearMap: TypeAlias = Callable[[Sequence[Tangent]], Sequence[Tangent]]


def is_zero(tangent: Tangent) -> bool:
    """Whether a tangent is a symbolic zero."""
    return isinstance(tangent, Zero)


def instantiate(tangent: Tangent) -> Value:
    """Return a tangent as a tensor."""
    if isinstance(tangent, Zero):
        return zeros(tangent.type.shape, dtype=tangent.type.dtype)
    return tangent


def added(a: Tangent, b: Tangent) -> Tangent:
    """Return the sum of two tangents."""
    if isinstance(a, Zero):
        return b
    return a if isinstance(b, Zero) else add(a, b)


def fitted(tangent: Tangent, type_: TensorType) -> Tangent:
    """Broadcast a tangent to the shape of its primal, of this type."""
    if isinstance(tangent, Zero):
        return Zero(type_)
    if same_shape(tangent.shape, type_.shape):
        return tangent
    return broadcast_to(tangent, type_.shape)


def unbroadcast(cotangent: Tangent, type_: TensorType) -> Tangent:
    """Sum a cotangent over the axes along which its operand was broadcast."""
    if isinstance(cotangent, Zero) or same_shape(cotangent.shape, type_.shape):
        return cotangent
    extra = cotangent.ndim - type_.ndim
    axes: Sequence[int] = [
        *range(extra),
        *(
            extra + i
            for i, (n, m) in enumerate(
                zip(cotangent.shape[extra:], type_.shape, strict=True)
            )
            if not same_shape((n,), (m,))
        ),
    ]
    return reshape(reduce_sum(cotangent, axis=tuple(axes)), type_.shape)
