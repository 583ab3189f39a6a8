"""Which indices of a loop's body are linear in its variable."""

from collections.abc import Mapping
from typing import Self, TypeAlias

from hopflow.compiler.llvm.expressions import MATH_WORK
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import MATH, Expr, Var
from hopflow.loop_ir.program import Accumulate, Assign, Declare, For, Let, Store

Form: TypeAlias = tuple[Expr, Expr]
"""`(coefficient, offset)`: the expression is `coefficient * variable + offset`, and
neither depends on the variable."""


class Affine:
    """What expressions are in one variable.

    It is that of a loop whose iterations become lanes.
    """

    def __init__(self, var: Var, lets: Mapping[Var, Expr], varying: set[Var]) -> None:
        """
        Args:
            lets: Variables that may be replaced by these values.
            varying: Those that differ between iterations; whoever finds another adds it
                before anything is asked of an expression that reads it.
        """
        self._var, self._lets, self._varying = var, lets, varying
        self._uniform: dict[Expr, bool] = {}

    @classmethod
    def of_straight(cls, loop: For) -> Self:
        """The analysis of one loop with a straight body."""
        lets = {s.var: s.value for s in loop.body if isinstance(s, Let)}
        declared = {s.var for s in loop.body if isinstance(s, Declare)}
        affine = cls(loop.var, lets, {loop.var} | declared)
        for var, value in lets.items():
            if not affine.is_uniform(value):
                affine._varying.add(var)
        for s in loop.body:
            if isinstance(s, (Store, Accumulate, Declare, Assign)):
                affine.is_uniform(s.value)
        return affine

    @property
    def size(self) -> int:
        """About the number of operations of an iteration."""
        return sum(
            MATH_WORK if node.op in MATH else 1
            for node, is_uniform in self._uniform.items()
            if not is_uniform
        )

    def is_uniform(self, expr: Expr) -> bool:
        """Whether `expr` has the same value in all iterations."""
        memo = self._uniform
        known = memo.get(expr)
        if known is not None:
            return known
        pending = [expr]
        while pending:
            node = pending[-1]
            below = [a for a in node.args if a not in memo]
            if below:
                pending += below
            else:
                pending.pop()
                own = node.op != "var" or node.attr not in self._varying
                memo[node] = own and all(memo[a] for a in node.args)
        return memo[expr]

    def of(self, expr: Expr) -> Form | None:
        """The linear form of an i64 expression, if it has one."""
        if self.is_uniform(expr):
            return e.index(0), expr
        match expr.op:
            case "var":
                if expr.attr is self._var:
                    return e.index(1), e.index(0)
                value = self._lets.get(expr.attr)
                return self.of(value) if value is not None else None
            case "add" | "sub":
                x, y = (self.of(a) for a in expr.args)
                if x is None or y is None:
                    return None
                combine = e.add if expr.op == "add" else e.sub
                return combine(x[0], y[0]), combine(x[1], y[1])
            case "mul":
                return self._product(*expr.args)
            case "neg":
                form = self.of(expr.args[0])
                zero = e.index(0)
                return form and (e.sub(zero, form[0]), e.sub(zero, form[1]))
        return None

    def _product(self, x: Expr, y: Expr) -> Form | None:
        if not self.is_uniform(y):
            x, y = y, x
        form = self.of(x) if self.is_uniform(y) else None
        return form and (e.mul(form[0], y), e.mul(form[1], y))
