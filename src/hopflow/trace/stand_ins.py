"""Substitution of tensors in functions that run outside the trace of these tensors.

The rules of `custom_jvp` do: below a tape, where derivatives are taken of values, and
again after the trace that they were written in has ended.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, TypeAlias

from hopflow import pytree
from hopflow.bind import Interpreter, Value, slots
from hopflow.ops.convert import copy
from hopflow.tensor import EagerTensor
from hopflow.trace.functional import TracedTensor

Known: TypeAlias = Callable[[Value], Value | None]
"""A tensor -> its substitute, or None."""


class _Present(threading.local):
    """The active substitutions and recorders of this thread.

    left       the values below of the traces that were left, the first one first
    tables     of substitutes for what is read; the last one takes precedence
    recorders  of what is read
    """

    left: tuple[Known, ...] = ()
    tables: tuple["_Table", ...] = ()
    recorders: tuple[Callable[[Value, Value], None], ...] = ()


_present: Final = _Present()


def run_below(rule: Callable[[], Any], known: Known | None) -> Any:
    """Return the result of a rule with the tensors of a trace that is left replaced by
    their values outside it, which `known` gives."""
    if known is None:
        return rule()
    before = _present.left
    _present.left = (*before, known)
    try:
        return pytree.tree_map(
            lambda leaf: stand_in(leaf) if isinstance(leaf, Value) else leaf, rule()
        )
    finally:
        _present.left = before


class Read(NamedTuple):
    """A tensor from outside that a function reads.

    tensor    the tensor
    is_data   whether the function makes it from data, anew in each run
    """

    tensor: Value
    is_data: bool

    def is_read_as(self, value: Value) -> bool:
        """Whether `value` is a tensor that another run made from the same data."""
        tensor = self.tensor
        return (
            self.is_data
            and isinstance(tensor, EagerTensor)
            and isinstance(value, EagerTensor)
            and tensor.type == value.type
            and tensor.host_array.tobytes() == value.host_array.tobytes()
        )


@contextmanager
def recording(around: Interpreter | None) -> Iterator[dict[int, Value]]:
    """Record the tensors that tracers read within the block, of an interpreter or its
    ancestors, or with memory; yield the record."""
    before, interpreters = _present.recorders, list[Interpreter]()
    while around is not None:
        interpreters.append(around)
        around = around.parent
    tensors: dict[int, Value] = {}

    def record(value: Value, substitute: Value) -> None:
        is_outside = not isinstance(value, TracedTensor) or value.tracer in interpreters
        if is_outside or substitute is not value:
            tensors.setdefault(id(value), value)

    _present.recorders = (*before, record)
    try:
        yield tensors
    finally:
        _present.recorders = before


class _Table:
    """The substitutes for the tensors that a function reads, in one run of it.

    A tensor that the function makes from data, and may write, is replaced by a copy.
    """

    def __init__(self, reads: Sequence[Read], values: Sequence[Value]) -> None:
        self.pairs = list(zip(reads, values, strict=True))
        self.by_id = {id(v): v for v in values}  # substitutes map to themselves
        self.by_id |= {id(read.tensor): value for read, value in self.pairs}
        self.made: dict[int, tuple[Value, Value]] = {}  # with its data, for each copy

    def __call__(self, tensor: Value) -> Value | None:
        if id(tensor) not in self.by_id:
            reads = (v for read, v in self.pairs if read.is_read_as(tensor))
            value = next(reads, None)
            if value is None:
                return None
            assert isinstance(tensor, EagerTensor)
            self.made[id(tensor)] = tensor, value  # kept alive: its id stays its own
            self.by_id[id(tensor)] = value
            if tensor.storage.private:
                made = copy(value)
                self.by_id |= {id(tensor): made, id(made): made}
        return self.by_id[id(tensor)]

    def only_read(self, tensor: Value) -> None:
        """Replace a tensor by the data themselves from now on."""
        if id(tensor) in self.made:
            self.by_id[id(tensor)] = self.made[id(tensor)][1]


@contextmanager
def substituted(reads: Sequence[Read], values: Sequence[Value]) -> Iterator[None]:
    """Within the block `values` replace what a function reads."""
    before = _present.tables
    _present.tables = (*before, _Table(reads, values))
    try:
        yield
    finally:
        _present.tables = before


def only_read(tensors: Iterable[Value]) -> None:
    """Declare that nothing writes these tensors any more."""
    for table in _present.tables:
        for tensor in tensors:
            table.only_read(tensor)


def stand_in(value: Value) -> Value:
    """Return the substitute of a tensor; itself if there is none."""
    present = _present
    if not (present.tables or present.left or present.recorders):
        return value
    tables = (table(value) for table in reversed(present.tables))
    substitute = next((v for v in tables if v is not None), value)
    for known in present.left:
        below = known(substitute)
        substitute = substitute if below is None else below
    for record in present.recorders:
        record(value, substitute)
    return substitute


slots.stand_in = stand_in
