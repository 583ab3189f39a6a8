"""The reference implementation of programs, in plain Python and NumPy.

`Plain()` has hopflow's names, implemented by loops and arrays. A `Rounding` perturbs
each result by about one unit in the last place: the differences of runs with noise
bound the effect of rounding on the results.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

import ml_dtypes
import numpy as np

import hopflow
from hopflow import pytree
from hopflow.agreement import Rounding
from hopflow.bind import using
from hopflow.compiler.compared import Rounded
from hopflow.dtypes import as_dtype

Array = np.ndarray[Any, Any]
Function = Callable[..., Any]

BFLOAT16: Final = np.dtype(ml_dtypes.bfloat16)

SAME_AS_NUMPY: Final = frozenset(
    """add subtract multiply divide floor_divide remainder pow less less_equal greater
    greater_equal equal not_equal bitwise_and bitwise_or bitwise_xor bitwise_invert
    bitwise_left_shift bitwise_right_shift abs all any argmin asinh atan atan2 ceil cos
    cosh exp exp2 expm1 floor hypot isfinite isinf isnan log1p logaddexp max maximum min
    minimum negative prod round sign sin sinh sqrt square sum tanh trunc
    where""".split()
)
MOVES: Final = frozenset(
    """flip matrix_transpose pad permute_dims repeat reshape roll take_along_axis tile
    tril triu""".split()
)
"""Functions that only move elements; some return views."""


def common(arrays: Sequence[Array]) -> np.dtype[Any]:
    """Return the promoted dtype: floats take precedence over integers of any width."""
    floats = {a.dtype for a in arrays if as_dtype(a.dtype).is_float}
    if not floats:
        dtype = np.result_type(*arrays)
        # JAX promotes uint64 and signed integers to the weak float.
        return np.dtype(np.float32) if dtype.kind == "f" else dtype
    if floats == {BFLOAT16, np.dtype(np.float16)}:
        return np.dtype(np.float32)
    return max(floats, key=lambda d: d.itemsize)


class Plain:
    """hopflow's names, implemented in NumPy; `rounding` perturbs each result."""

    def __init__(self, rounding: Rounding | None = None) -> None:
        self.rounding = rounding or Rounding()
        self._result = self.rounding.result
        self._owned: list[Array] = []  # arrays that programs may write

    def __getattr__(self, name: str) -> Any:
        if name in SAME_AS_NUMPY:
            return self._numpy(getattr(np, name))
        if name in MOVES:
            return getattr(np, name)
        if name == "bool":
            return as_dtype(bool)
        if name in ("Checkpoint", "Dim"):
            return getattr(hopflow, name)
        return as_dtype(name)

    # Arrays.

    def _numpy(self, f: Function) -> Function:
        """Return `f` in the promoted dtype of its operands; Python numbers are weak."""

        def call(*args: Any, **options: Any) -> Any:
            first = args[:1] if f is np.where else ()
            operands = args[len(first) :]
            arrays = (a for a in operands if isinstance(a, np.ndarray | np.generic))
            dtype = common([*map(np.asarray, arrays)])
            result = self._result(
                f(*first, *(np.asarray(a, dtype) for a in operands), **options)
            )
            # `x[i]` is a view for a scalar, as for a tensor of rank 0, but not for an
            # array.
            is_index = result.ndim == 0 and result.dtype.kind == "i"
            return result[()] if is_index else result

        return call

    def matmul(self, x: Array, y: Array) -> Array:
        return self._product(np.matmul, x, y)

    def vecdot(self, x: Array, y: Array, *, axis: int) -> Array:
        return self._product(np.vecdot, x, y, axis=axis)

    def tensordot(self, x: Array, y: Array, *, axes: Any) -> Array:
        return self._product(np.tensordot, x, y, axes=axes)

    def conv(self, x: Array, w: Array, **options: int) -> Array:
        return self._product(_convolved, x, w, **options)

    def _product(self, f: Function, x: Array, y: Array, **options: Any) -> Array:
        dtype = common([x, y])  # NumPy promotes bfloat16 to float32
        product = f(np.asarray(x, dtype), np.asarray(y, dtype), **options)
        return self._result(product.astype(dtype))

    def asarray(self, x: Any, dtype: Any = None) -> Array:
        return np.asarray(x, None if dtype is None else as_dtype(dtype).dtype)

    def astype(self, x: Array, dtype: Any, *, copy: bool = True) -> Array:
        if not copy and as_dtype(x.dtype) is as_dtype(dtype):
            return x
        return self._written_to(self._converted(x, as_dtype(dtype)))

    def _converted(self, x: Array, to: Any) -> Array:
        if to.is_integer and as_dtype(x.dtype).is_float:
            # Conversions saturate, as in JAX, and NaN becomes 0.
            ends, wide = np.iinfo(to.dtype), x.astype(np.float64)
            inside = (wide > ends.min) & (wide < ends.max)
            integers = np.where(inside, wide, 0.0).astype(to.dtype)
            integers = np.where(wide <= ends.min, to.dtype.type(ends.min), integers)
            integers = np.where(wide >= ends.max, to.dtype.type(ends.max), integers)
            return self._result(integers)
        return self._result(x.astype(to.dtype))

    def copy(self, x: Array) -> Array:
        # Contiguous, so that each `reshape` is a view, as in hopflow.
        return self._written_to(np.array(x, order="C"))

    def positive(self, x: Array) -> Array:
        return self._written_to(self._result(np.positive(x)))

    def _written_to(self, x: Array) -> Array:
        """Return `x`, and register it so that `_types_of` can undo writes to it."""
        self._owned.append(x)
        return x

    def full(self, shape: Any, value: Any, *, dtype: Any) -> Array:
        return np.full(shape, value, as_dtype(dtype).dtype)

    def broadcast_to(self, x: Array, shape: Any) -> Array:
        return np.broadcast_to(x, shape)

    def argsort(self, x: Array, *, axis: int = -1, descending: bool = False) -> Array:
        if not descending:
            return self._result(np.argsort(x, axis=axis, kind="stable"))
        order = np.argsort(np.flip(x, axis), axis=axis, kind="stable")
        return self._result(np.flip(x.shape[axis] - 1 - order, axis))

    def sort(self, x: Array, *, axis: int = -1, descending: bool = False) -> Array:
        ordered = np.sort(x, axis=axis)
        return self._result(np.flip(ordered, axis) if descending else ordered)

    def top_k(self, x: Array, k: int, *, axis: int) -> tuple[Array, Array]:
        order = self.argsort(x, axis=axis, descending=True)
        order = np.take(order, range(k), axis=axis)
        return np.take_along_axis(x, order, axis=axis), order

    def searchsorted(self, x: Array, values: Array, *, side: Any) -> Array:
        return self._result(np.searchsorted(x, values, side=side))

    def cumulative_sum(
        self, x: Array, *, axis: int, include_initial: bool = False
    ) -> Array:
        sums = np.cumulative_sum(x, axis=axis, include_initial=include_initial)
        return self._result(sums)

    def cumulative_prod(self, x: Array, *, axis: int) -> Array:
        return self._result(np.cumprod(x, axis=axis))

    def cummax(self, x: Array, *, axis: int) -> Array:
        return self._result(np.maximum.accumulate(x, axis=axis))

    def cummin(self, x: Array, *, axis: int) -> Array:
        return self._result(np.minimum.accumulate(x, axis=axis))

    def concat(self, arrays: Sequence[Array]) -> Array:
        dtype = common(arrays)
        return np.concatenate([a.astype(dtype) for a in arrays])

    def stack(self, arrays: Sequence[Array], *, axis: int = 0) -> Array:
        return np.stack(arrays, axis=axis)

    def dynamic_slice(
        self, x: Array, start: Sequence[Any], sizes: Sequence[int]
    ) -> Array:
        return x[_window(x, start, sizes)]

    def dynamic_update_slice(
        self, x: Array, part: Array, start: Sequence[Any]
    ) -> Array:
        result = np.array(x)
        result[_window(x, start, part.shape)] = part
        return result

    def segment_sum(self, x: Array, segments: Array, count: int) -> Array:
        result = np.zeros((count, *x.shape[1:]), x.dtype)
        in_range = (segments >= 0) & (segments < count)
        np.add.at(result, segments[in_range], x[in_range])
        return self._result(result)

    class random:
        """Random numbers are those of hopflow."""

        key = staticmethod(hopflow.random.key)
        fold_in = staticmethod(lambda key, n: hopflow.random.fold_in(key, int(n)))

        @staticmethod
        def uniform(key: Any, shape: Any, *, dtype: Any) -> Array:
            return np.asarray(hopflow.random.uniform(key, shape, dtype=dtype))

    # Functions of functions.

    def cond(
        self, test: Any, then: Function, other: Function, operands: Any = ()
    ) -> Any:
        self._result(test)
        return self.copied(then(*operands) if test else other(*operands))

    def switch(
        self, index: Any, branches: Sequence[Function], operands: Any = ()
    ) -> Any:
        k = min(max(int(index), 0), len(branches) - 1)
        return self.copied(branches[k](*operands))

    def while_loop(self, test: Function, step: Function, carry: Any, **_: Any) -> Any:
        carry = self.copied(carry)
        while spread(test, carry):
            carry = self.copied(spread(step, carry))
        return carry

    def fori_loop(self, lower: Any, upper: Any, step: Function, carry: Any) -> Any:
        carry = self.copied(carry)
        for i in range(int(lower), int(upper)):
            carry = self.copied(spread(step, carry, np.asarray(i)))
        return carry

    def scan(
        self,
        step: Function,
        init: Any,
        xs: Any = None,
        *,
        length: int | None = None,
        reverse: bool = False,
        until: Function | None = None,
        **_: Any,
    ) -> Any:
        leaves = pytree.flatten(xs)[0]
        count = int(leaves[0].shape[0]) if leaves else int(length or 0)
        carry, rows, order = self.copied(init), {}, range(count)
        xs = self.copied(xs)
        for i in reversed(order) if reverse else order:
            carry, y = self.copied(step(carry, self.copied(row(xs, i))))
            rows[i] = y
            if until is not None and until(carry):
                break
        like = (
            pytree.tree_map(np.zeros_like, y)
            if count
            else self._types_of(
                lambda c, x: step(c, x)[1], self.copied(init), zero_row(xs)
            )
        )
        ys = stacked([rows.get(i, like) for i in order], like)
        return (carry, ys) if until is None else (carry, ys, np.asarray(len(rows)))

    def map(self, f: Function, xs: Any, *, batch_size: int | None = None) -> Any:
        del batch_size
        count = pytree.flatten(xs)[0][0].shape[0]
        if not count:
            return stacked([], self._types_of(f, zero_row(xs)))
        xs = self.copied(xs)
        rows = [self.copied(f(self.copied(row(xs, i)))) for i in range(count)]
        return stacked(rows, rows[0])

    def associative_scan(self, f: Function, xs: Any, *, reverse: bool = False) -> Any:
        count = pytree.flatten(xs)[0][0].shape[0]
        order = [row(xs, i) for i in range(count)]
        prefixes: list[Any] = []
        for x in reversed(order) if reverse else order:
            prefixes.append(f(prefixes[-1], x) if prefixes else x)
        return stacked(prefixes[::-1] if reverse else prefixes, zero_row(xs))

    def invoke_subgraph(self, f: Function, *operands: Any) -> Any:
        return self.copied(f(*operands))

    def checkpoint(self, f: Function, *, policy: Any = None) -> Function:
        del policy
        return lambda *args: self.copied(f(*args))

    def user_operator(self, call: Function) -> Function:
        """Return a user's operator as its reference implementation, by `hf.debug`."""

        def among_tensors(f: Any) -> Any:
            if not callable(f):
                return hopflow.asarray(f)
            return lambda *operands: pytree.tree_map(
                hopflow.asarray, f(*pytree.tree_map(np.array, operands))
            )

        def run(*args: Any) -> Any:
            operands = list(map(among_tensors, args))
            with using(Rounded(self.rounding)), hopflow.debug():
                results = call(*operands)
            return pytree.tree_map(np.array, results)

        return run

    def custom_jvp(self, f: Function) -> Any:
        return _Custom(lambda *args: self.copied(f(*args)))

    custom_vjp = custom_jvp

    def copied(self, tree: Any) -> Any:
        """Copy a tree: operands and results of bodies alias nothing."""
        return pytree.tree_map(lambda x: self._written_to(np.array(x, order="C")), tree)

    def _types_of(self, f: Function, *args: Any) -> Any:
        """Return zeros of the types of `f(*args)`; its writes are undone."""
        decisions = self.rounding.decisions
        copies, num_decisions = [a.copy() for a in self._owned], len(decisions)
        with np.errstate(all="ignore"):
            result = f(*args)
        del self._owned[len(copies) :], decisions[num_decisions:]
        for a, before in zip(self._owned, copies, strict=True):
            a[...] = before
        return pytree.tree_map(np.zeros_like, result)


class _Custom:
    """A function with a custom derivative, which the reference ignores."""

    def __init__(self, f: Function) -> None:
        self._f = f

    def __call__(self, *args: Any) -> Any:
        return self._f(*args)

    def defjvp(self, *_: Function) -> None: ...

    defvjp = defjvp


def _window(x: Array, start: Sequence[Any], sizes: Sequence[int]) -> tuple[slice, ...]:
    """Return the slices of a window, which is moved to lie within `x`."""
    ends = zip(map(int, start), x.shape, sizes, strict=True)
    starts = [min(max(i + n * (i < 0), 0), n - m) for i, n, m in ends]
    return tuple([slice(i, i + m) for i, m in zip(starts, sizes, strict=True)])


def spread(f: Function, carry: Any, *first: Any) -> Any:
    """Call `f` with the elements of a tuple, or with another carry as one argument."""
    return f(*first, *(carry if type(carry) is tuple else (carry,)))


def row(xs: Any, i: int) -> Any:
    return pytree.tree_map(lambda x: x[i, ...], xs)


def zero_row(xs: Any) -> Any:
    return pytree.tree_map(lambda x: np.zeros(x.shape[1:], x.dtype), xs)


def stacked(rows: Sequence[Any], like: Any) -> Any:
    if not rows:
        return pytree.tree_map(lambda x: np.zeros((0, *x.shape), x.dtype), like)
    return pytree.tree_map(lambda *xs: np.stack(xs), *rows)


def _convolved(
    x: Array, w: Array, *, stride: int, padding: int, dilation: int, groups: int
) -> Array:
    """A convolution as a sum over the elements of a window."""
    rank, (outputs, channels, *window) = x.ndim - 2, w.shape
    x = np.pad(x, [(0, 0)] * 2 + [(padding, padding)] * rank)
    batch, _, *lengths = x.shape
    sizes = [
        max(0, (n - (k - 1) * dilation - 1) // stride + 1)
        for n, k in zip(lengths, window, strict=True)
    ]
    x = x.reshape(batch, groups, channels, *lengths)
    w = w.reshape(groups, outputs // groups, channels, *window)
    result = np.zeros((batch, groups, outputs // groups, *sizes), x.dtype)
    for at in np.ndindex(*window) if result.size else ():
        places: Any = (
            ...,
            *(
                slice(i * dilation, i * dilation + (m - 1) * stride + 1, stride)
                for i, m in zip(at, sizes, strict=True)
            ),
        )
        part = x[places].reshape(batch, groups, channels, -1)
        result += np.matmul(w[(..., *at)], part).reshape(result.shape)
    return result.reshape(batch, outputs, *sizes)
