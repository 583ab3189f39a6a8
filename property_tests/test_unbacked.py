"""Chains of operations whose sizes depend on values: compiled, and in plain Python."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hopflow as hf

pytestmark = pytest.mark.slow

# All arithmetic is exact: of small integers.
STEPS: dict[str, Callable[[Any], Any]] = {
    "mask": lambda a: a[a > 0],
    "concat": lambda a: hf.concat([a, a[a > 0], -a]),
    "sort": hf.sort,
    "distinct": hf.unique_values,
    "inverse": lambda a: hf.unique_inverse(a).inverse_indices,
    "counts": lambda a: hf.unique_counts(a).counts,
    "repeat": lambda a: hf.repeat(a, hf.astype(a > 0, "int64") * 2),
    "cumulative": hf.cumulative_sum,
    "flip": hf.flip,
    "roll": lambda a: hf.roll(a, 1),
    "pad": lambda a: hf.pad(a, 1),
    "positions": lambda a: hf.nonzero(a)[0],
    "remainder": lambda a: (a % 5)[a % 3 > 0],
    "divide": lambda a: hf.concat([a // hf.maximum(a, 1), a]),
    "outer": lambda a: hf.ravel(a[a > 0][:, None] * hf.sign(a)[None, :]),
    "where": lambda a: hf.where(a > 0, a, hf.sum(a[a > 0])),
    "written": lambda a: a.at[a > 1].set(0),
    "lookup": lambda a: hf.searchsorted(hf.sort(a[a > 0]), a),
    "map": lambda a: hf.map(lambda r: hf.sum(a[a > r]), a),
    "scan": lambda a: hf.scan(lambda c, r: (c - r, c), 0, a)[1],
    "loop": lambda a: hf.fori_loop(0, 2, lambda _, b: hf.roll(b, 1) - a, a),
    "cond": lambda a: hf.cond(hf.sum(a) > 0, lambda: a + 1, lambda: -a),
}


@given(
    names=st.lists(st.sampled_from(sorted(STEPS)), min_size=1, max_size=4),
    rows=st.lists(st.lists(st.integers(-4, 4), max_size=6), min_size=1, max_size=3),
    dynamic=st.booleans(),
)
def test_sizes_that_depend_on_values(
    names: Sequence[str], rows: Sequence[Sequence[int]], dynamic: bool
) -> None:
    def f(a: Any) -> Any:
        for name in names:
            a = STEPS[name](a)
        return a, hf.sum(a)

    jitted = hf.jit(f, dynamic=dynamic)
    for row in rows:
        x = hf.asarray(np.array(row, np.int64))
        with hf.debug():
            expected = f(x)
        for ours, theirs in zip(jitted(x), expected, strict=True):
            assert ours.shape == theirs.shape
            np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))
