"""Drawn programs give equal answers as ONNX models, in onnxruntime.

Sizes are fixed, and then symbols. The ordinary suite draws a few; `make soak` draws
1,000 programs, and 300 derivatives and batches of such.
"""

from typing import Any, Final

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

import hopflow as hf
from hopflow import pytree
from hopflow.errors import HopflowError
from hopflow.testing.fuzz import EVERY
from hopflow.testing.onnx_models import Session
from hopflow.testing.program import Program
from hopflow.testing.requires import requires
from hopflow.testing.strategies import programs
from hopflow.testing.transforms import Transform
from hopflow.testing.units import coarsest_epsilon, difference, epsilon

pytestmark = [pytest.mark.slow, requires("onnx>=1.23", "onnxruntime>=1.32")]

QUICK: Final = settings(
    max_examples=6,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
DRAWN: Final = (
    programs("smooth", operators=EVERY, mutation=True)
    | programs("exact", operators=EVERY, mutation=True)
    | programs("special", operators=EVERY, mutation=True)
)
UNITS: Final = 1 << 10
"""The difference that rounding makes in a program, in units of the largest element of a
result, in the least exact dtype that the program computes in."""

VALUE: Final = Transform("value")
TRANSFORMS: Final = ("grad", "vmap", "jvp of grad")
SMOOTH: Final = programs("smooth", operators=EVERY)

ERRORS: Final = (HopflowError, ArithmeticError, IndexError)


def check_model(
    drawn: Program, dynamic: bool | None, transform: Transform = VALUE
) -> None:
    """Compare a program with its model: what it gives, what it writes, what it stops
    at."""
    if not transform.fits(drawn):
        return
    function, values = transform.function(drawn, hf), transform.arguments(drawn)
    try:
        given = tuple(map(hf.asarray, values))
        # Loops of derivatives ask again for rules that a program of none has not.
        orders = len(transform.steps) if transform.is_derivative else 0
        program: Any = hf.export(
            function, given, dynamic_shapes=dynamic, derivatives=orders
        )
    except ERRORS:
        return  # of whatever plain Python refuses, too
    model = program.to_onnx()
    found = Session(model)(*map(np.array, values))
    operands = [hf.asarray(np.array(x)) for x in values]
    stopped: Exception | None = None
    try:
        results = pytree.flatten(program(*operands))[0]
    except ERRORS as error:
        stopped = error
    assert bool(found.failed) is bool(stopped), (found.failed, stopped)
    if stopped:
        return
    written = [
        operand
        for operand, argument in zip(operands, program.signature.inputs, strict=True)
        if argument.written
    ]
    expected = [np.asarray(x) for x in (*results, *written)]
    assert len(found.results) == len(expected)
    coarsest = coarsest_epsilon(program)
    for x, y in zip(found.results, expected, strict=True):
        units = UNITS * coarsest / epsilon(y.dtype) if epsilon(y.dtype) else 0
        assert difference(x, y, of_largest=True) <= units, (x, y)


@pytest.mark.parametrize("dynamic", [None, True])
def test_drawn_programs_give_equal_answers_in_onnxruntime(dynamic: bool | None) -> None:
    @QUICK
    @given(DRAWN)
    def check(drawn: Program) -> None:
        check_model(drawn, dynamic)

    check()


@pytest.mark.parametrize("name", TRANSFORMS)
def test_derivatives_and_batches_of_drawn_programs_give_equal_answers(
    name: str,
) -> None:
    @settings(QUICK, max_examples=3)
    @given(SMOOTH)
    def check(drawn: Program) -> None:
        check_model(drawn, None, Transform(name))

    check()


@pytest.mark.soak
@pytest.mark.parametrize("name", TRANSFORMS)
def test_derivatives_and_batches_of_100_drawn_programs(name: str) -> None:
    @seed(1)
    @settings(QUICK, derandomize=False, max_examples=100)
    @given(SMOOTH)
    def check(drawn: Program) -> None:
        check_model(drawn, None, Transform(name))

    check()


@pytest.mark.soak
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("part", range(10))
def test_1000_drawn_programs_give_equal_answers(
    part: int, dynamic: bool | None
) -> None:
    @seed(part)
    @settings(QUICK, derandomize=False, max_examples=50)
    @given(DRAWN)
    def check(drawn: Program) -> None:
        check_model(drawn, dynamic)

    check()
