"""`Match`: a place of a graph that looks like a pattern."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Match:
    """A place that looks like the pattern.

    anchor   the node whose value is what the pattern returns, or returns last
    nodes    each node of the pattern -> what it is here; a parameter may be a constant.
             Of operations: the vars of the pattern's captured graph -> what they are
    values   the same for the parameters, by name
    """

    anchor: Any
    nodes: Mapping[Any, Any]
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Found:
    """A place of a graph of `fx` that looks like a pattern and may be none to replace.

    nodes, values   as of a `Match`
    ends            the nodes whose values the pattern returns
    inside          the nodes that it is made of
    """

    nodes: Mapping[Any, Any]
    values: Mapping[str, Any]
    ends: list[Any]
    inside: Mapping[Any, None]
