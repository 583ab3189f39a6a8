"""`requires("jax")`: the declaration of what a test needs.

    @requires("jax>=0.11", "gpu")        # skips, and prints why
    def test_...

    pytestmark = requires("cc")          # for a whole module

    torch = load("torch")                # imports it, or skips the module

A need is a tool of `TOOLS`, or a Python library by its import name, optionally with a
minimum version. The mark is `pytest.mark.requires`; the conftest.py at the root turns
it into a skip.
"""

import ctypes
import functools
import importlib
import importlib.metadata
import importlib.util
import re
import shutil
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def requires(*needs: str) -> "pytest.MarkDecorator":
    """Return the mark of a test that needs all of `needs`."""
    import pytest  # not a dependency of the package

    return pytest.mark.requires(*needs)


def load(need: str) -> ModuleType:
    """Import a library; if it is missing, skip the test module."""
    import pytest

    if reason := missing(need):
        pytest.skip(reason, allow_module_level=True)
    return importlib.import_module(_parse(need)[0])


def missing(*needs: str) -> str | None:
    """Return why a test that needs `needs` cannot run here; None: it can."""
    lacks = [f"{need} ({why})" for need in needs if (why := _lack(need))]
    return f"requires {', '.join(lacks)}" if lacks else None


@functools.cache
def _lack(need: str) -> str | None:
    if need in TOOLS:
        return TOOLS[need]()
    name, minimum = _parse(need)
    if importlib.util.find_spec(name) is None:
        return "not installed"
    if minimum is None:
        return None
    version = _version(name)
    return (
        None if _numbers(version) >= _numbers(minimum) else f"version {version} is here"
    )


def _parse(need: str) -> tuple[str, str | None]:
    match = re.fullmatch(r"(\w+)(?:>=([\d.]+))?", need)
    if match is None:
        raise ValueError(
            f"requires: `{need}` is neither one of {', '.join(sorted(TOOLS))}, nor a "
            "library like `jax` or `jax>=0.11`."
        )
    return match[1], match[2]


def _version(name: str) -> str:
    # The name of a distribution may differ from the import name.
    distributions = importlib.metadata.packages_distributions().get(name, [name])
    return importlib.metadata.version(distributions[0])


def _numbers(version: str) -> tuple[int, ...]:
    """Return the release: (2, 13, 0) of "2.13.0rc1+cpu"."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


def _executable(*names: str) -> Callable[[], str | None]:
    def lack() -> str | None:
        if any(shutil.which(name) for name in names):
            return None
        return f"no {' or '.join(names)} on PATH"

    return lack


def _gpu() -> str | None:
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no NVIDIA driver"
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return "the NVIDIA driver does not start"
    return None if count.value else "no NVIDIA device"


def _wasm_linker() -> str | None:
    is_here = shutil.which("wasm-ld") or importlib.util.find_spec("ziglang")
    return None if is_here else "neither wasm-ld on PATH nor the package ziglang"


TOOLS: dict[str, Callable[[], str | None]] = {
    "browser": _executable("chromium", "chromium-browser", "google-chrome", "firefox"),
    "cc": _executable("cc", "gcc", "clang"),
    "cmake": _executable("cmake"),
    "gpu": _gpu,
    "node": _executable("node"),
    "pkg-config": _executable("pkg-config"),
    "ptxas": _executable("ptxas"),
    "tsc": _executable("tsc"),
    "wasm-ld": _wasm_linker,
}
