#!/usr/bin/env python3
"""Compute the coefficients and constants of `hopflow.loop_ir.math`, and write its
`coefficients.py`.

    .venv/bin/python tools/polynomials.py           rewrite the file
    .venv/bin/python tools/polynomials.py --check   fail if it would change (a minute)

Each polynomial P is the weighted minimax approximation of a function g: it makes the
maximum of |w(t) (g(t) - P(t))| over an interval least, where w turns an error of P into
a relative error of the final result. Method: Remez's second algorithm (the exchange of
all extrema, on a dense Chebyshev grid), in 50 digits, with the number of coefficients
increased until the maximum is below the tolerance; then each coefficient is rounded.

The forms leave the leading terms out of P (`x + x**3 * P(x**2)`), so that rounding the
coefficients costs little. Source: E. Remez, "Sur la détermination des polynômes
d'approximation de degré donnée", 1934; J.-M. Muller, "Elementary Functions", 3rd
edition, chapter 3.
"""

import runpy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import mpmath as mp
import numpy as np

mp.mp.dps = 50
OUT = Path(__file__).parents[1] / "src/hopflow/loop_ir/math/coefficients.py"

Function = Callable[[mp.mpf], mp.mpf]
LN2 = mp.log(2)
DIGAMMA_ROOT = mp.findroot(mp.digamma, mp.mpf("1.4616"))
PRECISION = {"f32": 24, "f64": 53}
BITS = {"f32": 26, "f64": 56}  # an approximation is good to 2**-BITS


@dataclass
class Fit:
    """One polynomial: approximate `g` on `interval` under `weight`, for `dtype`."""

    name: str
    about: str
    g: Function
    weight: Function
    interval: tuple[mp.mpf, mp.mpf]
    dtype: str
    bits: int = 0  # where it is not that of the dtype

    def solve(self, expected: int) -> tuple[list[mp.mpf], float]:
        """The fewest coefficients that are good enough, and the error.

        Args:
            expected: How many there may be: so many are tried first, and one fewer.
        """
        lo, hi = map(mp.mpf, self.interval)
        count = 500
        angles = [mp.pi * (2 * i + 1) / (2 * count) for i in range(count)]
        grid = [(lo + hi) / 2 - (hi - lo) / 2 * mp.cos(a) for a in angles]
        values = [self.g(t) for t in grid]
        weights = [self.weight(t) for t in grid]
        tolerance = mp.mpf(2) ** -(self.bits or BITS[self.dtype])
        first = max(expected - 1, 2)
        if first > 2 and remez(grid, values, weights, first)[1] < tolerance:
            first = 2
        for terms in range(first, 36):
            coefficients, error = remez(grid, values, weights, terms)
            if error < tolerance:
                return coefficients, float(mp.log(error, 2))
        raise SystemExit(f"{self.name}: no polynomial is good enough")


def remez(
    grid: list[mp.mpf], values: list[mp.mpf], weights: list[mp.mpf], terms: int
) -> tuple[list[mp.mpf], mp.mpf]:
    """The best polynomial of so many terms over the points, and its largest error."""
    last = len(grid) - 1
    chosen = [
        round(float(last * (1 - mp.cos(mp.pi * i / terms)) / 2))
        for i in range(terms + 1)
    ]
    chosen = [max(i, 2 * n) for n, i in enumerate(chosen)]
    chosen = [min(i, last - 2 * (terms - n)) for n, i in enumerate(chosen)]
    for _ in range(40):
        rows = mp.matrix(terms + 1, terms + 1)
        right = mp.matrix(terms + 1, 1)
        for row, i in enumerate(chosen):
            for power in range(terms):
                rows[row, power] = grid[i] ** power
            rows[row, terms] = (-1) ** row / max(weights[i], mp.mpf(10) ** -40)
            right[row] = values[i]
        solution = mp.lu_solve(rows, right)
        coefficients = [solution[i] for i in range(terms)]
        errors = [
            w * (v - mp.polyval(coefficients[::-1], t))
            for t, v, w in zip(grid, values, weights, strict=True)
        ]
        worst = max(map(abs, errors))
        if worst < abs(solution[terms]) * mp.mpf("1.02"):
            break
        new = _exchange(errors, terms + 1)
        if new == chosen:
            break
        chosen = new
    return coefficients, worst


def _exchange(errors: list[mp.mpf], count: int) -> list[int]:
    """The largest extremum of each run of one sign, reduced to `count` of them."""
    runs: list[int] = []
    for i, e in enumerate(errors):
        if runs and (errors[runs[-1]] < 0) == (e < 0):
            if abs(e) > abs(errors[runs[-1]]):
                runs[-1] = i
        else:
            runs.append(i)
    while len(runs) > count:
        if len(runs) == count + 1:
            runs.pop(0 if abs(errors[runs[0]]) < abs(errors[runs[-1]]) else -1)
            continue
        # Dropping an inner extremum leaves two of one sign side by side: drop two.
        n = min(range(len(runs) - 1), key=lambda n: _smaller(errors, runs, n))
        del runs[n : n + 2]
    if len(runs) < count:
        raise ArithmeticError("the error has too few extrema: a denser grid is needed")
    return runs


def _smaller(errors: list[mp.mpf], runs: list[int], n: int) -> mp.mpf:
    return max(abs(errors[runs[n]]), abs(errors[runs[n + 1]]))


# --- what is fitted -------------------------------------------------------------------


def _series(
    first: int, step: int, signs: int, factor: Callable[[int], mp.mpf]
) -> Function:
    """A power series, for the small arguments where the closed form cancels."""

    def value(t: mp.mpf) -> mp.mpf:
        total, n, power = mp.mpf(0), first, mp.mpf(1)
        for i in range(60):
            total += signs**i * power * factor(n)
            n, power = n + step, power * t
        return total

    return value


def _erfc_scaled(t: mp.mpf) -> mp.mpf:
    """`erfc(a) exp(a**2) (a + 1/2)`, of t = (a - 3) / (a + 3)."""
    a = 3 * (1 + t) / (1 - t)
    return mp.erfc(a) * mp.exp(a * a) * (a + 0.5)


def _mobius(a: float) -> mp.mpf:
    return (mp.mpf(a) - 3) / (mp.mpf(a) + 3)


def _erfinv_over_x(w: mp.mpf) -> mp.mpf:
    """`erfinv(x) / x` where w = -log(1 - x**2)."""
    if w == 0:
        return mp.sqrt(mp.pi) / 2
    x = mp.sqrt(-mp.expm1(-w))
    q = -mp.expm1(-w)
    tail = mp.exp(-w) / (1 + x)  # 1 - x, without cancellation
    assert q > 0
    y = (
        mp.erfinv(x)
        if tail > mp.mpf("1e-3")
        else mp.sqrt(-mp.log(tail * mp.sqrt(mp.pi * w)))
    )
    for _ in range(60):
        step = (mp.erfc(y) - tail) * mp.sqrt(mp.pi) / 2 * mp.exp(y * y)
        step /= 1 + y * step  # Halley's method
        y += step
        if abs(step) < mp.mpf(10) ** -45:
            break
    return y / x


def _lgamma_near_2(d: mp.mpf) -> mp.mpf:
    if abs(d) < mp.mpf("1e-12"):
        return 1 - mp.euler + d * (mp.zeta(2) - 1) / 2
    return mp.loggamma(2 + d) / d


def _stirling_rest(z: mp.mpf) -> mp.mpf:
    """`a * (lgamma(a) - ((a - 1/2) log(a) - a + log(2 pi) / 2))`, of z = 1 / a**2."""
    a = 1 / mp.sqrt(z)
    with mp.workdps(80):
        rest = mp.loggamma(a) - ((a - 0.5) * mp.log(a) - a + mp.log(2 * mp.pi) / 2)
        return +(a * rest)


def _digamma_near_root(d: mp.mpf) -> mp.mpf:
    """`digamma(r + d) / d`, of its positive root r."""
    with mp.workdps(80):
        if abs(d) < mp.mpf("1e-25"):
            return +mp.polygamma(1, DIGAMMA_ROOT)
        return +(mp.digamma(DIGAMMA_ROOT + d) / d)


def fits() -> list[Fit]:
    half = LN2 / 2
    edge = mp.mpf("1.0001")  # a reduced argument may be rounded past the end
    exp_rest = _series(2, 1, 1, lambda n: 1 / mp.factorial(n))
    sin_rest = _series(3, 2, -1, lambda n: -1 / mp.factorial(n))
    cos_rest = _series(4, 2, -1, lambda n: 1 / mp.factorial(n))
    sinh_rest = _series(3, 2, 1, lambda n: 1 / mp.factorial(n))
    cosh_rest = _series(2, 2, 1, lambda n: 1 / mp.factorial(n))
    log_rest = _log_rest
    root = mp.sqrt(2)
    quarter = (mp.pi / 4 * mp.mpf("1.002")) ** 2
    result = []
    for dtype, bits in BITS.items():
        result += [
            Fit("EXP", "exp(r) = 1 + r + r**2 P(r), |r| <= log(2) / 2",
                exp_rest, lambda r: r * r / abs(mp.expm1(r)),
                (-half * edge, half * edge), dtype),
            Fit("EXP2", "exp2(r) = 1 + r log(2) + r**2 P(r), |r| <= 1/2",
                lambda r: exp_rest(r * LN2) * LN2**2,
                lambda r: r * r / mp.mpf(2) ** r, (-edge / 2, edge / 2), dtype),
            Fit("SINH", "sinh(r) = r + r**3 P(r**2), |r| <= log(2) / 2",
                sinh_rest, _over(mp.sinh, 3), (mp.mpf(0), (half * edge) ** 2),
                dtype, bits + 1),
            Fit("COSH", "cosh(r) = 1 + r**2 P(r**2), |r| <= log(2) / 2",
                cosh_rest, _over(mp.cosh, 2), (mp.mpf(0), (half * edge) ** 2), dtype),
            Fit("LOG", "log(1 + f) = f + f**2 P(f), sqrt(1/2) <= 1 + f <= sqrt(2)",
                log_rest, lambda f: abs(f * f / mp.log1p(f)),
                (1 / root / edge - 1, root * edge - 1), dtype),
            Fit("SIN", "sin(r) = r + r**3 P(r**2), |r| <= pi / 4",
                sin_rest, _over(mp.sin, 3), (mp.mpf(0), quarter), dtype),
            Fit("COS", "cos(r) = 1 - r**2 / 2 + r**4 P(r**2), |r| <= pi / 4",
                cos_rest, _over(mp.cos, 4), (mp.mpf(0), quarter), dtype),
            Fit("TAN", "tan(r) = r + r**3 P(r**2), |r| <= pi / 4",
                _rest(mp.tan, mp.mpf(1) / 3), _over(mp.tan, 3),
                (mp.mpf(0), quarter), dtype),
            Fit("ASIN", "asin(s) = s + s**3 P(s**2), |s| <= 1/2",
                _rest(mp.asin, mp.mpf(1) / 6), _over(mp.asin, 3),
                (mp.mpf(0), mp.mpf("0.25")), dtype),
            Fit("ATAN", "atan(s) = s + s**3 P(s**2), |s| <= 1",
                _rest(mp.atan, -mp.mpf(1) / 3), _over(mp.atan, 3),
                (mp.mpf(0), mp.mpf(1)), dtype),
            Fit("ERF", "erf(x) = x + x P(x**2), |x| <= 1",
                lambda z: mp.erf(mp.sqrt(z)) / mp.sqrt(z) - 1, _over(mp.erf, 1),
                (mp.mpf(0), mp.mpf(1)), dtype),
            Fit("ERFC", "erfc(a) = exp(-a**2) / (a + 1/2) (0.609375 + P(t)), "
                "t = (a - 3) / (a + 3), a >= 1/2",
                lambda t: _erfc_scaled(t) - mp.mpf("0.609375"),
                lambda t: 1 / _erfc_scaled(t),
                (_mobius(0.4999), _mobius(27.6 if dtype == "f64" else 10.3)), dtype),
            Fit("ERFINV", "erfinv(x) = x P(w - 3), w = -log(1 - x**2) <= 6",
                lambda t: _erfinv_over_x(t + 3), lambda t: 1 / _erfinv_over_x(t + 3),
                (mp.mpf(-3), mp.mpf(3)), dtype, bits - 2),
            Fit("ERFINV_TAIL", "erfinv(x) = x P(sqrt(w) - 4), 6 <= w",
                lambda t: _erfinv_over_x((t + 4) ** 2),
                lambda t: 1 / _erfinv_over_x((t + 4) ** 2),
                (mp.sqrt(6) - 4, mp.mpf("2.02" if dtype == "f64" else "0.1")),
                dtype, bits - 2),
            Fit("LGAMMA", "lgamma(2 + d) = d P(d), -3/4 <= d <= 1/2",
                _lgamma_near_2, lambda d: 1 / _lgamma_near_2(d),
                (-mp.mpf("0.75"), mp.mpf("0.5")), dtype, bits - 1),
            Fit("STIRLING", "lgamma(a) = (a - 1/2) log(a) - a + log(2 pi) / 2 "
                "+ P(1 / a**2) / a, a >= 5/2",
                _stirling_rest, lambda _: mp.mpf("1.4"),
                (mp.mpf("1e-4"), mp.mpf("0.16")), dtype, bits - 1),
            Fit("DIGAMMA", "digamma(r + d) = d P(d), |d| <= 0.85, of its root r",
                _digamma_near_root, lambda d: 1 / _digamma_near_root(d),
                (-mp.mpf("0.8501"), mp.mpf("0.8501")), dtype, bits - 2),
        ]  # fmt: skip
    result.append(
        Fit("LOG_WIDE", "as LOG, for pow in single precision",
            log_rest, lambda f: abs(f * f / mp.log1p(f)),
            (1 / root / edge - 1, root * edge - 1), "f64", 38)
    )  # fmt: skip
    result.append(
        Fit("ERF_TAIL", "erf(a) = 1 - P(a - 2.475), 1 <= a <= 3.95",
            lambda t: mp.erfc(t + mp.mpf("2.475")),
            lambda t: 1 / mp.erf(t + mp.mpf("2.475")),
            (mp.mpf("-1.475"), mp.mpf("1.475")), "f32")
    )  # fmt: skip
    result.append(
        Fit("ATANH", "atanh(s) = s + s**3 (1/3 + s**2 P(s**2)), |s| <= 0.1716; for pow",
            _series(5, 2, 1, lambda n: mp.mpf(1) / n),
            lambda z: z * z, (mp.mpf(0), ((root - 1) / (root + 1) * edge) ** 2),
            "f64", 68)
    )  # fmt: skip
    return result


def _over(f: Function, power: int) -> Function:
    """`s**power / f(s)` of z = s**2."""

    def weight(z: mp.mpf) -> mp.mpf:
        s = mp.sqrt(z)
        return s**power / f(s) if z else mp.mpf(0)

    return weight


def _rest(f: Function, limit: mp.mpf) -> Function:
    """`(f(s) - s) / s**3` of z = s**2."""

    def g(z: mp.mpf) -> mp.mpf:
        if z < mp.mpf(10) ** -30:
            return limit
        with mp.workdps(90):
            s = mp.sqrt(z)
            return +((f(s) - s) / s**3)

    return g


def _log_rest(f: mp.mpf) -> mp.mpf:
    if abs(f) < mp.mpf(10) ** -20:
        return -mp.mpf(1) / 2 + f / 3
    with mp.workdps(100):
        return +((mp.log1p(f) - f) / f**2)


# --- constants ------------------------------------------------------------------------


def words(value: mp.mpf, dtype: str, count: int) -> list[float]:
    """`value` as an unevaluated sum of numbers of `dtype`, each the nearest."""
    result = []
    for _ in range(count):
        word = rounded(value, dtype)
        result.append(word)
        value -= mp.mpf(word)
    return result


def rounded(value: mp.mpf, dtype: str) -> float:
    """`value` to the nearest of `dtype`; mpmath rounds to any precision."""
    with mp.workprec(PRECISION[dtype]):
        return float(+value)


def chopped(value: mp.mpf, dtype: str, count: int) -> list[float]:
    """As `words`, but each rounded towards 0: all have the sign of `value`."""
    result = []
    for _ in range(count):
        scale = mp.mpf(2) ** (PRECISION[dtype] - mp.frexp(value)[1])
        word = mp.floor(value * scale) / scale
        result.append(float(word))
        value -= word
    return result


def two_over_pi_chunks(first_bit: int) -> list[float]:
    """Bits of 2/pi from `first_bit` on: three chunks of 29 bits, and the rest of 53."""
    with mp.workdps(120):
        rest = 2 / mp.pi
        rest -= mp.floor(rest * mp.mpf(2) ** first_bit) / mp.mpf(2) ** first_bit
        result = []
        for i in range(1, 4):
            scale = mp.mpf(2) ** (first_bit + 29 * i)
            chunk = mp.floor(rest * scale) / scale
            result.append(float(chunk))
            rest -= chunk
        return [*result, float(rest)]


def two_over_pi_words() -> list[int]:
    """2/pi * 2**-54 as a string of bits, in 19 words of 64."""
    with mp.workdps(500):
        total = int(mp.floor(2 / mp.pi * mp.mpf(2) ** (64 * 19 - 54)))
    return [total >> 64 * (18 - i) & (2**64 - 1) for i in range(19)]


CONSTANTS: list[tuple[str, str, mp.mpf, int]] = [
    ("LN2", "log(2)", LN2, 2),
    ("LOG2_E", "log2(e)", 1 / LN2, 2),
    ("LOG10_E", "log10(e)", 1 / mp.log(10), 2),
    ("LOG10_2", "log10(2)", mp.log(2, 10), 2),
    ("HALF_PI", "pi / 2", mp.pi / 2, 2),
    ("PI", "pi", mp.pi, 2),
    ("TWO_OVER_PI", "2 / pi", 2 / mp.pi, 1),
    ("LOG_PI", "log(pi)", mp.log(mp.pi), 2),
    ("HALF_LOG_2PI", "log(2 pi) / 2", mp.log(2 * mp.pi) / 2, 1),
    ("DIGAMMA_ROOT", "where digamma is 0", DIGAMMA_ROOT, 2),
]


def render() -> str:
    lines = [
        '"""Written by tools/polynomials.py, which explains the method: do not edit.',
        "",
        "Coefficients start with that of the lowest power, and are given by dtype.",
        'Constants are sums of words, "hi" first: each is the nearest to what is left.',
        '"""',
        "",
        "from typing import Final",
        "",
        "Table = dict[str, tuple[float, ...]]",
        "",
    ]
    for name, about, value, count in CONSTANTS:
        lines += [f"# {about}", f"{name}: Final[Table] = {{"]
        for dtype in ("f32", "f64"):
            lines += _row(dtype, words(value, dtype, count))
        lines += ["}", ""]
    lines += [
        "# pi / 2 in words that are rounded towards 0",
        "CODY_WAITE: Final[Table] = {",
    ]
    for dtype in ("f32", "f64"):
        lines += _row(dtype, chopped(mp.pi / 2, dtype, 3))
    lines += ["}", ""]
    lines += [
        "# Bits 1 to 140 of 2 / pi, and from 52 on: chunks of 29, 29, 29 and 53 bits.",
        *_tuple("TWO_OVER_PI_LOW", two_over_pi_chunks(0)),
        *_tuple("TWO_OVER_PI_HIGH", two_over_pi_chunks(51)),
        "",
        "# The bits of 2 / pi after 54 zeros, in words of 64.",
        *_tuple("TWO_OVER_PI_WORDS", two_over_pi_words()),
        "",
    ]
    known = runpy.run_path(str(OUT)) if OUT.exists() else {}
    by_name: dict[str, list[Fit]] = {}
    for fit in fits():
        by_name.setdefault(fit.name, []).append(fit)
    for name, group in by_name.items():
        lines += _comment(group[0].about)
        lines += [f"{name}: Final[Table] = {{"]
        for fit in group:
            expected = len(known.get(name, {}).get(fit.dtype, ()))
            coefficients, error = fit.solve(expected)
            print(f"{name:12} {fit.dtype} {len(coefficients):3} terms  2**{error:.1f}")
            lines += [f"    # 2**{error:.1f}"]
            lines += _row(fit.dtype, [rounded(c, fit.dtype) for c in coefficients])
        lines += ["}", ""]
    return "\n".join(lines[:-1]) + "\n"


def _comment(text: str) -> list[str]:
    if len(text) <= 86:
        return [f"# {text}"]
    cut = text.rindex(" ", 0, 86)
    return [f"# {text[:cut]}", f"# {text[cut + 1 :]}"]


def _literal(value: float, dtype: str) -> str:
    if isinstance(value, int):
        return f"0x{value:016X}"
    if dtype == "f32":  # as short as it may be, and still that float32
        return str(float(str(np.float32(value))))
    return repr(value)


def _row(dtype: str, values: list[float]) -> list[str]:
    body = [f"        {_literal(v, dtype)}," for v in values]
    one = f'    "{dtype}": ({", ".join(line.strip(" ,") for line in body)}'
    one += ",)," if len(values) == 1 else "),"
    if len(one) <= 88:
        return [one]
    return [f'    "{dtype}": (', *body, "    ),"]


def _tuple(name: str, values: list[float] | list[int]) -> list[str]:
    body = [f"    {_literal(v, 'f64')}," for v in values]
    return [f"{name}: Final = (", *body, ")"]


def main() -> None:
    text = render()
    if "--check" in sys.argv:
        if OUT.read_text() != text:
            raise SystemExit(f"{OUT} is not what tools/polynomials.py writes")
        return
    OUT.write_text(text)


if __name__ == "__main__":
    main()
