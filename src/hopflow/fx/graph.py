"""`Graph`: what a function does, before any type is known.

A captured graph (`hopflow.graph`) has a type on every value, flat operands, and
operators as targets. Here a node is its own value, its arguments are any Python data
with nodes in it, and it calls what the user called.
"""

import builtins
import re
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from keyword import iskeyword
from typing import Any, Final, TypeAlias

from hopflow.entries import entries
from hopflow.errors import ArgumentTypeError, ArgumentValueError, GraphError
from hopflow.fx.node import KINDS, Kind, Node, map_items, map_nodes
from hopflow.fx.source import SCOPE, python_source

__all__ = ["Graph"]

CodeTransform: TypeAlias = Callable[[list[str]], list[str]]
"""The lines of a function's body -> the lines that it shall have."""

_RESERVED: Final = frozenset([*dir(builtins), *SCOPE])


class Graph:
    """Nodes in order of execution, and the edits that keep them whole.

    `attributes` are the tensors and modules that nodes refer to, by their path.
    New nodes stand at the end, or where `inserting_before` or `inserting_after` says.
    """

    def __init__(self, name: str = "forward") -> None:
        """
        Raises:
            ArgumentValueError: no function can have this name.
        """
        if not isinstance(name, str) or not name.isidentifier() or iskeyword(name):
            raise ArgumentValueError(
                f"Graph: `name` must be a name for a function, and is {name!r}."
            )
        self.name = name
        self.attributes: dict[str, Any] = {}
        self._nodes: list[Node] = []
        self._names: set[str] = set()
        self._transform_code: CodeTransform | None = None
        self._before: Node | None = None  # where new nodes go; None: at the end

    def __repr__(self) -> str:
        return f"<fx.Graph {self.name}: {len(self._nodes)} nodes>"

    # --- saving: a row for each node, for nodes in nodes are too deep for `pickle` ---

    def __getstate__(self) -> dict[str, Any]:
        places = {node: _Place(i) for i, node in enumerate(self._nodes)}
        rows = [
            (
                node.kind,
                node.target,
                map_nodes(
                    (node.args, node.kwargs, node.meta), lambda n: places.get(n, n)
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
            args, kwargs, meta = _put_back(read, self._nodes)
            node = Node(self, kind, target, args, kwargs, name, type_)
            node.line, node.module_path, node.meta = line, module_path, meta
            self._nodes.append(node)
            self._names.add(node.name)

    # --- reading ---

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes as they are now: edits do not disturb a loop over them."""
        return tuple(self._nodes)

    @property
    def placeholders(self) -> list[Node]:
        return [node for node in self._nodes if node.kind == "placeholder"]

    def output_node(self) -> Node:
        """The node that returns.

        Raises:
            GraphError: there is none yet.
        """
        if self._nodes and self._nodes[-1].kind == "output":
            return self._nodes[-1]
        raise GraphError(
            f"graph `{self.name}` returns nothing: end it with `graph.output(node)`."
        )

    def find_nodes(self, kind: Kind, target: Any = None) -> list[Node]:
        """The nodes of a kind, and of a target if one is given."""
        return [
            node
            for node in self._nodes
            if node.kind == kind and (target is None or node.target == target)
        ]

    def index(self, node: Node) -> int:
        """The position of a node.

        Raises:
            ArgumentTypeError: it is no node.
            GraphError: it is not in the graph.
        """
        if not isinstance(node, Node):
            raise ArgumentTypeError(
                f"graph `{self.name}`: expected a node, and found "
                f"`{type(node).__name__}`."
            )
        for i, other in enumerate(self._nodes):
            if other is node:
                return i
        raise GraphError(f"graph `{self.name}` does not have the node `{node.name}`.")

    # --- new nodes ---

    def create_node(
        self,
        kind: Kind,
        target: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
        name: str | None = None,
        type_: Any = None,
    ) -> Node:
        """A new node at the point of insertion.

        Raises:
            ArgumentTypeError: the arguments are no tuple and mapping, or `name` is no
                text.
            GraphError: there is no such kind.
        """
        if kind not in KINDS:
            raise GraphError(f"a node is one of {', '.join(KINDS)}, and not {kind!r}.")
        if not isinstance(name, str | None):
            raise ArgumentTypeError(
                f"graph `{self.name}`: the name of a node must be a string, and is "
                f"`{type(name).__name__}`."
            )
        unique = self._unique(name or _suggestion(target))
        node = Node(self, kind, target, args, kwargs or {}, unique, type_)
        at = len(self._nodes) if self._before is None else self.index(self._before)
        self._nodes.insert(at, node)
        return node

    def placeholder(self, name: str, type_: Any = None, *default: Any) -> Node:
        """A new parameter, with its default if one is given."""
        return self.create_node("placeholder", name, default, type_=type_)

    def get_attr(self, path: str, value: Any = None) -> Node:
        """A read of the attribute at `path`, which becomes `value` if that is given."""
        if value is not None:
            self.attributes[path] = value
        return self.create_node("get_attr", path)

    def call_function(
        self, f: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Node:
        """A call `f(*args, **kwargs)`."""
        return self.create_node("call_function", f, args, kwargs)

    def call_method(self, method: str, /, *args: Any, **kwargs: Any) -> Node:
        """A call of a method of `args[0]`."""
        return self.create_node("call_method", method, args, kwargs)

    def call_module(self, path: str, /, *args: Any, **kwargs: Any) -> Node:
        """A call of the module that is the attribute at `path`."""
        return self.create_node("call_module", path, args, kwargs)

    def output(self, value: Any, type_: Any = None) -> Node:
        """What the graph returns: Python data with nodes in it."""
        return self.create_node("output", "output", (value,), type_=type_)

    def node_copy(
        self, node: Node, f: Callable[[Node], Any] = lambda node: node
    ) -> Node:
        """A copy of a node (of any graph), which reads `f` of what that one reads."""
        args, kwargs = map_nodes((node.args, node.kwargs), f)
        copy = self.create_node(
            node.kind, node.target, args, kwargs, node.name, node.type
        )
        copy.line, copy.module_path = node.line, node.module_path
        copy.meta = dict(node.meta)
        if node.kind in ("get_attr", "call_module") and node.graph is not self:
            self._adopt(copy, node.graph.attributes[node.target])
        return copy

    def _adopt(self, node: Node, value: Any) -> None:
        """Let `node` refer to `value`, under another path if its own is taken."""
        path, number = node.target, 1
        while self.attributes.get(path, value) is not value:
            path, number = f"{node.target}_{number}", number + 1
        node.target = path
        self.attributes[path] = value

    def graph_copy(self, other: "Graph", known: dict[Node, Any]) -> Any:
        """Copy the nodes of another graph to here, and return what it returns.

        Args:
            known: What stands for nodes of `other`; the copies join it.

        Raises:
            ArgumentTypeError: `other` is no graph, or `known` no dict.
        """
        if not isinstance(other, Graph) or not isinstance(known, MutableMapping):
            raise ArgumentTypeError(
                "graph_copy: expected a graph and a dict, and found "
                f"`{type(other).__name__}` and `{type(known).__name__}`."
            )
        for node in other.nodes:
            if node.kind == "output":
                return map_nodes(node.args[0], known.__getitem__)
            if node not in known:
                known[node] = self.node_copy(node, known.__getitem__)
        return None

    def _unique(self, name: str) -> str:
        base = re.sub(r"\W", "_", name).strip("_") or "value"
        base = f"_{base}" if base[0].isdigit() else base
        base = f"{base}_" if iskeyword(base) else base
        # What the source refers to by names of Python's is not hidden by a node's.
        found, number = f"{base}_1" if base in _RESERVED else base, 1
        while found in self._names:
            found, number = f"{base}_{number}", number + 1
        self._names.add(found)
        return found

    # --- where new nodes go ---

    def inserting_before(self, node: Node) -> AbstractContextManager[None]:
        """Within the block new nodes stand right before `node`, in order.

        Raises:
            GraphError: `node` is not in the graph.
        """
        self.index(node)
        return self._inserting(node)

    def inserting_after(self, node: Node) -> AbstractContextManager[None]:
        """Within the block new nodes stand right after `node`, in order.

        Raises:
            GraphError: `node` is not in the graph, or it is the output, after which
                nothing runs.
        """
        after = self.index(node) + 1
        if node.kind == "output":
            raise GraphError("nothing runs after the output: insert before it.")
        return self._inserting(self._nodes[after] if after < len(self._nodes) else None)

    @contextmanager
    def _inserting(self, node: Node | None) -> Iterator[None]:
        before, self._before = self._before, node
        try:
            yield
        finally:
            self._before = before

    # --- edits ---

    def move(self, node: Node, position: int) -> None:
        """Let `node` stand before what is at `position` now."""
        at = self.index(node)
        self._nodes.insert(position, node)
        del self._nodes[at if at < position else at + 1]

    def erase_node(self, node: Node) -> None:
        """Take out a node that nothing reads.

        Raises:
            GraphError: something reads it, or it is not in the graph.
        """
        index = self.index(node)
        if node.users:
            users = ", ".join(f"`{user.name}`" for user in node.users)
            raise GraphError(
                f"cannot erase `{node.name}`: {users} reads it. Call "
                "`node.replace_all_uses_with` before."
            )
        del self._nodes[index]
        node.args, node.kwargs = (), {}
        self._names.discard(node.name)

    def eliminate_dead_code(
        self, is_impure: Callable[[Node], bool] = Node.is_impure
    ) -> int:
        """Take out the nodes that nothing reads, and attributes that no node names.

        Args:
            is_impure: Which nodes stay all the same.

        Returns:
            How many nodes were taken out.
        """
        count = len(self._nodes)
        for node in reversed(self.nodes):
            if not node.users and not is_impure(node):
                self.erase_node(node)
        named = {n.target for n in self._nodes if n.kind in ("get_attr", "call_module")}
        for path in [path for path in self.attributes if path not in named]:
            del self.attributes[path]
        return count - len(self._nodes)

    def lint(self) -> None:
        """Check the graph.

        Raises:
            GraphError: a node is read before it is computed or belongs to another
                graph; names repeat; parameters do not come first; what a node refers to
                is no attribute, or is of the wrong kind; no output ends the graph.
        """
        seen: set[Node] = set()
        names: set[str] = set()
        for node in self._nodes:
            self._lint_node(node, seen)
            if node.name in names:
                raise _broken(self, node, "has a name that another node has")
            names.add(node.name)
            seen.add(node)
        for node in self._nodes[:-1]:
            if node.kind == "output":
                raise _broken(self, node, "returns, and nodes stand behind it")
        self.output_node()

    def _lint_node(self, node: Node, seen: set[Node]) -> None:
        if node.graph is not self:
            raise _broken(self, node, "belongs to another graph")
        for read in node.inputs:
            if read not in seen:
                raise _broken(
                    self, node, f"reads `{read.name}`, which is not before it"
                )
        if node.kind == "placeholder" and any(n.kind != "placeholder" for n in seen):
            raise _broken(self, node, "is a parameter, and stands behind other nodes")
        if node.kind == "call_function":
            if not callable(node.target):
                raise _broken(
                    self, node, f"calls {node.target!r}, which is no function"
                )
        elif not isinstance(node.target, str):
            raise _broken(self, node, f"has {node.target!r} for a name")
        if node.kind in ("get_attr", "call_module") and (
            node.target not in self.attributes
        ):
            raise _broken(
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
        """Let a function rewrite the lines of the source, whenever it is written.

            graph.on_generate_code(lambda before: lambda lines: [FIRST, *lines])

        Args:
            make: Gets the function that did so until now, or None, and returns the new
                one: of the lines of the body, without indentation but each with its
                newline, to such lines.

        Returns:
            A context manager at whose end the former function is back.

        Raises:
            ArgumentTypeError: `make` is no function, or returns none.
        """
        before = self._transform_code
        after = make(before) if callable(make) else None
        if not callable(after):
            raise ArgumentTypeError(
                "on_generate_code: `make` must be a function that returns a function "
                f"of lines, and is `{type(make if after is None else after).__name__}`."
            )
        self._transform_code = after
        return _restoring(self, before)

    @property
    def transform_code(self) -> CodeTransform | None:
        """What rewrites the lines of the source; see `on_generate_code`."""
        return self._transform_code

    def __str__(self) -> str:
        """The graph as a Python function."""
        return python_source(self).text


entries(
    Graph,
    *("__init__", "output_node", "index", "create_node", "placeholder", "get_attr"),
    *("call_function", "call_method", "call_module", "output", "node_copy"),
    *("graph_copy", "inserting_before", "inserting_after", "move", "erase_node"),
    *("eliminate_dead_code", "lint", "on_generate_code", "__str__"),
)


@contextmanager
def _restoring(graph: Graph, before: CodeTransform | None) -> Iterator[None]:
    try:
        yield
    finally:
        graph._transform_code = before


@dataclass(frozen=True, slots=True)
class _Place:
    """Stands for the node at a place of a saved graph."""

    index: int


def _put_back(value: Any, nodes: list[Node]) -> Any:
    if isinstance(value, _Place):
        return nodes[value.index]
    return map_items(value, lambda item: _put_back(item, nodes))


def _broken(graph: Graph, node: Node, rule: str) -> GraphError:
    at = f" ({node.line})" if node.line else ""
    return GraphError(f"graph `{graph.name}`: node `{node.name}`{at} {rule}.")


def _suggestion(target: Any) -> str:
    """A name for the value of a new node."""
    if isinstance(target, str):
        return target
    return getattr(target, "__name__", type(target).__name__)
