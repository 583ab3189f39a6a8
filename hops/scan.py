"""`scan`: a loop over slices that carries a value and stacks results. All its rules."""

from collections.abc import Sequence
from typing import Any, NamedTuple, final

from hopflow import pytree
from hopflow.autograd.region_jvp import node_and_signature
from hopflow.autograd.region_vjp import pull
from hopflow.bind import Operand, Value, bind, current, run_graph, using
from hopflow.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    StructureError,
)
from hopflow.graph.core import Graph, Node
from hopflow.graph.interpreter import Evaluate
from hopflow.graph.regions import Port, Region, Role, Signature, roles
from hopflow.graph.regions import result_types as bound_result_types
from hopflow.graph.rewriting import effects
from hopflow.graph.types import TensorType
from hopflow.hops.base import (
    Call,
    RegionOperator,
    derived,
    split_args,
)
from hopflow.hops.dynamic_shapes import changing_sizes, padded
from hopflow.hops.loops import (
    as_types,
    changed_types,
    check_sizes,
    dynamic_sizes,
    empty_stacks,
    first_carry,
    flatten_stacks,
    runs_of,
    settle_step,
    slice_types,
    slices,
    stacked,
    stacked_results,
    trace_settled,
)
from hopflow.hops.subgraphs import (
    Body,
    Function,
    Recorder,
    Written,
    as_value,
    check_structure,
    close_bodies,
    commit,
    flatten_operands,
    own_copy,
    present_value,
    require_callable,
    shown,
    written_inputs,
)
from hopflow.loop_ir.kernels import CountedLoop
from hopflow.ops.sizes import specialised
from hopflow.progress import Meter, as_progress, in_reverse
from hopflow.symbolic.size import Size
from hopflow.trace.functional import TracedTensor
from hopflow.trace.rollback import mark, rollback
from hopflow.trace.source import input_names
from hopflow.trace.tracer import Tracer
from hopflow.zeros import Tangent, Unknown, Zero, added, instantiate


@final
class Scan(RegionOperator):
    """`scan(symbols; carry, xs; captures; body, ...) -> carry, ys`

    carry      the first `num_carry` operands
    xs         T[length, *s] each: the other operands
    body       Graph, (*symbols, *carry, *slices, *captures) -> carry, one step's y
    length     the number of steps
    reverse    whether steps run from the last slice to the first
    unroll     the number of copies of the body in a compiled loop
    progress   optional: the label or function that reports progress
    """

    name = "scan"

    def prepare(
        self,
        combine_fn: Any,
        init: Any,
        xs: Any,
        *,
        length: Any,
        dim: int,
        reverse: bool,
        unroll: int,
        dynamic_carry: Any = None,
        progress: Any = None,
    ) -> Call:
        require_callable(self.name, "combine_fn", combine_fn)
        unroll = specialised(unroll)
        if type(unroll) is not int or unroll < 1:
            raise ArgumentValueError(
                f"{self.name}: `unroll` must be a positive int, and is {unroll!r}."
            )
        if type(reverse) is not bool:
            raise ArgumentTypeError(
                f"{self.name}: `reverse` must be a bool, and is "
                f"`{type(reverse).__name__}`."
            )
        carry, spec = flatten_operands(self.name, "init", init)
        stacks = flatten_stacks(self.name, xs, length, dim)
        count = len(carry)

        def call(flat: Sequence[Any]) -> Any:
            return combine_fn(
                pytree.unflatten(spec, flat[:count]),
                pytree.unflatten(stacks.spec, flat[count:]),
            )

        names = input_names(combine_fn, [spec, stacks.spec])
        functions = {"body": Function("combine_fn", combine_fn, names, call)}
        params = {
            "num_carry": count,
            "length": stacks.length,
            "reverse": reverse,
            "unroll": unroll,
            **as_progress(self.name, progress),
        }
        operands = [*carry, *stacks.leaves]
        prepared = Call(self.name, [], operands, functions, params, spec)
        prepared.paths = pytree.leaf_paths(spec, "carry")
        prepared.dynamic = dynamic_sizes(self.name, dynamic_carry, (init,), combine_fn)
        check_sizes(prepared, [o.type for o in carry])
        return prepared

    def run_debug(self, call: Call) -> Any:
        if call.params["length"] == 0:
            return self.trace(call)
        step = Step(call)
        operands = [*first_scan_carry(call), *call.operands[call.params["num_carry"] :]]
        results = self.debug(*operands, body=step, **call.params)
        return scan_result(call, step.body.spec, [own_copy(r) for r in results])

    def trace_step(self, call: Call) -> tuple[Body, list[TensorType]]:
        """Return the traced body of a step, and the types on which the carry has
        settled."""
        count = call.params["num_carry"]
        return trace_settled(
            call,
            "scan/body",
            call.functions["body"],
            count,
            lambda body: _check_pair(call, body.spec),
            slice_types([o.type for o in call.operands[count:]]),
        )

    def trace(self, call: Call) -> Any:
        count = call.params["num_carry"]
        body, types = self.trace_step(call)
        written = self.functionalize([body])
        origins = [body.tracer.captures[k].origin for k in written.captures]
        closed = close_bodies([body], carried=written.captures, place=count)
        carry = as_types(call.operands[:count], types)
        args = [*closed.symbols, *carry, *origins, *call.operands[count:]]
        params = dict(call.params, num_carry=count + len(origins))
        results = bind(
            self, [*args, *closed.captures], {"body": closed.graphs[0], **params}
        )
        last = count + len(origins)
        commit(origins, results[count:last])
        return scan_result(call, body.spec, [*results[:count], *results[last:]])

    # --- rules ---

    jvp_rule = derived
    linearize_rule = derived
    batch_rule = derived
    export = derived

    def debug(
        self,
        *operands: Any,
        body: Any,
        num_carry: int,
        length: int,
        reverse: bool,
        progress: Any = None,
        **_: Any,
    ) -> tuple[Any, ...]:
        carry = operands[:num_carry]
        xs = [own_copy(x) for x in operands[num_carry:]]  # the body may write to them
        rows: list[Any] = []
        with Meter(progress, length) as meter:
            for i in reversed(range(length)) if reverse else range(length):
                results = body(*carry, *slices(xs, i))
                carry = tuple(results[:num_carry])
                rows.append(results[num_carry:])
                meter.step()
        return (*carry, *stacked(rows[::-1] if reverse else rows))

    def interpret(
        self,
        args: Sequence[Any],
        params: dict[str, Any],
        evaluate: Evaluate = run_graph,
    ) -> Any:
        if params["length"] != 0:
            return super().interpret(args, params, evaluate)
        count = params["num_carry"]
        carry = split_args(self, args, params).operands[:count]
        types = bound_result_types(self, args, params)[count:]
        with Meter(params.get("progress"), 0):
            pass
        return (*map(as_value, carry), *empty_stacks(types))

    def infer(
        self,
        *types: TensorType,
        body: Graph,
        num_carry: int,
        length: Size,
        **_: Any,
    ) -> tuple[TensorType, ...]:
        carry = changed_types(body, num_carry)
        ys = body.out_types[num_carry:]
        return (*carry, *stacked_results(self.name, body, ys, length))

    def functionalize(self, bodies: Sequence[Body]) -> Written:
        """Turn a captured tensor that the body writes to into one more carry."""
        [body] = bodies
        written = Written(written_inputs(bodies).captures)
        count = body.spec.child(0).num_leaves
        values = [present_value(body, k) for k in written.captures]
        body.outputs[count:count] = values
        return written

    def lower(
        self,
        types: tuple[TensorType, ...],
        *args: Any,
        body: Graph,
        num_carry: int,
        length: Size,
        reverse: bool,
        unroll: int,
        progress: Any = None,
    ) -> CountedLoop:
        parts = split_args(self, args, {"body": body})
        has_effects = progress is not None or "callback" in effects(body)
        independent = num_carry == 0 and not has_effects  # like a map
        return CountedLoop(
            body,
            length,
            before=parts.symbols,
            carry=parts.operands[:num_carry],
            xs=parts.operands[num_carry:],
            after=parts.captures,
            reverse=reverse and not independent,
            independent=independent,
            unroll=unroll,
            ticks=progress is not None,
        )

    def of_fixed_sizes(
        self, operands: Sequence[Operand], params: dict[str, Any]
    ) -> Graph | None:
        return padded(self, params) if changing_sizes(params) else None

    def signature(self, node: Node) -> Signature:
        parts = split_args(self, node.args, node.params)
        body: Graph = node.params["body"]
        count = node.params["num_carry"]
        args = roles(
            ("symbol", len(parts.symbols)),
            ("carry", count),
            ("slice", len(parts.operands) - count),
            ("invariant", len(parts.captures)),
        )
        results = roles(("carry", count), ("stacked", len(body.outputs) - count))
        region = Region(
            "body",
            body,
            tuple(Port(role, i) for i, role in enumerate(args)),
            tuple(Port(role, i) for i, role in enumerate(results)),
            runs_of(node.params["length"]),
        )
        return Signature(args, results, (region,))

    def with_roles(
        self, params: dict[str, Any], args: Sequence[Role], results: Sequence[Role]
    ) -> dict[str, Any]:
        return dict(params, num_carry=args.count("carry"))

    def transpose_rule(
        self,
        cotangents: Sequence[Tangent],
        operands: Sequence[Any],
        params: dict[str, Any],
    ) -> Sequence[Tangent | None]:
        return transpose_scan(cotangents, operands, params)


SCAN = Scan()


class _LinearArgs(NamedTuple):
    """The indices of the args of a linear scan.

    carry, slices, sums        the args in which it is linear; `sums` are captures
    symbols, stacks, captures  the other args
    """

    symbols: list[int]
    carry: list[int]
    slices: list[int]
    sums: list[int]
    stacks: list[int]
    captures: list[int]

    @classmethod
    def of(cls, signature: Signature, operands: Sequence[Any]) -> "_LinearArgs":
        def where(role: Role, linear: bool | None = None) -> list[int]:
            return [
                i
                for i, r in enumerate(signature.args)
                if r == role and linear in (None, isinstance(operands[i], Unknown))
            ]

        return cls(
            where("symbol"),
            where("carry"),
            where("slice", True),
            where("invariant", True),
            where("slice", False),
            where("invariant", False),
        )


def transpose_scan(
    cotangents: Sequence[Tangent], operands: Sequence[Any], params: dict[str, Any]
) -> list[Tangent | None]:
    """Return the cotangents of a scan that is linear in its carry and in those slices
    and captures that are `Unknown`: the results of a scan in the opposite direction.

    Its carry consists of the carry's cotangents and the sums of the cotangents of
    captures.
    """
    _, signature = node_and_signature(SCAN, operands, params)
    [region] = signature.regions
    args = _LinearArgs.of(signature, operands)
    count = params["num_carry"]
    ys = [
        k for k in range(count, len(cotangents)) if not isinstance(cotangents[k], Zero)
    ]
    inputs = [
        *(operands[i] for i in args.symbols),
        *(instantiate(ct) for ct in cotangents[:count]),
        *(instantiate(Zero(operands[i].type)) for i in args.sums),
        *(instantiate(cotangents[k]) for k in ys),
        *(operands[i] for i in (*args.stacks, *args.captures)),
    ]
    backward = {
        **in_reverse(params),
        "body": _transposed_body(region.graph, args, ys),
        "num_carry": count + len(args.sums),
        "reverse": not params["reverse"],
    }
    results = bind(SCAN, inputs, backward)
    by_arg = dict(zip((*args.carry, *args.sums, *args.slices), results, strict=True))
    return [by_arg.get(i) for i in range(len(operands))]


def _transposed_body(graph: Graph, args: _LinearArgs, ys: Sequence[int]) -> Graph:
    """Return one step backwards: from cotangents of the carry and of the `ys` to
    cotangents of the linear inputs. Those of captures are added to a carry."""
    inner = [v.type.strong() for v in graph.inputs]
    zeros: list[Tangent] = [Zero(o.type) for o in graph.outputs]
    totals: list[Value] = []

    def add_inputs(tracer: Tracer) -> tuple[dict[int, Value], list[Tangent]]:
        cotangents = zeros.copy()
        for k, i in enumerate(args.carry):
            cotangents[k] = tracer.operand(inner[i], "ct")
        totals.extend(tracer.operand(inner[i], "sum") for i in args.sums)
        for k in ys:
            cotangents[k] = tracer.operand(zeros[k].type.strong(), "ct")
        values: dict[int, Value] = {
            i: tracer.operand(inner[i], "r") for i in args.stacks
        }
        for i in args.captures:
            var = tracer.graph.add_input(inner[i], "r", "capture")
            values[i] = TracedTensor(tracer, var)
        return values, cotangents

    pulled = pull(graph, [*args.carry, *args.slices, *args.sums], add_inputs)
    input_cts = pulled.cotangents
    with using(pulled.tracer):
        sums = [added(t, input_cts[i]) for t, i in zip(totals, args.sums, strict=True)]
        carry, slices_ = (
            [input_cts[i] for i in part] for part in (args.carry, args.slices)
        )
        outputs = [instantiate(t) for t in (*carry, *sums, *slices_)]
    return pulled.tracer.close(outputs)


def first_scan_carry(call: Call) -> list[Value]:
    count = call.params["num_carry"]
    return first_carry(call, count, lambda: SCAN.trace_step(call)[1])


class Step:
    """The body of a scan in debug mode: the carry's types settle as it runs."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.function = call.functions["body"]
        self.body = Recorder(call.name, self.function, private=True)

    def __call__(self, *inputs: Value) -> list[Value]:
        count = self.call.params["num_carry"]
        results = self.body(*inputs)
        _check_pair(self.call, self.body.spec)
        before, after = inputs[:count], results[:count]
        carry = settle_step(self.call, self.function, before, after)
        return [*carry, *results[count:]]


def _check_pair(call: Call, spec: Any) -> None:
    """Check the structure of the result of a body.

    Raises:
        StructureError: it is not a pair of the carry's structure and a `y`.
    """
    function = call.functions["body"]
    if spec.type is not tuple or spec.num_children != 2:
        raise StructureError(
            f"{call.name}: {function.label} must return a pair `(carry, y)`, and "
            f"returns {shown(spec)}. Return `(carry, None)` if there is no `y`."
        )
    assert call.spec is not None
    check_structure(call.name, function.label, spec.child(0), call.spec)


def scan_result(call: Call, spec: Any, results: Sequence[Any]) -> Any:
    assert call.spec is not None
    count = call.params["num_carry"]
    carry = pytree.unflatten(call.spec, results[:count])
    return carry, pytree.unflatten(spec.child(1), results[count:])


def scan_types(call: Call) -> tuple[Any, list[TensorType], list[TensorType]]:
    """Return the structure of the result, and the types of the carry and of a `y`."""
    parent = current()
    marks = mark(parent) if isinstance(parent, Tracer) else []
    body, types = SCAN.trace_step(call)
    body.tracer.closed = True
    rollback(marks)
    return body.spec, types, body.types[len(types) :]
