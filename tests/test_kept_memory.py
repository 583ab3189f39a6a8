"""Memory of large arrays is kept for the next ones, and only when nothing uses it."""

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import hopflow as hf
from hopflow.tensor import aligned
from hopflow.tensor.aligned import LEAST, LEAST_KEPT, LINE, aligned_empty

FLOAT = np.dtype("float64")
COUNT = LEAST_KEPT // 4  # elements of an array that is kept


@pytest.fixture(autouse=True)
def empty() -> Iterator[None]:
    aligned._kept.clear()
    yield
    aligned._kept.clear()


def address(array: Any) -> int:
    return int(np.asarray(array).__array_interface__["data"][0])


def kept_bytes() -> int:
    return sum(size * len(parts) for size, parts in aligned._kept.items())


@pytest.mark.parametrize("shape", [(COUNT,), (COUNT // 8, 8), (1, COUNT + 5, 1)])
@pytest.mark.parametrize("dtype", ["float64", "int32", "bool", "complex128"])
def test_freed_memory_is_that_of_the_next_array(
    shape: tuple[int, ...], dtype: str
) -> None:
    shape = (*shape, 8)  # bytes of a bool, too
    first = aligned_empty(shape, np.dtype(dtype))
    assert (first.shape, first.dtype) == (shape, np.dtype(dtype))
    assert first.flags.c_contiguous
    assert first.flags.writeable
    place = address(first)
    assert place % LINE == 0
    first[...] = 1
    del first
    assert address(aligned_empty(shape, np.dtype(dtype))) == place


@pytest.mark.parametrize("size", [LEAST - 8, LEAST, 5000, LEAST_KEPT - 8])
def test_arrays_whose_memory_is_not_kept_are_aligned_too(size: int) -> None:
    arrays = [aligned_empty((size // 8,), FLOAT) for _ in range(9)]
    for k, array in enumerate(arrays):
        array[...] = k
    assert all((array == k).all() for k, array in enumerate(arrays))
    assert not any(address(array) % LINE for array in arrays if size >= LEAST)
    assert kept_bytes() == 0


def test_memory_is_not_kept_while_a_view_is_there() -> None:
    first = aligned_empty((COUNT,), FLOAT)
    first[...] = 5.0
    view, place = first[7:][::2], address(first)
    del first
    second = aligned_empty((COUNT,), FLOAT)
    second[...] = 6.0
    assert address(second) != place
    assert (view == 5.0).all()
    del view
    assert address(aligned_empty((COUNT,), FLOAT)) == place


@pytest.mark.parametrize(
    "of", [np.asarray, np.from_dlpack, lambda x: memoryview(np.asarray(x))]
)
def test_results_that_others_look_at_stay_as_they_are(of: Any) -> None:
    run = hf.jit(lambda x: x + 1.0)
    x = hf.asarray(np.zeros(COUNT))
    seen = of(run(x))
    for _ in range(5):
        run(x + 7.0)
    np.testing.assert_array_equal(np.asarray(seen), np.ones(COUNT))


def test_results_take_the_memory_of_earlier_ones() -> None:
    run = hf.jit(lambda x: (x + 1.0, x * 2.0))
    x = hf.asarray(np.zeros(COUNT))
    places = [sorted(map(address, run(x))) for _ in range(4)]
    assert places == places[:1] * 4


def test_a_donated_result_is_written_in_place() -> None:
    run = hf.jit(lambda x: x + 1.0, donate=(0,))
    x = hf.asarray(np.zeros(COUNT)) + 1.0
    place = address(x)
    x = run(x)
    assert address(x) == place
    np.testing.assert_array_equal(np.asarray(x), np.full(COUNT, 2.0))


def test_no_more_than_a_bound_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aligned, "MOST_KEPT", 5 * LEAST_KEPT)
    arrays = [aligned_empty((LEAST_KEPT // 8 + 9000 * k,), FLOAT) for k in range(12)]
    while arrays:
        arrays.pop()
        assert kept_bytes() <= 5 * LEAST_KEPT
    aligned_empty((LEAST_KEPT,), FLOAT)  # it is larger than the bound itself
    assert kept_bytes() <= 5 * LEAST_KEPT


@pytest.mark.parametrize("count", [LEAST_KEPT // 8 - 1, 1000, 3, 0])
def test_small_arrays_are_not_kept(count: int) -> None:
    aligned_empty((count,), FLOAT)
    assert kept_bytes() == 0


def test_arrays_may_be_freed_in_other_threads() -> None:
    wrong: list[int] = []

    def work(k: int) -> None:
        for n in range(60):
            mine = [aligned_empty((COUNT + 100 * (n % 3),), FLOAT) for _ in range(3)]
            for m, array in enumerate(mine):
                array[...] = 10 * k + m
            wrong.extend(
                m for m, array in enumerate(mine) if not (array == 10 * k + m).all()
            )

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_memory_error_names_the_shape() -> None:
    with pytest.raises(MemoryError, match=r"35184372088832, 1024.*float64"):
        aligned_empty((2**45, 2**10), FLOAT)


def test_without_memory_what_is_kept_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    aligned_empty((COUNT,), FLOAT)
    assert kept_bytes() > 0
    right, calls = np.empty, []

    def scarce(*args: Any) -> Any:
        calls.append(kept_bytes())
        if len(calls) == 1:
            raise MemoryError
        return right(*args)

    monkeypatch.setattr(np, "empty", scarce)
    assert aligned_empty((3 * COUNT,), FLOAT).shape == (3 * COUNT,)
    assert calls[0] > 0
    assert calls[1] == 0
