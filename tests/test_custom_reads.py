"""`custom_jvp` and `custom_vjp`: what rules read of outside, and give in batches."""

from functools import partial
from typing import Any

import numpy as np
import pytest

import hopflow as hf
from hopflow.errors import (
    DerivativeError,
    MutationError,
)
from hopflow.testing.requires import requires

pytestmark = pytest.mark.slow

JVP: Any = hf.custom_jvp
VJP: Any = hf.custom_vjp


class Weighed(hf.HigherOrderOp):
    """With a tensor of its own."""

    def __init__(self, weight: Any, slope: Any) -> None:
        self.weight, self.slope = weight, slope

    def debug(self, x: Any) -> Any:
        return x * self.weight


class Pushed(Weighed):
    def jvp(self, primals: Any, tangents: Any) -> Any:
        return self(*primals), self.slope(tangents[0])


class Pulled(Weighed):
    def vjp(self, x: Any) -> Any:
        return x * self.weight, lambda ct: (self.slope(ct),)


# --- what rules read of outside -------------------------------------------------------

TABLE = np.array([1.0, 2.0, 3.0], np.float32)  # whose sum, 6, each rule multiplies by


def reading(kind: Any, w: Any) -> Any:
    """w * x, with a slope that is ten times that, found of what rules close over."""

    def slope(t: Any) -> Any:
        data = hf.asarray([0.5, 1.5])
        return hf.cond(w > 0, lambda: 10 * t * w, lambda: t) * hf.sum(TABLE * data[1])

    return with_slope(kind, w, lambda t: slope(t) / 9)


def with_slope(kind: Any, w: Any, slope: Any) -> Any:
    """w * x, whose rules give `slope` of a tangent or a cotangent."""
    if issubclass(kind, Weighed):
        return kind(w, slope)
    f = kind(lambda x: x * w)
    if kind is JVP:
        f.defjvp(lambda p, t: (f(*p), slope(t[0])))
    else:
        f.defvjp(lambda x: (f(x), w), lambda kept, ct: (slope(ct) * kept / w,))
    return f


READERS: dict[str, Any] = {
    "tape": lambda f, x, w: f(w)(x),
    "cond": lambda f, x, w: hf.cond(x > 0, f(w), lambda x: x, (x,)),
    "jit": lambda f, x, w: hf.jit(lambda x, w: f(w)(x))(x, hf.stop_gradient(w)),
    "jit, closed": lambda f, x, w: hf.jit(f(w))(x),
    "of the body": lambda f, x, w: hf.cond(
        x > 0, lambda x, w: f(hf.stop_gradient(w * 1))(x), lambda x, w: x, (x, w)
    ),
    "scan": lambda f, x, w: (
        hf.scan(lambda c, u: (c + f(u)(x), None), 0.0, hf.stack([w, 0 * w + 1]))[0]
        - f(0 * w + 1)(x)
    ),
    "fori_loop": lambda f, x, w: hf.fori_loop(
        0, 1, lambda i, c: f(w + hf.astype(i, x.dtype))(c), x
    ),
    "checkpoints": lambda f, x, w: hf.while_loop(
        lambda i, _: i < 1,
        lambda i, c: (i + 1, f(w + hf.astype(i, x.dtype))(c)),
        (0, x),
        reverse_mode="checkpoint",
    )[1],
    "map": lambda f, x, w: hf.map(lambda u: f(u)(x), hf.stack([w]))[0],
    "vmap": lambda f, x, w: hf.vmap(lambda x, w: f(w)(x))(hf.stack([x]), hf.stack([w]))[
        0
    ],
    "vmap of the read": lambda f, x, w: (
        hf.sum(hf.vmap(lambda u: f(u)(x))(hf.stack([w, 2 * w]))) / 3
    ),
    "subgraph": lambda f, x, w: hf.invoke_subgraph(f(w), x),
    "three deep": lambda f, x, w: hf.cond(
        x > 0,
        lambda: hf.fori_loop(
            0, 1, lambda i, c: hf.map(f(w), hf.stack([c]))[0], hf.sum(x)
        ),
        lambda: x,
    ),
}


@pytest.mark.parametrize("kind", [JVP, VJP, Pushed, Pulled])
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("wrap", [lambda f: f, lambda f: hf.jit(f, dynamic=True)])
def test_rules_read_what_they_close_over(kind: Any, reader: str, wrap: Any) -> None:
    x, w = hf.asarray(2.0), hf.asarray(3.0)

    def f(x: Any) -> Any:
        return READERS[reader](lambda w: reading(kind, w), x, w)

    def second(x: Any) -> Any:
        return hf.grad(lambda x: x * hf.grad(f)(x))(x)

    for derivative in (hf.grad(f), second):
        assert wrap(derivative)(x).item() == pytest.approx(30.0, rel=1e-5)
    if kind in (JVP, Pushed):
        assert hf.jvp(f, (x,), (x,))[1].item() == pytest.approx(60.0)


@pytest.mark.parametrize("kind", [JVP, VJP, Pushed, Pulled])
@pytest.mark.parametrize("reader", ["tape", "cond", "vmap", "jit, closed"])
def test_rules_know_sizes_that_no_operand_has(kind: Any, reader: str) -> None:
    def f(x: Any, table: Any) -> Any:
        n = table.shape[0]
        own = with_slope(kind, 1.0, lambda t: t * (n * 2) + hf.sum(hf.ones(n)) * t)
        return READERS[reader](lambda w: own, x, hf.asarray(1.0))

    within = hf.jit(lambda x, table: hf.grad(f)(x, table), dynamic=True)
    without = hf.grad(hf.jit(f, dynamic=True))
    for n in (3, 5):
        for derivative in (within, without):
            assert derivative(hf.asarray(2.0), hf.ones(n)).item() == 3 * n


@pytest.mark.parametrize("kind", [JVP, VJP, Pushed, Pulled])
@pytest.mark.parametrize("made", [hf.zeros, lambda n: hf.asarray([0.0] * n)])
@pytest.mark.parametrize(
    "wrap", [lambda f: f, hf.jit, lambda f: hf.jit(hf.subgraph(f))]
)
def test_rules_write_to_what_they_make_alone(kind: Any, made: Any, wrap: Any) -> None:
    def f(x: Any, *, outside: bool) -> Any:
        kept = made(2)

        def slope(t: Any) -> Any:
            seen = kept if outside else made(2)
            seen[0] = 2.0
            return t * seen[0]

        return hf.sum(with_slope(kind, 1.0, slope)(x))

    for derive in (lambda f: hf.grad(wrap(f)), lambda f: wrap(hf.grad(f))):
        assert derive(partial(f, outside=False))(hf.ones(2)).tolist() == [2.0, 2.0]
        with pytest.raises(MutationError, match=r"writes to a .*tensor f32"):
            derive(partial(f, outside=True))(hf.ones(2))


@pytest.mark.parametrize("kind", [JVP, VJP, Pushed, Pulled])
@pytest.mark.parametrize("reader", ["tape", "cond", "scan", "checkpoints", "vmap"])
def test_what_rules_make_is_made_anew_in_each_run(kind: Any, reader: str) -> None:
    def slope(t: Any) -> Any:
        written, alike = hf.asarray([0.0]), hf.asarray([0.0])
        written += 1.0
        return t * written[0] * (1.0 + alike[0])

    def f(x: Any) -> Any:
        own = with_slope(kind, 1.0, slope)
        return READERS[reader](lambda w: own, x, hf.asarray(1.0))

    x = hf.asarray(2.0)
    for derivative in (hf.grad(f), hf.grad(lambda x: x * hf.grad(f)(x))):
        assert derivative(x).item() == hf.jit(derivative)(x).item() == 1.0


def test_a_shared_body_has_the_rules_of_its_call() -> None:
    def scaled(by: Any) -> Any:
        f = JVP(lambda x: x)
        f.defjvp(lambda p, t: (p[0], t[0] * by))
        return f

    def f(x: Any) -> Any:
        return sum(hf.invoke_subgraph(scaled(by), x) for by in (2.0, 3.0, W, 2 * W))

    for g in (hf.grad(f), hf.jit(hf.grad(f))):
        assert g(1.0).item() == 5 + 3 * W.item()


W = hf.asarray(7.0)


@pytest.mark.parametrize("kind", [JVP, VJP])
def test_what_rules_read_may_not_be_what_is_differentiated(kind: Any) -> None:
    def f(x: Any) -> Any:
        return hf.cond(x > 0, lambda x: reading(kind, x)(x), lambda x: x, (x,))

    with pytest.raises(DerivativeError, match="closes over a tensor that depends on"):
        hf.grad(f)(1.0)


# --- functions that are checked against their rules -----------------------------------


@pytest.mark.parametrize(
    "look",
    [lambda x: float(x[0]) > 0, lambda x: np.asarray(x)[0] > 0, lambda x: {}[x > 0]],
)
def test_a_check_of_rules_stops_nothing(look: Any) -> None:
    calls = []

    def f(x: Any) -> Any:
        calls.append(look(x))
        return x * x

    g = VJP(f)
    g.defvjp(lambda x: (x * x, x), lambda x, ct: (2 * ct * x,))
    for _ in range(3):
        assert hf.grad(lambda x: hf.sum(g(x)))(hf.ones(2)).tolist() == [2, 2]
    assert len(calls) <= 1


@pytest.mark.parametrize("wrap", [lambda f: f, lambda f: hf.jit(f, dynamic=True)])
@pytest.mark.parametrize(
    ("dims", "want"),
    [
        ((0, 0), ([2, 4, 6], [0, 0, 0])),
        ((0, None), ([4, 4, 4], [0, 0, 0])),
        ((None, 0), ([12, 12, 12], [0, 0, 0])),
        (({"a": 0, "b": None}, 0), ([2, 4, 6], [0, 0, 0])),
    ],
)
def test_batched_rules_have_trees_integers_and_what_is_no_tensor(
    wrap: Any, dims: Any, want: Any
) -> None:
    f = VJP(lambda p, n: {"r": p["a"] * n, "n": n})
    f.defvjp(
        lambda p, n: (f(p, n), (n, {"name": "twice", "by": 2})),
        lambda kept, ct: ({"a": ct["r"] * kept[0] * kept[1]["by"], "b": None}, None),
    )
    p = {"a": hf.ones(3), "b": hf.ones(3)}
    n = hf.asarray([1, 2, 3]) if dims[1] == 0 else hf.asarray(2)
    found = wrap(hf.grad(lambda p: hf.sum(hf.vmap(f, dims)(p, n)["r"])))(p)
    assert (found["a"].tolist(), found["b"].tolist()) == want


def test_a_cotangent_that_no_example_decides_is_summed() -> None:
    f = VJP(lambda x, w: x * w)
    f.defvjp(lambda x, w: (x * w, None), lambda _, ct: (ct, 1.0))
    for n in (0, 3):
        grad = hf.grad(lambda w, n=n: hf.sum(hf.vmap(f, (0, None))(hf.ones(n), w)))
        assert grad(2.0).item() == hf.jit(grad)(2.0).item() == n


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_rules_read_what_a_graph_is_given(mode: str) -> None:
    x, w = hf.asarray([1.0, 2.0]), hf.asarray(3.0)
    module = hf.trace(lambda x, w: hf.sum(reading(VJP, w)(x)), x, w, mode=mode)
    assert hf.grad(module)(x, hf.asarray(5.0)).tolist() == [50.0, 50.0]


@pytest.mark.parametrize("kind", [JVP, VJP])
def test_rules_read_what_was_there_at_the_call(kind: Any) -> None:
    def f(x: Any) -> Any:
        w = hf.ones(2) * x.shape[0]
        g = reading(kind, w[1, ...])
        y = g(x)
        w[1] = 100.0
        return hf.sum(y + g(x))

    x = hf.ones(3)
    assert hf.grad(hf.jit(f))(x).tolist() == [1030.0] * 3
    within = hf.grad(lambda x: hf.cond(x[0] > 0, f, lambda x: x[0], (x,)))
    assert within(x).tolist() == [1030.0] * 3


# --- against JAX ----------------------------------------------------------------------


def nested(lib: Any, kind: str) -> Any:
    """A function with rules that calls another one in its body and in its rules, whose
    slopes are wrong on purpose."""

    def f(x: Any, y: Any) -> Any:
        return lib.sin(x) * y

    def g(x: Any, y: Any) -> Any:
        return inner(x * y, y) * x

    def doubled(x: Any, y: Any) -> Any:
        return 2 * g(x, y)

    inner, outer = getattr(lib, kind)(f), getattr(lib, kind)(g)
    if kind == "custom_jvp":
        inner.defjvp(lambda p, t: (inner(*p), 3 * lib.cos(p[0]) * p[1] * t[0] + t[1]))
        outer.defjvp(lambda p, t: lib.jvp(doubled, p, t))
    else:
        inner.defvjp(
            lambda x, y: (inner(x, y), (x, y)),
            lambda kept, ct: (3 * lib.cos(kept[0]) * kept[1] * ct, ct),
        )
        outer.defvjp(
            lambda x, y: (outer(x, y), (x, y)),
            lambda kept, ct: lib.vjp(doubled, *kept)[1](ct),
        )
    return outer


@requires("jax")
@pytest.mark.parametrize("kind", ["custom_jvp", "custom_vjp"])
def test_functions_with_rules_in_each_other_are_those_of_jax(kind: str) -> None:
    import jax

    class Jax:
        sin, cos, sum = jax.numpy.sin, jax.numpy.cos, jax.numpy.sum
        custom_jvp, custom_vjp, jvp, vjp = (
            *(jax.custom_jvp, jax.custom_vjp),
            *(jax.jvp, jax.vjp),
        )
        vmap, grad, cond, scan = jax.vmap, jax.grad, jax.lax.cond, jax.lax.scan

    def derivative(lib: Any) -> Any:
        f = nested(lib, kind)

        def chosen(x: Any, y: Any) -> Any:
            operands = (x, y) if lib is Jax else ((x, y),)
            return lib.cond(x > 0, f, lambda x, y: x * y, *operands)

        def total(x: Any, y: Any) -> Any:
            first = lib.scan(lambda c, z: (f(c, z), None), x[0], y)[0]
            some = lib.vmap(f, (0, None))(x, y[0]) * lib.vmap(f, (None, 0))(x[0], y)
            return first + lib.sum(some * lib.vmap(chosen)(x, y))

        return lib.grad(total, (0, 1))

    x, y = np.array([0.3, -0.7, 1.1]), np.array([1.5, -0.5, 0.8])
    with jax.enable_x64(True):
        want = jax.jit(derivative(Jax))(x, y)
    for ours, theirs in zip(derivative(hf)(x, y), want, strict=True):
        np.testing.assert_allclose(np.asarray(ours), theirs, rtol=1e-6)
