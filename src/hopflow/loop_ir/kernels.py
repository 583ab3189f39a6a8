"""The kernels and regions that operations lower to, before loops exist.

`OpDef.lower(*operands, **params)` returns one `Kernel` for each result (a tuple if
there are several). A kernel defines each element as a pure function of its index; the
schedule decides where it is computed, fused or stored. Operators with subgraphs return
a region.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

from hopflow.graph.core import Graph
from hopflow.graph.types import TensorType, is_one
from hopflow.loop_ir.expr import Expr, Index, index
from hopflow.symbolic.size import Size


class Operand(Protocol):
    """A value as a lowering rule sees it: its type, and its elements by index."""

    @property
    def type(self) -> TensorType: ...

    def __getitem__(self, at: Index, /) -> Expr:
        """Return the element at `at`, one i64 expression for each axis, in range."""
        ...

    def where(self, condition: Expr, at: Index, otherwise: Expr) -> Expr:
        """Return the element at `at` if `condition` holds, and `otherwise` if not: then
        nothing is read, so `at` may be out of range."""
        ...


@dataclass(frozen=True, slots=True)
class Check:
    """`holds(i)` for all `i` in `shape`, or the program stops with an error of `kind`.

    It runs when the program reaches the operation, before any of its elements is
    computed.
    """

    kind: Literal["index", "divide", "power", "check", "range"]
    shape: tuple[Size, ...]
    holds: Callable[[Index], Expr]
    values: Callable[[Index], tuple[Expr, ...]] = field(default=lambda _: ())


@dataclass(frozen=True, slots=True)
class Pointwise:
    """`element(i)` for each `i` in the result's shape.

    `is_view`: each element is an element of one operand, moved; never worth storing.
    """

    element: Callable[[Index], Expr]
    checks: tuple[Check, ...] = ()
    is_view: bool = False


@dataclass(frozen=True, slots=True)
class Reduction:
    """For each `i` in the result's shape, combine `element(i, r)` over `r` in `space`.

    element   returns one expression for each accumulator
    init      the initial values of the accumulators
    combine   a name ("add", "mul", "min", "max", "and", "or") for one accumulator with
              a neutral `init`: in any order; or a function (accumulators, elements) ->
              accumulators, applied in order of `r`
    finish    the result, from (i, accumulators); the first accumulator by default
    A reduction with several results is one `Reduction` with several `finish`.
    """

    space: tuple[Size, ...]
    init: tuple[Expr, ...]
    combine: str | Callable[[tuple[Expr, ...], tuple[Expr, ...]], tuple[Expr, ...]]
    element: Callable[[Index, Index], tuple[Expr, ...]]
    finish: tuple[Callable[[Index, tuple[Expr, ...]], Expr], ...] = (
        lambda _, accumulators: accumulators[0],
    )


@dataclass(frozen=True, slots=True)
class Prefix:
    """A cumulative reduction along `axis`: r[i] = combine(r[i - 1], element(i)).

    The first one along `axis` is `combine(init, element)`; `reverse` starts at the end.
    """

    axis: int
    init: Expr
    combine: Callable[[Expr, Expr], Expr]
    element: Callable[[Index], Expr]
    reverse: bool = False


@dataclass(frozen=True, slots=True)
class Scatter:
    """`base` with elements replaced: for each `u` in `space`, that at `position(u)`.

    combine   None to set, else (old, new) -> value. Updates of one position are applied
              in order of `u`.
    keep      None, or a test: updates for which it is false are dropped.
    """

    base: Operand
    space: tuple[Size, ...]
    position: Callable[[Index], Index]
    value: Callable[[Index], Expr]
    combine: Callable[[Expr, Expr], Expr] | None = None
    keep: Callable[[Index], Expr] | None = None
    checks: tuple[Check, ...] = ()


@dataclass(frozen=True, slots=True)
class Compact:
    """The `i` < `length` for which `keep((i,))` holds, ascending. The result has one
    axis: excess indices are dropped, and missing ones are 0."""

    length: Size
    keep: Callable[[Index], Expr]


@dataclass(frozen=True, slots=True)
class Library:
    """Results written by a routine of `loop_ir.routines` (GEMM, LAPACK, sort).

    For each index of the leading `batch` axes, which results and operands share, the
    routine takes dense row-major sub-arrays of the operands, of the results, and of
    the workspace, and then `scalars`.

    batch_axes   for each operand, which of these axes it has; empty: it has all
    overwrites   for each result, the operand that it starts as a copy of (LAPACK works
                 in place; that operand is then not passed itself), or None
    workspace    types of scratch arrays, without batch axes
    can_fail     the routine returns a status; if it is not 0, it is a "library" trap
    takes_transposed   each of the two operands may be transposed in memory: then the
                 routine's name has the suffix `_tn`, `_nt` or `_tt`
    """

    routine: str
    operands: tuple[Operand, ...]
    scalars: tuple[Expr, ...] = ()
    batch: int = 0
    batch_axes: tuple[tuple[int, ...], ...] = ()
    overwrites: tuple[int | None, ...] = (None,)
    workspace: tuple[TensorType, ...] = ()
    can_fail: bool = False
    takes_transposed: bool = False

    def index_of(self, number: int, at: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the index of an operand's sub-array for an index of the batch."""
        if not self.batch_axes:
            return at
        return tuple([at[axis] for axis in self.batch_axes[number]])


@dataclass(frozen=True, slots=True)
class Effect:
    """No result, only checks (`hf.check`)."""

    checks: tuple[Check, ...]


@dataclass(frozen=True, slots=True)
class Callback:
    """Results written by the node's Python function, from dense operands."""

    operands: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Invocation:
    """Results written by a function, the code of `graph`, from dense operands, one for
    each input of the graph."""

    graph: Graph
    operands: tuple[Operand, ...]


Kernel: TypeAlias = (
    Pointwise
    | Reduction
    | Prefix
    | Scatter
    | Compact
    | Library
    | Effect
    | Callback
    | Invocation
)


# --- regions: what operators with subgraphs lower to ----------------------------------


@dataclass(frozen=True, slots=True)
class Inline:
    """The results of a graph for these operands, in place."""

    graph: Graph
    operands: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Branch:
    """The results of `branches[selector]`, the only one that runs. `selector` is i64[]
    in range, or bool[] (then `branches` are the false and the true one, in this
    order)."""

    selector: Any
    branches: tuple[Graph, ...]
    operands: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class WhileLoop:
    """`carry, ys = body(invariants, carry)` while `test(invariants, carry)`.

    Both graphs take the inputs `(*before, *carry, *after)`: symbols, carry, captures.
    `test` returns a bool[]; `body` returns the carry, and values that are stacked along
    axis 0, one row for each step. More than `max_steps` steps are a "limit" trap;
    stacks are then allocated for so many rows, and otherwise grow.

    A loop with `ticks` reports its progress to Python. If it has `bounds`, operands or
    constants, it makes at most as many steps as from the first to the second.
    """

    test: Graph
    body: Graph
    before: tuple[Any, ...]
    carry: tuple[Any, ...]
    after: tuple[Any, ...]
    max_steps: int | None = None
    ticks: bool = False
    bounds: tuple[Any, Any] | None = None


@dataclass(frozen=True, slots=True)
class CountedLoop:
    """`length` steps of `body(*before, *carry, *slices, *after) -> (*carry, *ys)`.

    slices    `xs` indexed along axis 0 by the step; `ys` are stacked along axis 0
    reverse   steps run from the last index to the first
    independent   there is no carry, and steps may run in any order or in parallel
    unroll    by how many steps the code is unrolled
    ticks     whether the loop reports its progress to Python
    """

    body: Graph
    length: Size
    before: tuple[Any, ...]
    carry: tuple[Any, ...]
    xs: tuple[Any, ...]
    after: tuple[Any, ...]
    reverse: bool = False
    independent: bool = False
    unroll: int = 1
    ticks: bool = False


Region: TypeAlias = Inline | Branch | WhileLoop | CountedLoop
Lowered: TypeAlias = Kernel | tuple[Kernel, ...] | Region


# --- helpers that lowering rules share ------------------------------------------------


def broadcast_index(at: Index, shape: Sequence[Size]) -> Index:
    """Return the index into an operand of `shape` for a broadcast result's index."""
    offset = len(at) - len(shape)
    return tuple(
        index(0) if is_one(n) else at[offset + axis] for axis, n in enumerate(shape)
    )


def elements(operand: Operand, at: Index) -> Expr:
    """Return the element of `operand` that is broadcast to `at` in the result."""
    return operand[broadcast_index(at, operand.type.shape)]
