"""Gradients of loops: what the forward pass keeps, and the pass back."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import hopflow as hf
from benchmarks.workload import Workload
from benchmarks.workloads.recurrent import lstm_args, lstm_forward
from benchmarks.workloads.scalars import lorenz_step

LEAVES = 256


def workloads(size: Callable[[int], int]) -> list[Workload]:
    return [
        _lorenz(size(10_000)),
        *(_lstm(size(1000), batch) for batch in (1, 32)),
        _leaves(size(1000), size(LEAVES)),
    ]


def _lorenz(steps: int) -> Workload:
    """In steps so short that the orbit is not chaotic yet: the gradients agree."""

    def loss(scan: Any, stack: Any) -> Callable[..., Any]:
        step = lorenz_step(stack, h=1e-4)
        return lambda s: (scan(step, s, length=steps)[1] ** 2).mean()

    return Workload(
        "grad-lorenz",
        lambda: hf.grad(loss(hf.scan, hf.stack)),
        lambda: jax.grad(loss(lax.scan, jnp.stack)),
        (np.array([1.0, 1.0, 1.0]),),
        steps,
    )


def _lstm(length: int, batch: int) -> Workload:
    def loss(forward: Callable[..., Any]) -> Callable[..., Any]:
        return lambda xs, *weights: (forward(xs, *weights) ** 2).mean()

    return Workload(
        f"grad-lstm-{batch}",
        lambda: hf.grad(
            loss(lstm_forward(hf.scan, hf.sigmoid, hf.tanh, hf.zeros)), (1, 2, 3)
        ),
        lambda: jax.grad(
            loss(lstm_forward(lax.scan, jax.nn.sigmoid, jnp.tanh, jnp.zeros)), (1, 2, 3)
        ),
        lstm_args(length, batch),
        rtol=1e-3,
    )


def _leaves(steps: int, count: int) -> Workload:
    """A wide body: the carry is so many scalars, each coupled to its neighbours."""

    def loss(scan: Any, tanh: Any) -> Callable[..., Any]:
        def step(carry: Any, _: Any) -> Any:
            left, right = (*carry[1:], carry[0]), (carry[-1], *carry[:-1])
            each = zip(left, carry, right, strict=True)
            return tuple(tanh(x + 0.1 * (a - b)) for a, x, b in each), None

        def loss(xs: Any) -> Any:
            carry = tuple(xs[k] for k in range(count))
            return sum(x * x for x in scan(step, carry, None, length=steps)[0])

        return loss

    return Workload(
        "grad-leaves",
        lambda: hf.grad(loss(hf.scan, hf.tanh)),
        lambda: jax.grad(loss(lax.scan, jnp.tanh)),
        (np.linspace(-1.0, 1.0, count),),
        steps,
    )
