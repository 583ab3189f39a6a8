"""Loops over threads: their bodies as functions of a range of iterations.

An array of words passes such a function the variables and the buffers of the enclosing
program that it reads. `hf_parallel` runs it, on the threads of a pool (see `pool`).
"""

from functools import partial
from itertools import accumulate
from typing import Final

from hopflow.compiler.cpu.captures import Cells, captured
from hopflow.compiler.cpu.cost import Cost
from hopflow.compiler.cpu.emitter import CpuEmitter
from hopflow.compiler.cpu.memory import ProgramMemory
from hopflow.compiler.cpu.pool import SOON
from hopflow.compiler.cpu.target import HOT
from hopflow.compiler.llvm.module import RARE, Function
from hopflow.compiler.llvm.types import register_type
from hopflow.loop_ir import expr as e
from hopflow.loop_ir import walk
from hopflow.loop_ir.expr import Buffer, Expr, Var
from hopflow.loop_ir.program import For, Swap
from hopflow.ops.opdef import MOST_BYTES

ALONE: Final = 2 * SOON
"""The cost of a loop that needs no such estimate, in instructions (see `cost`)."""
DEAR: Final = 1 << 17
"""The cost of an iteration, in instructions, that takes too long to wait for its end:
other threads are asked before the first one."""
RUN: Final = "i64 @hf_parallel(ptr, ptr, ptr, i64, i1)"
"""Runs a function of a range of iterations: the program's block, the function, the
cells that it is passed, the number of iterations, and whether these take long."""


def emit(emitter: CpuEmitter, s: For) -> None:
    """Emit the function of a loop, and the call of `hf_parallel` with it."""
    f = emitter.f
    private = emitter.private[s]
    variables, named = captured(s.body, [s.var])
    buffers = [b for b in named if b not in private]
    captures = Cells()
    for var in variables:
        captures.add(register_type(var.dtype), emitter.values.value(e.read(var)))
    for buffer in buffers:
        captures.add("ptr", emitter.memory.pointer(buffer))
    captures.add("i64", emitter.first_site or "0")
    cells = captures.stored(f)
    name, cost = _define(emitter, s, captures, variables, buffers)
    extent = emitter.values.value(s.extent)
    status = _run(emitter, s, name, cells, extent, cost, variables)
    go_on, stop = f.name("joined"), f.name("stopped")
    f.branch_if(f.emit(f"icmp ne i64 {status}, 0"), stop, go_on, RARE)
    f.start(stop)
    emitter.leave(status)
    f.start(go_on)
    emitter.values.forget_loads()
    emitter.count_call(cost)


def _run(
    emitter: CpuEmitter,
    s: For,
    name: str,
    cells: str,
    extent: str,
    cost: Cost,
    variables: list[Var],
) -> str:
    """Emit the call of a loop's function; return the register of its status.

    The calling thread runs all iterations at once if they take less time than it takes
    to find out how long the rest takes. Of no iterations it must not even begin one: to
    do so may take memory.
    """
    f = emitter.f
    f.module.external(RUN, "nounwind")

    def shared(takes_long: str) -> str:
        arguments = f"ptr %block, ptr @{name}, ptr {cells}, i64 {extent}"
        return f"call i64 @hf_parallel({arguments}, i1 {takes_long})"

    known = {*variables, *(n.attr for n in walk.nodes(s.extent) if n.op == "var")}
    if cost.unbounded or not _is_over(cost.total, known):
        return f.emit(shared("false"))
    whole = f"ptr %block, ptr {cells}, i64 0, i64 {extent}"
    if cost.total.is_const and s.extent.is_const:
        if cost.total.attr < ALONE and s.extent.attr > 0:
            return f.emit(f"call i64 @{name}({whole})")
        is_dear = cost.total.attr >= DEAR * s.extent.attr
        return f.emit(shared(str(is_dear).lower()))
    with emitter.values.scope():
        total = emitter.values.value(cost.total)
    is_cheap = f.emit(f"icmp slt i64 {total}, {ALONE}")
    some = f.emit(f"icmp sgt i64 {extent}, 0")
    is_short = f.emit(f"and i1 {is_cheap}, {some}")
    alone, several, end = (f.name(n) for n in ("alone", "several", "ran"))
    f.branch_if(is_short, alone, several)
    f.start(alone)
    first = f.emit(f"call i64 @{name}({whole})")
    f.branch(end)
    f.start(several)
    least = f.emit(f"mul i64 {extent}, {DEAR}")
    second = f.emit(shared(f.emit(f"icmp sge i64 {total}, {least}")))
    f.branch(end)
    f.start(end)
    return f.emit(f"phi i64 [ {first}, %{alone} ], [ {second}, %{several} ]")


def _is_over(value: Expr, variables: set[Var]) -> bool:
    """Return whether a value depends on these variables alone."""
    leaves = (n for n in walk.nodes(value) if n.op in ("var", "load"))
    return all(n.op == "var" and n.attr in variables for n in leaves)


def _define(
    emitter: CpuEmitter,
    s: For,
    captures: Cells,
    variables: list[Var],
    buffers: list[Buffer],
) -> tuple[str, Cost]:
    """Define the function of the iterations from `%begin` to `%end`; return its name,
    and the cost of all iterations."""
    outer = emitter.f
    name = outer.module.fresh("hf.part")
    f = Function(
        outer.module,
        f"internal i64 @{name}(ptr %block, ptr %cells, i64 %begin, i64 %end)",
        HOT,
    )
    inner = emitter.for_function(f, ProgramMemory.of(f, emitter.memory))
    for k, var in enumerate(variables):
        inner.values.constants[var] = captures.loaded(f, k)
    for k, buffer in enumerate(buffers, start=len(variables)):
        inner.memory.place(buffer, captures.loaded(f, k))
    if emitter.first_site:
        inner.first_site = captures.loaded(f, len(variables) + len(buffers))
    slots = _allocate(inner, s, emitter.private[s])
    f.branch("first")
    f.start("first")

    def iteration(position: str) -> None:
        inner.values.constants[s.var] = position
        inner.body(s.body)

    inner.loop("%begin", "%end", 1, s.extent, iteration)
    inner.finish()
    f.start("exit")
    for slot in slots:
        inner.unit.heap.free(f, f.emit(f"load ptr, ptr {slot}"))
    f.do(f"ret i64 {f.emit(f'load i64, ptr {inner.status}')}")
    outer.module.define(name, f.text)
    return name, inner.cost


def _allocate(inner: CpuEmitter, s: For, private: list[Buffer]) -> list[str]:
    """Allocate the memory that is private to a thread; return the slots to free.

    It is one block, since a short stretch takes as long as a few allocations do. Guard
    pages are around each buffer.
    """
    f, memory = inner.f, inner.memory
    swapped = {
        b for t in walk.statements(s.body) if isinstance(t, Swap) for b in (t.a, t.b)
    }
    blocks = [[b] for b in private] if inner.unit.guarded else [private]
    slots = []
    for buffers in filter(None, blocks):
        slots.append(f.early_slot("ptr", "own", "null"))
        size_of = partial(inner.allocation, most=MOST_BYTES // len(buffers))
        ends = list(accumulate(map(size_of, buffers), partial(_sum, f)))
        pointer = inner.unit.heap.allocate(f, ends[-1])
        f.do(f"store ptr {pointer}, ptr {slots[-1]}")
        inner.no_memory_if(f.emit(f"icmp eq ptr {pointer}, null"))
        for buffer, start in zip(buffers, ["0", *ends], strict=False):
            address = f.emit(f"getelementptr i8, ptr {pointer}, i64 {start}")
            if buffer in swapped:
                memory.place_in_slot(buffer, address)
            else:
                memory.place(buffer, address)
    return slots


def _sum(f: Function, a: str, b: str) -> str:
    if a.isdigit() and b.isdigit():
        return str(int(a) + int(b))
    return f.emit(f"add i64 {a}, {b}")
