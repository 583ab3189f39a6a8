"""The interpreter stack: who gives an operation its meaning.

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

from hopflow.entries import is_entry, surface
from hopflow.errors import MutationError, OperatorError
from hopflow.graph.core import Constant, Graph
from hopflow.graph.interpreter import interpret
from hopflow.graph.types import Shape, TensorType
from hopflow.pickling import Transformed
from hopflow.symbolic.boolean import SymBool
from hopflow.symbolic.size import Size, SymFloat, SymInt


class Value:
    """What operations take and give: anything with a type.

    Every interpreter has its own subclass; the user meets them all as `hf.Tensor`. A
    subclass with a class method `process`, as an `Interpreter` of a user's has it, is
    asked for each operation on its tensors.
    """

    __slots__ = ()

    def __init_subclass__(cls, **options: Any) -> None:
        global _asked
        super().__init_subclass__(**options)
        _asked += "process" in vars(cls)

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
        # Every value that a user meets is a `Tensor`, which stands above and has these.
        # Functions below it return a `Value`; without this a type checker would refuse
        # `hf.sum(x) + 1`.
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


class Interpreter:
    """One meaning of operations; `parent` is the interpreter below, if there is one."""

    __slots__ = ("parent",)

    is_eager: ClassVar[bool] = False

    def __init__(self, parent: "Interpreter | None") -> None:
        self.parent = parent

    def process(
        self, op: Any, args: Sequence[Operand], params: dict[str, Any]
    ) -> tuple[Value, ...]:
        """Return the results of `op` on `args`."""
        raise NotImplementedError

    def asks(self, value: Value) -> bool:
        """Whether the type of `value`, which has a `process`, is asked here. Elsewhere
        the tensor is one of an interpreter below, or around.
        """
        raise NotImplementedError

    def write(self, target: Value, new: Value) -> None:
        """Give `target`, and what shares its memory, the value `new` of its type."""
        raise NotImplementedError

    def check_write(self, target: Value) -> None:
        """Raises: HopflowError: a tensor with memory is not to be written here."""

    def detached(self, view: Value) -> Value:
        """What a view holds now, as a tensor that shares memory with none."""
        raise NotImplementedError

    def value_of(self, number: SymInt | SymFloat | SymBool) -> Value:
        """A number over symbols as a tensor i64[], f64[] or bool[]."""
        raise NotImplementedError

    def symbol_of(
        self, value: Value, min: float = -inf, max: Size | float = inf
    ) -> Size:
        """The integer that a tensor of no axes holds, as a number or a symbol.

        min, max   where it is known to lie; nobody checks it
        """
        raise NotImplementedError

    def number_held(self, value: Value) -> Size | None:  # noqa: ARG002
        """The integer over symbols that a value was made of; None: of none."""
        return None

    def has_tangent(self, value: Value) -> bool:
        """Whether a value of this interpreter, or of one below, is differentiated."""
        return self.parent is not None and self.parent.has_tangent(value)

    def expect(self, condition: SymBool, message: str) -> None:
        """Take a condition on symbols for true, which the run is to check."""
        raise NotImplementedError

    def adopt(self, value: Value) -> None:
        """Take note of a tensor that was just made from the user's data."""


class _Stack(threading.local):
    interpreter: Interpreter | None = None
    handlers: "tuple[tuple[Handler, Interpreter], ...]" = ()  # and what each is over


class _Slots:
    """What layers above fill in, so that those below can call them.

    eager       the bottom interpreter (filled by `tensor`)
    from_array  a NumPy array or scalar as a value (filled by `tensor`)
    each_example  a `map` over examples: f, how many there are, args, which of them are
                batched, whom it tells its progress -> results, from f(args of one
                example) (filled by `hops.map`)
    executor    runs an operator with graphs on concrete values: op, args, params ->
                results. The compiler's once `hopflow` is imported; until then the
                graph interpreter (filled by `hops.base`)
    record      while a function is traced symbolically: public function, args, kwargs
                -> what stands for its result, or None if there is no proxy among them
                (filled by `fx`)
    stand_in    what stands for a tensor where that does not reach, if anything does
                (filled by `trace.stand_ins`)
    scan        the operator, for rules of operations (filled by `hops.scan`)
    given       while code is watched: told of a tensor with memory whose elements
                Python code is given (filled by `trace.outside.watch`)
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
    given: Callable[[Value], None] | None = None
    executor: Callable[[Any, Sequence[Operand], dict[str, Any]], tuple[Value, ...]]
    record: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any] | None = None


_stack = _Stack()
slots = _Slots()


def current() -> Interpreter:
    """The innermost interpreter of this thread."""
    return _stack.interpreter or slots.eager


class using:
    """Make `interpreter` the innermost one (None: eager) within the block."""

    # A class, which is entered and left in a third of a generator's time.
    __slots__ = ("before", "interpreter")

    def __init__(self, interpreter: Interpreter | None) -> None:
        self.interpreter = interpreter

    def __enter__(self) -> None:
        self.before = _stack.interpreter
        _stack.interpreter = self.interpreter

    def __exit__(self, *_error: object) -> None:
        _stack.interpreter = self.before


def recorded(f: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What stands for the result of a call in a symbolic trace; None: it is to run."""
    return None if slots.record is None else slots.record(f, args, kwargs)


class TransformedFunction(Transformed):
    """A function that a transform has made.

    made    the name of the transform, what it is of, and the options
    """

    def __init__(
        self, f: Callable[..., Any], made: tuple[str, Any, dict[str, Any]]
    ) -> None:
        super().__init__(f)
        # What asks for the user's function of a transformed one looks one step deep.
        self.__wrapped__ = getattr(f, "__wrapped__", f)
        self.made = made
        self._call = f

    def __repr__(self) -> str:
        return f"<{self.made[0]} of {self.__wrapped__!r}>"

    @is_entry
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            found = recorded(self, args, kwargs)
            return self._call(*args, **kwargs) if found is None else found
        except Exception as error:
            surface(error, self, args, kwargs)
            raise

    def remade(self) -> tuple[Any, tuple[Any, ...]]:
        """See `Transformed`."""
        name, f, options = self.made
        return _made, (f, name, options)

    @property
    def rules(self) -> tuple[Any, ...]:
        """What a trace depends on besides the function."""
        name, _, options = self.made
        return name, *options.values()


def _made(f: Any, name: str, options: dict[str, Any]) -> Any:
    return getattr(sys.modules["hopflow"], name)(f, **options)


def recordable(
    f: _Function, home: str = "", made: tuple[str, Any, dict[str, Any]] | None = None
) -> _Function:
    """`f` as users call it: an entry, whose calls a symbolic trace records.

    Args:
        home: The module where it is found, if not in its own.
        made: Of a function that a transform has made: the name of the transform, what
            it is of, and the options. A script that repeats a call is written so.
    """

    if made is not None:
        return cast(_Function, TransformedFunction(f, made))

    @is_entry
    @wraps(f)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            found = recorded(call, args, kwargs)
            return f(*args, **kwargs) if found is None else found
        except Exception as error:
            surface(error, call, args, kwargs)
            raise

    call.__module__ = home or call.__module__
    # What asks for the user's function of a transformed one looks one step deep.
    call.__wrapped__ = getattr(f, "__wrapped__", f)
    return cast(_Function, call)


@cache
def public(f: Callable[..., Any]) -> Callable[..., Any]:
    """`f` as the package gives it to users: the same one, whoever asks."""
    call = recordable(f, "hopflow")
    # It is `map_` at home, where `map` is taken.
    call.__qualname__ = f.__qualname__.rstrip("_")
    return call


def bind(op: Any, args: Sequence[Operand], params: dict[str, Any]) -> tuple[Value, ...]:
    """Give `op` its meaning under the innermost interpreter."""
    if _asked:
        return _ask(op, args, params)
    return (_stack.interpreter or slots.eager).process(op, args, params)


def run_graph(graph: Graph, args: Sequence[Any]) -> tuple[Any, ...]:
    """The results of a graph, each node bound."""
    return interpret(graph, args, bind)


# --- interpreters and tensor types of users -------------------------------------------


class Handler:
    """An interpreter of a user's: it sees each operation before any rule does.

        class Count(hf.Interpreter):
            def process(self, op, args, params):
                print(op.name)
                return NotImplemented  # the next one below is asked

        with Count():
            hf.cond(p, f, g, (x,))

    It sees what is bound within the block, and not what a tracer that is pushed there
    records: of an operator one node, with the graphs of its functions. What `process`
    binds itself it does not see again. It is called for operations on tensors, not for
    basic indexing of tensors that have memory.
    """

    def process(
        self, op: Any, args: Sequence[Operand], params: dict[str, Any]
    ) -> Sequence[Value]:
        """The results of `op`, or NotImplemented: that is for others to say."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        global _asked
        _stack.handlers = (*_stack.handlers, (self, current()))
        _asked += 1
        return self

    def __exit__(self, *_error: object) -> None:
        global _asked
        _stack.handlers = _stack.handlers[:-1]
        _asked -= 1


# How many handlers there are in all threads, and tensor types with a `process`: while
# there is none, nobody is asked.
_asked = 0


def is_watched() -> bool:
    """Whether a handler sees what is bound here."""
    handlers = _stack.handlers
    return bool(handlers) and any(base is current() for _, base in handlers)


def is_asked() -> bool:
    """Whether there is a handler, or a tensor type with a `process`."""
    return bool(_asked)


def has_process(value: Any) -> TypeGuard[Any]:
    """Whether it is a tensor of a user's type, which sees operations on it."""
    return isinstance(value, Value) and hasattr(type(value), "process")


def check_memory(target: Value) -> None:
    """Check that a tensor can be written: one of a user's type cannot.

    Raises:
        MutationError: it is of such a type.
    """
    if has_process(target):
        name = type(target).__name__
        raise MutationError(
            f"a `{name}` {target.type} is written to, but it has no memory of its own: "
            "only operations are handed to `process`. Write to the tensors that it "
            "holds, or compute a new one, with `hf.where` for example."
        )


def _ask(op: Any, args: Sequence[Operand], params: dict[str, Any]) -> tuple[Value, ...]:
    """The results of the first that does not decline: the handlers, the types of the
    args, and the interpreter itself."""
    here, handlers = current(), _stack.handlers
    try:
        for i in reversed(range(len(handlers))):
            handler, base = handlers[i]
            if base is here:
                _stack.handlers = handlers[:i]
                found = handler.process(op, args, params)
                if found is not NotImplemented:
                    return _checked(handler, op, found)
        _stack.handlers = tuple([pair for pair in handlers if pair[1] is not here])
        own = [a for a in args if has_process(a) and here.asks(a)]
        kinds: dict[Any, None] = dict.fromkeys(map(type, own))
        if not kinds:
            return here.process(op, args, params)
        for kind in kinds:
            found = kind.process(op, args, params)
            if found is not NotImplemented:
                return _checked(kind, op, found)
    finally:
        _stack.handlers = handlers
    raise OperatorError(
        f"{op.name}: {' and '.join(kind.__name__ for kind in kinds)} decline to process"
        " it, and nothing else knows such tensors. Handle it in `process`."
    )


def _checked(who: Any, op: Any, found: Any) -> tuple[Value, ...]:
    if isinstance(found, tuple | list) and all(isinstance(r, Value) for r in found):
        return tuple(found)
    name = who.__name__ if isinstance(who, type) else type(who).__name__
    raise OperatorError(
        f"{op.name}: `{name}.process` must return a tuple of tensors, or "
        f"NotImplemented, and returns `{type(found).__name__}`."
    )
