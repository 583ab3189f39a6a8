"""`LinearTracer`: a trace of what is done with tangents."""

from collections.abc import Iterator, Sequence
from math import inf
from typing import Any

from hopflow.bind import Interpreter, Operand, Value, bind, current, using
from hopflow.graph.core import size_of
from hopflow.ops.opdef import OpDef
from hopflow.symbolic.boolean import SymBool
from hopflow.symbolic.size import Size, SymFloat, SymInt
from hopflow.trace.functional import TracedTensor
from hopflow.trace.tracer import Tracer
from hopflow.zeros import Tangent, Zero


class UsesOperator(BaseException):
    """What a rule does with tangents is no chain of operations. No error: it is caught
    where the rule is run, and no handler of the user's is to do so."""


class LinearTracer(Tracer):
    """Records what is done with tangents, and leaves the rest to the tracer below.

    What it records is linear in its operands; what it captures are the residuals.

    pushed             whether tangents are to go through it; else it is only transposed
    refuses_operators  whether an operator of its operands, or a write, is a
                       `UsesOperator`
    base       what computes all else
    is_body    whether the residuals leave a body: none has a size that is made there
    """

    __slots__ = ("base", "is_body", "pushed", "refuses_operators")

    def __init__(self, parent: Interpreter | None, name: str, *, pushed: bool) -> None:
        super().__init__(parent, name)
        self.base = parent or current()
        self.pushed = pushed
        self.refuses_operators = False
        self.is_body = False

    def below(self, operand: Operand) -> Operand:
        """A residual as the tracer below has it; anything else as it is."""
        if type(operand) is not TracedTensor or operand.tracer is not self:
            return operand
        node = operand.source.node
        if node.section == "symbol":
            assert node.symbol is not None
            return self.value_of(size_of(node.symbol))
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
        with using(self.base):
            return bind(op, args, params)

    def value_of(self, number: SymInt | SymFloat | SymBool) -> Value:
        with using(self.base):
            return current().value_of(number)

    def symbol_of(
        self, value: Value, min: float = -inf, max: Size | float = inf
    ) -> Size:
        known = self.below(value)
        assert isinstance(known, Value)
        with using(self.base):
            return current().symbol_of(known, min, max)

    def prepare_write(self, tensor: TracedTensor) -> None:
        if self.refuses_operators:  # what is below cannot hold a tangent
            raise UsesOperator
        super().prepare_write(tensor)

    def derive(
        self, rule: Any, tangents: Sequence[Operand], known: Sequence[Value]
    ) -> tuple[Value, ...]:
        """Record a node of a `Recorded` rule, which holds the residuals itself."""
        if not any(type(t) is TracedTensor and t.tracer is self for t in tangents):
            with using(self.base):  # as what is no operand's; see `process`
                return tuple(rule.push(tangents, known))
        args = [self.arg(t) for t in tangents]
        node = self.graph.call(rule, args, {"known": known}, rule.types)
        return tuple([TracedTensor(self, var) for var in node.results])


def linear_of(tangents: Sequence[Tangent]) -> LinearTracer:
    """Where tangents are computed, of which one at least is not zero."""
    return next(linear_tracers(tangents))


def linear_tracers(tangents: Sequence[Tangent]) -> Iterator[LinearTracer]:
    """The linear trace of each tangent that depends on what it is a function of."""
    return (found for t in tangents if (found := _linear_trace(t)) is not None)


def counted(
    tangents: Sequence[Tangent], linear: Interpreter | None
) -> Sequence[Tangent]:
    """Tangents as operators take them: in a trace that is only transposed, those that
    depend on no operand of it, as a rule may make them, are as good as zero."""
    if not isinstance(linear, LinearTracer) or linear.pushed:
        return tangents
    return [Zero(t.type) if _linear_trace(t) is None else t for t in tangents]


def _linear_trace(tangent: Tangent) -> LinearTracer | None:
    tracer = tangent.tracer if isinstance(tangent, TracedTensor) else None
    return tracer if isinstance(tracer, LinearTracer) else None
