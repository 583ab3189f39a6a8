"""What every operation has, drawn from its record: its lowering, eager runs, text, and
pickles. `docs/add_an_operation.md` lists the other tests that draw from records."""

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import numpy as np
import pytest

import hopflow as hf
from hopflow.bind import bind
from hopflow.dtypes import DType, as_dtype, finfo
from hopflow.errors import HopflowError
from hopflow.graph.parser import parse
from hopflow.graph.printer import format_graph
from hopflow.graph.types import TensorType
from hopflow.ops.opdef import HALVES, OPERATIONS, OpDef, Sample
from hopflow.tensor.numpy_protocol import special_functions, universal_functions
from hopflow.testing.kernels import KernelTrap, evaluate, sample_arrays

pytestmark = pytest.mark.slow  # what no Python version changes

Array = np.ndarray[Any, np.dtype[Any]]

every_operation = pytest.mark.parametrize("op", OPERATIONS.values(), ids=str)
every_sample = pytest.mark.parametrize(
    ("op", "sample", "dtype"),
    [
        pytest.param(op, sample, dtype, id=f"{op.name}-{i}-{dtype}")
        for op in OPERATIONS.values()
        for i, sample in enumerate(op.samples)
        for dtype in (sample.dtypes if sample.operands else sample.dtypes[:1])
    ],
)
# These add products in another order than NumPy and SciPy do.
REORDERED = {"reduce_sum", "reduce_prod", "matmul", "conv", "triangular_solve"}


@every_sample
def test_lowering_means_what_numpy_does(
    op: OpDef, sample: Sample, dtype: DType
) -> None:
    arrays = sample_arrays(sample, dtype)
    try:
        with np.errstate(all="ignore"):
            found = op.run(*arrays, **sample.params)
    except HopflowError:
        with pytest.raises(KernelTrap):
            evaluate(op, arrays, **sample.params)
        return
    results = found if isinstance(found, tuple) else (found,)
    types = [TensorType(as_dtype(a.dtype), a.shape) for a in arrays]
    inferred = op.result_types(types, sample.params)
    lowered = evaluate(op, arrays, **sample.params)
    ulps = 8 if op.name in REORDERED else op.ulps
    for got, result, type_ in zip(lowered, results, inferred, strict=True):
        want = np.asarray(result)
        assert (want.dtype, want.shape) == (type_.dtype.dtype, type_.shape)
        assert (got.dtype, got.shape) == (want.dtype, want.shape)
        near(got, want, ulps)


def near(got: Array, want: Array, ulps: int) -> None:
    dtype = as_dtype(want.dtype)
    if not dtype.is_float:
        np.testing.assert_array_equal(got, want)
        return
    tolerance = ulps * finfo(dtype).eps
    a, b = got.astype(np.float64), want.astype(np.float64)
    np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def calls(op: OpDef) -> Iterator[tuple[list[Array], dict[str, Any], list[Array]]]:
    """Operands, params and NumPy's results of the samples, for two dtypes each."""
    for sample in op.samples:
        for dtype in dict.fromkeys((sample.dtypes[0], sample.dtypes[-1])):
            operands = sample_arrays(sample, dtype)
            try:
                with np.errstate(all="ignore"):
                    found = op.run(*operands, **sample.params)
            except HopflowError:  # it stops at these operands
                continue
            results = found if isinstance(found, tuple) else (found,)
            yield operands, sample.params, list(map(np.asarray, results))


@every_operation
@pytest.mark.parametrize("backend", [None, "interpreter"], ids=["eager", "interpreter"])
def test_an_operation_that_is_not_compiled_is_what_its_record_runs(
    op: OpDef, backend: str | None
) -> None:
    for operands, params, want in calls(op):

        def f(*xs: Any, params: dict[str, Any] = params) -> Any:
            return bind(op, xs, params)

        run = f if backend is None else hf.jit(f, backend=backend)
        tensors = list(map(hf.asarray, operands))
        types = op.result_types([x.type for x in tensors], params)
        found = run(*tensors)
        assert [(x.dtype, x.shape) for x in found] == [
            (t.dtype, t.shape) for t in types
        ]
        for got, wanted in zip(found, want, strict=True):
            np.testing.assert_array_equal(np.asarray(got), wanted)


@every_operation
def test_the_text_of_an_operation_is_read_again(op: OpDef) -> None:
    for operands, params, _ in calls(op):
        graph = hf.trace(lambda *xs, p=params: bind(op, xs, p), *operands).graph
        text = format_graph(graph)
        assert format_graph(parse(text, OPERATIONS)) == text


@every_operation
def test_an_operation_is_copied_by_its_name_as_it_is_pickled(op: OpDef) -> None:
    assert copy.deepcopy(op) is op


@every_operation
def test_the_function_that_a_record_refers_to_computes_the_same(op: OpDef) -> None:
    if op.reference is None or op.reference.numpy is None:
        return
    theirs = resolve_name(op.reference.numpy)
    if isinstance(theirs, np.ufunc):
        assert theirs in universal_functions() or theirs.__name__ in special_functions()
    for operands, _, [want] in calls(op):
        if as_dtype(operands[-1].dtype) not in HALVES:  # which SciPy does not have
            with np.errstate(all="ignore"):
                found = np.asarray(theirs(*operands))
            near(found, want, op.ulps)


def test_the_page_on_operations_quotes_the_record_that_it_explains() -> None:
    root = Path(__file__).parent.parent
    page = (root / "docs" / "add_an_operation.md").read_text()
    record = (root / "src" / "hopflow" / "ops" / "normal.py").read_text()
    quotes = re.findall(r"^```text\n(.*?)^```$", page, re.M | re.S)[:-1]
    assert len(quotes) == 5
    assert [quote for quote in quotes if quote not in record] == []


PUBLIC = {
    name: value for name in hf.__all__ if isinstance(value := getattr(hf, name), OpDef)
}


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_operation_has_a_docstring(name: str) -> None:
    assert PUBLIC[name].__doc__
