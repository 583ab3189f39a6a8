"""`GraphModule`: a graph of `fx` that runs, as the Python source that it prints as."""

import inspect
from collections.abc import Iterable
from keyword import iskeyword
from os import PathLike
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np

from hopflow import pytree
from hopflow.bind import Value
from hopflow.entries import entry, speaks_for_user
from hopflow.errors import ArgumentTypeError, GraphError
from hopflow.fx.folder import write_folder
from hopflow.fx.graph import Graph
from hopflow.fx.node import Node
from hopflow.fx.runner import Runner
from hopflow.fx.source import python_source
from hopflow.fx.wrapping import with_recorded
from hopflow.graph.module import GraphModule as Captured
from hopflow.graph.running import execute
from hopflow.trace.capture import trace


class _Program:
    """A graph as it was when it was compiled.

    signature   its parameters have the names that the user gave them
    renamed     the user's name of a parameter -> that in the source, where they differ
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        source = python_source(graph)
        self.code = source.text
        try:
            self.function = execute(
                source.text, graph.name, with_recorded(source.scope)
            )
        except SyntaxError as error:
            raise GraphError(
                f"the source of graph `{graph.name}` is no Python: {error.msg} in line "
                f"{error.lineno}. See what `on_generate_code` was given."
            ) from None
        self.function.__annotations__ = _annotations(graph)
        signature = inspect.signature(self.function)
        _, *parameters = signature.parameters.values()
        names = _parameter_names(graph)
        self.signature = signature.replace(
            parameters=[p.replace(name=names[p.name]) for p in parameters]
        )
        self.renamed = {names[n]: n for n in names if names[n] != n}


class GraphModule:
    """A graph as a function. After edits of `graph`, `recompile` makes them count.

    It is a pytree of its attributes, so that `hf.grad` and `hf.jit` take it as an
    argument; and it can be traced again.

    graph        what it does
    attributes   the tensors and modules that the graph refers to, by path
    code         the source that runs
    program      what was compiled
    """

    @entry
    def __init__(self, graph: Graph) -> None:
        """
        Raises:
            ArgumentTypeError: `graph` is no graph of `fx`.
            GraphError: it breaks a rule of graphs; see `Graph.lint`.
        """
        if not isinstance(graph, Graph):
            raise ArgumentTypeError(
                f"GraphModule: expected a `hf.fx.Graph`, and found "
                f"`{type(graph).__name__}`. Make one with `hf.symbolic_trace`."
            )
        self.graph = graph
        self.attributes: dict[str, Any] = graph.attributes
        self.recompile()

    @entry
    def recompile(self) -> "GraphModule":
        """Let calls do what the graph says now.

        Raises:
            ArgumentTypeError: what `on_generate_code` was given returns no lines.
            GraphError: the graph breaks a rule; see `Graph.lint`. Or its source is no
                Python.
        """
        self.graph.lint()
        vars(self).pop("_ties", None)  # the attributes may be others
        self.use(_Program(self.graph))
        return self

    # --- submodules ---

    @entry
    def add_submodule(self, target: str, module: Any) -> bool:
        """Let nodes call `module` by the path `target`; what was there is replaced.

        Returns:
            False if `target` leads through an attribute that is no module.

        Raises:
            ArgumentTypeError: `module` cannot be called, or `target` is no string.
        """
        if not isinstance(target, str) or not callable(module):
            raise ArgumentTypeError(
                "add_submodule: expected a path and a module, and found "
                f"`{type(target).__name__}` and `{type(module).__name__}`."
            )
        parts = target.split(".")
        above = (".".join(parts[:i]) for i in range(1, len(parts)))
        if any(not callable(self.attributes.get(path, callable)) for path in above):
            return False
        for attributes in self._held():
            attributes[target] = module
        return True

    def delete_submodule(self, target: str) -> bool:
        """Take out the module at the path `target`, and what lies within.

        Nodes that refer to it must go too, before `recompile`.

        Returns:
            False if there is no module.
        """
        if not callable(self.attributes.get(target)):
            return False
        for attributes in self._held():
            for path in list(attributes):
                if path == target or path.startswith(f"{target}."):
                    del attributes[path]
        return True

    def delete_all_unused_submodules(self) -> None:
        """Take out the modules that no node refers to, nor to what lies within."""
        named = {n.target for n in self.graph.nodes if n.kind in _REFERENCES}
        for path, value in list(self.attributes.items()):
            used = any(n == path or n.startswith(f"{path}.") for n in named)
            inside = any(path.startswith(f"{n}.") for n in named)
            if callable(value) and not used and not inside:
                self.delete_submodule(path)

    def _held(self) -> list[dict[str, Any]]:
        """The attributes, of the module and of its graph: one dict, or two."""
        vars(self).pop("_ties", None)
        own, shared = self.attributes, self.graph.attributes
        return [own] if own is shared else [own, shared]

    def use(self, program: _Program) -> None:
        """Let calls run `program`."""
        self.program = program
        self.graph, self.code = program.graph, program.code
        self.__name__ = program.graph.name
        self.__signature__ = program.signature

    @entry
    @speaks_for_user  # who passes other arguments than the graph has
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the graph returns for these arguments."""
        if kwargs and (renamed := self.program.renamed):
            kwargs = {renamed.get(name, name): value for name, value in kwargs.items()}
        return self.program.function(self, *args, **kwargs)

    def __reduce__(self) -> Any:  # what was compiled is compiled anew
        return _restored, (type(self), self.graph, self.attributes)

    @entry
    def propagate(self, *args: Any) -> Captured:
        """The captured graph of this one for arguments of these types.

        Its nodes keep the user's lines and the paths of the modules.

        Args:
            args: Tensors, types (`hf.spec("f32[3]")`) in their place, constants.

        Raises:
            HopflowError: an operation does not fit its types; a note names the node.
        """

        def run(*args: Any) -> Any:
            return Runner(self).run(*args)

        run.__name__ = self.__name__
        run.__wrapped__ = self  # type: ignore[attr-defined]  # which has the attributes
        run.__signature__ = self.__signature__  # type: ignore[attr-defined]
        return trace(run, *args, mode="fake", captures=True)

    @entry
    def to_folder(self, folder: str | Path, module_name: str = "FxModule") -> None:
        """Write the module as a Python package that can be edited by hand.

        Functions that operators run are written as classes too, as `open_bodies` has
        them.

            module.to_folder("layer")
            from layer import FxModule  # FxModule()(x) is module(x)

        Args:
            folder: Is made if it is not there. Gets the source (`module.py`), the
                tensors (`attributes.npz`) and an `__init__.py`.
            module_name: Of the class in `module.py`.

        Raises:
            ArgumentTypeError: `folder` is no path.
            ArgumentValueError: no class can have this name; the graph refers to a
                function that no module has by name and that cannot be traced by itself;
                or an attribute is neither a tensor nor a body.
        """
        if not isinstance(folder, str | PathLike):
            raise ArgumentTypeError(
                f"to_folder: `folder` must be a path, and is `{type(folder).__name__}`."
            )
        write_folder(Path(folder), module_name, self)

    def print_readable(self, print_output: bool = True) -> str:
        """The source, printed if `print_output`."""
        if print_output:
            print(self.code)
        return self.code

    def __str__(self) -> str:
        return self.code

    def __repr__(self) -> str:
        return f"<fx.GraphModule {self.graph.name}: {len(self.graph.nodes)} nodes>"


def owning(module: GraphModule) -> GraphModule:
    """The module, or a copy of it whose graph has its attributes.

    A module that a tree was put together to (by an optimiser) has attributes of its own
    and shares its graph with the one that was taken apart.
    """
    if module.attributes is module.graph.attributes:
        return module
    graph = Graph(module.graph.name)
    known: dict[Node, Any] = {}
    for node in module.graph.nodes:
        known[node] = graph.node_copy(node, known.__getitem__)
    graph.attributes = dict(module.attributes)
    return GraphModule(graph)


def require_module(tool: str, value: object) -> None:
    """Raises: ArgumentTypeError: what `tool` was given is no module of `fx`."""
    if not isinstance(value, GraphModule):
        kind = type(value).__name__
        found = f"a captured `{kind}`" if isinstance(value, Captured) else f"`{kind}`"
        raise ArgumentTypeError(
            f"{tool}: expected a `hf.fx.GraphModule`, and found {found}. Make one with "
            "`hf.symbolic_trace`."
        )


_REFERENCES: Final = ("get_attr", "call_module")


def _restored(
    kind: type[GraphModule], graph: Graph, attributes: dict[str, Any]
) -> GraphModule:
    module = kind(graph)
    module.attributes = attributes
    return module


def _parameter_names(graph: Graph) -> dict[str, str]:
    """The user's names of parameters, by those in the source.

    A name that the source needs for something else (`sum`, `hf`) is another one there.
    """
    taken = {node.name for node in graph.placeholders}
    found: dict[str, str] = {}
    for node in graph.placeholders:
        name = node.target.lstrip("*")
        if name in taken or not name.isidentifier() or iskeyword(name):
            name = node.name
        taken.add(name)
        found[node.name] = name
    return found


def _annotations(graph: Graph) -> dict[str, Any]:
    found = {n.name: n.type for n in graph.placeholders if n.type is not None}
    if (returns := graph.output_node().type) is not None:
        found["return"] = returns
    return found


# Of what is compiled, not of the graph: a tree does not know of edits.
_Structure: TypeAlias = tuple[_Program, tuple[str, ...], pytree.Ties | None]


def _flatten(module: GraphModule) -> tuple[list[Any], _Structure, tuple[str, ...]]:
    paths, values = tuple(module.attributes), list(module.attributes.values())
    ties = pytree.Ties.kept(module, values, Value | np.ndarray)
    distinct = None if ties is None else ties.distinct(values)
    if ties is None or distinct is None:
        return values, (module.program, paths, None), paths
    return distinct, (module.program, paths, ties), ties.names(paths)


def _unflatten(structure: _Structure, values: Iterable[Any]) -> GraphModule:
    program, paths, ties = structure
    module = object.__new__(GraphModule)
    values = values if ties is None else ties.tree(values)
    module.attributes = dict(zip(paths, values, strict=True))
    vars(module)["_ties"] = ties
    module.use(program)
    return module


pytree.register(GraphModule, _flatten, _unflatten, by_name=False)
