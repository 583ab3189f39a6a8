"""Jacobians and Hessians: `jvp` or `vjp`, batched over the unit vectors."""

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
    """Return a function that computes the Jacobian of `f` by forward mode, a column for
    each element of the arguments.

    Args:
        f: Takes and returns pytrees of float tensors.
        argnums: The positional arguments to differentiate in: an int, or a sequence of
            ints, for which each block is a tuple.

    Returns:
        A function of the arguments of `f`. It returns the structure of the result of
        `f`, where each leaf T[*out] is replaced by a tree with the structure of the
        argument, of blocks T[*out, *in]: element [*o, *i] is the derivative of element
        `o` of the result in element `i` of the argument.

    Raises:
        ArgumentTypeError: `f` is no function, or `argnums` no int.
        ArgumentValueError: there is no such argument, or one is named twice (at a
            call).
        DerivativeError: an operation has no derivative, or an argument or a result is
            no float (at a call).

    >>> hf.jacfwd(lambda x: x * x)(hf.asarray([1.0, 3.0]))
    Tensor([[2., 0.],
            [0., 6.]], f32[2, 2])
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
    """Return a function that computes the Jacobian of `f` by reverse mode, a row for
    each element of the result.

    It is faster than `jacfwd` if the result has fewer elements than the arguments.

    Args:
        f, argnums: See `jacfwd`.

    Returns:
        A function like that of `jacfwd`.

    Raises:
        ArgumentTypeError, ArgumentValueError, DerivativeError: See `jacfwd`.

    >>> hf.jacrev(lambda x: x.sum())(hf.asarray([1.0, 3.0]))
    Tensor([1., 1.], f32[2])
    """

    def rows(linear: Linear) -> list[list[Any]]:
        results = linear.run.values
        stacks = vmap(lambda ts: [*map(instantiate, linear.pull(ts))])(_basis(results))
        parts = [_parts(stack, results) for stack in stacks]
        return [
            [reshaped(block[k], (*r.shape, *block[k].shape[1:])) for block in parts]
            for k, r in enumerate(results)
        ]

    return _jacobian("jacrev", f, argnums, rows, pushed=False)


def hessian(f: Callable[..., Any], argnums: int | Sequence[int] = 0) -> Any:
    """Return a function that computes the second derivatives of `f`: `jacfwd` of
    `jacrev`.

    Args:
        f, argnums: See `jacfwd`.

    Returns:
        A function of the arguments of `f`. Of a scalar function of T[*in] it returns
        T[*in, *in].

    Raises:
        ArgumentTypeError, ArgumentValueError, DerivativeError: See `jacfwd`.

    >>> hf.hessian(lambda x: (x ** 3).sum())(hf.asarray([1.0, 3.0]))
    Tensor([[ 6.,  0.],
            [ 0., 18.]], f32[2, 2])
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
    """Return a function that computes a Jacobian.

    Args:
        blocks: Returns, for each leaf of the result, the block of each leaf of the
            arguments.
        pushed: Whether `blocks` pushes tangents.
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

    return recordable(call, transform=(name, f, {"argnums": argnums}))


def _basis(values: Sequence[Value]) -> list[Any]:
    """Return the unit vectors of the space of such values, stacked along axis 0."""
    starts, count = _starts(values)
    rows = eye(count)
    vectors = []
    for start, value in zip(starts, values, strict=True):
        columns = astype(part(rows, 1, start, value.type.size), value.type.dtype)
        vectors.append(reshaped(columns, (count, *value.shape)))
    return vectors


def _starts(values: Sequence[Value]) -> tuple[list[Size], Size]:
    """Return the offset of each value in the vector of all values, and its length."""
    *starts, count = accumulate([v.type.size for v in values], initial=0)
    return starts, count


def _parts(stack: Value, values: Sequence[Value]) -> list[Any]:
    """Return the rows of a stack along axis 0 that belong to each of `values`."""
    starts, _ = _starts(values)
    pairs = zip(starts, values, strict=True)
    return [part(stack, 0, start, value.type.size) for start, value in pairs]


def _in_shape(column: Any, value: Value, ndim: int) -> Any:
    """Return a stack of columns as a block of shape (*axes of the result,
    *value.shape); the result has `ndim` axes."""
    last = moved(column, 0, ndim)
    return reshaped(last, (*last.shape[:-1], *value.shape))
