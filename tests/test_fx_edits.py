"""fx: edits of graphs, and rewriting by patterns."""

import math
import operator
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import hopflow as hf
from hopflow import fx
from hopflow.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    GraphError,
    HopflowError,
    InternalError,
)
from hopflow.graph.parser import parse

# --- edits ----------------------------------------------------------------------------


def test_an_edited_graph_runs_after_recompile() -> None:
    module = hf.symbolic_trace(lambda x: hf.sin(x) + 1.0)
    graph = module.graph
    [sin] = graph.find_nodes("call_function", hf.sin)
    with graph.inserting_after(sin):
        cos = graph.call_function(hf.cos, sin.args[0])
        twice = graph.call_function(operator.mul, cos, 2.0)
    assert sin.replace_all_uses_with(twice) == [graph.nodes[-2]]
    assert module(0.0).item() == 1.0
    assert module.recompile()(0.0).item() == 3.0
    graph.erase_node(sin)
    assert [n.name for n in graph.nodes] == ["x", "cos", "mul", "add", "output"]
    assert twice.users.keys() == {graph.nodes[3]}


def test_a_node_that_is_read_is_not_erased() -> None:
    graph = hf.symbolic_trace(lambda x: hf.sin(x) + 1.0).graph
    with pytest.raises(GraphError, match="cannot erase `sin`: `add` reads it"):
        graph.erase_node(graph.nodes[1])
    other = hf.symbolic_trace(lambda x: x).graph
    with pytest.raises(GraphError, match="does not have the node `sin`"):
        other.index(graph.nodes[1])


def test_dead_code_goes_and_what_may_have_an_effect_stays() -> None:
    seen = hf.wrap(print)
    offset = hf.ones(2)

    def f(x: Any) -> Any:
        hf.sin(x + offset).sum()
        hf.check(hf.all(x > 0), "positive")
        hf.map(lambda v: v, x)
        seen(x)
        y = x + 1
        y[0] = 1
        return y

    graph = hf.symbolic_trace(f).graph
    assert graph.eliminate_dead_code() == 4
    names = "x gt all_1 check map_1 print_1 add_1 setitem output".split()
    assert [n.name for n in graph.nodes] == names
    assert graph.attributes == {}
    assert graph.eliminate_dead_code(lambda n: n.kind in ("placeholder", "output")) == 6


def test_nodes_are_copied_and_moved() -> None:
    source = hf.symbolic_trace(lambda x, y: hf.sin(x) * y + hf.ones(2)).graph
    graph = fx.Graph("copied")
    known: dict[fx.Node, Any] = {}
    graph.output(graph.graph_copy(source, known))
    assert str(graph).splitlines()[1:] == str(source).splitlines()[1:]
    assert known[source.nodes[2]].line == source.nodes[2].line
    assert graph.attributes.keys() == source.attributes.keys()
    graph.nodes[2].prepend(graph.nodes[4])
    assert graph.nodes[2].kind == "get_attr"
    graph.lint()
    graph.nodes[4].append(graph.nodes[2])
    assert [n.name for n in graph.nodes] == [n.name for n in source.nodes]


def test_graphs_are_written_by_hand() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x", float)
    w = graph.get_attr("layer.w", hf.asarray(2.0))
    y = graph.call_method("reshape", graph.call_function(hf.multiply, x, w), (-1,))
    graph.output((y, [y]))
    first, [second] = fx.GraphModule(graph)(3.0)
    assert first.tolist() == second.tolist() == [6.0]


def bad_graph(edit: Callable[[fx.Graph, fx.Node], Any]) -> fx.Graph:
    graph = fx.Graph("bad")
    edit(graph, graph.placeholder("x"))
    if not graph.find_nodes("output"):
        graph.output(graph.nodes[-1])
    return graph


def swapped(graph: fx.Graph, x: fx.Node) -> None:
    first = graph.call_function(hf.sin, x)
    graph.call_function(hf.cos, first)
    graph.nodes[2].append(first)


def foreign(graph: fx.Graph, x: fx.Node) -> None:
    graph.call_function(hf.sin, fx.Graph().placeholder("y"))


def renamed(graph: fx.Graph, x: fx.Node) -> None:
    graph.call_function(hf.sin, x).name = "x"


def returns_early(graph: fx.Graph, x: fx.Node) -> None:
    graph.output(x)
    graph.call_function(hf.sin, x)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (swapped, "node `cos` reads `sin`, which is not before it"),
        (foreign, "reads `y`, which is not before it"),
        (renamed, "has a name that another node has"),
        (returns_early, "returns, and nodes stand behind it"),
        (lambda g, x: g.get_attr("w"), "refers to `w`, which is no attribute"),
        (lambda g, x: g.call_module("m", x), "refers to `m`, which is no attribute"),
        (lambda g, x: g.call_function("sin", x), "calls 'sin', which is no function"),
        (lambda g, x: g.call_method(hf.sin, x), "for a name"),
        (
            lambda g, x: (g.call_function(hf.sin, x), g.placeholder("y")),
            "stands behind",
        ),
    ],
)
def test_lint_names_the_rule_that_is_broken(edit: Any, message: str) -> None:
    with pytest.raises(GraphError, match=message):
        fx.GraphModule(bad_graph(edit))


@pytest.mark.parametrize("name", ["two words", "def", "", 3])
def test_a_graph_has_the_name_of_a_function(name: Any) -> None:
    with pytest.raises(ArgumentValueError, match="must be a name for a function"):
        fx.Graph(name)


def fresh() -> Any:
    return hf.symbolic_trace(lambda x: hf.sin(x) * 2.0).graph


def generated(transform: Any) -> Any:
    module = hf.symbolic_trace(lambda x: hf.sin(x))
    module.graph.on_generate_code(lambda _: transform)
    return module.recompile()


api: Any = fx  # a type checker would refuse these calls
number: Any = 3


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda: api.Graph().create_node("call_function", hf.sin, 3), "be a tuple and"),
        (lambda: api.Graph().create_node("call_function", hf.sin, (), 3), "a mapping,"),
        (lambda: api.Graph().create_node("output", "output", (), {}, 3), "the name of"),
        (lambda: setattr(fresh().nodes[1], "args", 3), "`int` and `dict`"),
        (lambda: setattr(fresh().nodes[1], "kwargs", 3), "`tuple` and `int`"),
        (lambda: api.Graph().graph_copy(3, {}), "expected a graph and a dict"),
        (lambda: api.Graph().graph_copy(fresh(), 3), "expected a graph and a dict"),
        (lambda: api.Graph().index(3), "expected a node, and found `int`"),
        (lambda: api.Graph().erase_node(3), "expected a node, and found `int`"),
        (lambda: api.Graph().inserting_before(3), "expected a node, and found `int`"),
        (lambda: api.Graph().inserting_after(3), "expected a node, and found `int`"),
        (lambda: fresh().nodes[0].append(3), "expected a node, and found `int`"),
        (lambda: fresh().nodes[1].insert_arg("a", 3), "and none at 'a'"),
        (lambda: generated(lambda lines: 3), "must return a list of strings"),
        (lambda: generated(lambda lines: ["a b\n"]), "is no Python: invalid syntax"),
        (lambda: fresh_module().to_folder(number), "`folder` must be a path"),
        (lambda: api.Interpreter(SimpleNamespace(graph=3)), "expected a graph module"),
        (lambda: parse(number, {}), "`text` must be a string, and is `int`"),
    ],
)
def test_edits_that_make_no_sense_are_errors_of_ours(edit: Any, message: str) -> None:
    with pytest.raises(HopflowError, match=message) as caught:
        edit()
    assert not isinstance(caught.value, InternalError)


class WrongMethod(fx.Interpreter):
    def call_function(self, target: Any) -> Any:  # type: ignore[override]
        return target


class WrongTracer(fx.Tracer):
    def create_node(self) -> Any:  # type: ignore[override]
        return None


@pytest.mark.parametrize(
    "call",
    [
        lambda f: fx.replace_pattern(
            fresh_module(), lambda v: hf.sin(v), lambda v: v, where=f
        ),
        lambda f: fx.replace_pattern(
            hf.trace(hf.sin, hf.ones(2)), lambda v: hf.sin(v), lambda v: v, where=f
        ),
        lambda f: fresh().eliminate_dead_code(f),
        lambda f: fresh().on_generate_code(f),
        lambda f: fx.Graph().node_copy(fresh().nodes[1], f),
        lambda f: generated(f),
        lambda _: WrongMethod(fresh_module()).run(hf.ones(2)),
        lambda _: WrongTracer().trace(lambda x: hf.sin(x)),
    ],
)
def test_functions_of_users_that_take_other_arguments_are_theirs(call: Any) -> None:
    with pytest.raises(TypeError, match=r"takes [012] positional argument") as caught:
        call(lambda: None)
    assert not isinstance(caught.value, HopflowError)


def fresh_module() -> fx.GraphModule:
    return hf.symbolic_trace(lambda x: hf.sin(x) * 2.0)


def test_a_graph_without_an_end_is_refused() -> None:
    with pytest.raises(GraphError, match="returns nothing"):
        fx.GraphModule(fx.Graph())
    with pytest.raises(GraphError, match="a node is one of placeholder, get_attr"):
        fx.Graph().create_node("call", "f")  # type: ignore[arg-type]
    graph = bad_graph(lambda g, x: None)
    with (
        pytest.raises(GraphError, match="nothing runs after the output"),
        graph.inserting_after(graph.output_node()),
    ):
        pass
    for kind in (fx.GraphModule, fx.Interpreter):
        with pytest.raises(
            ArgumentTypeError, match=r"Make one with `hf.symbolic_trace`"
        ):
            kind(3)  # type: ignore[arg-type]


# --- patterns -------------------------------------------------------------------------


def rewritten(
    f: Any, pattern: Any, replacement: Any, **options: Any
) -> tuple[fx.GraphModule, int]:
    """`f` rewritten, and how often."""
    module = hf.symbolic_trace(f)
    found = fx.replace_pattern(module, pattern, replacement, **options)
    return module, len(found)


def names(module: fx.GraphModule) -> list[str]:
    called = [n.target for n in module.graph.nodes if n.kind.startswith("call")]
    return [t if isinstance(t, str) else t.__name__ for t in called]


def ratio(x: Any, y: Any) -> Any:
    return hf.sin(x) / hf.cos(y)


@pytest.mark.parametrize(
    ("f", "pattern", "replacement", "expected"),
    [
        # A parameter matches anything, and the same twice.
        (
            lambda a, b: (lambda p: ratio(p, p))(a * b) + ratio(a, b),
            lambda x: hf.sin(x) / hf.cos(x),
            lambda x: hf.tan(x),
            "mul tan sin cos truediv add",
        ),
        (lambda a: a * 2.0, lambda x, y: x * y, lambda x, y: hf.add(x, y), "add"),
        # What is inside is read by nothing else; the end may be.
        (
            lambda a: (lambda s: s + ratio(a, a) * hf.exp(s))(hf.sin(a)),
            lambda x: hf.exp(hf.sin(x)),
            lambda x: hf.cos(x),
            "sin sin cos truediv exp mul add",
        ),
        (
            lambda a: (lambda s: s + s)(hf.exp(hf.sin(a))),
            lambda x: hf.exp(hf.sin(x)),
            lambda x: hf.cos(x),
            "cos add",
        ),
        # Matches do not overlap, nor match what was put in.
        (
            lambda a: hf.tanh(hf.tanh(hf.tanh(hf.tanh(hf.tanh(a))))),
            lambda x: hf.tanh(hf.tanh(x)),
            lambda x: hf.tanh(x),
            "tanh tanh tanh",
        ),
        # A replacement may be a parameter, or a constant.
        (
            lambda a: hf.exp(hf.log(a)) + 1,
            lambda x: hf.exp(hf.log(x)),
            lambda x: x,
            "add",
        ),
        (lambda a: a * (a - a), lambda x: x - x, lambda x: 0.0, "mul"),
        # Constants, keywords, slices, methods and containers are compared.
        (
            lambda a: (
                a[1:, 0].sum(axis=0) + a[:1, 0].sum(axis=0) + a[1:, 0].sum(axis=1)
            ),
            lambda x: x[1:, 0].sum(axis=0),
            lambda x: hf.sum(x),
            "sum getitem sum add getitem sum add",
        ),
        (
            lambda a: hf.concat([a, hf.concat([a, a], axis=1)], axis=0),
            lambda x, y: hf.concat([x, y], axis=0),
            lambda x, y: hf.stack([y, x]),
            "concat stack",
        ),
    ],
)
def test_what_looks_like_the_pattern_is_replaced(
    f: Any, pattern: Any, replacement: Any, expected: str
) -> None:
    module, _ = rewritten(f, pattern, replacement)
    assert names(module) == expected.split()
    module.graph.lint()


def test_a_rewriting_is_true_to_lines_and_filters() -> None:
    def f(a: Any) -> Any:
        return hf.exp(a * 2.0) + hf.exp(a * 3.0)

    module, count = rewritten(
        f,
        lambda x, k: hf.exp(x * k),
        lambda x, k: hf.exp2(x * (k * math.log2(math.e))),
        where=lambda match: match.values["k"] == 3.0,
    )
    assert count == 1
    assert names(module) == ["mul", "exp", "mul", "mul", "exp2", "add"]
    np.testing.assert_allclose(
        module(hf.ones(2)).tolist(), f(hf.ones(2)).tolist(), 1e-6
    )
    assert {
        n.line.line for n in module.graph.find_nodes("call_function") if n.line
    } == {f.__code__.co_firstlineno + 1}


def test_a_pattern_may_have_several_results() -> None:
    def both(x: Any, y: Any) -> Any:
        return hf.sin(x), hf.cos(x) * y

    def f(a: Any, b: Any) -> Any:
        s = hf.sin(a)
        c = hf.cos(a) * b
        other = hf.sin(b)
        return s + c, other

    def swapped(x: Any, y: Any) -> Any:
        t = hf.tan(x)
        return t, t + y

    module, count = rewritten(f, both, swapped)
    assert count == 1
    assert names(module) == ["tan", "add", "sin", "add"]
    assert module(0.5, 1.0)[0].item() == pytest.approx(2 * math.tan(0.5) + 1)

    def early(a: Any, b: Any) -> Any:  # the first result is read before the second
        s = hf.sin(a)
        return s * b, hf.cos(s + a) + hf.cos(a) * b

    assert rewritten(early, both, swapped)[1] == 0
    divide = rewritten(
        lambda a, b: (a // b, a % b),
        lambda x, y: (x // y, x % y),
        lambda x, y: tuple(hf.wrap(divmod)(x, y)[i] for i in range(2)),
    )
    assert divide[0](7, 3) == (2, 1)


def written_between(x: Any) -> Any:
    y = x * 1.0
    z = hf.sin(y)
    y[0] = 5.0
    return hf.cos(z)


def added_between(x: Any) -> Any:
    y = x * 1.0
    z = hf.sin(y)
    y += 5.0
    return hf.cos(z) * y


def body_between(x: Any) -> Any:
    y = x * 1.0

    def body(i: Any, total: Any) -> Any:
        y[0] = 5.0
        return total + y[0]

    z = hf.sin(y)
    return hf.fori_loop(0, 3, body, hf.asarray(0.0)) * hf.cos(z)


def viewed_before(x: Any) -> Any:
    y = x * 1.0
    view = y[1:]
    z = hf.sin(view)
    y[1] = 5.0
    return hf.cos(z)


def written_before(x: Any) -> Any:
    y = x * 1.0
    y[0] = 5.0
    return hf.cos(hf.sin(y))


@pytest.mark.parametrize(
    ("f", "matches"),
    [
        (written_between, 0),
        (added_between, 0),
        (body_between, 0),
        (viewed_before, 0),
        (written_before, 1),
    ],
)
def test_a_match_does_not_go_across_a_write(f: Any, matches: int) -> None:
    module, count = rewritten(
        f, lambda a: hf.cos(hf.sin(a)), lambda a: hf.cos(hf.sin(a * 1.0))
    )
    assert count == matches
    x = hf.asarray([1.0, 2.0, 3.0])
    np.testing.assert_allclose(module(x).tolist(), f(x).tolist(), 1e-6)


def test_a_replacement_brings_its_tensors() -> None:
    bias = hf.asarray([1.0, 2.0])
    module, _ = rewritten(lambda a: hf.sin(a), lambda x: hf.sin(x), lambda x: x + bias)
    assert module(hf.zeros(2)).tolist() == [1.0, 2.0]
    assert list(module.attributes) == ["tensor"]


@pytest.mark.parametrize(
    ("module", "pattern", "replacement", "options", "message"),
    [
        (3, ratio, ratio, {}, "`module` must be a graph module, and is `int`"),
        (ratio, ratio, ratio, {"where": 3}, "`where` must be a function of a match"),
        (ratio, ratio, lambda x: x, {}, r"\['x', 'y'\], and `<lambda>` has \['x'\]"),
        (ratio, lambda x: x, lambda x: x, {}, "must return values that it computes"),
        (ratio, lambda x: (x + 1, x), lambda x: (x, x), {}, "must return values that"),
        (ratio, lambda x: (-x, +x), lambda x: x, {}, "2 results, and `<lambda>` has 1"),
        (ratio, lambda x: (), lambda x: (), {}, "has 0 results"),
    ],
)
def test_a_pattern_that_makes_no_sense_is_refused(
    module: Any, pattern: Any, replacement: Any, options: Any, message: str
) -> None:
    module = hf.symbolic_trace(module) if callable(module) else module
    with pytest.raises((ArgumentTypeError, ArgumentValueError), match=message):
        fx.replace_pattern(module, pattern, replacement, **options)


@pytest.mark.parametrize(
    "effect",
    [
        lambda y: operator.setitem(y, 0, 5.0),
        lambda y: y.__iadd__(1.0),
    ],
)
def test_nothing_matches_across_a_write(effect: Any) -> None:
    def f(x: Any) -> Any:
        y = x * 1.0
        z = hf.sin(y)
        effect(y)
        return hf.cos(z) + y

    module, x = hf.symbolic_trace(f), hf.asarray([1.0, 2.0, 3.0])
    pattern: Any = lambda a: hf.cos(hf.sin(a))  # noqa: E731
    assert hf.fx.replace_pattern(module, pattern, lambda a: a * 1.0) == []
    assert module(x).tolist() == f(x).tolist()
