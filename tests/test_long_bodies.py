"""Bodies that are compiled as several native functions."""

import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

import hopflow as hf
from hopflow import dtypes
from hopflow.compiler import pipeline
from hopflow.compiler.cpu import segments
from hopflow.config import config
from hopflow.errors import CheckError
from hopflow.loop_ir import expr as e
from hopflow.loop_ir import walk
from hopflow.loop_ir.expr import Buffer, Var
from hopflow.loop_ir.forms import Form
from hopflow.loop_ir.program import Call, For, HostCall, Ref, Stmt, Store, Trap

pytestmark = pytest.mark.slow


@pytest.fixture
def short_segments(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Bodies are divided after every few statements."""
    pipeline.clear_cache()
    monkeypatch.setattr(segments, "LENGTH", 3)
    monkeypatch.setattr(segments, "_LOOP", 1)
    yield
    pipeline.clear_cache()


def chain(x: Any) -> Any:
    for k in range(12):
        x = hf.sin(x) * (k + 1) + hf.sum(x)
    return x


def matrices(x: Any) -> Any:
    for _ in range(4):
        x = hf.tanh(x @ x.mT) - hf.flip(x, axis=0)
    return x


def carries(x: Any) -> Any:
    def step(i: Any, a: Any, b: Any, n: Any) -> Any:
        a, b = hf.sin(b) + a @ b, hf.cos(a) * hf.sum(b)
        a = hf.where(a > 0, a, -a)
        return b + n, a, n + hf.cond(n > 2, lambda: n, lambda: i)

    return hf.fori_loop(0, 5, step, (x, x + 1, 1))


def stops_early(x: Any) -> Any:
    def keeps_on(i: Any, y: Any) -> Any:
        return (hf.sum(y) < 50) & (i < 9)

    return hf.while_loop(keeps_on, lambda i, y: (i + 1, chain(y) / 4 + 3), (0, x))


def writes(x: Any) -> Any:
    y = x.copy()
    for k in range(3):
        y[k] = hf.sum(y[k - 1]) + k
        y[:, k] *= 2
    return y, hf.scan(lambda c, r: (c + hf.sum(r), r * c), 0.0, y)


def sizes_of_the_run(x: Any) -> Any:
    positive = x[x > 0]
    first = hf.nonzero(x)[0]
    return positive * 2 + 1, hf.cumulative_sum(positive), first + 1, hf.sum(first)


def threads(x: Any) -> Any:
    return hf.map(lambda row: chain(hf.fori_loop(0, 4, lambda i, r: r + i, row)), x)


PROGRAMS: list[Callable[[Any], Any]] = [
    chain,
    matrices,
    carries,
    stops_early,
    writes,
    sizes_of_the_run,
    threads,
]


def arrays(tree: Any) -> list[Any]:
    return [np.asarray(leaf) for leaf in hf.pytree.flatten(tree)[0]]


@pytest.mark.usefixtures("verified")
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("f", PROGRAMS, ids=lambda f: f.__name__)
def test_segments_compute_the_bits_of_one_function(
    f: Any, dynamic: bool, request: pytest.FixtureRequest
) -> None:
    x = hf.asarray(np.linspace(-1, 1, 16, dtype=np.float64).reshape(4, 4))
    whole = hf.jit(f, dynamic=dynamic)
    expected = arrays(whole(x))
    assert "@hf.segment" not in whole.llvm_ir
    request.getfixturevalue("short_segments")
    divided = hf.jit(f, dynamic=dynamic)
    for got, want in zip(arrays(divided(x)), expected, strict=True):
        np.testing.assert_array_equal(got, want)
    assert "@hf.segment" in divided.llvm_ir


@pytest.mark.usefixtures("short_segments")
def test_a_check_in_a_segment_stops_the_program_with_its_own_message() -> None:
    def f(x: Any, bad: Any) -> Any:
        for k in range(8):
            x = hf.sin(x) + hf.sum(x)
            hf.check(bad != k, f"check {k}")
        return x

    jitted, x = hf.jit(f), hf.ones(5)
    jitted(x, hf.asarray(-1))
    for k in range(8):
        with pytest.raises(CheckError, match=f"check {k}"):
            jitted(x, hf.asarray(k))


@pytest.mark.usefixtures("short_segments")
def test_segments_call_python_in_order() -> None:
    seen: list[float] = []

    def f(x: Any) -> Any:
        for _ in range(6):
            x = hf.sum(hf.sin(x)) + x
            hf.callback(lambda a: seen.append(float(a[0])), None, x)
        return x

    hf.jit(f)(hf.ones(3))
    compiled = seen.copy()
    seen.clear()
    with hf.debug():
        f(hf.ones(3))
    np.testing.assert_allclose(compiled, seen, rtol=1e-6)
    assert len(seen) == 6


def test_only_long_bodies_are_divided() -> None:
    def f(x: Any) -> Any:
        for k in range(1500):
            x = hf.sin(x) + k
        return x

    long, short = hf.jit(f), hf.jit(chain)
    long(hf.ones(3)), short(hf.ones(3))
    assert long.llvm_ir.count("define internal i64 @hf.segment") > 1
    assert "@hf.segment" not in short.llvm_ir


def test_a_segment_names_few_buffers() -> None:
    one = dtypes.float64
    buffers = [Buffer(f"b{k}", one, (), "arena") for k in range(200)]
    stores: list[Stmt] = [Store(b, (), e.const(k, one)) for k, b in enumerate(buffers)]
    groups = [
        [s for run in group for s in run.statements]
        for group in segments._groups(list(segments._runs(stores)), {})
    ]
    assert [s for group in groups for s in group] == stores
    assert all(len(walk.uses(group)) <= segments.MOST_BUFFERS for group in groups)
    assert len(groups) == -(-200 // segments.MOST_BUFFERS)


def defined(f: Any, *args: Any) -> int:
    """How many segments a function is compiled to, after a comparison of its bits."""
    jitted = hf.jit(f)
    got = arrays(jitted(*args))
    with hf.debug():
        want = arrays(f(*args))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-12)
        np.testing.assert_array_equal(np.signbit(a), np.signbit(b))
    return str(jitted.llvm_ir).count("define internal i64 @hf.segment")


def products(x: Any, count: int) -> Any:
    for _ in range(count):
        x = x @ x + x
    return x


def factors(x: Any, count: int) -> Any:
    for _ in range(count):
        x = hf.linalg.cholesky(x @ x.mT + 16 * hf.eye(16))
    return x


def gathers(x: Any, count: int) -> Any:
    index = hf.astype(x[0] * 10, hf.int64)
    for _ in range(count):
        x = hf.tanh(x[index] + hf.sum(x, axis=0))
    return x


def rows_over_threads(x: Any, count: int) -> Any:
    for _ in range(count):
        x = hf.map(lambda row: hf.tanh(hf.cumulative_sum(row) + hf.sum(row)), x)
    return x


FORMS = [products, factors, gathers, rows_over_threads]


@pytest.mark.parametrize("f", FORMS, ids=lambda f: f.__name__)
def test_loops_of_one_form_are_compiled_once(
    f: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Which would give each array pages of its own, and LLVM as many ways out.
    monkeypatch.setattr(config, "guard_pages", False)
    x = hf.asarray(np.linspace(-0.3, 0.3, 256).reshape(16, 16))
    few, many = (defined(partial(f, count=n), x) for n in (80, 160))
    assert 0 < few <= 8
    assert many - few <= 3  # only those that call the others


@pytest.mark.usefixtures("verified", "short_segments")
def test_scalars_between_loops_of_one_form_are_passed() -> None:
    def f(x: Any, y: Any) -> Any:
        totals = []
        for k in range(12):
            total = hf.sum(hf.sin(x * y))
            x = hf.roll(x, 1) + total * (k % 2)
            totals.append(total)
        return x, hf.stack(totals)

    assert defined(f, hf.asarray(np.arange(5.0)), hf.asarray(0.25))


@pytest.mark.usefixtures("verified", "short_segments")
@pytest.mark.parametrize(
    "values", [(0.0, -0.0), (1, True), (2.0, 3.0)], ids=["zeros", "ones", "numbers"]
)
def test_loops_with_other_numbers_are_not_of_one_form(values: Any) -> None:
    def f(x: Any) -> Any:
        for _ in range(10):
            for value in values:
                x = hf.cumulative_sum(hf.full((3,), value) * x)
        return x

    defined(f, hf.asarray(np.array([-1.0, 2.0, 3.0])))


def _doubled(buffer: Buffer, target: Buffer, var: str = "i") -> For:
    i = Var(var, dtypes.int64)
    value = e.add(e.load(buffer, (e.read(i),)), e.load(buffer, (e.read(i),)))
    return For(i, e.index(3), [Store(target, (e.read(i),), value)])


def _of(name: str, dtype: Any = dtypes.float64, n: int = 3) -> Buffer:
    return Buffer(name, dtype, (e.index(n),), "arena")


def test_a_body_of_few_long_loops_is_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "guard_pages", False)

    def f(x: Any, y: Any) -> Any:
        for _ in range(600):
            x = x @ y
        return x

    jitted = hf.jit(f)
    jitted(hf.zeros((8, 8)), hf.zeros((8, 8)))
    loops = re.findall("^    for", jitted.loop_ir, re.MULTILINE)
    assert len(loops) <= 60  # for rows of products are merged
    assert "@hf.segment" in jitted.llvm_ir


def test_statements_of_long_expressions_make_a_long_body() -> None:
    [buffer] = map(_of, "a")

    def loop() -> For:
        i = e.read(Var("i", dtypes.int64))
        value = e.load(buffer, (i,))
        for _ in range(1000):
            value = e.add(value, value)
        return For(i.attr, e.index(3), [Store(buffer, (i,), value)])

    assert not segments.is_long([loop() for _ in range(10)], {})
    assert segments.is_long([loop() for _ in range(20)], {})


def test_levels_of_a_deep_nest_are_not_divided() -> None:
    a, b = map(_of, "ab")
    inner: list[Stmt] = [_doubled(a, b) for _ in range(200)]
    assert segments.is_long(inner, {})
    for _ in range(3):
        inner = [For(Var("i", dtypes.int64), e.index(3), inner), _doubled(a, b)]
        assert not segments.is_long(inner, {})


def test_the_form_is_that_of_the_same_code_for_other_buffers() -> None:
    a, b, c = map(_of, "abc")
    form = Form([_doubled(a, b)])
    assert form.key == Form([_doubled(c, a, "j")]).key
    assert set(form.buffers) == {a, b}
    for other in (
        _doubled(a, a),
        _doubled(_of("d", dtypes.float32), _of("e", dtypes.float32)),
        _doubled(_of("d", n=4), b),
        For(Var("i", dtypes.int64), e.index(3), []),
        For(Var("i", dtypes.int64), e.index(3), _doubled(a, b).body, independent=True),
    ):
        assert form.key != Form([other]).key
    assert Form([HostCall(0, (), ())]).key is None


def _checked(*sites: int) -> list[Stmt]:
    return [Trap(e.const(True, dtypes.bool_), site) for site in sites]


def test_the_form_counts_sites_from_the_first() -> None:
    form = Form(_checked(3, 5))
    assert form.first_site == 3
    assert form.key == Form(_checked(7, 9)).key
    assert form.key != Form(_checked(7, 10)).key
    a, b, c = (Ref(_of(name)) for name in "abc")
    call = Form([Call("gemm", (a, b, c, e.index(3)), 2)])
    assert call.key == Form([Call("gemm", (b, a, c, e.index(3)), 4)]).key
    for other in (
        Call("gemm", (a, b, c, e.index(4)), 2),
        Call("gemm", (a, a, c, e.index(3)), 2),
        Call("gemm", (a, b, c, e.index(3))),
        Call("gemv", (a, b, c, e.index(3)), 2),
        Call("gemm", (a, b, Ref(c.buffer, (e.index(3),))), 2),
    ):
        assert call.key != Form([other]).key
