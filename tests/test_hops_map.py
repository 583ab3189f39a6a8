"""`map`, `associative_scan` and `invoke_subgraph`: in every execution."""

from collections import OrderedDict
from typing import Any

import numpy as np
import pytest

import hopflow
from hopflow.bind import bind
from hopflow.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    ElementTypeError,
    GraphError,
    LengthError,
    MutationError,
    ResultTypeError,
    StructureError,
)
from hopflow.graph.core import Graph
from hopflow.graph.interpreter import interpret
from hopflow.graph.verifier import verify
from hopflow.hops.invoke_subgraph import Subgraph, subgraph
from hopflow.testing.executions import (
    NAMES,
    RUNNERS,
    agree,
    fails,
    interpreted,
    run_debug,
)

pytestmark = pytest.mark.slow

hf: Any = hopflow

each_execution = pytest.mark.parametrize("run", RUNNERS, ids=NAMES)

X = np.arange(12, dtype=np.float32).reshape(4, 3) / 4 - 1


# --- map ------------------------------------------------------------------------------


@each_execution
@pytest.mark.parametrize("dim", [0, 1, -2])
def test_map_stacks_the_results_along_axis_0(run: Any, dim: int) -> None:
    def f(x: Any) -> Any:
        return hf.map(
            lambda row: (hf.sum(row), {"r": row[::-1], "n": None}), x, dim=dim
        )

    rows = np.moveaxis(X, dim, 0)
    agree(run(f, hf.asarray(X)), (rows.sum(1), {"r": rows[:, ::-1], "n": None}))


@each_execution
@pytest.mark.parametrize("size", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("dim", [0, 1])
def test_map_may_compute_several_slices_at_once(run: Any, size: int, dim: int) -> None:
    def f(x: Any, w: Any) -> Any:
        def each(row: Any, scale: Any, k: Any) -> Any:
            steps = hf.astype(row["x"][0] > 0, hf.int32) * 2
            last = hf.fori_loop(0, steps, lambda i, y: y * scale + w, row["x"])
            return last, {"k": k, "n": None}

        return hf.map(each, {"x": x}, w * 2, 3, dim=dim, batch_size=size)

    rows, w = np.moveaxis(X, dim, 0), np.float32(0.5)
    want = np.where(rows[:, :1] > 0, rows + 2 * w, rows)
    agree(
        run(f, hf.asarray(X), hf.asarray(w)),
        (want, {"k": np.full(len(rows), 3), "n": None}),
    )


@pytest.mark.parametrize("n", [0, 1, 5, 6])
@pytest.mark.parametrize("dynamic", [None, True])
def test_batches_of_a_map_of_any_length(n: int, dynamic: Any) -> None:
    def f(x: Any) -> Any:
        return hf.map(lambda row: (hf.sum(row), row[:1]), x, batch_size=3)

    x = hf.reshape(hf.arange(2.0 * n), (n, 2))
    agree(hf.jit(f, dynamic=dynamic)(x), (hf.sum(x, axis=1), x[:, :1]))


@pytest.mark.parametrize(
    ("size", "error"), [(0, ArgumentValueError), (1.5, ArgumentTypeError)]
)
def test_a_batch_size_is_a_positive_int(size: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="`batch_size` must be"):
        hf.map(lambda x: x, hf.ones(3), batch_size=size)


@each_execution
def test_map_passes_the_same_arguments_to_each_call(run: Any) -> None:
    scale = 3

    def f(x: Any, y: Any) -> Any:
        def each(row: Any, a: Any, k: Any) -> Any:
            return row["x"] * a["w"] + row["k"] * k + scale

        return hf.map(each, {"x": x, "k": x[:, 0]}, {"w": y, "none": None}, 2)

    want = X * X[1] + X[:, :1] * 2 + 3
    agree(run(f, hf.asarray(X), hf.asarray(X[1])), want)


@each_execution
def test_each_element_makes_its_own_trips_and_choices(run: Any) -> None:
    def f(n: Any, x: Any) -> Any:
        def each(k: Any) -> Any:
            total = hf.fori_loop(0, k, lambda i, t: t + x[i], 0.0)
            return hf.cond(total > 0, lambda: total, lambda: total * 10)

        return hf.map(each, n)

    n = np.array([0, 3, 1, 2])
    sums = np.array([X[0, :k].sum() for k in n])
    agree(run(f, hf.asarray(n), hf.asarray(X[0])), np.where(sums > 0, sums, sums * 10))


@each_execution
def test_map_of_nothing_knows_its_types(run: Any) -> None:
    def f(x: Any) -> Any:
        return hf.map(lambda row: (hf.sum(row) > 0, row * 2), x)

    flags, rows = run(f, hf.asarray(X[:0]))
    assert flags.dtype is hf.bool
    agree((flags, rows), (np.zeros(0, bool), X[:0]))


@each_execution
def test_a_write_to_an_element_stays_private(run: Any) -> None:
    x = hf.asarray(X.copy())

    def each(row: Any) -> Any:
        row += 1
        return row

    agree(run(lambda x: hf.map(each, x), x), X + 1)
    agree(x, X)


@each_execution
def test_map_refuses_writes_to_captures(run: Any) -> None:
    total = hf.zeros(3)

    def each(row: Any) -> Any:
        total[:] = total + row
        return row

    fails(
        MutationError,
        "map: `each` (test_hops_map.py:#) writes to a captured tensor f32[3], but its "
        "calls are independent of each other. Return the new value instead.",
        *(run, lambda: hf.map(each, X)),
    )
    agree(total, np.zeros(3, np.float32))


@each_execution
def test_a_body_that_may_not_write_to_captures_writes_to_what_it_makes(
    run: Any,
) -> None:
    def each(row: Any) -> Any:
        made = [hf.zeros(3), row * 2, hf.asarray([1.0, 2.0, 3.0])]
        made.append(hf.scan(lambda c, x: (c, c + x), row[0], row)[1])
        made.append(hf.map(lambda x: x * 2, row))
        for tensor in made:
            tensor[1:] += row[0]
        row[0] = 7.0
        return sum(made) + row

    agree(run(lambda x: hf.map(each, x), hf.asarray(X)), run_debug(hf.map, each, X))


@each_execution
def test_map_needs_tensors_with_slices(run: Any) -> None:
    fails(
        LengthError,
        "map: without tensors in `xs` the number of steps is unknown. Give `length`.",
        *(run, lambda: hf.map(lambda x: x, None)),
    )
    fails(
        ResultTypeError,
        "map: `<lambda>` (test_hops_map.py:#) must return tensors or numbers, and its "
        "`result` is `str`. Return the data alone, or None.",
        *(run, lambda: hf.map(lambda x: "x", X)),
    )


# --- associative_scan -----------------------------------------------------------------


@each_execution
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dim", [0, 1])
def test_prefixes_of_a_sum(run: Any, reverse: bool, dim: int) -> None:
    def f(x: Any) -> Any:
        return hf.associative_scan(lambda a, b: a + b, x, dim=dim, reverse=reverse)

    want = np.flip(np.cumsum(np.flip(X, dim), dim), dim)
    agree(run(f, hf.asarray(X)), want if reverse else np.cumsum(X, dim))


def recurrence(a: Any, b: Any) -> Any:
    return {"k": a["k"] * b["k"], "c": a["c"] * b["k"] + b["c"]}


@each_execution
@pytest.mark.parametrize("reverse", [False, True])
def test_prefixes_of_a_linear_recurrence_are_those_of_jax(
    run: Any, reverse: bool
) -> None:
    lax = pytest.importorskip("jax").lax

    def f(k: Any, c: Any) -> Any:
        return hf.associative_scan(recurrence, {"k": k, "c": c}, reverse=reverse)

    want = lax.associative_scan(recurrence, {"k": X, "c": X + 1}, reverse=reverse)
    agree(run(f, hf.asarray(X), hf.asarray(X + 1)), dict(want), rtol=1e-4)


@each_execution
def test_a_function_of_slices_need_not_be_elementwise(run: Any) -> None:
    m = np.stack([X[:3], X[1:], np.eye(3, dtype=np.float32), X[:3] * 2])
    w = hf.asarray(np.eye(3, dtype=np.float32))

    def f(m: Any) -> Any:
        return hf.associative_scan(lambda a, b: hf.matmul(a, hf.matmul(w, b)), m)

    want = [m[0]]
    for x in m[1:]:
        want.append(want[-1] @ x)
    agree(run(f, hf.asarray(m)), np.stack(want), rtol=1e-4)


@each_execution
@pytest.mark.parametrize("n", [0, 1])
def test_prefixes_of_little(run: Any, n: int) -> None:
    def f(x: Any) -> Any:
        return hf.associative_scan(lambda a, b: a + b, x)

    agree(run(f, hf.asarray(X[:n])), X[:n])


def lowered(graph: Graph) -> Graph:
    """The graph that an `associative_scan` is compiled as."""
    [node] = graph.nodes_of("associative_scan")
    types = tuple(v.type for v in node.results)
    found: Graph = node.op.lower(types, *node.args, **node.params).graph
    verify(found)
    return found


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("kind", ["plain", "branching", "symbolic"])
def test_it_lowers_to_one_loop(reverse: bool, kind: str) -> None:
    y = hf.asarray(X[1])

    def combine(a: Any, b: Any) -> Any:
        if kind == "branching":
            return hf.cond(a[0] > b[0], lambda: a, lambda: b + y * 0)
        return hf.maximum(a, b + y * 0)

    def f(x: Any) -> Any:
        return hf.associative_scan(combine, x, reverse=reverse)

    type_ = hf.spec("f32[n, 3]" if kind == "symbolic" else "f32[4, 3]")
    graph = lowered(hf.trace(f, type_, mode="fake", captures=True).graph)
    [loop] = graph.nodes_of("scan")
    assert bool(loop.params["body"].nodes_of("cond")) == (kind == "branching")
    args = [hf.asarray(X), y]
    with interpreted():
        [got] = interpret(graph, [4, *args] if kind == "symbolic" else args, bind)
        with hf.debug():
            agree(got, np.asarray(f(hf.asarray(X))))


def test_associative_scan_checks_what_its_function_returns() -> None:
    scan = hf.associative_scan
    fails(
        ElementTypeError,
        "associative_scan: `<lambda>` (test_hops_map.py:#) must combine two elements "
        "into one of the same types.\n"
        "  xs  in f32[3], out f32[]  (rank 1 != 0)\n"
        "Cast or reshape in the function, or give elements of that type.",
        *(scan, lambda a, b: a[0], X),
    )
    fails(
        StructureError,
        "associative_scan: `<lambda>` (test_hops_map.py:#) must combine two elements "
        "into one of the same structure.\n"
        "  expected *\n"
        "  got      (*, *)\n"
        "Return the same containers with as many leaves (`*` is a leaf); only leaves "
        "may change.",
        *(scan, lambda a, b: (a, b), X),
    )
    fails(
        ArgumentTypeError,
        "associative_scan: `reverse` must be a bool, and is `int`.",
        *(scan, lambda a, b: a, X),
        reverse=1,
    )


@each_execution
def test_associative_scan_refuses_writes_to_captures(run: Any) -> None:
    y = hf.zeros(3)

    def writes(a: Any, b: Any) -> Any:
        y[:] = a
        return a

    fails(
        MutationError,
        "associative_scan: `writes` (test_hops_map.py:#) writes to a captured tensor "
        "f32[3], but its calls may be made in any order. Return the new value instead.",
        *(run, lambda: hf.associative_scan(writes, X)),
    )
    agree(y, np.zeros(3, np.float32))


@pytest.mark.parametrize("dynamic", [False, True])
def test_prefixes_that_nobody_reads_are_not_stored(dynamic: bool) -> None:
    def combine(x: Any, y: Any) -> Any:
        return x[0] * y[0], y[0] * x[1] + y[1]

    f = hf.jit(lambda a: hf.associative_scan(combine, (a, a))[1], dynamic=dynamic)
    agree(f(hf.ones(3)), np.arange(1, 4, dtype=np.float32))
    assert "arena" not in f.loop_ir


def test_a_result_of_associative_scan_is_not_dropped() -> None:
    module = hf.trace(
        lambda x: hf.associative_scan(recurrence, {"k": x, "c": x}), hf.zeros(4)
    )
    [node] = module.graph.nodes
    assert not node.op.droppable
    fails(
        GraphError,
        "associative_scan: each of `xs` has a result; none can go.",
        *(node.op.with_roles, node.params, ("slice", "slice"), ("stacked",)),
    )


# --- invoke_subgraph and subgraph -----------------------------------------------------


@each_execution
def test_invoke_subgraph_is_the_call(run: Any) -> None:
    y = hf.asarray(X[0])

    def inner(x: Any, tree: Any) -> Any:
        return {"r": x * tree["k"] + y, "n": None}, 2.5

    def f(x: Any) -> Any:
        return hf.invoke_subgraph(inner, x, {"k": 3, "n": None})

    agree(run(f, hf.asarray(X)), ({"r": X * 3 + X[0], "n": None}, 2.5))


@each_execution
def test_invoke_subgraph_writes_to_operands_and_captures(run: Any) -> None:
    def f(x: Any) -> Any:
        a, b = x * 1, x * 2

        def inner(t: Any) -> None:
            t += 1
            b[0] = 0.0

        hf.invoke_subgraph(inner, a)
        return a, b

    b = X * 2
    b[0] = 0
    agree(run(f, hf.asarray(X)), (X + 1, b))


@each_execution
def test_a_subgraph_is_traced_once_for_each_kind_of_call(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    @subgraph
    def block(x: Any, k: Any, *, flip: bool = False, mode: Any = None) -> Any:
        """A docstring."""
        return -x * k if flip else x * k

    def f(x: Any) -> Any:
        return (
            block(block(x, 2), 3),
            block(x, k=4),
            block(x, 2, flip=True),
            block(x[0], 2),
        )

    monkeypatch.setattr("hopflow.hops.invoke_subgraph._cache", OrderedDict())
    agree(run(f, hf.asarray(X)), (X * 6, X * 4, -X * 2, X[0] * 2))
    assert block.__doc__ == "A docstring."
    assert block.traces == (0 if run is run_debug else 4)


def test_calls_of_a_subgraph_share_one_graph_in_a_trace_and_none_across() -> None:
    @subgraph
    def block(x: Any) -> Any:
        return hf.sin(x) + 1

    def f(x: Any) -> Any:
        return block(hf.cond(hf.sum(x) > 0, lambda: block(x), lambda: block(x)))

    def bodies(graph: Graph) -> set[int]:
        calls = [n for n in graph.walk() if n.op.name == "invoke_subgraph"]
        assert len(calls) == 3
        return {id(n.params["body"]) for n in calls}

    graphs = hf.trace(f, X).graph, hf.trace(f, X).graph  # both live: ids are reused
    first, second = map(bodies, graphs)
    assert len(first) == len(second) == 1
    assert first != second
    assert block.traces == 1


def test_a_subgraph_that_captures_is_traced_once_too() -> None:
    def make(y: Any) -> Any:
        @subgraph
        def block(x: Any) -> Any:
            return x + y

        return block

    block = make(hf.ones(3))
    with interpreted():
        block(hf.zeros(3))
        block(hf.zeros(3))
        assert block.traces == 1


def test_a_subgraph_tells_equal_operands_from_one_given_twice() -> None:
    @subgraph
    def add(a: Any, b: Any) -> Any:
        return a + b

    x, y = hf.ones(2), hf.zeros(2)
    with interpreted():
        agree((add(x, x), add(x, y)), (np.full(2, 2.0), np.ones(2)))


def test_a_subgraph_can_be_a_method() -> None:
    class Model:
        @subgraph
        def double(self, x: Any) -> Any:
            return x * 2

    model = Model()
    with interpreted():
        agree(model.double(hf.ones(2)), np.full(2, 2.0))
    assert isinstance(Model.double, Subgraph)


def test_static_arguments_of_a_subgraph_are_hashable() -> None:
    fails(
        ArgumentTypeError,
        "subgraph: an argument that is no tensor or number must be hashable, and a "
        "`set` is not. Make it a pytree, or close over it.",
        *(hf.subgraph(lambda x, s: x), hf.ones(2), {1}),
    )
    fails(
        ArgumentTypeError,
        "invoke_subgraph: `f` must be a function, and is `int`.",
        *(hf.invoke_subgraph, 3),
    )


def test_a_failing_subgraph_leaves_nothing_behind() -> None:
    @subgraph
    def bad(x: Any) -> Any:
        hf.sin(x)
        raise ZeroDivisionError

    def f(x: Any) -> Any:
        y = x + 1
        with pytest.raises(ZeroDivisionError):
            bad(y)
        return y

    assert len(hf.trace(f, X).graph.nodes) == 1


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_transforms_of_associative_scan_are_those_of_scan(
    dynamic: bool, reverse: bool
) -> None:
    def prefixes(xs: Any, s: Any) -> Any:
        def both(a: Any, b: Any) -> Any:
            return {"p": a["p"] * b["p"] * s, "q": a["q"] + b["q"]}

        tree = {"p": xs, "q": hf.sin(xs)}
        return hf.associative_scan(both, tree, dim=1, reverse=reverse)

    def one_by_one(xs: Any, s: Any) -> Any:
        def step(c: Any, x: Any) -> Any:
            p, q, is_first = c
            p = hf.where(is_first, x, p * x * s)
            return (p, q + hf.sin(x), False), {"p": p, "q": q + hf.sin(x)}

        zeros = hf.zeros(xs.shape[0])
        ys = hf.scan(step, (zeros, zeros, True), xs, dim=1, reverse=reverse)[1]
        return {key: hf.moveaxis(y, 0, 1) for key, y in ys.items()}

    def loss(f: Any) -> Any:
        return lambda xs, s: sum(hf.sum(y**2) for y in f(xs, s).values())

    def second(f: Any) -> Any:
        slope = hf.grad(loss(f))
        return hf.grad(lambda xs, s: hf.sum(slope(xs, s) ** 2), argnums=(0, 1))

    xs, s = hf.asarray([[0.5, 1.5, 2.0], [1.0, 0.25, 0.5]]), hf.asarray(0.75)
    transforms: list[Any] = [lambda f: f, second, lambda f: hf.vmap(second(f))]
    for k, transform in enumerate(transforms):
        args = (xs, s) if k < 2 else (hf.stack([xs, xs * 2]), hf.stack([s, s / 2]))
        got, expected = (transform(f) for f in (prefixes, one_by_one))
        agree(hf.jit(got, dynamic=dynamic)(*args), expected(*args), rtol=1e-4)


@pytest.mark.parametrize("dynamic", [False, True])
def test_numbers_of_a_map_are_lanes(dynamic: bool) -> None:
    def one(numbers: Any) -> Any:
        spot, strike, days = numbers
        value = spot * hf.erf(hf.log(spot / strike)) - strike
        return value, {"high": hf.maximum(value, 0.0), "is_near": days < 1.0}

    numbers = tuple(np.random.default_rng(0).uniform(0.5, 1.5, (3, 37)).astype("f"))
    jitted = hf.jit(lambda numbers: hf.map(one, numbers), dynamic=dynamic)
    for n in (37, 1, 0, 64):
        given = tuple(np.resize(x, n) for x in numbers)
        agree(jitted(given), hf.vmap(one)(tuple(map(hf.asarray, given))))
    assert " vector " in jitted.loop_ir


@pytest.mark.parametrize("dynamic", [False, True])
def test_memory_of_an_iteration_is_not_that_of_its_lanes(dynamic: bool) -> None:
    """Each iteration writes an array of its own, at places that differ."""

    def one(places: Any) -> Any:
        a, b = places
        table = hf.zeros(3).at[a].add(1.0).at[b].add(2.0)
        return table[0] - table[1] * 10.0 + table[2] * 100.0

    places = tuple(np.random.default_rng(0).integers(0, 3, (2, 37)))
    found = hf.jit(lambda places: hf.map(one, places), dynamic=dynamic)(places)
    expected = [0.0] * 37
    for k, (a, b) in enumerate(zip(*places, strict=True)):
        table = [0.0] * 3
        table[a] += 1.0
        table[b] += 2.0
        expected[k] = table[0] - table[1] * 10.0 + table[2] * 100.0
    np.testing.assert_array_equal(np.asarray(found), expected)


@pytest.mark.parametrize("n", [1, 3, 8, 37])
def test_gradients_of_sorted_rows_of_a_map(n: int) -> None:
    """The places to which a row's cotangents go are another array of its own."""
    rows = np.random.default_rng(0).normal(size=(n, 2))
    weights = hf.asarray([1.0, -0.5])

    def f(rows: Any) -> Any:
        return hf.sum(hf.sin(hf.map(lambda row: hf.sort(row * weights), rows)))

    with hf.debug():
        expected = hf.grad(f)(hf.asarray(rows))
    agree(hf.grad(f)(hf.asarray(rows)), expected)
    agree(hf.jit(hf.grad(f))(rows), expected)
