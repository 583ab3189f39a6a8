"""One step of heat, in every spelling that people use; waves; the game of life."""

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.libraries import row
from benchmarks.workload import Workload

STEPS = 50


def workloads(size: Callable[[int], int]) -> list[Workload]:
    rng = np.random.default_rng(0)
    side, length = size(510) + 2, size(1_000_000) + 2
    plate = rng.normal(size=(side, side))
    rod = rng.normal(size=length).astype("f")
    cells = (rng.uniform(size=(2 * side, 2 * side)) < 0.4).astype(np.int8)
    return [
        row(
            "heat-slices",
            _steps(_by_slices),
            (plate,),
            steps=STEPS,
            in_c=[STEPS],
            in_numba=True,
        ),
        row("heat-roll", _steps(_by_roll), (plate,), steps=STEPS, in_c=[STEPS]),
        row("heat-pad", _steps(_by_pad), (plate,), steps=STEPS, in_c=[STEPS]),
        row(
            "heat-concat",
            _steps(_by_concat),
            (rod,),
            steps=STEPS,
            rtol=1e-3,
            in_c=[STEPS],
        ),
        row(
            "heat-gather",
            _steps(_by_gather),
            (rod,),
            steps=STEPS,
            rtol=1e-3,
            in_c=[STEPS],
        ),
        row("heat-grad", _gradient, (rod,), rtol=1e-3),
        row("waves", _waves, (plate, plate), steps=STEPS, in_c=[STEPS], in_numba=True),
        row("life", _steps(_life), (cells,), steps=STEPS, in_c=[STEPS], in_numba=True),
    ]


def _steps(step: Callable[..., Any]) -> Callable[[Any], Callable[..., Any]]:
    """The same step `STEPS` times."""
    return lambda lib: lambda u: lib.fori_loop(0, STEPS, lambda _, u: step(lib, u), u)


def _by_slices(_: Any, u: Any) -> Any:
    around = u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:]
    return u.at[1:-1, 1:-1].add(0.1 * (around - 4.0 * u[1:-1, 1:-1]))


def _by_roll(lib: Any, u: Any) -> Any:
    roll = lib.np.roll
    around = (
        roll(u, 1, axis=0)
        + roll(u, -1, axis=0)
        + roll(u, 1, axis=1)
        + roll(u, -1, axis=1)
    )
    return u + 0.1 * (around - 4.0 * u)


def _by_pad(lib: Any, u: Any) -> Any:
    wide = lib.np.pad(u, 1)
    around = wide[:-2, 1:-1] + wide[2:, 1:-1] + wide[1:-1, :-2] + wide[1:-1, 2:]
    return u + 0.1 * (around - 4.0 * u)


def _by_concat(lib: Any, u: Any) -> Any:
    left = lib.np.concat([u[:1], u[:-1]])
    right = lib.np.concat([u[1:], u[-1:]])
    return u + 0.25 * (left - 2.0 * u + right)


def _by_gather(lib: Any, u: Any) -> Any:
    at = lib.np.arange(u.shape[0])
    left, right = u[lib.np.clip(at - 1, 0)], u[lib.np.clip(at + 1, 0, u.shape[0] - 1)]
    return u + 0.25 * (left - 2.0 * u + right)


def _gradient(lib: Any) -> Callable[..., Any]:
    """How the end depends on the start: a scan of ten steps, backward."""

    def loss(u: Any) -> Any:
        step = lambda u, _: (_by_concat(lib, u * (1.0 - 0.01 * u)), None)  # noqa: E731
        return lib.np.sum(lib.scan(step, u, length=10)[0] ** 2)

    gradient: Callable[..., Any] = lib.grad(loss)
    return gradient


def _waves(lib: Any) -> Callable[..., Any]:
    """Leapfrog: the new field is made from the two before."""

    def step(_: Any, old: Any, u: Any) -> Any:
        roll = lib.np.roll
        around = (
            roll(u, 1, axis=0)
            + roll(u, -1, axis=0)
            + roll(u, 1, axis=1)
            + roll(u, -1, axis=1)
        )
        return u, 2.0 * u - old + 0.2 * (around - 4.0 * u)

    return lambda old, u: lib.fori_loop(0, STEPS, step, (old, u))[1]


def _life(lib: Any, cells: Any) -> Any:
    """Conway's game on a torus."""
    rows = cells + lib.np.roll(cells, 1, axis=0) + lib.np.roll(cells, -1, axis=0)
    count = rows + lib.np.roll(rows, 1, axis=1) + lib.np.roll(rows, -1, axis=1)
    return ((count == 3) | ((cells == 1) & (count == 4))).astype(cells.dtype)
