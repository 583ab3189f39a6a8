"""`jit`: trace a function once for each signature, and run it as native code."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from hopflow import pytree
from hopflow.bind import Value, current, slots
from hopflow.compiler.pipeline import Executable
from hopflow.errors import ArgumentTypeError, ArgumentValueError
from hopflow.graph.core import Constant, Graph
from hopflow.graph.printer import format_graph
from hopflow.graph.types import TensorType
from hopflow.hops.base import debugging
from hopflow.hops.bodies import flatten_operands
from hopflow.hops.invoke_subgraph import invoke_subgraph
from hopflow.ops.rules import as_integer
from hopflow.pytree import Spec
from hopflow.stats import counts
from hopflow.tensor import EagerTensor
from hopflow.trace.functional import TracedTensor
from hopflow.trace.source import name_of
from hopflow.trace.tracer import Tracer, is_written, trace_into

__all__ = ["Jitted", "jit"]


class _Number(NamedTuple):
    """A Python number in a signature; `1`, `1.0` and `True` are told apart."""

    kind: type
    value: Any


@dataclass(slots=True)
class _Compiled:
    """What one signature was compiled to.

    captured    tensors from outside the function, passed after the arguments
    written     which inputs get new values: positions among arguments and captured
    spec        of the result; `constants` are the leaves that are Python numbers
    """

    executable: Executable
    captured: list[EagerTensor]
    written: list[int]
    spec: Spec
    constants: dict[int, Any] = field(default_factory=dict)
    is_single: bool = field(init=False)

    def __post_init__(self) -> None:
        self.is_single = pytree.is_leaf(self.spec)

    def __call__(self, tensors: list[EagerTensor]) -> Any:
        if self.captured:
            tensors = tensors + self.captured
        if self.written:
            for k in self.written:
                tensors[k].check_writable()
        results: list[Any] = self.executable(tensors)
        if self.written:
            first = len(results) - len(self.written)
            for k, value in zip(self.written, results[first:], strict=True):
                current().write(tensors[k], value)
            del results[first:]
        for k, number in self.constants.items():
            results.insert(k, number)
        return results[0] if self.is_single else pytree.unflatten(self.spec, results)


class Jitted:
    """A function that is traced and compiled for each signature of its arguments.

    The signature is the arguments' structure, the types of tensors, and the values of
    everything else. Tensors that the function reads from outside are passed on each
    call, so that later writes to them are seen.
    """

    def __init__(self, f: Callable[..., Any], donate: tuple[int, ...]) -> None:
        functools.update_wrapper(self, f)
        self._f = f
        self._donate = donate
        self._compiled: dict[Any, _Compiled] = {}
        self._plain: dict[tuple[int, ...], _Compiled] = {}
        self._plain_types: list[tuple[TensorType, ...]] = []
        self._last: _Compiled | None = None

    def __repr__(self) -> str:
        return f"<jitted {name_of(self._f)}>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not current().is_eager:
            return invoke_subgraph(lambda a, k: self._f(*a, **k), args, kwargs)
        if debugging():
            return self._f(*args, **kwargs)
        if not kwargs:  # the common case, told by the identity of types
            known = self._plain.get(tuple([id(getattr(a, "type", a)) for a in args]))
            if known is not None and all(type(a) is EagerTensor for a in args):
                self._last = known
                return self._finish(known, list(args), args)
        leaves, spec = pytree.flatten((args, kwargs))
        tensors: list[EagerTensor] = []
        key: list[Any] = [spec]
        for leaf in leaves:
            if type(leaf) is EagerTensor:
                tensors.append(leaf)
                key.append(leaf.type)
                key.append(leaf.type.weak)
            elif isinstance(leaf, np.ndarray | np.generic):
                tensor = slots.from_array(leaf)
                assert isinstance(tensor, EagerTensor)
                tensors.append(tensor)
                key.append(tensor.type)
                key.append(False)
            else:
                key.append(_Number(type(leaf), leaf))
        signature = tuple(key)
        try:
            compiled = self._compiled.get(signature)
        except TypeError:
            raise _unhashable(self._f, leaves, spec) from None
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
        self._last = compiled
        return self._finish(compiled, tensors, args)

    def _finish(
        self, compiled: _Compiled, tensors: list[EagerTensor], args: Sequence[Any]
    ) -> Any:
        result = compiled(tensors)
        for position in self._donate:
            self._give_up(args, position)
        return result

    def _compile(self, leaves: Sequence[Any], spec: Spec) -> _Compiled:
        """Trace the function for these arguments, and compile its graph."""
        counts.traces += 1
        tracer = Tracer(None, name_of(self._f).strip("<>") or "f")
        paths = pytree.leaf_paths(spec, "args")
        inputs = [
            tracer.operand(
                slots.from_array(x).type
                if isinstance(x, np.ndarray | np.generic)
                else x.type,
                _name(path),
            )
            if isinstance(x, Value | np.ndarray | np.generic)
            else x
            for x, path in zip(leaves, paths, strict=True)
        ]

        def call(*flat: Any) -> Any:
            args, kwargs = pytree.unflatten(spec, flat)
            return self._f(*args, **kwargs)

        tree = trace_into(tracer, call, inputs)
        operands, out_spec = flatten_operands(name_of(self._f), "result", tree)
        numbers = pytree.flatten(tree)[0]
        constants = {
            k: numbers[k] for k, o in enumerate(operands) if isinstance(o, Constant)
        }
        outputs = [o for o in operands if not isinstance(o, Constant)]
        own = [*tracer.operands, *(c.tensor for c in tracer.captures.values())]
        written = [k for k, t in enumerate(own) if is_written(t)]
        outputs += [TracedTensor(tracer, tracer.read(own[k])) for k in written]
        graph = tracer.close(outputs)
        captured = [c.origin for c in tracer.captures.values()]
        assert all(isinstance(c, EagerTensor) for c in captured)
        return _Compiled(Executable(graph), captured, written, out_spec, constants)  # type: ignore[arg-type]

    def _give_up(self, args: Sequence[Any], position: int) -> None:
        if position >= len(args):
            raise ArgumentValueError(
                f"jit: `donate` names argument {position}, and there are {len(args)}."
            )
        for leaf in pytree.flatten(args[position])[0]:
            if isinstance(leaf, EagerTensor):
                leaf.storage.invalid = "donated"

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


def _name(path: str) -> str:
    text = "".join(c if c.isalnum() else "_" for c in path.removeprefix("args"))
    return "x" + text.strip("_").removeprefix("0_")


def _unhashable(f: Any, leaves: Sequence[Any], spec: Spec) -> ArgumentTypeError:
    for leaf, path in zip(leaves, pytree.leaf_paths(spec, "args"), strict=True):
        try:
            hash(leaf)
        except TypeError:
            return ArgumentTypeError(
                f"jit: argument {path} of `{name_of(f)}` is a `{type(leaf).__name__}`, "
                "which is neither data nor hashable. Pass tensors, numbers, or values "
                "that can be hashed."
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
            not be used after it.

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
