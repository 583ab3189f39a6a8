"""What is asked of an operation's record: tangents of its results, and cotangents of
its operands."""

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
    return type_.dtype.is_float


def tangents(
    op: OpDef,
    operands: Sequence[Operand],
    given: Sequence[Tangent],
    results: Sequence[Value],
    params: dict[str, Any],
) -> list[Tangent]:
    """The tangents of an operation's results from those of its operands.

    Raises:
        DerivativeError: it has none.
    """
    zeros: list[Tangent] = [Zero(r.type) for r in results]
    if all(map(is_zero, given)) or not any(is_differentiable(r.type) for r in results):
        return zeros
    if op.jvp is None and op.unview is None:
        raise DerivativeError(
            f"{op.name}: this operation has no derivative. Keep it out of what is "
            "differentiated with `hf.stop_gradient`."
        )
    rules = "linear" if op.jvp is None else op.jvp  # a view is a view of the tangent
    if rules == "linear":
        return list(bind(op, list(map(_tangent, operands, given)), params))
    plain = _plain(op, operands)
    if callable(rules):
        found = rules(given, tuple(results), *plain, **params)
    else:
        [result] = results
        found = [_summed(rules, given, result, plain, params)]
    return [
        fitted(t, r.type) if is_differentiable(r.type) else Zero(r.type)
        for t, r in zip(found, results, strict=True)
    ]


def _plain(op: OpDef, operands: Sequence[Any]) -> list[Any]:
    if op.promote is None:
        return list(operands)
    return [o.value if isinstance(o, Constant) else o for o in operands]


def _tangent(operand: Operand, given: Tangent) -> Operand:
    """An operand's tangent; what has none stays."""
    return instantiate(given) if is_differentiable(operand.type) else operand


def _summed(
    partials: Sequence[Callable[..., Any] | None],
    given: Sequence[Tangent],
    result: Value,
    operands: Sequence[Any],
    params: dict[str, Any],
) -> Tangent:
    total: Tangent = Zero(result.type)
    for partial, tangent in zip(partials, given, strict=True):
        if partial is not None and not isinstance(tangent, Zero):
            part = partial(tangent, result, *operands, **params)
            total = added(fitted(total, result.type), fitted(part, result.type))
    return total


def cotangents(
    op: OpDef,
    given: Sequence[Tangent],
    operands: Sequence[Operand | Unknown],
    params: dict[str, Any],
) -> list[Tangent | None]:
    """The cotangents of the operands that are `Unknown`, in which the operation is
    linear; None for the others.

    Raises:
        DerivativeError: it is not linear in them.
    """
    wanted = [isinstance(o, Unknown) for o in operands]
    try:
        parts = _transposed(op, given, operands, params)
    except TypeError as error:
        if sum(wanted) > 1:  # a rule that reads another operand
            raise _not_linear(op) from error
        raise
    result: list[Tangent | None] = []
    for operand, want, part in zip(operands, wanted, parts, strict=True):
        if want and part is None:
            raise _not_linear(op)
        result.append(unbroadcast(part, operand.type) if want else None)
    return result


def _not_linear(op: OpDef) -> DerivativeError:
    return DerivativeError(
        f"{op.name}: a derivative that is not linear in the tangents has no transpose. "
        "Let the rule (of `custom_jvp`, or `jvp` of a class) multiply no tangent by "
        "another, nor apply other functions to it."
    )


def _transposed(
    op: OpDef,
    given: Sequence[Tangent],
    operands: Sequence[Operand | Unknown],
    params: dict[str, Any],
) -> Sequence[Any]:
    """What the rules give for each operand; None: nothing."""
    plain = _plain(op, operands)
    if op.transpose is None and op.unview is not None:  # written into zeros
        [cotangent, *_], [_, *rest] = given, plain
        base = instantiate(Zero(operands[0].type))
        written = op.unview(base, instantiate(cotangent), *rest, **params)
        return [written, *[None] * len(rest)]
    if op.transpose is None:
        raise _not_linear(op)
    if not isinstance(op.transpose, tuple):
        assert callable(op.transpose)
        found = op.transpose(given, *plain, **params)
        pairs = zip(found, operands, strict=True)
        return [Zero(o.type) if part is None else part for part, o in pairs]
    [cotangent] = given
    return [
        rule(cotangent, *plain, **params)
        if rule is not None and isinstance(operand, Unknown)
        else None
        for rule, operand in zip(op.transpose, operands, strict=True)
    ]
