"""Estimates of how long a program runs: whether to release the GIL, when to poll.

The unit is one instruction, taken as half a nanosecond. It need not be exact: a poll
reads the clock before it does anything expensive.
"""

from dataclasses import dataclass, field
from typing import Final

from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Expr

RELEASE: Final = 10_000
"""Run the program without the GIL from this cost on: 5 µs."""
FUEL: Final = 20_000_000
"""The cost between two reads of the clock: 10 ms."""
CALL: Final = FUEL // 20
"""What a call of a function with loops takes off the countdown: up to so many of them,
none of which reads the clock, take as long as the countdown."""
SMALL: Final = 100_000
"""A loop that never costs more than this does not poll by itself."""


@dataclass(slots=True)
class Cost:
    """The cost of a stretch of code: `fixed`, and `terms` that depend on sizes.

    unbounded   it has a loop whose length depends on the data
    polls       it reaches a loop that polls
    """

    fixed: int = 0
    terms: list[Expr] = field(default_factory=list)
    unbounded: bool = False
    polls: bool = False

    def add(self, other: "Cost") -> None:
        self.fixed += other.fixed
        self.terms += other.terms
        self.unbounded |= other.unbounded
        self.polls |= other.polls

    def times(self, extent: Expr) -> "Cost":
        """Return the cost of `extent` repetitions."""
        if extent.is_const:
            terms = [e.mul(term, extent) for term in self.terms]
            fixed = self.fixed * extent.attr
            return Cost(fixed, terms, self.unbounded, self.polls)
        terms = [e.mul(e.add(term, e.index(self.fixed)), extent) for term in self.terms]
        terms = terms or [e.mul(extent, e.index(self.fixed))]
        return Cost(0, terms, self.unbounded, self.polls)

    @property
    def is_small(self) -> bool:
        return not self.terms and not self.unbounded and self.fixed < SMALL

    @property
    def total(self) -> Expr:
        total = e.index(self.fixed)
        for term in self.terms:
            total = e.add(total, term)
        return total
