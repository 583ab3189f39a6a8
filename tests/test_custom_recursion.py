"""`custom_jvp` and `custom_vjp`: rules that call their function, or one that does."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hopflow as hf
from hopflow.errors import DerivativeError, TraceError
from hopflow.graph.hashing import structural_hash
from hopflow.graph.parser import parse
from hopflow.graph.printer import format_graph
from hopflow.graph.verifier import verify
from hopflow.hops.custom import CUSTOM
from hopflow.ops.opdef import OPERATIONS

pytestmark = pytest.mark.slow

JVP: Any = hf.custom_jvp
VJP: Any = hf.custom_vjp
kinds = pytest.mark.parametrize("kind", [JVP, VJP])


def with_slope(kind: Any, fun: Any, slope: Any, **options: Any) -> Any:
    """`fun`, whose rules give `slope(*args, t)` of a tangent or a cotangent."""
    f = kind(fun, **options)
    if kind is JVP:
        f.defjvp(lambda *a: (f(*a[:-2], *a[-2]), slope(*a[:-2], *a[-2], *a[-1])))
    else:
        f.defvjp(
            lambda *a: (f(*a), a), lambda *a: (slope(*a[:-2], *a[-2][-1:], a[-1]),)
        )
    return f


# Each gives f(x), and has the derivative f(x): all derivatives are the function.
WITHIN: dict[str, Any] = {
    "itself": lambda f, x: f(x),
    "cond": lambda f, x: hf.cond(x > -9, lambda: f(x), lambda: x),
    "cond in cond": lambda f, x: hf.cond(
        x > -9, lambda: hf.cond(x < 9, f, lambda x: x, x), lambda: x
    ),
    "map": lambda f, x: hf.map(f, hf.stack([x]))[0],
    "scan": lambda f, x: hf.scan(lambda c, y: (c, f(y)), 0.0, hf.stack([x]))[1][0],
    "vmap": lambda f, x: hf.vmap(f)(hf.stack([x, 2 * x]))[0],
    "vmap of vmap": lambda f, x: hf.vmap(hf.vmap(f))(hf.stack([hf.stack([x])]))[0, 0],
    "subgraph": lambda f, x: hf.subgraph(f)(x),
    "invoke_subgraph": lambda f, x: hf.invoke_subgraph(f, x),
    "jit": lambda f, x: hf.jit(f)(x),
    "checkpoint": lambda f, x: hf.checkpoint(f)(x),
    "associative_scan": lambda f, x: hf.associative_scan(
        lambda a, b: f(b), hf.stack([x, x])
    )[1],
    "fori_loop": lambda f, x: hf.fori_loop(0, 1, lambda i, c: f(x), x),
}
AROUND: dict[str, Any] = {
    "tape": lambda f: f,
    "jit": hf.jit,
    "subgraph": hf.subgraph,
    "cond": lambda f: lambda x: hf.cond(x > -9, f, lambda x: x, x),
    "map": lambda f: lambda x: hf.map(f, hf.stack([x]))[0],
    "vmap": lambda f: lambda x: hf.vmap(f)(hf.stack([x, x]))[1],
    "vmaps": lambda f: (
        lambda x: hf.vmap(lambda y: hf.vmap(f)(y))(hf.ones((2, 1)) * x)[1, 0]
    ),
}


def derivatives(f: Any, x: Any) -> list[float]:
    found = []
    for _ in range(3):
        f = hf.grad(f)
        found.append(f(x).item())
    return found


@kinds
@pytest.mark.parametrize("within", WITHIN)
@pytest.mark.parametrize("around", AROUND)
def test_a_call_in_its_own_rule_has_the_rule(
    kind: Any, within: str, around: str
) -> None:
    x, w = hf.asarray(0.7), hf.asarray(2.0)
    f: Any = with_slope(
        kind, lambda x: hf.sin(x) * w, lambda x, t: WITHIN[within](f, x) * t * w / 2.0
    )
    found = derivatives(AROUND[around](f), x)
    np.testing.assert_allclose(found, [2 * np.sin(0.7)] * 3, rtol=1e-5)


@kinds
@pytest.mark.parametrize("within", ["itself", "cond", "vmap"])
def test_a_call_in_its_own_rule_is_given_what_the_rule_reads(
    kind: Any, within: str
) -> None:
    def f(x: Any, table: Any) -> Any:
        n, scaled = table.shape[0], table * 2
        own: Any = with_slope(
            kind,
            hf.sin,
            lambda y, t: WITHIN[within](own, y) * t * hf.sum(scaled) / (n * 2),
        )
        return own(x)

    for n in (2, 3):
        table = hf.ones(n)
        for g in (
            lambda x, t=table: hf.jit(f, dynamic=True)(x, t),
            lambda x, t=table: hf.cond(x > 0, lambda: f(x, t), lambda: x),
            lambda x, t=table: hf.vmap(f, (0, None))(hf.stack([x, x]), t)[1],
        ):
            found = derivatives(g, hf.asarray(0.7))
            np.testing.assert_allclose(found, [np.sin(0.7)] * 3, rtol=1e-5)


@kinds
@pytest.mark.parametrize("around", AROUND)
def test_functions_may_call_each_other_in_their_rules(kind: Any, around: str) -> None:
    sine: Any = with_slope(kind, hf.sin, lambda x, t: 2 * cosine(x) * t)
    cosine: Any = with_slope(kind, hf.cos, lambda x, t: -3 * sine(x) * t)
    found = derivatives(AROUND[around](sine), hf.asarray(0.7))
    sin, cos = np.sin(0.7), np.cos(0.7)
    np.testing.assert_allclose(found, [2 * cos, -6 * sin, -12 * cos], rtol=1e-5)


@pytest.mark.parametrize("around", ["jit", "cond", "vmap"])
def test_functions_may_call_others_in_bodies_and_rules(around: str) -> None:
    f, g, h = (
        hf.custom_jvp(lambda x: h(x) * 2),
        hf.custom_jvp(lambda x: f(x)),
        JVP(hf.sin),
    )
    f.defjvp(lambda p, t: (f(*p), g(p[0]) * t[0]))
    g.defjvp(lambda p, t: (g(*p), f(p[0]) * t[0] / 2))
    h.defjvp(lambda p, t: (h(*p), (g(p[0]) - f(p[0]) / 4) * t[0]))
    own, sin = AROUND[around](h), np.sin(0.7)
    found = derivatives(own, hf.asarray(0.7))
    np.testing.assert_allclose(found, [1.5 * sin, 0.5 * sin, 0.75 * sin], rtol=1e-5)


ONE = hf.asarray(1.0)


def made_and_written() -> Any:
    one = hf.asarray([0.0, 0.0])
    one[0] = 1.0
    return hf.sum(one)


READS: dict[str, Any] = {
    "nothing": lambda: 1.0,
    "an array of outside": lambda: ONE,
    "an array that it makes": lambda: hf.sum(hf.asarray([1.0, 0.0])),
    "an array that it writes": made_and_written,
}


def bessel(kind: Any, read: Any) -> Any:
    """x -> 9 x, whose rules call that of ever lesser numbers."""
    f: Any = with_slope(
        kind,
        lambda n, x: x * n,
        lambda n, x, t: f(n - 1, x) * t * read(),
        nondiff_argnums=(0,),
    )
    return lambda x: f(9, x)


def has_all_derivatives(own: Any) -> None:
    for k in range(1, 6):
        own = hf.grad(own)
        assert own(2.0).item() == 2 * (9 - k)


@kinds
@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("around", ["jit", "cond", "vmap"])
def test_rules_of_ever_other_kinds_have_all_derivatives(
    kind: Any, read: str, around: str
) -> None:
    f = bessel(kind, READS[read])
    has_all_derivatives(AROUND[around](f))
    has_all_derivatives(hf.trace(AROUND[around](f), hf.asarray(1.0), captures=True))


@pytest.mark.parametrize("around", ["cond", "map", "vmap", "subgraph"])
def test_rules_of_ever_other_kinds_read_tensors_of_traces(around: str) -> None:
    def f(x: Any) -> Any:
        n, one = hf.stack([x]).shape[0], hf.stop_gradient(hf.sin(x * 0) + 1.0)
        return AROUND[around](bessel(JVP, lambda: one * n))(x)

    has_all_derivatives(hf.jit(f, dynamic=True))


@kinds
def test_rules_of_ever_other_kinds_make_ever_other_arrays(kind: Any) -> None:
    calls = iter(range(100))
    own = AROUND["vmap"](bessel(kind, lambda: hf.asarray([1.0, next(calls)])[0]))
    has_all_derivatives(own)  # which derives outside of what it batches
    own = hf.grad(hf.grad(hf.grad(hf.jit(own))))
    with pytest.raises(DerivativeError, match=r"a rule reads an array .* argument"):
        own(2.0)


@kinds
@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("around", ["cond", "vmap"])
def test_rules_of_ever_other_kinds_are_exported(
    kind: Any, read: str, around: str, tmp_path: Path
) -> None:
    path, own = tmp_path / "program.hopflow", AROUND[around](bessel(kind, READS[read]))
    hf.export(own, (hf.asarray(2.0),), derivatives=4).save(path)
    program: Any = hf.load(path)
    for k in range(1, 5):
        program = hf.grad(program)
        assert program(2.0).item() == 2 * (9 - k)
    with pytest.raises(DerivativeError, match="larger `derivatives`"):
        hf.grad(program)(2.0)


@kinds
def test_rules_that_make_ever_other_functions_have_all_derivatives(kind: Any) -> None:
    def bessel(n: int) -> Any:
        return with_slope(
            kind, lambda x: x * n, lambda x, t: (bessel(n - 1)(x) + bessel(n)(x)) * t
        )

    def nth(n: int, k: int, x: float) -> float:
        return x * n if k == 0 else nth(n - 1, k - 1, x) + nth(n, k - 1, x)

    own = hf.jit(bessel(9))
    for k in range(1, 6):
        own = hf.grad(own)
        assert own(2.0).item() == nth(9, k, 2.0)


@kinds
def test_a_rule_that_cannot_be_traced_is_an_error_of_derivatives(kind: Any) -> None:
    f: Any = with_slope(kind, hf.sin, lambda x, t: t if x > 0 else -t)
    assert hf.grad(f)(1.0).item() == 1.0
    assert hf.jit(f)(1.0).item() == hf.sin(1.0).item()
    assert hf.vmap(f)(hf.ones(2))[1].item() == hf.sin(1.0).item()
    with pytest.raises(TraceError, match=r"Branch with `hf.cond`"):
        hf.grad(hf.jit(f))(1.0)


@kinds
def test_a_rule_that_differentiates_its_own_function_is_an_error(kind: Any) -> None:
    f: Any = with_slope(
        kind, hf.sin, lambda x, t: hf.grad(lambda x: hf.map(f, hf.stack([x]))[0])(x) * t
    )
    with pytest.raises(DerivativeError, match="what it is a rule of, which has no end"):
        hf.grad(hf.jit(f))(1.0)


@kinds
def test_a_graph_has_the_rules_of_a_call(kind: Any) -> None:
    w = hf.asarray(2.0)

    def f(x: Any) -> Any:
        own: Any = with_slope(kind, hf.sin, lambda x, t: own(x) * t * w)
        return own(x)

    graphs = [hf.trace(f, hf.asarray(0.7), captures=True).graph for _ in range(2)]
    assert structural_hash(graphs[0]) == structural_hash(graphs[1])
    [node] = [n for n in graphs[0].nodes if n.graphs]
    rules = {"jvp"} if kind is JVP else {"forward", "backward"}
    assert node.graphs.keys() == {"body", *rules}
    [read] = node.graphs["body"].captures  # which rules alone read
    assert str(read.type) == "f32[]"
    again = parse(format_graph(graphs[0]), {**OPERATIONS, CUSTOM.name: CUSTOM})
    verify(again)
    assert structural_hash(again) == structural_hash(graphs[0])
