"""`control_flow`: each of Python's statements does what it did, also where a condition
around it, or within, depends on a tensor."""

import contextlib
from typing import Any

import numpy as np
import pytest

import hopflow
from hopflow import control_flow
from hopflow.testing.executions import NAMES, RUNNERS

hf: Any = hopflow


def breaks_in_try(n: Any) -> Any:
    total = 0
    for i in range(n):
        try:
            if i > 3:
                break
            total += i
        finally:
            total += 100
    return total


def returns_in_try(n: Any) -> Any:
    for i in range(n):
        try:
            if i * i > 7:
                return i
        except ValueError:
            return -1
    return n * 2


def continues_in_try(n: Any) -> Any:
    total = 0
    k = 0
    while k < n:
        k += 1
        try:
            if k % 2 == 0:
                continue
            total += k
        except ValueError:
            total = -1
        else:
            total += 10
        finally:
            total += 1000
    return total


def returns_in_with(n: Any) -> Any:
    if n > 2:
        with contextlib.nullcontext():
            if n > 4:
                return n * 3
            n = n + 1
    return n


def breaks_in_nested_with(n: Any) -> Any:
    total = 0
    for i in range(n):
        with contextlib.nullcontext(), contextlib.nullcontext():
            for j in range(i):
                if j * i > 5:
                    break
                total += j
            else:
                total += 50
                continue
            total += 7
    return total


def returns_from_loops_in_with(n: Any) -> Any:
    with contextlib.nullcontext():
        for i in range(n):
            with contextlib.nullcontext():
                while True:
                    if i > 2:
                        return i + 100
                    break
    return -n


def leaves_by_finally(n: Any) -> Any:
    total = 0
    for i in range(n):
        try:
            total += i
            if i == 2:
                return total
        finally:
            if i == 2:
                continue  # noqa: B012
        total += 10
    return total + 1000


def matches(n: Any) -> Any:
    match n:
        case 0:
            return 5
        case 1 | 2:
            k = 7
        case m if m > 5:
            k = m * 2
        case _:
            k = n + 100
    return k + 1


def matches_in_loop(n: Any) -> Any:
    total = 0
    for i in range(n):
        match i % 3:
            case 0:
                continue
            case 1 if i > 5:
                break
            case rest:
                total += rest * 10 + i
    return total


def walrus(n: Any) -> Any:
    total = 0
    while (k := n - total) > 2:
        total += 1
        if (double := k * 2) > 6:
            total += double % 2
    return total + k


def shared_by_closures(n: Any) -> Any:
    k = 0

    def get() -> Any:
        return k

    while get() < n:
        k = k + 2
    return get() * 10 + k


def changed_by_closures(n: Any) -> Any:
    k = 0

    def count(by: Any) -> Any:
        nonlocal k
        if by > 1:
            k = k + by
        elif by > -5:
            k = k + 10
        return k

    for i in range(n):
        if i % 2 == 0:
            count(i)
    while count(1) < 40:
        n = n + 1
    return k + n


def defaults(n: Any) -> Any:
    scale = 2 if n > 3 else 3

    def inner(x: Any, by: Any = scale if n > 1 else 0) -> Any:
        return x * by

    other: Any = lambda x, by=scale: x + by if x > 2 else x - by  # noqa: E731
    return inner(n) + other(n)


def stars(n: Any) -> Any:
    first, *rest = n, n + 1, n + 2
    if n > 2:
        first, *rest = rest[0], first, rest[1]
    total = 0
    for a, (b, *c) in [(1, (2, 3)), (n, (n, n))]:
        total += a * b + c[0]
        if total > 30:
            break
    return first * 100 + rest[0] + total


def updates(n: Any) -> Any:
    values = hf.zeros(4)
    found = {"a": 1}
    for i in range(n):
        values[i % 4] += i
        values[1:3] -= 1
        values[i % 4, ...] *= 2
    found["a"] += n
    found["a"] //= 2
    return hf.sum(values) + found["a"]


class Holder:
    total: Any = 0

    def __init__(self, total: Any) -> None:
        self.total = total
        self.__hidden = 3

    @control_flow
    def method(self, n: Any) -> Any:
        while n > 0:
            n = n - self.__hidden
        return n + self.total

    @classmethod
    @control_flow
    def of(cls, n: Any) -> Any:
        if n > 3:
            n = n * 2
        return cls(n)

    @control_flow
    @staticmethod
    def static(n: Any) -> Any:
        return n if n > 2 else -n

    @property
    @control_flow
    def size(self) -> Any:
        return 10 if self.total > 4 else 20


def methods(n: Any) -> Any:
    holder = Holder.of(n)
    holder.total += 1
    return holder.method(n) + Holder.static(n) + holder.size


def deletes(n: Any) -> Any:
    k = n
    if n > 2:
        del k
        k = n * 2
    for i in range(n):
        part = i
        k += part
        del part
    return k


def in_a_collection(n: Any) -> Any:
    total = 0
    if n in (1, 4, 6):
        total += 1
    if n not in [2, 3]:
        total += 10
    if n in range(3, 6):
        total += 100
    return total


def recursive(n: Any) -> Any:
    def down(k: int) -> Any:
        if k == 0:
            return n
        return down(k - 1) * 2 if n > 3 else down(k - 1) + 1

    return down(3)


def many_returns(n: Any) -> Any:
    if n > 1:
        if n > 6:
            return 1
        n = n + 0
    if n > 2:
        if n == 3:
            return 2
        n = n + 1
    if n > 4:
        if n == 5:
            return n
        n = n - 1
    for i in range(n):
        if i > 4:
            if n > 6:
                return i * 1000
            n = n + 1
    return n * 10


def ends_in_a_loop(n: Any) -> Any:
    while True:
        n = n + 3
        if n > 10:
            return n


def over_zip(n: Any) -> Any:
    total = 0
    for i, (a, b) in enumerate(zip(range(n), range(1, n + 3), strict=False), 5):
        total += i * a - b
        if total > 60:
            break
    for i in reversed(range(n)):
        total = total * 2 - i
    return total


def comprehensions(n: Any) -> Any:
    squares = [i * i for i in range(n)]
    total = sum(squares) + sum(i * 2 for i in range(n) if i % 2 == 0)
    total += len([i for i in range(n)])
    if any(i > 3 for i in range(n)):
        total += 1000
    return total + max([i % 4 for i in range(n + 1)])


FUNCTIONS = [
    *(breaks_in_try, returns_in_try, continues_in_try, returns_in_with),
    *(breaks_in_nested_with, returns_from_loops_in_with, leaves_by_finally, matches),
    *(matches_in_loop, walrus, shared_by_closures, changed_by_closures, defaults),
    *(stars, updates, methods, deletes, in_a_collection, recursive, many_returns),
    *(ends_in_a_loop, over_zip, comprehensions),
]


@pytest.mark.parametrize("run", RUNNERS, ids=NAMES)
@pytest.mark.parametrize("f", FUNCTIONS)
def test_statements_do_what_they_did(run: Any, f: Any) -> None:
    rewritten = hf.control_flow(f)
    if f is comprehensions and run.__name__ == "run_traced":
        pytest.skip("a trace for one example has no symbols for sizes of the run")
    for n in range(9):
        want = f(n)
        assert rewritten(n) == want
        found = run(rewritten, hf.asarray(n))
        np.testing.assert_array_equal(np.asarray(found), np.asarray(want))
