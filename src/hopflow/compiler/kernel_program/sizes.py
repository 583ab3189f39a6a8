"""Expressions that are sizes, and what holds of sizes whatever their symbols are."""

from hopflow.loop_ir.expr import Expr
from hopflow.symbolic.facts import NOTHING
from hopflow.symbolic.scalars import terms_of
from hopflow.symbolic.size import Size


def size_of_expr(x: Expr) -> Size | None:
    """The size that an expression is, if it is one."""
    if x.is_const or x.op == "size":
        size: Size = x.attr
        return size
    if x.op in ("add", "sub"):
        a, b = map(size_of_expr, x.args)
        if a is not None and b is not None:
            return a + b if x.op == "add" else a - b
    return None


def at_least(a: Size, b: Size) -> bool:
    """Whether `a >= b`, by the ranges of symbols alone: what else is known of them may
    come from a check that is still to be made."""
    return NOTHING.range(terms_of(a - b)).low >= 0


def same_size(a: Size, b: Size) -> bool:
    """Whether two sizes are the same by their form."""
    return terms_of(a) == terms_of(b)
