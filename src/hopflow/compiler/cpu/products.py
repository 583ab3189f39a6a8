"""Large matrix products on several threads.

A product of many multiply-adds is divided into blocks of rows and columns of its
result, which `hf_parallel` runs on the threads of the pool. The bits of an element do
not depend on the block that it is in (see `gemm`). The code that divides it is compiled
once in a process: it is passed the address of the function that multiplies a block.
"""

from math import prod
from typing import Final

from hopflow.compiler.cpu.emitter import CpuEmitter
from hopflow.compiler.cpu.parallel import RUN
from hopflow.compiler.cpu.stubs import INTERRUPTED
from hopflow.compiler.llvm.module import OPAQUE, Module
from hopflow.loop_ir.routines import ROUTINES, Routine

LARGE: Final = 1 << 22
"""Multiply-adds of a product that several threads share: a tenth of a millisecond, or
more."""
LARGE_MATRIX: Final = 1 << 17
"""Elements of a matrix whose product with a vector threads may share: it takes as long
as to read them, ten microseconds or more, and the caches of two cores hold more."""
ROWS: Final = 64
"""The least rows of a block; they are a multiple of the heights of all tiles."""
MOST_ROWS: Final = 256
"""The most rows of a block: so many `gemm` computes at a time."""
PARTS: Final = 8
"""The rows are divided into about so many parts, unless these have too few or many."""
COLUMNS: Final = 768
"""The columns of a block, a multiple of the widths of all tiles."""
SHARED: Final = {"hf_shared_gemm": "gemm", "hf_shared_gemm_windows": "gemm_windows"}
"""The functions that divide a product, and the routines with such arguments."""


def emit(emitter: CpuEmitter, name: str, routine: Routine, arguments: list[str]) -> str:
    """Emit a product; return the register of its status.

    Args:
        name: The function of the product.
        routine: What it computes.
        arguments: The addresses of the arrays, and the scalars: first m, n and k.
    """
    f = emitter.f
    types = [argument.split()[0] for argument in arguments]
    f.module.external(f"i64 @{name}({', '.join([*types, *['i64'] * 4])})", OPAQUE)
    m, n, k = arguments[len(routine.arrays) : len(routine.arrays) + 3]
    if not (_has_threads(emitter) and _may_be_large([m, n, k])):
        window = ["i64 0", m, "i64 0", n]
        return f.emit(f"call i64 @{name}({', '.join([*arguments, *window])})")
    windows = routine.name == SHARED["hf_shared_gemm_windows"]
    shared = "hf_shared_gemm_windows" if windows else "hf_shared_gemm"
    functions = ["ptr %block", "ptr @hf_parallel", f"ptr @{name}"]
    f.module.external(RUN, "nounwind")
    f.module.external(f"i64 @{shared}({', '.join(['ptr'] * 3 + types)})", OPAQUE)
    status = f.emit(f"call i64 @{shared}({', '.join(functions + arguments)})")
    onward = f.name("joined")
    emitter.stop_if(f.emit(f"icmp eq i64 {status}, {INTERRUPTED}"), onward)
    f.start(onward)
    return status


def _has_threads(emitter: CpuEmitter) -> bool:
    return emitter.unit.target.has_threads and emitter.may_poll and emitter.has_block


def _may_be_large(sizes: list[str]) -> bool:
    """Return whether a product of so many rows, columns and terms may be large."""
    numbers = [size.removeprefix("i64 ") for size in sizes]
    if any(number.startswith("%") for number in numbers):
        return True
    m, n, _ = map(int, numbers)
    return prod(map(int, numbers)) >= (LARGE_MATRIX if min(m, n) == 1 else LARGE)


def define(module: Module, name: str) -> None:
    """Define one of the functions `SHARED`. Its arguments are the program's block, the
    functions `hf_parallel` and that of the product, and the arguments of the routine.
    """
    routine = ROUTINES[SHARED[name]]
    arrays, scalars = [array.name for array in routine.arrays], [*routine.scalars]
    for intrinsic in ("umin", "umax"):
        module.declare(f"i64 @llvm.{intrinsic}.i64(i64, i64)")
    module.define(f"{name}.blocks", _blocks(name, arrays, scalars))
    module.define(name, _divided(name, arrays, scalars))


def _typed(arrays: list[str], scalars: list[str]) -> str:
    """Return a product's arguments, or its parameters, but for the window."""
    return ", ".join([f"ptr %{a}" for a in arrays] + [f"i64 %{s}" for s in scalars])


def _cells(arrays: list[str], scalars: list[str]) -> list[tuple[str, str]]:
    """Return the types and names of what the function of the blocks is passed."""
    pointers = [("ptr", name) for name in ("multiply", *arrays)]
    return pointers + [("i64", name) for name in (*scalars, "rows", "across")]


def _divided(name: str, arrays: list[str], scalars: list[str]) -> str:
    """Return the function that divides a large product into blocks. One of sizes beyond
    32 bits is left to the routine, which refuses it."""
    cells = _cells(arrays, scalars)
    stores = "".join(
        f"""
  %to.{cell} = getelementptr i64, ptr %cells, i64 {number}
  store {type_} %{cell}, ptr %to.{cell}"""
        for number, (type_, cell) in enumerate(cells)
    )
    arguments = _typed(arrays, scalars)
    return f"""
define i64 @{name}(ptr %block, ptr %run, ptr %multiply, {arguments}) nounwind {{
entry:
  %cells = alloca [{len(cells)} x i64], align 8
  %m.or.n = or i64 %m, %n
  %any = or i64 %m.or.n, %k
  %is.int = icmp ult i64 %any, {1 << 31}
  %m.f = sitofp i64 %m to double
  %n.f = sitofp i64 %n to double
  %k.f = sitofp i64 %k to double
  %area = fmul double %m.f, %n.f
  %work = fmul double %area, %k.f
  %is.large = fcmp oge double %work, {float(LARGE)}
  %is.large.matrix = fcmp oge double %work, {float(LARGE_MATRIX)}
  %is.row = icmp eq i64 %m, 1
  %is.column = icmp eq i64 %n, 1
  %has.vector = or i1 %is.row, %is.column
  %reads.much = and i1 %has.vector, %is.large.matrix
  %is.worth = or i1 %is.large, %reads.much
  %divides = and i1 %is.int, %is.worth
  br i1 %divides, label %divide, label %alone
alone:
  %status = call i64 %multiply({arguments}, i64 0, i64 %m, i64 0, i64 %n)
  ret i64 %status
divide:
  %m.past = add i64 %m, {ROWS - 1}
  %parts = udiv i64 %m.past, {ROWS}
  %rows.0 = mul i64 %parts, {ROWS // PARTS}
  %rows.1 = call i64 @llvm.umax.i64(i64 %rows.0, i64 {ROWS})
  %rows = call i64 @llvm.umin.i64(i64 %rows.1, i64 {MOST_ROWS})
  %last.row = sub i64 %m, 1
  %down.0 = udiv i64 %last.row, %rows
  %down = add i64 %down.0, 1
  %last.column = sub i64 %n, 1
  %across.0 = udiv i64 %last.column, {COLUMNS}
  %across = add i64 %across.0, 1
  %blocks = mul i64 %down, %across{stores}
  %all = call i64 %run(
      ptr %block, ptr @{name}.blocks, ptr %cells, i64 %blocks, i1 %is.large)
  ret i64 %all
}}
"""


def _blocks(name: str, arrays: list[str], scalars: list[str]) -> str:
    """Return the function of a range of blocks."""
    loads = "".join(
        f"""
  %to.{cell} = getelementptr i64, ptr %cells, i64 {number}
  %{cell} = load {type_}, ptr %to.{cell}"""
        for number, (type_, cell) in enumerate(_cells(arrays, scalars))
    )
    return f"""
define internal i64 @{name}.blocks(
    ptr %block, ptr %cells, i64 %begin, i64 %end) nounwind {{
entry:{loads}
  br label %next
next:
  %i = phi i64 [ %begin, %entry ], [ %i.next, %next ]
  %row = udiv i64 %i, %across
  %column = urem i64 %i, %across
  %top = mul i64 %row, %rows
  %below = add i64 %top, %rows
  %bottom = call i64 @llvm.umin.i64(i64 %below, i64 %m)
  %left = mul i64 %column, {COLUMNS}
  %beside = add i64 %left, {COLUMNS}
  %right = call i64 @llvm.umin.i64(i64 %beside, i64 %n)
  %status = call i64 %multiply(
      {_typed(arrays, scalars)},
      i64 %top, i64 %bottom, i64 %left, i64 %right)
  %i.next = add nuw nsw i64 %i, 1
  %again = icmp slt i64 %i.next, %end
  br i1 %again, label %next, label %done
done:
  ret i64 0
}}
"""
