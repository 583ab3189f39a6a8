"""The interpreter stack: which interpreter evaluates an operation.

`bind(op, args, params)` hands an operation to the innermost interpreter of the calling
thread. Each interpreter knows the one below it (`parent`) and processes an operation by
binding others while that one is current, so that they nest freely. At the bottom stands
`Eager` (in `tensor.py`), which computes.
"""

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cache, wraps
from math import inf
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Self,
    TypeAlias,
    TypeGuard,
    TypeVar,
    cast,
)

from hopflow.entries import mark_entry, process_error
from hopflow.errors import MutationError, OperatorError
from hopflow.graph.core import Constant, Graph
from hopflow.graph.interpreter import interpret
from hopflow.graph.types import Shape, TensorType
from hopflow.pickling import Transformed
from hopflow.symbolic.boolean import SymBool
from hopflow.symbolic.size import Size, SymFloat, SymInt


class Value:
    """An operand or a result of an operation: an object with a tensor type.

    Every interpreter has its own subclass; users see all of them as `hf.Tensor`. A
    user's subclass may have a class method `process` like that of `hf.Interpreter`,
    which then evaluates each operation on its tensors.
    """

    __slots__ = ()

    def __init_subclass__(cls, **options: Any) -> None:
        global _num_processors
        super().__init_subclass__(**options)
        _num_processors += "process" in vars(cls)

    @property
    def type(self) -> TensorType:
        raise NotImplementedError

    @property
    def shape(self) -> Shape:
        return self.type.shape

    @property
    def ndim(self) -> int:
        return len(self.type.shape)

    if TYPE_CHECKING:
        # Functions that `Tensor` is built on are annotated to return `Value`. These let
        # a type checker accept `hf.sum(x) + 1`, which `Tensor` supports.
        def __getattr__(self, name: str) -> Any: ...
        def __getitem__(self, key: Any, /) -> Any: ...
        def __setitem__(self, key: Any, value: Any, /) -> None: ...
        def __iter__(self) -> Iterator[Any]: ...
        def __len__(self) -> int: ...
        def __bool__(self) -> bool: ...
        def __int__(self) -> int: ...
        def __float__(self) -> float: ...
        def __index__(self) -> int: ...
        def __neg__(self) -> Any: ...
        def __pos__(self) -> Any: ...
        def __abs__(self) -> Any: ...
        def __invert__(self) -> Any: ...
        def __add__(self, other: Any, /) -> Any: ...
        def __radd__(self, other: Any, /) -> Any: ...
        def __sub__(self, other: Any, /) -> Any: ...
        def __rsub__(self, other: Any, /) -> Any: ...
        def __mul__(self, other: Any, /) -> Any: ...
        def __rmul__(self, other: Any, /) -> Any: ...
        def __truediv__(self, other: Any, /) -> Any: ...
        def __rtruediv__(self, other: Any, /) -> Any: ...
        def __floordiv__(self, other: Any, /) -> Any: ...
        def __rfloordiv__(self, other: Any, /) -> Any: ...
        def __mod__(self, other: Any, /) -> Any: ...
        def __rmod__(self, other: Any, /) -> Any: ...
        def __pow__(self, other: Any, /) -> Any: ...
        def __rpow__(self, other: Any, /) -> Any: ...
        def __matmul__(self, other: Any, /) -> Any: ...
        def __rmatmul__(self, other: Any, /) -> Any: ...
        def __and__(self, other: Any, /) -> Any: ...
        def __rand__(self, other: Any, /) -> Any: ...
        def __or__(self, other: Any, /) -> Any: ...
        def __ror__(self, other: Any, /) -> Any: ...
        def __xor__(self, other: Any, /) -> Any: ...
        def __rxor__(self, other: Any, /) -> Any: ...
        def __lshift__(self, other: Any, /) -> Any: ...
        def __rshift__(self, other: Any, /) -> Any: ...
        def __lt__(self, other: Any, /) -> Any: ...
        def __le__(self, other: Any, /) -> Any: ...
        def __gt__(self, other: Any, /) -> Any: ...
        def __ge__(self, other: Any, /) -> Any: ...


_Function = TypeVar("_Function", bound=Callable[..., Any])
Operand: TypeAlias = Value | Constant
"""An argument of `bind`: a value, or a scalar whose dtype has been decided."""
Program: TypeAlias = Callable[[Sequence[Operand]], tuple[Value, ...]]
"""Computes an operation: its args -> its results."""


class Interpreter:
    """Evaluates or records operations; `parent` is the interpreter below, if any."""

    __slots__ = ("parent",)

    is_eager: ClassVar[bool] = False

    def __init__(self, parent: "Interpreter | None") -> None:
        self.parent = parent

    def process(
        self, op: Any, args: Sequence[Operand], params: dict[str, Any]
    ) -> tuple[Value, ...]:
        """Return the results of `op` on `args`."""
        raise NotImplementedError

    def dispatches(self, value: Value) -> bool:
        """Whether this interpreter dispatches operations on `value` to its `process`;
        otherwise the tensor belongs to an interpreter below or around.
        """
        raise NotImplementedError

    def write(self, target: Value, new: Value) -> None:
        """Write `new`, of the same type, to `target` and everything that aliases it."""
        raise NotImplementedError

    def check_write(self, target: Value) -> None:
        """Raises: HopflowError: this interpreter forbids a write to `target`."""

    def detached(self, view: Value) -> Value:
        """Return a copy of a view that aliases no other tensor."""
        raise NotImplementedError

    def value_of(self, number: SymInt | SymFloat | SymBool) -> Value:
        """Return a number over symbols as a tensor i64[], f64[] or bool[]."""
        raise NotImplementedError

    def symbol_of(
        self, value: Value, min: float = -inf, max: Size | float = inf
    ) -> Size:
        """Return the integer that a tensor of rank 0 holds, as a number or a symbol.

        min, max   bounds of the integer, which are assumed and not checked
        """
        raise NotImplementedError

    def number_held(self, value: Value) -> Size | None:  # noqa: ARG002
        """Return the integer over symbols that a value was made from, or None."""
        return None

    def has_tangent(self, value: Value) -> bool:
        """Whether a value of this interpreter, or of one below, is differentiated."""
        return self.parent is not None and self.parent.has_tangent(value)

    def expect(self, condition: SymBool, message: str) -> None:
        """Assume a condition on symbols, and have it checked at run time."""
        raise NotImplementedError

    def adopt(self, value: Value) -> None:
        """Note a tensor that was just made from the user's data."""


class _Stack(threading.local):
    interpreter: Interpreter | None = None
    handlers: "tuple[tuple[Handler, Interpreter], ...]" = ()  # with those below them


class _Slots:
    """Functions of higher layers, which they assign so that lower ones can call them.

    eager       the bottom interpreter (assigned by `tensor`)
    from_array  a NumPy array or scalar -> a value (assigned by `tensor`)
    each_example  maps a function over batch elements: f, batch size, args, which args
                are batched, progress -> results (assigned by `hops.map`)
    program     makes a program of an operator with graphs: op, concrete args, params ->
                a function from such args to the results. The graph interpreter's
                (assigned by `hops.base`), replaced by the compiler's once `hopflow` is
                imported
    record      while `fx` traces a function: public function, args, kwargs -> the proxy
                of the result, or None if there is no proxy among them (assigned by
                `fx`)
    stand_in    a tensor of a trace that cannot be used here -> the tensor that replaces
                it, if there is one (assigned by `trace.stand_ins`)
    scan        the operator, for rules of operations (assigned by `hops.scan`)
    note_elements  while code is watched: called with each tensor with memory whose
                elements Python code reads (assigned by `trace.outside.watch`)
    """

    eager: Interpreter
    stand_in: Callable[[Value], Value]
    from_array: Callable[[Any], Value]
    each_example: Callable[
        [
            Callable[[Sequence[Operand]], Sequence[Value]],
            Size,
            Sequence[Operand],
            Sequence[bool],
            Any,
        ],
        Sequence[Value],
    ]
    scan: Callable[..., Any]
    note_elements: Callable[[Value], None] | None = None
    program: Callable[[Any, Sequence[Operand], dict[str, Any]], Program]
    record: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any] | None = None


_stack = _Stack()
slots = _Slots()


def current() -> Interpreter:
    """Return the innermost interpreter of this thread."""
    return _stack.interpreter or slots.eager


class using:
    """Make `interpreter` the innermost one (None: eager) within the block."""

    # A class is entered and left in a third of the time of `contextmanager`.
    __slots__ = ("before", "interpreter")

    def __init__(self, interpreter: Interpreter | None) -> None:
        self.interpreter = interpreter

    def __enter__(self) -> None:
        self.before = _stack.interpreter
        _stack.interpreter = self.interpreter

    def __exit__(self, *_error: object) -> None:
        _stack.interpreter = self.before


def recorded(f: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return the proxy of a call's result if `fx` records the call, else None."""
    return None if slots.record is None else slots.record(f, args, kwargs)


class TransformedFunction(Transformed):
    """The result of a transform, such as `hf.grad(f)`.

    transform its name, its argument, and its options
    """

    def __init__(
        self, f: Callable[..., Any], transform: tuple[str, Any, dict[str, Any]]
    ) -> None:
        super().__init__(f)
        # Readers of `__wrapped__` look one step deep for the user's function.
        self.__wrapped__ = getattr(f, "__wrapped__", f)
        self.transform = transform
        self._call = f

    def __repr__(self) -> str:
        return f"<{self.transform[0]} of {self.__wrapped__!r}>"

    @mark_entry
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            proxy = recorded(self, args, kwargs)
            return self._call(*args, **kwargs) if proxy is None else proxy
        except Exception as error:
            process_error(error, self, args, kwargs)
            raise

    def remade(self) -> tuple[Any, tuple[Any, ...]]:
        """See `Transformed`."""
        name, f, options = self.transform
        return _transformed, (f, name, options)

    @property
    def rules(self) -> tuple[Any, ...]:
        """The parts of a trace's key besides the function."""
        name, _, options = self.transform
        return name, *options.values()


def _transformed(f: Any, name: str, options: dict[str, Any]) -> Any:
    return getattr(sys.modules["hopflow"], name)(f, **options)


def recordable(
    f: _Function,
    home: str = "",
    transform: tuple[str, Any, dict[str, Any]] | None = None,
) -> _Function:
    """Return `f` as users call it: an entry, whose calls `fx` records.

    Args:
        home: The public module of the function, if it is not its own.
        transform: For the result of a transform: its name, its argument and its
        options, for scripts that reproduce a call.
    """

    if transform is not None:
        return cast(_Function, TransformedFunction(f, transform))

    @mark_entry
    @wraps(f)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            proxy = recorded(call, args, kwargs)
            return f(*args, **kwargs) if proxy is None else proxy
        except Exception as error:
            process_error(error, call, args, kwargs)
            raise

    call.__module__ = home or call.__module__
    # Readers of `__wrapped__` look one step deep for the user's function.
    call.__wrapped__ = getattr(f, "__wrapped__", f)
    return cast(_Function, call)


@cache
def public(f: Callable[..., Any]) -> Callable[..., Any]:
    """Return the one public object for `f`."""
    call = recordable(f, "hopflow")
    # `map_` avoids the builtin's name in its module, and is public as `map`.
    call.__qualname__ = f.__qualname__.rstrip("_")
    return call


def bind(op: Any, args: Sequence[Operand], params: dict[str, Any]) -> tuple[Value, ...]:
    """Evaluate `op` under the innermost interpreter, and return its results."""
    if _num_processors:
        return _dispatch(op, args, params)
    return (_stack.interpreter or slots.eager).process(op, args, params)


def run_graph(graph: Graph, args: Sequence[Any]) -> tuple[Any, ...]:
    """Return the results of a graph, each of whose nodes is bound."""
    return interpret(graph, args, bind)


# --- interpreters and tensor types of users -------------------------------------------


class Handler:
    """A user's interpreter: `process` handles each operation within a `with` block.

        class Count(hf.Interpreter):
            def process(self, op, args, params):
                print(op.name)
                return NotImplemented  # the next one below handles it

        with Count():
            hf.cond(p, f, g, (x,))

    An operator with subgraphs is one operation: the operations which its functions
    record are not seen, nor are those that `process` binds itself, nor basic indexing
    of tensors that have memory.
    """

    def process(
        self, op: Any, args: Sequence[Operand], params: dict[str, Any]
    ) -> Sequence[Value]:
        """Return the results of `op`, or NotImplemented to leave it to the interpreter
        below."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        global _num_processors
        _stack.handlers = (*_stack.handlers, (self, current()))
        _num_processors += 1
        return self

    def __exit__(self, *_error: object) -> None:
        global _num_processors
        _stack.handlers = _stack.handlers[:-1]
        _num_processors -= 1


# The number of active handlers in all threads and of tensor types with a `process`: 0
# lets `bind` skip the search for them.
_num_processors = 0


def is_watched() -> bool:
    """Whether a handler of this thread sees the operations that are bound here."""
    handlers = _stack.handlers
    return bool(handlers) and any(base is current() for _, base in handlers)


def has_handlers() -> bool:
    """Whether a handler of this thread is active."""
    return bool(_stack.handlers)


def has_processors() -> bool:
    """Whether there is any handler, or tensor type with a `process`."""
    return bool(_num_processors)


def has_process(value: Any) -> TypeGuard[Any]:
    """Whether it is a tensor of a user's type that handles operations on it."""
    return isinstance(value, Value) and hasattr(type(value), "process")


def check_memory(target: Value) -> None:
    """Check that a tensor has memory that can be written.

    Raises:
        MutationError: it is of a user's type, which has none.
    """
    if has_process(target):
        name = type(target).__name__
        raise MutationError(
            f"a `{name}` {target.type} is written to, but it has no memory of its own: "
            "only operations are handed to `process`. Write to the tensors that it "
            "holds, or compute a new one, with `hf.where` for example."
        )


def _dispatch(
    op: Any, args: Sequence[Operand], params: dict[str, Any]
) -> tuple[Value, ...]:
    """Return the results of the first that does not return NotImplemented: handlers,
    then the user's tensor types among the args, then the interpreter itself."""
    interpreter, handlers = current(), _stack.handlers
    try:
        for i in reversed(range(len(handlers))):
            handler, base = handlers[i]
            if base is interpreter:
                _stack.handlers = handlers[:i]
                results = handler.process(op, args, params)
                if results is not NotImplemented:
                    return _checked(handler, op, results)
        _stack.handlers = tuple(
            [pair for pair in handlers if pair[1] is not interpreter]
        )
        tensors = [a for a in args if has_process(a) and interpreter.dispatches(a)]
        kinds: dict[Any, None] = dict.fromkeys(map(type, tensors))
        if not kinds:
            return interpreter.process(op, args, params)
        for kind in kinds:
            results = kind.process(op, args, params)
            if results is not NotImplemented:
                return _checked(kind, op, results)
    finally:
        _stack.handlers = handlers
    raise OperatorError(
        f"{op.name}: {' and '.join(kind.__name__ for kind in kinds)} decline to process"
        " it, and nothing else knows such tensors. Handle it in `process`."
    )


def _checked(processor: Any, op: Any, results: Any) -> tuple[Value, ...]:
    if isinstance(results, tuple | list) and all(isinstance(r, Value) for r in results):
        return tuple(results)
    name = (
        processor.__name__ if isinstance(processor, type) else type(processor).__name__
    )
    raise OperatorError(
        f"{op.name}: `{name}.process` must return a tuple of tensors, or "
        f"NotImplemented, and returns `{type(results).__name__}`."
    )
