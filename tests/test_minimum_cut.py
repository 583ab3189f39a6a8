"""Minimum cuts are those of SciPy."""

import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from hopflow.autograd.minimum_cut import sink_side

Network = dict[tuple[int, int], int]

networks = st.dictionaries(
    st.tuples(st.integers(0, 9), st.integers(0, 9)).filter(lambda e: e[0] != e[1]),
    st.integers(0, 20),
    max_size=40,
)


def of_scipy(edges: Network) -> set[int]:
    matrix = np.zeros((10, 10), np.int32)
    for (start, end), capacity in edges.items():
        matrix[start, end] = capacity
    network = csr_array(matrix)
    left = network - maximum_flow(network, 0, 1).flow
    left.data[left.data < 0] = 0
    left.eliminate_zeros()
    reached = breadth_first_order(left.T, 1, return_predecessors=False)
    return {int(node) for node in reached}


@given(networks)
@settings(max_examples=300)
def test_the_sink_side_is_that_of_scipy(edges: Network) -> None:
    before = dict(edges)
    assert sink_side(edges, 0, 1) == of_scipy(edges)
    assert edges == before


@pytest.mark.parametrize(
    ("edges", "expected"),
    [
        ({}, {1}),
        ({(0, 1): 3}, {1}),
        ({(0, 2): 5, (2, 3): 1, (3, 1): 5}, {3, 1}),
        ({(0, 2): 1, (2, 1): 1}, {1}),
        ({(0, 2): 2, (2, 1): 1, (0, 3): 1, (3, 2): 1}, {1}),
        ({(0, 2): 1, (2, 3): 1, (3, 2): 4, (3, 1): 7}, {1, 3}),
    ],
)
def test_cuts(edges: Network, expected: set[int]) -> None:
    assert sink_side(edges, 0, 1) == expected


def test_a_long_path_takes_no_recursion() -> None:
    path = [0, *range(2, 5000), 1]
    edges = dict.fromkeys(pairwise(path), 7)
    edges[2000, 2001] = 1
    assert sink_side(edges, 0, 1) == {*range(2001, 5000), 1}


def test_a_gradient_imports_no_part_of_scipy() -> None:
    script = """
import sys
from itertools import pairwise
import hopflow as hf
before = {name for name in sys.modules if name.startswith("scipy")}
loss = lambda w: hf.scan(lambda w, x: (hf.tanh(w * x), w), w, hf.ones(4))[0]
hf.jit(hf.grad(loss))(0.5)
print(sorted({name for name in sys.modules if name.startswith("scipy")} - before))
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
