"""What a function was traced to, for calls that differ in sizes and numbers only."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Generic, NamedTuple, TypeVar

from hopflow.graph.module import Source
from hopflow.symbolic.env import ShapeEnv
from hopflow.symbolic.guards import GuardSet
from hopflow.symbolic.size import Symbol
from hopflow.trace.dims import Choice, Dim

__all__ = ["Family", "Place", "Variant"]

T = TypeVar("T")


class Place(NamedTuple):
    """One number of a call: a size of a leaf, or (axis None) the number it is."""

    leaf: int
    axis: int | None


@dataclass(slots=True)
class Variant(Generic[T]):
    """One trace, and the calls that it serves.

    compiled   what it became
    fixed      places whose numbers were constants, with these
    sources    where a call finds the values of symbols
    env        of the trace
    guards     what the values must fulfil, simplified
    dims       the places whose sizes were declared
    """

    compiled: T
    fixed: list[tuple[int, int]]
    sources: dict[Symbol, Source]
    env: ShapeEnv
    guards: GuardSet
    dims: dict[tuple[int, int | None], Dim]
    asks_values: bool = field(init=False)
    _check: Callable[..., bool] = field(init=False)
    _asked: tuple[Source, ...] = field(init=False)

    def __post_init__(self) -> None:
        symbols = self.guards.symbols
        self._check = self.guards.compile_for(symbols)
        self._asked = tuple([self.sources[s] for s in symbols])
        # Numbers, and those that tensors hold, are no part of types.
        self.asks_values = any(source.axis is None for source in self._asked)

    def serves(self, values: Sequence[Any], leaves: Sequence[Any]) -> bool:
        """Whether a call with these numbers, by place, and leaves may run it."""
        for k, value in self.fixed:
            if values[k] != value:
                return False
        return self.holds(leaves)

    def holds(self, leaves: Sequence[Any]) -> bool:
        """Whether the guards hold for a call with these leaves."""
        return self._check(*[source.find(leaves) for source in self._asked])

    def conditions(self) -> list[str]:
        """The guards as a user would write them, with the lines that asked."""
        return [
            f"{self.env.describe(guard.holds)}"
            + (f"  ({guard.line})" if guard.line else "")
            for guard in self.guards.guards
        ]

    def reasons(
        self,
        places: Sequence[Place],
        texts: Sequence[str],
        values: Sequence[Any],
        leaves: Sequence[Any],
    ) -> list[str]:
        """Why a call cannot run it: what no longer holds, and the line that asked."""
        found = []
        for k, value in self.fixed:
            if values[k] != value:
                text = f"{texts[places[k].leaf]}.shape[{places[k].axis}]"
                found.append(f"`{text} == {value}` no longer holds ({values[k]})")
        known = {s: self.sources[s].find(leaves) for s in self.guards.symbols}
        for guard in self.guards.guards:
            if GuardSet((guard,)).explain(known):
                at = f" at {guard.line}" if guard.line else ""
                text = self.env.describe(guard.holds)
                found.append(f"`{text}`{at} no longer holds")
        return found


class Family(Generic[T]):
    """The variants for calls of one structure, one set of dtypes and ranks.

    places   the numbers of a call, in order
    """

    def __init__(self, places: Sequence[Place]) -> None:
        self.places = list(places)
        self.variants: list[Variant[T]] = []
        self._exact: dict[tuple[Any, ...], Variant[T]] = {}
        self._first: tuple[Any, ...] | None = None
        self._last: Variant[T] | None = None
        self._varies = dict.fromkeys(self.places, False)

    def find(self, values: tuple[Any, ...], leaves: Sequence[Any]) -> Variant[T] | None:
        """The variant that serves a call; None: it needs a new one."""
        known = self._exact.get(values)
        if known is not None:
            return known
        last = self._last  # is asked first; other threads may call this too
        if last is not None and last.serves(values, leaves):
            return last
        for variant in self.variants:
            if variant is not last and variant.serves(values, leaves):
                self._last = variant
                return variant
        return None

    def note(self, values: tuple[Any, ...]) -> None:
        """Take note of a call that needs a new variant: which numbers change."""
        if self._first is None:
            self._first = values
        for place, first, value in zip(self.places, self._first, values, strict=True):
            self._varies[place] |= bool(first != value)

    def choice(self, place: Place, chosen: Choice) -> Choice:
        """What a place is to be, of which the user chose this.

        Automatic (None): a number is a symbol; a size, once it is seen to change.
        """
        if chosen is not None:
            return chosen
        return place.axis is None or self._varies[place]

    def add(self, values: tuple[Any, ...], variant: Variant[T]) -> None:
        if variant.sources or len(self._exact) >= _MOST_EXACT:
            self.variants.insert(0, variant)
        else:
            self._exact[values] = variant

    def all(self) -> list[Variant[T]]:
        return [*self.variants, *self._exact.values()]


_MOST_EXACT: Final = 1 << 12
