"""Reverse mode of loops with few inputs: by their Jacobian, computed as they run."""

from typing import Any

import numpy as np
import pytest

import hopflow as hf
from hopflow.autograd.preaccumulation import MOST_COLUMNS
from hopflow.errors import LoopLimitError
from hopflow.graph.rewriting import eliminate_dead_code
from hopflow.testing.executions import NAMES, RUNNERS

pytestmark = pytest.mark.slow

each_execution = pytest.mark.parametrize("run", RUNNERS, ids=NAMES)
FLOATS = ("float16", "bfloat16", "float32", "float64")


def loops_in(f: Any, *args: Any) -> list[str]:
    """Return the names of the loops in a graph and in all of its subgraphs."""
    graph = hf.trace(f, *args).graph
    eliminate_dead_code(graph)
    return [n.op.name for n in graph.walk() if n.graphs]


def both(f: Any) -> tuple[Any, Any]:
    """Return `f`, a function of a reverse mode and arguments, in two modes."""
    return lambda *a: f("auto", *a), lambda *a: f("recompute", *a)


def powers(mode: str, x: Any, y: Any, n: Any) -> Any:
    """Scalars that are the first carry, that steps read, and both."""

    def step(i: Any, c: Any, d: Any) -> Any:
        return i + 1, c * x + d * 0.25, hf.where(i % 2 == 0, hf.sin(d), d * y)

    first = (0, x, y)
    _, c, d = hf.while_loop(lambda i, *_: i < n, step, first, reverse_mode=mode)
    return c * d + c


def of_arrays(mode: str, x: Any, y: Any, n: Any) -> Any:
    """Carries that are arrays of which no element is differentiated at first."""

    def step(i: Any, c: Any, none: Any) -> Any:
        return i + 1, hf.tanh(c * x)[::-1] + y, none

    first = (0, hf.zeros((3, 2), dtype=x.dtype), {"none": None})
    carry = hf.while_loop(lambda i, *_: i < n, step, first, reverse_mode=mode)[1]
    return hf.sum(carry * hf.asarray([1.0, 2.0], dtype=x.dtype))


def nested(mode: str, x: Any, y: Any, n: Any) -> Any:
    """A loop in a loop; both have few inputs."""

    def inner(i: Any, c: Any) -> Any:
        step = lambda k, z: (k + 1, z * 0.5 + x)  # noqa: E731
        return hf.while_loop(lambda k, _: k < i, step, (0, c), reverse_mode=mode)[1]

    def step(i: Any, c: Any) -> Any:
        return i + 1, inner(i, c) * y

    return hf.while_loop(lambda i, _: i < n, step, (0, y), reverse_mode=mode)[1]


def of_elements(mode: str, x: Any, y: Any, n: Any) -> Any:
    """Small arrays, whose elements are differentiated one by one."""

    def step(i: Any, c: Any) -> Any:
        return i + 1, hf.tanh(c @ pair) + c[::-1] * pair[:, 0]

    pair = hf.reshape(hf.stack([x, y]), (2, 1)) * hf.ones((1, 2), dtype=x.dtype)
    first = (0, hf.stack([y, x * x]))
    goes_on = lambda i, _: i < n  # noqa: E731
    return hf.sum(hf.while_loop(goes_on, step, first, reverse_mode=mode)[1] ** 2)


def of_rows(mode: str, x: Any, y: Any, n: Any) -> Any:
    """An array of two axes, of which each element is a column."""

    def step(i: Any, c: Any) -> Any:
        return i + 1, c * 0.5 + hf.sin(rows[1:] * c.T)

    rows = hf.stack([x, y])[:, None] * 1.0
    first = (0, hf.ones((1, 1), dtype=x.dtype))
    goes_on = lambda i, _: i < n  # noqa: E731
    return hf.sum(hf.while_loop(goes_on, step, first, reverse_mode=mode)[1])


PROGRAMS = (powers, of_arrays, nested, of_elements, of_rows)


@each_execution
@pytest.mark.parametrize("n", [0, 1, 5])
@pytest.mark.parametrize("program", PROGRAMS)
def test_gradients_are_those_of_the_backward_pass(
    run: Any, program: Any, n: int
) -> None:
    by_jacobian, backward = (hf.grad(f, argnums=(0, 1)) for f in both(program))
    args = (hf.asarray(0.75), hf.asarray(-1.25), n)
    got, want = run(by_jacobian, *args), run(backward, *args)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_gradients_have_the_dtype_of_what_is_differentiated(
    program: Any, dtype: str
) -> None:
    by_jacobian, backward = (hf.grad(f, argnums=(0, 1)) for f in both(program))
    args = (hf.asarray(0.75, dtype=dtype), hf.asarray(-1.25, dtype=dtype), 3)
    rtol = {"float16": 1e-2, "bfloat16": 6e-2}.get(dtype, 1e-5)
    for a, b in zip(by_jacobian(*args), backward(*args), strict=True):
        assert a.dtype == b.dtype == hf.asarray(0, dtype=dtype).dtype
        got, want = (np.asarray(t.astype("float64")) for t in (a, b))
        np.testing.assert_allclose(got, want, rtol=rtol)


@pytest.mark.parametrize("n", [0, 4])
@pytest.mark.parametrize("program", PROGRAMS)
def test_derivatives_of_second_order_and_of_examples(program: Any, n: int) -> None:
    def of(f: Any) -> Any:
        def each(x: Any, y: Any) -> Any:
            return f(x, y, n)

        hessians = hf.vmap(hf.hessian(each, argnums=(0, 1)))
        total = lambda *xs: hf.sum(hf.vmap(each)(*xs))  # noqa: E731
        return hessians, hf.grad(total, argnums=(0, 1))

    x, y = np.array([0.75, 0.3, -0.5]), np.array([-1.25, 0.5, 1.5])
    for by_jacobian, backward in zip(*map(of, both(program)), strict=True):
        got, want = (np.asarray(f(x, y)) for f in (by_jacobian, backward))
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize(("size", "loops"), [(4, 1), (5, 2), (0, 2)])
def test_a_small_array_has_a_column_for_each_element(size: int, loops: int) -> None:
    def loop(x: Any) -> Any:
        step = lambda i, y: (i + 1, hf.sin(y) * x)  # noqa: E731
        carry = (0, hf.ones((size,), dtype=x.dtype))
        return hf.sum(hf.while_loop(lambda i, _: i < 3, step, carry)[1])

    x = np.linspace(0.5, 1.0, size)
    assert len(loops_in(hf.grad(loop), x)) == loops
    want = np.zeros(size)
    for k in range(size):
        eps = np.zeros(size)
        eps[k] = 1e-6
        want[k] = (loop(x + eps).item() - loop(x - eps).item()) / 2e-6
    np.testing.assert_allclose(hf.grad(loop)(x), want, rtol=1e-6)


def test_a_loop_of_few_scalars_keeps_nothing_of_its_steps() -> None:
    gradient = hf.grad(both(powers)[0], argnums=(0, 1))
    assert loops_in(gradient, 0.5, 0.25, 3) == ["while_loop"]
    gradient = hf.grad(both(powers)[1], argnums=(0, 1))
    assert loops_in(gradient, 0.5, 0.25, 3) == ["while_loop", "scan"]


def test_examples_with_numbers_of_steps_of_their_own_keep_nothing() -> None:
    def total(x: Any, n: Any) -> Any:
        return hf.sum(hf.vmap(lambda x, n: powers("auto", x, x, n))(x, n))

    graph = hf.trace(hf.grad(total), np.ones(4), np.arange(4)).graph
    [body] = [n.params["body"] for n in graph.nodes if n.op.name == "map"]
    assert [n.op.name for n in body.walk() if n.graphs] == ["while_loop"]


@pytest.mark.parametrize("more", [0, 1])
def test_more_scalars_have_a_backward_pass(more: int) -> None:
    def loop(*xs: Any) -> Any:
        def step(i: Any, y: Any) -> Any:
            for x in xs:
                y = y * 0.5 + x
            return i + 1, y

        return hf.while_loop(lambda i, _: i < 3, step, (0, 1.0))[1]

    count = MOST_COLUMNS + more
    gradient = hf.grad(loop, argnums=tuple(range(count)))
    assert ("scan" in loops_in(gradient, *[0.5] * count)) == bool(more)
    by_finite_differences = [0.5 ** (count - 1 - k) for k in range(count)]
    one_step = sum(0.5 ** (count * k) for k in range(3))
    want = [one_step * slope for slope in by_finite_differences]
    np.testing.assert_allclose(gradient(*[0.5] * count), want, rtol=1e-6)


def test_one_value_in_several_places_is_one_column() -> None:
    def loop(x: Any) -> Any:
        def step(i: Any, *carry: Any) -> Any:
            return i + 1, *[c * x for c in carry]

        return sum(hf.while_loop(lambda i, *_: i < 3, step, (0, *[x] * 6))[1:])

    assert loops_in(hf.grad(loop), 0.5) == ["while_loop"]
    np.testing.assert_allclose(hf.grad(loop)(0.5), 6 * 4 * 0.5**3)


def test_custom_rules_are_used() -> None:
    @hf.custom_vjp
    def clipped(x: Any) -> Any:
        return x * 2

    clipped.defvjp(lambda x: (x * 2, None), lambda _, g: (hf.minimum(g, 0.125),))

    def loop(x: Any) -> Any:
        return hf.while_loop(
            lambda i, _: i < 3, lambda i, y: (i + 1, clipped(y)), (0, x)
        )

    assert hf.grad(lambda x: loop(x)[1])(1.0).item() == 0.125


def test_callbacks_are_called_once_a_step() -> None:
    calls: list[float] = []

    def loop(x: Any, z: Any) -> Any:
        def step(i: Any, y: Any) -> Any:
            hf.callback(lambda y: calls.append(float(y)), None, y)
            return i + 1, y * x + z

        return hf.while_loop(lambda i, _: i < 3, step, (0, 1.0))[1]

    hf.grad(loop, argnums=(0, 1))(2.0, 0.5)
    assert calls == [1.0, 2.5, 5.5]


def test_the_limit_of_steps_holds() -> None:
    def loop(x: Any) -> Any:
        step = lambda i, y: (i + 1, y * x)  # noqa: E731
        return hf.while_loop(lambda i, _: i < 9, step, (0, x), max_steps=5)[1]

    for gradient in (hf.grad(loop), hf.jit(hf.grad(loop))):
        with pytest.raises(LoopLimitError):
            gradient(0.5)


@pytest.mark.parametrize("narrow", ["float32", "bfloat16", "float16"])
def test_numbers_of_several_dtypes_have_a_backward_pass(narrow: str) -> None:
    """A column would have fewer bits than the number that it is multiplied by."""

    def loop(x: Any, mode: str = "auto") -> Any:
        step = lambda i, v: (i + 1, (v * 0.5 + x).astype(narrow))  # noqa: E731
        first = (0, hf.asarray(1.0, dtype=narrow))
        y = hf.while_loop(lambda i, _: i < 3, step, first, reverse_mode=mode)[1]
        return y * y

    x = hf.asarray(0.3, dtype="float64")
    value, push = hf.linearize(loop, x)
    assert push(x).dtype == value.dtype == hf.asarray(0.0, dtype=narrow).dtype
    kept = lambda x: loop(x, "recompute")  # noqa: E731
    for derivative in (hf.grad, hf.hessian):
        assert derivative(loop)(x).item() == derivative(kept)(x).item()
    branch = lambda x: hf.cond(x > 0, lambda: loop(x), lambda: loop(x) * 2)  # noqa: E731
    assert hf.grad(branch)(x).item() == hf.grad(kept)(x).item()


def test_float16_has_a_backward_pass() -> None:
    """Its range is small: a column that is infinite times zero is no number."""

    def loop(x: Any) -> Any:
        step = lambda i, v: (i + 1, v * x)  # noqa: E731
        return hf.while_loop(lambda i, _: i < 6, step, (0, x * 0 + 1e-4))[1] * 1e-3

    got = hf.grad(loop)(hf.asarray(10.0, dtype="float16"))
    assert got.item() == pytest.approx(0.06, rel=1e-2)


def test_linearize_and_vjp_take_any_tangent() -> None:
    f = lambda x, y: powers("auto", x, y, 4)  # noqa: E731
    x, y = hf.asarray(0.75, dtype="float64"), hf.asarray(-1.25, dtype="float64")
    _, push = hf.linearize(f, x, y)
    _, pull = hf.vjp(f, x, y)
    slopes = pull(hf.asarray(1.0, dtype="float64"))
    for dx, dy in ((1.0, 0.0), (0.0, 1.0), (-2.0, 0.5)):
        want = slopes[0].item() * dx + slopes[1].item() * dy
        tangents = (hf.asarray(d, dtype="float64") for d in (dx, dy))
        assert push(*tangents).item() == pytest.approx(want, rel=1e-12)
