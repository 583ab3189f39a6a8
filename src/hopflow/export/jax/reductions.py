"""Reductions, running totals, products of matrices, and order."""

from collections.abc import Callable
from typing import Any, Final

from hopflow.errors import ExportError
from hopflow.export.jax.frames import Array, Site
from hopflow.graph.types import Shape
from hopflow.ops.reducers import highest, lowest
from hopflow.symbolic.size import Size


def _total(name: str) -> Callable[..., Array]:
    """A sum or product in the dtype of the elements."""

    def rule(site: Site, x: Array, *, axes: tuple[int, ...]) -> Array:
        return getattr(site.jnp, name)(x, axis=axes, dtype=x.dtype)

    return rule


def _extremum(name: str, of_none: Callable[[Any], Any]) -> Callable[..., Array]:
    def rule(site: Site, x: Array, *, axes: tuple[int, ...]) -> Array:
        sizes = [x.shape[a] for a in axes]
        some = all(isinstance(n, int) and n for n in sizes)
        options = {} if some else {"initial": of_none(site.types[0].dtype)}
        return getattr(site.jnp, name)(x, axis=axes, **options)

    return rule


def _named(name: str) -> Callable[..., Array]:
    def rule(site: Site, x: Array, *, axes: tuple[int, ...]) -> Array:
        return getattr(site.jnp, name)(x, axis=axes)

    return rule


def _find(site: Site, x: Array, value: Array, *, axis: int) -> Array:
    """The first position of a value, or of a NaN; the size if there is none."""
    jnp, size = site.jnp, x.shape[axis]
    hits = x == jnp.expand_dims(value, axis)
    if site.types[0].dtype.is_float:
        hits |= jnp.isnan(x)
    along = site.lax.broadcasted_iota(jnp.int64, x.shape, axis)
    return jnp.min(jnp.where(hits, along, size), axis=axis, initial=size)


def _running(name: str) -> Callable[..., Array]:
    def rule(site: Site, x: Array, *, axis: int, reverse: bool) -> Array:
        if x.dtype == bool:
            wide = getattr(site.lax, name)(x.astype("uint8"), axis, reverse)
            return wide.astype(bool)
        return getattr(site.lax, name)(x, axis, reverse)

    return rule


def _matmul(site: Site, x: Array, y: Array) -> Array:
    return site.jnp.matmul(x, y)


def _conv(
    site: Site,
    x: Array,
    w: Array,
    *,
    strides: tuple[int, ...],
    before: Shape,
    sizes: Shape,
    dilation: tuple[int, ...],
    input_dilation: tuple[int, ...],
    groups: Size,
) -> Array:
    """JAX takes the padding at both ends instead of the sizes of the result."""
    dtype, shape = x.dtype, (x.shape[0], w.shape[0], *site.shape(sizes))
    if any(isinstance(n, int) and n == 0 for n in (*x.shape, *w.shape, *shape)):
        return site.jnp.zeros(shape, dtype)
    count = site.dimension(groups)
    if not isinstance(count, int):
        raise ExportError(
            f"the number of groups, {groups}, is symbolic, and JAX's convolution takes "
            "an int. Export it for one size of the batch of weights."
        )
    pads = []
    for n, k, m, low, s, d, b in zip(
        *(x.shape[2:], w.shape[2:], shape[2:], site.shape(before)),
        *(strides, dilation, input_dilation),
        strict=True,
    ):
        reach = (m - 1) * s + (k - 1) * d + 1
        pads.append((low, reach - (n - 1) * b - 1 - low))
    if dtype.itemsize == 2 and site.jnp.issubdtype(dtype, site.jnp.floating):
        x, w = (v.astype(site.jnp.float32) for v in (x, w))
    found = site.lax.conv_general_dilated(
        *(x, w, strides, pads),
        lhs_dilation=input_dilation,
        rhs_dilation=dilation,
        feature_group_count=count,
    )
    return found.astype(dtype)


def _ordered(site: Site, x: Array, count: Size, *, descending: bool) -> Array:
    """The positions of the first elements in order; equal ones keep theirs, and NaNs
    are above all numbers."""
    order = site.jnp.argsort(x, axis=-1, stable=True, descending=descending)
    order, end = order.astype(site.jnp.int64), site.dimension(count)
    if end == x.shape[-1]:
        return order
    return site.lax.slice_in_dim(order, 0, end, axis=x.ndim - 1)


def _argsort(site: Site, x: Array, *, descending: bool) -> Array:
    return _ordered(site, x, site.types[0].shape[-1], descending=descending)


def _sort(site: Site, x: Array, *, descending: bool) -> Array:
    return site.jnp.sort(x, axis=-1, stable=True, descending=descending)


def _top_order(site: Site, x: Array, *, count: Size) -> Array:
    return _ordered(site, x, count, descending=True)


def _searchsorted(site: Site, x: Array, values: Array, *, side: str) -> Array:
    found = site.jnp.searchsorted(x, values, side=side)
    return found.astype(site.jnp.int64)


def _flatnonzero(site: Site, mask: Array, *, size: Size) -> Array:
    count = site.dimension(size)
    [found] = site.jnp.nonzero(mask, size=count, fill_value=0)
    return found.astype(site.jnp.int64)


RULES: Final[dict[str, Callable[..., Any]]] = {
    "argsort": _argsort,
    "cummax": _running("cummax"),
    "cummin": _running("cummin"),
    "conv": _conv,
    "cumprod": _running("cumprod"),
    "cumsum": _running("cumsum"),
    "flatnonzero": _flatnonzero,
    "matmul": _matmul,
    "reduce_and": _named("all"),
    "reduce_find": _find,
    "reduce_max": _extremum("max", lowest),
    "reduce_min": _extremum("min", highest),
    "reduce_or": _named("any"),
    "reduce_prod": _total("prod"),
    "reduce_sum": _total("sum"),
    "searchsorted": _searchsorted,
    "short_sort": _sort,
    "sort": _sort,
    "top_order": _top_order,
}
