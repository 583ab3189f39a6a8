"""What central differences know of derivatives, and where they say nothing."""

from collections.abc import Callable

import numpy as np
import pytest

from hopflow.agreement import Rounding
from hopflow.dtypes import as_dtype
from hopflow.testing.differences import Slopes, slopes
from hopflow.testing.units import difference


def along(f: Callable[[float], float]) -> Slopes | None:
    def line(step: float, rounding: Rounding) -> list[np.ndarray]:
        return [rounding.result(f(step))]

    return slopes(line)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_a_derivative_is_compared(scale: float) -> None:
    found = along(lambda t: scale * np.sin(0.3 + 2 * t))
    right = np.asarray(scale * 2 * np.cos(0.3))
    assert found is not None
    assert found.wrong([right]) is None
    assert "derivative 0 is" in (found.wrong([right * 1.001]) or "")
    assert "nan away" in (found.wrong([right * np.nan]) or "")


@pytest.mark.parametrize(
    "f",
    [
        lambda t: abs(t) * 3,
        lambda t: max(t, 2e-6),
        lambda t: max(t, 2.4e-6),
        lambda t: np.floor(t),
        lambda t: t / 0,
    ],
    ids=["kink", "kink nearby", "kink less near", "jump", "no number"],
)
def test_where_there_is_no_slope_nothing_is_said(f: Callable[[float], float]) -> None:
    with np.errstate(all="ignore"):
        assert along(lambda t: f(np.float64(t))) is None


def test_what_is_decided_nearby_says_nothing() -> None:
    def line(step: float, rounding: Rounding) -> list[np.ndarray]:
        rounding.result(step > 0)
        return [np.asarray(step)]

    assert slopes(line) is None


@pytest.mark.parametrize("slope", [0.3, 0.4347716203799772, -0.7])
@pytest.mark.parametrize("value", [33.35, 1e3, -1e6])
def test_the_last_place_of_a_large_result_is_no_slope(
    value: float, slope: float
) -> None:
    """Not even where the noise of intermediate results is too small to move it."""

    def line(step: float, _: Rounding) -> list[np.ndarray]:
        return [np.asarray(value + np.sin(slope * step))]

    found = slopes(line)
    assert found is not None
    assert found.wrong([np.asarray(slope)]) is None
    assert found.wrong([np.asarray(slope * 1.01)]) is not None


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_what_is_beside_zeros_is_far_away_and_no_warning(dtype: str) -> None:
    expected = np.zeros(3, as_dtype(dtype).dtype)
    found = np.asarray([0.0, -1e-15, 1.0]).astype(expected.dtype)
    assert difference(found, expected, of_largest=True) > 1e12
    assert difference(expected, expected, of_largest=True) == 0
