"""Operations on values and sizes of the run: conversions, items, checks."""

from collections.abc import Callable
from math import inf
from typing import Any, Final

from hopflow.dtypes import DType
from hopflow.errors import ExportError
from hopflow.export.jax.frames import Array, Site
from hopflow.export.jax.sizes import as_array
from hopflow.graph.types import Shape
from hopflow.symbolic.size import Size


def _convert(site: Site, x: Array, *, dtype: DType, **_: Any) -> Array:
    return site.lax.convert_element_type(x, dtype.dtype)


def _item(
    site: Site, x: Array, *, min: float = -inf, max: float = inf, known: bool = False
) -> Array:
    found = x.astype(site.jnp.int64)
    if site.is_checked and not known:
        for end, holds in ((min, found >= min), (max, found <= max)):
            if end not in (-inf, inf):
                site.check(holds, f"an integer is not from {min} to {max}")
    return found


def _dim_size(_site: Site, x: Array, *, axis: int) -> Array:
    return as_array(x.shape[axis])


def _symbolic_int(site: Site, *, value: Size) -> Array:
    return as_array(site.size(value))


def _check(
    site: Site, test: Array, *_sides: Array, message: Any, **_: Any
) -> list[Any]:
    site.check(test, str(message))
    return []


def _require(
    site: Site, x: Array, test: Array, *_sides: Array, message: Any, **_: Any
) -> Array:
    site.check(test, str(message))
    return x


def _unravel_index(site: Site, at: Array, *, shape: Shape) -> list[Array]:
    sizes = site.shape(shape)
    found: list[Array] = []
    for n in reversed(sizes):
        size = site.jnp.maximum(n, 1)
        found.append(at % size)
        at = at // size
    return found[::-1]


def _callback(*_: Any, **__: Any) -> Array:
    raise ExportError("it calls Python, which `hf.export` refuses.")


RULES: Final[dict[str, Callable[..., Any]]] = {
    "callback": _callback,
    "check": _check,
    "convert": _convert,
    "dim_size": _dim_size,
    "item": _item,
    "require": _require,
    "symbolic_int": _symbolic_int,
    "unravel_index": _unravel_index,
}
