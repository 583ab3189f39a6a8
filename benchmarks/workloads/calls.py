"""What is paid before anything is computed: calls, tracing, eager loops."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

import hopflow as hf
from benchmarks.workload import Workload


def workloads(size: Callable[[int], int]) -> list[Workload]:
    rng = np.random.default_rng(0)
    xs = (rng.normal(size=8).astype("f"), rng.normal(size=(5, 8)).astype("f"))
    length = size(1000)
    return [
        Workload("call", _increment, _increment, (np.zeros(8, "f"),)),
        Workload(
            "eager-scan",
            lambda: _known(hf.scan, _thirty(hf.tanh)),
            lambda: _known(lax.scan, _thirty(jnp.tanh)),
            xs,
            mode="eager",
        ),
        Workload(
            "eager-scan-new-body",
            lambda: lambda c, x: hf.scan(_thirty(hf.tanh), c, x),
            lambda: lambda c, x: lax.scan(_thirty(jnp.tanh), c, x),
            xs,
            mode="eager",
        ),
        Workload(
            "trace-operation",
            lambda: _chain(length),
            lambda: _chain(length),
            (np.zeros(8, "f"),),
            max(1, length // 4 * 4),
            mode="trace",
        ),
        Workload(
            "trace-operation-symbolic",
            lambda: _chain(length),
            lambda: _chain(length),
            (np.zeros(8, "f"),),
            max(1, length // 4 * 4),
            mode="symbolic",
        ),
    ]


def _increment() -> Callable[..., Any]:
    return lambda x: x + 1


def _known(scan: Callable[..., Any], body: Callable[..., Any]) -> Callable[..., Any]:
    """An eager scan whose body is the same function in each call."""
    return lambda c, x: scan(body, c, x)


def _thirty(tanh: Callable[..., Any]) -> Callable[..., Any]:
    """A body of thirty operations."""

    def step(c: Any, x: Any) -> Any:
        y = c
        for _ in range(10):
            y = tanh(y * x) + c
        return y, y

    return step


def _chain(length: int) -> Callable[..., Any]:
    """A function of about so many operations."""

    def program(x: Any) -> Any:
        y = x
        for _ in range(length // 4):
            y = ((y * 1.5 + x) - y) / 2.0
        return y

    return program
