"""Long bodies as several functions, called one after the other.

LLVM's register allocator takes time quadratic in the length of a function: of 6,000
operations in one function it took nine tenths of the time to compile. A long body is
therefore divided into segments of about `LENGTH` statements, each a function. The
arguments of a segment are the variables and buffers that it names; a variable of a
segment that later ones read has a stack slot of the enclosing function.

Loops of the same form, as in a chain of a thousand products of matrices, share one
segment with the statements before them: LLVM compiles it once.

Statements that allocate memory or swap buffers remain in the enclosing function.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from itertools import chain, groupby
from typing import Final, NamedTuple

from hopflow.compiler.cpu.captures import captured
from hopflow.compiler.cpu.cost import Cost
from hopflow.compiler.cpu.emitter import CpuEmitter
from hopflow.compiler.cpu.memory import ProgramMemory
from hopflow.compiler.cpu.target import HOT
from hopflow.compiler.kernel_passes.reads import weight
from hopflow.compiler.llvm.module import RARE, Function
from hopflow.compiler.llvm.types import register_type
from hopflow.loop_ir import expr as e
from hopflow.loop_ir import walk
from hopflow.loop_ir.expr import Buffer, Expr, Var
from hopflow.loop_ir.forms import Form
from hopflow.loop_ir.program import Allocate, Declare, For, Let, Stmt, Swap, While

LENGTH: Final = 1024
"""The statements of a segment, at any depth: some 3,000 instructions."""
_SHORT: Final = 8
"""The instructions that count as one statement."""
MOST_BUFFERS: Final = 64
"""The most buffers of a segment, each of whose addresses takes a register."""
_LOOP: Final = 16
"""The length that a loop adds."""
_CALL: Final = 4
"""The length of a call without its arguments."""
_REPEATED: Final = 4
"""From this number on, loops of one form share a segment."""


def is_long(statements: Sequence[Stmt], lengths: dict[Stmt, int]) -> bool:
    """Return whether a body is to be divided.

    A body that is long by a single statement is not, since the body of that statement
    is divided. Therefore the levels of a deep nest are no segments.

    Args:
        lengths: The lengths of statements, which this function adds to.
    """
    length = 0
    for statement in statements:
        # The walk stops at LENGTH, however much is on the levels below.
        size = 0
        for inner in walk.statements([statement]):
            size += _length(inner, lengths)
            if size >= LENGTH:
                break
        length += min(size, LENGTH)
        if length > 2 * LENGTH:
            return True
    return False


class _Run(NamedTuple):
    """A statement; or a loop and the statements before it, if its form is repeated."""

    statements: list[Stmt]
    form: Form | None = None


def emit(emitter: CpuEmitter, statements: Sequence[Stmt]) -> None:
    """Emit the statements of a long body, in the open scope."""
    _Body(statements).emit(emitter)


class _Body:
    """A long body.

    captures    the variables and buffers that each run captures
    last_read   by variable, the number of the last run that reads it
    segments    the segment of each form, which all its runs call
    """

    def __init__(self, statements: Sequence[Stmt]) -> None:
        self.runs = list(_runs(statements))
        self.captures = [captured(run.statements) for run in self.runs]
        self.last_read = {
            var: k for k, (read, _) in enumerate(self.captures) for var in read
        }
        self.segments: dict[Hashable, _Segment] = {}

    def emit(self, emitter: CpuEmitter) -> None:
        first = 0
        for group in _groups(self.runs, emitter.unit.lengths):
            last = first + len(group)
            if _stays(group[0]):
                emitter.straight([s for run in group for s in run.statements])
            elif len(group) == 1 and group[0].form:
                self.emit_runs(emitter, first, last)
            else:
                segment = self.segment(emitter, first, last)
                segment.define(partial(self.emit_runs, first=first, last=last))
                segment.call(segment)
            first = last

    def emit_runs(self, emitter: CpuEmitter, first: int, last: int) -> None:
        """Emit runs, those of a repeated form as calls."""
        numbered = enumerate(self.runs[first:last], first)
        for has_form, runs in groupby(numbered, lambda run: run[1].form is not None):
            if not has_form:
                emitter.straight([s for _, run in runs for s in run.statements])
                continue
            for k, (statements, form) in runs:
                segment = self.segment(emitter, k, k + 1, form)
                defined = self.segments.setdefault(segment.key(), segment)
                if defined is segment:
                    segment.define(
                        partial(type(emitter).straight, statements=statements)
                    )
                segment.call(defined)

    def segment(
        self, emitter: CpuEmitter, first: int, stop: int, form: Form | None = None
    ) -> "_Segment":
        """Return the segment of some runs."""
        runs, captures = self.runs[first:stop], self.captures[first:stop]
        statements = chain(*(run.statements for run in runs))
        defined = {s.var: None for s in statements if isinstance(s, Let | Declare)}
        shared = [var for var in defined if self.last_read.get(var, 0) >= stop]
        variables, buffers = (
            dict.fromkeys(chain(*names)) for names in zip(*captures, strict=True)
        )
        taken = [var for var in variables if var not in defined]
        return _Segment(emitter, taken, list(buffers), shared, form)


def _runs(statements: Sequence[Stmt]) -> Iterator[_Run]:
    """Yield the statements as runs: one for each loop of a repeated form."""
    loops = list(_loops(statements))
    counts = Counter(form.key for _, form in loops if form)
    for run, form in loops:
        if form and counts[form.key] >= _REPEATED:
            yield _Run(run, form)
        else:
            yield from (_Run([statement]) for statement in run)


def _loops(statements: Sequence[Stmt]) -> Iterator[_Run]:
    """Yield each loop with the statements since the one before.

    The form is None if no other run can have it.
    """
    run: list[Stmt] = []
    for statement in statements:
        run.append(statement)
        if isinstance(statement, For | While):
            form = Form(run)
            yield _Run(run, form if form.key is not None else None)
            run = []
    if run:
        yield _Run(run)


def _groups(runs: Sequence[_Run], lengths: dict[Stmt, int]) -> Iterator[list[_Run]]:
    """Yield the runs in groups of about `LENGTH`, or of runs that stay."""
    group: list[_Run] = []
    length, stayed = 0, False
    buffers: set[Buffer] = set()
    for run in runs:
        stays, named = _stays(run), set[Buffer]()
        if run.form:
            added = _CALL + len(run.form.buffers) + len(run.form.variables)
        else:
            statements = walk.statements(run.statements)
            added = sum([_length(s, lengths) for s in statements])
            named = set(chain(*map(walk.buffers, run.statements)))
        is_full = length + added > LENGTH or len(buffers | named) > MOST_BUFFERS
        if group and (is_full or stays != stayed):
            yield group
            group, length, buffers = [], 0, set()
        group.append(run)
        length, stayed = length + added, stays
        buffers |= named
    yield group


def _length(statement: Stmt, lengths: dict[Stmt, int]) -> int:
    """Return about how much code a statement becomes, without the statements in it.

    A vector loop has a tail and checks.
    """
    if statement not in lengths:
        work = sum(map(weight, walk.nodes(*walk.expressions(statement))))
        loop = _LOOP if isinstance(statement, For | While) else 0
        lengths[statement] = max(1, work // _SHORT) + loop
    return lengths[statement]


def _stays(run: _Run) -> bool:
    """Return whether statements allocate memory or swap buffers."""
    moves = (isinstance(s, Allocate | Swap) for s in walk.statements(run.statements))
    return run.form is None and any(moves)


class _Passed(NamedTuple):
    """An argument of a segment.

    take    tells the emitter of the function which register holds it
    """

    type_: str
    register: str
    take: Callable[[CpuEmitter, str], None]


def _in_slot(var: Var, inner: CpuEmitter, register: str) -> None:
    inner.values.slots[var] = register


def _in_register(var: Var, inner: CpuEmitter, register: str) -> None:
    inner.values.constants[var] = register


def _at(buffer: Buffer, inner: CpuEmitter, register: str) -> None:
    inner.memory.place(buffer, register)


def _take_arena(inner: CpuEmitter, register: str) -> None:
    inner.memory.arena = register


def _take_site(number: int, inner: CpuEmitter, register: str) -> None:
    """Set the first site, from a register with the site numbered `number`."""
    inner.first_site = inner.f.emit(f"sub i64 {register}, {number}")


class _Segment:
    """Statements as a function, and the call of it."""

    def __init__(
        self,
        emitter: CpuEmitter,
        variables: Sequence[Var],
        buffers: Sequence[Buffer],
        shared: Sequence[Var],
        form: Form | None,
    ) -> None:
        """Describe the function.

        Args:
            variables: The variables that the statements capture.
            buffers: The buffers that the statements name.
            shared: The variables that later statements read.
            form: The form of the runs that call the function, if it is repeated.
        """
        self.emitter, self.shared, self.form = emitter, shared, form
        self.variables = variables
        self.name, self.may_stop, self.cost = "", False, Cost()
        private = set(chain(*emitter.private.values()))
        self.buffers = [b for b in buffers if b not in private]
        self.passed = list(self._passed())
        self.slots = [self._slot(var) for var in shared]

    def key(self) -> Hashable:
        """Return a key that is equal for the runs that can call the same function."""
        assert self.form is not None
        numbers, outer = self.form.variables, self.emitter
        buffers = set(self.buffers)
        return (
            self.form.key,
            tuple(buffer in buffers for buffer in self.form.buffers),
            tuple(var in outer.values.slots for var in self.variables),
            tuple(numbers[var] for var in self.shared),
            tuple(outer.memory.notes(buffer) for buffer in self.buffers),
        )

    def define(self, body: Callable[[CpuEmitter], None]) -> None:
        """Define the function; `body` emits its statements."""
        outer = self.emitter
        self.name = outer.f.module.fresh("hf.segment")
        passed_ = [f"{passed.type_} %given{k}" for k, passed in enumerate(self.passed)]
        slots = [f"%slot{k}" for k in range(len(self.shared))]
        parameters = ", ".join(["ptr %block", *passed_, *(f"ptr {s}" for s in slots)])
        signature = f"internal i64 @{self.name}({parameters})"
        f = Function(outer.f.module, signature, f"noinline {HOT}")
        inner = outer.for_function(f, ProgramMemory.of(f, outer.memory))
        inner.private, inner.may_poll = outer.private, outer.may_poll
        if self.form is None:
            for buffer in self.buffers:
                if (root := outer.memory.root(buffer)) is not None:
                    inner.memory.place_by_root(buffer, root)
        for k, passed in enumerate(self.passed):
            passed.take(inner, f"%given{k}")
        f.branch("first")
        prologue = f.take()
        f.start("first")
        body(inner)
        for var, slot in zip(self.shared, slots, strict=True):
            type_ = register_type(var.dtype)
            f.do(f"store {type_} {inner.values.variable(var)}, ptr {slot}")
        inner.finish()
        f.start("exit")
        f.do(f"ret i64 {f.emit(f'load i64, ptr {inner.status}')}")
        statements = f.take()
        f.insert(prologue[:-1])
        f.insert(inner.memory.starts)
        f.branch("first")
        f.insert(statements)
        f.module.define(self.name, f.text)
        self.may_stop, self.cost = inner.may_stop, inner.cost

    def _passed(self) -> Iterator[_Passed]:
        outer = self.emitter
        for var in self.variables:
            if var in outer.values.slots:
                yield _Passed("ptr", outer.values.slots[var], partial(_in_slot, var))
            else:
                register = outer.values.constants[var]
                type_ = register_type(var.dtype)
                yield _Passed(type_, register, partial(_in_register, var))
        if self.form is None and outer.memory.arena:
            yield _Passed("ptr", outer.memory.arena, _take_arena)
        for buffer in self.buffers:
            # A function of several runs takes the address of each buffer.
            if self.form is not None or outer.memory.root(buffer) is None:
                register = outer.memory.pointer_again(buffer)
                yield _Passed("ptr", register, partial(_at, buffer))
        if self.form is not None and self.form.first_site is not None:
            number = self.form.first_site
            yield _Passed("i64", outer.site(number), partial(_take_site, number))
        elif outer.first_site:
            yield _Passed("i64", outer.first_site, partial(_take_site, 0))

    def _slot(self, var: Var) -> str:
        """Return the enclosing function's slot of a variable that is read later."""
        values, f = self.emitter.values, self.emitter.f
        if var not in values.slots:
            values.slots[var] = f.slot(register_type(var.dtype), var.name)
        return values.slots[var]

    def call(self, first: "_Segment") -> None:
        """Call the function of `first`; if it stops, so does the program."""
        outer, f = self.emitter, self.emitter.f
        values = [f"{passed.type_} {passed.register}" for passed in self.passed]
        slots = [f"ptr {slot}" for slot in self.slots]
        arguments = ", ".join(["ptr %block", *values, *slots])
        status = f.emit(f"call i64 @{first.name}({arguments})")
        outer.count_call(self._cost_of(first))
        outer.values.forget_loads()
        if first.may_stop:
            go_on, stop = f.name("joined"), f.name("stopped")
            f.branch_if(f.emit(f"icmp ne i64 {status}, 0"), stop, go_on, RARE)
            f.start(stop)
            outer.leave(status)
            f.start(go_on)

    def _cost_of(self, first: "_Segment") -> Cost:
        """Return the cost of a run of the same form, in the variables of this one."""
        cost = first.cost
        if self is first or not cost.terms or not self.form or not first.form:
            return cost
        renaming = dict(zip(first.form.variables, self.form.variables, strict=True))

        def renamed(node: Expr) -> Expr | None:
            return e.read(renaming[node.attr]) if node.op == "var" else None

        terms = [e.rewrite(term, renamed) for term in cost.terms]
        return Cost(cost.fixed, terms, cost.unbounded, cost.polls)
