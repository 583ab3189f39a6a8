"""`to_native`: an exported program as object code with a C header, and what belongs to
it."""

from dataclasses import dataclass
from importlib.metadata import version
from os import PathLike
from pathlib import Path
from typing import Final

from hopflow.compiler.cpu import library
from hopflow.compiler.cpu.emit import emit_into
from hopflow.compiler.cpu.unit import Unit
from hopflow.compiler.kernel_program.program import equations
from hopflow.compiler.kernel_program.rewriting import programs
from hopflow.compiler.llvm.module import Module, symbol
from hopflow.compiler.llvm.software import with_software
from hopflow.compiler.pipeline import kernels_of, lower
from hopflow.compiler.reuse import reuse
from hopflow.errors import ExportError
from hopflow.export.exported import Exported
from hopflow.export.native.entry import Entry
from hopflow.export.native.failures import Failures
from hopflow.export.native.header import header
from hopflow.export.native.package import (
    cmake_config,
    library_name,
    link,
    linker,
    pkg_config,
)
from hopflow.export.native.parameters import (
    Parameters,
    parameters_of,
    program_graph,
)
from hopflow.export.native.preamble import Preamble
from hopflow.export.native.targets import HOST, compiler, target
from hopflow.graph.core import Graph
from hopflow.loop_ir import walk
from hopflow.loop_ir.kernels import Library
from hopflow.loop_ir.program import Call, Program
from hopflow.loop_ir.routines import ROUTINES


@dataclass(frozen=True, slots=True)
class NativeCode:
    """The files of a program as native code.

    name     of its C function
    header   declares that, and the functions beside it
    object   the object code: link with it and, for a few programs, the C library's
             mathematical functions
    library  a shared library of it; None: there is no linker for the target here
    cmake    `<name>Config.cmake`
    pkgconfig   `<name>.pc`
    """

    name: str
    header: Path
    object: Path
    library: Path | None
    cmake: Path
    pkgconfig: Path


@dataclass(frozen=True, slots=True)
class Compiled:
    """A program that is compiled, and not written to files yet."""

    name: str
    code: bytes
    header: str
    parameters: Parameters


def to_native(
    program: Exported, folder: str | PathLike[str], name: str, target_name: str
) -> NativeCode:
    """Write the files of a program; see `ExportedProgram.to_native`.

    Raises:
        ExportError: native code cannot have an operation, or linking fails.
        OSError: a file cannot be written.
    """
    compiled = compile_native(program, name, target_name)
    place = Path(folder)
    place.mkdir(parents=True, exist_ok=True)
    found = NativeCode(
        name,
        place / f"{name}.h",
        place / f"{name}.o",
        None,
        place / f"{name}Config.cmake",
        place / f"{name}.pc",
    )
    found.header.write_text(compiled.header)
    found.object.write_bytes(compiled.code)
    shared = None
    command = linker(target(target_name), target_name == HOST)
    if command is not None:
        shared = place / library_name(name)
        link(command, [found.object], shared)
    file = shared.name if shared else None
    found.cmake.write_text(cmake_config(name, file))
    found.pkgconfig.write_text(pkg_config(name, version("hopflow"), file))
    return NativeCode(
        name, found.header, found.object, shared, found.cmake, found.pkgconfig
    )


def compile_native(program: Exported, name: str, target_name: str) -> Compiled:
    """Compile a program, as the C function `name`.

    Raises:
        ExportError: native code cannot have an operation.
    """
    machine = target(target_name)
    graph = program_graph(program)
    _, lowered = lower(graph, target=machine)
    _refuse(graph, lowered)
    made = walk.allocated(lowered.body)
    positions = {k for k, b in enumerate(lowered.outputs) if b in made}
    parameters = parameters_of(program, graph, positions)
    failures = Failures(lowered, graph)
    guards = program.module.guards.guards
    texts = zip(guards, program.constraints, strict=True)
    preamble = Preamble(parameters, lowered, graph, failures, list(texts))
    module = Module(has_extrema=machine.has_extrema, has_fma=machine.has_fma)
    unit = Unit(module, machine)
    emit_into(unit, lowered, reuse(lowered))
    entry = Entry(name, unit, lowered, parameters, preamble)
    entry.define()
    _provide(unit, lowered)
    module = unit.module
    text = with_software(module) if machine.is_wasm else module.text
    code = compiler(target_name).compile(text)
    title = f"{name}: {program.signature}\n\nExported by hopflow {version('hopflow')}"
    title += f" for {target_name}, {machine.triple} ({machine.cpu})."
    text = header(name, title, parameters, failures.statuses(), entry.room.is_exact)
    return Compiled(name, code, text, parameters)


def _provide(unit: Unit, program: Program) -> None:
    """Define what the code of a program calls, so that nothing is missing but the
    mathematical functions of the C library."""
    module = unit.module
    while missing := sorted(s for s in module.symbols if s.startswith("hf_")):
        for name in missing:
            library.define(module, name, unit.target)
            module.provide(name)
    module.provide(symbol(program.name))


# --- what native code cannot have -----------------------------------------------------


def _refuse(graph: Graph, program: Program) -> None:
    """
    Raises:
        ExportError: the program calls LAPACK.
    """
    called = {
        s.routine
        for p in (program, *walk.functions(program))
        for s in walk.statements(p.body)
        if isinstance(s, Call) and not ROUTINES[s.routine].native
    }
    if not called:
        return
    for own in programs(kernels_of(graph)):
        for equation in equations(own.block):
            found, node = equation.definition, equation.node
            if isinstance(found, Library) and found.routine in called:
                at = f" ({node.line})" if node.line else ""
                raise ExportError(_LAPACK.format(node.op.name, at, found.routine))


_LAPACK: Final = (
    "to_native: `{}`{} calls LAPACK's `{}`, which native code does not bring with it. "
    "Compute it before the program, and pass the result."
)
