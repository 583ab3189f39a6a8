"""What operations need of sizes that only a run knows, the run checks."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import hopflow
from hopflow import pytree
from hopflow.errors import CheckError, DataDependentError, ShapeCheckError, ShapeError
from hopflow.graph.verifier import verify
from hopflow.ops.deferred import match_size
from hopflow.symbolic.env import ShapeEnv

pytestmark = pytest.mark.slow

hf: Any = hopflow
Run = Callable[..., Any]

X = np.arange(6.0)
Y = 2 * X + 1
M = np.asarray([True, False, True, False, False, True])
K = np.asarray([False, True, True, False, True, False])
M4 = np.asarray([True, False, True, False, True, True])
Z = np.arange(24.0).reshape(6, 4)


def assigned(target: Any, key: Any, value: Any) -> Any:
    target = target.copy()
    target[key] = value
    return target


def added(target: Any, value: Any) -> Any:
    target = target.copy()
    target += value
    return target


PROGRAMS: dict[str, Run] = {
    "add a constant": lambda x, y, m, k, z: x[m] + hf.arange(3),
    "add to a constant": lambda x, y, m, k, z: hf.arange(3) - x[m],
    "add another": lambda x, y, m, k, z: x[m] + y[k],
    "repeat one": lambda x, y, m, k, z: x[x == 1] + hf.arange(3),
    "repeat columns": lambda x, y, m, k, z: z[x == 1] * hf.ones((5, 4)),
    "divide": lambda x, y, m, k, z: x[m] // y[k] + y[k] % y[k] ** x[m],
    "compare": lambda x, y, m, k, z: x[m] < y[k],
    "logic": lambda x, y, m, k, z: hf.logical_or(x[m] > 1, y[k] > 4),
    "where": lambda x, y, m, k, z: hf.where(x[m] > 1, x[m], y[k]),
    "matmul": lambda x, y, m, k, z: x[m] @ x[~m],
    "matmul of columns": lambda x, y, m, k, z: z[m].T @ z[k],
    "tensordot": lambda x, y, m, k, z: hf.tensordot(z[m], z[k], axes=((0,), (0,))),
    "vecdot": lambda x, y, m, k, z: hf.vecdot(x[m], y[k]),
    "solve": lambda x, y, m, k, z: hf.linalg.solve(z[m][:, :3] + hf.eye(3), y[k]),
    "inv": lambda x, y, m, k, z: hf.linalg.inv(z[m] @ z[m].T + hf.eye(3)),
    "cross": lambda x, y, m, k, z: hf.linalg.cross(x[m], y[k]),
    "reshape": lambda x, y, m, k, z: hf.reshape(x[hf.asarray(M4) & (x >= 0)], (-1, 2)),
    "reshape to numbers": lambda x, y, m, k, z: hf.reshape(z[m], (4, 3)),
    "squeeze": lambda x, y, m, k, z: hf.squeeze(x[x == 1], axis=0),
    "item": lambda x, y, m, k, z: x[x == 1].item(),
    "top_k of some": lambda x, y, m, k, z: hf.top_k(x[m], 2),
    "top_k of columns": lambda x, y, m, k, z: hf.top_k(z[m], 2, axis=0),
    "top_k of as many": lambda x, y, m, k, z: hf.top_k(y, hf.sum(m).item()),
    "tril": lambda x, y, m, k, z: hf.tril(z, k=hf.sum(m).item() - 2),
    "triu": lambda x, y, m, k, z: hf.triu(z[m], k=-hf.sum(m).item() + 2),
    "concat": lambda x, y, m, k, z: hf.concat([z[m], z[k]], axis=1),
    "stack": lambda x, y, m, k, z: hf.stack([x[m], y[k]], axis=1),
    "broadcast_to": lambda x, y, m, k, z: hf.broadcast_to(x[x == 1], y[k].shape),
    "broadcast_arrays": lambda x, y, m, k, z: hf.broadcast_arrays(x[m], y[k]),
    "a mask": lambda x, y, m, k, z: x[m][y[k] > 3],
    "index arrays": lambda x, y, m, k, z: z.T[hf.nonzero(m)[0] % 4, hf.nonzero(k)[0]],
    "assign": lambda x, y, m, k, z: assigned(x, m, y[k]),
    "assign to a slice": lambda x, y, m, k, z: assigned(x[m], slice(None), y[k]),
    "in place": lambda x, y, m, k, z: added(x[m], y[k]),
    "in place by one": lambda x, y, m, k, z: added(x[m], x[x == 1]),
    "take_along_axis": lambda x, y, m, k, z: hf.take_along_axis(
        z[m], hf.argsort(z[k], axis=1), axis=1
    ),
    "repeat": lambda x, y, m, k, z: hf.repeat(x[m], hf.astype(x[m], "int64")),
    "repeat by a list": lambda x, y, m, k, z: hf.repeat(x[m], [1, 0, 2]),
    "segment_sum": lambda x, y, m, k, z: hf.segment_sum(x[m], hf.nonzero(k)[0], 6),
    "dynamic_slice": lambda x, y, m, k, z: hf.dynamic_slice(x[m], (1,), (2,)),
    "update": lambda x, y, m, k, z: hf.dynamic_update_slice(x, y[k], (1,)),
    "max": lambda x, y, m, k, z: hf.max(x[m]),
    "argmin": lambda x, y, m, k, z: hf.argmin(x[m]),
    "norm of none": lambda x, y, m, k, z: hf.linalg.vector_norm(x[x < 0], ord=np.inf),
    "random bounds": lambda x, y, m, k, z: hf.random.uniform(
        hf.random.key(0), x[m].shape, "float64", 0 * y[k], x[m] + 1
    ),
    "random integers": lambda x, y, m, k, z: hf.random.randint(
        hf.random.key(0), x[m].shape, 0, hf.astype(y[k], "int64")
    ),
    "bernoulli": lambda x, y, m, k, z: hf.random.bernoulli(
        hf.random.key(0), x[m] / 9, (2, 3)
    ),
    "weights": lambda x, y, m, k, z: hf.random.choice(
        hf.random.key(0), x[m], (5,), p=y[k]
    ),
    "categorical": lambda x, y, m, k, z: hf.random.categorical(
        hf.random.key(0), z[m], shape=(2, y[k].shape[0])
    ),
    "jvp": lambda x, y, m, k, z: hf.jvp(lambda v: v * v, (x[m],), (y[k],)),
    "scan": lambda x, y, m, k, z: hf.scan(
        lambda c, v: (c + v[0] * v[1], c), hf.sum(x), (x[m], y[k])
    ),
    "scan of a length": lambda x, y, m, k, z: hf.scan(
        lambda c, v: (c + v, c), hf.sum(x), x[m], length=3
    ),
    "map": lambda x, y, m, k, z: hf.map(lambda v: v[0] - v[1], (x[m], y[k])),
    "associative_scan": lambda x, y, m, k, z: hf.associative_scan(
        lambda a, b: (a[0] + b[0], a[1] * b[1]), (x[m], y[k])
    ),
    "vmap": lambda x, y, m, k, z: hf.vmap(lambda a, b: a * b)(x[m], y[k]),
    "carry": lambda x, y, m, k, z: hf.fori_loop(0, 3, lambda i, c: y[k] - c, x[m]),
    "carry of a number": lambda x, y, m, k, z: hf.fori_loop(
        0, 3, lambda i, c: x[x > 0] - c, y[:5]
    ),
    "subgraph": lambda x, y, m, k, z: hf.subgraph(lambda a, b: a + b)(x[m], y[k]),
}

ARGS = (X, Y, M, K, Z)


def tensors() -> list[Any]:
    return [hf.asarray(a) for a in ARGS]


def within(f: Run, place: str) -> Run:
    """`f`, whose sum a body computes."""

    def total(*args: Any) -> Any:
        leaves = pytree.flatten(f(*args))[0]
        return sum(hf.sum(hf.astype(hf.asarray(v), "float64")) for v in leaves)

    def looped(x: Any, *rest: Any) -> Any:
        body = lambda i, c: c + total(x + 0 * i, *rest)  # noqa: E731
        return hf.fori_loop(0, 2, body, hf.sum(x) * 0)

    def chosen(x: Any, *rest: Any) -> Any:
        return hf.cond(x[1] > 0, lambda: total(x, *rest), lambda: -hf.sum(x))

    return {"plain": total, "loop": looped, "cond": chosen}[place]


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("place", ["plain", "loop", "cond"])
@pytest.mark.usefixtures("verified")
def test_compiled_programs_are_those_of_python(name: str, place: str) -> None:
    f = within(PROGRAMS[name], place)
    with hf.debug():
        expected = f(*tensors())
    np.testing.assert_allclose(f(*tensors()), expected)
    np.testing.assert_allclose(hf.jit(f)(*tensors()), expected)
    np.testing.assert_allclose(hf.jit(f, dynamic=True)(*tensors()), expected)


@pytest.mark.parametrize("name", PROGRAMS)
def test_results_have_the_shapes_of_python(name: str) -> None:
    expected = pytree.flatten(PROGRAMS[name](*tensors()))[0]
    found = pytree.flatten(hf.jit(PROGRAMS[name])(*tensors()))[0]
    for a, b in zip(found, expected, strict=True):
        ours, theirs = np.asarray(a), np.asarray(b)
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        np.testing.assert_allclose(ours, theirs, 1e-12)


@pytest.mark.parametrize(
    "name",
    [
        "add a constant",
        "add another",
        "repeat one",
        "matmul",
        "where",
        "concat",
        "scan",
        "top_k of some",
        "triu",
    ],
)
@pytest.mark.parametrize("place", ["plain", "loop", "cond"])
@pytest.mark.usefixtures("verified")
def test_derivatives_and_batches_agree(name: str, place: str) -> None:
    f = within(PROGRAMS[name], place)
    x, *rest = tensors()
    with hf.debug():
        expected = hf.grad(f)(x, *rest)
    np.testing.assert_allclose(hf.jit(hf.grad(f))(x, *rest), expected)
    np.testing.assert_allclose(hf.grad(hf.jit(f))(x, *rest), expected)
    rows = hf.stack([x, x])
    batched = hf.vmap(f, in_dims=(0, None, None, None, None))
    np.testing.assert_allclose(hf.jit(batched)(rows, *rest), [f(x, *rest)] * 2)


TRAPS: dict[str, tuple[Run, str]] = {
    "add": (
        lambda x, m: x[m] + hf.arange(2),
        r"add: the sizes along axis -1 must agree, or the one be 1 "
        r"\(test_deferred_sizes.py:\d+\): `u0 == 2` does not hold, it is `3 == 2` "
        r"\(`u0` is made by `x\[m\]` \(test_deferred_sizes.py:\d+\)\)",
    ),
    "two": (
        lambda x, m: x[m] + x[x == 1],
        r"neither of two sizes that only the run knows is taken to be 1 \(where one "
        r"may be, use `hf.broadcast_to\(x, y.shape\)`\).*it is `3 == 1`",
    ),
    "reshape": (lambda x, m: hf.reshape(x[m], (-1, 2)), "reshape.*it is `3 == 2`"),
    "matmul": (lambda x, m: x[m] @ x[x > 1], "matmul.* must be equal.*`3 == 4`"),
    "empty": (
        lambda x, m: hf.max(x[x > 9]),
        "max: axis 0 must have elements.*`0 >= 1`",
    ),
    "none to add": (lambda x, m: hf.logsumexp(x[x > 9]), "logsumexp: axis 0 must have"),
    "no column": (
        lambda x, m: hf.linalg.matrix_norm(hf.expand_dims(x[x > 9], axis=0), ord=1),
        "max: axis -?[0-9] must have elements",
    ),
    "argmax": (lambda x, m: hf.argmax(x[x > 9]), "argmax: axis 0 must have elements"),
    "window": (
        lambda x, m: hf.dynamic_slice(x[m], (0,), (4,)),
        "dynamic_slice: the window must fit axis 0.*`3 >= 4`",
    ),
    "top_k": (
        lambda x, m: hf.top_k(x[m], 4)[0],
        "top_k: axis 0 must have `k` elements.*`3 >= 4`",
    ),
    "scan": (
        lambda x, m: hf.scan(lambda c, v: (c, v[0]), 0, (x[m], x[x > 1]))[1],
        "scan: the sizes along axis -1 must be equal.*`3 == 4`",
    ),
    "carry": (
        lambda x, m: hf.fori_loop(0, 2, lambda i, c: x[x > c[0]], x[m]),
        r"fori_loop: `carry`: the sizes along axis -1 must be equal",
    ),
    "an unread result": (
        lambda x, m: (x[m] + hf.arange(2), x)[1],
        "must agree, or the one be 1",
    ),
}


@pytest.mark.parametrize("name", TRAPS)
def test_sizes_that_do_not_fit_stop_the_program(name: str) -> None:
    f, match = TRAPS[name]
    with pytest.raises(ShapeCheckError, match=match) as error:
        hf.jit(f)(hf.asarray(X), hf.asarray(M))
    assert isinstance(error.value, CheckError)
    assert isinstance(error.value, ShapeError)
    module = hf.trace(f, hf.asarray(X), hf.asarray(M), mode="symbolic")
    verify(module.graph)
    with pytest.raises(ShapeCheckError):
        module(hf.asarray(X), hf.asarray(M))


def test_a_branch_that_is_not_taken_checks_nothing() -> None:
    def branches(x: Any, m: Any) -> Any:
        return hf.cond(x[0] > 0, lambda: hf.sum(x[m] + hf.arange(2)), lambda: hf.sum(x))

    f = hf.jit(branches)
    assert f(hf.asarray(X), hf.asarray(M)).item() == 15
    with pytest.raises(ShapeCheckError, match="`3 == 2`"):
        f(hf.asarray(X + 1), hf.asarray(M))


def test_what_is_known_not_to_fit_is_an_error_of_the_trace() -> None:
    with pytest.raises(ShapeError, match="must be equal, and are u0 and 7"):
        hf.jit(lambda x: hf.reshape(x[x > 1], (7,)))(hf.asarray(X))
    with pytest.raises(ShapeError, match="max: axis 0 must have elements, and it is"):
        hf.jit(checked_empty)(hf.asarray(X))
    with pytest.raises(ShapeError, match=r"match_size: axis 0 of f64\[6\] has not 5"):
        match_size(hf.asarray(X), axis=0, size=5)


def checked_empty(x: Any) -> Any:
    y = x[x > 9]
    hf.check(y.shape[0] == 0, "none")
    return hf.max(y)


def test_later_questions_are_answered_by_what_was_checked() -> None:
    def added_up(x: Any, m: Any, k: Any) -> Any:
        a, b = x[m], x[k]
        c = a + b
        return c if a.shape[0] == b.shape[0] else -c

    f = hf.jit(added_up)
    x, m = hf.asarray(X), hf.asarray(M)
    assert f(x, m, hf.asarray(K)).tolist() == [1, 4, 9]
    with pytest.raises(ShapeCheckError, match=r"`u0 == u1` does.* `3 == 4`"):
        f(x, m, hf.asarray(M4))


def test_a_check_of_a_size_that_an_operator_makes_stays() -> None:
    def f(x: Any) -> Any:
        y = hf.cond(x[0] > 0, lambda: x[x > 3], lambda: x[x > 1])
        hf.check(y.shape[0] == 1, "one")
        return y

    with pytest.raises(CheckError, match=r"one.*it is `4 == 1`"):
        hf.jit(f)(hf.asarray(X))
    assert hf.jit(f)(hf.asarray(X[:3])).tolist() == [2]


def test_a_fact_of_the_trace_is_no_proof_of_a_type() -> None:
    env = ShapeEnv()
    n, m = env.unbacked(), env.unbacked()
    env.assume(n == m)
    assert n == m
    assert not n.same(m)


def test_a_tensor_that_may_be_repeated_is_not_written() -> None:
    def f(x: Any) -> Any:
        y = hf.broadcast_to(x[x > 1], (4,))
        y[0] = 7.0
        return y

    with pytest.raises(hf.errors.ReadOnlyError, match="broadcast along axis 0"):
        hf.jit(f)(hf.asarray(X))


def test_a_reshape_writes_through_a_checked_size() -> None:
    def f(x: Any, m: Any) -> Any:
        y = x[m]
        z = hf.reshape(y, (3, 1))
        z[0] = 7.0
        return y

    assert hf.jit(f)(hf.asarray(X), hf.asarray(M)).tolist() == [7, 2, 5]


# --- decisions of Python --------------------------------------------------------------


def decided(x: Any, mask: Any) -> Any:
    kept = x[mask]
    return kept if kept.shape[0] > 2 else -kept


def test_a_decision_names_the_number_its_origin_and_the_check() -> None:
    with pytest.raises(DataDependentError) as error:
        hf.jit(decided)(hf.asarray(X), hf.asarray(M))
    text = str(error.value)
    assert text.startswith("cannot decide `u0 >= 3` (test_deferred_sizes.py:")
    assert "`u0` is made by `x[mask]` (test_deferred_sizes.py:" in text
    assert '`hf.check(kept.shape[0] > 2, "...")`' in text
    assert '`hf.check(kept.shape[0] <= 2, "...")`' in text


@pytest.mark.parametrize(
    "f",
    [
        lambda x, m: list(range(x[m].shape[0])),
        lambda x, m: hf.stack(hf.unstack(x[m])),
        lambda x, m: int(hf.sum(x).astype("int64").item()),
    ],
)
def test_a_python_number_is_a_decision(f: Run) -> None:
    with pytest.raises(DataDependentError, match=r"as a Python number.* is made by"):
        hf.jit(f)(hf.asarray(X), hf.asarray(M))


def test_a_promise_of_a_float_or_a_number_is_one_that_can_be_written() -> None:
    def larger(x: Any) -> Any:
        return max(hf.sum(x).item(), 2.0) * x

    def repeated(x: Any) -> Any:
        for _ in range(x[0].item()):
            x = x + 1
        return x

    for f, promise in (
        (larger, "hf.sum(x).item() < 2.0"),
        (repeated, "x[0].item() == 4"),
    ):
        x = hf.ones(2, dtype="float32" if f is larger else "int64")
        with pytest.raises(DataDependentError, match="is made by") as error:
            hf.jit(f)(x)
        assert f'`hf.check({promise}, "...")`' in str(error.value)
    with pytest.raises(DataDependentError) as error:
        hf.jit(lambda x, m: list(range(x[m].shape[0])))(hf.asarray(X), hf.asarray(M))
    assert "u0 == 4" not in str(error.value)


@pytest.mark.parametrize(
    ("f", "legend"),
    [
        (lambda x, y: x + y, "`s0` is `x.shape[0]`, here 3; `s1` is `y.shape[0]`, he"),
        (lambda x, y: hf.reshape(x, (x.shape[0] + 1,)), "`s0` is `x.shape[0]`, here 3"),
        (
            lambda x, y: hf.cond(x[0] > 0, lambda: x + y, lambda: x),
            "`s0` is `x.shape[0]`, here 3",
        ),
    ],
)
def test_an_error_says_what_its_symbols_are(f: Any, legend: str) -> None:
    with pytest.raises(ShapeError) as error:
        hf.jit(f, dynamic=True)(hf.ones(3), hf.ones(4))
    notes = error.value.__notes__
    assert sum(note.startswith(legend) for note in notes) == 1


def test_a_promise_speaks_in_the_names_of_the_user() -> None:
    def rows(x: Any, y: Any) -> Any:
        hf.check(x.shape[0] > y.shape[1], "not enough rows")
        return hf.sum(x)

    f = hf.jit(rows, dynamic=True)
    f(hf.ones((4, 2)), hf.ones((1, 3)))
    match = r"not enough rows \(.*\): `x.shape\[0\] > y.shape\[1\]` .* it is `2 > 3`"
    with pytest.raises(CheckError, match=match):
        f(hf.ones((2, 2)), hf.ones((1, 3)))
