"""Operations that move elements: reshapes, slices, joins."""

from collections.abc import Callable
from typing import Any, Final

from hopflow.dtypes import DType
from hopflow.export.jax.frames import Array, Site
from hopflow.graph.types import Shape, is_zero
from hopflow.symbolic.size import Size


def _reshape(site: Site, x: Array, *, shape: Shape) -> Array:
    return site.jnp.reshape(x, site.shape(shape))


def _transpose(site: Site, x: Array, *, axes: tuple[int, ...]) -> Array:
    return site.lax.transpose(x, axes)


def _broadcast(site: Site, x: Array, *, shape: Shape) -> Array:
    return site.jnp.broadcast_to(x, site.shape(shape))


def _iota(site: Site, *, shape: Shape, axis: int, dtype: DType) -> Array:
    return site.lax.broadcasted_iota(dtype.dtype, site.shape(shape), axis)


def positions(site: Site, start: Any, size: Any, step: int) -> Array:
    """start, start + step, ... as i64[size]."""
    along = site.lax.iota(site.jnp.int64, size)
    return start + along * step


def _slice(
    site: Site, x: Array, *, starts: Shape, sizes: Shape, steps: tuple[int, ...]
) -> Array:
    lax, jnp = site.lax, site.jnp
    for axis, (start, size, step) in enumerate(zip(starts, sizes, steps, strict=True)):
        first, count = site.size(start), site.dimension(size)
        if abs(step) == 1 or (isinstance(first, int) and isinstance(count, int)):
            span = (count - 1) * abs(step) + 1 if abs(step) > 1 and count else count
            low = first if step > 0 or is_zero(count) else first - span + 1
            x = lax.slice_in_dim(x, low, low + span, abs(step), axis)
            x = lax.rev(x, (axis,)) if step < 0 else x
        else:
            x = jnp.take(x, positions(site, first, count, step), axis=axis, mode="clip")
    return x


def _update_slice(
    site: Site, x: Array, new: Array, *, starts: Shape, steps: tuple[int, ...]
) -> Array:
    if not steps:
        return new
    places = [
        positions(site, site.size(start), size, step)
        for start, size, step in zip(starts, new.shape, steps, strict=True)
    ]
    if all(step == 1 for step in steps):
        first = [site.jnp.asarray(site.size(n), site.jnp.int64) for n in starts]
        return site.lax.dynamic_update_slice(x, new, first)
    key = site.jnp.ix_(*places)
    return x.at[key].set(new, unique_indices=True, mode="promise_in_bounds")


def _concat(site: Site, *operands: Array, axis: int) -> Array:
    return site.lax.concatenate(operands, axis)


def _pad(site: Site, x: Array, value: Array, *, before: Shape, after: Shape) -> Array:
    widths = zip(site.shape(before), site.shape(after), strict=True)
    return site.lax.pad(x, value, [(b, a, 0) for b, a in widths])


def _roll(site: Site, x: Array, shift: Array, *, axis: int) -> Array:
    n = x.shape[axis]
    if isinstance(n, int) and n == 0:
        return x
    # JAX's own takes an amount of any dtype modulo the size in that dtype.
    amount = shift.astype(site.jnp.int64) % site.jnp.maximum(n, 1)
    return site.jnp.roll(x, amount, axis)


def _match_size(
    site: Site, x: Array, *, axis: int, size: Size, repeats: bool = False
) -> Array:
    """An axis of this size: JAX knows sizes, and so whether it is."""
    shape = (*x.shape[:axis], site.dimension(size), *x.shape[axis + 1 :])
    return site.jnp.broadcast_to(x, shape) if repeats else site.jnp.reshape(x, shape)


def _operand(place: int) -> Callable[..., Array]:
    """One of the operands, as it is."""
    return lambda _site, *operands, **_: operands[place]


RULES: Final[dict[str, Callable[..., Any]]] = {
    "broadcast_to": _broadcast,
    "concat": _concat,
    "copy": _operand(0),
    "full": _broadcast,
    "iota": _iota,
    "match_size": _match_size,
    "pad": _pad,
    "reshape": _reshape,
    "roll": _roll,
    "slice": _slice,
    "transpose": _transpose,
    "update_slice": _update_slice,
}
