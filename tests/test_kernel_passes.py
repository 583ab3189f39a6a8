"""Passes over kernel programs: the text of small programs before and after."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import hopflow as hf
from hopflow.compiler.kernel_passes import Context
from hopflow.compiler.kernel_passes.checks import split_checks
from hopflow.compiler.kernel_passes.hoist import hoist
from hopflow.compiler.kernel_passes.inline import inline
from hopflow.compiler.kernel_passes.pack import pack
from hopflow.compiler.kernel_passes.simplify import simplify
from hopflow.compiler.kernel_passes.split import MOST, split
from hopflow.compiler.kernel_program.printer import format_kernels
from hopflow.compiler.kernel_program.verifier import verify_kernels
from hopflow.compiler.pipeline import kernels_of

pytestmark = pytest.mark.slow

X = np.arange(8.0)
Pass = Callable[..., None]


def after(*passes: Pass, of: Callable[..., Any], args: Any, **context: Any) -> str:
    """The text of a function's kernel program after some passes, without its first
    line."""
    program = kernels_of(hf.trace(of, *args).graph)
    for run in passes:
        run(program, Context(**context))
        verify_kernels(program)
    return "\n".join(format_kernels(program).splitlines()[1:])


def lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines()]


# --- hoist ----------------------------------------------------------------------------


def test_what_no_step_changes_is_computed_before_the_loop() -> None:
    found = after(
        hoist,
        of=lambda x, y: hf.fori_loop(0, 3, lambda _, c: c + y * 2.0, x),
        args=(X, X),
    )
    assert found.startswith("    v8: f64[8] = y[i0] * 2.0 for i0 < 8\n")


def test_an_equation_may_leave_several_loops() -> None:
    def inner(c: Any, y: Any) -> Any:
        return hf.fori_loop(0, 3, lambda _, c: c + y * 2.0, c)

    found = after(
        hoist,
        of=lambda x, y: hf.fori_loop(0, 3, lambda _, c: inner(c, y), x),
        args=(X, X),
    )
    assert lines(found)[0].endswith("y[i0] * 2.0 for i0 < 8")


@pytest.mark.parametrize(
    "body",
    [
        lambda c, y, k: c + y[k],  # may stop the program
        lambda c, y, k: c + hf.random.uniform(hf.random.key(k), (8,))[0] * c,
    ],
)
def test_what_may_stop_the_program_stays_in_the_loop(body: Any) -> None:
    found = after(
        hoist,
        split_checks,
        of=lambda x, y, k: hf.fori_loop(0, 3, lambda _, c: body(c, y, k), x),
        args=(X, X, hf.asarray(3)),
    )
    checks = [n for n, line in enumerate(lines(found)) if line.startswith("check ")]
    loop = next(n for n, line in enumerate(lines(found)) if " = while" in line)
    assert all(n > loop for n in checks)


# --- checks ---------------------------------------------------------------------------


def test_a_check_is_an_equation_before_what_it_guards() -> None:
    args = X, hf.asarray(3)
    program = kernels_of(hf.trace(lambda x, k: x[k] * 2.0, *args).graph)
    assert len(program.block.equations) == 2
    split_checks(program, Context())
    check, view, _ = program.block.equations
    assert check.results == ()
    assert getattr(view.definition, "checks", None) == ()


# --- inline ---------------------------------------------------------------------------


def test_what_is_read_once_is_computed_where_it_is_read() -> None:
    found = after(
        split_checks,
        inline,
        of=lambda x: hf.sum((x * 2.0 + 1.0)[::-1]),
        args=(X,),
    )
    assert lines(found) == [
        "v3: f64[] = reduce add from 0.0 of x[i0 * -1 + 7] * 2.0 + 1.0 over i0 < 8",
        "return v3",
    ]


def test_what_is_dear_and_read_twice_is_stored() -> None:
    found = after(
        split_checks,
        inline,
        of=lambda x: hf.sin(x) + hf.roll(hf.sin(x), 1),
        args=(X,),
    )
    assert lines(found)[0] == "v0: f64[8] = sin(x[i0]) for i0 < 8"


def test_what_is_cheap_is_computed_again_for_each_reader() -> None:
    found = after(
        split_checks, inline, of=lambda x: (x + 1.0)[::-1] * (x + 1.0), args=(X,)
    )
    assert len(lines(found)) == 2


def test_the_next_carries_of_one_shape_are_computed_at_once() -> None:
    found = after(
        hoist,
        split_checks,
        inline,
        of=lambda a, b: hf.fori_loop(0, 3, lambda _, a, b: (a + b, a - b), (a, b)),
        args=(X, X),
    )
    both = "c8[i0] + c9[i0], c8[i0] - c9[i0] for i0 < 8"
    assert any(line.endswith(both) for line in lines(found))


def test_what_reads_a_value_that_is_written_over_is_stored_before() -> None:
    """`y` is cheap, but its elements are of `c` before the update."""

    def step(_: Any, c: Any) -> Any:
        y = c[::-1] + 1.0
        c = c.at[0].set(5.0)
        return c * 2.0 + y

    found = lines(
        after(split_checks, inline, of=lambda x: hf.fori_loop(0, 3, step, x), args=(X,))
    )
    stored = next(n for n, line in enumerate(found) if "i0 * -1 + 7] + 1.0" in line)
    update = next(n for n, line in enumerate(found) if " with [" in line)
    assert stored < update


def test_a_value_that_got_memory_twice_is_stored_before_an_update() -> None:
    def f(x: Any) -> Any:
        y = x[::-1]
        first = hf.fori_loop(0, 2, lambda _, c: c * 2.0 + hf.sum(c), y)
        x = hf.cumulative_sum(x)
        z = x[::-1]
        second = hf.fori_loop(0, 2, lambda _, c: c * 2.0 + hf.sum(c), z)
        return first + second + x.at[0].set(5.0) + z

    jitted = hf.jit(f)
    np.testing.assert_array_equal(jitted(X), f(hf.asarray(X)))


def test_a_result_in_the_memory_of_a_parameter_is_computed_last() -> None:
    found = after(
        split_checks,
        inline,
        of=lambda x, y: (x + y, x * y),
        args=(X, X),
        reused={0: 0, 1: 1},
    )
    assert lines(found)[0].endswith("x[i0] + y[i0], x[i0] * y[i0] for i0 < 8")


# --- simplify -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("f", "want"),
    [
        (lambda x: hf.reshape(hf.reshape(x, (2, 4)), (8,)), "x[i0]"),
        (lambda x: hf.reshape(hf.reshape(x, (2, 4)) * 2.0, (8,)), "x[i0] * 2.0"),
        (lambda x: hf.concat([x, x])[:8] + 1.0, "x[i0] + 1.0"),
        (lambda x: hf.concat([x, x])[8:] + 1.0, "x[i0] + 1.0"),
        (lambda x: hf.roll(x, 8) + 1.0, "x[i0] + 1.0"),
    ],
)
def test_index_arithmetic_that_ranges_decide_is_gone(f: Any, want: str) -> None:
    found = after(split_checks, inline, simplify, of=f, args=(X,))
    assert lines(found)[0].split(" = ")[1] == f"{want} for i0 < 8"


def test_a_check_that_always_holds_is_gone() -> None:
    at = hf.asarray(np.arange(8))
    near = lambda x, k: hf.take(x, hf.clip(k, 0, 7))  # noqa: E731
    far = lambda x, k: hf.take(x, hf.clip(k, 0, 8))  # noqa: E731
    texts = [
        after(split_checks, inline, simplify, of=f, args=(X, at)) for f in (near, far)
    ]
    assert ["check index" in text for text in texts] == [False, True]


# --- split ----------------------------------------------------------------------------


def pieces(f: Callable[..., Any], *args: Any) -> str:
    """What the result of a function is, once it is cut into pieces."""
    text = after(split_checks, inline, simplify, split, of=f, args=args)
    *_, found, _ = lines(text)
    return found.split(" = ", 1)[1]


def agree(f: Callable[..., Any], *args: Any) -> None:
    """Require of native code the numbers of the interpreter."""
    want = hf.jit(f, backend="interpreter")(*args)
    np.testing.assert_allclose(hf.jit(f)(*args), want, rtol=1e-15)


SPLIT: dict[str, tuple[Any, str]] = {
    "concat": (
        lambda x: hf.concat([x * 2.0, x[:3]]),
        "(x[i0] * 2.0 where i0 < 8, x[i0 - 8] elsewhere) for i0 < 11",
    ),
    "concat of three": (
        lambda x: hf.concat([x, x[:3], x[:2]]),
        "(x[i0] where i0 < 8, x[i0 - 8] where i0 < 11, x[i0 - 11] elsewhere)"
        " for i0 < 13",
    ),
    "roll": (
        lambda x: hf.roll(x, 2),
        "(x[i0 + 6] where i0 < 2, x[i0 - 2] elsewhere) for i0 < 8",
    ),
    "roll there and back": (
        lambda x: hf.roll(x, 1) * hf.roll(x, -1),
        "(x[i0 + 7] * x[i0 + 1] where i0 < 1, "
        "x[i0 - 1] * x[i0 + 1] where i0 < 7, x[i0 - 1] * x[i0 - 7] elsewhere)"
        " for i0 < 8",
    ),
    "pad": (
        lambda x: hf.pad(x, (1, 2)),
        "(0.0 where i0 < 1, x[i0 - 1] where i0 < 9, 0.0 elsewhere) for i0 < 11",
    ),
    "backwards": (
        lambda x: hf.concat([x, x[:3]])[::-1],
        "(x[i0 * -1 + 2] where i0 < 3, x[i0 * -1 + 10] elsewhere) for i0 < 11",
    ),
    "an index that wraps around": (
        lambda x: x[hf.arange(8) - 3],
        "(x[i0 + 5] where i0 < 3, x[i0 - 3] elsewhere) for i0 < 8",
    ),
    "dear sides": (
        lambda x: hf.where(hf.arange(8) < 3, hf.sin(x), hf.cos(x)),
        "(sin(x[i0]) where i0 < 3, cos(x[i0]) elsewhere) for i0 < 8",
    ),
    "a plane": (
        lambda x: hf.pad(x.reshape((2, 4)), ((0, 1), (1, 0)))[:, :3],
        "((0.0 where i1 < 1, x[i0 * 4 + (i1 - 1)] elsewhere) where i0 < 2, "
        "0.0 elsewhere) for i0 < 3, i1 < 3",
    ),
}


@pytest.mark.parametrize("name", SPLIT)
def test_tests_of_an_index_cut_its_axis_into_pieces(name: str) -> None:
    f, want = SPLIT[name]
    assert pieces(f, X) == want
    agree(f, X)


@pytest.mark.parametrize(
    "f",
    [
        lambda x: hf.where(hf.arange(8) < 3, x * 2.0, x + 1.0),  # cheaper than a loop
        lambda x: hf.where(x < 3.0, hf.sin(x), hf.cos(x)),  # no index
        lambda x: hf.sum(hf.roll(x, 1) * x),  # no element of a result
        lambda x: hf.roll(x[:3], 1),  # in registers
        lambda x: hf.roll(x[:, None] * x, 1, axis=1),  # rows of 1 and 7
    ],
)
def test_what_gains_nothing_from_pieces_is_whole(f: Any) -> None:
    assert " where " not in after(
        split_checks, inline, simplify, split, of=f, args=(X,)
    )
    agree(f, X)


def test_there_are_not_more_pieces_than_a_bound() -> None:
    def f(x: Any) -> Any:
        return hf.concat([x * float(k) for k in range(3 * MOST)])

    assert pieces(f, X).count(" where ") == MOST - 1
    agree(f, X)


# --- pack -----------------------------------------------------------------------------


def test_the_matrix_of_a_product_in_a_loop_is_copied_before_it() -> None:
    found = after(
        hoist,
        split_checks,
        inline,
        pack,
        of=lambda h, w: hf.fori_loop(0, 3, lambda _, c: c @ w, h),
        args=(np.ones((1, 128)), np.ones((128, 128))),
    )
    assert lines(found)[0].startswith("w_packed: f64[128, 128] = w[i0, i1]")
    assert "gemm(c6, w_packed, " in found


@pytest.mark.parametrize(
    ("layout", "copied"), [("dense", False), ("rows", True), ("strided", True)]
)
def test_an_input_that_a_loop_reads_becomes_dense(layout: Any, copied: bool) -> None:
    found = after(
        inline,
        pack,
        of=lambda x, y: hf.fori_loop(0, 3, lambda _, c: c + y, x),
        args=(X, X),
        layouts=("dense", layout),
    )
    assert ("y_packed" in found) == copied
