"""`jit`: trace a function once for each signature, and run it as native code."""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from threading import RLock
from types import MethodType
from typing import Any, Final, NamedTuple

import numpy as np

from hopflow import pytree
from hopflow.bind import Operand, Value, current, slots
from hopflow.compiler.pipeline import Executable
from hopflow.errors import ArgumentTypeError, ArgumentValueError
from hopflow.graph.core import Constant, Graph
from hopflow.graph.printer import format_graph
from hopflow.graph.types import TensorType
from hopflow.hops.base import debugging
from hopflow.hops.bodies import Function, flatten_results, written_captures
from hopflow.hops.invoke_subgraph import invoke_subgraph
from hopflow.ops.rules import as_integer
from hopflow.pytree import Spec
from hopflow.stats import counts
from hopflow.tensor import EagerTensor
from hopflow.tensor.rows import place_in, row_of
from hopflow.trace.functional import TracedTensor, escaped
from hopflow.trace.source import name_of
from hopflow.trace.tracer import Tracer, is_written, trace_into

__all__ = ["Jitted", "jit"]


class _Static(NamedTuple):
    """A value in a signature; `1`, `1.0` and `True` are told apart."""

    kind: type
    value: Any


@dataclass(slots=True)
class _Compiled:
    """What one signature was compiled to.

    captured    tensors from outside the function, passed after the arguments
    rows        by position of a captured tensor: it is the row of all the elements that
                this argument is a part of, and so another one in each call
    written     which inputs get new values: positions among arguments and captured
    spec        of the result; `constants` are the leaves that are Python numbers
    variants    the same for calls in which tensors share memory, by how they do; only
                where something is written
    """

    executable: Executable
    captured: list[EagerTensor]
    written: list[int]
    spec: Spec
    constants: dict[int, Any]
    rows: dict[int, int] = field(default_factory=dict)
    variants: dict[tuple[Any, ...], "_Compiled"] = field(default_factory=dict)
    is_single: bool = field(init=False)

    def __post_init__(self) -> None:
        self.is_single = pytree.is_leaf(self.spec)

    def check(self, tensors: Sequence[EagerTensor]) -> None:
        """Check that a run can begin.

        Raises:
            InvalidTensorError: a tensor must not be used any more.
            ReadOnlyError: one that is written must not be.
        """
        given = self.inputs(tensors)
        for tensor in given:
            tensor.check_valid()
        for k in self.written:
            given[k].check_writable()

    def inputs(self, tensors: Sequence[EagerTensor]) -> list[EagerTensor]:
        """What the program takes for these arguments."""
        found = [*tensors, *self.captured]
        for at, argument in self.rows.items():
            row = row_of([tensors[argument]])
            assert row is not None
            found[len(tensors) + at] = row
        return found

    def __call__(self, tensors: list[EagerTensor]) -> Any:
        if self.captured:
            tensors = self.inputs(tensors)
        for k in self.written:
            tensors[k].check_writable()
        results: list[Any] = self.executable(tensors)
        if self.written:
            first = len(results) - len(self.written)
            _write([tensors[k] for k in self.written], results[first:])
            del results[first:]
        for k, number in self.constants.items():
            results.insert(k, number)
        return results[0] if self.is_single else pytree.unflatten(self.spec, results)


def _write(targets: Sequence[EagerTensor], values: Sequence[Value]) -> None:
    """Write all `values`; what an interrupt leaves half-written becomes invalid."""
    try:
        for target, value in zip(targets, values, strict=True):
            current().write(target, value)
    except BaseException:
        for target in targets:
            target.storage.invalid = "left half-written by a call that was interrupted"
        raise


class Jitted:
    """A function that is traced and compiled for each signature of its arguments.

    The signature is the arguments' structure, with the order of keys, the types of
    tensors, and the values of everything else. Tensors that the function reads from
    outside are passed on each call, so that later writes to them are seen.
    """

    def __init__(self, f: Callable[..., Any], donate: tuple[int, ...]) -> None:
        functools.update_wrapper(self, f)
        self._f = f
        self._donate = donate
        self._lock = RLock()
        self._compiled: dict[Any, _Compiled] = {}
        self._plain: dict[tuple[int, ...], _Compiled] = {}
        self._plain_types: list[tuple[TensorType, ...]] = []
        self._last: _Compiled | None = None

    def __repr__(self) -> str:
        return f"<jitted {name_of(self._f)}>"

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        # A bound method hands on attributes: `model.step.graph`.
        return self if instance is None else MethodType(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not current().is_eager:
            return self._inline(args, kwargs)
        if debugging():
            return self._f(*args, **kwargs)
        if not kwargs:  # the common case, told by the identity of types
            known = self._plain.get(tuple([id(getattr(a, "type", a)) for a in args]))
            if known is not None and all(type(a) is EagerTensor for a in args):
                return self._run(known, list(args), args, kwargs)
        leaves, spec = pytree.flatten((args, kwargs))
        tensors = [
            slots.from_array(x) if isinstance(x, np.ndarray | np.generic) else x
            for x in leaves
            if _is_data(x)
        ]
        signature = self._signature(leaves, tensors, spec, (args, kwargs))
        try:
            compiled = self._compiled.get(signature)
        except TypeError:
            raise _unhashable(self._f, leaves, spec) from None
        if compiled is None:
            with self._lock:  # what several threads ask for at once is compiled once
                compiled = self._compiled.get(signature)
                if compiled is None:
                    compiled = self._compile(leaves, spec)
                    self._compiled[signature] = compiled
        if (
            not kwargs
            and len(tensors) == len(args)
            and all(a is t for a, t in zip(args, tensors, strict=True))
        ):
            types = tuple([t.type for t in tensors])
            self._plain_types.append(types)  # alive, so that no other gets their ids
            self._plain[tuple(map(id, types))] = compiled
        return self._run(compiled, tensors, args, kwargs)

    def _signature(
        self, leaves: Sequence[Any], tensors: Sequence[Any], spec: Spec, tree: Any
    ) -> tuple[Any, ...]:
        """What a trace is good for, as the key of a dictionary.

        Raises:
            EscapedValueError: one is a tensor of a trace.
        """
        key: list[Any] = [spec, *_key_orders(tree)]
        rest = iter(tensors)
        for leaf in leaves:
            if _is_data(leaf):
                tensor = next(rest)
                if not isinstance(tensor, EagerTensor):
                    raise escaped(tensor, "its trace has ended, or is another thread's")
                key += [tensor.type, tensor.type.weak]
            else:
                key.append(_static(leaf))
        return tuple(key)

    def _run(
        self,
        compiled: _Compiled,
        tensors: list[Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        if compiled.written:
            compiled = self._told_apart(compiled, tensors, args, kwargs)
        self._last = compiled
        if not self._donate:
            return compiled(tensors)
        donated = [x for x in self._donated(args) if isinstance(x, EagerTensor)]
        compiled.check(tensors)
        try:
            return compiled(tensors)
        finally:  # an error, too, may come when they have been written over
            for tensor in donated:
                tensor.storage.invalid = "donated"
                tensor.array = _GONE

    def _told_apart(
        self,
        compiled: _Compiled,
        tensors: list[Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> _Compiled:
        """What to call where a tensor that is written may share memory with another.

        Raises:
            MutationError: it does, and they cannot be views of one tensor.
        """
        given = [*tensors, *compiled.captured]
        if not _overlap(given, compiled.written):
            return compiled
        sharing = _sharing(given)
        variant = compiled.variants.get(sharing)
        if variant is None:
            with self._lock:
                leaves, spec = pytree.flatten((args, kwargs))
                variant = self._compile(leaves, spec, tensors)
                compiled.variants[sharing] = variant
        return variant

    def _compile(
        self,
        leaves: Sequence[Any],
        spec: Spec,
        tensors: Sequence[EagerTensor] | None = None,
    ) -> _Compiled:
        """Trace the function for these arguments, and compile its graph.

        Args:
            tensors: The arguments themselves, if it matters what memory they share.
        """
        counts.traces += 1
        tracer = Tracer(None, name_of(self._f).strip("<>") or "f")
        inputs: list[Any] = []
        for leaf, path in zip(leaves, pytree.leaf_paths(spec, "args"), strict=True):
            if not _is_data(leaf):
                inputs.append(leaf)
            elif tensors is not None:
                same = tensors[len(tracer.operands)]
                inputs.append(tracer.reference(same, _name(path)))
            else:
                array = isinstance(leaf, np.ndarray | np.generic)
                type_ = slots.from_array(leaf).type if array else leaf.type
                inputs.append(tracer.operand(type_, _name(path)))

        def call(*flat: Any) -> Any:
            args, kwargs = pytree.unflatten(spec, flat)
            return self._f(*args, **kwargs)

        tree = trace_into(tracer, call, inputs)
        operands, out_spec, constants = self._results(tree)
        captures = tracer.captures.values()
        own = [*tracer.operands, *(c.tensor for c in captures)]
        # What the function itself made of numbers is as new in each call.
        lasting = written_captures(tracer).values()
        private = {id(c.tensor) for c in captures if not any(c is w for w in lasting)}
        written = [
            k
            for k, t in enumerate(own)
            if is_written(t) and id(t) not in private and _first(own, t) == k
        ]
        outputs = [
            *operands,
            *(TracedTensor(tracer, tracer.read(own[k])) for k in written),
        ]
        graph = tracer.close(outputs)
        captured = [c.origin for c in captures if isinstance(c.origin, EagerTensor)]
        rows = _rows(captured, tensors or ())
        executable = Executable(graph, self._donated_inputs(leaves, spec))
        return _Compiled(executable, captured, written, out_spec, constants, rows)

    def _results(self, tree: Any) -> tuple[list[Operand], Spec, dict[int, Any]]:
        """The tensors that the function returned, the structure of all, and by their
        place among the leaves those that are Python numbers."""
        function = Function("f", self._f, (), self._f)
        operands, spec = flatten_results("jit", function, tree)
        numbers = pytree.flatten(tree)[0]
        constants = {
            k: numbers[k] for k, o in enumerate(operands) if isinstance(o, Constant)
        }
        return [o for o in operands if not isinstance(o, Constant)], spec, constants

    def _inline(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call within a trace: a node of it, of which only tensors are operands."""
        leaves, spec = pytree.flatten((args, kwargs))
        found: list[tuple[Spec, dict[int, Any]]] = []

        @functools.wraps(self._f)
        def body(*tensors: Any) -> Any:
            rest = iter(tensors)
            flat = [next(rest) if _is_data(x) else x for x in leaves]
            own_args, own_kwargs = pytree.unflatten(spec, flat)
            tree = self._f(*own_args, **own_kwargs)
            operands, own_spec, own_constants = self._results(tree)
            found.append((own_spec, own_constants))
            return tuple(operands)

        results = list(invoke_subgraph(body, *filter(_is_data, leaves)))
        [(out_spec, constants)] = found
        for k, number in constants.items():
            results.insert(k, number)
        return pytree.unflatten(out_spec, results)

    def _donated_inputs(self, leaves: Sequence[Any], spec: Spec) -> list[int]:
        """Which of the graph's inputs a call gives up."""
        args, _ = pytree.unflatten(spec, range(len(leaves)))
        donated = self._donated(args)
        data = [n for n, leaf in enumerate(leaves) if _is_data(leaf)]
        return [k for k, n in enumerate(data) if n in donated]

    def _donated(self, args: tuple[Any, ...]) -> list[Any]:
        """The leaves of the arguments that a call gives up.

        Raises:
            ArgumentValueError: there is no such argument.
        """
        donated: list[Any] = []
        for position in self._donate:
            if position >= len(args):
                raise ArgumentValueError(
                    f"jit: `donate` names argument {position} of `{name_of(self._f)}`, "
                    f"and {len(args)} were given by position."
                )
            donated += pytree.flatten(args[position])[0]
        return donated

    # --- to look at: of the signature that was called last ---

    @property
    def _latest(self) -> Executable:
        if self._last is None:
            raise ArgumentValueError(
                f"{self!r} has not been compiled yet: call it once with arguments."
            )
        return self._last.executable

    @property
    def graph(self) -> Graph:
        """The captured graph."""
        return self._latest.graph

    @property
    def graph_text(self) -> str:
        return format_graph(self.graph)

    @property
    def loop_ir(self) -> str:
        """The scheduled program, as text."""
        return self._latest.loop_ir

    @property
    def llvm_ir(self) -> str:
        """The LLVM IR, before LLVM's own passes."""
        return self._latest.kernel.llvm_ir

    @property
    def asm(self) -> str:
        """The machine code, as assembly."""
        return self._latest.kernel.asm


def _is_data(leaf: Any) -> bool:
    return isinstance(leaf, Value | np.ndarray | np.generic)


def _static(leaf: Any) -> _Static:
    """A leaf that is no tensor, in a signature."""
    # Not all floats that are equal are the same (0.0 and -0.0), nor is a NaN to itself.
    return _Static(type(leaf), leaf.hex() if type(leaf) is float else leaf)


def _key_orders(tree: Any) -> list[tuple[Any, ...]]:
    """The keys of each dict in a tree, in order, which structures leave out."""
    kind = type(tree)
    if kind is EagerTensor or tree is None or kind in _SIMPLE:
        return []
    if isinstance(tree, dict):
        found = [tuple(tree)]
        parts: Iterable[Any] = tree.values()
    elif isinstance(tree, tuple | list):
        found, parts = [], tree
    else:
        spec = pytree.structure(tree)
        if pytree.is_leaf(spec):
            return []
        one = spec.one_level()
        found, parts = [], one.flatten_up_to(tree) if one is not None else ()
    for part in parts:
        found += _key_orders(part)
    return found


_GONE: Final = np.empty(0)
"""What a donated tensor holds: its own memory is the result's, or free."""
_SIMPLE: Final = frozenset((bool, int, float, str, np.ndarray))


def _first(tensors: Sequence[Any], wanted: Any) -> int:
    return next(k for k, t in enumerate(tensors) if t is wanted)


def _overlap(tensors: Sequence[EagerTensor], written: Sequence[int]) -> bool:
    """Whether a tensor that is written shares memory with another one."""
    return any(
        np.may_share_memory(tensors[k].array, other.array)
        for k in written
        for j, other in enumerate(tensors)
        if j != k
    )


def _sharing(tensors: Sequence[EagerTensor]) -> tuple[Any, ...]:
    """For each tensor which it is first given as, and where it is in the memory that it
    shares with others."""
    found: list[Any] = []
    for k, tensor in enumerate(tensors):
        others = [
            j
            for j, other in enumerate(tensors)
            if j != k and np.may_share_memory(tensor.array, other.array)
        ]
        where: Any = None
        if others and (row := row_of([tensor])) is not None:
            distance = tensor.pointer - tensors[others[0]].pointer
            where = place_in(row, tensor), row.shape, distance
        found.append((_first(tensors, tensor), tuple(others), where))
    return tuple(found)


def _rows(
    captured: Sequence[EagerTensor], tensors: Sequence[EagerTensor]
) -> dict[int, int]:
    """Which captured tensors are rows that arguments are in, and of which argument."""
    found: dict[int, int] = {}
    for at, tensor in enumerate(captured):
        for k, argument in enumerate(tensors):
            if row_of([argument]) is tensor:
                found.setdefault(at, k)
    return found


def _name(path: str) -> str:
    text = "".join(c if c.isalnum() else "_" for c in path.removeprefix("args"))
    return "x" + text.strip("_").removeprefix("0_")


def _shown(path: str) -> str:
    """The path of a leaf of `(args, kwargs)` as a user would write it."""
    rest = path.removeprefix("args")
    return f"args{rest[3:]}" if rest.startswith("[0]") else f"kwargs{rest[3:]}"


def _unhashable(f: Any, leaves: Sequence[Any], spec: Spec) -> ArgumentTypeError:
    for leaf, path in zip(leaves, pytree.leaf_paths(spec, "args"), strict=True):
        try:
            hash(leaf)
        except TypeError:
            return ArgumentTypeError(
                f"jit: argument `{_shown(path)}` of `{name_of(f)}` is a "
                f"`{type(leaf).__name__}`, which is neither data nor hashable. Pass "
                "tensors, numbers, or values that can be hashed."
            )
    return ArgumentTypeError(f"jit: the arguments of `{name_of(f)}` are not hashable.")


def _positions(donate: Any) -> tuple[int, ...]:
    if not isinstance(donate, tuple | list):
        raise ArgumentTypeError(
            "jit: `donate` must be a tuple of positions, and is "
            f"`{type(donate).__name__}`."
        )
    positions = tuple(as_integer("jit", "donate", n) for n in donate)
    if len(set(positions)) != len(positions) or any(n < 0 for n in positions):
        raise ArgumentValueError(
            "jit: `donate` must have different positions, counted from 0, and is "
            f"{donate}."
        )
    return positions


def jit(f: Callable[..., Any] | None = None, *, donate: Sequence[int] = ()) -> Any:
    """`f`, traced and compiled to native code for each signature of its arguments.

    Args:
        f: A function of pytrees of tensors, numbers and hashable values.
        donate: Positions of arguments whose tensors are given up by a call: they must
            not be used after it, even if it fails. A result of the same type that can
            be an update in place is written into the memory of such a tensor, if no
            one else sees it (an array, a buffer, a view).

    Raises:
        ArgumentTypeError: `f` cannot be called, or `donate` has what is no int.
        ArgumentValueError: `donate` has a negative number, or one twice.
    """
    positions = _positions(donate)
    if f is None:
        return functools.partial(jit, donate=donate)
    if not callable(f):
        raise ArgumentTypeError(
            f"jit: `f` must be a function, and is `{type(f).__name__}`."
        )
    return Jitted(f, positions)
