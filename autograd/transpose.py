"""Transposition of linear graphs: from cotangents of results to operands."""

from collections.abc import Callable, Collection, Sequence

from hopflow.autograd.rules import apply_transpose
from hopflow.bind import Operand
from hopflow.graph.core import Arg, Constant, Graph, Var
from hopflow.graph.origin import replaying
from hopflow.ops.opdef import OpDef
from hopflow.zeros import Tangent, Unknown, Zero, added


def transpose(
    graph: Graph,
    linear: Collection[Var],
    value: Callable[[Arg], Operand],
    out_cotangents: Sequence[Tangent],
) -> list[Tangent]:
    """Return the cotangents of the inputs in which `graph` is linear.

    Args:
        linear: Those inputs.
        value: Returns the value of another input, or of a constant.
        out_cotangents: The cotangents of the outputs.

    Raises:
        DerivativeError: an operation is not linear in them.
    """
    depends = set(linear)
    for node in graph.nodes:
        if not depends.isdisjoint(node.args):
            depends.update(node.results)
    cotangents: dict[Var, Tangent] = {}

    def add(arg: Arg, cotangent: Tangent) -> None:
        if isinstance(arg, Var) and arg in depends and not isinstance(cotangent, Zero):
            cotangents[arg] = (
                added(cotangents[arg], cotangent) if arg in cotangents else cotangent
            )

    for output, cotangent in zip(graph.outputs, out_cotangents, strict=True):
        add(output, cotangent)
    for node in reversed(graph.nodes):
        if cotangents.keys().isdisjoint(node.results):
            continue
        result_cotangents = [
            cotangents.pop(v) if v in cotangents else Zero(v.type) for v in node.results
        ]
        operands = [
            Unknown(a.type) if isinstance(a, Var) and a in depends else value(a)
            for a in node.args
        ]
        rule = node.op.transpose_rule if type(node.op) is not OpDef else None
        with replaying(node):
            parts = (
                apply_transpose(node.op, result_cotangents, operands, node.params)
                if rule is None
                else rule(result_cotangents, operands, node.params)
            )
            for arg, part in zip(node.args, parts, strict=True):
                if part is not None:
                    add(arg, part)
    return [cotangents.get(v, Zero(v.type)) for v in linear]


def value_of_capture(origins: dict[Var, Operand]) -> Callable[[Arg], Operand]:
    """Return a lookup: constants are their own values, inputs have `origins`."""
    return lambda arg: arg if isinstance(arg, Constant) else origins[arg]
