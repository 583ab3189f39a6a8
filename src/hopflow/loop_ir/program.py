"""The Loop IR: buffers, loops, branches and stores, ready for code generation.

A `Program` is what one native entry runs. Its statements are structured; scalars are
`Var`s, set once by `Let` or changed by `Assign`; memory is `Buffer`s, with one i64
index for each axis. An expression is evaluated at its statement.
"""

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from hopflow.graph.types import TensorType
from hopflow.loop_ir.expr import Buffer, Expr, Var
from hopflow.symbolic.size import Symbol, SymInt


@dataclass(frozen=True, slots=True)
class Binding:
    """How the iterations of a `For` run. All but "serial" require an independent loop
    ("vector" also allows `Accumulate`).

    serial   in order; code is unrolled by `width`
    vector   `width` iterations as one vector instruction; the body has no control flow
    gang     `width` lanes under masks, control flow allowed (the ISPC model)
    threads  chunks over a thread pool
    grid, block, thread   the axes of a GPU launch
    """

    kind: Literal["serial", "vector", "gang", "threads", "grid", "block", "thread"]
    width: int = 1


SERIAL = Binding("serial")
THREADS = Binding("threads")


@dataclass(eq=False, slots=True)
class Let:
    """Define `var`, which is constant in its scope (the enclosing body)."""

    var: Var
    value: Expr


@dataclass(eq=False, slots=True)
class Declare:
    """Declare a mutable `var` with an initial value."""

    var: Var
    value: Expr


@dataclass(eq=False, slots=True)
class Assign:
    """Change a mutable `var`."""

    var: Var
    value: Expr


@dataclass(eq=False, slots=True)
class Accumulate:
    """`var = combine(var, value)`, in an order that the code generator chooses; see
    `docs/notes/numerics_and_bits.md` for what the order may depend on.

    combine is one of add, mul, min, max, and, or.
    """

    var: Var
    combine: str
    value: Expr


@dataclass(eq=False, slots=True)
class Store:
    buffer: Buffer
    indices: tuple[Expr, ...]
    value: Expr


@dataclass(eq=False, slots=True)
class Copy:
    """Copy all of `source` to `target`, of the same shape; they do not overlap.

    nodes   see `For`
    """

    target: Buffer
    source: Buffer
    nodes: tuple[int, ...] = ()


@dataclass(eq=False, slots=True)
class Swap:
    """Exchange the memory of two buffers of one shape (double buffering of a carry),
    both in the arena, or both allocated by an `Allocate`."""

    a: Buffer
    b: Buffer


@dataclass(eq=False, slots=True)
class For:
    """Run `body` for `var` = 0 .. `extent` - 1. `independent` is proven: no iteration
    reads or writes memory that another one writes (except by `Accumulate`).

    nodes   the nodes of the graph that it computes, by the numbers that a `Site` has:
            first those whose results it stores
    """

    var: Var
    extent: Expr
    body: "list[Stmt]"
    independent: bool = False
    binding: Binding = SERIAL
    nodes: tuple[int, ...] = ()


@dataclass(eq=False, slots=True)
class While:
    """Run `head`, then evaluate `test`; while it holds, run `body` and `head` again.

    nodes   see `For`
    """

    head: "list[Stmt]"
    test: Expr
    body: "list[Stmt]"
    nodes: tuple[int, ...] = ()


@dataclass(eq=False, slots=True)
class If:
    test: Expr
    then: "list[Stmt]"
    else_: "list[Stmt]" = field(default_factory=list)


@dataclass(frozen=True, eq=False, slots=True)
class Ref:
    """The dense sub-array `buffer[at]`, where `at` indexes leading axes only.

    rows   the sub-array has so many indices of the last of these axes, from the one in
           `at` on; None: it has that index alone, and not the axis
    """

    buffer: Buffer
    at: tuple[Expr, ...] = ()
    rows: Expr | None = None

    @property
    def shape(self) -> tuple[Expr, ...]:
        inner = self.buffer.shape[len(self.at) :]
        return inner if self.rows is None else (self.rows, *inner)

    @property
    def expressions(self) -> tuple[Expr, ...]:
        """The expressions of its position and its rows."""
        return self.at if self.rows is None else (*self.at, self.rows)


@dataclass(eq=False, slots=True)
class Call:
    """Call a library routine: "gemm", "potrf", ... (see `loop_ir.routines`).

    args    sub-arrays (read or written, as the routine declares) and scalar expressions
    site    the site at which a failure traps, or None
    nodes   see `For`
    """

    routine: str
    args: tuple[Ref | Expr, ...]
    site: int | None = None
    nodes: tuple[int, ...] = ()


@dataclass(eq=False, slots=True)
class HostCall:
    """Call Python, which reads all operands and writes all results.

    site   the site whose node in the graph has the function
    nodes  see `For`
    """

    site: int
    operands: tuple[Ref, ...]
    results: tuple[Ref, ...]
    nodes: tuple[int, ...] = ()

    @property
    def refs(self) -> tuple[Ref, ...]:
        return (*self.operands, *self.results)


@dataclass(eq=False, slots=True)
class Tick:
    """Report the progress of a loop to Python, unless this site reported a moment ago
    or another thread has started the program.

    done    the number of completed steps
    total   the trip count; negative if it is unknown
    ends    the loop has ended, and reports even if `done` equals `total`
    always  it reports however recent the last report is
    """

    site: int
    done: Expr
    total: Expr
    ends: bool = False
    always: bool = False


@dataclass(eq=False, slots=True)
class Invoke:
    """Call a function of the program, which reads all operands and writes all results.
    They do not overlap, except for a result that is an operand in the function, too.

    sizes  the values of the function's sizes
    site   the first of the program's sites that are the function's in this call
    nodes  see `For`; those of the function are numbered from the one after these
    """

    function: "Program"
    sizes: tuple[Expr, ...]
    operands: tuple[Ref, ...]
    results: tuple[Ref, ...]
    site: int
    nodes: tuple[int, ...] = ()

    @property
    def refs(self) -> tuple[Ref, ...]:
        return (*self.operands, *self.results)

    @property
    def passed(self) -> tuple[Ref, ...]:
        """The memory that the function is passed, each once."""
        pairs = zip(self.results, self.function.outputs, strict=True)
        results = [ref for ref, b in pairs if b not in self.function.inputs]
        return (*self.operands, *results)


@dataclass(eq=False, slots=True)
class Trap:
    """Stop the program with `site` as its status if `test` holds.

    `site` indexes `Program.sites`. `values`, up to two integers, are reported with it.
    """

    test: Expr
    site: int
    values: tuple[Expr, ...] = ()


@dataclass(eq=False, slots=True)
class Barrier:
    """Wait until all iterations of the enclosing `block` or `grid` have arrived."""

    scope: Literal["block", "grid"]


@dataclass(eq=False, slots=True)
class Allocate:
    """Allocate memory for a buffer in the arena or an output, of its current shape.

    Its contents are undefined. The memory is freed when the program ends, or passes to
    the caller; in a loop, an iteration may reuse that of the previous one. Memory that
    is too small is replaced by at least twice as much. The lanes of a gang share it:
    those that allocate it agree on the shape.

    again   whether the buffer has memory already, of another shape
    keeps   whether it keeps its contents, as a stack that grows by rows
    """

    buffer: Buffer
    again: bool = False
    keeps: bool = False


Stmt: TypeAlias = (
    Let
    | Declare
    | Assign
    | Accumulate
    | Store
    | Copy
    | Swap
    | For
    | While
    | If
    | Call
    | HostCall
    | Invoke
    | Tick
    | Trap
    | Barrier
    | Allocate
)

Timed: TypeAlias = Copy | For | While | Call | HostCall | Invoke
"""The statements that may take long; they know the nodes that they compute."""


Kind: TypeAlias = Literal[
    "index",
    "divide",
    "power",
    "check",
    "range",
    "limit",
    "memory",
    "library",
    "callback",
    "progress",
    "bounds",
    "size",
]


@dataclass(frozen=True, slots=True)
class Site:
    """A point where a program may stop, or calls Python: an error kind, "callback" or
    "progress", and the node of the graph that it comes from.

    `node` is the node's number in a depth-first walk of the *graph*, so that equal
    graphs that share a kernel still report their own source lines and messages. A site
    of kind "bounds" has no node; its `detail` describes the access and the buffer.
    """

    kind: Kind
    node: int
    detail: str = ""


@dataclass(frozen=True, slots=True)
class DerivedSize:
    """A size of a program that its caller computes from the values of the symbols.

    node   the number of the first node that uses it; see `Site`
    """

    size: SymInt
    node: int


@dataclass(frozen=True, slots=True)
class SizedType:
    """The type of a value of a program, over the program's symbols, and the number of
    the node that computes it."""

    type: TensorType
    node: int


@dataclass(eq=False, slots=True)
class Program:
    """One native entry: `sizes` are i64 parameters, then inputs, then outputs.

    An "output" buffer that is also among the inputs is updated in place. For an output
    with an `Allocate`, the caller passes words into which the program writes the
    address of the data, and the shape.

    symbols     the symbols whose values are the first sizes
    derived     the definitions of the last sizes: the caller computes them exactly, and
                the program does not compute them again
    types       of values whose sizes depend on the symbols alone: the caller rejects
                sizes at which one of them could not be addressed
    functions   the programs that `Invoke` calls, with sites of their own, from 0 on
    """

    name: str
    sizes: list[Var]
    inputs: list[Buffer]
    outputs: list[Buffer]
    arena: list[Buffer]
    constants: list[Buffer]
    body: list[Stmt]
    sites: list[Site]
    symbols: list[Symbol] = field(default_factory=list)
    derived: list[DerivedSize] = field(default_factory=list)
    types: list[SizedType] = field(default_factory=list)
    functions: "list[Program]" = field(default_factory=list)
