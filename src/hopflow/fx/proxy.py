"""`Proxy`: the argument on which a symbolic trace runs a function. It has no shape,
and no value."""

import dis
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any, Final, NoReturn

import numpy as np

from hopflow.entries import blames_user, entries, entry
from hopflow.errors import TraceError
from hopflow.fx.node import IN_PLACE, Kind, Node
from hopflow.graph.core import SourceLine
from hopflow.trace.source import source_text, user_frame, user_line


class TracerBase(ABC):
    """Record the uses of proxies. A subclass may supply their values."""

    @abstractmethod
    def create_proxy(
        self,
        kind: Kind,
        target: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        name: str | None = None,
        type_: Any = None,
    ) -> "Proxy":
        """Record a use of proxies, and return the proxy of its result."""

    def to_bool(self, proxy: "Proxy") -> bool:
        """Return the truth of a proxy.

        Raises:
            TraceError: always; a subclass may know it.
        """
        raise no_value(
            proxy,
            "its truth",
            "Write `hf.cond` or `hf.where` for a choice at run time, give what decides "
            "as one of `concrete_args`, or capture the function with `hf.trace`.",
        )

    def iterate(self, proxy: "Proxy") -> Iterator[Any]:
        """Yield the items of a proxy: as many as the user's code unpacks.

        Raises:
            TraceError: the code does not unpack it into names.
        """
        count = unpacked_into()
        if count is None:
            raise no_value(
                proxy,
                "its items, of which nobody knows the number",
                "Index it with numbers, unpack it into names (`a, b = x`), or capture "
                "the function with `hf.trace`.",
            )
        return iter([proxy[i] for i in range(count)])


class Proxy:
    """The value of a node; operations on it are recorded.

    Operators, indexing, attributes, methods, and functions of hopflow and NumPy return
    proxies. A use that needs a value, such as `if`, raises `TraceError`.
    """

    __slots__ = ("_node", "_tracer")

    def __init__(self, node: Node, tracer: TracerBase) -> None:
        self._node = node
        self._tracer = tracer

    def __repr__(self) -> str:
        return f"<Proxy {self.node.name}>"

    @property
    def node(self) -> Node:
        """The node whose value this is."""
        return self._node

    @property
    def tracer(self) -> TracerBase:
        """The tracer that records the uses."""
        return self._tracer

    # --- recorded uses ---

    @blames_user
    def __getattr__(self, name: str) -> "Attribute":
        if name.startswith("_"):  # proxies have none of Python's protocols
            raise AttributeError(name)
        return Attribute(self, name)

    def __call__(self, *args: Any, **kwargs: Any) -> "Proxy":
        return self.tracer.create_proxy(
            "call_method", "__call__", (self, *args), kwargs
        )

    def __getitem__(self, key: Any) -> "Proxy":
        return self.tracer.create_proxy(
            "call_function", operator.getitem, (self, key), {}
        )

    def __setitem__(self, key: Any, value: Any) -> None:
        self.tracer.create_proxy(
            "call_function", operator.setitem, (self, key, value), {}
        )

    def __array_ufunc__(
        self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any
    ) -> "Proxy":
        target: Any = ufunc if method == "__call__" else getattr(ufunc, method)
        if (
            method == "__call__" and not options
        ):  # an operator, with an array on the left
            target = _OPERATORS.get(ufunc, ufunc)
        return self.tracer.create_proxy("call_function", target, inputs, options)

    def __array_function__(
        self, function: Callable[..., Any], _: Any, args: Any, named: Any
    ) -> "Proxy":
        return self.tracer.create_proxy("call_function", function, args, named)

    __hash__ = object.__hash__

    # --- uses that need a value ---

    def __bool__(self) -> bool:
        return self.tracer.to_bool(self)

    def __iter__(self) -> Iterator["Proxy"]:
        return self.tracer.iterate(self)

    def __len__(self) -> int:
        self._refuse("its length", "len")

    def __int__(self) -> int:
        self._refuse("a Python int", "int")

    def __index__(self) -> int:
        self._refuse("a Python int", "operator.index")

    def __float__(self) -> float:
        self._refuse("a Python float", "math.sqrt")

    def __complex__(self) -> complex:
        self._refuse("a Python complex", "complex")

    def __contains__(self, item: Any) -> bool:
        self._refuse("whether something is in it", "operator.contains")

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        self._refuse("a NumPy array", "np.asarray")

    def _refuse(self, request: str, example: str) -> NoReturn:
        raise no_value(
            self,
            request,
            "To have the call of a function recorded, wrap it outside of what is "
            f"traced: `f = hf.wrap({example})`, and call `f`.",
        )


class Attribute(Proxy):
    """`x.name`: recorded as a method call if it is called, else as `getattr`."""

    __slots__ = ("_name", "_owner")

    def __init__(self, owner: Proxy, name: str) -> None:
        # The node is created when it is used other than by a call.
        self._owner = owner
        self._name = name
        self._tracer = owner.tracer

    @property
    def node(self) -> Node:
        try:
            return self._node
        except AttributeError:
            args = (self._owner, self._name)
            read = self.tracer.create_proxy(
                "call_function", getattr, args, {}, self._name
            )
            self._node = read.node
            return self._node

    def __call__(self, *args: Any, **kwargs: Any) -> Proxy:
        return self.tracer.create_proxy(
            "call_method", self._name, (self._owner, *args), kwargs
        )


_BINARY: Final = "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift"
_OTHERS: Final = "lt le gt ge eq ne neg pos abs invert"

_OPERATORS: Final[Mapping[np.ufunc, Callable[..., Any]]] = {
    np.add: operator.add,
    np.subtract: operator.sub,
    np.multiply: operator.mul,
    np.divide: operator.truediv,
    np.floor_divide: operator.floordiv,
    np.remainder: operator.mod,
    np.power: operator.pow,
    np.matmul: operator.matmul,
    np.bitwise_and: operator.and_,
    np.bitwise_or: operator.or_,
    np.bitwise_xor: operator.xor,
    np.left_shift: operator.lshift,
    np.right_shift: operator.rshift,
    np.less: operator.lt,
    np.less_equal: operator.le,
    np.greater: operator.gt,
    np.greater_equal: operator.ge,
    np.equal: operator.eq,
    np.not_equal: operator.ne,
}


def _define_operators() -> None:
    """Define the operators of `Proxy`, recorded as functions of `operator`."""

    def forward(f: Any) -> Any:
        def method(x: Proxy, *others: Any) -> Proxy:
            return x.tracer.create_proxy("call_function", f, (x, *others), {})

        return method

    def reflected(f: Any) -> Any:
        def method(x: Proxy, other: Any) -> Proxy:
            return x.tracer.create_proxy("call_function", f, (other, x), {})

        return method

    for name in _BINARY.split():
        f = getattr(operator, f"__{name}__")
        setattr(Proxy, f"__{name}__", entry(forward(f)))
        setattr(Proxy, f"__r{name}__", entry(reflected(f)))
    for name in _OTHERS.split():
        setattr(Proxy, f"__{name}__", entry(forward(getattr(operator, name))))
    for name, f in IN_PLACE.items():
        setattr(Proxy, f"__{name}__", entry(forward(f)))
    for cls in (Proxy, Attribute):
        entries(cls, "__call__")
    entries(
        Proxy,
        *("__getitem__", "__setitem__", "__bool__", "__iter__", "__len__", "__int__"),
        *("__index__", "__float__", "__complex__", "__contains__", "__array__"),
    )


_define_operators()


# --- errors ---------------------------------------------------------------------------

_MAX_NODES: Final = 8


def no_value(proxy: Proxy, request: str, remedy: str) -> TraceError:
    """Return the error for a use of a proxy that needs a value.

    It shows the line of the use, and the lines of the nodes that the proxy depends on.
    """
    line = user_line()
    rows = [_row("asked by", line)] if line else []
    pending, seen = [proxy.node], {proxy.node}
    while pending and len(seen) <= _MAX_NODES:
        node = pending.pop(0)
        rows.append(_row(f"`{node.name}`", node.line, node))
        new = [n for n in node.inputs if n not in seen]
        seen.update(new)
        pending += new
    walk = "\n".join(f"  {row}" for row in rows)
    return TraceError(
        f"symbolic trace: `{proxy.node.name}` is a proxy without a value, and was "
        f"asked for {request}.\n{walk}\n{remedy}"
    )


def _row(label: str, line: SourceLine | None, node: Node | None = None) -> str:
    if node is not None and node.kind == "placeholder":
        return f"{label}  an argument"
    if line is None:
        return label
    text = source_text(line)
    return f"{label}  {line}, in {line.function}{': ' if text else ''}{text}"


def unpacked_into() -> int | None:
    """Return the number of names that the user's code unpacks a value into, as in
    `a, b = x`; None if it does not."""
    frame: FrameType | None = user_frame()
    if frame is None:
        return None
    for instruction in dis.get_instructions(frame.f_code):
        if instruction.offset == frame.f_lasti:
            is_unpacked = instruction.opname.startswith("UNPACK_SEQUENCE")
            return instruction.argval if is_unpacked else None
    return None
