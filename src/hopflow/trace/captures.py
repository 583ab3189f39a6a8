"""Tensors from outside that a body reads or writes, and the inputs for them."""

from collections.abc import Callable
from dataclasses import dataclass

from hopflow.bind import Value
from hopflow.graph.core import Var
from hopflow.tensor import EagerTensor, Tensor
from hopflow.trace.functional import TracedTensor

__all__ = ["Capture", "is_private", "is_written", "overlap"]


@dataclass(slots=True)
class Capture:
    """A tensor of the parent's, and the input that stands for it here.

    memory   the tensor, of the outermost trace or eager, that it is or is a view of
    """

    origin: Tensor
    input: Var
    tensor: TracedTensor
    memory: Tensor

    @property
    def written(self) -> bool:
        return is_written(self.tensor)

    def overlaps(self, other: "Capture") -> bool:
        """Whether they may share memory."""
        return overlap(self.memory, other.memory)


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether tensors that are no views in a trace may share memory."""
    if isinstance(a, EagerTensor) and isinstance(b, EagerTensor):
        return a.overlaps(b)
    return a is b


def is_written(tensor: TracedTensor) -> bool:
    """Whether an input of a graph has been given another value since. One that is a
    part of another input never is: that one is."""
    storage = tensor.storage
    return storage is not None and storage.version > 0 and storage.within is None


def is_private(origin: object, is_adopted: Callable[[Value], bool]) -> bool:
    """Whether a captured tensor is one that the traced function made of numbers."""
    while isinstance(origin, TracedTensor):
        outer = getattr(origin.tracer, "captures", {}).values()
        origin = next((c.origin for c in outer if c.tensor is origin), None)
    return (
        isinstance(origin, EagerTensor)
        and is_adopted(origin)
        and origin.storage.private
    )
