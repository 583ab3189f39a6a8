"""`custom_jvp`, `custom_vjp` and `stop_gradient`: rules of users, wherever they run."""

from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest

import hopflow as hf
from hopflow.bind import using
from hopflow.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    DerivativeError,
    DTypeError,
    MutationError,
    ResultTypeError,
    RuleTypeError,
    ShapeError,
    StructureError,
)
from hopflow.tensor import Eager

pytestmark = pytest.mark.slow

JVP: Any = hf.custom_jvp
VJP: Any = hf.custom_vjp


# The rules say that the derivative in x is ten times what it is.
def value(x: Any, y: Any) -> Any:
    return hf.sin(x) * y


def forward_kind() -> Any:
    f = JVP(value)

    def rule(primals: Any, tangents: Any) -> Any:
        (x, y), (tx, ty) = primals, tangents
        return f(x, y), 10 * hf.cos(x) * tx * y + hf.sin(x) * ty

    f.defjvp(rule)
    return f


def reverse_kind() -> Any:
    f = VJP(value)

    def forward(x: Any, y: Any) -> Any:
        return value(x, y), {"x": x, "y": y, "name": "residuals", "count": 1}

    def backward(kept: Any, ct: Any) -> Any:
        assert (kept["name"], kept["count"]) == ("residuals", 1)
        return 10 * hf.cos(kept["x"]) * ct * kept["y"], hf.sin(kept["x"]) * ct

    f.defvjp(forward, backward)
    return f


def simple_kind() -> Any:
    f = JVP(value)
    f.defjvps(
        lambda t, out, x, y: 10 * hf.cos(x) * t * y, lambda t, out, x, y: hf.sin(x) * t
    )
    return f


KINDS = {"jvp": forward_kind(), "jvps": simple_kind(), "vjp": reverse_kind()}
WRAPS: dict[str, Any] = {
    "eager": lambda f: hf.grad(f, (0, 1)),
    "jit": lambda f: hf.jit(hf.grad(f, (0, 1))),
    "of jit": lambda f: hf.grad(hf.jit(f), (0, 1)),
    "cond": lambda f: hf.grad(
        lambda x, y: hf.cond(x > 0, f, lambda x, y: x + y, (x, y)), (0, 1)
    ),
    "map": lambda f: hf.grad(
        lambda x, y: hf.sum(hf.map(lambda z: f(z, y), hf.stack([x]))), (0, 1)
    ),
    "scan": lambda f: hf.jit(
        hf.grad(
            lambda x, y: hf.scan(lambda c, z: (c + f(z, y), c), 0.0, hf.stack([x]))[0],
            (0, 1),
        )
    ),
    "subgraph": lambda f: hf.grad(lambda x, y: hf.invoke_subgraph(f, x, y), (0, 1)),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrap", WRAPS)
def test_rules_are_what_is_differentiated(kind: str, wrap: str) -> None:
    dx, dy = WRAPS[wrap](KINDS[kind])(0.5, 2.0)
    assert dx.item() == pytest.approx(20 * np.cos(0.5), rel=1e-5)
    assert dy.item() == pytest.approx(np.sin(0.5), rel=1e-5)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrap", [lambda f: f, hf.jit], ids=["eager", "jit"])
def test_the_function_is_itself_and_rules_have_derivatives(
    kind: str, wrap: Any
) -> None:
    f = KINDS[kind]
    assert wrap(f)(0.5, y=2.0).item() == pytest.approx(2 * np.sin(0.5), rel=1e-6)
    second = wrap(hf.grad(hf.grad(f)))(0.5, 2.0)
    assert second.item() == pytest.approx(-20 * np.sin(0.5), rel=1e-5)
    over = wrap(lambda x: hf.jvp(hf.grad(f), (x, 2.0), (1.0, 0.0))[1])(0.5)
    assert over.item() == pytest.approx(-20 * np.sin(0.5), rel=1e-5)


@pytest.mark.parametrize("wrap", [lambda f: f, hf.jit], ids=["eager", "jit"])
def test_a_rule_computes_apart_what_no_tangent_reaches(wrap: Any) -> None:
    w = hf.asarray(2.0)

    def f(x: Any) -> Any:
        def step(c: Any, _: Any) -> Any:
            return c * w, None

        return x * hf.scan(step, w, None, length=2)[0] * hf.sin(w), w

    g = hf.custom_jvp(f)
    g.defjvp(lambda primals, tangents: hf.jvp(f, primals, tangents))
    _, pull = hf.vjp(g, 3.0)
    assert pull((1.0, 1.0))[0].item() == pytest.approx(8 * np.sin(2.0))
    (value, known), dx = wrap(lambda x: (g(x), hf.grad(lambda x: g(x)[0])(x)))(3.0)
    assert value.item() == pytest.approx(24 * np.sin(2.0), rel=1e-6)
    assert dx.item() == pytest.approx(8 * np.sin(2.0), rel=1e-6)
    assert known.item() == 2


def test_forward_mode() -> None:
    f = KINDS["jvp"]
    want = 20 * np.cos(0.5)
    for g in (f, hf.jit(f), lambda x, y: hf.cond(x > 0, f, f, (x, y))):
        assert hf.jvp(g, (0.5, 2.0), (1.0, 0.0))[1].item() == pytest.approx(want)
    with pytest.raises(DerivativeError, match="`value` has rules for reverse"):
        hf.jvp(KINDS["vjp"], (0.5, 2.0), (1.0, 0.0))
    with pytest.raises(DerivativeError, match="`value` has rules for reverse"):
        hf.linearize(KINDS["vjp"], 0.5, 2.0)


def in_its_own_rule() -> Any:
    f = VJP(lambda x: 2 * hf.sin(x))
    f.defvjp(lambda x: (f(x), x), lambda x, ct: (ct * 2 * hf.cos(x),))
    return f


@pytest.mark.parametrize(
    "second",
    [
        lambda f, x: hf.hessian(f)(x),
        lambda f, x: hf.jit(hf.hessian(lambda x: hf.vmap(f)(hf.stack([x]))[0]))(x),
        lambda f, x: hf.jvp(lambda x: hf.linearize(f, x)[1](x), (x,), (x,)),
        lambda f, x: hf.vmap(lambda x: hf.linearize(f, x)[1](x))(hf.stack([x])),
        lambda f, x: hf.jit(lambda x: hf.linearize(f, x)[1](x))(x),
    ],
)
def test_a_function_with_reverse_rules_may_not_be_pushed_through(second: Any) -> None:
    f, x = in_its_own_rule(), hf.asarray(0.5)
    assert hf.jacrev(hf.jacrev(f))(x).item() == pytest.approx(-2 * np.sin(0.5))
    with pytest.raises(DerivativeError, match="has rules for reverse"):
        second(f, x)


def test_python_may_look_at_values() -> None:
    f = JVP(lambda x: x if x > 0 else -x)
    f.defjvp(lambda p, t: (f(*p), t[0] if p[0] > 0 else 5 * t[0]))
    assert hf.grad(f)(-1.0).item() == 5.0
    assert hf.grad(hf.grad(lambda x: f(x) * x))(-1.0).item() == 10.0


def test_trees_static_arguments_and_none() -> None:
    f = VJP(lambda scale, p, n: ({"r": p["a"] * scale(p["b"])}, n), nondiff_argnums=[0])
    f.defvjp(
        lambda scale, p, n: (f(scale, p, n), (p["a"], n)),
        lambda scale, kept, ct: ({"a": scale(ct[0]["r"]), "b": None}, None),
    )
    p = {"a": hf.asarray([1.0, 2.0]), "b": hf.asarray([3.0, 4.0])}

    def loss(p: Any, n: Any) -> Any:
        return hf.sum(f(hf.exp, p, n)[0]["r"])

    for g in (hf.grad(loss), hf.jit(hf.grad(loss))):
        found = g(p, hf.asarray(3))
        np.testing.assert_allclose(np.asarray(found["a"]), np.exp([1, 1]), rtol=1e-6)
        assert found["b"].tolist() == [0, 0]

    h = JVP(lambda x, n: x**n, nondiff_argnums=(1,))
    h.defjvp(lambda n, primals, tangents: (h(*primals, n), n * tangents[0]))
    assert hf.grad(h)(2.0, 3).item() == 3.0


def test_a_fixed_point_by_the_implicit_function_theorem() -> None:
    def newton(a: Any) -> Any:  # for x**2 = a
        return hf.while_loop(
            lambda x: hf.abs(x * x - a) > 1e-5, lambda x: (x + a / x) / 2, a
        )

    root = VJP(newton)
    root.defvjp(lambda a: 2 * [root(a)], lambda x, ct: (ct / (2 * x),))
    for f in (hf.grad(root), hf.jit(hf.grad(root))):
        assert f(2.0).item() == pytest.approx(0.5 / np.sqrt(2), rel=1e-5)


def test_stop_gradient() -> None:
    def f(tree: Any) -> Any:
        stopped = hf.stop_gradient(tree)
        return hf.sum(stopped["x"] * tree["x"]) + stopped["n"]

    x = np.array([1.0, 2.0], np.float32)
    for g in (hf.grad(f), hf.jit(hf.grad(f))):
        assert g({"x": x, "n": 1.0})["x"].tolist() == [1.0, 2.0]
    with pytest.raises(ArgumentTypeError, match="stop_gradient"):
        hf.stop_gradient("a")


def with_rule(rule: Any) -> Any:
    f = JVP(lambda x: x * 2)
    f.defjvp(rule)
    return f


def with_rules(forward: Any, backward: Any) -> Any:
    f = VJP(lambda x: x * 2)
    f.defvjp(forward, backward)
    return f


def ok(x: Any) -> Any:
    return x * 2, None


def pairs(x: Any) -> Any:
    return (x, x), None


def closing(y: Any) -> Any:
    f = JVP(lambda x: x * y)
    f.defjvp(lambda p, t: (f(*p), t[0] * y))
    return f(y)


def writing(x: Any) -> Any:
    outside = x * 1

    def f(x: Any) -> Any:
        outside[...] = x
        return x

    return JVP(f)(x)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: JVP(3), ArgumentTypeError, "fun"),
        (lambda: VJP(ok, "a"), ArgumentTypeError, "nondiff_argnums"),
        (lambda: JVP(ok, (3,))(1.0), ArgumentValueError, "Count from 0"),
        (lambda: JVP(lambda *, x: x)(x=1.0), ArgumentTypeError, "only be given by"),
        (lambda: JVP(ok).defjvp(3), ArgumentTypeError, "rule"),
        (lambda: hf.grad(JVP(lambda x: x))(1.0), DerivativeError, "has no rule"),
        (lambda: hf.grad(VJP(lambda x: x))(1.0), DerivativeError, "has no rules"),
        (lambda: hf.grad(with_rule(lambda p, t: p[0]))(1.0), ResultTypeError, "pair"),
        (
            lambda: hf.grad(with_rule(lambda p, t: (p[0], t)))(1.0),
            StructureError,
            "`tangent` must have the structure",
        ),
        (
            lambda: hf.grad(with_rules(lambda x: x, ok))(1.0),
            ResultTypeError,
            "pair",
        ),
        (
            lambda: hf.grad(with_rules(ok, lambda r, ct: ct))(1.0),
            StructureError,
            "tuple of 1 cotangents",
        ),
        (
            lambda: hf.grad(with_rules(ok, lambda r, ct: ((ct, ct),)))(1.0),
            StructureError,
            "`cotangents` must have the structure",
        ),
        (
            lambda: hf.grad(with_rules(ok, lambda r, ct: (hf.ones(3),)))(1.0),
            ShapeError,
            "cotangents",
        ),
        (
            lambda: hf.grad(with_rules(ok, lambda r, ct: ("3",)))(1.0),
            ArgumentTypeError,
            r"`cotangents\[0\]` must be a tensor",
        ),
        (
            lambda: hf.grad(with_rules(ok, lambda r, ct: (hf.asarray(3),)))(1.0),
            DTypeError,
            r"`cotangents\[0\]` must be f32\[\], .* is i64\[\].*hf.astype",
        ),
        (
            lambda: hf.grad(
                lambda x: hf.cond(x > 0, with_rules(pairs, ok), lambda x: x, (x,))
            )(1.0),
            StructureError,
            r"expected \*\n  got      \(\*, \*\)",
        ),
        (
            lambda: hf.grad(with_rule(lambda p, t: (p[0], t[0] * t[0])))(1.0),
            DerivativeError,
            "not linear in the tangents",
        ),
        (lambda: JVP(ok).defjvps("rule"), ArgumentTypeError, "`rules` must be"),
        (lambda: hf.grad(closing)(1.0), DerivativeError, "closes over"),
        (
            lambda: hf.grad(lambda x: hf.cond(x > 0, closing, lambda x: x, x))(1.0),
            DerivativeError,
            "closes over",
        ),
        *(
            (lambda w=w: w(writing)(hf.ones(2)), MutationError, "to a captured tensor")
            for w in (lambda f: f, hf.jit, hf.vmap)
        ),
    ],
)
def test_errors(call: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        call()


def of_two(a: Any, b: Any) -> Any:
    """What a function returns, and what its rule does."""

    def both(kind: Any) -> Any:
        f = kind(lambda x: a(x))
        if kind is JVP:
            f.defjvp(lambda p, t: (b(*p), b(*t)))
        else:
            f.defvjp(lambda x: (b(x), None), lambda _, ct: (hf.ones(3),))
        return f

    return both


def total(f: Any) -> Any:
    return lambda x: hf.sum(f(x)["a"])


@pytest.mark.parametrize("kind", [JVP, VJP])
@pytest.mark.parametrize(
    "derive",
    [
        lambda f, x: hf.grad(total(f))(x),
        lambda f, x: hf.jit(hf.grad(total(f)))(x),
        lambda f, x: hf.grad(total(hf.jit(f)))(x),
        lambda f, x: hf.vjp(f, x),
        lambda f, x: hf.jacrev(f)(x),
        lambda f, x: hf.vmap(hf.grad(total(f)))(hf.stack([x, x])),
        lambda f, x: hf.grad(lambda x: hf.sum(hf.vmap(total(f))(hf.stack([x]))))(x),
        lambda f, x: hf.grad(
            lambda x: hf.scan(lambda c, _: (total(f)(x), None), 0.0, length=2)[0]
        )(x),
    ],
)
@pytest.mark.parametrize(
    ("found", "error", "text"),
    [
        (
            lambda x: {"a": x[:2]},
            RuleTypeError,
            r"result\['a'\]  expected f32\[3\], got f32\[2\]  \(axis 0: 3 != 2\)",
        ),
        (
            lambda x: {"a": hf.astype(x, hf.float64)},
            RuleTypeError,
            r"f64\[3\]  \(dtype\)",
        ),
        (lambda x: {"a": x, "b": x}, StructureError, r"got      \{'a': \*, 'b': \*\}"),
        (lambda x: {"a": x * 2}, None, ""),
    ],
)
def test_rules_return_what_the_function_does(
    kind: Any, derive: Any, found: Any, error: type[Exception] | None, text: str
) -> None:
    f = of_two(lambda x: {"a": x + 1}, found)(kind)
    with nullcontext() if error is None else pytest.raises(error, match=text):
        derive(f, hf.ones(3))


def of_positive(kind: Any) -> Any:
    """The squares of positive elements, with a slope that is ten times theirs."""
    f = kind(lambda x: x[x > 0] ** 2)

    def rule(primals: Any, tangents: Any) -> Any:
        [x], [t] = primals, tangents
        positive = x > 0
        return x[positive] ** 2, (20 * x * t)[positive]

    def forward(x: Any) -> Any:
        [positive] = hf.nonzero(x > 0)
        return x[positive] ** 2, (x, positive)

    def backward(kept: Any, ct: Any) -> Any:
        x, positive = kept
        return (hf.zeros_like(x).at[positive].set(20 * x[positive] * ct),)

    if kind is JVP:
        f.defjvp(rule)
    else:
        f.defvjp(forward, backward)
    return lambda x: hf.sum(f(x))


def in_a_branch(g: Any) -> Any:
    return lambda x: hf.cond(x[0] > 0, lambda: g(x), lambda: x[0])


def in_a_loop(g: Any) -> Any:
    return lambda x: hf.fori_loop(0, 2, lambda _, c: c + g(x) / 2, 0.0)


@pytest.mark.parametrize("kind", [JVP, VJP])
@pytest.mark.parametrize("within", [lambda g: g, in_a_branch, in_a_loop, hf.jit])
@pytest.mark.parametrize("wrap", [lambda f: f, lambda f: hf.jit(f, dynamic=True)])
def test_rules_may_make_sizes(kind: Any, within: Any, wrap: Any) -> None:
    g, x = within(of_positive(kind)), hf.asarray([1.0, -2.0, 3.0])
    assert wrap(hf.grad(g))(x).tolist() == [20.0, 0.0, 60.0]
    second = hf.grad(lambda x: hf.sum(hf.grad(g)(x)))
    assert wrap(second)(x).tolist() == [20.0, 0.0, 20.0]
    if kind is JVP:
        assert wrap(hf.jacfwd(g))(x).tolist() == [20.0, 0.0, 60.0]


def test_functions_that_look_at_values_have_rules_all_the_same() -> None:
    f = VJP(lambda x: x if x > 0 else (x, x))
    f.defvjp(lambda x: (x, None), lambda _, ct: (ct * 3,))
    assert hf.grad(f)(1.0).item() == 3


@pytest.mark.parametrize("jit", [False, True])
def test_the_rule_of_custom_jvp_may_differentiate_loops(jit: bool) -> None:
    def g(x: Any) -> Any:
        return hf.fori_loop(0, 3, lambda _, c: hf.sin(c) * x, x)

    f = JVP(g)
    f.defjvp(lambda primals, tangents: hf.jvp(g, primals, tangents))
    x = hf.asarray(0.5)
    for derive in (hf.grad, hf.hessian, lambda f: hf.grad(hf.grad(f))):
        found, want = derive(f), derive(g)
        ours = hf.jit(found)(x) if jit else found(x)
        assert np.isclose(ours.item(), want(x).item(), rtol=1e-5)


def test_a_rule_may_differentiate_a_scan_in_a_loop_that_reads_much() -> None:
    def g(x: Any) -> Any:
        scale = hf.sum(x) / 4
        return hf.associative_scan(lambda u, v: u * v * scale, x)

    f = JVP(g)
    f.defjvp(lambda primals, tangents: hf.jvp(g, primals, tangents))

    def total(f: Any) -> Any:
        def run(x: Any, c: Any) -> Any:
            def step(_: Any, c: Any) -> Any:
                return hf.sum(f(hf.cumulative_sum(x) / 2)) * c

            return hf.fori_loop(0, 2, step, c)

        return run

    x, c = hf.asarray([0.5, 1.0, 1.5]), hf.asarray(0.7)
    for found, want in zip(
        hf.grad(total(f), (0, 1))(x, c), hf.grad(total(g), (0, 1))(x, c), strict=True
    ):
        assert np.allclose(found.tolist(), want.tolist(), rtol=1e-5)


# --- batches of calls -----------------------------------------------------------------


@pytest.mark.parametrize("kind", ["jvp", "vjp"])
@pytest.mark.parametrize("dims", [(0, 0), (0, None), (None, 0), (1, 0)])
def test_vmap_batches_the_function_and_its_rules(kind: str, dims: Any) -> None:
    f, n = KINDS[kind], 3
    given: list[Any] = [
        hf.asarray(np.linspace(0.5, 1.5, n, dtype=np.float32))
        if d is not None
        else hf.asarray(0.75)
        for d in dims
    ]
    given = [hf.stack([v]) if d == 1 else v for v, d in zip(given, dims, strict=True)]

    def many(*args: Any) -> Any:
        g = f if 1 not in dims else lambda x, y: hf.sum(hf.vmap(f, (0, None))(x, y))
        return hf.vmap(g, dims)(*args)

    def one_by_one(*args: Any) -> Any:
        rows = []
        for i in range(n):
            own = [
                v[:, i] if d == 1 else v if d is None else v[i]
                for v, d in zip(args, dims, strict=True)
            ]
            rows.append(f(hf.reshape(own[0], ()), own[1]))
        return hf.stack(rows)

    def loss(g: Any) -> Any:
        return lambda *args: hf.sum(hf.sin(g(*args)))

    traced = hf.trace(hf.grad(loss(many), (0, 1)), *given)
    assert "map(" not in str(traced)
    for derive in (
        lambda g: hf.grad(loss(g), (0, 1)),
        lambda g: hf.jit(hf.grad(loss(g), (0, 1)), dynamic=True),
        lambda g: hf.grad(hf.jit(loss(g)), (0, 1)),
        lambda g: hf.grad(lambda *a: hf.sum(hf.grad(loss(g))(*a)), (0, 1)),
    ):
        for found, want in zip(
            derive(many)(*given), derive(one_by_one)(*given), strict=True
        ):
            np.testing.assert_allclose(
                np.asarray(found), np.asarray(want), rtol=1e-4, atol=1e-5
            )


@pytest.mark.parametrize("mode", ["save", "recompute", "checkpoint"])
def test_second_derivatives_need_not_be_symmetric(mode: Any) -> None:
    f = JVP(lambda x: x * 2)
    f.defjvp(lambda p, t: (f(*p), t[0] * hf.stack([p[0][1], p[0][0] * 0 + 1])))

    def looped(x: Any) -> Any:
        def step(i: Any, x: Any) -> Any:
            return i + 1, f(x)

        return hf.sum(
            hf.while_loop(lambda i, _: i < 2, step, (0, x), reverse_mode=mode)[1]
        )

    x = hf.asarray([1.0, 3.0])
    want = hf.jacrev(hf.grad(lambda x: hf.sum(f(f(x)))))(x).tolist()
    assert want == [[0.0, 9.0], [0.0, 0.0]]
    assert hf.jacrev(hf.grad(looped))(x).tolist() == want


@pytest.mark.parametrize(
    "after",
    [
        lambda y: hf.fori_loop(0, 3, lambda i, z: z * 2.0, y),
        lambda y: hf.scan(lambda z, _: (z * 2.0, None), y, length=3)[0],
        lambda y: hf.cond(y > 0, lambda z: z * 8.0, lambda z: z, y),
    ],
)
def test_operators_take_a_tangent_in_which_no_operand_has_a_part(after: Any) -> None:
    f = hf.custom_jvp(hf.sum)
    f.defjvps(lambda t, _, x: hf.zeros(()) + 1.0)
    x = hf.asarray(0.5)
    assert hf.jvp(lambda x: after(f(x)), (x,), (x,))[1].item() == 8
    assert hf.grad(lambda x: after(f(x)))(x).item() == 0


@pytest.mark.parametrize("jit", [False, True])
def test_a_tangent_that_depends_on_none_reaches_further_rules(jit: bool) -> None:
    still = hf.custom_jvp(hf.sin)
    still.defjvp(lambda primals, _: (hf.sin(*primals), hf.zeros_like(*primals)))
    pulled = hf.custom_vjp(hf.cos)
    pulled.defvjp(lambda x: (hf.cos(x), x), lambda x, ct: (-ct * hf.sin(x),))
    for rule in (still, pulled):
        gradient = hf.grad(lambda x, rule=rule: rule(still(x)) + x)
        assert (hf.jit(gradient) if jit else gradient)(2.0) == 1.0


@pytest.mark.parametrize("kind", [hf.custom_jvp, hf.custom_vjp])
@pytest.mark.parametrize("wrap", [lambda f: f, hf.functionalize, hf.jit])
@pytest.mark.parametrize("f", [lambda x: x, lambda x: x[:1]])
def test_a_result_is_no_view_of_an_argument(kind: Any, wrap: Any, f: Any) -> None:
    own = kind(f)

    def later(x: Any) -> Any:
        found = own(x)
        x[0] = 5.0
        return found

    assert wrap(later)(hf.ones(2))[0].item() == 1.0


@pytest.mark.parametrize("kind", [hf.custom_jvp, hf.custom_vjp])
@pytest.mark.parametrize("wrap", [lambda f: f, hf.functionalize, hf.jit])
def test_a_result_on_a_tape_is_no_view_of_an_argument(kind: Any, wrap: Any) -> None:
    own = kind(lambda c, x: (c, x))
    if kind is hf.custom_jvp:
        own.defjvp(lambda primals, tangents: (primals, tangents))
    else:
        own.defvjp(lambda c, x: ((c, x), None), lambda _, cotangents: cotangents)
    c = hf.ones(2)

    def later(x: Any) -> Any:
        found, y = own(c, x)
        c[0] = 5.0
        return hf.sum(y), found

    gradient, found = wrap(hf.grad(later, has_aux=True))(hf.ones(2))
    assert gradient.tolist() == found.tolist() == [1.0, 1.0]
    assert c.tolist() == [5.0, 1.0]


@pytest.mark.parametrize("kind", [hf.custom_jvp, hf.custom_vjp])
@pytest.mark.parametrize("wrap", [lambda f: f, hf.functionalize, hf.jit])
def test_a_result_is_no_view_of_what_is_closed_over(kind: Any, wrap: Any) -> None:
    c = hf.ones(2)
    own = kind(lambda x: (c, c[:1] + x))

    def later(x: Any) -> Any:
        found, _ = own(x)
        c[0] = 5.0
        return found

    assert wrap(later)(hf.ones(1)).tolist() == [1.0, 1.0]


class Seeing(Eager):
    """Computes, and notes what."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def process(self, op: Any, args: Any, params: Any) -> Any:
        self.seen.append(op.name)
        return super().process(op, args, params)


@pytest.mark.parametrize("run", [lambda f, x: f(x), lambda f, x: hf.grad(f)(x)])
@pytest.mark.parametrize("kind", [hf.custom_jvp, hf.custom_vjp])
def test_what_they_do_is_done_by_the_interpreter_around(kind: Any, run: Any) -> None:
    own = kind(hf.sin)
    if kind is hf.custom_jvp:
        own.defjvp(lambda xs, ts: (hf.sin(*xs), hf.cos(*xs) * ts[0]))
    else:
        own.defvjp(lambda x: (hf.sin(x), hf.cos(x)), lambda slope, ct: (slope * ct,))
    around = Seeing()
    with using(around):
        run(own, hf.asarray(1.0))
    assert "sin" in around.seen
