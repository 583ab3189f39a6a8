"""How far results may be apart: the one comparison of meanings of a program.

That is the program's own matter: it is run again with noise in the last place of each
result, and what that moves is what rounding may move. Where it moves a decision (a
branch, a sorted order, a number of steps) the program sits on a tie, and says nothing.
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
"""Runs with noise: each finds a result that is at a tie with a chance of a half."""

SLACK: Final = 16.0
"""How much more than that noise a result may be away."""


class Rounding:
    """What a run does to each result that it calculates.

    seed        of noise; None: there is none
    decisions   all that is no float, in order
    """

    def __init__(self, seed: int | None = None) -> None:
        self.decisions: list[bytes] = []
        self._rng = None if seed is None else np.random.default_rng(seed)

    def result(self, x: Any) -> Array:
        """`x`, noted if it decides something, and moved if there is noise."""
        result = np.asarray(x)
        if as_dtype(result.dtype).is_float:
            return self.argument(result)
        self.decisions.append(result.tobytes())
        return result

    def argument(self, x: Array) -> Array:
        """`x`, moved in its last place if there is noise."""
        if self._rng is None or not as_dtype(x.dtype).is_float:
            return x
        wave = self._rng.choice([-1.0, 1.0], size=x.shape) * _unit(x)
        return np.asarray(x * (1 + wave).astype(x.dtype), x.dtype)


class Expected:
    """What the results of a program must be.

    results   those of a run without noise
    tied      whether a result was apart, and that said nothing
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
            run: Gives the results; what a `Rounding` makes of what it calculates is
                what it is to go on with.
            exact: Whether results must be the same in every bit.
            signed: Whether the signs of zeros must be.
        """
        self._run, self._exact, self._signed = run, exact, signed
        self.tied = False
        self._rounding = Rounding()
        self.results = run(self._rounding)

    def wrong(self, got: Sequence[Any]) -> str | None:
        """What is wrong about results; None: nothing, or nobody knows."""
        # Noise is for results that are apart by more than their own rounding.
        found = self._difference(got, self._least)
        if found is None:
            return None
        if self.is_tie:
            self.tied = True
            return None
        found = self._difference(got, self._allowed)
        self.tied |= found is None and math.inf in self._allowed
        return found

    @cached_property
    def is_tie(self) -> bool:
        """Whether rounding moves a decision: results say nothing."""
        return not self._exact and any(
            noisy.decisions != self._rounding.decisions for noisy, _ in self._noisy
        )

    @cached_property
    def _noisy(self) -> list[tuple[Rounding, Sequence[Array]]]:
        runs = [Rounding(seed) for seed in range(RUNS)]
        return [(rounding, self._run(rounding)) for rounding in runs]

    @cached_property
    def _least(self) -> list[float]:
        """How far each result may be away if nothing but itself were rounded."""
        if self._exact:
            return [0.0] * len(self.results)
        largest = (np.max(np.abs(_finite(r)), initial=0.0) for r in self.results)
        pairs = zip(self.results, largest, strict=True)
        return [SLACK * _unit(r) * float(size) for r, size in pairs]

    @cached_property
    def _allowed(self) -> list[float]:
        """How far each result may be away; any distance says nothing if rounding makes
        a NaN or an infinity of it."""
        if self._exact:
            return self._least
        moved = [0.0] * len(self.results)
        for _, found in self._noisy:
            for i, (a, b) in enumerate(zip(found, self.results, strict=True)):
                if as_dtype(b.dtype).is_float:
                    apart = _apart(a, b)
                    moved[i] = max(moved[i], math.inf if math.isnan(apart) else apart)
        pairs = zip(moved, self._least, strict=True)
        return [SLACK * m + least for m, least in pairs]

    def _difference(self, got: Sequence[Any], allowed: Sequence[float]) -> str | None:
        if len(got) != len(self.results):
            return f"{len(got)} results, where {len(self.results)} are expected."
        for k, (x, want, most) in enumerate(
            zip(got, self.results, allowed, strict=True)
        ):
            a = np.asarray(x)
            if (a.dtype, a.shape) != (want.dtype, want.shape):
                return (
                    f"result {k} is {a.dtype}{list(a.shape)}, and must be "
                    f"{want.dtype}{list(want.shape)}."
                )
            apart = _apart(a, want)
            if self._signed and as_dtype(a.dtype).is_float:
                signs = np.signbit(a) == np.signbit(want)
                if not np.all(signs | (a != 0)):
                    return f"result {k} has zeros of other signs.\n{_both(a, want)}"
            if most < math.inf and not apart <= most:
                return (
                    f"result {k} is {apart:.3g} away, and may be {most:.3g}.\n"
                    f"{_both(a, want)}"
                )
        return None


def _both(found: Array, expected: Array) -> str:
    return f"found:\n{found}\nexpected:\n{expected}"


def _unit(x: Array) -> float:
    dtype = as_dtype(x.dtype)
    return float(ml_dtypes.finfo(x.dtype).eps) if dtype.is_float else 0.0


def _finite(x: Array) -> Array:
    wide = _wide(x)
    return np.where(np.isfinite(wide), wide, 0.0)


def _apart(a: Array, b: Array) -> float:
    """The largest distance of two elements."""
    least = 0.0 if as_dtype(b.dtype).is_float else 1.0  # which large integers lose
    with np.errstate(invalid="ignore"):
        apart = np.maximum(np.abs(_wide(a) - _wide(b)), least)
    same = np.asarray(a == b) | (np.isnan(_wide(a)) & np.isnan(_wide(b)))
    return float(np.max(np.where(same, 0.0, apart), initial=0.0))


def _wide(x: Array) -> Array:
    return np.asarray(x, np.float64)
