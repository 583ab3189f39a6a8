"""The interface of a compiled program: its parameters, results and sites.

Callers need nothing else of the program once it is compiled.
"""

from dataclasses import dataclass

from hopflow.loop_ir.expr import Buffer, Var
from hopflow.loop_ir.program import DerivedSize, Program, Site, SizedType
from hopflow.loop_ir.walk import allocated
from hopflow.symbolic.size import Symbol


@dataclass(eq=False, slots=True)
class Interface:
    """The parameters and the sites of a program; see `Program`.

    owned  the outputs whose memory the program itself allocates
    """

    name: str
    sizes: list[Var]
    inputs: list[Buffer]
    outputs: list[Buffer]
    owned: frozenset[Buffer]
    sites: list[Site]
    symbols: list[Symbol]
    derived: list[DerivedSize]
    types: list[SizedType]

    @classmethod
    def of(cls, program: Program) -> "Interface":
        """Return the interface of a program."""
        return cls(
            program.name,
            program.sizes,
            program.inputs,
            program.outputs,
            frozenset(allocated(program.body)).intersection(program.outputs),
            program.sites,
            program.symbols,
            program.derived,
            program.types,
        )
