"""`vmap`: a function of one example as a function of many.

The function is traced on the types of one example, and its graph is interpreted with
batch rules (`OpDef.batch`, `RegionOperator.batch_rule`). A value that is the same for
all examples stays one; of any other the examples lie along axis 0. What depends on no
batched value is computed once.
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

    text   how a user would write it
    axis   along which its examples lie; None: it is the same for all
    """

    text: str
    value: Any
    axis: int | None


def vmap(f: Callable[..., Any], in_dims: Any = 0, out_dims: Any = 0) -> Any:
    """A function that does for many examples at once what `f` does for one.

    Args:
        f: Takes and returns pytrees of tensors of one example. It may read tensors of
            enclosing functions, which are the same for all examples, and must not write
            to them. An argument with examples is a value: a write to it is one to a
            private copy.
        in_dims: Along which axis of each positional argument the examples lie: an int
            or None (the same for all examples, passed as it is), or a tuple with one of
            these, or a pytree of them, for each argument. Arguments by name have them
            along axis 0.
        out_dims: Where the results are to have them: an int, or a pytree of ints, each
            for a part of the result. None: the result is the same for all examples.

    Raises:
        ArgumentTypeError: `f` is no function, a leaf with examples no tensor, or a
            dimension no int (the last two at a call).
        ArgumentValueError: no argument has examples (at a call).
        AxisError: a tensor has no such axis (at a call).
        LengthError: leaves have different numbers of examples (at a call).
        StructureError: `in_dims` or `out_dims` do not fit the arguments or the result.
        MutationError: `f` writes to what it closes over (at a call).
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
    return recordable(call, made=("vmap", f, options))


def over_examples(
    f: Callable[[Sequence[Any]], Sequence[Operand]], size: Size, lanes: Sequence[Lane]
) -> tuple[Lane, ...]:
    """What `f` returns for values some of which are batched; so may its results be."""
    values = [x.value if isinstance(x, Batched) else None for x in lanes]
    leaves = [_Leaf(f"x{i}", x, None) for i, x in enumerate(lanes)]
    spec = pytree.structure(((0,) * len(lanes), {}))
    trace = _trace(lambda *flat: list(f(flat)), values, leaves, spec)
    return evaluate(trace.graph, size, trace.args)


def _flatten(
    f: Callable[..., Any], in_dims: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[_Leaf], Spec]:
    """The leaves of the arguments, and where their examples lie.

    Raises:
        StructureError: `in_dims` does not have the structure of a part of them.
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


def _axis(what: str, dim: Any, ndim: int) -> int:
    """A dimension of the user's as an axis, counted from the front.

    Raises:
        AxisError: there is none.
    """
    if not ndim:
        raise AxisError(
            f"vmap: {what} is a scalar, and has no axis {dim} of examples. Name None "
            "for what is the same for all examples; of a list of numbers, each of "
            "which is an argument by itself, make a tensor: `hf.asarray([...])`."
        )
    if not -ndim <= dim < ndim:
        raise AxisError(
            f"vmap: {what} has no axis {dim} of examples. Name another one, or None "
            "for what is the same for all examples."
        )
    return int(dim) % ndim


def _spread(argument: str, dims: Any, root: str, spec: Spec) -> list[int | None]:
    """The dimension of each leaf of a tree of structure `spec`.

    Raises:
        StructureError: `dims` does not have the structure of a part of the tree.
        ArgumentTypeError: one of them is neither an int nor None.
    """
    found = pytree.broadcast_prefix(dims, spec)
    if found is None:
        raise StructureError(
            f"vmap: `{argument}` must be an int, None, or a tree of these that begins "
            f"as `{root}` does, {spec}, and is {dims!r}."
        )
    for dim in found:
        if dim is not None and type(dim) is not int:
            raise ArgumentTypeError(
                f"vmap: `{argument}` must hold ints and None, and has "
                f"`{type(dim).__name__}`."
            )
    return found


def _in_front(leaf: _Leaf) -> Value | None:
    """A leaf with its examples along axis 0; None: it has none."""
    if leaf.axis is None:
        return None
    return moved(as_value(leaf.value), leaf.axis, 0)  # type: ignore[no-any-return]


def _matched(values: Sequence[Value | None]) -> list[Value | None]:
    """The leaves with as many batch elements, where only a run can compare them."""
    batched = [v for v in values if v is not None]
    found = iter(matched("vmap", batched, [0] * len(batched)))
    return [None if v is None else next(found) for v in values]


def _size_of(leaves: Sequence[_Leaf], values: Sequence[Value | None]) -> Size:
    """How many examples there are.

    Raises:
        ArgumentValueError: there is no argument with examples.
        LengthError: leaves have different numbers of them.
    """
    found: tuple[str, Size] | None = None
    for leaf, value in zip(leaves, values, strict=True):
        if value is None:
            continue
        size = value.shape[0]
        if found is None:
            found = leaf.text, size
        elif not equals(found[1], size):
            raise LengthError(
                f"vmap: all arguments must have as many examples. `{found[0]}` has "
                f"{found[1]}, and `{leaf.text}` has {size} along axis {leaf.axis}. "
                "Name another axis in `in_dims`, or None for what is the same for all."
            )
    if found is None:
        raise ArgumentValueError(
            "vmap: no argument has examples. Name the axis of one in `in_dims`, or "
            "call the function as it is."
        )
    return found[1]


class _Trace(NamedTuple):
    """A function on one example as a graph, what that is given, and what it returns."""

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
    given: dict[Any, Lane] = {}
    inputs: list[Any] = []
    for leaf, value in zip(leaves, values, strict=True):
        if value is None:
            inputs.append(leaf.value)
            continue
        lane = Batched(value)
        tensor = tracer.operand(lane.type, leaf.text)
        given[tensor.source] = lane
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
                given[var] = TracedTensor(parent, parent.symbol(symbol_))
    given |= {c.input: c.origin for c in tracer.captures.values()}
    return _Trace(graph, [given[v] for v in graph.inputs], out_spec)


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
    """A result with its examples where the user wants them.

    Raises:
        ArgumentValueError: it has examples, and is to have none.
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


def _private(results: Sequence[Value], given: Sequence[Value | None]) -> list[Value]:
    """Results that share memory with no argument and with each other."""
    taken = {id(v) for v in given}
    found: list[Value] = []
    for value in results:
        shared = not isinstance(value, EagerTensor) or value._storage is not None
        found.append(apply(copy, value) if shared or id(value) in taken else value)
        taken.add(id(value))
    return found
