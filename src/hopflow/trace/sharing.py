"""Memoization per trace: what is made of a body is made once for all of its calls.

That is the body batched, linearised or traced again. Whether tensors share memory is
the matter of `tensor/sharing.py`.
"""

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
    """Return `make()`, computed once for `owner` and this key in the current trace.

    Nested traces have one memory, that of the outermost one; outside of a trace nothing
    is kept. An owner is told by identity, and kept alive so that its id stays its own.
    """
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

    It is memoized for operators that run their body once (`op.is_call`, as of
    `invoke_subgraph`), since several of their nodes may have the same graph as `body`.
    Every other node has graphs of its own.
    """
    if not op.is_call:
        return make()
    others = [(k, v) for k, v in params.items() if k != "body"]
    return once(params["body"], (op, *others, key), make)
