"""Where the operations that are being recorded come from: `origin`, of each thread.

A tracer gives each new node a line of the user's code, a path of modules and a path of
operators. While a function is traced, the line is found on the Python stack, and the
path is that of the module which is being called. While a graph is replayed, new nodes
take the place of the node that they are made for.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NamedTuple, Protocol

from hopflow.graph.core import SourceLine


class Place(NamedTuple):
    """Where a node came from: its fields of these names; see `Node`."""

    line: SourceLine | None = None
    module_path: str = ""
    operator_path: str = ""


class _HasPlace(Protocol):
    @property
    def line(self) -> SourceLine | None: ...
    @property
    def module_path(self) -> str: ...
    @property
    def operator_path(self) -> str: ...


_NOWHERE = Place()


class _Origin(threading.local):
    """The origin of the operations of this thread.

    node     the node that is replayed, as in a retrace, a derivative or a batch; or a
             place without a line: the Python stack tells
    caller   the frame that calls the traced function, where the user's frames end
    module   the path and class of the called module: "encoder.layers.0:Linear"
    """

    node: _HasPlace = _NOWHERE
    caller: FrameType | None = None
    module: str = ""

    @property
    def module_path(self) -> str:
        """The path of modules of the next operation."""
        return self.node.module_path or self.module


origin = _Origin()


class replaying:
    """Within the block, operations take their place from `node`, a `Node` or a `Place`;
    without an argument, from the Python stack again."""

    # A class is entered and left faster than a `contextmanager`.
    __slots__ = ("node", "previous")

    def __init__(self, node: _HasPlace = _NOWHERE) -> None:
        self.node = node

    def __enter__(self) -> None:
        self.previous = origin.node
        origin.node = self.node

    def __exit__(self, *_error: object) -> None:
        origin.node = self.previous


@contextmanager
def in_module(path: str) -> Iterator[None]:
    """Within the block, operations belong to the module at `path`."""
    previous = origin.module
    origin.module = path
    try:
        yield
    finally:
        origin.module = previous


@contextmanager
def called_from(caller: FrameType | None) -> Iterator[None]:
    """Within the block, `caller` is the frame that calls the traced function: a line's
    callers are the user's frames between it and the line."""
    previous = origin.caller
    origin.caller = caller
    try:
        yield
    finally:
        origin.caller = previous
