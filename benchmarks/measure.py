"""Measuring hopflow and JAX, turn by turn in one process."""

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any, Final, Protocol

import jax
import numpy as np

import hopflow as hf
from benchmarks.workload import Workload
from hopflow import pytree
from hopflow.compiler.pipeline import clear_cache

SAMPLE: Final = 1e-3
"""Seconds of one sample of a run at least: shorter calls are repeated in it."""
BUDGET: Final = 1.0
"""Seconds for the runs of a row, where the rounds asked for take less."""
MOST: Final = 101
"""Rounds at most."""


@dataclass(frozen=True)
class Times:
    """Seconds of first calls, and of runs divided by their steps; and the medians."""

    firsts: list[float]
    runs: list[float]

    @property
    def first(self) -> float:
        return median(self.firsts)

    @property
    def run(self) -> float:
        return median(self.runs)


@dataclass(frozen=True)
class Row:
    """What was measured of one workload."""

    name: str
    hopflow: Times
    jax: Times


class Disagreement(Exception):
    """The two results of a workload differ."""


def measure(workload: Workload, repeat: int) -> Row:
    """Compare the results, then time both sides by turns.

    The first call is that of a function made anew, after the caches were cleared and
    something unrelated was compiled: `repeat` of them, and as many runs or more.

    Raises:
        Disagreement: the results differ by more than the workload allows.
    """
    sides: tuple[Side, Side] = (_Hopflow(workload), _Jax(workload))
    _compare(workload, *(side.answer() for side in sides))
    firsts: list[list[float]] = [[], []]
    with _no_collection():
        for _ in range(repeat):
            for side, times in zip(sides, firsts, strict=True):
                gc.collect()
                side.renew()
                times.append(_timed(side.call))
        gc.collect()
        runs = _runs(sides, repeat)
    ours, theirs = (
        Times(first, [t / workload.steps for t in run])
        for first, run in zip(firsts, runs, strict=True)
    )
    return Row(workload.name, ours, theirs)


def _runs(sides: Sequence["Side"], repeat: int) -> list[list[float]]:
    """Seconds of calls, in rounds in which each side has its turn."""
    once = [min(_timed(side.call) for _ in range(3)) for side in sides]
    inner = [max(1, round(SAMPLE / t)) for t in once]
    a_round = sum(t * n for t, n in zip(once, inner, strict=True))
    runs: list[list[float]] = [[] for _ in sides]
    for _ in range(max(repeat, min(MOST, int(BUDGET / a_round)))):
        for side, n, times in zip(sides, inner, runs, strict=True):
            times.append(_timed(side.call, n) / n)
    return runs


def _timed(call: Callable[[], Any], count: int = 1) -> float:
    started = time.perf_counter()
    for _ in range(count):
        call()
    return time.perf_counter() - started


@contextmanager
def _no_collection() -> Iterator[None]:
    """Collect no garbage in the middle of a sample."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class Side(Protocol):
    """A library under test."""

    def renew(self) -> None:
        """Forget what was compiled, compile something else, and make a new function."""

    def call(self) -> None:
        """Call the function: the first time traces and compiles."""

    def answer(self) -> list[Any]:
        """The leaves of the result as NumPy arrays."""


class _Hopflow:
    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.args = [hf.asarray(x) for x in workload.args]
        self.f: Callable[..., Any] = workload.hopflow()

    def renew(self) -> None:
        clear_cache()
        hf.jit(lambda x: x * 3 - 1)(hf.asarray([1.0]))
        f = self.workload.hopflow()
        self.f = hf.jit(f) if self.workload.mode == "jit" else f

    def call(self) -> None:
        if self.workload.mode == "trace":
            hf.trace(self.workload.hopflow(), *self.args)
        else:
            self.f(*self.args)

    def answer(self) -> list[Any]:
        result = hf.jit(self.workload.hopflow())(*self.args)
        return [np.asarray(leaf) for leaf in pytree.flatten(result)[0]]


class _Jax:
    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.args = [jax.device_put(x) for x in workload.args]
        self.f: Callable[..., Any] = workload.jax()

    def renew(self) -> None:
        jax.clear_caches()
        jax.jit(lambda x: x * 3 - 1)(np.ones(1)).block_until_ready()
        f = self.workload.jax()
        self.f = jax.jit(f) if self.workload.mode == "jit" else f

    def call(self) -> None:
        if self.workload.mode == "trace":  # of a function that is not known already
            jax.make_jaxpr(self.workload.jax())(*self.args)
        else:
            jax.block_until_ready(self.f(*self.args))

    def answer(self) -> list[Any]:
        result = jax.jit(self.workload.jax())(*self.args)
        return [np.asarray(leaf) for leaf in jax.tree.leaves(result)]


def _compare(workload: Workload, ours: list[Any], theirs: list[Any]) -> None:
    name, rtol = workload.name, workload.rtol
    if len(ours) != len(theirs):
        raise Disagreement(f"{name}: {len(ours)} results, and {len(theirs)}")
    for k, (x, y) in enumerate(zip(ours, theirs, strict=True)):
        if (x.shape, x.dtype) != (y.shape, y.dtype):
            raise Disagreement(
                f"{name}: result {k} is {x.dtype}{x.shape}, and {y.dtype}{y.shape}"
            )
        far = ~np.isclose(x, y, rtol=rtol, atol=rtol, equal_nan=True)
        if np.mean(far) > workload.differing:
            worst = float(np.max(np.abs(x - y)))
            raise Disagreement(
                f"{name}: result {k} differs by {worst:.3g} at most, and too much in "
                f"{np.mean(far):.2%} of its elements"
            )
