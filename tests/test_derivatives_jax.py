"""Derivatives of public functions, at ties and kinks above all: those of JAX."""

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any, Final

import numpy as np
import pytest

import hopflow as hf
from hopflow import pytree
from hopflow.ops import reducers
from hopflow.testing.requires import requires

jax = pytest.importorskip("jax")
jnp = jax.numpy
special = jax.scipy.special


TIES: Final = (1.0, 1.0, -2.0, 0.0, -0.0, 3.0, 3.0, 3.0)
ROWS: Final = ((1.0, 1.0, 0.0), (2.0, 2.0, 2.0))
INSIDE: Final = (0.1, 0.5, 0.9)
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

Case = tuple[Callable[..., Any], Callable[..., Any], tuple[Any, ...]]


def both(f: Callable[..., Any], *args: Any) -> Case:
    """`f(x, module)`, for both modules."""
    return lambda *xs: f(hf, *xs), lambda *xs: f(jnp, *xs), args


def elementwise() -> Iterator[tuple[str, Case]]:
    for name in "abs sign floor ceil trunc round square exp sinh".split():
        yield name, (getattr(hf, name), getattr(jnp, name), (TIES,))
    yield "sqrt", (hf.sqrt, jnp.sqrt, ((0.0, 1.0, 4.0),))
    lefts = (1.0, 2.0, 0.0, -3.0, 7.0, 0.0, -0.0)
    rights = (1.0, 3.0, 2.0, 2.0, -2.0, 0.0, 1.0)
    for name in "maximum minimum hypot logaddexp copysign".split():
        yield name, (getattr(hf, name), getattr(jnp, name), (lefts, rights))
    yield "atan2", (hf.atan2, jnp.arctan2, (lefts, rights))
    nonzero = tuple(y or 5.0 for y in rights)
    for name in ("remainder", "floor_divide"):
        yield name, (getattr(hf, name), getattr(jnp, name), (lefts, nonzero))
    bases = (0.0, 0.0, 2.0, -2.0, 0.0)
    yield "pow", (hf.pow, jnp.power, (bases, (2.0, 0.0, 0.0, 3.0, 1.0)))
    for n in (0, 1, 2, 3, 0.5, 2.0, 0.0):
        yield f"pow {n}", both(lambda m, x, n=n: m.pow(x, n), (0.0, 1.0, 2.0, -1.5))
    yield "pow -1", both(lambda m, x: m.pow(x, -1), (1.0, 2.0))
    yield "clip", both(lambda m, x: m.clip(x, 1.0, 3.0), TIES)
    yield "where", both(lambda m, x: m.where(x > 0, m.sqrt(m.abs(x) + 1), x), TIES)
    for name, other in {
        **{n: n for n in ("erf", "erfc", "erfinv", "digamma")},
        "lgamma": "gammaln",
        "logistic": "expit",
    }.items():
        yield name, (getattr(hf, name), getattr(special, other), (INSIDE,))
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
    for x in (TIES, (-INF, -INF), (-INF, 0.0), (INF, 0.0)):
        yield f"logsumexp {x}", (hf.logsumexp, special.logsumexp, (x,))
    yield "cumsum", (hf.cumulative_sum, jnp.cumsum, (TIES,))
    yield "cumprod", (hf.cumulative_prod, jnp.cumprod, (TIES,))
    yield "cummax", (hf.cummax, jax.lax.cummax, (TIES,))
    yield "cummin", (hf.cummin, jax.lax.cummin, ((1.0, 0.0, 0.0, -1.0),))
    for many in (EQUAL, EQUAL[:6], EQUAL[:3], (0.0, 0.0, 2.0, 0.0, 3.0)):
        n = len(many)
        yield f"cummax of {n}", (hf.cummax, jax.lax.cummax, (many,))
        yield f"cumprod of {n}", (hf.cumulative_prod, jnp.cumprod, (many,))
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
        "nothing",
        (
            lambda x: hf.sum(x) + hf.prod(x) + hf.sum(hf.cumulative_prod(x)),
            lambda x: jnp.sum(x) + jnp.prod(x) + jnp.sum(jnp.cumprod(x)),
            ((),),
        ),
    )


def positions() -> Iterator[tuple[str, Case]]:
    yield "sort", both(lambda m, x: m.sort(x), TIES)
    # (Of a tie JAX takes the last first, and `hf.argsort` keeps the order.)
    yield "sort down", both(lambda m, x: m.sort(x, descending=True), INSIDE)
    yield (
        "top_k",
        (lambda x: hf.top_k(x, 3).values, lambda x: jax.lax.top_k(x, 3)[0], (TIES,)),
    )
    yield "take", both(lambda m, x: m.take(x, INDICES, axis=0), TIES)
    yield "mask", both(lambda m, x: x[MASK], SQUARE)
    for name in ("set", "add", "min", "max"):
        yield (
            f"at {name}",
            both(
                lambda m, x, n=name: getattr(x.at[INDICES], n)(x[5:8]),
                (1.0, 2.0, 3.0, 4.0, 5.0, 1.0, 1.0, 3.0),
            ),
        )
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
    for name, f in {
        "tile": lambda m, x: m.tile(x, (2, 2)),
        "repeat": lambda m, x: m.repeat(x, 3, axis=0),
        "tril": lambda m, x: m.tril(x),
        "flip": lambda m, x: m.flip(x),
        "roll": lambda m, x: m.roll(x, 2, axis=1),
        "diff": lambda m, x: m.diff(x),
    }.items():
        yield name, both(f, SQUARE)


def products() -> Iterator[tuple[str, Case]]:
    for name in ("tensordot", "vecdot", "matmul"):
        yield name, (getattr(hf, name), getattr(jnp, name), (SQUARE, OTHER))
    xs = RNG.normal(size=(2, 1, 3, 4)), RNG.normal(size=(3, 4, 2))
    yield "matmul of batches", (hf.matmul, jnp.matmul, xs)
    vectors = (1.0, 2.0, 3.0), (2.0, 0.0, 1.0)
    yield "outer", (hf.outer, jnp.outer, vectors)
    yield "cross", (hf.linalg.cross, jnp.cross, vectors)


def factors() -> Iterator[tuple[str, Case]]:
    ours, theirs = hf.linalg, jnp.linalg
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
            f"norm {order}",
            (
                lambda x, n=order: ours.vector_norm(x, ord=n),
                lambda x, n=order: theirs.norm(x, ord=n),
                ((3.0, -3.0, 1.0, 2.0),),
            ),
        )
    for order in (2, 1, np.inf, -np.inf):
        zeros: Any = ((0.0, 0.0), (0.0, 0.0))
        yield (
            f"norm {order} of zeros",
            (
                lambda x, n=order: ours.vector_norm(x, ord=n, axis=0),
                lambda x, n=order: theirs.vector_norm(x, ord=n, axis=0),
                (zeros,),
            ),
        )
        yield (
            f"matrix norm {order} of zeros",
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
            f"matrix norm {kind}",
            both(lambda m, x, n=kind: m.linalg.matrix_norm(x, ord=n), SQUARE),
        )


# Where JAX changed its mind: before 0.11 it gives other numbers at singular points.
NEWER: Final = ("hypot", "lgamma beyond")
CASES: Final = [
    pytest.param(*case, id=name, marks=requires("jax>=0.11") if name in NEWER else ())
    for table in (elementwise, reductions, positions, products, factors)
    for name, case in table()
]


def check(got: Any, want: Any, tolerance: float = 1e-7) -> None:
    leaves = [np.asarray(v) for v in pytree.flatten(got)[0]]
    expected = [np.asarray(v) for v in jax.tree.leaves(want)]
    assert len(leaves) == len(expected)
    for g, w in zip(leaves, expected, strict=True):
        np.testing.assert_allclose(g, w, rtol=tolerance, atol=tolerance / 100)


@pytest.mark.parametrize(("f", "g", "args"), CASES)
def test_derivatives(f: Any, g: Any, args: Any) -> None:
    def expected(xs: Any, ts: Any, cts: Any) -> Any:
        want, tangent = jax.jvp(g, xs, ts)
        _, pull = jax.vjp(g, *xs)
        return tangent, pull(jax.tree.unflatten(jax.tree.structure(want), cts))

    with jax.enable_x64(True):
        xs = tuple(np.asarray(x, np.float64) for x in args)
        ts = tuple(np.cos(np.arange(x.size)).reshape(x.shape) for x in xs)
        out, pull = hf.vjp(f, *xs)
        leaves, spec = pytree.flatten(out)
        cts = [np.sin(1.0 + np.arange(v.size)).reshape(v.shape) for v in leaves]
        tangent, pulled = jax.jit(expected)(xs, ts, cts)
        check(hf.jvp(f, xs, ts)[1], tangent)
        check(pull(pytree.unflatten(spec, cts)), pulled)


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
