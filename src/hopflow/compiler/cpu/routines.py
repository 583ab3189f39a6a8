"""Calls of library routines (`loop_ir.routines`).

A routine is `i64 @hf_<name>_<dtype>(arrays, scalars, flags)`, which returns the status.
`hopflow.compiler.cpu.library` compiles its code.
"""

from collections.abc import Sequence
from typing import Final

from hopflow import dtypes
from hopflow.compiler.cpu import products
from hopflow.compiler.cpu.cost import Cost
from hopflow.compiler.cpu.emitter import CpuEmitter
from hopflow.compiler.llvm.module import OPAQUE
from hopflow.compiler.llvm.types import NARROW_FLOATS
from hopflow.dtypes import DType
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Expr
from hopflow.loop_ir.program import Call, Ref
from hopflow.loop_ir.routines import ROUTINES

_CLOCK: Final = 64
"""The cost of reading the clock."""
_KEY: Final = {"argsort": 32, "sort": 24, "top_order": 16}
"""The cost of a key, of routines that are linear in their number."""

FEW: Final = 8
"""Up to this number of keys for each bit of a code are merged: counting digits takes
as long as the digits that there can be."""
KEPT: Final = 64
"""Up to this number of the largest keys are found by one scan."""
PARTS: Final = ("few", "many")
"""The parts of a routine that sorts: for few keys, and for many."""
_CODES: Final = {8: dtypes.uint8, 16: dtypes.uint16, 32: dtypes.uint32}


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
    dtype = first.buffer.dtype
    part = routine.name
    if part in _KEY:
        part = part_of(part, dtype, scalars)
    name = f"hf_{part}_{dtype.short}"
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


def part_of(routine: str, dtype: DType, scalars: Sequence[Expr]) -> str:
    """Return the name of the part of a routine that sorts keys of `dtype`, if the
    numbers of keys are known: to compile the other part takes as long.

    A "top_order" of few has no sort; that of many is the whole routine.
    """
    number = scalars[1 if routine == "top_order" else 0]
    if not number.is_const:
        return routine
    if routine == "top_order":
        return f"{routine}_{PARTS[0]}" if number.attr <= KEPT else routine
    is_few = number.attr <= FEW * code_type(dtype).bits
    return f"{routine}_{PARTS[0 if is_few else 1]}"


def code_type(dtype: DType) -> DType:
    """Return the dtype of unsigned integers in the order of keys of `dtype`."""
    if dtype in NARROW_FLOATS:
        return dtypes.uint32
    return _CODES.get(max(8, dtype.bits), dtypes.uint64)
