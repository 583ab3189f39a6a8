"""Drawn programs give the same answers in the targets of exports.

Sizes are fixed, and then symbols. The ordinary suite draws a few; `make soak` draws 400
programs for each target, and 120 derivatives and batches of such. With SOAK=10 they are
1,000 and 300.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from property_tests.soak import SOAK
from property_tests.targets import jax, native, onnx, wasm
from property_tests.targets.running import ERRORS, IsRight

import hopflow as hf
from hopflow.testing.checks import expected_results
from hopflow.testing.fuzz import EVERY
from hopflow.testing.program import Program
from hopflow.testing.requires import requires
from hopflow.testing.strategies import programs
from hopflow.testing.transforms import Transform

pytestmark = [
    pytest.mark.slow,
    # A program that is found is as long as it was drawn.
    pytest.mark.filterwarnings("ignore:Generating overly large repr"),
]


class Target(NamedTuple):
    """A target of exports.

    check   (program, values, dynamic, is_right): compares a program with what it
            becomes
    few     how many programs the ordinary suite draws
    """

    check: Callable[[Any, Sequence[Any], bool | None, IsRight], None]
    few: int


TARGETS: Final = {
    "ONNX": Target(onnx.check, few=6),
    "JAX": Target(jax.check, few=4),
    "native code": Target(native.check, few=10),
    "WebAssembly": Target(wasm.check, few=4),
}
NEEDS: Final = {
    "ONNX": ("onnx>=1.23", "onnxruntime>=1.32"),
    "JAX": ("jax>=0.11",),
    "native code": ("cc",),
    "WebAssembly": ("node", "wasm-ld"),
}


of_targets = pytest.mark.parametrize(
    "target",
    [pytest.param(t, id=n, marks=requires(*NEEDS[n])) for n, t in TARGETS.items()],
)


QUICK: Final = settings(
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
VALUE: Final = Transform("value")
TRANSFORMS: Final = ("grad", "vmap", "jvp of grad")


def compare(
    target: Target, drawn: Program, dynamic: bool | None, transform: Transform = VALUE
) -> None:
    """Compare a transformed program with what it becomes in a target."""
    if not transform.fits(drawn):
        return
    function, values = transform.function(drawn, hf), transform.arguments(drawn)
    try:
        # Loops of derivatives ask again for rules that a program of none has not.
        orders = len(transform.steps) if transform.is_derivative else 0
        program = hf.export(
            function,
            tuple(map(hf.asarray, values)),
            dynamic_shapes=dynamic,
            derivatives=orders,
        )
    except ERRORS:
        return  # of whatever plain Python refuses, too

    def is_right(found: Sequence[Any]) -> bool:
        return not expected_results(drawn, transform).wrong(found)

    target.check(program, values, dynamic, is_right)


@of_targets
@pytest.mark.parametrize("dynamic", [None, True])
def test_drawn_programs_give_equal_answers(
    target: Target, dynamic: bool | None
) -> None:
    @settings(QUICK, max_examples=target.few)
    @given(DRAWN)
    def check(drawn: Program) -> None:
        compare(target, drawn, dynamic)

    check()


@of_targets
@pytest.mark.parametrize("name", TRANSFORMS)
def test_derivatives_and_batches_of_drawn_programs_give_equal_answers(
    target: Target, name: str
) -> None:
    @settings(QUICK, max_examples=target.few // 2)
    @given(SMOOTH)
    def check(drawn: Program) -> None:
        compare(target, drawn, None, Transform(name))

    check()


@pytest.mark.soak
@pytest.mark.parametrize("name", TRANSFORMS)
@of_targets
def test_derivatives_and_batches_of_many_drawn_programs(
    target: Target, name: str
) -> None:
    @seed(1)
    @settings(QUICK, derandomize=False, max_examples=10 * SOAK)
    @given(SMOOTH)
    def check(drawn: Program) -> None:
        compare(target, drawn, None, Transform(name))

    check()


@pytest.mark.soak
@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("part", range(SOAK))
@of_targets
def test_many_drawn_programs_give_equal_answers(
    target: Target, part: int, dynamic: bool | None
) -> None:
    @seed(part)
    @settings(QUICK, derandomize=False, max_examples=50)
    @given(DRAWN)
    def check(drawn: Program) -> None:
        compare(target, drawn, dynamic)

    check()
