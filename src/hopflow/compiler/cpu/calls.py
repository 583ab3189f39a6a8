"""Calls of a program's functions.

A sequence of calls of one function becomes a loop over a table of arguments, if they
differ only in addresses that are constant offsets. The size of the code, and the time
that LLVM takes, then do not depend on the number of calls.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from hopflow.compiler.cpu.emitter import CpuEmitter
from hopflow.compiler.llvm.module import RARE, symbol
from hopflow.loop_ir import expr as e
from hopflow.loop_ir import walk
from hopflow.loop_ir.program import Invoke, Stmt

_WORTH: Final = 4
"""The fewest calls that become a loop."""


@dataclass(eq=False, slots=True)
class Row:
    """A call as a row of a table: its site, and two words for each address.

    The first is the number of the word of the block that holds a base address (or -1,
    the arena), the second an offset in bytes. Rows are equal if they can share a table:
    they have the same function and sizes.
    """

    call: Invoke
    words: list[int]

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Row)
            and self.call.function is other.call.function
            and walk.same_shape(self.call.sizes, other.call.sizes)
        )

    __hash__ = None  # type: ignore[assignment]


def runs(emitter: CpuEmitter, statements: Sequence[Stmt]) -> Iterator[Stmt | list[Row]]:
    """Yield statements, or the rows of a table for calls that it can replace."""
    rows = [_row(emitter, s) if isinstance(s, Invoke) else None for s in statements]
    pairs = zip(statements, rows, strict=True)
    for row, group in groupby(pairs, lambda pair: pair[1]):
        run = list(group)
        if row is not None and len(run) >= _WORTH:
            yield [row for _, row in run if row is not None]
        else:
            yield from [s for s, _ in run]


def _row(emitter: CpuEmitter, s: Invoke) -> Row | None:
    """Return the row of a call, or None if an address is no constant offset."""
    memory, words = emitter.memory, [s.site]
    for ref in s.passed:
        root = memory.root(ref.buffer)
        distance = memory.linear(ref.buffer, ref.at)
        if root is None or not distance.is_const:
            return None
        word, offset = root
        words += word, offset + distance.attr * ref.buffer.dtype.itemsize
    return Row(s, words)


def emit(emitter: CpuEmitter, s: Invoke) -> None:
    """Emit one call."""
    values, memory = emitter.values, emitter.memory
    pointers = []
    for ref in s.passed:
        distance = values.value(memory.linear(ref.buffer, ref.at))
        start = memory.pointer_again(ref.buffer)
        pointers.append(memory.address(ref.buffer, distance, start))
    _call(emitter, s, emitter.site(s.site), pointers)
    emitter.count_call(emitter.unit.functions[symbol(s.function.name)].cost)


def emit_all(emitter: CpuEmitter, rows: Sequence[Row]) -> None:
    """Emit the calls of a table as a loop over it."""
    f, first = emitter.f, rows[0]
    width = len(first.words)
    table = f.module.table([word for row in rows for word in row.words])

    def word(row: str, k: int) -> str:
        at = f.emit(f"getelementptr i64, ptr {row}, i64 {k}")
        return f.emit(f"load i64, ptr {at}")

    def call(position: str) -> None:
        row = f.emit(f"getelementptr [{width} x i64], ptr @{table}, i64 {position}")
        pointers = []
        for k in range(1, width, 2):
            root, distance = word(row, k), word(row, k + 1)
            start = emitter.memory.start_of(root)
            pointers.append(f.emit(f"getelementptr i8, ptr {start}, i64 {distance}"))
        site = word(row, 0)
        if emitter.first_site:
            site = f.emit(f"add i64 {site}, {emitter.first_site}")
        _call(emitter, first.call, site, pointers)
        cost = emitter.unit.functions[symbol(first.call.function.name)].cost
        emitter.count_call(cost)

    emitter.loop("0", str(len(rows)), 1, e.index(len(rows)), call)


def _call(emitter: CpuEmitter, s: Invoke, site: str, pointers: Sequence[str]) -> None:
    """Emit a call; if the function stops, so does the program, for the same reason."""
    f, name = emitter.f, symbol(s.function.name)
    arguments = ["ptr %block", f"i64 {site}"]
    arguments += [f"i64 {emitter.values.value(size)}" for size in s.sizes]
    arguments += [f"ptr {pointer}" for pointer in pointers]
    status = f.emit(f"call i64 @{name}({', '.join(arguments)})")
    emitter.values.forget_loads()
    if emitter.unit.functions[name].may_stop:
        onward, failed = f.name("called"), f.emit(f"icmp ne i64 {status}, 0")
        f.do(f"store i64 {status}, ptr {emitter.status}")
        f.branch_if(failed, "exit", onward, RARE)
        f.start(onward)
        emitter.may_stop = True
