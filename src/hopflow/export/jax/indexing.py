"""Operations that read and write at integer tensors: gather, scatter, windows."""

from collections.abc import Callable, Sequence
from functools import reduce
from operator import and_
from typing import Any, Final

from hopflow.export.jax.frames import Array, Site
from hopflow.export.jax.movement import positions
from hopflow.graph.types import Shape
from hopflow.ops.gather import Layout

_OUT_OF_RANGE: Final = "an index is out of range"

# --- positions ------------------------------------------------------------------------


def _as_position(site: Site, index: Array) -> Array:
    """An index as i64; one of uint64 beyond that is the largest."""
    if index.dtype == "uint64":
        index = site.jnp.minimum(index, site.jnp.uint64(2**63 - 1))
    return index.astype(site.jnp.int64)


def _wrapped(site: Site, index: Array, size: Any) -> Array:
    """A position; a negative index counts from the end."""
    at = _as_position(site, index)
    return at if index.dtype.kind == "u" else site.jnp.where(at < 0, at + size, at)


def _normal(
    site: Site,
    indices: Sequence[Array],
    layout: Layout,
    sizes: Sequence[Any],
    *,
    checked: bool,
) -> list[Array]:
    """Indices as positions in range: those of operations that are `checked` tell
    whether they were, and negative ones count from the end."""
    found = []
    is_empty = any(isinstance(n, int) and n == 0 for n in layout.space)
    for index, size in zip(indices, sizes, strict=True):
        at = (_wrapped if checked else _moved)(site, index, size)
        if checked and site.is_checked and not is_empty:
            site.check((at >= 0) & (at < size), _OUT_OF_RANGE)
        found.append(site.jnp.clip(at, 0, size - 1))
    return found


def _moved(site: Site, index: Array, _size: Any) -> Array:
    return _as_position(site, index)


def _key(
    site: Site, at: Sequence[Array], batch: Sequence[Any], ndim: int
) -> list[Array]:
    """The positions along the batch axes and the indexed ones, which broadcast.

    Args:
        batch: The sizes of the batch axes.
        ndim: How many axes the indices have together.
    """
    along = [
        site.lax.iota(site.jnp.int64, n).reshape(n, *[1] * (ndim - axis - 1))
        for axis, n in enumerate(batch)
    ]
    return [*along, *at]


# --- reading --------------------------------------------------------------------------


def _gather(checked: bool) -> Callable[..., Array]:
    def rule(
        site: Site, x: Array, *indices: Array, axes: tuple[int, ...], batch: int
    ) -> Array:
        layout = Layout(site.node.op.name, site.types[0], site.types[1:], axes, batch)
        if not indices:
            return x
        sizes = [x.shape[a] for a in axes]
        if any(isinstance(n, int) and n == 0 for n in sizes):
            return site.jnp.zeros(site.shape(layout.selected), x.dtype)
        at = _normal(site, indices, layout, sizes, checked=checked)
        key = _key(site, at, x.shape[:batch], len(layout.space))
        moved = site.lax.transpose(x, layout.rest_last)
        return moved.at[tuple(key)].get(mode="clip")

    return rule


def _dynamic_index(
    site: Site, x: Array, *indices: Array, axes: tuple[int, ...]
) -> Array:
    layout = Layout(site.node.op.name, site.types[0], site.types[1:], axes, 0)
    sizes = [x.shape[a] for a in axes]
    if any(isinstance(n, int) and n == 0 for n in sizes):
        return site.jnp.zeros(site.shape(layout.selected), x.dtype)
    at = _normal(site, indices, layout, sizes, checked=True)
    for axis, index in sorted(zip(axes, at, strict=True), reverse=True):
        x = site.lax.dynamic_index_in_dim(x, index, axis, keepdims=False)
    return x


def _starts(site: Site, x: Array, starts: Sequence[Array]) -> list[Array]:
    return [_wrapped(site, s, n) for s, n in zip(starts, x.shape, strict=True)]


def _dynamic_slice(site: Site, x: Array, *starts: Array, sizes: Shape) -> Array:
    first = _starts(site, x, starts)
    shape = site.shape(sizes)
    return site.lax.dynamic_slice(x, first, shape, allow_negative_indices=False)


# --- writing --------------------------------------------------------------------------


def _dynamic_update_slice(site: Site, x: Array, new: Array, *starts: Array) -> Array:
    first = _starts(site, x, starts)
    return site.lax.dynamic_update_slice(x, new, first, allow_negative_indices=False)


_METHODS: Final = {"add": "add", "mul": "multiply", "min": "min", "max": "max"}
_OF_BOOL: Final = {"add": "max", "mul": "min", "min": "min", "max": "max"}


def _scatter(checked: bool) -> Callable[..., Array]:
    def rule(
        site: Site,
        x: Array,
        new: Array,
        *indices: Array,
        axes: tuple[int, ...],
        batch: int,
        starts: Shape,
        steps: tuple[int, ...],
        combine: str,
    ) -> Array:
        types = site.types
        layout = Layout(site.node.op.name, types[0], types[2:], axes, batch)
        sizes, order = [x.shape[a] for a in axes], layout.rest_last
        if any(isinstance(n, int) and n == 0 for n in (*x.shape, *new.shape)):
            return x
        at = _normal(site, indices, layout, sizes, checked=checked)
        if not checked and indices:  # what is out of range is written behind the end
            at[0] = site.jnp.where(_in_range(site, indices, sizes), at[0], sizes[0])
        count, moved = len(layout.space), site.lax.transpose(x, order)
        key = _key(site, at, x.shape[:batch], count)
        windows = list(zip(starts, new.shape[count:], steps, strict=True))
        if windows != [(0, n, 1) for n in moved.shape[len(key) :]]:
            key = _with_windows(site, key, windows)
        found = _written(site, moved, new, tuple(key), combine, repeats=count > batch)
        return site.lax.transpose(found, _inverse(order))

    return rule


def _inverse(order: Sequence[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


def _in_range(site: Site, indices: Sequence[Array], sizes: Sequence[Any]) -> Array:
    tests = []
    for index, size in zip(indices, sizes, strict=True):
        at = _as_position(site, index)
        tests.append((at >= 0) & (at < size))
    return reduce(and_, tests)


def _with_windows(
    site: Site, key: Sequence[Array], windows: Sequence[tuple[Any, Any, int]]
) -> list[Array]:
    """Positions along all axes, each with the axes of the windows behind its own."""
    after, found = len(windows), []
    for index in key:
        found.append(index.reshape(*index.shape, *[1] * after) if index.ndim else index)
    for k, (start, size, step) in enumerate(windows):
        along = positions(site, site.size(start), size, step)
        found.append(along.reshape(size, *[1] * (after - k - 1)))
    return found


def _written(
    site: Site,
    x: Array,
    new: Array,
    key: tuple[Array, ...],
    combine: str,
    *,
    repeats: bool,
) -> Array:
    """`x` with `new` at positions along its first axes; those behind the end drop."""
    if combine == "set":
        if repeats:
            return _last_written(site, x, new, key)
        return x.at[key].set(new, mode="drop")
    if x.dtype == bool:
        wide, method = "uint8", _METHODS[_OF_BOOL[combine]]
    else:
        wide, method = x.dtype, _METHODS[combine]
    place = x.astype(wide).at[key]
    return getattr(place, method)(new.astype(wide), mode="drop").astype(x.dtype)


def _last_written(site: Site, x: Array, new: Array, key: tuple[Array, ...]) -> Array:
    """Elements set to the last value written to each; JAX leaves open which wins."""
    jnp, lead = site.jnp, len(key)
    shape = new.shape[: new.ndim - (x.ndim - lead)]
    values = new.reshape(-1, *x.shape[lead:])
    order = site.lax.iota(jnp.int64, values.shape[0]).reshape(shape)
    never = jnp.full(x.shape[:lead], -1, jnp.int64)
    winner = never.at[key].max(order, mode="drop")
    chosen = values[jnp.maximum(winner, 0)]
    is_written = winner.reshape(*winner.shape, *[1] * (x.ndim - lead)) >= 0
    return jnp.where(is_written, chosen, x)


RULES: Final[dict[str, Callable[..., Any]]] = {
    "dynamic_index": _dynamic_index,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "gather": _gather(checked=True),
    "gather_clip": _gather(checked=False),
    "scatter": _scatter(checked=True),
    "scatter_drop": _scatter(checked=False),
}
