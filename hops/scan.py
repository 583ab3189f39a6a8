"""`scan`: a loop over slices that carries a value and stacks results. All its rules."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

from hopflow import pytree
from hopflow.bind import Value, bind
from hopflow.errors import ArgumentTypeError, ArgumentValueError, StructureError
from hopflow.graph.core import Graph, Node
from hopflow.graph.regions import Port, Region, Role, Runs, Signature
from hopflow.graph.regions import result_types as bound_result_types
from hopflow.graph.types import TensorType
from hopflow.hops.base import Call, HigherOrderOp, split_args
from hopflow.hops.bodies import (
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
from hopflow.hops.loops import (
    as_types,
    empty_stacks,
    flatten_stacks,
    input_names,
    settle_step,
    slice_types,
    slices,
    stacked,
    stacked_types,
    trace_settled,
)
from hopflow.loop_ir.kernels import CountedLoop
from hopflow.pytree import Spec
from hopflow.symbolic.size import Size


@final
class Scan(HigherOrderOp):
    """`scan(symbols; carry, xs; captures; body, ...) -> carry, ys`

    carry      the first `num_carry` operands
    xs         T[length, *s] each: the other operands
    body       Graph, (*symbols, *carry, *slices, *captures) -> carry, one step's y
    length     how many steps there are
    reverse    steps run from the last slice to the first
    unroll     how many steps a compiled loop does at a time
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
    ) -> Call:
        require_callable(self.name, "combine_fn", combine_fn)
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
        }
        operands = [*carry, *stacks.leaves]
        found = Call(self.name, [], operands, functions, params, spec)
        found.paths = pytree.leaf_paths(spec, "carry")
        return found

    def run_debug(self, call: Call) -> Any:
        if call.params["length"] == 0:
            return self.trace(call)
        function = call.functions["body"]
        count = call.params["num_carry"]
        body = Recorder(self.name, function, private=True)
        is_first = True

        def settled_body(*inputs: Value) -> list[Value]:
            nonlocal is_first
            results = body(*inputs)
            _split_spec(call, body.spec)
            after = settle_step(
                call, function, inputs[:count], results[:count], first=is_first
            )
            is_first = False
            return [*after, *results[count:]]

        operands = [as_value(o) for o in call.operands]
        results = self.debug(*operands, body=settled_body, **call.params)
        return _result(call, body.spec, [own_copy(r) for r in results])

    def trace(self, call: Call) -> Any:
        count = call.params["num_carry"]
        body, types = trace_settled(
            call,
            "scan/body",
            call.functions["body"],
            count,
            lambda body: _split_spec(call, body.spec),
            slice_types([o.type for o in call.operands[count:]]),
        )
        written = self.functionalize([body])
        origins = [body.tracer.captures[k].origin for k in written.captures]
        # Inputs are in the order of args: hidden carries stand behind the carry.
        closed = close_bodies([body], carried=written.captures)
        move_inputs(closed.graphs[0], len(closed.symbols), count, len(origins))
        carry = as_types(call.operands[:count], types)
        args = [*closed.symbols, *carry, *origins, *call.operands[count:]]
        params = dict(call.params, num_carry=count + len(origins))
        results = bind(
            self, [*args, *closed.captures], {"body": closed.graphs[0], **params}
        )
        last = count + len(origins)
        commit(origins, results[count:last])
        return _result(call, body.spec, [*results[:count], *results[last:]])

    # --- rules ---

    def debug(
        self,
        *operands: Any,
        body: Any,
        num_carry: int,
        length: int,
        reverse: bool,
        **_: Any,
    ) -> tuple[Any, ...]:
        carry, xs = operands[:num_carry], operands[num_carry:]
        rows: list[Any] = []
        for i in reversed(range(length)) if reverse else range(length):
            results = body(*carry, *slices(xs, i))
            carry = tuple(results[:num_carry])
            rows.append(results[num_carry:])
        return (*carry, *stacked(rows[::-1] if reverse else rows))

    def interpret(self, args: Sequence[Any], params: dict[str, Any]) -> Any:
        if params["length"] != 0:
            return super().interpret(args, params)
        count = params["num_carry"]
        carry = split_args(self, args, params).operands[:count]
        types = bound_result_types(self, args, params)[count:]
        return (*map(as_value, carry), *empty_stacks(types))

    def infer(
        self,
        *types: TensorType,
        body: Graph,
        num_carry: int,
        length: Size,
        **_: Any,
    ) -> tuple[TensorType, ...]:
        carry = [v.type for v in body.operands[:num_carry]]
        return (*carry, *stacked_types(body.out_types[num_carry:], length))

    def functionalize(self, bodies: Sequence[Body]) -> Written:
        """A captured tensor that the body writes is one more carry."""
        [body] = bodies
        written = Written(written_inputs(bodies).captures)
        count = _carry_leaves(body.spec)
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
    ) -> CountedLoop:
        parts = split_args(self, args, {"body": body})
        return CountedLoop(
            body,
            length,
            before=parts.symbols,
            carry=parts.operands[:num_carry],
            xs=parts.operands[num_carry:],
            after=parts.captures,
            reverse=reverse,
            unroll=unroll,
        )

    def signature(self, node: Node) -> Signature:
        parts = split_args(self, node.args, node.params)
        body: Graph = node.params["body"]
        count = node.params["num_carry"]
        roles: list[Role] = ["symbol"] * len(parts.symbols)
        roles += ["carry"] * count
        roles += ["slice"] * (len(parts.operands) - count)
        roles += ["invariant"] * len(parts.captures)
        results: list[Role] = ["carry"] * count
        results += ["stacked"] * (len(body.outputs) - count)
        region = Region(
            "body",
            body,
            tuple(Port(role, i) for i, role in enumerate(roles)),
            tuple(Port(role, i) for i, role in enumerate(results)),
            how_often(node.params["length"]),
        )
        return Signature(tuple(roles), tuple(results), (region,))

    def with_roles(
        self, params: dict[str, Any], args: Sequence[Role], results: Sequence[Role]
    ) -> dict[str, Any]:
        return dict(params, num_carry=args.count("carry"))
