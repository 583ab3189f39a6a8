"""Operations of captured graphs as functions, for nodes of symbolic ones to call."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from hopflow.bind import Operand, Value, bind, current, recorded
from hopflow.dtypes import DType
from hopflow.fx.retrace import bind_retraced
from hopflow.graph.core import Constant, Graph, Node
from hopflow.graph.module import GraphModule
from hopflow.graph.printer import BARE
from hopflow.graph.rewriting import effects
from hopflow.graph.types import TensorType
from hopflow.hops.base import debugging, run_interpreted
from hopflow.symbolic.size import Size, Symbol, SymInt, substitute


class Operation:
    """An operation as a function of its operands, with its params as keywords.

    op        the operation's record
    effects   what it does besides computing
    """

    def __init__(self, op: Any, effects: frozenset[str] = frozenset()) -> None:
        self.op = op
        self.effects = effects
        self.name: str = op.name
        self.__name__ = self.name

    def __repr__(self) -> str:
        return f"<operation {self.name}>"

    def __call__(self, *args: Any, **params: Any) -> Any:
        """The result, or a tuple of as many as there are."""
        if (node := recorded(self, args, params)) is not None:
            return node
        found = self.results([_operand(a) for a in args], params)
        return found[0] if len(found) == 1 else tuple(found)

    def results(
        self, operands: Sequence[Operand], params: dict[str, Any]
    ) -> Sequence[Value]:
        return bind(self.op, operands, params)


@cache
def operation(op: Any) -> Operation:
    """The function of an operation without bodies: one for each."""
    return Operation(op, op.effects)


class RegionOperation(Operation):
    """An operator; its bodies are functions of flat values.

    params   those that it was captured with: the bodies have the inputs of these graphs
    keys     which of them have graphs
    """

    def __init__(self, node: Node) -> None:
        super().__init__(node.op, effects(node))
        self.params = node.params
        self.keys = {name.partition("[")[0] for name in node.graphs}

    def results(
        self, operands: Sequence[Operand], params: dict[str, Any]
    ) -> Sequence[Value]:
        bodies: dict[int, Callable[..., Any]] = {}
        node = Node("call_function", self.op, (), self.params)
        for name, graph in node.graphs.items():
            key, _, position = name.partition("[")
            given = params[key]
            bodies[id(graph)] = given[int(position[:-1])] if position else given
        known = {
            key: self.params[key] if key in self.keys else value
            for key, value in params.items()
        }

        def evaluate(graph: Graph, args: Sequence[Any]) -> Sequence[Any]:
            found = bodies[id(graph)](*args)
            return found if isinstance(found, tuple | list) else (found,)

        if debugging():
            return run_interpreted(self.op, operands, known, evaluate)
        return bind_retraced(self.op, operands, known, evaluate)


def _operand(arg: Any) -> Operand:
    """An argument in a source as an operand; numbers have the dtypes of constants."""
    if type(arg) in BARE:
        return Constant(arg, TensorType(BARE[type(arg)]))
    operand: Operand = current().value_of(arg) if isinstance(arg, SymInt) else arg
    return operand


class SizeOf:
    """A size as a function of the values of its symbols."""

    __name__ = "size"

    def __init__(self, size: SymInt, symbols: Sequence[Symbol]) -> None:
        self.size = size
        self.symbols = tuple(symbols)

    def __call__(self, *values: Any) -> Any:
        if (node := recorded(self, values, {})) is not None:
            return node
        known = dict(zip(self.symbols, map(_as_size, values), strict=True))
        return substitute(self.size, known)


def type_of(dtype: DType, shape: tuple[Size, ...], weak: bool) -> Any:
    """A type whose sizes are values of nodes."""
    found = recorded(type_of, (dtype, shape, weak), {})
    return TensorType(dtype, shape, weak) if found is None else found


def _as_size(value: Any) -> Size:
    if isinstance(value, int | SymInt):
        return value
    if isinstance(value, Constant):
        return int(value.value)
    as_size = getattr(value, "as_size", None)
    found: Size = as_size() if as_size is not None else int(value)
    return found


class Arguments:
    """Checks the arguments of a captured module, and gives the inputs of its graph."""

    __name__ = "arguments"
    effects = frozenset({"check"})

    def __init__(self, module: GraphModule) -> None:
        self.module = module

    def __call__(self, *args: Any) -> Any:
        node = recorded(self, args, {})
        return self.module.inputs(*args) if node is None else node


class Results:
    """Gives results of a captured module, and does what else the function did."""

    __name__ = "results"
    effects = frozenset({"write"})

    def __init__(self, module: GraphModule) -> None:
        self.module = module

    def __call__(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> Any:
        if (node := recorded(self, (inputs, outputs), {})) is not None:
            return node
        return self.module.results(inputs, [_operand(o) for o in outputs])
