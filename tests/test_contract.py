"""Which buffers become values or single rows, and which keep all of their memory."""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import hopflow as hf
from hopflow.compiler import pipeline
from hopflow.compiler.cpu.target import host
from hopflow.compiler.schedule import schedule
from hopflow.compiler.schedule.contract import contract
from hopflow.dtypes import float64, int64
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Buffer, Expr, Var
from hopflow.loop_ir.interpreter import run
from hopflow.loop_ir.printer import format_program
from hopflow.loop_ir.program import (
    Assign,
    Copy,
    Declare,
    For,
    If,
    Program,
    Stmt,
    Store,
)
from hopflow.loop_ir.verifier import verify

pytestmark = pytest.mark.slow

N = 8


class Parts:
    """The buffers and variables of a program of one or two loops."""

    def __init__(self) -> None:
        extents = (e.index(N), e.index(N))
        self.x = Buffer("x", float64, extents, "input")
        self.out = Buffer("out", float64, extents, "output")
        self.row = Buffer("b", float64, extents[:1], "arena")
        self.rows = Buffer("b", float64, extents, "arena")
        self.i, self.j, self.k = (Var(name, int64) for name in "ijk")

    @property
    def at(self) -> tuple[Expr, Expr]:
        return e.read(self.i), e.read(self.j)

    def program(self, buffer: Buffer, body: list[Stmt]) -> Program:
        return Program("f", [], [self.x], [self.out], [buffer], [], body, [])


def over(var: Var, body: list[Stmt], *, independent: bool = True) -> For:
    return For(var, e.index(N), body, independent)


def contracted(program: Program) -> Program:
    """The program after the pass, whose results are the same."""
    x = np.random.default_rng(0).normal(size=(N, N))
    before = run(program, (), [x])
    contract(program, host())
    verify(program)
    for found, want in zip(run(program, (), [x]), before, strict=True):
        np.testing.assert_array_equal(found, want)
    return program


def _value(p: Parts) -> tuple[Buffer, list[Stmt]]:
    i, j = p.at
    inner: list[Stmt] = [
        Store(p.row, (j,), e.mul(e.load(p.x, (i, j)), e.const(2.0, float64))),
        Store(p.out, (i, j), e.add(e.load(p.row, (j,)), e.load(p.row, (j,)))),
    ]
    return p.row, [over(p.i, [over(p.j, inner)])]


def _twice(p: Parts) -> tuple[Buffer, list[Stmt]]:
    """A second store to the same buffer is another value."""
    i, j = p.at
    inner: list[Stmt] = [
        Store(p.row, (j,), e.load(p.x, (i, j))),
        Store(p.row, (j,), e.add(e.load(p.row, (j,)), e.load(p.row, (j,)))),
        Store(p.out, (i, j), e.load(p.row, (j,))),
    ]
    return p.row, [over(p.i, [over(p.j, inner)])]


def _stacked(p: Parts) -> tuple[Buffer, list[Stmt]]:
    """Rows are values of their own, and a second store to one changes only that."""
    i, j = p.at
    inner = [Store(p.rows, (e.index(k), j), _times(p, k + 1)) for k in range(3)]
    inner.append(Store(p.rows, (e.index(1), j), _row(p, 2)))
    total = e.add(e.sub(_row(p, 0), _row(p, 1)), e.mul(_row(p, 2), _row(p, 2)))
    inner.append(Store(p.out, (i, j), total))
    return p.rows, [over(p.i, [over(p.j, [*inner])])]


def _any_row(p: Parts) -> tuple[Buffer, list[Stmt]]:
    """A store to a row that is not constant may change any other."""
    i, j = p.at
    inner: list[Stmt] = [
        Store(p.rows, (e.index(0), j), _times(p, 1)),
        Store(p.rows, (i, j), _times(p, 2)),
        Store(p.out, (i, j), _row(p, 0)),
    ]
    first = over(p.k, [Store(p.rows, (e.index(0), e.read(p.k)), e.const(0.0, float64))])
    return p.rows, [first, over(p.i, [over(p.j, inner)], independent=False)]


def _row_of_a_step(p: Parts) -> tuple[Buffer, list[Stmt]]:
    """Only one of two rows is written by each step."""
    i, j = p.at
    start: list[Stmt] = [
        Store(p.rows, (e.index(k), e.read(p.k)), e.const(k + 0.5, float64))
        for k in range(2)
    ]
    inner: list[Stmt] = [
        Store(p.rows, (e.index(0), j), e.add(_row(p, 1), _times(p, 1))),
        Store(p.out, (i, j), e.mul(_row(p, 0), _row(p, 1))),
        Store(p.rows, (e.index(1), j), _row(p, 0)),
    ]
    steps = over(p.i, [over(p.j, inner)], independent=False)
    return p.rows, [over(p.k, start), steps]


def _times(p: Parts, factor: float) -> Expr:
    return e.mul(e.load(p.x, p.at), e.const(factor, float64))


def _row(p: Parts, k: int) -> Expr:
    return e.load(p.rows, (e.index(k), e.read(p.j)))


def _conditional(p: Parts) -> tuple[Buffer, list[Stmt]]:
    """A load under a condition that does not hold is 0."""
    i, j = p.at
    test = e.compare("lt", j, e.index(3))
    inner: list[Stmt] = [
        Store(p.row, (j,), e.load(p.x, (i, j))),
        Store(p.out, (i, j), e.load(p.row, (j,), test)),
    ]
    return p.row, [over(p.i, [over(p.j, inner)])]


def _carried(p: Parts) -> tuple[Buffer, list[Stmt]]:
    """A step reads what the one before has written."""
    i, j = p.at
    inner: list[Stmt] = [
        Store(p.out, (i, j), e.load(p.row, (j,))),
        Store(p.row, (j,), e.load(p.x, (i, j))),
    ]
    start: list[Stmt] = [Store(p.row, (e.read(p.k),), e.const(0.0, float64))]
    return p.row, [over(p.k, start), over(p.i, [over(p.j, inner)], independent=False)]


def _elsewhere(p: Parts) -> tuple[Buffer, list[Stmt]]:
    """An iteration reads what another one has written."""
    i, j = p.at
    last = e.sub(e.index(N - 1), j)
    return p.row, [
        over(
            p.i,
            [
                over(
                    p.k, [Store(p.row, (e.read(p.k),), e.load(p.x, (i, e.read(p.k))))]
                ),
                over(p.j, [Store(p.out, (i, j), e.load(p.row, (last,)))]),
            ],
            independent=False,
        )
    ]


def _under_a_test(p: Parts) -> tuple[Buffer, list[Stmt]]:
    """What is written under a test may be older where it is read."""
    i, j = p.at
    test = e.compare("lt", i, e.index(4))
    inner: list[Stmt] = [
        If(test, [Store(p.row, (j,), e.load(p.x, (i, j)))]),
        Store(p.out, (i, j), e.load(p.row, (j,))),
    ]
    return p.row, [over(p.i, [over(p.j, inner)], independent=False)]


def _copied(p: Parts) -> tuple[Buffer, list[Stmt]]:
    i, j = p.at
    store: list[Stmt] = [Store(p.rows, (i, j), e.load(p.x, (i, j)))]
    return p.rows, [over(p.i, [over(p.j, store)]), Copy(p.out, p.rows)]


def _moving(p: Parts) -> tuple[Buffer, list[Stmt]]:
    """The index has changed between the store and the load."""
    i, j = p.at
    at = Var("at", int64)
    inner: list[Stmt] = [
        Declare(at, j),
        Store(p.row, (e.read(at),), e.load(p.x, (i, j))),
        Assign(at, e.sub(e.index(N - 1), j)),
        Store(p.out, (i, j), e.load(p.row, (e.read(at),))),
    ]
    start: list[Stmt] = [Store(p.row, (e.read(p.k),), e.const(0.0, float64))]
    steps = over(p.i, [over(p.j, inner, independent=False)], independent=False)
    return p.row, [over(p.k, start), steps]


def _rows(p: Parts) -> tuple[Buffer, list[Stmt]]:
    i, j = p.at
    k, last = e.read(p.k), e.sub(e.index(N - 1), j)
    body: list[Stmt] = [
        over(p.k, [Store(p.rows, (i, k), e.load(p.x, (i, k)))]),
        over(p.j, [Store(p.out, (i, j), e.load(p.rows, (i, last)))]),
    ]
    return p.rows, [over(p.i, body)]


def _history(p: Parts) -> tuple[Buffer, list[Stmt]]:
    """Rows that earlier steps have written are read by later ones."""
    step, i = Var("step", int64), e.read(p.i)
    t, first = e.read(step), e.index(0)
    body: list[Stmt] = [
        Store(p.rows, (i, t), e.load(p.x, (i, t))),
        Store(p.out, (i, t), e.load(p.rows, (i, first))),
    ]
    return p.rows, [over(step, [over(p.i, body)], independent=False)]


def _read_first(p: Parts) -> tuple[Buffer, list[Stmt]]:
    """What the first step writes is read by the others, before they write it."""
    step, i, j = Var("step", int64), *p.at
    later = e.compare("ne", e.read(step), e.index(0))
    body: list[Stmt] = [
        If(
            later,
            [
                over(
                    p.k,
                    [Store(p.out, (i, e.read(p.k)), e.load(p.rows, (i, e.read(p.k))))],
                )
            ],
        ),
        over(p.j, [Store(p.rows, (i, j), e.load(p.x, (i, j)))]),
    ]
    return p.rows, [over(step, [over(p.i, body)], independent=False)]


@pytest.mark.parametrize(
    ("make", "shape"),
    [
        (_value, None),
        (_twice, None),
        (_stacked, None),
        (_any_row, (N, N)),
        (_row_of_a_step, (N, N)),
        (_conditional, None),
        (_carried, (N,)),
        (_elsewhere, (N,)),
        (_under_a_test, (N,)),
        (_copied, (N, N)),
        (_moving, (N,)),
        (_rows, (N,)),
        (_history, (N, N)),
        (_read_first, (N, N)),
    ],
    ids=lambda x: x.__name__ if callable(x) else str(x),
)
def test_memory_that_only_one_iteration_needs_is_a_row_or_a_value(
    make: Callable[[Parts], Any], shape: tuple[int, ...] | None
) -> None:
    parts = Parts()
    program = contracted(parts.program(*make(parts)))
    found = [tuple(n.attr for n in b.shape) for b in program.arena]
    assert found == ([] if shape is None else [shape]), format_program(program)


def test_a_value_of_a_loop_that_became_wider_takes_several_registers() -> None:
    """The bits of a draw are 64 for each float of 32: the floats decide the width."""

    def f(x: Any) -> Any:
        wide = hf.astype(x, hf.int64) * 3
        return hf.astype(wide ^ (wide >> 3), hf.float32) + x

    jitted = hf.jit(lambda x: (f(x), hf.sin(f(x))))
    x = np.arange(100, dtype=np.float32)
    found = jitted(x)
    with hf.debug():
        want = f(hf.asarray(x))
    np.testing.assert_array_equal(found[0], np.asarray(want))
    assert "in arena" not in jitted.loop_ir


def _mixed(x: Any) -> Any:
    """Sixteen operations on 32 bits, whose result has 64."""
    for k in range(8):
        x = (x << k) ^ (x >> (k + 1))
    return x.astype(hf.int64)


@pytest.mark.parametrize(
    ("f", "dtype", "decides"),
    [
        (_mixed, np.int32, "int32"),
        (lambda x: x.astype(hf.float64) * 2.0, np.float32, "float64"),
        (lambda x: hf.sum(_mixed(x)), np.int32, "float64"),  # its order is the width's
        (lambda x: hf.sin(x).astype(hf.float64), np.float32, "float32"),
        (lambda x: hf.sin(x.astype(hf.float64)), np.float32, "float64"),
    ],
)
def test_what_most_of_a_loop_computes_decides_its_width(
    f: Any, dtype: Any, decides: str
) -> None:
    jitted = hf.jit(f)
    x = np.arange(1000).astype(dtype)
    with hf.debug():
        want = np.asarray(f(hf.asarray(x)))
    np.testing.assert_allclose(np.asarray(jitted(x)), want, rtol=1e-6)
    [width] = re.findall(r"vector (\d+)", jitted.loop_ir)
    reduces = "acc" in jitted.loop_ir
    expected = host().vector_width(getattr(hf, decides), reduces=reduces)
    assert int(width) == expected


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_normalised_layer_is_one_loop_over_its_rows(dynamic: bool) -> None:
    def layer(x: Any) -> Any:
        centred = x - hf.mean(x, axis=1, keepdims=True)
        return centred / hf.sqrt(hf.mean(centred**2, axis=1, keepdims=True) + 1e-5)

    x = np.random.default_rng(0).normal(size=(33, 300))
    jitted = hf.jit(layer, dynamic=dynamic)
    with hf.debug():
        want = layer(hf.asarray(x))
    np.testing.assert_allclose(jitted(x), np.asarray(want), rtol=1e-12)
    loops = [s for s in jitted.loop_ir.splitlines() if s.startswith("    for ")]
    assert len(loops) == 1
    assert not re.search(r"\[(33|s0)[^\n]*in arena", jitted.loop_ir)


def test_bits_are_those_without_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    def f(x: Any, mask: Any) -> Any:
        e = hf.exp(x - hf.max(x, axis=-1, keepdims=True))
        p = e / hf.sum(e, axis=-1, keepdims=True)
        rolled = hf.roll(p * 3.0 + 1.0, 1, axis=1) - hf.roll(p * 3.0 + 1.0, 1, axis=0)
        return hf.where(mask, rolled, p), hf.cumulative_sum(rolled, axis=0)

    x = np.random.default_rng(0).normal(size=(37, 70)).astype(np.float32)
    args = x, x > 0
    found = [np.asarray(y).tobytes() for y in hf.jit(f)(*args)]
    others = tuple(run for run in schedule.LOOP_PASSES if run is not contract)
    monkeypatch.setattr(schedule, "LOOP_PASSES", others)
    pipeline.clear_cache()
    plain = [np.asarray(y).tobytes() for y in hf.jit(f)(*args)]
    pipeline.clear_cache()
    assert found == plain
