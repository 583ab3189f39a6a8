"""Shared by `cond` and `switch`: functions of the same operands, one of which runs.

Also the base of calls, which are branches without a choice.
"""

from collections.abc import Sequence
from contextlib import suppress
from functools import reduce
from operator import or_
from typing import Any, ClassVar, NamedTuple

from hopflow import pytree
from hopflow.bind import Operand, bind, current, has_process
from hopflow.errors import BranchTypeError, StructureError, TraceError
from hopflow.graph.core import Constant, Graph, Node, size_of
from hopflow.graph.regions import (
    Port,
    Region,
    Role,
    Runs,
    Signature,
    out_types_like,
    roles,
)
from hopflow.graph.types import TensorType, same_size
from hopflow.hops.base import Call, RegionOperator, derived, numbered, split_args
from hopflow.hops.dynamic_shapes import padded_branches
from hopflow.hops.loops import calling
from hopflow.hops.subgraphs import (
    Body,
    Closed,
    Function,
    Recorder,
    Written,
    as_value,
    cast_output,
    close_bodies,
    commit,
    common_dtype,
    flatten_operands,
    mismatches,
    own_copy,
    present_value,
    require_callable,
    retyped,
    shown,
    trace_body,
    written_inputs,
)
from hopflow.loop_ir.kernels import Inline
from hopflow.ops.sizes import range_of as range_of_size
from hopflow.pytree import Spec
from hopflow.symbolic.ranges import ValueRange
from hopflow.symbolic.size import Size, Symbol, free_symbols
from hopflow.trace.functional import TracedTensor
from hopflow.trace.tracer import Tracer, range_of


class Traced(NamedTuple):
    """The graphs of branches, and the inputs and results of a node of them.

    results   the number of the node's results that the user gets; the others are
              written
    targets   the caller's tensors that these are written to
    ranges    the ranges of the results that are 0-d integers, as far as is known
    """

    closed: Closed
    spec: Spec
    results: int
    written: Written
    targets: list[Operand]
    ranges: list[ValueRange]


class Branching(RegionOperator):
    """An operator that runs one of several branches on the same operands.

    selector_role  the role of the arg that selects the branch: "index" for its number,
                   "predicate" for a bool, for which True selects the first
    runs           how often each branch runs
    """

    lead = 1
    selector_role: ClassVar[Role] = "operand"
    runs: ClassVar[Runs] = "at most once"

    def prepare_branches(
        self, selector: Any, branches: dict[str, tuple[str, Any]], operands: Any
    ) -> Call:
        """Return a call whose functions are called as `fn(*operands)`.

        Args:
            branches: By the param's name, the name of the argument and the function.
        """
        for role, fn in branches.values():
            require_callable(self.name, role, fn)
        flat, spec = flatten_operands(self.name, "operands", operands)
        names = [f"x{i}" for i in range(len(flat))]
        functions = {
            key: Function(role, fn, names, calling(fn, operands, spec))
            for key, (role, fn) in branches.items()
        }
        return Call(self.name, [selector], flat, functions)

    def chosen(self, call: Call) -> str | None:
        """Return the key of the function that runs, if the selector is a constant."""
        if not call.lead or not isinstance(call.lead[0], Constant):
            return None
        value = call.lead[0].value
        return list(call.functions)[
            int(value if self.selector_role == "index" else not value)
        ]

    def take(self, call: Call, key: str) -> Any:
        """Call one function alone, as Python's `if` does."""
        function = Recorder(self.name, call.functions[key])
        results = function(*map(as_value, call.operands))
        assert function.spec is not None
        return pytree.unflatten(function.spec, [own_copy(r) for r in results])

    def run_debug(self, call: Call) -> Any:
        chosen = self.chosen(call)
        if chosen is not None:
            return self.take(call, chosen)
        recorders = {k: Recorder(self.name, f) for k, f in call.functions.items()}
        operands = [as_value(o) for o in call.operands]
        params = {**self.pack(recorders), **call.params}
        outputs = self.debug(*call.lead, *operands, **params)
        [spec] = [r.spec for r in recorders.values() if r.spec is not None]
        results: list[Operand] = [own_copy(r) for r in outputs]
        if len(recorders) > 1 and any(r.type.weak for r in results):
            with suppress(TraceError):  # untraceable functions keep their types
                bodies = self.trace_bodies(call)
                results = [
                    retyped(r, t.dtype, weak=t.weak)
                    for r, t in zip(results, bodies[0].types, strict=True)
                ]
        return pytree.unflatten(spec, results)

    def pack(self, functions: dict[str, Any]) -> dict[str, Any]:
        """Return functions or graphs, by their keys in the call, as params of a
        node."""
        return functions

    def trace(self, call: Call) -> Any:
        chosen = self.chosen(call)
        if chosen is not None:
            return self.take(call, chosen)
        return self.finish(call, self.trace_branches(call))

    def finish(self, call: Call, traced: Traced) -> Any:
        """Bind a node of traced branches, and return its results to the user."""
        closed = traced.closed
        graphs = dict(zip(call.functions, closed.graphs, strict=True))
        args = [*call.lead, *closed.symbols, *call.operands, *closed.captures]
        results = bind(self, args, {**self.pack(graphs), **call.params})
        tracer = current()
        if isinstance(tracer, Tracer):
            tracer.learn_ranges(results, traced.ranges)
        commit(traced.targets, results[traced.results :])
        return pytree.unflatten(traced.spec, results[: traced.results])

    def trace_branches(self, call: Call) -> Traced:
        """Return the graphs of the call's functions."""
        tracer = current()
        if isinstance(tracer, Tracer):  # so that inputs have the order of the arguments
            for operand in call.lead:
                if not has_process(operand):
                    tracer.arg(operand)
        bodies = self.trace_bodies(call)
        first = bodies[0]
        count = len(first.outputs)
        written = self.functionalize(bodies)
        captures = first.tracer.captures
        targets: list[Operand] = [captures[k].origin for k in written.captures]
        targets += [call.operands[i] for i in written.operands]
        ranges = [_range_of(bodies, i) for i in range(count)]
        closed = close_bodies(bodies)
        return Traced(closed, first.spec, count, written, targets, ranges)

    def trace_bodies(self, call: Call) -> list[Body]:
        """Trace the call's functions, with results of the same types."""
        types = [o.type for o in call.operands]
        bodies = [
            trace_body(self.name, f"{self.name}/{key}", f, types, call.operands)
            for key, f in call.functions.items()
        ]
        self.unify(bodies)
        return bodies

    def unify(self, bodies: Sequence[Body]) -> None:
        """Make all bodies return the same types, where weak dtypes give way. Sizes may
        differ if the trace can have a symbol for that of the body that runs.

        Raises:
            StructureError, BranchTypeError: they differ in other ways.
        """
        first = bodies[0]
        for other in bodies[1:]:
            if other.spec != first.spec:
                left, right = first.function, other.function
                width = max(len(left.role), len(right.role))
                raise StructureError(
                    f"{self.name}: {left.label} and {right.label} must return the same "
                    f"structure.\n  {left.role:<{width}}  {shown(first.spec)}\n"
                    f"  {right.role:<{width}}  {shown(other.spec)}\n"
                    "Return the same containers with as many leaves (`*` is a leaf) "
                    "from each."
                )
        for i in range(len(first.outputs)):
            types = [b.outputs[i].type for b in bodies]
            dtype, weak = common_dtype(types)
            if dtype is not None:
                for body in bodies:
                    cast_output(body, i, dtype, weak=weak)
        paths = pytree.leaf_paths(first.spec, "result")
        sizes = first.tracer.env is None
        for other in bodies[1:]:
            if leaves := mismatches(paths, first.types, other.types, sizes=sizes):
                left, right = first.function, other.function
                raise BranchTypeError(self.name, left.label, right.label, leaves)

    # --- rules ---

    jvp_rule = derived
    linearize_rule = derived
    transpose_rule = derived
    batch_rule = derived
    export = derived

    def functionalize(self, bodies: Sequence[Body]) -> Written:
        """Return a tensor that one branch writes to from all: the others return its old
        value."""
        written = written_inputs(bodies)
        for body in bodies:
            tracer = body.tracer
            body.outputs += [present_value(body, k) for k in written.captures]
            body.outputs += [
                TracedTensor(tracer, tracer.read(tracer.operands[i]))
                for i in written.operands
            ]
        return written

    def branch_types(self, branches: Sequence[Graph]) -> tuple[TensorType, ...]:
        """Return the types of the results, which must be the same for all branches.

        A size in which they differ, or that they compute, is a new symbol.

        Raises:
            StructureError, BranchTypeError: they are not.
        """
        first = branches[0]
        rows = [first.out_types]
        for other in branches[1:]:
            if len(first.outputs) != len(other.outputs):
                raise StructureError(
                    f"{self.name}: graphs `{first.name}` and `{other.name}` must "
                    f"return as many results, and return {len(first.outputs)} and "
                    f"{len(other.outputs)}."
                )
            types = out_types_like(other, first)
            paths = [f"result[{i}]" for i in range(len(types))]
            if leaves := mismatches(paths, first.out_types, types, sizes=False):
                left, right = f"`{first.name}`", f"`{other.name}`"
                raise BranchTypeError(self.name, left, right, leaves)
            rows.append(types)
        return merged_types(first, rows)

    def of_fixed_sizes(
        self, operands: Sequence[Operand], params: dict[str, Any]
    ) -> Graph | None:
        return padded_branches(self, operands, params)

    def signature(self, node: Node) -> Signature:
        parts = split_args(self, node.args, node.params)
        operands = len(parts.operands) + len(parts.captures)
        args = roles(
            (self.selector_role, self.lead),
            ("symbol", len(parts.symbols)),
            ("operand", operands),
        )
        inputs = tuple(Port(role, i) for i, role in enumerate(args) if i >= self.lead)
        count = len(next(iter(node.graphs.values())).outputs)
        outputs = numbered("result", 0, count)
        regions = tuple(
            Region(name, graph, inputs, outputs, self.runs)
            for name, graph in node.graphs.items()
        )
        return Signature(args, roles(("result", count)), regions)

    def with_roles(
        self, params: dict[str, Any], args: Sequence[Role], results: Sequence[Role]
    ) -> dict[str, Any]:
        return params


class Calling(Branching):
    """An operator that runs its body.

    It is called as `op(symbols; operands; captures; body, ...)`, with

        body   Graph, (*symbols, *operands, *captures) -> results
    """

    lead = 0
    runs = "once"
    is_call = True

    def debug(self, *operands: Any, body: Any, **_params: Any) -> Any:
        return body(*operands)

    def infer(
        self, *types: TensorType, body: Graph, **_params: Any
    ) -> tuple[TensorType, ...]:
        return self.branch_types((body,))

    def lower(
        self, types: tuple[TensorType, ...], *args: Any, body: Graph, **_params: Any
    ) -> Inline:
        return Inline(body, args)


def _range_of(bodies: Sequence[Body], i: int) -> ValueRange:
    """Return the range of result `i`, whichever function runs."""
    return reduce(or_, [range_of(b.outputs[i], b.tracer) for b in bodies])


def merged_types(
    graph: Graph, rows: Sequence[Sequence[TensorType]]
) -> tuple[TensorType, ...]:
    """Return the types of results, given those of each branch in the symbols of
    `graph`.

    Sizes that are equal in each branch get the same symbol, in all results.
    """
    if len(rows) == 1 and all([t.is_static for t in rows[0]]):
        return tuple(rows[0])
    defined = {v.node.symbol for v in graph.symbols}
    memo: dict[Any, Size] = {}

    def merged(sizes: Sequence[Size]) -> Size:
        first = sizes[0]
        if all(same_size(first, n) for n in sizes) and defined.issuperset(
            free_symbols(first)
        ):
            return first
        key = tuple([getattr(n, "expression", n) for n in sizes])
        allowed = reduce(or_, map(range_of_size, sizes))
        return memo.setdefault(key, size_of(Symbol("u", None, allowed)))

    columns = zip(*rows, strict=True)
    return tuple(
        [
            types[0].with_shape(
                [merged(n) for n in zip(*(t.shape for t in types), strict=True)]
            )
            for types in columns
        ]
    )
