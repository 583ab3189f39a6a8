"""What runs a graph, compared with the graph interpreter: `hf.config.verify`."""

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
"""Operations whose meaning leaves the signs of columns open."""


def is_comparable(graph: Graph) -> bool:
    """Whether a graph has one result, and may run twice: Python is called once."""
    names = {node.op.name for node in graph.walk() if node.op is not None}
    return not (effects(graph) & {"callback"} or names & UP_TO_SIGNS)


def difference(
    graph: Graph, sizes: Sequence[int], arrays: Sequence[Any], results: Sequence[Any]
) -> str | None:
    """What is wrong about the results that something has made of arrays, beside those
    of the interpreter; None if they agree."""
    silent = _silent(graph)

    def run(rounding: Rounding) -> list[Any]:
        tensors = [
            EagerTensor(rounding.argument(a), weak=v.type.weak)
            for a, v in zip(arrays, graph.inputs[len(graph.symbols) :], strict=True)
        ]
        with using(Rounded(rounding)):
            found = interpret(silent, [*sizes, *tensors], bind)
        types = [t.dtype.dtype for t in graph.out_types]
        return [_array(x, t) for x, t in zip(found, types, strict=True)]

    try:
        return Expected(run).wrong(results)
    except HopflowError as error:
        return f"the interpreter raises {type(error).__name__}: {error}"


def _silent(graph: Graph) -> Graph:
    """A graph whose loops tell nobody how far they are: native code has done so."""
    silent = clone(graph)
    for node in silent.walk():
        node.params = {k: v for k, v in node.params.items() if k != "progress"}
    return silent


def _array(x: Any, dtype: np.dtype[Any]) -> Any:
    return np.asarray(x.value if isinstance(x, Constant) else x.host_array, dtype)


class Rounded(Eager):
    """The eager interpreter, operators by their graphs; with results as a `Rounding`
    has them."""

    __slots__ = ("_rounding",)

    def __init__(self, rounding: Rounding) -> None:
        super().__init__()
        self._rounding = rounding

    def process(
        self, op: Any, args: Sequence[Operand], params: dict[str, Any]
    ) -> tuple[Value, ...]:
        if type(op) is not OpDef:
            found: tuple[Value, ...] = op.interpret(args, params)
            return found
        results = super().process(op, args, params)
        if op.unview is not None:
            return results
        return tuple([self._rounded(x) for x in results])

    def _rounded(self, x: Any) -> Value:
        array = self._rounding.result(x.array)
        return x if array is x.array else EagerTensor(array, weak=x.type.weak)
