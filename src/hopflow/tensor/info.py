"""The array API's inspection functions."""

from typing import Any, Final

import numpy as np

from hopflow import dtypes
from hopflow.bind import Value
from hopflow.devices import DEVICES
from hopflow.dtypes import DType
from hopflow.errors import ArgumentTypeError
from hopflow.ops.opdef import as_operand, promoted_as
from hopflow.ops.rules import check_device, required_dtype
from hopflow.symbolic.boolean import SymBool
from hopflow.symbolic.size import SymFloat, SymInt

API_VERSION: Final = "2024.12"


def result_type(*arrays_and_dtypes: Any) -> DType:
    """Return the dtype that operands promote to.

    Args:
        arrays_and_dtypes: Tensors, arrays, dtypes and Python numbers. Numbers are weak:
            they take the dtype of any tensor of their kind.

    Raises:
        ArgumentTypeError: there are no arguments.
        DTypeError: an argument is no dtype.

    >>> hf.result_type(hf.ones(2, dtype=hf.float16), 1.0)
    hopflow.float16
    """
    if not arrays_and_dtypes:
        raise ArgumentTypeError("result_type: at least one argument is needed.")
    return dtypes.promote(*map(_dtype_of, arrays_and_dtypes))[0]


def _dtype_of(arg: Any) -> tuple[DType, bool]:
    if isinstance(arg, _OPERANDS):
        type_ = as_operand("result_type", 0, arg).type
        return promoted_as(type_)
    return required_dtype("result_type", arg, "arrays_and_dtypes"), False


_OPERANDS: Final = (
    *(Value, bool, int, float, np.ndarray, np.generic),
    *(SymInt, SymFloat, SymBool),
)


class NamespaceInfo:
    """The result of `hf.__array_namespace_info__()`."""

    def capabilities(self) -> dict[str, Any]:
        """Return which optional behaviour of the standard is supported.

        Jitted functions support it too: sizes that depend on data are symbols there.
        """
        return {
            "boolean indexing": True,
            "data-dependent shapes": True,
            "max dimensions": 64,  # NumPy's
        }

    def default_device(self) -> str:
        """Return the device of new tensors."""
        return DEVICES[0].name

    def devices(self) -> list[str]:
        """Return the names of all devices."""
        return [device.name for device in DEVICES]

    def default_dtypes(self, *, device: str | None = None) -> dict[str, DType]:
        """Return the dtypes of tensors made of Python numbers; no dtype is complex."""
        check_device("default_dtypes", device)
        return {
            "real floating": dtypes.DEFAULT_FLOAT,
            "integral": dtypes.DEFAULT_INT,
            "indexing": dtypes.DEFAULT_INT,
        }

    def dtypes(
        self, *, device: str | None = None, kind: str | tuple[str, ...] | None = None
    ) -> dict[str, DType]:
        """Return the standard's dtypes by name, or those of a kind (see `hf.isdtype`).

        float16 and bfloat16 are left out, as the standard does not have them.
        """
        check_device("dtypes", device)
        return {
            d.name: d
            for d in dtypes.ALL
            if not (d.is_float and d.bits == 16)
            and (kind is None or dtypes.isdtype(d, kind))
        }


def namespace_info() -> NamespaceInfo:
    """Return the devices, dtypes and capabilities of the namespace."""
    return NamespaceInfo()
