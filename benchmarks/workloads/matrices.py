"""Linear algebra by loops, images, and layers of networks."""

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.libraries import row
from benchmarks.workload import Workload


def workloads(size: Callable[[int], int]) -> list[Workload]:
    rng = np.random.default_rng(0)
    n = size(250) + 6
    factor = rng.normal(size=(n, n)) / np.sqrt(n)
    positive = factor @ factor.T + np.eye(n)
    lower, upper, right = rng.uniform(0.1, 0.4, (3, size(1_000_000)))
    image = rng.uniform(size=(size(1020) + 4, size(1020) + 4)).astype("f")
    inputs = rng.normal(size=(size(256), 256)).astype("f")
    first = (rng.normal(size=(256, 1024)) / 16).astype("f")
    second = (rng.normal(size=(1024, 256)) / 32).astype("f")
    small = rng.normal(size=(size(5000), 9, 9)).astype("f")
    vectors = rng.normal(size=(size(5000), 9)).astype("f")
    return [
        row("small-products", _products, (small, vectors), rtol=1e-4),
        row("cholesky-loop", _cholesky, (positive,), steps=n, in_c=[], in_numba=True),
        row("power-iteration", _power, (positive,), steps=100, in_c=[100]),
        row(
            "tridiagonal",
            _tridiagonal,
            (lower, upper, right),
            steps=right.size,
            in_c=[],
            in_numba=True,
        ),
        row(
            "givens",
            _givens,
            (factor[:32, :32] + np.eye(min(n, 32)),),
            rtol=1e-4,
            in_c=[],
            in_numba=True,
        ),
        row("sobel", _sobel, (image,), rtol=1e-4, in_c=[], in_numba=True),
        row(
            "box-blur",
            _blur,
            (image,),
            rtol=1e-2,
            differing=0.01,
            in_c=[],
            in_numba=True,
        ),
        row(
            "rotate-image",
            _rotate,
            (image,),
            rtol=1e-3,
            differing=0.001,
            in_c=[],
            in_numba=True,
        ),
        row("mlp", _layers, (inputs, first, second), rtol=1e-3),
        row("mlp-grad", _layers_grad, (inputs, first, second), rtol=1e-2),
        row("mlp-train", _train, (inputs, first, second), steps=20, rtol=1e-2),
        row("softmax-rows", _softmax, (image,), rtol=1e-4, in_c=[]),
    ]


def _cholesky(lib: Any) -> Callable[..., Any]:
    """Column by column."""

    def factor(a: Any) -> Any:
        n = a.shape[0]
        at = lib.np.arange(n)

        def column(j: Any, low: Any) -> Any:
            rest = a[:, j] - low @ low[j]
            new = lib.np.where(at >= j, rest / lib.np.sqrt(rest[j]), 0.0)
            return low.at[:, j].set(new)

        return lib.fori_loop(0, n, column, lib.np.zeros_like(a))

    return factor


def _power(lib: Any) -> Callable[..., Any]:
    def largest(a: Any) -> Any:
        def step(_: Any, v: Any) -> Any:
            v = a @ v
            return v / lib.np.sqrt(lib.np.vecdot(v, v))

        v = lib.fori_loop(0, 100, step, a[0])
        return lib.np.vecdot(v, a @ v)

    return largest


def _tridiagonal(lib: Any) -> Callable[..., Any]:
    """Thomas' algorithm: eliminated forward, solved backward."""

    def solve(lower: Any, upper: Any, right: Any) -> Any:
        def forward(carry: Any, x: Any) -> Any:
            c, d = carry
            a, u, r = x
            scale = 1.0 / (1.0 - a * c)
            new = u * scale, (r - a * d) * scale
            return new, new

        zero = right[0] * 0.0
        _, rows = lib.scan(forward, (zero, zero), (lower, upper, right))

        def backward(x: Any, row: Any) -> Any:
            x = row[1] - row[0] * x
            return x, x

        return lib.scan(backward, zero, rows, reverse=True)[1]

    return solve


def _givens(lib: Any) -> Callable[..., Any]:
    """A triangular matrix by rotations of two rows."""

    def triangle(a: Any) -> Any:
        n = a.shape[0]

        def rotate(k: Any, r: Any) -> Any:
            i, j = k // n, k % n
            x, y = r[j, j], r[i, j]
            length = lib.np.sqrt(x * x + y * y) + 1e-30
            c, s = x / length, y / length
            upper, lower = c * r[j] + s * r[i], c * r[i] - s * r[j]
            is_below = i > j
            r = r.at[j].set(lib.np.where(is_below, upper, r[j]))
            return r.at[i].set(lib.np.where(is_below, lower, r[i]))

        return lib.fori_loop(0, n * n, rotate, a)

    return triangle


def _sobel(lib: Any) -> Callable[..., Any]:
    """How steep an image is."""

    def edges(x: Any) -> Any:
        down = x[:-2] + 2.0 * x[1:-1] + x[2:]
        across = x[:, :-2] + 2.0 * x[:, 1:-1] + x[:, 2:]
        gx, gy = down[:, 2:] - down[:, :-2], across[2:] - across[:-2]
        return lib.np.sqrt(gx * gx + gy * gy)

    return edges


def _blur(lib: Any) -> Callable[..., Any]:
    """The mean of squares of 5 × 5, by sums of all that is above and left."""

    def blur(x: Any) -> Any:
        sums = lib.np.cumulative_sum(lib.np.cumulative_sum(x, axis=0), axis=1)
        sums = lib.np.pad(sums, ((1, 0), (1, 0)))
        n, m = x.shape[0] - 4, x.shape[1] - 4
        total = sums[5 : n + 5, 5 : m + 5] - sums[:n, 5 : m + 5]
        return (total - sums[5 : n + 5, :m] + sums[:n, :m]) / 25.0

    return blur


def _rotate(lib: Any) -> Callable[..., Any]:
    """An image turned by a third of a right angle, bilinearly."""
    cos, sin = np.float32(np.cos(np.pi / 6)), np.float32(np.sin(np.pi / 6))

    def turned(x: Any) -> Any:
        n, m = x.shape
        i = lib.np.arange(n, dtype=np.float32)[:, None] - np.float32(n / 2)
        j = lib.np.arange(m, dtype=np.float32)[None, :] - np.float32(m / 2)
        u = lib.np.clip(cos * i - sin * j + np.float32(n / 2), 0.0, n - 1.001)
        v = lib.np.clip(sin * i + cos * j + np.float32(m / 2), 0.0, m - 1.001)
        top, left = u.astype(np.int32), v.astype(np.int32)
        a, b = u - top.astype(np.float32), v - left.astype(np.float32)
        above = x[top, left] * (1 - b) + x[top, left + 1] * b
        below = x[top + 1, left] * (1 - b) + x[top + 1, left + 1] * b
        return above * (1 - a) + below * a

    return turned


def _forward(lib: Any, x: Any, first: Any, second: Any) -> Any:
    """A normalised layer with a nonlinearity between two matrices, and what it adds."""
    mean = lib.np.mean(x, axis=1, keepdims=True)
    spread = lib.np.mean((x - mean) ** 2, axis=1, keepdims=True)
    h = ((x - mean) / lib.np.sqrt(spread + 1e-5)) @ first
    h = 0.5 * h * (1.0 + lib.erf(h * np.float32(np.sqrt(0.5))))
    return x + h @ second


def _layers(lib: Any) -> Callable[..., Any]:
    return lambda x, first, second: _forward(lib, x, first, second)


def _layers_grad(lib: Any) -> Callable[..., Any]:
    def gradient(x: Any, first: Any, second: Any) -> Any:
        return lib.grad(lambda w: lib.np.mean(_forward(lib, x, w, second) ** 2))(first)

    return gradient


def _train(lib: Any) -> Callable[..., Any]:
    """Steps of gradient descent of both matrices."""

    def fit(x: Any, first: Any, second: Any) -> Any:
        def loss(ws: Any) -> Any:
            return lib.np.mean((_forward(lib, x, *ws) - 0.5 * x) ** 2)

        def step(ws: Any, _: Any) -> Any:
            gs = lib.grad(loss)(ws)
            return tuple(w - 0.1 * g for w, g in zip(ws, gs, strict=True)), loss(ws)

        return lib.scan(step, (first, second), length=20)[1]

    return fit


def _softmax(lib: Any) -> Callable[..., Any]:
    def rows(x: Any) -> Any:
        e = lib.np.exp(x - lib.np.max(x, axis=1, keepdims=True))
        return e / lib.np.sum(e, axis=1, keepdims=True)

    return rows


def _products(lib: Any) -> Any:
    """Products of small matrices and vectors, of each pair."""
    return lib.vmap(lambda a, x: a @ x)
