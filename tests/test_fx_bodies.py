"""fx: bodies of operators as modules, and captured modules as symbolic ones."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import hopflow as hf
from hopflow import fx, pytree
from hopflow.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    GuardError,
    ShapeError,
    TraceError,
)
from hopflow.graph.verifier import verify
from hopflow.testing.executions import agree

W = hf.asarray([1.0, 2.0, 3.0])
X = hf.asarray(np.linspace(-1.0, 1.0, 12, dtype=np.float32).reshape(4, 3))


def nested(x: Any) -> Any:
    """A `cond` in a `while_loop` in a `scan`."""
    scale = hf.sum(x)

    def inner(i: Any, a: Any) -> Any:
        return i + 1, hf.cond(
            hf.sum(a) > 3.0, lambda: a + W, lambda: hf.tanh(a) + scale
        )

    def step(c: Any, row: Any) -> Any:
        _, c = hf.while_loop(lambda i, a: i < 2, inner, (0, c * row))
        return c, hf.sum(c)

    return hf.scan(step, x[0], x)


def softsign(a: Any) -> Any:
    return a / (1.0 + hf.abs(a))


def expected(monkeypatch: Any) -> Any:
    with monkeypatch.context() as patch, hf.debug():
        patch.setattr(hf, "tanh", softsign)
        return nested(X)


def symbolic() -> fx.GraphModule:
    return hf.symbolic_trace(nested)


def imported() -> fx.GraphModule:
    return hf.symbolic_trace(hf.trace(nested, X, captures=True))


def imported_for_all_sizes() -> fx.GraphModule:
    return hf.symbolic_trace(hf.trace(nested, X, captures=True, mode="symbolic"))


MODULES = [symbolic, imported, imported_for_all_sizes]


class WithoutTanh(fx.Transformer):
    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if getattr(target, "__name__", "") == "tanh":
            return softsign(args[0])
        return super().call_function(target, args, kwargs)


def ways(module: fx.GraphModule) -> list[Callable[..., Any]]:
    captured = module.propagate(X)
    verify(captured.graph)
    return [
        *(module, hf.jit(module), fx.Interpreter(module).run, captured),
        *(copy.deepcopy(module), hf.symbolic_trace(module)),
        *(fx.open_bodies(module), fx.Transformer(module).transform()),
        *(hf.jit(module, dynamic=True), hf.functionalize(module)),
    ]


@pytest.mark.parametrize("make", MODULES)
def test_a_module_with_bodies_does_what_the_function_does(make: Any) -> None:
    module = make()
    for run in ways(module):
        agree(run(X), nested(X))
    with hf.debug():
        agree(module(X), nested(X))
    slope = hf.grad(lambda x: hf.sum(nested(x)[1]))(X)
    agree(hf.grad(lambda x: hf.sum(module(x)[1]))(X), slope)
    if make is not imported:  # which is of one size
        many = hf.stack([X, X + 0.5])
        agree(hf.vmap(module)(many), hf.vmap(nested)(many))


@pytest.mark.parametrize("make", MODULES)
def test_bodies_are_transformed_at_any_depth(make: Any, monkeypatch: Any) -> None:
    module = WithoutTanh(make()).transform()
    wanted = expected(monkeypatch)
    for run in ways(module):
        agree(run(X), wanted)
    agree(make()(X), nested(X))


def test_patterns_are_replaced_in_functions_that_operators_run(
    monkeypatch: Any,
) -> None:
    module = symbolic()
    [match] = fx.replace_pattern(module, lambda a: hf.tanh(a), softsign)
    assert match.anchor.name == "tanh"
    wanted = expected(monkeypatch)
    for run in ways(module):
        agree(run(X), wanted)
    assert fx.replace_pattern(module, lambda a: hf.tanh(a), softsign) == []


def test_without_a_match_bodies_stay_functions() -> None:
    module = symbolic()
    before = module.code
    assert fx.replace_pattern(module, lambda a: hf.cos(a), softsign) == []
    assert module.code == before


def test_a_body_is_a_module_of_what_it_reads_and_its_parameters() -> None:
    module = fx.open_bodies(
        hf.symbolic_trace(lambda x, w: hf.map(lambda row: hf.tanh(row @ w), x))
    )
    lines = [line.partition("  #")[0].strip() for line in module.code.splitlines()]
    assert lines[1:] == [
        "body = self.attributes['body']",
        "body_with = partial(body, w)",
        "map_1 = hf.map(body_with, x)",
        "return map_1",
    ]
    lines = module.attributes["body"].code.splitlines()
    assert lines[0] == "def body(self, c0, row):"
    agree(module(X, X.T), hf.tanh(X @ X.T))


def double(x: Any) -> Any:
    return x * 2.0


class Scaled:
    def __init__(self, by: Any) -> None:
        self.by = by

    def call(self, x: Any) -> Any:
        return x * self.by


class Twice(hf.HigherOrderOp):
    def debug(self, f: Any, x: Any) -> Any:
        return f(f(x))


twice = Twice()


@pytest.mark.parametrize(
    ("f", "bodies"),
    [
        (lambda x: hf.map(double, x), 1),
        (lambda x: hf.map(hf.sin, x), 0),  # a function of hopflow's is as it is
        (lambda x: hf.map(partial(lambda a, b: a * b, x[0]), x), 1),
        (lambda x: hf.map(Scaled(2.0).call, x), 1),
        (
            lambda x: hf.switch(
                1, [lambda v: v, lambda v: hf.tanh(v) * x, double], (x,)
            ),
            3,
        ),
        (lambda x: hf.map(lambda r: hf.map(lambda v, k=r[0]: v * k, r), x), 2),
        (lambda x: hf.grad(lambda v: hf.sum(v * x))(x), 1),
        (lambda x: hf.map(lambda r: r if r.shape[0] > 2 else -r, x), 0),
        (lambda x: hf.map(lambda *r: r[0] * 2.0, x), 1),
        (lambda x: twice(lambda v: hf.map(lambda r: r * x[0], v), x), 0),
    ],
)
def test_every_function_that_an_operator_runs_is_opened(f: Any, bodies: int) -> None:
    module = hf.symbolic_trace(f)
    opened = fx.open_bodies(module)
    assert len(fx.opening.bodies_of(opened)) == bodies
    agree(opened(X), module(X))
    agree(fx.Transformer(module).transform()(X), module(X))


class Seen(fx.Interpreter):
    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self.seen: list[str] = []

    def run_node(self, node: Any) -> Any:
        self.seen.append(node.name)
        return super().run_node(node)


@pytest.mark.parametrize("make", [lambda: fx.open_bodies(symbolic()), imported])
def test_an_interpreter_runs_bodies_node_by_node(make: Any) -> None:
    seen = Seen(make())
    agree(seen.run(X), nested(X))
    assert "tanh" in seen.seen
    seen = Seen(make())
    with hf.debug():
        agree(seen.run(X), nested(X))
    assert seen.seen.count("tanh") > 1  # once for each step that takes the branch


class Sines(fx.Interpreter):
    count = 0

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        self.count += target is hf.sin
        return super().call_function(target, args, kwargs)


def of_rows(x: Any) -> Any:
    scale = hf.sum(x)
    return hf.map(lambda r: hf.sin(r) * scale, x)


def of_steps(x: Any) -> Any:
    def step(c: Any, r: Any) -> Any:
        low = hf.sum(c) < 0.0
        return hf.cond(low, lambda: hf.sin(c), lambda: hf.sin(r * 2.0)), c

    return hf.scan(step, x[0], x)


@pytest.mark.parametrize(("f", "least"), [(of_rows, 1), (of_steps, 2)])
def test_an_interpreter_reaches_functions_that_operators_run(
    f: Any, least: int
) -> None:
    module = hf.symbolic_trace(f)
    before = module.code
    sines = Sines(module)
    agree(sines.run(X), f(X))
    assert sines.count >= least
    assert module.code == before
    traced = Sines(module)
    agree(hf.jit(traced.run)(X), f(X), rtol=1e-5)
    assert traced.count >= least

    class Outside(Sines):
        runs_bodies = False

    outside = Outside(module)
    agree(outside.run(X), f(X))
    assert outside.count == 0


def test_functions_that_run_as_python_are_no_bodies() -> None:
    calls: list[str] = []

    def f(x: Any) -> Any:
        def host(v: Any) -> Any:
            calls.append("callback")
            return v * 2.0

        y = hf.callback(host, hf.spec("f32[4, 3]"), x)
        return hf.fori_loop(
            0, 2, lambda _, c: hf.sin(c), y, progress=lambda *_: calls.append("step")
        )

    module = hf.symbolic_trace(f)
    expected, once = f(X), list(calls)
    runs = [
        fx.open_bodies(module),
        Sines(module).run,
        fx.Transformer(module).transform(),
    ]
    for run in runs:
        calls.clear()
        agree(run(X), expected)
        assert calls == once


def test_what_an_interpreter_cannot_open_runs_as_it_is() -> None:
    def f(x: Any) -> Any:
        return hf.map(lambda r: hf.sin(r) if r.shape[0] > 2 else r, x)

    sines = Sines(hf.symbolic_trace(f))
    agree(sines.run(X), f(X))
    assert sines.count == 0


def stopped(x: Any) -> Any:
    return hf.scan(lambda c, r: (c + r, c), 0.0, x, until=lambda c: c > 3.0)[0]


def slope(x: Any) -> Any:
    def loss(w: Any) -> Any:
        return hf.sum(hf.scan(lambda c, _: (hf.tanh(c * w), c), w, None, length=3)[1])

    return hf.grad(loss)(hf.sum(x))


def same_name(x: Any) -> Any:
    scale = hf.sum(x)
    return hf.map(lambda c0: c0 * scale + 1.0, x)


@pytest.mark.parametrize("f", [stopped, slope, same_name])
def test_parameters_of_bodies_have_any_names(f: Any) -> None:
    x = hf.asarray([1.0, 2.0, 3.0])
    imported = hf.symbolic_trace(hf.trace(f, x))
    for module in (imported, fx.open_bodies(hf.symbolic_trace(f))):
        agree(fx.Interpreter(module).run(x), f(x))
        agree(module.propagate(x)(x), f(x))
        types: Any = fx.ShapeProp(module).propagate(x)
        assert types == f(x).type


def test_a_value_of_another_graph_in_a_body_is_refused() -> None:
    class Outer(fx.Transformer):
        first: Any = None

        def placeholder(self, target: Any, args: Any, kwargs: Any) -> Any:
            found = super().placeholder(target, args, kwargs)
            self.first = self.first or [found]
            return found

        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            if getattr(target, "__name__", "") == "tanh":
                return args[0] + self.first[0]
            return super().call_function(target, args, kwargs)

    with pytest.raises(TraceError, match="`x` is a proxy of another trace"):
        Outer(symbolic()).transform()
    for wrong in (3, hf.trace(nested, X, captures=True)):
        with pytest.raises(ArgumentTypeError, match="open_bodies: expected a"):
            fx.open_bodies(wrong)  # type: ignore[arg-type]


BIAS = hf.asarray([0.5, -0.25, 1.0])


def shifted(module: fx.GraphModule) -> fx.GraphModule:
    fx.replace_pattern(module, lambda v: hf.cos(v), lambda v: hf.cos(v) + BIAS)
    return module


@pytest.mark.parametrize(
    ("rewrite", "shift"),
    [
        (fx.open_bodies, 0.0),
        (lambda module: fx.open_bodies(fx.open_bodies(module)), 0.0),
        (lambda module: fx.Transformer(module).transform(), 0.0),
        (lambda module: fx.split_module(module, None, lambda _: 0), 0.0),
        (shifted, BIAS),
    ],
)
@pytest.mark.parametrize("opened", [False, True])
def test_rewriting_keeps_the_tensors_of_a_trained_module(
    rewrite: Any, shift: Any, opened: bool
) -> None:
    """Those of a tree are not those that its graph was traced with."""
    w = W * 0.1  # which the function of `map` closes over
    module = hf.symbolic_trace(lambda x: hf.map(lambda r: hf.sin(r) * w, hf.cos(x) * w))
    before = module(X)
    module = fx.open_bodies(module) if opened else module
    trained = pytree.tree_map(lambda w: w * 10.0, module)
    agree(rewrite(trained)(X), hf.sin((hf.cos(X) + shift) * W) * W)
    agree(module(X), before)
    agree(module.recompile()(X), before)


# --- captured modules -----------------------------------------------------------------


def test_a_captured_module_is_a_graph_of_operations() -> None:
    def f(x: Any, options: Any, n: Any) -> Any:
        return {"sum": hf.sum(x * options["w"], axis=0) * n, "n": n}

    module = hf.trace(f, X, {"w": W}, 2)
    graph = hf.symbolic_trace(module).graph
    lines = [line.partition("  #")[0].strip() for line in str(graph).splitlines()]
    assert lines == [
        "def f(self, x, options, n):",
        "arguments = arguments_1(x, options, n)",
        "x_1 = arguments[0]",
        "options_1 = arguments[1]",
        "multiply = op.multiply(x_1, options_1)",
        "reduce_sum = op.reduce_sum(multiply, axes=(0,))",
        "multiply_1 = op.multiply(reduce_sum, 2.0)",
        "results = results_1(arguments, (2, multiply_1))",
        "return results",
    ]
    assert str(graph.find_nodes("call_function")[3].meta["type"]) == "f32[4, 3]"
    agree(hf.symbolic_trace(module)(X, {"w": W}, 2), f(X, {"w": W}, 2))


def test_an_imported_module_checks_its_arguments_and_writes() -> None:
    total = hf.zeros(3)

    def f(x: Any) -> Any:
        total[...] = total + x.sum(axis=0)
        x *= 2.0
        return x

    module = hf.symbolic_trace(hf.trace(f, X, captures=True))
    x = hf.asarray(np.array(X))
    assert module(x) is x
    agree(x, X * 2.0)
    agree(total, X.sum(axis=0))
    with pytest.raises(ShapeError, match=r"`x` was f32\[4, 3\] in the trace"):
        module(X[:2])
    constant = hf.symbolic_trace(hf.trace(lambda x, k: x * k, X, 2.0))
    with pytest.raises(ArgumentValueError, match=r"was 2\.0 in the trace"):
        constant(X, 3.0)
    sized = hf.trace(lambda x: x if x.shape[0] > 3 else -x, X, mode="symbolic")
    with pytest.raises(GuardError, match="not valid for these arguments"):
        hf.symbolic_trace(sized)(X[:2])


WHOLE = hf.asarray([1, 2, 3])


def softmax(v: Any) -> Any:
    return hf.log(hf.sum(hf.exp(v)))


def factors(v: Any) -> Any:
    q, r = hf.linalg.qr(v)
    return q, r


@pytest.mark.parametrize("mode", ["real", "symbolic"])
@pytest.mark.parametrize(
    ("f", "pattern", "replacement", "found"),
    [
        (hf.sin, lambda v: hf.sin(v), lambda v: hf.sin(v * 1.0), 1),
        (softmax, softmax, lambda v: hf.logsumexp(v), 1),
        # A pattern has the axes of what it matches, and its dtypes.
        (lambda x: hf.sum(x, axis=0), lambda v: hf.sum(v), lambda v: v, 0),
        (lambda x: x + WHOLE, lambda a, b: a + b, lambda a, b: b + a, 1),
        (lambda x: hf.mean(x, axis=1), lambda v: hf.mean(v, axis=1),
         lambda v: hf.sum(v, axis=1) / v.shape[1], 1),
        (lambda x: hf.reshape(x, (-1,)), lambda v: hf.reshape(v, (-1,)),
         lambda v: hf.reshape(v.T.T, (-1,)), 1),
        (lambda x: (s := hf.sin(x)) * hf.exp(s), lambda v: hf.exp(hf.sin(v)),
         lambda v: v, 0),
        (lambda x: x - x, lambda v: v - v, lambda v: v * 0.0, 1),
        (lambda x: x - hf.sin(x), lambda v: v - v, lambda v: v * 0.0, 0),
        # Parameters match constants of any dtype.
        (lambda x: x * 2.0, lambda v, k: v * k, lambda v, k: k * v, 1),
        (lambda x: hf.astype(x, "float64") * 2.0, lambda v, k: v * k,
         lambda v, k: k * v, 1),
        (lambda x: x * W, lambda v: v * W, lambda v: W * v, 1),
        (lambda x: x * (W + 0.0), lambda v: v * W, lambda v: W * v, 0),
        # Several results, of several nodes and of one.
        (lambda x: (hf.sin(x), hf.cos(x)), lambda v: (hf.sin(v), hf.cos(v)),
         lambda v: (hf.sin(v * 1.0), hf.cos(v * 1.0)), 1),
        (lambda x: factors(x[:, :2]), factors, lambda v: factors(v * 1.0), 1),
        (lambda x: factors(x[:, :2])[1], factors, lambda v: factors(v * 1.0), 1),
        # In the bodies of operators.
        (lambda x: hf.map(lambda r: hf.tanh(r * 2.0), x), lambda v: hf.tanh(v),
         lambda v: hf.tanh(v * 1.0), 1),
        (lambda x: hf.cond(x[0, 0] > 0, hf.sin, hf.exp, (x,)), lambda v: hf.sin(v),
         lambda v: hf.sin(v * 1.0), 1),
        # The graphs of operators are not compared.
        (lambda x: hf.map(hf.sin, x), lambda v: hf.map(hf.sin, v), lambda v: v, 0),
    ],
)  # fmt: skip
def test_patterns_of_users_match_operations(
    f: Any, pattern: Any, replacement: Any, found: int, mode: str
) -> None:
    captured = hf.trace(f, X, mode=mode, captures=True)
    module = hf.symbolic_trace(captured)
    assert len(fx.replace_pattern(module, pattern, replacement)) == found
    agree(module(X), f(X), rtol=1e-5)
    # What was put in calls functions of users, and is matched by them.
    again = fx.replace_pattern(module, replacement, replacement) if found else []
    agree(hf.jit(module)(X), f(X), rtol=1e-5)
    assert len(again) <= 1


def test_a_pattern_for_operations_makes_sense() -> None:
    module = hf.symbolic_trace(hf.trace(lambda x: hf.sin(x), X))
    with pytest.raises(ArgumentTypeError, match="takes any number of arguments"):
        fx.replace_pattern(module, lambda *v: hf.sin(v[0]), lambda *v: v[0])


@pytest.mark.parametrize("mode", ["real", "symbolic"])
def test_what_has_effects_is_kept(mode: str, capsys: Any) -> None:
    def f(x: Any) -> Any:
        hf.map(lambda r: hf.print("row {}", r[0]), x)
        hf.print("all {}", x[0, 0])
        hf.sin(x)
        return x

    module = hf.symbolic_trace(hf.trace(f, X, mode=mode))
    module.graph.eliminate_dead_code()
    module.recompile()
    assert "sin" not in module.code
    module(X)
    out = capsys.readouterr().out
    assert (out.count("row"), out.count("all")) == (4, 1)


def test_sizes_that_only_the_run_knows_are_values_of_nodes() -> None:
    def f(x: Any) -> Any:
        kept = x[x > 0.0]
        return hf.reshape(hf.concat([kept, kept]), (2, -1)), kept.shape[0]

    module = hf.symbolic_trace(hf.trace(f, X, mode="symbolic"))
    for run in (module, fx.Interpreter(module).run):
        agree(run(X), f(X))
        agree(run(X - 0.4), f(X - 0.4))


def test_interpreters_run_bodies_with_any_names_of_parameters() -> None:
    def until(x: Any) -> Any:
        step = lambda c, r: (c + r, c)  # noqa: E731
        return hf.scan(step, 0.0, x, until=lambda c: c > 3.0)[0]

    def loss(w: Any) -> Any:
        step = lambda c, _: (hf.tanh(c * w), c)  # noqa: E731
        return hf.sum(hf.scan(step, w, None, length=3)[1])

    for f, x in ((until, hf.ones(3)), (hf.grad(loss), hf.asarray(2.0))):
        module = hf.symbolic_trace(hf.trace(f, x))
        expected = module(x).tolist()
        assert hf.fx.Interpreter(module).run(x).tolist() == expected
        assert module.propagate(x)(x).tolist() == expected
        hf.fx.ShapeProp(module).propagate(x)
    module = hf.symbolic_trace(lambda x, *rest, scale=2.0, **more: x * scale + rest[0])
    found = hf.fx.Interpreter(module).run(hf.ones(2), 3.0, scale=4.0)
    assert found.tolist() == module(hf.ones(2), 3.0, scale=4.0).tolist()
