"""The library `jax`, which only this package uses, and only where it is called."""

import importlib
from functools import cache
from typing import Any

from hopflow.errors import ExportError


@cache
def library() -> Any:
    """The module `jax`.

    Raises:
        ExportError: it is not installed.
    """
    try:
        jax: Any = importlib.import_module("jax")
    except ImportError as error:
        raise ExportError(
            "to_jax: the library `jax` is missing. Install it: "
            "`pip install 'hopflow[jax]'`."
        ) from error
    for name in ("export", "experimental.checkify", "extend.core"):
        importlib.import_module(f"jax.{name}")
    return jax


def wide_library() -> Any:
    """The same, where arrays may have 64 bits.

    Raises:
        ExportError: it is not installed, or makes arrays of 32 bits.
    """
    jax = library()
    if not jax.config.jax_enable_x64:
        raise ExportError(
            "to_jax: programs have int64 and float64, and JAX makes them int32 and "
            "float32 unless it is told not to. Call "
            "`jax.config.update('jax_enable_x64', True)` when the process starts, or "
            "build and call the function within `with jax.enable_x64(True):`."
        )
    return jax
