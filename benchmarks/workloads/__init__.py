"""The benchmarks, by what they stress."""

from benchmarks.workload import Workload
from benchmarks.workloads import arrays, calls, recurrent, scalars


def all_workloads(scale: float = 1.0) -> list[Workload]:
    """Every row of the table; `scale` shrinks the sizes, for tests of the harness."""

    def size(n: int) -> int:
        return max(2, int(n * scale))

    return [
        *calls.workloads(size),
        *scalars.workloads(size),
        *arrays.workloads(size),
        *recurrent.workloads(size),
    ]
