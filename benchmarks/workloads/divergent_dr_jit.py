"""The functions of `divergent` in Dr.Jit, for all batch elements at once."""

from typing import Any

import drjit as dr
import numpy as np
from drjit import llvm

ARRAYS = {
    "float32": llvm.Float32,
    "float64": llvm.Float64,
    "int64": llvm.Int64,
    "uint64": llvm.UInt64,
}


def array(x: Any) -> Any:
    """A NumPy vector as an array of Dr.Jit."""
    return ARRAYS[x.dtype.name](np.ascontiguousarray(x).ravel())


def _zeros(like: Any) -> Any:
    return dr.zeros(llvm.Int64, dr.width(like))


# LLVM 15 has no code for what `dr.minimum` and `dr.maximum` are.
def _least(x: Any, y: Any) -> Any:
    return dr.select(x < y, x, y)


def _most(x: Any, y: Any) -> Any:
    return dr.select(x > y, x, y)


@dr.syntax
def escape(cx: Any, cy: Any) -> Any:
    x, y, k = cx * 0, cy * 0, _zeros(cx)
    while (x * x + y * y < 4) & (k < 256):
        x, y = x * x - y * y + cx, 2 * x * y + cy
        k += 1
    return k


@dr.syntax
def collatz(n: Any) -> Any:
    n, k = llvm.Int64(n), _zeros(n)
    while n != 1:
        n = dr.select(n & 1 == 0, n >> 1, 3 * n + 1)
        k += 1
    return k


@dr.syntax
def root(a: Any) -> Any:
    eps = 4 * float(np.finfo(np.float32 if dr.size_v(a) == 4 else np.float64).eps)
    x, old, k = type(a)(a), a * 0, _zeros(a)
    while (dr.abs(x - old) > eps * x) & (k < 100):
        x, old = (2 * x + a / (x * x)) / 3, x
        k += 1
    return x


def _slope(x: Any, v: Any) -> Any:
    return v, 2 * (1 - x * x) * v - x


@dr.syntax
def orbit(x: Any, v: Any) -> Any:
    x, v = type(x)(x), type(v)(v)
    t, h, k = x * 0, x * 0 + 0.01, _zeros(x)
    while (t < 5) & (k < 1000):
        a, b = _slope(x, v)
        c, d = _slope(x + h * a * 0.5, v + h * b * 0.5)
        p, q = _slope(x + h * c * 0.75, v + h * d * 0.75)
        new_x = x + h * (2 * a + 3 * c + 4 * p) / 9
        new_v = v + h * (2 * b + 3 * d + 4 * q) / 9
        r, s = _slope(new_x, new_v)
        error_x = h * (a * (-5 / 72) + c / 12 + p / 9 - r / 8)
        error_v = h * (b * (-5 / 72) + d / 12 + q / 9 - s / 8)
        error = dr.sqrt(error_x * error_x + error_v * error_v) * 1e4 + 1e-8
        holds = error < 1
        longer = h * _least(_most(0.9 * dr.exp(dr.log(error) / -3), 0.2), 5)
        t = dr.select(holds, t + h, t)
        x = dr.select(holds, new_x, x)
        v = dr.select(holds, new_v, v)
        h = _least(longer, _most(5 - t, 1e-6))
        k += 1
    return x


@dr.syntax
def search(wanted: Any, table: Any) -> Any:
    low = _zeros(wanted)
    high = low + dr.width(table)
    while low < high:
        middle = (low + high) >> 1
        is_left = dr.gather(type(table), table, llvm.UInt32(middle)) < wanted
        low = dr.select(is_left, middle + 1, low)
        high = dr.select(is_left, high, middle)
    return low


@dr.syntax
def walk(state: Any, x: Any) -> Any:
    state, x, k = llvm.UInt64(state), type(x)(x), _zeros(state)
    while (dr.abs(x) < 4) & (k < 2000):
        state = state ^ (state << 13)
        state = state ^ (state >> 7)
        state = state ^ (state << 17)
        uniform = type(x)(state >> 40) * 2.0**-24
        x = x + (uniform * 2 - 1)
        k += 1
    return k


def grad_root(a: Any) -> Any:
    """The tangents, forward."""
    with_gradients: Any = dr.diff_array_t(type(a))
    a = with_gradients(a)
    dr.enable_grad(a)
    x = root(a)
    dr.set_grad(a, 1)
    return dr.forward_to(x)
