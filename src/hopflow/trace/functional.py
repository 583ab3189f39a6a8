"""Functionalization: a write becomes a new value, seen by every view of its base.

A traced tensor that was ever viewed or written has a `FunctionalStorage`: the value
that its base has now, and a version. A view keeps the chain of view operations that
leads to it from the base; when its version is behind, it is made anew from the base. A
write to a view is carried back along the chain by each operation's `unview`.
"""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from hopflow.bind import Interpreter, Operand, Value
from hopflow.errors import EscapedValueError, MutationError, TraceError
from hopflow.graph.core import Var
from hopflow.graph.types import TensorType
from hopflow.symbolic.size import SymInt
from hopflow.tensor import Tensor
from hopflow.trace.source import user_line


class ViewStep(NamedTuple):
    """One view operation of a chain, with its operands but the first."""

    op: Any
    operands: tuple[Operand, ...]
    params: dict[str, Any]


class FunctionalStorage:
    """What a base tensor holds now: `tensor`, a plain value, never written itself."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: "TracedTensor") -> None:
        self.tensor = tensor
        self.version = 0


_NUMBER: Final = (
    "Keep it a tensor of no axes: `hf` functions take those where numbers go."
)
_ARRAY: Final = (
    "Compute with `hf` functions, which take tensors where NumPy takes arrays."
)
_REMEDY: Final = {
    "bool": "Branch with `hf.cond`, or loop with `hf.while_loop`.",
    "int": _NUMBER,
    "float": _NUMBER,
    "complex": _NUMBER,
    "item": _NUMBER,
    "operator.index": "Index with it (`x[i]`), or make it a bound of `hf.fori_loop`.",
    "tolist": "Loop with `hf.scan` or `hf.map`, or iterate over the tensor.",
}


class TracedTensor(Tensor):
    """A tensor of a trace: a var of the tracer's graph, and what it is a view of.

    tracer    whose graph it belongs to
    source    the var that holds its value, as of `version` of `storage`
    storage   None: never viewed nor written
    chain     the view operations that lead to it from the base
    taken     of a view made by `x[key]`: x and the key
    """

    __slots__ = ("chain", "source", "storage", "taken", "tracer", "version")

    def __init__(self, tracer: "Functional", var: Var) -> None:
        self.tracer = tracer
        self.source = var
        self.storage: FunctionalStorage | None = None
        self.chain: tuple[ViewStep, ...] = ()
        self.version = 0
        self.taken: tuple[Value, Any] | None = None

    @property
    def type(self) -> TensorType:
        return self.source.type

    def __getitem__(self, key: Any) -> Tensor:
        item = super().__getitem__(key)
        if isinstance(item, TracedTensor) and item.chain:
            item.taken = self, key
        return item

    def __setitem__(self, key: Any, value: Any) -> None:
        # `x[key] += v` writes through the view `x[key]`, which Python then assigns to
        # the place that it is a view of.
        if not (isinstance(value, TracedTensor) and value.is_at(self, key)):
            super().__setitem__(key, value)

    def is_at(self, owner: Value, key: Any) -> bool:
        """Whether this is the view `owner[key]`, and up to date."""
        return (
            self.taken is not None
            and self.taken[0] is owner
            and _is_same_key(self.taken[1], key)
            and self.storage is not None
            and self.storage is self.tracer.localize(owner).storage
            and self.version == self.storage.version
        )

    def __repr__(self) -> str:
        return f"Tensor(traced, {self.type})"

    def as_size(self) -> SymInt:
        """The symbolic size that the tensor is the value of.

        Raises:
            TraceError: it is the value of none.
        """
        return self.tracer.size_of(self)

    def _concrete(self, what: str) -> Any:
        line = user_line(2)
        raise TraceError(
            f"{what}() of a traced tensor {self.type}"
            + (f" at {line}" if line else "")
            + ": its value is only known when the graph runs. "
            + _REMEDY.get(what, _ARRAY)
        )


def _is_same_key(a: Any, b: Any) -> bool:
    """Whether two keys are surely the same; tensors are by identity only."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if type(a) is tuple:
        return len(a) == len(b) and all(map(_is_same_key, a, b))
    if type(a) is slice:
        parts = (a.start, b.start), (a.stop, b.stop), (a.step, b.step)
        return all(_is_same_key(x, y) for x, y in parts)
    return type(a) is int and bool(a == b)


class Functional(Interpreter):
    """An interpreter whose tensors are never changed: it keeps views and writes apart.

    A subclass records operations (`record`) and localises tensors of other levels
    (`localize`).
    """

    __slots__ = ()

    def record(
        self, op: Any, args: Sequence[Operand], params: dict[str, Any]
    ) -> tuple[TracedTensor, ...]:
        raise NotImplementedError

    def localize(self, value: Value) -> TracedTensor:
        """The tensor of this interpreter that stands for `value`."""
        raise NotImplementedError

    def size_of(self, tensor: TracedTensor) -> SymInt:
        """The symbolic size that a tensor of this interpreter is the value of."""
        raise NotImplementedError

    def process(
        self, op: Any, args: Sequence[Operand], params: dict[str, Any]
    ) -> tuple[Value, ...]:
        results = self.record(op, args, params)
        if getattr(op, "unview", None) is not None:
            base = args[0]
            if isinstance(base, Value):
                self._make_view(results[0], self.localize(base), op, args[1:], params)
        return results

    def _make_view(
        self,
        view: TracedTensor,
        base: TracedTensor,
        op: Any,
        operands: Sequence[Operand],
        params: dict[str, Any],
    ) -> None:
        storage = self.storage_of(base)
        # The chain reads its other operands as they are now, whatever is written later.
        frozen = tuple(
            self._snapshot(o) if isinstance(o, Value) else o for o in operands
        )
        view.storage = storage
        view.chain = (*base.chain, ViewStep(op, frozen, params))
        view.version = storage.version

    def _snapshot(self, value: Value) -> TracedTensor:
        return TracedTensor(self, self.read(self.localize(value)))

    def storage_of(self, tensor: TracedTensor) -> FunctionalStorage:
        """The storage of a tensor of this interpreter, made at its first need."""
        if tensor.storage is None:
            tensor.storage = FunctionalStorage(TracedTensor(self, tensor.source))
        return tensor.storage

    def read(self, tensor: TracedTensor) -> Var:
        """The var that holds the tensor's present value."""
        storage = tensor.storage
        if storage is not None and tensor.version != storage.version:
            value = storage.tensor
            for step in tensor.chain:
                [value] = self.record(step.op, (value, *step.operands), step.params)
            self.renew(tensor, value.source, storage.version)
        return tensor.source

    def renew(self, tensor: TracedTensor, var: Var, version: int) -> None:
        """Note the present value of a view that was written through another."""
        tensor.source, tensor.version = var, version

    def write(self, target: Value, new: Value) -> None:
        """Give `target`, and what shares its storage, the value `new` of its type."""
        tensor = self.localize(target)
        self.allow_write(target, tensor)
        storage = self.storage_of(tensor)
        value = TracedTensor(self, self.read(self.localize(new)))
        source = value.source
        # The values along the chain, from the base to the view's own base.
        along = [storage.tensor]
        for step in tensor.chain[:-1]:
            [inner] = self.record(step.op, (along[-1], *step.operands), step.params)
            along.append(inner)
        for step, base in zip(reversed(tensor.chain), reversed(along), strict=False):
            written = step.op.unview(base, value, *step.operands, **step.params)
            value = TracedTensor(self, self.read(self.localize(written)))
        storage.tensor = value
        storage.version += 1
        tensor.source, tensor.version = source, storage.version

    def allow_write(self, target: Value, local: TracedTensor) -> None:
        """Refuse a write that could not be made visible everywhere it should be."""


def escaped(value: TracedTensor, why: str) -> EscapedValueError:
    """The error for a value used where its trace does not reach."""
    return EscapedValueError(
        f"a traced tensor {value.type} is used outside the function whose trace made "
        f"it ({why}). Return it from that function, or pass it as an operand."
    )


def aliased_write(what: TensorType) -> MutationError:
    """The error for a write in a body to memory that it reads by another name too."""
    return MutationError(
        f"a body writes to a tensor {what} from outside that shares its memory with "
        "another one it uses. Use one of them, and take views of it inside the body."
    )
