"""The state that the functions of one program share while they are emitted."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from hopflow.compiler.cpu.cost import Cost
from hopflow.compiler.cpu.heap import GuardedHeap, Heap, KeptHeap, Workspace
from hopflow.compiler.cpu.target import CpuTarget
from hopflow.compiler.llvm.module import Module
from hopflow.loop_ir.program import Stmt

Constants: TypeAlias = dict[str, np.ndarray[Any, np.dtype[Any]]]


class Callee(NamedTuple):
    """What callers need of a function: its cost, and whether it may stop."""

    cost: Cost
    may_stop: bool


@dataclass(eq=False, slots=True)
class Unit:
    """A module under construction, for one target.

    guarded     whether its memory comes from `compiler.cpu.guarded`
    functions   the functions that are complete, by name
    constants   the data of large "constant" buffers, whose addresses the linker needs
    lengths     the approximate code size of statements, a memo table of `segments`
    heap        where memory comes from whose size only the run knows
    """

    module: Module
    target: CpuTarget
    guarded: bool = False
    functions: dict[str, Callee] = field(default_factory=dict)
    constants: Constants = field(default_factory=dict)
    lengths: dict[Stmt, int] = field(default_factory=dict)
    heap: Heap = field(init=False)

    def __post_init__(self) -> None:
        if self.target.freestanding:
            self.heap = Workspace()
        else:
            self.heap = GuardedHeap() if self.guarded else KeptHeap()
