"""Rows of few elements stay in registers through the steps of a loop."""

import re
import sys
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pytest
from tests.test_gangs import target

import hopflow as hf
from hopflow.compiler.cpu.target import CpuTarget
from hopflow.compiler.pipeline import Executable
from hopflow.compiler.schedule.rows_in_registers import rows_in_registers
from hopflow.tensor import EagerTensor

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("guarded")]

Array = np.ndarray[Any, Any]


@pytest.fixture(params=["host", "avx2"])
def cpu(request: pytest.FixtureRequest) -> CpuTarget:
    return target(request.param)


def drawn(shape: tuple[int, ...], dtype: str) -> Array:
    values: Array = np.random.default_rng(0).normal(size=shape) * 3
    return np.abs(values).astype(dtype) if dtype == "uint8" else values.astype(dtype)


def mixed(steps: int) -> Callable[..., Any]:
    """Each step updates three of four elements of a state in place."""

    def f(state: Any, y: Any) -> Any:
        def step(i: Any, s: Any) -> Any:
            s[0] = hf.where(s[1] > s[2], s[1], s[0] * y[i])
            s[3] = s[0] * s[2]
            s[1] = hf.maximum(s[3], s[1])
            return s

        return hf.fori_loop(0, steps, step, state)

    batched: Callable[..., Any] = hf.vmap(f, in_dims=(0, None))
    return batched


def executed(
    f: Callable[..., Any], *args: Array, cpu: CpuTarget | None = None
) -> Executable:
    """Compare compiled results with those of plain Python. Return what compiled."""
    executable = Executable(hf.trace(f, *args).graph, target=cpu)
    found = executable([*map(EagerTensor, args)])
    with hf.debug():
        expected = hf.pytree.flatten(f(*map(hf.asarray, args)))[0]
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_array_equal(x.array, np.asarray(y))
    return executable


def compiled(f: Callable[..., Any], *args: Array, cpu: CpuTarget | None = None) -> str:
    """Return the Loop IR of a function, after `executed`."""
    return executed(f, *args, cpu=cpu).loop_ir


DTYPES: Final = ("float64", "float32", "float16", "int64", "int32", "uint8")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 7, 16, 33, 150])
def test_states_of_examples(dtype: str, n: int, cpu: CpuTarget) -> None:
    state, y = drawn((n, 4), dtype), drawn((6,), dtype)
    text = compiled(mixed(6), state, y, cpu=cpu)
    assert n < 33 or "_kept0" in text


@pytest.mark.parametrize("steps", [0, 1, 2])
def test_few_steps(steps: int) -> None:
    compiled(mixed(steps), drawn((40, 4), "float32"), drawn((6,), "float32"))


def test_the_number_of_examples_is_a_size_of_the_run() -> None:
    f = hf.jit(mixed(6), dynamic=True)
    for n in (40, 0, 1, 77):
        state, y = drawn((n, 4), "float64"), drawn((6,), "float64")
        with hf.debug():
            expected = mixed(6)(hf.asarray(state), hf.asarray(y))
        np.testing.assert_array_equal(f(state, y), np.asarray(expected))


@pytest.mark.parametrize("size", [4, 5])
def test_a_state_that_a_step_indexes_by_its_number_is_stored(size: int) -> None:
    """Of up to four elements one is chosen."""

    def f(state: Any) -> Any:
        def step(i: Any, s: Any) -> Any:
            s[0] = s[i] + s[1]
            return s

        return hf.fori_loop(0, size, step, state)

    text = compiled(hf.vmap(f), drawn((40, size), "float64"))
    assert ("_kept" in text) is (size == 4)


def test_two_states_and_a_long_step(verified: None) -> None:
    """A step that is cut into several loops over rows is one again."""

    def f(a: Any, b: Any) -> Any:
        def step(_: Any, a: Any, b: Any) -> Any:
            for k in range(40):
                i, j = k % 5, (k * 3) % 7
                a[i] = a[i] ^ (b[j] << (k % 3))
                b[j] = b[j] + a[(i + 1) % 5]
            return a, b

        return hf.fori_loop(0, 3, step, (a, b))

    a, b = drawn((50, 5), "int32"), drawn((50, 7), "int32")
    assert "_kept11" in compiled(hf.vmap(f), a, b)


def test_rows_of_a_matrix_that_is_read_across_are_stored() -> None:
    """A step reads the element of another row: rows are not independent."""

    def f(x: Any) -> Any:
        def step(_: Any, x: Any) -> Any:
            return x.at[:, 0].set(x[::-1, 1]).at[:, 1].add(x[:, 0])

        return hf.fori_loop(0, 3, step, x)

    compiled(f, drawn((40, 2), "float64"))


def test_adjacent_rows_stay_in_registers() -> None:
    def f(x: Any, y: Any) -> Any:
        return hf.fori_loop(0, 3, lambda _, x, y: (x * y, y + x), (x, y))

    x = drawn((40,), "float64")
    assert "_kept" in compiled(f, x, x)


def test_rows_that_read_others_are_stored() -> None:
    def f(x: Any, y: Any) -> Any:
        return hf.fori_loop(0, 3, lambda _, x, y: (x * y, y + x[::-1]), (x, y))

    def g(x: Any, y: Any) -> Any:
        return hf.fori_loop(0, 3, lambda _, x: hf.max(x + y, axis=1), x)

    x = drawn((40,), "float64")
    assert "_kept" not in compiled(f, x, x)
    assert "_kept" not in compiled(g, x, drawn((40, 40), "float64"))


def test_a_derivative_of_states() -> None:
    def loss(state: Any, y: Any) -> Any:
        return hf.sum(mixed(4)(state, y) ** 2)

    state, y = drawn((20, 4), "float64"), drawn((6,), "float64")
    found = hf.jit(hf.grad(loss))(state, y)
    with hf.debug():
        expected = hf.grad(loss)(hf.asarray(state), hf.asarray(y))
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected))


# --- steps with branches --------------------------------------------------------------


def chosen(k: Any, *state: Any) -> Any:
    """One of several next states."""
    branches = [
        lambda x, *others: (x + others[0], *others),
        lambda x, *others: (*others, x * 0.5),
        lambda x, *others: (others[-1], *others[:-1], x - 1),
    ]
    return hf.switch(k, branches, state)


def branching(state: Any, ks: Any) -> Any:
    """Walks of examples, whose states are three numbers."""

    def one(state: Any, ks: Any) -> Any:
        def step(carry: Any, k: Any) -> Any:
            x, y, z = chosen(k, *carry)
            x = hf.cond(
                y > z,
                lambda: hf.cond(x > 0, lambda: x - y, lambda: x + y),
                lambda: x,
            )
            return (x, y, z), y

        return hf.scan(step, tuple(state[k] for k in range(3)), ks)

    return hf.vmap(one)(state, ks)


@pytest.mark.parametrize("n", [1, 7, 16, 33, 150])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_branches_of_steps(dtype: str, n: int, cpu: CpuTarget) -> None:
    ks = np.random.default_rng(1).integers(-1, 4, (n, 9))
    text = compiled(branching, drawn((n, 3), dtype), ks, cpu=cpu)
    assert n < 33 or ("_kept0" in text and "if " not in text)


@pytest.mark.parametrize("returns", [True, False])
@pytest.mark.parametrize("steps", [0, 1, 9])
def test_numbers_that_all_rows_share(returns: bool, steps: int) -> None:
    """Each block of rows computes them again, and a loop alone leaves the last ones."""

    def one(xs: Any, ys: Any) -> Any:
        def step(carry: Any, x: Any) -> Any:
            s, n, gain = carry
            s = s + gain * (x - s)
            return (s, n + 1, gain / (1 + gain)), s * n

        carry, seen = hf.scan(step, (0.0, 1, 1.0), xs)
        again, more = hf.scan(step, carry, ys)  # starts from the last values
        return (carry, again, seen, more) if returns else (seen, more)

    xs, ys = drawn((70, steps), "float64"), drawn((70, 5), "float64")
    text = compiled(hf.vmap(one), xs, ys)
    assert steps < 9 or "_kept0" in text
    found = hf.jit(hf.vmap(one), dynamic=True)(xs, ys)
    with hf.debug():
        expected = hf.vmap(one)(hf.asarray(xs), hf.asarray(ys))
    for x, y in zip(
        hf.pytree.flatten(found)[0], hf.pytree.flatten(expected)[0], strict=True
    ):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=1e-13)


def test_branches_of_steps_of_arrays(cpu: CpuTarget) -> None:
    branches: list[Any] = [
        lambda s: s[::-1],
        lambda s: hf.roll(s, 1) * 0.9,
        lambda s: hf.where(s > 0, s, -s),
    ]

    def one(s: Any, ks: Any) -> Any:
        return hf.scan(lambda s, k: (hf.switch(k, branches, (s,)), s[0]), s, ks)

    ks = np.random.default_rng(1).integers(0, 3, (40, 9))
    assert "_kept0" in compiled(hf.vmap(one), drawn((40, 4), "float32"), ks, cpu=cpu)


def test_no_side_that_may_trap_runs_for_the_other_one() -> None:
    """A quotient by 0, or an element beyond an array, would end the process."""

    def divided(x: Any, y: Any) -> Any:
        def step(c: Any, y: Any) -> Any:
            return hf.cond(y != 0, lambda: c // y, lambda: c + 1), c % 5

        return hf.scan(step, x, y)

    def read(x: Any, y: Any) -> Any:
        table = hf.arange(5)

        def step(c: Any, y: Any) -> Any:
            return hf.cond(c < 5, lambda: table[c] + 1, lambda: c // 2), y

        return hf.scan(step, x, y)

    x = drawn((40,), "int64")
    y = np.random.default_rng(1).integers(-2, 3, (40, 9))
    compiled(hf.vmap(divided), x, y)
    compiled(hf.vmap(read), np.abs(x), y)


@pytest.mark.parametrize("transform", ["grad", "jvp", "vmap"])
def test_transforms_of_branches_of_steps(transform: str) -> None:
    ks = np.random.default_rng(1).integers(0, 3, (40, 9))

    def loss(state: Any) -> Any:
        (x, y, z), ys = branching(state, hf.asarray(ks))
        return hf.sum(x * y + z) + hf.sum(ys**2)

    f: Any = {
        "grad": hf.grad(loss),
        "jvp": lambda x: hf.jvp(loss, (x,), (hf.cos(x),)),
        "vmap": lambda x: hf.vmap(loss)(hf.stack([x, -x])),
    }[transform]
    state = drawn((40, 3), "float64")
    found = hf.jit(f)(state)
    with hf.debug():
        expected = f(hf.asarray(state))
    for x, y in zip(
        hf.pytree.flatten(found)[0], hf.pytree.flatten(expected)[0], strict=True
    ):
        np.testing.assert_allclose(np.asarray(x), np.asarray(y), rtol=1e-12)


# --- steps that use all of a row ------------------------------------------------------


def scanned(step: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Return `scan` for a batch of states, and of inputs."""
    batched: Callable[..., Any] = hf.vmap(lambda w, x: hf.scan(step, w, x, **options))
    return batched


def shifted(w: Any, x: Any) -> Any:
    return hf.concat([w[1:], (w[0] * w[2] - x[1])[None]]), w[1] + x[0]


def rolled(w: Any, x: Any) -> Any:
    return hf.roll(w, 1) * x[0] + w[::-1], hf.maximum(w, x[1])


def summed(w: Any, x: Any) -> Any:
    total = hf.cumulative_sum(w)
    return total * x[0], (total[-1], w)


def stacked(w: Any, x: Any) -> Any:
    return hf.stack([w[1] * x[1], w[2] - w[0], x[0] + w[3], w[0] * x[0]]), None


STEPS: Final = (shifted, rolled, summed, stacked)


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
@pytest.mark.parametrize("n", [1, 2, 16, 33, 100])
def test_states_that_change_as_a_whole(
    step: Callable[..., Any], n: int, cpu: CpuTarget, verified: None
) -> None:
    w, x = drawn((n, 4), "float64") / 4, drawn((n, 20, 2), "float64") / 4
    text = compiled(scanned(step), w, x, cpu=cpu)
    assert n < 33 or "_kept0" in text


@pytest.mark.parametrize("dtype", ["float32", "int32", "uint8"])
@pytest.mark.parametrize("trips", [0, 1, 5])
def test_dtypes_and_trips(dtype: str, trips: int) -> None:
    w, x = drawn((40, 4), dtype), drawn((40, trips, 2), dtype)
    for step in (shifted, rolled):
        compiled(scanned(step), w, x)


def test_results_and_inputs_of_a_block_lie_in_its_own_memory() -> None:
    w, x = drawn((64, 4), "float64"), drawn((64, 9, 2), "float64")
    text = compiled(scanned(shifted), w, x, cpu=target("avx2"))
    rows = [line for line in text.splitlines() if "in arena" in line]
    assert any("[9, 2, 8]" in line for line in rows)  # inputs
    assert any("[9, 8]" in line for line in rows)  # results


def test_too_many_results_for_a_block_are_results_of_all_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    w, x = drawn((33, 4), "float32"), np.zeros((33, 9000, 2), "float32")
    assert re.search(r"f32\[9000, 4, \d+\]", compiled(scanned(rolled), w, x))
    monkeypatch.setattr(sys.modules[rows_in_registers.__module__], "LIMIT", 1 << 18)
    assert not re.search(r"f32\[9000, 4, \d+\]", compiled(scanned(rolled), w, x))


@pytest.mark.parametrize(("rows", "steps"), [(16, 9000), (40, 9000)])
def test_results_that_do_not_fit_into_the_cache(rows: int, steps: int) -> None:
    """Of a block, or of a few of them for threads."""

    def one(c: Any, x: Any) -> Any:
        def step(c: Any, v: Any) -> Any:
            for k in range(8):
                c = c * 0.5 + (v - c) * (v + k) * 0.125
            return c, c

        return hf.scan(step, c, x)

    c, x = drawn((rows,), "float32") / 9, drawn((rows, steps), "float32") / 9
    lanes = {16: "(16|8)", 40: "(32|16|8)"}[rows]
    assert re.search(rf"f32\[{steps}, {lanes}\]", compiled(hf.vmap(one), c, x))


@pytest.mark.parametrize("n", [20, 64])
def test_reverse_mode_is_in_the_same_blocks(n: int) -> None:
    def loss(w: Any, x: Any) -> Any:
        w, y = hf.scan(lambda w, x: (shifted(w, x)[0], w[0] * x[0]), w, x)
        return hf.sum(w) + hf.sum(y)

    f = hf.vmap(hf.grad(loss, (0, 1)))
    w, x = drawn((n, 4), "float64") / 9, drawn((n, 6, 2), "float64") / 9
    jitted = hf.jit(f)
    with hf.debug():
        expected = f(hf.asarray(w), hf.asarray(x))
    for a, b in zip(jitted(w, x), expected, strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-9)
    blocks = [line for line in str(jitted.loop_ir).splitlines() if "_block in" in line]
    assert len(blocks) == (1 if n > 16 else 0)


def test_a_loop_that_reads_other_rows_of_an_input() -> None:
    """A block has its own copy of its rows of an input, and not of those of others."""

    def f(w: Any, x: Any) -> Any:
        def step(c: Any, x: Any) -> Any:
            c = hf.stack([c[0] * x - c[1], c[1] + c[0]])
            return c, c[0]

        scan = hf.vmap(lambda w, x: hf.scan(step, w, x))
        w, y = scan(w, x)
        return scan(w, x[::-1])[0], y + x[::-1], y - x

    w, x = drawn((32, 2), "float64") / 4, drawn((32, 20), "float64") / 4
    compiled(f, w, x)


def test_a_loop_that_reads_other_rows_of_a_result() -> None:
    def f(w: Any, x: Any) -> Any:
        w, y = scanned(rolled)(w, x)
        return y[::-1] - y, hf.roll(w, 1, axis=0), hf.cumulative_sum(y[:, :, 1], axis=0)

    compiled(f, drawn((40, 4), "float64") / 4, drawn((40, 5, 2), "float64") / 4)


def test_exchanges_of_several_carries() -> None:
    """The first carry is the second one of the next step, and then the last."""

    def step(_: Any, a: Any, b: Any, c: Any) -> Any:
        return hf.stack([a[1] * c[0], a[0] - c[1]]), a, b

    def f(a: Any, b: Any, c: Any) -> Any:
        return hf.fori_loop(0, 7, step, (a, b, c))

    arrays = [drawn((40, 2), "float64") / (k + 2) for k in range(3)]
    assert "_kept0" in compiled(hf.vmap(f), *arrays)


def test_carries_that_change_places() -> None:
    def f(a: Any, b: Any) -> Any:
        return hf.fori_loop(0, 5, lambda i, a, b: (b, a * b[::-1] - b), (a, b))

    a, b = drawn((40, 3), "int32"), drawn((40, 3), "int32") + 1
    compiled(hf.vmap(f), a, b)


def test_steps_inside_other_steps() -> None:
    """The results of one run of the inner loop are not those of the next one."""

    def f(w: Any, x: Any) -> Any:
        def outer(w: Any, _: Any) -> Any:
            w, y = hf.scan(shifted, w, x)
            return w / 2, hf.sum(y[1:] * y[:-1])

        return hf.scan(outer, w, None, length=3)

    w, x = drawn((40, 4), "float64") / 4, drawn((40, 5, 2), "float64") / 4
    compiled(hf.vmap(f), w, x)


def test_the_number_of_examples_of_scans_is_a_size_of_the_run() -> None:
    batched = scanned(rolled)
    rows = hf.Dim("n")
    f = hf.jit(batched, dynamic=[{0: rows}, {0: rows}])
    for n in (40, 1, 0, 77):
        w, x = drawn((n, 4), "float64") / 4, drawn((n, 5, 2), "float64") / 4
        with hf.debug():
            expected = hf.pytree.flatten(batched(hf.asarray(w), hf.asarray(x)))[0]
        found = hf.pytree.flatten(f(w, x))[0]
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    assert "_kept0" in f.loop_ir
