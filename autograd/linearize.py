"""`LinearTracer`: a trace of the operations on tangents."""

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
    """A rule does more with tangents than a chain of operations.

    It is caught where the rule runs. It is no `Exception`, so that no handler of a user
    catches it.
    """


class LinearTracer(Tracer):
    """Record the operations on tangents, and leave all others to the tracer below.

    The recorded graph is linear in its operands; its captures are the residuals.

    base               the interpreter that runs all operations that involve no tangent
    pushed             whether tangents will be pushed through the graph; if not, it is
                       only transposed
    refuses_operators  whether an operator on tangents, or a write, raises
                       `UsesOperator`
    is_body            whether the residuals leave a body: none may have a size that the
                       body defines
    """

    __slots__ = ("base", "is_body", "pushed", "refuses_operators")

    def __init__(self, parent: Interpreter | None, name: str, *, pushed: bool) -> None:
        super().__init__(parent, name)
        self.base = parent or current()
        self.pushed = pushed
        self.refuses_operators = False
        self.is_body = False

    def below(self, operand: Operand) -> Operand:
        """Return a residual as a value of the tracer below, else the operand itself."""
        if type(operand) is not TracedTensor or operand.tracer is not self:
            return operand
        node = operand.source.node
        if node.section == "symbol":
            assert node.symbol is not None
            return self.value_of(size_of(node.symbol))
        if node.section == "capture":
            [origin] = [
                c.origin for c in self.captures.values() if c.input.node is node
            ]
            return origin
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
        residual = self.below(value)
        assert isinstance(residual, Value)
        with using(self.base):
            return current().symbol_of(residual, min, max)

    def prepare_write(self, tensor: TracedTensor) -> None:
        if self.refuses_operators:  # a tensor of the tracer below cannot hold a tangent
            raise UsesOperator
        super().prepare_write(tensor)

    def derive(
        self, rule: Any, tangents: Sequence[Operand], residuals: Sequence[Value]
    ) -> tuple[Value, ...]:
        """Record a node of a `Recorded` rule; the residuals are among its params."""
        if not any(type(t) is TracedTensor and t.tracer is self for t in tangents):
            with using(self.base):  # no operand of this trace; see `process`
                return tuple(rule.push(tangents, residuals))
        args = [self.arg(t) for t in tangents]
        node = self.graph.call(rule, args, {"residuals": residuals}, rule.types)
        return tuple([TracedTensor(self, var) for var in node.results])


def linear_of(tangents: Sequence[Tangent]) -> LinearTracer:
    """Return the linear tracer of some tangents, of which at least one is not zero."""
    return next(linear_tracers(tangents))


def linear_tracers(tangents: Sequence[Tangent]) -> Iterator[LinearTracer]:
    """Yield the linear tracer of each tangent that has one."""
    return (tracer for t in tangents if (tracer := _linear_trace(t)) is not None)


def counted(
    tangents: Sequence[Tangent], linear: Interpreter | None
) -> Sequence[Tangent]:
    """Return tangents as operators take them.

    In a trace that is only transposed, a tangent that depends on no operand of the
    trace (a custom rule may return one) contributes nothing, and becomes zero.
    """
    if not isinstance(linear, LinearTracer) or linear.pushed:
        return tangents
    return [Zero(t.type) if _linear_trace(t) is None else t for t in tangents]


def _linear_trace(tangent: Tangent) -> LinearTracer | None:
    tracer = tangent.tracer if isinstance(tangent, TracedTensor) else None
    return tracer if isinstance(tracer, LinearTracer) else None
