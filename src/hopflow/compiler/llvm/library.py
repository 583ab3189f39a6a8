"""Functions that programs share: library routines, and far ranges of mathematical ones.

Each is compiled when a program first needs it, once in a process, and stays.
"""

import threading
from typing import Final

from hopflow import dtypes
from hopflow.compiler.llvm import blas, expressions, gemm, lapack, sort
from hopflow.compiler.llvm.jit import Library, always_linked, c_symbols, jit
from hopflow.compiler.llvm.module import Module
from hopflow.loop_ir.routines import ROUTINES

_loaded: dict[str, Library] = {}
_lock: Final = threading.RLock()


def address(name: str) -> int:
    """The address of `hf_<routine>_<dtype>`, or of `hf_far_<function>_<dtype>`."""
    with _lock:
        library = _loaded.get(name)
        if library is None:
            library = _loaded[name] = _compile(name)
        return library[name]


def _compile(name: str) -> Library:
    routine, _, short = name.removeprefix("hf_").rpartition("_")
    dtype = dtypes.as_dtype(short)
    module = Module()
    if routine.startswith("far_"):
        expressions.define_far(module, name, routine.removeprefix("far_"), dtype)
    elif routine == "argsort":
        sort.define(module, name, dtype, jit().target)
    elif routine.startswith("gemm"):
        gemm.define(module, name, ROUTINES[routine], dtype, jit().target)
    else:
        lapack.define(module, name, ROUTINES[routine], dtype, jit().target)
    text = module.text
    symbols = {
        symbol: c_symbols().get(symbol) or blas.fortran(symbol)
        for symbol in module.symbols
    }
    return jit().link(jit().compile(text), [name], always_linked() | symbols)
