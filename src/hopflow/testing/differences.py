"""Central differences: what derivatives are without any tape.

    slopes(f)     of f(t) at t = 0

Where a function is not smooth, or decides something nearby, they say nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np

from hopflow.agreement import Rounding

Array: TypeAlias = np.ndarray[Any, Any]
Line: TypeAlias = Callable[[float, Rounding], Sequence[Array]]
"""A function along a line; a `Rounding` says what becomes of what it calculates."""

STEP: Final = 1e-5
NOISY_RUNS: Final = 4
SLACK: Final = 16.0
KINK: Final = 0.6
"""The slopes to the left and to the right are apart by so many times what they are at
twice the step: by a half where a function is smooth, and by more at a kink. Where a
kink is so far away that it is less, the slopes of both steps are apart by half of their
error."""


@dataclass(frozen=True)
class Slopes:
    """Of each result, and how far a derivative may be away from it."""

    values: Sequence[Array]
    allowed: Sequence[float]

    def wrong(self, derivatives: Sequence[Array]) -> str | None:
        """What is wrong about derivatives; None: nothing."""
        pairs = zip(derivatives, self.values, self.allowed, strict=True)
        for k, (found, slope, most) in enumerate(pairs):
            apart = _largest(found - slope)
            if not apart <= most:
                return (
                    f"derivative {k} is {apart:.3g} away, and may be {most:.3g}.\n"
                    f"found:\n{found}\ncentral differences:\n{slope}"
                )
        return None


def slopes(f: Line) -> Slopes | None:
    """The slopes of `f` at 0; None: differences do not know them."""
    steps = (0.0, STEP, -STEP, STEP / 2, -STEP / 2)
    roundings = [Rounding() for _ in steps]
    noisy = [Rounding(seed) for seed in range(NOISY_RUNS)]
    runs = [f(t, rounding) for t, rounding in zip(steps, roundings, strict=True)]
    moved = [f(0.0, rounding) for rounding in noisy]
    if any(r.decisions != roundings[0].decisions for r in (*roundings, *noisy)):
        return None
    values, allowed = [], []
    for at, right, left, near_right, near_left, *others in zip(
        *runs, *moved, strict=True
    ):
        noise = SLACK * max(_largest(x - at) for x in others) / STEP
        bend = _largest(right - 2 * at + left) / STEP
        near_bend = _largest(near_right - 2 * at + near_left) / (STEP / 2)
        if not near_bend <= KINK * bend + 4 * noise:
            return None
        far, near = (right - left) / (2 * STEP), (near_right - near_left) / STEP
        values.append(near)
        allowed.append(2 * _largest(far - near) + 4 * noise + SLACK * _unit(near))
    return Slopes(values, allowed)


def _unit(slope: Array) -> float:
    """What rounding of the step alone may move."""
    return float(np.finfo(np.float64).eps) / STEP * max(_largest(slope), 1.0)


def _largest(x: Array) -> float:
    return float(np.max(np.abs(x), initial=0.0))
