"""Substitution of deferred values: their expressions, at the index of each reader.

An expression is built once, for the equation that stores it: below that, each value
with one reader is expanded where it is read. So a chain of values takes time linear in
its length. A value with several readers is expanded once, over its own axes, and its
readers substitute their indices in the result.

The condition of a read applies to every read inside. Where it is false, no memory is
read, and the results are unused; but they must not divide by zero. The elements that
the condition itself reads are read everywhere.
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import Final, TypeAlias

from hopflow.compiler.kernel_program.definitions import axes
from hopflow.compiler.kernel_program.program import Value
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Expr, Index
from hopflow.loop_ir.walk import Interned, nodes

_Read: TypeAlias = tuple[Value, Index, Expr | None]
"""A value, the index and the condition of a read."""
_SEARCHED: Final = 16
"""About how many nodes of a condition are searched for reads."""


class Substitution:
    """Replaces reads of values by the expressions that define them."""

    def __init__(self) -> None:
        self._orders: dict[Value, Sequence[Expr]] = {}  # the nodes of expressions
        self._shared: dict[Value, Expr] = {}  # expanded expressions

    def __contains__(self, value: Value) -> bool:
        return value in self._orders

    def add(
        self, value: Value, order: Sequence[Expr], *, is_shared: bool = True
    ) -> None:
        """Replace reads of `value` by an expression over its axes.

        Args:
            order: The nodes of the expression, which is the last of them.
            is_shared: Whether the value is read more than once.
        """
        if is_shared:
            [self._shared[value]] = self._replaced(order, order[-1:])
            order = ()
        self._orders[value] = order

    def remove(self, value: Value) -> None:
        """Leave reads of `value` as they are from here on."""
        self._shared.pop(value, None)
        del self._orders[value]

    def order(self, value: Value) -> Sequence[Expr]:
        """Return the nodes of the expression of `value`, which may read other such
        values."""
        if not self._orders[value]:
            self._orders[value] = nodes(self._shared[value])
        return self._orders[value]

    def shared(self, value: Value) -> Expr | None:
        """Return the expression of `value` at its axes if it has several readers."""
        return self._shared.get(value)

    def at_axes(self, value: Value) -> Expr:
        """Return the expression of `value` at its own axes."""
        order = self._orders[value]
        return self._shared.get(value) or self._replaced(order, order[-1:])[0]

    def of(self, roots: Sequence[Expr]) -> list[Expr]:
        """Return these expressions with the reads replaced. Equal nodes become one
        node, which is computed once."""
        return self._replaced(nodes(*roots), roots)

    def _replaced(self, order: Sequence[Expr], roots: Sequence[Expr]) -> list[Expr]:
        expansion = _Expansion(order, {}, None)
        _Expander(self).expand(expansion)
        return [expansion.values[root] for root in roots]


def under(condition: Expr, root: Expr) -> Expr:
    """Return an expression that reads and divides only where a condition holds."""
    expander = _Expander(Substitution())
    expansion = _Expansion(nodes(root), {}, expander.interned.of(condition))
    expander.expand(expansion)
    return expansion.values[root]


class _Expansion:
    """An expression in which reads are being replaced.

    order      its nodes
    values     the replacements of nodes so far
    condition  the condition under which the expression is read
    done       how many nodes of `order` are replaced
    """

    __slots__ = ("condition", "done", "order", "values")

    def __init__(
        self, order: Sequence[Expr], values: dict[Expr, Expr], condition: Expr | None
    ) -> None:
        self.order, self.values, self.condition = order, values, condition
        self.done = 0


class _Expander:
    """Replaces reads in one list of expressions."""

    def __init__(self, elements: Substitution) -> None:
        self._elements = elements
        self.interned = Interned()
        self._memo: dict[_Read, Expr] = {}
        self._conditions = Conditions(self.interned)

    def expand(self, root: _Expansion) -> None:
        """Replace the reads in an expression, and in the values that it reads."""
        pending: list[tuple[_Expansion, _Read | None]] = [(root, None)]
        while pending:  # no recursion: a chain may be a thousand values long
            expansion, key = pending[-1]
            read = self._until_read(expansion)
            if read is not None:
                pending.append((self._expansion(read), read))
                continue
            pending.pop()
            if key is not None:
                self._memo[key] = expansion.values[expansion.order[-1]]

    def _expansion(self, read: _Read) -> _Expansion:
        value, at, condition = read
        values = dict(zip(axes(len(at)), at, strict=True))
        return _Expansion(self._elements.order(value), values, condition)

    def _until_read(self, expansion: _Expansion) -> _Read | None:
        """Replace nodes up to a read that has yet to be expanded. Return that read."""
        values, order = expansion.values, expansion.order
        condition, intern = expansion.condition, self.interned.node
        for number in range(expansion.done, len(order)):
            node = order[number]
            if node in values:  # an axis
                continue
            args = tuple([values[a] for a in node.args])
            if node.op == "element":
                replacement = self._element(node, args, condition)
                if isinstance(replacement, tuple):
                    expansion.done = number
                    return replacement
                values[node] = replacement
                continue
            if condition is not None and _divides(node):
                args = args[0], self._conditions.divisor(args[1], condition)
            values[node] = intern(e.with_args(node, args))
        return None

    def _element(self, node: Expr, args: Index, condition: Expr | None) -> Expr | _Read:
        """Return the replacement of an element, or a read to expand first."""
        value, at, inner = node.attr, args, None
        if e.condition_of(node) is not None:
            inner, at = args[-1], args[:-1]
            if inner.is_const and not inner.attr:
                return self.interned.node(e.const(0, node.dtype))
        condition = self._conditions.both(condition, inner)
        if value not in self._elements:
            return self.interned.node(self._conditional(node, at, condition))
        if condition is None and at == axes(len(at)):
            shared = self._elements.shared(value)
            if shared is not None:
                return self._memo.setdefault((value, at, None), shared)
        for key in ((value, at, None), (value, at, condition)):
            if key in self._memo:
                return self._memo[key]
        return value, at, condition

    def _conditional(self, node: Expr, at: Index, condition: Expr | None) -> Expr:
        """Return an element of memory. An element that the condition itself reads needs
        no condition."""
        read = node.attr, at
        if condition is not None and read in self._conditions.reads(condition):
            condition = None
        args = at if condition is None else (*at, condition)
        same = args == node.args
        return node if same else e.element(node.attr, node.dtype, at, condition)


def _divides(node: Expr) -> bool:
    """Return whether a node may stop the program."""
    return (
        node.op in ("div", "rem")
        and node.dtype.is_integer
        and not node.args[1].is_const
    )


class Conditions:
    """The conditions in one list of expressions, with memo tables of their parts."""

    def __init__(self, interned: Interned) -> None:
        self._interned = interned
        self._parts: dict[Expr, dict[Expr, None]] = {}
        self._reads: dict[Expr, AbstractSet[tuple[Value, Index]]] = {}
        self._both: dict[tuple[Expr, Expr], Expr] = {}

    def both(self, condition: Expr | None, inner: Expr | None) -> Expr | None:
        """Return the conjunction of the condition of a read and an `inner` one."""
        if inner is None or inner.is_const:
            return condition
        if condition is None:
            return inner
        key = condition, inner
        if key not in self._both:
            parts = self.parts(condition)
            both = condition
            for part in self.parts(inner):
                if part not in parts:
                    both = self._interned.node(e.binary("and", both, part))
            self._both[key] = both
        return self._both[key]

    def parts(self, condition: Expr) -> dict[Expr, None]:
        """Return the terms of a conjunction."""
        if condition not in self._parts:
            parts: dict[Expr, None] = {}
            pending = [condition]
            while pending:
                part = pending.pop()
                if part in self._parts:
                    parts |= self._parts[part]
                elif part.op == "and":
                    pending += part.args[::-1]
                else:
                    parts[part] = None
            self._parts[condition] = parts
        return self._parts[condition]

    def reads(self, condition: Expr) -> AbstractSet[tuple[Value, Index]]:
        """Return elements that are read to evaluate a condition, whether or not it
        holds. Of a long condition these are not all."""
        if condition not in self._reads:
            reads: set[tuple[Value, Index]] = set()
            for part in self.parts(condition):
                reads |= _reads(part) if part is condition else self.reads(part)
            self._reads[condition] = reads
        return self._reads[condition]

    def divisor(self, divisor: Expr, condition: Expr) -> Expr:
        """Return a divisor where a condition holds, and 1 elsewhere."""
        if divisor.op == "select":
            test, _, other = divisor.args
            holds = self.parts(condition).keys() <= self.parts(test).keys()
            if holds and other.is_const and other.attr == 1:
                return divisor
        one = self._interned.node(e.const(1, divisor.dtype))
        return self._interned.node(e.select(condition, divisor, one))


def _reads(condition: Expr) -> set[tuple[Value, Index]]:
    pending = [condition]
    for node in pending:
        if len(pending) < _SEARCHED:
            pending += node.args
    reads = (n for n in pending if n.op == "element" and e.condition_of(n) is None)
    return {(node.attr, node.args) for node in reads}
