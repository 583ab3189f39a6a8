"""`split_module`: a module as a module of submodules."""

from collections.abc import Callable, Hashable, Mapping, MutableMapping
from dataclasses import dataclass, field
from operator import getitem
from typing import Any

from hopflow.entries import entry
from hopflow.errors import ArgumentTypeError, GraphError
from hopflow.fx.graph import Graph
from hopflow.fx.importing import as_symbolic
from hopflow.fx.module import GraphModule, owning
from hopflow.fx.node import Node, map_nodes
from hopflow.graph.module import GraphModule as Captured
from hopflow.trace.source import name_of


@entry
def split_module(
    m: GraphModule | Captured,
    root_m: Any,
    split_callback: Callable[[Node], Hashable],
    qualname_map: dict[str, str] | None = None,
) -> GraphModule:
    """A module that computes what `m` does by submodules, one for each partition.

        parts = hf.fx.split_module(module, None, lambda node: node.module_path)

    The submodules are `submod_0`, `submod_1`, … by the names of partitions, and run in
    an order in which each has what it reads. What has effects (a write, a call of a
    function of yours) stays in order with all that it may change or see.

    Args:
        m: A module of `fx`, or a captured one as `hf.symbolic_trace` has it; it stays
            as it is.
        root_m: Is not used: `m` has all attributes. It is there as in PyTorch.
        split_callback: The partition that a call belongs to.
        qualname_map: Gets for each new path of an attribute the one in `m`.

    Raises:
        ArgumentTypeError: an argument is of another kind; the callback does not take a
            node, or returns what cannot be hashed.
        GraphError: two partitions would each need the other to have run.
    """
    del root_m
    m = owning(as_symbolic("split_module", m))
    if not callable(split_callback):
        raise ArgumentTypeError(
            "split_module: `split_callback` must be a function of a node, and is "
            f"`{type(split_callback).__name__}`."
        )
    if not isinstance(qualname_map, MutableMapping | None):
        raise ArgumentTypeError(
            "split_module: `qualname_map` must be a dict that gets the paths of "
            f"attributes, and is `{type(qualname_map).__name__}`."
        )
    calls = [n for n in m.graph.nodes if n.kind.startswith("call_")]
    of = {node: _partition(split_callback, node) for node in calls}
    parts = {key: _Part(f"submod_{key}") for key in dict.fromkeys(of.values())}
    for node, key in of.items():
        parts[key].nodes.append(node)
    _find_values(m.graph, of, parts)
    names = {} if qualname_map is None else qualname_map
    root, env = Graph(m.graph.name), dict[Node, Any]()
    for node in m.graph.nodes:
        if node.kind == "placeholder" or _is_returned_attribute(node, of):
            env[node] = root.node_copy(node)
    for key in _order(m.graph, of, parts):
        _call(root, parts[key], env, names)
    output = m.graph.output_node()
    root.output(map_nodes(output.args[0], env.__getitem__), output.type)
    return GraphModule(root)


def _partition(split_callback: Callable[[Node], Hashable], node: Node) -> Hashable:
    """The partition of a node.

    Raises:
        ArgumentTypeError: the callback does not take a node, or returns what cannot be
            hashed. What the callback itself raises passes as it is.
    """
    try:
        key = split_callback(node)
        hash(key)
    except TypeError as error:
        here = error.__traceback__
        if here is not None and here.tb_next is not None:
            raise  # in a frame of the callback
        raise ArgumentTypeError(
            f"split_module: `split_callback` ({name_of(split_callback)}) must take a "
            f"node and return something that can be hashed. For node `{node.name}`: "
            f"{error}."
        ) from None
    return key


@dataclass
class _Part:
    """A partition: its calls, the values that it reads from others, those they read."""

    name: str
    nodes: list[Node] = field(default_factory=list)
    inputs: dict[Node, None] = field(default_factory=dict)
    outputs: dict[Node, None] = field(default_factory=dict)


def _find_values(
    graph: Graph, of: Mapping[Node, Hashable], parts: Mapping[Any, _Part]
) -> None:
    for node in graph.nodes:
        for read in node.inputs:
            if (
                node in of
                and read.kind != "get_attr"
                and of.get(read, parts) != of[node]
            ):
                parts[of[node]].inputs[read] = None
            if read in of and (node not in of or of[node] != of[read]):
                parts[of[read]].outputs[read] = None


def _is_returned_attribute(node: Node, of: Mapping[Node, Hashable]) -> bool:
    """Whether an attribute is returned; parts have those that they read themselves."""
    return node.kind == "get_attr" and any(user not in of for user in node.users)


def _order(
    graph: Graph, of: Mapping[Node, Hashable], parts: Mapping[Any, _Part]
) -> list[Any]:
    """The partitions, each after those that it needs.

    Raises:
        GraphError: there is no such order.
    """
    needs: dict[Any, set[Any]] = {key: set() for key in parts}
    last_effect: Node | None = None
    since: list[Node] = []  # the calls since then
    for node in of:
        for read in node.inputs:
            if read in of:
                needs[of[node]].add(of[read])
        before = [] if last_effect is None else [last_effect]
        if node.is_impure():
            before += since
            last_effect, since = node, []
        else:
            since.append(node)
        needs[of[node]].update(of[other] for other in before)
    order: list[Any] = []
    waiting = list(parts)
    while waiting:
        ready = [k for k in waiting if needs[k] <= {k, *order}]
        if not ready:
            cycle = ", ".join(map(repr, waiting))
            raise GraphError(
                f"split_module: the partitions {cycle} of graph `{graph.name}` need "
                "each other's results or effects. Let `split_callback` put those that "
                "depend on each other into one."
            )
        order.append(ready[0])
        waiting.remove(ready[0])
    return order


def _call(
    root: Graph, part: _Part, env: dict[Node, Any], names: dict[str, str]
) -> None:
    """Make the module of a partition, and call it in `root`."""
    graph = Graph("forward")
    inner: dict[Node, Node] = {}
    for node in part.inputs:
        inner[node] = graph.placeholder(node.name)
    for node in part.nodes:
        for read in node.inputs:
            if read.kind == "get_attr" and read not in inner:
                inner[read] = graph.node_copy(read)
        inner[node] = graph.node_copy(node, inner.__getitem__)
        if node.kind == "call_module":
            names[f"{part.name}.{inner[node].target}"] = node.target
    for node, copy in inner.items():
        if copy.kind == "get_attr":
            names[f"{part.name}.{copy.target}"] = node.target
    outputs = list(part.outputs)
    graph.output(
        inner[outputs[0]] if len(outputs) == 1 else tuple(inner[n] for n in outputs)
    )
    root.attributes[part.name] = GraphModule(graph)
    call = root.call_module(part.name, *(env[n] for n in part.inputs))
    if len(outputs) == 1:
        env[outputs[0]] = call
    else:
        env.update(
            (node, root.call_function(getitem, call, i))
            for i, node in enumerate(outputs)
        )
