"""Large matrix products on several threads.

A product of many multiply-adds is divided into blocks of rows and columns of its
result, which `hf_parallel` runs on the threads of the pool. The bits of an element do
not depend on the block that it is in (see `gemm`).
"""

from typing import Final

from hopflow.compiler.cpu.emitter import CpuEmitter
from hopflow.compiler.cpu.parallel import RUN
from hopflow.compiler.cpu.stubs import INTERRUPTED
from hopflow.compiler.llvm.module import OPAQUE, Module
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Expr

LARGE: Final = 1 << 22
"""Multiply-adds of a product that several threads share: a tenth of a millisecond, or
more."""
ROWS: Final = 64
"""The least rows of a block; they are a multiple of the heights of all tiles."""
MOST_ROWS: Final = 256
"""The most rows of a block: so many `gemm` computes at a time."""
PARTS: Final = 8
"""The rows are divided into about so many parts, unless these have too few or many."""
COLUMNS: Final = 768
"""The columns of a block, a multiple of the widths of all tiles."""


def emit(
    emitter: CpuEmitter, name: str, arguments: list[str], sizes: list[Expr]
) -> str:
    """Emit a product; return the register of its status.

    Args:
        name: The function of the product.
        arguments: The addresses of the matrices, and the sizes m, n and k.
        sizes: The sizes.
    """
    f = emitter.f
    types = ", ".join(["ptr"] * 3 + ["i64"] * 7)
    f.module.external(f"i64 @{name}({types})", OPAQUE)
    if not (_has_threads(emitter) and _may_be_large(sizes)):
        _, _, _, m, n, _ = arguments
        window = ["i64 0", m, "i64 0", n]
        return f.emit(f"call i64 @{name}({', '.join([*arguments, *window])})")
    shared = _shared(f.module, name)
    status = f.emit(f"call i64 @{shared}({', '.join(['ptr %block', *arguments])})")
    onward = f.name("joined")
    emitter.stop_if(f.emit(f"icmp eq i64 {status}, {INTERRUPTED}"), onward)
    f.start(onward)
    return status


def _has_threads(emitter: CpuEmitter) -> bool:
    return emitter.unit.target.has_threads and emitter.may_poll and emitter.has_block


def _may_be_large(sizes: list[Expr]) -> bool:
    work = e.index(1)
    for size in sizes:
        work = e.mul(work, size)
    return not work.is_const or work.attr >= LARGE


def _shared(module: Module, name: str) -> str:
    """Define the function that divides a product into blocks if it is large."""
    shared = f"{name}.shared"
    if not module.has_function(shared):
        module.external(RUN, "nounwind")
        for intrinsic in ("umin", "umax"):
            module.declare(f"i64 @llvm.{intrinsic}.i64(i64, i64)")
        module.define(f"{name}.blocks", _BLOCKS.replace("PRODUCT", name))
        module.define(shared, _SHARED.replace("PRODUCT", name))
    return shared


# The product of sizes beyond 32 bits is left to the routine, which refuses them.
_SHARED: Final = f"""
define internal i64 @PRODUCT.shared(
    ptr %block, ptr %a, ptr %b, ptr %out, i64 %m, i64 %n, i64 %k) noinline nounwind {{
entry:
  %cells = alloca [8 x i64], align 8
  %m.or.n = or i64 %m, %n
  %any = or i64 %m.or.n, %k
  %is.int = icmp ult i64 %any, {1 << 31}
  %m.f = sitofp i64 %m to double
  %n.f = sitofp i64 %n to double
  %k.f = sitofp i64 %k to double
  %area = fmul double %m.f, %n.f
  %work = fmul double %area, %k.f
  %is.large = fcmp oge double %work, {float(LARGE)}
  %divides = and i1 %is.int, %is.large
  br i1 %divides, label %divide, label %alone
alone:
  %status = call i64 @PRODUCT(
      ptr %a, ptr %b, ptr %out, i64 %m, i64 %n, i64 %k, i64 0, i64 %m, i64 0, i64 %n)
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
  %blocks = mul i64 %down, %across
  %to.b = getelementptr i64, ptr %cells, i64 1
  %to.out = getelementptr i64, ptr %cells, i64 2
  %to.m = getelementptr i64, ptr %cells, i64 3
  %to.n = getelementptr i64, ptr %cells, i64 4
  %to.k = getelementptr i64, ptr %cells, i64 5
  %to.rows = getelementptr i64, ptr %cells, i64 6
  %to.across = getelementptr i64, ptr %cells, i64 7
  store ptr %a, ptr %cells
  store ptr %b, ptr %to.b
  store ptr %out, ptr %to.out
  store i64 %m, ptr %to.m
  store i64 %n, ptr %to.n
  store i64 %k, ptr %to.k
  store i64 %rows, ptr %to.rows
  store i64 %across, ptr %to.across
  %all = call i64 @hf_parallel(
      ptr %block, ptr @PRODUCT.blocks, ptr %cells, i64 %blocks, i1 true)
  ret i64 %all
}}
"""

_BLOCKS: Final = f"""
define internal i64 @PRODUCT.blocks(
    ptr %block, ptr %cells, i64 %begin, i64 %end) nounwind {{
entry:
  %to.b = getelementptr i64, ptr %cells, i64 1
  %to.out = getelementptr i64, ptr %cells, i64 2
  %to.m = getelementptr i64, ptr %cells, i64 3
  %to.n = getelementptr i64, ptr %cells, i64 4
  %to.k = getelementptr i64, ptr %cells, i64 5
  %to.rows = getelementptr i64, ptr %cells, i64 6
  %to.across = getelementptr i64, ptr %cells, i64 7
  %a = load ptr, ptr %cells
  %b = load ptr, ptr %to.b
  %out = load ptr, ptr %to.out
  %m = load i64, ptr %to.m
  %n = load i64, ptr %to.n
  %k = load i64, ptr %to.k
  %rows = load i64, ptr %to.rows
  %across = load i64, ptr %to.across
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
  %status = call i64 @PRODUCT(
      ptr %a, ptr %b, ptr %out, i64 %m, i64 %n, i64 %k,
      i64 %top, i64 %bottom, i64 %left, i64 %right)
  %i.next = add nuw nsw i64 %i, 1
  %again = icmp slt i64 %i.next, %end
  br i1 %again, label %next, label %done
done:
  ret i64 0
}}
"""
