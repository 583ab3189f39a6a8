"""Custom rules that only map cotangents: nodes that are only transposed."""

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

from hopflow.autograd.rules import is_differentiable
from hopflow.bind import Value, bind
from hopflow.graph.types import TensorType
from hopflow.zeros import LinearMap, Tangent, Zero, instantiate

PullbackRule: TypeAlias = Callable[
    [Sequence[Tangent], Sequence[Value], Sequence[TensorType], Sequence[TensorType]],
    Sequence[Tangent],
]
"""(cotangents of the float results, residuals, types of the arguments, types of the
results) -> cotangents of the arguments."""


class _Pullback:
    """`pullback(*tangents, *residuals; rule, arguments, results)`

    maps the tangents of the float arguments to tangents of the float results, and is
    linear in them. Only its transpose is defined, by `rule`: a linear trace through
    which tangents are pushed (`LinearTracer.pushed`) has no such node.
    """

    name = "pullback"
    lead = 0
    droppable = False
    effects: frozenset[str] = frozenset()

    def result_types(
        self, _types: Sequence[TensorType], params: dict[str, Any]
    ) -> tuple[TensorType, ...]:
        return tuple([t.strong() for t in params["results"] if is_differentiable(t)])

    def transpose_rule(
        self,
        cotangents: Sequence[Tangent],
        operands: Sequence[Any],
        params: dict[str, Any],
    ) -> list[Tangent | None]:
        arguments, results = params["arguments"], params["results"]
        floats = list(map(is_differentiable, arguments))
        residuals = operands[sum(floats) :]
        in_cotangents = params["rule"](cotangents, residuals, arguments, results)
        float_cotangents = [
            ct for ct, is_float in zip(in_cotangents, floats, strict=True) if is_float
        ]
        return [*float_cotangents, *[None] * len(residuals)]

    def node_effects(self, _params: dict[str, Any]) -> frozenset[str]:
        return self.effects


_PULLBACK: Final = _Pullback()


def pulled_by(
    rule: PullbackRule,
    arguments: Sequence[TensorType],
    results: Sequence[TensorType],
    residuals: Sequence[Any],
) -> LinearMap:
    """Return a linear function from tangents of the arguments to tangents of the
    results, which is only transposed, by `rule`."""
    types = tuple(arguments), tuple(results)
    params = {"rule": rule, "arguments": types[0], "results": types[1]}

    def derivative(tangents: Sequence[Tangent]) -> list[Tangent]:
        float_tangents = [instantiate(t) for t in tangents if is_differentiable(t.type)]
        out_tangents = iter(bind(_PULLBACK, [*float_tangents, *residuals], params))
        return [
            next(out_tangents) if is_differentiable(t) else Zero(t) for t in results
        ]

    return derivative
