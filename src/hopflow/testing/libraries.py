"""The functions that drawn programs use, as fields of a `Library`: hopflow or JAX."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import hopflow
from hopflow.testing.requires import load

LONGEST: Final = 5
"""The most steps of loops in JAX, so that they are differentiable in reverse mode."""


@dataclass(frozen=True)
class Library:
    """The functions that a program uses.

    m       the module of array functions
    prefix  `associative_scan`
    call    `invoke_subgraph`
    custom  (function, "custom_jvp" or "custom_vjp") -> the function with a custom rule
            that is its own derivative
    fori    `fori_loop` over a tuple
    loop    `while_loop` over a tuple
    update  `dynamic_update_slice`
    sum_by  `segment_sum`
    conv    `conv` with one int for each option
    noise   (number, shape) -> random f64 of this shape
    user    (operator, functions, values) -> the results of a `UserOperator`
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
    conv: Callable[..., Any]
    noise: Callable[..., Any]
    user: Callable[..., Any]


def _custom(d: Any) -> Callable[..., Any]:
    def custom(f: Callable[..., Any], rule: str = "custom_jvp") -> Any:
        wrapped = getattr(d, rule)(f)
        if rule == "custom_jvp":
            wrapped.defjvp(lambda primals, tangents: d.jvp(f, primals, tangents))
        else:
            wrapped.defvjp(
                lambda *xs: (f(*xs), xs), lambda xs, cts: d.vjp(f, *xs)[1](cts)
            )
        return wrapped

    return custom


def _noise(random: Any, m: Any) -> Callable[..., Any]:
    def noise(number: Any, shape: Any) -> Any:
        key = random.fold_in(random.key(7), number)
        return random.uniform(key, shape, dtype=m.float64)

    return noise


hf: Any = hopflow
HOPFLOW: Final = Library(
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
    conv=hf.conv,
    noise=_noise(hf.random, hf),
    user=lambda operator, functions, values: operator(functions, values),
)


class _Jax:
    """JAX's loops with hopflow's interface."""

    def __init__(self, jax: Any) -> None:
        self.jax, self.lax, self.jnp = jax, jax.lax, jax.numpy

    def loop(
        self, test: Callable[..., Any], step: Callable[..., Any], carry: Any, **_: Any
    ) -> Any:
        """`while_loop` as a scan of `LONGEST` steps that do nothing after the last one:
        JAX has no reverse mode of loops with an unknown number of steps."""

        def maybe(carry: Any, _: Any) -> Any:
            return self.lax.cond(test(*carry), step, lambda *same: same, *carry), None

        return self.lax.scan(maybe, carry, None, length=LONGEST)[0]

    def map(self, f: Callable[..., Any], xs: Any, **_: Any) -> Any:
        """`map` without `batch_size`, for which JAX does not support empty rows."""
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
        """`scan`; with `until`, the steps after the last one do nothing."""
        if until is None:
            return self.lax.scan(step, carry, xs, reverse=reverse)

        def maybe(state: Any, x: Any) -> Any:
            carry, done, count = state
            types = self.jax.eval_shape(step, carry, x)[1]
            none = self.jax.tree.map(lambda t: self.jnp.zeros(t.shape, t.dtype), types)
            carry, y = self.lax.cond(done, lambda *_: (carry, none), step, carry, x)
            return (carry, done | until(carry), count + ~done), y

        # Without a dtype, JAX would make a weak array.
        none_yet = self.jnp.asarray(0, self.jnp.int64)
        first = (carry, self.jnp.asarray(False), none_yet)
        (carry, _, count), ys = self.lax.scan(maybe, first, xs, reverse=reverse)
        return carry, ys, count

    def conv(
        self, x: Any, w: Any, *, stride: int, padding: int, dilation: int, groups: int
    ) -> Any:
        dtype = self.jnp.promote_types(x.dtype, w.dtype)
        return self.lax.conv_general_dilated(
            *(x.astype(dtype), w.astype(dtype)),
            [stride] * (x.ndim - 2),
            [(padding, padding)] * (x.ndim - 2),
            rhs_dilation=[dilation] * (x.ndim - 2),
            feature_group_count=groups,
        )


def _not_in_jax(operator: Any, *_: Any) -> Any:
    raise NotImplementedError(f"{operator} is no operator of JAX's")


def jax_library() -> Library:
    """Return JAX as a `Library`; without JAX, the test module is skipped."""
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
        conv=loops.conv,
        noise=_noise(jax.random, jax.numpy),
        user=_not_in_jax,
    )


@functools.cache
def names_of_jax() -> Any:
    """Return JAX with hopflow's names, for the text of programs."""
    jax, lib = load("jax"), jax_library()

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
        conv = staticmethod(lib.conv)
        cummax, cummin = staticmethod(jax.lax.cummax), staticmethod(jax.lax.cummin)
        random = jax.random
        Checkpoint = hf.Checkpoint

        def top_k(self, x: Any, k: int, *, axis: int) -> Any:
            values, order = jax.lax.top_k(x, k, axis=axis)
            return values, order.astype(jax.numpy.int64)

        def searchsorted(self, *args: Any, **options: Any) -> Any:
            positions = jax.numpy.searchsorted(*args, **options)
            return positions.astype(jax.numpy.int64)

        def cumulative_prod(self, x: Any, *, axis: int) -> Any:
            dtype = jax.numpy.prod(x).dtype  # JAX's default keeps that of `x`
            return jax.numpy.cumulative_prod(x, axis=axis, dtype=dtype)

        def __getattr__(self, name: str) -> Any:
            return getattr(jax if hasattr(jax, name) else jax.numpy, name)

    return Names()
