"""Appends to the user's lists in blocks that operators run."""

import sys
from collections.abc import Sequence
from typing import Any, Final

from hopflow import pytree
from hopflow.errors import ControlFlowError
from hopflow.rewrite.growing import Chunk, Growing, joined_chunks
from hopflow.rewrite.rows import Rows, is_weak
from hopflow.rewrite.values import State, load
from hopflow.trace.source import user_line
from hopflow.tracebacks import stack_above


def is_unshared(state: State, k: int) -> bool:
    """Whether the only reference to the list `k` of a state is its name, so that
    replacing it is not observable."""
    return _references(state, k) <= _UNSHARED


def _references(state: State, k: int) -> int:
    """Return the number of references to a list, without those of snapshots of local
    names: before Python 3.13, reading `f_locals` leaves one in the frame."""
    if not _HAS_SNAPSHOTS:
        return sys.getrefcount(state()[k])
    snapshots = [frame.f_locals for frame in stack_above(sys._getframe())]
    count = sys.getrefcount(state()[k])
    value = state()[k]
    return count - sum([v is value for names in snapshots for v in names.values()])


_HAS_SNAPSHOTS: Final = sys.version_info < (3, 13)  # see PEP 667


def _references_of_one() -> int:
    value: list[Any] = []

    def state() -> tuple[Any, ...]:
        return (load(lambda: value),)

    return _references(state, 0)


_UNSHARED = _references_of_one()


def require_lists(state: State, names: Sequence[str], grows: Sequence[str]) -> set[str]:
    """Return the names of unshared lists in `grows`.

    Raises:
        ControlFlowError: one is no list.
    """
    unshared: set[str] = set()
    for k, name in enumerate(grows, len(names)):
        kind = type(state()[k])
        if kind not in (list, Rows, Growing):
            raise ControlFlowError(
                f"control_flow: a block that depends on a tensor appends to `{name}`, "
                f"which is a `{kind.__name__}`, and no list ({user_line()})."
            )
        if kind is Growing or is_unshared(state, k):
            unshared.add(name)
    return unshared


def require_unshared(name: str, holds: bool) -> None:
    """Raises: ControlFlowError: `holds` is False: the list has other references."""
    if not holds:
        raise ControlFlowError(
            f"control_flow: a block that depends on a tensor appends to `{name}`, a "
            f"list that has another name or place too ({user_line()}). Begin with `[]` "
            "in this function, and give it away afterwards."
        )


def extended(name: str, before: Any, entries: Growing, *, is_unshared: bool) -> Any:
    """Return the list after a block that appends `entries` to it.

    Raises:
        ControlFlowError: their number is known only at run time, and the list is shared
            or they do not stack.
    """
    if isinstance(before, Growing):
        before.extend(entries)
        return before
    if not any(isinstance(entry, Chunk) for entry in entries):
        before.extend(entries)
        return before
    require_unshared(name, is_unshared)
    chunk = joined_chunks(entries)
    if chunk is None:
        raise ControlFlowError(
            f"control_flow: a block that depends on a tensor appends values of "
            f"differing structures to `{name}` ({user_line()}). Use a list for each."
        )
    rows = chunk.rows
    if chunk.mask is not None:
        rows = pytree.tree_map(lambda x: x[chunk.mask], rows)
    return Rows(rows, weak_rows(entries)).after(before)


def weak_rows(entries: Growing) -> list[bool]:
    """Return for each leaf of the entries whether it is a weak number."""
    first = entries[0]
    leaves = pytree.flatten(first.rows if isinstance(first, Chunk) else first)[0]
    return [is_weak(leaf) for leaf in leaves]
