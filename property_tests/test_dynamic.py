"""One trace means what the function means, at all sizes and numbers that it serves.

A program is a list of steps, as in test_programs. What a step does is decided by dtypes
and ranks alone: what depends on sizes is for the traces to find out.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hopflow
from hopflow.errors import CheckError, GraphError, GuardError, LoopIRError

hf: Any = hopflow
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("verified")]

BOUND: Final = 400.0
USER_ERRORS: Final = (ArithmeticError, IndexError, TypeError, ValueError)
OWN_ERRORS: Final = (GraphError, LoopIRError)


class Pool:
    """The tensors, ints and floats that a program has at one point."""

    def __init__(
        self, tensors: Sequence[Any], ints: Sequence[Any], floats: Sequence[Any]
    ) -> None:
        self.tensors, self.ints, self.floats = list(tensors), list(ints), list(floats)

    def child(self, *tensors: Any) -> "Pool":
        return Pool([*self.tensors, *tensors], self.ints, self.floats)

    def pick(self, k: int) -> Any:
        """One of the tensors; small numbers are the newest."""
        return self.tensors[-1 - k % len(self.tensors)]

    def of_rank(self, k: int, *ranks: int) -> Any:
        found = [t for t in self.tensors if t.ndim in ranks]
        return found[-1 - k % len(found)]

    def whole(self, k: int) -> Any:
        return self.ints[-1 - k % len(self.ints)]

    def real(self, k: int) -> Any:
        return self.floats[-1 - k % len(self.floats)]

    def axis(self, k: int) -> tuple[Any, int]:
        """A tensor with an axis, and one of its axes."""
        x = self.of_rank(k, 1, 2, 3)
        return x, k % x.ndim


def bounded(x: Any) -> Any:
    """Whole numbers that stay small, and so exact in every order of a sum."""
    return hf.minimum(hf.maximum(x, -BOUND), BOUND)


# --- steps ----------------------------------------------------------------------------
#
# A step takes the pool and four numbers, and gives a tensor, an int or a float. Those
# of PLAIN ask nothing of sizes and numbers: one trace serves all of them.


def _axes(f: Callable[[Any, int], Any]) -> Callable[..., Any]:
    return lambda p, a, *_: bounded(f(*p.axis(a)))


def _at(x: Any, axis: int, index: Any) -> Any:
    return x[(slice(None),) * axis + (index,)]


def _scan(p: Pool, a: int, b: int, c: int, _: int) -> Any:
    xs, n = p.of_rank(a, 1, 2, 3), p.whole(b)

    def step(total: Any, x: Any) -> Any:
        total = bounded(total + hf.sum(x) + n)
        return total, (total if c % 2 else bounded(x * n))

    last, ys = hf.scan(step, hf.asarray(1.0), xs, reverse=bool(c % 3))
    return ys if c % 5 else last


def _while(p: Pool, a: int, b: int, *_: int) -> Any:
    x, n = p.pick(a), p.whole(b)
    return hf.while_loop(
        lambda i, c: (i < n) & (i < 9),
        lambda i, c: (i + 1, bounded(c + x.shape[0] if x.ndim else c + n)),
        (0, x),
    )[1]


def _cond(p: Pool, a: int, b: int, c: int, d: int) -> Any:
    x, n, f = p.pick(a), p.whole(b), p.real(c)
    test = hf.sum(x) > (n if d % 2 else f)
    return hf.cond(test, lambda: bounded(x * f), lambda: x + n)


PLAIN: Final[dict[str, Callable[..., Any]]] = {
    "negative": lambda p, a, *_: -p.pick(a),
    "square": lambda p, a, *_: bounded(hf.square(p.pick(a))),
    "double": lambda p, a, *_: bounded(p.pick(a) + p.pick(a)),
    "times int": lambda p, a, b, *_: bounded(p.pick(a) * p.whole(b)),
    "times float": lambda p, a, b, *_: bounded(p.pick(a) * p.real(b)),
    "less": lambda p, a, b, *_: hf.where(p.pick(a) < p.whole(b), p.pick(a), p.real(b)),
    "sum": _axes(lambda x, axis: hf.sum(x, axis=axis)),
    "cumsum": _axes(lambda x, axis: hf.cumulative_sum(x, axis=axis)),
    "reverse": _axes(lambda x, axis: hf.flip(x, axis=axis)),
    "stack": _axes(lambda x, axis: hf.stack([x, -x], axis=axis) if x.ndim < 3 else x),
    "twice": _axes(lambda x, axis: hf.concat([x, x], axis=axis)),
    "first": _axes(lambda x, axis: _at(x, axis, slice(3))),
    "but first": _axes(lambda x, axis: _at(x, axis, slice(1, None))),
    "but last": _axes(lambda x, axis: _at(x, axis, slice(None, -2))),
    "halves": _axes(lambda x, axis: _at(x, axis, slice(None, None, 2))),
    "transpose": lambda p, a, *_: hf.permute_dims(
        p.pick(a), tuple(reversed(range(p.pick(a).ndim)))
    ),
    "flat": lambda p, a, *_: hf.reshape(p.pick(a), (-1,)),
    "outer": lambda p, a, b, *_: bounded(p.of_rank(a, 1)[:, None] * p.of_rank(b, 1)),
    "gram": lambda p, a, *_: bounded(p.of_rank(a, 2) @ p.of_rank(a, 2).mT),
    "sort": _axes(lambda x, axis: hf.sort(x, axis=axis)),
    "grid": lambda p, a, b, *_: hf.full((p.pick(a).ndim, *p.pick(b).shape[:1]), 2.0),
    "range": lambda p, a, *_: hf.arange(p.axis(a)[0].shape[0], dtype="float32"),
    "size": lambda p, a, *_: p.axis(a)[0].shape[p.axis(a)[1]],
    "int add": lambda p, a, b, *_: p.whole(a) + p.whole(b),
    "int subtract": lambda p, a, b, *_: p.whole(a) - p.whole(b),
    "int divide": lambda p, a, b, *_: p.whole(a) // (1 + b % 3),
    "int rest": lambda p, a, b, *_: p.whole(a) % (2 + b % 3),
    "float add": lambda p, a, b, *_: p.real(a) + p.whole(b),
    "float times": lambda p, a, *_: p.real(a) * 2.0,
    "scan": _scan,
    "while": _while,
    "cond": _cond,
    "map": lambda p, a, b, *_: hf.map(
        lambda x: bounded(x * p.whole(b)), p.of_rank(a, 1, 2, 3)
    ),
}


def _broadcast(p: Pool, a: int, b: int, *_: int) -> Any:
    return bounded(p.pick(a) - p.pick(b))


def _branch(p: Pool, a: int, b: int, c: int, _: int) -> Any:
    x, n = p.pick(a), p.whole(b)
    tests: list[Callable[[], Any]] = [
        lambda: n > c,
        lambda: n % 2 == 0,
        lambda: n == x.ndim,
        lambda: x.ndim and x.shape[0] <= n,
        lambda: p.real(c) < 1.0,
    ]
    return x + 1 if tests[c % 5]() else x * 2


def _size(p: Pool, k: int) -> Any:
    """A number as a size that is not too large."""
    return p.whole(k) % 6 if k % 4 else p.whole(k)


ASKING: Final[dict[str, Callable[..., Any]]] = {
    "broadcast": _broadcast,
    "branch": _branch,
    "concat": lambda p, a, b, *_: hf.concat([p.of_rank(a, 1), p.of_rank(b, 1)]),
    "matmul": lambda p, a, b, *_: bounded(p.of_rank(a, 2) @ p.of_rank(b, 1, 2)),
    "max": _axes(lambda x, axis: hf.max(x, axis=axis)),
    "mean": _axes(lambda x, axis: hf.sum(x, axis=axis) * x.shape[axis]),
    "pairs": lambda p, a, *_: hf.reshape(p.pick(a), (-1, 2)),
    "rows": lambda p, a, b, *_: hf.reshape(p.pick(a), (1 + p.whole(b) % 4, -1)),
    "full": lambda p, a, b, *_: hf.full((_size(p, a), _size(p, b)), p.real(a)),
    "arange": lambda p, a, *_: hf.arange(_size(p, a), dtype="float32"),
    "start": lambda p, a, b, *_: p.of_rank(a, 1, 2, 3)[: p.whole(b)],
    "end": lambda p, a, b, *_: p.of_rank(a, 1, 2, 3)[p.whole(b) :],
    "middle": lambda p, a, b, c, _: p.of_rank(a, 1, 2, 3)[p.whole(b) : p.whole(c)],
    "steps": lambda p, a, b, c, _: p.of_rank(a, 1, 2, 3)[:: 1 + p.whole(b)],
    "index": lambda p, a, b, *_: p.of_rank(a, 1, 2, 3)[p.whole(b)],
    "roll": lambda p, a, b, *_: hf.roll(p.of_rank(a, 1, 2, 3), p.whole(b), axis=0),
    "expand": lambda p, a, b, *_: hf.broadcast_to(
        p.of_rank(a, 1), (_size(p, b), p.of_rank(a, 1).shape[0])
    ),
    "int multiply": lambda p, a, b, *_: p.whole(a) * p.whole(b) % 64,
    "int over int": lambda p, a, b, *_: p.whole(a) // p.whole(b),
    "int rest of int": lambda p, a, b, *_: p.whole(a) % p.whole(b),
    "least": lambda p, a, b, *_: min(p.whole(a), p.whole(b)),
    "repeat": lambda p, a, b, *_: hf.repeat(p.of_rank(a, 1), p.whole(b) % 3),
    "loop": lambda p, a, b, *_: hf.fori_loop(
        0, p.whole(b) % 5, lambda i, c: bounded(c + i), p.pick(a)
    ),
    "sequence": lambda p, a, b, *_: hf.scan(
        lambda c, _: (bounded(c + 1), c), p.pick(a), None, length=_size(p, b)
    )[1],
    "write": lambda p, a, b, c, _: _written(
        p.of_rank(a, 1, 2, 3).copy(), p.whole(b), c
    ),
}


def _written(x: Any, n: Any, k: int) -> Any:
    if k % 2:
        x[:n] = 7.0
    else:
        x[n:] += 1.0
    return x


STEPS: Final = PLAIN | ASKING


def program(steps: Sequence[tuple[str, tuple[int, ...]]]) -> Callable[..., Any]:
    """A function of `arguments` that returns the newest of what it computed."""

    def f(x: Any, y: Any, w: Any, n: Any, a: Any) -> Any:
        p = Pool([w, y, x], [w.shape[1], n, x.shape[0]], [a])
        for name, ns in steps:
            found = STEPS[name](p, *ns)
            kind = type(found)
            if hasattr(found, "ndim"):
                if found.ndim <= 3:
                    p.tensors.append(found)
            elif kind is float or kind is hopflow.symbolic.size.SymFloat:
                p.floats.append(found)
            else:
                p.ints.append(found)
        return p.tensors[3:][-4:], p.ints[-3:], p.floats[-2:]

    return f


# --- calls ----------------------------------------------------------------------------

sizes = st.tuples(
    *[st.integers(0, 6)] * 3,
    st.integers(-3, 6),
    st.sampled_from([0.0, -0.0, 1.0, -2.0, 3.0]),
)


def arguments(n: int, m: int, k: int, number: int, real: float) -> tuple[Any, ...]:
    x = np.arange(n, dtype=np.float32) % 5 - 2
    y = 3 - np.arange(m, dtype=np.float32) % 4
    w = np.arange(n * k, dtype=np.float32).reshape(n, k) % 7 - 3
    return (*map(hf.asarray, (x, y, w)), number, real)


def outcome(f: Callable[..., Any], call: tuple[Any, ...]) -> Any:
    """What a call gives, as data to compare."""
    try:
        tensors, ints, floats = f(*arguments(*call))
    except OWN_ERRORS:
        raise
    except (GuardError, CheckError):
        return "refused"
    except USER_ERRORS:
        return "error"
    found = [
        (np.asarray(t).dtype, np.asarray(t).shape, np.asarray(t).tolist())
        for t in tensors
    ]
    return found, [(type(n), n) for n in ints], [(type(v), repr(v)) for v in floats]


def steps(names: Sequence[str]) -> st.SearchStrategy[Any]:
    step = st.tuples(st.sampled_from(names), st.tuples(*[st.integers(0, 11)] * 4))
    return st.lists(step, min_size=1, max_size=7)


calls = st.lists(sizes, min_size=3, max_size=7)


GUARD: Final = re.compile(
    r"` at test_dynamic\.py:\d+(, called at test_dynamic\.py:\d+)* no longer holds"
)
FIRST: Final = "compiled, as no call had this structure"
READY: Final = "runs what has been compiled"


def variants(jitted: Any) -> int:
    return sum(len(family.all()) for family in jitted._families.values())


@pytest.mark.parametrize("dynamic", [None, True])
@given(body=steps([*STEPS]), given=calls)
def test_jit_means_the_function_and_compiles_for_a_reason(
    dynamic: Any, body: Any, given: Any
) -> None:
    f = program(body)
    jitted = hf.jit(f, dynamic=dynamic)
    unguarded = 0
    for call in given:
        before, why = variants(jitted), jitted.explain(*arguments(*call))
        assert outcome(jitted, call) == outcome(f, call), call
        if variants(jitted) > before:
            assert why != READY
            unguarded += not (why.startswith(FIRST) or GUARD.search(why))
    # Sizes may turn out one by one to be dynamic.
    assert unguarded <= (0 if dynamic else 3)
    before = variants(jitted)
    for call in given:
        assert outcome(jitted, call) == outcome(f, call), call
    assert variants(jitted) == before


@given(body=steps([*PLAIN]), given=calls)
def test_what_asks_nothing_is_traced_once(body: Any, given: Any) -> None:
    f = program(body)
    jitted = hf.jit(f, dynamic=True)
    for call in given:
        assert outcome(jitted, call) == outcome(f, call), call
    assert variants(jitted) == 1, jitted.explain(*arguments(*given[-1]))


@given(body=steps([*STEPS]), given=calls)
def test_a_symbolic_trace_is_the_function_or_says_that_it_is_not(
    body: Any, given: Any
) -> None:
    f = program(body)
    try:
        module = hf.trace(f, *arguments(*given[0]), mode="symbolic")
    except OWN_ERRORS:
        raise
    except USER_ERRORS:
        assert outcome(f, given[0]) == "error"
        return
    compiled = hf.jit(lambda *args: module(*args))
    for call in given:
        want = outcome(f, call)
        for run in (module, compiled):
            found = outcome(run, call)
            assert found in (want, "refused"), call
    assert outcome(module, given[0]) == outcome(f, given[0])
