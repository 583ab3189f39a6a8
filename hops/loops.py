"""Shared by loops: carries whose types settle, slices, and stacks of results."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from math import inf
from typing import Any, Final, NamedTuple

import numpy as np

from hopflow import dtypes, pytree
from hopflow.bind import Operand, Value, current
from hopflow.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    LengthError,
    ShapeError,
    TraceError,
)
from hopflow.graph.core import Constant, Graph
from hopflow.graph.regions import Runs
from hopflow.graph.rewriting import fresh_symbol
from hopflow.graph.types import TensorType, same_size
from hopflow.hops.base import Call
from hopflow.hops.subgraphs import (
    Body,
    Function,
    as_value,
    cast_output,
    flatten_operands,
    in_trace,
    mismatches,
    retyped,
    trace_body,
)
from hopflow.ops.check import check
from hopflow.ops.convert import apply
from hopflow.ops.deferred import matched, resized
from hopflow.ops.dynamic import dynamic_index
from hopflow.ops.joining import stack
from hopflow.ops.manipulation import moveaxis
from hopflow.ops.opdef import OPERATIONS, convert_to
from hopflow.ops.rules import normalize_axis
from hopflow.ops.sizes import is_unbacked
from hopflow.pytree import Spec
from hopflow.symbolic.size import Size, Symbol, SymInt, free_symbols, substitute
from hopflow.tensor import EagerTensor, Storage
from hopflow.trace.dims import Dim, plan_leaves
from hopflow.trace.rollback import mark, rollback
from hopflow.trace.source import name_of, parameter_names
from hopflow.trace.tracer import Tracer

# --- carries --------------------------------------------------------------------------


def calling(fn: Callable[..., Any], tree: Any, spec: Spec) -> Callable[[Any], Any]:
    """Return a function of flat inputs that calls `fn` with them, spread if `tree` is a
    tuple."""
    if type(tree) is tuple:
        return lambda flat: fn(*pytree.unflatten(spec, flat))
    return lambda flat: fn(pytree.unflatten(spec, flat))


def settled_types(
    types: Sequence[TensorType], results: Sequence[TensorType]
) -> list[TensorType]:
    """Return the carry's types: a weak dtype gives way to the one that the body
    returns."""
    return [
        _settled(a, b) if a.weak and not (b.weak and b.dtype is a.dtype) else a
        for a, b in zip(types, results, strict=True)
    ]


def _settled(type_: TensorType, result: TensorType) -> TensorType:
    dtype, weak = dtypes.promote((type_.dtype, True), (result.dtype, result.weak))
    return TensorType(dtype, type_.shape, weak)


def fits(type_: TensorType, result: TensorType) -> bool:
    """Return True if a weak result may be converted to the dtype of its carry."""
    if not result.weak or result.dtype is type_.dtype:
        return False
    promoted = dtypes.promote((type_.dtype, False), (result.dtype, True))
    return promoted[0] is type_.dtype


def check_carry(
    call: Call, function: Function, types: Sequence[TensorType], body: Sequence[Any]
) -> None:
    """Check the types of a carry that a body returned.

    Raises:
        CarryTypeError: they differ from those passed in; the leaves' paths are named.
    """
    results = with_expected_sizes(call, types, [o.type for o in body])
    if leaves := mismatches(call.paths, types, results):
        fn = name_of(function.fn)
        raise call.type_error(call.name, fn, function.where, leaves)


def match_output(call: Call, body: Body, i: int, type_: TensorType) -> None:
    """Make each step check the sizes of carry `i` that only a run can compare."""
    changing = call.dynamic.get(i, {}) if call.dynamic else {}
    output = body.outputs[i]
    if not isinstance(output, Value) or output.type.ndim != type_.ndim:
        return
    for axis, size in enumerate(type_.shape):
        n = output.type.shape[axis]
        if axis not in changing and (is_unbacked(n) or is_unbacked(size)):
            name = f"{call.name}: `{call.paths[i]}`"
            keep = partial(resized, name, body.outputs[i], axis, size)
            body.outputs[i] = in_trace(body, keep)


def trace_settled(
    call: Call,
    path: str,
    function: Function,
    count: int,
    check: Callable[[Body], None],
    other_types: Sequence[TensorType] = (),
) -> tuple[Body, list[TensorType]]:
    """Trace a body whose first `count` inputs and outputs are the carry.

    Where a weak carry takes another dtype the body is traced again, until the types
    returned are those passed in. Types only move up the lattice of promotion, so the
    number of traces is bounded by the length of its longest path.

    Args:
        check: Checks the structure of the results, before anything else is done.
        other_types: The types of the inputs after the carry.

    Returns:
        The body, with carry outputs of the carry's types; and these types.

    Raises:
        CarryTypeError: the carry's types do not settle.
    """
    settled = [o.type for o in call.operands[:count]]
    parent = current()
    marks = mark(parent) if isinstance(parent, Tracer) else []
    while True:
        types = settled
        inputs = [*types, *other_types]
        body = trace_body(call.name, path, function, inputs, dynamic=call.dynamic)
        check(body)
        settled = settled_types(types, body.types[:count])
        pairs = zip(settled, types, strict=True)
        if all(a.dtype is b.dtype and a.weak is b.weak for a, b in pairs):
            break
        rollback(marks)
    for i, type_ in enumerate(types):
        if fits(type_, body.outputs[i].type):
            cast_output(body, i, type_.dtype)
        match_output(call, body, i, type_)
    check_carry(call, function, types, body.outputs[:count])
    if call.dynamic:
        in_trace(body, lambda: check_sizes(call, body.types))
    return body, types


def first_carry(
    call: Call, count: int, settle: Callable[[], Sequence[TensorType]]
) -> list[Value]:
    """Return the carry that the first step of debug mode takes.

    Args:
        settle: Traces the body and returns the types on which the carry settles. It is
            called if weak leaves might change. If the body cannot be traced, the types
            settle as it runs.
    """
    carry: Sequence[Operand] = call.operands[:count]
    if any(o.type.weak for o in carry[call.counts :]):  # a counter keeps its type
        with suppress(TraceError):
            carry = as_types(carry, settle())
    return [as_value(o) for o in carry]


def settle_step(
    call: Call,
    function: Function,
    before: Sequence[Value],
    after: Sequence[Value],
    *,
    settles: bool = True,
) -> list[Value]:
    """Return the carry of one step of debug mode as the next step takes it.

    Args:
        settles: Whether weak types give way to those that were returned.

    Raises:
        CarryTypeError: its types differ from those passed in.
    """
    types = [v.type for v in before]
    if settles:
        types = settled_types(types, [v.type for v in after])
    carry: list[Any] = [
        convert_to(v, t.dtype, weak=t.weak) if fits(t, v.type) else v
        for v, t in zip(after, types, strict=True)
    ]
    check_carry(call, function, types, carry)
    check_sizes(call, [v.type for v in carry])
    return carry


def as_types(operands: Sequence[Operand], types: Sequence[TensorType]) -> list[Operand]:
    """Return the first carry, converted to the types on which it has settled."""
    return [
        retyped(o, t.dtype, weak=t.weak) for o, t in zip(operands, types, strict=True)
    ]


# --- sizes that steps change ----------------------------------------------------------


def dynamic_sizes(
    op: str, choice: Any, tree: Any, fn: Callable[..., Any]
) -> dict[int, dict[int, Dim]]:
    """Return the axes of a carry whose sizes may change, from `dynamic_carry`.

    Raises:
        ArgumentTypeError, ArgumentValueError: it names a leaf or an axis that the carry
            does not have.
    """
    if choice is None:
        return {}
    args = tree if type(tree) is tuple else (tree,)
    names = parameter_names(fn, len(args))
    plans = plan_leaves(op, choice, args, names, "dynamic_carry")
    dynamic: dict[int, dict[int, Dim]] = {}
    for i, (plan, leaf) in enumerate(zip(plans, pytree.flatten(tree)[0], strict=True)):
        axes = getattr(leaf, "ndim", 0)
        choices = plan if isinstance(plan, tuple) else (plan,) * axes
        dims = {
            axis: dim if isinstance(dim, Dim) else Dim(f"n{i}_{axis}")
            for axis, dim in enumerate(choices)
            if dim
        }
        if dims:
            dynamic[i] = dims
    return dynamic


def with_expected_sizes(
    call: Call, expected: Sequence[TensorType], actual: Sequence[TensorType]
) -> list[TensorType]:
    """Return the actual types, with the expected sizes on axes whose size may
    change."""
    types = list(actual)
    for i, dims in call.dynamic.items():
        if types[i].ndim == expected[i].ndim:
            shape = list(types[i].shape)
            for axis in dims:
                shape[axis] = expected[i].shape[axis]
            types[i] = types[i].with_shape(shape)
    return types


def check_sizes(call: Call, types: Sequence[TensorType]) -> None:
    """Check the sizes that steps change: now, or in the trace that is open.

    Raises:
        CheckError: a size is not allowed.
    """
    first: dict[str, tuple[Dim, Size, str]] = {}
    for i, dims in call.dynamic.items():
        for axis, dim in dims.items():
            size, place = types[i].shape[axis], f"axis {axis} of `{call.paths[i]}`"
            previous = first.setdefault(dim.name, (dim, size, place))
            low, high = dim.of(dim.min), dim.of(dim.max)
            most = "" if high == inf else f" to {high}"
            allowed = f"a size from {low}{most}"
            conditions: list[tuple[Any, str]] = [(size >= low, allowed)]
            if most:
                conditions.append((size <= high, allowed))
            if dim.factor > 1:
                fits = (size - dim.offset) % dim.factor == 0
                conditions.append((fits, f"a size `{dim}`"))
            if previous[2] != place:
                other_dim, other_size, other_place = previous
                is_equal = (size - dim.offset) * other_dim.factor == (
                    other_size - other_dim.offset
                ) * dim.factor
                conditions.append((is_equal, f"the `{dim}` that {other_place} gives"))
            for holds, requirement in conditions:
                if holds is not True:
                    message = f"{call.name}: {place} must have {requirement}, as "
                    check(holds, message + "`dynamic_carry` has it")


def changed_types(body: Graph, count: int) -> list[TensorType]:
    """Return the types of the last carry, with a new symbol for each size that steps
    change."""
    types = [v.type for v in body.operands[:count]]
    defined = {v.node.symbol for v in body.symbols}
    named = free_symbols(*(n for t in types for n in t.shape))
    new: dict[Symbol, Size] = {s: fresh_symbol(s) for s in named if s not in defined}
    if not new:
        return types
    return [t.with_shape([substitute(n, new) for n in t.shape]) for t in types]


# --- stacks ---------------------------------------------------------------------------


class Stacks(NamedTuple):
    """The stacks that a loop slices: leaves with the axis first, and the number of
    slices."""

    leaves: list[Operand]
    spec: Spec
    length: Size


def flatten_stacks(op: str, tree: Any, length: Any, dim: int) -> Stacks:
    """Return the leaves of `xs` with axis `dim` moved to the front, and the loop's
    length.

    Raises:
        ArgumentTypeError: a leaf is not a tensor, or `length` is not a size.
        ArgumentValueError: `length` is negative.
        AxisError: a leaf has no axis `dim`.
        LengthError: leading sizes differ from each other or from `length`, a leaf has
            no axes, or there is neither a leaf nor a `length`.
    """
    leaves, spec = flatten_operands(op, "xs", tree)
    if length is not None:
        _check_length(op, length)
    sizes: list[Size] = []
    moved: list[Operand] = []
    for i, leaf in enumerate(leaves):
        type_ = leaf.type
        if not type_.ndim:
            path = pytree.leaf_paths(spec, "xs")[i]
            raise LengthError(
                f"{op}: `{path}` is a scalar ({type_}), and has no axis to take slices "
                "along. Close over it, or repeat it with `hf.broadcast_to`; of a list "
                "of numbers `hf.asarray` makes one tensor."
            )
        axis = normalize_axis(op, dim, type_.ndim)
        sizes.append(type_.shape[axis])
        moved.append(moveaxis(leaf, axis, 0) if axis else leaf)
    if not sizes and length is None:
        raise LengthError(
            f"{op}: without tensors in `xs` the number of steps is unknown. Give "
            "`length`."
        )
    moved = matched(op, moved, [0] * len(moved), length)
    sizes = [x.type.shape[0] for x in moved]
    total = sizes[0] if sizes else length
    if length is not None and not _equal(length, total):
        raise LengthError(
            f"{op}: `length` is {length}, and `xs` has {total} slices along axis {dim}."
            " Leave `length` out."
        )
    if not all(_equal(n, total) for n in sizes):
        paths = pytree.leaf_paths(spec, "xs")
        width = max(map(len, paths))
        rows = "\n".join(
            f"  {path:<{width}}  {leaf.type}, with {n}"
            for path, leaf, n in zip(paths, leaves, sizes, strict=True)
        )
        raise LengthError(
            f"{op}: the tensors of `xs` must have as many slices along axis {dim}.\n"
            f"{rows}\nCut or pad them to one size."
        )
    return Stacks(moved, spec, total)


def _equal(a: Size, b: Size) -> bool:
    return same_size(a, b) or a == b


_MOST_STEPS: Final = 2**63 - 1


def _check_length(op: str, length: Any) -> None:
    if isinstance(length, bool) or not isinstance(length, int | SymInt):
        raise ArgumentTypeError(
            f"{op}: `length` must be an int, and is `{type(length).__name__}`. Use "
            "`hf.fori_loop` for a number of steps that is known at run time."
        )
    if isinstance(length, int) and length > _MOST_STEPS:
        raise ArgumentValueError(f"{op}: `length` must fit int64, and is {length}.")
    if isinstance(length, int) and length < 0:
        raise ArgumentValueError(
            f"{op}: `length` must not be negative, and is {length}."
        )


def empty_stacks(types: Sequence[TensorType]) -> list[Value]:
    """Return zeros of these types: the stacks of a loop before its first step."""
    return [apply(OPERATIONS["full"], _zero(t), shape=t.shape) for t in types]


def _zero(type_: TensorType) -> Constant:
    zero = {"b": False, "f": 0.0}.get(type_.dtype.kind, 0)
    return Constant(zero, TensorType(type_.dtype, (), type_.weak))


def runs_of(length: Size) -> Runs:
    """Return how often the body of a loop of `length` steps runs."""
    return "at least once" if isinstance(length, int) and length else "any times"


def slice_types(stacks: Sequence[TensorType]) -> list[TensorType]:
    """Return the types of one step's slices."""
    return [t.with_shape(t.shape[1:]) for t in stacks]


def slices(stacks: Sequence[Any], at: int) -> list[Any]:
    """Return the slices of one step."""
    return [x[at] for x in stacks]


def read_row(stack: Operand, at: Operand) -> Value:
    """Return the slice at a position that is known at run time."""
    return apply(dynamic_index, stack, at, axes=(0,))


def write_row(stack: Value, row: Operand, at: Operand) -> Value:
    """Return `stack` with the slice at that position replaced."""
    assert dynamic_index.unview is not None
    return dynamic_index.unview(stack, as_value(row), at, axes=(0,))


def stacked_types(types: Sequence[TensorType], length: Size) -> list[TensorType]:
    """Return the types of each step's results, stacked."""
    return [t.with_shape((length, *t.shape)) for t in types]


def stacked_results(
    name: str, body: Graph, types: Sequence[TensorType], length: Size
) -> list[TensorType]:
    """Return the types of results of `body`, stacked.

    Raises:
        ShapeError: a size is computed in the body, so that it may differ between steps.
    """
    defined = {v.node.symbol for v in body.symbols}
    for type_ in types:
        for symbol in free_symbols(*type_.shape):
            if symbol not in defined:
                raise ShapeError(
                    f"{name}: what steps return is stacked, and one result is {type_}: "
                    f"each step makes the size `{symbol}` anew. Reduce it in the step, "
                    "or write it into a tensor of a size that is known outside."
                )
    return stacked_types(types, length)


def stacked(rows: Sequence[Sequence[Value]]) -> list[Value]:
    """Return the results of all steps (at least one row) stacked along axis 0."""
    return [_stack(column) for column in zip(*rows, strict=True)]


def _stack(values: Sequence[Value]) -> Value:
    if current().is_eager and len({v.type for v in values}) == 1:
        arrays = [v.host_array for v in values if isinstance(v, EagerTensor)]
        if len(arrays) == len(values):
            weak = all(v.type.weak for v in values)
            memory = Storage(private=True)
            result = EagerTensor(np.stack(arrays), weak=weak, storage=memory)
            current().adopt(result)
            return result
    return stack(list(values))


def spread_specs(tree: Any, spec: Spec) -> list[Spec]:
    """Return the structures of the arguments as which a carry or operands are
    passed."""
    return spec.children() if type(tree) is tuple else [spec]
