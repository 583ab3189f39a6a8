"""The Loop IR: buffers, loops, branches and stores, ready to be emitted.

A `Program` is what one native entry runs. Its statements are structured; scalars are
`Var`s, set once by `Let` or changed by `Assign`; memory is `Buffer`s, indexed by one
i64 expression an axis. An expression is evaluated where its statement stands.
"""

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from hopflow.graph.types import TensorType
from hopflow.loop_ir.expr import Buffer, Expr, Var
from hopflow.symbolic.size import Symbol, SymInt


@dataclass(frozen=True, slots=True)
class Binding:
    """How the iterations of a `For` are run; any other than "serial" needs an
    independent axis ("vector" also takes `Accumulate`).

    serial   one after the other; code has `width` of them in a row
    vector   `width` iterations as one vector instruction; the body has no control flow
    gang     `width` lanes under masks, control flow allowed (the ISPC model)
    threads  chunks over a thread pool
    grid, block, thread   the axes of a GPU launch
    """

    kind: Literal["serial", "vector", "gang", "threads", "grid", "block", "thread"]
    width: int = 1


SERIAL = Binding("serial")


@dataclass(eq=False, slots=True)
class Let:
    """Define `var`; it never changes within its scope (the enclosing body)."""

    var: Var
    value: Expr


@dataclass(eq=False, slots=True)
class Declare:
    """Bring a mutable `var` to life with a first value."""

    var: Var
    value: Expr


@dataclass(eq=False, slots=True)
class Assign:
    """Change a mutable `var`."""

    var: Var
    value: Expr


@dataclass(eq=False, slots=True)
class Accumulate:
    """`var = combine(var, value)`, in an order of the emitter's choice; see
    `docs/notes/numerics_and_bits.md` for what it may depend on.

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
    """Copy all of `source` to `target`, of the same shape; they do not overlap."""

    target: Buffer
    source: Buffer


@dataclass(eq=False, slots=True)
class Swap:
    """Exchange the memory of two buffers of one shape (a doubled carry), both in the
    arena, or both made by an `Allocate`."""

    a: Buffer
    b: Buffer


@dataclass(eq=False, slots=True)
class For:
    """`body` for `var` = 0 .. `extent` - 1. `independent` is proven: no iteration reads
    or writes what another writes (but for `Accumulate`)."""

    var: Var
    extent: Expr
    body: "list[Stmt]"
    independent: bool = False
    binding: Binding = SERIAL


@dataclass(eq=False, slots=True)
class While:
    """Run `head`; while `test` (evaluated after it) holds: `body`, and `head` again."""

    head: "list[Stmt]"
    test: Expr
    body: "list[Stmt]"


@dataclass(eq=False, slots=True)
class If:
    test: Expr
    then: "list[Stmt]"
    else_: "list[Stmt]" = field(default_factory=list)


@dataclass(frozen=True, eq=False, slots=True)
class Ref:
    """The dense sub-array `buffer[at]`, where `at` indexes leading axes only.

    rows   how many indices of the last of these axes it has, from the one in `at` on;
           None: that one, and the sub-array is without the axis
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
        """Those that say where it is."""
        return self.at if self.rows is None else (*self.at, self.rows)


@dataclass(eq=False, slots=True)
class Call:
    """Call a library routine: "gemm", "potrf", ... (see `loop_ir.routines`).

    args    sub-arrays (read or written, as the routine says) and scalar expressions
    site    what the routine's failure reports (a `Trap` at this site), or None
    """

    routine: str
    args: tuple[Ref | Expr, ...]
    site: int | None = None


@dataclass(eq=False, slots=True)
class HostCall:
    """Call Python, which reads all of the operands and writes all of the results.

    site   says which node's function: what it is belongs to the graph
    """

    site: int
    operands: tuple[Ref, ...]
    results: tuple[Ref, ...]

    @property
    def refs(self) -> tuple[Ref, ...]:
        return (*self.operands, *self.results)


@dataclass(eq=False, slots=True)
class Tick:
    """Tell Python how far a loop is, unless it was told of this site a moment ago, or
    another thread has begun the program.

    done    the number of steps that were taken
    total   of all; negative: not known
    ends    there are no more: it is told though all is done
    always  however short ago it was told
    """

    site: int
    done: Expr
    total: Expr
    ends: bool = False
    always: bool = False


@dataclass(eq=False, slots=True)
class Invoke:
    """Call a function of the program, which reads all of the operands and writes all of
    the results; they do not overlap, but for a result that is an operand, as it is in
    the function.

    sizes  what the function's sizes are
    site   the first of the program's sites that are the function's in this call
    """

    function: "Program"
    sizes: tuple[Expr, ...]
    operands: tuple[Ref, ...]
    results: tuple[Ref, ...]
    site: int

    @property
    def refs(self) -> tuple[Ref, ...]:
        return (*self.operands, *self.results)

    @property
    def passed(self) -> tuple[Ref, ...]:
        """The memory that the function is given, once each."""
        pairs = zip(self.results, self.function.outputs, strict=True)
        own = [ref for ref, b in pairs if b not in self.function.inputs]
        return (*self.operands, *own)


@dataclass(eq=False, slots=True)
class Trap:
    """Leave the program with `site` as its status if `test` holds.

    `site` indexes `Program.sites`. `values`, up to two integers, are reported with it.
    """

    test: Expr
    site: int
    values: tuple[Expr, ...] = ()


@dataclass(eq=False, slots=True)
class Barrier:
    """All iterations of the enclosing `block` or `grid` arrive before any goes on."""

    scope: Literal["block", "grid"]


@dataclass(eq=False, slots=True)
class Allocate:
    """Make memory for a buffer in the arena or an output, of the shape that it has now.

    What was in it is gone. The memory is freed, or the caller's, when the program ends;
    in a loop an iteration may get that of the one before. Where there is some, and not
    enough, there will be twice as much, or more. The lanes of a gang share it: those
    that make it agree on the shape.

    again   whether the buffer has memory, of another shape
    keeps   whether what was in it stays: it is a stack that gets more rows
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
    """Where a program may stop, or calls Python: an error kind, "callback" or
    "progress", and which node of the graph it is from.

    `node` is the node's number in a depth-first walk of the *graph*, so that a kernel
    shared by equal graphs leads each to its own source line and message. A site of kind
    "bounds" is of no node, and says by itself what was done with which buffer.
    """

    kind: Kind
    node: int
    what: str = ""


@dataclass(frozen=True, slots=True)
class DerivedSize:
    """A size of a program that its caller computes from the values of the symbols.

    node   the number of the first node that asks for it; see `Site`
    """

    size: SymInt
    node: int


@dataclass(frozen=True, slots=True)
class SizedType:
    """The type of a value of a program, over the program's symbols, and the number of
    the node that makes it."""

    type: TensorType
    node: int


@dataclass(eq=False, slots=True)
class Program:
    """One native entry: `sizes` are i64 parameters, then inputs, then outputs.

    An "output" buffer that is among the inputs too holds both, one after the other.
    For an output that an `Allocate` makes the caller gives words: the program puts in
    the address of the data, and the shape.

    symbols     what the first of the sizes are the values of
    derived     what the last of the sizes are: the caller computes them exactly, and
                the program computes none of them again
    types       of values whose sizes the symbols decide: the caller refuses sizes at
                which one of them could not be addressed
    functions   what `Invoke` calls: programs with sites of their own, from 0 on
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
