"""Application of an operation's rules: tangents of its results from those of its
operands, and cotangents of its operands from those of its results."""

from collections.abc import Callable, Sequence
from typing import Any

from hopflow.bind import Operand, Value, bind
from hopflow.errors import DerivativeError
from hopflow.graph.core import Constant
from hopflow.graph.types import TensorType
from hopflow.ops.opdef import OpDef
from hopflow.zeros import (
    Tangent,
    Unknown,
    Zero,
    added,
    fitted,
    instantiate,
    is_zero,
    unbroadcast,
)


def is_differentiable(type_: TensorType) -> bool:
    """Whether values of this type have tangents: those of float dtypes do."""
    return type_.dtype.is_float


def apply_jvp(
    op: OpDef,
    operands: Sequence[Operand],
    tangents: Sequence[Tangent],
    results: Sequence[Value],
    params: dict[str, Any],
) -> list[Tangent]:
    """Return the tangents of an operation's results from those of its operands.

    Raises:
        DerivativeError: the operation has no derivative.
    """
    zeros: list[Tangent] = [Zero(r.type) for r in results]
    if all(map(is_zero, tangents)) or not any(
        is_differentiable(r.type) for r in results
    ):
        return zeros
    if op.jvp is None and op.unview is None:
        raise DerivativeError(
            f"{op.name}: this operation has no derivative. Keep it out of what is "
            "differentiated with `hf.stop_gradient`."
        )
    rules = "linear" if op.jvp is None else op.jvp  # a view of the tangent
    if rules == "linear":
        return list(bind(op, list(map(_tangent, operands, tangents)), params))
    values = _unwrapped(op, operands)
    if callable(rules):
        out_tangents = rules(tangents, tuple(results), *values, **params)
    else:
        [result] = results
        out_tangents = [_summed(rules, tangents, result, values, params)]
    return [
        fitted(t, r.type) if is_differentiable(r.type) else Zero(r.type)
        for t, r in zip(out_tangents, results, strict=True)
    ]


def _unwrapped(op: OpDef, operands: Sequence[Any]) -> list[Any]:
    """Return the operands with constants as Python numbers, as rules take them."""
    if op.promote is None:
        return list(operands)
    return [o.value if isinstance(o, Constant) else o for o in operands]


def _tangent(operand: Operand, tangent: Tangent) -> Operand:
    """Return an operand's tangent; an operand that is no float stays itself."""
    return instantiate(tangent) if is_differentiable(operand.type) else operand


def _summed(
    partials: Sequence[Callable[..., Any] | None],
    tangents: Sequence[Tangent],
    result: Value,
    operands: Sequence[Any],
    params: dict[str, Any],
) -> Tangent:
    """Return the sum of the partial derivatives, each applied to its tangent."""
    total: Tangent = Zero(result.type)
    for partial, tangent in zip(partials, tangents, strict=True):
        if partial is not None and not isinstance(tangent, Zero):
            part = partial(tangent, result, *operands, **params)
            total = added(fitted(total, result.type), fitted(part, result.type))
    return total


def apply_transpose(
    op: OpDef,
    cotangents: Sequence[Tangent],
    operands: Sequence[Operand | Unknown],
    params: dict[str, Any],
) -> list[Tangent | None]:
    """Return the cotangents of the operands that are `Unknown`, in which the operation
    is linear; None for the others.

    Raises:
        DerivativeError: the operation is not linear in them.
    """
    is_linear = [isinstance(o, Unknown) for o in operands]
    try:
        parts = _transposed(op, cotangents, operands, params)
    except TypeError as error:
        if sum(is_linear) > 1:  # the rule reads a linear operand
            raise _not_linear(op) from error
        raise
    in_cotangents: list[Tangent | None] = []
    for operand, linear, part in zip(operands, is_linear, parts, strict=True):
        if linear and part is None:
            raise _not_linear(op)
        in_cotangents.append(unbroadcast(part, operand.type) if linear else None)
    return in_cotangents


def _not_linear(op: OpDef) -> DerivativeError:
    return DerivativeError(
        f"{op.name}: a derivative that is not linear in the tangents has no transpose. "
        "Let the rule (of `custom_jvp`, or `jvp` of a class) multiply no tangent by "
        "another, nor apply other functions to it."
    )


def _transposed(
    op: OpDef,
    cotangents: Sequence[Tangent],
    operands: Sequence[Operand | Unknown],
    params: dict[str, Any],
) -> Sequence[Any]:
    """Return what the transpose rules give for each operand, or None."""
    values = _unwrapped(op, operands)
    if op.transpose is None and op.unview is not None:  # scatter into zeros
        [cotangent, *_], [_, *rest] = cotangents, values
        base = instantiate(Zero(operands[0].type))
        written = op.unview(base, instantiate(cotangent), *rest, **params)
        return [written, *[None] * len(rest)]
    if op.transpose is None:
        raise _not_linear(op)
    if not isinstance(op.transpose, tuple):
        assert callable(op.transpose)
        parts = op.transpose(cotangents, *values, **params)
        pairs = zip(parts, operands, strict=True)
        return [Zero(o.type) if part is None else part for part, o in pairs]
    [cotangent] = cotangents
    return [
        rule(cotangent, *values, **params)
        if rule is not None and isinstance(operand, Unknown)
        else None
        for rule, operand in zip(op.transpose, operands, strict=True)
    ]
