"""The derivative of every operation: against differences, transposes, and JAX."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any, Final

import numpy as np
import pytest

import hopflow as hf
from hopflow import dtypes
from hopflow.dtypes import DType
from hopflow.errors import DerivativeError, HopflowError
from hopflow.ops import reducers
from hopflow.ops.opdef import OPERATIONS, OpDef, Sample
from hopflow.testing.kernels import sample_arrays

pytestmark = pytest.mark.slow

Array = np.ndarray[Any, np.dtype[Any]]

STOPPED: Final = {"stop_gradient", "solution", "determinant", "nextafter"}
"""Operations whose derivatives are not those of what they compute."""
SYMMETRIC: Final = {"cholesky", "eigh"}


@dataclass(frozen=True)
class Case:
    op: OpDef
    params: dict[str, Any]
    operands: list[Array]
    directions: list[Array]

    def __call__(self, *floats: Any) -> list[Any]:
        """The float results, as a function of the float operands."""
        rest = iter(floats)
        args = [next(rest) if _is_float(a) else hf.asarray(a) for a in self.operands]
        return _floats(self.op(*args, **self.params))

    def numpy(self, *floats: Array) -> list[Array]:
        rest = iter(floats)
        args = [next(rest) if _is_float(a) else a for a in self.operands]
        with np.errstate(all="ignore"):
            return [np.asarray(r) for r in _floats(self.op.run(*args, **self.params))]

    @property
    def floats(self) -> list[Array]:
        return [a for a in self.operands if _is_float(a)]


def _is_float(x: Any) -> bool:
    return dtypes.as_dtype(x.dtype).is_float


def _floats(results: Any) -> list[Any]:
    results = results if isinstance(results, tuple) else (results,)
    return [r for r in results if _is_float(r)]


def case_of(op: OpDef, sample: Sample, dtype: DType) -> Case:
    operands = sample_arrays(sample, dtype)
    directions = sample_arrays(
        Sample(sample.operands, low=-1.0, high=1.0), dtype, seed=1
    )
    if op.name in SYMMETRIC:  # and of a positive definite matrix
        [x], [t] = operands, directions
        x, t = (a + np.swapaxes(a, -1, -2) for a in (x, t))
        operands, directions = [x + 9 * np.eye(x.shape[-1], dtype=x.dtype)], [t]
    if op.name == "pow":  # of a positive base
        operands[0] = abs(operands[0])
    directions = [t for t, x in zip(directions, operands, strict=True) if _is_float(x)]
    return Case(op, sample.params, operands, directions)


def cases(dtype: DType) -> Iterator[Any]:
    """A case for each sample that takes and gives floats."""
    for op in OPERATIONS.values():
        for k, sample in enumerate(op.samples):
            if dtype not in sample.dtypes:
                continue
            case = case_of(op, sample, dtype)
            try:
                gives = case.numpy(*case.floats)
            except HopflowError:  # it stops at these operands
                continue
            if case.floats and gives and op.name not in STOPPED:
                yield pytest.param(case, id=f"{op.name}-{k}")


def close(got: Any, want: Any, tolerance: float) -> None:
    for g, w in zip(got, want, strict=True):
        g, w = np.asarray(g), np.asarray(w)
        assert g.shape == w.shape
        scale = 1.0 + np.max(np.abs(w), initial=0.0)
        np.testing.assert_allclose(g, w, rtol=tolerance, atol=tolerance * scale)


def differences(f: Callable[..., Any], xs: list[Array], ts: list[Array]) -> list[Array]:
    h = 1e-5
    high, low = (f(*(x + s * t for x, t in zip(xs, ts, strict=True))) for s in (h, -h))
    return [
        (np.asarray(p) - np.asarray(m)) / (2 * h)
        for p, m in zip(high, low, strict=True)
    ]


def tangents_of(case: Case, xs: Any = None) -> list[Any]:
    xs = case.floats if xs is None else list(xs)
    return list(hf.jvp(case, xs, case.directions)[1])


def undefined(case: Case) -> bool:
    """Whether the results have a derivative only for other params."""
    x = case.operands[0]
    partly = case.params.get("mode") == "full" or case.params.get("complete")
    return bool(partly) and x.shape[-2] > x.shape[-1]


def inner(xs: Any, ys: Any) -> float:
    pairs = zip(xs, ys, strict=True)
    return float(
        sum(np.sum(np.asarray(x, float) * np.asarray(y, float)) for x, y in pairs)
    )


CASES: Final = list(cases(dtypes.float64))
DEFINED: Final = [p.values[0] for p in CASES if not undefined(p.values[0])]


@pytest.mark.parametrize("case", CASES)
def test_of_every_operation(case: Case) -> None:
    if undefined(case):
        with pytest.raises(DerivativeError, match="no derivative"):
            tangents_of(case)
        return
    xs, ts = case.floats, case.directions
    found = tangents_of(case)
    # In reverse it is the transpose.
    out, pull = hf.vjp(case, *xs)
    rng = np.random.default_rng(2)
    cts = [rng.uniform(-1, 1, r.shape).astype(r.dtype.dtype) for r in out]
    back = pull(cts)
    assert [b.shape for b in back] == [x.shape for x in xs]
    exact = all(t.dtype is dtypes.float64 for t in found)
    left, right = inner(back, ts), inner(cts, found)
    assert left == pytest.approx(right, rel=1e-9 if exact else 1e-2)
    if exact:
        close(found, differences(case.numpy, xs, ts), 1e-6)
        # And it has a derivative itself.
        second = hf.jvp(lambda *p: tangents_of(case, p), xs, ts)[1]
        want = differences(lambda *p: tangents_of(case, p), xs, ts)
        close(second, want, 1e-5)


@pytest.mark.parametrize("case", CASES)
def test_a_rule_that_is_recorded_does_what_it_did(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hopflow.autograd.rule_cache._memo", {})
    xs, ts = case.floats, case.directions
    runs = []
    for _ in range(3 if not undefined(case) else 0):
        out, pull = hf.vjp(case, *xs)
        _, push = hf.linearize(case, *xs)
        runs.append([*hf.jvp(case, xs, ts)[1], *push(*ts), *pull(out)])
    for again in runs[1:]:
        close(again, runs[0], 0.0)


def test_a_recorded_rule_of_tangents_that_are_values() -> None:
    @hf.custom_jvp
    def constant(x: Any) -> Any:
        return hf.ones_like(x)

    constant.defjvp(lambda x, _: (hf.ones_like(x[0]), hf.zeros_like(x[0])))
    for _ in range(3):
        assert hf.grad(lambda x: hf.sin(constant(x)) * x)(2.0).item() == pytest.approx(
            np.sin(1.0)
        )


@pytest.mark.parametrize("case", list(cases(dtypes.float32)))
def test_in_float32(case: Case) -> None:
    if undefined(case):
        return
    found = tangents_of(case)
    assert all(
        t.dtype is dtypes.as_dtype(r.dtype)
        for t, r in zip(found, case.numpy(*case.floats), strict=True)
    )
    if all(t.dtype.bits >= 32 for t in found):
        wide = replace(
            case,
            operands=[a.astype(float) if _is_float(a) else a for a in case.operands],
            directions=[t.astype(float) for t in case.directions],
        )
        close(found, tangents_of(wide), 1e-3)


@pytest.mark.parametrize("factors", [(2.0, 5.0), (0.0, 5.0), (0.0, 0.0)])
def test_of_several_factors_of_one_element(factors: tuple[float, float]) -> None:
    def scattered(x: Any, u: Any) -> Any:
        return x.at[hf.asarray([1, 1, 0])].mul(u)

    def written_out(x: Any, u: Any) -> Any:
        return hf.stack([x[0] * u[2], x[1] * u[0] * u[1]])

    x, u = hf.asarray([3.0, 4.0]), hf.asarray([*factors, 7.0])
    found, want = (hf.jacrev(f, (0, 1))(x, u) for f in (scattered, written_out))
    close(found, want, 1e-6)
    found, want = (
        hf.hessian(lambda u, f=f: hf.sum(f(x, u)))(u) for f in (scattered, written_out)
    )
    close([found], [want], 1e-6)


@pytest.mark.parametrize(
    ("n", "rank"), [(1, 0), (2, 1), (2, 0), (3, 2), (4, 3), (4, 2), (4, 1)]
)
@pytest.mark.parametrize("wrap", [lambda f: f, hf.jit], ids=["eager", "jit"])
def test_of_determinants_of_singular_matrices(n: int, rank: int, wrap: Any) -> None:
    orders = np.array(list(permutations(range(n))), int)
    signs = np.linalg.det(np.eye(n)[orders])

    def leibniz(x: Any) -> Any:
        rows = hf.asarray(np.broadcast_to(np.arange(n), orders.shape).copy())
        return hf.sum(hf.asarray(signs) * hf.prod(x[rows, hf.asarray(orders)], axis=1))

    rng = np.random.default_rng(n)
    x = rng.normal(size=(n, rank)) @ rng.normal(size=(rank, n))
    for transform in (hf.grad, hf.hessian):
        found, want = (wrap(transform(f))(x) for f in (hf.linalg.det, leibniz))
        close([found], [want], 1e-9)


@pytest.mark.parametrize("name", dict.fromkeys(case.op.name for case in DEFINED))
def test_compiled(name: str) -> None:
    known = [case for case in DEFINED if case.op.name == name]
    xs, ts = ([getattr(c, a) for c in known] for a in ("floats", "directions"))

    def both(xs: Any, ts: Any) -> list[Any]:
        found = []
        for case, x, t in zip(known, xs, ts, strict=True):
            out, pull = hf.vjp(case, *x)
            found += [*hf.jvp(case, x, t)[1], *pull(out)]
        return found

    got, want = hf.jit(both)(xs, ts), both(xs, ts)
    if name in ("eigh", "svd"):  # the signs of vectors are LAPACK's choice
        got, want = (list(map(hf.abs, r)) for r in (got, want))
    close(got, want, 1e-9)


def test_no_operation_is_left_out() -> None:
    """Each that makes floats of floats has a derivative."""
    without = set()
    for op in OPERATIONS.values():
        for sample in op.samples:
            if dtypes.float32 in sample.dtypes:
                arrays = sample_arrays(sample, dtypes.float32)
                types = [hf.asarray(a).type for a in arrays]
                results = op.result_types(types, sample.params)
                both = [any(t.dtype.is_float for t in ts) for ts in (types, results)]
                if all(both) and op.jvp is None and op.unview is None:
                    without.add(op.name)
    assert not without


def test_what_has_none_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hopflow.autograd.rule_cache._memo", {})  # no rule is known
    monkeypatch.setitem(vars(hf.sin), "jvp", None)
    with pytest.raises(DerivativeError, match=r"sin: .*stop_gradient"):
        hf.jvp(hf.sin, (1.0,), (1.0,))


@pytest.mark.parametrize(
    ("op", "reverse"), [(reducers.cumprod, False), (reducers.cummax, True)], ids=str
)
def test_running_totals_of_a_size_that_the_run_knows(op: OpDef, reverse: bool) -> None:
    """By levels as by the tree, which is compared with JAX's."""

    def total(x: Any) -> Any:
        return hf.sum(hf.sin(op(x, axis=0, reverse=reverse)))

    for_all, second, rows = (
        hf.jit(f, dynamic=True)
        for f in (hf.grad(total), hf.hessian(total), hf.vmap(hf.grad(total)))
    )
    for n in (5, 0, 1, 2, 3, 7, 8, 9):
        x = np.array([2.0, 2.0, 0.0, 2.0, 2.0, 2.0, 0.0, 3.0, 2.0])[:n]
        want = hf.grad(total)(x)
        close([for_all(x), rows(x[None])[0]], [want, want], 1e-12)
    close([second(x[:5])], [hf.hessian(total)(x[:5])], 1e-12)
