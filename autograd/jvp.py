"""Forward differentiation: nodes and graphs run on pairs of a value and its tangent."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hopflow.autograd.linearize import counted, linear_tracers
from hopflow.autograd.rules import tangents
from hopflow.bind import Interpreter, Operand, Value, bind, current, using
from hopflow.graph.core import Constant, Graph
from hopflow.graph.forwarding import Shortened, first_same, shortened
from hopflow.graph.interpreter import interpret
from hopflow.graph.rewriting import own_graphs
from hopflow.graph.types import TensorType
from hopflow.ops.convert import as_value
from hopflow.ops.opdef import OpDef
from hopflow.symbolic.size import Size
from hopflow.zeros import Tangent, Zero, is_zero


@dataclass(frozen=True, slots=True)
class Dual:
    """A value, and its tangent: a value beside it, or one of a linear trace."""

    value: Operand
    tangent: Tangent

    @property
    def type(self) -> TensorType:
        return self.value.type

    def as_size(self) -> Size:
        """The number, or the symbol, that an integer of no axes is."""
        return current().symbol_of(as_value(self.value))


def run_node(
    op: Any,
    operands: Sequence[Operand],
    given: Sequence[Tangent],
    params: dict[str, Any],
    linear: Interpreter | None,
) -> tuple[Sequence[Value], Sequence[Tangent]]:
    """The results of an operation under the present interpreter, and their tangents.

    Args:
        linear: Where tangents are computed; None: here too.
    """
    is_plain = type(op) is OpDef
    if not is_plain:
        params = own_graphs(op, params)
        given = counted(given, linear)
    if all(map(is_zero, given)):
        values = bind(op, operands, params)
        return values, [Zero(v.type) for v in values]
    here = current()
    if not is_plain:
        short = _shortened(op, operands, given, params)
        if short is not None:
            return _run_shortened(op, short, operands, given, linear)
    if is_plain:
        values = bind(op, operands, params)
        with using(linear or here):
            return values, tangents(op, operands, given, values, params)
    if linear is None or not any(linear_tracers(given)):  # no operand has a part
        return op.jvp_rule(operands, given, params)  # type: ignore[no-any-return]
    values, derivative = op.linearize_rule(operands, given, params)
    with using(linear):
        return values, derivative(given)


def _shortened(
    op: Any,
    operands: Sequence[Operand],
    given: Sequence[Tangent],
    params: dict[str, Any],
) -> Shortened | None:
    """The call without what it only passes through; one value with two tangents is
    two."""
    types = [o.type for o in operands]
    pairs = zip(operands, given, strict=True)
    keys = [(id(o), None if is_zero(t) else id(t)) for o, t in pairs]
    return shortened(op, types, params, first_same(keys))


def _run_shortened(
    op: Any,
    short: Shortened,
    operands: Sequence[Operand],
    given: Sequence[Tangent],
    linear: Interpreter | None,
) -> tuple[Sequence[Value], Sequence[Tangent]]:
    values, found = run_node(
        op,
        [operands[i] for i in short.args],
        [given[i] for i in short.args],
        short.params,
        linear,
    )
    results = short.results(operands, [values[k] for k in short.rest])
    dots = short.results(given, [found[k] for k in short.rest])
    return list(map(as_value, results)), dots


def run_graph(
    graph: Graph,
    symbols: Sequence[Operand],
    inputs: Sequence[Dual],
    linear: Interpreter | None = None,
) -> list[Dual]:
    """The results of a graph, and their tangents, as `run_node`."""

    def run(op: Any, args: Sequence[Any], params: dict[str, Any]) -> list[Any]:
        duals = [a if isinstance(a, Dual) else Dual(a, Zero(a.type)) for a in args]
        values, found = run_node(
            op, [d.value for d in duals], [d.tangent for d in duals], params, linear
        )
        # What has no tangent stays a value, which may be asked for its number.
        pairs = zip(values, found, strict=True)
        return [v if is_zero(t) else Dual(v, t) for v, t in pairs]

    outputs = interpret(graph, [*symbols, *inputs], run)
    return [
        o
        if isinstance(o, Dual)
        else Dual(as_value(o), Zero(o.type))
        if isinstance(o, Constant)
        else Dual(o, Zero(o.type))
        for o in outputs
    ]


def differentiate(
    graph: Graph,
    operands: Sequence[Operand],
    given: Sequence[Tangent],
    linear: Interpreter | None,
) -> tuple[list[Value], list[Tangent]]:
    """The results of a graph on the args of a node, and their tangents; see
    `run_graph`."""
    first = len(graph.symbols)
    duals = [Dual(o, t) for o, t in zip(operands, given, strict=True)]
    found = run_graph(graph, operands[:first], duals[first:], linear)
    return [as_value(d.value) for d in found], [d.tangent for d in found]
