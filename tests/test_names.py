"""Names of other libraries, and slips: the error says what they are called here."""

import operator

import pytest

import hopflow as hf
from hopflow import synonyms
from hopflow.errors import ArgumentTypeError, UnknownNameError


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("array", "Use `hf.asarray`."),
        ("cumsum", "Use `hf.cumulative_sum`."),
        ("cat", "Use `hf.concat`."),
        ("foreach", "Use `hf.map`."),
        ("norm", "Use `hf.linalg.vector_norm` or `hf.linalg.matrix_norm`."),
        ("svd", "Use `hf.linalg.svd`."),
        ("while_lop", "Use `hf.while_loop`."),
        ("qwertz", "What it has is in `hf.__all__`."),
        ("_while_loop", "What it has is in `hf.__all__`."),
    ],
)
def test_a_name_of_another_library(name: str, remedy: str) -> None:
    with pytest.raises(UnknownNameError) as found:
        getattr(hf, name)
    assert str(found.value) == f"hopflow has no `{name}`. {remedy}"
    assert not hasattr(hf, name)


def test_what_is_named_exists_and_only_what_does_not_is_listed() -> None:
    theirs = [
        name
        for line in synonyms._OTHERS.splitlines()
        for name in line.partition(":")[0].split()
    ]
    assert len(set(theirs)) == len(theirs)
    assert not set(theirs) & set(hf.__all__)
    for name in theirs:
        for ours in synonyms._ours(name):
            assert operator.attrgetter(ours)(hf) is not None


def test_the_module_of_tensors_is_no_function() -> None:
    with pytest.raises(ArgumentTypeError, match=r"is a module. Make .* `hf.asarray`"):
        hf.tensor([1.0])  # type: ignore[operator]
