"""The arguments of a function that is traced: tensors, symbols, and constants."""

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
    """Whether an argument is a number that a symbol may stand for."""
    kind = type(leaf)
    return kind is float or (kind is int and leaf in INT64)


class Inputs:
    """What a trace makes of each leaf of the arguments, one after another.

    sources   symbol -> where a call finds its value
    dims      (leaf, axis) -> the declared size there
    marks     (leaf, axis) -> how the tensor is marked there
    """

    def __init__(
        self,
        name: str,
        tracer: Tracer,
        leaves: Sequence[Any],
        texts: Sequence[str],
        choose: Callable[[int, int | None], Choice],
    ) -> None:
        """
        Args:
            name: The public function, for messages.
            texts: How a user would write each leaf.
            choose: (leaf, axis; None for a number) -> what it is: never None.
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
        """An operand for a tensor of this type."""
        if type_.shape:
            shape = tuple([self._size(i, a, n) for a, n in enumerate(type_.shape)])
            type_ = type_.with_shape(shape)
        tensor = self.tracer.operand(type_, name)
        self.hold(i, tensor.source)
        return tensor

    def hold(self, i: int, var: Var) -> None:
        """Note that `var` is what a leaf holds: a number of it may be asked for."""
        leaf = self.leaves[i]
        if not var.type.shape and isinstance(leaf, EagerTensor | np.ndarray):
            self._inputs[var] = i
            self.tracer.hints[var] = leaf.item(), f"{self.texts[i]}.item()"

    def number(self, i: int, name: str) -> Any:
        """A symbol for a number, or the number itself."""
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
        """The symbol for a size that `hf.mark_dynamic` or `hf.mark_unbacked` names."""
        self.marks[i, axis] = mark
        if mark.kind == "unbacked":
            found = self.env.unbacked(None, mark.min, mark.max, text)
        else:
            call = mark.text(self.texts[i], axis)
            declared = None if mark.may_narrow else Declaration(call)
            found = self.env.backed(None, size, mark.min, mark.max, text, declared)
        return self._defined(found, Source(i, axis))

    def _foreign(self, size: SymInt) -> None:
        """Have inputs for the symbols of a type that the user gave."""
        for symbol in free_symbols(size):
            if symbol not in self.tracer.symbols:
                self.tracer.define(symbol)

    def _defined(self, size: SymInt, source: Source) -> SymInt:
        [symbol] = free_symbols(size)
        self.tracer.define(symbol)
        self.sources[symbol] = source
        return size

    def _dim(self, i: int, axis: int | None, found: int, dim: Dim) -> Size:
        """The declared size of a place.

        Raises:
            ArgumentValueError: what is there is not of the declaration.
        """
        text = self.texts[i] if axis is None else f"{self.texts[i]}.shape[{axis}]"
        value = dim.solve(found)
        known = self._roots.get(dim.name)
        if known is not None and (known[0].min, known[0].max) != (dim.min, dim.max):
            raise ArgumentValueError(
                f"{self.name}: two dimensions are named `{dim.name}`, and allow "
                "different sizes. Use one `hf.Dim` in all places."
            )
        if value is None or (known is not None and known[1].hint != value):
            raise mismatched(self.name, text, found, dim, known and known[1].hint)
        if known is None:
            ends, declared = (dim.min, dim.max), dim.declaration
            root = self.env.backed(dim.name, value, *ends, _solved(text, dim), declared)
            self._defined(root, Source(i, axis, dim.factor, dim.offset))
            known = self._roots[dim.name] = dim, root
        self.dims[i, axis] = dim
        size: Size = dim.of(known[1])
        return size

    # --- after the trace ---

    def find_sources(self) -> dict[Symbol, Source | ComputedSource]:
        """`sources`, with those of numbers that were asked of tensors, and of integers
        that are computed of floats."""
        for symbol, var in self.tracer.asked.items():
            if var in self._inputs:
                self.sources[symbol] = Source(self._inputs[var], None)
        found: dict[Symbol, Source | ComputedSource] = dict(self.sources)
        for terms, known in self.tracer.computed.items():
            [symbol], size = free_symbols(known), SymInt(terms)
            sources = {s: self.sources[s] for s in free_symbols(size)}
            found[symbol] = ComputedSource(size, sources)
        return found


def _solved(text: str, dim: Dim) -> str:
    """The root of a dimension, by a place that has it."""
    if dim.offset:
        sign = "-" if dim.offset > 0 else "+"
        text = f"({text} {sign} {abs(dim.offset)})"
    return text if dim.factor == 1 else f"({text} // {dim.factor})"


def mismatched(
    name: str, text: str, found: int, dim: Dim, root: float | None
) -> ArgumentValueError:
    """The error for a place that is not of its declaration."""
    if root is not None:
        why = f"`{dim.name}` is {root} by another argument"
    elif dim.is_plain:
        why = f"`{dim.name}` is from {dim.min} to {dim.max}"
    else:
        why = f"no `{dim.name}` from {dim.min} to {dim.max} makes it so"
    return ArgumentValueError(
        f"{name}: `{text}` is declared as `{dim}`, and is {found}: {why}."
    )


def check_dims(
    name: str,
    dims: Mapping[tuple[int, int | None], Dim],
    leaves: Sequence[Any],
    texts: Sequence[str],
) -> None:
    """Check a call against the sizes that were declared.

    Raises:
        ArgumentValueError: one is not of its declaration.
    """
    roots: dict[str, int] = {}
    for (i, axis), dim in dims.items():
        found = leaves[i] if axis is None else leaves[i].shape[axis]
        value = dim.solve(found) if isinstance(found, int) else roots.get(dim.name, 0)
        if value is None or roots.setdefault(dim.name, value) != value:
            text = texts[i] if axis is None else f"{texts[i]}.shape[{axis}]"
            raise mismatched(name, text, found, dim, roots.get(dim.name))
