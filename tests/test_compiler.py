"""From graph to native code: what is fused, where values live, how a program stops."""

import gc
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import hopflow
from hopflow.compiler import pipeline
from hopflow.compiler.pipeline import Executable
from hopflow.config import config
from hopflow.errors import CheckError, DivisionError, IndexingError
from hopflow.ops.check import check as ops_check
from hopflow.stats import stats
from hopflow.testing.executions import agree

pytestmark = pytest.mark.slow

hf: Any = hopflow

X = np.arange(200, dtype=np.float32) / 8 - 7


@pytest.fixture(autouse=True)
def _verified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "verify", True)


def loop_ir(f: Callable[..., Any], *args: Any) -> str:
    """The program of `f`, which computes what `f` does."""
    jitted = hf.jit(f)
    agree(jitted(*args), f(*map(hf.asarray, args)))
    text: str = jitted.loop_ir
    return text


def count(pattern: str, text: str) -> int:
    return len(re.findall(pattern, text))


# --- what is fused --------------------------------------------------------------------


def test_a_chain_of_elementwise_operations_is_one_loop_without_a_buffer() -> None:
    text = loop_ir(lambda x: hf.abs(x * 2 + 1) - x, X)
    assert text == (
        "program lambda():\n"
        "    buffer in0: f32[200] in input\n"
        "    buffer out0: f32[200] in output\n"
        "    for i1 in 0..200 vector 16 independent:\n"
        "        out0[i1] = abs(in0[i1] * 2.0 + 1.0) - in0[i1]\n"
    ).replace("vector 16", re.findall(r"vector \d+", text)[0])


def test_a_producer_is_fused_into_its_reduction() -> None:
    text = loop_ir(lambda x: hf.sum(x * x), X)
    assert count("for ", text) == 1
    assert "in arena" not in text
    assert "+= in0[i2] * in0[i2]" in text


def test_views_and_broadcasts_cost_nothing() -> None:
    def f(x: Any) -> Any:
        y = hf.reshape(x, (10, 20)).mT
        return hf.sum(y[::-1] + y[:1], axis=1)

    text = loop_ir(f, X)
    assert "in arena" not in text


def test_what_is_dear_and_read_twice_is_computed_once() -> None:
    text = loop_ir(lambda x: hf.exp(x) / hf.sum(hf.exp(x)), X / 50)
    assert count(r"exp\(", text) == 1


def test_a_value_that_another_index_reads_again_and_again_is_stored() -> None:
    text = loop_ir(lambda x: hf.sum(hf.exp(x)[:, None] * X, axis=1), X / 50)
    assert count(r"exp\(", text) == 1
    assert count("in arena", text) == 1


def test_dead_operations_are_left_out() -> None:
    def f(x: Any) -> Any:
        hf.exp(x)
        return x + 1

    assert "exp" not in loop_ir(f, X)


# --- where values live ----------------------------------------------------------------


def test_small_tensors_live_in_registers() -> None:
    def f(x: Any, y: Any) -> Any:
        z = x * y + 1
        return hf.sum(z * z) + z[0]

    text = loop_ir(f, np.arange(4.0), np.arange(4.0) - 2)
    assert "arena" not in text
    assert "for " not in text


def test_a_small_tensor_is_indexed_by_a_value_in_registers() -> None:
    def f(x: Any, i: Any) -> Any:
        return (x * 2)[i]

    for i in range(-5, 5):
        agree(hf.jit(f)(np.arange(5.0), np.int64(i)), (np.arange(5.0) * 2)[i])


def test_an_update_of_a_dying_value_is_in_place() -> None:
    def f(x: Any) -> Any:
        y = x * 2
        y[3] = 1.0
        y[4:9] = 0.0
        return y

    text = loop_ir(f, X)
    assert count("in arena", text) <= 1
    assert count("copy ", text) <= 1  # to the result


def test_an_update_of_a_value_that_is_read_later_is_of_a_copy() -> None:
    def f(x: Any) -> Any:
        y = hf.sin(x)
        z = y.copy()
        z[3] = 1.0
        return z - y, y

    loop_ir(f, X)


# --- arguments and results ------------------------------------------------------------


def test_arguments_need_not_be_contiguous() -> None:
    base = np.arange(240, dtype=np.float64).reshape(12, 20)
    f = hf.jit(lambda x, y: x @ y)
    for x in (base[::2, ::3], base.T[:6, 5:], base[::-1, 1:8]):
        tensor = hf.asarray(base)
        y = np.ones((x.shape[1], 2))
        agree(f(x, y), x @ y)
    agree(f(tensor[::2, 1:6], tensor[1:6, ::2]), base[::2, 1:6] @ base[1:6, ::2])


def test_arguments_may_share_memory() -> None:
    def f(x: Any, y: Any) -> Any:
        x[1:] = y[:-1]
        return x + y

    x = hf.asarray(X.copy())
    agree(hf.jit(lambda x, y: x[::-1] - y)(x, x[::-1]), X * 0)
    agree(hf.jit(f)(x.copy(), x), np.concatenate([X[:1], X[:-1]]) + X)


def test_a_result_may_be_an_argument_a_constant_or_another_result() -> None:
    def f(x: Any, n: Any) -> Any:
        y = x + 1
        return x, y, y, hf.ones(3), 3, 2.5, n, y[:0], None

    x = hf.asarray(X.copy())
    first, y, again, ones, three, half, n, none, nothing = hf.jit(f)(x, 7)
    agree((first, y, again, ones), (X, X + 1, X + 1, np.ones(3, np.float32)))
    assert (three, half, n, nothing) == (3, 2.5, 7, None)
    assert none.shape == (0,)
    # Results are values of their own.
    y += 1.0
    first += 1.0
    agree((again, x), (X + 1, X))


def test_results_keep_their_dtypes_and_are_weak_where_eager_ones_are() -> None:
    def f(x: Any) -> Any:
        return x * 2, x > 0, hf.astype(x, hf.bfloat16), hf.argmax(x)

    for got, want in zip(hf.jit(f)(X), f(hf.asarray(X)), strict=True):
        assert got.type == want.type
        assert got.type.weak == want.type.weak


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (1,), (3, 0), (1, 1, 1)])
def test_shapes_without_or_with_one_element(shape: tuple[int, ...]) -> None:
    def f(x: Any) -> Any:
        y = hf.exp(x) + x
        return y, hf.sum(y), hf.cumulative_sum(hf.reshape(y, (-1,))), y == y

    loop_ir(f, np.full(shape, 0.5))


def test_a_program_may_have_no_arguments_and_no_operations() -> None:
    agree(hf.jit(lambda: hf.arange(20))(), np.arange(20))
    agree(hf.jit(lambda x: x)(X), X)
    assert hf.jit(lambda: ())() == ()


@pytest.mark.parametrize("size", [17, 20, 23, 31, 33, 47])
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.int16])
def test_no_store_under_a_mask_goes_past_the_end(size: int, dtype: Any) -> None:
    # The body is so large that all of the loop is under one mask.
    def f(x: Any, y: Any) -> Any:
        z = hf.remainder(x * 2 + 1, y)
        narrow = hf.astype(z, hf.int8), hf.astype(z, hf.int16), hf.astype(z, hf.float16)
        return z == z, z, *narrow

    args = np.arange(size).astype(dtype), np.full((), 3, dtype)
    jitted = hf.jit(f)
    want = jitted(*args)
    guarded = [np.full(size + 64, 7, np.asarray(w).dtype) for w in want]
    assert jitted._latest.kernel.call(*args, *(g[:size] for g in guarded)) is None
    for found, wanted in zip(guarded, want, strict=True):
        np.testing.assert_array_equal(found[:size], np.asarray(wanted))
        assert (found[size:] == np.full(1, 7, found.dtype)).all()


# --- how a program stops --------------------------------------------------------------


def stops(error: type[Exception], text: str, f: Callable[..., Any], *args: Any) -> None:
    """Check that jitted `f` raises `error`, with `#` for the line of this file."""
    with pytest.raises(error) as caught:
        hf.jit(f)(*args)
    assert re.sub(r"\.py:\d+", ".py:#", str(caught.value)) == text


@pytest.mark.parametrize("bad", [200, -201])
def test_an_index_out_of_range_stops_the_program(bad: int) -> None:
    where = "(test_compiler.py:#)"
    tail = f"index {bad} is out of range for an axis of size 200."
    stops(IndexingError, f"index {where}: {tail}", lambda x, i: x[i], X, np.int64(bad))
    many = np.array([0, 5, bad, 999] * 9)
    stops(IndexingError, f"gather {where}: {tail}", lambda x, i: x[i], X, many)


@pytest.mark.parametrize("size", [1, 3, 40])
@pytest.mark.parametrize("bad", [50, -51])
@pytest.mark.parametrize("shape", [(), (2,)])
def test_an_index_that_is_known_to_be_out_of_range_stops_what_comes_by(
    shape: tuple[int, ...], bad: int, size: int
) -> None:
    def taken(x: Any) -> Any:
        return hf.sum(x[hf.full(shape, bad, dtype=hf.int64)])

    def f(x: Any) -> Any:
        return hf.cond(hf.any(x > 0), lambda: hf.sum(x), lambda: taken(x))

    assert hf.jit(f)(hf.ones(size)) == size
    for each, x in ((f, hf.zeros(size)), (taken, hf.ones(size))):
        with pytest.raises(IndexingError, match=f"index {bad} is out of range"):
            hf.jit(each)(x)


def test_an_integer_division_by_zero_stops_the_program() -> None:
    text = (
        "{} (test_compiler.py:#): division of an integer by zero. Guard it with "
        "`hf.where` on the divisor, or with `hf.cond`."
    )
    for y in (np.int32(0), np.arange(20, dtype=np.int32) - 19):
        x = np.full_like(y, 7)
        stops(DivisionError, text.format("floor_divide"), lambda x, y: x // y, x, y)
        stops(DivisionError, text.format("remainder"), lambda x, y: x % y, x, y)


def test_the_line_of_an_error_is_the_users() -> None:
    def f(x: Any, i: Any) -> Any:
        y = x + 1
        return y[i] * 2

    line = f.__code__.co_firstlineno + 2
    with pytest.raises(IndexingError, match=rf"test_compiler\.py:{line}\)"):
        hf.jit(f)(X, np.int64(500))


def test_a_check_that_fails_stops_the_program_with_its_message() -> None:
    def f(x: Any) -> Any:
        ops_check(hf.all(x < 3), "too large")
        return x + 1

    agree(hf.jit(f)(np.ones(30)), np.full(30, 2.0))
    stops(CheckError, "too large (test_compiler.py:#)", f, np.full(30, 4.0))


def test_a_check_beside_a_call() -> None:
    def f(x: Any) -> Any:
        ops_check(hf.all(x == x), "a nan")
        return hf.invoke_subgraph(lambda y: y + 1, x)

    agree(hf.jit(f)(X), X + 1)


def test_what_stops_leaves_the_callers_tensors_as_they_were() -> None:
    def f(x: Any, i: Any) -> Any:
        x += 1.0
        x[i] = 5.0
        return x

    x = hf.asarray(X.copy())
    with pytest.raises(IndexingError):
        hf.jit(f)(x, np.int64(200))
    agree(x, X)
    hf.jit(f)(x, np.int64(3))
    assert float(x[3]) == 5.0


def test_a_check_of_a_value_that_nobody_reads_is_made_all_the_same() -> None:
    def f(x: Any, i: Any) -> Any:
        x[i]
        return x + 1

    with pytest.raises(IndexingError):
        hf.jit(f)(X, np.int64(999))


def test_passes_edit_no_graph_that_two_nodes_share() -> None:
    graph = hf.trace(
        lambda x: hf.scan(lambda c, _: ((c[0] * 2, c[1] + 1), None), (x, x), length=3),
        X,
    ).graph
    [node] = graph.nodes_of("scan")
    types = [v.type for v in node.results]
    again = graph.call(node.op, node.args, node.params, types)
    # Each needs a carry that the other does not.
    graph.outputs = (node.results[0], again.results[1])
    doubled, raised = Executable(graph)([hf.asarray(X)])
    agree((doubled, raised), (X * 8, X + 3))
    assert len(node.params["body"].outputs) == 2


# --- one kernel for a structure -------------------------------------------------------


def test_graphs_of_one_structure_share_a_kernel_and_keep_their_own_lines() -> None:
    pipeline.clear_cache()

    def first(x: Any, i: Any) -> Any:
        return x[i] + 1

    def second(data: Any, at: Any) -> Any:
        chosen = data[at]
        return chosen + 1

    before = stats()
    one, two = hf.jit(first), hf.jit(second)
    three, four = np.int64(3), np.int64(4)
    agree((one(X, three), two(X, four)), (X[3] + 1, X[4] + 1))
    after = stats()
    assert after.compiles - before.compiles == 1
    assert after.cache_hits - before.cache_hits == 1
    for f, jitted in ((first, one), (second, two)):
        line = f.__code__.co_firstlineno + 1
        with pytest.raises(IndexingError, match=rf"test_compiler\.py:{line}\)"):
            jitted(X, np.int64(500))


def test_messages_of_checks_belong_to_the_graph_and_not_to_the_kernel() -> None:
    def checked(message: str) -> Any:
        def f(x: Any) -> Any:
            ops_check(hf.all(x < 3), message)
            return x

        return hf.jit(f)

    before = stats()
    for message in ("one", "another"):
        with pytest.raises(CheckError, match=message):
            checked(message)(np.full(30, 4.0))
    assert stats().compiles - before.compiles <= 1


def test_other_constants_and_dtypes_are_other_kernels() -> None:
    pipeline.clear_cache()
    before = stats()
    results = [
        hf.jit(lambda x, k=k: x + k)(x)
        for k in (1.0, 2.0, -0.0, 0.0)
        for x in (X, X.astype(np.float64))
    ]
    assert stats().compiles - before.compiles == 8
    agree(results[2], X + 2)


def in_threads(count: int, work: Callable[[int], object]) -> None:
    """`work(k)` for each k below `count`, all at once."""
    threads = [threading.Thread(target=work, args=(k,)) for k in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_the_cache_lets_go_of_the_kernel_not_asked_for_the_longest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pipeline.clear_cache()
    one = hf.jit(lambda x: x + 0.5)
    one(X)
    pipeline.clear_cache()
    # Small kernels differ little in size: here is room for two of them.
    monkeypatch.setattr(
        config, "kernel_cache_bytes", int(2.5 * one._latest.kernel.nbytes)
    )

    def counted(k: float) -> tuple[Any, tuple[int, int, int]]:
        before = stats()
        f = hf.jit(lambda x: x + k)
        agree(f(X), X + np.float32(k))
        after = stats()
        compiles = after.compiles - before.compiles
        hits = after.cache_hits - before.cache_hits
        return f, (compiles, hits, after.evictions - before.evictions)

    first, made = counted(1.0)
    assert made == (1, 0, 0)
    assert counted(2.0)[1] == (1, 0, 0)
    assert counted(1.0)[1] == (0, 1, 0)
    assert counted(3.0)[1] == (1, 0, 1)  # 2.0 goes: 1.0 was asked for since
    assert counted(1.0)[1] == (0, 1, 0)
    assert counted(2.0)[1] == (1, 0, 1)
    assert counted(4.0)[1] == (1, 0, 1)
    agree(first(X), X + 1)  # its kernel has left the cache, and lives


def test_threads_that_ask_for_one_structure_compile_it_once() -> None:
    pipeline.clear_cache()
    before = stats()
    in_threads(4, lambda _: hf.jit(lambda x: hf.cos(x) - 5)(X))
    after = stats()
    assert after.compiles - before.compiles == 1
    assert after.cache_hits - before.cache_hits == 3


def test_a_kernel_runs_in_several_threads_at_once() -> None:
    f = hf.jit(lambda x: hf.sum(hf.sin(x) * hf.cos(x)))
    args = [np.full(5000, k / 8) for k in range(8)]
    want = [f(x) for x in args]
    got: dict[int, Any] = {}

    def work(k: int) -> None:
        for _ in range(20):
            got[k] = f(args[k])

    in_threads(8, work)
    for k, value in enumerate(want):
        agree(got[k], value)


# --- large programs -------------------------------------------------------------------


def within(seconds: float, f: Callable[..., Any], *args: Any) -> Any:
    """The result of jitted `f`, compiled in reasonable time on a slow machine."""
    start = time.process_time()
    result = hf.jit(f)(*args)
    assert time.process_time() - start < seconds
    return result


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_of_garbage_rests_while_a_program_is_compiled(
    enabled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []
    inner = pipeline.lower

    def lower(*args: Any) -> Any:
        seen.append(gc.isenabled())
        return inner(*args)

    monkeypatch.setattr(pipeline, "lower", lower)
    pipeline.clear_cache()
    before = gc.isenabled()
    (gc.enable if enabled else gc.disable)()
    try:
        hf.jit(lambda x: x + 1)(hf.ones(3))
        assert seen == [False]
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()


def test_a_chain_of_a_thousand_operations_compiles() -> None:
    def cheap(x: Any) -> Any:
        for k in range(1000):
            x = x * 0.5 + float(k % 7)
        return x

    def dear(x: Any) -> Any:
        for _ in range(500):
            x = hf.sin(x) + 0.5
        return x

    agree(within(20, cheap, X), cheap(hf.asarray(X)), rtol=1e-5)
    x = X.astype(np.float64)
    agree(within(30, dear, x), dear(hf.asarray(x)), rtol=1e-6)
    agree(within(20, cheap, X[:3]), cheap(hf.asarray(X[:3])), rtol=1e-5)


def test_values_that_are_read_twice_at_each_of_many_levels_compile() -> None:
    def doubling(x: Any) -> Any:
        for _ in range(200):
            x = (x + x[::-1]) * 0.5
        return x

    agree(within(20, doubling, X), doubling(hf.asarray(X)), rtol=1e-4)


def test_a_thousand_results_of_one_value_compile() -> None:
    def wide(x: Any) -> Any:
        y = hf.exp(x / 100)
        return [y * float(k) for k in range(1000)]

    results = within(30, wide, X)
    agree(results[-1], np.exp(X / 100) * np.float32(999), rtol=1e-5)


def test_a_sum_of_thousands_of_terms_compiles() -> None:
    def tree(x: Any) -> Any:
        terms = [x * float(k) for k in range(2000)]
        while len(terms) > 1:
            half = len(terms) // 2
            pairs = zip(terms[:half], terms[half:], strict=False)
            terms = [a + b for a, b in pairs] + terms[2 * half :]
        return terms[0]

    agree(within(30, tree, X), X * (1999 * 1000.0), rtol=1e-5)


@pytest.mark.parametrize("name", ["argmax", "argmin"])
@pytest.mark.parametrize(
    "dtype", ["int8", "bool", "float16", "float32", "float64", "uint64"]
)
@pytest.mark.parametrize("axis", [0, 1, None])
def test_the_first_position_of_many_equal_extrema(
    name: str, dtype: str, axis: int | None
) -> None:
    numbers = np.random.default_rng(0).integers(0, 4, (71, 67))
    x = numbers.astype(dtype)
    if x.dtype.kind == "f":
        x[3, 5], x[70, 66], x[8, 5] = np.nan, np.nan, np.inf
    found = hf.jit(lambda x: getattr(hf, name)(x, axis=axis))(x)
    np.testing.assert_array_equal(found, getattr(np, name)(x, axis=axis))


@pytest.mark.parametrize(("count", "inlined"), [(5, True), (100, False)])
def test_a_function_called_from_many_places_is_not_inlined(
    count: int, inlined: bool
) -> None:
    def f(x: Any) -> Any:
        for _ in range(count):
            x = hf.tanh(x) * 1.5
        return x

    run = hf.jit(f)
    expected = np.float64(0.5)
    for _ in range(count):
        expected = np.tanh(expected) * 1.5
    np.testing.assert_allclose(float(run(hf.asarray(np.float64(0.5)))), expected)
    assert ("alwaysinline" in run.llvm_ir) == inlined
