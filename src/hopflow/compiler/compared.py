"""Comparison of compiled code with the graph interpreter, for `hf.config.verify`."""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from hopflow.agreement import Expected, Rounding
from hopflow.bind import Operand, Value, bind, using
from hopflow.errors import HopflowError
from hopflow.graph.core import Constant, Graph
from hopflow.graph.interpreter import interpret
from hopflow.graph.rewriting import clone, effects
from hopflow.ops.opdef import OpDef
from hopflow.tensor.eager import Eager, EagerTensor

UP_TO_SIGNS: Final = frozenset(["qr", "eigh", "svd"])
"""Operations whose definition leaves the signs of columns open."""


def is_comparable(graph: Graph) -> bool:
    """Return whether a graph has unique results, and may run twice.

    A graph with callbacks may not, since Python is called only once.
    """
    names = {node.op.name for node in graph.walk() if node.op is not None}
    return not (effects(graph) & {"callback"} or names & UP_TO_SIGNS)


def difference(
    graph: Graph, sizes: Sequence[int], arrays: Sequence[Any], results: Sequence[Any]
) -> str | None:
    """Return how results differ from the interpreter's, or None if they agree.

    Args:
        sizes: The values of the graph's symbols.
        arrays: The other inputs.
        results: The results to check.
    """
    silent = _silent(graph)

    def run(rounding: Rounding) -> list[Any]:
        tensors = [
            EagerTensor(rounding.argument(a), weak=v.type.weak)
            for a, v in zip(arrays, graph.inputs[len(graph.symbols) :], strict=True)
        ]
        with using(Rounded(rounding)):
            values = interpret(silent, [*sizes, *tensors], bind)
        types = [t.dtype.dtype for t in graph.out_types]
        return [_array(x, t) for x, t in zip(values, types, strict=True)]

    try:
        return Expected(run).wrong(results)
    except HopflowError as error:
        return f"the interpreter raises {type(error).__name__}: {error}"


def _silent(graph: Graph) -> Graph:
    """Return the graph without reports of progress, which native code has made."""
    silent = clone(graph)
    for node in silent.walk():
        node.params = {k: v for k, v in node.params.items() if k != "progress"}
    return silent


def _array(x: Any, dtype: np.dtype[Any]) -> Any:
    return np.asarray(x.value if isinstance(x, Constant) else x.host_array, dtype)


class Rounded(Eager):
    """The eager interpreter, with operators run by their graphs and rounded results."""

    __slots__ = ("_rounding",)

    def __init__(self, rounding: Rounding) -> None:
        super().__init__()
        self._rounding = rounding

    def process(
        self, op: Any, args: Sequence[Operand], params: dict[str, Any]
    ) -> tuple[Value, ...]:
        if type(op) is not OpDef:
            interpreted: tuple[Value, ...] = op.interpret(args, params)
            return interpreted
        results = super().process(op, args, params)
        if op.unview is not None:
            return results
        return tuple([self._rounded(x) for x in results])

    def _rounded(self, x: Any) -> Value:
        array = self._rounding.result(x.array)
        return x if array is x.array else EagerTensor(array, weak=x.type.weak)
