"""Source locations of operations in the user's code, and names of functions."""

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

# Memo table. The key has the id of the code, which the entry keeps alive, the
# instruction, and the id of the caller's line: hashing code, or finding its lines,
# takes time linear in its length.
_lines: dict[tuple[int, int, int], tuple[SourceLine, CodeType]] = {}
# Memo table by the path of an operator and the id of its caller's line.
_operators: dict[tuple[str, int], SourceLine] = {}
_codes: dict[SourceLine, CodeType] = {}
_literals: dict[int, frozenset[Any]] = {}  # by the id of code in `_codes`


def direct_line(depth: int = 1) -> SourceLine | None:
    """Return the calling line if it is the user's, skipping methods of tensors."""
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None and frame.f_code.co_filename in _METHODS:
        frame = frame.f_back
    if frame is None or is_own_file(frame.f_code.co_filename):
        return None
    return _line(frame)


def user_frame(depth: int = 1) -> FrameType | None:
    """Return the innermost frame that is not hopflow's."""
    frame: FrameType | None = sys._getframe(depth)
    while frame is not None and OWN_FILES[frame.f_code.co_filename]:
        frame = frame.f_back
    return frame


def user_line(depth: int = 1) -> SourceLine | None:
    """Return the user's innermost line, with its callers within the traced function
    and the operators between them; while nodes are replayed, the line of the node.
    """
    if origin.node.line is not None:
        return origin.node.line
    frame = user_frame(depth + 1)
    if frame is None:
        return None
    calls = [frame] if origin.caller is None else calls_above(frame, origin.caller)
    line = None
    for call in reversed(calls):
        line = (
            _line_of_operator(call, line)
            if isinstance(call, str)
            else _line(call, line)
        )
    return line


def user_expression(depth: int = 1) -> str:
    """Return the expression that the user's code is evaluating; "" if nodes are
    replayed, the source is unavailable, or the text is too long for a message.
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
    """Return an environment whose messages name lines of the user's code."""
    return ShapeEnv(user_line, expression=user_expression)


def source_text(line: SourceLine) -> str:
    """Return the text of a line; "" if its file cannot be read."""
    return linecache.getline(line.file, line.line).strip()


def _line(frame: FrameType, caller: SourceLine | None = None) -> SourceLine:
    """Return the line that a frame is at, memoized."""
    code = frame.f_code
    key = id(code), frame.f_lasti, id(caller)
    cached = _lines.get(key)
    if cached is not None and cached[0].caller is caller:
        return cached[0]
    if len(_lines) >= _MOST_LINES:
        for memo in (_lines, _codes, _literals, _operators):
            memo.clear()
    line = SourceLine(code.co_filename, frame.f_lineno, code.co_name, caller)
    _lines[key] = line, code
    _codes[line] = code
    return line


def _line_of_operator(path: str, caller: SourceLine | None) -> SourceLine:
    """Return the stack entry for an operator that calls a user's function, memoized."""
    key = path, id(caller)
    line = _operators.get(key)
    if line is None or line.caller is not caller:
        line = _operators[key] = SourceLine(OPERATOR_FILE, 1, path, caller)
    return line


_MOST_LINES = 1 << 14
# Python 3.14 has small integers in instructions, not among the constants.
_LOAD_SMALL_INT = dis.opmap.get("LOAD_SMALL_INT")


def literals(line: SourceLine) -> frozenset[Any]:
    """Return the number literals in the code around a line, if the code is known."""
    code = _codes.get(line)
    if code is None:
        return frozenset()
    constants = _literals.get(id(code))
    if constants is None:
        numbers = (v for v in code.co_consts if isinstance(v, int | float))
        pairs = zip(code.co_code[::2], code.co_code[1::2], strict=True)
        small = (value for opcode, value in pairs if opcode == _LOAD_SMALL_INT)
        constants = _literals[id(code)] = frozenset((*numbers, *small))
    return constants


def where(fn: object) -> str:
    """Return where a function is defined, as `model.py:41`; "" for builtins."""
    code = getattr(getattr(fn, "__wrapped__", fn), "__code__", None)
    if not isinstance(code, CodeType):
        return ""
    return f"{code.co_filename.rsplit('/', 1)[-1]}:{code.co_firstlineno}"


def name_of(fn: object) -> str:
    """Return a callable's name, for errors and graphs."""
    return getattr(fn, "__name__", type(fn).__name__)


def parameter_names(fn: object, count: int) -> list[str]:
    """Return names of `count` positional arguments: `args[2]` beyond the parameters."""
    names = _positional(fn)
    return [names[i] if i < len(names) else f"args[{i}]" for i in range(count)]


def _positional(fn: object) -> tuple[str, ...]:
    """Return the names of the positional parameters."""
    if isinstance(fn, partial):
        return _positional(fn.func)[len(fn.args) :]
    if isinstance(fn, MethodType):
        return _positional(fn.__func__)[1:]
    declared = getattr(fn, "__signature__", None)
    if declared is not None:  # set by wrappers that run generated code
        kinds = (inspect.Parameter.POSITIONAL_ONLY, _BY_BOTH)
        return tuple(n for n, p in declared.parameters.items() if p.kind in kinds)
    code = _code(fn)
    if code is not None:
        return code.co_varnames[: code.co_argcount]
    # A callable object; `__call__` of a module forwards to `forward`.
    names = ("forward", "__call__")
    methods = (getattr(fn, name, None) for name in names)
    method = next((m for m in methods if isinstance(m, MethodType)), None)
    return () if method is None else _positional(method)


_BY_BOTH: Final = inspect.Parameter.POSITIONAL_OR_KEYWORD


def declared_names(fn: object) -> tuple[str, ...]:
    """Return the names of all parameters, optional ones too."""
    code = _code(fn)
    if code is None:
        return ()
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


def _code(fn: object) -> CodeType | None:
    return getattr(getattr(fn, "__wrapped__", fn), "__code__", None)


def input_names(fn: object, specs: Sequence[Spec]) -> list[str]:
    """Return names for the flat inputs of a function, for trees of these structures.

    They follow the parameters: `h` for a parameter that is one tensor, `h_0`, `h_1` for
    the leaves of one that is a tree.
    """
    names: list[str] = []
    parameters = parameter_names(fn, len(specs))
    for i, (name, spec) in enumerate(zip(parameters, specs, strict=True)):
        name = name if name.isidentifier() else f"x{i}"
        count = spec.num_leaves
        names += [name] if count == 1 else [f"{name}_{k}" for k in range(count)]
    return names


def argument_texts(names: Sequence[str], specs: Sequence[Spec]) -> list[str]:
    """Return the user's expression for each leaf of the arguments: `params['w']`."""
    pairs = zip(names, specs, strict=True)
    return [path for name, spec in pairs for path in leaf_paths(spec, name)]


def check_arity(
    name: str,
    f: Callable[..., Any],
    args: Sequence[Any],
    argument: str = "f",
    kwargs: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Check that the signature of a function accepts these arguments.

    Args:
        name: The public function that will call `f`, for messages.
        argument: The name of the argument `f` of that function.

    Raises:
        ArgumentTypeError: the signature does not accept them.
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
    """Return the values of the globals and free variables that a function reads."""
    try:
        variables = inspect.getclosurevars(getattr(fn, "__wrapped__", fn))  # type: ignore[arg-type]
    except TypeError:  # no Python function
        return {}
    return {**variables.globals, **variables.nonlocals}
