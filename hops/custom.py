"""`custom_jvp` and `custom_vjp`: functions with custom derivative rules.

On a tape the rules run at once, on values. In a trace that may be differentiated later
a call is a node with the graphs of the function and of its rules; see `rule_regions`.
"""

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, final

from hopflow import pytree
from hopflow.autograd.api import like, result_leaf
from hopflow.autograd.linearize import counted, linear_of, linear_tracers
from hopflow.autograd.rules import is_differentiable
from hopflow.autograd.tape import Tape
from hopflow.bind import Operand, Value, current, recorded, using
from hopflow.entries import entry
from hopflow.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    DerivativeError,
    EscapedValueError,
    HopflowError,
    MutationError,
    StructureError,
)
from hopflow.graph.core import Node
from hopflow.graph.regions import Signature
from hopflow.graph.types import TensorType
from hopflow.hops.base import Call
from hopflow.hops.branches import Calling
from hopflow.hops.rule_regions import Ruled, RuledCall, interpreter_of
from hopflow.hops.rule_tracing import (
    PARAMS,
    Pulled,
    Pushed,
    Rules,
    as_pair,
    kind_of_value,
    with_rules,
)
from hopflow.hops.subgraphs import (
    Body,
    Function,
    Written,
    captured_write,
    check_rule,
    refuse_writes,
    require_callable,
    trace_body,
    with_symbols,
)
from hopflow.ops.convert import as_value, copy
from hopflow.ops.opdef import Upgrade, as_default, as_operand
from hopflow.ops.rules import as_integer
from hopflow.pickling import Transformed
from hopflow.pytree import Spec
from hopflow.trace.own_writes import OwnWritesOnly, apart, own_writes_only
from hopflow.trace.rollback import for_nothing
from hopflow.trace.source import name_of, where
from hopflow.trace.stand_ins import run_below
from hopflow.zeros import Tangent, Unknown, Zero, instantiate, is_zero

# --- the rules of a call --------------------------------------------------------------


@dataclass(eq=False)
class Use(Rules):
    """A call of a function with rules: its arguments, but for the tensors.

    function  the function
    spec      the structure of the arguments that it may be differentiated in
    static    the other arguments, by position
    types     of the leaves of the former
    returns   the structure and the types of the function's results; None: unknown
    returned  the structure of the results that a rule has returned
    """

    function: "_Custom"
    spec: Spec
    static: dict[int, Any] = field(repr=False)
    types: list[TensorType]
    returns: tuple[Spec, Sequence[TensorType]] | None = None
    returned: Any = None

    def __post_init__(self) -> None:
        self.name, self.owner = self.function.name, self.function
        self.offered = self.function.offered
        self.wrt = tuple([k for k, t in enumerate(self.types) if is_differentiable(t)])

    @property
    def function_name(self) -> str:
        return name_of(self.function.fun)

    @property
    def label(self) -> str:
        return f"{self.name}: `{self.function_name}`"

    @property
    def kind(self) -> Any:
        static = [(k, kind_of_value(x)) for k, x in self.static.items()]
        return id(self.owner), tuple(map(id, self.owner.rules)), self.spec, static

    def refused(self, _type: TensorType) -> DerivativeError:
        return closes_over(self.label)

    def arguments(self, leaves: Sequence[Any]) -> list[Any]:
        dynamic = iter(pytree.unflatten(self.spec, leaves))
        count = self.spec.num_children + len(self.static)
        return [
            self.static[i] if i in self.static else next(dynamic) for i in range(count)
        ]

    def results(self, tree: Any, operands: Sequence[Value]) -> list[Value]:
        leaves, self.returned = pytree.flatten(tree)
        spec, fun = self.returned, self.function.fun
        results = (
            result_leaf(self.name, fun, spec, i, x) for i, x in enumerate(leaves)
        )
        values = list(map(as_value, results))
        self.check(operands, values)
        return values

    def run(self, rule: Callable[..., Any], *args: Any) -> Any:
        """Return the result of a rule.

        Raises:
            MutationError: it writes to a tensor that it has not created.
        """
        with own_writes_only(self._writes), self.closed():
            return run_below(lambda: rule(*args), self.below)

    def _writes(self, type_: TensorType) -> MutationError:
        return MutationError(
            f"{self.name}: a rule of `{self.function_name}` writes to a tensor {type_} "
            "that it is given or reads, but a rule only computes. Return the new value "
            "instead."
        )

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Explain the error that a rule or the function raises when it reads a tensor
        of a tape."""
        try:
            yield
        except EscapedValueError as error:
            raise closes_over(self.label) from error

    def check(self, operands: Sequence[Value], values: Sequence[Value]) -> None:
        """Check the results of a rule against those of the function.

        Raises:
            StructureError, RuleTypeError: they differ.
        """
        if self.returns is not None:
            label, results = (
                f"a rule of `{self.function_name}`",
                (self.returned, values),
            )
            check_rule(
                self.name, label, "the function", self.returns, operands, results
            )

    def push(self, values: Sequence[Value], dots: Sequence[Tangent]) -> Pushed:
        if "jvp" not in self.offered:
            raise no_tangents(self.label)
        [rule], count = self.function.rules, len(self.types)
        if rule is None:
            raise DerivativeError(f"{self.label} has no rule. Set it with `defjvp`.")
        primals = pytree.unflatten(self.spec, values[:count])
        tangents = pytree.unflatten(self.spec, map(instantiate, dots[:count]))
        pair = self.run(rule, *self.static.values(), primals, tangents)
        label = f"custom_jvp: the rule of `{self.function_name}`"
        tree, tangent = as_pair(label, pair, "tangent")
        results = self.results(tree, values)
        return results, like("custom_jvp", "tangent", tangent, results, self.returned)

    def pull(self, values: Sequence[Value]) -> Pulled:
        forward, backward = self.function.rules
        if forward is None or backward is None:
            raise DerivativeError(f"{self.label} has no rules. Set them with `defvjp`.")
        pair = self.run(forward, *self.arguments(values[: len(self.types)]))
        label = f"custom_vjp: the forward rule of `{self.function_name}`"
        tree, residuals = as_pair(label, pair, "residuals")
        results = self.results(tree, values)
        leaves, residuals_spec = pytree.flatten(residuals)
        static = [None if isinstance(x, Value) else x for x in leaves]
        spec = self.returned

        def pullback(
            float_cts: Sequence[Tangent],
            tensors: Sequence[Value],
            _arguments: Sequence[TensorType],
            types: Sequence[TensorType],
        ) -> list[Tangent]:
            saved, cts = iter(tensors), iter(float_cts)
            filled = [next(saved) if x is None else x for x in static]
            cotangents = [
                instantiate(next(cts) if is_differentiable(t) else Zero(t))
                for t in types
            ]
            trees = self.run(
                backward,
                *self.static.values(),
                pytree.unflatten(residuals_spec, filled),
                pytree.unflatten(spec, cotangents),
            )
            return self.cotangents(trees)

        return results, [x for x in leaves if isinstance(x, Value)], pullback

    def cotangents(self, trees: Any) -> list[Tangent]:
        """Return the cotangents of the arguments `wrt` that the backward rule has
        returned."""
        specs = self.spec.children()
        if not isinstance(trees, tuple | list) or len(trees) != len(specs):
            raise StructureError(
                f"custom_vjp: the backward rule of `{self.function_name}` must return "
                f"a tuple of {len(specs)} cotangents, one for each argument, and "
                f"returns {pytree.structure(trees)}."
            )
        filled = [
            pytree.unflatten(spec, [None] * spec.num_leaves) if tree is None else tree
            for tree, spec in zip(trees, specs, strict=True)
        ]
        values = list(map(Unknown, self.types))
        cts = like("custom_vjp", "cotangents", tuple(filled), values, self.spec)
        return [cts[k] for k in self.wrt]


def closes_over(label: str) -> DerivativeError:
    return DerivativeError(
        f"{label} closes over a tensor that depends on what is differentiated. Make it "
        "an argument."
    )


def no_tangents(label: str) -> DerivativeError:
    return DerivativeError(
        f"{label} has rules for reverse derivatives only. Use `hf.custom_jvp` for one "
        "that forward derivatives are to be taken of."
    )


# --- in a trace -----------------------------------------------------------------------


REFUSAL: Final = "its rules could not tell of that. Return the new value instead."


def _with_regions(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the params of a node of version 1 in those of version 2.

    In version 1 a param `use` contained the graphs of the rules, each with the symbols
    of `body` that it reads:

    name, function of the decorator or operator, and of the function active the inputs
    for which the rules give derivatives orders how often derivatives may be taken
    """
    body, use = params["body"], params["use"]
    inputs = body.inputs[len(body.symbols) :]
    upgraded: dict[str, Any] = {
        "body": body,
        "label": f"{use['name']}: `{use['function']}`",
        "results": len(body.outputs),
    }
    rules = {name: use[name] for name in CustomCall.rule_graphs if name in use}
    if not (rules and use["orders"]):
        return upgraded
    active = zip(inputs, use["active"], strict=True)
    wrt = [k for k, (v, on) in enumerate(active) if on and is_differentiable(v.type)]
    floats = [k for k, t in enumerate(body.out_types) if is_differentiable(t)]
    upgraded["wrt"] = tuple(wrt)
    if "jvp" in rules:
        upgraded["tangents"] = tuple(floats)
    if "forward" in rules:
        upgraded["cotangents"] = tuple(range(len(wrt)))
    symbols = [var.node.symbol for var in body.symbols]
    return upgraded | {name: with_symbols(g, symbols) for name, g in rules.items()}


@final
class CustomCall(Ruled, Calling):
    """`custom_call(symbols; operands; captures; body, label, results, ...) -> results`

    label   the name of the function in messages: "custom_jvp: `f`"

    The other params describe rules; see `rule_regions`.
    """

    name = "custom_call"
    droppable = False
    options: ClassVar[Mapping[str, str]] = {
        "label": "str",
        "results": "int",
        **{f"{key}?": kind for key, kind in PARAMS.items()},
    }
    version = 2
    upgrades: ClassVar[Mapping[int, Upgrade]] = {1: _with_regions}

    def prepare(self, use: Use, operands: list[Operand]) -> Call:
        names = [f"x{i}" for i in range(len(operands))]

        def call(flat: Sequence[Any]) -> Any:
            return use.function.fun(*use.arguments(flat))

        function = Function("fun", use.function.fun, names, call)
        return Call(use.name, [], operands, {"body": function}, {"use": use})

    def trace(self, call: Call) -> Any:
        traced, use = self.trace_branches(call), call.params.pop("use")
        use.returns = traced.spec, traced.closed.graphs[0].out_types
        closed, rules = with_rules(self, use, traced.closed, call.operands)
        call.params |= {"label": use.label, "results": traced.results, **rules}
        closed.graphs = closed.graphs[:1]
        return self.finish(call, traced._replace(closed=closed))

    def trace_bodies(self, call: Call) -> list[Body]:
        """Trace the function, whose arguments are values."""
        types = [o.type for o in call.operands]
        [(key, function)] = call.functions.items()
        return [trace_body(call.name, f"{self.name}/{key}", function, types)]

    def functionalize(self, bodies: Sequence[Body]) -> Written:
        return refuse_writes(bodies, REFUSAL)

    def signature(self, node: Node) -> Signature:
        return self.with_rule_regions(node, super().signature)

    def has_custom_derivative(self, params: Mapping[str, Any]) -> bool:
        return True

    def check_derived(self, params: Mapping[str, Any]) -> None:
        label = params["label"]
        if self.has_rules(params):
            raise no_tangents(label)
        raise DerivativeError(
            f"{label} has derivatives of its own, and the program keeps no more of "
            "them. Export it with a larger `derivatives`."
        )

    def not_given(
        self, _rule: str, _type: TensorType, params: Mapping[str, Any]
    ) -> DerivativeError:
        return closes_over(params["label"])


CUSTOM: Final = CustomCall()


# --- the functions --------------------------------------------------------------------


class _Custom(Transformed):
    """A function with rules, which is called as it was before; base of both decorators.

    offered  the rules that exist: "jvp", "vjp"
    checked the kinds of arguments for which rules were checked against the function
    """

    name: str
    offered: tuple[str, ...]

    @entry
    def __init__(
        self, fun: Callable[..., Any], nondiff_argnums: Sequence[int] = ()
    ) -> None:
        require_callable(self.name, "fun", fun)
        super().__init__(fun)
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
        dynamic = tuple(a for i, a in enumerate(args) if i not in places)
        leaves, spec = pytree.flatten(dynamic)
        operands = [
            as_default(as_operand(self.name, i, x)) for i, x in enumerate(leaves)
        ]
        static, types = {i: args[i] for i in places}, [o.type for o in operands]
        use = Use(self, spec, static, types)
        with using(interpreter_of(operands)):
            interpreter = current()
            if interpreter.is_eager:
                arguments = use.arguments(apart(leaves))
                return OwnWritesOnly(self.refusal, arguments).run(
                    lambda: self.fun(*arguments)
                )
            if isinstance(interpreter, Tape):
                return self.on_tape(interpreter, use, operands)
            return CUSTOM(use, operands)

    def refusal(self, type_: TensorType) -> MutationError:
        label = f"`{name_of(self.fun)}` ({where(self.fun) or 'fun'})"
        return captured_write(self.name, label, REFUSAL, type_)

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
        dots = counted([t for _, t in pairs], linear)
        use.leave([tape])
        with using(tape.parent), use.closed(), own_writes_only(self.refusal) as writes:
            leaves = [as_value(v) for v, _ in pairs]
            values: Sequence[Value]
            tangents: Sequence[Tangent]
            if all(map(is_zero, dots)):
                tree = use.run(self, *use.arguments(leaves))
                values = use.results(tree, leaves)
                tangents = [Zero(v.type) for v in values]
            elif linear is None or not any(linear_tracers(dots)):
                values, tangents = use.push(leaves, dots)
            else:
                call = RuledCall(CUSTOM, {"rules": use}, (), leaves, ())
                is_pushed = linear_of(dots).pushed or "vjp" not in self.offered
                rule = "jvp" if is_pushed else "vjp"
                values, derivative = call.linearize(rule, dots)
                with using(linear):
                    tangents = derivative(dots)
            if not all(map(is_zero, dots)):
                self.check_once(use, leaves, values)
            values = [v if writes.has_made(v) else copy(v) for v in values]
        names = zip(values, tangents, strict=True)
        results = [tape.given(v, t, "result") for v, t in names]
        return pytree.unflatten(use.returned, results)

    def check_once(
        self, use: Use, leaves: Sequence[Value], values: Sequence[Value]
    ) -> None:
        """Check the results of a rule where the function has not run: once for each
        kind of arguments, and only if the function can be traced."""
        key = use.spec, tuple([(x.type.dtype, x.type.ndim) for x in leaves])
        if key in self.checked:
            return
        self.checked.add(key)
        try:
            with for_nothing():
                [body] = CUSTOM.trace_bodies(CUSTOM.prepare(use, list(leaves)))
        except Exception:
            return  # the function may need concrete values
        try:
            use.returns = body.spec, body.types
            use.check(leaves, values)
        except HopflowError:
            self.checked.remove(key)
            raise

    @property
    def rules(self) -> tuple[Any, ...]:
        """Return the rules; a trace of the function depends on them."""
        raise NotImplementedError


# --- forward --------------------------------------------------------------------------


class custom_jvp(_Custom):
    """A decorator for a function with a custom rule for tangents (forward mode).

        @hf.custom_jvp
        def f(x, y): ...

        @f.defjvp
        def _(primals, tangents): ...  # -> (result, tangent of the result)

    The rule must be linear in the tangents; reverse mode transposes it. It may be
    differentiated itself.

    Args:
        fun: Takes and returns pytrees of tensors. Its arguments are values: the caller
            does not see in-place writes to them. It may not write to captured tensors.
        nondiff_argnums: The indices of positional arguments that are not tensors: they
            are passed to the rule first, before `primals`.

    Raises:
        ArgumentTypeError: `fun` is not callable, or `nondiff_argnums` is not a tuple or
            a list of ints.

    >>> @hf.custom_jvp
    ... def clipped(x):
    ...     return hf.minimum(x, 1.0)
    >>> @clipped.defjvp
    ... def _(primals, tangents):
    ...     return clipped(*primals), tangents[0]  # as if it did not clip
    >>> hf.grad(clipped)(3.0)
    Tensor(1., f32[])
    """

    name = "custom_jvp"
    offered = ("jvp",)
    rule: Callable[..., Any] | None = None

    @property
    def rules(self) -> tuple[Any, ...]:
        return (self.rule,)

    def defjvp(self, rule: Callable[..., Any]) -> Callable[..., Any]:
        """Set the rule, and return it: this is a decorator too."""
        require_callable("defjvp", "rule", rule)
        self.rule = rule
        return rule

    def defjvps(self, *rules: Callable[..., Any] | None) -> None:
        """Set a rule for each argument: (t, result, *primals) -> its contribution to
        the tangent of the result. None contributes nothing."""
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


def _tree_sum(a: Any, b: Any) -> Any:
    return pytree.tree_map(lambda x, y: x + y, a, b)


# --- reverse --------------------------------------------------------------------------


class custom_vjp(_Custom):
    """A decorator for a function with a custom rule for cotangents (reverse mode).

        @hf.custom_vjp
        def f(x, y): ...

        def forward(x, y): ...  # -> (result, residuals)
        def backward(residuals, ct): ...  # -> (cotangent of x, cotangent of y)

        f.defvjp(forward, backward)

    Residuals are any pytree. A cotangent may be None, which is zero. Such a function
    has no forward derivative.

    Args:
        fun: Takes and returns pytrees of tensors. Its arguments are values: the caller
            does not see in-place writes to them. It may not write to captured tensors.
        nondiff_argnums: The indices of positional arguments that are not tensors: they
            are passed to `forward` at their positions, and to `backward` first, before
            the residuals.

    Raises:
        ArgumentTypeError: `fun` is not callable, or `nondiff_argnums` is not a tuple or
            a list of ints.

    >>> @hf.custom_vjp
    ... def identity(x):
    ...     return x
    >>> identity.defvjp(lambda x: (x, None), lambda _, ct: (ct * 0.5,))
    >>> hf.grad(identity)(3.0)
    Tensor(0.5, f32[])
    """

    name = "custom_vjp"
    offered = ("vjp",)
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
