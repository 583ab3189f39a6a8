"""The rows in C: compiled once in a process, and called through ctypes.

The functions stand in `workloads/NAME.c`, beside the rows of `workloads/NAME.py`. That
of the row `heat-slices` is `row_heat_slices`. It takes, for each argument of the row, a
pointer and then its sizes; a pointer for each result; and then the integers of `in_c`,
which are numbers that the other two programs have in their closures.

The flags are `FLAGS`. Neither `-fno-math-errno` nor `-fno-trapping-math` changes a
result: without them GCC leaves loops with square roots and comparisons in scalars.
`-ffast-math` is not among them. As GCC does by default, it makes multiply-adds within
an expression (`-ffp-contract=fast`). `-lmvec` has vectors of `exp` and its like, as
exact as those of other libraries. `CC` in the environment names another compiler.
"""

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

FLAGS: Final = (
    *("-std=gnu11", "-O3", "-march=native", "-fno-math-errno", "-fno-trapping-math"),
    *("-fopenmp", "-shared", "-fPIC"),
)
LIBRARIES: Final = ("-lmvec", "-lm")
SOURCES: Final = Path(__file__).parent / "workloads"
LINE: Final = 64
SPINS: Final = "1000"
"""How often a thread of OpenMP looks for work before it sleeps: by default it does so
for milliseconds, which whoever has the next turn would pay."""


class Unavailable(Exception):
    """There is no C compiler, or it does not take our sources."""


class Routine:
    """The function of a row, with its arguments, and memory for its results.

    Args:
        row: The name of the row.
        args: Its arguments.
        results: Arrays of the shapes and dtypes of its results.
        numbers: The integers that it takes last.

    Raises:
        Unavailable: There is no compiler for it.
    """

    def __init__(
        self,
        row: str,
        args: Sequence[Any],
        results: Sequence[Any],
        numbers: Sequence[int],
    ) -> None:
        self._function = library()[f"row_{row.replace('-', '_')}"]
        self._args = [_aligned(x.shape, x.dtype) for x in args]
        for place, x in zip(self._args, args, strict=True):
            place[...] = x
        self.results = [_aligned(x.shape, x.dtype) for x in results]
        values: list[Any] = []
        for x in self._args:
            values += [ctypes.c_void_p(x.ctypes.data), *map(ctypes.c_int64, x.shape)]
        values += [ctypes.c_void_p(x.ctypes.data) for x in self.results]
        values += map(ctypes.c_int64, numbers)
        self._function.restype = None
        self._values = values

    def __call__(self) -> None:
        """Write the results."""
        self._function(*self._values)


def _aligned(shape: tuple[int, ...], dtype: Any) -> Any:
    """An array that begins with a line of the cache, as those of the libraries do."""
    size = int(np.prod(shape)) * dtype.itemsize
    memory = np.empty(size + LINE, np.uint8)
    start = -memory.ctypes.data % LINE
    return memory[start : start + size].view(dtype).reshape(shape)


def missing() -> str | None:
    """Why no row can be run in C; None: they can."""
    try:
        library()
    except Unavailable as error:
        return str(error)
    return None


def library() -> ctypes.CDLL:
    """The functions of all rows.

    Raises:
        Unavailable: There is no compiler for them.
    """
    found = _compiled()
    if isinstance(found, str):
        raise Unavailable(found)
    return found


@functools.cache
def _compiled() -> ctypes.CDLL | str:
    """The library, or why there is none."""
    names = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "cc"]
    compiler = next(filter(None, map(shutil.which, names)), None)
    if compiler is None:
        return f"no {' or '.join(names)} on PATH"
    os.environ.setdefault("GOMP_SPINCOUNT", SPINS)  # read when OpenMP is loaded
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "rows.so")
        sources = map(str, sorted(SOURCES.glob("*.c")))
        command = [compiler, *FLAGS, *sources, "-o", str(target), *LIBRARIES]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            return f"{compiler} does not compile the rows: {_reason(done.stderr)}"
        return ctypes.CDLL(str(target))


def _reason(said: str) -> str:
    """The first error that a compiler has written."""
    lines = said.splitlines() or ["no message"]
    return next((line for line in lines if "error" in line), lines[0])
