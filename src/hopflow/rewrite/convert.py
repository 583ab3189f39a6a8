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
"""An attribute of functions that are left alone."""

_runtime: Final = CellType()
# By the identity of code, which the entry keeps alive: to hash code takes long.
_templates: dict[int, tuple[CodeType, CodeType]] = {}
_rewritten: dict[int, CodeType] = {}


def provide(runtime: ModuleType) -> None:
    """Say what rewritten code finds by the name `RUNTIME`."""
    _runtime.cell_contents = runtime


def is_rewritten(code: CodeType) -> bool:
    """Whether code was made here."""
    return id(code) in _rewritten


def converted(f: FunctionType) -> FunctionType:
    """A function, rewritten, with the globals, the closure and the defaults of `f`.

    Raises:
        ControlFlowError: its source is not known, or it is an asynchronous generator.
    """
    known = _templates.get(id(f.__code__))
    template = known[1] if known is not None else _template(f)
    _templates[id(f.__code__)] = f.__code__, template
    cells = dict(zip(f.__code__.co_freevars, f.__closure__ or (), strict=True))
    cells[RUNTIME] = _runtime
    closure = tuple([cells[name] for name in template.co_freevars])
    made = FunctionType(template, f.__globals__, f.__name__, f.__defaults__, closure)
    made.__kwdefaults__ = f.__kwdefaults__
    made.__qualname__ = f.__qualname__
    made.__module__ = f.__module__
    made.__annotations__ = f.__annotations__
    made.__dict__.update(f.__dict__)
    return made


# --- source ---------------------------------------------------------------------------


class _Source(NamedTuple):
    """A definition, and the name of the class that it stands in."""

    node: Scope | ast.Lambda
    around: str | None


_trees: dict[str, tuple[list[str], list[_Source]]] = {}


def _source(f: FunctionType) -> _Source:
    """Raises: ControlFlowError: there is none to be found."""
    code = f.__code__
    linecache.checkcache(code.co_filename)
    lines = linecache.getlines(code.co_filename, f.__globals__)
    known = _trees.get(code.co_filename)
    if known is None or known[0] != lines:
        try:
            tree = ast.parse("".join(lines))
        except SyntaxError:
            tree = ast.Module([], [])
        known = _trees[code.co_filename] = lines, list(_definitions(tree, None))
    found = [source for source in known[1] if _is_of(source.node, code)]
    if not found:
        raise ControlFlowError(
            f"control_flow: `{name_of(f)}` has no source to rewrite. It must be "
            "a `def` or `lambda` in a file."
        )
    # A lambda within another one stands within the other's body, too.
    return max(found, key=lambda s: (s.node.lineno, s.node.col_offset))


def _definitions(node: ast.AST, around: str | None) -> Iterator[_Source]:
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
            if line and last and until  # what begins a function has no place
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
    """The code of a function, rewritten."""
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
    if source.around is not None:  # `self.__x` has its name
        definition = ast.parse(f"class {source.around}: pass").body[0]
        assert isinstance(definition, ast.ClassDef)
        definition.body = [node]
    outer.body = [definition]
    name = node.name if source.around is None else source.around
    if name not in free:  # who reads the name means the global one
        outer.body.insert(0, ast.Global([name]))
    ast.fix_missing_locations(factory)
    _without_defaults(node)
    code = _code_of(compile(factory, f.__code__.co_filename, "exec"), node.name)
    code = code.replace(co_name=f.__code__.co_name, co_qualname=f.__code__.co_qualname)
    _remember(code)
    return code


def _as_function(node: Scope | ast.Lambda) -> Scope:
    if not isinstance(node, ast.Lambda):
        return node
    [made] = ast.parse(f"def {_LAMBDA}(): pass").body
    assert isinstance(made, ast.FunctionDef)
    made.args = node.args
    made.body = [ast.copy_location(ast.Return(node.body), node.body)]
    return ast.copy_location(made, node)


def _without_defaults(node: Scope) -> None:
    """What is evaluated where the function is defined was so already."""
    args = node.args
    args.defaults = [ast.copy_location(ast.Constant(None), d) for d in args.defaults]
    args.kw_defaults = [
        None if d is None else ast.copy_location(ast.Constant(None), d)
        for d in args.kw_defaults
    ]
    for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs):
        arg.annotation = None
    for rest in (args.vararg, args.kwarg):
        if rest is not None:
            rest.annotation = None


def _code_of(code: CodeType, name: str) -> CodeType:
    """The code of the function that stands in the factory."""
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


# --- functions around it --------------------------------------------------------------


def _writers_around(f: FunctionType) -> dict[str, str]:
    """The functions around `f` that assign a name outside of themselves when they are
    called, by their own hand or by another one's of their module, and that name."""
    seen = {f}
    found = {name: _written_by(g, seen.copy()) for name, g in _named_in(f)}
    return {name: written for name, written in found.items() if written is not None}


def _written_by(f: FunctionType, seen: set[FunctionType]) -> str | None:
    seen.add(f)
    free = f.__code__.co_freevars
    for code, how, name in _names_in(f):
        ours = how.endswith("GLOBAL") or (name in free and name in code.co_freevars)
        if how in _WRITES and ours:
            return name
    called = (_written_by(g, seen) for _, g in _named_in(f) if g not in seen)
    return next((name for name in called if name is not None), None)


_WRITES: Final = ("STORE_GLOBAL", "DELETE_GLOBAL", "STORE_DEREF", "DELETE_DEREF")


def _named_in(f: FunctionType) -> Iterator[tuple[str, FunctionType]]:
    """The functions of its module that `f` finds around itself, by name."""
    cells = zip(f.__code__.co_freevars, f.__closure__ or (), strict=True)
    values = {
        name: f.__globals__.get(name)
        for _, how, name in _names_in(f)
        if how == "LOAD_GLOBAL"
    }
    values |= {name: cell.cell_contents for name, cell in cells if cell != CellType()}
    for name, value in values.items():
        if isinstance(value, FunctionType) and value.__globals__ is f.__globals__:
            yield name, value


def _names_in(f: FunctionType) -> Iterator[tuple[CodeType, str, str]]:
    """What a function, and those within, does to names: in which code, and how."""
    codes = [f.__code__]
    for code in codes:
        codes += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
        for instruction in dis.get_instructions(code):
            yield code, instruction.opname, str(instruction.argval)
