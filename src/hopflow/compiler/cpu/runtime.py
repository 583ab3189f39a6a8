"""Native programs as functions of Python.

A `Kernel` owns a program's code. Python calls a builtin function whose `self` keeps the
code alive; its C function is the entry that all programs share.
"""

import ctypes
import io
import os
import pickle  # noqa: TID251  # unpickled files hold machine code anyway
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from hopflow.compiler.cpu import guarded, library, pool
from hopflow.compiler.cpu.emit import Emission, emit
from hopflow.compiler.cpu.jit import (
    THREAD_FUNCTIONS,
    Linked,
    address_of,
    always_linked,
    c_symbols,
    jit,
    link,
    once,
    shared_code,
)
from hopflow.compiler.cpu.stubs import DENSE, NUMBER, PYTHON, STRIDED, TEXT
from hopflow.compiler.cpu.target import CpuTarget
from hopflow.compiler.cpu.unit import Constants
from hopflow.compiler.interface import Interface
from hopflow.compiler.owned import WORD, result_words
from hopflow.compiler.reuse import reuse
from hopflow.config import config
from hopflow.errors import ArgumentTypeError, BoundsError, CompileError, ForkError
from hopflow.logs import passing
from hopflow.loop_ir.expr import Expr
from hopflow.loop_ir.program import Program
from hopflow.symbolic.size import Symbol

Trapped: TypeAlias = tuple[int, int, int]
"""The site of a trap, and the two values reported with it (0 where there is none)."""

_METH_FASTCALL: Final = 0x80
# The memory of linking a kernel: pages, and tables of the linker and of hopflow. The
# resident memory of a process that compiles small kernels grows by this for each.
_LINKED_BYTES: Final = 3 << 14
_STUBS: Final = (
    *("hf_poll", "hf_release", "hf_call", "hf_tick", "hf_parallel"),
    *("hf_take_arena", "hf_give_arena", "hf_clock_i64"),
)
"""The functions of the shared code that programs may call."""


class _MethodDef(ctypes.Structure):
    """Python's `PyMethodDef`."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    )


class _Code(bytes):
    """The `self` of a native function: the words that the shared entry reads, as bytes.

    It holds references to all that must live as long as the function does.
    """

    loaded: "_Loaded"
    host: "Callable[[int, int, int], None]"


class _Loaded(NamedTuple):
    """A linked program, which its functions share and keep alive.

    entry   the address of its code, and its number of parameters
    table   the expected arguments, which the shared entry checks
    """

    library: Linked
    method: _MethodDef
    entry: tuple[int, int]
    table: "np.ndarray[Any, np.dtype[np.int64]]"
    data: list[Any]


Host: TypeAlias = Callable[[int, int], None]
"""The function for a `HostCall`: it takes the site, and the address of words in the
layout of `host_calls`."""


@dataclass(frozen=True, slots=True)
class ObjectCode:
    """A compiled program that is not linked yet, and can be stored in a file.

    entry       the name of its function
    objects     the object files, each with some of its functions
    symbols     the names whose addresses the linker needs
    constants   the data of the program among these names
    guarded     whether its memory lies between guard pages
    text_bytes  the length of its LLVM IR
    """

    interface: Interface
    entry: str
    objects: tuple[bytes, ...]
    symbols: frozenset[str]
    constants: Constants
    guarded: bool
    text_bytes: int

    def to_bytes(self) -> bytes:
        """Return the object code as bytes, for `from_bytes`."""
        stream = io.BytesIO()
        _Pickler(stream, pickle.HIGHEST_PROTOCOL).dump(self)
        return stream.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes) -> "ObjectCode":
        """Return the object code of `to_bytes`, of this or another process.

        The bytes must come from a trusted source, as they can run any code: see
        `compiler.files`.
        """
        code = pickle.loads(data)
        assert isinstance(code, cls)
        return code


class _Pickler(pickle.Pickler):
    """A pickler of symbols without the environment that created them."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Symbol):
            return Symbol, (value.name, None, value.range, None, value.real)
        return NotImplemented


class Kernel:
    """A compiled program.

    `kernel(*args)` takes the sizes, then the inputs and the outputs: dense NumPy
    arrays, or the addresses of their data. (For an output whose size is known only at
    runtime it takes words, as `owned` reads them.) It returns None, or a `Trapped` if
    the program stopped at a `Trap`. Several threads may call it at once.

    interface  the parameters, the results and the sites where it may stop
    code_bytes the size of its object files
    compared   whether a call was compared with the graph interpreter
    free       frees the memory of an output that the program allocated, by its address
    nbytes     about how much memory it takes

    Raises on a call:
        BoundsError: An array has not the dtype, the extents or the layout that the
            program was compiled for. Nothing has been read or written.
        KeyboardInterrupt: Ctrl-C, or `interrupt`.
        MemoryError: There is no memory for temporaries.
    """

    def __init__(self, native: ObjectCode, target: CpuTarget) -> None:
        """Link a program compiled for `target`, which this machine must support."""
        self.interface, self.target = native.interface, target
        self.code_bytes = sum(map(len, native.objects))
        self.compared = False
        self._guarded = native.guarded
        self._loaded = _load(native, target)
        data = sum(constant.nbytes for constant in self._loaded.data)
        # The interface takes less than half of the memory of the text.
        size = 2 * self.code_bytes + native.text_bytes // 2 + data
        self.nbytes = _LINKED_BYTES + size
        self.free = guarded.free(target) if native.guarded else _free()
        self.call = self.calling(_no_host)

    def calling(self, host: Host) -> Callable[..., Trapped | None]:
        """Return the program as a function that calls `host` for its calls of Python.

        An error that `host` raises ends the program, and the call raises it.
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
        if not self._guarded:
            return function
        return guarded.calling(function, self.interface, self.target)

    def __call__(self, *args: Any) -> Trapped | None:
        return self.call(*args)

    def __repr__(self) -> str:
        return f"<native kernel {self.interface.name!r}, {self.code_bytes} bytes>"


def compile_program(program: Program, target: CpuTarget) -> Kernel:
    """Compile a program for a target, and link it."""
    return Kernel(object_code(program, target), target)


def object_code(program: Program, target: CpuTarget) -> ObjectCode:
    """Compile a program for a target."""
    with passing("emit", program.name):
        emission = _emitted(program, target)
    with passing("machine code", program.name):
        texts = emission.module.parts(config.num_threads)
        objects = library.compile_with(texts, _called(emission), target)
    return ObjectCode(
        Interface.of(program),
        emission.name,
        objects,
        frozenset(emission.module.symbols),
        emission.constants,
        config.guard_pages,
        sum(map(len, texts)),
    )


def _emitted(program: Program, target: CpuTarget) -> Emission:
    return emit(program, reuse(program), target, guarded=config.guard_pages)


def _called(emission: Emission) -> list[str]:
    """Return the names of the functions of `library` that a program calls."""
    names = emission.module.symbols
    return [
        name
        for name in names
        if name not in emission.constants and not _is_defined_elsewhere(name)
    ]


def llvm_ir(program: Program, target: CpuTarget) -> str:
    """Return the LLVM IR of a program before LLVM's passes."""
    return _emitted(program, target).module.text


def optimised_llvm_ir(program: Program, target: CpuTarget) -> str:
    """Return the LLVM IR of a program after LLVM's passes."""
    return jit(target).optimised(llvm_ir(program, target))


def assembly(program: Program, target: CpuTarget) -> str:
    """Return the machine code of a program as assembly."""
    emission = _emitted(program, target)
    is_long = bool(_called(emission))
    return jit(target).assembly(emission.module.text, is_long=is_long)


def _load(native: ObjectCode, target: CpuTarget) -> _Loaded:
    """Link object code, with constants between guard pages if it is guarded."""
    interface, constants = native.interface, native.constants
    if native.guarded:
        constants = {n: guarded.copied(data, target) for n, data in constants.items()}
    symbols = always_linked()
    for name in native.symbols:
        if name in constants:
            symbols[name] = constants[name].ctypes.data
        else:
            symbols[name] = _address(name, target)
    linked = link(native.objects, [native.entry], symbols, target)
    arity = len(interface.sizes) + len(interface.inputs) + len(interface.outputs)
    method = _MethodDef(
        interface.name.encode(), _stubs(target)["hf_entry"], _METH_FASTCALL, None
    )
    data = list(constants.values())
    return _Loaded(
        linked, method, (linked[native.entry], arity), _expected(interface), data
    )


def _expected(program: Interface) -> "np.ndarray[Any, np.dtype[np.int64]]":
    """Return the table of the expected arguments of a program; see `stubs`."""
    word = {var: ~k for k, var in enumerate(program.sizes)}

    def coded(value: Expr) -> int:
        if value.is_const:
            return int(value.attr)
        return word[value.attr]

    rows = [NUMBER] * len(program.sizes)
    for b in (*program.inputs, *program.outputs):
        if b in program.owned:
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
    if not _is_defined_elsewhere(name):
        return library.address(name, target)
    if name in _STUBS:
        return _stubs(target)[name]
    if name in guarded.SYMBOLS:
        return guarded.library(target)[name]
    return c_symbols()[name]


def _is_defined_elsewhere(name: str) -> bool:
    """Return whether a function is not one of `library`."""
    return name in _STUBS or name in guarded.SYMBOLS or name in c_symbols()


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
def _stubs(target: CpuTarget) -> Linked:
    """Return the code that all programs share, compiled once for a target."""
    symbols = {name: address_of(getattr(ctypes.pythonapi, name)) for name in PYTHON}
    symbols["Py_None"] = id(None)
    symbols["hf_poll_callable"] = id(_poll)
    symbols["hf_ndarray"] = id(np.ndarray)
    symbols["hf_bounds_error"] = id(BoundsError)
    symbols["hf_fork_error"] = id(ForkError)
    symbols["hf_epoch"] = ctypes.addressof(_epoch)
    symbols["hf_num_threads"] = ctypes.addressof(config.threads)
    symbols["hf_pool"] = ctypes.addressof(_pool)
    symbols["hf_kept"] = ctypes.addressof(_kept)
    symbols |= {
        name: c_symbols()[name]
        for name in ("clock_gettime", "aligned_alloc", "free", *THREAD_FUNCTIONS)
    }
    code = shared_code(f"{TEXT}\n{pool.TEXT}", target)
    linked = link([code], ("hf_entry", *_STUBS), always_linked() | symbols, target)
    # The threads of the pool outlive the interpreter: they sleep in this code, and look
    # at this memory when they wake.
    for needed in (linked, _pool, _kept, config.threads):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(needed))
    return linked


_kept = ctypes.c_void_p()  # the arena that is kept for the next call
_pool = (ctypes.c_int64 * pool.POOL_WORDS)()


def _forget_threads() -> None:
    """Forget the threads of the pool, which a forked process does not have."""
    forks = _pool[pool.FORKS] + 1
    ctypes.memset(_pool, 0, ctypes.sizeof(_pool))
    _pool[pool.FORKS] = forks


os.register_at_fork(after_in_child=_forget_threads)


# --- interrupts -----------------------------------------------------------------------


_epoch = ctypes.c_int64(0)  # the number of calls of `interrupt`
_requests: dict[int | None, int] = {}  # thread (None: all) -> epoch of its last request
_requests_lock = threading.Lock()


def interrupt(thread_id: int | None = None) -> None:
    """Stop compiled programs that run in other threads: they raise `KeyboardInterrupt`.

    It takes effect within about 0.1 s. It does not affect threads that run no compiled
    program, nor programs that start later.

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
    """Raise if a program that began in `epoch` is to stop; called with the GIL."""
    if _epoch.value == epoch:
        return
    for thread in (None, threading.get_ident()):
        if _requests.get(thread, 0) > epoch:
            raise KeyboardInterrupt
