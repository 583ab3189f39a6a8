"""The backward rule of `custom_vjp` at a point: what transposes the linear function."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hopflow import pytree
from hopflow.autograd.api import like
from hopflow.autograd.pullback import PullbackRule
from hopflow.autograd.rules import is_differentiable
from hopflow.batching.api import over_examples
from hopflow.batching.graphs import Batched, as_batched
from hopflow.bind import Value
from hopflow.errors import DerivativeError, StructureError
from hopflow.graph.types import TensorType
from hopflow.hops.custom_use import Use
from hopflow.ops.elementwise import multiply
from hopflow.ops.reduce import sum as reduce_sum
from hopflow.pytree import Spec
from hopflow.trace.source import name_of
from hopflow.zeros import Tangent, Unknown, Zero, instantiate, is_zero


def no_tangents(use: Use) -> DerivativeError:
    return DerivativeError(
        f"custom_vjp: `{name_of(use.function.fun)}` has rules for reverse derivatives "
        "only. Use `hf.custom_jvp` for one that forward derivatives are to be taken of."
    )


@dataclass(frozen=True, eq=False)
class Backward:
    """The backward rule at a point.

    rule        (static arguments, residuals, cotangents) -> cotangents of arguments
    spec        the structure of the results
    residuals   those that are no tensors; None: a tensor
    """

    rule: Callable[..., Any]
    use: Use
    spec: Spec
    residuals: list[Any]
    residual_spec: Spec

    def __call__(
        self,
        given: Sequence[Tangent],
        tensors: Sequence[Value],
        arguments: Sequence[TensorType],
        results: Sequence[TensorType],
    ) -> list[Tangent]:
        """The cotangents of the flat arguments, of these types, from those of results
        and from the residuals that are tensors, and what the rules read."""
        rest, found = iter(tensors), iter(given)
        residuals = pytree.unflatten(
            self.residual_spec,
            [next(rest) if r is None else r for r in self.residuals],
        )
        cts = [
            instantiate(next(found) if is_differentiable(t) else Zero(t))
            for t in results
        ]
        args = *self.use.static.values(), residuals, pytree.unflatten(self.spec, cts)
        trees = self.use.run(lambda: self.rule(*args), tensors)
        specs = self.use.spec.children()
        if not isinstance(trees, tuple | list) or len(trees) != len(specs):
            raise StructureError(
                f"custom_vjp: the backward rule of `{name_of(self.use.function.fun)}` "
                f"must return a tuple of {len(specs)} cotangents, one for each "
                f"argument, and returns {pytree.structure(trees)}."
            )
        whole = [
            pytree.unflatten(spec, [None] * spec.num_leaves) if tree is None else tree
            for tree, spec in zip(trees, specs, strict=True)
        ]
        values = list(map(Unknown, arguments))
        return like("custom_vjp", "cotangents", tuple(whole), values, self.use.spec)


@dataclass(frozen=True, eq=False)
class BackwardOfMany:
    """The same for many examples at once. What is the same for all examples gets the
    sum of their cotangents.

    one      the rule for one example
    batched  which of the residuals, and of what the rules read, depend on the example
    """

    one: PullbackRule
    use: Use
    batched: list[bool]

    def __call__(
        self,
        given: Sequence[Tangent],
        tensors: Sequence[Value],
        arguments: Sequence[TensorType],
        results: Sequence[TensorType],
    ) -> list[Tangent]:
        size = results[0].shape[0]
        places = [k for k, ct in enumerate(given) if not is_zero(ct)]
        own = [
            t.with_shape(t.shape[1:]) if b else t
            for t, b in zip(arguments, self.use.examples[-1], strict=False)
        ]
        of_one = [t.with_shape(t.shape[1:]) for t in results]
        zeros = [Zero(t) for t in of_one if is_differentiable(t)]
        nonzero: list[int] = []

        def run(flat: Sequence[Any]) -> list[Value]:
            cts: list[Tangent] = list(zeros)
            for k, ct in zip(places, flat, strict=False):
                cts[k] = ct
            found = self.one(cts, flat[len(places) :], own, of_one)
            nonzero[:] = [k for k, ct in enumerate(found) if not is_zero(ct)]
            return [instantiate(found[k]) for k in nonzero]

        pairs = zip(tensors, self.batched, strict=True)
        lanes = [Batched(instantiate(given[k])) for k in places]
        lanes += [Batched(x) if b else x for x, b in pairs]  # type: ignore[misc]
        found = over_examples(run, size, lanes)
        cotangents: list[Tangent] = [Zero(t) for t in arguments]
        for k, lane in zip(nonzero, found, strict=True):
            if self.use.examples[-1][k]:
                cotangents[k] = as_batched(size, lane).value
            elif isinstance(lane, Batched):
                cotangents[k] = reduce_sum(lane.value, axis=0)
            else:
                cotangents[k] = multiply(lane, size)
        return cotangents
