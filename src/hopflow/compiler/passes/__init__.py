"""Passes over graphs, in the order in which they run. Each edits a graph in place.

After the first two no two nodes share a subgraph, so that the others may edit subgraphs
in place too. The functions that the first outlines are compiled separately.
"""

from collections.abc import Callable

from hopflow.compiler.passes.add_updates import add_updates
from hopflow.compiler.passes.compose import compose
from hopflow.compiler.passes.dead_results import drop_dead_results
from hopflow.compiler.passes.expand import expand_inlines
from hopflow.compiler.passes.outline import outline_calls
from hopflow.compiler.passes.own_symbols import own_symbols
from hopflow.compiler.passes.small_matrices import small_matrices
from hopflow.compiler.passes.sort_values import sort_values
from hopflow.compiler.passes.stack_products import stack_products
from hopflow.compiler.passes.sum_products import sum_products
from hopflow.graph.core import Graph
from hopflow.graph.forwarding import forward_results

PASSES: tuple[Callable[[Graph], Graph], ...] = (
    outline_calls,
    expand_inlines,
    forward_results,
    sort_values,
    add_updates,
    compose,
    small_matrices,
    stack_products,
    sum_products,
    drop_dead_results,
    own_symbols,
)
