"""Reading plain data of a stranger's: each value is checked to be of its kind."""

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NoReturn, TypeVar

from hopflow.errors import ProgramFormatError

MAX_DIGITS: Final = 80
"""Of an integer. What int64 holds has 19, and products of such have more."""

_T = TypeVar("_T")


class Part:
    """A value of the file and where it stands, for messages: `graphs[0].nodes[3].op`.

    Every method that reads it as something raises ProgramFormatError if it is not.
    """

    __slots__ = ("path", "value")

    def __init__(self, value: Any, path: str = "") -> None:
        self.value = value
        self.path = path

    def fail(self, expected: str) -> NoReturn:
        """Raises: ProgramFormatError: always."""
        # By its type alone: what a stranger gives may be of any size.
        raise ProgramFormatError(
            f"program: expected {expected} at `{self.path or 'the top'}`, and found "
            f"{_described(self.value)}."
        )

    def _of(self, kind: type[_T], expected: str) -> _T:
        if type(self.value) is not kind:
            self.fail(expected)
        return self.value

    def text(self) -> str:
        return self._of(str, "a string")

    def flag(self) -> bool:
        return self._of(bool, "true or false")

    def integer(self, low: int = 0, high: int = (1 << 63) - 1) -> int:
        value = self._of(int, "an integer")
        if not low <= value <= high:
            self.fail(f"an integer from {low} to {high}")
        return value

    def one_of(self, allowed: Sequence[str]) -> str:
        value = self.text()
        if value not in allowed:
            self.fail(f"one of {', '.join(allowed)}")
        return value

    def items(self, count: int | None = None) -> "list[Part]":
        """The elements of a list, of which there must be `count`, if that is given."""
        value = self._of(list, "a list")
        if count is not None and len(value) != count:
            self.fail(f"a list of {count}")
        return [Part(x, f"{self.path}[{i}]") for i, x in enumerate(value)]

    def each(self, read: "Callable[[Part], _T]") -> tuple[_T, ...]:
        """What `read` makes of each element of a list."""
        return tuple([read(item) for item in self.items()])

    def named(self) -> "dict[str, Part]":
        """The members of an object of any names."""
        value = self._of(dict, "an object")
        start = f"{self.path}." if self.path else ""
        return {key: Part(x, f"{start}{key[:80]}") for key, x in value.items()}

    def members(
        self, required: Sequence[str], optional: Sequence[str] = ()
    ) -> "dict[str, Part]":
        """The members of an object that has these names and no others."""
        found = self.named()
        missing = [name for name in required if name not in found]
        unknown = [k for k in found if k not in required and k not in optional]
        if missing or unknown:
            wanted = ", ".join(required) or "no other members"
            self.fail(f"an object with {wanted}")
        return found

    def within(self, table: Sequence[_T], what: str) -> _T:
        """The entry of a table that this is the number of."""
        value = self._of(int, f"the number of {what}")
        if not 0 <= value < len(table):
            self.fail(f"the number of {what}, below {len(table)}")
        return table[value]

    def known(self, table: Mapping[str, _T], what: str) -> _T:
        """The entry of a table that this is the name of."""
        name = self.text()
        if name not in table:
            self.fail(f"the name of {what}")
        return table[name]


def _described(value: Any) -> str:
    if isinstance(value, str):
        return f"{value[:40]!r}"
    if isinstance(value, float):
        return repr(value)
    return _KINDS.get(type(value), type(value).__name__)


_KINDS: Final = {
    dict: "an object",
    list: "a list",
    int: "an integer",
    bool: "a truth value",
    type(None): "null",
}


def parsed(text: bytes, what: str) -> Any:
    """The value that a JSON text is.

    Raises:
        ProgramFormatError: it is none; or has a name twice in an object, or an integer
            of more than `MAX_DIGITS` digits.
    """
    try:
        return json.loads(
            text.decode("utf-8"),
            object_pairs_hook=_object,
            parse_int=_integer,
            parse_constant=_constant,
        )
    except (ValueError, RecursionError) as error:
        raise ProgramFormatError(f"{what} is no JSON text: {error}.") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("an object has a name twice")
    return found


def _integer(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise ValueError(f"an integer has more than {MAX_DIGITS} digits")
    return int(text)


def _constant(text: str) -> Any:
    raise ValueError(f"`{text}` is no number of JSON")


def written(value: Any) -> bytes:
    """Plain data as a JSON text, the same bytes each time."""
    return json.dumps(
        value, ensure_ascii=True, allow_nan=False, separators=(",", ":")
    ).encode("ascii")
