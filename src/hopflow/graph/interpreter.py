"""The graph interpreter: it runs the nodes of a graph in order, each by `bind`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from hopflow.errors import GraphError, ShapeError
from hopflow.graph.core import Arg, Constant, Graph, Node, Var, map_sizes, match_shapes
from hopflow.graph.origin import origin, replaying
from hopflow.graph.types import SYMBOL_TYPE, Shape
from hopflow.symbolic.size import Size, Symbol, free_symbols, substitute

Bind: TypeAlias = Callable[[Any, Sequence[Any], dict[str, Any]], Sequence[Any]]
"""(operator, operands, params) -> results: `bind.bind`, or a substitute of a pass."""

Evaluate: TypeAlias = Callable[[Graph, Sequence[Any]], Sequence[Any]]
"""(graph, args) -> results, as `interpret` returns them."""


def interpret(graph: Graph, args: Sequence[Any], bind: Bind) -> tuple[Any, ...]:
    """Return the results of `graph` on `args`; `bind` runs each node.

    Sizes in params are bound before `bind` gets them: to numbers if the shapes of the
    arguments are numbers, to the symbols of a trace if the arguments are traced.

    Args:
        args: One for each input, in order. For a symbol an int, or a value i64[]. A
            `Constant` may stand for any scalar.
        bind: Gets operands as values and `Constant`s.

    Returns:
        One result for each output; a `Constant` for an output that is constant.

    Raises:
        GraphError: the number of arguments differs from that of the inputs, or no
            argument gives the value of a size.
    """
    frame = Frame(graph, args)
    with replaying():
        for node in graph.nodes:
            if node.op is None:
                frame.store(node, (graph.attributes[node.name],))
                continue
            origin.node = node
            frame.store(node, bind(node.op, frame.operands(node), frame.params(node)))
    return frame.results()


class Frame:
    """One evaluation of a graph.

    env    var -> its value; a `Constant` may stand for any scalar
    """

    __slots__ = ("_sizes", "env", "graph")

    def __init__(self, graph: Graph, args: Sequence[Any]) -> None:
        """Start an evaluation.

        Raises:
            GraphError: the number of arguments differs from that of the inputs.
        """
        if len(args) != len(graph.inputs):
            raise GraphError(
                f"graph `{graph.name}` takes {len(graph.inputs)} inputs and was given "
                f"{len(args)}."
            )
        self.graph = graph
        self.env: dict[Arg, Any] = {}
        self._sizes = Sizes()
        for var, arg in zip(graph.inputs, args, strict=True):
            value = Constant(arg, SYMBOL_TYPE) if type(arg) is int else arg
            self._store(var, var.node.symbol, value)

    def operands(self, node: Node) -> list[Any]:
        """Return the values of a node's args."""
        env = self.env
        return [env[a] if type(a) is Var else a for a in node.args]

    def params(self, node: Node) -> dict[str, Any]:
        """Return a node's params, with numbers or the caller's symbols for sizes."""
        return self._sizes.bind(node.params)

    def store(self, node: Node, results: Sequence[Any]) -> None:
        """Store the results of a node."""
        for var, value in zip(node.results, results, strict=True):
            self._store(var, node.symbol, value)

    def _store(self, var: Var, symbol: Symbol | None, value: Any) -> None:
        self.env[var] = value
        if symbol is not None:
            self._sizes.offer(symbol, value)
        elif var.type.shape:
            self._sizes.learn(var.type.shape, value.type.shape)

    def results(self) -> tuple[Any, ...]:
        """Return the values of the graph's outputs."""
        env = self.env
        return tuple([env[a] if type(a) is Var else a for a in self.graph.outputs])


class Sizes:
    """The sizes that a graph's symbols have in one evaluation.

    A symbol is bound by the shape of a value whose type has it as a plain size.
    Otherwise it is read from the value of its input, at its first use.
    """

    __slots__ = ("_offers", "known")

    def __init__(self) -> None:
        self.known: dict[Symbol, Size] = {}
        self._offers: dict[Symbol, Any] = {}

    def offer(self, symbol: Symbol, value: Any) -> None:
        """Record the value that is passed for a symbol."""
        if type(value) is Constant:
            self.known[symbol] = int(value.value)
        else:
            self._offers[symbol] = value

    def learn(self, declared: Shape, shape: Shape) -> None:
        """Bind the symbols in the declared shape of a value to the actual sizes."""
        match_shapes(declared, shape, self.known)

    def bind(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return `params` with sizes bound; graphs bind their symbols themselves."""
        if not self.known and not self._offers:
            return dict(params)
        return {key: map_sizes(value, self.size) for key, value in params.items()}

    def size(self, size: Size) -> Size:
        """Return `size` with the symbols replaced by their sizes.

        Raises:
            GraphError: a symbol is not bound.
            ShapeError: the size has no value, as after a division by 0.
        """
        for symbol in free_symbols(size):
            if symbol not in self.known:
                self.known[symbol] = self._ask(symbol)
        try:
            return substitute(size, self.known)
        except (ArithmeticError, TypeError, ValueError) as error:
            raise ShapeError(f"the size `{size}` has no value: {error}.") from error

    def _ask(self, symbol: Symbol) -> Size:
        if symbol not in self._offers:
            raise GraphError(
                f"the size `{symbol}` is used before any input or result has told it."
            )
        value = self._offers[symbol]
        # A traced value is a symbol; a concrete one is a number.
        as_size = getattr(value, "as_size", None)
        return as_size() if as_size is not None else int(value)
