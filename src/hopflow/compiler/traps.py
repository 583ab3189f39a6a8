"""Traps of programs as the errors that the user sees."""

from collections.abc import Sequence
from typing import Final

from hopflow.dtypes import uint64
from hopflow.errors import (
    ArgumentRangeError,
    BoundsError,
    CheckError,
    DivisionError,
    HopflowError,
    IndexingError,
    LinalgError,
    LoopLimitError,
    PowerError,
)
from hopflow.graph.core import Node, Var, symbol_range
from hopflow.loop_ir.program import Site
from hopflow.ops.item import range_fault
from hopflow.ops.messages import check_error

_AS_EAGER: Final = {"dynamic_index": "index"}
"""The names of operations in eager errors, where they differ."""


def bounds_error(access: str, values: Sequence[int]) -> BoundsError:
    """Return the error for an access that `config.check_bounds` found wrong."""
    position, extent = values
    return BoundsError(
        f"{access}: position {position} of {extent} in compiled code. This is a defect "
        "of hopflow, not of your program: please report it with the program."
    )


def trap_error(site: Site, node: Node, values: Sequence[int]) -> HopflowError:
    """Return the error for a trap at `node`, with the stack of its trace.

    Args:
        values: The values that the trap reports.
    """
    error = _error(site, node, values)
    error.stack = node.line.stack if node.line is not None else ()
    return error


def _of_operand(node: Node, value: int) -> int:
    """Return a reported i64 as a value of the last operand, which has the indices."""
    last = node.args[-1] if node.args else None
    is_unsigned = isinstance(last, Var) and last.type.dtype is uint64
    return value % (1 << 64) if is_unsigned else value


def _error(site: Site, node: Node, values: Sequence[int]) -> HopflowError:
    name = node.op.name.removeprefix("checked_") if node.op is not None else node.kind
    name = _AS_EAGER.get(name, name)
    at = f" ({node.line})" if node.line else ""
    match site.kind:
        case "index":
            position, size = _of_operand(node, values[0]), values[1]
            return IndexingError(
                f"{name}{at}: index {position} is out of range for an axis of "
                f"size {size}."
            )
        case "divide":
            return DivisionError(
                f"{name}{at}: division of an integer by zero. Guard it with `hf.where` "
                "on the divisor, or with `hf.cond`."
            )
        case "power":
            return PowerError(f"{name}{at}", values[0])
        case "check":
            return check_error(node.params, at, values)
        case "range":
            text = f"`{node.symbol}`" if node.symbol else name
            allowed = symbol_range(node)
            value = _of_operand(node, values[0])
            return CheckError(range_fault(f"{text}{at}", value, allowed))
        case "size":
            text = (
                f"`{values[0]} {site.detail} {values[1]}`" if site.detail else "a float"
            )
            return ArgumentRangeError(
                f"a size{at} is computed from {text}, which int64 cannot hold. Promise "
                "a range of the numbers that it depends on, with `hf.check_is_size`."
            )
        case "limit":
            return LoopLimitError(
                f"{name}{at}: `max_steps` = {values[0]} steps were taken and the "
                "condition still holds. Raise `max_steps`, or check the condition."
            )
        case _:
            return LinalgError(
                f"{name}{at}: the library routine failed with status {values[0]}."
            )
