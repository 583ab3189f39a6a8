"""Calls of library routines (`loop_ir.routines`).

A routine is `i64 @hf_<name>_<dtype>(arrays, scalars, flags)`, which returns the status.
`hopflow.compiler.cpu.library` compiles its code.
"""

from typing import Final

from hopflow import dtypes
from hopflow.compiler.cpu import products
from hopflow.compiler.cpu.cost import Cost
from hopflow.compiler.cpu.emitter import CpuEmitter
from hopflow.compiler.llvm.module import OPAQUE
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Expr
from hopflow.loop_ir.program import Call, Ref
from hopflow.loop_ir.routines import ROUTINES

_CLOCK: Final = 64
"""The cost of reading the clock."""
_KEY: Final = {"argsort": 32, "top_order": 16}
"""The cost of a key, of routines that are linear in their number."""


def emit(emitter: CpuEmitter, s: Call) -> None:
    """Emit a call, and the trap if it fails."""
    f, values, memory = emitter.f, emitter.values, emitter.memory
    routine = ROUTINES[s.routine]
    arguments = []
    scalars: list[Expr] = []
    for argument in s.args:
        if isinstance(argument, Ref):
            distance = values.value(memory.linear(argument.buffer, argument.at))
            arguments.append(f"ptr {memory.address(argument.buffer, distance)}")
        else:
            scalar = e.cast(argument, dtypes.int64)
            scalars.append(scalar)
            arguments.append(f"i64 {values.value(scalar)}")
    first = s.args[0]
    assert isinstance(first, Ref)
    name = f"hf_{routine.name}_{first.buffer.dtype.short}"
    if s.routine.startswith("gemm"):
        status = products.emit(emitter, name, routine, arguments)
    else:
        types = ", ".join(argument.split()[0] for argument in arguments)
        f.module.external(f"i64 @{name}({types})", OPAQUE)
        status = f.emit(f"call i64 @{name}({', '.join(arguments)})")
    emitter.count(_cost(s.routine, scalars[: len(routine.scalars)]))
    if s.site is not None:
        failed = f.emit(f"icmp ne i64 {status}, 0")
        with emitter.trap_if(failed, s.site):
            emitter.report(0, status)


def _cost(name: str, scalars: list[Expr]) -> Cost:
    """Return about the time of a routine: cubic for all but sorting."""
    if not scalars:  # the clock
        return Cost(_CLOCK)
    if name in _KEY:
        work = e.mul(e.index(_KEY[name]), scalars[0])
    else:
        work = scalars[0] if len(scalars) < 3 else e.index(1)
        work = e.mul(work, scalars[0]) if len(scalars) < 2 else work
        for scalar in scalars[:3]:
            work = e.mul(work, scalar)
        work = e.div(work, e.index(8))
    work = e.add(work, e.index(200))
    return Cost(work.attr) if work.is_const else Cost(0, [work])
