"""Graphs of `fx` as Python packages, for people to read and edit."""

import importlib
import operator
import textwrap
from collections.abc import Mapping
from keyword import iskeyword
from pathlib import Path
from typing import Any

import numpy as np

from hopflow.bind import Value
from hopflow.errors import ArgumentValueError
from hopflow.fx.graph import Graph
from hopflow.fx.source import python_source
from hopflow.graph.printer import INDENT
from hopflow.ops.convert import as_value

__all__ = ["write_folder"]

_MODULE = """\
from __future__ import annotations

from pathlib import Path

{imports}

with np.load(Path(__file__).with_name("attributes.npz")) as _file:
    _DATA = dict(_file)


class {name}:
    def __init__(self):
        self.attributes = {{
{attributes}        }}

{forward}
    def __call__(self, *args, **kwargs):
        return self.{function}(*args, **kwargs)
"""


def write_folder(
    folder: Path, name: str, graph: Graph, attributes: Mapping[str, Any]
) -> None:
    """Write a graph as the class `name` of a package; see `GraphModule.to_folder`."""
    if not isinstance(name, str) or not name.isidentifier() or iskeyword(name):
        raise ArgumentValueError(
            f"to_folder: `module_name` must be a name for a class, and is {name!r}."
        )
    source = python_source(graph)
    scope = {"np": np, "hf": None, **source.scope}
    data = {path: _array(path, value) for path, value in attributes.items()}
    text = _MODULE.format(
        imports="\n".join(_import(name, value) for name, value in scope.items()),
        name=name,
        attributes="".join(
            f"{INDENT * 3}{path!r}: hf.asarray(_DATA[{path!r}]"
            f".view(hf.{as_value(attributes[path]).type.dtype.name}.dtype)),\n"
            for path in data
        ),
        forward=textwrap.indent(source.text, INDENT),
        function=graph.name,
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "module.py").write_text(text)
    with (folder / "attributes.npz").open("wb") as file:
        np.savez(file, **data)  # type: ignore[arg-type]
    (folder / "__init__.py").write_text(
        f'from .module import {name}\n\n__all__ = ["{name}"]\n'
    )


def _array(path: str, value: Any) -> np.ndarray[Any, Any]:
    """A tensor's elements, in a dtype that NumPy's files have.

    Raises:
        ArgumentValueError: it is no tensor.
    """
    if not isinstance(value, Value | np.ndarray):
        raise ArgumentValueError(
            f"to_folder: `{path}` is a `{type(value).__name__}`, and only tensors can "
            "be written. Trace into modules: let `Tracer.is_leaf_module` return False."
        )
    array = np.asarray(value)
    return array if array.dtype.isbuiltin == 1 else array.view(f"u{array.itemsize}")


def _import(name: str, value: Any) -> str:
    """The line that gives `value` its name in the source.

    Raises:
        ArgumentValueError: no module has it by name.
    """
    if name == "hf":
        return "import hopflow as hf"
    if value is np:
        return "import numpy as np"
    if value is operator:
        return "import operator"
    home = getattr(value, "__module__", "") or ""
    path = getattr(value, "__qualname__", "")
    try:
        found: Any = importlib.import_module(home)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError, ValueError):
        found = None
    if found is not value:
        raise ArgumentValueError(
            f"to_folder: the graph refers to {value!r}, which no module has by name. "
            "Define it at the top level of a module."
        )
    if "." not in path:
        return f"from {home} import {path} as {name}"
    return f"import {home}\n{name} = {home}.{path}"
