"""Which dtypes the operators of ONNX can be run with, and what to do for the others.

ONNX's type constraints allow less than our operations do, and onnxruntime has kernels
for fewer dtypes still. `KERNELS` is what onnxruntime's CPU provider was measured to run
(`tests/test_export_onnx.py` measures it again). Elsewhere a value travels in another
dtype, its carrier, in which the operator gives the same answer.
"""

from collections.abc import Mapping
from typing import Final, Literal, NamedTuple, TypeAlias

from hopflow import dtypes
from hopflow.dtypes import DType

Kind: TypeAlias = Literal["moves", "wraps", "orders"]
"""What a carrier must keep. "moves": all values. "wraps": those values modulo 2**bits,
for integer arithmetic, whose low bits depend on low bits only. "orders": values and
their order."""


class Operator(NamedTuple):
    """An operator of ONNX that is used with dtypes of ours.

    kernels  the dtypes that onnxruntime runs it with, as ONNX allows it
    kind     what a carrier must keep; None: other dtypes have none
    data     the positions of the inputs that have such a dtype; None: all inputs
    results  the dtype of each result; None: that of the data
    """

    kernels: frozenset[str]
    kind: Kind | None
    data: tuple[int, ...] | None
    results: tuple[DType | None, ...]


def _operator(
    kernels: str,
    kind: Kind | None = None,
    data: tuple[int, ...] | None = None,
    results: tuple[DType | None, ...] = (None,),
) -> Operator:
    return Operator(frozenset(kernels.split()), kind, data, results)


_INTEGERS: Final = "i8 i16 i32 i64 u8 u16 u32 u64"
_ALL: Final = f"bool {_INTEGERS} f16 bf16 f32 f64"
_NUMBERS: Final = f"{_INTEGERS} f16 f32 f64"
_SINGLE: Final = "f32"
_WIDE: Final = "f32 f64"
_FIRST: Final = (0,)
_BOOL: Final = (dtypes.bool_,)
_INT: Final = (dtypes.int64,)

# Left out are kernels whose answers differ from ours: of float16 that round otherwise
# than once, or treat NaN in their own way; of integers that compute in floats; products
# of unsigned matrices, which fail where the inner axis is empty.
KERNELS: Final[Mapping[str, Operator]] = {
    # arithmetic
    "Abs": _operator(_NUMBERS, "orders"),
    "Neg": _operator("i8 i16 i32 i64 f16 f32 f64", "wraps"),
    "Add": _operator(_NUMBERS, "wraps"),
    "Sub": _operator(_NUMBERS, "wraps"),
    "Mul": _operator(_NUMBERS, "wraps"),
    "Div": _operator(_NUMBERS, "orders"),
    "Mod": _operator(f"{_INTEGERS} f32 f64", "orders"),
    "Pow": _operator(_WIDE, "orders"),
    "Min": _operator("i8 i32 i64 u8 u32 u64 f32 f64", "orders"),
    "Max": _operator("i8 i32 i64 u8 u32 u64 f32 f64", "orders"),
    "Sign": _operator(f"{_INTEGERS} f32 f64", "orders"),
    # rounding
    "Floor": _operator(_WIDE, "orders"),
    "Ceil": _operator(_WIDE, "orders"),
    "Round": _operator(_WIDE, "orders"),
    # functions
    "Sqrt": _operator(_WIDE, "orders"),
    "Exp": _operator(_WIDE, "orders"),
    "Log": _operator(_WIDE, "orders"),
    "Sin": _operator(_WIDE, "orders"),
    "Cos": _operator(_WIDE, "orders"),
    "Tanh": _operator(_WIDE, "orders"),
    "Tan": _operator(_SINGLE),
    "Asin": _operator(_SINGLE),
    "Acos": _operator(_SINGLE),
    "Atan": _operator(_SINGLE),
    "Sinh": _operator(_SINGLE),
    "Cosh": _operator(_SINGLE),
    "Asinh": _operator(_SINGLE),
    "Acosh": _operator(_SINGLE),
    "Atanh": _operator(_SINGLE),
    "Erf": _operator(_SINGLE),
    # bits
    "BitwiseNot": _operator(_INTEGERS),
    "BitwiseAnd": _operator(_INTEGERS),
    "BitwiseOr": _operator(_INTEGERS),
    "BitwiseXor": _operator(_INTEGERS),
    "BitShift": _operator(_INTEGERS),
    # logic and comparison
    "Not": _operator("bool"),
    "And": _operator("bool"),
    "Or": _operator("bool"),
    "Xor": _operator("bool"),
    "Equal": _operator(f"bool {_NUMBERS}", "orders", results=_BOOL),
    "Less": _operator(_NUMBERS, "orders", results=_BOOL),
    "LessOrEqual": _operator(_NUMBERS, "orders", results=_BOOL),
    "Greater": _operator(_NUMBERS, "orders", results=_BOOL),
    "GreaterOrEqual": _operator(_NUMBERS, "orders", results=_BOOL),
    "IsNaN": _operator("f16 bf16 f32 f64", results=_BOOL),
    "Where": _operator("i8 i32 i64 u8 u32 f16 f32 f64", "moves", (1, 2)),
    # reductions and running totals
    "ReduceSum": _operator(_WIDE, "wraps", _FIRST),
    "ReduceProd": _operator(_WIDE, "wraps", _FIRST),
    "ReduceMax": _operator("i8 i32 i64 u8 f32 f64", "orders", _FIRST),
    "ReduceMin": _operator("i8 i32 i64 u8 f32 f64", "orders", _FIRST),
    "CumSum": _operator("i32 i64 f32 f64", "wraps", _FIRST),
    "CumProd": _operator("i32 i64 u32 u64 f32 f64", "wraps", _FIRST),
    "MatMul": _operator("i32 i64 f32 f64", "wraps"),
    "Conv": _operator("f32"),
    "TopK": _operator("i8 i32 i64 u8 f32 f64", "orders", _FIRST, (None, dtypes.int64)),
    # movement
    "Identity": _operator(_ALL, "moves"),
    "Reshape": _operator(_ALL, "moves", _FIRST),
    "Transpose": _operator(_ALL, "moves"),
    "Unsqueeze": _operator(_ALL, "moves", _FIRST),
    "Squeeze": _operator(_ALL, "moves", _FIRST),
    "Expand": _operator(f"bool {_NUMBERS}", "moves", _FIRST),
    "Slice": _operator(_ALL, "moves", _FIRST),
    "Concat": _operator(_ALL, "moves"),
    "Pad": _operator("bool i8 i32 i64 u8 u32 u64 f16 bf16 f32 f64", "moves", (0, 2)),
    "Gather": _operator(_ALL, "moves", _FIRST),
    "GatherElements": _operator(_ALL, "moves", _FIRST),
    "GatherND": _operator(_ALL, "moves", _FIRST),
    "ScatterElements": _operator(_ALL, "moves", (0, 2)),
    "NonZero": _operator("bool i32 i64 u8 f16 f32", results=_INT),
    "Range": _operator("i16 i32 i64 f32 f64"),
    "Shape": _operator(_ALL, results=_INT),
    "Cast": _operator(_ALL),
    "BitCast": _operator("i8 i16 i32 i64 u8 u16 u32 u64 f16 bf16 f32 f64"),
}

_CARRIERS: Final[dict[str, tuple[DType, ...]]] = {
    "bool": (dtypes.uint8, dtypes.int32),
    "i8": (dtypes.int32, dtypes.int64),
    "i16": (dtypes.int32, dtypes.int64),
    "i32": (dtypes.int64,),
    "u8": (dtypes.int32, dtypes.int64),
    "u16": (dtypes.int32, dtypes.int64),
    "u32": (dtypes.int64,),
    "u64": (dtypes.int64,),
    "f16": (dtypes.float32,),
    "bf16": (dtypes.float32,),
}


class Carrier(NamedTuple):
    """The dtype in which an operator is run for values of another one.

    biased  whether the order of u64 is made that of i64, by turning the sign bit
    """

    dtype: DType
    biased: bool = False


def has_kernel(operator: str, dtype: DType) -> bool:
    """Whether onnxruntime runs an operator of ONNX with a dtype."""
    return dtype.short in KERNELS[operator].kernels


def carrier(operator: str, dtype: DType) -> Carrier | None:
    """The dtype in which an operator gives the answer for `dtype`: itself where there
    is a kernel; None: in none."""
    if has_kernel(operator, dtype):
        return Carrier(dtype)
    kind = KERNELS[operator].kind
    if kind is None:
        return None
    for wide in _CARRIERS.get(dtype.short, ()):
        if has_kernel(operator, wide):
            return Carrier(wide, kind == "orders" and dtype is dtypes.uint64)
    return None
