"""The interface of targets for the stages that all targets share.

It asks for what the schedule decides by. What LLVM needs is in `llvm/target.py`. The
CPUs, with what their emitter needs, are in `cpu/target.py`.
"""

from typing import Protocol

from hopflow.compiler.divergence import Divergence
from hopflow.dtypes import DType
from hopflow.loop_ir.program import For


class Target(Protocol):
    """A machine that programs are compiled for.

    Targets are values: programs for equal targets share their code. The class of each
    kind of target has what only its emitter needs.
    """

    @property
    def has_threads(self) -> bool:
        """Whether loops may run on several threads."""
        ...

    @property
    def has_masks(self) -> bool:
        """Whether a masked load, store or gather is one instruction."""
        ...

    @property
    def has_gangs(self) -> bool:
        """Whether iterations may be lanes of a gang."""
        ...

    def vector_width(
        self, dtype: DType, *, reduces: bool = False, narrow: bool = False
    ) -> int:
        """Return the lanes of a vector loop whose largest values are of `dtype`.

        Args:
            reduces: Whether the loop has an `Accumulate`.
            narrow: Whether no value in the loop has more bits.
        """
        ...

    def gang_width(self, loop: For, divergence: Divergence) -> int:
        """Return the lanes of a gang of iterations, or 1 if scalar code is faster."""
        ...
