"""`Match`: a part of a graph that matches a pattern."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Match:
    """A part of a graph that matches the pattern.

    anchor   the last node of the graph that is a result of the pattern
    nodes    node of the pattern -> node of the graph; a parameter may be a constant. If
             nodes call operations: var of the pattern's captured graph -> its value
    values   name of a parameter -> its value
    """

    anchor: Any
    nodes: Mapping[Any, Any]
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Candidate:
    """A match in a graph of `fx` whose conditions are not checked yet.

    nodes, values   as of a `Match`
    ends            the nodes that are results of the pattern
    inside          all nodes of the match
    """

    nodes: Mapping[Any, Any]
    values: Mapping[str, Any]
    ends: list[Any]
    inside: Mapping[Any, None]
