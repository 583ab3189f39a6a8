"""Programs whose bodies make sizes: they mean the same compiled as in plain Python."""

from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given

import hopflow
from hopflow.testing.executions import agree, run_debug, run_symbolic_native

pytestmark = pytest.mark.slow

hf: Any = hopflow
Step = Callable[[Any, Any], Any]

STEPS: dict[str, Step] = {
    "first": lambda y, _: y[:3],
    "rest": lambda y, _: y[1:],
    "last": lambda y, _: y[-2:],
    "every other": lambda y, _: y[::2],
    "large": lambda y, _: y[y > 2],
    "with all": lambda y, x: hf.concat([y, x]),
    "twice": lambda y, _: hf.concat([y, y]),
    "more": lambda y, _: y + y.shape[0],
    "distinct": lambda y, _: hf.unique_values(y),
    "one": lambda y, _: hf.sum(y, keepdims=True),
    "reversed": lambda y, _: y[::-1],
}
names = st.lists(st.sampled_from(sorted(STEPS)), max_size=3)


def composed(chosen: list[str], x: Any) -> Callable[[Any], Any]:
    def run(y: Any) -> Any:
        for name in chosen:
            y = STEPS[name](y, x)
        return y

    return run


def branch(then: list[str], other: list[str], x: Any, y: Any) -> Any:
    return hf.cond(hf.sum(y) > 3, composed(then, x), composed(other, x), (y,))


def loop(body: list[str], x: Any, y: Any) -> Any:
    step = composed(body, x)
    found = hf.while_loop(
        lambda i, y: (i < 3) & (y.shape[0] < 40),
        lambda i, y: (i + 1, step(y)),
        (0, y),
        dynamic_carry={"y": {0: True}},
    )
    return found[1]


def called(body: list[str], x: Any, y: Any) -> Any:
    return hf.invoke_subgraph(composed(body, x), y)


parts = st.one_of(
    st.tuples(st.just(branch), names, names),
    st.tuples(st.just(loop), names),
    st.tuples(st.just(called), names),
)


@given(
    program=st.lists(parts, min_size=1, max_size=3),
    sizes=st.lists(st.integers(0, 6), min_size=1, max_size=3),
)
def test_sizes_that_bodies_make(program: list[Any], sizes: list[int]) -> None:
    def f(x: Any) -> Any:
        y = x
        for part, *bodies in program:
            y = part(*bodies, x, y)
        return y, y.shape[0], hf.map(lambda v: v + hf.sum(y), y)

    jitted = hf.jit(f, dynamic=True)
    for n in sizes:
        x = hf.arange(float(n))
        expected = run_debug(f, x)
        agree(jitted(x), expected)
        agree(run_symbolic_native(f, x), expected)
