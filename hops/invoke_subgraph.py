"""`invoke_subgraph`: a function as a node; `@subgraph`: traced once. All its rules."""

from collections.abc import Callable, Hashable, Sequence
from functools import partial, update_wrapper
from typing import Any, Final, NamedTuple, final

import numpy as np

from hopflow import pytree
from hopflow.bind import Operand, Value, bind, current, recorded
from hopflow.errors import ArgumentTypeError
from hopflow.graph.core import Graph
from hopflow.graph.rewriting import clone
from hopflow.hops.base import Call, debugging
from hopflow.hops.bodies import (
    Function,
    flatten_operands,
    require_callable,
)
from hopflow.hops.branches import Calling
from hopflow.hops.loops import calling, spread_specs
from hopflow.pytree import Spec
from hopflow.symbolic.size import Size, SymFloat, SymInt
from hopflow.trace.rollback import unchanged_on_error
from hopflow.trace.source import input_names
from hopflow.trace.tracer import Tracer


@final
class InvokeSubgraph(Calling):
    """`invoke_subgraph(symbols; operands; captures; body) -> results`"""

    name = "invoke_subgraph"

    def prepare(self, f: Any, operands: tuple[Any, ...]) -> Call:
        require_callable(self.name, "f", f)
        flat, spec = flatten_operands(self.name, "operands", operands)
        names = input_names(f, spread_specs(operands, spec))
        function = Function("f", f, names, calling(f, operands, spec))
        return Call(self.name, [], flat, {"body": function})


INVOKE_SUBGRAPH = InvokeSubgraph()


def invoke_subgraph(f: Callable[..., Any], *operands: Any) -> Any:
    """`f(*operands)` as one node of the graph.

    Args:
        f: Returns any pytree. It may read and write tensors of enclosing functions.
        operands: Pytrees of tensors and numbers.

    Raises:
        ArgumentTypeError: an operand is no tensor or number.
        ResultTypeError: `f` returns what is no tensor or number.
    """
    return INVOKE_SUBGRAPH(f, operands)


def call_of(
    name: str, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Call, list[Any]]:
    """`fn(*args, **kwargs)` as a call of the tensors and numbers among the arguments;
    and the other leaves, which `fn` gets as they are."""
    leaves, spec = pytree.flatten((args, kwargs))
    is_data = [_is_data(leaf) for leaf in leaves]
    pairs = list(zip(leaves, is_data, strict=True))
    operands, _ = flatten_operands(name, "args", [x for x, data in pairs if data])

    def call(flat: Sequence[Any]) -> Any:
        rest = iter(flat)
        merged = [next(rest) if data else leaf for leaf, data in pairs]
        own_args, own_kwargs = pytree.unflatten(spec, merged)
        return fn(*own_args, **own_kwargs)

    names = [f"x{i}" for i in range(len(operands))]
    body = Function("f", fn, names, call)
    static = [leaf for leaf, data in pairs if not data]
    return Call(name, [], operands, {"body": body}), static


# --- the decorator --------------------------------------------------------------------


class _Key(NamedTuple):
    """What one trace of a subgraph is good for.

    same   for each operand the first that is the same tensor
    """

    types: tuple[Hashable, ...]
    same: tuple[int, ...]
    static: tuple[Hashable, ...]
    spec: Spec


class _Known(NamedTuple):
    graph: Graph
    spec: Spec


_MOST_KNOWN: Final = 256


class Subgraph:
    """A function that is traced once for each kind of arguments; see `subgraph`.

    traces   how often it has been traced
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        require_callable("subgraph", "f", fn)
        update_wrapper(self, fn)
        self.fn = fn
        self.traces = 0
        self._known: dict[_Key, _Known] = {}

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else partial(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if (node := recorded(self, args, kwargs)) is not None:
            return node
        found, static = call_of("subgraph", self.fn, args, kwargs)
        if debugging():
            return INVOKE_SUBGRAPH.run_debug(found)
        operands = found.operands
        key = _Key(
            tuple(map(_type_key, operands)),
            tuple(_first_same(operands, i) for i in range(len(operands))),
            tuple(map(_hashable, static)),
            pytree.structure((args, kwargs)),
        )
        known = self._known.get(key)
        if known is None:
            with unchanged_on_error():
                return self._trace(found, key)
        results = bind(
            INVOKE_SUBGRAPH, operands, {"body": self._shared(key, known.graph)}
        )
        return pytree.unflatten(known.spec, results)

    def _trace(self, call: Call, key: _Key) -> Any:
        traced = INVOKE_SUBGRAPH.trace_branches(call)
        self.traces += 1
        closed = traced.closed
        # What a body reads or writes besides its operands may differ in each call.
        if not (closed.symbols or closed.captures or traced.targets):
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            [graph] = closed.graphs
            self._known[key] = _Known(clone(graph), traced.spec)
            root = _root()
            if root is not None:
                root.shared[self, key] = graph
        return INVOKE_SUBGRAPH.finish(call, traced)

    def _shared(self, key: _Key, graph: Graph) -> Graph:
        """The graph of all calls in this trace: another trace may come to change it."""
        root = _root()
        if root is None:
            return graph
        if (self, key) not in root.shared:
            root.shared[self, key] = clone(graph)
        return root.shared[self, key]


def _root() -> Tracer | None:
    """The outermost of the tracers that are at work."""
    found: Tracer | None = None
    interpreter = current()
    while isinstance(interpreter, Tracer):
        found = interpreter
        if interpreter.parent is None:
            break
        interpreter = interpreter.parent
    return found


def _is_data(leaf: Any) -> bool:
    return isinstance(
        leaf, Value | int | float | SymInt | SymFloat | np.ndarray | np.generic
    ) and not isinstance(leaf, bool)


def _type_key(operand: Operand) -> Hashable:
    type_ = operand.type
    return type_.dtype, tuple(map(_size_key, type_.shape)), type_.weak


def _size_key(size: Size) -> Hashable:
    # Symbolic sizes may be undecided, where keys must be equal or not.
    return size.expression if isinstance(size, SymInt) else size


def _first_same(operands: Sequence[Operand], i: int) -> int:
    if isinstance(operands[i], Value):
        return next(k for k, o in enumerate(operands) if o is operands[i])
    return i


def _hashable(leaf: Any) -> Hashable:
    try:
        hash(leaf)
    except TypeError:
        raise ArgumentTypeError(
            "subgraph: an argument that is no tensor or number must be hashable, and a "
            f"`{type(leaf).__name__}` is not. Make it a pytree, or close over it."
        ) from None
    return pytree.exact_key(leaf)


def subgraph(fn: Callable[..., Any]) -> Subgraph:
    """A decorator: `fn` is a node of its own, and traced once for each kind of call.

    The trace is kept by the types of tensors and numbers, and by the values of all
    other arguments, which must be hashable. Calls in one trace share one graph. A
    function that reads or writes tensors of enclosing functions is traced at each call.

    Raises:
        ArgumentTypeError: an argument cannot be hashed, or `fn` is no function.
        ResultTypeError: `fn` returns what is no tensor or number.
    """
    return Subgraph(fn)
