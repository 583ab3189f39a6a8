"""The graph interpreter: a graph's meaning, one `bind` a node."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from hopflow.errors import GraphError, ShapeError
from hopflow.graph.core import Arg, Constant, Graph, Node, Var, map_sizes, match_shapes
from hopflow.graph.origin import origin, replaying
from hopflow.graph.types import SYMBOL_TYPE, Shape
from hopflow.symbolic.size import Size, Symbol, free_symbols, substitute

Bind: TypeAlias = Callable[[Any, Sequence[Any], dict[str, Any]], Sequence[Any]]
"""(operator, operands, params) -> results: `bind.bind`, or what a pass puts there."""

Evaluate: TypeAlias = Callable[[Graph, Sequence[Any]], Sequence[Any]]
"""(graph, args) -> results, as `interpret` gives them."""


def interpret(graph: Graph, args: Sequence[Any], bind: Bind) -> tuple[Any, ...]:
    """The results of `graph` on `args`, each node evaluated by `bind`.

    Sizes in parameters are bound before `bind` sees them: to numbers where the
    arguments have numbers for shapes, to the symbols of a trace where they are traced.

    Args:
        args: One for each input, in order. For a symbol an int will do; else a value
            i64[]. A `Constant` may stand for any scalar.
        bind: Gets operands as it is to use them: values and `Constant`s.

    Returns:
        One for each output; a `Constant` for an output that is one.

    Raises:
        GraphError: not as many arguments as inputs, or a size that no argument tells.
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
    """One evaluation of a graph: the values of its vars so far.

    env    var -> its value; a `Constant` may stand for any scalar
    """

    __slots__ = ("_sizes", "env", "graph")

    def __init__(self, graph: Graph, args: Sequence[Any]) -> None:
        """
        Raises:
            GraphError: there are not as many arguments as inputs.
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
        """The values of a node's args."""
        env = self.env
        return [env[a] if type(a) is Var else a for a in node.args]

    def params(self, node: Node) -> dict[str, Any]:
        """A node's params, with numbers or the caller's symbols for sizes."""
        return self._sizes.bind(node.params)

    def store(self, node: Node, results: Sequence[Any]) -> None:
        """Note the results of a node."""
        for var, value in zip(node.results, results, strict=True):
            self._store(var, node.symbol, value)

    def _store(self, var: Var, symbol: Symbol | None, value: Any) -> None:
        self.env[var] = value
        if symbol is not None:
            self._sizes.offer(symbol, value)
        elif var.type.shape:
            self._sizes.learn(var.type.shape, value.type.shape)

    def results(self) -> tuple[Any, ...]:
        """The values of the graph's outputs."""
        env = self.env
        return tuple([env[a] if type(a) is Var else a for a in self.graph.outputs])


class Sizes:
    """What a graph's symbols stand for in one evaluation.

    A symbol is known from the shape of a value whose type has it as a plain size, else
    from the value of its input, which is asked only when the size is needed.
    """

    __slots__ = ("_offers", "known")

    def __init__(self) -> None:
        self.known: dict[Symbol, Size] = {}
        self._offers: dict[Symbol, Any] = {}

    def offer(self, symbol: Symbol, value: Any) -> None:
        """Note the value given for a symbol."""
        if type(value) is Constant:
            self.known[symbol] = int(value.value)
        else:
            self._offers[symbol] = value

    def learn(self, declared: Shape, found: Shape) -> None:
        """Note what the shape of a value says about the symbols of its type."""
        match_shapes(declared, found, self.known)

    def bind(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """`params` with sizes bound, but for graphs, whose symbols are their inputs."""
        if not self.known and not self._offers:
            return dict(params)
        return {key: map_sizes(value, self.size) for key, value in params.items()}

    def size(self, size: Size) -> Size:
        """`size` over what the symbols stand for.

        Raises:
            GraphError: nothing tells what a symbol of it stands for.
            ShapeError: it has no value for these, as a division by 0 has none.
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
        # A traced value knows the symbol it stands for; a concrete one its number.
        as_size = getattr(value, "as_size", None)
        return as_size() if as_size is not None else int(value)
