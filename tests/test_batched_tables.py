"""`vmap` of loops that update tables at indices of each batch element."""

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pytest

import hopflow as hf
from hopflow.batching import tables
from hopflow.compiler.kernel_program.registers import REGISTER_LIMIT

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("guarded")]

SIZE: Final = 12


def counted(x: Any) -> Any:
    """Counts, and how often each value was there before."""

    def step(counts: Any, v: Any) -> Any:
        return counts.at[v].add(1), counts[v]

    return hf.scan(step, hf.zeros(SIZE, dtype="int64"), x)


def moved_to_front(x: Any) -> Any:
    def step(k: Any, order: Any) -> Any:
        first, other = order[0], order[x[k]]
        return order.at[0].set(other).at[x[k]].set(first)

    return hf.fori_loop(0, x.shape[0], step, hf.arange(SIZE))


def weighted(x: Any) -> Any:
    """Sums of squares of what is added at the indices `x`."""
    w = hf.cos(hf.astype(x, "float64"))

    def step(total: Any, pair: Any) -> Any:
        v, w = pair
        return hf.dynamic_update_slice(total, (total[v] * 0.5 + w)[None], [v]), None

    return hf.scan(step, hf.zeros(SIZE, dtype="float64"), (x, w))[0]


PROGRAMS: Final[dict[str, Callable[..., Any]]] = {
    "counts": counted,
    "orders": moved_to_front,
    "weights": weighted,
}


def drawn(*shape: int) -> Any:
    return np.random.default_rng(0).integers(0, SIZE, shape)


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("shape", [(7, 9), (0, 9), (7, 0), (1, 1)], ids=str)
def test_each_batch_element_has_its_table(name: str, shape: tuple[int, int]) -> None:
    agree(hf.vmap(PROGRAMS[name]), drawn(*shape))


@pytest.mark.parametrize("name", PROGRAMS)
def test_batches_of_batches(name: str) -> None:
    agree(hf.vmap(hf.vmap(PROGRAMS[name])), drawn(3, 4, 5))
    agree(hf.vmap(PROGRAMS[name], in_dims=1, out_dims=0), drawn(5, 4))


def test_gradients_of_tables() -> None:
    def loss(w: Any, x: Any) -> Any:
        def step(table: Any, pair: Any) -> Any:
            v, w = pair
            return table.at[v].set(table[v] * w + w), table[v]

        table, old = hf.scan(step, hf.ones(SIZE, dtype="float64"), (x, w))
        return hf.sum(table**2) + hf.sum(old)

    w = np.random.default_rng(1).normal(size=(6, 9))
    agree(hf.vmap(hf.grad(loss)), w, drawn(6, 9))
    agree(hf.grad(lambda w, x: hf.sum(hf.vmap(loss)(w, x))), w, drawn(6, 9))


def test_a_number_that_all_share_stays_one() -> None:
    """The result is that of the first batch element."""

    def f(x: Any) -> Any:
        def step(carry: Any, v: Any) -> Any:
            counts, steps = carry
            return (counts.at[v].add(1), steps + 1), None

        return hf.scan(step, (hf.zeros(SIZE, dtype="int64"), 0), x)[0]

    batched: Any = hf.vmap(f, out_dims=(0, None))
    agree(batched, drawn(4, 9))
    assert int(batched(drawn(4, 9))[1]) == 9


def test_callbacks_are_called_step_by_step() -> None:
    calls: list[tuple[int, ...]] = []

    def f(x: Any, v: Any) -> Any:
        def step(carry: Any, k: Any) -> Any:
            counts, n = carry
            hf.callback(lambda *at: calls.append(tuple(map(int, at))), None, v, n)
            return (counts.at[k].add(1), n + 1), None

        return hf.scan(step, (hf.zeros(SIZE, dtype="int64"), 0 * v), x)[0]

    hf.jit(hf.vmap(f))(drawn(3, 2), np.arange(3))
    assert calls == [(v, n) for n in range(2) for v in range(3)]


@pytest.mark.parametrize(
    ("f", "is_map"),
    [
        (counted, True),
        (lambda x: hf.scan(lambda c, v: (c.at[2].add(v), None), x * 0, x)[0], False),
        (lambda x: hf.scan(lambda c, v: (c + hf.roll(c, 1) * v, None), x, x)[0], False),
    ],
    ids=["index of each", "index of all", "no update"],
)
def test_only_updates_at_different_indices_are_a_map(f: Any, is_map: bool) -> None:
    text = str(hf.trace(hf.vmap(f), drawn(4, 9)).graph)
    assert ("map" in text) is is_map


def agree(f: Callable[..., Any], *args: Any) -> None:
    with hf.debug():
        expected = f(*map(hf.asarray, args))
    for dynamic in (False, True):
        found = hf.jit(f, dynamic=dynamic)(*args)
        pairs = zip(
            hf.pytree.flatten(found)[0], hf.pytree.flatten(expected)[0], strict=True
        )
        for a, b in pairs:
            assert np.asarray(a).shape == np.asarray(b).shape
            np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-13)


@pytest.mark.parametrize("kind", ["fori", "while"])
def test_a_gradient_of_steps_whose_number_only_a_run_knows(kind: str) -> None:
    """What it keeps of each step has a size of the run, which no `map` stacks."""

    def loss(c: Any, r: Any, t: Any) -> Any:
        def step(c: Any, i: Any) -> Any:
            return c.at[r[i]].set(t[r[i]] * c[r[i]]), i + 1

        if kind == "fori":
            n = r.shape[0]
            return hf.sum(hf.fori_loop(0, n, lambda i, c: step(c, i)[0], c) ** 2)
        return hf.sum(hf.while_loop(lambda c, i: i < 7, step, (c, 0))[0] ** 2)

    rng = np.random.default_rng(0)
    args = rng.normal(size=(3, 5)), rng.integers(0, 5, (3, 7)), np.arange(9.0)
    f = hf.vmap(hf.grad(loss), (0, 0, None))
    with hf.debug():
        expected = np.asarray(f(*map(hf.asarray, args)))
    for dynamic in (False, True):
        found = hf.jit(f, dynamic=dynamic)(*args)
        np.testing.assert_allclose(np.asarray(found), expected, rtol=1e-14)


def test_what_is_no_table_is_what_the_compiler_chooses_elements_of() -> None:
    assert tables.FEW == REGISTER_LIMIT


# --- tables in loops within loops -----------------------------------------------------


def chased(x: Any) -> Any:
    """In each step a loop follows and changes the entries of a table."""

    def outer(k: Any, table: Any) -> Any:
        def step(_: Any, at: Any, table: Any) -> Any:
            to = (table[at] + x[k]) % SIZE
            return to, table.at[at].set(to)

        return hf.fori_loop(0, 3, step, (x[k], table))[1]

    return hf.fori_loop(0, x.shape[0], outer, hf.arange(SIZE))


def doubled(x: Any) -> Any:
    """In each step a loop counts at as many places as the batch element has."""

    def outer(table: Any, v: Any) -> Any:
        def more(table: Any, k: Any) -> Any:
            return k < SIZE

        def step(table: Any, k: Any) -> Any:
            return table.at[k].add(v), k * 2 + 1

        return hf.while_loop(more, step, (table, v))[0], table[v]

    return hf.scan(outer, hf.zeros(SIZE, dtype="int64"), x)


def sometimes(x: Any) -> Any:
    """A branch changes a table; another one changes two, and a third none."""

    def step(k: Any, *tables: Any) -> Any:
        v = x[k]
        return hf.switch(
            v % 3,
            [
                lambda a, b: (a.at[v].add(k), b),
                lambda a, b: (a.at[v].set(b[0]), b.at[SIZE - 1 - v].add(a[v])),
                lambda a, b: (a, b),
            ],
            tables,
        )

    start = hf.zeros(SIZE, dtype="int64"), hf.arange(SIZE)
    return hf.fori_loop(0, x.shape[0], step, start)


def sifted(x: Any) -> Any:
    """A heap: each new element goes up a path of its own."""

    def push(k: Any, heap: Any) -> Any:
        v = x[k]

        def above(p: Any, heap: Any) -> Any:
            return (p > 0) & (heap[(p - 1) // 2] > v)

        def up(p: Any, heap: Any) -> Any:
            return (p - 1) // 2, heap.at[p].set(heap[(p - 1) // 2])

        p, heap = hf.while_loop(above, up, (k, heap))
        return heap.at[p].set(v)

    return hf.fori_loop(0, x.shape[0], push, hf.full(x.shape, SIZE, dtype="int64"))


NESTED: Final[dict[str, Callable[..., Any]]] = {
    "a loop of as many steps": chased,
    "a loop until a test fails": doubled,
    "branches": sometimes,
    "a heap": sifted,
}


@pytest.mark.parametrize("name", NESTED)
@pytest.mark.parametrize("shape", [(7, 9), (0, 9), (7, 0), (1, 1)], ids=str)
def test_tables_in_loops_within_loops(name: str, shape: tuple[int, int]) -> None:
    agree(hf.vmap(NESTED[name]), drawn(*shape))


@pytest.mark.parametrize("name", NESTED)
def test_batches_of_batches_of_nested_loops(name: str) -> None:
    agree(hf.vmap(hf.vmap(NESTED[name])), drawn(2, 3, 5))
    agree(hf.vmap(NESTED[name], in_dims=1, out_dims=0), drawn(5, 4))


@pytest.mark.parametrize("name", NESTED)
def test_the_outermost_loop_is_within_the_map(name: str) -> None:
    """Else each of its steps would copy the tables of all batch elements."""
    graph = hf.trace(hf.vmap(NESTED[name]), drawn(7, 9)).graph
    outermost = [node.op.name for node in graph.nodes if node.op and node.graphs]
    assert outermost == ["map"]


def test_long_steps_around_a_loop_stay_vectors() -> None:
    def f(x: Any) -> Any:
        def outer(table: Any, v: Any) -> Any:
            w = hf.sum(hf.exp(hf.astype(x, "float64") * 0.1))  # all of a vector
            step = lambda _, t: t.at[v].add(w)  # noqa: E731
            return hf.fori_loop(0, 2, step, table), None

        return hf.scan(outer, hf.zeros(SIZE, dtype="float64"), x)[0]

    graph = hf.trace(hf.vmap(f), drawn(7, 9)).graph
    assert "scan" in [node.op.name for node in graph.nodes if node.op]
    agree(hf.vmap(f), drawn(7, 9))
