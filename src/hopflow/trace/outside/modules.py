"""Which code is watched, and which modules are assumed constant."""

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
        *(
            "optree",
            "llvmlite",
            "sympy",
            "mpmath",
            "gmpy2",
        ),  # dependencies that run within traces
    )
)
_STANDARD: Final = tuple(sysconfig.get_path(n) for n in ("stdlib", "platstdlib"))
_INSTALLED: Final = ("site-packages", "dist-packages")
# Users' modules inherit `__call__` and other methods from here.
_NN: Final = str(Path(__file__).resolve().parents[2] / "nn")


def is_library(name: Any) -> bool:
    """Whether a module of this name is a library, whose contents are constant."""
    return isinstance(name, str) and name.partition(".")[0] in _LIBRARIES


def is_library_module(value: Any) -> bool:
    """Whether a value is a library module."""
    return isinstance(value, ModuleType) and is_library(value.__name__)


def is_watched(frame: FrameType) -> bool:
    """Whether the code of a frame is watched: all code except that of hopflow and of
    some libraries, and code that these have generated."""
    code = frame.f_code
    file = code.co_filename
    if not _is_watched(file) or code.co_name == "__del__":
        return False
    # Callbacks of the garbage collector run at any time, and affect no result.
    if any(getattr(call, "__code__", None) is code for call in gc.callbacks):
        return False
    name = frame.f_globals.get("__name__")
    is_generated = file.startswith("<")
    return not is_generated or not (is_library(name) or _is_of_tuple(name))


def _is_of_tuple(name: Any) -> bool:
    """Whether it is the module name that `namedtuple` gives to generated code."""
    return isinstance(name, str) and name.startswith("namedtuple_")


@cache
def _is_watched(file: str) -> bool:
    if is_own_file(file):
        return str(Path(file).resolve()).startswith(_NN)
    for folder in _INSTALLED:
        _, separator, inner = file.rpartition(f"/{folder}/")
        if separator:
            return not is_library(inner.partition("/")[0])
    return not file.startswith((*_STANDARD, "<hopflow"))
