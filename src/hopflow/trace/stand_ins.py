"""What stands for tensors in a function that runs again where they do not reach, as the
rules of `custom_jvp` do: the trace that they belong to has ended, or is left."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeAlias

from hopflow import pytree
from hopflow.bind import Interpreter, Value, slots
from hopflow.ops.convert import copy
from hopflow.tensor import EagerTensor
from hopflow.trace.functional import TracedTensor


class Read(NamedTuple):
    """A tensor of outside that a function reads.

    made    it is data of the function's own, and each run makes another tensor of it
    """

    tensor: Value
    made: bool

    @property
    def is_own(self) -> bool:
        """Whether the function may write to it."""
        tensor = self.tensor
        return self.made and isinstance(tensor, EagerTensor) and tensor.storage.private

    def is_read_as(self, value: Value) -> bool:
        """Whether `value` is this data, made again."""
        own = self.tensor
        return (
            isinstance(own, EagerTensor)
            and isinstance(value, EagerTensor)
            and own.type == value.type
            and own.host_array.tobytes() == value.host_array.tobytes()
        )


@dataclass(slots=True)
class _Noted:
    """What is read of outside, by the identity of the tensors.

    around   the interpreters whose tensors are of outside
    """

    around: list[Interpreter]
    found: dict[int, Value] = field(default_factory=dict)

    def take(self, value: Value, *, is_known: bool) -> None:
        own = not isinstance(value, TracedTensor) or value.tracer in self.around
        if own or is_known:
            self.found.setdefault(id(value), value)


Known: TypeAlias = Callable[[Value], Value | None]
"""What stands for a tensor; None: it does not say."""


class _Present(threading.local):
    """What is done in this thread.

    tables   what stands for tensors that are read; the last one that says so is right
    lower    what traces that have been left hold, the first of them left first
    notes    of what is read
    """

    tables: tuple["_Table", ...] = ()
    lower: tuple[Known, ...] = ()
    notes: tuple[_Noted, ...] = ()


_present: Final = _Present()


@contextmanager
def noting(around: Interpreter | None) -> Iterator[dict[int, Value]]:
    """Take note of the tensors of these interpreters, and of those with memory, that
    tracers meet within the block."""
    before, outer = _present.notes, []
    while around is not None:
        outer.append(around)
        around = around.parent
    noted = _Noted(outer)
    _present.notes = (*before, noted)
    try:
        yield noted.found
    finally:
        _present.notes = before


@contextmanager
def standing_in(
    reads: Sequence[Read] = (),
    values: Sequence[Value] = (),
    lower: Known | None = None,
) -> Iterator[None]:
    """Within the block `values` stand for what a function reads: it is run where the
    tensors themselves do not reach, or hold something else by now.

    Args:
        lower: What the tensors of a trace that is left for the block are outside it.
    """
    before = _present.tables, _present.lower
    if reads:
        _present.tables = (*_present.tables, _Table(reads, values))
    if lower is not None:
        _present.lower = (*_present.lower, lower)
    try:
        yield
    finally:
        _present.tables, _present.lower = before


def run_elsewhere(
    rule: Callable[[], Any],
    reads: Sequence[Read],
    values: Sequence[Value],
    lower: Known | None = None,
) -> Any:
    """What a rule returns, where the last of `values` stand for what it reads; see
    `standing_in`."""
    if lower is None and not reads:
        return rule()
    with standing_in(reads, values[len(values) - len(reads) :], lower):
        return pytree.tree_map(
            lambda leaf: stand_in(leaf) if isinstance(leaf, Value) else leaf, rule()
        )


class _Table:
    """What stands for tensors that a function reads, in one run of it.

    A tensor that it makes of data, and may write to, is another one in each run: each
    has a copy of its own of the data. Calls within are given the data alone.
    """

    def __init__(self, reads: Sequence[Read], values: Sequence[Value]) -> None:
        pairs = list(zip(reads, values, strict=True))
        self.made = [(read, value) for read, value in pairs if read.made]
        self.own = [(read, copy(value)) for read, value in pairs if read.is_own]
        stand_ins: list[Value] = [value for _, value in (*pairs, *self.own)]
        self.by_id: dict[int, Value] = {id(v): v for v in stand_ins}  # as they are
        self.by_id |= {id(read.tensor): value for read, value in pairs}
        self.met: list[Value] = []  # so that an identity stays theirs
        self.depth = len(_present.notes)

    def __call__(self, tensor: Value) -> Value | None:
        if id(tensor) in self.by_id:
            return self.by_id[id(tensor)]
        if len(_present.notes) > self.depth:  # rules are tried: they have their own
            return None
        for k, (read, value) in enumerate(self.own):
            if read.is_read_as(tensor):
                del self.own[k]
                return self._remember(tensor, value)
        return self.data(tensor)

    def data(self, tensor: Value) -> Value | None:
        """The same for a tensor that is only read."""
        for read, value in self.made:
            if read.is_read_as(tensor):
                return self._remember(tensor, value)
        return None

    def _remember(self, tensor: Value, value: Value) -> Value:
        self.met.append(tensor)
        self.by_id[id(tensor)] = value
        return value


def only_read(reads: Sequence[Read]) -> None:
    """Say of what a call within is given that it is not written."""
    for table in reversed(_present.tables):
        for read in reads:
            if id(read.tensor) not in table.by_id:
                table.data(read.tensor)


def stand_in(value: Value) -> Value:
    """What stands for a tensor that a function meets; without any it is itself."""
    present = _present
    if not (present.tables or present.lower or present.notes):
        return value
    tables = (known(value) for known in reversed(present.tables))
    found = next((v for v in tables if v is not None), value)
    for lower in present.lower:
        below = lower(found)
        found = found if below is None else below
    for noted in present.notes:
        noted.take(value, is_known=found is not value)
    return found


slots.stand_in = stand_in
