"""`control_flow`: the decorator."""

import ast
import dis
import functools
import inspect
from collections.abc import Callable, Iterator
from types import CellType, CodeType, FunctionType
from typing import Any, Final, TypeVar

from hopflow.errors import ArgumentTypeError, ControlFlowError
from hopflow.rewrite import runtime
from hopflow.rewrite.generate import RUNTIME, is_generator, rewritten
from hopflow.trace.source import name_of

__all__ = ["control_flow"]

F = TypeVar("F", bound=Callable[..., Any])

_SKIP: Final = "__hopflow_skip__"


class _ControlFlow:
    """The decorator; see `__call__`."""

    def __call__(self, f: F) -> F:
        """`f`, with plain Python `if`, `while` and `for` that depend on tensors as
        operators.

        Conditions of `if`, `while`, `assert`, `and`, `or`, `not`, conditional
        expressions and chains of comparisons may be tensors, and so may the items of a
        `for` and the arguments of its `range`; `break`, `continue` and `return` may
        stand in them. Where a condition is no tensor, it is Python as before. Functions
        defined within `f` are rewritten too, those that it calls are not.

        A name that an `if` or a loop assigns, and that is used afterwards, must have a
        value on all ways, of one type. What has effects on other things than local
        names and tensors (an attribute that is assigned, a `raise`, a `global` name,
        by a function of its module that it calls, too) stays Python: it must not depend
        on a tensor.

        Raises:
            ArgumentTypeError: `f` is no function written in Python.
            ControlFlowError: its source is not known, or it is a generator, a coroutine
                or a lambda. When it is traced: something that depends on a tensor
                cannot be rewritten, with the reason.
        """
        if not isinstance(f, FunctionType):
            raise ArgumentTypeError(
                "control_flow: `f` must be a Python function, and is "
                f"`{type(f).__name__}`. Decorate the function itself, first of all."
            )
        if getattr(f, _SKIP, False):
            return f
        if hasattr(f, "__wrapped__"):
            raise ArgumentTypeError(
                f"control_flow: `{name_of(f)}` is a function around another one. "
                "Decorate the inner one: write `@hf.control_flow` last."
            )
        node, first = _definition(f)
        if is_generator(node):
            raise ControlFlowError(
                f"control_flow: `{name_of(f)}` is a generator, which cannot be "
                "rewritten. Return the values instead."
            )
        rewritten(node, _writers_around(f))
        made = _function(f, node, first)
        functools.update_wrapper(made, f)
        return made  # type: ignore[return-value]

    @staticmethod
    def skip(f: F) -> F:
        """`f`, which `control_flow` leaves alone."""
        setattr(f, _SKIP, True)
        return f


control_flow = _ControlFlow()


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


def _definition(f: FunctionType) -> tuple[ast.FunctionDef, int]:
    """The definition of a function, and how many lines of its file stand before it.

    Raises:
        ControlFlowError: there is none to be found.
    """
    try:
        lines, first = inspect.getsourcelines(f)
        text = "".join(lines)
        nested = text[:1].isspace()
        [node] = ast.parse("if True:\n" + text if nested else text).body
    except (OSError, TypeError, SyntaxError, ValueError):
        node, first, nested = None, 0, False
    if nested:
        assert isinstance(node, ast.If)
        node = node.body[0]
    if not isinstance(node, ast.FunctionDef) or node.name != f.__code__.co_name:
        raise ControlFlowError(
            f"control_flow: `{name_of(f)}` has no source to rewrite. It must be a "
            "`def` in a file: no lambda, no coroutine, no code that was made."
        )
    return node, first - 1 - nested


def _function(f: FunctionType, node: ast.FunctionDef, before: int) -> FunctionType:
    """The rewritten function, with the globals and the closure of the first one."""
    node.decorator_list = []
    free = f.__code__.co_freevars
    factory = ast.parse(f"def {_FACTORY}({', '.join((RUNTIME, *free))}): pass")
    [outer] = factory.body
    assert isinstance(outer, ast.FunctionDef)
    definition: ast.FunctionDef | ast.ClassDef = node
    names = f.__qualname__.split(".")
    if len(names) > 1 and names[-2].isidentifier():  # `self.__x` has its name
        definition = ast.ClassDef(names[-2], [], [], [node], [])
    outer.body = [definition]
    if definition.name not in free:  # who reads the name means the global one
        outer.body.insert(0, ast.Global([definition.name]))
    ast.increment_lineno(node, before)
    ast.fix_missing_locations(factory)
    code = _code_of(compile(factory, f.__code__.co_filename, "exec"), node.name)
    cells = dict(zip(free, f.__closure__ or (), strict=True))
    cells[RUNTIME] = CellType(runtime)
    closure = tuple([cells[name] for name in code.co_freevars])
    made = FunctionType(code, f.__globals__, f.__name__, f.__defaults__, closure)
    made.__kwdefaults__ = f.__kwdefaults__
    return made


_FACTORY: Final = "hopflow_factory"


def _code_of(code: CodeType, name: str) -> CodeType:
    """The code of the function that stands in the factory."""
    while code.co_name != name:
        inner = [c for c in code.co_consts if isinstance(c, CodeType)]
        names = [c.co_name for c in inner]
        code = inner[names.index(name) if name in names else 0]
    return code
