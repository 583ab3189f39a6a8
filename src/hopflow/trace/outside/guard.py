"""Guards on what a trace read from outside: generated code that checks each read."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import CodeType
from typing import Any, Final, NamedTuple, TypeAlias

from hopflow.bind import slots
from hopflow.trace.outside.checks import Check
from hopflow.trace.outside.paths import ERRORS, Path


class Read(NamedTuple):
    """A read of a trace: the path of the value, and the condition on it."""

    path: Path
    check: Check


class TensorSource(NamedTuple):
    """The source of a tensor from outside that a program gets.

    path      the path to it; None: it is `value` in each call
    is_array  whether the path leads to a NumPy array
    """

    path: Path | None
    value: Any
    is_array: bool = False


class _Writer:
    """Generates the code of a guard's function."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.constants: dict[str, Any] = {}
        self._names: dict[int, str] = {}
        self._variables: dict[Path, str] = {}

    def hold(self, value: Any) -> str:
        """Return the name of a constant, by which the code refers to a value."""
        name = self._names.get(id(value))
        if name is None:
            name = self._names[id(value)] = f"k{len(self._names)}"
            self.constants[name] = value
        return name

    def variable(self, path: Path) -> str:
        """Return the variable for the value at a path; add its definition once."""
        name = self._variables.get(path)
        if name is None:
            parent = ""
            if path.parent is not None and not path.is_rooted:
                parent = self.variable(path.parent)
            name = self._variables[path] = f"v{len(self._variables)}"
            self.lines.append(f"{name} = {path.expression(parent, self.hold)}")
        return name

    def check(self, read: Read) -> None:
        """Add the check of a read."""
        v = self.variable(read.path)
        failure = read.check.failure(v, self.hold, self.variable)
        self.lines.append(f"if {failure}: return None")

    def result(self, sources: Sequence[TensorSource]) -> None:
        """Add the return of the tensors."""
        parts = []
        for source in sources:
            value = (
                self.hold(source.value)
                if source.path is None
                else self.variable(source.path)
            )
            call = f"{self.hold(slots.from_array)}({value})"
            parts.append(call if source.is_array else value)
        self.lines.append(f"return [{', '.join(parts)}]")

    def function(self) -> "Find":
        """Compile the code to a function."""
        body = "\n".join(f"        {line}" for line in self.lines)
        errors = self.hold(ERRORS)
        text = f"def find(leaves):\n    try:\n{body}\n    except {errors}: return None"
        exec(_compiled(text, "exec"), self.constants)
        find: Find = self.constants["find"]
        return find


Find: TypeAlias = Callable[[Sequence[Any]], list[Any] | None]
"""Leaves of a call -> the tensors from outside, or None if a check fails."""
_LOST: Final[Any] = object()
"""The value at a path that does not exist."""


def _finds_nothing(_: Sequence[Any]) -> None:
    return None


@lru_cache(1 << 10)
def _compiled(text: str, mode: str) -> CodeType:
    """Compile code, memoized: another trace of a function has equal code, because
    constants have generated names."""
    return compile(text, "<hopflow guard>", mode)


class Values:
    """Memo table of the values at paths, for one call."""

    def __init__(self, leaves: Sequence[Any]) -> None:
        self._leaves = leaves
        self._memo: dict[Path, Any] = {}

    def __getitem__(self, path: Path) -> Any:
        """Return the value at a path; `_LOST` if the path does not exist."""
        if path not in self._memo:
            self._memo[path] = self._find(path)
        return self._memo[path]

    def _find(self, path: Path) -> Any:
        is_rooted = path.parent is None or path.is_rooted
        parent = None if is_rooted or path.parent is None else self[path.parent]
        if parent is _LOST:
            return _LOST
        try:
            return path.value(parent, self._leaves)
        except ERRORS:
            return _LOST

    def has(self, read: Read) -> bool:
        """Whether the condition of a read holds."""
        value, writer = self[read.path], _Writer()
        if value is _LOST:
            return False
        names = {"value": value}

        def other(path: Path) -> str:
            names["other"] = self[path]
            return "other"

        failure = read.check.failure("value", writer.hold, other)
        try:
            return not eval(_compiled(failure, "eval"), writer.constants | names)
        except ERRORS:
            return False


@dataclass(slots=True)
class Guard:
    """The reads from outside of a trace, which calls check.

    reads    the reads; a read of an object precedes those of its attributes and items
    wanted   the sources of the tensors from outside that the program gets
    changes  the changes that the trace made outside: if any, it serves no other call
    """

    reads: list[Read]
    wanted: list[TensorSource]
    changes: list[str] = field(default_factory=list)
    _find: Find | None = None

    @property
    def is_compiled(self) -> bool:
        """Whether `find` was compiled, which happens when it is first read."""
        return self._find is not None

    @property
    def find(self) -> Find:
        """The function that checks the reads and returns the tensors of a call."""
        if self.changes:
            return _finds_nothing
        if self._find is None:
            writer = _Writer()
            for read in self.reads:
                writer.check(read)
            writer.result(self.wanted)
            self._find = writer.function()
        return self._find

    def values(self, leaves: Sequence[Any]) -> list[Any]:
        """Return the values of all reads, whose conditions hold."""
        values = Values(leaves)
        return [values[read.path] for read in self.reads]

    def broken(self, leaves: Sequence[Any]) -> list[Read]:
        """Return the reads whose conditions no longer hold."""
        values = Values(leaves)
        return [read for read in self.reads if not values.has(read)]

    def reasons(self, leaves: Sequence[Any], texts: Sequence[str]) -> list[str]:
        """Return why a call cannot run the program: each read that no longer holds.

        Args:
            texts: The user's expressions for the leaves.
        """
        explanations = dict.fromkeys(
            f"{change} is changed by each trace of the function"
            for change in self.changes
        )
        values = Values(leaves)
        for read in self.reads:
            if values.has(read):
                continue
            text, value = read.path.text(texts), values[read.path]
            missing = f"`{text}` is not there any more"
            reason = missing if value is _LOST else read.check.reason(text, value)
            explanations[reason] = None
        return list(explanations)
