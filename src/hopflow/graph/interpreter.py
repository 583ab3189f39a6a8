"""The graph interpreter: a graph's meaning, one `bind` a node."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from hopflow.errors import GraphError
from hopflow.graph.core import Arg, Constant, Graph, Var, map_sizes, match_shapes
from hopflow.graph.origin import origin, replaying
from hopflow.graph.types import SYMBOL_TYPE, Shape
from hopflow.symbolic.size import Size, Symbol, free_symbols, substitute

__all__ = ["Bind", "Sizes", "interpret"]

Bind: TypeAlias = Callable[[Any, Sequence[Any], dict[str, Any]], Sequence[Any]]
"""(operator, operands, params) -> results: `bind.bind`, or what a pass puts there."""


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
    if len(args) != len(graph.inputs):
        raise GraphError(
            f"graph `{graph.name}` takes {len(graph.inputs)} inputs and was given "
            f"{len(args)}."
        )
    env: dict[Arg, Any] = {}
    sizes = Sizes()
    for var, arg in zip(graph.inputs, args, strict=True):
        value = Constant(arg, SYMBOL_TYPE) if type(arg) is int else arg
        env[var] = value
        if var.node.symbol is not None:
            sizes.offer(var.node.symbol, value)
        elif var.type.shape:
            sizes.learn(var.type.shape, value.type.shape)
    attributes = graph.attributes
    with replaying():
        for node in graph.nodes:
            if node.op is None:
                env[node.results[0]] = attributes[node.name]
                continue
            origin.node = node
            operands = [env[a] if type(a) is Var else a for a in node.args]
            params = sizes.bind(node.params)
            results = bind(node.op, operands, params)
            for var, value in zip(node.results, results, strict=True):
                env[var] = value
                if node.symbol is not None:
                    sizes.offer(node.symbol, value)
                elif var.type.shape:
                    sizes.learn(var.type.shape, value.type.shape)
    return tuple([env[a] if type(a) is Var else a for a in graph.outputs])


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
        """
        for symbol in free_symbols(size):
            if symbol not in self.known:
                self.known[symbol] = self._ask(symbol)
        return substitute(size, self.known)

    def _ask(self, symbol: Symbol) -> Size:
        if symbol not in self._offers:
            raise GraphError(
                f"the size `{symbol}` is used before any input or result has told it."
            )
        value = self._offers[symbol]
        # A traced value knows the symbol it stands for; a concrete one its number.
        as_size = getattr(value, "as_size", None)
        return as_size() if as_size is not None else int(value)
