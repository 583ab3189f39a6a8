"""Tensors from outside that a body reads or writes, and the inputs for them."""

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


class Part(NamedTuple):
    """A tensor of the outermost trace, or eager, and the way from it to a part."""

    base: Tensor
    chain: Chain


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether tensors that are no views in a trace may share memory."""
    if isinstance(a, EagerTensor) and isinstance(b, EagerTensor):
        return a.overlaps(b)
    return a is b


def parts_overlap(a: Part, b: Part) -> bool:
    """Whether two parts may share memory; of one tensor, only if an element is in both,
    where it is known which these are."""
    if not overlap(a.base, b.base):
        return False
    first = _memory(a.base)
    second = first if a.base is b.base else _memory(b.base)
    one, other = _elements(first, a.chain), _elements(second, b.chain)
    return one is None or other is None or share_elements(one, other)


def _memory(tensor: Tensor) -> Array | None:
    """A tensor's memory, or some like that of a traced one."""
    if isinstance(tensor, EagerTensor):
        return tensor.array
    is_known = all(isinstance(n, int) for n in tensor.shape)
    return np.empty(tensor.shape, np.int8) if is_known else None


def _elements(memory: Array | None, chain: Chain) -> Array | None:
    """The part of `memory` that a chain leads to, if NumPy has it as a view."""
    found = memory
    for step in chain:
        if found is None or not isinstance(step, ViewStep) or step.operands:
            return None
        if list(static_symbols(step.params.values())):
            return None
        view = step.op.run(found, **step.params)
        found = view if np.may_share_memory(view, found) or not view.size else None
    return found


def is_written(tensor: TracedTensor) -> bool:
    """Whether an input of a graph has been given another value since. One that is a
    part of another input never is: that one is."""
    storage = tensor.storage
    return storage is not None and storage.version > 0 and storage.within is None


def hold_captures(graph: Graph, held: Iterable[tuple[Var, str, Any]]) -> None:
    """Turn vars of a root graph into attributes, by their names, of these values."""
    nodes: list[Node] = []
    for var, name, value in held:
        var.node = Node("get_attr", None, (), {}, (var,), name)
        nodes.append(var.node)
        graph.attributes[name] = value
    graph.nodes[:0] = nodes


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
