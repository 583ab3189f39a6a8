"""Memoization per trace: values computed once for all nodes that need them."""

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from hopflow.bind import Interpreter, current
from hopflow.trace.tracer import Tracer

T = TypeVar("T")


def root() -> Tracer | None:
    """Return the outermost current tracer."""
    outermost: Tracer | None = None
    interpreter: Interpreter | None = current()
    while interpreter is not None:
        if isinstance(interpreter, Tracer):
            outermost = interpreter
        interpreter = interpreter.parent
    return outermost


def once(owner: Any, key: Hashable, make: Callable[[], T]) -> T:
    """Return `make()`, computed once for `owner` and this key in the current trace."""
    tracer = root()
    if tracer is None:
        return make()
    memo_key = id(owner), key
    if memo_key not in tracer.shared:
        tracer.shared[memo_key] = owner, make()
    value: T = tracer.shared[memo_key][1]
    return value


def of_call(op: Any, params: dict[str, Any], key: Hashable, make: Callable[[], T]) -> T:
    """Return `make()`, a value computed from an operator's graphs, for this key.

    It is memoized for calls, because calls share their bodies.
    """
    if not op.is_call:
        return make()
    others = [(k, v) for k, v in params.items() if k != "body"]
    return once(params["body"], (op, *others, key), make)
