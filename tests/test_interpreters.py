"""Interpreters and tensor types of users: they see operators before any rule does."""

from typing import Any

import numpy as np
import pytest

import hopflow as hf
from hopflow.bind import bind
from hopflow.errors import OperatorError
from hopflow.graph.core import Constant
from hopflow.testing.meanings import agree


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
