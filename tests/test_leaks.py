"""Calls leave nothing behind: neither memory nor Python objects."""

import contextlib
import gc
import resource
import sys
from collections.abc import Callable
from itertools import count, pairwise, product, starmap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hopflow
from hopflow.errors import HopflowError
from hopflow.ops import opdef
from hopflow.symbolic.facts import NOTHING

hf: Any = hopflow
pytestmark = pytest.mark.slow
X = np.random.default_rng(0).normal(size=(64, 8))


def left() -> tuple[int, int]:
    """Python's objects, and bytes of this process that are in memory; what tracing
    remembers of types and sizes, up to a bound, is forgotten first."""
    opdef._promoted.clear()
    opdef._inferred.clear()
    NOTHING._bounds._memo.clear()
    gc.collect()
    pages = Path("/proc/self/statm").read_text().split()[1]
    return len(gc.get_objects()), int(pages) * resource.getpagesize()


@pytest.fixture(autouse=True, scope="module")
def _only_what_is_new() -> None:
    """Leave what earlier tests have made out of garbage collections, which would take
    seconds each."""
    gc.collect()
    gc.freeze()


def _loss(x: Any) -> Any:
    return hf.sum(
        hf.while_loop(lambda n, c: n < 3, lambda n, c: (n + 1, hf.sin(c) * x), (0, x))[
            1
        ]
    )


def jitted() -> Callable[[int], Any]:
    f, x = hf.jit(lambda x: hf.scan(lambda c, r: (c + r, c), x[0], x)), hf.asarray(X)
    return lambda _: f(x)


def found_sizes() -> Callable[[int], Any]:
    f, x = hf.jit(lambda x, n: x[x > 0] * n), hf.asarray(X)
    return lambda _: f(x, 2)


def dynamic() -> Callable[[int], Any]:
    f = hf.jit(lambda x: hf.sum(hf.cumulative_sum(x, axis=0)), dynamic=True)
    xs = [hf.asarray(X[:n]) for n in range(2, 64)]
    return lambda k: f(xs[k % 62])


def donated() -> Callable[[int], Any]:
    f = hf.jit(lambda x: x * 2, donate=(0,))
    return lambda _: f(hf.asarray(X.copy()))


def trapped() -> Callable[[int], Any]:
    f = hf.jit(lambda x, i: hf.map(lambda r: r[i], x))
    x, i = hf.asarray(X), hf.asarray(99)

    def call(_: int) -> None:
        with contextlib.suppress(HopflowError):
            f(x, i)

    return call


def called_back() -> Callable[[int], Any]:
    def host(s: Any) -> Any:
        if s < 0:
            raise ZeroDivisionError
        return np.asarray(s)

    f = hf.jit(
        lambda x: hf.fori_loop(
            0, 2, lambda _, c: hf.callback(host, hf.spec("f64[]"), c), hf.sum(x)
        )
    )
    x, y = hf.asarray(X * X), hf.asarray(-X * X)

    def call(k: int) -> None:
        with contextlib.suppress(ZeroDivisionError):
            f(y if k % 2 else x)

    return call


def eager() -> Callable[[int], Any]:
    x = hf.asarray(X)
    return lambda _: (hf.exp(x)[1:] + 1).reshape(-1)


# What is traced anew in each call.


def operators() -> Callable[[int], Any]:
    x = hf.asarray(X)
    return lambda _: hf.scan(lambda c, r: (c + r * x[0], c), x[0], x)


def gradients() -> Callable[[int], Any]:
    x = hf.asarray(X[:2])
    return lambda _: hf.grad(_loss)(x)


def examples() -> Callable[[int], Any]:
    x = hf.asarray(X)
    return lambda _: hf.vmap(lambda r: hf.cond(r[0] > 0, lambda: r, lambda: -r))(x)


def failed_traces() -> Callable[[int], Any]:
    f, x = hf.jit(lambda x: hf.map(lambda r: r @ hf.zeros(3), x)), hf.asarray(X)

    def call(_: int) -> None:
        with contextlib.suppress(HopflowError):
            f(x)

    return call


def fresh_functions() -> Callable[[int], Any]:
    x = hf.asarray(X)
    return lambda _: hf.jit(lambda a: hf.sum(a * 3))(x)


def subgraphs() -> Callable[[int], Any]:
    def call(k: int) -> Any:  # of another function, and another size
        f = hf.subgraph(lambda a: hf.sum(a * (k % 40)))
        return hf.jit(lambda a: f(f(a) + a))(X[: k % 40])

    return call


def counted() -> Callable[[int], Any]:
    calls, x = 0, hf.asarray(X)

    def doubled(x: Any) -> Any:
        nonlocal calls
        calls += 1
        return x * 2

    f = hf.jit(doubled)
    return lambda _: f(x)


def evicted_programs() -> Callable[[int], Any]:
    x, numbers = hf.asarray(X), count(0.5)
    most = hf.config.kernel_cache_bytes

    def call(_: int) -> None:
        number = next(numbers)
        hf.config.kernel_cache_bytes = 1 << 16
        try:
            hf.jit(lambda a: a * number)(x)
        finally:
            hf.config.kernel_cache_bytes = most

    return call


QUICK = [jitted, found_sizes, dynamic, donated, trapped, called_back, eager]
SLOW = [
    operators,
    gradients,
    examples,
    failed_traces,
    fresh_functions,
    subgraphs,
    counted,
]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("kind", "calls"),
    [*product(QUICK, [3_500]), *product(SLOW, [60]), (evicted_programs, 100)],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_memory_stays_flat(
    kind: Callable[[], Callable[[int], Any]], calls: int
) -> None:
    call = kind()
    for k in range(min(calls, 200)):
        call(k)
    found = [left()]
    for _ in range(3):  # what leaks does so each time; what settles, once
        for k in range(calls):
            call(k)
        found.append(left())
    objects, memory = map(min, zip(*starmap(grown, pairwise(found)), strict=True))
    assert objects < 60
    assert memory < 1_000_000


def grown(before: tuple[int, int], after: tuple[int, int]) -> tuple[int, int]:
    return after[0] - before[0], after[1] - before[1]
