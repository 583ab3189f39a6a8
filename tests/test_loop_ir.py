"""The rules of the Loop IR, each with a program that breaks it, and its text."""

import re
from typing import Any

import numpy as np
import pytest

from hopflow import dtypes
from hopflow.dtypes import DType, bool_, float32, float64, int32, int64
from hopflow.errors import LoopIRError
from hopflow.loop_ir import expr as e
from hopflow.loop_ir import walk
from hopflow.loop_ir.expr import Buffer, Expr, Var
from hopflow.loop_ir.printer import format_expr, format_program, format_statement
from hopflow.loop_ir.program import (
    Accumulate,
    Allocate,
    Assign,
    Barrier,
    Binding,
    Call,
    Copy,
    Declare,
    For,
    HostCall,
    If,
    Let,
    Program,
    Ref,
    Site,
    Stmt,
    Store,
    Swap,
    Tick,
    Trap,
    While,
)
from hopflow.loop_ir.verifier import verify

pytestmark = pytest.mark.slow

N = Var("n", int64)
TRUE = e.const(True, bool_)


def integer(name: str) -> Var:
    return Var(name, int64)


def number(value: float, dtype: DType = float32) -> Expr:
    return e.const(value, dtype)


class Example:
    """Buffers of every space, and a program around the statements of a test."""

    def __init__(self) -> None:
        n, eight = e.read(N), e.index(8)
        self.x = Buffer("x", float32, (n,), "input")
        self.m = Buffer("m", float32, (eight, eight), "input", (e.index(1), eight))
        self.y = Buffer("y", float32, (n,), "output")
        self.a = Buffer("a", float32, (eight,), "arena")
        self.b = Buffer("b", float32, (eight,), "arena")
        self.wide = Buffer("wide", float64, (eight,), "arena")
        self.tile = Buffer("tile", float32, (eight,), "shared")
        data = np.arange(3, dtype=np.int32)
        self.c = Buffer("c", int32, (e.index(3),), "constant", data=data)
        self.i, self.j = integer("i"), integer("j")
        self.t = Var("t", float32)
        self.more: list[Buffer] = []

    def program(self, *body: Stmt) -> Program:
        return Program(
            "example",
            [N],
            [self.x, self.m],
            [self.y],
            [self.a, self.b, self.wide, self.tile, *self.more],
            [self.c],
            list(body),
            [Site("index", 4)],
        )

    def at(self, buffer: Buffer, *where: Expr) -> Expr:
        return e.load(buffer, where)


@pytest.fixture
def ex() -> Example:
    return Example()


def refused(ex: Example, rule: str, *body: Stmt) -> None:
    with pytest.raises(LoopIRError, match=re.escape(rule)):
        verify(ex.program(*body))


def loop(var: Var, body: list[Stmt], kind: Any = "serial", width: int = 1) -> For:
    return For(var, e.index(8), body, kind != "serial", Binding(kind, width))


# --- variables and scopes -------------------------------------------------------------


def test_a_program_that_keeps_the_rules_passes(ex: Example) -> None:
    i = e.read(ex.i)
    verify(
        ex.program(
            Declare(ex.t, number(0)),
            loop(ex.i, [Accumulate(ex.t, "add", ex.at(ex.x, i))], "vector", 8),
            loop(ex.j, [Store(ex.y, (e.read(ex.j),), e.read(ex.t))], "threads"),
            Trap(e.compare("lt", e.read(N), e.index(0)), 0, (e.read(N),)),
        )
    )


def test_the_message_says_which_program_and_prints_the_statement(ex: Example) -> None:
    with pytest.raises(LoopIRError) as caught:
        verify(ex.program(If(TRUE, [Let(ex.t, e.read(Var("u", float32)))])))
    assert str(caught.value) == (
        "example: `u` is read where it is unknown\n  in: let t: f32 = u"
    )


@pytest.mark.parametrize("close", ["if", "for", "while"])
def test_a_variable_ends_with_its_body(ex: Example, close: str) -> None:
    inner: list[Stmt] = [Let(ex.t, number(1))]
    statements: dict[str, Stmt] = {
        "if": If(TRUE, inner),
        "for": loop(ex.i, inner),
        "while": While([], TRUE, inner),
    }
    closed = statements[close]
    use = Let(Var("u", float32), e.read(ex.t))
    refused(ex, "`t` is read where it is unknown", closed, use)
    refused(ex, "`i` is read where", loop(ex.i, []), Let(ex.j, e.read(ex.i)))


def test_the_head_of_a_while_is_open_to_test_and_body(ex: Example) -> None:
    test = Var("test", bool_)
    use = Let(Var("u", bool_), e.read(test))
    verify(ex.program(While([Let(test, TRUE)], e.read(test), [use])))
    refused(
        ex,
        "`test` is read where it is unknown",
        While([Let(test, TRUE)], e.read(test), []),
        use,
    )


def test_one_name_is_one_thing(ex: Example) -> None:
    again = Let(Var("t", float32), number(1))
    refused(ex, "the name `t` stands for two things", Let(ex.t, number(0)), again)
    refused(ex, "the name `a` stands for two things", Let(Var("a", float32), number(0)))


def test_a_variable_is_defined_once(ex: Example) -> None:
    let = Let(ex.t, number(0))
    refused(ex, "`t` is defined twice", let, If(TRUE, [let]))
    verify(ex.program(If(TRUE, [let], [let])))


def test_only_what_was_declared_is_changed(ex: Example) -> None:
    change = Assign(ex.t, number(1))
    rule = "`t` is changed, and was not made by a Declare"
    refused(ex, rule, Let(ex.t, number(0)), change)
    refused(ex, "`t` is changed where it is unknown", change)
    refused(ex, "`i` is changed, and", loop(ex.i, [Assign(ex.i, e.index(0))]))
    refused(ex, "`n` is changed, and", Assign(N, e.index(0)))


def test_values_have_the_dtype_of_what_they_go_to(ex: Example) -> None:
    wide = number(0, float64)
    rule = "the value of `t` must be f32, and is f64"
    refused(ex, rule, Let(ex.t, wide))
    refused(ex, rule, Declare(ex.t, number(0)), Assign(ex.t, wide))
    refused(ex, rule, Declare(ex.t, number(0)), Accumulate(ex.t, "add", wide))
    refused(ex, "the value stored must be f32", Store(ex.y, (e.index(0),), wide))
    refused(ex, "the test must be bool, and is i64", If(e.index(1), []))
    refused(ex, "the test must be bool, and is i64", While([], e.index(1), []))
    refused(ex, "the extent must be i64", For(ex.i, number(3), []))
    refused(ex, "`t` must be i64", For(ex.t, e.index(3), []))


def test_there_are_six_ways_to_accumulate(ex: Example) -> None:
    declare = Declare(ex.t, number(0))
    refused(
        ex, "`sub` is no way to combine", declare, Accumulate(ex.t, "sub", number(1))
    )
    refused(ex, "`or` takes integers or", declare, Accumulate(ex.t, "or", number(1)))


# --- memory ---------------------------------------------------------------------------


def test_only_outputs_and_the_arena_are_written(ex: Example) -> None:
    refused(ex, "`x` in input is written", Store(ex.x, (e.index(0),), number(0)))
    zero = e.const(0, int32)
    refused(ex, "`c` in constant is written", Store(ex.c, (e.index(0),), zero))


def test_there_is_one_index_an_axis(ex: Example) -> None:
    refused(ex, "`y` of 1 axes has 0 indices", Store(ex.y, (), number(0)))
    refused(ex, "`m` of 2 axes has 1 indices", Let(ex.t, ex.at(ex.m, e.index(0))))
    narrow = e.const(0, int32)
    refused(ex, "an index of `y` must be i64", Store(ex.y, (narrow,), number(0)))
    refused(ex, "an index of `x` must be i64", Let(ex.t, ex.at(ex.x, narrow)))


def test_every_buffer_belongs_to_the_program(ex: Example) -> None:
    other = Buffer("other", float32, (), "arena")
    refused(ex, "`other` is no buffer of the program", Store(other, (), number(0)))
    refused(ex, "`other` is no buffer of the program", Let(ex.t, ex.at(other)))


def test_a_buffer_is_read_as_its_dtype(ex: Example) -> None:
    wrong = Expr("load", (e.index(0),), float64, ex.x)
    refused(ex, "`x` is f32, and is read as f64", Let(Var("u", float64), wrong))


def declared(**change: Any) -> str:
    """What is wrong with a program of one buffer, and nothing else."""
    fields = {"name": "p", "dtype": float32, "shape": (e.read(N),), "space": "arena"}
    buffer = Buffer(**{**fields, **change})
    arena = [buffer, buffer] if change.get("name") == "twice" else [buffer]
    constants = [arena.pop()] if buffer.space == "constant" else []
    with pytest.raises(LoopIRError) as caught:
        verify(Program("f", [N], [], [], arena, constants, [], []))
    return str(caught.value)


def test_declarations_of_buffers_are_checked() -> None:
    x = Buffer("x", int64, (), "input")
    data = np.zeros(3, np.float64)
    two = (e.index(1),)
    assert declared(name="twice") == "f: `twice` is declared twice"
    assert "in output, and listed with arena and shared" in declared(space="output")
    assert "the shape of `p` reads memory" in declared(shape=(e.load(x, ()),))
    assert "`j` is read where it is unknown" in declared(shape=(e.read(integer("j")),))
    assert "an extent of `p` must be i64" in declared(shape=(number(1),))
    assert "`p` must be dense: no input" in declared(strides=two)
    assert "in constant has no data" in declared(space="constant")
    assert "in arena has its data" in declared(data=data)
    wrong = declared(space="constant", data=data, shape=(e.index(3),))
    assert "the data of `p` are float64[3]" in wrong


def test_strides_are_one_an_axis_and_sizes_are_i64(ex: Example) -> None:
    ex.m.strides = (e.index(1),)
    refused(ex, "`m`: 2 axes, 1 strides")
    with pytest.raises(LoopIRError, match="size `t` must be i64: f32"):
        verify(Program("f", [ex.t], [], [], [], [], [], []))


def test_copies_and_swaps_are_of_equal_types(ex: Example) -> None:
    refused(ex, "`x` in input is written", Copy(ex.x, ex.a))
    refused(ex, "`wide` and `a` are of different types", Copy(ex.wide, ex.a))
    refused(ex, "`a` is copied to itself", Copy(ex.a, ex.a))
    refused(ex, "`y` in output is swapped, and not in the arena", Swap(ex.a, ex.y))
    refused(ex, "`a` and `wide` are of different types", Swap(ex.a, ex.wide))
    swapped = loop(ex.i, [Swap(ex.a, ex.b)], "threads")
    before = Store(ex.a, (e.index(0),), e.const(0.0, dtypes.float32))
    refused(ex, "a swap stands in the independent loop over `i`", before, swapped)
    verify(ex.program(Copy(ex.y, ex.x), Copy(ex.a, ex.b), Swap(ex.a, ex.b)))


def test_a_buffer_is_allocated_once_before_it_is_used(ex: Example) -> None:
    size = e.read(ex.j)
    made = Buffer("made", float32, (size,), "arena")
    ex.more.append(made)
    let, allocate = Let(ex.j, e.index(3)), Allocate(made)
    use = Store(made, (e.index(0),), number(1))
    verify(ex.program(let, allocate, use))
    verify(ex.program(loop(ex.i, [let, allocate, use])))
    refused(ex, "`j` is read where it is unknown", allocate, let)
    refused(ex, "`made` is no buffer of the program here", let, use, allocate)
    inner = If(TRUE, [allocate, use])
    refused(ex, "`made` is no buffer of the program here", let, inner, use)
    refused(ex, "`made` is allocated twice", let, allocate, allocate)
    verify(ex.program(let, inner, If(TRUE, [allocate])))
    both = If(TRUE, [allocate, use], [If(TRUE, [allocate], [allocate])])
    verify(ex.program(let, both, use))
    refused(ex, "`made` is allocated twice", let, both, allocate)
    bound = loop(ex.i, [allocate], "threads")
    refused(
        ex, "`made` is allocated in the loop over `i`, bound to threads", let, bound
    )
    ex.more.clear()
    refused(ex, "`x` is allocated, and is neither", Allocate(ex.x))
    refused(ex, "`tile` in shared memory is allocated", Allocate(ex.tile))
    refused(
        ex,
        "`a` and `b` are swapped, and one of them is",
        Allocate(ex.b),
        Swap(ex.a, ex.b),
    )
    part = If(TRUE, [Allocate(ex.y)])
    refused(ex, "the output `y` is allocated in a part of the program", part)


def test_only_a_stack_that_has_memory_keeps_its_rows(ex: Example) -> None:
    refused(ex, "`b` keeps no rows", Allocate(ex.b, keeps=True))


# --- loops, barriers, traps -----------------------------------------------------------


def test_only_independent_loops_are_bound(ex: Example) -> None:
    bound = For(ex.i, e.index(8), [], False, Binding("threads"))
    refused(ex, "a loop that is not independent is bound to threads", bound)


@pytest.mark.parametrize("width", [0, 3, -4])
def test_lanes_are_a_power_of_two(ex: Example, width: int) -> None:
    refused(ex, "must be a power of two", loop(ex.i, [], "gang", width))


@pytest.mark.parametrize(
    ("outer", "inner"),
    [("vector", "serial"), ("gang", "grid"), ("threads", "threads"), ("block", "grid")],
)
def test_bindings_nest_in_one_order(ex: Example, outer: str, inner: str) -> None:
    nest = loop(ex.i, [loop(ex.j, [], inner)], outer)
    rule = (
        "a vector loop cannot hold `For`"
        if outer == "vector"
        else f"a loop bound to {inner} stands in the one over `i`, bound to {outer}"
    )
    refused(ex, rule, nest)


def test_a_vector_loop_is_straight(ex: Example) -> None:
    refused(
        ex, "a vector loop cannot hold `If`", loop(ex.i, [If(TRUE, [])], "vector", 4)
    )
    refused(
        ex,
        "a vector loop cannot hold `Assign` of a variable from outside",
        Declare(ex.t, number(0)),
        loop(ex.i, [Assign(ex.t, number(1))], "vector", 4),
    )
    own: list[Stmt] = [Declare(ex.t, number(0)), Assign(ex.t, number(1))]
    verify(ex.program(loop(ex.i, own, "vector", 4)))


@pytest.mark.parametrize("kind", ["gang", "threads", "grid"])
def test_bound_iterations_change_only_their_own_variables(
    ex: Example, kind: str
) -> None:
    rule = f"`t` from outside the independent loop over `i` ({kind}) is changed in it"
    for change in (Assign(ex.t, number(1)), Accumulate(ex.t, "add", number(1))):
        refused(ex, rule, Declare(ex.t, number(0)), loop(ex.i, [change], kind))


def test_what_an_independent_loop_accumulates_it_does_not_read(ex: Example) -> None:
    index = e.cast(e.read(ex.t), int64)
    for read in (
        Store(ex.a, (index,), number(0)),
        Accumulate(ex.t, "add", e.read(ex.t)),
    ):
        refused(
            ex,
            "`t` is read in an independent loop that accumulates it",
            Declare(ex.t, number(0)),
            Let(Var("u", float32), e.read(ex.t)),
            loop(ex.i, [Accumulate(ex.t, "add", number(1)), read], "vector", 4),
        )


def test_a_barrier_stands_in_an_axis_of_its_scope(ex: Example) -> None:
    rule = "a block barrier stands outside a block axis"
    refused(ex, rule, Barrier("block"))
    refused(ex, rule, loop(ex.i, [Barrier("block")], "grid"))
    verify(ex.program(loop(ex.i, [loop(ex.j, [Barrier("grid")])], "grid")))


def test_shared_memory_is_used_within_gpu_axes(ex: Example) -> None:
    store = Store(ex.tile, (e.index(0),), number(0))
    refused(ex, "`tile` in shared memory is used outside GPU axes", store)
    verify(ex.program(loop(ex.i, [store], "block")))


def test_a_trap_reports_up_to_two_integers_at_a_site_that_exists(ex: Example) -> None:
    zero = e.index(0)
    refused(ex, "site 1 is none of the program's 1", Trap(TRUE, 1))
    refused(ex, "the test must be bool", Trap(zero, 0))
    refused(ex, "a trap reports at most two values", Trap(TRUE, 0, (zero,) * 3))
    refused(ex, "a trap reports integers, and not f32", Trap(TRUE, 0, (number(0),)))


def test_python_is_called_in_order_on_dense_arrays(ex: Example) -> None:
    a, y = Ref(ex.a), Ref(ex.y)
    verify(ex.program(loop(ex.i, [HostCall(0, (a, y), (Ref(ex.b),))])))
    refused(ex, "site 1 is none of the program's 1", HostCall(1, (), ()))
    refused(ex, "`m` must be dense", HostCall(0, (Ref(ex.m),), ()))
    refused(ex, "`x` in input is written", HostCall(0, (), (Ref(ex.x),)))
    deep = Ref(ex.a, (e.index(0), e.index(0)))
    refused(ex, "`a` of 1 axes has 2 indices", HostCall(0, (deep,), ()))
    refused(
        ex, "an index of `a` must be i64", HostCall(0, (Ref(ex.a, (number(0),)),), ())
    )
    threads = loop(ex.i, [HostCall(0, (a,), ())], "threads")
    refused(ex, "Python is called in the independent loop over `i`", threads)


def test_what_is_no_statement_is_refused(ex: Example) -> None:
    wrong: Any = "store"
    refused(ex, "`str` is no statement\n  in: 'store'", wrong)


# --- calls ----------------------------------------------------------------------------


def call(ex: Example, routine: str, *args: Any, site: int | None = None) -> Call:
    refs = tuple(Ref(a) if isinstance(a, Buffer) else a for a in args)
    scalars = tuple(e.index(a) if type(a) is int else a for a in refs)
    return Call(routine, scalars, site)


def test_calls_fit_their_routines(ex: Example) -> None:
    two = e.index(2)
    matrix = Buffer("p", float32, (two, two), "arena")
    ex.more.append(matrix)
    narrow = e.const(2, int32)
    refused(ex, "there is no routine `gemv`", call(ex, "gemv", matrix))
    refused(ex, "`potrf` takes 1 arrays, then 1 scalars", call(ex, "potrf", matrix))
    refused(ex, "`potrf` takes 1 arrays", call(ex, "potrf", two, matrix))
    refused(ex, "`n` must be i64, and is i32", call(ex, "potrf", matrix, narrow))
    refused(ex, "`a` must be [3, 3], and `p` gives", call(ex, "potrf", matrix, 3))
    refused(ex, "`x` in input is written", call(ex, "syevd_values", matrix, ex.x, 2))
    refused(ex, "`a` must be dense, and `m` is not", call(ex, "potrf", ex.m, 8))
    refused(ex, "site 1 is none", call(ex, "potrf", matrix, 2, site=1))
    refused(
        ex,
        "`p` is written, and passed twice",
        call(ex, "gemm", matrix, matrix, matrix, 2, 2, 2),
    )
    keys = call(ex, "argsort", ex.x, ex.a, *[ex.a] * 3, e.read(N), TRUE)
    refused(ex, "`out` must be i64, and `a` is f32", keys)
    verify(ex.program(call(ex, "potrf", matrix, 2)))


def test_flags_are_constants_and_floats_are_alike(ex: Example) -> None:
    flag = e.compare("lt", e.read(N), e.index(3))
    solve = call(ex, "trsm", ex.a, ex.b, 2, 4, flag, flag, flag)
    refused(ex, "`upper` must be a bool constant", solve)
    product = call(ex, "gemm", ex.a, ex.wide, ex.b, 1, 1, 8)
    refused(ex, "the arrays of `gemm` must be of one dtype", product)


def test_a_sub_array_is_indexed_by_i64_on_its_axes(ex: Example) -> None:
    def potrf(*at: Expr) -> Call:
        return Call("potrf", (Ref(ex.a, at), e.index(1)))

    verify(ex.program(potrf(e.index(3))))
    refused(ex, "`a` of 1 axes has 2 indices", potrf(e.index(0), e.index(0)))
    refused(ex, "an index of `a` must be i64", potrf(e.const(0, int32)))


# --- expressions ----------------------------------------------------------------------


X, K, B = number(1.5), e.const(3, int32), TRUE


@pytest.mark.parametrize(
    ("node", "rule"),
    [
        (Expr("plus", (X, X), float32), "there is no operation `plus`"),
        (Expr("add", (X,), float32), "`add` takes 2 operands, and has 1"),
        (Expr("add", (X, K), float32), "the operands of `add` differ: f32 and i32"),
        (Expr("add", (X, X), float64), "`add` of f32 gives f32, and not f64"),
        (Expr("lt", (X, X), float32), "`lt` of f32 gives bool, and not f32"),
        (Expr("isnan", (K,), bool_), "`isnan` takes floats, and not i32"),
        (Expr("sqrt", (K,), int32), "`sqrt` takes floats, and not i32"),
        (Expr("clz", (X,), float32), "`clz` takes integers, and not f32"),
        (Expr("shl", (B, B), bool_), "`shl` takes integers, and not bool"),
        (Expr("and", (X, X), float32), "`and` takes integers or bools, and not f32"),
        (Expr("neg", (B,), bool_), "`neg` takes numbers, and not bool"),
        (Expr("copysign", (K, K), int32), "`copysign` takes floats, and not i32"),
        (Expr("fma", (K, K, K), int32), "`fma` takes floats, and not i32"),
        (Expr("pow", (X,), float32), "`pow` takes 2 operands, and has 1"),
        (Expr("exp", (K,), int32), "`exp` takes floats, and not i32"),
        (Expr("select", (X, X, X), float32), "the test of `select` must be bool"),
        (Expr("select", (B, X, K), float32), "the operands of `select` differ"),
        (Expr("cast", (X,), bool_), "a cast to bool is written as `!= 0`"),
        (Expr("bitcast", (X,), float64), "`bitcast` of f32 to f64: the widths"),
        (Expr("bitcast", (B,), dtypes.int8), "`bitcast` of bool to i8: the widths"),
        (Expr("const", (), float32, 0.1), "the constant 0.1 is not rounded to f32"),
        (Expr("const", (), int32, 1 << 31), "does not fit in i32"),
        (Expr("const", (), int32, True), "the constant True of i32 is no int"),
        (Expr("const", (), bool_, 1), "the constant 1 of bool is no bool"),
        (Expr("size", (), int64, "s0"), "the size `s0` is left over"),
        (Expr("var", (), float32, N), "`n` is i64"),
    ],
    ids=lambda value: value.op if isinstance(value, Expr) else "",
)
def test_expressions_keep_the_dtype_rules(ex: Example, node: Expr, rule: str) -> None:
    refused(ex, rule, Let(Var("u", node.dtype), node))


# --- text -----------------------------------------------------------------------------


def tanh_loop(ex: Example) -> list[Stmt]:
    """The loop of the design notes: a = tanh(a) * x + sum(a), k times."""
    i, j, k = integer("i"), integer("j"), integer("k")
    here = (e.read(j),)
    product = e.binary("mul", e.call("tanh", e.load(ex.a, here)), e.load(ex.x, here))
    update = Store(ex.a, here, e.binary("add", product, e.read(ex.t)))
    body: list[Stmt] = [
        Declare(ex.t, number(0)),
        loop(j, [Accumulate(ex.t, "add", e.load(ex.a, here))], "vector", 8),
        loop(j, [update], "vector", 16),
        Assign(i, e.add(e.read(i), e.index(1))),
    ]
    return [
        Copy(ex.a, ex.b),
        Declare(i, e.index(0)),
        Let(k, e.binary("min", e.read(N), e.index(10))),
        While([], e.compare("lt", e.read(i), e.read(k)), body),
    ]


def test_progress_is_told_in_order_in_integers(ex: Example) -> None:
    one = e.index(1)
    for kind in ("serial", "threads"):
        verify(ex.program(loop(ex.i, [Tick(0, e.read(ex.i), one)], kind)))
    refused(ex, "site 1 is none of the program's 1", Tick(1, one, one))
    refused(ex, "the number of steps must be i64", Tick(0, number(0), one))


def test_a_program_has_a_stable_text(ex: Example) -> None:
    program = ex.program(
        *tanh_loop(ex),
        If(
            e.compare("eq", e.read(N), e.index(0)),
            [Trap(TRUE, 0, (e.read(N),))],
            [Swap(ex.a, ex.b)],
        ),
        Call("potrf", (Ref(ex.a, (e.index(3),)), e.index(1)), 0),
        HostCall(0, (Ref(ex.a),), (Ref(ex.b), Ref(ex.wide))),
        Tick(0, e.read(N), e.read(N), ends=True, always=True),
        Allocate(ex.b),
        Allocate(ex.b, again=True, keeps=True),
    )
    assert (
        format_program(program)
        == """\
program example(n: i64):
    buffer x: f32[n] in input
    buffer m: f32[8, 8] strides [1, 8] in input
    buffer y: f32[n] in output
    buffer a: f32[8] in arena
    buffer b: f32[8] in arena
    buffer wide: f64[8] in arena
    buffer tile: f32[8] in shared
    buffer c: i32[3] in constant = [0, 1, 2]
    site 0: index of node 4
    copy a <- b
    var i: i64 = 0
    let k: i64 = min(n, 10)
    while i < k:
        var t: f32 = 0.0
        for j in 0..8 vector 8 independent:
            t += a[j]
        for j in 0..8 vector 16 independent:
            a[j] = tanh(a[j]) * x[j] + t
        i = i + 1
    if n == 0:
        trap 0 if True with n
    else:
        swap a, b
    call potrf(a[3], 1) or trap 0
    host 0(a) -> b, wide
    tick 0: n of n ends always
    allocate b[8]
    allocate b[8] again, which keeps its rows
"""
    )


def test_a_while_with_a_head_and_an_empty_body_are_written_out() -> None:
    head = [Let(Var("t", bool_), TRUE)]
    text = format_statement(While(list(head), e.read(head[0].var), []), deep=True)
    assert text == "do:\n    let t: bool = True\nwhile t:\n    pass"
    assert format_statement(Barrier("grid")) == "barrier grid"
    assert format_statement(loop(integer("i"), list(head))) == "for i in 0..8:"


def test_a_large_constant_is_shown_by_its_checksum() -> None:
    data = np.arange(100)
    buffer = Buffer("c", int64, (e.index(100),), "constant", data=data)
    text = format_program(Program("f", [], [], [], [], [buffer], [], []))
    assert "buffer c: i64[100] in constant = crc32 " in text


def test_parentheses_stand_only_where_they_are_needed() -> None:
    a, b, c = (e.read(integer(v)) for v in "abc")

    def text(*tree: Any) -> str:
        return format_expr(build(*tree))

    def build(op: str, *args: Any) -> Expr:
        operands = [build(*x) if isinstance(x, tuple) else x for x in args]
        return Expr(
            op, tuple(operands), bool_ if op in e.COMPARE else operands[0].dtype
        )

    assert text("sub", ("sub", a, b), c) == "a - b - c"
    assert text("sub", a, ("sub", b, c)) == "a - (b - c)"
    assert text("mul", ("add", a, b), c) == "(a + b) * c"
    assert text("add", ("mul", a, b), c) == "a * b + c"
    assert text("neg", ("mul", a, b)) == "-(a * b)"
    assert text("mul", ("neg", a), b) == "-a * b"
    assert text("lt", ("and", a, b), c) == "a & b < c"
    assert text("and", ("lt", a, b), ("not", ("eq", b, c))) == "a < b and not b == c"
    assert text("eq", ("lt", a, b), ("lt", b, c)) == "(a < b) == (b < c)"
    assert text("lshr", a, ("ashr", b, c)) == "lshr(a, b >> c)"
    assert text("not", ("xor", a, b)) == "~(a ^ b)"


def test_a_constant_says_its_dtype_where_nothing_else_does() -> None:
    x = e.read(Var("x", float64))
    one, less = number(1, float64), number(-1, float64)
    test = e.compare("lt", x, number(0.1, float64))
    assert format_expr(test) == "x < 0.1"
    chosen = Expr("select", (test, one, less), float64)
    assert (
        format_expr(e.cast(chosen, float32))
        == "f32(select(x < 0.1, 1.0:f64, -1.0:f64))"
    )
    assert format_expr(e.binary("add", chosen, x)) == "select(x < 0.1, 1.0, -1.0) + x"
    assert format_expr(number(0.1)) == "0.1"
    assert format_expr(number(0.1, dtypes.bfloat16)) == "0.100097656"


def test_text_does_not_grow_faster_than_the_program() -> None:
    total = e.read(Var("x", float32))
    for _ in range(200):
        total = e.binary("mul", e.unary("sqrt", total), total)
    text = format_expr(total)
    assert len(text) < 20_000
    assert text.startswith("%0: f32 = ")
    chain = e.read(Var("x", float32))
    for _ in range(5000):
        chain = e.binary("sub", number(1), chain)
    assert max(map(len, format_expr(chain).splitlines())) < 500


def test_what_is_named_in_a_test_belongs_to_the_head() -> None:
    x = e.read(integer("x"))
    long = e.binary("rem", e.binary("div", x, e.read(integer("y" * 80))), x)
    loop_ = While([], e.compare("lt", long, e.binary("mul", long, long)), [])
    lines = format_statement(loop_).splitlines()
    assert lines == ["do:", "while %0 < %0 * %0:"]


def test_two_expressions_of_one_form_are_the_same() -> None:
    n = e.read(N)
    assert walk.same(e.add(e.mul(n, n), e.index(1)), e.add(e.mul(n, n), e.index(1)))
    assert not walk.same(e.add(n, e.index(1)), e.add(n, e.index(2)))
    assert not walk.same(number(0.0), number(-0.0))
    assert not walk.same(number(0.0), number(0.0, float64))
