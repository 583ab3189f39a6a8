"""Writes in the functions given to operators: what of them reaches the caller."""

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pytest

import hopflow
from hopflow.errors import MutationError
from hopflow.testing.meanings import MEANINGS, fails, in_turn, run_debug, run_dynamic

hf: Any = hopflow
X = np.arange(12, dtype=np.float32).reshape(3, 4)


# How `f`, which writes and returns a scalar, is called: (p, f, args) -> a result.
OPERATORS: Final[dict[str, Callable[..., Any]]] = {
    "cond": lambda p, f, args: hf.cond(p > 0, f, lambda *_: 0.0 * p, args),
    "switch": lambda p, f, args: hf.switch(
        hf.astype(p, hf.int32), [lambda *_: 0.0 * p, f, lambda *_: p], args
    ),
    "while_loop": lambda p, f, args: hf.while_loop(
        lambda i, _: i < 2, lambda i, s: (i + 1, s + f(*args)), (0, 0.0 * p)
    )[1],
    "fori_loop": lambda p, f, args: hf.fori_loop(
        0, 2, lambda _, s: s + f(*args), 0.0 * p
    ),
    "scan": lambda p, f, args: hf.scan(
        lambda s, _: (s + f(*args), s), 0.0 * p, length=2
    ),
    "scan, until": lambda p, f, args: hf.scan(
        lambda s, _: (s + f(*args), s), 0.0 * p, length=4, until=lambda s: s > 1
    ),
    "invoke_subgraph": lambda _, f, args: hf.invoke_subgraph(f, *args),
    "subgraph": lambda _, f, args: hf.subgraph(f)(*args),
    "checkpoint": lambda _, f, args: hf.checkpoint(f)(*args),
    "functionalize": lambda _, f, args: hf.functionalize(f)(*args),
    "jit": lambda _, f, args: hf.jit(f)(*args),
    "nested": lambda p, f, args: hf.scan(
        lambda s, _: (
            s + hf.cond(p > 0, lambda: hf.invoke_subgraph(f, *args), lambda: s),
            s,
        ),
        0.0 * p,
        length=2,
    ),
}


# What the caller's tensor is written by: c -> a function that writes, its operands.


def operand(c: Any) -> Any:
    def f(x: Any) -> Any:
        x[0] = x[1] * 2 + 1
        return hf.sum(x)

    return f, (c,)


def capture(c: Any) -> Any:
    def f() -> Any:
        c[0] = c[1] * 2 + 1
        return hf.sum(c)

    return f, ()


def view_of_outside(c: Any) -> Any:
    v = c.T[1:][::-1]

    def f() -> Any:
        before = hf.sum(c)
        v[0] = v[1] * 2 + 1
        return before + hf.sum(v)

    return f, ()


def view_within(c: Any) -> Any:
    def f() -> Any:
        c.T[1:].reshape(-1)[::2] += 1
        return hf.sum(c)

    return f, ()


def view_and_base(c: Any) -> Any:
    def f(x: Any, y: Any) -> Any:
        y += 1
        x[0] = hf.sum(c) * 0.25
        return hf.sum(y)

    return f, (c, c[:2])


def given_twice(c: Any) -> Any:
    def f(x: Any, y: Any) -> Any:
        x[0] = 3.0
        y[1] = x[0] + 1
        return hf.sum(x * y)

    return f, (c, c)


def operand_and_capture(c: Any) -> Any:
    def f(x: Any) -> Any:
        x += 1
        c[1:] = c[:-1]
        return hf.sum(x) - hf.sum(c[0])

    return f, (c,)


def nested_body(c: Any) -> Any:
    def f() -> Any:
        def write() -> Any:
            nonlocal c
            c += 1
            return hf.sum(c)

        return hf.fori_loop(
            0, 2, lambda _, s: hf.cond(s < 99, write, lambda: s), hf.sum(c) * 0
        )

    return f, ()


def now_and_then(c: Any) -> Any:
    def f() -> Any:
        before = hf.sum(c)
        hf.cond(before > 60, lambda: c.__setitem__(0, 5.0), lambda: None)
        return before - hf.sum(c)

    return f, ()


def masked(c: Any) -> Any:
    def f() -> Any:
        c[c > 3] = hf.sum(c[0])
        return hf.sum(c)

    return f, ()


WRITES: Final = (
    *(operand, capture, view_of_outside, view_within, view_and_base, given_twice),
    *(operand_and_capture, nested_body, now_and_then, masked),
)
RUNS: Final[dict[str, Callable[..., Any]]] = {
    **{m.name: m.run for m in MEANINGS if m.name not in ("debug", "native")},
    "dynamic": run_dynamic,
    "functionalized": lambda f, *xs: hf.functionalize(f)(*xs),
}


def outcomes(operator: Any, write: Any, run: Any) -> list[Any]:
    """Results, and what is left in the caller's tensor: where that is an argument, is
    closed over, or is made within."""
    found = []
    for place in ("argument", "outside", "within"):
        p, x = hf.asarray(1.0), hf.asarray(X.copy())

        def f(p: Any, *xs: Any, x: Any = x, place: str = place) -> Any:
            c = xs[0] if xs else x
            f, args = write(c * 1 if place == "within" else c)
            return operator(p, f, args), c * 1

        result = run(f, p) if place == "outside" else run(f, p, x)
        leaves = hopflow.pytree.flatten((result, x))[0]
        found.append([np.asarray(leaf).tolist() for leaf in leaves])
    return found


@pytest.mark.parametrize(
    ("operator", "write", "run"), in_turn([*OPERATORS], WRITES, of=[*RUNS])
)
def test_the_caller_sees_what_a_body_writes(
    operator: str, write: Any, run: str
) -> None:
    want = outcomes(OPERATORS[operator], write, run_debug)
    assert outcomes(OPERATORS[operator], write, RUNS[run]) == want
    assert all(left[-1] != X.tolist() for left in want[:2])
    assert want[2][-1] == X.tolist()


# --- where the caller's tensor stays --------------------------------------------------

VALUES: Final[dict[str, Callable[[Any], Any]]] = {
    "while_loop": lambda x: hf.while_loop(
        lambda i, _: i < 2, lambda i, c: (i + 1, c.__iadd__(1)), (0, x)
    )[1],
    "fori_loop": lambda x: hf.fori_loop(0, 2, lambda _, c: c.__iadd__(1), x),
    "scan, its carry": lambda x: hf.scan(lambda c, _: (c.__iadd__(1), 0), x, length=2)[
        0
    ],
    "scan, a slice": lambda x: hf.scan(lambda c, row: (c, row.__iadd__(1)), 0, x)[1],
    "map": lambda x: hf.map(lambda row: row.__iadd__(1), x),
    "associative_scan": lambda x: hf.associative_scan(lambda a, b: a.__iadd__(b), x),
    "vmap": lambda x: hf.vmap(lambda row: row.__iadd__(1))(x),
    "grad": lambda x: hf.grad(lambda x: hf.sum(x.__imul__(x)))(x),
    "vjp": lambda x: hf.vjp(lambda x: x.__imul__(x), x)[0],
    "jvp": lambda x: hf.jvp(lambda x: x.__imul__(x), (x,), (x,))[1],
}


@pytest.mark.parametrize("run", [run_debug, *RUNS.values()], ids=["debug", *RUNS])
@pytest.mark.parametrize("call", VALUES.values(), ids=VALUES)
def test_values_are_private(call: Any, run: Any) -> None:
    x = hf.asarray(X.copy())
    want = np.asarray(run_debug(call, hf.asarray(X.copy())))
    np.testing.assert_allclose(np.asarray(run(call, x)), want)
    np.testing.assert_array_equal(np.asarray(x), X)


# --- what is refused ------------------------------------------------------------------

WITHOUT_ORDER: Final[dict[str, Any]] = {
    "map": lambda f: lambda x: hf.map(f, x),
    "vmap": lambda f: hf.vmap(f),
    "associative_scan": lambda f: (
        lambda x: hf.associative_scan(lambda a, b: a + b + f(b) * 0, x)
    ),
}


@pytest.mark.parametrize("run", [run_debug, *RUNS.values()], ids=["debug", *RUNS])
@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("call", WITHOUT_ORDER.values(), ids=WITHOUT_ORDER)
def test_calls_without_an_order_may_not_write_outside(
    call: Any, depth: int, run: Any
) -> None:
    x = hf.asarray(X.copy())

    def write(row: Any) -> Any:
        x[0] = row
        return row

    def f(row: Any) -> Any:
        if depth == 0:
            return write(row)
        step = write
        if depth == 2:
            step = lambda row: hf.invoke_subgraph(write, row)  # noqa: E731
        return hf.fori_loop(0, 1, lambda _, row: step(row), row)

    with pytest.raises(MutationError, match="writes to a captured tensor f32"):
        run(call(f), hf.asarray(X.copy()))
    np.testing.assert_array_equal(np.asarray(x), X)


def test_a_condition_only_tests() -> None:
    x = hf.asarray(X.copy())

    def test(i: Any) -> Any:
        x[0] = 1.0
        return i < 3

    text = (
        "while_loop: `test` (test_mutation.py:#) writes to a captured tensor f32[3, 4],"
        " but a condition only tests. Write to it in `body_fn`."
    )
    for run in (run_debug, *RUNS.values()):
        fails(MutationError, text, run, lambda: hf.while_loop(test, lambda i: i + 1, 0))
