"""`while_loop` with all its rules, and `fori_loop`, which is built on it."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import inf
from typing import Any, Final, final

from hopflow import dtypes, pytree
from hopflow.autograd import region_vjp
from hopflow.autograd.partition import Keep
from hopflow.autograd.preaccumulation import preaccumulate
from hopflow.bind import Operand, Value, bind, current, run_graph
from hopflow.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    LoopLimitError,
    PredicateError,
)
from hopflow.graph.core import Arg, Constant, Graph, Node, Var, size_of
from hopflow.graph.interpreter import Evaluate
from hopflow.graph.regions import Port, Region, Role, Signature, roles
from hopflow.graph.regions import result_types as bound_result_types
from hopflow.graph.rewriting import clone
from hopflow.graph.types import TensorType
from hopflow.hops.base import (
    Call,
    Parts,
    RegionOperator,
    check_scalar,
    derived,
    split_args,
    truth,
)
from hopflow.hops.dynamic_shapes import changing_sizes, padded
from hopflow.hops.loops import (
    as_types,
    calling,
    changed_types,
    check_sizes,
    dynamic_sizes,
    empty_stacks,
    first_carry,
    settle_step,
    spread_specs,
    stacked,
    stacked_results,
    stacked_types,
    trace_settled,
)
from hopflow.hops.reverse_modes import COUNTER, Checkpoint, LoopDerivatives
from hopflow.hops.scan import SCAN
from hopflow.hops.subgraphs import (
    Body,
    Function,
    Recorder,
    Written,
    check_structure,
    close_bodies,
    commit,
    flatten_operands,
    own_copy,
    present_value,
    refuse_writes,
    require_callable,
    trace_body,
    written_inputs,
)
from hopflow.loop_ir.kernels import WhileLoop
from hopflow.ops.elementwise import add, less
from hopflow.ops.opdef import OPERATIONS, as_operand, convert_to
from hopflow.ops.sizes import specialised
from hopflow.progress import Meter, as_progress, progress_of
from hopflow.symbolic.ranges import ValueRange
from hopflow.symbolic.size import Symbol
from hopflow.tensor import EagerTensor
from hopflow.trace.source import input_names
from hopflow.trace.tracer import Tracer, range_of
from hopflow.zeros import Tangent

REVERSE_MODES: Final = ("auto", "save", "recompute", "checkpoint")


@final
class While(RegionOperator):
    """`while_loop(symbols; carry; captures; test, body, ...) -> carry, ys`

    test       Graph, (*symbols, *carry, *captures) -> bool[]
    body       Graph, of the same inputs, -> carry, one step's y
    ys         stacks with one row for each step; derivatives add them
    num_carry  the number of leaves of the carry, which are all the operands
    max_steps  None, or the number of steps after which the test must be False
    reverse_mode  what reverse mode saves: one of `REVERSE_MODES`, or a Checkpoint
    progress   optional: the label or function that reports progress
    counted    optional: the loop counts from a carry up to a bound
    """

    name = "while_loop"
    counts_by_rows = True

    def prepare(
        self,
        cond_fn: Any,
        body_fn: Any,
        carry: Any,
        *,
        max_steps: Any,
        reverse_mode: Any,
        dynamic_carry: Any,
        progress: Any = None,
    ) -> Call:
        require_callable(self.name, "cond_fn", cond_fn)
        require_callable(self.name, "body_fn", body_fn)
        flat, spec = flatten_operands(self.name, "carry", carry)
        names = input_names(body_fn, spread_specs(carry, spec))
        functions = {
            "test": Function("cond_fn", cond_fn, names, calling(cond_fn, carry, spec)),
            "body": Function("body_fn", body_fn, names, calling(body_fn, carry, spec)),
        }
        params = _loop_params(self.name, len(flat), max_steps, reverse_mode)
        params |= as_progress(self.name, progress)
        call = Call(self.name, [], flat, functions, params, spec)
        call.paths = pytree.leaf_paths(spec, "carry")
        call.dynamic = dynamic_sizes(self.name, dynamic_carry, carry, body_fn)
        check_sizes(call, [o.type for o in flat])
        return call

    def prepare_fori(
        self, lower: Any, upper: Any, body_fn: Any, carry: Any, progress: Any
    ) -> Call:
        """Prepare the call of a `fori_loop`: the counter is the first carry."""
        name = "fori_loop"
        require_callable(name, "body_fn", body_fn)
        first, last = _bounds(name, lower, upper)
        # A Python number takes the dtype of the counter, which is that of both bounds.
        end = last.value if isinstance(last, Constant) else last
        steps = ValueRange(range_of(first).low, range_of(last).high - 1)
        flat, spec = flatten_operands(name, "carry", carry)
        several = type(carry) is tuple

        def body(leaves: Sequence[Any]) -> Any:
            tracer = current()
            if isinstance(tracer, Tracer):
                tracer.learn_ranges(leaves[:1], [steps])
            # This comes before the body, which may write to `i` in place.
            following = add(leaves[0], 1)
            tree = pytree.unflatten(spec, leaves[1:])
            next_carry = (
                body_fn(leaves[0], *tree) if several else body_fn(leaves[0], tree)
            )
            return following, next_carry

        counter = pytree.structure(0)
        names = input_names(body_fn, [counter, *spread_specs(carry, spec)])
        functions = {
            "test": Function("cond_fn", body_fn, names, lambda xs: less(xs[0], end)),
            "body": Function("body_fn", body_fn, names, body),
        }
        params = _loop_params(name, 1 + len(flat), None, "auto")
        params |= counted(as_progress(name, progress))
        call = Call(name, [], [first, *flat], functions, params, spec, counts=True)
        if isinstance(first, Constant | EagerTensor) and isinstance(
            last, Constant | EagerTensor
        ):
            call.total = partial(_difference, first, last)
        call.paths = ["i", *pytree.leaf_paths(spec, "carry")]
        return call

    def run_debug(self, call: Call) -> Any:
        function = call.functions["body"]
        test = Recorder(call.name, call.functions["test"], True, _REFUSAL)
        body = Recorder(call.name, function, private=True)
        is_first = True

        def checked_test(*carry: Value) -> tuple[Value, ...]:
            results = test(*carry)
            _check_test(call, [r.type for r in results], test.spec)
            return results

        def settled_body(*carry: Value) -> list[Value]:
            nonlocal is_first
            results = body(*carry)
            _check_body(call, body.spec)
            after = settle_step(call, function, carry, results)
            is_first = False
            return after

        count = call.params["num_carry"]
        carry = first_carry(call, count, lambda: self.trace_step(call)[1])
        results = self.debug(
            *carry,
            test=checked_test,
            body=settled_body,
            total=call.total and call.total(),
            **call.params,
        )
        if is_first:  # no step ran, so the types of the results are not settled
            call.params.pop("progress", None)
            return self.trace(call)
        return _result(call, [own_copy(r) for r in results])

    def trace_step(self, call: Call) -> tuple[Body, list[TensorType]]:
        """Return the traced body, and the types on which the carry has settled."""
        return trace_settled(
            call,
            "while_loop/body",
            call.functions["body"],
            call.params["num_carry"],
            lambda body: _check_body(call, body.spec),
        )

    def trace(self, call: Call) -> Any:
        body, types = self.trace_step(call)
        test = trace_body(
            call.name,
            "while_loop/test",
            call.functions["test"],
            types,
            dynamic=call.dynamic,
        )
        _check_test(call, test.types, test.spec)
        carry = as_types(call.operands, types)
        always = test.outputs[0]
        if isinstance(always, Constant):
            if not always.value:
                return _result(call, [own_copy(o) for o in carry])
            if call.params["max_steps"] is None:
                raise ArgumentValueError(
                    f"{call.name}: {test.function.label} is always True, so the loop "
                    "would never end. Give `max_steps`, or test the carry."
                )
        written = self.functionalize([test, body])
        origins = [body.tracer.captures[k].origin for k in written.captures]
        closed = close_bodies([test, body], carried=written.captures)
        params = dict(call.params, num_carry=len(carry) + len(origins))
        args = [*closed.symbols, *carry, *origins, *closed.captures]
        graphs = dict(zip(("test", "body"), closed.graphs, strict=True))
        results = bind(self, args, {**graphs, **params})
        commit(origins, results[len(carry) :])
        return _result(call, results[: len(carry)])

    # --- rules ---

    jvp_rule = derived
    transpose_rule = derived
    batch_rule = derived
    export = derived

    def debug(
        self,
        *carry: Any,
        test: Any,
        body: Any,
        max_steps: int | None,
        progress: Any = None,
        total: int | None = None,
        **_: Any,
    ) -> Any:
        count, rows = len(carry), []
        with Meter(progress, total) as meter:
            while truth(test(*carry)[0]):
                if meter.done == max_steps:
                    raise LoopLimitError(limit_message(self.name, max_steps))
                results = tuple(body(*carry))
                carry = results[:count]
                rows.append(results[count:])
                meter.step()
        return (*carry, *(stacked(rows) if rows else ()))

    def interpret(
        self,
        args: Sequence[Any],
        params: dict[str, Any],
        evaluate: Evaluate = run_graph,
    ) -> tuple[Value, ...]:
        if bounds := _counted_bounds(split_args(self, args, params), params):
            params = {**params, "total": _difference(*bounds)}
        results = super().interpret(args, params, evaluate)
        if len(results) == len(params["body"].outputs):
            return results
        ys = bound_result_types(self, args, params)[len(results) :]  # stacks of no rows
        rows = [t.with_shape(t.shape[1:]) for t in ys]
        return (*results, *empty_stacks(stacked_types(rows, 0)))

    def infer(
        self,
        *types: TensorType,
        test: Graph,
        body: Graph,
        num_carry: int,
        max_steps: int | None,
        **_: Any,
    ) -> tuple[TensorType, ...]:
        [holds] = test.out_types
        check_scalar(self.name, "the result of `test`", holds, "b")
        carry = changed_types(body, num_carry)
        rows = body.out_types[num_carry:]
        if not rows:
            return tuple(carry)
        most = inf if max_steps is None else max_steps
        steps = size_of(Symbol("steps", None, ValueRange(0, most)))
        return (*carry, *stacked_results(self.name, body, rows, steps))

    def functionalize(self, bodies: Sequence[Body]) -> Written:
        """Turn a captured tensor that the body writes to into one more carry."""
        test, body = bodies
        refuse_writes([test], _REFUSAL)
        written = Written(written_inputs(bodies).captures)
        body.outputs += [present_value(body, k) for k in written.captures]
        return written

    def node_effects(self, params: dict[str, Any]) -> frozenset[str]:
        return _NONE if params["max_steps"] is None else _TRAP

    def lower(
        self,
        types: tuple[TensorType, ...],
        *args: Any,
        test: Graph,
        body: Graph,
        max_steps: int | None,
        progress: Any = None,
        **others: Any,
    ) -> WhileLoop:
        parts = split_args(self, args, {"test": test})
        graphs = {"test": test, "body": body}
        return WhileLoop(
            test,
            body,
            before=parts.symbols,
            carry=parts.operands,
            after=parts.captures,
            max_steps=max_steps,
            ticks=progress is not None,
            bounds=_counted_bounds(parts, {**graphs, **others}),
        )

    def linearize_rule(
        self,
        operands: Sequence[Operand],
        tangents: Sequence[Tangent],
        params: dict[str, Any],
    ) -> Any:
        """The loop stacks the residuals of each step; its linear part is a scan over
        them."""
        if changing_sizes(params):
            return super().linearize_rule(operands, tangents, params)
        mode = params["reverse_mode"]
        if mode == "auto":
            by_jacobian = preaccumulate(self, operands, tangents, params)
            if by_jacobian is not None:
                return by_jacobian
        if mode in _KEPT:
            return region_vjp.linearize(self, operands, tangents, params, _KEPT[mode])
        return LOOP_DERIVATIVES.linearize(self, operands, tangents, params)

    def linear_part(
        self, params: dict[str, Any], results: Sequence[Value]
    ) -> tuple[RegionOperator, dict[str, Any]]:
        scan_params = {
            "body": params["body"],
            "num_carry": params["num_carry"],
            "length": results[-1].type.shape[0],
            "reverse": False,
            "unroll": 1,
            **progress_of(params),
        }
        return SCAN, scan_params

    def of_fixed_sizes(
        self, operands: Sequence[Operand], params: dict[str, Any]
    ) -> Graph | None:
        return padded(self, params) if changing_sizes(params) else None

    def counted(
        self, operands: Sequence[Operand], params: dict[str, Any]
    ) -> tuple[Value, ...]:
        """Return the number of steps, and the results."""
        test, body = _counting(params["test"]), _counting(params["body"], step=True)
        lead = len(params["body"].symbols)
        args = [*operands[:lead], Constant(0, COUNTER), *operands[lead:]]
        counting = {"test": test, "body": body, "num_carry": params["num_carry"] + 1}
        return bind(self, args, {**params, **counting})

    def signature(self, node: Node) -> Signature:
        parts = split_args(self, node.args, node.params)
        symbols, count = len(parts.symbols), len(parts.operands)
        captures = len(parts.captures)
        args = roles(("symbol", symbols), ("carry", count), ("invariant", captures))
        inputs = tuple(Port(role, i) for i, role in enumerate(args))
        holds = (Port("predicate"),)
        results = roles(
            ("carry", count), ("stacked", len(node.params["body"].outputs) - count)
        )
        outputs = tuple(Port(role, i) for i, role in enumerate(results))
        test, body = node.params["test"], node.params["body"]
        regions = (
            Region("test", test, inputs, holds, "at least once"),
            Region("body", body, inputs, outputs, "any times"),
        )
        return Signature(args, results, regions)

    def with_roles(
        self, params: dict[str, Any], args: Sequence[Role], results: Sequence[Role]
    ) -> dict[str, Any]:
        return dict(params, num_carry=args.count("carry"))


_KEPT: Final[dict[Any, Keep]] = {
    "auto": "fewest",
    "save": "cheapest",
    "recompute": "fewest",
}
"""The residuals that each mode saves of each step; "checkpoint" saves none."""
_REFUSAL: Final = "a condition only tests. Write to it in `body_fn`."
_NONE: Final[frozenset[str]] = frozenset()
_TRAP: Final = frozenset(["trap"])

WHILE = While()


def limit_message(where: str, max_steps: int) -> str:
    return (
        f"{where}: `max_steps` = {max_steps} steps were taken and the condition still "
        "holds. Raise `max_steps`, or check the condition."
    )


def counted(progress: dict[str, Any]) -> dict[str, Any]:
    """Mark the progress of a loop that tests `i < n` first and increments `i` in each
    step."""
    return {**progress, "counted": True} if progress else {}


def _counted_bounds(parts: Parts, params: Mapping[str, Any]) -> tuple[Any, Any] | None:
    """Return the bounds between which such a loop counts, each a value or a
    constant."""
    if "counted" not in params:
        return None
    test: Graph = params["test"]
    args = *parts.symbols, *parts.operands, *parts.captures
    arg_of: dict[Arg, Any] = dict(zip(test.inputs, args, strict=True))
    [condition] = test.outputs
    while isinstance(condition, Var) and condition.node.op is OPERATIONS["bitwise_and"]:
        condition = condition.node.args[0]
    if not isinstance(condition, Var) or condition.node.op is not OPERATIONS["less"]:
        return None  # a transform has replaced the test
    bounds = [arg_of.get(a, a) for a in condition.node.args]
    are_bound = all(a in arg_of or isinstance(a, Constant) for a in condition.node.args)
    return (bounds[0], bounds[1]) if are_bound else None


def _difference(first: Any, last: Any) -> int:
    """Return the number of steps between two bounds."""
    ends = (x.value if isinstance(x, Constant) else x.item() for x in (last, first))
    return max(int(next(ends)) - int(next(ends)), 0)


def _counting(graph: Graph, *, step: bool = False) -> Graph:
    """Return a graph of the loop with the number of steps as one more carry, the
    first."""
    graph = clone(graph)
    counter = graph.add_input(COUNTER, "steps")
    inputs = [
        v for v in graph.inputs if v.node.section != "symbol" and v is not counter
    ]
    graph.inputs = [*graph.symbols, counter, *inputs]
    graph.name_inputs()
    if step:
        one = Constant(1, COUNTER)
        [next_count] = graph.call(
            OPERATIONS["add"], [counter, one], {}, [COUNTER]
        ).results
        graph.outputs = (next_count, *graph.outputs)
    return graph


def _loop_params(
    op: str, num_carry: int, max_steps: Any, reverse_mode: Any
) -> dict[str, Any]:
    max_steps = specialised(max_steps)
    if max_steps is not None:
        if isinstance(max_steps, bool) or not isinstance(max_steps, int):
            raise ArgumentTypeError(
                f"{op}: `max_steps` must be an int or None, and is "
                f"`{type(max_steps).__name__}`."
            )
        if max_steps >= 2**63:
            raise ArgumentValueError(
                f"{op}: `max_steps` must fit int64, and is {max_steps}."
            )
        if max_steps < 0:
            raise ArgumentValueError(
                f"{op}: `max_steps` must not be negative, and is {max_steps}."
            )
    if not isinstance(reverse_mode, Checkpoint) and not (
        isinstance(reverse_mode, str) and reverse_mode in REVERSE_MODES
    ):
        raise ArgumentValueError(
            f"{op}: `reverse_mode` must be 'auto', 'save', 'recompute', "
            f"'checkpoint' or an `hf.Checkpoint`, and is {reverse_mode!r}."
        )
    return {
        "num_carry": num_carry,
        "max_steps": max_steps,
        "reverse_mode": reverse_mode,
    }


def _bounds(op: str, lower: Any, upper: Any) -> tuple[Operand, Operand]:
    """Return the bounds of a counter, promoted to one dtype."""
    bounds = [as_operand(op, i, b) for i, b in enumerate((lower, upper))]
    for argument, bound in zip(("lower", "upper"), bounds, strict=True):
        check_scalar(op, f"`{argument}`", bound.type, "iu")
    dtype, weak = dtypes.promote(*((b.type.dtype, b.type.weak) for b in bounds))
    first, last = (convert_to(b, dtype, weak=weak) for b in bounds)
    return first, last


def _check_body(call: Call, spec: Any) -> None:
    """Check the structure of the carry that a body returns.

    Raises:
        StructureError: it differs from that of the carry passed in.
    """
    assert call.spec is not None
    carry = spec.child(1) if call.counts else spec
    check_structure(call.name, call.functions["body"].label, carry, call.spec)


def _check_test(call: Call, types: Sequence[TensorType], spec: Any) -> None:
    """Check the result of a test.

    Raises:
        PredicateError: it is not one bool scalar.
    """
    label = call.functions["test"].label
    if len(types) != 1 or not spec.is_leaf():
        raise PredicateError(
            f"{call.name}: {label} must return a bool scalar (bool[]), and returns a "
            f"tree of {len(types)} tensors. Combine them with `hf.logical_and`."
        )
    check_scalar(call.name, f"the result of {label}", types[0], "b")


def _result(call: Call, results: Sequence[Any]) -> Any:
    assert call.spec is not None
    return pytree.unflatten(call.spec, results[1:] if call.counts else results)


def while_loop(
    cond_fn: Callable[..., Any],
    body_fn: Callable[..., Any],
    carry: Any,
    *,
    max_steps: int | None = None,
    reverse_mode: str | Checkpoint = "auto",
    dynamic_carry: Any = None,
    progress: str | Callable[[int, int | None], Any] | None = None,
) -> Any:
    """Run `while cond_fn(*carry): carry = body_fn(*carry)` and return the last carry.

    A tuple is spread over the parameters, and a tuple is returned; any other pytree is
    passed as one argument. A carry is a value: in-place writes to it in the body go to
    a private copy. Writes to tensors of enclosing functions reach the caller.

    Args:
        cond_fn: Returns a bool scalar.
        body_fn: Returns the next carry, of the same structure and types.
        carry: The first carry: a pytree of tensors and numbers. A number takes the
            dtype that the body returns.
        max_steps: The largest number of steps; None for no limit.
        reverse_mode: What the backward pass of a derivative saves. "recompute": the
            carry of each step, or smaller residuals that suffice. "save": of each step
            whatever costs least to save or recompute. "checkpoint", or a `Checkpoint`:
            a few carries, from which the others are recomputed. "auto": nothing, if at
            most four numbers of one dtype are differentiated, since the loop then
            computes the Jacobian as it runs, in forward mode, and there is no backward
            pass; else as "recompute". "recompute" and "save" allocate stacks that grow
            with the number of steps, or `max_steps` rows at once.
        dynamic_carry: The sizes of the carry that steps change, by parameter name and
            axis: `{"tokens": {0: hf.Dim("n", max=512)}}`. Equal names are equal sizes.
            Memory is allocated for `max`, or doubled when needed.
        progress: A label, with which the terminal shows the progress of the loop, also
            of a compiled one. Or a function, which is called with the number of steps
            done and the total, which is None until the loop has ended: at the beginning
            and the end, and at most ten times a second, also for a nested loop. A
            backward pass shows "label (backward)", and calls no function.

    Returns:
        The last carry, in the structure of `carry`.

    Raises:
        CheckError: a size of the carry is not one that its `Dim` allows.
        PredicateError: `cond_fn` does not return a bool scalar.
        StructureError, CarryTypeError: `body_fn` returns a carry of another structure
            or type.
        ArgumentValueError: the condition is the constant True, without `max_steps`.
        LoopLimitError: the condition still holds after `max_steps` steps.
        MutationError: `cond_fn` writes to a tensor that it closes over.

    >>> hf.while_loop(lambda x: x < 100, lambda x: x * 2, hf.asarray(3))
    Tensor(192, i64[])
    """
    return WHILE(
        cond_fn,
        body_fn,
        carry,
        max_steps=max_steps,
        reverse_mode=reverse_mode,
        dynamic_carry=dynamic_carry,
        progress=progress,
    )


def fori_loop(
    lower: Any,
    upper: Any,
    body_fn: Callable[..., Any],
    carry: Any,
    *,
    progress: str | Callable[[int, int | None], Any] | None = None,
) -> Any:
    """Run `for i in range(lower, upper): carry = body_fn(i, *carry)` and return the
    carry.

    This is a `while_loop` that counts; the same rules spread and type the carry.

    Args:
        lower, upper: Integers, or integer scalars known at run time.
        body_fn: Takes the number of the step, an integer scalar, and the carry; returns
            the next carry.
        carry: The first carry: a pytree of tensors and numbers.
        progress: A label to show a progress bar with, or a function; see `while_loop`.

    Returns:
        The last carry, in the structure of `carry`.

    Raises:
        PredicateError: a bound is not an integer scalar.
        StructureError, CarryTypeError: `body_fn` returns a carry of another structure
            or type.

    >>> hf.fori_loop(0, 5, lambda i, total: total + i, 0)
    Tensor(10, i64[])
    """
    return WHILE.use(WHILE.prepare_fori, lower, upper, body_fn, carry, progress)


LOOP_DERIVATIVES: Final = LoopDerivatives(while_loop)
