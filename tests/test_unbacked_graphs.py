"""Symbols that a node of a graph defines: sizes that only the run knows."""

import numpy as np
import pytest

import hopflow as hf
from hopflow.bind import bind
from hopflow.errors import CheckError, GraphError, ProgramFormatError
from hopflow.graph.core import Constant, Graph
from hopflow.graph.hashing import equal, equal_values, structural_hash
from hopflow.graph.interpreter import interpret
from hopflow.graph.printer import format_graph
from hopflow.graph.rewriting import (
    clone,
    eliminate_dead_code,
    erase_node,
    inline,
    substitute_symbols,
    symbols_read,
)
from hopflow.graph.running import compile_graph
from hopflow.graph.types import TensorType
from hopflow.graph.verifier import verify
from hopflow.symbolic.ranges import ValueRange
from hopflow.symbolic.size import Symbol
from hopflow.tensor import asarray
from hopflow.testing.graphs import read, run_nested

I64 = TensorType(hf.int64)
FILL = """\
def f(x: i64) -> f32[u0]:
    u0: i64 = int(item(x, min=0))  # model.py:3
    v0: f32[u0] = full(2.0, shape=(u0,))
    return v0
"""
RANGES = """\
def f(x: i64, y: i32, p: bool) -> tuple[f32[m + 2*n], f32[m]]:
    n: i64 = int(item(x, max=7))
    m: i64 = int(item(y, min=1, known=True))
    v0: f32[m + 2*n] = full(2.0, shape=(m + 2*n,))
    def then(m: i64, /) -> f32[m]:
        v0: f32[m] = full(1.0, shape=(m,))
        return v0
    def else_(m: i64, /) -> f32[m]:
        v0: f32[m] = full(0.0, shape=(m,))
        return v0
    v1: f32[m] = cond(p, m, then=then, else_=else_)
    v2: i64 = add(m, 1)
    return v0, v1
"""


def symbols(graph: Graph) -> list[Symbol]:
    return [n.symbol for n in graph.nodes if n.symbol is not None]


@pytest.mark.parametrize("text", [FILL, RANGES])
def test_the_text_says_what_defines_a_symbol(text: str) -> None:
    graph = read(text)
    verify(graph)
    again = read(format_graph(graph))
    assert format_graph(again) == format_graph(graph)
    assert equal(graph, again)


def test_a_symbol_has_the_range_that_its_node_checks() -> None:
    n, m = symbols(read(RANGES))
    assert n.range == ValueRange(float("-inf"), 7)
    assert m.range == ValueRange(1, float("inf"))
    assert n.hint is None


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("u0: f32 = int(item(x))", "must be i64"),
        ("x: i64 = int(item(x))", "defined twice"),
        ("True: i64 = int(item(x))", "illegal target"),
        ("nan: i64 = int(item(x))", "reserved"),
        ("u0: i64 = int(x)", "expected `int` of one node"),
        ('u0: i64 = int(item(x, min="a"))', "must be numbers"),
        ("u0: i64 = int(item(x))\n    u0: i64 = int(item(x))", "defined twice"),
    ],
)
def test_text_that_defines_no_symbol_is_refused(line: str, message: str) -> None:
    with pytest.raises(ProgramFormatError, match=message):
        read(f"def f(x: i64) -> i64:\n    {line}\n    return x\n")


def test_a_symbol_is_defined_before_it_is_used() -> None:
    graph = read(FILL)
    graph.nodes.reverse()
    with pytest.raises(GraphError, match="bound before the first"):
        verify(graph)
    graph = read(RANGES)
    graph.nodes[1].symbol = graph.nodes[0].symbol
    with pytest.raises(GraphError, match="range of `n`"):
        verify(graph)


def test_hashes_do_not_know_names_and_know_ranges() -> None:
    graph = read(FILL)
    assert structural_hash(graph) == structural_hash(read(FILL.replace("u0", "size")))
    assert structural_hash(graph) == structural_hash(clone(graph))
    assert structural_hash(graph) != structural_hash(
        read(FILL.replace("item(x, min=0)", "item(x, min=1)"))
    )
    other = read(FILL)
    other.nodes[0].symbol = None
    assert structural_hash(graph) != structural_hash(other)


def test_the_interpreter_binds_what_it_finds() -> None:
    [found] = interpret(read(FILL), [asarray(3)], bind)
    np.testing.assert_array_equal(np.asarray(found), [2, 2, 2])
    args = [asarray(2), asarray(np.int32(1)), asarray(True)]
    first, second = interpret(read(RANGES), args, run_nested)
    assert (first.shape, second.shape) == ((5,), (1,))


@pytest.mark.parametrize(
    ("node", "value", "message"),
    [
        ("item(x, min=0)", -1, "-1, and must be at least 0"),
        ("item(x, min=2, max=4)", 5, "5, and must be at least 2 and at most 4"),
        ("item(x, max=4)", 5, "5, and must be at most 4"),
    ],
)
def test_a_value_out_of_range_stops(node: str, value: int, message: str) -> None:
    graph = read(FILL.replace("item(x, min=0)", node))
    with pytest.raises(CheckError, match=message):
        interpret(graph, [asarray(value)], bind)


def test_a_body_inlined_twice_has_two_symbols() -> None:
    graph, body = read(FILL), read(FILL)
    for _ in range(2):
        outputs = inline(graph, 2, body, graph.inputs, {})
        graph.outputs += outputs
    verify(graph)
    assert len(set(symbols(graph))) == 3
    assert len({str(v.type) for v in graph.outputs}) == 1  # in name only
    verify(read(format_graph(graph)))


def test_dead_symbols_go_and_needed_ones_stay() -> None:
    graph = read(RANGES)
    graph.outputs = graph.outputs[1:]
    assert eliminate_dead_code(graph) == 2  # `v0` and `v2`, `n` is checked
    assert [str(s) for s in symbols(graph)] == ["n", "m"]
    graph.outputs = ()
    eliminate_dead_code(graph)
    assert [str(s) for s in symbols(graph)] == ["n"]
    graph = read(FILL)
    with pytest.raises(GraphError, match="still read"):
        erase_node(graph, graph.nodes[0])
    substitute_symbols(graph, {symbols(graph)[0]: 4})
    erase_node(graph, graph.nodes[0])
    verify(graph)


def test_values_are_equal_if_they_are_made_alike() -> None:
    graph = read(
        """\
def f(n: i64, /, x: f32[n], y: f32[n]) -> tuple[()]:
    v0: f32[n] = sin(x)
    v1: f32[n] = add(v0, 1.0)
    v2: f32[n] = sin(x)
    v3: f32[n] = add(v2, 1.0)
    v4: f32[n] = add(v2, 2.0)
    v5: f32[n] = add(v2, y)
    v6: f32[n] = full(1.0, shape=(n,))
    v7: f32[3] = full(1.0, shape=(3,))
    v8: f32[n] = noise(x)
    v9: f32[n] = noise(x)
    v10: f32[n] = cos(x)
    return ()
"""
    )
    values = [v for n in graph.nodes for v in n.results]
    alike = {
        (i, j)
        for i, a in enumerate(values)
        for j, b in enumerate(values[:i])
        if equal_values(a, b)
    }
    assert alike == {(2, 0), (3, 1)}
    assert equal_values(Constant(1, I64), Constant(1, I64))
    assert not equal_values(Constant(1, I64), values[0])


def test_symbols_of_its_own_are_none_that_a_graph_needs() -> None:
    assert not symbols_read(read(FILL))


def test_the_source_defines_numbers() -> None:
    found = compile_graph(read(FILL), bind)(asarray(3))
    np.testing.assert_array_equal(np.asarray(found), [2, 2, 2])


def test_a_graph_traced_again_defines_symbols_again() -> None:
    graph = read(FILL)
    again = hf.trace(lambda x: interpret(graph, [x], bind), I64, mode="fake").graph
    verify(again)
    assert equal(graph, again)
