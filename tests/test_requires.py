"""The mark that skips where a library or a tool is missing."""

import subprocess
import sys
from pathlib import Path

import pytest

from hopflow.testing import requires as module
from hopflow.testing.requires import load, missing, requires

ROOT = Path(__file__).parent.parent


def test_what_is_installed_is_not_missing() -> None:
    assert missing("numpy", "numpy>=2.0", "ml_dtypes>=0.5") is None


def test_a_version_is_compared_by_number() -> None:
    # numpy 2.10 would be newer than 2.9, and no numpy is 99.
    assert missing("numpy>=1.9") is None
    assert missing("numpy>=99") is not None


@pytest.mark.parametrize(
    ("need", "reason"),
    [
        ("no_such_library", "requires no_such_library (not installed)"),
        ("numpy>=99", r"requires numpy>=99 (version "),
    ],
)
def test_the_reason_names_the_need_and_what_is_here(need: str, reason: str) -> None:
    found = missing("numpy", need)
    assert found is not None
    assert found.startswith(reason)


def test_a_tool_is_looked_for_in_its_own_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(module.TOOLS, "anvil", lambda: "no anvil in the shop")
    assert missing("anvil") == "requires anvil (no anvil in the shop)"


def test_a_need_that_is_neither_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"`jax<1` is neither one of browser, cc, "):
        missing("jax<1")


def test_load_imports_a_library() -> None:
    assert load("numpy>=2.0").__name__ == "numpy"


def test_load_skips_the_module_of_one_that_is_missing() -> None:
    with pytest.raises(pytest.skip.Exception, match=r"no_such_library \(not installed"):
        load("no_such_library")


def test_requires_is_the_mark() -> None:
    assert requires("jax", "cc").mark == pytest.mark.requires("jax", "cc").mark


def test_a_test_that_lacks_its_library_skips_and_says_why(tmp_path: Path) -> None:
    test = tmp_path / "test_needy.py"
    test.write_text(
        "import pytest\n"
        "@pytest.mark.requires('no_such_library')\n"
        "def test_a(): assert False\n"
        "@pytest.mark.requires('numpy')\n"
        "def test_b(): pass\n"
    )
    ours = ["-c", f"{ROOT}/pyproject.toml", "-p", "conftest", "-p", "no:cacheprovider"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *ours, str(test)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "1 passed, 1 skipped" in run.stdout, run.stdout + run.stderr
    assert "requires no_such_library (not installed)" in run.stdout
