"""Long bodies as several functions, called one after the other.

LLVM's register allocator takes time quadratic in the length of a function: of 6,000
operations in one function it took nine tenths of the time to compile. A long body is
therefore divided into segments of about `LENGTH` statements, each a function of its
own. A segment gets the variables and buffers that it names as arguments; a variable of
a segment that later ones read too has a stack slot of the function around.

Loops of one form, as of a chain of a thousand products of matrices, are one segment
that is called for each, with what stands before them: LLVM compiles it once.

Statements that find memory or let buffers change their places remain in that function.
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
"""Statements of a segment, at any depth: some 3,000 instructions."""
_SHORT: Final = 8
"""Instructions of a statement; one of more counts for so many statements more."""
MOST_BUFFERS: Final = 64
"""Buffers that a segment names: the address of each is in a register from its start."""
_LOOP: Final = 16
"""A loop counts for so many more."""
_CALL: Final = 4
"""The length of a call, beside what it passes."""
_REPEATED: Final = 4
"""Loops of one form are one segment if there are so many."""


def is_long(statements: Sequence[Stmt], lengths: dict[Stmt, int]) -> bool:
    """Whether a body is to be divided.

    One that is long by a single statement is not: that is divided within. So the levels
    of a deep nest are no segments.

    Args:
        lengths: Those of statements that are known; others are added.
    """
    length = 0
    for statement in statements:
        # No more of it is walked than counts, however much is on the levels below.
        within = 0
        for inner in walk.statements([statement]):
            within += _length(inner, lengths)
            if within >= LENGTH:
                break
        length += min(within, LENGTH)
        if length > 2 * LENGTH:
            return True
    return False


class _Run(NamedTuple):
    """A statement; or a loop with those before it, of a form that is repeated."""

    statements: list[Stmt]
    form: Form | None = None


def emit(emitter: CpuEmitter, statements: Sequence[Stmt]) -> None:
    """Emit the statements of a long body, in the open scope."""
    _Body(statements).emit(emitter)


class _Body:
    """A long body.

    captures    the variables and buffers that each run takes from around it
    last_read   by variable, the number of the run that reads it last
    known       segments that are called for all runs of one form
    """

    def __init__(self, statements: Sequence[Stmt]) -> None:
        self.runs = list(_runs(statements))
        self.captures = [captured(run.statements) for run in self.runs]
        self.last_read = {
            var: k for k, (read, _) in enumerate(self.captures) for var in read
        }
        self.known: dict[Hashable, _Segment] = {}

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
        """Emit runs: those of a repeated form by calls, the others as they are."""
        numbered = enumerate(self.runs[first:last], first)
        for has_form, runs in groupby(numbered, lambda run: run[1].form is not None):
            if not has_form:
                emitter.straight([s for _, run in runs for s in run.statements])
                continue
            for k, (statements, form) in runs:
                segment = self.segment(emitter, k, k + 1, form)
                known = self.known.setdefault(segment.key(), segment)
                if known is segment:
                    segment.define(
                        partial(type(emitter).straight, statements=statements)
                    )
                segment.call(known)

    def segment(
        self, emitter: CpuEmitter, first: int, stop: int, form: Form | None = None
    ) -> "_Segment":
        """A segment of runs."""
        runs, captures = self.runs[first:stop], self.captures[first:stop]
        statements = chain(*(run.statements for run in runs))
        defined = {s.var: None for s in statements if isinstance(s, Let | Declare)}
        shared = [var for var in defined if self.last_read.get(var, 0) >= stop]
        variables, buffers = (
            dict.fromkeys(chain(*those)) for those in zip(*captures, strict=True)
        )
        taken = [var for var in variables if var not in defined]
        return _Segment(emitter, taken, list(buffers), shared, form)


def _runs(statements: Sequence[Stmt]) -> Iterator[_Run]:
    """The statements, those of one form together."""
    loops = list(_loops(statements))
    counts = Counter(form.key for _, form in loops if form)
    for run, form in loops:
        if form and counts[form.key] >= _REPEATED:
            yield _Run(run, form)
        else:
            yield from (_Run([statement]) for statement in run)


def _loops(statements: Sequence[Stmt]) -> Iterator[_Run]:
    """Each loop with the statements since the one before, and its form if there can be
    others like it."""
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
    """The runs in groups: of about `LENGTH`, or of those that stay."""
    group: list[_Run] = []
    length, stayed = 0, False
    buffers: set[Buffer] = set()
    for run in runs:
        stays, named = _stays(run), set[Buffer]()
        if run.form:
            more = _CALL + len(run.form.buffers) + len(run.form.variables)
        else:
            within = walk.statements(run.statements)
            more = sum([_length(s, lengths) for s in within])
            named = set(chain(*map(walk.buffers, run.statements)))
        is_full = length + more > LENGTH or len(buffers | named) > MOST_BUFFERS
        if group and (is_full or stays != stayed):
            yield group
            group, length, buffers = [], 0, set()
        group.append(run)
        length, stayed = length + more, stays
        buffers |= named
    yield group


def _length(statement: Stmt, lengths: dict[Stmt, int]) -> int:
    """About how much code a statement comes to, without what is in it; a vector loop
    has a tail and checks."""
    if statement not in lengths:
        work = sum(map(weight, walk.nodes(*walk.expressions(statement))))
        loop = _LOOP if isinstance(statement, For | While) else 0
        lengths[statement] = max(1, work // _SHORT) + loop
    return lengths[statement]


def _stays(run: _Run) -> bool:
    """Whether statements find memory, or let buffers change their places."""
    moves = (isinstance(s, Allocate | Swap) for s in walk.statements(run.statements))
    return run.form is None and any(moves)


class _Passed(NamedTuple):
    """An argument of a segment.

    take    lets it be found by the emitter of the function, in a register there
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
    """The register holds the site that is `number` in the statements."""
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
        """
        Args:
            variables, buffers: What the statements take from around them.
            shared: The variables that later statements read.
            form: What others have too for which the function is called, if any are.
        """
        self.emitter, self.shared, self.form = emitter, shared, form
        self.variables = variables
        self.name, self.may_stop, self.cost = "", False, Cost()
        private = set(chain(*emitter.private.values()))
        self.buffers = [b for b in buffers if b not in private]
        self.passed = list(self._passed())
        self.slots = [self._slot(var) for var in shared]

    def key(self) -> Hashable:
        """What runs have in common of which one function is that of all."""
        assert self.form is not None
        numbers, outer = self.form.variables, self.emitter
        own = set(self.buffers)
        return (
            self.form.key,
            tuple(buffer in own for buffer in self.form.buffers),
            tuple(var in outer.values.slots for var in self.variables),
            tuple(numbers[var] for var in self.shared),
            tuple(outer.memory.notes(buffer) for buffer in self.buffers),
        )

    def define(self, body: Callable[[CpuEmitter], None]) -> None:
        """Define the function, whose statements `body` emits."""
        outer = self.emitter
        self.name = outer.f.module.fresh("segment")
        given = [f"{passed.type_} %given{k}" for k, passed in enumerate(self.passed)]
        slots = [f"%slot{k}" for k in range(len(self.shared))]
        parameters = ", ".join(["ptr %block", *given, *(f"ptr {s}" for s in slots)])
        signature = f"internal i64 @{self.name}({parameters})"
        f = Function(outer.f.module, signature, f"noinline {HOT}")
        inner = outer.within(f, ProgramMemory.of(f, outer.memory))
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
        rest = f.take()
        f.insert(prologue[:-1])
        f.insert(inner.memory.starts)
        f.branch("first")
        f.insert(rest)
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
            # One function for several runs is told where each begins.
            if self.form is not None or outer.memory.root(buffer) is None:
                register = outer.memory.pointer_again(buffer)
                yield _Passed("ptr", register, partial(_at, buffer))
        if self.form is not None and self.form.first_site is not None:
            number = self.form.first_site
            yield _Passed("i64", outer.site(number), partial(_take_site, number))
        elif outer.first_site:
            yield _Passed("i64", outer.first_site, partial(_take_site, 0))

    def _slot(self, var: Var) -> str:
        """A slot in the function around for what later statements read."""
        values, f = self.emitter.values, self.emitter.f
        if var not in values.slots:
            values.slots[var] = f.slot(register_type(var.dtype), var.name)
        return values.slots[var]

    def call(self, first: "_Segment") -> None:
        """Call the function that `first` has defined; if it stops the program does, for
        the same reason."""
        outer, f = self.emitter, self.emitter.f
        given = [f"{passed.type_} {passed.register}" for passed in self.passed]
        slots = [f"ptr {slot}" for slot in self.slots]
        arguments = ", ".join(["ptr %block", *given, *slots])
        status = f.emit(f"call i64 @{first.name}({arguments})")
        outer.cost.add(self._cost_of(first))
        outer.values.forget_loads()
        if first.may_stop:
            go_on, stop = f.name("joined"), f.name("stopped")
            f.branch_if(f.emit(f"icmp ne i64 {status}, 0"), stop, go_on, RARE)
            f.start(stop)
            outer.leave(status)
            f.start(go_on)

    def _cost_of(self, first: "_Segment") -> Cost:
        """The cost of a run of the same form, in the variables of this one."""
        cost = first.cost
        if self is first or not cost.terms or not self.form or not first.form:
            return cost
        own = dict(zip(first.form.variables, self.form.variables, strict=True))

        def renamed(node: Expr) -> Expr | None:
            return e.read(own[node.attr]) if node.op == "var" else None

        terms = [e.rewrite(term, renamed) for term in cost.terms]
        return Cost(cost.fixed, terms, cost.unbounded, cost.polls)
