"""What targets see of an exported program, and what programs and their forms in other
systems have in common."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, Protocol

from hopflow.errors import StructureError
from hopflow.export.signature import Signature
from hopflow.graph.module import GraphModule


class Exported(Protocol):
    """An `ExportedProgram`, as the modules that it imports see it."""

    @property
    def __name__(self) -> str: ...

    @property
    def __signature__(self) -> inspect.Signature: ...

    @property
    def module(self) -> GraphModule: ...

    @property
    def state(self) -> Mapping[str, Any]: ...

    @property
    def signature(self) -> Signature: ...

    @property
    def constraints(self) -> tuple[str, ...]: ...


class Stateful(ABC):
    """A function that holds arrays by module path."""

    __name__: str

    @property
    @abstractmethod
    def signature(self) -> Signature:
        """What it takes, gives, holds and writes."""

    @property
    @abstractmethod
    def state(self) -> dict[str, Any]:
        """The arrays that it holds, by module path."""

    @property
    def parameters(self) -> dict[str, Any]:
        """Those of the state that are floats and not written."""
        return {path: self.state[path] for path in self.signature.parameters}

    @property
    def buffers(self) -> dict[str, Any]:
        """All others of the state."""
        return {path: self.state[path] for path in self.signature.buffers}

    def _replaced(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the state with other arrays at some paths.

        Raises:
            StructureError: a path is none of the state.
        """
        if unknown := [name for name in state if name not in self.state]:
            raise StructureError(
                f"{self.__name__}: there is no `{unknown[0]}` in the state, which has "
                f"{', '.join(self.state) or 'nothing'}."
            )
        return {**self.state, **state}
