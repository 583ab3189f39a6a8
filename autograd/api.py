"""`jvp`, `vjp`, `linearize`, `grad` and what follows from them."""

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
    """The arguments that a function is differentiated in, flattened."""

    values: list[Value]
    spec: Spec
    texts: list[str]


def _primals(
    name: str,
    f: Callable[..., Any],
    args: tuple[Any, ...],
    names: Sequence[str] | None = None,
) -> Primals:
    """
    Args:
        names: Of the parameters; None: those of `f`, which is called with just these.

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
    """What a function did on a tape: its results, and their tangents."""

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
    given: Sequence[Tangent],
    linear: LinearTracer | None,
    *,
    has_aux: bool,
) -> _Run:
    parent = current()
    tape = Tape(parent, name_of(f), linear)
    pairs = zip(primals.values, given, primals.texts, strict=True)
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
    found = [tape.current(o) for o in outputs]
    with using(tape.parent):
        aux = pytree.tree_map(tape.outside, opened(aux, tape))
    values = [as_value(v) for v, _ in found]
    return _Run(tape, values, [t for _, t in found], spec, aux)


def result_leaf(
    name: str, f: Callable[..., Any], spec: Spec, i: int, leaf: Any
) -> Operand:
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
    """`f(*primals)`, and its derivative in the direction of `tangents`.

    Args:
        f: A function of pytrees of tensors.
        primals: Its arguments, as a tuple or list.
        tangents: As many, of the same structure, shapes and dtypes. Of what is no float
            the tangent is not looked at; None will do.
        has_aux: Whether `f` returns a pair, of which only the first is differentiated.

    Returns:
        (result, tangent of the result), and aux.

    Raises:
        ArgumentTypeError: `f` is no function, or a leaf is no tensor.
        StructureError, ShapeError, DTypeError: the tangents are not like the primals.
        DerivativeError: an operation has no derivative.
    """
    as_flag("jvp", "has_aux", has_aux)
    for argument, value in (("primals", primals), ("tangents", tangents)):
        if not isinstance(value, tuple | list):
            raise ArgumentTypeError(
                f"jvp: `{argument}` must be a tuple or a list, and is "
                f"`{type(value).__name__}`."
            )
    known = _primals("jvp", f, tuple(primals))
    given = like("jvp", "tangents", tuple(tangents), known.values, known.spec)
    run = _run("jvp", f, known, given, None, has_aux=has_aux)
    run.tape.write_back()
    out = pytree.unflatten(run.spec, run.values)
    tangent = pytree.unflatten(run.spec, [instantiate(t) for t in run.tangents])
    return (out, tangent, run.aux) if has_aux else (out, tangent)


def _sized(name: str, tangent: Value, wanted: TensorType) -> Any:
    """A tangent, whose sizes a run compares where only that can."""
    for axis, size in enumerate(wanted.shape if tangent.ndim == wanted.ndim else ()):
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
    """A user's tangents or cotangents, one for each of `values`.

    Raises:
        StructureError, ShapeError, DTypeError: they are not like those.
    """
    try:
        leaves = spec.flatten_up_to(tree)
        same = all(x is None or pytree.is_leaf(pytree.structure(x)) for x in leaves)
    except (ValueError, TypeError):
        same = False
    if not same:
        raise StructureError(
            f"{name}: `{argument}` must have the structure {spec}, and has "
            f"{pytree.structure(tree)}. Give a leaf for each, None for zero."
        )
    result: list[Tangent] = []
    paths = pytree.leaf_paths(spec, argument)
    for leaf, path, value in zip(leaves, paths, values, strict=True):
        if not is_differentiable(value.type) or leaf is None:
            result.append(Zero(value.type))
            continue
        tangent = as_value(as_operand(name, path, leaf))
        wanted = value.type
        tangent = _sized(f"{name}: `{path}`", tangent, wanted)
        found = tangent.type
        error: type[HopflowError]
        is_alike = found.ndim == wanted.ndim
        if not (is_alike and all(map(equals, found.shape, wanted.shape))):
            error, remedy = ShapeError, "Reshape or broadcast it."
        elif found.dtype is not wanted.dtype and not found.weak:
            error, remedy = DTypeError, "Convert it with `hf.astype`."
        else:
            result.append(tangent.astype(wanted.dtype))
            continue
        raise error(
            f"{name}: `{path}` must be {wanted}, as what it belongs to, and is "
            f"{found}. {remedy}"
        )
    return result


# --- reverse --------------------------------------------------------------------------


class Linear:
    """The derivative of a function at a point: a linear graph, and its residuals.

    Args:
        pushed: Whether tangents are to be pushed through it; else it is only pulled.
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
        given = [
            Zero(v.type) if t is None else t
            for t, v in zip(self.operands, primals.values, strict=True)
        ]
        self.run = _run(name, f, primals, given, tracer, has_aux=has_aux)
        self.places = [
            k for k, t in enumerate(self.run.tangents) if not isinstance(t, Zero)
        ]
        outputs = [self.run.tangents[k] for k in self.places]
        self.graph = tracer.close(outputs)  # type: ignore[arg-type]
        tape = self.run.tape
        written = [c.origin for c in tape.written()]
        self.residuals: dict[Var, Any] = {
            c.input: _as_it_is(c.origin, parent, written)
            for c in tracer.captures.values()
        }
        held = [n.params["known"] for n in self.graph.nodes if type(n.op) is Recorded]
        if written:
            for known in held:
                known[:] = [_as_it_is(o, parent, written) for o in known]
        tape.write_back()
        for var in self.graph.symbols:
            assert var.node.symbol is not None
            self.residuals[var] = parent.value_of(size_of(var.node.symbol))
        self.versions = [
            (o, _writes(o))
            for o in chain(self.residuals.values(), *held)
            if isinstance(o, EagerTensor)
        ]

    def check_residuals(self) -> None:
        """Raises: MutationError: a tensor that is needed has been written since."""
        for tensor, version in self.versions:
            if _writes(tensor) != version:
                raise MutationError(
                    f"{self.name}: a tensor {tensor.type} that the derivative needs "
                    "has been written since the function ran. Write to a copy of it."
                )

    def value(self, arg: Arg) -> Operand:
        return arg if isinstance(arg, Constant) else self.residuals[arg]

    @deep_recursion()
    def pull(self, given: Sequence[Tangent]) -> list[Tangent]:
        """The cotangents of the arguments from those of the results."""
        self.check_residuals()
        linear = [t.source for t in self.operands if t is not None]
        found = iter(
            transpose(self.graph, linear, self.value, [given[k] for k in self.places])
        )
        return [
            Zero(v.type) if t is None else next(found)
            for t, v in zip(self.operands, self.primals.values, strict=True)
        ]

    @deep_recursion()
    def push(self, given: Sequence[Tangent]) -> list[Tangent]:
        """The tangents of the results from those of the arguments."""
        self.check_residuals()
        env: dict[Var, Any] = dict(self.residuals)
        for tensor, tangent in zip(self.operands, given, strict=True):
            if tensor is not None:
                env[tensor.source] = instantiate(tangent)
        for node in self.graph.nodes:
            args = [a if isinstance(a, Constant) else env[a] for a in node.args]
            with replaying(node):
                if type(node.op) is Recorded:
                    pushed: Sequence[Value] = node.op.push(args, **node.params)
                else:
                    pushed = bind(node.op, args, node.params)
            env.update(zip(node.results, pushed, strict=True))
        result: list[Tangent] = [Zero(v.type) for v in self.run.values]
        for k, output in zip(self.places, self.graph.outputs, strict=True):
            result[k] = (
                as_value(output) if isinstance(output, Constant) else env[output]
            )
        return result


def _as_it_is(value: Any, tracer: Any, written: Sequence[Value]) -> Any:
    """What a tensor holds now, which later writes in a trace, and those to the
    `written` ones, do not change."""
    if isinstance(value, TracedTensor):
        return TracedTensor(tracer, tracer.read(tracer.localize(value)))
    shared = any(isinstance(w, EagerTensor) and value.overlaps(w) for w in written)
    return value.copy() if shared else value


def _writes(tensor: EagerTensor) -> int:
    """How often a tensor has been written; one without a storage never was."""
    return 0 if tensor._storage is None else tensor._storage.version


def vjp(f: Callable[..., Any], *primals: Any, has_aux: bool = False) -> Any:
    """`f(*primals)`, and a function from a cotangent of the result to those of the
    arguments.

    Args:
        f: A function of pytrees of tensors.
        primals: Its arguments.
        has_aux: Whether `f` returns a pair, of which only the first is differentiated.

    Returns:
        (result, pullback), and aux. `pullback(ct)` gives a tuple with the structure of
        `primals`; of what is no float it gives zeros.

    Raises:
        ArgumentTypeError: `f` is no function, or a leaf is no tensor.
        DerivativeError: an operation has no derivative.
    """
    as_flag("vjp", "has_aux", has_aux)
    linear = Linear("vjp", f, _primals("vjp", f, primals), has_aux=has_aux)
    run = linear.run

    @entry
    def pullback(cotangent: Any) -> Any:
        given = like("vjp", "cotangent", cotangent, run.values, run.spec)
        found = linear.pull(given)
        return pytree.unflatten(linear.primals.spec, map(instantiate, found))

    out = pytree.unflatten(run.spec, run.values)
    return (out, pullback, run.aux) if has_aux else (out, pullback)


def linearize(f: Callable[..., Any], *primals: Any) -> Any:
    """`f(*primals)`, and its derivative there: a function from tangents of the
    arguments to the tangent of the result.

    Raises:
        ArgumentTypeError: `f` is no function, or a leaf is no tensor.
        DerivativeError: an operation has no derivative.
    """
    linear = Linear("linearize", f, _primals("linearize", f, primals), pushed=True)
    run = linear.run

    @entry
    def pushforward(*tangents: Any) -> Any:
        known = linear.primals
        given = like("linearize", "tangents", tangents, known.values, known.spec)
        return pytree.unflatten(run.spec, map(instantiate, linear.push(given)))

    return pytree.unflatten(run.spec, run.values), pushforward


def value_and_grad(
    f: Callable[..., Any],
    argnums: int | Sequence[int] = 0,
    *,
    has_aux: bool = False,
) -> Callable[..., Any]:
    """A function that gives what `f` does, and its gradient.

    Args:
        f: Returns a scalar of a float dtype.
        argnums: Which positional arguments to differentiate in; the gradient is a tuple
            if it is a sequence.
        has_aux: Whether `f` returns a pair (scalar, aux).

    Raises:
        ArgumentTypeError: `f` is no function, or `argnums` no int.
        ArgumentValueError: there is no such argument (at a call).
        DerivativeError: `f` returns no float scalar, or an argument has integers.
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
        one = as_value(as_operand("grad", 0, 1.0)).astype(value.type.dtype)
        found = pytree.unflatten(primals.spec, map(instantiate, linear.pull([one])))
        result = pytree.unflatten(run.spec, run.values)
        gradient = found[0] if single else found
        return ((result, run.aux) if has_aux else result), gradient

    options = {"argnums": argnums, "has_aux": has_aux}
    return recordable(call, made=("value_and_grad", f, options))


def _scalar(f: Callable[..., Any], run: _Run) -> Value:
    """The one result of a function whose gradient is asked for.

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
    """
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
    """`f` as a function of the positional arguments of these numbers, and those.

    Raises:
        ArgumentValueError: there is no such argument, or one is named twice.
        DerivativeError: one has integers.
    """
    places = [_place(name, n, len(args)) for n in numbers]
    if len(set(places)) < len(places):
        raise ArgumentValueError(
            f"{name}: `argnums` must name each argument once, and is {tuple(numbers)}."
        )

    @functools.wraps(f)
    def partial(*given: Any) -> Any:
        full = list(args)
        for place, value in zip(places, given, strict=True):
            full[place] = value
        return f(*full, **kwargs)

    parameters = parameter_names(f, len(args))
    names = [parameters[p] for p in places]
    primals = _primals(name, partial, tuple(args[p] for p in places), names)
    for value, text in zip(primals.values, primals.texts, strict=True):
        if not is_differentiable(value.type):
            raise DerivativeError(
                f"{name}: `{text}` is {value.type}, and only floats have gradients. "
                "Convert it, or leave it out of `argnums`."
            )
    return partial, primals


def _place(name: str, n: int, count: int) -> int:
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
    """A function that gives the gradient of `f`; see `value_and_grad`.

    With `has_aux` it gives (gradient, aux).
    """
    both = value_and_grad(f, argnums, has_aux=has_aux)

    @functools.wraps(f)
    def call(*args: Any, **kwargs: Any) -> Any:
        value, gradient = both(*args, **kwargs)
        return (gradient, value[1]) if has_aux else gradient

    options = {"argnums": argnums, "has_aux": has_aux}
    return recordable(call, made=("grad", f, options))
