"""Drawn programs give equal answers as functions of JAX.

Sizes are fixed, and then symbols; derivatives are hopflow's, exported, and JAX's own.
The ordinary suite draws a few; `make soak` draws 1,000 programs, and 300 derivatives
and batches of such.
"""

import re
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

import hopflow as hf
from hopflow import pytree
from hopflow.dtypes import as_dtype, finfo
from hopflow.errors import ExportError, HopflowError
from hopflow.testing.fuzz import EVERY
from hopflow.testing.program import Program
from hopflow.testing.requires import load, requires
from hopflow.testing.strategies import programs
from hopflow.testing.transforms import Transform
from hopflow.testing.units import coarsest_epsilon, difference, epsilon

pytestmark = [pytest.mark.slow, requires("jax>=0.11")]

QUICK: Final = settings(
    max_examples=4,
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
SMOOTH: Final = programs("smooth", operators=EVERY)
UNITS: Final = 1 << 10
"""The difference that rounding makes in a program, in units of the largest element of a
result, in the least exact dtype that the program computes in."""

VALUE: Final = Transform("value")
TRANSFORMS: Final = ("grad", "vmap", "jvp of grad")

ERRORS: Final = (HopflowError, ArithmeticError, IndexError)
UNKNOWN: Final = "only the run|change sizes|computed from a number that JAX traces"
"""What is said of sizes that JAX cannot know."""


@pytest.fixture(autouse=True)
def wide() -> Iterator[None]:
    with load("jax").enable_x64(True):
        yield


def check_function(
    drawn: Program, dynamic: bool | None, transform: Transform = VALUE
) -> None:
    """Compare a program with its function of JAX: what it gives, what it writes, what
    it stops at."""
    if not transform.fits(drawn):
        return
    function = transform.function(drawn, hf)
    values = [without_subnormals(np.array(x)) for x in transform.arguments(drawn)]
    try:
        given = tuple(map(hf.asarray, values))
        orders = len(transform.steps) if transform.is_derivative else 0
        program: Any = hf.export(
            function, given, dynamic_shapes=dynamic, derivatives=orders
        )
    except ERRORS:
        return  # of whatever plain Python refuses, too
    jax = load("jax")
    try:
        fn = program.to_jax(asserts="checkify")
        run = jax.jit(jax.experimental.checkify.checkify(fn))
        error, found = run(*map(np.array, values))
    except ExportError as refused:
        if not re.search(UNKNOWN, str(refused)):
            raise
        return
    compare(program, values, error.get(), found)


def compare(program: Any, values: Any, failed: str | None, found: Any) -> None:
    operands = [hf.asarray(np.array(x)) for x in values]
    stopped: Exception | None = None
    try:
        results = pytree.flatten(program(*operands))[0]
    except ERRORS as error:
        stopped = error
    assert bool(failed) is bool(stopped), (failed, stopped)
    if stopped:
        return
    signature = program.signature
    written = [
        operand
        for operand, argument in zip(operands, signature.inputs, strict=True)
        if argument.written
    ]
    given, new = found if signature.written else (found, {})
    own = [np.asarray(x) for x in (*pytree.flatten(given)[0], *new.values())]
    expected = [np.asarray(x) for x in (*results, *written)]
    coarsest = coarsest_epsilon(program)
    for x, y in zip(own, expected, strict=True):
        units = UNITS * coarsest / epsilon(y.dtype) if epsilon(y.dtype) else 0
        assert difference(x, y, of_largest=True, flushed=True) <= units, (x, y)


def without_subnormals(x: Any) -> Any:
    """An array with 0 for subnormal numbers, for which XLA takes them."""
    dtype = as_dtype(x.dtype)
    if not dtype.is_float:
        return x
    least = float(finfo(dtype).smallest_normal)
    return np.where(np.abs(x.astype(np.float64)) < least, 0, x).astype(x.dtype)


@pytest.mark.parametrize("dynamic", [None, True])
def test_drawn_programs_give_equal_answers_in_jax(dynamic: bool | None) -> None:
    @QUICK
    @given(DRAWN)
    def check(drawn: Program) -> None:
        check_function(drawn, dynamic)

    check()


@pytest.mark.parametrize("name", TRANSFORMS)
def test_derivatives_and_batches_of_drawn_programs_give_equal_answers(
    name: str,
) -> None:
    @settings(QUICK, max_examples=2)
    @given(SMOOTH)
    def check(drawn: Program) -> None:
        check_function(drawn, None, Transform(name))

    check()


@pytest.mark.soak
@pytest.mark.parametrize("name", TRANSFORMS)
def test_derivatives_and_batches_of_100_drawn_programs(name: str) -> None:
    @seed(1)
    @settings(QUICK, derandomize=False, max_examples=100)
    @given(SMOOTH)
    def check(drawn: Program) -> None:
        check_function(drawn, None, Transform(name))

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
        check_function(drawn, dynamic)

    check()
