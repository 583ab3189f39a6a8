"""What Hypothesis draws. Needs `hypothesis`, which the package does not."""

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

__all__ = ["BODIES", "numbers", "steps"]

numbers = st.tuples(*[st.integers(0, 11)] * 4)


BODIES = ("fori", "while", "scan", "map", "subgraph", "checkpoint", "custom")
"""The operators of one body."""


def steps(
    names: Sequence[str], depth: int, most: int = 7, bodies: Sequence[str] = BODIES
) -> st.SearchStrategy[Any]:
    """Programs of `testing.programs`.

    Args:
        names: Of the operations; one that is named more often is drawn more often.
        depth: How many operators may be within each other.
        most: Steps of the program, and of a body that has operators in it.
        bodies: Which operators of one body there may be.
    """
    plain = st.tuples(st.sampled_from(names), numbers)
    if depth == 0:
        return st.lists(plain, max_size=4)
    inner = steps(names, depth - 1, most, bodies)
    nested = st.one_of(
        st.tuples(st.sampled_from(["cond", "switch"]), numbers, inner, inner),
        st.tuples(st.sampled_from(bodies), numbers, inner),
    )
    return st.lists(st.one_of(plain, plain, nested), max_size=most)
