"""Substitution of captured tensors in functions that run again, such as the rules of
`custom_jvp`, after the trace of these tensors has ended or has been left."""

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
    """A tensor from outside that a function reads.

    tensor    the tensor
    is_data   whether the function makes it from data, anew in each run
    """

    tensor: Value
    is_data: bool

    @property
    def may_be_written(self) -> bool:
        """Whether the function may write to it."""
        tensor = self.tensor
        return (
            self.is_data and isinstance(tensor, EagerTensor) and tensor.storage.private
        )

    def is_read_as(self, value: Value) -> bool:
        """Whether `value` is a tensor that another run made from the same data."""
        tensor = self.tensor
        return (
            isinstance(tensor, EagerTensor)
            and isinstance(value, EagerTensor)
            and tensor.type == value.type
            and tensor.host_array.tobytes() == value.host_array.tobytes()
        )


@dataclass(slots=True)
class _Noted:
    """A recorder of the tensors from outside that are read.

    around    the interpreters whose tensors are from outside
    tensors   the tensors that were read, by id
    """

    around: list[Interpreter]
    tensors: dict[int, Value] = field(default_factory=dict)

    def take(self, value: Value, *, is_known: bool) -> None:
        is_outside = not isinstance(value, TracedTensor) or value.tracer in self.around
        if is_outside or is_known:
            self.tensors.setdefault(id(value), value)


Known: TypeAlias = Callable[[Value], Value | None]
"""A tensor -> its substitute, or None."""


class _Present(threading.local):
    """The active substitutions and recorders of this thread.

    tables   tables of substitutes for captured tensors; the last one takes precedence
    lower    for each trace that was left, the first one first, the values of its
             tensors below
    notes    the recorders of reads
    """

    tables: tuple["_Table", ...] = ()
    lower: tuple[Known, ...] = ()
    notes: tuple[_Noted, ...] = ()


_present: Final = _Present()


@contextmanager
def noting(around: Interpreter | None) -> Iterator[dict[int, Value]]:
    """Record the tensors that tracers read within the block, of an interpreter or its
    ancestors, or with memory; yield the record."""
    previous, interpreters = _present.notes, []
    while around is not None:
        interpreters.append(around)
        around = around.parent
    noted = _Noted(interpreters)
    _present.notes = (*previous, noted)
    try:
        yield noted.tensors
    finally:
        _present.notes = previous


@contextmanager
def standing_in(
    reads: Sequence[Read] = (),
    values: Sequence[Value] = (),
    lower: Known | None = None,
) -> Iterator[None]:
    """Substitute `values` for the tensors that a function reads within the block: their
    trace has ended, or they were written since.

    Args:
        lower: A tensor of a trace that is left for the block -> its value outside.
    """
    previous = _present.tables, _present.lower
    if reads:
        _present.tables = (*_present.tables, _Table(reads, values))
    if lower is not None:
        _present.lower = (*_present.lower, lower)
    try:
        yield
    finally:
        _present.tables, _present.lower = previous


def run_elsewhere(
    rule: Callable[[], Any],
    reads: Sequence[Read],
    values: Sequence[Value],
    lower: Known | None = None,
) -> Any:
    """Return the result of a rule with the last of `values` substituted for its reads;
    see `standing_in`."""
    if lower is None and not reads:
        return rule()
    with standing_in(reads, values[len(values) - len(reads) :], lower):
        return pytree.tree_map(
            lambda leaf: stand_in(leaf) if isinstance(leaf, Value) else leaf, rule()
        )


class _Table:
    """The substitutes for the tensors that a function reads, in one run of it.

    A tensor that the function makes from data and may write is replaced by a copy for
    each run; one that it only reads is replaced by the data itself.
    """

    def __init__(self, reads: Sequence[Read], values: Sequence[Value]) -> None:
        pairs = list(zip(reads, values, strict=True))
        self.data_reads = [(read, value) for read, value in pairs if read.is_data]
        self.copies = [
            (read, copy(value)) for read, value in pairs if read.may_be_written
        ]
        stand_ins: list[Value] = [value for _, value in (*pairs, *self.copies)]
        self.by_id: dict[int, Value] = {
            id(v): v for v in stand_ins
        }  # substitutes map to themselves
        self.by_id |= {id(read.tensor): value for read, value in pairs}
        self.met: list[Value] = []  # kept alive, so that ids stay unique
        self.depth = len(_present.notes)

    def __call__(self, tensor: Value) -> Value | None:
        if id(tensor) in self.by_id:
            return self.by_id[id(tensor)]
        if len(_present.notes) > self.depth:  # a dry run has tables of its own
            return None
        for k, (read, value) in enumerate(self.copies):
            if read.is_read_as(tensor):
                del self.copies[k]
                return self._remember(tensor, value)
        return self.data(tensor)

    def data(self, tensor: Value) -> Value | None:
        """Return the substitute for a tensor that is only read."""
        for read, value in self.data_reads:
            if read.is_read_as(tensor):
                return self._remember(tensor, value)
        return None

    def _remember(self, tensor: Value, value: Value) -> Value:
        self.met.append(tensor)
        self.by_id[id(tensor)] = value
        return value


def only_read(reads: Sequence[Read]) -> None:
    """Declare that a nested call only reads these tensors and does not write them."""
    for table in reversed(_present.tables):
        for read in reads:
            if id(read.tensor) not in table.by_id:
                table.data(read.tensor)


def stand_in(value: Value) -> Value:
    """Return the substitute of a tensor; itself if there is none."""
    present = _present
    if not (present.tables or present.lower or present.notes):
        return value
    substitutes = (table(value) for table in reversed(present.tables))
    substitute = next((v for v in substitutes if v is not None), value)
    for lower in present.lower:
        below = lower(substitute)
        substitute = substitute if below is None else below
    for noted in present.notes:
        noted.take(value, is_known=substitute is not value)
    return substitute


slots.stand_in = stand_in
