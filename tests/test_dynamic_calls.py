"""Calls at many sizes, in all the ways in which a jitted function can be called."""

import math
import threading
from typing import Any

import numpy as np
import pytest

import hopflow as hf
from hopflow.errors import CheckError, InvalidTensorError


@pytest.mark.parametrize("first", [1, True, 1.0, -0.0, math.nan, math.inf])
def test_numbers_that_are_alike_are_told_apart(first: Any) -> None:
    g = hf.jit(lambda x, a: (x + a, a, a == a, x if a < 1 else -x))
    for a in (first, 1, True, 1.0, False, 0, 0.0, -0.0, math.nan, -math.inf, first):
        y, same, equal, chosen = g(hf.ones(1), a)
        assert (type(same), repr(same)) == (type(a), repr(a))
        assert equal is (a == a)
        assert chosen.tolist() == [1.0 if a < 1 else -1.0]
        np.testing.assert_array_equal(np.asarray(y), np.ones(1, np.float32) + a)


def test_sizes_that_become_equal() -> None:
    g = hf.jit(lambda x, y: (hf.sum(x) + hf.sum(y), x.shape == y.shape))
    for n, m in ((0, 3), (4, 5), (4, 4), (6, 6), (1, 7), (0, 0)):
        total, same = g(hf.ones(n), hf.ones(m))
        assert (total.item(), same) == (n + m, n == m)


def test_arguments_that_share_memory_at_many_sizes() -> None:
    def f(x: Any, y: Any) -> Any:
        x += 1
        return hf.sum(y)

    g = hf.jit(f)
    for n in (4, 5, 6, 0, 1, 5):
        x, y = hf.ones(n + 1), hf.ones(n + 1)
        assert g(x, x).item() == f(y, y).item()
        assert g(x[1:], x[:-1]).item() == f(y[1:], y[:-1]).item()
        assert g(x, hf.ones(n)).item() == n
        y += 1
        assert x.tolist() == y.tolist()


def test_donated_arguments_at_many_sizes() -> None:
    g = hf.jit(lambda x, y: x + y, donate=(0,))
    for n in (3, 4, 5, 1, 3):
        x = hf.ones(n)
        assert g(x, hf.ones(n)).tolist() == [2.0] * n
        with pytest.raises(InvalidTensorError):
            x + 1


def test_a_jitted_function_within_another_takes_its_symbols() -> None:
    inner = hf.jit(lambda x, n, a: (x[:n] * a, n + 1, a * 2, x.shape[0]))

    def f(x: Any, n: int, a: float) -> Any:
        y, m, b, size = inner(x, n, a)
        return hf.sum(y) + m, b, size, m

    g = hf.jit(f)
    for size, n, a in (
        (4, 2, 0.5),
        (5, 3, 1.5),
        (6, 7, -1.0),
        (1, 0, 2.0),
        (0, 1, 1.0),
    ):
        got, want = g(hf.ones(size), n, a), f(hf.ones(size), n, a)
        assert got[0].item() == want[0].item()
        assert got[1:] == want[1:]
        assert [type(v) for v in got[1:]] == [float, int, int]


def test_a_trace_that_fails_leaves_nothing_behind() -> None:
    fails = True

    def f(x: Any, n: int) -> Any:
        y = x * n
        if n > 2 and fails:
            raise KeyError(n)
        return y

    g = hf.jit(f)
    for _ in range(2):
        with pytest.raises(KeyError):
            g(hf.ones(2), 3)
    fails = False
    assert g(hf.ones(2), 3).tolist() == [3, 3]
    assert g(hf.ones(3), 1).tolist() == [1, 1, 1]


def test_threads_that_call_one_function_at_many_sizes() -> None:
    g = hf.jit(lambda x, n: hf.sum(x * n) if x.shape[0] % 2 else hf.sum(x) + n)
    wrong: list[Any] = []

    def call(k: int) -> None:
        for i in range(40):
            size, n = (i * 7 + k * 3) % 23, (i + k) % 5
            want = size * n if size % 2 else size + n
            if g(hf.ones(size), n).item() != want:
                wrong.append((size, n))

    threads = [threading.Thread(target=call, args=(k,)) for k in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    [family] = g._families.values()
    assert len(family.all()) <= 3  # a static one, and one for each answer of the branch


@pytest.mark.parametrize("dynamic", [True, None])
def test_a_check_of_sizes_is_made_by_each_run(dynamic: Any) -> None:
    def f(x: Any, y: Any) -> Any:
        hf.check(x.shape[0] == y.shape[0], "they differ")
        hf.check(y.shape[1] == 1, "no column")
        return x + hf.sum(x[:, None] * y)

    jitted = hf.jit(f, dynamic=dynamic)

    def call(n: int, *shape: int) -> Any:
        return jitted(hf.ones(n), hf.ones(shape)).tolist()

    for _ in range(2):
        assert call(2, 2, 1) == [3.0] * 2
        assert call(3, 3, 1) == [4.0] * 3
        with pytest.raises(CheckError, match="they differ"):
            call(2, 3, 1)
        with pytest.raises(CheckError, match="no column"):
            call(3, 3, 4)
