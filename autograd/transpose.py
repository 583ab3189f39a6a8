"""Transposition: from cotangents of the results of a linear graph to those of its
operands."""

from collections.abc import Callable, Collection, Sequence

from hopflow.autograd.rules import cotangents
from hopflow.bind import Operand
from hopflow.graph.core import Arg, Constant, Graph, Var
from hopflow.graph.origin import replaying
from hopflow.ops.opdef import OpDef
from hopflow.zeros import Tangent, Unknown, Zero, added


def transpose(
    graph: Graph,
    linear: Collection[Var],
    value: Callable[[Arg], Operand],
    given: Sequence[Tangent],
) -> list[Tangent]:
    """The cotangents of the operands that `graph` is linear in.

    Args:
        linear: Those operands.
        value: What another input holds, or a constant.
        given: The cotangents of the outputs.

    Raises:
        DerivativeError: an operation is not linear.
    """
    depends = set(linear)
    for node in graph.nodes:
        if not depends.isdisjoint(node.args):
            depends.update(node.results)
    found: dict[Var, Tangent] = {}

    def add(arg: Arg, cotangent: Tangent) -> None:
        if isinstance(arg, Var) and arg in depends and not isinstance(cotangent, Zero):
            found[arg] = added(found[arg], cotangent) if arg in found else cotangent

    for output, cotangent in zip(graph.outputs, given, strict=True):
        add(output, cotangent)
    for node in reversed(graph.nodes):
        if found.keys().isdisjoint(node.results):
            continue
        own = [found.pop(v) if v in found else Zero(v.type) for v in node.results]
        operands = [
            Unknown(a.type) if isinstance(a, Var) and a in depends else value(a)
            for a in node.args
        ]
        rule = node.op.transpose_rule if type(node.op) is not OpDef else None
        with replaying(node):
            parts = (
                cotangents(node.op, own, operands, node.params)
                if rule is None
                else rule(own, operands, node.params)
            )
            for arg, part in zip(node.args, parts, strict=True):
                if part is not None:
                    add(arg, part)
    return [found.get(v, Zero(v.type)) for v in linear]


def value_of_capture(origins: dict[Var, Operand]) -> Callable[[Arg], Operand]:
    """What residuals hold, by their inputs."""
    return lambda arg: arg if isinstance(arg, Constant) else origins[arg]
