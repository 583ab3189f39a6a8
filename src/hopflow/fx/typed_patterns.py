"""Patterns as captured graphs: functions traced for certain types of their parameters.

The operations of a function depend on these types (`a + b` of an i32 and an f32
converts the first). So a pattern is several graphs: one for each choice of types that
leads to calls which the searched graph contains. A parameter gets its type when the
function first uses it.
"""

import inspect
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from hopflow import pytree
from hopflow.bind import Operand, Value
from hopflow.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    CapturedTensorError,
    EscapedValueError,
    HopflowError,
    InternalError,
    MutationError,
    ResultTypeError,
    TraceError,
)
from hopflow.graph.core import Arg, Graph, Var, size_of
from hopflow.graph.rewriting import fresh_symbol
from hopflow.graph.types import TensorType
from hopflow.ops.opdef import as_operand
from hopflow.symbolic.env import ShapeEnv
from hopflow.symbolic.size import Size, Symbol, free_symbols, substitute
from hopflow.tensor import Tensor
from hopflow.trace.captures import is_written
from hopflow.trace.functional import TracedTensor
from hopflow.trace.source import name_of
from hopflow.trace.tracer import Tracer, trace_into


@dataclass(frozen=True, slots=True)
class TypedPattern:
    """A pattern as a graph.

    graph      its inputs are symbols, then operands and captures
    inputs     position of a parameter -> the input, for the parameters that are used
    captures   input -> the tensor that it captures
    results    what the function returns: one value, or those of a tuple or list
    """

    graph: Graph
    inputs: dict[int, Var]
    captures: dict[Var, Value] = field(repr=False)
    results: tuple[Arg, ...] = ()


def parameters_of(argument: str, f: Any) -> list[str]:
    """Return the names of a function's parameters.

    Raises:
        ArgumentTypeError: it is no function, or takes any number of arguments.
    """
    if not callable(f):
        raise ArgumentTypeError(
            f"replace_pattern: `{argument}` must be a function, and is "
            f"`{type(f).__name__}`."
        )
    parameters = inspect.signature(f).parameters.values()
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
        raise ArgumentTypeError(
            f"replace_pattern: `{name_of(f)}` takes any number of arguments. Name each "
            "of them."
        )
    return [p.name for p in parameters]


# --- types ----------------------------------------------------------------------------


class Renaming:
    """A renaming of the symbols of a graph to fresh ones, which patterns are traced
    over.

    Of the fresh symbols only the ranges are known, so that tracing a pattern adds no
    guard on the sizes of the graph.

    fresh      symbol of the graph -> its fresh symbol
    original   fresh symbol -> symbol of the graph
    sizes      symbol of the graph -> its simplified size, over fresh symbols
    """

    def __init__(self, symbols: Iterable[Symbol]) -> None:
        self.fresh: dict[Symbol, Symbol] = {
            s: free_symbols(fresh_symbol(s))[0] for s in symbols
        }
        self.original = {fresh: symbol for symbol, fresh in self.fresh.items()}
        plain: dict[Symbol, Size] = {s: size_of(t) for s, t in self.fresh.items()}
        self.sizes = {s: substitute(_simplified(s), plain) for s in self.fresh}

    def type(self, type_: TensorType) -> TensorType:
        """Return a type of the graph over fresh symbols."""
        sizes = [substitute(n, self.sizes) for n in type_.shape]
        return type_.with_shape(sizes).strong()


def _simplified(symbol: Symbol) -> Size:
    """Return a symbol as a size, simplified by what its environment knows."""
    size = size_of(symbol)
    return symbol.env.simplify(size) if isinstance(symbol.env, ShapeEnv) else size


# No handler of the pattern or of hopflow catches these two.
class _TypeNeeded(BaseException):
    """A parameter is used before its type is chosen."""

    def __init__(self, position: int) -> None:
        super().__init__(position)
        self.position = position


class _CallAbsent(BaseException):
    """The pattern has a call of a kind that the graph does not contain."""


class _Untyped(Tensor):
    """A parameter whose type is not chosen yet."""

    __slots__ = ("position",)

    def __init__(self, position: int) -> None:
        self.position = position

    @property
    def type(self) -> TensorType:
        raise _TypeNeeded(self.position)


def kind_of_call(op: Any, types: Iterable[TensorType]) -> Any:
    """Return the kind of a call: its operation, and the types of its args."""
    return op, *map(str, types)


class _PatternTracer(Tracer):
    """Trace a pattern, up to the first call of a kind that the graph does not contain.

    present   the kinds of calls of the graph; None accepts all
    """

    __slots__ = ("present",)

    present: Collection[Any] | None

    def record(
        self, op: Any, args: Sequence[Operand], params: dict[str, Any]
    ) -> tuple[TracedTensor, ...]:
        if self.present is not None:
            types = [self.arg(a).type for a in args]
            if kind_of_call(op, types) not in self.present:
                raise _CallAbsent
        return super().record(op, args, params)


# Errors that do not depend on the types of the arguments.
_ALWAYS_WRONG: Final = (
    CapturedTensorError,
    EscapedValueError,
    InternalError,
    MutationError,
    ResultTypeError,
    TraceError,
)


def typed_patterns(
    f: Callable[..., Any], types: Iterable[TensorType], present: Collection[Any]
) -> list[TypedPattern]:
    """Return the graphs of `f` for all choices of types that it accepts.

    Args:
        types: The types to choose from.
        present: The kinds of calls that the graphs may contain; see `kind_of_call`.

    Raises:
        TraceError: `f` needs the value of a tensor.
    """
    candidates = list(dict.fromkeys(t.strong() for t in types))
    names = parameters_of("pattern", f)
    pending: list[dict[int, TensorType]] = [{}]
    patterns: list[TypedPattern] = []
    while pending:
        chosen = pending.pop()
        try:
            patterns.append(typed(f, names, chosen, present))
        except _TypeNeeded as needed:
            choices = [{**chosen, needed.position: type_} for type_ in candidates]
            pending += reversed(choices)
        except _CallAbsent:
            continue
        except HopflowError as error:
            if isinstance(error, _ALWAYS_WRONG):
                raise
            continue  # `f` does not take these types
    return patterns


def typed(
    f: Callable[..., Any],
    names: Sequence[str],
    types: dict[int, TensorType],
    present: Collection[Any] | None = None,
) -> TypedPattern:
    """Return the graph of `f` for parameters of these types, by position.

    Raises:
        ArgumentValueError: `f` uses a parameter without a type (if `present` is None).
        MutationError: it writes to a parameter or to a captured tensor.
    """
    tracer = _PatternTracer(None, name_of(f))
    tracer.present = present
    symbols: dict[Symbol, None] = {}
    for type_ in types.values():
        symbols.update(dict.fromkeys(free_symbols(*type_.shape)))
    for symbol in symbols:
        tracer.define(symbol)
    args: list[Any] = [
        tracer.operand(types[i], name) if i in types else _Untyped(i)
        for i, name in enumerate(names)
    ]
    inputs = {i: args[i].source for i in types}
    try:
        outputs = trace_into(tracer, lambda: _call(f, names, args), ())
        graph = tracer.close(outputs)
    except _TypeNeeded as needed:
        if present is not None:
            raise
        raise ArgumentValueError(
            f"replace_pattern: `{name_of(f)}` uses its parameter "
            f"`{names[needed.position]}`, which the pattern does not use."
        ) from None
    tensors = [*tracer.operands, *(c.tensor for c in tracer.captures.values())]
    for tensor in filter(is_written, tensors):
        raise MutationError(
            f"replace_pattern: `{name_of(f)}` writes to a tensor {tensor.type} that it "
            "is given or reads from outside. Return the new value instead."
        )
    traced_captures = tracer.captures.values()
    captures: dict[Var, Value] = {c.input: c.origin for c in traced_captures}
    return TypedPattern(graph, inputs, captures, graph.outputs)


def _call(
    f: Callable[..., Any], names: Sequence[str], args: Sequence[Any]
) -> list[Operand]:
    by_name = {
        p.name
        for p in inspect.signature(f).parameters.values()
        if p.kind is p.KEYWORD_ONLY
    }
    pairs = list(zip(names, args, strict=True))
    result = f(
        *(x for name, x in pairs if name not in by_name),
        **{name: x for name, x in pairs if name in by_name},
    )
    leaves = list(result) if isinstance(result, tuple | list) else [result]
    if any(not pytree.is_leaf(pytree.structure(leaf)) for leaf in leaves):
        raise ResultTypeError(
            f"replace_pattern: `{name_of(f)}` must return one value or a tuple of "
            f"values, and returns `{type(result).__name__}`s within."
        )
    return [as_operand(name_of(f), i, leaf) for i, leaf in enumerate(leaves)]
