"""Functionalization: a write becomes a new value that every view of its base sees.

`docs/notes/memory_and_aliases.md` describes storages, chains of views and versions.

A base may turn out to be a view of another one, as when a body reads a view of what it
writes: its storage then has an `embedding` in that base, which all its views follow.
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
    """A view operation of a chain, with its operands except the base."""

    op: Any
    operands: tuple[Operand, ...]
    params: dict[str, Any]

    def view(self, tracer: "Functional", base: "TracedTensor") -> "TracedTensor":
        """Return the value of the view for a value of its base."""
        [result] = tracer.record(self.op, (base, *self.operands), self.params)
        return result

    def unview(self, base: "TracedTensor", new: "TracedTensor") -> Value:
        """Return the value of the base after the view is written with `new`."""
        written: Value = self.op.unview(base, new, *self.operands, **self.params)
        return written

    def again(self, base: Value, below: Callable[[Value], Value]) -> Value:
        """Return the same view of a tensor below, under the current interpreter.

        Args:
            below: An operand of the step -> its value below.
        """
        operands = [below(o) if isinstance(o, Value) else o for o in self.operands]
        [result] = bind(self.op, (base, *operands), self.params)
        return result

    def localized(self, tracer: "Functional") -> "ViewStep":
        """Return the same step with operands that are localized to `tracer`."""
        operands = [
            tracer.localize(o) if isinstance(o, Value) else o for o in self.operands
        ]
        return self._replace(operands=tuple(operands))


class Strided(NamedTuple):
    """The step of a chain from a flat tensor to a strided view of it."""

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
    """The location of a tensor: a storage, and the view steps from its base."""

    storage: "FunctionalStorage"
    chain: Chain


class FunctionalStorage:
    """The current value of a base tensor.

    owner      the base tensor
    tensor     its value: an unaliased tensor, never written itself
    version    the number of writes
    embedding  None, or the place of the base in another base, which holds its value
    """

    __slots__ = ("embedding", "owner", "tensor", "version")

    def __init__(self, owner: "TracedTensor") -> None:
        self.owner = owner
        self.tensor = TracedTensor(owner.tracer, owner.source)
        self.version = 0
        self.embedding: Place | None = None


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
    """A tensor of a trace: a var of the tracer's graph, which may view a base tensor.

    tracer    the tracer
    source    the var that holds its value, as of `version` of `storage`
    storage   the storage of its base; None: it was never viewed nor written
    chain     the view operations that lead to it from the base
    origin    for a lifted tensor, the tensor of the parent
    taken     for a view `x[key]`, the pair of x and the key
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
        # `x[key] += v` writes through the view `x[key]`, and Python then assigns that
        # view to the elements that it already is.
        if not (isinstance(value, TracedTensor) and value.is_at(self, key)):
            super().__setitem__(key, value)

    def is_at(self, owner: Value, key: Any) -> bool:
        """Whether this is the current view `owner[key]`."""
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
        """Return the only element as a number over symbols.

        Raises:
            ConversionError: the size is not 1.
            TraceError: the trace makes no symbols.
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
        scalar = self if not self.shape else self.reshape(())
        assert isinstance(scalar, TracedTensor)
        return scalar.tracer.number_of(scalar)

    def as_size(self) -> Size:
        """Return the symbolic size that the tensor holds.

        Raises:
            TraceError: it does not hold a size.
        """
        return self.tracer.size_of(self)

    def _concrete(self, what: str) -> Any:
        return self.tracer.concrete(self, what)


def _is_same_key(a: Any, b: Any) -> bool:
    """Whether two keys are certainly equal; tensors are compared by identity."""
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
    """An interpreter that replaces writes by new values, and updates views.

    A subclass records operations (`record`) and localizes tensors of other levels
    (`localize`).

    shape_lines   var -> the user's first line that read its shape; None: not recorded
    """

    __slots__ = ("shape_lines",)

    shape_lines: dict[Var, SourceLine] | None

    def record(
        self, op: Any, args: Sequence[Operand], params: dict[str, Any]
    ) -> tuple[TracedTensor, ...]:
        raise NotImplementedError

    def localize(self, value: Value) -> TracedTensor:
        """Return the tensor of this interpreter for `value`."""
        raise NotImplementedError

    def size_of(self, tensor: TracedTensor) -> Size:
        """Return the symbolic size that a tensor of this interpreter holds."""
        raise NotImplementedError

    def concrete(self, tensor: TracedTensor, what: str) -> Any:
        """Return the elements of a tensor of this interpreter, for a use in Python.

        Args:
            what: The name of the use: "bool", "int", "item", ...

        Raises:
            TraceError: they are known only at run time.
        """
        line = user_line(3)
        raise TraceError(
            f"{what}() of a traced tensor {tensor.type}"
            + (f" at {line}" if line else "")
            + ": its value is only known when the graph runs. "
            + (_REMEDY.get(what) or remedy(what))
        )

    def number_of(self, tensor: TracedTensor) -> Any:
        """Return `item` of a tensor of rank 0."""
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
        # Later writes to the other operands must not change the view.
        frozen = tuple(
            self._snapshot(o) if isinstance(o, Value) else o for o in operands
        )
        view.storage = self.storage_of(base)
        view.chain = (*base.chain, ViewStep(op, frozen, params))
        view.version = self.place(base).storage.version

    def _snapshot(self, value: Value) -> TracedTensor:
        """Return the current value of a tensor as one that aliases no other."""
        return TracedTensor(self, self.read(self.localize(value)))

    def detached(self, view: Value) -> Value:
        # A tensor of a user's type has no memory.
        return view if has_process(view) else self._snapshot(view)

    def storage_of(self, tensor: TracedTensor) -> FunctionalStorage:
        """Return the storage of a tensor of this interpreter; make it if necessary."""
        if tensor.storage is None:
            tensor.storage = FunctionalStorage(tensor)
        return tensor.storage

    def place(self, tensor: TracedTensor) -> Place:
        """Return the place of a tensor of this interpreter in the outermost base."""
        storage, chain = self.storage_of(tensor), tensor.chain
        while (outer := storage.embedding) is not None:
            storage, chain = outer.storage, (*outer.chain, *chain)
        return Place(storage, chain)

    def read(self, tensor: TracedTensor) -> Var:
        """Return the var that holds the tensor's current value."""
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
        """Set an attribute of a tensor or storage; a subclass may undo it later."""
        setattr(owner, name, value)

    def write(self, target: Value, new: Value) -> None:
        """Write `new`, of the same type, to `target` and everything that aliases it."""
        check_memory(target)
        tensor = self.localize(target)
        self.prepare_write(tensor)
        value = TracedTensor(self, self.read(self.localize(new)))
        place = self.place(tensor)
        self._write_at(place, value)
        self.change(tensor, "source", value.source)
        self.change(tensor, "version", place.storage.version)

    def _write_at(self, place: Place, value: TracedTensor) -> None:
        """Propagate a new value along its chain back to the base."""
        storage, chain = place
        # The values along the chain, from the base to the last step's input.
        inputs = [storage.tensor]
        for step in chain[:-1]:
            inputs.append(step.view(self, inputs[-1]))
        with using(self):
            for step, base in zip(reversed(chain), reversed(inputs), strict=False):
                updated = step.unview(base, value)
                value = TracedTensor(self, self.read(self.localize(updated)))
        self.change(storage, "tensor", value)
        self.change(storage, "version", storage.version + 1)

    def embed(self, base: TracedTensor, place: Place) -> None:
        """Make a base a view of another one, which takes over the written value."""
        part, whole = self.storage_of(base), place.storage
        self.change(part, "embedding", place)
        if part.version:
            # A view's version, of either base, must not equal a later one of the whole.
            self.change(whole, "version", max(part.version, whole.version))
            self._write_at(place, part.tensor)

    def prepare_write(self, tensor: TracedTensor) -> None:
        """Make all aliases of a tensor views of one base."""


def escaped(value: TracedTensor, why: str) -> EscapedValueError:
    """Return the error for a value that is used outside its trace."""
    return EscapedValueError(
        f"a traced tensor {value.type} is used outside the function whose trace made "
        f"it ({why}). Return it from that function, or pass it as an operand."
    )


def escaped_number(symbol: Symbol) -> EscapedValueError:
    """Return the error for a symbol that is used outside its trace."""
    return EscapedValueError(
        f"the number `{symbol}` is used outside the body whose trace made it"
        f"{at_line()}. Only what a body returns is known outside."
    )


def at_line() -> str:
    """Return the user's current line in parentheses, for the text of an error."""
    line = user_line(2)
    return f" (at {line})" if line else ""


def aliased_write(type_: TensorType) -> MutationError:
    """Return the error for a write in a body to a tensor whose alias it also uses, if
    the two cannot be views of one tensor."""
    return MutationError(
        f"a body writes to a tensor {type_} from outside that shares its memory with "
        "another one it uses. Use one of them, and take views of it inside the body."
    )
