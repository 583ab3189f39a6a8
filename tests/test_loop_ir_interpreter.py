"""The reference interpreter: each operation, statement and binding, against NumPy."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from hopflow import dtypes
from hopflow.dtypes import DType, bool_, float32, float64, int8, int32, int64, uint8
from hopflow.errors import LoopIRError
from hopflow.loop_ir import expr as e
from hopflow.loop_ir import scalars
from hopflow.loop_ir.expr import Buffer, Expr, Var
from hopflow.loop_ir.interpreter import Trapped, run
from hopflow.loop_ir.program import (
    SERIAL,
    Accumulate,
    Allocate,
    Assign,
    Barrier,
    Binding,
    Call,
    Copy,
    Declare,
    For,
    If,
    Let,
    Program,
    Ref,
    Site,
    Stmt,
    Store,
    Swap,
    Trap,
    While,
)

pytestmark = pytest.mark.slow

N = Var("n", int64)
I64 = np.dtype(np.int64)
BINDINGS = [
    SERIAL,
    Binding("gang", 4),
    Binding("gang", 16),
    Binding("threads"),
    Binding("grid"),
    Binding("block"),
]


def integer(name: str) -> Var:
    return Var(name, int64)


def buffer(name: str, space: Any, dtype: DType = int64, *shape: Any) -> Buffer:
    """A buffer of extents given as ints or as a variable; [n] by default."""
    extents = [e.index(s) if isinstance(s, int) else e.read(s) for s in shape or (N,)]
    return Buffer(name, dtype, tuple(extents), space)


def program(
    inputs: Sequence[Buffer],
    outputs: Sequence[Buffer],
    *body: Stmt,
    arena: Sequence[Buffer] = (),
    constants: Sequence[Buffer] = (),
) -> Program:
    sites = [Site("check", 0), Site("library", 1)]
    return Program(
        "f", [N], [*inputs], [*outputs], [*arena], [*constants], [*body], sites
    )


def each(var: Var, extent: Any, body: list[Stmt], binding: Binding = SERIAL) -> For:
    count = e.index(extent) if isinstance(extent, int) else e.read(extent)
    return For(var, count, body, binding is not SERIAL, binding)


# --- operations -----------------------------------------------------------------------


def evaluate(op: str, dtype: DType, *operands: Any, result: DType | None = None) -> Any:
    """One operation on operands of `dtype`, given as NumPy takes them."""
    args = tuple(Expr("var", (), dtype) for _ in operands)
    operation = scalars.operation(Expr(op, args, result or dtype))
    with np.errstate(all="ignore"):
        return operation(*(np.asarray(x).astype(dtype.dtype)[()] for x in operands))


@pytest.mark.parametrize(
    ("op", "dtype", "operands", "expected"),
    [
        ("add", int8, (127, 1), -128),
        ("sub", uint8, (0, 1), 255),
        ("mul", int8, (-128, -1), -128),
        ("neg", int8, (-128,), -128),
        ("abs", int8, (-128,), -128),
        ("not", int8, (5,), -6),
        ("not", bool_, (True,), False),
        ("div", int32, (-7, 2), -3),
        ("rem", int32, (-7, 2), -1),
        ("shl", int8, (1, 7), -128),
        ("shl", int8, (1, 8), 0),
        ("shl", int8, (1, -1), 0),
        ("lshr", int8, (-1, 1), 127),
        ("lshr", int8, (-1, 8), 0),
        ("ashr", int8, (-128, 100), -1),
        ("ashr", uint8, (128, 1), 64),
        ("popcount", int8, (-1,), 8),
        ("clz", int32, (1,), 31),
        ("clz", uint8, (0,), 8),
        ("add", bool_, (True, True), True),
        ("xor", bool_, (True, True), False),
        ("rem", float32, (-5.5, 2.0), -1.5),
        ("rint", float64, (2.5,), 2.0),
        ("copysign", float32, (1.0, -0.0), -1.0),
        ("hypot", float32, (3.0, 4.0), 5.0),
        ("logistic", float64, (0.0,), 0.5),
        ("lgamma", float64, (3.0,), math.log(2.0)),
        # Where NumPy and SciPy have another value than C, JAX and native code.
        ("lgamma", float64, (-math.inf,), math.inf),
        ("lgamma", float64, (5e-324,), -math.log(5e-324)),
        ("pow", float32, (-math.inf, 0.5), math.inf),
        ("pow", float64, (-0.0, 0.5), 0.0),
        ("erfinv", float32, (-0.0,), -0.0),
        ("nextafter", float32, (0.0, -0.0), -0.0),
    ],
)
def test_operations_are_exact(
    op: str, dtype: DType, operands: tuple[Any, ...], expected: Any
) -> None:
    got = evaluate(op, dtype, *operands)
    assert got == expected
    assert np.signbit(got) == np.signbit(expected)
    assert got.dtype == dtype.dtype


@pytest.mark.parametrize("dtype", dtypes.FLOATS, ids=str)
def test_extrema_of_floats_propagate_nan_and_order_zeros(dtype: DType) -> None:
    for op in ("min", "max"):
        assert np.isnan(evaluate(op, dtype, math.nan, 1.0))
        assert np.isnan(evaluate(op, dtype, 1.0, math.nan))
    for zeros in ((0.0, -0.0), (-0.0, 0.0)):
        assert np.signbit(evaluate("min", dtype, *zeros))
        assert not np.signbit(evaluate("max", dtype, *zeros))


@pytest.mark.parametrize(
    ("source", "target", "value", "expected"),
    [
        (float32, int8, 300.0, 127),
        (float32, int8, -300.0, -128),
        (float32, int8, -1.9, -1),
        (float64, dtypes.uint64, 1e300, 2**64 - 1),
        (float64, uint8, -1.0, 0),
        (float64, int64, math.inf, 2**63 - 1),
        (float64, int64, -math.inf, -(2**63)),
        (float32, int32, math.nan, 0),
        (int32, int8, 300, 44),
        (float64, float32, 1 + 2**-24, 1.0),
        (float64, dtypes.float16, 1e6, math.inf),
        (int64, dtypes.bfloat16, 257, 256.0),
        (bool_, float32, True, 1.0),
    ],
)
def test_casts_saturate_wrap_and_round(
    source: DType, target: DType, value: Any, expected: Any
) -> None:
    got = evaluate("cast", source, value, result=target)
    assert got == expected
    assert got.dtype == target.dtype


def test_a_bitcast_keeps_the_bits() -> None:
    assert evaluate("bitcast", float32, 1.0, result=int32) == 0x3F800000
    half = evaluate("bitcast", dtypes.bfloat16, 1.0, result=dtypes.uint16)
    assert half == 0x3F80


@pytest.mark.parametrize("dtype", dtypes.FLOATS, ids=str)
def test_fma_is_rounded_once(dtype: DType) -> None:
    eps = dtypes.finfo(dtype).eps
    exact = evaluate("fma", dtype, 1 + eps, 1 - eps, -1.0)
    assert float(exact) == -(eps**2)
    assert float(evaluate("mul", dtype, 1 + eps, 1 - eps)) == 1.0
    largest = dtypes.finfo(dtype).max
    assert evaluate("fma", dtype, largest, 2.0, -largest) == largest
    assert evaluate("fma", dtype, largest, 2.0, 0.0) == math.inf
    assert evaluate("fma", dtype, largest, largest, -math.inf) == -math.inf
    assert np.isnan(evaluate("fma", dtype, math.inf, 0.0, 1.0))
    smallest = dtypes.finfo(dtype).smallest_normal * eps
    assert evaluate("fma", dtype, smallest, 0.5, 0.0) == 0.0  # half: to even
    assert evaluate("fma", dtype, smallest, 0.75, 0.0) == smallest
    assert np.signbit(evaluate("fma", dtype, -0.0, 1.0, -0.0))
    assert not np.signbit(evaluate("fma", dtype, -0.0, 1.0, 0.0))
    assert not np.signbit(evaluate("fma", dtype, 1.0, 1.0, -1.0))


def test_fma_of_float64_agrees_with_the_sum_of_its_parts() -> None:
    random = np.random.default_rng(0)
    for x, y, z in random.normal(size=(200, 3)):
        got = evaluate("fma", float64, x, y, z)
        with np.errstate(all="ignore"):
            wide = np.longdouble(x) * np.longdouble(y) + np.longdouble(z)
        assert abs(np.longdouble(got) - wide) <= abs(np.spacing(got))


def test_nextafter_steps_in_its_own_dtype() -> None:
    for dtype in dtypes.FLOATS:
        step = evaluate("nextafter", dtype, 1.0, 2.0)
        assert float(step) == 1 + dtypes.finfo(dtype).eps


@pytest.mark.parametrize("operands", [(1, 0), (-128, -1)])
def test_a_division_that_would_trap_is_an_error(operands: tuple[int, int]) -> None:
    for op in ("div", "rem"):
        with pytest.raises(
            LoopIRError, match=r"integer division .* of i8 is evaluated"
        ):
            evaluate(op, int8, *operands)


# --- statements -----------------------------------------------------------------------


def test_elementwise_loops_and_sums_agree_with_numpy() -> None:
    x = buffer("x", "input", float32)
    y = buffer("y", "output", float32)
    s = buffer("s", "output", float32, 1)
    i, j, t = integer("i"), integer("j"), Var("t", float32)
    load = e.load(x, (e.read(i),))
    f = program(
        [x],
        [y, s],
        Declare(t, e.const(0, float32)),
        each(i, N, [Accumulate(t, "add", load)], Binding("vector", 8)),
        each(
            j,
            N,
            [
                Store(
                    y,
                    (e.read(j),),
                    e.fma(e.load(x, (e.read(j),)), e.const(2, float32), e.read(t)),
                )
            ],
            Binding("threads"),
        ),
        Store(s, (e.index(0),), e.read(t)),
    )
    values = np.arange(11, dtype=np.float32)
    doubled, total = run(f, [11], [values])
    np.testing.assert_array_equal(doubled, 2 * values + 55)
    np.testing.assert_array_equal(total, [55])


def test_inputs_may_have_any_strides_and_must_fit() -> None:
    x, y = buffer("x", "input"), buffer("y", "output")
    f = program([x], [y], Copy(y, x))
    [got] = run(f, [3], [np.arange(6)[::-2]])
    np.testing.assert_array_equal(got, [5, 3, 1])
    with pytest.raises(LoopIRError, match=r"input `x` must be i64\[4\], and is int64"):
        run(f, [4], [np.arange(3)])


def test_a_double_buffered_loop_swaps() -> None:
    y = buffer("y", "output", int64, 2)
    a, b = (buffer(name, "arena", int64, 2) for name in "ab")
    i, k = integer("i"), integer("k")
    first, second = (e.index(0),), (e.index(1),)
    f = program(
        [],
        [y],
        each(i, 2, [Store(a, (e.read(i),), e.index(1))]),
        each(
            k,
            N,
            [
                Store(b, first, e.load(a, second)),
                Store(b, second, e.add(e.load(a, first), e.load(a, second))),
                Swap(a, b),
            ],
        ),
        Copy(y, a),
        arena=[a, b],
    )
    np.testing.assert_array_equal(run(f, [5], [])[0], [8, 13])


def test_a_stack_grows_row_by_row() -> None:
    y = buffer("y", "output")
    i, j, rows = integer("i"), integer("j"), integer("rows")
    stack = Buffer("stack", int64, (e.read(rows), e.index(2)), "arena")
    at = (e.read(i), e.index(1))
    start: list[Stmt] = [Declare(rows, e.index(0)), Allocate(stack)]
    push: list[Stmt] = [
        Assign(rows, e.add(e.read(i), e.index(1))),
        Allocate(stack, again=True, keeps=True),
        Store(stack, at, e.mul(e.read(i), e.read(i))),
    ]
    back = e.sub(e.sub(e.read(N), e.index(1)), e.read(j))
    pop = Store(y, (e.read(j),), e.load(stack, (back, e.index(1))))
    loops = each(i, N, [*push]), each(j, N, [pop])
    f = program([], [y], *start, *loops, arena=[stack])
    np.testing.assert_array_equal(run(f, [4], [])[0], [9, 4, 1, 0])
    unread = Store(y, (e.index(0),), e.load(stack, (e.index(0), e.index(1))))
    with pytest.raises(LoopIRError, match=r"`stack\[0, 1\]` is out of range"):
        run(program([], [y], *start, unread, arena=[stack]), [1], [])


def test_what_is_allocated_is_new_in_each_iteration() -> None:
    y = buffer("y", "output")
    made = Buffer("made", int64, (e.add(e.read(integer("i")), e.index(1)),), "arena")
    i = made.shape[0].args[0].attr
    last = e.load(made, (e.read(i),))
    fill = Store(made, (e.read(i),), e.index(7))
    body: list[Stmt] = [Allocate(made), fill, Store(y, (e.read(i),), last)]
    f = program([], [y], each(i, N, body), arena=[made])
    np.testing.assert_array_equal(run(f, [3], [])[0], [7, 7, 7])
    body.remove(fill)
    f = program([], [y], each(i, N, body), arena=[made])
    with pytest.raises(LoopIRError, match="before it is written"):
        run(f, [3], [])
    made.shape = (e.sub(e.read(N), e.index(9)),)
    with pytest.raises(MemoryError):
        run(f, [3], [])


def test_constants_are_read() -> None:
    y = buffer("y", "output", float64, 3)
    c = buffer("c", "constant", float64, 3)
    c.data = np.array([1.0, 2.0, 4.0])
    np.testing.assert_array_equal(
        run(program([], [y], Copy(y, c), constants=[c]), [0], [])[0], c.data
    )


# --- one program, all bindings --------------------------------------------------------


def collatz(binding: Binding) -> Program:
    """The number of steps to 1: a map of a `while` of a `cond`."""
    start, steps = buffer("start", "input"), buffer("steps", "output")
    i, value, count = integer("i"), integer("value"), integer("count")
    x, one = e.read(value), e.index(1)
    odd = e.compare("eq", e.binary("and", x, one), one)
    body: list[Stmt] = [
        Declare(value, e.load(start, (e.read(i),))),
        Declare(count, e.index(0)),
        While(
            [],
            e.compare("gt", x, one),
            [
                If(
                    odd,
                    [Assign(value, e.add(e.mul(x, e.index(3)), one))],
                    [Assign(value, e.binary("div", x, e.index(2)))],
                ),
                Assign(count, e.add(e.read(count), one)),
            ],
        ),
        Store(steps, (e.read(i),), e.read(count)),
    ]
    return program([start], [steps], each(i, N, body, binding))


def collatz_steps(value: int) -> int:
    count = 0
    while value > 1:
        value = 3 * value + 1 if value % 2 else value // 2
        count += 1
    return count


@pytest.mark.parametrize("binding", BINDINGS, ids=lambda b: f"{b.kind}{b.width}")
def test_a_map_of_a_while_of_a_cond_is_the_same_under_every_binding(
    binding: Binding,
) -> None:
    values = np.arange(1, 28)
    [got] = run(collatz(binding), [27], [values])
    np.testing.assert_array_equal(got, [collatz_steps(int(v)) for v in values])


@pytest.mark.parametrize("binding", BINDINGS, ids=lambda b: f"{b.kind}{b.width}")
def test_a_map_over_nothing_is_nothing(binding: Binding) -> None:
    assert run(collatz(binding), [0], [np.zeros(0, np.int64)])[0].size == 0


@pytest.mark.parametrize("binding", BINDINGS, ids=lambda b: f"{b.kind}{b.width}")
def test_loops_within_lanes_have_their_own_extents(binding: Binding) -> None:
    y = buffer("y", "output")
    i, j, total = integer("i"), integer("j"), integer("total")
    body: list[Stmt] = [
        Declare(total, e.index(0)),
        For(j, e.read(i), [Assign(total, e.add(e.read(total), e.read(j)))]),
        Store(y, (e.read(i),), e.read(total)),
    ]
    [got] = run(program([], [y], each(i, N, body, binding)), [9], [])
    np.testing.assert_array_equal(got, [i * (i - 1) // 2 for i in range(9)])


@pytest.mark.parametrize("binding", BINDINGS, ids=lambda b: f"{b.kind}{b.width}")
def test_a_trap_fires_only_for_lanes_that_reach_it(binding: Binding) -> None:
    x, y = buffer("x", "input"), buffer("y", "output")
    i = integer("i")
    value = e.load(x, (e.read(i),))
    negative = e.compare("lt", value, e.index(0))
    big = Trap(e.compare("gt", value, e.index(99)), 0, (e.read(i), value))
    f = program(
        [x],
        [y],
        each(
            i,
            N,
            [
                If(negative, [Trap(e.const(False, bool_), 0)], [big]),
                If(negative, [], [Trap(negative, 1)]),
                Store(y, (e.read(i),), value),
            ],
            binding,
        ),
    )
    fine = np.array([1, -200, 3, -4, 99])
    np.testing.assert_array_equal(run(f, [5], [fine])[0], fine)
    with pytest.raises(Trapped, match=r"stopped at site 0 with \[3, 100\]") as caught:
        run(f, [5], [np.array([1, -200, 3, 100, 5])])
    assert (caught.value.site, caught.value.values) == (0, (3, 100))


@pytest.mark.parametrize("binding", BINDINGS, ids=lambda b: f"{b.kind}{b.width}")
def test_memory_is_touched_only_by_lanes_that_are_active(binding: Binding) -> None:
    x, y = buffer("x", "input"), buffer("y", "output")
    i = integer("i")
    inside = e.compare("gt", e.read(i), e.index(0))
    before = e.load(x, (e.sub(e.read(i), e.index(1)),))
    body: list[Stmt] = [
        If(
            inside,
            [Store(y, (e.read(i),), before)],
            [Store(y, (e.read(i),), e.index(-1))],
        )
    ]
    [got] = run(program([x], [y], each(i, N, body, binding)), [6], [np.arange(6)])
    np.testing.assert_array_equal(got, np.arange(6) - 1)


# --- barriers -------------------------------------------------------------------------


def shifted(kind: Any, *barriers: Stmt) -> Program:
    """Each iteration writes its place, waits, and reads its neighbour's."""
    y, a = buffer("y", "output"), buffer("a", "arena")
    i = integer("i")
    here = e.read(i)
    after = e.floor_mod(e.add(here, e.index(1)), e.read(N))
    body: list[Stmt] = [
        Store(a, (here,), e.mul(here, e.index(10))),
        *barriers,
        Store(y, (here,), e.load(a, (after,))),
    ]
    return program([], [y], each(i, N, body, Binding(kind)), arena=[a])


@pytest.mark.parametrize("scope", ["block", "grid"])
def test_all_iterations_arrive_at_a_barrier_before_any_goes_on(scope: Any) -> None:
    for seed in range(5):
        [got] = run(shifted(scope, Barrier(scope)), [6], [], seed=seed)
        np.testing.assert_array_equal(got, [10, 20, 30, 40, 50, 0])


@pytest.mark.parametrize("kind", ["block", "grid"])
def test_without_a_barrier_a_neighbour_may_not_have_written(kind: str) -> None:
    with pytest.raises(LoopIRError, match=r"`a\[\d\]` is read before it is written"):
        run_with_seeds(shifted(kind), [6])


def test_a_barrier_that_some_iterations_miss_is_an_error() -> None:
    f = shifted("block")
    loop = f.body[0]
    assert isinstance(loop, For)
    first = e.compare("eq", e.read(loop.var), e.index(0))
    loop.body.insert(1, If(first, [Barrier("block")]))
    with pytest.raises(
        LoopIRError, match=r"not all iterations of `i` \(block\) arrive"
    ):
        run(f, [3], [])
    loop.body[1] = If(first, [Barrier("block")], [Barrier("block")])
    with pytest.raises(LoopIRError, match="arrive at the same barrier"):
        run(f, [3], [])


def block_sums(scope: Any) -> Program:
    """The sum of every row in shared memory, and then the sum of the sums."""
    x, y = buffer("x", "input", int64, N, 4), buffer("y", "output")
    tile, sums = buffer("tile", "shared", int64, 4), buffer("sums", "arena")
    block, thread, k, g = (integer(v) for v in ("block", "thread", "k", "g"))
    row, column = e.read(block), e.read(thread)
    total, all_ = integer("total"), integer("all")
    first = e.compare("eq", column, e.index(0))
    add_up: list[Stmt] = [
        Declare(total, e.index(0)),
        For(k, e.index(4), [Accumulate(total, "add", e.load(tile, (e.read(k),)))]),
        Store(sums, (row,), e.read(total)),
    ]
    add_all: list[Stmt] = [
        Declare(all_, e.index(0)),
        For(g, e.read(N), [Accumulate(all_, "add", e.load(sums, (e.read(g),)))]),
        Store(y, (row,), e.read(all_)),
    ]
    body: list[Stmt] = [
        Store(tile, (column,), e.load(x, (row, column))),
        Barrier("block"),
        If(first, add_up),
        Barrier(scope),
        If(first, add_all),
    ]
    threads = each(thread, 4, body, Binding("block"))
    blocks = each(block, N, [threads], Binding("grid"))
    return program([x], [y], blocks, arena=[tile, sums])


def test_blocks_have_their_own_shared_memory_and_the_grid_waits_for_all() -> None:
    x = np.arange(12).reshape(3, 4)
    for seed in range(5):
        [got] = run(block_sums("grid"), [3], [x], seed=seed)
        np.testing.assert_array_equal(got, [66, 66, 66])


def run_with_seeds(f: Program, sizes: Sequence[int], *inputs: Any) -> None:
    for seed in range(10):
        run(f, sizes, inputs, seed=seed)


def test_a_block_barrier_does_not_hold_the_grid() -> None:
    with pytest.raises(LoopIRError, match=r"`sums\[\d\]` is read before it is written"):
        run_with_seeds(block_sums("block"), [3], np.zeros((3, 4), I64))


def test_the_iterations_of_a_persistent_kernel_swap_alike() -> None:
    y = buffer("y", "output")
    a, b = buffer("a", "arena"), buffer("b", "arena")
    i, step = integer("i"), integer("step")
    here = e.read(i)
    after = e.floor_mod(e.add(here, e.index(1)), e.read(N))
    swap: list[Stmt] = [Swap(a, b)]
    body: list[Stmt] = [
        Store(a, (here,), here),
        Barrier("grid"),
        For(
            step,
            e.index(3),
            [Store(b, (here,), e.load(a, (after,))), Barrier("grid"), *swap],
        ),
    ]
    f = program([], [y], each(i, N, body, Binding("grid")), Copy(y, a), arena=[a, b])
    np.testing.assert_array_equal(run(f, [5], [])[0], [3, 4, 0, 1, 2])
    body.append(If(e.compare("eq", here, e.index(0)), swap))
    with pytest.raises(
        LoopIRError, match="the iterations of `i` do not swap `a` alike"
    ):
        run(f, [5], [])


# --- memory errors --------------------------------------------------------------------


def test_an_index_out_of_range_names_the_buffer_and_the_index() -> None:
    x, y = buffer("x", "input"), buffer("y", "output")
    read = Store(y, (e.index(0),), e.load(x, (e.read(N),)))
    with pytest.raises(
        LoopIRError, match=r"`x\[3\]` is out of range: its shape is \[3\]"
    ):
        run(program([x], [y], read), [3], [np.zeros(3, I64)])
    write = Store(y, (e.index(-1),), e.index(0))
    with pytest.raises(LoopIRError, match=r"`y\[-1\]` is out of range"):
        run(program([], [y], write), [3], [])


def test_memory_is_not_read_before_it_is_written() -> None:
    y, a = buffer("y", "output", float32), buffer("a", "arena", float32, 2, 2)
    read = Let(Var("t", float32), e.load(a, (e.index(1), e.index(0))))
    with pytest.raises(LoopIRError, match=r"`a\[1, 0\]` is read before it is written"):
        run(program([], [y], read, arena=[a]), [0], [])
    b = buffer("b", "arena", float32, 2, 2)
    first = Store(a, (e.index(0), e.index(0)), e.const(1, float32))
    with pytest.raises(LoopIRError, match=r"`a\[0, 1\]` is read before it is written"):
        run(program([], [y], first, Copy(b, a), arena=[a, b]), [0], [])


def test_every_element_of_an_output_is_written() -> None:
    y = buffer("y", "output")
    with pytest.raises(LoopIRError, match=r"`y\[1\]` is read before it is written"):
        run(program([], [y], Store(y, (e.index(0),), e.index(1))), [2], [])


def test_a_value_that_another_buffer_overwrote_is_not_read() -> None:
    y = buffer("y", "output")
    a, b = buffer("a", "arena", int64, 1), buffer("b", "arena", int64, 1)
    zero = (e.index(0),)
    f = program(
        [],
        [y],
        Store(a, zero, e.index(1)),
        Store(b, zero, e.index(2)),
        Store(y, zero, e.load(a, zero)),
        arena=[a, b],
    )
    np.testing.assert_array_equal(run(f, [1], [])[0], [1])
    apart = {a: e.index(0), b: e.index(64)}
    np.testing.assert_array_equal(run(f, [1], [], offsets=apart)[0], [1])
    with pytest.raises(
        LoopIRError, match=r"`a\[0\]` is read after another buffer in its"
    ):
        run(f, [1], [], offsets={a: e.index(0), b: e.index(0)})


def test_copies_of_sizes_that_differ_are_an_error() -> None:
    x, y = buffer("x", "input", int64, 3), buffer("y", "output")
    with pytest.raises(LoopIRError, match=r"copy y <- x: the shapes \[2\] and \[3\]"):
        run(program([x], [y], Copy(y, x)), [2], [np.zeros(3, I64)])


# --- calls ----------------------------------------------------------------------------


def inverse_of_each(site: int | None) -> Program:
    x, y = (
        buffer(n, s, float64, N, 2, 2) for n, s in (("x", "input"), ("y", "output"))
    )
    i = integer("i")
    call = Call("inv", (Ref(y, (e.read(i),)), e.index(2)), site)
    return program([x], [y], Copy(y, x), each(i, N, [call]))


def test_a_call_works_on_sub_arrays_and_traps_where_it_fails() -> None:
    x = np.stack([np.array([[2.0, 1.0], [1.0, 3.0]]), 9 * np.eye(2)])
    np.testing.assert_allclose(run(inverse_of_each(1), [2], [x])[0], np.linalg.inv(x))
    x[1] = 0
    with pytest.raises(Trapped, match=r"stopped at site 1 with \[1\]"):
        run(inverse_of_each(1), [2], [x])
    run(inverse_of_each(None), [2], [x])


def test_a_call_checks_its_arrays() -> None:
    x, y = buffer("x", "input", float64), buffer("y", "output", float64)
    values = Call("syevd_values", (Ref(x), Ref(y), e.read(N)))
    with pytest.raises(LoopIRError, match=r"`a` must be \[3, 3\], and `x` gives \[3\]"):
        run(program([x], [y], values), [3], [np.zeros(3)])
    a = buffer("a", "arena", float64, 1)
    unread = Call("potrf", (Ref(a), e.index(1)))
    with pytest.raises(LoopIRError, match=r"`a\[0\]` is read before it is written"):
        run(program([], [], unread, arena=[a]), [0], [])
