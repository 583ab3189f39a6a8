"""Tolerances for comparing two executions of a program.

The program itself determines them: it is run again with noise in the last place of
each intermediate result, and the change of the outputs bounds the effect of rounding.
If the noise changes a decision (a branch, a sorted order, a number of steps), the
program is at a tie, and a difference says nothing.
"""

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Final, TypeAlias

import ml_dtypes
import numpy as np

from hopflow.dtypes import as_dtype

Array: TypeAlias = np.ndarray[Any, Any]

RUNS: Final = 16
"""Runs with noise: each detects a result at a tie with probability 1/2."""

SLACK: Final = 16.0
"""The tolerance, as a multiple of the change that the noise causes."""


class Rounding:
    """Perturbs the intermediate results of a run, and records its decisions.

    seed        the seed of the noise; None: no noise
    decisions   all results that are no floats, in order
    """

    def __init__(self, seed: int | None = None) -> None:
        self.decisions: list[bytes] = []
        self._rng = None if seed is None else np.random.default_rng(seed)

    def result(self, x: Any) -> Array:
        """Return `x` with noise if it is a float, else record it as a decision."""
        result = np.asarray(x)
        if as_dtype(result.dtype).is_float:
            return self.argument(result)
        self.decisions.append(result.tobytes())
        return result

    def argument(self, x: Array) -> Array:
        """Return `x` with noise in its last place, if there is noise."""
        if self._rng is None or not as_dtype(x.dtype).is_float:
            return x
        wave = self._rng.choice([-1.0, 1.0], size=x.shape) * _unit(x)
        return np.asarray(x * (1 + wave).astype(x.dtype), x.dtype)


class Expected:
    """The expected results of a program, with their tolerances.

    results   the results of a run without noise
    tied      whether a difference was ignored because the program is at a tie
    """

    def __init__(
        self,
        run: Callable[[Rounding], Sequence[Array]],
        *,
        exact: bool = False,
        signed: bool = False,
    ) -> None:
        """
        Args:
            run: Returns the results; it passes each intermediate result through the
                `Rounding`, and continues with what that returns.
            exact: Whether results must be bitwise equal.
            signed: Whether zeros must have equal signs.
        """
        self._run, self._exact, self._signed = run, exact, signed
        self.tied = False
        self._rounding = Rounding()
        self.results = run(self._rounding)

    def wrong(self, actual: Sequence[Any]) -> str | None:
        """Return what is wrong about results; None: nothing, or the program is at a
        tie."""
        # The runs with noise are needed only if the cheap tolerance is exceeded.
        difference = self._difference(actual, self._least)
        if difference is None:
            return None
        if self.is_tie:
            self.tied = True
            return None
        difference = self._difference(actual, self._allowed)
        self.tied |= difference is None and math.inf in self._allowed
        return difference

    @cached_property
    def is_tie(self) -> bool:
        """Whether rounding changes a decision, so that no result can be compared."""
        return not self._exact and any(
            noisy.decisions != self._rounding.decisions for noisy, _ in self._noisy
        )

    @cached_property
    def _noisy(self) -> list[tuple[Rounding, Sequence[Array]]]:
        runs = [Rounding(seed) for seed in range(RUNS)]
        return [(rounding, self._run(rounding)) for rounding in runs]

    @cached_property
    def _least(self) -> list[float]:
        """The tolerance of each result if only the result itself is rounded."""
        if self._exact:
            return [0.0] * len(self.results)
        largest = (np.max(np.abs(_finite(r)), initial=0.0) for r in self.results)
        pairs = zip(self.results, largest, strict=True)
        return [SLACK * _unit(r) * float(size) for r, size in pairs]

    @cached_property
    def _allowed(self) -> list[float]:
        """The tolerance of each result; infinite if rounding turns it into a NaN or an
        infinity."""
        if self._exact:
            return self._least
        moved = [0.0] * len(self.results)
        for _, results in self._noisy:
            for i, (a, b) in enumerate(zip(results, self.results, strict=True)):
                if as_dtype(b.dtype).is_float:
                    apart = _apart(a, b)
                    moved[i] = max(moved[i], math.inf if math.isnan(apart) else apart)
        pairs = zip(moved, self._least, strict=True)
        return [SLACK * m + least for m, least in pairs]

    def _difference(
        self, actual: Sequence[Any], allowed: Sequence[float]
    ) -> str | None:
        if len(actual) != len(self.results):
            return f"{len(actual)} results, where {len(self.results)} are expected."
        for k, (x, expected, most) in enumerate(
            zip(actual, self.results, allowed, strict=True)
        ):
            a = np.asarray(x)
            if (a.dtype, a.shape) != (expected.dtype, expected.shape):
                return (
                    f"result {k} is {a.dtype}{list(a.shape)}, and must be "
                    f"{expected.dtype}{list(expected.shape)}."
                )
            apart = _apart(a, expected)
            if self._signed and as_dtype(a.dtype).is_float:
                signs = np.signbit(a) == np.signbit(expected)
                if not np.all(signs | (a != 0)):
                    return f"result {k} has zeros of other signs.\n{_both(a, expected)}"
            if most < math.inf and not apart <= most:
                return (
                    f"result {k} is {apart:.3g} away, and may be {most:.3g}.\n"
                    f"{_both(a, expected)}"
                )
        return None


def _both(actual: Array, expected: Array) -> str:
    return f"found:\n{actual}\nexpected:\n{expected}"


def _unit(x: Array) -> float:
    dtype = as_dtype(x.dtype)
    return float(ml_dtypes.finfo(x.dtype).eps) if dtype.is_float else 0.0


def _finite(x: Array) -> Array:
    wide = _wide(x)
    return np.where(np.isfinite(wide), wide, 0.0)


def _apart(a: Array, b: Array) -> float:
    """Return the largest absolute difference of two elements."""
    least = 0.0 if as_dtype(b.dtype).is_float else 1.0  # lost in f64 by large integers
    with np.errstate(invalid="ignore"):
        apart = np.maximum(np.abs(_wide(a) - _wide(b)), least)
    is_equal = np.asarray(a == b) | (np.isnan(_wide(a)) & np.isnan(_wide(b)))
    return float(np.max(np.where(is_equal, 0.0, apart), initial=0.0))


def _wide(x: Array) -> Array:
    return np.asarray(x, np.float64)
