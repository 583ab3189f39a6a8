"""What calls of a jitted function run: compiled programs, and how they are given."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from hopflow import pytree
from hopflow.backends import Backed
from hopflow.bind import Value, current
from hopflow.compiler.pipeline import Executable
from hopflow.graph.module import ComputedSource, Source
from hopflow.graph.types import TensorType
from hopflow.pytree import Spec
from hopflow.symbolic.ranges import INT64
from hopflow.tensor import EagerTensor
from hopflow.tensor.rows import row_of
from hopflow.trace.containers import Replaced
from hopflow.trace.signature import Arguments, weak_tensor
from hopflow.trace.variants import Variant


@dataclass(slots=True)
class Compiled:
    """What one signature was compiled to.

    written     which inputs get new values: positions among arguments, and behind them
                the tensors from outside
    spec        of the result
    constants   by position of a leaf of the result: the Python number that it is
    numbers     by position of a leaf: the Python type of a number that is computed
    sizes       where a call finds what the graph's symbols are, in their order
    rows        by position of a tensor from outside: it is the row of all the elements
                that this argument is a part of, and so another one in each call
    changes     what becomes of containers among the arguments; the tree of results is
                then a pair, of the function's and of those that go into containers
    variants    the same for calls in which tensors share memory, by how they do; only
                where something is written
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
        """Check that a run can begin.

        Raises:
            InvalidTensorError, DeviceError: the host may not use a tensor.
            ReadOnlyError: one that is written must not be.
        """
        given = self.inputs(tensors, captured)
        for tensor in given:
            tensor.check_host()
        for k in self.written:
            given[k].check_writable()

    def inputs(
        self, tensors: Sequence[EagerTensor], captured: Sequence[EagerTensor]
    ) -> list[EagerTensor]:
        """What the program takes for these arguments and tensors from outside."""
        found = [*tensors, *captured]
        for at, argument in self.rows.items():
            row = row_of([tensors[argument]])
            assert row is not None
            found[len(tensors) + at] = row
        return found

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
            # What is given up is asked for no more, and may be where a result is.
            left = [p for p in pairs if not any(p[0] is x for x in donated)]
            _write([target for target, _ in left], [value for _, value in left])
            del results[first:]
        for k, number in self.constants.items():
            results.insert(k, number)
        for k, kind in self.numbers.items():
            results[k] = kind(results[k].item())
        return results[0] if self.is_single else pytree.unflatten(self.spec, results)


_HALF_WRITTEN: Final = "left half-written by a call that was interrupted"


def _write(targets: Sequence[EagerTensor], values: Sequence[Value]) -> None:
    """Write all `values`; what an interrupt leaves half-written becomes invalid."""
    try:
        for target, value in zip(targets, values, strict=True):
            current().write(target, value)
    except BaseException:
        for target in targets:
            target.storage.invalidate(_HALF_WRITTEN)
        raise


class Known(NamedTuple):
    """What calls run whose arguments are of some kinds; see `Given.kinds`.

    types     of the tensors: alive, so that no other gets their ids
    integers  which leaves are Python integers
    floats    which are floats
    captured  the tensors from outside, if they are the same in each call
    find      finds them, and checks what the function reads from outside; None: there
              is nothing to check
    is_sure   whether there are no numbers that could matter
    """

    variant: Variant[Compiled]
    types: list[TensorType]
    integers: list[int]
    floats: list[int]
    captured: list[EagerTensor]
    find: Callable[[Sequence[Any]], list[Any] | None] | None
    is_sure: bool

    @staticmethod
    def of(variant: Variant[Compiled], call: Arguments) -> "Known":
        """What calls like this one run."""
        kinds = {k: type(call.given.leaves[k]) for k in call.numbers}
        return Known(
            variant,
            [t.type for t in call.tensors],
            [k for k, kind in kinds.items() if kind is int],
            [k for k, kind in kinds.items() if kind is float],
            variant.captured,
            None if variant.outside is None else variant.outside.find,
            is_sure=not kinds and not variant.asks_values,
        )

    def find_captured(self, leaves: Sequence[Any]) -> list[EagerTensor] | None:
        """The tensors from outside for a call; None: its numbers, or what the function
        reads from outside, are such that it may not run this."""
        for k in self.integers:
            if leaves[k] not in INT64:
                return None
        if self.variant.asks_values and not self.variant.holds(leaves):
            return None
        return self.captured if self.find is None else self.find(leaves)

    def tensors(self, leaves: Sequence[Any]) -> list[EagerTensor]:
        """The operands of a call."""
        tensors = list(leaves)
        for k in self.floats:
            tensors[k] = weak_tensor(leaves[k])
        for k in reversed(self.integers):
            del tensors[k]
        return tensors
