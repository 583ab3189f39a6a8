"""What WebAssembly has no instructions for, in LLVM IR: fused multiply-add, conversions
of float16, products of 128 bits.

LLVM would call a library for them. Here they are functions of the module itself, of
vectors where it has vectors, and give the same bits as the instructions of a CPU.
"""

import re
from collections.abc import Iterator
from typing import Final

from hopflow.compiler.llvm.module import Module
from hopflow.compiler.llvm.types import lanes, splat


def with_software(module: Module) -> str:
    """Return the text of a complete module, with functions in place of the
    instructions.

    In memory a float16 becomes its bits.
    """
    for declaration in module.declarations:
        fma = _FMA.match(declaration)
        if fma is not None:
            _define_fma(module, declaration, int(fma["width"] or 1), fma["kind"])
    conversions: dict[str, str] = {}

    def conversion(found: re.Match[str]) -> str:
        width, value = int(found["width"] or 1), found["half"] or found["float"]
        name = f"hf.{found['op']}.{width}"
        widens = found["op"] == "fpext"
        conversions[name] = (_widened if widens else _narrowed)(name, width)
        types = lanes("i16", width), lanes("float", width)
        source, target = types if widens else types[::-1]
        return f"call {target} @{name}({source} {value})"

    # An intrinsic of float16 and that of integers may become one.
    for declaration in module.declarations:
        module.redeclare(declaration, _with_bits(declaration))
    text = _with_bits(_CONVERSION.sub(conversion, module.text))
    return "\n".join((text, *conversions.values(), _PRODUCT))


def _with_bits(text: str) -> str:
    """Return a text whose values in memory are integers where they were float16."""
    return _HALF_OVERLOAD.sub(r".\1i16", _HALF.sub("i16", text))


_FMA: Final = re.compile(r".+ @llvm\.fma\.(?:v(?P<width>\d+))?(?P<kind>f32|f64)\(")
_CONVERSION: Final = re.compile(
    r"(?<== )(?P<op>fpext|fptrunc) (?:<(?P<width>\d+) x )?"
    r"(?:half>? (?P<half>\S+|splat \([^)]*\)) to (?:<\d+ x )?float>?"
    r"|float>? (?P<float>\S+|splat \([^)]*\)) to (?:<\d+ x )?half>?)"
)
_HALF: Final = re.compile(r"(?<![\w%@.])half\b")
_HALF_OVERLOAD: Final = re.compile(r"\.(v\d+)?f16\b")


# --- fused multiply-add ---------------------------------------------------------------
#
# The exact sum of two floats is their rounded sum and what that lacks, which is a float
# too (Knuth, "two-sum"); so is the exact product (Dekker and Veltkamp). A sum that is
# rounded "to odd" can be rounded once more, to two bits less or fewer, as if that were
# the first time. See Boldo and Melquiond, "Emulation of FMA and correctly rounded sums:
# proved algorithms using rounding to odd" (2008).


def _define_fma(module: Module, declaration: str, width: int, kind: str) -> None:
    """Define fused multiply-add of so many lanes in place of the intrinsic."""
    name = f"hf.fma.{width}.{kind}"
    if kind == "f64" and not module.has_function("hf.fma.exact"):
        module.define("hf.fma.exact", _FMA_EXACT)
    define = _fma_of_doubles if kind == "f64" else _fma_of_floats
    module.replace(declaration, name, define(name, width))


def _fma_of_floats(name: str, width: int) -> str:
    """`a * b + c` of float32: in float64 the product is exact."""
    s, d = lanes("float", width), lanes("double", width)
    lines = [
        f"%a = fpext {s} %x to {d}",
        f"%b = fpext {s} %y to {d}",
        f"%c = fpext {s} %z to {d}",
        f"%p = fmul {d} %a, %b",
        *_two_sum("s", "p", "c", d),
        *_to_odd("odd", "s", width),
        f"%result = fptrunc {d} %odd to {s}",
        f"ret {s} %result",
    ]
    return _function(f"{s} @{name}({s} %x, {s} %y, {s} %z)", lines)


def _fma_of_doubles(name: str, width: int) -> str:
    """`a * b + c` of float64.

    Where numbers are so large or small that an exact product is no pair of floats, the
    function for one lane that computes with integers does it for all of them.
    """
    d, mask = lanes("double", width), lanes("i1", width)

    def number(value: str) -> str:
        return splat("double", value, width)

    low, high = number(_2_TO_MINUS_450), number(_2_TO_450)
    lines = [
        *_absolute("ax", "a", width),
        *_absolute("ay", "b", width),
        *_absolute("az", "c", width),
    ]
    for value in ("x", "y"):
        lines += [
            f"%{value}.large = fcmp oge {d} %a{value}, {low}",
            f"%{value}.small = fcmp ole {d} %a{value}, {high}",
            f"%{value}.fits = and {mask} %{value}.large, %{value}.small",
            f"%{value}.zero = fcmp oeq {d} %a{value}, {number('0.0')}",
        ]
    lines += [
        f"%both.fit = and {mask} %x.fits, %y.fits",
        f"%zero = or {mask} %x.zero, %y.zero",
        f"%z.fits = fcmp ole {d} %az, {number(_2_TO_900)}",
        f"%fit = and {mask} %both.fit, %z.fits",
        f"%known = or {mask} %fit, %zero",
        *_all("ok", "known", width),
        "br i1 %ok, label %quick, label %exact",
        "quick:",
        *_two_product("p", "a", "b", width),
        *_two_sum("t", "c", "p.rest", d),
        *_two_sum("v", "p", "t", d),
        *_two_sum("w", "t.rest", "v.rest", d),
        *_to_odd("odd", "w", width),
        f"%sum = fadd {d} %v, %odd",
        f"%plain = fadd {d} %p, %c",
        f"%result = select {mask} %zero, {d} %plain, {d} %sum",
        f"ret {d} %result",
        "exact:",
    ]
    one = "call double @hf.fma.exact"
    if width == 1:
        lines += [f"%slow = {one}(double %a, double %b, double %c)"]
    made = "poison"
    for k in range(width if width > 1 else 0):
        lines += [f"%{v}{k} = extractelement {d} %{v}, i32 {k}" for v in "abc"]
        lines += [
            f"%e{k} = {one}(double %a{k}, double %b{k}, double %c{k})",
            f"%s{k} = insertelement {d} {made}, double %e{k}, i32 {k}",
        ]
        made = f"%s{k}"
    lines += [f"ret {d} {'%slow' if width == 1 else made}"]
    return _function(f"{d} @{name}({d} %a, {d} %b, {d} %c)", lines)


_2_TO_MINUS_450: Final = f"0x{1023 - 450:03x}0000000000000"
_2_TO_450: Final = f"0x{1023 + 450:03x}0000000000000"
_2_TO_900: Final = f"0x{1023 + 900:03x}0000000000000"
_SPLIT: Final = "134217729.0"
"""2**27 + 1: it splits a float64 into two numbers of 26 bits."""


def _two_sum(name: str, x: str, y: str, t: str) -> Iterator[str]:
    """`name` and `name.rest`, which are `x + y` exactly."""
    yield f"%{name} = fadd {t} %{x}, %{y}"
    yield f"%{name}.y = fsub {t} %{name}, %{x}"
    yield f"%{name}.x = fsub {t} %{name}, %{name}.y"
    yield f"%{name}.dx = fsub {t} %{x}, %{name}.x"
    yield f"%{name}.dy = fsub {t} %{y}, %{name}.y"
    yield f"%{name}.rest = fadd {t} %{name}.dx, %{name}.dy"


def _two_product(name: str, x: str, y: str, width: int) -> Iterator[str]:
    """`name` and `name.rest`, which are `x * y` exactly."""
    d = lanes("double", width)
    for v in (x, y):
        yield f"%{v}.big = fmul {d} %{v}, {splat('double', _SPLIT, width)}"
        yield f"%{v}.less = fsub {d} %{v}.big, %{v}"
        yield f"%{v}.high = fsub {d} %{v}.big, %{v}.less"
        yield f"%{v}.low = fsub {d} %{v}, %{v}.high"
    yield f"%{name} = fmul {d} %{x}, %{y}"
    rest = f"%{name}"
    pairs = [("high", "high"), ("high", "low"), ("low", "high")]
    for k, (i, j) in enumerate(pairs):
        yield f"%{name}.part{k} = fmul {d} %{x}.{i}, %{y}.{j}"
        yield f"%{name}.left{k} = fsub {d} {rest}, %{name}.part{k}"
        rest = f"%{name}.left{k}"
    yield f"%{name}.last = fmul {d} %{x}.low, %{y}.low"
    yield f"%{name}.rest = fsub {d} %{name}.last, {rest}"


def _to_odd(name: str, total: str, width: int) -> Iterator[str]:
    """A sum of `_two_sum`, rounded to odd: towards 0, and if that is inexact its last
    bit is set."""
    d, bits, mask = (lanes(t, width) for t in ("double", "i64", "i1"))
    zero = splat("double", "0.0", width)
    one, none = splat("i64", "1", width), splat("i64", "0", width)
    yield f"%{name}.inexact = fcmp one {d} %{total}.rest, {zero}"
    yield f"%{name}.bits = bitcast {d} %{total} to {bits}"
    yield f"%{name}.rest = bitcast {d} %{total}.rest to {bits}"
    yield f"%{name}.signs = xor {bits} %{name}.bits, %{name}.rest"
    yield f"%{name}.over = icmp slt {bits} %{name}.signs, {none}"
    yield f"%{name}.step = zext {mask} %{name}.over to {bits}"
    yield f"%{name}.less = sub {bits} %{name}.bits, %{name}.step"
    yield f"%{name}.set = or {bits} %{name}.less, {one}"
    yield (
        f"%{name}.all = select {mask} %{name}.inexact, {bits} %{name}.set, "
        f"{bits} %{name}.bits"
    )
    yield f"%{name} = bitcast {bits} %{name}.all to {d}"


def _absolute(name: str, x: str, width: int) -> Iterator[str]:
    d, bits = lanes("double", width), lanes("i64", width)
    yield f"%{name}.bits = bitcast {d} %{x} to {bits}"
    most = splat("i64", str((1 << 63) - 1), width)
    yield f"%{name}.cut = and {bits} %{name}.bits, {most}"
    yield f"%{name} = bitcast {bits} %{name}.cut to {d}"


def _all(name: str, tests: str, width: int) -> Iterator[str]:
    """Whether all lanes of a test hold."""
    if width == 1:
        yield f"%{name} = and i1 %{tests}, true"
    else:
        yield f"%{name}.lanes = bitcast <{width} x i1> %{tests} to i{width}"
        yield f"%{name} = icmp eq i{width} %{name}.lanes, -1"


def _function(head: str, lines: list[str]) -> str:
    body = "\n".join(f"{'' if line.endswith(':') else '  '}{line}" for line in lines)
    return f"define internal {head} noinline nounwind {{\nentry:\n{body}\n}}"


_FMA_EXACT: Final = """
define internal {i64, i32, i64} @hf.parts(double %x) noinline nounwind {
entry:  ; the significand, the power of two that it is multiplied by, and the sign
  %bits = bitcast double %x to i64
  %sign = ashr i64 %bits, 63
  %cut = lshr i64 %bits, 52
  %field = and i64 %cut, 2047
  %fraction = and i64 %bits, 4503599627370495
  %normal = icmp ne i64 %field, 0
  %one = select i1 %normal, i64 4503599627370496, i64 0
  %significand = or i64 %fraction, %one
  %least = call i64 @llvm.umax.i64(i64 %field, i64 1)
  %narrow = trunc i64 %least to i32
  %power = sub i32 %narrow, 1075
  %r0 = insertvalue {i64, i32, i64} poison, i64 %significand, 0
  %r1 = insertvalue {i64, i32, i64} %r0, i32 %power, 1
  %r2 = insertvalue {i64, i32, i64} %r1, i64 %sign, 2
  ret {i64, i32, i64} %r2
}

define internal double @hf.fma.exact(double %a, double %b, double %c)
    noinline nounwind {
entry:
  %product = fmul double %a, %b
  %plain = fadd double %product, %c
  %a.size = call double @llvm.fabs.f64(double %a)
  %b.size = call double @llvm.fabs.f64(double %b)
  %c.size = call double @llvm.fabs.f64(double %c)
  %a.some = fcmp ogt double %a.size, 0.0
  %b.some = fcmp ogt double %b.size, 0.0
  %some = and i1 %a.some, %b.some
  %a.finite = fcmp olt double %a.size, 0x7ff0000000000000
  %b.finite = fcmp olt double %b.size, 0x7ff0000000000000
  %finite = and i1 %a.finite, %b.finite
  %c.finite = fcmp olt double %c.size, 0x7ff0000000000000
  %factors = and i1 %some, %finite
  %c.special = xor i1 %c.finite, true
  %is.c = and i1 %factors, %c.special
  br i1 %is.c, label %third, label %numbers
third:  ; infinite or no number, whatever a finite product is
  %itself = fadd double %c, %c
  ret double %itself
numbers:
  br i1 %factors, label %general, label %simple
simple:  ; a factor is 0, infinite, or no number
  ret double %plain
general:
  %pa = call {i64, i32, i64} @hf.parts(double %a)
  %pb = call {i64, i32, i64} @hf.parts(double %b)
  %pc = call {i64, i32, i64} @hf.parts(double %c)
  %ma = extractvalue {i64, i32, i64} %pa, 0
  %mb = extractvalue {i64, i32, i64} %pb, 0
  %mc = extractvalue {i64, i32, i64} %pc, 0
  %ea = extractvalue {i64, i32, i64} %pa, 1
  %eb = extractvalue {i64, i32, i64} %pb, 1
  %ec = extractvalue {i64, i32, i64} %pc, 1
  %sa = extractvalue {i64, i32, i64} %pa, 2
  %sb = extractvalue {i64, i32, i64} %pb, 2
  %sc = extractvalue {i64, i32, i64} %pc, 2
  %ma.wide = zext i64 %ma to i256
  %mb.wide = zext i64 %mb to i256
  %mc.wide = zext i64 %mc to i256
  ; Integers of 256 bits hold the product, from bit 64 on, and the third number at its
  ; distance. Of whichever is too far below, the last bit says that it is not 0.
  %m = mul i256 %ma.wide, %mb.wide
  %e = add i32 %ea, %eb
  %distance = sub i32 %ec, %e
  %is.far = icmp sgt i32 %distance, 137
  %m.placed = shl i256 %m, 64
  %m.here = select i1 %is.far, i256 1, i256 %m.placed
  %place = add i32 %distance, 64
  %place.high = call i32 @llvm.smin.i32(i32 %place, i32 201)
  %up = call i32 @llvm.smax.i32(i32 %place.high, i32 0)
  %below = sub i32 0, %place
  %below.some = call i32 @llvm.smax.i32(i32 %below, i32 0)
  %down = call i32 @llvm.smin.i32(i32 %below.some, i32 60)
  %up.wide = zext i32 %up to i256
  %down.wide = zext i32 %down to i64
  %mc.cut = lshr i64 %mc, %down.wide
  %mc.back = shl i64 %mc.cut, %down.wide
  %mc.lost = icmp ne i64 %mc.back, %mc
  %mc.sticky = zext i1 %mc.lost to i64
  %mc.odd = or i64 %mc.cut, %mc.sticky
  %mc.odd.wide = zext i64 %mc.odd to i256
  %mc.here = shl i256 %mc.odd.wide, %up.wide
  %e.product = sub i32 %e, 64
  %e.third = sub i32 %ec, 201
  %e.here = select i1 %is.far, i32 %e.third, i32 %e.product
  ; Their sum, as a size and a sign.
  %sp = xor i64 %sa, %sb
  %sp.wide = sext i64 %sp to i256
  %sc.wide = sext i64 %sc to i256
  %m.flipped = xor i256 %m.here, %sp.wide
  %m.signed = sub i256 %m.flipped, %sp.wide
  %mc.flipped = xor i256 %mc.here, %sc.wide
  %mc.signed = sub i256 %mc.flipped, %sc.wide
  %total = add i256 %m.signed, %mc.signed
  %nothing = icmp eq i256 %total, 0
  br i1 %nothing, label %cancelled, label %rounded
cancelled:
  ret double 0.0
rounded:
  %negative = icmp slt i256 %total, 0
  %opposite = sub i256 0, %total
  %size = select i1 %negative, i256 %opposite, i256 %total
  ; Drop all but 53 bits, and all below the least power of two.
  %zeros.wide = call i256 @llvm.ctlz.i256(i256 %size, i1 true)
  %zeros = trunc i256 %zeros.wide to i32
  %drop.normal = sub i32 203, %zeros
  %drop.least = sub i32 -1074, %e.here
  %drop = call i32 @llvm.smax.i32(i32 %drop.normal, i32 %drop.least)
  %drop.most = call i32 @llvm.smin.i32(i32 %drop, i32 255)
  %drop.wide = zext i32 %drop.most to i256
  %kept = lshr i256 %size, %drop.wide
  %kept.back = shl i256 %kept, %drop.wide
  %dropped = sub i256 %size, %kept.back
  %before = sub i32 %drop.most, 1
  %before.wide = zext i32 %before to i256
  %half = shl i256 1, %before.wide
  %above = icmp ugt i256 %dropped, %half
  %tie = icmp eq i256 %dropped, %half
  %kept.narrow = trunc i256 %kept to i64
  %last = and i64 %kept.narrow, 1
  %is.odd = icmp ne i64 %last, 0
  %tie.up = and i1 %tie, %is.odd
  %adds = or i1 %above, %tie.up
  %added = zext i1 %adds to i64
  %integer = add i64 %kept.narrow, %added
  ; The bits of a float: a carry from the significand goes to the exponent.
  %field.all = add i32 %drop.most, %e.here
  %field.some = add i32 %field.all, 1074
  %field = call i32 @llvm.smax.i32(i32 %field.some, i32 0)
  %field.wide = zext i32 %field to i64
  %field.bits = shl i64 %field.wide, 52
  %bits = add i64 %field.bits, %integer
  %bits.most = call i64 @llvm.umin.i64(i64 %bits, i64 9218868437227405312)
  %huge = icmp ugt i32 %field, 2046
  %bits.found = select i1 %huge, i64 9218868437227405312, i64 %bits.most
  %sign = select i1 %negative, i64 -9223372036854775808, i64 0
  %result.bits = or i64 %bits.found, %sign
  %result = bitcast i64 %result.bits to double
  ret double %result
}
"""


# --- float16 --------------------------------------------------------------------------


def _widened(name: str, width: int) -> str:
    """The float32 of the bits of a float16.

    Its exponent is too small by 112 at first, and a product, exact for subnormal
    numbers too, makes up for that.
    """
    half, bits, float_, mask = (lanes(t, width) for t in ("i16", "i32", "float", "i1"))

    def number(value: int) -> str:
        return splat("i32", str(value), width)

    scale = splat("float", f"0x{1023 + 112:03x}0000000000000", width)
    lines = [
        f"%wide = zext {half} %x to {bits}",
        f"%size = and {bits} %wide, {number(0x7FFF)}",
        f"%sign.low = and {bits} %wide, {number(0x8000)}",
        f"%sign = shl {bits} %sign.low, {number(16)}",
        f"%shifted = shl {bits} %size, {number(13)}",
        f"%small = bitcast {bits} %shifted to {float_}",
        f"%scaled = fmul {float_} %small, {scale}",
        f"%finite = bitcast {float_} %scaled to {bits}",
        f"%is.special = icmp uge {bits} %size, {number(0x7C00)}",
        f"%special = or {bits} %finite, {number(0x7F800000)}",
        f"%is.nan = icmp ugt {bits} %size, {number(0x7C00)}",
        f"%nan = or {bits} %special, {number(0x00400000)}",
        f"%infinite = select {mask} %is.nan, {bits} %nan, {bits} %special",
        f"%found = select {mask} %is.special, {bits} %infinite, {bits} %finite",
        f"%signed = or {bits} %found, %sign",
        f"%result = bitcast {bits} %signed to {float_}",
        f"ret {float_} %result",
    ]
    return _function(f"{float_} @{name}({half} %x)", lines)


def _narrowed(name: str, width: int) -> str:
    """The bits of the float16 nearest to a float32, ties to even.

    For a subnormal one, the sum with 0.5 has its last bit where it must be rounded.
    """
    half, bits, float_, mask = (lanes(t, width) for t in ("i16", "i32", "float", "i1"))

    def number(value: int) -> str:
        return splat("i32", str(value), width)

    lines = [
        f"%bits = bitcast {float_} %x to {bits}",
        f"%sign.high = lshr {bits} %bits, {number(16)}",
        f"%sign = and {bits} %sign.high, {number(0x8000)}",
        f"%size = and {bits} %bits, {number(0x7FFFFFFF)}",
        f"%last.here = lshr {bits} %size, {number(13)}",
        f"%last = and {bits} %last.here, {number(1)}",
        f"%rebased = sub {bits} %size, {number((112 << 23) - 0xFFF)}",
        f"%raised = add {bits} %rebased, %last",
        f"%normal = lshr {bits} %raised, {number(13)}",
        f"%size.float = bitcast {bits} %size to {float_}",
        f"%sum = fadd {float_} %size.float, {splat('float', '0.5', width)}",
        f"%sum.bits = bitcast {float_} %sum to {bits}",
        f"%subnormal = sub {bits} %sum.bits, {number(0x3F000000)}",
        f"%is.small = icmp ult {bits} %size, {number(0x38800000)}",
        f"%finite = select {mask} %is.small, {bits} %subnormal, {bits} %normal",
        f"%is.large = icmp uge {bits} %size, {number(0x47800000)}",
        f"%some = select {mask} %is.large, {bits} {number(0x7C00)}, {bits} %finite",
        f"%payload = and {bits} %last.here, {number(0x3FF)}",
        f"%nan = or {bits} %payload, {number(0x7E00)}",
        f"%is.nan = icmp ugt {bits} %size, {number(0x7F800000)}",
        f"%found = select {mask} %is.nan, {bits} %nan, {bits} %some",
        f"%signed = or {bits} %found, %sign",
        f"%result = trunc {bits} %signed to {half}",
        f"ret {half} %result",
    ]
    return _function(f"{half} @{name}({float_} %x)", lines)


# --- products of 128 bits -------------------------------------------------------------

_PRODUCT: Final = """
define weak hidden void @__multi3(ptr %out, i64 %x, i64 %xh, i64 %y, i64 %yh) nounwind {
entry:  ; what LLVM calls for a product of 128 bits, by four of 64
  %x0 = and i64 %x, 4294967295
  %x1 = lshr i64 %x, 32
  %y0 = and i64 %y, 4294967295
  %y1 = lshr i64 %y, 32
  %low = mul i64 %x0, %y0
  %low.high = lshr i64 %low, 32
  %inner0 = mul i64 %x1, %y0
  %middle0 = add i64 %inner0, %low.high
  %inner1 = mul i64 %x0, %y1
  %middle0.low = and i64 %middle0, 4294967295
  %middle1 = add i64 %inner1, %middle0.low
  %middle0.high = lshr i64 %middle0, 32
  %middle1.high = lshr i64 %middle1, 32
  %outer = mul i64 %x1, %y1
  %high0 = add i64 %outer, %middle0.high
  %high1 = add i64 %high0, %middle1.high
  %cross0 = mul i64 %x, %yh
  %cross1 = mul i64 %xh, %y
  %high2 = add i64 %high1, %cross0
  %high3 = add i64 %high2, %cross1
  %product = mul i64 %x, %y
  store i64 %product, ptr %out, align 8
  %second = getelementptr i64, ptr %out, i32 1
  store i64 %high3, ptr %second, align 8
  ret void
}
"""
