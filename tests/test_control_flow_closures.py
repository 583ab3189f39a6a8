"""`hf.control_flow` and the functions defined within the one that it rewrites."""

from typing import Any

import pytest

import hopflow as hf
from hopflow.errors import ControlFlowError
from hopflow.testing.executions import NAMES, RUNNERS


def calls_in_a_branch(x: Any) -> Any:
    n = x

    def count() -> None:
        nonlocal n
        n = n + 1

    if x > 0:
        count()
    return n


def calls_in_a_condition(x: Any) -> Any:
    n = x

    def count() -> Any:
        nonlocal n
        n = n - 1
        return n

    while count() > 0:
        x = x + 1
    return x


def calls_by_another(x: Any) -> Any:
    n = x

    def count() -> None:
        nonlocal n
        n = n + 1

    def twice() -> None:
        for _ in range(2):
            count()

    def inner(y: Any) -> None:
        while y > 0:
            y = y - 1
            twice()

    inner(x)
    return n


def calls_in_an_expression(x: Any) -> Any:
    n = x

    def count() -> Any:
        nonlocal n
        n = n + 1
        return n

    y = count() if x > 0 else 0
    return n + y


def calls_in_the_other_part(x: Any) -> Any:
    n = x

    def count() -> Any:
        nonlocal n
        n = n + 1
        return n

    return (n if x < 0 else count()) + n


def calls_after_and(x: Any) -> Any:
    n = x

    def count() -> Any:
        nonlocal n
        n = n + 1
        return n

    y = n and count() and x > 0
    return (n, y)


def calls_after_or(x: Any) -> Any:
    n = x

    def count() -> Any:
        nonlocal n
        n = n + 1
        return n

    if x < 0 or count() > 3:
        x = x + 1
    return n + x


@pytest.mark.parametrize(
    ("f", "called", "line"),
    [
        (calls_by_another, "twice", 12),
        (calls_in_an_expression, "count", 8),
        (calls_in_the_other_part, "count", 8),
        (calls_after_and, "count", 8),
        (calls_after_or, "count", 8),
    ],
)
def test_a_call_that_assigns_a_name_outside_stays_python(
    f: Any, called: str, line: int
) -> None:
    rewritten = hf.control_flow(f)
    assert rewritten(2) == f(2)
    at = f"test_control_flow_closures.py:{f.__code__.co_firstlineno + line}"
    with pytest.raises(ControlFlowError) as found:
        hf.jit(rewritten)(hf.asarray(2))
    assert f"`{called}`, which it calls, assigns `n`, which is" in str(found.value)
    assert str(found.value).endswith(f"return what `n` becomes ({at}).")


@pytest.mark.parametrize("run", RUNNERS, ids=NAMES)
@pytest.mark.parametrize("f", [calls_in_a_branch, calls_in_a_condition])
def test_statements_may_call_what_assigns_names_of_the_function(
    run: Any, f: Any
) -> None:
    for n in range(-1, 4):
        assert hf.control_flow(f)(n) == f(n)
        assert run(hf.control_flow(f), hf.asarray(n)).item() == f(n)


TOTAL = 0


def add_to_total(x: Any) -> Any:
    global TOTAL
    TOTAL += x
    return x


def calls_a_neighbour(x: Any) -> Any:
    return twice_to_total(x) if x > 0 else x


def twice_to_total(x: Any) -> Any:
    return add_to_total(x) + add_to_total(x)


def of_a_closure() -> Any:
    n = 0

    def count() -> Any:
        nonlocal n
        n += 1
        return n

    def f(x: Any) -> Any:
        again: Any = count
        if x > 0:
            x = again()
        return x

    return f


neighbours: list[Any] = [
    (calls_a_neighbour, "twice_to_total", "TOTAL"),
    (of_a_closure(), "again", "n"),
]


@pytest.mark.parametrize(("f", "called", "written"), neighbours)
def test_functions_around_that_assign_a_name_stay_python(
    f: Any, called: str, written: str
) -> None:
    rewritten = hf.control_flow(f)
    assert rewritten(hf.asarray(-2)).item() == -2
    what = f"`{called}`, which it calls, assigns `{written}`"
    with pytest.raises(ControlFlowError, match=what):
        hf.jit(rewritten)(hf.asarray(2))


def test_functions_within_have_names_and_yields_of_their_own() -> None:
    @hf.control_flow
    def f(x: Any) -> Any:
        n = x

        def added() -> Any:
            k = n

            def add() -> None:
                nonlocal k
                k = k + 1

            add()
            return k

        def add_now() -> None:
            nonlocal n
            n = n + 10

        def both() -> Any:
            yield n
            yield x

        add_now()
        if x > 0:
            n = added()
        return sum(both())

    for x in (2, -2):
        assert hf.jit(f)(hf.asarray(x)).item() == f(x)


def late(x: Any) -> Any:
    y = x
    functions = []
    for k in range(3):
        y = x + k
        functions.append(lambda: y)  # noqa: B023
    if x > 0:
        y = y * 10
    return functions[0]() + functions[2]()


def kept_in_a_cell(x: Any) -> Any:
    def make(k: Any) -> Any:
        def add(n: Any) -> Any:
            nonlocal k
            if n > 2:
                k = k + n
            return k

        return add

    add = make(x)
    other = make(10)
    for n in range(6):
        if n % 2 == 0:
            add(n)
        else:
            other(n)
    return add(0) * 100 + other(0)


def rebound_in_a_branch(x: Any) -> Any:
    scale = 2

    def scaled(n: Any) -> Any:
        return n * scale

    if x > 1:
        scale = 5
    return scaled(x)


@pytest.mark.parametrize("run", RUNNERS, ids=NAMES)
@pytest.mark.parametrize("f", [late, kept_in_a_cell, rebound_in_a_branch])
def test_functions_within_see_what_names_become_later(run: Any, f: Any) -> None:
    for n in range(4):
        assert hf.control_flow(f)(n) == f(n)
        assert run(hf.control_flow(f), hf.asarray(n)).item() == f(n)
