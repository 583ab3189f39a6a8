"""Guards: compiled code that finds and checks what a trace has read from outside."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import CodeType
from typing import Any, Final, NamedTuple, TypeAlias

from hopflow.bind import slots
from hopflow.trace.outside.checks import Check
from hopflow.trace.outside.paths import ERRORS, Path


class Read(NamedTuple):
    """One value that a trace has read, and what it must still be."""

    path: Path
    check: Check


class Wanted(NamedTuple):
    """A tensor that a program is given.

    path    leads to it; None: it is `value` in each call
    """

    path: Path | None
    value: Any
    is_array: bool = False


class _Writer:
    """Writes the code of one function."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.constants: dict[str, Any] = {}
        self._names: dict[int, str] = {}
        self._variables: dict[Path, str] = {}

    def hold(self, value: Any) -> str:
        """The name of a constant."""
        name = self._names.get(id(value))
        if name is None:
            name = self._names[id(value)] = f"k{len(self._names)}"
            self.constants[name] = value
        return name

    def variable(self, path: Path) -> str:
        """The variable that has the value at a path, computed once."""
        known = self._variables.get(path)
        if known is None:
            before = ""
            if path.parent is not None and not path.is_rooted:
                before = self.variable(path.parent)
            known = self._variables[path] = f"v{len(self._variables)}"
            self.lines.append(f"{known} = {path.expression(before, self.hold)}")
        return known

    def check(self, read: Read) -> None:
        v = self.variable(read.path)
        failure = read.check.failure(v, self.hold, self.variable)
        self.lines.append(f"if {failure}: return None")

    def result(self, wanted: Sequence[Wanted]) -> None:
        parts = []
        for one in wanted:
            found = (
                self.hold(one.value) if one.path is None else self.variable(one.path)
            )
            call = f"{self.hold(slots.from_array)}({found})"
            parts.append(call if one.is_array else found)
        self.lines.append(f"return [{', '.join(parts)}]")

    def function(self) -> "Find":
        body = "\n".join(f"        {line}" for line in self.lines)
        errors = self.hold(ERRORS)
        text = f"def find(leaves):\n    try:\n{body}\n    except {errors}: return None"
        exec(_compiled(text, "exec"), self.constants)
        found: Find = self.constants["find"]
        return found


Find: TypeAlias = Callable[[Sequence[Any]], list[Any] | None]
_LOST: Final[Any] = object()
"""What there is where a path leads nowhere."""


def _finds_nothing(_: Sequence[Any]) -> None:
    return None


@lru_cache(1 << 10)
def _compiled(text: str, mode: str) -> CodeType:
    """Code has constants by name, and so is the same in another trace of a function."""
    return compile(text, "<hopflow guard>", mode)


class _Values:
    """The values at paths, each computed once, for one call."""

    def __init__(self, leaves: Sequence[Any]) -> None:
        self._leaves = leaves
        self._known: dict[Path, Any] = {}

    def __getitem__(self, path: Path) -> Any:
        """The value at a path; `_LOST` if it leads nowhere."""
        if path not in self._known:
            self._known[path] = self._find(path)
        return self._known[path]

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
        """Whether a read holds."""
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
    """What a trace has read from outside.

    reads    in their order: what leads to a value was read before it
    wanted   the tensors that the program is given, beside its arguments
    changes  what the trace has changed of it: then it serves no other call
    find     from a call's leaves the tensors; None if a read does not hold any more.
             It is compiled when it is asked for
    """

    reads: list[Read]
    wanted: list[Wanted]
    changes: list[str] = field(default_factory=list)
    _find: Find | None = None

    @property
    def is_compiled(self) -> bool:
        return self._find is not None

    @property
    def find(self) -> Find:
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
        """What was read, of reads that hold."""
        values = _Values(leaves)
        return [values[read.path] for read in self.reads]

    def broken(self, leaves: Sequence[Any]) -> list[Read]:
        """The reads that do not hold any more."""
        values = _Values(leaves)
        return [read for read in self.reads if not values.has(read)]

    def reasons(self, leaves: Sequence[Any], texts: Sequence[str]) -> list[str]:
        """Why a call cannot run the program: each read that does not hold.

        Args:
            texts: How a user would write the leaves.
        """
        found = dict.fromkeys(
            f"{change} is changed by each trace of the function"
            for change in self.changes
        )
        values = _Values(leaves)
        for read in self.reads:
            if values.has(read):
                continue
            text, value = read.path.text(texts), values[read.path]
            lost = f"`{text}` is not there any more"
            reason = lost if value is _LOST else read.check.reason(text, value)
            found[reason] = None
        return list(found)
