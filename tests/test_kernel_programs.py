"""Whole kernel programs: their texts, their rules, and what they compute."""

# ruff: noqa: E501  -- a line of a program is as long as it is

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import hopflow
from hopflow import dtypes
from hopflow.compiler.kernel_program import definitions as d
from hopflow.compiler.kernel_program.interpreter import KernelTrap, run
from hopflow.compiler.kernel_program.printer import format_kernels
from hopflow.compiler.kernel_program.program import (
    Block,
    Branch,
    Call,
    Equation,
    KernelProgram,
    Loop,
    Value,
    While,
    equations,
)
from hopflow.compiler.kernel_program.verifier import verify_kernels
from hopflow.compiler.pipeline import kernels_of
from hopflow.errors import KernelProgramError
from hopflow.graph.core import Node, size_of
from hopflow.graph.types import TensorType
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Buffer, Var
from hopflow.symbolic.size import Symbol

pytestmark = pytest.mark.slow

hf: Any = hopflow
X = np.arange(5.0)


def program_of(f: Callable[..., Any], *args: Any, **options: Any) -> KernelProgram:
    jitted = hf.jit(f, **options)
    jitted(*args)
    return kernels_of(jitted.graph)


# --- text -----------------------------------------------------------------------------


def rolled(x: Any) -> Any:
    return hf.fori_loop(0, 3, lambda i, c: hf.roll(c, 1) * x + i, x)


def kept(x: Any) -> Any:
    return x[x > 2] * 3


def branched(x: Any) -> Any:
    step = lambda c, r: (c + r, hf.cond(r > 2, lambda: r * 2, lambda: c))  # noqa: E731
    return hf.scan(step, 0.0, x, reverse=True)


def several(x: Any) -> Any:
    return (
        x.at[2].add(5.0),
        hf.cumulative_sum(x),
        hf.sort(hf.zeros((12,), dtype=x.dtype)),
    )


TEXTS: dict[str, tuple[Callable[..., Any], str]] = {
    "concat": (
        lambda x: hf.sum(hf.concat([x * 2, x[::-1]])),
        """
program lambda(x: f64[5]):
    v0: f64[5] = x[i0] * 2.0 for i0 < 5
    v1: f64[5] = x[i0 * -1 + 4] view for i0 < 5
    v2: f64[10] = select(i0 < 5, (v0[i0] if i0 < 5), (v1[i0 - 5] if not i0 < 5)) for i0 < 10
    v3: f64[] = reduce add from 0.0 of v2[i0] over i0 < 10
    return v3
""",
    ),
    "while": (
        rolled,
        """
program rolled(x: f64[5]):
    v0: i64[], v1: f64[5] = while, carry c2: i64[] = 0, c3: f64[5] = x:
        v4: bool[] = c2[] < 3
        test v4
    do, carry c5: i64[], c6: f64[5]:
        v7: i64[] = c5[] + 1
        v8: f64[5] = select(i0 < 1, (c6[i0 - 1 + 5] if i0 < 1), (c6[i0 - 1] if not i0 < 1)) for i0 < 5
        v9: f64[5] = v8[i0] * x[i0] for i0 < 5
        v10: f64[] = f64(c5[])
        v11: f64[5] = v9[i0] + v10[] for i0 < 5
        yield v7, v11
    return v1
""",
    ),
    "sizes of the run": (
        kept,
        """
program kept(x: f64[5]):
    v0: bool[5] = x[i0] > 2.0 for i0 < 5
    v1: i64[5] = i64(v0[i0]) for i0 < 5
    v2: i64[] = reduce add from 0 of v1[i0] over i0 < 5
    v3: i64[] is u0 = v2[]
    v4: i64[u0] = indices i0 < 5 where v0[i0]
    check index: v4[i0] >= -5 and v4[i0] < 5 tell v4[i0], 5 for i0 < u0
    v5: f64[u0] = x[select(v4[i0] < 0, v4[i0] + 5, v4[i0])] for i0 < u0
    v6: f64[u0] = v5[i0] * 3.0 for i0 < u0
    return v6
""",
    ),
    "scan and cond": (
        branched,
        """
program branched(x: f64[5]):
    v0: f64[], v1: f64[5] = for t0 < 5 reverse, carry c2: f64[] = 0.0:
        v3: f64[] = x[t0] view
        v4: f64[] = c2[] + v3[]
        v5: bool[] = v3[] > 2.0
        v6: f64[] = switch v5:
        case 0:
            yield c2
        case 1:
            v7: f64[] = v3[] * 2.0
            yield v7
        yield v4, v6
    return v0, v1
""",
    ),
    "scatter, prefix and library": (
        several,
        """
program several(x: f64[5]):
    v0: f64[1] = 5.0 for i0 < 1
    v1: f64[5] = x with [i0 + 2] = v0[i0] by (old, new -> old + new) for i0 < 1
    v2: f64[5] = prefix (old, new -> old + new) along i0 from 0.0 of x[i0] for i0 < 5
    v3: f64[12] = 0.0 for i0 < 12
    v4: f64[12] = sort(v3, 12, False)
    return v1, v2, v4
""",
    ),
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_program_has_a_text(name: str) -> None:
    f, text = TEXTS[name]
    program = program_of(f, hf.asarray(X))
    program.name = program.name.strip("<>")
    verify_kernels(program)
    assert format_kernels(program) == text.strip()


def test_a_jitted_function_shows_its_kernels() -> None:
    jitted = hf.jit(lambda x: x * 2, dynamic=True)
    jitted(X)
    lines = jitted.kernels.splitlines()
    assert lines[1:] == [
        "    v0: i64[] is s0 = s0[] view",
        "    v1: f64[s0] = x[i0] * 2.0 for i0 < s0",
        "    return v1",
    ]


def test_functions_come_before_what_calls_them() -> None:
    def chain(x: Any) -> Any:
        for k in range(80):
            x = hf.sin(x) * k
        return x

    long = hf.subgraph(chain)
    program = program_of(lambda x: long(long(x)), hf.asarray(X))
    [function] = program.functions
    text = format_kernels(program)
    assert text.startswith(f"program {function.name}(")
    assert f"v1: f64[5] = call {function.name}(v0)" in text
    assert [type(q.definition) for q in equations(program.block)] == [Call, Call]


# --- what programs compute ------------------------------------------------------------


def steps(x: Any) -> Any:
    return hf.while_loop(
        lambda c, n: hf.sum(c) < 100, lambda c, n: (c * 2 + x[0], n + 1), (x, 0)
    )


RUNS: dict[str, Callable[[Any], Any]] = {
    **{name: f for name, (f, _) in TEXTS.items()},
    "while of a sum": steps,
    "map of while": lambda x: hf.map(
        lambda v: hf.while_loop(lambda c: c < 9, lambda c: c * 2 + 1, v), x
    ),
    "grad of scan": hf.grad(lambda x: hf.sum(branched(x)[0] * x)),
    "stacks of while": hf.grad(lambda x: hf.sum(steps(x)[0])),
    "batched": hf.vmap(lambda v: hf.cond(v > 2, hf.sin, hf.cos, (v,))),
    "switch": lambda x: hf.switch(
        hf.argmax(x) % 3, [hf.sin, hf.cos, lambda v: v], (x,)
    ),
    "no steps": lambda x: hf.scan(lambda c, v: (c + v, v * c), 1.0, x[:0]),
    "linalg": lambda x: hf.linalg.solve(hf.eye(5) + x * x[:, None], x),
    "argmax": lambda x: (hf.argmax(x), hf.argsort(-x), hf.nonzero(x)),
    "searchsorted": lambda x: hf.searchsorted(x, x + 0.5),
    "pad": lambda x: hf.pad(x, (2, 1))[::-1],
    "random": lambda x: hf.random.uniform(hf.random.key(0), (3,)) + x[:3],
    "called": lambda x: hf.callback(np.cos, hf.spec("f64[5]"), x) + 1,
}


@pytest.mark.parametrize("name", RUNS)
def test_a_program_computes_what_native_code_does(name: str) -> None:
    jitted = hf.jit(RUNS[name])
    want = hopflow.pytree.flatten(jitted(hf.asarray(X)))[0]
    program = kernels_of(jitted.graph)
    verify_kernels(program)
    constants = jitted._present.find_captured((hf.asarray(X),))
    got = run(program, [X, *map(np.asarray, constants)])
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        b = np.asarray(b)
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=1e-14)


@pytest.mark.parametrize("size", [0, 1, 2, 7])
def test_a_program_of_symbols_serves_every_size(size: int) -> None:
    def f(x: Any) -> Any:
        scaled = hf.concat([x, x[:1]])
        rows = hf.vmap(lambda s: hf.map(lambda v: v * hf.sum(x), x * s))(scaled)
        return hf.concat([x[1:], hf.roll(x, 2)]), hf.pad(x, 1), x[::-1], rows

    program = program_of(f, hf.asarray(X), dynamic=True)
    verify_kernels(program)
    x = np.arange(float(size))
    for a, b in zip(run(program, [np.asarray(size), x]), f(hf.asarray(x)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_what_stops_a_program_is_told_with_its_node() -> None:
    f = lambda x, i: hf.map(lambda r: x[r], i)  # noqa: E731
    program = program_of(f, hf.asarray(X), hf.asarray([0, 4]))
    with pytest.raises(KernelTrap, match=r"index: \[7, 5\]") as trap:
        run(program, [X, np.array([0, 7])])
    assert trap.value.node is not None
    assert "test_kernel_programs" in str(trap.value.node.line)

    check = program_of(
        lambda x: hf.check(hf.sum(x) < 3, "large") or x, hf.asarray(X[:2])
    )
    with pytest.raises(KernelTrap, match="check"):
        run(check, [X[3:]])

    limited = hf.jit(
        lambda x: hf.while_loop(lambda c: c < x[0], lambda c: c + 1, 0.0, max_steps=3)
    )
    limited(hf.asarray(X[:1]))
    with pytest.raises(KernelTrap, match=r"limit: \[3\]"):
        run(kernels_of(limited.graph), [X[4:]])


# --- the rules ------------------------------------------------------------------------

F64, I64, BOOL = (
    TensorType(dtype) for dtype in (dtypes.float64, dtypes.int64, dtypes.bool_)
)
VECTOR = TensorType(dtypes.float64, (5,))
[AXIS] = d.axes(1)
NODE = Node("call_function", None, (), {})
N = Symbol("n")
SIZE = size_of(N)


def value(name: str, type_: TensorType = VECTOR) -> Value:
    return Value(name, type_)


def broken(
    match: str,
    *definitions: Any,
    types: Sequence[TensorType] = (VECTOR,),
    inputs: Sequence[Value] = (),
) -> None:
    """A program of these definitions breaks a rule."""
    made = [
        Equation(tuple([value(f"v{k}", t) for t in types]), definition, NODE)
        for k, definition in enumerate(definitions)
    ]
    program = KernelProgram("f", Block([*inputs], made, list(made[-1].results)))
    with pytest.raises(KernelProgramError, match=match):
        verify_kernels(program)


@pytest.mark.parametrize("number", [-1, 2])
def test_the_interpreter_tells_that_a_branch_has_no_such_block(number: int) -> None:
    x, selector = value("x"), value("number", TensorType(dtypes.int64))
    blocks = Block([], [], [x]), Block([], [], [x])
    result = value("v0")
    branch = Equation((result,), Branch(selector, blocks), NODE)
    program = KernelProgram("f", Block([x, selector], [branch], [result]))
    with pytest.raises(KernelProgramError, match=f"there is no block {number}"):
        run(program, [X, np.asarray(number)])


def test_the_interpreter_tells_that_a_size_is_another_than_that_of_a_parameter() -> (
    None
):
    n, x = value("n", TensorType(dtypes.int64)), value("x", VECTOR.with_shape([SIZE]))
    size = value("v0", TensorType(dtypes.int64))
    defined = Equation((size,), d.Pointwise((n[()],)), NODE, N)
    program = KernelProgram("f", Block([n, x], [defined], [x]))
    [result] = run(program, [np.asarray(5), X])
    np.testing.assert_array_equal(result, X)
    with pytest.raises(KernelProgramError, match=r"n is 3, and a size of <Value x"):
        run(program, [np.asarray(3), X])


def test_a_value_is_defined_once_before_it_is_read() -> None:
    x, other = value("x"), value("other")
    broken(
        "`other` is read where it is unknown", d.Pointwise((other[AXIS,],)), inputs=[x]
    )
    broken("`x` is defined twice", d.Pointwise((x[AXIS,],)), inputs=[x, x])
    inner = value("inner")
    block = Block([], [Equation((inner,), d.Pointwise((x[AXIS,],)), NODE)], [inner])
    branch = Branch(value("s", BOOL), (block, block))
    broken("`s` is read where it is unknown", branch, inputs=[x])
    chosen = Branch(selector := value("s", BOOL), (block,))
    after = d.Pointwise((inner[AXIS,],))
    broken("`inner` is read where it is unknown", chosen, after, inputs=[x, selector])


def test_expressions_keep_the_rules_of_theirs() -> None:
    x, m = value("x"), value("m", TensorType(dtypes.float64, (5, 5)))
    j = d.axes(2)[1]
    broken("`i1` is no axis", d.Pointwise((x[j,],)), inputs=[x])
    broken("`m` of 2 axes has 1 indices", d.Pointwise((m[AXIS,],)), inputs=[m])
    wide = e.cast(x[AXIS,], dtypes.float32)
    broken("an element must be f64, and is f32", d.Pointwise((wide,)), inputs=[x])
    memory = Buffer("b", dtypes.float64, (e.index(5),), "input")
    broken("reads memory", d.Pointwise((e.load(memory, (AXIS,)),)))
    sized = d.Pointwise((x[AXIS,],))
    unknown = TensorType(dtypes.float64, (size_of(N),))
    broken("the size `n` is unknown", sized, types=[unknown], inputs=[x])
    check = d.Check("check", (5,), AXIS)
    broken(
        "a check must be bool",
        d.Pointwise((x[AXIS,],), (check,)),
        inputs=[x],
    )


def test_the_pieces_of_a_definition_keep_the_rules() -> None:
    x = value("x")
    here, wide = d.Pointwise((x[AXIS,],)), e.cast(x[AXIS,], dtypes.float32)
    broken("`i0` is no axis", d.Cut(0, AXIS, here, here), inputs=[x])
    place = e.const(1.0, dtypes.float64)
    broken("place of a cut must be i64", d.Cut(0, place, here, here), inputs=[x])
    broken("along no axis of it", d.Cut(1, e.index(1), here, here), inputs=[x])
    view = d.Pointwise((x[AXIS,],), is_view=True)
    broken("a piece is a view", d.Cut(0, e.index(1), here, view), inputs=[x])
    narrow = d.Cut(
        0, e.index(1), d.Cut(0, e.index(0), here, d.Pointwise((wide,))), here
    )
    broken("an element must be f64, and is f32", narrow, inputs=[x])


def test_definitions_give_what_they_are_bound_to() -> None:
    x, zero = value("x"), e.const(0.0, dtypes.float64)
    total = d.parameters((zero,), "t")
    narrow = d.parameters((e.const(0.0, dtypes.float32),), "t")
    finish = d.Function(narrow, narrow)
    reduction = d.Reduction((5,), (zero,), "add", (x[AXIS,],), (finish,))
    broken("a function of", reduction, types=[F64], inputs=[x])
    good = d.Function(total, total)
    integers = d.Reduction((5,), (zero,), "add", (AXIS,), (good,))
    broken("elements of", integers, types=[F64], inputs=[x])
    broken(
        "a result has no finish",
        d.Reduction((5,), (zero,), "add", (x[AXIS,],), ()),
        types=[F64],
        inputs=[x],
    )
    scatter = d.Scatter(x, (5,), (x[AXIS,],), x[AXIS,])
    broken("an index must be i64", scatter, inputs=[x])
    place = d.Scatter(x, (5,), (AXIS, AXIS), x[AXIS,])
    broken("a position of another rank", place, inputs=[x])
    broken("a test must be bool", d.Compact(5, AXIS), types=[I64])


def test_blocks_give_what_is_carried() -> None:
    x, t = value("x"), Var("t", dtypes.int64)
    wrong = Block([c := value("c")], [], [c, c])
    broken("results of a loop|rows of a loop", Loop(t, 5, (x,), wrong), inputs=[x])
    scalar = Block([value("c", F64)], [], [])
    broken("parameters: f64", Loop(t, 5, (x,), scalar), inputs=[x])
    same = Block([c := value("c")], [], [c])
    free = Loop(t, 5, (x,), same, independent=True)
    broken("an independent loop has a carry", free, inputs=[x])
    test = Block([c := value("c")], [], [c])
    broken("a test gives", While((x,), test, same), inputs=[x])
    number = Branch(x, (Block([], [], [x]),))
    broken("selects no block", number, inputs=[x])
    other = Branch(s := value("s", BOOL), (Block([], [], [s]),))
    broken("a branch: bool", other, inputs=[s])
    function = KernelProgram("g", Block([], [], []))
    broken("calls what is unknown", Call(function, ()), inputs=[x])
