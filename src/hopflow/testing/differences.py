"""Central differences: derivatives without a tape.

    slopes(f)     of f(t) at t = 0

They are undefined where a function is not smooth, or makes a decision nearby.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np

from hopflow.agreement import Rounding

Array: TypeAlias = np.ndarray[Any, Any]
Line: TypeAlias = Callable[[float, Rounding], Sequence[Array]]
"""A function along a line, whose intermediate results a `Rounding` perturbs."""

STEP: Final = 1e-5
NOISY_RUNS: Final = 4
SLACK: Final = 16.0
KINK: Final = 0.6
"""The threshold for kinks: halving the step halves the difference between the left and
right slope of a smooth function, and reduces it less at a kink. For a kink that is too
far away for this, the slopes of both steps differ by half of their error."""


@dataclass(frozen=True)
class Slopes:
    """The slope of each result, and the tolerance of its derivative."""

    values: Sequence[Array]
    allowed: Sequence[float]

    def wrong(self, derivatives: Sequence[Array]) -> str | None:
        """Return what is wrong about derivatives; None: nothing."""
        pairs = zip(derivatives, self.values, self.allowed, strict=True)
        for k, (derivative, slope, most) in enumerate(pairs):
            apart = _largest(derivative - slope)
            if not apart <= most:
                return (
                    f"derivative {k} is {apart:.3g} away, and may be {most:.3g}.\n"
                    f"found:\n{derivative}\ncentral differences:\n{slope}"
                )
        return None


def slopes(f: Line) -> Slopes | None:
    """Return the slopes of `f` at 0; None: they are undefined."""
    steps = (0.0, STEP, -STEP, STEP / 2, -STEP / 2)
    roundings = [Rounding() for _ in steps]
    noisy = [Rounding(seed) for seed in range(NOISY_RUNS)]
    runs = [f(t, rounding) for t, rounding in zip(steps, roundings, strict=True)]
    moved = [f(0.0, rounding) for rounding in noisy]
    if any(r.decisions != roundings[0].decisions for r in (*roundings, *noisy)):
        return None
    values, allowed = [], []
    for center, right, left, near_right, near_left, *others in zip(
        *runs, *moved, strict=True
    ):
        noise = SLACK * max(_largest(x - center) for x in others) / STEP
        bend = _largest(right - 2 * center + left) / STEP
        near_bend = _largest(near_right - 2 * center + near_left) / (STEP / 2)
        if not near_bend <= KINK * bend + 4 * noise:
            return None
        far, near = (right - left) / (2 * STEP), (near_right - near_left) / STEP
        values.append(near)
        rounding = SLACK * _unit(near, center)
        allowed.append(2 * _largest(far - near) + 4 * noise + rounding)
    return Slopes(values, allowed)


def _unit(slope: Array, value: Array) -> float:
    """Return the error of a slope by the rounding of the step and of the results: runs
    with noise that is smaller than their last place do not show it."""
    largest = max(_largest(slope), _largest(value), 1.0)
    return float(np.finfo(np.float64).eps) / STEP * largest


def _largest(x: Array) -> float:
    return float(np.max(np.abs(x), initial=0.0))
