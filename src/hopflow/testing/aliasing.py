"""Steps of programs with aliases and buffer reuse: copies, updates, exchanged carries.

A compiler that writes in place, or assigns one buffer to two values, must not overwrite
live values. These steps make such mistakes likely: an array is copied (also through a
reshape, `positive` or `astype`), updated and read again; views are read after their
base was written; and the carries of a loop are computed from each other.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from hopflow.testing.programs import Operation, Pool, Steps, index_into, view

ALIASING_SHAPES: Final = (
    *((5,), (8,), (17,), (33, 3), (40,), (6, 5), (5, 6), (3, 12), (2, 3, 4)),
    *((7, 1, 5), (3,), (1,), (0,), ()),
)
"""Shapes of arguments. Most have more than four elements, so that they are in memory;
some are repeated, so that arguments have equal types."""


# --- copies ---------------------------------------------------------------------------


def _reversed_axes(m: Any, x: Any) -> Any:
    return m.permute_dims(x, tuple(reversed(range(x.ndim))))


def _flat(m: Any, x: Any) -> Any:
    return m.reshape(x, (-1,))


COPIES: Final[list[Callable[[Any, Any], Any]]] = [
    lambda m, x: m.copy(x),
    lambda m, x: m.reshape(m.copy(_flat(m, x)), x.shape),
    lambda m, x: m.copy(m.reshape(_flat(m, x), x.shape)),
    lambda m, x: _positive(m, x),
    lambda m, x: m.astype(x, x.dtype, copy=True),
    lambda m, x: m.reshape(_positive(m, _flat(m, x)), x.shape),
    lambda m, x: m.reshape(m.astype(_flat(m, x), x.dtype, copy=True), x.shape),
    lambda m, x: _reversed_axes(m, m.copy(_reversed_axes(m, x))),
    lambda m, x: m.flip(m.copy(m.flip(x, axis=0)), axis=0),
    lambda m, x: m.copy(x[...]),
    lambda m, x: m.copy(m.copy(x)),
]
"""Ways to copy an array of rank 1 or more: by `copy`, and through operations that move
no element, or that undo each other."""

IDENTITIES: Final[list[Callable[[Any, Any], Any]]] = [
    lambda _, x: x,
    lambda _, x: x[...],
    lambda m, x: m.reshape(x, x.shape),
    lambda m, x: m.flip(m.flip(x, axis=0), axis=0),
    lambda m, x: _reversed_axes(m, _reversed_axes(m, x)),
    lambda _, x: x[None][0],
    *COPIES,
]
"""Expressions that are equal to an array."""


def _positive(m: Any, x: Any) -> Any:
    return m.astype(x, x.dtype) if x.dtype.kind == "b" else m.positive(x)


def _same(p: Pool, a: int, b: int, *_: int) -> Any:
    """An expression that equals an existing value, so that results may be equal."""
    x = p.array(a)
    return IDENTITIES[b % len(IDENTITIES)](p.m, x) if x.ndim else x


# --- updates --------------------------------------------------------------------------


def _mixed(p: Pool, x: Any, *others: Any) -> Any:
    """Return a value of the type of `x` that depends on all operands."""
    total = x
    for y in others:
        total = p.bounded(p.number(total) + p.number(p.fitted(y, x)))
    return p.fitted(total, x)


def _updated(p: Pool, x: Any, i: Any, value: Any, k: int) -> Any:
    """Return a copy of `x` with one row replaced."""
    if not p.mutation:
        part = p.fitted(value, x[:1])
        return p.lib.update(x, part, [i] + [0] * (x.ndim - 1))
    copy = COPIES[k % len(COPIES)](p.m, x)
    copy[index_into(p, x, i)] = p.fitted(value, x[0])
    return copy


def _copied(p: Pool, a: int, b: int, c: int, d: int) -> Any:
    """Copy an array and replace one row; the array is read before or after that."""
    x = p.array(a)
    if x.ndim == 0:
        return x
    i, j = p.integer(b), index_into(p, x, p.integer(c))
    before = p.number(x[j]) if d % 2 else None
    updated = _updated(p, x, i, p.pick(c), b)
    p.add(updated)
    if d % 3 == 0:  # only the copy is used
        return updated
    after = p.number(x[j]) if d % 3 == 1 else p.number(updated[j])
    return p.bounded(after if before is None else before - after)


VIEWS: Final[list[Callable[[Any, Any], Any]]] = [
    lambda m, x: _flat(m, x),
    lambda m, x: m.flip(x, axis=0),
    lambda m, x: view(m, x[1:], 3),
    lambda m, x: view(m, x[::-1], 5),
    lambda m, x: view(m, view(m, x, 3), 5),
    lambda m, x: view(m, view(m, x, 6), 3),
    lambda m, x: _flat(m, x)[::2],
    lambda m, x: _flat(m, x)[1:][::-1],
]
"""Views, and views of views, of an array of rank 1 or more."""


def _viewed(p: Pool, a: int, b: int, c: int, d: int) -> Any:
    """Read a view after its base was written, or updated."""
    x = p.array(a)
    if x.ndim == 0:
        return x
    if not p.mutation:
        part = VIEWS[b % len(VIEWS)](p.m, x)
        p.add(_updated(p, x, p.integer(c), p.pick(d), b))
        return p.bounded(p.number(part) + 1)
    owned = [y for y in p.owned if y.ndim and 0 not in y.shape]
    if not owned or d % 2:
        owned = [p.m.copy(x)]
        p.owned += owned
        p.add(owned[-1])
    base = owned[-1 - a % len(owned)]
    part = VIEWS[b % len(VIEWS)](p.m, base)
    if d % 3 == 0:
        base[1:] = base[:-1]
    else:
        base[index_into(p, base, p.integer(c))] = p.fitted(p.pick(d), base[0])
    return p.bounded(p.number(part) + 1)


def _masked(p: Pool, a: int, b: int, c: int, d: int) -> Any:
    """An array or its update, by a test; some are of another array of its type."""
    x = p.array(a)
    if x.ndim == 0:
        return x
    updated = _updated(p, x, p.integer(b), p.pick(c), b)
    other = p.like(c, lambda v: _one_type(v, x)) if d % 3 == 2 else x
    sides = (updated, other) if d % 2 else (other, updated)
    return p.m.where(p.truth(c + d), *sides)


def _recurred(p: Pool, a: int, b: int, c: int, d: int) -> Any:
    """Replace rows, or columns again and again, by what earlier steps stored, or by
    those of another array."""
    x = p.array(a)
    if x.ndim == 0:
        return x
    m, y, near, far = p.m, p.like(b, lambda v: _one_type(v, x)), 1 + c % 3, 1 + d % 4

    def row(i: Any, x: Any) -> Any:
        last = m.where(i < 4 + b % 4, x[i - near], y[i])
        new = m.where(i > 2 + c % 4, x[i - far], last)
        return (p.lib.update(x, new[None], [i] + [0] * (x.ndim - 1)),)

    def column(i: Any, x: Any) -> Any:
        for k in range(1 + b % 3):
            j, from_ = (c + k) % x.shape[1], (d * k + a) % x.shape[1]
            new = m.where(i < 1 + (k + d) % 3, x[:, from_], y[:, j])
            rest = [0] * (x.ndim - 2)
            x = p.lib.update(x, new[:, None], [0, j, *rest])
        return (x,)

    is_long = x.shape[0] > 64  # many steps, each of which copies the array elsewhere
    if x.ndim > 1 and 0 not in x.shape and (d % 2 or is_long):
        return p.lib.fori(0, 1 + d % 4, column, (x,))[0]
    return x if is_long else p.lib.fori(max(near, far), x.shape[0], row, (x,))[0]


def _stepped(p: Pool, a: int, b: int, c: int, d: int) -> Any:
    """Short rows that go through the steps of a scan, and maybe those of another one
    back through its results."""
    x = p.array(a)
    if x.ndim != 2 or 0 in x.shape:
        return x
    m, y, width = p.m, p.like(b, lambda v: _one_type(v, x)), min(x.shape[1], 12)
    x, y = x[:, :width], y[:, :width]

    def one(row: Any) -> Any:
        """A row that is reversed, or not."""
        first, last = row[b % width], row[c % width]
        other = p.lib.cond(
            last > row[0], lambda: row, lambda: m.where(row > last, row, last)
        )
        return p.lib.cond(first > last, lambda: row[::-1], lambda: other)

    def step(carry: Any, z: Any) -> Any:
        x, *others = carry
        for k in range(1 + a % 2):
            first, last = x[:, (b + k) % width], x[:, (c + k) % width]
            new = m.where(first > z, last, z)
            match (c + k) % 3:
                case 0:
                    x = m.stack([*(x[:, j] for j in range(1, width)), new], axis=1)
                case 1:
                    x = p.lib.update(x, new[:, None], [0, d % width])
                case _:
                    rest = [m.where(last < new, x[:, j], new) for j in range(width)]
                    x = m.stack(rest, axis=1)
        if d % 4 == 3 and x.shape[0] <= 64:
            x = p.lib.map(one, x)
        return (*others, x), x if b % 2 else x[:, a % width]

    # The inputs of a step lie side by side, or those of a row do.
    columns = (
        m.matrix_transpose(y)
        if (b + d) % 2
        else m.stack([y[:, j] for j in range(width)])
    )
    others = (y,) * ((a + c) % 3 == 0)  # which change places in each step
    (x, *_), rows = p.lib.scan(step, (x, *others), columns)
    if d % 3 == 0:
        p.add(rows)
    if (a + d) % 3:  # a loop over the same rows, maybe in another order
        read = x[::-1] if c % 2 else x, y[::-1] if b % 2 else y
        p.add(p.bounded(p.number(read[0]) + p.number(read[1])))
    if d % 2:
        column = [0] if b % 2 else []

        def back(carry: Any, row: Any) -> Any:
            (x,) = carry
            row = row[:, c % width] if column else row
            return (m.where(x > row[:, None], x, y),), row

        (x,), rows = p.lib.scan(back, (x,), rows, reverse=True)
        p.add(m.stack([rows[0], rows[-1]], axis=1))
    return x


# --- pieces ---------------------------------------------------------------------------


def _joined(p: Pool, x: Any, y: Any, b: int, c: int) -> Any:
    """Return an array of pieces of `x` and `y`, which have equal types."""
    m, k = p.m, 1 + b % x.shape[0]
    match c % 6:
        case 0:
            return m.concat([x[k:], y[:k]])
        case 1:
            return m.concat([p.fitted(p.bounded(p.number(x[k:])), x[k:]), y[:k], x[:1]])
        case 2:
            return m.stack([x, y])[b % 2]
        case 3:
            return m.stack([y, x, y], axis=-1)
        case 4:
            return m.pad(x[1:], [(1, 0)] + [(0, 0)] * (x.ndim - 1))
        case _:
            return m.pad(x, [(1, 1)] * x.ndim)


def _pieces(p: Pool, a: int, b: int, c: int, _: int) -> Any:
    x = p.array(a)
    if x.ndim == 0:
        return x
    y = p.like(b, lambda v: v.shape == x.shape and v.dtype == x.dtype)
    return p.settled(_joined(p, x, y, b, c))


ALIASING_OPERATIONS: Final[dict[str, Operation]] = {
    "same": _same,
    "copied": _copied,
    "viewed": _viewed,
    "pieces": _pieces,
    "masked": _masked,
    "recurred": _recurred,
    "stepped": _stepped,
}
"""Operations of steps, which write in place if the program may write."""


# --- loops whose carries are exchanged ------------------------------------------------


class Exchange(NamedTuple):
    """How the next carries of a loop are computed from the current ones.

    carries     the number of carries
    next        (pool, value of the body, integer, *carries) -> the next carries
    """

    carries: int
    next: Callable[..., tuple[Any, ...]]


def _in_one_branch(p: Pool, v: Any, i: Any, a: Any, b: Any) -> tuple[Any, ...]:
    def unchanged() -> Any:
        return a, b

    def updated() -> Any:
        return _updated(p, a, i, v, 0), b

    return tuple(p.lib.cond(p.truth(0), updated, unchanged))


def _moved_in_one_branch(p: Pool, v: Any, _: Any, a: Any, b: Any) -> tuple[Any, ...]:
    def unchanged() -> Any:
        return a, b

    def moved() -> Any:
        return b, _mixed(p, a, v)

    return tuple(p.lib.cond(p.truth(0), unchanged, moved))


def _read_around(p: Pool, v: Any, i: Any, a: Any, b: Any) -> tuple[Any, ...]:
    """Read rows of a carry before and after it is updated."""
    at = index_into(p, a, i)
    before = a[at]
    updated = _updated(p, a, i, v, 2)
    return updated, _mixed(p, b, p.bounded(p.number(before) - p.number(updated[at])))


def _written(p: Pool, v: Any, i: Any, a: Any, b: Any) -> tuple[Any, ...]:
    """Write a carry in place, if programs may write, and read a view of it."""
    if not p.mutation:
        return _updated(p, a, i, v, 0), _mixed(p, b, a)
    part = p.m.flip(a, axis=0)
    a[index_into(p, a, i)] = p.fitted(v, a[0])
    return a, _mixed(p, b, part)


def _shared(p: Pool, v: Any, _: Any, a: Any, b: Any) -> tuple[Any, ...]:
    mixed = _mixed(p, a, b, v)
    return mixed, mixed


def _wave(p: Pool, v: Any, _: Any, a: Any, b: Any) -> tuple[Any, ...]:
    """A step of a wave equation: the new state, from the last two."""
    return _mixed(p, p.m.roll(a, 1, axis=0), b, v), a


def _reread(p: Pool, v: Any, i: Any, a: Any, b: Any) -> tuple[Any, ...]:
    """Read a view of a view of a carry that the next step replaces."""
    part = p.m.flip(_reversed_axes(p.m, a[::-1]), axis=0)
    return _updated(p, b, i, v, 3), _mixed(p, a, _reversed_axes(p.m, part))


EXCHANGES: Final = [
    Exchange(2, lambda _p, _v, _i, a, b: (b, a)),
    Exchange(
        2, lambda p, v, _, a, b: (_mixed(p, b, v), _mixed(p, p.m.flip(a, axis=0), v))
    ),
    Exchange(2, lambda p, _v, _i, a, b: (b, _mixed(p, a, b))),
    Exchange(2, _wave),
    Exchange(3, lambda _p, _v, _i, a, b, c: (b, c, a)),
    Exchange(3, lambda p, v, i, a, b, c: (b, c, _updated(p, a, i, v, 1))),
    Exchange(3, lambda p, _v, _i, a, b, c: (c, a, _mixed(p, b, c))),
    *[Exchange(2, _shared)] * 2,
    Exchange(2, lambda p, v, _, a, b: (a, _mixed(p, b, a, v))),
    Exchange(2, _in_one_branch),
    Exchange(2, _moved_in_one_branch),
    Exchange(2, _read_around),
    Exchange(2, _written),
    *[Exchange(2, _reread)] * 2,
    Exchange(2, lambda p, v, i, a, b: (_updated(p, a, i, v, b.ndim + 2), a)),
    Exchange(
        2, lambda p, _v, _i, a, b: (p.fitted(_joined(p, a, b, 1, 0), a), _mixed(p, b))
    ),
]


def _exchange(p: Pool, ns: Sequence[int], body: Steps) -> Any:
    """A `fori_loop`, `while_loop` or `scan` whose carries exchange their values."""
    first = p.array(ns[0])
    if first.ndim == 0:
        return first
    # All numbers are used, as Hypothesis often draws equal ones.
    exchange = EXCHANGES[(11 * ns[0] + 7 * ns[1] + 5 * ns[2] + ns[3]) % len(EXCHANGES)]
    initial = [first]
    for k in range(1, exchange.carries):
        initial.append(p.like(ns[1] + k, lambda v: _one_type(v, first)))

    def following(child: Pool, *carry: Any) -> tuple[Any, ...]:
        body(child)
        value = child.fitted(child.pick(ns[1]), carry[0])
        return exchange.next(child, value, child.integer(0), *carry)

    kind = (_exchange_in_fori, _exchange_in_while, _exchange_in_scan)[ns[3] % 3]
    final = kind(p, ns, tuple(initial), following)
    # The initial value may be read later, as a result of the program.
    return (final, first) if ns[2] % 3 == 0 else final


def _one_type(x: Any, y: Any) -> bool:
    return bool(x.shape == y.shape and x.dtype == y.dtype)


Following = Callable[..., tuple[Any, ...]]
"""(pool of a body, *carries) -> the next carries."""


def _steps(p: Pool, ns: Sequence[int]) -> Any:
    """Return the number of steps of a loop, an int or a tensor, within JAX's limit."""
    return p.m.remainder(p.integer(ns[1]), 6) if ns[0] % 3 == 0 else ns[0] % 5 + 1


def _exchange_in_fori(
    p: Pool, ns: Sequence[int], carry: tuple[Any, ...], following: Following
) -> Any:
    def step(i: Any, *carry: Any) -> Any:
        return following(p.child(p.m.astype(i, p.m.int64), writable=carry), *carry)

    return p.lib.fori(0, _steps(p, ns), step, carry)


def _exchange_in_while(
    p: Pool, ns: Sequence[int], carry: tuple[Any, ...], following: Following
) -> Any:
    def step(n: Any, *carry: Any) -> Any:
        return (n - 1, *following(p.child(n, writable=carry), *carry))

    steps = _steps(p, ns)
    first = p.m.full((), steps, dtype=p.m.int64) if type(steps) is int else steps
    return p.lib.loop(lambda n, *_: n > 0, step, (first, *carry))[1:]


def _exchange_in_scan(
    p: Pool, ns: Sequence[int], carry: tuple[Any, ...], following: Following
) -> Any:
    """A scan whose stacked rows are read back."""
    xs = p.stack(ns[1])
    if xs.ndim == 0:
        return carry
    xs = xs[: ns[1] % 6]

    def step(carry: Any, x: Any) -> Any:
        child = p.child(x, writable=carry)
        after = following(child, *carry)
        return after, after[0] if ns[0] % 2 else carry[-1]

    final, rows = p.lib.scan(step, carry, xs, reverse=bool(ns[2] % 2))
    if 0 in rows.shape:
        return final
    row = rows[index_into(p, rows, p.integer(ns[0]))]
    return *final, p.fitted(p.bounded(p.number(rows[0]) - p.number(row)), row)


# --- branches of which one changes nothing --------------------------------------------


def _either(p: Pool, ns: Sequence[int], body: Steps) -> Any:
    """Two arrays, which one branch updates or swaps, and the other leaves unchanged."""
    x = p.array(ns[1])
    if x.ndim == 0:
        return x
    y = p.like(ns[2], lambda v: _one_type(v, x))

    def unchanged() -> Any:
        return x, y

    def changed() -> Any:
        child = p.child()
        body(child)
        value, i = child.fitted(child.pick(ns[0]), x), child.integer(ns[0])
        match ns[2] % 4:
            case 0:
                return y, x
            case 1:
                return x, _mixed(child, y, value)
            case 2:
                return _mixed(child, x, y, value), x
        return _updated(child, x, i, value, ns[1]), y

    branches = (changed, unchanged) if ns[3] % 2 else (unchanged, changed)
    return p.lib.cond(p.truth(ns[0]), *branches)


ALIASING_OPERATORS: Final[dict[str, Callable[..., Any]]] = {
    "exchange": _exchange,
    "either": _either,
}
"""Operators of steps, with a body."""
