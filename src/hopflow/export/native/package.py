"""Linking a program to a shared library, and the files by which it is found."""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

from hopflow.compiler.cpu.target import CpuTarget
from hopflow.errors import ExportError

_COMPILERS: Final = {
    "x86_64": ("cc", "gcc", "clang"),
    "aarch64": ("aarch64-linux-gnu-gcc",),
    "riscv64": ("riscv64-linux-gnu-gcc",),
}
"""By architecture the compilers that link for it, where they are on PATH."""


def linker(target: CpuTarget, is_host: bool) -> list[str] | None:
    """The command that links a shared library for a target; None: there is none here.

    A compiler of the system, or the linker of the package `ziglang`.
    """
    if target.is_microcontroller:
        return None
    kind = target.triple.split("-")[0]
    names = ("cc", "gcc", "clang") if is_host else _COMPILERS.get(kind, ())
    for name in names:
        if path := shutil.which(name):
            return [path, "-shared"]
    if "linux" in target.triple and importlib.util.find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang", "ld.lld", "-shared"]
    return None


def link(command: list[str], objects: list[Path], library: Path) -> None:
    """Link object files to a shared library.

    Raises:
        ExportError: the linker fails.
    """
    is_compiler = "ld.lld" not in command
    soname = f"-Wl,-soname,{library.name}" if is_compiler else f"-soname={library.name}"
    options = [] if sys.platform == "darwin" else [soname]
    options += ["-lm"] if is_compiler else []
    words = [*command, *options[:1], "-o", str(library), *map(str, objects)]
    ran = subprocess.run(
        [*words, *options[1:]], capture_output=True, text=True, check=False
    )
    if ran.returncode:
        raise ExportError(
            f"to_native: `{' '.join(words)}` has failed: {ran.stderr.strip()}"
        )


def library_name(name: str) -> str:
    """The file of a shared library on this system."""
    return f"lib{name}.dylib" if sys.platform == "darwin" else f"lib{name}.so"


def cmake_config(name: str, library: str | None) -> str:
    """The file by which CMake's `find_package(name CONFIG)` finds a program."""
    lines = [
        f"# `find_package({name} CONFIG)` finds this file where {name}_DIR is its",
        f"# folder. Link with {name}::{name}"
        + (f", the library, or {name}::object." if library else ", the object code."),
        f"if(NOT TARGET {name}::object)",
        f"  add_library({name}::object OBJECT IMPORTED)",
        f"  set_target_properties({name}::object PROPERTIES",
        f'    IMPORTED_OBJECTS "${{CMAKE_CURRENT_LIST_DIR}}/{name}.o"',
        '    INTERFACE_INCLUDE_DIRECTORIES "${CMAKE_CURRENT_LIST_DIR}"',
        "    INTERFACE_LINK_LIBRARIES m)",
    ]
    if library:
        lines += [
            f"  add_library({name}::{name} SHARED IMPORTED)",
            f"  set_target_properties({name}::{name} PROPERTIES",
            f'    IMPORTED_LOCATION "${{CMAKE_CURRENT_LIST_DIR}}/{library}"',
            '    INTERFACE_INCLUDE_DIRECTORIES "${CMAKE_CURRENT_LIST_DIR}")',
        ]
    else:
        lines += [
            f"  add_library({name}::{name} INTERFACE IMPORTED)",
            f"  target_link_libraries({name}::{name} INTERFACE {name}::object)",
        ]
    return "\n".join([*lines, "endif()", ""])


def pkg_config(name: str, version: str, library: str | None) -> str:
    """The file by which `pkg-config` finds a program."""
    libs = f"-L${{pcfiledir}} -l{name}" if library else f"${{pcfiledir}}/{name}.o -lm"
    return (
        f"Name: {name}\n"
        f"Description: {name}, exported by hopflow\n"
        f"Version: {version}\n"
        "Cflags: -I${pcfiledir}\n"
        f"Libs: {libs}\n" + ("Libs.private: -lm\n" if library else "")
    )
