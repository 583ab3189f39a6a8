"""Operations of the Loop IR on registers, most of which are one instruction.

Every function takes registers or constants of `width` lanes and returns one.
"""

import re
import struct
from functools import cache
from math import copysign, frexp, inf, isnan, nan
from typing import Final

from hopflow import dtypes
from hopflow.compiler.llvm.module import RARE, Function, Module
from hopflow.compiler.llvm.types import (
    NARROW_FLOATS,
    constant,
    lanes,
    literal,
    memory_type,
    overload,
    register_type,
    splat,
)
from hopflow.dtypes import DType
from hopflow.loop_ir.expr import COMPARE

_FLOAT: Final = {
    "add": "fadd",
    "sub": "fsub",
    "mul": "fmul",
    "div": "fdiv",
    "rem": "frem",
}
_SIGNED: Final = {"div": "sdiv", "rem": "srem"}
_UNSIGNED: Final = {"div": "udiv", "rem": "urem"}
_BOOL: Final = {"min": "and", "mul": "and", "max": "or", "add": "or", "sub": "xor"}
_FLOAT_CALL: Final = {
    "abs": "llvm.fabs",
    "sqrt": "llvm.sqrt",
    "floor": "llvm.floor",
    "ceil": "llvm.ceil",
    "trunc": "llvm.trunc",
    "rint": "llvm.rint",
    "copysign": "llvm.copysign",
    "fma": "llvm.fma",
}
_ARITY: Final = {"copysign": 2, "fma": 3}
_FLOAT_TEST: Final = {
    "eq": "oeq",
    "ne": "une",
    "lt": "olt",
    "le": "ole",
    "gt": "ogt",
    "ge": "oge",
}
_LITERAL: Final = re.compile(r"\b0x([0-9a-f]{16})\b")
_OVERFLOWS: Final = {"add_overflows": "sadd", "mul_overflows": "smul"}
_ALL: Final = (1 << 64) - 1
_HALF: Final = (1 << 32) - 1
_ROUNDING: Final = frozenset("add sub mul div rem sqrt fma".split())
"""Operations whose exact result a narrow float may be unable to represent."""


def operation(f: Function, op: str, dtype: DType, width: int, args: list[str]) -> str:
    """Emit `op` on operands of `dtype`, for "select" that of its two values."""
    if width > 1 and op in _SIGNED and dtype.kind in "iu":
        is_constant = not args[1].startswith("%")
        if not is_constant:
            divided = _divided if dtype.bits <= 32 else _divided_wide
            return divided(f, op, dtype, width, args)
        if dtype.bits == 64 and is_constant:
            divisor = _integer(args[1])
            if dtype.kind == "i":
                divisor = _signed(divisor)
            if abs(divisor) & (abs(divisor) - 1):  # else LLVM shifts
                return _divided_by_constant(f, op, dtype, width, args[0], divisor)
    simple = _instruction(op, dtype, width)
    if simple is not None:
        template, declaration = simple
        if declaration is not None:
            f.module.declare(declaration)
        result = f.emit(template % tuple(args))
        if dtype in NARROW_FLOATS and op in _ROUNDING:
            return round_narrow(f, result, dtype, width)
        return result
    if op == "abs":  # an unsigned integer
        return args[0]
    if op in ("min", "max"):
        return _extremum(f, op, dtype, width, args)
    if op in _OVERFLOWS:
        return _overflows(f, _OVERFLOWS[op], register_type(dtype), width, args)
    return _shift(f, op, dtype, width, args)


@cache
def _instruction(op: str, dtype: DType, width: int) -> tuple[str, str | None] | None:
    """Return the template of the instruction for `op`, and what it declares.

    It is None if `op` takes several instructions.
    """
    t = register_type(dtype, width)
    kind = dtype.kind
    if op in _OVERFLOWS:
        return None
    if op in COMPARE:
        return _comparison(op, kind, t), None
    if op == "isnan":
        return f"fcmp uno {t} %s, {constant(0, dtype, width)}", None
    if op == "select":
        return f"select {lanes('i1', width)} %s, {t} %s, {t} %s", None
    if kind == "f":
        if op in _FLOAT:
            return f"{_FLOAT[op]} {t} %s, %s", None
        if op == "neg":
            return f"fneg {t} %s", None
        if op in _FLOAT_CALL:
            scalar = register_type(dtype)
            return _call(_FLOAT_CALL[op], scalar, width, _ARITY.get(op, 1))
        return None
    return _integer_instruction(op, dtype, width, t)


def _extremum(f: Function, op: str, dtype: DType, width: int, args: list[str]) -> str:
    """Emit the minimum or maximum of floats: NaN if either is; -0 is less than 0.

    LLVM would sort the operands by their signs, which on x86 takes scalars through
    other registers. There, `x > y ? x : y` is one instruction, which returns y if one
    is NaN, or both are zeros. In both orders it finds the two zeros, whose bits give
    the result; other equal numbers have equal bits.
    """
    t, tests = register_type(dtype, width), lanes("i1", width)
    name, test, bits = ("max", "ogt", "and") if op == "max" else ("min", "olt", "or")
    if f.module.has_extrema:
        scalar = register_type(dtype)
        template, declaration = _call(f"llvm.{name}imum", scalar, width, 2)
        f.module.declare(declaration)
        return f.emit(template % tuple(args))

    def one(x: str, y: str) -> str:
        first = f.emit(f"fcmp {test} {t} {x}, {y}")
        return f.emit(f"select {tests} {first}, {t} {x}, {t} {y}")

    x, y = args if args[0].startswith("%") else args[::-1]
    if (value := _number(y)) is not None:
        is_greatest_zero = op == "max" and value == 0 and copysign(1, value) > 0
        is_least_zero = op == "min" and value == 0 and copysign(1, value) < 0
        if is_greatest_zero:  # which turns -0 into itself when it is added
            return f.emit(f"fadd {t} {one(y, x)}, {y}")
        if not is_least_zero:
            return one(y, x)
    integers = lanes(f"i{64 if dtype is dtypes.float64 else 32}", width)
    both = [f.emit(f"bitcast {t} {z} to {integers}") for z in (one(x, y), one(y, x))]
    number = f.emit(f"{bits} {integers} {both[0]}, {both[1]}")
    result = f.emit(f"bitcast {integers} {number} to {t}")
    unordered = f.emit(f"fcmp uno {t} {x}, {y}")
    nan = f.emit(f"fadd {t} {x}, {y}")
    return f.emit(f"select {tests} {unordered}, {t} {nan}, {t} {result}")


def extremum_of_lanes(f: Function, op: str, dtype: DType, width: int, x: str) -> str:
    """Emit the minimum or maximum of the lanes of floats, as for two of them.

    Bits that have those below the sign inverted if it is set are integers in the order
    of the numbers: one instruction for each two parts of a vector, in place of five.
    """
    t, scalar = register_type(dtype, width), register_type(dtype)
    bits = 64 if dtype is dtypes.float64 else 32

    def ordered(value: str, integer: str, width: int) -> str:
        sign, below = (
            splat(f"i{bits}", str(n), width) for n in (bits - 1, 2 ** (bits - 1) - 1)
        )
        signs = f.emit(f"ashr {integer} {value}, {sign}")
        inverted = f.emit(f"and {integer} {signs}, {below}")
        return f.emit(f"xor {integer} {value}, {inverted}")

    integers = lanes(f"i{bits}", width)
    keys = ordered(f.emit(f"bitcast {t} {x} to {integers}"), integers, width)
    name = f"i{bits} @llvm.vector.reduce.s{op}.v{width}i{bits}"
    f.module.declare(f"{name}({integers})")
    key = f.emit(f"call {name}({integers} {keys})")
    number = f.emit(f"bitcast i{bits} {ordered(key, f'i{bits}', 1)} to {scalar}")
    unordered = any_lane(f, f.emit(f"fcmp uno {t} {x}, {x}"), width)
    return f.emit(
        f"select i1 {unordered}, {scalar} {literal(nan, dtype)}, {scalar} {number}"
    )


def _number(register: str) -> float | None:
    """Return the value of a constant of `literal` or `splat`, unless it is NaN."""
    found = None if register.startswith("%") else _LITERAL.search(register)
    if found is None:
        return None
    [value] = struct.unpack(">d", bytes.fromhex(found[1]))
    return None if isnan(value) else value


def _integer_instruction(
    op: str, dtype: DType, width: int, t: str
) -> tuple[str, str | None] | None:
    if dtype.kind == "b":
        op = _BOOL.get(op, op)
    if op in ("add", "sub", "mul", "and", "or", "xor"):
        return f"{op} {t} %s, %s", None
    if op in ("div", "rem"):
        return f"{(_SIGNED if dtype.kind == 'i' else _UNSIGNED)[op]} {t} %s, %s", None
    if op == "neg":
        return f"sub {t} {constant(0, dtype, width)}, %s", None
    if op == "not":
        ones = True if dtype.kind == "b" else -1
        return f"xor {t} %s, {constant(ones, dtype, width)}", None
    scalar = register_type(dtype)
    if op in ("min", "max"):
        sign = "s" if dtype.kind == "i" else "u"
        return _call(f"llvm.{sign}{op}", scalar, width, 2)
    if op == "popcount":
        return _call("llvm.ctpop", scalar, width, 1)
    if op == "clz":
        return _call("llvm.ctlz", scalar, width, 1, ", i1 false", ", i1")
    if op == "abs" and dtype.kind == "i":
        return _call("llvm.abs", scalar, width, 1, ", i1 false", ", i1")
    return None


def _comparison(op: str, kind: str, t: str) -> str:
    if kind == "f":
        return f"fcmp {_FLOAT_TEST[op]} {t} %s, %s"
    sign = "" if op in ("eq", "ne") else "s" if kind == "i" else "u"
    return f"icmp {sign}{op} {t} %s, %s"


def _call(
    name: str, scalar: str, width: int, arity: int, extra: str = "", types: str = ""
) -> tuple[str, str]:
    t = lanes(scalar, width)
    full = name + overload(scalar, width)
    args = ", ".join([f"{t} %s"] * arity)
    return (
        f"call {t} @{full}({args}{extra})",
        f"{t} @{full}({', '.join([t] * arity)}{types})",
    )


# --- operations of several instructions -----------------------------------------------


def _divided(f: Function, op: str, dtype: DType, width: int, args: list[str]) -> str:
    """Emit the quotient or the remainder of integers, which no vector unit divides.

    The floats have at least twice the bits of the integers. A quotient that is no
    integer is therefore farther from one than rounding can move it.

    `freeze` keeps LLVM from taking the minimum of a quotient and what it finds to be 0
    for a conversion that saturates at 0 bits, of which there are no integers: it aborts
    the process.
    """
    t = register_type(dtype, width)
    wide = lanes("double" if dtype.bits > 16 else "float", width)
    sign = "s" if dtype.kind == "i" else "u"
    x, y = (f.emit(f"{sign}itofp {t} {a} to {wide}") for a in args)
    ratio = f.emit(f"fdiv {wide} {x}, {y}")
    quotient = f.emit(f"fpto{sign}i {wide} {ratio} to {t}")
    quotient = f.emit(f"freeze {t} {quotient}")
    if op == "div":
        return quotient
    product = f.emit(f"mul {t} {quotient}, {args[1]}")
    return f.emit(f"sub {t} {args[0]}, {product}")


def _divided_wide(
    f: Function, op: str, dtype: DType, width: int, args: list[str]
) -> str:
    """Emit the quotient or the remainder of 64-bit integers, which no vector unit
    divides. Nearly all have few bits, and are divided as float64: see `_divided`."""
    name, t = f"hf.{op}.{dtype.short}.{width}", lanes("i64", width)
    if not f.module.has_function(name):
        f.module.define(name, _division(f.module, name, op, dtype, width))
    return f.emit(f"call {t} @{name}({t} {args[0]}, {t} {args[1]})")


_SMALL: Final = 1 << 51
"""Integers of less than this magnitude are divided as float64."""
_MAGIC: Final = 0x4338 << 48
"""The bits of 1.5 * 2**52, a float64 whose last bit is worth 1: an integer of less than
52 bits that is added to it is added to its bits."""


def _division(module: Module, name: str, op: str, dtype: DType, width: int) -> str:
    """Return a function of vectors `%x` and `%y` of 64-bit integers."""
    t, wide = lanes("i64", width), lanes("double", width)
    signature = f"internal {t} @{name}({t} %x, {t} %y)"
    f = Function(module, signature, module.inlined(name))

    def integer(value: int) -> str:
        return constant(value, dtypes.int64, width)

    magic = constant(1.5 * 2**52, dtypes.float64, width)

    def to_float(x: str) -> str:
        bits = f.emit(f"add {t} {x}, {integer(_MAGIC)}")
        moved = f.emit(f"bitcast {t} {bits} to {wide}")
        return f.emit(f"fsub {wide} {moved}, {magic}")

    def to_integer(x: str) -> str:
        moved = f.emit(f"fadd {wide} {x}, {magic}")
        bits = f.emit(f"bitcast {wide} {moved} to {t}")
        return f.emit(f"sub {t} {bits}, {integer(_MAGIC)}")

    x, y, most = "%x", "%y", _SMALL
    if dtype.kind == "i":
        x, y = (f.emit(f"add {t} {a}, {integer(_SMALL)}") for a in (x, y))
        most = 2 * _SMALL
    either = f.emit(f"or {t} {x}, {y}")
    large = any_lane(f, f.emit(f"icmp ugt {t} {either}, {integer(most - 1)}"), width)
    f.branch_if(large, "large", "small", RARE)
    f.start("large")
    signed = _SIGNED if dtype.kind == "i" else _UNSIGNED
    full = f.emit(f"{signed[op]} {t} %x, %y")
    f.branch("end")
    f.start("small")
    x, y = to_float("%x"), to_float("%y")
    ratio = f.emit(f"fdiv {wide} {x}, {y}")
    quotient = operation(f, "trunc", dtypes.float64, width, [ratio])
    if op == "rem":  # the product is exact, too
        product = f.emit(f"fmul {wide} {quotient}, {y}")
        quotient = f.emit(f"fsub {wide} {x}, {product}")
    result = to_integer(quotient)
    f.branch("end")
    f.start("end")
    chosen = f.emit(f"phi {t} [ {full}, %large ], [ {result}, %small ]")
    f.do(f"ret {t} {chosen}")
    return f.text


def any_lane(f: Function, test: str, width: int) -> str:
    """Return whether a test holds in any lane."""
    if width == 1:
        return test
    mask = lanes("i1", width)
    any_ = f"i1 @llvm.vector.reduce.or.v{width}i1"
    f.module.declare(f"{any_}({mask})")
    return f.emit(f"call {any_}({mask} {test})")


def integer_power(f: Function, dtype: DType, width: int, args: list[str]) -> str:
    """Emit the power of integers, whose exponents are not negative; it wraps."""
    name, t = f"hf.ipow.{dtype.short}.{width}", register_type(dtype, width)
    if not f.module.has_function(name):
        f.module.define(name, _squaring(f.module, name, dtype, width))
    return f.emit(f"call {t} @{name}({t} {args[0]}, {t} {args[1]})")


def _squaring(module: Module, name: str, dtype: DType, width: int) -> str:
    """Return a function of `%x` and `%y`, with a step for each bit of the largest
    exponent."""
    t = register_type(dtype, width)
    one, zero = (constant(value, dtype, width) for value in (1, 0))
    f = Function(module, f"internal {t} @{name}({t} %x, {t} %y)", "noinline nounwind")
    f.branch("step")
    f.start("step")
    for value, start in (("base", "%x"), ("exponent", "%y"), ("power", one)):
        f.do(f"%{value} = phi {t} [ {start}, %entry ], [ %next.{value}, %step ]")
    bit = f.emit(f"and {t} %exponent, {one}")
    is_odd = f.emit(f"icmp ne {t} {bit}, {zero}")
    product = f.emit(f"mul {t} %power, %base")
    test = f"{lanes('i1', width)} {is_odd}"
    f.do(f"%next.power = select {test}, {t} {product}, {t} %power")
    f.do(f"%next.base = mul {t} %base, %base")
    f.do(f"%next.exponent = lshr {t} %exponent, {one}")
    again = f.emit(f"icmp ne {t} %next.exponent, {zero}")
    f.branch_if(any_lane(f, again, width), "step", "end")
    f.start("end")
    f.do(f"ret {t} %next.power")
    return f.text


def float_remainder(f: Function, dtype: DType, width: int, args: list[str]) -> str:
    """Emit C's `fmod` of float32 or float64, which is exact."""
    divisor = _number(args[1])
    if divisor and abs(frexp(divisor)[0]) == 0.5:  # LLVM truncates an exact quotient
        return operation(f, "rem", dtype, width, args)
    name, t = f"hf.rem.{dtype.short}.{width}", register_type(dtype, width)
    if not f.module.has_function(name):
        f.module.define(name, _float_division(f.module, name, dtype, width))
    return f.emit(f"call {t} @{name}({t} {args[0]}, {t} {args[1]})")


def _float_division(module: Module, name: str, dtype: DType, width: int) -> str:
    """Return a function of `%x` and `%y`.

    A scalar `x` of less than `y` is the remainder itself: loops that keep an angle or a
    position within a period have mostly such. A quotient of less than 2**52, or of
    2**28 for float32, is at most rounded up to the next integer. The remainder is then
    a float, also the negative one of a quotient that was rounded up. For float32 the
    product is one of float64, and exact, too.
    """
    t, wide = register_type(dtype, width), register_type(dtypes.float64, width)
    is_double = dtype is dtypes.float64
    f = Function(module, f"internal {t} @{name}({t} %x, {t} %y)", module.inlined(name))

    def number(value: float) -> str:
        return constant(value, dtypes.float64, width)

    def call(op: str, *args: str) -> str:
        return operation(f, op, dtypes.float64, width, list(args))

    x, y = "%x", "%y"
    if not is_double:
        x, y = (f.emit(f"fpext {t} {a} to {wide}") for a in (x, y))
    within = ""
    if width == 1:
        is_divided = f.emit(f"fcmp uge {wide} {call('abs', x)}, {call('abs', y)}")
        f.branch_if(is_divided, "divide", "end")
        f.start("divide")
        within = "[ %x, %entry ], "
    ratio = f.emit(f"fdiv {wide} {x}, {y}")
    limit = number(2.0 ** (52 if is_double else 28))
    is_long = f.emit(f"fcmp uge {wide} {call('abs', ratio)}, {limit}")
    is_infinite = f.emit(f"fcmp ueq {wide} {call('abs', y)}, {number(inf)}")
    either = f.emit(f"or {lanes('i1', width)} {is_long}, {is_infinite}")
    f.branch_if(any_lane(f, either, width), "long", "short", RARE)
    f.start("long")
    full = f.emit(f"frem {t} %x, %y")
    f.branch("end")
    f.start("short")
    negated = f.emit(f"fneg {wide} {call('trunc', ratio)}")
    if is_double:
        rest = call("fma", negated, y, x)
    else:
        rest = f.emit(f"fadd {wide} {x}, {f.emit(f'fmul {wide} {negated}, {y}')}")
    # It has the other sign than `x` if the quotient was rounded up.
    signed = f.emit(f"fmul {wide} {rest}, {call('copysign', number(1.0), x)}")
    is_beyond = f.emit(f"fcmp olt {wide} {signed}, {number(0.0)}")
    back = f.emit(f"fadd {wide} {rest}, {call('copysign', y, x)}")
    chosen = call("select", is_beyond, back, rest)
    result = call("copysign", chosen, x)
    if not is_double:
        result = f.emit(f"fptrunc {wide} {result} to {t}")
    f.branch("end")
    f.start("end")
    values = f"{within}[ {full}, %long ], [ {result}, %short ]"
    f.do(f"ret {t} {f.emit(f'phi {t} {values}')}")
    return f.text


def _divided_by_constant(
    f: Function, op: str, dtype: DType, width: int, x: str, divisor: int
) -> str:
    """Emit the quotient or the remainder of 64-bit integers by a constant, which LLVM
    would compute lane by lane: vector units have no high half of a 64-bit product.

    The quotient is the high half of a product with the reciprocal, shifted (Granlund
    and Montgomery, Division by Invariant Integers using Multiplication, 1994, figures
    4.2 and 5.2).
    """
    size, t = abs(divisor), lanes("i64", width)
    bits = size.bit_length()

    def emit(name: str, left: str, right: str | int) -> str:
        if isinstance(right, int):
            right = constant(_signed(right), dtypes.int64, width)
        return f.emit(f"{name} {t} {left}, {right}")

    if dtype.kind == "i":
        reciprocal = (1 << (63 + bits)) // size + 1
        sign = emit("ashr", x, 63)
        high = _high_product(f, x, reciprocal, width)
        high = emit("sub", high, emit("and", sign, reciprocal - _ALL - 1))
        quotient = emit("sub", emit("ashr", high, bits - 1), sign)
        if divisor < 0:
            quotient = emit("mul", quotient, -1)
    else:
        reciprocal = (1 << (63 + bits)) // size + 1
        if reciprocal * size - (1 << (63 + bits)) <= 1 << (bits - 1):
            quotient = emit("lshr", _high_product(f, x, reciprocal, width), bits - 1)
        else:  # one more bit is needed
            reciprocal = (1 << (64 + bits)) // size + 1 - (_ALL + 1)
            high = _high_product(f, x, reciprocal, width)
            half = emit("lshr", emit("sub", x, high), 1)
            quotient = emit("lshr", emit("add", half, high), bits - 1)
    if op == "div":
        return quotient
    return emit("sub", x, emit("mul", quotient, divisor))


def _high_product(f: Function, x: str, factor: int, width: int) -> str:
    """Emit the upper 64 bits of unsigned products with a constant, from those of halves
    of 32 bits, which vector units have."""
    t = lanes("i64", width)

    def number(value: int) -> str:
        return constant(value, dtypes.int64, width)

    def product(half: str, factor: int) -> str:
        return f.emit(f"mul {t} {half}, {number(factor)}")

    def upper(value: str) -> str:
        return f.emit(f"lshr {t} {value}, {number(32)}")

    def lower(value: str) -> str:
        return f.emit(f"and {t} {value}, {number(_HALF)}")

    def total(left: str, right: str) -> str:
        return f.emit(f"add {t} {left}, {right}")

    low, high = lower(x), upper(x)
    first = total(product(high, factor & _HALF), upper(product(low, factor & _HALF)))
    second = total(product(low, factor >> 32), lower(first))
    return total(total(product(high, factor >> 32), upper(first)), upper(second))


def _integer(text: str) -> int:
    """Return the bits of an integer constant, as a number that is not negative."""
    return int(text.strip(")").split()[-1]) & _ALL


def _signed(bits: int) -> int:
    """Return the signed integer of 64 bits."""
    return bits - _ALL - 1 if bits > _ALL >> 1 else bits


def _overflows(f: Function, op: str, scalar: str, width: int, args: list[str]) -> str:
    """Emit the test whether an operation of signed integers wraps around."""
    t = lanes(scalar, width)
    pair = f"{{{t}, {lanes('i1', width)}}}"
    intrinsic = f"{pair} @llvm.{op}.with.overflow{overload(scalar, width)}"
    f.module.declare(f"{intrinsic}({t}, {t})")
    both = f.emit(f"call {intrinsic}({t} {args[0]}, {t} {args[1]})")
    return f.emit(f"extractvalue {pair} {both}, 1")


def _shift(f: Function, op: str, dtype: DType, width: int, args: list[str]) -> str:
    """Emit a shift; by the number of bits or more it gives 0, or the sign in all bits.

    The amount counts as unsigned.
    """
    x, amount = args
    scalar = register_type(dtype)
    t = lanes(scalar, width)
    last = splat(scalar, str(dtype.bits - 1), width)
    if op == "ashr" and dtype.kind == "u":
        op = "lshr"
    if not amount.startswith("%") and _integer(amount) < dtype.bits:
        return f.emit(f"{op} {t} {x}, {amount}")
    template, declaration = _call("llvm.umin", scalar, width, 2)
    f.module.declare(declaration)
    clamped = f.emit(template % (amount, last))
    shifted = f.emit(f"{op} {t} {x}, {clamped}")
    if op == "ashr":
        return shifted
    fits = f.emit(f"icmp ule {t} {amount}, {last}")
    zero = splat(scalar, "0", width)
    return f.emit(f"select {lanes('i1', width)} {fits}, {t} {shifted}, {t} {zero}")


# --- narrow floats --------------------------------------------------------------------


def round_narrow(f: Function, x: str, dtype: DType, width: int) -> str:
    """Emit the `float` nearest to `x` that the narrow `dtype` can represent."""
    return from_memory(f, to_memory(f, x, dtype, width), dtype, width)


def from_memory(f: Function, x: str, dtype: DType, width: int) -> str:
    """Emit the register form of a loaded value."""
    stored, in_register = memory_type(dtype, width), register_type(dtype, width)
    if stored == in_register:
        return x
    if dtype is dtypes.float16:
        return f.emit(f"fpext {stored} {x} to {in_register}")
    if dtype is dtypes.bfloat16:
        bits = lanes("i32", width)
        wide = f.emit(f"zext {stored} {x} to {bits}")
        high = f.emit(f"shl {bits} {wide}, {splat('i32', '16', width)}")
        return f.emit(f"bitcast {bits} {high} to {in_register}")
    return f.emit(f"trunc {stored} {x} to {in_register}")


def to_memory(f: Function, x: str, dtype: DType, width: int) -> str:
    """Emit the memory form of a value; narrow floats round to nearest, ties to even."""
    stored, in_register = memory_type(dtype, width), register_type(dtype, width)
    if stored == in_register:
        return x
    if dtype is dtypes.float16:
        return f.emit(f"fptrunc {in_register} {x} to {stored}")
    if dtype is dtypes.bfloat16:
        return _round_to_bfloat16(f, x, width)
    return f.emit(f"zext {in_register} {x} to {stored}")


def _round_to_bfloat16(f: Function, x: str, width: int) -> str:
    """Emit the upper half of the bits, rounded to nearest even; a NaN stays a NaN."""
    float_, bits, half = lanes("float", width), lanes("i32", width), lanes("i16", width)

    def number(value: int) -> str:
        return splat("i32", str(value), width)

    whole = f.emit(f"bitcast {float_} {x} to {bits}")
    high = f.emit(f"lshr {bits} {whole}, {number(16)}")
    odd = f.emit(f"and {bits} {high}, {number(1)}")
    biased = f.emit(f"add {bits} {whole}, {number(0x7FFF)}")
    rounded = f.emit(f"add {bits} {biased}, {odd}")
    shifted = f.emit(f"lshr {bits} {rounded}, {number(16)}")
    quiet = f.emit(f"or {bits} {high}, {number(0x40)}")
    nan = f.emit(f"fcmp uno {float_} {x}, {constant(0, dtypes.float32, width)}")
    mask = lanes("i1", width)
    result = f.emit(f"select {mask} {nan}, {bits} {quiet}, {bits} {shifted}")
    return f.emit(f"trunc {bits} {result} to {half}")


# --- conversions ----------------------------------------------------------------------


def cast(
    f: Function,
    x: str,
    source: DType,
    target: DType,
    width: int,
    *,
    fits: bool = False,
) -> str:
    """Emit a conversion with the semantics of `loop_ir.expr.cast`.

    Args:
        fits: Whether a float is in the range of the integers, or NaN.
    """
    if target.kind == "f":
        return _cast_to_float(f, x, source, target, width)
    if source.kind == "f":
        convert = _truncate if fits else _saturate
        return convert(f, x, source, target, width)
    s, t = register_type(source, width), register_type(target, width)
    if target.bits == source.bits:
        return x
    if target.bits < source.bits:
        return f.emit(f"trunc {s} {x} to {t}")
    return f.emit(f"{'sext' if source.kind == 'i' else 'zext'} {s} {x} to {t}")


def _truncate(f: Function, x: str, source: DType, target: DType, width: int) -> str:
    """Emit a conversion from a float to an integer that can represent it; NaN becomes
    0."""
    s, t = register_type(source, width), register_type(target, width)
    result = f.emit(f"fpto{'s' if target.kind == 'i' else 'u'}i {s} {x} to {t}")
    ordered = f.emit(f"fcmp ord {s} {x}, {constant(0, source, width)}")
    zero = constant(0, target, width)
    return f.emit(f"select {lanes('i1', width)} {ordered}, {t} {result}, {t} {zero}")


def _saturate(f: Function, x: str, source: DType, target: DType, width: int) -> str:
    """Emit a conversion from float to integer that clamps; NaN becomes 0."""
    scalar, scalar_target = register_type(source), register_type(target)
    s, t = lanes(scalar, width), lanes(scalar_target, width)
    sign = "s" if target.kind == "i" else "u"
    if width == 1:
        name = f"llvm.fpto{sign}i.sat{overload(scalar_target)}{overload(scalar)}"
        f.module.declare(f"{t} @{name}({s})")
        return f.emit(f"call {t} @{name}({s} {x})")
    # LLVM would convert lane by lane. `limit` is the first integer out of range.
    value_bits = target.bits - (target.kind == "i")
    low = -(2.0**value_bits) if target.kind == "i" else 0.0
    floor, limit = (constant(v, source, width) for v in (low, 2.0**value_bits))
    mask, zero = lanes("i1", width), constant(0, source, width)
    above = f.emit(f"fcmp ogt {s} {x}, {floor}")
    raised = f.emit(f"select {mask} {above}, {s} {x}, {s} {floor}")
    fits = f.emit(f"fcmp olt {s} {raised}, {limit}")
    safe = f.emit(f"select {mask} {fits}, {s} {raised}, {s} {zero}")
    result = f.emit(f"fpto{sign}i {s} {safe} to {t}")
    high = constant((1 << value_bits) - 1, target, width)
    result = f.emit(f"select {mask} {fits}, {t} {result}, {t} {high}")
    ordered = f.emit(f"fcmp ord {s} {x}, {zero}")
    none = constant(0, target, width)
    return f.emit(f"select {mask} {ordered}, {t} {result}, {t} {none}")


def _cast_to_float(
    f: Function, x: str, source: DType, target: DType, width: int
) -> str:
    s, t = register_type(source, width), register_type(target, width)
    if source.kind != "f":
        result = f.emit(f"{'si' if source.kind == 'i' else 'ui'}tofp {s} {x} to {t}")
    elif s == t:
        result = x
    elif target is dtypes.float64:
        return f.emit(f"fpext {s} {x} to {t}")
    else:
        result = f.emit(f"fptrunc {s} {x} to {t}")
        if target is dtypes.float16:
            result = _round_to_odd(f, x, result, width)
    if target in NARROW_FLOATS:
        return round_narrow(f, result, target, width)
    return result


def _round_to_odd(f: Function, exact: str, nearest: str, width: int) -> str:
    """Emit the `float` that the `double` `exact` rounds to in the mode "to odd".

    It is `exact` truncated towards 0, with the last bit set if that is inexact. A
    second rounding to fewer bits is then as if done once.
    """
    d, s, bits = lanes("double", width), lanes("float", width), lanes("i32", width)
    mask = lanes("i1", width)
    back = f.emit(f"fpext {s} {nearest} to {d}")
    inexact = f.emit(f"fcmp one {d} {back}, {exact}")
    sizes = [operation(f, "abs", dtypes.float64, width, [v]) for v in (back, exact)]
    too_big = f.emit(f"fcmp ogt {d} {sizes[0]}, {sizes[1]}")
    whole = f.emit(f"bitcast {s} {nearest} to {bits}")
    step = f.emit(f"zext {mask} {too_big} to {bits}")
    lower = f.emit(f"sub {bits} {whole}, {step}")
    odd = f.emit(f"zext {mask} {inexact} to {bits}")
    result = f.emit(f"or {bits} {lower}, {odd}")
    return f.emit(f"bitcast {bits} {result} to {s}")


def bitcast(f: Function, x: str, source: DType, target: DType, width: int) -> str:
    """Emit the same bits as another type of the same width."""
    bits = to_memory(f, x, source, width) if source in NARROW_FLOATS else x
    s = memory_type(source, width) if source in NARROW_FLOATS else None
    s = s or register_type(source, width)
    if target in NARROW_FLOATS:
        t = memory_type(target, width)
        same = bits if s == t else f.emit(f"bitcast {s} {bits} to {t}")
        return from_memory(f, same, target, width)
    t = register_type(target, width)
    return bits if s == t else f.emit(f"bitcast {s} {bits} to {t}")


def broadcast(f: Function, x: str, scalar: str, width: int) -> str:
    """Emit a vector with the scalar `x` in every lane."""
    if width == 1:
        return x
    if not x.startswith("%"):
        return splat(scalar, x, width)
    t = lanes(scalar, width)
    inserted = f.emit(f"insertelement {t} poison, {scalar} {x}, i64 0")
    return f.emit(
        f"shufflevector {t} {inserted}, {t} poison, <{width} x i32> zeroinitializer"
    )


NEUTRAL: Final[dict[str, float]] = {
    "add": -0.0,
    "mul": 1.0,
    "min": float("inf"),
    "max": float("-inf"),
}


def neutral(combine: str, dtype: DType) -> str:
    """Return the identity element of `combine`."""
    if dtype.kind == "f":
        return literal(NEUTRAL[combine], dtype)
    if dtype.kind == "b":
        return "true" if combine in ("and", "min", "mul") else "false"
    low = -(1 << (dtype.bits - 1)) if dtype.kind == "i" else 0
    high = (1 << (dtype.bits - (dtype.kind == "i"))) - 1
    values = {"add": 0, "mul": 1, "and": -1, "or": 0, "min": high, "max": low}
    return literal(values[combine], dtype)
