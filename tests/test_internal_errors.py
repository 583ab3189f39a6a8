"""A defect of hopflow is an `InternalError` with a script that repeats it.

What the user's code raises, and what is said of the machine, passes as it is.
"""

import functools
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hopflow
from hopflow import recursion
from hopflow.autograd import region_vjp
from hopflow.batching import graphs
from hopflow.compiler import pipeline
from hopflow.errors import ArgumentTypeError, InternalError, ShapeError
from hopflow.tensor.eager import Eager
from hopflow.trace.tracer import Tracer

hf: Any = hopflow

X = np.array([1.0, 2.0, 3.0])
Function = Callable[..., Any]


FAILING = {
    KeyError: "{}['s0']",
    IndexError: "[][1]",
    ValueError: "int('a size')",
    TypeError: "1 + '1'",
    AttributeError: "object().missing",
}


def plant(
    patch: pytest.MonkeyPatch, error: type[Exception], holder: Any, name: str
) -> None:
    """Let a function of hopflow fail, as a lookup that finds nothing does."""
    text = f"def f(*args, **kwargs):\n    return {FAILING[error]}"
    names: dict[str, Any] = {}
    exec(compile(text, OWN, "exec"), names)
    patch.setattr(holder, name, names["f"])


OWN = region_vjp.__file__
"""A file of hopflow's: its frames are not the user's."""


class Fault(RuntimeError):
    """An error of the user's."""


def squares(x: Any) -> Any:
    return hf.fori_loop(0, 2, lambda _, a: a * x, x)


CALLS: dict[str, Function] = {
    "eager": lambda: hf.sin(hf.asarray(X)) + 1,
    "operator": lambda: squares(hf.asarray(X)),
    "jit": lambda: hf.jit(squares)(X),
    "jit, again": lambda: [hf.jit(squares)(X), hf.jit(squares)(X[:2])],
    "vmap": lambda: hf.vmap(squares)(X),
    "grad": lambda: hf.grad(lambda x: hf.sum(squares(x)))(X),
    "jvp": lambda: hf.jvp(squares, (X,), (X,)),
    "hessian": lambda: hf.hessian(lambda x: hf.sum(squares(x)))(X),
    "linearize": lambda: hf.linearize(squares, X)[1](X),
    "trace": lambda: hf.trace(squares, X),
    "symbolic": lambda: hf.trace(squares, X, mode="symbolic"),
    "method": lambda: hf.asarray(X).sum(),
    "item": lambda: hf.asarray(X)[hf.asarray([1])],
    "subgraph": lambda: hf.subgraph(squares)(X),
    "checkpoint": lambda: hf.checkpoint(squares)(X),
    "functionalize": lambda: hf.functionalize(squares)(X),
}


@pytest.mark.parametrize("error", FAILING)
@pytest.mark.parametrize(
    "call", [c for c in CALLS if c not in ("eager", "method", "item")]
)
def test_an_error_within_a_trace_is_internal(
    call: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, error, Tracer, "record")
    with pytest.raises(InternalError, match="defect of hopflow") as caught:
        CALLS[call]()
    assert type(caught.value.__cause__) is error
    assert "test_internal_errors.py" in str(caught.value)


@pytest.mark.parametrize("call", ["eager", "method", "item"])
def test_an_error_of_an_operation_is_internal(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, KeyError, Eager, "process")
    with pytest.raises(InternalError, match="defect of hopflow") as caught:
        CALLS[call]()
    assert isinstance(caught.value.__cause__, KeyError)


# --- the script -----------------------------------------------------------------------


def script_of(f: Function) -> str:
    with pytest.raises(InternalError) as caught:
        f()
    return caught.value.program


def repeats(script: str) -> bool:
    names: dict[str, Any] = {}
    with pytest.raises(InternalError):
        exec(compile(script, "<script>", "exec"), names)
    return True


def scaled(x: Any) -> Any:
    step = lambda a, v: (a * v, None)  # noqa: E731
    return hf.sum(hf.vmap(lambda v: hf.scan(step, v, hf.ones(3) * v)[0])(x))


def rows_scaled(x: Any, w: Any) -> Any:
    return hf.sum(hf.scan(lambda c, v: (c * w["w"] + v, c), w["w"], x)[0])


W = {"w": hf.asarray([0.5, 1.5])}
SCRIPTS: dict[str, Function] = {
    "jit of grad": lambda: hf.jit(hf.grad(scaled), dynamic=True)(hf.asarray(X)),
    "hessian": lambda: hf.hessian(scaled)(hf.asarray(X)),
    "two arguments": lambda: hf.jit(hf.grad(rows_scaled, 1))(hf.ones((3, 2)), W),
    "vmap of grad": lambda: hf.vmap(hf.grad(scaled))(hf.ones((2, 3))),
    "has_aux": lambda: hf.value_and_grad(lambda x: (scaled(x), x), has_aux=True)(X),
}


@pytest.mark.parametrize("call", SCRIPTS)
def test_a_script_repeats_the_error_by_itself(
    call: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch, KeyError, region_vjp, "_linear_region")
    script = script_of(SCRIPTS[call])
    assert "f = function(r'''\ndef" in script
    assert repeats(script)


def test_a_script_has_the_source_where_no_graph_repeats_the_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch, KeyError, graphs, "_batched_graph")
    script = script_of(lambda: hf.jit(hf.grad(scaled), dynamic=True)(hf.asarray(X)))
    assert "def f(x):" in script
    assert repeats(script)


def test_a_script_of_an_operation_is_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, KeyError, Eager, "_result_types")
    script = script_of(lambda: hf.matmul(hf.asarray(X[1:]), hf.asarray(X[1:])))
    assert "hf.matmul(hf.asarray(np.array([2.0, 3.0])" in script
    assert repeats(script)


def test_where_no_script_can_be_the_call_is_described(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch, KeyError, Tracer, "record")
    unknown = SimpleNamespace(step=lambda a: a * 2)
    script = script_of(lambda: hf.map(lambda x: unknown.step(x), hf.asarray(X)))
    assert script.startswith(
        "# No script repeats it. The call was map(<lambda>, f64[3])."
    )
    assert "unknown.step(x)" in script


def test_an_internal_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, ValueError, pipeline, "lower")
    with pytest.raises(InternalError) as caught:
        hf.jit(squares)(X * 1.25)
    told = str(caught.value)
    assert told.startswith("`<jitted squares>` has failed with ValueError: invalid")
    assert "in `f`" in told
    assert "while your program was at test_internal_errors.py:" in told
    assert "hf.jit(squares)(X * 1.25)" in told
    assert "Please report it" in told


# --- what is no defect ----------------------------------------------------------------


USERS = (KeyError("k"), ValueError("v"), IndexError(3), AssertionError(), Fault("x"))
RUNS: dict[str, Callable[[Function], Any]] = {
    "jit": lambda f: hf.jit(f)(X),
    "vmap": lambda f: hf.vmap(f)(X),
    "grad": lambda f: hf.grad(f)(1.0),
    "while_loop": lambda f: hf.while_loop(lambda x: x < 3, f, hf.asarray(1.0)),
    "scan": lambda f: hf.scan(lambda c, x: (c, f(x)), 0.0, X),
    "debug": lambda f: hf.debug().__enter__() or hf.map(f, X),
    "trace": lambda f: hf.trace(f, X),
    "checkpoint": lambda f: hf.checkpoint(f)(X),
    "subgraph": lambda f: hf.subgraph(f)(X),
    "custom_jvp": lambda f: hf.custom_jvp(f)(X),
    "callback": lambda f: hf.jit(lambda x: hf.callback(f, hf.spec("f64[3]"), x))(X),
}


@pytest.mark.parametrize("error", [*USERS, MemoryError("m"), OSError(2, "no file")])
@pytest.mark.parametrize("run", [r for r in RUNS if r != "debug"])
def test_errors_of_the_users_functions_are_theirs(run: str, error: Exception) -> None:
    def fails(*_: Any) -> Any:
        raise error

    with pytest.raises(type(error)) as caught:
        RUNS[run](fails)
    assert caught.value is error


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError])
def test_interrupts_pass_through(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(Tracer, "record", fails)
    with pytest.raises(error):
        hf.jit(squares)(X)


@pytest.mark.parametrize("run", ["jit", "vmap", "grad", "trace"])
def test_a_call_with_other_arguments_is_a_type_error_as_in_python(run: str) -> None:
    def two(x: Any, y: Any) -> Any:
        return x + y

    with pytest.raises(TypeError, match=r"y|arguments") as caught:
        RUNS[run](two)
    assert not isinstance(caught.value, InternalError)
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        hf.matmul(X)
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        hf.sum(X, axes=1)


LINEAR: Any = hf.nn.Linear.init(hf.random.key(0), 3, 3)
MODULES: dict[str, Any] = {
    "layer": LINEAR,
    "layers": hf.nn.Sequential(LINEAR),
    "symbolic": hf.symbolic_trace(LINEAR),
    "captured": hf.symbolic_trace(hf.trace(lambda x: hf.sin(x), X)),
}
WRONG: dict[str, Callable[[Any], Any]] = {
    "none": lambda m: m(),
    "two": lambda m: m(X, X),
    "named": lambda m: m(q=X),
    "jit": lambda m: hf.jit(m)(X, X),
    "grad": lambda m: hf.grad(m)(X, X),
    "vmap": lambda m: hf.vmap(m)(X, X),
    "map": lambda m: hf.map(m, X, X),
    "symbolic_trace": lambda m: hf.symbolic_trace(lambda x: m(x, x))(X),
    "run": lambda m: hf.fx.Interpreter(hf.symbolic_trace(m)).run(X, X),
    "run named": lambda m: hf.fx.Interpreter(hf.symbolic_trace(m)).run(q=X),
    "propagate": lambda m: hf.symbolic_trace(m).propagate(X, X),
    "shapes": lambda m: hf.fx.ShapeProp(hf.symbolic_trace(m)).propagate(),
    "node": lambda m: hf.fx.Interpreter(
        hf.symbolic_trace(lambda x: hf.wrap(m)(x, x))
    ).run(X),
}


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("call", WRONG)
def test_a_module_takes_its_arguments_as_functions_do(call: str, module: str) -> None:
    with pytest.raises(TypeError, match=r"missing|takes|got|too many|unexpected"):
        WRONG[call](MODULES[module])


def test_a_captured_module_is_run_by_position() -> None:
    module = hf.trace(lambda x: hf.sin(x), X)
    for call in (module, hf.fx.Interpreter(module).run):
        with pytest.raises(TypeError, match="unexpected keyword argument 'q'"):
            call(q=X)


@pytest.mark.parametrize("wrong", [None, "text", [1.0], {}, object()])
def test_what_is_no_tensor_is_no_input_of_a_layer(wrong: Any) -> None:
    key = hf.random.key(0)
    layers: list[tuple[Any, tuple[Any, ...]]] = [
        (LINEAR, (wrong,)),
        (hf.nn.Sequential(LINEAR), (wrong,)),
        (hf.nn.LayerNorm.init(3), (wrong,)),
        (hf.nn.MultiheadAttention.init(key, 4, 2), (wrong,)),
    ]
    cells: list[Any] = [
        kind.init(key, 3, 3) for kind in (hf.nn.GRUCell, hf.nn.LSTMCell)
    ]
    layers += [(cell, args) for cell in cells for args in ((X, wrong), (wrong, X))]
    layers.append((cells[1], ((X, wrong), X)))
    for layer, args in layers:
        with pytest.raises(ArgumentTypeError, match=r"must be a (tensor|pair)"):
            layer(*args)
    with pytest.raises(ArgumentTypeError, match="`weight` must be a tensor"):
        hf.nn.Linear(None)(X)
    with pytest.raises(ArgumentTypeError, match="`function` must be a function"):
        hf.nn.Function(X)


@pytest.mark.parametrize("run", ["jit", "vmap", "grad", "trace"])
def test_errors_of_builtins_that_are_given_are_theirs(run: str) -> None:
    with pytest.raises(TypeError, match="iter") as caught:
        RUNS[run](functools.partial(next, 3))  # which has no frame of Python's
    assert not isinstance(caught.value, InternalError)
    with pytest.raises(TypeError, match="real number"):
        hf.vjp(int, None) if run == "grad" else hf.trace(int, None)


def test_sizes_divide_as_numbers_do() -> None:
    with pytest.raises(ZeroDivisionError, match="zero"):
        hf.jit(lambda x: x.shape[0] // 0, dynamic=True)(X)
    with pytest.raises(ValueError, match="negative shift count"):
        hf.jit(lambda x: x.shape[0] << -1, dynamic=True)(X)


def test_a_function_that_calls_itself_without_end_is_the_users(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recursion, "LIMIT", 2_500)
    # Where there is no stack left, callbacks of weak references may fail too.
    monkeypatch.setattr(sys, "unraisablehook", lambda _: None)

    def endless(x: Any) -> Any:
        return endless(x + 1)

    with pytest.raises(RecursionError):
        hf.jit(endless)(X)


def test_deliberate_errors_stay_what_they_are() -> None:
    with pytest.raises(ShapeError):
        hf.jit(lambda x: x @ hf.ones((2,)))(X)


@given(st.sampled_from(sorted(RUNS.keys() - {"debug"})), st.sampled_from(USERS))
def test_nothing_of_the_users_becomes_internal(run: str, error: Exception) -> None:
    test_errors_of_the_users_functions_are_theirs(run, error)


def test_a_call_costs_no_frame_more() -> None:
    """The function that users call is the one that finds the program."""
    assert not hasattr(hf.jit(squares).__call__, "__wrapped__")
    assert not hasattr(hf.Tensor.__add__, "__wrapped__")
