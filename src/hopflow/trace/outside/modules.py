"""Whose code is watched, and which modules are taken not to change."""

import gc
import sys
import sysconfig
from functools import cache
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, Final

from hopflow.tracebacks import is_own_file

_LIBRARIES: Final = frozenset(
    (
        *sys.stdlib_module_names,
        *("hopflow", "numpy", "scipy", "jax", "torch", "ml_dtypes"),
        *("optree", "llvmlite", "sympy", "mpmath", "gmpy2"),  # what runs within traces
    )
)
_STANDARD: Final = tuple(sysconfig.get_path(n) for n in ("stdlib", "platstdlib"))
_INSTALLED: Final = ("site-packages", "dist-packages")
# Modules are classes of a user's, which inherit `__call__` and such from here.
_NN: Final = str(Path(__file__).resolve().parents[2] / "nn")


def is_library(name: Any) -> bool:
    """Whether a module of this name, or what stands in it, is taken not to change."""
    return isinstance(name, str) and name.partition(".")[0] in _LIBRARIES


def is_library_module(value: Any) -> bool:
    """Whether it is such a module."""
    return isinstance(value, ModuleType) and is_library(value.__name__)


def is_watched(frame: FrameType) -> bool:
    """Whether the code of a frame is watched: all but hopflow's, and that of some
    libraries, what they have generated too."""
    code = frame.f_code
    file = code.co_filename
    if not _is_watched(file) or code.co_name == "__del__":
        return False
    # The garbage collector may run at any time, and no result depends on what it calls.
    if any(getattr(call, "__code__", None) is code for call in gc.callbacks):
        return False
    name = frame.f_globals.get("__name__")
    is_generated = file.startswith("<")
    return not is_generated or not (is_library(name) or _is_of_tuple(name))


def _is_of_tuple(name: Any) -> bool:
    """Whether it is the module that `namedtuple` invents for what it generates."""
    return isinstance(name, str) and name.startswith("namedtuple_")


@cache
def _is_watched(file: str) -> bool:
    if is_own_file(file):
        return str(Path(file).resolve()).startswith(_NN)
    for folder in _INSTALLED:
        _, found, inner = file.rpartition(f"/{folder}/")
        if found:
            return not is_library(inner.partition("/")[0])
    return not file.startswith((*_STANDARD, "<hopflow"))
