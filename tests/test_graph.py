"""Graphs: the verifier, the interpreter and hashes."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hopflow import dtypes
from hopflow.bind import bind
from hopflow.errors import (
    GraphError,
)
from hopflow.graph.core import Constant, Graph, Node
from hopflow.graph.hashing import equal, structural_hash
from hopflow.graph.interpreter import interpret
from hopflow.graph.regions import Port, Signature
from hopflow.graph.types import SYMBOL_TYPE, TensorType
from hopflow.graph.verifier import verify
from hopflow.ops import elementwise, reduce, views  # noqa: F401
from hopflow.symbolic.size import Symbol, symbol
from hopflow.tensor import asarray
from hopflow.testing.graphs import (
    ALL_SORTS,
    NESTED,
    SCAN,
    Cond,
    Op,
    X,
    arrays,
    read,
    run_nested,
)

# --- the verifier ---------------------------------------------------------------------


@pytest.mark.parametrize("text", [NESTED, SCAN])
def test_a_good_graph_passes(text: str) -> None:
    verify(read(text))


def test_a_size_that_a_result_brings_forth_is_bound_by_it() -> None:
    text = """\
def f(x: f32[4]) -> f32[u]:
    v0: f32[u] = compress(x)
    v1: f32[u] = sin(v0)
    return v1
"""
    verify(read(text))


class Misplaced(Cond):
    """Takes its first symbol for an operand."""

    def signature(self, node: Node) -> Signature:
        found = super().signature(node)
        first, *rest = found.regions
        inputs = (Port("operand", 1), *first.inputs[1:])
        return replace(found, regions=(replace(first, inputs=inputs), *rest))


HEAD = "def f(n: i64, /, x: f32[n], p: bool) -> f32[n]:\n    "


def broken_graphs() -> dict[str, tuple[Graph, str]]:
    """Each with the rule that it breaks."""
    f32 = TensorType(dtypes.float32)
    found: dict[str, tuple[Graph, str]] = {}

    def add(name: str, message: str, text: str = NESTED) -> Graph:
        graph = read(text)
        found[name] = graph, message
        return graph

    graph = add("order", "in the order symbols, operands, captures")
    graph.inputs.append(graph.inputs.pop(0))
    for var in graph.inputs[1:3]:
        var.type = f32
    graph = add("names", "input 3 `x`: each input has a name of its own")
    graph.inputs[3].node.name = "x"
    graph = add("section", "an input is in one of the sections")
    graph.inputs[2].node.section = None
    graph = add("no symbol", "and no others, bind a symbol")
    graph.inputs[0].node.symbol = None
    graph = add("symbol type", "an input that binds a symbol is i64[], not f32[]")
    graph.inputs[0].type = f32
    graph = add("symbol twice", "symbol `s0` is bound only once")
    graph.inputs[1].node.symbol = graph.inputs[0].node.symbol
    graph = add("unbound", "symbol `s1` is bound before the first type")
    del graph.inputs[1]
    graph = add("order of nodes", "is defined before it is used", ALL_SORTS)
    graph.nodes.reverse()
    graph = add("foreign", "belongs to another graph")
    graph.outputs = (read(NESTED).inputs[2],)
    graph = add("owner", "a node stands in one graph, once")
    graph.nodes.append(graph.nodes[0])
    graph = add("owner of inner", "a node stands in one graph, once")
    inner = graph.nodes[0].params["then"]
    graph.nodes[0].params["else_"].nodes.append(inner.nodes[0])
    graph = add("own place", "result 0 refers to its node and its place in it")
    graph.nodes[0].results[0].index = 1
    graph = add("type", "result 0 is f64[], as the operator infers, and not f32[]")
    vector = Constant(1.0, TensorType(dtypes.float64))
    graph.nodes.insert(0, graph.call(Op("one"), [vector], {}, [f32]))
    graph.nodes.pop()
    graph = add("result", "output 0 of `then` (result) is f32[s0, s1] within, and")
    graph.nodes[0].results[0].type = f32
    graph = add("count", "the operator gives 1 results, and the node has 2")
    node = graph.call(Op("one"), [Constant(1.0, f32)], {}, [f32, f32])
    graph.nodes = [node]
    graph = add("itself", "contains itself")
    graph.nodes[0].params["then"] = graph
    graph = add("kind", "a node of kind `placeholder` is not here")
    graph.nodes.insert(0, graph.inputs[0].node)
    add("params", "symbol `m` is bound", HEAD + "check(x)\n    return x\n").nodes[
        0
    ].params["size"] = (symbol("m"),)
    add("rank", "a constant is a scalar", HEAD + "check(x)\n    return x\n").outputs = (
        Constant(1.0, TensorType(dtypes.float32, (1,))),
    )
    for literal in ("i8(300)", "i32(1.5)", "bool(1)"):
        text = f"def f() -> tuple[()]:\n    check({literal})\n    return ()\n"
        add(literal, "the constant", text)
    text = "def f(x: f32[2], y: f32[3]) -> f32[2]:\n    v0: f32[2] = add(x, y)\n"
    add(
        "infer",
        "the operands have types that the operator takes",
        text + "    return v0",
    )
    graph = add("arity", "the operator takes 5 args of this signature, not 4")
    graph.nodes[0].args = graph.nodes[0].args[:4]
    graph = add("input type", "input 3 of `then` (operand) is f32[s0, s1] within")
    graph.nodes[0].args = (*graph.nodes[0].args[:4], Constant(1.0, f32))
    graph = add("outputs", "`else_` has 1 outputs, not 2")
    graph.nodes[0].params["else_"].outputs *= 2
    graph = add("symbol role", "is a symbol where the operator says so")
    graph.nodes[0].op = Misplaced()
    graph = add("attribute", "the graph has the attribute `w`", ALL_SORTS)
    del graph.attributes["w"]
    graph = add("attribute type", "attribute `w` is f32[2], and not f32[3]", ALL_SORTS)
    graph.attributes["w"] = asarray(np.zeros(2, np.float32))
    graph = add("inner attribute", "attributes are those of the outermost graph")
    graph.nodes[0].params["then"].add_attribute(f32, "w", None)
    return found


BROKEN = broken_graphs()


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_rule_is_found(name: str) -> None:
    graph, message = BROKEN[name]
    with pytest.raises(GraphError) as error:
        verify(graph)
    assert message in str(error.value)


# --- the interpreter ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("p", "q", "expected"),
    [(True, True, np.sin(X)), (True, False, np.cos(X)), (False, True, X)],
)
def test_a_graph_is_interpreted_node_by_node(p: bool, q: bool, expected: Any) -> None:
    args = [2, 3, asarray(X), asarray(p), asarray(q)]
    [result] = arrays(interpret(read(NESTED), args, run_nested))
    np.testing.assert_allclose(result, expected, rtol=1e-6)


def test_sizes_in_params_are_bound_from_shapes_and_numbers() -> None:
    text = """\
def f(n: i64, m: i64, /, x: f32[n]) -> tuple[f32[m, n], i64]:
    v0: f32[m, n] = broadcast_to(x, shape=(m, n))
    v1: i64 = add(m, n)
    return v0, v1
"""
    graph = read(text)
    verify(graph)
    x = asarray(np.ones(3, np.float32))
    for m in (2, asarray(2), Constant(2, SYMBOL_TYPE)):
        wide, total = arrays(interpret(graph, [3, m, x], bind))
        assert wide.shape == (2, 3)
        assert total == 5


def test_a_size_that_a_node_brings_forth_is_learned_from_its_result() -> None:
    text = """\
def f(x: f32[4]) -> f32[2*u]:
    v0: f32[u] = compress(x)
    u = v0.shape[0]
    v1: f32[2*u] = noise(v0, size=(2*u,))
    return v1
"""
    seen = []

    def run(op: Any, args: Sequence[Any], params: dict[str, Any]) -> list[Any]:
        seen.append(params)
        return [asarray(np.ones(3, np.float32))]

    interpret(read(text), [asarray(np.ones(4, np.float32))], run)
    assert seen == [{}, {"size": (6,)}]


def test_a_traced_value_tells_the_size_that_it_is() -> None:
    class Traced:
        type = SYMBOL_TYPE

        def as_size(self) -> Any:
            return size

    size = symbol("t")
    text = "def f(n: i64, /) -> f32[n]:\n"
    text += "    v0: f32[n] = full(2.0, shape=(n,))\n    return v0\n"
    seen = []

    def run(op: Any, args: Any, params: Any) -> Any:
        seen.append(params["shape"][0])
        return [asarray(np.ones(3, np.float32))]

    interpret(read(text), [Traced()], run)
    assert size.same(seen[0])


def test_constants_and_inputs_may_be_outputs() -> None:
    graph = read("def f(x: f32) -> tuple[f32, i8]:\n    return x, i8(3)\n")
    x = asarray(1.0)
    assert interpret(graph, [x], bind) == (x, Constant(3, TensorType(dtypes.int8)))


def test_a_wrong_number_of_arguments_is_refused() -> None:
    with pytest.raises(GraphError, match="takes 5 inputs and was given 1"):
        interpret(read(NESTED), [1], bind)


def test_a_size_that_nothing_tells_is_refused() -> None:
    graph = read("def f() -> tuple[()]:\n    check()\n    return ()\n")
    graph.nodes[0].params["size"] = symbol("n")
    graph.add_input(SYMBOL_TYPE, "m", "symbol", Symbol("m"))
    with pytest.raises(GraphError, match="the size `n` is used before"):
        interpret(graph, [3], bind)


# --- hashes ---------------------------------------------------------------------------


def test_names_lines_and_notes_play_no_part_in_the_hash() -> None:
    other = NESTED
    for old, new in [("s0", "a"), ("s1", "b"), ("x:", "y:"), ("(x)", "(y)")]:
        other = other.replace(old, new)
    other = other.replace(", x, then=", ", y, then=")
    other = other.replace("return x", "return y").replace("def f", "def g")
    a, b = read(NESTED), read(other)
    b.nodes[0].meta["note"] = 1
    b.nodes[0].module_path = "layer"
    assert structural_hash(a) == structural_hash(b)
    assert equal(a, b)


def test_the_order_of_params_plays_no_part_in_the_hash() -> None:
    a = read("def f() -> tuple[()]:\n    check(a=1, b=2)\n    return ()\n")
    b = read("def f() -> tuple[()]:\n    check(b=2, a=1)\n    return ()\n")
    assert structural_hash(a) == structural_hash(b)


def test_the_name_of_a_symbol_does_not_decide_the_order_of_a_size() -> None:
    text = """\
def f({0}: i64, {1}: i64, /, x: f32[{0}*{0} + {1}]) -> tuple[()]:
    return ()
"""
    assert equal(read(text.format("a", "b")), read(text.format("b", "a")))
    swapped = text.replace("{0}*{0} + {1}", "{1}*{1} + {0}")
    assert not equal(read(text.format("a", "b")), read(swapped.format("a", "b")))


VARIANTS = [
    "x, a=1", "x, a=1.0", "x, a=True", 'x, a="1"', "x, a=(1,)", "x, a=((1,),)",
    "x, a=(1, 1)", "x, a=None", "x, a=0.0", "x, a=-0.0", "x, a=nan", "x, a=inf",
    "x, a=f32", "x, a=f64", "x, a=f32[()]", 'x, a="f32"', "x, b=1", "x, a=n", "x, a=m",
    "x, a=2*n", "x, a=()", "y, a=1", "1.0, a=1", "f64(1.0), a=1", "1, a=1", "True, a=1",
    "-0.0, a=1", "0.0, a=1", "n, a=1", "x, y, a=1", "y, x, a=1", 'x, a="1\x1f"',
]  # fmt: skip


def test_different_graphs_have_different_hashes() -> None:
    head = "def f(n: i64, m: i64, /, {}) -> tuple[()]:\n    check({})\n    return ()\n"
    inputs = "x: f32, y: f32"
    graphs = [read(head.format(inputs, v.replace("\x1f", "\\x1f"))) for v in VARIANTS]
    for other in ("x: f32, *, y: f32", "x: f32[1], y: f32", "x: f64, y: f32"):
        graphs.append(read(head.format(other, "x, a=1")))
    graphs.append(read(head.format(inputs, "x, a=1").replace("check", "noise", 0)))
    text = head.format(inputs, "x, a=1").replace("tuple[()]", "f32")
    graphs += [read(text.replace("return ()", f"return {v}")) for v in ("x", "y")]
    hashes = [structural_hash(g) for g in graphs]
    repeated = {VARIANTS[hashes.index(h)] for h in hashes if hashes.count(h) > 1}
    assert repeated == {"x, a=1"}  # the one that was added once more, unchanged
    assert not equal(graphs[0], graphs[1])


def test_a_subgraph_counts() -> None:
    a, b = read(NESTED), read(NESTED.replace("cos(x)", "tan(x)"))
    assert structural_hash(a) != structural_hash(b)


def test_an_object_of_no_static_kind_counts_by_its_identity_or_its_key() -> None:
    class Keyed:
        def structural_key(self) -> str:
            return "same"

    def graph(value: Any) -> Graph:
        found = read("def f() -> tuple[()]:\n    check()\n    return ()\n")
        found.nodes[0].params["value"] = value
        return found

    one, other = object(), object()
    assert equal(graph(one), graph(one))
    assert not equal(graph(one), graph(other))
    assert equal(graph(Keyed()), graph(Keyed()))
    assert equal(graph(asarray), graph(asarray))
    assert not equal(graph(asarray), graph(read))


def test_a_graph_that_reads_a_foreign_value_has_no_hash() -> None:
    graph = read(NESTED)
    graph.outputs = (read(NESTED).inputs[0],)
    with pytest.raises(GraphError, match="does not define it before"):
        structural_hash(graph)
