"""`check(program)`: all meanings of a program agree, and of its transforms.

How far results may be apart is the program's own matter: it is run in NumPy with noise
in the last place of each result, and what that moves is what rounding may move. Where
it moves a decision (a branch, a sorted order, a number of steps) the program sits on a
tie, and says nothing.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import ml_dtypes
import numpy as np

from hopflow import pytree
from hopflow.dtypes import as_dtype
from hopflow.errors import DataDependentError, MutationError
from hopflow.testing.meanings import REGISTRY, ProgramMeaning
from hopflow.testing.plain import Plain
from hopflow.testing.program import Argument, Program
from hopflow.testing.transforms import TRANSFORMS, Transform

__all__ = ["Disagreement", "Report", "check", "difference"]

Array = np.ndarray[Any, Any]

RUNS: Final = 3
"""Runs with noise."""

SLACK: Final = 16.0
"""How much more than that noise a result may be away."""

REFUSALS: Final = (MutationError, DataDependentError)
"""What a meaning may answer to a program that it cannot have: it says so."""


class Disagreement(AssertionError):
    """A meaning of a program gives another result than plain Python does."""

    def __init__(self, program: Program, meaning: str, what: str) -> None:
        self.program, self.meaning, self.what = program, meaning, what
        super().__init__(f"{meaning}: {what}\n\n{program}")


@dataclass
class Report:
    """What `check` did.

    agreed      the meanings, "jit" or "jit of grad"
    refused     those that cannot have this program, and their error
    tie         whether results hang on rounding, so that nothing was compared
    """

    agreed: list[str] = field(default_factory=list)
    refused: dict[str, Exception] = field(default_factory=dict)
    tie: bool = False


def check(
    program: Program,
    meanings: Sequence[str] | None = None,
    transforms: Sequence[str] = ("value",),
) -> Report:
    """Compare all meanings of a program with that of plain Python and NumPy.

    Args:
        meanings: By name, those of `register_meaning` too; None: all that can have it.
        transforms: Of which the meanings are compared; see `TRANSFORMS`.

    Raises:
        Disagreement: two of them differ; with the program as a script.
    """
    report = Report()
    chosen = [REGISTRY[name] for name in meanings] if meanings else REGISTRY.values()
    for name in transforms:
        transform = TRANSFORMS[name]
        if not transform.when(program):
            continue
        expected = _expected(program, transform)
        if expected is None:
            report.tie = True
            return report
        for meaning in chosen:
            label = meaning.name if name == "value" else f"{meaning.name} of {name}"
            if meaning.when(program) and transform.fits(meaning):
                _compare(program, transform, meaning, label, expected, report)
    return report


@dataclass(frozen=True)
class Expected:
    results: list[Array]
    allowed: list[float]  # for each result, how far an element may be away


def _expected(program: Program, transform: Transform) -> Expected | None:
    """The results, and how well they are known; None: they hang on rounding."""
    plain = Plain()
    results = transform.reference(program, plain)
    if program.exact:
        return Expected(results, [0.0] * len(results))
    moved = [0.0] * len(results)
    for k in range(RUNS):
        rng = np.random.default_rng(k)
        noisy = Plain(rng)
        found = transform.reference(_near(program, rng), noisy)
        if noisy.decisions != plain.decisions:
            return None
        for i, (a, b) in enumerate(zip(found, results, strict=True)):
            if as_dtype(b.dtype).is_float:
                moved[i] = max(moved[i], _apart(a, b))
    return Expected(
        results,
        [
            SLACK * (m + _unit(r) * np.max(np.abs(_finite(r)), initial=0.0))
            for m, r in zip(moved, results, strict=True)
        ],
    )


def _near(program: Program, rng: np.random.Generator) -> Program:
    """The program with arguments that differ in their last place."""

    def near(x: Array) -> Array:
        if not as_dtype(x.dtype).is_float:
            return x
        wave = rng.choice([-1.0, 1.0], size=x.shape) * _unit(x)
        return np.asarray(x * (1 + wave).astype(x.dtype), x.dtype)

    moved = tuple(Argument(a.name, near(a.value)) for a in program.arguments)
    return dataclasses.replace(program, arguments=moved)


def _unit(x: Array) -> float:
    dtype = as_dtype(x.dtype)
    return float(ml_dtypes.finfo(x.dtype).eps) if dtype.is_float else 0.0


def _finite(x: Array) -> Array:
    wide = np.asarray(x, np.float64)
    return np.where(np.isfinite(wide), wide, 0.0)


def _apart(a: Array, b: Array) -> float:
    """The largest distance of two elements."""
    with np.errstate(invalid="ignore"):
        apart = np.abs(np.asarray(a, np.float64) - np.asarray(b, np.float64))
    same = np.asarray(a == b) | (np.isnan(_wide(a)) & np.isnan(_wide(b)))
    return float(np.max(np.where(same, 0.0, apart), initial=0.0))


def _wide(x: Array) -> Array:
    return np.asarray(x, np.float64)


def difference(got: Sequence[Any], expected: Expected) -> str | None:
    """What is wrong about results; None: nothing."""
    if len(got) != len(expected.results):
        return f"{len(got)} results, where {len(expected.results)} are expected."
    pairs = zip(got, expected.results, expected.allowed, strict=True)
    for k, (x, want, allowed) in enumerate(pairs):
        a = np.asarray(x)
        if (a.dtype, a.shape) != (want.dtype, want.shape):
            return (
                f"result {k} is {a.dtype}{list(a.shape)}, and must be "
                f"{want.dtype}{list(want.shape)}."
            )
        apart = _apart(a, want)
        if not apart <= allowed:
            return (
                f"result {k} is {apart:.3g} away, and may be {allowed:.3g}.\n"
                f"found:\n{a}\nexpected:\n{want}"
            )
    return None


def _compare(
    program: Program,
    transform: Transform,
    meaning: ProgramMeaning,
    label: str,
    expected: Expected,
    report: Report,
) -> None:
    given = transform.arguments(program)
    kept = [a.copy() for a in given]
    try:
        got = meaning.run(lambda lib: transform.function(program, lib), given)
    except REFUSALS as error:
        report.refused[label] = error
        return
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        raise Disagreement(program, label, what) from error
    if wrong := difference(pytree.flatten(got)[0], expected):
        raise Disagreement(program, label, wrong)
    for a, before in zip(given, kept, strict=True):
        if not np.array_equal(a, before, equal_nan=a.dtype.kind == "f"):
            raise Disagreement(program, label, "an argument was written to.")
    report.agreed.append(label)
