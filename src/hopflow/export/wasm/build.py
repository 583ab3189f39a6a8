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

from hopflow.export.native.build import compile_native
from hopflow.export.native.entry import shaped
from hopflow.export.native.parameters import Exported, Parameters
from hopflow.export.native.targets import WASM
from hopflow.export.wasm.interface import as_script, declarations, interface
from hopflow.export.wasm.link import link


@dataclass(frozen=True, slots=True)
class WasmCode:
    """The files of a program as WebAssembly.

    name    of the program, and of its files
    module  the WebAssembly module, `<name>.wasm`
    script  `<name>.mjs`: a JavaScript module, for pages and for Node
    types   `<name>.d.ts`: the TypeScript declarations of that
    page    `index.html`: a form that runs the program, all in one file
    """

    name: str
    module: Path
    script: Path
    types: Path
    page: Path


@dataclass(frozen=True, slots=True)
class Linked:
    """A program that is linked, and not written to files yet.

    data    what `interface` says of it
    """

    module: bytes
    data: dict[str, Any]
    parameters: Parameters


def to_wasm(program: Exported, folder: str | PathLike[str], name: str) -> WasmCode:
    """Write the files of a program; see `ExportedProgram.to_wasm`.

    Raises:
        ExportError: WebAssembly cannot have an operation, there is no linker, or it
            fails.
        OSError: a file cannot be written.
    """
    linked = link_program(program, name)
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    found = WasmCode(
        name,
        place / f"{name}.wasm",
        place / f"{name}.mjs",
        place / f"{name}.d.ts",
        place / "index.html",
    )
    title = f"{name}: exported by hopflow {version('hopflow')}"
    text = script(linked.data)
    found.module.write_bytes(linked.module)
    found.script.write_text(f"// {title}.\n\n{text}", encoding="utf-8")
    found.types.write_text(
        declarations(title, linked.data, linked.parameters), encoding="utf-8"
    )
    found.page.write_text(page(name, text, linked.module), encoding="utf-8")
    return found


def link_program(program: Exported, name: str) -> Linked:
    """Compile and link a program, with the functions beside it.

    Raises:
        ExportError: WebAssembly cannot have an operation, there is no linker, or it
            fails.
    """
    compiled = compile_native(program, name, WASM)
    data = interface(name, program, compiled.parameters)
    exports = [name, f"{name}_workspace", f"{name}_error_text"]
    if shaped(compiled.parameters):
        exports.append(f"{name}_sizes")
    module = link(compiled.code, [*exports, *data["initial"].values()])
    return Linked(module, data, compiled.parameters)


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
