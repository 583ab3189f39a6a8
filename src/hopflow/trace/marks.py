"""`mark_dynamic`, `mark_unbacked`: make sizes of single tensors symbolic."""

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
    """The user's mark of one axis of a tensor.

    kind       "dynamic": a symbol that guards must not narrow; "unbacked": a symbol
               without a value in the trace, like a size known only at run time
    min, max   the range of the size, inclusive
    may_narrow whether guards may narrow a dynamic size
    """

    kind: Literal["dynamic", "unbacked"]
    min: int = 0
    max: float = inf
    may_narrow: bool = False

    def text(self, tensor: str, axis: int) -> str:
        """Return the user's call that makes this mark, for `axis` of `tensor`."""
        narrow = ["may_narrow=True"] * self.may_narrow
        limits = [*ends(self.min, self.max), *narrow]
        return f"hf.mark_{self.kind}({', '.join([tensor, str(axis), *limits])})"


Marks: TypeAlias = Mapping[tuple[int, int], Mark]
"""(leaf, axis) -> the mark of that size, for the tensors of a call."""


class MarkedType(TensorType):
    """The type of a tensor with marked axes; it equals the type without marks."""

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
    """Return the marks of an argument, by axis."""
    type_ = getattr(leaf, "type", None)
    return type_.marks if isinstance(type_, MarkedType) else {}


def mark_as(x: EagerTensor, marks: Mapping[int, Mark]) -> None:
    """Add marks to the axes of `x`."""
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
    """Make the size of `x` along `axis` symbolic when `x` is an argument.

    The trace of a call with `x` serves all sizes along the axis from `min` to `max`; a
    function that specialises on the size is a `DimError`. Only this tensor is marked,
    not its views: a call with others runs such a trace if it serves their sizes, and is
    traced without the mark if not. `dynamic=` takes precedence over marks.

        >>> double = hf.jit(lambda x: 2 * x)
        >>> x = hf.ones((8, 3))
        >>> hf.mark_dynamic(x, 0, min=2)
        >>> double(x).shape  # compiled once for all numbers of rows from 2
        (8, 3)

    Args:
        x: A tensor.
        axis: The axis, which may count from the end.
        min, max: The range of the size, inclusive.
        may_narrow: Whether the function may specialise on the size; see `hf.Dim`.

    Raises:
        ArgumentTypeError: `x` is no tensor with memory, a number no int, or
            `may_narrow` no bool.
        AxisError: `x` has no such axis.
        ArgumentValueError: the range is empty, or does not contain the size.
    """
    narrow = as_flag("mark_dynamic", "may_narrow", may_narrow)
    _mark("mark_dynamic", x, axis, Mark("dynamic", may_narrow=narrow), min, max)


def mark_unbacked(x: Any, axis: int, *, min: int = 0, max: int | None = None) -> None:
    """Make the size of `x` along `axis` unbacked when `x` is an argument.

    As `mark_dynamic`, but the trace has no value for the size: there is no guard on it,
    not even whether it is 1. Conditions of operations on it are checked at run time,
    and a decision by it is a `DataDependentError`, as for the sizes of `x[mask]`.
    Unmarked tensors need a trace of their own.

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
