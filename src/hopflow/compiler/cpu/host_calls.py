"""Calls of Python from native code.

The stub `hf_call` takes the program's block, the number of the site, and words: the
address and the extents of each operand and then of each result. It returns whether
Python has an error set, which ends the program. `hf_tick` calls it for a `Tick`, unless
the last report was a moment ago.
"""

from typing import Final

from hopflow.compiler.cpu.cost import FUEL, Cost
from hopflow.compiler.cpu.emitter import CpuEmitter
from hopflow.compiler.cpu.stubs import TOLD
from hopflow.compiler.llvm.module import OPAQUE, RARE, Function
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.program import HostCall, Tick

_COST: Final = Cost(1000)
"""About the cost of the simplest function."""


def emit(emitter: CpuEmitter, s: HostCall) -> None:
    """Emit a call, and the exit if it fails."""
    f, values, memory = emitter.f, emitter.values, emitter.memory
    words: list[str] = []
    for ref in s.refs:
        distance = values.value(memory.linear(ref.buffer, ref.at))
        words.append(f"ptr {memory.address(ref.buffer, distance)}")
        words += [f"i64 {values.value(extent)}" for extent in ref.shape]
    block = f.slot(f"[{max(len(words), 1)} x i64]", "words")
    for k, word in enumerate(words):
        to = f.emit(f"getelementptr i64, ptr {block}, i64 {k}")
        f.do(f"store {word}, ptr {to}")
    # It accesses memory of the program to which its arguments point only indirectly.
    f.module.external("i64 @hf_call(ptr, i64, ptr)", "nounwind")
    site = emitter.site(s.site)
    failed = f.emit(f"call i64 @hf_call(ptr %block, i64 {site}, ptr {block})")
    emitter.count(_COST)
    emitter.cost.polls = True  # Python polls, and may take any time
    onward = f.name("called")
    emitter.stop_if(f.emit(f"icmp ne i64 {failed}, 0"), onward)
    f.start(onward)


def emit_tick(emitter: CpuEmitter, s: Tick) -> None:
    """Emit a countdown by the cost of the code before it in a step, and a call at zero.

    A step that polls may take any time, and reads the clock each time. So does one
    whose cost depends on the variable of a loop in it. Where there is no Python,
    nothing is reported.
    """
    if emitter.unit.target.freestanding:
        return
    f, values = emitter.f, emitter.values
    done, total = values.value(s.done), values.value(s.total)
    fuel = emitter.ticks(s.site)
    call, onward = f.name("tick"), f.name("ticked")
    cost = emitter.cost
    if s.always or cost.unbounded or cost.polls or not values.has(cost.total):
        f.branch(call)
    else:
        with values.scope():
            spent = values.value(e.add(cost.total, e.index(_TICK)))
        remaining = f.emit(f"load i64, ptr {fuel}")
        rest = f.emit(f"sub i64 {remaining}, {spent}")
        f.do(f"store i64 {rest}, ptr {fuel}")
        f.branch_if(f.emit(f"icmp slt i64 {rest}, 0"), call, onward, RARE)
    f.start(call)
    f.do(f"store i64 {FUEL}, ptr {fuel}")
    f.module.external(
        "preserve_mostcc i64 @hf_tick(ptr, i64, i64, i64, i64)", f"cold {OPAQUE}"
    )
    words = (emitter.site(s.site), done, total, str(s.ends + s.always))
    arguments = ", ".join(("ptr %block", *(f"i64 {word}" for word in words)))
    failed = f.emit(f"call preserve_mostcc i64 @hf_tick({arguments})")
    emitter.stop_if(f.emit(f"icmp ne i64 {failed}, 0"), onward)
    f.start(onward)


_TICK: Final = 4
"""The cost of the countdown itself."""


def start_ticks(f: Function, sites: int) -> None:
    """Allocate the words with the time of each site's last report.

    All functions and parts share them, as they may be called far more often than there
    is something to report.
    """
    table = f.early_slot(f"[{sites} x [2 x i64]]", "told", "zeroinitializer")
    to = f.emit(f"getelementptr i64, ptr %block, i64 {TOLD}")
    f.do(f"store ptr {table}, ptr {to}")
