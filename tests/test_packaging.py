"""What pyproject.toml promises; .ci/run tries the wheel itself."""

import ast
import fnmatch
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "hopflow"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LINKED = ("hops", "autograd")
# Where the name that one imports is not the name that one installs.
DISTRIBUTIONS = {"cuda": "cuda-bindings", "sklearn": "scikit-learn"}
# Looked for, and done without where they are missing: no extra installs them.
OPTIONAL = {"cuda-bindings", "onnx", "pytest", "torch"}


def files_of_the_package() -> list[Path]:
    return [
        Path(folder, file)
        for folder, folders, files in os.walk(SOURCE, followlinks=True)
        for file in files
        if "__pycache__" not in folder and not folder.endswith(".egg-info")
    ]


@pytest.mark.parametrize("name", LINKED)
def test_a_top_folder_refuses_to_be_imported_under_its_short_name(name: str) -> None:
    attempt = subprocess.run(
        [sys.executable, "-c", f"import {name}"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert attempt.returncode == 1
    assert f"ImportError: `{name}` is a folder of hopflow" in attempt.stderr
    assert f"`hopflow.{name}`" in attempt.stderr


@pytest.mark.parametrize("name", LINKED)
def test_a_top_folder_is_a_relative_link_in_the_package(name: str) -> None:
    assert (SOURCE / name).is_symlink()
    assert (SOURCE / name).readlink() == Path("..", "..", name)
    assert (SOURCE / name / "__init__.py").samefile(ROOT / name / "__init__.py")


def test_every_folder_with_code_is_a_package() -> None:
    # setuptools leaves a folder without `__init__.py` out of the wheel.
    folders = {file.parent for file in files_of_the_package() if file.suffix == ".py"}
    assert [f for f in sorted(folders) if not (f / "__init__.py").exists()] == []


def test_every_file_that_is_not_code_goes_into_the_wheel() -> None:
    patterns = PROJECT["tool"]["setuptools"]["package-data"]["hopflow"]
    names = {
        file.relative_to(SOURCE).as_posix()
        for file in files_of_the_package()
        if file.suffix != ".py"
    }
    assert [
        n for n in sorted(names) if not any(fnmatch.fnmatch(n, p) for p in patterns)
    ] == []


def third_party_imports(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Import(names=aliases):
                names |= {alias.name.split(".")[0] for alias in aliases}
            case ast.ImportFrom(module=str(module), level=0):
                names.add(module.split(".")[0])
    return names - set(sys.stdlib_module_names) - {"hopflow"}


def test_every_library_that_the_package_imports_is_declared() -> None:
    project = PROJECT["project"]
    extras = project["optional-dependencies"].values()
    declared = {
        re.split(r"[<>=!~;\[ ]", line)[0].lower().replace("_", "-")
        for line in (*project["dependencies"], *(x for extra in extras for x in extra))
    }
    imported = {
        DISTRIBUTIONS.get(name, name).lower().replace("_", "-")
        for path in files_of_the_package()
        if path.suffix == ".py"
        for name in third_party_imports(path)
    }
    assert imported - declared - OPTIONAL == set()


def test_the_console_script_is_a_function_of_the_package() -> None:
    module, _, function = PROJECT["project"]["scripts"]["hopflow"].partition(":")
    path = ROOT / "src" / Path(*module.split(".")).with_suffix(".py")
    names = {n.name for n in ast.parse(path.read_text()).body if hasattr(n, "name")}
    assert function in names
