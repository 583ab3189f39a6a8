"""Rules of shapes over backed symbols: what is asked, and what comes out."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import hopflow as hf
from hopflow import dtypes
from hopflow.bind import bind, using
from hopflow.compiler.pipeline import Executable
from hopflow.errors import (
    ArgumentRangeError,
    DataDependentError,
    HopflowError,
    ShapeError,
)
from hopflow.graph.core import Graph, size_of
from hopflow.graph.interpreter import interpret
from hopflow.graph.parser import parse
from hopflow.graph.printer import format_graph
from hopflow.graph.running import compile_graph
from hopflow.graph.types import SYMBOL_TYPE, TensorType
from hopflow.graph.verifier import verify
from hopflow.ops.opdef import OPERATIONS, OpDef, Sample
from hopflow.symbolic.boolean import SymBool, all_of, any_of
from hopflow.symbolic.env import ShapeEnv
from hopflow.symbolic.size import (
    Size,
    Symbol,
    SymInt,
    free_symbols,
    substitute,
    sym_int,
    sym_max,
    sym_min,
    symbol,
)
from hopflow.tensor import EagerTensor
from hopflow.testing.kernels import sample_arrays
from hopflow.trace.tracer import Tracer

pytestmark = pytest.mark.slow


class Sized:
    """An environment, and types whose every size is a backed symbol of it."""

    def __init__(self) -> None:
        self.env = ShapeEnv(line=lambda: "model.py:7")

    def size(self, hint: int) -> SymInt:
        return self.env.backed(None, hint)

    def type(self, *shape: int, dtype: Any = dtypes.float32) -> TensorType:
        return TensorType(dtype, tuple(self.size(n) for n in shape))

    def asked(self) -> list[str]:
        """The guards, but for declared ranges."""
        return [str(g.holds) for g in self.env.guards.guards if g.line]

    def at_hints(self, size: Size) -> Size:
        return substitute(size, {s: int(s.hint or 0) for s in self.env.symbols})

    def shape(self, type_: TensorType) -> tuple[Size, ...]:
        return tuple(map(self.at_hints, type_.shape))


def traced(f: Callable[..., Any], *types: TensorType) -> Graph:
    tracer = Tracer(None, "f")
    for s in dict.fromkeys(env_symbols(types)):
        tracer.define(s)
    with using(tracer):
        operands = [tracer.operand(t, f"x{k}") for k, t in enumerate(types)]
        graph = tracer.close([f(*operands)])
    verify(graph)
    return graph


def env_symbols(types: Sequence[TensorType]) -> Iterator[Symbol]:
    for s in free_symbols(*(n for t in types for n in t.shape)):
        yield from [s] if s.env is None else s.env.symbols


SHAPES: list[tuple[Any, list[tuple[int, ...]], str, list[str]]] = [
    (lambda x, y: x + y, [(3, 4), (3, 4)], "[s0, s1]", ["s0 == s2", "s1 == s3"]),
    (lambda x, y: x + y, [(3,), (1,)], "[s0]", ["s1 == 1"]),
    (lambda x, y: x + y, [(1,), (3,)], "[s1]", ["s0 == 1"]),
    (lambda x, y: x + y, [(1,), (1,)], "[s0]", ["s0 == s1"]),
    (lambda x: x + np.ones(3, "f"), [(3,)], "[3]", ["s0 == 3"]),
    (lambda x: x.T @ x, [(3, 4)], "[s1, s1]", []),
    (lambda x, y: x @ y, [(3, 4), (4, 5)], "[s0, s3]", ["s1 == s2"]),
    (lambda x: x[:5], [(8,)], "[min(5, s0)]", []),
    (lambda x: x[2:], [(8,)], "[-min(2, s0) + s0]", []),
    (lambda x: x[-3:], [(8,)], "[-max(0, s0 - 3) + s0]", []),
    (lambda x: x[:-3], [(8,)], "[max(0, s0 - 3)]", []),
    (lambda x: x[::2], [(8,)], "[(s0 + 1) // 2]", []),
    (lambda x: x[::-1], [(8,)], "[s0]", []),
    (lambda x: x[: x.shape[0] // 2], [(8,)], "[s0 // 2]", []),
    (
        lambda x: hf.reshape(x, (-1, 2)),
        [(3, 4)],
        "[(s0*s1) // 2, 2]",
        ["(s0*s1) % 2 == 0"],
    ),
    (lambda x: hf.reshape(x, (-1,)), [(3, 4)], "[s0*s1]", []),
    (lambda x: hf.concat([x, x]), [(3, 4)], "[2*s0, s1]", []),
    (lambda x: hf.arange(1, x.shape[0], 3), [(8,)], "[(s0 + 1) // 3]", []),
    (lambda x: hf.eye(x.shape[0]), [(3,)], "[s0, s0]", []),
    (lambda x: hf.sum(x), [(3, 4)], "[]", []),
    (lambda x: hf.linalg.diagonal(x), [(3, 4)], "[min(s0, s1)]", []),
]


@pytest.mark.parametrize(("f", "shapes", "shape", "asked"), SHAPES)
def test_a_rule_asks_little(
    f: Callable[..., Any], shapes: list[tuple[int, ...]], shape: str, asked: list[str]
) -> None:
    sized = Sized()
    graph = traced(f, *[sized.type(*s) for s in shapes])
    [out] = graph.out_types
    assert str(out).partition("[")[2] == shape[1:]
    assert sized.asked() == asked
    static = f(*[hf.zeros(s) for s in shapes])
    assert sized.shape(out) == static.shape
    text = format_graph(graph)
    assert format_graph(parse(text, OPERATIONS)) == text


def test_equal_sizes_are_asked_once() -> None:
    sized = Sized()
    x, y = sized.type(3, 4), sized.type(3, 4)
    traced(lambda x, y: hf.where(x > y, x + y, x * y) - y / x, x, y)
    assert sized.asked() == ["s0 == s2", "s1 == s3"]


def test_sizes_that_cannot_agree_are_an_error_and_no_guard() -> None:
    sized = Sized()
    with pytest.raises(ShapeError, match="along axis -1, s0 != s1"):
        traced(lambda x, y: x + y, sized.type(3), sized.type(4))
    assert sized.asked() == []


UNBACKED: list[tuple[Callable[..., Any], str]] = [
    (lambda x, n: x if n == 3 else -x, "u0 == 3"),
    (lambda x, n: hf.stack(hf.unstack(hf.zeros(n))), "`u0` as a Python number"),
    (lambda x, n: x[:: n - 2], "`u0 - 2` as a Python number"),
]


@pytest.mark.parametrize(("f", "condition"), UNBACKED)
def test_what_only_a_run_knows_is_named(f: Any, condition: str) -> None:
    sized = Sized()
    n = sized.env.unbacked()
    with pytest.raises(DataDependentError, match=re.escape(condition)) as error:
        traced(lambda x: f(x, n), sized.type(3))
    assert "model.py:7" in str(error.value)


# --- every operation ------------------------------------------------------------------

GROWTH: tuple[dict[int, int], ...] = (
    {},
    {3: 67, 4: 71, 5: 37},
    {2: 1, 3: 1, 4: 1, 5: 1},
)
"""Other sizes, which fit together as those of the samples do."""
POSITIONS = ("slice", "update_slice", "lu_permutation", "gather", "scatter", "dynamic")
"""What begins so takes positions, which tensors of other sizes may not have."""


def resized(sample: Sample, growth: dict[int, int]) -> Sample:
    def text(operand: str) -> str:
        name, sizes = operand.rstrip("]").split("[")
        found = [int(n) for n in sizes.split(",") if n.strip()]
        return f"{name}[{', '.join(str(growth.get(n, n)) for n in found)}]"

    return replace(sample, operands=tuple(map(text, sample.operands)))


SAMPLES = [
    pytest.param(op, sample, id=f"{op.name}-{k}")
    for op in OPERATIONS.values()
    for k, sample in enumerate(op.samples)
]


@pytest.mark.parametrize(("op", "sample"), SAMPLES)
def test_an_operation_takes_any_sizes(op: OpDef, sample: Sample) -> None:
    sized = Sized()
    dtype = sample.dtypes[0]
    arrays = sample_arrays(sample, dtype)
    graph = Graph(op.name)
    inputs = []
    for k, array in enumerate(arrays):
        type_ = sized.type(*array.shape, dtype=dtypes.as_dtype(array.dtype))
        inputs.append(graph.add_input(type_, f"x{k}"))
    symbols = [
        graph.add_input(SYMBOL_TYPE, s.name, "symbol", s) for s in sized.env.symbols
    ]
    graph.inputs = [*symbols, *inputs]
    results = op.result_types([v.type for v in inputs], sample.params)
    static = op.result_types([EagerTensor(a).type for a in arrays], sample.params)
    assert [sized.shape(t) for t in results] == [t.shape for t in static]
    assert all(g.holds.evaluate(lambda s: s.hint) for g in sized.env.guards.guards)
    if not results:
        return
    graph.outputs = graph.call(op, inputs, sample.params, results).results
    verify(graph)
    text = format_graph(graph)
    assert format_graph(parse(text, OPERATIONS)) == text
    kernel = Executable(graph)
    check = sized.env.guards.compile_for([*sized.env.symbols])
    for growth in GROWTH[: 1 if op.name.startswith(POSITIONS) else None]:
        given = sample_arrays(resized(sample, growth), dtype)
        if not check(*[n for a in given for n in a.shape]):
            continue
        try:
            with np.errstate(all="ignore"):
                want = op.run(*given, **sample.params)
        except HopflowError:
            assert op.effects
            continue
        found = kernel([EagerTensor(a) for a in given])
        many = want if isinstance(want, tuple) else (want,)
        for ours, theirs in zip(found, many, strict=True):
            assert ours.shape == np.shape(theirs)
            if op.name not in ("qr", "svd", "eigh"):  # signs of vectors are free
                size = np.abs(np.asarray(theirs, np.float64))
                largest = np.max(size, initial=1.0, where=np.isfinite(size))
                np.testing.assert_allclose(ours.array, theirs, 1e-3, 1e-3 * largest)


# --- expressions as values ------------------------------------------------------------

n, m = symbol("n"), symbol("m")
N: Any = n
VALUES: list[Any] = [
    *(n, n + 1, 2 * n * m - 3, n // 2, (n - 5) // 3, (n - 9) % 4, n // (m + 1)),
    *(sym_min(n, m, 7), sym_max(1, n - 3), n % 8 * (m // 2)),
    *(sym_int(N * 0.5), sym_int((n + 1) / (m + 2)), sym_int(abs(0.5 - N) ** 0.5)),
]
PAIRS = [(0, 0), (1, 5), (7, 2), (64, 63)]


def valued(make: Callable[[Tracer], Any]) -> Graph:
    """A graph of two symbols, and the value that `make` makes in its trace."""
    tracer = Tracer(None, "f")
    with using(tracer):
        tracer.bind_symbols([n, m])
        x = tracer.operand(TensorType(dtypes.float32, (n, m)), "x")
        outputs = [make(tracer), make(tracer), x.sum()]
    graph = tracer.close(outputs)
    verify(graph)
    return graph


@pytest.mark.parametrize("size", VALUES, ids=str)
def test_a_size_is_a_value(size: SymInt) -> None:
    graph = valued(lambda tracer: tracer.value_of(size))
    assert graph.outputs[0] is graph.outputs[1]
    assert graph.outputs[0].type.weak
    kernel = Executable(graph)
    source = compile_graph(graph, bind)
    for pair in PAIRS:
        want = substitute(size, dict(zip(free_symbols(n, m), pair, strict=True)))
        x = EagerTensor(np.zeros(pair, "f"))
        assert int(kernel([x])[0]) == want
        found = interpret(graph, [*pair, x], bind)[0]
        assert getattr(found, "value", found) == want
        assert int(source(*pair, x)[0]) == want


def condition(env: ShapeEnv) -> list[bool | SymBool]:
    a, b = (env.backed(name, 4) for name in "ab")
    parts: list[Any] = [a < b, a * b == 12, a % 2 != 0, a / 3 > 1.5, b // 2 >= 3]
    return [*parts, all_of(*parts[:3]), any_of(*parts[2:]), ~parts[3]]


@pytest.mark.parametrize("k", range(8))
def test_a_condition_is_a_value(k: int) -> None:
    env = ShapeEnv()
    asked = condition(env)[k]
    assert isinstance(asked, SymBool)
    a, b = env.symbols
    tracer = Tracer(None, "f")
    with using(tracer):
        tracer.define(a), tracer.define(b)
        type_ = TensorType(dtypes.float32, (size_of(a), size_of(b)))
        x = tracer.operand(type_, "x")
        graph = tracer.close([tracer.value_of(asked), x.sum()])
    verify(graph)
    kernel = Executable(graph)
    for pair in PAIRS:
        values = dict(zip((a, b), pair, strict=True))
        [found, _] = kernel([EagerTensor(np.zeros(pair, "f"))])
        assert bool(found) == asked.evaluate(values.__getitem__)


@pytest.mark.parametrize("dtype", ["i8", "i32", "u8", "f16", "f32", "i64"])
def test_a_size_is_a_weak_number(dtype: str) -> None:
    graph = traced(lambda x: x * x.shape[0], hf.spec(f"{dtype}[n]"))
    assert str(graph.out_types[0]) == f"{dtype}[n]"


def test_a_size_of_another_dtype_is_no_weak_number() -> None:
    f = lambda x: hf.asarray(x.shape[0] // 2, dtype=hf.int32)  # noqa: E731
    [out] = traced(f, hf.spec("f32[n]")).out_types
    assert (str(out), out.weak) == ("i32[]", False)


@pytest.mark.parametrize(
    ("dtype", "number", "message"),
    [
        ("i8", lambda n: n + 300, r"integer n \+ 300 does not fit int8"),
        ("u8", lambda n: -1 - n, r"integer -n - 1 does not fit uint8"),
    ],
)
def test_a_number_of_sizes_that_never_fits_a_dtype_is_refused(
    dtype: str, number: Callable[[Any], Any], message: str
) -> None:
    with pytest.raises(ArgumentRangeError, match=message):
        traced(lambda x: x * number(x.shape[0]), hf.spec(f"{dtype}[n]"))


# --- the namespace --------------------------------------------------------------------

CALLS: dict[str, tuple[Callable[..., Any], list[tuple[int, ...]]]] = {
    "expand_dims": (lambda x: hf.expand_dims(x, axis=1), [(3, 4)]),
    "squeeze": (lambda x: hf.squeeze(x, axis=0), [(1, 4)]),
    "flip": (lambda x: hf.flip(x), [(3, 4)]),
    "roll": (lambda x: hf.roll(x, 5, axis=1), [(3, 4)]),
    "roll all": (lambda x: hf.roll(x, x.shape[0]), [(3, 4)]),
    "tile": (lambda x: hf.tile(x, (2, 3)), [(3, 4)]),
    "repeat": (lambda x: hf.repeat(x, 3, axis=0), [(3, 4)]),
    "unstack": (lambda x: hf.unstack(x)[1], [(3, 4)]),
    "stack": (lambda x, y: hf.stack([x, y], axis=1), [(3, 4), (3, 4)]),
    "concat": (lambda x, y: hf.concat([x, y], axis=1), [(3, 4), (3, 2)]),
    "pad": (lambda x: hf.pad(x, ((1, 2), (0, 3))), [(3, 4)]),
    "moveaxis": (lambda x: hf.moveaxis(x, 0, 2), [(3, 4, 2)]),
    "meshgrid": (lambda x, y: hf.meshgrid(x, y)[0], [(3,), (4,)]),
    "tril": (lambda x: hf.tril(x, k=-1), [(3, 4)]),
    "triu": (lambda x: hf.triu(x, k=1), [(3, 4)]),
    "eye": (lambda x: hf.eye(x.shape[0], x.shape[1], k=1), [(3, 4)]),
    "linspace": (lambda x: hf.linspace(0.0, 1.0, x.shape[0]), [(5,)]),
    "full": (lambda x: hf.full(x.shape, x.shape[0]), [(3, 4)]),
    "arange": (lambda x: hf.arange(x.shape[0], 0, -2), [(5,)]),
    "arange float": (lambda x: hf.arange(0.5, x.shape[0]), [(5,)]),
    "take": (lambda x: hf.take(x, hf.arange(3) % 2, axis=1), [(3, 4)]),
    "take_along_axis": (
        lambda x: hf.take_along_axis(x, hf.argsort(x, axis=1), axis=1),
        [(3, 4)],
    ),
    "index": (lambda x: x[1, :, None, -1], [(3, 4, 2)]),
    "index array": (lambda x: x[:, -hf.arange(2)], [(3, 4)]),
    "slices": (lambda x: x[1:-1, ::-2], [(5, 7)]),
    "slice of slice": (lambda x: x[2:][:3], [(5, 7)]),
    "halves": (lambda x: x[: x.shape[0] // 2] + x[-(x.shape[0] // 2) :], [(6,)]),
    "matmul": (lambda x, y: x @ y, [(3, 4), (4, 5)]),
    "matmul batch": (lambda x, y: x @ y, [(2, 3, 4), (4, 5)]),
    "matvec": (lambda x, y: x @ y, [(3, 4), (4,)]),
    "tensordot": (lambda x, y: hf.tensordot(x, y, axes=1), [(2, 3, 4), (4, 5)]),
    "vecdot": (lambda x, y: hf.vecdot(x, y), [(3, 4), (3, 4)]),
    "einsum": (lambda x, y: x[:, None] * y[None, :], [(3,), (4,)]),
    "mean": (lambda x: hf.mean(x, axis=0), [(3, 4)]),
    "var": (lambda x: hf.var(x, axis=1, keepdims=True), [(3, 4)]),
    "std": (lambda x: hf.std(x, correction=1), [(3, 4)]),
    "max": (lambda x: hf.max(x, axis=1), [(3, 4)]),
    "argmax": (lambda x: hf.argmax(x, axis=0), [(3, 4)]),
    "argmax of any": (lambda x: hf.argmax(hf.sum(x, axis=1)), [(3, 4)]),
    "argmin": (lambda x: hf.argmin(x), [(3, 4)]),
    "any": (lambda x: hf.any(x > 0, axis=0), [(3, 4)]),
    "count_nonzero": (lambda x: hf.count_nonzero(x), [(3, 4)]),
    "cumulative_sum": (
        lambda x: hf.cumulative_sum(x, axis=1, include_initial=True),
        [(3, 4)],
    ),
    "diff": (lambda x: hf.diff(x, axis=0), [(3, 4)]),
    "sort": (lambda x: hf.sort(x, axis=0), [(3, 4)]),
    "searchsorted": (lambda x, y: hf.searchsorted(hf.sort(x), y), [(5,), (3,)]),
    "softmax": (lambda x: hf.exp(x - hf.max(x, axis=-1, keepdims=True)), [(3, 4)]),
    "norm": (lambda x: hf.linalg.vector_norm(x, axis=1), [(3, 4)]),
    "trace": (lambda x: hf.linalg.trace(x), [(3, 4)]),
    "diagonal": (lambda x: hf.linalg.diagonal(x, offset=1), [(3, 4)]),
    "outer": (lambda x, y: hf.linalg.outer(x, y), [(3,), (4,)]),
    "solve": (
        lambda x, y: hf.linalg.solve(x + 9 * hf.eye(x.shape[0]), y),
        [(3, 3), (3, 2)],
    ),
    "inv": (lambda x: hf.linalg.inv(x + 9 * hf.eye(x.shape[0])), [(3, 3)]),
    "cholesky": (
        lambda x: hf.linalg.cholesky(x @ x.T + hf.eye(x.shape[0])),
        [(3, 4)],
    ),
    "svdvals": (lambda x: hf.linalg.svdvals(x), [(3, 4)]),
    "pinv": (lambda x: hf.linalg.pinv(x), [(3, 4)]),
    "where": (lambda x, y: hf.where(x > 0, x, y), [(3, 4), (4,)]),
    "broadcast_to": (lambda x, y: hf.broadcast_to(x, y.shape), [(4,), (3, 4)]),
    "reshape": (lambda x: hf.reshape(x, (x.shape[1], -1)), [(3, 4)]),
    "windows": (lambda x: hf.reshape(x, (-1, 2)).sum(axis=1), [(6,)]),
    "random": (
        lambda x: hf.random.normal(hf.random.key(0), x.shape),
        [(3, 4)],
    ),
    "permutation": (
        lambda x: hf.random.permutation(hf.random.key(0), x.shape[0]),
        [(5,)],
    ),
    "min and max": (
        lambda x, y: (
            x[: sym_min(x.shape[0], y.shape[0])] * y[: sym_min(x.shape[0], y.shape[0])]
        ),
        [(3,), (5,)],
    ),
    "at least one": (lambda x: hf.zeros(sym_max(1, x.shape[0] - 3)), [(5,)]),
    "remainder": (lambda x: x[: x.shape[0] % 8], [(19,)]),
    "products": (lambda x: hf.zeros(x.size + 1) + x.sum(), [(3, 4)]),
}


FIXED = ("unstack",)
"""What has a result for each number there is."""


@pytest.mark.parametrize("name", CALLS)
def test_a_function_takes_any_sizes(name: str) -> None:
    f, shapes = CALLS[name]
    sized = Sized()
    rng = np.random.default_rng(0)

    def arguments(shapes: Sequence[tuple[int, ...]]) -> list[EagerTensor]:
        return [EagerTensor(rng.normal(size=s).astype("f")) for s in shapes]

    graph = traced(f, *[sized.type(*s) for s in shapes])
    text = format_graph(graph)
    assert format_graph(parse(text, OPERATIONS)) == text
    kernel = Executable(graph)
    fixed = any(re.fullmatch(r"s\d == [2-9]", text) for text in sized.asked())
    assert fixed == (name in FIXED)
    check = sized.env.guards.compile_for([*sized.env.symbols])
    assert check(*[n for s in shapes for n in s])
    compared = 0
    for growth in (*GROWTH, {n: 0 for n in range(20)}):
        grown = [tuple(growth.get(n, n) for n in s) for s in shapes]
        if not check(*[n for s in grown for n in s]):
            continue
        given = arguments(grown)
        try:
            with hf.debug():
                want = f(*given)
        except HopflowError:
            continue
        [found] = kernel(given)
        assert found.shape == want.shape
        assert found.dtype is want.dtype
        np.testing.assert_allclose(found.array, want.array, 1e-3, 1e-3)
        compared += 1
    assert compared


# --- bodies ---------------------------------------------------------------------------


def test_results_of_branches_that_may_agree_are_asked_to() -> None:
    f = hf.jit(lambda p, x, y: hf.cond(p, lambda: x, lambda: y), dynamic=True)
    for n in (4, 7):
        x = np.arange(n, dtype="f")
        for p in (True, False):
            found = f(hf.asarray(p), hf.asarray(x), hf.asarray(-x))
            np.testing.assert_array_equal(found.array, x if p else -x)
    assert [g.partition("  ")[0] for g in f.guards] == ["x.shape[0] == y.shape[0]"]


def test_a_number_that_decides_the_program_is_a_guard() -> None:
    f = hf.jit(lambda x, k: hf.linalg.diagonal(x, offset=k), dynamic=True)
    x = np.arange(12, dtype="f").reshape(3, 4)
    for k in (1, 2):
        found = f(hf.asarray(x), k)
        np.testing.assert_array_equal(found.array, np.diagonal(x, k))
    assert "k == 2" in str(f.guards)
