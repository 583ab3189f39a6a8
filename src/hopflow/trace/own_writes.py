"""Functions that may write only to what they have made themselves.

On values an interpreter above the eager one notes what is made; in traces a guard knows
what there was before.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeAlias

from hopflow import pytree
from hopflow.bind import Interpreter, Operand, Value, current, using
from hopflow.errors import MutationError
from hopflow.graph.core import Node
from hopflow.graph.types import TensorType
from hopflow.ops.rules import Array
from hopflow.tensor import Eager, EagerTensor, Storage
from hopflow.trace.functional import TracedTensor
from hopflow.trace.numbers import Numbers

Refusal: TypeAlias = Callable[[TensorType], MutationError]
"""The error for a write to a tensor of outside, of this type."""


class OwnWritesOnly(Eager):
    """Has a function, which may write only to what it has made itself, computed by the
    interpreter around.

    Tensors in the tree `private` are values: what is written to them is taken back.
    """

    __slots__ = ("_outer", "_own", "_private", "_refusal", "_written")

    def __init__(self, refusal: Refusal, private: Any = ()) -> None:
        super().__init__()
        self._refusal = refusal
        self._outer = current()
        self._own: set[Storage] = set()
        leaves = pytree.flatten(private)[0]
        self._private = [x for x in leaves if isinstance(x, EagerTensor)]
        self._written: dict[Storage, list[tuple[EagerTensor, Array, int]]] = {}

    def process(
        self, op: Any, args: Sequence[Operand], params: dict[str, Any]
    ) -> tuple[Value, ...]:
        results = self._outer.process(op, args, params)
        for result in results:
            if isinstance(result, EagerTensor) and not _is_view(result, args):
                self._note(result.storage)
        return results

    def adopt(self, value: Value) -> None:
        if isinstance(value, EagerTensor) and value.storage.private:
            self._note(value.storage)

    def _note(self, storage: Storage) -> None:
        self._own.add(storage)
        if isinstance(self._outer, OwnWritesOnly):
            self._outer._note(storage)

    def check_write(self, target: Value) -> None:
        if not isinstance(target, EagerTensor):  # a trace has made it
            raise self._refusal(target.type)
        if self.has_made(target):
            return
        storage = target.storage
        own = [x for x in self._private if x.storage is storage]
        if not own:
            raise self._refusal(target.type)
        is_readonly = storage.readonly or not target.array.flags.writeable
        if storage not in self._written and not is_readonly:
            kept = [(x, x.host_array.copy(), storage.version) for x in own]
            self._written[storage] = kept

    def run(self, f: Callable[[], Any]) -> Any:
        """What `f` returns; of tensors that it has not made, a copy."""
        try:
            with using(self):
                found = f()
                return pytree.tree_map(self._apart, found)
        finally:
            for storage, kept in self._written.items():
                for tensor, array, version in kept:
                    tensor.array[...] = array
                    storage.wrote(tensor.array)
                    storage.version = version  # it is what it was

    def _apart(self, leaf: Any) -> Any:
        is_outside = isinstance(leaf, EagerTensor) and not self.has_made(leaf)
        return leaf.copy() if is_outside else leaf

    def has_made(self, value: Value) -> bool:
        """Whether the function has made a tensor."""
        return isinstance(value, EagerTensor) and value.storage in self._own


def _is_view(result: EagerTensor, args: Sequence[Operand]) -> bool:
    """Whether a result is in memory that it was made of."""
    known = result._storage
    return known is not None and any(
        isinstance(a, EagerTensor) and a._storage is known for a in args
    )


def apart(leaves: Sequence[Any]) -> list[Any]:
    """The same leaves, none of which shares memory with another."""
    found: list[Any] = []
    for leaf in leaves:
        known = [x for x in found if isinstance(x, EagerTensor)]
        shared = isinstance(leaf, EagerTensor) and any(map(leaf.overlaps, known))
        found.append(leaf.copy() if shared else leaf)
    return found


class _Guard:
    """Knows what there was in the present traces before a function ran."""

    def __init__(self, refusal: Refusal) -> None:
        self.refusal = refusal
        self.before: dict[Interpreter, list[Node]] = {}
        self.adopted: dict[int, Value] = {}
        around: Interpreter | None = current()
        while around is not None:
            if isinstance(around, Numbers):
                self.before[around] = around.graph.nodes.copy()
            around = around.parent

    def has_made(self, value: Value) -> bool:
        """Whether the function has made a tensor."""
        if not isinstance(value, TracedTensor):
            return id(value) in self.adopted
        before = self.before.get(value.tracer)
        if before is None:  # a trace that the function has begun
            return True
        owner = value.tracer.place(value).storage.owner
        node = owner.source.node
        if node.kind != "placeholder" and all(node is not n for n in before):
            return True
        return any(id(x) in self.adopted for x in _origins(owner))


class _Guards(threading.local):
    present: tuple[_Guard, ...] = ()


_guards: Final = _Guards()


@contextmanager
def own_writes_only(refusal: Refusal) -> Iterator[OwnWritesOnly | _Guard]:
    """Within the block a write to a tensor that was not made there is an error; what it
    gives knows which were."""
    if current().is_eager:
        own = OwnWritesOnly(refusal)
        with using(own):
            yield own
        return
    before, guard = _guards.present, _Guard(refusal)
    _guards.present = (*before, guard)
    try:
        yield guard
    finally:
        _guards.present = before


def check_own(tensor: TracedTensor) -> None:
    """Check that a tensor of a trace may be written here.

    Raises:
        MutationError: it may not.
    """
    for guard in _guards.present:
        if not guard.has_made(tensor):
            raise guard.refusal(tensor.type)


def note_own(value: Value) -> None:
    """Note a tensor that was made of data here, or stands for one."""
    for guard in _guards.present:
        for tensor in _origins(value):
            if not isinstance(tensor, EagerTensor) or tensor.storage.private:
                guard.adopted[id(tensor)] = tensor


def _origins(value: Value | None) -> Iterator[Value]:
    """A tensor, as each trace around has it."""
    while value is not None:
        yield value
        value = getattr(value, "origin", None)
