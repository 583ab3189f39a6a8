"""`hopflow fuzz --speed`: draw programs, and save those that JAX runs faster.

Each program is compiled by both libraries, whose calls alternate in one process. One
that is slower by more than a factor, beyond the variation of its calls, is measured
again, shrunk, and saved under the names of its operations.
"""

import itertools
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any, Final, NamedTuple

import hopflow
from hopflow import pytree
from hopflow.errors import HopflowError
from hopflow.jit import jit
from hopflow.testing.checks import Disagreement, label_of
from hopflow.testing.executions import in_jax
from hopflow.testing.fuzz import CLOSED, Campaign, Limit, Round, drawn, progress_bar
from hopflow.testing.libraries import names_of_jax
from hopflow.testing.program import OPERATORS, Program, walk
from hopflow.testing.requires import load
from hopflow.testing.transforms import Transform

MOST_CALLS: Final = 60
FEWEST_CALLS: Final = 5
SHORTEST: Final = 20e-6
"""Seconds below which the overhead of a call dominates."""

SIZED: Final = CLOSED | {"depth": 1}
ROUNDS: Final = (
    Round("speed", "large", SIZED, [], ["value"]),
    Round("speed", "large", SIZED, [], ["vmap"]),
    Round("speed", "smooth", SIZED, [], ["grad"]),
)


class Times(NamedTuple):
    """The times of calls of a program, in seconds.

    ours    the times of hopflow
    theirs  the times of JAX
    first   the times of the first calls, which compile
    """

    ours: Sequence[float]
    theirs: Sequence[float]
    first: tuple[float, float]

    @property
    def ratio(self) -> float:
        """The median time of hopflow as a multiple of that of JAX."""
        return median(self.ours) / median(self.theirs)

    def is_slower(self, factor: float) -> bool:
        """Whether all calls take more than `factor` times the median of JAX."""
        least = min(self.ours)
        return least > SHORTEST and least > factor * median(self.theirs)

    def __str__(self) -> str:
        ours, theirs = (median(x) * 1e6 for x in (self.ours, self.theirs))
        return f"{ours:.0f} us against {theirs:.0f} us ({self.ratio:.2f} times)"


def timed(program: Program, transform: Transform, seconds: float = 0.2) -> Times | None:
    """Return the times of a program; None: JAX or hopflow does not support it, or JAX
    has no memory for it.

    Args:
        seconds: The time for calls, of which there are at least `FEWEST_CALLS`.
    """
    if not in_jax(program) or not transform.fits(program):
        return None
    jax = load("jax")
    arrays = transform.arguments(program)
    with jax.enable_x64(True):
        ours = jit(transform.function(program, hopflow))
        theirs = jax.jit(transform.function(program, names_of_jax()))
        calls = (
            _call(ours, [hopflow.asarray(x) for x in arrays], lambda _: None),
            _call(
                theirs, [jax.numpy.asarray(x) for x in arrays], jax.block_until_ready
            ),
        )
        try:
            first = calls[0](), calls[1]()
        except HopflowError:
            return None
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            return None
        times: tuple[list[float], list[float]] = ([], [])
        end = time.perf_counter() + seconds
        while len(times[0]) < MOST_CALLS:
            for durations, call in zip(times, calls, strict=True):
                durations.append(call())
            if time.perf_counter() > end and len(times[0]) >= FEWEST_CALLS:
                break
    return Times(*times, first)


def _call(
    f: Callable[..., Any], arguments: Sequence[Any], wait: Callable[[Any], Any]
) -> Callable[[], float]:
    """Return a function that calls `f` and returns the seconds that it took."""

    def call() -> float:
        began = time.perf_counter()
        wait(pytree.flatten(f(*arguments))[0])
        return time.perf_counter() - began

    return call


def cause_of(program: Program, transform: str) -> str:
    """Return the names of a program's operators and operations."""
    names = sorted({s.operation for s in walk(program.main)})
    parts = sorted(names, key=lambda name: name not in OPERATORS)
    return f"{transform}: {', '.join(parts) or 'nothing'}"


@dataclass
class Search:
    """The results of a search for slow programs.

    factor    the multiple of JAX's time that is too slow
    ratios    for each program, the ratio of times
    first     for each program, the ratio of first calls
    slower    the labels and times of slow programs
    cliffs    cause -> the times of the smallest program
    """

    campaign: Campaign
    factor: float = 1.1
    timed: Callable[[Program, Transform], Times | None] = timed
    ratios: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    slower: list[str] = field(default_factory=list)
    cliffs: dict[str, str] = field(default_factory=dict)

    def run(
        self,
        limit: Limit,
        start: int,
        progress: Callable[[Campaign, float], None] = lambda *_: None,
        rounds: Sequence[Round] = ROUNDS,
    ) -> None:
        """Draw and measure programs until the limit, and write `speed.json`."""
        try:
            for number, part in zip(itertools.count(start), itertools.cycle(rounds)):
                self.campaign.seeds = (start, number)
                if (share := limit.share(self.campaign)) >= 1:
                    break
                try:
                    self._search(part, number, share, progress)
                except Exception as error:  # in drawing, or in one of the libraries
                    error.add_note(f"{part}, seed {number}")
                    self.campaign.programs[part.profile] += 1
                    self.campaign.failed(error, part.transforms)
                self.write()
        finally:
            self.write()

    def _search(
        self,
        part: Round,
        number: int,
        share: float,
        progress: Callable[[Campaign, float], None],
    ) -> None:
        """Measure the programs of one seed; shrink and save a slow one."""
        from hypothesis.errors import Flaky

        [name] = part.transforms
        transform, has_new_cliff = Transform(name), False

        def measure(program: Program) -> None:
            nonlocal has_new_cliff
            self.campaign.programs[part.profile] += 1
            times = self.timed(program, transform)
            if times is not None:
                self.ratios.append(times.ratio)
                self.first.append(times.first[0] / times.first[1])
            if times is not None and self._stays_slow(program, transform, times):
                self.slower.append(f"{cause_of(program, name)}: {times}")
                has_new_cliff = has_new_cliff or not self._is_filed(program, name)
            progress(self.campaign, share)

        drawn(part, number, measure)
        if not has_new_cliff:
            return

        slow: list[Disagreement] = []  # the last one is the smallest

        def refute(program: Program) -> None:
            times = self.timed(program, transform)
            if times is not None and self._stays_slow(program, transform, times):
                slow.append(Disagreement(program, label_of("speed", name), str(times)))
                raise slow[-1]

        # A program that is faster when it is run once more was slow twice before.
        with suppress(Disagreement, Flaky):
            drawn(part, number, refute)
        if not slow:
            return
        cause = cause_of(slow[-1].program, name)
        if cause not in self.cliffs:
            self.cliffs[cause] = slow[-1].what
            self.campaign.keep("cliffs", cause, slow[-1].program)

    def _stays_slow(self, program: Program, transform: Transform, times: Times) -> bool:
        """Whether a program is too slow when it is measured again, too."""
        if not times.is_slower(self.factor):
            return False
        again = self.timed(program, transform)
        return again is not None and again.is_slower(self.factor)

    def _is_filed(self, program: Program, transform: str) -> bool:
        """Whether it contains all operations of a cliff that was already found."""
        names = {s.operation for s in walk(program.main)}
        return any(
            set(parts) <= names for kind, parts in self._filed() if kind == transform
        )

    def _filed(self) -> Iterator[tuple[str, list[str]]]:
        for cause in self.cliffs:
            kind, _, parts = cause.partition(": ")
            yield kind, parts.split(", ")

    def summary(self) -> str:
        """Return the results in a few lines."""
        if not self.ratios:
            return "No program was measured."
        share = len(self.slower) / len(self.ratios)
        ratio, first = map(geometric_mean, (self.ratios, self.first))
        rows = [
            f"{len(self.ratios)} programs measured beside JAX: {ratio:.2f} times its "
            f"time in the mean, first calls {first:.2f}; {len(self.slower)} "
            f"({share:.1%}) are slower by more than {self.factor}.",
            *(f"  {cause}: {times}" for cause, times in self.cliffs.items()),
            *(f"FAILED {x}: see {path}" for x, path in self.campaign.failures.items()),
        ]
        return "\n".join(rows)

    def write(self) -> None:
        """Write `speed.json`."""
        summary = {
            "seeds": self.campaign.seeds,
            "factor": self.factor,
            "programs": self.campaign.programs.total(),
            "measured": len(self.ratios),
            "ratio": geometric_mean(self.ratios) if self.ratios else math.nan,
            "first": geometric_mean(self.first) if self.first else math.nan,
            "slower": self.slower,
            "cliffs": self.cliffs,
        }
        path = Path(self.campaign.folder) / "speed.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(summary, indent=1) + "\n")


def show(limit: Limit, start: int, folder: Path, factor: float) -> int:
    """Search until the limit, or Ctrl-C, and print the results.

    Returns:
        The exit status: 130 after Ctrl-C, or 0.
    """
    search = Search(Campaign(folder), factor)
    status = 0
    with progress_bar() as advance:
        try:
            search.run(limit, start, advance)
        except KeyboardInterrupt:
            status = 130
    print(search.summary())
    return status
