"""Removes carries that no step changes, and carries that are always equal to another.

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

Two carries are equal if they begin with one value, and each step computes their next
values by equal expressions of equal carries. This is assumed of all carries that begin
alike, and given up where their steps differ (partition refinement, as in Hopcroft's
algorithm for automata). A carry that no step changes, or for which each step yields the
constant that it begins with, equals its initial value.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
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
from hopflow.compiler.kernel_program.rewriting import (
    drop_results,
    drop_unread,
    replace_values,
)
from hopflow.graph.types import TensorType
from hopflow.loop_ir.walk import nodes

_Repeats: TypeAlias = Loop | While
MOST_ROUNDS: Final = 8
"""Rounds of refinement, each of which numbers the body of a loop once. Only a queue of
carries would take more: each round would separate one carry from the rest."""


def carries(program: KernelProgram, _context: Context) -> None:
    """Edit a program in place, without the functions that it calls, until no more
    carries are removed: the result of a loop may be invariant in an enclosing loop."""
    while True:
        redundant = _Redundant()
        for equation in equations(program.block):
            if isinstance(equation.definition, Loop | While):
                redundant.find(equation, equation.definition)
        if not redundant.replacements:
            return
        replace_values(program.block, redundant.resolved())
        for equation, removed in redundant.removed.items():
            drop_results(equation, removed)
            for block in blocks(equation.definition):
                drop_unread(block)


@dataclass
class _Redundant:
    """The replacements of values, and the numbers of the removed carries."""

    replacements: dict[Value, Value] = field(default_factory=dict)
    removed: dict[Equation, set[int]] = field(default_factory=dict)

    def resolve(self, value: Value) -> Value:
        """Return what replaces a value so far, or the value itself."""
        while value in self.replacements:
            value = self.replacements[value]
        return value

    def resolved(self) -> dict[Value, Value]:
        return {value: self.resolve(value) for value in self.replacements}

    def find(self, equation: Equation, loop: _Repeats) -> None:
        """Find the redundant carries of a loop."""
        count = len(loop.carry)
        first = [self.resolve(v) for v in loop.carry]
        next_ = [self.resolve(v) for v in loop.body.results[:count]]
        carried = loop.body.parameters
        # Steps change the size of the other carries.
        sized = [
            k for k in range(count) if _same_type(loop.carry[k].type, carried[k].type)
        ]
        for k in sized:
            if next_[k] is carried[k] or _same_constant(first[k], next_[k]):
                self._drop(equation, loop, k, None)
        remaining = [k for k in sized if k not in self.removed.get(equation, ())]
        for k, other in self._equal(loop, remaining, first):
            self._drop(equation, loop, k, other)

    def _drop(
        self, equation: Equation, loop: _Repeats, k: int, other: int | None
    ) -> None:
        """Replace a carry by another one; None: by its initial value."""
        self.removed.setdefault(equation, set()).add(k)
        for block in blocks(loop):
            same = loop.carry[k] if other is None else block.parameters[other]
            self.replacements[block.parameters[k]] = same
        same = loop.carry[k] if other is None else equation.results[other]
        self.replacements[equation.results[k]] = same

    def _equal(
        self, loop: _Repeats, remaining: Sequence[int], first: Sequence[Value]
    ) -> Iterator[tuple[int, int]]:
        """Yield the carries that equal an earlier one, each with that one."""
        groups: dict[Hashable, list[int]] = {}
        for k in remaining:
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
    """Return a key that is equal for carries that begin with one value."""
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
    """Value numbering of a step: values of one number are equal if the carries of each
    group are."""

    def __init__(
        self, body: Block, groups: Sequence[Sequence[int]], redundant: _Redundant
    ) -> None:
        self._body, self._redundant = body, redundant
        self._numbers: dict[Hashable, int] = {}
        self._of: dict[Value, int] = {}
        for group in groups:
            number = len(self._of)
            self._of |= dict.fromkeys([body.parameters[k] for k in group], number)
        self._next = len(self._of)
        for equation in body.equations:
            self._add(equation)

    def split(self, group: Sequence[int]) -> list[list[int]]:
        """Split a group of carries by the numbers of their next values."""
        parts: dict[int, list[int]] = {}
        for k in group:
            parts.setdefault(self._number(self._body.results[k]), []).append(k)
        return list(parts.values())

    def _fresh(self) -> int:
        self._next += 1
        return self._next

    def _number(self, value: Value) -> int:
        value = self._redundant.resolve(value)
        if value not in self._of:
            self._of[value] = self._fresh()
        return self._of[value]

    def _add(self, equation: Equation) -> None:
        definition = equation.definition
        if equation.symbol is not None or not _is_numbered(definition):
            return
        assert isinstance(definition, Pointwise)
        types = [(v.type.dtype, shape_key(v.shape)) for v in equation.results]
        for k, element in enumerate(definition.elements):
            key = types[k], self._key(element)
            if key not in self._numbers:
                self._numbers[key] = self._fresh()
            self._of[equation.results[k]] = self._numbers[key]

    def _key(self, element: Any) -> int:
        """Return the number of an expression by its structure."""
        numbers: dict[Any, int] = {}
        for node in nodes(element):
            attr: Hashable = id(node.attr)
            if node.op == "element":
                attr = self._number(node.attr)
            elif node.op == "const":
                attr = repr(node.attr)
            key = node.op, node.dtype, attr, tuple([numbers[a] for a in node.args])
            if key not in self._numbers:
                self._numbers[key] = self._fresh()
            numbers[node] = self._numbers[key]
        return numbers[element]


def _is_numbered(definition: Definition | Region) -> bool:
    return isinstance(definition, Pointwise) and not definition.checks
