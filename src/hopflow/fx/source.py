"""Graphs of `fx` as Python source that runs, with a line for each node.

    def forward(self, x: Tensor, y=2.0):
        linear = self.attributes['layers.0'](x)  # model.py:7
        sin = hf.sin(linear)  # model.py:8
        add = sin + y  # model.py:8
        return add

`self` is the module that the graph belongs to.
"""

import builtins
import inspect
import operator
import sys
import textwrap
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import numpy as np

from hopflow.dtypes import DType
from hopflow.errors import ArgumentTypeError
from hopflow.fx.node import SCOPE, Node, NodeList
from hopflow.fx.operations import Operation
from hopflow.graph.printer import INDENT
from hopflow.trace.source import name_of

_BINARY: Final[Mapping[Callable[..., Any], str]] = {
    operator.add: "+",
    operator.sub: "-",
    operator.mul: "*",
    operator.truediv: "/",
    operator.floordiv: "//",
    operator.mod: "%",
    operator.pow: "**",
    operator.matmul: "@",
    operator.and_: "&",
    operator.or_: "|",
    operator.xor: "^",
    operator.lshift: "<<",
    operator.rshift: ">>",
    operator.lt: "<",
    operator.le: "<=",
    operator.gt: ">",
    operator.ge: ">=",
    operator.eq: "==",
    operator.ne: "!=",
}
_UNARY: Final[Mapping[Callable[..., Any], str]] = {
    operator.neg: "-",
    operator.pos: "+",
    operator.invert: "~",
}


class Source(NamedTuple):
    """The source of a graph.

    text    the definition of a function with the graph's name
    scope   the names that it refers to
    """

    text: str
    scope: dict[str, Any]


def python_source(graph: NodeList, scope: dict[str, Any] | None = None) -> Source:
    """Return the source of `graph`.

    Args:
        scope: The names of other sources in the same file; this source adds its own.
    """
    return _Writer(graph, {} if scope is None else scope).source()


class _Writer:
    """Write one graph. The names of nodes take precedence over those of objects."""

    def __init__(self, graph: NodeList, scope: dict[str, Any]) -> None:
        self.graph = graph
        self.scope = scope
        self.taken = {node.name for node in graph.nodes} | {graph.name, *SCOPE}
        self.root = sys.modules["hopflow"]

    def source(self) -> Source:
        lines: list[str] = []
        result = ""
        for node in self.graph.nodes:
            if node.kind == "placeholder":
                continue
            if node.kind == "output" and node.type is not None:
                result = f" -> {annotation(node.type)}"
            note = f"  # {node.line}" if node.line else ""
            lines.append(f"{self.statement(node)}{note}\n")
        parameters = ", ".join(["self", *self.parameters()])
        head = f"def {self.graph.name}({parameters}){result}:\n"
        if self.graph.transform_code is not None:
            lines = _checked(self.graph.transform_code(lines))
        body = textwrap.indent("".join(lines) or "pass\n", INDENT)
        return Source(head + body, self.scope)

    def parameters(self) -> list[str]:
        parameters: list[str] = []
        has_default = False
        for node in self.graph.placeholders:
            starred = node.target.startswith("*") or any(
                p[0] == "*" for p in parameters
            )
            if has_default and not node.args and not starred:
                parameters.append("*")  # required parameters after a default
            has_default = has_default or bool(node.args)
            parameters.append(self.parameter(node))
        return parameters

    def parameter(self, node: Node) -> str:
        stars: str = node.target[: len(node.target) - len(node.target.lstrip("*"))]
        text = stars + node.name
        if node.type is not None:
            text += f": {annotation(node.type)}"
        if node.args:
            equals = " = " if node.type is not None else "="
            text += f"{equals}{self.value(node.args[0])}"
        return text

    def statement(self, node: Node) -> str:
        if node.kind == "output":
            return f"return {self.value(node.args[0])}"
        if node.kind == "get_attr":
            return f"{node.name} = self.attributes[{node.target!r}]"
        if node.kind == "call_module":
            return f"{node.name} = self.attributes[{node.target!r}]({self.call(node)})"
        if node.kind == "call_method":
            owner = self.operand(node.args[0])
            return f"{node.name} = {owner}.{node.target}({self.call(node, 1)})"
        if node.target is operator.setitem:
            x, key, value = node.args
            return f"{self.operand(x)}[{self.key(key)}] = {self.value(value)}"
        return f"{node.name} = {self.function_call(node)}"

    def function_call(self, node: Node) -> str:
        f, args = node.target, node.args
        if not node.kwargs:
            if f in _BINARY and len(args) == 2:
                x, y = map(self.operand, args)
                return f"{x} {_BINARY[f]} {y}"
            if f in _UNARY and len(args) == 1:
                return f"{_UNARY[f]}{self.operand(args[0])}"
            if f is operator.getitem:
                return f"{self.operand(args[0])}[{self.key(args[1])}]"
            if f is getattr and len(args) == 2 and str(args[1]).isidentifier():
                return f"{self.operand(args[0])}.{args[1]}"
        return f"{self.named(f)}({self.call(node)})"

    def call(self, node: Node, skip: int = 0) -> str:
        args = [self.value(a) for a in node.args[skip:]]
        args += [f"{k}={self.value(v)}" for k, v in node.kwargs.items()]
        return ", ".join(args)

    # --- values ---

    def operand(self, value: Any) -> str:
        """Return a value as an operand; a negative number stands in parentheses."""
        text = self.value(value)
        return f"({text})" if text.startswith("-") else text

    def key(self, key: Any) -> str:
        """Return the text of an index."""
        if type(key) is tuple and key:
            items = ", ".join(map(self.key_item, key))
            return f"{items}," if len(key) == 1 else items
        return self.key_item(key)

    def key_item(self, item: Any) -> str:
        if type(item) is not slice:
            return self.value(item)
        start, stop, step = (
            "" if v is None else self.value(v)
            for v in (item.start, item.stop, item.step)
        )
        return f"{start}:{stop}:{step}" if step else f"{start}:{stop}"

    def value(self, value: Any) -> str:
        match value:
            case Node():
                return value.name
            case bool() | int() | str() | bytes() | None:
                return repr(value)
            case float() if value - value == 0.0:
                return repr(value)
            case float():
                return f"float('{value}')"
        return self.container(value) or self.named(value)

    def container(self, value: Any) -> str:
        kind = type(value)
        if kind is list:
            return f"[{', '.join(map(self.value, value))}]"
        if kind is tuple:
            items = ", ".join(map(self.value, value))
            return f"({items},)" if len(value) == 1 else f"({items})"
        if kind is dict:
            items = ", ".join(f"{k!r}: {self.value(v)}" for k, v in value.items())
            return f"{{{items}}}"
        if kind is slice:
            parts = map(self.value, (value.start, value.stop, value.step))
            return f"slice({', '.join(parts)})"
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return f"{self.named(kind)}({', '.join(map(self.value, value))})"
        return ""

    def named(self, value: Any) -> str:
        """Return a name for an object, and add it to the scope."""
        if value is Ellipsis:
            return "..."
        if isinstance(value, Operation):
            return self.operation(value)
        public_name = value.name if isinstance(value, DType) else name_of(value)
        if path := self.of_hopflow(value, public_name):
            self.scope["hf"] = self.root
            return f"hf.{path}"
        if path := _of_numpy(value, public_name):
            self.scope["np"] = np
            return f"np.{path}"
        if vars(builtins).get(public_name) is value:
            return public_name
        if vars(operator).get(public_name) is value:
            self.scope["operator"] = operator
            return f"operator.{public_name}"
        base = public_name if public_name.isidentifier() else "f"
        name, number = base, 1
        while name in self.taken or self.scope.get(name, value) is not value:
            name, number = f"{base}_{number}", number + 1
        self.scope[name] = value
        return name

    def operation(self, value: Operation) -> str:
        """Return the path of an operation of captured graphs: "op.sin"."""
        space = self.scope.setdefault("op", SimpleNamespace())
        name, number = value.name, 1
        while getattr(space, name, value) is not value:
            name, number = f"{value.name}_{number}", number + 1
        setattr(space, name, value)
        return f"op.{name}"

    def of_hopflow(self, value: Any, name: str) -> str:
        """Return the path of a public object of hopflow: "linalg.inv"; or ""."""
        for space in ("", "linalg.", "random."):
            owner = getattr(self.root, space.rstrip("."), self.root)
            for public in (name, name.rstrip("_")):  # `map_` in its own module
                if vars(owner).get(public) is value:
                    return space + public
        return ""


def _of_numpy(value: Any, name: str) -> str:
    """Return the path of a function of NumPy: "linalg.norm", "add.reduce"; or ""."""
    owner = getattr(value, "__self__", None)
    if isinstance(owner, np.ufunc):
        return f"{owner.__name__}.{name}" if _of_numpy(owner, owner.__name__) else ""
    for space, home in (("", np), ("linalg.", np.linalg), ("fft.", np.fft)):
        if callable(value) and vars(home).get(name) is value:
            return space + name
    return ""


def _checked(lines: Any) -> list[str]:
    """Return the lines that a function of `on_generate_code` returns.

    Raises:
        ArgumentTypeError: they are no list of strings.
    """
    if isinstance(lines, list | tuple) and all(isinstance(x, str) for x in lines):
        return list(lines)
    raise ArgumentTypeError(
        "on_generate_code: the function of lines must return a list of strings, and "
        f"returns `{type(lines).__name__}`."
    )


def annotation(type_: Any) -> str:
    """Return the text of an annotation, as its author may have written it."""
    return type_ if isinstance(type_, str) else inspect.formatannotation(type_)
