"""Loops with more small carries than there are registers: others are in memory."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import hopflow as hf
from hopflow.compiler.schedule.carries import MOST_VARIABLES
from hopflow.testing.executions import NAMES, RUNNERS, agree

pytestmark = pytest.mark.slow

COUNT = MOST_VARIABLES + 20

Carry = list[Any]


def mixed() -> Carry:
    """Scalars and small vectors of several dtypes, some of no elements; an array."""
    kinds = [
        np.float64(0.5),
        np.int32(3),
        np.array([1.0, -2.0]),
        np.float32(1.5),
        np.array([[1, 2], [3, 4]]),
        np.zeros((0, 2)),
        np.array(True),
    ]
    small = [kinds[k % len(kinds)] for k in range(56)]  # of 80 elements
    return [hf.asarray(x) for x in (*small, np.arange(6.0))]


TYPES = [(x.dtype, x.shape) for x in mixed()]
NEXT = [
    next(j for j in (*range(k + 1, len(TYPES)), *range(len(TYPES))) if TYPES[j] == t)
    for k, t in enumerate(TYPES)
]


def rotated(xs: Carry) -> Carry:
    """Each is the next one of its type, and changed: what is new is of what is old."""
    return [
        xs[k] if xs[k].dtype == hf.bool else xs[k] + hf.astype(k % 3, xs[k].dtype)
        for k in NEXT
    ]


def fori(xs: Carry, trips: int) -> Any:
    return hf.fori_loop(0, trips, lambda _, xs: rotated(xs), xs)


def by_while(xs: Carry, trips: int) -> Any:
    def test(n: Any, xs: Carry) -> Any:
        return (n < trips) & (hf.sum(xs[-3]) < 1e9)

    return hf.while_loop(test, lambda n, xs: (n + 1, rotated(xs)), (0, xs))[1]


def scan(xs: Carry, trips: int) -> Any:
    def step(xs: Carry, row: Any) -> Any:
        return rotated(xs), xs[-1] + row

    return hf.scan(step, xs, np.arange(float(trips)))


def nested(xs: Carry, trips: int) -> Any:
    return hf.fori_loop(0, trips, lambda _, xs: fori(xs, 2), xs)


def branched(xs: Carry, trips: int) -> Any:
    def body(i: Any, xs: Carry) -> Any:
        return hf.cond(i % 2 == 0, rotated, lambda xs: xs, (xs,))

    return hf.fori_loop(0, trips, body, xs)


@pytest.mark.parametrize("trips", [0, 3])
@pytest.mark.parametrize("loop", [fori, by_while, scan, nested, branched])
@pytest.mark.parametrize("run", RUNNERS[3:], ids=NAMES[3:])
def test_a_loop_computes_what_python_does(
    run: Any, loop: Callable[..., Any], trips: int
) -> None:
    with hf.debug():
        want = loop(mixed(), trips)
    agree(run(lambda xs: loop(xs, trips), mixed()), want)


def coupled(x: Any) -> Any:
    """A sum over a loop of many scalars, each of which the next one reads."""
    xs = [x * k for k in range(COUNT)]

    def body(_: Any, xs: Carry) -> Carry:
        return [hf.sin(a) + 0.5 * b for a, b in zip(xs, xs[1:] + xs[:1], strict=True)]

    found = hf.scan(lambda xs, i: (body(i, xs), None), xs, None, length=3)[0]
    return sum(found[1:], found[0])


@pytest.mark.parametrize(
    "transform",
    [
        hf.grad,
        lambda f: lambda x: hf.jvp(f, (x,), (1.0,))[1],
        lambda f: lambda x: hf.vmap(f)(x * hf.arange(5.0)),
        lambda f: lambda x: hf.vmap(hf.grad(f))(x * hf.arange(5.0)),
    ],
    ids=["grad", "jvp", "vmap", "vmap of grad"],
)
def test_a_loop_has_every_transform(transform: Callable[..., Any]) -> None:
    f = transform(coupled)
    with hf.debug():
        want = f(0.3)
    agree(hf.jit(f)(0.3), want, rtol=1e-9)


def test_few_carries_are_variables_and_the_others_share_memory() -> None:
    def f(xs: Carry) -> Any:
        return hf.fori_loop(0, 9, lambda _, xs: [*xs[1:], xs[0] + 1], xs)

    def memory(count: int) -> list[str]:
        jitted = hf.jit(f)
        jitted([hf.asarray(float(k)) for k in range(count)])
        lines = str(jitted.loop_ir).splitlines()
        return [line for line in lines if "in arena" in line]

    assert not memory(MOST_VARIABLES - 1)
    assert len(memory(COUNT)) == 2  # of this step, and of the next one
