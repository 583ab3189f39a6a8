"""Jacobians: `jacfwd`, `jacrev` and `hessian`, as derivatives along a batched basis."""

import functools
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from hopflow import pytree
from hopflow.autograd.api import Linear, argnums_of, chosen_of
from hopflow.autograd.rules import is_differentiable
from hopflow.batching.api import vmap
from hopflow.bind import Value, recordable
from hopflow.errors import DerivativeError
from hopflow.ops.convert import astype
from hopflow.ops.creation import eye
from hopflow.ops.views import moved, part, reshaped
from hopflow.symbolic.size import Size
from hopflow.trace.source import name_of
from hopflow.zeros import instantiate


def jacfwd(f: Callable[..., Any], argnums: int | Sequence[int] = 0) -> Any:
    """A function that gives the Jacobian of `f`, a column at a time: forward mode.

    Args:
        f: Takes and returns pytrees of float tensors.
        argnums: Which positional arguments to differentiate in.

    Returns:
        A function of the arguments of `f`. It gives a tree as the result of `f`, and in
        place of each leaf T[*out] a tree as the argument, of leaves T[*out, *in]; a
        tuple of such trees if `argnums` is a sequence.

    Raises:
        ArgumentTypeError: `f` is no function, or `argnums` no int.
        ArgumentValueError: there is no such argument (at a call).
        DerivativeError: an operation has no derivative, or an argument or a result has
            integers (at a call).
    """

    def columns(linear: Linear) -> list[list[Any]]:
        primals, results = linear.primals.values, linear.run.values
        stacks = vmap(lambda ts: [*map(instantiate, linear.push(ts))])(_basis(primals))
        parts = [_parts(stack, primals) for stack in stacks]
        return [
            [_in_shape(x, v, result.ndim) for x, v in zip(row, primals, strict=True)]
            for row, result in zip(parts, results, strict=True)
        ]

    return _jacobian("jacfwd", f, argnums, columns, pushed=True)


def jacrev(f: Callable[..., Any], argnums: int | Sequence[int] = 0) -> Any:
    """A function that gives the Jacobian of `f`, a row at a time: reverse mode.

    The arguments and the result are those of `jacfwd`; where `f` has fewer results than
    arguments this is the quicker way.

    Raises:
        ArgumentTypeError, ArgumentValueError, DerivativeError: see `jacfwd`.
    """

    def rows(linear: Linear) -> list[list[Any]]:
        results = linear.run.values
        stacks = vmap(lambda ts: [*map(instantiate, linear.pull(ts))])(_basis(results))
        parts = [_parts(stack, results) for stack in stacks]
        return [
            [reshaped(own[k], (*r.shape, *own[k].shape[1:])) for own in parts]
            for k, r in enumerate(results)
        ]

    return _jacobian("jacrev", f, argnums, rows, pushed=False)


def hessian(f: Callable[..., Any], argnums: int | Sequence[int] = 0) -> Any:
    """A function that gives the second derivatives of `f`: `jacfwd` of `jacrev`.

    Raises:
        ArgumentTypeError, ArgumentValueError, DerivativeError: see `jacfwd`.
    """
    return jacfwd(jacrev(f, argnums), argnums)


def _jacobian(
    name: str,
    f: Callable[..., Any],
    argnums: int | Sequence[int],
    blocks: Callable[[Linear], list[list[Any]]],
    *,
    pushed: bool,
) -> Any:
    """
    Args:
        blocks: For each leaf of the result, the block of each leaf of the arguments.
        pushed: Whether they push tangents.
    """
    numbers = argnums_of(name, f, argnums)
    single = not isinstance(argnums, Sequence)

    @functools.wraps(f)
    def call(*args: Any, **kwargs: Any) -> Any:
        chosen, primals = chosen_of(name, f, numbers, args, kwargs)
        if not primals.values:
            raise DerivativeError(
                f"{name}: the arguments of `{name_of(f)}` that `argnums` names hold no "
                "tensor. Name one that does."
            )
        linear = Linear(name, chosen, primals, pushed=pushed)
        run = linear.run
        if not run.values:
            raise DerivativeError(
                f"{name}: `{name_of(f)}` returns nothing that has a derivative. Return "
                "a float tensor, or a tree of them."
            )
        paths = pytree.leaf_paths(run.spec, "result")
        for value, path in zip(run.values, paths, strict=True):
            if not is_differentiable(value.type):
                raise DerivativeError(
                    f"{name}: `{path}` is {value.type}, which has no derivative."
                )
        rows = [pytree.unflatten(primals.spec, row) for row in blocks(linear)]
        return pytree.unflatten(run.spec, [r[0] if single else r for r in rows])

    return recordable(call, made=(name, f, {"argnums": argnums}))


def _basis(values: Sequence[Value]) -> list[Any]:
    """All unit vectors of the space of such values, stacked along axis 0."""
    starts, count = _starts(values)
    rows = eye(count)
    found = []
    for start, value in zip(starts, values, strict=True):
        own = astype(part(rows, 1, start, value.type.size), value.type.dtype)
        found.append(reshaped(own, (count, *value.shape)))
    return found


def _starts(values: Sequence[Value]) -> tuple[list[Size], Size]:
    """Where each begins in the vector that all of them make, and the length of that."""
    *starts, count = accumulate([v.type.size for v in values], initial=0)
    return starts, count


def _parts(stack: Value, values: Sequence[Value]) -> list[Any]:
    """The rows of a stack along axis 0 that belong to each of `values`."""
    starts, _ = _starts(values)
    pairs = zip(starts, values, strict=True)
    return [part(stack, 0, start, value.type.size) for start, value in pairs]


def _in_shape(column: Any, value: Value, ndim: int) -> Any:
    """A stack of columns of `ndim` axes as one block: those, then the value's own."""
    last = moved(column, 0, ndim)
    return reshaped(last, (*last.shape[:-1], *value.shape))
