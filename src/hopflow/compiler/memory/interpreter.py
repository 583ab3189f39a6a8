"""An interpreter of programs with a memory plan that tags each cell of memory.

The tag is the value that wrote the cell. Reading an element that another value has
overwritten is an error, whatever the plan's live ranges say.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from hopflow.compiler.kernel_program import definitions as d
from hopflow.compiler.kernel_program.interpreter import Host, Machine
from hopflow.compiler.kernel_program.program import (
    Call,
    Equation,
    KernelProgram,
    Value,
)
from hopflow.compiler.kernel_program.rewriting import operands
from hopflow.compiler.memory.allocations import Allocation
from hopflow.compiler.memory.plan import MemoryPlan
from hopflow.errors import KernelProgramError
from hopflow.graph.types import TensorType
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Expr
from hopflow.loop_ir.kernels import Callback, Library

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
Plans: TypeAlias = Mapping[KernelProgram, MemoryPlan]


def run_planned(
    program: KernelProgram,
    plans: Plans,
    arrays: Sequence[Array],
    host: Host | None = None,
) -> list[Array]:
    """Return the results of a program for arrays as its parameters.

    Args:
        plans: The memory plans of the program and of those that it calls.
        host: As for `run`.

    Raises:
        KernelTrap: A check, a loop or a routine of the program fails.
        KernelProgramError: An element is read that another value has overwritten.
    """
    with np.errstate(all="ignore"):
        return _TaggedMachine(plans, plans[program], host).program(program, arrays)


class _TaggedMachine(Machine):
    """A machine that records which value last wrote each cell of an allocation."""

    def __init__(self, plans: Plans, plan: MemoryPlan, host: Host | None) -> None:
        super().__init__(host=host)
        self.plans, self.plan = plans, plan
        self.tags: dict[Allocation, Array] = {}
        self.views: dict[Value, d.Pointwise] = {}
        self.results_of: tuple[Value, ...] = ()
        self.running: Equation | None = None
        self.running_piece: d.Pointwise | None = None

    def program(self, program: KernelProgram, arrays: Sequence[Array]) -> list[Array]:
        """Run the program, and check that inputs keep their elements unless updated."""
        results = super().program(program, arrays)
        for number, value in enumerate(program.block.parameters):
            if number not in self.plan.updated.values():
                self.array(value)
        return results

    def tags_of(self, value: Value, shape: tuple[int, ...]) -> Array | None:
        """Return the tags of a value's memory, or None if it is in registers."""
        allocation = self.plan.of(value)
        return None if allocation is None else self.tags_in(allocation, shape)

    def tags_in(self, allocation: Allocation, shape: tuple[int, ...]) -> Array:
        """Return the tags of an allocation that holds an array of this shape."""
        part = allocation.part_of
        if part is not None:
            whole = self.plan.allocations.of(part.result)
            tags = self.tags_in(whole, self.shape(part.result.shape))
            first = [(axis, self.size(n)) for axis, n in part.window]
            runs = [slice(n, n + shape[k]) if k is not None else n for k, n in first]
            along = [k for k, _ in part.window if k is not None]
            window = tags[tuple(runs)].transpose(np.argsort(along))
            ones = [slice(None) if k in along else None for k in range(len(shape))]
            window = window[tuple(ones)]
            if window.shape != shape:
                name = part.result.name
                raise KernelProgramError(f"`{part.value.name}` does not fit `{name}`.")
            return window
        if allocation not in self.tags or self.tags[allocation].shape != shape:
            self.tags[allocation] = np.full(shape, None, dtype=object)
        return self.tags[allocation]

    def bind(self, value: Value, array: Array) -> None:
        super().bind(value, array)
        tags = self.tags_of(value, array.shape)
        if tags is not None:
            tags[...] = value

    def array(self, value: Value) -> Array:
        view = self.views.get(value)
        if view is not None:
            self.results_of = (value,)
            return super().definition(view, [value.type])[0]
        array = super().array(value)
        tags = self.tags_of(value, array.shape)
        if tags is not None and any(t is not value for t in tags.reshape(-1).tolist()):
            for at in np.ndindex(array.shape):
                self.require(value, tags, at)
        return array

    def read(self, node: Expr, args: Sequence[Any]) -> Any:
        element = super().read(node, args)
        conditional = e.condition_of(node) is not None
        if node.attr in self.views or (conditional and not args[-1]):
            return element
        at = tuple(map(int, args[:-1] if conditional else args))
        tags = self.tags_of(node.attr, self.held(node.attr).shape)
        if tags is not None:
            self.require(node.attr, tags, at)
        return element

    def function(self, program: KernelProgram) -> Machine:
        return _TaggedMachine(self.plans, self.plans[program], self.host)

    def require(self, value: Value, tags: Array, at: tuple[int, ...]) -> None:
        tag = tags[at]
        if tag is not value:
            name = "nothing" if tag is None else f"`{tag.name}`"
            raise KernelProgramError(
                f"`{value.name}` is read at {list(at)}, where its memory holds {name}."
            )

    def results(self, equation: Equation, types: Sequence[TensorType]) -> list[Array]:
        definition = equation.definition
        if isinstance(definition, d.Pointwise) and definition.is_view:
            self.views[equation.results[0]] = definition
        self.results_of, self.running = equation.results, equation
        self.running_piece = None
        if isinstance(definition, Library | Callback | Call):
            for value in (*operands(definition), *equation.results):
                self.require_dense(value)
        return super().results(equation, types)

    def require_dense(self, value: Value) -> None:
        """Require contiguous memory for a value that is read or written as a whole."""
        allocation = self.plan.of(value)
        while allocation is not None and allocation.row_of is not None:
            allocation = allocation.row_of[0]
        if allocation is None or allocation.part_of is None:
            return
        tags = self.tags_in(allocation, self.shape(allocation.type.shape))
        if not tags.flags.c_contiguous:
            name = allocation.part_of.result.name
            raise KernelProgramError(f"`{value.name}` has gaps: it is in `{name}`.")

    def piece(
        self, definition: d.Pointwise | d.Cut, at: tuple[int, ...]
    ) -> d.Pointwise:
        self.running_piece = super().piece(definition, at)
        return self.running_piece

    def is_made_there(self, number: int, at: tuple[int, ...]) -> bool:
        """Return whether an element of a result was written as one of a part of it."""
        piece, equation = self.running_piece, self.running
        if piece is None or equation is None:
            return False
        part = self.plan.part_at(equation, piece, number)
        if part is None:
            return False
        index = self.at(piece.elements[number].args, at)
        first = [(axis, self.size(n)) for axis, n in part.window]
        position = [n if axis is None else n + int(index[axis]) for axis, n in first]
        if position != list(at):
            name = f"`{part.value.name}`"
            raise KernelProgramError(
                f"an element of {name} is at {position}, and the piece at {list(at)} "
                "is the same element."
            )
        return True

    def written(self, results: Sequence[Array], at: tuple[int, ...]) -> None:
        both = zip(self.results_of, results, strict=True)
        for number, (value, array) in enumerate(both):
            if self.is_made_there(number, at):
                continue
            tags = self.tags_of(value, array.shape)
            if tags is not None:
                tags[at] = value
