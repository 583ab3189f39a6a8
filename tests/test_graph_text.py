"""Graphs: text, modules and generated code."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from hopflow import dtypes, pytree
from hopflow.errors import (
    ArgumentValueError,
    DTypeError,
    GraphError,
    ProgramFormatError,
    ShapeError,
    StructureError,
)
from hopflow.graph.codegen import compile_source, namespace, python_source
from hopflow.graph.core import Constant, Graph, SourceLine
from hopflow.graph.hashing import equal
from hopflow.graph.interpreter import interpret
from hopflow.graph.module import GraphModule, Source, Specialization
from hopflow.graph.parser import parse
from hopflow.graph.printer import format_graph
from hopflow.graph.types import SYMBOL_TYPE, TensorType
from hopflow.ops import elementwise, reduce, views  # noqa: F401
from hopflow.symbolic.size import free_symbols, symbol
from hopflow.tensor import asarray
from hopflow.testing.graphs import (
    ALL_SORTS,
    NESTED,
    OPERATORS,
    SCAN,
    Op,
    X,
    arrays,
    read,
    run_nested,
    scan_args,
)

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
    assert format_graph(read(SCAN), width=60).splitlines()[-5:] == [
        "    %0: f32[n], %1: f32[], %2: f32[5, n] = loop(",
        "            n, c, d, xs, w;",
        "            body=body, length=5, num_carry=2",
        "    )",
        "    return %0",
    ]


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
    [bound] = free_symbols(size)
    var = graph.add_input(SYMBOL_TYPE, "x", "symbol", bound)
    graph.inputs.insert(0, graph.inputs.pop())
    graph.add_input(TensorType(dtypes.float32, (size,)), "y", "capture")
    graph.outputs = (var,)
    text = format_graph(graph)
    assert format_graph(graph, width=1000).startswith(
        "graph _1___1(x: i64[], /, x_1: f32[], x_2: f32[], _return: f32[], "
        "_f32: f32[], a_b: f32[], x_3: f32[], x_1_1: f32[], *, y: f32[x]) -> i64[]:\n"
    )
    assert format_graph(read(text)) == text
    assert equal(read(text), graph)


EXPRESSIONS = [
    "s0 // 2",
    "max(1, s0 - 3)",
    "s0*s1 + 1",
    "((s0 + 1) // 2)*s1",
    "(s0 + s1) % 8 + min(7, s0, s1)",
    "-(s0 // 3) + s1",
    "s0 // (s1 + 1)",
    "int(s0 * 0.5)",
    "ceil((s0 ** 0.5) - 1.5) + floor(s0 / s1)",
    "max(0, s0 - 8) // 2 - 1",
]


@pytest.mark.parametrize("size", EXPRESSIONS)
def test_sizes_of_any_expression_are_read_and_written(size: str) -> None:
    text = f"""\
graph f(s0: i64[], s1: i64[], /, x: f32[{size}, 2]) -> f32[{size}, 2]:
    %0: f32[{size}, 2] = sin(x, shape=({size}, 2), n={size})
    return %0
"""
    graph = read(text)
    assert format_graph(graph, width=1000) == text
    assert equal(graph, read(text.replace("s0", "z").replace("s1", "y")))
    assert not equal(graph, read(text.replace(size, f"{size} + 1")))


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
        (
            "".join(" " * i + "graph f() -> ():\n" for i in range(600)),
            "deeper than 512",
        ),
        ("graph f(n: i64[], /, x: f32[n // 0])", "division by zero"),
        ("graph f(n: i64[], /, x: f32[n ** 9])", "a power of integers"),
        ("graph f(n: i64[], /, x: f32[n / 2])", "a size, which is an integer"),
        ("graph f(n: i64[], /, x: f32[" + "(" * 80, "deeper than 64"),
        ("graph f(n: i64[], /, x: f32[" + "(n//3 + 1)*" * 50 + "2])", "64 terms"),
        ("graph f(x: f32[-3])", "extent must be from 0 to 9223372036854775807, and is"),
        ("graph f(n: i64[], /, x: f32[n - n - 1])", "an extent must be from 0 to"),
        ("graph f() -> f32[9223372036854775808]:\n  return", "an extent must be from"),
        ("graph f() -> ():\n  check(a=f32[4, -1])", "line 2: an extent must be from"),
        ("graph f(x: f32[" + "1," * 80 + "])", "a shape has more than 64 dimensions"),
    ],
)  # fmt: skip
def test_what_is_no_graph_is_refused_with_its_line(text: str, message: str) -> None:
    with pytest.raises(ProgramFormatError) as error:
        read(text)
    assert message in str(error.value)


LONG = 100_000  # a reader whose time is quadratic in it runs into the time limit


@pytest.mark.parametrize(
    "comment",
    [
        " " * LONG + "x",
        " m.py:1" + " " * LONG + "x",
        " m.py:1 in " * LONG,
        " m.py:1 of " + "a → " * LONG,
        ":1 " * LONG,
        " of" * LONG,
    ],
    ids=["spaces", "spaces after", "modules", "paths", "lines", "words"],
)
def test_a_long_comment_is_read_in_linear_time(comment: str) -> None:
    graph = read(f"graph f(x: f32[]) -> f32[]:\n    return x  #{comment}\n")
    assert len(graph.inputs) == 1


def test_many_graphs_in_a_graph_are_read_in_linear_time() -> None:
    count = 20_000
    inner = [f"    graph g{i}() -> ():\n        return\n" for i in range(count)]
    assert not read(f"graph f() -> ():\n{''.join(inner)}    return\n").nodes


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
    with pytest.raises(GraphError, match="no argument's shape tells it"):
        module(text)()
    assert bound is not None
    gm = module(text, 0, numbers={0}, sources={bound: Source(0, None)})
    gm.graph = graph
    with pytest.raises(ArgumentValueError, match="was an int in the trace"):
        gm(2.0)
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
    assert [line.split("  # f32")[0] for line in source.splitlines()] == [
        "def f________import_os_def_g():",
        "    # () -> ()",
        "    t0 = getattr(op, 'a b')(a='\\n')",
        "    n_import_os_ = t0.shape[0]",
        "    return ()",
    ]
