"""Reading and rewriting the expressions and values of definitions and equations."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Expr
from hopflow.loop_ir.kernels import Callback, Library
from hopflow.loop_ir.walk import nodes

Change = Callable[[Expr], Expr]


def map_expressions(definition: d.Definition, change: Change) -> d.Definition:
    """The definition with every expression in it changed.

    Results of functions of accumulators are changed too; parameters are not.
    """
    if isinstance(definition, d.Pointwise) and not definition.checks:
        changed = tuple(map(change, definition.elements))
        return d.Pointwise(changed, (), definition.is_view)

    def each(expressions: Iterable[Expr]) -> tuple[Expr, ...]:
        return tuple(map(change, expressions))

    def function(f: d.Function) -> d.Function:
        return d.Function(f.parameters, each(f.results))

    def check(given: d.Check) -> d.Check:
        passed = None if given.passed is None else change(given.passed)
        holds, values = change(given.holds), each(given.values)
        return replace(given, holds=holds, values=values, passed=passed)

    def checks(given: Sequence[d.Check]) -> tuple[d.Check, ...]:
        return tuple(map(check, given))

    match definition:
        case d.Pointwise():
            own = each(definition.elements), checks(definition.checks)
            return d.Pointwise(*own, definition.is_view)
        case d.Cut():
            return _cut(definition, change)
        case d.Reduction():
            combine = definition.combine
            return d.Reduction(
                definition.space,
                each(definition.init),
                combine if isinstance(combine, str) else function(combine),
                each(definition.element),
                tuple(map(function, definition.finish)),
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
    """Every expression of a definition, those of functions of accumulators too."""
    if isinstance(definition, d.Pointwise) and not definition.checks:
        return list(definition.elements)  # by far the most
    found: list[Expr] = []

    def note(expression: Expr) -> Expr:
        found.append(expression)
        return expression

    map_expressions(definition, note)
    return found


def elements(roots: Sequence[Expr]) -> Iterator[Expr]:
    """The "element" nodes of expressions, each once."""
    return (node for node in nodes(*roots) if node.op == "element")


def operands(definition: d.Definition | Region) -> tuple[Value, ...]:
    """The values that a definition reads as wholes, and not by element."""
    match definition:
        case Library(operands=own) | Callback(own):
            return as_values(own)
        case Call(operands=own):
            return own
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
    """The definition with every value of `operands` changed."""

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
    """The values that an equation reads, and those that its blocks read of the blocks
    around it."""
    found: dict[Value, None] = {}
    own: set[Value] = set()
    pending = [equation]
    while pending:
        definition = pending.pop().definition
        found.update(dict.fromkeys(operands(definition)))
        for block in blocks(definition):
            own.update(block.parameters)
            for inner in block.equations:
                own.update(inner.results)
            pending += block.equations
            found.update(dict.fromkeys(block.results))
        if not isinstance(definition, Region):
            roots = all_expressions(definition)
            found.update(dict.fromkeys([node.attr for node in elements(roots)]))
    return {v: None for v in found if v not in own and v.scalar is None}


def updated_parameters(program: KernelProgram) -> dict[int, int]:
    """By the number of a result the parameter that it is, but for elements that are
    replaced: the result may be in its memory."""
    made = {v: q.definition for q in program.block.equations for v in q.results}
    found: dict[int, int] = {}
    for number, value in enumerate(program.block.results):
        base = value
        while isinstance(own := made.get(base), d.Scatter):
            [base] = as_values([own.base])
        if base is not value and base in program.block.parameters:
            parameter = program.block.parameters.index(base)
            if parameter not in found.values() and not is_small(base.type):
                found[number] = parameter
    return found


def replace_values(block: Block, others: Mapping[Value, Value]) -> None:
    """Have everything in a block read other values."""

    def value(one: Value) -> Value:
        return others.get(one, one)

    for inner in all_blocks(block):
        for equation in inner.equations:
            own = map_operands(equation.definition, value)
            if not isinstance(own, Region):
                own = map_expressions(own, lambda x: _reading(x, others))
            equation.definition = own
        inner.results = [others.get(v, v) for v in inner.results]


def _reading(root: Expr, others: Mapping[Value, Value]) -> Expr:
    """An expression that reads other values."""
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
    """Drop the equations of a block that do nothing but to give what nothing reads."""
    live = set(block.results)
    kept: list[Equation] = []
    for equation in reversed(block.equations):
        if _is_pure(equation) and live.isdisjoint(equation.results):
            continue
        live.update(values_read(equation))
        kept.append(equation)
    block.equations = kept[::-1]


def _is_pure(equation: Equation) -> bool:
    """Whether an equation does nothing but to give its results."""
    own = equation.definition
    is_checked = bool(getattr(own, "checks", ()))
    return equation.symbol is None and isinstance(own, _PURE) and not is_checked


_PURE: Final = (d.Pointwise, d.Reduction, d.Prefix, d.Scatter, d.Compact)


def as_values(given: Iterable[Any]) -> tuple[Value, ...]:
    """Operands of lowering rules as the values that they are."""
    values = tuple(given)
    assert all(isinstance(value, Value) for value in values)
    return values


def programs(program: KernelProgram) -> Iterator[KernelProgram]:
    """The functions of a program, each after those that it calls, and the program."""
    found: dict[KernelProgram, None] = {}

    def visit(one: KernelProgram) -> None:
        for function in one.functions:
            visit(function)
        found.setdefault(one)

    visit(program)
    return iter(found)


def all_blocks(block: Block) -> Iterator[Block]:
    """A block, and the blocks in it."""
    pending = [block]
    while pending:
        one = pending.pop()
        yield one
        for equation in one.equations:
            pending += blocks(equation.definition)
