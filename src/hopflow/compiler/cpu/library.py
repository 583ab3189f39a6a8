"""Functions that programs share: routines, and mathematical functions of large
arguments.

Each is compiled when a program first needs it, once in a process, and stays.
"""

from hopflow import dtypes
from hopflow.compiler.cpu import blas, gemm, lapack, products, sort, transposition
from hopflow.compiler.cpu.jit import (
    Linked,
    always_linked,
    c_symbols,
    link,
    once,
    shared_code,
)
from hopflow.compiler.cpu.target import CpuTarget
from hopflow.compiler.llvm import expressions
from hopflow.compiler.llvm.module import Module
from hopflow.loop_ir.routines import ROUTINES


def address(name: str, target: CpuTarget) -> int:
    """Return the address of `hf_<routine>_<dtype>`, of `hf_far_<function>_<dtype>`, of
    `hf_transpose_<rows>_<dtype>`, or of a function that divides products of matrices
    (`products.SHARED`)."""
    return _compiled(name, target)[name]


@once
def _compiled(name: str, target: CpuTarget) -> Linked:
    module = Module(has_extrema=target.has_extrema, has_fma=target.has_fma)
    define(module, name, target)
    text = module.text
    symbols = {
        symbol: c_symbols().get(symbol) or blas.fortran(symbol)
        for symbol in module.symbols
    }
    code = shared_code(text, target)
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
