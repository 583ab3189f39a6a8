"""Scripts that reproduce a user's call which met a defect of hopflow.

    f = function('''def ...''')
    hf.jit(hf.grad(f), dynamic=True)(x)

The user's function is written as its graph, so that the script is self-contained. The
script is run before it is reported: if the graph does not reproduce the error, the
script has the source of the function instead, if it is available.
"""

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable, Iterator, Sequence
from types import FunctionType, ModuleType
from typing import Any, Final, NamedTuple

import numpy as np

from hopflow import pytree
from hopflow.bind import Value, bind, current
from hopflow.errors import InternalError
from hopflow.fx.module import GraphModule as SymbolicModule
from hopflow.graph.core import match_shapes
from hopflow.graph.interpreter import interpret
from hopflow.graph.module import GraphModule
from hopflow.graph.parser import parse
from hopflow.graph.printer import format_graph
from hopflow.hops.associative_scan import ASSOCIATIVE_SCAN
from hopflow.hops.base import RegionOperator
from hopflow.hops.checkpoint import CHECKPOINT
from hopflow.hops.cond import COND
from hopflow.hops.flex_attention import FLEX_ATTENTION
from hopflow.hops.invoke_subgraph import INVOKE_SUBGRAPH
from hopflow.hops.map import MAP
from hopflow.hops.scan import SCAN
from hopflow.hops.switch import SWITCH
from hopflow.hops.while_loop import WHILE
from hopflow.jit import Jitted
from hopflow.ops.convert import as_value
from hopflow.ops.opdef import OPERATIONS, OpDef
from hopflow.symbolic.size import Size, Symbol
from hopflow.tensor import EagerTensor
from hopflow.trace.capture import trace

_HIGHER_ORDER: Final[tuple[RegionOperator, ...]] = (
    *(ASSOCIATIVE_SCAN, CHECKPOINT, COND, FLEX_ATTENTION, INVOKE_SUBGRAPH, MAP),
    *(SCAN, SWITCH, WHILE),
)
_OPERATORS: Final = {**OPERATIONS, **{op.name: op for op in _HIGHER_ORDER}}
_MOST_ELEMENTS: Final = 64
"""The largest tensor that is written out; of a larger one only the shape is."""


def function(
    text: str, results: Any = 0, attributes: dict[str, Any] | None = None
) -> Callable[..., Any]:
    """Return a graph as a function of tensors.

    Args:
        text: The text of the graph, such as `jitted.graph_text`.
        results: The tree of results, with the positions of outputs as leaves.
        attributes: The constant tensors of the graph, by name.
    """
    graph = parse(text, _OPERATORS, attributes)

    def call(*args: Any, **kwargs: Any) -> Any:
        leaves, _ = pytree.flatten((args, kwargs))
        operands = [as_value(x) if isinstance(x, Value) else x for x in leaves]
        sizes: dict[Symbol, Size] = {}
        for var, value in zip(graph.operands, operands, strict=True):
            match_shapes(var.type.shape, value.type.shape, sizes)
        numbers = [sizes[v.node.symbol] for v in graph.symbols if v.node.symbol]
        symbols = [n if isinstance(n, int) else current().value_of(n) for n in numbers]
        outputs = interpret(graph, [*symbols, *operands], bind)
        return pytree.tree_map(lambda k: as_value(outputs[k]), results)

    return call


def program(
    callee: Any, args: tuple[Any, ...], kwargs: dict[str, Any], error: InternalError
) -> str:
    """Return a script that reproduces a call, or else a description of the call."""
    call = _Call(callee, args, kwargs)
    for script in call.scripts():
        if _repeats(script, error):
            return script
    return call.description()


def _repeats(script: str, error: InternalError) -> bool:
    """Whether a script fails with the same error."""
    try:
        exec(compile(script, "<program>", "exec"), {})
    except InternalError as raised:
        return type(raised.__cause__) is type(error.__cause__)
    except Exception:
        return False
    return False


class _Inner(NamedTuple):
    """The user's function within a transformed callee.

    function      the function; None: the callee is one of hopflow's
    around        the transforms as a template, `hf.jit({})`, or the callee itself
    args, kwargs  the arguments of the function
    """

    function: Any
    around: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _Call:
    """The call that a script reproduces."""

    def __init__(
        self, callee: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.callee, self.args, self.kwargs = callee, args, kwargs
        self.inner = _inner(callee, args, kwargs)

    def scripts(self) -> Iterator[str]:
        """Yield scripts that may reproduce the error, the best first."""
        ways: list[Callable[[], str | None]] = [
            functools.partial(self.with_graph, "symbolic"),
            functools.partial(self.with_graph, "real"),
            self.with_source,
        ]
        for write in ways:
            try:
                script = write()
            except Exception:  # the defect may prevent the script, too
                continue
            if script is not None:
                yield script

    def with_graph(self, mode: str) -> str | None:
        """Return the script with the user's function as a graph; None: it has none.

        Args:
            mode: The mode of `hf.trace`; sizes are symbols only in mode "symbolic".
        """
        inner = self.inner
        if inner is None or any(map(callable, pytree.flatten(self.args)[0])):
            return None
        if inner.function is None:
            return self.script([], inner.around)
        args = (*inner.args, *inner.kwargs.values())
        names = list(inner.kwargs)

        def positional(*values: Any) -> Any:
            count = len(values) - len(names)
            keywords = dict(zip(names, values[count:], strict=True))
            return inner.function(*values[:count], **keywords)

        module = trace(positional, *args, mode=mode, captures=True)
        return self.script(_definition(module), inner.around.format("f"))

    def with_source(self) -> str | None:
        """Return the script with the source of the user's function and of all that it
        reads; None: there is no user's function."""
        inner = self.inner
        if inner is None or inner.function is None:
            return None
        definitions: dict[str, str] = {}
        _define("f", inner.function, definitions)
        return self.script([*definitions.values(), ""], inner.around.format("f"))

    def description(self) -> str:
        """Return comments that describe a call which no script reproduces."""
        names = [_shown(x) for x in self.args]
        names += [f"{k}={_shown(v)}" for k, v in self.kwargs.items()]
        name = getattr(self.callee, "__qualname__", None) or repr(self.callee)
        lines = [f"# No script repeats it. The call was {name}({', '.join(names)})."]
        functions = [self.inner.function] if self.inner is not None else []
        functions += [x for x in pytree.flatten(self.args)[0] if callable(x)]
        functions = [f for f in functions if f is not None]
        for f in functions:
            try:
                source = inspect.getsource(f)
            except (OSError, TypeError):  # it has none
                continue
            lines += ["# with", textwrap.dedent(source).rstrip()]
        return "\n".join(lines)

    def script(self, definitions: Sequence[str], callee: str) -> str:
        """Return the script that calls `callee` after these definitions."""
        arguments = [_written(x) for x in self.args]
        arguments += [f"{k}={_written(v)}" for k, v in self.kwargs.items()]
        return "\n".join(
            [
                "import numpy as np",
                "",
                "import hopflow as hf",
                "from hopflow.reproduction import function",
                "",
                *definitions,
                f"{callee}({', '.join(arguments)})",
                "",
            ]
        )


def _inner(callee: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Inner | None:
    """Return the user's function within a callee; None: it has no text form."""
    if isinstance(callee, Jitted):
        options = {"dynamic": callee._dynamic, "donate": callee._donate or None}
        return _inner_of_transform("jit", callee._f, options, args, kwargs)
    if isinstance(callee, GraphModule | SymbolicModule | RegionOperator):
        return None
    transform = getattr(callee, "transform", None)
    if transform is not None:
        name, f, options = transform
        inner_args = args
        if name == "vmap":
            inner_args = _first_examples(options["in_dims"], args)
            kwargs = pytree.tree_map(lambda x: x[0], kwargs)
        return _inner_of_transform(name, f, options, inner_args, kwargs)
    if isinstance(callee, OpDef):
        return _Inner(None, f"hf.{callee.name}", args, kwargs)
    module = getattr(callee, "__module__", None) or ""
    if module.startswith("hopflow"):  # a function of arrays, or an operator
        qualifier = module.replace("hopflow", "hf", 1)
        qualifier = qualifier.replace("hf.ops", "hf").replace("hf.tensor.base", "hf")
        return _Inner(None, f"{qualifier}.{callee.__qualname__}", args, kwargs)
    return _Inner(callee, "{}", args, kwargs) if callable(callee) else None


def _inner_of_transform(
    name: str,
    f: Any,
    options: dict[str, Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> _Inner | None:
    """Return the user's function within the transform `name` of `f`, or None."""
    inner = _inner(f, args, kwargs)
    if inner is None:
        return None
    keywords = {k: v for k, v in options.items() if v not in (None, False)}
    parts = [inner.around, *(f"{k}={v!r}" for k, v in keywords.items())]
    return inner._replace(around=f"hf.{name}({', '.join(parts)})")


def _first_examples(in_dims: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments of the first batch element."""
    dims = in_dims if isinstance(in_dims, tuple) else (in_dims,) * len(args)

    def first(x: Any, dim: Any) -> Any:
        return x if dim is None else pytree.tree_map(lambda v: np.take(v, 0, dim), x)

    return tuple(first(x, dim) for x, dim in zip(args, dims, strict=True))


def _definition(module: GraphModule) -> list[str]:
    """Return the lines of `f = function(...)` for the graph of a module."""
    count = module.out_spec.num_leaves
    results = pytree.unflatten(module.out_spec, range(count))
    attributes = ", ".join(
        f"{name!r}: {_written(value)}"
        for name, value in module.graph.attributes.items()
    )
    keyword = f", attributes={{{attributes}}}" if attributes else ""
    text = format_graph(module.graph, width=88).strip()
    return [f"f = function(r'''\n{text}\n''', results={results!r}{keyword})", ""]


def _define(name: str, value: Any, definitions: dict[str, str]) -> None:
    """Add the definition of a name to `definitions`, after those of all it reads."""
    if name in definitions or name == "hf":
        return
    definitions[name] = ""  # the function may be recursive
    if isinstance(value, ModuleType):
        definitions[name] = f"import {value.__name__} as {name}"
    elif not isinstance(value, FunctionType):
        definitions[name] = f"{name} = {_written(value)}"
    else:
        names = inspect.getclosurevars(value)
        for other, part in {**names.globals, **names.nonlocals}.items():
            _define(other, part, definitions)
        del definitions[name]
        definitions[name] = _source(name, value)


def _source(name: str, f: FunctionType) -> str:
    """Return a function's source as a definition of a name.

    Raises:
        OSError, SyntaxError, LookupError: the source is unavailable, or is no
            definition by itself.
    """
    lines, first = inspect.getsourcelines(f)
    tree = ast.parse(textwrap.dedent("".join(lines)))
    arguments = f.__code__.co_varnames[: f.__code__.co_argcount]
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.Lambda):
            continue
        parameters = tuple(a.arg for a in (*node.args.posonlyargs, *node.args.args))
        is_here = first + node.lineno - 1 == f.__code__.co_firstlineno
        if parameters != arguments or not (
            is_here or isinstance(node, ast.FunctionDef)
        ):
            continue
        if isinstance(node, ast.Lambda):
            return f"{name} = {ast.unparse(node)}"
        node.decorator_list, node.returns, node.name = [], None, name
        for argument in ast.walk(node.args):
            if isinstance(argument, ast.arg):
                argument.annotation = None
        return ast.unparse(node)
    raise LookupError(name)


def _written(value: Any) -> str:
    """Return a tree of tensors, numbers and strings as Python code."""
    if isinstance(value, EagerTensor | np.ndarray | np.generic):
        array = np.asarray(value)
        dtype = value.dtype.name
        if array.size > _MOST_ELEMENTS:
            return f"hf.ones({array.shape}, dtype=hf.{dtype})"
        elements = f"np.array({array.astype(object).tolist()!r})"
        elements = elements.replace("nan", "np.nan").replace("inf", "np.inf")
        code = f"hf.asarray({elements}, dtype={dtype!r})"
        return code if array.size else f"hf.zeros({array.shape}, dtype={dtype!r})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{k!r}: {_written(v)}' for k, v in value.items())}}}"
    if type(value) is list:
        return f"[{', '.join(map(_written, value))}]"
    if type(value) is tuple:
        return f"({''.join(_written(v) + ', ' for v in value)})"
    return repr(value)


def _shown(value: Any) -> str:
    if isinstance(value, Value):
        return str(value.type)
    return repr(value) if not callable(value) else getattr(value, "__name__", "f")
