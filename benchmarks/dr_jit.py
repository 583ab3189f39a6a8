"""The rows of divergent loops in Dr.Jit, where it is installed (`pip install drjit`; it
needs a shared library of LLVM, as Debian's `libllvm15`).

A function stands for all batch elements at once: Dr.Jit's arrays are vectors, and its
`while` loops run with masks. Kernels are frozen (`dr.freeze`), so that a call does not
trace the program again.
"""

import functools
import importlib.util
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import numpy as np


@functools.cache
def missing() -> str | None:
    """Return why Dr.Jit cannot be used; None: it can."""
    if importlib.util.find_spec("drjit") is None:
        return "drjit is not installed"
    import drjit

    if not drjit.has_backend(drjit.JitBackend.LLVM):
        return "Dr.Jit finds no shared library of LLVM"
    return None


class Function:
    """The function of a row, with its arguments on Dr.Jit's side."""

    def __init__(self, row: str, args: Sequence[Any]) -> None:
        import drjit

        from benchmarks.workloads import divergent_dr_jit

        self._library: ModuleType = drjit
        made: Callable[..., Any] = getattr(divergent_dr_jit, row)
        # Functions with derivatives inside are not frozen.
        self._function = made if row.startswith("grad") else drjit.freeze(made)
        self._args = [divergent_dr_jit.array(x) for x in args]
        self._result: Any = None

    def renew(self) -> None:
        """First calls are not timed."""

    def call(self) -> None:
        self._result = self._function(*self._args)
        self._library.eval(self._result)
        self._library.sync_thread()

    def answer(self) -> list[Any]:
        self.call()
        return [np.asarray(self._result.numpy())]
