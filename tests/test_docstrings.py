"""The examples in docstrings print what they say."""

import ast
import doctest
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import hopflow as hf

ROOT = Path(hf.__file__).parent


def files() -> Iterator[Path]:
    """The files of the package, those of its linked folders too."""
    for folder, _, names in os.walk(ROOT, followlinks=True):
        yield from (Path(folder, name) for name in names if name.endswith(".py"))


def examples() -> Iterator[doctest.DocTest]:
    """The texts with examples in the package, also those that are no docstring of a
    function: operations have theirs in records."""
    parser = doctest.DocTestParser()
    for path in sorted(files()):
        for node in ast.walk(ast.parse(path.read_text())):
            if not (isinstance(node, ast.Constant) and isinstance(node.value, str)):
                continue
            if ">>> " in node.value:
                name = f"{path.relative_to(ROOT)}:{node.lineno}"
                names = {"hf": hf, "np": np}
                yield parser.get_doctest(node.value, names, name, str(path), 0)


@pytest.mark.parametrize("example", [*examples()], ids=lambda e: e.name)
def test_an_example_prints_what_it_says(example: doctest.DocTest) -> None:
    assert example.examples
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    assert not runner.run(example).failed
