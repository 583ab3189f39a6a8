"""Tangents of the running totals `cumprod`, `cummax` and `cummin`."""

from collections.abc import Callable
from typing import Any, NamedTuple

from hopflow import dtypes
from hopflow.bind import current, slots
from hopflow.ops.convert import apply, as_value, astype
from hopflow.ops.creation import arange, ones, zeros
from hopflow.ops.elementwise import floor, maximum, where
from hopflow.ops.gather import gather_clip
from hopflow.ops.math import log2
from hopflow.ops.opdef import OpDef
from hopflow.ops.sizes import is_empty
from hopflow.ops.views import moved, part, reshaped, update_slice
from hopflow.symbolic.size import Size, SymInt


class _Running(NamedTuple):
    """Elements to combine, and their tangents."""

    x: Any
    t: Any


class RunningTangents:
    """Tangents of running totals by an operation, from the operation's JVP rules,
    without division, as a factor may be 0."""

    def __init__(self, combine: OpDef) -> None:
        assert isinstance(combine.jvp, tuple)
        self.combine = combine
        self.left, self.right = map(_rule, combine.jvp)

    def combined(self, a: _Running, b: _Running, total: Any) -> Any:
        return self.left(a.t, total, a.x, b.x) + self.right(b.t, total, a.x, b.x)

    def by_tree(self, elements: _Running, out: Any) -> Any:
        """Return the tangents of `out`, the running totals of `elements`: first those
        of pairs of neighbours, recursively, then the rest. This is the order of JAX's
        `associative_scan`, so ties are split in the same way."""
        n = out.shape[0]
        if n < 2:
            return elements.t
        sizes = (n // 2, n // 2, (n - 1) // 2)
        first, second, third = (
            _Running(*(part(v, 0, k, size, 2) for v in elements))
            for k, size in enumerate(sizes)
        )
        pairs = self.combine(first.x, second.x)
        odd = part(out, 0, 1, sizes[1], 2)
        t_odd = self.by_tree(_Running(pairs, self.combined(first, second, pairs)), odd)
        before = _Running(*(part(v, 0, 0, sizes[2]) for v in (odd, t_odd)))
        t_even = self.combined(before, third, part(out, 0, 2, sizes[2], 2))
        t = elements.t
        for start, new in ((1, t_odd), (2, t_even)):
            others = t.ndim - 1
            starts, steps = (start, *[0] * others), (2, *[1] * others)
            t = update_slice(t, new, starts=starts, steps=steps)
        return t

    def by_levels(self, own: _Running, out: Any) -> Any:
        """Return the same for a symbolic size, for which the tree's depth is unknown.

        The total of `m` elements is that of blocks, one for each set bit of `m`, the
        largest first; a block of `2**k` is two halves. A loop over the bits computes
        the derivatives of totals by their blocks, and of blocks by their halves. A
        second loop, which is linear in the tangents, sums the products.
        """
        n, one = out.shape[0], ones(out.shape, dtype=out.dtype)
        blocks = arange(n)
        ends, halves = blocks + 1, (2 * blocks, 2 * blocks + 1)

        def parts(a: Any, b: Any, total: Any) -> tuple[Any, Any]:
            return self.left(one, total, a, b), self.right(one, total, a, b)

        def rows(test: Any) -> Any:
            return reshaped(test, (n, *[1] * (out.ndim - 1)))

        def weigh(carry: Any, k: Any) -> Any:
            block, rest = carry
            a, b = (_at(block, i) for i in halves)
            is_whole = rows((ends << (k + 1)) <= n)
            total = where(is_whole, self.combine(a, b), a)
            of_halves = [where(is_whole, p, 0.0) for p in parts(a, b, total)]
            earlier = ends >> (k + 1)
            before, up_to = (
                _at(out, end - 1) for end in (earlier << (k + 1), ends >> k << k)
            )
            of_rest, of_last = parts(before, _at(block, (ends >> k) - 1), up_to)
            is_set, is_first = rows((ends >> k & 1) == 1), rows(earlier == 0)
            own = where(is_set, rest * where(is_first, one, of_last), 0.0)
            return (total, where(is_set, rest * of_rest, rest)), (own, *of_halves)

        def add_up(carry: Any, level: Any) -> Any:
            (t, total), (k, own, *of_halves) = carry, level
            last = _at(t, (ends >> k) - 1)
            pairs = zip(of_halves, halves, strict=True)
            return (sum(w * _at(t, i) for w, i in pairs), total + own * last), None

        bits = arange(_bits(n))
        _, weights = slots.scan(weigh, (own.x, one), bits)
        first = (own.t, zeros(out.shape, dtype=out.dtype))
        (_, total), _ = slots.scan(add_up, first, (bits, *weights))
        return total

    def __call__(self, t: Any, out: Any, x: Any, *, axis: int, reverse: bool) -> Any:
        n = x.shape[axis]
        if is_empty(n):
            return t
        t, out, x = (moved(v, axis, 0) for v in (t, out, x))
        if reverse:
            t, out, x = (part(v, 0, n - 1, n, -1) for v in (t, out, x))
        elements = _Running(x, t)
        tangents = (
            self.by_tree(elements, out)
            if isinstance(n, int)
            else self.by_levels(elements, out)
        )
        return moved(part(tangents, 0, n - 1, n, -1) if reverse else tangents, 0, axis)


def _rule(rule: Callable[..., Any] | None) -> Callable[..., Any]:
    assert rule is not None
    return rule


def _at(x: Any, rows: Any) -> Any:
    return apply(gather_clip, x, rows, axes=(0,), batch=0)


def _bits(n: SymInt) -> Size:
    """Return the bit length of a size, or one more, as the logarithm is rounded."""
    number = astype(maximum(current().value_of(n), 1), dtypes.float64)
    bits = as_value(astype(floor(log2(number)), dtypes.int64) + 2)
    return current().symbol_of(bits, 2, 64)
