"""Moves reads of an array before the equation that updates it.

    v1 = h with [k] = 2.0                 v2 = h[k] view
    v2 = h[k] view                  ->    v1 = h with [k] = 2.0
    yield v1, v2                          yield v1, v2

The update can then take the memory of the array, which would have to be copied for the
reads after it. This is the order that a program has that reads before it writes.
"""

from collections import Counter
from collections.abc import Sequence

from hopflow.compiler.kernel_passes import Context
from hopflow.compiler.kernel_program.definitions import (
    Effect,
    Pointwise,
    Reduction,
    Scatter,
)
from hopflow.compiler.kernel_program.program import (
    Block,
    Equation,
    KernelProgram,
    Value,
)
from hopflow.compiler.kernel_program.rewriting import all_blocks, values_read


def early_reads(program: KernelProgram, _context: Context) -> None:
    """Edit a program in place; functions that it calls are programs of their own."""
    for block in all_blocks(program.block):
        updates = [q for q in block.equations if isinstance(q.definition, Scatter)]
        if not updates:
            continue
        readers = Counter(v for q in block.equations for v in values_read(q))
        for equation in updates:
            assert isinstance(equation.definition, Scatter)
            base = equation.definition.base
            if isinstance(base, Value) and readers[base] > 1:
                _move_reads(block, equation, base)


def _move_reads(block: Block, update: Equation, base: Value) -> None:
    """Move all later reads of the base of an update before it, if they can be moved."""
    if base in block.results:
        return
    at = block.equations.index(update)
    before, after = block.equations[:at], block.equations[at + 1 :]
    last = max((k for k, q in enumerate(after) if base in values_read(q)), default=-1)
    moved = _independent(after[: last + 1], {*update.results})
    if any(base in values_read(q) for q in after if q not in moved):
        return
    rest = [q for q in after if q not in moved]
    block.equations = [*before, *moved, update, *rest]


def _independent(equations: Sequence[Equation], updated: set[Value]) -> list[Equation]:
    """Return the elements, reductions and effects that do not depend on values, as far
    as effects stay in order: what follows one that does depend may rely on it."""
    found: list[Equation] = []
    for equation in equations:
        definition = equation.definition
        is_plain = isinstance(definition, Pointwise | Reduction | Effect)
        if is_plain and updated.isdisjoint(values_read(equation)):
            found.append(equation)
        elif isinstance(definition, Pointwise | Reduction | Scatter):
            updated.update(equation.results)
        else:
            break
    return found
