r"""Lowers a kernel program with a memory plan to loops.

    program f(x: f64[8]):                      program f():
        v1: f64[8] = for t0 < 3, \                 buffer in0: f64[8] in input
                carry c2: f64[8] = x:              buffer out0: f64[8] in output
            v3: f64[8] = c2[i0] * 0.5 \            buffer carry1: f64[8] in arena
                for i0 < 8                         copy carry1 <- in0
            yield v3                       ->      for step2 in 0..3:
        return v1                                      for i3 in 0..8 independent:
    memory of f:                                           carry1[i3] = carry1[i3] * 0.5
        m0: f64[8] input: x                        copy out0 <- carry1
        m1: f64[8]: c2, v3, v1

Each definition becomes a loop nest over the indices of its result, branches and loops
become statements, and the next values of carries are moved to where a step reads them.
All decisions were made before: this pass follows the memory plan.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from hopflow import dtypes
from hopflow.compiler.kernel_program.definitions import Effect
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
from hopflow.compiler.kernel_program.registers import indices_of, is_small
from hopflow.compiler.layout import Layout, Layouts, given_strides
from hopflow.compiler.memory.plan import MemoryPlan
from hopflow.compiler.schedule import carries
from hopflow.compiler.schedule.builder import Builder, number_of
from hopflow.compiler.schedule.kernels import Kernels
from hopflow.compiler.schedule.summary import Summary, writes_rows
from hopflow.compiler.schedule.values import Registers, Stored
from hopflow.compiler.schedule.widths import vector_binding
from hopflow.compiler.target import Target
from hopflow.graph.core import Node, plain_symbol, size_of
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Buffer, Expr, Space, Var
from hopflow.loop_ir.program import (
    Allocate,
    Binding,
    For,
    If,
    Program,
    Stmt,
    Tick,
    Trap,
)
from hopflow.loop_ir.program import While as WhileStmt
from hopflow.loop_ir.walk import allocated
from hopflow.symbolic.size import Symbol, free_symbols


@dataclass(frozen=True, slots=True)
class _Ticks:
    """Writes the statements that report the progress of a loop to Python."""

    b: Builder
    site: int
    total: Expr
    is_outermost: bool

    def step(self, done: Expr) -> None:
        self.b.add(Tick(self.site, done, self.total))

    def end(self, done: Expr) -> None:
        self.b.add(Tick(self.site, done, done, ends=True, always=self.is_outermost))


def loops(
    plan: MemoryPlan,
    target: Target,
    functions: Mapping[KernelProgram, Program],
    layouts: Layouts = (),
) -> Program:
    """Return the loops of a program whose memory is planned.

    Args:
        functions: The lowered functions that the program calls.
        layouts: The layouts of the inputs that are not sizes; dense if it is empty.
    """
    builder = Builder(plan.program.name, target, plan)
    return _Writer(builder, plan, functions).program(plan.program, layouts)


class _Writer:
    """Writes the statements of a program.

    functions   the lowered functions that it calls
    """

    def __init__(
        self,
        builder: Builder,
        plan: MemoryPlan,
        functions: Mapping[KernelProgram, Program],
    ) -> None:
        self.b, self.plan, self.functions = builder, plan, functions

    # --- the program ---

    def program(self, program: KernelProgram, layouts: Layouts) -> Program:
        """Write a program; `layouts` are those of the inputs that are not sizes."""
        b = self.b
        b.program.functions += [self.functions[f] for f in program.functions]
        self.inputs(program, layouts)
        self.outputs(program)
        self.equations(program.block)
        for number, value in enumerate(program.block.results):
            self.result(number, value)
        return b.program

    def inputs(self, program: KernelProgram, layouts: Layouts) -> None:
        """Declare the sizes and the inputs of a program."""
        b, parameters = self.b, program.block.parameters
        sizes = parameters[: len(program.symbols)]
        for symbol, value in zip(program.symbols, sizes, strict=True):
            size = Var(symbol.name, dtypes.int64)
            b.symbols[symbol] = e.read(size)
            b.program.sizes.append(size)
            b.program.symbols.append(symbol)
            b.entry[size] = size_of(symbol)
            b.places[value] = Registers(value.type, (e.read(size),))
        for position, value in enumerate(parameters[len(sizes) :]):
            donated = len(sizes) + position in self.plan.updated.values()
            space: Space = "output" if donated else "input"
            shape = b.shape(value.type)
            buffer = Buffer(f"in{position}", value.type.dtype, shape, space)
            b.program.inputs.append(buffer)
            if layouts and not donated:
                buffer.strides = self.strides(buffer, layouts[position])
            if not is_small(value.type):
                allocation = self.plan.of(value)
                assert allocation is not None
                b.buffers[allocation] = buffer
            b.places[value] = Stored(value.type, buffer)
            if is_small(value.type) and self.plan.live.readers.get(value):
                elements = [b.let(x) for x in b.elements_of(value)]
                b.places[value] = Registers(value.type, tuple(elements))

    def strides(self, buffer: Buffer, layout: Layout) -> tuple[Expr, ...] | None:
        """Return the strides of an input, which are sizes that the call passes."""
        if layout == "dense":
            return None
        strides: list[Expr] = []
        for axis in range(given_strides(layout, len(buffer.shape))):
            stride = Var(f"{buffer.name}_stride{axis}", dtypes.int64)
            self.b.program.sizes.append(stride)
            strides.append(e.read(stride))
        return (*strides, e.index(1)) if layout == "rows" else tuple(strides)

    def outputs(self, program: KernelProgram) -> None:
        """Declare the memory of the results: that of an input, or the caller's."""
        b, first = self.b, len(program.symbols)
        for number, value in enumerate(program.block.results):
            if number in self.plan.updated:
                donated = self.plan.updated[number] - first
                b.program.outputs.append(b.program.inputs[donated])
                continue
            maker = self.plan.live.makers.get(value)
            b.node = 0 if maker is None else number_of(maker.node)
            sized = all(s in b.symbols for s in free_symbols(*value.shape))
            shape = b.shape(value.type) if sized else ()
            b.program.outputs.append(
                Buffer(f"out{number}", value.dtype, shape, "output")
            )

    def result(self, number: int, value: Value) -> None:
        """Write a result of the program, unless it was computed in its memory."""
        place, outputs = self.b.place(value), self.b.program.outputs
        if number in self.plan.updated:
            return
        maker = self.plan.live.makers.get(value)
        self.b.nodes = () if maker is None else _numbers(maker)
        if len(outputs[number].shape) != value.type.ndim:
            outputs[number] = self.allocated_output(place, outputs[number], value)
        self.b.fill(value, Stored(value.type, outputs[number]))

    def allocated_output(self, place: object, fresh: Buffer, value: Value) -> Buffer:
        """Return the memory of an output whose size is only known at runtime: that of
        the value, if the program allocated it for this value alone."""
        b = self.b
        buffers = allocated(b.program.body)
        if isinstance(place, Stored) and place.is_whole and place.buffer in buffers:
            buffer = place.buffer
            if buffer.space == "arena":
                b.program.arena.remove(buffer)
                buffer.space, buffer.name = "output", fresh.name
                return buffer
        fresh.shape = b.shape(value.type)
        b.add(Allocate(fresh))
        return fresh

    # --- equations ---

    def equations(self, block: Block) -> None:
        """Write the equations of a block. The flags of adjacent free checks are tested
        after all of them, so that their loops can be merged."""
        for equation in block.equations:
            definition = equation.definition
            if not (isinstance(definition, Effect) and definition.is_free):
                self.b.test_flags()
            before = self.b.node, self.b.nodes
            self.b.node, self.b.nodes = number_of(equation.node), _numbers(equation)
            self.equation(equation)
            for value in equation.results:
                self.b.check_size(value.type)
            if equation.symbol is not None:
                self.b.define(equation.symbol, self.b.scalar(equation.results[0]))
            self.b.node, self.b.nodes = before
        self.b.test_flags()

    def equation(self, equation: Equation) -> None:
        match equation.definition:
            case Branch():
                self.branch(equation, equation.definition)
            case Loop():
                self.counted_loop(equation, equation.definition)
            case While():
                self.while_loop(equation, equation.definition)
            case Call(function, operands):
                Kernels(self.b, equation).invoke(self.functions[function], operands)
            case definition:
                Kernels(self.b, equation).definition(definition)

    # --- branches ---

    def branch(self, equation: Equation, branch: Branch) -> None:
        """Write a list of statements for each branch, with results in common places.

        A size that differs between branches is a variable, which each branch sets
        before it allocates the result.
        """
        b, results = self.b, equation.results
        selector = b.scalar(branch.selector)
        sizes = {
            s: b.declare(e.index(0), "n")
            for s in free_symbols(*(n for v in results for n in v.shape))
            if s not in b.symbols
        }
        b.symbols.update({s: e.read(n) for s, n in sizes.items()})
        targets = [self.common_place(value, sizes) for value in results]
        bodies: list[list[Stmt]] = []
        for block in branch.blocks:
            with b.into([]) as body:
                self.equations(block)
                for value, result, target in zip(
                    block.results, results, targets, strict=True
                ):
                    self.write_to_common(value, result, target, sizes)
            bodies.append(body)
        b.add(_choose(selector, bodies))
        for symbol, size in sizes.items():
            b.define(symbol, e.read(size))
        for value, target in zip(results, targets, strict=True):
            if isinstance(target, Stored):
                b.places[value] = replace(target, type=value.type)
            else:
                elements = tuple(map(e.read, target))
                b.places[value] = Registers(value.type, elements)

    def common_place(
        self, value: Value, sizes: Mapping[Symbol, Var]
    ) -> Stored | list[Var]:
        """Return the place of a result of all branches."""
        if is_small(value.type):
            zero = e.const(0, value.dtype)
            return [self.b.declare(zero, "r") for _ in indices_of(value.type)]
        allocation = self.plan.of(value)
        assert allocation is not None
        if not sizes.keys().isdisjoint(free_symbols(*value.shape)):
            buffer = self.b.temporary(value.type, allocate=False)
            self.b.buffers[allocation] = buffer
        return self.b.memory(allocation)

    def write_to_common(
        self,
        value: Value,
        result: Value,
        target: Stored | list[Var],
        sizes: Mapping[Symbol, Var],
    ) -> None:
        """Write a result to its common place at the end of a branch."""
        b = self.b
        if isinstance(target, list):
            for var, x in zip(target, b.elements_of(value, result.type), strict=True):
                b.assign(var, x)
            return
        axes_of = {plain_symbol(n): k for k, n in enumerate(target.type.shape)}
        sized = {s: k for s, k in axes_of.items() if s is not None and s in sizes}
        if sized or not sizes.keys().isdisjoint(free_symbols(*target.type.shape)):
            for symbol, axis in sized.items():
                b.assign(sizes[symbol], b.extent(value.shape[axis]))
            b.add(Allocate(target.buffer))
        b.fill(value, target)

    # --- loops ---

    def ticks(self, node: Node, total: Expr) -> _Ticks:
        """Write the first report of a loop, and return the writer of the others."""
        site = self.b.site("progress", number_of(node))
        ticks = _Ticks(self.b, site, total, is_outermost=not self.b.depth)
        ticks.step(e.index(0))
        return ticks

    def steps(self, loop: While) -> Expr:
        """Return the trip count if it is known before the first step, else -1."""
        if loop.bounds is None:
            return e.index(-1)
        first, last = (e.cast(self.b.scalar(v), dtypes.int64) for v in loop.bounds)
        return self.b.let(e.binary("max", e.sub(last, first), e.index(0)))

    def while_loop(self, equation: Equation, loop: While) -> None:
        b, results = self.b, equation.results
        count = len(loop.carry)
        carried = carries.start(b, equation, loop)
        ticks = self.ticks(equation.node, self.steps(loop)) if loop.ticks else None
        steps = None
        if loop.max_steps is not None or ticks or results[count:]:
            steps = b.declare(e.index(0), "steps")
        stacks = carries.stacks(b, results[count:], steps, loop.max_steps)
        with b.loop_body() as head, b.step_of(self.plan.live.scopes[loop.test]):
            carries.begin_step(b, carried, loop.test)
            self.equations(loop.test)
            condition = b.scalar(loop.test.results[0])
        with b.loop_body() as body, b.step_of(self.plan.live.scopes[loop.body]):
            if loop.max_steps is not None and steps is not None:
                limit = e.index(loop.max_steps)
                full = e.compare("ge", e.read(steps), limit)
                site = b.site("limit", number_of(equation.node))
                b.add(Trap(full, site, (limit,)))
            done = e.index(0) if steps is None else b.let(e.read(steps))
            if steps is not None:
                b.assign(steps, e.add(done, e.index(1)))
            carries.add_row(b, stacks)
            b.rows[equation] = done
            carries.begin_step(b, carried, loop.body)
            self.step(equation, loop, carried)
            if ticks and steps is not None:
                ticks.step(e.read(steps))
        b.add(WhileStmt(head, condition, body))
        if ticks and steps is not None:
            ticks.end(e.read(steps))
        carries.end_stacks(b, results[count:], steps)
        carries.finish(b, carried, results[:count])

    def counted_loop(self, equation: Equation, loop: Loop) -> None:
        b, results = self.b, equation.results
        count = len(loop.carry)
        carried = carries.start(b, equation, loop)
        for value in results[count:]:
            b.place(value)
        step, length = b.var(dtypes.int64, "step"), b.extent(loop.length)
        at = e.read(step)
        if loop.reverse:
            at = e.sub(e.sub(length, e.index(1)), at)
        ticks = self.ticks(equation.node, length) if loop.ticks else None
        with b.loop_body() as body, b.step_of(self.plan.live.scopes[loop.body]):
            b.counters[loop.counter] = b.rows[equation] = at
            carries.begin_step(b, carried, loop.body)
            self.step(equation, loop, carried)
            if ticks:
                ticks.step(e.add(e.read(step), e.index(1)))
        steps = For(
            step, length, body, loop.independent, Binding("serial", loop.unroll)
        )
        if loop.independent and writes_rows(steps, Summary.of(steps)):
            steps.binding = vector_binding(length, body, b.target)
        b.add(steps)
        if ticks:
            ticks.end(length)
        carries.finish(b, carried, results[:count])

    def step(
        self,
        equation: Equation,
        loop: Loop | While,
        carried: Sequence[carries.Carry],
    ) -> None:
        """Write a step of a loop: its equations, its rows and its next carries."""
        b, body, count = self.b, loop.body, len(loop.carry)
        rows = [
            (row, self.row(stack, b.rows[equation]))
            for row, stack in zip(
                body.results[count:], equation.results[count:], strict=True
            )
        ]
        computed = {value for inner in body.equations for value in inner.results}
        copied: set[Value] = set()  # rows written to the stack as they are computed
        for row, target in rows:
            allocation = self.plan.of(row)
            if allocation is not None and allocation.row_of is None and row in computed:
                b.copies.setdefault(row, []).append(target)
                copied.add(row)
        self.equations(body)
        for row, target in rows:
            if row not in copied or row in b.copies:
                b.fill(row, target)
        for row in copied:
            b.copies.pop(row, None)
        carries.update(b, carried, body.results)

    def row(self, stack: Value, at: Expr) -> Stored:
        """Return the row that a step adds to a stack."""
        allocation = self.plan.of(stack)
        assert allocation is not None
        return self.b.memory(allocation, stack.type).row(at)


def _numbers(equation: Equation) -> tuple[int, ...]:
    """Return the numbers of the nodes that an equation computes, its own first."""
    return tuple(map(number_of, (equation.node, *equation.inlined)))


def _choose(selector: Expr, bodies: Sequence[list[Stmt]]) -> Stmt:
    """Return a chain of branches on a bool or an integer."""
    if selector.dtype.kind == "b":
        return If(selector, bodies[1], bodies[0])
    statement: Stmt | None = None
    otherwise = bodies[-1]
    for k in range(len(bodies) - 2, -1, -1):
        test = e.compare("eq", selector, e.const(k, selector.dtype))
        statement = If(test, bodies[k], otherwise)
        otherwise = [statement]
    return statement or If(e.const(True, dtypes.bool_), otherwise)
