"""How each operation is written: its own rule, or what it lowers to."""

from collections.abc import Callable, Sequence
from typing import Any, Final

from hopflow.export.onnx import conv, indexing, linalg, movement, reductions, values
from hopflow.export.onnx.frames import Site
from hopflow.export.onnx.pointwise import lowered
from hopflow.export.onnx.regions import region
from hopflow.export.onnx.scopes import Value
from hopflow.graph.regions import has_regions

RULES: Final[dict[str, Callable[..., Any]]] = {
    **conv.RULES,
    **indexing.RULES,
    **linalg.RULES,
    **movement.RULES,
    **reductions.RULES,
    **values.RULES,
}
"""By the name of an operation: (site, *operands, **params) -> its result, or results.
Those that are not here are written by what they lower to."""


def write(site: Site) -> Sequence[Value]:
    """The results of a node.

    Raises:
        ExportError: ONNX has nothing for it.
    """
    rule = RULES.get(site.node.op.name)
    if rule is not None:
        found = rule(site, *site.operands, **site.params)
        return [found] if isinstance(found, Value) else found
    return region(site) if has_regions(site.node) else lowered(site)
