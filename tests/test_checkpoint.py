"""`checkpoint`: the same results, and of the rest what the policy says."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import hopflow as hf
from hopflow.compiler.pipeline import lower
from hopflow.compiler.reuse import reuse
from hopflow.errors import ArgumentRangeError, ArgumentTypeError, ArgumentValueError
from hopflow.graph.core import Graph, Node
from hopflow.testing.executions import agree, fails, run_symbolic_native

pytestmark = pytest.mark.slow

X = np.linspace(0.3, 1.5, 6).reshape(2, 3).astype(np.float32)
W = np.linspace(-0.4, 0.4, 9).reshape(3, 3).astype(np.float32)


def layer(x: Any, w: Any) -> Any:
    return hf.sin(hf.tanh(x @ w) @ w)


def is_tanh(node: Node) -> bool:
    name: str = node.op.name  # as the documents write a policy
    return name == "tanh"


POLICIES: list[Any] = ["nothing", "dots", "everything", is_tanh]


def gradient_graph(f: Callable[..., Any], *args: Any) -> Graph:
    return hf.trace(hf.grad(lambda *a: hf.sum(f(*a))), *args, mode="fake").graph


def saved(graph: Graph, inputs: int) -> list[str]:
    """What the first call leaves for the second: operations, and "input"s."""
    forward, backward = graph.nodes_of("checkpoint")
    results = dict(zip(forward.results, forward.params["body"].outputs, strict=True))
    return sorted(
        results[a].node.op.name if a in results else "input"
        for a in backward.args
        if a in results or a in graph.inputs[:inputs]
    )


def names(graph: Graph) -> list[str]:
    return [n.op.name for n in graph.walk() if n.op is not None]


# --- what is kept ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("nothing", ["input", "input"]),
        ("dots", ["input", "matmul", "matmul"]),
        (is_tanh, ["input", "tanh"]),
        ("everything", ["cos", "input", "subtract"]),
    ],
)
def test_the_policy_says_what_is_kept(policy: Any, expected: list[str]) -> None:
    graph = gradient_graph(hf.checkpoint(layer, policy=policy), X, W)
    assert saved(graph, 2) == expected


@pytest.mark.parametrize(
    ("policy", "products"), [("nothing", 5), ("dots", 3), (is_tanh, 4)]
)
def test_what_is_not_kept_is_computed_again(policy: Any, products: int) -> None:
    f = hf.checkpoint(lambda x: layer(x, W), policy=policy)
    graph = gradient_graph(f, X)
    forward, backward = graph.nodes_of("checkpoint")
    assert names(forward.params["body"]).count("matmul") == 2
    assert names(backward.params["body"]).count("matmul") == products - 1


def test_a_policy_is_asked_of_operators_nodes() -> None:
    def f(x: Any) -> Any:
        return hf.exp(hf.scan(lambda c, v: (layer(c, W) + v, None), x[0], x)[0])

    asked: list[str] = []

    def is_scan(node: Node) -> bool:
        asked.append(str(node.op and node.op.name))
        return asked[-1] == "scan"

    kept = gradient_graph(hf.checkpoint(f, policy=is_scan), X)
    again = gradient_graph(hf.checkpoint(f), X)
    assert "scan" in asked
    assert "exp" in asked
    assert [names(g).count("scan") for g in (kept, again)] == [2, 3]
    # "dots" keeps what is computed by products, a scan's results too.
    dots = gradient_graph(hf.checkpoint(f, policy="dots"), X)
    assert names(dots).count("scan") == 2


def test_a_scan_of_checkpointed_steps_stacks_the_carries_alone() -> None:
    def f(x: Any) -> Any:
        step = hf.checkpoint(lambda c: layer(c, hf.asarray(W)))
        return hf.scan(lambda c, _: (step(c), None), x, None, length=5)[0]

    forward, _ = gradient_graph(f, X).nodes_of("scan")
    assert [str(v.type) for v in forward.results] == ["f32[2, 3]", "f32[5, 2, 3]"]


def test_compiled_code_keeps_no_more() -> None:
    """Four loops, of 100 steps each."""

    def memory(policy: str) -> Any:
        def loop(x: Any, w: Any) -> Any:
            return hf.scan(lambda c, _: (hf.tanh(c @ w), None), x, None, length=100)[0]

        def f(x: Any, w: Any) -> Any:
            for _ in range(4):
                x = hf.checkpoint(loop, policy=policy)(x, w)
            return hf.sum(x * x)

        _, program = lower(hf.trace(hf.grad(f), X, W, mode="fake").graph)
        return reuse(program).total.attr / (100 * X.nbytes)

    # The stacks of one loop at a time, and those of all.
    assert 1 <= memory("nothing") < 1.5
    assert 4 <= memory("everything") < 4.5


# --- the results ----------------------------------------------------------------------


def in_scan(f: Any, x: Any, w: Any) -> Any:
    return hf.scan(lambda c, v: (f(c, w) * v, hf.sum(c)), x, x)[0]


def in_cond(f: Any, x: Any, w: Any) -> Any:
    return hf.cond(x[0, 0] > 0, lambda: f(x, w), lambda: x)


def in_while(f: Any, x: Any, w: Any) -> Any:
    return hf.while_loop(lambda i, c: i < 3, lambda i, c: (i + 1, f(c, w) + x), (0, x))[
        1
    ]


PLACES: dict[str, Any] = {
    "plain": lambda f, x, w: f(x, w),
    "scan": in_scan,
    "cond": in_cond,
    "loop": in_while,
    "vmap": lambda f, x, w: hf.vmap(f, (0, None))(x, w),
    "closure": lambda f, x, w: hf.checkpoint(lambda y: f(y, w) * x)(x),
    "nested": lambda f, x, w: hf.checkpoint(lambda y: f(f(y, w), w))(x),
    "of scan": lambda f, x, w: hf.checkpoint(lambda y: in_scan(f, y, w))(x),
    "of loop": lambda f, x, w: hf.checkpoint(lambda y: in_while(f, y, w))(x),
    "of cond": lambda f, x, w: hf.checkpoint(lambda y: in_cond(f, y, w))(x),
}


def directional(f: Any) -> Any:
    return lambda x, w: hf.jvp(f, (x, w), (hf.cos(x), hf.sin(w)))[1]


TRANSFORMS: dict[str, Any] = {
    "value": lambda f: f,
    "grad": lambda f: hf.grad(f, (0, 1)),
    "jvp": directional,
    "grad of grad": lambda f: hf.grad(lambda x, w: hf.sum(hf.grad(f)(x, w) ** 2), 1),
    "grad of jvp": lambda f: hf.grad(directional(f)),
    "jvp of grad": lambda f: directional(hf.grad(f)),
    "vmap of grad": lambda f: (
        lambda x, w: hf.vmap(hf.grad(f), (0, None))(hf.stack([x, 2 * x]), w)
    ),
    "jit of grad": lambda f: hf.jit(hf.grad(f)),
    "grad of jit": lambda f: hf.grad(hf.jit(f)),
}


CASES = [
    *[(t, "scan", p) for t in TRANSFORMS for p in POLICIES],
    *[(t, place, "nothing") for t in ("grad", "grad of grad") for place in PLACES],
]


@pytest.mark.parametrize(("transform", "place", "policy"), CASES)
def test_derivatives_are_those_of_the_function(
    transform: str, place: str, policy: Any
) -> None:
    def whole(f: Any) -> Any:
        return TRANSFORMS[transform](
            lambda x, w: hf.sum(hf.sin(PLACES[place](f, x, w)))
        )

    checkpointed = whole(hf.checkpoint(layer, policy=policy))
    agree(checkpointed(X, W), whole(layer)(X, W), rtol=2e-4)


def test_random_bits_are_the_same_again() -> None:
    def noisy(x: Any, key: Any) -> Any:
        return x * hf.random.uniform(key, x.shape)

    key = hf.random.key(3)
    gradient = hf.grad(lambda x: hf.sum(hf.checkpoint(noisy)(x, key)))
    agree(gradient(X), hf.random.uniform(key, X.shape))


def test_arguments_are_pytrees_and_others_are_constants() -> None:
    @hf.checkpoint
    def f(p: Any, scale: Any, *, mode: str) -> Any:
        return {mode: p["w"] * scale, "n": p["n"]}

    def total(p: Any) -> Any:
        found = f(p, 3, mode="out")
        assert list(found) == ["out", "n"]
        return hf.sum(found["out"]) * found["n"]

    p = {"w": hf.asarray(X), "n": 2}
    agree(hf.grad(lambda w: total({**p, "w": w}))(X), np.full_like(X, 6))


def test_a_chain_of_thousands_is_computed_again() -> None:
    def f(x: Any) -> Any:
        for _ in range(2000):
            x = hf.sin(x)
        return x

    _, backward = gradient_graph(hf.checkpoint(f), X).nodes_of("checkpoint")
    assert names(backward.params["body"]).count("sin") == 1999


def test_numbers_that_fit_no_dtype_are_refused() -> None:
    for f in (hf.checkpoint(layer), hf.subgraph(layer)):
        with pytest.raises(ArgumentRangeError, match="does not fit int64"):
            f(2**70, W)


@pytest.mark.parametrize(
    ("error", "text", "args", "policy"),
    [
        (
            ArgumentTypeError,
            "checkpoint: `f` must be a function, and is `int`.",
            (3,),
            "dots",
        ),
        (
            ArgumentValueError,
            "checkpoint: `policy` must be one of 'nothing', 'dots', 'everything' or a "
            "function of a node, and is 'dot'.",
            (layer,),
            "dot",
        ),
        (
            ArgumentTypeError,
            "checkpoint: `policy` must be a str or a function of a node, and is `int`.",
            (layer,),
            3,
        ),
    ],
)
def test_bad_arguments(error: Any, text: str, args: Any, policy: Any) -> None:
    fails(error, text, lambda: hf.checkpoint(*args, policy=policy))


def test_loops_within_loops_are_kept_for_all_sizes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hf.config, "verify", True)

    def f(c: Any, xs: Any) -> Any:
        def step(c: Any, x: Any) -> Any:
            return hf.sum(hf.map(lambda v: v * c + xs[0, 0], x)), c

        return hf.checkpoint(lambda c, xs: hf.scan(step, c, xs)[0])(c, xs)

    c, xs = np.float32(0.3), np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)
    for way in (f, hf.grad(f, argnums=(0, 1)), hf.grad(hf.grad(f))):
        agree(run_symbolic_native(way, c, xs), way(c, xs))
