"""`vmap`: arguments and results, nesting, jit, derivatives, errors."""

from functools import partial
from typing import Any

import numpy as np
import pytest

import hopflow
from hopflow.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    AxisError,
    LengthError,
    MutationError,
    ResultTypeError,
    StructureError,
)
from hopflow.testing.executions import NAMES, RUNNERS, agree, fails
from hopflow.testing.requires import requires

pytestmark = pytest.mark.slow

hf: Any = hopflow

each_execution = pytest.mark.parametrize("run", RUNNERS, ids=NAMES)

X = np.arange(24, dtype=np.float32).reshape(2, 3, 4) / 10 - 1
V = np.linspace(-1, 1, 4, dtype=np.float32)
M = np.arange(12, dtype=np.float32).reshape(3, 4)


def t(x: Any) -> Any:
    return hf.asarray(x)


# --- where the examples lie -----------------------------------------------------------


@each_execution
@pytest.mark.parametrize("dim", [0, 1, 2, -1, -3])
@pytest.mark.parametrize("out", [0, 1, -1])
def test_examples_lie_where_the_user_says(run: Any, dim: int, out: int) -> None:
    got = run(hf.vmap(lambda x: x @ x.T, dim, out), t(X))
    rows = np.moveaxis(X, dim, 0)
    agree(got, np.moveaxis(np.stack([x @ x.T for x in rows]), 0, out))


def f_tree(a: Any, b: Any, *, c: Any) -> Any:
    return {"p": a["x"] * b[0] + c, "q": (a["k"], b[1])}


@each_execution
@pytest.mark.parametrize(
    "in_dims",
    [
        ({"x": 0, "k": None}, (None, 1)),
        [{"x": 0, "k": None}, (None, -1)],
        ({"x": 0, "k": None}, [None, 1]),
    ],
)
def test_dimensions_are_trees_that_begin_as_the_arguments(
    run: Any, in_dims: Any
) -> None:
    b = [V, M] if isinstance(in_dims[1], list) else (V, M)

    def f(x: Any, v: Any, m: Any, c: Any) -> Any:
        own = [v, m] if isinstance(in_dims[1], list) else (v, m)
        mapped = hf.vmap(f_tree, in_dims, {"p": 1, "q": (None, 0)})
        return mapped({"x": x, "k": 2.0}, own, c=c)

    x = M.T  # four examples
    got = run(f, t(x[:, :1]), t(b[0]), t(b[1]), t(V))
    want = [x[i, :1] * V + V[i] for i in range(4)]
    agree(got, {"p": np.stack(want, 1), "q": (np.float32(2), M.T)})


def test_what_is_the_same_for_all_examples_is_passed_as_it_is() -> None:
    seen = []

    def f(x: Any, n: Any, name: Any, none: Any) -> Any:
        seen.append((n, name, none))
        return x * n, none

    got = hf.vmap(f, (0, None, None, 0))(t(V), 3, "a", None)
    agree(got, (V * 3, None))
    assert seen == [(3, "a", None)]


@each_execution
def test_a_result_that_is_the_same_for_all_examples(run: Any) -> None:
    w = t(M)

    def f(x: Any) -> Any:
        return hf.vmap(lambda v: (hf.sum(w), 1, v), out_dims=(0, None, 0))(x)

    agree(run(f, t(V)), (np.full(4, 66, np.float32), np.int64(1), V))


@pytest.mark.parametrize("count", [0, 1])
@each_execution
def test_no_example_and_one(run: Any, count: int) -> None:
    got = run(hf.vmap(lambda x: (x @ x, hf.sort(x)[::-1], x[1])), t(M[:count]))
    rows = M[:count]
    agree(got, ((rows * rows).sum(1), np.sort(rows)[:, ::-1], rows[:, 1]))


def test_results_share_memory_with_no_argument() -> None:
    x = t(V.copy())
    for result in hf.vmap(lambda v: (v, v, 1.0))(x):
        result[0] = 7.0
    agree(x, V)


# --- nesting --------------------------------------------------------------------------


@each_execution
def test_vmap_of_vmap(run: Any) -> None:
    outer = hf.vmap(hf.vmap(lambda a, b: a * b - 1, (None, 0)), (0, None))
    agree(run(outer, t(V), t(M[0])), np.outer(V, M[0]) - 1)


def test_vmap_of_jit_and_jit_of_vmap() -> None:
    def f(x: Any, y: Any) -> Any:
        return hf.exp(x) @ y

    want = np.stack([np.exp(x) @ V for x in X])
    for g in (hf.vmap(hf.jit(f), (0, None)), hf.jit(hf.vmap(f, (0, None)))):
        agree(g(t(X), t(V)), want)


@pytest.mark.parametrize("op", ["plain", "scan", "while", "cond", "map", "sort"])
def test_a_symbolic_number_of_examples(op: str) -> None:
    """One program serves all numbers of examples."""

    def one(x: Any) -> Any:
        match op:
            case "plain":
                return hf.sum(x * 2 + V) + x @ t(M.T[:, 0])
            case "scan":
                return hf.scan(lambda c, a: (c + a, c * a), 0.0, x)
            case "while":
                return hf.while_loop(lambda a: a[0] < 5, lambda a: a * 2 + 1, hf.abs(x))
            case "cond":
                return hf.cond(x[1] > 0.5, hf.sin, hf.cos, (x,))
            case "map":
                return hf.map(lambda a: a * hf.sum(x), x)
            case _:
                return hf.sort(x), hf.take(x, hf.argmax(x))

    jitted = hf.jit(lambda x: hf.vmap(one)(x), dynamic=True)
    traces = 0
    for n in (5, 3, 2, 6):
        x = np.random.default_rng(n).normal(size=(n, 4)).astype(np.float32)
        rows = [one(t(row)) for row in x]
        before = hf.stats().traces
        agree(jitted(t(x)), stacked(rows))
        traces += hf.stats().traces - before
    assert traces == 1


def stacked(rows: Any) -> Any:
    return hopflow.pytree.tree_map(
        lambda *xs: np.stack(list(map(np.asarray, xs))), *rows
    )


# --- what is closed over --------------------------------------------------------------


@each_execution
def test_tensors_of_outside_are_the_same_for_all_examples(run: Any) -> None:
    w = t(M)

    def f(x: Any) -> Any:
        y = x * 2
        return hf.vmap(lambda v: hf.vmap(lambda u: w @ v + u * y[0, 0, 0])(v[:2]))(y[0])

    rows = X[0] * 2
    want = [[M @ v + u * rows[0, 0] for u in v[:2]] for v in rows]
    agree(run(f, t(X)), np.asarray(want))


def test_a_tensor_that_is_written_later_is_read_anew() -> None:
    w = t(np.ones(3, np.float32))
    jitted = hf.jit(hf.vmap(lambda x: w * x))
    first = jitted(t(V))
    w[0] = 5.0
    assert np.asarray(first)[0, 0] == -1
    assert np.asarray(jitted(t(V)))[0, 0] == -5


def test_writes_to_what_the_function_made_itself_and_to_arguments() -> None:
    def f(x: Any) -> Any:
        y, z = hf.zeros(4), hf.asarray([1.0, 2.0])
        y[1:3] = x[:2]
        z[0] += x[0]
        x[0] = 9.0
        return y, z, x

    x = t(M.copy())
    y, z, own = hf.vmap(f)(x)
    agree(x, M)
    zeros = np.zeros((3, 1), np.float32)
    agree(y, np.concatenate([zeros, M[:, :2], zeros], 1))
    agree(z, np.stack([M[:, 0] + 1, np.full(3, 2, np.float32)], 1))
    agree(own[:, 0], np.full(3, 9, np.float32))


@pytest.mark.parametrize("count", [1, 5])
def test_random_numbers_follow_the_keys(count: int) -> None:
    keys = hf.random.split(hf.random.key(0), count)
    got = hf.vmap(lambda key: hf.random.normal(key, (3,)))(keys)
    agree(got, np.stack([np.asarray(hf.random.normal(k, (3,))) for k in keys]))
    same = hf.vmap(lambda x: x + hf.random.uniform(keys[0]))(hf.zeros(2))
    assert same[0] == same[1]


# --- derivatives ----------------------------------------------------------------------


def energy(x: Any, w: Any) -> Any:
    return hf.sum(hf.tanh(x * w) ** 2) + x[0] * w[1]


def test_vmap_of_grad_and_grad_of_vmap() -> None:
    x, w = t(M / 10), t(V)
    each = hf.stack([hf.grad(energy)(row, w) for row in x])
    agree(hf.vmap(hf.grad(energy), (0, None))(x, w), each)
    agree(hf.jit(hf.vmap(hf.grad(energy), (0, None)))(x, w), each)

    def total(x: Any, w: Any) -> Any:
        return hf.sum(hf.vmap(partial(energy, w=w))(x))

    agree(hf.grad(total)(x, w), each)
    by_w = [np.asarray(hf.grad(energy, 1)(row, w)) for row in x]
    agree(hf.grad(total, 1)(x, w), np.sum(by_w, 0))
    agree(hf.jit(hf.grad(total, 1))(x, w), np.sum(by_w, 0))


def test_jvp_of_vmap_and_vmap_of_jvp() -> None:
    x, w = t(M / 10), t(V)
    f = partial(energy, w=w)
    each = [hf.jvp(f, (row,), (w,)) for row in x]
    want = stacked(each)
    many = hf.vmap(lambda row: hf.jvp(f, (row,), (w,)))(x)
    agree(many, want)
    rows = hf.broadcast_to(w, x.shape)
    agree(hf.jvp(hf.vmap(f), (x,), (rows,)), want)


# --- JAX ------------------------------------------------------------------------------


@requires("jax")
@pytest.mark.parametrize("in_dims", [(0, None), (None, 1), (0, 1), (1, 0)])
@pytest.mark.parametrize("out", [0, 1])
def test_vmap_is_that_of_jax(in_dims: Any, out: int) -> None:
    import jax
    import jax.numpy as jnp

    x, y = np.random.default_rng(0).normal(size=(2, 3, 3)).astype(np.float32)

    def f(np: Any, a: Any, b: Any) -> Any:
        ab = np.sum(a) * b + a
        return np.sort(np.cumsum(ab) if np is jnp else np.cumulative_sum(ab)), np.where(
            ab > 0, np.sqrt(np.abs(ab)), b
        )

    a, b = ((v[0] if d is None else v) for v, d in zip((x, y), in_dims, strict=True))
    want = jax.vmap(partial(f, jnp), in_dims, out)(a, b)
    got = hf.vmap(partial(f, hf), in_dims, out)(t(a), t(b))
    agree(got, tuple(map(np.asarray, want)))


# --- errors ---------------------------------------------------------------------------


def identity(x: Any) -> Any:
    return x


def pair(a: Any, b: Any) -> Any:
    return a, b


class TestErrors:
    def test_arguments_of_another_kind(self) -> None:
        fails(
            ArgumentTypeError,
            "vmap: `f` must be a function, and is `int`.",
            lambda: hf.vmap(3),
        )
        fails(
            ArgumentTypeError,
            "vmap: `in_dims` must hold ints and None, and has `str`.",
            lambda: hf.vmap(identity, "a")(t(V)),
        )
        fails(
            ArgumentTypeError,
            "vmap: `x` must be a tensor or a number, and is `str`. Convert it with "
            "`hf.asarray`.",
            lambda: hf.vmap(identity)("a"),
        )

    def test_dimensions_of_another_structure(self) -> None:
        fails(
            StructureError,
            "vmap: `in_dims` must be an int, None, or a tree of these that begins as "
            "`args` does, PyTreeSpec((*,)), and is (0, 1).",
            lambda: hf.vmap(identity, (0, 1))(t(V)),
        )
        fails(
            StructureError,
            "vmap: `out_dims` must be an int, None, or a tree of these that begins as "
            "`result` does, PyTreeSpec(*), and is (0, 1).",
            lambda: hf.vmap(identity, 0, (0, 1))(t(V)),
        )

    def test_an_axis_that_is_not_there(self) -> None:
        fails(
            AxisError,
            "vmap: `x`, f32[4], has no axis 1 of examples. Name another one, or None "
            "for what is the same for all examples.",
            lambda: hf.vmap(identity, 1)(t(V)),
        )
        fails(
            AxisError,
            "vmap: `b`, i64[], is a scalar, and has no axis 0 of examples. Name None "
            "for what is the same for all examples; of a list of numbers, each of "
            "which is an argument by itself, make a tensor: `hf.asarray([...])`.",
            lambda: hf.vmap(pair)(t(V), 3),
        )
        fails(
            AxisError,
            "vmap: `result`, f32[4], has no axis 1 of examples. Name another one, or "
            "None for what is the same for all examples.",
            lambda: hf.vmap(identity, 0, 1)(t(V)),
        )

    def test_numbers_of_examples_that_differ(self) -> None:
        fails(
            LengthError,
            "vmap: all arguments must have as many examples. `a` has 4, and "
            "`b['w'][0]` has 3 along axis 0. Name another axis in `in_dims`, or None "
            "for what is the same for all.",
            lambda: hf.vmap(pair)(t(V), {"w": [t(M)]}),
        )

    def test_no_argument_with_examples(self) -> None:
        fails(
            ArgumentValueError,
            "vmap: no argument has examples. Name the axis of one in `in_dims`, or "
            "call the function as it is.",
            lambda: hf.vmap(identity, None)(t(V)),
        )

    def test_a_result_that_differs_and_must_not(self) -> None:
        fails(
            ArgumentValueError,
            "vmap: `out_dims` is None for `result[1]` of `pair`, which differs from "
            "example to example. Name an axis for the examples.",
            lambda: hf.vmap(pair, 0, (0, None))(t(V), t(V)),
        )

    def test_a_result_that_is_no_tensor(self) -> None:
        def f(x: Any) -> Any:
            return {"a": x, "b": "text"}

        fails(
            ResultTypeError,
            "vmap: `f` must return tensors or numbers, and its `result['b']` is `str`.",
            lambda: hf.vmap(f)(t(V)),
        )

    def test_a_write_to_a_tensor_of_outside(self) -> None:
        total = hf.zeros(3)

        def f(x: Any) -> Any:
            total[0] += x
            return x

        text = (
            "vmap: `f` writes to a captured tensor f32[3], but its examples are "
            "independent of each other. Return the new value instead."
        )
        fails(MutationError, text, lambda: hf.vmap(f)(t(V)))
        fails(MutationError, text, lambda: hf.jit(hf.vmap(f))(t(V)))
        agree(total, np.zeros(3, np.float32))
