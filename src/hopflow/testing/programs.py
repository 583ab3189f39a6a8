"""Steps of drawn programs: a pool of values, and what computes further ones.

What a step does with the numbers that were drawn for it depends on the types of the
values in the pool, so that all steps, and all sequences of steps, are valid programs in
hopflow and in JAX.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np

from hopflow import pytree
from hopflow.dtypes import DType, as_dtype
from hopflow.hops.reverse_modes import Checkpoint
from hopflow.testing.libraries import HOPFLOW, LONGEST, Library
from hopflow.testing.user_operators import UserOperator
from hopflow.trace.dims import Dim

Steps: TypeAlias = Callable[["Pool"], None]
"""Steps that add values to a pool: those of a program, or of a body."""

Operation: TypeAlias = Callable[..., Any]
"""`(pool, a, b, c, d) -> value`."""

MOST_AXES: Final = 5


class Pool:
    """The values that a step of a program can use; bodies also see those outside.

    owned       the values that the program made and may write to
    threshold   the number that conditions compare with
    enough      the sum at which loops stop
    exact       whether all executions must agree in every bit
    signed      whether the signs of zeros must agree, too
    in_range    whether all indices are in range
    mutation    whether steps may write to tensors
    largest     the most elements of a value; small ones are in registers
    operations  name -> operation without a body
    operators   name -> operation with bodies
    dtypes, shapes  the dtypes and shapes of arguments
    """

    threshold: float = 0
    enough: float = 300
    exact: bool = False
    signed: bool = False
    in_range: bool = True
    mutation: bool = False
    largest: int = 130
    operations: Mapping[str, Operation]
    operators: Mapping[str, Callable[..., Any]]
    dtypes: Sequence[str]
    shapes: Sequence[tuple[int, ...]] = (
        *((), (3,), (4, 3), (2, 3), (0,), (5,), (2, 1, 3), (20,)),
        *((2, 1, 2, 3), (1, 2, 1, 3, 2), (6, 3, 2), (2, 3, 2, 2)),
    )

    def __init__(
        self, values: Sequence[Any], owned: Sequence[Any] = (), lib: Library = HOPFLOW
    ) -> None:
        self.values, self.owned, self.lib = list(values), list(owned), lib
        self.m = lib.m

    def child(self, *more: Any, writable: Any = (), writes: bool = True) -> "Pool":
        """Return the pool of a body.

        Args:
            more: Trees of further values.
            writable: Trees of values that the body may write to: carries and slices.
            writes: Whether it may write to values from outside.
        """
        copies, others = pytree.flatten(writable)[0], pytree.flatten(more)[0]
        owned = [*(self.owned if writes else ()), *copies]
        return type(self)([*self.values, *copies, *others], owned, self.lib)

    # Subclasses, the kinds of programs, override these.

    def bounded(self, x: Any) -> Any:
        """Return a result of arithmetic clamped to a range."""
        raise NotImplementedError

    def number(self, x: Any) -> Any:
        """Return a value converted to a numeric dtype."""
        raise NotImplementedError

    @classmethod
    def argument(cls, dtype: DType, shape: tuple[int, ...], seed: int) -> Any:
        """Return an argument of the program."""
        raise NotImplementedError

    def alike(self, x: Any, y: Any) -> bool:
        """Whether sums of products of two values are exact."""
        return not self.exact or (x.dtype.kind == "f") == (y.dtype.kind == "f")

    def terms(self, x: Any, y: Any) -> int:
        """Return how many products of elements of two values may be summed."""
        del x, y
        return self.largest

    def total(self, x: Any) -> Any:
        """Return a scalar that depends on all elements."""
        return self.m.sum(self.number(x))

    # Values of the pool.

    def add(self, value: Any) -> None:
        """Add a value, unless it is None or too large."""
        if value is None:
            return
        if value.ndim <= MOST_AXES and math.prod(value.shape) <= self.largest:
            self.values.append(value)

    def pick(self, k: int) -> Any:
        """Return value `k`, counted from the newest."""
        return self.values[-1 - k % len(self.values)]

    def like(self, k: int, fits: Callable[[Any], bool]) -> Any:
        """Return a value for which `fits` holds; if there is none, a scalar."""
        candidates = [v for v in self.values if fits(v)]
        if candidates:
            return candidates[-1 - k % len(candidates)]
        return self.m.full((), k, dtype=self.m.int64)

    def mate(self, k: int, x: Any) -> Any:
        """Return a value that broadcasts with `x`."""
        return self.like(k, lambda v: self.broadcasts(v.shape, x.shape))

    def broadcasts(self, a: Sequence[Any], b: Sequence[Any]) -> bool:
        """Whether two shapes broadcast to one that is not too large."""
        short, long = sorted((tuple(a), tuple(b)), key=len)
        short = (1,) * (len(long) - len(short)) + short
        pairs = list(zip(short, long, strict=True))
        if not all(m == n or 1 in (m, n) for m, n in pairs):
            return False
        return bool(math.prod(n if m == 1 else m for m, n in pairs) <= self.largest)

    def array(self, k: int) -> Any:
        """Return a value of rank 1 or more with elements."""
        return self.like(k, lambda v: v.ndim > 0 and all(n != 0 for n in v.shape))

    def stack(self, k: int) -> Any:
        """Return a value of rank 1 or more, which may be empty if indices must be in
        range."""
        return self.like(k, lambda v: v.ndim > 0) if self.in_range else self.array(k)

    def integer(self, k: int) -> Any:
        """Return a scalar i64."""
        x = self.like(k, lambda v: v.shape == () and v.dtype.kind == "i")
        return self.m.astype(x, self.m.int64)

    def truth(self, k: int) -> Any:
        """Return a scalar bool."""
        x = self.pick(k)
        return self.m.any(x if x.dtype.kind == "b" else x > self.threshold)

    def fitted(self, x: Any, like: Any) -> Any:
        """Return `x` converted to the type of `like`."""
        if x.shape != like.shape:
            if math.prod(x.shape) == math.prod(like.shape):
                x = self.m.reshape(x, like.shape)
            else:
                total = self.bounded(self.total(x))
                x = self.m.broadcast_to(total, like.shape)
        if like.dtype.kind == "b" and x.dtype.kind == "f":
            return x > self.threshold
        return (
            x if x.dtype == like.dtype else self.settled(self.m.astype(x, like.dtype))
        )

    def settled(self, x: Any) -> Any:
        """Return a converted value, clamped again if programs are exact."""
        return self.bounded(x) if self.exact else x


# --- operations on arrays -------------------------------------------------------------


def axis(f: Callable[[Any, Any, int], Any]) -> Operation:
    """Return the operation `f(m, x, axis)` on a numeric value."""

    def apply(p: Pool, a: int, b: int, *_: int) -> Any:
        x = p.number(p.array(a))
        return p.bounded(f(p.m, x, b % x.ndim)) if x.ndim else x

    return apply


def index_into(p: Pool, x: Any, i: Any, axis: int = 0) -> Any:
    """Return `i` as an index into an axis; if not `in_range`, up to two beyond it."""
    size = x.shape[axis]
    if size > np.iinfo(as_dtype(i.dtype).dtype).max:  # a narrow dtype would overflow
        i = p.m.astype(i, p.m.int64)
    if p.in_range:
        return p.m.remainder(i, size)
    if i.dtype.kind == "u":  # unsigned indices below 0 wrap around
        i = p.m.astype(i, p.m.int64)
    return p.m.remainder(i, size + 4) - 2


def view(m: Any, x: Any, kind: int) -> Any:
    """Return a view of `x`, of rank 1 or more."""
    match kind % 7:
        case 0:
            return x[::-1]
        case 1:
            return x[1:]
        case 2:
            return x[0]
        case 3:
            return m.permute_dims(x, tuple(reversed(range(x.ndim))))
        case 4:
            return x[..., None]
        case 5:
            return x[..., ::2]
        case _:
            return x[None]


def _some_view(p: Pool, a: int, b: int, *_: int) -> Any:
    x = p.array(a)
    return view(p.m, x, b) if x.ndim else x


def _where(p: Pool, a: int, b: int, c: int, d: int) -> Any:
    x = p.pick(a)
    y = p.mate(b, x)
    if d % 4 == 3:  # a scalar condition
        return p.settled(p.m.where(p.truth(c), x, y))
    test = p.like(c, lambda v: v.shape == x.shape)
    return p.settled(p.m.where(p.number(test) > 1 + p.threshold, x, y))


def _flat(p: Pool, a: int, *_: int) -> Any:
    return p.m.reshape(p.pick(a), (-1,))


def _concat(p: Pool, a: int, b: int, *_: int) -> Any:
    x = p.array(a)
    y = p.like(b, lambda v: v.ndim == x.ndim and v.shape[1:] == x.shape[1:])
    return p.settled(p.m.concat([x, y, x])) if y.ndim and x.ndim else x


def _index(p: Pool, a: int, b: int, *_: int) -> Any:
    x = p.array(a)
    return x[index_into(p, x, p.integer(b))] if x.ndim else x


def _gather(p: Pool, a: int, b: int, *_: int) -> Any:
    x = p.array(a)
    most = p.largest // max(math.prod(x.shape[1:]), 1)
    i = p.like(
        b,
        lambda v: (
            v.dtype.kind in "iu" and 1 <= v.ndim <= 2 and math.prod(v.shape) <= most
        ),
    )
    return x[index_into(p, x, i)] if x.ndim and i.ndim else x


def _update(p: Pool, a: int, b: int, c: int, _: int) -> Any:
    x = p.array(a)
    if x.ndim == 0:
        return x
    part = p.fitted(p.pick(c), x[: 1 + c % x.shape[0]])
    return p.lib.update(x, part, [p.integer(b)] + [0] * (x.ndim - 1))


def _sum_by(p: Pool, a: int, b: int, *_: int) -> Any:
    x = p.number(p.array(a))
    i = p.like(b, lambda v: v.dtype.kind in "iu" and v.shape == x.shape[:1])
    return p.bounded(p.lib.sum_by(x, index_into(p, x, i), x.shape[0])) if i.ndim else x


SIZES: Final[list[Callable[[Any, Any, int], Any]]] = [
    lambda n, _, d: n ** (24 + d) % 11,
    lambda n, m, d: n**20 * m**20 // (n**19 * m**20) + d % 3,
    lambda n, m, d: (n * m + d) // 3 % 12,
    lambda n, _, d: math.floor((n * 25) ** (1 / 3)) + d % 2,
    lambda n, m, d: math.floor((n + m) ** 0.5 + d % 4),
    lambda n, m, d: math.floor(n**2 / (m + d)),
    lambda n, m, d: (n - m - d) % 5,
]
"""Sizes computed from the lengths of two axes and a number. Intermediate integers
exceed 64 bits, and the last bit of intermediate floats decides how they are rounded."""


def _size(p: Pool, x: Any, b: int, c: int, d: int) -> Any:
    """Return a small size that is computed from lengths of axes."""
    y = p.array(b)
    n = x.shape[b % x.ndim]
    m = y.shape[c % y.ndim] if y.ndim else n
    return SIZES[c % len(SIZES)](n, m, d) % 12


def _sized(p: Pool, a: int, b: int, c: int, d: int) -> Any:
    """Return a value of a computed size, or the result of a loop with as many steps."""
    x = p.array(a)
    if x.ndim == 0:
        return x
    size = _size(p, x, b, c, d)
    match d % 6:
        case 0:
            return p.m.full((size, 2), 1 + b, dtype=p.m.int64)
        case 1:
            total = p.bounded(p.total(x))
            return p.m.broadcast_to(total, (2, size))
        case 2:
            return x[:size]
        case 3:
            return p.m.repeat(x, size, axis=c % x.ndim)
        case 4:
            return p.bounded(p.number(x) + size)
        case _:
            step = lambda _, v: (p.bounded(p.number(v) + 1),)  # noqa: E731
            return p.lib.fori(0, size, step, (p.number(x),))[0]


STRUCTURAL: Final[dict[str, Operation]] = {
    "sum": axis(lambda m, x, axis: m.sum(x, axis=axis)),
    "max": axis(lambda m, x, axis: m.max(x, axis=axis)),
    "min": axis(lambda m, x, axis: m.min(x, axis=axis)),
    "all": axis(lambda m, x, axis: m.all(x > 0, axis=axis)),
    "cumsum": axis(lambda m, x, axis: m.cumulative_sum(x, axis=axis)),
    "stack": axis(lambda m, x, axis: m.stack([x, -x], axis=axis)),
    "repeat": axis(lambda m, x, axis: m.repeat(x, 2, axis=axis)),
    "roll": axis(lambda m, x, axis: m.roll(x, 1, axis=axis)),
    "where": _where,
    "view": _some_view,
    "flat": _flat,
    "concat": _concat,
    "index": _index,
    "gather": _gather,
    "update": _update,
    "sum_by": _sum_by,
    "sized": _sized,
}
"""The operations that all kinds of programs share."""


def write(p: Pool, a: int, b: int, c: int, d: int) -> Any:
    """Write to a new copy, or to a value that is owned, possibly through a view.

    Only hopflow supports it.
    """
    if not p.owned or d % 4 == 0:
        p.owned.append(p.pick(a).copy())
        p.add(p.owned[-1])
    y = p.owned[-1 - d // 4 % len(p.owned)]
    if y.ndim == 0 or 0 in y.shape:
        return y
    # A compiler may delay this read, but not beyond the write.
    before = p.number(y[::-1] if a % 2 else y) + 1
    written = _written(p, y, b, c)
    return p.bounded(before - p.number(y)) if a % 3 else written


def _written(p: Pool, y: Any, b: int, c: int) -> Any:
    """Write to `y`, and return `y` or the view that was written."""
    match c % 7:
        case 0:
            i = index_into(p, y, p.integer(b))
            y[i] = p.fitted(p.pick(b), y[0])
        case 1:
            part = view(p.m, y, c)
            part[...] = p.fitted(p.pick(b), part)
        case 2:
            part = view(p.m, y, b)
            if part.dtype.kind != "b":
                part -= 1
            return part
        case 3:
            y[1:] = p.fitted(p.pick(b), y[1:])
        case 4:
            y[1:] = y[:-1]
        case 5:
            i = p.like(b, lambda v: v.dtype.kind == "i" and v.ndim == 1)
            y[index_into(p, y, i)] = y[0]
        case _:
            part = view(p.m, view(p.m, y[None], 3), b)
            part[...] = p.fitted(p.pick(b), part)
    return y


# --- operators ------------------------------------------------------------------------


def _trips(p: Pool, a: int, b: int) -> Any:
    """Return the number of steps of a loop: an int or a tensor."""
    return p.m.remainder(p.integer(b), 4) if a % 2 else b % 4


def _body(p: Pool, body: Steps, carry: Any, n: int = 0) -> Any:
    """Run the steps of a body, and return the next carry."""
    body(p)
    leaves, spec = pytree.flatten(carry)
    fitted = [p.fitted(p.pick(n * (k + 1) + k), x) for k, x in enumerate(leaves)]
    return pytree.unflatten(spec, fitted)


def _branches(p: Pool, like: Any, bodies: Sequence[Steps]) -> list[Callable[[], Any]]:
    """Return functions whose results have the type of `like`."""

    def branch(body: Steps) -> Callable[[], Any]:
        return lambda: _body(p.child(), body, like)

    return list(map(branch, bodies))


def _cond(p: Pool, ns: Sequence[int], *bodies: Steps) -> Any:
    return p.lib.cond(p.truth(ns[0]), *_branches(p, p.pick(ns[1]), bodies))


def _switch(p: Pool, ns: Sequence[int], *bodies: Steps) -> Any:
    """A switch, whose last branch has no steps."""
    branches = _branches(p, p.pick(ns[1]), (*bodies, lambda _: None))
    return p.lib.switch(p.integer(ns[0]) - 1, branches)


def _carry(p: Pool, ns: Sequence[int]) -> tuple[Any, ...]:
    """Return a carry: up to three values, sometimes with None, or in nested trees."""
    first, *rest = (p.pick(n) for n in ns[: 1 + ns[0] % 3])
    if ns[3] == 10:
        return ({"a": first, "b": (None, *rest)},)
    return (first, *rest, None) if ns[3] == 11 else (first, *rest)


def _fori(p: Pool, ns: Sequence[int], body: Steps) -> Any:
    def step(i: Any, *carry: Any) -> Any:
        # The index of a loop is weak; steps need a strong array.
        child = p.child(p.m.astype(i, p.m.int64), writable=carry)
        return _body(child, body, carry, ns[1] % 3)

    return p.lib.fori(0, _trips(p, ns[2], ns[3]), step, _carry(p, ns))


def _while(p: Pool, ns: Sequence[int], body: Steps) -> Any:
    def test(n: Any, *carry: Any) -> Any:
        more = n > 0
        few = p.total(pytree.flatten(carry)[0][0]) < p.enough
        return more & few if ns[1] % 2 else more

    def step(n: Any, *carry: Any) -> Any:
        return (n - 1, *_body(p.child(n, writable=carry), body, carry, ns[0] % 3))

    trips = _trips(p, ns[2], ns[3])
    first = p.m.full((), trips, dtype=p.m.int64) if type(trips) is int else trips
    options = LOOP_OPTIONS[(ns[0] + ns[1]) % len(LOOP_OPTIONS)]
    return p.lib.loop(test, step, (first, *_carry(p, ns)), **options)


LOOP_OPTIONS: Final[list[dict[str, Any]]] = [
    {},
    {"reverse_mode": "save"},
    {"reverse_mode": "checkpoint"},
    {"reverse_mode": Checkpoint(2)},
    {"max_steps": LONGEST},
]


def _scan(p: Pool, ns: Sequence[int], body: Steps) -> Any:
    def step(carry: Any, x: Any) -> Any:
        child = p.child(writable=(carry, x))
        return _body(child, body, carry, ns[0] % 3), (x, child.pick(ns[3]))

    def until(carry: Any) -> Any:
        return p.total(pytree.flatten(carry)[0][0]) > p.threshold

    xs = p.stack(ns[1])
    if xs.ndim == 0:
        return xs
    options = {"until": until} if ns[2] % 4 == 3 else {}
    return p.lib.scan(step, _carry(p, ns), xs, reverse=bool(ns[2] % 2), **options)


def _map(p: Pool, ns: Sequence[int], body: Steps) -> Any:
    def f(x: Any) -> Any:
        child = p.child(writable=x, writes=False)
        body(child)
        return child.pick(ns[0]), child.pick(ns[2])

    xs = p.stack(ns[1])
    size = (None, None, LONGEST, 2)[ns[3] % 4]
    options = {} if size is None else {"batch_size": size}
    return p.lib.map(f, xs, **options) if xs.ndim else xs


def _subgraph(p: Pool, ns: Sequence[int], body: Steps) -> Any:
    """A subgraph that is called once or twice."""

    def f(*args: Any) -> Any:
        return _body(p.child(args), body, args)

    result = p.lib.call(f, *_carry(p, ns))
    return p.lib.call(f, *result) if ns[2] % 2 else result


def _checkpoint(p: Pool, ns: Sequence[int], body: Steps) -> Any:
    def f(*args: Any) -> Any:
        return _body(p.child(args, writes=False), body, args)

    policy = ("nothing", "dots", "everything")[ns[1] % 3]
    return p.lib.checkpoint(f, policy=policy)(*_carry(p, ns))


def _custom(rule: str) -> Callable[..., Any]:
    def custom(p: Pool, ns: Sequence[int], body: Steps) -> Any:
        def f(*args: Any) -> Any:  # a rule must not read values from outside
            return _body(type(p)(args, lib=p.lib), body, args)

        return p.lib.custom(f, rule)(*pytree.flatten(_carry(p, ns))[0])

    return custom


def _grow(p: Pool, ns: Sequence[int], body: Steps) -> Any:
    """A loop whose carry grows."""
    x = p.array(ns[1])
    if x.ndim == 0:
        return x

    def step(n: Any, value: Any, longer: Any) -> Any:
        child = p.child(n, writable=value)
        (value,) = _body(child, body, (value,))
        return n - 1, value, p.m.concat([longer, value[None, ...]])

    first = p.m.full((), ns[2] % 4, dtype=p.m.int64)
    carry = (first, x[0], x)
    sizes = {"longer": {0: Dim("rows")}}
    grown = p.lib.loop(lambda n, *_: n > 0, step, carry, dynamic_carry=sizes)
    return grown[1], p.bounded(p.m.sum(p.number(grown[2]), axis=0))


def _chosen(p: Pool, ns: Sequence[int], body: Steps) -> Any:
    """A loop over rows whose number is known only at run time."""
    x = p.array(ns[1])
    if x.ndim == 0:
        return x

    def step(carry: Any, row: Any) -> Any:
        child = p.child(writable=(carry, row))
        return _body(child, body, carry), p.number(child.pick(ns[3]))

    rows = x[p.number(x[(slice(None), *[0] * (x.ndim - 1))]) > p.threshold]
    carry, ys = p.lib.scan(step, _carry(p, ns), rows, reverse=bool(ns[2] % 2))
    return carry, p.bounded(p.m.sum(ys, axis=0))


def _examples(p: Pool, ns: Sequence[int], body: Steps) -> Any:
    """A map over rows that are multiplied by a matrix, or by two, and each of which has
    its own number of steps of a loop."""
    x = p.number(p.array(ns[1]))
    if x.ndim == 0 or x.ndim > 2:
        x = p.number(p.like(ns[1], lambda v: v.ndim == 2 and 0 not in v.shape))
    if x.ndim == 1:
        x = x[:, None]
    if x.ndim == 0 or max(x.shape) > p.terms(x, x):
        return x
    turned = p.m.matrix_transpose(x)

    def f(row: Any) -> Any:
        first = p.bounded(row @ turned)
        second = p.bounded(first @ x)
        child = p.child(first, second, writable=row, writes=False)
        body(child)
        counted = (row, first, second)[ns[2] % 3]
        count = p.m.sum(p.m.astype(counted > p.threshold, p.m.int64))

        def step(i: Any, *carry: Any) -> Any:
            inner = child.child(p.m.astype(i, p.m.int64), writable=carry, writes=False)
            return _body(inner, body, carry, ns[1] % 3)

        steps = p.lib.fori(0, p.m.remainder(count, 4), step, _carry(child, ns))
        return child.pick(ns[3]), steps

    return p.lib.map(f, x)


OPERATORS: Final[dict[str, Callable[..., Any]]] = {
    "cond": _cond,
    "switch": _switch,
    "fori": _fori,
    "while": _while,
    "scan": _scan,
    "map": _map,
    "subgraph": _subgraph,
    "checkpoint": _checkpoint,
    "custom": _custom("custom_jvp"),
    "custom_vjp": _custom("custom_vjp"),
    "grow": _grow,
    "chosen": _chosen,
    "examples": _examples,
}


def _user(operator: UserOperator, p: Pool, ns: Sequence[int], *bodies: Steps) -> Any:
    """A user's operator on tensors of one type."""

    def function(body: Steps) -> Callable[..., Any]:
        def f(*args: Any) -> Any:
            results = _body(p.child(args, writes=False), body, args, ns[0] % 3)
            return results[0] if len(args) == 1 else results

        return f

    first = p.number(p.pick(ns[1]))
    count = len(operator.functions) - operator.bodies - 1
    others = [p.fitted(p.pick(ns[2] + k), first) for k in range(count)]
    results = p.lib.user(operator, [function(b) for b in bodies], [first, *others])
    return pytree.tree_map(p.bounded, results)


def run(
    p: Pool, kind: str | UserOperator, ns: Sequence[int], bodies: Sequence[Steps]
) -> None:
    """Run a step, which adds values to the pool.

    Args:
        kind: The operation or operator.
        ns: Four numbers, which choose values and variants.
        bodies: The bodies of an operator.
    """
    if isinstance(kind, UserOperator):
        results = _user(kind, p, ns, *bodies)
    elif kind in p.operations:
        results = p.operations[kind](p, *ns)
    else:
        results = p.operators[kind](p, ns, *bodies)
    for value in pytree.flatten(results)[0]:
        p.add(value)
