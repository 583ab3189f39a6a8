"""`custom_jvp` and `custom_vjp`: functions that bring their own derivatives.

On a tape their rules run at once, on values. In a trace that may be differentiated
later a call is a node of the function's graph, which keeps the rules.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final, final

from hopflow import pytree
from hopflow.autograd.api import Linear, Primals, like
from hopflow.autograd.linearize import (
    LinearTracer,
    UsesOperator,
    counted,
    linear_of,
    linear_tracers,
)
from hopflow.autograd.pullback import PullbackRule, pulled_by
from hopflow.autograd.rules import is_differentiable
from hopflow.autograd.tape import Tape
from hopflow.batching import operators as batching
from hopflow.batching.api import over_examples
from hopflow.batching.graphs import Batched, Lane, as_batched
from hopflow.batching.operators import each_example
from hopflow.bind import Interpreter, Operand, Value, current, recorded, using
from hopflow.entries import entry
from hopflow.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    DerivativeError,
    EscapedValueError,
    HopflowError,
    MutationError,
    ResultTypeError,
)
from hopflow.graph.types import TensorType
from hopflow.hops.base import Call, split_args
from hopflow.hops.branches import Calling
from hopflow.hops.custom_pullback import Backward, BackwardOfMany, no_tangents
from hopflow.hops.custom_use import Ruled, Use
from hopflow.hops.subgraphs import (
    Body,
    Function,
    Written,
    add_inputs,
    captured_write,
    refuse_writes,
    require_callable,
    trace_body,
)
from hopflow.ops.convert import as_value, copy
from hopflow.ops.opdef import as_default, as_operand
from hopflow.ops.rules import as_integer
from hopflow.pickling import Transformed
from hopflow.pytree import Spec
from hopflow.symbolic.size import Size, free_symbols
from hopflow.trace.functional import TracedTensor
from hopflow.trace.own_writes import OwnWritesOnly, apart, own_writes_only
from hopflow.trace.rollback import mark, rollback
from hopflow.trace.scouting import Scouted, for_nothing, scouted
from hopflow.trace.source import name_of, where
from hopflow.trace.stand_ins import Known
from hopflow.trace.tracer import Tracer
from hopflow.zeros import LinearMap, Tangent, Zero, instantiate, is_zero


class _Custom(Ruled, Transformed):
    """What both decorators make: a function, called as it was before.

    checked   the kinds of arguments that its rules were compared with it for
    closed    those for which its rules read nothing of outside
    """

    @entry
    def __init__(
        self, fun: Callable[..., Any], nondiff_argnums: Sequence[int] = ()
    ) -> None:
        require_callable(self.name, "fun", fun)
        super().__init__(fun)
        self.fun = fun
        self.checked: set[Any] = set()
        self.closed: set[Any] = set()
        if not isinstance(nondiff_argnums, tuple | list):
            raise ArgumentTypeError(
                f"{self.name}: `nondiff_argnums` must be a tuple or a list of ints, "
                f"and is `{type(nondiff_argnums).__name__}`."
            )
        self.static = [
            as_integer(self.name, "nondiff_argnums", n) for n in nondiff_argnums
        ]

    def remade(self) -> tuple[Any, tuple[Any, ...]]:
        """See `Transformed`."""
        return type(self), (self.fun, self.static)

    def set_later(self) -> dict[str, Any]:
        """See `Transformed`: the rules."""
        return {k: v for k, v in vars(self).items() if k in type(self).__annotations__}

    @entry
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if (node := recorded(self, args, kwargs)) is not None:
            return node
        args = self._positional(args, kwargs)
        places = [self._place(n, len(args)) for n in self.static]
        given = tuple(a for i, a in enumerate(args) if i not in places)
        leaves, spec = pytree.flatten(given)
        use = Use(self, spec, {i: args[i] for i in places})
        operands = [
            as_default(as_operand(self.name, i, x)) for i, x in enumerate(leaves)
        ]
        with using(_interpreter(operands)):
            here = current()
            if here.is_eager:
                own = use.arguments(apart(leaves))
                return OwnWritesOnly(self.refusal, own).run(lambda: self.fun(*own))
            if isinstance(here, Tape):
                return self.on_tape(here, use, operands)
            found = self.scouted(here, use, operands)
            use = replace(use, reads=found.reads, symbols=found.symbols)
            return CUSTOM(use, [*operands, *(read.tensor for read in found.reads)])

    def refusal(self, type_: TensorType) -> MutationError:
        label = f"`{name_of(self.fun)}` ({where(self.fun) or 'fun'})"
        return captured_write(self.name, label, _REFUSAL, type_)

    def _positional(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not kwargs:
            return args
        bound = inspect.signature(self.fun).bind(*args, **kwargs)
        if bound.kwargs:
            raise ArgumentTypeError(
                f"{self.name}: `{name_of(self.fun)}` has arguments that can only be "
                f"given by name: {', '.join(bound.kwargs)}. Rules are called with "
                "arguments by position."
            )
        return bound.args

    def _place(self, n: int, count: int) -> int:
        if not -count <= n < count:
            raise ArgumentValueError(
                f"{self.name}: `nondiff_argnums` names argument {n}, and {count} were "
                "given. Count from 0, and name arguments of every call that are no "
                "tensors."
            )
        return n % count

    def on_tape(self, tape: Tape, use: Use, operands: Sequence[Operand]) -> Any:
        """Run the rules on values, below the tape, which sees only the results."""
        pairs = [tape.current(o) for o in operands]
        linear = tape.linear
        given = counted([t for _, t in pairs], linear)
        use = replace(use, below=self.below(tape))
        with using(tape.parent), _closed(self), own_writes_only(self.refusal) as own:
            leaves = [as_value(v) for v, _ in pairs]
            tangents: Sequence[Tangent]
            if all(map(is_zero, given)):
                args = use.arguments(leaves)
                values, spec = use.results(use.run(lambda: self(*args), leaves))
                tangents = [Zero(v.type) for v in values]
            elif linear is None or not any(linear_tracers(given)):
                values, spec, tangents = self.push(use, leaves, given)
                self.check_once(use, leaves, spec, values)
            else:
                values, spec, derivative = self.linearize(use, leaves, given)
                self.check_once(use, leaves, spec, values)
                with using(linear):
                    tangents = derivative(given)
            values = [v if own.has_made(v) else copy(v) for v in values]
        names = zip(values, tangents, strict=True)
        return pytree.unflatten(spec, [tape.given(v, t, "result") for v, t in names])

    def below(self, tape: Tape) -> Known:
        """What a tensor of a tape is below it, for the function and its rules."""

        def known(tensor: Value) -> Value | None:
            if not (isinstance(tensor, TracedTensor) and tensor.tracer is tape):
                return None
            var = tape.read(tensor)
            if not is_zero(tape.tangent(var)):
                raise _closes_over(self)
            return as_value(tape.values[var])

        return known

    def check_once(
        self, use: Use, leaves: Sequence[Value], spec: Spec, values: Sequence[Value]
    ) -> None:
        """Check what a rule gives, where the function has not run: the first time for
        arguments of a kind, if the function can be traced."""
        key = _kind(use, leaves)
        if key in self.checked:
            return
        self.checked.add(key)
        try:
            with for_nothing():
                [body] = CUSTOM.trace_bodies(CUSTOM.prepare(use, list(leaves)))
        except Exception:
            return  # it may do what only values allow
        try:
            replace(use, returns=body.spec).check(leaves, body.types, spec, values)
        except HopflowError:
            self.checked.remove(key)
            raise

    def scouted(
        self, tracer: Interpreter, use: Use, operands: Sequence[Operand]
    ) -> Scouted:
        """What the rules read of outside."""
        key = _kind(use, operands)
        if not isinstance(tracer, Tracer) or key in self.closed:
            return Scouted()
        found = scouted(
            self, self.name, tracer, lambda scout: self.try_rules(use, scout, operands)
        )
        own = free_symbols(*(n for o in operands for n in o.type.shape))
        is_closed = not found.reads and set(own).issuperset(found.symbols)
        if found.is_known and is_closed and not self.static:
            self.closed.add(key)
        return found

    def try_rules(self, use: Use, tracer: Tracer, operands: Sequence[Operand]) -> None:
        """Run the rules on operands of these types."""
        raise NotImplementedError

    @property
    def rules(self) -> tuple[Any, ...]:
        """What a trace of the function depends on besides itself."""
        raise NotImplementedError


_REFUSAL: Final = "its rules could not tell of that. Return the new value instead."


def _kind(use: Use, operands: Sequence[Operand]) -> Any:
    return use.spec, tuple([(o.type.dtype, o.type.ndim) for o in operands])


def _interpreter(operands: Sequence[Operand]) -> Interpreter | None:
    """Where a call runs: what no tangent takes part in is not linear."""
    here: Interpreter | None = current()
    while isinstance(here, LinearTracer) and not any(
        type(o) is TracedTensor and o.tracer is here for o in operands
    ):
        here = here.parent
    return here


@contextmanager
def _closed(function: Ruled) -> Iterator[None]:
    """Say what it means that a rule or a function reads a tensor of a tape."""
    try:
        yield
    except EscapedValueError as error:
        raise _closes_over(function) from error


def _closes_over(function: Ruled) -> DerivativeError:
    return DerivativeError(
        f"{function.name}: `{name_of(function.fun)}` closes over a tensor that depends "
        "on what is differentiated. Make it an argument."
    )


# --- forward --------------------------------------------------------------------------


class custom_jvp(_Custom):
    """A decorator: a function with a rule of its own for tangents.

        @hf.custom_jvp
        def f(x, y): ...

        @f.defjvp
        def _(primals, tangents): ...  # -> (result, tangent of the result)

    The rule must be linear in the tangents; its transpose is what gradients take. It
    may be differentiated itself.

    Args:
        fun: Takes and returns pytrees of tensors. Its arguments are values: what it
            writes to them the caller does not see. It writes to nothing of outside.
        nondiff_argnums: Positional arguments that are no tensors: the rule gets them
            first, before `primals`.
    """

    name = "custom_jvp"
    rule: Callable[..., Any] | None = None

    @property
    def rules(self) -> tuple[Any, ...]:
        return (self.rule,)

    def defjvp(self, rule: Callable[..., Any]) -> Callable[..., Any]:
        """Set the rule; also a decorator."""
        require_callable("defjvp", "rule", rule)
        self.rule = rule
        return rule

    def defjvps(self, *rules: Callable[..., Any] | None) -> None:
        """Set a rule for each argument: (t, result, *primals) -> what its tangent adds
        to the result's. None: nothing."""
        for part in rules:
            if part is not None:
                require_callable("defjvps", "rules", part)

        def rule(primals: Any, tangents: Any) -> Any:
            result = self(*primals)
            parts = [
                part(t, result, *primals)
                for part, t in zip(rules, tangents, strict=True)
                if part is not None
            ]
            zero = pytree.tree_map(lambda r: instantiate(Zero(r.type)), result)
            total = functools.reduce(_tree_sum, parts) if parts else zero
            return result, total

        self.rule = rule

    def push(
        self, use: Use, operands: Sequence[Value], given: Sequence[Tangent]
    ) -> tuple[list[Value], Spec, Sequence[Tangent]]:
        rule = self.rule
        if rule is None:
            raise DerivativeError(
                f"custom_jvp: `{name_of(self.fun)}` has no rule. Set it with `defjvp`."
            )
        if use.examples:
            return self.push_examples(use, operands, given)
        primals = pytree.unflatten(use.spec, operands[: len(given)])
        tangents = pytree.unflatten(use.spec, map(instantiate, given))
        args = *use.static.values(), primals, tangents
        pair = use.run(lambda: rule(*args), operands)
        if not (isinstance(pair, tuple | list) and len(pair) == 2):
            raise ResultTypeError(
                f"custom_jvp: the rule of `{name_of(self.fun)}` must return a pair "
                f"(result, tangent), and returns `{type(pair).__name__}`."
            )
        values, spec = use.results(pair[0])
        return values, spec, like("custom_jvp", "tangent", pair[1], values, spec)

    def push_examples(
        self, use: Use, operands: Sequence[Value], given: Sequence[Tangent]
    ) -> tuple[list[Value], Spec, Sequence[Tangent]]:
        """The same for many examples at once: the rule is batched."""
        size, lanes = use.lanes(operands)
        count, places = len(lanes), [k for k, t in enumerate(given) if not is_zero(t)]
        pushed = use.like_operands(given)
        nonzero: list[int] = []
        of: list[Spec] = []

        def one(flat: Sequence[Any]) -> list[Value]:
            own: list[Tangent] = [Zero(x.type) for x in flat[: len(given)]]
            for k, tangent in zip(places, flat[count:], strict=True):
                own[k] = tangent
            values, spec, tangents = self.push(use.of_one, flat[:count], own)
            of.append(spec)
            nonzero[:] = [k for k, t in enumerate(tangents) if not is_zero(t)]
            return [*values, *(instantiate(tangents[k]) for k in nonzero)]

        found = over_examples(one, size, [*lanes, *(pushed[k] for k in places)])
        results = [as_batched(size, lane).value for lane in found]
        values = results[: len(results) - len(nonzero)]
        tangents: list[Tangent] = [Zero(v.type) for v in values]
        for k, tangent in zip(nonzero, results[len(values) :], strict=True):
            tangents[k] = tangent
        return values, of[0], tangents

    def try_rules(self, use: Use, tracer: Tracer, operands: Sequence[Operand]) -> None:
        leaves, dots = _inputs(tracer, [o.type for o in operands])
        self.push(use, leaves, dots)

    def linearize(
        self, use: Use, operands: Sequence[Value], given: Sequence[Tangent]
    ) -> tuple[list[Value], Spec, LinearMap]:
        # Among tensors of a linear trace the rule records what it does with tangents,
        # and computes the rest below.
        linear = linear_of(given)
        marks, before = mark(linear), linear.refuses_operators
        linear.refuses_operators = True
        try:
            with using(linear):
                found, spec, tangents = self.push(use, operands, given)
        except UsesOperator:
            rollback(marks)
            return self.linearize_at_zero(use, operands, given)
        finally:
            linear.refuses_operators = before
        values = [as_value(linear.below(v)) for v in found]
        return values, spec, lambda _: tangents

    def linearize_at_zero(
        self, use: Use, operands: Sequence[Value], given: Sequence[Tangent]
    ) -> tuple[list[Value], Spec, LinearMap]:
        """The same for a rule that gives tangents to operators, which compute other
        things beside: it is linear in them, and so its own derivative where they are
        zero."""
        places = [k for k, t in enumerate(given) if not is_zero(t)]
        zeros = [instantiate(Zero(given[k].type)) for k in places]
        found: list[int] = []
        of: list[Spec] = []

        def rule(*own: Value) -> tuple[list[Value], list[Value]]:
            tangents: list[Tangent] = list(given)
            for k, tangent in zip(places, own, strict=True):
                tangents[k] = tangent
            values, spec, results = self.push(use, operands, tangents)
            of.append(spec)
            found.extend(k for k, t in enumerate(results) if not is_zero(t))
            return [instantiate(results[k]) for k in found], values

        texts = [f"tangents[{k}]" for k in places]
        primals = Primals(zeros, pytree.structure(tuple(zeros)), texts)
        pushed = linear_of(given).pushed
        linear = Linear("custom_jvp", rule, primals, has_aux=True, pushed=pushed)
        values: list[Value] = linear.run.aux

        def derivative(tangents: Sequence[Tangent]) -> Sequence[Tangent]:
            results: list[Tangent] = [Zero(v.type) for v in values]
            made = linear.push([tangents[k] for k in places])
            for k, tangent in zip(found, made, strict=True):
                results[k] = tangent
            return results

        return values, of[0], derivative


def _tree_sum(a: Any, b: Any) -> Any:
    return pytree.tree_map(lambda x, y: x + y, a, b)


# --- reverse --------------------------------------------------------------------------


class custom_vjp(_Custom):
    """A decorator: a function with a rule of its own for cotangents.

        @hf.custom_vjp
        def f(x, y): ...

        def forward(x, y): ...  # -> (result, residuals)
        def backward(residuals, ct): ...  # -> (cotangent of x, cotangent of y)

        f.defvjp(forward, backward)

    Residuals are any pytree. A cotangent may be None, for zero. Such a function has no
    forward derivative.

    Args:
        fun: Takes and returns pytrees of tensors. Its arguments are values: what it
            writes to them the caller does not see. It writes to nothing of outside.
        nondiff_argnums: Positional arguments that are no tensors: `forward` gets them
            in their places, `backward` first, before the residuals.
    """

    name = "custom_vjp"
    forward: Callable[..., Any] | None = None
    backward: Callable[..., Any] | None = None

    @property
    def rules(self) -> tuple[Any, ...]:
        return self.forward, self.backward

    def defvjp(self, forward: Callable[..., Any], backward: Callable[..., Any]) -> None:
        """Set the rules."""
        require_callable("defvjp", "forward", forward)
        require_callable("defvjp", "backward", backward)
        self.forward, self.backward = forward, backward

    def push(
        self, use: Use, operands: Sequence[Value], given: Sequence[Tangent]
    ) -> tuple[list[Value], Spec, Sequence[Tangent]]:
        raise no_tangents(use)

    def linearize(
        self, use: Use, operands: Sequence[Value], given: Sequence[Tangent]
    ) -> tuple[list[Value], Spec, LinearMap]:
        if linear_of(given).pushed:
            raise no_tangents(use)
        values, spec, pullback, residuals = self.run_forward(use, operands)
        arguments = [a.type for a in operands[: len(given)]]
        results = [v.type for v in values]
        return values, spec, pulled_by(pullback, arguments, results, residuals)

    def run_forward(
        self, use: Use, operands: Sequence[Value]
    ) -> tuple[list[Value], Spec, PullbackRule, list[Value]]:
        """The results and their structure, the backward rule, and the tensors that it
        takes."""
        if use.examples:
            return self.run_forward_of_many(use, operands)
        if self.forward is None or self.backward is None:
            raise DerivativeError(
                f"custom_vjp: `{name_of(self.fun)}` has no rules. Set them with "
                "`defvjp`."
            )
        forward, args = self.forward, use.arguments(operands[: use.spec.num_leaves])
        pair = use.run(lambda: forward(*args), operands)
        if not (isinstance(pair, tuple | list) and len(pair) == 2):
            raise ResultTypeError(
                f"custom_vjp: the forward rule of `{name_of(self.fun)}` must return a "
                f"pair (result, residuals), and returns `{type(pair).__name__}`."
            )
        values, spec = use.results(pair[0])
        kept, kept_spec = pytree.flatten(pair[1])
        static = [None if isinstance(x, Value) else x for x in kept]
        residuals = [x for x in kept if isinstance(x, Value)]
        pullback = Backward(self.backward, use, spec, static, kept_spec)
        return values, spec, pullback, [*residuals, *operands[use.spec.num_leaves :]]

    def run_forward_of_many(
        self, use: Use, operands: Sequence[Value]
    ) -> tuple[list[Value], Spec, PullbackRule, list[Value]]:
        """The same for many examples at once: the rules are batched."""
        size, lanes = use.lanes(operands)
        of: list[tuple[Spec, PullbackRule, int]] = []

        def one(flat: Sequence[Any]) -> list[Value]:
            values, spec, pullback, residuals = self.run_forward(use.of_one, flat)
            of.append((spec, pullback, len(values)))
            return [*values, *residuals]

        found = [_value(lane) for lane in over_examples(one, size, lanes)]
        [(spec, pullback, count)] = of
        values = [as_batched(size, lane).value for lane in found[:count]]
        batched = [isinstance(lane, Batched) for lane in found[count:]]
        residuals = [x.value if isinstance(x, Batched) else x for x in found[count:]]
        return values, spec, BackwardOfMany(pullback, use, batched), residuals

    def try_rules(self, use: Use, tracer: Tracer, operands: Sequence[Operand]) -> None:
        leaves, _ = _inputs(tracer, [o.type for o in operands])
        values, _, pullback, residuals = self.run_forward(use, leaves)
        _, cts = _inputs(tracer, [v.type for v in values])
        given = [ct for ct in cts if not is_zero(ct)]
        arguments, results = ([v.type for v in row] for row in (leaves, values))
        pullback(given, residuals, arguments, results)


def _value(lane: Lane) -> Batched | Value:
    return lane if isinstance(lane, Batched) else as_value(lane)


def _inputs(
    tracer: Tracer, types: Sequence[TensorType]
) -> tuple[list[Value], list[Tangent]]:
    """Inputs of these types, and tangents or cotangents of them."""
    values: list[Value] = [tracer.operand(t, "x") for t in types]
    dots: list[Tangent] = [
        tracer.operand(t.strong(), "t") if is_differentiable(t) else Zero(t)
        for t in types
    ]
    return values, dots


# --- in a trace -----------------------------------------------------------------------


@final
class CustomCall(Calling):
    """`custom_call(symbols; operands; captures; body, use) -> results`

    use    the call, with its rules
    """

    name = "custom_call"
    droppable = False

    def prepare(self, use: Use, operands: list[Operand]) -> Call:
        fun, count = use.function.fun, use.spec.num_leaves
        names = [f"x{i}" for i in range(len(operands))]

        def call(flat: Sequence[Any]) -> Any:
            return fun(*use.arguments(flat[:count]))

        function = Function("fun", fun, names, call)
        return Call(use.function.name, [], operands, {"body": function}, {"use": use})

    def trace(self, call: Call) -> Any:
        traced, use = self.trace_branches(call), call.params["use"]
        add_inputs(traced.closed, use.symbols)
        call.params["use"] = replace(use, returns=traced.spec)
        return self.finish(call, traced)

    def trace_bodies(self, call: Call) -> list[Body]:
        """The function, to which its arguments are values."""
        types = [o.type for o in call.operands]
        [(key, function)] = call.functions.items()
        return [trace_body(call.name, f"{self.name}/{key}", function, types)]

    def functionalize(self, bodies: Sequence[Body]) -> Written:
        return refuse_writes(bodies, _REFUSAL)

    def has_custom_derivative(self, params: Mapping[str, Any]) -> bool:
        return True

    def batch_rule(
        self,
        size: Size,
        batched: Sequence[bool],
        args: Sequence[Operand],
        params: dict[str, Any],
    ) -> tuple[Sequence[Value], Sequence[bool]]:
        parts = split_args(self, batched, params)
        if not any(parts.operands):  # rules do not depend on the example
            return each_example(self, size, batched, args, params)
        use: Use = params["use"]
        use = replace(use, examples=(*use.examples, parts.operands))
        params = {**params, "use": use}
        found = batching.batch(self, size, batched, args, params, all_results=True)
        return batching.with_shared(size, found, params["body"], batched, args)

    def jvp_rule(
        self,
        operands: Sequence[Operand],
        tangents: Sequence[Tangent],
        params: dict[str, Any],
    ) -> tuple[Sequence[Value], Sequence[Tangent]]:
        use = self._use(operands, params)
        own, given = self._own(operands, tangents, params)
        with _closed(use.function):
            values, spec, found = use.function.push(use, own, given)
        types = self.result_types([o.type for o in operands], params)
        use.check(own, types, spec, values)
        return values, found

    def linearize_rule(
        self,
        operands: Sequence[Operand],
        tangents: Sequence[Tangent],
        params: dict[str, Any],
    ) -> tuple[Sequence[Value], LinearMap]:
        use = self._use(operands, params)
        own, given = self._own(operands, tangents, params)
        with _closed(use.function):
            values, spec, derivative = use.function.linearize(use, own, given)
        types = self.result_types([o.type for o in operands], params)
        use.check(own, types, spec, values)
        return values, lambda t: derivative(self._own(operands, t, params)[1])

    def _use(self, operands: Sequence[Operand], params: dict[str, Any]) -> Use:
        """The call of a node of these operands."""
        use: Use = params["use"]
        return replace(use, sizes=split_args(self, operands, params).symbols)

    def _own(
        self,
        operands: Sequence[Operand],
        tangents: Sequence[Tangent],
        params: dict[str, Any],
    ) -> tuple[list[Value], Sequence[Tangent]]:
        """The arguments of the function, with what its rules read behind them; and the
        tangents of the arguments."""
        use: Use = params["use"]
        parts = split_args(self, operands, params)
        given = split_args(self, tangents, params)
        count = use.spec.num_leaves
        if not all(map(is_zero, (*given.operands[count:], *given.captures))):
            raise _closes_over(use.function)
        return list(map(as_value, parts.operands)), given.operands[:count]


CUSTOM = CustomCall()
