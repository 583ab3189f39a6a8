"""The dtype rules of expressions: how many operands, and of which types."""

from typing import Final

import numpy as np

from hopflow import dtypes
from hopflow.dtypes import DType
from hopflow.loop_ir.expr import (
    BINARY,
    COMPARE,
    MATH,
    MATH_BINARY,
    UNARY,
    Expr,
)

# Which kinds of dtype an operation takes; the others take all.
_KINDS: Final[dict[str, str]] = (
    dict.fromkeys("neg abs div rem".split(), "iuf")
    | dict.fromkeys("sqrt floor ceil trunc rint isnan copysign fma".split(), "f")
    | dict.fromkeys("popcount clz shl lshr ashr".split(), "iu")
    | dict.fromkeys("not and or xor".split(), "iub")
    | dict.fromkeys(MATH, "f")
)
_NAMES: Final = {
    "iuf": "numbers",
    "f": "floats",
    "iu": "integers",
    "iub": "integers or bools",
}
_ARITY: Final[dict[str, int]] = (
    dict.fromkeys(UNARY, 1)
    | dict.fromkeys(BINARY | COMPARE, 2)
    | dict.fromkeys(MATH, 1)
    | dict.fromkeys(MATH_BINARY, 2)
    | {"fma": 3, "select": 3, "cast": 1, "bitcast": 1}
    | {"const": 0, "var": 0}
)


def fault_of(node: Expr) -> str | None:
    """Which rule `node` breaks, whose operands keep theirs; None if it keeps all."""
    op = node.op
    if op == "load":
        return _load(node)
    if op == "size":
        return f"the size `{node.attr}` is left over from before the schedule"
    if op not in _ARITY:
        return f"there is no operation `{op}`"
    if len(node.args) != _ARITY[op]:
        return f"`{op}` takes {_ARITY[op]} operands, and has {len(node.args)}"
    if op == "const":
        return _constant(node)
    if op == "var":
        same = node.attr.dtype is node.dtype
        return None if same else f"`{node.attr.name}` is {node.attr.dtype}"
    operands = [arg.dtype for arg in node.args]
    if op in ("cast", "bitcast"):
        return _conversion(op, operands[0], node.dtype)
    if op == "select":
        test, *operands = operands
        if test is not dtypes.bool_:
            return f"the test of `select` must be bool, and is {test}"
    if any(dtype is not operands[0] for dtype in operands):
        return f"the operands of `{op}` differ: {' and '.join(map(str, operands))}"
    kinds = _KINDS.get(op, "")
    if kinds and operands[0].kind not in kinds:
        return f"`{op}` takes {_NAMES[kinds]}, and not {operands[0]}"
    result = dtypes.bool_ if op in COMPARE or op == "isnan" else operands[0]
    if node.dtype is not result:
        return f"`{op}` of {operands[0]} gives {result}, and not {node.dtype}"
    return None


def _load(node: Expr) -> str | None:
    buffer = node.attr
    if len(node.args) != len(buffer.shape):
        return (
            f"`{buffer.name}` of {len(buffer.shape)} axes has {len(node.args)} indices"
        )
    for arg in node.args:
        if arg.dtype is not dtypes.int64:
            return f"an index of `{buffer.name}` must be i64, and is {arg.dtype}"
    if node.dtype is not buffer.dtype:
        return f"`{buffer.name}` is {buffer.dtype}, and is read as {node.dtype}"
    return None


def _constant(node: Expr) -> str | None:
    value, dtype = node.attr, node.dtype
    expected = {"b": bool, "f": float}.get(dtype.kind, int)
    if type(value) is not expected:
        return f"the constant {value!r} of {dtype} is no {expected.__name__}"
    if dtype.is_integer:
        fits = dtypes.iinfo(dtype).min <= value <= dtypes.iinfo(dtype).max
        return None if fits else f"the constant {value} does not fit in {dtype}"
    if dtype.is_float and value == value:
        with np.errstate(over="ignore"):
            rounded = float(np.float64(value).astype(dtype.dtype))
        return (
            None
            if rounded == value
            else f"the constant {value} is not rounded to {dtype}"
        )
    return None


def _conversion(op: str, source: DType, target: DType) -> str | None:
    if op == "cast":
        if target.kind == "b":
            return "a cast to bool is written as `!= 0`"
        return None
    if "b" in (source.kind, target.kind) or source.bits != target.bits:
        return f"`bitcast` of {source} to {target}: the widths must agree"
    return None
