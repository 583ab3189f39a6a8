"""Calls of Python out of native code.

The stub `hf_call` takes the program's block, the number of the site, and words: of each
operand and then of each result the address and the extents. It returns whether Python
has an error set, which ends the program.
"""

from typing import TYPE_CHECKING, Final

from hopflow.compiler.llvm.cost import Cost
from hopflow.loop_ir.nest import HostCall

if TYPE_CHECKING:
    from hopflow.compiler.llvm.statements import Emitter

_COST: Final = Cost(1000)
"""About that of the simplest function."""


def emit(emitter: "Emitter", s: HostCall) -> None:
    """Emit a call, and the way out if it fails."""
    f, values, memory = emitter.f, emitter.values, emitter.memory
    words: list[str] = []
    for ref in s.refs:
        distance = values.value(memory.linear(ref.buffer, ref.at))
        words.append(f"ptr {memory.address(ref.buffer, distance)}")
        extents = ref.buffer.shape[len(ref.at) :]
        words += [f"i64 {values.value(extent)}" for extent in extents]
    block = f.slot(f"[{max(len(words), 1)} x i64]", "words")
    for k, word in enumerate(words):
        to = f.emit(f"getelementptr i64, ptr {block}, i64 {k}")
        f.do(f"store {word}, ptr {to}")
    # It reads and writes memory of the program's that its arguments only point to.
    f.module.external("i64 @hf_call(ptr, i64, ptr)", "nounwind")
    failed = f.emit(f"call i64 @hf_call(ptr %block, i64 {s.site}, ptr {block})")
    emitter.count(_COST)
    onward = f.name("called")
    emitter.stop_if(f.emit(f"icmp ne i64 {failed}, 0"), onward)
    f.start(onward)
