"""What tests of symbols share: ways to run, traces for all sizes, texts of graphs.

Needs `pytest`, which the package does not.
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
    """A function traced for all sizes and numbers, and verified."""
    module = trace(f, *args, mode="symbolic", captures=True)
    verify(module.graph)
    return module


def without_lines(graph: Graph) -> str:
    """A graph's text, without the lines of the user's code."""
    return "\n" + re.sub(r" +#.*", "", format_graph(graph, width=200))


def text(f: Callable[..., Any], *args: Any) -> str:
    """The graph of a symbolic trace."""
    return without_lines(symbolic(f, *args).graph)
