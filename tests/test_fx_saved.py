"""Graphs of `fx` that are saved or copied: what they do, and where they came from."""

import copy
import pickle  # noqa: TID251 - of what the test itself has made
from typing import Any

import numpy as np
import pytest

import hopflow as hf
from hopflow import fx


def doubled(x: Any) -> Any:
    return x * 2.0


class Scaled(hf.nn.Module):
    weight: Any

    def forward(self, x: Any) -> Any:
        for _ in range(500):  # deeper than Python recurses
            x = hf.sin(x) + x[0:1]
        return {"y": hf.map(doubled, x) @ self.weight, "x": x}


def places(graph: fx.Graph) -> list[Any]:
    return [(n.name, n.kind, n.target, n.line, n.module_path) for n in graph.nodes]


@pytest.mark.parametrize(
    "again", [copy.deepcopy, copy.copy, lambda m: pickle.loads(pickle.dumps(m))]
)
def test_a_saved_graph_is_the_same_and_knows_where_it_came_from(again: Any) -> None:
    model = hf.nn.Sequential(Scaled(hf.eye(3)))
    module = hf.symbolic_trace(model)
    graph = module.graph
    graph.nodes[2].meta = {"reads": [graph.nodes[1]]}
    found = again(module)
    assert places(found.graph) == places(graph)
    assert "layers.0:Scaled" in {n.module_path for n in found.graph.nodes}
    nodes = found.graph.nodes
    assert nodes[2].meta["reads"] == [nodes[1]]
    assert list(nodes[0].users) == list(nodes[1:3])
    assert found.code == module.code
    found.graph.lint()
    x = np.linspace(0, 1, 3, dtype=np.float32)
    np.testing.assert_array_equal(found(x)["y"], module(x)["y"])
    lines = [n.line for n in module.propagate(hf.spec("f32[3]")).graph.nodes]
    assert [n.line for n in found.propagate(hf.spec("f32[3]")).graph.nodes] == lines


def test_a_copied_module_is_edited_by_itself() -> None:
    module = hf.symbolic_trace(lambda x: hf.sin(x) + 1.0)
    other = copy.deepcopy(module)
    fx.replace_pattern(other, lambda x: hf.sin(x), lambda x: hf.cos(x))
    assert (module(0.0).item(), other(0.0).item()) == (1.0, 2.0)
    [sin] = module.graph.find_nodes("call_function", hf.sin)
    same = copy.deepcopy(sin)
    assert same in same.graph.nodes
    assert same.graph is not sin.graph
