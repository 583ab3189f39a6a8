"""The expansions of `loop_ir.math` against mpmath, and SciPy in a wider precision.

`LIMITS` is what was measured on millions of points (libquadmath the reference), rounded
up; the promise is 2 units in the last place, and 8 for erfinv and lgamma.
"""

import math
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Final

import mpmath as mp  # type: ignore[import-untyped]
import numpy as np
import pytest
from scipy import special

from hopflow import dtypes
from hopflow.dtypes import DType
from hopflow.loop_ir import expr, scalars
from hopflow.loop_ir import math as loop_math
from hopflow.loop_ir.expr import Expr, Var
from hopflow.testing.expr_numpy import Array, evaluate

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent

LIMITS: Final = {
    "exp": 1.15,
    "exp2": 0.95,
    "expm1": 1.65,
    "log": 1.15,
    "log2": 1.4,
    "log10": 1.15,
    "log1p": 1.5,
    "sin": 1.55,
    "cos": 1.55,
    "tan": 1.75,
    "asin": 1.2,
    "acos": 1.3,
    "atan": 1.35,
    "sinh": 1.8,
    "cosh": 1.85,
    "tanh": 1.85,
    "asinh": 1.85,
    "acosh": 1.7,
    "atanh": 1.7,
    "erf": 1.8,
    "erfc": 1.6,
    "erfinv": 5.0,
    "lgamma": 7.0,
    "logistic": 1.6,
    "cbrt": 0.8,
    "pow": 1.05,
    "pow_nearest": 1.05,
    "atan2": 1.65,
    "hypot": 1.2,
}
UNARY = sorted(LIMITS.keys() - expr.MATH_BINARY)
FORMATS = (dtypes.float32, dtypes.float64)
# Where a function is interesting, for points that are evenly spread.
SPANS: Final = {
    "exp": (-110, 90),
    "exp2": (-160, 130),
    "sinh": (-90, 90),
    "cosh": (-90, 90),
    "logistic": (-110, 40),
    "asin": (-1, 1),
    "acos": (-1, 1),
    "atanh": (-1, 1),
    "erfinv": (-1, 1),
    "erfc": (-5, 11),
    "acosh": (1, 4),
    "lgamma": (0, 9),
    "log1p": (-1, 4),
    "sin": (-300, 300),
    "cos": (-300, 300),
    "tan": (-300, 300),
}
STANDARD = np.array(
    [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 2.0, -2.0, 3.0, -3.0, np.inf, -np.inf, np.nan]
)


def run(name: str, *args: Array) -> Array:
    """The expansion of a function at each element of the arguments."""
    dtype = dtypes.as_dtype(args[0].dtype)
    variables = [Var(f"x{i}", dtype) for i in range(len(args))]
    expansion = loop_math.expand(name, *map(expr.read, variables))
    result = evaluate(expansion, dict(zip(variables, args, strict=True)))
    return np.broadcast_to(result, args[0].shape)


def spread(rng: np.random.Generator, dtype: DType, count: int) -> Array:
    """Numbers with every exponent and either sign, subnormal ones too."""
    unsigned = np.dtype(f"u{dtype.itemsize}")
    bits = rng.integers(0, 2**dtype.bits, count, dtype=unsigned)
    x: Array = bits.view(dtype.dtype)
    return x[np.isfinite(x)]


def points(name: str, dtype: DType, count: int) -> Array:
    rng = np.random.default_rng(1)
    low, high = SPANS.get(name, (-8, 8))
    size = np.exp2(rng.uniform(-30, 9, count)) * rng.choice([-1, 1], count)
    info = dtypes.finfo(dtype)
    edges = [info.max, -info.max, info.min, info.smallest_normal, 2.0**-140]
    groups = [
        spread(rng, dtype, count),
        rng.uniform(low, high, count),
        size,
        1 + size * 2.0**-12,  # about 1, where logarithms vanish
        np.array(edges),
    ]
    if name in ("sin", "cos", "tan"):  # as near to multiples of pi / 2 as may be
        turns = np.rint(np.exp2(rng.uniform(0, 50, count)))
        hardest = (
            16367173 * 2.0**72 if dtype.bits == 32 else 6381956970095103 * 2.0**797
        )
        groups += [turns * (np.pi / 2), np.array([hardest, -hardest])]
    with np.errstate(over="ignore"):
        x: Array = np.concatenate([g.astype(dtype.dtype) for g in groups])
    return x[np.isfinite(x)]


def pairs(name: str, dtype: DType, count: int) -> tuple[Array, Array]:
    rng = np.random.default_rng(2)
    if name not in ("pow", "pow_nearest"):
        x, y = spread(rng, dtype, count), rng.uniform(-8, 8, count).astype(dtype.dtype)
        with np.errstate(over="ignore"):
            near = (x * np.exp2(rng.uniform(-3, 3, x.size))).astype(dtype.dtype)
        return np.concatenate([x, y]), np.concatenate([near, y[::-1]])
    size = np.abs(spread(rng, dtype, count)).astype(np.float64)
    about_1 = 1 + rng.uniform(-0.5, 0.5, count) * np.exp2(rng.uniform(-20, 0, count))
    x = np.concatenate([size, about_1]).astype(dtype.dtype)
    x = x[(x > 0) & (x != 1)]
    # Exponents that use the whole range of results.
    reach = rng.uniform(-1.05, 1.05, x.size) * (149 if dtype.bits == 32 else 1074)
    return x, (reach / np.log2(x.astype(np.float64))).astype(dtype.dtype)


# --- references -----------------------------------------------------------------------


def _logistic(x: Any) -> Any:
    return 1 / (1 + mp.exp(-x))


def _lgamma(x: Any) -> Any:
    if x >= 0:
        return mp.loggamma(x)
    return mp.log(mp.pi / abs(x * mp.sinpi(x))) - mp.loggamma(-x)


def _erfinv(x: Any) -> Any:
    """By one step of Newton's from SciPy's, which is good to 15 digits."""
    y = mp.mpf(float(special.erfinv(float(x))))
    difference = (
        mp.erf(y) - x if abs(x) < 0.5 else mp.sign(x) * ((1 - abs(x)) - mp.erfc(abs(y)))
    )
    return y - difference * mp.sqrt(mp.pi) / 2 * mp.exp(y * y)


EXACT: Final[dict[str, Callable[..., Any]]] = {
    "erfc": lambda x: mp.erfc(min(x, 99)),  # mpmath cannot do huge ones
    "exp2": lambda x: mp.power(2, x),
    "expm1": mp.expm1,
    "log2": lambda x: mp.log(x, 2),
    "log10": mp.log10,
    "log1p": mp.log1p,
    "erfinv": _erfinv,
    "lgamma": _lgamma,
    "logistic": _logistic,
    "cbrt": lambda x: mp.sign(x) * mp.cbrt(abs(x)),
    "pow": mp.power,
    "pow_nearest": mp.power,
}
# float64 functions, whose own error is nothing in float32.
WIDE: Final[dict[str, Callable[..., Any]]] = {
    "asin": np.arcsin,
    "acos": np.arccos,
    "atan": np.arctan,
    "asinh": np.arcsinh,
    "acosh": np.arccosh,
    "atanh": np.arctanh,
    "atan2": np.arctan2,
    "pow": np.power,
    "pow_nearest": np.power,
    "lgamma": special.gammaln,
    "logistic": special.expit,
    "erf": special.erf,
    "erfc": special.erfc,
    "erfinv": special.erfinv,
}


def wide(name: str, *args: Array) -> Array:
    function = WIDE.get(name) or getattr(np, name)
    with np.errstate(all="ignore"):
        result: Array = function(*(a.astype(np.float64) for a in args))
    return result


def exact(name: str, *args: float) -> Any:
    """The value in 40 digits, or NaN outside of the domain."""
    with mp.workdps(40):
        function = EXACT.get(name) or getattr(mp, name)
        try:
            value = function(*map(mp.mpf, args))
        except (ValueError, ZeroDivisionError):
            return mp.nan
        return value if isinstance(value, mp.mpf) else mp.nan


def errors_in_single(name: str, *args: Array) -> Array:
    """Errors in units in the last place of float32; 0 where both are not finite."""
    got, right = run(name, *args).astype(np.float64), wide(name, *args)
    with np.errstate(all="ignore"):
        rounded = right.astype(np.float32)
        unit = np.exp2(np.maximum(np.frexp(right)[1] - 24.0, -149.0))
        error = np.abs(got - right) / unit
    same = (got == rounded) | (np.isnan(got) & np.isnan(right))
    return np.where(same & ~np.isfinite(rounded), 0.0, error)


def error_in_double(got: float, right: Any) -> float:
    if mp.isnan(right) or abs(right) > sys.float_info.max:
        same = math.isnan(got) if mp.isnan(right) else got == float(right)
        return 0.0 if same else math.inf
    unit = max(mp.frexp(right)[1] - 53, -1074)
    return float(abs(mp.mpf(got) - right) / mp.mpf(2) ** unit)


def worst(name: str, args: tuple[Array, ...], errors: Array) -> str:
    i = int(np.argmax(errors))
    return f"{name}{tuple(float(a[i]) for a in args)} is {errors[i]} units off"


# --- tests ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", UNARY)
def test_single_precision_is_good_to_the_limit(name: str) -> None:
    x = points(name, dtypes.float32, 20000)
    if name == "lgamma":
        x = np.abs(x)
    errors = errors_in_single(name, x)
    assert not (errors > LIMITS[name]).any(), worst(name, (x,), errors)
    assert not np.isnan(errors).any()


@pytest.mark.parametrize("name", UNARY)
def test_double_precision_is_good_to_the_limit(name: str) -> None:
    x = points(name, dtypes.float64, 250)
    if name in ("lgamma", "log", "log2", "log10"):
        x = np.abs(x)
    if name in ("asin", "acos", "atanh", "erfinv"):
        x = x[np.abs(x) < 1]
    if name in ("acosh", "log1p"):
        x = x[x > (1 if name == "acosh" else -1)]
    got = run(name, x)
    errors = np.array(
        [error_in_double(float(g), exact(name, v)) for g, v in zip(got, x, strict=True)]
    )
    assert not (errors > LIMITS[name]).any(), worst(name, (x,), errors)


@pytest.mark.parametrize(
    "exponent", [1 / 3, 1 / 2, 1 / 4, 1 / 5, 2 / 3, 3 / 2, 0.1, -0.7]
)
def test_the_nearest_power_is_that_of_exact_arithmetic(exponent: float) -> None:
    """Most of all where it is nearly an integer: its floor may be a size."""
    numbers = np.arange(1.0, 400.0)
    roots = np.rint(numbers ** (1 / max(exponent, 0.1)))  # their powers are integers
    x = np.concatenate([numbers, np.unique(roots[(roots < 2**50) & (roots > 0)])])
    found = run("pow_nearest", x, np.full_like(x, exponent))
    with mp.workprec(200):
        exact = [float(mp.power(mp.mpf(v), mp.mpf(exponent))) for v in x.tolist()]
    near = np.abs(np.rint(exact) - exact) < 1e-9
    assert near.sum() > 1
    np.testing.assert_array_equal(found[near], np.asarray(exact)[near])
    assert np.mean(found != exact) < 0.002


@pytest.mark.parametrize("name", ["pow", "pow_nearest", "atan2", "hypot"])
def test_functions_of_two_are_good_to_the_limit(name: str) -> None:
    x, y = pairs(name, dtypes.float32, 20000)
    errors = errors_in_single(name, x, y)
    assert not (errors > LIMITS[name]).any(), worst(name, (x, y), errors)
    x, y = pairs(name, dtypes.float64, 250)
    errors = np.array(
        [
            error_in_double(float(g), exact(name, a, b))
            for g, a, b in zip(run(name, x, y), x, y, strict=True)
        ]
    )
    assert not (errors > LIMITS[name]).any(), worst(name, (x, y), errors)


def test_lgamma_of_negative_numbers_is_good_beside_its_terms() -> None:
    x = -np.random.default_rng(3).uniform(0, 30, 400)
    for got, v in zip(run("lgamma", x), x, strict=True):
        terms = (
            2 + abs(float(mp.loggamma(-v))) + abs(math.log(abs(math.sin(math.pi * v))))
        )
        assert abs(got - float(exact("lgamma", v))) < 8 * np.spacing(terms), v


def _special(name: str, x: Array) -> Array:
    """What C99 says of the special values, by libm or its description."""
    if name == "lgamma":
        return np.where(np.isinf(x), np.inf, special.gammaln(x))
    if name == "erfinv":  # SciPy's drops the sign of -0
        return np.copysign(special.erfinv(x), x)
    return wide(name, x)


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("name", UNARY)
def test_special_values_are_those_of_c99(name: str, dtype: DType) -> None:
    x = STANDARD.astype(dtype.dtype)
    got, right = run(name, x), _special(name, x).astype(dtype.dtype)
    plain = np.isfinite(right) & (right != 0)
    np.testing.assert_array_equal(got[~plain], right[~plain])
    signed = ~plain & ~np.isnan(right)
    assert (np.signbit(got) == np.signbit(right))[signed].all(), got
    unit = dtypes.finfo(dtype).eps
    np.testing.assert_allclose(got[plain], right[plain], rtol=8 * unit, atol=2 * unit)


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("name", ["pow", "pow_nearest", "atan2", "hypot", "nextafter"])
def test_special_pairs_are_those_of_c99(name: str, dtype: DType) -> None:
    values = np.concatenate([STANDARD, [2.0**-60, -(2.0**60), 1.5, 2.0**60 + 2.0**40]])
    x, y = (a.ravel().astype(dtype.dtype) for a in np.meshgrid(values, values))
    function = getattr(
        np, {"pow": "power", "pow_nearest": "power", "atan2": "arctan2"}.get(name, name)
    )
    with np.errstate(all="ignore"):
        right = function(x, y)
    got = run(name, x, y)
    unit = 0.0 if name == "nextafter" else dtypes.finfo(dtype).eps
    np.testing.assert_allclose(got, right, rtol=2 * unit, atol=0)
    known = ~np.isnan(right)
    assert (np.signbit(got) == np.signbit(right))[known].all()


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_exact_results_are_exact(dtype: DType) -> None:
    def of(name: str, *args: Any) -> Array:
        return run(name, *(np.asarray(a, np.float64).astype(dtype.dtype) for a in args))

    k = np.arange(-30.0, 31.0)
    assert (of("exp2", k) == 2.0**k).all()
    assert (of("log2", 2.0**k) == k).all()
    tens = np.arange(11.0)  # 10**10 is the last one in float32
    assert (of("log10", 10.0**tens) == tens).all()
    assert (of("cbrt", k**3) == k).all()
    assert (of("pow", np.abs(k), np.full_like(k, 2.0)) == k**2).all()
    assert (of("pow", k, np.full_like(k, 3.0)) == k**3).all()
    assert (of("hypot", 3 * k, 4 * k) == np.abs(5 * k)).all()
    for name in ("exp", "cos", "cosh", "erfc"):
        assert of(name, [0.0]) == 1.0
    assert of("logistic", [0.0]) == 0.5
    assert of("log", [1.0]) == 0.0


@pytest.mark.parametrize("name", ["sin", "cos", "tanh", "erf", "logistic"])
def test_a_bound_is_never_passed(name: str) -> None:
    x = points(name, dtypes.float32, 20000)
    turns = np.arange(20000) * (np.pi / 2)
    x = np.concatenate([x, turns.astype(np.float32)])
    assert (np.abs(run(name, x)) <= 1).all()


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("name", ["sin", "cos", "tan"])
def test_the_near_form_has_the_same_bits(name: str, dtype: DType) -> None:
    x = Var("x", dtype)
    found = loop_math.near(name, expr.read(x))
    assert found is not None
    short, limit = found
    values = points(name, dtype, 2000)
    values = np.append(values[np.abs(values) <= limit], dtype.dtype.type(limit))
    got, full = evaluate(short, {x: values}), run(name, values)
    assert got.tobytes() == full.tobytes()


def test_only_angles_have_a_near_form() -> None:
    x = expr.read(Var("x", dtypes.float32))
    assert loop_math.near("exp", x) is None
    assert loop_math.near("sin", expr.read(Var("x", dtypes.float16))) is None


@pytest.mark.parametrize("dtype", [dtypes.float16, dtypes.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["exp", "log", "sin", "tanh", "erfc", "cbrt"])
def test_half_precision_is_rounded_nearly_once(name: str, dtype: DType) -> None:
    x = np.arange(2**16, dtype=np.uint16).view(dtype.dtype)
    got, right = run(name, x).astype(np.float64), wide(name, x)
    with np.errstate(all="ignore"):
        rounded = right.astype(dtype.dtype).astype(np.float64)
    info = dtypes.finfo(dtype)
    smallest = info.smallest_normal * info.eps
    unit = np.maximum(np.exp2(np.frexp(right)[1] - 1.0) * info.eps, smallest)
    with np.errstate(all="ignore"):
        close = np.abs(got - right) <= 0.51 * unit
    assert (close | (got == rounded) | np.isnan(right)).all()
    assert np.isnan(got[np.isnan(right)]).all()


@pytest.mark.parametrize("dtype", [dtypes.float16, dtypes.bfloat16], ids=str)
def test_nextafter_steps_in_its_own_type(dtype: DType) -> None:
    x = np.arange(2**16, dtype=np.uint16).view(dtype.dtype)
    for towards in (-np.inf, 1.0, np.inf):
        y = np.full_like(x, towards)
        with np.errstate(all="ignore"):
            right = np.nextafter(x, y)
        got = run("nextafter", x, y)
        assert ((got == right) | (np.isnan(got) & np.isnan(right))).all()


@cache
def nodes_of(name: str, dtype: DType) -> int:
    """How many operations an expansion emits: a bitcast is none."""
    x = expr.read(Var("x", dtype))
    near = loop_math.near(name, x)
    seen: dict[int, Expr] = {}
    stack = [near[0] if near else loop_math.expand(name, x)]
    while stack:
        node = stack.pop()
        if id(node) not in seen:
            seen[id(node)] = node
            stack += node.args
    free = ("const", "var", "bitcast")
    return sum(node.op not in free for node in seen.values())


@pytest.mark.parametrize("name", ["exp", "log", "tanh", "sin", "cos", "logistic"])
def test_the_functions_of_inner_loops_are_short(name: str) -> None:
    assert nodes_of(name, dtypes.float32) <= 40
    assert nodes_of(name, dtypes.float64) <= 60


def test_fmod_stays_one_node() -> None:
    x, y = (expr.read(Var(v, dtypes.float64)) for v in "xy")
    node = loop_math.expand("fmod", x, y)
    assert node.op == "fmod"
    assert node.args == (x, y)


def test_every_name_is_expanded() -> None:
    assert LIMITS.keys() | {"fmod", "nextafter", "ipow"} == expr.MATH


@pytest.mark.soak
def test_the_coefficients_are_what_the_tool_computes() -> None:
    tool = ROOT / "tools" / "polynomials.py"
    subprocess.run([sys.executable, tool, "--check"], check=True)


def test_a_power_by_a_negative_integer_is_left_to_its_check() -> None:
    x = expr.const(2, dtypes.int64)
    node = expr.call("ipow", x, expr.const(-1, dtypes.int64))
    scalars.operation(node)(np.int64(2), np.int64(-1))  # some value, and no error
