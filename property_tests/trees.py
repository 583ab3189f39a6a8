"""Trees of steps: those that a test names, and those that run at several sizes."""

from collections.abc import Sequence
from typing import Any, TypeAlias

from hypothesis import strategies as st

from hopflow.testing.programs import Pool, Steps, run
from hopflow.testing.strategies import BODIES, BRANCHES, numbers

Tree: TypeAlias = Sequence[tuple[Any, ...]]
"""Steps: (operation or operator, numbers, *the trees of its bodies)."""


def steps_of(tree: Tree) -> Steps:
    """Return the steps of a tree, for `record` or a pool."""

    def steps(p: Pool) -> None:
        for kind, ns, *bodies in tree:
            run(p, kind, ns, [steps_of(body) for body in bodies])

    return steps


def trees(
    names: Sequence[str],
    depth: int,
    most: int,
    operators: Sequence[str] = (*BRANCHES, *BODIES),
) -> st.SearchStrategy[Tree]:
    """Return a strategy for trees.

    Args:
        names: The operations.
        depth: The deepest nesting of operators.
        most: The most steps of a body that may have operators.
        operators: The operators: those in `BRANCHES` have two bodies.
    """
    plain = st.tuples(st.sampled_from(names), numbers())
    if depth == 0:
        return st.lists(plain, max_size=4)
    inner = trees(names, depth - 1, most, operators)
    nested = st.sampled_from(operators).flatmap(
        lambda name: st.tuples(
            st.just(name), numbers(), *[inner] * (1 + (name in BRANCHES))
        )
    )
    return st.lists(st.one_of(plain, plain, nested), max_size=most)
