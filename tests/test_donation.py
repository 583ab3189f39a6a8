"""`jit(donate=...)`: outputs in the memory of inputs, and of nobody else's."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hopflow
from hopflow import dtypes
from hopflow.compiler.pipeline import Executable, lower
from hopflow.config import config
from hopflow.errors import InvalidTensorError
from hopflow.graph.types import TensorType
from hopflow.loop_ir import interpreter
from hopflow.symbolic.size import symbol
from hopflow.testing.executions import agree

hf: Any = hopflow
ROWS = 6


@pytest.fixture(autouse=True)
def _verified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "verify", True)


def table(first: float = 0.0) -> Any:
    return hf.asarray(np.arange(ROWS * 8, dtype=np.float32).reshape(ROWS, 8) + first)


def fresh(tensor: Any) -> Any:
    """A tensor of the same values that nobody else has."""
    return hf.jit(lambda x: x * 1)(tensor)


def address(tensor: Any) -> int:
    return int(np.asarray(tensor).ctypes.data)


def set_row(i: Any, x: Any) -> Any:
    x[i] = x[i - 1] * 2
    return x


def two(x: Any, y: Any) -> Any:
    return x + y, x * y


def grow(x: Any, y: Any) -> Any:
    return x + y, y * 1.5


IN_PLACE: dict[str, Callable[[Any], Any]] = {
    "elementwise": lambda x: hf.tanh(x) * 2,
    "itself": lambda x: x,
    "unread": lambda x: hf.full((ROWS, 8), 3.0),
    "after a sum": lambda x: x - hf.sum(x, axis=0),
    "a write": lambda x: set_row(2, x),
    "writes in a loop": lambda x: hf.fori_loop(1, ROWS, set_row, x),
    "a carry": lambda x: hf.fori_loop(0, 5, lambda _, c: c * 1.5 + 1, x),
    "a carry, and what comes after": lambda x: (
        hf.fori_loop(0, 5, lambda _, c: c * 1.5 + 1, x) - 1
    ),
    "a branch": lambda x: hf.cond(x[0, 0] < 9, lambda: x + 1, lambda: x - 1),
}
ELSEWHERE: dict[str, Callable[[Any], Any]] = {
    "reversed": lambda x: x[::-1] + 1,
    "a product": lambda x: x @ hf.ones((8, 8)),
    "a sum of rows": lambda x: x + hf.roll(x, 1, axis=0),
    "a doubled carry": lambda x: hf.fori_loop(
        0, 3, lambda _, c: hf.roll(c, 1, axis=0) + 1, x
    ),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_an_update_is_written_into_the_donated_memory(name: str) -> None:
    f = IN_PLACE[name]
    want = np.asarray(hf.jit(f)(table()))
    x = fresh(table())
    given = address(x)
    y = hf.jit(f, donate=(0,))(x)
    assert address(y) == given
    np.testing.assert_array_equal(y, want)
    with pytest.raises(InvalidTensorError, match="donated"):
        _ = x + 1


@pytest.mark.parametrize("name", ELSEWHERE)
def test_what_reads_other_elements_is_as_without_donation(name: str) -> None:
    f = ELSEWHERE[name]
    plain, donating = hf.jit(f), hf.jit(f, donate=(0,))
    agree(donating(fresh(table())), plain(table()))
    assert donating.loop_ir == plain.loop_ir


def test_a_chain_of_calls_goes_through_one_memory() -> None:
    step = hf.jit(lambda x: x * 0.5 + 1, donate=(0,))
    history = [fresh(table())]
    given = address(history[0])
    for _ in range(5):
        history.append(step(history[-1]))  # those given up hold nothing
    assert address(history[-1]) == given


def test_outputs_take_the_memory_of_inputs_in_order() -> None:
    x, y = fresh(table()), fresh(table(1.0))
    given = [address(x), address(y)]
    f = hf.jit(two, donate=(0, 1))
    total, product = f(x, y)
    assert [address(total), address(product)] == given
    a, b = np.asarray(table()), np.asarray(table(1.0))
    agree((total, product), (a + b, a * b))


@pytest.mark.parametrize(
    ("f", "types"),
    [
        (lambda x, y: (y, x), "swapped"),
        (lambda x, y: (y[::-1], x + y), "read by another output"),
        (lambda x, y: (x + 1, y + hf.sum(x)), "summed"),
        (lambda x, y: (x + y, hf.roll(x, 1), x), "read thrice"),
        (lambda x, y: (hf.fori_loop(0, 3, lambda _, c: c + y, x), x), "kept"),
        (lambda x, y: (hf.cumulative_sum(x, axis=1), y @ x.T), "accumulated"),
        (lambda x, y: hf.scan(lambda c, r: (c + r[0], r * c), 1.0, x), "scanned"),
        (lambda x, y: hf.while_loop(lambda a, b: a[0, 0] < 9, grow, (x, y)), "while"),
    ],
)
def test_results_are_those_without_donation(f: Any, types: str) -> None:
    want = hf.jit(f)(table(), table(3.0))
    for donate in ((0,), (1,), (0, 1)):
        agree(hf.jit(f, donate=donate)(fresh(table()), fresh(table(3.0))), want)
        _, program = lower(hf.trace(f, table(), table(3.0)).graph, donate)
        arrays = [np.asarray(table()), np.asarray(table(3.0))]
        agree(tuple(interpreter.run(program, [], arrays)), tuple(want))


def holds_array(x: Any) -> tuple[Any, Any]:
    array = np.asarray(x)
    return x, array


def holds_buffer(x: Any) -> tuple[Any, Any]:
    return x, memoryview(np.asarray(x))


def holds_capsule(x: Any) -> tuple[Any, Any]:
    return x, np.from_dlpack(x)


def is_of_a_caller(x: Any) -> tuple[Any, Any]:
    array = np.array(x)
    return hf.asarray(array), array


def is_part_of_an_array(x: Any) -> tuple[Any, Any]:
    array = np.stack([np.asarray(x), np.asarray(x)])
    return hf.asarray(array[0]), array[0]


@pytest.mark.parametrize(
    "shared",
    [holds_array, holds_buffer, holds_capsule, is_of_a_caller, is_part_of_an_array],
)
def test_memory_that_others_see_is_not_written(shared: Any) -> None:
    x, other = shared(fresh(table()))
    y = hf.jit(lambda x: x + 1, donate=(0,))(x)
    np.testing.assert_array_equal(other, table())
    np.testing.assert_array_equal(y, np.asarray(table()) + 1)


def test_an_argument_given_twice_is_read_as_it_was() -> None:
    f = hf.jit(lambda x, y: (x + 1, hf.roll(y, 1)), donate=(0,))
    f(fresh(table()), table())
    x, before = fresh(table()), np.asarray(table())
    agree(f(x, x), (before + 1, np.roll(before, 1)))


def test_an_argument_of_other_strides_may_stand_beside_a_donated_one() -> None:
    f = hf.jit(lambda x, y: x * y + hf.roll(y, 1), donate=(0,))
    wide = np.arange(ROWS * 16, dtype=np.float32).reshape(ROWS, 16)
    for y in (wide[:, :8].copy(), wide[:, ::2], wide[:, :8][::-1]):
        x = fresh(table())
        given = address(x)
        result = f(x, hf.asarray(y))
        assert address(result) == given
        np.testing.assert_array_equal(result, np.asarray(table()) * y + np.roll(y, 1))


def test_a_donated_column_is_copied() -> None:
    x = fresh(table())
    column = x[:, 1]
    y = hf.jit(lambda c: c * 2, donate=(0,))(column)
    np.testing.assert_array_equal(y, np.asarray(table())[:, 1] * 2)


def test_donated_leaves_of_pytrees_are_found_by_their_place() -> None:
    @hf.jit(donate=(1,))  # type: ignore[untyped-decorator]
    def f(scale: Any, tree: Any, *, shift: Any) -> Any:
        return {"a": tree["a"] * scale + shift, "n": tree["n"]}

    a, shift = fresh(table()), fresh(table(2.0))
    given = address(a)
    result = f(hf.asarray(2.0), {"n": 3, "a": a}, shift=shift)
    assert address(result["a"]) == given
    np.testing.assert_array_equal(shift, table(2.0))


def test_a_kernel_over_symbols_updates_arrays_of_every_size() -> None:
    type_ = TensorType(dtypes.float32, (symbol("n"), symbol("m")))
    graph = hf.trace(lambda x: hf.exp(x) - x, type_, mode="fake").graph
    compiled = Executable(graph, donated=(0,))
    for shape in ((3, 4), (1, 1), (17, 70), (0, 5)):
        x = fresh(hf.ones(shape))
        given = x.array.ctypes.data
        [y] = compiled([x])
        assert y.array.ctypes.data == given
        np.testing.assert_allclose(y, np.full(shape, np.e - 1), rtol=1e-6)


def test_the_peak_of_memory_does_not_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "verify", False)  # which keeps what is donated
    reset, status = Path("/proc/self/clear_refs"), Path("/proc/self/status")
    if not reset.exists():
        pytest.skip("needs Linux, to ask for the peak")

    def memory(kind: str) -> int:
        [line] = [s for s in status.read_text().splitlines() if s.startswith(kind)]
        return int(line.split()[1]) << 10

    size = 1 << 27
    step = hf.jit(
        lambda x: hf.fori_loop(0, 3, lambda _, c: c * 0.5 + 1, x), donate=(0,)
    )
    x = hf.jit(lambda: hf.zeros(size // 4))()
    x = step(x)
    reset.write_text("5")
    before = memory("VmRSS")
    for _ in range(3):
        x = step(x)
    assert memory("VmHWM") - before < size // 4


def test_an_argument_that_is_written_leaves_results_alone() -> None:
    def f(x: Any) -> Any:
        total = 0.0
        for _ in range(3):
            x[3] = 0.5
            total = total + x * 1.0
        return total, x * 1.0

    x = np.arange(400.0).reshape(50, 8)
    with hf.debug():
        want = f(hf.asarray(x.copy()))
    found = hf.jit(f, donate=(0,))(hf.asarray(x.copy()))
    for got, one in zip(found, want, strict=True):
        np.testing.assert_array_equal(got, one)


# --- large arrays begin at a cache line -----------------------------------------------


def large() -> Any:
    """A result of 8 KB, which begins at a cache line."""
    return hf.jit(lambda: hf.arange(1000, dtype=hf.float64) * 1.0)()


@pytest.mark.parametrize("rows", [1, 3, 100])
def test_a_large_result_begins_at_a_cache_line(rows: int) -> None:
    f = lambda x: (x * 2, hf.sum(x, axis=0), x > 0.5)  # noqa: E731
    for dynamic in (None, True):
        for y in hf.jit(f, dynamic=dynamic)(hf.ones((rows, 5000))):
            assert address(y) % 64 == 0
    x = hf.asarray(np.ones((rows, 5000)), copy=True)
    assert address(x) % 64 == 0
    np.testing.assert_array_equal(x, np.ones((rows, 5000)))


def test_a_large_result_is_donated_if_nobody_else_has_it() -> None:
    step = hf.jit(lambda x: x + 1, donate=(0,))
    x = large()
    first = address(x)
    for _ in range(3):
        x = step(x)
        assert address(x) == first
    np.testing.assert_array_equal(x, np.arange(1000) + 3.0)


@pytest.mark.parametrize(
    "kept",
    [
        lambda x: np.asarray(x),
        lambda x: np.asarray(x)[10:],
        lambda x: memoryview(np.asarray(x)),
        lambda x: np.asarray(x).base,
    ],
    ids=["array", "view", "buffer", "memory"],
)
def test_a_large_result_that_somebody_has_is_copied(
    kept: Callable[[Any], Any],
) -> None:
    x = large()
    other = kept(x)
    before = np.array(other)
    y = hf.jit(lambda x: x + 1, donate=(0,))(x)
    assert not np.may_share_memory(np.asarray(y), np.asarray(other))
    np.testing.assert_array_equal(other, before)


def test_the_rest_of_an_array_is_donated_once_the_array_is_gone() -> None:
    whole = np.arange(9.0)
    step = hf.jit(lambda x: x * 2, donate=(0,))
    assert address(step(hf.from_numpy(whole[2:]))) != whole[2:].ctypes.data
    assert whole.tolist() == np.arange(9.0).tolist()
    rest = whole[2:]
    del whole
    x = hf.from_numpy(rest)
    where = rest.ctypes.data
    del rest
    assert address(step(x)) == where
