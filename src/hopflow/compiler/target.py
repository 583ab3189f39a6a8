"""What a program is compiled for, as the stages that all targets share see it."""

from typing import Protocol

from hopflow.compiler.divergence import Divergence
from hopflow.dtypes import DType
from hopflow.loop_ir.program import For


class Target(Protocol):
    """A machine that programs are compiled for.

    Targets are values: programs for equal ones share their code. What only the emission
    of one kind of target asks is in that target's class.
    """

    def vector_width(
        self, dtype: DType, *, reduces: bool = False, narrow: bool = False
    ) -> int:
        """The lanes that a vector loop should have whose largest values are of `dtype`.

        Args:
            reduces: Whether the loop has an `Accumulate`.
            narrow: Whether all that it computes with has no more bits.
        """
        ...

    def gang_width(self, loop: For, divergence: Divergence) -> int:
        """The lanes of a gang that runs iterations of `loop`; 1 if they are faster one
        by one."""
        ...
