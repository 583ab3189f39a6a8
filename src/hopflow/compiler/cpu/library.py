"""Functions that programs share: routines, and mathematical functions of large
arguments.

Each is compiled when a program first needs it, once in a process, and stays.
"""

import threading
from collections.abc import Sequence
from typing import Final

from hopflow import dtypes
from hopflow.compiler.cpu import blas, gemm, lapack, products, sort, transposition
from hopflow.compiler.cpu.jit import (
    Linked,
    always_linked,
    c_symbols,
    link,
    object_code_of,
)
from hopflow.compiler.cpu.target import CpuTarget
from hopflow.compiler.llvm import expressions
from hopflow.compiler.llvm.module import Module
from hopflow.loop_ir.routines import ROUTINES

_linked: Final[dict[tuple[str, CpuTarget], Linked]] = {}
_lock: Final = threading.RLock()


def address(name: str, target: CpuTarget) -> int:
    """Return the address of `hf_<routine>_<dtype>`, of `hf_far_<function>_<dtype>`, of
    `hf_transpose_<rows>_<dtype>`, or of a function that divides products of matrices
    (`products.SHARED`)."""
    if (name, target) not in _linked:
        compile_with((), (name,), target)
    return _linked[name, target][name]


def compile_with(
    parts: Sequence[str], names: Sequence[str], target: CpuTarget
) -> tuple[bytes, ...]:
    """Return the object code of the parts of a program that calls functions with such
    names, and link those of the functions that are not yet.

    LLVM compiles all of these at the same time. Its options are global, so that a
    program that calls such functions is compiled without loop strength reduction, as
    the functions are: otherwise its code would depend on which of them were linked.

    Raises:
        CompileError: A text is not valid LLVM IR, a defect of the compiler.
    """
    modules = {n: _module(n, target) for n in names if (n, target) not in _linked}
    texts = [module.text for module in modules.values()]
    objects, codes = object_code_of(parts, texts, target, is_long=bool(names))
    for (name, module), code in zip(modules.items(), codes, strict=True):
        # Native code must not be linked twice, since one of the two would be freed.
        with _lock:
            if (name, target) not in _linked:
                _linked[name, target] = _link(name, module, code, target)
    return objects


def _module(name: str, target: CpuTarget) -> Module:
    module = Module(has_extrema=target.has_extrema, has_fma=target.has_fma)
    define(module, name, target)
    return module


def _link(name: str, module: Module, code: bytes, target: CpuTarget) -> Linked:
    symbols = {
        symbol: c_symbols().get(symbol) or blas.fortran(symbol)
        for symbol in module.symbols
    }
    return link([code], [name], always_linked() | symbols, target)


def define(module: Module, name: str, target: CpuTarget) -> None:
    """Define a function of `address` in a module."""
    if name in products.SHARED:
        products.define(module, name)
        return
    routine, _, short = name.removeprefix("hf_").rpartition("_")
    if routine.startswith("transpose_"):
        size, bits = int(routine.removeprefix("transpose_")), int(short[1:])
        transposition.define(module, name, size, bits)
        return
    dtype = dtypes.as_dtype(short)
    if routine.startswith("far_"):
        expressions.define_far(module, name, routine.removeprefix("far_"), dtype)
    elif routine.startswith(("argsort", "sort", "top_order")):
        sort.define(module, name, routine, dtype, target)
    elif routine.startswith("gemm"):
        gemm.define(module, name, ROUTINES[routine], dtype, target)
    else:
        lapack.define(module, name, ROUTINES[routine], dtype, target)
