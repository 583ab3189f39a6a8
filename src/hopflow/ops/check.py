"""`check`: a condition that must hold, or the program stops with the user's message."""

from typing import Any, Final

import numpy as np

from hopflow import dtypes
from hopflow.bind import bind
from hopflow.errors import ArgumentTypeError, CheckError, DTypeError
from hopflow.graph.types import TensorType
from hopflow.loop_ir.kernels import Check, Effect, Operand
from hopflow.ops.opdef import OpDef, Sample, as_operand, strong_constant
from hopflow.ops.rules import Array

__all__ = ["Message", "check"]


class Message(str):
    """A text for people: graphs that differ only in it share one program."""

    __slots__ = ()

    @staticmethod
    def structural_key(_: "Message") -> str:
        return ""


def _infer(condition: TensorType, *, message: str) -> tuple[TensorType, ...]:  # noqa: ARG001
    if condition.dtype is not dtypes.bool_:
        raise DTypeError(
            f"check: `condition` must be of dtype bool, and is {condition}. Compare "
            "it: `hf.check(n != 0, ...)`."
        )
    return ()


def _run(condition: Array, *, message: str) -> tuple[()]:
    if not np.all(condition):
        raise CheckError(message)
    return ()


def _lower(_types: Any, condition: Operand, **_: Any) -> Effect:
    holds = Check("check", condition.type.shape, lambda at: condition[at])
    return Effect((holds,))


check_op: Final = OpDef(
    name="check",
    promote=None,
    infer=_infer,
    run=_run,
    lower=_lower,
    effects=frozenset({"trap"}),
    samples=(
        Sample(("bool[]",), {"message": Message("not so")}, (dtypes.bool_,), 1, 1),
    ),
)


def check(condition: Any, message: str) -> None:
    """Stop with a `CheckError` unless `condition` holds everywhere.

    Args:
        condition: A bool or a tensor of bools.
        message: What the error says.

    Raises:
        CheckError: it does not hold; when the program runs, also where it is compiled.
        DTypeError: `condition` is not bool.
    """
    if not isinstance(message, str):
        raise ArgumentTypeError(
            f"check: `message` must be a string, and is `{type(message).__name__}`."
        )
    bind(
        check_op,
        [strong_constant(as_operand("check", "condition", condition))],
        {"message": Message(message)},
    )
