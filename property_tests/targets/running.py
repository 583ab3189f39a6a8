"""Runs of exported programs here, which those of targets are compared with."""

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

import hopflow as hf
from hopflow import pytree
from hopflow.errors import HopflowError
from hopflow.testing.units import coarsest_epsilon, difference, epsilon

Array = np.ndarray[Any, Any]

ERRORS: Final = (HopflowError, ArithmeticError, IndexError)
UNITS: Final = 1 << 10
"""The difference that rounding makes in a program, in units of the largest element of a
result, in the least exact dtype that the program computes in."""
IsRight: TypeAlias = Callable[[Sequence[Array]], bool]
"""Whether results are those of plain Python and NumPy, as far as rounding allows in the
program. It runs the program with other rounding, and so takes its time."""


class Run(NamedTuple):
    """What a call has given.

    error    what has stopped it, or ""
    results  the results
    new      those that are no written arguments
    written  the arguments that were written
    """

    error: str
    results: list[Array]
    new: list[Array]
    written: list[Array]


def run(program: Any, values: Sequence[Any], function: Any = None) -> Run:
    """Call a program, or the jitted function of one, on copies of values."""
    operands = [hf.asarray(np.array(x)) for x in values]
    try:
        results = pytree.flatten((function or program)(*operands))[0]
    except ERRORS as error:
        return Run(f"{type(error).__name__}: {error}", [], [], [])
    signature = program.signature
    arrays = [np.asarray(x) for x in results]
    return Run(
        "",
        arrays,
        [x for x, y in zip(arrays, signature.outputs, strict=True) if not y.same],
        [
            np.asarray(x)
            for x, argument in zip(operands, signature.inputs, strict=True)
            if argument.written
        ],
    )


def is_close(
    program: Any, found: Sequence[Array], expected: Sequence[Array], **options: Any
) -> bool:
    """Whether arrays differ by no more than rounding makes in most programs."""
    coarsest = coarsest_epsilon(program)
    for x, y in zip(found, expected, strict=True):
        units = UNITS * coarsest / epsilon(y.dtype) if epsilon(y.dtype) else 0
        if not difference(x, y, of_largest=True, **options) <= units:
            return False
    return True
