"""Linking object code to a WebAssembly module."""

import importlib.util
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from hopflow.errors import ExportError

IMPORTED: Final = ("fmod", "fmodf")
"""Functions that JavaScript provides; what it computes is exact, as theirs is."""
_STACK: Final = 1 << 20
"""Bytes. It stands first in the memory, so that an overflow traps."""


def link(objects: Sequence[bytes], exports: Sequence[str]) -> bytes:
    """Link object code to a module that exports these symbols.

    Raises:
        ExportError: there is no linker here, or it fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        module, allowed = place / "module", place / "imported"
        sources = [place / f"{k}.o" for k in range(len(objects))]
        for source, code in zip(sources, objects, strict=True):
            source.write_bytes(code)
        allowed.write_text("\n".join(IMPORTED))
        words = [
            *_linker(),
            "--no-entry",
            "--stack-first",
            "--strip-all",
            f"-zstack-size={_STACK}",
            f"--allow-undefined-file={allowed}",
            "--export=__heap_base",
            *(f"--export={name}" for name in exports),
            "-o",
            str(module),
            *map(str, sources),
        ]
        ran = subprocess.run(words, capture_output=True, text=True, check=False)
        if ran.returncode:
            raise ExportError(f"to_wasm: wasm-ld has failed: {ran.stderr.strip()}")
        return module.read_bytes()


def _linker() -> list[str]:
    """The command of the linker: that of the system, or of the package `ziglang`.

    Raises:
        ExportError: there is none.
    """
    if path := shutil.which("wasm-ld"):
        return [path]
    if importlib.util.find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang", "wasm-ld"]
    raise ExportError(
        "to_wasm: there is no linker for WebAssembly here, neither `wasm-ld` on PATH "
        "nor the package `ziglang`. Install it: pip install 'hopflow[wasm]'."
    )
