"""`to_wasm`: an exported program as a WebAssembly module, with JavaScript, TypeScript
declarations and a page."""

import base64
import html
import re
from dataclasses import dataclass
from importlib.metadata import version
from importlib.resources import files
from os import PathLike
from pathlib import Path
from typing import Any

from hopflow.export.exported import Exported
from hopflow.export.native.build import compile_native
from hopflow.export.native.targets import WASM
from hopflow.export.wasm.interface import (
    as_script,
    declarations,
    interface,
    symbols,
)
from hopflow.export.wasm.link import link


@dataclass(frozen=True, slots=True)
class WasmCode:
    """The files of a program as WebAssembly.

    name    of the program, and of its files
    module  the WebAssembly module, `<name>.wasm`
    script  `<name>.mjs`: a JavaScript module, for pages and for Node
    types   `<name>.d.mts`: the TypeScript declarations of that
    page    `index.html`: a form that runs the program, all in one file
    """

    name: str
    module: Path
    script: Path
    types: Path
    page: Path


def to_wasm(program: Exported, folder: str | PathLike[str], name: str) -> WasmCode:
    """Write the files of a program; see `ExportedProgram.to_wasm`.

    Raises:
        ExportError: WebAssembly cannot have an operation, there is no linker, or it
            fails.
        OSError: a file cannot be written.
    """
    compiled = compile_native(program, name, WASM)
    module = link([compiled.code], symbols(compiled))
    data = interface(program, compiled)
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    found = WasmCode(
        name,
        place / f"{name}.wasm",
        place / f"{name}.mjs",
        place / f"{name}.d.mts",
        place / "index.html",
    )
    title = f"{name}: exported by hopflow {version('hopflow')}"
    text = script(data)
    types = declarations(title, data, compiled.parameters)
    found.module.write_bytes(module)
    found.script.write_text(f"// {title}.\n\n{text}", encoding="utf-8")
    found.types.write_text(types, encoding="utf-8")
    found.page.write_text(page(name, text, module), encoding="utf-8")
    return found


def script(data: dict[str, Any]) -> str:
    """The JavaScript module of a program."""
    return f"const PROGRAM = {as_script(data)};\n\n{_template('program.mjs')}"


def page(name: str, text: str, module: bytes) -> str:
    """The page of a program, with its script and its module in it."""
    parts = {
        "title": html.escape(name),
        "module": text,
        "bytes": base64.b64encode(module).decode(),
    }
    return re.sub(
        r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _template("page.html")
    )


def _template(name: str) -> str:
    return (files("hopflow") / "export" / "wasm" / name).read_text(encoding="utf-8")
