"""Data types, and their promotion lattice.

The names and the promotion of equal kinds are those of the Python array API standard
(2024.12). Promotions that it leaves undefined (integers with floats, float16 with
bfloat16, uint64 with signed integers) follow JAX's type promotion lattice
(https://docs.jax.dev/en/latest/type_promotion.html).
"""

from dataclasses import dataclass, field
from functools import cache
from typing import Any, Final, TypeAlias

import ml_dtypes
import numpy as np

from hopflow.errors import DTypeError

__all__ = [
    "ALL",
    "DType",
    "DTypeLike",
    "as_dtype",
    "can_cast",
    "finfo",
    "iinfo",
    "isdtype",
    "promote",
]


@dataclass(frozen=True, eq=False, slots=True)
class DType:
    """An element type. There is one object for each, so compare with `==` or `is`.

    It equals everything that names it as a dtype argument: `hf.float32 == np.float32`,
    `== np.dtype("float32")`, `== "float32"`. As with NumPy's dtypes, the hashes differ.
    """

    name: str  # "float32"
    short: str  # "f32", as types print it
    dtype: np.dtype[Any]  # lets NumPy take a DType wherever it takes a dtype
    kind: str  # "b" bool, "i" signed, "u" unsigned, "f" floating
    bits: int
    itemsize: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "itemsize", self.dtype.itemsize)

    def __eq__(self, other: object) -> bool:
        if self is other or type(other) is DType:
            return self is other
        if not isinstance(other, np.dtype | str | type):
            return NotImplemented
        try:
            return as_dtype(other) is self
        except DTypeError:
            return False

    __hash__ = object.__hash__

    def __repr__(self) -> str:
        return f"hopflow.{self.name}"

    def __str__(self) -> str:
        return self.short

    def __reduce__(self) -> tuple[Any, ...]:
        return as_dtype, (self.name,)

    @property
    def type(self) -> Any:
        """NumPy's scalar type, such as `np.float32`."""
        return self.dtype.type

    @property
    def is_float(self) -> bool:
        return self.kind == "f"

    @property
    def is_integer(self) -> bool:
        return self.kind in "iu"


def _declare(name: str, short: str, scalar: Any) -> DType:
    dtype = np.dtype(scalar)
    kind = "f" if name.endswith(("float16", "float32", "float64")) else dtype.kind
    return DType(name, short, dtype, kind, 1 if kind == "b" else dtype.itemsize * 8)


bool_: Final = _declare("bool", "bool", np.bool_)
int8: Final = _declare("int8", "i8", np.int8)
int16: Final = _declare("int16", "i16", np.int16)
int32: Final = _declare("int32", "i32", np.int32)
int64: Final = _declare("int64", "i64", np.int64)
uint8: Final = _declare("uint8", "u8", np.uint8)
uint16: Final = _declare("uint16", "u16", np.uint16)
uint32: Final = _declare("uint32", "u32", np.uint32)
uint64: Final = _declare("uint64", "u64", np.uint64)
float16: Final = _declare("float16", "f16", np.float16)
bfloat16: Final = _declare("bfloat16", "bf16", ml_dtypes.bfloat16)
float32: Final = _declare("float32", "f32", np.float32)
float64: Final = _declare("float64", "f64", np.float64)

SIGNED: Final = (int8, int16, int32, int64)
UNSIGNED: Final = (uint8, uint16, uint32, uint64)
INTEGERS: Final = SIGNED + UNSIGNED
FLOATS: Final = (float16, bfloat16, float32, float64)
ALL: Final = (bool_, *INTEGERS, *FLOATS)

DEFAULT_FLOAT: Final = float32
DEFAULT_INT: Final = int64

DTypeLike: TypeAlias = (
    Any  # a DType, a NumPy dtype or scalar type, a name, bool/int/float
)

_BY_NAME: Final = {d.name: d for d in ALL} | {d.short: d for d in ALL}
_BY_NUMPY: Final = {d.dtype: d for d in ALL}
_BY_PYTHON: Final[dict[type, DType]] = {
    bool: bool_,
    int: DEFAULT_INT,
    float: DEFAULT_FLOAT,
}


def as_dtype(value: DTypeLike) -> DType:
    """Return the `DType` that `value` names.

    Args:
        value: A `DType`, a NumPy dtype or scalar type, a name ("float32", "f32"), or
            one of `bool`, `int` and `float`, which give the default types.

    Raises:
        DTypeError: There is no such type, or it is complex, which is not supported.
    """
    if type(value) is DType:
        return value
    try:
        if isinstance(value, np.dtype):
            return _BY_NUMPY[value]
        if isinstance(value, str):
            return _BY_NAME[value]
        if not isinstance(value, type):
            raise KeyError
        if value in _BY_PYTHON:
            return _BY_PYTHON[value]
        return _BY_NUMPY[np.dtype(value)]
    except (KeyError, TypeError, ValueError):
        name = getattr(value, "__name__", None) or str(value)
        hint = (
            "Complex types are not supported: keep real and imaginary parts apart."
            if "complex" in name
            else f"The types are {', '.join(d.name for d in ALL)}."
        )
        raise DTypeError(f"`{name}` is not a hopflow dtype. {hint}") from None


# --- promotion ------------------------------------------------------------------------


# JAX's lattice, as edges from each type to the next larger ones. `i*` and `f*` are the
# weak Python int and float; uint64 joins int64 only at `f*`.
_EDGES: Final[dict[str, tuple[str, ...]]] = {
    "bool": ("i*",),
    "i*": ("u8", "i8"),
    "u8": ("i16", "u16"),
    "u16": ("i32", "u32"),
    "u32": ("i64", "u64"),
    "u64": ("f*",),
    "i8": ("i16",),
    "i16": ("i32",),
    "i32": ("i64",),
    "i64": ("f*",),
    "f*": ("bf16", "f16"),
    "bf16": ("f32",),
    "f16": ("f32",),
    "f32": ("f64",),
    "f64": (),
}


@cache
def _above(name: str) -> frozenset[str]:
    return frozenset({name}).union(*(_above(up) for up in _EDGES[name]))


@cache
def promote(*operands: tuple[DType, bool]) -> tuple[DType, bool]:
    """Return the common `(dtype, weak)` of operands, each a pair `(dtype, weak)`.

    A weak operand (a Python scalar, or a value computed from such scalars only) adopts
    the dtype of any strong operand of its kind or of a larger kind.
    """
    names = {
        "bool"
        if d.kind == "b"
        else f"{'f' if d.kind == 'f' else 'i'}*"
        if w
        else d.short
        for d, w in operands
    }
    bounds = frozenset.intersection(*(_above(n) for n in names))
    [least] = [n for n in bounds if bounds <= _above(n)]
    if not least.endswith("*"):
        return _BY_NAME[least], False
    # All operands are weak, or weak and bool (or u64 and signed). The widest weak dtype
    # of that kind wins: a weak value with an explicit dtype keeps that.
    weak = [d for d, w in operands if w and d.kind == least[0]]
    if weak:
        return max(weak, key=lambda d: d.bits), True
    return (DEFAULT_FLOAT if least == "f*" else DEFAULT_INT), True


_KINDS: Final[dict[str, tuple[DType, ...]]] = {
    "bool": (bool_,),
    "signed integer": SIGNED,
    "unsigned integer": UNSIGNED,
    "integral": INTEGERS,
    "real floating": FLOATS,
    "complex floating": (),
    "numeric": INTEGERS + FLOATS,
}


def isdtype(dtype: DTypeLike, kind: Any) -> bool:
    """Whether `dtype` is of `kind`: a dtype, the name of a kind, or a tuple of those.

    The names are those of the array API standard: "bool", "signed integer", "unsigned
    integer", "integral", "real floating", "complex floating", "numeric".

        >>> hf.isdtype(hf.int8, ("signed integer", "real floating"))
        True

    Raises:
        DTypeError: `kind` is none of these.
    """
    dtype = as_dtype(dtype)
    if isinstance(kind, tuple):
        return any(isdtype(dtype, k) for k in kind)
    if isinstance(kind, str) and kind in _KINDS:
        return dtype in _KINDS[kind]
    return dtype is as_dtype(kind)


def can_cast(from_: DTypeLike, to: DTypeLike) -> bool:
    """Whether promotion can convert `from_`, a dtype or a tensor, to the dtype `to`.

        >>> hf.can_cast(hf.int32, hf.int64), hf.can_cast(hf.float64, hf.float32)
        (True, False)

    Raises:
        DTypeError: an argument is no dtype.
    """
    if not isinstance(from_, DType):
        from_ = getattr(from_, "dtype", from_)
    source, target = as_dtype(from_), as_dtype(to)
    return promote((source, False), (target, False))[0] is target


@dataclass(frozen=True, slots=True)
class FInfo:
    """Machine limits of a floating type, as Python floats."""

    bits: int
    eps: float
    max: float
    min: float
    smallest_normal: float
    dtype: DType


@dataclass(frozen=True, slots=True)
class IInfo:
    """Machine limits of an integer type."""

    bits: int
    max: int
    min: int
    dtype: DType


def finfo(dtype: DTypeLike) -> FInfo:
    """Return the machine limits of a floating `dtype`, or of that of a tensor.

        >>> hf.finfo(hf.float16).max
        65504.0

    Raises:
        DTypeError: `dtype` is not floating.
    """
    dtype = as_dtype(getattr(dtype, "dtype", dtype))
    if not dtype.is_float:
        raise DTypeError(f"finfo: `dtype` must be floating, and is {dtype.name}.")
    info = ml_dtypes.finfo(dtype.dtype)
    return FInfo(
        bits=dtype.bits,
        eps=float(info.eps),
        max=float(info.max),
        min=float(info.min),
        smallest_normal=float(info.smallest_normal),
        dtype=dtype,
    )


def iinfo(dtype: DTypeLike) -> IInfo:
    """Return the machine limits of an integer `dtype`, or of that of a tensor.

        >>> hf.iinfo(hf.int8).min
        -128

    Raises:
        DTypeError: `dtype` is not an integer type.
    """
    dtype = as_dtype(getattr(dtype, "dtype", dtype))
    if not dtype.is_integer:
        raise DTypeError(
            f"iinfo: `dtype` must be an integer type, and is {dtype.name}."
        )
    return _integer_limits(dtype)


@cache
def _integer_limits(dtype: DType) -> IInfo:
    info = np.iinfo(dtype.dtype)
    return IInfo(dtype.bits, int(info.max), int(info.min), dtype)
