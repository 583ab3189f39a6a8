"""Calling native programs from Python.

A `Kernel` owns a program's code. What Python calls is a builtin function whose `self`
keeps the code alive; the function itself is the entry that all programs share.
"""

import ctypes
import struct
import threading
from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from hopflow.compiler.cpu import guarded, library, parallel
from hopflow.compiler.cpu.emit import Emission, emit
from hopflow.compiler.cpu.jit import (
    Library,
    address_of,
    always_linked,
    c_symbols,
    jit,
    once,
)
from hopflow.compiler.cpu.stubs import DENSE, NUMBER, PYTHON, STRIDED, TEXT
from hopflow.compiler.cpu.target import CpuTarget
from hopflow.compiler.owned import WORD, result_words
from hopflow.compiler.reuse import reuse
from hopflow.config import config
from hopflow.errors import ArgumentTypeError, BoundsError, CompileError
from hopflow.logs import passing
from hopflow.loop_ir.expr import Expr
from hopflow.loop_ir.program import Program
from hopflow.loop_ir.walk import allocated

Trapped: TypeAlias = tuple[int, int, int]
"""The site of a trap, and the two values reported with it (0 where there is none)."""

_METH_FASTCALL: Final = 0x80
# What linking takes for any kernel: its pages, and the linker's and our own tables. The
# resident memory of a process that compiles small kernels grows by so much for each.
_LINKED_BYTES: Final = 3 << 14
_STUBS: Final = ("hf_poll", "hf_release", "hf_call", "hf_tick", "hf_parallel")
"""What programs may call of the code that all share."""


class _MethodDef(ctypes.Structure):
    """Python's `PyMethodDef`."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    )


class _Code(bytes):
    """The `self` of a native function: what the shared entry reads, as bytes, and all
    that must live as long as the function does."""

    loaded: "_Loaded"
    host: "Callable[[int, int, int], None]"


class _Loaded(NamedTuple):
    """A linked program: what its functions share, and keep alive.

    entry   the address of its code, and how many parameters it takes
    table   what its parameters must be, which the shared entry compares
    """

    library: Library
    method: _MethodDef
    entry: tuple[int, int]
    table: "np.ndarray[Any, np.dtype[np.int64]]"
    data: list[Any]


Host: TypeAlias = Callable[[int, int], None]
"""What is called for a `HostCall`: (site, the address of words: see `host_calls`)."""


class Kernel:
    """A compiled program.

    `kernel(*args)` takes the sizes, then the inputs and the outputs: dense NumPy
    arrays, or the addresses of their data. (For an output whose size only the run knows
    it is words, as `owned` reads them.) It returns None, or a `Trapped` if the
    program stopped at a `Trap`. It may be called from several threads at once.

    made      the outputs, among others, whose memory the program itself finds
    guarded   whether its memory lies between closed pages
    compared  whether the results of a call were compared with the graph interpreter's
    free      frees the memory of an output in `made`, by its address
    nbytes    about how much memory it takes

    Raises on a call:
        BoundsError: An array is not of the dtype, the extents and the layout that the
            program has been compiled for. Nothing has been read or written then.
        KeyboardInterrupt: Ctrl-C, or `interrupt`.
        MemoryError: There was no room for temporaries.
    """

    def __init__(self, program: Program, target: CpuTarget) -> None:
        """Compile `program` for `target`, which must be a CPU that can run here."""
        self.program, self.target = program, target
        self.made = allocated(program.body)  # outputs, among others
        self.guarded = config.guard_pages
        self.compared = False
        with passing("emit", program.name):
            emission = self._emission()
        with passing("machine code", program.name):
            self.code: bytes = jit(target).compile(emission.text)
        self._loaded = _load(emission, self.code, program, target, self.guarded)
        data = sum(constant.nbytes for constant in self._loaded.data)
        # The Loop IR takes about half as much memory as the text that is made of it.
        size = 2 * len(self.code) + len(emission.text) // 2 + data
        self.nbytes = _LINKED_BYTES + size
        self.free = guarded.free(target) if self.guarded else _free()
        self.call = self.calling(_no_host)

    def calling(self, host: Host) -> Callable[..., Trapped | None]:
        """The program, where it calls Python with `host` for it.

        An error that `host` raises ends the program, and is raised by the call.
        """

        def call(site: int, words: int, epoch: int) -> None:
            _poll(epoch)
            host(site, words)

        table = self._loaded.table.ctypes.data
        code = _Code(struct.pack("=QqQQ", *self._loaded.entry, id(call), table))
        code.loaded, code.host = self._loaded, call
        function: Callable[..., Trapped | None] = _new_function(
            ctypes.byref(self._loaded.method), code, None, None
        )
        if not self.guarded:
            return function
        return guarded.calling(function, self.program, self.target)

    def __call__(self, *args: Any) -> Trapped | None:
        return self.call(*args)

    def __repr__(self) -> str:
        return f"<native kernel {self.program.name!r}, {len(self.code)} bytes>"

    def _emission(self) -> Emission:
        """Emit the program. The text is not kept: it would double a kernel's memory."""
        arena = reuse(self.program)
        return emit(self.program, arena, self.target, guarded=self.guarded)

    @property
    def llvm_ir(self) -> str:
        """The LLVM IR as we emit it."""
        return self._emission().text

    @property
    def optimised_llvm_ir(self) -> str:
        """The LLVM IR after LLVM's passes."""
        return jit(self.target).optimised(self.llvm_ir)

    @property
    def asm(self) -> str:
        """The machine code, as assembly."""
        return jit(self.target).assembly(self.llvm_ir)


def compile_program(program: Program, target: CpuTarget) -> Kernel:
    """Compile a program for a target."""
    return Kernel(program, target)


def _load(
    emission: Emission, code: bytes, program: Program, target: CpuTarget, closed: bool
) -> _Loaded:
    """Link object code; its constants lie between `closed` pages if that is wanted."""
    symbols, constants = always_linked(), emission.constants
    if closed:
        constants = {n: guarded.copied(data, target) for n, data in constants.items()}
    for name in emission.symbols:
        if name in constants:
            symbols[name] = constants[name].ctypes.data
        else:
            symbols[name] = _address(name, target)
    linked = jit(target).link(code, [emission.name], symbols)
    arity = len(program.sizes) + len(program.inputs) + len(program.outputs)
    method = _MethodDef(
        program.name.encode(), _stubs(target)["hf_entry"], _METH_FASTCALL, None
    )
    data = list(constants.values())
    entry = linked[emission.name], arity
    return _Loaded(linked, method, entry, _expected(program), data)


def _expected(program: Program) -> "np.ndarray[Any, np.dtype[np.int64]]":
    """The table of what the parameters of a program must be; see `stubs`."""
    word = {var: ~k for k, var in enumerate(program.sizes)}

    def coded(value: Expr) -> int:
        if value.is_const:
            return int(value.attr)
        return word[value.attr]

    rows = [NUMBER] * len(program.sizes)
    made = allocated(program.body)
    for b in (*program.inputs, *program.outputs):
        if b in made:
            rows += [1, WORD.itemsize, DENSE, *result_words(len(b.shape))]
            continue
        rows += [
            len(b.shape),
            b.dtype.itemsize,
            DENSE if b.strides is None else STRIDED,
        ]
        rows += map(coded, (*b.shape, *(b.strides or ())))
    return np.array(rows, np.int64)


def _no_host(site: int, words: int) -> None:  # noqa: ARG001
    raise CompileError(
        "this program calls Python, and was not told what. Call it by `calling`."
    )


def _address(name: str, target: CpuTarget) -> int:
    if name in _STUBS:
        return _stubs(target)[name]
    if name in guarded.SYMBOLS:
        return guarded.library(target)[name]
    return c_symbols().get(name) or library.address(name, target)


@once
def _free() -> Callable[[int], None]:
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(c_symbols()["free"])


@once
def _new_function_prototype() -> Any:
    make = ctypes.pythonapi.PyCMethod_New
    make.restype = ctypes.py_object
    make.argtypes = [
        ctypes.POINTER(_MethodDef),
        ctypes.py_object,
        ctypes.c_void_p,
        ctypes.c_void_p,
    ]
    return make


def _new_function(*args: Any) -> Any:
    return _new_function_prototype()(*args)


@once
def _stubs(target: CpuTarget) -> Library:
    """The code that all programs share, compiled once for a target."""
    symbols = {name: address_of(getattr(ctypes.pythonapi, name)) for name in PYTHON}
    symbols["Py_None"] = id(None)
    symbols["hf_poll_callable"] = id(_poll)
    symbols["hf_ndarray"] = id(np.ndarray)
    symbols["hf_bounds_error"] = id(BoundsError)
    symbols["hf_epoch"] = ctypes.addressof(_epoch)
    symbols["hf_num_threads"] = ctypes.addressof(config.threads)
    for name in ("clock_gettime", "pthread_create", "pthread_detach", "nanosleep"):
        symbols[name] = c_symbols()[name]
    text = f"{TEXT}\n{parallel.TEXT}"
    exports = ("hf_entry", *_STUBS)
    compiler = jit(target)
    return compiler.link(compiler.compile(text), exports, always_linked() | symbols)


# --- interrupts -----------------------------------------------------------------------


_epoch = ctypes.c_int64(0)  # how often `interrupt` was called
_requests: dict[int | None, int] = {}  # thread (None: any) -> epoch of the last request
_requests_lock = threading.Lock()


def interrupt(thread_id: int | None = None) -> None:
    """Stop compiled programs that run now in other threads: `KeyboardInterrupt` there.

    It takes effect within about 0.1 s. A thread that runs no compiled program does not
    notice, nor does a program that starts later.

    Args:
        thread_id: `Thread.ident` of the thread to stop; None stops all.

    Raises:
        ArgumentTypeError: `thread_id` is neither an int nor None.
    """
    if thread_id is not None and type(thread_id) is not int:
        raise ArgumentTypeError(
            "interrupt: `thread_id` must be an int (`Thread.ident`) or None, and is "
            f"`{type(thread_id).__name__}`."
        )
    with _requests_lock:
        _epoch.value += 1
        _requests[thread_id] = _epoch.value


def _poll(epoch: int) -> None:
    """Called now and then, with the GIL, by a program that began in `epoch`."""
    if _epoch.value == epoch:
        return
    for thread in (None, threading.get_ident()):
        if _requests.get(thread, 0) > epoch:
            raise KeyboardInterrupt
