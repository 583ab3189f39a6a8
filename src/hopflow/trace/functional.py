"""Functionalization: a write becomes a new value, seen by every view of its base.

`docs/notes/memory_and_aliases.md` says how storages, chains of views and versions do
that.

A base may turn out to be a part of another one, as when a body reads a view of what it
writes: its storage then says where it is `within` that, and all its views follow.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from hopflow.bind import (
    Interpreter,
    Operand,
    Value,
    bind,
    check_memory,
    has_process,
    using,
)
from hopflow.errors import ConversionError, EscapedValueError, MutationError, TraceError
from hopflow.graph.core import SourceLine, Var
from hopflow.graph.types import Shape, TensorType
from hopflow.ops.deferred import resized
from hopflow.ops.sizes import equals, is_unbacked
from hopflow.ops.strided import StridedPlace, put_strided, take_strided
from hopflow.symbolic.size import Size, Symbol
from hopflow.tensor import Tensor
from hopflow.tensor.exported import remedy
from hopflow.trace.source import direct_line, user_line


class ViewStep(NamedTuple):
    """One view operation of a chain, with its operands but the first."""

    op: Any
    operands: tuple[Operand, ...]
    params: dict[str, Any]

    def view(self, tracer: "Functional", base: "TracedTensor") -> "TracedTensor":
        """The value of the view, for a value of its base."""
        [found] = tracer.record(self.op, (base, *self.operands), self.params)
        return found

    def unview(self, base: "TracedTensor", new: "TracedTensor") -> Value:
        """The value of the base once the view has the value `new`."""
        written: Value = self.op.unview(base, new, *self.operands, **self.params)
        return written

    def again(self, base: Value, below: Callable[[Value], Value]) -> Value:
        """The view of a tensor below, under the present interpreter."""
        own = [below(o) if isinstance(o, Value) else o for o in self.operands]
        [found] = bind(self.op, (base, *own), self.params)
        return found

    def localized(self, tracer: "Functional") -> "ViewStep":
        """The same step with its operands as `tracer` has them."""
        own = [tracer.localize(o) if isinstance(o, Value) else o for o in self.operands]
        return self._replace(operands=tuple(own))


class Strided(NamedTuple):
    """The step of a chain from a row of elements to those at strides of it."""

    place: StridedPlace

    def view(self, tracer: "Functional", base: "TracedTensor") -> "TracedTensor":
        with using(tracer):
            return tracer.localize(take_strided(base, self.place))

    def unview(self, base: "TracedTensor", new: "TracedTensor") -> Value:
        return put_strided(base, new, self.place)

    def again(self, base: Value, below: Callable[[Value], Value]) -> Value:  # noqa: ARG002
        return take_strided(base, self.place)

    def localized(self, tracer: "Functional") -> "Strided":  # noqa: ARG002
        return self


Chain: TypeAlias = tuple[ViewStep | Strided, ...]


class Place(NamedTuple):
    """Where a tensor is: a storage, and the steps to the tensor from its base."""

    storage: "FunctionalStorage"
    chain: Chain


class FunctionalStorage:
    """What a base tensor holds now.

    owner    the base tensor
    tensor   its value: a plain one, never written itself
    within   None, or where the base is in another one, which then holds its value
    """

    __slots__ = ("owner", "tensor", "version", "within")

    def __init__(self, owner: "TracedTensor") -> None:
        self.owner = owner
        self.tensor = TracedTensor(owner.tracer, owner.source)
        self.version = 0
        self.within: Place | None = None


_NUMBER: Final = (
    "Keep it a tensor of no axes: `hf` functions take those where numbers go."
)
_REMEDY: Final = {
    "bool": "Branch with `hf.cond`, loop with `hf.while_loop`, or decorate the "
    "function that asks with `@hf.control_flow`.",
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
    origin    of what was lifted: what it stands for outside
    taken     of a view made by `x[key]`: x and the key
    """

    __slots__ = ("chain", "origin", "source", "storage", "taken", "tracer", "version")

    def __init__(self, tracer: "Functional", var: Var) -> None:
        self.tracer = tracer
        self.source = var
        self.storage: FunctionalStorage | None = None
        self.chain: Chain = ()
        self.version = 0
        self.origin: Tensor | None = None
        self.taken: tuple[Value, Any] | None = None

    @property
    def type(self) -> TensorType:
        return self.source.type

    @property
    def shape(self) -> Shape:
        type_ = self.source.type
        lines = self.tracer.shape_lines
        if lines is not None and self.source not in lines:
            line = direct_line(2)
            if line is not None:
                lines[self.source] = line
        return type_.shape

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
        if self.taken is None or self.taken[0] is not owner:
            return False
        storage = self.tracer.place(self).storage
        return (
            _is_same_key(self.taken[1], key)
            and storage is self.tracer.place(self.tracer.localize(owner)).storage
            and self.version == storage.version
        )

    def __repr__(self) -> str:
        return f"Tensor(traced, {self.type})"

    def item(self) -> Any:
        """The one element: a number over symbols, where the trace has symbols.

        Raises:
            ConversionError: there is not one element.
            TraceError: the trace has no symbols.
        """
        if is_unbacked(self.type.size):
            flat = resized("item", self.reshape((self.type.size,)), 0, 1)
            item: TracedTensor = flat.reshape(())
            return item.tracer.number_of(item)
        if not equals(self.type.size, 1):
            raise ConversionError(
                f"item(): expected a tensor with one element, and found {self.type}. "
                "Choose one element, or reduce the tensor."
            )
        one = self if not self.shape else self.reshape(())
        assert isinstance(one, TracedTensor)
        return one.tracer.number_of(one)

    def as_size(self) -> Size:
        """The symbolic size that the tensor is the value of.

        Raises:
            TraceError: it is the value of none.
        """
        return self.tracer.size_of(self)

    def _concrete(self, what: str) -> Any:
        return self.tracer.concrete(self, what)


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

    shape_lines   None, or: var -> the first line of the user's that read its shape
    """

    __slots__ = ("shape_lines",)

    shape_lines: dict[Var, SourceLine] | None

    def record(
        self, op: Any, args: Sequence[Operand], params: dict[str, Any]
    ) -> tuple[TracedTensor, ...]:
        raise NotImplementedError

    def localize(self, value: Value) -> TracedTensor:
        """The tensor of this interpreter that stands for `value`."""
        raise NotImplementedError

    def size_of(self, tensor: TracedTensor) -> Size:
        """The symbolic size that a tensor of this interpreter is the value of."""
        raise NotImplementedError

    def concrete(self, tensor: TracedTensor, what: str) -> Any:
        """The elements of a tensor of this interpreter, for the use that `what` names.

        Raises:
            TraceError: only a run knows them.
        """
        line = user_line(3)
        raise TraceError(
            f"{what}() of a traced tensor {tensor.type}"
            + (f" at {line}" if line else "")
            + ": its value is only known when the graph runs. "
            + (_REMEDY.get(what) or remedy(what))
        )

    def number_of(self, tensor: TracedTensor) -> Any:
        """What `item` of a tensor of no axes is."""
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
        # The chain reads its other operands as they are now, whatever is written later.
        frozen = tuple(
            self._snapshot(o) if isinstance(o, Value) else o for o in operands
        )
        view.storage = self.storage_of(base)
        view.chain = (*base.chain, ViewStep(op, frozen, params))
        view.version = self.place(base).storage.version

    def _snapshot(self, value: Value) -> TracedTensor:
        """What a tensor holds now: a plain value, which no write to another reaches."""
        return TracedTensor(self, self.read(self.localize(value)))

    def detached(self, view: Value) -> Value:
        # One of a user's type has no memory that is written to.
        return view if has_process(view) else self._snapshot(view)

    def storage_of(self, tensor: TracedTensor) -> FunctionalStorage:
        """The storage of a tensor of this interpreter, made at its first need."""
        if tensor.storage is None:
            tensor.storage = FunctionalStorage(tensor)
        return tensor.storage

    def place(self, tensor: TracedTensor) -> Place:
        """Where a tensor of this interpreter is in the outermost base."""
        storage, chain = self.storage_of(tensor), tensor.chain
        while (outer := storage.within) is not None:
            storage, chain = outer.storage, (*outer.chain, *chain)
        return Place(storage, chain)

    def read(self, tensor: TracedTensor) -> Var:
        """The var that holds the tensor's present value."""
        if tensor.storage is not None:
            storage, chain = self.place(tensor)
            if tensor.version != storage.version:
                value = storage.tensor
                for step in chain:
                    value = step.view(self, value)
                self.change(tensor, "source", value.source)
                self.change(tensor, "version", storage.version)
        return tensor.source

    def change(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of a tensor or storage, which may come to be taken back."""
        setattr(owner, name, value)

    def write(self, target: Value, new: Value) -> None:
        """Give `target`, and what shares its storage, the value `new` of its type."""
        check_memory(target)
        tensor = self.localize(target)
        self.prepare_write(tensor)
        value = TracedTensor(self, self.read(self.localize(new)))
        place = self.place(tensor)
        self._write_at(place, value)
        self.change(tensor, "source", value.source)
        self.change(tensor, "version", place.storage.version)

    def _write_at(self, place: Place, value: TracedTensor) -> None:
        """Carry a new value back to the base of its place."""
        storage, chain = place
        # The values along the chain, from the base to the view's own base.
        along = [storage.tensor]
        for step in chain[:-1]:
            along.append(step.view(self, along[-1]))
        with using(self):
            for step, base in zip(reversed(chain), reversed(along), strict=False):
                written = step.unview(base, value)
                value = TracedTensor(self, self.read(self.localize(written)))
        self.change(storage, "tensor", value)
        self.change(storage, "version", storage.version + 1)

    def put_within(self, base: TracedTensor, place: Place) -> None:
        """Make a base a part of another one, which takes over what was written."""
        part, whole = self.storage_of(base), place.storage
        self.change(part, "within", place)
        if part.version:
            # No version of a view of either may be taken for one of the whole.
            self.change(whole, "version", max(part.version, whole.version))
            self._write_at(place, part.tensor)

    def prepare_write(self, tensor: TracedTensor) -> None:
        """Have all that shares memory with a tensor be views of one base."""


def escaped(value: TracedTensor, why: str) -> EscapedValueError:
    """The error for a value used where its trace does not reach."""
    return EscapedValueError(
        f"a traced tensor {value.type} is used outside the function whose trace made "
        f"it ({why}). Return it from that function, or pass it as an operand."
    )


def escaped_number(symbol: Symbol) -> EscapedValueError:
    """The error for a symbol where its trace does not reach."""
    return EscapedValueError(
        f"the number `{symbol}` is used outside the body whose trace made it"
        f"{at_line()}. Only what a body returns is known outside."
    )


def at_line() -> str:
    """Where the user's code is now, for the text of an error."""
    line = user_line(2)
    return f" (at {line})" if line else ""


def aliased_write(what: TensorType) -> MutationError:
    """The error for a write in a body to memory that it reads by another name too,
    where the two cannot be views of one tensor."""
    return MutationError(
        f"a body writes to a tensor {what} from outside that shares its memory with "
        "another one it uses. Use one of them, and take views of it inside the body."
    )
