"""`check`: a condition that must hold, or the program stops with the user's message."""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from hopflow import dtypes
from hopflow.bind import Value, bind, current
from hopflow.errors import (
    ArgumentTypeError,
    CheckError,
    DTypeError,
    HopflowError,
    LoopLimitError,
)
from hopflow.graph.types import TensorType
from hopflow.loop_ir.kernels import Check, Effect, Operand
from hopflow.ops import batching
from hopflow.ops.opdef import OpDef, Sample, as_operand, strong_constant
from hopflow.ops.rules import Array, as_integer
from hopflow.symbolic.boolean import SymBool
from hopflow.symbolic.size import SymInt

__all__ = ["Message", "check", "check_error", "check_is_size", "check_op"]


class Message(str):
    """A text for people: graphs that differ only in it share one program."""

    __slots__ = ()

    @staticmethod
    def structural_key(_: "Message") -> str:
        return ""


def _infer(condition: TensorType, **_: Any) -> tuple[TensorType, ...]:
    if condition.dtype is not dtypes.bool_:
        raise DTypeError(
            f"check: `condition` must be of dtype bool, and is {condition}. Compare "
            "it: `hf.check(n != 0, ...)`."
        )
    return ()


def _run(condition: Array, **params: Any) -> tuple[()]:
    if not np.all(condition):
        raise check_error(params)
    return ()


def check_error(params: Mapping[str, Any], at: str = "") -> HopflowError:
    """What a node of these params stops with: `limit` makes it the end of a loop."""
    error = LoopLimitError if params.get("limit") else CheckError
    return error(f"{params.get('message', 'check failed')}{at}")


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
    batch=batching.along,
    samples=(
        Sample(("bool[]",), {"message": Message("not so")}, (dtypes.bool_,), 1, 1),
    ),
)


def check(condition: Any, message: str) -> None:
    """Stop with a `CheckError` unless `condition` holds everywhere.

    A condition on numbers of a trace (sizes, `item`) is taken for true from here on.

    Args:
        condition: A bool, a tensor of bools, or a comparison of symbolic numbers.
        message: What the error says.

    Raises:
        CheckError: it does not hold; when the program runs, also where it is compiled.
        DTypeError: `condition` is not bool.
    """
    if not isinstance(message, str):
        raise ArgumentTypeError(
            f"check: `message` must be a string, and is `{type(message).__name__}`."
        )
    if isinstance(condition, SymBool):
        current().expect(condition, message)
        return
    bind(
        check_op,
        [strong_constant(as_operand("check", "condition", condition))],
        {"message": Message(message)},
    )


def check_is_size(n: Any, *, min: int = 0, max: int | None = None) -> None:
    """Promise that an integer is a size; stop with a `CheckError` if it is none.

    Args:
        n: An int, an integer tensor of no axes, or a symbolic number such as
            `x.item()`, which is taken for a size from here on.
        min, max: The range it is promised to be in, ends included.

    Raises:
        CheckError: it is not; when the program runs, also where it is compiled.
        ArgumentTypeError: `n` is no integer.
    """
    if isinstance(n, Value):
        n = current().symbol_of(n)
    if not isinstance(n, SymInt):
        n = as_integer("check_is_size", "n", n)
    least = as_integer("check_is_size", "min", min)
    conditions: list[bool | SymBool] = [n >= least]
    if max is not None:
        conditions.append(n <= as_integer("check_is_size", "max", max))
    end = "" if max is None else f" to {max}"
    for condition in conditions:
        check(condition, f"check_is_size: `n` must be a size from {least}{end}")
