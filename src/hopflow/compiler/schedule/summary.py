"""What a loop reads and writes, in one walk over its body.

Passes over loops ask whether two loops may run as one, or in another order. A loop that
is merged from two has the union of what these have, so that nothing is walked twice.
"""

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
from hopflow.loop_ir.walk import buffers, expressions, nodes, statements

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
        found = cls()
        for statement in statements(loop.body):
            found._add(statement, loop.var)
        return found

    @property
    def changed(self) -> set[Var]:
        """The variables from outside that the loop changes (or may: its own count)."""
        return self.assigned - self.declared

    def _add(self, statement: Stmt, own: Var) -> None:
        order = nodes(*expressions(statement))
        self.size += 1 + sum(map(weight, order))
        self.read.update(node.attr for node in order if node.op == "var")
        self.touched.update(buffers(statement))
        for node in order:
            if node.op == "load":
                self._access(node.attr, e.index_of(node), own)
        match statement:
            case Store():
                self.stored.add(statement.buffer)
                self._access(statement.buffer, statement.indices, own)
            case Copy(target, source):
                self.stored.add(target)
                self._access(target, (), own)
                self._access(source, (), own)
            case Swap(a, b):
                for buffer in (a, b):
                    self.stored.add(buffer)
                    self._access(buffer, (), own)
            case Call(routine, args):
                writes = ROUTINES[routine].writes
                for k, ref in enumerate(args):
                    if isinstance(ref, Ref):
                        self.stored.update([ref.buffer] if k in writes else ())
                        single = ref.at if ref.rows is None else ref.at[:-1]
                        self._access(ref.buffer, single, own)
            case Declare():
                self.declared.add(statement.var)
            case Accumulate() | Assign():
                self.assigned.add(statement.var)
        self.is_ordered = self.is_ordered or isinstance(statement, _ORDERED)

    def _access(self, buffer: Buffer, at: Index, own: Var) -> None:
        axes = {k for k, i in enumerate(at) if i.op == "var" and i.attr is own}
        self.axes[buffer] = self.axes.get(buffer, axes) & axes

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


def reads(statement: Stmt, variables: set[Var], memory: set[Buffer]) -> bool:
    """Whether a statement itself, without those in it, reads one of these."""
    return any(
        (node.op == "var" and node.attr in variables)
        or (node.op == "load" and node.attr in memory)
        for node in nodes(*expressions(statement))
    )
