"""The traced arguments of a function: operands, symbols, and constants."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from hopflow.bind import Value
from hopflow.errors import ArgumentValueError
from hopflow.graph.core import Var
from hopflow.graph.module import ComputedSource, Source
from hopflow.graph.types import FLOAT_TYPE, TensorType
from hopflow.symbolic.declared import Declaration
from hopflow.symbolic.env import ShapeEnv
from hopflow.symbolic.ranges import INT64
from hopflow.symbolic.scalars import SymFloat
from hopflow.symbolic.size import Size, Symbol, SymInt, free_symbols
from hopflow.tensor import EagerTensor
from hopflow.trace.dims import Choice, Dim
from hopflow.trace.marks import Mark
from hopflow.trace.tracer import Tracer


def can_be_symbol(leaf: Any) -> bool:
    """Whether an argument is a number that can be a symbol."""
    kind = type(leaf)
    return kind is float or (kind is int and leaf in INT64)


class Inputs:
    """Makes the inputs of a trace for the leaves of the arguments.

    sources   symbol -> the source of its value in a call
    dims      (leaf, axis; None for a number) -> the declared dimension
    marks     (leaf, axis) -> the mark of the tensor
    """

    def __init__(
        self,
        name: str,
        tracer: Tracer,
        leaves: Sequence[Any],
        texts: Sequence[str],
        choose: Callable[[int, int | None], Choice],
    ) -> None:
        """Start the inputs of a trace.

        Args:
            name: The public function, for messages.
            texts: The user's expression for each leaf.
            choose: (leaf, axis; None for a number) -> its choice, never None.
        """
        self.name = name
        self.tracer = tracer
        self.leaves = leaves
        self.texts = texts
        self.choose = choose
        self.sources: dict[Symbol, Source] = {}
        self.dims: dict[tuple[int, int | None], Dim] = {}
        self.marks: dict[tuple[int, int], Mark] = {}
        self._roots: dict[str, tuple[Dim, SymInt]] = {}
        self._inputs: dict[Var, int] = {}

    @property
    def env(self) -> ShapeEnv:
        assert self.tracer.env is not None
        return self.tracer.env

    # --- one leaf ---

    def tensor(self, i: int, type_: TensorType, name: str) -> Value:
        """Return a new operand for a tensor of this type."""
        if type_.shape:
            shape = tuple([self._size(i, a, n) for a, n in enumerate(type_.shape)])
            type_ = type_.with_shape(shape)
        tensor = self.tracer.operand(type_, name)
        self.hold(i, tensor.source)
        return tensor

    def hold(self, i: int, var: Var) -> None:
        """Note that `var` holds a leaf, whose number the function may need."""
        leaf = self.leaves[i]
        if not var.type.shape and isinstance(leaf, EagerTensor | np.ndarray):
            self._inputs[var] = i
            self.tracer.hints[var] = leaf.item(), f"{self.texts[i]}.item()"

    def number(self, i: int, name: str) -> Any:
        """Return a symbol for a number, or the number itself."""
        leaf = self.leaves[i]
        choice = self.choose(i, None)
        if choice is False or not can_be_symbol(leaf):
            return leaf
        if type(leaf) is float:
            return self._float(i, leaf, name)
        if isinstance(choice, Dim):
            return self._dim(i, None, leaf, choice)
        number = self.env.backed(None, leaf, INT64.low, INT64.high, self.texts[i])
        return self._defined(number, Source(i, None))

    def _float(self, i: int, leaf: float, name: str) -> SymFloat:
        number = self.env.backed_float(None, leaf, self.texts[i])
        symbol = number.node
        assert isinstance(symbol, Symbol)
        self.sources[symbol] = Source(i, None)
        self.tracer.floats[symbol] = self.tracer.operand(FLOAT_TYPE, name)
        return number

    def _size(self, i: int, axis: int, size: Size) -> Size:
        choice = self.choose(i, axis)
        if choice is False or isinstance(size, SymInt):
            if isinstance(size, SymInt):
                self._foreign(size)
            return size
        if isinstance(choice, Dim):
            return self._dim(i, axis, size, choice)
        text = f"{self.texts[i]}.shape[{axis}]"
        if isinstance(choice, Mark):
            return self._marked(i, axis, size, choice, text)
        return self._defined(self.env.backed(None, size, source=text), Source(i, axis))

    def _marked(self, i: int, axis: int, size: int, mark: Mark, text: str) -> Size:
        """Return the symbol for a size with a mark."""
        self.marks[i, axis] = mark
        if mark.kind == "unbacked":
            symbol = self.env.unbacked(None, mark.min, mark.max, text)
        else:
            call = mark.text(self.texts[i], axis)
            declared = None if mark.may_narrow else Declaration(call)
            symbol = self.env.backed(None, size, mark.min, mark.max, text, declared)
        return self._defined(symbol, Source(i, axis))

    def _foreign(self, size: SymInt) -> None:
        """Make inputs for the symbols in a size of the user's type."""
        for symbol in free_symbols(size):
            if symbol not in self.tracer.symbols:
                self.tracer.define(symbol)

    def _defined(self, size: SymInt, source: Source) -> SymInt:
        """Make the input for a new symbol, and return it."""
        [symbol] = free_symbols(size)
        self.tracer.define(symbol)
        self.sources[symbol] = source
        return size

    def _dim(self, i: int, axis: int | None, number: int, dim: Dim) -> Size:
        """Return the symbolic size of a place with a declared dimension.

        Raises:
            ArgumentValueError: its number does not fit the declaration.
        """
        text = self.texts[i] if axis is None else f"{self.texts[i]}.shape[{axis}]"
        value = dim.solve(number)
        declared_root = self._roots.get(dim.name)
        if declared_root is not None and (
            declared_root[0].min,
            declared_root[0].max,
        ) != (dim.min, dim.max):
            raise ArgumentValueError(
                f"{self.name}: two dimensions are named `{dim.name}`, and allow "
                "different sizes. Use one `hf.Dim` in all places."
            )
        if value is None or (
            declared_root is not None and declared_root[1].hint != value
        ):
            raise mismatched(
                self.name, text, number, dim, declared_root and declared_root[1].hint
            )
        if declared_root is None:
            ends, declared = (dim.min, dim.max), dim.declaration
            root = self.env.backed(dim.name, value, *ends, _solved(text, dim), declared)
            self._defined(root, Source(i, axis, dim.factor, dim.offset))
            declared_root = self._roots[dim.name] = dim, root
        self.dims[i, axis] = dim
        size: Size = dim.of(declared_root[1])
        return size

    # --- after the trace ---

    def find_sources(self) -> dict[Symbol, Source | ComputedSource]:
        """Return `sources` with those of numbers read from tensors, and of integers
        that are computed from floats."""
        for symbol, var in self.tracer.asked.items():
            if var in self._inputs:
                self.sources[symbol] = Source(self._inputs[var], None)
        sources: dict[Symbol, Source | ComputedSource] = dict(self.sources)
        for terms, number in self.tracer.computed.items():
            [symbol], size = free_symbols(number), SymInt(terms)
            float_sources = {s: self.sources[s] for s in free_symbols(size)}
            sources[symbol] = ComputedSource(size, float_sources)
        return sources


def _solved(text: str, dim: Dim) -> str:
    """Return the expression for the root of a dimension, from that for a place."""
    if dim.offset:
        sign = "-" if dim.offset > 0 else "+"
        text = f"({text} {sign} {abs(dim.offset)})"
    return text if dim.factor == 1 else f"({text} // {dim.factor})"


def mismatched(
    name: str, text: str, number: int, dim: Dim, root: float | None
) -> ArgumentValueError:
    """Return the error for a place whose number does not fit its declaration.

    Args:
        text: The user's expression for the place.
        root: The value of the dimension by another place, or None.
    """
    if root is not None:
        why = f"`{dim.name}` is {root} by another argument"
    elif dim.is_plain:
        why = f"`{dim.name}` is from {dim.min} to {dim.max}"
    else:
        why = f"no `{dim.name}` from {dim.min} to {dim.max} makes it so"
    return ArgumentValueError(
        f"{name}: `{text}` is declared as `{dim}`, and is {number}: {why}."
    )


def check_dims(
    name: str,
    dims: Mapping[tuple[int, int | None], Dim],
    leaves: Sequence[Any],
    texts: Sequence[str],
) -> None:
    """Check the sizes and numbers of a call against their declarations.

    Raises:
        ArgumentValueError: one does not fit its declaration.
    """
    roots: dict[str, int] = {}
    for (i, axis), dim in dims.items():
        number = leaves[i] if axis is None else leaves[i].shape[axis]
        value = dim.solve(number) if isinstance(number, int) else roots.get(dim.name, 0)
        if value is None or roots.setdefault(dim.name, value) != value:
            text = texts[i] if axis is None else f"{texts[i]}.shape[{axis}]"
            raise mismatched(name, text, number, dim, roots.get(dim.name))
