"""Which patterns of memory use a program contains: copies, updates, exchanged carries.

    memory_patterns(program)    # {"carries swapped", "view read after a write", ...}

A compiler that updates arrays in place, and lets values share buffers, must get each of
these patterns right. The names say what the text of a program contains; whether memory
is shared in the end is for the compiler to decide. Only arrays of more than
`REGISTERS` elements count, as smaller ones never are in memory.
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
"""Operations whose result may share memory with their first argument."""

COPIES: Final = ("copy", "positive", "astype")
"""Operations whose result has the elements of their argument in memory of its own."""

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
"""All of them; see `memory_patterns`."""


def memory_patterns(program: Program) -> set[str]:
    """The patterns that a program contains, of `PATTERNS`."""
    finder = _Finder()
    for argument in program.arguments:
        finder.elements[argument.name] = argument.value.size
    inputs = {a.name for a in program.arguments}
    outputs = set(_names(program.main.result))
    if any(finder.is_large(name) for name in inputs & outputs):
        finder.found.add("output that is an input")
    finder.inputs = inputs & outputs
    finder.body(program.main, _Place())
    return finder.found


@dataclass(frozen=True)
class _Place:
    """Where statements are: within a loop, a branch; and the carries around them."""

    in_loop: bool = False
    in_branch: bool = False
    carries: frozenset[str] = frozenset()


@dataclass
class _Finder:
    """Collects patterns.

    elements    how many elements a value has, by its name
    sources     (operation, argument) for what is a view or a copy, by its name
    operands    the values that a value is directly computed from, by its name
    inputs      arguments that are outputs, too
    found       the patterns
    """

    elements: dict[str, int] = field(default_factory=dict)
    sources: dict[str, tuple[str, str]] = field(default_factory=dict)
    operands: dict[str, set[str]] = field(default_factory=dict)
    inputs: set[str] = field(default_factory=set)
    found: set[str] = field(default_factory=set)

    def is_large(self, name: str) -> bool:
        return self.elements.get(name, 0) > REGISTERS

    # Values.

    def base(self, name: str) -> str:
        """The value whose memory a view has."""
        while (source := self.sources.get(name)) and source[0] in VIEWS:
            name = source[1]
        return name

    def path(self, name: str) -> list[str]:
        """The operations from the value that was copied or viewed first to this one."""
        found = []
        while source := self.sources.get(name):
            found.append(source[0])
            name = source[1]
        return found[::-1]

    def copied(self, name: str) -> str | None:
        """The array of which the memory behind a view is a copy, if it is one."""
        operation, source = self.sources.get(self.base(name), ("", ""))
        return self.base(source) if operation in COPIES else None

    def depends(self, name: str) -> set[str]:
        """All values that it is computed from, itself included."""
        known, rest = {name}, [name]
        while rest:
            more = self.operands.get(rest.pop(), set()) - known
            known |= more
            rest += more
        return known

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
            self.found.add("pieces of carries joined")
        path = self.path(s.target.name) if isinstance(s.target, Name) else []
        if len(path) > 1 and set(path) <= set(VIEWS):
            base = self.base(s.target.name)
            if base in place.carries and self.is_large(base):
                self.found.add("view of a view of a carry")

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
            self.found.add("one initial value for two carries")
        if any(map(self.is_large, self.inputs & set(starts))):
            self.found.add("input that is carry and output")

    def exchanged(
        self, carries: list[str], results: list[str], large: list[bool]
    ) -> None:
        """The patterns of how the next carries come from those of this step."""
        rows = list(zip(carries, results, large, strict=False))
        place = {name: k for k, (name, _, big) in enumerate(rows) if big}
        moved = {
            k: place[r] for k, (_, r, big) in enumerate(rows) if big & (r in place)
        }
        needs = [self.depends(r) & place.keys() for _, r, _ in rows]
        new = [k for k in place.values() if k not in moved]
        if _repeats([r for _, r, big in rows if big]):
            self.found.add("one value for two carries")
        for k in place.values():
            length = _cycle(moved, k)
            if length == 2:
                self.found.add("carries swapped")
            if length > 2:
                self.found.add("three carries rotated")
            source = moved.get(k)
            if source in new:
                self.found.add("carry passed on beside a new one")
            if source == k and new:
                self.found.add("carry unchanged beside a new one")
            for j in new:
                mutual = carries[k] in needs[j] and carries[j] in needs[k]
                if k in new and j < k and mutual:
                    self.found.add("carries computed from each other")

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
                self.found.add("carry unchanged in one branch")

    # Updates.

    def update(
        self, before: Any, s: Statement, later: Sequence[Any], place: _Place
    ) -> None:
        """The patterns of one write, or one update that gives a new array."""
        if s.operation not in ("set", "subtract_from", "dynamic_update_slice"):
            return
        target = s.args[0].name if isinstance(s.args[0], Name) else ""
        base = self.base(target)
        if not self.is_large(base):
            return
        read_before = any(base in self.bases(b) for b in before)
        read_after = any(base in self.bases(part) for part in later)
        if read_before and read_after:
            self.found.add("array read before and after an update")
        if s.operation == "dynamic_update_slice":
            return
        for name in self.views_of(base) - {target}:
            if any(name in _all_names(part) for part in later):
                self.found.add("view read after a write to its base")
                if len([p for p in self.path(name) if p in VIEWS]) > 1:
                    self.found.add("view of a view read after a write to its base")
        source = self.copied(target)
        if source is not None:
            self.write_to_a_copy(target, source, later, place)

    def write_to_a_copy(
        self, target: str, source: str, later: Sequence[Any], place: _Place
    ) -> None:
        path = self.path(target)
        if place.in_loop:
            self.found.add("write to a copy in a loop")
        if place.in_branch:
            self.found.add("write to a copy in a branch")
        if "reshape" in path:
            self.found.add("copy through a reshape, then a write")
        if {"positive", "astype"} & set(path):
            self.found.add("copy through positive or astype, then a write")
        is_read = any(source in self.bases(part) for part in later)
        self.found.add(f"copied array {'' if is_read else 'not '}read after the write")

    def bases(self, part: Any) -> set[str]:
        """What a statement or a result reads, as the values that have the memory."""
        return {self.base(name) for name in _all_names(part)}

    def views_of(self, base: str) -> set[str]:
        return {name for name in self.sources if self.base(name) == base} - {base}

    def stack(self, s: Statement, later: Sequence[Any]) -> None:
        carries = len(_names(_step(s).parameters[0]))
        stacks = {n for n in _names(s.target)[carries:] if self.is_large(n)}
        for statement in _flattened(later):
            first = statement.args[0] if statement.args else None
            is_stack = isinstance(first, Name) and first.name in stacks
            if statement.operation == "get" and is_stack:
                self.found.add("rows of a stack read back")


def _step(s: Statement) -> Body:
    """The body of a loop that computes its next carries."""
    found: Body = s.args[{"scan": 0, "while_loop": 1, "fori_loop": 2}[s.operation]]
    return found


def _cycle(moved: dict[int, int], start: int) -> int:
    """How many carries are moved in a circle through `start`; 0: they are not."""
    k, length = moved.get(start), 1
    while k is not None and k != start and length <= len(moved):
        k, length = moved.get(k), length + 1
    return length if k == start else 0


def _repeats(names: Sequence[str]) -> bool:
    return len(set(names)) < len(names)


def _names(tree: Any) -> list[str]:
    return [x.name for x in pytree.flatten(tree)[0] if isinstance(x, Name)]


def _gathers(s: Statement) -> bool:
    """Whether an index is an array of several: what is read is memory of its own."""
    return s.operation == "get" and "..." not in map(str, _entries(s.args[1]))


def _entries(index: Any) -> Sequence[Any]:
    return (
        ["..." if i is ... else i for i in index] if type(index) is tuple else [index]
    )


def _reads(s: Statement) -> set[str]:
    """The values that a statement reads, with what its bodies take from outside."""
    return _all_names(s) - set(_names(s.target))


def _all_names(part: Any) -> set[str]:
    """The values that a statement, or a result, speaks of and does not define."""
    if not isinstance(part, Statement):
        return set(_names(part))
    found = set(_names((part.args, dict(part.options))))
    for body in bodies(part):
        found |= set(_names(body.result))
        for statement in body.statements:
            found |= _all_names(statement)
    return found


def _flattened(parts: Sequence[Any]) -> Iterator[Statement]:
    for part in parts:
        if isinstance(part, Statement):
            for body in bodies(part):
                yield from _flattened(body.statements)
            yield part


def _size(type_: str) -> int:
    """The number of elements of a type: 6 for "f64[3, 2]"."""
    found = re.search(r"\[(.*)\]", type_)
    lengths = found[1] if found else ""
    return math.prod(int(n) for n in lengths.split(",") if n.strip())
