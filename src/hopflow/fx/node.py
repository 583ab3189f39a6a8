"""`Node`: a call that is traced before any type is known; and `NodeList`, the
sequence of nodes of a graph."""

import builtins
import inspect
import operator
import re
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from keyword import iskeyword
from typing import Any, Final, Literal, NamedTuple, TypeAlias, get_args

from hopflow.entries import entries
from hopflow.errors import ArgumentTypeError, GraphError
from hopflow.fx.operations import Arguments as CheckedArguments
from hopflow.fx.operations import Operation, Results
from hopflow.graph.core import SourceLine
from hopflow.ops.opdef import OpDef
from hopflow.trace.source import name_of, source_text

CodeTransform: TypeAlias = Callable[[list[str]], list[str]]
"""The lines of a function's body -> the lines that replace them."""
Kind: TypeAlias = Literal[
    "placeholder",
    "get_attr",
    "call_function",
    "call_method",
    "call_module",
    "output",
]
KINDS: Final = get_args(Kind)
# Names that the source of any graph may use.
SCOPE: Final = ("self", "hf", "np", "op", "operator")
_RESERVED: Final = frozenset([*dir(builtins), *SCOPE])

# Python operators that write to their first argument.
IN_PLACE: Final[Mapping[str, Callable[..., Any]]] = {
    name: getattr(operator, name)
    for name in (
        "iadd isub imul itruediv ifloordiv imod ipow imatmul iand ior ixor ilshift "
        "irshift"
    ).split()
}
_WRITES: Final = frozenset([operator.setitem, *IN_PLACE.values()])
# Functions of hopflow that are called for their effects.
_EFFECTS: Final = ("callback", "check", "check_is_size", "interrupt", "print_")


def map_nodes(value: Any, f: Callable[["Node"], Any]) -> Any:
    """Return `value` with `f` applied to each node in it, at any depth."""
    if isinstance(value, Node):
        return f(value)
    return map_items(value, lambda item: map_nodes(item, f))


def map_items(value: Any, f: Callable[[Any], Any]) -> Any:
    """Return a container that may be an argument, with `f` applied to each item."""
    kind = type(value)
    if kind in (tuple, list):
        return kind([f(v) for v in value])
    if kind is dict:
        return {k: f(v) for k, v in value.items()}
    if kind is slice:
        return slice(f(value.start), f(value.stop), f(value.step))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return kind(*(f(v) for v in value))
    return value


def nodes_in(value: Any) -> "list[Node]":
    """Return the nodes in an argument, each once, in order."""
    nodes: dict[Node, None] = {}
    map_nodes(value, lambda node: nodes.setdefault(node))
    return list(nodes)


class Node:
    """A step of a graph, and its value.

    kind         placeholder | get_attr | call_function | call_method | call_module |
                 output
    target       a function, the name of a method, or the path of a module; of a
                 placeholder the parameter (`x`, `*args`), of an attribute its path
    args, kwargs   Python data with nodes in it; of a placeholder (its default,) or ();
                 of an output (the result,)
    name         unique in the graph; a variable of its source
    type         the user's annotation, or None
    users        the nodes that read this one
    line         the line of the user's code that it comes from, with its callers
    module_path  the module that it is in, with its class: "encoder.layers.0:Linear"
    meta         notes of passes
    """

    __slots__ = (
        "_args",
        "_kwargs",
        "graph",
        "kind",
        "line",
        "meta",
        "module_path",
        "name",
        "target",
        "type",
        "users",
    )

    def __init__(
        self,
        graph: "NodeList",
        kind: Kind,
        target: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        name: str,
        type_: Any = None,
    ) -> None:
        self.graph = graph
        self.kind: Kind = kind
        self.target = target
        self.name = name
        self.type = type_
        self.users: dict[Node, None] = {}
        self.line: SourceLine | None = None
        self.module_path = ""
        self.meta: dict[str, Any] = {}
        self._args: tuple[Any, ...] = ()
        self._kwargs: dict[str, Any] = {}
        self._read(args, kwargs)

    def __repr__(self) -> str:
        return self.name

    def __reduce__(self) -> Any:  # a copy belongs to the copy of the graph
        return _node_at, (self.graph, self.graph.index(self))

    @property
    def target_name(self) -> str:
        """The name of the target, as text."""
        return self.target if isinstance(self.target, str) else name_of(self.target)

    # --- arguments ---

    @property
    def args(self) -> tuple[Any, ...]:
        return self._args

    @args.setter
    def args(self, args: tuple[Any, ...]) -> None:
        self._read(args, self._kwargs)

    @property
    def kwargs(self) -> dict[str, Any]:
        return self._kwargs

    @kwargs.setter
    def kwargs(self, kwargs: Mapping[str, Any]) -> None:
        self._read(self._args, kwargs)

    def _read(self, args: Any, kwargs: Any) -> None:
        """Set the arguments, and update the users of the nodes in them.

        Raises:
            ArgumentTypeError: the arguments are no tuple and mapping.
        """
        if not isinstance(args, tuple | list) or not isinstance(kwargs, Mapping):
            raise ArgumentTypeError(
                f"graph `{self.graph.name}`: the arguments of node `{self.name}` must "
                "be a tuple and a mapping, and are "
                f"`{type(args).__name__}` and `{type(kwargs).__name__}`."
            )
        for node in self.inputs:
            del node.users[self]
        self._args, self._kwargs = tuple(args), dict(kwargs)
        for node in self.inputs:
            node.users[self] = None

    @property
    def inputs(self) -> "list[Node]":
        """The nodes that this one reads, each once."""
        return nodes_in((self._args, self._kwargs))

    # --- edits ---

    def replace_input_with(self, old: "Node", new: Any) -> None:
        """Replace `old` by `new` in the arguments of this node."""
        args, kwargs = map_nodes(
            (self._args, self._kwargs), lambda node: new if node is old else node
        )
        self._read(args, kwargs)

    def replace_all_uses_with(
        self, new: Any, *, keep: Callable[["Node"], bool] = lambda _: False
    ) -> "list[Node]":
        """Let the users of this node read `new` instead: a node, or a constant.

        Args:
            keep: Whether a user goes on reading this node.

        Returns:
            The users that were changed.
        """
        changed = [user for user in self.users if user is not new and not keep(user)]
        for user in changed:
            user.replace_input_with(self, new)
        return changed

    def insert_arg(self, index: int, arg: Any) -> None:
        """Insert `arg` before the positional argument at `index`.

        Raises:
            GraphError: there are fewer arguments.
        """
        self._check_position(index, len(self._args) + 1)
        self.args = (*self._args[:index], arg, *self._args[index:])

    def update_arg(self, index: int, arg: Any) -> None:
        """Replace the positional argument at `index` by `arg`.

        Raises:
            GraphError: there is no such argument.
        """
        self._check_position(index, len(self._args))
        self.args = (*self._args[:index], arg, *self._args[index + 1 :])

    def update_kwarg(self, name: str, arg: Any) -> None:
        """Set the keyword argument `name` to `arg`."""
        self.kwargs = {**self._kwargs, name: arg}

    def _check_position(self, index: int, count: int) -> None:
        if not isinstance(index, int) or not 0 <= index < count:
            raise GraphError(
                f"graph `{self.graph.name}`: node `{self.name}` has "
                f"{len(self._args)} positional arguments, and none at {index!r}."
            )

    def normalized_arguments(
        self, root: Any = None, *, normalize_to_only_use_kwargs: bool = False
    ) -> "Arguments | None":
        """Return the arguments bound to the signature of the target, with its defaults.

        Args:
            root: The module or graph whose `attributes` have the modules; by default
                this graph.
            normalize_to_only_use_kwargs: Whether to pass all arguments by name.

        Returns:
            The arguments; None if the node calls no function or module, or there is no
            signature.

        Raises:
            GraphError: the target does not take these arguments.
        """
        if self.kind == "call_function":
            function = self.target
        elif self.kind == "call_module":
            module = (self.graph if root is None else root).attributes[self.target]
            function = getattr(module, "forward", module)
        else:
            return None
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):  # of a function written in C
            return None
        try:
            bound = signature.bind(*self._args, **self._kwargs)
        except TypeError as error:
            raise GraphError(
                f"graph `{self.graph.name}`: node `{self.name}`: {error}."
            ) from None
        bound.apply_defaults()
        kinds = [p.kind for p in signature.parameters.values()]
        by_name = not {inspect.Parameter.POSITIONAL_ONLY, _VARARGS} & set(kinds)
        if not (normalize_to_only_use_kwargs and by_name):
            return Arguments(bound.args, bound.kwargs)
        names = signature.parameters
        pairs = zip(
            (n for n in names if n not in bound.kwargs), bound.args, strict=False
        )
        return Arguments((), {**dict(pairs), **bound.kwargs})

    # --- position ---

    @property
    def next(self) -> "Node | None":
        """The node after this one, or None."""
        following = self.graph.nodes[self.graph.index(self) + 1 :]
        return following[0] if following else None

    @property
    def prev(self) -> "Node | None":
        """The node before this one, or None."""
        index = self.graph.index(self)
        return self.graph.nodes[index - 1] if index else None

    @property
    def stack_trace(self) -> str | None:
        """The user's line of the node after its callers within the traced function,
        in the format of a traceback."""
        return None if self.line is None else "".join(map(_entry, self.line.stack))

    def format_node(self) -> str:
        """Return the node as one line.

        A call is `%y : [num_users=1] = call_function[target=sin](args = (%x,), ...)`,
        an output `return %y`.
        """
        if self.kind == "output":
            return f"return {_shown(self._args[0])}"
        head = f"%{self.name} : [num_users={len(self.users)}] = {self.kind}"
        head += f"[target={self.target_name}]"
        if self.kind == "get_attr":
            return head
        if self.kind == "placeholder":
            return head + (f"(default={self._args[0]!r})" if self._args else "")
        kwargs = ", ".join(f"{k}: {_shown(v)}" for k, v in self._kwargs.items())
        return f"{head}(args = {_shown(self._args)}, kwargs = {{{kwargs}}})"

    def prepend(self, node: "Node") -> None:
        """Move `node`, of the same graph, right before this one."""
        self.graph.move(node, self.graph.index(self))

    def append(self, node: "Node") -> None:
        """Move `node`, of the same graph, right after this one."""
        self.graph.move(node, self.graph.index(self) + 1)

    # --- effects ---

    def is_impure(self) -> bool:
        """Whether the node may have effects besides computing its value.

        A call of a user's function may, and so may an operator whose body is one.
        """
        match self.kind:
            case "placeholder" | "output":
                return True
            case "call_module":
                return not getattr(self.graph.attributes[self.target], "is_leaf", False)
            case "call_function":
                return not _is_pure(self.target) or _holds_function(self)
        return False


class NodeList:
    """Nodes in order of execution, and edits that keep the order valid.

    New nodes are added at the end, or where `inserting_before` or `inserting_after`
    says.

    name         of the function that the graph represents
    attributes   the tensors and modules that nodes refer to, by path
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.attributes: dict[str, Any] = {}
        self._nodes: list[Node] = []
        self._names: set[str] = set()
        self._insert_before: Node | None = None  # None: at the end
        self._transform_code: CodeTransform | None = None

    @property
    def nodes(self) -> tuple[Node, ...]:
        """A snapshot of the nodes, which may be edited while iterating over it."""
        return tuple(self._nodes)

    @property
    def placeholders(self) -> list[Node]:
        return [node for node in self._nodes if node.kind == "placeholder"]

    def output_node(self) -> Node:
        """Return the output node.

        Raises:
            GraphError: there is none yet.
        """
        if self._nodes and self._nodes[-1].kind == "output":
            return self._nodes[-1]
        raise GraphError(
            f"graph `{self.name}` returns nothing: end it with `graph.output(node)`."
        )

    def index(self, node: Node) -> int:
        """Return the position of a node.

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

    def move(self, node: Node, position: int) -> None:
        """Move `node` before the node that is at `position` now."""
        index = self.index(node)
        self._nodes.insert(position, node)
        del self._nodes[index if index < position else index + 1]

    @property
    def transform_code(self) -> CodeTransform | None:
        """The function that rewrites the source; see `on_generate_code`."""
        return self._transform_code

    def find_nodes(self, kind: Kind, target: Any = None) -> list[Node]:
        """Return the nodes of a kind, and of a target if one is given."""
        return [
            node
            for node in self._nodes
            if node.kind == kind and (target is None or node.target == target)
        ]

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
        """Add a new node at the point of insertion, and return it.

        Raises:
            ArgumentTypeError: the arguments are no tuple and mapping, or `name` is no
                string.
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
        position = (
            len(self._nodes)
            if self._insert_before is None
            else self.index(self._insert_before)
        )
        self._nodes.insert(position, node)
        return node

    def placeholder(self, name: str, type_: Any = None, *default: Any) -> Node:
        """Add a new parameter, with its default if one is given."""
        return self.create_node("placeholder", name, default, type_=type_)

    def get_attr(self, path: str, value: Any = None) -> Node:
        """Add a read of the attribute at `path`; set it first if `value` is given."""
        if value is not None:
            self.attributes[path] = value
        return self.create_node("get_attr", path)

    def call_function(
        self, f: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Node:
        """Add a call `f(*args, **kwargs)`."""
        return self.create_node("call_function", f, args, kwargs)

    def call_method(self, method: str, /, *args: Any, **kwargs: Any) -> Node:
        """Add a call of a method of `args[0]`."""
        return self.create_node("call_method", method, args, kwargs)

    def call_module(self, path: str, /, *args: Any, **kwargs: Any) -> Node:
        """Add a call of the module that is the attribute at `path`."""
        return self.create_node("call_module", path, args, kwargs)

    def output(self, value: Any, type_: Any = None) -> Node:
        """Add the output: Python data with nodes in it."""
        return self.create_node("output", "output", (value,), type_=type_)

    def node_copy(
        self, node: Node, f: Callable[[Node], Any] = lambda node: node
    ) -> Node:
        """Add a copy of a node of any graph, with `f` applied to its inputs."""
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
        """Let `node` refer to `value`, at another path if its path is taken."""
        path, number = node.target, 1
        while self.attributes.get(path, value) is not value:
            path, number = f"{node.target}_{number}", number + 1
        node.target = path
        self.attributes[path] = value

    def graph_copy(self, other: "NodeList", known: dict[Node, Any]) -> Any:
        """Copy the nodes of another graph to this one, and return the copy's result.

        Args:
            known: Replacements for nodes of `other`; the copies are added to it.

        Raises:
            ArgumentTypeError: `other` is no graph, or `known` no dict.
        """
        if not isinstance(other, NodeList) or not isinstance(known, MutableMapping):
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
        # A node must not hide a builtin that the source may use.
        candidate, number = f"{base}_1" if base in _RESERVED else base, 1
        while candidate in self._names:
            candidate, number = f"{base}_{number}", number + 1
        self._names.add(candidate)
        return candidate

    # --- the point of insertion ---

    def inserting_before(self, node: Node) -> AbstractContextManager[None]:
        """Within the block, new nodes are inserted right before `node`, in order.

        Raises:
            GraphError: `node` is not in the graph.
        """
        self.index(node)
        return self._inserting(node)

    def inserting_after(self, node: Node) -> AbstractContextManager[None]:
        """Within the block, new nodes are inserted right after `node`, in order.

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
        previous, self._insert_before = self._insert_before, node
        try:
            yield
        finally:
            self._insert_before = previous

    # --- edits ---

    def erase_node(self, node: Node) -> None:
        """Remove a node that no node reads.

        Raises:
            GraphError: a node reads it, or it is not in the graph.
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
        """Remove the nodes that no node reads, and the attributes that no node refers
        to.

        Args:
            is_impure: Whether a node stays in any case.

        Returns:
            The number of nodes that were removed.
        """
        count = len(self._nodes)
        for node in reversed(self.nodes):
            if not node.users and not is_impure(node):
                self.erase_node(node)
        referenced = {
            n.target for n in self._nodes if n.kind in ("get_attr", "call_module")
        }
        for path in [path for path in self.attributes if path not in referenced]:
            del self.attributes[path]
        return count - len(self._nodes)


entries(
    Node,
    *("replace_input_with", "replace_all_uses_with", "insert_arg", "update_arg"),
    *("update_kwarg", "normalized_arguments", "next", "prev", "prepend", "append"),
    "is_impure",
)
entries(
    NodeList,
    *("output_node", "index", "create_node", "placeholder", "get_attr"),
    *("call_function", "call_method", "call_module", "output", "node_copy"),
    *("graph_copy", "inserting_before", "inserting_after", "move", "erase_node"),
    "eliminate_dead_code",
)


class Arguments(NamedTuple):
    """The arguments of a call."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def _entry(line: SourceLine) -> str:
    """Return a line as an entry of a traceback."""
    where = f", in {line.function}" if line.function else ""
    text = source_text(line)
    code = f"    {text}\n" if text else ""
    return f'  File "{line.file}", line {line.line}{where}\n{code}'


_VARARGS: Final = inspect.Parameter.VAR_POSITIONAL


def _shown(value: Any) -> str:
    """Return an argument as `format_node` shows it: nodes as `%name`."""
    if isinstance(value, Node):
        return f"%{value.name}"
    if type(value) in (tuple, list):
        items = ", ".join(map(_shown, value))
        if type(value) is list:
            return f"[{items}]"
        return f"({items},)" if len(value) == 1 else f"({items})"
    if type(value) is dict:
        return f"{{{', '.join(f'{k!r}: {_shown(v)}' for k, v in value.items())}}}"
    if type(value) is slice:
        parts = ", ".join(map(_shown, (value.start, value.stop, value.step)))
        return f"slice({parts})"
    return name_of(value) if callable(value) else repr(value)


def _node_at(graph: "NodeList", index: int) -> Node:
    return graph.nodes[index]


def _is_pure(target: Any) -> bool:
    if isinstance(target, OpDef | Operation | CheckedArguments | Results):
        return not target.effects
    home = getattr(target, "__module__", "") or ""
    if home.split(".")[0] == "hopflow":
        return getattr(target, "__name__", "") not in _EFFECTS
    if target in _WRITES:
        return False
    return target is builtins.getattr or home in ("_operator", "operator", "math")


def _holds_function(node: Node) -> bool:
    functions: list[Any] = []

    def visit(value: Any) -> Any:
        if isinstance(value, Node):
            makes_function = getattr(value.target, "makes_function", False)
            is_body = value.kind == "get_attr"
            body = value.graph.attributes.get(value.target) if is_body else None
            is_function = makes_function or callable(body)
        else:
            is_function = callable(value) and not isinstance(value, type)
        if is_function:
            functions.append(value)
        return map_items(value, visit)

    visit((node.args, node.kwargs))
    return bool(functions)


def _suggestion(target: Any) -> str:
    """Return a name for the value of a new node."""
    if isinstance(target, str):
        return target
    return getattr(target, "__name__", type(target).__name__)
