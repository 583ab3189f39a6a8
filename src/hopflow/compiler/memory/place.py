"""Give every value its own memory, or registers if it is small.

Small values of static shape are in registers. The parameters of a loop's blocks and the
loop's result for the same carry have one allocation, which holds the carry. Nothing
else is shared, so that every update copies the array that it changes.
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
    """Give each value of a program that needs memory an allocation."""
    _Placing(plan).program()


def in_registers(equation: Equation) -> list[bool]:
    """Return which results of an equation, no loop, are in registers."""
    types = [value.type for value in equation.results]
    match equation.definition:
        case Reduction():
            return [all(map(is_small, types))] * len(types)
        case Pointwise() | Scatter() | Branch():
            return list(map(is_small, types))
    return [False] * len(types)


class _Placing:
    """A walk over a program in order; `symbols` holds the symbols defined so far."""

    def __init__(self, plan: MemoryPlan) -> None:
        self.plan = plan
        self.symbols: set[Symbol] = set(plan.entry)

    def program(self) -> None:
        block = self.plan.program.block
        for number, value in enumerate(block.parameters):
            if not is_small(value.type):
                allocation = self.plan.allocations.add(value)
                allocation.is_input = number not in self.plan.donated.values()
        self.block(block)

    def block(self, block: Block) -> None:
        for equation in block.equations:
            self.equation(equation)
            if equation.symbol is not None:
                self.symbols.add(equation.symbol)
            for value in equation.results:
                self.define_sizes(value.type)

    def define_sizes(self, type_: TensorType) -> None:
        self.symbols.update(
            s for n in type_.shape if (s := plain_symbol(n)) is not None
        )

    def equation(self, equation: Equation) -> None:
        definition = equation.definition
        if isinstance(definition, Loop | While):
            self.loop(equation, definition)
            return
        sizes_known = [
            self.symbols.issuperset(free_symbols(*v.shape)) for v in equation.results
        ]
        for inner in blocks(definition):
            self.block(inner)
        if isinstance(definition, Pointwise) and definition.is_view:
            return
        live = self.plan.live
        for value, small, is_sized in zip(
            equation.results, in_registers(equation), sizes_known, strict=True
        ):
            if small:
                continue
            allocation = self.plan.allocations.add(value)
            if isinstance(definition, Branch) and is_sized:  # both blocks may write it
                allocation.home = live.defined[value][0], live.reads[equation]

    def loop(self, equation: Equation, loop: Loop | While) -> None:
        """Add allocations for the carries and for the stacks of a loop."""
        live, allocations = self.plan.live, self.plan.allocations
        count = len(loop.carry)
        home = live.defined[equation.results[0]][0] if equation.results else None
        for number, first in enumerate(loop.carry):
            if is_small(first.type):
                continue
            result = equation.results[number]
            allocation = allocations.add(result, first.type)
            assert home is not None
            allocation.home, allocation.carries = (home, live.reads[equation]), True
            parameters = [inner.parameters[number] for inner in blocks(loop)]
            allocation.is_fixed = self.changes(parameters)
            for parameter in parameters:
                allocations.put(parameter, allocation)
        for value in equation.results[count:]:
            allocation = allocations.add(value)
            assert home is not None
            allocation.home = home, live.reads[equation]
            allocation.is_fixed = isinstance(loop, While)
        for inner in blocks(loop):
            for value in inner.parameters:
                self.define_sizes(value.type)
            self.block(inner)

    def changes(self, parameters: Sequence[Value]) -> bool:
        """Return whether steps of a loop change the size of a carry."""
        symbols = {s for v in parameters for s in map(plain_symbol, v.shape)}
        return any(s is not None and s not in self.symbols for s in symbols)
