"""How each operation is evaluated: by a rule, by the function of JAX that its record
names, or by what it lowers to."""

from collections.abc import Callable, Sequence
from typing import Any, Final

from hopflow.export.jax import indexing, linalg, movement, reductions, values
from hopflow.export.jax.frames import Array, Site
from hopflow.export.jax.pointwise import pointwise
from hopflow.export.jax.regions import REGIONS, region
from hopflow.graph.regions import has_regions

RULES: Final[dict[str, Callable[..., Any]]] = {
    **indexing.RULES,
    **linalg.RULES,
    **movement.RULES,
    **reductions.RULES,
    **values.RULES,
}
"""By the name of an operation: (site, *operands, **params) -> its result, or results.
Those that are not here are elementwise."""


def evaluate(site: Site) -> Sequence[Array]:
    """The results of a node.

    Raises:
        ExportError: JAX has nothing for it.
    """
    if has_regions(site.node):
        return REGIONS.get(site.node.op.name, region)(site)
    rule: Callable[..., Any] = RULES.get(site.node.op.name, pointwise)
    found = rule(site, *site.operands, **site.params)
    return found if isinstance(found, list | tuple) else [found]
