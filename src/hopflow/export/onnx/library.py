"""The library `onnx`, which only this package uses, and only where it is called."""

import importlib
from functools import cache
from typing import Any, Final

from hopflow.dtypes import DType
from hopflow.errors import ExportError

OPSET: Final = 28
"""The operator set of the models: the newest that `onnx` releases and onnxruntime runs.
`BitCast` and `CumProd` are there since 26, shifts of signed integers since 28."""

DOMAIN: Final = "hopflow"
"""The domain of the functions that models bring with them."""

_ELEMENT_TYPES: Final = {
    "bool": "BOOL",
    "i8": "INT8",
    "i16": "INT16",
    "i32": "INT32",
    "i64": "INT64",
    "u8": "UINT8",
    "u16": "UINT16",
    "u32": "UINT32",
    "u64": "UINT64",
    "f16": "FLOAT16",
    "bf16": "BFLOAT16",
    "f32": "FLOAT",
    "f64": "DOUBLE",
}


@cache
def library() -> Any:
    """The module `onnx`.

    Raises:
        ExportError: it is not installed, or too old for `OPSET`.
    """
    try:
        onnx: Any = importlib.import_module("onnx")
    except ImportError as error:
        raise ExportError(
            "to_onnx: the library `onnx` is missing. Install it: "
            "`pip install 'hopflow[onnx]'`."
        ) from error
    if onnx.defs.onnx_opset_version() < OPSET:
        raise ExportError(
            f"to_onnx: `onnx` {onnx.__version__} knows operators up to version "
            f"{onnx.defs.onnx_opset_version()}, and models have those of {OPSET}. "
            "Install a newer one: `pip install -U 'hopflow[onnx]'`."
        )
    return onnx


def element_type(dtype: DType) -> int:
    """The number that ONNX has for a dtype; it has one for each of ours."""
    number: int = library().TensorProto.DataType.Value(_ELEMENT_TYPES[dtype.short])
    return number
