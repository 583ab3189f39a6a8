"""Native code writes its outputs and nothing beside them."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import hopflow as hf
from hopflow.compiler.pipeline import Executable
from hopflow.dtypes import ALL, DType
from hopflow.testing.executions import run_debug

pytestmark = pytest.mark.slow

GUARD = 256
FILL = 0xAB

NARROWING: dict[str, Callable[[Any], Any]] = {
    "copy": hf.copy,
    "add": lambda x: x + x if x.dtype is not hf.bool else x | x,
    "compare": lambda x: x > x[::-1],
    "bytes": lambda x: hf.astype(x, hf.int8),
    "halves": lambda x: hf.astype(x, hf.bfloat16),
    "sum": lambda x: hf.sum(hf.astype(x, hf.int16), axis=0, dtype=hf.int16),
    "in-place": lambda x: hf.fori_loop(0, 2, lambda _, a: hf.roll(a, 1), x),
}


def guarded(array: np.ndarray[Any, Any]) -> tuple[Any, Any]:
    """A copy of the array within a larger block, and the block."""
    block = np.full(array.nbytes + 2 * GUARD, FILL, np.uint8)
    inner = block[GUARD : GUARD + array.nbytes].view(array.dtype).reshape(array.shape)
    inner[...] = array
    return inner, block


@pytest.mark.parametrize("dtype", ALL, ids=lambda d: d.name)
def test_nothing_is_written_beside_the_outputs(dtype: DType) -> None:
    for length in (5, 7, 8, 9, 15, 17, 33, 65, 70):
        x = (np.arange(3 * length).reshape(3, length) % 5).astype(dtype.dtype)
        for name, f in NARROWING.items():
            graph = hf.trace(f, hf.asarray(x)).graph
            compiled = Executable(graph)
            out = graph.out_types[0]
            value, block = guarded(np.zeros([int(n) for n in out.shape], out.dtype))
            compiled.kernel(x, value)
            beside = np.concatenate([block[:GUARD], block[-GUARD:]])
            assert (beside == FILL).all(), (name, length)
            expected = np.asarray(f(hf.asarray(x)))
            np.testing.assert_array_equal(value, expected, err_msg=f"{name} {length}")


@pytest.mark.parametrize("count", [0, 1, 3, 40])
def test_empty_parts_of_a_size_that_the_run_finds_are_not_read(count: int) -> None:
    # What is chosen at `x > 0` is asked for where nothing is chosen, too, and the
    # positions that it has then may be anything.
    def f(x: Any) -> Any:
        chosen = x[x > 0]
        ends = hf.concat([chosen, x]), hf.concat([x, chosen]), hf.pad(chosen, 2)
        return *ends, hf.concat([x[: hf.sum(x > 0).item()], x])

    jitted = hf.jit(f, dynamic=True)
    for sign in (1, -1):
        x = hf.asarray(np.full(count, sign, np.float32))
        for _ in range(20):
            for got, want in zip(jitted(x), f(x), strict=True):
                np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


@pytest.mark.usefixtures("verified")
def test_exchanged_carries_have_one_kind_of_memory() -> None:
    """In the last batch one size has two names: that of a symbol of the body, and the
    number that the loop around it has for its value."""

    def rows(x: Any) -> Any:
        def step(carry: Any, v: Any) -> Any:
            p, q = carry
            return (q, p * 0.5 + hf.mean(q)), v

        def final(row: Any) -> Any:
            return hf.scan(step, (row, row * 2), row)[0]

        return hf.map(final, x, batch_size=2)

    x = hf.asarray(np.arange(120.0).reshape(3, 40) % 7)
    program = hf.export(rows, (x,), dynamic_shapes=True)
    for found, expected in zip(program(x), run_debug(rows, x), strict=True):
        np.testing.assert_allclose(np.asarray(found), np.asarray(expected))
