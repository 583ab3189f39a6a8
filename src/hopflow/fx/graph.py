"""`Graph`: the calls of a function, traced before any type is known.

A captured graph (`hopflow.graph`) has typed values, flat operands, and operators as
targets. Here a node is its value, its arguments are any Python data with nodes in it,
and its target is the function that the user called.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from keyword import iskeyword
from typing import Any

from hopflow.entries import entries
from hopflow.errors import ArgumentTypeError, ArgumentValueError, GraphError
from hopflow.fx.node import (
    CodeTransform,
    Node,
    NodeList,
    map_items,
    map_nodes,
)
from hopflow.fx.source import python_source


class Graph(NodeList):
    """Nodes in order of execution, which print as a Python function.

    `attributes` has the tensors and modules that nodes refer to, by path. New nodes are
    added at the end, or where `inserting_before` or `inserting_after` says.

    >>> graph = hf.fx.Graph()
    >>> x = graph.placeholder("x")
    >>> node = graph.output(graph.call_function(hf.sin, x))
    >>> print(graph)
    def forward(self, x):
        sin = hf.sin(x)
        return sin
    <BLANKLINE>
    """

    def __init__(self, name: str = "forward") -> None:
        """Make an empty graph.

        Raises:
            ArgumentValueError: `name` is no name for a function.
        """
        if not isinstance(name, str) or not name.isidentifier() or iskeyword(name):
            raise ArgumentValueError(
                f"Graph: `name` must be a name for a function, and is {name!r}."
            )
        super().__init__(name)

    def __repr__(self) -> str:
        return f"<fx.Graph {self.name}: {len(self._nodes)} nodes>"

    # --- pickling: a row for each node, since `pickle` recurses into nodes of nodes ---

    def __getstate__(self) -> dict[str, Any]:
        indices = {node: _Place(i) for i, node in enumerate(self._nodes)}
        rows = [
            (
                node.kind,
                node.target,
                map_nodes(
                    (node.args, node.kwargs, node.meta), lambda n: indices.get(n, n)
                ),
                (node.name, node.type),
                (node.line, node.module_path),
            )
            for node in self._nodes
        ]
        return {
            "name": self.name,
            "attributes": self.attributes,
            "rows": rows,
            "transform_code": self._transform_code,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        Graph.__init__(self, state["name"])
        self.attributes = state["attributes"]
        self._transform_code = state["transform_code"]
        for kind, target, read, (name, type_), (line, module_path) in state["rows"]:
            args, kwargs, meta = _resolved(read, self._nodes)
            node = Node(self, kind, target, args, kwargs, name, type_)
            node.line, node.module_path, node.meta = line, module_path, meta
            self._nodes.append(node)
            self._names.add(node.name)

    # --- reading ---

    def lint(self) -> None:
        """Check the graph.

        Raises:
            GraphError: a node is read before it is computed, or belongs to another
                graph; names repeat; parameters do not come first; a target is no
                attribute, or of the wrong kind; the graph does not end in an output.
        """
        seen: set[Node] = set()
        names: set[str] = set()
        for node in self._nodes:
            self._lint_node(node, seen)
            if node.name in names:
                raise _rule_error(self, node, "has a name that another node has")
            names.add(node.name)
            seen.add(node)
        for node in self._nodes[:-1]:
            if node.kind == "output":
                raise _rule_error(self, node, "returns, and nodes stand behind it")
        self.output_node()

    def _lint_node(self, node: Node, seen: set[Node]) -> None:
        if node.graph is not self:
            raise _rule_error(self, node, "belongs to another graph")
        for read in node.inputs:
            if read not in seen:
                raise _rule_error(
                    self, node, f"reads `{read.name}`, which is not before it"
                )
        if node.kind == "placeholder" and any(n.kind != "placeholder" for n in seen):
            raise _rule_error(
                self, node, "is a parameter, and stands behind other nodes"
            )
        if node.kind == "call_function":
            if not callable(node.target):
                raise _rule_error(
                    self, node, f"calls {node.target!r}, which is no function"
                )
        elif not isinstance(node.target, str):
            raise _rule_error(self, node, f"has {node.target!r} for a name")
        if node.kind in ("get_attr", "call_module") and (
            node.target not in self.attributes
        ):
            raise _rule_error(
                self, node, f"refers to `{node.target}`, which is no attribute"
            )

    # --- as text ---

    def print_tabular(self) -> None:
        """Print the nodes as a table: kind, name, target, args, kwargs."""
        rows = [("kind", "name", "target", "args", "kwargs")]
        rows += [
            (n.kind, n.name, n.target_name, str(n.args), str(n.kwargs))
            for n in self._nodes
        ]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        rows.insert(1, tuple("-" * width for width in widths))  # type: ignore[arg-type]
        for row in rows:
            cells = [c.ljust(width) for c, width in zip(row, widths, strict=True)]
            print("  ".join(cells).rstrip())

    def on_generate_code(
        self, make: Callable[[CodeTransform | None], CodeTransform]
    ) -> AbstractContextManager[None]:
        """Set a function that rewrites the lines of the source.

            graph.on_generate_code(lambda previous: lambda lines: [FIRST, *lines])

        Args:
            make: Gets the previous function, or None, and returns the new one, which
                maps the lines of the body to lines. They have no indentation, and end
                in a newline.

        Returns:
            A context manager that restores the previous function at its end.

        Raises:
            ArgumentTypeError: `make` is no function, or returns no function.
        """
        previous = self._transform_code
        new = make(previous) if callable(make) else None
        if not callable(new):
            raise ArgumentTypeError(
                "on_generate_code: `make` must be a function that returns a function "
                f"of lines, and is `{type(make if new is None else new).__name__}`."
            )
        self._transform_code = new
        return _restoring(self, previous)

    def __str__(self) -> str:
        """Return the graph as a Python function."""
        return python_source(self).text


entries(Graph, "__init__", "lint", "on_generate_code", "__str__")


@contextmanager
def _restoring(graph: Graph, previous: CodeTransform | None) -> Iterator[None]:
    try:
        yield
    finally:
        graph._transform_code = previous


@dataclass(frozen=True, slots=True)
class _Place:
    """Stands for the node at this position, in a pickled graph."""

    index: int


def _resolved(value: Any, nodes: list[Node]) -> Any:
    if isinstance(value, _Place):
        return nodes[value.index]
    return map_items(value, lambda item: _resolved(item, nodes))


def _rule_error(graph: Graph, node: Node, rule: str) -> GraphError:
    at = f" ({node.line})" if node.line else ""
    return GraphError(f"graph `{graph.name}`: node `{node.name}`{at} {rule}.")
