"""Exported programs as ONNX models: equal answers in onnxruntime; what is refused."""

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import pytest
from tests.targets import onnx as column
from tests.targets.calls import (
    CALLS,
    ROWS,
    A,
    W,
    case,
    cases,
    exported,
    f64,
    function_of,
    grown,
    last_and_sums,
    shared,
)
from tests.targets.onnx import KINDS, REFUSED, node_types, samples_of

import hopflow as hf
from hopflow import dtypes, pytree
from hopflow.dtypes import as_dtype
from hopflow.errors import ArgumentTypeError, ArgumentValueError, ExportError
from hopflow.export.onnx import model as models
from hopflow.export.onnx.kernels import KERNELS
from hopflow.export.onnx.library import OPSET, element_type, library
from hopflow.ops import batching
from hopflow.ops.opdef import OPERATIONS
from hopflow.testing.onnx_models import Session
from hopflow.testing.requires import load, requires
from hopflow.testing.units import difference

pytestmark = [requires("onnx>=1.23", "onnxruntime>=1.32")]


Array = np.ndarray[Any, Any]


def check_equal(
    program: Any, *args: Any, ulps: float = 64, asserts: str = "outputs"
) -> Any:
    """Run a program and its model, compare their answers, and return the model."""
    model = program.to_onnx(asserts=asserts)
    given = [np.array(x) for x in pytree.flatten(args)[0]]
    expected = [np.asarray(x) for x in pytree.flatten(program(*args))[0]]
    found = Session(model)(*given)
    assert found.failed == 0, model.metadata_props
    for x, y in zip(found.results, expected, strict=False):
        assert difference(x, y, of_largest=True) <= ulps, (x, y)
    return model


# --- every operation ------------------------------------------------------------------

DRAWS: Final = 2
"""How often the operands of each sample are drawn."""

ULPS: Final = {
    # onnxruntime's sine of float64 is exact to 2**-52 of 1, and not of the result; its
    # hyperbolic tangent of float32 not where that is subnormal.
    "sin": 256,
    "cos": 256,
    "tanh": 128,
    # SciPy, which computes what we compare with, is less exact far out and near 1.
    "erfc": 256,
    "lgamma": 8192,
}
"""How many units in the last place results may differ by; of all others it is 8. Where
elements are computed from many others, these are units of the largest element."""


def worst(name: str) -> float:
    """The largest difference of the results of an operation."""
    op = OPERATIONS[name]
    rows = cases(op, samples_of(op), DRAWS)
    flat = [x for row in rows for x in row.operands]
    program = exported(function_of(op, rows), *map(hf.asarray, flat))
    found = Session(program.to_onnx())(*flat)
    assert found.failed == 0
    results = iter(found.results)
    is_elementwise, worst = op.batch is batching.pointwise, 0.0
    for row in rows:
        with np.errstate(all="ignore"):
            expected = op.run(*row.operands, **row.params)
        for y in expected if isinstance(expected, tuple) else (expected,):
            x = next(results)
            worst = max(
                worst, difference(x, np.asarray(y), of_largest=not is_elementwise)
            )
    assert next(results, None) is None
    return worst


WRITTEN: Final = [name for name in OPERATIONS if name != "callback"]


@pytest.mark.parametrize("name", WRITTEN)
def test_an_operation_gives_equal_answers_in_onnxruntime(name: str) -> None:
    assert worst(name) <= ULPS.get(name, 8)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_says_why(name: str) -> None:
    assert column.operation(name).endswith(f"*refused: {REFUSED[name]}*")


@pytest.mark.parametrize("name", WRITTEN)
def test_an_operation_is_the_same_for_symbolic_sizes(name: str) -> None:
    op = OPERATIONS[name]
    for sample in samples_of(op)[:2]:
        row = case(op, sample, sample.dtypes[-1])
        operands = tuple(map(hf.asarray, row.operands))
        f = function_of(op, [row])
        check_equal(hf.export(f, operands, dynamic_shapes=True), *operands, ulps=8192)


X: Final = np.random.default_rng(0).normal(size=(2, 4, 4))
LINEAR_ALGEBRA: Final[dict[str, tuple[Callable[..., Any], Array]]] = {
    "cholesky": (hf.linalg.cholesky, X @ X.mT + 4 * np.eye(4)),
    "det": (hf.linalg.det, X),
    "eigvalsh": (hf.linalg.eigvalsh, X + X.mT),
    "inv": (hf.linalg.inv, X),
    "qr": (lambda x: tuple(hf.linalg.qr(x)), X[:, :, :3]),
    "solve": (lambda x: hf.linalg.solve(x, x[..., :2]), X),
    "svdvals": (hf.linalg.svdvals, X[:, :3]),
}


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", LINEAR_ALGEBRA)
def test_linear_algebra_is_a_loop(name: str, dynamic: bool | None) -> None:
    f, x = LINEAR_ALGEBRA[name]
    given = hf.asarray(x)
    model = check_equal(exported(f, given, dynamic_shapes=dynamic), given, ulps=256)
    assert "Loop" in node_types(model.graph)


# --- every operator -------------------------------------------------------------------


@pytest.mark.parametrize("name", CALLS)
def test_an_operator_gives_equal_answers_in_onnxruntime(name: str) -> None:
    call = CALLS[name]
    model = check_equal(exported(call.function, *call.args), *call.args)
    assert KINDS[name] in [t.partition("_")[0] for t in node_types(model.graph)]


@pytest.mark.parametrize("name", CALLS)
def test_an_operator_is_the_same_for_symbolic_sizes(name: str) -> None:
    call = CALLS[name]
    program = exported(call.function, *call.args, dynamic_shapes=True)
    check_equal(program, *call.args)


# --- inputs and outputs ---------------------------------------------------------------


def names(values: Any) -> list[str]:
    return [v.name for v in values]


def property_of(model: Any, key: str) -> Any:
    return next(p.value for p in model.metadata_props if p.key == f"hopflow.{key}")


def test_inputs_and_outputs_have_the_names_of_arguments_and_results() -> None:
    def f(p: Any, n: int, *, scale: float) -> Any:
        return {"a": p["w"][0] * scale, "b": (p["w"][1] + n, n + 1)}

    program = hf.export(f, ({"w": [A, W]}, 3), {"scale": 2.0})
    model = program.to_onnx()
    assert names(model.graph.input) == ["p.w.0", "p.w.1", "n", "scale"]
    outputs = ["result.a", "result.b.0", "result.b.1", "failed_check"]  # of `n + 1`
    assert names(model.graph.output) == outputs
    found = Session(model)(A, W, np.asarray(4), np.asarray(0.5)).results
    assert found[1].tolist() == [4.3, 3.3]
    assert int(found[2]) == 5
    assert json.loads(property_of(model, "names"))["p['w'][0]"] == "p.w.0"


def test_a_model_has_the_lines_and_paths_of_what_it_was_made_of() -> None:
    model = exported(grown, A).to_onnx()
    loop = next(n for n in model.graph.node if n.op_type == "Loop")
    assert loop.name.startswith("while_loop calls.py:")
    assert loop.doc_string.startswith("calls.py:")
    assert model.producer_name == "hopflow"
    assert "x: f64[2]" in property_of(model, "signature")
    inner = loop.attribute[0].g.node[0]
    assert [p.value for p in inner.metadata_props] == ["while_loop/body"]


def test_what_a_call_writes_is_an_output() -> None:
    counts = hf.zeros((2,), dtype=hf.int64)

    def f(x: Any) -> Any:
        nonlocal counts
        counts += 1
        x *= 2.0
        return x + counts

    program = exported(f, f64(1.0, 2.0))
    model = program.to_onnx()
    assert names(model.graph.input) == ["x", "counts"]
    assert names(model.graph.output) == ["result", "x.written", "counts.written"]
    session = Session(model)
    first = session(f64(1.0, 2.0)).results
    assert [x.tolist() for x in first] == [[3.0, 5.0], [2.0, 4.0], [1, 1]]
    again = session(first[1], first[2]).results  # the state goes in, where it is given
    assert [x.tolist() for x in again] == [[6.0, 10.0], [4.0, 8.0], [2, 2]]


def test_a_subgraph_that_is_called_twice_is_one_function() -> None:
    model = check_equal(exported(lambda x: shared(shared(x)), A), A)
    [function] = model.functions
    assert [n.op_type for n in model.graph.node].count(function.name) == 2


def test_symbolic_sizes_have_names_and_are_computed() -> None:
    n = hf.Dim("n", min=2)

    def f(x: Any) -> Any:
        half = x.shape[0] // 2
        return x[:half] * (x.shape[0] % 3), hf.arange(x.shape[0] + 1), hf.flip(x)

    program = exported(f, f64(1.0, 2.0, 3.0), dynamic_shapes=[{0: n}])
    model = program.to_onnx()
    dims = [o.type.tensor_type.shape.dim[0].dim_param for o in model.graph.output[:3]]
    assert dims == ["n // 2", "n + 1", "n"]
    for size in (2, 5, 8):
        check_equal(program, hf.asarray(np.arange(float(size))))


def test_sizes_that_only_a_run_knows() -> None:
    program = exported(lambda x: (x[x > 0.4], hf.nonzero(x)), A)
    for x in (A, W, A * 0):
        check_equal(program, x)


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_loops_of_no_steps_give_empty_stacks(rows: int) -> None:
    n = hf.Dim("n")
    program = exported(
        lambda x, xs: (last_and_sums(x, xs), hf.map(lambda r: r * x, xs)),
        *(A, ROWS),
        dynamic_shapes=[None, {0: n}],
    )
    check_equal(program, A, ROWS[:rows])


def test_what_no_one_reads_is_left_out() -> None:
    @hf.subgraph
    def nothing(x: Any) -> Any:
        return ()

    def f(x: Any, rows: Any) -> Any:
        hf.scan(lambda c, r: ((), ()), (), rows)
        hf.map(lambda r: (), rows)
        hf.cond(hf.sum(x) > 1, lambda: (), lambda: ())
        nothing(x)
        nothing(x)
        return x

    for dynamic in (None, True):
        check_equal(exported(f, A, ROWS, dynamic_shapes=dynamic), A, ROWS)


def test_bfloat16_and_float16_round_as_they_do_here() -> None:
    for dtype in (hf.bfloat16, hf.float16):
        x = hf.astype(hf.asarray(np.linspace(-2, 2, 9)), dtype)
        check_equal(exported(lambda x: hf.tanh(x @ x) + hf.exp(x), x), x, ulps=2)


def test_a_module_has_its_parameters_by_path() -> None:
    first, second = hf.random.split(hf.random.key(0))
    network = {
        "first": hf.nn.Linear.init(first, 3, 4),
        "second": hf.nn.Linear.init(second, 4, 3),
    }
    x = hf.ones((2, 3))
    program = exported(
        lambda x: network["second"](hf.tanh(network["first"](x))),
        *(x,),
        dynamic_shapes=True,
    )
    model = check_equal(program, x)
    assert set(names(model.graph.initializer)) == set(program.state)


def test_random_numbers_are_the_same() -> None:
    def f(seed: int) -> Any:
        first, second = hf.random.split(hf.random.key(seed))
        return (
            hf.random.normal(first, (3, 4)),
            hf.random.permutation(second, 9),
            hf.random.randint(first, (5,), 0, 1000),
        )

    program = exported(f, 3)
    for seed in (3, 2**40):
        check_equal(program, seed)


def test_programs_of_files_and_decomposed_ones_become_models(tmp_path: Path) -> None:
    program = exported(last_and_sums, A, ROWS, dynamic_shapes=[None, {0: True}])
    program.save(tmp_path / "program.hopflow")
    check_equal(hf.load(tmp_path / "program.hopflow"), A, ROWS)
    check_equal(exported(shared, A).decompose(), A)
    check_equal(exported(hf.vmap(lambda x: grown(x)[0]), ROWS), ROWS)


# --- checks ---------------------------------------------------------------------------


def checked(x: Any, i: Any) -> Any:
    def step(n: Any, x: Any) -> Any:
        hf.check(hf.all(x < 40), "too large")
        return n + 1, x * 2

    _, x = hf.while_loop(lambda n, x: n < 3, step, (0, x))
    return x[i]


def test_an_output_is_the_number_of_the_first_check_that_fails() -> None:
    model = exported(checked, A, 1).to_onnx()
    texts = json.loads(property_of(model, "checks"))
    assert [t.split("  (")[0] for t in texts] == [
        "too large",
        "an index is out of range",
    ]
    session = Session(model)
    assert session(A, np.asarray(-1)).failed == 0
    assert session(A * 20, np.asarray(1)).failed == 1
    assert session(A, np.asarray(2)).failed == 2
    assert session(A * 20, np.asarray(2)).failed == 1


def test_constraints_and_limits_are_checks_too() -> None:
    n = hf.Dim("n", min=2, max=3)
    program = exported(
        lambda x: hf.while_loop(
            lambda x: hf.sum(x) < 100, lambda x: (x * 2,), (x,), max_steps=4
        ),
        A,
        dynamic_shapes=[{0: n}],
    )
    model = program.to_onnx()
    session = Session(model)
    assert session(A * 10).failed == 0
    assert session(np.ones(5) * 50).failed == 2
    assert session(A).failed == 3


def test_checks_may_be_dropped_or_refused() -> None:
    program = exported(checked, A, 1)
    model = check_equal(program, A, 1, asserts="drop")
    assert names(model.graph.output) == ["result"]
    with pytest.raises(ExportError, match=r"`check` \(.*:\d+\) .*`too large`"):
        program.to_onnx(asserts="error")
    exported(hf.sin, A).to_onnx(asserts="error")


# --- files and errors -----------------------------------------------------------------


def test_a_file_is_the_model(tmp_path: Path) -> None:
    onnx = load("onnx")
    model = exported(grown, A).to_onnx(tmp_path / "grown.onnx")
    assert onnx.load(tmp_path / "grown.onnx") == model


def test_large_tensors_stand_beside_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "MOST_BYTES", 100)
    weights = hf.ones((300,))
    program = exported(lambda x: x * weights, hf.ones((300,)))
    program.to_onnx(tmp_path / "large.onnx")
    assert (tmp_path / "large.onnx.data").stat().st_size >= 1200
    assert (tmp_path / "large.onnx").stat().st_size < 4000


def test_what_onnx_cannot_say_is_refused_with_the_operation_and_the_line() -> None:
    program = exported(hf.linalg.eigh, f64([2.0, 1.0], [1.0, 2.0]))
    with pytest.raises(ExportError, match=r"`eigh`.* cannot be in a model: "):
        program.to_onnx()


def test_branches_in_each_other_are_refused_beyond_what_files_hold() -> None:
    def nested(depth: int, x: Any) -> Any:
        if not depth:
            return x + 1
        return hf.cond(hf.sum(x) > depth, lambda: nested(depth - 1, x), lambda: x)

    check_equal(exported(lambda x: nested(30, x), A * 99), A * 99)
    with pytest.raises(ExportError, match="30 other loops and branches"):
        exported(lambda x: nested(31, x), A).to_onnx()


def power(x: Any) -> Any:
    return x + x.shape[0] ** 24 % 11


def rounded(x: Any) -> Any:
    return x + math.floor(x.shape[0] ** 23.0) % 7


def in_a_loop(x: Any) -> Any:
    return hf.fori_loop(0, 2, lambda i, y: y + (y.shape[0] ** 24 + 1) % 11, x)


@pytest.mark.parametrize("f", [power, rounded, in_a_loop])
def test_a_model_tells_where_int64_cannot_hold_a_number_of_its_sizes(
    f: Callable[[Any], Any],
) -> None:
    program = exported(f, np.ones(3), dynamic_shapes=[True])
    check_equal(program, np.ones(3))
    model = program.to_onnx()
    assert "int64 cannot hold" in property_of(model, "checks")
    found = Session(model)
    assert [bool(found(np.ones(n)).failed) for n in (0, 5, 6, 7, 40)] == [
        *(False, False, False),
        *(True, True),
    ]
    with pytest.raises(ExportError, match="a run checks it"):
        program.to_onnx(asserts="error")
    assert names(program.to_onnx(asserts="drop").graph.output) == ["result"]


def test_sizes_that_arrays_have_fit_in_int64() -> None:
    def f(x: Any, y: Any) -> Any:
        flat = x.reshape((-1,))
        twice = hf.concat([flat, flat, y[: y.shape[0] // 2]])
        return twice, (y[:, None] * y).reshape((-1,)), hf.zeros((y.shape[0] + 7,))

    given = np.ones((2, 3, 4)), np.ones(4)
    model = check_equal(exported(f, *given, dynamic_shapes=True), *given)
    assert "failed_check" not in names(model.graph.output)


def test_an_axis_is_as_long_as_its_dim_says() -> None:
    def checks(n: hf.Dim) -> str:
        program = exported(
            lambda x: x + x.shape[0] ** 2 % 5, np.ones(3), dynamic_shapes=[{0: n}]
        )
        return str(property_of(program.to_onnx(), "checks"))

    assert "int64" in checks(hf.Dim("n", max=2**33))
    assert "int64" not in checks(hf.Dim("n", max=2**31))


def test_a_constant_that_int64_cannot_hold_is_refused() -> None:
    def f(x: Any) -> Any:
        return x + x.shape[0] * 2**70 // (x.shape[0] + 1) % 11

    program = exported(f, np.ones(3), dynamic_shapes=[True])
    with pytest.raises(ExportError, match=f"int64 cannot hold -?{2**70}"):
        program.to_onnx()


def test_a_condition_beyond_int64_is_decided_at_once() -> None:
    def f(x: Any, k: Any) -> Any:
        return k % x.shape[0]

    k = hf.asarray(np.asarray(7, np.uint64))
    program = exported(f, A, k, dynamic_shapes=[True, None])
    check_equal(program, A, k)


def test_arguments_of_another_kind_are_refused() -> None:
    program = exported(hf.sin, A)
    with pytest.raises(ArgumentTypeError, match="`path` must be a path"):
        program.to_onnx(3)
    with pytest.raises(ArgumentValueError, match="'outputs', 'drop' or 'error'"):
        program.to_onnx(asserts="stop")


def test_without_the_library_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = exported(hf.sin, A)
    library.cache_clear()
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(ExportError, match=r"pip install 'hopflow\[onnx\]'"):
        program.to_onnx()
    monkeypatch.undo()
    old = SimpleNamespace(
        __version__="1.15", defs=SimpleNamespace(onnx_opset_version=lambda: 20)
    )
    monkeypatch.setitem(sys.modules, "onnx", old)
    with pytest.raises(ExportError, match="knows operators up to version 20"):
        program.to_onnx()
    library.cache_clear()


@pytest.mark.parametrize("dtype", ["float32", "float64", "int8", "int32", "uint16"])
def test_convolutions_of_symbolic_sizes(dtype: str) -> None:
    """The results of some sizes are empty, which `Conv` refuses."""

    def f(x: Any, w: Any) -> Any:
        return hf.conv(x, w, stride=2, dilation=2), hf.conv(x, w, padding="same")

    rng = np.random.default_rng(0)
    x, w = (rng.integers(0, 9, s).astype(dtype) for s in ((2, 3, 7), (4, 3, 2)))
    program = hf.export(f, (hf.asarray(x), hf.asarray(w)), dynamic_shapes=True)
    session = Session(program.to_onnx())
    for batch, length, window in ((2, 7, 2), (1, 1, 2), (3, 4, 4), (2, 9, 1)):
        x, w = (
            rng.integers(0, 9, s).astype(dtype)
            for s in ((batch, 3, length), (4, 3, window))
        )
        found, expected = session(x, w).results, program(hf.asarray(x), hf.asarray(w))
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_array_equal(a, np.asarray(b))


# --- the table of kernels -------------------------------------------------------------

SHAPES: Final[dict[str, list[tuple[int, ...]]]] = {
    "Conv": [(1, 1, 1), (1, 1, 1)],
    "CumProd": [(2,), ()],
    "CumSum": [(2,), ()],
    "GatherND": [(2,), (1, 1)],
    "MatMul": [(2, 2), (2, 2)],
    "Pad": [(2,), (2,), ()],
    "Range": [(), (), ()],
    "Slice": [(2,), (1,), (1,)],
    "TopK": [(2,), (1,)],
}
ATTRIBUTES: Final[dict[str, dict[str, Any]]] = {
    "BitShift": {"direction": "LEFT"},
    "Concat": {"axis": 0},
    "ScatterElements": {"axis": 0},
    "Transpose": {"perm": [0]},
}
"""Of others the inputs have one axis of one element, and there are no attributes."""
INPUTS: Final = {
    "Where": "bTT",
    "Reshape": "Ti",
    "Expand": "Ti",
    "Unsqueeze": "Ti",
    "Squeeze": "Ti",
    "Slice": "Tii",
    "Gather": "Ti",
    "GatherElements": "Ti",
    "GatherND": "Ti",
    "ScatterElements": "TiT",
    "Pad": "TiT",
    "TopK": "Ti",
    "CumSum": "Ti",
    "CumProd": "Ti",
    "Range": "TTT",
    **dict.fromkeys(("ReduceSum", "ReduceProd", "ReduceMax", "ReduceMin"), "Ti"),
    **dict.fromkeys("Add Sub Mul Div Mod Pow Min Max Concat MatMul Conv".split(), "TT"),
    **dict.fromkeys("Equal Less LessOrEqual Greater GreaterOrEqual".split(), "TT"),
    **dict.fromkeys("And Or Xor BitwiseAnd BitwiseOr BitwiseXor".split(), "TT"),
    "BitShift": "TT",
}


@pytest.mark.parametrize("operator", sorted(set(KERNELS) - {"Cast", "BitCast"}))
def test_onnxruntime_has_the_kernels_of_the_table(operator: str) -> None:
    onnx = load("onnx")
    letters = INPUTS.get(operator, "T")
    shapes = SHAPES.get(operator, [(1,)] * len(letters))
    for short in KERNELS[operator].kernels:
        dtype = as_dtype(short)
        kinds = {"T": dtype, "i": dtypes.int64, "b": dtypes.bool_}
        inputs = [
            onnx.helper.make_tensor_value_info(
                f"x{i}", element_type(kinds[letter]), shape
            )
            for i, (letter, shape) in enumerate(zip(letters, shapes, strict=True))
        ]
        results = [f"y{i}" for i in range(len(KERNELS[operator].results))]
        node = onnx.helper.make_node(
            operator, names(inputs), results, **ATTRIBUTES.get(operator, {})
        )
        outputs = [
            onnx.helper.make_value_info(y, onnx.helper.make_tensor_type_proto(0, None))
            for y in results
        ]
        graph = onnx.helper.make_graph([node], "one", inputs, outputs)
        opsets = [onnx.helper.make_opsetid("", OPSET)]
        version = onnx.helper.find_min_ir_version_for(opsets)
        model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=version)
        model = onnx.shape_inference.infer_shapes(model, strict_mode=True)
        Session(model)
