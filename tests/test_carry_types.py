"""The types of a carry settle, in however many steps, in every operator and mode."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any, Final

import numpy as np
import pytest

import hopflow as hf
from hopflow.errors import CarryTypeError

Body = Callable[..., tuple[Any, ...]]
Y: Final = np.array([1.0, 2.0])


def whiled(body: Body, carry: tuple[Any, ...], **options: Any) -> Any:
    found = hf.while_loop(
        lambda i, *_: i < 3, lambda i, *c: (i + 1, *body(*c)), (0, *carry), **options
    )
    return found[1:]


def nested(body: Body, carry: tuple[Any, ...]) -> Any:
    def outer(_: Any, *c: Any) -> Any:
        return hf.fori_loop(0, 1, lambda _, *d: body(*d), c)

    return hf.fori_loop(0, 3, outer, carry)


def in_a_branch(body: Body, carry: tuple[Any, ...]) -> Any:
    def run(*c: Any) -> Any:
        return hf.fori_loop(0, 3, lambda _, *d: body(*d), (*carry[:-1], c[-1]))

    return hf.cond(hf.sum(carry[-1]) > 0, run, run, carry)


OPERATORS: Final[dict[str, Callable[[Body, tuple[Any, ...]], Any]]] = {
    "while_loop": whiled,
    "fori_loop": lambda body, c: hf.fori_loop(0, 3, lambda _, *d: body(*d), c),
    "scan": lambda body, c: hf.scan(lambda d, _: (body(*d), None), c, hf.zeros((3,)))[
        0
    ],
    "checkpoint": lambda body, c: whiled(body, c, reverse_mode="checkpoint"),
    "nested": nested,
    "cond": in_a_branch,
}


def debugged(f: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        with hf.debug():
            return f(*args)

    return run


MODES: Final[dict[str, Callable[..., Any]]] = {
    "eager": lambda f: f,
    "debug": debugged,
    "jit": hf.jit,
    "trace": lambda f: lambda *args: hf.trace(f, *args)(*args),
    "functionalize": hf.functionalize,
}


def shifted(*carry: Any) -> tuple[Any, ...]:
    """Each leaf takes the type of the next one: of n leaves the types settle in n."""
    return *(a + b for a, b in pairwise(carry)), carry[-1]


def steps(t: Any, h: Any, y: Any) -> tuple[Any, ...]:
    return t + h, h * y.max(), y


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("operator", OPERATORS)
def test_a_type_reaches_the_leaf_that_is_farthest_from_it(
    operator: str, mode: str
) -> None:
    found = MODES[mode](lambda y: OPERATORS[operator](steps, (0.0, 0.3, y)))(
        hf.asarray(Y)
    )
    assert [x.dtype for x in found] == [hf.float64] * 3
    np.testing.assert_allclose(found[0], 0.3 * (1 + 2 + 4), rtol=1e-15)
    np.testing.assert_allclose(found[1], 0.3 * 8, rtol=1e-15)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "int8", "float32"])
def test_types_settle_in_as_many_steps_as_there_are_leaves(
    operator: str, mode: str, dtype: str
) -> None:
    first = (0, 1, 0, 0) if dtype == "int8" else (0, 1, 0.0, 0)
    found = MODES[mode](lambda y: OPERATORS[operator](shifted, (*first, y)))(
        hf.asarray(1, dtype=dtype)
    )
    wanted = [0, 1, 0, 0, 1]
    for _ in range(3):
        wanted = list(shifted(*wanted))
    assert [x.tolist() for x in found] == wanted
    assert {x.dtype for x in found[2:]} == {hf.asarray(1, dtype=dtype).dtype}


@pytest.mark.parametrize("transform", ["grad", "jvp", "vmap"])
@pytest.mark.parametrize("operator", OPERATORS)
def test_types_settle_under_transforms(operator: str, transform: str) -> None:
    def f(y: Any) -> Any:
        return OPERATORS[operator](steps, (0.0, 0.3, y))[0]

    y = hf.asarray(Y)
    if transform == "vmap":
        found: Any = hf.vmap(f)(hf.asarray(np.stack([Y, 2 * Y])))
        np.testing.assert_allclose(found, [0.3 * 7, 0.3 * 21], rtol=1e-15)
    elif transform == "jvp":
        found = hf.jvp(f, (y,), (hf.ones(2, dtype=hf.float64),))[1]
        np.testing.assert_allclose(found, 0.3 * (1 + 2 * 2), rtol=1e-15)
    else:
        found = hf.jit(hf.grad(f))(y)
        np.testing.assert_allclose(found, [0, 0.3 * (1 + 2 * 2)], rtol=1e-15)
    assert found.dtype == hf.float64


@pytest.mark.parametrize("mode", MODES)
def test_a_body_is_traced_as_often_as_the_types_move(mode: str) -> None:
    count = 0

    def body(_: Any, *carry: Any) -> Any:
        nonlocal count
        count += 1
        return shifted(*carry)

    MODES[mode](lambda y: hf.fori_loop(0, 1, body, (0.0, 0.0, 0.0, y)))(hf.ones(()))
    # In debug mode, once more for the step.
    assert count == 4 + (mode == "debug")


def test_a_body_that_cannot_be_traced_settles_as_it_runs() -> None:
    def body(_: Any, t: Any, h: Any, y: Any) -> Any:
        return steps(t, h, y) if float(t) < 100 else (t, h, y)

    with hf.debug():
        found = hf.fori_loop(0, 3, body, (0.0, 0.25, hf.asarray(Y)))
    assert [x.dtype for x in found] == [hf.float64] * 3
    assert found[0].item() == 0.25 * 7


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("operator", ["while_loop", "fori_loop", "scan", "nested"])
def test_a_strong_type_does_not_move(operator: str, mode: str) -> None:
    start = hf.asarray(0.0, dtype="float32")
    run = MODES[mode](lambda y: OPERATORS[operator](steps, (start, 0.3, y)))
    with pytest.raises(CarryTypeError, match=r"in f32\[\], out f64\[\]"):
        run(hf.asarray(Y))
