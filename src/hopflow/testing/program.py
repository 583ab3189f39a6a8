"""Typed programs: named statements that print as Python and run in any library.

    print(program)            # a self-contained script that uses hopflow
    program.function(lib)     # the program in a library with hopflow's names

The text is the program: it is executed with `hf` as the library.
"""

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import CodeType
from typing import Any, Final, TypeAlias

import numpy as np

import hopflow
from hopflow import pytree
from hopflow.dtypes import DType, as_dtype
from hopflow.testing.user_operators import UserOperator

Tree: TypeAlias = Any
"""Names in nested tuples, lists, dicts and `None`."""

INFIX: Final = {
    "add": "+",
    "subtract": "-",
    "multiply": "*",
    "divide": "/",
    "floor_divide": "//",
    "remainder": "%",
    "pow": "**",
    "matmul": "@",
    "less": "<",
    "greater": ">",
    "equal": "==",
    "bitwise_and": "&",
    "bitwise_or": "|",
    "bitwise_xor": "^",
}

FUNCTIONS: Final = frozenset(INFIX) | frozenset(
    """abs all any argmin argsort asarray asinh astype atan atan2 bitwise_invert
    bitwise_left_shift bitwise_right_shift broadcast_to ceil concat conv copy cos cosh
    cummax cummin cumulative_prod cumulative_sum dynamic_slice dynamic_update_slice exp
    exp2 expm1 flip floor full greater_equal hypot isfinite isinf isnan less_equal log1p
    logaddexp matrix_transpose max maximum min minimum negative not_equal pad
    permute_dims positive prod repeat reshape roll round searchsorted segment_sum sign
    sin sinh sort sqrt square stack sum take_along_axis tanh tensordot tile top_k tril
    triu trunc vecdot where""".split()
)
"""The array functions, by hopflow's names."""

OPERATORS: Final = frozenset(
    """cond switch while_loop fori_loop scan map associative_scan invoke_subgraph
    checkpoint custom_jvp custom_vjp""".split()
)
"""The operators, which take functions."""

SPECIAL: Final = frozenset(["get", "mask", "set", "subtract_from", "uniform"])
"""`x[i]`; `x[mask]`; `x[i] = y`; `x[...] -= y`; random numbers from a key."""


@dataclass(frozen=True, slots=True)
class Name:
    """A value: an argument, a parameter, or the result of a statement."""

    name: str


@dataclass(frozen=True, slots=True)
class Size:
    """The shape of the value `of`, or the length of one of its axes."""

    of: str
    axis: int | None = None


SIZE_OPERATORS: Final = frozenset(["+", "-", "*", "//", "%", "**", "/", "floor"])
"""The operators of a `ComputedSize`; `floor` is unary, the others are binary."""


@dataclass(frozen=True, slots=True)
class ComputedSize:
    """Arithmetic on lengths: the operands are `ComputedSize`s, `Size`s and numbers."""

    operator: str
    operands: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Statement:
    """A call.

    target      the names of its results
    operation   one of `FUNCTIONS`, `OPERATORS`, `SPECIAL`, or a user's operator
    args        names, sizes, bodies, dtypes, numbers, slices and trees of these
    options     keyword arguments
    types       the types of the results: "f64[3, 2]"
    """

    target: Tree
    operation: str
    args: tuple[Any, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    types: tuple[str, ...] = ()


@dataclass(frozen=True)
class Body:
    """A function within a program."""

    name: str
    parameters: tuple[Tree, ...]
    statements: tuple[Statement, ...]
    result: Tree

    @cached_property
    def code(self) -> CodeType:
        """Its compiled text, cached as a program runs many times."""
        return compile("\n".join(_function(self, infix=False)), "<program>", "exec")


@dataclass(frozen=True, slots=True)
class Argument:
    """An argument of a program, with its name."""

    name: str
    value: np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Program:
    """A function with arguments.

    arguments   the arguments
    main        the function; its parameters are the names of the arguments
    exact       whether all executions must agree in every bit
    signed      whether the signs of zeros must agree, too
    operators   the user's operators by name
    """

    arguments: tuple[Argument, ...]
    main: Body
    exact: bool = False
    signed: bool = False
    operators: Mapping[str, UserOperator] = field(default_factory=dict)

    def function(self, library: Any = hopflow) -> Any:
        """Return the program as a function that uses `library`, which has hopflow's
        names; its `user_operator`, if it has one, wraps users' operators."""
        names: dict[str, Any] = {"hf": library, "math": math}
        if self.operators:
            wrap = getattr(library, "user_operator", lambda call: call)
            names |= {name: wrap(x.call) for name, x in self.operators.items()}
        exec(self.main.code, names)
        return names[self.main.name]

    def source(self, *, infix: bool = False) -> str:
        """Return the text of the function.

        Args:
            infix: Whether to write `a + b`, and types in comments, for readability.
        """
        return "\n".join(_function(self.main, infix)) + "\n"

    def script(self) -> str:
        """Return a script that runs the program compiled and in debug mode.

        It is also the text of the program, which `testing.from_text` reads.
        """
        flags = [word for word in ("exact", "signed") if getattr(self, word)]
        definitions = [f"{a.name} = {_array(a.value)}" for a in self.arguments]
        names = ", ".join(a.name for a in self.arguments)
        call = f"{self.main.name}({names})"
        function = self.source(infix=True)
        return "\n".join(
            [
                f"# A program of hopflow{': ' * bool(flags)}{', '.join(flags)}",
                *["import math", ""] * ("math." in function),
                "import numpy as np",
                "",
                "import hopflow as hf",
                *(_import(self.operators[name]) for name in sorted(self.operators)),
                "",
                *definitions,
                "",
                "",
                function,
                "",
                f"print({call})",
                "with hf.debug():",
                f"    print({call})",
                "",
            ]
        )

    def __str__(self) -> str:
        return self.script()

    def values(self) -> list[np.ndarray[Any, Any]]:
        """Return copies of the arguments."""
        return [a.value.copy() for a in self.arguments]

    @property
    def writes(self) -> bool:
        """Whether it writes to a tensor."""
        return any(s.operation in ("set", "subtract_from") for s in walk(self.main))

    @property
    def sizes_of_data(self) -> bool:
        """Whether some of its sizes are known only at run time."""
        return any(
            s.operation == "mask" or "dynamic_carry" in s.options
            for s in walk(self.main)
        )

    @property
    def operations(self) -> list[str]:
        """The operations of all statements."""
        return [s.operation for s in walk(self.main)]


def _import(operator: UserOperator) -> str:
    if operator.home is None:
        return f"# Define `{operator.name}` here: your operator `{operator}`."
    return f"from {operator.home} import {operator} as {operator.name}"


def bodies(statement: Statement) -> list[Body]:
    """Return the functions among the arguments of a statement."""
    leaves, _ = pytree.flatten((statement.args, dict(statement.options)))
    return [x for x in leaves if isinstance(x, Body)]


def repeated_values(x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any] | None:
    """Return the few values that a large array repeats; None: it does not."""
    flat = x.ravel()
    for count in range(1, 64 if flat.size > 200 else 0):
        if np.array_equal(flat[count:], flat[:-count]):
            return flat[:count]
    return None


def walk(body: Body) -> Iterator[Statement]:
    """Yield the statements of a function and of its inner functions."""
    for statement in body.statements:
        for inner in bodies(statement):
            yield from walk(inner)
        yield statement


# --- text -----------------------------------------------------------------------------


def _function(body: Body, infix: bool) -> list[str]:
    names = [_parameter(body, k) for k in range(len(body.parameters))]
    lines = [f"def {body.name}({', '.join(names)}):"]
    inner = []
    for name, tree in zip(names, body.parameters, strict=True):
        if not isinstance(tree, Name):
            inner += _unpack(name, tree)
    for statement in body.statements:
        for function in bodies(statement):
            inner += _function(function, infix)
        inner += _statement(statement, infix)
    last = body.statements[-1].target if body.statements else None
    if isinstance(last, Name) and last == body.result:
        inner.append(f"return {inner.pop().removeprefix(f'{last.name} = ')}")
    else:
        inner.append(f"return {expression(body.result)}")
    return [*lines, *textwrap.indent("\n".join(inner), "    ").split("\n")]


def _parameter(body: Body, k: int) -> str:
    tree = body.parameters[k]
    return tree.name if isinstance(tree, Name) else f"{body.name}_{k}"


def _unpack(name: str, tree: Tree) -> list[str]:
    """Return assignments of the leaves of the value `name` to the names in a tree."""
    if isinstance(tree, tuple) and all(isinstance(t, Name | None) for t in tree):
        return [f"{_pattern(tree)} = {name}"] if tree else []
    leaves, spec = pytree.flatten(tree)
    paths = pytree.leaf_paths(spec, name)
    return [f"{t.name} = {path}" for path, t in zip(paths, leaves, strict=True)]


def _pattern(tree: Sequence[Name | None]) -> str:
    names = ["_" if t is None else t.name for t in tree]
    return ", ".join(names) + ("," if len(names) == 1 else "")


def _statement(s: Statement, infix: bool) -> list[str]:
    comment = f"  # {', '.join(s.types)}" if infix and s.types else ""
    args = [expression(a) for a in s.args]
    if s.operation == "set":
        return [f"{args[0]}[{_index(s.args[1])}] = {args[2]}"]
    if s.operation == "subtract_from":
        return [f"{args[0]}[...] -= {args[1]}"]
    lines, value = _call(s, args, infix)
    if isinstance(s.target, Name):
        return [*lines, f"{s.target.name} = {value}{comment}"]
    if isinstance(s.target, tuple) and all(
        isinstance(t, Name | None) for t in s.target
    ):
        return [*lines, f"{_pattern(s.target)} = {value}{comment}"]
    whole = "result_of_" + str(pytree.flatten(s.target)[0][0].name)
    return [*lines, f"{whole} = {value}{comment}", *_unpack(whole, s.target)]


def _call(s: Statement, args: list[str], infix: bool) -> tuple[list[str], str]:
    """Return the call of a statement, and the lines before it."""
    options = [f"{k}={expression(v)}" for k, v in s.options.items()]
    function, *rest = args or [""]
    match s.operation:
        case "get" | "mask":
            return [], f"{function}[{_index(s.args[1])}]"
        case "uniform":
            key = f"hf.random.fold_in(hf.random.key(7), {function})"
            return [], f"hf.random.uniform({key}, {rest[0]}, dtype=hf.float64)"
        case "checkpoint":
            wrapped = f"hf.checkpoint({', '.join([function, *options])})"
            return [], f"{wrapped}({', '.join(rest)})"
        case "custom_jvp":
            rule = f"lambda primals, tangents: hf.jvp({function}, primals, tangents)"
            lines = [f"own_{function} = hf.custom_jvp({function})"]
            lines += [f"own_{function}.defjvp({rule})"]
            return lines, f"own_{function}({', '.join(rest)})"
        case "custom_vjp":
            forward = f"lambda *xs: ({function}(*xs), xs)"
            backward = f"lambda xs, cts: hf.vjp({function}, *xs)[1](cts)"
            lines = [f"own_{function} = hf.custom_vjp({function})"]
            lines += [f"own_{function}.defvjp({forward}, {backward})"]
            return lines, f"own_{function}({', '.join(rest)})"
    if s.operation not in FUNCTIONS | OPERATORS:  # a user's operator
        return [], f"{s.operation}({', '.join(args)})"
    if infix and _reads_as_infix(s):
        return [], f" {INFIX[s.operation]} ".join(args)
    return [], f"hf.{s.operation}({', '.join([*args, *options])})"


def _reads_as_infix(s: Statement) -> bool:
    """Whether `a + b` is the same call: not for two Python numbers, and `-2 ** x` is
    `-(2 ** x)`."""
    if s.operation not in INFIX or len(s.args) != 2:
        return False
    is_value = [isinstance(a, Name) for a in s.args]
    return is_value[0] or (is_value[1] and s.operation != "pow")


def expression(x: Any) -> str:
    """Return a part of a statement as Python code."""
    match x:
        case Name():
            return x.name
        case Size(of, None):
            return f"{of}.shape"
        case Size(of, axis):
            return f"{of}.shape[{axis}]"
        case ComputedSize("floor", (operand,)):
            return f"math.floor({expression(operand)})"
        case ComputedSize(operator, (left, right)):
            return f"({expression(left)} {operator} {expression(right)})"
        case Body():
            return x.name
        case DType():
            return f"hf.{'bool' if x.kind == 'b' else x.name}"
        case hopflow.Checkpoint(count):
            return f"hf.Checkpoint({count})"
        case hopflow.Dim():
            return f"hf.Dim({x.name!r})"
        case tuple():
            inner = ", ".join(map(expression, x))
            return f"({inner},)" if len(x) == 1 else f"({inner})"
        case list():
            return f"[{', '.join(map(expression, x))}]"
        case dict():
            return f"{{{', '.join(f'{k!r}: {expression(v)}' for k, v in x.items())}}}"
        case float() if not math.isfinite(x):
            return f"float('{x}')"
    return repr(x)


def _index(index: Any) -> str:
    entries = index if isinstance(index, tuple) else (index,)
    return ", ".join(map(_entry, entries)) or "()"


def _entry(i: Any) -> str:
    match i:
        case slice():
            step = f":{i.step}" if i.step is not None else ""
            ends = ("" if e is None else expression(e) for e in (i.start, i.stop))
            return ":".join(ends) + step
        case _ if i is ...:
            return "..."
    return expression(i)


def _array(x: np.ndarray[Any, Any]) -> str:
    dtype = as_dtype(x.dtype)
    is_bfloat16 = dtype.name == "bfloat16"  # NumPy cannot parse its name
    wide = x.astype(np.float64) if is_bfloat16 else x
    repeated = repeated_values(wide)
    values = str((wide if repeated is None else repeated).tolist())
    values = values.replace("nan", "np.nan").replace("inf", "np.inf")
    shape = f".reshape{x.shape}" if x.size == 0 and x.ndim > 1 else ""
    code = f'np.array({values}, "{"float64" if is_bfloat16 else dtype.name}"){shape}'
    if repeated is not None:
        code = f"np.resize({code}, {x.shape})"
    return f"hf.asarray({code}{', dtype=hf.bfloat16' if is_bfloat16 else ''})"
