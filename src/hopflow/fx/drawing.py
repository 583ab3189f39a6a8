"""Graphs of `fx` as pictures, in the language of Graphviz (`dot -Tsvg`)."""

from collections.abc import Iterator
from typing import Any

from hopflow.entries import entry
from hopflow.errors import ArgumentTypeError
from hopflow.fx.importing import as_symbolic
from hopflow.fx.module import GraphModule
from hopflow.fx.node import Node
from hopflow.graph.module import GraphModule as Captured

_COLOURS = {
    "placeholder": "AliceBlue",
    "get_attr": "LightGrey",
    "call_function": "LemonChiffon",
    "call_method": "Linen",
    "call_module": "LightPink",
    "output": "Honeydew",
}


@entry
def to_dot(module: GraphModule | Captured, name: str = "") -> str:
    """Return a module as a Graphviz graph.

    Nodes show name, target, line and noted type; edges lead from values to their
    readers. Submodules that are graphs are clusters. A captured module is converted as
    by `hf.symbolic_trace`.

        Path("model.dot").write_text(hf.fx.to_dot(module))

    Args:
        name: Of the picture; by default the name of the graph.

    Raises:
        ArgumentTypeError: `module` is neither a module of `fx` nor a captured one, or
            `name` is no string.
    """
    module = _drawable("to_dot", module, name)
    lines = [
        f"digraph {_quoted(name or module.graph.name)} {{",
        '    node [shape=record, style="filled, rounded", fontname=monospace];',
        *(f"    {line}" for line in _graph(module, "")),
        "}",
    ]
    return "\n".join(lines) + "\n"


class FxGraphDrawer:
    """Draw a module.

    get_dot_graph()   its text for Graphviz; see `to_dot`
    """

    @entry
    def __init__(self, graph_module: GraphModule | Captured, name: str = "") -> None:
        """Prepare to draw a module.

        Raises:
            ArgumentTypeError: the module is neither one of `fx` nor a captured one, or
                `name` is no string.
        """
        self.graph_module = _drawable("FxGraphDrawer", graph_module, name)
        self.name = name

    def get_dot_graph(self) -> str:
        """Return the text for Graphviz."""
        return to_dot(self.graph_module, self.name)


def _drawable(tool: str, module: object, name: object) -> GraphModule:
    """Return a module of `fx` to draw.

    Raises:
        ArgumentTypeError: the module is neither one of `fx` nor a captured one, or
            `name` is no string.
    """
    symbolic = as_symbolic(tool, module)
    if not isinstance(name, str):
        raise ArgumentTypeError(
            f"{tool}: `name` must be a string, and is `{type(name).__name__}`."
        )
    return symbolic


def _graph(module: GraphModule, prefix: str) -> Iterator[str]:
    for node in module.graph.nodes:
        name = _quoted(prefix + node.name)
        colour = _COLOURS[node.kind]
        yield f"{name} [label={_quoted(_label(node))}, fillcolor={colour}];"
        for read in node.inputs:
            yield f"{_quoted(prefix + read.name)} -> {name};"
    for path, inner in module.attributes.items():
        if isinstance(inner, GraphModule):
            yield f"subgraph {_quoted(f'cluster_{prefix}{path}')} {{"
            yield f"    label={_quoted(path)};"
            for line in _graph(inner, f"{prefix}{path}."):
                yield f"    {line}"
            yield "}"


def _label(node: Node) -> str:
    rows = [node.name, node.kind, node.target_name]
    if "type" in node.meta:
        rows.append(str(node.meta["type"]))
    if node.line is not None:
        rows.append(str(node.line))
    return "{" + "|".join(map(_escaped, rows)) + "}"


def _escaped(text: Any) -> str:
    """Return text with the special characters of a record escaped."""
    return "".join(f"\\{c}" if c in "{}|<>" else c for c in text)


def _quoted(text: str) -> str:
    return '"' + text.replace("\n", "\\n").replace('"', '\\"') + '"'
