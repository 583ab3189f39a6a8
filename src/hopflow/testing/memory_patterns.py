"""Detection of patterns of memory use in programs: copies, updates, exchanged carries.

    memory_patterns(program)    # {"carries swapped", "view read after a write", ...}

A compiler that updates arrays in place, and assigns one buffer to several values, must
get each of these patterns right. They describe the text of a program; the compiler
decides whether memory is shared. Only arrays of more than `REGISTERS` elements count,
as smaller ones are never in memory.
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from hopflow import pytree
from hopflow.testing.program import Body, Name, Program, Statement, bodies

REGISTERS: Final = 4
"""The most elements of an array that a compiler keeps in registers."""

LOOPS: Final = ("fori_loop", "while_loop", "scan")
VIEWS: Final = ("get", "reshape", "permute_dims", "flip")
"""Operations whose result may alias their first argument."""

COPIES: Final = ("copy", "positive", "astype")
"""Operations whose result is a copy of their argument."""

JOINS: Final = ("concat", "stack", "pad")

PATTERNS: Final = (
    "write to a copy in a loop",
    "write to a copy in a branch",
    "copy through a reshape, then a write",
    "copy through positive or astype, then a write",
    "copied array read after the write",
    "copied array not read after the write",
    "array read before and after an update",
    "view read after a write to its base",
    "view of a view of a carry",
    "view of a view read after a write to its base",
    "carries swapped",
    "three carries rotated",
    "carry passed on beside a new one",
    "carries computed from each other",
    "one value for two carries",
    "one initial value for two carries",
    "carry unchanged in one branch",
    "carry unchanged beside a new one",
    "pieces of carries joined",
    "rows of a stack read back",
    "input that is carry and output",
    "output that is an input",
)
"""All patterns; see `memory_patterns`."""


def memory_patterns(program: Program) -> set[str]:
    """Return the patterns, of `PATTERNS`, that a program contains."""
    finder = _Finder()
    for argument in program.arguments:
        finder.elements[argument.name] = argument.value.size
    inputs = {a.name for a in program.arguments}
    outputs = set(_names(program.main.result))
    if any(finder.is_large(name) for name in inputs & outputs):
        finder.patterns.add("output that is an input")
    finder.inputs = inputs & outputs
    finder.body(program.main, _Place())
    return finder.patterns


@dataclass(frozen=True)
class _Place:
    """The context of statements: whether in a loop or branch, and the carries there."""

    in_loop: bool = False
    in_branch: bool = False
    carries: frozenset[str] = frozenset()


@dataclass
class _Finder:
    """Collects patterns.

    elements    name of a value -> its number of elements
    sources     name of a view or copy -> (operation, argument)
    operands    name of a value -> the values that it is directly computed from
    inputs      the arguments that are also outputs
    patterns    the patterns
    """

    elements: dict[str, int] = field(default_factory=dict)
    sources: dict[str, tuple[str, str]] = field(default_factory=dict)
    operands: dict[str, set[str]] = field(default_factory=dict)
    inputs: set[str] = field(default_factory=set)
    patterns: set[str] = field(default_factory=set)

    def is_large(self, name: str) -> bool:
        """Whether a value is in memory."""
        return self.elements.get(name, 0) > REGISTERS

    # Values.

    def base(self, name: str) -> str:
        """Return the value that a view aliases."""
        while (source := self.sources.get(name)) and source[0] in VIEWS:
            name = source[1]
        return name

    def path(self, name: str) -> list[str]:
        """Return the operations from the original value to this view or copy."""
        operations = []
        while source := self.sources.get(name):
            operations.append(source[0])
            name = source[1]
        return operations[::-1]

    def copied(self, name: str) -> str | None:
        """Return the array of which the base of a value is a copy, or None."""
        operation, source = self.sources.get(self.base(name), ("", ""))
        return self.base(source) if operation in COPIES else None

    def depends(self, name: str) -> set[str]:
        """Return the values that a value depends on, itself included."""
        values, queue = {name}, [name]
        while queue:
            new = self.operands.get(queue.pop(), set()) - values
            values |= new
            queue += new
        return values

    # Statements.

    def body(self, body: Body, place: _Place) -> None:
        for k, statement in enumerate(body.statements):
            self.define(statement)
            self.statement(statement, place)
            later = [*body.statements[k + 1 :], body.result]
            self.update(body.statements[:k], statement, later, place)
            if statement.operation == "scan":
                self.stack(statement, later)

    def define(self, s: Statement) -> None:
        targets = _names(s.target)
        reads = _reads(s)
        for name, type_ in zip(targets, s.types, strict=False):
            self.elements[name] = _size(type_)
            self.operands[name] = reads - {name}
        first = s.args[0] if s.args else None
        is_view = s.operation in VIEWS and not _gathers(s)
        if isinstance(first, Name) and (is_view or s.operation in COPIES):
            self.sources[targets[0]] = (s.operation, first.name)

    def statement(self, s: Statement, place: _Place) -> None:
        if s.operation in LOOPS:
            self.loop(s, place)
        elif s.operation in ("cond", "switch"):
            self.branches(s, place)
        else:
            for inner in bodies(s):
                self.parameters(inner.parameters, ())
                self.body(inner, place)
        if s.operation in JOINS and any(
            self.base(name) in place.carries and self.is_large(self.base(name))
            for name in _names(s.args)
        ):
            self.patterns.add("pieces of carries joined")
        path = self.path(s.target.name) if isinstance(s.target, Name) else []
        if len(path) > 1 and set(path) <= set(VIEWS):
            base = self.base(s.target.name)
            if base in place.carries and self.is_large(base):
                self.patterns.add("view of a view of a carry")

    def parameters(self, names: Any, types: Sequence[int]) -> None:
        for name, count in zip(_names(names), types, strict=False):
            self.elements[name] = count

    # Loops and branches.

    def loop(self, s: Statement, place: _Place) -> None:
        body = _step(s)
        skipped = 1 if s.operation == "fori_loop" else 0
        tree = body.parameters[:1] if s.operation == "scan" else body.parameters
        carries = _names(tree[skipped:])
        result = body.result[0] if s.operation == "scan" else body.result
        initial = s.args[1] if s.operation == "scan" else s.args[-1]
        counts = [_size(t) for t in s.types]
        self.parameters(tuple(map(Name, carries)), counts)
        if s.operation == "scan":
            self.parameters(body.parameters[1], [n for n in counts[len(carries) :]])
        around = place.carries | frozenset(carries)
        for inner in bodies(s):
            self.body(inner, _Place(True, place.in_branch, around))
        starts = _names(initial)
        large = [n > REGISTERS for n in counts[: len(carries)]]
        self.exchanged(carries, _names(result), large)
        if _repeats([n for n, big in zip(starts, large, strict=False) if big]):
            self.patterns.add("one initial value for two carries")
        if any(map(self.is_large, self.inputs & set(starts))):
            self.patterns.add("input that is carry and output")

    def exchanged(
        self, carries: list[str], results: list[str], large: list[bool]
    ) -> None:
        """Add the patterns of how the next carries depend on the current ones."""
        rows = list(zip(carries, results, large, strict=False))
        place = {name: k for k, (name, _, big) in enumerate(rows) if big}
        moved = {
            k: place[r] for k, (_, r, big) in enumerate(rows) if big & (r in place)
        }
        needs = [self.depends(r) & place.keys() for _, r, _ in rows]
        new = [k for k in place.values() if k not in moved]
        if _repeats([r for _, r, big in rows if big]):
            self.patterns.add("one value for two carries")
        for k in place.values():
            length = _cycle(moved, k)
            if length == 2:
                self.patterns.add("carries swapped")
            if length > 2:
                self.patterns.add("three carries rotated")
            source = moved.get(k)
            if source in new:
                self.patterns.add("carry passed on beside a new one")
            if source == k and new:
                self.patterns.add("carry unchanged beside a new one")
            for j in new:
                mutual = carries[k] in needs[j] and carries[j] in needs[k]
                if k in new and j < k and mutual:
                    self.patterns.add("carries computed from each other")

    def branches(self, s: Statement, place: _Place) -> None:
        inner = bodies(s)
        for body in inner:
            self.body(body, _Place(place.in_loop, True, place.carries))
        results = [_names(body.result) for body in inner]
        for same in zip(*results, strict=False):
            kept = {name for name in same if self.base(name) in place.carries}
            updated = set(same) - kept
            if any(
                self.is_large(name) and name in self.depends(other)
                for name in kept
                for other in updated
            ):
                self.patterns.add("carry unchanged in one branch")

    # Updates.

    def update(
        self, before: Any, s: Statement, later: Sequence[Any], place: _Place
    ) -> None:
        """Add the patterns of a write, or of an update that makes a new array."""
        if s.operation not in ("set", "subtract_from", "dynamic_update_slice"):
            return
        target = s.args[0].name if isinstance(s.args[0], Name) else ""
        base = self.base(target)
        if not self.is_large(base):
            return
        read_before = any(base in self.bases(b) for b in before)
        read_after = any(base in self.bases(part) for part in later)
        if read_before and read_after:
            self.patterns.add("array read before and after an update")
        if s.operation == "dynamic_update_slice":
            return
        for name in self.views_of(base) - {target}:
            if any(name in _all_names(part) for part in later):
                self.patterns.add("view read after a write to its base")
                if len([p for p in self.path(name) if p in VIEWS]) > 1:
                    self.patterns.add("view of a view read after a write to its base")
        source = self.copied(target)
        if source is not None:
            self.write_to_a_copy(target, source, later, place)

    def write_to_a_copy(
        self, target: str, source: str, later: Sequence[Any], place: _Place
    ) -> None:
        path = self.path(target)
        if place.in_loop:
            self.patterns.add("write to a copy in a loop")
        if place.in_branch:
            self.patterns.add("write to a copy in a branch")
        if "reshape" in path:
            self.patterns.add("copy through a reshape, then a write")
        if {"positive", "astype"} & set(path):
            self.patterns.add("copy through positive or astype, then a write")
        is_read = any(source in self.bases(part) for part in later)
        self.patterns.add(
            f"copied array {'' if is_read else 'not '}read after the write"
        )

    def bases(self, part: Any) -> set[str]:
        """Return the base values that a statement or a result reads."""
        return {self.base(name) for name in _all_names(part)}

    def views_of(self, base: str) -> set[str]:
        """Return the views of a value."""
        return {name for name in self.sources if self.base(name) == base} - {base}

    def stack(self, s: Statement, later: Sequence[Any]) -> None:
        carries = len(_names(_step(s).parameters[0]))
        stacks = {n for n in _names(s.target)[carries:] if self.is_large(n)}
        for statement in _flattened(later):
            first = statement.args[0] if statement.args else None
            is_stack = isinstance(first, Name) and first.name in stacks
            if statement.operation == "get" and is_stack:
                self.patterns.add("rows of a stack read back")


def _step(s: Statement) -> Body:
    """Return the body of a loop that computes its next carries."""
    body: Body = s.args[{"scan": 0, "while_loop": 1, "fori_loop": 2}[s.operation]]
    return body


def _cycle(moved: dict[int, int], start: int) -> int:
    """Return the length of the cycle of moved carries through `start`; 0: none."""
    k, length = moved.get(start), 1
    while k is not None and k != start and length <= len(moved):
        k, length = moved.get(k), length + 1
    return length if k == start else 0


def _repeats(names: Sequence[str]) -> bool:
    return len(set(names)) < len(names)


def _names(tree: Any) -> list[str]:
    return [x.name for x in pytree.flatten(tree)[0] if isinstance(x, Name)]


def _gathers(s: Statement) -> bool:
    """Whether a statement reads by an array of indices, whose result is a copy."""
    return s.operation == "get" and "..." not in map(str, _entries(s.args[1]))


def _entries(index: Any) -> Sequence[Any]:
    return (
        ["..." if i is ... else i for i in index] if type(index) is tuple else [index]
    )


def _reads(s: Statement) -> set[str]:
    """Return the values that a statement reads, also those captured by its bodies."""
    return _all_names(s) - set(_names(s.target))


def _all_names(part: Any) -> set[str]:
    """Return the values that a statement or a result refers to."""
    if not isinstance(part, Statement):
        return set(_names(part))
    names = set(_names((part.args, dict(part.options))))
    for body in bodies(part):
        names |= set(_names(body.result))
        for statement in body.statements:
            names |= _all_names(statement)
    return names


def _flattened(parts: Sequence[Any]) -> Iterator[Statement]:
    for part in parts:
        if isinstance(part, Statement):
            for body in bodies(part):
                yield from _flattened(body.statements)
            yield part


def _size(type_: str) -> int:
    """Return the number of elements of a type: 6 for "f64[3, 2]"."""
    brackets = re.search(r"\[(.*)\]", type_)
    lengths = brackets[1] if brackets else ""
    return math.prod(int(n) for n in lengths.split(",") if n.strip())
