"""`hf.functionalize`: what a function writes, its callers see when it has returned."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import hopflow
from hopflow.errors import ArgumentTypeError, MutationError, ReadOnlyError
from hopflow.graph.verifier import verify

pytestmark = pytest.mark.slow

hf: Any = hopflow
X = np.arange(12, dtype=np.float32).reshape(3, 4)


def functionalized(f: Callable[..., Any]) -> Callable[..., Any]:
    return hf.functionalize(f)  # type: ignore[no-any-return]


KEYS = {
    "element": lambda x: x.__setitem__((1, 2), 9.0),
    "slice": lambda x: x.__setitem__(slice(1, None), 9.0),
    "steps": lambda x: x.__setitem__((..., slice(None, None, 2)), 9.0),
    "negative steps": lambda x: x.__setitem__(slice(None, None, -1), x * 3),
    "mask": lambda x: x.__setitem__(x > 5, 0.5),
    "mask, of a tensor": lambda x: x.__setitem__(x > 5, x[0, 0] * 3),
    "indices": lambda x: x.__setitem__(hf.asarray([1, 0]), x[:2] + 1),
    "by a tensor": lambda x: x.__setitem__(hf.asarray(1), x[0] * 2),
    "overlap": lambda x: x.__setitem__(slice(1, None), x[:-1]),
    "backwards": lambda x: x.__setitem__(slice(None), x[::-1]),
}


def _in_place(name: str, other: Any = 2) -> Callable[[Any], Any]:
    return lambda x: getattr(x, f"__i{name}__")(other)


IN_PLACE = {
    name: _in_place(name)
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
}
WRITES: dict[str, Callable[[Any], Any]] = {**KEYS, **IN_PLACE}
VIEWS = {
    "none": lambda x: x,
    "slice": lambda x: x[1:, :3],
    "steps": lambda x: x[::-1, ::2],
    "transpose": lambda x: x.T[::2],
    "reshape": lambda x: x.reshape((2, 6)),
    "reshape of a slice": lambda x: x[1:].reshape((4, 2)),
    "squeeze": lambda x: hf.squeeze(x[:, :1, None], axis=2),
    "expand": lambda x: hf.expand_dims(x, axis=1)[:, 0],
    "views of views": lambda x: x.T[1:][::-1].T[::2],
    "swapped": lambda x: hf.swapaxes(hf.flip(x, axis=1), 0, 1)[:2],
}


def writing(view: Any, write: Any) -> Callable[[Any], Any]:
    """Writes to a view between reads of it, of its base and of another view."""

    def f(x: Any) -> Any:
        base, other = x, x[::-1]
        part = view(base)
        before = hf.sum(other * other) + part
        write(part)
        other -= 1
        return before, part * 2, hf.sum(base), other + 0

    return f


# The ways to call a function so that all writes are made when it has returned.
FORMS: dict[str, Callable[[Any], Any]] = {
    "itself": hf.functionalize,
    "twice": lambda f: hf.functionalize(hf.functionalize(f)),
    "traced": lambda f: lambda x: hf.trace(hf.functionalize(f), x)(x),
    "of a trace": lambda f: lambda x: hf.functionalize(hf.trace(f, x))(x),
    "in jit": lambda f: hf.jit(hf.functionalize(f)),
    "of jit": lambda f: hf.functionalize(hf.jit(f)),
    "dynamic": lambda f: hf.jit(hf.functionalize(f), dynamic=True),
    "symbolic": lambda f: (
        lambda x: hf.trace(hf.functionalize(f), x, mode="symbolic")(x)
    ),
    "in a body": lambda f: (
        lambda x: hf.cond(hf.sum(x) > 0, hf.functionalize(f), f, (x,))
    ),
}


def outcome(f: Any) -> Any:
    x = hf.asarray(X.copy())
    found = f(x)
    return [np.asarray(a).tolist() for a in (*found, x)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("view", ["none", "views of views"])
def test_every_write_is_made(view: str, write: str, form: str) -> None:
    f = writing(VIEWS[view], WRITES[write])
    assert outcome(FORMS[form](f)) == outcome(f)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("view", VIEWS)
def test_through_every_view(view: str, form: str) -> None:
    f = writing(VIEWS[view], KEYS["mask, of a tensor"])
    assert outcome(FORMS[form](f)) == outcome(f)


@pytest.mark.parametrize("name", ["and", "or", "xor", "lshift", "rshift", "mod"])
def test_in_place_operations_of_integers(name: str) -> None:
    f = writing(VIEWS["steps"], _in_place(name))

    def outcome(f: Any) -> Any:
        x = hf.asarray(X.astype(np.int32))
        return [np.asarray(a).tolist() for a in (*f(x), x)]

    assert outcome(hf.functionalize(f)) == outcome(f)


def test_in_place_matmul() -> None:
    def f(x: Any) -> Any:
        x @= hf.ones((4, 4))
        return (x,)

    assert outcome(hf.functionalize(f)) == outcome(f)


def test_a_graph_has_no_write_and_is_that_of_the_function() -> None:
    f = writing(VIEWS["views of views"], KEYS["mask"])
    module = hf.trace(hf.functionalize(f), hf.asarray(X))
    verify(module.graph)
    assert {n.op for n in module.graph.nodes} <= {
        n.op for n in hf.trace(f, hf.asarray(X)).graph.nodes
    }


# --- with other transforms ------------------------------------------------------------


def loss(x: Any) -> Any:
    y = x * x
    y[1:] += y[:-1] * x[0]
    y.T[0] = 1.0
    return hf.sum(y * x)


@pytest.mark.parametrize("name", ["grad", "jacfwd", "hessian"])
def test_derivatives_of_it_and_it_of_derivatives(name: str) -> None:
    transform = getattr(hf, name)
    x = hf.asarray(X)
    want = np.asarray(transform(loss)(x))
    for f in (
        transform(hf.functionalize(loss)),
        hf.functionalize(transform(loss)),
        hf.jit(transform(hf.functionalize(loss))),
        hf.functionalize(hf.jit(transform(loss))),
    ):
        np.testing.assert_allclose(np.asarray(f(x)), want, rtol=1e-6)


def test_of_a_batch_and_in_a_batch() -> None:
    rows = hf.asarray(np.stack([X, X + 1]))
    want = np.stack([np.asarray(loss(row)) for row in rows])
    for f in (
        hf.vmap(hf.functionalize(loss)),
        hf.functionalize(hf.vmap(loss)),
        hf.vmap(hf.functionalize(hf.jit(loss))),
    ):
        np.testing.assert_allclose(np.asarray(f(rows)), want, rtol=1e-6)


def test_a_jvp_within() -> None:
    def f(x: Any) -> Any:
        value, slope = hf.jvp(loss, (x,), (hf.ones_like(x),))
        x[0] = value
        return (slope,)

    assert outcome(hf.functionalize(f)) == outcome(f)


# --- what reaches the caller ----------------------------------------------------------


def test_tensors_of_enclosing_functions_are_written() -> None:
    outer = hf.asarray(X.copy())

    def f(y: Any) -> Any:
        outer[1:] = outer[:-1] + y
        return hf.sum(outer)

    want = np.concatenate([X[:1], X[:-1] + 1])
    assert float(hf.functionalize(f)(hf.asarray(1.0))) == want.sum()
    np.testing.assert_array_equal(np.asarray(outer), want)


def test_arrays_are_written_and_what_is_no_tensor_passes() -> None:
    array = X.copy()

    @functionalized
    def f(state: Any, *, flag: bool, n: int) -> Any:
        state["x"][0] = n
        return "done", flag, n, state["x"].shape

    assert f({"x": array}, flag=True, n=3) == ("done", True, 3, (3, 4))
    np.testing.assert_array_equal(array[0], 3)


def test_results_are_what_they_would_be() -> None:
    x = hf.asarray(X.copy())
    same, view, new = hf.functionalize(lambda x: (x, x.T[1:], x + 1))(x)
    assert same is x
    view[0] = -1.0
    np.testing.assert_array_equal(np.asarray(x)[:, 1], -1)
    new += 100
    assert float(hf.max(x)) == 11


def test_a_result_that_is_a_written_view_of_an_argument() -> None:
    x = hf.asarray(X.copy())

    @functionalized
    def f(x: Any) -> Any:
        row = x[1]
        x += 1
        return row

    row = f(x)
    np.testing.assert_array_equal(np.asarray(row), X[1] + 1)
    row[...] = 0
    np.testing.assert_array_equal(np.asarray(x)[1], 0)


@pytest.mark.parametrize(
    "cut", [lambda x: (x, x), lambda x: (x[:2], x[1:]), lambda x: (x[1], x)]
)
def test_arguments_that_share_memory(cut: Any) -> None:
    def f(a: Any, b: Any) -> Any:
        before = hf.sum(b * b)
        a += 1
        b[0] = before
        return hf.sum(a), b * 2

    def outcome(f: Any) -> Any:
        x = hf.asarray(X.copy())
        return [np.asarray(v).tolist() for v in (*f(*cut(x)), x)]

    assert outcome(hf.functionalize(f)) == outcome(f)


def test_nothing_is_written_if_the_function_raises() -> None:
    x = hf.asarray(X.copy())

    @functionalized
    def f(x: Any) -> None:
        x += 1
        raise KeyError

    with pytest.raises(KeyError):
        f(x)
    np.testing.assert_array_equal(np.asarray(x), X)


def test_a_body_may_look_at_values() -> None:
    @functionalized
    def f(x: Any) -> Any:
        while x[0] < 5:
            x *= 2
        return int(x[0]), x[x > 7]

    assert f(hf.asarray([1, 3]))[0] == 8


# --- what is refused ------------------------------------------------------------------


def test_a_broadcast_is_refused() -> None:
    def f(x: Any) -> None:
        view = hf.broadcast_to(x[0], (3, 4))
        view[1] = 0.0

    for form in (f, *(form(f) for form in FORMS.values())):
        with pytest.raises(ReadOnlyError, match=r"copy of it: `x = x.copy\(\)`"):
            form(hf.asarray(X.copy()))


def test_read_only_memory_is_refused_at_the_write() -> None:
    array = X.copy()
    array.flags.writeable = False
    with pytest.raises(ReadOnlyError, match="imported read-only"):
        hf.functionalize(lambda x: x.__setitem__(0, 1.0))(array)


def test_a_batched_function_may_not_write_what_it_closes_over() -> None:
    total = hf.zeros(())
    f = hf.functionalize(lambda x: total.__iadd__(x))
    for run in (hf.vmap(f), lambda xs: hf.map(f, xs)):
        with pytest.raises(MutationError, match="writes to a captured tensor"):
            run(hf.ones((3,)))
    with hf.debug(), pytest.raises(MutationError, match="writes to a captured tensor"):
        hf.map(f, hf.ones((3,)))
    assert float(total) == 0


def test_what_is_no_function() -> None:
    with pytest.raises(ArgumentTypeError, match="functionalize: `f` must be"):
        hf.functionalize(3)
