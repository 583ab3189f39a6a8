"""Loops that scatter, in parts: each thread has an array of its own."""

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import hopflow as hf
from hopflow.compiler.schedule import threads as binding

pytestmark = pytest.mark.slow

N = 9_000
BINS = 60
KEYS = np.random.default_rng(0).integers(-BINS, BINS, N)
NUMBERS = np.random.default_rng(1).integers(-100, 100, N)
DTYPES = ("bool", "int8", "uint8", "int16", "uint32", "int32", "int64", "uint64")
WAYS = {"add": np.add, "min": np.minimum, "max": np.maximum, "mul": np.multiply}


@pytest.fixture(autouse=True)
def short_loops_have_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(binding, "LARGE", 1 << 10)
    monkeypatch.setattr(binding, "LARGE_IN_STEP", 1 << 10)
    monkeypatch.setattr(binding, "ELEMENTS", N)
    before = hf.config.num_threads
    yield
    hf.config.num_threads = before


def scattered(way: str, dtype: str) -> tuple[Any, Any]:
    """Return a program, and what NumPy makes of its arguments."""

    def program(x: Any, keys: Any, numbers: Any) -> Any:
        return getattr(x.at[keys], way)(numbers)

    def expected(x: Any, keys: Any, numbers: Any) -> Any:
        result = x.copy()
        WAYS[way].at(result, keys, numbers)
        return result

    return program, expected


def args(dtype: str, n: int = N) -> tuple[Any, Any, Any]:
    return np.arange(BINS).astype(dtype), KEYS[:n], NUMBERS[:n].astype(dtype)


def compiled(f: Any, *args: Any, **options: Any) -> tuple[Any, str]:
    """Return the result, the same for one thread and several, and the loops."""
    jitted, results = hf.jit(f, **options), []
    for count in (1, 2, 5):
        hf.config.num_threads = count
        results.append(np.asarray(jitted(*args)))
    for result in results[1:]:
        np.testing.assert_array_equal(results[0], result)
    return results[0], jitted.loop_ir


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", WAYS)
def test_any_number_of_threads_makes_the_same(
    way: str, dtype: str, dynamic: bool
) -> None:
    program, expected = scattered(way, dtype)
    got, loops = compiled(program, *args(dtype), dynamic=dynamic)
    np.testing.assert_array_equal(got, expected(*args(dtype)))
    assert "_clear0 in " in loops


def test_a_program_of_all_sizes_chooses_between_parts_and_one_loop() -> None:
    program, expected = scattered("add", "int32")
    jitted = hf.jit(program, dynamic=True)
    for n in (N, 0, 1, 37, 500, N // 2 + 1):
        got = np.asarray(jitted(*args("int32", n)))
        np.testing.assert_array_equal(got, expected(*args("int32", n)))
    assert "_whole in 0.." in jitted.loop_ir


@pytest.mark.parametrize(("shape", "dynamic"), [((), False), ((), True), ((3,), False)])
def test_sums_by_segment_leave_out_what_is_in_none(
    shape: tuple[int, ...], dynamic: bool
) -> None:
    keys = KEYS * 2  # some are too small, and some too large
    rows = np.resize(NUMBERS, (N, *shape))
    is_in = (keys >= 0) & (keys < BINS)
    expected = np.zeros((BINS, *shape), dtype=np.int64)
    np.add.at(expected, keys[is_in], rows[is_in])
    total = lambda keys, rows: hf.segment_sum(rows, keys, BINS)  # noqa: E731
    got, loops = compiled(total, keys, rows, dynamic=dynamic)
    np.testing.assert_array_equal(got, expected)
    assert "_clear0 in " in loops


def test_steps_of_a_loop_scatter_in_parts() -> None:
    def program(x: Any, keys: Any) -> Any:
        return hf.fori_loop(0, 3, lambda i, x: x.at[keys].max(x[keys[::-1]] + i), x)

    expected = np.arange(BINS)
    for i in range(3):
        before = expected.copy()
        np.maximum.at(expected, KEYS, before[KEYS[::-1]] + i)
    got, loops = compiled(program, np.arange(BINS), KEYS)
    np.testing.assert_array_equal(got, expected)
    assert "_clear0 in " in loops


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize("way", WAYS)
def test_floats_stay_in_order(way: str, dtype: str) -> None:
    """Sums round, and a minimum of zeros and NaNs depends on which comes first."""
    _, loops = compiled(scattered(way, "float64")[0], *map(hf.asarray, args("int64")))
    assert "_clear0 in " in loops
    x, keys, numbers = args("float64")
    floats = hf.asarray(x, dtype=dtype), keys, hf.asarray(numbers, dtype=dtype)
    jitted = hf.jit(scattered(way, dtype)[0])
    jitted(*floats)
    assert "_clear0 in " not in jitted.loop_ir


@pytest.mark.parametrize(
    "update",
    [
        lambda x, k: x.at[k].add(x[k // 2] % 7),
        lambda x, k: x.at[k].set(x[k] + x[k] * 3),
        lambda x, k: x.at[k].set(x[k] + x[k]),
    ],
)
def test_what_reads_its_own_result_stays_in_order(update: Any) -> None:
    def program(x: Any, keys: Any) -> Any:
        return hf.fori_loop(0, keys.shape[0], lambda i, x: update(x, keys[i]), x)

    args = np.arange(BINS), KEYS[:1000] % BINS
    with hf.debug():
        expected = program(*map(hf.asarray, args))
    got, loops = compiled(program, *args)
    np.testing.assert_array_equal(got, expected)
    assert "_clear0 in " not in loops


def test_an_array_as_large_as_the_loop_is_not_copied() -> None:
    program, _ = scattered("add", "int64")
    _, *rest = args("int64")
    _, loops = compiled(program, np.zeros(N, dtype=np.int64), *rest)
    assert "_clear0 in " not in loops


@pytest.mark.parametrize(("n", "is_long"), [(N, "false"), (100 * N, "true")])
def test_long_parts_have_threads_from_the_beginning(n: int, is_long: str) -> None:
    count = lambda x, keys: x.at[keys].add(1)  # noqa: E731
    jitted = hf.jit(count)
    jitted(np.zeros(BINS, dtype=np.int32), np.resize(KEYS, n))
    calls = re.findall(r"call i64 @hf_parallel\(.*, i1 (.*)\)", jitted.llvm_ir)
    assert calls[-1] == is_long
