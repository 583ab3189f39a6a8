"""Convolutions: a primitive that is its own derivative, and public functions."""

from collections.abc import Sequence
from functools import reduce
from math import prod
from typing import Any, Final, NamedTuple

import numpy as np

from hopflow import dtypes
from hopflow.bind import Value, bind
from hopflow.errors import ArgumentValueError, ShapeError
from hopflow.graph.types import Shape, TensorType, is_one, is_zero
from hopflow.loop_ir import expr
from hopflow.loop_ir.expr import Expr, Index, extent
from hopflow.loop_ir.kernels import Operand, Pointwise, Reduction
from hopflow.ops.conv_plan import composed, is_written_out
from hopflow.ops.convert import apply
from hopflow.ops.matmul import promoted
from hopflow.ops.opdef import OpDef, Sample
from hopflow.ops.rules import (
    NUMERIC,
    Array,
    as_integer,
    as_symbol,
    one_of,
    require_dtype,
)
from hopflow.ops.sizes import divided, larger, steps
from hopflow.ops.views import moved, reshaped, sliced, transposed
from hopflow.ops.windows import dilated, part_of, spread, tests_inside
from hopflow.symbolic.size import Size

Types = Sequence[TensorType]


# --- the primitive --------------------------------------------------------------------


def _infer(
    x: TensorType,
    w: TensorType,
    *,
    strides: tuple[int, ...],
    before: Shape,
    sizes: Shape,
    dilation: tuple[int, ...],
    input_dilation: tuple[int, ...],
    groups: Size,
) -> TensorType:
    require_dtype("conv", [x, w], NUMERIC)
    rank = len(sizes)
    if x.dtype is not w.dtype or not x.ndim == w.ndim == rank + 2:
        raise ShapeError(
            f"conv: the primitive takes an input and weights of one dtype and of rank "
            f"{rank + 2}, not {x} and {w}. Use `hf.conv`, which promotes."
        )
    distances = (*strides, *dilation, *input_dilation)
    if not len(strides) == len(before) == len(dilation) == len(input_dilation) == rank:
        raise ArgumentValueError(f"conv: not all params are for {rank} axes.")
    if min(distances, default=1) < 1:
        raise ArgumentValueError(f"conv: a distance is less than 1: {distances}.")
    _check_channels("conv", x, w, groups)
    shape = (x.shape[0], w.shape[0], *sizes)
    return TensorType(x.dtype, shape, x.weak and w.weak)


def _check_channels(name: str, x: TensorType, w: TensorType, groups: Size) -> None:
    channels, outputs, inputs = x.shape[1], w.shape[0], w.shape[1]
    if channels != inputs * groups:
        expected = "" if is_one(groups) else f" (in {groups} groups)"
        raise ShapeError(
            f"{name}: the input {x} has {channels} channels, and the weights {w} are "
            f"for {inputs * groups}{expected}. Axis 1 of the weights must have the "
            "channels of the input, divided by `groups`."
        )
    is_empty = is_zero(groups) and is_zero(outputs)  # a batch of no examples
    if not is_empty and divided(outputs, groups) is None:
        raise ShapeError(
            f"{name}: {outputs} output channels (axis 0 of the weights {w}) cannot be "
            f"shared among {groups} groups."
        )


def _run(
    x: Array,
    w: Array,
    *,
    strides: tuple[int, ...],
    before: tuple[int, ...],
    sizes: tuple[int, ...],
    dilation: tuple[int, ...],
    input_dilation: tuple[int, ...],
    groups: Size,
) -> Array:
    """x[n, g * c, *s] convolved with w[g * o, c, *k]: the sum of products with each
    window of the padded input (without reversing it). Products of 16-bit floats are
    summed in float32."""
    dtype = x.dtype
    if dtype.itemsize == 2 and dtypes.as_dtype(dtype).is_float:
        x, w = x.astype(np.float32), w.astype(np.float32)
    shape = (x.shape[0], w.shape[0], *sizes)
    if not (prod(shape) and w.size):
        return np.zeros(shape, dtype)
    padded = [
        (m - 1) * s + dilated(k, d)
        for m, k, s, d in zip(sizes, w.shape[2:], strides, dilation, strict=True)
    ]
    wide = np.ascontiguousarray(spread(x, before, input_dilation, padded))
    outputs, channels, *window = w.shape
    wide = wide.reshape(x.shape[0], groups, channels, *padded)
    steps = wide.strides[3:]
    windows = np.lib.stride_tricks.as_strided(
        wide,
        (*wide.shape[:3], *window, *sizes),
        (
            *wide.strides[:3],
            *(a * b for a, b in zip(steps, dilation, strict=True)),
            *(a * b for a, b in zip(steps, strides, strict=True)),
        ),
        writeable=False,
    )
    matrix = w.reshape(groups, part_of(outputs, groups), -1)
    rows, columns = channels * prod(window), prod(sizes)
    # One batch element at a time: the windows are copied into a matrix.
    results = [matrix @ part.reshape(groups, rows, columns) for part in windows]
    return np.stack(results).reshape(shape).astype(dtype, copy=False)


class _Reads:
    """The products of a convolution: which element of the input is multiplied."""

    def __init__(self, x: Operand, w: Operand, params: dict[str, Any]) -> None:
        self.x, self.w, self.params = x, w, params
        dtype = x.type.dtype
        is_short = dtype.is_float and dtype.bits == 16
        self.sums = dtypes.float32 if is_short else dtype

    def source(self, axis: int, i: Expr, t: Expr) -> tuple[Expr, list[Expr]]:
        """Return the index along a spatial axis for a place and an offset in the
        window, and the tests that there is such an element."""
        names = ("strides", "before", "sizes", "dilation", "input_dilation")
        stride, before, size, step, dilation = (self.params[n][axis] for n in names)
        n, k = (v.type.shape[axis + 2] for v in (self.x, self.w))
        place = expr.mul(i, expr.index(stride))
        place = expr.add(place, expr.mul(t, expr.index(step)))
        place = expr.sub(place, extent(before))
        last = (size - 1) * stride + (k - 1) * step - before
        tests = tests_inside(place, -before, last, n, dilation)
        return expr.div(place, expr.index(dilation)), tests

    def product(self, at: Index, r: Index) -> Expr:
        """Return the product with the weight `r` for the element `at`."""
        (batch, output, *places), (channel, *taps) = at, r
        groups, (outputs, inputs, *_) = self.params["groups"], self.w.type.shape
        if not is_one(groups):
            group = expr.div(output, extent(part_of(outputs, groups)))
            channel = expr.add(expr.mul(group, extent(inputs)), channel)
        source, tests = [batch, channel], list[Expr]()
        for axis, (i, t) in enumerate(zip(places, taps, strict=True)):
            index, more = self.source(axis, i, t)
            source.append(index)
            tests += more
        zero = expr.const(0, self.x.type.dtype)
        element = self.x.where(expr.all_of(tests), tuple(source), zero)
        weight = self.w[(output, *r)]
        return expr.mul(expr.cast(element, self.sums), expr.cast(weight, self.sums))


def _lower(
    types: Types, x: Operand, w: Operand, **params: Any
) -> Pointwise | Reduction:
    dtype, reads, space = types[0].dtype, _Reads(x, w, params), w.type.shape[1:]
    if is_written_out(x.type, w.type, params):
        taps = [tuple(map(expr.index, r)) for r in np.ndindex(*map(int, space))]

        def element(at: Index) -> Expr:
            total = reduce(expr.add, [reads.product(at, r) for r in taps])
            return expr.cast(total, dtype)

        return Pointwise(element)
    return Reduction(
        space=space,
        init=(expr.const(0, reads.sums),),
        combine="add",
        element=lambda at, r: (reads.product(at, r),),
        finish=(lambda _, total: expr.cast(total[0], dtype),),
    )


# --- derivatives ----------------------------------------------------------------------


def _exchanged(w: Any, groups: int) -> Any:
    """Return weights with inputs and outputs of each group exchanged, and reversed
    windows: [g * o, c, *k] -> [g * c, o, *k]."""
    outputs, inputs, *window = w.shape
    axes = range(3, 3 + len(window))
    split = reshaped(w, (groups, part_of(outputs, groups), inputs, *window))
    turned = transposed(split, (0, 2, 1, *axes))
    merged = reshaped(turned, (groups * inputs, part_of(outputs, groups), *window))
    starts = (0, 0, *(k - 1 for k in window))
    return sliced(merged, starts, merged.shape, (1, 1, *[-1] * len(window)))


def _of_input(ct: Any, x: Any, w: Any, **params: Any) -> Value:
    """Return the cotangent of the input: a convolution of `ct` with the same weights,
    reversed, where strides and the dilation of the input change places."""
    strides, dilation = params["strides"], params["dilation"]
    input_dilation, groups = params["input_dilation"], params["groups"]
    triples = zip(w.shape[2:], dilation, params["before"], strict=True)
    return apply(
        conv_op,
        ct,
        _exchanged(w, groups),
        strides=input_dilation,
        before=tuple([(k - 1) * d - low for k, d, low in triples]),
        sizes=x.type.shape[2:],
        dilation=dilation,
        input_dilation=strides,
        groups=groups,
    )


def _of_weights(ct: Any, x: Any, w: Any, **params: Any) -> Value:
    """Return the cotangent of the weights: a convolution of the input with `ct` as
    weights, summed over the batch, where strides and dilation change places."""
    strides, dilation = params["strides"], params["dilation"]
    input_dilation, groups = params["input_dilation"], params["groups"]
    (batch, _, *sizes), inputs = x.shape, w.shape[1]
    axes = range(3, 3 + len(sizes))
    split = reshaped(x, (batch, groups, inputs, *sizes))
    turned = transposed(split, (2, 1, 0, *axes))
    result = apply(
        conv_op,
        reshaped(turned, (inputs, groups * batch, *sizes)),
        moved(ct, 0, 1),
        strides=dilation,
        before=params["before"],
        sizes=w.type.shape[2:],
        dilation=strides,
        input_dilation=input_dilation,
        groups=groups,
    )
    return moved(result, 0, 1)  # type: ignore[no-any-return]


def _batch(
    op: OpDef,
    size: Size,
    batched: tuple[bool, ...],
    x: Any,
    w: Any,
    **params: Any,
) -> Sequence[Value]:
    """Batch the input as more examples, the weights as more output channels, and both
    as more groups."""
    groups = params["groups"]
    if batched == (True, False):
        _, n, *rest = x.shape
        [result] = bind(op, [reshaped(x, (size * n, *rest)), w], params)
        return [reshaped(result, (size, n, *result.shape[1:]))]
    if batched == (False, True):
        _, outputs, *rest = w.shape
        of_group = part_of(outputs, groups)
        split = moved(reshaped(w, (size, groups, of_group, *rest)), 0, 1)
        merged = reshaped(split, (groups * size * of_group, *rest))
        [result] = bind(op, [x, merged], params)
        n, _, *sizes = result.shape
        parts = moved(reshaped(result, (n, groups, size, of_group, *sizes)), 2, 0)
        return [reshaped(parts, (size, n, outputs, *sizes))]
    (_, n, _, *sizes), (_, outputs, inputs, *window) = x.shape, w.shape
    # The channels are products with the groups, which may be 0 or a symbol.
    count = size * groups
    x = reshaped(moved(x, 0, 1), (n, count * inputs, *sizes))
    w = reshaped(w, (count * part_of(outputs, groups), inputs, *window))
    [result] = bind(op, [x, w], {**params, "groups": count})
    return [moved(reshaped(result, (n, size, outputs, *result.shape[2:])), 1, 0)]


def _params(*sizes: int, **changes: Any) -> dict[str, Any]:
    ones, zeros = (1,) * len(sizes), (0,) * len(sizes)
    plain = {"strides": ones, "before": zeros, "sizes": sizes, "dilation": ones}
    return {**plain, "input_dilation": ones, "groups": 1, **changes}


conv_op: Final[OpDef] = OpDef(
    name="conv",
    promote=None,
    infer=_infer,  # T[n, g * c, *s], T[g * o, c, *k] -> T[n, g * o, *sizes]
    run=_run,
    lower=_lower,
    jvp=(
        lambda t, out, x, w, **params: conv_op(t, w, **params),
        lambda t, out, x, w, **params: conv_op(x, t, **params),
    ),
    transpose=(_of_input, _of_weights),
    compose=composed,
    batch=_batch,
    samples=(
        Sample(("T[2, 3, 9]", "T[4, 3, 3]"), _params(7), dtypes=NUMERIC),
        Sample(
            ("T[2, 4, 6, 5]", "T[6, 2, 3, 2]"),
            _params(
                *(5, 6),
                strides=(2, 1),
                before=(1, 2),
                dilation=(1, 2),
                input_dilation=(2, 1),
                groups=2,
            ),
            dtypes=NUMERIC,
        ),
        Sample(("T[1, 1, 3, 4, 3]", "T[2, 1, 2, 1, 3]"), _params(2, 4, 1)),
        Sample(("T[0, 2, 4]", "T[3, 2, 2]"), _params(4, before=(1,))),
        Sample(("T[2, 0, 4]", "T[3, 0, 2]"), _params(5, before=(1,))),
        Sample(
            ("T[2, 4, 12, 11]", "T[5, 4, 3, 3]"),
            _params(12, 9, before=(1, 0)),
            low=-0.5,
            high=0.5,
        ),
    ),
)


# --- public functions -----------------------------------------------------------------


def conv(
    x: Any,
    w: Any,
    /,
    *,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Value:
    """Return the convolution of `x` with the filters `w`, over the axes after the first
    two.

    An element of the result is the sum of products of a filter and a window of the
    padded input, which is not reversed: the cross-correlation that networks call a
    convolution (V. Dumoulin and F. Visin, "A guide to convolution arithmetic for deep
    learning", 2016, arXiv:1603.07285). Products of 16-bit floats are summed in float32.

    Shapes:
        x [n, g * c, *s], w [g * o, c, *k] -> [n, g * o, *t], of 1, 2, 3 or more axes
        t = (low + s + high - dilation * (k - 1) - 1) // stride + 1, or 0 if a window
        is larger than the padded input

    Args:
        x: The input: a batch of examples, of some channels.
        w: The filters, one for each channel of the result, of any numeric dtype.
        stride: The distance of neighbouring windows: an int, or one for each axis.
        padding: How many zeros to add at both ends of each axis: an int, or for each
            axis an int or a pair (low, high), where a negative number takes elements
            away. "valid": none; "same": so many that t is s / stride, rounded up, one
            more at the end if the number is odd.
        dilation: The distance of neighbouring elements of a window.
        groups: How many groups the channels form. Each has filters of its own, which
            take its channels only; with one channel in each, the convolution is
            depthwise.

    Raises:
        ShapeError: the ranks differ, or the channels do not fit.
        DTypeError: an operand is a bool.
        ArgumentTypeError: an option is of a type that is not allowed.
        ArgumentValueError: there is not one for each axis, or it is out of range.

    >>> signal = hf.asarray([[[1, 2, 4, 8]]])
    >>> hf.conv(signal, hf.asarray([[[-1, 1]]]))
    Tensor([[[1, 2, 4]]], i64[1, 1, 3])
    """
    x, w, options = _operands("conv", x, w, stride, dilation, groups)
    _check_channels("conv", x.type, w.type, options.groups)
    before, sizes = _windows(x, w, padding, options)
    return apply(
        conv_op,
        x,
        w,
        strides=options.strides,
        before=before,
        sizes=sizes,
        dilation=options.dilation,
        input_dilation=(1,) * len(before),
        groups=options.groups,
    )


def conv_transpose(
    x: Any,
    w: Any,
    /,
    *,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Value:
    """Return the transposed convolution of `x` with `w`: the gradient with respect to
    its input of a `conv` by the same filters and options, whose result is `x`.

    Each element of the input adds the filters, times itself, to a window of the result
    (chapter 4 of the guide that `conv` names).

    Shapes:
        x [n, g * c, *s], w [g * c, o, *k] -> [n, g * o, *t]
        t = (s - 1) * stride + dilation * (k - 1) + 1 - low - high + output_padding

    Args:
        x: The input: a batch of examples, of some channels.
        w: The filters, for each channel of the input one for each channel of the result
            in its group: the layout of `conv`, whose results these channels would be.
        stride: The distance of neighbouring windows: an int, or one for each axis.
        padding: How many elements to take away at both ends of each axis, as `conv`
            adds them: an int, or for each axis an int or a pair (low, high). "valid":
            none; "same": so many that t is s * stride.
        output_padding: How many elements to add at the end of each axis: `conv` with a
            stride gives one size for several sizes of input. Less than `stride` or
            `dilation`.
        dilation: The distance of neighbouring elements of a window.
        groups: How many groups the channels form, each with filters of its own.

    Raises:
        ShapeError: the ranks differ, or the channels do not fit.
        DTypeError: an operand is a bool.
        ArgumentTypeError: an option is of a type that is not allowed.
        ArgumentValueError: there is not one for each axis, or it is out of range.

    >>> signal = hf.asarray([[[1, 2, 3]]])
    >>> hf.conv_transpose(signal, hf.asarray([[[1, 1]]]), stride=2)
    Tensor([[[1, 1, 2, 2, 3, 3]]], i64[1, 1, 6])
    """
    name = "conv_transpose"
    x, w, options = _operands(name, x, w, stride, dilation, groups)
    _check_inputs(x.type, w.type, options.groups)
    before, sizes = _transposed_windows(x, w, padding, output_padding, options)
    return apply(
        conv_op,
        x,
        _exchanged(w, options.groups),
        strides=(1,) * len(before),
        before=before,
        sizes=sizes,
        dilation=options.dilation,
        input_dilation=options.strides,
        groups=options.groups,
    )


# --- arguments ------------------------------------------------------------------------


class _Options(NamedTuple):
    """What both functions take, for each axis of space."""

    strides: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


def _operands(
    name: str, x: Any, w: Any, stride: Any, dilation: Any, groups: Any
) -> tuple[Any, Any, _Options]:
    """Return the operands in one dtype, and the options."""
    x, w = promoted(name, x, w)
    if x.ndim != w.ndim or x.ndim < 2:
        raise ShapeError(
            f"{name}: the input and the weights must have two axes and then those of "
            f"space, as many as the other, and are {x.type} and {w.type}. Add an axis "
            "of size 1 for a batch of one example, or for one channel, with "
            "`hf.expand_dims`."
        )
    count = as_integer(name, "groups", groups)
    if count < 1:
        raise ArgumentValueError(
            f"{name}: `groups` must be at least 1, and is {count}."
        )
    strides, steps = (
        _each(name, argument, value, x.ndim - 2)
        for argument, value in (("stride", stride), ("dilation", dilation))
    )
    return x, w, _Options(strides, steps, count)


def _windows(x: Any, w: Any, padding: Any, options: _Options) -> tuple[Shape, Shape]:
    """Return how much is padded before each axis, and how many windows there are."""
    is_same = _is_word("conv", padding, "same")
    pads = [] if is_same else _pads("conv", padding, len(options.strides))
    before: list[Size] = []
    sizes: list[Size] = []
    each = zip(x.shape[2:], w.shape[2:], options.strides, options.dilation, strict=True)
    for axis, (n, k, s, d) in enumerate(each):
        reach = dilated(k, d)
        if is_same:
            sizes.append(steps(n, s))
            before.append(larger(0, (sizes[-1] - 1) * s + reach - n) // 2)
        else:
            low, high = pads[axis]
            sizes.append(steps(low + n + high - reach + 1, s))
            before.append(low)
    return tuple(before), tuple(sizes)


def _transposed_windows(
    x: Any, w: Any, padding: Any, output_padding: Any, options: _Options
) -> tuple[Shape, Shape]:
    """Return the same of the convolution by which a transposed one is computed: of the
    input with zeros between its elements."""
    name, rank = "conv_transpose", len(options.strides)
    extra = _each(name, "output_padding", output_padding, rank, least=0)
    is_same = _is_word(name, padding, "same")
    if is_same and any(extra):
        raise ArgumentValueError(
            f"{name}: `output_padding` is {output_padding!r}, and `padding` 'same' "
            "leaves nothing to it: it determines the size. Give numbers of padding."
        )
    pads = [] if is_same else _pads(name, padding, rank)
    before: list[Size] = []
    sizes: list[Size] = []
    each = zip(x.shape[2:], w.shape[2:], options.strides, options.dilation, strict=True)
    for axis, (n, k, s, d) in enumerate(each):
        reach, more = dilated(k, d), extra[axis]
        if more >= max(s, d):
            raise ArgumentValueError(
                f"{name}: `output_padding` must be less than `stride` or `dilation`, "
                f"and is {more}, with a stride of {s} and a dilation of {d}."
            )
        if is_same:
            before.append(reach - 1 - larger(0, reach - s) // 2)
            sizes.append(n * s)
        else:
            low, high = pads[axis]
            before.append(reach - 1 - low)
            sizes.append(larger(0, dilated(n, s) + reach - 1 - low - high + more))
    return tuple(before), tuple(sizes)


def _each(
    name: str, argument: str, value: Any, rank: int, *, least: int = 1
) -> tuple[int, ...]:
    """Return an option for each axis, which may be given as one int for all."""
    if not isinstance(value, tuple | list):
        value = (value,) * rank
    numbers = tuple([as_integer(name, argument, n) for n in value])
    if len(numbers) != rank:
        raise ArgumentValueError(
            f"{name}: `{argument}` must be an int, or one for each of {rank} axes, and "
            f"is {value}."
        )
    for number in numbers:
        if number < least:
            raise ArgumentValueError(
                f"{name}: `{argument}` must be at least {least}, and is {number}."
            )
    return numbers


def _is_word(name: str, padding: Any, word: str) -> bool:
    if not isinstance(padding, str):
        return False
    return one_of(name, "padding", padding, ("same", "valid")) == word


def _pads(name: str, padding: Any, rank: int) -> list[tuple[Size, Size]]:
    """Return the padding (low, high) of each axis."""
    if isinstance(padding, str):  # "valid"
        return [(0, 0)] * rank
    each = padding if isinstance(padding, tuple | list) else (padding,) * rank
    pads = [p if isinstance(p, tuple | list) else (p, p) for p in each]
    if len(pads) != rank or any(len(pair) != 2 for pair in pads):
        raise ArgumentValueError(
            f"{name}: `padding` must be an int, 'same', 'valid', or for each of {rank} "
            f"axes an int or a pair (low, high), and is {padding}."
        )
    numbers = [[as_symbol(name, "padding", n) for n in pair] for pair in pads]
    return [(low, high) for low, high in numbers]


def _check_inputs(x: TensorType, w: TensorType, groups: int) -> None:
    """Check the channels of a transposed convolution."""
    if x.shape[1] != w.shape[0]:
        raise ShapeError(
            f"conv_transpose: the input {x} has {x.shape[1]} channels, and the weights "
            f"{w} are for {w.shape[0]}. Axis 0 of the weights must have the channels "
            "of the input."
        )
    if divided(x.shape[1], groups) is None:
        raise ShapeError(
            f"conv_transpose: {x.shape[1]} channels of the input {x} cannot be shared "
            f"among {groups} groups."
        )
