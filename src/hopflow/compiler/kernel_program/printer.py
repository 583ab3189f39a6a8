"""The text of kernel programs, stable enough for tests to compare.

Each equation is a line. A long subexpression that occurs twice has a line of its own
before it. `x[i0, i1]` is an element, `(x[i0] if i0 < n)` one that is read under a
condition.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

from hopflow.compiler.kernel_program import definitions as d
from hopflow.compiler.kernel_program.program import (
    Block,
    Branch,
    Call,
    Equation,
    KernelProgram,
    Loop,
    Value,
    While,
)
from hopflow.loop_ir.expr import Expr
from hopflow.loop_ir.kernels import Callback, Library
from hopflow.loop_ir.printer import Namer
from hopflow.symbolic.size import Size

Text: TypeAlias = Callable[[Expr], str]


def format_kernels(program: KernelProgram) -> str:
    """Return the text of a program, after that of the programs that it calls."""
    before = [format_kernels(function) for function in program.functions]
    parameters = ", ".join(map(_typed, program.block.parameters))
    lines = [f"program {program.name}({parameters}):", *_block(program.block, "return")]
    return "\n\n".join([*before, "\n".join(lines)])


def expressions(definition: d.Definition) -> tuple[Expr, ...]:
    """Return the expressions of a definition without those of its functions."""
    match definition:
        case d.Pointwise(elements, checks):
            return *elements, *_of_checks(checks)
        case d.Cut(_, at, below, above):
            return at, *expressions(below), *expressions(above)
        case d.Reduction():
            return *definition.init, *definition.element
        case d.Prefix():
            return definition.init, definition.element
        case d.Scatter():
            keep = () if definition.keep is None else (definition.keep,)
            roots = (*definition.position, definition.value, *keep)
            return *roots, *_of_checks(definition.checks)
        case d.Compact():
            return (definition.keep,)
        case d.Effect():
            return _of_checks(definition.checks)
        case Library():
            return definition.scalars
    return ()


def _of_checks(checks: Sequence[d.Check]) -> tuple[Expr, ...]:
    roots: list[Expr] = []
    for check in checks:
        roots += (check.holds, *check.values)
        roots += () if check.passed is None else (check.passed,)
    return tuple(roots)


def _typed(value: Value) -> str:
    return f"{value.name}: {value.type}"


def _names(values: Sequence[Value]) -> str:
    return ", ".join([value.name for value in values])


def _block(block: Block, keyword: str) -> Iterator[str]:
    """Yield the lines of a block, indented; the last is a keyword and the results."""
    for equation in block.equations:
        yield from (f"    {line}" for line in _equation(equation))
    yield f"    {keyword} {_names(block.results)}".rstrip()


def _equation(equation: Equation) -> Iterator[str]:
    definition, results = equation.definition, equation.results
    left = ", ".join(map(_typed, results))
    left += f" is {equation.symbol}" if equation.symbol else ""
    match definition:
        case Branch(selector, blocks):
            yield f"{left} = switch {selector.name}:"
            for number, block in enumerate(blocks):
                yield f"case {number}:"
                yield from _block(block, "yield")
        case Loop():
            yield f"{left} = {_loop(definition)}"
            yield from _block(definition.body, "yield")
        case While():
            yield f"{left} = while{_while(definition)}:"
            yield from _block(definition.test, "test")
            yield f"do{_carried(definition.body.parameters)}:"
            yield from _block(definition.body, "yield")
        case Call(function, operands):
            yield f"{left} = call {function.name}({_names(operands)})"
        case _:
            yield from _definition(definition, results, left)


def _loop(loop: Loop) -> str:
    text = f"for {loop.counter.name} < {loop.length}"
    text += " reverse" * loop.reverse + " independent" * loop.independent
    text += f" unroll {loop.unroll}" if loop.unroll > 1 else ""
    return f"{text}{_carried(loop.body.parameters, loop.carry)}:"


def _while(loop: While) -> str:
    text = "" if loop.max_steps is None else f" max {loop.max_steps}"
    text += f" from {_names(loop.bounds)}" if loop.bounds else ""
    return text + _carried(loop.test.parameters, loop.carry)


def _carried(parameters: Sequence[Value], first: Sequence[Value] = ()) -> str:
    """Return the text of a block's parameters, with their initial values if any."""
    initial = [f" = {value.name}" for value in first] or [""] * len(parameters)
    texts = [_typed(p) + text for p, text in zip(parameters, initial, strict=True)]
    return f", carry {', '.join(texts)}" if texts else ""


def _definition(
    definition: d.Definition, results: Sequence[Value], left: str
) -> Iterator[str]:
    namer = Namer(expressions(definition))
    text, rank = namer.text, results[0].type.ndim if results else 0
    lines = [_check(check, text) for check in getattr(definition, "checks", ())]
    match definition:
        case d.Pointwise(elements):
            space = _space(results[0].type.shape)
            right = ", ".join(map(text, elements)) + " view" * definition.is_view
        case d.Cut():
            space = _space(results[0].type.shape)
            right = f"({', '.join(_pieces(definition, text))} elsewhere)"
        case d.Reduction():
            space, right = (
                _space(results[0].type.shape),
                _reduction(definition, text, rank),
            )
        case d.Prefix():
            space = _space(results[0].type.shape)
            along = f"i{definition.axis}{' reverse' * definition.reverse}"
            combine = _function(definition.combine)
            right = f"prefix {combine} along {along} from {text(definition.init)}"
            right += f" of {text(definition.element)}"
        case d.Scatter():
            space, right = "", _scatter(definition, text)
        case d.Compact():
            space = ""
            right = f"indices i0 < {definition.length} where {text(definition.keep)}"
        case Library():
            arguments = [_name(x) for x in definition.operands]
            arguments += [text(x) for x in definition.scalars]
            space, right = "", f"{definition.routine}({', '.join(arguments)})"
            right += f" batch {definition.batch}" if definition.batch else ""
        case Callback(operands):
            space, right = "", f"python({', '.join(map(_name, operands))})"
        case _:
            sizes = [f"size {t}" for t in getattr(definition, "types", ())]
            yield from (*namer.lines, *lines, *sizes)
            return
    yield from (*namer.lines, *lines)
    yield f"{left} = {right}" + (f" for {space}" if space else "")


def _pieces(kernel: d.Pointwise | d.Cut, text: Text) -> Iterator[str]:
    """Yield the texts of the pieces in order, all but the last with their ends."""
    if isinstance(kernel, d.Pointwise):
        texts = list(map(text, kernel.elements))
        yield texts[0] if len(texts) == 1 else f"({', '.join(texts)})"
        return
    below = list(_pieces(kernel.below, text))
    first = below[0] if len(below) == 1 else f"({', '.join(below)} elsewhere)"
    yield f"{first} where i{kernel.axis} < {text(kernel.at)}"
    yield from _pieces(kernel.above, text)


def _name(operand: object) -> str:
    assert isinstance(operand, Value)
    return operand.name


def _space(shape: Sequence[Size], first: int = 0) -> str:
    return ", ".join([f"i{first + axis} < {n}" for axis, n in enumerate(shape)])


def _check(check: d.Check, text: Text) -> str:
    space, values = _space(check.shape), ", ".join(map(text, check.values))
    line = f"{'free ' * check.is_free}check {check.kind}: {text(check.holds)}"
    line += f" tell {values}" if values else ""
    line += f" unless {text(check.passed)}" if check.passed is not None else ""
    return line + (f" for {space}" if space else "")


def _function(function: str | d.Function) -> str:
    """Return the name of a combiner, or its results over its parameters."""
    if isinstance(function, str):
        return function
    texts = [Namer([result]).text(result) for result in function.results]
    names = [p.attr.name for p in function.parameters]
    return f"({', '.join(names)} -> {', '.join(texts)})"


def _reduction(kernel: d.Reduction, text: Text, rank: int) -> str:
    init, element = (
        ", ".join(map(text, part)) for part in (kernel.init, kernel.element)
    )
    right = f"reduce {_function(kernel.combine)} from {init} of {element}"
    right += f" over {_space(kernel.space, rank)}" if kernel.space else ""
    for function in kernel.finish:
        if function.results[0] is not function.parameters[0]:
            right += f" then {_function(function)}"
    return right


def _scatter(kernel: d.Scatter, text: Text) -> str:
    at = ", ".join(map(text, kernel.position))
    right = f"{_name(kernel.base)} with [{at}] = {text(kernel.value)}"
    right += f" by {_function(kernel.combine)}" if kernel.combine else ""
    right += f" if {text(kernel.keep)}" if kernel.keep is not None else ""
    return right + (f" for {_space(kernel.space)}" if kernel.space else "")
