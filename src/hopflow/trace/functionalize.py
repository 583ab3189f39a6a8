"""`hf.functionalize`: delay the writes of a function until it returns.

`Functionalize` is a tracer that also computes each operation by the interpreter below,
which therefore sees no writes. Only at the end, each written tensor from outside is
written once, with its final value.
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
from hopflow.trace.signature import FlatArguments
from hopflow.trace.source import argument_texts, name_of, parameter_names, user_env
from hopflow.trace.tensor_types import opened
from hopflow.trace.tracer import Tracer, trace_into


class Functionalize(Tracer):
    """A tracer whose vars have values, computed by the interpreter below.

    values    var -> its value below
    """

    __slots__ = ("values",)

    def __init__(self, parent: Interpreter, name: str) -> None:
        # Bodies may make symbols, even if no tracer below does.
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
        # The value below may have memory, which is written at the end.
        return self.process(copy, (view,), {})[0]

    def record(
        self, op: Any, args: Sequence[Operand], params: dict[str, Any]
    ) -> tuple[TracedTensor, ...]:
        if _may_make_symbols(op, params):
            return self._record_with_sizes(op, args, params)
        recorded = [self.arg(a) for a in args]
        node = self.graph.call(op, recorded, params, ())  # without types and line
        with using(self.parent):
            values = self.run(node)
        node.results = tuple([Var(node, i, v.type) for i, v in enumerate(values)])
        self.values.update(zip(node.results, values, strict=True))
        return tuple([TracedTensor(self, var) for var in node.results])

    def _record_with_sizes(
        self, op: Any, args: Sequence[Operand], params: dict[str, Any]
    ) -> tuple[TracedTensor, ...]:
        """Record an operation whose results may have new symbolic sizes."""
        results = super().record(op, args, params)
        node = results[0].source.node if results else self.graph.nodes[-1]
        with using(self.parent):
            values = self.run(node)
        for var, value in zip(node.results, values, strict=True):
            if type(op) is not OpDef and not same_shape(var.type.shape, value.shape):
                # The value has the actual size.
                var.type = var.type.with_shape(value.type.shape)
            self.values[var] = value
        if node.symbol is not None:
            self._define_as_below(node)
        return results

    def run(self, node: Node) -> Sequence[Value]:
        """Return the results of a node by the current interpreter, the one below."""
        return bind(node.op, [self.value(a) for a in node.args], node.params)

    def _define_as_below(self, node: Node) -> None:
        """Make a node define the symbol that its value below is, if it is one."""
        [var] = node.results
        value = self.values[var]
        assert node.symbol is not None
        del self.symbols[node.symbol]
        size = value.as_size() if isinstance(value, TracedTensor) else 0
        node.symbol = plain_symbol(size)
        if node.symbol is not None:
            self.symbols[node.symbol] = var

    def value(self, arg: Arg) -> Operand:
        """Return the value of a var or a constant below."""
        return arg if isinstance(arg, Constant) else self.values[arg]

    def held(self, tensor: Value) -> Value:
        """Return the current value below of a tensor of this or an enclosing trace."""
        return as_value(self.values[self.read(self.localize(tensor))])

    # --- numbers ---

    def symbol_of(
        self, value: Value, min: float = -inf, max: Size | float = inf
    ) -> Size:
        held = self.held(value)
        with using(self.parent):
            return current().symbol_of(held, min, max)

    def size_of(self, tensor: TracedTensor) -> Size:
        held = self.held(tensor)
        return held.as_size() if isinstance(held, TracedTensor) else int(held)

    def concrete(self, tensor: TracedTensor, what: str) -> Any:
        return self.held(tensor)._concrete(what)

    def has_tangent(self, value: Value) -> bool:
        # A tensor from outside may have been written in this trace.
        is_below = isinstance(value, TracedTensor) and value.tracer is not self
        return super().has_tangent(value if is_below else self.held(value))

    def number_of(self, tensor: TracedTensor) -> Any:
        return self.held(tensor).item()

    # --- the end ---

    def written(self) -> list[Capture]:
        """Return the captures of written tensors from outside."""
        return [c for c in self._from_outside() if c.written]

    def write_back(self) -> None:
        """End the trace, and write the final values of tensors from outside."""
        for capture in self.written():
            value = self.held(capture.tensor)
            with using(self.parent):
                current().write(capture.origin, value)
        self.closed = True

    def outside(self, leaf: Any) -> Any:
        """Return a result below; a tensor of the caller, or a view of one, is that
        tensor or view again."""
        if not (isinstance(leaf, TracedTensor) and leaf.tracer is self):
            return leaf
        owner = leaf if leaf.storage is None else leaf.storage.owner
        if owner.origin is None:
            return self.held(leaf)
        view: Value = owner.origin
        for step in leaf.chain:
            view = step.again(view, self.held)
        return view


def _may_make_symbols(op: Any, params: dict[str, Any]) -> bool:
    """Whether an operation may have results with new symbolic sizes."""
    if type(op) is OpDef:
        return op is item or op is dim_size
    return not op.is_call or not all([o.type.is_static for o in params["body"].outputs])


def functionalize(f: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that computes `f` without writes until `f` returns.

    A write within `f` (`x[i] = v`, `x += v`, also through views of views) makes a new
    value, which all views of the tensor then have. When `f` returns, each argument and
    tensor from outside that it wrote is written once; if `f` raises, none is. Results
    that are such tensors or views of them remain so.

        >>> def double(x):
        ...     x *= 2
        >>> x = hf.asarray([1.0, 2.0])
        >>> hf.functionalize(double)(x)
        >>> x.tolist()
        [2.0, 4.0]

    Args:
        f: Takes and returns any pytrees. Leaves that are neither tensors nor arrays are
            passed unchanged.

    Raises:
        ArgumentTypeError: `f` is not callable.
        ReadOnlyError: `f` writes to a broadcast or to read-only memory (at a call).
        MutationError: a written tensor aliases another one, and the two cannot be views
            of one tensor (at a call).
    """
    if not callable(f):
        raise ArgumentTypeError(
            f"functionalize: `f` must be a function, and is `{type(f).__name__}`."
        )

    @functools.wraps(f)
    def call(*args: Any, **kwargs: Any) -> Any:
        flat = FlatArguments.of(args, kwargs)
        names = [*parameter_names(f, len(args)), *kwargs]
        positional, named = flat.spec.children()
        texts = argument_texts(names, [*positional.children(), *named.children()])
        tracer = Functionalize(current(), name_of(f))

        def run() -> Any:
            leaves = [
                tracer.reference(x, text) if isinstance(x, Value) else x
                for x, text in zip(flat.leaves, texts, strict=True)
            ]
            traced_args, traced_kwargs = pytree.unflatten(flat.spec, leaves)
            return f(*traced_args, **traced_kwargs)

        with unchanged_on_error():
            result = trace_into(tracer, run, ())
            with using(tracer.parent):
                outputs = pytree.tree_map(tracer.outside, opened(result, tracer))
            tracer.write_back()
        return outputs

    return recordable(call, transform=("functionalize", f, {}))
