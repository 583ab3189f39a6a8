"""The form of statements: that of others which differ in variables and buffers alone.

    for i2 in 0..8:                      for i7 in 0..8:
        b1[i2] = in0[i2] * t3                b6[i7] = b1[i7] * t9

have one form, in which variables and buffers are numbers in the order of the text, and
sites are counted from the first. Code for one is code for the other, given what it is
to read and write, and where its sites begin.
"""

from collections.abc import Hashable, Sequence

from hopflow.loop_ir import walk
from hopflow.loop_ir.expr import Buffer, Expr, Var
from hopflow.loop_ir.program import (
    Accumulate,
    Assign,
    Call,
    Copy,
    Declare,
    For,
    If,
    Let,
    Ref,
    Stmt,
    Store,
    Trap,
    While,
)


class Form:
    """The form of statements.

    key         what two have in common if they have the same form; None: there are
                statements that find memory, or call Python
    variables   those that are named, in the order of the text
    buffers     likewise
    first_site  the site that is named first; None: there is none
    """

    def __init__(self, statements: Sequence[Stmt]) -> None:
        self.variables: dict[Var, int] = {}
        self.buffers: dict[Buffer, int] = {}
        self.first_site: int | None = None
        self._nodes: dict[Expr, int] = {}
        self._tokens: list[Hashable] = []
        has_form = self._body(statements)
        self.key = tuple(self._tokens) if has_form else None

    def _body(self, statements: Sequence[Stmt]) -> bool:
        pending: list[Stmt | None] = [*reversed(statements)]
        while pending:
            statement = pending.pop()
            if statement is None:
                self._tokens.append("end")
            elif not self._statement(statement):
                return False
            else:
                for inner in reversed(walk.bodies(statement)):
                    pending += [None, *reversed(inner)]
        return True

    def _statement(self, statement: Stmt) -> bool:
        own: tuple[Hashable, ...]
        match statement:
            case Let() | Declare() | Assign():
                own = (self._variable(statement.var),)
            case Accumulate():
                own = (self._variable(statement.var), statement.combine)
            case Store():
                own = (self._buffer(statement.buffer),)
            case Copy():
                own = (self._buffer(statement.target), self._buffer(statement.source))
            case Trap():
                own = (self._site(statement.site),)
            case Call():
                own = (
                    statement.routine,
                    self._site(statement.site),
                    *map(self._argument, statement.args),
                )
            case For():
                own = (
                    self._variable(statement.var),
                    statement.independent,
                    statement.binding,
                )
            case While() | If():
                own = ()
            case _:
                return False
        roots = self._expressions(walk.expressions(statement))
        self._tokens.append((type(statement).__name__, own, roots))
        return True

    def _expressions(self, roots: Sequence[Expr]) -> tuple[int, ...]:
        for node in walk.nodes(*roots):
            if node not in self._nodes:
                args = tuple(self._nodes[a] for a in node.args)
                token = (node.op, node.dtype.name, args, self._attribute(node))
                self._nodes[node] = len(self._nodes)
                self._tokens.append(token)
        return tuple(self._nodes[root] for root in roots)

    def _argument(self, argument: Ref | Expr) -> Hashable:
        """An argument of a call, but for its expressions."""
        if not isinstance(argument, Ref):
            return None
        return self._buffer(argument.buffer), len(argument.at)

    def _site(self, site: int | None) -> int | None:
        if site is None:
            return None
        if self.first_site is None:
            self.first_site = site
        return site - self.first_site

    def _attribute(self, node: Expr) -> Hashable:
        match node.attr:
            case Var():
                return self._variable(node.attr)
            case Buffer():
                return self._buffer(node.attr)
            case float():  # 0.0 is not -0.0, and each NaN is one
                return node.attr.hex()
            case _:
                known: Hashable = node.attr
                return known

    def _variable(self, var: Var) -> int:
        if var not in self.variables:
            self.variables[var] = len(self.variables)
            self._tokens.append(("variable", var.dtype.name))
        return self.variables[var]

    def _buffer(self, buffer: Buffer) -> int:
        if buffer not in self.buffers:
            self.buffers[buffer] = len(self.buffers)
            strides = buffer.strides
            self._tokens.append(
                (
                    "buffer",
                    buffer.dtype.name,
                    buffer.space,
                    self._expressions(buffer.shape),
                    None if strides is None else self._expressions(strides),
                )
            )
        return self.buffers[buffer]
