"""`jvp`, `vjp`, `linearize`, `value_and_grad` and `grad`."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from hopflow import pytree
from hopflow.autograd.linearize import LinearTracer
from hopflow.autograd.rule_cache import Recorded
from hopflow.autograd.rules import is_differentiable
from hopflow.autograd.tape import Tape
from hopflow.autograd.transpose import transpose
from hopflow.bind import Operand, Value, bind, current, recordable, using
from hopflow.entries import entry
from hopflow.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    DerivativeError,
    DTypeError,
    HopflowError,
    MutationError,
    ResultTypeError,
    ShapeError,
    StructureError,
)
from hopflow.graph.core import Arg, Constant, Var, size_of
from hopflow.graph.origin import replaying
from hopflow.graph.types import TensorType
from hopflow.ops.convert import as_value
from hopflow.ops.deferred import resized
from hopflow.ops.opdef import as_default, as_operand
from hopflow.ops.rules import as_flag, as_integer
from hopflow.ops.sizes import equals, is_unbacked
from hopflow.pytree import Spec
from hopflow.recursion import deep_recursion
from hopflow.tensor import EagerTensor
from hopflow.trace.functional import TracedTensor
from hopflow.trace.source import (
    argument_texts,
    check_arity,
    name_of,
    parameter_names,
)
from hopflow.trace.tensor_types import opened
from hopflow.trace.tracer import trace_into
from hopflow.zeros import Tangent, Unknown, Zero, instantiate


@dataclass(slots=True)
class Primals:
    """The arguments in which a function is differentiated, flattened.

    texts   each leaf as a user would write it, for messages
    """

    values: list[Value]
    spec: Spec
    texts: list[str]


def _primals(
    name: str,
    f: Callable[..., Any],
    args: tuple[Any, ...],
    names: Sequence[str] | None = None,
) -> Primals:
    """Flatten the primals into tensors.

    Args:
        names: Those of the parameters; None for those of `f`, if it takes just `args`.

    Raises:
        ArgumentTypeError: `f` is no function, or a leaf is neither tensor nor number.
    """
    if not callable(f):
        raise ArgumentTypeError(
            f"{name}: `f` must be a function, and is `{type(f).__name__}`."
        )
    if names is None:
        check_arity(name, f, args)
        names = parameter_names(f, len(args))
    leaves, spec = pytree.flatten(args)
    texts = argument_texts(names, spec.children())
    values = []
    for leaf, text in zip(leaves, texts, strict=True):
        operand = as_operand(name, text, leaf)
        values.append(as_value(as_default(operand, weak=True)))
    return Primals(values, spec, texts)


@dataclass(slots=True)
class _Run:
    """The outcome of running a function on a tape: its results and their tangents."""

    tape: Tape
    values: list[Value]
    tangents: list[Tangent]
    spec: Spec
    aux: Any


@deep_recursion()
def _run(
    name: str,
    f: Callable[..., Any],
    primals: Primals,
    tangents: Sequence[Tangent],
    linear: LinearTracer | None,
    *,
    has_aux: bool,
) -> _Run:
    parent = current()
    tape = Tape(parent, name_of(f), linear)
    pairs = zip(primals.values, tangents, primals.texts, strict=True)
    inputs = [tape.given(v, t, text) for v, t, text in pairs]

    def run() -> tuple[list[Operand], Spec, Any]:
        tree = f(*pytree.unflatten(primals.spec, inputs))
        aux = None
        if has_aux:
            if not (isinstance(tree, tuple) and len(tree) == 2):
                raise ResultTypeError(
                    f"{name}: with `has_aux`, `{name_of(f)}` must return a pair "
                    f"(result, aux), and returns {pytree.structure(tree)}."
                )
            tree, aux = tree
        leaves, spec = pytree.flatten(opened(tree, tape))
        return (
            [result_leaf(name, f, spec, i, x) for i, x in enumerate(leaves)],
            spec,
            aux,
        )

    outputs, spec, aux = trace_into(tape, run, ())
    duals = [tape.current(o) for o in outputs]
    with using(tape.parent):
        aux = pytree.tree_map(tape.outside, opened(aux, tape))
    values = [as_value(v) for v, _ in duals]
    return _Run(tape, values, [t for _, t in duals], spec, aux)


def result_leaf(
    name: str, f: Callable[..., Any], spec: Spec, i: int, leaf: Any
) -> Operand:
    """Return leaf `i` of the result of `f` as an operand.

    Raises:
        ResultTypeError: it is neither tensor nor number.
    """
    try:
        return as_default(as_operand(name, i, leaf), weak=True)
    except ArgumentTypeError:
        path = pytree.leaf_paths(spec, "result")[i]
        raise ResultTypeError(
            f"{name}: `{name_of(f)}` must return tensors or numbers, and its `{path}` "
            f"is `{type(leaf).__name__}`. Return other data with `has_aux`."
        ) from None


# --- forward --------------------------------------------------------------------------


def jvp(
    f: Callable[..., Any],
    primals: Sequence[Any],
    tangents: Sequence[Any],
    *,
    has_aux: bool = False,
) -> Any:
    """Return `f(*primals)` and its directional derivative along `tangents`.

    Args:
        f: A function of pytrees of tensors. It may read tensors of enclosing functions,
            which are constants.
        primals: The arguments of `f`, as a tuple or list.
        tangents: A tuple or list of the structure of `primals`, with tensors of the
            same shapes and dtypes. None stands for zero; tangents of leaves that are no
            floats are ignored.
        has_aux: Whether `f` returns a pair (result, aux), of which only the result is
            differentiated.

    Returns:
        (result, tangent of the result), or with `has_aux` (result, tangent, aux). The
        tangent has the structure, shapes and dtypes of the result.

    Raises:
        ArgumentTypeError: `f` is no function, or a leaf is neither tensor nor number.
        StructureError, ShapeError, DTypeError: `tangents` do not fit `primals`.
        ResultTypeError: `f` returns what is neither tensor nor number.
        DerivativeError: an operation has no derivative.

    >>> hf.jvp(hf.square, (3.0,), (1.0,))
    (Tensor(9., f32[]), Tensor(6., f32[]))
    """
    as_flag("jvp", "has_aux", has_aux)
    for argument, value in (("primals", primals), ("tangents", tangents)):
        if not isinstance(value, tuple | list):
            raise ArgumentTypeError(
                f"jvp: `{argument}` must be a tuple or a list, and is "
                f"`{type(value).__name__}`."
            )
    flat_primals = _primals("jvp", f, tuple(primals))
    flat_tangents = like(
        "jvp", "tangents", tuple(tangents), flat_primals.values, flat_primals.spec
    )
    run = _run("jvp", f, flat_primals, flat_tangents, None, has_aux=has_aux)
    run.tape.write_back()
    out = pytree.unflatten(run.spec, run.values)
    tangent = pytree.unflatten(run.spec, [instantiate(t) for t in run.tangents])
    return (out, tangent, run.aux) if has_aux else (out, tangent)


def _sized(name: str, tangent: Value, type_: TensorType) -> Any:
    """Return a tangent with the sizes of `type_`. A size that only the run knows is
    compared in the run."""
    for axis, size in enumerate(type_.shape if tangent.ndim == type_.ndim else ()):
        if is_unbacked(size) or is_unbacked(tangent.shape[axis]):
            tangent = resized(name, tangent, axis, size)
    return tangent


def like(
    name: str,
    argument: str,
    tree: Any,
    values: Sequence[Value | Unknown],
    spec: Spec,
) -> list[Tangent]:
    """Return a user's tangents or cotangents as a list, one for each of `values`.

    Raises:
        StructureError, ShapeError, DTypeError: they do not fit `values`.
    """
    try:
        leaves = spec.flatten_up_to(tree)
        fits = all(x is None or pytree.is_leaf(pytree.structure(x)) for x in leaves)
    except (ValueError, TypeError):
        fits = False
    if not fits:
        raise StructureError(
            f"{name}: `{argument}` must have the structure {spec}, and has "
            f"{pytree.structure(tree)}. Give a leaf for each, None for zero."
        )
    tangents: list[Tangent] = []
    paths = pytree.leaf_paths(spec, argument)
    for leaf, path, value in zip(leaves, paths, values, strict=True):
        if not is_differentiable(value.type) or leaf is None:
            tangents.append(Zero(value.type))
            continue
        tangent = as_value(as_operand(name, path, leaf))
        expected = value.type
        tangent = _sized(f"{name}: `{path}`", tangent, expected)
        actual = tangent.type
        error: type[HopflowError]
        same_rank = actual.ndim == expected.ndim
        if not (same_rank and all(map(equals, actual.shape, expected.shape))):
            error, remedy = ShapeError, "Reshape or broadcast it."
        elif actual.dtype is not expected.dtype and not actual.weak:
            error, remedy = DTypeError, "Convert it with `hf.astype`."
        else:
            tangents.append(tangent.astype(expected.dtype))
            continue
        raise error(
            f"{name}: `{path}` must be {expected}, as what it belongs to, and is "
            f"{actual}. {remedy}"
        )
    return tangents


# --- reverse --------------------------------------------------------------------------


class Linear:
    """The derivative of a function at a point: a linear graph, and its residuals.

    Args:
        pushed: Whether tangents will be pushed through it. If not, it is only
            transposed.
    """

    def __init__(
        self,
        name: str,
        f: Callable[..., Any],
        primals: Primals,
        *,
        has_aux: bool = False,
        pushed: bool = False,
    ) -> None:
        self.name = name
        self.primals = primals
        parent = current()
        tracer = LinearTracer(
            None if parent.is_eager else parent, "linear", pushed=pushed
        )
        self.operands = [
            tracer.operand(v.type, "t") if is_differentiable(v.type) else None
            for v in primals.values
        ]
        tangents = [
            Zero(v.type) if t is None else t
            for t, v in zip(self.operands, primals.values, strict=True)
        ]
        self.run = _run(name, f, primals, tangents, tracer, has_aux=has_aux)
        self.positions = [
            k for k, t in enumerate(self.run.tangents) if not isinstance(t, Zero)
        ]
        outputs = [self.run.tangents[k] for k in self.positions]
        self.graph = tracer.close(outputs)  # type: ignore[arg-type]
        tape = self.run.tape
        written = [c.origin for c in tape.written()]
        self.residuals: dict[Var, Any] = {
            c.input: _snapshot(c.origin, parent, written)
            for c in tracer.captures.values()
        }
        recorded = [
            n.params["residuals"] for n in self.graph.nodes if type(n.op) is Recorded
        ]
        if written:
            for residuals in recorded:
                residuals[:] = [_snapshot(o, parent, written) for o in residuals]
        tape.write_back()
        for var in self.graph.symbols:
            assert var.node.symbol is not None
            self.residuals[var] = parent.value_of(size_of(var.node.symbol))
        self.versions = [
            (o, _version(o))
            for o in chain(self.residuals.values(), *recorded)
            if isinstance(o, EagerTensor)
        ]

    def check_residuals(self) -> None:
        """Check that no residual has been overwritten.

        Raises:
            MutationError: a residual has been written since the function ran.
        """
        for tensor, version in self.versions:
            if _version(tensor) != version:
                raise MutationError(
                    f"{self.name}: a tensor {tensor.type} that the derivative needs "
                    "has been written since the function ran. Write to a copy of it."
                )

    def value(self, arg: Arg) -> Operand:
        return arg if isinstance(arg, Constant) else self.residuals[arg]

    @deep_recursion()
    def pull(self, cotangents: Sequence[Tangent]) -> list[Tangent]:
        """Return the cotangents of the arguments from those of the results."""
        self.check_residuals()
        linear = [t.source for t in self.operands if t is not None]
        in_cotangents = iter(
            transpose(
                self.graph, linear, self.value, [cotangents[k] for k in self.positions]
            )
        )
        return [
            Zero(v.type) if t is None else next(in_cotangents)
            for t, v in zip(self.operands, self.primals.values, strict=True)
        ]

    @deep_recursion()
    def push(self, tangents: Sequence[Tangent]) -> list[Tangent]:
        """Return the tangents of the results from those of the arguments."""
        self.check_residuals()
        env: dict[Var, Any] = dict(self.residuals)
        for tensor, tangent in zip(self.operands, tangents, strict=True):
            if tensor is not None:
                env[tensor.source] = instantiate(tangent)
        for node in self.graph.nodes:
            args = [a if isinstance(a, Constant) else env[a] for a in node.args]
            with replaying(node):
                if type(node.op) is Recorded:
                    results: Sequence[Value] = node.op.push(args, **node.params)
                else:
                    results = bind(node.op, args, node.params)
            env.update(zip(node.results, results, strict=True))
        out_tangents: list[Tangent] = [Zero(v.type) for v in self.run.values]
        for k, output in zip(self.positions, self.graph.outputs, strict=True):
            out_tangents[k] = (
                as_value(output) if isinstance(output, Constant) else env[output]
            )
        return out_tangents


def _snapshot(value: Any, tracer: Any, written: Sequence[Value]) -> Any:
    """Return what a tensor holds now. Later writes in a trace, and writes to the
    tensors `written`, do not change it."""
    if isinstance(value, TracedTensor):
        return TracedTensor(tracer, tracer.read(tracer.localize(value)))
    shared = any(isinstance(w, EagerTensor) and value.overlaps(w) for w in written)
    return value.copy() if shared else value


def _version(tensor: EagerTensor) -> int:
    """Return how often a tensor has been written: 0 without a storage."""
    return 0 if tensor._storage is None else tensor._storage.version


def vjp(f: Callable[..., Any], *primals: Any, has_aux: bool = False) -> Any:
    """Return `f(*primals)` and its pullback, which maps cotangents of the result to
    cotangents of the arguments.

    Args:
        f: A function of pytrees of tensors. It may read tensors of enclosing functions.
        primals: The arguments of `f`.
        has_aux: Whether `f` returns a pair (result, aux), of which only the result is
            differentiated.

    Returns:
        (result, pullback), or with `has_aux` (result, pullback, aux). The pullback
        takes a cotangent with the structure, shapes and dtypes of the result, where
        None stands for zero. It returns a tuple with the structure, shapes and dtypes
        of `primals`, with zeros for leaves that are no floats. It can be called any
        number of times.

    Raises:
        ArgumentTypeError: `f` is no function, or a leaf is neither tensor nor number.
        ResultTypeError: `f` returns what is neither tensor nor number.
        DerivativeError: an operation has no derivative.
        StructureError, ShapeError, DTypeError: a cotangent does not fit the result (at
            a call of the pullback).
        MutationError: a residual has been written since (at a call of the pullback).

    >>> value, pullback = hf.vjp(hf.multiply, 2.0, 5.0)
    >>> pullback(1.0)
    (Tensor(5., f32[]), Tensor(2., f32[]))
    """
    as_flag("vjp", "has_aux", has_aux)
    linear = Linear("vjp", f, _primals("vjp", f, primals), has_aux=has_aux)
    run = linear.run

    @entry
    def pullback(cotangent: Any) -> Any:
        cotangents = like("vjp", "cotangent", cotangent, run.values, run.spec)
        in_cotangents = linear.pull(cotangents)
        return pytree.unflatten(linear.primals.spec, map(instantiate, in_cotangents))

    out = pytree.unflatten(run.spec, run.values)
    return (out, pullback, run.aux) if has_aux else (out, pullback)


def linearize(f: Callable[..., Any], *primals: Any) -> Any:
    """Return `f(*primals)` and its derivative there as a linear function, which maps
    tangents of the arguments to the tangent of the result.

    `f` runs once; each call of the derivative runs the linear part alone.

    Args:
        f: A function of pytrees of tensors. It may read tensors of enclosing functions.
        primals: The arguments of `f`.

    Returns:
        (result, pushforward). The pushforward takes as many arguments as `f`, of the
        same structures, shapes and dtypes, where None stands for zero. It returns a
        tangent with the structure, shapes and dtypes of the result.

    Raises:
        ArgumentTypeError: `f` is no function, or a leaf is neither tensor nor number.
        ResultTypeError: `f` returns what is neither tensor nor number.
        DerivativeError: an operation has no derivative.
        StructureError, ShapeError, DTypeError: a tangent does not fit its argument (at
            a call of the pushforward).
        MutationError: a residual has been written since (at a call of the pushforward).

    >>> value, pushforward = hf.linearize(hf.square, 3.0)
    >>> pushforward(1.0), pushforward(2.0)
    (Tensor(6., f32[]), Tensor(12., f32[]))
    """
    linear = Linear("linearize", f, _primals("linearize", f, primals), pushed=True)
    run = linear.run

    @entry
    def pushforward(*tangents: Any) -> Any:
        flat_primals = linear.primals
        flat_tangents = like(
            "linearize", "tangents", tangents, flat_primals.values, flat_primals.spec
        )
        return pytree.unflatten(run.spec, map(instantiate, linear.push(flat_tangents)))

    return pytree.unflatten(run.spec, run.values), pushforward


def value_and_grad(
    f: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    *,
    has_aux: bool = False,
) -> Callable[..., Any]:
    """Return a function that computes `f` and its gradient.

    Args:
        f: Takes pytrees of tensors, and returns a scalar of a float dtype.
        argnums: The positional arguments to differentiate in: an int, or a sequence of
            ints, for which the gradient is a tuple. Their leaves must be floats.
        has_aux: Whether `f` returns a pair (scalar, aux), of which only the scalar is
            differentiated.

    Returns:
        A function of the arguments of `f` that returns (result, gradient), where the
        result is all that `f` returns. The gradient has the structure, shapes and
        dtypes of the chosen argument.

    Raises:
        ArgumentTypeError: `f` is no function, or `argnums` no int.
        ArgumentValueError: there is no such argument, or one is named twice (at a
            call).
        DerivativeError: `f` returns no float scalar, an argument has leaves that are no
            floats, or an operation has no derivative (at a call).

    >>> hf.value_and_grad(lambda x: (x * x).sum())(hf.asarray([1.0, 3.0]))
    (Tensor(10., f32[]), Tensor([2., 6.], f32[2]))
    """
    as_flag("value_and_grad", "has_aux", has_aux)
    single = not isinstance(argnums, Sequence)
    numbers = argnums_of("grad", f, argnums)

    @functools.wraps(f)
    def call(*args: Any, **kwargs: Any) -> Any:
        partial, primals = chosen_of("grad", f, numbers, args, kwargs)
        linear = Linear("grad", partial, primals, has_aux=has_aux)
        run = linear.run
        value = _scalar(f, run)
        seed = as_value(as_operand("grad", 0, 1.0)).astype(value.type.dtype)
        gradients = pytree.unflatten(
            primals.spec, map(instantiate, linear.pull([seed]))
        )
        result = pytree.unflatten(run.spec, run.values)
        gradient = gradients[0] if single else gradients
        return ((result, run.aux) if has_aux else result), gradient

    options = {"argnums": argnums, "has_aux": has_aux}
    return recordable(call, transform=("value_and_grad", f, options))


def _scalar(f: Callable[..., Any], run: _Run) -> Value:
    """Return the result of a function whose gradient is computed.

    Raises:
        DerivativeError: it is no scalar, or no float.
    """
    if len(run.values) != 1 or run.values[0].shape != ():
        shown = ", ".join(str(v.type) for v in run.values) or "nothing"
        raise DerivativeError(
            f"grad: `{name_of(f)}` must return one scalar, and returns {shown}. "
            "Reduce it, or use `hf.vjp` or `hf.jacrev`."
        )
    [value] = run.values
    if not is_differentiable(value.type):
        raise DerivativeError(
            f"grad: `{name_of(f)}` returns {value.type}, and only floats have "
            "derivatives. Return one."
        )
    return value


def argnums_of(name: str, f: Any, argnums: Any) -> list[int]:
    """Return `argnums` as a list.

    Raises:
        ArgumentTypeError: `f` is no function, or `argnums` no int.
    """
    if not callable(f):
        raise ArgumentTypeError(
            f"{name}: `f` must be a function, and is `{type(f).__name__}`."
        )
    chosen = argnums if isinstance(argnums, Sequence) else [argnums]
    return [as_integer(name, "argnums", n) for n in chosen]


def chosen_of(
    name: str,
    f: Callable[..., Any],
    numbers: Sequence[int],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Callable[..., Any], Primals]:
    """Return `f` as a function of the positional arguments `numbers` alone, and these.

    Raises:
        ArgumentValueError: there is no such argument, or one is named twice.
        DerivativeError: a leaf is no float.
    """
    positions = [_position(name, n, len(args)) for n in numbers]
    if len(set(positions)) < len(positions):
        raise ArgumentValueError(
            f"{name}: `argnums` must name each argument once, and is {tuple(numbers)}."
        )

    @functools.wraps(f)
    def partial(*chosen: Any) -> Any:
        full = list(args)
        for position, value in zip(positions, chosen, strict=True):
            full[position] = value
        return f(*full, **kwargs)

    parameters = parameter_names(f, len(args))
    names = [parameters[p] for p in positions]
    primals = _primals(name, partial, tuple(args[p] for p in positions), names)
    for value, text in zip(primals.values, primals.texts, strict=True):
        if not is_differentiable(value.type):
            raise DerivativeError(
                f"{name}: `{text}` is {value.type}, and only floats have gradients. "
                "Convert it, or leave it out of `argnums`."
            )
    return partial, primals


def _position(name: str, n: int, count: int) -> int:
    if not -count <= n < count:
        raise ArgumentValueError(
            f"{name}: `argnums` names argument {n}, and {count} were given by "
            "position. Count from 0, and pass by position what is to be differentiated."
        )
    return n % count


def grad(
    f: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    *,
    has_aux: bool = False,
) -> Callable[..., Any]:
    """Return a function that computes the gradient of `f`.

    Args:
        f: Takes pytrees of tensors, and returns a scalar of a float dtype.
        argnums: The positional arguments to differentiate in; see `value_and_grad`.
        has_aux: Whether `f` returns a pair (scalar, aux).

    Returns:
        A function of the arguments of `f` that returns the gradient, or with `has_aux`
        (gradient, aux). The gradient has the structure, shapes and dtypes of the chosen
        argument.

    Raises:
        ArgumentTypeError, ArgumentValueError, DerivativeError: See `value_and_grad`.

    >>> hf.grad(lambda x: (x * x).sum())(hf.asarray([1.0, 3.0]))
    Tensor([2., 6.], f32[2])
    """
    both = value_and_grad(f, argnums, has_aux=has_aux)

    @functools.wraps(f)
    def call(*args: Any, **kwargs: Any) -> Any:
        value, gradient = both(*args, **kwargs)
        return (gradient, value[1]) if has_aux else gradient

    options = {"argnums": argnums, "has_aux": has_aux}
    return recordable(call, transform=("grad", f, options))
