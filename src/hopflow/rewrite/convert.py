"""From a function to its source, and from rewritten source to a function."""

import ast
import dis
import inspect
import linecache
from collections.abc import Iterator
from copy import deepcopy
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Final, NamedTuple

from hopflow.errors import ControlFlowError
from hopflow.rewrite.generate import RUNTIME, rewritten
from hopflow.rewrite.names import Scope
from hopflow.trace.source import name_of

SKIP: Final = "__hopflow_skip__"
"""An attribute of functions that are not rewritten."""

_runtime: Final = CellType()
# Memo tables by the id of code, which the entries keep alive: hashing code is slow.
_templates: dict[int, tuple[CodeType, CodeType]] = {}
_rewritten: dict[int, CodeType] = {}


def provide(runtime: ModuleType) -> None:
    """Set the module that rewritten code calls by the name `RUNTIME`."""
    _runtime.cell_contents = runtime


def is_rewritten(code: CodeType) -> bool:
    """Whether code is the result of a rewrite."""
    return id(code) in _rewritten


def converted(f: FunctionType) -> FunctionType:
    """Return a function rewritten, with the globals, closure and defaults of `f`.

    Raises:
        ControlFlowError: the source of `f` is unavailable, or it is an asynchronous
            generator.
    """
    cached = _templates.get(id(f.__code__))
    template = cached[1] if cached is not None else _template(f)
    _templates[id(f.__code__)] = f.__code__, template
    cells = dict(zip(f.__code__.co_freevars, f.__closure__ or (), strict=True))
    cells[RUNTIME] = _runtime
    closure = tuple([cells[name] for name in template.co_freevars])
    result = FunctionType(template, f.__globals__, f.__name__, f.__defaults__, closure)
    result.__kwdefaults__ = f.__kwdefaults__
    result.__qualname__ = f.__qualname__
    result.__module__ = f.__module__
    result.__annotations__ = f.__annotations__
    result.__dict__.update(f.__dict__)
    return result


# --- source ---------------------------------------------------------------------------


class _Source(NamedTuple):
    """The definition of a function, and the name of the class around it."""

    node: Scope | ast.Lambda
    around: str | None


_trees: dict[str, tuple[list[str], list[_Source]]] = {}


def _source(f: FunctionType) -> _Source:
    """Return the definition of a function.

    Raises:
        ControlFlowError: there is none.
    """
    code = f.__code__
    linecache.checkcache(code.co_filename)
    lines = linecache.getlines(code.co_filename, f.__globals__)
    cached = _trees.get(code.co_filename)
    if cached is None or cached[0] != lines:
        try:
            tree = ast.parse("".join(lines))
        except SyntaxError:
            tree = ast.Module([], [])
        cached = _trees[code.co_filename] = lines, list(_definitions(tree, None))
    sources = [source for source in cached[1] if _is_of(source.node, code)]
    if not sources:
        raise ControlFlowError(
            f"control_flow: `{name_of(f)}` has no source to rewrite. It must be "
            "a `def` or `lambda` in a file."
        )
    # The innermost: a nested lambda matches the enclosing one, too.
    return max(sources, key=lambda s: (s.node.lineno, s.node.col_offset))


def _definitions(node: ast.AST, around: str | None) -> Iterator[_Source]:
    """Yield the definitions below a node that is in a class of the name `around`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield _Source(child, around)
        name = child.name if isinstance(child, ast.ClassDef) else around
        yield from _definitions(child, name)


def _is_of(node: Scope | ast.Lambda, code: CodeType) -> bool:
    """Whether code was compiled from a definition."""
    args = node.args
    names = [a.arg for a in (*args.posonlyargs, *args.args, *args.kwonlyargs)]
    count = code.co_argcount + code.co_kwonlyargcount
    if isinstance(node, ast.Lambda):
        if code.co_name != "<lambda>" or names != list(code.co_varnames[:count]):
            return False
        body = node.body
        start = body.lineno, body.col_offset
        end = body.end_lineno or 0, body.end_col_offset or 0
        places = [
            ((line, column), (last, until))
            for line, last, column, until in code.co_positions()
            if line and last and until  # the prologue has no positions
        ]
        return node.lineno == code.co_firstlineno and all(
            start <= first <= last <= end for first, last in places
        )
    first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
    return node.name == code.co_name and first == code.co_firstlineno


# --- code -----------------------------------------------------------------------------

_FACTORY: Final = "hopflow_factory"
_LAMBDA: Final = "hopflow_lambda"


def _template(f: FunctionType) -> CodeType:
    """Return the rewritten code of a function."""
    if f.__code__.co_flags & inspect.CO_ASYNC_GENERATOR:
        raise ControlFlowError(
            f"control_flow: `{name_of(f)}` is an asynchronous generator, which cannot "
            "be rewritten. Return the values instead."
        )
    source = _source(f)
    node = _as_function(deepcopy(source.node))
    rewritten(node, _writers_around(f))
    node.decorator_list = []
    node.returns = None
    free = f.__code__.co_freevars
    factory = ast.parse(f"def {_FACTORY}({', '.join((RUNTIME, *free))}): pass")
    [outer] = factory.body
    assert isinstance(outer, ast.FunctionDef)
    definition: ast.stmt = node
    if source.around is not None:  # for the mangled name of `self.__x`
        definition = ast.parse(f"class {source.around}: pass").body[0]
        assert isinstance(definition, ast.ClassDef)
        definition.body = [node]
    outer.body = [definition]
    name = node.name if source.around is None else source.around
    if name not in free:  # the name refers to the global
        outer.body.insert(0, ast.Global([name]))
    ast.fix_missing_locations(factory)
    _without_defaults(node)
    code = _code_of(compile(factory, f.__code__.co_filename, "exec"), node.name)
    code = code.replace(co_name=f.__code__.co_name, co_qualname=f.__code__.co_qualname)
    _remember(code)
    return code


def _as_function(node: Scope | ast.Lambda) -> Scope:
    """Return a definition by `def`."""
    if not isinstance(node, ast.Lambda):
        return node
    [function] = ast.parse(f"def {_LAMBDA}(): pass").body
    assert isinstance(function, ast.FunctionDef)
    function.args = node.args
    function.body = [ast.copy_location(ast.Return(node.body), node.body)]
    return ast.copy_location(function, node)


def _without_defaults(node: Scope) -> None:
    """Remove defaults and annotations, which the user's definition has evaluated."""
    args = node.args
    args.defaults = [ast.copy_location(ast.Constant(None), d) for d in args.defaults]
    args.kw_defaults = [
        None if d is None else ast.copy_location(ast.Constant(None), d)
        for d in args.kw_defaults
    ]
    for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs):
        arg.annotation = None
    for variadic in (args.vararg, args.kwarg):
        if variadic is not None:
            variadic.annotation = None


def _code_of(code: CodeType, name: str) -> CodeType:
    """Return the code of the function in the factory."""
    while code.co_name != name:
        inner = [c for c in code.co_consts if isinstance(c, CodeType)]
        names = [c.co_name for c in inner]
        code = inner[names.index(name) if name in names else 0]
    return code


def _remember(code: CodeType) -> None:
    _rewritten[id(code)] = code
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            _remember(inner)


# --- callees --------------------------------------------------------------------------


def _writers_around(f: FunctionType) -> dict[str, str]:
    """Return the functions visible to `f` whose calls assign a name outside of them,
    directly or by another function of the module: function -> such a name."""
    seen = {f}
    names_by_function = {name: _written_by(g, seen.copy()) for name, g in _named_in(f)}
    return {
        name: written
        for name, written in names_by_function.items()
        if written is not None
    }


def _written_by(f: FunctionType, seen: set[FunctionType]) -> str | None:
    """Return a name outside of `f` that calls of it assign, or None."""
    seen.add(f)
    free = f.__code__.co_freevars
    for code, opcode, name in _names_in(f):
        is_outside = opcode.endswith("GLOBAL") or (
            name in free and name in code.co_freevars
        )
        if opcode in _WRITES and is_outside:
            return name
    called = (_written_by(g, seen) for _, g in _named_in(f) if g not in seen)
    return next((name for name in called if name is not None), None)


_WRITES: Final = ("STORE_GLOBAL", "DELETE_GLOBAL", "STORE_DEREF", "DELETE_DEREF")


def _named_in(f: FunctionType) -> Iterator[tuple[str, FunctionType]]:
    """Yield the functions of its module that `f` refers to, by name."""
    cells = zip(f.__code__.co_freevars, f.__closure__ or (), strict=True)
    values = {
        name: f.__globals__.get(name)
        for _, opcode, name in _names_in(f)
        if opcode == "LOAD_GLOBAL"
    }
    values |= {name: cell.cell_contents for name, cell in cells if cell != CellType()}
    for name, value in values.items():
        if isinstance(value, FunctionType) and value.__globals__ is f.__globals__:
            yield name, value


def _names_in(f: FunctionType) -> Iterator[tuple[CodeType, str, str]]:
    """Yield the code, opcode and argument of all instructions of a function and its
    inner functions."""
    codes = [f.__code__]
    for code in codes:
        codes += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
        for instruction in dis.get_instructions(code):
            yield code, instruction.opname, str(instruction.argval)
