"""Scalar expressions as nodes, each on whole tensors, which ONNX broadcasts.

What an elementwise operation means is the expression that its record lowers to
(`loop_ir.expr`), functions such as `expm1` included, which `loop_ir.math` expands into
arithmetic. So an operation needs no rule of its own here; one that ONNX has, and
onnxruntime computes as well, is that operator (`NATIVE`).

ONNX has no fused multiply-add. One of float32 is computed in float64, where the product
is exact. One of float64 is exact up to the last rounding where it must be, as in the
error of a product, and two rounded operations where it only saves one, as in
polynomials.
"""

from collections.abc import Callable
from typing import Final, TypeAlias

from hopflow import dtypes
from hopflow.dtypes import DType, iinfo
from hopflow.errors import ExportError
from hopflow.export.onnx.kernels import has_kernel
from hopflow.export.onnx.scopes import Scope, Value
from hopflow.loop_ir.expr import MATH, Expr
from hopflow.loop_ir.math import expand

Leaf: TypeAlias = Callable[[Expr], Value]
Rule: TypeAlias = Callable[..., Value]

_UNSIGNED: Final = {d.bits: d for d in dtypes.UNSIGNED}
_SIGNED: Final = {d.bits: d for d in dtypes.SIGNED}

NATIVE: Final = {
    "exp": "Exp",
    "log": "Log",
    "sin": "Sin",
    "cos": "Cos",
    "tan": "Tan",
    "asin": "Asin",
    "acos": "Acos",
    "atan": "Atan",
    "sinh": "Sinh",
    "cosh": "Cosh",
    "asinh": "Asinh",
    "acosh": "Acosh",
    "atanh": "Atanh",
    "tanh": "Tanh",
    "erf": "Erf",
    "pow": "Pow",
}
"""The functions that ONNX has; those of dtypes without a kernel are expanded."""


def evaluate(
    scope: Scope, expression: Expr, leaf: Leaf, memo: dict[Expr, Value] | None = None
) -> Value:
    """The value of an expression on tensors.

    Args:
        leaf: The value of what the expression reads: a variable, an element, a size.
        memo: The values of expressions so far, for others that share parts with it.

    Raises:
        ExportError: ONNX has nothing for an operation of it.
    """
    memo = {} if memo is None else memo

    def visit(node: Expr) -> Value:
        known = memo.get(node)
        if known is None:
            known = memo[node] = compute(node)
        return known

    def compute(node: Expr) -> Value:
        if node.op == "const":
            return scope.constant(node.attr, node.dtype)
        if node.op in ("var", "element", "load", "size"):
            return leaf(node)
        if node.op in MATH:
            return function(node)
        if node.op == "fma":
            return _fma(scope, node, visit)
        args = [visit(a) for a in node.args]
        if node.op == "cast":
            return converted(scope, args[0], node.dtype)
        if node.op == "bitcast":
            return scope.bitcast(args[0], node.dtype)
        rule = _RULES.get(node.op)
        if rule is None:
            raise ExportError(f"ONNX has nothing for `{node.op}` of {node.dtype}.")
        return rule(scope, *args)

    def function(node: Expr) -> Value:
        name = NATIVE.get(node.op)
        if node.op == "fmod":
            return scope("Mod", *map(visit, node.args), fmod=1)
        if name is not None and has_kernel(name, node.dtype):
            return scope(name, *map(visit, node.args))
        return visit(expand(node.op, *node.args))

    return visit(expression)


# --- operations -----------------------------------------------------------------------


def _plain(operator: str, of_bool: str = "") -> Rule:
    """An operator of ONNX; of bools another one."""

    def rule(scope: Scope, *args: Value) -> Value:
        is_bool = args[0].dtype is dtypes.bool_
        return scope(of_bool if is_bool and of_bool else operator, *args)

    return rule


def _negated(scope: Scope, x: Value) -> Value:
    if x.dtype.kind != "u":
        return scope("Neg", x)
    return scope("Sub", scope.constant(0, x.dtype), x)


def _inverted(scope: Scope, x: Value) -> Value:
    return scope("Not" if x.dtype is dtypes.bool_ else "BitwiseNot", x)


def _truncated(scope: Scope, x: Value) -> Value:
    is_negative = scope("Less", x, scope.constant(0, x.dtype))
    return scope("Where", is_negative, scope("Ceil", x), scope("Floor", x))


def is_negative(scope: Scope, x: Value) -> Value:
    """Whether the sign bit of a float is set."""
    bits = scope.bitcast(x, _SIGNED[x.dtype.bits])
    return scope("Less", bits, scope.constant(0, bits.dtype))


def _with_sign(scope: Scope, x: Value, sign: Value) -> Value:
    size = scope("Abs", x)
    return scope("Where", is_negative(scope, sign), scope("Neg", size), size)


def _shifted(direction: str, *, signed: bool) -> Rule:
    """A shift of the bits as those of a signed or of an unsigned integer."""

    def rule(scope: Scope, x: Value, amount: Value) -> Value:
        dtype = (_SIGNED if signed else _UNSIGNED)[x.dtype.bits]
        bits, by = scope.bitcast(x, dtype), scope.bitcast(amount, dtype)
        found = scope("BitShift", bits, by, direction=direction)
        return scope.bitcast(found, x.dtype)

    return rule


def _remainder(scope: Scope, x: Value, y: Value) -> Value:
    return scope("Mod", x, y, fmod=1)


def _different(scope: Scope, x: Value, y: Value) -> Value:
    return scope("Not", scope("Equal", x, y))


def _compared(operator: str) -> Rule:
    """A comparison; of bools that of 0 and 1."""

    def rule(scope: Scope, *args: Value) -> Value:
        if args[0].dtype is dtypes.bool_:
            args = tuple([scope.cast(a, dtypes.uint8) for a in args])
        return scope(operator, *args)

    return rule


def _bit_count(scope: Scope, x: Value) -> Value:
    """The number of bits that are 1, by sums of neighbours (H. S. Warren, "Hacker's
    Delight", section 5-1)."""
    dtype = _UNSIGNED[x.dtype.bits]
    bits = scope.bitcast(x, dtype)

    def shifted(value: Value, by: int) -> Value:
        return scope("BitShift", value, scope.constant(by, dtype), direction="RIGHT")

    width = 1
    while width < dtype.bits:
        mask = sum(((1 << width) - 1) << at for at in range(0, dtype.bits, 2 * width))
        kept = scope.constant(mask, dtype)
        low, high = scope("BitwiseAnd", bits, kept), shifted(bits, width)
        bits = scope("Add", low, scope("BitwiseAnd", high, kept))
        width *= 2
    return scope.bitcast(bits, x.dtype)


def _leading_zeros(scope: Scope, x: Value) -> Value:
    """The number of bits above the highest one: those that are 0 once each bit below
    the highest is 1."""
    dtype = _UNSIGNED[x.dtype.bits]
    bits, by = scope.bitcast(x, dtype), 1
    while by < dtype.bits:
        amount = scope.constant(by, dtype)
        lower = scope("BitShift", bits, amount, direction="RIGHT")
        bits, by = scope("BitwiseOr", bits, lower), 2 * by
    return _bit_count(scope, scope.bitcast(scope("BitwiseNot", bits), x.dtype))


_RULES: Final[dict[str, Rule]] = {
    "neg": _negated,
    "abs": _plain("Abs"),
    "not": _inverted,
    "sqrt": _plain("Sqrt"),
    "floor": _plain("Floor"),
    "ceil": _plain("Ceil"),
    "trunc": _truncated,
    "rint": _plain("Round"),
    "popcount": _bit_count,
    "clz": _leading_zeros,
    "isnan": _plain("IsNaN"),
    "add": _plain("Add", of_bool="Or"),
    "sub": _plain("Sub", of_bool="Xor"),
    "mul": _plain("Mul", of_bool="And"),
    "div": _plain("Div"),
    "rem": _remainder,
    "min": _plain("Min", of_bool="And"),
    "max": _plain("Max", of_bool="Or"),
    "and": _plain("BitwiseAnd", of_bool="And"),
    "or": _plain("BitwiseOr", of_bool="Or"),
    "xor": _plain("BitwiseXor", of_bool="Xor"),
    "shl": _shifted("LEFT", signed=False),
    "lshr": _shifted("RIGHT", signed=False),
    "ashr": _shifted("RIGHT", signed=True),
    "copysign": _with_sign,
    "eq": _plain("Equal"),
    "ne": _different,
    "lt": _compared("Less"),
    "le": _compared("LessOrEqual"),
    "gt": _compared("Greater"),
    "ge": _compared("GreaterOrEqual"),
    "select": _plain("Where"),
}


# --- conversions ----------------------------------------------------------------------


def converted(scope: Scope, x: Value, dtype: DType) -> Value:
    """`x` as another dtype, as `hf.astype` converts: to an integer from a float what
    is out of range saturates, and NaN is 0."""
    if x.dtype is dtype:
        return x
    if not (x.dtype.is_float and dtype.is_integer):
        return scope.cast(x, dtype)
    if x.dtype.bits == 16:
        x = scope.cast(x, dtypes.float32)
    info = iinfo(dtype)
    # The first float above the range is a power of two, which every float has.
    above = float(info.max + 1)
    is_above = scope("GreaterOrEqual", x, scope.constant(above, x.dtype))
    is_below = scope("LessOrEqual", x, scope.constant(float(info.min), x.dtype))
    outside = scope("Or", scope("Or", is_above, is_below), scope("IsNaN", x))
    inside = scope("Where", outside, scope.constant(0, x.dtype), x)
    found = scope.cast(inside, dtype)
    ends = ((is_above, info.max), (is_below, info.min))
    for test, end in ends:
        found = scope("Where", test, scope.constant(end, dtype), found)
    return found


# --- fused multiply-add ---------------------------------------------------------------

_SPLIT: Final = 2.0**27 + 1


def _fma(scope: Scope, node: Expr, visit: Callable[[Expr], Value]) -> Value:
    x, y, z = map(visit, node.args)
    if node.dtype is not dtypes.float64:
        wide = [scope.cast(v, dtypes.float64) for v in (x, y, z)]
        total = scope("Add", scope("Mul", *wide[:2]), wide[2])
        return scope.cast(total, node.dtype)
    product = scope("Mul", x, y)
    plain = scope("Add", product, z)
    if _is_term_of_polynomial(node.args[2]):
        return plain
    lost = _error_of_product(scope, x, y, product)
    # The sum of product and z is `plain` and `rest`, exactly (D. Knuth).
    part = scope("Sub", plain, product)
    first = scope("Sub", product, scope("Sub", plain, part))
    rest = scope("Add", first, scope("Sub", z, part))
    missing = scope("Add", rest, lost)
    # Halves of what is close to the largest float overflow.
    is_lost = scope("IsNaN", scope("Sub", missing, missing))
    return scope("Where", is_lost, plain, scope("Add", plain, missing))


def _is_term_of_polynomial(z: Expr) -> bool:
    return z.op in ("const", "fma")


def _error_of_product(scope: Scope, x: Value, y: Value, product: Value) -> Value:
    """`x * y - product`, exactly, by halves of 26 bits (T. Dekker, 1971)."""

    def halves(v: Value) -> tuple[Value, Value]:
        scaled = scope("Mul", v, scope.constant(_SPLIT, dtypes.float64))
        high = scope("Sub", scaled, scope("Sub", scaled, v))
        return high, scope("Sub", v, high)

    (x1, x0), (y1, y0) = halves(x), halves(y)
    rest = scope("Sub", scope("Mul", x1, y1), product)
    for pair in ((x1, y0), (x0, y1), (x0, y0)):
        rest = scope("Add", rest, scope("Mul", *pair))
    return rest
