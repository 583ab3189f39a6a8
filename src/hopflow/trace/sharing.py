"""What is made once in a trace, however many of its nodes ask for it."""

from collections.abc import Callable, Hashable
from typing import Any, TypeVar

from hopflow.bind import Interpreter, current
from hopflow.trace.tracer import Tracer

T = TypeVar("T")


def root() -> Tracer | None:
    """The outermost of the tracers that are at work."""
    found: Tracer | None = None
    interpreter: Interpreter | None = current()
    while interpreter is not None:
        if isinstance(interpreter, Tracer):
            found = interpreter
        interpreter = interpreter.parent
    return found


def once(owner: Any, key: Hashable, make: Callable[[], T]) -> T:
    """What `make` has made of `owner` for this key in the present trace."""
    tracer = root()
    if tracer is None:
        return make()
    at = id(owner), key
    if at not in tracer.shared:
        tracer.shared[at] = owner, make()
    found: T = tracer.shared[at][1]
    return found


def of_call(op: Any, params: dict[str, Any], key: Hashable, make: Callable[[], T]) -> T:
    """What `make` makes of an operator's graphs, for this key.

    Calls share their bodies, and so what is made of them.
    """
    if not op.is_call:
        return make()
    others = [(k, v) for k, v in params.items() if k != "body"]
    return once(params["body"], (op, *others, key), make)
