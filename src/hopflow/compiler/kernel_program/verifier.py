"""The rules of kernel programs.

Each value is defined once, before it is read, in the block that reads it or in an
enclosing one; a symbol is defined before a size uses it. Expressions obey the rules of
the Loop IR, read values by one i64 index for each axis, and use only the axes of the
definition. The results of a definition, a block or a call have the types of the values
that they are bound to.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hopflow import dtypes
from hopflow.compiler.kernel_program import definitions as d
from hopflow.compiler.kernel_program.printer import expressions
from hopflow.compiler.kernel_program.program import (
    Block,
    Branch,
    Call,
    Equation,
    KernelProgram,
    Loop,
    Value,
    While,
)
from hopflow.compiler.kernel_program.registers import shape_key
from hopflow.dtypes import DType
from hopflow.errors import KernelProgramError
from hopflow.graph.core import plain_symbol
from hopflow.graph.types import TensorType
from hopflow.loop_ir import walk
from hopflow.loop_ir.expr import Expr, Var
from hopflow.loop_ir.kernels import Callback, Library
from hopflow.loop_ir.rules import fault_of
from hopflow.symbolic.size import Size, Symbol, free_symbols


def verify_kernels(program: KernelProgram) -> None:
    """Check a kernel program and the functions that it calls.

    Raises:
        KernelProgramError: The program breaks a rule. The message says which, and at
            which equation.
    """
    for function in program.functions:
        verify_kernels(function)
    verifier = _Verifier(program)
    with verifier.scope():
        verifier.block(program.block, [v.type for v in program.block.parameters])


class _Verifier:
    """The values, symbols and counters that are defined at a point of a program."""

    def __init__(self, program: KernelProgram) -> None:
        self.program = program
        self.values: dict[Value, None] = {}
        self.symbols: dict[Symbol, None] = {}
        self.counters: dict[Var, None] = {}
        self.equation: Equation | None = None

    def require(self, holds: object, rule: str) -> None:
        if not holds:
            location = ""
            if self.equation is not None:
                results = self.equation.results
                names = ", ".join([v.name for v in results]) or "a check"
                location = f", {names} ({self.equation.node.line})"
            raise KernelProgramError(
                f"kernels of `{self.program.name}`{location}: {rule}."
            )

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Remove at the end the definitions that were added inside."""
        tables: list[dict[Any, None]] = [self.values, self.symbols, self.counters]
        counts = [len(table) for table in tables]
        yield
        for table, count in zip(tables, counts, strict=True):
            while len(table) > count:
                table.popitem()

    # --- values ---

    def define(self, value: Value) -> None:
        """Add the definition of a value, and of the symbols that are sizes of it."""
        self.require(value not in self.values, f"`{value.name}` is defined twice")
        self.require(value.scalar is None, f"`{value.name}` is a constant, and defined")
        self.values[value] = None
        for size in value.type.shape:
            symbol = plain_symbol(size)
            if symbol is not None:
                self.symbols.setdefault(symbol)

    def read(self, value: Any) -> TensorType:
        """Return the type of a value after a check that it is defined."""
        self.require(isinstance(value, Value), f"{value!r} is no value")
        is_defined = value in self.values or value.scalar is not None
        self.require(is_defined, f"`{value.name}` is read where it is unknown")
        type_: TensorType = value.type
        return type_

    def sizes(self, *sizes: Size) -> None:
        for symbol in free_symbols(*sizes):
            self.require(symbol in self.symbols, f"the size `{symbol}` is unknown")

    def alike(
        self, role: str, actual: Sequence[TensorType], expected: Sequence[TensorType]
    ) -> None:
        """Check that types agree with the expected ones.

        They have the same dtypes and ranks, and no two static sizes that differ.
        """
        same = len(actual) == len(expected) and all(
            a.dtype is b.dtype and a.ndim == b.ndim and _may_fit(a, b)
            for a, b in zip(actual, expected, strict=False)
        )
        texts = (", ".join(map(str, types)) for types in (actual, expected))
        self.require(same, f"{role}: {' for '.join(texts)}")

    # --- expressions ---

    def expressions(
        self, roots: Sequence[Expr], rank: int, parameters: Sequence[Expr] = ()
    ) -> None:
        """Check expressions over the first `rank` axes and over parameters."""
        axes = [axis.attr for axis in d.axes(rank)]
        variables = {*axes, *(p.attr for p in parameters)}
        for node in walk.nodes(*roots):
            if node.op == "size":
                self.sizes(node.attr)
                continue
            if node.op == "var":
                is_defined = node.attr in variables or node.attr in self.counters
                self.require(is_defined, f"`{node.attr.name}` is no axis of it")
            self.require(node.op != "load", "it reads memory")
            if node.op == "element":
                self.read(node.attr)
            fault = fault_of(node)
            self.require(fault is None, str(fault))

    def dtype(self, root: Expr, dtype: DType, role: str) -> None:
        actual = root.dtype
        self.require(actual is dtype, f"{role} must be {dtype}, and is {actual}")

    def function(
        self,
        function: d.Function,
        arguments: Sequence[DType],
        rank: int,
        expected: Sequence[DType],
    ) -> None:
        """Check a function: its parameters have `arguments`, its results `expected`."""
        accepted = [p.dtype for p in function.parameters]
        self.require(
            accepted == list(arguments), f"a function of {accepted} gets {arguments}"
        )
        self.expressions(function.results, rank, function.parameters)
        actual = [r.dtype for r in function.results]
        self.require(
            actual == list(expected), f"a function gives {actual}, and not {expected}"
        )

    # --- blocks ---

    def block(self, block: Block, arguments: Sequence[TensorType]) -> list[TensorType]:
        """Return the types of a block's results, for parameters of these types."""
        self.alike("parameters", arguments, [v.type for v in block.parameters])
        for value in block.parameters:
            self.define(value)
        outer = self.equation
        for equation in block.equations:
            self.equation = equation
            self.check(equation)
        self.equation = outer
        return [self.read(value) for value in block.results]

    def inner(
        self, block: Block, arguments: Sequence[TensorType], counter: Var | None = None
    ) -> list[TensorType]:
        with self.scope():
            if counter is not None:
                self.counters[counter] = None
            return self.block(block, arguments)

    def check(self, equation: Equation) -> None:
        """Check an equation, and add the definitions of its results."""
        types = [value.type for value in equation.results]
        match equation.definition:
            case Branch(selector, blocks):
                selected_by = self.read(selector)
                self.require(
                    selected_by.ndim == 0 and selected_by.dtype.kind in "bi",
                    "selects no block",
                )
                for block in blocks:
                    self.alike("a branch", self.inner(block, []), types)
            case Loop():
                self.loop(equation.definition, types)
            case While():
                self.while_loop(equation.definition, types)
            case Call(function, operands):
                self.require(
                    function in self.program.functions, "calls what is unknown"
                )
                arguments = list(map(self.read, operands))
                parameters = [v.type for v in function.block.parameters]
                ranks = [(t.dtype, t.ndim) for t in arguments]
                self.require(
                    ranks == [(t.dtype, t.ndim) for t in parameters], "a wrong call"
                )
            case definition:
                self.definition(definition, types)
        for value in equation.results:
            self.define(value)
        if equation.symbol is not None:
            is_size = types == [TensorType(dtypes.int64)]
            self.require(is_size, f"`{equation.symbol}` is no i64[]")
            self.symbols.setdefault(equation.symbol)

    def loop(self, loop: Loop, types: Sequence[TensorType]) -> None:
        self.sizes(loop.length)
        first = list(map(self.read, loop.carry))
        results = self.inner(loop.body, first, loop.counter)
        carry, rows = results[: len(first)], results[len(first) :]
        self.alike("a carry", carry, [v.type for v in loop.body.parameters])
        self.alike("results of a loop", carry, types[: len(first)])
        stacked = [t.with_shape((loop.length, *t.shape)) for t in rows]
        self.alike("rows of a loop", stacked, types[len(first) :])
        free = not (loop.independent and (first or loop.reverse))
        self.require(free, "an independent loop has a carry, or an order")

    def while_loop(self, loop: While, types: Sequence[TensorType]) -> None:
        first = list(map(self.read, loop.carry))
        for bound in loop.bounds or ():
            self.read(bound)
        test = self.inner(loop.test, first)
        self.require(test == [TensorType(dtypes.bool_)], f"a test gives {test}")
        results = self.inner(loop.body, first)
        carry, rows = results[: len(first)], results[len(first) :]
        self.alike("a carry", carry, [v.type for v in loop.body.parameters])
        ranks = [
            (t.dtype, t.ndim + (k >= len(first))) for k, t in enumerate([*carry, *rows])
        ]
        self.require(
            ranks == [(t.dtype, t.ndim) for t in types], "results of other types"
        )

    # --- definitions ---

    def definition(self, definition: d.Definition, types: Sequence[TensorType]) -> None:
        """Check a definition that is no region."""
        for check in getattr(definition, "checks", ()):
            self.sizes(*check.shape)
            self.expressions([check.holds, *check.values], len(check.shape))
            self.dtype(check.holds, dtypes.bool_, "a check")
            if check.passed is not None:
                self.expressions([check.passed], 0)
                self.dtype(check.passed, dtypes.bool_, "what a check has passed")
        if not isinstance(definition, Library | Callback):
            for type_ in types:
                self.sizes(*type_.shape)
        match definition:
            case d.Pointwise(elements):
                self.expressions(elements, types[0].ndim)
                self.require(len(elements) == len(types), "a result has no element")
                shapes = {shape_key(type_.shape) for type_ in types}
                self.require(len(shapes) == 1, "results have several shapes")
                for element, type_ in zip(elements, types, strict=True):
                    self.dtype(element, type_.dtype, "an element")
            case d.Cut():
                self.cut(definition, types)
            case d.Reduction():
                self.reduction(definition, types)
            case d.Prefix():
                self.expressions(expressions(definition), types[0].ndim)
                kind = types[0].dtype
                self.dtype(definition.init, kind, "the first value")
                self.dtype(definition.element, kind, "an element")
                self.function(definition.combine, [kind] * 2, types[0].ndim, [kind])
            case d.Scatter():
                self.scatter(definition, types[0])
            case d.Compact():
                self.sizes(definition.length)
                self.expressions([definition.keep], 1)
                self.dtype(definition.keep, dtypes.bool_, "a test")
            case Library():
                self.expressions(definition.scalars, 0)
                for operand in definition.operands:
                    self.read(operand)
            case Callback(operands):
                for operand in operands:
                    self.read(operand)

    def cut(self, kernel: d.Cut, types: Sequence[TensorType]) -> None:
        self.expressions([kernel.at], 0)
        self.dtype(kernel.at, dtypes.int64, "the place of a cut")
        self.require(kernel.axis < types[0].ndim, "a cut is along no axis of it")
        for piece in (kernel.below, kernel.above):
            if isinstance(piece, d.Pointwise):
                is_plain = not piece.checks and not piece.is_view
                self.require(is_plain, "a piece is a view, or has checks")
            self.definition(piece, types)

    def reduction(self, kernel: d.Reduction, types: Sequence[TensorType]) -> None:
        rank, kinds = types[0].ndim, [init.dtype for init in kernel.init]
        self.sizes(*kernel.space)
        self.expressions(kernel.init, rank)
        self.expressions(kernel.element, rank + len(kernel.space))
        actual = [element.dtype for element in kernel.element]
        self.require(actual == kinds, f"elements of {actual} for totals of {kinds}")
        if isinstance(kernel.combine, d.Function):
            self.function(kernel.combine, kinds * 2, rank, kinds)
        self.require(len(kernel.finish) == len(types), "a result has no finish")
        for finish, type_ in zip(kernel.finish, types, strict=True):
            self.function(finish, kinds, rank, [type_.dtype])

    def scatter(self, kernel: d.Scatter, type_: TensorType) -> None:
        rank = len(kernel.space)
        self.sizes(*kernel.space)
        self.alike("the base of a scatter", [self.read(kernel.base)], [type_])
        self.require(len(kernel.position) == type_.ndim, "a position of another rank")
        self.expressions([*kernel.position, kernel.value], rank)
        for index in kernel.position:
            self.dtype(index, dtypes.int64, "an index")
        self.dtype(kernel.value, type_.dtype, "a value")
        if kernel.combine is not None:
            self.function(kernel.combine, [type_.dtype] * 2, rank, [type_.dtype])
        if kernel.keep is not None:
            self.expressions([kernel.keep], rank)
            self.dtype(kernel.keep, dtypes.bool_, "a test")


def _may_fit(a: TensorType, b: TensorType) -> bool:
    """Return whether no two static sizes differ."""
    pairs = zip(a.shape, b.shape, strict=True)
    return all(n == m for n, m in pairs if isinstance(n, int) and isinstance(m, int))
