"""Transforms of programs, and their reference implementations.

The reference of `vmap` is a loop over batch elements. That of derivatives is the tape
over debug mode, which `testing.differences` compares with finite differences.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Final

import numpy as np

import hopflow
from hopflow import pytree
from hopflow.agreement import Rounding
from hopflow.bind import using
from hopflow.compiler.compared import Rounded
from hopflow.dtypes import as_dtype
from hopflow.errors import ArgumentValueError
from hopflow.hops.base import debug
from hopflow.testing.plain import Plain
from hopflow.testing.program import Argument, Program, bodies, walk

Array = np.ndarray[Any, Any]
Function = Callable[..., Any]

BATCHING: Final = frozenset(["vmap", "longer vmap"])
DERIVATIVES: Final = frozenset(["grad", "jvp", "linearize", "hessian"])
FORWARD: Final = DERIVATIVES - {"grad"}
"""The derivatives that need tangents, which `custom_vjp` does not support."""


@dataclass(frozen=True)
class Transform:
    """A transform of a function: `vmap`, `grad`, `jvp`, `linearize`, `hessian`,
    `checkpoint`, a composition such as "jvp of grad", or `value`, the identity; or
    `longer vmap`, a `vmap` for which the function appends a batch element.

    Raises:
        ArgumentValueError: there is no such transform.
    """

    name: str

    def __post_init__(self) -> None:
        if not {*BATCHING, "checkpoint", *DERIVATIVES}.issuperset(self.steps):
            raise ArgumentValueError(
                f"check: `transforms` has {self.name!r}, which is none of value, vmap, "
                "grad, jvp, linearize, hessian, checkpoint, and of those of each "
                "other, as `jvp of grad`."
            )

    @cached_property
    def steps(self) -> tuple[str, ...]:
        """The names of the composed transforms; the last is applied first."""
        return () if self.name == "value" else tuple(str(self.name).split(" of "))

    @cached_property
    def is_derivative(self) -> bool:
        """Whether it differentiates."""
        return not DERIVATIVES.isdisjoint(self.steps)

    @cached_property
    def is_batched(self) -> bool:
        """Whether it batches."""
        return not BATCHING.isdisjoint(self.steps)

    def function(self, program: Program, lib: Any) -> Function:
        """Return the transformed program in a library, which an execution runs."""
        return self._of(program, lib, lib.vmap if self.is_batched else None)

    def _of(self, program: Program, lib: Any, vmap: Any) -> Function:
        f: Function = program.function(lib)
        where = floats(program)
        is_smooth = False  # whether all results are floats
        for step in reversed(self.steps):
            if step in BATCHING:
                f = vmap(f) if step == "vmap" else _longer(vmap(f), lib)
            elif step == "checkpoint":
                f = lib.checkpoint(f)
            elif step == "hessian":
                f, is_smooth = _hessian(scalar(f, lib), where, lib), True
            elif step == "grad":
                f, is_smooth = _gradient(scalar(f, lib), where, lib), True
            else:
                smooth = f if is_smooth else scalar(f, lib)
                f, is_smooth = _along(smooth, where, lib, step), True
        return f

    def reference(self, program: Program, plain: Plain) -> list[Array]:
        """Return the reference results for the arguments of a program."""
        values = self.arguments(program)
        if self.is_derivative:
            f = self._of(program, hopflow, partial(_each, lib=hopflow))
            return tape(f, values, plain.rounding)
        with np.errstate(all="ignore"):
            results = self._of(program, plain, partial(_each, lib=np))(*values)
            return [np.asarray(x) for x in pytree.flatten(results)[0]]

    def arguments(self, program: Program) -> list[Array]:
        """Return the arguments of the transformed program."""
        values = program.values()
        for _ in range(sum(step in BATCHING for step in self.steps)):
            values = [_batched(x, exact=program.exact) for x in values]
        return values

    def fits(self, program: Program) -> bool:
        """Whether it applies to a program."""
        if not self.is_derivative:
            return True
        forward = (
            FORWARD.isdisjoint(self.steps) or "custom_vjp" not in program.operations
        )
        return forward and _differentiable(program)

    @property
    def needs(self) -> set[str]:
        """The transforms that an execution must support."""
        batched = {"vmap"} if self.is_batched else set()
        return batched | ({"grad"} if self.is_derivative else set())


# --- batching -------------------------------------------------------------------------


def _batched(x: Array, *, exact: bool) -> Array:
    """Return an argument with a batch axis of three different elements."""
    if x.dtype.kind == "b":
        return np.stack([x, ~x, x & False])
    if as_dtype(x.dtype).is_float:
        other = x[::-1] * np.asarray(0.5, x.dtype) if x.ndim else -x
        # JAX's `top_k` takes -0.0 for less than 0.0.
        return np.stack([x, np.trunc(other) if exact else other, np.zeros_like(x)])
    return np.stack([x, x - 1, x + 2])


def _each(f: Function, lib: Any) -> Function:
    """Return `f` in a loop over batch elements."""

    def each(*rows: Any) -> Any:
        size = len(rows[0])
        elements = ([lib.asarray(x[i], copy=True) for x in rows] for i in range(size))
        return pytree.tree_map(lambda *xs: lib.stack(xs), *(f(*xs) for xs in elements))

    return each


def _longer(f: Function, lib: Any) -> Function:
    """Return a batched function of the arguments with their first batch element
    appended, so that the batch size is an expression."""
    return lambda *args: f(*(lib.concat([x, x[:1]]) for x in args))


# --- derivatives ----------------------------------------------------------------------


def floats(program: Program) -> tuple[int, ...]:
    """Return the positions of the arguments that have a derivative."""
    arguments = enumerate(program.arguments)
    return tuple(k for k, a in arguments if as_dtype(a.value.dtype).is_float)


def scalar(f: Function, lib: Any) -> Function:
    """Return a function that reduces the results of `f` to one number."""

    def total(*args: Any) -> Any:
        results = [x for x in pytree.flatten(f(*args))[0] if x.dtype.kind == "f"]
        parts = (
            lib.sum(lib.cos(lib.astype(x, lib.float64) + k))
            for k, x in enumerate(results)
        )
        return sum(parts, start=lib.full((), 0.0, dtype=lib.float64))

    return total


def _gradient(f: Function, where: tuple[int, ...], lib: Any) -> Function:
    both = lib.value_and_grad(f, where)

    def gradient(*args: Any) -> Any:
        value, grads = both(*args)
        return value, *grads

    return gradient


def _hessian(f: Function, where: tuple[int, ...], lib: Any) -> Function:
    return lambda *args: lib.hessian(f, where)(*args)


def _along(f: Function, where: tuple[int, ...], lib: Any, step: str) -> Function:
    """Return the derivative of `f` in a fixed direction, by `jvp` or `linearize`."""

    def along(*args: Any) -> Any:
        def of_floats(*floats_: Any) -> Any:
            operands = list(args)
            for k, x in zip(where, floats_, strict=True):
                operands[k] = x
            return f(*operands)

        primals = tuple(args[k] for k in where)
        tangents = tuple(lib.cos(2 * x + 1) for x in primals)
        if step == "jvp":
            return lib.jvp(of_floats, primals, tangents)
        value, push = lib.linearize(of_floats, *primals)
        return value, push(*tangents)

    return along


def tape(f: Function, values: Sequence[Array], rounding: Rounding) -> list[Array]:
    """Return the results of `f` in debug mode, differentiated by the tape."""
    with debug(), using(Rounded(rounding)):
        result = f(*map(hopflow.asarray, values))
    return [np.asarray(x) for x in pytree.flatten(result)[0]]


def _differentiable(program: Program) -> bool:
    # The rule of `custom_jvp` uses forward mode, which `custom_vjp` does not support.
    rules = (
        inner.operation
        for statement in walk(program.main)
        if statement.operation == "custom_jvp"
        for body in bodies(statement)
        for inner in walk(body)
    )
    return bool(floats(program)) and not program.exact and "custom_vjp" not in rules


# --- finite differences ---------------------------------------------------------------


@dataclass(frozen=True)
class Differences:
    """How to compare a transform with finite differences.

    along    (program, rounding) -> the values that the transform differentiates
    slopes   (program, results) -> the derivatives of these values, from the results
    """

    along: Callable[[Program, Rounding], list[Array]]
    slopes: Callable[[Program, list[Array]], list[Array]]


def differences_of(transform: Transform) -> Differences | None:
    """Return how to compare a transform with finite differences; None: it cannot be."""
    return _DIFFERENCES.get(transform.name)


def moved(program: Program, step: float) -> Program:
    """Return the program at arguments moved by a step in the direction of `_along`."""
    where, values = floats(program), program.values()
    for k in where:
        values[k] = values[k] + step * np.cos(2 * values[k] + 1)
    names = (a.name for a in program.arguments)
    arguments = tuple(map(Argument, names, values))
    return dataclasses.replace(program, arguments=arguments)


def _total(program: Program, rounding: Rounding) -> list[Array]:
    plain = Plain(rounding)
    with np.errstate(all="ignore"):
        total = scalar(program.function(plain), plain)
        return [np.asarray(total(*program.values()))]


def _gradient_of(program: Program, rounding: Rounding) -> list[Array]:
    return Transform("grad").reference(program, Plain(rounding))


def _slope_of_gradient(program: Program, results: list[Array]) -> list[Array]:
    values = program.values()
    pairs = zip(results[1:], floats(program), strict=True)
    parts = (np.sum(g * np.cos(2 * values[k] + 1)) for g, k in pairs)
    return [np.asarray(sum(parts))]


def _tangents(_: Program, results: list[Array]) -> list[Array]:
    return results[len(results) // 2 :]


_DIFFERENCES: Final = {
    "grad": Differences(_total, _slope_of_gradient),
    "jvp": Differences(_total, _tangents),
    "jvp of grad": Differences(_gradient_of, _tangents),
}
