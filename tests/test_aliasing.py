"""Programs in which a compiler that reuses memory would easily read what it overwrote.

Each is run in NumPy, which is the reference: as plain Python over arrays, operators are
loops and branches there (`testing.plain`). Sizes 17 and 5 are in memory, 1 in
registers, and of 0 elements nothing may be read.
"""

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pytest

import hopflow
from hopflow import pytree
from hopflow.testing.executions import (
    agree,
    run_debug,
    run_donated,
    run_dynamic,
    run_jit,
)
from hopflow.testing.libraries import names_of_jax
from hopflow.testing.plain import Plain
from hopflow.testing.requires import load, requires

hf: Any = hopflow
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("guarded")]

SIZES: Final = (0, 1, 5, 17)
Case = Callable[[Any, Any, Any], Any]
"""(library, x, y) -> results; `x` and `y` are two arrays of one length."""

WRITING: Final[dict[str, Case]] = {}
"""Those that assign to elements."""
PURE: Final[dict[str, Case]] = {}
"""Those that JAX can run, too."""


def writing(f: Case) -> Case:
    WRITING[f.__name__] = f
    return f


def pure(f: Case) -> Case:
    PURE[f.__name__] = f
    return f


# --- an array is copied, and the copy is written --------------------------------------


def written_copies(lib: Any, x: Any, y: Any, copy: Callable[[Any], Any]) -> Any:
    """Each step writes one element of a copy of the carry, which is not read again."""

    def step(i: Any, a: Any) -> Any:
        b = copy(a)
        b[i] = b[i] * 0.5 + y[i]
        return (b,)

    return lib.fori_loop(0, x.shape[0], step, (x,))


@writing
def copy_then_write(lib: Any, x: Any, y: Any) -> Any:
    return written_copies(lib, x, y, lib.copy)


@writing
def copy_through_a_reshape(lib: Any, x: Any, y: Any) -> Any:
    return written_copies(
        lib, x, y, lambda a: lib.reshape(lib.copy(lib.reshape(a, (-1, 1))), a.shape)
    )


@writing
def copy_through_positive(lib: Any, x: Any, y: Any) -> Any:
    return written_copies(lib, x, y, lib.positive)


@writing
def copy_through_astype(lib: Any, x: Any, y: Any) -> Any:
    return written_copies(lib, x, y, lambda a: lib.astype(a, lib.float64, copy=True))


@writing
def copy_through_an_identity(lib: Any, x: Any, y: Any) -> Any:
    return written_copies(lib, x, y, lambda a: lib.copy(a[...])[::-1][::-1])


@writing
def copy_of_a_copy(lib: Any, x: Any, y: Any) -> Any:
    return written_copies(lib, x, y, lambda a: lib.copy(lib.copy(a)))


@writing
def copy_through_two_flips(lib: Any, x: Any, y: Any) -> Any:
    return written_copies(
        lib, x, y, lambda a: lib.flip(lib.copy(lib.flip(a, axis=0)), axis=0)
    )


@writing
def copied_array_read_after_the_write(lib: Any, x: Any, y: Any) -> Any:
    def step(i: Any, a: Any) -> Any:
        b = lib.copy(a)
        b[i] = y[i]
        return (b - a * 0.5,)

    return lib.fori_loop(0, x.shape[0], step, (x,))


@writing
def copied_element_read_after_the_write(lib: Any, x: Any, y: Any) -> Any:
    def step(i: Any, a: Any) -> Any:
        b = lib.copy(a)
        b[i] = y[i] * 2
        b[-1:] = a[i] + b[i]
        return (b,)

    return lib.fori_loop(0, x.shape[0], step, (x,))


@writing
def copied_array_and_copy_as_two_carries(lib: Any, x: Any, y: Any) -> Any:
    def step(i: Any, a: Any, _: Any) -> Any:
        b = lib.copy(a)
        b[i] = y[i] - b[i]
        return b, a

    return lib.fori_loop(0, x.shape[0], step, (x, x))


@writing
def two_copies_of_one_array(lib: Any, x: Any, y: Any) -> Any:
    def step(i: Any, a: Any) -> Any:
        b, c = lib.copy(a), lib.copy(a)
        b[i], c[-1:] = y[i], b[i]
        return (b - c * 0.5,)

    return lib.fori_loop(0, x.shape[0], step, (x,))


@writing
def copy_of_an_array_of_outside(lib: Any, x: Any, y: Any) -> Any:
    def step(i: Any, total: Any) -> Any:
        b = lib.copy(x)
        b[i] = total[i]
        return (total * 0.5 + b,)

    return *lib.fori_loop(0, x.shape[0], step, (y,)), x


@writing
def copy_in_a_while_loop(lib: Any, x: Any, y: Any) -> Any:
    def step(n: Any, a: Any) -> Any:
        b = lib.copy(a)
        b[n - 1] = b[n - 1] * y[n - 1] + 1
        return n - 1, b

    first = lib.full((), x.shape[0], dtype=lib.int64)
    return lib.while_loop(lambda n, _: n > 0, step, (first, x))[1]


@writing
def copies_kept_by_a_scan(lib: Any, x: Any, y: Any) -> Any:
    def step(carry: Any, row: Any) -> Any:
        (a,) = carry
        b = lib.copy(a)
        b[:1] = row * 0.5 + b[-1:]
        return (b,), (a, b)

    return lib.scan(step, (x,), y)


@writing
def copy_in_one_branch(lib: Any, x: Any, y: Any) -> Any:
    def step(i: Any, a: Any) -> Any:
        def written() -> Any:
            b = lib.copy(a)
            b[i] = y[i]
            return b

        return (lib.cond(a[i] > 0.2, written, lambda: a),)

    return lib.fori_loop(0, x.shape[0], step, (x,))


@writing
def copy_in_a_branch_without_a_loop(lib: Any, x: Any, y: Any) -> Any:
    def written() -> Any:
        b = lib.copy(x)
        b[1:] = b[:-1] * 0.5
        return b, x

    return lib.cond(lib.sum(y) < 99, written, lambda: (x, y))


@writing
def copy_in_a_subgraph(lib: Any, x: Any, y: Any) -> Any:
    def written(a: Any, b: Any) -> Any:
        c = lib.copy(a)
        c[1:] = b[:-1]
        return c, a

    first, second = lib.invoke_subgraph(written, x, y)
    return lib.invoke_subgraph(written, second, first)


@writing
def copy_in_an_inner_loop(lib: Any, x: Any, y: Any) -> Any:
    def outer(_: Any, a: Any) -> Any:
        def inner(i: Any, b: Any) -> Any:
            c = lib.copy(b)
            c[i] = a[i] * 0.5 + y[i]
            return (c,)

        (found,) = lib.fori_loop(0, a.shape[0], inner, (a,))
        return (found - a * 0.25,)

    return lib.fori_loop(0, 3, outer, (x,))


# --- carries that are written in place ------------------------------------------------


@writing
def element_read_before_and_after_the_write(lib: Any, x: Any, y: Any) -> Any:
    def step(i: Any, a: Any, b: Any) -> Any:
        before = a[i]
        a[i] = y[i]
        b[i] = before - a[i] * 0.5
        return a, b

    return lib.fori_loop(0, x.shape[0], step, (x, y))


@writing
def whole_array_read_before_and_after_the_write(lib: Any, x: Any, y: Any) -> Any:
    def step(i: Any, a: Any) -> Any:
        before = a * 0.5
        a[i] = y[i]
        return (a - before,)

    return lib.fori_loop(0, x.shape[0], step, (x,))


@writing
def shift_within_one_array(lib: Any, x: Any, y: Any) -> Any:
    def step(_: Any, a: Any) -> Any:
        a[1:] = a[:-1]
        a[:1] = y[:1]
        return (a,)

    return lib.fori_loop(0, 3, step, (x,))


@writing
def view_read_after_the_write(lib: Any, x: Any, y: Any) -> Any:
    def step(i: Any, a: Any) -> Any:
        seen = a[::-1]
        a[i] = y[i]
        return (a * 0.5 + seen,)

    return lib.fori_loop(0, x.shape[0], step, (x,))


@writing
def view_of_a_view_read_after_the_write(lib: Any, x: Any, y: Any) -> Any:
    def step(i: Any, a: Any) -> Any:
        seen = lib.flip(lib.reshape(a, (1, -1)), axis=1)[0, 1:]
        a[i] = y[i]
        a[1:] = seen * 0.5
        return (a,)

    return lib.fori_loop(0, x.shape[0], step, (x,))


@writing
def base_read_after_a_write_through_a_view(lib: Any, x: Any, y: Any) -> Any:
    def step(i: Any, a: Any) -> Any:
        seen = lib.permute_dims(lib.reshape(a, (-1, 1)), (1, 0))
        seen[0, i] = y[i] - a[i]
        return (a + seen[0] * 0.5,)

    return lib.fori_loop(0, x.shape[0], step, (x,))


@writing
def write_of_one_carry_from_another(lib: Any, x: Any, y: Any) -> Any:
    def step(i: Any, a: Any, b: Any) -> Any:
        a[i], b[-1:] = b[i], a[i]
        return b, a

    return lib.fori_loop(0, x.shape[0], step, (x, y))


@writing
def written_carries_that_rotate(lib: Any, x: Any, y: Any) -> Any:
    def step(i: Any, a: Any, b: Any, c: Any) -> Any:
        a[i] = b[i] + c[i] * 0.5
        return b, c, a

    return lib.fori_loop(0, x.shape[0], step, (x, y, x))


@writing
def write_in_one_branch(lib: Any, x: Any, y: Any) -> Any:
    def step(i: Any, a: Any, b: Any) -> Any:
        def written() -> Any:
            a[i] = b[i]
            return b, a

        return lib.cond(b[i] > 0.1, written, lambda: (a, b))

    return lib.fori_loop(0, x.shape[0], step, (x, y))


@writing
def pieces_of_a_written_carry(lib: Any, x: Any, y: Any) -> Any:
    def step(i: Any, a: Any) -> Any:
        tail = a[1:]
        a[i] = y[i]
        return (lib.concat([tail * 0.5, a[:1]]),)

    return lib.fori_loop(0, x.shape[0], step, (x,))


# --- carries that are computed from each other ----------------------------------------


@pure
def carries_swapped(lib: Any, x: Any, y: Any) -> Any:
    return lib.fori_loop(0, 3, lambda _, a, b: (b, a), (x, y))


@pure
def carries_swapped_as_often_as_data_say(lib: Any, x: Any, y: Any) -> Any:
    count = lib.astype(lib.sum(x * 0) + 5, lib.int64)
    return lib.while_loop(
        lambda n, *_: n > 0, lambda n, a, b: (n - 1, b, a), (count, x, y)
    )


@pure
def carries_computed_from_each_other(lib: Any, x: Any, y: Any) -> Any:
    return lib.fori_loop(0, 4, lambda _, a, b: (lib.sin(b), a * 0.5 + 1), (x, y))


@pure
def carries_computed_from_moved_elements(lib: Any, x: Any, y: Any) -> Any:
    def step(_: Any, a: Any, b: Any) -> Any:
        return lib.flip(b, axis=0) * 0.5, lib.roll(a, 1, axis=0) - 1

    return lib.fori_loop(0, 4, step, (x, y))


@pure
def fibonacci(lib: Any, x: Any, y: Any) -> Any:
    return lib.fori_loop(0, 5, lambda _, a, b: (b, a + b), (x, y))


@pure
def leapfrog(lib: Any, x: Any, y: Any) -> Any:
    def step(_: Any, new: Any, old: Any) -> Any:
        moved = lib.roll(new, 1, axis=0) + lib.roll(new, -1, axis=0)
        return 2 * new - old + 0.1 * (moved - 2 * new), new

    return lib.fori_loop(0, 5, step, (x, y))


@pure
def three_carries_rotated(lib: Any, x: Any, y: Any) -> Any:
    return lib.fori_loop(0, 4, lambda _, a, b, c: (b, c, a), (x, y, x * y))


@pure
def three_carries_rotated_and_computed(lib: Any, x: Any, y: Any) -> Any:
    def step(_: Any, a: Any, b: Any, c: Any) -> Any:
        return c, a * 0.5 + b, lib.flip(b, axis=0)

    return lib.fori_loop(0, 4, step, (x, y, x))


@pure
def one_value_for_two_carries(lib: Any, x: Any, y: Any) -> Any:
    def step(_: Any, a: Any, b: Any) -> Any:
        found = a * 0.5 + lib.flip(b, axis=0)
        return found, found

    return lib.fori_loop(0, 3, step, (x, y))


@pure
def one_initial_value_for_two_carries(lib: Any, x: Any, y: Any) -> Any:
    def step(_: Any, a: Any, b: Any) -> Any:
        return a * y + b, lib.flip(b, axis=0)

    return lib.fori_loop(0, 3, step, (x, x))


@pure
def carry_unchanged_beside_a_new_one(lib: Any, x: Any, y: Any) -> Any:
    return lib.fori_loop(0, 3, lambda _, a, b: (a, lib.roll(b, 1, axis=0) + a), (x, y))


@pure
def carry_unchanged_in_one_branch(lib: Any, x: Any, y: Any) -> Any:
    def step(i: Any, a: Any, b: Any) -> Any:
        return lib.cond(
            i % 2 == 0, lambda: (a, b), lambda: (lib.flip(a, axis=0) * b, b)
        )

    return lib.fori_loop(0, 5, step, (x, y))


@pure
def carries_swapped_in_one_branch(lib: Any, x: Any, y: Any) -> Any:
    def step(i: Any, a: Any, b: Any) -> Any:
        return lib.cond(i % 3 == 1, lambda: (a, b + a), lambda: (b, a))

    return lib.fori_loop(0, 5, step, (x, y))


@pure
def carries_swapped_by_nested_loops(lib: Any, x: Any, y: Any) -> Any:
    def outer(_: Any, a: Any, b: Any) -> Any:
        c, d = lib.fori_loop(0, 3, lambda _, c, d: (d, c * 0.5 + a), (a, b))
        return d, c + b

    return lib.fori_loop(0, 3, outer, (x, y))


@pure
def carries_swapped_by_a_scan(lib: Any, x: Any, y: Any) -> Any:
    def step(carry: Any, row: Any) -> Any:
        a, b = carry
        return (b, a + row), (a, b)

    return lib.scan(step, (x, y), x)


@pure
def swap_without_a_loop(lib: Any, x: Any, y: Any) -> Any:
    return lib.cond(lib.sum(x) < 99, lambda: (y, x, y), lambda: (x, y, x))


# --- updates, pieces, stacks, inputs that are outputs ---------------------------------


@pure
def update_of_a_slice(lib: Any, x: Any, y: Any) -> Any:
    def step(i: Any, a: Any) -> Any:
        b = lib.dynamic_update_slice(a, y[:1], [i])
        return (b - a * 0.5,)

    return lib.fori_loop(0, 3, step, (x,))


@pure
def update_of_a_slice_by_itself(lib: Any, x: Any, y: Any) -> Any:
    def step(i: Any, a: Any) -> Any:
        b = lib.dynamic_update_slice(a, a[: a.shape[0] // 2] * 0.5, [i])
        return (lib.dynamic_update_slice(b, b[::-1][:1], [i + 1]),)

    return lib.fori_loop(0, 4, step, (x + y,))


@pure
def update_by_a_mask(lib: Any, x: Any, y: Any) -> Any:
    def step(_: Any, a: Any, b: Any) -> Any:
        return lib.where(a > b, a, lib.flip(a, axis=0)), a

    return lib.fori_loop(0, 4, step, (x, y))


@pure
def pieces_of_a_carry(lib: Any, x: Any, y: Any) -> Any:
    def step(_: Any, a: Any, b: Any) -> Any:
        return lib.concat([a[1:], b[:1]])[: a.shape[0]], lib.concat([a[:1], b[1:]])

    return lib.fori_loop(0, 4, step, (x, y))


@pure
def stack_of_carries(lib: Any, x: Any, y: Any) -> Any:
    def step(_: Any, a: Any, b: Any) -> Any:
        both = lib.stack([b, lib.flip(a, axis=0)])
        return both[0] * 0.5, both[1] + both[0]

    return lib.fori_loop(0, 4, step, (x, y))


@pure
def padded_carry(lib: Any, x: Any, y: Any) -> Any:
    def step(_: Any, a: Any) -> Any:
        wide = lib.pad(a, [(1, 1)])
        return (wide[2:] * 0.5 + wide[:-2] + y,)

    return lib.fori_loop(0, 3, step, (x,))


@pure
def rows_of_a_stack(lib: Any, x: Any, y: Any) -> Any:
    def step(carry: Any, row: Any) -> Any:
        (a,) = carry
        return (a * 0.5 + row,), a

    (last,), rows = lib.scan(step, (x,), y)
    return last, rows[::-1][:2], rows[1:] - rows[:-1]


@pure
def rows_of_a_stack_read_by_a_loop(lib: Any, x: Any, y: Any) -> Any:
    _, rows = lib.scan(lambda c, row: ((c[0] * row,), c[0]), (x,), y)
    last, others = lib.scan(lambda c, row: ((c[0] - row,), c[0]), (y,), rows)
    return last, rows, others


@pure
def inputs_as_carries_and_outputs(lib: Any, x: Any, y: Any) -> Any:
    found = lib.fori_loop(
        0, 3, lambda _, a, b: (a * 0.5 + y, lib.flip(b, axis=0)), (x, x)
    )
    return *found, x, y, x


@pure
def inputs_as_outputs(lib: Any, x: Any, y: Any) -> Any:
    return y, x, y, lib.reshape(x, (-1, 1)), lib.positive(x), x[::-1]


CASES: Final = WRITING | PURE


def inputs(size: int) -> tuple[Any, Any]:
    rng = np.random.default_rng(size)
    return rng.uniform(-1, 1, size), rng.uniform(-1, 1, size)


def reference(name: str, size: int) -> Any:
    return CASES[name](Plain(), *inputs(size))


def ours(name: str) -> Callable[..., Any]:
    return lambda x, y: CASES[name](hf, x, y)


RUNS: Final = {
    "debug": run_debug,
    "jit": run_jit,
    "dynamic": run_dynamic,
    "donated": run_donated,
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_numpy(name: str, size: int) -> None:
    expected = reference(name, size)
    for run in RUNS.values():
        given, kept = inputs(size), inputs(size)
        tensors = tuple(map(hf.asarray, given))
        agree(run(ours(name), *tensors), expected, rtol=1e-12)
        for tensor, array, before in zip(tensors, given, kept, strict=True):
            np.testing.assert_array_equal(np.asarray(tensor), before)
            np.testing.assert_array_equal(array, before)


@pytest.mark.parametrize("name", CASES)
def test_one_function_for_all_sizes_gives_what_numpy_does(name: str) -> None:
    jitted = hf.jit(ours(name), dynamic=True)
    for size in (5, 17, 0, 1, 17):
        given = tuple(map(hf.asarray, inputs(size)))
        agree(jitted(*given), reference(name, size), rtol=1e-12)
        agree(given, inputs(size), rtol=0)


@requires("jax>=0.11")
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", PURE)
def test_results_are_those_of_jax(name: str, size: int) -> None:
    jax = load("jax")
    with jax.enable_x64(True):
        f = jax.jit(lambda x, y: PURE[name](names_of_jax(), x, y))
        expected = jax.tree.map(np.asarray, f(*inputs(size)))
    agree(run_jit(ours(name), *map(hf.asarray, inputs(size))), expected)


# --- gradients ------------------------------------------------------------------------


def total(results: Any, sum_of: Callable[[Any], Any]) -> Any:
    """A number that depends on each element of the results in a way of its own."""
    leaves = [x for x in pytree.flatten(results)[0] if "float" in x.dtype.name]
    found = 0.0
    for k, leaf in enumerate(leaves):
        found = found + (k + 1) * sum_of(leaf * leaf + 0.3 * leaf)
    return found


def slopes(name: str, size: int, step: float = 1e-5) -> tuple[Any, Any]:
    """The gradient by central differences in NumPy."""

    def at(which: int, k: int, change: float) -> float:
        given = inputs(size)
        given[which][k] += change
        return float(total(CASES[name](Plain(), *given), np.sum))

    def slope(which: int, k: int) -> float:
        return (at(which, k, step) - at(which, k, -step)) / (2 * step)

    found = [np.array([slope(w, k) for k in range(size)]) for w in range(2)]
    return found[0], found[1]


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_differences_of_numpy(name: str, size: int) -> None:
    gradient = hf.grad(lambda x, y: total(ours(name)(x, y), hf.sum), argnums=(0, 1))
    expected = slopes(name, size)
    for run in (run_debug, run_jit, run_dynamic):
        given = tuple(map(hf.asarray, inputs(size)))
        agree(run(gradient, *given), expected, rtol=1e-6)
        agree(given, inputs(size), rtol=0)
