"""The extrema of columns and their positions, which are found in one pass."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import hopflow as hf
from hopflow import dtypes, pytree
from hopflow.compiler.kernel_passes import Context
from hopflow.compiler.kernel_passes.inline import inline
from hopflow.compiler.kernel_passes.positions import positions
from hopflow.compiler.kernel_program.definitions import Reduction
from hopflow.compiler.kernel_program.verifier import verify_kernels
from hopflow.compiler.pipeline import kernels_of
from hopflow.dtypes import DType
from hopflow.errors import ShapeError
from hopflow.testing.executions import in_turn

pytestmark = pytest.mark.slow

Array = np.ndarray[Any, np.dtype[Any]]
X = np.ones((40, 70), "float32")

POOLS = (
    (-0.0, 0.0),
    (-0.0,),
    (0.0, -0.0, -1.0, -2.0),
    (-0.0, 0.0, 1.0, 2.0),
    (np.nan, -np.inf, np.inf, 0.0, 1.0),
    (-np.inf,),
    (np.inf, -np.inf),
    (*range(1, 60),),
)
"""Numbers that columns are drawn from: of few numbers, many are equal."""


def both(x: Any) -> Any:
    """The extrema of columns and their positions."""
    largest, smallest = hf.max(x, axis=-2), hf.min(x, axis=-2)
    return largest, smallest, hf.argmax(x, axis=-2), hf.argmin(x, axis=-2)


def drawn(shape: tuple[int, ...], dtype: DType) -> list[Array]:
    """Arrays of a dtype, one for each pool."""
    rng = np.random.default_rng(0)
    if dtype.is_float:
        return [rng.choice(pool, shape).astype(dtype.dtype) for pool in POOLS]
    if dtype is dtypes.bool_:
        return [rng.choice(pool, shape) for pool in ((False, True), (False,), (True,))]
    low, high = dtypes.iinfo(dtype).min, dtypes.iinfo(dtype).max
    pools = (low, low + 1), (low,), (high,), (low, high), (*range(100),)
    return [rng.choice(np.array(pool, dtype.dtype), shape) for pool in pools]


def bits(x: Any) -> bytes:
    """The bits of an array, of which all NaNs are one."""
    array = np.asarray(x)
    return (
        np.where(array == array, array, array.dtype.type(0)).tobytes()
        + np.isnan(array.astype("float64")).tobytes()
    )


@pytest.mark.parametrize(
    ("dtype", "columns", "rows"),
    in_turn(dtypes.ALL, [4, 21, 32, 150], of=[1, 2, 3, 4, 5, 8, 21, 33, 42]),
    ids=str,
)
def test_positions_in_columns_are_those_of_numpy(
    dtype: DType, columns: int, rows: int
) -> None:
    run = hf.jit(both)
    alone = hf.jit(lambda x: (hf.max(x, axis=-2), hf.min(x, axis=-2)))
    unkept = hf.jit(lambda x: (hf.argmax(x, axis=-2), hf.argmin(x, axis=-2)))
    shape = (rows, columns) if rows % 2 else (2, rows, columns)
    for x in drawn(shape, dtype):
        # NumPy has no bfloat16; float64 holds what it does.
        wide = x.astype("float64") if dtype.is_float else x
        wanted = wide.argmax(-2), wide.argmin(-2)
        *extrema, first, last = run(x)
        np.testing.assert_array_equal((first, last), wanted)
        np.testing.assert_array_equal(unkept(x), wanted)
        assert [*map(bits, extrema)] == [*map(bits, alone(x))]


@pytest.mark.parametrize("dtype", [dtypes.float32, dtypes.int8], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 6, 50])
def test_positions_in_columns_of_any_length_are_those_of_numpy(
    dtype: DType, rows: int
) -> None:
    run = hf.jit(both, dynamic=True)
    for x in (x for n in (1, 3, 4, 9, 100) for x in drawn((rows, n), dtype)):
        found = run(x)
        np.testing.assert_array_equal(found[2], x.argmax(0))
        np.testing.assert_array_equal(found[3], x.argmin(0))


def test_positions_in_columns_of_no_rows_are_refused() -> None:
    with pytest.raises(ShapeError, match="argmax: axis 0"):
        hf.jit(lambda x: hf.argmax(x, axis=0))(X[:0])


@pytest.mark.parametrize(
    "batched", [hf.vmap(both), lambda x: hf.map(both, x)], ids=["vmap", "map"]
)
def test_positions_in_batches_are_those_of_each_example(
    batched: Callable[[Any], Any],
) -> None:
    x = np.random.default_rng(0).integers(0, 9, (5, 12, 20))
    found = hf.jit(batched)(x)
    for k, example in enumerate(x):
        wanted = both(example)
        for a, b in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(a[k], b)


# --- how many passes there are --------------------------------------------------------


def reductions(f: Callable[..., Any], *args: Any) -> list[list[str]]:
    """The dtypes of the results of each reduction of a function."""
    program = kernels_of(hf.trace(f, *args).graph)
    for run in (inline, positions):
        run(program, Context())
        verify_kernels(program)
    equations = [
        q for q in program.block.equations if isinstance(q.definition, Reduction)
    ]
    return [[str(value.dtype) for value in q.results] for q in equations]


def test_the_positions_in_columns_take_one_pass() -> None:
    assert reductions(lambda x: hf.argmax(x, axis=0), X) == [["i64"]]
    assert reductions(lambda x: hf.argmin(x[:, ::-1] + 1, axis=0), X) == [["i64"]]
    assert reductions(lambda x: hf.argmax(x, axis=1), X[None]) == [["i64"]]
    half = X.astype("float16")
    assert reductions(lambda x: hf.argmax(x + x, axis=0), half) == [["i64"]]


def test_the_extrema_are_results_of_the_pass_if_something_reads_them() -> None:
    found = reductions(lambda x: (hf.argmax(x, axis=0), hf.max(x, axis=0)), X)
    assert found == [["f32", "i64"]]
    found = reductions(lambda x: hf.argmin(x, axis=0) + hf.min(x, axis=0), X)
    assert found == [["f32", "i64"]]


@pytest.mark.parametrize(
    "f",
    [
        lambda x: hf.argmax(x, axis=1),
        lambda x: hf.argmax(x.T, axis=0),
        lambda x: hf.argmax(x[:, :3], axis=0),
        lambda x: hf.argmax(x > 0, axis=0),
        lambda x: hf.argmax(x),
    ],
    ids=["rows", "transposed", "few columns", "bools", "flat"],
)
def test_other_positions_take_two_passes(f: Callable[[Any], Any]) -> None:
    assert len(reductions(f, X)) == 2


def test_positions_of_other_extrema_take_passes_of_their_own() -> None:
    found = reductions(lambda x, y: (hf.argmax(x, axis=0), hf.max(y, axis=0)), X, X)
    assert found == [["i64"], ["f32"]]
    found = reductions(lambda x: (hf.argmax(x, axis=0), hf.argmin(x, axis=0)), X)
    assert found == [["i64"], ["i64"]]


@pytest.mark.parametrize("columns", [32, 1000])
def test_a_loop_of_vectors_holds_the_best_and_their_positions(columns: int) -> None:
    x = np.ones((40, columns), "float32")
    run = hf.jit(lambda x: hf.argmax(x, axis=0))
    run(x)
    lines = [line.strip() for line in run.loop_ir.splitlines()]
    # Four rows are read in each of ten steps, and nowhere else.
    assert len([line for line in lines if "in0[" in line]) == 4
    [loop] = [line for line in lines if line.startswith("for ") and "in 0..10:" in line]
    around = lines[: lines.index(loop)][-3:] if columns == 32 else lines
    assert any("gang" in line or "vector" in line for line in around), run.loop_ir


def test_a_step_of_a_loop_finds_the_best_and_their_positions_in_one_pass() -> None:
    """As Viterbi's algorithm does."""

    def likeliest(scores: Any, moves: Any) -> Any:
        def forward(best: Any, score: Any) -> Any:
            total = best[:, None] + moves
            return hf.max(total, axis=0) + score, hf.argmax(total, axis=0)

        return hf.scan(forward, scores[0], scores[1:])

    rng = np.random.default_rng(0)
    scores = rng.integers(0, 4, (20, 32)).astype("float32")
    moves = rng.integers(0, 4, (32, 32)).astype("float32")
    run = hf.jit(likeliest)
    found, wanted = (
        run(scores, moves),
        hf.jit(likeliest, backend="interpreter")(scores, moves),
    )
    for a, b in zip(pytree.flatten(found)[0], pytree.flatten(wanted)[0], strict=True):
        np.testing.assert_array_equal(a, b)
    lines = [line for line in run.loop_ir.splitlines() if " + in1[" in line]
    assert len(lines) == 4, run.loop_ir


@pytest.mark.parametrize("dynamic", [False, True])
def test_rows_that_are_flattened_are_stored_before_others_read_them(
    dynamic: bool,
) -> None:
    """A butterfly reads at quotients and remainders what the one before has made of two
    pieces: nothing selects between these for each element."""

    def f(x: Any) -> Any:
        for size in (8, 16, 32):
            y = hf.reshape(x, (-1, 2, size))
            both = hf.stack([y[:, 0] + y[:, 1], y[:, 0] - y[:, 1]], axis=1)
            x = hf.reshape(both, (-1,))
        return x

    x = np.random.default_rng(0).normal(size=256)
    jitted = hf.jit(f, dynamic=dynamic)
    found = np.asarray(jitted(x))
    with hf.debug():
        np.testing.assert_array_equal(found, np.asarray(f(hf.asarray(x))))
    if not dynamic:
        assert re.findall(r"f64(\[.*\]) in arena", jitted.loop_ir) == [
            "[16, 2, 8]",
            "[8, 2, 16]",
        ]
