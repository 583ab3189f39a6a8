"""Products of matrices and vectors: a primitive, and public functions."""

from collections.abc import Sequence
from math import prod
from typing import Any, Final

import numpy as np

from hopflow import dtypes
from hopflow.bind import Value, bind
from hopflow.dtypes import DType
from hopflow.errors import ArgumentTypeError, ArgumentValueError, AxisError, ShapeError
from hopflow.graph.types import TensorType, is_one
from hopflow.loop_ir import expr
from hopflow.loop_ir.expr import Expr, Index, extent
from hopflow.loop_ir.kernels import Kernel, Library, Operand, Pointwise, Reduction
from hopflow.loop_ir.routines import NUMBERS
from hopflow.ops import batching
from hopflow.ops.deferred import aligned, matched
from hopflow.ops.elementwise import multiply
from hopflow.ops.opdef import OpDef, Sample, convert_to
from hopflow.ops.rules import (
    NUMERIC,
    Array,
    broadcast_shapes,
    normalize_axes,
    normalize_axis,
    numeric,
    require_dtype,
)
from hopflow.ops.views import as_tensor, broadcasted, moved, reshaped, transposed
from hopflow.symbolic.size import Size

BLAS_TYPES: Final = (dtypes.float32, dtypes.float64)

# The number of multiplications from which a library call pays, and the assumed value of
# a symbolic size.
_LARGE: Final = 4096
_TYPICAL: Final = 64
# Sums of so many terms, as of points times a 3 x 3 matrix, are written out for at most
# so many columns, and for one column twice as many terms. Rows are lanes of vectors.
_FEW: Final = 4
_COLUMNS: Final = 8


def _infer(x: TensorType, y: TensorType) -> TensorType:
    require_dtype("matmul", [x, y], NUMERIC)
    if x.dtype is not y.dtype or x.ndim < 2 or x.ndim != y.ndim:
        raise ShapeError(
            f"matmul: the primitive takes matrices of one dtype and rank, not {x} and "
            f"{y}. Use `hf.matmul`, which promotes and broadcasts."
        )
    if x.shape[:-2] != y.shape[:-2]:
        raise ShapeError(f"matmul: {x} and {y} differ in their leading axes.")
    _check_inner("matmul", x, y, x.shape[-1], y.shape[-2])
    shape = (*x.shape[:-1], y.shape[-1])
    return TensorType(x.dtype, shape, x.weak and y.weak)


def _check_inner(name: str, x: TensorType, y: TensorType, k: Size, other: Size) -> None:
    # An undecidable equality of symbols raises.
    if k != other:
        raise ShapeError(
            f"{name}: the axes summed over must have equal sizes, and those of {x} and "
            f"{y} are {k} != {other}."
        )


def _run(x: Array, y: Array) -> Array:
    """x[*b, m, k] @ y[*b, k, n]; products of 16-bit floats are summed in float32."""
    if x.dtype.itemsize == 2 and dtypes.as_dtype(x.dtype).is_float:
        wide = np.matmul(x.astype(np.float32), y.astype(np.float32))
        return np.asarray(wide.astype(x.dtype))
    return np.asarray(np.matmul(x, y))


def _lower(types: Sequence[TensorType], x: Operand, y: Operand) -> Kernel:
    *_, m, k = x.type.shape
    n = y.type.shape[-1]
    if _for_library(x.type.dtype, m, n, k):
        sizes = (extent(m), extent(n), extent(k))
        batch = x.type.ndim - 2
        return Library(
            "gemm", (x, y), sizes, batch, can_fail=True, takes_transposed=True
        )
    dtype = types[0].dtype
    sums = dtypes.float32 if dtype.is_float and dtype.bits == 16 else dtype

    def element(at: Index, r: Index) -> Expr:
        *batch, i, j = at
        left, right = x[(*batch, i, r[0])], y[(*batch, r[0], j)]
        return expr.mul(expr.cast(left, sums), expr.cast(right, sums))

    if is_one(k):  # columns times rows, as in the gradient of a matrix
        return Pointwise(lambda at: expr.cast(element(at, (expr.index(0),)), dtype))
    return Reduction(
        space=(k,),
        init=(expr.const(0, sums),),
        combine="add",
        element=lambda at, r: (element(at, r),),
        finish=(lambda _, total: expr.cast(total[0], dtype),),
    )


def _for_library(dtype: DType, m: Size, n: Size, k: Size) -> bool:
    sizes = [s if isinstance(s, int) else _TYPICAL for s in (m, n, k)]
    is_dot = sizes[0] == sizes[1] == 1
    is_outer = is_one(k)
    is_short = sizes[2] <= _FEW and sizes[1] <= _COLUMNS
    if is_dot or is_outer or is_short or (sizes[1] == 1 and sizes[2] <= 2 * _FEW):
        return False
    return dtype in NUMBERS and prod(sizes) > _LARGE


def _batch(
    op: OpDef, size: Size, batched: tuple[bool, ...], x: Any, y: Any
) -> Sequence[Value]:
    """Batch the product: a matrix that is the same for all batch elements makes one
    large product of many small ones."""
    if batched == (True, False) and y.ndim == 2:
        _, m, k = x.shape
        [product] = bind(op, [reshaped(x, (size * m, k)), y], {})
        return [reshaped(product, (size, m, y.shape[-1]))]
    if batched == (False, True) and x.ndim == 2:
        _, k, n = y.shape
        if is_one(n):  # a vector for each element: rows, as of the result
            rows = [reshaped(y, (size, k)), matrix_transpose(x)]
            [product] = bind(op, rows, {})
            return [reshaped(product, (size, x.shape[0], 1))]
        [product] = bind(op, [x, reshaped(moved(y, 0, 1), (k, size * n))], {})
        return [moved(reshaped(product, (x.shape[0], size, n)), 1, 0)]
    args = [batching.in_batch(size, b, o) for b, o in zip(batched, (x, y), strict=True)]
    return bind(op, args, {})


matmul_op: Final[OpDef] = OpDef(
    name="matmul",
    promote=None,
    infer=_infer,  # T[*b, m, k], T[*b, k, n] -> T[*b, m, n]
    run=_run,
    lower=_lower,
    jvp=(lambda t, out, x, y: matmul_op(t, y), lambda t, out, x, y: matmul_op(x, t)),
    transpose=(
        lambda ct, x, y: matmul_op(ct, matrix_transpose(y)),
        lambda ct, x, y: matmul_op(matrix_transpose(x), ct),
    ),
    batch=_batch,
    samples=(
        Sample(("T[3, 4]", "T[4, 2]"), dtypes=NUMERIC),
        Sample(("T[2, 3, 4]", "T[2, 4, 5]"), dtypes=NUMERIC),
        Sample(("T[3, 0]", "T[0, 2]"), dtypes=NUMERIC),
        Sample(("T[20, 17]", "T[17, 19]"), dtypes=NUMBERS),
        Sample(("T[2, 20, 17]", "T[2, 17, 19]"), dtypes=NUMBERS),
    ),
)


# --- public functions -----------------------------------------------------------------


def promoted(name: str, *args: Any) -> list[Any]:
    """Return tensors of a common numeric dtype.

    Raises:
        ArgumentTypeError: an argument is neither a tensor, an array nor a number.
        DTypeError: an argument is a bool.
    """
    tensors = [as_tensor(name, arg, i) for i, arg in enumerate(args)]
    dtype, weak = numeric(name, [(t.type.dtype, t.type.weak) for t in tensors])
    return [convert_to(t, dtype, weak=weak) for t in tensors]


def matmul(x1: Any, x2: Any, /) -> Value:
    """Return the matrix product; leading axes are a batch, and broadcast.

    Shapes:
        [*b, m, k] @ [*b, k, n] -> [*b, m, n]
        [k] @ [*b, k, n] -> [*b, n]      and      [*b, m, k] @ [k] -> [*b, m]
        [k] @ [k] -> []

    Raises:
        ShapeError: the sizes summed over differ, the batches do not broadcast, or an
            operand has no axes.
        DTypeError: an operand is a bool.

    >>> hf.matmul(hf.asarray([[1, 2], [3, 4]]), hf.asarray([1, 1]))
    Tensor([3, 7], i64[2])
    """
    x, y = promoted("matmul", x1, x2)
    if not (x.ndim and y.ndim):
        raise ShapeError(
            f"matmul: the operands need an axis, and are {x.type} and {y.type}. "
            "Use `*` to multiply by a scalar."
        )
    x, y = matched("matmul", (x, y), (x.ndim - 1, max(y.ndim - 2, 0)))
    k, other = x.shape[-1], y.shape[max(y.ndim - 2, 0)]
    _check_inner("matmul", x.type, y.type, k, other)
    left = reshaped(x, (1, k)) if x.ndim == 1 else x
    right = reshaped(y, (k, 1)) if y.ndim == 1 else y
    rows = () if x.ndim == 1 else x.shape[-2:-1]
    columns = () if y.ndim == 1 else y.shape[-1:]
    if right.ndim == 2:  # one large product in place of a batch of small ones
        batch = left.shape[:-2]
        left = reshaped(left, (prod(left.shape[:-1], start=1), k))
    else:
        left, right = aligned("matmul", (left, right), core=2)
        batch = broadcast_shapes("matmul", left.shape[:-2], right.shape[:-2])
        left = broadcasted(left, (*batch, *left.shape[-2:]))
        right = broadcasted(right, (*batch, *right.shape[-2:]))
    return reshaped(matmul_op(left, right), (*batch, *rows, *columns))  # type: ignore[no-any-return]


def matrix_transpose(x: Any, /) -> Value:
    """Return `x` with its last two axes exchanged: [*b, m, n] -> [*b, n, m].

    Raises:
        ShapeError: `x` has fewer than two axes.
    """
    x = as_tensor("matrix_transpose", x)
    if x.ndim < 2:
        raise ShapeError(
            f"matrix_transpose: expected 2 axes or more, and found {x.type}."
        )
    return moved(x, x.ndim - 1, x.ndim - 2)  # type: ignore[no-any-return]


def outer(x1: Any, x2: Any, /) -> Value:
    """Return all products of two elements: [m], [n] -> [m, n].

    Raises:
        ShapeError: an operand is not a vector.
    """
    x, y = promoted("outer", x1, x2)
    if x.ndim != 1 or y.ndim != 1:
        raise ShapeError(f"outer: expected two vectors, and found {x.type}, {y.type}.")
    return multiply(reshaped(x, (x.shape[0], 1)), y)  # type: ignore[no-any-return]


def vecdot(x1: Any, x2: Any, /, *, axis: int = -1) -> Value:
    """Return the sum of products along `axis`; the other axes broadcast.

    Raises:
        AxisError: an operand has no such axis.
        ShapeError: the sizes along it differ, or the other axes do not broadcast.
    """
    vectors = []
    for x in promoted("vecdot", x1, x2):
        at = normalize_axis("vecdot", axis, x.ndim)
        vectors.append(moved(x, at, x.ndim - 1))
    x, y = aligned(
        "vecdot", matched("vecdot", vectors, [v.ndim - 1 for v in vectors]), 1
    )
    k = x.shape[-1]
    _check_inner("vecdot", x.type, y.type, k, y.shape[-1])
    batch = broadcast_shapes("vecdot", x.shape[:-1], y.shape[:-1])
    x, y = (broadcasted(v, (*batch, k)) for v in (x, y))
    dots = matmul_op(reshaped(x, (*batch, 1, k)), reshaped(y, (*batch, k, 1)))
    return reshaped(dots, batch)  # type: ignore[no-any-return]


def tensordot(x1: Any, x2: Any, /, *, axes: Any = 2) -> Value:
    """Return the sum of products over some axes of each operand.

    The result has the remaining axes of `x1`, then those of `x2`.

    Args:
        x1, x2: Tensors.
        axes: The number of last axes of `x1` and first axes of `x2` to sum over, or a
            pair of sequences of axes that correspond.

    Raises:
        ArgumentTypeError: `axes` is neither.
        ArgumentValueError: `axes` is negative, or the sequences differ in length.
        AxisError: an operand has no such axis.
        ShapeError: the sizes of corresponding axes differ.

    >>> hf.tensordot(hf.ones((2, 3, 4)), hf.ones((3, 4, 5))).shape
    (2, 5)
    """
    x, y = promoted("tensordot", x1, x2)
    of_x, of_y = _tensordot_axes(x.type, y.type, axes)
    for i, j in zip(of_x, of_y, strict=True):
        x, y = matched("tensordot", (x, y), (i, j))
        _check_inner("tensordot", x.type, y.type, x.shape[i], y.shape[j])
    free_x = [a for a in range(x.ndim) if a not in of_x]
    free_y = [a for a in range(y.ndim) if a not in of_y]
    rows = tuple(x.shape[a] for a in free_x)
    columns = tuple(y.shape[a] for a in free_y)
    k = prod((x.shape[a] for a in of_x), start=1)
    left = reshaped(transposed(x, (*free_x, *of_x)), (prod(rows, start=1), k))
    right = reshaped(transposed(y, (*of_y, *free_y)), (k, prod(columns, start=1)))
    return reshaped(matmul_op(left, right), (*rows, *columns))  # type: ignore[no-any-return]


def _tensordot_axes(
    x: TensorType, y: TensorType, axes: Any
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if isinstance(axes, int) and not isinstance(axes, bool):
        if axes < 0:
            raise ArgumentValueError(
                f"tensordot: `axes` must not be negative, and is {axes}."
            )
        if axes > min(x.ndim, y.ndim):
            raise AxisError(
                f"tensordot: `axes` is {axes}, and the tensors are {x}, {y}."
            )
        return tuple(range(x.ndim - axes, x.ndim)), tuple(range(axes))
    if not (isinstance(axes, tuple | list) and len(axes) == 2):
        raise ArgumentTypeError(
            "tensordot: `axes` must be an int or a pair of sequences of ints, and is "
            f"{axes!r}."
        )
    of_x = normalize_axes("tensordot", axes[0], x.ndim, "axes")
    of_y = normalize_axes("tensordot", axes[1], y.ndim, "axes")
    if len(of_x) != len(of_y):
        raise ArgumentValueError(
            f"tensordot: `axes` names {len(of_x)} and {len(of_y)} axes; they must "
            "correspond."
        )
    return of_x, of_y
