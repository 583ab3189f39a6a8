"""Where operations come from besides the stack: nodes done again, and modules."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NamedTuple, Protocol

from hopflow.graph.core import SourceLine


class Place(NamedTuple):
    """What a node knows of where it came from; see `Node`."""

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
    """What the operations of this thread come from.

    node     the one that is done again, by a retrace or a transform
    root     the frame that has called the function which is traced
    module   the path and class of the module that is called: "encoder.layers.0:Linear"
    """

    node: _Placed = _NOWHERE
    root: FrameType | None = None
    module: str = ""

    @property
    def module_path(self) -> str:
        return self.node.module_path or self.module


origin = _Origin()


class replaying:
    """Within the block, operations come from where this node did; without one, from
    where the stack says."""

    # A class, as `bind.using` is.
    __slots__ = ("before", "node")

    def __init__(self, node: _Placed = _NOWHERE) -> None:
        self.node = node

    def __enter__(self) -> None:
        self.before = origin.node
        origin.node = self.node

    def __exit__(self, *_error: object) -> None:
        origin.node = self.before


@contextmanager
def in_module(path: str) -> Iterator[None]:
    """Within the block, operations are a module's."""
    before = origin.module
    origin.module = path
    try:
        yield
    finally:
        origin.module = before


@contextmanager
def called_from(root: FrameType | None) -> Iterator[None]:
    """Within the block, `root` is the frame that has called the traced function: lines
    of operations have as callers the frames of the user's code that it has led to."""
    before = origin.root
    origin.root = root
    try:
        yield
    finally:
        origin.root = before
