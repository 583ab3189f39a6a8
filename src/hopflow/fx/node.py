"""`Node`: one call of a function that was traced before any type is known; and the list
of nodes that a graph is."""

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
"""The lines of a function's body -> the lines that it shall have."""
Kind: TypeAlias = Literal[
    "placeholder",
    "get_attr",
    "call_function",
    "call_method",
    "call_module",
    "output",
]
KINDS: Final = get_args(Kind)
SCOPE: Final = ("self", "hf", "np", "op", "operator")  # names that every source may use
_RESERVED: Final = frozenset([*dir(builtins), *SCOPE])

# Operators of Python's that write to their first argument.
IN_PLACE: Final[Mapping[str, Callable[..., Any]]] = {
    name: getattr(operator, name)
    for name in (
        "iadd isub imul itruediv ifloordiv imod ipow imatmul iand ior ixor ilshift "
        "irshift"
    ).split()
}
_WRITES: Final = frozenset([operator.setitem, *IN_PLACE.values()])
# Functions of hopflow's that are called for what they do.
_EFFECTS: Final = ("callback", "check", "check_is_size", "interrupt", "print_")


def map_nodes(value: Any, f: Callable[["Node"], Any]) -> Any:
    """`value` with `f` applied to each node in it, in containers and slices too."""
    if isinstance(value, Node):
        return f(value)
    return map_items(value, lambda item: map_nodes(item, f))


def map_items(value: Any, f: Callable[[Any], Any]) -> Any:
    """A container that may stand in arguments with `f` applied to each item."""
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
    """The nodes in an argument, each once, in order."""
    found: dict[Node, None] = {}
    map_nodes(value, lambda node: found.setdefault(node))
    return list(found)


class Node:
    """One line of a graph, and its value.

    kind         placeholder | get_attr | call_function | call_method | call_module |
                 output
    target       what is called: a function, the name of a method, the path of a module;
                 of a placeholder the parameter (`x`, `*args`), of an attribute its path
    args, kwargs   Python data with nodes in it; of a placeholder (its default,) or ();
                 of an output (what is returned,)
    name         unique in the graph; a variable of its source
    type         the user's annotation, or None
    users        the nodes that read this one
    line         where in the user's code it came from; its `stack` has the callers
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

    def __reduce__(self) -> Any:  # a copy is of the graph's copy
        return _node_at, (self.graph, self.graph.index(self))

    @property
    def target_name(self) -> str:
        """The name of what is called or referred to."""
        return self.target if isinstance(self.target, str) else name_of(self.target)

    # --- what it reads ---

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
        """
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
        """Read `new` wherever this node reads `old`."""
        args, kwargs = map_nodes(
            (self._args, self._kwargs), lambda node: new if node is old else node
        )
        self._read(args, kwargs)

    def replace_all_uses_with(
        self, new: Any, *, keep: Callable[["Node"], bool] = lambda _: False
    ) -> "list[Node]":
        """Let the users of this node read `new` instead: a node, or a constant.

        Args:
            keep: Which users go on reading this node.

        Returns:
            The users that were changed.
        """
        changed = [user for user in self.users if user is not new and not keep(user)]
        for user in changed:
            user.replace_input_with(self, new)
        return changed

    def insert_arg(self, index: int, arg: Any) -> None:
        """Put `arg` before the positional argument at `index`.

        Raises:
            GraphError: there are fewer arguments.
        """
        self._check_position(index, len(self._args) + 1)
        self.args = (*self._args[:index], arg, *self._args[index:])

    def update_arg(self, index: int, arg: Any) -> None:
        """Let `arg` be the positional argument at `index`.

        Raises:
            GraphError: there is no such argument.
        """
        self._check_position(index, len(self._args))
        self.args = (*self._args[:index], arg, *self._args[index + 1 :])

    def update_kwarg(self, name: str, arg: Any) -> None:
        """Let `arg` be the argument called `name`."""
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
        """The arguments as the signature of what is called has them, with its defaults.

        Args:
            root: Whose `attributes` have the modules; by default the graph.
            normalize_to_only_use_kwargs: Whether all are given by name.

        Returns:
            None of what is no call of a function or module, or has no signature.

        Raises:
            GraphError: what is called does not take these arguments.
        """
        if self.kind == "call_function":
            called = self.target
        elif self.kind == "call_module":
            module = (self.graph if root is None else root).attributes[self.target]
            called = getattr(module, "forward", module)
        else:
            return None
        try:
            signature = inspect.signature(called)
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
        by_name = not {inspect.Parameter.POSITIONAL_ONLY, _SEVERAL} & set(kinds)
        if not (normalize_to_only_use_kwargs and by_name):
            return Arguments(bound.args, bound.kwargs)
        names = signature.parameters
        pairs = zip(
            (n for n in names if n not in bound.kwargs), bound.args, strict=False
        )
        return Arguments((), {**dict(pairs), **bound.kwargs})

    # --- where it is ---

    @property
    def next(self) -> "Node | None":
        """The node behind this one, if there is one."""
        following = self.graph.nodes[self.graph.index(self) + 1 :]
        return following[0] if following else None

    @property
    def prev(self) -> "Node | None":
        """The node before this one, if there is one."""
        at = self.graph.index(self)
        return self.graph.nodes[at - 1] if at else None

    @property
    def stack_trace(self) -> str | None:
        """The user's line that the node is of and its callers within the traced
        function, the outermost first, as a traceback shows them."""
        return None if self.line is None else "".join(map(_entry, self.line.stack))

    def format_node(self) -> str:
        """The node as one line: `%y : [num_users=1] = call_function[target=sin](...)`.

        An output is shown as what it returns.
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
        """Move `node` of the same graph to right before this one."""
        self.graph.move(node, self.graph.index(self))

    def append(self, node: "Node") -> None:
        """Move `node` of the same graph to right after this one."""
        self.graph.move(node, self.graph.index(self) + 1)

    # --- what it does besides ---

    def is_impure(self) -> bool:
        """Whether the node may do more than to compute its value.

        What a user's function does nobody knows, nor what an operator does whose body
        is one.
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
    """Nodes in order of execution, and the edits that keep them whole.

    New nodes stand at the end, or where `inserting_before` or `inserting_after` says.

    name         of the function that the graph is
    attributes   the tensors and modules that nodes refer to, by their path
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.attributes: dict[str, Any] = {}
        self._nodes: list[Node] = []
        self._names: set[str] = set()
        self._before: Node | None = None  # where new nodes go; None: at the end
        self._transform_code: CodeTransform | None = None

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

    def move(self, node: Node, position: int) -> None:
        """Let `node` stand before what is at `position` now."""
        at = self.index(node)
        self._nodes.insert(position, node)
        del self._nodes[at if at < position else at + 1]

    @property
    def transform_code(self) -> CodeTransform | None:
        """What rewrites the lines of the source; see `on_generate_code`."""
        return self._transform_code

    def find_nodes(self, kind: Kind, target: Any = None) -> list[Node]:
        """The nodes of a kind, and of a target if one is given."""
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

    def graph_copy(self, other: "NodeList", known: dict[Node, Any]) -> Any:
        """Copy the nodes of another graph to here, and return what it returns.

        Args:
            known: What stands for nodes of `other`; the copies join it.

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
    """A line as an entry of a traceback."""
    where = f", in {line.function}" if line.function else ""
    text = source_text(line)
    code = f"    {text}\n" if text else ""
    return f'  File "{line.file}", line {line.line}{where}\n{code}'


_SEVERAL: Final = inspect.Parameter.VAR_POSITIONAL


def _shown(value: Any) -> str:
    """An argument as `format_node` shows it: nodes as `%name`."""
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
    found: list[Any] = []

    def visit(value: Any) -> Any:
        if isinstance(value, Node):
            made = getattr(value.target, "makes_function", False)
            is_body = value.kind == "get_attr"
            body = value.graph.attributes.get(value.target) if is_body else None
            holds = made or callable(body)
        else:
            holds = callable(value) and not isinstance(value, type)
        if holds:
            found.append(value)
        return map_items(value, visit)

    visit((node.args, node.kwargs))
    return bool(found)


def _suggestion(target: Any) -> str:
    """A name for the value of a new node."""
    if isinstance(target, str):
        return target
    return getattr(target, "__name__", type(target).__name__)
