"""Why a jitted function is compiled again: what differs between kinds of calls."""

import warnings
from collections.abc import Callable, Iterable, Sequence
from reprlib import repr as short
from typing import Any, Final, NamedTuple, TypeAlias

from hopflow.config import config
from hopflow.dtypes import DType
from hopflow.errors import RecompileLimitError, RecompileWarning
from hopflow.logs import log
from hopflow.tensor import EagerTensor
from hopflow.tensor.sharing import sharing
from hopflow.trace.signature import Arguments, is_data
from hopflow.trace.source import name_of, user_line, where

__all__ = ["Recompiles", "Signature", "alias_reasons", "nearest_reasons"]

_WARNED: Final = 8
"""The recompile that brings a warning."""


class _Tensor(NamedTuple):
    """What of a tensor among the arguments is part of a kind of calls."""

    dtype: DType
    ndim: int
    weak: bool

    def reasons(self, text: str, before: "_Leaf") -> list[str]:
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
    """What of another argument is: the class of a number, or a value."""

    text: str

    def reasons(self, text: str, before: "_Leaf") -> list[str]:
        """How it differs from what the argument was before."""
        return [f"`{text}` was {before}, and is {self}"]

    def __str__(self) -> str:
        return self.text


_Leaf: TypeAlias = _Tensor | _Other
_WEAK: Final = "weak (made of a Python number)"
_NOT_WEAK: Final = "not weak"


class Signature(NamedTuple):
    """A kind of calls, as it is explained.

    structure   of the arguments
    leaves      by how a user writes them
    """

    structure: str
    leaves: dict[str, _Leaf]

    @staticmethod
    def of(call: Arguments, texts: Sequence[str]) -> "Signature":
        """That of a call whose leaves a user writes so."""
        found: dict[str, _Leaf] = {}
        numbers = call.numbers
        for i, (text, leaf) in enumerate(zip(texts, call.given.leaves, strict=True)):
            if is_data(leaf):
                found[text] = _Tensor(leaf.type.dtype, leaf.type.ndim, leaf.type.weak)
            elif i in numbers:
                found[text] = _Other(f"of type {type(leaf).__name__}")
            else:
                found[text] = _Other(short(leaf))
        return Signature(f"{call.given.spec}{call.given.orders or ''}", found)

    def reasons(self, before: "Signature") -> list[str]:
        """How calls of this kind differ from calls of another one."""
        gone = [
            f"`{text}` is given no more" for text in before.leaves.keys() - self.leaves
        ]
        new = [f"`{text}` is new" for text in self.leaves.keys() - before.leaves]
        changed = [
            reason
            for text, leaf in self.leaves.items()
            if text in before.leaves and leaf != before.leaves[text]
            for reason in leaf.reasons(text, before.leaves[text])
        ]
        if not (gone or new or changed):
            return ["the structure of the arguments, or the order of keys, is another"]
        return [*sorted(gone), *sorted(new), *changed]


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
