"""The sizes of a call: computed once, exactly, and checked before memory is allocated.

A program receives each size that its symbols determine (see `Program.derived`), so that
the memory that the caller allocates always agrees with the loops that write it.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

from hopflow.bind import Operand, bind
from hopflow.compiler.interface import Interface
from hopflow.errors import CheckError, HopflowError, ShapeError
from hopflow.graph.core import Arg, Constant, Graph, Node
from hopflow.graph.interpreter import Sizes
from hopflow.graph.rewriting import effects, symbols_of
from hopflow.graph.types import SYMBOL_TYPE, Shape, TensorType
from hopflow.loop_ir.program import DerivedSize
from hopflow.ops.messages import check_error
from hopflow.ops.opdef import MOST_BYTES, check_addressable
from hopflow.ops.symbolic_int import beyond_int64, symbolic_int
from hopflow.symbolic.ranges import INT64
from hopflow.symbolic.size import Size, Symbol, SymInt, substitute
from hopflow.symbolic.terms import format_operand

CallSizes: TypeAlias = Callable[..., tuple[tuple[int, ...], list[tuple[int, ...]]]]
"""From the values of the symbols to the derived sizes and the shapes of the results."""

_FAULTS: Final = (ArithmeticError, ValueError, TypeError)
"""The errors of an expression without a value: a division by zero, a float that is too
large or NaN, a complex power."""


def call_sizes(graph: Graph, program: Interface, shapes: Sequence[Shape]) -> CallSizes:
    """Return the function that computes the sizes of a program's calls.

    Args:
        graph: The graph of the caller: errors name its source lines.
        shapes: The shapes of the results, over the symbols of `graph`.

    Raises, when the function is called:
        ShapeError: A size is negative, or larger than any memory, or has no value.
        ArgumentRangeError: An integer is out of the range of int64.
    """
    symbols = [v.node.symbol for v in graph.symbols if v.node.symbol]
    renaming = dict(zip(program.symbols, symbols, strict=True))
    return _Source(graph, program, renaming, shapes).compiled()


class _Source:
    """The Python function that computes the sizes of a call, as source text.

    symbols   the symbols of the program -> those of the graph
    """

    def __init__(
        self,
        graph: Graph,
        program: Interface,
        symbols: dict[Symbol, Symbol],
        shapes: Sequence[Shape],
    ) -> None:
        self.graph, self.program, self.shapes = graph, program, shapes
        self.symbols = list(symbols.values())
        self._names = {s: f"v{k}" for k, s in enumerate(symbols)}
        self._names |= {s: self._names[p] for p, s in symbols.items()}
        self._derived = {
            self._text(d.size): f"n{k}" for k, d in enumerate(program.derived)
        }

    def _text(self, size: Size) -> str:
        if not isinstance(size, SymInt):
            return str(size)
        return format_operand(size.expression, self._names.__getitem__)

    def _named(self, size: Size) -> str:
        """Return the text of a size, or its name if it is a derived one."""
        text = self._text(size)
        return self._derived.get(text, text if text.isidentifier() else f"({text})")

    def _fits(self, type_: TensorType, shape: Shape) -> str:
        """Return the condition that a tensor of a type fits into memory."""
        factors = [f"({self._named(n)} or 1)" for n in shape]
        return f"{'*'.join(factors)}*{type_.dtype.itemsize} <= {MOST_BYTES}"

    def compiled(self) -> CallSizes:
        """Return the compiled function."""
        names = [f"v{k}" for k in range(len(self.symbols))]
        derived = list(self._derived.values())
        conditions = [f"{INT64.low} <= {name} <= {INT64.high}" for name in derived]
        conditions += [self._fits(t.type, t.type.shape) for t in self.program.types]
        results = {self._named(n) for s in self.shapes for n in s}
        numbers = [
            n for n, s in zip(names, self.symbols, strict=True) if s.range.low < 0
        ]
        conditions += [f"{n} >= 0" for n in (*numbers, *derived) if n in results]
        shapes = [f"({''.join(f'{self._named(n)}, ' for n in s)})" for s in self.shapes]
        body = [f"{name} = {text}" for text, name in self._derived.items()]
        body += [f"if not ({c}): raise ValueError" for c in conditions]
        returned = (
            f"({''.join(f'{name}, ' for name in derived)}), [{', '.join(shapes)}]"
        )
        lines = ["try:", *(f"    {line}" for line in (*body, "pass"))]
        lines += ["except faults:", f"    raise fault({', '.join(names)}) from None"]
        lines.append(f"return {returned}")
        source = "\n    ".join((f"def sizes({', '.join(names)}):", *lines))
        scope: dict[str, Any] = {
            "floor": math.floor,
            "ceil": math.ceil,
            "sign": lambda x: math.copysign(1.0, x),
            "faults": _FAULTS,
            "fault": self.fault,
        }
        exec(source, scope)
        function: CallSizes = scope["sizes"]
        return function

    # --- the error, computed only after a condition has failed ---

    def fault(self, *values: int) -> HopflowError:
        """Return the error for these values of the symbols.

        A check on sizes that fails takes precedence if it comes before the faulty size.
        """
        numbers = dict(zip(self.program.symbols, values, strict=True))
        nodes = list(self.graph.walk())
        faults = [
            *(
                (d.node, self._derived_fault(d, nodes[d.node], numbers))
                for d in self.program.derived
            ),
            *(
                (t.node, self._type_fault(t.type, nodes[t.node], numbers))
                for t in self.program.types
            ),
        ]
        number, error = min(
            ((n, e) for n, e in faults if e is not None), key=lambda fault: fault[0]
        )
        return failed_check(self.graph, values, nodes[number]) or error

    def _derived_fault(
        self, derived: DerivedSize, node: Node, values: Mapping[Symbol, int]
    ) -> HopflowError | None:
        size, at = derived.size, f" ({node.line})" if node.line else ""
        try:
            value = substitute(size, values)
        except _FAULTS as error:
            return ShapeError(
                f"the size `{_described(size)}`{at} has no value with "
                f"{self._shown(values)}: {error}."
            )
        if not isinstance(value, int) or value in INT64:
            return None
        if node.op is symbolic_int:
            return beyond_int64(_described(size), value, at)
        return ShapeError(
            f"the size `{_described(size)}`{at} is {value} with {self._shown(values)}: "
            "larger than any memory."
        )

    def _type_fault(
        self, type_: TensorType, node: Node, values: Mapping[Symbol, int]
    ) -> HopflowError | None:
        try:
            shape = [substitute(n, values) for n in type_.shape]
        except _FAULTS:  # a derived size has the fault
            return None
        name = node.op.name if node.op is not None else node.kind
        place = f"{name} ({node.line})" if node.line else name
        for declared, size in zip(type_.shape, shape, strict=True):
            if isinstance(size, int) and size < 0:
                return ShapeError(
                    f"{place}: the size `{_described(declared)}` is {size} with "
                    f"{self._shown(values)}. A size must be at least 0."
                )
        try:
            check_addressable(place, type_.with_shape(shape))
        except ShapeError as error:
            return error
        return None

    def _shown(self, values: Mapping[Symbol, int]) -> str:
        return ", ".join(f"{_name(s)} = {n}" for s, n in values.items())


def failed_check(
    graph: Graph, sizes: Sequence[int], before: Node | None = None
) -> HopflowError | None:
    """Return the error of the first check on sizes that fails, or None.

    Args:
        sizes: The values of the graph's symbols.
        before: Only checks before this node, or before the node with it in a body.
    """
    values: dict[Arg, Operand] = {
        var: Constant(n, SYMBOL_TYPE)
        for var, n in zip(graph.symbols, sizes, strict=True)
    }
    bindings = Sizes()
    for var, n in zip(graph.symbols, sizes, strict=True):
        if var.node.symbol is not None:
            bindings.known[var.node.symbol] = n
    for node in graph.nodes:
        if node is before or any(
            n is before for g in node.graphs.values() for n in g.walk()
        ):
            return None
        if not _is_of_sizes(node, values, bindings):
            continue
        operands = [a if isinstance(a, Constant) else values[a] for a in node.args]
        try:
            results = bind(node.op, operands, bindings.bind(node.params))
        except CheckError:
            at = f" ({node.line})" if node.line else ""
            return check_error(node.params, at, list(map(_number, operands[1:])))
        except _FAULTS:  # a size has the fault
            return None
        values.update(zip(node.results, results, strict=True))
    return None


def _number(operand: Operand) -> int:
    return int(operand.value if isinstance(operand, Constant) else operand.item())


def _is_of_sizes(node: Node, values: Mapping[Arg, Operand], bindings: Sizes) -> bool:
    """Return whether a node computes a number from sizes alone, or checks one."""
    return (
        node.op is not None
        and not node.graphs
        and effects(node) <= {"trap"}
        and not any(v.type.shape for v in node.results)
        and all(isinstance(a, Constant) or a in values for a in node.args)
        and all(s in bindings.known for s in symbols_of(node))
    )


def _described(size: Size) -> str:
    """Return a size as a user would write it."""
    if not isinstance(size, SymInt):
        return str(size)
    return format_operand(size.expression, _name)


def _name(symbol: Symbol) -> str:
    """Return where a symbol comes from, or its name."""
    return (symbol.env and symbol.env.symbols.get(symbol)) or symbol.name
