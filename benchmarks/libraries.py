"""hopflow and JAX under one set of names, for rows that are written once.

Loops take functions of the leaves of their carry in both.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Final

import jax
import jax.numpy as jnp
from jax import lax

import hopflow as hf
from benchmarks.workload import Arrays, Workload


def _lax_while(goes_on: Any, step: Any, start: Any) -> Any:
    return lax.while_loop(lambda c: goes_on(*c), lambda c: step(*c), start)


def _lax_fori(lower: Any, upper: Any, step: Any, start: Any) -> Any:
    if isinstance(start, tuple):
        return lax.fori_loop(lower, upper, lambda i, c: step(i, *c), start)
    return lax.fori_loop(lower, upper, step, start)


def _lax_conv(
    x: Any, w: Any, *, stride: int = 1, padding: int = 0, groups: int = 1
) -> Any:
    rank = x.ndim - 2
    pads = [(padding, padding)] * rank
    return lax.conv_general_dilated(
        x, w, [stride] * rank, pads, feature_group_count=groups
    )


_NAMES: Final = (
    *("random", "linalg", "while_loop", "fori_loop", "scan", "cond", "switch", "vmap"),
    *("grad", "top_k", "sigmoid", "erf", "segment_sum", "conv", "map"),
    *("dynamic_slice", "dynamic_update_slice"),
)
# An older hopflow, as `benchmarks.compare` times, may lack some: rows have dashes then.
HOPFLOW: Final = SimpleNamespace(
    np=hf, **{name: getattr(hf, name, None) for name in _NAMES}
)
JAX: Final = SimpleNamespace(
    np=jnp,
    random=jax.random,
    linalg=jnp.linalg,
    while_loop=_lax_while,
    fori_loop=_lax_fori,
    scan=lax.scan,
    cond=lax.cond,
    switch=lax.switch,
    vmap=jax.vmap,
    grad=jax.grad,
    top_k=lax.top_k,
    sigmoid=jax.nn.sigmoid,
    erf=lax.erf,
    segment_sum=jax.ops.segment_sum,
    conv=_lax_conv,
    map=lax.map,
    dynamic_slice=lax.dynamic_slice,
    dynamic_update_slice=lax.dynamic_update_slice,
)


def row(
    name: str,
    program: Callable[[Any], Callable[..., Any]],
    args: Arrays,
    **options: Any,
) -> Workload:
    """A row of a program that is written once: it makes a function of a library."""
    return Workload(
        name, lambda: program(HOPFLOW), lambda: program(JAX), args, **options
    )
