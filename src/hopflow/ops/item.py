"""`item` in graphs: the node that defines a symbol from a tensor's one element."""

from typing import Final

import numpy as np

from hopflow import dtypes
from hopflow.errors import DTypeError
from hopflow.graph.types import SYMBOL_TYPE, TensorType
from hopflow.loop_ir import expr
from hopflow.ops.opdef import OpDef, Sample
from hopflow.ops.rules import Array, pointwise

__all__ = ["item"]


def _infer(operand: TensorType) -> TensorType:
    if operand.shape or operand.dtype.is_float:
        raise DTypeError(
            f"item: a symbol is the value of an integer of no axes, not of {operand}."
        )
    return SYMBOL_TYPE


def _run(x: Array) -> Array:
    """The integer that a tensor of no axes holds."""
    return np.asarray(x, np.int64)


item: Final = OpDef(
    name="item",
    promote=None,
    infer=_infer,
    run=_run,
    lower=pointwise(lambda x: expr.cast(x, dtypes.int64)),
    samples=(Sample(("T[]",), {}, (*dtypes.INTEGERS, dtypes.bool_)),),
)
