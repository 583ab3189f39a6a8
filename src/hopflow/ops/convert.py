"""Conversion between dtypes, and copies."""

from typing import Any, Final

import numpy as np

from hopflow import dtypes, pytree
from hopflow.bind import Operand, Value, bind
from hopflow.dtypes import DType, DTypeLike
from hopflow.graph.core import Constant
from hopflow.graph.types import TensorType
from hopflow.loop_ir import expr
from hopflow.loop_ir.kernels import Pointwise
from hopflow.ops import batching
from hopflow.ops.opdef import OpDef, Reference, Sample, as_operand, convert_to
from hopflow.ops.rules import (
    Array,
    as_flag,
    broadcast,
    check_device,
    pointwise,
    required_dtype,
)
from hopflow.symbolic.size import SymInt


def apply(op: OpDef, *operands: Operand, **params: Any) -> Value:
    """Return the only result of `op` on operands whose dtypes are already promoted."""
    [result] = bind(op, operands, params)
    return result


def _convert_infer(
    operand: TensorType, *, dtype: DType, weak: bool | None = None
) -> TensorType:
    return TensorType(dtype, operand.shape, operand.weak if weak is None else weak)


def _convert_run(x: Array, *, dtype: DType, **_: Any) -> Array:
    """The elements in another dtype.

    Floats round to nearest even. Floats converted to integers are truncated and
    saturate, and NaN becomes 0; integers wrap; anything but 0 is True.
    """
    source = dtypes.as_dtype(x.dtype)
    with np.errstate(all="ignore"):
        if not (source.is_float and dtype.is_integer):
            return np.asarray(x.astype(dtype.dtype))
        wide = x.astype(np.float64)
        info = dtypes.iinfo(dtype)
        # The bounds are powers of two, so they are exact as floats.
        low, high = wide <= float(info.min), wide >= float(info.max + 1)
        whole = np.where(low | high | np.isnan(wide), 0.0, wide).astype(dtype.dtype)
        whole = np.where(low, dtype.dtype.type(info.min), whole)
        return np.asarray(np.where(high, dtype.dtype.type(info.max), whole))


convert: Final[OpDef] = OpDef(
    name="convert",
    promote=None,
    infer=_convert_infer,
    run=_convert_run,
    lower=pointwise(lambda x, dtype, weak=None: expr.cast(x, dtype)),
    jvp="linear",
    transpose=(lambda ct, x, **_: apply(convert, ct, dtype=x.dtype),),
    is_cheap=True,
    batch=batching.pointwise,
    reference=Reference(None, "jax.lax.convert_element_type"),
    samples=tuple(
        Sample(("T[5]",), {"dtype": dtype}, dtypes.ALL, -100.0, 100.0)
        for dtype in dtypes.ALL
    ),
)


def _copy_run(x: Array) -> Array:
    """A tensor of the same elements that shares no memory."""
    return np.array(x)


copy: Final = OpDef(
    name="copy",
    promote=None,
    infer=broadcast("copy", arity=1),
    run=_copy_run,
    lower=lambda types, x: Pointwise(lambda at: x[at], is_view=True),
    jvp=(lambda t, out, x: t,),
    transpose=(lambda ct, x: ct,),
    is_cheap=True,
    batch=batching.pointwise,
    reference=Reference("numpy.copy", "jax.numpy.copy"),
    samples=(Sample(("T[3, 4]",), dtypes=dtypes.ALL), Sample(("T[]",))),
)


_stopped: Final = OpDef(
    name="stop_gradient",
    promote=None,
    infer=broadcast("stop_gradient", arity=1),
    run=_copy_run,
    lower=lambda types, x: Pointwise(lambda at: x[at], is_view=True),
    jvp=(None,),
    batch=batching.pointwise,
    reference=Reference(None, "jax.lax.stop_gradient"),
    samples=(Sample(("T[3, 4]",), dtypes=dtypes.ALL), Sample(("T[]",))),
)


def stop_gradient(x: Any, /) -> Any:
    """Return `x` as a constant for differentiation.

    Args:
        x: A pytree of tensors and numbers.

    Raises:
        ArgumentTypeError: a leaf is neither.

    >>> hf.grad(lambda x: x * hf.stop_gradient(x))(3.0)
    Tensor(3., f32[])
    """
    return pytree.tree_map(
        lambda leaf: apply(_stopped, as_value(as_operand("stop_gradient", 0, leaf))), x
    )


def astype(
    x: Any, dtype: DTypeLike, /, *, copy: bool = True, device: Any = None
) -> Value:
    """Return `x` converted to `dtype`.

    Floats round to nearest even. Floats converted to integers are truncated and
    saturate, and NaN becomes 0; integers wrap; anything but 0 is True.

    Args:
        x: A tensor or a number.
        dtype: The dtype to convert to.
        copy: False returns `x` itself if it has that dtype.
        device: None or "cpu".

    Raises:
        ArgumentRangeError: a Python integer does not fit an integer dtype.
        DTypeError: there is no such dtype.
        DeviceError: there is no such device.

    >>> hf.astype(hf.asarray([1.7, -1.7]), hf.int32)
    Tensor([ 1, -1], i32[2])
    """
    check_device("astype", device)
    copy = as_flag("astype", "copy", copy)
    target = required_dtype("astype", dtype)
    operand = as_operand("astype", 0, x)
    if isinstance(x, SymInt) and target.is_integer:
        operand = convert_to(operand, target)  # checks the range
    type_ = operand.type
    if type_.dtype is target and not type_.weak:
        if not copy and isinstance(operand, Value):
            return operand
        return apply(_copy_op, operand)
    if isinstance(operand, Constant):
        number = _scalar(operand.value, target)
        return apply(_copy_op, Constant(number, TensorType(target)))
    # The default of `weak` is the operand's weakness.
    strong = {"weak": False} if type_.weak else {}
    return apply(convert, operand, dtype=target, **strong)


_copy_op: Final = copy


def _scalar(value: bool | int | float, dtype: DType) -> bool | int | float:
    """Return a number in `dtype`, converted directly and not by the default dtype."""
    if isinstance(value, float) and not dtype.is_float:
        return _convert_run(np.asarray(value), dtype=dtype).item()  # type: ignore[no-any-return]
    converted = convert_to(Constant(value, TensorType(dtype)), dtype)
    assert isinstance(converted, Constant)
    return converted.value


def as_value(operand: Operand) -> Value:
    """Return `operand` as a value: a constant becomes a tensor without axes.

    Raises:
        ArgumentRangeError: a Python integer does not fit the default dtype.
    """
    if isinstance(operand, Value):
        return operand
    type_ = operand.type
    return apply(copy, convert_to(operand, type_.dtype, weak=type_.weak))
