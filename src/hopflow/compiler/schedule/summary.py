"""What loops read and write, in one look at each statement.

Passes over loops ask whether two loops may run as one, or in another order. A loop that
is merged from two has the union of what these have, so that nothing is walked twice.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from hopflow.compiler.kernel_passes.reads import weight
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Buffer, Index, Var
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
    Invoke,
    Ref,
    Stmt,
    Store,
    Swap,
    Tick,
    Trap,
)
from hopflow.loop_ir.routines import ROUTINES
from hopflow.loop_ir.walk import expressions, named, nodes, statements

_ORDERED = (Allocate, Barrier, Call, Copy, HostCall, Invoke, Swap, Tick, Trap)


@dataclass(slots=True)
class Summary:
    """What the iterations of a loop do.

    size        about how many instructions one is
    read        the variables that expressions name, those of the loop among them
    assigned    the variables that are given new values
    declared    those that an iteration makes itself
    stored      the buffers that are written, by element or as a whole
    touched     all buffers that are named
    axes        of each buffer, but of those that functions and Python are given, the
                axes at which the loop's own index always stands: iteration i touches
                only `[..., i, ...]`
    is_ordered  whether a statement must not change places with others
    """

    size: int = 0
    read: set[Var] = field(default_factory=set)
    assigned: set[Var] = field(default_factory=set)
    declared: set[Var] = field(default_factory=set)
    stored: set[Buffer] = field(default_factory=set)
    touched: set[Buffer] = field(default_factory=set)
    axes: dict[Buffer, set[int]] = field(default_factory=dict)
    is_ordered: bool = False

    @classmethod
    def of(cls, loop: For) -> "Summary":
        return Summaries().of(loop)

    @property
    def changed(self) -> set[Var]:
        """The variables from outside that the loop changes (or may: its own count)."""
        return self.assigned - self.declared

    def join(self, other: "Summary") -> None:
        """Add what another loop does, whose body comes after this one's."""
        self.size += other.size
        self.read |= other.read
        self.assigned |= other.assigned
        self.declared |= other.declared
        self.stored |= other.stored
        self.touched |= other.touched
        for buffer, axes in other.axes.items():
            self.axes[buffer] = self.axes.get(buffer, axes) & axes
        self.is_ordered = self.is_ordered or other.is_ordered


class _Facts:
    """What a statement does itself; see `Summary`.

    at   by access the buffer, and the variables that are the index along an axis
    """

    __slots__ = ("at", "is_ordered", "read", "size", "stored", "touched")

    def __init__(self, statement: Stmt) -> None:
        order = nodes(*expressions(statement))
        self.size = 1 + sum([weight(node) for node in order])
        self.read = [node.attr for node in order if node.op == "var"]
        accesses = list(_accesses(statement))
        self.stored = [buffer for buffer, _, is_written in accesses if is_written]
        accesses += [(n.attr, e.index_of(n), False) for n in order if n.op == "load"]
        self.at = [
            (buffer, [(i.attr, k) for k, i in enumerate(at) if i.op == "var"])
            for buffer, at, _ in accesses
        ]
        self.touched = [*named(statement), *(buffer for buffer, _ in self.at)]
        self.is_ordered = isinstance(statement, _ORDERED)


class Summaries:
    """What loops do. A statement is looked at once, however many loops are around."""

    def __init__(self) -> None:
        self._facts: dict[Stmt, _Facts] = {}
        self._loops: dict[For, Summary] = {}

    def add(self, loop: For, summary: Summary) -> None:
        self._loops[loop] = summary

    def of(self, loop: For) -> Summary:
        if loop not in self._loops:
            self._loops[loop] = self._found(loop)
        return self._loops[loop]

    def _found(self, loop: For) -> Summary:
        found = Summary()
        for statement in statements(loop.body):
            facts = self._facts.get(statement)
            if facts is None:
                facts = self._facts[statement] = _Facts(statement)
            found.size += facts.size
            found.read.update(facts.read)
            found.touched.update(facts.touched)
            found.stored.update(facts.stored)
            found.is_ordered = found.is_ordered or facts.is_ordered
            for buffer, at in facts.at:
                axes = {k for var, k in at if var is loop.var}
                found.axes[buffer] = found.axes.get(buffer, axes) & axes
            if isinstance(statement, Declare):
                found.declared.add(statement.var)
            elif isinstance(statement, Accumulate | Assign):
                found.assigned.add(statement.var)
        return found


def _accesses(statement: Stmt) -> Iterator[tuple[Buffer, Index, bool]]:
    """What a statement writes, and what it reads not by expressions: the buffer, the
    index as far as it is known, and whether it is written."""
    match statement:
        case Store():
            yield statement.buffer, statement.indices, True
        case Copy(target, source):
            yield target, (), True
            yield source, (), False
        case Swap(a, b):
            yield a, (), True
            yield b, (), True
        case Call(routine, args):
            writes = ROUTINES[routine].writes
            for k, ref in enumerate(args):
                if isinstance(ref, Ref):
                    single = ref.at if ref.rows is None else ref.at[:-1]
                    yield ref.buffer, single, k in writes


def reads(statement: Stmt, variables: set[Var], memory: set[Buffer]) -> bool:
    """Whether a statement itself, without those in it, reads one of these."""
    return any(
        (node.op == "var" and node.attr in variables)
        or (node.op == "load" and node.attr in memory)
        for node in nodes(*expressions(statement))
    )
