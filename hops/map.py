"""`map`: a function applied to each slice independently; all its rules."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final, final

from hopflow import pytree
from hopflow.batching.api import vmap
from hopflow.bind import Operand, Value, bind, run_graph, slots
from hopflow.errors import ArgumentValueError
from hopflow.graph.core import Graph, Node
from hopflow.graph.interpreter import Evaluate
from hopflow.graph.origin import origin, replaying
from hopflow.graph.regions import Port, Region, Role, Signature, roles
from hopflow.graph.regions import result_types as bound_result_types
from hopflow.graph.rewriting import effects
from hopflow.graph.types import TensorType
from hopflow.hops.base import (
    Call,
    RegionOperator,
    derived,
    numbered,
    split_args,
)
from hopflow.hops.loops import (
    empty_stacks,
    flatten_stacks,
    runs_of,
    slice_types,
    slices,
    stacked,
    stacked_results,
)
from hopflow.hops.scan import transpose_scan
from hopflow.hops.scanning import scan
from hopflow.hops.subgraphs import (
    Body,
    Function,
    Recorder,
    Written,
    as_value,
    close_bodies,
    flatten_operands,
    refuse_writes,
    require_callable,
    trace_body,
)
from hopflow.loop_ir.kernels import CountedLoop
from hopflow.ops.creation import arange
from hopflow.ops.joining import concat
from hopflow.ops.manipulation import reshape
from hopflow.ops.rules import as_integer
from hopflow.progress import Progress, as_progress, in_batches
from hopflow.symbolic.size import Size
from hopflow.trace.source import check_arity
from hopflow.zeros import Tangent


@final
class Map(RegionOperator):
    """`map(symbols; xs, captures; body, length) -> ys`

    xs       T[length, *s] each; all the operands
    body     Graph, (*symbols, *slices, *captures) -> one step's results
    length   the number of slices
    """

    name = "map"

    def prepare(self, f: Any, xs: Any, args: tuple[Any, ...], dim: int) -> Call:
        require_callable(self.name, "f", f)
        leaves, spec, length = flatten_stacks(self.name, xs, None, dim)
        flat, args_spec = flatten_operands(self.name, "args", args)
        # `args` are the same for all slices, and are captured.
        shared = pytree.unflatten(args_spec, [as_value(a) for a in flat])

        def call(elements: Sequence[Any]) -> Any:
            return f(pytree.unflatten(spec, elements), *shared)

        names = [f"x{i}" for i in range(len(leaves))]
        functions = {"body": Function("f", f, names, call)}
        return Call(self.name, [], leaves, functions, {"length": length})

    def run_debug(self, call: Call) -> Any:
        if call.params["length"] == 0:
            return self.trace(call)
        body = Recorder(self.name, call.functions["body"], True, _REFUSAL)
        results = self.debug(*call.operands, body=body, **call.params)
        assert body.spec is not None
        return pytree.unflatten(body.spec, results)

    def trace(self, call: Call) -> Any:
        types = slice_types([o.type for o in call.operands])
        body = trace_body(self.name, "map/body", call.functions["body"], types)
        self.functionalize([body])
        closed = close_bodies([body])
        args = [*closed.symbols, *call.operands, *closed.captures]
        results = bind(self, args, {"body": closed.graphs[0], **call.params})
        return pytree.unflatten(body.spec, results)

    # --- rules ---

    jvp_rule = derived
    linearize_rule = derived
    batch_rule = derived
    export = derived

    def debug(self, *xs: Any, body: Any, length: int) -> tuple[Any, ...]:
        return tuple(stacked([body(*slices(xs, i)) for i in range(length)]))

    def interpret(
        self,
        args: Sequence[Any],
        params: dict[str, Any],
        evaluate: Evaluate = run_graph,
    ) -> Any:
        if params["length"] == 0:
            return tuple(empty_stacks(bound_result_types(self, args, params)))
        return super().interpret(args, params, evaluate)

    def infer(
        self, *types: TensorType, body: Graph, length: Size
    ) -> tuple[TensorType, ...]:
        return tuple(stacked_results(self.name, body, body.out_types, length))

    def functionalize(self, bodies: Sequence[Body]) -> Written:
        return refuse_writes(bodies, _REFUSAL)

    def lower(
        self, types: tuple[TensorType, ...], *args: Any, body: Graph, length: Size
    ) -> CountedLoop:
        parts = split_args(self, args, {"body": body})
        return CountedLoop(
            body,
            length,
            before=parts.symbols,
            carry=(),
            xs=parts.operands,
            after=parts.captures,
            independent="callback" not in effects(body),
        )

    def transpose_rule(
        self,
        cotangents: Sequence[Tangent],
        operands: Sequence[Any],
        params: dict[str, Any],
    ) -> Sequence[Tangent | None]:
        # Cotangents of captures are summed, one call after the other.
        in_order = {**params, "num_carry": 0, "reverse": False, "unroll": 1}
        return transpose_scan(cotangents, operands, in_order)

    def signature(self, node: Node) -> Signature:
        parts = split_args(self, node.args, node.params)
        body: Graph = node.params["body"]
        args = roles(
            ("symbol", len(parts.symbols)),
            ("slice", len(parts.operands)),
            ("invariant", len(parts.captures)),
        )
        results = roles(("stacked", len(body.outputs)))
        region = Region(
            "body",
            body,
            tuple(Port(role, i) for i, role in enumerate(args)),
            numbered("stacked", 0, len(results)),
            runs_of(node.params["length"]),
        )
        return Signature(args, results, (region,))

    def with_roles(
        self, params: dict[str, Any], args: Sequence[Role], results: Sequence[Role]
    ) -> dict[str, Any]:
        return params


_REFUSAL: Final = (
    "its calls are independent of each other. Return the new value instead."
)

MAP = Map()


def _each_example(
    f: Callable[[Sequence[Operand]], Sequence[Value]],
    size: Size,
    args: Sequence[Operand],
    batched: Sequence[bool],
    progress: Any = None,
) -> Sequence[Value]:
    xs = [arg for arg, b in zip(args, batched, strict=True) if b]
    xs = xs or [arange(size)]  # to run once for each batch element
    mapped = origin.node  # the trace of the body would look at the Python stack

    def element(x: Sequence[Any]) -> list[Value]:
        leaves, pairs = iter(x), zip(args, batched, strict=True)
        with replaying(mapped):
            return list(f([next(leaves) if b else a for a, b in pairs]))

    results: list[Value] = map_(element, xs, progress=progress)
    return results


slots.each_example = _each_example


def map_(
    f: Callable[..., Any],
    xs: Any,
    *args: Any,
    dim: int = 0,
    batch_size: int | None = None,
    progress: str | Callable[[int, int | None], Any] | None = None,
) -> Any:
    """Compute `f(x, *args)` for each slice `x` of `xs`; stack the results on axis 0.

    Args:
        f: Takes one slice, a value: in-place writes to it go to a private copy. It
            returns any pytree, and must not write to tensors of enclosing functions.
        xs: A pytree of tensors T[*s, n, *t] with `n` slices along axis `dim`; `x` has
            its structure, and leaves T[*s, *t].
        args: Pytrees of tensors and numbers, the same in each call.
        dim: The axis along which slices are taken.
        batch_size: The number of slices that are computed at once, as `hf.vmap` does;
            the remainder is computed separately. None: each slice by itself.
        progress: A label to show a progress bar with, or a function; see `while_loop`.

    Returns:
        The pytree that `f` returns, with leaves [n, ...].

    Raises:
        ArgumentTypeError, ArgumentValueError: `batch_size` is not a positive int, or
            `progress` is neither a label nor a function.
        LengthError: the leaves of `xs` have different numbers of slices, or there is no
            leaf.
        MutationError: `f` writes to a captured tensor.
        ResultTypeError: `f` returns something other than tensors and numbers.

    >>> hf.map(lambda x: x * x, hf.asarray([1, 2, 3]))
    Tensor([1, 4, 9], i64[3])
    """
    shown = as_progress("map", progress).get("progress")
    if batch_size is None and shown is None:
        return MAP(f, xs, args, dim)
    require_callable("map", "f", f)
    check_arity("map", f, (xs, *args))
    leaves, spec, length = flatten_stacks("map", xs, None, dim)
    values = [as_value(x) for x in leaves]

    def element(elements: Sequence[Any], *shared: Any) -> Any:
        return f(pytree.unflatten(spec, elements), *shared)

    if batch_size is None:
        size = _FEWEST
        if isinstance(length, int):
            size = max(min(size, length), length // _PARTS, 1)
        map_part = functools.partial(map_, element)
    else:
        size = as_integer("map", "batch_size", batch_size)
        if size < 1:
            raise ArgumentValueError(
                f"map: `batch_size` must be positive, and is {size}."
            )
        map_part = vmap(element, (0, *[None] * len(args)))
    return _in_batches(map_part, values, args, length, size, shown)


# A map with `progress` is split into parts, and reports after each part.
_PARTS: Final = 64
_FEWEST: Final = 16  # slices in a part, which are computed in parallel


def _in_batches(
    map_part: Callable[..., Any],
    leaves: Sequence[Value],
    args: tuple[Any, ...],
    length: Size,
    size: int,
    progress: Progress | None,
) -> Any:
    """Return `map_part` of all slices along axis 0, `size` of them at once."""
    count = length // size
    full = count * size
    is_even = isinstance(length, int) and 0 < length == full
    first = length - full  # the remainder is computed first
    remainder = None if is_even else map_part([x[:first] for x in leaves], *args)
    if progress is None and isinstance(count, int) and count == 0:
        return remainder
    batches = [reshape(x[first:], (count, size, *x.shape[1:])) for x in leaves]
    if progress is None:
        rows = map_(map_part, batches, *args)
    else:
        before = first if isinstance(first, int) else 0
        part_progress: Any = in_batches(progress, size, before)
        step = lambda _, batch: (None, map_part(batch, *args))  # noqa: E731
        rows = scan(step, None, batches, progress=part_progress)[1]
    results = pytree.tree_map(lambda y: reshape(y, (full, *y.shape[2:])), rows)
    return results if is_even else pytree.tree_map(_joined, remainder, results)


def _joined(x: Any, y: Any) -> Any:
    return concat([x, y])
