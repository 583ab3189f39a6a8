"""Elementwise operations: the function of JAX that an operation's record names, or the
expression that the operation lowers to.

Expressions are evaluated on whole arrays, which broadcast. JAX differentiates what it
evaluates, so a function is never expanded into arithmetic on bits where JAX has it.
"""

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any, Final

import numpy as np

from hopflow import dtypes
from hopflow.dtypes import DType
from hopflow.errors import ExportError
from hopflow.export.jax.frames import Array, Site
from hopflow.export.jax.library import library
from hopflow.export.operands import Operand
from hopflow.loop_ir.expr import MATH, Expr, Var, read
from hopflow.loop_ir.math import expand
from hopflow.ops.opdef import HALVES

_MESSAGES: Final = {
    "divide": "an integer is divided by 0",
    "power": "an integer has a negative power",
}


def pointwise(site: Site, *arrays: Array, **params: Any) -> list[Array]:
    """The results of an elementwise operation.

    Raises:
        ExportError: JAX has nothing for a part of it.
    """
    op, reference, dtype = site.node.op, site.node.op.reference, site.types[0].dtype
    if op.effects and site.is_checked:
        _check(site, arrays)
    if (
        reference is not None
        and reference.jax is not None
        and dtype not in reference.not_in_jax
        and not (dtype.is_integer and op.name in _OTHER_OF_INTEGERS)
    ):
        return [_named(_function(reference.jax), op.name, dtype)(*arrays, **params)]
    operands = list(map(Operand, site.types, arrays))
    lowered = op.lower(tuple(site.results), *operands, **params)
    kernels = lowered if isinstance(lowered, tuple) else (lowered,)
    memo: dict[Expr, Array] = {}
    found = [
        evaluate(kernel.element(_index(type_.ndim)), memo)
        for kernel, type_ in zip(kernels, site.results, strict=True)
    ]
    return [
        site.jnp.broadcast_to(x, site.shape(type_.shape))
        for x, type_ in zip(found, site.results, strict=True)
    ]


_OTHER_OF_INTEGERS: Final = frozenset("pow checked_pow floor_divide".split())
"""What JAX defines otherwise: powers of exponents above 63, and quotients by 0."""


def _named(
    function: Callable[..., Array], name: str, dtype: DType
) -> Callable[..., Array]:
    """A function of JAX; a mathematical one computes in float32 at least, and is
    rounded once."""
    if not (name in MATH and dtype in HALVES):
        return function

    def wide(*arrays: Array, **params: Any) -> Array:
        found = function(*(a.astype("float32") for a in arrays), **params)
        return found.astype(dtype.dtype)

    return wide


def _index(ndim: int) -> tuple[Expr, ...]:
    return tuple(read(Var(f"i{a}", dtypes.int64)) for a in range(ndim))


def _check(site: Site, arrays: tuple[Array, ...]) -> None:
    """Check what the operation checks of its operands."""
    operands = list(map(Operand, site.types, arrays))
    for check in site.node.op.lower(tuple(site.results), *operands).checks:
        holds = evaluate(check.holds(_index(len(check.shape))), {})
        site.check(holds, _MESSAGES[check.kind])


@cache
def _function(name: str) -> Callable[..., Array]:
    """A function of JAX by its full name."""
    library()
    module, _, function = name.rpartition(".")
    return getattr(importlib.import_module(module), function)  # type: ignore[no-any-return]


# --- expressions ----------------------------------------------------------------------


def evaluate(expression: Expr, memo: dict[Expr, Array]) -> Array:
    """The value of an expression on arrays, of elements of operands.

    Args:
        memo: The values of expressions so far, for others that share parts with it.

    Raises:
        ExportError: JAX has nothing for an operation of it.
    """
    if expression not in memo:
        memo[expression] = _computed(expression, memo)
    return memo[expression]


def _computed(node: Expr, memo: dict[Expr, Array]) -> Array:
    jnp, lax = library().numpy, library().lax
    if node.op == "const":
        return jnp.asarray(np.asarray(node.attr).astype(node.dtype.dtype))
    if node.op == "element":
        return node.attr.value
    if node.op in MATH - _MATH:
        return evaluate(expand(node.op, *node.args), memo)
    args = [evaluate(a, memo) for a in node.args]
    if node.op == "cast":
        return lax.convert_element_type(args[0], node.dtype.dtype)
    if node.op == "bitcast":
        return lax.bitcast_convert_type(args[0], node.dtype.dtype)
    if node.op in _MATH:
        return getattr(jnp, node.op)(*args)
    if node.op == "select":
        return jnp.where(*args)
    if node.op in _OF_NUMPY:
        return getattr(jnp, node.op)(*args)
    if node.op == "fma":
        return _fma(*args)
    name = _OPERATIONS.get(node.op)
    if node.args[0].dtype is dtypes.bool_:
        name = _OF_BOOLS.get(node.op, name)
    if name is None:
        raise ExportError(f"JAX has nothing for `{node.op}` of {node.dtype}.")
    return getattr(lax, name)(*jnp.broadcast_arrays(*args))


_MATH: Final = frozenset(
    "exp exp2 expm1 log log2 log10 log1p sin cos tan asin acos atan sinh cosh tanh "
    "asinh acosh atanh cbrt pow atan2 hypot fmod nextafter".split()
)
"""The functions that `jax.numpy` has under the same name; others are expanded."""

_OF_NUMPY: Final = frozenset("trunc rint copysign isnan".split())

_OPERATIONS: Final = {
    **{name: name for name in "neg abs sqrt floor ceil clz add sub mul div".split()},
    **{name: name for name in "rem min max eq ne lt le gt ge".split()},
    "not": "bitwise_not",
    "popcount": "population_count",
    "and": "bitwise_and",
    "or": "bitwise_or",
    "xor": "bitwise_xor",
    "shl": "shift_left",
    "lshr": "shift_right_logical",
    "ashr": "shift_right_arithmetic",
}
_OF_BOOLS: Final = {
    "add": "bitwise_or",
    "sub": "bitwise_xor",
    "mul": "bitwise_and",
    "min": "bitwise_and",
    "max": "bitwise_or",
}
"""The functions of `jax.lax` for operations."""


# --- fused multiply-add ---------------------------------------------------------------

_SPLIT: Final = 2.0**27 + 1


def _fma(x: Array, y: Array, z: Array) -> Array:
    """`x * y + z`, rounded once: of what is narrower than float64 in that."""
    jnp = library().numpy
    if x.dtype != jnp.float64:
        x64, y64, z64 = (v.astype(jnp.float64) for v in (x, y, z))
        return (x64 * y64 + z64).astype(x.dtype)
    product = x * y
    plain = product + z
    # The sum of product and z is `plain` and `rest`, exactly (D. Knuth).
    part = plain - product
    rest = (product - (plain - part)) + (z - part)
    missing = rest + _error_of_product(x, y, product)
    # Halves of what is close to the largest float overflow.
    return jnp.where(jnp.isfinite(missing), plain + missing, plain)


def _error_of_product(x: Array, y: Array, product: Array) -> Array:
    """`x * y - product`, exactly, by halves of 26 bits (T. Dekker, 1971)."""

    def halves(v: Array) -> tuple[Array, Array]:
        scaled = v * _SPLIT
        high = scaled - (scaled - v)
        return high, v - high

    (x1, x0), (y1, y0) = halves(x), halves(y)
    return ((x1 * y1 - product) + x1 * y0 + x0 * y1) + x0 * y0
