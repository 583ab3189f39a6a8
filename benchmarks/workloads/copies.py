"""Loops that copy, exchange and join arrays of which a step changes a few elements.

A step of most of these needs no time for what it does not touch: an array that is
copied, written and not read again can be written in place, carries that change places
can be exchanged by their addresses, and a piece that is joined where it lies already
need not be moved. `python -m benchmarks.flat` measures whether it is so.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

import hopflow as hf
from benchmarks.workload import Arrays, Workload

PIECE = 64
"""How many elements a step computes where it joins pieces, or stacks rows."""
WIDTH = 20
"""The rows, and the columns, of a product that a step computes."""


@dataclass(frozen=True)
class Copies:
    """A loop over arrays, for any number of steps and elements.

    name         as `--rows` takes it
    hopflow      a function of tensors: the number of steps, or an array of so many
                 elements, and the initial carries
    jax          the same for JAX
    carries      how many arrays there are
    touches_all  whether each step computes all elements
    scans        whether the first argument is an array, and not a number
    width        the carries are whole rows of so many elements, one at least
    """

    name: str
    hopflow: Callable[..., Any]
    jax: Callable[..., Any]
    carries: int = 1
    touches_all: bool = False
    scans: bool = False
    width: int = 1

    def args(self, steps: int, length: int) -> Arrays:
        rng = np.random.default_rng(0)
        length = max(length // self.width, 1) * self.width
        carries = [rng.normal(size=length).astype("f") for _ in range(self.carries)]
        return (np.arange(steps) if self.scans else np.asarray(steps), *carries)


def workloads(size: Callable[[int], int]) -> list[Workload]:
    steps, length = size(1000), size(100_000)
    return [_workload(row, steps, length) for row in rows()]


def _workload(row: Copies, steps: int, length: int) -> Workload:
    args = row.args(steps, length)
    return Workload(
        row.name, lambda: row.hopflow, lambda: row.jax, args, steps, rtol=1e-3
    )


def rows() -> Sequence[Copies]:
    """Every loop of this file."""
    return [
        _copied("copy-write", hf.copy, jnp.copy),
        _copied("copy-write-reshape", _through_reshape(hf), _through_reshape(jnp)),
        _copied("copy-write-positive", hf.positive, jnp.positive),
        _copied("copy-write-astype", _astype(hf), _astype(jnp)),
        Copies("crossed", _crossed(_hop_loop), _crossed(_lax_loop), 2, True),
        Copies("crossed-write", _hop_crossed_write, _lax_crossed_write, 2),
        Copies(
            "leapfrog", _leapfrog(_hop_loop, hf), _leapfrog(_lax_loop, jnp), 2, True
        ),
        Copies("leapfrog-write", _hop_leapfrog_write, _lax_leapfrog_write, 2),
        Copies("rotate-write", _hop_rotate_write, _lax_rotate_write, 3),
        Copies("concat-pieces", _pieces(_hop_loop, hf), _pieces(_lax_loop, jnp)),
        Copies(
            "concat-products",
            _products(_hop_loop, hf),
            _products(_lax_loop, jnp),
            width=WIDTH,
        ),
        Copies(
            "stack-products",
            _hop_stack_products,
            _lax_stack_products,
            scans=True,
            width=WIDTH,
        ),
        Copies("scan-rows", _hop_scan_rows, _lax_scan_rows, scans=True),
    ]


def _hop_loop(steps: Any, step: Callable[..., Any], *carries: Any) -> Any:
    return hf.fori_loop(0, steps, step, carries)


def _lax_loop(steps: Any, step: Callable[..., Any], *carries: Any) -> Any:
    return lax.fori_loop(0, steps, lambda i, c: step(i, *c), carries)


# --- copies that are written ----------------------------------------------------------


def _copied(name: str, hop_copy: Any, jnp_copy: Any) -> Copies:
    def hop_step(i: Any, a: Any) -> Any:
        b, k = hop_copy(a), i % a.shape[0]
        b[k] = b[k] * 0.5 + 1.0
        return (b,)

    def lax_step(i: Any, a: Any) -> Any:
        b, k = jnp_copy(a), i % a.shape[0]
        return (b.at[k].set(b[k] * 0.5 + 1.0),)

    return Copies(
        name,
        lambda steps, x: _hop_loop(steps, hop_step, x),
        lambda steps, x: _lax_loop(steps, lax_step, x),
    )


def _through_reshape(np_: Any) -> Callable[..., Any]:
    return lambda a: np_.reshape(np_.copy(np_.reshape(a, (1, -1))), a.shape)


def _astype(np_: Any) -> Callable[..., Any]:
    return lambda a: np_.astype(a, np_.float32, copy=True)


# --- carries that change places -------------------------------------------------------


def _crossed(loop: Any) -> Callable[..., Any]:
    """Each of two carries is computed from the other one."""

    def step(_: Any, a: Any, b: Any) -> Any:
        return b * 0.5 + 1.0, a * 0.25 - 1.0

    return lambda steps, a, b: loop(steps, step, a, b)


def _hop_crossed_write(steps: Any, a: Any, b: Any) -> Any:
    def step(i: Any, a: Any, b: Any) -> Any:
        k = i % a.shape[0]
        a[k], b[k] = b[k] * 0.5, a[k] + 1.0
        return b, a

    return _hop_loop(steps, step, a, b)


def _lax_crossed_write(steps: Any, a: Any, b: Any) -> Any:
    def step(i: Any, a: Any, b: Any) -> Any:
        k = i % a.shape[0]
        return b.at[k].set(a[k] + 1.0), a.at[k].set(b[k] * 0.5)

    return _lax_loop(steps, step, a, b)


def _leapfrog(loop: Any, np_: Any) -> Callable[..., Any]:
    """The wave equation, damped: the next state, from this one and the one before."""

    def step(_: Any, new: Any, old: Any) -> Any:
        around = np_.roll(new, 1) + np_.roll(new, -1)
        return 1.9 * new - 0.9 * old + 0.1 * (around - 2.0 * new), new

    return lambda steps, new, old: loop(steps, step, new, old)


def _hop_leapfrog_write(steps: Any, new: Any, old: Any) -> Any:
    def step(i: Any, new: Any, old: Any) -> Any:
        k = i % new.shape[0]
        old[k] = 0.9 * new[k] - 0.5 * old[k]
        return old, new

    return _hop_loop(steps, step, new, old)


def _lax_leapfrog_write(steps: Any, new: Any, old: Any) -> Any:
    def step(i: Any, new: Any, old: Any) -> Any:
        k = i % new.shape[0]
        return old.at[k].set(0.9 * new[k] - 0.5 * old[k]), new

    return _lax_loop(steps, step, new, old)


def _hop_rotate_write(steps: Any, a: Any, b: Any, c: Any) -> Any:
    def step(i: Any, a: Any, b: Any, c: Any) -> Any:
        k = i % a.shape[0]
        a[k] = 0.5 * b[k] + 0.25 * c[k]
        return b, c, a

    return _hop_loop(steps, step, a, b, c)


def _lax_rotate_write(steps: Any, a: Any, b: Any, c: Any) -> Any:
    def step(i: Any, a: Any, b: Any, c: Any) -> Any:
        k = i % a.shape[0]
        return b, c, a.at[k].set(0.5 * b[k] + 0.25 * c[k])

    return _lax_loop(steps, step, a, b, c)


# --- pieces and rows ------------------------------------------------------------------


def _pieces(loop: Any, np_: Any) -> Callable[..., Any]:
    """The first elements are computed, and joined with the others where they were."""

    def step(_: Any, a: Any) -> Any:
        return (np_.concat([a[:PIECE] * 0.5 + 1.0, a[PIECE:]]),)

    return lambda steps, x: loop(steps, step, x)


def _matrix(np_: Any, x: Any) -> tuple[Any, Any]:
    """A vector in rows, and a reflection: of 1,000 products with it, errors stay small.

    Of another matrix the products would vanish, or grow and depend on each rounding.
    """
    rows = np_.reshape(x, (-1, WIDTH))
    normal = np_.sin(np_.arange(WIDTH) * 1.0)
    outer = normal[:, None] * normal[None, :]
    return rows, np_.eye(WIDTH) - outer * (2.0 / np_.sum(normal * normal))


def _products(loop: Any, np_: Any) -> Callable[..., Any]:
    """The first rows are a product, and joined with the others where they were."""

    def run(steps: Any, x: Any) -> Any:
        rows, matrix = _matrix(np_, x)
        matrix = np_.astype(matrix, rows.dtype)

        def step(_: Any, a: Any) -> Any:
            return (np_.concat([np_.sin(a[:WIDTH]) @ matrix, a[WIDTH:]]),)

        return loop(steps, step, rows)

    return run


def _hop_stack_products(ks: Any, x: Any) -> Any:
    """A row of a stack is a product of a few rows of a carry."""
    rows, matrix = _matrix(hf, x)
    matrix = hf.astype(matrix, rows.dtype)

    def step(a: Any, k: Any) -> Any:
        a[k % a.shape[0]] = 0.5
        return a, hf.sin(a[:WIDTH]) @ matrix

    return hf.scan(step, rows, ks)[1]


def _lax_stack_products(ks: Any, x: Any) -> Any:
    rows, matrix = _matrix(jnp, x)
    matrix = matrix.astype(rows.dtype)

    def step(a: Any, k: Any) -> Any:
        a = a.at[k % a.shape[0]].set(0.5)
        return a, jnp.sin(a[:WIDTH]) @ matrix

    return lax.scan(step, rows, ks)[1]


def _hop_scan_rows(ks: Any, x: Any) -> Any:
    """The first elements of a carry are stacked, and the rows are read back."""

    def step(a: Any, k: Any) -> Any:
        at = k % a.shape[0]
        a[at] = a[at] * 0.5 + 1.0
        return a, a[:PIECE]

    last, stacked = hf.scan(step, x, ks)
    return last, stacked[1:] - stacked[:-1]


def _lax_scan_rows(ks: Any, x: Any) -> Any:
    def step(a: Any, k: Any) -> Any:
        at = k % a.shape[0]
        a = a.at[at].set(a[at] * 0.5 + 1.0)
        return a, a[:PIECE]

    last, stacked = lax.scan(step, x, ks)
    return last, stacked[1:] - stacked[:-1]
