"""`GraphModule`: a traced function that can be called, printed and inspected."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from keyword import iskeyword
from typing import Any, ClassVar

from hopflow import pytree
from hopflow.entries import entry
from hopflow.errors import (
    ArgumentValueError,
    DTypeError,
    GraphError,
    GuardError,
    ShapeError,
    StructureError,
)
from hopflow.graph.core import Graph, SourceLine, Var, match_shapes
from hopflow.graph.interpreter import Evaluate
from hopflow.graph.parser import HEADER
from hopflow.graph.printer import format_graph
from hopflow.graph.types import TensorType, same_size
from hopflow.pytree import Spec
from hopflow.symbolic.guards import Guard, GuardSet
from hopflow.symbolic.ranges import INT64
from hopflow.symbolic.size import Size, Symbol, SymInt, evaluate, substitute


@dataclass(frozen=True, slots=True)
class Specialization:
    """An argument that the trace specialised on as a constant.

    path       how a user would write it: `args[1]`, `args[0].depth`
    value      the constant
    line       the line of the user's code where it first became part of the graph
    """

    path: str
    value: Any
    line: SourceLine | None = None


@dataclass(frozen=True, slots=True)
class Source:
    """Where a call reads the value of a symbol.

    leaf             the position of the leaf among the arguments
    axis             the axis whose size it is; None: the number that the leaf is or
                     holds
    factor, offset   the size that is read equals `factor * value + offset`
    """

    leaf: int
    axis: int | None
    factor: int = 1
    offset: int = 0

    def find(self, leaves: Sequence[Any]) -> Any:
        leaf = leaves[self.leaf]
        if self.axis is None:
            return leaf.item() if hasattr(leaf, "item") else leaf
        size = leaf.shape[self.axis]
        if self.factor == 1 and not self.offset:
            return size
        return (size - self.offset) // self.factor


@dataclass(frozen=True, slots=True)
class ComputedSource:
    """The value of a symbol that is computed from numbers among the arguments, such as
    floats, which are no sizes themselves.

    size      the integer, over symbols of the arguments
    sources   where a call reads these
    """

    size: SymInt
    sources: "Mapping[Symbol, Source]"
    axis: ClassVar[None] = None

    def find(self, leaves: Sequence[Any]) -> int:
        """Return the value, computed as Python computes it.

        Raises:
            ShapeError: there is none, or int64 cannot hold it.
        """
        values = {s: source.find(leaves) for s, source in self.sources.items()}
        bindings = ", ".join(f"{s} = {value}" for s, value in values.items())
        try:
            number = int(evaluate(self.size, values.__getitem__, int))
        except (ArithmeticError, TypeError, ValueError) as error:
            raise ShapeError(
                f"the integer `{self.size}` has no value with {bindings}: {error}."
            ) from error
        if number not in INT64:
            raise ShapeError(
                f"the integer `{self.size}` is {number}, which int64 cannot hold."
            )
        return number


class GraphModule:
    """A graph with the pytrees of its arguments and results.

    graph            its inputs are symbols and operands; captured tensors are
                     attributes
    in_spec          the structure of the tuple of arguments; constants are leaves
    out_spec         the structure of the result
    specializations  what the trace specialised on: `constants`, shapes that were read
                     (by the position of the leaf), numbers of enclosing scopes (by
                     name), and others (by text and line)
    guards           the conditions that the trace decided; each call must decide them
                     alike
    constants        position of a leaf -> the constant that each call must pass
    numbers          the positions of leaves that are ints, and symbols in the graph
    sources          where a call reads the values of symbols
    texts            how a user would write each leaf of the arguments
    run              runs the graph, and the other effects of the function
    """

    def __init__(
        self,
        graph: Graph,
        in_spec: Spec,
        out_spec: Spec,
        *,
        run: Callable[..., Sequence[Any]],
        as_value: Callable[[Any], Any],
        specializations: Mapping[int, Specialization] | None = None,
        read: Mapping[int | str, Specialization] | None = None,
        numbers: Collection[int] = (),
        sources: Mapping[Symbol, Source | ComputedSource] | None = None,
        guards: GuardSet | None = None,
        texts: Sequence[str] = (),
        decided: int = 0,
    ) -> None:
        """Make a module of a graph.

        Args:
            run: (graph, args, evaluate=...) -> results, all as values; an arg for a
                symbol is an int, or a size of the trace that the call is part of.
            as_value: Converts a user's argument to a value.
            specializations: Leaves that are constants, by position.
            read: What else the function read and the graph holds as constants.
            numbers: The positions of leaves that are ints, and symbols in the graph.
            sources: Where a call reads the values of symbols; others are sizes of the
                operands.
            texts: How a user would write each leaf.
            decided: The number of guards of the trace's environment that `guards` and
                the checks of the graph cover.

        Raises:
            GraphError: the graph has captures, for which a call has no values.
        """
        if graph.captures:
            name = graph.captures[0].node.name
            raise GraphError(
                f"the graph of a module holds what it captures as attributes, and "
                f"`{name}` is an input."
            )
        self.graph = graph
        self.in_spec = in_spec
        self.out_spec = out_spec
        self.constants = dict(specializations or {})
        self.specializations: dict[int | str, Specialization] = dict(read or {})
        self.specializations.update(self.constants.items())
        self.guards = guards or GuardSet()
        self.decided = decided
        self.numbers = frozenset(numbers)
        self.sources = dict(sources or {})
        self.texts = texts or pytree.leaf_paths(in_spec, "args")
        self.run = run
        self._as_value = as_value

    @entry
    def __call__(self, *args: Any) -> Any:
        """Run the graph on arguments like those of the trace.

        Returns:
            The result, with the structure `out_spec`.

        Raises:
            StructureError: the arguments have another structure.
            ShapeError, DTypeError: a tensor has another shape or dtype.
            ArgumentValueError: a constant of the trace has another value.
            GuardError: a condition that the trace decided is decided otherwise.
        """
        inputs = self.inputs(*args)
        return pytree.unflatten(self.out_spec, self.run(self.graph, inputs))

    def evaluated(self, evaluate: Evaluate, *args: Any) -> Any:
        """Return what a call does, with `evaluate(graph, inputs)` for the results of
        the graph.

        Raises:
            HopflowError: as a call does.
        """
        inputs = self.inputs(*args)
        results = self.run(self.graph, inputs, evaluate=evaluate)
        return pytree.unflatten(self.out_spec, results)

    def results(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> Any:
        """Return the result of a call whose graph has these inputs and outputs."""
        run = self.run(self.graph, inputs, evaluate=lambda *_: outputs)
        return pytree.unflatten(self.out_spec, run)

    def with_graph(self, graph: Graph, guards: Sequence[Guard] = ()) -> "GraphModule":
        """Return this module with another graph of the same inputs and outputs.

        Args:
            guards: Further conditions that each call must fulfil.
        """
        module = copy(self)
        module.graph = graph
        module.guards = GuardSet((*self.guards.guards, *guards))
        module.decided += len(guards)
        return module

    @property
    def argument_names(self) -> list[str]:
        """Distinct names for the arguments of a call."""
        names: list[str] = []
        leaf = 0
        for i, child in enumerate(self.in_spec.children()):
            text = self.texts[leaf] if child.num_leaves else ""
            name = re.split(r"\W", text)[0]
            unusable = not name.isidentifier() or iskeyword(name) or name in names
            names.append(f"arg{i}" if unusable or name == "args" else name)
            leaf += child.num_leaves
        return names

    def inputs(self, *args: Any) -> list[Any]:
        """Check arguments, and return the inputs of the graph.

        Raises:
            HopflowError: as a call does.
        """
        leaves, spec = pytree.flatten(args)
        if spec != self.in_spec:
            raise StructureError(
                f"{self.graph.name}: the arguments have another structure than in the "
                f"trace.\n  expected {self.in_spec}\n  got      {spec}"
            )
        return self._inputs(leaves)

    def _inputs(self, leaves: Sequence[Any]) -> list[Any]:
        """Return the inputs of the graph for the leaves of the arguments."""
        values: list[Any] = list(leaves)
        positions: list[int] = []
        for i, leaf in enumerate(leaves):
            if i in self.constants:
                self.check_constant(self.constants[i], leaf)
            elif i in self.numbers:
                self._check_number(i, leaf)
            else:
                values[i] = self._as_value(leaf)
                positions.append(i)
        inputs = self.graph.operands
        if len(inputs) != len(positions):
            raise GraphError(
                f"graph `{self.graph.name}` has {len(inputs)} operands, and its module "
                f"{len(positions)} tensors among the arguments."
            )
        operands = [values[i] for i in positions]
        for i, var, value in zip(positions, inputs, operands, strict=True):
            self._check_rank(i, var.type, value.type)
        sizes: dict[Symbol, Any] = {s: f.find(values) for s, f in self.sources.items()}
        for var, value in zip(inputs, operands, strict=True):
            match_shapes(var.type.shape, value.type.shape, sizes)
        for i, var, value in zip(positions, inputs, operands, strict=True):
            self._check_shape(i, var.type, value.type, sizes)
        self._check_guards(sizes)
        return [*(self._size(v, sizes) for v in self.graph.symbols), *operands]

    def _size(self, var: Var, sizes: Mapping[Symbol, Size]) -> Size:
        symbol = var.node.symbol
        if symbol is None or symbol not in sizes:
            raise GraphError(
                f"graph `{self.graph.name}` has a symbol `{var.node.name}`, and no "
                "argument's shape tells it."
            )
        return sizes[symbol]

    def check_constant(self, constant: Specialization, leaf: Any) -> None:
        """
        Raises:
            ArgumentValueError: an argument is not the constant of the trace.
        """
        value = constant.value
        if isinstance(value, float | complex):  # -0.0 and 0.0 differ, NaNs are equal
            is_same = repr(leaf) == repr(value)
        else:
            is_same = leaf is value or leaf == value
        if type(leaf) is not type(value) or not is_same:
            raise ArgumentValueError(
                f"{self.graph.name}: `{constant.path}` was {value!r} in the trace, "
                f"which took it for a constant, and is {leaf!r}. Trace again, or make "
                "it a tensor."
            )

    def _check_number(self, position: int, leaf: Any) -> None:
        if isinstance(leaf, bool) or not isinstance(leaf, int | SymInt):
            raise ArgumentValueError(
                f"{self.graph.name}: `{self.texts[position]}` was an int in the "
                f"trace, and is {leaf!r}. Trace again for other kinds of arguments."
            )

    def _check_rank(
        self, position: int, declared: TensorType, actual: TensorType
    ) -> None:
        if actual.dtype is not declared.dtype:
            raise DTypeError(self._mismatch(position, declared, actual))
        if actual.ndim != declared.ndim:
            raise ShapeError(self._mismatch(position, declared, actual))

    def _check_shape(
        self,
        position: int,
        declared: TensorType,
        actual: TensorType,
        sizes: Mapping[Symbol, Size],
    ) -> None:
        for n, size in zip(declared.shape, actual.shape, strict=True):
            expected = substitute(n, sizes)
            # If the call is traced, `==` adds a guard to that trace.
            if not (same_size(expected, size) or expected == size):
                raise ShapeError(self._mismatch(position, declared, actual))

    def _mismatch(self, position: int, declared: TensorType, actual: TensorType) -> str:
        return (
            f"{self.graph.name}: `{self.texts[position]}` was {declared} in the "
            f"trace, and is {actual}. Trace again for other types."
        )

    def _check_guards(self, sizes: Mapping[Symbol, Any]) -> None:
        if self.guards.guards and (failed := self.guards.explain(sizes)):
            raise GuardError(
                f"{self.graph.name}: the trace is not valid for these arguments. Trace "
                "again, or with other `dynamic` sizes.\n  " + "\n  ".join(failed)
            )

    @property
    def attributes(self) -> dict[str, Any]:
        """The tensors that the graph captured, by name."""
        return self.graph.attributes

    @property
    def code(self) -> str:
        """The graph as Python source; `graph.running` has the names it needs."""
        return f"{HEADER}\n\n{format_graph(self.graph)}"

    def print_readable(self, print_output: bool = True) -> str:
        """Return the text of the graph, and print it if `print_output`."""
        code = format_graph(self.graph)
        if print_output:
            print(code)
        return code

    def __str__(self) -> str:
        return format_graph(self.graph)

    def __repr__(self) -> str:
        first, *_ = format_graph(self.graph, width=1 << 20).split(":\n", 1)
        count = sum(1 for _ in self.graph.walk())
        return f"<GraphModule {first.removeprefix('def ')}: {count} nodes>"
