"""Scheduling graphs: node by node, subgraphs as structured statements."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from hopflow import dtypes
from hopflow.compiler.kernel_program.definitions import axes
from hopflow.compiler.layout import Layout, Layouts, given_strides
from hopflow.compiler.liveness import Liveness
from hopflow.compiler.passes.stack_products import has_few_rows
from hopflow.compiler.schedule import carries
from hopflow.compiler.schedule.builder import Builder
from hopflow.compiler.schedule.fuse import fuse_loops
from hopflow.compiler.schedule.interchange import move_steps_inside
from hopflow.compiler.schedule.kernels import Kernels
from hopflow.compiler.schedule.nodes import Env, NodeScheduler
from hopflow.compiler.schedule.places import (
    Pending,
    Place,
    Registers,
    Slot,
    Stored,
    indices_of,
    is_small,
    static_size,
)
from hopflow.compiler.schedule.threads import bind_threads
from hopflow.compiler.target import Target
from hopflow.errors import CompileError
from hopflow.graph.core import Constant, Graph, Node, Var, plain_symbol, size_of
from hopflow.graph.rewriting import effects, reader
from hopflow.graph.types import SYMBOL_TYPE, TensorType, same_type
from hopflow.logs import passing
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Expr
from hopflow.loop_ir.kernels import (
    Branch,
    CountedLoop,
    Inline,
    WhileLoop,
)
from hopflow.loop_ir.nest import (
    Allocate,
    Binding,
    Buffer,
    Copy,
    For,
    If,
    Program,
    Space,
    Stmt,
    Swap,
    Tick,
    Trap,
    While,
)
from hopflow.loop_ir.nest import Var as LoopVar
from hopflow.loop_ir.printer import format_program
from hopflow.loop_ir.walk import allocated, buffers, statements
from hopflow.ops.dynamic import update_window
from hopflow.ops.matmul import matmul_op
from hopflow.ops.scatter import scatter, scatter_drop
from hopflow.ops.views import update_slice
from hopflow.symbolic.size import Size, Symbol, free_symbols

LOOP_PASSES: Final = (fuse_loops, move_steps_inside, bind_threads)
"""Passes over the statements of a program, in the order they run, in place."""
LARGEST_COPY = 1 << 22
"""Bytes of what is copied to be aligned: larger ones do not come from the caches."""


def schedule(
    graph: Graph,
    target: Target,
    donated: Sequence[int] = (),
    layouts: Layouts = (),
) -> Program:
    """The program that computes `graph`: inputs and outputs in the graph's order.

    Symbols of the graph become the program's sizes. A trap of the program names the
    number that its node has in `meta`.

    Args:
        donated: Positions of inputs (symbols not counted) whose memory may be written
            over. It becomes that of an output of the same type, unless such an output
            would have to be made elsewhere first, and copied.
        layouts: Of the inputs (symbols not counted); dense if it is empty. The strides
            of the others are sizes of the program, after those of the graph.
    """
    reused = _reusable(graph, donated)
    return _scheduled(graph, lambda: Builder(graph.name, target), reused, layouts)


def _scheduled(
    graph: Graph,
    builder: Callable[[], Builder],
    reused: dict[int, int],
    layouts: Layouts,
) -> Program:
    """The program whose outputs `reused` are in memory of inputs, but for those that
    would have to be copied there."""
    while True:
        program = Scheduler(builder()).program(graph, reused, layouts)
        copied = {s.target for s in statements(program.body) if isinstance(s, Copy)}
        wasted = [j for j in reused if program.outputs[j] in copied]
        if not wasted:
            return program
        for j in wasted:
            del reused[j]


def _reusable(graph: Graph, donated: Sequence[int]) -> dict[int, int]:
    """The donated input whose memory each output may take: the first of its type."""
    tensors = [v.type for v in graph.inputs if v.node.section != "symbol"]
    free = [k for k in donated if not is_small(tensors[k])]
    reused: dict[int, int] = {}
    for j, type_ in enumerate(graph.out_types):
        found = next((k for k in free if same_type(tensors[k], type_)), None)
        if found is not None:
            reused[j] = found
            free.remove(found)
    return reused


def _updated(graph: Graph) -> dict[int, int]:
    """The input that an output is, but for parts of it that are written."""
    tensors = [v for v in graph.inputs if v.node.section != "symbol"]
    found: dict[int, int] = {}
    for j, output in enumerate(graph.outputs):
        base = output
        while isinstance(base, Var) and base.node.op in _UPDATES:
            base = base.node.args[0]
        if base is not output and base in tensors and not is_small(base.type):
            k = tensors.index(base)
            if k not in found.values():
                found[j] = k
    return found


_UPDATES: Final = (update_slice, update_window, scatter, scatter_drop)


@dataclass(frozen=True, slots=True)
class Ticks:
    """Tells Python how far a loop is."""

    b: Builder
    site: int
    total: Expr
    is_outermost: bool

    def step(self, done: Expr) -> None:
        self.b.add(Tick(self.site, done, self.total))

    def end(self, done: Expr) -> None:
        self.b.add(Tick(self.site, done, done, ends=True, always=self.is_outermost))


class Scheduler(NodeScheduler):
    """Schedules whole graphs: what stands around nodes, and regions."""

    def program(
        self, graph: Graph, reused: Mapping[int, int], layouts: Layouts
    ) -> Program:
        """The whole program; `reused` are outputs in the memory of inputs."""
        program = self.b.program
        text = partial(format_program, program)
        with passing("schedule", graph.name, text):
            self.statements(graph, reused, layouts)
        for run in LOOP_PASSES:
            with passing(run.__name__, graph.name, text):
                run(program.body)
        return program

    def statements(
        self, graph: Graph, reused: Mapping[int, int], layouts: Layouts
    ) -> None:
        """The program before the passes over its loops."""
        b = self.b
        for var in graph.symbols:
            assert var.node.symbol is not None
            size = LoopVar(var.node.symbol.name, dtypes.int64)
            b.symbols[var.node.symbol] = e.read(size)
            b.program.sizes.append(size)
            b.program.symbols.append(var.node.symbol)
            b.entry[size] = size_of(var.node.symbol)
        live = Liveness(graph)
        env = self.inputs(live, set(reused.values()), layouts)
        hints: dict[Var, Buffer] = {}
        for k, arg in enumerate(graph.outputs):
            if k in reused:
                b.program.outputs.append(b.program.inputs[reused[k]])
                continue
            if isinstance(arg, Var):
                b.node = arg.node.meta.get("number", 0)
            sized = all(s in b.symbols for s in free_symbols(*arg.type.shape))
            shape = b.shape(arg.type) if sized else ()
            buffer = Buffer(f"out{k}", arg.type.dtype, shape, "output")
            b.program.outputs.append(buffer)
            if sized and isinstance(arg, Var) and arg.node.op is not None:
                hints.setdefault(live.canonical(arg), buffer)
        results = self.nodes(live, env, hints)
        self.finish(results, reused)

    def inputs(
        self, live: Liveness, written_over: Collection[int], layouts: Layouts
    ) -> Env:
        """Slots for the inputs, which are made buffers of the program."""
        b = self.b
        env: Env = {}
        for k, var in enumerate(live.graph.inputs):
            if var.node.section == "symbol":
                size = b.program.sizes[k]
                env[var] = b.slot(Registers(var.type, (e.read(size),)), live.count(var))
                continue
            position = len(b.program.inputs)
            donated = position in written_over
            space: Space = "output" if donated else "input"
            buffer = Buffer(f"in{k}", var.type.dtype, b.shape(var.type), space)
            b.program.inputs.append(buffer)
            if donated:
                b.owners[buffer] = b.loop
            elif layouts:
                buffer.strides = self.strides(buffer, layouts[position])
            place: Place = Stored(var.type, buffer)
            if is_small(var.type) and live.count(var):
                place = self.registers(Slot(place))
            slot = env[var] = b.slot(place, live.count(var))
            if layouts and layouts[position] == "strided" and live.count(var) > 1:
                Kernels(b, 0).dense(slot)  # elements far apart are read once
        return env

    def strides(self, buffer: Buffer, layout: Layout) -> tuple[Expr, ...] | None:
        """Strides that a call gives."""
        if layout == "dense":
            return None
        found: list[Expr] = []
        for axis in range(given_strides(layout, len(buffer.shape))):
            stride = LoopVar(f"{buffer.name}_stride{axis}", dtypes.int64)
            self.b.program.sizes.append(stride)
            found.append(e.read(stride))
        return (*found, e.index(1)) if layout == "rows" else tuple(found)

    def finish(self, results: Sequence[Slot], reused: Mapping[int, int]) -> None:
        """Write the outputs: those in memory of inputs last, as a step does carries."""
        kernels, outputs = Kernels(self.b, 0), self.b.program.outputs
        for k, slot in enumerate(results):
            if k not in reused:
                if len(outputs[k].shape) != slot.type.ndim:
                    outputs[k] = self.made_output(slot, outputs[k])
                kernels.fill(slot, Stored(slot.type, outputs[k]))
        updated = [carries.Carry(results[k].type, buffer=outputs[k]) for k in reused]
        carries.update(self.b, updated, [results[k] for k in reused])

    def made_output(self, slot: Slot, fresh: Buffer) -> Buffer:
        """The memory of an output whose size only the run knows: where the value is, if
        the program made that for it alone."""
        b, place = self.b, slot.place
        made = allocated(b.program.body)
        if isinstance(place, Stored) and not place.prefix and place.buffer in made:
            own = place.buffer
            swapped = [s for s in statements(b.program.body) if isinstance(s, Swap)]
            if own.space == "arena" and not any(own in (s.a, s.b) for s in swapped):
                b.program.arena.remove(own)
                own.space, own.name = "output", fresh.name
                return own
        fresh.shape = b.shape(slot.type)
        b.add(Allocate(fresh))
        return fresh

    def registers(self, slot: Slot) -> Registers:
        """A small value loaded into variables."""
        at = indices_of(slot.type)
        return Registers(slot.type, tuple(self.b.let(slot.at(i)) for i in at))

    def function(self, graph: Graph) -> Program:
        """The function that calls of `graph` run. It changes an operand in place of
        which a result differs in parts."""
        known = self.b.functions.get(graph)
        if known is None:
            known = _scheduled(graph, self.inner_builder(graph), _updated(graph), ())
            known.name += f"_{len(self.b.functions)}"
            self.b.functions[graph] = known
        if known not in self.b.program.functions:
            self.b.program.functions.append(known)
        return known

    def inner_builder(self, graph: Graph) -> Callable[[], Builder]:
        def build() -> Builder:
            inner = Builder(graph.name, self.b.target)
            inner.functions = self.b.functions
            return inner

        return build

    # --- regions ---

    def region(
        self,
        node: Node,
        region: Any,
        types: tuple[TensorType, ...],
        uses: list[int],
        hints: list[Buffer | None],
    ) -> list[Slot]:
        match region:
            case Inline():
                operands = [self.operand(o) for o in region.operands]
                results = self.inline(region.graph, operands)
                return [
                    self.b.slot(s.place, n) for s, n in zip(results, uses, strict=True)
                ]
            case Branch():
                return self.branch(region, types, uses, hints)
            case WhileLoop():
                return self.while_loop(node, region, types, uses)
            case CountedLoop():
                return self.counted_loop(node, region, types, uses, hints)
        raise CompileError(
            f"operator `{node.op.name}` lowers to `{type(region).__name__}`"
        )

    def operand(self, value: Slot | Size) -> Slot:
        """An operand of a region; a size is one as well."""
        if isinstance(value, Slot):
            return value
        return self.b.slot(Registers(SYMBOL_TYPE, (self.b.extent(value),)), 1)

    def enter(self, graph: Graph, operands: Sequence[Slot]) -> tuple[Liveness, Env]:
        """Slots of a subgraph's own for its inputs."""
        live = Liveness(graph)
        env = {
            var: self.b.slot(slot.place, live.count(var))
            for var, slot in zip(graph.inputs, operands, strict=True)
        }
        self.bind_symbols(graph, operands)
        return live, env

    def inline(
        self,
        graph: Graph,
        operands: Sequence[Slot],
        wanted: Sequence[Buffer | None] = (),
    ) -> list[Slot]:
        """A graph's statements in place; `wanted` are where its results had best be."""
        live, env = self.enter(graph, operands)
        hints: dict[Var, Buffer] = {}
        for arg, buffer in zip(graph.outputs, wanted, strict=False):
            if buffer is not None and isinstance(arg, Var):
                hints.setdefault(live.canonical(arg), buffer)
        return self.nodes(live, env, hints)

    def branch(
        self,
        region: Branch,
        types: tuple[TensorType, ...],
        uses: list[int],
        hints: list[Buffer | None],
    ) -> list[Slot]:
        """One list of statements a branch; their results meet in common places.

        A size that is another in each branch is a variable, which each sets before it
        makes memory for the result.
        """
        b = self.b
        bodies: list[list[Stmt]] = []
        results: list[list[Slot]] = []
        selector = region.selector.scalar
        sizes = {
            s: b.declare(e.index(0), "n")
            for s in free_symbols(*(n for t in types for n in t.shape))
            if s not in b.symbols
        }
        b.symbols.update({s: e.read(n) for s, n in sizes.items()})
        made_by_each = [
            not sizes.keys().isdisjoint(free_symbols(*t.shape)) for t in types
        ]
        wanted = [
            None
            if is_small(t)
            else b.temporary(t, allocate=False)
            if made
            else hint or b.temporary(t)
            for t, hint, made in zip(types, hints, made_by_each, strict=True)
        ]
        asked = [
            w if not m else None for w, m in zip(wanted, made_by_each, strict=True)
        ]
        for graph in region.branches:
            with b.into([]) as body:
                found = self.inline(graph, region.operands, asked)
                for type_, slot, buffer, made in zip(
                    types, found, wanted, made_by_each, strict=True
                ):
                    if made and buffer is not None:
                        self.allocate(type_, slot, buffer, sizes)
                results.append(found)
            bodies.append(body)
        merged = [
            self.merge(
                t,
                bodies,
                [r[k] for r in results],
                uses[k],
                wanted[k],
                made=hints[k] is None,
            )
            for k, t in enumerate(types)
        ]
        b.add(_choose(selector, bodies))
        for symbol, size in sizes.items():
            b.define(symbol, e.read(size))
        return merged

    def allocate(
        self,
        type_: TensorType,
        slot: Slot,
        buffer: Buffer,
        sizes: Mapping[Symbol, LoopVar],
    ) -> None:
        """Make memory for a value, of sizes that this branch alone knows."""
        for declared, found in zip(type_.shape, slot.type.shape, strict=True):
            symbol = plain_symbol(declared)
            if symbol is not None and symbol in sizes:
                self.b.assign(sizes[symbol], self.b.extent(found))
        self.b.add(Allocate(buffer))

    def merge(
        self,
        type_: TensorType,
        bodies: Sequence[list[Stmt]],
        slots: Sequence[Slot],
        uses: int,
        wanted: Buffer | None,
        *,
        made: bool,
    ) -> Slot:
        """A place for one result, written at the end of each branch: `wanted`, which
        was `made` for it or is someone's who asked for it."""
        if is_small(type_):
            zero = e.const(0, type_.dtype)
            at = indices_of(type_)
            variables = [self.b.declare(zero, "r") for _ in at]
            for body, slot in zip(bodies, slots, strict=True):
                with self.b.into(body):
                    for var, i in zip(variables, at, strict=True):
                        self.b.assign(var, slot.at(i))
            place: Place = Registers(type_, tuple(map(e.read, variables)))
            return self.b.slot(place, uses)
        places = [s.place for s in slots]
        first = places[0]
        if all(_same_memory(first, p) for p in places):
            if made and wanted is not None and not self.is_used(wanted, bodies):
                self.b.forget(wanted)
            return self.b.slot(first, uses)
        assert wanted is not None
        for body, slot in zip(bodies, slots, strict=True):
            with self.b.into(body):
                Kernels(self.b, 0).fill(slot, Stored(type_, wanted))
        return self.b.slot(Stored(type_, wanted), uses)

    def is_used(self, buffer: Buffer, bodies: Sequence[list[Stmt]]) -> bool:
        return any(buffer in buffers(s) for body in bodies for s in statements(body))

    # --- loops ---

    def hoist(
        self, live: Liveness, invariants: Mapping[Var, Slot]
    ) -> tuple[Env, list[Node]]:
        """Schedule, before a loop, the nodes of its body that no step changes."""
        env: Env = {
            var: self.b.slot(slot.place, live.count(var))
            for var, slot in invariants.items()
        }
        moved: list[Node] = []
        reads = reader(live.graph)
        for node in live.nodes:
            may_stop = effects(node) or node.graphs or not self.b.is_sized(node)
            if not may_stop and all(live.canonical(var) in env for var in reads(node)):
                self.node(node, live, env, {})
                moved.append(node)
        for slot in env.values():
            self.store_dear(slot)
        for node in live.nodes:
            if node not in moved and node.op is matmul_op:
                self.prepare_product(node, live, env)
        return env, moved

    def prepare_product(self, node: Node, live: Liveness, hoisted: Env) -> None:
        """Copy what each step would, of a product's operands that no step changes."""
        for matrix in node.args:
            slot = (
                hoisted.get(live.canonical(matrix)) if isinstance(matrix, Var) else None
            )
            if slot is not None and isinstance(slot.place, Pending):
                self.b.settle(slot)
            elif slot is not None and matrix is node.args[1] and has_few_rows(node):
                self.align(slot)

    def align(self, slot: Slot) -> None:
        """Copy an input, which may lie anywhere, to where vectors are loaded in one
        piece: worth it for what each step reads as fast as the caches give it."""
        place, size = slot.place, static_size(slot.type)
        if (
            isinstance(place, Stored)
            and place.buffer.space == "input"
            and size is not None
            and size * slot.type.dtype.itemsize <= LARGEST_COPY
        ):
            copy = Stored(slot.type, self.b.temporary(slot.type, "aligned"))
            Kernels(self.b, 0).fill(slot, copy)
            self.b.move(slot, copy)

    def loop_env(
        self, live: Liveness, hoisted: Env, variant: Mapping[Var, Place]
    ) -> Env:
        """Slots for a loop's body; called inside it."""
        env = {var: self.b.slot(s.place, max(s.uses, 0)) for var, s in hoisted.items()}
        for var, place in variant.items():
            env[var] = self.b.slot(place, live.count(var))
        return env

    def while_loop(
        self,
        node: Node,
        region: WhileLoop,
        types: tuple[TensorType, ...],
        uses: list[int],
    ) -> list[Slot]:
        b, token = self.b, object()
        graphs = (region.test, region.body)
        prepared = []
        before, carry = len(region.before), len(region.carry)
        for graph in graphs:
            self.bind_symbols(graph, region.before)
        inner = [v.type for v in region.body.inputs[before : before + carry]]
        slots = carries.start(b, region.carry, inner, region.after, token)
        for graph in graphs:
            outer = [*graph.inputs[:before], *graph.inputs[before + carry :]]
            invariants = dict(zip(outer, (*region.before, *region.after), strict=True))
            live = Liveness(graph)
            prepared.append((live, *self.hoist(live, invariants)))
        steps = None
        ticks = self.ticks(node, self.steps(region)) if region.ticks else None
        if region.max_steps is not None or ticks or types[carry:]:
            steps = b.declare(e.index(0), "steps")
        stacks = carries.stacks(b, types[carry:], steps, region.max_steps)

        def inside(k: int) -> list[Slot]:
            graph, (live, hoisted, moved) = graphs[k], prepared[k]
            own = graph.inputs[before : before + carry]
            carries.begin_step(b, slots, own)
            variant = {var: c.place for var, c in zip(own, slots, strict=True)}
            env = self.loop_env(live, hoisted, variant)
            return self.nodes(live, env, skip=moved)

        with b.loop_body([], token) as head:
            [test] = inside(0)
            condition = test.scalar
        with b.loop_body([], token) as body:
            if region.max_steps is not None:
                assert steps is not None
                limit = e.index(region.max_steps)
                full = e.compare("ge", e.read(steps), limit)
                b.add(Trap(full, b.site("limit", node.meta.get("number", 0)), (limit,)))
            results = inside(1)
            done = b.let(e.read(steps)) if steps is not None else e.index(0)
            if steps is not None:
                b.assign(steps, e.add(done, e.index(1)))
            carries.push(b, stacks, results[carry:], done)
            carries.update(b, slots, results[:carry])
            if ticks and steps is not None:
                ticks.step(e.read(steps))
        b.add(While(head, condition, body))
        if ticks and steps is not None:
            ticks.end(e.read(steps))
        stacked = carries.stacked(b, stacks, types[carry:], uses[carry:], steps)
        return carries.finish(b, slots, types[:carry], uses[:carry]) + stacked

    def steps(self, region: WhileLoop) -> Expr:
        """The number of steps, if it is known before the first; else -1."""
        if region.bounds is None:
            return e.index(-1)
        first, last = (
            e.index(int(x.value))
            if isinstance(x, Constant)
            else e.cast(self.operand(x).scalar, dtypes.int64)
            for x in region.bounds
        )
        return self.b.let(e.binary("max", e.sub(last, first), e.index(0)))

    def ticks(self, node: Node, total: Expr) -> Ticks:
        """How a loop tells of its steps."""
        site = self.b.site("progress", node.meta.get("number", 0))
        ticks = Ticks(self.b, site, total, is_outermost=not self.b.depth)
        ticks.step(e.index(0))
        return ticks

    def bind_symbols(self, graph: Graph, before: Sequence[Slot]) -> None:
        """Make the sizes that a subgraph knows by its symbols known here."""
        for var, slot in zip(graph.symbols, before, strict=False):
            assert var.node.symbol is not None
            self.b.define(var.node.symbol, slot.scalar)

    def counted_loop(
        self,
        node: Node,
        region: CountedLoop,
        types: tuple[TensorType, ...],
        uses: list[int],
        hints: list[Buffer | None],
    ) -> list[Slot]:
        b, token, graph = self.b, object(), region.body
        before, carry, xs = (len(region.before), len(region.carry), len(region.xs))
        self.bind_symbols(graph, region.before)
        types_inside = [v.type for v in graph.inputs[before : before + carry]]
        others = (*region.xs, *region.after)
        slots = carries.start(b, region.carry, types_inside, others, token)
        ys = [
            (t, hint or b.temporary(t, "ys"))
            for t, hint in zip(types[carry:], hints[carry:], strict=True)
        ]
        live = Liveness(graph)
        outer = [*graph.inputs[:before], *graph.inputs[before + carry + xs :]]
        invariants = dict(zip(outer, (*region.before, *region.after), strict=True))
        hoisted, moved = self.hoist(live, invariants)
        step = b.var(dtypes.int64, "step")
        length = b.extent(region.length)
        at = e.read(step)
        if region.reverse:
            at = e.sub(e.sub(length, e.index(1)), at)
        ticks = self.ticks(node, length) if region.ticks else None
        with b.loop_body([], token) as body:
            inner = graph.inputs[before : before + carry + xs]
            carries.begin_step(b, slots, inner[:carry])
            places = [c.place for c in slots]
            places += [
                row(slot, at, v.type)
                for slot, v in zip(region.xs, inner[carry:], strict=True)
            ]
            variant = dict(zip(inner, places, strict=True))
            env = self.loop_env(live, hoisted, variant)
            results = self.nodes(live, env, skip=moved)
            kernels = Kernels(b, 0)
            for slot, (t, buffer) in zip(results[carry:], ys, strict=True):
                row_type = t.with_shape(t.shape[1:])
                kernels.fill(slot, Stored(row_type, buffer, (at,)))
            carries.update(b, slots, results[:carry])
            if ticks:
                ticks.step(e.add(e.read(step), e.index(1)))
        binding = Binding("serial", region.unroll)
        b.add(For(step, length, body, region.independent, binding))
        if ticks:
            ticks.end(length)
        stacked = [
            b.slot(Stored(t, buffer), n)
            for (t, buffer), n in zip(ys, uses[carry:], strict=True)
        ]
        return carries.finish(b, slots, types[:carry], uses[:carry]) + stacked


def row(slot: Slot, at: Expr, type_: TensorType) -> Place:
    """`slot[at]` along the first axis."""
    place = slot.place
    if isinstance(place, Stored):
        return Stored(type_, place.buffer, (*place.prefix, at))
    cost = place.cost if isinstance(place, Pending) else 0
    depth = place.depth if isinstance(place, Pending) else 0
    element = e.element(slot, type_.dtype, (at, *axes(type_.ndim)))
    return Pending(type_, element, place.buffers, cost, depth, is_view=True)


def _choose(selector: Expr, bodies: Sequence[list[Stmt]]) -> Stmt:
    """A chain of branches on a bool or an integer."""
    if selector.dtype.kind == "b":
        return If(selector, bodies[1], bodies[0])
    statement: Stmt | None = None
    otherwise = bodies[-1]
    for k in range(len(bodies) - 2, -1, -1):
        test = e.compare("eq", selector, e.const(k, selector.dtype))
        statement = If(test, bodies[k], otherwise)
        otherwise = [statement]
    return statement or If(e.const(True, dtypes.bool_), otherwise)


def _same_memory(a: Place, b: Place) -> bool:
    return (
        isinstance(a, Stored)
        and isinstance(b, Stored)
        and a.buffer is b.buffer
        and a.prefix == b.prefix
        and a.buffer.space == "arena"
    )
