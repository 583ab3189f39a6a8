"""How far results may be apart is the program's own matter."""

from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import pytest

from hopflow.agreement import Expected, Rounding

Array: TypeAlias = np.ndarray[Any, Any]

X = np.array([1.0, 2.0])


def of(f: Callable[[Array, Rounding], Array]) -> Expected:
    return Expected(lambda rounding: [f(rounding.argument(X), rounding)])


def cancelling(x: Array, rounding: Rounding) -> Array:
    return rounding.result(rounding.result(x + 1e8) - 1e8)


def truncated(x: Array, rounding: Rounding) -> Array:
    return rounding.result(rounding.result(x).astype(np.int64))


def test_a_result_may_be_as_far_away_as_rounding_moves_it() -> None:
    assert of(cancelling).wrong([X + 1e-8]) is None
    assert "result 0 is" in (of(lambda x, _: x).wrong([X + 1e-8]) or "")


@pytest.mark.parametrize(("units", "is_near"), [(8, True), (100, False)])
def test_a_few_units_in_the_last_place_are_no_difference(
    units: int, is_near: bool
) -> None:
    far = X + units * np.spacing(2.0)
    assert (of(lambda x, _: x).wrong([far]) is None) is is_near


def test_a_result_on_a_tie_says_nothing() -> None:
    expected = of(truncated)
    assert expected.wrong([np.array([1, 2])]) is None
    assert not expected.tied
    assert expected.wrong([np.array([0, 2])]) is None
    assert expected.tied


def root(edge: Array) -> Array:
    return np.sqrt(edge)


def reciprocal(edge: Array) -> Array:
    return 1 / edge


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:divide by zero")
@pytest.mark.parametrize("f", [root, reciprocal])
def test_a_result_on_the_edge_of_a_domain_says_nothing(
    f: Callable[[Array], Array],
) -> None:
    def run(rounding: Rounding) -> list[Array]:
        return [f(rounding.result(X / X) - 1), X]

    edge = Expected(run)
    (found, _) = edge.results
    assert edge.wrong([found, X]) is None
    assert not edge.tied
    for other in (found, X * 0 + 1e-3, X * np.nan):
        assert "result 1 is" in (edge.wrong([other, X + 1e-3]) or "")
    assert not edge.tied
    assert edge.wrong([X * 0 + 1e-3, X]) is None
    assert edge.tied


@pytest.mark.parametrize(
    ("got", "what"),
    [
        ([], "0 results, where 1 are expected"),
        ([X.astype(np.float32)], "is float32.2., and must be float64.2."),
        ([np.array([1.0, np.nan])], "nan away"),
        ([np.array([1.0, np.inf])], "inf away"),
    ],
)
def test_what_is_wrong_is_told(got: list[Array], what: str) -> None:
    found = of(lambda x, _: x).wrong(got)
    assert found is not None
    assert what.replace(".2.", "[2]") in found


def test_exact_results_have_the_same_bits() -> None:
    exact = Expected(lambda _: [X], exact=True)
    assert exact.wrong([np.nextafter(X, 9)]) is not None
    assert exact.wrong([X]) is None


@pytest.mark.parametrize("dtype", [np.int64, np.uint64])
def test_large_integers_are_apart(dtype: Any) -> None:
    large = np.array([2**53], dtype)
    assert "1 away" in (Expected(lambda _: [large]).wrong([large + dtype(1)]) or "")
