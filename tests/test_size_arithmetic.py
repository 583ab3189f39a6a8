"""Sizes that are computed: exactly, once, and refused before anything is written."""

import math
import signal
import subprocess
import sys
from collections.abc import Callable
from textwrap import dedent
from typing import Any

import numpy as np
import pytest

import hopflow as hf
from hopflow import dtypes
from hopflow.compiler.cpu.runtime import compile_program
from hopflow.compiler.cpu.target import host
from hopflow.config import config
from hopflow.dtypes import float64
from hopflow.errors import (
    ArgumentRangeError,
    BoundsError,
    CheckError,
    DivisionError,
    InternalError,
    LoopIRError,
    ShapeError,
)
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Buffer, Var
from hopflow.loop_ir.program import For, Program, Store
from hopflow.loop_ir.verifier import verify
from hopflow.testing.executions import SYMBOLIC, run_debug

pytestmark = pytest.mark.slow

Run = Callable[..., Any]


def ramp(n: int) -> Any:
    return hf.asarray(np.arange(n, dtype=np.float32))


def far(x: Any) -> Any:
    """A size whose powers no int64 holds, and which is small itself: 45001 of 9001."""
    return x.shape[0] ** 5 % 100000


def root(x: Any) -> Any:
    """One that the last bit of a power decides: 4 of 125, for `125 ** (1 / 3) < 5`."""
    return math.floor(x.shape[0] ** (1 / 3))


@hf.subgraph
def _ones(x: Any) -> Any:
    return hf.ones((far(x),)) + x[0]


SIZED: dict[str, Run] = {
    "zeros": lambda x: hf.zeros((far(x),)),
    "temporary": lambda x: hf.max(hf.cumulative_sum(hf.ones((1 + far(x),)))),
    "root": lambda x: hf.ones((root(x), 2)),
    "arange": lambda x: hf.arange(far(x)),
    "arange by steps": lambda x: hf.arange(3, far(x), 7),
    "linspace": lambda x: hf.linspace(0.0, 1.0, far(x)),
    "eye": lambda x: hf.eye(far(x) % 50, root(x)),
    "full": lambda x: hf.full((3,), far(x)),
    "value": lambda x: hf.ones(3) * far(x) + root(x),
    "float": lambda x: hf.ones(2) * (far(x) / 7),
    "condition": lambda x: hf.where(x > far(x), x, -x),
    "broadcast": lambda x: hf.broadcast_to(x[:1], (far(x), 2)),
    "tile": lambda x: hf.tile(x[:2], (far(x),)),
    "repeat": lambda x: hf.repeat(x[:2], far(x)),
    "roll": lambda x: hf.roll(x, far(x)),
    "slice": lambda x: x[x.shape[0] ** 5 % 7 :],
    "slice to": lambda x: x[: x.shape[0] ** 5 % 7 + x.shape[0] // 2],
    "reshape": lambda x: hf.reshape(hf.ones((2 * far(x),)), (far(x), 2)),
    "bound": lambda x: hf.fori_loop(0, far(x), lambda i, a: a + 1, 0),
    "body": lambda x: hf.fori_loop(
        0, 3, lambda i, a: a + hf.sum(hf.ones((far(x),))), 0.0
    ),
    "branch": lambda x: hf.cond(
        x[0] < 1, lambda: hf.sum(hf.ones((far(x),))), lambda: hf.sum(x)
    ),
    "map": lambda x: hf.map(lambda v: hf.sum(hf.ones((far(x) % 50,))) + v, x[:3]),
    "function": lambda x: _ones(x) + _ones(x * 2),
    "grad": lambda x: hf.grad(lambda v: hf.sum(hf.tile(v[:2], (far(x),))))(x),
    "vmap": lambda x: hf.vmap(lambda v: hf.sum(v + hf.ones((far(x) % 50,))))(x[:3]),
}


@pytest.mark.parametrize("name", SIZED)
@pytest.mark.parametrize("closed", [False, True])
def test_sizes_are_what_python_computes(
    name: str, closed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "guard_pages", closed)
    f = SIZED[name]
    jitted = hf.jit(f, dynamic=True)
    for n in (30, 125, 9001):
        ours, want = jitted(ramp(n)), f(ramp(n))
        assert ours.shape == want.shape
        np.testing.assert_allclose(np.asarray(ours), np.asarray(want), rtol=1e-5)


def test_only_the_first_call_is_traced() -> None:
    jitted = hf.jit(SIZED["zeros"], dynamic=True)
    jitted(ramp(3))
    before = hf.stats().traces
    for n in (30, 125, 9001):
        jitted(ramp(n))
    assert hf.stats().traces == before


# --- what no memory has ---------------------------------------------------------------

TOO_LARGE: dict[str, tuple[Run, int, str]] = {
    "size": (lambda x: hf.zeros((x.shape[0] ** 5,)), 10**4, "larger than any memory"),
    "temporary": (
        lambda x: hf.cumulative_sum(hf.ones((x.shape[0] ** 5,)), axis=0)[0],
        10**4,
        "larger than any memory",
    ),
    "bytes": (
        lambda x: hf.cumulative_sum(x[:, None, None] * x[:, None] * x, axis=0)[0, 0, 0],
        2**21,
        r"multiply .*f32\[2097152, 2097152, 2097152\], is larger than any memory",
    ),
    "positions": (
        lambda x: hf.reshape(
            hf.broadcast_to(x[:, None, None], (x.shape[0],) * 3),
            (x.shape[0] ** 2, x.shape[0]),
        )[-1, 0],
        2**21,
        "broadcast_to .* is larger than any memory",
    ),
    "empty": (
        lambda x: hf.zeros((0, x.shape[0] ** 3, x.shape[0])),
        2**21,
        "larger than any memory",
    ),
    "rounded": (
        lambda x: hf.zeros((math.floor(x.shape[0] ** 20.0 * 1e-80),)),
        10**5,
        "`floor.*` .* is 1[0-9]* with x.shape.0. = 100000: larger than any memory",
    ),
    "no float": (
        lambda x: hf.zeros((math.floor(x.shape[0] ** 200.0 * 1e-300),)),
        10**4,
        "has no value with x.shape.0. = 10000: .*too large|out of range",
    ),
}


@pytest.mark.parametrize("name", TOO_LARGE)
def test_a_size_that_no_memory_has_is_an_error_with_the_line(name: str) -> None:
    f, n, message = TOO_LARGE[name]
    jitted = hf.jit(f, dynamic=True)
    jitted(ramp(2))
    with pytest.raises(ShapeError, match=message) as caught:
        jitted(ramp(n))
    assert "(test_size_arithmetic.py:" in str(caught.value)
    jitted(ramp(3))


def test_an_integer_that_int64_cannot_hold_is_an_error_with_the_line() -> None:
    f = hf.jit(lambda x: hf.ones(3) * x.shape[0] ** 5, dynamic=True)
    f(ramp(3))
    with pytest.raises(
        ArgumentRangeError, match=r"x.shape.*test_size_arith.*int64 cannot hold"
    ):
        f(ramp(10**4))


def test_a_number_of_arguments_is_refused_as_a_size_of_tensors_is() -> None:
    f = hf.jit(lambda n: hf.zeros((4 * n,)))
    assert f(3).shape == (12,)
    with pytest.raises(ShapeError, match=r"`4\*n` .* 18446744073709551616 with n ="):
        f(2**62)
    with pytest.raises(hf.errors.ArgumentValueError, match="must not be negative"):
        f(-1)


def test_a_size_without_a_value_is_an_error_of_the_interpreter_too() -> None:
    f = hf.jit(TOO_LARGE["no float"][0], dynamic=True, backend="interpreter")
    f(ramp(2))
    with pytest.raises(ShapeError, match=r"the size `floor.*` has no value"):
        f(ramp(10**4))


@pytest.mark.parametrize("run", [*SYMBOLIC, run_debug], ids=lambda run: run.__name__)
def test_conditions_on_integers_that_int64_cannot_hold_are_exact(run: Any) -> None:
    def f(x: Any) -> Any:
        n = x.shape[0]
        size = n**20 * 7 // n**19  # which asks whether n**19 is 0
        return hf.ones((size if n**21 > n**20 else 3,))

    assert run(f, ramp(30)).shape == (210,)


def test_a_power_that_is_complex_is_no_call_of_a_trace() -> None:
    def f(x: Any) -> Any:
        return x + 1 if (x.shape[0] - 5) ** 0.5 < 3 else x

    jitted = hf.jit(f, dynamic=True)
    jitted(ramp(9))
    with pytest.raises(TypeError, match="'<' not supported"):  # as Python says
        jitted(ramp(3))


@pytest.mark.parametrize(
    ("f", "error", "message"),
    [
        (lambda n: 2.0 ** (n * 1000), OverflowError, "out of range"),
        (lambda n: 1 << (n - 5), ValueError, "negative shift count"),
        (lambda n: 8 >> (n - 5), ValueError, "negative shift count"),
    ],
)
def test_arithmetic_with_the_value_of_a_number_fails_as_in_python(
    f: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        f(3)
    with pytest.raises(error, match=message) as caught:
        hf.jit(f)(3)
    assert not isinstance(caught.value, InternalError)


def test_a_check_before_a_size_is_made_first() -> None:
    def f(x: Any) -> Any:
        hf.check(x.shape[0] < 1000, "too many")
        return hf.zeros((x.shape[0] ** 5,))

    jitted = hf.jit(f, dynamic=True)
    assert jitted(ramp(3)).shape == (243,)
    with pytest.raises(CheckError, match=r"too many \(test_size_arithmetic.py:"):
        jitted(ramp(10**4))


# --- sizes that floats of the arguments decide ------------------------------------

OF_FLOATS: dict[str, Run] = {
    "shape": lambda x, f: hf.zeros((math.floor(x.shape[0] * f),)),
    "two": lambda x, f: hf.ones((round(f * 4), int(f + 1))) * math.ceil(f),
    "slice": lambda x, f: x[: math.floor(x.shape[0] * f)],
    "bound": lambda x, f: hf.fori_loop(0, math.floor(f * 9), lambda i, a: a + 1, 0),
    "value": lambda x, f: x * math.floor(f * 5),
    "power": lambda x, f: hf.ones((math.floor((f * 250) ** (1 / 3)),)),
    "body": lambda x, f: hf.fori_loop(
        0, 2, lambda i, a: a + hf.sum(hf.ones((math.floor(f * 6),))), 0.0
    ),
    "guarded": lambda x, f: x if math.floor(f * 2) > 1 else hf.ones(math.floor(f * 8)),
    "half": lambda x, f: hf.reshape(hf.ones((2 * int(f * 6),)), (int(f * 6), 2)),
}


@pytest.mark.parametrize("name", OF_FLOATS)
@pytest.mark.parametrize("make", [float, hf.asarray], ids=["float", "tensor"])
def test_floats_of_arguments_decide_sizes(name: str, make: Any) -> None:
    f = OF_FLOATS[name]

    def g(x: Any, number: Any) -> Any:
        return f(x, number.item() if make is hf.asarray else number)

    jitted = hf.jit(g, dynamic=True)
    for number in (0.5, 0.9, 1.75, 0.25):
        ours, want = jitted(ramp(8), make(number)), g(ramp(8), make(number))
        assert ours.shape == want.shape
        np.testing.assert_allclose(np.asarray(ours), np.asarray(want), rtol=1e-6)


def test_a_float_is_traced_once_for_all_sizes_that_it_decides() -> None:
    jitted = hf.jit(OF_FLOATS["shape"], dynamic=True)
    jitted(ramp(8), 0.5)
    before = hf.stats().traces
    assert jitted(ramp(8), 0.9).shape == (7,)
    assert jitted(ramp(20), 0.9).shape == (18,)
    assert hf.stats().traces == before


@pytest.mark.parametrize(
    ("number", "error", "message"),
    [
        (math.nan, ValueError, "cannot convert float NaN to integer"),  # as in Python
        (math.inf, OverflowError, "cannot convert float infinity to integer"),
        (1e100, ShapeError, r"`floor.*` is [0-9]*, which int64 cannot hold"),
        (-1.0, TypeError, "must be real number, not complex"),  # as in Python
    ],
)
def test_a_float_without_a_size_is_an_error(
    number: float, error: type[Exception], message: str
) -> None:
    def f(x: Any, f: Any) -> Any:
        return x * math.floor((f * f * f) ** 0.5)

    jitted = hf.jit(f, dynamic=True)
    jitted(ramp(8), 0.5)
    with pytest.raises(error, match=message):
        jitted(ramp(8), number)


# --- sizes that only the run knows ----------------------------------------------------

FOUND: dict[str, tuple[Run, int, type[Exception], str]] = {
    "product": (
        lambda k: hf.zeros((k.item() * 8,)),
        2**61,
        ArgumentRangeError,
        r"size \(test_size_arithmetic.py:\d+\) is computed from `8 \* 2305843009213693",
    ),
    "sum": (
        lambda k: hf.ones(2) * (k.item() + 2**62),
        2**62,
        ArgumentRangeError,
        r"`4611686018427387904 \+ 4611686018427387904`",
    ),
    "two sizes": (
        lambda k: hf.zeros((k.item(), k.item()))[:1, :1],
        2**32,
        ArgumentRangeError,
        "`17179869184 . 4294967296`",
    ),
    "float": (
        lambda k: hf.zeros((math.floor(k.item() ** 2.5),)),
        2**40,
        ArgumentRangeError,
        "computed from a float, which int64 cannot hold",
    ),
    "floor division": (
        lambda k: hf.zeros((7 // k.item(),)),
        0,
        DivisionError,
        "by zero",
    ),
    "remainder": (
        lambda k: hf.zeros((7 % k.item(),)),
        0,
        DivisionError,
        "by zero",
    ),
    "division": (
        lambda k: hf.zeros((math.floor(7 / k.item()),)),
        0,
        DivisionError,
        "by zero",
    ),
    "in a body": (
        lambda k: hf.fori_loop(
            0, 2, lambda i, a: a + hf.sum(hf.ones((a.item() * 8,), dtype=hf.int64)), k
        ),
        2**61,
        ArgumentRangeError,
        r"`8 \* 2305843009213693952`",
    ),
    "in a branch": (
        lambda k: hf.cond(
            k > 0, lambda: hf.sum(hf.ones((k.item() * 8,))), lambda: hf.sum(k) * 1.0
        ),
        2**61,
        ArgumentRangeError,
        r"`8 \* 2305843009213693952`",
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_what_int64_cannot_hold_of_a_found_size_stops_the_run(name: str) -> None:
    f, k, error, message = FOUND[name]
    jitted = hf.jit(lambda k: f(k + 0))
    np.testing.assert_array_equal(
        np.asarray(jitted(hf.asarray(3))), np.asarray(f(hf.asarray(3)))
    )
    with pytest.raises(error, match=message):
        jitted(hf.asarray(k))


def test_a_loop_of_no_steps_computes_no_sizes() -> None:
    def f(n: Any, k: Any) -> Any:
        u = hf.sum(k).item()
        return hf.fori_loop(0, n, lambda i, a: a + hf.sum(hf.ones((7 // u,))), 0.0)

    jitted = hf.jit(f)
    assert jitted(2, hf.asarray(3)).item() == 4.0
    assert jitted(0, hf.asarray(0)).item() == 0.0
    with pytest.raises(DivisionError, match="by zero"):
        jitted(1, hf.asarray(0))


def test_temporaries_of_a_found_size_are_as_large_as_what_is_written() -> None:
    f = hf.jit(lambda x: hf.cumulative_sum(hf.ones((x[x > 0].shape[0] ** 2 // 3,)))[-1])
    for n in (4, 8, 60):
        assert f(ramp(n)).item() == (n - 1) ** 2 // 3


# --- what a native program is given ---------------------------------------------------

N, M = Var("n", dtypes.int64), Var("m", dtypes.int64)


def copying(strides: tuple[Any, ...] | None = None) -> Any:
    """A program that copies `n` by `m` numbers."""
    i, j = Var("i", dtypes.int64), Var("j", dtypes.int64)
    shape = e.read(N), e.read(M)
    x = Buffer("x", float64, shape, "input", strides)
    out = Buffer("out", float64, shape, "output")
    at = e.read(i), e.read(j)
    inner = For(j, shape[1], [Store(out, at, e.load(x, at))])
    loop = For(i, shape[0], [inner])
    return Program("copying", [N, M], [x], [out], [], [], [loop], [])


@pytest.mark.parametrize(
    ("x", "out"),
    [
        (np.zeros((3, 4)), np.zeros((3, 5))),
        (np.zeros((3, 4)), np.zeros((2, 4))),
        (np.zeros((3, 4)), np.zeros(12)),
        (np.zeros((3, 4)), np.zeros((3, 4), np.float32)),
        (np.zeros((3, 4)), np.zeros((4, 3)).T),
        (np.zeros((3, 3)), np.zeros((3, 4))),
        (np.zeros((3, 8))[:, ::2], np.zeros((3, 4))),
    ],
)
def test_arrays_that_a_program_is_not_made_for_are_refused(x: Any, out: Any) -> None:
    kernel = compile_program(copying(), host())
    before = out.copy()
    with pytest.raises(BoundsError, match=r"argument [23] of a native program"):
        kernel(3, 4, x, out)
    np.testing.assert_array_equal(out, before)
    good = np.zeros((3, 4))
    assert kernel(3, 4, np.ones((3, 4)), good) is None
    assert good.all()


def test_strides_that_a_program_is_not_told_are_refused() -> None:
    stride = Var("stride", dtypes.int64)
    program = copying((e.read(stride), e.index(1)))
    program.sizes.append(stride)
    kernel = compile_program(program, host())
    x, out = np.arange(24.0).reshape(3, 8)[:, :4], np.zeros((3, 4))
    assert kernel(3, 4, 8, x, out) is None
    np.testing.assert_array_equal(out, x)
    with pytest.raises(BoundsError, match="argument 3"):
        kernel(3, 4, 9, x, out)


def test_extents_that_are_computed_are_not_compared_and_refused() -> None:
    program = copying()
    program.inputs[0].shape = (e.add(e.read(N), e.index(1)), e.read(M))
    with pytest.raises(LoopIRError, match="neither a constant nor a size"):
        verify(program)


@pytest.mark.parametrize("op", ["add", "mul"])
def test_an_overflow_is_what_python_says(op: str) -> None:
    values = [0, 1, -1, 2, 2**62, -(2**62), 2**63 - 1, -(2**63), 3 * 10**9, -(2**32)]
    x, y = (
        Buffer("x", dtypes.int64, (), "input"),
        Buffer("y", dtypes.int64, (), "input"),
    )
    out = Buffer("out", dtypes.bool_, (), "output")
    test = e.compare(f"{op}_overflows", e.load(x, ()), e.load(y, ()))
    program = Program("test", [], [x, y], [out], [], [], [Store(out, (), test)], [])
    kernel = compile_program(program, host())
    for a in values:
        for b in values:
            result = np.zeros((), bool)
            kernel(np.array(a), np.array(b), result)
            exact = a + b if op == "add" else a * b
            assert bool(result) is not (-(2**63) <= exact < 2**63)


@pytest.mark.skipif(sys.platform == "win32", reason="closed pages are POSIX's")
def test_a_program_of_another_size_ends_at_a_closed_page_if_nothing_compares() -> None:
    """What the entry refuses would write beside its result: with a planted fault."""
    script = """
        import numpy as np
        import hopflow as hf
        from hopflow.compiler.cpu import runtime
        from hopflow.compiler.cpu.stubs import NUMBER
        from hopflow.testing.mutants import MUTANTS

        def nothing(program):
            given = (*program.sizes, *program.inputs, *program.outputs)
            return np.full(len(given), NUMBER, np.int64)

        hf.config.guard_pages = True
        f = hf.jit(lambda x: hf.zeros((x.shape[0] ** 5 % 100000,)), dynamic=True)
        with MUTANTS["sizes of two minds"].planted():
            print(f(hf.ones(3)).shape)
            try:
                f(hf.ones(9001))
            except hf.errors.BoundsError:
                print("refused")
        runtime._expected = nothing
        with MUTANTS["sizes of two minds"].planted():
            f = hf.jit(lambda x: hf.zeros((x.shape[0] ** 5 % 100000,)), dynamic=True)
            f(hf.ones(9001))
    """
    run = subprocess.run(
        [sys.executable, "-c", dedent(script)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.stdout == "(243,)\nrefused\n"
    assert run.returncode == -signal.SIGSEGV
