"""Tangents and cotangents that are zero, and are made only where someone reads them."""

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
    """A tangent or cotangent of this type that is zero."""

    type: TensorType


@dataclass(frozen=True, slots=True)
class Unknown:
    """The operand that an operation is transposed in: it has a type, and no value."""

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
    return isinstance(tangent, Zero)


def instantiate(tangent: Tangent) -> Value:
    """The tangent as a tensor."""
    if isinstance(tangent, Zero):
        return zeros(tangent.type.shape, dtype=tangent.type.dtype)
    return tangent


def added(a: Tangent, b: Tangent) -> Tangent:
    if isinstance(a, Zero):
        return b
    return a if isinstance(b, Zero) else add(a, b)


def fitted(tangent: Tangent, type_: TensorType) -> Tangent:
    """A tangent in the shape of what it belongs to, broadcast if it has to be."""
    if isinstance(tangent, Zero):
        return Zero(type_)
    if same_shape(tangent.shape, type_.shape):
        return tangent
    return broadcast_to(tangent, type_.shape)


def unbroadcast(cotangent: Tangent, type_: TensorType) -> Tangent:
    """A cotangent summed over the axes that its operand was broadcast along."""
    if isinstance(cotangent, Zero) or same_shape(cotangent.shape, type_.shape):
        return cotangent
    extra = cotangent.ndim - type_.ndim
    axes: Sequence[int] = [
        *range(extra),
        *(
            extra + i
            for i, (n, own) in enumerate(
                zip(cotangent.shape[extra:], type_.shape, strict=True)
            )
            if not same_shape((n,), (own,))
        ),
    ]
    return reshape(reduce_sum(cotangent, axis=tuple(axes)), type_.shape)
