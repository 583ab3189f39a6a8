"""Calls of jitted functions: compiled programs, and the fast path to them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from hopflow import pytree
from hopflow.backends import Backed
from hopflow.bind import Value, current
from hopflow.compiler.pipeline import Executable
from hopflow.errors import BackendError
from hopflow.graph.module import ComputedSource, Source
from hopflow.graph.types import TensorType
from hopflow.profile import Profile, profile_of
from hopflow.pytree import Spec
from hopflow.symbolic.ranges import INT64
from hopflow.tensor import EagerTensor
from hopflow.tensor.rows import row_of
from hopflow.trace.containers import Replaced
from hopflow.trace.signature import Arguments, weak_tensor
from hopflow.trace.variants import Variant


@dataclass(slots=True)
class Compiled:
    """A compiled program, and how a call passes its operands and takes its results.

    written     the inputs that get new values: positions among the arguments, followed
                by the tensors from outside
    spec        the structure of the result
    constants   position of a result leaf -> the Python number that it is
    numbers     position of a result leaf -> the Python type of a computed number
    sizes       for each symbol of the graph, in order, the source of its value
    rows        position of a tensor from outside -> position of an argument: the tensor
                is the base of that argument, and so a different one in each call
    changes     what happens to containers among the arguments; the tree of results is
                then the pair of the function's result and of the new contents
    variants    key of an aliasing pattern -> the program for calls whose tensors alias
                like this; only if something is written
    """

    executable: Executable | Backed
    written: list[int]
    spec: Spec
    constants: dict[int, Any]
    numbers: dict[int, type]
    sizes: list[Source | ComputedSource]
    rows: dict[int, int] = field(default_factory=dict)
    changes: Sequence[Replaced] = ()
    variants: dict[Any, "Variant[Compiled]"] = field(default_factory=dict)
    is_single: bool = field(init=False)

    def __post_init__(self) -> None:
        self.is_single = pytree.is_leaf(self.spec)

    def check(
        self, tensors: Sequence[EagerTensor], captured: Sequence[EagerTensor]
    ) -> None:
        """Check that the program can run on these tensors.

        Raises:
            InvalidTensorError, DeviceError: the host may not use a tensor.
            ReadOnlyError: a tensor that is written is read-only.
        """
        inputs = self.inputs(tensors, captured)
        for tensor in inputs:
            tensor.check_host()
        for k in self.written:
            inputs[k].check_writable()

    def inputs(
        self, tensors: Sequence[EagerTensor], captured: Sequence[EagerTensor]
    ) -> list[EagerTensor]:
        """Return the program's inputs for these arguments and tensors from outside."""
        inputs = [*tensors, *captured]
        for k, argument in self.rows.items():
            row = row_of([tensors[argument]])
            assert row is not None
            inputs[len(tensors) + k] = row
        return inputs

    def __call__(
        self,
        tensors: list[EagerTensor],
        leaves: Sequence[Any],
        captured: Sequence[EagerTensor] = (),
        donated: Sequence[EagerTensor] = (),
    ) -> Any:
        if captured:
            tensors = self.inputs(tensors, captured)
        for k in self.written:
            tensors[k].check_writable()
        sizes = [source.find(leaves) for source in self.sizes] if self.sizes else ()
        results: list[Any] = self.executable(tensors, sizes)
        if self.written:
            first = len(results) - len(self.written)
            pairs = zip(
                [tensors[k] for k in self.written], results[first:], strict=True
            )
            # A donated tensor is dead, and its memory may already hold a result.
            live = [p for p in pairs if not any(p[0] is x for x in donated)]
            _write([target for target, _ in live], [value for _, value in live])
            del results[first:]
        return self._result(results)

    def _result(self, results: list[Any]) -> Any:
        """Return the result of a call, from the results of the program."""
        if self.constants or self.numbers:
            for k, number in self.constants.items():
                results.insert(k, number)
            for k, kind in self.numbers.items():
                results[k] = kind(results[k].item())
        return results[0] if self.is_single else pytree.unflatten(self.spec, results)

    def profile(
        self,
        name: str,
        tensors: Sequence[EagerTensor],
        leaves: Sequence[Any],
        captured: Sequence[EagerTensor],
    ) -> Profile:
        """Measure a call, which writes to no tensor.

        Args:
            name: The name of the function.

        Raises:
            BackendError: a backend runs the program.
        """
        if isinstance(self.executable, Backed):
            raise BackendError(
                f"profile: a backend runs `{name}`, and hopflow cannot time its loops. "
                "Leave `backend` out."
            )
        self.check(tensors, captured)
        sizes = [source.find(leaves) for source in self.sizes]
        inputs = self.inputs(tensors, captured)
        results, measured = self.executable.profiled.measured(inputs, sizes)
        result = self._result(results[: len(results) - len(self.written)])
        result = result[0] if self.changes else result
        return profile_of(name, self.executable.graph, measured, result)


_HALF_WRITTEN: Final = "left half-written by a call that was interrupted"


def _write(targets: Sequence[EagerTensor], values: Sequence[Value]) -> None:
    """Write `values` to `targets`; after an interrupt all targets are invalid."""
    try:
        for target, value in zip(targets, values, strict=True):
            current().write(target, value)
    except BaseException:
        for target in targets:
            target.storage.invalidate(_HALF_WRITTEN)
        raise


class FastPath(NamedTuple):
    """The variant for arguments of some kinds, without a search; see `kinds_of`.

    types     the types of the tensors, kept alive because the key has their ids
    integers  the positions of leaves that are Python integers
    floats    the positions of leaves that are Python floats
    captured  the tensors from outside, if they are the same in each call
    find      checks the reads from outside and returns those tensors; None: no reads
    is_unconditional  whether no number among the arguments needs a check
    order     for each leaf its position among the `plain_leaves`; None: it is its own
    """

    variant: Variant[Compiled]
    types: list[TensorType]
    integers: list[int]
    floats: list[int]
    captured: list[EagerTensor]
    find: Callable[[Sequence[Any]], list[Any] | None] | None
    is_unconditional: bool
    order: Sequence[int] | None = None

    @staticmethod
    def of(variant: Variant[Compiled], call: Arguments) -> "FastPath":
        """Return the fast path to a variant for calls like this one."""
        kinds = {k: type(call.flat.leaves[k]) for k in call.numbers}
        return FastPath(
            variant,
            [t.type for t in call.tensors],
            [k for k, kind in kinds.items() if kind is int],
            [k for k, kind in kinds.items() if kind is float],
            variant.captured,
            None if variant.outside is None else variant.outside.find,
            is_unconditional=not kinds and not variant.asks_values,
        )

    def in_order(self, leaves: list[Any]) -> list[Any]:
        """Return the leaves of a call from its plain ones."""
        return leaves if self.order is None else [leaves[k] for k in self.order]

    def find_captured(self, leaves: Sequence[Any]) -> list[EagerTensor] | None:
        """Return the tensors from outside for a call; None: its numbers or the values
        read from outside do not satisfy the guards of the variant."""
        for k in self.integers:
            if leaves[k] not in INT64:
                return None
        if self.variant.asks_values and not self.variant.holds(leaves):
            return None
        return self.captured if self.find is None else self.find(leaves)

    def tensors(self, leaves: Sequence[Any]) -> list[EagerTensor]:
        """Return the operands of a call."""
        tensors = list(leaves)
        for k in self.floats:
            tensors[k] = weak_tensor(leaves[k])
        for k in reversed(self.integers):
            del tensors[k]
        return tensors
