"""Graphs as executable Python: the text of `printer`, with the names that it refers to.

Each subgraph is a Python function, so that a debugger can stop in it and tracebacks
show its lines.
"""

import __future__

import linecache
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from types import FunctionType, SimpleNamespace
from typing import Any, Final
from weakref import finalize

from hopflow.dtypes import ALL, DType
from hopflow.graph.core import Constant, Graph
from hopflow.graph.interpreter import Bind, interpret
from hopflow.graph.parser import parsed
from hopflow.graph.printer import BARE, format_graph, named_objects, operator_name
from hopflow.graph.types import TensorType
from hopflow.recursion import deep_recursion
from hopflow.symbolic.size import FUNCTIONS, Size, SymFloat, SymInt

_numbers: Final = count()


def compile_graph(graph: Graph, bind: Bind) -> FunctionType:
    """Return the function that the text of `graph` defines.

    Its parameters are the inputs of the graph; captures are passed by name, and a
    symbol is an int. It returns a single result, or a tuple of none or several.

    Args:
        bind: As `interpret` takes it.
    """
    operators = {n.op.name: n.op for n in graph.walk() if n.op is not None}
    text = format_graph(graph)
    scope = namespace(text, operators, bind, graph.attributes, named_objects(graph))
    return execute(text, graph.name, scope)


def run_text(graph: Graph, inputs: Sequence[Any], bind: Bind) -> list[Any]:
    """Return what `interpret` returns, computed by running the graph's text."""
    return _call(compile_graph(graph, bind), inputs)


def namespace(
    text: str,
    operators: Mapping[str, Any],
    bind: Bind,
    attributes: Mapping[str, Any] | None = None,
    objects: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Return the global names that the text of a graph needs to run.

        scope = namespace(module.code, {"sin": sin, "cond": COND}, bind)
        exec(module.code, scope)

    An operator with subgraphs runs by its rule `interpret`, which calls the functions
    of the text for the subgraphs.

    Args:
        text, operators, attributes, objects: As `parse` takes them.
        bind: As `interpret` takes it.

    Raises:
        HopflowError: the text is no graph; see `parse`.
    """
    attributes, objects = attributes or {}, objects or {}
    functions = parsed(text, operators, attributes, objects).functions
    scope: dict[str, Any] = {"objects": SimpleNamespace(**objects)}
    for name, op in operators.items():
        scope[operator_name(name)] = _Operator(op, bind, functions, scope)
    for name, f in FUNCTIONS.items():
        scope[name] = _sizes_first(f, scope[name]) if name in scope else f
    scope |= {d.short: _Type(d) for d in ALL}
    scope |= {"nan": float("nan"), "inf": float("inf"), "int": _as_size}
    scope["get_attr"] = attributes.__getitem__
    return scope


def execute(text: str, name: str, scope: dict[str, Any]) -> FunctionType:
    """Run the definition of a function, and return the function. Tracebacks show its
    lines while the function is alive.

    Raises:
        SyntaxError: the text is no Python.
    """
    file = f"<graph {name} {next(_numbers)}>"
    # Annotations must not be evaluated: they name symbols before their definition.
    flags = __future__.annotations.compiler_flag
    exec(compile(text, file, "exec", flags, dont_inherit=True), scope)
    function: FunctionType = next(f for f in scope.values() if _is_of(f, file))
    linecache.cache[file] = len(text), None, text.splitlines(keepends=True), file
    finalize(function, linecache.cache.pop, file, None)
    return function


def _is_of(value: Any, file: str) -> bool:
    return isinstance(value, FunctionType) and value.__code__.co_filename == file


@dataclass(slots=True)
class _Type:
    """The name `f32` in the text: a dtype; `f32[3]` a type, `f32(2.0)` a constant."""

    dtype: DType

    def __getitem__(self, shape: Size | tuple[Size, ...]) -> TensorType:
        return TensorType(self.dtype, shape if isinstance(shape, tuple) else (shape,))

    def __call__(self, value: float) -> Constant:
        return Constant(value, TensorType(self.dtype))


@dataclass(slots=True)
class _Operator:
    """The name of an operator in the text: a call `sin(x)` binds the operator."""

    op: Any
    bind: Bind
    functions: Mapping[str, Graph]
    scope: dict[str, Any]

    def __call__(self, *args: Any, **params: Any) -> Any:
        operands = list(map(_operand, args))
        functions: dict[Graph, FunctionType] = {}
        static_params = {
            key: self.static(value, functions) for key, value in params.items()
        }

        def evaluate(graph: Graph, inputs: Sequence[Any]) -> Sequence[Any]:
            if graph in functions:
                return _call(functions[graph], inputs)
            return interpret(graph, inputs, self.bind)

        if functions:
            with deep_recursion():
                results = self.op.interpret(operands, static_params, evaluate)
        else:
            results = self.bind(self.op, operands, static_params)
        return results[0] if len(results) == 1 else tuple(results)

    def static(self, value: Any, functions: dict[Graph, FunctionType]) -> Any:
        """Return a param; a function becomes its graph, a key of `functions`."""
        if isinstance(value, tuple):
            return tuple([self.static(v, functions) for v in value])
        if isinstance(value, _Type):
            return value.dtype
        if isinstance(value, FunctionType) and value.__globals__ is self.scope:
            graph = self.functions[value.__qualname__]
            functions[graph] = value
            return graph
        return value


def _call(function: FunctionType, inputs: Sequence[Any]) -> list[Any]:
    """Call a function of the text on its graph's inputs; return the results."""
    code = function.__code__
    symbols, end = code.co_posonlyargcount, code.co_argcount
    names = code.co_varnames[end : end + code.co_kwonlyargcount]
    sizes = map(_as_size, inputs[:symbols])
    captures = dict(zip(names, inputs[end:], strict=True))
    results = function(*sizes, *inputs[symbols:end], **captures)
    return list(map(_operand, results if isinstance(results, tuple) else (results,)))


def _operand(value: Any) -> Any:
    """Return a value or a constant: Python numbers and symbols become constants."""
    dtype = BARE.get(type(value))
    return value if dtype is None else Constant(value, TensorType(dtype))


def _as_size(value: Any) -> Size:
    """Return the size that a symbol of the text is: a number, or a symbolic size."""
    if isinstance(value, Constant):
        return int(value.value)
    if isinstance(value, float | SymFloat | SymInt):
        size: Size = FUNCTIONS["int"](value)
        return size
    as_size = getattr(value, "as_size", None)
    return as_size() if as_size is not None else int(value)


def _sizes_first(
    function: Callable[..., Any], operator: _Operator
) -> Callable[..., Any]:
    """Return a function that serves a name of both a function of sizes and an operator.

    The text passes constants with their dtypes to such an operator, so plain numbers
    are symbols, for which both give the same result.
    """

    def call(*args: Any, **params: Any) -> Any:
        are_sizes = all(isinstance(a, int | float | SymInt | SymFloat) for a in args)
        return (function if are_sizes and not params else operator)(*args, **params)

    return call
