"""`custom_jvp` and `custom_vjp`: functions that bring their own derivatives.

On a tape their rules run at once, on values. In a trace that may be differentiated
later a call is a node of the function's graph, which keeps the rules.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, final

from hopflow import pytree
from hopflow.autograd.api import Linear, Primals, like, result_leaf
from hopflow.autograd.linear import LinearTracer, UsesOperator
from hopflow.autograd.rules import is_differentiable
from hopflow.autograd.tape import Tape
from hopflow.batching.operators import each_example
from hopflow.bind import Interpreter, Operand, Value, bind, current, recorded, using
from hopflow.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    DataDependentError,
    DerivativeError,
    EscapedValueError,
    GraphError,
    MutationError,
    ResultTypeError,
    StructureError,
    TraceError,
)
from hopflow.graph.core import Arg, Node
from hopflow.graph.types import TensorType
from hopflow.hops.base import Call, HigherOrderOp, derived, split_args
from hopflow.hops.bodies import Function, check_rule, require_callable
from hopflow.hops.branches import Calling
from hopflow.ops.convert import as_value
from hopflow.ops.opdef import as_default, as_operand
from hopflow.ops.rules import as_integer
from hopflow.pytree import Spec
from hopflow.symbolic.size import Size
from hopflow.trace.functional import TracedTensor
from hopflow.trace.rollback import mark, rollback
from hopflow.trace.source import name_of
from hopflow.trace.tracer import Tracer
from hopflow.zeros import Tangent, Unknown, Zero, instantiate, is_zero

__all__ = ["custom_jvp", "custom_vjp"]

LinearMap: TypeAlias = Callable[[Sequence[Tangent]], Sequence[Tangent]]


@dataclass(frozen=True, eq=False)
class _Use:
    """A call of a function with rules: what it was given besides tensors.

    function  the function
    spec      the structure of the arguments that it is differentiated in
    static    the other arguments, by position
    returns   the structure of what it returns, where that is known
    """

    function: "_Custom"
    spec: Spec
    static: dict[int, Any] = field(repr=False)
    returns: Spec | None = None

    def arguments(self, leaves: Sequence[Any]) -> list[Any]:
        rest = iter(pytree.unflatten(self.spec, leaves))
        count = self.spec.num_children + len(self.static)
        return [
            self.static[i] if i in self.static else next(rest) for i in range(count)
        ]

    def results(self, tree: Any) -> tuple[list[Value], Spec]:
        leaves, spec = pytree.flatten(tree)
        name, f = self.function.name, self.function.fun
        return [
            as_value(result_leaf(name, f, spec, i, x)) for i, x in enumerate(leaves)
        ], spec

    def check(
        self,
        operands: Sequence[Value],
        types: Sequence[TensorType],
        spec: Spec,
        values: Sequence[Value],
    ) -> None:
        """Check that a rule gives what the function returns: `types`.

        Raises:
            StructureError, RuleTypeError: it does not.
        """
        assert self.returns is not None
        name, label = self.function.name, f"a rule of `{name_of(self.function.fun)}`"
        expected, found = (self.returns, types), (spec, values)
        check_rule(name, label, "the function", expected, operands, found)


class _Custom:
    """What both decorators make: a function, called as it was before."""

    name: str

    def __init__(
        self, fun: Callable[..., Any], nondiff_argnums: Sequence[int] = ()
    ) -> None:
        require_callable(self.name, "fun", fun)
        functools.update_wrapper(self, fun)
        self.fun = fun
        self.checked: set[Any] = set()
        if not isinstance(nondiff_argnums, tuple | list):
            raise ArgumentTypeError(
                f"{self.name}: `nondiff_argnums` must be a tuple or a list of ints, "
                f"and is `{type(nondiff_argnums).__name__}`."
            )
        self.static = [
            as_integer(self.name, "nondiff_argnums", n) for n in nondiff_argnums
        ]

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if (node := recorded(self, args, kwargs)) is not None:
            return node
        args = self._positional(args, kwargs)
        places = [self._place(n, len(args)) for n in self.static]
        given = tuple(a for i, a in enumerate(args) if i not in places)
        leaves, spec = pytree.flatten(given)
        use = _Use(self, spec, {i: args[i] for i in places})
        operands = [
            as_default(as_operand(self.name, i, x)) for i, x in enumerate(leaves)
        ]
        with using(_interpreter(operands)):
            here = current()
            if here.is_eager:
                return self.fun(*args)
            if isinstance(here, Tape):
                return _on_tape(here, use, operands)
            return CUSTOM(use, operands)

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
                "given."
            )
        return n % count

    def check_once(
        self, use: _Use, leaves: Sequence[Value], spec: Spec, values: Sequence[Value]
    ) -> None:
        """Check what a rule gives, where the function has not run: the first time for
        arguments of a kind, if the function can be traced."""
        key = (use.spec, tuple([(v.dtype, v.ndim) for v in leaves]))
        if key in self.checked:
            return
        tracer = current()
        marks = mark(tracer) if isinstance(tracer, Tracer) else None
        try:
            [body] = CUSTOM.trace_bodies(CUSTOM.prepare(use, list(leaves)))
        except (TraceError, DataDependentError):
            return  # Python looks at values
        finally:
            if marks is not None:
                rollback(marks)
        replace(use, returns=body.spec).check(leaves, body.types, spec, values)
        self.checked.add(key)

    def call(self, use: _Use, leaves: Sequence[Any]) -> tuple[list[Value], Spec]:
        """The results of the function itself."""
        return use.results(self(*use.arguments(leaves)))

    # What the two kinds have: for the flat arguments and tangents, of which not all
    # are zero, the results and their structure, and the tangents of the results.

    def push(
        self, use: _Use, leaves: Sequence[Any], given: Sequence[Tangent]
    ) -> tuple[list[Value], Spec, Sequence[Tangent]]:
        raise NotImplementedError

    def linearize(
        self, use: _Use, leaves: Sequence[Any], given: Sequence[Tangent]
    ) -> tuple[list[Value], Spec, LinearMap]:
        raise NotImplementedError


def _interpreter(operands: Sequence[Operand]) -> Interpreter | None:
    """Where a call runs: what no tangent takes part in is not linear."""
    here: Interpreter | None = current()
    while isinstance(here, LinearTracer) and not any(
        type(o) is TracedTensor and o.tracer is here for o in operands
    ):
        here = here.parent
    return here


def _on_tape(tape: Tape, use: _Use, operands: Sequence[Operand]) -> Any:
    """Run the rules on values, below the tape, which sees nothing but the results."""
    pairs = [tape.current(o) for o in operands]
    given = [t for _, t in pairs]
    function, linear = use.function, tape.linear
    with using(tape.parent), _closed(use.function):
        leaves = [as_value(v) for v, _ in pairs]
        tangents: Sequence[Tangent]
        if all(map(is_zero, given)):
            values, spec = function.call(use, leaves)
            tangents = [Zero(v.type) for v in values]
        elif linear is None:
            values, spec, tangents = function.push(use, leaves, given)
            function.check_once(use, leaves, spec, values)
        else:
            values, spec, derivative = function.linearize(use, leaves, given)
            function.check_once(use, leaves, spec, values)
            with using(linear):
                tangents = derivative(given)
    names = zip(values, tangents, strict=True)
    return pytree.unflatten(spec, [tape.given(v, t, "result") for v, t in names])


@contextmanager
def _closed(function: _Custom) -> Iterator[None]:
    """Say what it means that a rule or a function reads a tensor of a tape."""
    try:
        yield
    except EscapedValueError as error:
        raise _closes_over(function) from error


def _closes_over(function: _Custom) -> DerivativeError:
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
        fun: Takes and returns pytrees of tensors, and writes nothing.
        nondiff_argnums: Positional arguments that are no tensors: the rule gets them
            first, before `primals`.
    """

    name = "custom_jvp"
    rule: Callable[..., Any] | None = None

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
        self, use: _Use, leaves: Sequence[Any], given: Sequence[Tangent]
    ) -> tuple[list[Value], Spec, Sequence[Tangent]]:
        if self.rule is None:
            raise DerivativeError(
                f"custom_jvp: `{name_of(self.fun)}` has no rule. Set it with `defjvp`."
            )
        primals = pytree.unflatten(use.spec, leaves)
        tangents = pytree.unflatten(use.spec, map(instantiate, given))
        pair = self.rule(*use.static.values(), primals, tangents)
        if not (isinstance(pair, tuple | list) and len(pair) == 2):
            raise ResultTypeError(
                f"custom_jvp: the rule of `{name_of(self.fun)}` must return a pair "
                f"(result, tangent), and returns `{type(pair).__name__}`."
            )
        values, spec = use.results(pair[0])
        return values, spec, like("custom_jvp", "tangent", pair[1], values, spec)

    def linearize(
        self, use: _Use, leaves: Sequence[Any], given: Sequence[Tangent]
    ) -> tuple[list[Value], Spec, LinearMap]:
        # Among tensors of a linear trace the rule records what it does with tangents,
        # and computes the rest below.
        [linear, *_] = [t.tracer for t in given if isinstance(t, TracedTensor)]
        assert isinstance(linear, LinearTracer)
        marks, before = mark(linear), linear.refuses_operators
        linear.refuses_operators = True
        try:
            with using(linear):
                found, spec, tangents = self.push(use, leaves, given)
        except UsesOperator:
            rollback(marks)
            return self.linearize_at_zero(use, leaves, given)
        finally:
            linear.refuses_operators = before
        values = [as_value(linear.below(v)) for v in found]
        return values, spec, lambda _: tangents

    def linearize_at_zero(
        self, use: _Use, leaves: Sequence[Any], given: Sequence[Tangent]
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
            values, spec, results = self.push(use, leaves, tangents)
            of.append(spec)
            found.extend(k for k, t in enumerate(results) if not is_zero(t))
            return [instantiate(results[k]) for k in found], values

        texts = [f"tangents[{k}]" for k in places]
        primals = Primals(zeros, pytree.structure(tuple(zeros)), texts)
        linear = Linear("custom_jvp", rule, primals, has_aux=True)
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
        fun: Takes and returns pytrees of tensors, and writes nothing.
        nondiff_argnums: Positional arguments that are no tensors: `forward` gets them
            in their places, `backward` first, before the residuals.
    """

    name = "custom_vjp"
    forward: Callable[..., Any] | None = None
    backward: Callable[..., Any]

    def defvjp(self, forward: Callable[..., Any], backward: Callable[..., Any]) -> None:
        """Set the rules."""
        require_callable("defvjp", "forward", forward)
        require_callable("defvjp", "backward", backward)
        self.forward, self.backward = forward, backward

    def push(
        self, use: _Use, leaves: Sequence[Any], given: Sequence[Tangent]
    ) -> tuple[list[Value], Spec, Sequence[Tangent]]:
        raise _no_tangents(self.fun)

    def linearize(
        self, use: _Use, leaves: Sequence[Any], given: Sequence[Tangent]
    ) -> tuple[list[Value], Spec, LinearMap]:
        if self.forward is None:
            raise DerivativeError(
                f"custom_vjp: `{name_of(self.fun)}` has no rules. Set them with "
                "`defvjp`."
            )
        pair = self.forward(*use.arguments(leaves))
        if not (isinstance(pair, tuple | list) and len(pair) == 2):
            raise ResultTypeError(
                f"custom_vjp: the forward rule of `{name_of(self.fun)}` must return a "
                f"pair (result, residuals), and returns `{type(pair).__name__}`."
            )
        values, spec = use.results(pair[0])
        kept, kept_spec = pytree.flatten(pair[1])
        is_data = [isinstance(x, Value) for x in kept]
        pullback = _Pullback(
            use,
            spec,
            [None if data else x for x, data in zip(kept, is_data, strict=True)],
            kept_spec,
        )
        residuals = [x for x, data in zip(kept, is_data, strict=True) if data]
        params = {
            "pullback": pullback,
            "arguments": tuple([a.type for a in leaves]),
            "results": tuple([v.type for v in values]),
        }

        def derivative(tangents: Sequence[Tangent]) -> list[Tangent]:
            given = [instantiate(t) for t in tangents if is_differentiable(t.type)]
            found = iter(bind(PULLBACK, [*given, *residuals], params))
            return [
                next(found) if is_differentiable(v.type) else Zero(v.type)
                for v in values
            ]

        return values, spec, derivative


def _no_tangents(fun: Any) -> DerivativeError:
    return DerivativeError(
        f"custom_vjp: `{name_of(fun)}` has rules for reverse derivatives only. Use "
        "`hf.custom_jvp` for one that forward derivatives are to be taken of."
    )


@dataclass(frozen=True, eq=False)
class _Pullback:
    """The backward rule at a point.

    spec        the structure of the results
    residuals   those that are no tensors; None: a tensor
    """

    use: _Use
    spec: Spec
    residuals: list[Any]
    residual_spec: Spec

    def __call__(
        self,
        given: Sequence[Tangent],
        tensors: Sequence[Value],
        arguments: Sequence[TensorType],
        results: Sequence[TensorType],
    ) -> list[Tangent]:
        """The cotangents of the flat arguments, of these types, from those of results
        and from the residuals that are tensors."""
        rest, found = iter(tensors), iter(given)
        residuals = pytree.unflatten(
            self.residual_spec,
            [next(rest) if r is None else r for r in self.residuals],
        )
        cts = [
            instantiate(next(found) if is_differentiable(t) else Zero(t))
            for t in results
        ]
        function = self.use.function
        assert isinstance(function, custom_vjp)
        trees = function.backward(
            *self.use.static.values(), residuals, pytree.unflatten(self.spec, cts)
        )
        specs = self.use.spec.children()
        if not isinstance(trees, tuple | list) or len(trees) != len(specs):
            raise StructureError(
                f"custom_vjp: the backward rule of `{name_of(function.fun)}` must "
                f"return a tuple of {len(specs)} cotangents, one for each argument, "
                f"and returns {pytree.structure(trees)}."
            )
        whole = [
            pytree.unflatten(spec, [None] * spec.num_leaves) if tree is None else tree
            for tree, spec in zip(trees, specs, strict=True)
        ]
        values = list(map(Unknown, arguments))
        return like("custom_vjp", "cotangents", tuple(whole), values, self.use.spec)


@final
class Pullback(HigherOrderOp):
    """`pullback(*tangents, *residuals; pullback, arguments, results)`

    gives tangents of the results. `arguments` and `results` are the flat types.
    It is linear in the tangents, and is there to be transposed, by the backward rule.
    """

    name = "custom_pullback"

    def _never(self, *_args: Any, **_params: Any) -> Any:
        """It stands in linear graphs alone, which are transposed before they run."""
        raise GraphError(f"{self.name}: it is there to be transposed, and never runs.")

    functionalize: Any = _never
    export = derived
    signature: Any = _never
    with_roles: Any = _never

    def lower(self, *_args: Any, pullback: _Pullback, **_params: Any) -> Any:
        raise _no_tangents(pullback.use.function.fun)

    debug: Any = lower

    def _refuse(self, *args: Any) -> Any:
        """What takes a node's params last."""
        raise _no_tangents(args[-1]["pullback"].use.function.fun)

    run_eager: Any = _refuse
    batch: Any = _refuse
    jvp: Any = _refuse
    vjp: Any = _refuse
    linearize: Any = _refuse

    def infer(
        self, *types: Any, results: tuple[TensorType, ...], **_params: Any
    ) -> tuple[TensorType, ...]:
        return tuple(t.strong() for t in results if is_differentiable(t))

    def transpose(
        self,
        cotangents: Sequence[Tangent],
        operands: Sequence[Any],
        params: dict[str, Any],
    ) -> list[Tangent | None]:
        types = params["arguments"]
        floats = [is_differentiable(t) for t in types]
        residuals = operands[sum(floats) :]
        found = params["pullback"](cotangents, residuals, types, params["results"])
        own = [ct for ct, is_float in zip(found, floats, strict=True) if is_float]
        wanted = zip(own, operands, strict=False)
        return [
            *(ct if isinstance(o, Unknown) else None for ct, o in wanted),
            *[None] * len(residuals),
        ]

    def format_sections(self, node: Node) -> list[tuple[Arg, ...]]:
        return [(), (), tuple(node.args), ()]


PULLBACK = Pullback()


# --- in a trace -----------------------------------------------------------------------


@final
class CustomCall(Calling):
    """`custom_call(symbols; operands; captures; body, use) -> results`

    use    the call, with its rules
    """

    name = "custom_call"
    droppable = False

    def prepare(self, use: _Use, operands: list[Operand]) -> Call:
        fun = use.function.fun
        names = [f"x{i}" for i in range(len(operands))]
        function = Function("fun", fun, names, lambda flat: fun(*use.arguments(flat)))
        return Call(use.function.name, [], operands, {"body": function}, {"use": use})

    def trace(self, call: Call) -> Any:
        traced = self.trace_branches(call)
        if traced.targets:
            raise MutationError(
                f"{call.name}: {call.functions['body'].label} writes to a tensor of "
                "outside. Return the new value instead."
            )
        call.params["use"] = replace(call.params["use"], returns=traced.spec)
        return self.finish(call, traced)

    def batch(
        self,
        size: Size,
        batched: Sequence[bool],
        args: Sequence[Operand],
        params: dict[str, Any],
    ) -> tuple[Sequence[Value], Sequence[bool]]:
        """A map over the examples, whose body is this call: the rules are for one."""
        return each_example(self, size, batched, args, params)

    def jvp(
        self,
        operands: Sequence[Operand],
        tangents: Sequence[Tangent],
        params: dict[str, Any],
    ) -> tuple[Sequence[Value], Sequence[Tangent]]:
        use: _Use = params["use"]
        leaves, given = self._own(operands, tangents, params)
        with _closed(use.function):
            values, spec, found = use.function.push(use, leaves, given)
        types = self.result_types([o.type for o in operands], params)
        use.check(leaves, types, spec, values)
        return values, found

    def linearize(
        self,
        operands: Sequence[Operand],
        tangents: Sequence[Tangent],
        params: dict[str, Any],
    ) -> tuple[Sequence[Value], LinearMap]:
        use: _Use = params["use"]
        leaves, given = self._own(operands, tangents, params)
        with _closed(use.function):
            values, spec, derivative = use.function.linearize(use, leaves, given)
        types = self.result_types([o.type for o in operands], params)
        use.check(leaves, types, spec, values)
        return values, lambda t: derivative(self._own(operands, t, params)[1])

    def _own(
        self,
        operands: Sequence[Operand],
        tangents: Sequence[Tangent],
        params: dict[str, Any],
    ) -> tuple[list[Value], Sequence[Tangent]]:
        """The arguments of the function, and their tangents."""
        parts = split_args(self, operands, params)
        given = split_args(self, tangents, params)
        if not all(map(is_zero, given.captures)):
            raise _closes_over(params["use"].function)
        return list(map(as_value, parts.operands)), given.operands


CUSTOM = CustomCall()
