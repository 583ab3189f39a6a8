"""`associative_scan`: all prefixes of an associative function. All its rules."""

from collections.abc import Callable, Sequence
from typing import Any, Final, final

from hopflow import pytree
from hopflow.autograd.jvp import Dual, run_graph
from hopflow.autograd.linearize import linear_of
from hopflow.batching import operators as batching
from hopflow.bind import Interpreter, Operand, Value, bind, current, using
from hopflow.errors import ArgumentTypeError, ElementTypeError, GraphError
from hopflow.graph.core import Graph, Node, Var
from hopflow.graph.regions import Region, Role, Runs, Signature, roles
from hopflow.graph.rewriting import effects, inline
from hopflow.graph.types import TensorType
from hopflow.hops.base import Call, RegionOperator, derived, numbered, split_args
from hopflow.hops.cond import cond
from hopflow.hops.loops import (
    check_carry,
    empty_stacks,
    fits,
    flatten_stacks,
    settle_step,
    slice_types,
    slices,
    stacked,
    stacked_types,
)
from hopflow.hops.scanning import scan
from hopflow.hops.subgraphs import (
    Body,
    Function,
    Recorder,
    Written,
    cast_output,
    check_structure,
    close_bodies,
    own_copy,
    refuse_writes,
    require_callable,
    trace_body,
)
from hopflow.loop_ir.kernels import Inline
from hopflow.ops.batching import in_batch
from hopflow.ops.convert import as_value
from hopflow.ops.elementwise import where
from hopflow.ops.manipulation import moveaxis
from hopflow.symbolic.size import Size, SymInt, symbol
from hopflow.trace.functional import TracedTensor
from hopflow.trace.source import input_names
from hopflow.trace.tracer import Tracer
from hopflow.zeros import LinearMap, Tangent

_STRUCTURE: Final = "combine two elements into one of the same structure"


@final
class AssociativeScan(RegionOperator):
    """`associative_scan(symbols; xs; captures; body, ...) -> ys`

    xs       T[length, *s] each; all the operands
    body     Graph, (*symbols, *a, *b, *captures) -> a slice, as `a` and `b` are
    length   the number of slices
    reverse  whether prefixes start at the last slice
    """

    name = "associative_scan"
    droppable = False  # the next step combines all results

    def prepare(self, combine_fn: Any, xs: Any, dim: int, reverse: Any) -> Call:
        require_callable(self.name, "combine_fn", combine_fn)
        if type(reverse) is not bool:
            raise ArgumentTypeError(
                f"{self.name}: `reverse` must be a bool, and is "
                f"`{type(reverse).__name__}`."
            )
        leaves, spec, length = flatten_stacks(self.name, xs, None, dim)
        count = len(leaves)

        def call(flat: Sequence[Any]) -> Any:
            a, b = (pytree.unflatten(spec, x) for x in (flat[:count], flat[count:]))
            return combine_fn(a, b)

        names = input_names(combine_fn, [spec, spec])
        functions = {"body": Function("combine_fn", combine_fn, names, call)}
        params = {"length": length, "reverse": reverse}
        prepared = Call(self.name, [], leaves, functions, params, spec)
        prepared.paths = pytree.leaf_paths(spec, "xs")
        prepared.type_error = ElementTypeError
        return prepared

    def run_debug(self, call: Call) -> Any:
        assert call.spec is not None
        spec, function = call.spec, call.functions["body"]
        body = Recorder(self.name, function, True, _REFUSAL)

        def combine(*inputs: Any) -> list[Any]:
            results = body(*inputs)
            assert body.spec is not None
            check_structure(self.name, function.label, body.spec, spec, _STRUCTURE)
            before = inputs[: len(results)]
            return settle_step(call, function, before, results, settles=False)

        results = self.debug(*call.operands, body=combine, **call.params)
        return pytree.unflatten(spec, [own_copy(r) for r in results])

    def trace(self, call: Call) -> Any:
        assert call.spec is not None
        function = call.functions["body"]
        types = slice_types([o.type for o in call.operands])
        body = trace_body(self.name, f"{self.name}/body", function, [*types, *types])
        check_structure(self.name, function.label, body.spec, call.spec, _STRUCTURE)
        for i, type_ in enumerate(types):
            if fits(type_, body.outputs[i].type):
                cast_output(body, i, type_.dtype)
        check_carry(call, function, types, body.outputs)
        self.functionalize([body])
        closed = close_bodies([body])
        args = [*closed.symbols, *call.operands, *closed.captures]
        results = bind(self, args, {"body": closed.graphs[0], **call.params})
        return pytree.unflatten(call.spec, results)

    # --- rules ---

    transpose_rule = derived
    export = derived

    def debug(self, *xs: Any, body: Any, length: int, reverse: bool) -> tuple[Any, ...]:
        if not length:
            return xs
        rows: list[Any] = []
        for i in reversed(range(length)) if reverse else range(length):
            x = slices(xs, i)
            rows.append(body(*rows[-1], *x) if rows else x)
        return tuple(stacked(rows[::-1] if reverse else rows))

    def infer(
        self, *types: TensorType, body: Graph, length: Size, **_: Any
    ) -> tuple[TensorType, ...]:
        elements = [v.type for v in body.operands[: len(body.outputs)]]
        return tuple(stacked_types(elements, length))

    def functionalize(self, bodies: Sequence[Body]) -> Written:
        return refuse_writes(bodies, _REFUSAL)

    def lower(
        self,
        types: tuple[TensorType, ...],
        *args: Any,
        body: Graph,
        length: Size,
        reverse: bool,
    ) -> Inline:
        """One loop over the slices; a length known at run time is an additional
        operand."""
        sizes = (length,) if isinstance(length, SymInt) else ()
        return Inline(sequential(body, length, reverse=reverse), (*sizes, *args))

    def batch_rule(
        self,
        size: Size,
        batched: Sequence[bool],
        args: Sequence[Operand],
        params: dict[str, Any],
    ) -> tuple[Sequence[Value], Sequence[bool]]:
        """Batch all slices if one is: results are combined with each of them."""
        parts = split_args(self, range(len(args)), params)
        inputs = [
            as_value(in_batch(size, b, a)) if i in parts.operands else a
            for i, (a, b) in enumerate(zip(args, batched, strict=True))
        ]
        mask = [b or i in parts.operands for i, b in enumerate(batched)]
        return batching.batch(self, size, mask, inputs, params, all_results=True)

    def jvp_rule(
        self,
        operands: Sequence[Operand],
        tangents: Sequence[Tangent],
        params: dict[str, Any],
    ) -> tuple[Sequence[Value], Sequence[Tangent]]:
        return _as_scan(operands, tangents, params, None)

    def linearize_rule(
        self,
        operands: Sequence[Operand],
        tangents: Sequence[Tangent],
        params: dict[str, Any],
    ) -> tuple[Sequence[Value], LinearMap]:
        linear = linear_of(tangents)
        values, result_dots = _as_scan(operands, tangents, params, linear)
        return values, lambda _: result_dots

    def signature(self, node: Node) -> Signature:
        parts = split_args(self, node.args, node.params)
        first, count = len(parts.symbols), len(parts.operands)
        symbols = numbered("symbol", 0, first)
        xs = numbered("slice", first, count)
        captures = numbered("invariant", first + count, len(parts.captures))
        length = node.params["length"]
        runs: Runs = "any times"
        if isinstance(length, int) and length > 1:
            runs = "at least once"
        region = Region(
            "body",
            node.params["body"],
            (*symbols, *xs, *xs, *captures),  # the body takes two slices
            numbered("stacked", 0, count),
            runs,
        )
        args = tuple(port.role for port in (*symbols, *xs, *captures))
        return Signature(args, roles(("stacked", count)), (region,))

    def with_roles(
        self, params: dict[str, Any], args: Sequence[Role], results: Sequence[Role]
    ) -> dict[str, Any]:
        if args.count("slice") != len(results):
            raise GraphError(f"{self.name}: each of `xs` has a result; none can go.")
        return params


_REFUSAL: Final = "its calls may be made in any order. Return the new value instead."

ASSOCIATIVE_SCAN = AssociativeScan()


def _as_scan(
    operands: Sequence[Operand],
    tangents: Sequence[Tangent],
    params: dict[str, Any],
    linear: Interpreter | None,
) -> tuple[list[Value], list[Tangent]]:
    """Return the results and their tangents, by differentiating an equivalent scan."""
    length = params["length"]
    graph = sequential(params["body"], length, reverse=params["reverse"], safe=True)
    sizes = [current().value_of(length)] if isinstance(length, SymInt) else []
    count = len(graph.symbols) - len(sizes)
    duals = [Dual(o, t) for o, t in zip(operands, tangents, strict=True)]
    symbols = [*sizes, *operands[:count]]
    outputs = run_graph(graph, symbols, duals[count:], linear)
    return [as_value(d.value) for d in outputs], [d.tangent for d in outputs]


def sequential(
    body: Graph, length: Size, *, reverse: bool, safe: bool = False
) -> Graph:
    """Return a graph with a `scan` that computes the prefixes one after the other.

    Its inputs are the node's args, after the length if that is symbolic.

    Args:
        safe: Never call the function on the zeros before the first slice: its
            derivative there might be infinite, and infinity times 0 is NaN.
    """
    tracer = Tracer(None, "associative_scan")
    if isinstance(length, SymInt):  # the caller's symbol is none of `body`
        length = symbol("n")
        tracer.bind_symbols((length,))
    body_symbols = [v.node.symbol for v in body.symbols if v.node.symbol is not None]
    symbols = list(map(tracer.input_like, body.symbols))
    sizes = {s: SymInt((((s,), 1),)) for s in body_symbols}
    count = len(body.outputs)
    elements = [v.type for v in body.operands[:count]]
    xs = [
        tracer.operand(t.with_shape((length, *t.shape)), f"x{i}")
        for i, t in enumerate(elements)
    ]
    captures = [tracer.operand(v.type, v.node.name) for v in body.captures]
    branches = safe or bool(effects(body)) or any(n.graphs for n in body.nodes)

    def combine(a: Sequence[Any], b: Sequence[Any]) -> list[Any]:
        inner = current()
        assert isinstance(inner, Tracer)
        args = [inner.arg(o) for o in (*symbols, *a, *b, *captures)]
        # The nodes keep the lines of the user's code.
        place = len(inner.graph.nodes)
        results = inline(inner.graph, place, body, args, sizes)
        return [TracedTensor(inner, r) if isinstance(r, Var) else r for r in results]

    def step(carry: Any, x: list[Any]) -> Any:
        first, before = carry
        if branches:  # so that it never runs on the zeros before the first slice
            new = cond(first, lambda: x, lambda: combine(before, x))
        else:
            pairs = zip(x, combine(before, x), strict=True)
            new = [where(first, a, b) for a, b in pairs]
        return (False, new), new

    with using(tracer):
        start = (True, empty_stacks(elements))
        _, ys = scan(step, start, xs, length=length, reverse=reverse)
    return tracer.close(ys)


def associative_scan(
    combine_fn: Callable[[Any, Any], Any],
    xs: Any,
    *,
    dim: int = 0,
    reverse: bool = False,
) -> Any:
    """Compute prefixes of an associative function: `y[i] = combine_fn(y[i - 1], x[i])`.

    Args:
        combine_fn: Takes two slices `a` and `b`, and returns one of the same structure,
            shapes and dtypes. It must be associative, as its calls may be grouped in
            any way; and it must not write to tensors of enclosing functions.
        xs: A pytree of tensors T[*s, n, *t] with `n` slices along axis `dim`.
        dim: The axis along which slices are taken; the results have it at the same
            place.
        reverse: Start at the last slice: `y[i] = combine_fn(y[i + 1], x[i])`.

    Returns:
        A pytree as `xs`, of the same types; the first slice is that of `xs`.

    Raises:
        StructureError, ElementTypeError: `combine_fn` returns another structure, shape
            or dtype than it takes.
        LengthError: the leaves of `xs` have different numbers of slices, or there is no
            leaf.
        MutationError: `combine_fn` writes to a captured tensor.

    >>> hf.associative_scan(hf.add, hf.asarray([1, 2, 3, 4]))
    Tensor([ 1,  3,  6, 10], i64[4])
    """
    ys = ASSOCIATIVE_SCAN(combine_fn, xs, dim, reverse)
    return pytree.tree_map(lambda y: moveaxis(y, 0, dim), ys) if dim else ys
