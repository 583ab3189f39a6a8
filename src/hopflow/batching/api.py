"""`vmap`: turn a function of one batch element into a function of a batch.

The function is traced on the types of one batch element, and its graph is interpreted
with batch rules (`OpDef.batch`, `RegionOperator.batch_rule`). A value that is the same
for all batch elements stays unbatched; a batched value has them along axis 0. What
depends on no batched value is computed once.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from hopflow import pytree
from hopflow.batching.graphs import Batched, Lane, as_batched, evaluate
from hopflow.bind import Operand, Value, current, recordable
from hopflow.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    AxisError,
    LengthError,
    MutationError,
    ResultTypeError,
    StructureError,
)
from hopflow.graph.core import Graph
from hopflow.ops.convert import apply, as_value, copy
from hopflow.ops.deferred import matched
from hopflow.ops.opdef import as_operand, in_range
from hopflow.ops.sizes import equals
from hopflow.ops.views import moved
from hopflow.pytree import Spec
from hopflow.recursion import deep_recursion
from hopflow.symbolic.size import Size
from hopflow.tensor import EagerTensor
from hopflow.trace.functional import TracedTensor
from hopflow.trace.rollback import unchanged_on_error
from hopflow.trace.source import argument_texts, name_of, parameter_names, user_env
from hopflow.trace.tensor_types import opened
from hopflow.trace.tracer import Tracer, trace_into


class _Leaf(NamedTuple):
    """A leaf of the arguments.

    text   the argument as a user would write it
    axis   the axis of the batch elements; None if the leaf is the same for all
    """

    text: str
    value: Any
    axis: int | None


def vmap(f: Callable[..., Any], in_dims: Any = 0, out_dims: Any = 0) -> Any:
    """Return a function that applies `f` to all elements of a batch at once.

    Args:
        f: Takes and returns pytrees of tensors of one batch element. It may read
            tensors of enclosing functions, which are the same for all elements, and
            must not write to them. A batched argument is passed by value: a write to it
            changes a private copy.
        in_dims: The axis of each positional argument along which the batch elements
            lie: an int (from the end if it is negative), None (the argument is the same
            for all elements, and is passed as it is), or a pytree of these that is a
            prefix of the argument; a tuple gives one of these for each argument.
            Keyword arguments have the batch elements along axis 0.
        out_dims: The axis of each result along which to put the batch elements: an int,
            or a pytree of ints that is a prefix of the result. None asserts that the
            result is the same for all elements.

    Returns:
        A function of the same arguments. `f` gets each batched argument without its
        axis `in_dims`, whose size n is the batch size; each result has an axis of size
        n at `out_dims`, and the dtype that `f` returns.

    Raises:
        ArgumentTypeError: `f` is no function, a batched leaf is no tensor, or a
            dimension is no int (the last two at a call).
        ArgumentValueError: no argument is batched (at a call).
        AxisError: a tensor has no such axis (at a call).
        LengthError: leaves have different numbers of batch elements (at a call).
        StructureError: `in_dims` or `out_dims` do not fit the arguments or the result.
        MutationError: `f` writes to what it closes over (at a call).

    >>> hf.vmap(lambda row, k: row.sum() * k, in_dims=(0, None))(hf.ones((2, 3)), 2.0)
    Tensor([6., 6.], f32[2])
    """
    if not callable(f):
        raise ArgumentTypeError(
            f"vmap: `f` must be a function, and is `{type(f).__name__}`."
        )
    if isinstance(in_dims, list):
        in_dims = tuple(in_dims)

    @functools.wraps(f)
    @deep_recursion()
    def call(*args: Any, **kwargs: Any) -> Any:
        leaves, spec = _flatten(f, in_dims, args, kwargs)
        values = _matched([_in_front(leaf) for leaf in leaves])
        size = _size_of(leaves, values)
        with unchanged_on_error():
            trace = _trace(f, values, leaves, spec)
        results = evaluate(trace.graph, size, trace.args)
        dims = _spread("out_dims", out_dims, "result", trace.spec)
        paths = pytree.leaf_paths(trace.spec, "result")
        rows = zip(results, dims, paths, strict=True)
        return pytree.unflatten(
            trace.spec, _private([_placed(f, size, *row) for row in rows], values)
        )

    options = {"in_dims": in_dims, "out_dims": out_dims}
    return recordable(call, transform=("vmap", f, options))


def over_examples(
    f: Callable[[Sequence[Any]], Sequence[Operand]], size: Size, lanes: Sequence[Lane]
) -> tuple[Lane, ...]:
    """Return `f` of lanes, some of which may be batched; so may its results be."""
    values = [x.value if isinstance(x, Batched) else None for x in lanes]
    leaves = [_Leaf(f"x{i}", x, None) for i, x in enumerate(lanes)]
    spec = pytree.structure(((0,) * len(lanes), {}))
    trace = _trace(lambda *flat: list(f(flat)), values, leaves, spec)
    return evaluate(trace.graph, size, trace.args)


def _flatten(
    f: Callable[..., Any], in_dims: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[_Leaf], Spec]:
    """Return the leaves of the arguments with their batch axes, and their structure.

    Raises:
        StructureError: `in_dims` is no prefix of the arguments.
        ArgumentTypeError, AxisError: see `vmap`.
    """
    names = [*parameter_names(f, len(args)), *kwargs]
    flat, spec = pytree.flatten((args, kwargs))
    positional, named = spec.children()
    dims = _spread("in_dims", in_dims, "args", positional)
    dims += [0] * named.num_leaves
    texts = argument_texts(names, [*positional.children(), *named.children()])
    rows = zip(texts, flat, dims, strict=True)
    return [_leaf(*row) for row in rows], spec


def _leaf(text: str, leaf: Any, dim: Any) -> _Leaf:
    if dim is None:
        return _Leaf(text, leaf, None)
    value = as_operand("vmap", text, leaf)
    return _Leaf(text, value, _axis(f"`{text}`, {value.type},", dim, value.type.ndim))


def _axis(subject: str, dim: Any, ndim: int) -> int:
    """Return a dimension that the user gave as an axis, counted from the front.

    Raises:
        AxisError: there is no such axis.
    """
    if not ndim:
        raise AxisError(
            f"vmap: {subject} is a scalar, and has no axis {dim} of examples. Name "
            "None for what is the same for all examples; of a list of numbers, each of "
            "which is an argument by itself, make a tensor: `hf.asarray([...])`."
        )
    if not -ndim <= dim < ndim:
        raise AxisError(
            f"vmap: {subject} has no axis {dim} of examples. Name another one, or None "
            "for what is the same for all examples."
        )
    return int(dim) % ndim


def _spread(argument: str, dims: Any, root: str, spec: Spec) -> list[int | None]:
    """Return the dimension of each leaf of a tree of structure `spec`.

    Raises:
        StructureError: `dims` is no prefix of the tree.
        ArgumentTypeError: one of them is neither an int nor None.
    """
    leaf_dims = pytree.broadcast_prefix(dims, spec)
    if leaf_dims is None:
        raise StructureError(
            f"vmap: `{argument}` must be an int, None, or a tree of these that begins "
            f"as `{root}` does, {spec}, and is {dims!r}."
        )
    for dim in leaf_dims:
        if dim is not None and type(dim) is not int:
            raise ArgumentTypeError(
                f"vmap: `{argument}` must hold ints and None, and has "
                f"`{type(dim).__name__}`."
            )
    return leaf_dims


def _in_front(leaf: _Leaf) -> Value | None:
    """Return a leaf with its batch elements along axis 0; None if it is unbatched."""
    if leaf.axis is None:
        return None
    return moved(as_value(leaf.value), leaf.axis, 0)  # type: ignore[no-any-return]


def _matched(values: Sequence[Value | None]) -> list[Value | None]:
    """Return the leaves with equal batch sizes, which the run checks if need be."""
    batched = [v for v in values if v is not None]
    checked = iter(matched("vmap", batched, [0] * len(batched)))
    return [None if v is None else next(checked) for v in values]


def _size_of(leaves: Sequence[_Leaf], values: Sequence[Value | None]) -> Size:
    """Return the number of batch elements.

    Raises:
        ArgumentValueError: no argument is batched.
        LengthError: leaves have different numbers of batch elements.
    """
    first: tuple[str, Size] | None = None
    for leaf, value in zip(leaves, values, strict=True):
        if value is None:
            continue
        size = value.shape[0]
        if first is None:
            first = leaf.text, size
        elif not equals(first[1], size):
            raise LengthError(
                f"vmap: all arguments must have as many examples. `{first[0]}` has "
                f"{first[1]}, and `{leaf.text}` has {size} along axis {leaf.axis}. "
                "Name another axis in `in_dims`, or None for what is the same for all."
            )
    if first is None:
        raise ArgumentValueError(
            "vmap: no argument has examples. Name the axis of one in `in_dims`, or "
            "call the function as it is."
        )
    return first[1]


class _Trace(NamedTuple):
    """The graph of a function of one batch element.

    args   what to evaluate the graph on
    spec   the structure of the result
    """

    graph: Graph
    args: list[Lane]
    spec: Spec


def _trace(
    f: Callable[..., Any],
    values: Sequence[Value | None],
    leaves: Sequence[_Leaf],
    spec: Spec,
) -> _Trace:
    parent = current()
    tracer = (
        Tracer(None, name_of(f), env=user_env())
        if parent.is_eager
        else Tracer(parent, name_of(f), path=getattr(parent, "path", ""))
    )
    lanes: dict[Any, Lane] = {}
    inputs: list[Any] = []
    for leaf, value in zip(leaves, values, strict=True):
        if value is None:
            inputs.append(leaf.value)
            continue
        lane = Batched(value)
        tensor = tracer.operand(lane.type, leaf.text)
        lanes[tensor.source] = lane
        inputs.append(tensor)
    args, kwargs = pytree.unflatten(spec, inputs)

    def run() -> tuple[list[Operand], Spec]:
        flat, spec = pytree.flatten(opened(f(*args, **kwargs), tracer))
        return [_result(f, spec, i, leaf) for i, leaf in enumerate(flat)], spec

    outputs, out_spec = trace_into(tracer, run, ())
    graph = tracer.close(outputs)
    _refuse_writes(f, tracer)
    if isinstance(parent, Tracer):
        for symbol_, var in tracer.symbols.items():
            if var.node.section == "symbol":
                lanes[var] = TracedTensor(parent, parent.symbol(symbol_))
    lanes |= {c.input: c.origin for c in tracer.captures.values()}
    return _Trace(graph, [lanes[v] for v in graph.inputs], out_spec)


def _result(f: Callable[..., Any], spec: Spec, i: int, leaf: Any) -> Operand:
    try:
        return in_range(as_operand("vmap", i, leaf))
    except ArgumentTypeError:
        path = pytree.leaf_paths(spec, "result")[i]
        raise ResultTypeError(
            f"vmap: `{name_of(f)}` must return tensors or numbers, and its `{path}` "
            f"is `{type(leaf).__name__}`."
        ) from None


def _refuse_writes(f: Callable[..., Any], tracer: Tracer) -> None:
    for capture in tracer.written_captures().values():
        raise MutationError(
            f"vmap: `{name_of(f)}` writes to a captured tensor {capture.origin.type}, "
            "but its examples are independent of each other. Return the new value "
            "instead."
        )


def _placed(
    f: Callable[..., Any], size: Size, lane: Lane, dim: int | None, path: str
) -> Value:
    """Return a result with its batch elements along the axis that the user gave.

    Raises:
        ArgumentValueError: it is batched, and `out_dims` says None.
        AxisError: it has no such axis.
    """
    if dim is None:
        if isinstance(lane, Batched):
            raise ArgumentValueError(
                f"vmap: `out_dims` is None for `{path}` of `{name_of(f)}`, which "
                "differs from example to example. Name an axis for the examples."
            )
        return as_value(lane)
    value = as_batched(size, lane).value
    axis = _axis(f"`{path}`, {value.type},", dim, value.ndim)
    return moved(value, 0, axis)  # type: ignore[no-any-return]


def _private(results: Sequence[Value], inputs: Sequence[Value | None]) -> list[Value]:
    """Copy the results that share memory with an argument or each other."""
    seen = {id(v) for v in inputs}
    copies: list[Value] = []
    for value in results:
        shared = not isinstance(value, EagerTensor) or value._storage is not None
        copies.append(apply(copy, value) if shared or id(value) in seen else value)
        seen.add(id(value))
    return copies
