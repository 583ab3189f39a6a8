"""Batch rules: what an operation does for many examples at once.

A rule gets the operation, the number of examples, which operands are batched (one at
least is), the operands and the params. The examples of a batched operand lie along its
axis 0, before the axes that the operation knows of; those of each result do too, unless
it is the `Same` for all. The rules here serve whole families; an operation that needs
one of its own has it in its file.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from hopflow.bind import Operand, Value, bind
from hopflow.graph.types import Shape
from hopflow.ops.opdef import OPERATIONS, OpDef
from hopflow.symbolic.size import Size

BatchRule: TypeAlias = Callable[..., "Sequence[Value | Same]"]
"""(op, size, batched, *operands, **params) -> the results: batched, but for `Same`."""

Batched: TypeAlias = tuple[bool, ...]


class Same(NamedTuple):
    """A result of a rule that is the same for all examples, and not batched."""

    value: Value


def op_of(name: str, *operands: Operand, **params: Any) -> Value:
    """The result of an operation by its name: rules stand below most operations."""
    [result] = bind(OPERATIONS[name], operands, params)
    return result


def rank(operand: Operand, batched: bool) -> int:
    """How many axes an operand has in each example."""
    return operand.type.ndim - batched


def in_batch(size: Size, batched: bool, operand: Operand) -> Operand:
    """`operand` for each example, along axis 0."""
    if batched:
        return operand
    if not isinstance(operand, Value):
        return op_of("full", operand, shape=(size,))
    return op_of("broadcast_to", operand, shape=(size, *operand.shape))


def after_examples(operand: Operand, ndim: int) -> Operand:
    """A batched operand with axes of size 1 after axis 0, so that it has `ndim` ones
    and broadcasts from the right as each example does."""
    size, *rest = operand.type.shape
    missing = ndim - len(rest)
    if not missing:
        return operand
    return op_of("reshape", operand, shape=(size, *(1,) * missing, *rest))


# --- families -------------------------------------------------------------------------


def pointwise(
    op: OpDef, _size: Size, batched: Batched, /, *operands: Operand, **params: Any
) -> Sequence[Value]:
    """Of what broadcasts its operands."""
    ndim = max(map(rank, operands, batched))
    pairs = zip(operands, batched, strict=True)
    return bind(op, [after_examples(o, ndim) if b else o for o, b in pairs], params)


def per_example(**changes: Callable[[Size, Any], Any]) -> BatchRule:
    """Of what works on axes counted from the end, or on those that params name.

    Args:
        changes: By the param's name, what it is with one more axis in front.
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
"""Of what takes leading axes for a batch, or does the same at each element."""
