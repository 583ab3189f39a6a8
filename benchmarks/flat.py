"""How long a step takes of loops that touch a few elements of small and large arrays.

    python -m benchmarks.flat [--rows copy-write,rotate-write] [--sizes 1000,1000000]

prints the time of one step at both sizes, for hopflow and for JAX, and how many times
as long it is at the larger one. That is 1 if what a step does not touch costs nothing.
For loops that compute all elements in each step it is the ratio of the sizes at least;
those are marked with a star.

Calls of two numbers of steps are timed, and their difference is taken: what a call
costs that is no step, such as one copy of its arguments, is left out.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Final

import jax
import numpy as np

import hopflow as hf
from benchmarks.measure import no_collection, timed
from benchmarks.report import describe_machine, format_time
from benchmarks.workloads.copies import Copies, rows

FEWEST: Final = 50
"""Steps of a short call at least."""
MOST: Final = 50_000
BUDGET: Final = 0.05
"""Seconds of a long call, if so many steps are allowed."""
ROUNDS: Final = 9
SHORTEST: Final = 1e-10
"""Seconds of a step at least: a difference of two times may be none."""

HEADER: Final = (
    f"{'':22}{'hopflow (of one step)':^31}   {'JAX (of one step)':^31}\n"
    f"{'row':22}{'small':>10} {'large':>10} {'ratio':>9}   "
    f"{'small':>10} {'large':>10} {'ratio':>9}"
)


@dataclass(frozen=True)
class Flat:
    """Seconds of one step at a small and at a large size, of each library."""

    name: str
    hopflow: tuple[float, float]
    jax: tuple[float, float]


def measure_flat(row: Copies, sizes: Sequence[int], most: int = MOST) -> Flat:
    """Time one step of a loop at both sizes, in both libraries.

    Args:
        sizes: Two numbers of elements, the smaller one first.
        most: The largest number of steps in a short call.
    """

    def ours(length: int) -> float:
        f = hf.jit(row.hopflow)

        def call(steps: int) -> Callable[[], Any]:
            args = [hf.asarray(x) for x in row.args(steps, length)]
            return lambda: f(*args)

        return _step_time(call, most)

    def theirs(length: int) -> float:
        f = jax.jit(row.jax)

        def call(steps: int) -> Callable[[], Any]:
            args = [jax.device_put(x) for x in row.args(steps, length)]
            return lambda: jax.block_until_ready(f(*args))

        return _step_time(call, most)

    small, large = sizes
    return Flat(row.name, (ours(small), ours(large)), (theirs(small), theirs(large)))


def _step_time(call: Callable[[int], Callable[[], Any]], most: int) -> float:
    """Seconds of one step; `call(steps)` is a call of so many."""
    with no_collection():
        about = _difference(call, FEWEST, rounds=3)
        steps = int(np.clip(BUDGET / about / 3, FEWEST, max(most, FEWEST)))
        return _difference(call, steps, ROUNDS)


def _difference(
    call: Callable[[int], Callable[[], Any]], steps: int, rounds: int
) -> float:
    """Seconds of one step, by calls of `steps` and of three times as many in turns."""
    short, long = call(steps), call(3 * steps)
    short(), long()  # the first calls compile
    spent = [timed(long) - timed(short) for _ in range(rounds)]
    return max(median(spent) / (2 * steps), SHORTEST)


def format_flat(flat: Flat, *, touches_all: bool) -> str:
    """A line of the table."""
    name = f"{flat.name}{' *' if touches_all else ''}"
    return f"{name:22}{_cells(*flat.hopflow)}   {_cells(*flat.jax)}"


def _cells(small: float, large: float) -> str:
    ratio = large / small
    return f"{format_time(small):>10} {format_time(large):>10} {ratio:>8.1f}x"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.flat", description=__doc__)
    parser.add_argument("--rows", help="names of the rows to run, with commas between")
    parser.add_argument(
        "--sizes", default="1000,1000000", help="the two numbers of elements"
    )
    parser.add_argument("--most", type=int, default=MOST, help="steps at most")
    options = parser.parse_args(argv)
    jax.config.update("jax_enable_x64", True)
    chosen = rows()
    if options.rows:
        wanted = options.rows.split(",")
        if unknown := sorted(set(wanted) - {row.name for row in chosen}):
            parser.error(f"there is no row {', '.join(unknown)}")
        chosen = [row for row in chosen if row.name in wanted]
    sizes = [int(n) for n in options.sizes.split(",")]
    if len(sizes) != 2:
        parser.error("--sizes takes two numbers, as 1000,1000000")
    machine = describe_machine()
    print(f"JAX {machine['jax']}, Python {machine['python']}, {machine['processor']}")
    print(f"{sizes[0]:,} and {sizes[1]:,} elements; * computes all of them\n\n{HEADER}")
    for row in chosen:
        flat = measure_flat(row, sizes, options.most)
        print(format_flat(flat, touches_all=row.touches_all), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
