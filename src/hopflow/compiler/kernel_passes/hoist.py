"""Loop-invariant code motion: invariant equations are computed once, before the loop.

    v1 = for t0 < n, carry c2 = x:          v3 = y[i0] * 2.0
        v3 = y[i0] * 2.0                    v1 = for t0 < n, carry c2 = x:
        v4 = c2[i0] + v3[i0]          ->        v4 = c2[i0] + v3[i0]
        yield v4                                yield v4

An equation with an effect stays, for the loop may make no step. So does one whose size
the program itself has to compute, for that may stop the program.
"""

from collections.abc import Collection, Iterator

from hopflow.compiler.kernel_passes import Context
from hopflow.compiler.kernel_program.definitions import Effect
from hopflow.compiler.kernel_program.program import (
    Block,
    Equation,
    KernelProgram,
    Loop,
    Region,
    Value,
    While,
    blocks,
)
from hopflow.compiler.kernel_program.rewriting import (
    all_expressions,
    operands,
)
from hopflow.graph.core import plain_symbol
from hopflow.graph.rewriting import effects
from hopflow.graph.types import same_size
from hopflow.loop_ir.kernels import Callback
from hopflow.loop_ir.walk import nodes
from hopflow.symbolic.size import Size, Symbol, free_symbols


def hoist(program: KernelProgram, _context: Context) -> None:
    """Edit a program in place, without the functions that it calls.

    Inner loops come first, so that an equation may leave several loops.
    """
    inputs = program.block.parameters
    entry = {s for value in inputs for s in free_symbols(*value.shape)}
    _hoist(program.block, entry)


def _hoist(block: Block, entry: Collection[Symbol]) -> None:
    equations: list[Equation] = []
    for equation in block.equations:
        definition = equation.definition
        for inner in blocks(definition):
            _hoist(inner, entry)
        makes_no_step = isinstance(definition, Loop) and same_size(definition.length, 0)
        if isinstance(definition, Loop | While) and not makes_no_step:
            for inner in blocks(definition):
                counter = definition.counter if isinstance(definition, Loop) else None
                equations += _take_invariants(inner, counter, entry)
        equations.append(equation)
    block.equations = equations


def _take_invariants(
    block: Block, counter: object, entry: Collection[Symbol]
) -> list[Equation]:
    """Remove the loop-invariant equations from the block of a loop, and return them."""
    changing: set[Value] = set(block.parameters)
    symbols = {s for value in block.parameters for s in free_symbols(*value.shape)}
    symbols -= set(entry)
    invariants: list[Equation] = []
    kept: list[Equation] = []
    for equation in block.equations:
        if _may_leave(equation, counter, changing, symbols, entry):
            invariants.append(equation)
            continue
        kept.append(equation)
        changing.update(equation.results)
        symbols.update(_defined_symbols(equation))
    block.equations = kept
    return invariants


def _defined_symbols(equation: Equation) -> Iterator[Symbol]:
    """Yield the sizes that an equation defines."""
    if equation.symbol is not None:
        yield equation.symbol
    for value in equation.results:
        for size in value.shape:
            symbol = plain_symbol(size)
            if symbol is not None and isinstance(equation.definition, Region):
                yield symbol


def _may_leave(
    equation: Equation,
    counter: object,
    changing: Collection[Value],
    symbols: Collection[Symbol],
    entry: Collection[Symbol],
) -> bool:
    definition = equation.definition
    if isinstance(definition, Region | Callback) or _may_stop(equation):
        return False
    if any(value in changing for value in operands(definition)):
        return False
    order = nodes(*all_expressions(definition))
    for node in order:
        if node.op == "element" and node.attr in changing:
            return False
        if node.op == "var" and node.attr is counter:
            return False
    sizes = [node.attr for node in order if node.op == "size"]
    for value in equation.results:
        sizes += [*value.shape, value.type.size]
    sizes += getattr(definition, "space", ())
    return all(is_invariant(size, symbols, entry) for size in sizes)


def _may_stop(equation: Equation) -> bool:
    """Return whether an equation has a check or another effect, which must not happen
    if its loop makes no step or its branch is not taken."""
    checks = getattr(equation.definition, "checks", ())
    is_check = isinstance(equation.definition, Effect)
    return is_check or bool(checks) or bool(effects(equation.node))


def is_invariant(
    size: Size, changing: Collection[Symbol], entry: Collection[Symbol]
) -> bool:
    """Return whether a size is invariant, and computing it cannot stop the program."""
    used = free_symbols(size)
    if plain_symbol(size) is None and any(s not in entry for s in used):
        return False
    return not any(s in changing for s in used)
