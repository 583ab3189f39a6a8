"""What a number gives way to: results are weak just where those of JAX are."""

from collections.abc import Callable
from typing import Any, Final

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hopflow as hf
from hopflow import dtypes
from hopflow.testing.libraries import jax_library
from hopflow.testing.requires import load

pytestmark = pytest.mark.slow

load("jax>=0.11")

# (namespace, x, y) -> a result
BINARY: Final[dict[str, Callable[[Any, Any, Any], Any]]] = {
    "+": lambda _, x, y: x + y,
    "*": lambda _, x, y: x * y,
    "/": lambda m, x, y: m.divide(x, y),
    "maximum": lambda m, x, y: m.maximum(x, y),
    "where": lambda m, x, y: m.where(True, x, y),
    "clip": lambda m, x, y: m.clip(x, y, None),
    "clip to both": lambda m, x, y: m.clip(x, 0, y),
    "concat": lambda m, x, y: m.concat([m.reshape(x, (-1,)), m.reshape(x * y, (-1,))]),
}
# (namespace, x) -> a result
UNARY: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "sin": lambda m, x: m.sin(x),
    "square": lambda m, x: m.pow(x + 0, 2),  # JAX gives bools another dtype
    "root": lambda m, x: m.pow(x, 0.5),
    "astype": lambda m, x: m.astype(x, m.float32),
    "astype of its own": lambda m, x: m.astype(x, x.dtype),
    "sum": lambda m, x: m.sum(x),
    "max": lambda m, x: m.max(x),
    "mean": lambda m, x: m.mean(x),
    "prod": lambda m, x: m.prod(m.reshape(x, (1, -1)), axis=0),
    "cumulative_sum": lambda m, x: m.cumulative_sum(m.reshape(x, (-1,))),
}


@st.composite
def programs(draw: st.DrawFn) -> Callable[[Any], Any]:
    """A chain of calls, as a function of a namespace."""
    dtype = draw(st.sampled_from(dtypes.ALL)).name
    number = draw(st.sampled_from([2, 1.5]))
    first = draw(st.sampled_from(sorted(BINARY)))
    rest = draw(st.lists(st.sampled_from(sorted(BINARY | UNARY)), max_size=3))

    def program(space: Any) -> Any:
        tensor = space.asarray(1, dtype=dtype)
        result = BINARY[first](space, tensor, number)
        for name in rest:
            if name in UNARY:
                result = UNARY[name](space, result)
            else:
                result = BINARY[name](space, result, number)
        return result

    program.__qualname__ = f"{dtype} {number} {first} {rest}"
    return program


@given(programs())
def test_a_result_is_weak_where_that_of_jax_is(program: Callable[[Any], Any]) -> None:
    with jax.enable_x64(True):
        want = program(jnp).weak_type
    assert program(hf).type.weak == want
    assert hf.jit(lambda: program(hf))().type.weak == want


def test_a_number_of_steps_is_no_weak_number() -> None:
    def steps(scan: Callable[..., Any], xs: Any) -> Any:
        return scan(lambda c, x: (c + x, x), xs[0], xs, until=lambda c: c > 0)[2]

    assert not steps(hf.scan, hf.asarray([1, 2])).type.weak
    with jax.enable_x64(True):
        assert not steps(jax_library().scan, jnp.asarray([1, 2])).weak_type
