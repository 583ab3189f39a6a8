"""Graphs: edits, and what passes may do to operators with regions."""

import numpy as np
import pytest

from hopflow import dtypes
from hopflow.errors import (
    GraphError,
)
from hopflow.graph.core import Constant, Graph, Node, Var
from hopflow.graph.hashing import equal
from hopflow.graph.interpreter import interpret
from hopflow.graph.printer import format_graph
from hopflow.graph.regions import (
    add_invariants,
    bind_symbols,
    carries,
    drop_args,
    drop_results,
    out_types_like,
    own_regions,
    prune_node,
    result_types,
)
from hopflow.graph.rewriting import (
    clone,
    effects,
    eliminate_dead_code,
    erase_node,
    inline,
    prune_inputs,
    replace_uses,
    substitute_symbols,
)
from hopflow.graph.types import SYMBOL_TYPE, TensorType, same_type
from hopflow.graph.verifier import verify
from hopflow.ops import elementwise, reduce, views  # noqa: F401
from hopflow.symbolic.size import symbol
from hopflow.testing.graphs import (
    ALL_SORTS,
    NESTED,
    SCAN,
    arrays,
    read,
    run_nested,
    scan_args,
)

# --- edits ----------------------------------------------------------------------------


def test_a_clone_is_equal_and_shares_no_node() -> None:
    graph = read(NESTED)
    vars_: dict[Var, Var] = {}
    copy = clone(graph, vars_)
    assert equal(copy, graph)
    assert format_graph(copy) == NESTED
    assert {id(n) for n in graph.walk()}.isdisjoint(id(n) for n in copy.walk())
    assert vars_[graph.inputs[2]] is copy.inputs[2]
    verify(copy)


def test_notes_on_a_clone_are_its_own() -> None:
    graph = read(NESTED)
    graph.nodes[0].meta["note"] = 1
    [copied, *_] = clone(graph).nodes
    copied.meta["note"] += 1
    assert (graph.nodes[0].meta, copied.meta) == ({"note": 1}, {"note": 2})


def test_a_clone_shares_what_was_shared() -> None:
    graph = read(NESTED)
    graph.nodes[0].params["else_"] = graph.nodes[0].params["then"]
    params = clone(graph).nodes[0].params
    assert params["then"] is params["else_"] is not graph.nodes[0].params["then"]


def test_uses_are_replaced_all_at_once() -> None:
    graph = read(
        "def f(x: f32, y: f32) -> tuple[f32, f32]:\n"
        "    v0: f32 = add(x, y)\n    return v0, x\n"
    )
    x, y = graph.inputs
    replace_uses(graph, {x: y, y: x})
    assert format_graph(graph).splitlines()[1:] == [
        "    v0: f32 = add(y, x)",
        "    return v0, y",
    ]


def test_a_node_is_erased_when_nothing_reads_it() -> None:
    graph = read(ALL_SORTS)
    with pytest.raises(GraphError, match="its value is still read"):
        erase_node(graph, graph.nodes[0])
    node = graph.nodes[0]
    replace_uses(graph, {node.results[0]: graph.inputs[0]})
    erase_node(graph, node)
    assert "w" not in graph.attributes
    with pytest.raises(GraphError, match="does not have"):
        erase_node(graph, node)


def test_dead_code_goes_and_effects_stay() -> None:
    graph = read("""\
def f(p: bool, x: f32) -> tuple[()]:
    w: f32 = get_attr("w")
    def then(x: f32) -> tuple[()]:
        v0: f32 = sin(x)
        v1: f32 = noise(x)
        return ()
    def else_(x: f32) -> tuple[()]:
        return ()
    cond(p, x, then=then, else_=else_)
    cond(p, x, then=else_, else_=else_)
    v0: f32 = sin(w)
    v1: f32 = cos(v0)
    return ()
""")
    assert effects(graph) == {"random"}
    assert eliminate_dead_code(graph) == 5
    assert [n.op.name for n in graph.walk()] == ["cond", "noise"]
    assert graph.attributes == {}
    verify(graph)


def test_inputs_that_no_graph_reads_are_pruned() -> None:
    head = "def f(n: i64, m: i64, k: i64, /, x: f32[k], *, "
    first = read(head + "u: f32[n], v: f32, w: f32[m]) -> f32[m]:\n    return w\n")
    other = read(head + "u: f32[n], v: f32, w: f32[m]) -> f32[k]:\n    return x\n")
    assert prune_inputs([first, other]) == [1, 2, 5]
    assert [v.node.name for v in first.inputs] == ["m", "k", "x", "w"]
    assert [v.node.name for v in other.inputs] == ["m", "k", "x", "w"]
    verify(first)


def test_a_graph_is_inlined_with_its_sizes() -> None:
    graph = read("""\
def f(n: i64, /, p: bool, x: f32[n]) -> f32[n]:
    def then(a: i64, /, x: f32[a]) -> f32[a]:
        v0: f32[a] = broadcast_to(1.0, shape=(a,))
        v1: f32[a] = add(x, v0)
        return v1
    def else_(a: i64, /, x: f32[a]) -> f32[a]:
        return x
    v0: f32[n] = cond(p, n, x, then=then, else_=else_)
    return v0
""")
    [node] = graph.nodes
    body = node.params["then"]
    sizes = bind_symbols(body, node.args[1:])
    outputs = inline(graph, 0, body, node.args[1:], sizes)
    replace_uses(graph, dict(zip(node.results, outputs, strict=True)))
    erase_node(graph, node)
    verify(graph)
    assert (
        format_graph(graph)
        == """\
def f(n: i64, /, p: bool, x: f32[n]) -> f32[n]:
    v0: f32[n] = broadcast_to(1.0, shape=(n,))  # of cond/then
    v1: f32[n] = add(x, v0)                     # of cond/then
    return v1
"""
    )


def test_what_is_inlined_twice_has_attributes_and_symbols_of_its_own() -> None:
    text = """\
def f(x: f32[4]) -> f32[u]:
    w: f32[4] = get_attr("w")
    v0: f32[u] = compress(w)
    return v0
"""
    graph, body = read(text), read(text)
    for _ in range(2):
        inline(graph, len(graph.nodes), body, graph.inputs, {})
    verify(graph)
    assert set(graph.attributes) == {"w", "w_1", "w_2"}


def test_symbols_are_substituted_in_types_and_params() -> None:
    graph = read("""\
def f(n: i64, /, x: f32[n]) -> f32[2*n]:
    v0: f32[2*n] = broadcast_to(1.0, shape=(2*n,))
    return v0
""")
    [bound] = [v.node.symbol for v in graph.symbols]
    assert bound is not None
    substitute_symbols(graph, {bound: 4})
    assert prune_inputs([graph]) == []
    assert (
        format_graph(graph)
        == """\
def f(x: f32[4]) -> f32[8]:
    v0: f32[8] = broadcast_to(1.0, shape=(8,))
    return v0
"""
    )


# --- regions --------------------------------------------------------------------------


def loop_node(graph: Graph) -> Node:
    [node] = graph.nodes_of("loop")
    own_regions(node)
    return node


def test_a_carry_is_dropped_with_all_that_belongs_to_it() -> None:
    graph = read(SCAN)
    node = loop_node(graph)
    [_, pair] = carries(node.op.signature(node))
    body = node.params["body"]
    # The carry `d` only makes its own next value.
    body.outputs = (body.outputs[0], body.inputs[2], body.outputs[2])
    eliminate_dead_code(body)
    with pytest.raises(GraphError, match="a carry is dropped with its result"):
        drop_args(node, [pair.arg])
    drop_results(node, [pair.result, 2])
    verify(graph)
    assert node.params["num_carry"] == 1
    assert [v.node.name for v in body.inputs] == ["n", "c", "x", "w"]
    assert [v.index for v in node.results] == [0]


def test_an_input_that_is_read_is_not_dropped() -> None:
    node = loop_node(read(SCAN))
    with pytest.raises(GraphError, match="input `w` of `body` is read"):
        drop_args(node, [4])


def test_args_that_no_region_needs_are_pruned_generically() -> None:
    graph = read(NESTED)
    [node] = graph.nodes
    own_regions(node)
    for region in node.op.signature(node).regions:
        region.graph.outputs = (Constant(0.0, TensorType(dtypes.float32)),)
        eliminate_dead_code(region.graph)
    node.results[0].type = TensorType(dtypes.float32)
    assert prune_node(node) == [1, 2, 3, 4]
    verify(graph)
    assert "cond(p, then=then, else_=else_)" in format_graph(graph)


def test_an_invariant_is_hoisted_out_of_a_body_generically() -> None:
    graph = read(SCAN)
    expected = arrays(interpret(graph, scan_args(), run_nested))
    node = loop_node(graph)
    body = node.params["body"]
    hoisted = body.nodes[0]
    [w] = hoisted.args
    outside = node.args[body.inputs.index(w)]
    moved = graph.call(hoisted.op, [outside], {}, [outside.type])
    graph.nodes.reverse()
    types = [v.type for v in hoisted.results]
    added = add_invariants(node, moved.results, region="body", types=types)
    replace_uses(body, dict(zip(hoisted.results, added["body"], strict=True)))
    erase_node(body, hoisted)
    assert prune_node(node) == [4]
    verify(graph)
    results = arrays(interpret(graph, scan_args(), run_nested))
    np.testing.assert_array_equal(results[0], expected[0])


def test_an_added_value_has_the_types_of_each_region() -> None:
    graph = read("""\
def f(n: i64, /, p: bool, x: f32[n], y: f32[2*n]) -> f32[n]:
    def then(a: i64, /, x: f32[a]) -> f32[a]:
        return x
    def else_(b: i64, /, x: f32[b]) -> f32[b]:
        return x
    v0: f32[n] = cond(p, n, x, then=then, else_=else_)
    return v0
""")
    [node] = graph.nodes
    added = add_invariants(node, [graph.inputs[3]], names=["y"])
    verify(graph)
    assert [str(v.type) for vs in added.values() for v in vs] == [
        "f32[2*a]",
        "f32[2*b]",
    ]
    foreign = Var(node, 0, TensorType(dtypes.float32, (symbol("k"),)))
    with pytest.raises(GraphError, match="does not have its size `k`"):
        add_invariants(node, [foreign])


def test_types_of_results_are_in_the_terms_of_the_caller() -> None:
    graph = read(NESTED)
    other = clone(graph)
    node = graph.nodes[0]
    sizes = {v.node.symbol: symbol("t") for v in other.symbols if v.node.symbol}
    args = [Constant(True, TensorType(dtypes.bool_)), *map(constant, (2, 3))]
    inside = TensorType(dtypes.float32, (2, 3))
    args += [Constant(True, TensorType(dtypes.bool_)), Var(node, 0, inside)]  # type: ignore[list-item]
    assert [str(t) for t in result_types(node.op, args, node.params)] == ["f32[2, 3]"]
    assert sizes


def constant(value: int) -> Constant:
    return Constant(value, SYMBOL_TYPE)


def test_types_of_branches_compare_over_the_symbols_of_one() -> None:
    then = read("def f(a: i64, /, x: f32[2*a]) -> f32[2*a]:\n    return x\n")
    other = read("def f(b: i64, /, x: f32[2*b]) -> f32[2*b]:\n    return x\n")
    assert not same_type(other.out_types[0], then.out_types[0])
    assert same_type(out_types_like(other, then)[0], then.out_types[0])
