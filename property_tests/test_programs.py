"""Random programs mean the same however they are run.

A program is a tree of numbers: what each step does is decided while it runs, from the
types of the values that there are. All floats are small whole numbers, so that every
order of a sum gives the same bits, and what is compared is compared exactly.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import hopflow
from hopflow.compiler.pipeline import lower
from hopflow.config import config
from hopflow.dtypes import as_dtype
from hopflow.errors import MutationError
from hopflow.loop_ir import interpreter
from hopflow.testing.meanings import MEANINGS

hf: Any = hopflow

Step: TypeAlias = tuple[Any, ...]
"""`(kind, numbers, *bodies)`: what to do, which values with, and steps of its own."""

LARGEST: Final = 130
"""Elements in a value; some values are in registers, and some in memory."""
BOUND: Final = 400.0
DTYPES: Final = ("float64", "float32", "int64", "int32", "int8", "bool", "float16")
ARGUMENTS: Final = (
    np.arange(20, dtype=np.float64) % 7 - 3,
    np.arange(12, dtype=np.float32).reshape(4, 3) - 5,
    np.array([4, -2, 7], np.int32),
    np.array([[2.0, -1.0, 3.0]] * 4),
    np.int64(3),
    np.array([True, False, True]),
)


# --- programs -------------------------------------------------------------------------

numbers = st.tuples(*[st.integers(0, 11)] * 4)


def steps(depth: int) -> st.SearchStrategy[Any]:
    names = [*sorted(OPERATIONS), *["write"] * 6]
    plain = st.tuples(st.sampled_from(names), numbers)
    if depth == 0:
        return st.lists(plain, max_size=4)
    inner = steps(depth - 1)
    nested = st.one_of(
        st.tuples(st.sampled_from(["cond", "switch"]), numbers, inner, inner),
        st.tuples(
            st.sampled_from(["fori", "while", "scan", "map", "subgraph"]),
            numbers,
            inner,
        ),
    )
    return st.lists(st.one_of(plain, plain, nested), max_size=7)


class Pool:
    """The values that a program has at one point; bodies see those outside too.

    owned   those that this program made and may write to
    """

    def __init__(self, values: Sequence[Any], owned: Sequence[Any] = ()) -> None:
        self.values, self.owned = list(values), list(owned)

    def child(self, *more: Any, writes: bool = True) -> "Pool":
        return Pool([*self.values, *more], self.owned if writes else ())

    def add(self, value: Any) -> None:
        if value.ndim <= 3 and np.prod(value.shape) <= LARGEST:
            self.values.append(value)

    def pick(self, k: int) -> Any:
        """One of the values; small numbers are the newest."""
        return self.values[-1 - k % len(self.values)]

    def like(self, k: int, fits: Callable[[Any], bool]) -> Any:
        """A value for which `fits` holds; the last resort is a scalar."""
        found = [v for v in self.values if fits(v)]
        return found[-1 - k % len(found)] if found else hf.asarray(k)

    def mate(self, k: int, x: Any) -> Any:
        """A value that broadcasts with `x`."""
        return self.like(k, lambda v: _broadcasts(v.shape, x.shape))

    def array(self, k: int) -> Any:
        """A value with an axis, and with elements."""
        return self.like(k, lambda v: v.ndim > 0 and 0 not in v.shape)

    def integer(self, k: int) -> Any:
        """A scalar i64."""
        x = self.like(k, lambda v: v.shape == () and v.dtype.kind == "i")
        return hf.astype(x, hf.int64)

    def truth(self, k: int) -> Any:
        """A scalar bool."""
        x = self.pick(k)
        return hf.any(x if x.dtype.kind == "b" else x > 0)


def _broadcasts(a: Any, b: Any) -> bool:
    try:
        return int(np.prod(np.broadcast_shapes(a, b))) <= LARGEST
    except ValueError:
        return False


def bounded(x: Any) -> Any:
    """A float as a number that is small, and so exact."""
    if x.dtype.kind != "f":
        return x
    return hf.minimum(hf.maximum(x, -BOUND), BOUND)


def number(x: Any) -> Any:
    """A value to calculate with."""
    return hf.astype(x, hf.int32) if x.dtype.kind == "b" else x


def fitted(x: Any, like: Any) -> Any:
    """`x` with the type of `like`."""
    if x.shape != like.shape:
        if np.prod(x.shape) == np.prod(like.shape):
            x = hf.reshape(x, like.shape)
        else:
            x = hf.broadcast_to(bounded(hf.sum(number(x))), like.shape)
    return hf.astype(x, like.dtype)


# --- operations on arrays -------------------------------------------------------------


def _binary(f: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def apply(p: Pool, a: int, b: int, *_: int) -> Any:
        x = number(p.pick(a))
        return bounded(f(x, number(p.mate(b, x))))

    return apply


def _axis(f: Callable[[Any, int], Any]) -> Callable[..., Any]:
    def apply(p: Pool, a: int, b: int, *_: int) -> Any:
        x = number(p.array(a))
        return bounded(f(x, b % x.ndim)) if x.ndim else x

    return apply


def _where(p: Pool, a: int, b: int, c: int, _: int) -> Any:
    x = p.pick(a)
    y = p.mate(b, x)
    test = p.like(c, lambda v: v.shape == x.shape)
    return hf.where(number(test) > 1, x, y)


def _convert(p: Pool, a: int, b: int, *_: int) -> Any:
    x, dtype = p.pick(a), as_dtype(DTYPES[b % len(DTYPES)])
    return bounded(hf.astype(x, dtype))


def _divide(p: Pool, a: int, b: int, c: int, _: int) -> Any:
    x = number(p.pick(a))
    y = number(p.mate(b, x))
    f = hf.floor_divide if c % 2 else hf.remainder
    return bounded(f(x, hf.where(y == 0, 1, y)))


def _bits(p: Pool, a: int, b: int, c: int, _: int) -> Any:
    x = p.like(a, lambda v: v.dtype.kind == "i")
    y = p.like(b, lambda v: v.dtype.kind == "i" and _broadcasts(v.shape, x.shape))
    return (hf.bitwise_and, hf.bitwise_or, hf.bitwise_xor)[c % 3](x, y)


def _view(p: Pool, a: int, b: int, *_: int) -> Any:
    return view(p.array(a), b)


def view(x: Any, kind: int) -> Any:
    """A view of `x`, which has an axis."""
    match kind % 7:
        case 0:
            return x[::-1]
        case 1:
            return x[1:]
        case 2:
            return x[0]
        case 3:
            return hf.permute_dims(x, tuple(reversed(range(x.ndim))))
        case 4:
            return x[..., None]
        case 5:
            return x[..., ::2]
        case _:
            return x[None]


def _flat(p: Pool, a: int, *_: int) -> Any:
    return hf.reshape(p.pick(a), (-1,))


def _concat(p: Pool, a: int, b: int, *_: int) -> Any:
    x = p.array(a)
    y = p.like(b, lambda v: v.ndim == x.ndim and v.shape[1:] == x.shape[1:])
    return hf.concat([x, y, x]) if y.ndim and x.ndim else x


def _matmul(p: Pool, a: int, b: int, *_: int) -> Any:
    x = number(p.like(a, lambda v: v.ndim == 2))
    y = p.like(b, lambda v: v.ndim == 2 and x.ndim == 2 and v.shape[0] == x.shape[1])
    return bounded(x @ number(y)) if x.ndim == y.ndim == 2 else x


def _at(x: Any, i: Any) -> Any:
    """`i` as an index into the first axis."""
    return hf.remainder(i, x.shape[0])


def _index(p: Pool, a: int, b: int, *_: int) -> Any:
    x = p.array(a)
    return x[_at(x, p.integer(b))] if x.ndim else x


def _gather(p: Pool, a: int, b: int, *_: int) -> Any:
    x = p.array(a)
    i = p.like(b, lambda v: v.dtype.kind == "i" and 1 <= v.ndim <= 2)
    return x[_at(x, i)] if x.ndim and i.ndim else x


def _update(p: Pool, a: int, b: int, c: int, _: int) -> Any:
    x = p.array(a)
    if x.ndim == 0:
        return x
    part = fitted(p.pick(c), x[: 1 + c % x.shape[0]])
    return hf.dynamic_update_slice(x, part, [p.integer(b)] + [0] * (x.ndim - 1))


def _sum_by(p: Pool, a: int, b: int, *_: int) -> Any:
    x = number(p.array(a))
    i = p.like(b, lambda v: v.dtype.kind == "i" and v.shape == x.shape[:1])
    return bounded(hf.segment_sum(x, _at(x, i), x.shape[0])) if i.ndim else x


def _unary(p: Pool, a: int, b: int, *_: int) -> Any:
    x = number(p.pick(a))
    return bounded((hf.negative, hf.abs, hf.sign, hf.square, hf.trunc)[b % 5](x))


def _sort(p: Pool, a: int, b: int, *_: int) -> Any:
    x = p.array(a)
    return (hf.sort if b % 2 else hf.argsort)(x) if x.ndim else x


def _write(p: Pool, a: int, b: int, c: int, d: int) -> Any:
    """Write to a copy, or to what is ours already; by way of a view, or not."""
    if not p.owned or d % 4 == 0:
        p.owned.append(p.pick(a).copy())
        p.add(p.owned[-1])
    y = p.owned[-1 - d // 4 % len(p.owned)]
    if y.ndim == 0 or 0 in y.shape:
        return y
    # What is read before a write may well be computed after it.
    before = number(y[::-1] if a % 2 else y) + 1
    written = _written(p, y, b, c)
    return bounded(before - number(y)) if a % 3 else written


def _written(p: Pool, y: Any, b: int, c: int) -> Any:
    """What was written to: `y`, or a view of it."""
    match c % 7:
        case 0:
            i = _at(y, p.integer(b))
            y[i] = fitted(p.pick(b), y[0])
        case 1:
            part = view(y, c)
            part[...] = fitted(p.pick(b), part)
        case 2:
            part = view(y, b)
            if part.dtype.kind != "b":
                part -= 1
            return part
        case 3:
            y[1:] = fitted(p.pick(b), y[1:])
        case 4:
            y[1:] = y[:-1]
        case 5:
            i = p.like(b, lambda v: v.dtype.kind == "i" and v.ndim == 1)
            y[_at(y, i)] = y[0]
        case _:
            part = view(view(y[None], 3), b)
            part[...] = fitted(p.pick(b), part)
    return y


OPERATIONS: Final[dict[str, Callable[..., Any]]] = {
    "add": _binary(lambda x, y: x + y),
    "subtract": _binary(lambda x, y: x - y),
    "multiply": _binary(lambda x, y: x * y),
    "maximum": _binary(lambda x, y: hf.maximum(x, y)),
    "less": _binary(lambda x, y: x < y),
    "equal": _binary(lambda x, y: x == y),
    "sum": _axis(lambda x, axis: hf.sum(x, axis=axis)),
    "any": _axis(lambda x, axis: hf.any(x > 0, axis=axis)),
    "stack": _axis(lambda x, axis: hf.stack([x, -x], axis=axis)),
    "repeat": _axis(lambda x, axis: hf.repeat(x, 2, axis=axis)),
    "unary": _unary,
    "update": _update,
    "sum_by": _sum_by,
    "max": _axis(lambda x, axis: hf.max(x, axis=axis)),
    "argmin": _axis(lambda x, axis: hf.argmin(x, axis=axis)),
    "cumsum": _axis(lambda x, axis: hf.cumulative_sum(x, axis=axis)),
    "roll": _axis(lambda x, axis: hf.roll(x, 1, axis=axis)),
    "where": _where,
    "convert": _convert,
    "divide": _divide,
    "bits": _bits,
    "view": _view,
    "flat": _flat,
    "concat": _concat,
    "matmul": _matmul,
    "index": _index,
    "gather": _gather,
    "sort": _sort,
    "write": _write,
}


# --- operators ------------------------------------------------------------------------


def _trips(p: Pool, a: int, b: int) -> Any:
    """How often a loop runs: a number, or a tensor."""
    return hf.remainder(p.integer(b), 4) if a % 2 else b % 4


def _body(
    p: Pool, body: Sequence[Step], carry: Sequence[Any], n: int = 0
) -> tuple[Any, ...]:
    """The carry's next value, after the steps of a body."""
    run(p, body)
    return tuple(fitted(p.pick(n * (k + 1) + k), c) for k, c in enumerate(carry))


def _cond(p: Pool, ns: Sequence[int], *bodies: Sequence[Step]) -> Any:
    like = p.pick(ns[1])

    def branch(body: Sequence[Step]) -> Callable[[], Any]:
        return lambda: _body(p.child(), body, [like])[0]

    if len(bodies) == 2 and ns[3] % 2:
        index = p.integer(ns[0]) - 1
        return hf.switch(index, [branch(b) for b in (*bodies, [])])
    return hf.cond(p.truth(ns[0]), *map(branch, bodies))


def _carry(p: Pool, ns: Sequence[int]) -> tuple[Any, ...]:
    return tuple(p.pick(n) for n in ns[: 1 + ns[0] % 3])


def _fori(p: Pool, ns: Sequence[int], body: Sequence[Step]) -> Any:
    def step(i: Any, *carry: Any) -> Any:
        return _body(p.child(hf.asarray(i), *carry), body, carry, ns[1] % 3)

    return hf.fori_loop(0, _trips(p, ns[2], ns[3]), step, _carry(p, ns))


def _while(p: Pool, ns: Sequence[int], body: Sequence[Step]) -> Any:
    def test(n: Any, *carry: Any) -> Any:
        more = n > 0
        return more & (hf.sum(number(carry[0])) < 300) if ns[1] % 2 else more

    def step(n: Any, *carry: Any) -> Any:
        return (n - 1, *_body(p.child(n, *carry), body, carry, ns[0] % 3))

    first = hf.asarray(_trips(p, ns[2], ns[3]))
    return hf.while_loop(test, step, (first, *_carry(p, ns)))


def _scan(p: Pool, ns: Sequence[int], body: Sequence[Step]) -> Any:
    def step(carry: Any, x: Any) -> Any:
        child = p.child(*carry, x)
        return _body(child, body, carry, ns[0] % 3), (x, child.pick(ns[3]))

    xs = p.array(ns[1])
    if xs.ndim == 0:
        return xs
    last, ys = hf.scan(step, _carry(p, ns), xs, reverse=bool(ns[2] % 2))
    return (*last, *ys)


def _map(p: Pool, ns: Sequence[int], body: Sequence[Step]) -> Any:
    def f(x: Any) -> Any:
        child = p.child(x, writes=False)
        run(child, body)
        return child.pick(ns[0]), child.pick(ns[2])

    xs = p.array(ns[1])
    return hf.map(f, xs) if xs.ndim else xs


def _subgraph(p: Pool, ns: Sequence[int], body: Sequence[Step]) -> Any:
    def f(*given: Any) -> Any:
        return _body(p.child(*given), body, given)

    return hf.invoke_subgraph(f, *_carry(p, ns))


OPERATORS: Final[dict[str, Callable[..., Any]]] = {
    "cond": _cond,
    "switch": _cond,
    "fori": _fori,
    "while": _while,
    "scan": _scan,
    "map": _map,
    "subgraph": _subgraph,
}


def run(p: Pool, body: Sequence[Step]) -> None:
    """Do the steps, which add to the pool."""
    for kind, ns, *inner in body:
        if kind in OPERATIONS:
            p.add(OPERATIONS[kind](p, *ns))
            continue
        result = OPERATORS[kind](p, ns, *inner)
        for value in result if isinstance(result, tuple) else (result,):
            p.add(value)


def program(body: Sequence[Step]) -> Callable[..., Any]:
    """A function of `ARGUMENTS` that returns its newest values."""

    def f(*args: Any) -> Any:
        p = Pool(args)
        run(p, body)
        return (*(p.pick(k) for k in range(6)), *p.owned[:4])

    return f


# --- the property ---------------------------------------------------------------------


def same(name: str, got: Sequence[Any], want: Sequence[Any]) -> None:
    assert len(got) == len(want)
    for k, (a, b) in enumerate(zip(got, want, strict=True)):
        x, y = (np.asarray(v) for v in (a, b))
        assert x.dtype == y.dtype, f"{name}, result {k}"
        np.testing.assert_array_equal(x, y, f"{name}, result {k}")


def loop_ir_results(f: Callable[..., Any], args: Sequence[Any]) -> list[Any]:
    """The results of the scheduled program, by the interpreter of the Loop IR."""
    jitted = hf.jit(f)
    jitted(*args)
    _, scheduled = lower(jitted.graph)
    arrays = [np.asarray(a) for a in (*args, *jitted._present.compiled.captured)]
    return interpreter.run(scheduled, (), arrays)


@pytest.fixture(autouse=True, scope="module")
def _verified() -> Any:
    before, config.verify = config.verify, True
    yield
    config.verify = before


@given(steps(2))
def test_all_meanings_of_a_program_agree(body: Any) -> None:
    f = program(body)
    results: dict[str, Any] = {}
    for meaning in MEANINGS:
        args = [hf.asarray(np.array(a)) for a in ARGUMENTS]
        try:
            results[meaning.name] = meaning.run(f, *args)
        except MutationError:  # what tracing cannot do, it says
            assume(False)
        for arg, before in zip(args, ARGUMENTS, strict=True):
            np.testing.assert_array_equal(np.asarray(arg), before)
    want = results.pop("debug")
    for name, got in results.items():
        same(name, got, want)
    same("loop ir", loop_ir_results(f, ARGUMENTS), want)
