"""Graphs as Python that runs: `printer`'s text, with what it refers to.

A subgraph is a function there, so that a debugger stops in it, and a traceback shows
its line.
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
    """The function that the text of `graph` defines.

    Its parameters are the inputs of the graph, captures by name; a symbol is an int. It
    returns one result, or a tuple of several or none.

    Args:
        bind: As `interpret` takes it.
    """
    operators = {n.op.name: n.op for n in graph.walk() if n.op is not None}
    text = format_graph(graph)
    scope = namespace(text, operators, bind, graph.attributes, named_objects(graph))
    return execute(text, graph.name, scope)


def run_text(graph: Graph, inputs: Sequence[Any], bind: Bind) -> list[Any]:
    """What `interpret` gives, computed by the text of the graph."""
    return _called(compile_graph(graph, bind), inputs)


def namespace(
    text: str,
    operators: Mapping[str, Any],
    bind: Bind,
    attributes: Mapping[str, Any] | None = None,
    objects: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """What the text of a graph refers to when it runs.

        scope = namespace(module.code, {"sin": sin, "cond": COND}, bind)
        exec(module.code, scope)

    An operator with subgraphs is run by its rule `interpret`, which calls the functions
    of the text for them.

    Args:
        text, operators, attributes, objects: As `parse` takes them.
        bind: As `interpret` takes it.

    Raises:
        HopflowError: the text is no graph, as `parse` says it.
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
    """Run the definition of a function, and return it. Tracebacks show its lines as
    long as it is there.

    Raises:
        SyntaxError: the text is no Python.
    """
    file = f"<graph {name} {next(_numbers)}>"
    # Annotations are kept, and not evaluated.
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
    """`f32` as the text has it: a dtype, `f32[3]` a type, `f32(2.0)` a constant."""

    dtype: DType

    def __getitem__(self, shape: Size | tuple[Size, ...]) -> TensorType:
        return TensorType(self.dtype, shape if isinstance(shape, tuple) else (shape,))

    def __call__(self, value: float) -> Constant:
        return Constant(value, TensorType(self.dtype))


@dataclass(slots=True)
class _Operator:
    """`sin(x)` binds the operator named `sin`."""

    op: Any
    bind: Bind
    functions: Mapping[str, Graph]
    scope: dict[str, Any]

    def __call__(self, *args: Any, **params: Any) -> Any:
        operands = list(map(_operand, args))
        called: dict[Graph, FunctionType] = {}
        given = {key: self.static(value, called) for key, value in params.items()}

        def evaluate(graph: Graph, inputs: Sequence[Any]) -> Sequence[Any]:
            if graph in called:
                return _called(called[graph], inputs)
            return interpret(graph, inputs, self.bind)

        if called:
            with deep_recursion():
                results = self.op.interpret(operands, given, evaluate)
        else:
            results = self.bind(self.op, operands, given)
        return results[0] if len(results) == 1 else tuple(results)

    def static(self, value: Any, called: dict[Graph, FunctionType]) -> Any:
        """A param: the graph for a function of the text, which is added to `called`."""
        if isinstance(value, tuple):
            return tuple([self.static(v, called) for v in value])
        if isinstance(value, _Type):
            return value.dtype
        if isinstance(value, FunctionType) and value.__globals__ is self.scope:
            graph = self.functions[value.__qualname__]
            called[graph] = value
            return graph
        return value


def _called(function: FunctionType, inputs: Sequence[Any]) -> list[Any]:
    """The results of a function of the text on the inputs of its graph."""
    code = function.__code__
    symbols, end = code.co_posonlyargcount, code.co_argcount
    names = code.co_varnames[end : end + code.co_kwonlyargcount]
    sizes = map(_as_size, inputs[:symbols])
    captures = dict(zip(names, inputs[end:], strict=True))
    found = function(*sizes, *inputs[symbols:end], **captures)
    return list(map(_operand, found if isinstance(found, tuple) else (found,)))


def _operand(value: Any) -> Any:
    """A value or a constant: Python's numbers are constants, symbols among them."""
    dtype = BARE.get(type(value))
    return value if dtype is None else Constant(value, TensorType(dtype))


def _as_size(value: Any) -> Size:
    """A symbol of the text: the number that a value holds, or the size that it is."""
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
    """A function of sizes, which is an operator's name too. The text has no constants
    without a dtype for such an operator, and so calls it with no numbers but symbols,
    of which both make the same."""

    def call(*args: Any, **params: Any) -> Any:
        are_sizes = all(isinstance(a, int | float | SymInt | SymFloat) for a in args)
        return (function if are_sizes and not params else operator)(*args, **params)

    return call
