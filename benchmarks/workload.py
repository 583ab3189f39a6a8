"""What a benchmark is: one algorithm, written for hopflow and for JAX."""

from collections.abc import Callable
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
    mode       "jit": compiled once; "eager": called as it is; "trace": only traced
    """

    name: str
    hopflow: Callable[[], Callable[..., Any]]
    jax: Callable[[], Callable[..., Any]]
    args: Arrays = ()
    steps: int = 1
    rtol: float = 1e-5
    differing: float = 0.0
    mode: Literal["jit", "eager", "trace"] = "jit"
