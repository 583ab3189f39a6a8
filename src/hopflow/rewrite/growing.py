"""The entries that the body of an operator appends to a list in one step.

An entry is a value or a chunk: values stacked along a new first axis, with a mask of
those that are actually appended.
"""

from typing import Any, NamedTuple

from hopflow import pytree
from hopflow.bind import Value
from hopflow.ops.creation import ones, zeros
from hopflow.ops.joining import concat
from hopflow.ops.manipulation import reshape
from hopflow.tensor.convert import asarray


class Chunk(NamedTuple):
    """Values that were appended in order, some of them conditionally.

    rows  a pytree of T[m, …]
    mask  bool[m]: whether each is appended; None: all are
    """

    rows: Any
    mask: Value | None

    @property
    def length(self) -> Any:
        """The number of rows."""
        return pytree.flatten(self.rows)[0][0].shape[0]


class Growing(list[Any]):
    """The entries of one step, to which the user's code only appends."""


def chunk_of(entry: Any, *, present: bool = True) -> Chunk:
    """Return an entry as a chunk with a mask.

    Args:
        present: Whether it is appended; if not, its values are ignored.
    """
    if isinstance(entry, Chunk):
        chunk = entry
    else:
        chunk = Chunk(pytree.tree_map(_as_row, entry), None)
    if not present:
        return Chunk(chunk.rows, zeros((chunk.length,), dtype=bool))
    if chunk.mask is None:
        return Chunk(chunk.rows, ones((chunk.length,), dtype=bool))
    return chunk


def _as_row(value: Any) -> Value:
    tensor = asarray(value)
    return reshape(tensor, (1, *tensor.shape))


def joined_chunks(entries: Growing) -> Chunk | None:
    """Return the entries of a step as one chunk; None: their structures differ."""
    masked = any(isinstance(e, Chunk) and e.mask is not None for e in entries)
    chunks = [chunk_of(e) for e in entries]
    leaves, specs = zip(*(pytree.flatten(c.rows) for c in chunks), strict=True)
    if any(spec != specs[0] for spec in specs):
        return None
    columns = [concat(column) for column in zip(*leaves, strict=True)]
    mask = concat([c.mask for c in chunks]) if masked else None
    return Chunk(pytree.unflatten(specs[0], columns), mask)
