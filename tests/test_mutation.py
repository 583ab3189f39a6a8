"""Writes in the functions given to operators: what of them reaches the caller."""

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pytest

import hopflow
from hopflow.errors import MutationError, ReadOnlyError
from hopflow.testing.executions import (
    EXECUTIONS,
    fails,
    in_turn,
    run_debug,
    run_dynamic,
)

pytestmark = pytest.mark.slow

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
    **{m.name: m.run for m in EXECUTIONS if m.name not in ("debug", "native")},
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


def with_rules(kind: str, f: Any) -> Any:
    own = getattr(hf, kind)(f)
    if kind == "custom_jvp":
        own.defjvp(lambda p, t: (own(*p), 3 * t[0]))
    else:
        own.defvjp(lambda x: (own(x), x), lambda x, ct: (3 * ct * x,))
    return own


def doubling(kind: str) -> Any:
    """A function with rules that writes to its argument: for it that is a value."""

    def double(x: Any) -> Any:
        before = x * 1
        x[0] *= 2
        row = x[1:]
        row += before[1:]
        return x

    return with_rules(kind, double)


def in_grad(f: Any) -> Any:
    return lambda x: hf.grad(lambda x: hf.sum(f(x) * x))(x)


KINDS: Final = ("custom_jvp", "custom_vjp")
# A function of rules, where it is called.
WITHIN: Final[dict[str, Any]] = {
    "its argument": lambda kind: lambda x: doubling(kind)(x),
    "a view of it": lambda kind: lambda x: doubling(kind)(x[1:].T),
    "in a loop": lambda kind: (
        lambda x: hf.fori_loop(0, 2, lambda _, c: c + doubling(kind)(x), x)
    ),
    "in vmap": lambda kind: hf.vmap(doubling(kind)),
    "in grad": lambda kind: in_grad(doubling(kind)),
    "in grad of vmap": lambda kind: in_grad(hf.vmap(doubling(kind))),
}

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
    **{f"{kind}, {w}": within(kind) for kind in KINDS for w, within in WITHIN.items()},
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
    "custom_jvp": lambda f: lambda x: with_rules("custom_jvp", f)(x[0]),
    "custom_vjp": lambda f: lambda x: with_rules("custom_vjp", f)(x[0]),
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


@pytest.mark.parametrize("rule", ["custom_jvp", "forward", "backward"])
@pytest.mark.parametrize("what", ["given", "of outside"])
@pytest.mark.parametrize(
    "wrap",
    [
        lambda f: f,
        lambda f: hf.jit(f),
        lambda f: lambda x: hf.cond(x[0, 0] > -1, f, lambda x: hf.sum(x), (x,)),
        lambda f: lambda x: hf.sum(hf.vmap(f)(x[None])),
    ],
    ids=["tape", "jit", "cond", "vmap"],
)
def test_rules_write_only_what_they_make(rule: str, what: str, wrap: Any) -> None:
    outside, x = hf.asarray(X.copy()), hf.asarray(X.copy())

    def doubled(x: Any, writes: bool) -> Any:
        own = hf.zeros_like(x)
        own[1:] = x[1:]
        own[:1] += x[:1]
        if writes:
            (x if what == "given" else outside)[0] = 1.0
        return own * 2

    def total(writes: str) -> Any:
        f = (hf.custom_jvp if rule == "custom_jvp" else hf.custom_vjp)(hf.sum)
        if rule == "custom_jvp":
            f.defjvp(lambda p, t: (f(*p), hf.sum(doubled(t[0], writes == rule))))
        else:
            f.defvjp(
                lambda x: (f(x), doubled(x, writes == "forward")),
                lambda kept, ct: (ct * doubled(kept, writes == "backward") / x / 2,),
            )
        return wrap(f)

    assert hf.grad(total("none"))(x)[1:].tolist() == np.full((2, 4), 2.0).tolist()
    with pytest.raises(MutationError, match="a rule of `sum` writes to a tensor f32"):
        hf.grad(total(rule))(x)
    np.testing.assert_array_equal(np.asarray(x), X)
    np.testing.assert_array_equal(np.asarray(outside), X)


@pytest.mark.parametrize("read", [True, False])
@pytest.mark.parametrize("wrap", [lambda f: f, lambda f: hf.jit(f)])
def test_rules_of_custom_jvp_may_write_what_they_make_in_loops(
    read: bool, wrap: Any
) -> None:
    def twice(x: Any) -> Any:
        total = hf.zeros(3)
        step = hf.asarray([1.0, 1.0, 1.0])
        step[1:] = 1.0

        def add(_: Any, c: Any) -> Any:
            nonlocal total
            total += x * step
            return c

        hf.fori_loop(0, 2, add, 0)
        return hf.sum(total)

    f, x = hf.custom_jvp(twice), hf.ones(3)

    def rule(primals: Any, tangents: Any) -> Any:
        if not read:
            primals[0][0] = 1.0
        return f(*primals), twice(tangents[0])

    f.defjvp(rule)
    if read:
        assert wrap(hf.grad(f))(x).tolist() == [2.0] * 3
    else:
        with pytest.raises(MutationError, match="a rule of `twice` writes"):
            wrap(hf.grad(f))(x)


def test_what_cannot_be_written_is_no_value_either() -> None:
    x = hf.broadcast_to(hf.asarray(1.0), (3,))
    with pytest.raises(ReadOnlyError, match="elements of a broadcast"):
        doubling("custom_jvp")(x)
    assert x.tolist() == [1.0] * 3
