"""Calls of Python under `vmap` and in derivatives: once each, and in order."""

from typing import Any

import numpy as np
import pytest

import hopflow
from hopflow.errors import DerivativeError
from hopflow.testing.calls import Calls
from hopflow.testing.executions import NAMES, RUNNERS, agree, fails

hf: Any = hopflow

each_execution = pytest.mark.parametrize("run", RUNNERS, ids=NAMES)
each_wrap = pytest.mark.parametrize("wrap", [lambda f: f, hf.jit], ids=["eager", "jit"])

X = np.array([1.0, 2.0, 3.0], np.float32)


@pytest.fixture
def log() -> Calls:
    return Calls()


# --- examples -------------------------------------------------------------------------


@each_execution
def test_examples_call_python_one_after_the_other(run: Any, log: Calls) -> None:
    f = lambda x: hf.vmap(lambda e: log.through(e) + 1)(x)  # noqa: E731
    assert log.of(lambda: agree(run(f, hf.asarray(X)), X + 1)) == X.tolist()


@each_execution
def test_a_branch_that_differs_calls_for_the_examples_that_take_it(
    run: Any, log: Calls
) -> None:
    def one(e: Any) -> Any:
        return hf.cond(e > 1, lambda: log.through(e), lambda: (log.note("no"), e)[1])

    f = lambda x: hf.vmap(one)(x)  # noqa: E731
    assert log.of(lambda: agree(run(f, hf.asarray(X)), X)) == ["no", 2.0, 3.0]


@each_execution
def test_what_is_alike_for_all_is_called_for_each(run: Any, log: Calls) -> None:
    numbers = iter(range(100))

    def one(e: Any) -> Any:
        log.note("alone")
        drawn = hf.callback(lambda: next(numbers), hf.spec("f32[]"))

        def step(_: Any, c: Any) -> Any:
            log.note("step")
            return c

        return e + drawn + hf.fori_loop(0, 2, step, hf.asarray(0.0, dtype="float32"))

    f = lambda x: hf.vmap(one)(x)  # noqa: E731
    assert log.of(lambda: agree(run(f, hf.asarray(X)), X + np.arange(3))) == (
        ["alone"] * 3 + ["step"] * 6
    )


# --- derivatives ----------------------------------------------------------------------


def square(log: Calls, x: Any) -> Any:
    log.note(x)
    return hf.sum(x * x)


def in_loop(loop: Any) -> Any:
    def f(log: Calls, x: Any) -> Any:
        def step(i: Any, c: Any) -> Any:
            log.note(i)
            return c * x

        return hf.sum(loop(step, x))

    return f


def looping(**options: Any) -> Any:
    def loop(step: Any, x: Any) -> Any:
        return hf.while_loop(
            lambda i, _: i < 3, lambda i, c: (i + 1, step(i, c)), (0, x), **options
        )[1]

    return loop


LOOPS = {
    "scan": lambda step, x: hf.scan(lambda c, i: (step(i, c), None), x, hf.arange(3))[
        0
    ],
    "fori": lambda step, x: hf.fori_loop(0, 3, step, x),
    "while": looping(),
    "saving": looping(reverse_mode="save"),
    "bounded": looping(max_steps=5),
    "bounded saving": looping(max_steps=5, reverse_mode="save"),
    "checkpoints": looping(reverse_mode=hf.Checkpoint(2)),
    "in a checkpoint": lambda step, x: hf.checkpoint(
        lambda x: hf.fori_loop(0, 3, step, x)
    )(x),
    "in a scan": lambda step, x: hf.scan(
        lambda c, _: (looping()(step, c), None), x, None, length=1
    )[0],
}


@pytest.mark.parametrize("loop", LOOPS.values(), ids=list(LOOPS))
@each_wrap
def test_a_derivative_calls_once_what_the_function_does(
    loop: Any, wrap: Any, log: Calls
) -> None:
    f = in_loop(loop)
    derivative = wrap(hf.grad(lambda x: f(log, x)))
    got: list[Any] = []
    assert log.of(lambda: got.append(derivative(hf.asarray(X)))) == [0, 1, 2]
    agree(got[0], 4 * X**3)


@each_wrap
def test_forward_and_second_derivatives_call_once(wrap: Any, log: Calls) -> None:
    x = hf.asarray(X)
    forward = wrap(lambda x: hf.jvp(lambda x: square(log, x), (x,), (x,))[1])
    assert log.of(lambda: agree(forward(x), np.float32(28))) == [X.tolist()]
    second = wrap(hf.grad(lambda x: hf.sum(hf.grad(lambda x: square(log, x))(x))))
    assert log.of(lambda: agree(second(x), np.full(3, 2, np.float32))) == [X.tolist()]


def test_a_float_result_of_what_is_differentiated_has_no_derivative(log: Calls) -> None:
    x = hf.asarray(X)
    fails(
        DerivativeError,
        "callback: `<lambda>` (calls.py:#) is called with what is "
        "differentiated, and has no derivative. Call it in a function with a rule of "
        "its own (`hf.custom_jvp`), or with `hf.stop_gradient` of its arguments.",
        hf.grad(lambda x: hf.sum(log.through(x))),
        x,
    )
    kept = hf.grad(lambda x: hf.sum(x * log.through(hf.stop_gradient(x))))
    agree(kept(x), X)
    whole = hf.callback

    def rounded(x: Any) -> Any:
        n = whole(lambda a: hf.astype(a, "int64"), hf.spec("i64[3]"), x)
        return hf.sum(x * n)

    agree(hf.grad(rounded)(x), X)


def test_custom_jvp_gives_a_callback_a_derivative() -> None:
    cube = hf.custom_jvp(lambda x: hf.callback(lambda a: a**3, x, x))
    cube.defjvps(lambda t, _, x: 3 * x**2 * t)
    loss = lambda x: hf.sum(cube(x))  # noqa: E731
    for f in (hf.grad(loss), hf.jit(hf.grad(loss))):
        agree(f(hf.asarray(X)), 3 * X**2)


@pytest.mark.parametrize(
    ("mode", "within"), [("recompute", True), ("checkpoint", False)]
)
def test_a_result_that_a_repeated_step_reads_is_refused(
    mode: str, within: bool
) -> None:
    def f(x: Any) -> Any:
        def step(i: Any, c: Any) -> Any:
            factor = hf.callback(lambda: 2.0, hf.spec("f32[]"))
            return i + 1, c * factor * c

        def loop(x: Any) -> Any:
            return hf.while_loop(lambda i, _: i < 2, step, (0, x), reverse_mode=mode)[1]

        return (
            hf.scan(lambda c, _: (loop(c), None), x, length=1)[0] if within else loop(x)
        )

    with pytest.raises(DerivativeError, match="would be called again"):
        hf.grad(f)(hf.asarray(np.float32(1)))


@pytest.mark.parametrize("most", [None, 4])
def test_a_loop_may_read_results_in_its_derivative(most: int | None) -> None:
    drawn = iter([2.0, 3.0])

    def f(x: Any) -> Any:
        def step(i: Any, c: Any) -> Any:
            factor = hf.callback(lambda: next(drawn), hf.spec("f32[]"))
            return i + 1, c * factor * x

        return hf.while_loop(lambda i, _: i < 2, step, (0, x), max_steps=most)[1]

    agree(hf.grad(f)(hf.asarray(np.float32(2))), np.float32(3 * 6 * 4))


@each_wrap
@pytest.mark.parametrize("by_index", [False, True])
@pytest.mark.parametrize(("chosen", "slope"), [(0, 1.0), (1, 2.0), (2, 4.0)])
def test_only_the_branch_that_runs_computes_what_its_derivative_needs(
    wrap: Any, by_index: bool, chosen: int, slope: float, log: Calls
) -> None:
    def branch(k: int) -> Any:
        def power(x: Any) -> Any:
            for _ in range(k):
                log.note(x)
                x = x * x
            return x

        return power

    def f(x: Any, index: Any) -> Any:
        if by_index:
            return hf.switch(index, [branch(k) for k in range(3)], x)
        smaller = lambda x: hf.cond(index > 0, branch(1), branch(0), x)  # noqa: E731
        return hf.cond(index > 1, branch(2), smaller, x)

    gradient = wrap(hf.grad(f))
    x, index = hf.asarray(1.0), hf.asarray(chosen)
    assert len(log.of(lambda: agree(gradient(x, index), np.float32(slope)))) == chosen
