"""One program, in our names and in JAX's: what it uses is the field of a `Library`."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import hopflow
from hopflow.testing.requires import load

LONGEST: Final = 5
"""The most steps that a loop may have for JAX to differentiate it in reverse."""


@dataclass(frozen=True)
class Library:
    """The names that a program uses, of ours or of JAX's.

    m       the functions of tensors
    prefix  `associative_scan`
    call    `invoke_subgraph`
    custom  (function, "custom_jvp" or "custom_vjp") -> it, with its own derivative as a
            rule
    fori    `fori_loop`, and `loop` is `while_loop`: of tuples
    update  `dynamic_update_slice`
    sum_by  `segment_sum`
    noise   (number, shape) -> as many random f64
    user    (operator, functions, values) -> what a `UserOperator` returns
    """

    m: Any
    cond: Callable[..., Any]
    switch: Callable[..., Any]
    scan: Callable[..., Any]
    map: Callable[..., Any]
    prefix: Callable[..., Any]
    call: Callable[..., Any]
    checkpoint: Callable[..., Any]
    custom: Callable[..., Any]
    fori: Callable[..., Any]
    loop: Callable[..., Any]
    update: Callable[..., Any]
    sum_by: Callable[..., Any]
    noise: Callable[..., Any]
    user: Callable[..., Any]


def _custom(d: Any) -> Callable[..., Any]:
    def custom(f: Callable[..., Any], rule: str = "custom_jvp") -> Any:
        found = getattr(d, rule)(f)
        if rule == "custom_jvp":
            found.defjvp(lambda primals, tangents: d.jvp(f, primals, tangents))
        else:
            found.defvjp(
                lambda *xs: (f(*xs), xs), lambda xs, cts: d.vjp(f, *xs)[1](cts)
            )
        return found

    return custom


def _noise(random: Any, m: Any) -> Callable[..., Any]:
    def noise(number: Any, shape: Any) -> Any:
        key = random.fold_in(random.key(7), number)
        return random.uniform(key, shape, dtype=m.float64)

    return noise


hf: Any = hopflow
OURS: Final = Library(
    m=hf,
    cond=hf.cond,
    switch=hf.switch,
    scan=hf.scan,
    map=hf.map,
    prefix=hf.associative_scan,
    call=hf.invoke_subgraph,
    checkpoint=hf.checkpoint,
    custom=_custom(hf),
    fori=hf.fori_loop,
    loop=hf.while_loop,
    update=hf.dynamic_update_slice,
    sum_by=hf.segment_sum,
    noise=_noise(hf.random, hf),
    user=lambda operator, functions, values: operator(functions, values),
)


class _Jax:
    """What JAX has of loops, as we have it."""

    def __init__(self, jax: Any) -> None:
        self.jax, self.lax, self.jnp = jax, jax.lax, jax.numpy

    def loop(
        self, test: Callable[..., Any], step: Callable[..., Any], carry: Any, **_: Any
    ) -> Any:
        """JAX differentiates a loop whose number of steps only the run knows forward
        alone: a scan of `LONGEST` steps, of which the first ones count."""

        def maybe(carry: Any, _: Any) -> Any:
            return self.lax.cond(test(*carry), step, lambda *same: same, *carry), None

        return self.lax.scan(maybe, carry, None, length=LONGEST)[0]

    def map(self, f: Callable[..., Any], xs: Any, **_: Any) -> Any:
        """Not in batches, in which JAX has no rows without elements."""
        return self.lax.map(f, xs)

    def fori(self, lower: Any, upper: Any, step: Callable[..., Any], carry: Any) -> Any:
        if isinstance(upper, int):
            return self.lax.fori_loop(lower, upper, lambda i, c: step(i, *c), carry)
        first = self.jnp.asarray(lower, upper.dtype)
        return self.loop(
            lambda i, *_: i < upper,
            lambda i, *c: (i + 1, *step(i, *c)),
            (first, *carry),
        )[1:]

    def scan(
        self,
        step: Callable[..., Any],
        carry: Any,
        xs: Any,
        *,
        reverse: bool = False,
        until: Callable[..., Any] | None = None,
    ) -> Any:
        """All steps are taken; those after the one that ends it change nothing."""
        if until is None:
            return self.lax.scan(step, carry, xs, reverse=reverse)

        def maybe(state: Any, x: Any) -> Any:
            carry, done, count = state
            types = self.jax.eval_shape(step, carry, x)[1]
            none = self.jax.tree.map(lambda t: self.jnp.zeros(t.shape, t.dtype), types)
            carry, y = self.lax.cond(done, lambda *_: (carry, none), step, carry, x)
            return (carry, done | until(carry), count + ~done), y

        # JAX takes the array of a Python number for as weak as that.
        none_yet = self.jnp.asarray(0, self.jnp.int64)
        first = (carry, self.jnp.asarray(False), none_yet)
        (carry, _, count), ys = self.lax.scan(maybe, first, xs, reverse=reverse)
        return carry, ys, count


def _not_theirs(operator: Any, *_: Any) -> Any:
    raise NotImplementedError(f"{operator} is no operator of JAX's")


def theirs() -> Library:
    """JAX; the module that asks is skipped where it is missing."""
    jax = load("jax")
    lax, loops = jax.lax, _Jax(jax)
    return Library(
        m=jax.numpy,
        cond=lax.cond,
        switch=lax.switch,
        scan=loops.scan,
        map=loops.map,
        prefix=lax.associative_scan,
        call=lambda f, *operands: f(*operands),
        checkpoint=lambda f, **_: jax.checkpoint(f),
        custom=_custom(jax),
        fori=loops.fori,
        loop=loops.loop,
        update=lax.dynamic_update_slice,
        sum_by=jax.ops.segment_sum,
        noise=_noise(jax.random, jax.numpy),
        user=_not_theirs,
    )


@functools.cache
def names_of_jax() -> Any:
    """JAX by our names, for programs."""
    jax, lib = load("jax"), theirs()

    class Names:
        cond, switch, scan, map = map(
            staticmethod, (lib.cond, lib.switch, lib.scan, lib.map)
        )
        associative_scan = staticmethod(lib.prefix)
        invoke_subgraph = staticmethod(lib.call)
        checkpoint = staticmethod(lib.checkpoint)
        while_loop, fori_loop = staticmethod(lib.loop), staticmethod(lib.fori)
        dynamic_update_slice = staticmethod(lib.update)
        dynamic_slice = staticmethod(jax.lax.dynamic_slice)
        segment_sum = staticmethod(lib.sum_by)
        cummax, cummin = staticmethod(jax.lax.cummax), staticmethod(jax.lax.cummin)
        random = jax.random
        Checkpoint = hf.Checkpoint

        def top_k(self, x: Any, k: int, *, axis: int) -> Any:
            values, order = jax.lax.top_k(x, k, axis=axis)
            return values, order.astype(jax.numpy.int64)

        def searchsorted(self, *args: Any, **options: Any) -> Any:
            found = jax.numpy.searchsorted(*args, **options)
            return found.astype(jax.numpy.int64)

        def cumulative_prod(self, x: Any, *, axis: int) -> Any:
            dtype = jax.numpy.prod(x).dtype  # JAX's own stays as narrow as `x`
            return jax.numpy.cumulative_prod(x, axis=axis, dtype=dtype)

        def __getattr__(self, name: str) -> Any:
            return getattr(jax if hasattr(jax, name) else jax.numpy, name)

    return Names()
