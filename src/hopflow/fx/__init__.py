"""Functions as graphs that Python writes and edits, without shapes: see docs/fx.md."""

from hopflow.fx.graph import Graph
from hopflow.fx.interpreter import Interpreter
from hopflow.fx.module import GraphModule
from hopflow.fx.node import Node
from hopflow.fx.patterns import Match, replace_pattern
from hopflow.fx.proxy import Proxy
from hopflow.fx.tracer import Tracer, symbolic_trace, wrap
from hopflow.fx.transformer import Transformer

__all__ = [
    "Graph",
    "GraphModule",
    "Interpreter",
    "Match",
    "Node",
    "Proxy",
    "Tracer",
    "Transformer",
    "replace_pattern",
    "symbolic_trace",
    "wrap",
]
