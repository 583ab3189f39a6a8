"""What the symbols of a graph are, where another system evaluates the graph."""

from collections.abc import Callable
from typing import Generic, TypeVar

from hopflow.errors import GraphError
from hopflow.symbolic.size import Size, Symbol, free_symbols

K = TypeVar("K")


class Symbols(Generic[K]):
    """The values of symbols in one evaluation of a graph.

    A value is known, or offered: computed when it is asked for first.
    """

    def __init__(self) -> None:
        self._known: dict[Symbol, K] = {}
        self._offers: dict[Symbol, Callable[[], K]] = {}

    def __setitem__(self, symbol: Symbol, value: K) -> None:
        self._known[symbol] = value

    def offer(self, symbol: Symbol, tell: Callable[[], K]) -> None:
        """Note how the value of a symbol is found, if it is asked for. The first offer
        counts."""
        self._offers.setdefault(symbol, tell)

    def __getitem__(self, symbol: Symbol) -> K:
        """
        Raises:
            GraphError: nothing tells what it is.
        """
        if symbol not in self._known:
            if symbol not in self._offers:
                raise GraphError(
                    f"the size `{symbol}` is used before any input or result has told "
                    "it."
                )
            self._known[symbol] = self._offers[symbol]()
        return self._known[symbol]

    def knows(self, *sizes: Size) -> bool:
        """Whether these sizes can be told here."""
        symbols = free_symbols(*sizes)
        return all(s in self._known or s in self._offers for s in symbols)
