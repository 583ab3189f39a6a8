"""Subgraphs: one trace, one derivative and one native function for many calls."""

import inspect
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from typing import Any

import numpy as np
import pytest

import hopflow as hf
from hopflow import pytree
from hopflow.compiler.pipeline import clear_cache
from hopflow.errors import CheckError, UnhashableCaptureError
from hopflow.graph.core import Graph
from hopflow.testing.requires import requires

pytestmark = pytest.mark.slow

MANY = 16
RNG = np.random.default_rng(0)
X = RNG.normal(size=(4, 8))
WEIGHTS = [RNG.normal(size=(8, 8)) * 0.3 for _ in range(MANY)]
BIASES = [RNG.normal(size=8) for _ in range(MANY)]


@pytest.fixture(autouse=True)
def _nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    clear_cache()
    monkeypatch.setattr("hopflow.hops.invoke_subgraph._cache", OrderedDict())


def block(x: Any, w: Any, b: Any, m: Any = hf) -> Any:
    h = m.tanh(x @ w + b)
    mean = m.mean(h, axis=-1, keepdims=True)
    return x + (h - mean) / m.sqrt(m.mean(h * h, axis=-1, keepdims=True) + 1e-5)


class Layer(hf.nn.Module):
    w: Any
    b: Any

    @hf.subgraph
    def forward(self, x: Any) -> Any:
        return block(x, self.w, self.b)


def plain(x: Any, ws: Any, bs: Any) -> Any:
    for w, b in zip(ws, bs, strict=True):
        x = block(x, w, b)
    return hf.sum(x * x)


def as_operands(x: Any, ws: Any, bs: Any) -> Any:
    shared = hf.subgraph(lambda x, w, b: block(x, w, b))
    for w, b in zip(ws, bs, strict=True):
        x = shared(x, w, b)
    return hf.sum(x * x)


def in_cells(x: Any, ws: Any, bs: Any) -> Any:
    for w, b in zip(ws, bs, strict=True):
        x = hf.invoke_subgraph(lambda x: block(x, w, b), x)  # noqa: B023
    return hf.sum(x * x)


def in_a_tree(x: Any, ws: Any, bs: Any) -> Any:
    for w, b in zip(ws, bs, strict=True):
        parts = {"w": w, "rest": [b]}

        @hf.subgraph
        def layer(x: Any) -> Any:
            return block(x, parts["w"], parts["rest"][0])  # noqa: B023

        x = layer(x)
    return hf.sum(x * x)


def in_modules(x: Any, ws: Any, bs: Any) -> Any:
    for layer in [Layer(w, b) for w, b in zip(ws, bs, strict=True)]:
        x = layer.forward(x)
    return hf.sum(x * x)


WAYS = [as_operands, in_cells, in_a_tree, in_modules]
each_way = pytest.mark.parametrize("model", WAYS, ids=lambda f: f.__name__)


def same(got: Any, want: Any, tolerance: float = 1e-7) -> None:
    got, want = (pytree.flatten(tree)[0] for tree in (got, want))
    for one, two in zip(got, want, strict=True):
        np.testing.assert_allclose(
            np.asarray(one), np.asarray(two), rtol=tolerance, atol=tolerance
        )


@contextmanager
def counting(**wanted: int) -> Iterator[None]:
    """The block does so much of this; see `hf.stats`."""
    before = hf.stats()
    yield
    after = hf.stats()
    found = {key: getattr(after, key) - getattr(before, key) for key in wanted}
    assert found == wanted


def bodies(graph: Graph) -> set[int]:
    """The distinct bodies of calls in a graph."""
    calls = [n for n in graph.walk() if n.graphs and n.op.is_call]
    return {id(n.params["body"]) for n in calls}


def line_of(f: Callable[..., Any], text: str) -> str:
    """`file.py:12` of the line of `f` that has `text` in it."""
    lines, first = inspect.getsourcelines(f)
    [number] = [first + i for i, line in enumerate(lines) if text in line]
    return f"{os.path.basename(__file__)}:{number}"


def inputs(dtype: str = "float64") -> tuple[Any, Any, Any]:
    def tensors(arrays: Any) -> Any:
        return [hf.asarray(a.astype(dtype)) for a in arrays]

    return hf.asarray(X.astype(dtype)), tensors(WEIGHTS), tensors(BIASES)


# --- one of each ----------------------------------------------------------------------


@each_way
def test_layers_are_one_trace_one_body_and_one_function(model: Any) -> None:
    args = inputs()
    model(*args)  # what another test may have traced already
    jitted = hf.jit(model)
    with counting(body_traces=0, functions=1, compiles=1):
        got = jitted(*args)
    same(got, plain(*args))
    assert len(bodies(jitted.graph)) == 1


@each_way
def test_so_are_the_derivatives_of_layers(model: Any) -> None:
    args = inputs()
    jitted = hf.jit(hf.grad(model, argnums=(0, 1, 2)))
    with counting(functions=2):
        got = jitted(*args)
    same(got, hf.jit(hf.grad(plain, argnums=(0, 1, 2)))(*args))
    assert len(bodies(jitted.graph)) == 2  # what also saves residuals, and the backward


def transformed(model: Any) -> dict[str, Callable[[Any, Any, Any], Any]]:
    def squares(x: Any, ws: Any, bs: Any) -> Any:
        return hf.sum(hf.grad(model)(x, ws, bs) ** 2)

    def jvp(x: Any, ws: Any, bs: Any) -> Any:
        return hf.jvp(lambda x: model(x, ws, bs), (x,), (x,))

    def each(f: Any, x: Any, ws: Any, bs: Any) -> Any:
        return hf.vmap(lambda x: f(x, ws, bs))(hf.stack([x, 2 * x]))

    return {
        "value": model,
        "jvp": jvp,
        "second order": hf.grad(squares),
        "vmap": partial(each, model),
        "vmap of grad": partial(each, hf.grad(model)),
        "grad of vmap": hf.grad(lambda *args: hf.sum(each(model, *args))),
    }


@pytest.mark.parametrize("how", transformed(plain))
@pytest.mark.parametrize("model", [as_operands, in_cells], ids=lambda f: f.__name__)
def test_a_transform_of_layers_is_that_of_the_layers_in_place(
    model: Any, how: str
) -> None:
    x, ws, bs = inputs()
    args = x, ws[:6], bs[:6]
    want = hf.jit(transformed(plain)[how])(*args)
    f = transformed(model)[how]
    for run in (hf.jit(f), hf.jit(f, dynamic=True), f):
        same(run(*args), want, 1e-6)
    assert len(bodies(hf.trace(f, *args).graph)) <= 4


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
@each_way
def test_layers_are_one_body_in_every_kind_of_trace(model: Any, mode: Any) -> None:
    args = inputs()
    traced = hf.trace(model, *args, mode=mode)
    same(traced(*args), plain(*args))
    assert len(bodies(traced.graph)) == 1


@requires("jax")
def test_layers_agree_with_jax() -> None:
    jax = import_module("jax")
    jnp = import_module("jax.numpy")
    args = inputs("float32")

    def theirs(x: Any, ws: Any, bs: Any) -> Any:
        for w, b in zip(ws, bs, strict=True):
            x = block(x, w, b, jnp)
        return jnp.sum(x * x)

    arrays = [X, WEIGHTS, BIASES]
    arrays = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), arrays)
    want = jax.jit(jax.grad(theirs, argnums=(0, 1, 2)))(*arrays)
    got = hf.jit(hf.grad(in_cells, argnums=(0, 1, 2)))(*args)
    same(got, want, 2e-3)


def test_one_body_serves_all_symbolic_sizes() -> None:
    layer = hf.subgraph(lambda x, w, b: hf.tanh(x @ w + b))

    def f(x: Any, y: Any, w: Any, b: Any) -> Any:
        for _ in range(20):
            x, y = layer(x, w, b), layer(y, w, b)
        return hf.sum(x) + hf.sum(y)

    jitted = hf.jit(f, dynamic=({0: True}, {0: True}, False, False))
    w, b = WEIGHTS[0], BIASES[0]
    want = sum(hf.sum(hf.jit(lambda x: _often(x, w, b))(X[:n])) for n in (3, 4))
    with counting(body_traces=1, functions=1):
        same(jitted(X[:3], X[:4], w, b), want)
    assert len(bodies(jitted.graph)) == 1
    with counting(traces=0):
        jitted(X[:2], X[:3], w, b)
    same(
        hf.jit(hf.grad(f), dynamic=True)(X[:3], X[:4], w, b),
        hf.grad(lambda x: hf.sum(_often(x, w, b)))(X[:3]),
    )


def _in_steps(x: Any) -> Any:
    return hf.fori_loop(0, x.shape[0], lambda k, x: hf.sin(x + k), x)


@pytest.mark.parametrize("body", [hf.tanh, _in_steps])
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("sizes", [(3, 4), (4, 3), (1, 5), (0, 2), (3, 3)])
def test_calls_of_one_function_have_each_their_sizes(
    body: Any, nested: bool, sizes: tuple[int, int]
) -> None:
    layer = hf.subgraph(body)
    both = hf.subgraph(lambda x, y: (layer(x), layer(y)))

    def f(x: Any, y: Any) -> Any:
        for _ in range(40):
            y, x = both(y, x) if nested else (layer(y), layer(x))
        return x, y, x.shape[0] * 2 + y.shape[0]

    x, y = (np.linspace(0.1, 0.9, n) for n in sizes)
    want_x, want_y = x, y
    for _ in range(40):
        want_x, want_y = body(want_x), body(want_y)
    got = hf.jit(f, dynamic=True)(x, y)
    same(got, (want_x, want_y, sizes[0] * 2 + sizes[1]))


def _often(x: Any, w: Any, b: Any) -> Any:
    for _ in range(20):
        x = hf.tanh(x @ w + b)
    return x


def test_what_a_body_asks_of_a_size_is_not_answered_for_another() -> None:
    @hf.subgraph
    def halves(x: Any) -> Any:
        return hf.sum(x) * (2 if x.shape[0] % 2 == 0 else 3)

    jitted = hf.jit(lambda x, y: halves(x) + halves(y), dynamic=True)
    same(jitted(np.ones(4), np.ones(5)), 8 + 15)
    same(jitted(np.ones(3), np.ones(5)), 9 + 15)
    same(jitted(np.ones(2), np.ones(6)), 4 + 12)


def test_parents_of_all_kinds_share_one_body() -> None:
    layer = hf.subgraph(lambda x: block(x, hf.asarray(WEIGHTS[0]), BIASES[0]))

    def f(x: Any) -> Any:
        x = hf.cond(hf.sum(x) > 0, lambda: layer(x), lambda: layer(layer(x)))
        x = hf.fori_loop(0, 3, lambda i, x: layer(layer(x)), x)
        return hf.jit(lambda x: layer(layer(x)))(x)

    layer(X)
    jitted = hf.jit(f)
    with counting(body_traces=5):  # two branches, the loop, and the jitted function
        got = jitted(X)
    assert len(bodies(jitted.graph)) == 2  # with that of the jitted function
    same(got, f(X))


def test_a_subgraph_may_call_subgraphs() -> None:
    @hf.subgraph
    def inner(x: Any, w: Any) -> Any:
        return hf.tanh(x @ w)

    @hf.subgraph
    def outer(x: Any, w: Any) -> Any:
        for _ in range(40):
            x = inner(x, w) + x / 2
        return x

    def f(x: Any, w: Any, call: Any) -> Any:
        for _ in range(5):
            x = call(x, w)
        return hf.sum(x)

    def whole(x: Any, w: Any) -> Any:
        for _ in range(40):
            x = hf.tanh(x @ w) + x / 2
        return x

    w = WEIGHTS[0]
    with counting(functions=2):
        got = hf.jit(lambda x, w: f(x, w, outer))(X, w)
    same(got, f(X, w, whole))
    got = hf.jit(hf.grad(lambda x: f(x, w, outer)))(X)
    same(got, hf.jit(hf.grad(lambda x: f(x, w, whole)))(X))


def test_calls_of_bodies_of_one_name_and_length_are_told_apart() -> None:
    def of(op: Any) -> Any:
        def f(x: Any, w: Any) -> Any:
            return op(x @ w) + x

        return hf.subgraph(f)

    def f(x: Any, w: Any, g: Any, h: Any) -> Any:
        return sum([g(x, w * k) - h(x, w * k) for k in range(30)])

    x, w = hf.asarray(X), hf.asarray(WEIGHTS[0])
    with hf.debug():
        want = f(x, w, of(hf.sin), of(hf.cos))
    with counting(functions=2):
        same(hf.jit(lambda x, w: f(x, w, of(hf.sin), of(hf.cos)))(x, w), want)


def test_what_little_all_calls_come_to_is_put_in_their_places() -> None:
    small = hf.subgraph(lambda x: hf.sin(x) + 1)
    with counting(functions=0):
        hf.jit(lambda x: small(small(x)))(X)


# --- what makes calls another kind ----------------------------------------------------


def retraces(make: Callable[[Any], Any], *values: Any) -> int:
    """How often functions that close over these values are traced."""
    before = hf.stats().body_traces
    for value in values:
        hf.trace(make(value), X, captures=True)
    return hf.stats().body_traces - before


@pytest.mark.parametrize(
    ("values", "count"),
    [
        ((2, 2, 2), 1),
        ((2, 3), 2),
        ((1, 1.0, True), 3),
        ((0.0, -0.0), 2),
        (("a", "a", "b"), 2),
        ((hf.ones(8), hf.zeros(8)), 1),
        ((hf.ones(8), hf.ones(1), hf.ones(8, dtype=hf.float64)), 3),
        (([hf.ones(8), 1], [hf.zeros(8), 1], [hf.zeros(8), 2]), 2),
        ((np.ones(8), np.ones(8), np.zeros(8)), 2),
        ((lambda x: x, lambda x: x), 2),
    ],
)
def test_cells_are_compared_by_value_and_tensors_by_type(
    values: tuple[Any, ...], count: int
) -> None:
    def make(value: Any) -> Any:
        def f(x: Any) -> Any:
            found = value[0] * value[1] if isinstance(value, list) else value
            if callable(found) or isinstance(found, str):
                return x * 2
            return x * found

        return hf.subgraph(f)

    assert retraces(make, *values) == count


def test_a_default_is_compared_as_a_cell_is() -> None:
    def make(value: Any) -> Any:
        def f(x: Any, *, k: Any = value) -> Any:
            return x * k

        return hf.subgraph(f)

    for value in (2.0, 3.0, hf.full((8,), 4.0), hf.full((8,), 5.0)):
        same(hf.jit(make(value))(X), X * np.asarray(value))
    assert retraces(make, 6.0, 6.0, hf.ones(8)) == 1


SCALE: Any = 2.0


def scaled(x: Any) -> Any:
    return x * SCALE


def test_a_global_that_was_rebound_is_read_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    f = hf.subgraph(lambda x: scaled(x) + SCALE)
    for value in (2.0, 3.0, hf.asarray(4.0), hf.asarray(5.0), 3.0):
        monkeypatch.setitem(globals(), "SCALE", value)
        same(hf.jit(f)(X), X * float(value) + float(value))
        same(f(X), X * float(value) + float(value))
    assert f.traces == 3  # 2.0, 3.0, and a tensor


def test_an_unhashable_cell_is_refused_by_its_name() -> None:
    cache = {1, 2}

    @hf.subgraph
    def f(x: Any) -> Any:
        return x * len(cache)

    name = (
        r"subgraph: `f` \(test_subgraphs.py:\d+\) closes over `cache`, which is a `set`"
    )
    for run in (f, hf.jit(f)):
        with pytest.raises(UnhashableCaptureError, match=name):
            run(X)
    with pytest.raises(UnhashableCaptureError, match=r"invoke_subgraph: .* a `set`"):
        hf.invoke_subgraph(lambda x: x * len(cache), X)


# --- writes, effects, and what else a body may do -------------------------------------


def test_writes_of_a_shared_body_reach_the_tensors_of_each_call() -> None:
    def f(x: Any, total: Any) -> Any:
        own = [hf.zeros(8) for _ in range(MANY)]
        for k in range(MANY):
            seen = own[k]

            @hf.subgraph
            def step(x: Any, total: Any) -> Any:
                total += x
                seen[:] = total  # noqa: B023
                seen[0] = -1.0  # noqa: B023
                return hf.tanh(x + total)

            x = step(x, total)
        return x, hf.stack(own)

    x, total = hf.asarray(X[0]), hf.zeros(8)
    with hf.debug():
        want = f(x, total), total
    again = hf.zeros(8)
    jitted = hf.jit(f)
    same((jitted(x, again), again), want)
    assert len(bodies(jitted.graph)) == 1
    third = hf.zeros(8)
    same((f(x, third), third), want)


def test_a_write_is_seen_by_a_tensor_that_shares_the_memory() -> None:
    @hf.subgraph
    def write(a: Any, b: Any) -> Any:
        a += 1
        return b * 2

    def f(x: Any) -> Any:
        y = x + 0
        first = write(y[:2], y[2:])
        return first, write(y[:2], y[1:3]), y

    with hf.debug():
        want = f(hf.zeros(4))
    for run in (f, hf.jit(f)):
        same(run(hf.zeros(4)), want)


def test_results_may_be_operands_and_each_other() -> None:
    @hf.subgraph
    def pair(x: Any, w: Any) -> Any:
        y = x @ w
        return x, y, y, w[0]

    def f(x: Any, w: Any) -> Any:
        found = []
        for _ in range(MANY):
            x, y, z, row = pair(x, w)
            y += 1
            x = hf.tanh(z + row)
            found.append(y)
        return x, found[-1], w

    x, w = hf.asarray(X), hf.asarray(WEIGHTS[0])
    with hf.debug():
        want = f(x, w)
    same(hf.jit(f)(x, w), want)


def test_a_capture_is_not_the_operand_that_it_once_was() -> None:
    def f(x: Any, y: Any) -> Any:
        def outer(a: Any, b: Any) -> Any:
            def inner(u: Any) -> Any:
                return u * x  # of the first call, that is `a`

            first = hf.invoke_subgraph(inner, a)
            return b, hf.invoke_subgraph(inner, first)

        p, q = hf.invoke_subgraph(outer, x, y)
        return hf.invoke_subgraph(outer, p, q)

    x, y = hf.asarray([1.0, 2.0]), hf.asarray([10.0, 20.0])
    with hf.debug():
        want = f(x, y)
    same(f(x, y), want)
    same(hf.jit(f)(x, y), want)


def test_random_keys_are_operands() -> None:
    @hf.subgraph
    def noisy(key: Any, x: Any) -> Any:
        return hf.tanh(x + hf.random.normal(key, x.shape))

    def f(key: Any, x: Any) -> Any:
        for own in hf.random.split(key, MANY):
            x = noisy(own, x)
        return x

    key = hf.random.key(3)
    with hf.debug():
        want = f(key, hf.asarray(X))
    with counting(functions=1):
        same(hf.jit(f)(key, X), want, 1e-4)


def test_a_check_in_a_shared_body_names_its_line() -> None:
    @hf.subgraph
    def first(x: Any) -> Any:
        hf.check(hf.all(x < 5), "first")
        return hf.tanh(x @ x) + x + 1

    @hf.subgraph
    def second(x: Any) -> Any:
        hf.check(hf.all(x < 5), "second")
        return hf.tanh(x @ x) + x + 1

    def f(x: Any, g: Any, h: Any) -> Any:
        for k in range(20):
            x = g(x) if k < 4 else h(x)
        return x

    cases = [
        (first, second, "second"),
        (second, first, "first"),
        (first, first, "first"),
    ]
    for g, h, name in cases:
        line = line_of(first.fn if name == "first" else second.fn, "hf.check")
        with pytest.raises(CheckError, match=rf"{name}.*|.*{line}") as caught:
            hf.jit(lambda x: f(x, g, h))(np.zeros((2, 2)))  # noqa: B023
        assert name in str(caught.value)
        assert line in str(caught.value)


def test_a_shared_body_may_call_python() -> None:
    seen: list[float] = []

    def note(x: Any) -> Any:
        seen.append(float(x.sum()))
        return x

    @hf.subgraph
    def layer(x: Any) -> Any:
        y = hf.callback(note, x, x)
        return hf.tanh(y @ y) + x + 1

    def f(x: Any) -> Any:
        for _ in range(20):
            x = layer(x)
        return x

    with counting(functions=1):
        hf.jit(f)(np.zeros((2, 2)))
    assert len(seen) == 20
    assert seen == sorted(seen)


def test_loops_in_a_shared_body_run_as_elsewhere() -> None:
    @hf.subgraph
    def solve(x: Any) -> Any:
        def one(v: Any) -> Any:
            return hf.while_loop(
                lambda v: hf.abs(v) > 0.5, lambda v: hf.sin(v) * 0.9, v
            )

        rows = hf.vmap(one)(x)
        return hf.scan(lambda c, r: (c + r, c * r), hf.sum(x) * 0, rows)[1] + 1

    def f(x: Any) -> Any:
        for _ in range(12):
            x = solve(x)
        return x

    x = hf.asarray(RNG.normal(size=50) * 3)
    with hf.debug():
        want = f(x)
    with counting(functions=1):
        same(hf.jit(f)(x), want)
    same(hf.jit(hf.vmap(f))(hf.stack([x, -x]))[0], want)


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint64", "float16", "bfloat16"])
@pytest.mark.parametrize("shape", [(), (0,), (3, 1), (70,)])
def test_a_function_takes_every_dtype_and_shape(dtype: str, shape: Any) -> None:
    @hf.subgraph
    def layer(x: Any) -> Any:
        for _ in range(5):
            x = hf.where(x == x, x, hf.zeros_like(x))
            x = hf.flip(x, axis=0) if x.ndim else x
        return x

    def f(x: Any) -> Any:
        for _ in range(20):
            x = layer(x)
        return x

    x = hf.astype(hf.asarray(RNG.integers(0, 2, shape)), getattr(hf, dtype))
    with counting(functions=1):
        got = hf.jit(f)(x)
    assert got.dtype == x.dtype
    same(hf.astype(got, hf.float64), hf.astype(f(x), hf.float64))


def long(x: Any) -> Any:
    for _ in range(20):
        x = hf.sin(x) + 1.0
    return x


def test_calls_in_a_row_are_of_several_sizes() -> None:
    shared = hf.subgraph(lambda x: long(x) + hf.sum(x))
    xs = [np.linspace(0.0, 1.0, n) + n for n in (3, 3, 70, 5, 70, 70)]
    got = hf.jit(lambda *xs: [shared(x) for x in xs], dynamic=True)(*xs)
    same(got, [long(hf.asarray(x)) + x.sum() for x in xs])


def test_a_check_in_a_function_that_a_function_calls_is_told_as_such() -> None:
    @hf.subgraph
    def inner(x: Any) -> Any:
        hf.check(x[0] < 27, "inner")
        return x + 1.0 + 0.0 * long(x)

    @hf.subgraph
    def outer(x: Any) -> Any:
        for _ in range(6):
            x = inner(x)
        return x

    def f(x: Any) -> Any:
        for k in range(9):
            hf.check(x[k] < 30, "first")
        for _ in range(6):
            x = outer(x)
        return x

    with pytest.raises(CheckError, match="inner"):
        hf.jit(f)(np.zeros(9))


def test_calls_within_what_is_differentiated_when_lowered() -> None:
    shared = hf.subgraph(long)

    def loop(x: Any, f: Any) -> Any:
        def step(i: Any, x: Any) -> Any:
            return i + 1, f(f(x))

        first, test = (0, x), lambda i, _: i < 3
        last = hf.while_loop(test, step, first, reverse_mode="checkpoint")[1]
        return hf.sum(last)

    def attend(x: Any, f: Any) -> Any:
        q = x[None, None, :, None] * hf.ones((1, 1, 3, 16), dtype="float64")
        mod = lambda s, *_: f(f(s))  # noqa: E731
        return hf.sum(hf.flex_attention(q, q, q, score_mod=mod))

    x = np.linspace(0.0, 1.0, 3)
    for f in (loop, attend):
        found, want = (hf.jit(hf.grad(partial(f, f=g)))(x) for g in (shared, long))
        np.testing.assert_allclose(found, want, rtol=1e-12)
