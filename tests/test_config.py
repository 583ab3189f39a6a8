"""`hf.config` and its environment variables take what has a meaning, and no more."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import hopflow as hf
from hopflow.config import Config
from hopflow.errors import ArgumentTypeError, ArgumentValueError

FLAGS = ["verify", "check_bounds", "guard_pages", "require_in_place"]
COUNTS = ["print_width", "kernel_cache_bytes", "cache_dir_bytes", "num_threads"]


@pytest.fixture
def config() -> Config:
    return Config()


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize("value", ["yes", "", 1, 0, None])
def test_a_flag_is_a_bool(config: Config, name: str, value: Any) -> None:
    before = getattr(config, name)
    with pytest.raises(ArgumentTypeError, match=f"`{name}` must be True or False"):
        setattr(config, name, value)
    assert getattr(config, name) is before


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("value", ["4", 4.0, True, None])
def test_a_count_is_an_int(config: Config, name: str, value: Any) -> None:
    with pytest.raises(ArgumentTypeError, match=f"`{name}` must be an int"):
        setattr(config, name, value)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("print_width", 0),
        ("kernel_cache_bytes", -1),
        ("cache_dir_bytes", -1),
        ("num_threads", 0),
        ("num_threads", 2**70),
    ],
)
def test_a_count_has_a_range(config: Config, name: str, value: int) -> None:
    with pytest.raises(
        ArgumentValueError, match=f"`{name}` must be an int .* is -?\\d"
    ):
        setattr(config, name, value)


@pytest.mark.parametrize("value", [None, 3, Path("cache")])
def test_a_folder_is_a_str(config: Config, value: Any) -> None:
    with pytest.raises(ArgumentTypeError, match="`cache_dir` must be a str"):
        config.cache_dir = value


def test_what_is_in_range_is_taken(config: Config) -> None:
    for name in COUNTS:
        setattr(config, name, 7)
        assert getattr(config, name) == 7
    for name in FLAGS:
        setattr(config, name, True)
        assert getattr(config, name) is True
    assert config.threads.value == 7


def test_a_setting_that_there_is_not_is_an_error(config: Config) -> None:
    with pytest.raises(AttributeError, match=r"`verfy`\. Did you mean `verify`"):
        config.verfy = True
    with pytest.raises(AttributeError, match=r"`colour`\. There are .*'verify'"):
        config.colour = 1


def test_the_memory_that_compiled_code_reads_stays(config: Config) -> None:
    with pytest.raises(ArgumentTypeError, match="Assign `num_threads`"):
        config.threads = 4  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("HOPFLOW_VERIFY", "yes", "0, 1, true or false, and is 'yes'"),
        ("HOPFLOW_NUM_THREADS", "many", "from 1 to .*, and is 'many'"),
        ("HOPFLOW_NUM_THREADS", "0", "from 1 to .*, and is '0'"),
    ],
)
def test_an_environment_variable_is_checked(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str, message: str
) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(ArgumentValueError, match=f"{name} must be .*{message}"):
        Config()


@pytest.mark.parametrize(
    ("text", "expected"), [("1", True), ("true", True), ("False", False), ("", False)]
)
def test_an_environment_variable_switches_a_flag(
    monkeypatch: pytest.MonkeyPatch, text: str, expected: bool
) -> None:
    monkeypatch.setenv("HOPFLOW_VERIFY", text)
    assert Config().verify is expected


def test_the_environment_sets_the_number_of_threads() -> None:
    code = "import hopflow as hf; print(hf.config.num_threads)"
    environment = {**os.environ, "HOPFLOW_NUM_THREADS": "3"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, check=True)
    assert done.stdout == b"3\n"
    assert hf.config.num_threads >= 1
