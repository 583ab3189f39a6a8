"""Backends of `hf.jit`: functions that compile a captured graph to a callable."""

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
"""A graph and example inputs (ints for its symbols, then tensors) -> a function from
such inputs to the list of the graph's outputs."""


def _interpreter(module: GraphModule, _: list[Any]) -> Callable[..., Any]:
    """The backend that runs node after node by NumPy, in bodies too."""

    def run(*args: Any) -> Any:
        with interpreted():
            return module(*args)

    return run


_BUILT_IN: Final[dict[str, Backend | None]] = {
    "native": None,
    "interpreter": _interpreter,
}


def as_backend(option: Any) -> Backend | None:
    """Return the backend that the argument `backend` of `hf.jit` names; None: native.

    Raises:
        ArgumentTypeError: it is neither a name nor callable.
        ArgumentValueError: it is an unknown name.
    """
    if option is None:
        return None
    if isinstance(option, str):
        if option in _BUILT_IN:
            return _BUILT_IN[option]
        names = " or ".join(map(repr, _BUILT_IN))
        raise ArgumentValueError(
            f"jit: `backend` must be {names}, or a function, and is {option!r}."
        )
    if not callable(option):
        raise ArgumentTypeError(
            "jit: `backend` must be a function of a graph and example inputs, or a "
            f"name, and is `{type(option).__name__}`."
        )
    backend: Backend = option
    return backend


class Backed:
    """A graph compiled by a user's backend; it is called like an `Executable`."""

    def __init__(
        self,
        backend: Backend,
        graph: Graph,
        tensors: Sequence[EagerTensor],
        sizes: Sequence[int],
    ) -> None:
        """Call the backend with `graph` and the inputs of the first call.

        Raises:
            BackendError: it fails, or does not return a callable.
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
        """Run the graph, and return its outputs.

        Raises:
            BackendError: the backend's function returns something else.
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
        """Compare a run with the graph interpreter, for `hf.config.verify`.

        Args:
            before: Copies of the tensors from before the run.

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
        mismatch = difference(self.graph, sizes, before, [x.array for x in results])
        if mismatch is not None:
            raise self._error(
                "made a function whose results are not those of the graph interpreter: "
                f"{mismatch}{text}"
            )

    def _outputs(
        self, tensors: Sequence[EagerTensor], sizes: Sequence[int]
    ) -> list[EagerTensor]:
        outputs = self._run(*sizes, *tensors)
        types = self.graph.out_types
        if len(types) == 1 and isinstance(outputs, Value | np.ndarray | np.generic):
            outputs = [outputs]
        if not isinstance(outputs, list | tuple) or len(outputs) != len(types):
            count = f" of {len(outputs)}" if isinstance(outputs, list | tuple) else ""
            raise self._error(
                f"made a function that must return a list of {len(types)} tensors, and "
                f"returned a `{type(outputs).__name__}`{count}"
            )
        symbols = [v.node.symbol for v in self.graph.symbols if v.node.symbol]
        sizes_by_symbol = dict(zip(symbols, sizes, strict=True))
        results: list[EagerTensor] = []
        for k, (value, type_) in enumerate(zip(outputs, types, strict=True)):
            result = self._result(k, value, type_, sizes_by_symbol)
            # Callers may write to results, so that they must alias nothing.
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
                isinstance(n, SymInt) or n == m  # an unbacked size may be any
                for n, m in zip(expected.shape, array.shape, strict=True)
            )
        ):
            actual = f"`{type(value).__name__}`"
            if isinstance(array, np.ndarray | np.generic):
                actual = str(asarray(array).type)
            raise self._error(
                f"made a function whose result {k} must be {expected}, and is {actual}"
            )
        return np.asarray(array)

    def _error(self, problem: str) -> BackendError:
        return BackendError(
            f"jit: the backend `{self._name}`, given the graph `{self.graph.name}`, "
            f"{problem}. Leave `backend` out to have it compiled."
        )


@entry
def module_of(graph: Graph) -> GraphModule:
    """Return a copy of a graph as a function of its inputs: ints for symbols, then
    tensors.

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
