"""Every value gets memory of its own, or registers if it is small.

Small values of known shape are in registers. The parameters of the blocks of a loop and
the loop's result for one carry are in one allocation: it holds what is carried. Nothing
is shared beyond that, so that every update copies what it changes.
"""

from collections.abc import Sequence

from hopflow.compiler.kernel_program.definitions import (
    Pointwise,
    Reduction,
    Scatter,
)
from hopflow.compiler.kernel_program.program import (
    Block,
    Branch,
    Equation,
    Loop,
    Value,
    While,
    blocks,
)
from hopflow.compiler.kernel_program.registers import is_small
from hopflow.compiler.memory.plan import MemoryPlan
from hopflow.graph.core import plain_symbol
from hopflow.graph.types import TensorType
from hopflow.symbolic.size import Symbol, free_symbols


def place(plan: MemoryPlan) -> None:
    """Give each value of a program an allocation, if it needs one."""
    _Placing(plan).program()


def in_registers(equation: Equation) -> list[bool]:
    """Which results of an equation that is no loop are in registers."""
    types = [value.type for value in equation.results]
    match equation.definition:
        case Reduction():
            return [all(map(is_small, types))] * len(types)
        case Pointwise() | Scatter() | Branch():
            return list(map(is_small, types))
    return [False] * len(types)


class _Placing:
    """Walks a program in order; `known` are the sizes that are known by then."""

    def __init__(self, plan: MemoryPlan) -> None:
        self.plan = plan
        self.known: set[Symbol] = set(plan.entry)

    def program(self) -> None:
        block = self.plan.program.block
        for number, value in enumerate(block.parameters):
            if not is_small(value.type):
                found = self.plan.allocations.add(value)
                found.is_input = number not in self.plan.donated.values()
        self.block(block)

    def block(self, block: Block) -> None:
        for equation in block.equations:
            self.equation(equation)
            if equation.symbol is not None:
                self.known.add(equation.symbol)
            for value in equation.results:
                self.know(value.type)

    def know(self, type_: TensorType) -> None:
        self.known.update(s for n in type_.shape if (s := plain_symbol(n)) is not None)

    def equation(self, equation: Equation) -> None:
        definition = equation.definition
        if isinstance(definition, Loop | While):
            self.loop(equation, definition)
            return
        sized = [
            self.known.issuperset(free_symbols(*v.shape)) for v in equation.results
        ]
        for inner in blocks(definition):
            self.block(inner)
        if isinstance(definition, Pointwise) and definition.is_view:
            return
        live = self.plan.live
        for value, small, known in zip(
            equation.results, in_registers(equation), sized, strict=True
        ):
            if small:
                continue
            found = self.plan.allocations.add(value)
            if isinstance(definition, Branch) and known:  # both sides may write it
                found.home = live.defined[value][0], live.reads[equation]

    def loop(self, equation: Equation, loop: Loop | While) -> None:
        """Allocations for the carry and for the rows of a loop."""
        live, allocations = self.plan.live, self.plan.allocations
        count = len(loop.carry)
        home = live.defined[equation.results[0]][0] if equation.results else None
        for number, first in enumerate(loop.carry):
            if is_small(first.type):
                continue
            result = equation.results[number]
            found = allocations.add(result, first.type)
            assert home is not None
            found.home, found.carries = (home, live.reads[equation]), True
            parameters = [inner.parameters[number] for inner in blocks(loop)]
            found.is_fixed = self.changes(parameters)
            for parameter in parameters:
                allocations.put(parameter, found)
        for value in equation.results[count:]:
            found = allocations.add(value)
            assert home is not None
            found.home = home, live.reads[equation]
            found.is_fixed = isinstance(loop, While)
        for inner in blocks(loop):
            for value in inner.parameters:
                self.know(value.type)
            self.block(inner)

    def changes(self, parameters: Sequence[Value]) -> bool:
        """Whether steps change the size of a carry."""
        symbols = {s for v in parameters for s in map(plain_symbol, v.shape)}
        return any(s is not None and s not in self.known for s in symbols)
