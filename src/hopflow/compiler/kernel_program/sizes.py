"""Expressions as sizes, and relations of sizes that hold for all symbols."""

from hopflow.loop_ir.expr import Expr
from hopflow.symbolic.facts import NOTHING
from hopflow.symbolic.scalars import terms_of
from hopflow.symbolic.size import Size


def size_of_expr(x: Expr) -> Size | None:
    """Return the size that an expression is, or None."""
    if x.is_const or x.op == "size":
        size: Size = x.attr
        return size
    if x.op in ("add", "sub"):
        a, b = map(size_of_expr, x.args)
        if a is not None and b is not None:
            return a + b if x.op == "add" else a - b
    return None


def at_least(a: Size, b: Size) -> bool:
    """Return whether `a >= b` by the ranges of symbols alone.

    Other facts about symbols may come from a check that has not run yet.
    """
    return NOTHING.range(terms_of(a - b)).low >= 0


def same_size(a: Size, b: Size) -> bool:
    """Return whether two sizes are equal as expressions."""
    return terms_of(a) == terms_of(b)
