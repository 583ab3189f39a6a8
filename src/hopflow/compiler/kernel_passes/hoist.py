"""What no step of a loop changes is computed once, before the loop.

    v1 = for t0 < n, carry c2 = x:          v3 = y[i0] * 2.0
        v3 = y[i0] * 2.0                    v1 = for t0 < n, carry c2 = x:
        v4 = c2[i0] + v3[i0]          ->        v4 = c2[i0] + v3[i0]
        yield v4                                yield v4

An equation with an effect stays: a loop may take no step. So does one of a size that
the program itself has to compute, for that may stop it.
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
from hopflow.loop_ir.kernels import Callback
from hopflow.loop_ir.walk import nodes
from hopflow.symbolic.size import Size, Symbol, free_symbols


def hoist(program: KernelProgram, _context: Context) -> None:
    """Edit a program in place, without the functions that it calls.

    Inner loops are done first, so that an equation may leave several loops.
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
        if isinstance(definition, Loop | While):
            for inner in blocks(definition):
                counter = definition.counter if isinstance(definition, Loop) else None
                equations += _take_invariants(inner, counter, entry)
        equations.append(equation)
    block.equations = equations


def _take_invariants(
    block: Block, counter: object, entry: Collection[Symbol]
) -> list[Equation]:
    """Take the equations that no step changes out of the block of a loop."""
    changing: set[Value] = set(block.parameters)
    symbols = {s for value in block.parameters for s in free_symbols(*value.shape)}
    symbols -= set(entry)
    taken: list[Equation] = []
    kept: list[Equation] = []
    for equation in block.equations:
        if _may_leave(equation, counter, changing, symbols, entry):
            taken.append(equation)
            continue
        kept.append(equation)
        changing.update(equation.results)
        symbols.update(_defined_symbols(equation))
    block.equations = kept
    return taken


def _defined_symbols(equation: Equation) -> Iterator[Symbol]:
    """The sizes that are known after an equation, and were not before."""
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
    return all(_is_known(size, symbols, entry) for size in sizes)


def _may_stop(equation: Equation) -> bool:
    """Whether an equation checks something, or has another effect: where its loop takes
    no step, or its branch is not taken, it does not happen."""
    checks = getattr(equation.definition, "checks", ())
    is_check = isinstance(equation.definition, Effect)
    return is_check or bool(checks) or bool(effects(equation.node))


def _is_known(
    size: Size, changing: Collection[Symbol], entry: Collection[Symbol]
) -> bool:
    """Whether a size is the same in all steps, and takes no computation that may stop
    the program."""
    used = free_symbols(size)
    if plain_symbol(size) is None and any(s not in entry for s in used):
        return False
    return not any(s in changing for s in used)
