"""Build the kernel program of a graph: each node's lowering rule is called once.

For example the graph

    def f(x: f64[8]) -> f64:
        v0: f64[8] = multiply(x, f64(2.0))
        v1: f64 = reduce_sum(v0, axes=(0,))
        return v1

becomes

    program f(x: f64[8]):
        v0: f64[8] = x[i0] * 2.0 for i0 < 8
        v1: f64[] = reduce add from 0.0 of v0[i0] over i0 < 8
        return v1

Dead nodes are dropped, and equal nodes are computed once. A graph that an operator
expands to is inlined into the block of the operator. Arrays of no elements read
nothing.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from hopflow import dtypes
from hopflow.compiler.kernel_program.definitions import Definition, Pointwise, axes
from hopflow.compiler.kernel_program.lowering import definition
from hopflow.compiler.kernel_program.program import (
    Block,
    Branch,
    Call,
    Equation,
    KernelProgram,
    Loop,
    Region,
    Value,
    While,
)
from hopflow.compiler.kernel_program.rewriting import drop_unread, is_pure
from hopflow.compiler.liveness import Liveness
from hopflow.errors import CompileError
from hopflow.graph.core import Arg, Constant, Graph, Node
from hopflow.graph.core import Var as GraphVar
from hopflow.graph.types import SYMBOL_TYPE, TensorType
from hopflow.loop_ir import expr as e
from hopflow.loop_ir import kernels as k
from hopflow.loop_ir.expr import Expr, Var

Env = dict[GraphVar, Value]


def kernel_program(graph: Graph) -> KernelProgram:
    """Return the kernel program that computes `graph`."""
    return _Builder({}).program(graph)


@dataclass
class _Builder:
    """A builder of one program; all builders share the functions that they call."""

    functions: dict[Graph, KernelProgram]
    called: dict[Graph, KernelProgram] = field(default_factory=dict)
    has_empty: bool = False

    def __post_init__(self) -> None:
        self.values, self.counters = count(), count()

    def program(self, graph: Graph) -> KernelProgram:
        inputs = [
            Value(var.node.name or f"x{n}", var.type)
            for n, var in enumerate(graph.inputs)
        ]
        block = Block(inputs)
        self.sizes(graph, inputs, block)
        self.graph(graph, inputs, block)
        symbols = tuple([s for v in graph.symbols if (s := v.node.symbol) is not None])
        functions = list(self.called.values())
        return KernelProgram(graph.name, block, functions, symbols)

    def function(self, graph: Graph) -> KernelProgram:
        """Return the program of a function that nodes call."""
        if graph not in self.functions:
            program = _Builder(self.functions).program(graph)
            program.name += f"_{len(self.functions)}"
            self.functions[graph] = program
        self.called[graph] = self.functions[graph]
        return self.functions[graph]

    # --- blocks ---

    def sizes(self, graph: Graph, inputs: Sequence[Value], block: Block) -> None:
        """Define in a block the symbols of a graph, which are its first inputs."""
        for var, value in zip(graph.symbols, inputs, strict=False):
            size = Pointwise((value[()],), is_view=True)
            results = (self.value(var.type),)
            block.equations.append(Equation(results, size, var.node, var.node.symbol))

    def graph(self, graph: Graph, inputs: Sequence[Value], block: Block) -> None:
        """Add the equations of a graph to a block, and set the block's results."""
        env: Env = dict(zip(graph.inputs, inputs, strict=True))
        live = Liveness(graph)
        for node in live.nodes:
            self.node(node, live, env, block)
        block.results = [_value(arg, live, env) for arg in graph.outputs]
        if self.has_empty:
            drop_unread(block)

    def block(
        self,
        graph: Graph,
        before: Sequence[Value],
        parameters: Sequence[Value],
        after: Sequence[Value],
        rows: Sequence[Value] = (),
        row: Callable[[Value, Value], Equation] | None = None,
    ) -> Block:
        """Return a new block for a graph.

        Args:
            before: Values from the enclosing block, for the first inputs of the graph.
            parameters: The parameters of the block, for the inputs that follow.
            after: Values from the enclosing block, for the last inputs.
            rows: Tensors of which each step reads one row, for the inputs between.
            row: Returns the equation that defines such a row.
        """
        block = Block(list(parameters))
        inputs = [*before, *parameters]
        self.sizes(graph, inputs, block)
        for var, tensor in zip(graph.inputs[len(inputs) :], rows, strict=False):
            assert row is not None
            inputs.append(self.value(var.type))
            block.equations.append(row(inputs[-1], tensor))
        self.graph(graph, [*inputs, *after], block)
        return block

    def value(self, type_: TensorType, prefix: str = "v") -> Value:
        return Value(f"{prefix}{next(self.values)}", type_)

    def node(self, node: Node, live: Liveness, env: Env, block: Block) -> None:
        """Add the equations that a node lowers to."""
        operands = [_value(arg, live, env) for arg in node.args]
        types = tuple([v.type for v in node.results])
        lowered = node.op.lower(types, *operands, **node.params)
        if isinstance(lowered, k.Inline):
            inputs, inner = (
                list(map(_operand, lowered.operands)),
                Block([], block.equations),
            )
            self.sizes(lowered.graph, inputs, inner)
            self.graph(lowered.graph, inputs, inner)
            env.update(zip(node.results, inner.results, strict=True))
            return
        results = [self.value(type_) for type_ in types]
        env.update(zip(node.results, results, strict=True))
        is_each = isinstance(lowered, tuple)  # a kernel for each result
        for n, kernel in enumerate(lowered if is_each else (lowered,)):
            targets = tuple(results[n : n + 1] if is_each else results)
            right = self.definition(node, kernel, [value.type for value in targets])
            equation = Equation(targets, right, node, node.symbol)
            if all(map(_is_empty, targets)) and is_pure(equation):
                self.has_empty = True
                zeros = [e.const(0, value.dtype) for value in targets]
                equation.definition = Pointwise(tuple(zeros))
            block.equations.append(equation)

    def definition(
        self, node: Node, lowered: k.Kernel | k.Region, types: Sequence[TensorType]
    ) -> Definition | Region:
        """Return the definition of a node, with blocks in place of graphs."""
        match lowered:
            case k.Branch(selector, branches, operands):
                inputs = list(map(_operand, operands))
                blocks = [self.block(graph, inputs, (), ()) for graph in branches]
                return Branch(_operand(selector), tuple(blocks))
            case k.CountedLoop():
                return self.counted_loop(node, lowered)
            case k.WhileLoop():
                return self.while_loop(lowered)
            case k.Invocation(graph, values):
                return Call(self.function(graph), tuple(map(_operand, values)))
            case k.Inline():
                raise CompileError(f"`{node.op.name}` lowers to a graph among others")
        return definition(lowered, types)

    def counted_loop(self, node: Node, region: k.CountedLoop) -> Loop:
        before, carry, xs, after = (
            list(map(_operand, part))
            for part in (region.before, region.carry, region.xs, region.after)
        )
        counter = Var(f"t{next(self.counters)}", dtypes.int64)

        def row(result: Value, tensor: Value) -> Equation:
            at = (e.read(counter), *axes(result.type.ndim))
            return Equation((result,), Pointwise((tensor[at],), is_view=True), node)

        inner = region.body.inputs[len(before) : len(before) + len(carry)]
        parameters = [self.value(var.type, "c") for var in inner]
        body = self.block(region.body, before, parameters, after, xs, row)
        return Loop(
            counter,
            region.length,
            tuple(carry),
            body,
            region.reverse,
            region.independent,
            region.unroll,
            region.ticks,
        )

    def while_loop(self, region: k.WhileLoop) -> While:
        before, carry, after = (
            list(map(_operand, part))
            for part in (region.before, region.carry, region.after)
        )

        def block(graph: Graph) -> Block:
            inner = graph.inputs[len(before) : len(before) + len(carry)]
            parameters = [self.value(var.type, "c") for var in inner]
            return self.block(graph, before, parameters, after)

        first, last = map(_operand, region.bounds) if region.bounds else (None, None)
        return While(
            tuple(carry),
            block(region.test),
            block(region.body),
            region.max_steps,
            region.ticks,
            (first, last) if first and last else None,
        )


def _is_empty(value: Value) -> bool:
    return any(isinstance(n, int) and n == 0 for n in value.shape)


def _value(arg: Arg, live: Liveness, env: Env) -> Value:
    if isinstance(arg, Constant):
        return _operand(arg)
    return env[live.canonical(arg)]


def _operand(operand: Any) -> Value:
    """Return an operand of a region, a value, a constant or a size, as a value."""
    if isinstance(operand, Value):
        return operand
    if isinstance(operand, Constant):
        scalar: Expr = e.const(operand.value, operand.type.dtype)
        return Value(repr(operand.value), operand.type, scalar)
    return Value(str(operand), SYMBOL_TYPE, e.extent(operand))
