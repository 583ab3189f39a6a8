"""Exported programs: what they are called with, hold and say, and what is refused."""

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import hopflow as hf
from hopflow.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    CheckError,
    DerivativeError,
    DimError,
    ExportError,
    GuardError,
    ShapeError,
    StructureError,
)
from hopflow.testing.executions import agree, run_debug

X = hf.asarray(np.arange(6.0).reshape(2, 3))


def ones(*shape: int) -> Any:
    return hf.ones(shape, dtype=hf.float64)


class Pair(NamedTuple):
    first: Any
    second: Any


class Network(hf.nn.Module):
    layers: Any
    scale: Any = hf.nn.static(default=2)

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = hf.tanh(layer(x))
        return x * self.scale


def network() -> Network:
    first, second = hf.random.split(hf.random.key(0))
    layers = [
        hf.nn.Linear.init(first, 3, 4, dtype="float64"),
        hf.nn.Linear.init(second, 4, 3, dtype="float64"),
    ]
    return Network([*layers, *layers])


@pytest.fixture
def again(tmp_path: Path) -> Callable[[hf.ExportedProgram], hf.ExportedProgram]:
    """A program after it was saved and loaded; what it is called with is the same."""

    def through_a_file(program: hf.ExportedProgram) -> hf.ExportedProgram:
        path = tmp_path / "program.hopflow"
        program.save(path)
        found = hf.load(path)
        assert found == program
        assert hash(found) == hash(program)
        assert found.diff(program) == ()
        return found

    return through_a_file


# --- arguments and results ------------------------------------------------------------


def trees(s: Any, d: Any) -> Any:
    last = OrderedDict(q=1.5, r=(None, [s.first * 2]))
    return Pair(s.first + d["z"][0], s.second + 1), {"b": last, "a": d["z"][0]}, None


CALLS: list[tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = [
    (trees, (Pair(X, 3), {"z": [X, None]}), {}),
    (lambda x, *, scale, shift=1: x * scale + shift, (X,), {"scale": 2.5}),
    (lambda *xs, **named: sum(xs, named["y"]), (X, X), {"y": X}),
    (lambda x, mode, axis: hf.sum(x, axis=axis) if mode else x, (X, True, None), {}),
    (lambda q: q[0] + q[-1], (deque([X, X], maxlen=3),), {}),
    (lambda d: d["a"] * 2, (defaultdict(list, a=X),), {}),
    (lambda m, x: m(x), (network(), X), {}),
    (lambda key: hf.random.normal(key, (3,)), (hf.random.key(1),), {}),
    (lambda x: (hf.zeros((0, 2)), x[0, 0], True, 3, x.shape[0]), (X,), {}),
    (lambda: hf.arange(3), (), {}),
]


@pytest.mark.parametrize("call", CALLS, ids=range(len(CALLS)))
@pytest.mark.parametrize("dynamic", [None, True])
def test_a_program_is_called_as_the_function_is(
    call: Any, dynamic: Any, again: Any
) -> None:
    f, args, kwargs = call
    program = hf.export(f, args, kwargs, dynamic_shapes=dynamic)
    for found in (program, again(program)):
        agree(found(*args, **kwargs), f(*args, **kwargs))


@pytest.mark.parametrize("dtype", list("?bhiqBHIQefd"))
def test_all_dtypes_come_back_bit_by_bit(dtype: str, again: Any) -> None:
    held = hf.asarray(np.array([0, 1, 1], dtype))
    program = hf.export(lambda x: (hf.where(x == held, held, x), held[:0]), (held,))
    found, empty = again(program)(held)
    assert (found.type, empty.shape) == (held.type, (0,))
    assert np.asarray(found).tobytes() == np.asarray(held).tobytes()


def test_bfloat16_comes_back(again: Any) -> None:
    held = hf.asarray([1.0, float("nan"), -0.0], dtype=hf.bfloat16)
    [found] = again(hf.export(lambda: (held,))).state.values()
    assert found.type == held.type
    assert np.asarray(found).tobytes() == np.asarray(held).tobytes()


def test_writes_to_arguments_are_the_callers(again: Any) -> None:
    def step(x: Any, n: int) -> Any:
        x[0] += n
        return x, x * 2, n + 1

    program = again(hf.export(step, (hf.copy(X), 3)))
    x = hf.copy(X)
    first, doubled, n = program(x, 5)
    assert first is x
    assert n == 6
    agree([x[0], doubled[0]], [X[0] + 5, (X[0] + 5) * 2])
    assert program.signature.written == ("x",)
    assert program.signature.outputs[0].same == "x"


def test_buffers_are_what_a_program_writes_or_what_is_no_float(again: Any) -> None:
    count, weight = hf.asarray(np.zeros(2)), hf.asarray(np.ones(3))
    places = hf.asarray(np.array([2, 0]))

    def f(x: Any) -> Any:
        count[0] += 1.0
        return x[:, places] + hf.sum(weight)

    program = hf.export(f, (X,))
    assert list(program.parameters) == ["weight"]
    assert sorted(program.buffers) == ["count", "places"]
    found = again(program)
    found(X)
    found(X)
    assert float(found.state["count"][0]) == 2.0
    assert float(count[0]) == 0.0


def test_parameters_have_module_paths_and_shared_ones_are_there_once(
    again: Any,
) -> None:
    model = network()
    program = again(hf.export(model, (X,)))
    assert [*program.parameters] == [
        *("layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias")
    ]
    agree(program(X), model(X))


def test_a_named_tuple_of_unknown_class_has_a_stand_in(tmp_path: Path) -> None:
    class Hidden(NamedTuple):
        value: Any

    path = tmp_path / "program.hopflow"
    hf.export(lambda h: Hidden(h.value * 2), (Hidden(X),)).save(path)
    program = hf.load(path)
    kind: Any = program.signature.in_spec.children()[0].type
    assert (kind.__name__, kind._fields) == ("Hidden", ("value",))
    agree(program(kind(X)).value, X * 2)


# --- sizes, numbers and conditions ----------------------------------------------------


def test_what_is_decided_by_sizes_is_a_constraint(again: Any) -> None:
    def f(x: Any, y: Any) -> Any:
        return hf.sum(x) if x.shape[0] * y.shape[1] == 6 else x @ y

    size = hf.Dim("n", min=2, max=9, may_narrow=True)
    program = again(
        hf.export(f, (X, X.T), dynamic_shapes={"x": {0: size}, "y": {1: True}})
    )
    assert program.range_constraints["n"] == (2, 9)
    [declared_min, declared_max, asked] = program.constraints
    assert declared_min.startswith("x.shape[0] >= 2")
    assert declared_max.startswith("x.shape[0] <= 9")
    assert asked.startswith("x.shape[0]*y.shape[1] != 6  (test_export.py:")
    agree(program(ones(3, 3), ones(3, 3)), np.full((3, 3), 3.0))
    with pytest.raises(GuardError, match=r"x\.shape\[0\]\*y\.shape\[1\] != 6"):
        program(X, ones(3, 3))
    with pytest.raises(GuardError, match=r"x\.shape\[0\] <= 9"):
        program(ones(12, 3), ones(3, 1))
    with pytest.raises(ShapeError, match="`x` was f64"):
        program(ones(2, 4), X.T)


def test_what_only_a_run_knows_is_an_assert(again: Any) -> None:
    def f(x: Any) -> Any:
        found = x[x > 1.0]
        hf.check(found.shape[0] < 6, "too many")
        return found * 2, found.shape[0]

    program = again(hf.export(f, (X,), dynamic_shapes=True))
    assert [a.message for a in program.asserts] == ["too many"]
    assert str(program.asserts[0].line).startswith("test_export.py:")
    agree(program(X), (np.arange(2.0, 6.0) * 2, 4))
    with pytest.raises(
        CheckError, match=r"too many: `u0 <= 5` does not hold, it is `6 <= 5`"
    ):
        program(ones(2, 3) * 2)


def test_numbers_are_symbols_and_constants_are_checked(again: Any) -> None:
    program = again(hf.export(lambda x, n, mode: x * n, (X, 2, "a")))
    agree(program(X, 5, "a"), X * 5)
    with pytest.raises(ArgumentValueError, match="`mode` was 'a'"):
        program(X, 5, "b")
    fixed = hf.export(lambda x, n: x * n, (X, 2), dynamic_shapes={"n": False})
    with pytest.raises(ArgumentValueError, match="was 2 in the trace"):
        fixed(X, 3)


def test_a_declared_size_must_not_be_narrowed() -> None:
    with pytest.raises(DimError, match="narrowed to"):
        hf.export(
            lambda x: x + 1 if x.shape[0] > 1 else x,
            (X,),
            dynamic_shapes={"x": {0: hf.Dim("n")}},
        )


# --- transforms -----------------------------------------------------------------------


def settle(x: Any) -> Any:
    model = hf.sum(x) / 3
    return hf.sum(hf.while_loop(lambda c: hf.sum(c) < 40, lambda c: c * 1.5 + model, x))


def test_a_loaded_program_is_a_function_to_every_transform(again: Any) -> None:
    program = again(hf.export(settle, (X,)))
    batch = hf.stack([X, X + 1])
    transforms: list[Callable[[Any], Any]] = [
        lambda f: f(X),
        lambda f: hf.grad(f)(X),
        lambda f: hf.grad(lambda x: hf.sum(hf.grad(f)(x) ** 2))(X),
        lambda f: hf.jvp(f, (X,), (X,)),
        lambda f: hf.vmap(f)(batch),
        lambda f: hf.vmap(hf.grad(f))(batch),
        lambda f: hf.jit(f)(X),
        lambda f: hf.trace(f, X)(X),
    ]
    for transform in transforms:
        agree(transform(program), transform(settle), rtol=1e-12)
    once_more = hf.export(program, (X,))
    assert again(once_more) == hf.export(once_more, (X,))


def test_derivatives_by_what_a_program_holds(again: Any) -> None:
    model = network()
    program = again(hf.export(model, (X,)))
    found = hf.grad(lambda p: hf.sum(p(X) ** 2))(program)
    expected = hf.grad(lambda m: hf.sum(m(X) ** 2))(model)
    agree(found.state, expected.named_parameters())
    doubled = program.with_state({k: v * 2 for k, v in program.state.items()})
    assert doubled != program
    with pytest.raises(StructureError, match="no `bias` in the state"):
        program.with_state({"bias": X})


@hf.custom_vjp
def tripled(x: Any, y: Any) -> Any:
    return hf.sin(x) * y


tripled.defvjp(
    lambda x, y: (tripled(x, y), (x, y)),
    lambda kept, ct: (3 * ct * tripled(*kept), hf.cos(kept[0]) * ct),
)


@hf.custom_jvp
def pushed(x: Any) -> Any:
    return hf.sin(x)


@pushed.defjvp
def _(primals: Any, tangents: Any) -> Any:
    [x], [t] = primals, tangents
    return pushed(x), 5 * pushed(x) * t


class Twice(hf.HigherOrderOp):
    def debug(self, f: Any, x: Any) -> Any:
        return f(f(x))

    def jvp(self, primals: Any, tangents: Any) -> Any:
        [f, x], [_, t] = primals, tangents
        return self(f, x), 7 * t


twice = Twice()
RULED: list[Callable[[Any], Any]] = [
    lambda x: hf.sum(tripled(x, x) * x),
    lambda x: hf.sum(pushed(x) * x),
    lambda x: hf.sum(hf.vmap(pushed)(x) * x),
    lambda x: hf.sum(hf.scan(lambda c, r: (pushed(c) + r, c), x[0], x)[1]),
    lambda x: hf.sum(twice(lambda y: y * y, x) * x),
]


@pytest.mark.parametrize("f", RULED, ids=range(len(RULED)))
def test_rules_of_ones_own_are_kept_as_often_as_asked(f: Any, again: Any) -> None:
    none, one, two = (again(hf.export(f, (X,), derivatives=k)) for k in (0, 1, 2))
    agree([p(X) for p in (none, one, two)], [f(X)] * 3)
    with pytest.raises(DerivativeError, match="larger `derivatives`"):
        hf.grad(none)(X)
    agree(hf.grad(one)(X), hf.grad(f)(X), rtol=1e-12)

    def second(g: Any) -> Any:
        return hf.grad(lambda x: hf.sum(hf.grad(g)(x)))(X)

    agree(second(two), second(f), rtol=1e-12)
    batch = hf.stack([X, X + 1])
    agree(hf.vmap(hf.grad(two))(batch), hf.vmap(hf.grad(f))(batch), rtol=1e-12)


def test_rules_of_ones_own_have_symbolic_sizes(again: Any) -> None:
    f = RULED[0]
    program = again(hf.export(f, (X,), dynamic_shapes=True, derivatives=1))
    other = ones(4, 2)
    agree(hf.grad(program)(other), hf.grad(f)(other))
    with pytest.raises(DerivativeError, match="rules for reverse derivatives only"):
        hf.jvp(program, (other,), (other,))


def test_rules_of_ones_own_know_sizes_that_no_argument_has(again: Any) -> None:
    def f(x: Any) -> Any:
        both = hf.concat([x, x])
        return hf.sum(pushed(both)) + hf.sum(tripled(both, both))

    program = again(hf.export(f, (X,), dynamic_shapes=True, derivatives=1))
    other = ones(4, 2)
    agree(hf.grad(program)(other), hf.grad(f)(other))
    batch = hf.stack([other, other * 2])
    agree(hf.vmap(hf.grad(program))(batch), hf.vmap(hf.grad(f))(batch))
    agree(hf.jit(hf.grad(program), dynamic=True)(other), hf.grad(f)(other))


# --- what it says ---------------------------------------------------------------------


def test_a_program_says_what_it_is(
    again: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    model = network()

    def f(x: Any, n: int) -> Any:
        return {"y": hf.cond(hf.sum(x) > n, lambda: model(x), lambda: x)}

    program = again(hf.export(f, (X, 2), dynamic_shapes={"x": {0: True}}))
    assert repr(program) == "<ExportedProgram f(x, n): 21 nodes, 4 tensors>"
    text = program.print_readable()
    assert capsys.readouterr().out == text + "\n"
    assert "def f(" in text
    said = str(program.signature)
    for line in ("x: f64[s0, 3]", "n: int", "result['y']: f64[s0, 3]"):
        assert f"    {line}\n" in said
    assert program.operators["cond"]["params"]["then"] == "Graph"
    lines = {str(n.line).partition(":")[0] for n in program.graph.nodes if n.line}
    assert lines == {"test_export.py"}
    paths = {n.module_path for n in program.graph.walk()}
    assert "network.layers.0:Linear" in paths


def test_what_stands_for_a_graph_is_decomposed() -> None:
    @hf.subgraph
    def inner(x: Any) -> Any:
        return hf.sin(x) + 1

    def f(x: Any) -> Any:
        return hf.checkpoint(lambda y: inner(pushed(y)))(x) @ x.T

    program = hf.export(f, (X,)).decompose()
    assert {n.op.name for n in program.graph.walk()} == {
        *("sin", "add", "matmul", "transpose")
    }
    agree(program(X), f(X))


def test_a_difference_names_the_node_and_where_it_is() -> None:
    def program(step: Callable[[Any], Any], more: Any = 0.0) -> hf.ExportedProgram:
        return hf.export(
            lambda x: hf.while_loop(lambda c: hf.sum(c) < 9, step, x) + more, (X,)
        )

    one = program(lambda c: hf.sin(c) + 1)
    assert one == program(lambda c: hf.sin(c) + 1)
    two = program(lambda c: hf.tanh(hf.sin(c)) + 1)
    assert one != two
    found = [str(d) for d in one.diff(two)]
    assert found[0].startswith("+ while_loop/body: node 1: f64[2, 3] = tanh(")
    assert found[1].startswith("~ while_loop/body: node 1: other operands of f64[2, 3]")
    held = [program(lambda c: c + 1, hf.asarray(np.array(v))) for v in (1.0, 2.0)]
    assert [str(d) for d in held[0].diff(held[1])] == ["~ more: the elements differ"]


# --- what is refused ------------------------------------------------------------------


class Own(hf.HigherOrderOp):
    def debug(self, x: Any, *, option: Any) -> Any:
        return x * 2


def test_an_operator_of_ones_own_is_what_it_means(again: Any) -> None:
    own = Own()
    program = again(hf.export(lambda x: own(x, option=print), (X,)))
    assert [n.op.name for n in program.graph.nodes] == ["invoke_subgraph"]
    agree(hf.grad(lambda x: hf.sum(program(x)))(X), np.full((2, 3), 2.0))


REFUSED: list[tuple[Callable[[Any], Any], str]] = [
    (lambda x: hf.print("{}", x), r"`callback` \(test_export.py:\d+\).*`print`"),
    (lambda x: hf.callback(np.sin, x, x), "`sin` is a function of Python"),
    (
        lambda x: hf.map(lambda r: hf.callback(np.cos, r, r), x),
        "`cos` is a function of Python",
    ),
    (
        lambda x: hf.checkpoint(hf.sin, policy=lambda node: True)(x),
        r"`checkpoint` \(.*its `policy` is a function",
    ),
    (
        lambda x: hf.scan(lambda c, r: (c, r), x, x, progress=lambda *_: None),
        r"`scan` \(.*`progress` is the function",
    ),
]


@pytest.mark.parametrize(("f", "why"), REFUSED, ids=range(len(REFUSED)))
def test_what_cannot_leave_python_is_named(f: Any, why: str) -> None:
    with pytest.raises(ExportError, match=why):
        hf.export(f, (X,))


def test_a_label_of_progress_leaves(again: Any) -> None:
    program = hf.export(lambda x: hf.map(hf.sin, x, progress="rows"), (X,))
    params = [node.params for node in again(program).graph.walk()]
    assert [str(p["progress"]) for p in params if "progress" in p] == ["rows"]


WRONG: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    (3, {}, ArgumentTypeError, "`f` must be a function"),
    (hf.sin, {"args": X}, ArgumentTypeError, "`args` must be a tuple"),
    (hf.sin, {"args": (X,), "kwargs": [1]}, ArgumentTypeError, "`kwargs` must be"),
    (hf.sin, {"args": (X,), "derivatives": -1}, ArgumentValueError, "not be negative"),
    (lambda x: x, {"args": ()}, ArgumentTypeError, "does not take the 0 arguments"),
    (lambda **k: k, {"kwargs": {"a-b": 1}}, ArgumentValueError, "no identifier"),
    (lambda x, f: f(x), {"args": (X, hf.sin)}, ExportError, "Close over it"),
    (lambda x: x, {"args": (X, X)}, ArgumentTypeError, "does not take the 2"),
    (
        lambda x: x,
        {"args": (X,), "dynamic_shapes": {"y": True}},
        ArgumentValueError,
        "`dynamic_shapes` names an argument 'y'",
    ),
]


@pytest.mark.parametrize(("f", "given", "error", "why"), WRONG, ids=range(len(WRONG)))
def test_wrong_arguments_are_named(f: Any, given: Any, error: Any, why: str) -> None:
    with pytest.raises(error, match=why):
        hf.export(f, **given)


def test_a_wrong_call_is_named() -> None:
    program = hf.export(lambda x, *, n: x * n, (X,), {"n": 2})
    with pytest.raises(StructureError, match=r"called as `<lambda>\(x, \*, n\)`"):
        program(X)
    with pytest.raises(StructureError, match="another structure"):
        program([X], n=2)
    with pytest.raises(ArgumentTypeError, match="`other` must be an ExportedProgram"):
        program.diff(X)  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match="`path` must be a path"):
        program.save(3)  # type: ignore[arg-type]
    with pytest.raises(ArgumentTypeError, match="`path` must be a path"):
        hf.load(3)  # type: ignore[arg-type]
    assert program != 3


@pytest.mark.parametrize("count", [-5, 1, 2])
def test_eager_calls_know_symbols_of_bodies_by_their_numbers(count: int) -> None:
    """The last batch of an even number of rows has none. Its size is 0 in the types of
    what the call gets, and was a symbol in those of the bodies."""

    def rows(n: Any, x: Any) -> Any:
        def row(r: Any) -> Any:
            def step(n: Any, k: Any, z: Any) -> Any:
                return n - 1, hf.sum(hf.astype(z, hf.int64)), hf.zeros_like(z) + r

            _, k, z = hf.while_loop(lambda n, *_: n > 0, step, (n, n, x))

            def write() -> Any:
                r[k % r.shape[0]] = hf.sum(r) + hf.zeros_like(r[0])
                return hf.zeros_like(z) + hf.sum(r)

            def other() -> Any:
                return hf.zeros_like(z) + hf.sum(x)

            return hf.switch(n, [other, write, other]), r

        return hf.map(row, x, batch_size=2)

    def arguments() -> tuple[Any, Any]:
        return hf.asarray(count), hf.asarray(np.arange(6.0).reshape(2, 1, 3))

    program = hf.export(rows, arguments(), dynamic_shapes=True)
    agree(program(*arguments()), run_debug(rows, *arguments()))
