"""Backends of `hf.jit`: functions that make a callable of a captured graph."""

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import numpy as np

from hopflow import pytree
from hopflow.bind import Value, run_graph
from hopflow.compiler.compared import difference, is_comparable
from hopflow.config import config
from hopflow.entries import entry
from hopflow.errors import ArgumentTypeError, ArgumentValueError, BackendError
from hopflow.graph.core import Graph
from hopflow.graph.module import GraphModule, Source
from hopflow.graph.printer import format_graph
from hopflow.graph.rewriting import clone
from hopflow.graph.types import TensorType
from hopflow.graph.verifier import verify as verify_graph
from hopflow.hops.base import interpreted
from hopflow.ops.convert import as_value
from hopflow.symbolic.size import Symbol, SymInt, substitute
from hopflow.tensor import EagerTensor, asarray
from hopflow.trace.source import name_of

Backend: TypeAlias = Callable[[GraphModule, list[Any]], Callable[..., Any]]
"""Gets a graph, and what it is called with first: ints for its symbols, then tensors;
returns a function of such, to as many tensors as the graph has outputs."""


def _interpreter(module: GraphModule, _: list[Any]) -> Callable[..., Any]:
    """NumPy runs one node after the other, those of bodies too."""

    def run(*args: Any) -> Any:
        with interpreted():
            return module(*args)

    return run


_BUILT_IN: Final[dict[str, Backend | None]] = {
    "native": None,
    "interpreter": _interpreter,
}


def as_backend(given: Any) -> Backend | None:
    """What a user gave for `backend`; None for native code.

    Raises:
        ArgumentTypeError, ArgumentValueError: it is no function, and no name of one.
    """
    if given is None:
        return None
    if isinstance(given, str):
        if given in _BUILT_IN:
            return _BUILT_IN[given]
        names = " or ".join(map(repr, _BUILT_IN))
        raise ArgumentValueError(
            f"jit: `backend` must be {names}, or a function, and is {given!r}."
        )
    if not callable(given):
        raise ArgumentTypeError(
            "jit: `backend` must be a function of a graph and example inputs, or a "
            f"name, and is `{type(given).__name__}`."
        )
    backend: Backend = given
    return backend


class Backed:
    """A graph that a backend made a function of; called as an `Executable` is."""

    def __init__(
        self,
        backend: Backend,
        graph: Graph,
        tensors: Sequence[EagerTensor],
        sizes: Sequence[int],
    ) -> None:
        """Give `graph` to the backend, with the inputs of the first call.

        Raises:
            BackendError: it fails, or returns what cannot be called.
        """
        self.graph = graph
        self._name = name_of(backend)
        if config.verify:
            verify_graph(graph)
        try:
            run = backend(module_of(graph), [*sizes, *tensors])
        except Exception as error:
            raise self._error(f"raised {type(error).__name__}: {error}") from error
        if not callable(run):
            raise self._error(
                f"must return a function of the graph's inputs, and returned "
                f"`{type(run).__name__}`"
            )
        self._run: Callable[..., Any] = run
        self._compared = False

    def __call__(
        self, tensors: Sequence[EagerTensor], sizes: Sequence[int] = ()
    ) -> list[EagerTensor]:
        """The graph's outputs.

        Raises:
            BackendError: the function of the backend returns something else.
        """
        if not config.verify or self._compared or not is_comparable(self.graph):
            return self._outputs(tensors, sizes)
        before = [x.host_array.copy() for x in tensors]
        results = self._outputs(tensors, sizes)
        self._check(sizes, before, tensors, results)
        self._compared = True
        return results

    def _check(
        self,
        sizes: Sequence[int],
        before: Sequence[Any],
        tensors: Sequence[EagerTensor],
        results: Sequence[EagerTensor],
    ) -> None:
        """Compare a run with one of the graph interpreter: `hf.config.verify`.

        Args:
            before: What the tensors held before the run.

        Raises:
            BackendError: the results differ, or a tensor was written to.
        """
        text = f"\n\n{format_graph(self.graph)}\nThat was found by `config.verify`"
        for k, (tensor, old) in enumerate(zip(tensors, before, strict=True)):
            if tensor.array.tobytes() != old.tobytes():
                raise self._error(
                    f"made a function that writes to its tensor {k}, but must only "
                    f"compute: what the graph writes is among its outputs{text}"
                )
        wrong = difference(self.graph, sizes, before, [x.array for x in results])
        if wrong is not None:
            raise self._error(
                "made a function whose results are not those of the graph interpreter: "
                f"{wrong}{text}"
            )

    def _outputs(
        self, tensors: Sequence[EagerTensor], sizes: Sequence[int]
    ) -> list[EagerTensor]:
        found = self._run(*sizes, *tensors)
        types = self.graph.out_types
        if len(types) == 1 and isinstance(found, Value | np.ndarray | np.generic):
            found = [found]
        if not isinstance(found, list | tuple) or len(found) != len(types):
            count = f" of {len(found)}" if isinstance(found, list | tuple) else ""
            raise self._error(
                f"made a function that must return a list of {len(types)} tensors, and "
                f"returned a `{type(found).__name__}`{count}"
            )
        symbols = [v.node.symbol for v in self.graph.symbols if v.node.symbol]
        known = dict(zip(symbols, sizes, strict=True))
        results: list[EagerTensor] = []
        for k, (value, type_) in enumerate(zip(found, types, strict=True)):
            result = self._result(k, value, type_, known)
            # Results are written to, and share memory with nothing.
            if any(np.may_share_memory(result, x.array) for x in (*tensors, *results)):
                result = result.copy()
            results.append(EagerTensor(result, weak=type_.weak))
        return results

    def _result(
        self, k: int, value: Any, type_: TensorType, sizes: dict[Symbol, int]
    ) -> Any:
        expected = type_.with_shape([substitute(n, sizes) for n in type_.shape])
        array = value.host_array if isinstance(value, EagerTensor) else value
        if (
            not isinstance(array, np.ndarray | np.generic)
            or array.dtype != type_.dtype.dtype
            or array.ndim != type_.ndim
            or not all(
                isinstance(n, SymInt) or n == m  # one that only the run knows
                for n, m in zip(expected.shape, array.shape, strict=True)
            )
        ):
            what = f"`{type(value).__name__}`"
            if isinstance(array, np.ndarray | np.generic):
                what = str(asarray(array).type)
            raise self._error(
                f"made a function whose result {k} must be {expected}, and is {what}"
            )
        return np.asarray(array)

    def _error(self, what: str) -> BackendError:
        return BackendError(
            f"jit: the backend `{self._name}`, given the graph `{self.graph.name}`, "
            f"{what}. Leave `backend` out to have it compiled."
        )


@entry
def module_of(graph: Graph) -> GraphModule:
    """A copy of a graph as a function of all its inputs: ints for symbols, and tensors.

        module = hf.fx.module_of(jitted.graph)

    Raises:
        ArgumentTypeError: `graph` is no captured graph.
    """
    if not isinstance(graph, Graph):
        raise ArgumentTypeError(
            f"module_of: expected a captured graph, and found `{type(graph).__name__}`."
            " Give the `graph` of what `hf.trace` or `hf.jit` returns."
        )
    graph = clone(graph)
    for var in graph.captures:
        var.node.section = "operand"
    inputs = tuple(range(len(graph.inputs)))
    symbols = [v.node.symbol for v in graph.symbols if v.node.symbol is not None]
    return GraphModule(
        graph,
        pytree.structure(inputs),
        pytree.structure(tuple(graph.outputs)),
        run=lambda graph, args, evaluate=run_graph: [
            as_value(result) for result in evaluate(graph, args)
        ],
        as_value=as_value,
        numbers=range(len(symbols)),
        sources={symbol: Source(k, None) for k, symbol in enumerate(symbols)},
        texts=[v.node.name for v in graph.inputs],
    )
