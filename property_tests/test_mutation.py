"""Bodies that write, alias and close over mean the same however they are run.

A program is a tree of numbers (`trees`): what a step does is decided
while it runs. All of it is linear in the arguments, and of values that stay small: so
its derivative is a difference, and debug mode is the judge of that too.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from property_tests.trees import trees

import hopflow
from hopflow.errors import DerivativeError
from hopflow.testing.executions import EXECUTIONS, run_debug, run_dynamic, run_symbolic

hf: Any = hopflow
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("verified")]

X: Final = np.arange(12.0).reshape(3, 4)
Y: Final = np.array([8.0, -4.0, 16.0, 2.0])
OUTER: Final = np.arange(8.0).reshape(2, 4) * 4 - 1
FLAGS: Final = np.array([1, 0, 2, 1])
"""What decides branches and trips, and is never written."""

LARGEST: Final = 48

assert settings.default is not None
FEWER: Final = settings(max_examples=settings.default.max_examples // 6)
"""Each example is run in many ways."""


class Known(NamedTuple):
    """A tensor that a program has; `ours`: whether it may be written here."""

    tensor: Any
    ours: bool = True


class Scope:
    """What a body sees: the tensors of those around it, and its own."""

    def __init__(self, known: Sequence[Known], flags: Any) -> None:
        self.known = list(known)
        self.flags = flags

    def inner(self, *inputs: Any, ours: bool = True) -> "Scope":
        """That of a body with these inputs.

        Args:
            ours: Whether it may write what it closes over.
        """
        around = [k if ours else k._replace(ours=False) for k in self.known]
        return Scope([*around, *map(Known, inputs)], self.flags)

    def pick(self, n: int) -> Any:
        """A tensor; small numbers are the newest."""
        return self.known[-1 - n % len(self.known)].tensor

    def axes(self, n: int) -> Any:
        """A tensor with an axis, that has elements."""
        found = [k.tensor for k in self.known if k.tensor.ndim] or [self.pick(n)[None]]
        return found[-1 - n % len(found)]

    def flag(self, n: int) -> Any:
        return self.flags[n % len(FLAGS)]

    def add(self, tensor: Any, *, ours: bool = True) -> None:
        if tensor.ndim <= 4 and tensor.size <= LARGEST:
            self.known.append(Known(tensor, ours))


def fitted(y: Any, like: Any) -> Any:
    """What can be written to all of `like`."""
    if y.shape == like.shape or y.ndim == 0:
        return y
    return hf.reshape(y, like.shape) if y.size == like.size else hf.mean(y)


# --- steps ----------------------------------------------------------------------------

VIEWS: Final[list[Callable[[Any], Any]]] = [
    lambda x: x[1:] if x.shape[0] > 1 else x[:],
    lambda x: x[::-1],
    lambda x: x[..., ::2],
    lambda x: x[0],
    lambda x: hf.permute_dims(x, tuple(reversed(range(x.ndim)))),
    lambda x: hf.reshape(x, (-1,)),
    lambda x: x[:, None],
    lambda x: hf.reshape(x, (x.shape[0], 1, -1)),
    lambda x: hf.squeeze(x[-1:], axis=0),
    lambda x: hf.flip(x),
    lambda x: x[...],
]


def _view(s: Scope, ns: Sequence[int]) -> None:
    with_axes = [k for k in s.known if k.tensor.ndim]
    if not with_axes:
        return
    base = with_axes[-1 - ns[0] % len(with_axes)]
    s.add(VIEWS[ns[1] % len(VIEWS)](base.tensor), ours=base.ours)


def _read(s: Scope, ns: Sequence[int]) -> None:
    x = s.pick(ns[0])
    s.add((x + fitted(s.pick(ns[1]), x)) * 0.5)


def _write(s: Scope, ns: Sequence[int]) -> None:
    writable = [k.tensor for k in s.known if k.ours]
    if not writable:
        return
    x = writable[-1 - ns[0] % len(writable)]
    y = fitted(s.pick(ns[1]), x)
    if x.ndim == 0 or ns[2] % 9 < 2:
        if ns[2] % 2:
            x[...] = y
        else:
            x *= 0.5
            x += y * 0.5
        return
    n = x.shape[0]
    match ns[2] % 9:
        case 2:
            x[hf.reshape(hf.arange(x.size), x.shape) % 3 == 1] = hf.mean(y)
        case 3:
            x[1:] = x[:-1]
        case 4:
            x[::-1] = x
        case 5:
            x[s.flag(ns[3]) % n] = hf.mean(y)
        case 6:
            x[hf.asarray([n - 1, 0])] = hf.mean(y)
        case 7:
            x[0] -= hf.mean(y)
            x[0] *= 0.5
        case _:
            x[..., ::2] = x[..., :1]


# --- operators ------------------------------------------------------------------------

Body = Sequence[Any]


def _returned(s: Scope, body: Body, n: int) -> Any:
    """What a body returns after its steps: a value, or what it was given."""
    run(s, body)
    return s.pick(n)


def _called(s: Scope, ns: Sequence[int], body: Body) -> tuple[Any, tuple[Any, ...]]:
    """A function that returns a value, and its operands: none, one, or two, which may
    be one tensor, or a view and its base."""
    given = [s.known[-1 - n % len(s.known)] for n in ns[: ns[3] % 3]]

    def f(*tensors: Any) -> Any:
        inner = s.inner()
        for k, tensor in zip(given, tensors, strict=True):
            inner.add(tensor, ours=k.ours)
        return hf.mean(_returned(inner, body, ns[2]))

    return f, tuple(k.tensor for k in given)


def _cond(s: Scope, ns: Sequence[int], *bodies: Body) -> Any:
    branches = [_called(s, ns, body)[0] for body in bodies]
    return hf.cond(s.flag(ns[0]) > 0, *branches, _called(s, ns, [])[1])


def _switch(s: Scope, ns: Sequence[int], *bodies: Body) -> Any:
    branches = [_called(s, ns, body)[0] for body in (*bodies, [])]
    return hf.switch(s.flag(ns[0]), branches, _called(s, ns, [])[1])


def _carry(s: Scope, ns: Sequence[int], body: Body, *given: Any) -> tuple[Any, ...]:
    """The next carry, of two, after a step of a loop."""
    inner = s.inner(*given)
    y = _returned(inner, body, ns[2])
    return fitted(y, given[0]) + hf.zeros_like(given[0]), given[1]


def _fori(s: Scope, ns: Sequence[int], body: Body) -> Any:
    def step(_: Any, *carry: Any) -> Any:
        return _carry(s, ns, body, *carry)

    init = s.pick(ns[0]), s.pick(ns[1])
    return hf.fori_loop(0, s.flag(ns[3]), step, init)


def _while(s: Scope, ns: Sequence[int], body: Body) -> Any:
    def step(i: Any, *carry: Any) -> Any:
        return (i + 1, *_carry(s, ns, body, *carry))

    init = 0, s.pick(ns[0]), s.pick(ns[1])
    return hf.while_loop(lambda i, *_: i < s.flag(ns[3]), step, init)[1:]


def _scan(s: Scope, ns: Sequence[int], body: Body) -> Any:
    def step(carry: Any, x: Any) -> Any:
        inner = s.inner(*carry, x)
        y = _returned(inner, body, ns[2])
        return (fitted(y, carry[0]) + hf.zeros_like(carry[0]), carry[1]), (y, x)

    init = s.pick(ns[0]), s.pick(ns[1])
    carry, ys = hf.scan(step, init, s.axes(ns[3]), reverse=bool(ns[3] % 2))
    return *carry, *ys


def _each(transform: Callable[[Any], Any]) -> Callable[..., Any]:
    def apply(s: Scope, ns: Sequence[int], body: Body) -> Any:
        def f(x: Any) -> Any:
            return hf.mean(_returned(s.inner(x, ours=False), body, ns[2]))

        return transform(f)(s.axes(ns[0]))

    return apply


def _associative(s: Scope, ns: Sequence[int], body: Body) -> Any:
    def combine(a: Any, b: Any) -> Any:
        run(s.inner(a, b, ours=False), body[:2])
        return a * 0.0 + b * 1.0 if ns[1] % 2 else a + b

    return hf.associative_scan(combine, s.axes(ns[0])) * 0.125


def _call(transform: Callable[[Any], Any]) -> Callable[..., Any]:
    def apply(s: Scope, ns: Sequence[int], body: Body) -> Any:
        f, given = _called(s, ns, body)
        return transform(f)(*given)

    return apply


def _custom(with_rules: Callable[..., Any]) -> Callable[..., Any]:
    """A function with rules: it may write to its arguments, which are values, and may
    not close over what is differentiated."""

    def apply(s: Scope, ns: Sequence[int], body: Body) -> Any:
        def f(*tensors: Any) -> Any:
            own = Scope(list(map(Known, tensors)), s.flags)
            return hf.mean(_returned(own, body, 0))

        return with_rules(f)(*(s.pick(n) for n in ns[: 1 + ns[3] % 2]))

    return apply


def _with_jvp(f: Callable[..., Any]) -> Any:
    own = hf.custom_jvp(f)
    own.defjvp(lambda primals, tangents: hf.jvp(f, primals, tangents))
    return own


def _with_vjp(f: Callable[..., Any]) -> Any:
    own = hf.custom_vjp(f)
    own.defvjp(lambda *xs: (own(*xs), xs), lambda xs, ct: hf.vjp(f, *xs)[1](ct))
    return own


OPERATORS: Final[dict[str, Callable[..., Any]]] = {
    "cond": _cond,
    "switch": _switch,
    "fori": _fori,
    "while": _while,
    "scan": _scan,
    "map": _each(lambda f: lambda xs: hf.map(f, xs)),
    "vmap": _each(lambda f: hf.vmap(f)),
    "associative_scan": _associative,
    "invoke": _call(lambda f: lambda *xs: hf.invoke_subgraph(f, *xs)),
    "subgraph": _call(lambda f: hf.subgraph(f)),
    "checkpoint": _call(lambda f: hf.checkpoint(f)),
    "functionalize": _call(lambda f: hf.functionalize(f)),
    "jit": _call(lambda f: hf.jit(f)),
    "custom_jvp": _custom(_with_jvp),
    "custom_vjp": _custom(_with_vjp),
}
STEPS: Final = {"view": _view, "read": _read, "write": _write}


def run(s: Scope, body: Body) -> None:
    for kind, ns, *inner in body:
        if kind in STEPS:
            STEPS[kind](s, ns)
            continue
        found = OPERATORS[kind](s, ns, *inner)
        for value in found if isinstance(found, tuple) else (found,):
            s.add(value)


def program(body: Body, outer: Any) -> Callable[..., Any]:
    """A function of `X`, `Y` and `FLAGS` that closes over `outer`, if there is one."""
    around = [Known(hf.asarray(OUTER), False) if outer is None else Known(outer)]

    def f(x: Any, y: Any, flags: Any) -> Any:
        s = Scope([*around, Known(x), Known(y)], flags)
        run(s, body)
        return tuple(s.pick(k) + 0.0 for k in range(4))

    return f


programs = trees(["view", "read", "write", "write"], 3, 4, list(OPERATORS))


# --- properties -----------------------------------------------------------------------


def same(name: str, got: Sequence[Any], want: Sequence[Any]) -> None:
    for k, (a, b) in enumerate(zip(got, want, strict=True)):
        x, y = np.asarray(a), np.asarray(b)
        np.testing.assert_allclose(x, y, 1e-9, 1e-9, err_msg=f"{name}, {k}")


def outcome(run: Callable[..., Any], body: Body) -> list[Any]:
    """What a program returns, and what it leaves in the caller's tensors."""
    x, y, flags, outer = (hf.asarray(a.copy()) for a in (X, Y, FLAGS, OUTER))
    found = run(program(body, outer), x, y, flags)
    return [np.asarray(v) for v in (*found, x, y, outer)]


RUNS: Final[dict[str, Callable[..., Any]]] = {
    **{m.name: m.run for m in EXECUTIONS if m.name != "debug"},
    "symbolic": run_symbolic,
    "dynamic": run_dynamic,
    "functionalized": lambda f, *xs: hf.functionalize(f)(*xs),
    "jit of functionalized": lambda f, *xs: hf.jit(hf.functionalize(f))(*xs),
}


@FEWER
@given(programs)
def test_the_callers_tensors_hold_what_they_hold_in_plain_python(body: Any) -> None:
    want = outcome(run_debug, body)
    for name, way in RUNS.items():
        same(name, outcome(way, body), want)


def slopes(derivative: Callable[..., Any], body: Body) -> list[Any]:
    """What a derivative of a program gives, and what is left in a tensor that the
    program closes over; those that it is differentiated in are values."""
    x, y, flags, outer = (hf.asarray(a.copy()) for a in (X, Y, FLAGS, OUTER))
    f = program(body, outer)
    found = derivative(lambda x, y: f(x, y, flags), x, y)
    same("arguments", (x, y), (X, Y))
    return [*(np.asarray(v) for v in found), np.asarray(outer)]


STEPS_OF: Final = (np.cos(X), np.sin(Y))


def _total(f: Callable[..., Any]) -> Callable[..., Any]:
    """The results of `f`, weighed and summed up."""
    return lambda *xs: sum(hf.sum(v) * (k + 1) for k, v in enumerate(f(*xs)))


def _jvp(f: Callable[..., Any], *xs: Any) -> Any:
    return hf.jvp(_total(f), xs, tuple(map(hf.asarray, STEPS_OF)))


def _pulled(gradient: Callable[..., Any]) -> Callable[..., Any]:
    """What a gradient says of the steps."""

    def derivative(f: Callable[..., Any], *xs: Any) -> Any:
        value, slopes = gradient(_total(f))(*xs)
        steps = map(hf.asarray, STEPS_OF)
        return value, sum(hf.sum(s * d) for s, d in zip(slopes, steps, strict=True))

    return derivative


def _gradient(f: Callable[..., Any]) -> Any:
    return hf.value_and_grad(f, (0, 1))


DERIVATIVES: Final[dict[str, Callable[..., Any]]] = {
    "jvp": _jvp,
    "jvp in jit": lambda f, *xs: hf.jit(lambda *xs: _jvp(f, *xs))(*xs),
    "grad": _pulled(_gradient),
    "jit of grad": _pulled(lambda f: hf.jit(_gradient(f))),
    "grad of jit": _pulled(lambda f: _gradient(hf.jit(f))),
    "grad of functionalized": _pulled(lambda f: _gradient(hf.functionalize(f))),
    "functionalized grad": _pulled(lambda f: hf.functionalize(_gradient(f))),
}


def differences(body: Body) -> list[Any]:
    """What `slopes` are to be."""
    first, second = (
        slopes(lambda f, *_, at=at: (run_debug(_total(f), *map(hf.asarray, at)),), body)
        for at in ((X.copy(), Y.copy()), (X + STEPS_OF[0], Y + STEPS_OF[1]))
    )
    return [first[0], second[0] - first[0], first[1]]


@FEWER
@given(programs)
def test_derivatives_are_those_of_values(body: Any) -> None:
    want, text = differences(body), repr(body)
    for name, derivative in DERIVATIVES.items():
        try:
            found = slopes(derivative, body)
        except DerivativeError as error:  # forward, through rules for reverse ones
            if "custom_vjp" not in text or "reverse derivatives only" not in str(error):
                raise
            if not ("jvp" in name or "custom_jvp" in text):
                raise
            continue
        same(name, found, want)


EXAMPLES: Final = 3
BATCHES: Final[dict[str, Callable[..., Any]]] = {
    "vmap": lambda f: hf.vmap(f),
    "jit of vmap": lambda f: hf.jit(hf.vmap(f)),
    "vmap of jit": lambda f: hf.vmap(hf.jit(f)),
    "vmap of functionalized": lambda f: hf.vmap(hf.functionalize(f)),
    "map": lambda f: lambda *xs: hf.map(lambda xs: f(*xs), xs),
}


def _examples() -> list[Any]:
    rows = [np.stack([a + k for k in range(EXAMPLES)]) for a in (X, Y)]
    flags = np.stack([(FLAGS + k) % 3 for k in range(EXAMPLES)])
    return [hf.asarray(a) for a in (*rows, flags)]


def batched(transform: Callable[..., Any], body: Body) -> list[Any]:
    args = _examples()
    found = transform(program(body, None))(*args)
    same("arguments", args, _examples())
    return [np.asarray(v) for v in found]


def one_by_one(body: Body) -> list[Any]:
    """What `batched` is to be."""
    f = program(body, None)
    rows = [run_debug(f, *(v[k].copy() for v in _examples())) for k in range(EXAMPLES)]
    return [np.stack([np.asarray(r) for r in row]) for row in zip(*rows, strict=True)]


@FEWER
@given(programs)
def test_a_batch_is_its_examples(body: Any) -> None:
    want = one_by_one(body)
    for name, transform in BATCHES.items():
        same(name, batched(transform, body), want)
