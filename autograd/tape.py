"""`Tape`: a trace that also computes, so that Python can read values."""

from collections.abc import Iterator, Sequence

from hopflow.autograd.jvp import run_node
from hopflow.autograd.linearize import LinearTracer
from hopflow.autograd.rule_cache import run_recorded
from hopflow.bind import Interpreter, Operand, Value, current
from hopflow.graph.core import Arg, Constant, Node, Var
from hopflow.ops.convert import copy
from hopflow.ops.opdef import OpDef
from hopflow.tensor import EagerTensor
from hopflow.trace.functional import TracedTensor
from hopflow.trace.functionalize import Functionalize
from hopflow.zeros import Tangent, Zero


class Tape(Functionalize):
    """A functionalizing tracer whose vars also have tangents.

    linear    the tracer of the tangents; None: tangents are computed as values are
    """

    __slots__ = ("linear", "tangents")

    def __init__(
        self, parent: Interpreter, name: str, linear: LinearTracer | None = None
    ) -> None:
        super().__init__(parent, name)
        self.linear = linear
        self.tangents: dict[Node, Sequence[Tangent]] = {}

    def given(self, value: Value, tangent: Tangent, name: str) -> TracedTensor:
        """Add an operand that has this value and tangent."""
        tensor = self.operand(value.type, name)
        self.values[tensor.source] = value
        self.tangents[tensor.source.node] = [tangent]
        return tensor

    def run(self, node: Node) -> Sequence[Value]:
        operands = [self.value(a) for a in node.args]
        in_tangents = [self.tangent(a) for a in node.args]
        run = run_recorded if current().is_eager else run_node
        values, out_tangents = run(
            node.op, operands, in_tangents, node.params, self.linear
        )
        self.tangents[node] = out_tangents
        return values if type(node.op) is OpDef else _unaliased(values, operands)

    def tangent(self, arg: Arg) -> Tangent:
        if type(arg) is Var and (tangents := self.tangents.get(arg.node)) is not None:
            return tangents[arg.index]
        return Zero(arg.type)

    def has_tangent(self, value: Value) -> bool:
        is_below = isinstance(value, TracedTensor) and value.tracer is not self
        if not is_below and not isinstance(self.current(value)[1], Zero):
            return True
        return super().has_tangent(value)

    def current(self, tensor: Operand) -> tuple[Operand, Tangent]:
        """Return the present value of a tensor of any trace, and its tangent."""
        if isinstance(tensor, Constant):
            return tensor, Zero(tensor.type)
        var = self.read(self.localize(tensor))
        return self.values[var], self.tangent(var)


def _unaliased(values: Sequence[Value], operands: Sequence[Operand]) -> Sequence[Value]:
    """Return the results of an operator as new tensors. Those that a custom rule
    returns in the memory of an operand are copied."""
    operand_memory = {
        id(owner) for o in operands if isinstance(o, Value) for owner in _memory(o)
    }
    return [
        v if operand_memory.isdisjoint(map(id, _memory(v))) else copy(v) for v in values
    ]


def _memory(value: Value | None) -> Iterator[object]:
    """Yield what a tensor shares with its views: owners in traces, and the storage."""
    while isinstance(value, TracedTensor):
        value = value if value.storage is None else value.storage.owner
        yield value
        value = value.origin
    if isinstance(value, EagerTensor):
        yield value if value._storage is None else value._storage
