"""`hf.jit`: signatures and caches, writes and aliases, nesting, threads."""

import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest

import hopflow as hf
from hopflow.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    EscapedValueError,
    InvalidTensorError,
    ReadOnlyError,
    ResultTypeError,
    TraceError,
)


@contextmanager
def counting(traces: int, compiles: int | None = None) -> Iterator[None]:
    """The block traces and compiles so many times."""
    before = hf.stats()
    yield
    after = hf.stats()
    assert after.traces - before.traces == traces
    if compiles is not None:
        assert after.compiles - before.compiles == compiles


def same(got: Any, want: Any) -> None:
    np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


# --- signatures -----------------------------------------------------------------------


def test_a_function_is_traced_once_for_each_type() -> None:
    g = hf.jit(lambda x: x * 3 - 1)

    def types() -> list[str]:
        return [str(v.type) for v in g.graph.operands]

    with counting(1, 1):
        for k in range(3):
            same(g(hf.ones(4) * k), np.ones(4) * k * 3 - 1)
    assert types() == ["f32[4]"]
    with counting(2, 2):
        g(hf.ones(5))
        assert types() == ["f32[s0]"]
        g(hf.ones(4, dtype="int32"))
        assert types() == ["i32[4]"]
    with counting(0, 0):
        g(hf.ones(4))
        g(np.ones(4, np.float32))


def test_a_weak_tensor_is_another_type() -> None:
    f = hf.jit(lambda x: x * hf.ones((), dtype="float16"))
    weak = hf.while_loop(lambda c: c < 2.0, lambda c: c + 1.0, 0.0)
    assert weak.type.weak
    assert f(weak).dtype is hf.float16
    assert f(hf.asarray(np.float32(2))).dtype is hf.float32


def test_equal_graphs_of_different_functions_share_a_program() -> None:
    with counting(2, 1):
        hf.jit(lambda x: x * 3 - 0.25)(hf.ones(17))
        hf.jit(lambda y: y * 3 - 0.25)(hf.ones(17))


@pytest.mark.parametrize("number", [2, 2.0, True, 0.0, -0.0, float("inf")])
def test_a_number_comes_back_as_itself(number: Any) -> None:
    def f(x: Any, n: Any) -> Any:
        return x * n, n

    y, n = hf.jit(f)(hf.ones(3), number)
    assert type(n) is type(number)
    assert str(n) == str(number)
    same(y, hf.ones(3) * number)
    assert y.dtype is (hf.ones(3) * number).dtype


def test_numbers_that_are_equal_and_not_the_same_are_told_apart() -> None:
    f = hf.jit(lambda n: n)
    numbers = (1, 1.0, True, 0, 0.0, -0.0, False)
    with counting(4):  # an int, a float, and two bools
        found = [f(n) for n in numbers]
    assert [str(n) for n in found] == [str(n) for n in numbers]
    with counting(0):
        assert [str(f(n)) for n in numbers] == [str(n) for n in numbers]


def test_a_nan_is_traced_once() -> None:
    f = hf.jit(lambda x, n: x * n)
    with counting(1):
        for _ in range(3):
            assert hf.all(hf.isnan(f(hf.ones(2), float("nan"))))


def test_numpy_scalars_are_tensors() -> None:
    f = hf.jit(lambda x, n: x * n)
    with counting(1):
        for k in range(3):
            same(f(hf.ones(2), np.float32(k)), [k, k])


def test_the_order_of_keys_is_part_of_the_signature() -> None:
    f = hf.jit(lambda d: (list(d), next(iter(d.values())) * 1)[1])
    a, b = hf.asarray(1.0), hf.asarray(2.0)
    assert f({"a": a, "b": b}).item() == 1.0
    assert f({"b": b, "a": a}).item() == 2.0
    assert f({"a": a, "b": b}).item() == 1.0
    nested = hf.jit(lambda t: next(iter(t[1][0].values())) * 1)
    assert nested((1, [{"a": a, "b": b}])).item() == 1.0
    assert nested((1, [{"b": b, "a": a}])).item() == 2.0
    with counting(0):
        assert nested((1, [{"b": a, "a": b}])).item() == 1.0


def test_results_keep_the_order_of_keys() -> None:
    f = hf.jit(lambda x: {"z": x + 1, "a": {"q": x + 2, "b": None}})
    found = f(hf.ones(2))
    assert list(found) == ["z", "a"]
    assert list(found["a"]) == ["q", "b"]
    same(found["z"], [2, 2])
    same(found["a"]["q"], [3, 3])


def test_options_are_arguments_too() -> None:
    def f(x: Any, *more: Any, scale: Any = 2.0, **rest: Any) -> Any:
        for y in (*more, *rest.values()):
            x = x + y
        return x * scale

    g, x = hf.jit(f), hf.ones(2)
    with counting(4):
        same(g(x), [2, 2])
        same(g(x, x, scale=3.0), [6, 6])
        same(g(x, scale=x * 5, other=x), [10, 10])
        same(g(x, x), [4, 4])
    with counting(0):
        same(g(x, scale=x * 2, other=x), [4, 4])


class Mode(Enum):
    ADD = 1
    MUL = 2


class Pair(NamedTuple):
    left: Any
    right: Any


def test_pytrees_go_in_and_come_out() -> None:
    def f(tree: Any, mode: Mode) -> Any:
        pair, (a, none) = tree["pair"], tree["rest"]
        assert none is None
        total = pair.left + pair.right if mode is Mode.ADD else pair.left * pair.right
        return Pair(total, [a, ()]), OrderedDict(x=pair.left, n=7)

    g = hf.jit(f)
    tree = {"pair": Pair(hf.ones(2), hf.ones(2) * 3), "rest": [np.arange(3), None]}
    for mode, want in ((Mode.ADD, [4, 4]), (Mode.MUL, [3, 3])):
        pair, options = g(tree, mode)
        assert type(pair) is Pair
        assert pair.right[1] == ()
        same(pair.left, want)
        same(pair.right[0], np.arange(3))
        assert type(options) is OrderedDict
        assert options["n"] == 7
    assert hf.jit(lambda: None)() is None
    assert hf.jit(lambda: ())() == ()


def test_static_values_are_compared_by_what_they_are() -> None:
    f = hf.jit(lambda x, op: op(x))
    with counting(2):
        same(f(hf.ones(2), hf.negative), [-1, -1])
        same(f(hf.ones(2), hf.sin), np.sin(np.ones(2, np.float32)))
    with counting(0):
        f(hf.ones(2), hf.negative)
    g = hf.jit(lambda x, how: x + 1 if how == "up" else x - 1)
    same(g(hf.ones(2), "up"), [2, 2])
    same(g(hf.ones(2), how="down"), [0, 0])


@dataclass(frozen=True)
class Options:
    scale: Any
    more: tuple[Any, ...] = ()
    names: frozenset[Any] = frozenset()
    note: Any = field(default=None, compare=False)


@pytest.mark.parametrize(
    "wrap",
    [
        Options,
        lambda n: Options(None, (1, (n, "a"))),
        lambda n: Options(None, (), frozenset([n, "a"])),
        lambda n: Options(Options(n)),
        lambda n: frozenset([(n, 1)]),
    ],
)
def test_equal_numbers_within_static_values_are_told_apart(wrap: Any) -> None:
    f = hf.jit(lambda x, options: x)
    inner = hf.subgraph(lambda x, options: x * 2)
    for n in (1, 1.0, True, -0.0, 0.0, 2, 2.0):
        with counting(1):
            f(hf.ones(2), wrap(n))
        inner(hf.ones(2), wrap(n))
    assert inner.traces == 7
    with counting(0):
        f(hf.ones(2), wrap(1.0))
    f(hf.ones(2), Options(3, note=[1]))
    with counting(0):
        f(hf.ones(2), Options(3, note=[2]))


def test_bodies_are_counted_apart_from_functions() -> None:
    f = hf.jit(lambda x: hf.cond(x[0] > 0, lambda: x, lambda: -x))
    before = hf.stats()
    with counting(1):
        f(hf.ones(2))
        f(hf.zeros(2))
        hf.fori_loop(0, 3, lambda i, c: c * 2.0, 1)  # the second time with a float
    assert hf.stats().body_traces - before.body_traces == 2 + 3


def test_what_is_neither_data_nor_hashable_is_named() -> None:
    f = hf.jit(lambda *a, **k: a[0])
    with pytest.raises(ArgumentTypeError, match=r"`args\[1\]` of .* is a `set`"):
        f(hf.ones(2), {1, 2})
    with pytest.raises(ArgumentTypeError, match=r"`k\[0\]` of .* `bytearray`"):
        f(hf.ones(2), k=[bytearray()])


def test_a_tensor_of_another_trace_is_refused() -> None:
    kept: list[Any] = []

    def f(x: Any) -> Any:
        kept.append(x + 1)
        return x

    hf.trace(f, hf.ones(2))
    for use in (hf.jit(lambda x: x), hf.jit(lambda: kept[0] * 2)):
        with pytest.raises(EscapedValueError):
            use(*kept[: use._f.__code__.co_argcount])


@pytest.mark.parametrize(
    ("result", "message"),
    [("text", "`result` is `str`"), ([1, {"a": object()}], r"`result\[1\]\['a'\]`")],
)
def test_a_result_must_be_data(result: Any, message: str) -> None:
    with pytest.raises(ResultTypeError, match=message):
        hf.jit(lambda x: result)(hf.ones(2))


def test_a_wrong_number_of_arguments_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="positional argument"):
        hf.jit(lambda x: x)()


def test_values_of_tensors_are_not_known() -> None:
    with pytest.raises(TraceError, match=r"hf\.cond"):
        hf.jit(lambda x: x if x.sum() > 0 else -x)(hf.ones(2))


# --- captured tensors -----------------------------------------------------------------


TABLE: Any = hf.asarray([1.0, 2.0])


def test_a_later_write_to_a_global_tensor_is_seen_and_so_is_another_tensor() -> None:
    global TABLE
    f = hf.jit(lambda x: x * TABLE)
    first: Any = hf.asarray([1.0, 2.0])
    TABLE = first
    same(f(hf.ones(2)), [1, 2])
    TABLE[0] = 5.0
    with counting(0):
        same(f(hf.ones(2)), [5, 2])
    TABLE = hf.zeros(2)
    with counting(0):
        same(f(hf.ones(2)), [0, 0])
    TABLE = first
    first += 1
    with counting(0):
        same(f(hf.ones(2)), [6, 3])


def test_writes_to_captured_tensors_reach_them() -> None:
    base = hf.zeros((2, 3))
    row = base[1]
    count = hf.asarray(0)

    def f(x: Any) -> Any:
        nonlocal count
        row[:] = x
        count += 1
        return row.sum()

    g = hf.jit(f)
    for k in range(1, 4):
        assert g(hf.ones(3) * k).item() == 3.0 * k
        same(base, [[0, 0, 0], [k, k, k]])


def test_what_a_function_makes_of_numbers_is_new_in_each_call() -> None:
    def f(x: Any) -> Any:
        a = hf.asarray([1.0, 2.0])
        a += x
        b = hf.zeros(2)
        b[0] += a[1]
        return a, b

    g = hf.jit(f)
    for _ in range(3):
        a, b = g(hf.ones(2))
        same(a, [2, 3])
        same(b, [3, 0])


def test_what_a_body_makes_of_numbers_is_new_in_each_step() -> None:
    def body(c: Any) -> Any:
        a = hf.asarray([0.0])
        a += c
        return c + a[0]

    def run() -> Any:
        return hf.while_loop(lambda c: c < 20.0, body, hf.asarray(1.0))

    with hf.debug():
        want = run().item()
    assert [run().item(), hf.jit(run)().item()] == [want, want] == [32.0, 32.0]


def test_memory_of_numpy_that_a_function_imports_stays_numpys() -> None:
    outside = np.zeros(2, np.float32)

    def f(x: Any) -> None:
        a = hf.asarray(outside)
        a += x

    g = hf.jit(f)
    g(hf.ones(2))
    g(hf.ones(2))
    same(outside, [2, 2])


# --- writes to arguments --------------------------------------------------------------


def write(x: Any) -> Any:
    x[0] = 5.0
    x += 1
    return x * 2


def test_writes_reach_the_argument_and_its_base() -> None:
    f = hf.jit(write)
    x = hf.zeros(3)
    same(f(x), [12, 2, 2])
    same(x, [6, 1, 1])
    base = hf.zeros((2, 3))
    same(f(base[1]), [12, 2, 2])
    same(base, [[0, 0, 0], [6, 1, 1]])
    columns = hf.zeros((3, 2))
    same(f(columns.T[0]), [12, 2, 2])
    same(columns, [[6, 0], [1, 0], [1, 0]])
    strided = hf.zeros(6)
    f(strided[::-2])
    same(strided, [0, 1, 0, 1, 0, 6])


def test_writes_through_views_made_inside_reach_the_argument() -> None:
    def f(x: Any) -> None:
        x.reshape(-1)[1:3] = 7.0
        x.T[0] += 1
        row = x[1]
        x[1, 1] = 3.0
        row *= 2

    x, y = hf.zeros((2, 2)), hf.zeros((2, 2))
    f(x)
    hf.jit(f)(y)
    same(y, x)


def test_writes_reach_numpy_memory_and_respect_what_is_read_only() -> None:
    array = np.zeros(3, np.float32)
    hf.jit(write)(array)
    same(array, [6, 1, 1])
    array.flags.writeable = False
    for target in (array, hf.broadcast_to(hf.zeros(1), (3,))):
        with pytest.raises(ReadOnlyError):
            hf.jit(write)(target)
    same(array, [6, 1, 1])


def test_a_write_bumps_the_version_once_a_call_and_a_read_does_not() -> None:
    f, x = hf.jit(write), hf.zeros(3)
    before = x.storage.version
    f(x)
    assert x.storage.version == before + 1
    hf.jit(lambda x: x + 1)(x)
    assert x.storage.version == before + 1


# --- aliases --------------------------------------------------------------------------


def test_an_argument_that_is_captured_too_is_one_tensor() -> None:
    shared = hf.zeros(2)

    def f(x: Any) -> Any:
        x += 1
        return shared * 10

    g = hf.jit(f)
    same(g(hf.zeros(2)), [0, 0])
    same(g(shared), [10, 10])
    same(shared, [1, 1])
    same(g(hf.zeros(2)), [10, 10])
    with counting(0):
        same(g(shared), [20, 20])
    same(g(shared[:]), [30, 30])
    same(shared, [3, 3])


def test_aliases_that_are_only_read_are_nothing_special() -> None:
    f, x = hf.jit(lambda a, b: a + b), hf.asarray([1.0, 2.0])
    with counting(1):
        same(f(x, x), [2, 4])
        same(f(x, x[::-1]), [3, 3])


@pytest.mark.parametrize("mode", [hf.debug, nullcontext])
def test_results_share_memory_with_nothing(mode: Any) -> None:
    kept = hf.ones(3)
    f = hf.jit(lambda x: (x, x, x[1:], kept, x.reshape(3, 1)))
    x = hf.zeros(3)
    with mode():
        results = f(x)
    arrays = [np.asarray(t) for t in (x, kept, *results)]
    for i, a in enumerate(arrays):
        for b in arrays[:i]:
            assert not np.may_share_memory(a, b)
    results[0][:] = 7.0
    same(x, [0, 0, 0])
    same(f(x)[0], [0, 0, 0])


# --- nesting --------------------------------------------------------------------------


def test_a_call_within_a_trace_is_like_any_other() -> None:
    @hf.jit
    def inner(x: Any, n: int, *, how: str = "add") -> Any:
        assert type(n) is int
        for _ in range(n):
            x = x + 1 if how == "add" else x * 2
        return {"x": x, "n": n, "none": None}

    @hf.jit
    def outer(x: Any) -> Any:
        first = inner(x, 2)
        second = inner(first["x"], first["n"], how="mul")
        assert type(second["n"]) is int
        return first, second

    first, second = outer(hf.ones(2))
    same(first["x"], [3, 3])
    same(second["x"], [12, 12])
    assert (first["n"], second["n"], second["none"]) == (2, 2, None)


def test_writes_of_an_inner_function_reach_the_outermost_caller() -> None:
    def write_first(a: Any, b: Any) -> Any:
        a[0] = 10.0
        return b + a

    inner = hf.jit(write_first)
    outer = hf.jit(lambda a, b: (inner(a, b), inner(b, b))[1])
    a, b = hf.zeros(2), hf.ones(2)
    same(outer(a, b), [20, 2])
    same(a, [10, 0])
    same(b, [10, 1])


def test_a_jitted_function_is_a_body() -> None:
    step = hf.jit(lambda c, x: (c * 0.5 + x, c))
    less = hf.jit(lambda c: c < 10.0)
    double = hf.jit(lambda c: c * 2)

    def run(xs: Any) -> Any:
        last, ys = hf.scan(step, 0.0, xs)
        grown = hf.while_loop(less, double, 1.0)
        chosen = hf.cond(last > 0, double, hf.jit(lambda c: c), (last,))
        return last, ys, grown, chosen, hf.map(double, xs)

    xs = hf.arange(4.0)
    for got, want in zip(run(xs), hf.jit(run)(xs), strict=True):
        same(got, want)
    with hf.debug():
        for got, want in zip(run(xs), hf.jit(run)(xs), strict=True):
            same(got, want)


def test_recursion_on_numbers_unrolls() -> None:
    @hf.jit
    def power(x: Any, n: int) -> Any:
        return x if n == 1 else x * power(x, n - 1)

    same(power(hf.asarray(2.0), 5), 32.0)


def test_a_jitted_function_may_be_jitted() -> None:
    f = hf.jit(hf.jit(lambda x, n: (x * n, n)))
    y, n = f(hf.ones(2), 3)
    same(y, [3, 3])
    assert n == 3


class Model:
    def __init__(self, w: float) -> None:
        self.w = hf.asarray(w)

    @hf.jit
    def __call__(self, x: Any) -> Any:
        """Twice."""
        return self.w * x

    @hf.jit(donate=(1,))  # type: ignore[untyped-decorator]
    def eat(self, x: Any) -> Any:
        return self.w + x

    @staticmethod
    @hf.jit
    def static(x: Any) -> Any:
        return x - 1


def test_methods() -> None:
    one, two, x = Model(2.0), Model(3.0), hf.ones(2)
    for model, w in ((one, 2), (two, 3)):
        same(model(x), [w, w])
        model.w += 1
        same(model(x), [w + 1, w + 1])
    assert Model.__call__.__doc__ == "Twice."
    assert "mul" in str(Model.__call__.graph_text)
    same(one.static(x), [0, 0])
    y = hf.ones(2)
    same(one.eat(y), [4, 4])
    assert "add" in one.eat.graph_text
    with pytest.raises(InvalidTensorError):
        y.item()


def test_what_is_callable_may_be_jitted() -> None:
    same(hf.jit(partial(hf.sum, axis=0))(hf.ones((2, 3))), [2, 2, 2])
    same(hf.jit(hf.sin)(hf.zeros(2)), [0, 0])
    with pytest.raises(ArgumentTypeError, match="`f` must be a function"):
        hf.jit(3)  # type: ignore[arg-type]
    assert repr(hf.jit(write)) == "<jitted write>"
    assert hf.jit(write).__name__ == "write"


# --- errors and threads ---------------------------------------------------------------


def test_an_error_in_the_function_leaves_no_state() -> None:
    fail, table = True, hf.zeros(2)

    def body(c: Any) -> Any:
        nonlocal fail
        table[0] = 1.0
        if fail:
            raise RuntimeError("mine")
        return c + 1

    @hf.jit
    def f(x: Any) -> Any:
        x += 1
        return hf.while_loop(lambda c: c < 3.0, body, x)

    x = hf.asarray(0.0)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="mine"):
            f(x)
        assert (x + 1).item() == 1.0
        same(table, [0, 0])
    fail = False
    assert f(x).item() == 3.0
    assert x.item() == 1.0
    same(table, [1, 0])


def test_several_threads_trace_and_compile_a_function_once() -> None:
    begun = threading.Barrier(6)

    def f(x: Any) -> Any:
        time.sleep(0.05)
        return hf.while_loop(lambda c: hf.all(c < 100.5), lambda c: c * 1.5, x)

    g, results = hf.jit(f), []

    def work() -> None:
        begun.wait()
        results.append(g(hf.ones(3)).tolist())

    threads = [threading.Thread(target=work) for _ in range(6)]
    with counting(1, 1):
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(results) == 6
    assert all(r == results[0] for r in results)


def test_a_trace_in_one_thread_does_not_touch_another() -> None:
    tracing, done = threading.Event(), threading.Event()

    def f(x: Any) -> Any:
        tracing.set()
        done.wait(5)
        return x + 1

    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(hf.jit(f)(hf.ones(2))))
    thread.start()
    tracing.wait(5)
    same(hf.ones(2) * 3, [3, 3])
    same(hf.jit(lambda x: x * 3)(hf.ones(2)), [3, 3])
    done.set()
    thread.join()
    same(results[0], [2, 2])


# --- to look at -----------------------------------------------------------------------


def test_the_stages_can_be_seen() -> None:
    f = hf.jit(lambda x: hf.sin(x) * 2)
    for stage in ("graph", "graph_text", "loop_ir", "llvm_ir", "asm"):
        with pytest.raises(ArgumentValueError, match="has not been compiled yet"):
            getattr(f, stage)
    f(hf.ones(5))
    assert [n.op.name for n in f.graph.nodes if n.op] == ["sin", "multiply"]
    assert "-> f32[5]" in f.graph_text
    assert "for" in f.loop_ir
    assert "define" in f.llvm_ir
    assert "ret" in f.asm
    f(hf.ones(6))
    assert "-> f32[s0]" in f.graph_text
