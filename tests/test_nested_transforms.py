"""Every operator under transforms of transforms, where sizes are symbols.

A program maps a vector of any length to one of that length, and so does a transform of
it: they nest in every order. Debug mode, which is plain Python, is the reference.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hopflow
from hopflow.testing.executions import in_turn, run_debug
from hopflow.testing.requires import load

hf: Any = hopflow
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("verified")]

Function = Callable[[Any], Any]


# --- programs -------------------------------------------------------------------------


def total(x: Any) -> Any:
    return hf.sum(hf.sin(x))


def loop(**options: Any) -> Function:
    def f(x: Any) -> Any:
        step = lambda i, a: (i + 1, hf.sin(a) * x)  # noqa: E731
        return hf.while_loop(lambda i, _: i < 3, step, (0, x), **options)[1]

    return f


def loop_that_reads_its_carry(x: Any) -> Any:
    def test(i: Any, a: Any) -> Any:
        return (i < 4) & (total(a) < 1e6)

    return hf.while_loop(test, lambda i, a: (i + 1, hf.sin(a) * x + 1), (0, x))[1]


def scan(**options: Any) -> Function:
    def f(x: Any) -> Any:
        step = lambda c, v: (hf.sin(c) * v, c * v + hf.sum(x))  # noqa: E731
        carry, rows, *_ = hf.scan(step, x, x, **options)
        return carry * hf.sum(rows)

    return f


def stacked_rows(x: Any) -> Any:
    step = lambda c, v: (hf.sin(c) * v, hf.sin(c * v))  # noqa: E731
    carry, rows = hf.scan(step, hf.sum(x), x, reverse=True)
    return carry + rows


def three_branches(x: Any) -> Any:
    branches = [
        lambda v: v,
        lambda v: hf.exp(hf.sin(v)) * v,
        lambda v: hf.cos(v) * hf.tanh(v) * x,
    ]
    return hf.switch(hf.astype(total(x) > -100, hf.int64) + 1, branches, (x,))


def called_twice(x: Any) -> Any:
    f = hf.subgraph(lambda a, b: hf.sin(a) * b)
    return f(f(x, x), x)


def with_tangent_rule(x: Any) -> Any:
    f = hf.custom_jvp(lambda x: hf.sin(x) * x)
    f.defjvp(lambda xs, ts: (f(*xs), ts[0] * (hf.cos(xs[0]) * xs[0] + hf.sin(xs[0]))))
    return hf.fori_loop(0, 2, lambda _, a: f(a) * x, x)


def with_cotangent_rule(x: Any) -> Any:
    f = hf.custom_vjp(lambda x: hf.sin(x) * x)
    f.defvjp(
        lambda x: (hf.sin(x) * x, x),
        lambda x, ct: (ct * (hf.cos(x) * x + hf.sin(x)),),
    )
    return hf.scan(lambda c, v: (f(c) * v, c), x, x)[0]


def batched_branches(x: Any) -> Any:
    def one(v: Any) -> Any:
        return hf.cond(v > 0.3, lambda: hf.sin(v) * hf.exp(v), lambda: hf.cos(v))

    return hf.vmap(one)(x)


def batched_choice(x: Any) -> Any:
    def one(v: Any) -> Any:
        other = lambda: hf.cos(v)  # noqa: E731
        return hf.cond(total(x) > -100, lambda: hf.sin(hf.exp(v)) * v, other)

    return hf.vmap(one)(x)


def batched_scan(x: Any) -> Any:
    def one(v: Any) -> Any:
        return hf.scan(lambda c, y: (hf.sin(c) * y, c), v, x)[1]

    return hf.sum(hf.vmap(one)(x), axis=1)


PROGRAMS: Final[dict[str, Function]] = {
    "cond": lambda x: hf.cond(total(x) > -100, lambda: x * hf.sin(x), lambda: x),
    "switch": three_branches,
    "fori_loop": lambda x: hf.fori_loop(0, 3, lambda _, a: hf.sin(a) * x, x),
    "while_loop": loop_that_reads_its_carry,
    "while_loop, saved": loop(reverse_mode="save"),
    "while_loop, checkpoints": loop(reverse_mode="checkpoint"),
    "while_loop, 2 checkpoints": loop(reverse_mode=hf.Checkpoint(2)),
    "while_loop, max_steps": loop(max_steps=4),
    "scan": scan(),
    "scan, until": scan(until=lambda c: total(c) > 1e6),
    "scan, reverse": stacked_rows,
    "map": lambda x: hf.map(lambda v: hf.sin(v) * hf.sum(x), x),
    "map, in batches": lambda x: hf.map(lambda v: hf.sin(v) * v, x, batch_size=2),
    "map of while_loop": lambda x: hf.map(
        lambda v: hf.while_loop(lambda a: a < 5, lambda a: a * a + 1 + v * v, v), x
    ),
    "associative_scan": lambda x: hf.associative_scan(
        lambda a, b: a * b + a + b, x * 0.5
    ),
    "subgraph": called_twice,
    "checkpoint": lambda x: hf.checkpoint(lambda a: hf.sin(a) * hf.sum(a))(x),
    "custom_jvp": with_tangent_rule,
    "custom_vjp": with_cotangent_rule,
    "vmap of fori_loop": lambda x: hf.vmap(
        lambda v: hf.fori_loop(0, 3, lambda _, a: hf.sin(a) * v, v)
    )(x),
    "vmap of cond": batched_branches,
    "vmap of cond, one choice": batched_choice,
    "vmap of scan": batched_scan,
}

# --- transforms -----------------------------------------------------------------------


def scalar(f: Function) -> Function:
    return lambda x: hf.sum(hf.cos(f(x)))


def batched(f: Function) -> Function:
    """One program for each of `n + 1` scalars, which all share a vector."""

    def call(x: Any) -> Any:
        return hf.sum(hf.vmap(lambda s: f(x * s))(hf.concat([x, x[:1]])), axis=0)

    return call


def batched_rows(f: Function) -> Function:
    def call(x: Any) -> Any:
        return hf.sum(hf.vmap(f)(hf.concat([x, x[:1]])[:, None] * x), axis=0)

    return call


TRANSFORMS: Final[dict[str, Callable[[Function], Function]]] = {
    "grad": lambda f: hf.grad(scalar(f)),
    "jvp": lambda f: lambda x: hf.jvp(f, (x,), (hf.cos(x),))[1],
    "vmap": batched,
    "vmap of rows": batched_rows,
    "hessian": lambda f: lambda x: hf.hessian(scalar(f))(x) @ hf.cos(x),
    "jacfwd": lambda f: lambda x: hf.jacfwd(f)(x) @ hf.cos(x),
    "jacrev": lambda f: lambda x: hf.jacrev(f)(x) @ hf.cos(x),
    "linearize": lambda f: lambda x: hf.linearize(f, x)[1](hf.cos(x)),
    "vjp": lambda f: lambda x: hf.vjp(f, x)[1](hf.cos(x))[0],
    "checkpoint": lambda f: hf.checkpoint(f),
}
FORWARD: Final = frozenset(["jvp", "jacfwd", "linearize"])


def fits(program: str, transforms: Sequence[str]) -> bool:
    """Whether a program has what transforms ask for: a `custom_vjp` has no tangents."""
    return "custom_vjp" not in program or FORWARD.isdisjoint(transforms)


def transformed(program: str, transforms: Sequence[str]) -> Function:
    """A program under transforms, of which the last is done first."""
    f = PROGRAMS[program]
    for name in reversed(transforms):
        f = TRANSFORMS[name](f)
    return f


def vector(length: int) -> Any:
    return np.linspace(0.2, 0.9, length)


def check(f: Function, jitted: Function, lengths: Sequence[int]) -> None:
    """Compare a jitted function with plain Python at vectors of these lengths."""
    for length in lengths:
        want = np.asarray(run_debug(f, hf.asarray(vector(length))))
        got = np.asarray(jitted(hf.asarray(vector(length))))
        scale = 1 + np.abs(want).max()
        np.testing.assert_allclose(got / scale, want / scale, atol=1e-10)


WAYS: Final = ("dynamic", "at a second size")


def check_way(way: str, f: Function, lengths: Sequence[int]) -> None:
    check(f, hf.jit(f, dynamic=True if way == "dynamic" else None), lengths)


# --- facts ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("program", "transform", "way"), in_turn(list(PROGRAMS), list(TRANSFORMS), of=WAYS)
)
def test_an_operator_has_each_transform_at_all_sizes(
    program: str, transform: str, way: str
) -> None:
    if fits(program, [transform]):
        check_way(way, transformed(program, [transform]), (3, 4))


@pytest.mark.parametrize(
    ("program", "outer", "inner"),
    # Every fifth; the property below draws of the others.
    in_turn(list(PROGRAMS), list(TRANSFORMS), of=list(TRANSFORMS))[::5],
)
def test_an_operator_has_transforms_of_transforms_at_all_sizes(
    program: str, outer: str, inner: str
) -> None:
    if fits(program, [outer, inner]):
        check_way("dynamic", transformed(program, [outer, inner]), (2,))


@settings(max_examples=settings.default.max_examples // 10)  # type: ignore[union-attr]
@given(
    st.sampled_from(list(PROGRAMS)),
    # Fourth derivatives take LLVM minutes.
    st.lists(st.sampled_from(list(TRANSFORMS)), min_size=2, max_size=3).filter(
        lambda names: names.count("hessian") < 2
    ),
    st.sampled_from(WAYS),
)
def test_transforms_nest_in_every_order(
    program: str, transforms: list[str], way: str
) -> None:
    if fits(program, transforms):
        check_way(way, transformed(program, transforms), (2, 3))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["grad", "hessian", "vmap of grad"])
def test_derivatives_of_a_batched_loop_are_those_of_jax(name: str, way: str) -> None:
    jax = load("jax")

    def function(m: Any, d: Any, fori_loop: Any) -> Function:
        def power(v: Any) -> Any:
            return fori_loop(0, 3, lambda _, a: a * v, v)

        f = lambda x: m.sum(d.vmap(power)(x))  # noqa: E731
        if name == "vmap of grad":
            vmapped: Function = d.vmap(d.grad(f))
            return lambda x: vmapped(x[:, None] * x)
        found: Function = getattr(d, name)(f)
        return found

    jitted = hf.jit(function(hf, hf, hf.fori_loop), dynamic=way == "dynamic" or None)
    theirs = function(jax.numpy, jax, jax.lax.fori_loop)
    for length in (3, 4, 5):
        with jax.enable_x64(True):
            want = np.asarray(theirs(vector(length)))
        np.testing.assert_allclose(jitted(hf.asarray(vector(length))), want)


def test_a_loop_has_as_many_batch_elements_as_an_expression_says() -> None:
    """The loop knows the size by a symbol, and what it closes over by `n + 1`."""

    def f(x: Any) -> Any:
        scales = hf.concat([x, x[:1]])
        return hf.vmap(lambda s: hf.fori_loop(0, 2, lambda _, a: a * x * s, x))(scales)

    check(f, hf.jit(f, dynamic=True), (2, 3, 5))
