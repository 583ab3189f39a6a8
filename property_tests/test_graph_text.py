"""Graphs nobody wrote: text reads back, hashes are blind to names, junk is refused."""

import ast
import re
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hopflow as hf
from hopflow import dtypes, pytree
from hopflow.bind import bind
from hopflow.errors import GraphError, ProgramFormatError
from hopflow.graph.core import Arg, Constant, Graph, Node, Section, SourceLine, Var
from hopflow.graph.hashing import equal, structural_hash
from hopflow.graph.interpreter import interpret
from hopflow.graph.parser import parse
from hopflow.graph.printer import format_graph, named_objects
from hopflow.graph.rewriting import clone, eliminate_dead_code
from hopflow.graph.running import run_text
from hopflow.graph.types import SYMBOL_TYPE, TensorType
from hopflow.graph.verifier import verify
from hopflow.hops.base import interpreted
from hopflow.symbolic.size import (
    Size,
    SymInt,
    free_symbols,
    sym_max,
    sym_min,
    symbol,
)
from hopflow.tensor import asarray
from hopflow.testing.graphs import OPERATORS, Op
from hopflow.testing.program import Program
from hopflow.testing.strategies import programs

pytestmark = pytest.mark.slow

# Operators that take anything: what is tested is the graph, not what it computes.
ANY = {name: Op(name) for name in ("alpha", "beta", "nest")}
TABLE = {**OPERATORS, **ANY}

names = st.one_of(
    st.sampled_from(
        ["x", "y", "x_1", "def", "return", "f32", "body", "n", "s0", "v0", "alpha"]
    ),
    st.text(max_size=5),
)
SIGNS = list('()[]:;,=*/-%\n#"')
widths = st.integers(1, 150)


@st.composite
def draw_sizes(draw: st.DrawFn, symbols: Sequence[Size]) -> Size:
    """A size over the symbols, or a number."""
    size: Size = draw(st.integers(0, 9))
    for s in draw(st.lists(st.sampled_from(symbols), max_size=3)) if symbols else ():
        size = size + draw(st.integers(-3, 3)) * s * draw(st.sampled_from([1, s]))
        match draw(st.integers(0, 5)):
            case 0:
                size = size // draw(st.integers(1, 4))
            case 1:
                size = s * (size % 3)
            case 2:
                size = sym_max(sym_min(size, s + 3), 1)
    return size


@st.composite
def draw_types(draw: st.DrawFn, symbols: Sequence[Size]) -> TensorType:
    shape = draw(st.lists(draw_sizes(symbols), max_size=3))
    return TensorType(draw(st.sampled_from(dtypes.ALL)), tuple(shape))


def draw_statics(symbols: Sequence[Size]) -> st.SearchStrategy[Any]:
    """Every kind of static parameter, but for graphs."""
    leaves = st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(),
        st.sampled_from(dtypes.ALL),
        draw_types(symbols),
        draw_sizes(symbols),
    )
    return st.recursive(leaves, lambda s: st.lists(s, max_size=3).map(tuple))


@st.composite
def draw_constants(draw: st.DrawFn) -> Constant:
    dtype = draw(st.sampled_from(dtypes.ALL))
    if dtype.kind == "b":
        return Constant(draw(st.booleans()), TensorType(dtype))
    if dtype.is_float:
        return Constant(draw(st.floats() | st.integers(-9, 9)), TensorType(dtype))
    info = dtypes.iinfo(dtype)
    return Constant(draw(st.integers(info.min, info.max)), TensorType(dtype))


@st.composite
def draw_graphs(draw: st.DrawFn, depth: int = 1) -> Graph:
    """A graph that keeps the rules of text (not those of the operators' types)."""
    graph = Graph(draw(names))
    symbols: list[SymInt] = []
    for _ in range(draw(st.integers(0, 3))):
        size = symbol(draw(names))
        assert isinstance(size, SymInt)
        [bound] = free_symbols(size)
        graph.add_input(SYMBOL_TYPE, bound.name, "symbol", bound)
        symbols.append(size)
    sections: tuple[Section, ...] = ("operand", "capture")
    for section in sections:
        for _ in range(draw(st.integers(0, 3))):
            graph.add_input(draw(draw_types(symbols)), draw(names), section)
    values: list[Arg] = list(graph.inputs)
    for i in range(draw(st.integers(0, 4))):
        if draw(st.integers(0, 9)) == 0:
            type_ = draw(draw_types(symbols))
            values.append(graph.add_attribute(type_, f"{draw(names)}{i}", None))
            continue
        node = draw_node(draw, graph, values, symbols, depth)
        values += node.results
    graph.outputs = draw_args(draw, values)
    return graph


def draw_args(draw: st.DrawFn, values: Sequence[Arg]) -> tuple[Arg, ...]:
    known = st.sampled_from(values) | draw_constants() if values else draw_constants()
    return tuple(draw(st.lists(known, max_size=3)))


def draw_node(
    draw: st.DrawFn,
    graph: Graph,
    values: Sequence[Arg],
    symbols: Sequence[SymInt],
    depth: int,
) -> Node:
    keys = st.sampled_from(["a", "axis", "else_", "f32"])
    params = draw(st.dictionaries(keys, draw_statics(symbols), max_size=2))
    if depth and draw(st.booleans()):
        inner = draw(draw_graphs(depth - 1))
        params["body"] = inner
        if draw(st.booleans()):
            params["branches"] = (inner, draw(draw_graphs(depth - 1)))
    types = draw(st.lists(draw_types(symbols), max_size=2))
    op = ANY[draw(st.sampled_from(sorted(ANY)))]
    node = graph.call(op, draw_args(draw, values), params, types)
    if draw(st.booleans()):
        line = draw(st.integers(1, 999_999_999))
        node.line = SourceLine(draw(st.text(max_size=5)), line)
    return node


def renamed(graph: Graph, suffix: str) -> Graph:
    """A copy whose names, of symbols too, are others."""
    text = format_graph(graph)
    copy = parse(text, TABLE)
    for item in (copy, *(g for n in copy.walk() for g in n.graphs.values())):
        item.name += suffix
        for position, var in enumerate(item.inputs):
            var.node.name = f"{suffix}{len(item.inputs) - position}"
            if var.node.symbol is not None:
                object.__setattr__(var.node.symbol, "name", var.node.name)
    return copy


@given(draw_graphs(), widths)
def test_text_reads_back_to_the_same_graph_and_text(graph: Graph, width: int) -> None:
    text = format_graph(graph, width=width)
    found = parse(text, TABLE)
    assert format_graph(found, width=width) == text
    assert equal(found, graph)
    assert structural_hash(found) == structural_hash(graph)


@given(draw_graphs())
def test_a_hash_is_blind_to_names(graph: Graph) -> None:
    assert structural_hash(renamed(graph, "z")) == structural_hash(graph)


@given(draw_graphs())
def test_a_clone_has_the_same_text(graph: Graph) -> None:
    assert format_graph(clone(graph)) == format_graph(graph)


@given(draw_graphs(), draw_graphs())
def test_graphs_are_equal_only_if_their_texts_are(a: Graph, b: Graph) -> None:
    assert equal(a, b) == (structural_hash(a) == structural_hash(b))
    if format_graph(a) == format_graph(b):
        assert equal(a, b)


@given(draw_graphs(), st.data())
def test_mangled_text_is_read_or_refused(graph: Graph, data: st.DataObject) -> None:
    text = format_graph(graph)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(text)))
        gone = data.draw(st.integers(0, 5))
        new = data.draw(st.text(max_size=3) | st.sampled_from(list('()[]:;,=*/-%\n#"')))
        text = text[:at] + new + text[at + gone :]
    refused_or_read(text)


@given(st.text() | st.text('def f()->:[]%=,;0123 \n"\\/*-+.e#ux'))
def test_any_text_is_read_or_refused(text: str) -> None:
    refused_or_read(text)
    refused_or_read(f"def f() -> tuple[()]:\n    alpha({text})\n    return ()\n")


def refused_or_read(text: str) -> None:
    try:
        graph = parse(text, TABLE)
    except ProgramFormatError:
        return
    assert equal(parse(format_graph(graph), TABLE), graph)


# --- graphs of real operations --------------------------------------------------------

F32 = TensorType(dtypes.float32, (3,))


@st.composite
def draw_programs(draw: st.DrawFn) -> Graph:
    """Straight-line arithmetic on f32[3], well typed."""
    graph = Graph("f")
    values: list[Var] = [graph.add_input(F32, f"x{i}") for i in range(2)]
    scalar = Constant(0.5, TensorType(dtypes.float32))
    for _ in range(draw(st.integers(1, 6))):
        op = OPERATORS[draw(st.sampled_from(["add", "multiply", "maximum", "abs"]))]
        args: list[Arg] = [draw(st.sampled_from(values))]
        if op.name != "abs":
            args.append(draw(st.sampled_from(values) | st.just(scalar)))
        values += graph.call(op, args, {}, [F32]).results
    graph.outputs = tuple(
        draw(st.lists(st.sampled_from(values), min_size=1, max_size=3))
    )
    return graph


@given(draw_programs())
def test_dead_code_elimination_keeps_the_results(graph: Graph) -> None:
    verify(graph)
    args = [asarray(np.array(v, np.float32)) for v in ([1, -2, 3], [0.5, 0, -1])]
    expected = interpret(graph, args, bind)
    eliminate_dead_code(graph)
    verify(graph)
    for a, b in zip(interpret(graph, args, bind), expected, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    assert eliminate_dead_code(graph) == 0


@given(
    programs("exact", aliasing=True, mutation=True, size=4) | programs(size=3, depth=1),
    st.sampled_from(["real", "symbolic"]),
)
def test_the_text_of_a_drawn_program_reads_back_and_runs(
    program: Program, mode: str
) -> None:
    args = [hf.asarray(x.value) for x in program.arguments]
    module = hf.trace(program.function(), *args, mode=mode, dynamic=False)
    graph = module.graph
    operators = {node.op.name: node.op for node in graph.walk() if node.op is not None}
    text, objects = format_graph(graph), named_objects(graph)
    assert ast.unparse(ast.parse(text)) == ast.unparse(ast.parse(module.code).body[1])
    again = parse(text, operators, graph.attributes, objects)
    assert structural_hash(again) == structural_hash(graph)
    assert format_graph(again) == text
    with interpreted():
        results = [
            pytree.flatten(module.evaluated(partial(run, bind=bind), *args))[0]
            for run in (interpret, run_text)
        ]
    for a, b in zip(*results, strict=True):
        assert a.type == b.type
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


# --- graphs from strangers ------------------------------------------------------------

X = asarray(np.arange(12, dtype=np.float64).reshape(4, 3))
TRACED = [
    hf.trace(f, X, mode=mode).graph
    for mode in ("real", "symbolic")
    for f in (
        lambda x: hf.while_loop(
            lambda n, c: n < 4, lambda n, c: (n + 1, hf.sin(c) @ x.T @ x), (0, x)
        ),
        lambda x: hf.scan(lambda c, r: (c + r, hf.sum(c * r)), x[0], x, reverse=True),
        lambda x: hf.cond(hf.sum(x) > 0, lambda: hf.pad(x, 1)[1:-1, 1:-1], lambda: -x),
        lambda x: hf.map(
            lambda r: hf.switch(hf.argmax(r), [lambda: r, lambda: hf.roll(r, 1)]), x
        ),
        lambda x: hf.associative_scan(lambda a, b: a * b + 1, x),
        lambda x: (hf.take(x, hf.argsort(x[:, 0]), axis=0), x.at[1, 2].set(3.0)),
        lambda x: (hf.reshape(x, (2, 6)), hf.concat([x, x], axis=1), hf.sort(x)),
        hf.grad(lambda x: hf.sum(hf.scan(lambda c, r: (c * r, c), x[0], x)[1])),
    )
]
TEXTS = [re.findall(r"\w+|\s+|[^\w\s]", format_graph(graph)) for graph in TRACED]
REAL = {node.op.name: node.op for g in TRACED for node in g.walk() if node.op}
words = st.sampled_from(sorted({word for text in TEXTS for word in text})) | (
    st.sampled_from(["-1", "999999999999", "9" * 30, "1e400", "nan", "None", "()", "'"])
)


@given(st.sampled_from(TEXTS), st.data())
def test_mangled_programs_are_refused_by_parser_or_verifier(
    text: list[str], data: st.DataObject
) -> None:
    text = list(text)
    for _ in range(data.draw(st.integers(1, 3))):
        text[data.draw(st.integers(0, len(text) - 1))] = data.draw(words)
    try:
        graph = parse("".join(text), REAL)
        verify(graph)
    except (ProgramFormatError, GraphError):
        return
    assert equal(parse(format_graph(graph), REAL), graph)
