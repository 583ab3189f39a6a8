"""The command: what it prints, and its exit status."""

import importlib.util
import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from hopflow import cli, demo
from hopflow.testing import checks, fuzz


@pytest.mark.parametrize(
    "arguments", [["--help"], ["demo", "--help"], ["fuzz", "--help"]]
)
def test_help_is_a_success(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(arguments)
    assert end.value.code == 0
    assert "usage: hopflow" in capsys.readouterr().out


def test_without_a_command_the_help_is_shown(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main([]) == 0
    assert "usage: hopflow" in capsys.readouterr().out


def test_the_package_can_be_run_as_the_command() -> None:
    run = [sys.executable, "-m", "hopflow", "--version"]
    found = subprocess.run(run, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == f"hopflow {version('hopflow')}"


def test_fuzz_says_what_it_did(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["fuzz", "--programs", "3", "--output", str(tmp_path)]
    assert cli.main(arguments) == 0
    said = capsys.readouterr().out
    assert "operators and rules" in said
    assert "3 programs, 0 failures" in said


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("--minutes", text) for text in ("0", "-1", "inf", "soon")),
        *(("--programs", text) for text in ("0", "1.5")),
        ("--profile", "thorough"),
    ],
)
def test_fuzz_needs_a_limit(
    option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["fuzz", option, value])
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert option in said
    assert "_positive" not in said
    assert "_count" not in said


def test_fuzz_says_at_once_that_it_has_nowhere_to_write(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.touch()
    for folder in (file, file / "inside"):
        assert cli.main(["fuzz", "--programs", "1", "--output", str(folder)]) == 2
        said = capsys.readouterr().err
        assert f"nothing can be written to {folder}" in said
        assert "Name another folder by `--output`." in said


def test_fuzz_says_what_it_did_until_it_was_interrupted(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    right, calls = checks.check, iter([False, False, True])

    def check(*args: Any) -> Any:
        if next(calls):
            raise KeyboardInterrupt
        return right(*args)

    monkeypatch.setattr(fuzz, "check", check)
    options = ["--profile", "cheap", "--output", str(tmp_path)]
    assert cli.main(["fuzz", *options]) == 130
    said = capsys.readouterr().out
    assert "2 programs, of which 0 (0.0%) hang on rounding" in said
    assert "Ctrl-C has ended it." in said
    assert json.loads((tmp_path / "summary.json").read_text())["programs"] == {
        "cheap": 2
    }


def test_the_command_is_installed_and_tells_its_version() -> None:
    run = subprocess.run(
        [sys.executable, "-m", "hopflow.cli", "--version"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout == f"hopflow {version('hopflow')}\n"


def test_a_word_that_is_no_command_is_a_wrong_use(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main(["dance"])
    assert end.value.code == 2
    assert "invalid choice: 'dance'" in capsys.readouterr().err


def test_what_is_not_installed_is_named_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: None if name in ("sklearn", "rich") else find(name),
    )
    assert cli.main(["demo"]) == 2
    said = capsys.readouterr().err
    assert "rich, scikit-learn must be installed" in said
    assert "pip install 'hopflow[demo]'" in said


@pytest.mark.parametrize("agreed", [True, False])
def test_the_exit_status_says_whether_all_agreed(
    monkeypatch: pytest.MonkeyPatch, agreed: bool
) -> None:
    folders: list[Path] = []

    def run(folder: Path) -> bool:
        folders.append(folder)
        return agreed

    monkeypatch.setattr(demo, "missing_libraries", list)
    monkeypatch.setattr(demo, "run", run)
    assert cli.main(["demo", "--output", "elsewhere"]) == (0 if agreed else 1)
    assert cli.main(["demo"]) == (0 if agreed else 1)
    assert folders == [Path("elsewhere"), Path("demo_output")]


def test_the_command_loads_no_library_of_the_demo_before_it_runs() -> None:
    code = "import sys, hopflow.cli; print(*sys.modules)"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert "hopflow.demo" in loaded
    assert {"jax", "matplotlib", "rich", "sklearn"} & set(loaded) == set()
