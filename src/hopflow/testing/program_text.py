"""Serialization of programs as text (JSON), which is safe to read from any source.

A text is validated completely before any of it can run: operations and options belong
to fixed sets, names are defined before use, and no strings other than names get into
the code.
"""

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from hopflow import pytree
from hopflow.dtypes import DType, as_dtype
from hopflow.errors import HopflowError, ProgramFormatError
from hopflow.hops.reverse_modes import Checkpoint
from hopflow.hops.while_loop import REVERSE_MODES
from hopflow.testing.program import (
    FUNCTIONS,
    OPERATORS,
    SIZE_OPERATORS,
    SPECIAL,
    Argument,
    Body,
    ComputedSize,
    Name,
    Program,
    Size,
    Statement,
    repeated_values,
)
from hopflow.testing.user_operators import UserOperator, as_user_operator
from hopflow.trace.dims import Dim

VERSION: Final = 1
LONGEST: Final = 1 << 24
"""The most characters of a text."""
LARGEST: Final = 1_000_000
"""The most elements of an argument."""
DEEPEST: Final = 64
"""The deepest nesting of parts and functions; Python itself allows a hundred."""

WORDS: Final = {
    "policy": ("nothing", "dots", "everything"),
    "reverse_mode": REVERSE_MODES,
    "side": ("left", "right"),
}
OPTIONS: Final = frozenset(
    """axes axis batch_size constant_values copy descending dilation dtype dynamic_carry
    groups include_initial k max_steps padding reverse stride until""".split()
) | frozenset(WORDS)
TOO_DEEP: Final = "its parts nest too deeply"
NAME: Final = re.compile(r"[a-z]+\d+")
RESULTS: Final = {"set": 0, "subtract_from": 0}
"""The operations without results."""


def to_text(program: Program) -> str:
    """Return a program as text, for `from_text`."""
    tree = {
        "hopflow program": VERSION,
        "exact": program.exact,
        **({"signed": True} if program.signed else {}),
        "arguments": [_argument(a) for a in program.arguments],
        "main": _body(program.main),
    }
    return json.dumps(tree, indent=1)


def _argument(a: Argument) -> dict[str, Any]:
    """Return an argument as JSON; a large one that repeats a few values has only
    those."""
    repeated = repeated_values(a.value)
    values = a.value.ravel() if repeated is None else repeated
    return {
        "name": a.name,
        "dtype": as_dtype(a.value.dtype).name,
        "shape": list(a.value.shape),
        "values": values.astype(_listed(a.value.dtype)).tolist(),
    }


def _listed(dtype: Any) -> Any:
    """Return the dtype whose elements convert exactly to Python numbers."""
    return np.float64 if as_dtype(dtype).is_float else dtype


def _body(body: Body) -> dict[str, Any]:
    return {
        "name": body.name,
        "parameters": [_part(p) for p in body.parameters],
        "statements": [_statement(s) for s in body.statements],
        "result": _part(body.result),
    }


def _statement(s: Statement) -> dict[str, Any]:
    return {
        "target": _part(s.target),
        "operation": s.operation,
        "args": [_part(a) for a in s.args],
        "options": {k: _part(v) for k, v in s.options.items()},
        "types": list(s.types),
    }


def _part(x: Any) -> Any:
    match x:
        case Name():
            return {"name": x.name}
        case Size(of, axis):
            return {"shape": of, "axis": axis}
        case ComputedSize(operator, operands):
            return {"computed": operator, "of": [_part(e) for e in operands]}
        case Body():
            return {"body": _body(x)}
        case DType():
            return {"dtype": x.name}
        case tuple():
            return {"tuple": [_part(e) for e in x]}
        case list():
            return [_part(e) for e in x]
        case dict():
            return {"dict": [[k, _part(v)] for k, v in x.items()]}
        case slice():
            return {"slice": [_part(e) for e in (x.start, x.stop, x.step)]}
        case Checkpoint(count):
            return {"checkpoint": count}
        case Dim():
            return {"dim": x.name}
    return {"ellipsis": True} if x is ... else x


# --- reading --------------------------------------------------------------------------


def from_text(text: str, operators: Sequence[Any] = ()) -> Program:
    """Read a program that `to_text` wrote.

    Args:
        operators: Your operators that the program was drawn with; see `programs`.

    Raises:
        ProgramFormatError: the text is no program, or has an operator that is missing
            in `operators`.
        ArgumentTypeError, ArgumentValueError: see `programs`.
    """
    by_name = {x.name: x for x in map(as_user_operator, operators)}
    try:
        _need(len(text) <= LONGEST, f"it has more than {LONGEST} characters")
        return _Reader(by_name).program(json.loads(text))
    except ProgramFormatError:
        raise
    except RecursionError:
        raise _wrong(TOO_DEEP) from None
    except (ValueError, TypeError, KeyError, OverflowError, HopflowError) as error:
        raise _wrong(f"{type(error).__name__}: {error}") from None


def _wrong(fault: str) -> ProgramFormatError:
    return ProgramFormatError(
        f"from_text: this is no program, because {fault}. Read a text that `to_text` "
        "wrote, and that nobody changed."
    )


def _need(holds: bool, fault: str) -> None:
    if not holds:
        raise _wrong(fault)


class _Reader:
    """Reads a program.

    used      the users' operators that it has
    visible   the names that are in scope, in the order of their definitions
    defined   all names that were defined so far
    depth     the nesting of the current part
    """

    def __init__(self, operators: Mapping[str, UserOperator]) -> None:
        self.operators = operators
        self.used: dict[str, UserOperator] = {}
        self.visible: dict[str, None] = {}
        self.defined: set[str] = set()
        self.depth = 0

    def program(self, tree: Any) -> Program:
        signed = type(tree) is dict and tree.pop("signed", False)
        _need(type(signed) is bool, "`signed` is no bool")
        _keys(tree, "hopflow program", "exact", "arguments", "main")
        _need(tree["hopflow program"] == VERSION, f"its version is not {VERSION}")
        _need(type(tree["exact"]) is bool, "`exact` is no bool")
        arguments = tuple(self.argument(a) for a in _list(tree["arguments"]))
        main = self.body(tree["main"], main=True)
        names = tuple(Name(a.name) for a in arguments)
        _need(main.parameters == names, "its parameters are not its arguments")
        return Program(arguments, main, tree["exact"], signed, self.used)

    def argument(self, tree: Any) -> Argument:
        _keys(tree, "name", "dtype", "shape", "values")
        shape = _list(tree["shape"])
        _need(all(type(n) is int and n >= 0 for n in shape), "a shape is no shape")
        _need(math.prod(shape) <= LARGEST, "an argument is too large")
        values = _list(tree["values"])
        count = math.prod(shape)
        is_repeated = 0 < len(values) < 64 and count > 200
        _need(is_repeated or len(values) == count, "values do not fit a shape")
        _need(type(tree["dtype"]) is str, "a dtype is no name")
        dtype = as_dtype(tree["dtype"])
        kind = bool if dtype.kind == "b" else float if dtype.is_float else int
        _need(all(type(v) is kind for v in values), "values do not fit a dtype")
        value = np.resize(np.array(values, dtype.dtype), shape)
        return Argument(_name(tree["name"]), value)

    def body(self, tree: Any, *, main: bool = False) -> Body:
        _keys(tree, "name", "parameters", "statements", "result")
        name = tree["name"]
        _need(name == "program" if main else name == self.new(name), "a wrong name")
        num_outer = len(self.visible)
        parameters = tuple(self.target(p) for p in _list(tree["parameters"]))
        statements = tuple(self.statement(s) for s in _list(tree["statements"]))
        result = self.part(tree["result"])
        while len(self.visible) > num_outer:
            self.visible.popitem()
        self.visible[name] = None
        return Body(name, parameters, statements, result)

    def statement(self, tree: Any) -> Statement:
        _keys(tree, "target", "operation", "args", "options", "types")
        operation = tree["operation"]
        known_operations = FUNCTIONS | OPERATORS | SPECIAL | self.operators.keys()
        _need(
            type(operation) is str and operation in known_operations,
            "it has an unknown operation (of your own ones, give `operators`)",
        )
        if operation in self.operators:
            self.used[operation] = self.operators[operation]
        args = tuple(self.part(a) for a in _list(tree["args"]))
        _need(type(tree["options"]) is dict, "options are no object")
        options = {k: self.option(k, v) for k, v in tree["options"].items()}
        num_defined = len(self.defined)
        target = self.target(tree["target"])
        types = tuple(_list(tree["types"]))
        # They are printed in comments, and must not contain code.
        typed = all(
            type(t) is str and re.fullmatch(r"\w+\[[\d, ]*\]", t) for t in types
        )
        _need(typed, "a type is no type")
        has_none = len(self.defined) == num_defined
        _need(has_none == (operation in RESULTS), "a target is missing")
        counts = {"set": 3, "get": 2, "mask": 2, "subtract_from": 2, "uniform": 2}
        _need(len(args) >= counts.get(operation, 1), "arguments are missing")
        if operation in ("checkpoint", "custom_jvp", "custom_vjp"):
            _need(isinstance(args[0], Body | Name), "a function is missing")
        if operation in self.used:
            expected = self.used[operation].functions
            kinds = tuple([isinstance(a, Body) for a in args])
            _need(kinds == expected and not options, f"a wrong call of {operation}")
        return Statement(target, operation, args, options, types)

    def option(self, name: str, tree: Any) -> Any:
        _need(name in OPTIONS, "an unknown option")
        if type(tree) is str:
            _need(tree in WORDS.get(name, ()), f"`{name}` is none of its choices")
            return tree
        return self.part(tree)

    def target(self, tree: Any) -> Any:
        """Read a tree of new names."""
        names = self.part(tree, self.new)
        leaves = pytree.flatten(names)[0]
        _need(all(isinstance(x, Name) for x in leaves), "a target is no name")
        return names

    def new(self, name: Any) -> str:
        """Define a name."""
        _need(_name(name) not in self.defined, "a name is made twice")
        self.defined.add(name)
        self.visible[name] = None
        return str(name)

    def old(self, name: Any) -> str:
        """Return a name that is in scope."""
        _need(type(name) is str and name in self.visible, "a name is not made")
        return str(name)

    def part(self, tree: Any, name: Callable[[Any], str] | None = None) -> Any:
        """Read a part of a statement; `name` checks each name in it."""
        self.depth += 1
        _need(self.depth <= DEEPEST, TOO_DEEP)
        result = self.shallow(tree, name)
        self.depth -= 1
        return result

    def shallow(self, tree: Any, name: Callable[[Any], str] | None) -> Any:
        """Read a part whose depth was checked."""
        if type(tree) is list:
            return [self.part(e, name) for e in tree]
        if type(tree) is not dict:
            _need(type(tree) in (type(None), bool, int, float), "text is no value")
            return tree
        match tree:
            case {"name": value}:
                return Name((name or self.old)(value))
            case {"tuple": parts}:
                return tuple(self.part(e, name) for e in _list(parts))
            case {"dict": pairs}:
                value = {_key(k): self.part(v, name) for k, v in _list(pairs)}
                _need(len(value) == len(pairs), "a key is there twice")
                return value
            case {"shape": of, "axis": axis}:
                _need(axis is None or type(axis) is int, "an axis is no number")
                return Size(self.old(of), axis)
            case {"computed": operator, "of": operands}:
                return self.computed(operator, operands)
            case {"body": body}:
                return self.body(body)
            case {"dtype": str(dtype)}:
                return as_dtype(dtype)
            case {"slice": [start, stop, step]}:
                ends = [self.part(e) for e in (start, stop, step)]
                kinds = (int, type(None), Size, ComputedSize)
                _need(all(type(e) in kinds for e in ends), "a wrong slice")
                return slice(*ends)
            case {"ellipsis": True}:
                return ...
            case {"checkpoint": count}:
                return Checkpoint(count)
            case {"dim": str(dim)}:
                return Dim(dim)
        raise _wrong("a part of a statement is of no known kind")

    def computed(self, operator: Any, operands: Any) -> ComputedSize:
        """Read arithmetic on lengths."""
        _need(type(operator) is str and operator in SIZE_OPERATORS, "a wrong operator")
        parts = tuple(self.part(e) for e in _list(operands))
        _need(len(parts) == (1 if operator == "floor" else 2), "operands are missing")
        for e in parts:
            is_length = isinstance(e, ComputedSize) or (
                isinstance(e, Size) and e.axis is not None
            )
            _need(is_length or type(e) in (int, float), "an operand is no length")
        return ComputedSize(operator, parts)


def _keys(tree: Any, *names: str) -> None:
    _need(isinstance(tree, Mapping) and set(tree) == set(names), f"it lacks {names}")


def _list(tree: Any) -> list[Any]:
    _need(type(tree) is list, "a list is missing")
    return list(tree)


def _name(name: Any) -> str:
    _need(type(name) is str and bool(NAME.fullmatch(name)), "a name is no name")
    return str(name)


def _key(key: Any) -> str | int:
    if type(key) is int:  # an axis
        return key
    _need(type(key) is str and key.isidentifier(), "a key is no word")
    return str(key)
