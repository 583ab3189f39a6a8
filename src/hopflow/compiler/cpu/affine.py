"""The analysis of which indices in a loop's body are linear in its variable."""

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
    """Linear forms of expressions in a loop's variable, for iterations as lanes."""

    def __init__(self, var: Var, lets: Mapping[Var, Expr], varying: set[Var]) -> None:
        """Begin the analysis.

        Args:
            lets: Immutable variables, which may be replaced by these values.
            varying: Variables that differ between iterations. A caller that adds one
                does so before it asks about an expression that reads it.
        """
        self._var, self._lets, self._varying = var, lets, varying
        self._uniform: dict[Expr, bool] = {}
        self._forms: dict[Expr, Form | None] = {}

    @classmethod
    def of_straight(cls, loop: For) -> Self:
        """Return the analysis of a loop with a straight-line body."""
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
        """Return whether `expr` has the same value in all iterations."""
        memo = self._uniform
        uniform = memo.get(expr)
        if uniform is not None:
            return uniform
        pending = [expr]
        while pending:
            node = pending[-1]
            missing = [a for a in node.args if a not in memo]
            if missing:
                pending += missing
            else:
                pending.pop()
                is_fixed = node.op != "var" or node.attr not in self._varying
                memo[node] = is_fixed and all(memo[a] for a in node.args)
        return memo[expr]

    def of(self, expr: Expr) -> Form | None:
        """Return the linear form of an i64 expression, or None."""
        if expr not in self._forms:
            self._forms[expr] = self._form(expr)
        return self._forms[expr]

    def _form(self, expr: Expr) -> Form | None:
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
