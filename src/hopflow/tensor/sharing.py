"""Find out which tensors of a call share memory, and how."""

from collections.abc import Sequence
from typing import Any

from hopflow.tensor.eager import EagerTensor
from hopflow.tensor.rows import places_in, root_of, row_of


def first_of(tensors: Sequence[Any], tensor: Any) -> int:
    """Return the index of the first occurrence of `tensor`, by identity."""
    return next(k for k, t in enumerate(tensors) if t is tensor)


def overlap(tensors: Sequence[EagerTensor], written: Sequence[int]) -> bool:
    """Return True if a written tensor shares memory with another one."""
    return any(
        tensors[k].overlaps(other)
        for k in written
        for j, other in enumerate(tensors)
        if j != k
    )


def sharing(tensors: Sequence[EagerTensor]) -> tuple[Any, ...]:
    """Return, for each tensor, the index of its first occurrence, those that share
    memory with it, and its layout in the shared memory (None if it is not shared)."""
    layouts: list[Any] = []
    for k, tensor in enumerate(tensors):
        others = [
            j for j, other in enumerate(tensors) if j != k and tensor.overlaps(other)
        ]
        where: Any = None
        if others and (row := row_of([tensor])) is not None:
            distance = root_of(tensor).pointer - root_of(tensors[others[0]]).pointer
            where = places_in(row, tensor), row.shape, distance
        layouts.append((first_of(tensors, tensor), tuple(others), where))
    return tuple(layouts)


def rows_of(
    captured: Sequence[EagerTensor], tensors: Sequence[EagerTensor]
) -> dict[int, int]:
    """Map captured tensors that are rows (`row_of`) of arguments to these, by index."""
    arguments: dict[int, int] = {}
    for at, tensor in enumerate(captured):
        for k, argument in enumerate(tensors):
            if row_of([argument]) is tensor:
                arguments.setdefault(at, k)
    return arguments
