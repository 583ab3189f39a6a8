"""Forward-mode derivatives of operators with subgraphs, derived from the roles of args.

Each arg, result, region input and region output that is differentiated gains a tangent
of the same role: the tangent of a carry is a carry. It gains one for each direction in
which the operator is differentiated.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

from hopflow.autograd.jvp import Dual, run_graph
from hopflow.autograd.rules import is_differentiable
from hopflow.bind import Operand, Value, bind, using
from hopflow.errors import DerivativeError
from hopflow.graph.core import Graph, Node, Var, map_graphs
from hopflow.graph.regions import Port, Region, Role, Signature, carries
from hopflow.trace.sharing import of_call
from hopflow.trace.source import user_env
from hopflow.trace.tracer import Tracer
from hopflow.zeros import Tangent, Zero, instantiate, is_zero


def node_and_signature(
    op: Any, operands: Sequence[Operand], params: dict[str, Any]
) -> tuple[Node, Signature]:
    """Return a node of `op` that stands in no graph, and its signature."""
    graph = Graph("call")
    args = [graph.add_input(o.type, "") for o in operands]
    types = op.result_types([o.type for o in operands], params)
    node = graph.call(op, args, params, types)
    return node, op.signature(node)


# --- which tangents are zero ----------------------------------------------------------


@dataclass(slots=True)
class Masks:
    """Which args and results of a node have a tangent that is not zero."""

    args: list[bool]
    results: list[bool]


def masks_of(signature: Signature, tangents: Sequence[Tangent], results: int) -> Masks:
    """Return which args and results have nonzero tangents: the least fixed point
    over the steps of loops, since a carry whose tangent is nonzero in one step has
    one in all."""
    masks = Masks([not is_zero(t) for t in tangents], [False] * results)
    pairs = carries(signature)
    while True:
        for region in signature.regions:
            mask = _region_mask(region, masks.args)
            for port, nonzero in zip(region.outputs, mask, strict=True):
                if port.at is not None and nonzero:
                    masks.results[port.at] = True
        grown = False
        for pair in pairs:
            if masks.args[pair.arg] and not masks.results[pair.result]:
                masks.results[pair.result] = True  # zero trips give the first value
            if masks.results[pair.result] and not masks.args[pair.arg]:
                masks.args[pair.arg] = grown = True
        if not grown:
            return masks


def reached(
    op: Any,
    operands: Sequence[Operand],
    tangents: Sequence[Tangent],
    params: dict[str, Any],
) -> tuple[list[bool], list[bool]]:
    """Return which operands and which results of an operator may have nonzero tangents.

    Args:
        tangents: Those of the operands. A carry may gain one from another operand.
    """
    node, signature = node_and_signature(op, operands, params)
    masks = masks_of(signature, tangents, len(node.results))
    return masks.args, masks.results


def _region_mask(region: Region, args: Sequence[bool]) -> list[bool]:
    """Which outputs of a region depend on inputs with a tangent."""
    depends = {
        var
        for var, port in zip(region.graph.inputs, region.inputs, strict=True)
        if port.at is not None and args[port.at]
    }
    for node in region.graph.nodes:
        if any(isinstance(a, Var) and a in depends for a in node.args):
            depends.update(v for v in node.results if is_differentiable(v.type))
    return [isinstance(o, Var) and o in depends for o in region.graph.outputs]


# --- the node with tangents -----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Slot:
    """A position among args, results, inputs or outputs of the node with tangents:
    the primal at `at` of the old node, or its tangent in a direction."""

    at: int
    direction: int | None = None


def _with_tangents(
    keys: Sequence[Any], masked: Sequence[Sequence[bool]]
) -> list[_Slot]:
    """Return the positions with their tangents, which follow each run of equal keys.

    Args:
        masked: For each direction, which positions have a tangent.
    """
    slots: list[_Slot] = []
    for _, run in groupby(range(len(keys)), keys.__getitem__):
        places = list(run)
        slots += map(_Slot, places)
        slots += [
            _Slot(i, k)
            for k, nonzero in enumerate(masked)
            for i in places
            if nonzero[i]
        ]
    return slots


def _arg_keys(op: Any, node: Node, signature: Signature) -> list[Any]:
    """Return a key for each arg, which is equal for args of one section and role."""
    captures = len(node.args) - len(next(iter(node.graphs.values())).captures)
    return [(i < op.lead, i >= captures, role) for i, role in enumerate(signature.args)]


def jvp(
    op: Any,
    operands: Sequence[Operand],
    in_tangents: Sequence[Tangent],
    params: dict[str, Any],
) -> tuple[list[Value], list[Tangent]]:
    """Return the results of an operator and their tangents, computed by one node."""
    values, [out_tangents] = jvp_in_directions(op, operands, [in_tangents], params)
    return values, out_tangents


def jvp_in_directions(
    op: Any,
    operands: Sequence[Operand],
    directions: Sequence[Sequence[Tangent]],
    params: dict[str, Any],
) -> tuple[list[Value], list[list[Tangent]]]:
    """Return the results of an operator and, for each direction, their tangents. One
    node computes all.

    Args:
        directions: For each direction, the tangents of the operands.
    """
    zero = tuple(tuple(map(is_zero, tangents)) for tangents in directions)
    node = of_call(
        op,
        params,
        ("jvp", zero),
        lambda: _dual_node(op, operands, directions, params),
    )
    args = [
        operands[s.at]
        if s.direction is None
        else instantiate(directions[s.direction][s.at])
        for s in node.args
    ]
    outputs = bind(op, args, node.params)
    pairs = list(zip(node.results, outputs, strict=True))
    values = [r for s, r in pairs if s.direction is None]
    out_tangents: list[list[Tangent]] = [
        [Zero(v.type) for v in values] for _ in directions
    ]
    for slot, result in pairs:
        if slot.direction is not None:
            out_tangents[slot.direction][slot.at] = result
    return values, out_tangents


class _DualNode(NamedTuple):
    """The node that computes results and tangents: args, results and params."""

    args: list[_Slot]
    results: list[_Slot]
    params: dict[str, Any]


def _dual_node(
    op: Any,
    operands: Sequence[Operand],
    directions: Sequence[Sequence[Tangent]],
    params: dict[str, Any],
) -> _DualNode:
    node, signature = node_and_signature(op, operands, params)
    masks = [masks_of(signature, t, len(node.results)) for t in directions]
    args = _with_tangents(_arg_keys(op, node, signature), [m.args for m in masks])
    results = _with_tangents(signature.results, [m.results for m in masks])
    graphs = {region.name: _jvp_region(region, masks) for region in signature.regions}
    new_params = with_graphs(
        op,
        params,
        graphs,
        [signature.args[s.at] for s in args],
        [signature.results[s.at] for s in results],
    )
    return _DualNode(args, results, new_params)


def _jvp_region(region: Region, masks: Sequence[Masks]) -> Graph:
    graph = region.graph
    keys = [
        (v.node.section, p.role)
        for v, p in zip(graph.inputs, region.inputs, strict=True)
    ]
    has_tangent = [_at_ports(region.inputs, m.args) for m in masks]
    is_nonzero = [_at_ports(region.outputs, m.results) for m in masks]
    tracer = Tracer(None, graph.name, env=user_env())
    inputs: dict[int | None, dict[int, Value]] = defaultdict(dict)
    for slot in _with_tangents(keys, has_tangent):
        var, is_tangent = graph.inputs[slot.at], slot.direction is not None
        name = f"{var.node.name}_dot" if is_tangent else ""
        value = tracer.input_like(var, var.type.strong(), name)
        inputs[slot.direction][slot.at] = value
    with using(tracer):
        in_directions = [
            run_graph(graph, *duals(graph, inputs[None], inputs[k]))
            for k in range(len(masks))
        ]
        roles = [p.role for p in region.outputs]
        outputs = [
            in_directions[0][s.at].value
            if s.direction is None
            else instantiate(in_directions[s.direction][s.at].tangent)
            for s in _with_tangents(roles, is_nonzero)
        ]
    refuse_captures(tracer)
    return tracer.close(outputs)


def _at_ports(ports: Sequence[Port], mask: Sequence[bool]) -> list[bool]:
    """Return which of a region's ports stand for an arg or a result in `mask`."""
    return [p.at is not None and mask[p.at] for p in ports]


def refuse_captures(tracer: Tracer) -> None:
    """Raise if a user's rule captured a tensor.

    Raises:
        DerivativeError: a custom rule reads a tensor that is no input of the region.
    """
    for capture in tracer.captures.values():
        raise DerivativeError(
            "custom_jvp, custom_vjp: a rule reads an array of outside, "
            f"{capture.tensor.type}, which it cannot in a function that an operator or "
            "`hf.jit` runs. Make it an argument of the function with the rule."
        )


def duals(
    graph: Graph, values: dict[int, Value], tangents: dict[int, Value]
) -> tuple[list[Value], list[Dual]]:
    """Return the inputs of a region: symbols, and the others with their tangents."""
    count = len(graph.symbols)
    symbols = [values[i] for i in range(count)]
    inputs = [
        Dual(values[i], tangents.get(i, Zero(graph.inputs[i].type)))
        for i in range(count, len(graph.inputs))
    ]
    return symbols, inputs


def with_graphs(
    op: Any,
    params: dict[str, Any],
    graphs: dict[str, Graph],
    args: Sequence[Role],
    results: Sequence[Role],
) -> dict[str, Any]:
    """Return `params` with other graphs and roles.

    Args:
        graphs: By the names of the regions.
        args, results: The roles of the new node's args and results.
    """
    names = iter(Node("call_function", op, (), params).graphs)
    replaced = map_graphs(params, lambda _: graphs[next(names)])
    new_params: dict[str, Any] = op.with_roles(replaced, args, results)
    return new_params
