"""erfc, lgamma, digamma and ndtri, compiled, are as near the truth as is documented."""

from collections.abc import Callable
from typing import Any, Final

import mpmath as mp  # type: ignore[import-untyped]
import numpy as np
import pytest
from scipy import special

import hopflow as hf

pytestmark = pytest.mark.slow

# Where a function is 0, has a pole, or is computed in another way on either side.
NEAR: Final = {
    "erfc": [0.0, 0.5, 1.0, 10.0, 26.5],
    "lgamma": [0.0, 0.5, 1.0, 1.25, 2.0, 2.5, 27.0],
    "digamma": [0.0, 0.5, 1.0616, 1.4616321449683623, 1.8616, 10.0],
    "ndtri": [0.0, float(np.exp(-25.0)), 0.075, 0.5, 0.925, 1.0],
}
ZEROS: Final = [-0.504083, -1.573498, -2.457025, -2.747683, -9.7, -10.0000003]
LIMITS: Final = {"erfc": 2.0, "lgamma": 8.0, "digamma": 16.0, "ndtri": 5.0}


def _log_gamma(x: Any) -> Any:
    return mp.log(abs(mp.gamma(x))) if abs(x) < 1e4 else mp.re(mp.loggamma(x))


def _quantile(p: Any) -> Any:
    """The normal distribution's, by Newton's method from SciPy's."""
    x = mp.mpf(float(special.ndtri(float(p))))
    for _ in range(3):
        tail = mp.erfc(abs(x) / mp.sqrt(2)) / 2
        x -= ((tail if x < 0 else 1 - tail) - p) / mp.npdf(x)
    return x


TRUTH: Final[dict[str, Callable[[Any], Any]]] = {
    "erfc": lambda x: mp.erfc(min(x, 200)),
    "lgamma": _log_gamma,
    "digamma": mp.digamma,
    "ndtri": _quantile,
}


def terms(name: str, x: Any) -> list[Any]:
    """The terms that a function below 0 is the difference of."""
    if x >= 0 or name == "erfc":
        return []
    if name == "lgamma":
        return [_log_gamma(-x), mp.log(abs(x * mp.sin(mp.pi * x))), mp.log(mp.pi)]
    return [1, mp.digamma(1 - x), mp.pi / mp.tan(mp.pi * x)]


def points(name: str, dtype: Any) -> Any:
    """Numbers of all sizes, subnormal ones too, and many beside the places to watch."""
    draw, info = np.random.default_rng(0), np.finfo(dtype)
    least, most = np.log2(float(info.smallest_subnormal)), np.log2(float(info.max))
    sizes = 2.0 ** draw.uniform(least, 0.99 * most, 60)
    steps = 2.0 ** -draw.uniform(1, info.nmant, 25)
    near = [
        c + s * d * max(abs(c), 1) for c in NEAR[name] for d in steps for s in (1, -1)
    ]
    below = [c * (1 + s * d / 4) for c in ZEROS for d in steps[:8] for s in (1, -1)]
    wide = draw.uniform(-30, 30, 100)
    x = np.concatenate([sizes, -sizes[:20], near, below, wide]).astype(dtype)
    if name == "ndtri":  # a NaN elsewhere
        return x[(x > 0) & (x < 1)]
    return x[(x > 0) | (x != np.rint(x)) | (name == "erfc")]


def unit(value: Any, dtype: Any) -> Any:
    """One unit in the last place of a number."""
    info = np.finfo(dtype)
    small = abs(value) < float(info.smallest_normal)
    exponent = info.minexp if small else mp.floor(mp.log(abs(value), 2))
    return mp.mpf(2) ** (max(exponent, info.minexp) - info.nmant)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", TRUTH)
def test_compiled_functions_keep_their_bounds(name: str, dtype: Any) -> None:
    x = points(name, dtype)
    got = np.asarray(hf.jit(getattr(hf, name))(x)).astype(float)
    checked = 0
    with mp.workdps(40):
        for g, v in zip(got, map(float, x), strict=True):
            right = TRUTH[name](mp.mpf(v))
            if abs(right) > float(np.finfo(dtype).max):
                assert g == mp.sign(right) * np.inf, v
                continue
            scale = max([abs(right), *map(abs, terms(name, mp.mpf(v)))])
            error = abs(mp.mpf(g) - right) / unit(scale, dtype)
            assert error <= LIMITS[name], (name, v, g, float(error))
            checked += 1
    assert checked > 100


@pytest.mark.parametrize("dtype", [hf.float16, hf.bfloat16])
@pytest.mark.parametrize("name", TRUTH)
def test_halves_are_rounded_once_more(name: str, dtype: Any) -> None:
    x = np.linspace(0.05, 12.0, 400).astype(dtype.dtype)
    wide = np.asarray(hf.jit(getattr(hf, name))(x.astype(np.float32)))
    found = np.asarray(hf.jit(getattr(hf, name))(hf.asarray(x)))
    want = wide.astype(dtype.dtype).astype(float)
    np.testing.assert_array_equal(found.astype(float), want)


@pytest.mark.parametrize("compile_", [lambda f: f, hf.jit], ids=["eager", "jit"])
def test_digamma_is_scipys_at_the_ends(compile_: Any) -> None:
    x = np.array([np.inf, -0.0, 0.0, -1.0, -20.0, -np.inf, np.nan, 1e300, 1e-310])
    right = special.psi(x)
    right[1] = -np.inf  # SciPy tells the zeros apart
    right[5] = np.nan
    with np.errstate(all="ignore"):
        found = np.asarray(compile_(hf.digamma)(hf.asarray(x)))
    found[[1, 2]] = -np.abs(found[[1, 2]])
    right[[1, 2]] = -np.abs(right[[1, 2]])
    np.testing.assert_allclose(found, right, rtol=1e-14)


CONSTANT_POWERS = (0.0, 1.0, 2.0, 3.0, 4.0, 0.5, 1.5, -0.5, -1.0, 0.25, -2.0)


@pytest.mark.parametrize("exponent", CONSTANT_POWERS)
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_powers_by_constants_are_those_by_tensors(dtype: str, exponent: float) -> None:
    """Special values included, and their derivatives."""
    ends = [0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, np.nan, 2.5, -2.5]
    limits = np.finfo(dtype)
    ends += [float(limits.max), float(limits.tiny), float(limits.smallest_subnormal)]
    x = np.array([*ends, *np.random.default_rng(0).random(50) * 5], dtype)
    by_constant = np.asarray(hf.jit(lambda x: x**exponent)(x))
    by_tensor = np.asarray(hf.jit(lambda x, y: x**y)(x, np.asarray(exponent, dtype)))
    ulp = 4 * limits.eps
    np.testing.assert_allclose(by_constant, by_tensor, rtol=ulp, atol=0)
    known = ~np.isnan(by_constant)
    signs = np.signbit(by_constant[known]), np.signbit(by_tensor[known])
    np.testing.assert_array_equal(*signs)
    x = x[len(ends) :] + np.ones((), dtype)
    slopes = hf.jit(hf.grad(lambda x: hf.sum(x**exponent)))(x)
    want = exponent * x.astype(float) ** (exponent - 1)
    np.testing.assert_allclose(np.asarray(slopes), want, rtol=20 * ulp)
