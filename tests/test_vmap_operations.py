"""Batch rules of operations: `vmap` of each is a Python loop over the examples."""

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest

import hopflow
from hopflow.bind import bind
from hopflow.dtypes import DType
from hopflow.errors import CheckError, HopflowError, TraceError
from hopflow.ops.opdef import OPERATIONS, OpDef, Sample
from hopflow.testing.kernels import sample_arrays

pytestmark = pytest.mark.slow

hf: Any = hopflow

EXAMPLES = 3
UP_TO_SIGN = {"eigh", "svd"}  # LAPACK's choice
# Numbers are the same for all examples: see below.
BATCHED = [op for name, op in OPERATIONS.items() if name not in ("item", "dim_size")]


def test_every_operation_with_operands_has_a_batch_rule() -> None:
    missing = [
        name
        for name, op in OPERATIONS.items()
        if op.batch is None and any(sample.operands for sample in op.samples)
    ]
    assert missing == ["item"]


def calls(op: OpDef) -> Iterator[tuple[Sample, DType, tuple[bool, ...]]]:
    """Each sample, for its first and its last dtype, with each subset of operands."""
    for sample in op.samples:
        subsets = [s for s in product((False, True), repeat=len(sample.operands))]
        for dtype in dict.fromkeys((sample.dtypes[0], sample.dtypes[-1])):
            for batched in subsets[1:]:
                yield sample, dtype, batched


def operands(sample: Sample, dtype: DType, batched: tuple[bool, ...]) -> list[Any]:
    """Arrays as for one example, those that are batched stacked from several."""
    draws = [sample_arrays(sample, dtype, seed) for seed in range(EXAMPLES)]
    columns = zip(*draws, strict=True)
    return [np.stack(c) if b else c[0] for c, b in zip(columns, batched, strict=True)]


def looped(op: OpDef, given: list[Any], batched: tuple[bool, ...], params: Any) -> Any:
    rows = []
    for i in range(EXAMPLES):
        own = [x[i] if b else x for x, b in zip(given, batched, strict=True)]
        with np.errstate(all="ignore"):
            found = op.run(*own, **params)
        rows.append(found if isinstance(found, tuple) else (found,))
    return [np.stack([np.asarray(x) for x in c]) for c in zip(*rows, strict=True)]


def check_call(
    op: OpDef, sample: Sample, dtype: DType, batched: tuple[bool, ...], wrap: Any
) -> None:
    given = operands(sample, dtype, batched)
    in_dims = tuple(0 if b else None for b in batched)

    def one(*args: Any) -> Any:
        return bind(op, args, sample.params)

    mapped = hf.vmap(one, in_dims)
    tensors = [hf.asarray(x) for x in given]
    try:
        want = looped(op, given, batched, sample.params)
    except HopflowError as error:
        with pytest.raises(type(error)):
            wrap(mapped)(*tensors)
        return
    got = wrap(mapped)(*tensors)
    label = f"{op.name} {sample.operands} {sample.params} {dtype} {batched}"
    assert len(got) == len(want), label
    for a, b in zip(got, want, strict=True):
        found = np.asarray(a)
        assert (found.shape, found.dtype) == (b.shape, b.dtype), label
        exact = not dtype.is_float
        wide: list[Any] = [x if exact else x.astype(np.float64) for x in (found, b)]
        if op.name in UP_TO_SIGN:
            wide = list(map(np.abs, wide))
        tolerance = 0.0 if exact else 100 * float(hf.finfo(dtype).eps)
        np.testing.assert_allclose(
            wide[0], wide[1], rtol=tolerance, atol=tolerance, err_msg=label
        )


@pytest.mark.parametrize("op", BATCHED, ids=lambda op: op.name)
def test_vmap_of_an_operation_is_a_loop_over_the_examples(op: OpDef) -> None:
    for sample, dtype, batched in calls(op):
        check_call(op, sample, dtype, batched, lambda f: f)


@pytest.mark.parametrize("op", BATCHED, ids=lambda op: op.name)
@pytest.mark.parametrize("symbolic", [False, True])
def test_batched_operations_compile(op: OpDef, symbolic: bool) -> None:
    n = hf.Dim("n")
    for call in {call[2]: call for call in calls(op)}.values():
        axes = [{0: n} if b and symbolic else False for b in call[2]]
        check_call(op, *call, lambda f, axes=axes: hf.jit(f, dynamic=axes))


@pytest.mark.parametrize("mask", [(True, False), (False, True), (True, True)])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("nan", [False, True])
def test_searchsorted_in_rows_of_their_own(
    mask: tuple[bool, bool], side: Any, nan: bool
) -> None:
    random = np.random.default_rng(0)
    rows = np.sort(random.integers(0, 6, (4, 7)).astype(np.float32))
    wanted = random.integers(-1, 8, (4, 5)).astype(np.float32)
    if nan:
        rows[1, 5:], wanted[2, 1] = np.nan, np.nan
    x1, x2 = (x if b else x[2] for x, b in zip((rows, wanted), mask, strict=True))
    in_dims = tuple(0 if b else None for b in mask)
    got = hf.vmap(lambda a, v: hf.searchsorted(a, v, side=side), in_dims)(
        hf.asarray(x1), hf.asarray(x2)
    )
    every = np.broadcast_to(x1, rows.shape), np.broadcast_to(x2, wanted.shape)
    want = [np.searchsorted(a, v, side=side) for a, v in zip(*every, strict=True)]
    np.testing.assert_array_equal(np.asarray(got), want)


def test_a_failed_check_of_any_example_stops() -> None:
    def f(x: Any) -> Any:
        hf.check(x > 0, "not so")
        return x

    assert np.asarray(hf.vmap(f)(hf.arange(1, 4))).tolist() == [1, 2, 3]
    with pytest.raises(CheckError, match="not so"):
        hf.vmap(f)(hf.arange(3))


ROWS = np.array([[1, 0, 2], [0, 0, 0], [3, 1, 1]])


@pytest.mark.parametrize(
    "f",
    [
        lambda x: hf.sum(hf.arange(hf.sum(x).item())),
        lambda x: hf.sum(x[x > 0] ** 2) + x,
        lambda x: hf.sum(hf.concat([x[x > 0], x[x < 2]]) ** 2),
        lambda x: hf.sum(hf.nonzero(x)[0]) * hf.sum(hf.zeros(x[0].item()) + 1),
        lambda x: hf.map(lambda y: hf.sum(x[x > y]), x),
    ],
)
@pytest.mark.parametrize("wrap", [lambda f: f, hf.jit])
def test_each_example_may_have_sizes_of_its_own_inside(f: Any, wrap: Any) -> None:
    want = [np.asarray(f(hf.asarray(row))) for row in ROWS]
    np.testing.assert_array_equal(wrap(hf.vmap(f))(hf.asarray(ROWS)), want)


@pytest.mark.parametrize(
    "f",
    [lambda x: hf.nonzero(x)[0], lambda x: x[x > 1], lambda x: hf.ones(x[0].item())],
)
def test_a_result_of_a_size_of_each_example_is_refused(f: Any) -> None:
    with pytest.raises(TraceError, match="a size that differs from example to example"):
        hf.vmap(f)(hf.asarray(ROWS))


def test_a_number_that_is_the_same_for_all_examples_is_a_number() -> None:
    mask = hf.asarray([True, False, True])

    def f(x: Any) -> Any:
        return x[hf.nonzero(mask)[0]] * hf.sum(mask).item()

    x = np.arange(6).reshape(2, 3)
    got = np.asarray(hf.vmap(f)(hf.asarray(x)))
    assert got.tolist() == (x[:, [0, 2]] * 2).tolist()
