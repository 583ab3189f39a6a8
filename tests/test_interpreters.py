"""Interpreters and tensor types of users: they see operators before any rule does."""

from typing import Any

import numpy as np
import pytest

import hopflow as hf
from hopflow import pytree
from hopflow.bind import bind
from hopflow.errors import (
    ArgumentTypeError,
    ConversionError,
    InvalidTensorError,
    MutationError,
    OperatorError,
    StructureError,
)
from hopflow.graph.core import Constant
from hopflow.testing.executions import agree


class Seen(hf.Interpreter):
    """Notes what it sees, and does what it is told to with operators of a name."""

    def __init__(self, **answers: Any) -> None:
        self.names: list[str] = []
        self.answers = answers

    def process(self, op: Any, args: Any, params: Any) -> Any:
        self.names.append(op.name)
        if op.name not in self.answers:
            return NotImplemented
        return self.answers[op.name](op, args, params)


class Twice(hf.HigherOrderOp):
    def debug(self, f: Any, x: Any) -> Any:
        return f(f(x))


twice = Twice()
X = hf.asarray(np.array([0.5, 1.5]))


def grown(x: Any) -> Any:
    return hf.cond(hf.sum(x) > 0, lambda: hf.sin(x) * 2, lambda: x)


def test_it_sees_an_operator_as_one_and_may_decline() -> None:
    with Seen() as seen:
        found = grown(X)
    agree(found, np.sin(np.asarray(X)) * 2)
    assert seen.names == ["reduce_sum", "greater", "cond"]


def test_it_sees_indexing_and_writes() -> None:
    def write() -> list[Any]:
        x = hf.asarray(np.arange(6.0).reshape(2, 3))
        row = x[0]
        row[1:] = 7.0
        x.T[0, 1] = -5.0
        return [x, row, x[None, ..., ::-1]]

    with Seen() as seen:
        found = write()
    agree(found, write())
    assert {"slice", "reshape", "update_slice", "transpose"} <= set(seen.names)
    with Seen(slice=lambda *_: [X]):
        agree(hf.asarray([1.0, 2.0, 3.0])[1:], X)


def test_it_sees_the_graphs_of_the_functions_and_may_run_them() -> None:
    graphs: list[Any] = []

    def run(op: Any, args: Any, params: Any) -> Any:
        graphs.extend(params)
        return [bind(op, args, params)[0] + 1]

    with Seen(twice=run) as seen:
        found = twice(lambda y: y * X, X)
    agree(found, np.asarray(X) ** 3 + 1)
    assert graphs == ["meaning", "f"]
    assert seen.names == ["twice"]  # not what it does itself


@pytest.mark.parametrize(
    ("transform", "name"),
    [
        (lambda f: hf.grad(lambda x: hf.sum(f(x))), "twice"),
        (lambda f: lambda x: hf.jvp(f, (x,), (x,)), "twice"),
        (lambda f: lambda x: hf.vmap(f)(hf.stack([x, x])), "twice"),
        (hf.jit, "invoke_subgraph"),
        (lambda f: hf.checkpoint(f), "checkpoint"),
        (hf.functionalize, "twice"),
    ],
)
def test_it_sees_what_transforms_leave_to_those_below(
    transform: Any, name: str
) -> None:
    def f(x: Any) -> Any:
        with Seen() as within:
            found = twice(hf.sin, x)
        assert within.names == ["twice"]  # before any rule
        return found

    with Seen() as seen:
        found = transform(f)(X)
    agree(found, transform(lambda x: hf.sin(hf.sin(x)))(X))
    if name != "twice":
        assert name in seen.names
    assert "twice" not in seen.names or name == "twice"


def test_the_innermost_is_asked_first() -> None:
    with Seen() as outer, Seen(sin=lambda *_: [X]) as inner:
        agree(hf.sin(X * 2), X)
    assert (outer.names, inner.names) == (["multiply"], ["multiply", "sin"])
    hf.sin(X)
    assert len(outer.names) == 1


def test_in_a_trace_it_answers_with_tensors_of_the_trace() -> None:
    def f(x: Any) -> Any:
        with Seen(sin=lambda _op, args, _params: [hf.cos(args[0])]):
            return hf.sin(x) + twice(lambda y: y * x, x)

    graph = hf.trace(f, X).graph
    assert [n.op.name for n in graph.nodes] == ["cos", "twice", "add"]
    agree(hf.jit(f)(X), np.cos(np.asarray(X)) + np.asarray(X) ** 3)


def test_an_answer_must_be_tensors() -> None:
    with (
        Seen(sin=lambda *_: 1),
        pytest.raises(OperatorError, match="process` must return a tuple"),
    ):
        hf.sin(X)
    agree(hf.sin(X), np.sin(np.asarray(X)))  # and it is off again


# --- tensor types ---------------------------------------------------------------------


class Counted(hf.Tensor):
    """A tensor that knows how many operations made it; it declines cosines."""

    def __init__(self, value: Any, count: int = 0) -> None:
        self.value, self.count = value, count

    @property
    def type(self) -> Any:
        return self.value.type

    @classmethod
    def process(cls, op: Any, args: Any, params: Any) -> Any:
        if op.name == "cos":
            return NotImplemented
        values = [a.value if isinstance(a, Counted) else a for a in args]
        count = sum(a.count for a in args if isinstance(a, Counted))
        return [Counted(v, count + 1) for v in bind(op, values, params)]


def test_a_type_of_its_own_meets_operations_and_operators() -> None:
    x = Counted(X)
    y = hf.sin(x) * 2 + X
    assert isinstance(y, Counted)
    assert y.count == 3
    agree(y.value, np.sin(np.asarray(X)) * 2 + np.asarray(X))
    for found in (
        twice(lambda y: y * 2, x),
        twice(lambda y: y * x, X),  # closed over
        hf.cond(hf.asarray(True), lambda: x * 2, lambda: x),
        hf.scan(lambda c, _: (c + 1, None), x, length=2)[0],
    ):
        assert isinstance(found, Counted)
        assert found.count == 1


def test_a_type_may_decline() -> None:
    with pytest.raises(OperatorError, match="cos: Counted decline to process it"):
        hf.cos(Counted(X))


def test_an_interpreter_is_asked_before_types() -> None:
    with Seen(sin=lambda *_: [X]):
        agree(hf.sin(Counted(X)), X)


def test_constants_stay_what_they_are() -> None:
    def twice_as_much(op: Any, args: Any, params: Any) -> Any:
        assert isinstance(args[1], Constant)
        return bind(op, [args[0], Constant(4.0, args[1].type)], params)

    with Seen(multiply=twice_as_much):
        agree(hf.multiply(X, 2), np.asarray(X) * 4)


# --- tensor types under `jit` ---------------------------------------------------------


class Measure(hf.Tensor):
    """A tensor with a unit, and a count of the operations that made it."""

    __slots__ = ("count", "unit", "value")

    def __init__(self, value: Any, unit: str = "m", count: int = 0) -> None:
        self.value, self.unit, self.count = value, unit, count

    @property
    def type(self) -> Any:
        return self.value.type

    @classmethod
    def process(cls, op: Any, args: Any, params: Any) -> Any:
        units = list({a.unit for a in args if isinstance(a, Measure)})
        if len(units) > 1:
            raise ValueError(f"{op.name} of {sorted(units)}")
        values = [a.value if isinstance(a, Measure) else a for a in args]
        count = sum(a.count for a in args if isinstance(a, Measure))
        return [Measure(v, units[0], count + 1) for v in bind(op, values, params)]


def measure(unit: str = "m") -> Measure:
    return Measure(hf.asarray(np.array([0.5, 1.5])), unit)


def parts(tree: Any) -> Any:
    """What measures hold, as plain data."""
    return pytree.tree_map(
        lambda x: (
            [np.asarray(x.value), np.asarray(x.count), x.unit]
            if isinstance(x, Measure)
            else np.asarray(x)
        ),
        tree,
    )


def same(got: Any, expected: Any) -> None:
    got, expected = pytree.flatten(parts(got)), pytree.flatten(parts(expected))
    assert got[1] == expected[1]
    for a, b in zip(got[0], expected[0], strict=True):
        if isinstance(b, str):
            assert a == b
        else:
            agree(a, b)


def elementwise(x: Any) -> Any:
    return hf.sin(x) * 2 + X


FUNCTIONS: dict[str, Any] = {
    "elementwise": elementwise,
    "indexing": lambda x: x[0] + x[1],
    "itself": lambda x: x,
    "its value": lambda x: x.value,
    "in a container": lambda x: {"a": [x, x + 1], "b": X},
    "cond": lambda x: hf.cond(hf.sum(X) > 0, lambda y: hf.sin(y), lambda y: y, (x,)),
    "cond by it": lambda x: hf.cond(hf.sum(x) > 0, lambda: X, lambda: -X),
    "closure of cond": lambda x: hf.cond(hf.sum(X) > 0, lambda: hf.sin(x), lambda: x),
    "switch": lambda x: hf.switch(
        hf.astype(hf.sum(X), hf.int64), [lambda y: y, lambda y: y * 2], (x,)
    ),
    "scan": lambda x: hf.scan(lambda c, _: (c + 1, c), x, length=2),
    "while_loop": lambda x: hf.while_loop(lambda c: hf.sum(c) < 5, lambda c: c + 1, x),
    "fori_loop": lambda x: hf.fori_loop(0, 3, lambda i, c: c * x, X),
    "map": lambda x: hf.map(lambda r: r * 2, x),
    "invoke_subgraph": lambda x: hf.invoke_subgraph(lambda r: r * 2, x),
    "checkpoint": lambda x: hf.checkpoint(lambda r: r * 2)(x),
    "operator of one's own": lambda x: twice(lambda y: y * x, X),
    "nested": lambda x: hf.cond(
        hf.sum(X) > 0, lambda: hf.fori_loop(0, 2, lambda i, c: c + x, x), lambda: x
    ),
    "grad": lambda x: hf.grad(lambda y: hf.sum(hf.sin(y)))(x),
    "grad of a closure": lambda x: hf.grad(lambda y: hf.sum(hf.sin(x) * y))(X),
    "grad of cond": lambda x: hf.grad(
        lambda y: hf.cond(hf.sum(X) > 0, lambda: hf.sum(y * y), lambda: hf.sum(y))
    )(x),
    "jvp": lambda x: hf.jvp(hf.sin, (x,), (X,)),
    "vmap": lambda x: hf.vmap(lambda r: r * 2)(x),
    "vmap of a closure": lambda x: hf.vmap(lambda r: r * x)(X),
    "functionalize": lambda x: hf.functionalize(lambda y: hf.sin(y) * 2)(x),
    "made in a branch": lambda x: hf.cond(
        hf.sum(X) > 0, lambda y: Measure(y) * 2, lambda y: Measure(y), (X,)
    ),
    "made in a loop": lambda x: hf.map(lambda r: Measure(r) + 1, X),
    "made in vjp": lambda x: hf.vjp(lambda y: Measure(y) * 2, X)[0],
    "made in vmap": lambda x: hf.vmap(lambda y: Measure(y) * 2)(X),
    "made in functionalize": lambda x: hf.functionalize(lambda y: Measure(y) * 2)(X),
    "jit within": lambda x: hf.jit(hf.sin)(x),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_jitted_function_takes_types_as_an_eager_one(name: str) -> None:
    f = FUNCTIONS[name]
    jitted = hf.jit(f)
    for _ in range(2):
        same(jitted(measure()), f(measure()))


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_jitted_function_may_close_over_them(name: str) -> None:
    f, x = FUNCTIONS[name], measure()
    same(hf.jit(lambda: f(x))(), f(x))


def test_the_class_runs_once_for_each_kind_of_call() -> None:
    jitted = hf.jit(elementwise)
    before = hf.stats().traces
    for count in range(3):
        found = jitted(Measure(hf.asarray(np.full(2, count * 0.5)), "m", count))
        assert (found.unit, found.count) == ("m", count + 3)
    assert jitted(measure("s")).unit == "s"
    assert hf.stats().traces == before + 2


def test_an_argument_of_a_type_is_given_up() -> None:
    x = measure()
    found = hf.jit(lambda x, y: x * 2 + y, donate=(0,))(x, X)
    same(found, Measure(hf.asarray(np.array([1.5, 4.5])), "m", 2))
    with pytest.raises(InvalidTensorError, match="donated"):
        _ = x.value + 1


@pytest.mark.parametrize(
    "options", [{"dynamic": True}, {"backend": "interpreter"}], ids=str
)
def test_options_go_with_types(options: Any) -> None:
    same(hf.jit(elementwise, **options)(measure()), elementwise(measure()))


def test_a_type_in_a_module_is_a_parameter() -> None:
    layer = hf.nn.Linear(hf.eye(2, dtype=hf.float64), Counted(X))
    assert hf.jit(lambda m, x: m(x))(layer, X).count == layer(X).count


def test_a_method_of_the_type_is_met_in_a_trace() -> None:
    def f(x: Any) -> Any:
        assert isinstance(x, Measure)
        return Measure(x.value * 2, x.unit * 2)

    found = hf.jit(f)(measure())
    assert found.unit == "mm"
    agree(found.value, np.array([1.0, 3.0]))


def test_what_a_type_refuses_it_refuses_under_jit() -> None:
    for f in (lambda x, y: x + y, hf.jit(lambda x, y: x + y)):
        with pytest.raises(ValueError, match=r"add of \['m', 's'\]"):
            f(measure("m"), measure("s"))
    with pytest.raises(OperatorError, match="cos: Counted decline to process it"):
        hf.jit(hf.cos)(Counted(X))


def test_a_tensor_within_a_tensor_within_a_tensor() -> None:
    x = Measure(Counted(X, 4), "m")
    found = hf.jit(elementwise)(x)
    assert isinstance(found, Measure)
    assert isinstance(found.value, Counted)
    assert found.value.count == elementwise(x).value.count == 7


def test_an_attribute_must_be_data_or_hashable() -> None:
    x: Any = Counted(X)
    x.notes = {"by": ["hand", object]}
    with pytest.raises(ArgumentTypeError, match="a `Counted` in a trace has the attri"):
        hf.jit(hf.sin)(x)


@pytest.mark.parametrize("wrap", [lambda f: f, hf.jit], ids=["eager", "jit"])
def test_a_type_has_no_memory_to_write_to(wrap: Any) -> None:
    def write(x: Any) -> Any:
        x[0] = 3.0
        return x

    with pytest.raises(MutationError, match=r"a `Counted` f64.* is written to, but it"):
        wrap(write)(Counted(X))


def test_a_size_is_no_tensor_of_a_type() -> None:
    with pytest.raises(
        OperatorError, match=r"a `Counted` i64.* is used where the trace"
    ):
        hf.jit(lambda k: hf.zeros((k,)))(Counted(hf.asarray(3)))


@pytest.mark.parametrize("wrap", [lambda f: f, hf.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("ask", [int, bool, np.asarray, lambda x: x.item()])
def test_only_what_a_type_holds_has_elements(ask: Any, wrap: Any) -> None:
    with pytest.raises(
        ConversionError, match=r"of a `Counted` i64.*: the class does no"
    ):
        wrap(ask)(Counted(hf.asarray(3)))
    assert ask(Counted(hf.asarray(3)).value) == 3 or ask is bool


@pytest.mark.parametrize("wrap", [lambda f: f, hf.jit], ids=["eager", "jit"])
def test_a_carry_that_becomes_of_a_type_is_refused(wrap: Any) -> None:
    def f(x: Any) -> Any:
        return hf.fori_loop(0, 2, lambda i, c: Measure(c), x)

    with pytest.raises(StructureError, match=r"got +\S+Measure: "):
        wrap(f)(X)
