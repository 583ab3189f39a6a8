"""Transforms of programs, and what they mean in plain Python.

`vmap` is a loop over examples. Of derivatives plain Python knows differences alone, so
that their reference is the tape over plain Python, which `testing.differences` checks.
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
"""Those that need tangents, which a `custom_vjp` has not."""


@dataclass(frozen=True)
class Transform:
    """What is done to a function: by `value` nothing; or `vmap`, `grad`, `jvp`,
    `linearize`, `hessian`, `checkpoint`, or such as "jvp of grad"; or `longer vmap`,
    for which the function itself makes one batch element more than it is given.

    Raises:
        ArgumentValueError: there is none of that name.
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
        """The last is done first."""
        return () if self.name == "value" else tuple(str(self.name).split(" of "))

    @cached_property
    def is_derivative(self) -> bool:
        return not DERIVATIVES.isdisjoint(self.steps)

    @cached_property
    def is_batched(self) -> bool:
        return not BATCHING.isdisjoint(self.steps)

    def function(self, program: Program, lib: Any) -> Function:
        """The function that a meaning runs."""
        return self._of(program, lib, lib.vmap if self.is_batched else None)

    def _of(self, program: Program, lib: Any, vmap: Any) -> Function:
        f: Function = program.function(lib)
        where = floats(program)
        is_smooth = False  # whether all that it gives are floats
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
        """Its results in plain Python, on the arguments of a program."""
        given = self.arguments(program)
        if self.is_derivative:
            f = self._of(program, hopflow, partial(_each, lib=hopflow))
            return tape(f, given, plain.rounding)
        with np.errstate(all="ignore"):
            found = self._of(program, plain, partial(_each, lib=np))(*given)
            return [np.asarray(x) for x in pytree.flatten(found)[0]]

    def arguments(self, program: Program) -> list[Array]:
        """What the function is called with."""
        found = program.values()
        for _ in range(sum(step in BATCHING for step in self.steps)):
            found = [_batched(x, exact=program.exact) for x in found]
        return found

    def fits(self, program: Program) -> bool:
        """Whether it is for a program."""
        if not self.is_derivative:
            return True
        forward = (
            FORWARD.isdisjoint(self.steps) or "custom_vjp" not in program.operations
        )
        return forward and _differentiable(program)

    @property
    def needs(self) -> set[str]:
        """What a meaning must have."""
        batched = {"vmap"} if self.is_batched else set()
        return batched | ({"grad"} if self.is_derivative else set())


# --- batching -------------------------------------------------------------------------


def _batched(x: Array, *, exact: bool) -> Array:
    """An argument with a leading axis of examples, each of which is different."""
    if x.dtype.kind == "b":
        return np.stack([x, ~x, x & False])
    if as_dtype(x.dtype).is_float:
        other = x[::-1] * np.asarray(0.5, x.dtype) if x.ndim else -x
        return np.stack([x, np.trunc(other) if exact else other, x * 0])
    return np.stack([x, x - 1, x + 2])


def _each(f: Function, lib: Any) -> Function:
    """`f` for one example after the other."""

    def each(*rows: Any) -> Any:
        size = len(rows[0])
        own = ([lib.asarray(x[i], copy=True) for x in rows] for i in range(size))
        return pytree.tree_map(lambda *xs: lib.stack(xs), *(f(*xs) for xs in own))

    return each


def _longer(f: Function, lib: Any) -> Function:
    """A batched function of what is given and its first batch element once more: how
    many they are is an expression."""
    return lambda *args: f(*(lib.concat([x, x[:1]]) for x in args))


# --- derivatives ----------------------------------------------------------------------


def floats(program: Program) -> tuple[int, ...]:
    """Which arguments have a derivative."""
    given = enumerate(program.arguments)
    return tuple(k for k, a in given if as_dtype(a.value.dtype).is_float)


def scalar(f: Function, lib: Any) -> Function:
    """The results of a function in one number."""

    def total(*args: Any) -> Any:
        found = [x for x in pytree.flatten(f(*args))[0] if x.dtype.kind == "f"]
        parts = (
            lib.sum(lib.cos(lib.astype(x, lib.float64) + k))
            for k, x in enumerate(found)
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
    """The derivative of `f` in a direction, by `jvp` or `linearize`."""

    def along(*args: Any) -> Any:
        def of_floats(*some: Any) -> Any:
            given = list(args)
            for k, x in zip(where, some, strict=True):
                given[k] = x
            return f(*given)

        primals = tuple(args[k] for k in where)
        tangents = tuple(lib.cos(2 * x + 1) for x in primals)
        if step == "jvp":
            return lib.jvp(of_floats, primals, tangents)
        value, push = lib.linearize(of_floats, *primals)
        return value, push(*tangents)

    return along


def tape(f: Function, values: Sequence[Array], rounding: Rounding) -> list[Array]:
    with debug(), using(Rounded(rounding)):
        result = f(*map(hopflow.asarray, values))
    return [np.asarray(x) for x in pytree.flatten(result)[0]]


def _differentiable(program: Program) -> bool:
    # Our rule of a `custom_jvp` is a forward derivative, which a `custom_vjp` has not.
    rules = (
        inner.operation
        for statement in walk(program.main)
        if statement.operation == "custom_jvp"
        for body in bodies(statement)
        for inner in walk(body)
    )
    return bool(floats(program)) and not program.exact and "custom_vjp" not in rules


# --- what differences say of them -----------------------------------------------------


@dataclass(frozen=True)
class Differences:
    """
    along    (program, rounding) -> what a transform differentiates, at its arguments
    slopes   (program, results) -> the derivatives of `along` that results have
    """

    along: Callable[[Program, Rounding], list[Array]]
    slopes: Callable[[Program, list[Array]], list[Array]]


def differences_of(transform: Transform) -> Differences | None:
    """How differences give what a transform gives; None: they do not."""
    return _DIFFERENCES.get(transform.name)


def moved(program: Program, step: float) -> Program:
    """The program at arguments a step away, in the direction of `_along`."""
    where, values = floats(program), program.values()
    for k in where:
        values[k] = values[k] + step * np.cos(2 * values[k] + 1)
    names = (a.name for a in program.arguments)
    near = tuple(map(Argument, names, values))
    return dataclasses.replace(program, arguments=near)


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
