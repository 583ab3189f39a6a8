"""Captured tensors and provenance: attributes by path, once each; lines, modules and
operators of nodes through retracing, transforms and texts; failed captures."""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import hopflow
from hopflow import nn
from hopflow.errors import StructureError, TraceError
from hopflow.graph.core import Graph, Node
from hopflow.graph.parser import parse
from hopflow.graph.printer import format_graph
from hopflow.hops.cond import COND
from hopflow.hops.scan import SCAN
from hopflow.ops.opdef import OPERATIONS
from hopflow.testing.executions import agree

hf: Any = hopflow

KEY = hf.random.key(0)
X = hf.ones((2, 3))
WEIGHT = hf.full((3,), 2.0)


class Net(nn.Module):
    layers: list[Any]
    head: Any

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = hf.tanh(layer(x))
        return x @ self.head


def network() -> Net:
    first, second = (nn.Linear.init(k, 3, 3) for k in hf.random.split(KEY, 2))
    return Net([first, second], first.weight)


class Plain:
    """An object that is no module."""

    def __init__(self) -> None:
        self.weight = hf.ones(3)
        self.parts = {"a": [hf.zeros(3)]}

    def positive(self, x: Any) -> Any:
        first, second = lambda: x * self.weight, lambda: x + self.parts["a"][0]
        return hf.cond(hf.sum(x) > 0, first, second) * WEIGHT


class Slotted:
    __slots__ = ("weight",)

    def __init__(self, weight: Any) -> None:
        self.weight = weight


def captured(f: Callable[..., Any], *args: Any) -> list[str]:
    """The names of what is captured; they hold those very tensors."""
    module = hf.trace(f, *args, captures=True)
    agree(module(*args), f(*args))
    return list(module.attributes)


# --- names ----------------------------------------------------------------------------


def test_parameters_are_attributes_under_their_module_path() -> None:
    net = network()
    own = ["head", "layers.0.bias", "layers.1.bias", "layers.1.weight"]
    assert sorted(captured(net, X)) == own
    assert sorted(captured(net.forward, X)) == own
    found = captured(lambda x: net(x), X)
    assert sorted(found) == [f"net.{name}" for name in own]


def test_those_of_bodies_are_operands_and_attributes_of_the_root() -> None:
    net = network()

    def f(x: Any) -> Any:
        return hf.scan(lambda c, _: (net(c), None), x, length=3)[0]

    module = hf.trace(f, X, captures=True)
    [loop] = [n for n in module.graph.nodes if n.op is SCAN]
    held = {v.node.name for v in loop.args if v.node.kind == "get_attr"}
    assert held == set(module.attributes)
    assert "net.layers.1.weight" in held
    assert module.attributes["net.layers.1.weight"] is net.layers[1].weight


def test_plain_objects_closures_globals_and_arguments_of_partials() -> None:
    model = Plain()
    assert captured(model.positive, X) == ["weight", "parts.a.0", "WEIGHT"]
    assert captured(lambda x: model.positive(x), X) == [
        "model.weight",
        "model.parts.a.0",
        "WEIGHT",
    ]
    slotted, w = Slotted(hf.ones(3)), hf.ones(3)
    assert captured(lambda x: x * slotted.weight, X) == ["slotted.weight"]
    assert captured(functools.partial(hf.add, w), X) == ["0"]
    scaled = functools.partial(lambda x, scale: x * scale, scale=w)
    assert captured(scaled, X) == ["scale"]
    assert captured(lambda x, default=w: x * default, X) == ["default"]
    assert captured(hf.jit(lambda x: x * w), X) == ["w"]


def test_a_function_that_is_called_names_what_it_reads() -> None:
    w = hf.ones(3)

    def inner(x: Any) -> Any:
        return x * w

    assert captured(lambda x: inner(x), X) == ["w"]


def test_what_no_name_leads_to_is_numbered() -> None:
    tensors = [hf.ones(3), hf.zeros(3)]
    module = hf.trace(lambda x: x * tensors.pop() + tensors.pop(), X, captures=True)
    assert list(module.attributes) == ["tensor0", "tensor1"]


def test_names_of_arguments_and_attributes_differ() -> None:
    x, read = hf.ones(3), {"x": hf.zeros(3)}

    def outer() -> Any:
        return x

    def f(x: Any) -> Any:
        return x * outer() + read["x"]

    assert captured(f, X) == ["x_1", "read.x"]


def test_one_tensor_is_one_attribute_whoever_reads_it() -> None:
    w = hf.ones(3)
    twice = [w, w]

    def f(x: Any) -> Any:
        x = hf.cond(hf.sum(x) > 0, lambda: x * w, lambda: x - twice[1])
        return hf.scan(lambda c, _: (c + twice[0], w), x, length=2)

    assert len(captured(f, X)) == 1
    jitted = hf.jit(f)
    jitted(X)
    assert [v.node.name for v in jitted.graph.captures] == ["w"]


def test_inputs_of_jitted_graphs_have_these_names() -> None:
    net = network()
    f = hf.jit(lambda x: net(x))
    f(X)
    assert "net_layers_0_bias: f32[3]" in f.graph_text


def test_objects_are_asked_for_nothing_that_they_compute() -> None:
    class Touchy:
        __slots__ = ("weight",)

        def __init__(self) -> None:
            self.weight = hf.ones(3)

        def __getattr__(self, name: str) -> Any:
            raise RuntimeError(name)

        @property
        def costly(self) -> Any:
            raise RuntimeError("costly")

    touchy, numbers = Touchy(), list(range(1_000_000))
    found = captured(lambda x: x * touchy.weight + numbers[1], X)
    assert found == ["touchy.weight"]


def test_a_cycle_of_objects_ends() -> None:
    a, b = Plain(), Plain()
    a.other, b.other = b, a  # type: ignore[attr-defined]
    assert captured(lambda x: x * b.weight, X) == ["b.weight"]


# --- where nodes come from ------------------------------------------------------------


def loop(x: Any, net: Any) -> Any:
    def step(c: Any, _: Any) -> Any:
        return hf.cond(hf.sum(c) > 0, lambda: net(c), lambda: -c), None

    return hf.sum(hf.scan(step, x, length=2)[0])


def nodes(graph: Graph) -> list[Node]:
    return [n for n in graph.walk() if n.op is not None]


def place(node: Node) -> tuple[Any, ...]:
    return node.line, node.module_path, node.operator_path


INNER = "scan/body → cond/then"


def test_nodes_know_their_line_module_and_operators() -> None:
    net = network()
    graph = hf.trace(lambda x: loop(x, net), X, captures=True).graph
    of_layer = [n for n in nodes(graph) if n.module_path == "net.layers.1:Linear"]
    assert {n.op.name for n in of_layer} == {"matmul", "add"}
    assert {n.operator_path for n in of_layer} == {INNER}


TRANSFORMS: dict[str, Callable[[Any], Any]] = {
    "retraced": lambda f: hf.trace(f, X, captures=True),
    "functionalize": hf.functionalize,
    "grad": hf.grad,
    "second order": lambda f: hf.grad(lambda x: hf.sum(hf.grad(f)(x) ** 2)),
    "vmap": lambda f: lambda x: hf.vmap(f)(hf.stack([x, x])),
    "vmap of grad": lambda f: lambda x: hf.vmap(hf.grad(f))(hf.stack([x, x])),
    "jvp": lambda f: lambda x: hf.jvp(f, (x,), (x,)),
    "checkpoint": hf.checkpoint,
    "jit": hf.jit,
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_they_know_it_after_transforms(name: str) -> None:
    net = network()

    def f(x: Any) -> Any:
        return loop(x, net)

    before = hf.trace(f, X, captures=True).graph
    known = {(n.op.name, place(n)) for n in nodes(before) if n.module_path}
    after = hf.trace(TRANSFORMS[name](f), X, captures=True).graph
    paths = {(n.line, n.module_path) for n in nodes(after)}
    assert {(p[0], p[1]) for _, p in known} <= paths
    of_layers = [n for n in nodes(after) if n.op.name == "matmul"]
    assert len(of_layers) >= 3
    assert all(n.module_path.startswith("net") for n in of_layers)
    assert all(n.operator_path.endswith(INNER) for n in of_layers)


def test_what_derivatives_add_in_a_body_is_in_it() -> None:
    def f(x: Any) -> Any:
        def total(row: Any) -> Any:
            return hf.scan(lambda c, _: (hf.tanh(c) * x * row, None), x, length=2)[0]

        return hf.sum(hf.map(total, X))

    outer = hf.trace(hf.grad(f), X, captures=True).graph
    inner = [node for node in nodes(outer) if node not in outer.nodes]
    assert len([n for n in inner if n.op.name == "add"]) >= 2
    ends = {n.operator_path.count("→"): n.operator_path for n in inner}
    assert ends == {0: "map/body", 1: "map/body → scan/body"}


@pytest.mark.parametrize(
    "loop",
    [
        lambda x: hf.while_loop(
            lambda c: hf.sum(c) < 10, lambda c: hf.exp(c) * x, x, max_steps=5
        ),
        lambda x: hf.fori_loop(0, 3, lambda _, c: hf.exp(c) * x, x),
    ],
)
def test_all_that_a_backward_pass_does_in_a_body_is_in_it(loop: Any) -> None:
    graph = hf.trace(hf.grad(lambda x: hf.sum(loop(x))), hf.ones(5)).graph
    inner = [node for node in nodes(graph) if node not in graph.nodes]
    assert "full" in [node.op.name for node in inner]
    assert all("loop/" in node.operator_path for node in inner)


def test_a_graph_run_in_a_body_is_at_both_places() -> None:
    inner = hf.trace(lambda x: hf.cond(hf.sum(x) > 0, hf.sin, hf.cos, (x,)), X)
    graph = hf.trace(
        lambda x: hf.scan(lambda c, _: (inner(c), None), x, length=2)[0], X
    ).graph
    paths = {n.op.name: n.operator_path for n in nodes(graph)}
    assert paths["cond"] == "scan/body"
    assert paths["sin"].endswith("cond/then")


def test_callbacks_and_functions_that_are_traced_come_from_their_own_lines() -> None:
    seen: list[Any] = []

    def note(x: Any) -> None:
        seen.append(hf.trace(lambda x: x + 1, x).graph.nodes[0].line.function)

    module = hf.trace(lambda x: hf.callback(note, None, x), X)
    module(X)
    assert seen == ["<lambda>"]


# --- texts ----------------------------------------------------------------------------


def again(graph: Graph) -> Graph:
    return parse(format_graph(graph), {**OPERATIONS, "scan": SCAN, "cond": COND})


def test_a_text_carries_places() -> None:
    net = network()
    graph = hf.trace(lambda x: loop(x, net), X, captures=True).graph
    text = format_graph(graph)
    assert "# test_captured_state.py:" in text
    assert " in net.layers.1:Linear\n" in text
    assert " of " not in text  # the graphs tell it
    found = again(graph)
    assert format_graph(found) == text
    for old, new in zip(nodes(graph), nodes(found), strict=True):
        assert str(old.line) == str(new.line)
        assert place(old)[1:] == place(new)[1:]


def test_a_text_says_of_which_operators_a_node_was_if_its_graph_does_not() -> None:
    graph = Graph("f")
    x = graph.add_input(X.type, "x")
    [y] = graph.call(OPERATIONS["sin"], [x], {}, [X.type]).results
    y.node.operator_path = INNER
    graph.outputs = (y,)
    assert format_graph(graph).splitlines()[1].endswith(f"sin(x)  # of {INNER}")
    y.node.module_path = "net.0"
    assert place(again(graph).nodes[0]) == (None, "net.0", INNER)
    y.node.module_path, y.node.operator_path = "a b\n", "no → pa th"
    assert "#" not in format_graph(graph)


# --- failures -------------------------------------------------------------------------


def test_a_failed_capture_leaves_nothing_in_any_ancestor() -> None:
    net, w = network(), hf.ones(3)

    def failing(c: Any, _: Any) -> Any:
        inner = lambda: (net(c) * w)[0]  # noqa: E731
        return hf.cond(hf.sum(c) > 0, inner, lambda: {"other": c}), None

    def f(x: Any) -> Any:
        def outer(c: Any, _: Any) -> Any:
            with pytest.raises((StructureError, TraceError)):
                hf.scan(failing, c, length=2)
            return c + 1, None

        return hf.scan(outer, x, length=2)[0]

    module = hf.trace(f, X, captures=True)
    assert module.attributes == {}
    assert [n.op.name for n in nodes(module.graph)] == ["scan", "add"]
    agree(module(X), np.full((2, 3), 3, np.float32))


WAYS: dict[str, Any] = {
    "again": lambda f: f,
    "grad": lambda f: hf.grad(lambda x: hf.sum(f(x))),
    "vmap": lambda f: lambda x: hf.vmap(f)(x[None]),
    "checkpoint": hf.checkpoint,
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_paths_survive_each_way_to_another_graph(way: Any) -> None:
    net = network()
    module = hf.trace(lambda x: net(x), X, captures=True)
    again = hf.trace(way(lambda x: module(x)), X, captures=True)
    assert list(again.attributes) == list(module.attributes)
    assert "net.layers.1.weight" in again.attributes
    places = {node.module_path for node in again.graph.walk()}
    assert places >= {"net.layers.0:Linear", "net.layers.1:Linear"}


def test_a_graph_without_types_hands_on_its_paths() -> None:
    typed = hf.symbolic_trace(network()).propagate(X)
    assert "layers.1.weight" in typed.attributes
    places = {node.module_path for node in typed.graph.walk()}
    assert places >= {"layers.0:Linear", "layers.1:Linear"}
