"""Why a jitted function is compiled again: what differs between kinds of calls."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from reprlib import repr as short
from typing import Any, Final, NamedTuple, TypeAlias

from hopflow import pytree
from hopflow.config import config
from hopflow.dtypes import DType
from hopflow.errors import RecompileLimitError, RecompileWarning
from hopflow.logs import log
from hopflow.tensor import EagerTensor
from hopflow.tensor.sharing import sharing
from hopflow.trace.signature import Arguments, is_data
from hopflow.trace.source import name_of, user_line, where

_WARNED: Final = 8
"""The recompile that brings a warning."""


class _Tensor(NamedTuple):
    """What of a tensor among the arguments is part of a kind of calls."""

    dtype: DType
    ndim: int
    weak: bool

    def reasons(self, text: str, before: "_Part") -> list[str]:
        """How it differs from what the argument was before."""
        if not isinstance(before, _Tensor):
            return [f"`{text}` was {before}, and is {self}"]
        found = []
        if before.dtype is not self.dtype:
            found.append(f"was {before.dtype.name}, and is {self.dtype.name}")
        if before.ndim != self.ndim:
            found.append(f"was of rank {before.ndim}, and is of rank {self.ndim}")
        if before.weak is not self.weak:
            was, now = (_WEAK if x.weak else _NOT_WEAK for x in (before, self))
            found.append(f"was {was}, and is {now}")
        return [f"`{text}` {reason}" for reason in found]

    def __str__(self) -> str:
        return f"a tensor of {self.dtype.name}"


class _Other(NamedTuple):
    """What of another argument is: the class of a number, or a value.

    key   what tells it from others
    text  which need not
    """

    key: Any
    text: str

    def reasons(self, text: str, before: "_Part") -> list[str]:
        """How it differs from what the argument was before."""
        if isinstance(before, _Other) and before.key == self.key:
            return []
        if str(before) == self.text:
            return [f"`{text}` is another value that reads {self}"]
        return [f"`{text}` was {before}, and is {self}"]

    def __str__(self) -> str:
        return self.text


class _Container(NamedTuple):
    """What of a container among the arguments is part of a kind of calls.

    parts   by what a user writes behind it: `[0]`, `['w']`, `.weight`
    order   of the keys of a dict
    fields  the attributes that are no parts
    rest    all that it holds besides parts
    """

    kind: type
    parts: "dict[str, _Part]"
    order: tuple[Any, ...]
    fields: dict[str, Any]
    rest: Any

    def reasons(self, text: str, before: "_Part") -> list[str]:
        """How it differs from what the argument was before."""
        if not isinstance(before, _Container) or before.kind is not self.kind:
            if str(before) == str(self):
                return [f"`{text}` is of another class that is named like it was"]
            return [f"`{text}` was {before}, and is {self}"]
        if _ties(self.rest) != _ties(before.rest):
            return [f"`{text}` has other parts than before that are one tensor"]
        found = _differences(text, self.parts, before.parts)
        for name, value in self.fields.items():
            was = before.fields.get(name)
            if pytree.exact_key(value) != pytree.exact_key(was):
                found += _other(value).reasons(f"{text}.{name}", _other(was))
        if before.order != self.order and {*before.order} == {*self.order}:
            found.append(f"the keys of `{text}` are in another order")
        if not found and before.rest != self.rest:
            found.append(f"`{text}` holds something else besides its parts")
        return found

    def __str__(self) -> str:
        if self.kind is type(None):
            return "None"
        name = self.kind.__name__
        return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


_Part: TypeAlias = _Tensor | _Other | _Container
_WEAK: Final = "weak (made of a Python number)"
_NOT_WEAK: Final = "not weak"


def _ties(rest: Any) -> Any:
    """Which parts of a container are one tensor, by what it holds besides parts."""
    held = rest if isinstance(rest, tuple) else ()
    return next((x for x in held if isinstance(x, pytree.Ties)), None)


def _other(value: Any) -> _Other:
    return _Other(pytree.exact_key(value), short(value))


def _differences(
    text: str, now: Mapping[str, _Part], before: Mapping[str, _Part]
) -> list[str]:
    """How the parts of what a user writes as `text` differ from those before."""
    gone = [f"`{text}{part}` is given no more" for part in before if part not in now]
    new = [f"`{text}{part}` is new" for part in now if part not in before]
    changed = [
        reason
        for part, value in now.items()
        if part in before
        for reason in value.reasons(f"{text}{part}", before[part])
    ]
    return [*gone, *new, *changed]


class Signature(NamedTuple):
    """A kind of calls, as it is explained.

    arguments  by name, those that are given by position first
    named      the names of the others, in order
    """

    arguments: dict[str, _Part]
    named: tuple[str, ...]

    @staticmethod
    def of(call: Arguments, names: Sequence[str]) -> "Signature":
        """That of a call whose arguments have these names."""
        args, kwargs = call.flat.args, call.flat.kwargs
        values = [*args, *(kwargs[name] for name in names[len(args) :])]
        leaves = _leaves(call)
        parts = [_part(value, leaves) for value in values]
        return Signature(dict(zip(names, parts, strict=True)), tuple(kwargs))

    def reasons(self, before: "Signature") -> list[str]:
        """How calls of this kind differ from calls of another one."""
        found = _differences("", self.arguments, before.arguments)
        ways = "by position", "by name"
        for name in filter(before.arguments.__contains__, self.arguments):
            was, now = (ways[name in x.named] for x in (before, self))
            if was != now:
                found.append(f"`{name}` was given {was}, and is given {now}")
        if not found and self.named != before.named:
            return ["the arguments that are given by name are in another order"]
        return found or ["the structure of the arguments is another"]


def _leaves(call: Arguments) -> Iterator[_Part]:
    """The leaves of a call's arguments, in order."""
    numbers = call.numbers
    for i, leaf in enumerate(call.flat.leaves):
        if is_data(leaf):
            yield _Tensor(leaf.type.dtype, leaf.type.ndim, leaf.type.weak)
        elif i in numbers:
            yield _Other(type(leaf), f"of type {type(leaf).__name__}")
        else:
            yield _other(leaf)


def _part(value: Any, leaves: Iterator[_Part]) -> _Part:
    """An argument, or a part of one, whose leaves come next."""
    found = pytree.parts_of(value)
    if found is None:
        return next(leaves)
    parts, rest = found
    names = {f.name for f in fields(value)} if is_dataclass(value) else set()
    return _Container(
        type(value),
        {text: _part(part, leaves) for text, part in parts.items()},
        tuple(value) if isinstance(value, dict) else (),
        {n: getattr(value, n) for n in sorted(names) if f".{n}" not in parts},
        rest,
    )


def nearest_reasons(now: Signature, known: Iterable[Signature]) -> list[str]:
    """How a kind of calls differs from the known one that it is most like."""
    return min((now.reasons(before) for before in known), key=len)


def alias_reasons(
    tensors: Sequence[EagerTensor], texts: Sequence[str], written: Sequence[int]
) -> list[str]:
    """Which tensors, by how a user writes them, share memory that is written."""
    found = []
    for k, (_, others, _) in enumerate(sharing(tensors)):
        for other in others:
            if k in written and (other not in written or k < other):
                found.append(
                    f"`{texts[k]}` is written, and shares memory with `{texts[other]}`"
                )
    return found


class Recompiles:
    """How often a function was compiled again, of which every time is logged."""

    def __init__(self, f: Callable[..., Any]) -> None:
        self._f = f
        self.count = 0

    def note(self, reasons: Callable[[], str]) -> None:
        """Take note that the function is about to be compiled again.

        Raises:
            RecompileLimitError: it has been so as often as `config.recompile_limit`
                allows.
        """
        name, place = name_of(self._f), where(self._f)
        log("recompiles", lambda: f"{name}: {reasons()}")
        at = f" ({place})" if place else ""
        limit = config.recompile_limit
        if limit is not None and self.count >= limit:
            raise RecompileLimitError(
                f"jit: `{name}`{at} has been compiled again {self.count} times, and "
                f"`hf.config.recompile_limit` allows {limit}. Now it would be:\n"
                f"{reasons()}\n{_REMEDY}"
            )
        self.count += 1
        if self.count == _WARNED:
            _warn(
                f"jit: `{name}`{at} is compiled again for the {_WARNED}th time:\n"
                f"{reasons()}\n{_REMEDY}"
            )


_REMEDY: Final = (
    "Pass numbers that change as arguments or tensors, sizes with `dynamic=True`, and "
    "keep what else the function reads as it is. HOPFLOW_LOGS=recompiles shows every "
    "reason."
)


def _warn(text: str) -> None:
    """Warn of the user's line that called."""
    line = user_line()
    if line is None:
        warnings.warn(text, RecompileWarning, stacklevel=2)
    else:
        warnings.warn_explicit(text, RecompileWarning, line.file, line.line)
