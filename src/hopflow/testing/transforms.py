"""Transforms of programs, each with what it means in plain Python.

`vmap` is a loop over examples. Of derivatives plain Python knows differences alone, so
that their reference is the tape over plain Python, which `testing.differences` checks.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

import hopflow
from hopflow import pytree
from hopflow.agreement import Rounding
from hopflow.bind import using
from hopflow.compiler.compared import Rounded
from hopflow.dtypes import as_dtype
from hopflow.hops.base import debug
from hopflow.testing.plain import Plain
from hopflow.testing.program import Argument, Program, bodies, walk

__all__ = ["TRANSFORMS", "Transform"]

Array = np.ndarray[Any, Any]
Function = Callable[..., Any]
EXAMPLES: Final = 3


@dataclass(frozen=True)
class Transform:
    """A function of functions.

    function    (program, library) -> the function that a meaning runs
    reference   (program, Plain) -> its results in plain Python
    arguments   what that function is called with
    when        which programs it is for
    along       (program, rounding) -> what it differentiates, at its arguments
    slopes      (program, results) -> the derivatives of `along` that results have
    """

    function: Callable[[Program, Any], Function]
    reference: Callable[[Program, Plain], list[Array]]
    arguments: Callable[[Program], list[Array]]
    when: Callable[[Program], bool] = lambda _: True
    needs: str | None = None
    along: Callable[[Program, Rounding], list[Array]] | None = None
    slopes: Callable[[Program, list[Array]], list[Array]] = lambda _, results: results

    def fits(self, meaning: Any) -> bool:
        """Whether a meaning has the transform."""
        return self.needs is None or self.needs in meaning.has


def _value(program: Program, plain: Plain) -> list[Array]:
    with np.errstate(all="ignore"):
        return [np.asarray(x) for x in program.function(plain)(*program.values())]


# --- batching -------------------------------------------------------------------------


def examples(program: Program) -> list[Array]:
    """Arguments with a leading axis: like the program's, and each different."""

    def batched(x: Array) -> Array:
        if x.dtype.kind == "b":
            return np.stack([x, ~x, x & False])
        if as_dtype(x.dtype).is_float:
            other = x[::-1] * np.asarray(0.5, x.dtype) if x.ndim else -x
            return np.stack([x, np.trunc(other) if program.exact else other, x * 0])
        return np.stack([x, x - 1, x + 2])

    return [batched(x) for x in program.values()]


def _each(program: Program, plain: Plain) -> list[Array]:
    f, rows = program.function(plain), examples(program)
    with np.errstate(all="ignore"):
        found = [f(*(np.array(x[i]) for x in rows)) for i in range(EXAMPLES)]
    return [np.stack(xs) for xs in zip(*found, strict=True)]


# --- derivatives ----------------------------------------------------------------------


def floats(program: Program) -> tuple[int, ...]:
    """Which arguments have a derivative."""
    given = enumerate(program.arguments)
    return tuple(k for k, a in given if as_dtype(a.value.dtype).is_float)


def scalar(program: Program, lib: Any) -> Function:
    """The results of a program in one number."""
    f = program.function(lib)

    def total(*args: Any) -> Any:
        found = [x for x in pytree.flatten(f(*args))[0] if x.dtype.kind == "f"]
        parts = (
            lib.sum(lib.cos(lib.astype(x, lib.float64) + k))
            for k, x in enumerate(found)
        )
        return sum(parts, start=lib.full((), 0.0, dtype=lib.float64))

    return total


def _grad(program: Program, lib: Any) -> Function:
    f = lib.value_and_grad(scalar(program, lib), floats(program))

    def gradient(*args: Any) -> Any:
        value, grads = f(*args)
        return value, *grads

    return gradient


def _jvp(program: Program, lib: Any) -> Function:
    return _along(program, scalar(program, lib), lib)


def _along(program: Program, f: Function, lib: Any) -> Function:
    """The derivative of `f` in a direction."""
    where = floats(program)

    def along(*args: Any) -> Any:
        def of_floats(*some: Any) -> Any:
            given = list(args)
            for k, x in zip(where, some, strict=True):
                given[k] = x
            return f(*given)

        primals = tuple(args[k] for k in where)
        return lib.jvp(of_floats, primals, tuple(lib.cos(2 * x + 1) for x in primals))

    return along


def moved(program: Program, step: float) -> Program:
    """The program at arguments a step away, in the direction of `_along`."""
    where, values = floats(program), program.values()
    for k in where:
        values[k] = values[k] + step * np.cos(2 * values[k] + 1)
    names = (a.name for a in program.arguments)
    near = tuple(map(Argument, names, values))
    return dataclasses.replace(program, arguments=near)


def _total(program: Program, rounding: Rounding) -> list[Array]:
    with np.errstate(all="ignore"):
        return [np.asarray(scalar(program, Plain(rounding))(*program.values()))]


def _gradient(program: Program, rounding: Rounding) -> list[Array]:
    return tape(_grad(program, hopflow), program.values(), rounding)


def _slope_of_gradient(program: Program, results: list[Array]) -> list[Array]:
    values = program.values()
    pairs = zip(results[1:], floats(program), strict=True)
    parts = (np.sum(g * np.cos(2 * values[k] + 1)) for g, k in pairs)
    return [np.asarray(sum(parts))]


def _tangents(_: Program, results: list[Array]) -> list[Array]:
    return results[len(results) // 2 :]


def _jvp_of_grad(program: Program, lib: Any) -> Function:
    return _along(program, _grad(program, lib), lib)


def _vmap_of_grad(program: Program, lib: Any) -> Function:
    found: Function = lib.vmap(_grad(program, lib))
    return found


def _on_tape(make: Callable[[Program, Any], Function]) -> Any:
    """A derivative by plain Python and our tape."""

    def reference(program: Program, plain: Plain) -> list[Array]:
        return tape(make(program, hopflow), program.values(), plain.rounding)

    return reference


def tape(f: Function, values: Sequence[Array], rounding: Rounding) -> list[Array]:
    with debug(), using(Rounded(rounding)):
        result = f(*map(hopflow.asarray, values))
    return [np.asarray(x) for x in pytree.flatten(result)[0]]


def _tape_each(program: Program, plain: Plain) -> list[Array]:
    f, rows = _grad(program, hopflow), examples(program)
    each = ([np.array(x[i]) for x in rows] for i in range(EXAMPLES))
    found = [tape(f, values, plain.rounding) for values in each]
    return [np.stack(xs) for xs in zip(*found, strict=True)]


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


def _forward(program: Program) -> bool:
    return _differentiable(program) and "custom_vjp" not in program.operations


TRANSFORMS: Final[dict[str, Transform]] = {
    "value": Transform(lambda p, lib: p.function(lib), _value, Program.values),
    "vmap": Transform(
        lambda p, lib: lib.vmap(p.function(lib)), _each, examples, needs="vmap"
    ),
    "grad": Transform(
        _grad,
        _on_tape(_grad),
        Program.values,
        _differentiable,
        "grad",
        _total,
        _slope_of_gradient,
    ),
    "jvp": Transform(
        _jvp, _on_tape(_jvp), Program.values, _forward, "grad", _total, _tangents
    ),
    "jvp of grad": Transform(
        _jvp_of_grad,
        _on_tape(_jvp_of_grad),
        Program.values,
        _forward,
        "grad",
        _gradient,
        _tangents,
    ),
    "vmap of grad": Transform(
        _vmap_of_grad, _tape_each, examples, _differentiable, "grad"
    ),
}
