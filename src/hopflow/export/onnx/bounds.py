"""How large the sizes of a model can be.

ONNX computes sizes in int64. An expression that may be beyond it is checked by the
model. An axis has at most `LONGEST` elements, unless its `Dim` says otherwise, and an
array at most `LARGEST`, so that `n * m` of an array of that shape needs no check.
"""

from collections.abc import Iterator
from typing import Final

from hopflow.graph.core import Graph, plain_symbol
from hopflow.graph.types import Shape
from hopflow.symbolic.atoms import atom_range, declared, monomial_range
from hopflow.symbolic.ranges import INT64, NON_NEGATIVE, ValueRange
from hopflow.symbolic.size import Symbol, SymInt
from hopflow.symbolic.terms import (
    Atom,
    Factor,
    Monomial,
    Operand,
    Terms,
    order,
    without,
)

LONGEST: Final = 2**31 - 1
LARGEST: Final = 2**48


class Bounds:
    """The ranges of expressions over the symbols of graphs."""

    def __init__(self) -> None:
        self._axes: set[Symbol] = set()
        self._arrays: set[Monomial] = set()
        self._graphs: set[Graph] = set()
        self._ranges: dict[Operand, ValueRange] = {}

    def learn(self, graph: Graph) -> None:
        """Note the shapes of a graph's values, without those of graphs in it."""
        if graph in self._graphs:
            return
        self._graphs.add(graph)
        for value in (*graph.inputs, *(v for n in graph.nodes for v in n.results)):
            symbols = map(plain_symbol, value.type.shape)
            self._axes.update(s for s in symbols if s is not None)
            self._arrays.add(_elements(value.type.shape))
        self._ranges.clear()

    def beyond(self, operand: Operand) -> Iterator[Terms]:
        """Yield the integers of an expression that int64 may not hold, inner ones
        first."""
        if isinstance(operand, Atom):
            for arg in operand.args:
                yield from self.beyond(arg)
        elif isinstance(operand, tuple):
            for factor in {f: None for monomial, _ in operand for f in monomial}:
                yield from self.beyond(factor)
            found = self.range(operand)
            if not (found.low in INT64 and found.high in INT64):
                yield operand

    def range(self, operand: Operand) -> ValueRange:
        """Return the range of an expression."""
        if operand not in self._ranges:
            self._ranges[operand] = self._range(operand)
        return self._ranges[operand]

    def _range(self, operand: Operand) -> ValueRange:
        if isinstance(operand, str):
            return declared(operand)
        if isinstance(operand, Atom):
            return atom_range(operand, self.range)
        if isinstance(operand, Symbol):
            if operand in self._axes and operand.range == NON_NEGATIVE:
                return ValueRange(0, LONGEST)
            return operand.range if operand.real else operand.range & INT64
        total = ValueRange.point(0)
        for monomial, factor in operand:
            total = total + self._product(monomial).scaled(factor)
        return total

    def _product(self, monomial: Monomial) -> ValueRange:
        found = monomial_range(monomial, self.range)
        if any(without(array, monomial) is not None for array in self._arrays):
            return found & ValueRange(-LARGEST, LARGEST)
        return found


def _elements(shape: Shape) -> Monomial:
    """Return the product of the sizes that are products of symbols."""
    factors: list[Factor] = []
    for n in shape:
        if isinstance(n, SymInt) and len(n.expression) == 1:
            factors += n.expression[0][0]
    return tuple(sorted(factors, key=order))
