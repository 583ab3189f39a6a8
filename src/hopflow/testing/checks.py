"""`check(program)`: all meanings of a program agree, and of its transforms."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from hopflow import pytree
from hopflow.agreement import Expected, Rounding
from hopflow.dtypes import as_dtype
from hopflow.errors import ArgumentTypeError, DataDependentError, MutationError
from hopflow.testing.differences import slopes
from hopflow.testing.meanings import REGISTRY, ProgramMeaning
from hopflow.testing.plain import Plain
from hopflow.testing.program import Argument, Program
from hopflow.testing.strategies import check_names
from hopflow.testing.transforms import Transform, differences_of, floats, moved

Array = np.ndarray[Any, Any]

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
    tie         whether results hang on rounding: one differed, and said nothing
    """

    agreed: list[str] = field(default_factory=list)
    refused: dict[str, Exception] = field(default_factory=dict)
    tie: bool = False


def label_of(meaning: str, transform: str) -> str:
    """What a comparison is called: "jit", or "jit of grad"."""
    return meaning if transform == "value" else f"{meaning} of {transform}"


def check(
    program: Program,
    meanings: Sequence[str] | None = None,
    transforms: Sequence[str] = ("value",),
) -> Report:
    """Compare all meanings of a program with that of plain Python and NumPy.

    Args:
        meanings: By name, those of `register_meaning` too; None: all that can have it.
        transforms: Of which the meanings are compared: "value", "vmap", "grad", "jvp",
            and those of each other, as "vmap of grad".

    Raises:
        Disagreement: two of them differ; with the program as a script.
        ArgumentTypeError: an argument is of another kind.
        ArgumentValueError: there is no meaning, or transform, of such a name.
    """
    if not isinstance(program, Program):
        raise ArgumentTypeError(
            "check: `program` must be a Program, as `programs` draws and `from_text` "
            f"reads them, and is {type(program).__name__}."
        )
    names = list(REGISTRY) if meanings is None else meanings
    check_names("check", "meanings", names, REGISTRY)
    check_names("check", "transforms", transforms)
    report = Report()
    chosen = [REGISTRY[name] for name in names]
    for transform in map(Transform, transforms):
        if not transform.fits(program):
            continue
        expected = _expected(program, transform)
        if not _stops(expected):
            _compare_slopes(program, transform, expected, report)
        for meaning in chosen:
            label = label_of(meaning.name, transform.name)
            fits = meaning.when(program) and transform.needs <= meaning.has
            if fits and (meaning.stops or not _stops(expected)):
                _compare(program, transform, meaning, label, expected, report)
            if report.tie:
                return report
    return report


def _expected(program: Program, transform: Transform) -> Expected:
    def run(rounding: Rounding) -> list[Array]:
        near = tuple(
            Argument(a.name, rounding.argument(a.value)) for a in program.arguments
        )
        given = dataclasses.replace(program, arguments=near)
        try:
            return transform.reference(given, Plain(rounding))
        except IndexError:
            rounding.decisions.append(b"stops")
            return []

    return Expected(run, exact=program.exact, signed=program.signed)


def _compare_slopes(
    program: Program, transform: Transform, expected: Expected, report: Report
) -> None:
    """Compare what the tape says with differences, where those are exact enough."""
    known = differences_of(transform)
    wide = all(program.arguments[k].value.dtype == np.float64 for k in floats(program))
    if known is None or not wide:
        return
    found = slopes(lambda step, rounding: known.along(moved(program, step), rounding))
    if found is None:
        return
    label = f"differences of {transform.name}"
    if wrong := found.wrong(known.slopes(program, list(expected.results))):
        raise Disagreement(program, label, wrong)
    report.agreed.append(label)


def _stops(expected: Expected) -> bool:
    """Whether an index out of range is what a program comes to: it has no results."""
    return not expected.results


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
    stopped: IndexError | None = None
    refusals: tuple[type[Exception], ...] = (*REFUSALS, *meaning.lacks)
    try:
        got = meaning.run(lambda lib: transform.function(program, lib), given)
    except refusals as error:
        report.refused[label] = error
        return
    except IndexError as error:
        got, stopped = [], error
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        raise Disagreement(program, label, what) from error
    if wrong := expected.wrong(pytree.flatten(got)[0]):
        if stopped is not None:
            wrong = f"{type(stopped).__name__}: {stopped}"
        elif _stops(expected):
            wrong = "an index is out of range, and does not stop it."
        raise Disagreement(program, label, wrong) from stopped
    if expected.tied:
        report.tie = True
        return
    for a, before in zip(given, kept, strict=True):
        if not np.array_equal(a, before, equal_nan=as_dtype(a.dtype).is_float):
            raise Disagreement(program, label, "an argument was written to.")
    report.agreed.append(label)
