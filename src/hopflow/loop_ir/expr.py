"""Scalar expressions: the arithmetic inside kernels, with the variables and buffers
that they read. Each node is one machine operation.

An expression is a DAG of `Expr`. The constructors fold constants and drop neutral
elements, so that index arithmetic of unrolled loops becomes constants. They check
dtypes: both operands of a binary operation have the same one, so every cast is
explicit.

Operations follow IEEE 754 for floats, and two's complement with wrap-around for
integers. Division and remainder of integers truncate; their operands must not trap
(`ops` adds the checks and the `INT_MIN / -1` select).
"""

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, Literal, TypeAlias

import numpy as np

from hopflow import dtypes
from hopflow.dtypes import DType
from hopflow.symbolic.size import Size


class Expr:
    """A scalar value: `op` applied to `args`, of type `dtype`.

    `attr` is what the op needs beside its operands: the Python number of a "const", the
    `Var` of a "var", the `Size` of a "size", the `Buffer` of a "load", the operand of
    an "element". The schedule replaces all "size" and "element" nodes. The args of a
    "load" or an "element" are one i64 index for each axis, followed by a bool if the
    read is conditional: where it is false no memory is read, and a load gives 0.
    """

    __slots__ = ("args", "attr", "dtype", "op")

    def __init__(
        self, op: str, args: tuple["Expr", ...], dtype: DType, attr: Any = None
    ) -> None:
        self.op, self.args, self.dtype, self.attr = op, args, dtype, attr

    def __repr__(self) -> str:
        if self.op == "const":
            return f"{self.attr}:{self.dtype}"
        if self.op == "var":
            return str(self.attr.name)
        if self.op in ("load", "element"):
            name, condition = getattr(self.attr, "name", "x"), condition_of(self)
            text = f"{name}[{', '.join(map(repr, index_of(self)))}]"
            return text if condition is None else f"({text} if {condition!r})"
        return f"{self.op}({', '.join(map(repr, self.args))})"

    @property
    def is_const(self) -> bool:
        return self.op == "const"


Space: TypeAlias = Literal["input", "output", "arena", "constant", "shared"]
"""The origin of a buffer's memory: the caller (read or written), the program's own
arena, read-only data of the program, or (on a GPU) memory shared by a block."""


@dataclass(eq=False, slots=True)
class Var:
    """A scalar variable, whose name is unique within its program."""

    name: str
    dtype: DType


@dataclass(eq=False, slots=True)
class Buffer:
    """A row-major array, dense unless it has `strides` (in elements).

    `shape` and `strides` are i64 expressions over constants and the program's `sizes`;
    those of a buffer with an `Allocate`, over the variables in scope there. `data`
    holds the values of a "constant" buffer.
    """

    name: str
    dtype: DType
    shape: tuple[Expr, ...]
    space: Space
    strides: tuple[Expr, ...] | None = None
    data: np.ndarray[Any, np.dtype[Any]] | None = None


Index = tuple[Expr, ...]

# Operations by arity. `loop_ir.math` expands those in MATH into the others.
UNARY: Final = frozenset(
    "neg abs not sqrt floor ceil trunc rint popcount clz isnan".split()
)
BINARY: Final = frozenset(
    "add sub mul div rem min max and or xor shl lshr ashr copysign".split()
)
COMPARE: Final = frozenset("eq ne lt le gt ge add_overflows mul_overflows".split())
"""Comparisons of two operands, which give a bool. `add_overflows` and `mul_overflows`
tell whether the sum or product of signed integers wraps around."""
MATH: Final = frozenset(
    (
        "exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan sinh cosh tanh "
        "asinh acosh atanh erf erfc erfinv lgamma logistic cbrt pow atan2 hypot fmod "
        "pow_nearest nextafter ipow"
    ).split()
)
"""Functions of floats, but for `ipow`, the power of integers."""
MATH_BINARY: Final = frozenset(
    "pow pow_nearest atan2 hypot fmod nextafter ipow".split()
)


def const(value: bool | int | float, dtype: DType) -> Expr:
    """Return the constant `value`, rounded or wrapped to `dtype`."""
    if dtype.kind == "b":
        return Expr("const", (), dtype, bool(value))
    if dtype.kind == "f":
        rounded = float(value)
        if dtype is not dtypes.float64 and math.isfinite(rounded):
            with np.errstate(over="ignore"):
                rounded = float(np.asarray(rounded, np.float64).astype(dtype.dtype))
        return Expr("const", (), dtype, rounded)
    return Expr("const", (), dtype, _wrap(int(value), dtype))


def _wrap(value: int, dtype: DType) -> int:
    value &= (1 << dtype.bits) - 1
    if dtype.kind == "i" and value >> (dtype.bits - 1):
        value -= 1 << dtype.bits
    return value


@lru_cache(1 << 10, typed=True)
def index(value: int) -> Expr:
    """Return the i64 constant `value`, as used in indices."""
    return Expr("const", (), dtypes.int64, value)


def extent(size: Size) -> Expr:
    """Return a size as an i64 expression. A symbolic size is a "size" node, which the
    schedule replaces by arithmetic on the program's size parameters."""
    if isinstance(size, int):
        return index(size)
    return Expr("size", (), dtypes.int64, size)


def read(var: Var) -> Expr:
    """Return the current value of a variable."""
    return Expr("var", (), var.dtype, var)


def load(
    buffer: Buffer, indices: Sequence[Expr], condition: Expr | None = None
) -> Expr:
    """Return `buffer[indices]`, one i64 index for each axis; 0 if `condition` is
    false."""
    at = tuple(indices)
    return _read("load", at, condition, buffer.dtype, buffer)


def element(
    operand: Any, dtype: DType, at: Index, condition: Expr | None = None
) -> Expr:
    """Return `operand[at]`, whether the operand is stored or computed on demand. Where
    `condition` is false, the value must not be used."""
    return _read("element", at, condition, dtype, operand)


def _read(
    op: str, at: Index, condition: Expr | None, dtype: DType, source: Any
) -> Expr:
    if condition is None or (condition.is_const and condition.attr):
        return Expr(op, at, dtype, source)
    if condition.is_const:
        return const(0, dtype)
    return Expr(op, (*at, condition), dtype, source)


def condition_of(node: Expr) -> Expr | None:
    """Return the condition of a "load" or an "element", or None."""
    last = node.args[-1] if node.args else None
    return last if last is not None and last.dtype is dtypes.bool_ else None


def index_of(node: Expr) -> Index:
    """Return the index of a "load" or an "element"."""
    return node.args if condition_of(node) is None else node.args[:-1]


def _same(name: str, x: Expr, y: Expr) -> None:
    if x.dtype is not y.dtype:
        raise TypeError(f"loop_ir `{name}` of {x.dtype} and {y.dtype}: {x!r}, {y!r}")


_FOLD_INT: Final[dict[str, Callable[[int, int], int]]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "min": min,
    "max": max,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
}
_FOLD_FLOAT: Final[dict[str, Callable[[float, float], float]]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
}
_SHIFTS: Final[dict[str, Callable[[int, int], int]]] = {
    "shl": operator.lshift,
    "lshr": operator.rshift,
    "ashr": operator.rshift,
}
_FOLD_COMPARE: Final[dict[str, Callable[[Any, Any], bool]]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
    "le": operator.le,
    "gt": operator.gt,
    "ge": operator.ge,
}


_NEUTRAL_RIGHT: Final = {"add": 0, "sub": 0, "mul": 1, "or": 0, "xor": 0, "shl": 0}
_NEUTRAL_LEFT: Final = {"add": 0, "mul": 1, "or": 0, "xor": 0}


def binary(name: str, x: Expr, y: Expr) -> Expr:
    """Return `x name y`, for a name in BINARY.

    Of constants, integers and sums, differences and products of floats fold: those are
    exact in float64, or rounded there once.
    """
    _same(name, x, y)
    if x.dtype.kind in "iub":
        folded = _fold_integer(name, x, y)
        if folded is not None:
            return folded
    elif x.is_const and y.is_const and name in _FOLD_FLOAT:
        return const(_FOLD_FLOAT[name](x.attr, y.attr), x.dtype)
    return Expr(name, (x, y), x.dtype)


def _fold_integer(name: str, x: Expr, y: Expr) -> Expr | None:
    if x.is_const and y.is_const:
        if name in _FOLD_INT:
            return const(_FOLD_INT[name](x.attr, y.attr), x.dtype)
        if name in ("div", "rem") and y.attr != 0:
            quotient = abs(x.attr) // abs(y.attr)
            quotient = quotient if (x.attr < 0) == (y.attr < 0) else -quotient
            value = quotient if name == "div" else x.attr - quotient * y.attr
            return const(value, x.dtype)
        if name in _SHIFTS and 0 <= y.attr < x.dtype.bits:
            bits = x.attr if name != "lshr" else x.attr & ((1 << x.dtype.bits) - 1)
            return const(_SHIFTS[name](bits, y.attr), x.dtype)
        return None
    if y.is_const:
        if _NEUTRAL_RIGHT.get(name, ...) == y.attr and x.dtype.kind != "b":
            return x
        if name == "mul" and y.attr == 0:
            return y
        if name == "div" and y.attr == 1:
            return x
        if name in ("add", "sub") and x.op == "add" and x.args[1].is_const:
            inner = binary(name, x.args[1], y)
            return binary("add", x.args[0], inner)
    elif x.is_const:
        if _NEUTRAL_LEFT.get(name, ...) == x.attr and x.dtype.kind != "b":
            return y
        if name == "mul" and x.attr == 0:
            return x
        if name in ("add", "mul"):  # constants move right, where they fold with others
            return binary(name, y, x)
    if x.dtype.kind == "b" and name in ("and", "or"):
        for side, other in ((x, y), (y, x)):
            if side.is_const:
                return other if bool(side.attr) is (name == "and") else side
    return None


def add(x: Expr, y: Expr) -> Expr:
    return binary("add", x, y)


def sub(x: Expr, y: Expr) -> Expr:
    return binary("sub", x, y)


def mul(x: Expr, y: Expr) -> Expr:
    return binary("mul", x, y)


def div(x: Expr, y: Expr) -> Expr:
    return binary("div", x, y)


def unary(name: str, x: Expr) -> Expr:
    """Return `name(x)`, for a name in UNARY; "isnan" gives a bool."""
    if name == "not" and x.is_const and x.dtype.kind == "b":
        return const(not x.attr, x.dtype)
    if name == "neg" and x.is_const:
        return const(-x.attr, x.dtype)
    return Expr(name, (x,), dtypes.bool_ if name == "isnan" else x.dtype)


def fma(x: Expr, y: Expr, z: Expr) -> Expr:
    """Return `x * y + z` of floats, rounded once."""
    return Expr("fma", (x, y, z), x.dtype)


def compare(name: str, x: Expr, y: Expr) -> Expr:
    """Return a comparison, a bool. With a NaN it is false, except for "ne"."""
    _same(name, x, y)
    if x.is_const and y.is_const and name in _FOLD_COMPARE:
        return const(_FOLD_COMPARE[name](x.attr, y.attr), dtypes.bool_)
    return Expr(name, (x, y), dtypes.bool_)


def select(test: Expr, x: Expr, y: Expr) -> Expr:
    """Return `x if test else y`; both are evaluated, so neither may trap."""
    _same("select", x, y)
    if test.is_const:
        return x if test.attr else y
    if x.op == "load" and condition_of(x) is test and _is_zero(y):
        return x
    if x.op == "select" and x.args[0] is test:
        x = x.args[1]
    if y.op == "select" and y.args[0].op == "not" and y.args[0].args[0] is test:
        y = y.args[1]
    return x if x is y else Expr("select", (test, x, y), x.dtype)


def _is_zero(x: Expr) -> bool:
    """Return whether `x` is a constant whose bits are all 0."""
    return x.is_const and x.attr == 0 and math.copysign(1.0, x.attr) > 0


def cast(x: Expr, dtype: DType) -> Expr:
    """Return `x` converted: to nearest even for floats, saturating from float to
    integer (NaN gives 0), wrapping between integers, `x != 0` to bool."""
    if x.dtype is dtype:
        return x
    if x.is_const and (x.dtype.kind != "f" or dtype.kind == "f"):
        return const(x.attr, dtype)
    if dtype.kind == "b":
        return compare("ne", x, const(0, x.dtype))
    return Expr("cast", (x,), dtype)


def bitcast(x: Expr, dtype: DType) -> Expr:
    """Return the bits of `x` as `dtype`, which has the same width."""
    if x.is_const and x.dtype.is_integer and dtype.is_integer:
        return const(x.attr, dtype)
    return x if x.dtype is dtype else Expr("bitcast", (x,), dtype)


def call(name: str, *args: Expr) -> Expr:
    """Return a function in MATH, one node until `loop_ir.math` expands it; or a power
    by a constant as a few operations (see `_POWERS`)."""
    x, *others = args
    if name == "pow" and others[0].is_const and others[0].attr in _POWERS:
        return _POWERS[others[0].attr](x)
    return Expr(name, args, x.dtype)


def _square(x: Expr) -> Expr:
    return mul(x, x)


def _root(x: Expr) -> Expr:
    """Return x ** 0.5. Unlike sqrt, it is 0 for -0, and infinite for -inf."""
    infinity = const(math.inf, x.dtype)
    is_least = compare("eq", x, const(-math.inf, x.dtype))
    return select(is_least, infinity, unary("sqrt", add(x, const(0.0, x.dtype))))


def _reciprocal(x: Expr) -> Expr:
    return div(const(1.0, x.dtype), x)


_POWERS: Final[dict[float, Callable[[Expr], Expr]]] = {
    1.0: lambda x: x,
    2.0: _square,
    3.0: lambda x: mul(_square(x), x),
    4.0: lambda x: _square(_square(x)),
    0.5: _root,
    1.5: lambda x: mul(unary("abs", x), _root(x)),
    -0.5: lambda x: _reciprocal(_root(x)),
    -1.0: _reciprocal,
}
"""Powers by constants that take a few operations, each rounded to nearest: the error is
at most 1.5 units in the last place."""


def all_of(tests: Sequence[Expr]) -> Expr:
    """Return the conjunction of `tests`; true if there are none."""
    result = const(True, dtypes.bool_)
    for test in tests:
        result = binary("and", result, test)
    return result


def floor_div(x: Expr, y: Expr) -> Expr:
    """Return the integer quotient, rounded to minus infinity; `y` is not 0."""
    if x.is_const and y.is_const:
        return const(x.attr // y.attr, x.dtype)
    if y.is_const and y.attr == 1:
        return x
    if x.dtype.kind == "u":
        return binary("div", x, y)
    if y.is_const and y.attr > 0:
        if y.attr & (y.attr - 1) == 0:
            return binary("ashr", x, const(y.attr.bit_length() - 1, x.dtype))
        below = compare("lt", binary("rem", x, y), const(0, x.dtype))
        return sub(binary("div", x, y), cast(below, x.dtype))
    return sub(_truncated(x, y), cast(_rounds_up(x, y), x.dtype))


def floor_mod(x: Expr, y: Expr) -> Expr:
    """Return the integer remainder with the sign of `y`, which is not 0."""
    if x.is_const and y.is_const:
        return const(x.attr % y.attr, x.dtype)
    if x.dtype.kind == "u":
        return binary("rem", x, y)
    if y.is_const and y.attr > 0:
        if y.attr & (y.attr - 1) == 0:
            return binary("and", x, const(y.attr - 1, x.dtype))
        rest = binary("rem", x, y)
        return select(compare("lt", rest, const(0, x.dtype)), add(rest, y), rest)
    remainder = sub(x, mul(_truncated(x, y), y))
    return select(_rounds_up(x, y), add(remainder, y), remainder)


def _truncated(x: Expr, y: Expr) -> Expr:
    """Return `x / y` truncated; `INT_MIN / -1` wraps instead of trapping."""
    if y.is_const and y.attr != -1:
        return binary("div", x, y)
    minus_one = compare("eq", y, const(-1, y.dtype))
    safe = select(minus_one, const(1, y.dtype), y)
    return select(minus_one, unary("neg", x), binary("div", x, safe))


def _rounds_up(x: Expr, y: Expr) -> Expr:
    """Return whether truncation of `x / y` rounds to plus infinity."""
    zero = const(0, x.dtype)
    remainder = sub(x, mul(_truncated(x, y), y))
    signs = compare("ne", compare("lt", remainder, zero), compare("lt", y, zero))
    return binary("and", compare("ne", remainder, zero), signs)


def wrap_index(position: Expr, extent: Expr) -> Expr:
    """Return a position that counts from the end if it is negative, as in Python."""
    return select(compare("lt", position, index(0)), add(position, extent), position)


def with_args(node: Expr, args: tuple[Expr, ...]) -> Expr:
    """Return `node` with other operands, folded as by its constructor."""
    if args == node.args:  # nodes compare by identity
        return node
    op = node.op
    if op in BINARY:
        return binary(op, *args)
    if op == "select":
        return select(*args)
    if op in _FOLD_COMPARE:
        return compare(op, *args)
    if op == "cast":
        return cast(args[0], node.dtype)
    if op == "bitcast":
        return bitcast(args[0], node.dtype)
    if op in ("not", "neg"):
        return unary(op, *args)
    if op == "pow":
        return call(op, *args)
    if op in ("load", "element") and condition_of(node) is not None:
        return _read(op, args[:-1], args[-1], node.dtype, node.attr)
    return Expr(op, args, node.dtype, node.attr)


def rewrite(expr: Expr, leaf: Callable[[Expr], Expr | None]) -> Expr:
    """Return `expr` with each node for which `leaf` returns another one replaced.
    Shared nodes are visited once."""
    if not expr.args:  # a constant or a variable, as most are
        return leaf(expr) or expr
    memo: dict[Expr, Expr] = {}

    def visit(node: Expr) -> Expr:
        rewritten = memo.get(node)
        if rewritten is not None:
            return rewritten
        new = leaf(node)
        if new is None:
            args = tuple([visit(a) for a in node.args])
            same = args == node.args
            new = node if same else Expr(node.op, args, node.dtype, node.attr)
        memo[node] = new
        return new

    return visit(expr)
