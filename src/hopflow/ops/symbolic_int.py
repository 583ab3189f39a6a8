"""`symbolic_int`: the value of a symbolic integer expression, as a tensor."""

from typing import Final

import numpy as np

from hopflow.errors import ArgumentRangeError
from hopflow.graph.types import SYMBOL_TYPE
from hopflow.loop_ir import expr
from hopflow.loop_ir.kernels import Pointwise
from hopflow.ops.opdef import OpDef, Sample
from hopflow.ops.rules import Array
from hopflow.symbolic.ranges import INT64


def beyond_int64(text: str, value: int, at: str = "") -> ArgumentRangeError:
    """Return the error for an integer expression whose value int64 cannot hold.

    Args:
        text: The expression.
        at: The user's line, as " (model.py:12)".
    """
    return ArgumentRangeError(
        f"the integer `{text}`{at} is {value}, which int64 cannot hold. A tensor holds "
        "integers of at most 64 bits: compute with smaller ones, or with floats."
    )


def _run(*, value: int) -> Array:
    """The integer `value`, with symbols replaced by their values."""
    if value not in INT64:
        raise beyond_int64(str(value), value)
    return np.asarray(value, np.int64)


# `symbolic_int(value)`: the expression is a param instead of arithmetic nodes, so that
# every evaluator computes it exactly and gets the same result.
symbolic_int: Final = OpDef(
    name="symbolic_int",
    promote=None,
    infer=lambda value: SYMBOL_TYPE,
    run=_run,
    keeps_sizes=True,
    lower=lambda _types, *, value: Pointwise(lambda _: expr.extent(value)),
    samples=(Sample((), {"value": 7}),),
)
