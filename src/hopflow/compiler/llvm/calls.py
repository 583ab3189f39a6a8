"""Calls of a program's functions.

A stretch of calls of one function is a loop over a table that says what each is given,
if only addresses differ that are known before: how much code there is, and how long
LLVM takes for it, then does not depend on how many calls there are.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Final

from hopflow.compiler.llvm.module import RARE, symbol
from hopflow.loop_ir import expr as e
from hopflow.loop_ir import walk
from hopflow.loop_ir.nest import Invoke, Ref, Stmt

if TYPE_CHECKING:
    from hopflow.compiler.llvm.statements import Emitter

_WORTH: Final = 4
"""So many calls at least are worth a loop."""


def runs(emitter: "Emitter", statements: Sequence[Stmt]) -> list[Sequence[Stmt]]:
    """The statements, those together that one loop over a table can be."""
    found: list[Sequence[Stmt]] = []
    for key, group in groupby(statements, lambda s: _kind(emitter, s)):
        together = list(group)
        if key is not None and len(together) >= _WORTH:
            found.append(together)
        else:
            found += [[s] for s in together]
    return found


class _Kind:
    """What calls of one loop have in common: the function, and its sizes."""

    def __init__(self, call: Invoke) -> None:
        self.call = call

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _Kind)
            and self.call.function is other.call.function
            and walk.same_shape(self.call.sizes, other.call.sizes)
        )

    __hash__ = None  # type: ignore[assignment]


def _kind(emitter: "Emitter", s: Stmt) -> _Kind | None:
    if not isinstance(s, Invoke):
        return None
    return _Kind(s) if all(_place(emitter, ref) for ref in s.refs) else None


def _place(emitter: "Emitter", ref: Ref) -> tuple[int, int] | None:
    """Where an address is found: which word of the block (or -1, the arena's) holds
    where it counts from, and bytes from there. None: that is not known before."""
    root = emitter.memory.root(ref.buffer)
    distance = emitter.memory.linear(ref.buffer, ref.at)
    if root is None or not distance.is_const:
        return None
    return root[0], root[1] + distance.attr * ref.buffer.dtype.itemsize


def emit(emitter: "Emitter", s: Invoke) -> None:
    """Emit one call."""
    values, memory = emitter.values, emitter.memory
    pointers = []
    for ref in s.refs:
        distance = values.value(memory.linear(ref.buffer, ref.at))
        start = memory.pointer_again(ref.buffer)
        pointers.append(memory.address(ref.buffer, distance, start))
    _call(emitter, s, emitter.site(s.site), pointers)
    emitter.count(emitter.f.module.functions[symbol(s.function.name)].cost)


def emit_all(emitter: "Emitter", calls: Sequence[Invoke]) -> None:
    """Emit calls that `runs` put together, as a loop over a table of words: for each
    call its site, and then where each address is found."""
    f = emitter.f
    words: list[int] = []
    for s in calls:
        words.append(s.site)
        for ref in s.refs:
            place = _place(emitter, ref)
            assert place is not None
            words += place
    width = len(words) // len(calls)
    table = f.module.table(words)

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
        _call(emitter, calls[0], site, pointers)
        emitter.cost.add(f.module.functions[symbol(calls[0].function.name)].cost)

    emitter.loop("0", str(len(calls)), 1, e.index(len(calls)), call)


def _call(emitter: "Emitter", s: Invoke, site: str, pointers: Sequence[str]) -> None:
    """Call a function; if it stops the program does, for the same reason."""
    f, name = emitter.f, symbol(s.function.name)
    arguments = ["ptr %block", f"i64 {site}"]
    arguments += [f"i64 {emitter.values.value(size)}" for size in s.sizes]
    arguments += [f"ptr {pointer}" for pointer in pointers]
    status = f.emit(f"call i64 @{name}({', '.join(arguments)})")
    emitter.values.forget_loads()
    if f.module.functions[name].may_stop:
        onward, failed = f.name("called"), f.emit(f"icmp ne i64 {status}, 0")
        f.do(f"store i64 {status}, ptr {emitter.status}")
        f.branch_if(failed, "exit", onward, RARE)
        f.start(onward)
        emitter.may_stop = True
