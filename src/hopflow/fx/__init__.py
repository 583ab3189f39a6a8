"""Symbolic graphs that Python traces, writes and edits; see docs/fx.md."""

from hopflow.backends import module_of
from hopflow.fx.drawing import FxGraphDrawer, to_dot
from hopflow.fx.graph import Graph
from hopflow.fx.interpreter import Interpreter
from hopflow.fx.match import Match
from hopflow.fx.module import GraphModule
from hopflow.fx.node import Node
from hopflow.fx.opening import open_bodies
from hopflow.fx.patterns import replace_pattern
from hopflow.fx.proxy import Proxy
from hopflow.fx.shapes import ShapeProp
from hopflow.fx.split import split_module
from hopflow.fx.tracer import Tracer, symbolic_trace
from hopflow.fx.transformer import Transformer
from hopflow.fx.wrapping import wrap

__all__ = [
    "FxGraphDrawer",
    "Graph",
    "GraphModule",
    "Interpreter",
    "Match",
    "Node",
    "Proxy",
    "ShapeProp",
    "Tracer",
    "Transformer",
    "module_of",
    "open_bodies",
    "replace_pattern",
    "split_module",
    "symbolic_trace",
    "to_dot",
    "wrap",
]
