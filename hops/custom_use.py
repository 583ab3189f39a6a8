"""A call of a function with rules of its own, as its node in a trace keeps it.

Rules are Python functions, which run where a derivative is asked for: the trace that
the call was made in has ended by then. What they read of outside is therefore found
when the call is traced, and passed as operands behind the arguments; where a rule runs,
those stand for what it reads.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hopflow import pytree
from hopflow.autograd.api import result_leaf
from hopflow.batching.graphs import Batched, Lane
from hopflow.bind import Operand, Value
from hopflow.errors import MutationError
from hopflow.graph.types import TensorType
from hopflow.hops.subgraphs import check_rule
from hopflow.ops.convert import as_value
from hopflow.pytree import Spec
from hopflow.symbolic.size import Size, Symbol
from hopflow.trace.own_writes import own_writes_only
from hopflow.trace.source import name_of
from hopflow.trace.stand_ins import Known, Read, run_elsewhere
from hopflow.zeros import LinearMap, Tangent, Unknown


class Ruled:
    """A function that brings its own derivatives.

    push and linearize are for the operands of a call, and the tangents of its
    arguments, of which not all are zero. They give the results, their structure, and
    the tangents of them.
    """

    name: str
    fun: Callable[..., Any]

    def push(
        self, use: "Use", operands: Sequence[Value], given: Sequence[Tangent]
    ) -> tuple[list[Value], Spec, Sequence[Tangent]]:
        raise NotImplementedError

    def linearize(
        self, use: "Use", operands: Sequence[Value], given: Sequence[Tangent]
    ) -> tuple[list[Value], Spec, LinearMap]:
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class Use:
    """A call of a function with rules: what it was given besides tensors.

    function  the function
    spec      the structure of the arguments that it is differentiated in
    static    the other arguments, by position
    returns   the structure of what it returns, where that is known
    reads     what the rules read of outside; the operands are the arguments, and these
    symbols   the sizes that the rules know
    below     of a call on a tape: what a tensor of that is below, where the rules run
    sizes     where a rule runs, what the node passes for the symbols of its body
    examples  of each `vmap` around the call, the innermost first, which operands are
              batched; all results are
    """

    function: Ruled
    spec: Spec
    static: dict[int, Any] = field(repr=False)
    returns: Spec | None = None
    reads: tuple[Read, ...] = field(default=(), repr=False)
    symbols: tuple[Symbol, ...] = field(default=(), repr=False)
    below: Known | None = field(default=None, repr=False)
    sizes: tuple[Operand, ...] = field(default=(), repr=False)
    examples: tuple[tuple[bool, ...], ...] = ()

    def arguments(self, leaves: Sequence[Any]) -> list[Any]:
        rest = iter(pytree.unflatten(self.spec, leaves))
        count = self.spec.num_children + len(self.static)
        return [
            self.static[i] if i in self.static else next(rest) for i in range(count)
        ]

    def results(self, tree: Any) -> tuple[list[Value], Spec]:
        leaves, spec = pytree.flatten(tree)
        name, f = self.function.name, self.function.fun
        return [
            as_value(result_leaf(name, f, spec, i, x)) for i, x in enumerate(leaves)
        ], spec

    # --- examples ---

    @property
    def of_one(self) -> "Use":
        """The call of one example of the outermost `vmap`."""
        return replace(self, examples=self.examples[:-1])

    def lanes(self, operands: Sequence[Value]) -> tuple[Size, list[Lane]]:
        """How many examples the outermost `vmap` has, and the operands for them."""
        batched = self.examples[-1]
        [size, *_] = [o.shape[0] for o, b in zip(operands, batched, strict=True) if b]
        return size, self.like_operands(operands)

    def like_operands(self, values: Sequence[Any]) -> list[Lane]:
        """What belongs to the first operands, batched as those are."""
        pairs = zip(values, self.examples[-1], strict=False)
        return [Batched(v) if b else v for v, b in pairs]

    # --- what rules read ---

    def run(self, rule: Callable[[], Any], values: Sequence[Value]) -> Any:
        """What a rule returns, where the last of `values` stand for what it reads.

        Raises:
            MutationError: it writes to what it has not made.
        """
        with own_writes_only(self._writes):
            return run_elsewhere(rule, self.reads, values, self.below)

    def _writes(self, type_: TensorType) -> MutationError:
        return MutationError(
            f"{self.function.name}: a rule of `{name_of(self.function.fun)}` writes to "
            f"a tensor {type_} that it is given or reads, but a rule only computes. "
            "Return the new value instead."
        )

    # --- what rules give ---

    def check(
        self,
        operands: Sequence[Value],
        types: Sequence[TensorType],
        spec: Spec,
        values: Sequence[Value],
    ) -> None:
        """Check that a rule gives what the function returns: `types`.

        Raises:
            StructureError, RuleTypeError: it does not.
        """
        assert self.returns is not None
        name, label = self.function.name, f"a rule of `{name_of(self.function.fun)}`"
        wanted, found = (self._of_one(row) for row in (types, [v.type for v in values]))
        expected = self.returns, wanted
        given = spec, list(map(Unknown, found))
        check_rule(name, label, "the function", expected, operands, given)

    def _of_one(self, types: Sequence[TensorType]) -> list[TensorType]:
        """The types of results for one example."""
        first = len(self.examples)
        return [t.with_shape(t.shape[first:]) for t in types]
