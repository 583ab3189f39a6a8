"""Forward derivatives of operators with subgraphs: each arg, result, input and output
with a tangent gets a twin, of the same role, that holds it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hopflow.autograd.jvp import Dual, run_graph
from hopflow.autograd.rules import is_differentiable
from hopflow.bind import Operand, Value, bind, using
from hopflow.errors import DerivativeError
from hopflow.graph.core import Graph, Node, Var, map_graphs
from hopflow.graph.regions import Region, Role, Signature, carries
from hopflow.trace.functional import TracedTensor
from hopflow.trace.sharing import of_call
from hopflow.trace.source import user_env
from hopflow.trace.tracer import Tracer
from hopflow.zeros import Tangent, Zero, instantiate, is_zero


def node_and_signature(
    op: Any, operands: Sequence[Operand], params: dict[str, Any]
) -> tuple[Node, Signature]:
    """A node for these operands, that stands in no graph, and its signature."""
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


def masks_of(signature: Signature, given: Sequence[Tangent], results: int) -> Masks:
    """The least fixed point: what a carry gets in one step it has in all."""
    masks = Masks([not is_zero(t) for t in given], [False] * results)
    pairs = carries(signature)
    while True:
        for region in signature.regions:
            found = _region_mask(region, masks.args)
            for port, nonzero in zip(region.outputs, found, strict=True):
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
    given: Sequence[Tangent],
    params: dict[str, Any],
) -> tuple[list[bool], list[bool]]:
    """Which operands, carries among them, and results of an operator have a tangent
    that may not be zero, where `given` are those of the operands."""
    node, signature = node_and_signature(op, operands, params)
    masks = masks_of(signature, given, len(node.results))
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


# --- twins ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Slot:
    """A place among args, results, inputs or outputs: an old one, or its twin."""

    at: int
    is_twin: bool = False


def _with_twins(keys: Sequence[Any], masked: Sequence[bool]) -> list[_Slot]:
    """The old places with their twins, which follow each run of equal keys."""
    slots: list[_Slot] = []
    twins: list[_Slot] = []
    for i, (key, nonzero) in enumerate(zip(keys, masked, strict=True)):
        if i and key != keys[i - 1]:
            slots += twins
            twins = []
        slots.append(_Slot(i))
        if nonzero:
            twins.append(_Slot(i, True))
    return slots + twins


def _arg_keys(op: Any, node: Node, signature: Signature) -> list[Any]:
    """For each arg what is one for args in a row: its section and its role."""
    captures = len(node.args) - len(next(iter(node.graphs.values())).captures)
    return [(i < op.lead, i >= captures, role) for i, role in enumerate(signature.args)]


def jvp(
    op: Any,
    operands: Sequence[Operand],
    given: Sequence[Tangent],
    params: dict[str, Any],
) -> tuple[list[Value], list[Tangent]]:
    """The results of an operator, and their tangents: one node that computes both."""
    twin = of_call(
        op,
        params,
        ("jvp", tuple(map(is_zero, given))),
        lambda: _twin(op, operands, given, params),
    )
    args = [
        instantiate(given[s.at]) if s.is_twin else operands[s.at] for s in twin.args
    ]
    found = bind(op, args, twin.params)
    values = [r for s, r in zip(twin.results, found, strict=True) if not s.is_twin]
    tangents: list[Tangent] = [Zero(v.type) for v in values]
    for slot, result in zip(twin.results, found, strict=True):
        if slot.is_twin:
            tangents[slot.at] = result
    return values, tangents


class _Twin(NamedTuple):
    """The node of an operator with twins: its args and results, and its params."""

    args: list[_Slot]
    results: list[_Slot]
    params: dict[str, Any]


def _twin(
    op: Any,
    operands: Sequence[Operand],
    given: Sequence[Tangent],
    params: dict[str, Any],
) -> _Twin:
    node, signature = node_and_signature(op, operands, params)
    masks = masks_of(signature, given, len(node.results))
    args = _with_twins(_arg_keys(op, node, signature), masks.args)
    results = _with_twins(signature.results, masks.results)
    graphs = {region.name: _jvp_region(region, masks) for region in signature.regions}
    changed = with_graphs(
        op,
        params,
        graphs,
        [signature.args[s.at] for s in args],
        [signature.results[s.at] for s in results],
    )
    return _Twin(args, results, changed)


def _jvp_region(region: Region, masks: Masks) -> Graph:
    graph = region.graph
    masked = [p.at is not None and masks.args[p.at] for p in region.inputs]
    keys = [
        (v.node.section, p.role)
        for v, p in zip(graph.inputs, region.inputs, strict=True)
    ]
    tracer = Tracer(None, graph.name, env=user_env())
    values: dict[int, Value] = {}
    tangents: dict[int, Value] = {}
    for slot in _with_twins(keys, masked):
        var = graph.inputs[slot.at]
        made = input_like(tracer, var, twin=slot.is_twin)
        (tangents if slot.is_twin else values)[slot.at] = made
    with using(tracer):
        symbols, inputs = duals(graph, values, tangents)
        found = run_graph(graph, symbols, inputs)
        wanted = [p.at is not None and masks.results[p.at] for p in region.outputs]
        roles = [p.role for p in region.outputs]
        outputs = [
            instantiate(found[s.at].tangent) if s.is_twin else found[s.at].value
            for s in _with_twins(roles, wanted)
        ]
    refuse_captures(tracer)
    return tracer.close(outputs)


def refuse_captures(tracer: Tracer) -> None:
    """Raises: DerivativeError: a user's rule read a tensor that is no input here."""
    for capture in tracer.captures.values():
        raise DerivativeError(
            "custom_jvp, custom_vjp: a rule reads an array of outside, "
            f"{capture.tensor.type}, which it cannot in a function that an operator or "
            "`hf.jit` runs. Make it an argument of the function with the rule."
        )


def input_like(tracer: Tracer, var: Var, *, twin: bool = False) -> TracedTensor:
    """An input of a new graph like one of an old graph."""
    node = var.node
    if node.symbol is not None:
        return TracedTensor(tracer, tracer.define(node.symbol))
    name = f"{node.name}_dot" if twin else node.name
    section = node.section or "operand"
    return TracedTensor(
        tracer, tracer.graph.add_input(var.type.strong(), name, section)
    )


def duals(
    graph: Graph, values: dict[int, Value], tangents: dict[int, Value]
) -> tuple[list[Value], list[Dual]]:
    """Inputs of a region: the symbols, and the others with their tangents."""
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
    """`params` with other graphs, by the names of regions."""
    names = iter(Node("call_function", op, (), params).graphs)
    changed = map_graphs(params, lambda _: graphs[next(names)])
    found: dict[str, Any] = op.with_roles(changed, args, results)
    return found
