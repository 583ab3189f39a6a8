"""Passes over graphs, in the order they run. Each takes a graph and gives one."""

from collections.abc import Callable

from hopflow.graph.core import Graph

PASSES: tuple[Callable[[Graph], Graph], ...] = ()
