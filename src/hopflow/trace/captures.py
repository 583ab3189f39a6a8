"""Captures: tensors from outside that a body uses, and the inputs for them."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from hopflow.bind import Value
from hopflow.graph.core import Graph, Node, Var
from hopflow.graph.rewriting import static_symbols
from hopflow.ops.rules import Array
from hopflow.tensor import EagerTensor, Tensor
from hopflow.tensor.eager import share_elements
from hopflow.trace.functional import Chain, TracedTensor, ViewStep


@dataclass(slots=True)
class Capture:
    """A tensor of the parent, and the input for it in a trace.

    origin   the tensor of the parent
    input    the var of the input
    tensor   the traced tensor of the input
    memory   the tensor, eager or of the outermost trace, that has its memory
    """

    origin: Tensor
    input: Var
    tensor: TracedTensor
    memory: Tensor

    @property
    def written(self) -> bool:
        return is_written(self.tensor)

    def overlaps(self, other: "Capture") -> bool:
        """Whether the two captures may alias."""
        return overlap(self.memory, other.memory)


class Part(NamedTuple):
    """A chain of views of a tensor that is eager or of the outermost trace."""

    base: Tensor
    chain: Chain


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors, which are no views in a trace, may alias."""
    if isinstance(a, EagerTensor) and isinstance(b, EagerTensor):
        return a.overlaps(b)
    return a is b


def parts_overlap(a: Part, b: Part) -> bool:
    """Whether two parts may alias. Parts of one tensor alias only if they have an
    element in common, as far as that is known."""
    if not overlap(a.base, b.base):
        return False
    memory_a = _memory(a.base)
    memory_b = memory_a if a.base is b.base else _memory(b.base)
    elements_a, elements_b = _elements(memory_a, a.chain), _elements(memory_b, b.chain)
    return (
        elements_a is None
        or elements_b is None
        or share_elements(elements_a, elements_b)
    )


def _memory(tensor: Tensor) -> Array | None:
    """Return a tensor's array; for a traced tensor of static shape, a dummy of the same
    layout, else None."""
    if isinstance(tensor, EagerTensor):
        return tensor.array
    is_known = all(isinstance(n, int) for n in tensor.shape)
    return np.empty(tensor.shape, np.int8) if is_known else None


def _elements(memory: Array | None, chain: Chain) -> Array | None:
    """Return the part of `memory` at the end of a chain, if it is a NumPy view."""
    part = memory
    for step in chain:
        if part is None or not isinstance(step, ViewStep) or step.operands:
            return None
        if list(static_symbols(step.params.values())):
            return None
        view = step.op.run(part, **step.params)
        part = view if np.may_share_memory(view, part) or not view.size else None
    return part


def is_written(tensor: TracedTensor) -> bool:
    """Whether an input of a graph was written. An input that is embedded in another one
    never is, because that one is."""
    storage = tensor.storage
    return storage is not None and storage.version > 0 and storage.embedding is None


def hold_captures(graph: Graph, attributes: Iterable[tuple[Var, str, Any]]) -> None:
    """Turn vars of a root graph into attributes of these names and values."""
    nodes: list[Node] = []
    for var, name, value in attributes:
        var.node = Node("get_attr", None, (), {}, (var,), name)
        nodes.append(var.node)
        graph.attributes[name] = value
    graph.nodes[:0] = nodes


def is_private(origin: object, is_adopted: Callable[[Value], bool]) -> bool:
    """Whether a captured tensor is one that the traced function made from numbers."""
    while isinstance(origin, TracedTensor):
        outer = getattr(origin.tracer, "captures", {}).values()
        origin = next((c.origin for c in outer if c.tensor is origin), None)
    return (
        isinstance(origin, EagerTensor)
        and is_adopted(origin)
        and origin.storage.private
    )
