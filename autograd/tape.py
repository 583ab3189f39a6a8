"""`Tape`: a trace that computes as it records, so that Python may look at values."""

from collections.abc import Sequence
from math import inf
from typing import Any

from hopflow.autograd.forward import run_node
from hopflow.bind import Interpreter, Operand, Value, bind, current, using
from hopflow.graph.core import Arg, Constant, Node, Var, size_of
from hopflow.ops.opdef import OpDef
from hopflow.symbolic.size import Size
from hopflow.trace.functional import TracedTensor
from hopflow.trace.functionalize import Functionalize
from hopflow.trace.tracer import Tracer
from hopflow.zeros import Tangent, Zero

__all__ = ["LinearTracer", "Tape", "UsesOperator"]


class UsesOperator(BaseException):
    """What a rule does with tangents is no chain of operations. No error: it is caught
    where the rule is run, and no handler of the user's is to do so."""


class LinearTracer(Tracer):
    """Records what is done with tangents, and leaves the rest to the tracer below.

    What it records is linear in its operands; what it captures are the residuals.

    refuses_operators  whether an operator of its operands is a `UsesOperator`
    """

    __slots__ = ("refuses_operators",)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.refuses_operators = False

    def below(self, operand: Operand) -> Operand:
        """A residual as the tracer below has it; anything else as it is."""
        if type(operand) is not TracedTensor or operand.tracer is not self:
            return operand
        node = operand.source.node
        if node.section == "symbol":
            assert node.symbol is not None
            with using(self.parent):
                return current().value_of(size_of(node.symbol))
        if node.section == "capture":
            [known] = [c.origin for c in self.captures.values() if c.input.node is node]
            return known
        return operand

    def process(
        self, op: Any, args: Sequence[Operand], params: dict[str, Any]
    ) -> tuple[Value, ...]:
        args = [self.below(a) for a in args]
        if any(type(a) is TracedTensor and a.tracer is self for a in args):
            if self.refuses_operators and type(op) is not OpDef:
                raise UsesOperator
            return self.record(op, args, params)
        with using(self.parent):
            return bind(op, args, params)

    def symbol_of(
        self, value: Value, min: float = -inf, max: Size | float = inf
    ) -> Size:
        known = self.below(value)
        assert isinstance(known, Value)
        with using(self.parent):
            return current().symbol_of(known, min, max)


class Tape(Functionalize):
    """A functionalizing tracer each of whose vars has a tangent too.

    linear    None: tangents are values too. Else they are tensors of this tracer
    """

    __slots__ = ("linear", "tangents")

    def __init__(
        self, parent: Interpreter, name: str, linear: LinearTracer | None = None
    ) -> None:
        super().__init__(parent, name)
        self.linear = linear
        self.tangents: dict[Var, Tangent] = {}

    def given(self, value: Value, tangent: Tangent, name: str) -> TracedTensor:
        """A new operand that has this value and tangent."""
        tensor = self.operand(value.type, name)
        self.values[tensor.source] = value
        self.tangents[tensor.source] = tangent
        return tensor

    def run(self, node: Node) -> Sequence[Value]:
        operands = [self.value(a) for a in node.args]
        given = [self.tangent(a) for a in node.args]
        values, found = run_node(node.op, operands, given, node.params, self.linear)
        self.tangents.update(zip(node.results, found, strict=True))
        return values

    def tangent(self, arg: Arg) -> Tangent:
        known = None if isinstance(arg, Constant) else self.tangents.get(arg)
        return Zero(arg.type) if known is None else known

    def current(self, tensor: Operand) -> tuple[Operand, Tangent]:
        """What a tensor of this trace, or of one below, holds now; and its tangent."""
        if isinstance(tensor, Constant):
            return tensor, Zero(tensor.type)
        var = self.read(self.localize(tensor))
        return self.values[var], self.tangent(var)
