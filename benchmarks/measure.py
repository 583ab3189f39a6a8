"""Measuring hopflow, JAX, Numba and C, turn by turn in one process."""

import gc
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Final, Protocol

import jax
import numpy as np

import hopflow as hf
from benchmarks import dr_jit, in_numba, native
from benchmarks.workload import Calls, Workload
from hopflow import pytree
from hopflow.compiler.pipeline import clear_cache

SAMPLE: Final = 1e-3
"""Seconds of one sample of a run at least: shorter calls are repeated in it."""
BUDGET: Final = 1.0
"""Seconds for the runs of a row, where the rounds asked for take less."""
MOST: Final = 101
"""Rounds at most."""


COMPILED: Final = ("hopflow", "jax", "numba")
"""The sides of which first calls are timed, by their fields of `Row`."""


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
    """What was measured of one workload.

    symbolic   runs of hopflow's program for all sizes, where one is compiled
    lax_map    runs of JAX by `lax.map`, where `jax` is by `jax.vmap`
    dr_jit     runs of the function in Dr.Jit, where there is one, and Dr.Jit
    numba      the function in Numba, where there is one, and Numba
    c          runs of the function in C, where there is one, and a compiler
    """

    name: str
    hopflow: Times
    jax: Times
    symbolic: Times | None = None
    lax_map: Times | None = None
    dr_jit: Times | None = None
    numba: Times | None = None
    c: Times | None = None

    @property
    def symbolic_ratio(self) -> float | None:
        """How many times as long as a run it takes where sizes are symbols."""
        if self.symbolic is None:
            return None
        pairs = zip(self.symbolic.runs, self.hopflow.runs, strict=True)
        return median([symbolic / static for symbolic, static in pairs])


class Disagreement(Exception):
    """The two results of a workload differ."""


def measure(workload: Workload, repeat: int) -> Row:
    """Compare the results, then time all sides by turns.

    The first call is that of a function made anew, after the caches were cleared and
    something unrelated was compiled: `repeat` of them, and as many runs or more.

    Raises:
        Disagreement: the results differ by more than the workload allows.
    """
    pair, others = compared_sides(workload)
    sides = dict(zip(("hopflow", "jax"), pair, strict=True)) | others
    compiled = [name for name in sides if name in COMPILED]
    with no_collection():
        firsts = dict(
            zip(compiled, _firsts([sides[n] for n in compiled], repeat), strict=True)
        )
        gc.collect()
        runs = _runs([*sides.values()], repeat)
    times = {
        name: Times(firsts.get(name, []), [t / workload.steps for t in run])
        for name, run in zip(sides, runs, strict=True)
    }
    return Row(workload.name, **times)


def compared_sides(workload: Workload) -> tuple[list["Side"], dict[str, "Side"]]:
    """Compare the results of all sides. Return hopflow and JAX, and then the others, by
    their fields of `Row`.

    Raises:
        Disagreement: the results differ by more than the workload allows.
    """
    pair: list[Side] = [Hopflow(workload), _Jax(workload)]
    expected = pair[1].answer()
    others = _others(workload, expected)
    for side in (pair[0], *others.values()):
        _compare(workload, side.answer(), expected)
    return pair, others


def _others(workload: Workload, expected: list[Any]) -> dict[str, "Side"]:
    """The sides that only some rows have, by their fields of `Row`."""
    sides: dict[str, Side] = {}
    if workload.mode == "jit":
        sides["symbolic"] = _Symbolic(workload)
    if workload.lax_map is not None:
        sides["lax_map"] = _Jax(replace(workload, jax=workload.lax_map))
    if workload.dr_jit is not None and dr_jit.missing() is None:
        sides["dr_jit"] = dr_jit.Function(workload.dr_jit, workload.args)
    if workload.in_numba and in_numba.missing() is None:
        sides["numba"] = in_numba.Function(
            workload.name, workload.args, expected, workload.in_c or ()
        )
    if workload.in_c is not None and native.missing() is None:
        sides["c"] = _C(workload, expected)
    return sides


def measure_calls(calls: Calls, repeat: int) -> Row:
    """Compare the results, then time all the calls, by turns of both sides.

    With what is compiled they are made but once: many sizes take JAX long.

    Raises:
        Disagreement: the results differ by more than is allowed.
    """
    pair: list[Side] = [Hopflow(calls), _Jax(calls)]
    _compare(calls, *(side.answer() for side in pair))
    with no_collection():
        firsts = _firsts(pair, 1)
        gc.collect()
        runs = _runs(pair, repeat) if calls.warm else firsts
    count = len(calls.calls) if calls.warm else 1
    ours, theirs = (
        Times(first, [t / count for t in run])
        for first, run in zip(firsts, runs, strict=True)
    )
    return Row(calls.name, ours, theirs)


def _firsts(sides: Sequence["Side"], repeat: int) -> list[list[float]]:
    """Seconds of what is done with functions made anew, in rounds."""
    firsts: list[list[float]] = [[] for _ in sides]
    for _ in range(repeat):
        for side, times in zip(sides, firsts, strict=True):
            gc.collect()
            side.renew()
            times.append(timed(side.call))
    return firsts


def _runs(sides: Sequence["Side"], repeat: int) -> list[list[float]]:
    """Seconds of calls, in rounds in which each side has its turn."""
    once = [min(timed(side.call) for _ in range(3)) for side in sides]
    inner = [max(1, round(SAMPLE / t)) for t in once]
    a_round = sum(t * n for t, n in zip(once, inner, strict=True))
    runs: list[list[float]] = [[] for _ in sides]
    turns = deque(zip(sides, inner, runs, strict=True))
    for _ in range(max(repeat, min(MOST, int(BUDGET / a_round)))):
        for side, n, times in turns:
            times.append(timed(side.call, n) / n)
        turns.rotate()  # what runs after whom matters on a machine that is shared
    return runs


def timed(call: Callable[[], Any], count: int = 1) -> float:
    started = time.perf_counter()
    for _ in range(count):
        call()
    return time.perf_counter() - started


@contextmanager
def no_collection() -> Iterator[None]:
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


class Hopflow:
    """Hopflow, with the arguments of a workload."""

    dynamic: bool | None = None

    def __init__(self, work: Workload | Calls) -> None:
        self.work = work
        self.calls = [
            [hf.asarray(x) if isinstance(x, np.ndarray) else x for x in args]
            for args in work.calls
        ]
        self.f = self._made()

    def _made(self) -> Callable[..., Any]:
        f = self.work.hopflow()
        return hf.jit(f, dynamic=self.dynamic) if self.work.mode == "jit" else f

    def renew(self) -> None:
        clear_cache()
        hf.jit(lambda x: x * 3 - 1)(hf.asarray([1.0]))
        self.f = self._made()

    def call(self) -> None:
        mode = self.work.mode
        for args in self.calls:
            if mode == "trace":
                hf.trace(self.work.hopflow(), *args)
            elif mode == "symbolic":
                hf.trace(self.work.hopflow(), *args, mode="symbolic")
            else:
                self.f(*args)

    def answer(self) -> list[Any]:
        f = hf.jit(self.work.hopflow(), dynamic=self.dynamic)
        results = [f(*args) for args in self.calls]
        return [np.asarray(leaf) for leaf in pytree.flatten(results)[0]]


class _Symbolic(Hopflow):
    """All sizes of the arguments are symbols."""

    dynamic = True


class _Jax:
    def __init__(self, work: Workload | Calls) -> None:
        self.work = work
        self.calls = [
            [jax.device_put(x) if isinstance(x, np.ndarray) else x for x in args]
            for args in work.calls
        ]
        self.f = self._made()

    def _made(self) -> Callable[..., Any]:
        f = self.work.jax()
        return jax.jit(f) if self.work.mode == "jit" else f

    def renew(self) -> None:
        jax.clear_caches()
        jax.jit(lambda x: x * 3 - 1)(np.ones(1)).block_until_ready()
        self.f = self._made()

    def call(self) -> None:
        traced = self.work.mode in ("trace", "symbolic")
        for args in self.calls:
            if traced:  # of a function that is not known already
                jax.make_jaxpr(self.work.jax())(*args)
            else:
                jax.block_until_ready(self.f(*args))

    def answer(self) -> list[Any]:
        f = jax.jit(self.work.jax())
        results = [f(*args) for args in self.calls]
        return [np.asarray(leaf) for leaf in jax.tree.leaves(results)]


class _C:
    """The function in C. It writes all its results to the same memory."""

    def __init__(self, work: Workload, expected: Sequence[Any]) -> None:
        self.call = native.Routine(work.name, work.args, expected, work.in_c or ())

    def renew(self) -> None:
        """It was compiled before."""

    def answer(self) -> list[Any]:
        self.call()
        return self.call.results


def _compare(work: Workload | Calls, ours: list[Any], theirs: list[Any]) -> None:
    name, rtol = work.name, work.rtol
    if len(ours) != len(theirs):
        raise Disagreement(f"{name}: {len(ours)} results, and {len(theirs)}")
    for k, (x, y) in enumerate(zip(ours, theirs, strict=True)):
        if (x.shape, x.dtype) != (y.shape, y.dtype):
            raise Disagreement(
                f"{name}: result {k} is {x.dtype}{x.shape}, and {y.dtype}{y.shape}"
            )
        far = ~np.isclose(x, y, rtol=rtol, atol=rtol, equal_nan=True)
        if np.mean(far) > work.differing:
            worst = float(np.max(np.abs(x - y)))
            raise Disagreement(
                f"{name}: result {k} differs by {worst:.3g} at most, and too much in "
                f"{np.mean(far):.2%} of its elements"
            )
