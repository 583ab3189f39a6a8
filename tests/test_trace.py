"""`hf.trace`: what becomes a graph, what a constant, and what an error."""

import math
import re
from typing import Any

import numpy as np
import pytest

import hopflow
from hopflow.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    CapturedTensorError,
    DataDependentError,
    DTypeError,
    MutationError,
    ResultTypeError,
    ShapeError,
    StructureError,
    TraceError,
)
from hopflow.graph.module import GraphModule
from hopflow.graph.types import same_size
from hopflow.graph.verifier import verify
from hopflow.symbolic.size import symbol
from hopflow.testing.executions import agree, fails, interpreted

hf: Any = hopflow

X = np.arange(6, dtype=np.float32).reshape(2, 3)


def traced(f: Any, *args: Any, **options: Any) -> GraphModule:
    module: GraphModule = hf.trace(f, *args, **options)
    verify(module.graph)
    return module


def names(module: GraphModule) -> list[str]:
    return [n.op.name if n.op else n.kind for n in module.graph.nodes]


# --- arguments and results ------------------------------------------------------------


def test_pytrees_go_in_and_come_out() -> None:
    def f(a: Any, b: Any) -> Any:
        return {"sum": a["x"] + b[0], "none": None}, [b[1], (a["x"],)]

    module = traced(f, {"x": hf.asarray(X), "n": None}, (X, hf.zeros(2)))
    y = hf.ones((2, 3))
    got = module({"x": y, "n": None}, (X, hf.zeros(2)))
    agree(got, ({"sum": X + 1, "none": None}, [np.zeros(2), (np.ones((2, 3)),)]))
    assert [v.node.name for v in module.graph.inputs] == ["a", "b_0", "b_1"]


def test_results_that_were_python_numbers_come_back_as_such() -> None:
    result = traced(lambda x: (1, 2.5, True, x.shape[1], hf.sum(x)), X)(X)
    assert [type(r).__name__ for r in result] == [
        *("int", "float", "bool", "int"),
        "EagerTensor",
    ]


def test_a_symbolic_size_comes_back_as_a_tensor() -> None:
    module = traced(lambda x: x.shape[0] * 2 + 1, hf.spec("f32[n]"), mode="fake")
    agree(module(hf.zeros(5)), 11)


def test_a_body_may_return_a_size() -> None:
    def f(x: Any) -> Any:
        n = x.shape[0] * 2 + 1
        return hf.cond(x[0] > 0, lambda: n * x.shape[0], lambda: 0)

    module = traced(f, hf.spec("f32[n]"), mode="fake")
    with interpreted():
        agree(module(hf.ones(5)), 55)


def test_shapes_that_are_read_are_constants_and_listed() -> None:
    def f(x: Any, y: Any, z: Any) -> Any:
        z = z * 2
        if x.shape[0] > 2:
            return x + 1
        return sum(len(y) * row for row in z)

    big, small = hf.ones((3,)), hf.ones((2,))
    first = f.__code__.co_firstlineno
    for args, wanted in (
        ((big, small, big), {"args[0].shape": ((3,), first + 2)}),
        (
            (small, small, big),
            {
                "args[0].shape": ((2,), first + 2),
                "args[1].shape": ((2,), first + 4),
                "f32[3].shape": ((3,), first + 4),  # of `z`, which is computed
                "2.0": (2.0, first + 4),  # `len(y)`
            },
        ),
    ):
        module = hf.trace(f, *args)
        found = {
            s.path: (s.value, s.line and s.line.line)
            for s in module.specializations.values()
        }
        assert found == wanted


def test_numbers_of_enclosing_scopes_are_constants_and_listed() -> None:
    rate, words = 0.125, ["not", "listed"]

    def f(x: Any) -> Any:
        y = x[:1] if words else x
        if y.shape == (1,):
            return y * rate
        return y

    module = hf.trace(f, hf.ones((3,)))
    first = f.__code__.co_firstlineno
    listed = module.specializations.values()
    found = {s.path: (s.value, s.line and s.line.line) for s in listed}
    assert found == {
        "f32[1].shape": ((1,), first + 2),
        "rate": (0.125, first + 3),
    }
    assert module.specializations["rate"].value == rate
    agree(module(hf.ones((3,))), np.array([0.125], np.float32))


def test_numbers_of_attributes_and_called_functions_are_constants_and_listed() -> None:
    class Layer:
        rate = 0.125

        def __call__(self, x: Any) -> Any:
            return x * self.rate - 1

    layer, depths = Layer(), [3, 3, 5]

    def step(x: Any) -> Any:
        return hf.cond(x > 2, lambda: x / depths[0], lambda: x - 2 * depths[2])

    def f(x: Any) -> Any:
        return step(layer(x)) * depths[1]

    module = hf.trace(f, hf.asarray(1.0))
    first, own = (g.__code__.co_firstlineno for g in (step, f))
    call = Layer.__call__.__code__.co_firstlineno
    listed = module.specializations.values()
    assert [(s.path, s.value, s.line and s.line.line) for s in listed] == [
        ("0.125", 0.125, call + 1),
        ("3.0", 3.0, first + 1),
        ("10.0", 10.0, first + 1),
        ("3.0", 3.0, own + 1),
    ]


def test_numbers_and_other_arguments_are_constants_and_listed() -> None:
    def f(x: Any, k: Any, opts: Any) -> Any:
        return x * k if opts["flag"] else x + len(opts["name"])

    options = {"flag": True, "name": "abc", "none": None}
    module = traced(f, X, 2, options)
    found = {s.path: s.value for s in module.specializations.values()}
    assert found == {"args[1]": 2, "args[2]['flag']": True, "args[2]['name']": "abc"}
    line = module.specializations[1].line
    assert line is not None
    assert line.line == f.__code__.co_firstlineno + 1
    agree(module(X, 2, options), X * 2)
    fails(
        ArgumentValueError,
        "f: `args[1]` was 2 in the trace, which took it for a constant, and is 3. "
        "Trace again, or make it a tensor.",
        *(module, X, 3, options),
    )


@pytest.mark.parametrize("number", [0.0, -0.0, math.nan, math.inf, 0, False])
def test_a_constant_is_told_from_all_others(number: Any) -> None:
    module = traced(lambda x, k: x * math.copysign(1.0, k), X, number)
    again = float("nan") if math.isnan(number) else number  # another one
    agree(module(X, again), X * math.copysign(1.0, number))
    for other in (0.0, -0.0, math.nan, math.inf, 0, False, 1.5):
        if repr(other) != repr(number):
            with pytest.raises(ArgumentValueError, match="took it for a constant"):
                module(X, other)


def test_a_module_checks_its_arguments() -> None:
    module = traced(lambda x: x, X)
    with pytest.raises(ShapeError):
        module(X[0])
    with pytest.raises(DTypeError):
        module(X.astype(np.float64))
    with pytest.raises(StructureError):
        module((X,))


def test_iteration_over_a_static_axis_is_unrolled() -> None:
    def f(x: Any) -> Any:
        total = 0.0
        for row in x:
            for i in range(len(row)):
                total = total + row[i] * i
        return total

    module = traced(f, X)
    assert names(module).count("multiply") == 6
    agree(module(X), np.float32((X * np.arange(3)).sum()))


def test_a_trace_of_types_runs_for_all_sizes() -> None:
    def f(x: Any, w: Any) -> Any:
        return hf.scan(lambda c, r: (c + hf.matmul(r, w), c), hf.zeros(w.shape[1]), x)

    module = traced(f, *hf.spec("f32[b, d]", "f32[d, e]"), mode="fake")
    assert [v.node.name for v in module.graph.symbols] == ["b", "d", "e"]
    rng = np.random.default_rng(0)
    for b, d, e in [(2, 3, 4), (5, 1, 2)]:
        x, w = rng.random((b, d), np.float32), rng.random((d, e), np.float32)
        c, ys = np.zeros(e, np.float32), []
        for row in x:
            ys.append(c)
            c = c + row @ w
        with interpreted():
            agree(module(x, w), (c, np.stack(ys)))


def test_a_module_can_be_part_of_another_trace() -> None:
    inner = traced(lambda x: (hf.cond(x[0] > 0, lambda: x, lambda: -x), 3), X[0])
    outer = traced(lambda x: inner(x + 1), X[0])
    agree(outer(X[1]), (X[1] + 1, 3))


# --- writes ---------------------------------------------------------------------------


def test_a_write_to_an_argument_is_one_at_each_call() -> None:
    def f(x: Any, y: Any) -> Any:
        x[0] = y[0]
        return x, x[1:]

    module = traced(f, X.copy(), X)
    x = hf.zeros((2, 3))
    result, view = module(x, X + 1)
    want = np.concatenate([X[:1] + 1, np.zeros((1, 3), np.float32)])
    assert result is x
    agree((x, view), (want, want[1:]))


def test_a_write_to_a_captured_tensor_is_one_at_each_call() -> None:
    count = hf.zeros(())

    def f(x: Any) -> Any:
        count[...] = count + 1
        return x * count

    module = traced(f, X, captures=True)
    agree(count, 0.0)
    agree([module(X), module(X)], [X, X * 2])
    agree(count, 2.0)


def test_a_tensor_made_inside_is_fresh_at_each_call() -> None:
    def f(x: Any) -> Any:
        local = hf.asarray([1.0, 2.0, 3.0])
        local += x[0]
        return local

    module = traced(f, X)
    agree([module(X), module(X)], [X[0] + [1, 2, 3]] * 2)
    assert len(module.attributes) == 1


@pytest.mark.parametrize("run", [lambda f: f, hf.jit, hf.functionalize])
def test_a_module_that_writes_is_for_arguments_that_are_apart(run: Any) -> None:
    def f(a: Any, b: Any) -> Any:
        a += 1
        return b * 2

    module = hf.trace(f, X[0], X[0])
    for cut in (lambda x: (x, x), lambda x: (x, x[:]), lambda x: (x[:4], x[::-1])):
        x = hf.asarray(X[0].copy())
        with pytest.raises(MutationError, match="shares its memory"):
            run(lambda x, cut=cut: module(*cut(x)))(x)
        agree(x, X[0])
    x = hf.asarray(np.zeros((2, X.shape[1]), X.dtype))
    agree(module(x[0], x[1]), np.zeros_like(X[0]))
    agree(x[0], np.ones_like(X[0]))
    held = hf.trace(lambda a: f(a, x), hf.zeros_like(x), captures=True)
    with pytest.raises(MutationError, match="shares its memory"):
        held(x)


@pytest.mark.parametrize("run", [lambda f: f, hf.jit, hf.functionalize])
@pytest.mark.parametrize(
    "cut",
    [
        lambda x: (x[:3], x[3:]),
        lambda x: (x[::2], x[1::2]),
        lambda x: (x[1::2], x.reshape(3, 2)[:, 0]),
        lambda x: (x.reshape(3, 2).T[1], x[4::-2]),
        lambda x: (x[:3], hf.broadcast_to(x[5], 3)),
    ],
)
def test_parts_of_a_tensor_with_no_common_element_are_apart(run: Any, cut: Any) -> None:
    def f(a: Any, b: Any) -> Any:
        a += 1
        return a * b

    def f_in_a_loop(a: Any, b: Any) -> Any:
        return hf.fori_loop(0, 2, lambda _, c: c + module(a, b), b)

    module = hf.trace(f, hf.zeros(3), hf.zeros(3))
    for g, plain in (module, f), (f_in_a_loop, lambda a, b: b + f(a, b) + f(a, b)):
        x, y = (hf.arange(6, dtype=hf.float32) for _ in range(2))
        agree(run(lambda x, g=g: g(*cut(x)))(x), plain(*cut(y)))
        agree(x, y)


# --- captures -------------------------------------------------------------------------


def test_a_global_tensor_is_captured_with_permission() -> None:
    w = hf.asarray(X)

    def f(x: Any) -> Any:
        return x + w

    with pytest.raises(CapturedTensorError) as found:
        hf.trace(f, X)
    assert re.sub(r":\d+", ":#", str(found.value)) == (
        "the traced function reads a tensor f32[2, 3] that is not an argument (at "
        "test_trace.py:#). Pass it as an argument, or trace with `captures=True` to "
        "keep it as an attribute of the graph."
    )
    module = traced(f, X, captures=True)
    [(name, held)] = module.attributes.items()
    assert held is w
    assert f'get_attr("{name}")' in str(module)
    w[:] = 1.0  # the tensor is what is captured, and not its value
    agree(module(X), X + 1)


@pytest.mark.parametrize("data", [[1.0, 2.0, 3.0], np.ones(3, np.float32)])
def test_data_needs_no_permission(data: Any) -> None:
    def f(x: Any) -> Any:
        return hf.cond(x[0, 0] > 0, lambda: hf.asarray(data) + x, lambda: x)

    module = traced(f, X)
    agree(module(X + 1), X + 1 + np.asarray(data, np.float32))


def test_an_array_beside_a_tensor_is_data() -> None:
    agree(traced(lambda x: x + X, X)(X), X * 2)


# --- what only a run can tell ---------------------------------------------------------

NUMBER = "Keep it a tensor of no axes: `hf` functions take those where numbers go."
ARRAY = "Compute with `hf` functions, which take tensors where NumPy takes arrays."
INDEX = "Index with it (`x[i]`), or make it a bound of `hf.fori_loop`."


@pytest.mark.parametrize(
    ("use", "what", "remedy"),
    [
        (
            bool,
            "bool",
            "Branch with `hf.cond`, loop with `hf.while_loop`, or decorate the "
            "function that asks with `@hf.control_flow`.",
        ),
        (lambda x: 1 if x else 2, "bool", "Branch with `hf.cond`, loop with `hf.wh"),
        (int, "int", NUMBER),
        (float, "float", NUMBER),
        (complex, "complex", NUMBER),
        (lambda x: x.item(), "item", NUMBER),
        (lambda x: x.tolist(), "tolist", "Loop with `hf.scan` or `hf.map`, or iterate"),
        (range, "operator.index", INDEX),
        (lambda x: [1, 2][x], "operator.index", INDEX),
        (np.asarray, "numpy.asarray", ARRAY),
        (lambda x: x.__dlpack__(), "__dlpack__", ARRAY),
    ],
)
def test_a_traced_tensor_has_no_value(use: Any, what: str, remedy: str) -> None:
    with pytest.raises(TraceError) as found:
        hf.trace(use, hf.asarray(1), mode="fake")
    text = re.sub(r" at test_trace\.py:\d+", "", str(found.value))
    wanted = (
        f"{what}() of a traced tensor i64[]: its value is only known when the graph "
        f"runs. {remedy}"
    )
    assert text.startswith(wanted)


def test_the_error_names_the_line() -> None:
    def f(x: Any) -> Any:
        return int(x)

    line = f.__code__.co_firstlineno + 1
    with pytest.raises(TraceError, match=rf"^int\(\) .* at test_trace\.py:{line}: "):
        hf.trace(f, hf.asarray(1), mode="fake")


def test_a_decision_on_a_symbol_names_itself() -> None:
    def f(x: Any) -> Any:
        return x if x.shape[0] > 3 else x + 1

    with pytest.raises(DataDependentError, match="cannot decide `n <= 3`"):
        hf.trace(f, hf.spec("f32[n]"), mode="fake")


def test_a_tensor_prints_in_a_trace() -> None:
    shown: list[str] = []
    hf.trace(lambda x: shown.append(f"{x} {x!r}"), X)
    assert shown == ["Tensor(traced, f32[2, 3]) Tensor(traced, f32[2, 3])"]


# --- options --------------------------------------------------------------------------


def identity(x: Any) -> Any:
    return x


@pytest.mark.parametrize(
    ("error", "text", "args", "options"),
    [
        (ArgumentTypeError, "trace: `f` must be a function, and is `int`.", (3,), {}),
        (
            ArgumentValueError,
            "trace: `mode` must be 'real', 'fake' or 'symbolic', and is 'abstract'.",
            (identity, X),
            {"mode": "abstract"},
        ),
        (
            ArgumentTypeError,
            "trace: `args[0]` is a type (f32[2]), which mode 'real' does not take. "
            "Give a tensor, or use mode 'fake'.",
            (identity, hf.spec("f32[2]")),
            {},
        ),
        (
            ResultTypeError,
            "trace: `<lambda>` (test_trace.py:#) must return tensors or numbers, and "
            "its `result['k']` is `str`. Return the data alone, or None.",
            (lambda x: {"k": "no"}, X),
            {},
        ),
    ],
)
def test_arguments_of_trace_are_checked(
    error: type[Exception], text: str, args: Any, options: Any
) -> None:
    fails(error, text, hf.trace, *args, **options)


def test_mode_fake_takes_tensors_for_their_types() -> None:
    agree(traced(lambda x: x + 1, X, mode="fake")(X), X + 1)


# --- spec -----------------------------------------------------------------------------


def test_a_type_is_written_as_it_prints() -> None:
    assert str(hf.spec("f32[3, 4]")) == "f32[3, 4]"
    assert str(hf.spec(" float64 [ ] ")) == "f64[]"
    a, b = hf.spec("i32[n, 2]", "bool[n]")
    assert a.shape[0] is b.shape[0]
    assert not same_size(a.shape[0], hf.spec("i32[n]").shape[0])


@pytest.mark.parametrize(
    "text",
    ["f32", "f32[3", "f32[3,]", "f32[-1]", "f32[a b]", "", f"f32[{'9' * 5000}]"],
    ids=lambda text: text[:9],
)
def test_a_text_that_is_no_type_is_refused(text: str) -> None:
    fails(
        ArgumentValueError,
        f"spec: {text!r} is no type. Write a dtype and sizes, as in 'f32[n, 4]'.",
        *(hf.spec, text),
    )


def test_a_type_of_no_dtype_is_refused() -> None:
    with pytest.raises(DTypeError):
        hf.spec("f33[2]")


def test_types_may_be_made_by_hand() -> None:
    s0 = symbol("s0")
    type_ = hf.spec("f32[]").with_shape((s0, 4))
    module = traced(lambda x: hf.zeros((x.shape[0] + 1, 2)), type_, mode="fake")
    assert str(module.graph.out_types[0]) == "f32[s0 + 1, 2]"
    agree(module(np.ones((3, 4), np.float32)), np.zeros((4, 2)))


# --- what a node remembers ------------------------------------------------------------


def test_nodes_know_their_line_and_their_operators() -> None:
    def f(x: Any) -> Any:
        def body(i: Any, a: Any) -> Any:
            return hf.cond(i > 1, lambda: hf.sin(a), lambda: a)

        return hf.fori_loop(0, 3, body, x)

    module = traced(f, X)
    [sin] = [n for n in module.graph.walk() if n.op.name == "sin"]
    assert sin.operator_path == "while_loop/body → cond/then"
    assert sin.line is not None
    assert sin.line.line == f.__code__.co_firstlineno + 2
    assert sin.line.function == "<lambda>"


def test_an_augmented_assignment_to_an_item_writes_once() -> None:
    def f(x: Any, i: Any) -> Any:
        x = hf.copy(x)
        x[i] += 1.0
        x[1:3] -= 2.0
        return x

    traced = hf.trace(f, hf.asarray([1.0, 2.0, 3.0]), hf.asarray(1))
    names = [n.op.name for n in traced.graph.nodes]
    assert (names.count("scatter"), names.count("update_slice")) == (1, 1)
    assert traced(hf.asarray([1.0, 2.0, 3.0]), hf.asarray(1)).tolist() == [1, 1, 1]


def test_a_tensor_from_outside_that_is_only_returned_is_an_attribute() -> None:
    outside = hf.asarray([1.0, 2.0])
    traced = hf.trace(lambda x: (x, outside), hf.asarray(3.0), captures=True)
    assert traced(hf.asarray(4.0))[1].tolist() == [1.0, 2.0]
