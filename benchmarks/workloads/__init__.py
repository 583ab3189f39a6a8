"""The benchmarks, by what they stress."""

from collections.abc import Callable

from benchmarks.workload import Calls, Workload
from benchmarks.workloads import (
    arrays,
    attention,
    batches,
    calls,
    convolutions,
    copies,
    derivatives,
    divergent,
    dynamic_programming,
    estimation,
    machines,
    matrices,
    recurrent,
    rows,
    scalars,
    selection,
    series,
    short_states,
    simulations,
    sizes,
    sparse,
    stencils,
    windows,
)


def all_workloads(scale: float = 1.0) -> list[Workload]:
    """Every row of the table; `scale` shrinks the sizes, for tests of the harness."""
    size = _scaled(scale)
    return [
        *calls.workloads(size),
        *scalars.workloads(size),
        *arrays.workloads(size),
        *copies.workloads(size),
        *recurrent.workloads(size),
        *attention.workloads(size),
        *derivatives.workloads(size),
        *batches.workloads(size),
        *divergent.workloads(size),
        *stencils.workloads(size),
        *dynamic_programming.workloads(size),
        *selection.workloads(size),
        *sparse.workloads(size),
        *simulations.workloads(size),
        *estimation.workloads(size),
        *machines.workloads(size),
        *matrices.workloads(size),
        *rows.workloads(size),
        *short_states.workloads(size),
        *series.workloads(size),
        *windows.workloads(size),
        *convolutions.workloads(size),
    ]


def all_calls(scale: float = 1.0) -> list[Calls]:
    """Every row of the second table, of many calls."""
    return sizes.all_calls(_scaled(scale))


def _scaled(scale: float) -> Callable[[int], int]:
    return lambda n: max(2, int(n * scale))
