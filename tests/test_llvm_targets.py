"""What all targets of LLVM share, without anything of the CPU's: for a GPU as well.

The machines that native code is exported for are tested by `test_export_native.py`.
"""

import llvmlite.binding as llvm
import pytest

from hopflow import dtypes
from hopflow.compiler.llvm.compiler import Compiler
from hopflow.compiler.llvm.memory import Memory
from hopflow.compiler.llvm.module import Function, Module
from hopflow.compiler.llvm.statements import Emitter
from hopflow.compiler.llvm.target import LlvmTarget
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Buffer, Var
from hopflow.loop_ir.program import (
    Accumulate,
    Assign,
    Declare,
    For,
    If,
    Let,
    Stmt,
    Store,
    While,
)

pytestmark = pytest.mark.slow

LAYOUT = "e-i64:64-i128:128-v16:16-v32:32-n16:32:64"


def compiler() -> Compiler:
    try:
        llvm.initialize_all_targets()
        llvm.initialize_all_asmprinters()
        llvm.Target.from_triple("nvptx64-nvidia-cuda")
    except RuntimeError:
        pytest.skip("this LLVM makes no code for NVIDIA's GPUs")
    return Compiler(LlvmTarget("nvptx64-nvidia-cuda", LAYOUT, "sm_90", "+ptx80"))


def emitted(statements: list[Stmt], n: Var, x: Buffer, out: Buffer) -> str:
    """A function of `n`, `x` and `out` that does some statements."""
    module = Module()
    f = Function(module, "void @kernel(i64 %n, ptr %x, ptr %out)", "nounwind")
    memory = Memory(f)
    memory.place(x, "%x")
    memory.place(out, "%out")
    emitter = Emitter(f, memory)
    emitter.values.constants[n] = "%n"
    emitter.body(statements)
    f.do("ret void")
    module.define("kernel", f.text)
    assert not module.symbols
    return module.text


def test_loops_and_mathematical_functions_become_ptx() -> None:
    n, i, total = (Var(name, dtypes.int64) for name in ("n", "i", "total"))
    count, y = Var("count", dtypes.int64), Var("y", dtypes.float32)
    x = Buffer("x", dtypes.float32, (e.read(n),), "input")
    out = Buffer("out", dtypes.float32, (e.read(n),), "output")
    at = (e.read(i),)
    less = e.compare("lt", e.read(count), e.read(i))
    body: list[Stmt] = [
        Let(y, e.unary("exp", e.load(x, at))),
        Declare(count, e.index(0)),
        While([], less, [Assign(count, e.add(e.read(count), e.index(3)))]),
        If(less, [], [Store(out, at, e.read(y))]),
        Accumulate(total, "add", e.read(count)),
    ]
    statements: list[Stmt] = [Declare(total, e.index(0)), For(i, e.read(n), body)]
    ptx = compiler().assembly(emitted(statements, n, x, out))
    assert ".target sm_90" in ptx
    assert "fma.rn.f32" in ptx
    assert "st.b32" in ptx
