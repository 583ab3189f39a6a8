"""Patterns as captured graphs: a function traced for types of its parameters.

What a function does depends on these (`a + b` of an i32 and an f32 converts the first),
so a pattern is several graphs: one for each choice of types that leads to operations
which the graph has. A parameter without a type yet asks for one when it is used.
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
    """A function as a graph.

    graph      its inputs are symbols, then what it was given and what it captures
    inputs     by the position of a parameter: the input that it is, if it was used
    captures   input -> the tensor from outside that it stands for
    results    what the function returns: one value, or those of a tuple or list
    """

    graph: Graph
    inputs: dict[int, Var]
    captures: dict[Var, Value] = field(repr=False)
    results: tuple[Arg, ...] = ()


def parameters_of(what: str, f: Any) -> list[str]:
    """The names of a function's parameters.

    Raises:
        ArgumentTypeError: it is no function, or takes any number of arguments.
    """
    if not callable(f):
        raise ArgumentTypeError(
            f"replace_pattern: `{what}` must be a function, and is "
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


class Shadows:
    """The types of a graph as patterns have them, over symbols of their own.

    Nobody knows more of these symbols than their ranges: to try a pattern decides
    nothing about the sizes of the graph.

    shadows      symbol of the graph -> the one that patterns have for it
    unshadowed   the other way round
    sizes        symbol of the graph -> what is known of it, over symbols of patterns
    """

    def __init__(self, symbols: Iterable[Symbol]) -> None:
        self.shadows: dict[Symbol, Symbol] = {
            s: free_symbols(fresh_symbol(s))[0] for s in symbols
        }
        self.unshadowed = {shadow: symbol for symbol, shadow in self.shadows.items()}
        plain: dict[Symbol, Size] = {s: size_of(t) for s, t in self.shadows.items()}
        self.sizes = {s: substitute(_settled(s), plain) for s in self.shadows}

    def type(self, type_: TensorType) -> TensorType:
        """A type of the graph as patterns have it."""
        sizes = [substitute(n, self.sizes) for n in type_.shape]
        return type_.with_shape(sizes).strong()


def _settled(symbol: Symbol) -> Size:
    """A symbol as a size: what it is known to be."""
    size = size_of(symbol)
    return symbol.env.simplify(size) if isinstance(symbol.env, ShapeEnv) else size


# These two pass through whatever the pattern, and hopflow, do about errors.
class _Asked(BaseException):
    """A parameter was used whose type was not chosen yet."""

    def __init__(self, position: int) -> None:
        super().__init__(position)
        self.position = position


class _Absent(BaseException):
    """The pattern has a call of a kind that the graph has not."""


class _Untyped(Tensor):
    """A parameter whose type was not chosen yet."""

    __slots__ = ("position",)

    def __init__(self, position: int) -> None:
        self.position = position

    @property
    def type(self) -> TensorType:
        raise _Asked(self.position)


def kind_of_call(op: Any, types: Iterable[TensorType]) -> Any:
    """What calls of an operation on args of these types have in common."""
    return op, *map(str, types)


class _PatternTracer(Tracer):
    """Gives up at the first call of a kind that the graph has not."""

    __slots__ = ("present",)

    present: Collection[Any] | None

    def record(
        self, op: Any, args: Sequence[Operand], params: dict[str, Any]
    ) -> tuple[TracedTensor, ...]:
        if self.present is not None:
            types = [self.arg(a).type for a in args]
            if kind_of_call(op, types) not in self.present:
                raise _Absent
        return super().record(op, args, params)


# What is wrong for any types of the arguments.
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
    """The graphs of `f` for all choices of types that it takes.

    Args:
        present: The kinds of calls that a graph must be made of; see `kind_of_call`.

    Raises:
        TraceError: `f` asks a tensor for its value.
    """
    candidates = list(dict.fromkeys(t.strong() for t in types))
    names = parameters_of("pattern", f)
    pending: list[dict[int, TensorType]] = [{}]
    found: list[TypedPattern] = []
    while pending:
        chosen = pending.pop()
        try:
            found.append(typed(f, names, chosen, present))
        except _Asked as asked:
            more = [{**chosen, asked.position: type_} for type_ in candidates]
            pending += reversed(more)
        except _Absent:
            continue
        except HopflowError as error:
            if isinstance(error, _ALWAYS_WRONG):
                raise
            continue  # it does not take these types
    return found


def typed(
    f: Callable[..., Any],
    names: Sequence[str],
    types: dict[int, TensorType],
    present: Collection[Any] | None = None,
) -> TypedPattern:
    """The graph of `f` for parameters of these types.

    Raises:
        ArgumentValueError: `f` uses a parameter that has none (if `present` is None).
        MutationError: it writes to a parameter or to a tensor from outside.
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
        outputs = trace_into(tracer, lambda: _called(f, names, args), ())
        graph = tracer.close(outputs)
    except _Asked as asked:
        if present is not None:
            raise
        raise ArgumentValueError(
            f"replace_pattern: `{name_of(f)}` uses its parameter "
            f"`{names[asked.position]}`, which the pattern does not use."
        ) from None
    tensors = [*tracer.operands, *(c.tensor for c in tracer.captures.values())]
    for tensor in filter(is_written, tensors):
        raise MutationError(
            f"replace_pattern: `{name_of(f)}` writes to a tensor {tensor.type} that it "
            "is given or reads from outside. Return the new value instead."
        )
    found = tracer.captures.values()
    captures: dict[Var, Value] = {c.input: c.origin for c in found}
    return TypedPattern(graph, inputs, captures, graph.outputs)


def _called(
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
