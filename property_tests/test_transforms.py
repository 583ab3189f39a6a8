"""Derivatives and batching of random programs, with operators within each other.

The programs are trees, of smooth operations on f64, so that one of them is a program
for all sizes: what a step does is decided in each run.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st
from property_tests.trees import Tree, steps_of, trees

import hopflow
from hopflow import pytree
from hopflow.errors import MutationError
from hopflow.testing.arithmetic import Smooth
from hopflow.testing.executions import agree, interpreted, run_debug
from hopflow.testing.libraries import HOPFLOW, Library, jax_library
from hopflow.testing.requires import load

hf: Any = hopflow
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("verified")]
jax = load("jax")
JAX: Final = jax_library()
Function = Callable[..., Any]

RNG: Final = np.random.default_rng(0)
FLOATS: Final = (RNG.normal(size=(3, 2)), RNG.normal(size=3), RNG.normal(size=()))
OTHERS: Final = (np.array([2, 0, 1]), np.int64(2), np.array([True, False, True]))
TANGENTS: Final = tuple(RNG.normal(size=x.shape) for x in FLOATS)
BATCH: Final = 3
CLOSE: Final = 1e-9


# --- programs -------------------------------------------------------------------------


class Wide(Smooth):
    """All numbers are f64."""

    def number(self, x: Any) -> Any:
        return self.m.astype(x, self.m.float64)


programs = trees([*Smooth.operations], depth=3, most=4)
# JAX runs both branches under `vmap`, and has no writes.
in_jax_too = trees(
    [name for name in Smooth.operations if name not in ("guarded", "write")],
    depth=3,
    most=4,
)


def program(body: Tree, lib: Library = HOPFLOW) -> Function:
    """A function of `FLOATS` and `OTHERS` that returns its newest floats."""

    def f(*args: Any) -> Any:
        p = Wide([*args[3:], *args[:3]], lib=lib)
        steps_of(body)(p)
        floats = [v for v in p.values if v.dtype.kind == "f"]
        return {"newest": floats[-1], "more": tuple(floats[-4:-1])}

    return f


def scalar(f: Function, m: Any = hf) -> Function:
    """The results of `f` in one number."""

    def total(*args: Any) -> Any:
        result = f(*args)
        return sum(
            m.sum(m.cos(leaf + k))
            for k, leaf in enumerate([result["newest"], *result["more"]])
        )

    return total


def some(share: int) -> Callable[[Function], Function]:
    """A share of the examples that the profile allows."""
    profile: Any = settings.default
    return settings(max_examples=max(profile.max_examples // share, 1))


def unless_refused(test: Function) -> Function:
    """The test of programs with writes: what tracing cannot do, it says."""

    @functools.wraps(test)
    def run(**drawn: Any) -> None:
        try:
            test(**drawn)
        except MutationError:
            reject()

    return run


def eagerly(f: Function, *args: Any) -> Any:
    with interpreted():
        return f(*args)


def jitted(f: Function, *args: Any) -> Any:
    return hf.jit(f)(*args)


WAYS: Final = {"eager": eagerly, "jit": jitted}


def close(got: Any, want: Any, rtol: float = CLOSE) -> None:
    """That trees are equal, as seen from the largest of their elements."""
    largest = max([1.0, *(np.max(np.abs(x), initial=0) for x in leaves(want))])
    agree(
        pytree.tree_map(lambda x: np.asarray(x) / largest, got),
        pytree.tree_map(lambda x: np.asarray(x) / largest, want),
        rtol=rtol,
    )


def leaves(tree: Any) -> list[Any]:
    return [np.asarray(x) for x in pytree.flatten(tree)[0]]


def inner(a: Any, b: Any) -> float:
    return float(sum(np.sum(x * y) for x, y in zip(leaves(a), leaves(b), strict=True)))


# --- derivatives ----------------------------------------------------------------------


def moved(step: float) -> tuple[Any, ...]:
    return tuple(x + step * t for x, t in zip(FLOATS, TANGENTS, strict=True))


def differences(f: Function, step: float) -> list[Any]:
    after, before = leaves(f(*moved(step))), leaves(f(*moved(-step)))
    return [(a - b) / (2 * step) for a, b in zip(after, before, strict=True)]


@some(20)
@given(programs)
@unless_refused
def test_jvp_is_central_differences_and_vjp_its_transpose(body: Any) -> None:
    def f(*floats: Any) -> Any:
        return program(body)(*floats, *map(hf.asarray, OTHERS))

    def plain(*floats: Any) -> Any:
        return run_debug(f, *map(hf.asarray, floats))

    coarse, fine = differences(plain, 2e-5), differences(plain, 1e-5)
    result = leaves(plain(*FLOATS))
    cts = [np.cos(np.arange(y.size) + 1.0).reshape(y.shape) for y in result]

    def pulled(*floats: Any) -> Any:
        out, pull = hf.vjp(f, *floats)
        return out, pull(pytree.unflatten(pytree.flatten(out)[1], cts))

    for name, way in WAYS.items():
        out, tangent = way(lambda *xs: hf.jvp(f, xs, TANGENTS), *FLOATS)
        close(leaves(out), result)
        for got, a, b in zip(leaves(tangent), coarse, fine, strict=True):
            error = np.abs(a - b) + 1e-6 * (1 + np.abs(b).max(initial=0))
            assert (np.abs(got - b) <= 3 * error).all(), (name, got, b)
        back, grads = way(pulled, *FLOATS)
        close(leaves(back), result)
        want = inner(cts, tangent)
        size = max(1.0, inner([abs(c) for c in cts], [abs(t) for t in leaves(tangent)]))
        assert abs(inner(grads, TANGENTS) - want) <= CLOSE * size, name


def unrolled_hessian(f: Function, *floats: Any) -> Any:
    """The rows of the hessian of `f`, by plain Python: tangents of gradients."""
    rows = []
    for k, x in enumerate(floats):
        for i in range(x.size):
            basis = tuple(np.zeros_like(y) for y in floats)
            basis[k].flat[i] = 1.0
            rows.append(run_debug(hf.jvp, f, floats, basis)[1])
    return rows


def as_matrix(hessian: Any) -> Any:
    """The blocks of a hessian as one matrix."""
    sizes = [x.size for x in FLOATS]
    rows = [
        [np.asarray(block).reshape(m, n) for n, block in zip(sizes, row, strict=True)]
        for m, row in zip(sizes, hessian, strict=True)
    ]
    return np.block(rows)


@some(50)
@given(programs)
@unless_refused
def test_second_derivatives_are_those_of_plain_python(body: Any) -> None:
    f = scalar(lambda *floats: program(body)(*floats, *map(hf.asarray, OTHERS)))
    first = hf.grad(f, (0, 1, 2))
    gradient = run_debug(first, *FLOATS)
    rows = unrolled_hessian(first, *FLOATS)
    want = np.stack([np.concatenate([x.ravel() for x in leaves(row)]) for row in rows])
    close(want, want.T)
    forward_twice = want @ np.concatenate([t.ravel() for t in TANGENTS])
    for way in WAYS.values():
        close(way(first, *FLOATS), gradient)
        close(as_matrix(way(hf.hessian(f, (0, 1, 2)), *FLOATS)), want)
        for product in (along_then_back(f), back_twice(f)):
            found = way(product, *FLOATS)
            close(np.concatenate([x.ravel() for x in leaves(found)]), forward_twice)


def along_then_back(f: Function) -> Function:
    found: Function = hf.grad(lambda *xs: hf.jvp(f, xs, TANGENTS)[1], (0, 1, 2))
    return found


def back_twice(f: Function) -> Function:
    def along(*xs: Any) -> Any:
        grads = hf.grad(f, (0, 1, 2))(*xs)
        return sum(hf.sum(g * t) for g, t in zip(grads, TANGENTS, strict=True))

    found: Function = hf.grad(along, (0, 1, 2))
    return found


# --- batching -------------------------------------------------------------------------


def batched(x: Any) -> Any:
    """Examples like `x`, that differ."""
    if x.dtype.kind == "f":
        return np.stack([x, x[::-1] * 0.7 if x.ndim else x - 1.1, np.zeros_like(x)])
    if x.dtype.kind == "b":
        return np.stack([x, ~x, x & False])
    return np.stack([x, x - 1, x + 2])


ALL: Final = (*FLOATS, *OTHERS)
which = st.tuples(*[st.booleans()] * len(ALL)).filter(any)


def examples(mask: Sequence[bool], like: Sequence[Any] = ALL) -> list[Any]:
    return [batched(x) if b else x for x, b in zip(like, mask, strict=True)]


def loop_of(f: Function, args: Sequence[Any], mask: Sequence[bool]) -> Any:
    """What `vmap` is: the results of each example, stacked."""
    rows = [
        f(*(x[i] if b else x for x, b in zip(args, mask, strict=True)))
        for i in range(BATCH)
    ]
    return pytree.tree_map(lambda *xs: np.stack([np.asarray(x) for x in xs]), *rows)


def axes(mask: Sequence[bool]) -> tuple[int | None, ...]:
    return tuple(0 if b else None for b in mask)


@some(15)
@given(programs, which)
@unless_refused
def test_vmap_is_a_loop_over_the_examples(body: Any, mask: Any) -> None:
    f = program(body)
    args = examples(mask)
    want = loop_of(lambda *xs: run_debug(f, *map(hf.asarray, xs)), args, mask)
    for way in WAYS.values():
        close(way(hf.vmap(f, in_dims=axes(mask)), *map(hf.asarray, args)), want)


@some(34)
@given(programs, which, which)
@unless_refused
def test_vmaps_nest(body: Any, outer: Any, inner: Any) -> None:
    f = program(body)
    args = examples(outer, examples(inner))

    def one(*xs: Any) -> Any:
        rows = [hf.asarray(np.array(x)) for x in xs]
        return loop_of(lambda *xs: run_debug(f, *map(hf.asarray, xs)), rows, inner)

    want = loop_of(one, args, outer)
    nested = hf.vmap(hf.vmap(f, in_dims=axes(inner)), in_dims=axes(outer))
    for way in WAYS.values():
        close(way(nested, *map(hf.asarray, args)), want)


@some(50)
@given(programs, which)
@unless_refused
def test_vmap_and_grad_commute(body: Any, mask: Any) -> None:
    f = scalar(program(body))
    args = examples(mask)
    gradient = hf.value_and_grad(f, (0, 1, 2))
    want = loop_of(lambda *xs: run_debug(gradient, *map(hf.asarray, xs)), args, mask)

    def total(*xs: Any) -> Any:
        return hf.sum(hf.vmap(f, in_dims=axes(mask))(*xs))

    summed = [
        g if b else np.sum(g, axis=0) for g, b in zip(want[1], mask, strict=False)
    ]
    for way in WAYS.values():
        given = tuple(map(hf.asarray, args))
        close(way(hf.vmap(gradient, in_dims=axes(mask)), *given), want)
        close(way(hf.grad(total, (0, 1, 2)), *given), tuple(summed))


# --- sizes ----------------------------------------------------------------------------


def of_size(n: int, m: int) -> tuple[Any, ...]:
    """Arguments of which the first is of n rows and m columns."""
    x = np.cos(np.arange(n * m) + 0.5).reshape(n, m)
    whole = np.arange(n) * 2 % 3
    return x, np.sin(np.arange(n) + 0.25), np.array(0.7), whole, np.int64(2), whole > 0


lengths = st.lists(
    st.tuples(st.integers(0, 4), st.integers(0, 3)), min_size=2, max_size=4
)


@some(34)
@given(programs, lengths)
@unless_refused
def test_derivatives_are_right_at_all_sizes(body: Any, sizes: Any) -> None:
    gradient = hf.value_and_grad(scalar(program(body)), (0, 1, 2))
    for_all = hf.jit(gradient, dynamic=True)
    for n, m in sizes:
        args = tuple(map(hf.asarray, of_size(n, m)))
        close(for_all(*args), run_debug(gradient, *args))


@some(34)
@given(programs, which, lengths)
@unless_refused
def test_vmap_is_right_at_all_sizes(body: Any, mask: Any, sizes: Any) -> None:
    f = program(body)
    for_all = hf.jit(hf.vmap(f, in_dims=axes(mask)), dynamic=True)
    for n, m in sizes:
        given = [
            batched(x) if b else x for x, b in zip(of_size(n, m), mask, strict=True)
        ]
        want = loop_of(lambda *xs: run_debug(f, *map(hf.asarray, xs)), given, mask)
        for count in (BATCH, 1, 0):
            few = [x[:count] if b else x for x, b in zip(given, mask, strict=True)]
            first = pytree.tree_map(operator.itemgetter(slice(count)), want)
            close(for_all(*map(hf.asarray, few)), first)


# --- JAX ------------------------------------------------------------------------------


@some(50)
@given(in_jax_too, which)
def test_all_is_as_in_jax(body: Any, mask: Any) -> None:
    def results(m: Any, d: Any, lib: Library) -> Function:
        f = scalar(program(body, lib), m)

        def gradient(*xs: Any) -> Any:
            return d.grad(f, (0, 1, 2))(*xs)

        def transformed(*xs: Any) -> Any:
            def along(*floats: Any) -> Any:
                return gradient(*floats, *xs[3:])

            return d.jvp(along, xs[:3], TANGENTS)

        return transformed

    args = examples(mask)
    with jax.enable_x64(True):
        want = jax.jit(results(jax.numpy, jax, JAX))(*ALL)
        rows = jax.jit(jax.vmap(results(jax.numpy, jax, JAX), axes(mask)))(*args)
    ours = results(hf, hf, HOPFLOW)
    close(jitted(ours, *ALL), pytree.tree_map(np.asarray, want))
    close(
        jitted(hf.vmap(ours, in_dims=axes(mask)), *args),
        pytree.tree_map(np.asarray, rows),
    )
