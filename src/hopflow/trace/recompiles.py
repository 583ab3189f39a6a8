"""Reasons for recompiles of a jitted function: differences between signatures."""

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
"""The number of the recompile that warns."""


class _Tensor(NamedTuple):
    """The part of a tensor that belongs to a signature."""

    dtype: DType
    ndim: int
    weak: bool

    def reasons(self, text: str, before: "_Part") -> list[str]:
        """Return how it differs from the argument before."""
        if not isinstance(before, _Tensor):
            return [f"`{text}` was {before}, and is {self}"]
        differences = []
        if before.dtype is not self.dtype:
            differences.append(f"was {before.dtype.name}, and is {self.dtype.name}")
        if before.ndim != self.ndim:
            differences.append(f"was of rank {before.ndim}, and is of rank {self.ndim}")
        if before.weak is not self.weak:
            old, new = (_WEAK if x.weak else _NOT_WEAK for x in (before, self))
            differences.append(f"was {old}, and is {new}")
        return [f"`{text}` {reason}" for reason in differences]

    def __str__(self) -> str:
        return f"a tensor of {self.dtype.name}"


class _Other(NamedTuple):
    """The part of another argument that belongs to a signature: the class of a number,
    or a static value.

    key   identifies it
    text  describes it, not necessarily uniquely
    """

    key: Any
    text: str

    def reasons(self, text: str, before: "_Part") -> list[str]:
        """Return how it differs from the argument before."""
        if isinstance(before, _Other) and before.key == self.key:
            return []
        if str(before) == self.text:
            return [f"`{text}` is another value that reads {self}"]
        return [f"`{text}` was {before}, and is {self}"]

    def __str__(self) -> str:
        return self.text


class _Container(NamedTuple):
    """The part of a container that belongs to a signature.

    parts   its children by subscript: `[0]`, `['w']`, `.weight`
    order   the keys of a dict, in order
    fields  its static attributes
    rest    all its static data
    """

    kind: type
    parts: "dict[str, _Part]"
    order: tuple[Any, ...]
    fields: dict[str, Any]
    rest: Any

    def reasons(self, text: str, before: "_Part") -> list[str]:
        """Return how it differs from the argument before."""
        if not isinstance(before, _Container) or before.kind is not self.kind:
            if str(before) == str(self):
                return [f"`{text}` is of another class that is named like it was"]
            return [f"`{text}` was {before}, and is {self}"]
        if _ties(self.rest) != _ties(before.rest):
            return [f"`{text}` has other parts than before that are one tensor"]
        differences = _differences(text, self.parts, before.parts)
        for name, value in self.fields.items():
            old_value = before.fields.get(name)
            if pytree.exact_key(value) != pytree.exact_key(old_value):
                differences += _other(value).reasons(
                    f"{text}.{name}", _other(old_value)
                )
        if before.order != self.order and {*before.order} == {*self.order}:
            differences.append(f"the keys of `{text}` are in another order")
        if not differences and before.rest != self.rest:
            differences.append(f"`{text}` holds something else besides its parts")
        return differences

    def __str__(self) -> str:
        if self.kind is type(None):
            return "None"
        name = self.kind.__name__
        return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


_Part: TypeAlias = _Tensor | _Other | _Container
_WEAK: Final = "weak (made of a Python number)"
_NOT_WEAK: Final = "not weak"


def _ties(rest: Any) -> Any:
    """Return the ties of a container, from its static data."""
    data = rest if isinstance(rest, tuple) else ()
    return next((x for x in data if isinstance(x, pytree.Ties)), None)


def _other(value: Any) -> _Other:
    return _Other(pytree.exact_key(value), short(value))


def _differences(
    text: str, now: Mapping[str, _Part], before: Mapping[str, _Part]
) -> list[str]:
    """Return how the children of the container `text` differ from those before."""
    removed = [f"`{text}{part}` is given no more" for part in before if part not in now]
    added = [f"`{text}{part}` is new" for part in now if part not in before]
    changed = [
        reason
        for part, value in now.items()
        if part in before
        for reason in value.reasons(f"{text}{part}", before[part])
    ]
    return [*removed, *added, *changed]


class Signature(NamedTuple):
    """The signature of calls, in a form that can be explained.

    arguments  the arguments by name, positional ones first
    named      the names of keyword arguments, in order
    """

    arguments: dict[str, _Part]
    named: tuple[str, ...]

    @staticmethod
    def of(call: Arguments, names: Sequence[str]) -> "Signature":
        """Return the signature of a call whose arguments have these names."""
        args, kwargs = call.flat.args, call.flat.kwargs
        values = [*args, *(kwargs[name] for name in names[len(args) :])]
        leaves = _leaves(call)
        parts = [_part(value, leaves) for value in values]
        return Signature(dict(zip(names, parts, strict=True)), tuple(kwargs))

    def reasons(self, before: "Signature") -> list[str]:
        """Return how this signature differs from another one."""
        differences = _differences("", self.arguments, before.arguments)
        ways = "by position", "by name"
        for name in filter(before.arguments.__contains__, self.arguments):
            old, new = (ways[name in x.named] for x in (before, self))
            if old != new:
                differences.append(f"`{name}` was given {old}, and is given {new}")
        if not differences and self.named != before.named:
            return ["the arguments that are given by name are in another order"]
        return differences or ["the structure of the arguments is another"]


def _leaves(call: Arguments) -> Iterator[_Part]:
    """Yield the leaves of a call's arguments, in order."""
    numbers = call.numbers
    for i, leaf in enumerate(call.flat.leaves):
        if is_data(leaf):
            yield _Tensor(leaf.type.dtype, leaf.type.ndim, leaf.type.weak)
        elif i in numbers:
            yield _Other(type(leaf), f"of type {type(leaf).__name__}")
        else:
            yield _other(leaf)


def _part(value: Any, leaves: Iterator[_Part]) -> _Part:
    """Return an argument, or a part of one; its leaves are the next of `leaves`."""
    parts_and_data = pytree.parts_of(value)
    if parts_and_data is None:
        return next(leaves)
    parts, rest = parts_and_data
    names = {f.name for f in fields(value)} if is_dataclass(value) else set()
    return _Container(
        type(value),
        {text: _part(part, leaves) for text, part in parts.items()},
        tuple(value) if isinstance(value, dict) else (),
        {n: getattr(value, n) for n in sorted(names) if f".{n}" not in parts},
        rest,
    )


def nearest_reasons(signature: Signature, others: Iterable[Signature]) -> list[str]:
    """Return how a signature differs from the most similar of the others."""
    return min((signature.reasons(before) for before in others), key=len)


def alias_reasons(
    tensors: Sequence[EagerTensor], texts: Sequence[str], written: Sequence[int]
) -> list[str]:
    """Return which written tensors alias another one.

    Args:
        texts: The user's expressions for the tensors.
        written: The positions of the tensors that are written.
    """
    reasons = []
    for k, (_, others, _) in enumerate(sharing(tensors)):
        for other in others:
            if k in written and (other not in written or k < other):
                reasons.append(
                    f"`{texts[k]}` is written, and shares memory with `{texts[other]}`"
                )
    return reasons


class Recompiles:
    """Counts and logs the recompiles of a function."""

    def __init__(self, f: Callable[..., Any]) -> None:
        self._f = f
        self.count = 0

    def note(self, reasons: Callable[[], str]) -> None:
        """Count a recompile that is about to happen.

        Raises:
            RecompileLimitError: it would exceed `config.recompile_limit`.
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
    """Warn at the user's line that calls."""
    line = user_line()
    if line is None:
        warnings.warn(text, RecompileWarning, stacklevel=2)
    else:
        warnings.warn_explicit(text, RecompileWarning, line.file, line.line)
