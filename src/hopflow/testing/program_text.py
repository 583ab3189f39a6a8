"""Programs as text, which is safe to read from any source.

The text of a program is its script. It is parsed, and never run, by `from_text`:
operations and options belong to fixed sets, names are defined before use, and the
program must print as the text that was read, so that a text has no other parts.
"""

import ast
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final, TypeAlias

import numpy as np

from hopflow import pytree
from hopflow.dtypes import as_dtype
from hopflow.errors import HopflowError, ProgramFormatError
from hopflow.hops.reverse_modes import Checkpoint
from hopflow.hops.while_loop import REVERSE_MODES
from hopflow.testing.program import (
    FUNCTIONS,
    INFIX,
    OPERATORS,
    Argument,
    Body,
    ComputedSize,
    Name,
    Program,
    Size,
    Statement,
    Tree,
)
from hopflow.testing.user_operators import UserOperator, as_user_operator
from hopflow.trace.dims import Dim

Node: TypeAlias = Any
"""A node of a syntax tree, of any type: what it lacks is an error of the text."""

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
BINARY: Final[dict[type[ast.AST], str]] = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Div: "/",
    ast.FloorDiv: "//",
    ast.Mod: "%",
    ast.Pow: "**",
    ast.MatMult: "@",
    ast.Lt: "<",
    ast.Gt: ">",
    ast.Eq: "==",
    ast.BitAnd: "&",
    ast.BitOr: "|",
    ast.BitXor: "^",
}
OPERATIONS: Final = {symbol: name for name, symbol in INFIX.items()}
LENGTHS: Final = ("+", "-", "*", "//", "%", "**", "/")
"""The binary operators of sizes."""
RULES: Final = {"defjvp": "custom_jvp", "defvjp": "custom_vjp"}
TYPES: Final = re.compile(r"  # (\w+\[[\d, ]*\](?:, \w+\[[\d, ]*\])*)")
CALLS: Final = (ast.BinOp, ast.Call, ast.Compare, ast.Subscript)
"""What stands on the right-hand side of a statement, and is no part of a result."""
CONSTANTS: Final = (type(None), bool, int, float, type(...))
NAME: Final = re.compile(r"[a-z]+\d+")
WHOLE: Final = "result_of_"
"""What begins the name of a result that is a tree."""


def to_text(program: Program) -> str:
    """Return a program as text, for `from_text`: its script."""
    return program.script()


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
        program = _Reader(text, by_name).program(ast.parse(text))
        printed = program.script()
    except ProgramFormatError:
        raise
    except (RecursionError, MemoryError):
        raise _wrong("its parts nest too deeply") from None
    except (
        *(SyntaxError, ValueError, TypeError, KeyError, OverflowError),
        *(AttributeError, IndexError, HopflowError),
    ) as error:
        raise _wrong(f"{type(error).__name__}: {error}") from None
    pairs = zip(printed.split("\n"), text.split("\n"), strict=False)
    for k, (expected, found) in enumerate(pairs):
        _need(expected == found, f"line {k + 1} must be {expected[:200]!r}")
    _need(printed == text, "its end is not that of a script")
    return program


def _wrong(fault: str) -> ProgramFormatError:
    return ProgramFormatError(
        f"from_text: this is no program, because {fault}. Read a text that `to_text` "
        "wrote, and that nobody changed."
    )


def _need(holds: bool, fault: str) -> None:
    if not holds:
        raise _wrong(fault)


class _Reader:
    """Reads the syntax tree of a script.

    Parts that it skips, such as imports, are those that all scripts have: the caller
    compares the script of the program that is read with the text.

    lines       the lines of the text, of which comments are read
    used        the users' operators that it has
    visible     the names that are in scope, in the order of their definitions
    defined     all names that were defined so far
    functions   the functions that no statement has used so far, by name
    custom      the rule of a function with one, and the function, by name
    depth       the nesting of the current part
    """

    def __init__(self, text: str, operators: Mapping[str, UserOperator]) -> None:
        self.lines = text.split("\n")
        self.operators = operators
        self.used: dict[str, UserOperator] = {}
        self.visible: dict[str, None] = {}
        self.defined: set[str] = set()
        self.functions: dict[str, Body] = {}
        self.custom: dict[str, tuple[str, Body | Name]] = {}
        self.depth = 0

    def program(self, module: Node) -> Program:
        flags = re.findall(r"\w+", self.lines[0].removeprefix("# A program of hopflow"))
        nodes = {type(node): node for node in module.body}
        assignments = [n for n in module.body if isinstance(n, ast.Assign)]
        arguments = tuple(self.argument(n) for n in assignments)
        _need(ast.FunctionDef in nodes, "it has no function `program`")
        main = self.body(nodes[ast.FunctionDef], main=True)
        return Program(
            arguments, main, "exact" in flags, "signed" in flags, dict(self.used)
        )

    # Arguments.

    def argument(self, node: Node) -> Argument:
        """Read `x0 = hf.asarray(np.array([1, 2], "int64"))`."""
        [target], call = node.targets, _call(node.value, "asarray")
        options = {k.arg: k.value for k in call.keywords}
        array = self.array(call.args[0])
        if "dtype" in options:
            array = array.astype(as_dtype(self.dtype(options["dtype"])).dtype)
        return Argument(_name(_id(target)), array)

    def array(self, node: Node) -> np.ndarray[Any, Any]:
        """Read `np.array(...)`, reshaped if it is empty, or repeated."""
        call = _call(node, "array", "resize", "reshape")
        if call.func.attr == "array":
            values, dtype = call.args
            return _array(_literal(values), as_dtype(ast.literal_eval(dtype)))
        repeats = call.func.attr == "resize"
        inner = call.args[0] if repeats else call.func.value
        parts = call.args[1].elts if repeats else call.args
        shape = tuple(ast.literal_eval(n) for n in parts)
        is_shape = all(type(n) is int and n >= 0 for n in shape)
        _need(is_shape, "a shape is no shape")
        _need(math.prod(shape) <= LARGEST, "an argument is too large")
        array = self.array(inner)
        return np.resize(array, shape) if repeats else array.reshape(shape)

    # Functions.

    def body(self, node: Node, *, main: bool = False) -> Body:
        rest = list(node.body)
        last = rest.pop()
        _need(isinstance(last, ast.Return), "a function has no result")
        _need(not main or node.name == "program", "it has no function `program`")
        with self.scope("" if main else node.name):
            parameters = tuple(
                self.unpacked(rest, a.arg)
                if a.arg == f"{node.name}_{k}"
                else Name(self.new(a.arg))
                for k, a in enumerate(node.args.args)
            )
            statements = [*self.statements(rest)]
            if isinstance(last.value, CALLS):  # the last statement, without its name
                operation, args, options = self.call(last.value)
                result = Name(self.new(f"r{last.lineno}"))
                types = self.types(last)
                statements.append(Statement(result, operation, args, options, types))
            else:
                result = self.part(last.value)
        return Body(node.name, parameters, tuple(statements), result)

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Forget the names that are defined in the function `name`, which has a name
        itself behind it, unless it is the program."""
        count, functions = len(self.visible), self.functions
        self.functions = {}
        with self.nested():
            yield
        while len(self.visible) > count:
            self.visible.popitem()
        self.functions = functions
        if name:
            self.new(name)

    def unpacked(self, rest: list[Node], root: str) -> Tree:
        """Read the tree of names that the next statements assign from parts of the
        value `root`, and remove these statements."""
        parts: dict[Any, Any] = {}
        while rest and (path := _path(rest[0], root)) is not None:
            [target] = rest.pop(0).targets
            if not path:
                return self.target(target)
            inner = parts
            for key in path[:-1]:
                inner = inner.setdefault(key, {})
            inner[path[-1]] = self.target(target)
        return _tree(parts)

    # Statements.

    def statements(self, rest: list[Node]) -> Iterator[Statement]:
        """Read and remove statements."""
        while rest:
            node = rest.pop(0)
            match node:
                case ast.FunctionDef():
                    self.functions[node.name] = self.body(node)
                case ast.Expr(ast.Call(ast.Attribute(ast.Name(name), rule))):
                    _need(name in self.custom and rule in RULES, "a rule of nothing")
                case ast.Assign(
                    [ast.Name(name)], ast.Call(ast.Attribute(_, rule), [f])
                ) if rule in RULES.values():
                    self.custom[name] = rule, self.function(f)
                case ast.Assign([ast.Subscript(x, index)], value):
                    row = self.part(x), self.index(index), self.part(value)
                    yield Statement(None, "set", row)
                case ast.AugAssign(ast.Subscript(x), ast.Sub(), value):
                    pair = self.part(x), self.part(value)
                    yield Statement(None, "subtract_from", pair)
                case ast.Assign([target], value):
                    operation, args, options = self.call(value)
                    root = target.id if isinstance(target, ast.Name) else ""
                    is_tree = root.startswith(WHOLE)
                    names = (
                        self.unpacked(rest, root) if is_tree else self.target(target)
                    )
                    types = self.types(node)
                    yield Statement(names, operation, args, options, types)
                case _:
                    raise _wrong(f"line {node.lineno} is no statement of a program")

    def types(self, node: Node) -> tuple[str, ...]:
        """Read the types in the comment behind a statement."""
        line = self.lines[(node.end_lineno or 1) - 1].encode()
        comment = line[node.end_col_offset :].decode()
        found = TYPES.fullmatch(comment)
        return tuple(re.findall(r"\w+\[[\d, ]*\]", found[1])) if found else ()

    def call(self, node: Node) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
        """Read the right-hand side of a statement: operation, arguments, options."""
        match node:
            case ast.BinOp(left, symbol, right) | ast.Compare(left, [symbol], [right]):
                operation = OPERATIONS[BINARY[type(symbol)]]
                return operation, (self.part(left), self.part(right)), {}
            case ast.Subscript(x, ast.Name() as mask):
                return "mask", (self.part(x), self.part(mask)), {}
            case ast.Subscript(x, index):
                entries = self.index(index)
                whole = entries if isinstance(entries, tuple) else (entries,)
                return "get", (self.part(x), whole), {}
            case ast.Call(ast.Attribute(ast.Attribute(_, "random"), "uniform"), inputs):
                number, shape = _call(inputs[0], "fold_in").args[1], inputs[1]
                return "uniform", (self.part(number), self.part(shape)), {}
            case ast.Call(ast.Call(ast.Attribute(_, "checkpoint")) as wrapped, inputs):
                f = self.function(wrapped.args[0])
                options = self.options(wrapped.keywords)
                return "checkpoint", (f, *map(self.part, inputs)), options
            case ast.Call(ast.Name(name), inputs) if name in self.custom:
                rule, f = self.custom.pop(name)
                return rule, (f, *map(self.part, inputs)), {}
            case ast.Call(ast.Name(name), inputs):
                return name, self.operands(name, inputs), {}
        call = _call(node, *FUNCTIONS, *OPERATORS)
        args = tuple(map(self.part, call.args))
        return call.func.attr, args, self.options(call.keywords)

    def operands(self, name: str, nodes: Sequence[Node]) -> tuple[Any, ...]:
        """Read the arguments of a user's operator."""
        known = name in self.operators
        _need(known, "it has an unknown operation (of your own ones, give `operators`)")
        self.used[name] = self.operators[name]
        args = tuple(self.part(a) for a in nodes)
        kinds = tuple(isinstance(a, Body) for a in args)
        _need(kinds == self.used[name].functions, f"a wrong call of {name}")
        return args

    def options(self, keywords: Sequence[Node]) -> dict[str, Any]:
        return {str(k.arg): self.option(str(k.arg), k.value) for k in keywords}

    def option(self, name: str, node: Node) -> Any:
        _need(name in OPTIONS, "an unknown option")
        if isinstance(node, ast.Constant) and type(node.value) is str:
            known = node.value in WORDS.get(name, ())
            _need(known, f"`{name}` is none of its choices")
            return node.value
        return self.part(node)

    def target(self, node: Node) -> Tree:
        """Read a new name, or a tuple of these, with `None` for `_`."""
        if isinstance(node, ast.Tuple):
            _need(bool(node.elts), "a target is missing")
            names = [_id(e) for e in node.elts]
            return tuple(None if x == "_" else Name(self.new(x)) for x in names)
        return Name(self.new(_id(node)))

    def new(self, name: str) -> str:
        """Define a name."""
        _need(_name(name) not in self.defined, "a name is made twice")
        self.defined.add(name)
        self.visible[name] = None
        return name

    # Parts of statements.

    @contextmanager
    def nested(self) -> Iterator[None]:
        self.depth += 1
        _need(self.depth <= DEEPEST, "its parts nest too deeply")
        yield
        self.depth -= 1

    def function(self, node: Node) -> Body | Name:
        function: Body | Name = self.part(node)
        _need(isinstance(function, Body | Name), "a function is missing")
        return function

    def index(self, node: Node) -> Any:
        """Read the index of `x[index]`."""
        if isinstance(node, ast.Tuple):
            return tuple(self.entry(e) for e in node.elts)
        return self.entry(node)

    def entry(self, node: Node) -> Any:
        if isinstance(node, ast.Slice):
            ends = (node.lower, node.upper, node.step)
            return slice(*(None if e is None else self.part(e) for e in ends))
        return self.part(node)

    def part(self, node: Node) -> Any:
        """Read a part of a statement."""
        with self.nested():
            return self.shallow(node)

    def shallow(self, node: Node) -> Any:
        """Read a part whose depth was checked."""
        match node:
            case ast.Constant(value) if type(value) in CONSTANTS:
                return value
            case ast.UnaryOp(ast.USub()):
                return ast.literal_eval(node)
            case ast.Name(name) if name in self.functions:
                return self.functions.pop(name)
            case ast.Name(name):
                return Name(self.old(name))
            case ast.Tuple(parts):
                return tuple(self.part(e) for e in parts)
            case ast.List(parts):
                return [self.part(e) for e in parts]
            case ast.Dict(keys, values):
                words = [_key(k) for k in keys]
                return dict(zip(words, map(self.part, values), strict=True))
            case ast.Attribute(ast.Name("hf")):
                return as_dtype(self.dtype(node))
            case ast.Attribute(ast.Name(of), "shape"):
                return Size(self.old(of))
            case ast.Subscript(ast.Attribute(ast.Name(of), "shape"), axis):
                return Size(self.old(of), ast.literal_eval(axis))
            case ast.BinOp(left, symbol, right):
                operator = BINARY[type(symbol)]
                _need(operator in LENGTHS, "a wrong operator")
                return ComputedSize(operator, (self.length(left), self.length(right)))
            case ast.Call(ast.Attribute(ast.Name("math"), "floor"), [operand]):
                return ComputedSize("floor", (self.length(operand),))
            case ast.Call(ast.Name("float"), [word]):
                return float(ast.literal_eval(word))
            case ast.Call(ast.Attribute(_, "Checkpoint"), [count]):
                return Checkpoint(ast.literal_eval(count))
            case ast.Call(ast.Attribute(_, "Dim"), [name]):
                return Dim(ast.literal_eval(name))
        raise _wrong("a part of a statement is of no known kind")

    def length(self, node: Node) -> Any:
        """Read an operand of arithmetic on lengths."""
        part = self.part(node)
        is_length = isinstance(part, ComputedSize) or (
            isinstance(part, Size) and part.axis is not None
        )
        _need(is_length or type(part) in (int, float), "an operand is no length")
        return part

    def dtype(self, node: Node) -> str:
        _need(isinstance(node, ast.Attribute), "a dtype is no name")
        return str(node.attr)

    def old(self, name: str) -> str:
        """Return a name that is in scope."""
        _need(name in self.visible, "a name is not made")
        return name


def _call(node: Node, *names: str) -> Any:
    """Return a call of an attribute with one of these names."""
    is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
    _need(is_call and node.func.attr in names, "it has an unknown operation")
    return node


def _path(node: Node, root: str) -> list[Any] | None:
    """Return the keys `[0, "a"]` of `v1 = root[0]['a']`; None: it is no such part."""
    value = node.value if isinstance(node, ast.Assign) else None
    keys: list[Any] = []
    while isinstance(value, ast.Subscript):
        keys.append(getattr(value.slice, "value", None))
        value = value.value
    is_part = isinstance(value, ast.Name) and value.id == root
    return keys[::-1] if is_part else None


def _tree(parts: Any) -> Tree:
    """Return nested dicts of parts by key as a tree: those by number as tuples."""
    if not isinstance(parts, dict):
        return parts
    inner = {k: _tree(v) for k, v in parts.items()}
    if any(isinstance(k, str) for k in inner):
        return inner
    return tuple(inner.get(k) for k in range(max(inner, default=-1) + 1))


def _literal(node: Node) -> Any:
    """Return nested lists of numbers, of which some are not finite."""
    match node:
        case ast.List(parts):
            return [_literal(e) for e in parts]
        case ast.UnaryOp(ast.USub(), inner):
            return -_literal(inner)
        case ast.Attribute(ast.Name("np"), "nan" | "inf" as word):
            return float(word)
    return ast.literal_eval(node)


def _array(values: Any, dtype: Any) -> np.ndarray[Any, Any]:
    leaves, _ = pytree.flatten(values)
    _need(len(leaves) <= LARGEST, "an argument is too large")
    kind = bool if dtype.kind == "b" else float if dtype.is_float else int
    _need(all(type(v) is kind for v in leaves), "values do not fit a dtype")
    return np.array(values, dtype.dtype)


def _id(node: Node) -> str:
    _need(isinstance(node, ast.Name), "a target is missing")
    return str(node.id)


def _name(name: str) -> str:
    _need(bool(NAME.fullmatch(name)), "a name is no name")
    return name


def _key(node: Node) -> str | int:
    key = ast.literal_eval(node)
    if type(key) is int:  # an axis
        return key
    _need(type(key) is str and key.isidentifier(), "a key is no word")
    return str(key)
