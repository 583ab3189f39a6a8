"""What a body closes over becomes inputs, level by level; and functional writes."""

import re
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest

import hopflow
from hopflow.errors import EscapedValueError, ShapeError
from hopflow.graph.core import Graph
from hopflow.graph.hashing import equal
from hopflow.graph.parser import parse
from hopflow.graph.printer import format_graph
from hopflow.graph.verifier import verify
from hopflow.hops.cond import COND
from hopflow.hops.invoke_subgraph import INVOKE_SUBGRAPH
from hopflow.ops.opdef import OPERATIONS
from hopflow.testing.executions import NAMES, RUNNERS, agree

hf: Any = hopflow

X = np.arange(6, dtype=np.float32).reshape(2, 3)


def text(graph: Graph) -> str:
    """The graph's text without the lines of the user's code."""
    verify(graph)
    return re.sub(r" +#.*", "", format_graph(graph, width=200))


def graph_of(f: Any, *types: str, **options: Any) -> Graph:
    given = hf.spec(*types) if types else ()
    given = given if isinstance(given, tuple) else (given,)
    graph: Graph = hf.trace(f, *given, mode="fake", **options).graph
    return graph


def inputs(graph: Graph) -> str:
    return ", ".join(f"{v.node.name}: {v.type}" for v in graph.inputs)


# --- symbols and tensors, level by level ----------------------------------------------


def test_the_example_of_the_design_note() -> None:
    def f(x: Any, p: Any, q: Any) -> Any:
        return hf.cond(
            p,
            lambda: hf.cond(q, lambda: hf.sin(x), lambda: hf.cos(x)),
            lambda: x,
        )

    assert (
        text(graph_of(f, "f32[s0, s1]", "bool[]", "bool[]"))
        == """\
def f(s0: i64, s1: i64, /, x: f32[s0, s1], p: bool, q: bool) -> f32[s0, s1]:
    def then(s0: i64, s1: i64, /, *, q: bool, x: f32[s0, s1]) -> f32[s0, s1]:
        def then(s0: i64, s1: i64, /, *, x: f32[s0, s1]) -> f32[s0, s1]:
            v0: f32[s0, s1] = sin(x)
            return v0
        def else_(s0: i64, s1: i64, /, *, x: f32[s0, s1]) -> f32[s0, s1]:
            v0: f32[s0, s1] = cos(x)
            return v0
        v0: f32[s0, s1] = cond(q, s0, s1, x, then=then, else_=else_)
        return v0
    def else_(s0: i64, s1: i64, /, *, q: bool, x: f32[s0, s1]) -> f32[s0, s1]:
        return x
    v0: f32[s0, s1] = cond(p, s0, s1, q, x, then=then, else_=else_)
    return v0
"""
    )


def test_reading_a_size_lifts_the_symbol_and_not_the_tensor() -> None:
    def f(x: Any, w: Any) -> Any:
        def body(c: Any, xi: Any) -> Any:
            return c * x.shape[0] + x.shape[0], hf.matmul(xi, w)

        return hf.scan(body, 1.0, x)

    [node] = graph_of(f, "f32[n, 4]", "f32[4, 4]").nodes_of("scan")
    assert inputs(node.params["body"]) == "n: i64[], c: f32[], xi: f32[4], w: f32[4, 4]"


def test_a_size_that_is_a_tensor_outside_is_one_beside_the_symbol_inside() -> None:
    def f(x: Any) -> Any:
        n = hf.asarray(x.shape[0])
        return hf.fori_loop(0, n, lambda i, c: c + n * i + x.shape[0], 0)

    [node] = graph_of(f, "f32[n]").nodes_of("while_loop")
    assert inputs(node.params["body"]) == "n: i64[], i: i64[], c: i64[], c0: i64[]"


def test_a_tensor_made_of_a_size_is_a_size() -> None:
    def f(x: Any) -> Any:
        return hf.reshape(x, (hf.asarray(x.shape[0] * x.shape[1]),))

    graph = graph_of(f, "f32[n, m]")
    assert str(graph.out_types[0]) == "f32[m*n]"
    assert not graph.nodes_of("item")


def test_a_size_can_be_computed_with() -> None:
    def f(x: Any) -> Any:
        n = 2 * x.shape[0] * x.shape[1] + x.shape[1] - 3
        return hf.cond(hf.sum(x) > 0, lambda: n + hf.zeros(()), lambda: 0.5)

    module = hf.trace(f, hf.spec("f32[n, m]"), mode="fake")
    verify(module.graph)
    with hf.debug():
        agree(f(hf.asarray(X)), 12.0)


def test_one_input_for_a_value_and_a_level() -> None:
    def f(x: Any, y: Any) -> Any:
        z = x + y

        def first() -> Any:
            inner = hf.cond(z[0] > 0, lambda: z * z + x, lambda: z + z)
            return inner + z + x

        return hf.cond(y[0] > 0, first, lambda: z)

    graph = graph_of(f, "f32[4]", "f32[4]")
    [outer] = graph.nodes_of("cond")
    assert inputs(outer.params["then"]) == "c0: f32[4], x: f32[4]"
    assert inputs(outer.params["else_"]) == "c0: f32[4], x: f32[4]"
    [inner] = outer.params["then"].nodes_of("cond")
    assert inputs(inner.params["else_"]) == "c0: f32[4], x: f32[4]"


def test_the_parent_lifts_first() -> None:
    def f(x: Any, y: Any) -> Any:
        def deep() -> Any:
            return hf.cond(x[0] > 0, lambda: hf.cond(x[1] > 0, lambda: y, lambda: x), g)

        def g() -> Any:
            return x * 2

        return hf.cond(x[2] > 0, deep, g)

    graph = graph_of(f, "f32[n]", "f32[n]")
    for node in graph.walk():
        for inner in node.graphs.values():
            # Each level has an input of its own for the symbol, before what it sizes.
            assert inner.inputs[0].node.symbol is not None
            assert [v.node.section for v in inner.inputs[1:]] == ["capture", "capture"]
    verify(graph)


def test_a_concrete_tensor_becomes_an_operand_and_an_attribute_of_the_root() -> None:
    w = hf.asarray(X)

    def f(p: Any) -> Any:
        return hf.cond(p, lambda: hf.cond(p, lambda: w, lambda: w + 1), lambda: w)

    graph = graph_of(f, "bool[]", captures=True)
    assert [n.kind for n in graph.nodes] == ["get_attr", "call_function"]
    assert list(graph.attributes.values()) == [w]
    assert all(not n.graphs["then"].attributes for n in graph.nodes_of("cond"))


def test_what_no_body_reads_is_pruned() -> None:
    def f(x: Any, y: Any) -> Any:
        def body(c: Any) -> Any:
            hf.sin(y)  # dead
            y.shape[0] + 1
            return c

        return hf.cond(x > 0, lambda: body(x), lambda: x)

    [node] = graph_of(f, "f32[]", "f32[n, m]").nodes_of("cond")
    # A dead node still reads: taking it out is for a pass. Nothing else is lifted.
    assert inputs(node.params["then"]) == "n: i64[], m: i64[], y: f32[n, m], x: f32[]"

    def g(x: Any, y: Any) -> Any:
        return hf.fori_loop(0, 3, lambda i, c: (y, c * 0.5)[1], 0)

    [node] = graph_of(g, "f32[]", "f32[n, m]").nodes_of("while_loop")
    assert inputs(node.params["body"]) == "i: i64[], c: f32[]"


def test_a_first_trace_that_is_not_kept_leaves_nothing() -> None:
    seen = []

    def f(x: Any, y: Any) -> Any:
        def outer(p: Any) -> Any:
            def body(i: Any, c: Any) -> Any:
                seen.append(c.dtype)
                return i + 1, c + (y if c.dtype is hf.int64 else x)

            return hf.while_loop(lambda i, c: i < 3, body, (0, 0))

        return hf.cond(x > 0, lambda: outer(0), lambda: (0, x))

    [node] = graph_of(f, "f32[]", "f32[]").nodes_of("cond")
    assert seen == [hf.int64, hf.float32]
    assert inputs(node.params["then"]) == "x: f32[]"


@pytest.mark.parametrize("run", RUNNERS, ids=NAMES)
def test_closures_three_deep(run: Any) -> None:
    k, w = 2, hf.asarray(X[0])

    def f(x: Any) -> Any:
        y = x + 1

        def outer(i: Any, a: Any) -> Any:
            z = a * i

            def middle(b: Any, row: Any) -> Any:
                def inner(c: Any) -> Any:
                    return hf.cond(c > i, lambda: c + k * x.shape[0], lambda: c - z[0])

                return b + row, hf.map(inner, row * y[0] + b + w)

            last, ys = hf.scan(middle, z, y)
            return last + ys[0] * 0.125

        return hf.fori_loop(0, 3, outer, x[0])

    def plain(x: Any) -> Any:
        y, a = x + 1, x[0]
        for i in range(3):
            z = a * i
            b, ys = z, []
            for row in y:
                ys.append(
                    np.array(
                        [
                            c + k * x.shape[0] if c > i else c - z[0]
                            for c in row * y[0] + b + X[0]
                        ]
                    )
                )
                b = b + row
            a = b + ys[0] * np.float32(0.125)
        return a

    agree(run(f, hf.asarray(X)), plain(X).astype(np.float32))


# --- rollback -------------------------------------------------------------------------


def test_a_failed_trace_that_the_user_catches_leaves_ancestors_unchanged() -> None:
    def f(x: Any, y: Any, p: Any) -> Any:
        def outer() -> Any:
            z = x * 2
            view = z[1:]
            z[0] = 1.0  # the view is made anew when it is next read

            def bad() -> Any:
                return hf.matmul(view, y) + hf.zeros(y.shape[1])

            with pytest.raises(ShapeError):
                hf.cond(p, lambda: view + hf.sum(y), bad)
            return z + hf.sum(view)

        return hf.cond(p, outer, lambda: x)

    assert text(graph_of(f, "f32[4]", "f32[2, n]", "bool[]")) == text(
        graph_of(expected, "f32[4]", "f32[2, n]", "bool[]")
    ).replace("def expected", "def f")


def expected(x: Any, y: Any, p: Any) -> Any:
    def outer() -> Any:
        z = x * 2
        view = z[1:]
        z[0] = 1.0
        return z + hf.sum(view)

    return hf.cond(p, outer, lambda: x)


def test_a_failed_operator_leaves_no_input_of_its_first_branch() -> None:
    def f(x: Any, y: Any, p: Any) -> Any:
        def outer() -> Any:
            with pytest.raises(ZeroDivisionError):
                hf.cond(p, lambda: y + 1, lambda: 1 / 0)
            return x

        return hf.cond(p, outer, lambda: x)

    [node] = graph_of(f, "f32[4]", "f32[n]", "bool[]").nodes_of("cond")
    assert inputs(node.params["then"]) == "x: f32[4]"


def test_an_error_names_the_line_that_was_traced() -> None:
    def f(x: Any) -> Any:
        return hf.cond(True, lambda: x + hf.zeros(3), lambda: x)

    with pytest.raises(ShapeError) as found:
        graph_of(f, "f32[4]")
    [note] = found.value.__notes__
    assert re.fullmatch(r"while tracing test_lifting\.py:\d+", note)


# --- values that escape ---------------------------------------------------------------


@pytest.mark.parametrize("run", RUNNERS[1:], ids=NAMES[1:])
def test_a_sibling_cannot_read_what_a_branch_has_kept(run: Any) -> None:
    kept: list[Any] = []

    def keep(x: Any) -> Any:
        kept.append(x * 2)
        return x

    with pytest.raises(EscapedValueError) as found:
        run(lambda x: hf.cond(hf.all(x > 0), keep, lambda x: kept[0] + 1, (x,)), X)
    assert str(found.value) == (
        "a traced tensor f32[2, 3] is used outside the function whose trace made it "
        "(its trace has ended, or it belongs to another one). Return it from that "
        "function, or pass it as an operand."
    )


def test_a_tensor_of_a_trace_that_has_ended_cannot_be_used() -> None:
    kept: list[Any] = []
    hf.trace(lambda x: kept.append(x), X)
    with pytest.raises(EscapedValueError, match="outside the trace that made it"):
        kept[0] + 1
    with pytest.raises(EscapedValueError, match="its trace has ended"):
        hf.trace(lambda x: x + kept[0], X)


def test_a_body_cannot_use_its_inputs_once_it_is_closed() -> None:
    kept: list[Any] = []

    def f(x: Any) -> Any:
        def keep(a: Any) -> Any:
            kept.append(a)
            return a

        hf.map(keep, x)
        return kept[0] + 1

    with pytest.raises(EscapedValueError):
        hf.trace(f, X)


# --- functional writes ----------------------------------------------------------------


@pytest.mark.parametrize("run", RUNNERS, ids=NAMES)
def test_a_write_is_seen_through_every_view(run: Any) -> None:
    def f(x: Any) -> Any:
        y = x * 1
        rows, t, last = y[1], y.T, y[:, -1]
        flat = hf.reshape(y, (6,))
        rows += 10
        t[0, 0] = 5.0
        last *= 2
        flat[1] = -1.0
        y[1, :2] += 1
        return y, rows, t, last, flat

    y = X.copy()
    rows, t, last, flat = y[1], y.T, y[:, -1], y.reshape(6)
    rows += 10
    t[0, 0] = 5.0
    last *= 2
    flat[1] = -1.0
    y[1, :2] += 1
    agree(run(f, hf.asarray(X)), (y, rows, t, last, flat))


@pytest.mark.parametrize("run", RUNNERS, ids=NAMES)
def test_tensors_that_hold_one_value_stay_apart(run: Any) -> None:
    def f(x: Any) -> Any:
        y, z = x * 1, x * 2
        y[:] = z

        def write() -> Any:
            y[0] = 0.0
            return hf.sum(z) + hf.sum(y)

        return hf.cond(hf.sum(x) > 0, write, lambda: 0.0), y, z

    y, z = X * 2, X * 2
    y[0] = 0
    agree(run(f, hf.asarray(X)), (z.sum() + y.sum(), y, z))


@pytest.mark.parametrize("run", RUNNERS, ids=NAMES)
def test_a_view_keeps_the_index_it_was_taken_at(run: Any) -> None:
    def f(x: Any, i: Any) -> Any:
        y, k = x * 1, i + 0
        row = y[k]
        k += 1
        y[0] = 7.0
        return row, y[k]

    y = X.copy()
    y[0] = 7
    agree(run(f, hf.asarray(X), hf.asarray(0)), (y[0], y[1]))


@pytest.mark.parametrize("deeper", [False, True])
def test_a_body_that_several_graphs_call_stands_once(
    deeper: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hopflow.hops.invoke_subgraph._cache", OrderedDict())
    twice: Any = hf.subgraph(lambda x: x * 2)
    body: Any = hf.subgraph(lambda x: twice(twice(x)) + 1)

    def f(x: Any, p: Any) -> Any:
        def inner() -> Any:
            return hf.cond(p, lambda: body(body(x)), lambda: twice(x))

        y = body(x) if deeper else x
        return hf.cond(p, inner, lambda: body(y))

    graph = hf.trace(f, hf.spec("f32[4]"), hf.spec("bool[]"), mode="fake").graph
    text = format_graph(graph)
    assert (text.count("multiply("), text.count("add(")) == (1, 1)
    read = parse(text, {**OPERATIONS, "cond": COND, "invoke_subgraph": INVOKE_SUBGRAPH})
    verify(read)
    assert format_graph(read) == text
    assert equal(read, graph)
    assert len(graphs_in(read)) == len(graphs_in(graph)) == 6
    assert text.count("def body") == 2


def graphs_in(graph: Graph) -> set[Graph]:
    found = {g for node in graph.nodes for g in node.graphs.values()}
    return found.union(*map(graphs_in, found))
