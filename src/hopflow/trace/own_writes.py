"""Functions that may write only to tensors which they have made themselves.

For eager tensors, an interpreter records the new storages; in traces, a guard has a
snapshot of the nodes from before.
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
"""Type of a tensor from outside -> the error for a write to it."""


class OwnWritesOnly(Eager):
    """Evaluates operations by the interpreter around, and forbids writes to tensors
    that were not made meanwhile.

    Tensors in the tree `private` may be written; their values are restored at the end.
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
        if not isinstance(target, EagerTensor):  # a tensor of an enclosing trace
            raise self._refusal(target.type)
        if self.has_made(target):
            return
        storage = target.storage
        aliases = [x for x in self._private if x.storage is storage]
        if not aliases:
            raise self._refusal(target.type)
        is_readonly = storage.readonly or not target.array.flags.writeable
        if storage not in self._written and not is_readonly:
            saved = [(x, x.host_array.copy(), storage.version) for x in aliases]
            self._written[storage] = saved

    def run(self, f: Callable[[], Any]) -> Any:
        """Call `f`; return its result with copies of tensors that it did not make."""
        try:
            with using(self):
                result = f()
                return pytree.tree_map(self._apart, result)
        finally:
            for storage, copies in self._written.items():
                for tensor, array, version in copies:
                    tensor.array[...] = array
                    storage.wrote(tensor.array)
                    storage.version = version  # the value is that of the old version

    def _apart(self, leaf: Any) -> Any:
        is_outside = isinstance(leaf, EagerTensor) and not self.has_made(leaf)
        return leaf.copy() if is_outside else leaf

    def has_made(self, value: Value) -> bool:
        """Whether the function made a tensor."""
        return isinstance(value, EagerTensor) and value.storage in self._own


def _is_view(result: EagerTensor, args: Sequence[Operand]) -> bool:
    """Whether a result has the storage of one of the args."""
    storage = result._storage
    return storage is not None and any(
        isinstance(a, EagerTensor) and a._storage is storage for a in args
    )


def apart(leaves: Sequence[Any]) -> list[Any]:
    """Return the same leaves, with copies of those that alias an earlier one."""
    result: list[Any] = []
    for leaf in leaves:
        tensors = [x for x in result if isinstance(x, EagerTensor)]
        shared = isinstance(leaf, EagerTensor) and any(map(leaf.overlaps, tensors))
        result.append(leaf.copy() if shared else leaf)
    return result


class _Guard:
    """A snapshot of the current traces from before a function runs.

    refusal   the error for a write to a tensor from before
    before    tracer -> its nodes from before
    adopted   the tensors that the function made from data, by id
    """

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
        """Whether the function made a tensor."""
        if not isinstance(value, TracedTensor):
            return id(value) in self.adopted
        before = self.before.get(value.tracer)
        if before is None:  # a trace that began in the function
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
    """Forbid writes within the block to tensors that were not made there.

    Yields an object whose `has_made` distinguishes these tensors.
    """
    if current().is_eager:
        interpreter = OwnWritesOnly(refusal)
        with using(interpreter):
            yield interpreter
        return
    outer_guards, guard = _guards.present, _Guard(refusal)
    _guards.present = (*outer_guards, guard)
    try:
        yield guard
    finally:
        _guards.present = outer_guards


def check_own(tensor: TracedTensor) -> None:
    """Check that `own_writes_only` allows a write to a traced tensor.

    Raises:
        MutationError: it does not.
    """
    for guard in _guards.present:
        if not guard.has_made(tensor):
            raise guard.refusal(tensor.type)


def note_own(value: Value) -> None:
    """Note a tensor that was just made from data, with its origins."""
    for guard in _guards.present:
        for tensor in _origins(value):
            if not isinstance(tensor, EagerTensor) or tensor.storage.private:
                guard.adopted[id(tensor)] = tensor


def _origins(value: Value | None) -> Iterator[Value]:
    """Yield a tensor and its origins in the enclosing traces."""
    while value is not None:
        yield value
        value = getattr(value, "origin", None)
