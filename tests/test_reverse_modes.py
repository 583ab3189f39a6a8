"""The reverse modes of `while_loop`, against the loop unrolled in Python, by JAX."""

import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import numpy as np
import pytest

import hopflow as hf
from hopflow.compiler.pipeline import lower
from hopflow.compiler.reuse import reuse
from hopflow.errors import LoopLimitError
from hopflow.graph.parser import parse
from hopflow.graph.printer import format_graph
from hopflow.graph.rewriting import eliminate_dead_code
from hopflow.hops.reverse_modes import stride
from hopflow.hops.scan import SCAN
from hopflow.hops.while_loop import WHILE
from hopflow.ops.opdef import OPERATIONS

pytestmark = pytest.mark.slow

jax = pytest.importorskip("jax")
jnp = jax.numpy

W = np.linspace(0.3, 1.2, 4).astype(np.float32)
X = np.linspace(1.1, 0.2, 4).astype(np.float32)

CHECKPOINTS = ("checkpoint", hf.Checkpoint(1), hf.Checkpoint(3))
OPERATORS = {**OPERATIONS, "while_loop": WHILE, "scan": SCAN}
MODES = [{"reverse_mode": mode} for mode in ("save", "recompute", *CHECKPOINTS)]
BOUNDED = [
    {"reverse_mode": mode, "max_steps": 12}
    for mode in ("save", "recompute", hf.Checkpoint(3))
]
Loop = Callable[..., Any]


def closure(w: Any, x: Any, n: Any, m: Any, loop: Loop) -> Any:
    """A captured weight, and a bound that is read by the condition alone."""

    def body(i: Any, c: Any) -> Any:
        return i + 1, m.sin(c * w) + 0.5 * c

    return m.sum(loop(lambda i, c: i < n, body, (0, x))[1] ** 2)


def tree(w: Any, x: Any, n: Any, m: Any, loop: Loop) -> Any:
    """Leaves of all kinds; one that nothing depends on, and one that stays."""

    def body(c: Any) -> Any:
        scale = m.where(c["odd"], 0.3, 0.7)
        return {
            "i": c["i"] + 1,
            "odd": ~c["odd"],
            "none": None,
            "pair": (m.tanh(c["pair"][1]) * scale, c["pair"][0] * c["stay"] + 0.1),
            "stay": c["stay"],
            "time": c["time"] + 0.5,
        }

    first = {
        "i": m.asarray(0),
        "odd": m.asarray(False),
        "none": None,
        "pair": (w, x * w),
        "stay": x,
        "time": m.asarray(0.0),
    }
    last = loop(lambda c: c["i"] < n, body, first)
    return m.sum(last["pair"][0] * last["pair"][1]) * last["time"] + m.sum(last["stay"])


PROGRAMS = (closure, tree)
WRAPS: dict[str, Any] = {"eager": lambda f: f, "jit": hf.jit}


def shown(options: dict[str, Any]) -> str:
    return " ".join(map(str, options.values()))


def unrolled(test: Any, body: Any, carry: Any) -> Any:
    spread = type(carry) is tuple
    while test(*carry) if spread else test(carry):
        carry = body(*carry) if spread else body(carry)
    return carry


def first_order(grad: Any, program: Any, m: Any, loop: Loop) -> Any:
    def gradient(w: Any, x: Any, n: Any) -> Any:
        return grad(lambda w, x: program(w, x, n, m, loop), (0, 1))(w, x)

    return gradient


def second_order(grad: Any, program: Any, m: Any, loop: Loop) -> Any:
    inner = first_order(grad, program, m, loop)

    def gradient(w: Any, x: Any, n: Any) -> Any:
        def norm(w: Any, x: Any) -> Any:
            dw, dx = inner(w, x, n)
            return m.sum(dw * dw) + m.sum(dx * x)

        return grad(norm, (0, 1))(w, x)

    return gradient


@cache
def in_jax(order: Any, program: Any, steps: int, size: int | None = None) -> Any:
    """The gradients of the unrolled loop, the same for each of our ways."""
    return order(jax.grad, program, jnp, unrolled)(*arguments(size), steps)


def arguments(size: int | None = None) -> tuple[Any, Any]:
    """Weights and a carry; others for a size."""
    if size is None:
        return W, X
    return W[:1].repeat(size), np.linspace(-1, 1, size, dtype=np.float32)


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
@pytest.mark.parametrize("order", [first_order, second_order], ids=["once", "twice"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
@pytest.mark.parametrize("options", [*MODES, *BOUNDED], ids=shown)
def test_gradients_are_those_of_the_unrolled_loop(
    options: Any, program: Any, order: Any, wrap: Any
) -> None:
    loop = partial(hf.while_loop, **options)
    gradient = wrap(order(hf.grad, program, hf, loop))
    for steps in (0, 1, 2, 11):
        want = in_jax(order, program, steps)
        found = gradient(hf.asarray(W), hf.asarray(X), hf.asarray(steps))
        for a, b in zip(found, want, strict=True):
            np.testing.assert_allclose(np.asarray(a), b, rtol=2e-4, atol=1e-5)


BOTH = np.stack([W, X])
STEPS = (3, 0, 5)


@cache
def transforms_in_jax() -> dict[str, Any]:
    def g(w: Any, x: Any, n: int = 5) -> Any:
        return closure(w, x, n, jnp, unrolled)

    gradients = [jax.grad(g)(W, X, n) for n in STEPS]
    return {
        "jvp": jax.jvp(g, (W, X), (X, W))[1],
        "hessian": jax.hessian(g)(W, X),
        "rows of grad": jax.vmap(jax.grad(g), (0, None))(BOTH, X),
        "rows of hessian": jax.vmap(jax.hessian(g), (0, None))(BOTH, X),
        "grad of rows": sum(jax.grad(g)(W, x) for x in BOTH),
        "rows of steps": np.stack(gradients),
        "grad of steps": sum(gradients),
    }


@pytest.mark.parametrize("options", [*MODES[2:], *BOUNDED], ids=shown)
def test_what_is_kept_composes_with_all_transforms(options: Any) -> None:
    loop = partial(hf.while_loop, **options)

    def f(w: Any, x: Any, n: Any = 5) -> Any:
        return closure(w, x, hf.asarray(n), hf, loop)

    w, x, both, steps = map(hf.asarray, (W, X, BOTH, STEPS))
    found = [
        ("jvp", hf.jvp(f, (w, x), (x, w))[1]),
        ("jvp", hf.linearize(f, w, x)[1](x, w)),
        ("hessian", hf.hessian(f)(w, x)),
        ("hessian", hf.jacfwd(hf.grad(f))(w, x)),
        ("hessian", hf.hessian(hf.jit(f))(w, x)),
        ("hessian", hf.jacrev(hf.jit(hf.grad(f)))(w, x)),
        ("rows of grad", hf.vmap(hf.grad(f), (0, None))(both, x)),
        ("rows of hessian", hf.vmap(hf.hessian(f), (0, None))(both, x)),
        (
            "grad of rows",
            hf.grad(lambda w: hf.sum(hf.vmap(lambda x: f(w, x))(both)))(w),
        ),
        ("rows of steps", hf.vmap(lambda n: hf.grad(f)(w, x, n))(steps)),
        (
            "grad of steps",
            hf.grad(lambda w: hf.sum(hf.map(lambda n: f(w, x, n), steps)))(w),
        ),
    ]
    want = transforms_in_jax()
    for name, result in found:
        np.testing.assert_allclose(
            np.asarray(result), want[name], rtol=2e-3, atol=1e-3, err_msg=name
        )


def nested(w: Any, x: Any, n: Any, m: Any, loop: Loop) -> Any:
    def outer(i: Any, c: Any) -> Any:
        def inner(j: Any, c: Any) -> Any:
            return j + 1, m.sin(c * w) + 0.5 * c

        return i + 1, loop(lambda j, _: j < i, inner, (0, c))[1] * x

    return m.sum(loop(lambda i, _: i < n, outer, (0, x))[1])


@pytest.mark.parametrize("options", [*MODES[2:4], *BOUNDED], ids=shown)
def test_loops_nest(options: Any) -> None:
    loop = partial(hf.while_loop, **options)
    want = in_jax(first_order, nested, 4)
    for wrap in WRAPS.values():
        gradient = wrap(first_order(hf.grad, nested, hf, loop))
        found = gradient(hf.asarray(W), hf.asarray(X), hf.asarray(4))
        for a, b in zip(found, want, strict=True):
            np.testing.assert_allclose(np.asarray(a), b, rtol=2e-4, atol=1e-5)


@pytest.mark.parametrize("options", [*MODES, *BOUNDED], ids=shown)
def test_one_trace_serves_all_sizes(options: Any) -> None:
    gradient = first_order(hf.grad, closure, hf, partial(hf.while_loop, **options))
    jitted = hf.jit(gradient, dynamic=True)
    before = hf.stats().traces
    for size, steps in ((2, 5), (3, 0), (7, 12)):
        w, x = arguments(size)
        want = in_jax(first_order, closure, steps, size)
        found = jitted(hf.asarray(w), hf.asarray(x), hf.asarray(steps))
        for a, b in zip(found, want, strict=True):
            np.testing.assert_allclose(np.asarray(a), b, rtol=2e-4, atol=1e-5)
    assert hf.stats().traces == before + 1


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
@pytest.mark.parametrize("options", BOUNDED, ids=shown)
def test_gradients_of_too_many_steps_are_errors(options: Any, wrap: Any) -> None:
    loop = partial(hf.while_loop, **options)
    gradient = wrap(first_order(hf.grad, closure, hf, loop))
    with pytest.raises(LoopLimitError, match="`max_steps` = 12 steps were taken"):
        gradient(hf.asarray(W), hf.asarray(X), hf.asarray(13))


# --- what it costs --------------------------------------------------------------------


def sweep(mode: Any) -> Any:
    def f(x: Any, n: Any) -> Any:
        def body(i: Any, c: Any) -> Any:
            return i + 1, hf.sin(c) * 0.5 + c * 0.5

        first = (0, x)
        return hf.sum(
            hf.while_loop(lambda i, _: i < n, body, first, reverse_mode=mode)[1]
        )

    return hf.jit(hf.grad(f))


def settle(c: Any, w: Any) -> Any:
    h = hf.tanh(w @ c)
    return h * hf.sum(h * h) + c


def shifted(c: Any, _w: Any) -> Any:
    return c.at[1].set(hf.sin(c[0]))


@pytest.mark.parametrize(
    ("step", "mode", "kept"),
    [
        (settle, "recompute", [4]),  # the carry, and nothing that follows from it
        (settle, "save", [1, 4]),  # the sum and the product
        (shifted, "recompute", [1]),  # what is less than a carry
        (shifted, "save", [1]),
    ],
)
def test_what_is_kept_of_each_step(step: Any, mode: str, kept: list[int]) -> None:
    def f(c: Any, w: Any, n: Any) -> Any:
        def body(i: Any, c: Any) -> Any:
            return i + 1, step(c, w)

        first = (0, c)
        return hf.sum(
            hf.while_loop(lambda i, _: i < n, body, first, reverse_mode=mode)[1]
        )

    gradient = hf.jit(hf.grad(f))
    gradient(hf.full(4, 0.2), hf.zeros((4, 4)), hf.asarray(3))
    [forward] = gradient.graph.nodes_of("while_loop")  # which runs once
    types = [v.type for v in forward.results[forward.params["num_carry"] :]]
    assert sorted(math.prod(t.shape[1:]) for t in types) == kept


@pytest.mark.parametrize("kept", [4, 32])
def test_checkpoints_bound_the_memory(kept: int) -> None:
    gradient = sweep(hf.Checkpoint(kept))
    size = 10_000
    gradient(hf.zeros(size, dtype=hf.float32), hf.asarray(100))
    _, program = lower(gradient.graph)
    total = reuse(program).total
    assert total.is_const
    # The stack, the carry and the cotangent; less than that of a carry for the rest.
    assert total.attr < (kept + 3) * 4 * size


def test_gradients_of_gradients_keep_as_few() -> None:
    size, kept = 10_000, 8

    def far(x: Any, n: Any) -> Any:
        mode = hf.Checkpoint(kept)
        step = lambda i, x: (i + 1, x + 0.1 * hf.sin(x))  # noqa: E731
        first = (0, x)
        return hf.sum(
            hf.while_loop(lambda i, _: i < n, step, first, reverse_mode=mode)[1]
        )

    twice = hf.jit(hf.grad(lambda x, n: hf.sum(hf.grad(far)(x, n))))
    twice(hf.zeros(size, dtype=hf.float32), hf.asarray(100))
    total = reuse(lower(twice.graph)[1]).total
    assert total.is_const
    # Carries with tangents, and a few of each for the steps taken.
    assert total.attr < (2 * kept + 8) * 4 * size


def test_second_derivatives_in_what_the_first_is_not_taken_in() -> None:
    def f(w: Any, x: Any, loop: Any, m: Any) -> Any:
        def step(i: Any, x: Any, y: Any, z: Any) -> Any:
            return i + 1, m.sin(x * w), y * x, z + y

        return m.sum(m.prod(m.stack(loop(step, (0, x, x * x, x))[1:]), axis=0))

    def ours(step: Any, first: Any) -> Any:
        test = lambda i, *_: i < 3  # noqa: E731
        return hf.while_loop(test, step, first, reverse_mode="checkpoint")

    def unrolled(step: Any, carry: Any) -> Any:
        for _ in range(3):
            carry = step(*carry)
        return carry

    w, x = np.array([0.5, 0.7], np.float32), np.array([1.0, 0.3], np.float32)

    def mixed(grad: Any, m: Any, loop: Any) -> Any:
        first = grad(partial(f, loop=loop, m=m))
        return grad(lambda w, x: m.sum(m.cos(first(w, x))), (0, 1))

    found = hf.jit(mixed(hf.grad, hf, ours))(w, x)
    want = jax.jit(mixed(jax.grad, jnp, unrolled))(w, x)
    for a, b in zip(found, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("mode", ["save", "recompute"])
def test_a_bound_on_the_steps_bounds_the_memory(mode: str) -> None:
    size, most = 1000, 50

    def f(x: Any, n: Any) -> Any:
        def body(i: Any, c: Any) -> Any:
            return i + 1, hf.sin(c)

        options: Any = {"max_steps": most, "reverse_mode": mode}
        return hf.sum(hf.while_loop(lambda i, _: i < n, body, (0, x), **options)[1])

    gradient = hf.jit(hf.grad(f))
    gradient(hf.zeros(size, dtype=hf.float32), hf.asarray(3))
    _, program = lower(gradient.graph)
    total = reuse(program).total
    assert total.is_const
    assert total.attr < (most + 6) * 4 * size


@pytest.mark.parametrize("free", [1, 2, 3, 7])
@pytest.mark.parametrize("steps", [2, 3, 5, 8, 40, 81])
def test_the_schedule_makes_the_fewest_steps(free: int, steps: int) -> None:
    place = hf.jit(partial(stride, hf.while_loop))
    strides: dict[tuple[int, int], int] = {}

    def made(steps: int, free: int) -> int:
        """How many steps are made until all have been taken backwards."""
        if steps < 2:
            return 0
        key = steps, free
        if key not in strides:
            first = int(place(hf.asarray(steps), hf.asarray(free)))
            assert 0 < first < steps
            strides[key] = first + made(steps - first, free - 1) + made(first, free)
        return strides[key]

    # Griewank and Walther, (4): r is how often a step is made at most.
    r = next(r for r in range(steps) if math.comb(free + r, free) >= steps)
    assert made(steps, free) == r * steps - math.comb(free + r, free + 1)


def test_no_step_is_made_more_than_twice_again_by_default() -> None:
    for steps in (2, 10, 1000, 10**6):
        rows = int((2 * steps) ** 0.5) + 2
        assert math.comb(rows - 1 + 2, 2) >= steps


# --- stacks ---------------------------------------------------------------------------


@pytest.mark.parametrize("most", [None, 6])
@pytest.mark.parametrize("mode", ["recompute", "save"])
@pytest.mark.parametrize("step", [lambda y, x: 2 * y, lambda y, x: hf.sin(y) * x])
def test_the_loop_runs_once_and_stacks_what_the_backward_pass_reads(
    step: Any, mode: str, most: int | None
) -> None:
    """Also where that is nothing: then empty rows tell how many steps there were."""

    def loop(x: Any, n: Any) -> Any:
        def body(i: Any, y: Any, odd: Any, none: Any) -> Any:
            return i + 1, step(y, x), hf.logical_not(odd), none

        options: Any = {"reverse_mode": mode, "max_steps": most}
        first = (0, x, False, None)
        return hf.while_loop(lambda i, *_: i < n, body, first, **options)[1]

    gradient, jitted = hf.grad(loop), hf.jit(hf.grad(loop))
    graph = hf.trace(gradient, 0.5, 3).graph
    eliminate_dead_code(graph)
    assert [n.op.name for n in graph.nodes if n.graphs] == ["while_loop", "scan"]
    text = format_graph(graph)
    assert format_graph(parse(text, OPERATORS)) == text
    for n in (0, 1, 6):
        y = hf.asarray(0.7)
        with hf.debug():
            want = gradient(y, n).item()
        got = gradient(y, n).item(), jitted(y, hf.asarray(n)).item()
        assert got == pytest.approx((want, want), rel=1e-6)


def test_examples_that_stop_together_are_one_loop() -> None:
    def power(x: Any, n: Any) -> Any:
        return hf.sum(hf.fori_loop(0, n, lambda i, y: y * x, hf.ones_like(x)))

    gradients = hf.jit(hf.vmap(hf.grad(power), in_dims=(0, None)))
    xs = np.linspace(0.5, 3.0, 15).reshape(3, 5)  # more than the Jacobian has columns
    np.testing.assert_allclose(gradients(xs, hf.asarray(4)), 4 * xs**3)
    assert [n.op.name for n in gradients.graph.nodes if n.graphs] == [
        "while_loop",
        "scan",
    ]
