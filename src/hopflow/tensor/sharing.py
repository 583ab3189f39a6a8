"""Which tensors of a call share memory, and how."""

from collections.abc import Sequence
from typing import Any

from hopflow.tensor.eager import EagerTensor
from hopflow.tensor.rows import places_in, root_of, row_of


def first_of(tensors: Sequence[Any], wanted: Any) -> int:
    return next(k for k, t in enumerate(tensors) if t is wanted)


def overlap(tensors: Sequence[EagerTensor], written: Sequence[int]) -> bool:
    """Whether a tensor that is written shares memory with another one."""
    return any(
        tensors[k].overlaps(other)
        for k in written
        for j, other in enumerate(tensors)
        if j != k
    )


def sharing(tensors: Sequence[EagerTensor]) -> tuple[Any, ...]:
    """For each tensor which it is first given as, and where it is in the memory that it
    shares with others."""
    found: list[Any] = []
    for k, tensor in enumerate(tensors):
        others = [
            j for j, other in enumerate(tensors) if j != k and tensor.overlaps(other)
        ]
        where: Any = None
        if others and (row := row_of([tensor])) is not None:
            distance = root_of(tensor).pointer - root_of(tensors[others[0]]).pointer
            where = places_in(row, tensor), row.shape, distance
        found.append((first_of(tensors, tensor), tuple(others), where))
    return tuple(found)


def rows_of(
    captured: Sequence[EagerTensor], tensors: Sequence[EagerTensor]
) -> dict[int, int]:
    """Which captured tensors are rows that arguments are in, and of which argument."""
    found: dict[int, int] = {}
    for at, tensor in enumerate(captured):
        for k, argument in enumerate(tensors):
            if row_of([argument]) is tensor:
                found.setdefault(at, k)
    return found
