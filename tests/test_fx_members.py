"""fx: the members that users of PyTorch's fx know."""

import copy
import importlib
import math
import operator
import pickle  # noqa: TID251
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hopflow as hf
from hopflow import fx, pytree
from hopflow.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    GraphError,
    ShapeError,
)

hf.wrap("len")


def scaled(x: Any, *, by: float = 2.0) -> Any:
    return x * by


hf.wrap("scaled")
X = hf.asarray(np.linspace(-1.0, 1.0, 6, dtype=np.float32).reshape(2, 3))


def model(x: Any, scale: Any = 2.0) -> Any:
    y = hf.sin(x) * scale
    return y.sum(axis=0), hf.max(y)


def same(found: Any, expected: Any) -> None:
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


# --- nodes ----------------------------------------------------------------------------


def test_a_node_knows_its_neighbours_and_its_line() -> None:
    module = hf.symbolic_trace(model)
    x, scale, sin, *_, output = module.graph.nodes
    assert (x.next, scale.prev, str(sin.next)) == (scale, x, "mul")
    assert (x.prev, output.next) == (None, None)
    first = model.__code__.co_firstlineno
    assert sin.stack_trace == (
        f'  File "{__file__}", line {first + 1}, in model\n    y = hf.sin(x) * scale\n'
    )
    assert x.stack_trace is None


def helper(x: Any) -> Any:
    return hf.sin(x)


def caller(x: Any) -> Any:
    return helper(x) + 1.0


@pytest.mark.parametrize("trace", [hf.symbolic_trace, fx.Tracer().trace])
def test_a_node_knows_who_has_called(trace: Any) -> None:
    [sin] = trace(caller).graph.find_nodes("call_function", hf.sin)
    outer, inner = (f.__code__.co_firstlineno + 1 for f in (caller, helper))
    assert sin.stack_trace == (
        f'  File "{__file__}", line {outer}, in caller\n'
        "    return helper(x) + 1.0\n"
        f'  File "{__file__}", line {inner}, in helper\n'
        "    return hf.sin(x)\n"
    )
    again = fx.Transformer(trace(caller)).transform()
    assert again.graph.nodes[1].stack_trace == sin.stack_trace
    [op] = trace(caller).propagate(hf.spec("f32[2]")).graph.nodes_of("sin")
    assert op.line.stack == sin.line.stack


def test_a_trace_within_a_trace_has_its_own_lines() -> None:
    found: list[Any] = []

    def outer(x: Any) -> Any:
        found.append(hf.symbolic_trace(caller).graph.nodes[1].line)
        return helper(x)

    class Run(fx.Interpreter):
        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            return outer(super().call_function(target, args, kwargs))

    module = hf.symbolic_trace(outer)
    hf.trace(outer, hf.ones(2))
    Run(module).run(hf.ones(2))
    inner = [[line.function for line in each.stack] for each in found]
    assert inner == [["caller", "helper"]] * 3
    line = module.graph.nodes[1].line
    assert line is not None
    assert [line.function for line in line.stack] == ["outer", "helper"]


def test_the_place_of_a_node_has_the_classes_of_modules() -> None:
    key = hf.random.key(0)
    linear = hf.nn.Linear.init(key, 3, 3)
    net = hf.nn.Sequential(hf.nn.Sequential(linear, hf.tanh), linear)
    around = "layers.0:Sequential.layers"
    first = [f"{around}.0:Linear", f"{around}.1:Function"]

    def places(module: Any) -> list[str]:
        nodes = [n for n in module.graph.nodes if n.kind.startswith("call")]
        return list(dict.fromkeys(n.module_path for n in nodes))

    x = hf.ones(3)
    module = hf.symbolic_trace(net)
    assert places(module)[:2] == places(module.propagate(x))[:2] == first
    called = hf.symbolic_trace(lambda x: net(x))
    captured = hf.trace(net, x, captures=True)
    within = [f"sequential.{place}" for place in first]
    assert places(called)[:2] == places(captured)[:2] == within


def test_a_node_is_shown_as_one_line() -> None:
    module = hf.symbolic_trace(lambda x, s=2.0: hf.concat([x[1:], x], axis=0) * s)
    assert [node.format_node() for node in module.graph.nodes] == [
        "%x : [num_users=2] = placeholder[target=x]",
        "%s : [num_users=1] = placeholder[target=s](default=2.0)",
        "%getitem : [num_users=1] = call_function[target=getitem]"
        "(args = (%x, slice(1, None, None)), kwargs = {})",
        "%concat : [num_users=1] = call_function[target=concat]"
        "(args = ([%getitem, %x],), kwargs = {axis: 0})",
        "%mul : [num_users=1] = call_function[target=mul]"
        "(args = (%concat, %s), kwargs = {})",
        "return %mul",
    ]
    table = hf.asarray([1.0])
    module = hf.symbolic_trace(lambda x: ({"a": x}, table, hf.map(hf.sin, (x,))))
    lines = [node.format_node() for node in module.graph.nodes]
    assert "%tensor : [num_users=1] = get_attr[target=tensor]" in lines
    assert lines[-1] == "return ({'a': %x}, %tensor, %map_1)"
    assert any("(args = (sin, (%x,)), kwargs = {})" in line for line in lines)


def test_arguments_of_a_node_are_edited_one_by_one() -> None:
    module = hf.symbolic_trace(lambda x, y: hf.sum(x - y, axis=0))
    x, y, sub, total, _ = module.graph.nodes
    sub.update_arg(1, x)
    sub.update_arg(0, y)
    total.update_kwarg("axis", 1)
    total.update_kwarg("keepdims", True)
    assert (sub.args, dict(x.users), dict(y.users)) == (
        (y, x),
        {sub: None},
        {sub: None},
    )
    sub.args = (y,)
    sub.insert_arg(1, x)
    module.recompile()
    same([module(X, X + 1.0)], [np.full((2, 1), 3.0)])
    with pytest.raises(
        GraphError, match="`sub` has 2 positional arguments, and none at"
    ):
        sub.update_arg(2, x)
    with pytest.raises(GraphError, match="and none at -1"):
        sub.insert_arg(-1, x)


class Layer(hf.nn.Module):
    is_leaf = True
    w: Any

    def forward(self, x: Any, *, bias: Any = 0.0) -> Any:
        return x * self.w + bias


class Net(hf.nn.Module):
    a: Layer
    b: Layer

    def forward(self, x: Any) -> Any:
        return self.b(self.a(x), bias=1.0)


NET = Net(Layer(hf.asarray(2.0)), Layer(hf.asarray(3.0)))


def test_arguments_are_normalised_by_the_signature() -> None:
    module = hf.symbolic_trace(lambda x: (scaled(x), math.sqrt, x.sum()))
    x, call, method, _ = module.graph.nodes
    assert call.normalized_arguments() == ((x,), {"by": 2.0})
    by_name = call.normalized_arguments(normalize_to_only_use_kwargs=True)
    assert by_name == ((), {"x": x, "by": 2.0})
    assert x.normalized_arguments() is None
    assert method.normalized_arguments() is None
    call.update_kwarg("of", 3)
    with pytest.raises(
        GraphError, match="`scaled`: got an unexpected keyword argument"
    ):
        call.normalized_arguments()
    module = hf.symbolic_trace(NET)
    x, a, b, _ = module.graph.nodes
    assert a.normalized_arguments(module) == ((x,), {"bias": 0.0})
    assert b.normalized_arguments() == ((a,), {"bias": 1.0})
    getitem = hf.symbolic_trace(lambda x: x[0]).graph.nodes[1]
    only = getitem.normalized_arguments(normalize_to_only_use_kwargs=True)
    assert only is not None
    assert len(only.args) == 2  # they can be given by position only
    biggest = module.graph.call_function(max, x, x)
    assert biggest.normalized_arguments() is None


# --- graphs ---------------------------------------------------------------------------


def test_a_graph_prints_as_a_table(capsys: Any) -> None:
    hf.symbolic_trace(lambda x: hf.sin(x) + 1.0).graph.print_tabular()
    assert capsys.readouterr().out.splitlines() == [
        "kind           name    target  args        kwargs",
        "-------------  ------  ------  ----------  ------",
        "placeholder    x       x       ()          {}",
        "call_function  sin     sin     (x,)        {}",
        "call_function  add     add     (sin, 1.0)  {}",
        "output         output  output  (add,)      {}",
    ]


def twice_as_long(lines: list[str]) -> list[str]:
    return ["seen.append(1)\n", *lines]


def test_the_source_is_rewritten_when_it_is_generated() -> None:
    module = hf.symbolic_trace(model)
    seen: list[int] = []

    def make(before: Any) -> Callable[[list[str]], list[str]]:
        made.append(before)
        return lambda lines: ["if True:\n", "    x = x + 1.0\n", *lines]

    made: list[Any] = []
    with module.graph.on_generate_code(make):
        assert made == [None]
        module.recompile()
        assert "    if True:\n        x = x + 1.0\n    sin = hf.sin(x)" in module.code
        same(module(X), model(X + 1.0))
    same(module.recompile()(X), model(X))
    module.graph.on_generate_code(lambda before: twice_as_long)
    for other in (
        copy.deepcopy(module.graph),
        pickle.loads(pickle.dumps(module.graph)),
    ):
        assert "seen.append(1)" in str(other)
    assert seen == []
    for wrong in (3, lambda before: None):
        with pytest.raises(
            ArgumentTypeError, match="a function that returns a function"
        ):
            module.graph.on_generate_code(wrong)  # type: ignore[arg-type]


# --- submodules -----------------------------------------------------------------------


def test_submodules_are_added_and_deleted() -> None:
    module = hf.symbolic_trace(NET)
    assert list(module.attributes) == ["a", "b"]
    assert module.add_submodule("a.inner", Layer(hf.asarray(5.0)))
    assert module.add_submodule("c", Layer(hf.asarray(7.0)))
    module.graph.find_nodes("call_module", "b")[0].target = "c"
    module.recompile()
    assert module(hf.asarray(1.0)).item() == 15.0
    module.delete_all_unused_submodules()
    assert list(module.attributes) == ["a", "a.inner", "c"]
    assert module.delete_submodule("a")
    assert not module.delete_submodule("a")
    assert list(module.attributes) == ["c"]
    with pytest.raises(GraphError, match="refers to `a`, which is no attribute"):
        module.recompile()


def test_a_submodule_has_a_path_that_can_be() -> None:
    table = hf.ones(2)
    module = hf.symbolic_trace(lambda x: x * table)
    assert not module.add_submodule("tensor.layer", NET.a)
    assert not module.delete_submodule("tensor")
    with pytest.raises(
        ArgumentTypeError, match="expected a path and a module, and found"
    ):
        module.add_submodule("layer", 3)


def test_submodules_of_a_module_that_a_transform_made_are_its_own() -> None:
    module = hf.symbolic_trace(NET)
    leaves, spec = pytree.flatten(module)
    other = pytree.unflatten(spec, leaves)
    assert other.add_submodule("c", NET.a)
    assert other.delete_submodule("c")
    assert "c" not in module.attributes


# --- folders --------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: Any) -> Iterator[Path]:
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path / "saved_module"
    for name in [n for n in sys.modules if n.startswith("saved_module")]:
        del sys.modules[name]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool"])
def test_a_module_is_written_as_a_package(folder: Path, dtype: str) -> None:
    table = hf.asarray([1, 0, 1], dtype=getattr(hf, dtype))

    def f(x: Any, n: int = 2) -> Any:
        return hf.linalg.inv(x[:, :2]) @ x * table, operator.index(n), scaled(x, by=3.0)

    module = hf.symbolic_trace(f, {"n": 2})
    module.to_folder(folder, "Saved")
    saved = importlib.import_module("saved_module").Saved()
    same(saved(X), f(X))
    assert saved.attributes["tensor"].dtype == table.dtype
    assert "inv = hf.linalg.inv(getitem)" in (folder / "module.py").read_text()


def test_a_package_calls_numpys_functions(folder: Path) -> None:
    module = hf.symbolic_trace(lambda x: np.linalg.norm(np.add.reduce(np.sin(x))))
    module.to_folder(folder, "Saved")
    saved = importlib.import_module("saved_module").Saved()
    same([saved(X)], [module(X)])


def of_one_body(x: Any, w: Any) -> Any:
    return hf.map(lambda row: hf.tanh(row @ w), x)


def of_nested_bodies(x: Any, w: Any) -> Any:
    table = hf.asarray(np.arange(3.0, dtype=np.float32))

    def step(c: Any, row: Any) -> Any:
        big = hf.sum(c) > 3.0
        return hf.cond(big, lambda: hf.tanh(c @ w) + table, lambda: c + row), hf.sum(c)

    return hf.scan(step, x[0], x)


def of_named_bodies(x: Any, w: Any) -> Any:
    return hf.map(helper, x) @ w, hf.map(hf.sin, x)


def of_a_size(x: Any, w: Any) -> Any:
    return hf.while_loop(
        lambda i, t: i < 2,
        lambda i, t: (i + 1, hf.concat([t, t @ w])),
        (0, x),
        dynamic_carry={"t": {0: True}},
    )[1]


def of_names_alike(x: Any, w: Any) -> Any:
    def Saved_body(row: Any) -> Any:
        return scaled(row, by=w[0, 0])

    return Saved(hf.map(Saved_body, x)), hf.map(lambda row: Saved(row) * 2.0, x)


@hf.wrap
def Saved(x: Any) -> Any:
    return x * 3.0


@pytest.mark.parametrize(
    "f", [of_one_body, of_nested_bodies, of_named_bodies, of_a_size, of_names_alike]
)
@pytest.mark.parametrize("make", [lambda m: m, fx.open_bodies])
def test_bodies_are_written_with_the_module(folder: Path, f: Any, make: Any) -> None:
    w = hf.asarray(np.eye(3, dtype=np.float32) * 0.5)
    module = make(hf.symbolic_trace(f))
    module.to_folder(folder, "Saved")
    saved = importlib.import_module("saved_module").Saved()
    for run in (saved, hf.jit(saved)):
        found, expected = (pytree.flatten(v)[0] for v in (run(X, w), f(X, w)))
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(np.asarray(a), np.asarray(b), 1e-5)
    assert module.code == make(hf.symbolic_trace(f)).code


def test_what_cannot_be_written_is_refused(folder: Path) -> None:
    module = hf.symbolic_trace(model)
    with pytest.raises(
        ArgumentValueError, match="must be a name for a class, and is '3'"
    ):
        module.to_folder(folder, "3")
    with pytest.raises(ArgumentValueError, match="`a` is a `Layer`, and only tensors"):
        hf.symbolic_trace(NET).to_folder(folder)
    asking = hf.symbolic_trace(lambda x: hf.map(lambda row: row if row else -row, x))
    with pytest.raises(ArgumentValueError, match="which no module has by name"):
        asking.to_folder(folder)
    reading = hf.symbolic_trace(
        lambda x, n: hf.map(lambda row: row if row else n * row, x)
    )
    with pytest.raises(ArgumentValueError, match="reads values of the graph, and"):
        reading.to_folder(folder)
    captured = hf.symbolic_trace(hf.trace(lambda x: hf.sin(x), X))
    with pytest.raises(ArgumentValueError, match="operations of a captured module"):
        captured.to_folder(folder)
    assert not folder.exists()


# --- wrap -----------------------------------------------------------------------------


def test_what_was_wrapped_by_name_is_one_node() -> None:
    def f(x: Any) -> Any:
        return scaled(x, by=len(x))

    before = dict(globals())
    module = hf.symbolic_trace(f)
    assert {k: v for k, v in globals().items() if k in ("len", "scaled")} == {
        "scaled": before["scaled"]
    }
    targets = [n.target for n in module.graph.find_nodes("call_function")]
    assert targets == [len, scaled]
    for run in (module, hf.symbolic_trace(module), fx.Transformer(module).transform()):
        same([run(X)], [X * 2.0])
        kept = [n.target for n in run.graph.find_nodes("call_function")]
        assert kept == targets
    same([pickle.loads(pickle.dumps(module))(X)], [X * 2.0])
    assert len([1, 2]) == 2


def test_a_name_that_is_wrapped_is_one_of_a_function_of_the_module() -> None:
    with pytest.raises(ArgumentValueError, match="and not in `test_a_name_that_is_wr"):
        hf.wrap("len")
    with pytest.raises(
        ArgumentValueError, match="'nothing' is no function of the modul"
    ):
        exec("import hopflow as hf; hf.wrap('nothing')", {"__name__": "made"})


# --- passes ---------------------------------------------------------------------------


def test_shapes_are_noted_without_values() -> None:
    module = hf.symbolic_trace(model)
    types = fx.ShapeProp(module).propagate(hf.spec("f32[n, 4]"))
    assert [str(t) for t in types] == ["f32[4]", "f32[]"]
    noted = {n.name: str(n.meta["type"]) for n in module.graph.nodes}
    assert noted["sin"] == "f32[n, 4]"
    assert noted["sum_1"] == "f32[4]"
    assert noted["scale"] == "2.0"
    assert [str(t) for t in module.graph.output_node().meta["type"]] == [
        "f32[4]",
        "f32[]",
    ]
    with pytest.raises(ShapeError) as caught:
        fx.ShapeProp(hf.symbolic_trace(lambda x: x @ x)).propagate(hf.spec("f32[2, 3]"))
    assert any("in node `matmul`" in note for note in caught.value.__notes__)


def by_number(*numbers: int) -> Callable[[fx.Node], int]:
    rest = iter(numbers)
    return lambda node: next(rest)


WEIGHT = hf.asarray([1.0, 2.0, 3.0])


def straight(x: Any, y: Any) -> Any:
    a = hf.sin(x)
    b = a * WEIGHT
    c = hf.cos(y) + a
    return {"both": (b + c, b), "y": y, "w": WEIGHT}


@pytest.mark.parametrize(
    "parts", [(0, 0, 0, 0, 0), (0, 0, 1, 1, 1), (0, 1, 2, 2, 3), (1, 1, 0, 2, 2)]
)
def test_a_module_is_split_into_submodules(parts: tuple[int, ...]) -> None:
    module = hf.symbolic_trace(straight)
    names: dict[str, str] = {}
    split = fx.split_module(module, None, by_number(*parts), names)
    assert {n.kind for n in split.graph.nodes} <= {
        *("placeholder", "get_attr", "call_module", "call_function", "output")
    }
    modules = [n.target for n in split.graph.find_nodes("call_module")]
    assert sorted(modules) == [f"submod_{i}" for i in sorted(set(parts))]
    assert set(names.values()) == {"tensor"}
    for run in (split, hf.jit(split), split.propagate(X, X)):
        found, expected = run(X, X), straight(X, X)
        same(found["both"], expected["both"])
        same([found["y"], found["w"]], [X, WEIGHT])
    same(module(X, X)["both"], straight(X, X)["both"])


def test_captured_modules_are_split_and_drawn() -> None:
    weight = hf.asarray([1.0, 2.0, 3.0])

    def f(x: Any) -> Any:
        rows = hf.map(lambda row: hf.tanh(row * weight), x)
        return hf.sum(rows, axis=0), hf.sin(x)

    x = hf.ones((4, 3))
    captured = hf.trace(f, x, captures=True)
    parts = fx.split_module(
        captured, None, lambda node: node.target_name in ("reduce_sum", "results")
    )
    assert [n.target for n in parts.graph.find_nodes("call_module")] == [
        *("submod_False", "submod_True"),
    ]
    same(pytree.flatten(parts(x))[0], pytree.flatten(f(x))[0])
    drawn = fx.to_dot(captured)
    assert "reduce_sum" in drawn
    assert drawn == fx.to_dot(hf.symbolic_trace(captured))
    assert fx.FxGraphDrawer(captured).get_dot_graph() == drawn


def test_modules_are_split_with_their_leaves() -> None:
    names: dict[str, str] = {}
    module = hf.symbolic_trace(NET)
    split = fx.split_module(module, NET, lambda node: node.target, names)
    assert names == {"submod_a.a": "a", "submod_b.b": "b"}
    assert split(hf.asarray(1.0)).item() == 7.0
    grads = hf.grad(lambda m, x: m(x))(split, hf.asarray(1.0))
    assert grads.attributes["submod_a"].attributes["a"].w.item() == 3.0


def test_partitions_have_an_order() -> None:
    module = hf.symbolic_trace(straight)
    with pytest.raises(
        GraphError, match="the partitions 0, 1 of graph `straight` need"
    ):
        fx.split_module(module, None, by_number(0, 1, 1, 1, 0))
    with pytest.raises(ArgumentTypeError, match=r"split_module: expected a .*`Graph`"):
        fx.split_module(module.graph, None, 3)  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match="`split_callback` must be a function"):
        fx.split_module(module, None, 3)  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match=r"`split_callback` \(int\) must take"):
        fx.split_module(module, None, int)  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match="For node `sin`: unhashable type"):
        fx.split_module(module, None, lambda node: [node])  # type: ignore[arg-type, return-value]
    with pytest.raises(
        TypeError, match="int\\(\\) argument must be"
    ):  # in the callback
        fx.split_module(module, None, lambda node: int(node))  # type: ignore[call-overload]
    with pytest.raises(ArgumentTypeError, match="`qualname_map` must be a dict"):
        fx.split_module(module, None, by_number(0), 3)  # type: ignore[arg-type]

    def writes(x: Any) -> Any:
        y = x * 2.0
        z = y[0] + 1.0
        y[0] = 5.0
        return z, y + z

    module = hf.symbolic_trace(writes)
    split = fx.split_module(module, None, by_number(0, 1, 1, 2, 3))
    same(split(X), writes(X))
    with pytest.raises(GraphError, match="results or effects"):
        fx.split_module(module, None, by_number(0, 1, 1, 0, 3))


def test_a_drawing_has_nodes_edges_and_clusters() -> None:
    module = hf.symbolic_trace(straight)
    fx.ShapeProp(module).propagate(*hf.spec("f32[2, 3]", "f32[2, 3]"))
    split = fx.split_module(module, None, by_number(0, 0, 1, 1, 1))
    text = fx.to_dot(split, "two parts")
    lines = [line.strip() for line in text.splitlines()]
    assert lines[0] == 'digraph "two parts" {'
    assert '"submod_0" -> "getitem";' in lines
    assert 'subgraph "cluster_submod_0" {' in lines
    assert '"submod_0.x" -> "submod_0.sin";' in lines
    assert any(
        "{sin|call_function|sin|f32[2, 3]|test_fx_members.py:" in x for x in lines
    )
    assert text.count("{") == text.count("}")
    assert fx.FxGraphDrawer(split, "two parts").get_dot_graph() == text
    odd = hf.symbolic_trace(lambda x: x < 1.0)
    assert "{lt|call_function|lt|" in fx.to_dot(odd)
    odd.graph.nodes[0].meta["type"] = 'a|b<"c">'
    assert 'a\\|b\\<\\"c\\"\\>' in fx.to_dot(odd)
    with pytest.raises(
        ArgumentTypeError, match=r"to_dot: expected a `hf\.fx\.GraphModule`"
    ):
        fx.to_dot(3)  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match="FxGraphDrawer: `name` must be a str"):
        fx.FxGraphDrawer(split, 3)  # type: ignore[arg-type]


def test_tools_take_captured_modules() -> None:
    x = hf.asarray([1.0, 2.0])
    module = hf.trace(lambda x: hf.fori_loop(0, 2, lambda _, c: hf.sin(c), x * 2), x)
    for text in (hf.fx.to_dot(module), hf.fx.FxGraphDrawer(module).get_dot_graph()):
        assert text.startswith("digraph")
        assert "while_loop" in text
    split = hf.fx.split_module(module, None, lambda _: "all")
    assert split(x).tolist() == module(x).tolist()
