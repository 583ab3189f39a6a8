"""Functions that read and rewrite the expressions and values of definitions."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from typing import Any, Final

from hopflow.compiler.kernel_program import definitions as d
from hopflow.compiler.kernel_program.program import (
    Block,
    Branch,
    Call,
    Equation,
    KernelProgram,
    Loop,
    Region,
    Value,
    While,
    blocks,
)
from hopflow.compiler.kernel_program.registers import is_small
from hopflow.graph.types import Shape
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Expr
from hopflow.loop_ir.kernels import Callback, Library
from hopflow.loop_ir.walk import nodes

Change = Callable[[Expr], Expr]


def map_expressions(definition: d.Definition, change: Change) -> d.Definition:
    """Return the definition with `change` applied to every expression in it.

    The results of its functions of accumulators are included, their parameters are not.
    """
    if isinstance(definition, d.Pointwise) and not definition.checks:
        changed = tuple(map(change, definition.elements))
        return d.Pointwise(changed, (), definition.is_view)

    def each(expressions: Iterable[Expr]) -> tuple[Expr, ...]:
        return tuple(map(change, expressions))

    def function(f: d.Function) -> d.Function:
        return d.Function(f.parameters, each(f.results))

    def check(original: d.Check) -> d.Check:
        passed = None if original.passed is None else change(original.passed)
        holds, values = change(original.holds), each(original.values)
        return replace(original, holds=holds, values=values, passed=passed)

    def checks(original: Sequence[d.Check]) -> tuple[d.Check, ...]:
        return tuple(map(check, original))

    match definition:
        case d.Pointwise():
            fields = each(definition.elements), checks(definition.checks)
            return d.Pointwise(*fields, definition.is_view)
        case d.Cut():
            return _cut(definition, change)
        case d.Reduction():
            combine = definition.combine
            return replace(
                definition,
                init=each(definition.init),
                combine=combine if isinstance(combine, str) else function(combine),
                element=each(definition.element),
                finish=tuple(map(function, definition.finish)),
            )
        case d.Prefix():
            return replace(
                definition,
                init=change(definition.init),
                combine=function(definition.combine),
                element=change(definition.element),
            )
        case d.Scatter():
            update, keep = definition.combine, definition.keep
            return replace(
                definition,
                position=each(definition.position),
                value=change(definition.value),
                combine=None if update is None else function(update),
                keep=None if keep is None else change(keep),
                checks=checks(definition.checks),
            )
        case d.Compact():
            return replace(definition, keep=change(definition.keep))
        case d.Effect():
            return replace(definition, checks=checks(definition.checks))
        case Library():
            return replace(definition, scalars=each(definition.scalars))
    return definition


def _cut(kernel: d.Cut, change: Change) -> d.Cut:
    at = change(kernel.at)
    pieces = [map_expressions(x, change) for x in (kernel.below, kernel.above)]
    below, above = (x for x in pieces if isinstance(x, d.Pointwise | d.Cut))
    return d.Cut(kernel.axis, at, below, above)


def all_expressions(definition: d.Definition) -> list[Expr]:
    """Return every expression of a definition, including the results of functions."""
    if isinstance(definition, d.Pointwise) and not definition.checks:
        return list(definition.elements)  # by far the most frequent definition
    roots: list[Expr] = []

    def collect(expression: Expr) -> Expr:
        roots.append(expression)
        return expression

    map_expressions(definition, collect)
    return roots


def elements(roots: Sequence[Expr]) -> Iterator[Expr]:
    """Yield the "element" nodes of expressions, each once."""
    return (node for node in nodes(*roots) if node.op == "element")


def space_of(equation: Equation) -> Shape:
    """Return the shape of the axes that the expressions of an equation are over."""
    definition = equation.definition
    if isinstance(definition, d.Scatter):
        return definition.space
    if isinstance(definition, d.Compact):
        return (definition.length,)
    shape = equation.results[0].shape if equation.results else ()
    if isinstance(definition, d.Reduction):
        return (*shape, *definition.space)
    return shape


def operands(definition: d.Definition | Region) -> tuple[Value, ...]:
    """Return the values that a definition reads as a whole, not by element."""
    match definition:
        case Library(operands=values) | Callback(values):
            return as_values(values)
        case Call(operands=values):
            return values
        case d.Scatter(base=base):
            return as_values([base])
        case Branch(selector):
            return (selector,)
        case Loop(carry=carry):
            return carry
        case While(carry=carry, bounds=bounds):
            return (*carry, *(bounds or ()))
    return ()


def map_operands(
    definition: d.Definition | Region, change: Callable[[Value], Value]
) -> Any:
    """Return the definition with `change` applied to every value of `operands`."""

    def each(values: Iterable[Any]) -> tuple[Any, ...]:
        return tuple(map(change, values))

    match definition:
        case Library() | Callback() | Call():
            return replace(definition, operands=each(definition.operands))
        case d.Scatter():
            [base] = each([definition.base])
            return replace(definition, base=base)
        case Branch():
            return replace(definition, selector=change(definition.selector))
        case Loop():
            return replace(definition, carry=each(definition.carry))
        case While(carry=carry, bounds=bounds):
            first, last = each(bounds) if bounds else (None, None)
            both = (first, last) if first and last else None
            return replace(definition, carry=each(carry), bounds=both)
    return definition


def values_read(equation: Equation) -> dict[Value, None]:
    """Return the values that an equation and its blocks read from outside."""
    read: dict[Value, None] = {}
    defined: set[Value] = set()
    pending = [equation]
    while pending:
        definition = pending.pop().definition
        read.update(dict.fromkeys(operands(definition)))
        for block in blocks(definition):
            defined.update(block.parameters)
            for inner in block.equations:
                defined.update(inner.results)
            pending += block.equations
            read.update(dict.fromkeys(block.results))
        if not isinstance(definition, Region):
            roots = all_expressions(definition)
            read.update(dict.fromkeys([node.attr for node in elements(roots)]))
    return {v: None for v in read if v not in defined and v.scalar is None}


def updated_parameters(program: KernelProgram) -> dict[int, int]:
    """Return by the number of a result the parameter that it is an update of.

    Such a result is a parameter with elements replaced by scatters, and may be in its
    memory.
    """
    definitions = {v: q.definition for q in program.block.equations for v in q.results}
    updated: dict[int, int] = {}
    for number, value in enumerate(program.block.results):
        base = value
        while isinstance(scatter := definitions.get(base), d.Scatter):
            [base] = as_values([scatter.base])
        if base is not value and base in program.block.parameters:
            parameter = program.block.parameters.index(base)
            if parameter not in updated.values() and not is_small(base.type):
                updated[number] = parameter
    return updated


def replace_values(block: Block, others: Mapping[Value, Value]) -> None:
    """Make everything in a block read the values that `others` has for its own."""

    def value(original: Value) -> Value:
        return others.get(original, original)

    for inner in all_blocks(block):
        for equation in inner.equations:
            definition = map_operands(equation.definition, value)
            if not isinstance(definition, Region):
                definition = map_expressions(definition, lambda x: _reading(x, others))
            equation.definition = definition
        inner.results = [others.get(v, v) for v in inner.results]


def _reading(root: Expr, others: Mapping[Value, Value]) -> Expr:
    """Return an expression with elements of values replaced by those of `others`."""
    values: dict[Expr, Expr] = {}
    for node in nodes(root):
        args = tuple([values[a] for a in node.args])
        if node.op == "element" and node.attr in others:
            other = others[node.attr]
            same = Expr("element", args, node.dtype, other)
            values[node] = same if other.scalar is None else other.scalar
        else:
            values[node] = e.with_args(node, args)
    return values[root]


def drop_unread(block: Block) -> None:
    """Remove the equations of a block that have no effect and no reader."""
    live = set(block.results)
    kept: list[Equation] = []
    for equation in reversed(block.equations):
        if is_droppable(equation) and live.isdisjoint(equation.results):
            continue
        live.update(values_read(equation))
        kept.append(equation)
    block.equations = kept[::-1]


def drop_results(equation: Equation, numbers: AbstractSet[int]) -> None:
    """Remove results of a branch or a loop, those of carries with these. What computes
    the values of a step stays."""
    region = equation.definition

    def kept(values: Sequence[Value]) -> list[Value]:
        return [v for k, v in enumerate(values) if k not in numbers]

    equation.results = tuple(kept(equation.results))
    if isinstance(region, Loop | While):
        for block in blocks(region):
            block.parameters = kept(block.parameters)
        region.body.results = kept(region.body.results)
        equation.definition = replace(region, carry=tuple(kept(region.carry)))
        return
    for block in blocks(region):
        block.results = kept(block.results)


def is_droppable(equation: Equation) -> bool:
    """Return whether an equation whose results nothing reads may go. A routine may,
    even if it can fail: a graph drops a factorisation that nothing reads, too."""
    is_routine = isinstance(equation.definition, Library) and equation.symbol is None
    return is_routine or is_pure(equation)


def is_pure(equation: Equation) -> bool:
    """Return whether an equation has no effect but its results."""
    definition = equation.definition
    is_checked = bool(getattr(definition, "checks", ()))
    if equation.symbol is not None or is_checked:
        return False
    if isinstance(definition, Library):
        return not definition.can_fail
    if isinstance(definition, d.Effect):
        return not definition.types
    return isinstance(definition, _PURE)


_PURE: Final = (d.Pointwise, d.Reduction, d.Prefix, d.Scatter, d.Compact)


def as_values(arguments: Iterable[Any]) -> tuple[Value, ...]:
    """Return the operands of a lowering rule as the values that they are."""
    values = tuple(arguments)
    assert all(isinstance(value, Value) for value in values)
    return values


def programs(program: KernelProgram) -> Iterator[KernelProgram]:
    """Yield the functions of a program after those that they call, then the program."""
    order: dict[KernelProgram, None] = {}

    def visit(caller: KernelProgram) -> None:
        for function in caller.functions:
            visit(function)
        order.setdefault(caller)

    visit(program)
    return iter(order)


def all_blocks(block: Block) -> Iterator[Block]:
    """Yield a block and all blocks in it."""
    pending = [block]
    while pending:
        outer = pending.pop()
        yield outer
        for equation in outer.equations:
            pending += blocks(equation.definition)
