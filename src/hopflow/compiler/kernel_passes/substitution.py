"""An element that is computed where it is read: its expression, at the reader's index.

A condition on the read goes to every read inside. Where it is false no memory is read,
and what is computed there is used by no one; it must not divide.
"""

from collections.abc import Mapping, Sequence

from hopflow.compiler.kernel_program.definitions import axes
from hopflow.compiler.kernel_program.program import Value
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Expr, Index
from hopflow.loop_ir.walk import nodes


class Substitution:
    """Replaces reads of values by the expressions that the values are.

    expressions   by value, over its axes; they read none of these values
    """

    def __init__(self) -> None:
        self.expressions: dict[Value, Expr] = {}
        self._orders: dict[Value, list[Expr]] = {}

    def add(self, value: Value, expression: Expr) -> None:
        """Have reads of `value` replaced by its `expression`."""
        self.expressions[value] = expression

    def remove(self, value: Value) -> Expr:
        """Have reads of `value` stay from here on; what they were replaced by."""
        self._orders.pop(value, None)
        return self.expressions.pop(value)

    def of(self, roots: Sequence[Expr]) -> list[Expr]:
        """These expressions, with such reads replaced. Reading a value twice at one
        index gives one node, which is computed once."""
        values: dict[Expr, Expr] = {}
        known: dict[tuple[Value, Index, Expr | None], Expr] = {}
        for node in nodes(*roots):
            args = tuple([values[a] for a in node.args])
            if node.op != "element" or node.attr not in self.expressions:
                values[node] = e.with_args(node, args)
                continue
            condition = args[-1] if e.condition_of(node) is not None else None
            at = args if condition is None else args[:-1]
            values[node] = self._element(node.attr, at, condition, known)
        return [values[root] for root in roots]

    def _element(
        self,
        value: Value,
        at: Index,
        condition: Expr | None,
        known: dict[tuple[Value, Index, Expr | None], Expr],
    ) -> Expr:
        if condition is not None and condition.is_const:
            if not condition.attr:
                return e.const(0, value.dtype)
            condition = None
        for key in ((value, at, None), (value, at, condition)):
            if key in known:
                return known[key]
        expression = self.expressions[value]
        if condition is not None or at != axes(len(at)):
            if value not in self._orders:
                self._orders[value] = nodes(expression)
            mapping = dict(zip(axes(len(at)), at, strict=True))
            expression = _substituted(self._orders[value], mapping, condition)
        known[value, at, condition] = expression
        return expression


def conjunction(condition: Expr | None, own: Expr | None) -> Expr | None:
    """The condition of a read that has one of its own within a conditional read."""
    if own is None or condition is None or own is condition:
        return own or condition
    return e.binary("and", condition, own)


def under(condition: Expr, root: Expr) -> Expr:
    """An expression that reads and divides only where a condition holds. What the
    condition itself reads is read everywhere."""
    read = {(node.attr, node.args) for node in nodes(condition) if node.op == "element"}
    order = nodes(root)
    kept = {x: x for x in order if x.op == "element" and (x.attr, x.args) in read}
    return _substituted(order, kept, condition)


def _substituted(
    order: Sequence[Expr], mapping: Mapping[Expr, Expr], condition: Expr | None
) -> Expr:
    """The last of these nodes with values for axes, and with a condition on reads."""
    values = dict(mapping)
    both: dict[Expr | None, Expr | None] = {}  # one node for one condition
    for node in order:
        if node in values:
            continue
        args = tuple([values[a] for a in node.args])
        if node.op == "element":
            own = args[-1] if e.condition_of(node) is not None else None
            if own not in both:
                both[own] = conjunction(condition, own)
            at = args if own is None else args[:-1]
            values[node] = e.element(node.attr, node.dtype, at, both[own])
            continue
        divides = node.op in ("div", "rem") and node.dtype.is_integer
        if divides and condition is not None and not args[1].is_const:
            safe = e.select(condition, args[1], e.const(1, node.dtype))
            args = args[0], safe
        values[node] = e.with_args(node, args)
    return values[order[-1]]
