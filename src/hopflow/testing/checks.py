"""`check(program)`: compare all executions of a program and of its transforms."""

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
from hopflow.testing.executions import REGISTRY, ProgramExecution
from hopflow.testing.plain import Plain
from hopflow.testing.program import Argument, Program
from hopflow.testing.strategies import check_names
from hopflow.testing.transforms import Transform, differences_of, floats, moved

Array = np.ndarray[Any, Any]

REFUSALS: Final = (MutationError, DataDependentError)
"""The errors by which any execution may refuse a program."""


class Disagreement(AssertionError):
    """An execution of a program disagrees with plain Python.

    program     the program
    execution   the execution, "jit" or "jit of grad"
    what        the difference, or the error
    """

    def __init__(self, program: Program, execution: str, what: str) -> None:
        self.program, self.execution, self.what = program, execution, what
        super().__init__(f"{execution}: {what}\n\n{program}")


@dataclass
class Report:
    """The result of `check`.

    agreed      the executions that agree, "jit" or "jit of grad"
    refused     the executions that refuse the program, with their errors
    tie         whether the program is at a tie, so that a difference was ignored
    """

    agreed: list[str] = field(default_factory=list)
    refused: dict[str, Exception] = field(default_factory=dict)
    tie: bool = False


def label_of(execution: str, transform: str) -> str:
    """Return the label of a comparison: "jit", or "jit of grad"."""
    return execution if transform == "value" else f"{execution} of {transform}"


def check(
    program: Program,
    executions: Sequence[str] | None = None,
    transforms: Sequence[str] = ("value",),
) -> Report:
    """Compare executions of a program with plain Python and NumPy.

    Args:
        executions: The names of executions; None: all that support the program.
        transforms: The transforms of the program that are compared: "value", "vmap",
            "grad", "jvp", and compositions, as "vmap of grad".

    Returns:
        What agreed, and what was refused.

    Raises:
        Disagreement: an execution differs; the message has the program as a script.
        ArgumentTypeError: an argument is of another kind.
        ArgumentValueError: there is no execution, or transform, of such a name.
    """
    if not isinstance(program, Program):
        raise ArgumentTypeError(
            "check: `program` must be a Program, as `programs` draws and `from_text` "
            f"reads them, and is {type(program).__name__}."
        )
    names = list(REGISTRY) if executions is None else executions
    check_names("check", "executions", names, REGISTRY)
    check_names("check", "transforms", transforms)
    report = Report()
    selected = [REGISTRY[name] for name in names]
    for transform in map(Transform, transforms):
        if not transform.fits(program):
            continue
        expected = expected_results(program, transform)
        if not _stops(expected):
            _compare_slopes(program, transform, expected, report)
        for execution in selected:
            label = label_of(execution.name, transform.name)
            fits = execution.when(program) and transform.needs <= execution.has
            if fits and (execution.stops or not _stops(expected)):
                _compare(program, transform, execution, label, expected, report)
            if report.tie:
                return report
    return report


def expected_results(program: Program, transform: Transform) -> Expected:
    """Return the results of a transformed program by plain Python and NumPy, with what
    rounding may change in them."""

    def run(rounding: Rounding) -> list[Array]:
        arguments = tuple(
            Argument(a.name, rounding.argument(a.value)) for a in program.arguments
        )
        perturbed = dataclasses.replace(program, arguments=arguments)
        try:
            return transform.reference(perturbed, Plain(rounding))
        except IndexError:
            rounding.decisions.append(b"stops")
            return []

    return Expected(run, exact=program.exact, signed=program.signed)


def _compare_slopes(
    program: Program, transform: Transform, expected: Expected, report: Report
) -> None:
    """Compare derivatives by the tape with finite differences, if these are precise."""
    differences = differences_of(transform)
    wide = all(program.arguments[k].value.dtype == np.float64 for k in floats(program))
    if differences is None or not wide:
        return
    expected_slopes = slopes(
        lambda step, rounding: differences.along(moved(program, step), rounding)
    )
    if expected_slopes is None:
        return
    label = f"differences of {transform.name}"
    if mismatch := expected_slopes.wrong(
        differences.slopes(program, list(expected.results))
    ):
        raise Disagreement(program, label, mismatch)
    report.agreed.append(label)


def _stops(expected: Expected) -> bool:
    """Whether the program fails with an index out of range, and has no results."""
    return not expected.results


def _compare(
    program: Program,
    transform: Transform,
    execution: ProgramExecution,
    label: str,
    expected: Expected,
    report: Report,
) -> None:
    """Compare one execution of a transform, and add the outcome to the report."""
    arguments = transform.arguments(program)
    copies = [a.copy() for a in arguments]
    stopped: IndexError | None = None
    refusals: tuple[type[Exception], ...] = (*REFUSALS, *execution.lacks)
    try:
        got = execution.run(lambda lib: transform.function(program, lib), arguments)
    except refusals as error:
        report.refused[label] = error
        return
    except IndexError as error:
        got, stopped = [], error
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
        raise Disagreement(program, label, text) from error
    if mismatch := expected.wrong(pytree.flatten(got)[0]):
        if stopped is not None:
            mismatch = f"{type(stopped).__name__}: {stopped}"
        elif _stops(expected):
            mismatch = "an index is out of range, and does not stop it."
        raise Disagreement(program, label, mismatch) from stopped
    if expected.tied:
        report.tie = True
        return
    for a, before in zip(arguments, copies, strict=True):
        if not np.array_equal(a, before, equal_nan=as_dtype(a.dtype).is_float):
            raise Disagreement(program, label, "an argument was written to.")
    report.agreed.append(label)
