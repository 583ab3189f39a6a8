"""The form of statements, which is equal if only variables and buffers differ.

    for i2 in 0..8:                      for i7 in 0..8:
        b1[i2] = in0[i2] * t3                b6[i7] = b1[i7] * t9

have one form, in which variables and buffers are numbered in the order of the text, and
sites are counted from the first. The code of one also runs the other, if it is passed
the variables, the buffers and the first site.
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

    key         equal for statements of one form; None: a statement allocates memory or
                calls Python
    variables   the variables, in the order of the text
    buffers     the buffers, in the order of the text
    first_site  the first site that is used, or None
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
        attributes: tuple[Hashable, ...]
        match statement:
            case Let() | Declare() | Assign():
                attributes = (self._variable(statement.var),)
            case Accumulate():
                attributes = (self._variable(statement.var), statement.combine)
            case Store():
                attributes = (self._buffer(statement.buffer),)
            case Copy():
                attributes = (
                    self._buffer(statement.target),
                    self._buffer(statement.source),
                )
            case Trap():
                attributes = (self._site(statement.site),)
            case Call():
                attributes = (
                    statement.routine,
                    self._site(statement.site),
                    *map(self._argument, statement.args),
                )
            case For():
                attributes = (
                    self._variable(statement.var),
                    statement.independent,
                    statement.binding,
                )
            case While() | If():
                attributes = ()
            case _:
                return False
        roots = self._expressions(walk.expressions(statement))
        self._tokens.append((type(statement).__name__, attributes, roots))
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
        """Return an argument of a call, without its expressions."""
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
            case float():  # 0.0 is not -0.0, and all NaNs are equal
                return node.attr.hex()
            case _:
                attribute: Hashable = node.attr
                return attribute

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
