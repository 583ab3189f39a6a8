"""Filters of signals and images, and convolutional layers."""

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.libraries import row
from benchmarks.workload import Workload


def workloads(size: Callable[[int], int]) -> list[Workload]:
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> Any:
        return (rng.normal(size=shape) / np.sqrt(np.prod(shape[1:]))).astype("f")

    side = size(500) + 12
    signal, image = normal(1, 1, size(100_000) + 64), normal(1, 1, side, side)
    batch = normal(8, 16, size(22) + 10, size(22) + 10)
    filters = normal(32, 16, 3, 3), normal(32, 32, 3, 3)
    fast = {"rtol": 1e-3}
    return [
        row("conv-signal", _filter, (signal, normal(1, 1, 64)), **fast),
        row("conv-image", _filter, (image, normal(1, 1, 5, 5)), **fast),
        row("conv-layers", _layers, (batch, *filters), **fast),
        row("conv-layers-grad", _layers_grad, (batch, *filters), rtol=1e-2),
        row("conv-depthwise", _depthwise, (batch, normal(16, 1, 3, 3)), **fast),
        row("conv-volume", _filter, (normal(2, 4, 16, 16, 16), normal(8, 4, 3, 3, 3))),
    ]


def _filter(lib: Any) -> Callable[..., Any]:
    filtered: Callable[..., Any] = lib.conv
    return filtered


def _layers(lib: Any) -> Callable[..., Any]:
    """Three layers: plain, with a stride, and one by one."""

    def network(x: Any, first: Any, second: Any) -> Any:
        x = lib.np.maximum(lib.conv(x, first, padding=1), 0.0)
        x = lib.np.maximum(lib.conv(x, second, padding=1, stride=2), 0.0)
        return lib.conv(x, second[:, :, :1, :1])

    return network


def _layers_grad(lib: Any) -> Callable[..., Any]:
    def loss(x: Any, first: Any, second: Any) -> Any:
        return lib.np.mean(_layers(lib)(x, first, second) ** 2)

    gradient: Callable[..., Any] = lib.grad(loss, (1, 2))
    return gradient


def _depthwise(lib: Any) -> Callable[..., Any]:
    return lambda x, w: lib.conv(x, w, padding=1, groups=w.shape[0])
