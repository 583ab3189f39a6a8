"""Modules and common layers: see docs/nn.md."""

from hopflow.nn.layers import (
    Embedding,
    Function,
    GRUCell,
    LayerNorm,
    Linear,
    LSTMCell,
    MultiheadAttention,
    Sequential,
)
from hopflow.nn.module import Module, static

__all__ = [
    "Embedding",
    "Function",
    "GRUCell",
    "LSTMCell",
    "LayerNorm",
    "Linear",
    "Module",
    "MultiheadAttention",
    "Sequential",
    "static",
]
