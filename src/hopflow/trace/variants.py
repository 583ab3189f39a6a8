"""The traces of a function, for calls that differ in sizes and numbers only."""

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
    """The place of a number in a call: an axis of a leaf, or (None) the leaf itself."""

    leaf: int
    axis: int | None


@dataclass(slots=True)
class Variant(Generic[T]):
    """One trace, and the conditions on calls that it serves.

    compiled     the compiled program
    fixed        positions among the places of a call whose numbers are constants, with
                 these values
    sources      symbol -> the source of its value in a call
    env          the symbolic environment of the trace
    guards       the conditions on the symbols, simplified
    dims         place -> the `Dim` that was declared for it
    marks        place -> the mark that made its size a symbol
    captured     the tensors from outside, if they are the same in each call
    outside      the guard on reads from outside, which also finds these tensors
    asks_values  whether a guard depends on numbers that are no sizes
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
    _guard_sources: tuple[Source | ComputedSource, ...] = field(init=False)

    def __post_init__(self) -> None:
        symbols = self.guards.symbols
        self._check = self.guards.compile_for(symbols)
        self._guard_sources = tuple([self.sources[s] for s in symbols])
        # Types have no numbers, nor the elements of tensors.
        self.asks_values = any(source.axis is None for source in self._guard_sources)

    def serves(
        self, values: Sequence[Any], leaves: Sequence[Any], marks: Marks
    ) -> bool:
        """Whether it serves a call with these numbers (by place), leaves and marks."""
        for k, value in self.fixed:
            if values[k] != value:
                return False
        return not self.other_marks(marks) and self.holds(leaves)

    def other_marks(self, marks: Marks) -> list[tuple[int, int]]:
        """Return the places whose marks in a call are incompatible with the trace.

        A dynamic size also serves unmarked tensors that satisfy the guards. An unbacked
        size does not: its trace may fail where another one works, for a size of 1 next
        to an unbacked one.
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
            values = [source.find(leaves) for source in self._guard_sources]
        except ShapeError:  # the number does not exist in this call
            return False
        return self._check(*values)

    def find_captured(self, leaves: Sequence[Any]) -> list[Any] | None:
        """Return the tensors from outside for a call; None: the values read from
        outside violate the guard."""
        return self.captured if self.outside is None else self.outside.find(leaves)

    @property
    def is_lasting(self) -> bool:
        """Whether it can serve other calls than the traced one."""
        return self.outside is None or not self.outside.changes

    def conditions(self) -> list[str]:
        """Return the guards as the user's expressions, with their lines."""
        return [
            f"{self.env.describe(guard.holds)}"
            + (f"  ({guard.line})" if guard.line else "")
            for guard in self.guards.guards
        ]

    def specialised(self, places: Sequence[Place], texts: Sequence[str]) -> list[str]:
        """Return which sizes of arguments it requires to be 0 or 1."""
        sizes = [(places[k], value) for k, value in self.fixed if value in (0, 1)]
        specialisations = [f"{texts[p.leaf]}.shape[{p.axis}] == {n}" for p, n in sizes]
        plain = [(((s,), 1),) for s in self.sources]
        for guard in self.guards.guards:
            condition = guard.holds
            is_point = condition.op == "==" and condition.args[1] in (0, 1)
            if is_point and condition.args[0] in plain:
                at = f" ({guard.line})" if guard.line else ""
                specialisations.append(f"{self.env.describe(condition)}{at}")
        return specialisations

    def reasons(
        self,
        places: Sequence[Place],
        texts: Sequence[str],
        values: Sequence[Any],
        leaves: Sequence[Any],
        marks: Marks,
    ) -> list[str]:
        """Return why it does not serve a call: each condition that no longer holds, and
        the line that made it."""
        violations = []
        for k, value in self.fixed:
            if values[k] != value:
                text = f"{texts[places[k].leaf]}.shape[{places[k].axis}]"
                violations.append(f"`{text} == {value}` no longer holds ({values[k]})")
        for leaf, axis in self.other_marks(marks):
            old, new = (
                f"marked by `{mark.text(texts[leaf], axis)}`" if mark else "not marked"
                for mark in (m.get((leaf, axis)) for m in (self.marks, marks))
            )
            violations.append(f"`{texts[leaf]}.shape[{axis}]` was {old}, and is {new}")
        numbers = {s: self.sources[s].find(leaves) for s in self.guards.symbols}
        for guard in self.guards.guards:
            if GuardSet((guard,)).explain(numbers):
                text = self.env.describe(guard.holds)
                violations.append(f"`{text}`{guard.at} no longer holds")
        if self.outside is not None:
            violations += self.outside.reasons(leaves, texts)
        return violations


class Match(NamedTuple, Generic[T]):
    """The variant for a call, and the tensors from outside that it gets.

    undo   if the call was just traced: see `Effects.undo`
    """

    variant: Variant[T]
    captured: list[Any]
    undo: Callable[[], None] | None = None


class Family(Generic[T]):
    """The variants for calls with equal keys: structure, dtypes, ranks, static values.

    places     the places of numbers in a call, in order
    variants   the variants with symbols, the newest first
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
        """Return the variant that serves a call; None: a new one is necessary."""
        for variant in self._exact.get(values, ()) if not marks else ():
            if (captured := variant.find_captured(leaves)) is not None:
                return Match(variant, captured)
        last = self._last  # read once: other threads may assign it
        general = self.variants
        for variant in general if last is None else (last, *general):
            if variant.serves(values, leaves, marks):
                captured = variant.find_captured(leaves)
                if captured is not None:
                    self._last = variant
                    return Match(variant, captured)
        return None

    def note(self, values: tuple[Any, ...]) -> None:
        """Note a call that needs a new variant, to see which numbers change."""
        if self._first is None:
            self._first = values
        for place, first, value in zip(self.places, self._first, values, strict=True):
            self._varies[place] |= bool(first != value)

    def choice(self, place: Place, chosen: Choice) -> Choice:
        """Return the choice for a place, by the user's choice for it.

        For None, a number is a symbol, and a size becomes one once it changes.
        """
        if chosen is not None:
            return chosen
        return place.axis is None or self._varies[place]

    def add(self, values: tuple[Any, ...], variant: Variant[T]) -> None:
        """Add a variant for a call. Of those that differ only in reads from outside,
        the latest are kept. One that serves no other call is kept until the next is
        added, so that the recompile can be explained."""
        self.variants = [v for v in self.variants if v.is_lasting]
        if variant.sources or len(self._exact) >= _MOST_EXACT:
            self.variants = [variant, *self.variants][:_MOST_GENERAL]
        else:
            alternatives = [v for v in self._exact.get(values, ()) if v.is_lasting]
            self._exact[values] = [variant, *alternatives][:_MOST_ALIKE]

    def all(self) -> list[Variant[T]]:
        """The variants that are kept."""
        return [*self.variants, *(v for exact in self._exact.values() for v in exact)]


_MOST_EXACT: Final = 1 << 12
_MOST_GENERAL: Final = 1 << 12
_MOST_ALIKE: Final = 64
