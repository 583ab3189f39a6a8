"""What a benchmark is: one algorithm for hopflow and for JAX, and perhaps in C."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np

Arrays: TypeAlias = tuple[np.ndarray[Any, np.dtype[Any]], ...]


@dataclass(frozen=True)
class Workload:
    """One row of the table.

    name       as `--rows` takes it
    hopflow    a function of tensors; made anew by each call, so that nothing is cached
    jax        the same for JAX
    args       NumPy arrays
    steps      how many steps one call takes; run times are given for one of them
    rtol       by how much the two results may differ
    differing  the part of the elements for which that may fail: where the last bit of a
               number decides how long a loop runs, or what a chaotic system does later
    mode       "jit": compiled once; "eager": called as it is; "trace": only traced;
               "symbolic": traced with sizes that are symbols, if the library has them
    lax_map    the same for JAX by `lax.map`, where `jax` is by `jax.vmap`
    dr_jit     the name of its function in Dr.Jit (see `dr_jit`); None: there is none
    in_c       the integers that its function in C takes last (see `native`); None:
               there is no such function
    in_numba   whether it has a function in Numba (see `in_numba`)
    """

    name: str
    hopflow: Callable[[], Callable[..., Any]]
    jax: Callable[[], Callable[..., Any]]
    args: Arrays = ()
    steps: int = 1
    rtol: float = 1e-5
    differing: float = 0.0
    mode: Literal["jit", "eager", "trace", "symbolic"] = "jit"
    lax_map: Callable[[], Callable[..., Any]] | None = None
    dr_jit: str | None = None
    in_c: Sequence[int] | None = None
    in_numba: bool = False

    @property
    def calls(self) -> list[Arrays]:
        """What it is called with."""
        return [self.args]


@dataclass(frozen=True)
class Calls:
    """One row of the second table: calls of one compiled function, one after another.

    name       as `--rows` takes it
    hopflow    the function, made anew
    jax        the same for JAX
    calls      the arguments of each: NumPy arrays, and numbers
    warm       whether all were made before they are timed; if not, the time is that of
               all of them together, with what is compiled

    `rtol`, `differing` and `mode` as those of a `Workload`.
    """

    name: str
    hopflow: Callable[[], Callable[..., Any]]
    jax: Callable[[], Callable[..., Any]]
    calls: Sequence[tuple[Any, ...]]
    warm: bool = False
    rtol: float = 1e-3
    differing: float = 0.0
    mode: Literal["jit"] = "jit"
