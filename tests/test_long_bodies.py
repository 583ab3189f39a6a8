"""Bodies that are compiled as several native functions."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import hopflow as hf
from hopflow import dtypes
from hopflow.compiler import pipeline
from hopflow.compiler.cpu import segments
from hopflow.errors import CheckError
from hopflow.loop_ir import expr as e
from hopflow.loop_ir import walk
from hopflow.loop_ir.nest import Buffer, Stmt, Store


@pytest.fixture
def short_segments(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Bodies are divided after every few statements."""
    pipeline.clear_cache()
    monkeypatch.setattr(segments, "LENGTH", 3)
    monkeypatch.setattr(segments, "_LOOP", 1)
    yield
    pipeline.clear_cache()


def chain(x: Any) -> Any:
    for k in range(12):
        x = hf.sin(x) * (k + 1) + hf.sum(x)
    return x


def matrices(x: Any) -> Any:
    for _ in range(4):
        x = hf.tanh(x @ x.mT) - hf.flip(x, axis=0)
    return x


def carries(x: Any) -> Any:
    def step(i: Any, a: Any, b: Any, n: Any) -> Any:
        a, b = hf.sin(b) + a @ b, hf.cos(a) * hf.sum(b)
        a = hf.where(a > 0, a, -a)
        return b + n, a, n + hf.cond(n > 2, lambda: n, lambda: i)

    return hf.fori_loop(0, 5, step, (x, x + 1, 1))


def stops_early(x: Any) -> Any:
    def keeps_on(i: Any, y: Any) -> Any:
        return (hf.sum(y) < 50) & (i < 9)

    return hf.while_loop(keeps_on, lambda i, y: (i + 1, chain(y) / 4 + 3), (0, x))


def writes(x: Any) -> Any:
    y = x.copy()
    for k in range(3):
        y[k] = hf.sum(y[k - 1]) + k
        y[:, k] *= 2
    return y, hf.scan(lambda c, r: (c + hf.sum(r), r * c), 0.0, y)


def sizes_of_the_run(x: Any) -> Any:
    positive = x[x > 0]
    first = hf.nonzero(x)[0]
    return positive * 2 + 1, hf.cumulative_sum(positive), first + 1, hf.sum(first)


def threads(x: Any) -> Any:
    return hf.map(lambda row: chain(hf.fori_loop(0, 4, lambda i, r: r + i, row)), x)


PROGRAMS: list[Callable[[Any], Any]] = [
    chain,
    matrices,
    carries,
    stops_early,
    writes,
    sizes_of_the_run,
    threads,
]


def arrays(tree: Any) -> list[Any]:
    return [np.asarray(leaf) for leaf in hf.pytree.flatten(tree)[0]]


@pytest.mark.usefixtures("verified")
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("f", PROGRAMS, ids=lambda f: f.__name__)
def test_segments_compute_the_bits_of_one_function(
    f: Any, dynamic: bool, request: pytest.FixtureRequest
) -> None:
    x = hf.asarray(np.linspace(-1, 1, 16, dtype=np.float64).reshape(4, 4))
    whole = hf.jit(f, dynamic=dynamic)
    expected = arrays(whole(x))
    assert "@segment" not in whole.llvm_ir
    request.getfixturevalue("short_segments")
    divided = hf.jit(f, dynamic=dynamic)
    for got, want in zip(arrays(divided(x)), expected, strict=True):
        np.testing.assert_array_equal(got, want)
    assert "@segment" in divided.llvm_ir


@pytest.mark.usefixtures("short_segments")
def test_a_check_in_a_segment_stops_the_program_with_its_own_message() -> None:
    def f(x: Any, bad: Any) -> Any:
        for k in range(8):
            x = hf.sin(x) + hf.sum(x)
            hf.check(bad != k, f"check {k}")
        return x

    jitted, x = hf.jit(f), hf.ones(5)
    jitted(x, hf.asarray(-1))
    for k in range(8):
        with pytest.raises(CheckError, match=f"check {k}"):
            jitted(x, hf.asarray(k))


@pytest.mark.usefixtures("short_segments")
def test_segments_call_python_in_order() -> None:
    seen: list[float] = []

    def f(x: Any) -> Any:
        for _ in range(6):
            x = hf.sum(hf.sin(x)) + x
            hf.callback(lambda a: seen.append(float(a[0])), None, x)
        return x

    hf.jit(f)(hf.ones(3))
    compiled = seen.copy()
    seen.clear()
    with hf.debug():
        f(hf.ones(3))
    np.testing.assert_allclose(compiled, seen, rtol=1e-6)
    assert len(seen) == 6


def test_only_long_bodies_are_divided() -> None:
    def f(x: Any) -> Any:
        for k in range(1500):
            x = hf.sin(x) + k
        return x

    long, short = hf.jit(f), hf.jit(chain)
    long(hf.ones(3)), short(hf.ones(3))
    assert long.llvm_ir.count("define internal i64 @segment") > 1
    assert "@segment" not in short.llvm_ir


def test_a_segment_names_few_buffers() -> None:
    one = dtypes.float64
    buffers = [Buffer(f"b{k}", one, (), "arena") for k in range(200)]
    stores: list[Stmt] = [Store(b, (), e.const(k, one)) for k, b in enumerate(buffers)]
    runs = list(segments._runs(stores))
    assert [s for run in runs for s in run] == stores
    assert all(len(walk.uses(run)) <= segments.MOST_BUFFERS for run in runs)
    assert len(runs) == -(-200 // segments.MOST_BUFFERS)
