"""Carries, rows and results of branches that nothing needs once checks are proven."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import hopflow as hf
from hopflow import pytree
from hopflow.compiler.kernel_passes import Context
from hopflow.compiler.kernel_passes.carries import carries
from hopflow.compiler.kernel_passes.checks import checks
from hopflow.compiler.kernel_passes.counters import counters
from hopflow.compiler.kernel_passes.idle_carries import idle_carries
from hopflow.compiler.kernel_passes.inline import inline
from hopflow.compiler.kernel_passes.simplify import simplify
from hopflow.compiler.kernel_program.printer import format_kernels
from hopflow.compiler.kernel_program.program import KernelProgram
from hopflow.compiler.kernel_program.verifier import verify_kernels
from hopflow.compiler.pipeline import kernels_of
from hopflow.errors import IndexingError

pytestmark = pytest.mark.usefixtures("guarded")

X = np.arange(8.0)
K = np.arange(8) * 3


def permuted(x: Any, k: Any) -> Any:
    """Return elements at indices that are in bounds, as a range tells."""
    return hf.take_along_axis(x, k % x.shape[0], axis=0)


def gathered(x: Any, k: Any) -> Any:
    return hf.fori_loop(0, 3, lambda _, a, b: (permuted(a, k), b + 1), (x, x))[1]


def in_a_circle(x: Any, k: Any) -> Any:
    def step(_: Any, a: Any, b: Any, c: Any) -> Any:
        return permuted(b, k), permuted(a, k), c * 2

    return hf.fori_loop(0, 3, step, (x, x + 1, x))[2]


def in_an_outer_loop(x: Any, k: Any) -> Any:
    def step(_: Any, a: Any, b: Any) -> Any:
        c = hf.fori_loop(0, 2, lambda _, c: permuted(c, k), a)
        return c, b + 1

    return hf.fori_loop(0, 3, step, (x, x))[1]


def rows(x: Any, k: Any) -> Any:
    y, sines = hf.scan(lambda b, _: (b + 1, hf.sin(b)), x, hf.arange(3))
    permuted(sines[0], k)
    return y


def beside_a_needed_one(x: Any, k: Any) -> Any:
    """Both sums are filled into arrays of one shape, perhaps by one equation."""

    def step(_: Any, a: Any, b: Any) -> Any:
        idle = hf.broadcast_to(hf.sum(permuted(a, k)), a.shape)
        return idle, hf.broadcast_to(hf.sum(b), b.shape)

    return hf.fori_loop(0, 3, step, (x, x))[1]


def yielded(program: KernelProgram) -> list[int]:
    """Return the numbers of what the steps of each loop compute."""
    lines = map(str.strip, format_kernels(program).splitlines())
    return [line.count(",") + 1 for line in lines if line.startswith("yield ")]


@pytest.mark.parametrize(
    "f", [gathered, in_a_circle, in_an_outer_loop, rows, beside_a_needed_one]
)
@pytest.mark.parametrize("dynamic", [None, True])
def test_what_is_idle_goes(f: Callable[..., Any], dynamic: bool | None) -> None:
    program = kernels_of(hf.trace(f, X, K).graph)
    for run in (carries, checks, counters, inline, simplify):
        run(program, Context())
    assert sum(yielded(program)) > 1
    idle_carries(program, Context())
    verify_kernels(program)
    assert yielded(program) == [1]
    text = format_kernels(program)
    assert "select" not in text
    assert "sin" not in text
    got = hf.jit(f, dynamic=dynamic)(X, K)
    np.testing.assert_array_equal(np.asarray(got), np.asarray(f(X, K)))


def read_by_another(x: Any, k: Any) -> Any:
    def step(_: Any, a: Any, b: Any) -> Any:
        return permuted(a, k), b + a[0]

    return hf.fori_loop(0, 3, step, (x, x))[1]


def read_by_another_in_turn(x: Any, k: Any) -> Any:
    def step(_: Any, a: Any, b: Any, c: Any) -> Any:
        return permuted(a, k), a * 2, c + b[0]

    return hf.fori_loop(0, 4, step, (x, x, x))[2]


def read_by_the_test(x: Any, k: Any) -> Any:
    def step(a: Any, b: Any) -> Any:
        return permuted(a, k) + 1, b + 1

    return hf.while_loop(lambda a, _: hf.sum(a) < 90, step, (x, x))[1]


def read_by_a_check(x: Any, k: Any) -> Any:
    def step(_: Any, a: Any, b: Any) -> Any:
        hf.check(hf.sum(a) >= 0, "a sum is negative")
        return permuted(a, k), b + 1

    return hf.fori_loop(0, 3, step, (x, x))[1]


def read_by_a_row(x: Any, k: Any) -> Any:
    return hf.scan(lambda a, _: (permuted(a, k), a + 1), x, hf.arange(3))[1]


def read_in_one_branch(x: Any, k: Any) -> Any:
    def step(i: Any, a: Any, b: Any) -> Any:
        taken = hf.cond(i > 1, lambda: b + a, lambda: b + 1)
        return permuted(a, k), taken

    return hf.fori_loop(0, 4, step, (x, x))[1]


@pytest.mark.parametrize(
    "f",
    [
        read_by_another,
        read_by_another_in_turn,
        read_by_the_test,
        read_by_a_check,
        read_by_a_row,
        read_in_one_branch,
    ],
)
@pytest.mark.parametrize("dynamic", [None, True])
def test_what_something_reads_stays(
    f: Callable[..., Any], dynamic: bool | None
) -> None:
    found, wanted = (
        pytree.flatten(g(X, K))[0] for g in (hf.jit(f, dynamic=dynamic), f)
    )
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_an_index_out_of_bounds_is_an_error_though_nothing_reads() -> None:
    def f(x: Any, k: Any) -> Any:
        def step(_: Any, a: Any, b: Any) -> Any:
            return a[k], b + 1

        return hf.fori_loop(0, 3, step, (x, x))[1]

    jitted = hf.jit(f)
    np.testing.assert_array_equal(np.asarray(jitted(X, K % 8)), X + 3)
    with pytest.raises(IndexingError):
        jitted(X, K)


def test_a_sort_for_an_idle_carry_is_not_made() -> None:
    def f(x: Any, y: Any) -> Any:
        def step(_: Any, a: Any, b: Any) -> Any:
            order = hf.argsort(a) % a.shape[0]
            return hf.take_along_axis(a, order, axis=0), b * 0.5

        return hf.fori_loop(0, 3, step, (x, y))[1]

    jitted, x = hf.jit(f), np.arange(100.0)  # many, or a network would sort
    np.testing.assert_array_equal(np.asarray(jitted(x, x)), x / 8)
    assert "argsort" not in jitted.loop_ir


def test_results_of_branches_that_only_a_check_reads_go() -> None:
    def f(flag: Any, x: Any, k: Any) -> Any:
        index, y = hf.cond(
            flag,
            lambda: (hf.argsort(hf.sin(x)) % 100, x + 1),
            lambda: (k % 100, x - 1),
        )
        hf.take_along_axis(x, index, axis=0)
        return y

    jitted, x = hf.jit(f), np.arange(100.0)
    for flag in (True, False):
        got = np.asarray(jitted(flag, x, np.arange(100) * 3))
        np.testing.assert_array_equal(got, x + 1 if flag else x - 1)
    assert "argsort" not in jitted.loop_ir


def grown(x: Any) -> Any:
    """Return a carry that grows, and one that counts steps."""

    def step(i: Any, a: Any, b: Any) -> Any:
        return i + 1, hf.concat([a, a]), b + 1

    dims = {"a": {0: hf.Dim("n", max=64)}}
    return hf.while_loop(lambda i, *_: i < 3, step, (0, x, x), dynamic_carry=dims)


def of_its_own_length(x: Any) -> Any:
    def step(i: Any, a: Any, b: Any) -> Any:
        return i + 1, hf.concat([a, a]), b + a.shape[0]

    dims = {"a": {0: hf.Dim("n", max=64)}}
    return hf.while_loop(lambda i, *_: i < 3, step, (0, x, 0), dynamic_carry=dims)[2]


def length_of_a_scan(x: Any) -> Any:
    dims = {"a": {0: hf.Dim("n", max=64)}}
    carry, rows = hf.scan(
        lambda a, e: (hf.concat([a, a[:1]]), e + 1), x, x, dynamic_carry=dims
    )
    return rows + carry.shape[0]


@pytest.mark.parametrize(
    "f",
    [
        lambda x: grown(x)[2],
        lambda x: grown(x)[2] + grown(x)[1].shape[0],
        of_its_own_length,
        length_of_a_scan,
        lambda x: x + hf.cond(x[0] < 1, lambda: x[:3], lambda: x[x > 6]).shape[0],
    ],
)
@pytest.mark.parametrize("dynamic", [None, True])
def test_a_size_that_something_needs_stays(
    f: Callable[..., Any], dynamic: bool | None
) -> None:
    got = np.asarray(hf.jit(f, dynamic=dynamic)(X))
    with hf.debug():
        np.testing.assert_array_equal(got, np.asarray(f(hf.asarray(X))))


def test_a_product_that_only_an_empty_array_reads_is_not_made() -> None:
    def f(x: Any, empty: Any) -> Any:
        total = hf.sum(hf.maximum(x @ x, 0.0))
        return x[0] * 2, empty + total

    jitted, x, empty = hf.jit(f), np.ones((90, 90)), np.zeros(0)
    doubled, none = jitted(x, empty)
    np.testing.assert_array_equal(np.asarray(doubled), np.full(90, 2.0))
    assert none.shape == (0,)
    assert "gemm" not in jitted.loop_ir


def test_a_factorisation_that_an_idle_carry_needs_is_not_made() -> None:
    def f(x: Any, k: Any) -> Any:
        def step(_: Any, a: Any, b: Any) -> Any:
            return hf.take_along_axis(hf.linalg.cholesky(a), k % 9, axis=1), b + 1

        return hf.fori_loop(0, 3, step, (x, x))[1]

    jitted, x = hf.jit(f), np.eye(9)
    got = jitted(x, np.arange(81).reshape(9, 9))
    np.testing.assert_array_equal(np.asarray(got), x + 3)
    assert "potrf" not in jitted.loop_ir
