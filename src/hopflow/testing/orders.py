"""Steps of programs that sort, search and rearrange elements, along any axis."""

from typing import Any, Final

from hopflow.testing.programs import Operation, Pool, index_into


def _sort(p: Pool, a: int, b: int, c: int, d: int) -> Any:
    x = p.array(a)
    if x.ndim == 0:
        return x
    f = p.m.sort if b % 2 else p.m.argsort
    return f(x, axis=c % x.ndim, descending=d % 3 == 2)


def _top_k(p: Pool, a: int, b: int, c: int, d: int) -> Any:
    x = p.number(p.array(a))
    if x.ndim == 0:
        return x
    axis = b % x.ndim
    n = x.shape[axis]
    values, order = p.m.top_k(x, n if d % 4 == 3 else 1 + c % n, axis=axis)
    p.add(order)
    return values


def _search(p: Pool, a: int, b: int, c: int, _: int) -> Any:
    x = p.number(p.array(a))
    if x.ndim == 0:
        return x
    y = p.like(b, lambda v: v.dtype == x.dtype)
    if y.dtype != x.dtype:
        y = x
    ordered = p.m.sort(p.m.reshape(x, (-1,)), axis=0)
    return p.m.searchsorted(ordered, y, side=("left", "right")[c % 2])


def _take_along(p: Pool, a: int, b: int, c: int, _: int) -> Any:
    x = p.array(a)
    if x.ndim == 0:
        return x
    axis = b % x.ndim

    def fits(v: Any) -> bool:
        pairs = enumerate(zip(v.shape, x.shape, strict=False))
        return (
            v.dtype.kind in "iu"
            and v.ndim == x.ndim
            and all(n in (1, most) or k == axis for k, (n, most) in pairs)
        )

    i = p.like(c, fits)
    if i.ndim == 0:
        i = p.m.argsort(x, axis=axis)
    return p.m.take_along_axis(x, index_into(p, x, i, axis), axis=axis)


def _pad(p: Pool, a: int, b: int, c: int, d: int) -> Any:
    x = p.array(a)
    if x.ndim == 0:
        return x
    widths = [(0, 0)] * x.ndim
    widths[b % x.ndim] = (c % 3, d % 3)
    value = 0 if x.dtype.kind == "b" else c % 2
    return p.m.pad(x, widths, constant_values=value)


def _tile(p: Pool, a: int, b: int, c: int, _: int) -> Any:
    """`tile` along the last two axes, of which `x` may lack one."""
    return p.m.tile(p.pick(a), (1 + b % 3, 1 + c % 2))


def _window(p: Pool, a: int, b: int, c: int, d: int) -> Any:
    """`dynamic_slice` from a computed start."""
    x = p.array(a)
    if x.ndim == 0:
        return x
    sizes = [x.shape[k] for k in range(x.ndim)]
    sizes[d % x.ndim] = 1 + c % sizes[d % x.ndim]
    starts = [0] * x.ndim
    starts[d % x.ndim] = p.integer(b)
    return p.m.dynamic_slice(x, starts, sizes)


def _running(p: Pool, a: int, b: int, c: int, _: int) -> Any:
    m, x = p.m, p.number(p.array(a))
    if x.ndim == 0:
        return x
    axis = b % x.ndim
    match c % 4:
        case 0:
            return p.bounded(m.cumulative_sum(x, axis=axis, include_initial=True))
        case 1:
            factors = m.sign(x) if p.exact else x
            return p.bounded(m.cumulative_prod(factors, axis=axis))
        case 2:
            return m.cummax(x, axis=axis)
        case _:
            return m.cummin(x, axis=axis)


def _triangle(p: Pool, a: int, b: int, c: int, _: int) -> Any:
    x = p.like(a, lambda v: v.ndim >= 2)
    f = p.m.tril if b % 2 else p.m.triu
    return f(x, k=c % 4 - 2) if x.ndim else x


ORDERS: Final[dict[str, Operation]] = {
    "sort": _sort,
    "top_k": _top_k,
    "search": _search,
    "take_along": _take_along,
    "pad": _pad,
    "tile": _tile,
    "window": _window,
    "running": _running,
    "triangle": _triangle,
}
"""Operations of steps that rearrange elements."""
