"""Drawn programs give the bits of jitted ones as native code, called as C functions.

Sizes are fixed, and then symbols. The ordinary suite draws a few; `make soak` draws
1,000 programs, and 300 derivatives and batches of such.
"""

from typing import Any, Final

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

import hopflow as hf
from hopflow import pytree
from hopflow.errors import ExportError, HopflowError
from hopflow.testing.fuzz import EVERY
from hopflow.testing.native_code import run_native
from hopflow.testing.program import Program
from hopflow.testing.strategies import programs
from hopflow.testing.transforms import Transform

pytestmark = [pytest.mark.slow]

QUICK: Final = settings(
    max_examples=10,
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
VALUE: Final = Transform("value")
TRANSFORMS: Final = ("grad", "vmap", "jvp of grad")
SMOOTH: Final = programs("smooth", operators=EVERY)

ERRORS: Final = (HopflowError, ArithmeticError, IndexError)


def check_native(
    drawn: Program, dynamic: bool | None, transform: Transform = VALUE
) -> None:
    """Compare a program with its native code: what it gives, what it writes, and what
    it stops at."""
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
    refusal = ""
    try:
        found = run_native(program, *map(np.array, values))
    except ExportError as error:
        refusal = str(error)
    if refusal:
        assert "calls LAPACK's" in refusal
        return
    operands = [hf.asarray(np.array(x)) for x in values]
    said = ""
    try:
        jitted = hf.jit(program, dynamic=dynamic)
        results = pytree.flatten(jitted(*operands))[0]
    except ERRORS as error:
        said = f"{type(error).__name__}: {error}"
    if said:
        first, second = map(str, found.details)
        assert found.text.replace("{0}", first).replace("{1}", second) == said
        return
    assert found.status == 0, found.text
    inputs = program.signature.inputs
    written = [x for x, leaf in zip(operands, inputs, strict=True) if leaf.written]
    outputs = program.signature.outputs
    new = [x for x, leaf in zip(results, outputs, strict=True) if not leaf.same]
    expected = [np.asarray(x) for x in (*new, *written)]
    for x, y in zip(found.results, expected, strict=True):
        assert x.dtype == y.dtype
        assert x.shape == y.shape
        assert x.tobytes() == y.tobytes(), (x, y)


@pytest.mark.parametrize("dynamic", [None, True])
def test_drawn_programs_have_the_bits_of_jitted_ones(dynamic: bool | None) -> None:
    @QUICK
    @given(DRAWN)
    def check(drawn: Program) -> None:
        check_native(drawn, dynamic)

    check()


@pytest.mark.parametrize("name", TRANSFORMS)
def test_derivatives_and_batches_of_drawn_programs_have_the_same_bits(
    name: str,
) -> None:
    @settings(QUICK, max_examples=3)
    @given(SMOOTH)
    def check(drawn: Program) -> None:
        check_native(drawn, None, Transform(name))

    check()


@pytest.mark.soak
@pytest.mark.parametrize("name", TRANSFORMS)
def test_derivatives_and_batches_of_100_drawn_programs(name: str) -> None:
    @seed(1)
    @settings(QUICK, derandomize=False, max_examples=100)
    @given(SMOOTH)
    def check(drawn: Program) -> None:
        check_native(drawn, None, Transform(name))

    check()


@pytest.mark.soak
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("part", range(10))
def test_1000_drawn_programs_have_the_same_bits(
    part: int, dynamic: bool | None
) -> None:
    @seed(part)
    @settings(QUICK, derandomize=False, max_examples=50)
    @given(DRAWN)
    def check(drawn: Program) -> None:
        check_native(drawn, dynamic)

    check()
