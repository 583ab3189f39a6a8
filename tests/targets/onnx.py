"""What operations and operators become in ONNX, as the table of targets says it."""

from collections.abc import Iterator
from typing import Any, Final

import pytest
from tests.targets.calls import case, exported, function_of, usual

import hopflow as hf
from hopflow.errors import ExportError
from hopflow.ops.opdef import OPERATIONS, OpDef, Sample

NO_RULE: Final = (
    "and the signs of LAPACK's follow from no rule that a model could repeat. Compute "
    "them before, or after it."
)
REFUSED: Final = {
    "callback": "it calls Python, which `hf.export` refuses",
    "eigh": f"ONNX has no eigenvectors, {NO_RULE}",
    "svd": f"ONNX has no singular vectors, {NO_RULE}",
}
VALUES_ALONE: Final = {"eigh": {"vectors": False}, "svd": {"mode": "values"}}
"""The params with which an operation that else is refused has a model."""


def node_types(graph: Any) -> Iterator[str]:
    """The operators of a graph and of those in it."""
    for node in graph.node:
        yield node.op_type
        for attribute in node.attribute:
            yield from node_types(attribute.g)


def samples_of(op: OpDef) -> list[Sample]:
    """The samples that have a model."""
    kept = VALUES_ALONE.get(op.name)
    return [s for s in op.samples if kept is None or s.params == kept]


def operation(name: str) -> str:
    """The cell of an operation."""
    op = OPERATIONS[name]
    if name == "callback":
        return f"*refused: {REFUSED[name]}*"
    cell = written(op)
    if name in REFUSED:
        cell += f" for values; else *refused: {refusal(op)}*"
    return cell


def refusal(op: OpDef) -> str:
    """What the error says of the first sample, without its place."""
    row = case(op, op.samples[0], op.samples[0].dtypes[0])
    program = exported(function_of(op, [row]), *map(hf.asarray, row.operands))
    with pytest.raises(ExportError) as found:
        program.to_onnx()
    return str(found.value).partition("model: ")[2]


HELPERS: Final = frozenset(["Constant", "Identity", "Cast"])


def written(op: OpDef) -> str:
    """Of which operators of ONNX an operation is made, in its most usual dtype."""
    row = usual(op, samples_of(op)[0])
    program = exported(function_of(op, [row]), *map(hf.asarray, row.operands))
    model = program.to_onnx(asserts="drop")
    kinds = sorted({*node_types(model.graph)} - HELPERS)
    if len(kinds) > MOST_KINDS:
        loops = [f"`{k}`" for k in kinds if k in ("Loop", "Scan")]
        return loops[0] if loops else "composed"
    if model.functions:
        return "a function"
    return ", ".join(f"`{k}`" for k in kinds) or "`Identity`"


MOST_KINDS: Final = 4
"""Of what is made of more operators the table has no list."""

IN_PLACE: Final = "what it means, in place"
KINDS: Final = {
    "cond": "If",
    "switch": "If",
    "while_loop": "Loop",
    "while_loop, max_steps": "Loop",
    "fori_loop": "Loop",
    "scan": "Scan",
    "scan, which captures": "Loop",
    "scan, reverse": "Scan",
    "map": "Loop",
    "associative_scan": "Scan",
    "invoke_subgraph": "f",
    "checkpoint": "Sin",
    "custom_vjp": "Sin",
    "custom_jvp": "Tanh",
    "flex_attention": "MatMul",
    "a user's own": "Loop",
    "derivatives of loops": "Loop",
    "derivatives of while_loop": "Loop",
}
"""An operator of ONNX in the model of each call."""
CELLS: Final = {"invoke_subgraph": "a function"} | dict.fromkeys(
    ("checkpoint", "custom_vjp", "custom_jvp", "flex_attention", "a user's own"),
    IN_PLACE,
)
"""What the table says if that is not what a call becomes."""


def operator(name: str) -> str:
    """The cell of an operator."""
    return CELLS.get(name, f"`{KINDS[name]}`")
