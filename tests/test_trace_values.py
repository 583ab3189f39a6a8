"""`trace(mode="real")`: what Python asks of a tensor is computed, and checked."""

import math
from typing import Any

import numpy as np
import pytest

import hopflow as hf
from hopflow.errors import CheckError, TraceError
from hopflow.graph.verifier import verify
from hopflow.testing.executions import agree

X = hf.asarray([1.0, -2.0, 3.0])


def branches(x: Any) -> Any:
    return x * 2.0 if hf.sum(x) > 1.0 else -x


def loops(x: Any) -> Any:
    while hf.max(x) < 20.0:
        x = x * 2.0
    return x


def counts(x: Any) -> Any:
    return [x * k for k in range(int(hf.max(x)))]


def captures(x: Any) -> Any:
    return x if X[0] > 0.0 else -x


def after_a_write(x: Any) -> Any:
    y = x * 1.0
    y[0] = 7.0
    return y if y[0] > 5.0 else x


def after_an_operator(x: Any) -> Any:
    total = hf.fori_loop(0, 3, lambda i, c: c + hf.sum(x) * i, 0.0)
    return x * float(total)


def twice(x: Any) -> Any:
    return branches(x) + branches(x) * float(hf.sum(x))


ASKING = [
    *(branches, loops, counts, captures, after_a_write, after_an_operator, twice),
    lambda x: x * float(x[0]),
    lambda x: x * x[2].item(),
    lambda x: hf.asarray(np.asarray(x) * 2.0) + x,
    lambda x: x + sum(x.tolist()),
    lambda x: x[x > 0.0],
    lambda x: x[int(hf.argmax(x)) :],
    lambda x: x if math.isclose(x[0], 1.0) else -x,
    lambda x: hf.grad(lambda v: hf.sum(v * v) if v[0] > 0 else hf.sum(v))(x),
]


@pytest.mark.parametrize("f", ASKING)
def test_what_is_asked_is_answered_by_the_values_at_hand(f: Any) -> None:
    module = hf.trace(f, X, captures=True)
    verify(module.graph)
    for run in (module, hf.jit(module), hf.jit(module, backend="interpreter")):
        agree(run(X), f(X))


@pytest.mark.parametrize("f", [f for f in ASKING if f is not captures][:-2])
def test_each_run_checks_that_the_values_are_the_same(f: Any) -> None:
    module = hf.trace(f, X, captures=True)
    for run in (module, hf.jit(module)):
        if f is after_a_write:  # what is asked of does not depend on the argument
            agree(run(-X), f(-X))
            continue
        with pytest.raises(
            CheckError, match=r"in the trace, which took it for a const"
        ):
            run(-4.0 * X)


@pytest.mark.parametrize(
    ("value", "other"),
    [
        (hf.asarray(True), hf.asarray(False)),
        (hf.asarray(3, dtype=hf.int8), hf.asarray(4, dtype=hf.int8)),
        (hf.asarray(2**64 - 1, dtype=hf.uint64), hf.asarray(5, dtype=hf.uint64)),
        (hf.asarray(-(2**63), dtype=hf.int64), hf.asarray(5, dtype=hf.int64)),
        (hf.asarray(0.1), hf.asarray(0.2)),
        (hf.asarray(0.1, dtype=hf.bfloat16), hf.asarray(0.2, dtype=hf.bfloat16)),
        (hf.asarray(0.1, dtype=hf.float64), hf.asarray(0.1000001, dtype=hf.float64)),
        (hf.asarray(math.nan), hf.asarray(0.0)),
        (hf.asarray(math.inf), hf.asarray(-math.inf)),
        (hf.asarray([1.0, math.nan]), hf.asarray([1.0, 2.0])),
        (hf.asarray([1, 2]), hf.asarray([1, 3])),
        (hf.zeros((0,)), None),
    ],
)
def test_values_of_every_dtype_are_checked(value: Any, other: Any) -> None:
    module = hf.trace(lambda x: (x.tolist(), x), value)
    agree(module(value)[1], value)
    assert str(module(value)[0]) == str(value.tolist())
    if other is not None:
        with pytest.raises(
            CheckError, match=r"`tolist` of .* at test_trace_values.py:"
        ):
            module(other)


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.parametrize(
    ("f", "values", "same", "others"),
    [
        (lambda x: math.copysign(1.0, float(x[0])), [0.0], [], [-0.0]),
        (lambda x: math.copysign(1.0, x[0].item()), [-0.0], [], [0.0]),
        (lambda x: math.copysign(1.0, x.tolist()[0]), [0.0], [], [-0.0]),
        (lambda x: float(np.copysign(1.0, np.asarray(x)[0])), [0.0], [], [-0.0]),
        (lambda x: float(x[0]), [1.0], [], [-1.0]),
        (lambda x: int(x[0]), [1.25], [1.5, 1.0], [2.0, -1.25, math.nan]),
        (lambda x: int(x[0]), [0.5], [-0.5, -0.0, 0.0], [1.0]),
        (lambda x: 2.0 if x[0] else 3.0, [0.5], [-1.0, math.nan], [0.0, -0.0]),
        (lambda x: 2.0 if x[0] else 3.0, [-0.0], [0.0], [1.0]),
        (lambda x: int(x[0]) + float(x[0]), [1.25], [], [1.5]),
        (lambda x: float(x[0]) + int(x[0]), [1.25], [], [1.5]),
    ],
)
def test_what_python_took_is_what_is_checked(
    f: Any, values: Any, same: Any, others: Any, dtype: str
) -> None:
    def make(value: float) -> Any:
        return hf.asarray([value], dtype=getattr(hf, dtype))

    module = hf.trace(lambda x: hf.ones(1) * f(x), make(values[0]))
    for run in (module, hf.jit(module)):
        for value in (*values, *same):
            agree(run(make(value)), hf.ones(1) * f(make(value)))
        for value in others:
            with pytest.raises(CheckError, match="in the trace, which took it"):
                run(make(value))


def test_an_int_is_listed_as_python_took_it() -> None:
    module = hf.trace(lambda x: x * int(x[0]), hf.asarray([1.5]))
    [found, *_] = module.specializations.values()
    assert (found.path, repr(found.value)) == ("int(...)", "1")
    with pytest.raises(CheckError, match=r"`int` of f32\[\] at .* was 1 in the trace"):
        module(hf.asarray([2.0]))


def test_what_was_asked_is_listed_with_its_line() -> None:
    module = hf.trace(branches, X)
    [found] = module.specializations.values()
    line = branches.__code__.co_firstlineno + 1
    assert (found.path, found.value) == ("bool(...)", True)
    assert found.line is not None
    assert found.line.line == line
    assert f"bool at test_trace_values.py:{line}" in module.specializations
    # However often it is asked, it is checked once.
    graph = hf.trace(lambda x: [x for _ in range(3) if x[0] > 0.0], X).graph
    assert len(graph.nodes_of("check")) == 3
    y = hf.trace(lambda x: [x for y in [x[0] > 0.0] for _ in range(3) if y], X)
    assert len(y.graph.nodes_of("check")) == 1


def test_a_check_that_an_error_takes_back_is_made_again() -> None:
    def f(x: Any) -> Any:
        total = hf.sum(x)

        def body(r: Any) -> Any:
            raise ValueError(float(total))

        with pytest.raises(ValueError, match=r"2\.0"):
            hf.map(body, x)
        return x * float(total)

    module = hf.trace(f, X)
    agree(module(X), X * 2.0)
    with pytest.raises(CheckError, match="`float` of"):
        module(X + 1.0)


def test_nothing_is_computed_that_is_not_asked_for() -> None:
    before = hf.stats().compiles
    hf.trace(lambda x: hf.map(lambda r: hf.sin(r) * 41.0, x), X)
    assert hf.stats().compiles == before


@pytest.mark.parametrize("mode", ["real", "fake"])
def test_what_only_a_run_can_tell_is_an_error_still(mode: str) -> None:
    def in_a_body(x: Any) -> Any:
        return hf.map(lambda r: r if r > 0 else -r, x)

    def of_a_callback(x: Any) -> Any:
        seen: Any = hf.callback(lambda v: v, hf.spec("f32[3]"), x)
        return x if seen[0] > 0 else -x

    for f in (in_a_body, of_a_callback) if mode == "real" else (in_a_body, branches):
        with pytest.raises(TraceError, match=r"bool\(\) of a traced tensor"):
            hf.trace(f, X, mode=mode)
    with pytest.raises(TraceError, match=r"bool\(\) of a traced tensor"):
        hf.jit(branches)(X)


def test_strict_and_derivatives_of_what_was_decided() -> None:
    module = hf.trace(branches, X, strict=True)
    agree(hf.grad(lambda x: hf.sum(module(x)))(X), hf.full((3,), 2.0))
    many = hf.stack([X, X + 1.0])
    agree(hf.vmap(module)(many), many * 2.0)
    with pytest.raises(CheckError, match="in the trace"):
        hf.vmap(module)(hf.stack([X, -X]))
