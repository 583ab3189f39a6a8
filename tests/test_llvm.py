"""Native code against the reference interpreter of the Loop IR.

LLVM is built with assertions, and many mistakes end the process: so the batch of all
operations runs in a process of its own.
"""

import dataclasses
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np
import pytest

import hopflow as hf
from hopflow import dtypes
from hopflow.compiler.cpu import guarded
from hopflow.compiler.cpu.jit import jit
from hopflow.compiler.cpu.runtime import Kernel, compile_program
from hopflow.compiler.cpu.target import CpuTarget, host
from hopflow.compiler.pipeline import Executable
from hopflow.dtypes import DType, bool_, float32, float64, int64
from hopflow.errors import CompileError
from hopflow.loop_ir import expr as e
from hopflow.loop_ir import interpreter
from hopflow.loop_ir.expr import COMPARE, Buffer, Expr, Var
from hopflow.loop_ir.program import (
    SERIAL,
    Accumulate,
    Allocate,
    Assign,
    Binding,
    Copy,
    Declare,
    For,
    If,
    Let,
    Program,
    Site,
    Stmt,
    Store,
    Swap,
    Trap,
    While,
)
from hopflow.tensor import EagerTensor
from hopflow.testing.executions import in_turn

pytestmark = pytest.mark.slow

NDArray = np.ndarray[Any, np.dtype[Any]]

UNARY: Final = {
    "f": "neg abs sqrt floor ceil trunc rint isnan",
    "i": "neg abs not popcount clz",
    "u": "neg abs not popcount clz",
    "b": "not",
}
BINARY: Final = {
    "f": "add sub mul div rem min max copysign",
    "i": "add sub mul div rem min max and or xor shl lshr ashr",
    "u": "add sub mul div rem min max and or xor shl lshr ashr",
    "b": "add sub mul min max and or xor",
}
AVX2: Final = "+avx,+avx2,+fma,+f16c,+bmi,+bmi2,+lzcnt,+popcnt,+sse4.2"
N: Final = Var("n", int64)
SIZE: Final = e.read(N)
J: Final = Var("j", int64)
AT: Final = e.read(J)


def vector(width: int) -> Binding:
    return Binding("vector", width) if width > 1 else SERIAL


def program(
    body: list[Stmt],
    *,
    sizes: Sequence[Var] = (),
    inputs: Sequence[Buffer] = (),
    outputs: Sequence[Buffer] = (),
    arena: Sequence[Buffer] = (),
    constants: Sequence[Buffer] = (),
) -> Program:
    sites = [Site("check", 0), Site("limit", 1)]
    return Program(
        "test",
        list(sizes),
        list(inputs),
        list(outputs),
        list(arena),
        list(constants),
        body,
        sites,
    )


def call(kernel: Kernel, sizes: Sequence[int], inputs: Sequence[NDArray]) -> Any:
    """Call a kernel with outputs of the shapes that its program says; return them, or
    what stopped it."""
    known = dict(zip(kernel.interface.sizes, sizes, strict=True))
    outputs = []
    for buffer in kernel.interface.outputs:
        shape = [_evaluate(extent, known) for extent in buffer.shape]
        # Between fences, to see whether anything is written beside it.
        fenced = np.full(int(np.prod(shape)) + 64, 77).astype(buffer.dtype.dtype)
        outputs.append((fenced, shape))
    addresses = [
        fenced.ctypes.data + 32 * fenced.dtype.itemsize for fenced, _ in outputs
    ]
    trapped = kernel(*sizes, *(x.ctypes.data for x in inputs), *addresses)
    for fenced, _ in outputs:
        fences = np.concatenate([fenced[:32], fenced[-32:]])
        assert (fences == np.array(77).astype(fenced.dtype)).all(), "out of bounds"
    if trapped is not None:
        return trapped
    return [fenced[32:-32].reshape(shape) for fenced, shape in outputs]


def _evaluate(expr: Expr, sizes: dict[Var, int]) -> int:
    if expr.op == "const":
        return int(expr.attr)
    if expr.op == "var":
        return sizes[expr.attr]
    x, y = (_evaluate(a, sizes) for a in expr.args)
    return {"add": x + y, "sub": x - y, "mul": x * y}[expr.op]


def assert_same_bits(got: NDArray, wanted: NDArray, what: str) -> None:
    """Equal bit by bit, but for which NaN."""
    assert got.dtype == wanted.dtype
    different = np.atleast_1d(got != wanted)
    if dtypes.as_dtype(got.dtype).is_float:
        as_bits = f"u{got.dtype.itemsize}"
        different = np.atleast_1d(got).view(as_bits) != np.atleast_1d(wanted).view(
            as_bits
        )
        different &= ~(np.isnan(got) & np.isnan(wanted))
    if different.any():
        first = np.flatnonzero(different)[:4]
        got, wanted = np.ravel(got)[first], np.ravel(wanted)[first]
        raise AssertionError(f"{what}: at {first}, got {got}, not {wanted}")


def compare(
    native: Program | Kernel,
    sizes: Sequence[int] = (),
    inputs: Sequence[NDArray] = (),
    serial: Program | None = None,
) -> list[NDArray]:
    """Run native code and the interpreter; they must agree bit by bit."""
    kernel = native if isinstance(native, Kernel) else compile_program(native, host())
    interpreted = serial or native
    assert isinstance(interpreted, Program)
    wanted = interpreter.run(interpreted, sizes, inputs)
    got: list[NDArray] = call(kernel, sizes, inputs)
    for k, (x, y) in enumerate(zip(got, wanted, strict=True)):
        assert_same_bits(x, y, f"output {k} of {interpreted.name} for {sizes}")
    return got


# --- all operations, in a process of their own ----------------------------------------


def operations(dtype: DType) -> Iterator[tuple[str, Expr, list[Buffer]]]:
    """Every operation on elements `AT` of arrays of 75."""
    length = (e.index(75),)
    x, y, z, safe = (
        Buffer(name, dtype, length, "input") for name in ("x", "y", "z", "safe")
    )
    test = Buffer("test", bool_, length, "input")
    buffers = [x, y, z, safe, test]
    a, b, c, divisor, holds = (e.load(buffer, (AT,)) for buffer in buffers)
    kind = dtype.kind
    for op in UNARY[kind].split():
        yield op, e.unary(op, a), buffers
    for op in BINARY[kind].split():
        whole = op in ("div", "rem") and kind != "f"
        yield op, e.binary(op, a, divisor if whole else b), buffers
        if op in ("min", "max") and kind == "f":
            for value in (0.0, -0.0, 2.0, float("nan")):
                yield f"{op} {value}", e.binary(op, a, e.const(value, dtype)), buffers
                yield f"{value} {op}", e.binary(op, e.const(value, dtype), a), buffers
        if op in ("shl", "lshr", "ashr"):
            for amount in (1, dtype.bits - 1, dtype.bits, dtype.bits + 3):
                shift = e.binary(op, a, e.const(amount, dtype))
                yield f"{op} {amount}", shift, buffers
    for op in COMPARE:
        if kind == "i" or not op.endswith("_overflows"):
            yield op, e.compare(op, a, b), buffers
    yield "select", e.select(holds, a, b), buffers
    if kind == "f":
        yield "fma", e.fma(a, b, c), buffers
    for target in dtypes.ALL:
        if target is not dtype:
            yield f"cast to {target}", e.cast(a, target), buffers
            if target.bits == dtype.bits and kind != "b":
                yield f"bits as {target}", e.bitcast(a, target), buffers


def samples(dtype: DType, random: np.random.Generator, count: int) -> NDArray:
    """Values of all sizes, and the special ones."""
    if dtype.kind == "b":
        return random.integers(0, 2, count).astype(bool)
    if dtype.kind != "f":
        info = dtypes.iinfo(dtype)
        special = [0, 1, 2, info.min, info.max, info.max - 1, info.min + 1]
        special += [dtype.bits - 1, dtype.bits, dtype.bits + 1, 5]
        rest = random.integers(info.min, info.max, count, dtype=dtype.dtype)
        values = np.array(special, dtype.dtype)
        return random.permutation(np.concatenate([values, rest])[:count])
    floats = [0.0, -0.0, 1.0, np.inf, -np.inf, np.nan, 0.5, 1.5, 2.5, -2.5, 1e-40]
    floats += [-3e-5, 1e-310, 65504.0, 65520.0, 3e38, -1e300, 2.0**31, -(2.0**31) - 1]
    floats += [9.3e18, -9.3e18, 1.9e19, 255.5, -128.7, 127.99]
    floats += [1 + 2**-8 + 2**-40, 1 + 2**-11 + 2**-40]  # near ties when narrowed
    rest = random.standard_normal(count) * 10.0 ** random.integers(-3, 6, count)
    mixed = random.permutation(np.concatenate([floats, rest])[:count])
    with np.errstate(over="ignore"):
        return mixed.astype(dtype.dtype)


def check_operations(target: CpuTarget) -> None:
    """Compare every operation on every dtype, one by one and as vectors."""
    for dtype in dtypes.ALL:
        random = np.random.default_rng(dtype.bits)
        inputs = [samples(dtype, random, 75) for _ in range(4)]
        if dtype.is_integer:
            minus_one = np.array(-1).astype(dtype.dtype)
            bad = (inputs[3] == 0) | (inputs[3] == minus_one)
            inputs[3] = np.where(bad, np.array(3, dtype.dtype), inputs[3])
        inputs.append(samples(bool_, random, 75))
        cases = list(operations(dtype))
        outputs = [
            Buffer(f"out{k}", value.dtype, (e.index(75),), "output")
            for k, (_, value, _) in enumerate(cases)
        ]
        body: list[Stmt] = [
            Store(out, (AT,), value)
            for out, (_, value, _) in zip(outputs, cases, strict=True)
        ]
        wanted = None
        for width in (1, 4, 16, 64):
            loop = For(J, e.index(75), body, True, vector(width))
            native = program([loop], inputs=cases[0][2], outputs=outputs)
            wanted = wanted or interpreter.run(native, [], inputs)
            got = call(compile_program(native, target), [], inputs)
            for (op, _, _), x, y in zip(cases, got, wanted, strict=True):
                assert_same_bits(x, y, f"{op} of {dtype} in {width} lanes")


def avx2() -> CpuTarget:
    """A CPU without masks and gathers, whose code this one runs too."""
    return dataclasses.replace(host(), cpu="haswell", features=AVX2)


@pytest.mark.parametrize("target", ["host", "avx2"])
def test_every_operation_agrees_with_the_interpreter(target: str) -> None:
    if target == "avx2" and not host().has("avx2"):
        pytest.skip("not an x86 CPU")
    done = subprocess.run(
        [sys.executable, __file__, target], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_mathematical_function_has_the_same_bits_in_any_number_of_lanes() -> None:
    names = ("exp", "tanh", "sin", "pow", "fmod")
    x, y = (Buffer(name, float64, (SIZE,), "input") for name in ("x", "y"))
    outputs = [Buffer(f"{name}_of_x", float64, (SIZE,), "output") for name in names]
    random = np.random.default_rng(0)
    inputs = [
        random.standard_normal(50) * 10.0 ** random.integers(-3, 9, 50),
        np.full(50, 1.7),
    ]
    results = []
    for width in (1, 8, 32):
        body: list[Stmt] = []
        for name, out in zip(names, outputs, strict=True):
            args = [e.load(x, (AT,)), e.load(y, (AT,))]
            two = name in ("pow", "fmod")
            body.append(Store(out, (AT,), e.call(name, *args[: 1 + two])))
        loop = For(J, SIZE, body, True, vector(width))
        native = program([loop], sizes=[N], inputs=[x, y], outputs=outputs)
        results.append(call(compile_program(native, host()), [50], inputs))
    for result in results[1:]:
        for got, wanted, name in zip(result, results[0], names, strict=True):
            assert_same_bits(got, wanted, name)
    np.testing.assert_allclose(results[0][2], np.sin(inputs[0]), rtol=1e-15)
    np.testing.assert_array_equal(results[0][4], np.fmod(*inputs))


# --- vector loops ---------------------------------------------------------------------


LONG, DOUBLE = Var("long", int64), Var("double", int64)


def lengths(n: int) -> list[int]:
    """The sizes of `access` for an extent of `n`."""
    return [n, 3 * n + 8, 2 * n]


def access(dtype: DType, width: int, extent: Expr) -> Program:
    """A loop with an access of each kind, local variables, and accumulators."""
    if extent.is_const:
        long, double = (e.index(n) for n in lengths(extent.attr)[1:])
    else:
        long, double = e.read(LONG), e.read(DOUBLE)
    a = Buffer("a", dtype, (long,), "input")
    order = Buffer("order", int64, (extent,), "input")
    table = Buffer("table", dtype, (extent, e.index(5)), "input")
    outs = [Buffer(f"out{k}", dtype, (extent,), "output") for k in range(7)]
    spread = Buffer("spread", dtype, (double,), "output")
    count, largest = (
        Buffer(name, kind, (), "output")
        for name, kind in (("count", int64), ("largest", dtype))
    )
    last = e.sub(extent, e.index(1))
    near, far = Var("near", dtype), Var("far", dtype)
    top, total, local = Var("top", dtype), Var("total", int64), Var("local", dtype)
    place = Var("place", int64)
    divided = e.binary("div", e.index(100), e.add(e.load(order, (AT,)), e.index(1)))
    body: list[Stmt] = [
        Let(place, e.add(e.mul(AT, e.index(2)), e.index(3))),
        Let(far, e.load(a, (e.read(place),))),  # strided
        Let(near, e.load(table, (e.index(0), e.index(2)))),  # the same for all
        Store(outs[0], (AT,), e.read(far)),
        Store(outs[1], (AT,), e.load(a, (e.sub(last, AT),))),  # reversed
        Store(outs[2], (AT,), e.load(a, (e.load(order, (AT,)),))),  # gathered
        Store(outs[3], (AT,), e.load(table, (AT, e.index(2)))),
        Store(outs[4], (AT,), e.cast(AT, dtype)),
        Store(outs[5], (AT,), e.binary("max", e.load(a, (AT,)), e.read(near))),
        Declare(local, e.load(a, (AT,))),
        Assign(local, e.binary("max", e.read(local), e.read(far))),
        Store(outs[6], (e.sub(last, AT),), e.read(local)),  # reversed
        Store(spread, (e.mul(AT, e.index(2)),), e.load(a, (AT,))),
        Store(
            spread,
            (e.add(e.mul(e.load(order, (AT,)), e.index(2)), e.index(1)),),
            e.read(near),
        ),
        Accumulate(top, "max", e.load(a, (AT,))),
        Accumulate(total, "add", divided),
    ]
    return program(
        [
            Declare(top, e.const(0, dtype)),
            Declare(total, e.index(0)),
            For(J, extent, body, True, vector(width)),
            Store(count, (), e.read(total)),
            Store(largest, (), e.read(top)),
        ],
        sizes=[N, LONG, DOUBLE],
        inputs=[a, order, table],
        outputs=[*outs, spread, count, largest],
    )


@pytest.mark.parametrize("target", ["host", "avx2"])
@pytest.mark.parametrize(
    "dtype", [float64, float32, dtypes.int8, dtypes.float16], ids=str
)
def test_every_access_of_a_vector_loop_agrees_for_every_remainder(
    dtype: DType, target: str
) -> None:
    if target == "avx2" and not host().has("avx2"):
        pytest.skip("not an x86 CPU")
    cpu = host() if target == "host" else avx2()
    random = np.random.default_rng(0)
    symbolic = {w: compile_program(access(dtype, w, SIZE), cpu) for w in (4, 8, 32)}
    for n in (1, 2, 3, 7, 8, 9, 31, 33, 70):
        a = random.integers(-100, 100, 3 * n + 8).astype(dtype.dtype)
        inputs = [a, random.permutation(n), np.resize(a, (n, 5))]
        serial = access(dtype, 1, SIZE)
        for kernel in symbolic.values():
            compare(kernel, lengths(n), inputs, serial)
        fixed = compile_program(access(dtype, 8, e.index(n)), cpu)
        compare(fixed, lengths(n), inputs, serial)


def conditional(dtype: DType, width: int, extent: Expr) -> Program:
    """A loop with a read of each kind under a condition that some indices miss."""
    a = Buffer("a", dtype, (extent,), "input")
    order = Buffer("order", int64, (extent,), "input")
    none = Buffer("none", dtype, (e.index(0),), "input")
    outs = [Buffer(f"out{k}", dtype, (extent,), "output") for k in range(7)]
    last = e.sub(extent, e.index(1))
    before, after = e.sub(AT, e.index(3)), e.add(AT, e.index(2))
    near = e.compare("ge", before, e.index(0))
    there, beyond = e.compare("lt", after, extent), e.compare("lt", AT, e.index(0))
    some = e.compare("lt", e.index(0), e.load(order, (e.index(0),)))
    twice = e.mul(AT, e.index(2))
    found = e.load(order, (after,), there)
    reads = [
        e.load(a, (before,), near),
        e.load(a, (e.sub(last, after),), there),  # reversed
        e.load(a, (twice,), e.compare("lt", twice, extent)),
        e.load(a, (found,), there),  # gathered, by what is read under the condition
        e.load(none, (AT,), beyond),
        e.load(a, (AT,), some),  # the same condition for all
        e.select(near, e.load(a, (before,), near), e.load(none, (AT,), beyond)),
    ]
    body: list[Stmt] = [
        Store(out, (AT,), read) for out, read in zip(outs, reads, strict=True)
    ]
    return program(
        [For(J, extent, body, True, vector(width))],
        sizes=[N],
        inputs=[a, order, none],
        outputs=outs,
    )


@pytest.mark.parametrize("target", ["host", "avx2"])
@pytest.mark.parametrize(
    "dtype", [float64, float32, dtypes.int8, dtypes.float16, bool_], ids=str
)
def test_where_a_condition_is_false_no_memory_is_read(
    dtype: DType, target: str
) -> None:
    if target == "avx2" and not host().has("avx2"):
        pytest.skip("not an x86 CPU")
    cpu = host() if target == "host" else avx2()
    random = np.random.default_rng(0)
    symbolic = {
        w: compile_program(conditional(dtype, w, SIZE), cpu) for w in (1, 8, 32)
    }
    for n in (1, 2, 3, 8, 31, 33, 70):
        a = random.integers(-100, 100, n).astype(dtype.dtype)
        arrays = (a, random.permutation(n), a[:0])
        inputs = [guarded.copied(x, host()) for x in arrays]
        serial = conditional(dtype, 1, SIZE)
        for kernel in symbolic.values():
            compare(kernel, [n], inputs, serial)
        fixed = compile_program(conditional(dtype, 8, e.index(n)), cpu)
        compare(fixed, [n], inputs, serial)


def rows(dtype: DType, shape: tuple[int, ...], width: int, extent: Expr) -> Program:
    """A loop that reads and writes each element of rows, and a sum over one of them."""
    places = list(np.ndindex(shape))
    whole = (extent, *map(e.index, shape))
    a, b = (Buffer(name, dtype, whole, "input") for name in ("a", "b"))
    count = e.index(extent.attr * len(places)) if extent.is_const else e.read(LONG)
    flat = Buffer("flat", dtype, (count,), "input")
    out, changed, half = (
        Buffer(name, dtype, whole, "output") for name in ("out", "changed", "half")
    )
    first = Buffer("first", dtype, (extent,), "output")
    largest = Buffer("largest", dtype, (), "output")
    top = Var("top", dtype)

    def at(place: tuple[int, ...]) -> tuple[Expr, ...]:
        return (AT, *map(e.index, place))

    pairs = list(zip(places, reversed(places), strict=True))
    body: list[Stmt] = [
        *(Store(out, at(p), e.binary("max", e.load(a, at(p)), e.load(b, at(q))))
          for p, q in pairs),
        # Each element but the first is computed of one that is stored before.
        *(Store(changed, at(p), e.load(out, at(places[k - 1])) if k % 2 else
                e.load(changed, at(places[k - 1])) if k else e.load(b, at(p)))
          for k, p in enumerate(places)),
        *(Store(half, at(p), e.load(a, at(p))) for p in places[::2]),
        Store(first, (AT,), e.load(flat, (e.mul(AT, e.index(len(places))),))),
        Accumulate(top, "max", e.load(a, at(places[-1]))),
    ]  # fmt: skip
    others = Var("i", int64)
    zeros = [
        Store(half, (e.read(others), *map(e.index, p)), e.const(0, dtype))
        for p in places[1::2]
    ]
    return program(
        [
            Declare(top, e.const(0, dtype)),
            For(J, extent, body, True, vector(width)),
            For(others, extent, list(zeros), True),
            Store(largest, (), e.read(top)),
        ],
        sizes=[N, LONG],
        inputs=[a, b, flat],
        outputs=[out, changed, half, first, largest],
    )


@pytest.mark.parametrize("target", ["host", "avx2"])
@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        *((float64, (2,)), (float64, (3,)), (float32, (3,)), (float32, (2, 3))),
        *((float32, (3, 3)), (float32, (10,)), (dtypes.int8, (1, 3))),
        *((dtypes.float16, (3,)), (dtypes.bfloat16, (2,)), (bool_, (4,))),
    ],
    ids=str,
)
def test_elements_of_rows_agree_for_every_remainder(
    dtype: DType, shape: tuple[int, ...], target: str
) -> None:
    if target == "avx2" and not host().has("avx2"):
        pytest.skip("not an x86 CPU")
    cpu = host() if target == "host" else avx2()
    random = np.random.default_rng(0)
    symbolic = {w: compile_program(rows(dtype, shape, w, SIZE), cpu) for w in (4, 32)}
    for n in (1, 7, 8, 33, 70):
        x = [random.integers(-100, 100, (n, *shape)).astype(dtype.dtype) for _ in "ab"]
        inputs = [guarded.copied(y, host()) for y in (*x, x[0].ravel())]
        serial = rows(dtype, shape, 1, SIZE)
        for kernel in symbolic.values():
            compare(kernel, [n, x[0].size], inputs, serial)
        fixed = compile_program(rows(dtype, shape, 8, e.index(n)), cpu)
        compare(fixed, [n, x[0].size], inputs, serial)


def columns(dtype: DType, count: int, width: int, extent: Expr) -> Program:
    """A loop whose iterations read rows, and write columns: next to each other, with a
    gap, and of an array that it changes."""
    whole = (extent, e.index(2 * count + 1))
    a = Buffer("a", dtype, whole, "input")
    turned = (e.index(count), extent)
    out, changed, some = (
        Buffer(name, dtype, shape, "output")
        for name, shape in (("out", turned), ("changed", whole), ("some", turned))
    )
    body: list[Stmt] = []
    for k in range(count):
        at = (e.index(k), AT)
        body += [
            Store(out, at, e.load(a, (AT, e.index(k + 1)))),
            Store(changed, (AT, e.index(k)), e.load(a, (AT, e.index(k)))),
            Store(some, at, e.load(changed, (AT, e.index(k // 2)))),
        ]
    others = Var("i", int64)
    rest = [
        Store(changed, (e.read(others), e.index(k)), e.const(0, dtype))
        for k in range(count, 2 * count + 1)
    ]
    loops: list[Stmt] = [
        For(others, extent, [*rest], True),
        For(J, extent, body, True, vector(width)),
    ]
    return program(loops, sizes=[N], inputs=[a], outputs=[out, changed, some])


@pytest.mark.parametrize(
    ("dtype", "count", "target"),
    in_turn(
        [float64, float32, dtypes.float16, dtypes.bfloat16, dtypes.int8, bool_],
        [2, 3, 4, 5, 8, 13, 16],
        of=["host", "avx2"],
    ),
    ids=str,
)
def test_columns_agree_for_every_remainder(
    dtype: DType, count: int, target: str
) -> None:
    if target == "avx2" and not host().has("avx2"):
        pytest.skip("not an x86 CPU")
    cpu = host() if target == "host" else avx2()
    random = np.random.default_rng(0)
    symbolic = [compile_program(columns(dtype, count, w, SIZE), cpu) for w in (4, 16)]
    for n in (1, 4, 7, 16, 35):
        x = random.integers(-100, 100, (n, 2 * count + 1)).astype(dtype.dtype)
        inputs = [guarded.copied(x, host())]
        serial = columns(dtype, count, 1, SIZE)
        for kernel in symbolic:
            compare(kernel, [n], inputs, serial)
        for w in (8, 16):
            fixed = compile_program(columns(dtype, count, w, e.index(n)), cpu)
            compare(fixed, [n], inputs, serial)


def test_a_vector_loop_of_no_iterations_reads_and_writes_nothing() -> None:
    x = Buffer("x", float64, (SIZE,), "input")
    out, total = (
        Buffer("out", float64, (SIZE,), "output"),
        Buffer("t", float64, (), "output"),
    )
    s = Var("s", float64)
    body: list[Stmt] = [
        Store(out, (AT,), e.load(x, (e.index(0),))),
        Accumulate(s, "add", e.load(x, (AT,))),
    ]
    native = program(
        [
            Declare(s, e.const(-0.0, float64)),
            For(J, SIZE, body, True, vector(8)),
            Store(total, (), e.read(s)),
        ],
        sizes=[N],
        inputs=[x],
        outputs=[out, total],
    )
    [_, got] = compare(native, [0], [np.zeros(0)])
    assert np.signbit(got)


@pytest.mark.parametrize("combine", ["add", "mul", "min", "max", "and", "or"])
def test_an_accumulator_is_combined_in_an_order_that_the_extent_decides(
    combine: str,
) -> None:
    dtype = dtypes.int32 if combine in ("and", "or") else float32
    x, out = Buffer("x", dtype, (SIZE,), "input"), Buffer("out", dtype, (), "output")
    s = Var("s", dtype)
    start = e.const({"mul": 1, "and": -1}.get(combine, 0), dtype)
    native = program(
        [
            Declare(s, start),
            For(J, SIZE, [Accumulate(s, combine, e.load(x, (AT,)))], True, vector(64)),
            Store(out, (), e.read(s)),
        ],
        sizes=[N],
        inputs=[x],
        outputs=[out],
    )
    kernel = compile_program(native, host())
    random = np.random.default_rng(0)
    for n in (1, 63, 64, 65, 1000):
        values = (random.standard_normal(n) * 3).astype(dtype.dtype)
        # At other addresses too, of another alignment.
        moved = np.concatenate([values[:1], values])[1:]
        first, again = (call(kernel, [n], [v])[0] for v in (values, moved))
        assert_same_bits(first, again, combine)
        [wanted] = interpreter.run(native, [n], [values])
        np.testing.assert_allclose(first, wanted, rtol=1e-3)


def test_a_masked_rest_does_not_divide_by_what_is_not_there() -> None:
    x, y = (Buffer(name, dtypes.int32, (SIZE,), "input") for name in ("x", "y"))
    out = Buffer("out", dtypes.int32, (SIZE,), "output")
    value = e.div(e.load(x, (AT,)), e.load(y, (AT,)))
    loop = For(J, SIZE, [Store(out, (AT,), value)], True, vector(16))
    native = program([loop], sizes=[N], inputs=[x, y], outputs=[out])
    seven = np.full(3, 7, np.int32)
    [got] = compare(native, [3], [seven, seven])
    np.testing.assert_array_equal(got, 1)


@pytest.mark.parametrize("is_gather", [False, True])
def test_a_masked_load_comes_before_the_store_that_follows_it(is_gather: bool) -> None:
    """LLVM 22 moves it to a select under its mask, whatever is written in between."""
    x = Buffer("x", float64, (SIZE,), "input")
    carry = Buffer("carry", float64, (SIZE,), "output")
    out = Buffer("out", float64, (), "output")
    value, total = Var("value", float64), Var("total", float64)
    at = e.binary("rem", e.mul(AT, e.index(3)), SIZE) if is_gather else AT
    steps: list[Stmt] = [
        Let(value, e.load(carry, (at,))),
        Store(carry, (at,), e.const(0.0, float64)),
        Accumulate(total, "add", e.read(value)),
    ]
    native = program(
        [
            Copy(carry, x),
            Declare(total, e.const(0.0, float64)),
            For(J, SIZE, steps, True, vector(4)),
            Store(out, (), e.read(total)),
        ],
        sizes=[N],
        inputs=[x],
        outputs=[carry, out],
    )
    kernel = compile_program(native, host())
    for n in (1, 2, 4, 5, 7, 11):
        ones = np.ones(n)
        zeros, found = call(kernel, [n], [ones])
        np.testing.assert_array_equal(zeros, 0.0)
        assert found == n


NARROWED: Final = [
    (dtypes.int32, dtypes.int8),
    (dtypes.int32, dtypes.int16),
    (int64, dtypes.int32),
    (float32, dtypes.bfloat16),
    (float32, bool_),
]


@pytest.mark.parametrize(("wide", "narrow"), NARROWED, ids=str)
@pytest.mark.parametrize("binding", ["vector", "gang", "gang of a constant extent"])
def test_a_store_of_one_known_lane_writes_one_narrower_element(
    binding: str, wide: DType, narrow: DType
) -> None:
    """Where LLVM 22 sees that one lane of a mask is set, it stores the element as wide
    as it was computed."""
    x = Buffer("x", wide, (SIZE,), "input")
    m, value = Var("m", int64), Var("value", wide)
    body: list[Stmt]
    if binding == "vector":
        # LLVM computes the extent, which is 1.
        out, last = Buffer("out", narrow, (e.index(1),), "output"), 0
        body = [
            Let(m, e.add(SIZE, e.index(1))),
            For(
                J,
                e.sub(e.read(m), SIZE),
                [Store(out, (AT,), e.cast(e.load(x, (AT,)), narrow))],
                True,
                vector(16),
            ),
        ]
    else:
        out, last = Buffer("out", narrow, (e.index(8),), "output"), 7
        store = Store(out, (AT,), e.cast(e.read(value), narrow))
        test = e.compare("eq", AT, e.index(last))
        lanes: list[Stmt] = [Let(value, e.load(x, (AT,))), If(test, [store])]
        extent = e.index(8) if "constant" in binding else SIZE
        body = [For(J, extent, lanes, True, Binding("gang", 8))]
    native = program(body, sizes=[N], inputs=[x], outputs=[out])
    [got] = call(compile_program(native, host()), [8], [np.full(8, 5, wide.dtype)])
    assert got[last] == narrow.dtype.type(5)


# --- statements -----------------------------------------------------------------------


def test_loops_and_branches_nest() -> None:
    # How many steps Collatz takes from each of 1 .. n.
    out = Buffer("steps", int64, (SIZE,), "output")
    x, steps = Var("x", int64), Var("steps_taken", int64)
    one, two = e.index(1), e.index(2)
    is_odd = e.compare("eq", e.binary("and", e.read(x), one), one)
    native = program(
        [
            For(
                J,
                SIZE,
                [
                    Declare(x, e.add(AT, one)),
                    Declare(steps, e.index(0)),
                    While(
                        [],
                        e.compare("ne", e.read(x), one),
                        [
                            If(
                                is_odd,
                                [Assign(x, e.add(e.mul(e.read(x), e.index(3)), one))],
                                [Assign(x, e.div(e.read(x), two))],
                            ),
                            Assign(steps, e.add(e.read(steps), one)),
                        ],
                    ),
                    Store(out, (AT,), e.read(steps)),
                ],
                independent=True,
            )
        ],
        sizes=[N],
        outputs=[out],
    )
    [got] = compare(native, [30])
    assert got[26] == 111


def test_the_head_of_a_while_runs_once_more_than_its_body() -> None:
    out = Buffer("out", int64, (e.index(2),), "output")
    heads, bodies, now = Var("heads", int64), Var("bodies", int64), Var("now", int64)
    native = program(
        [
            Declare(heads, e.index(0)),
            Declare(bodies, e.index(0)),
            While(
                [
                    Assign(heads, e.add(e.read(heads), e.index(1))),
                    Let(now, e.read(heads)),
                ],
                e.compare("le", e.read(now), SIZE),
                [Assign(bodies, e.add(e.read(bodies), e.read(now)))],
            ),
            Store(out, (e.index(0),), e.read(heads)),
            Store(out, (e.index(1),), e.read(bodies)),
        ],
        sizes=[N],
        outputs=[out],
    )
    [got] = compare(native, [4])
    assert list(got) == [5, 10]


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_value_read_before_a_write_is_not_the_value_after_it(is_shared: bool) -> None:
    x, out = (
        Buffer("x", int64, (e.index(2),), "arena"),
        Buffer("out", int64, (e.index(3),), "output"),
    )
    zero, one = e.index(0), e.index(1)
    shared = e.load(x, (zero,))

    def first() -> Expr:  # evaluated where each statement stands
        return shared if is_shared else e.load(x, (zero,))

    v = Var("v", int64)
    native = program(
        [
            Store(x, (zero,), e.index(5)),
            Declare(v, first()),
            Store(out, (zero,), first()),
            Store(x, (zero,), e.add(first(), one)),
            Store(out, (one,), first()),
            If(e.compare("gt", first(), zero), [Store(x, (zero,), e.read(v))]),
            Store(out, (e.index(2),), first()),
        ],
        outputs=[out],
        arena=[x],
    )
    [got] = compare(native)
    assert list(got) == [5, 6, 5]


@pytest.mark.parametrize("steps", [0, 1, 2, 7])
def test_swapped_buffers_exchange_their_memory(steps: int) -> None:
    x, out = (
        Buffer("x", float64, (SIZE,), "input"),
        Buffer("out", float64, (SIZE,), "output"),
    )
    a, b = (Buffer(name, float64, (SIZE,), "arena") for name in "ab")
    i = Var("i", int64)
    value = e.add(e.load(a, (AT,)), e.load(a, (e.index(0),)))
    native = program(
        [
            Copy(a, x),
            For(
                i,
                e.index(steps),
                [
                    For(J, SIZE, [Store(b, (AT,), value)], True, vector(8)),
                    Swap(a, b),
                ],
            ),
            Copy(out, a),
        ],
        sizes=[N],
        inputs=[x],
        outputs=[out],
        arena=[a, b],
    )
    compare(native, [19], [np.arange(19.0) + 1])


def test_a_strided_source_is_copied_element_by_element() -> None:
    x = Buffer(
        "x", float32, (e.index(3), e.index(4)), "input", (e.index(1), e.index(3))
    )
    out = Buffer("out", float32, (e.index(3), e.index(4)), "output")
    columns = np.arange(12, dtype=np.float32).reshape(4, 3)
    kernel = compile_program(program([Copy(out, x)], inputs=[x], outputs=[out]), host())
    [got] = call(kernel, [], [columns])
    np.testing.assert_array_equal(got, columns.T)


@pytest.mark.parametrize("count", [3, 1000], ids=["embedded", "linked"])
def test_constants_are_part_of_the_code_or_linked_to_it(count: int) -> None:
    data = np.arange(count) * 2.5
    table = Buffer("table", float64, (e.index(count),), "constant", data=data)
    out = Buffer("out", float64, (e.index(count),), "output")
    loop = For(J, e.index(count), [Store(out, (AT,), e.load(table, (AT,)))])
    compare(program([loop], outputs=[out], constants=[table]))


def test_a_growing_buffer_keeps_what_it_has() -> None:
    rows = Var("rows", int64)
    stack = Buffer("stack", int64, (e.read(rows), e.index(2)), "arena")
    out = Buffer("out", int64, (SIZE, e.index(2)), "output")
    k, c, d = Var("k", int64), Var("c", int64), Var("d", int64)
    value = e.add(e.mul(e.read(k), e.index(10)), e.read(c))
    native = program(
        [
            Declare(rows, e.index(0)),
            Allocate(stack),
            For(
                k,
                SIZE,
                [
                    Assign(rows, e.add(e.read(k), e.index(1))),
                    Allocate(stack, again=True, keeps=True),
                    For(c, e.index(2), [Store(stack, (e.read(k), e.read(c)), value)]),
                ],
            ),
            For(
                J,
                SIZE,
                [
                    For(
                        d,
                        e.index(2),
                        [Store(out, (AT, e.read(d)), e.load(stack, (AT, e.read(d))))],
                    )
                ],
            ),
        ],
        sizes=[N],
        outputs=[out],
        arena=[stack],
    )
    compare(native, [100])


def test_a_trap_leaves_with_its_site_and_values() -> None:
    x, out = (
        Buffer("x", dtypes.int32, (SIZE,), "input"),
        Buffer("out", int64, (), "output"),
    )
    t = Buffer("t", int64, (e.mul(SIZE, e.index(1000)),), "arena")  # to be given back
    value = e.load(x, (AT,))
    native = program(
        [
            Store(t, (e.index(0),), e.index(0)),
            For(
                J,
                SIZE,
                [
                    Trap(
                        e.compare("lt", value, e.const(0, dtypes.int32)), 1, (AT, value)
                    )
                ],
            ),
            Store(out, (), e.index(1)),
        ],
        sizes=[N],
        inputs=[x],
        outputs=[out],
        arena=[t],
    )
    kernel = compile_program(native, host())
    assert call(kernel, [3], [np.array([3, 0, -7], np.int32)]) == (1, 2, -7)
    assert call(kernel, [3], [np.array([3, 0, 7], np.int32)])[0] == 1


def test_a_deep_chain_of_operations_is_emitted_without_recursion() -> None:
    out = Buffer("out", float64, (), "output")
    x = Var("x", float64)
    value = e.read(x)
    for _ in range(5000):
        value = e.add(value, e.const(1, float64))
    native = program(
        [Declare(x, e.const(0, float64)), Store(out, (), value)], outputs=[out]
    )
    assert call(compile_program(native, host()), [], [])[0] == 5000


# --- targets --------------------------------------------------------------------------


def test_a_reduction_is_wider_than_another_loop() -> None:
    target = CpuTarget("x86_64-unknown-linux-gnu", "", "skylake", AVX2)
    assert target.vector_width(float64) == 4
    assert target.vector_width(dtypes.float16) == 8
    assert target.vector_width(float32, reduces=True) == 32


def test_a_cpu_without_fma_is_refused() -> None:
    target = CpuTarget("x86_64-unknown-linux-gnu", "", "core2", "+sse4.2,+avx2,-fma")
    with pytest.raises(CompileError, match=r"lacks fma, f16c\."):
        target.check()


def test_a_graph_is_compiled_once_for_each_target() -> None:
    if not host().has("avx2"):
        pytest.skip("not an x86 CPU")
    x = EagerTensor(np.linspace(-3, 3, 75))
    graph = hf.trace(lambda x: hf.sin(x) * 2.0, x).graph
    here, older = Executable(graph), Executable(graph, target=avx2())
    assert Executable(graph, target=host()).kernel is here.kernel
    assert Executable(graph, target=avx2()).kernel is older.kernel
    assert here.kernel is not older.kernel
    assert "vector 4 " in older.loop_ir
    [x_here], [x_older] = here([x]), older([x])
    assert_same_bits(x_here.array, x_older.array, "sin")


def test_invalid_text_is_a_compile_error() -> None:
    with pytest.raises(CompileError, match="invalid LLVM IR"):
        jit(host()).compile("define i64 @f() { ret i32 0 }")


def test_a_missing_symbol_is_a_compile_error() -> None:
    code = jit(host()).compile(
        "declare void @nowhere()\ndefine void @f() { call void @nowhere() ret void }"
    )
    with pytest.raises(CompileError, match="linking failed"):
        jit(host()).link([code], ["f"], {})


if __name__ == "__main__":
    check_operations(host() if sys.argv[1] == "host" else avx2())


def test_a_masked_load_of_no_lane_has_an_address_that_can_be_read() -> None:
    """A fault that the processor suppresses takes hundreds of cycles."""
    jitted = hf.jit(lambda x: hf.sum(hf.roll(x, 1) * x))
    jitted(np.arange(64.0))
    lines = [line.strip() for line in jitted.llvm_ir.splitlines()]
    chosen = {
        line.split(" = ")[0]
        for line in lines
        if " = select i1 " in line and line.endswith("ptr @hf.zeros")
    }
    loads = [x for x in lines if "call <" in x and "@llvm.masked.load" in x]
    if host().has("avx"):
        assert loads
    for line in loads:
        address = line.split("(ptr align 8 ")[1].split(",")[0]
        assert address in chosen, line


def test_elements_a_stride_apart_have_addresses_one_after_the_other() -> None:
    """A product of positions and stride in vectors of i64 takes many instructions."""
    jitted = hf.jit(lambda x: hf.sin(x[::3]))
    jitted(np.arange(64.0))
    lines = [line.strip() for line in jitted.llvm_ir.splitlines()]
    products = [x for x in lines if re.search(r"= mul <\d+ x i64>", x)]
    assert host().has_masks or not products


def _blocks(text: str) -> dict[str, list[str]]:
    """The lines of each basic block of LLVM IR, by its label."""
    blocks: dict[str, list[str]] = {}
    label = ""
    for line in text.splitlines():
        if line.endswith(":"):
            label = line[:-1]
        blocks.setdefault(label, []).append(line.strip())
    return blocks


def test_index_arithmetic_that_no_iteration_changes_is_in_preheaders() -> None:
    def f(x: Any, i: Any) -> Any:
        def body(k: Any, y: Any) -> Any:
            return hf.sin(y) + x[:, i, k]

        return hf.fori_loop(0, 40, body, hf.zeros((100,), dtype=float64))

    jitted = hf.jit(f)
    jitted(np.ones((100, 30, 40)), np.array(3))
    lines = jitted.llvm_ir.splitlines()
    [product] = [k for k, x in enumerate(lines) if re.search(r"= mul i64 %\S+, 40$", x)]
    [check] = [k for k, x in enumerate(lines) if re.match(r"trap\.\d+:", x)]
    assert product < check  # which each step makes


def test_equal_operations_of_equal_registers_are_one_instruction() -> None:
    jitted = hf.jit(lambda x, y: (hf.sin(x) * y[:, 3], hf.cos(x) - y[:, 3]))
    jitted(np.ones(1000), np.ones((1000, 7)))
    for label, lines in _blocks(jitted.llvm_ir).items():
        pure = [x.split(" = ")[1] for x in lines if re.search(r" = (mul|add) ", x)]
        assert len(pure) == len(set(pure)), label


def test_an_index_that_is_checked_is_computed_once() -> None:
    def f(x: Any) -> Any:
        bins = (x * 4.0).astype(np.int32)
        return hf.segment_sum(hf.ones_like(bins), bins, 9)

    jitted = hf.jit(f)
    jitted(np.linspace(0.0, 3.0, 1000))
    lines = jitted.llvm_ir.splitlines()
    assert len([x for x in lines if " = load double" in x]) == 1


def test_rows_of_three_are_read_and_written_as_vectors() -> None:
    jitted = hf.jit(lambda x: hf.stack([x[:, 1] * 2.0, x[:, 2], x[:, 0]], axis=1))
    jitted(np.ones((4800, 3)))
    text = jitted.llvm_ir
    assert "shufflevector" in text
    assert "gather" not in text
    assert "scatter" not in text
    assert "insertelement" not in text


@pytest.mark.parametrize("n", [1, 40])
def test_a_large_body_of_few_vectors_is_emitted_once(n: int) -> None:
    def f(x: Any, y: Any) -> Any:
        for _ in range(n):
            x = (x ^ y) * 3 + y
        return x

    jitted, length = hf.jit(f), 2 * host().vector_width(dtypes.int64)
    x = np.arange(length)
    np.testing.assert_array_equal(np.asarray(jitted(x, x + 1)), f(x, x + 1))
    products = len(re.findall(r" = mul <\d+ x i64>", jitted.llvm_ir))
    assert products == (2 if n == 1 else n)


def test_a_long_module_leaves_no_option_of_llvm_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Others in the process, as Numba, compile with the same LLVM."""
    compiler = jit(host())
    given: list[str] = []
    right = compiler.llvm.set_option

    def set_option(name: str, option: str) -> None:
        given.append(option)
        right(name, option)

    monkeypatch.setattr(compiler.llvm, "set_option", set_option)
    filler = "\n".join("; a line" for _ in range(400))
    compiler.compile(f"{filler}\ndefine void @long() {{ ret void }}")
    assert given == ["-disable-lsr=true", "-disable-lsr=false"]


def test_an_index_that_is_never_negative_is_divided_as_unsigned() -> None:
    def body(k: Any, y: Any) -> Any:
        return y.at[(k + 1) % 1000].set(y[k % 1000] * 0.5)

    jitted = hf.jit(lambda x: hf.fori_loop(0, 5000, body, x))
    jitted(np.ones(1000))
    assert "urem i64" in jitted.llvm_ir
    assert "srem i64" not in jitted.llvm_ir


def test_a_division_of_what_may_be_negative_is_signed() -> None:
    jitted = hf.jit(lambda k: hf.remainder(k - 3, 7))
    assert int(jitted(np.array(1))) == 5
    assert "urem i64" not in jitted.llvm_ir


def test_the_minimum_of_a_quotient_and_zero_does_not_abort_llvm() -> None:
    """It took this for a conversion that saturates at integers of no bits."""

    def step(_: Any, a: Any, b: Any, c: Any) -> Any:
        b = b + hf.minimum(c[0] - b[0], c[0] // 7)
        c = c + (hf.maximum(a[0] ^ a[0], b[0] + c[0]) + a[0] // 7)
        return b, c, c

    def f(x: Any) -> Any:
        batched = hf.vmap(lambda a, b, c: step(0, a, b, c))
        return hf.fori_loop(0, 1, lambda _, a, b, c: batched(a, b, c), (x, x, x))

    x = (np.arange(48).reshape(3, 16, 1) * 5).astype("uint8")
    g = hf.vmap(f)
    with hf.debug():
        expected = g(hf.asarray(x))
    for found, want in zip(hf.jit(g)(x), expected, strict=True):
        np.testing.assert_array_equal(np.asarray(found), np.asarray(want))
