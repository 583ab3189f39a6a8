"""Graphs: text, verifier, interpreter, hashes, edits, regions, generated code."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from hopflow import dtypes, pytree
from hopflow.bind import bind
from hopflow.errors import (
    ArgumentValueError,
    DTypeError,
    GraphError,
    ProgramFormatError,
    ShapeError,
    StructureError,
)
from hopflow.graph.codegen import compile_source, namespace, python_source
from hopflow.graph.core import Constant, Graph, Node, SourceLine, Var, map_graphs
from hopflow.graph.hashing import equal, structural_hash
from hopflow.graph.interpreter import interpret
from hopflow.graph.module import GraphModule, Specialization
from hopflow.graph.parser import parse
from hopflow.graph.printer import format_graph
from hopflow.graph.regions import (
    Port,
    Region,
    Role,
    Signature,
    add_invariants,
    bind_symbols,
    carries,
    drop_args,
    drop_results,
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
from hopflow.graph.types import SYMBOL_TYPE, TensorType
from hopflow.graph.verifier import verify
from hopflow.ops import elementwise, reduce, views  # noqa: F401
from hopflow.ops.opdef import OPERATIONS
from hopflow.symbolic.size import Symbol, symbol
from hopflow.tensor import asarray

# --- operators with subgraphs, as small as they can be --------------------------------


class Cond:
    """`cond(pred, *symbols, *operands, *captures; then, else_)`"""

    name = "cond"
    effects: frozenset[str] = frozenset()

    def result_types(
        self, types: Sequence[TensorType], params: dict[str, Any]
    ) -> tuple[TensorType, ...]:
        found: tuple[TensorType, ...] = params["then"].out_types
        return found

    def signature(self, node: Node) -> Signature:
        graphs = (node.params["then"], node.params["else_"])
        symbols = len(graphs[0].symbols)
        roles: list[Role] = ["symbol"] * symbols
        roles += ["operand"] * (len(graphs[0].inputs) - symbols)
        inputs = tuple(Port(r, i) for i, r in enumerate(roles, start=1))
        outputs = tuple(Port("result", i) for i in range(len(graphs[0].outputs)))
        regions = tuple(
            Region(name, graph, inputs, outputs, "at most once")
            for name, graph in zip(("then", "else_"), graphs, strict=True)
        )
        return Signature(("predicate", *roles), ("result",) * len(outputs), regions)

    def with_roles(
        self, params: dict[str, Any], args: Sequence[Role], results: Sequence[Role]
    ) -> dict[str, Any]:
        return params

    def format_sections(self, node: Node) -> list[tuple[Any, ...]]:
        end = 1 + len(node.params["then"].symbols)
        return [node.args[:1], node.args[1:end], node.args[end:]]

    def debug(self, pred: Any, *operands: Any, then: Any, else_: Any) -> Any:
        return then(*operands) if bool(pred) else else_(*operands)


class Loop:
    """`loop(*symbols, *carry, *xs, *captures; body, length, num_carry)`: a scan."""

    name = "loop"
    effects: frozenset[str] = frozenset()

    def result_types(
        self, types: Sequence[TensorType], params: dict[str, Any]
    ) -> tuple[TensorType, ...]:
        outs, n = params["body"].out_types, params["num_carry"]
        stacked = [t.with_shape((params["length"], *t.shape)) for t in outs[n:]]
        return (*outs[:n], *stacked)

    def signature(self, node: Node) -> Signature:
        body, n = node.params["body"], node.params["num_carry"]
        captures = len(body.captures)
        roles: list[Role] = ["symbol"] * len(body.symbols) + ["carry"] * n
        roles += ["slice"] * (len(node.args) - len(roles) - captures)
        roles += ["invariant"] * captures
        results: list[Role] = ["carry"] * n
        results += ["stacked"] * (len(node.results) - n)
        region = Region(
            "body",
            body,
            tuple(Port(r, i) for i, r in enumerate(roles)),
            tuple(Port(r, i) for i, r in enumerate(results)),
            "any times",
        )
        return Signature(tuple(roles), tuple(results), (region,))

    def with_roles(
        self, params: dict[str, Any], args: Sequence[Role], results: Sequence[Role]
    ) -> dict[str, Any]:
        return {**params, "num_carry": list(args).count("carry")}

    def debug(self, *args: Any, body: Any, length: Any, num_carry: int) -> Any:
        carry, xs = args[:num_carry], args[num_carry:]
        stacks = []
        for i in range(length):
            slices = [asarray(np.asarray(x)[i]) for x in xs]
            results = body(*carry, *slices)
            carry = results[:num_carry]
            stacks.append(results[num_carry:])
        ys = [
            asarray(np.stack([np.asarray(y) for y in c]))
            for c in zip(*stacks, strict=True)
        ]
        return (*carry, *ys)


class Op:
    """An operation whose results have the types of its first operands."""

    def __init__(self, name: str, outputs: int = 1, *effects: str) -> None:
        self.name = name
        self.outputs = outputs
        self.effects = frozenset(effects)

    def result_types(
        self, types: Sequence[TensorType], params: dict[str, Any]
    ) -> tuple[TensorType, ...]:
        return tuple(types[: self.outputs])


class Compress:
    """A result whose size only the run will tell."""

    name = "compress"
    effects: frozenset[str] = frozenset()

    def result_types(
        self, types: Sequence[TensorType], params: dict[str, Any]
    ) -> tuple[TensorType, ...]:
        return (types[0].with_shape((symbol("n"),)),)


OPERATORS: dict[str, Any] = {
    **OPERATIONS,
    "cond": Cond(),
    "loop": Loop(),
    "compress": Compress(),
    "noise": Op("noise", 1, "random"),
    "pair": Op("pair", 2),
    "check": Op("check", 0, "trap"),
}

NESTED = """\
graph f(s0: i64[], s1: i64[], /, x: f32[s0, s1], p: bool[], q: bool[]) -> f32[s0, s1]:
    graph then(s0: i64[], s1: i64[], /, *, q: bool[], x: f32[s0, s1]) -> f32[s0, s1]:
        graph then(s0: i64[], s1: i64[], /, *, x: f32[s0, s1]) -> f32[s0, s1]:
            %0: f32[s0, s1] = sin(x)  # model.py:3
            return %0
        graph else(s0: i64[], s1: i64[], /, *, x: f32[s0, s1]) -> f32[s0, s1]:
            %0: f32[s0, s1] = cos(x)
            return %0
        %0: f32[s0, s1] = cond(q; s0, s1; x; then=then, else=else)
        return %0
    graph else(s0: i64[], s1: i64[], /, *, q: bool[], x: f32[s0, s1]) -> f32[s0, s1]:
        return x
    %0: f32[s0, s1] = cond(p; s0, s1; q, x; then=then, else=else)
    return %0
"""

ALL_SORTS = """\
graph f(x: f32[3], y: f64[3, 0]) -> (f32[3], bool[], f64[]):
    %w: f32[3] = get_attr("w")
    %layers_0_w: f32[3] = get_attr("layers.0.w")    # net.py:12
    %0: f32[3] = add(%w, x, 2.0, -1:i32, nan, -inf:f64, True, -0.0)
    check(%0, a=f32, b=f32[3], c=None, d=(1, (2.5,), ()), e="a \\"b\\"\\\\\\n\\u20ac")
    %1: f32[3], %2: f32[3] = pair(%0, %layers_0_w)  # net.py:13
    %3: f32[3] = noise(%1, flag=True, size=-3, axes=(1,), x=1e-07, y=nan)
    return %3, False, inf:f64                       # net.py:14
"""

SCAN = """\
graph f(n: i64[], /, c: f32[n], d: f32[], xs: f32[5, n], w: f32[n]) -> f32[n]:
    graph body(n: i64[], /, c: f32[n], d: f32[], x: f32[n], *, w: f32[n]) -> (f32[n], f32[], f32[n]):
        %0: f32[n] = sin(w)
        %1: f32[n] = multiply(x, %0)
        %2: f32[n] = add(c, %1)
        %3: f32[] = add(d, 1.0)
        return %2, %3, %1
    %0: f32[n], %1: f32[], %2: f32[5, n] = loop(n, c, d, xs, w; body=body, length=5, num_carry=2)
    return %0
"""  # noqa: E501


def read(text: str) -> Graph:
    return parse(text, OPERATORS)


def arrays(results: Sequence[Any]) -> list[Any]:
    return [np.asarray(r) for r in results]


# --- text -----------------------------------------------------------------------------


@pytest.mark.parametrize("text", [NESTED, ALL_SORTS])
def test_text_is_read_and_written_as_it_was(text: str) -> None:
    assert format_graph(read(text)) == text


@pytest.mark.parametrize("width", [1, 30, 60, 1000])
@pytest.mark.parametrize("text", [NESTED, ALL_SORTS, SCAN])
def test_text_of_any_width_reads_back(text: str, width: int) -> None:
    graph = read(text)
    narrow = format_graph(graph, width=width)
    assert format_graph(read(narrow), width=width) == narrow
    assert equal(read(narrow), graph)


def test_a_wide_line_is_broken_within_its_brackets() -> None:
    graph = read(SCAN)
    assert format_graph(graph, width=60).splitlines()[-8:] == [
        "    %0: f32[n], %1: f32[], %2: f32[5, n] = loop(",
        "            n, c, d, xs, w;",
        "            body=body, length=5, num_carry=2",
        "    )",
        "    return %0",
    ][-8:] or "loop(" in format_graph(graph, width=60)


def test_source_lines_are_kept() -> None:
    graph = read(ALL_SORTS)
    assert graph.nodes[1].line == SourceLine("net.py", 12)
    assert graph.output_line == SourceLine("net.py", 14)


def test_a_line_that_a_comment_cannot_hold_is_left_out() -> None:
    graph = read(ALL_SORTS)
    graph.nodes[1].line = SourceLine("a\nreturn", 3)
    assert "net.py:12" not in format_graph(graph)
    assert equal(read(format_graph(graph)), graph)


def test_attributes_are_given_to_the_parser() -> None:
    graph = parse(ALL_SORTS, OPERATORS, {"w": 1})
    assert graph.attributes == {"w": 1, "layers.0.w": None}


def test_names_that_clash_are_made_different() -> None:
    graph = Graph("1 + 1")
    for name in ("x", "x", "return", "f32", "a b", "", "x_1"):
        graph.add_input(TensorType(dtypes.float32), name)
    size = symbol("x")
    [bound] = size.terms[0][0]  # type: ignore[union-attr]
    var = graph.add_input(SYMBOL_TYPE, "x", "symbol", bound)
    graph.inputs.insert(0, graph.inputs.pop())
    graph.add_input(TensorType(dtypes.float32, (size,)), "y", "capture")
    graph.outputs = (var,)
    text = format_graph(graph)
    assert (
        text.splitlines()[0]
        == (
            "graph _1___1(x: i64[], /, x_1: f32[], x_2: f32[], _return: f32[], "
            "_f32: f32[], a_b: f32[], x_3: f32[],"
        )
        or "x_1: f32[], x_2: f32[], _return: f32[], _f32: f32[]" in text
    )
    assert format_graph(read(text)) == text
    assert equal(read(text), graph)


def test_a_graph_that_two_nodes_share_is_written_once() -> None:
    text = """\
graph f(p: bool[], x: f32[]) -> f32[]:
    graph then(x: f32[]) -> f32[]:
        return x
    %0: f32[] = cond(p; x; then=then, else=then)
    %1: f32[] = cond(p; %0; then=then, else=then)
    return %1
"""
    graph = read(text)
    assert format_graph(graph) == text
    assert len({id(g) for n in graph.nodes for g in n.graphs.values()}) == 1


def test_sizes_are_polynomials_in_normal_form() -> None:
    text = """\
graph f(b: i64[], a: i64[], /, x: f32[2*a*b - a + 3, a*a]) -> i64[-b + 7]:
    %0: i64[-b + 7] = iota(axis=0, dtype=i64, shape=(-b + 7,))
    return %0
"""
    graph = read(text)
    assert format_graph(graph) == text
    assert equal(read(text.replace("2*a*b - a + 3", "3 + a*b - a + b*a")), graph)


def test_an_object_of_no_static_kind_is_shown() -> None:
    graph = read("graph f(x: f32[]) -> ():\n    check(x)\n    return\n")
    graph.nodes[0].params["fn"] = asarray
    assert "check(x, fn=<asarray>)" in format_graph(graph)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: expected `graph`, found the end of the text."),
        ("grph f()", "line 1: expected `graph`, found `grph`"),
        ("graph f(x: f32[]) -> f32[]:\n    return %0\n", "line 2: `%0` is not defined"),
        ("graph f(x: q32[])", "line 1: expected a dtype such as `f32`, found `q32`"),
        ("graph f(x: f32[n])", "`n` is not a symbol defined before"),
        ("graph f(n: f32[], /)", "the symbol `n` must be i64[], not f32[]"),
        ("graph f(x: f32[], x: f32[])", "`x` is reserved, or defined twice"),
        ("graph f() -> ():\nreturn\n", "must be indented deeper"),
        ("graph f() -> ():\n  check()\n   return\n", "line 3: expected the line at"),
        ("graph f() -> ():\n  return\nx", "expected the end of the text"),
        ("graph f() -> ():\n  foo()\n  return", "line 2: there is no operator `foo`"),
        ("graph f() -> f32[]:\n  return", "returns (), but is declared to return"),
        ("graph f() -> ():\n  check(a=1, 2)", "expected a parameter"),
        ("graph f() -> ():\n  check(a=1, a=2)", "parameter `a` is given twice"),
        ("graph f() -> ():\n  check(?)", "line 2: `?` has no meaning here"),
        ("graph f() -> ():\n  check(a=-True)", "expected a number after `-`"),
        ("graph f() -> ():\n  check(1:x)", "expected a dtype"),
        ("graph f() -> ():\n  check(a=f32[1.5])", "a size, which is an integer"),
        ("graph f() -> ():\n  get_attr(3)", "an attribute's name in quotes"),
        ("graph f() -> ():\n  get_attr(\"w\")", "must be read once, as one result"),
        ("graph f() -> ():\n  graph g() -> ():\n    return\n  graph g() -> ():\n"
         "    return\n  return", "line 4: `g` is defined twice"),
        ('graph f() -> ():\n  check(a="\\U99999999")', "code that is no character's"),
        ("graph f() -> ():\n  check(a=" + "9" * 500 + ")", "more than 400 digits"),
        ("graph f() -> ():\n  check(a=" + "(" * 80 + ")", "deeper than 64"),
        ("graph f() -> ():\n  check(a=" + "1+" * 80 + "1)", "more than 64 terms"),
        ("graph f() -> ():\n  check(a=" + "2*" * 80 + "1)", "more than 64 factors"),
        ("".join(" " * i + "graph f() -> ():\n" for i in range(80)), "deeper than 64"),
    ],
)  # fmt: skip
def test_what_is_no_graph_is_refused_with_its_line(text: str, message: str) -> None:
    with pytest.raises(ProgramFormatError) as error:
        read(text)
    assert message in str(error.value)


# --- the verifier ---------------------------------------------------------------------


@pytest.mark.parametrize("text", [NESTED, SCAN])
def test_a_good_graph_passes(text: str) -> None:
    verify(read(text))


def test_a_size_that_a_result_brings_forth_is_bound_by_it() -> None:
    text = """\
graph f(x: f32[4]) -> f32[u]:
    %0: f32[u] = compress(x)
    %1: f32[u] = sin(%0)
    return %1
"""
    verify(read(text))


HEAD = "graph f(n: i64[], /, x: f32[n], p: bool[]) -> f32[n]:\n    "


def broken_graphs() -> dict[str, tuple[Graph, str]]:
    """Each with the rule that it breaks."""
    f32 = TensorType(dtypes.float32)
    found: dict[str, tuple[Graph, str]] = {}

    def add(name: str, message: str, text: str = NESTED) -> Graph:
        graph = read(text)
        found[name] = graph, message
        return graph

    graph = add("order", "in the order symbols, operands, captures")
    graph.inputs.reverse()
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
    graph = add(
        "type", "result 0 is f32[s0, s1], as the operator infers, and not f32[]"
    )
    graph.nodes[0].results[0].type = f32
    graph = add("count", "the operator gives 1 results, and the node has 2")
    node = graph.nodes[0]
    node.results += (Var(node, 1, f32),)
    node.op = Op("one")
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
    for literal in ("300:i8", "1.5:i32", "1:bool"):
        text = f"graph f() -> ():\n    check({literal})\n    return\n"
        add(literal, "the constant", text)
    text = "graph f(x: f32[2], y: f32[3]) -> f32[2]:\n    %0: f32[2] = add(x, y)\n"
    add(
        "infer",
        "the operands have types that the operator takes",
        text + "    return %0",
    )
    graph = add("arity", "the operator takes 5 args of this signature, not 4")
    graph.nodes[0].args = graph.nodes[0].args[:4]
    graph = add("input type", "input 3 of `then`, a operand, is f32[s0, s1] within")
    graph.nodes[0].args = (*graph.nodes[0].args[:4], Constant(1.0, f32))
    graph = add("outputs", "`else_` has 1 outputs, not 2")
    graph.nodes[0].params["else_"].outputs *= 2
    graph = add("symbol role", "is a symbol where the operator says so")
    graph.nodes[0].params["else_"].inputs.reverse()
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


X = np.arange(6, dtype=np.float32).reshape(2, 3)


def run_nested(op: Any, args: Sequence[Any], params: dict[str, Any]) -> Any:
    """`bind`, with the operators of this file interpreted."""
    if not isinstance(op, Cond | Loop):
        return bind(op, args, params)
    node = Node("call_function", op, tuple(args), params)
    types = op.result_types([], params)
    node.results = tuple(Var(node, i, t) for i, t in enumerate(types))
    signature = op.signature(node)

    def function(graph: Graph) -> Any:
        [region] = [r for r in signature.regions if r.graph is graph]

        def call(*own: Any) -> Any:
            given = iter(own)
            inputs = [
                args[p.at]
                if p.at is not None and (v.node.section != "operand")
                else next(given)
                for v, p in zip(graph.inputs, region.inputs, strict=True)
            ]
            return interpret(graph, inputs, run_nested)

        return call

    sections = zip(args, signature.args, strict=True)
    end = len(args) - len(signature.regions[0].graph.captures)
    own = [a for i, (a, r) in enumerate(sections) if r != "symbol" and i < end]
    return op.debug(*own, **map_graphs(params, function))


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
graph f(n: i64[], m: i64[], /, x: f32[n]) -> (f32[m, n], i64[]):
    %0: f32[m, n] = broadcast_to(x, shape=(m, n))
    %1: i64[] = add(m, n)
    return %0, %1
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
graph f(x: f32[4]) -> f32[2*u]:
    %0: f32[u] = compress(x)
    %1: f32[2*u] = noise(%0, size=(2*u,))
    return %1
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
    text = "graph f(n: i64[], /) -> f32[n]:\n"
    text += "    %0: f32[n] = full(2.0, shape=(n,))\n    return %0\n"
    seen = []

    def run(op: Any, args: Any, params: Any) -> Any:
        seen.append(params["shape"][0])
        return [asarray(np.ones(3, np.float32))]

    interpret(read(text), [Traced()], run)
    assert seen[0] is size


def test_constants_and_inputs_may_be_outputs() -> None:
    graph = read("graph f(x: f32[]) -> (f32[], i8[]):\n    return x, 3:i8\n")
    x = asarray(1.0)
    assert interpret(graph, [x], bind) == (x, Constant(3, TensorType(dtypes.int8)))


def test_a_wrong_number_of_arguments_is_refused() -> None:
    with pytest.raises(GraphError, match="takes 5 inputs and was given 1"):
        interpret(read(NESTED), [1], bind)


def test_a_size_that_nothing_tells_is_refused() -> None:
    graph = read("graph f() -> ():\n    check()\n    return\n")
    graph.nodes[0].params["size"] = symbol("n")
    graph.add_input(SYMBOL_TYPE, "m", "symbol", Symbol("m"))
    with pytest.raises(GraphError, match="the size `n` is used before"):
        interpret(graph, [3], bind)


# --- hashes ---------------------------------------------------------------------------


def test_names_lines_and_notes_play_no_part_in_the_hash() -> None:
    other = NESTED
    for old, new in [("s0", "a"), ("s1", "b"), ("x:", "y:"), ("(x)", "(y)")]:
        other = other.replace(old, new)
    other = other.replace(", x;", ", y;").replace("; x;", "; y;")
    other = other.replace("return x", "return y").replace("graph f", "graph g")
    a, b = read(NESTED), read(other)
    b.nodes[0].meta["note"] = 1
    b.nodes[0].module_path = "layer"
    assert structural_hash(a) == structural_hash(b)
    assert equal(a, b)


def test_the_order_of_params_plays_no_part_in_the_hash() -> None:
    a = read("graph f() -> ():\n    check(a=1, b=2)\n    return\n")
    b = read("graph f() -> ():\n    check(b=2, a=1)\n    return\n")
    assert structural_hash(a) == structural_hash(b)


def test_the_name_of_a_symbol_does_not_decide_the_order_of_a_size() -> None:
    text = (
        "graph f({0}: i64[], {1}: i64[], /, x: f32[{0}*{0} + {1}]) -> ():\n    return\n"
    )
    assert equal(read(text.format("a", "b")), read(text.format("b", "a")))
    swapped = text.replace("{0}*{0} + {1}", "{1}*{1} + {0}")
    assert not equal(read(text.format("a", "b")), read(swapped.format("a", "b")))


VARIANTS = [
    "x; a=1", "x; a=1.0", "x; a=True", 'x; a="1"', "x; a=(1,)", "x; a=((1,),)",
    "x; a=(1, 1)", "x; a=None", "x; a=0.0", "x; a=-0.0", "x; a=nan", "x; a=inf",
    "x; a=f32", "x; a=f64", "x; a=f32[]", 'x; a="f32"', "x; b=1", "x; a=n", "x; a=m",
    "x; a=2*n", "x; a=()", "y; a=1", "1.0; a=1", "1.0:f64; a=1", "1; a=1", "True; a=1",
    "-0.0; a=1", "0.0; a=1", "n; a=1", "x, y; a=1", "y, x; a=1", 'x; a="1\x1f"',
]  # fmt: skip


def test_different_graphs_have_different_hashes() -> None:
    head = "graph f(n: i64[], m: i64[], /, {}) -> ():\n    check({})\n    return\n"
    inputs = "x: f32[], y: f32[]"
    graphs = [read(head.format(inputs, v.replace("\x1f", "\\x1f"))) for v in VARIANTS]
    for other in ("x: f32[], *, y: f32[]", "x: f32[1], y: f32[]", "x: f64[], y: f32[]"):
        graphs.append(read(head.format(other, "x; a=1")))
    graphs.append(read(head.format(inputs, "x; a=1").replace("check", "noise", 0)))
    text = head.format(inputs, "x; a=1").replace("-> ()", "-> f32[]")
    graphs += [read(text.replace("return", f"return {v}")) for v in ("x", "y")]
    hashes = [structural_hash(g) for g in graphs]
    repeated = {VARIANTS[hashes.index(h)] for h in hashes if hashes.count(h) > 1}
    assert repeated == {"x; a=1"}  # the one that was added once more, unchanged
    assert not equal(graphs[0], graphs[1])


def test_a_subgraph_counts() -> None:
    a, b = read(NESTED), read(NESTED.replace("cos(x)", "tan(x)"))
    assert structural_hash(a) != structural_hash(b)


def test_an_object_of_no_static_kind_counts_by_its_identity_or_its_key() -> None:
    class Keyed:
        def structural_key(self) -> str:
            return "same"

    def graph(value: Any) -> Graph:
        found = read("graph f() -> ():\n    check()\n    return\n")
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


def test_a_clone_shares_what_was_shared() -> None:
    graph = read(NESTED)
    graph.nodes[0].params["else_"] = graph.nodes[0].params["then"]
    params = clone(graph).nodes[0].params
    assert params["then"] is params["else_"] is not graph.nodes[0].params["then"]


def test_uses_are_replaced_all_at_once() -> None:
    graph = read(
        "graph f(x: f32[], y: f32[]) -> (f32[], f32[]):\n"
        "    %0: f32[] = add(x, y)\n    return %0, x\n"
    )
    x, y = graph.inputs
    replace_uses(graph, {x: y, y: x})
    assert format_graph(graph).splitlines()[1:] == [
        "    %0: f32[] = add(y, x)",
        "    return %0, y",
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
graph f(p: bool[], x: f32[]) -> ():
    %w: f32[] = get_attr("w")
    graph then(x: f32[]) -> ():
        %0: f32[] = sin(x)
        %1: f32[] = noise(x)
        return
    graph else(x: f32[]) -> ():
        return
    cond(p; x; then=then, else=else)
    cond(p; x; then=else, else=else)
    %0: f32[] = sin(%w)
    %1: f32[] = cos(%0)
    return
""")
    assert effects(graph) == {"random"}
    assert eliminate_dead_code(graph) == 5
    assert [n.op.name for n in graph.walk()] == ["cond", "noise"]
    assert graph.attributes == {}
    verify(graph)


def test_inputs_that_no_graph_reads_are_pruned() -> None:
    head = "graph f(n: i64[], m: i64[], k: i64[], /, x: f32[k], *, "
    first = read(head + "u: f32[n], v: f32[], w: f32[m]) -> f32[m]:\n    return w\n")
    other = read(head + "u: f32[n], v: f32[], w: f32[m]) -> f32[k]:\n    return x\n")
    assert prune_inputs([first, other]) == [1, 2, 5]
    assert [v.node.name for v in first.inputs] == ["m", "k", "x", "w"]
    assert [v.node.name for v in other.inputs] == ["m", "k", "x", "w"]
    verify(first)


def test_a_graph_is_inlined_with_its_sizes() -> None:
    graph = read("""\
graph f(n: i64[], /, p: bool[], x: f32[n]) -> f32[n]:
    graph then(a: i64[], /, x: f32[a]) -> f32[a]:
        %0: f32[a] = broadcast_to(1.0, shape=(a,))
        %1: f32[a] = add(x, %0)
        return %1
    graph else(a: i64[], /, x: f32[a]) -> f32[a]:
        return x
    %0: f32[n] = cond(p; n; x; then=then, else=else)
    return %0
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
graph f(n: i64[], /, p: bool[], x: f32[n]) -> f32[n]:
    %0: f32[n] = broadcast_to(1.0, shape=(n,))
    %1: f32[n] = add(x, %0)
    return %1
"""
    )


def test_what_is_inlined_twice_has_attributes_and_symbols_of_its_own() -> None:
    text = """\
graph f(x: f32[4]) -> f32[u]:
    %w: f32[4] = get_attr("w")
    %0: f32[u] = compress(%w)
    return %0
"""
    graph, body = read(text), read(text)
    for _ in range(2):
        inline(graph, len(graph.nodes), body, graph.inputs, {})
    verify(graph)
    assert set(graph.attributes) == {"w", "w_1", "w_2"}


def test_symbols_are_substituted_in_types_and_params() -> None:
    graph = read("""\
graph f(n: i64[], /, x: f32[n]) -> f32[2*n]:
    %0: f32[2*n] = broadcast_to(1.0, shape=(2*n,))
    return %0
""")
    [bound] = [v.node.symbol for v in graph.symbols]
    assert bound is not None
    substitute_symbols(graph, {bound: 4})
    assert prune_inputs([graph]) == []
    assert (
        format_graph(graph)
        == """\
graph f(x: f32[4]) -> f32[8]:
    %0: f32[8] = broadcast_to(1.0, shape=(8,))
    return %0
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
    assert "cond(p; then=then, else=else)" in format_graph(graph)


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


def scan_args() -> list[Any]:
    values = (np.ones(3), np.float64(0), np.arange(15.0).reshape(5, 3), np.ones(3))
    return [3, *(asarray(np.asarray(v, np.float32)) for v in values)]


def test_an_added_value_has_the_types_of_each_region() -> None:
    graph = read("""\
graph f(n: i64[], /, p: bool[], x: f32[n], y: f32[2*n]) -> f32[n]:
    graph then(a: i64[], /, x: f32[a]) -> f32[a]:
        return x
    graph else(b: i64[], /, x: f32[b]) -> f32[b]:
        return x
    %0: f32[n] = cond(p; n; x; then=then, else=else)
    return %0
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


# --- modules and generated code -------------------------------------------------------


def module(text: str, *args: Any, **kwargs: Any) -> GraphModule:
    def run(graph: Graph, args: Sequence[Any]) -> Any:
        return interpret(graph, args, run_nested)

    graph = read(text)
    out_spec = pytree.structure(tuple(graph.outputs))
    spec = pytree.structure(args)
    return GraphModule(graph, spec, out_spec, run=run, as_value=asarray, **kwargs)


def test_a_module_is_called_with_pytrees() -> None:
    gm = module(NESTED, {"x": 0}, [0, 0])
    [result] = gm({"x": X}, [asarray(True), asarray(False)])
    np.testing.assert_allclose(np.asarray(result), np.cos(X), rtol=1e-6)
    with pytest.raises(StructureError, match="another structure than in the trace"):
        gm(X)
    with pytest.raises(DTypeError, match=r"`args\[0\]\['x'\]` was f32\[s0, s1\]"):
        gm({"x": X.astype(np.float64)}, [asarray(True), asarray(False)])
    with pytest.raises(ShapeError, match=r"`args\[1\]\[0\]` was bool\[\] in the trace"):
        gm({"x": X}, [asarray(np.ones(2, np.bool_)), asarray(False)])


def test_a_module_refuses_another_value_than_it_was_specialized_to() -> None:
    text = "graph f(x: f32[]) -> f32[]:\n    return x\n"
    gm = module(text, 0, 0, specializations={1: Specialization("args[1]", 3)})
    assert float(gm(asarray(1.0), 3)[0]) == 1.0
    for other in (4, 3.0, True):
        with pytest.raises(ArgumentValueError, match=r"`args\[1\]` was 3 in the trace"):
            gm(asarray(1.0), other)


def test_a_number_among_the_arguments_may_be_a_symbol() -> None:
    text = """\
graph f(n: i64[], /) -> f32[n]:
    %0: f32[n] = full(2.0, shape=(n,))
    return %0
"""
    graph = read(text)
    [bound] = [v.node.symbol for v in graph.symbols]
    gm = module(text, 0)
    with pytest.raises(GraphError, match="no argument's shape tells it"):
        GraphModule(
            graph,
            pytree.structure(()),
            gm.out_spec,
            run=bind,
            as_value=asarray,  # type: ignore[arg-type]
        )()
    gm.graph, gm.numbers = graph, {0: bound}  # type: ignore[dict-item]
    assert np.asarray(gm(3)[0]).tolist() == [2.0, 2.0, 2.0]


def test_a_module_has_no_captures_and_as_many_tensors_as_operands() -> None:
    text = "graph f(*, w: f32[]) -> ():\n    return\n"
    with pytest.raises(GraphError, match="`w` is an input"):
        module(text)
    gm = module("graph f(x: f32[]) -> ():\n    return\n")
    with pytest.raises(GraphError, match="has 1 operands, and its module 0"):
        gm()


def test_a_module_shows_itself(capsys: pytest.CaptureFixture[str]) -> None:
    gm = module(NESTED)
    assert str(gm) == NESTED
    assert repr(gm) == (
        "<GraphModule f(s0: i64[], s1: i64[], /, x: f32[s0, s1], p: bool[], q: bool[])"
        " -> f32[s0, s1]: 4 nodes>"
    )
    assert gm.print_readable() == gm.code == capsys.readouterr().out.removesuffix("\n")
    assert gm.print_readable(print_output=False) == gm.code
    assert capsys.readouterr().out == ""
    assert gm.attributes == {}


def test_a_graph_is_python_source_with_nested_functions() -> None:
    assert (
        python_source(read(NESTED))
        == """\
def f(x, p, q):
    # (x: f32[s0, s1], p: bool[], q: bool[]) -> (f32[s0, s1])
    s0 = x.shape[0]
    s1 = x.shape[1]
    def then():
        def then_1():
            t0 = op.sin(x)  # f32[s0, s1]  model.py:3
            return (t0,)
        def else_():
            t1 = op.cos(x)  # f32[s0, s1]
            return (t1,)
        t2 = op.cond(q, then=then_1, else_=else_)  # f32[s0, s1]
        return (t2,)
    def else__1():
        return (x,)
    t3 = op.cond(p, then=then, else_=else__1)  # f32[s0, s1]
    return (t3,)
"""
    )


@pytest.mark.parametrize("text", [NESTED, SCAN])
def test_the_source_computes_what_the_graph_does(text: str) -> None:
    graph = read(text)
    args = [2, 3, asarray(X), asarray(True), asarray(False)]
    if text is SCAN:
        args = scan_args()
    expected = arrays(interpret(graph, args, run_nested))
    function = compile_source(graph, namespace(OPERATORS, run_nested))
    found = arrays(function(*args[len(graph.symbols) :]))
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_source_has_all_sorts_of_values() -> None:
    graph = read(ALL_SORTS)
    graph.nodes[3].params["fn"] = marker = object()
    seen: list[Any] = []

    def run(op: Any, args: Sequence[Any], params: dict[str, Any]) -> Any:
        seen.append((op.name, args, params))
        return [
            asarray(np.ones(3, np.float32)) for _ in range(getattr(op, "outputs", 1))
        ]

    graph.attributes["w"] = asarray(1.0)
    function = compile_source(graph, namespace(OPERATORS, run))
    results = function(asarray(np.ones(3, np.float32)), None)
    expected = graph.nodes[2].args[2:]
    found = seen[0][1][2:]
    assert repr(found) == repr(list(expected))
    assert [a.type for a in found] == [a.type for a in expected]
    assert seen[1][2] == {**graph.nodes[3].params, "fn": marker}
    assert math.isnan(seen[3][2].pop("y"))
    assert seen[3][2] == {"flag": True, "size": -3, "axes": (1,), "x": 1e-07}
    assert results[1:] == (False, Constant(math.inf, TensorType(dtypes.float64)))


def test_names_in_source_cannot_break_out_of_it() -> None:
    graph = Graph("f():\n    import os\ndef g")
    size = symbol("n\nimport os\n")
    node = graph.call(Op("a b"), [], {"a": "\n"}, [TensorType(dtypes.float32, (size,))])
    node.line = SourceLine("x\nimport os", 1)
    source = python_source(graph)
    assert [line.split("  #")[0] for line in source.splitlines()] == [
        "def f_______import_os_def_g():",
        "    # () -> ()",
        "    t0 = getattr(op, 'a b')(a='\\n')",
        "    n_import_os_ = t0.shape[0]",
        "    return ()",
    ]
