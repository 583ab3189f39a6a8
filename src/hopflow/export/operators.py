"""The operators that a file can name, and what they are called with.

An operator has a version, which grows when what its nodes have changes its meaning. A
file says the version of each operator that it uses. `upgrades` of an operator make the
params of one version those of the next; the least version that they lead on from is the
least that is readable.
"""

import inspect
import re
from collections.abc import Mapping
from typing import Any, Final

from hopflow.hops.associative_scan import ASSOCIATIVE_SCAN
from hopflow.hops.checkpoint import CHECKPOINT
from hopflow.hops.cond import COND
from hopflow.hops.custom import CUSTOM
from hopflow.hops.flex_attention import FLEX_ATTENTION
from hopflow.hops.invoke_subgraph import INVOKE_SUBGRAPH
from hopflow.hops.map import MAP
from hopflow.hops.scan import SCAN
from hopflow.hops.switch import SWITCH
from hopflow.hops.while_loop import LOOP_DERIVATIVES, WHILE
from hopflow.ops.callback import callback_op
from hopflow.ops.opdef import OPERATIONS, OpDef

_REGIONS: Final[tuple[Any, ...]] = (
    *(ASSOCIATIVE_SCAN, CHECKPOINT, COND, CUSTOM, FLEX_ATTENTION, INVOKE_SUBGRAPH),
    *(MAP, SCAN, SWITCH, WHILE, *LOOP_DERIVATIVES.operators),
)


def operators() -> dict[str, Any]:
    """All operators by name, but for those that call Python."""
    known = {op.name: op for op in (*OPERATIONS.values(), *_REGIONS)}
    del known[callback_op.name]
    return known


def least_version(op: Any) -> int:
    """The least version of an operator whose nodes are readable."""
    least: int = op.version
    while least - 1 in op.upgrades:
        least -= 1
    return least


def upgraded(op: Any, version: int, params: Mapping[str, Any]) -> dict[str, Any]:
    """The params of a node of an earlier version, as those of this one."""
    found = dict(params)
    for step in range(version, op.version):
        found = op.upgrades[step](found)
    return found


def schema(op: Any) -> dict[str, Any]:
    """What nodes of an operator have, as plain data.

    version   of this schema
    operands  the names of the operands; one that begins with `*` is any number of them
    params    by name what values it takes; one that ends with `?` may be left out
    effects   what a node does besides computing

    It is what the operator's own type rule takes, and the samples of its record.
    """
    rule = inspect.signature(op.infer)
    operands: list[str] = []
    params: dict[str, str] = {}
    for name, parameter in rule.parameters.items():
        if parameter.kind is parameter.VAR_POSITIONAL:
            operands.append(f"*{name.strip('_')}")
        elif parameter.kind is parameter.VAR_KEYWORD or name == "_":
            continue
        elif parameter.kind is parameter.KEYWORD_ONLY or name in _param_names(op):
            optional = "" if parameter.default is parameter.empty else "?"
            params[name + optional] = _kind(op, name, parameter.annotation)
        else:
            operands.append(name.strip("_"))
    for name in _param_names(op):
        if name not in params and f"{name}?" not in params:
            params[f"{name}?"] = _kind(op, name, inspect.Parameter.empty)
    params |= getattr(op, "options", {})
    return {
        "version": op.version,
        "operands": operands,
        "params": params,
        "effects": sorted(op.effects),
    }


def _param_names(op: Any) -> list[str]:
    """The params that samples of an operation have, or those that others say."""
    if not isinstance(op, OpDef):
        named = inspect.signature(op.lower).parameters.values()
        return [p.name for p in named if p.kind is p.KEYWORD_ONLY]
    return list(dict.fromkeys(key for s in op.samples for key in s.params))


def _kind(op: Any, name: str, annotation: Any) -> str:
    """What values a param takes, by its annotation, else by the samples."""
    if annotation is not inspect.Parameter.empty and annotation is not Any:
        text = inspect.formatannotation(annotation)
        return _MODULES.sub("", text)
    values = [s.params[name] for s in getattr(op, "samples", ()) if name in s.params]
    return " | ".join(sorted({type(value).__name__ for value in values})) or "Any"


_MODULES: Final = re.compile(r"\b[a-z_]+(?:\.[a-z_]+)*\.(?=[A-Z])")
