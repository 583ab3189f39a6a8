"""Elements that are computed where they are read: their expressions, at the reader's
index.

An expression is built once, for the equation that keeps it: from there on down each
value that has one reader is expanded where it is read. So a chain of values takes time
linear in its length. A value of several readers is expanded over its own axes, once,
and they substitute their indices in that.

A condition on a read goes to every read inside. Where it is false no memory is read,
and what is computed there is used by no one; it must not divide. What the condition
itself reads is read everywhere.
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
"""How many nodes of a condition are searched for what it reads, about."""


class Substitution:
    """Replaces reads of values by the expressions that the values are."""

    def __init__(self) -> None:
        self._orders: dict[Value, Sequence[Expr]] = {}  # the nodes of expressions
        self._shared: dict[Value, Expr] = {}  # expressions that read no such value

    def __contains__(self, value: Value) -> bool:
        return value in self._orders

    def add(
        self, value: Value, order: Sequence[Expr], *, is_shared: bool = True
    ) -> None:
        """Have reads of `value` replaced by an expression over its axes.

        Args:
            order: The nodes of the expression, which is the last of them.
            is_shared: Whether the value is read more than once.
        """
        if is_shared:
            [self._shared[value]] = self._replaced(order, order[-1:])
            order = ()
        self._orders[value] = order

    def remove(self, value: Value) -> None:
        """Have reads of `value` stay from here on."""
        self._shared.pop(value, None)
        del self._orders[value]

    def order(self, value: Value) -> Sequence[Expr]:
        """The nodes of what `value` is, which may read others of these values."""
        if not self._orders[value]:
            self._orders[value] = nodes(self._shared[value])
        return self._orders[value]

    def shared(self, value: Value) -> Expr | None:
        """What `value` is at its own axes, if it is read more than once."""
        return self._shared.get(value)

    def at_axes(self, value: Value) -> Expr:
        """What `value` is at its own axes."""
        order = self._orders[value]
        return self._shared.get(value) or self._replaced(order, order[-1:])[0]

    def of(self, roots: Sequence[Expr]) -> list[Expr]:
        """These expressions, with such reads replaced. Nodes of one form are one node,
        which is computed once."""
        return self._replaced(nodes(*roots), roots)

    def _replaced(self, order: Sequence[Expr], roots: Sequence[Expr]) -> list[Expr]:
        given = _Expansion(order, {}, None)
        _Expander(self).expand(given)
        return [given.values[root] for root in roots]


def under(condition: Expr, root: Expr) -> Expr:
    """An expression that reads and divides only where a condition holds."""
    expander = _Expander(Substitution())
    given = _Expansion(nodes(root), {}, expander.interned.of(condition))
    expander.expand(given)
    return given.values[root]


class _Expansion:
    """An expression in which reads are being replaced.

    order      its nodes
    values     what those are replaced by, as far as it has come
    condition  under which the expression is read
    done       how many nodes of `order` have been replaced
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
        self._known: dict[_Read, Expr] = {}
        self._conditions = Conditions(self.interned)

    def expand(self, given: _Expansion) -> None:
        """Replace the reads in an expression, and in what it reads."""
        pending: list[tuple[_Expansion, _Read | None]] = [(given, None)]
        while pending:  # not by recursion: a chain may be a thousand values long
            expansion, key = pending[-1]
            read = self._until_read(expansion)
            if read is not None:
                pending.append((self._expansion(read), read))
                continue
            pending.pop()
            if key is not None:
                self._known[key] = expansion.values[expansion.order[-1]]

    def _expansion(self, read: _Read) -> _Expansion:
        value, at, condition = read
        values = dict(zip(axes(len(at)), at, strict=True))
        return _Expansion(self._elements.order(value), values, condition)

    def _until_read(self, expansion: _Expansion) -> _Read | None:
        """Replace nodes up to a read of what has yet to be expanded."""
        values, order = expansion.values, expansion.order
        condition, intern = expansion.condition, self.interned.node
        for number in range(expansion.done, len(order)):
            node = order[number]
            if node in values:  # an axis
                continue
            args = tuple([values[a] for a in node.args])
            if node.op == "element":
                found = self._element(node, args, condition)
                if isinstance(found, tuple):
                    expansion.done = number
                    return found
                values[node] = found
                continue
            if condition is not None and _divides(node):
                args = args[0], self._conditions.divisor(args[1], condition)
            values[node] = intern(e.with_args(node, args))
        return None

    def _element(self, node: Expr, args: Index, condition: Expr | None) -> Expr | _Read:
        """What an element is; or a read, which has to be expanded first."""
        value, at, own = node.attr, args, None
        if e.condition_of(node) is not None:
            own, at = args[-1], args[:-1]
            if own.is_const and not own.attr:
                return self.interned.node(e.const(0, node.dtype))
        condition = self._conditions.both(condition, own)
        if value not in self._elements:
            return self.interned.node(self._conditional(node, at, condition))
        if condition is None and at == axes(len(at)):
            shared = self._elements.shared(value)
            if shared is not None:
                return self._known.setdefault((value, at, None), shared)
        for key in ((value, at, None), (value, at, condition)):
            if key in self._known:
                return self._known[key]
        return value, at, condition

    def _conditional(self, node: Expr, at: Index, condition: Expr | None) -> Expr:
        """An element of memory; what tells the condition is read anyhow."""
        read = node.attr, at
        if condition is not None and read in self._conditions.reads(condition):
            condition = None
        args = at if condition is None else (*at, condition)
        same = args == node.args
        return node if same else e.element(node.attr, node.dtype, at, condition)


def _divides(node: Expr) -> bool:
    """Whether a node may stop the program."""
    return (
        node.op in ("div", "rem")
        and node.dtype.is_integer
        and not node.args[1].is_const
    )


class Conditions:
    """What is known of the conditions in one list of expressions."""

    def __init__(self, interned: Interned) -> None:
        self._interned = interned
        self._parts: dict[Expr, dict[Expr, None]] = {}
        self._reads: dict[Expr, AbstractSet[tuple[Value, Index]]] = {}
        self._both: dict[tuple[Expr, Expr], Expr] = {}

    def both(self, condition: Expr | None, own: Expr | None) -> Expr | None:
        """The condition of a read that has its `own` within a conditional one."""
        if own is None or own.is_const:
            return condition
        if condition is None:
            return own
        key = condition, own
        if key not in self._both:
            known = self.parts(condition)
            both = condition
            for part in self.parts(own):
                if part not in known:
                    both = self._interned.node(e.binary("and", both, part))
            self._both[key] = both
        return self._both[key]

    def parts(self, condition: Expr) -> dict[Expr, None]:
        """The conditions that hold if one does."""
        if condition not in self._parts:
            found: dict[Expr, None] = {}
            pending = [condition]
            while pending:
                part = pending.pop()
                if part in self._parts:
                    found |= self._parts[part]
                elif part.op == "and":
                    pending += part.args[::-1]
                else:
                    found[part] = None
            self._parts[condition] = found
        return self._parts[condition]

    def reads(self, condition: Expr) -> AbstractSet[tuple[Value, Index]]:
        """What is read whether or not a condition holds, to find that out. Of a long
        condition it is not all."""
        if condition not in self._reads:
            found: set[tuple[Value, Index]] = set()
            for part in self.parts(condition):
                found |= _reads(part) if part is condition else self.reads(part)
            self._reads[condition] = found
        return self._reads[condition]

    def divisor(self, divisor: Expr, condition: Expr) -> Expr:
        """A divisor where a condition holds, and 1 elsewhere."""
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
    own = (n for n in pending if n.op == "element" and e.condition_of(n) is None)
    return {(node.attr, node.args) for node in own}
