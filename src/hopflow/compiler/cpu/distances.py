"""Distances of elements from the start of a buffer, in 32 bits.

    select(i64(k) < 0, i64(k) + 64, i64(k)) * 8    ->    select(k < 0, k + 64, k) * 8

A register has twice as many distances of 32 bits, and is one gather. Sums, differences
and products are computed modulo 2^32, which is exact: the distance itself fits, whether
or not what it is computed of does.
"""

from collections.abc import Callable
from math import prod
from typing import Final

from hopflow import dtypes
from hopflow.dtypes import DType
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import COMPARE, Buffer, Expr

DEEPEST: Final = 16
"""Levels of an expression that are narrowed, at most."""


def is_small(buffer: Buffer) -> bool:
    """Return whether the distances of all elements fit 32 bits."""
    extents = [extent.attr for extent in buffer.shape if extent.is_const]
    is_dense = buffer.strides is None
    is_known = is_dense and len(extents) == len(buffer.shape)
    return is_known and prod(extents) <= 1 << 31


def narrowed(x: Expr, stays: Callable[[Expr], bool], depth: int = 0) -> Expr:
    """Return an i64 modulo 2^32.

    Args:
        stays: Whether an expression is computed in 64 bits, and then truncated.
    """
    if depth == DEEPEST or stays(x):
        return e.cast(x, dtypes.int32)
    if x.op in ("add", "sub", "mul"):
        a, b = (narrowed(y, stays, depth + 1) for y in x.args)
        return e.binary(x.op, a, b)
    if x.op == "select":
        test, *sides = x.args
        a, b = (narrowed(y, stays, depth + 1) for y in sides)
        return e.select(_narrowed_test(test), a, b)
    is_cast = x.op == "cast" and x.args[0].dtype.is_integer
    narrow = x.args[0] if is_cast and x.args[0].dtype.bits <= 32 else x
    return e.cast(narrow, dtypes.int32)


def _narrowed_test(test: Expr) -> Expr:
    """Return a comparison of 32 bits, if what it compares is known to fit."""
    if test.op in COMPARE and all(map(_fits, test.args)):
        a, b = (e.cast(_unwidened(x), dtypes.int32) for x in test.args)
        return e.compare(test.op, a, b)
    return test


def _fits(x: Expr) -> bool:
    """Return whether a number is known to be an integer of 32 bits with a sign."""
    if x.is_const:
        return x.dtype.is_integer and -(1 << 31) <= x.attr < 1 << 31
    return _has_fewer(_unwidened(x).dtype, dtypes.int32)


def _unwidened(x: Expr) -> Expr:
    """Return what an integer was before a conversion that keeps all values."""
    if x.op == "cast" and _has_fewer(x.args[0].dtype, x.dtype):
        return x.args[0]
    return x


def _has_fewer(dtype: DType, other: DType) -> bool:
    """Return whether an integer dtype has as many values of another one, or fewer."""
    if not (dtype.is_integer and other.is_integer):
        return False
    signs = dtype.kind == "u" and other.kind == "i"
    return dtype is other or (
        dtype.bits < other.bits and (signs or dtype.kind == other.kind)
    )
