"""What a function was traced to, for calls that differ in sizes and numbers only."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Generic, NamedTuple, TypeVar

from hopflow.errors import ShapeError
from hopflow.graph.module import ComputedSource, Source
from hopflow.symbolic.env import ShapeEnv
from hopflow.symbolic.guards import GuardSet
from hopflow.symbolic.size import Symbol
from hopflow.trace.dims import Choice, Dim
from hopflow.trace.marks import Marks
from hopflow.trace.outside.guard import Guard

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
    marks      the sizes that were symbols because the tensors of the call were marked
    captured   the tensors from outside, if nothing leads to them
    outside    what leads to them, and must hold of what the function reads from outside
    """

    compiled: T
    fixed: list[tuple[int, int]]
    sources: dict[Symbol, Source | ComputedSource]
    env: ShapeEnv
    guards: GuardSet
    dims: dict[tuple[int, int | None], Dim]
    marks: Marks
    captured: list[Any]
    outside: Guard | None
    asks_values: bool = field(init=False)
    _check: Callable[..., bool] = field(init=False)
    _asked: tuple[Source | ComputedSource, ...] = field(init=False)

    def __post_init__(self) -> None:
        symbols = self.guards.symbols
        self._check = self.guards.compile_for(symbols)
        self._asked = tuple([self.sources[s] for s in symbols])
        # Numbers, and those that tensors hold, are no part of types.
        self.asks_values = any(source.axis is None for source in self._asked)

    def serves(
        self, values: Sequence[Any], leaves: Sequence[Any], marks: Marks
    ) -> bool:
        """Whether a call with these numbers, by place, leaves and marks may run it."""
        for k, value in self.fixed:
            if values[k] != value:
                return False
        return not self.other_marks(marks) and self.holds(leaves)

    def other_marks(self, marks: Marks) -> list[tuple[int, int]]:
        """The sizes, as leaf and axis, that are marked otherwise than it can serve.

        A dynamic size serves what is not marked, too, if it fulfils the guards. A trace
        with an unbacked size may refuse what another trace takes: a size of 1 beside
        another one that only the run knows.
        """
        return [
            place
            for place in {**self.marks, **marks}
            if marks.get(place) != self.marks.get(place)
            and (place in marks or self.marks[place].kind == "unbacked")
        ]

    def holds(self, leaves: Sequence[Any]) -> bool:
        """Whether the guards hold for a call with these leaves."""
        try:
            values = [source.find(leaves) for source in self._asked]
        except ShapeError:  # of a number that has none in this call
            return False
        return self._check(*values)

    def find_captured(self, leaves: Sequence[Any]) -> list[Any] | None:
        """The tensors from outside for a call with these leaves; None: what the
        function reads from outside is such that the call cannot run this."""
        return self.captured if self.outside is None else self.outside.find(leaves)

    @property
    def is_lasting(self) -> bool:
        """Whether it may serve other calls than that for which it was traced."""
        return self.outside is None or not self.outside.changes

    def conditions(self) -> list[str]:
        """The guards as a user would write them, with the lines that asked."""
        return [
            f"{self.env.describe(guard.holds)}"
            + (f"  ({guard.line})" if guard.line else "")
            for guard in self.guards.guards
        ]

    def specialised(self, places: Sequence[Place], texts: Sequence[str]) -> list[str]:
        """Which sizes of arguments are 0 or 1 in each call that it serves."""
        sizes = [(places[k], value) for k, value in self.fixed if value in (0, 1)]
        found = [f"{texts[p.leaf]}.shape[{p.axis}] == {n}" for p, n in sizes]
        plain = [(((s,), 1),) for s in self.sources]
        for guard in self.guards.guards:
            condition = guard.holds
            is_point = condition.op == "==" and condition.args[1] in (0, 1)
            if is_point and condition.args[0] in plain:
                at = f" ({guard.line})" if guard.line else ""
                found.append(f"{self.env.describe(condition)}{at}")
        return found

    def reasons(
        self,
        places: Sequence[Place],
        texts: Sequence[str],
        values: Sequence[Any],
        leaves: Sequence[Any],
        marks: Marks,
    ) -> list[str]:
        """Why a call cannot run it: what no longer holds, and the line that asked."""
        found = []
        for k, value in self.fixed:
            if values[k] != value:
                text = f"{texts[places[k].leaf]}.shape[{places[k].axis}]"
                found.append(f"`{text} == {value}` no longer holds ({values[k]})")
        for leaf, axis in self.other_marks(marks):
            was, now = (
                f"marked by `{mark.text(texts[leaf], axis)}`" if mark else "not marked"
                for mark in (m.get((leaf, axis)) for m in (self.marks, marks))
            )
            found.append(f"`{texts[leaf]}.shape[{axis}]` was {was}, and is {now}")
        known = {s: self.sources[s].find(leaves) for s in self.guards.symbols}
        for guard in self.guards.guards:
            if GuardSet((guard,)).explain(known):
                text = self.env.describe(guard.holds)
                found.append(f"`{text}`{guard.at} no longer holds")
        if self.outside is not None:
            found += self.outside.reasons(leaves, texts)
        return found


class Match(NamedTuple, Generic[T]):
    """What a call runs, and the tensors from outside that it is given.

    undo   where it was traced for the call: see `Effects.undo`
    """

    variant: Variant[T]
    captured: list[Any]
    undo: Callable[[], None] | None = None


class Family(Generic[T]):
    """The variants for calls of one structure, one set of dtypes and ranks.

    places   the numbers of a call, in order
    """

    def __init__(self, places: Sequence[Place]) -> None:
        self.places = list(places)
        self.variants: list[Variant[T]] = []
        self._exact: dict[tuple[Any, ...], list[Variant[T]]] = {}
        self._first: tuple[Any, ...] | None = None
        self._last: Variant[T] | None = None
        self._varies = dict.fromkeys(self.places, False)

    def find(
        self, values: tuple[Any, ...], leaves: Sequence[Any], marks: Marks
    ) -> Match[T] | None:
        """The variant that serves a call; None: it needs a new one."""
        for variant in self._exact.get(values, ()) if not marks else ():
            if (found := variant.find_captured(leaves)) is not None:
                return Match(variant, found)
        last = self._last  # is asked first; other threads may call this too
        general = self.variants
        for variant in general if last is None else (last, *general):
            if variant.serves(values, leaves, marks):
                found = variant.find_captured(leaves)
                if found is not None:
                    self._last = variant
                    return Match(variant, found)
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
        """Keep a variant that was made for a call; of those that differ only in what
        they read from outside, the last ones. Of one that serves no other call, the
        next call is told why; then it is dropped."""
        self.variants = [v for v in self.variants if v.is_lasting]
        if variant.sources or len(self._exact) >= _MOST_EXACT:
            self.variants = [variant, *self.variants][:_MOST_GENERAL]
        else:
            others = [v for v in self._exact.get(values, ()) if v.is_lasting]
            self._exact[values] = [variant, *others][:_MOST_ALIKE]

    def all(self) -> list[Variant[T]]:
        """The variants that are kept."""
        return [*self.variants, *(v for known in self._exact.values() for v in known)]


_MOST_EXACT: Final = 1 << 12
_MOST_GENERAL: Final = 1 << 12
_MOST_ALIKE: Final = 64
