"""`Tape`: a trace that computes as it records, so that Python may look at values."""

from collections.abc import Sequence
from math import inf
from typing import Any

from hopflow.autograd.forward import run_node
from hopflow.bind import Interpreter, Operand, Value, bind, current, using
from hopflow.graph.core import Arg, Constant, Node, Var, plain_symbol, size_of
from hopflow.graph.types import same_shape
from hopflow.ops.opdef import OpDef
from hopflow.symbolic.env import ShapeEnv
from hopflow.symbolic.size import Size, Symbol
from hopflow.tensor import Tensor
from hopflow.trace.functional import TracedTensor
from hopflow.trace.source import user_line
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


class Tape(Tracer):
    """A tracer each of whose vars has a value, computed by the interpreter below, and a
    tangent.

    values    what the vars hold, below
    linear    None: tangents are values too. Else they are tensors of this tracer
    """

    __slots__ = ("linear", "tangents", "values")

    def __init__(
        self, parent: Interpreter, name: str, linear: LinearTracer | None = None
    ) -> None:
        env = ShapeEnv(user_line)  # for the bodies of operators
        super().__init__(None if parent.is_eager else parent, name, env=env)
        self.linear = linear
        self.values: dict[Var, Value] = {}
        self.tangents: dict[Var, Tangent] = {}

    # --- inputs ---

    def given(self, value: Value, tangent: Tangent, name: str) -> TracedTensor:
        """A new operand that has this value and tangent."""
        tensor = self.operand(value.type, name)
        self.values[tensor.source] = value
        self.tangents[tensor.source] = tangent
        return tensor

    def localize(self, value: Value) -> TracedTensor:
        tensor = super().localize(value)
        if tensor.source not in self.values:
            for capture in self.captures.values():
                if capture.input not in self.values:
                    self.values[capture.input] = capture.origin
        return tensor

    def define(self, symbol: Symbol) -> Var:
        var = super().define(symbol)
        if isinstance(self.parent, Tracer):
            self.values[var] = TracedTensor(self.parent, self.parent.symbol(symbol))
        return var

    # --- recording ---

    def record(
        self, op: Any, args: Sequence[Operand], params: dict[str, Any]
    ) -> tuple[TracedTensor, ...]:
        results = super().record(op, args, params)
        node = results[0].source.node if results else self.graph.nodes[-1]
        operands = [self.value(a) for a in node.args]
        given = [self.tangent(a) for a in node.args]
        with using(self.parent):
            values, found = run_node(op, operands, given, node.params, self.linear)
        for var, value, tangent in zip(node.results, values, found, strict=True):
            if type(op) is not OpDef and not same_shape(var.type.shape, value.shape):
                # A size that was made within.
                var.type = var.type.with_shape(value.type.shape)
            self.values[var] = value
            self.tangents[var] = tangent
        if node.symbol is not None:
            self._define_as_below(node)
        return results

    def _define_as_below(self, node: Node) -> None:
        """Have a node define the symbol of its value, or none for a known number."""
        [var] = node.results
        known = self.values[var]
        assert node.symbol is not None
        del self.symbols[node.symbol]
        size = known.as_size() if isinstance(known, TracedTensor) else 0
        node.symbol = plain_symbol(size)
        if node.symbol is not None:
            self.symbols[node.symbol] = var

    def value(self, arg: Arg) -> Operand:
        """What a var or a constant is, below."""
        return arg if isinstance(arg, Constant) else self.values[arg]

    def tangent(self, arg: Arg) -> Tangent:
        known = None if isinstance(arg, Constant) else self.tangents.get(arg)
        return Zero(arg.type) if known is None else known

    def current(self, tensor: Operand) -> tuple[Operand, Tangent]:
        """What a tensor of this trace, or of one below, holds now; and its tangent."""
        if isinstance(tensor, Constant):
            return tensor, Zero(tensor.type)
        var = self.read(self.localize(tensor))
        return self.values[var], self.tangent(var)

    # --- numbers ---

    def symbol_of(
        self, value: Value, min: float = -inf, max: Size | float = inf
    ) -> Size:
        known, _ = self.current(value)
        assert isinstance(known, Value)
        with using(self.parent):
            return current().symbol_of(known, min, max)

    def size_of(self, tensor: TracedTensor) -> Size:
        known, _ = self.current(tensor)
        assert isinstance(known, Tensor)
        return known.as_size() if isinstance(known, TracedTensor) else int(known)

    def concrete(self, tensor: TracedTensor, what: str) -> Any:
        known, _ = self.current(tensor)
        return known._concrete(what)  # type: ignore[union-attr]

    def number_of(self, tensor: TracedTensor) -> Any:
        known, _ = self.current(tensor)
        assert isinstance(known, Value)
        return known.item()
