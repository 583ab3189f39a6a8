"""The LLVM types and constants of dtypes.

float16 and bfloat16 live in registers as `float` values that the narrow type can
represent exactly: every operation computes in `float` and rounds. A bool is `i1` in a
register and a byte in memory. bfloat16 is plain bits (`i16`) in memory, since LLVM
rounds its own type by instructions that flush subnormal numbers.
"""

import struct
from functools import cache
from typing import Final

from hopflow import dtypes
from hopflow.dtypes import DType

NARROW_FLOATS: Final = frozenset({dtypes.float16, dtypes.bfloat16})
_MEMORY: Final = {dtypes.float16: "half", dtypes.bfloat16: "i16", dtypes.bool_: "i8"}
_SUFFIX: Final = {"double": "f64", "float": "f32", "half": "f16"}


@cache
def register_type(dtype: DType, width: int = 1) -> str:
    """Return the type of a value in registers: a scalar, or `width` lanes."""
    if dtype.kind == "f":
        scalar = "double" if dtype is dtypes.float64 else "float"
    else:
        scalar = f"i{dtype.bits}"
    return lanes(scalar, width)


@cache
def memory_type(dtype: DType, width: int = 1) -> str:
    """Return the type of a value in memory."""
    return lanes(_MEMORY.get(dtype) or register_type(dtype), width)


def lanes(scalar: str, width: int) -> str:
    """Return `scalar` itself, or the type of vectors of `width` scalars."""
    return scalar if width == 1 else f"<{width} x {scalar}>"


def overload(scalar: str, width: int = 1) -> str:
    """Return the suffix of an intrinsic's name for a type, for example ".v8f64"."""
    short = _SUFFIX.get(scalar, scalar)
    return f".{short}" if width == 1 else f".v{width}{short}"


def literal(value: bool | int | float, dtype: DType) -> str:
    """Return a scalar constant; floats are written as their bits."""
    if dtype.kind == "f":
        return f"0x{struct.pack('>d', value).hex()}"
    if dtype.kind == "b":
        return "true" if value else "false"
    return str(value)


def constant(value: bool | int | float, dtype: DType, width: int = 1) -> str:
    """Return a constant that has the same value in every lane."""
    return splat(register_type(dtype), literal(value, dtype), width)


def splat(scalar: str, text: str, width: int) -> str:
    """Return the scalar constant `text` of type `scalar` in every lane."""
    return text if width == 1 else f"splat ({scalar} {text})"
