"""Values that one test chooses: the same in every bit as without branches, and as plain
Python and JAX have it."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import hopflow as hf
from hopflow import pytree
from hopflow.compiler import pipeline
from hopflow.compiler.kernel_passes.branches import branches
from hopflow.compiler.schedule import schedule
from hopflow.errors import CheckError, IndexingError

jax = pytest.importorskip("jax")

pytestmark = pytest.mark.slow

DTYPES = ["float32", "float64", "int32"]
SIZES = [0, 1, 7, 100, 5000]


def one(m: Any, x: Any, s: Any, _: Any) -> Any:
    return m.where(s > 0, m.exp(m.sin(x)), x)


def contrary(m: Any, x: Any, s: Any, _: Any) -> Any:
    return m.where(~(s > 0), x, m.exp(x)) + 1


def softmax(m: Any, x: Any, s: Any, _: Any) -> Any:
    e = m.exp(x - m.max(x, initial=-1.0) if m is not hf else x - highest(x))
    return m.where(s > 0, e / m.sum(e), x)


def highest(x: Any) -> Any:
    return hf.max(hf.concat([x, hf.full((1,), -1.0, dtype=x.dtype)]))


def optimizer(m: Any, x: Any, s: Any, t: Any) -> Any:
    first = m.where(s > 0, x * 0.5 + 1, x)
    second = m.where(s > 0, first * first + t, x)
    return m.where(s > 0, x - first / (m.sqrt(second) + 1), x), first, second


def nested(m: Any, x: Any, s: Any, t: Any) -> Any:
    y = m.where(s > 0, m.exp(x), m.where(t > 0, m.sin(x), x))
    return m.where(t > 0, m.where(s > 0, m.cos(y), y), m.sin(y))


def with_sums(m: Any, x: Any, s: Any, t: Any) -> Any:
    y = m.where(s > 0, m.exp(x), x)
    total = m.sum(y)
    return m.where(t > 0, m.sin(y) * total, x), m.sum(x * x), total


def scalars(m: Any, x: Any, s: Any, t: Any) -> Any:
    return m.where(s > 0, m.sum(m.exp(x)), t), m.where(t > 0, m.exp(s), s)


def rows(m: Any, x: Any, s: Any, t: Any) -> Any:
    y = x[:, None] * m.ones((1, 3), dtype=x.dtype)
    return m.where(s > 0, m.exp(y) / (m.sum(m.exp(y)) + 1), y * t)


def beside_sums(m: Any, x: Any, s: Any, t: Any) -> Any:
    """Sums of two widths, before a choice, on a side of it, and after it."""
    before = m.sum(x * 0.5), m.sum(x.astype("float32") * 3)
    y = m.where(s > 0, m.exp(x), x)
    most = m.where(t > 0, m.sum(m.sin(x)), m.sum(m.cos(x.astype("float32"))))
    return y, before, most, m.sum(x - 1), m.sum(y.astype("float32") / 3)


PROGRAMS = [
    one,
    contrary,
    softmax,
    optimizer,
    nested,
    with_sums,
    scalars,
    rows,
    beside_sums,
]


def bits(results: Any) -> list[bytes]:
    """All bits, but of a NaN, whose sign a processor takes from either operand."""
    arrays = [np.asarray(x) for x in pytree.flatten(results)[0]]
    return [np.where(x == x, x, np.nan).astype(x.dtype).tobytes() for x in arrays]


def without(monkeypatch: pytest.MonkeyPatch, f: Callable[..., Any]) -> Any:
    """What `f` gives if there are no branches; and the Loop IR of it."""
    with monkeypatch.context() as patch:
        others = tuple(run for run in schedule.KERNEL_PASSES if run is not branches)
        patch.setattr(schedule, "KERNEL_PASSES", others)
        pipeline.clear_cache()
        result = f()
    pipeline.clear_cache()
    return result


def arguments(n: int, dtype: str) -> tuple[Any, ...]:
    x = np.random.default_rng(n).normal(size=n).astype(dtype)
    if x.dtype.kind == "f" and n > 5:
        x[:4] = np.nan, np.inf, -np.inf, -0.0
    return x, *(np.asarray(v, dtype) for v in (1, 1))


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("program", PROGRAMS)
def test_every_bit_is_as_it_was(
    program: Any, dtype: str, n: int, dynamic: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, s, t = arguments(n, dtype)
    cases = [(s, t), (-s, t), (s, -t), (-s, -t)]

    def run() -> list[Any]:
        f = hf.jit(lambda *args: program(hf, *args), dynamic=dynamic)
        return [f(x, *case) for case in cases]

    expected, found = without(monkeypatch, run), run()
    assert bits(expected) == bits(found)
    with hf.debug():
        plain = [program(hf, *map(hf.asarray, (x, *case))) for case in cases]
    close(found, plain, dtype)
    with jax.enable_x64(True):
        theirs = [program(jax.numpy, *map(jax.numpy.asarray, (x, *c))) for c in cases]
    if dtype != "int32":  # JAX computes with float64 where ours does
        close(found, theirs, dtype)


def close(found: Any, expected: Any, dtype: str) -> None:
    tolerance = 1e-9 if dtype == "float64" else 2e-4
    leaves = pytree.flatten(found)[0], pytree.flatten(expected)[0]
    for a, b in zip(*leaves, strict=True):
        a, b = np.asarray(a), np.asarray(b)
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def stepping(x: Any, s: Any, t: Any) -> Any:
    def step(i: Any, a: Any, b: Any) -> Any:
        a, b = hf.where(i < s, hf.exp(-b), a), hf.where(i < t, hf.sin(a), b)
        return hf.roll(hf.where(t > 0, hf.cos(a), b), 1), b

    return hf.fori_loop(0, 6, step, (x, x + 1))


def scanning(x: Any, s: Any, t: Any) -> Any:
    def step(c: Any, k: Any) -> Any:
        y = hf.where(k > s, hf.exp(-c), c)
        return y, hf.where(k > t, hf.sin(y) / hf.sum(y), y)

    return hf.scan(step, x, hf.arange(5))


def waiting(x: Any, s: Any, t: Any) -> Any:
    def step(i: Any, a: Any) -> Any:
        return i + 1, hf.where(i < 2, hf.sqrt(hf.abs(a) + hf.sum(a)), a * s)

    return hf.while_loop(lambda i, a: i < 4 + t, step, (0, x))


def differentiated(x: Any, s: Any, t: Any) -> Any:
    def f(x: Any) -> Any:
        y = hf.where(s > 0, hf.exp(hf.sin(x)), x)
        return hf.sum(hf.where(t > 0, y * y, hf.cos(y)))

    return hf.grad(f)(x), hf.jvp(f, (x,), (x,))


def batched(x: Any, s: Any, t: Any) -> Any:
    def f(y: Any, s: Any) -> Any:
        return hf.where(s > 0, hf.exp(y), y) * hf.where(t > 0, hf.sin(y), y)

    table = hf.broadcast_to(x, (3, x.shape[0]))
    every = hf.vmap(f)(table, hf.stack([s, -s, t]))
    each = hf.map(lambda given: f(*given), (table, hf.stack([s, -s, t])))
    return every, hf.vmap(f, in_dims=(0, None))(table, s), each


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("n", [1, 100, 5000])
@pytest.mark.parametrize(
    "f",
    [stepping, scanning, waiting, differentiated, batched],
    ids=lambda f: f.__name__,
)
def test_loops_and_transforms_keep_every_bit(
    f: Any, n: int, dynamic: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = np.random.default_rng(n).normal(size=n)
    cases = [(1.0, 2.0), (-1.0, 2.0), (2.0, -1.0), (-1.0, -1.0)]

    def run() -> list[Any]:
        jitted = hf.jit(f, dynamic=dynamic)
        return [jitted(x, np.asarray(s), np.asarray(t)) for s, t in cases]

    expected, found = without(monkeypatch, run), run()
    assert bits(expected) == bits(found)
    with hf.debug():
        plain = [f(hf.asarray(x), hf.asarray(s), hf.asarray(t)) for s, t in cases]
    close(found, plain, "float64")


def test_a_side_that_is_not_taken_still_stops_the_program() -> None:
    def indexed(x: Any, k: Any, s: Any) -> Any:
        return hf.where(s, hf.exp(x[k]), x)

    def divided(x: Any, k: Any, s: Any) -> Any:
        return hf.where(s, hf.exp(x // k), x * 1.0)

    def checked(x: Any, k: Any, s: Any) -> Any:
        hf.check(hf.max(hf.exp(x)) < k[0], "it is too large")
        return hf.where(s, hf.exp(x) / hf.max(hf.exp(x)), x)

    x, no = np.arange(1000.0), np.asarray(False)
    with pytest.raises(IndexingError):
        hf.jit(indexed)(x, np.full(1000, 1000), no)
    with pytest.raises(ZeroDivisionError):
        hf.jit(divided)(np.arange(1000), np.zeros(1000, np.int64), no)
    with pytest.raises(CheckError):
        hf.jit(checked)(x, x, no)


def test_donated_arguments_are_updated_in_place() -> None:
    def f(x: Any, y: Any, s: Any) -> Any:
        first = hf.where(s, x * 0.5 + y, x)
        return first, hf.where(s, y / (hf.sqrt(first) + hf.exp(y)), y)

    run = hf.jit(f, donate=(0, 1))
    x = np.ones(1000)
    for s in (True, False):
        found = run(hf.asarray(x.copy()), hf.asarray(x.copy()), np.asarray(s))
        expected = hf.jit(f)(x, x, np.asarray(s))
        assert bits(found) == bits(expected)
    assert "    if " in run.loop_ir
    assert "else" not in run.loop_ir
    assert "copy" not in run.memory
