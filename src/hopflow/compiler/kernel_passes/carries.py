"""Carries that no step changes, and carries that are always equal, go.

    v0, v1, v2 = for t0 < n, carry c3 = x, c4 = 0, c5 = 0:
        v6 = c3[i0] * 2.0
        v7 = c4[] + 1
        v8 = c5[] + 1
        yield c3, v7, v8
    v9 = v0[i0] + v1[] + v2[]
  ->
    v1 = for t0 < n, carry c4 = 0:
        v7 = c4[] + 1
        yield v7
    v9 = x[i0] + v1[] + v1[]

Two carries are equal if they begin with one value, and each step computes one value of
equal ones: that is assumed of all that begin alike, and given up where a step differs
(partition refinement, as in Hopcroft's algorithm for automata). A carry that no step
changes, or for which each step gives the constant that it begins with, is that value.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias

from hopflow.compiler.kernel_passes import Context
from hopflow.compiler.kernel_program.definitions import Definition, Pointwise
from hopflow.compiler.kernel_program.program import (
    Block,
    Equation,
    KernelProgram,
    Loop,
    Region,
    Value,
    While,
    blocks,
    equations,
)
from hopflow.compiler.kernel_program.registers import shape_key
from hopflow.compiler.kernel_program.rewriting import drop_unread, replace_values
from hopflow.graph.types import TensorType
from hopflow.loop_ir.walk import nodes

_Repeats: TypeAlias = Loop | While
MOST_ROUNDS: Final = 8
"""Rounds of refinement: each numbers the body of a loop once. More are taken for a
queue of carries, of which each round would part one from the others."""


def carries(program: KernelProgram, _context: Context) -> None:
    """Edit a program in place, without the functions that it calls, until no more
    carries go: what a loop gives may be what a loop around it does not change."""
    while True:
        found = _Found()
        for equation in equations(program.block):
            if isinstance(equation.definition, Loop | While):
                found.look(equation, equation.definition)
        if not found.others:
            return
        replace_values(program.block, found.resolved())
        for equation, gone in found.gone.items():
            _drop(equation, gone)
            for block in blocks(equation.definition):
                drop_unread(block)


@dataclass
class _Found:
    """What takes the place of values, and the numbers of the carries that go."""

    others: dict[Value, Value] = field(default_factory=dict)
    gone: dict[Equation, set[int]] = field(default_factory=dict)

    def now(self, value: Value) -> Value:
        """What a value is, by what was found so far."""
        while value in self.others:
            value = self.others[value]
        return value

    def resolved(self) -> dict[Value, Value]:
        return {value: self.now(value) for value in self.others}

    def look(self, equation: Equation, loop: _Repeats) -> None:
        """Find the carries of a loop that go."""
        count = len(loop.carry)
        first = [self.now(v) for v in loop.carry]
        next_ = [self.now(v) for v in loop.body.results[:count]]
        own = loop.body.parameters
        # The size of another one is changed by steps.
        sized = [k for k in range(count) if _same_type(loop.carry[k].type, own[k].type)]
        for k in sized:
            if next_[k] is own[k] or _same_constant(first[k], next_[k]):
                self._drop(equation, loop, k, None)
        left = [k for k in sized if k not in self.gone.get(equation, ())]
        for k, other in self._equal(loop, left, first):
            self._drop(equation, loop, k, other)

    def _drop(
        self, equation: Equation, loop: _Repeats, k: int, other: int | None
    ) -> None:
        """Have a carry be another one; None: what it begins with."""
        self.gone.setdefault(equation, set()).add(k)
        for block in blocks(loop):
            same = loop.carry[k] if other is None else block.parameters[other]
            self.others[block.parameters[k]] = same
        same = loop.carry[k] if other is None else equation.results[other]
        self.others[equation.results[k]] = same

    def _equal(
        self, loop: _Repeats, left: Sequence[int], first: Sequence[Value]
    ) -> Iterator[tuple[int, int]]:
        """The carries that are equal to an earlier one, each with that one."""
        groups: dict[Hashable, list[int]] = {}
        for k in left:
            groups.setdefault(_start(first[k], loop.carry[k].type), []).append(k)
        alike = [group for group in groups.values() if len(group) > 1]
        for _ in range(MOST_ROUNDS):
            if not alike:
                return
            numbers = _Numbers(loop.body, alike, self)
            refined = [part for group in alike for part in numbers.split(group)]
            if len(refined) == len(alike):
                for leader, *rest in refined:
                    yield from ((k, leader) for k in rest)
                return
            alike = [group for group in refined if len(group) > 1]


def _start(value: Value, type_: TensorType) -> Hashable:
    """The same for carries that begin with one value."""
    scalar = value.scalar
    constant = scalar is not None and scalar.is_const
    key: Hashable = (repr(scalar.attr), scalar.dtype) if constant and scalar else value
    return key, type_.dtype, shape_key(type_.shape)


def _same_type(a: TensorType, b: TensorType) -> bool:
    return a.dtype is b.dtype and shape_key(a.shape) == shape_key(b.shape)


def _same_constant(a: Value, b: Value) -> bool:
    x, y = a.scalar, b.scalar
    if x is None or y is None or not (x.is_const and y.is_const):
        return False
    return x.dtype is y.dtype and repr(x.attr) == repr(y.attr)


class _Numbers:
    """Numbers of the values that a step computes: equal ones are the same value, if
    carries of one group are."""

    def __init__(
        self, body: Block, groups: Sequence[Sequence[int]], found: _Found
    ) -> None:
        self._body, self._found = body, found
        self._numbers: dict[Hashable, int] = {}
        self._of: dict[Value, int] = {}
        for group in groups:
            number = len(self._of)
            self._of |= dict.fromkeys([body.parameters[k] for k in group], number)
        self._next = len(self._of)
        for equation in body.equations:
            self._add(equation)

    def split(self, group: Sequence[int]) -> list[list[int]]:
        """The carries of a group by what a step gives for them."""
        parts: dict[int, list[int]] = {}
        for k in group:
            parts.setdefault(self._number(self._body.results[k]), []).append(k)
        return list(parts.values())

    def _fresh(self) -> int:
        self._next += 1
        return self._next

    def _number(self, value: Value) -> int:
        value = self._found.now(value)
        if value not in self._of:
            self._of[value] = self._fresh()
        return self._of[value]

    def _add(self, equation: Equation) -> None:
        own = equation.definition
        if equation.symbol is not None or not _is_numbered(own):
            return
        assert isinstance(own, Pointwise)
        types = [(v.type.dtype, shape_key(v.shape)) for v in equation.results]
        for k, element in enumerate(own.elements):
            key = types[k], self._key(element)
            if key not in self._numbers:
                self._numbers[key] = self._fresh()
            self._of[equation.results[k]] = self._numbers[key]

    def _key(self, element: Any) -> int:
        """A number of an expression by its form."""
        known: dict[Any, int] = {}
        for node in nodes(element):
            attr: Hashable = id(node.attr)
            if node.op == "element":
                attr = self._number(node.attr)
            elif node.op == "const":
                attr = repr(node.attr)
            key = node.op, node.dtype, attr, tuple([known[a] for a in node.args])
            if key not in self._numbers:
                self._numbers[key] = self._fresh()
            known[node] = self._numbers[key]
        return known[element]


def _is_numbered(own: Definition | Region) -> bool:
    return isinstance(own, Pointwise) and not own.checks


def _drop(equation: Equation, gone: set[int]) -> None:
    """Take carries out of a loop, whose values are others by now."""
    loop = equation.definition
    assert isinstance(loop, Loop | While)
    count = len(loop.carry)

    def kept(values: Sequence[Value]) -> list[Value]:

        return [v for k, v in enumerate(values[:count]) if k not in gone]

    for block in blocks(loop):
        block.parameters = kept(block.parameters)
    loop.body.results = kept(loop.body.results) + loop.body.results[count:]
    equation.results = (*kept(equation.results), *equation.results[count:])
    equation.definition = replace(loop, carry=tuple(kept(loop.carry)))
