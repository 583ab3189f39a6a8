"""`split_module`: split a module into submodules."""

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
    """Return a module that computes what `m` does by submodules, one per partition.

        parts = hf.fx.split_module(module, None, lambda node: node.module_path)

    The submodules are named `submod_0`, `submod_1`, … after the partitions, and run in
    an order in which each has its inputs. A node with effects (a write, a call of a
    user's function) keeps its order relative to all other calls.

    Args:
        m: A module of `fx`, or a captured one, which is converted as by
            `hf.symbolic_trace`. It is not changed.
        root_m: Ignored: `m` has all attributes. PyTorch has this parameter.
        split_callback: Returns the partition of a call.
        qualname_map: Is filled: new path of an attribute -> its path in `m`.

    Raises:
        ArgumentTypeError: an argument is of another kind; the callback does not take a
            node, or returns a value that is not hashable.
        GraphError: two partitions depend on each other.
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
    part_of = {node: _partition(split_callback, node) for node in calls}
    parts = {key: _Part(f"submod_{key}") for key in dict.fromkeys(part_of.values())}
    for node, key in part_of.items():
        parts[key].nodes.append(node)
    _find_values(m.graph, part_of, parts)
    names = {} if qualname_map is None else qualname_map
    root, env = Graph(m.graph.name), dict[Node, Any]()
    for node in m.graph.nodes:
        if node.kind == "placeholder" or _is_returned_attribute(node, part_of):
            env[node] = root.node_copy(node)
    for key in _order(m.graph, part_of, parts):
        _call(root, parts[key], env, names)
    output = m.graph.output_node()
    root.output(map_nodes(output.args[0], env.__getitem__), output.type)
    return GraphModule(root)


def _partition(split_callback: Callable[[Node], Hashable], node: Node) -> Hashable:
    """Return the partition of a node.

    Raises:
        ArgumentTypeError: the callback does not take a node, or returns a value that is
            not hashable. Errors of the callback itself are passed on.
    """
    try:
        key = split_callback(node)
        hash(key)
    except TypeError as error:
        traceback = error.__traceback__
        if traceback is not None and traceback.tb_next is not None:
            raise  # the callback itself failed
        raise ArgumentTypeError(
            f"split_module: `split_callback` ({name_of(split_callback)}) must take a "
            f"node and return something that can be hashed. For node `{node.name}`: "
            f"{error}."
        ) from None
    return key


@dataclass
class _Part:
    """A partition: its calls, and the values read from and by other partitions."""

    name: str
    nodes: list[Node] = field(default_factory=list)
    inputs: dict[Node, None] = field(default_factory=dict)
    outputs: dict[Node, None] = field(default_factory=dict)


def _find_values(
    graph: Graph, part_of: Mapping[Node, Hashable], parts: Mapping[Any, _Part]
) -> None:
    """Set the inputs and outputs of the partitions."""
    for node in graph.nodes:
        for read in node.inputs:
            if (
                node in part_of
                and read.kind != "get_attr"
                and part_of.get(read, parts) != part_of[node]
            ):
                parts[part_of[node]].inputs[read] = None
            if read in part_of and (
                node not in part_of or part_of[node] != part_of[read]
            ):
                parts[part_of[read]].outputs[read] = None


def _is_returned_attribute(node: Node, part_of: Mapping[Node, Hashable]) -> bool:
    """Whether an attribute is returned. Partitions copy those that they read."""
    return node.kind == "get_attr" and any(user not in part_of for user in node.users)


def _order(
    graph: Graph, part_of: Mapping[Node, Hashable], parts: Mapping[Any, _Part]
) -> list[Any]:
    """Return the partitions, each after those that it depends on.

    Raises:
        GraphError: there is no such order.
    """
    needs: dict[Any, set[Any]] = {key: set() for key in parts}
    last_effect: Node | None = None
    since_effect: list[Node] = []  # the calls after it
    for node in part_of:
        for read in node.inputs:
            if read in part_of:
                needs[part_of[node]].add(part_of[read])
        earlier = [] if last_effect is None else [last_effect]
        if node.is_impure():
            earlier += since_effect
            last_effect, since_effect = node, []
        else:
            since_effect.append(node)
        needs[part_of[node]].update(part_of[other] for other in earlier)
    order: list[Any] = []
    remaining = list(parts)
    while remaining:
        ready = [k for k in remaining if needs[k] <= {k, *order}]
        if not ready:
            cycle = ", ".join(map(repr, remaining))
            raise GraphError(
                f"split_module: the partitions {cycle} of graph `{graph.name}` need "
                "each other's results or effects. Let `split_callback` put those that "
                "depend on each other into one."
            )
        order.append(ready[0])
        remaining.remove(ready[0])
    return order


def _call(
    root: Graph, part: _Part, env: dict[Node, Any], names: dict[str, str]
) -> None:
    """Make the module of a partition, and add a call of it to `root`."""
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
