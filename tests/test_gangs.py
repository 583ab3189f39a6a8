"""Loops over examples as gangs: which, what they become, and that no bit changes."""

import dataclasses
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pytest

import hopflow as hf
from hopflow.compiler.cpu.target import CpuTarget, host
from hopflow.compiler.pipeline import Executable
from hopflow.errors import HopflowError
from hopflow.tensor import EagerTensor
from hopflow.testing.bindings import one_by_one

AVX2: Final = "+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+lzcnt,+popcnt,+sse4.2"


def target(name: str) -> CpuTarget:
    """The CPU we run on, or as if it had neither masks nor gathers."""
    if name == "host":
        return host()
    if not host().has("avx2"):
        pytest.skip("not an x86 CPU")
    return dataclasses.replace(host(), cpu="haswell", features=AVX2)


@pytest.fixture(params=["host", "avx2"])
def cpu(request: pytest.FixtureRequest) -> CpuTarget:
    return target(request.param)


def compare(
    f: Callable[..., Any], *args: Any, cpu: CpuTarget, gangs: bool = True
) -> str:
    """Run `f` as gangs and one by one, and compare all bits; the loops, as text."""
    tensors = [EagerTensor(np.asarray(x)) for x in args]
    graph = hf.trace(f, *tensors).graph
    scalar = Executable(graph, target=one_by_one(cpu))
    assert " gang " not in scalar.loop_ir
    executable = Executable(graph, target=cpu)
    assert (" gang " in executable.loop_ir) is gangs, executable.loop_ir
    results = []
    for one in (scalar, executable):
        try:
            results.append([t.array.tobytes() for t in one(tensors)])
        except HopflowError as error:
            results.append([type(error).__name__, str(error)])
    assert results[0] == results[1]
    return executable.loop_ir


FLOATS: Final = (np.float64, np.float32)
DTYPES: Final = (*FLOATS, np.float16, np.int64, np.int32, np.uint8)
COUNTS: Final = (1, 2, 7, 8, 31, 32, 33, 200)


def examples(n: int, dtype: Any, low: float = 0.0, high: float = 5.0) -> Any:
    return np.random.default_rng(n).uniform(low, high, n).astype(dtype)


# --- programs of one example ----------------------------------------------------------


def escape(c: Any) -> Any:
    def goes_on(k: Any, x: Any, y: Any) -> Any:
        return (k < 50) & (x * x + y * y < 4)

    def step(k: Any, x: Any, y: Any) -> Any:
        return k + 1, x * x - y * y + c - 2, 2 * x * y + c / 7

    return hf.while_loop(goes_on, step, (0, hf.zeros_like(c), hf.zeros_like(c)))


def halve(x: Any) -> Any:
    """How often, and what is left; the counter has another dtype than the value."""
    return hf.while_loop(
        lambda x, _: x > 1, lambda x, k: (x // 2, k + 1), (x, (x * 0).astype("int8"))
    )


def branches(x: Any) -> Any:
    """Sides that are dear, and sides that are not; a carry that one side sets."""

    def step(x: Any, y: Any, k: Any) -> Any:
        y = hf.cond(y > x, lambda: y - x / 3, lambda: hf.sin(y) + x)
        z = hf.where(k % 2 == 0, y, x)
        return (*hf.cond(x < 1, lambda: (x + z / 8, y), lambda: (x / 2, z + 1)), k + 1)

    return hf.while_loop(lambda x, _, k: (k < 9) & (x < 4), step, (x, x * 2, 0))


def counted(x: Any) -> Any:
    """A loop of as many steps as the example says, with one of few in it."""

    def step(i: Any, y: Any) -> Any:
        return hf.fori_loop(0, 3, lambda j, z: z * 0.5 + j, y + i)

    return hf.fori_loop(0, x.astype("int64"), step, x)


def nested(x: Any) -> Any:
    """A loop whose steps are loops, which begin anew for each example."""

    def inner(y: Any) -> Any:
        return hf.while_loop(lambda y, _: y < 10, lambda y, k: (y * 1.5 + 1, k + 1), y)

    def step(y: Any, k: Any, total: Any) -> Any:
        z, more = inner((y, 0))
        return z / 16, k + more, total + z

    return hf.while_loop(lambda y, k, _: (k < 40) & (y < 0.9), step, (x, 0, x * 0))


PROGRAMS: Final = (escape, branches, counted, nested)


@pytest.mark.parametrize("f", PROGRAMS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: d.__name__)
@pytest.mark.parametrize("n", COUNTS)
def test_gangs_give_the_bits_of_one_by_one(
    f: Any, dtype: Any, n: int, cpu: CpuTarget
) -> None:
    compare(hf.vmap(f), examples(n, dtype), cpu=cpu, gangs=n > 1)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: d.__name__)
def test_carries_of_all_dtypes(dtype: Any, cpu: CpuTarget) -> None:
    compare(hf.vmap(halve), examples(77, dtype, 0, 120), cpu=cpu)


# --- lanes that stop the program ------------------------------------------------------


@pytest.mark.parametrize("bad", [(5,), (5, 3), (31, 40), (70,), (9, 8, 0)])
def test_the_first_example_that_fails_stops_the_program(
    bad: tuple[int, ...], cpu: CpuTarget
) -> None:
    """Whichever lane fails first."""
    table = np.arange(1.0, 11.0)

    def one(x: Any, xs: Any) -> Any:
        def step(k: Any, total: Any) -> Any:
            return k + xs[k].astype("int64"), total * xs[k]

        return hf.while_loop(lambda k, _: k < x, step, (0, 1.0))[1]

    limits = examples(77, np.float64, 0, 7).astype(np.int64)
    for k, example in enumerate(bad):
        limits[example] = 40 + 20 * k
    text = compare(lambda x, t: hf.vmap(lambda x: one(x, t))(x), limits, table, cpu=cpu)
    assert "trap" in text


def test_integers_are_divided_in_lanes_that_are_on(cpu: CpuTarget) -> None:
    def one(x: Any, y: Any) -> Any:
        def step(x: Any, y: Any, k: Any) -> Any:
            return hf.cond(k % 3 == 2, lambda: x % y, lambda: x // y), y - 1, k + 1

        return hf.while_loop(lambda x, y, _: (x > 1) & (y > 0), step, (x, y, 0))

    xs, ys = np.arange(90) * 7, np.arange(90) % 5
    compare(hf.vmap(one), xs, ys, cpu=cpu)
    compare(hf.vmap(lambda x, y: one(x, y + 1)[0] // y), xs, ys, cpu=cpu)


def test_a_limit_of_steps_holds_for_each_example(cpu: CpuTarget) -> None:
    def one(n: Any) -> Any:
        step = lambda k, x: (k + 1, x * 0.5)  # noqa: E731
        return hf.while_loop(lambda k, _: k < n, step, (0, 1.0), max_steps=6)[1]

    compare(hf.vmap(one), np.arange(50) % 6, cpu=cpu)
    compare(hf.vmap(one), np.arange(50) % 9, cpu=cpu)


# --- derivatives ----------------------------------------------------------------------


def reverse(f: Any) -> Any:
    """The gradient for each example, through stacks that lanes have side by side."""
    return hf.grad(lambda x: hf.sum(hf.vmap(lambda x: f(x)[1])(x)))


def forward(f: Any) -> Any:
    return lambda x: hf.jvp(hf.vmap(lambda x: f(x)[1]), (x,), (x * 0 + 1,))


@pytest.mark.parametrize("f", [escape, branches, nested], ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", FLOATS, ids=lambda d: d.__name__)
@pytest.mark.parametrize("way", [forward, reverse])
def test_derivatives_have_the_bits_of_one_by_one(
    f: Any, dtype: Any, way: Any, cpu: CpuTarget
) -> None:
    text = compare(way(f), examples(45, dtype), cpu=cpu)
    if way is reverse and f is not nested:
        assert "again, which keeps its rows" in text
        assert "_left" in text
