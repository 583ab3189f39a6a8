"""Programs drawn from seeds do in hopflow what they do in NumPy, and in JAX.

The generator, its renderers and the judge are in `property_tests/differential`, and
share nothing with `hopflow.testing`: a fault of one generator is not one of the other.
`python -m property_tests.differential --programs N --seed S` draws more.

Its first runs found no fault. A product of float32 vectors of 10**6 elements was summed
in another order where `hf.jit` fuses it, and is off by 5e-5 where NumPy's is off by
1e-5; so products of over 5,000 terms are not drawn.
"""

import pytest
from property_tests.differential.grammar import Block, Input, Let, Program, Type
from property_tests.differential.judge import check, run, shrink

import hopflow as hf

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("first", range(0, 60, 6))
def test_programs_agree_with_numpy_and_jax(first: int) -> None:
    for seed in range(first, first + 6):
        script = run(seed)
        assert script is None, script


def doubled(text: dict[str, str]) -> Program:
    """A program of two statements, of which the second is `text`."""
    kind = Type("int64", (3,))
    body = (
        Let("v2", kind, ("v1",), "{0} + 1"),
        Let("v3", kind, ("v2",), text),
    )
    types = dict.fromkeys(("v1", "v2", "v3"), kind)
    block = Block((), body, ("v3", "v2"))
    return Program(0, "plain", (Input("v1", kind, 5),), block, types)


def test_a_disagreement_is_found_and_shrunk() -> None:
    right = {"hf": "{0} * 2", "np": "{0} * 2", "jnp": "{0} * 2"}
    assert check(doubled(right)) is None
    wrong = doubled(right | {"hf": "{0} * 3"})
    failure = check(wrong)
    assert failure is not None
    assert failure.what == "hopflow eager"
    small, again = shrink(wrong, failure)
    assert small.block.results == ("v3",)
    assert small.statements == 2
    assert again.what == failure.what


def test_an_error_of_the_program_is_a_disagreement() -> None:
    text = {"hf": "hf.reshape({0}, (7,))", "np": "{0}", "jnp": "{0}"}
    failure = check(doubled(text))
    assert failure is not None
    assert failure.what.startswith("hopflow eager raised")
    assert hf.errors.ShapeError.__name__ in failure.what
