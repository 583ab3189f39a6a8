"""`GraphModule`: a graph of `fx` that runs, by the Python source that it prints as."""

import inspect
from collections.abc import Iterable
from keyword import iskeyword
from os import PathLike
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np

from hopflow import pytree
from hopflow.bind import Value
from hopflow.entries import blames_user, entry
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
    """A compiled graph.

    signature   with the user's names of the parameters
    renamed     the user's name of a parameter -> its name in the source, if they differ
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
    """A graph as a function. After edits of `graph`, call `recompile`.

    It is a pytree of its attributes, so that `hf.grad` and `hf.jit` take it as an
    argument; and it can be traced again.

    graph        the nodes
    attributes   the tensors and modules that the graph refers to, by path
    code         the source that runs
    program      the compiled graph

    >>> module = hf.symbolic_trace(lambda x: hf.sin(x))
    >>> [sin] = module.graph.find_nodes("call_function", hf.sin)
    >>> sin.target = hf.cos
    >>> module.recompile()(hf.asarray(0.0))
    Tensor(1., f32[])
    """

    @entry
    def __init__(self, graph: Graph) -> None:
        """Compile a graph.

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
        """Compile the graph again after edits, and return the module.

        Raises:
            ArgumentTypeError: a function of `on_generate_code` returns no lines.
            GraphError: the graph breaks a rule (see `Graph.lint`), or its source is no
                Python.
        """
        self.graph.lint()
        vars(self).pop("_ties", None)  # the attributes may have changed
        self.use(_Program(self.graph))
        return self

    # --- submodules ---

    @entry
    def add_submodule(self, target: str, module: Any) -> bool:
        """Add `module` at the path `target`, for nodes to call; replace a module that
        is there.

        Returns:
            False if `target` leads through an attribute that is no module.

        Raises:
            ArgumentTypeError: `module` is not callable, or `target` is no string.
        """
        if not isinstance(target, str) or not callable(module):
            raise ArgumentTypeError(
                "add_submodule: expected a path and a module, and found "
                f"`{type(target).__name__}` and `{type(module).__name__}`."
            )
        parts = target.split(".")
        parents = (".".join(parts[:i]) for i in range(1, len(parts)))
        if any(not callable(self.attributes.get(path, callable)) for path in parents):
            return False
        for attributes in self._attribute_dicts():
            attributes[target] = module
        return True

    def delete_submodule(self, target: str) -> bool:
        """Remove the module at the path `target`, and all attributes below it.

        Remove the nodes that refer to it too, before `recompile`.

        Returns:
            False if there is no module.
        """
        if not callable(self.attributes.get(target)):
            return False
        for attributes in self._attribute_dicts():
            for path in list(attributes):
                if path == target or path.startswith(f"{target}."):
                    del attributes[path]
        return True

    def delete_all_unused_submodules(self) -> None:
        """Remove the modules that no node refers to, nor to an attribute below them."""
        referenced = {n.target for n in self.graph.nodes if n.kind in _REFERENCES}
        for path, value in list(self.attributes.items()):
            used = any(n == path or n.startswith(f"{path}.") for n in referenced)
            inside = any(path.startswith(f"{n}.") for n in referenced)
            if callable(value) and not used and not inside:
                self.delete_submodule(path)

    def _attribute_dicts(self) -> list[dict[str, Any]]:
        """Return the attributes of the module and of its graph: one dict, or two."""
        vars(self).pop("_ties", None)
        attributes, shared = self.attributes, self.graph.attributes
        return [attributes] if attributes is shared else [attributes, shared]

    def use(self, program: _Program) -> None:
        """Set the program that calls run."""
        self.program = program
        self.graph, self.code = program.graph, program.code
        self.__name__ = program.graph.name
        self.__signature__ = program.signature

    @entry
    @blames_user  # a wrong number of arguments is an error of the user
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of the graph for these arguments."""
        if kwargs and (renamed := self.program.renamed):
            kwargs = {renamed.get(name, name): value for name, value in kwargs.items()}
        return self.program.function(self, *args, **kwargs)

    def __reduce__(self) -> Any:  # the program is compiled again
        return _restored, (type(self), self.graph, self.attributes)

    @entry
    def propagate(self, *args: Any) -> Captured:
        """Return the captured graph of this module for arguments of these types.

        Its nodes have the user's lines and the paths of the modules.

        Args:
            args: Tensors, types in place of tensors (`hf.spec("f32[3]")`), or
                constants.

        Raises:
            HopflowError: an operation does not accept its types; a note names the node.
        """

        def run(*args: Any) -> Any:
            return Runner(self).run(*args)

        run.__name__ = self.__name__
        run.__wrapped__ = self  # type: ignore[attr-defined]  # it has the attributes
        run.__signature__ = self.__signature__  # type: ignore[attr-defined]
        return trace(run, *args, mode="fake", captures=True)

    @entry
    def to_folder(self, folder: str | Path, module_name: str = "FxModule") -> None:
        """Write the module as a Python package that can be edited by hand.

        The bodies of operators are written as classes too; see `open_bodies`.

            module.to_folder("layer")
            from layer import FxModule  # FxModule()(x) is module(x)

        Args:
            folder: Is created if necessary. It gets the source (`module.py`), the
                tensors (`attributes.npz`) and an `__init__.py`.
            module_name: Of the class in `module.py`.

        Raises:
            ArgumentTypeError: `folder` is no path.
            ArgumentValueError: `module_name` is no name for a class; the graph refers
                to a function that cannot be imported by name or traced by itself; or an
                attribute is neither a tensor nor a body.
        """
        if not isinstance(folder, str | PathLike):
            raise ArgumentTypeError(
                f"to_folder: `folder` must be a path, and is `{type(folder).__name__}`."
            )
        write_folder(Path(folder), module_name, self)

    def print_readable(self, print_output: bool = True) -> str:
        """Return the source, and print it if `print_output`."""
        if print_output:
            print(self.code)
        return self.code

    def __str__(self) -> str:
        return self.code

    def __repr__(self) -> str:
        return f"<fx.GraphModule {self.graph.name}: {len(self.graph.nodes)} nodes>"


def owning(module: GraphModule) -> GraphModule:
    """Return the module, or a copy of it whose graph has the attributes of the module.

    A module that was unflattened (by an optimiser) has new attributes, and shares its
    graph with the module that was flattened.
    """
    if module.attributes is module.graph.attributes:
        return module
    graph = Graph(module.graph.name)
    copies: dict[Node, Any] = {}
    for node in module.graph.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.attributes = dict(module.attributes)
    return GraphModule(graph)


def require_module(tool: str, value: object) -> None:
    """Check the argument of a tool.

    Raises:
        ArgumentTypeError: it is no module of `fx`.
    """
    if not isinstance(value, GraphModule):
        kind = type(value).__name__
        text = f"a captured `{kind}`" if isinstance(value, Captured) else f"`{kind}`"
        raise ArgumentTypeError(
            f"{tool}: expected a `hf.fx.GraphModule`, and found {text}. Make one with "
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
    """Return the user's name for each parameter of the source.

    The source renames a parameter whose name it needs otherwise (`sum`, `hf`).
    """
    taken = {node.name for node in graph.placeholders}
    names: dict[str, str] = {}
    for node in graph.placeholders:
        name = node.target.lstrip("*")
        if name in taken or not name.isidentifier() or iskeyword(name):
            name = node.name
        taken.add(name)
        names[node.name] = name
    return names


def _annotations(graph: Graph) -> dict[str, Any]:
    annotations = {n.name: n.type for n in graph.placeholders if n.type is not None}
    if (returns := graph.output_node().type) is not None:
        annotations["return"] = returns
    return annotations


# A tree holds the compiled program: edits of the graph do not change it.
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
