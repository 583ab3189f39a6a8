"""What a call of a C function computes before anything else."""

from collections.abc import Sequence
from typing import cast

from hopflow import dtypes
from hopflow.compiler.kernel_program.sizes import at_least
from hopflow.compiler.schedule.sizes import Trapping, computed, computed_condition
from hopflow.export.native.failures import Failures
from hopflow.export.native.parameters import Parameter, Parameters
from hopflow.graph.core import Graph
from hopflow.graph.module import ComputedSource
from hopflow.graph.types import TensorType
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Buffer, Expr, Var
from hopflow.loop_ir.program import Kind, Let, Program, Site, Stmt, Trap
from hopflow.ops import scalar
from hopflow.ops.opdef import MOST_BYTES
from hopflow.symbolic.guards import Guard
from hopflow.symbolic.ranges import NON_NEGATIVE
from hopflow.symbolic.size import Size, Symbol, SymInt, sym_max


class Preamble:
    """What a call computes before anything else, as Loop IR: that its sizes fulfil what
    the program demands, and the sizes that follow from them.

    parameters   those on which sizes depend, each as a variable or as an array
    values       of the symbols
    derived      the last sizes of the program
    shapes       of the outputs, but for those that the program makes
    statements   definitions, and traps
    """

    def __init__(
        self,
        parameters: Parameters,
        program: Program,
        graph: Graph,
        failures: Failures,
        guards: Sequence[tuple[Guard, str]],
    ) -> None:
        self.failures = failures
        self.statements: list[Stmt] = []
        self.values: dict[Symbol, Expr] = {}
        self.parameters: dict[Parameter, Var | Buffer] = {
            p: Var(p.name, p.type.dtype)
            if p.is_by_value
            else Buffer(p.name, p.type.dtype, (), "input")
            for p in parameters.of_sizes
        }
        for symbol, source in parameters.symbols.items():
            self.values[symbol] = self._told(symbol, source)
        for guard, text in guards:
            trap = self._undecided(text)
            holds = computed_condition(guard.holds, self._value, trap)
            self._stop(scalar.negate(holds), "constraint", f"GuardError: {text}")
        for own, var in zip(program.symbols, graph.symbols, strict=True):
            assert var.node.symbol is not None
            self.values[own] = self.values[var.node.symbol]
        self.derived = [
            self._let("derived", self._size(d.size, self._at(d.node)))
            for d in program.derived
        ]
        for sized in program.types:
            self._fits(sized.type, sized.node)
        self.shapes = {
            p: [self._size(n, self._undecided(p.path)) for n in p.type.shape]
            for p in parameters.outputs
            if p.role != "made"
        }

    # --- numbers

    def _value(self, symbol: Symbol) -> Expr:
        return self.values[symbol]

    def _size(self, size: Size, trap: Trapping) -> Expr:
        return computed(size, self._value, trap)

    def _told(self, symbol: Symbol, source: Parameter | ComputedSource) -> Expr:
        """Return what a symbol is."""
        if isinstance(source, ComputedSource):
            trap = self._undecided(f"`{source.size}`")
            return self._let(str(symbol), self._size(source.size, trap))
        place = self.parameters[source]
        read = e.read(place) if isinstance(place, Var) else e.load(place, ())
        if source.role == "size" and symbol.range == NON_NEGATIVE:  # else a guard
            text = f"ShapeError: the size `{symbol}` is {{0}}."
            self._stop(e.compare("lt", read, e.index(0)), "size", text, read)
        return e.cast(read, dtypes.float64 if symbol.real else dtypes.int64)

    def _let(self, name: str, value: Expr) -> Expr:
        var = Var(name, value.dtype)
        self.statements.append(Let(var, value))
        return e.read(var)

    # --- traps

    def _fits(self, type_: TensorType, node: int) -> None:
        """Stop where a size of an array is negative, or where no memory is as large."""
        place, trap = self.failures.place(node), self._at(node)
        total: Size = type_.dtype.itemsize
        for n in type_.shape:
            if isinstance(n, SymInt) and not at_least(n, 0):
                value = self._size(n, trap)
                text = f"ShapeError: {place}: a size is {{0}}. It must be at least 0."
                self._stop(e.compare("lt", value, e.index(0)), "size", text, value)
            total = total * sym_max(n, 1)
        if not at_least(MOST_BYTES, total):
            value = self._size(total, trap)
            text = f"ShapeError: {place}: {{0}} bytes are more than any memory has."
            test = e.compare("gt", value, e.index(MOST_BYTES))
            self._stop(test, "size", text, value)

    def _at(self, node: int) -> Trapping:
        """Return the traps of a size of a node that has no value."""

        def trap(
            test: Expr, kind: str, detail: str, values: Sequence[Expr] = ()
        ) -> None:
            site = Site(cast("Kind", kind), node, detail)
            self.statements.append(Trap(test, self.failures.add(site), tuple(values)))

        return trap

    def _undecided(self, text: str) -> Trapping:
        """Return the traps of what is demanded of numbers, where int64 has no room."""
        said = f"GuardError: {text}: int64 cannot hold a number that it depends on"

        def trap(
            test: Expr,
            kind: str,  # noqa: ARG001
            detail: str,  # noqa: ARG001
            values: Sequence[Expr] = (),  # noqa: ARG001
        ) -> None:
            self._stop(test, "constraint", said)

        return trap

    def _stop(self, test: Expr, kind: str, text: str, *values: Expr) -> None:
        """Stop with a text if the test holds."""
        if not test.is_const or test.attr:
            self.statements.append(Trap(test, self.failures.say(kind, text), values))
