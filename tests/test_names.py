"""Names of other libraries, and slips: the error says what they are called here."""

import importlib
import operator
from importlib.metadata import version
from types import ModuleType

import pytest

import hopflow as hf
from hopflow import synonyms
from hopflow.errors import ArgumentTypeError, UnknownNameError


def test_what_the_package_lists_is_public() -> None:
    assert set(hf.__all__) < set(dir(hf))
    hidden = [name for name in dir(hf) if name.startswith("_")]
    assert hidden == [
        *("__array_api_version__", "__array_namespace_info__", "__doc__"),
        "__version__",
    ]
    assert all(hasattr(hf, name) for name in dir(hf))
    modules = {name for name in dir(hf) if type(getattr(hf, name)) is ModuleType}
    assert modules == {"errors", "fx", "linalg", "nn", "random"}


def test_the_package_has_the_version_that_is_installed() -> None:
    assert hf.__version__ == version("hopflow")


def test_linalg_is_a_module_that_can_be_imported() -> None:
    found = importlib.import_module("hopflow.linalg")
    assert found is hf.linalg
    assert found.det is hf.linalg.det


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
        ("whlie_loop", "Use `hf.while_loop`."),
        ("reshpe", "Use `hf.reshape`."),
        ("Grad", "Use `hf.grad`."),
        ("foriloop", "Use `hf.fori_loop`."),
        ("broadcast_ta", "Use `hf.broadcast_to`."),
        ("conv2d", "Use `hf.conv`."),
        ("conv_transpose1d", "Use `hf.conv_transpose`."),
        ("psum", "What it has is in `hf.__all__`."),
        ("sinc", "What it has is in `hf.__all__`."),
        ("isin", "What it has is in `hf.__all__`."),
        ("log3", "What it has is in `hf.__all__`."),
        ("scat", "What it has is in `hf.__all__`."),
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
        for ours in synonyms._synonyms(name):
            assert operator.attrgetter(ours)(hf) is not None


def test_the_module_of_tensors_is_no_function() -> None:
    with pytest.raises(ArgumentTypeError, match=r"is a module. Make .* `hf.asarray`"):
        hf.tensor([1.0])  # type: ignore[operator]
