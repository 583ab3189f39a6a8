"""`Match`: a place of a graph that looks like a pattern."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Match"]


@dataclass(frozen=True, slots=True)
class Match:
    """A place that looks like the pattern.

    anchor   the node whose value is what the pattern returns, or returns last
    nodes    each node of the pattern -> what it is here; a parameter may be a constant.
             Of a captured graph: the vars of the pattern -> vars and constants
    values   the same for the parameters, by name
    """

    anchor: Any
    nodes: Mapping[Any, Any]
    values: Mapping[str, Any]
