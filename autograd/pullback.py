"""Rules that give cotangents alone: a node of linear graphs that is only transposed."""

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
"""(cotangents of the results that are floats, residuals, types of the arguments, types
of the results) -> cotangents of the arguments."""


class _Pullback:
    """`pullback(*tangents, *residuals; rule, arguments, results)`

    gives tangents of the results that are floats, from those of such arguments. It is
    linear in them. It never runs: where tangents are to go through a linear trace
    (`LinearTracer.pushed`), there is none.
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
        found = params["rule"](cotangents, residuals, arguments, results)
        own = [ct for ct, is_float in zip(found, floats, strict=True) if is_float]
        return [*own, *[None] * len(residuals)]

    def node_effects(self, _params: dict[str, Any]) -> frozenset[str]:
        return self.effects


_PULLBACK: Final = _Pullback()


def pulled_by(
    rule: PullbackRule,
    arguments: Sequence[TensorType],
    results: Sequence[TensorType],
    residuals: Sequence[Any],
) -> LinearMap:
    """A linear function from tangents of the arguments to those of the results, that is
    there to be transposed, by `rule`."""
    types = tuple(arguments), tuple(results)
    params = {"rule": rule, "arguments": types[0], "results": types[1]}

    def derivative(tangents: Sequence[Tangent]) -> list[Tangent]:
        given = [instantiate(t) for t in tangents if is_differentiable(t.type)]
        found = iter(bind(_PULLBACK, [*given, *residuals], params))
        return [next(found) if is_differentiable(t) else Zero(t) for t in results]

    return derivative
