"""Which line of the user's code an operation came from."""

import dis
import inspect
import linecache
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType, MappingProxyType, MethodType
from typing import Any, Final

from hopflow.errors import ArgumentTypeError
from hopflow.graph.core import SourceLine
from hopflow.graph.origin import origin
from hopflow.pytree import Spec, leaf_paths
from hopflow.symbolic.env import ShapeEnv
from hopflow.tracebacks import OPERATOR_FILE, OWN_FILES, calls_above, is_own_file

_PACKAGE = Path(__file__).resolve().parent.parent
_METHODS = (str(_PACKAGE / "tensor" / "base.py"), str(_PACKAGE / "entries.py"))

# By the identity of code, which the entry keeps alive, an instruction in it, and the
# identity of its caller's line: to hash code, or to find its lines, takes the longer
# the more code there is.
_lines: dict[tuple[int, int, int], tuple[SourceLine, CodeType]] = {}
# By the path of an operator and the identity of its caller's line.
_operators: dict[tuple[str, int], SourceLine] = {}
_codes: dict[SourceLine, CodeType] = {}
_literals: dict[int, frozenset[Any]] = {}  # by the identity of code in `_codes`


def direct_line(depth: int = 1) -> SourceLine | None:
    """The line that called, if it is the user's: a method of tensors may be between."""
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None and frame.f_code.co_filename in _METHODS:
        frame = frame.f_back
    if frame is None or is_own_file(frame.f_code.co_filename):
        return None
    return _line(frame)


def user_frame(depth: int = 1) -> FrameType | None:
    """The innermost frame on the stack that is not hopflow's own."""
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None and OWN_FILES[frame.f_code.co_filename]:
        frame = frame.f_back
    return frame


def user_line(depth: int = 1) -> SourceLine | None:
    """The innermost line on the stack that is not hopflow's own, with its callers;
    while nodes are replayed, the line of the node.

    The callers are those within the traced function, and operators between them.
    """
    if origin.node.line is not None:
        return origin.node.line
    frame = user_frame(depth + 1)
    if frame is None:
        return None
    calls = [frame] if origin.root is None else calls_above(frame, origin.root)
    line = None
    for call in reversed(calls):
        line = (
            _line_of_operator(call, line)
            if isinstance(call, str)
            else _line(call, line)
        )
    return line


def user_expression(depth: int = 1) -> str:
    """The expression of the user's code that is being evaluated; "" where its text is
    not known: while nodes are replayed, or without the source.

    Also "" for one that is too long for a message.
    """
    frame = None if origin.node.line is not None else user_frame(depth + 1)
    if frame is None:
        return ""
    positions = islice(frame.f_code.co_positions(), frame.f_lasti // 2, None)
    first, last, begin, end = next(positions, (None, None, None, None))
    if first is None or first != last or begin is None or end is None:
        return ""
    # Columns count bytes.
    line = linecache.getline(frame.f_code.co_filename, first).encode()
    text = line[begin:end].decode(errors="replace")
    return text if len(text) <= _LONGEST else ""


_LONGEST = 60


def user_env() -> ShapeEnv:
    """An environment for a trace of the user's code, whose lines its messages name."""
    return ShapeEnv(user_line, expression=user_expression)


def source_text(line: SourceLine) -> str:
    """What stands at a line, if its file can be read."""
    return linecache.getline(line.file, line.line).strip()


def _line(frame: FrameType, caller: SourceLine | None = None) -> SourceLine:
    """The line that a frame is at; remembered, while there are not too many."""
    code = frame.f_code
    key = id(code), frame.f_lasti, id(caller)
    known = _lines.get(key)
    if known is not None and known[0].caller is caller:
        return known[0]
    if len(_lines) >= _MOST_LINES:
        for kept in (_lines, _codes, _literals, _operators):
            kept.clear()
    line = SourceLine(code.co_filename, frame.f_lineno, code.co_name, caller)
    _lines[key] = line, code
    _codes[line] = code
    return line


def _line_of_operator(path: str, caller: SourceLine | None) -> SourceLine:
    """What stands in a stack for an operator that calls a function of the user's."""
    key = path, id(caller)
    known = _operators.get(key)
    if known is None or known.caller is not caller:
        known = _operators[key] = SourceLine(OPERATOR_FILE, 1, path, caller)
    return known


_MOST_LINES = 1 << 14
# Python 3.14 has no constants of these.
_LOAD_SMALL_INT = dis.opmap.get("LOAD_SMALL_INT")


def literals(line: SourceLine) -> frozenset[Any]:
    """The constants that the code around a line is written with, where it is known."""
    code = _codes.get(line)
    if code is None:
        return frozenset()
    known = _literals.get(id(code))
    if known is None:
        numbers = (v for v in code.co_consts if isinstance(v, int | float))
        pairs = zip(code.co_code[::2], code.co_code[1::2], strict=True)
        small = (value for opcode, value in pairs if opcode == _LOAD_SMALL_INT)
        known = _literals[id(code)] = frozenset((*numbers, *small))
    return known


def where(fn: object) -> str:
    """Where a function is defined, as `model.py:41`; "" if it is not Python code."""
    code = getattr(getattr(fn, "__wrapped__", fn), "__code__", None)
    if not isinstance(code, CodeType):
        return ""
    return f"{code.co_filename.rsplit('/', 1)[-1]}:{code.co_firstlineno}"


def name_of(fn: object) -> str:
    """A callable's name, as an error or a graph shows it."""
    return getattr(fn, "__name__", type(fn).__name__)


def parameter_names(fn: object, count: int) -> list[str]:
    """Names for `count` positional arguments: `args[2]` beyond named parameters."""
    own = _positional(fn)
    return [own[i] if i < len(own) else f"args[{i}]" for i in range(count)]


def _positional(fn: object) -> tuple[str, ...]:
    """The names of the parameters that a call may give by position."""
    if isinstance(fn, partial):
        return _positional(fn.func)[len(fn.args) :]
    if isinstance(fn, MethodType):
        return _positional(fn.__func__)[1:]
    declared = getattr(fn, "__signature__", None)
    if declared is not None:  # by one that runs generated code
        kinds = (inspect.Parameter.POSITIONAL_ONLY, _BY_BOTH)
        return tuple(n for n, p in declared.parameters.items() if p.kind in kinds)
    code = _code(fn)
    if code is not None:
        return code.co_varnames[: code.co_argcount]
    # An object that can be called; what a module computes is its `forward`.
    names = ("forward", "__call__")
    methods = (getattr(fn, name, None) for name in names)
    found = next((m for m in methods if isinstance(m, MethodType)), None)
    return () if found is None else _positional(found)


_BY_BOTH: Final = inspect.Parameter.POSITIONAL_OR_KEYWORD


def declared_names(fn: object) -> tuple[str, ...]:
    """The names of all parameters, those that a call may leave out too."""
    code = _code(fn)
    if code is None:
        return ()
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def _code(fn: object) -> CodeType | None:
    return getattr(getattr(fn, "__wrapped__", fn), "__code__", None)


def input_names(fn: object, specs: Sequence[Spec]) -> list[str]:
    """Names for flat inputs of a function called with trees of these structures.

    They are the function's own: `h` for a parameter that is one tensor, `h_0`, `h_1`
    for the leaves of one that is a tree.
    """
    names: list[str] = []
    parameters = parameter_names(fn, len(specs))
    for i, (name, spec) in enumerate(zip(parameters, specs, strict=True)):
        name = name if name.isidentifier() else f"x{i}"
        count = spec.num_leaves
        names += [name] if count == 1 else [f"{name}_{k}" for k in range(count)]
    return names


def argument_texts(names: Sequence[str], specs: Sequence[Spec]) -> list[str]:
    """How a user would write each leaf of arguments of these names: `params['w']`."""
    pairs = zip(names, specs, strict=True)
    return [path for name, spec in pairs for path in leaf_paths(spec, name)]


def check_arity(
    name: str,
    f: Callable[..., Any],
    args: Sequence[Any],
    argument: str = "f",
    kwargs: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Check that a function can be called with as many arguments, and with these names.

    Raises:
        ArgumentTypeError: it cannot; `name` is the public function that would, which
            was given it as `argument`.
    """
    try:
        signature = inspect.signature(f)
    except (TypeError, ValueError):  # a builtin need not have one
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        count = len(args) + len(kwargs)
        raise ArgumentTypeError(
            f"{name}: `{argument}` ({name_of(f)}) does not take the {count} "
            f"arguments that were given: {error}. Give one for each of its parameters."
        ) from None


def closed_over(fn: object) -> dict[str, Any]:
    """The values that a function reads by names of enclosing scopes."""
    try:
        found = inspect.getclosurevars(getattr(fn, "__wrapped__", fn))  # type: ignore[arg-type]
    except TypeError:  # no function of Python's
        return {}
    return {**found.globals, **found.nonlocals}
