"""The rules for a single node or call: how many operands it has, and of what types.

Each function returns which rule is broken, or None.
"""

from collections.abc import Sequence
from math import prod
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
    index_of,
)
from hopflow.loop_ir.program import Call, Ref
from hopflow.loop_ir.routines import NUMBERS, ROUTINES, Array, Routine
from hopflow.loop_ir.walk import same_shape

# The kinds of dtype that an operation takes; the others take all.
_KINDS: Final[dict[str, str]] = (
    dict.fromkeys("neg abs div rem".split(), "iuf")
    | dict.fromkeys("sqrt floor ceil trunc rint isnan copysign fma".split(), "f")
    | dict.fromkeys("popcount clz shl lshr ashr".split(), "iu")
    | dict.fromkeys("not and or xor".split(), "iub")
    | dict.fromkeys("add_overflows mul_overflows".split(), "i")
    | dict.fromkeys(MATH, "f")
    | {"ipow": "iu"}
)
_NAMES: Final = {
    "iuf": "numbers",
    "f": "floats",
    "iu": "integers",
    "iub": "integers or bools",
    "i": "signed integers",
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
    """Return the rule that a node breaks, whose operands obey the rules."""
    op = node.op
    if op in ("load", "element"):
        return _read(node)
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


# --- leaves and conversions -----------------------------------------------------------


def _read(node: Expr) -> str | None:
    """Check the read of a buffer, or of a value before the schedule."""
    buffer, at = node.attr, index_of(node)
    if len(at) != len(buffer.shape):
        return f"`{buffer.name}` of {len(buffer.shape)} axes has {len(at)} indices"
    for arg in at:
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


# --- calls ----------------------------------------------------------------------------


_TAKES: Final = {
    "f": (dtypes.float32, dtypes.float64),
    "n": NUMBERS,
    "i32": (dtypes.int32,),
    "i64": (dtypes.int64,),
    "any": dtypes.ALL,
}


def call_fault(s: Call) -> str | None:
    """Return the rule that a call breaks, apart from those of its scope."""
    if s.routine not in ROUTINES:
        return f"there is no routine `{s.routine}`"
    routine = ROUTINES[s.routine]
    arrays, numbers = len(routine.arrays), len(routine.scalars) + len(routine.flags)
    refs = [a for a in s.args[:arrays] if isinstance(a, Ref)]
    scalars = [a for a in s.args[arrays:] if not isinstance(a, Ref)]
    if (len(refs), len(scalars)) != (arrays, len(s.args) - arrays) or (
        len(scalars) != numbers
    ):
        return f"`{s.routine}` takes {arrays} arrays, then {numbers} scalars"
    return (
        _scalars(routine, scalars)
        or next(filter(None, map(_array, routine.arrays, refs)), None)
        or _aliasing(routine, refs)
        or _extents(routine, refs, scalars)
    )


def _scalars(routine: Routine, scalars: Sequence[Expr]) -> str | None:
    count = len(routine.scalars)
    for name, value in zip(routine.scalars, scalars, strict=False):
        if value.dtype is not dtypes.int64:
            return f"`{name}` must be i64, and is {value.dtype}"
    for name, flag in zip(routine.flags, scalars[count:], strict=True):
        if flag.dtype is not dtypes.bool_ or not flag.is_const:
            return f"`{name}` must be a bool constant"
    return None


def ref_fault(ref: Ref) -> str | None:
    """Return the rule that the indices of a sub-array break."""
    name, axes = ref.buffer.name, len(ref.buffer.shape)
    if len(ref.at) > axes:
        return f"`{name}` of {axes} axes has {len(ref.at)} indices"
    if ref.rows is not None and not ref.at:
        return f"rows of `{name}` begin at no index"
    for i in ref.expressions:
        if i.dtype is not dtypes.int64:
            return f"an index of `{name}` must be i64, and is {i.dtype}"
    return None


def _array(array: Array, ref: Ref) -> str | None:
    """Check that `ref` can be passed as `array`."""
    name, buffer = array.name, ref.buffer
    fault = ref_fault(ref)
    if fault is not None:
        return fault
    if buffer.strides is not None:
        return f"`{name}` must be dense, and `{buffer.name}` is not"
    if buffer.dtype not in _TAKES[array.dtype]:
        takes = " or ".join(map(str, _TAKES[array.dtype]))
        return f"`{name}` must be {takes}, and `{buffer.name}` is {buffer.dtype}"
    return None


def _aliasing(routine: Routine, refs: Sequence[Ref]) -> str | None:
    """Check that numbers have one dtype, and that no written array is passed twice."""
    given = {
        ref.buffer.dtype
        for array, ref in zip(routine.arrays, refs, strict=True)
        if array.dtype in ("f", "n")
    }
    if len(given) > 1:
        return f"the arrays of `{routine.name}` must be of one dtype"
    for i in routine.writes:
        for j, other in enumerate(refs):
            is_same = refs[i].buffer is other.buffer and same_shape(
                refs[i].expressions, other.expressions
            )
            if i != j and is_same:
                return f"`{other.buffer.name}` is written, and passed twice"
    return None


def _extents(
    routine: Routine, refs: Sequence[Ref], scalars: Sequence[Expr]
) -> str | None:
    """Check the number of elements of sub-arrays, if the sizes are constant."""
    sizes = scalars[: len(routine.scalars)]
    if not all(size.is_const for size in sizes):
        return None
    shapes = routine.shapes([size.attr for size in sizes])
    for array, ref, shape in zip(routine.arrays, refs, shapes, strict=True):
        extents = ref.shape
        if all(extent.is_const for extent in extents):
            actual = [extent.attr for extent in extents]
            if prod(actual) != prod(shape):
                return (
                    f"`{array.name}` must be {list(shape)}, and `{ref.buffer.name}` "
                    f"gives {actual}"
                )
    return None
