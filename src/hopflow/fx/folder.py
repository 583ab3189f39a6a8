"""Graphs of `fx` as Python packages that people can read and edit."""

import importlib
import operator
import re
import textwrap
from collections.abc import Callable
from keyword import iskeyword
from pathlib import Path
from typing import Any, Final

import numpy as np

from hopflow.bind import Value
from hopflow.errors import ArgumentValueError
from hopflow.fx.bodies import Maker
from hopflow.fx.graph import Graph
from hopflow.fx.operations import Arguments, Operation, Results
from hopflow.fx.source import python_source
from hopflow.graph.printer import INDENT
from hopflow.ops.convert import as_value

_FILE = """\
from __future__ import annotations

from pathlib import Path

{imports}

with np.load(Path(__file__).with_name("attributes.npz")) as _file:
    _DATA = dict(_file)
{classes}"""

_CLASS = """

class {name}:
    def __init__(self):
        self.attributes = {{
{attributes}        }}

{forward}
    __call__ = {function}
"""


class _Slots:
    """Functions that a module in a layer below sets.

    opened   `open_bodies`: module -> copy in which the bodies of operators are modules
    """

    opened: Callable[[Any], Any]


slots: Final = _Slots()


def write_folder(folder: Path, name: str, module: Any) -> None:
    """Write a module as the class `name` of a package; see `GraphModule.to_folder`."""
    if not isinstance(name, str) or not name.isidentifier() or iskeyword(name):
        raise ArgumentValueError(
            f"to_folder: `module_name` must be a name for a class, and is {name!r}."
        )
    writer = _Writer()
    writer.write(slots.opened(module), name, "")
    imports = [
        _import(name, value)
        for name, value in writer.scope.items()
        if name not in writer.names
    ]
    text = _FILE.format(imports="\n".join(imports), classes="".join(writer.classes))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "module.py").write_text(text)
    with (folder / "attributes.npz").open("wb") as file:
        np.savez(file, **writer.data)  # type: ignore[arg-type]
    (folder / "__init__.py").write_text(
        f'from .module import {name}\n\n__all__ = ["{name}"]\n'
    )


class _Writer:
    """Write modules as classes of one file; bodies come before the modules that use
    them.

    scope     the names that the sources refer to
    names     those that are the names of classes
    classes   the text of each class
    data      key in the file of attributes -> the elements of a tensor
    """

    def __init__(self) -> None:
        self.scope: dict[str, Any] = {"np": np, "hf": None}
        self.names: set[str] = set()
        self.classes: list[str] = []
        self.data: dict[str, np.ndarray[Any, Any]] = {}

    def write(self, module: Any, name: str, prefix: str) -> None:
        """Write a module as the class `name`; the keys of its data begin with `prefix`.

        Raises:
            ArgumentValueError: it was made of a captured module.
        """
        self.scope[name] = module  # reserves the name
        self.names.add(name)
        if any(isinstance(node.target, _CAPTURED) for node in module.graph.nodes):
            raise ArgumentValueError(
                "to_folder: the graph calls operations of a captured module, which no "
                "module has by name. Write `hf.symbolic_trace` of the function itself, "
                "or keep the text of the captured graph."
            )
        values = {
            path: self.value(path, value, f"{name}_{path}", prefix)
            for path, value in module.attributes.items()
        }
        source = python_source(module.graph, self.scope)
        rows = [f"{INDENT * 3}{path!r}: {text},\n" for path, text in values.items()]
        forward = textwrap.indent(source.text, INDENT)
        self.classes.append(
            _CLASS.format(
                name=name,
                attributes="".join(rows),
                forward=forward,
                function=module.graph.name,
            )
        )

    def value(self, path: str, value: Any, name: str, prefix: str) -> str:
        """Return the expression for an attribute; `name` is for the class of a body."""
        key = prefix + path
        if isinstance(getattr(value, "graph", None), Graph):
            name = re.sub(r"\W", "_", name)
            while name in self.scope:
                name += "_"
            self.write(value, name, f"{key}/")
            return f"{name}()"
        self.data[key] = _array(path, value)
        dtype = as_value(value).type.dtype.name
        return f"hf.asarray(_DATA[{key!r}].view(hf.{dtype}.dtype))"


_CAPTURED: Final = (Arguments, Operation, Results)


def _array(path: str, value: Any) -> np.ndarray[Any, Any]:
    """Return a tensor's elements, in a dtype that NumPy can save.

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
    """Return the statement that binds `value` to `name`.

    Raises:
        ArgumentValueError: it cannot be imported by name.
    """
    if name == "hf":
        return "import hopflow as hf"
    if value is np:
        return "import numpy as np"
    if value is operator:
        return "import operator"
    module = getattr(value, "__module__", "") or ""
    path = getattr(value, "__qualname__", "")
    try:
        imported: Any = importlib.import_module(module)
        for part in path.split("."):
            imported = getattr(imported, part)
    except (ImportError, AttributeError, ValueError):
        imported = None
    if imported is not value and isinstance(value, Maker):
        name = value.__name__.removeprefix("make_")
        raise ArgumentValueError(
            f"to_folder: `{name}` reads values of the graph, and cannot be traced by "
            "itself: it asks proxies for values, or is no function. Give what it reads "
            "to the operator as operands, and define it at the top level of a module."
        )
    if imported is not value:
        raise ArgumentValueError(
            f"to_folder: the graph refers to {value!r}, which no module has by name. "
            "Define it at the top level of a module."
        )
    if "." not in path:
        return f"from {module} import {path} as {name}"
    return f"import {module}\n{name} = {module}.{path}"
