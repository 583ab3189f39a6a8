"""The operations of captured graphs as functions for symbolic graphs to call."""

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
    """An operation as a function of its operands, with its params as keyword arguments.

    op        the operation's record
    effects   its effects besides computing results
    """

    def __init__(self, op: Any, effects: frozenset[str] = frozenset()) -> None:
        self.op = op
        self.effects = effects
        self.name: str = op.name
        self.__name__ = self.name

    def __repr__(self) -> str:
        return f"<operation {self.name}>"

    def __call__(self, *args: Any, **params: Any) -> Any:
        """Return the result, or a tuple of none or several."""
        if (node := recorded(self, args, params)) is not None:
            return node
        results = self.results([_operand(a) for a in args], params)
        return results[0] if len(results) == 1 else tuple(results)

    def results(
        self, operands: Sequence[Operand], params: dict[str, Any]
    ) -> Sequence[Value]:
        return bind(self.op, operands, params)


@cache
def operation(op: Any) -> Operation:
    """Return the one function for an operation without bodies."""
    return Operation(op, op.effects)


class RegionOperation(Operation):
    """An operator whose bodies are functions of flat values.

    params   the params of the captured node: the bodies have the inputs of its graphs
    keys     the params that hold graphs
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
            body = params[key]
            bodies[id(graph)] = body[int(position[:-1])] if position else body
        static_params = {
            key: self.params[key] if key in self.keys else value
            for key, value in params.items()
        }

        def evaluate(graph: Graph, args: Sequence[Any]) -> Sequence[Any]:
            outputs = bodies[id(graph)](*args)
            return outputs if isinstance(outputs, tuple | list) else (outputs,)

        if debugging():
            return run_interpreted(self.op, operands, static_params, evaluate)
        return bind_retraced(self.op, operands, static_params, evaluate)


def _operand(arg: Any) -> Operand:
    """Return an argument as an operand; a number has the dtype of a literal."""
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
        sizes = dict(zip(self.symbols, map(_as_size, values), strict=True))
        return substitute(self.size, sizes)


def type_of(dtype: DType, shape: tuple[Size, ...], weak: bool) -> Any:
    """Return a type whose sizes are values of nodes."""
    node = recorded(type_of, (dtype, shape, weak), {})
    return TensorType(dtype, shape, weak) if node is None else node


def _as_size(value: Any) -> Size:
    if isinstance(value, int | SymInt):
        return value
    if isinstance(value, Constant):
        return int(value.value)
    as_size = getattr(value, "as_size", None)
    size: Size = as_size() if as_size is not None else int(value)
    return size


class Arguments:
    """Check the arguments of a captured module, and return the inputs of its graph."""

    __name__ = "arguments"
    effects = frozenset({"check"})

    def __init__(self, module: GraphModule) -> None:
        self.module = module

    def __call__(self, *args: Any) -> Any:
        node = recorded(self, args, {})
        return self.module.inputs(*args) if node is None else node


class Results:
    """Return the results of a captured module, after its other effects."""

    __name__ = "results"
    effects = frozenset({"write"})

    def __init__(self, module: GraphModule) -> None:
        self.module = module

    def __call__(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> Any:
        if (node := recorded(self, (inputs, outputs), {})) is not None:
            return node
        return self.module.results(inputs, [_operand(o) for o in outputs])
