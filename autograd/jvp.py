"""Forward-mode differentiation: run nodes and graphs on values with tangents."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hopflow.autograd.linearize import counted, linear_tracers
from hopflow.autograd.rules import apply_jvp
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
    """A value and its tangent, which in reverse mode belongs to a linear trace."""

    value: Operand
    tangent: Tangent

    @property
    def type(self) -> TensorType:
        return self.value.type

    def as_size(self) -> Size:
        """Return the number, or the symbol, that a scalar integer stands for."""
        return current().symbol_of(as_value(self.value))


def run_node(
    op: Any,
    operands: Sequence[Operand],
    tangents: Sequence[Tangent],
    params: dict[str, Any],
    linear: Interpreter | None,
) -> tuple[Sequence[Value], Sequence[Tangent]]:
    """Return the results of an operation under the current interpreter, and their
    tangents.

    Args:
        linear: The interpreter that computes tangents; None for the current one.
    """
    is_plain = type(op) is OpDef
    if not is_plain:
        params = own_graphs(op, params)
        tangents = counted(tangents, linear)
    if all(map(is_zero, tangents)):
        values = bind(op, operands, params)
        return values, [Zero(v.type) for v in values]
    here = current()
    if not is_plain:
        short = _shortened(op, operands, tangents, params)
        if short is not None:
            return _run_shortened(op, short, operands, tangents, linear)
    if is_plain:
        values = bind(op, operands, params)
        with using(linear or here):
            return values, apply_jvp(op, operands, tangents, values, params)
    # Tangents outside of a linear trace are values.
    if linear is None or not any(linear_tracers(tangents)):
        return op.jvp_rule(operands, tangents, params)  # type: ignore[no-any-return]
    values, derivative = op.linearize_rule(operands, tangents, params)
    with using(linear):
        return values, derivative(tangents)


def _shortened(
    op: Any,
    operands: Sequence[Operand],
    tangents: Sequence[Tangent],
    params: dict[str, Any],
) -> Shortened | None:
    """Return the call without the values that it only passes through; None if there
    are none. Operands that are the same value with different tangents count as
    different."""
    types = [o.type for o in operands]
    pairs = zip(operands, tangents, strict=True)
    keys = [(id(o), None if is_zero(t) else id(t)) for o, t in pairs]
    return shortened(op, types, params, first_same(keys))


def _run_shortened(
    op: Any,
    short: Shortened,
    operands: Sequence[Operand],
    tangents: Sequence[Tangent],
    linear: Interpreter | None,
) -> tuple[Sequence[Value], Sequence[Tangent]]:
    values, rest_tangents = run_node(
        op,
        [operands[i] for i in short.args],
        [tangents[i] for i in short.args],
        short.params,
        linear,
    )
    results = short.results(operands, [values[k] for k in short.rest])
    out_tangents = short.results(tangents, [rest_tangents[k] for k in short.rest])
    return list(map(as_value, results)), out_tangents


def run_graph(
    graph: Graph,
    symbols: Sequence[Operand],
    inputs: Sequence[Dual],
    linear: Interpreter | None = None,
) -> list[Dual]:
    """Return the results of a graph, and their tangents; see `run_node`."""

    def run(op: Any, args: Sequence[Any], params: dict[str, Any]) -> list[Any]:
        duals = [a if isinstance(a, Dual) else Dual(a, Zero(a.type)) for a in args]
        values, out_tangents = run_node(
            op, [d.value for d in duals], [d.tangent for d in duals], params, linear
        )
        # A value without a tangent stays plain: rules may read it as a number.
        pairs = zip(values, out_tangents, strict=True)
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
    tangents: Sequence[Tangent],
    linear: Interpreter | None,
) -> tuple[list[Value], list[Tangent]]:
    """Return the results of a graph on the args of a node, and their tangents; see
    `run_graph`."""
    first = len(graph.symbols)
    duals = [Dual(o, t) for o, t in zip(operands, tangents, strict=True)]
    duals_out = run_graph(graph, operands[:first], duals[first:], linear)
    return [as_value(d.value) for d in duals_out], [d.tangent for d in duals_out]
