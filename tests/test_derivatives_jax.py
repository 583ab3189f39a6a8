"""Derivatives of public functions, at ties and kinks above all: those of JAX.

Elementwise operations are drawn from their records. Each other function of arrays has a
case here, or is named among those without a derivative.
"""

import functools
import inspect
from collections.abc import Callable, Iterator
from itertools import product
from pkgutil import resolve_name
from types import ModuleType
from typing import Any, Final

import numpy as np
import pytest

import hopflow as hf
from hopflow import pytree
from hopflow.ops import fused, reducers
from hopflow.ops.opdef import OPERATIONS, OpDef
from hopflow.testing.requires import missing, requires

pytestmark = pytest.mark.slow

jax = pytest.importorskip("jax")
jnp = jax.numpy
special = jax.scipy.special


TIES: Final = (1.0, 1.0, -2.0, 0.0, -0.0, 3.0, 3.0, 3.0)
ROWS: Final = ((1.0, 1.0, 0.0), (2.0, 2.0, 2.0))
INSIDE: Final = (0.1, 0.5, 0.9)
SIGNED: Final = (-0.9, -0.5, 0.1, 0.5, 0.9)
POINTS: Final = (*TIES, *SIGNED, 2.5)
RNG: Final = np.random.default_rng(0)
SQUARE, OTHER = RNG.normal(size=(2, 4, 4))
POSITIVE: Final = SQUARE @ SQUARE.T + np.eye(4)
COLUMNS: Final = RNG.normal(size=(4, 2))
WIDE: Final = RNG.normal(size=(3, 5))
BATCH: Final = RNG.normal(size=(2, 3, 3))
SQUARES: Final = RNG.normal(size=(2, 1, 3, 3)) + 2 * np.eye(3)
POSITIVES: Final = SQUARES @ np.swapaxes(SQUARES, -1, -2)
TALL: Final = RNG.normal(size=(2, 1, 4, 3))
INDICES: Final = np.array([0, 0, 2])
MASK: Final = np.array([True, False, True, True])
INF: Final = np.inf

EACH: Final = {"total_repeat_length": 4}
"""What JAX must be told when it compiles."""

Case = tuple[Callable[..., Any], Callable[..., Any], tuple[Any, ...]]


def both(f: Callable[..., Any], *args: Any) -> Case:
    """`f(x, module)`, for both modules."""
    return lambda *xs: f(hf, *xs), lambda *xs: f(jnp, *xs), args


def alike(names: str, *args: Any, space: str = "", **params: Any) -> Iterator[Any]:
    """Functions that have one name here and in JAX."""
    for name in names.split():

        def call(m: Any, *xs: Any, name: str = name) -> Any:
            return getattr(getattr(m, space, m), name)(*xs, **params)

        of = ", ".join(f"{key}={value}" for key, value in params.items())
        yield f"{name} {of}".strip(), both(call, *args)


LEFTS: Final = (1.0, 2.0, 0.0, -3.0, 7.0, 0.0, -0.0)
RIGHTS: Final = (1.0, 3.0, 2.0, 2.0, -2.0, 0.0, 1.0)
NUMBERS: Final = (*POINTS, 1.25, 4.0, 10.0)


LISTED: Final = ("convert", "where", "stop_gradient")
"""Operations with params, with bools, of constants: `elementwise` has calls of them."""


def of_records() -> Iterator[tuple[str, Case]]:
    """Each operation that a record has JAX's function for, where it is finite."""
    for name, op in OPERATIONS.items():
        known = op.reference and op.reference.jax
        if not (known and op.jvp) or name in LISTED:
            continue
        first = op.samples[0]
        xs = np.array([LEFTS, RIGHTS] if len(first.operands) == 2 else [NUMBERS])
        with np.errstate(all="ignore"):
            finite = np.isfinite(op.run(*xs))
        yield name, (op, resolve_name(known), tuple(xs[:, finite]))


def elementwise() -> Iterator[tuple[str, Case]]:
    yield from of_records()
    yield from alike("positive square", tuple(x for x in POINTS if x))
    yield from alike("conj imag nan_to_num real square", (0.0, -0.0))
    yield from alike("reciprocal", (*INSIDE, 1.0, 4.0))
    nonzero = tuple(y or 5.0 for y in RIGHTS)
    yield from alike("logaddexp", LEFTS, RIGHTS)
    yield from alike("add maximum multiply minimum", ROWS, ((1.0,), (2.0,)))
    yield from alike("remainder floor_divide divide", LEFTS, nonzero)
    yield "fma", (fused.fma, lambda x, y, z: x * y + z, (LEFTS, RIGHTS, LEFTS))
    bases = (0.0, 0.0, 2.0, -2.0, 0.0)
    yield "pow", (hf.pow, jnp.power, (bases, (2.0, 0.0, 0.0, 3.0, 1.0)))
    for n in (0, 1, 2, 3, 0.5, 2.0, 0.0):
        yield f"pow {n}", both(lambda m, x, n=n: m.pow(x, n), (0.0, 1.0, 2.0, -1.5))
    yield "pow -1", both(lambda m, x: m.pow(x, -1), (1.0, 2.0))
    for bounds in ((1.0, 3.0), (None, 1.0), (0.0, None)):
        yield f"clip {bounds}", both(lambda m, x, b=bounds: m.clip(x, *b), POINTS)
    yield from alike("clip", ROWS, (1.0, 2.0, 0.0), ((1.0,), (3.0,)))
    yield "where", both(lambda m, x: m.where(x > 0, m.sqrt(m.abs(x) + 1), x), TIES)
    yield "where of two", both(lambda m, x, y: m.where(x >= y, x, y), LEFTS, RIGHTS)
    yield "where of rows", both(lambda m, x, y: m.where(x > 1, y, 2.0), ROWS, INSIDE)
    for dtype in ("float32", "float64", "int64", "bool"):
        yield (
            f"astype {dtype}",
            both(lambda m, x, d=dtype: x * m.astype(x, getattr(m, d)), POINTS),
        )
    yield "digamma", (hf.digamma, special.digamma, (INSIDE,))
    yield "sigmoid", (hf.sigmoid, special.expit, (INSIDE,))
    for name in ("rsqrt", "stop_gradient"):
        yield name, (getattr(hf, name), getattr(jax.lax, name), (INSIDE,))
    far = (-0.5, -1.5, 3.0, 10.0, 30.5, 0.0, -1.0)
    yield "lgamma beyond", (hf.lgamma, special.gammaln, (far,))
    yield "nan_to_num", both(lambda m, x: m.nan_to_num(x), (1.0, np.nan, INF))


EQUAL = (1.0, 2.0, 2.0, 1.0, 2.0, 2.0, 2.0)


def reductions() -> Iterator[tuple[str, Case]]:
    for name in "max min sum prod mean std var".split():
        f, g = getattr(hf, name), getattr(jnp, name)
        yield name, (f, g, (TIES,))
        yield (
            f"{name} rows",
            (lambda x, f=f: f(x, axis=1), lambda x, g=g: g(x, axis=1), (ROWS,)),
        )
        yield (
            f"{name} kept",
            both(lambda m, x, n=name: getattr(m, n)(x, axis=0, keepdims=True), ROWS),
        )
    yield from alike("max min sum prod mean std var", WIDE)
    yield from alike("max min sum prod mean var", np.ones((2, 2, 2)), axis=(0, 2))
    yield from alike("std var", SQUARE, correction=1, axis=1)
    for x in (TIES, (-INF, -INF), (-INF, 0.0), (INF, 0.0)):
        yield f"logsumexp {x}", (hf.logsumexp, special.logsumexp, (x,))
    yield (
        "logsumexp rows",
        (
            lambda x: hf.logsumexp(x, axis=1, keepdims=True),
            lambda x: special.logsumexp(x, axis=1, keepdims=True),
            (ROWS,),
        ),
    )
    yield from alike("cumulative_sum cumulative_prod", TIES)
    yield from alike(
        "cumulative_sum cumulative_prod", ROWS, axis=1, include_initial=True
    )
    yield "cummax", (hf.cummax, jax.lax.cummax, (TIES,))
    yield "cummin", (hf.cummin, jax.lax.cummin, ((1.0, 0.0, 0.0, -1.0),))
    for many in (EQUAL, EQUAL[:6], EQUAL[:3], (0.0, 0.0, 2.0, 0.0, 3.0)):
        n = len(many)
        yield f"cummax of {n}", (hf.cummax, jax.lax.cummax, (many,))
        yield f"cumulative_prod of {n}", (hf.cumulative_prod, jnp.cumprod, (many,))
        yield (
            f"cummin of {n} in columns",
            (
                lambda x: hf.cummin(hf.stack([x, x]), axis=1)[:, ::-1],
                lambda x: jax.lax.cummin(jnp.stack([x, x]), axis=1)[:, ::-1],
                (many,),
            ),
        )
        yield (
            f"cummax of {n}, from the end",
            (
                lambda x: reducers.cummax(x, axis=0, reverse=True),
                lambda x: jax.lax.cummax(x, axis=0, reverse=True),
                (many,),
            ),
        )
    yield (
        "sum of nothing",
        (
            lambda x: hf.sum(x) + hf.prod(x) + hf.sum(hf.cumulative_prod(x)),
            lambda x: jnp.sum(x) + jnp.prod(x) + jnp.sum(jnp.cumprod(x)),
            ((),),
        ),
    )


def positions() -> Iterator[tuple[str, Case]]:
    yield "sort", both(lambda m, x: m.sort(x), TIES)
    yield from alike("sort", ROWS, axis=0)
    # (Of a tie JAX takes the last first, and `hf.argsort` keeps the order.)
    yield "sort down", both(lambda m, x: m.sort(x, descending=True), INSIDE)
    yield (
        "top_k",
        (lambda x: hf.top_k(x, 3).values, lambda x: jax.lax.top_k(x, 3)[0], (TIES,)),
    )
    yield "take", both(lambda m, x: m.take(x, INDICES, axis=0), TIES)
    at = np.array([[0, 0, 2], [1, -1, 1]])
    yield (
        "take_along_axis",
        both(lambda m, x: m.take_along_axis(x, m.asarray(at), axis=1), ROWS),
    )
    yield (
        "unique_values",
        (hf.unique_values, lambda x: jnp.unique(x, size=4), (TIES,)),
    )
    for name in ("unique_all", "unique_counts", "unique_inverse"):
        yield (
            name,
            (
                lambda x, name=name: getattr(hf, name)(x).values,
                lambda x: jnp.unique(x, size=4),
                (TIES,),
            ),
        )
    yield "element", both(lambda m, x: x[m.argmax(x)], TIES)
    yield "mask", both(lambda m, x: x[MASK], SQUARE)
    for name in ("set", "add", "min", "max"):
        yield (
            f"at {name}",
            both(
                lambda m, x, n=name: getattr(x.at[INDICES], n)(x[5:8]),
                (1.0, 2.0, 3.0, 4.0, 5.0, 1.0, 1.0, 3.0),
            ),
        )
    yield "at slice", both(lambda m, x: x.at[1:7:2].set(x[:3]), TIES)
    yield (
        "at mul",  # (JAX has no derivative for an element written twice.)
        (
            lambda x: x.at[INDICES[1:]].mul(x[5:7]),
            lambda x: x.at[INDICES[1:]].mul(x[5:7], unique_indices=True),
            ((1.0, 2.0, 0.0, 4.0, 5.0, 0.0, 3.0, 3.0),),
        ),
    )
    ids = np.array([0, 5, 1, 0])
    yield (
        "segment_sum",
        (
            lambda x: hf.segment_sum(x, ids, 3),
            lambda x: jax.ops.segment_sum(x, ids, 3),
            (SQUARE,),
        ),
    )
    yield (
        "dynamic_slice",
        (
            lambda x: hf.dynamic_slice(x, (1, 9), (2, 2)),
            lambda x: jax.lax.dynamic_slice(x, (1, 9), (2, 2)),
            (SQUARE,),
        ),
    )
    yield (
        "dynamic_update_slice",
        (
            lambda x, y: hf.dynamic_update_slice(x, y, (1, 9)),
            lambda x, y: jax.lax.dynamic_update_slice(x, y, (1, 9)),
            (SQUARE, COLUMNS[:2]),
        ),
    )


def shapes() -> Iterator[tuple[str, Case]]:
    yield from alike("matrix_transpose ravel tril triu", SQUARE)
    yield from alike("broadcast_arrays meshgrid", (1.0, 2.0), (3.0,))
    for name, f in {
        "broadcast_to": lambda m, x: m.broadcast_to(x, (2, 4, 4)),
        "concat": lambda m, x: m.concat([x, x[1:]], axis=0),
        "diff": lambda m, x: m.diff(x),
        "diff twice": lambda m, x: m.diff(x, n=2, axis=0, prepend=x[:1], append=x[1:]),
        "expand_dims": lambda m, x: m.expand_dims(x, axis=1),
        "flip": lambda m, x: m.flip(x),
        "full": lambda m, x: m.full((2, 3), x[0, 1]),
        "full_like": lambda m, x: m.full_like(x, x[0, 1]),
        "linspace": lambda m, x: m.linspace(x[0, 0], x[0, 1], 5),
        "moveaxis": lambda m, x: m.moveaxis(x, 0, 1),
        "pad": lambda m, x: m.pad(x, ((1, 2), (0, 3)), constant_values=2.0),
        "permute_dims": lambda m, x: m.permute_dims(x, (1, 0)),
        "repeat": lambda m, x: m.repeat(x, 3, axis=0),
        "repeat each": lambda m, x: m.repeat(
            x, m.asarray([0, 2, 1, 1]), axis=1, **({} if m is hf else EACH)
        ),
        "reshape": lambda m, x: m.reshape(x, (2, 8)),
        "roll": lambda m, x: m.roll(x, 2, axis=1),
        "roll both": lambda m, x: m.roll(x, (1, -2), axis=(0, 1)),
        "slice": lambda m, x: x[1:, ::-2],
        "squeeze": lambda m, x: m.squeeze(x[:1], 0),
        "stack": lambda m, x: m.stack([x[0], x[0], x[1]], axis=1),
        "swapaxes": lambda m, x: m.swapaxes(x, 0, 1),
        "tile": lambda m, x: m.tile(x, (2, 2)),
        "tril below": lambda m, x: m.tril(x, k=-1),
        "unstack": lambda m, x: list(m.unstack(x, axis=1))[1:],
    }.items():
        yield name, both(f, SQUARE)


def products() -> Iterator[tuple[str, Case]]:
    for name in ("tensordot", "vecdot", "matmul"):
        yield name, (getattr(hf, name), getattr(jnp, name), (SQUARE, OTHER))
    xs = RNG.normal(size=(2, 1, 3, 4)), RNG.normal(size=(3, 4, 2))
    yield "matmul of batches", (hf.matmul, jnp.matmul, xs)
    vectors = (1.0, 2.0, 3.0), (2.0, 0.0, 1.0)
    yield "outer", (hf.outer, jnp.outer, vectors)
    signals = RNG.normal(size=(2, 3, 7)), RNG.normal(size=(4, 3, 3))
    conv = jax.lax.conv
    yield "conv", (hf.conv, lambda x, w: conv(x, w, (1,), "VALID"), signals)
    spread = {"window_strides": (1,), "padding": [(2, 2)], "lhs_dilation": (2,)}
    transposed = lambda x, w: jax.lax.conv_general_dilated(  # noqa: E731
        x, jnp.swapaxes(w, 0, 1)[:, :, ::-1], **spread
    )
    ours = functools.partial(hf.conv_transpose, stride=2)
    yield "conv_transpose", (ours, transposed, (signals[0], signals[1].swapaxes(0, 1)))
    yield "cross", (hf.linalg.cross, jnp.cross, vectors)


def factors() -> Iterator[tuple[str, Case]]:
    ours, theirs = hf.linalg, jnp.linalg
    yield from alike("diagonal trace", WIDE, space="linalg", offset=1)
    for name in ("det", "inv", "slogdet", "qr", "svdvals"):
        for x in (SQUARE, BATCH):
            yield (
                f"{name} {x.ndim}",
                (getattr(ours, name), getattr(theirs, name), (x,)),
            )
    for name in ("cholesky", "eigvalsh"):
        for x in (POSITIVE, POSITIVE + 0.1 * OTHER):  # not quite symmetric
            yield name, (getattr(ours, name), getattr(theirs, name), (x,))
    for b in (COLUMNS, COLUMNS[:, 0]):
        yield "solve", (ours.solve, theirs.solve, (SQUARE, b))
    yield "pinv", (ours.pinv, theirs.pinv, (WIDE,))
    yield "matrix_power", both(lambda m, x: m.linalg.matrix_power(x, -3), SQUARE)
    # Squares, for signs of vectors are free.
    yield "eigh", both(lambda m, x: [v * v for v in m.linalg.eigh(x)], POSITIVE)
    for x in (WIDE, WIDE.T):
        yield (
            "svd",
            both(lambda m, x: [v * v for v in m.linalg.svd(x, full_matrices=False)], x),
        )
    for order in (2, 1, INF, -INF, 3, 0.5, 0):
        yield (
            f"vector_norm {order}",
            (
                lambda x, n=order: ours.vector_norm(x, ord=n),
                lambda x, n=order: theirs.norm(x, ord=n),
                ((3.0, -3.0, 1.0, 2.0),),
            ),
        )
    for order in (2, 1, np.inf, -np.inf):
        zeros: Any = ((0.0, 0.0), (0.0, 0.0))
        yield (
            f"vector_norm {order} of zeros",
            (
                lambda x, n=order: ours.vector_norm(x, ord=n, axis=0),
                lambda x, n=order: theirs.vector_norm(x, ord=n, axis=0),
                (zeros,),
            ),
        )
        yield (
            f"matrix_norm {order} of zeros",
            (
                lambda x, n=order: ours.matrix_norm(x, ord=n),
                lambda x, n=order: theirs.matrix_norm(x, ord=n),
                (zeros,),
            ),
        )
    for flags in product((False, True), repeat=3):
        yield (
            f"solve_triangular {flags}",
            (
                lambda a, b, own=flags: ours.solve_triangular(
                    a, b, lower=own[0], transpose=own[1], unit_diagonal=own[2]
                ),
                lambda a, b, own=flags: jax.scipy.linalg.solve_triangular(
                    a, b, lower=own[0], trans=own[1], unit_diagonal=own[2]
                ),
                (POSITIVE, COLUMNS),
            ),
        )
    for kind in ("fro", "nuc", 1, -1, 2, -2, INF, -INF):
        yield (
            f"matrix_norm {kind}",
            both(lambda m, x, n=kind: m.linalg.matrix_norm(x, ord=n), SQUARE),
        )


# Where JAX changed its mind: before 0.11 it gives other numbers at singular points, and
# none of `nextafter`.
NEWER: Final = ("hypot", "lgamma beyond", "nextafter")
LACKING: Final = NEWER if missing("jax>=0.11") else ()
CASES: Final = [
    case
    for table in (elementwise, reductions, positions, shapes, products, factors)
    for case in table()
]

BOOLS_AND_INTEGERS: Final = (
    "all any argmax argmin argsort bitwise_and bitwise_invert bitwise_left_shift "
    "bitwise_or bitwise_right_shift bitwise_xor count_nonzero equal greater "
    "greater_equal isclose isfinite isinf isnan less less_equal logical_and "
    "logical_not logical_or logical_xor matrix_rank nonzero not_equal one_hot "
    "searchsorted signbit check check_is_size"
).split()
CONSTANTS: Final = "arange empty empty_like eye ones ones_like zeros zeros_like".split()
WITHOUT: Final = {*BOOLS_AND_INTEGERS, *CONSTANTS}


def functions(space: ModuleType) -> Iterator[str]:
    """The names of a module's functions of arrays."""
    for name in space.__all__:
        value = getattr(space, name)
        if isinstance(value, OpDef) or (
            inspect.isroutine(value)
            and inspect.unwrap(value).__module__.startswith("hopflow.ops")
        ):
            yield name


def test_every_function_is_compared_or_has_no_derivative() -> None:
    compared = {name.split()[0] for name, _ in CASES}
    known = {*functions(hf), *functions(hf.linalg)}
    assert known - compared == WITHOUT


def test_every_rule_is_compared() -> None:
    rules = {name for name, op in OPERATIONS.items() if op.jvp or op.unview is not None}
    graphs = [
        hf.trace(f, *inputs(args)[0]).graph
        for name, (f, _, args) in CASES
        if not name.startswith("unique")  # whose graph is for some size only
    ]
    used = {node.op.name for graph in graphs for node in graph.nodes if node.op}
    error = {"callback"}  # whose derivative is an error
    deferred = {"require", "match_size"}  # of sizes that JAX does not have
    compiled = {"sort"}  # of which compilation makes others, after differentiation
    assert rules - used == error | deferred | compiled


def wave(f: Any, like: Any, dtype: Any) -> Any:
    """Numbers that float32 has, in the shape of `like`."""
    numbers = f(1.0 + np.arange(like.size)).reshape(like.shape)
    return numbers.astype(np.float32).astype(dtype)


def inputs(args: Any, dtype: Any = np.float64) -> tuple[Any, Any]:
    """A case's arguments and their tangents, the same numbers in each dtype."""
    xs = tuple(np.asarray(x, np.float32).astype(dtype) for x in args)
    return xs, tuple(wave(np.cos, x, dtype) for x in xs)


TOGETHER: Final = 6
"""Cases that JAX compiles as one program: several cost little more than one."""


@functools.cache
def wanted(first: int) -> dict[int, Any]:
    """JAX's tangents and cotangents of the `TOGETHER` cases from this one on."""
    rows = list(enumerate(CASES))[first : first + TOGETHER]
    own = {i: case for i, (name, case) in rows if name not in LACKING}

    def derivatives(g: Any, xs: Any, ts: Any) -> Any:
        _, tangent = jax.jvp(g, xs, ts)
        out, pull = jax.vjp(g, *xs)
        return tangent, pull(jax.tree.map(lambda v: wave(np.sin, v, v.dtype), out))

    def all_of_them(given: Any) -> list[Any]:
        return [
            derivatives(g, xs, ts)
            for (_, g, _), (xs, ts) in zip(own.values(), given, strict=True)
        ]

    with jax.enable_x64(True):
        found = jax.jit(all_of_them)([inputs(args) for *_, args in own.values()])
    return dict(zip(own, found, strict=True))


def check(got: Any, want: Any, tolerance: float = 1e-7) -> None:
    leaves = [np.asarray(v) for v in pytree.flatten(got)[0]]
    expected = [np.asarray(v) for v in jax.tree.leaves(want)]
    assert len(leaves) == len(expected)
    for g, w in zip(leaves, expected, strict=True):
        np.testing.assert_allclose(g, w, rtol=tolerance, atol=tolerance / 100)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    "number",
    [
        pytest.param(i, id=name, marks=requires("jax>=0.11") if name in NEWER else ())
        for i, (name, _) in enumerate(CASES)
    ],
)
def test_derivatives(number: int, dtype: str) -> None:
    f, _, args = CASES[number][1]
    tangent, cotangents = wanted(number - number % TOGETHER)[number]
    xs, ts = inputs(args, dtype)
    out, pull = hf.vjp(f, *xs)
    cts = pytree.tree_map(lambda v: wave(np.sin, v, v.dtype.dtype), out)
    pushed, pulled = hf.jvp(f, xs, ts)[1], pull(cts)
    assert {str(v.dtype.dtype) for v in pytree.flatten(pulled)[0]} == {dtype}
    tolerance = 1e-7 if dtype == "float64" else 1e-4
    check(pushed, tangent, tolerance)
    check(pulled, cotangents, tolerance)


def test_logaddexp_is_smooth_at_ties_and_finite_at_infinities() -> None:
    def slope(x: Any, y: Any) -> Any:
        return hf.grad(lambda x, y: hf.sum(hf.logaddexp(x, y)))(x, y)

    xs, ys = [-INF, 0.0, 1.0, 0.0], [0.0, INF, 1.0, -INF]
    assert slope(hf.asarray(xs), hf.asarray(ys)).tolist() == [0.0, 0.0, 0.5, 1.0]
    assert hf.grad(slope)(1.0, 1.0).item() == 0.25


SECOND: Final = {
    "cholesky": (POSITIVES,),
    "eigh": (POSITIVES,),
    "det": (SQUARES,),
    "inv": (SQUARES,),
    "slogdet": (SQUARES,),
    "qr": (TALL,),
    "svd": (TALL,),
    "solve": (SQUARES, TALL[..., 1:, :]),
    "solve_triangular": (POSITIVES, TALL[..., 1:, :]),
}


@pytest.mark.parametrize("name", SECOND)
def test_second_derivatives_of_stacks_of_matrices(name: str) -> None:
    params = {"full_matrices": False} if name == "svd" else {}
    power = 2 if name in ("eigh", "svd") else 1  # signs of vectors are free
    theirs = jax.scipy.linalg if name == "solve_triangular" else jnp.linalg
    xs = SECOND[name]
    ts = tuple(np.sin(1.0 + np.arange(x.size)).reshape(x.shape) for x in xs)

    def second(m: Any, space: Any, transforms: Any, xs: Any, ts: Any) -> Any:
        def total(*xs: Any) -> Any:
            out = getattr(space, name)(*xs, **params)
            found = 0.0
            for r in out if isinstance(out, tuple) else (out,):
                weights = np.cos(np.arange(r.size)).reshape(r.shape)
                found += m.sum(m.sin(r**power) * m.asarray(weights, dtype=xs[0].dtype))
            return found

        slopes = transforms.grad(total, tuple(range(len(xs))))
        return transforms.jvp(slopes, xs, ts)

    with jax.enable_x64(True):
        want = jax.jit(lambda xs, ts: second(jnp, theirs, jax, xs, ts))(xs, ts)
    check(second(hf, hf.linalg, hf, xs, ts), want)
    small = [tuple(v.astype(np.float32) for v in vs) for vs in (xs, ts)]
    found = second(hf, hf.linalg, hf, *small)
    assert {v.dtype for v in pytree.flatten(found)[0]} == {hf.float32}
    check(found, want, 1e-2)
