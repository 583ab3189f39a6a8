"""Evaluation of lowering rules, element by element with bounds checks.

It is slow and simple: the reference for lowering rules, without any schedule.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from hopflow.compiler.kernel_program.interpreter import KernelTrap, Machine
from hopflow.compiler.kernel_program.lowering import definition
from hopflow.compiler.kernel_program.program import Value
from hopflow.dtypes import DType, as_dtype
from hopflow.graph.types import TensorType
from hopflow.ops.opdef import OpDef, Sample
from hopflow.symbolic.size import Symbol

__all__ = ["ArrayOperand", "KernelTrap", "evaluate", "sample_arrays"]

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
Symbols: TypeAlias = Mapping[Symbol, int]


def sample_arrays(sample: Sample, dtype: DType, seed: int = 0) -> list[Array]:
    """Return operands for a sample of an operation, with `dtype` for its T."""
    rng = np.random.default_rng(seed)
    arrays = []
    for text in sample.operands:
        name, sizes = text.rstrip("]").split("[")
        shape = tuple(int(n) for n in sizes.split(",") if n.strip())
        chosen = dtype if name == "T" else as_dtype(name)
        if chosen.kind == "b":
            arrays.append(rng.random(shape) < 0.5)
            continue
        low = max(sample.low, 0.0) if chosen.kind == "u" else sample.low
        values = np.asarray(rng.uniform(low, sample.high, shape))
        values = values if chosen.is_float else np.rint(values)
        arrays.append(values.astype(chosen.dtype))
    return [np.asarray(a) for a in arrays]


class ArrayOperand(Value):
    """An array as an operand of lowering rules; its type may have symbolic sizes."""

    def __init__(self, array: Array, type_: TensorType | None = None) -> None:
        super().__init__("x", type_ or TensorType(as_dtype(array.dtype), array.shape))
        self.array = array


def evaluate(
    op: OpDef,
    operands: Sequence[Array | ArrayOperand],
    symbols: Symbols | None = None,
    **params: Any,
) -> list[Array]:
    """Evaluate `op` by its lowering rule, and return its results.

    Args:
        op: The operation.
        operands: Arrays; or `ArrayOperand`s, whose types may have symbolic sizes.
        symbols: The value of each symbol.
        params: The operation's static parameters.

    Raises:
        KernelTrap: a check of the lowered program does not hold.
    """
    inputs = [o if isinstance(o, ArrayOperand) else ArrayOperand(o) for o in operands]
    types = tuple(op.result_types([o.type for o in inputs], params))
    lowered: Any = op.lower(types, *inputs, **params)
    machine = Machine(symbols)
    for operand in inputs:
        machine.bind(operand, operand.array)
    has_kernel_per_result = isinstance(lowered, tuple)
    results: list[Array] = []
    with np.errstate(all="ignore"):
        for n, kernel in enumerate(lowered if has_kernel_per_result else (lowered,)):
            result_types = types[n : n + 1] if has_kernel_per_result else types
            results += machine.definition(
                definition(kernel, result_types), result_types
            )
    return results
