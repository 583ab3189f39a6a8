"""The origin of operations: the replayed node, the module, the root frame."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NamedTuple, Protocol

from hopflow.graph.core import SourceLine


class Place(NamedTuple):
    """Where a node came from; see `Node`."""

    line: SourceLine | None = None
    module_path: str = ""
    operator_path: str = ""


class _Placed(Protocol):
    @property
    def line(self) -> SourceLine | None: ...
    @property
    def module_path(self) -> str: ...
    @property
    def operator_path(self) -> str: ...


_NOWHERE = Place()


class _Origin(threading.local):
    """The origin of the operations of this thread.

    node     the node that a retrace or a transform replays
    root     the frame that called the traced function
    module   the path and class of the called module: "encoder.layers.0:Linear"
    """

    node: _Placed = _NOWHERE
    root: FrameType | None = None
    module: str = ""

    @property
    def module_path(self) -> str:
        return self.node.module_path or self.module


origin = _Origin()


class replaying:
    """Within the block, operations take their place from `node`; without a node,
    from the Python stack."""

    # A class is entered and left faster than a `contextmanager`.
    __slots__ = ("node", "previous")

    def __init__(self, node: _Placed = _NOWHERE) -> None:
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
def called_from(root: FrameType | None) -> Iterator[None]:
    """Within the block, `root` is the frame that called the traced function. The
    callers of a line are the frames of the user's code below it."""
    previous = origin.root
    origin.root = root
    try:
        yield
    finally:
        origin.root = previous
