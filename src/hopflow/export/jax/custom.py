"""Functions with derivatives of their own, as `jax.custom_jvp` and `jax.custom_vjp`.

A call holds its rules as graphs (see `hops.rule_regions`), for one example: those of a
batch are mapped over its examples by `jax.vmap`. A call in its own rule has the rules
of the call around, `depth` rules further out.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from hopflow.autograd.rules import is_differentiable
from hopflow.export.jax.frames import Array, Frame, Site
from hopflow.hops.base import split_args
from hopflow.hops.custom import CUSTOM

Pull = Callable[..., list[Array]]


def custom_call(site: Site) -> list[Array]:
    """The results of a call, with the derivatives that its rules give."""
    params = site.params
    parts = split_args(CUSTOM, site.node.args, dict(params))
    symbols = [site.frame.given(a) for a in parts.symbols]
    inputs = [site.frame.value(a) for a in (*parts.operands, *parts.captures)]
    results = params["results"]

    def meaning(*inputs: Array) -> list[Array]:
        return site.run(params["body"], [*symbols, *inputs])

    call = _Call(site, len(parts.operands), symbols)
    found = call.differentiable(lambda *xs: meaning(*xs)[:results])(*inputs)
    written = meaning(*inputs)[results:] if len(site.results) > results else []
    return [*found, *written]


class Rules(NamedTuple):
    """The rules of a call, and what they read besides what they are given."""

    params: Any
    symbols: Sequence[Any]
    captures: Sequence[Array]


class _Call(NamedTuple):
    """A call whose rules are run.

    operands  how many of its inputs are operands; the others are captures
    symbols   what its symbols are
    """

    site: Site
    operands: int
    symbols: Sequence[Any]

    @property
    def rules(self) -> Any:
        """The params that hold its rules: its own, or those of a call around."""
        depth = self.site.params.get("depth")
        around = self.site.frame.context.around
        return self.site.params if depth is None else around[-1 - depth].params

    def differentiable(self, function: Callable[..., list[Array]]) -> Any:
        """The function, with the rules of the call."""
        jax, rules = self.site.jax, self.rules
        if "jvp" in rules:
            made = jax.custom_jvp(function)
            made.defjvp(self.push, symbolic_zeros=True)
        elif "forward" in rules:
            made = jax.custom_vjp(function)
            made.defvjp(self.forward, self.backward, symbolic_zeros=True)
        else:
            made = jax.custom_jvp(function)
            made.defjvp(self.refuse)
        return made

    def refuse(self, _primals: Any, _tangents: Any) -> Any:
        """
        Raises:
            DerivativeError: always; the program keeps no derivative of the call.
        """
        CUSTOM.check_derived(dict(self.site.params))

    # --- one example ---

    def run(self, name: str, flat: Sequence[Array], captures: Sequence[Array]) -> Any:
        """What a rule gives for these operands of it."""
        context, graph = self.site.frame.context, self.rules[name]
        depth, around = self.site.params.get("depth"), context.around
        if depth is None:
            rules = Rules(self.rules, self.symbols, captures)
        else:
            rules, around = around[-1 - depth], around[: -1 - depth]
        symbols = rules.symbols[len(rules.symbols) - len(graph.symbols) :]
        args = [*symbols, *flat, *rules.captures]
        inner = context._replace(around=(*around, rules))
        return Frame(inner, graph, args).run()

    def check_given(self, rule: str, are_given: Sequence[bool]) -> None:
        """
        Raises:
            DerivativeError: an input depends on what is differentiated, and the rule
                gives no derivative in it.
        """
        first = len(self.symbols)
        for k, is_given in enumerate(are_given):
            if is_given and k not in self.rules["wrt"]:
                type_ = self.site.types[first + k]
                raise CUSTOM.not_given(rule, type_, self.site.params)

    # --- forward mode ---

    def push(self, primals: Sequence[Array], tangents: Sequence[Any]) -> Any:
        """The results and their tangents, as `jax.custom_jvp` wants them."""
        types, wrt = self.site.types[len(self.symbols) :], self.rules["wrt"]
        given = [
            not _is_zero(t) and is_differentiable(type_)
            for t, type_ in zip(tangents, types, strict=True)
        ]
        self.check_given("jvp", given)
        dots = [self.instantiated(tangents[k]) for k in wrt]
        count = len(primals)

        def rule(*flat: Array) -> Any:
            own, captures = flat[: self.operands], flat[self.operands : count]
            return self.run("jvp", [*own, *flat[count:]], captures)

        for mask in self.site.params.get("examples", ()):
            batched = [*mask, *(mask[k] for k in wrt)]
            rule = self.site.jax.vmap(rule, [0 if b else None for b in batched])
        found = rule(*primals, *dots)
        results, places = self.site.params["results"], self.rules["tangents"]
        made = dict(zip(places, found[results:], strict=True))
        values = found[:results]
        return values, [made.get(k, self.zero(v)) for k, v in enumerate(values)]

    def zero(self, value: Array) -> Any:
        if self.site.jnp.issubdtype(value.dtype, np.inexact):
            return self.site.jnp.zeros_like(value)
        return np.zeros(value.shape, self.site.jax.dtypes.float0)

    def instantiated(self, x: Any) -> Array:
        return self.site.jnp.zeros(x.shape, x.dtype) if _is_zero(x) else x

    # --- reverse mode ---

    def forward(self, *primals: Any) -> tuple[list[Array], Any]:
        """The results, and what the backward rule needs."""
        self.check_given("vjp", [p.perturbed for p in primals])
        inputs = [p.value for p in primals]

        def rule(*flat: Array) -> Any:
            return self.run("forward", flat[: self.operands], flat[self.operands :])

        for mask in self.site.params.get("examples", ()):
            rule = self.site.jax.vmap(rule, [0 if b else None for b in mask])
        found, results = rule(*inputs), self.site.params["results"]
        return found[:results], (found[results:], inputs)

    def backward(self, kept: Any, cotangents: Sequence[Any]) -> tuple[Any, ...]:
        """The cotangents of the inputs; None: zero."""
        residuals, inputs = kept
        types = self.site.results[: self.site.params["results"]]
        pairs = zip(cotangents, types, strict=True)
        cts = [self.instantiated(ct) for ct, t in pairs if is_differentiable(t)]
        places = [self.rules["wrt"][k] for k in self.rules["cotangents"]]
        captures = inputs[self.operands :]
        count = len(residuals) + len(cts)

        def pull(*flat: Array) -> list[Array]:
            found: list[Array] = self.run("backward", flat[:count], flat[count:])
            return found

        for mask in self.site.params.get("examples", ()):
            pull = self.over_examples(pull, count, mask, places)
        found = dict(zip(places, pull(*residuals, *cts, *captures), strict=True))
        return tuple([found.get(k) for k in range(len(inputs))])

    def over_examples(
        self, pull: Pull, count: int, mask: Sequence[bool], places: Sequence[int]
    ) -> Pull:
        """A backward rule for many examples: what is the same for all gets the sum of
        their cotangents."""
        axes = [0] * count + [0 if b else None for b in mask[self.operands :]]
        batched = self.site.jax.vmap(pull, axes)

        def run(*flat: Array) -> list[Array]:
            pairs = zip(batched(*flat), places, strict=True)
            return [ct if mask[k] else self.site.jnp.sum(ct, 0) for ct, k in pairs]

        return run


def _is_zero(x: Any) -> bool:
    return type(x).__name__ == "SymbolicZero"
