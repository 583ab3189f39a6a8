"""Calls of exported native code in this process, by `ctypes`.

Programs are compiled one by one, and linked together by one call of the system's
compiler, or each by the linker of jitted programs. A call gives them exactly the
workspace that they ask for, at an address that is not aligned, and sees that nothing is
written behind it, nor behind a result.
"""

import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from hopflow import pytree
from hopflow.compiler.cpu.jit import always_linked
from hopflow.compiler.cpu.jit import link as link_here
from hopflow.compiler.cpu.stubs import OUT_OF_MEMORY
from hopflow.export.native.build import Compiled, compile_native
from hopflow.export.native.package import library_name, link, linker
from hopflow.export.native.parameters import Parameter
from hopflow.export.native.targets import HOST, target
from hopflow.graph.core import match_shapes

Array = np.ndarray[Any, Any]

_FENCE: Final = bytes(range(256)) * 2
"""What stands behind arrays that may be written."""
_MOST: Final = 1 << 28
"""The most bytes of a workspace."""


class Outcome(NamedTuple):
    """What a call gives.

    results  those of the program, and then what it has written
    status   why it has stopped, or 0
    text     of the status
    details  the numbers that belong to it
    """

    results: list[Array]
    status: int
    text: str
    details: tuple[int, int]


class NativeLibrary:
    """Programs as native code of this machine, by the names of their functions."""

    def __init__(
        self, programs: Mapping[str, Any], folder: Path, target_name: str = HOST
    ) -> None:
        self.programs = programs
        self.compiled = {
            name: compile_native(program, name, target_name)
            for name, program in programs.items()
        }
        objects = []
        for name, compiled in self.compiled.items():
            objects.append(folder / f"{name}.o")
            objects[-1].write_bytes(compiled.code)
        command = linker(target(target_name), True)
        assert command is not None
        path = folder / library_name("programs")
        link(command, objects, path)
        self.library = ctypes.CDLL(str(path))

    def __call__(self, name: str, *args: Any) -> Outcome:
        """Call a program with the arguments of its function."""
        return _Call(self.library, self.compiled[name], self.programs[name]).run(args)


def run_native(program: Any, *args: Any) -> Outcome:
    """Compile a program, link it into this process, and call it."""
    compiled = compile_native(program, "program", HOST)
    return _Call(_Linked(compiled), compiled, program).run(args)


class _Linked:
    """The functions of one program, as a library of `ctypes` has them."""

    def __init__(self, compiled: Compiled) -> None:
        machine = target(HOST)
        names = [compiled.name + suffix for suffix in _SUFFIXES]
        text = compiled.header
        exports = [name for name in names if f"{name}(" in text]
        self._functions = link_here([compiled.code], exports, always_linked(), machine)

    def __getattr__(self, name: str) -> Any:
        return ctypes.CFUNCTYPE(ctypes.c_int)(self._functions[name])


_SUFFIXES: Final = ("", "_sizes", "_workspace", "_error_text")


class Driver:
    """A C program that calls programs with arguments, for machines that are emulated.

    It reads the arguments, and writes a status and the results of each call. The sizes
    of results are those that calls in this process have given.

    source  the text of the C program
    given   what it reads
    """

    def __init__(self, library: NativeLibrary, calls: Mapping[str, Any]) -> None:
        self._expected = {n: library(n, *args) for n, args in calls.items()}
        self.given = b""
        lines: list[str] = []
        declared = [f'#include "{name}.h"' for name in calls]
        for name, args in calls.items():
            call = _Call(
                library.library, library.compiled[name], library.programs[name]
            )
            declared += self._call(call, args, lines)
        body = "\n    ".join(lines)
        self.source = _DRIVER.format("\n".join(declared), body)

    def _call(self, call: "_Call", args: Any, lines: list[str]) -> list[str]:
        """Add the lines of a call; returns the declarations of its memory."""
        leaves = pytree.flatten(args)[0]
        call.give_arguments(leaves)
        call.give_sizes(leaves)
        name, expected = call.compiled.name, self._expected[call.compiled.name]
        results = dict(zip(call.parameters.outputs, expected.results, strict=True))
        declared, arguments = [], []
        sizes: dict[Parameter, tuple[str, int]] = {}
        for parameter in call.parameters.all:
            own = f"{name}_{parameter.name}_"
            if parameter.is_by_value:
                [value] = call.values[parameter]
                is_float = isinstance(value, ctypes.c_double)
                arguments.append(value.value.hex() if is_float else f"{value.value}LL")
                continue
            size = results[parameter].nbytes if parameter in results else 0
            if parameter.role == "made":
                declared.append(f"static const void *{own};")
                declared.append(f"static int64_t {own}shape[{parameter.type.ndim}];")
                arguments += [f"(void *)&{own}", f"{own}shape"]
            else:
                if parameter.role in ("input", "updated"):
                    data = call.memory[parameter].array(np.uint8, (-1,)).tobytes()
                    self.given += data
                    size = len(data)
                    lines.append(f"get({own}, {size});")
                declared.append(f"static int64_t {own}[{size // 8 + 1}];")
                arguments.append(f"(void *){own}")
            sizes[parameter] = own, size
        written = ["put({}, {});".format(*sizes[p]) for p in results]
        given = ", ".join([*arguments, "memory", "sizeof memory", "0"])
        lines.append(f"status = {name}({given}); put(&status, sizeof status);")
        lines.append(f"if (status == 0) {{ {' '.join(written)} }}")
        return declared

    def outcomes(self, printed: bytes) -> dict[str, tuple[int, list[Array]]]:
        """Read what the program has written: by name the status and the results."""
        found: dict[str, tuple[int, list[Array]]] = {}
        at = 0
        for name, expected in self._expected.items():
            [status] = np.frombuffer(printed, np.int32, 1, at)
            at += 4
            results = []
            for like in expected.results if status == 0 else ():
                flat = np.frombuffer(printed, like.dtype, like.size, at)
                results.append(flat.reshape(like.shape))
                at += like.nbytes
            found[name] = int(status), results
        assert at == len(printed)
        return found


_DRIVER: Final = """\
#include <stdio.h>
#include <stdlib.h>
{}

static int64_t memory[1 << 18];

static void get(void *to, size_t size) {{
    if (fread(to, 1, size, stdin) != size) abort();
}}

static void put(const void *from, size_t size) {{ fwrite(from, 1, size, stdout); }}

int main(void) {{
    int status;
    {}
    return 0;
}}
"""


class _Fenced:
    """Memory for an array, with a fence behind it."""

    def __init__(self, size: int, offset: int = 0) -> None:
        self._bytes = np.full(offset + size + len(_FENCE), 0xAB, np.uint8)
        self._bytes[offset + size :] = np.frombuffer(_FENCE, np.uint8)
        self.size, self.offset = size, offset
        self.address = self._bytes.ctypes.data + offset

    def array(self, dtype: Any, shape: Sequence[int]) -> Array:
        inside = self._bytes[self.offset : self.offset + self.size]
        array: Array = inside.view(dtype).reshape(shape)
        return array

    def check(self) -> None:
        assert self._bytes[self.offset + self.size :].tobytes() == _FENCE


class _Call:
    """One call.

    values    of the parameters, as `ctypes` takes them
    """

    def __init__(self, library: Any, compiled: Compiled, program: Any) -> None:
        self.library, self.compiled, self.program = library, compiled, program
        self.parameters = compiled.parameters
        self.values: dict[Parameter, list[Any]] = {}
        self.memory: dict[Parameter, _Fenced] = {}
        self.shapes: dict[Parameter, tuple[Any, ...]] = {}

    def function(self, suffix: str = "", result: Any = ctypes.c_int) -> Any:
        function = getattr(self.library, self.compiled.name + suffix)
        function.restype = result
        return function

    def run(self, args: Sequence[Any]) -> Outcome:
        leaves = pytree.flatten(args)[0]
        self.give_arguments(leaves)
        self.give_sizes(leaves)
        of_sizes = [v for p in self.parameters.of_sizes for v in self.values[p]]
        status = self.give_results(of_sizes)
        if status:
            return self.outcome(status, (0, 0))
        needed = self.function("_workspace", ctypes.c_int64)(*of_sizes)
        if needed < 0:
            return self.outcome(-needed, (0, 0))
        values = [v for p in self.parameters.all for v in self.values[p]]
        details = (ctypes.c_int64 * 2)()
        while True:
            workspace = _Fenced(needed, offset=8)
            given = workspace.address, ctypes.c_int64(needed)
            pointer = ctypes.c_void_p(given[0] if needed else None)
            status = self.function()(*values, pointer, given[1], details)
            for memory in (workspace, *self.memory.values()):
                memory.check()
            if status != OUT_OF_MEMORY or needed > _MOST:
                outcome = self.outcome(status, (details[0], details[1]))
                del workspace  # what was made there has been copied
                return outcome
            needed = max(2 * needed, 1 << 12)

    def outcome(self, status: int, details: tuple[int, int]) -> Outcome:
        text = self.function("_error_text", ctypes.c_char_p)(status).decode()
        results = [] if status else [self.result(p) for p in self.parameters.outputs]
        return Outcome(results, status, text, details)

    def give_arguments(self, leaves: Sequence[Any]) -> None:
        """Copy the arguments, and what the program holds and writes."""
        constants = self.program.module.constants
        given = [x for i, x in enumerate(leaves) if i not in constants]
        declared = [p for p in self.parameters.all if p.role not in _OTHER]
        declared = [p for p in declared if p not in self.parameters.initial]
        for parameter, leaf in zip(declared, given, strict=True):
            if parameter.role == "number":
                is_int = parameter.type.dtype.is_integer
                kind = ctypes.c_int64 if is_int else ctypes.c_double
                self.values[parameter] = [kind(leaf)]
            else:
                self.give_array(parameter, np.asarray(leaf))
        for parameter, data in self.parameters.initial.items():
            self.give_array(parameter, data)

    def give_array(self, parameter: Parameter, array: Array) -> None:
        memory = _Fenced(array.nbytes)
        memory.array(array.dtype, array.shape)[...] = array
        self.shapes[parameter] = array.shape
        self.hold(parameter, memory)

    def hold(self, parameter: Parameter, memory: _Fenced) -> None:
        self.memory[parameter] = memory
        self.values[parameter] = [ctypes.c_void_p(memory.address)]

    def give_sizes(self, leaves: Sequence[Any]) -> None:
        module = self.program.module
        sizes: dict[Any, Any] = {}
        for symbol, source in module.sources.items():
            sizes[symbol] = source.find(leaves)
        tensors = [
            x
            for i, x in enumerate(leaves)
            if i not in module.constants and i not in module.numbers
        ]
        for var, x in zip(module.graph.operands, tensors, strict=True):
            match_shapes(var.type.shape, np.shape(x), sizes)
        for symbol, parameter in self.parameters.symbols.items():
            if isinstance(parameter, Parameter) and parameter.role == "size":
                self.values[parameter] = [ctypes.c_int64(sizes[symbol])]

    def give_results(self, of_sizes: Sequence[Any]) -> int:
        """Make memory for the results; returns the status of their shapes."""
        results = [p for p in self.parameters.all if p.role == "output"]
        dynamic = [p for p in results if not p.type.is_static]
        shapes = [(ctypes.c_int64 * p.type.ndim)() for p in dynamic]
        self.shapes |= {p: tuple(p.type.shape) for p in results}
        if dynamic:
            status: int = self.function("_sizes")(*of_sizes, *shapes)
            if status:
                return status
            for parameter, shape in zip(dynamic, shapes, strict=True):
                self.shapes[parameter] = tuple(shape)
        for parameter in results:
            count = int(np.prod(self.shapes[parameter], dtype=np.int64))
            self.hold(parameter, _Fenced(count * parameter.type.dtype.itemsize))
        for parameter in self.parameters.all:
            if parameter.role == "made":
                shape = (ctypes.c_int64 * parameter.type.ndim)()
                pointer = ctypes.pointer(ctypes.c_void_p())
                self.values[parameter] = [pointer, shape]
        return 0

    def result(self, parameter: Parameter) -> Array:
        dtype = parameter.type.dtype.dtype
        if parameter.role != "made":
            memory = self.memory[parameter]
            shape = self.shapes[parameter]
            return memory.array(dtype, shape).copy()
        pointer, shape = self.values[parameter]
        count = int(np.prod(tuple(shape), dtype=np.int64)) * dtype.itemsize
        data = ctypes.string_at(pointer.contents.value or 0, count) if count else b""
        return np.frombuffer(data, dtype).reshape(tuple(shape)).copy()


_OTHER: Final = ("size", "output", "made")
"""The roles of parameters that are no arguments."""
