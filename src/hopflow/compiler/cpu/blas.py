"""Fortran's BLAS and LAPACK: the addresses of their functions, and calls of them.

The functions are those of SciPy, which it publishes for Cython: the addresses are in
capsules of two extension modules.

Threads: a large factorisation uses as many as OpenBLAS is configured for
(OPENBLAS_NUM_THREADS, or threadpoolctl), and its last bits depend on how many. That
count belongs to the process, without a lock, and SciPy's other users share it; OpenBLAS
has none for a call or a thread. It is left unchanged: to set and restore it around a
call would be a race with every other thread.
"""

import ctypes
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

from hopflow import dtypes
from hopflow.compiler.cpu.memory import ProgramMemory
from hopflow.compiler.cpu.statements import StatementEmitter
from hopflow.compiler.cpu.target import HOT, CpuTarget
from hopflow.compiler.cpu.unit import Unit
from hopflow.compiler.llvm.module import Function, Module
from hopflow.compiler.llvm.types import literal, register_type
from hopflow.compiler.reuse import size_in_bytes
from hopflow.dtypes import DType
from hopflow.errors import CompileError
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Buffer, Expr, Var
from hopflow.loop_ir.routines import Routine

_BLAS: Final = frozenset({"strsm", "dtrsm"})


@cache
def _capsules(module: str) -> dict[str, Any]:
    """Return the functions that `scipy.linalg.<module>` publishes.

    Its file is loaded alone, since all of `scipy.linalg` takes longer.
    """
    full = f"scipy.linalg.{module}"
    if full not in sys.modules:
        package = importlib.util.find_spec("scipy")
        assert package is not None
        assert package.origin is not None
        folder = Path(package.origin).parent / "linalg"
        for suffix in importlib.machinery.EXTENSION_SUFFIXES:
            file = folder / f"{module}{suffix}"
            spec = importlib.util.spec_from_file_location(full, file)
            if file.exists() and spec is not None and spec.loader is not None:
                loaded = importlib.util.module_from_spec(spec)
                spec.loader.exec_module(loaded)
                return dict(loaded.__pyx_capi__)
    return dict(importlib.import_module(full).__pyx_capi__)


@cache
def fortran(name: str) -> int:
    """Return the address of a function of BLAS or LAPACK, for example "dgemm".

    Raises:
        CompileError: SciPy publishes no such function.
    """
    capsule = _capsules("cython_blas" if name in _BLAS else "cython_lapack").get(name)
    if capsule is None:
        raise CompileError(f"SciPy has no function `{name}`.")
    signature, address = _capsule_functions()
    return int(address(capsule, signature(capsule)))


@cache
def _capsule_functions() -> tuple[Any, Any]:
    signature = ctypes.pythonapi.PyCapsule_GetName
    signature.restype, signature.argtypes = ctypes.c_char_p, [ctypes.py_object]
    address = ctypes.pythonapi.PyCapsule_GetPointer
    address.restype = ctypes.c_void_p
    address.argtypes = [ctypes.py_object, ctypes.c_char_p]
    return signature, address


class Wrapper:
    """A routine under construction, as one native function.

    Its arrays are buffers, for statements of the Loop IR; its scalars are registers.
    Scratch arrays are freed on every exit.
    """

    def __init__(
        self,
        module: Module,
        name: str,
        routine: Routine,
        dtype: DType,
        target: CpuTarget,
        more: Sequence[str] = (),
    ) -> None:
        """Begin the function.

        Args:
            more: The names of i64 parameters that follow those of the routine.
        """
        kinds = {"i32": dtypes.int32, "i64": dtypes.int64}
        arrays = [array.name for array in routine.arrays]
        numbers = [*routine.scalars, *routine.flags]
        parameters = ", ".join(
            [f"ptr %{a}" for a in arrays] + [f"i64 %{n}" for n in (*numbers, *more)]
        )
        self.f = Function(module, f"i64 @{name}({parameters})", HOT)
        self.dtype, self.routine = dtype, routine
        self.memory = ProgramMemory(self.f)
        self.emitter = StatementEmitter(self.f, self.memory, Unit(module, target))
        self.emitter.may_poll = False
        self.scalars: dict[str, Expr] = {}
        for number in numbers:
            var = Var(number, dtypes.int64)
            self.emitter.values.constants[var] = f"%{number}"
            self.scalars[number] = e.read(var)
        self.buffers: dict[str, Buffer] = {}
        for array in routine.arrays:
            shape = tuple(self._extent(text) for text in array.shape)
            buffer = Buffer(array.name, kinds.get(array.dtype, dtype), shape, "arena")
            self.buffers[array.name] = buffer
            self.memory.place(buffer, f"%{array.name}")
        self._scratch: list[str] = []
        self.f.do(f"store i64 -1, ptr {self.emitter.status}")
        for number in routine.scalars:
            self.leave_if(self.f.emit(f"icmp ugt i64 %{number}, {2**31 - 1}"))

    def _extent(self, text: str) -> Expr:
        if text.startswith("min("):
            x, y = (self.scalars[name] for name in text[4:-1].split(", "))
            return e.binary("min", x, y)
        return self.scalars[text]

    def value(self, expr: Expr) -> str:
        return self.emitter.values.value(expr)

    def finish(self, status: str = "0") -> None:
        """Return `status`, and complete the function."""
        f = self.f
        f.do(f"store i64 {status}, ptr {self.emitter.status}")
        f.branch("exit")
        f.start("exit")
        for slot in self._scratch:
            f.module.external("void @free(ptr)")
            pointer = f.emit(f"load ptr, ptr {slot}")
            f.do(f"call void @free(ptr {pointer})")
        result = f.emit(f"load i64, ptr {self.emitter.status}")
        f.do(f"ret i64 {result}")

    def leave_if(self, test: str) -> None:
        """Return the current status if the register `test` holds."""
        onward = self.f.name("on")
        self.f.branch_if(test, "exit", onward)
        self.f.start(onward)

    def leave_if_empty(self, buffer: Buffer) -> None:
        """Return 0 if `buffer` has no elements."""
        count = e.index(1)
        for extent in buffer.shape:
            count = e.mul(count, extent)
        empty = self.f.emit(f"icmp eq i64 {self.value(count)}, 0")
        self.status("0", empty)

    def status(self, status: str, test: str) -> None:
        """Return `status` if the register `test` holds."""
        name = self.f.name("status")
        self.f.branch_if(test, name, f"on.{name}")
        self.f.start(name)
        self.f.do(f"store i64 {status}, ptr {self.emitter.status}")
        self.f.branch("exit")
        self.f.start(f"on.{name}")

    def scratch(self, name: str, dtype: DType, *shape: Expr) -> Buffer:
        """Return a new array; if there is no memory for it, the routine returns -1."""
        f = self.f
        buffer = Buffer(name, dtype, shape, "arena")
        size = size_in_bytes(shape, dtype)
        # The exit may be reached without this allocation: the slot starts as null.
        slot = f.early_slot("ptr", name, "null")
        self._scratch.append(slot)
        f.module.external("ptr @malloc(i64)")
        bytes_ = f.emit(f"add i64 {self.value(size)}, 64")
        pointer = f.emit(f"call ptr @malloc(i64 {bytes_})")
        f.do(f"store ptr {pointer}, ptr {slot}")
        self.leave_if(f.emit(f"icmp eq ptr {pointer}, null"))
        self.memory.place(buffer, pointer)
        return buffer

    # --- arguments of Fortran functions, which are all pointers

    def integer(self, value: Expr | int) -> str:
        """Return a Fortran INTEGER."""
        expr = e.index(value) if isinstance(value, int) else value
        slot = self.f.slot("i32", "integer")
        short = self.value(e.cast(expr, dtypes.int32))
        self.f.do(f"store i32 {short}, ptr {slot}")
        return slot

    def leading(self, value: Expr) -> str:
        """Return a leading dimension, which is at least 1."""
        return self.integer(e.binary("max", value, e.index(1)))

    def character(self, letter: str) -> str:
        """Return a Fortran CHARACTER of a letter such as "U", or of an i8 register."""
        slot = self.f.slot("i8", "letter")
        code = letter if letter.startswith("%") else str(ord(letter))
        self.f.do(f"store i8 {code}, ptr {slot}")
        return slot

    def choice(self, test: str, yes: str, no: str) -> str:
        """Return the CHARACTER `yes` if the i64 register `test` is not 0, else `no`."""
        holds = self.f.emit(f"icmp ne i64 {test}, 0")
        return self.character(
            self.f.emit(f"select i1 {holds}, i8 {ord(yes)}, i8 {ord(no)}")
        )

    def number(self, value: float) -> str:
        """Return a Fortran REAL or DOUBLE PRECISION."""
        t = register_type(self.dtype)
        slot = self.f.slot(t, "number")
        self.f.do(f"store {t} {literal(value, self.dtype)}, ptr {slot}")
        return slot

    def pointer(self, buffer: Buffer) -> str:
        return self.memory.pointer(buffer)

    def call(self, name: str, *pointers: str) -> None:
        """Call a function of BLAS or LAPACK; `name` lacks the precision's letter."""
        full = ("s" if self.dtype is dtypes.float32 else "d") + name
        types = ", ".join(["ptr"] * len(pointers))
        self.f.module.external(f"void @{full}({types})")
        arguments = ", ".join(f"ptr {p}" for p in pointers)
        self.f.do(f"call void @{full}({arguments})")
        self.emitter.values.forget_loads()

    def clear(self, buffer: Buffer) -> None:
        """Fill a dense array with zeros."""
        size = size_in_bytes(buffer.shape, buffer.dtype)
        self.f.module.declare("void @llvm.memset.p0.i64(ptr, i8, i64, i1)")
        self.f.do(
            f"call void @llvm.memset.p0.i64(ptr {self.pointer(buffer)}, i8 0, "
            f"i64 {self.value(size)}, i1 false)"
        )

    def when(self, test: str, then: Callable[[], None]) -> None:
        """Emit `then` and return 0 if the register `test` holds."""
        name = self.f.name("case")
        self.f.branch_if(test, name, f"else.{name}")
        self.f.start(name)
        with self.emitter.values.scope():
            then()
        self.f.do(f"store i64 0, ptr {self.emitter.status}")
        self.f.branch("exit")
        self.f.start(f"else.{name}")
