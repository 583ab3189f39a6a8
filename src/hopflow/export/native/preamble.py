"""What a call of a C function computes before anything else."""

from collections.abc import Sequence

from hopflow import dtypes
from hopflow.compiler.kernel_program.sizes import at_least
from hopflow.compiler.schedule.sizes import computed, computed_condition
from hopflow.export.native.failures import Failures
from hopflow.export.native.parameters import Parameter, Parameters
from hopflow.graph.core import Graph
from hopflow.graph.module import ComputedSource
from hopflow.graph.types import TensorType
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Buffer, Expr, Var
from hopflow.loop_ir.program import DerivedSize, Let, Program, Site, Stmt, Trap
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
        self._node = 0
        self._guard = ""  # the one that is being computed
        for symbol, source in parameters.symbols.items():
            self._tell(symbol, source)
        for guard, self._guard in guards:
            holds = computed_condition(guard.holds, self._value, self._trap)
            self._stop(scalar.negate(holds), f"GuardError: {self._guard}", "constraint")
        self._guard = ""
        for own, var in zip(program.symbols, graph.symbols, strict=True):
            assert var.node.symbol is not None
            self.values[own] = self.values[var.node.symbol]
        self.derived = [self._derived(d) for d in program.derived]
        for sized in program.types:
            self._fits(sized.type, sized.node)
        self.shapes = {
            p: [self.size(n) for n in p.type.shape]
            for p in parameters.outputs
            if p.role != "made"
        }

    def size(self, size: Size) -> Expr:
        """Return a size over the symbols, after traps where it has no value."""
        return computed(size, self._value, self._trap)

    def _value(self, symbol: Symbol) -> Expr:
        return self.values[symbol]

    def _tell(self, symbol: Symbol, source: Parameter | ComputedSource) -> None:
        """Say what a symbol is."""
        dtype = dtypes.float64 if symbol.real else dtypes.int64
        if isinstance(source, ComputedSource):
            self._guard = f"`{source.size}` is an integer"
            self.values[symbol] = self._let(str(symbol), self.size(source.size))
            return
        place = self.parameters[source]
        read = e.read(place) if isinstance(place, Var) else e.load(place, ())
        self.values[symbol] = e.cast(read, dtype)
        if source.role == "size" and symbol.range == NON_NEGATIVE:  # else a guard
            text = f"ShapeError: the size `{symbol}` is {{0}}."
            self._stop(e.compare("lt", read, e.index(0)), text, "size", (read,))

    def _let(self, name: str, value: Expr) -> Expr:
        var = Var(name, value.dtype)
        self.statements.append(Let(var, value))
        return e.read(var)

    def _derived(self, derived: DerivedSize) -> Expr:
        self._node = derived.node
        return self._let("derived", self.size(derived.size))

    def _fits(self, type_: TensorType, node: int) -> None:
        """Stop where an array of this type is larger than any memory, or its sizes are
        none."""
        self._node = node
        place = self.failures.place(node)
        total: Size = type_.dtype.itemsize
        for n in type_.shape:
            if isinstance(n, SymInt) and not at_least(n, 0):
                value = self.size(n)
                text = f"ShapeError: {place}: a size is {{0}}. It must be at least 0."
                self._stop(e.compare("lt", value, e.index(0)), text, "size", (value,))
            total = total * sym_max(n, 1)
        if not at_least(MOST_BYTES, total):
            value = self.size(total)
            text = f"ShapeError: {place}: {{0}} bytes are more than any memory has."
            test = e.compare("gt", value, e.index(MOST_BYTES))
            self._stop(test, text, "size", (value,))

    def _trap(
        self, test: Expr, kind: str, detail: str, values: Sequence[Expr] = ()
    ) -> None:
        """Stop where arithmetic on sizes has no result; see `schedule.sizes`."""
        if self._guard:
            text = f"GuardError: {self._guard}: int64 cannot hold a number of it"
            self._stop(test, text, "constraint")
            return
        site = self.failures.add(Site(kind, self._node, detail))  # type: ignore[arg-type]
        self.statements.append(Trap(test, site, tuple(values)))

    def _stop(
        self, test: Expr, text: str, kind: str, values: tuple[Expr, ...] = ()
    ) -> None:
        if test.is_const and not test.attr:
            return
        self.statements.append(Trap(test, self.failures.say(kind, text), values))
