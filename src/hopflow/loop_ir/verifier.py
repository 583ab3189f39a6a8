"""The rules of the Loop IR, and the check that a program obeys them.

Scopes: a definition by `Let`, `Declare` or a `For` is visible in the rest of its body
and in the bodies inside it; the `head` of a `While` is visible in its test and its
body.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final, NoReturn

from hopflow import dtypes
from hopflow.dtypes import DType
from hopflow.errors import LoopIRError
from hopflow.loop_ir import walk
from hopflow.loop_ir.expr import Buffer, Expr, Var
from hopflow.loop_ir.printer import format_statement
from hopflow.loop_ir.program import (
    Accumulate,
    Allocate,
    Assign,
    Barrier,
    Call,
    Copy,
    Declare,
    For,
    HostCall,
    If,
    Invoke,
    Let,
    Program,
    Ref,
    Stmt,
    Store,
    Swap,
    Tick,
    Trap,
    While,
)
from hopflow.loop_ir.routines import ROUTINES
from hopflow.loop_ir.rules import call_fault, fault_of, ref_fault

COMBINES: Final = frozenset("add mul min max and or".split())
_AXES: Final = ("grid", "block", "thread")
_MASKED: Final = ("vector", "gang")
# The bindings that may enclose each binding, directly or not; serial may be anywhere.
_WITHIN: Final[dict[str, tuple[str, ...]]] = {
    "vector": ("serial", "gang", "threads", *_AXES),
    "gang": ("serial", "threads"),
    "threads": ("serial",),
    "grid": ("serial",),
    "block": ("serial", "grid"),
    "thread": ("serial", "grid", "block"),
}


def verify(program: Program) -> None:
    """Check that `program` obeys the rules of the Loop IR.

    Raises:
        LoopIRError: It does not. The message names the rule and the statement.
    """
    _Verifier(program).verify()


class _Verifier:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.names: dict[str, Var | Buffer] = {}
        self.buffers: dict[Buffer, None] = {}  # visible, in the order of their scopes
        # Visible only in the scope of their Allocate.
        self.allocated = walk.allocated(program.body)
        self.scope: dict[Var, str] = {}  # "let", "var", "loop" or "size"
        self.depth: dict[Var, int] = {}  # the number of loops around the definition
        self.loops: list[For] = []
        self.summed: set[Var] = set()  # accumulated in an open independent loop
        self.verified: dict[Expr, None] = {}  # in the order of their scopes
        self.statement: Stmt | None = None

    def fail(self, rule: str) -> NoReturn:
        where = ""
        if self.statement is not None:
            text = format_statement(self.statement).replace("\n", "\n      ")
            where = f"\n  in: {text}"
        raise LoopIRError(f"{self.program.name}: {rule}{where}")

    def require(self, holds: bool, rule: str) -> None:
        if not holds:
            self.fail(rule)

    # --- declarations

    def verify(self) -> None:
        program = self.program
        for function in program.functions:
            _Verifier(function).verify()
        for var in program.sizes:
            self.require(
                var.dtype is dtypes.int64, f"size `{var.name}` must be i64: {var.dtype}"
            )
            self.define(var, "size")
        updated = [b for b in program.inputs if b in program.outputs]
        for buffers, spaces in (
            ([b for b in program.inputs if b not in updated], ("input",)),
            (program.outputs, ("output",)),
            (program.arena, ("arena", "shared")),
            (program.constants, ("constant",)),
        ):
            for buffer in buffers:
                self.declare(buffer, spaces)
        with self.open_scope():
            for statement in program.body:
                self.check(statement)
            for buffer in program.outputs:
                self.require(
                    buffer in self.buffers,
                    f"the output `{buffer.name}` is allocated in a part of the program",
                )

    def claim_name(self, owner: Var | Buffer) -> None:
        if self.names.setdefault(owner.name, owner) is not owner:
            self.fail(f"the name `{owner.name}` stands for two things")

    def declare(self, buffer: Buffer, spaces: Sequence[str]) -> None:
        name = buffer.name
        self.require(buffer not in self.buffers, f"`{name}` is declared twice")
        self.claim_name(buffer)
        self.require(
            buffer.space in spaces,
            f"`{name}` is in {buffer.space}, and listed with {' and '.join(spaces)}",
        )
        if buffer not in self.allocated:
            self.shape(buffer)
            if buffer.space in ("input", "output"):
                self.compared(buffer)
        if buffer.strides is not None:
            self.require(buffer.space == "input", f"`{name}` must be dense: no input")
            self.require(
                len(buffer.strides) == len(buffer.shape),
                f"`{name}`: {len(buffer.shape)} axes, {len(buffer.strides)} strides",
            )
        self.check_data(buffer)
        if buffer not in self.allocated:
            self.buffers[buffer] = None

    def shape(self, buffer: Buffer) -> None:
        for extent in (*buffer.shape, *(buffer.strides or ())):
            loads = any(node.op == "load" for node in walk.nodes(extent))
            self.require(not loads, f"the shape of `{buffer.name}` reads memory")
            self.value(extent, dtypes.int64, f"an extent of `{buffer.name}`")

    def compared(self, buffer: Buffer) -> None:
        """Check that extents which the caller passes can be compared before use."""
        for extent in (*buffer.shape, *(buffer.strides or ())):
            self.require(
                extent.is_const or extent.op == "var",
                f"an extent or stride of `{buffer.name}`, which the caller gives, is "
                f"neither a constant nor a size: {extent!r}",
            )

    def check_data(self, buffer: Buffer) -> None:
        name, data = buffer.name, buffer.data
        self.require(
            (data is None) == (buffer.space != "constant"),
            f"`{name}` in {buffer.space} has {'no' if data is None else 'its'} data",
        )
        if data is not None:
            shape = tuple(extent.attr for extent in buffer.shape if extent.is_const)
            self.require(
                data.shape == shape and data.dtype == buffer.dtype.dtype,
                f"the data of `{name}` are {data.dtype}{list(data.shape)}",
            )

    # --- variables

    def define(self, var: Var, kind: str) -> None:
        self.claim_name(var)
        self.require(var not in self.scope, f"`{var.name}` is defined twice")
        self.scope[var] = kind
        self.depth[var] = len(self.loops)

    @contextmanager
    def open_scope(self) -> Iterator[None]:
        """Remove the definitions, and verified nodes, of a scope at its end."""
        variables, nodes, buffers = (
            len(self.scope),
            len(self.verified),
            len(self.buffers),
        )
        yield
        while len(self.buffers) > buffers:
            self.buffers.popitem()
        while len(self.scope) > variables:
            var, _ = self.scope.popitem()
            del self.depth[var]
        while len(self.verified) > nodes:
            self.verified.popitem()

    # --- expressions

    def value(self, expr: Expr, dtype: DType, role: str) -> None:
        """Check an expression, which must have `dtype`."""
        pending = [expr]
        while pending:
            node = pending[-1]
            below = [] if node in self.verified else [a for a in node.args]
            below = [a for a in below if a not in self.verified]
            if below:
                pending += reversed(below)
                continue
            pending.pop()
            if node not in self.verified:
                self.node(node)
                self.verified[node] = None
        self.require(
            expr.dtype is dtype, f"{role} must be {dtype}, and is {expr.dtype}"
        )

    def node(self, node: Expr) -> None:
        if node.op == "var":
            var = node.attr
            self.require(var in self.scope, f"`{var.name}` is read where it is unknown")
            self.require(
                var not in self.summed,
                f"`{var.name}` is read in an independent loop that accumulates it",
            )
        elif node.op == "load":
            self.check_visible(node.attr)
        fault = fault_of(node)
        if fault is not None:
            self.fail(fault)

    def check_visible(self, buffer: Buffer) -> None:
        self.require(
            buffer in self.buffers, f"`{buffer.name}` is no buffer of the program here"
        )
        if buffer.space == "shared":
            self.require(
                any(loop.binding.kind in _AXES for loop in self.loops),
                f"`{buffer.name}` in shared memory is used outside GPU axes",
            )

    def written(self, buffer: Buffer) -> None:
        self.check_visible(buffer)
        self.require(
            buffer.space not in ("input", "constant"),
            f"`{buffer.name}` in {buffer.space} is written",
        )

    def position(self, buffer: Buffer, at: Sequence[Expr]) -> None:
        self.require(
            len(at) == len(buffer.shape),
            f"`{buffer.name}` of {len(buffer.shape)} axes has {len(at)} indices",
        )
        for i in at:
            self.value(i, dtypes.int64, f"an index of `{buffer.name}`")

    # --- statements

    def body(self, statements: Sequence[Stmt]) -> list[Buffer]:
        """Check the statements of a scope. Return the buffers allocated in it."""
        before = len(self.buffers)
        with self.open_scope():
            for statement in statements:
                self.check(statement)
            return list(self.buffers)[before:]

    def check(self, s: Stmt) -> None:
        outer, self.statement = self.statement, s
        match s:
            case Let() | Declare():
                self.value(s.value, s.var.dtype, f"the value of `{s.var.name}`")
                self.define(s.var, "let" if isinstance(s, Let) else "var")
            case Assign() | Accumulate():
                self.change(s)
            case Store():
                self.written(s.buffer)
                self.position(s.buffer, s.indices)
                self.value(s.value, s.buffer.dtype, "the value stored")
            case For():
                self.loop(s)
            case While():
                with self.open_scope():
                    for statement in s.head:
                        self.check(statement)
                    self.statement = s
                    self.value(s.test, dtypes.bool_, "the test")
                    self.body(s.body)
            case If():
                self.value(s.test, dtypes.bool_, "the test")
                then = self.body(s.then)
                otherwise = self.body(s.else_)
                # Buffers that both sides allocate are visible after the branch.
                self.buffers.update(dict.fromkeys(b for b in then if b in otherwise))
            case Call():
                self.call(s)
            case _:
                self.other(s)
        self.statement = outer

    def other(self, s: Stmt) -> None:
        match s:
            case Copy():
                self.copy(s)
            case Swap():
                self.swap(s)
            case HostCall():
                self.host_call(s)
            case Tick():
                self.site(s.site)
                self.value(s.done, dtypes.int64, "the number of steps")
                self.value(s.total, dtypes.int64, "the number of all steps")
            case Invoke():
                self.invoke(s)
            case Trap():
                self.site(s.site)
                self.value(s.test, dtypes.bool_, "the test")
                self.require(len(s.values) <= 2, "a trap reports at most two values")
                for value in s.values:
                    self.require(
                        value.dtype.is_integer,
                        f"a trap reports integers, and not {value.dtype}",
                    )
                    self.value(value, value.dtype, "a value")
            case Barrier():
                self.barrier(s)
            case Allocate():
                self.allocation(s.buffer, again=s.again)
                self.require(
                    not s.keeps or (s.again and bool(s.buffer.shape)),
                    f"`{s.buffer.name}` keeps no rows: it is no stack that has some",
                )
            case _:
                self.fail(f"`{type(s).__name__}` is no statement")

    def change(self, s: Assign | Accumulate) -> None:
        var = s.var
        self.require(var in self.scope, f"`{var.name}` is changed where it is unknown")
        self.require(
            self.scope[var] == "var",
            f"`{var.name}` is changed, and was not made by a Declare",
        )
        for loop in self.loops[self.depth[var] :]:
            if isinstance(s, Accumulate) and loop.binding.kind in ("serial", "vector"):
                continue
            self.require(
                not loop.independent,
                f"`{var.name}` from outside the independent loop over "
                f"`{loop.var.name}` ({loop.binding.kind}) is changed in it",
            )
        if isinstance(s, Accumulate):
            self.require(s.combine in COMBINES, f"`{s.combine}` is no way to combine")
            fault = fault_of(Expr(s.combine, (s.value, s.value), s.value.dtype))
            if fault is not None:
                self.fail(fault)
        self.value(s.value, var.dtype, f"the value of `{var.name}`")

    def allocation(self, buffer: Buffer, *, again: bool) -> None:
        name, program = buffer.name, self.program
        self.require(
            buffer in program.outputs or buffer in program.arena,
            f"`{name}` is allocated, and is neither an output nor in the arena",
        )
        self.require(
            buffer.space != "shared", f"`{name}` in shared memory is allocated"
        )
        self.require(
            (buffer in self.buffers) is again,
            f"`{name}` is allocated {'again, and was not' if again else 'twice'}",
        )
        for loop in self.loops:
            self.require(
                loop.binding.kind in ("serial", "gang"),
                f"`{name}` is allocated in the loop over `{loop.var.name}`, bound to "
                f"{loop.binding.kind}",
            )
        self.shape(buffer)
        self.buffers[buffer] = None

    def copy(self, s: Copy) -> None:
        self.written(s.target)
        self.check_visible(s.source)
        a, b = s.target, s.source
        alike = a.dtype is b.dtype and len(a.shape) == len(b.shape)
        differ = any(
            m.is_const and n.is_const and m.attr != n.attr
            for m, n in zip(a.shape, b.shape, strict=False)
        )
        self.require(
            alike and not differ, f"`{a.name}` and `{b.name}` are of different types"
        )
        self.require(a is not b, f"`{a.name}` is copied to itself")

    def swap(self, s: Swap) -> None:
        for buffer in (s.a, s.b):
            self.check_visible(buffer)
            is_allocated_output = buffer.space == "output" and buffer in self.allocated
            self.require(
                buffer.space == "arena" or is_allocated_output,
                f"`{buffer.name}` in {buffer.space} is swapped, and not in the arena",
            )
        self.require(
            s.a.dtype is s.b.dtype and walk.same_shape(s.a.shape, s.b.shape),
            f"`{s.a.name}` and `{s.b.name}` are of different types",
        )
        self.require(
            (s.a in self.allocated) == (s.b in self.allocated),
            f"`{s.a.name}` and `{s.b.name}` are swapped, and one of them is allocated",
        )
        for loop in self.loops:
            # Serial iterations may find the two in either order, for each writes them
            # before it reads them. Parallel ones would share the names, except for
            # threads that have private copies of both.
            kind = loop.binding.kind
            self.require(
                not loop.independent
                or kind in ("serial", *_AXES)
                or (kind == "threads" and self.is_private(loop, s.a, s.b)),
                f"a swap stands in the independent loop over `{loop.var.name}`",
            )

    def is_private(self, loop: For, *buffers: Buffer) -> bool:
        """Return whether the buffers are used only in a loop."""
        inner, all_ = walk.uses(loop.body), walk.uses(self.program.body)
        return all(inner[b] == all_[b] for b in buffers)

    def site(self, site: int) -> None:
        self.require(
            0 <= site < len(self.program.sites),
            f"site {site} is none of the program's {len(self.program.sites)}",
        )

    # --- loops

    def loop(self, s: For) -> None:
        self.value(s.extent, dtypes.int64, "the extent")
        self.require(s.var.dtype is dtypes.int64, f"`{s.var.name}` must be i64")
        self.binding(s)
        summed = self.summed
        if s.independent:
            self.summed = summed | {
                x.var
                for x in walk.statements(s.body)
                if isinstance(x, Accumulate) and x.var in self.scope
            }
        verified, self.verified = (
            self.verified,
            {} if self.summed != summed else self.verified,
        )
        self.loops.append(s)
        with self.open_scope():
            self.define(s.var, "loop")
            for statement in s.body:
                self.check(statement)
        self.loops.pop()
        self.summed, self.verified = summed, verified
        if s.binding.kind == "threads":
            self.writes_its_own(s)

    def binding(self, s: For) -> None:
        kind, width = s.binding.kind, s.binding.width
        if kind == "serial":
            return
        self.require(
            s.independent, f"a loop that is not independent is bound to {kind}"
        )
        power = width > 0 and width & (width - 1) == 0
        self.require(
            power or kind not in _MASKED, f"{width} lanes: must be a power of two"
        )
        for loop in self.loops:
            outer = loop.binding.kind
            self.require(
                outer in _WITHIN[kind],
                f"a loop bound to {kind} stands in the one over `{loop.var.name}`, "
                f"bound to {outer}",
            )
        if kind == "vector":
            self.straight(s)

    def writes_its_own(self, loop: For) -> None:
        """Check that iterations on threads write elements that depend on their number,
        or buffers that only this loop names, which each thread has for itself."""
        inside = list(walk.statements(loop.body))
        by_iteration = walk.dependent(inside, loop.var)
        shared = {
            buffer: None
            for s in inside
            for buffer, at in _written(s)
            if not any(walk.names(i, by_iteration) for i in at)
        }
        for buffer in shared:
            self.require(
                buffer.space == "arena" and self.is_private(loop, buffer),
                f"all threads of the loop over `{loop.var.name}` write the same "
                f"elements of `{buffer.name}`",
            )

    def straight(self, s: For) -> None:
        """Check that a vector loop is straight-line code without outer assignments."""
        declared = {x.var for x in s.body if isinstance(x, Declare)}
        for x in s.body:
            self.require(
                isinstance(x, (Let, Declare, Store, Accumulate))
                or (isinstance(x, Assign) and x.var in declared),
                f"a vector loop cannot hold `{type(x).__name__}`"
                + (" of a variable from outside" if isinstance(x, Assign) else ""),
            )

    def barrier(self, s: Barrier) -> None:
        kinds = [loop.binding.kind for loop in self.loops]
        self.require(
            s.scope in kinds, f"a {s.scope} barrier stands outside a {s.scope} axis"
        )

    # --- routines

    def call(self, s: Call) -> None:
        fault = call_fault(s)
        if fault is not None:
            self.fail(fault)
        arrays = ROUTINES[s.routine].arrays
        for array, arg in zip(arrays, s.args, strict=False):
            assert isinstance(arg, Ref)
            if array.role == "in":
                self.check_visible(arg.buffer)
            else:
                self.written(arg.buffer)
        for value in walk.expressions(s):
            self.value(value, value.dtype, "an argument")
        if s.site is not None:
            self.site(s.site)

    def host_call(self, s: HostCall) -> None:
        self.site(s.site)
        self.refs(s)
        self.calls_python()

    def invoke(self, s: Invoke) -> None:
        function = s.function
        self.require(
            function in self.program.functions,
            f"`{function.name}` is no function of the program",
        )
        if function.sites:
            self.site(s.site)
            self.site(s.site + len(function.sites) - 1)
        for name, arguments, parameters in (
            ("sizes", s.sizes, function.sizes),
            ("operands", s.operands, function.inputs),
            ("results", s.results, function.outputs),
        ):
            self.require(
                len(arguments) == len(parameters),
                f"`{function.name}` has {len(parameters)} {name}, and is given "
                f"{len(arguments)}",
            )
        for size in s.sizes:
            self.value(size, dtypes.int64, "a size")
        self.refs(s)

    def refs(self, s: HostCall | Invoke) -> None:
        """Check the memory that a call reads and writes."""
        for ref in s.refs:
            name = ref.buffer.name
            self.require(ref.buffer.strides is None, f"`{name}` must be dense")
            fault = ref_fault(ref)
            if fault is not None:
                self.fail(fault)
            for i in ref.expressions:
                self.value(i, dtypes.int64, f"an index of `{name}`")
        for ref in s.operands:
            self.check_visible(ref.buffer)
        for ref in s.results:
            self.written(ref.buffer)

    def calls_python(self) -> None:
        for loop in self.loops:
            self.require(
                not loop.independent,
                f"Python is called in the independent loop over `{loop.var.name}`",
            )


def _written(s: Stmt) -> Iterator[tuple[Buffer, tuple[Expr, ...]]]:
    """Yield the buffers that a statement itself writes, and at which indices."""
    match s:
        case Store(buffer, indices):
            yield buffer, indices
        case Copy(target):
            yield target, ()
        case Call(routine, args):
            for array, arg in zip(ROUTINES[routine].arrays, args, strict=False):
                if array.role != "in" and isinstance(arg, Ref):
                    yield arg.buffer, arg.at
        case HostCall() | Invoke():
            yield from ((ref.buffer, ref.at) for ref in s.results)
