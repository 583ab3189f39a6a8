"""Batch rules: how an operation is applied to all elements of a batch at once.

A rule takes the operation, the batch size, which operands are batched (at least one
is), the operands and the params. The batch is axis 0 of a batched operand, before the
axes that the operation knows of, and of each result, unless it is `Same` for all. The
rules here serve whole families; other operations have rules in their own files.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from hopflow.bind import Operand, Value, bind
from hopflow.graph.types import Shape
from hopflow.ops.opdef import OPERATIONS, OpDef
from hopflow.symbolic.size import Size

BatchRule: TypeAlias = Callable[..., "Sequence[Value | Same]"]
"""(op, size, batched, *operands, **params) -> the results, batched unless `Same`."""

Batched: TypeAlias = tuple[bool, ...]


class Same(NamedTuple):
    """An unbatched result of a rule, the same for all batch elements."""

    value: Value


def op_of(name: str, *operands: Operand, **params: Any) -> Value:
    """Return the result of an operation by name, as rules are below most operations."""
    [result] = bind(OPERATIONS[name], operands, params)
    return result


def rank(operand: Operand, batched: bool) -> int:
    """Return the number of axes of an operand in each batch element."""
    return operand.type.ndim - batched


def in_batch(size: Size, batched: bool, operand: Operand) -> Operand:
    """Return `operand` batched along axis 0."""
    if batched:
        return operand
    if not isinstance(operand, Value):
        return op_of("full", operand, shape=(size,))
    return op_of("broadcast_to", operand, shape=(size, *operand.shape))


def after_examples(operand: Operand, ndim: int) -> Operand:
    """Return a batched operand with axes of size 1 inserted after axis 0, so that it
    has `ndim` others and broadcasts from the right as each batch element does."""
    size, *rest = operand.type.shape
    missing = ndim - len(rest)
    if not missing:
        return operand
    return op_of("reshape", operand, shape=(size, *(1,) * missing, *rest))


# --- families -------------------------------------------------------------------------


def pointwise(
    op: OpDef, _size: Size, batched: Batched, /, *operands: Operand, **params: Any
) -> Sequence[Value]:
    """Batch an operation that broadcasts its operands."""
    ndim = max(map(rank, operands, batched))
    pairs = zip(operands, batched, strict=True)
    return bind(op, [after_examples(o, ndim) if b else o for o, b in pairs], params)


def per_example(**changes: Callable[[Size, Any], Any]) -> BatchRule:
    """Return the rule of an operation whose axes count from the end or are params.

    Args:
        changes: For each such param, its value after an axis is inserted in front.
    """

    def rule(
        op: OpDef, size: Size, batched: Batched, /, *operands: Operand, **params: Any
    ) -> Sequence[Value]:
        args = [in_batch(size, b, o) for b, o in zip(batched, operands, strict=True)]
        changed = {k: f(size, params[k]) for k, f in changes.items()}
        return bind(op, args, {**params, **changed})

    return rule


def of_shape(size: Size, shape: Shape) -> Shape:
    return (size, *shape)


def of_starts(_size: Size, starts: Shape) -> Shape:
    return (0, *starts)


def of_steps(_size: Size, steps: tuple[int, ...]) -> tuple[int, ...]:
    return (1, *steps)


def of_axis(_size: Size, axis: int) -> int:
    return axis + 1


def of_axes(_size: Size, axes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple([axis + 1 for axis in axes])


def of_order(_size: Size, axes: tuple[int, ...]) -> tuple[int, ...]:
    return (0, *(axis + 1 for axis in axes))


along: Final = per_example()
"""The rule of operations whose leading axes are a batch, or that are elementwise."""
