"""fx on captured graphs: interpreters, transformers and patterns reach into bodies."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import hopflow as hf
from hopflow import fx
from hopflow.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    CarryTypeError,
    GraphError,
    GuardError,
    MutationError,
    OperatorError,
    TraceError,
)
from hopflow.graph.module import GraphModule
from hopflow.graph.verifier import verify
from hopflow.testing.executions import agree

W = hf.asarray([1.0, 2.0, 3.0])
X = hf.asarray(np.linspace(-1.0, 1.0, 12, dtype=np.float32).reshape(4, 3))


def nested(x: Any) -> Any:
    """A `cond` in a `while_loop` in a `scan`."""

    def inner(i: Any, a: Any) -> Any:
        added = hf.cond(hf.sum(a) > 3.0, lambda: a + W, lambda: hf.tanh(a))
        return i + 1, added

    def step(c: Any, row: Any) -> Any:
        _, c = hf.while_loop(lambda i, a: i < 2, inner, (0, c * row))
        return c, hf.sum(c)

    return hf.scan(step, x[0], x)


def captured(f: Callable[..., Any], *args: Any, mode: str = "real") -> GraphModule:
    return hf.trace(f, *args, mode=mode, captures=True)


class WithoutTanh(fx.Transformer):
    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target.name == "tanh":
            return args[0] / (1.0 + hf.abs(args[0]))
        return super().call_function(target, args, kwargs)


def softsign(x: Any) -> Any:
    return x / (1.0 + hf.abs(x))


def expected(x: Any, monkeypatch: Any, f: Callable[..., Any]) -> Any:
    """What `nested` gives with another function for `tanh`."""
    with monkeypatch.context() as patch, hf.debug():
        patch.setattr(hf, "tanh", f)
        return nested(x)


def ways(module: Any) -> list[Callable[..., Any]]:
    """All that a graph can be used for."""
    return [
        module,
        hf.jit(module),
        hf.jit(module, dynamic=True),
        hf.jit(module, backend="interpreter"),
        fx.Interpreter(module).run,
        lambda x: hf.trace(module, x, captures=True)(x),
    ]


@pytest.mark.parametrize("mode", ["real", "symbolic"])
@pytest.mark.parametrize("way", ["transformer", "pattern"])
def test_what_is_in_bodies_at_any_depth_is_rewritten(
    way: str, mode: str, monkeypatch: Any
) -> None:
    module = captured(nested, X, mode=mode)
    if way == "pattern":
        [match] = fx.replace_pattern(module, lambda x: hf.tanh(x), softsign)
        assert match.anchor.op.name == "tanh"
        assert match.anchor.operator_path.count("→") == 2
    else:
        module = WithoutTanh(module).transform()
    verify(module.graph)
    assert "tanh" not in str(module)
    wanted = expected(X, monkeypatch, softsign)
    for run in ways(module):
        agree(run(X), wanted)


@pytest.mark.parametrize("way", ["transformer", "pattern"])
def test_what_was_rewritten_has_derivatives_and_batches(
    way: str, monkeypatch: Any
) -> None:
    module = captured(nested, X)
    if way == "pattern":
        fx.replace_pattern(module, lambda x: hf.tanh(x), softsign)
    else:
        module = WithoutTanh(module).transform()
    with monkeypatch.context() as patch:
        patch.setattr(hf, "tanh", softsign)
        direct = captured(nested, X)

    def total(f: Any) -> Any:
        return lambda x: hf.sum(f(x)[0]) + hf.sum(f(x)[1])

    many = hf.stack([X, X + 0.5])
    for transform in (hf.grad, hf.jit, hf.vmap):
        arg = many if transform is hf.vmap else X
        agree(transform(total(module))(arg), transform(total(direct))(arg))
    agree(
        hf.jit(hf.vmap(hf.grad(total(module))))(many),
        hf.vmap(hf.grad(total(direct)))(many),
    )


def test_an_identity_keeps_the_text_of_a_graph() -> None:
    for mode in ("real", "symbolic"):
        module = captured(nested, X, mode=mode)
        assert str(fx.Transformer(module).transform()) == str(module)


class AddOuter(fx.Transformer):
    """Adds what it finds around the operators, to each `tanh`."""

    def __init__(self, module: Any, tensor: Any) -> None:
        super().__init__(module)
        self.tensor = tensor
        self.first: Any = None

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        result = super().call_function(target, args, kwargs)
        if target.name == "tanh":
            return result + self.tensor + self.first
        if self.first is None and getattr(result, "ndim", 2) == 1:
            self.first = result  # `x[0]`, in the root graph
        return result


@pytest.mark.parametrize("mode", ["real", "symbolic"])
def test_a_body_may_come_to_read_what_is_outside_of_it(
    mode: str, monkeypatch: Any
) -> None:
    shift = hf.asarray([0.5, 0.25, 0.125])
    module = AddOuter(captured(nested, X, mode=mode), shift).transform()
    tanh = hf.tanh
    wanted = expected(X, monkeypatch, lambda a: tanh(a) + shift + X[0])
    assert any(value is shift for value in module.attributes.values())
    for run in ways(module):
        agree(run(X), wanted)
    slope = hf.grad(lambda x: hf.sum(module(x)[1]))(X)
    agree(hf.jit(hf.grad(lambda x: hf.sum(module(x)[1])))(X), slope)


def test_a_replacement_may_read_what_is_outside_of_the_body(monkeypatch: Any) -> None:
    shift = hf.asarray([0.5, 0.25, 0.125])
    module = captured(nested, X, mode="symbolic")
    found = fx.replace_pattern(
        module, lambda x: hf.tanh(x), lambda x: softsign(x) + shift * W
    )
    assert len(found) == 1
    assert {id(v) for v in module.attributes.values()} == {id(W), id(shift)}
    wanted = expected(X, monkeypatch, lambda a: softsign(a) + shift * W)
    for run in ways(module):
        agree(run(X), wanted)


def test_the_body_of_calls_stays_one_graph() -> None:
    @hf.subgraph
    def body(x: Any) -> Any:
        return hf.tanh(x) + 1.0

    module = captured(lambda x: body(body(x)), X)

    def bodies(module: GraphModule) -> int:
        return len({id(n.params["body"]) for n in module.graph.nodes if n.graphs})

    changed = WithoutTanh(module).transform()
    assert (bodies(module), bodies(changed)) == (1, 1)
    agree(changed(X), softsign(softsign(X) + 1.0) + 1.0)
    shift = hf.asarray(0.5)
    [_] = fx.replace_pattern(changed, lambda x: x + 1.0, lambda x: x + shift)
    assert bodies(changed) == 1
    agree(changed(X), softsign(softsign(X) + 0.5) + 0.5)

    class Shifted(fx.Transformer):
        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            result = super().call_function(target, args, kwargs)
            return result + shift if target.name == "tanh" else result

    agree(Shifted(module).transform()(X), hf.tanh(hf.tanh(X) + 1.5) + 1.5)


# --- operators ------------------------------------------------------------------------


class Twice(hf.HigherOrderOp):
    def debug(self, f: Any, x: Any) -> Any:
        return f(f(x))


twice = Twice()


@hf.custom_vjp
def doubled(x: Any) -> Any:
    return hf.tanh(x) * 2.0


doubled.defvjp(lambda x: (doubled(x), x), lambda x, ct: (ct * 3.0,))

OPERATORS = [
    lambda x: hf.cond(x[0, 0] > 0, lambda: hf.tanh(x), lambda: hf.tanh(x + 1.0)),
    lambda x: hf.switch(1, [lambda: x, lambda: hf.tanh(x)]),
    lambda x: hf.while_loop(lambda c: hf.sum(c) > 1, lambda c: hf.tanh(c) * 0.5, x),
    lambda x: hf.fori_loop(0, 3, lambda i, c: hf.tanh(c) * i, x),
    lambda x: hf.fori_loop(0, 0, lambda i, c: hf.tanh(c) * i, x),
    lambda x: hf.scan(lambda c, r: (hf.tanh(c) + r, c), x[0], x),
    lambda x: hf.scan(lambda c, r: (hf.tanh(c) + r, c), x[0], x[:0]),
    lambda x: hf.map(lambda r: hf.tanh(r), x),
    lambda x: hf.map(lambda r: hf.map(lambda v: hf.tanh(v), r), x),
    lambda x: hf.associative_scan(lambda a, b: hf.tanh(a) + b, x),
    lambda x: hf.checkpoint(lambda v: hf.tanh(v) * v)(x),
    lambda x: doubled(x),
    lambda x: twice(lambda v: hf.tanh(v), x),
    lambda x: hf.map(lambda r: twice(lambda v: hf.tanh(v) * W, r), x),
    lambda x: hf.grad(
        lambda v: hf.sum(hf.scan(lambda c, r: (hf.tanh(c) * r, c), v[0], v)[1])
    )(x),
]


@pytest.mark.parametrize("f", OPERATORS)
@pytest.mark.parametrize("mode", ["real", "symbolic"])
def test_every_operator_is_transformed_and_run_node_by_node(f: Any, mode: str) -> None:
    wanted = f(X)
    module = captured(f, X, mode=mode)
    same = fx.Transformer(module).transform()
    for run in (same, hf.jit(same), fx.Interpreter(module).run):
        agree(run(X), wanted)
    before = str(module).count("tanh(")
    assert len(fx.replace_pattern(module, lambda x: hf.tanh(x), softsign)) == before
    assert "tanh(" not in str(module)
    agree(module(X), WithoutTanh(same).transform()(X))
    again = captured(f, X, mode=mode)
    shift = hf.asarray(0.25)
    fx.replace_pattern(
        again, lambda x: hf.tanh(x), lambda x: hf.tanh(x) + shift - shift
    )
    agree(again(X), wanted, rtol=1e-4)
    agree(hf.jit(again)(X), wanted, rtol=1e-4)


def test_sizes_that_only_the_run_knows_are_kept() -> None:
    def f(x: Any) -> Any:
        kept = x[x > 0.0]
        return hf.tanh(kept), hf.map(lambda v: hf.tanh(v) * 2.0, kept)

    module = captured(f, X, mode="symbolic")
    for other in (fx.Transformer(module).transform(), WithoutTanh(module).transform()):
        verify(other.graph)
    agree(fx.Transformer(module).transform()(X), f(X))
    assert len(fx.replace_pattern(module, lambda x: hf.tanh(x), softsign)) == 2
    agree(module(X), (softsign(X[X > 0.0]), softsign(X[X > 0.0]) * 2.0))


def test_what_a_function_writes_is_written_still() -> None:
    total = hf.zeros(3)

    def f(x: Any) -> Any:
        total[...] = total + x.sum(axis=0)
        x *= 2.0
        return x

    module = captured(f, X)
    other = fx.Transformer(module).transform()
    fx.replace_pattern(module, lambda a, b: a + b, lambda a, b: b + a)
    for run in (module, other, fx.Interpreter(module).run):
        total[...] = 0.0
        x = hf.asarray(np.array(X))
        assert run(x) is x
        agree(x, X * 2.0)
        agree(total, X.sum(axis=0))


# --- graphs of jit --------------------------------------------------------------------


def test_graphs_of_jitted_functions_are_modules_too() -> None:
    jitted = hf.jit(nested)
    wanted = jitted(X)
    inputs = [X, W] if jitted.graph.inputs[0].type.shape == (4, 3) else [W, X]
    agree(tuple(fx.Interpreter(jitted.graph).run(*inputs)), wanted)
    module = fx.Transformer(jitted.graph).transform()
    agree(tuple(module(*inputs)), wanted)
    module = fx.module_of(jitted.graph)
    assert len(fx.replace_pattern(module, lambda x: hf.tanh(x), lambda x: x)) == 1
    assert "tanh" in jitted.graph_text

    with pytest.raises(ArgumentTypeError, match="module_of: expected a captured graph"):
        fx.module_of(fx.Graph("f"))  # type: ignore[arg-type]

    def backend(module: Any, inputs: Any) -> Any:
        return WithoutTanh(module).transform()

    agree(
        hf.jit(nested, backend=backend)(X),
        WithoutTanh(captured(nested, X)).transform()(X),
    )


# --- interpreters ---------------------------------------------------------------------


def test_an_interpreter_sees_each_node_of_each_step() -> None:
    class Names(fx.Interpreter):
        def __init__(self, module: Any) -> None:
            super().__init__(module)
            self.names: list[str] = []

        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            self.names.append(target.name)
            return super().call_function(target, args, kwargs)

    module = captured(lambda x: hf.fori_loop(0, 3, lambda i, c: hf.sin(c) * i, x), X)
    names = Names(module)
    agree(names.run(X), module(X))
    assert names.names.count("sin") == 3
    assert names.names.count("less") == 4
    assert names.names[0] == "while_loop"


def test_an_error_of_an_interpreter_names_the_nodes() -> None:
    class Stops(fx.Interpreter):
        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            if target.name == "tanh":
                raise ZeroDivisionError("stop")
            return super().call_function(target, args, kwargs)

    with pytest.raises(ZeroDivisionError, match="stop") as caught:
        Stops(captured(nested, X)).run(X)
    notes = [note.split(" (")[0] for note in caught.value.__notes__]
    assert notes == [f"in node `{op}`" for op in ("tanh", "cond", "while_loop", "scan")]


class Gives(fx.Transformer):
    """Returns something else for `tanh`, or for the outputs of bodies."""

    def __init__(self, module: Any, tanh: Any = None, output: Any = None) -> None:
        super().__init__(module)
        self.other, self.others = tanh, output

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        result = super().call_function(target, args, kwargs)
        if target.name == "tanh" and self.other is not None:
            return self.other(result)
        return result

    def output(self, target: Any, args: Any, kwargs: Any) -> Any:
        found = super().output(target, args, kwargs)
        return found if self.others is None else self.others(found)


def in_place(x: Any) -> Any:
    x *= 2.0
    return x


@pytest.mark.parametrize(
    ("tanh", "output", "error", "message"),
    [
        (lambda x: (x, x), None, OperatorError, "must give one value, and gave 2"),
        (None, lambda xs: xs[:-1], GraphError, "results, and its transformation"),
        (lambda x: x.astype(hf.float64), None, CarryTypeError, "in f32.3., out f64"),
        (lambda x: x[:2], None, CarryTypeError, r"in f32\[3\], out f32\[2\]"),
    ],
)
def test_a_transformation_that_makes_no_sense_is_refused(
    tanh: Any, output: Any, error: Any, message: str
) -> None:
    def f(x: Any) -> Any:
        return hf.scan(lambda c, r: (hf.tanh(c), hf.sum(r)), x[0], x)

    with pytest.raises(error, match=message):
        Gives(captured(f, X), tanh, output).transform()


def test_a_transformation_does_not_write_to_what_it_is_given() -> None:
    class Writes(fx.Transformer):
        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            if target.name == "tanh":
                return in_place(args[0])
            return super().call_function(target, args, kwargs)

    for f in (lambda x: hf.tanh(x), lambda x: hf.map(lambda r: hf.tanh(r), x)):
        with pytest.raises(MutationError, match="writes to a tensor f32"):
            Writes(captured(f, X)).transform()


def test_what_is_no_module_is_refused() -> None:
    for tool in (fx.Interpreter, fx.Transformer):
        with pytest.raises(
            ArgumentTypeError, match="expected a graph module, and found"
        ):
            tool(3)


def test_what_a_transformation_decides_by_sizes_is_a_guard() -> None:
    class BySize(fx.Transformer):
        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            if target.name == "tanh" and args[0].shape[0] > 3:
                return args[0]
            return super().call_function(target, args, kwargs)

    def by_size(x: Any) -> Any:
        return x if x.shape[0] > 3 else hf.tanh(x)

    module = captured(lambda x: hf.tanh(x), X, mode="symbolic")
    changed = BySize(module).transform()
    assert len(fx.replace_pattern(module, lambda x: hf.tanh(x), by_size)) == 1
    for other in (changed, module):
        agree(other(X), X)
        with pytest.raises(GuardError, match="is not valid for these arguments"):
            other(X[:2])
    with pytest.raises(GuardError, match="is not valid"):  # of a run it is one too
        fx.Interpreter(changed).run(X[:2])


# --- patterns -------------------------------------------------------------------------


def count(f: Any, pattern: Any, replacement: Any, *args: Any, **options: Any) -> int:
    """How many matches are replaced, by what gives the same results."""
    args = args or (X,)
    module = captured(f, *args, mode="symbolic")
    found = fx.replace_pattern(module, pattern, replacement, **options)
    verify(module.graph)
    agree(module(*args), f(*args), rtol=1e-4)
    return len(found)


WHOLE = hf.asarray([1, 2, 3])


@pytest.mark.parametrize(
    ("f", "pattern", "replacement", "found"),
    [
        (lambda x: hf.log(hf.sum(hf.exp(x))), lambda v: hf.log(hf.sum(hf.exp(v))),
         lambda v: hf.logsumexp(v), 1),
        (lambda x: hf.log(hf.sum(hf.exp(x), axis=0)),
         lambda v: hf.log(hf.sum(hf.exp(v))), lambda v: hf.logsumexp(v), 0),
        (lambda x: x * 2.0 + x * 3.0, lambda v: v * 2.0, lambda v: v + v, 1),
        (lambda x: x * 2.0 + WHOLE * 2, lambda v: v * 2.0, lambda v: v + v, 1),
        (lambda x: x + WHOLE, lambda a, b: a + b, lambda a, b: b + a, 1),
        (lambda x: x @ x.T, lambda a, b: a @ b.T, lambda a, b: (b @ a.T).T, 1),
        (lambda x: (hf.sin(x), hf.cos(x)), lambda v: (hf.sin(v), hf.cos(v)),
         lambda v: (hf.sin(v + 0.0), hf.cos(v + 0.0)), 1),
        (lambda x: hf.sin(x) * hf.exp(hf.sin(x)), lambda v: hf.exp(hf.sin(v)),
         lambda v: hf.exp(hf.sin(v) + 0.0), 1),
        (lambda x: (s := hf.sin(x)) * hf.exp(s), lambda v: hf.exp(hf.sin(v)),
         lambda v: hf.exp(hf.sin(v) + 0.0), 0),
        (lambda x: hf.exp(x) - hf.exp(x), lambda a: a - a, lambda a: a * 0.0, 0),
        (lambda x: x - x, lambda a: a - a, lambda a: a * 0.0, 1),
        (lambda x: hf.reshape(x, (-1,)), lambda v: hf.reshape(v, (-1,)),
         lambda v: hf.reshape(v.T.T, (-1,)), 1),
        (lambda x: hf.cond(x[0, 0] > 0, hf.sin, hf.cos, (x,)),
         lambda p, v: hf.cond(p, hf.sin, hf.cos, (v,)),
         lambda p, v: hf.cond(~p, hf.cos, hf.sin, (v,)), 1),
        (lambda x: hf.cond(x[0, 0] > 0, hf.sin, hf.exp, (x,)),
         lambda p, v: hf.cond(p, hf.sin, hf.cos, (v,)),
         lambda p, v: v, 0),
        (lambda x: hf.map(lambda r: r * W, x), lambda r: r * W, lambda r: W * r, 1),
        (lambda x: hf.map(lambda r: r * WHOLE, x), lambda r: r * W, lambda r: W * r, 0),
        (lambda x: x * 2.0, lambda v, *, k: v * k, lambda v, *, k: k * v, 1),
    ],
)  # fmt: skip
def test_a_pattern_matches_what_it_is_traced_to(
    f: Any, pattern: Any, replacement: Any, found: int
) -> None:
    assert count(f, pattern, replacement) == found


def test_matches_are_chosen_and_do_not_overlap() -> None:
    def negated(v: Any) -> Any:
        return hf.negative(hf.negative(v))

    def f(x: Any) -> Any:
        return hf.negative(negated(x)) * 2.0 + hf.map(negated, x)

    def in_bodies(match: fx.Match) -> bool:
        return bool(match.anchor.operator_path)

    assert count(f, negated, lambda v: v) == 2
    assert count(f, negated, lambda v: v, where=in_bodies) == 1
    values: list[Any] = []

    def note(match: fx.Match) -> bool:
        values.append(match.values)
        return False

    module = captured(lambda x: x * 2.0, X)
    times = (lambda v, k: v * k, lambda v, k: k * v)
    assert fx.replace_pattern(module, *times, where=note) == []
    [found] = values
    assert (found["v"].type, found["k"].value) == (X.type, 2.0)


@pytest.mark.parametrize(
    ("pattern", "replacement", "error", "message"),
    [
        (lambda x: x, lambda x: x, ArgumentValueError, "values that it computes"),
        (lambda x: (), lambda x: (), ArgumentValueError, "values that it computes"),
        (lambda x: -x, lambda y: y, ArgumentValueError, r"\['x'\], and `<lambda>` has"),
        (lambda x: -x, lambda x: (x, x), ArgumentValueError, "returns .f32.3.. here"),
        (lambda x: -x, lambda x: x[:1], ArgumentValueError, "and `<lambda>` .f32.1.."),
        (lambda x, y: -x, lambda x, y: y, ArgumentValueError, "does not use"),
        (lambda x: -x and x, lambda x: x, TraceError, "bool"),
        (lambda x: -x, in_place, MutationError, "`in_place` writes to a tensor"),
        (lambda *x: -x[0], lambda *x: x[0], ArgumentTypeError, "any number of arg"),
        (3, lambda x: x, ArgumentTypeError, "`pattern` must be a function"),
        (
            lambda x: [[-x]],
            lambda x: x,
            OperatorError,
            "one value or a tuple of values",
        ),
    ],
)
def test_a_pattern_that_makes_no_sense_leaves_the_module_as_it_was(
    pattern: Any, replacement: Any, error: Any, message: str
) -> None:
    module = captured(lambda x: -x, W)
    before = str(module)
    with pytest.raises(error, match=message):
        fx.replace_pattern(module, pattern, replacement)
    assert str(module) == before
