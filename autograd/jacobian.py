"""Jacobians: `jacfwd`, `jacrev` and `hessian`, as derivatives along a batched basis."""

import functools
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

from hopflow import pytree
from hopflow.autograd.api import argnums_of, chosen_of, linearize, vjp
from hopflow.autograd.rules import is_differentiable
from hopflow.batching.api import vmap
from hopflow.bind import Value
from hopflow.errors import DerivativeError
from hopflow.ops.convert import astype
from hopflow.ops.creation import eye
from hopflow.ops.views import moved, part, reshaped

__all__ = ["hessian", "jacfwd", "jacrev"]


def _basis(tree: Any) -> Any:
    """All unit vectors of the space of trees like this one: stacked along axis 0."""
    leaves, spec = pytree.flatten(tree)
    count = sum(leaf.type.size for leaf in leaves)
    rows = eye(count)
    columns = zip(_starts(leaves), leaves, strict=True)
    parts = [
        reshaped(
            astype(part(rows, 1, start, x.type.size), x.type.dtype), (count, *x.shape)
        )
        for start, x in columns
    ]
    return pytree.unflatten(spec, parts)


def _starts(leaves: Sequence[Any]) -> list[Any]:
    """Where each leaf begins in the vector that a tree of them makes."""
    return list(accumulate([x.type.size for x in leaves], initial=0))[:-1]


def _columns(stack: Value, tree: Any, *, front: bool) -> Any:
    """For each leaf of `tree` its part of a stack along axis 0, in its shape.

    front   whether the axes of the leaf come before those of the stack's rows
    """
    leaves, spec = pytree.flatten(tree)
    found = []
    for start, leaf in zip(_starts(leaves), leaves, strict=True):
        rows = part(stack, 0, start, leaf.type.size)
        inner = rows.ndim - 1
        rows = reshaped(rows, (*leaf.shape, *rows.shape[1:]))
        if not front:  # the last axis to the front, as often as there are some
            for _ in range(inner):
                rows = moved(rows, rows.ndim - 1, 0)
        found.append(rows)
    return pytree.unflatten(spec, found)


def jacfwd(f: Callable[..., Any], argnums: int | Sequence[int] = 0) -> Any:
    """A function that gives the Jacobian of `f`, a column at a time: forward mode.

    Args:
        f: Takes and returns pytrees of float tensors.
        argnums: Which positional arguments to differentiate in; with a sequence the
            result has a tuple in place of each leaf.

    Returns:
        A function of the arguments of `f`: a tree as the result of `f`, and in place of
        each leaf T[*out] a tree as the argument, of leaves T[*out, *in].

    Raises:
        ArgumentTypeError, ArgumentValueError: see `grad`.
        DerivativeError: an operation has no derivative, or an argument has integers.
    """
    numbers = argnums_of("jacfwd", f, argnums)

    @functools.wraps(f)
    def call(*args: Any, **kwargs: Any) -> Any:
        chosen, known = chosen_of("jacfwd", f, numbers, args, kwargs)
        primals = pytree.unflatten(known.spec, known.values)
        out, push = linearize(chosen, *primals)
        _require_floats("jacfwd", out)
        stacks = vmap(push)(*_basis(primals))
        like = primals if isinstance(argnums, Sequence) else primals[0]
        return pytree.tree_map(lambda t: _columns(t, like, front=False), stacks)

    return call


def jacrev(f: Callable[..., Any], argnums: int | Sequence[int] = 0) -> Any:
    """A function that gives the Jacobian of `f`, a row at a time: reverse mode.

    The arguments and the result are those of `jacfwd`; where `f` has fewer results than
    arguments this is the quicker way.

    Raises:
        ArgumentTypeError, ArgumentValueError: see `grad`.
        DerivativeError: an operation has no derivative, or an argument has integers.
    """
    numbers = argnums_of("jacrev", f, argnums)

    @functools.wraps(f)
    def call(*args: Any, **kwargs: Any) -> Any:
        chosen, known = chosen_of("jacrev", f, numbers, args, kwargs)
        primals = pytree.unflatten(known.spec, known.values)
        out, pull = vjp(chosen, *primals)
        _require_floats("jacrev", out)
        stacks = vmap(pull)(_basis(out))
        like = stacks if isinstance(argnums, Sequence) else stacks[0]
        leaves, spec = pytree.flatten(like)
        rows = [pytree.flatten(_columns(x, out, front=True))[0] for x in leaves]
        by_result = [pytree.unflatten(spec, own) for own in zip(*rows, strict=True)]
        return pytree.unflatten(pytree.structure(out), by_result)

    return call


def hessian(f: Callable[..., Any], argnums: int | Sequence[int] = 0) -> Any:
    """A function that gives the second derivatives of `f`: `jacfwd` of `jacrev`.

    Raises:
        ArgumentTypeError, ArgumentValueError, DerivativeError: see `jacfwd`.
    """
    return jacfwd(jacrev(f, argnums), argnums)


def _require_floats(name: str, out: Any) -> None:
    """Raises: DerivativeError: a result is no float."""
    leaves, spec = pytree.flatten(out)
    for leaf, path in zip(leaves, pytree.leaf_paths(spec, "result"), strict=True):
        if not is_differentiable(leaf.type):
            raise DerivativeError(
                f"{name}: `{path}` is {leaf.type}, which has no derivative."
            )
