"""Drops carries, rows and results that nothing needs once checks are proven.

    v0, v1 = for t0 < n, carry c2 = x, c3 = 0:     v1 = for t0 < n, carry c3 = 0:
        v4 = c2[c2[i0] % 8]                    ->      v5 = c3[] + 1
        v5 = c3[] + 1                                  yield v5
        yield v4, v5

A carry is idle if nothing reads its last value, and the value of a step is used only to
compute the next one. The pass of graphs `drop_dead_results` does the same, but there an
index that may be out of bounds has an effect: the error.
"""

from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from dataclasses import replace

from hopflow.compiler.kernel_passes import Context
from hopflow.compiler.kernel_program.definitions import Pointwise
from hopflow.compiler.kernel_program.program import (
    Block,
    Branch,
    Equation,
    KernelProgram,
    Loop,
    Region,
    Value,
    While,
    blocks,
)
from hopflow.compiler.kernel_program.rewriting import (
    drop_results,
    is_droppable,
    values_read,
)
from hopflow.symbolic.size import Symbol, free_symbols


def idle_carries(program: KernelProgram, _context: Context) -> None:
    """Edit a program in place, without the functions that it calls."""
    if any(isinstance(q.definition, Region) for q in program.block.equations):
        _edit(program.block, frozenset(program.symbols))


def _edit(block: Block, known: AbstractSet[Symbol]) -> None:
    """Drop what the results of a block do not need, in it and in the blocks in it.

    Args:
        known: The symbols of the inputs. A result of a region defines the others of its
            sizes, so that it stays.
    """
    live = set(block.results)
    kept: list[Equation] = []
    for whole in reversed(block.equations):
        equation = _only(whole, live)
        if isinstance(equation.definition, Region):
            live.update(v for v in equation.results if not _has_known_size(v, known))
            _drop_idle(equation, live)
        if not (_acts(equation) or any(v in live for v in equation.results)):
            continue
        for inner in blocks(equation.definition):
            _edit(inner, known)
        live.update(values_read(equation))
        kept.append(equation)
    block.equations = kept[::-1]


def _has_known_size(value: Value, known: AbstractSet[Symbol]) -> bool:
    return known >= set(free_symbols(*value.shape))


def _only(equation: Equation, live: AbstractSet[Value]) -> Equation:
    """Return an equation without those of its elements that are not among `live`, if
    they are independent of each other."""
    elementwise, results = equation.definition, equation.results
    kept = [k for k, v in enumerate(results) if v in live]
    if not isinstance(elementwise, Pointwise) or elementwise.checks:
        return equation
    if len(results) == 1 or len(kept) == len(results):
        return equation
    definition = replace(
        elementwise, elements=tuple([elementwise.elements[k] for k in kept])
    )
    return replace(
        equation, results=tuple([results[k] for k in kept]), definition=definition
    )


def _drop_idle(equation: Equation, live: AbstractSet[Value]) -> None:
    """Drop the results of a region that are not among `live`, with their carries."""
    region = equation.definition
    unread = {k for k, v in enumerate(equation.results) if v not in live}
    if not unread:
        return
    if isinstance(region, Branch):
        drop_results(equation, unread)
    elif isinstance(region, Loop | While):
        drop_results(equation, _idle(region, unread))


def _acts(equation: Equation) -> bool:
    """Return whether an equation does anything but compute its results: it may stop the
    program, or tell Python something. A `While` may never end."""
    match equation.definition:
        case Branch() | Loop(ticks=False) as region:
            inner = (q for block in blocks(region) for q in block.equations)
            return equation.symbol is not None or any(map(_acts, inner))
    return not is_droppable(equation)


def _idle(loop: Loop | While, unread: set[int]) -> set[int]:
    """Return the unread results that no step needs for anything else."""
    body, needs, idle = loop.body, _Needs(loop.body), set(unread)
    needs.add(v for k, v in enumerate(body.results) if k not in unread)
    needs.add(v for q in body.equations if _acts(q) for v in values_read(q))
    if isinstance(loop, While):
        needs.add_carries(loop.test)
    while found := idle & needs.carries:
        idle -= found
        needs.add(body.results[k] for k in found)
    return idle


class _Needs:
    """The carries that some values of a step need; each value is visited once."""

    def __init__(self, body: Block) -> None:
        self.carries: set[int] = set()
        self._number = {v: k for k, v in enumerate(body.parameters)}
        self._maker = {v: q for q in body.equations for v in q.results}
        self._seen: set[Value] = set()

    def add(self, values: Iterable[Value]) -> None:
        pending = [*values]
        while pending:
            value = pending.pop()
            if value in self._seen:
                continue
            self._seen.add(value)
            if value in self._number:
                self.carries.add(self._number[value])
            elif value in self._maker:
                pending += values_read(_only(self._maker[value], {value}))

    def add_carries(self, test: Block) -> None:
        """Add what the test of a loop reads, which has parameters of its own."""
        read = {v for q in test.equations for v in values_read(q)} | {*test.results}
        self.carries |= {k for k, v in enumerate(test.parameters) if v in read}
