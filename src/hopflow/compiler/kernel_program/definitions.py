"""Definitions: the computation of values, as data.

A definition has expressions over axes, where a kernel of `loop_ir.kernels` has
functions of an index. Axis k is the same variable in every definition, so that an
element read at the reader's own index is the same node and needs no substitution. The
axes of a reduction's space come after those of the result.

    Pointwise((add(x[i0, i1], y[i1]),))               r[i0, i1] = x[i0, i1] + y[i1]
    Cut(0, n, Pointwise((x[i0],)), Pointwise((0,)))   r[i0] = x[i0] if i0 < n else 0
    Reduction((n,), (0.0,), "add", (x[i0, i1],))      r[i0] = sum of x[i0, i1], i1 < n

`x[i]` is an "element" node: of an operand, by one i64 expression for each axis. It may
have a condition, and is not read where that is false. The kernels without functions
(`Library`, `Callback`, `Invocation`) are definitions themselves.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from hopflow import dtypes
from hopflow.graph.types import TensorType
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Expr, Index, Var
from hopflow.loop_ir.kernels import Callback, Invocation, Library, Operand
from hopflow.symbolic.size import Size

_AXES: Final[list[Expr]] = []


def axes(count: int) -> Index:
    """Return the first axes, as i64 expressions."""
    while len(_AXES) < count:
        _AXES.append(e.read(Var(f"i{len(_AXES)}", dtypes.int64)))
    return tuple(_AXES[:count])


@dataclass(frozen=True, slots=True)
class Function:
    """`results` as expressions over `parameters`, which are variables."""

    parameters: tuple[Expr, ...]
    results: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class Check:
    """A condition that stops the program with an error where it fails.

    holds     the condition, which must hold for all indices in `shape`
    values    the values that the error reports
    passed    a condition over no axes; where it is true, the check holds. The constant
              False: it is known that a check fails, and which one is sought
    is_free   the check guards nothing: where it fails, nothing is read out of bounds,
              and nothing reads what is computed
    """

    kind: Literal["index", "divide", "power", "check", "range"]
    shape: tuple[Size, ...]
    holds: Expr
    values: tuple[Expr, ...] = ()
    passed: Expr | None = None
    is_free: bool = False


@dataclass(frozen=True, slots=True)
class Pointwise:
    """One of the `elements` for each index of each result; results have one shape.

    All elements at an index are computed before one of them is stored. `is_view` is as
    for a kernel.
    """

    elements: tuple[Expr, ...]
    checks: tuple[Check, ...] = ()
    is_view: bool = False


@dataclass(frozen=True, slots=True)
class Cut:
    """`below` for the indices less than `at` along an axis, `above` for the others.

    `at` is the same for all indices, and may be any number. The pieces have no checks,
    and are no views.
    """

    axis: int
    at: Expr
    below: "Pointwise | Cut"
    above: "Pointwise | Cut"


@dataclass(frozen=True, slots=True)
class Reduction:
    """For each index of the result, `element` combined over `space`.

    combine   the name of an operation that may run in any order, or a function of the
              accumulators and the elements
    finish    for each result a function of the accumulators, over the result's axes
    is_associative   whether `combine`, a function, may combine neighbouring elements
                     before it combines them with those before them
    """

    space: tuple[Size, ...]
    init: tuple[Expr, ...]
    combine: str | Function
    element: tuple[Expr, ...]
    finish: tuple[Function, ...]
    is_associative: bool = False


@dataclass(frozen=True, slots=True)
class Prefix:
    """r[i] = combine(r[i - 1], element) along `axis`; `reverse` starts from the end."""

    axis: int
    init: Expr
    combine: Function
    element: Expr
    reverse: bool = False


@dataclass(frozen=True, slots=True)
class Scatter:
    """`base` with `value` at `position`, for each index of `space` where `keep` holds.

    combine   a function of the old element and the value, if it is not a replacement
    """

    base: Operand
    space: tuple[Size, ...]
    position: Index
    value: Expr
    combine: Function | None = None
    keep: Expr | None = None
    checks: tuple[Check, ...] = ()


@dataclass(frozen=True, slots=True)
class Compact:
    """The indices i < `length` for which `keep` holds, in ascending order."""

    length: Size
    keep: Expr


@dataclass(frozen=True, slots=True)
class Effect:
    """A definition without results, of checks alone.

    types   the types of values that are not computed, but must fit into memory
    """

    checks: tuple[Check, ...] = ()
    types: tuple[TensorType, ...] = ()

    @property
    def is_free(self) -> bool:
        """Whether no check guards anything."""
        return len(self.checks) > 0 and all(check.is_free for check in self.checks)


Definition: TypeAlias = (
    Pointwise
    | Cut
    | Reduction
    | Prefix
    | Scatter
    | Compact
    | Effect
    | Library
    | Callback
    | Invocation
)


def parameters(values: Sequence[Expr], name: str) -> tuple[Expr, ...]:
    """Return variables of the types of values, numbered if there are several."""
    names = [name] if len(values) == 1 else [f"{name}{k}" for k in range(len(values))]
    pairs = zip(names, values, strict=True)
    return tuple([e.read(Var(label, value.dtype)) for label, value in pairs])
