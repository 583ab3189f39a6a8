"""The Python functions that a program calls: those of the graph that it runs."""

import ctypes
from collections.abc import Sequence
from math import prod
from typing import Any, TypeAlias

import numpy as np

from hopflow.compiler.interface import Interface
from hopflow.graph.core import Graph, Node
from hopflow.graph.types import TensorType
from hopflow.progress import tell

NDArray: TypeAlias = np.ndarray[Any, np.dtype[Any]]


class Callbacks:
    """The functions of one of a program's graphs, by the site of the call."""

    def __init__(self, graph: Graph, program: Interface) -> None:
        kinds = "callback", "progress"
        calls = any(site.kind in kinds for site in program.sites)
        nodes = list(graph.walk()) if calls else []
        self._nodes: dict[str, dict[int, Node]] = {
            kind: {
                k: nodes[site.node]
                for k, site in enumerate(program.sites)
                if site.kind == kind
            }
            for kind in kinds
        }

    def __bool__(self) -> bool:
        return any(self._nodes.values())

    @property
    def tells(self) -> bool:
        """Whether the program reports the progress of a loop."""
        return bool(self._nodes["progress"])

    def __call__(self, site: int, address: int) -> None:
        """Call the function of a site.

        Args:
            address: The address of the words of native code (see
                `compiler.cpu.host_calls`).
        """
        if site in self._nodes["progress"]:
            self._tell(site, *(ctypes.c_int64 * 2).from_address(address))
            return
        node = self._nodes["callback"][site]
        types = [a.type for a in (*node.args, *node.results)]
        words = (ctypes.c_int64 * sum(1 + t.ndim for t in types)).from_address(address)
        arrays, at = [], 0
        for type_ in types:
            start, *shape = words[at : at + 1 + type_.ndim]
            arrays.append(_array(start, type_, shape))
            at += 1 + type_.ndim
        count = len(node.args)
        self.run(site, arrays[:count], arrays[count:])

    def run(
        self, site: int, operands: Sequence[NDArray], results: Sequence[NDArray]
    ) -> None:
        """Call the function of a site, and write its results."""
        if site in self._nodes["progress"]:
            self._tell(site, *map(int, operands))
            return
        node = self._nodes["callback"][site]
        pairs = zip(node.results, results, strict=True)
        types = tuple([v.type.with_shape(r.shape) for v, r in pairs])
        params = {**node.params, "types": types}
        returned = node.op.run(*operands, **params)
        for result, value in zip(results, returned, strict=True):
            result[...] = value

    def _tell(self, site: int, done: int, total: int) -> None:
        progress = self._nodes["progress"][site].params["progress"]
        tell(progress, done, None if total < 0 else total)


def _array(address: int, type_: TensorType, shape: Sequence[int]) -> NDArray:
    """Return the array of a type at an address."""
    dtype = type_.dtype.dtype
    size = prod(shape) * dtype.itemsize
    data = (ctypes.c_char * size).from_address(address)
    return np.frombuffer(data, dtype).reshape(shape)
