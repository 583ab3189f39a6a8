"""Rules of users as regions: those of all kinds, in traces and on tapes."""

import pickle  # noqa: TID251
from typing import Any

import numpy as np
import pytest

import hopflow as hf
from hopflow.batching.graphs import bind_again
from hopflow.errors import DerivativeError, TraceError
from hopflow.graph.hashing import structural_hash
from hopflow.graph.parser import parse
from hopflow.graph.printer import format_graph
from hopflow.graph.regions import signature_of
from hopflow.graph.running import compile_graph
from hopflow.graph.verifier import verify
from hopflow.hops.custom import CUSTOM
from hopflow.ops.opdef import OPERATIONS

Rule = Any  # (x, tangent or cotangent) -> what the rule makes of it


class Own(hf.HigherOrderOp):
    def __init__(self, fun: Any, slope: Rule) -> None:
        self.fun, self.slope = fun, slope

    def debug(self, x: Any) -> Any:
        return self.fun(x)


class OwnForward(Own):
    def jvp(self, primals: Any, tangents: Any) -> Any:
        return self(*primals), self.slope(*primals, *tangents)


class OwnBackward(Own):
    def vjp(self, x: Any) -> Any:
        return self(x), lambda ct: (self.slope(x, ct),)


def custom_jvp(fun: Any, slope: Rule) -> Any:
    f: Any = hf.custom_jvp(fun)
    f.defjvp(lambda p, t: (f(*p), slope(*p, *t)))
    return f


def custom_vjp(fun: Any, slope: Rule) -> Any:
    f: Any = hf.custom_vjp(fun)
    f.defvjp(  # with residuals that are no tensors
        lambda x: (f(x), {"x": x, "by": 1, "name": "sine"}),
        lambda kept, ct: (slope(kept["x"], ct) * kept["by"] ** len(kept["name"]),),
    )
    return f


KINDS: dict[str, Any] = {
    "custom_jvp": custom_jvp,
    "custom_vjp": custom_vjp,
    "jvp": OwnForward,
    "vjp": OwnBackward,
}
kinds = pytest.mark.parametrize("kind", KINDS)
W = hf.asarray(2.0)


def ruled(kind: str, w: Any = W) -> Any:
    """sin, whose rule says that its derivative is w * sin."""
    f: Any = KINDS[kind](hf.sin, lambda x, t: f(x) * t * w)
    return f


def nodes(kind: str) -> tuple[Any, Any]:
    graph = hf.trace(ruled(kind), hf.asarray(0.7), captures=True).graph
    [node] = [n for n in graph.nodes if n.graphs]
    return graph, node


@kinds
def test_a_node_has_its_rules_as_regions(kind: str) -> None:
    graph, node = nodes(kind)
    body, *rules = signature_of(node).regions
    assert body.runs == "once"
    names = {"forward", "backward"} if "vjp" in kind else {"jvp"}
    assert {r.name for r in rules} == names
    assert all(r.runs == "never" for r in rules)
    # What rules read is a capture of the node, as it is to each of them.
    assert body.graph.captures
    assert all(rule.inputs[-1] == body.inputs[-1] for rule in rules)
    verify(graph)


@kinds
def test_graphs_are_equal_by_their_rules_too(kind: str) -> None:
    (graph, _), (again, _) = nodes(kind), nodes(kind)
    assert structural_hash(graph) == structural_hash(again)
    f: Any = KINDS[kind](hf.sin, lambda x, t: f(x) * t * W * 2)
    other = hf.trace(f, hf.asarray(0.7), captures=True).graph
    assert structural_hash(graph) != structural_hash(other)


@kinds
def test_graphs_are_printed_parsed_run_and_pickled_with_their_rules(kind: str) -> None:
    graph, node = nodes(kind)
    own = {op.name: op for op in (CUSTOM, node.op)}
    again = parse(format_graph(graph), {**OPERATIONS, **own})
    verify(again)
    assert structural_hash(again) == structural_hash(graph)
    assert format_graph(again) == format_graph(graph)
    x = hf.asarray(0.7)
    assert compile_graph(graph, bind_again)(x).item() == ruled(kind)(x).item()
    if node.op is CUSTOM:
        module = hf.trace(ruled(kind), hf.asarray(0.7), captures=True)
        module = pickle.loads(pickle.dumps(module))
        found = hf.grad(hf.grad(module))(hf.asarray(0.7)).item()
        assert found == pytest.approx(4 * np.sin(0.7), rel=1e-5)


AROUND: dict[str, Any] = {
    "tape": lambda f: f,
    "jit": hf.jit,
    "cond": lambda f: lambda x: hf.cond(x > -9, f, lambda x: x, x),
    "scan": lambda f: (
        lambda x: hf.scan(lambda c, _: (f(c), None), x, None, length=1)[0]
    ),
    "vmap": lambda f: lambda x: hf.vmap(f)(hf.stack([x, x]))[1],
    "vmap of vmap": lambda f: (
        lambda x: hf.vmap(hf.vmap(f))(hf.stack([hf.stack([x, x])]))[0, 1]
    ),
    "dynamic": lambda f: (
        lambda x: hf.jit(lambda xs: hf.sum(hf.vmap(f)(xs)), dynamic=True)(hf.stack([x]))
    ),
    "subgraph": hf.subgraph,
}


@kinds
@pytest.mark.parametrize("around", AROUND)
def test_derivatives_of_all_orders_are_those_of_the_rules(
    kind: str, around: str
) -> None:
    f = AROUND[around](ruled(kind))
    for order in (1, 2, 3):
        f = hf.grad(f)
        want = 2**order * np.sin(0.7)
        assert f(0.7).item() == pytest.approx(want, rel=1e-5), order
    if "jvp" in kind:
        g = AROUND[around](ruled(kind))
        found = hf.jvp(lambda x: hf.jvp(g, (x,), (3.0,))[1], (0.7,), (1.0,))[1].item()
        assert found == pytest.approx(12 * np.sin(0.7), rel=1e-5)


@kinds
def test_derivatives_are_batched(kind: str) -> None:
    xs = hf.asarray([0.1, 0.7, -0.3])
    want = 2 * np.sin(np.asarray(xs))
    for around in ("tape", "jit", "cond", "vmap"):
        f = AROUND[around](ruled(kind))
        for wrap in (lambda f: f, hf.jit):
            found = wrap(hf.vmap(hf.grad(f)))(xs)
            np.testing.assert_allclose(np.asarray(found), want, rtol=1e-5)
            if "jvp" in kind:
                pushed = wrap(hf.vmap(lambda x: hf.jvp(f, (x,), (x,))[1]))(xs)  # noqa: B023
                np.testing.assert_allclose(
                    np.asarray(pushed), want * np.asarray(xs), rtol=1e-5
                )


@kinds
@pytest.mark.parametrize("around", ["jit", "cond", "vmap", "subgraph"])
def test_what_rules_read_is_seen_when_it_is_another(kind: str, around: str) -> None:
    holder = {"w": hf.asarray(2.0)}
    f: Any = KINDS[kind](hf.sin, lambda x, t: f(x) * t * holder["w"])
    slope = hf.jit(hf.grad(AROUND[around](f)))
    for w in (2.0, 3.0, 5.0):
        holder["w"] = hf.asarray(w)
        assert slope(0.7).item() == pytest.approx(w * np.sin(0.7), rel=1e-5)
    within = hf.jit(lambda x, w: hf.grad(AROUND[around](ruled(kind, w)))(x))
    for w in (2.0, 3.0):
        assert within(0.7, w).item() == pytest.approx(w * np.sin(0.7), rel=1e-5)


def branching(x: Any, t: Any) -> Any:
    return t if x > 0 else -t  # where Python looks at a value


@kinds
def test_rules_may_branch_on_values_on_a_tape(kind: str) -> None:
    f: Any = KINDS[kind](hf.sin, branching)
    if kind == "vjp":
        f = LookingBackward(hf.sin, branching)
    assert hf.grad(f)(0.7).item() == 1.0
    assert hf.grad(f)(-0.7).item() == -1.0
    assert hf.grad(hf.grad(lambda x: f(x) * x))(-0.7).item() == -2.0
    if "jvp" in kind:
        assert hf.jvp(f, (-0.7,), (3.0,))[1].item() == -3.0


class LookingBackward(Own):
    """Whose pullback is traced, but not the rule that makes it."""

    def vjp(self, x: Any) -> Any:
        sign = self.slope(x, 1.0)
        return self(x), lambda ct: (sign * ct,)


@kinds
@pytest.mark.parametrize("around", ["jit", "cond", "vmap"])
def test_a_rule_that_has_no_trace_is_an_error_of_derivatives_at_its_line(
    kind: str, around: str
) -> None:
    f = AROUND[around](KINDS[kind](hf.sin, branching))
    assert f(0.7).item() == pytest.approx(np.sin(0.7))
    with pytest.raises(TraceError, match=r"Branch with `hf.cond`") as caught:
        hf.grad(f)(0.7)
    line = branching.__code__.co_firstlineno + 1
    notes = [str(caught.value), *getattr(caught.value, "__notes__", ())]
    assert any(f"test_rule_regions.py:{line}" in note for note in notes)


@kinds
def test_a_rule_that_differentiates_what_it_is_a_rule_of_is_an_error(kind: str) -> None:
    f: Any = KINDS[kind](
        hf.sin, lambda x, t: hf.grad(lambda x: hf.map(f, hf.stack([x]))[0])(x) * t
    )
    with pytest.raises(DerivativeError, match="which has no end"):
        hf.grad(hf.jit(f))(1.0)
