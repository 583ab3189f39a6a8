"""Operands of library routines: parts of arrays are read where they are, and what is no
dense part of an array is copied."""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

import hopflow as hf

pytestmark = pytest.mark.slow

RNG: Final = np.random.default_rng(0)
ROWS: Final = RNG.normal(size=(6, 40)).astype("f")
MATRICES: Final = np.array([m @ m.T + np.eye(9) for m in RNG.normal(size=(4, 9, 9))])


class Use(NamedTuple):
    """A function of a library and of an argument.

    operand   the operand of the routine in the compiled program, if it is not copied
    """

    function: Callable[[Any, Any], Any]
    x: Any
    operand: str = ""


USES: Final = {
    "row": Use(lambda np, x: np.sort(x[2]), ROWS, "in0[2]"),
    "columns": Use(lambda np, x: np.sort(x[:, 3:35]), ROWS, "in0[i, 3:35]"),
    "split rows": Use(lambda np, x: np.sort(np.reshape(x, (2, 3, 40))), ROWS, "in0[i]"),
    "repeated row": Use(
        lambda np, x: np.sort(np.broadcast_to(x[1], (3, 40))), ROWS, "in0[1]"
    ),
    "merged rows": Use(lambda np, x: np.sort(np.reshape(x, (3, 80))), ROWS),
    "transposed": Use(lambda np, x: np.sort(np.tile(x, (8, 1)).T), ROWS),
    "reversed": Use(lambda np, x: np.argsort(x[:, ::-1]), ROWS),
    "every other": Use(lambda np, x: np.sort(np.reshape(x, (3, 80))[:, ::2]), ROWS),
    "read twice": Use(lambda np, x: (np.sort(x[1:, 2:]), np.argsort(x[1:, 2:])), ROWS),
    "factor": Use(lambda np, x: np.linalg.cholesky(x[1]), MATRICES),
    "factors": Use(lambda np, x: np.linalg.cholesky(x[1:3]), MATRICES),
    "inverse": Use(lambda np, x: np.linalg.inv(x[1].T), MATRICES),
    "solve": Use(lambda np, x: np.linalg.solve(x[1], x[2, :, :3]), MATRICES),
    "reflectors": Use(
        lambda np, x: np.abs(np.linalg.qr(x[1:, 1:4, :])[1]),
        MATRICES,
        "in0[i + 1, 1:4]",
    ),
    "singular values": Use(lambda np, x: np.linalg.svd(x[0, 1:5].T)[1], MATRICES),
}


def results(value: Any) -> list[Any]:
    return [np.asarray(x) for x in (value if isinstance(value, tuple) else (value,))]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", USES)
def test_a_routine_takes_a_part_of_an_array(name: str, dynamic: bool) -> None:
    use = USES[name]
    jitted = hf.jit(lambda x: use.function(hf, x), dynamic=dynamic)
    before = use.x.copy()
    expected = results(use.function(jnp, jnp.asarray(use.x)))
    for found, other in zip(results(jitted(use.x)), expected, strict=True):
        np.testing.assert_allclose(found, other, rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(use.x, before)
    if not dynamic:
        calls = [s for s in jitted.loop_ir.splitlines() if "call " in s]
        names = [s.split("(", 1)[1] for s in calls]
        assert calls
        if use.operand:
            assert all(indexed(s).startswith(use.operand) for s in names), calls


def indexed(call: str) -> str:
    """Return a call in which the loops over its batch are all called i."""
    for k in range(20):
        call = call.replace(f"i{k} * 3 + i{k + 1}", "i").replace(f"i{k}", "i")
    return call


def test_a_batch_reads_its_parts_in_a_loop_of_a_loop() -> None:
    """The part is another one in each step, and the routine overwrites its own copy."""

    def steps(x: Any) -> Any:
        def step(total: Any, k: Any) -> Any:
            return total + hf.linalg.cholesky(x[k]), hf.sort(x[k, 1:, 2])

        return hf.scan(step, hf.zeros((9, 9), dtype="float64"), hf.arange(4))

    total, rows = hf.jit(steps)(MATRICES)
    np.testing.assert_allclose(total, np.linalg.cholesky(MATRICES).sum(0), 1e-10)
    np.testing.assert_array_equal(rows, np.sort(MATRICES[:, 1:, 2]))
