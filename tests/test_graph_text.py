"""Graphs: text, modules and generated code."""

import math
import traceback
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
from hopflow.graph.core import Constant, Graph, SourceLine
from hopflow.graph.hashing import equal
from hopflow.graph.interpreter import interpret
from hopflow.graph.module import GraphModule, Source, Specialization
from hopflow.graph.parser import HEADER, parse
from hopflow.graph.printer import INDENT, format_graph, named_objects
from hopflow.graph.running import compile_graph, namespace
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
    lines = format_graph(read(SCAN), width=40).splitlines()
    assert lines[:4] == [
        "def f(",
        "        n: i64, /, c: f32[n], d: f32,",
        "        xs: f32[5, n], w: f32[n]",
        ") -> f32[n]:",
    ]
    assert lines[-7:] == [
        "        return v2, v3, v1",
        "    v0: tuple[f32[n], f32, f32[5, n]] = loop(",
        "            n, c, d, xs, w,",
        "            body=body, length=5,",
        "            num_carry=2",
        "    )",
        "    return v0[0]",
    ]
    lines = format_graph(read(SCAN), width=24).splitlines()
    at = lines.index("        return (")
    assert lines[at + 1 : at + 4] == [
        INDENT * 4 + "v2, v3,",
        INDENT * 4 + "v1",
        INDENT * 2 + ")",
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
        "def _1___1(x: i64, /, x_1: f32, x_2: f32, return_: f32, f32_: f32, a_b: f32, "
        "x_3: f32, x_1_1: f32, *, y: f32[x]) -> i64:\n"
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
def f(s0: i64, s1: i64, /, x: f32[{size}, 2]) -> f32[{size}, 2]:
    v0: f32[{size}, 2] = sin(x, shape=({size}, 2), n={size})
    return v0
"""
    graph = read(text)
    assert format_graph(graph, width=1000) == text
    assert equal(graph, read(text.replace("s0", "z").replace("s1", "y")))
    assert not equal(graph, read(text.replace(size, f"{size} + 1")))


def test_a_graph_that_two_nodes_share_is_written_once() -> None:
    text = """\
def f(p: bool, x: f32) -> f32:
    def then(x: f32) -> f32:
        return x
    v0: f32 = cond(p, x, then=then, else_=then)
    v1: f32 = cond(p, v0, then=then, else_=then)
    return v1
"""
    graph = read(text)
    assert format_graph(graph) == text
    assert len({id(g) for n in graph.nodes for g in n.graphs.values()}) == 1


def test_sizes_are_polynomials_in_normal_form() -> None:
    text = """\
def f(b: i64, a: i64, /, x: f32[2*a*b - a + 3, a*a]) -> i64[-b + 7]:
    v0: i64[-b + 7] = iota(axis=0, dtype=i64, shape=(-b + 7,))
    return v0
"""
    graph = read(text)
    assert format_graph(graph) == text
    assert equal(read(text.replace("2*a*b - a + 3", "3 + a*b - a + b*a")), graph)


def test_an_object_of_no_static_kind_has_a_name() -> None:
    graph = read(
        "def f(asarray: f32) -> tuple[()]:\n    check(asarray)\n    return ()\n"
    )
    marker = object()
    graph.nodes[0].params |= {"fn": asarray, "all": (marker, marker, object())}
    text = format_graph(graph)
    inner = "all=(objects.object, objects.object, objects.object_1)"
    assert f"check(asarray, fn=objects.asarray, {inner})" in text
    objects = named_objects(graph)
    assert [*objects] == ["asarray", "object", "object_1"]
    assert equal(parse(text, OPERATORS, objects=objects), graph)
    with pytest.raises(ProgramFormatError, match=r"found `objects\.asarray`"):
        read(text)


def test_a_param_whose_name_is_no_word_of_python_is_quoted() -> None:
    graph = read("def f() -> tuple[()]:\n    check()\n    return ()\n")
    graph.nodes[0].params = {"lambda": 1, "a b": (2,), "c": 3, "é": 4}
    text = format_graph(graph)
    assert 'check(**{"lambda": 1}, **{"a b": (2,)}, c=3, **{"\\xe9": 4})' in text
    assert equal(read(text), graph)


def test_what_python_would_take_for_another_thing_is_renamed() -> None:
    text = """\
def f(x: f32) -> f32:
    v0: f32 = sin(x)
    v1: f32 = cos(v0)
    return v1
"""
    graph = read(text)
    names = ("sin", "None", "__debug__", "int", "tuple", "v0", "cos_1", "cos", "\xe9")
    for name in names:
        graph.add_input(TensorType(dtypes.float32), name)
    found = format_graph(graph, width=1000)
    assert found.startswith(
        "def f(x: f32, sin_: f32, None_: f32, __debug___: f32, int_: f32, tuple_: f32, "
        "v0: f32, cos_1: f32, cos_: f32, x_1: f32) -> f32:\n    v1: f32 = sin(x)\n"
    )
    assert equal(read(found), graph)
    x = asarray(np.float32(0.5))
    [expected] = interpret(graph, [x] * 10, run_nested)
    assert float(compile_graph(graph, run_nested)(*[x] * 10)) == float(expected)


def refusal(text: str) -> str:
    with pytest.raises(ProgramFormatError) as error:
        read(text)
    return str(error.value)


NO_GRAPHS = [
    ("", "line 1, column 1: expected `def`, found the end of the text."),
    ("grph f()", "line 1, column 6: invalid syntax"),
    ("f()", "line 1, column 1: expected `def`, found `f()`."),
    ("import os", "line 1, column 1: expected `def`, found `import os`."),
    (
        "from os import path",
        "expected `from __future__ import annotations`, or",
    ),
    ("def f(x: f32) -> f32: return v0", "line 1, column 30: `v0` is not defined"),
    (
        "def f(x: q32) -> f32: return x",
        "column 10: expected a type such as `f32[3]`, found `q32`.",
    ),
    ("def f(x) -> f32: return x", "column 7: expected an input and its type"),
    ("def f(x: f32 = 1) -> f32: return x", "names and types of its inputs alone"),
    ("def f(*x: f32) -> f32: return x", "names and types of its inputs alone"),
    ("@g\ndef f(x: f32) -> f32: return x", "names and types of its inputs alone"),
    ("def f(x: f32): return x", "expected `->` and the types of the results"),
    ("async def f(x: f32) -> f32: return x", "line 1, column 1: expected `def`"),
    ("def f(x: f32[n]) -> f32: return x", "`n` is not a symbol defined before"),
    ("def f(n: f32, /) -> f32: return n", "the symbol `n` must be i64, not f32[]"),
    ("def f(x: f32, x: f32) -> f32: return x", "column 15: `x` is defined twice"),
    ("def f(inf: f32) -> f32: return inf", "`inf` is reserved, or the name"),
    ("def f() -> f32:\nreturn 1.0\n", "line 2, column 1: expected an indented block"),
    (
        "def f() -> f32:\n  check()\n   return 1.0",
        "line 3, column 3: unexpected",
    ),
    (
        "def f() -> f32:\n  return 1.0\nx",
        "line 3, column 1: expected the end of the text, for the graph has returned",
    ),
    (
        "def f() -> f32:\n  check()",
        "column 3: expected `return` and the results, `()` for none, found `check()`.",
    ),
    ("def f() -> tuple[()]:\n  return", "`()` for none, found `return`"),
    ("def f() -> f32:\n  return ()", "returns (), but is declared to return (f32[])"),
    (
        "def f() -> f32:\n  v: tuple[f32, f32] = pair(1.0)\n  return v",
        "has several results",
    ),
    (
        "def f() -> f32:\n  v: tuple[f32, f32] = pair(1.0)\n  return v[2]",
        "`v[2]` is not",
    ),
    ("def f() -> f32:\n  v = sin(1.0)\n  return v", "expected a symbol from a shape,"),
    ("def f(x: f32[3]) -> f32:\n  n = x.shape[0]\n  return 1.0", "`n` is not the size"),
    ("def f(x: f32[3]) -> f32:\n  n = x.shape[7]\n  return 1.0", "`n` is not the size"),
    (
        "def f() -> f32:\n  v: f32 = floor(2.5)\n  return v",
        "expected a number with its dtype, as `f32(2.5)`, found `2.5`.",
    ),
    ("def f(sin: f32) -> f32:\n  v: f32 = sin(1.0)\n  return v", "`sin` is a variable"),
    (
        "def sin() -> f32:\n  v: f32 = sin(1.0)\n  return v",
        "is a variable's name",
    ),
    (
        "def f() -> f32:\n  v: f32 = sin(1.0)\n  sin: f32 = cos(v)\n  return v",
        "`sin` is reserved, or the name of an operator",
    ),
    (
        "def f() -> f32:\n  def g() -> f32:\n    v: f32 = sin(1.0)\n    return v\n"
        "  sin: f32 = cos(1.0)\n  return sin",
        "reserved, or the name of an operator",
    ),
    (
        "def f(x: f32) -> f32:\n  def g() -> f32:\n    return x\n  return x",
        "line 3, column 12: `x` is not defined before it is used",
    ),
    (
        "def f() -> f32:\n  check(a=" + "(" * 300 + ")" * 300 + ")",
        "too many nested parentheses",
    ),
    (
        "".join(" " * i + "def f() -> f32:\n" for i in range(600)),
        "too many levels of indentation",
    ),
    ("def f(x: f32[" + "*".join(["9" * 300] * 9) + "]) -> f32: return 1.0", "digits"),
    (
        "def f(x: f32[-3]) -> f32: return 1.0",
        "column 14: an extent must be from 0 to 9223372036854775807, and is -3.",
    ),
    ("def f() -> f32[9223372036854775808]: return 1.0", "an extent must be from"),
    ("def f(x: f32[" + "1," * 80 + "]) -> f32: return 1.0", "more than 64 dimensions"),
    (
        "def f(é: f32) -> f32:\n  check(é, ß)\n  return é",
        "2, column 12: `ß`",
    ),
]

NO_NODES = [
    ("foo()", "line 2, column 3: there is no operator `foo`."),
    ("x.y()", "expected an operator's name, found `x.y`."),
    (
        "pass",
        "column 3: expected a node, a graph or `return` at the end, found `pass`.",
    ),
    ("check(1, *x)", "expected a value's name or a number, found `*x`."),
    ("check(**x)", "expected a param by its name, in quotes, found `x`"),
    ("check(a=1, a=2)", "`a` is given twice"),
    ("check(a=1, **{'a': 2})", "`a` is given twice"),
    ("check(?)", "line 2, column 9: invalid syntax."),
    ("check(a=-True)", "line 2, column 12: expected a number after `-`, found `True`."),
    ("check(a=1j)", "expected a number, a text"),
    ("check(a=b'')", "expected a number, a text"),
    ("check(a=[])", "expected a number, a text, a type or a size, found `[]`."),
    ("check(a=g)", "`g` is no graph and no symbol"),
    ("check(x(1))", "expected a value's name or a number"),
    ("check(f32(x))", "expected a number, found `x`"),
    ("check(a=f32[1.5])", "a size, which is an integer"),
    ("check(a=f32[True])", "expected a size, found `True`"),
    ("w: f32 = get_attr(3)", "an attribute's name in quotes"),
    ("get_attr('w')", "must be read once"),
    ("v: tuple[f32] = sin(1.0)", "expected a type alone, for there is one result"),
    ("v: tuple[()] = sin(1.0)", "a call alone, for there are no results"),
    (
        "def g() -> f32:\n    return 1.0\n  def g() -> f32:\n    return 1.0",
        "line 4, column 3: `g` is defined twice",
    ),
    (
        "def g() -> f32:\n    return 1.0\n"
        "  def h() -> f32:\n    check(a=g)\n    g: f32 = sin(1.0)\n    return g",
        "line 6, column 5: `g` is defined twice",
    ),
    ('check(a="\\U99999999")', "illegal Unicode character"),
    ("check(a=" + "9" * 500 + ")", "more than 400 digits"),
    ("check(a=" + "9" * 5000 + ")", "Exceeds the limit"),
    ("check(a=" + "(" * 80 + "()" + ",)" * 80 + ")", "deeper than 64"),
    ("check(a=" + "1+" * 80 + "1)", "deeper than 64"),
    ("check(a=" + "-" * 80 + "1)", "deeper than 64"),
    ("check(a=" + "-" * 10**6 + "1)", "no Python: "),
    ("check(a=1" + "+1" * 10**5 + ")", "no Python: "),
    ("check(a=f32[4, -1])", "line 2, column 18: an extent"),
    ("check('\x00')", "null bytes"),
]

NO_SIZES = [
    ("n // 0", "division by zero"),
    ("n ** 9", "a power of integers"),
    ("n / 2", "a size, which is an integer"),
    ("n < 2", "expected a size, found"),
    ("max(n, k=2)", "expected a size, found"),
    ("exit(n)", "expected a size, found"),
    ("(n//3 + 1)*" * 50 + "2", "64 terms"),
    ("n - n - 1", "an extent must be from"),
]


@pytest.mark.parametrize(("text", "message"), NO_GRAPHS)
def test_what_is_no_graph_is_refused_with_its_place(text: str, message: str) -> None:
    assert message in refusal(text)


@pytest.mark.parametrize(("text", "message"), NO_NODES)
def test_what_is_no_node_is_refused_with_its_place(text: str, message: str) -> None:
    assert message in refusal(f"def f() -> f32:\n  {text}\n  return 1.0")


@pytest.mark.parametrize(("text", "message"), NO_SIZES)
def test_what_is_no_size_is_refused_with_its_place(text: str, message: str) -> None:
    assert message in refusal(f"def f(n: i64, /, x: f32[{text}]) -> f32: return 1.0")


def test_a_param_names_no_symbol_that_only_a_type_has_named() -> None:
    text = """\
def f(x: f32[4]) -> f32[u]:
    v0: f32[u] = compress(x)
    u = v0.shape[0]
    v1: f32[u] = full(2.0, shape=(u,))
    return v1
"""
    graph = read(text)
    assert format_graph(graph) == text
    x = asarray(np.ones(4, np.float32))

    def run(op: Any, args: Sequence[Any], params: dict[str, Any]) -> Any:
        if op.name != "compress":
            return run_nested(op, args, params)
        return [asarray(np.ones(3, np.float32))]

    [expected] = arrays(interpret(graph, [x], run))
    found = np.asarray(compile_graph(graph, run)(x))
    np.testing.assert_array_equal(found, expected)
    named = text.replace(
        "    return", "    u: i64 = int(dim_size(v0, axis=0))\n    return"
    )
    assert format_graph(read(named)) == named
    assert "`u` is defined twice" in refusal(named.replace("int(dim_size", "(dim_size"))
    assert "line 3, column 35: `u` is not a symbol defined before" in refusal(
        text.replace("    u = v0.shape[0]\n", "")
    )


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
    graph = read(f"def f(x: f32) -> f32:\n    return x  #{comment}\n")
    assert len(graph.inputs) == 1


def test_many_graphs_in_a_graph_are_read_in_linear_time() -> None:
    count = 10_000
    inner = [f"    def g{i}() -> f32:\n        return 1.0\n" for i in range(count)]
    assert not read(f"def f() -> f32:\n{''.join(inner)}    return 1.0\n").nodes


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
    text = "def f(x: f32) -> f32:\n    return x\n"
    gm = module(text, 0, 0, specializations={1: Specialization("args[1]", 3)})
    assert float(gm(asarray(1.0), 3)[0]) == 1.0
    for other in (4, 3.0, True):
        with pytest.raises(ArgumentValueError, match=r"`args\[1\]` was 3 in the trace"):
            gm(asarray(1.0), other)


def test_a_number_among_the_arguments_may_be_a_symbol() -> None:
    text = """\
def f(n: i64, /) -> f32[n]:
    v0: f32[n] = full(2.0, shape=(n,))
    return v0
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
    text = "def f(*, w: f32) -> tuple[()]:\n    return ()\n"
    with pytest.raises(GraphError, match="`w` is an input"):
        module(text)
    gm = module("def f(x: f32) -> tuple[()]:\n    return ()\n")
    with pytest.raises(GraphError, match="has 1 operands, and its module 0"):
        gm()


def test_a_module_shows_itself(capsys: pytest.CaptureFixture[str]) -> None:
    gm = module(NESTED)
    assert str(gm) == str(gm.graph) == NESTED
    assert repr(gm) == (
        "<GraphModule f(s0: i64, s1: i64, /, x: f32[s0, s1], p: bool, q: bool)"
        " -> f32[s0, s1]: 4 nodes>"
    )
    assert gm.code == f"{HEADER}\n\n{NESTED}"
    assert equal(read(gm.code), gm.graph)
    assert gm.print_readable() == capsys.readouterr().out.removesuffix("\n") == NESTED
    assert gm.print_readable(print_output=False) == NESTED
    assert capsys.readouterr().out == ""
    assert gm.attributes == {}


@pytest.mark.parametrize("text", [NESTED, SCAN])
def test_the_text_computes_what_the_graph_does(text: str) -> None:
    graph = read(text)
    args = [2, 3, asarray(X), asarray(True), asarray(False)]
    if text is SCAN:
        args = scan_args()
    expected = arrays(interpret(graph, args, run_nested))
    scope = namespace(text, OPERATORS, run_nested)
    exec(f"{HEADER}\n{text}", scope)
    for function in (scope["f"], compile_graph(graph, run_nested)):
        [a], b = expected, np.asarray(function(*args))
        np.testing.assert_array_equal(a, b)


def test_the_text_has_all_sorts_of_values() -> None:
    graph = read(ALL_SORTS)
    graph.nodes[3].params["fn"] = marker = object()
    seen: list[Any] = []

    def run(op: Any, args: Sequence[Any], params: dict[str, Any]) -> Any:
        seen.append((op.name, args, params))
        return [
            asarray(np.ones(3, np.float32)) for _ in range(getattr(op, "outputs", 1))
        ]

    graph.attributes["w"] = asarray(1.0)
    function = compile_graph(graph, run)
    results = function(asarray(np.ones(3, np.float32)), None)
    expected = graph.nodes[2].args[2:]
    found = seen[0][1][2:]
    assert repr(found) == repr(list(expected))
    assert [a.type for a in found] == [a.type for a in expected]
    assert seen[1][2] == {**graph.nodes[3].params, "fn": marker}
    assert math.isnan(seen[3][2].pop("y"))
    assert seen[3][2] == {"flag": True, "size": -3, "axes": (1,), "x": 1e-07}
    assert results[1:] == (False, Constant(math.inf, TensorType(dtypes.float64)))


def test_a_traceback_shows_the_line_of_the_text() -> None:
    def stop(op: Any, args: Sequence[Any], params: dict[str, Any]) -> Any:
        if op.name == "sin":
            raise ZeroDivisionError
        return run_nested(op, args, params)

    function = compile_graph(read(NESTED), stop)
    with pytest.raises(ZeroDivisionError) as caught:
        function(2, 3, asarray(X), p=asarray(True), q=asarray(True))
    shown = "".join(traceback.format_tb(caught.tb))
    lines = NESTED.splitlines()
    at = [shown.index(lines[k].partition("  #")[0].strip()) for k in (12, 8, 3)]
    assert at == sorted(at)
    assert [
        f.name for f in traceback.extract_tb(caught.tb) if "<graph" in f.filename
    ] == ["f", "then", "then"]


def test_a_function_of_sizes_may_be_an_operator_too() -> None:
    text = """\
def f(n: i64, /, x: f32[n]) -> tuple[f32[n], f32, f32[ceil(n * 0.3)]]:
    v0: f32[n] = floor(x)
    v1: f32 = floor(f32(2.5))
    v2: f32[ceil(n * 0.3)] = full(f32(1.5), shape=(ceil(n * 0.3),))
    return v0, v1, v2
"""
    graph = read(text)
    assert format_graph(graph) == text.replace("full(f32(1.5)", "full(1.5")
    args = [3, asarray(np.array([0.5, 1.5, -0.5], np.float32))]
    function = compile_graph(graph, run_nested)
    for a, b in zip(function(*args), interpret(graph, args, run_nested), strict=True):
        assert a.type == b.type
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_names_in_text_cannot_break_out_of_it() -> None:
    graph = Graph("f():\n    import os\ndef g")
    size = symbol("n\nimport os\n")
    node = graph.call(Op("a b"), [], {"a": "\n"}, [TensorType(dtypes.float32, (size,))])
    node.line = SourceLine("x\nimport os", 1)
    graph.call(Op("c"), [], {"a": size}, [])
    assert format_graph(graph).splitlines() == [
        "def f________import_os_def_g() -> tuple[()]:",
        '    v0: f32[n_import_os_] = a_b(a="\\n")',
        "    n_import_os_ = v0.shape[0]",
        "    c(a=n_import_os_)",
        "    return ()",
    ]
