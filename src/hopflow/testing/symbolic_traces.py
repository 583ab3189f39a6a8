"""Helpers for tests of symbols: executions, symbolic traces, texts of graphs.

It needs `pytest`, which is no dependency of the package.
"""

import re
from collections.abc import Callable
from typing import Any

import pytest

from hopflow.graph.core import Graph
from hopflow.graph.module import GraphModule
from hopflow.graph.printer import format_graph
from hopflow.graph.verifier import verify
from hopflow.testing.executions import SYMBOLIC, run_debug, run_eager, run_native
from hopflow.trace.capture import trace

every_way = pytest.mark.parametrize(
    "run",
    [run_debug, run_eager, run_native, *SYMBOLIC],
    ids=lambda run: run.__name__,
)
every_trace = pytest.mark.parametrize("run", SYMBOLIC, ids=lambda run: run.__name__)


def symbolic(f: Callable[..., Any], *args: Any) -> GraphModule:
    """Trace a function with symbolic sizes and numbers, and verify the graph."""
    module = trace(f, *args, mode="symbolic", captures=True)
    verify(module.graph)
    return module


def without_lines(graph: Graph) -> str:
    """Return the text of a graph, without source lines."""
    return "\n" + re.sub(r" +#.*", "", format_graph(graph, width=200))


def text(f: Callable[..., Any], *args: Any) -> str:
    """Return the text of the graph of a symbolic trace."""
    return without_lines(symbolic(f, *args).graph)
