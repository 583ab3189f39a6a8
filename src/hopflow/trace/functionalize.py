"""`hf.functionalize`: a function whose writes are new values until it returns.

`Functionalize` is a tracer that computes as it records, each operation by the
interpreter below it, which therefore sees no write. Only at the end are tensors from
outside written, once each, with what they came to hold.
"""

import functools
from collections.abc import Callable, Sequence
from math import inf
from typing import Any

from hopflow import pytree
from hopflow.bind import (
    Interpreter,
    Operand,
    Value,
    bind,
    current,
    recordable,
    using,
)
from hopflow.errors import ArgumentTypeError
from hopflow.graph.core import Arg, Constant, Node, Var, plain_symbol
from hopflow.graph.types import same_shape
from hopflow.ops.convert import as_value, copy
from hopflow.ops.item import dim_size, item
from hopflow.ops.opdef import OpDef
from hopflow.symbolic.size import Size, Symbol
from hopflow.tensor import Tensor
from hopflow.trace.captures import Capture
from hopflow.trace.functional import TracedTensor
from hopflow.trace.rollback import unchanged_on_error
from hopflow.trace.signature import Given
from hopflow.trace.source import argument_texts, name_of, parameter_names, user_env
from hopflow.trace.tensor_types import opened
from hopflow.trace.tracer import Tracer, trace_into


class Functionalize(Tracer):
    """A tracer each of whose vars has a value, computed by the interpreter below.

    values    what the vars hold, below
    """

    __slots__ = ("values",)

    def __init__(self, parent: Interpreter, name: str) -> None:
        # The symbols of bodies, where no tracer around has any.
        super().__init__(parent, name, env=user_env())
        self.values: dict[Var, Operand] = {}

    # --- inputs ---

    def lifted(self, origin: Tensor, var: Var, memory: Tensor) -> Capture:
        self.values[var] = origin
        return super().lifted(origin, var, memory)

    def define(self, symbol: Symbol) -> Var:
        var = super().define(symbol)
        if isinstance(self.parent, Tracer):
            self.values[var] = TracedTensor(self.parent, self.parent.symbol(symbol))
        return var

    # --- recording ---

    def detached(self, view: Value) -> Value:
        # What a view is below may have memory, which is written at the end.
        return self.process(copy, (view,), {})[0]

    def record(
        self, op: Any, args: Sequence[Operand], params: dict[str, Any]
    ) -> tuple[TracedTensor, ...]:
        if _may_make_symbols(op, params):
            return self._record_with_sizes(op, args, params)
        recorded = [self.arg(a) for a in args]
        node = self.graph.call(op, recorded, params, ())  # nobody reads its line
        with using(self.parent):
            values = self.run(node)
        node.results = tuple([Var(node, i, v.type) for i, v in enumerate(values)])
        self.values.update(zip(node.results, values, strict=True))
        return tuple([TracedTensor(self, var) for var in node.results])

    def _record_with_sizes(
        self, op: Any, args: Sequence[Operand], params: dict[str, Any]
    ) -> tuple[TracedTensor, ...]:
        """The same for what may bring forth symbols."""
        results = super().record(op, args, params)
        node = results[0].source.node if results else self.graph.nodes[-1]
        with using(self.parent):
            values = self.run(node)
        for var, value in zip(node.results, values, strict=True):
            if type(op) is not OpDef and not same_shape(var.type.shape, value.shape):
                # A size that was made within.
                var.type = var.type.with_shape(value.type.shape)
            self.values[var] = value
        if node.symbol is not None:
            self._define_as_below(node)
        return results

    def run(self, node: Node) -> Sequence[Value]:
        """The results of a node, by the present interpreter: the one below."""
        return bind(node.op, [self.value(a) for a in node.args], node.params)

    def _define_as_below(self, node: Node) -> None:
        """Have a node define the symbol of its value, or none for a known number."""
        [var] = node.results
        known = self.values[var]
        assert node.symbol is not None
        del self.symbols[node.symbol]
        size = known.as_size() if isinstance(known, TracedTensor) else 0
        node.symbol = plain_symbol(size)
        if node.symbol is not None:
            self.symbols[node.symbol] = var

    def value(self, arg: Arg) -> Operand:
        """What a var or a constant is, below."""
        return arg if isinstance(arg, Constant) else self.values[arg]

    def held(self, tensor: Value) -> Value:
        """What a tensor of this trace, or of one below, holds now: below."""
        return as_value(self.values[self.read(self.localize(tensor))])

    # --- numbers ---

    def symbol_of(
        self, value: Value, min: float = -inf, max: Size | float = inf
    ) -> Size:
        known = self.held(value)
        with using(self.parent):
            return current().symbol_of(known, min, max)

    def size_of(self, tensor: TracedTensor) -> Size:
        known = self.held(tensor)
        return known.as_size() if isinstance(known, TracedTensor) else int(known)

    def concrete(self, tensor: TracedTensor, what: str) -> Any:
        return self.held(tensor)._concrete(what)

    def has_tangent(self, value: Value) -> bool:
        # A tensor from outside holds what it was given within this trace.
        is_below = isinstance(value, TracedTensor) and value.tracer is not self
        return super().has_tangent(value if is_below else self.held(value))

    def number_of(self, tensor: TracedTensor) -> Any:
        return self.held(tensor).item()

    # --- the end ---

    def written(self) -> list[Capture]:
        """The tensors of outside that were written."""
        return [c for c in self._from_outside() if c.written]

    def write_back(self) -> None:
        """End the trace, and give what was written of outside what it holds now."""
        for capture in self.written():
            value = self.held(capture.tensor)
            with using(self.parent):
                current().write(capture.origin, value)
        self.closed = True

    def outside(self, leaf: Any) -> Any:
        """A result as the caller has it: what is a tensor of its own, or a view of one,
        is so again."""
        if not (isinstance(leaf, TracedTensor) and leaf.tracer is self):
            return leaf
        owner = leaf if leaf.storage is None else leaf.storage.owner
        if owner.origin is None:
            return self.held(leaf)
        found: Value = owner.origin
        for step in leaf.chain:
            found = step.again(found, self.held)
        return found


def _may_make_symbols(op: Any, params: dict[str, Any]) -> bool:
    """Whether an operation may have results of sizes that no operand has."""
    if type(op) is OpDef:
        return op is item or op is dim_size
    return not op.is_call or not all([o.type.is_static for o in params["body"].outputs])


def functionalize(f: Callable[..., Any]) -> Callable[..., Any]:
    """A function that does what `f` does, without writes in between.

    Within it a write (`x[i] = v`, `x += v`, also through views of views) makes a new
    value, which all views of the tensor take from there on. When `f` has returned, the
    arguments and the tensors of enclosing functions that it wrote are written, each
    once; if it raises, none is. Results that are such tensors, or views of them, are so
    again.

    Args:
        f: Takes and returns any pytrees. What is no tensor or array passes as it is.

    Raises:
        ArgumentTypeError: `f` is no function.
        ReadOnlyError: `f` writes into a broadcast or read-only memory (at a call).
        MutationError: a tensor that is written shares its memory with another one, and
            the two cannot be views of one tensor (at a call).
    """
    if not callable(f):
        raise ArgumentTypeError(
            f"functionalize: `f` must be a function, and is `{type(f).__name__}`."
        )

    @functools.wraps(f)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = Given.of(args, kwargs)
        names = [*parameter_names(f, len(args)), *kwargs]
        positional, named = given.spec.children()
        texts = argument_texts(names, [*positional.children(), *named.children()])
        tracer = Functionalize(current(), name_of(f))

        def run() -> Any:
            leaves = [
                tracer.reference(x, text) if isinstance(x, Value) else x
                for x, text in zip(given.leaves, texts, strict=True)
            ]
            own_args, own_kwargs = pytree.unflatten(given.spec, leaves)
            return f(*own_args, **own_kwargs)

        with unchanged_on_error():
            result = trace_into(tracer, run, ())
            with using(tracer.parent):
                found = pytree.tree_map(tracer.outside, opened(result, tracer))
            tracer.write_back()
        return found

    return recordable(call, made=("functionalize", f, {}))
