"""An LSTM, forward: small matrix products inside a long loop."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import hopflow as hf
from benchmarks.workload import Arrays, Workload

HIDDEN = 128


def workloads(size: Callable[[int], int]) -> list[Workload]:
    return [_lstm(size(1000), batch) for batch in (1, 32)]


def _lstm(length: int, batch: int) -> Workload:
    return Workload(
        f"lstm-{batch}",
        lambda: lstm_forward(hf.scan, hf.sigmoid, hf.tanh, hf.zeros),
        lambda: lstm_forward(lax.scan, jax.nn.sigmoid, jnp.tanh, jnp.zeros),
        lstm_args(length, batch),
        rtol=1e-3,
        in_c=[] if batch == 1 else None,
    )


def lstm_args(length: int, batch: int) -> Arrays:
    """Inputs of all steps, and the weights."""
    rng = np.random.default_rng(batch)

    def normal(*shape: int) -> Any:
        return (rng.normal(size=shape) / np.sqrt(HIDDEN)).astype("f")

    return (
        normal(length, batch, HIDDEN),
        normal(HIDDEN, 4 * HIDDEN),
        normal(HIDDEN, 4 * HIDDEN),
        normal(4 * HIDDEN),
    )


def lstm_forward(scan: Any, sigmoid: Any, tanh: Any, zeros: Any) -> Callable[..., Any]:
    def forward(xs: Any, w: Any, u: Any, b: Any) -> Any:
        def step(carry: Any, x: Any) -> Any:
            h, c = carry
            z = x @ w + h @ u + b
            i, f, g, o = (z[:, k * HIDDEN : (k + 1) * HIDDEN] for k in range(4))
            c = sigmoid(f) * c + sigmoid(i) * tanh(g)
            h = sigmoid(o) * tanh(c)
            return (h, c), h

        start = zeros((xs.shape[1], HIDDEN), dtype=xs.dtype)
        return scan(step, (start, start), xs)[1]

    return forward
