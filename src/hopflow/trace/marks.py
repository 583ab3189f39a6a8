"""`mark_dynamic`, `mark_unbacked`: which sizes of single tensors are symbols."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import Any, Literal, TypeAlias

from hopflow.errors import ArgumentTypeError, ArgumentValueError
from hopflow.graph.types import TensorType
from hopflow.ops.rules import as_flag, as_integer, normalize_axis
from hopflow.symbolic.declared import ends
from hopflow.tensor import EagerTensor


@dataclass(frozen=True, slots=True)
class Mark:
    """What a user has said of one axis of a tensor.

    kind       "dynamic": a symbol that guards must not narrow; "unbacked": a symbol
               without a value in the trace, as of what only a run knows
    min, max   the sizes that are allowed, both included
    may_narrow whether guards may narrow a dynamic size
    """

    kind: Literal["dynamic", "unbacked"]
    min: int = 0
    max: float = inf
    may_narrow: bool = False

    def text(self, tensor: str, axis: int) -> str:
        """The call that marks `axis` of what a user writes as `tensor`."""
        narrow = ["may_narrow=True"] * self.may_narrow
        limits = [*ends(self.min, self.max), *narrow]
        return f"hf.mark_{self.kind}({', '.join([tensor, str(axis), *limits])})"


Marks: TypeAlias = Mapping[tuple[int, int], Mark]
"""The sizes of a call that are symbols because its tensors are marked: leaf, axis."""


class MarkedType(TensorType):
    """The type of a tensor whose axes are marked: equal to the same one without."""

    __slots__ = ("marks",)

    marks: Mapping[int, Mark]

    def __init__(self, type_: TensorType, marks: Mapping[int, Mark]) -> None:
        super().__init__(type_.dtype, type_.shape, type_.weak)
        object.__setattr__(self, "marks", marks)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TensorType) and (self.dtype, self.shape) == (
            other.dtype,
            other.shape,
        )

    def __hash__(self) -> int:
        return hash(TensorType(self.dtype, self.shape))


def marks_of(leaf: Any) -> Mapping[int, Mark]:
    """The marks of an argument, by axis."""
    type_ = getattr(leaf, "type", None)
    return type_.marks if isinstance(type_, MarkedType) else {}


def mark_as(x: EagerTensor, marks: Mapping[int, Mark]) -> None:
    """Mark the axes of `x`, besides those that are marked."""
    if marks:
        x.type = MarkedType(x.type, {**marks_of(x), **marks})


def mark_dynamic(
    x: Any,
    axis: int,
    *,
    min: int = 0,
    max: int | None = None,
    may_narrow: bool = False,
) -> None:
    """Have the size of `x` along `axis` be a symbol where `x` is an argument.

    A trace that a call with `x` makes serves all sizes along the axis from `min` to
    `max`; a function that decides by the size is a `DimError`. Other tensors, views of
    `x` among them, are not marked: they run such a trace if it serves their sizes, and
    are traced as if there were no mark if not. What `dynamic=` says of an argument goes
    before its marks.

        x = hf.ones((8, 3))
        hf.mark_dynamic(x, 0, min=2)
        step(x)  # compiled once for all numbers of rows from 2

    Args:
        x: A tensor.
        axis: The axis, which may count from the end.
        min, max: The sizes that are allowed, both included.
        may_narrow: Whether the function may decide by the size; see `hf.Dim`.

    Raises:
        ArgumentTypeError: `x` is no tensor with memory, a number no int, or
            `may_narrow` no bool.
        AxisError: `x` has no such axis.
        ArgumentValueError: the range is empty, or the size is not within.
    """
    narrow = as_flag("mark_dynamic", "may_narrow", may_narrow)
    _mark("mark_dynamic", x, axis, Mark("dynamic", may_narrow=narrow), min, max)


def mark_unbacked(x: Any, axis: int, *, min: int = 0, max: int | None = None) -> None:
    """Have the size of `x` along `axis` be one that only a run knows.

    As `mark_dynamic`, but the trace has no value for the size at all: no guard is made
    of it, not even whether it is 1. What operations need of it is checked by the run,
    and a decision by it is a `DataDependentError`, as for the sizes of `x[mask]`.
    Tensors that are not marked are traced apart.

    Args, Raises: as `mark_dynamic`.
    """
    _mark("mark_unbacked", x, axis, Mark("unbacked"), min, max)


def _mark(
    name: str,
    x: Any,
    axis: int,
    mark: Mark,
    min: int,
    max: int | None,
) -> None:
    if not isinstance(x, EagerTensor):
        raise ArgumentTypeError(
            f"{name}: `x` must be a tensor with memory, and is `{type(x).__name__}`. "
            "Mark what is passed to the function, before it is called."
        )
    axis = normalize_axis(name, axis, x.ndim)
    low = as_integer(name, "min", min)
    high = inf if max is None else as_integer(name, "max", max)
    size = x.array.shape[axis]
    if not 0 <= low <= size <= high:
        raise ArgumentValueError(
            f"{name}: axis {axis} of the tensor has size {size}, and must have one "
            f"from {low} to {high}, with a `min` of at least 0."
        )
    mark_as(x, {axis: replace(mark, min=low, max=high)})
