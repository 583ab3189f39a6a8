"""The rows in Numba, where it is installed (`pip install numba`).

The functions stand in `workloads/numba_loops.py`: that of the row `heat-slices` is
`row_heat_slices`. It takes the arrays of the row, and then the integers of `in_c`, as
that in C does, and returns new arrays, as a function that a user of Numba writes.
"""

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


def missing() -> str | None:
    """Return why Numba cannot be used; None: it can."""
    if importlib.util.find_spec("numba") is None:
        return "numba is not installed"
    return None


class Function:
    """The function of a row, with its arguments.

    Args:
        row: The name of the row.
        args: Its arguments.
        results: Arrays of the dtypes of its results.
        numbers: The integers that it takes last.
    """

    def __init__(
        self,
        row: str,
        args: Sequence[Any],
        results: Sequence[Any],
        numbers: Sequence[int],
    ) -> None:
        from benchmarks.workloads import numba_loops

        self._function: Any = getattr(numba_loops, f"row_{row.replace('-', '_')}")
        self._args = [*map(np.ascontiguousarray, args), *numbers]
        self._dtypes = [x.dtype for x in results]
        self._compiled: Callable[..., Any] = self._function

    def renew(self) -> None:
        """Compile something else, and make a function that is not compiled.

        What it calls stays compiled.
        """
        import numba

        numba.njit(lambda x: x * 3 - 1)(1.0)
        options = {**self._function.targetoptions}
        options.pop("nopython", None)  # which `njit` is
        self._compiled = numba.njit(**options)(self._function.py_func)

    def call(self) -> None:
        self._compiled(*self._args)

    def answer(self) -> list[Any]:
        """The results; numbers, which Numba returns as those of Python, as arrays."""
        found = self._compiled(*self._args)
        leaves = found if isinstance(found, tuple) else (found,)
        pairs = zip(leaves, self._dtypes, strict=True)
        return [x if isinstance(x, np.ndarray) else np.array(x, t) for x, t in pairs]
