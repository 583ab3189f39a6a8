"""The reference interpreter: runs a program statement by statement.

It runs every binding according to its definition. The statements of a body run for a
list of *lanes*: one lane in serial code, `width` of them in a gang, where an `If` or a
`While` masks the lanes that do not take it. The iterations of a GPU axis are
generators, which take turns after every statement and wait for each other at barriers.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, TypeAlias

import numpy as np

from hopflow.errors import HopflowError, LoopIRError
from hopflow.loop_ir import scalars, walk
from hopflow.loop_ir.checked_memory import Allocator, NDArray, Storage
from hopflow.loop_ir.expr import Buffer, Expr, Var, condition_of
from hopflow.loop_ir.program import (
    Accumulate,
    Allocate,
    Assign,
    Barrier,
    Call,
    Copy,
    Declare,
    For,
    HostCall,
    If,
    Invoke,
    Let,
    Program,
    Ref,
    Stmt,
    Store,
    Swap,
    Tick,
    Trap,
    While,
)
from hopflow.loop_ir.routines import ROUTINES
from hopflow.loop_ir.verifier import verify

Steps: TypeAlias = Iterator[Barrier | None]
"""A run that pauses: after a statement (None) inside a GPU axis, or at a barrier."""
Host: TypeAlias = Callable[[int, Sequence[NDArray], Sequence[NDArray]], None]
"""Takes the site, the operands, and the results to be written."""

CHUNKS: Final = 4
"""The number of chunks into which the iterations of a loop over threads are cut."""

TURNS: Final = (1, 2, 8, 10_000)
"""How many statements an iteration of a GPU axis may run before another continues."""


class Trapped(HopflowError):
    """A program stopped at a `Trap`, or after a routine failed (with its status)."""

    def __init__(self, site: int, values: tuple[int, ...] = ()) -> None:
        self.site, self.values = site, values
        super().__init__(f"stopped at site {site} with {list(values)}")


class Lane:
    """A thread of control: its variables, and the memory of each buffer."""

    def __init__(
        self, outer: "Lane | None", memory: dict[Buffer, Storage], takes_turns: bool
    ) -> None:
        self.outer, self.memory, self.takes_turns = outer, memory, takes_turns
        self.vars: dict[Var, Any] = {}

    def fork(self, var: Var, position: int) -> "Lane":
        """Return a lane of one iteration: its variables, and those of this lane."""
        lane = Lane(self, self.memory, self.takes_turns)
        lane.vars[var] = np.int64(position)
        return lane

    def read(self, var: Var) -> Any:
        return self._owner(var).vars[var]

    def assign(self, var: Var, value: Any) -> None:
        self._owner(var).vars[var] = value

    def _owner(self, var: Var) -> "Lane":
        lane = self
        while var not in lane.vars:
            assert lane.outer is not None
            lane = lane.outer
        return lane


def run(
    program: Program,
    sizes: Sequence[int],
    inputs: Sequence[NDArray],
    *,
    seed: int = 0,
    offsets: Mapping[Buffer, Expr] | None = None,
    host: Host | None = None,
) -> list[NDArray]:
    """Run `program` and return its outputs.

    Args:
        sizes: One for each of the program's sizes.
        inputs: One for each of its inputs, of its shape and dtype.
        seed: Decides the order of concurrent iterations: of threads and GPU axes.
        offsets: The offsets of buffers in one arena. Buffers that are left out, by
            default all, have memory of their own.
        host: The function that each `HostCall` and each `Tick` calls.

    Raises:
        Trapped: The test of a `Trap` held, or a routine failed.
        MemoryError: A size is negative.
        LoopIRError: The program breaks a rule of the Loop IR: one that the verifier
            checks, or one that is only checked at runtime (an index out of range, a
            read of uninitialised memory, a barrier that some iterations miss).
    """
    verify(program)
    interpreter = _Interpreter(seed, host)
    lane = interpreter.load(program, sizes, inputs, offsets or {})
    with np.errstate(all="ignore"):
        for _ in interpreter.body(program.body, [lane]):
            pass
    outputs = [(b, lane.memory[b]) for b in program.outputs]
    for buffer, storage in outputs:
        storage.check_all_written(buffer)
    return [storage.array for _, storage in outputs]


class _Interpreter:
    def __init__(self, seed: int, host: Host | None) -> None:
        self.host = host
        self.random = random.Random(seed)
        self.allocator = Allocator()
        self.shared: list[Buffer] = []
        self.first_site = 0  # of the running function
        self._compiled: dict[Expr, Callable[[Lane], Any]] = {}
        self._simple: dict[type, Callable[[Any, Lane], None]] = {
            Let: self._define,
            Declare: self._define,
            Assign: self._assign,
            Accumulate: self._accumulate,
            Store: self._store,
            Copy: self._copy,
            Swap: self._swap,
            Call: self._call,
            HostCall: self._host_call,
            Tick: self._tick,
            Invoke: self._invoke,
            Trap: self._trap,
            Allocate: self._allocate,
        }

    def load(
        self,
        program: Program,
        sizes: Sequence[int],
        inputs: Sequence[NDArray],
        offsets: Mapping[Buffer, Expr],
    ) -> Lane:
        """Return the lane in which the program's body runs."""
        lane = Lane(None, {}, takes_turns=False)
        for var, size in zip(program.sizes, sizes, strict=True):
            lane.vars[var] = np.int64(size)
        for buffer, array in zip(program.inputs, inputs, strict=True):
            shape = self.shape(buffer, lane)
            if array.shape != shape or array.dtype != buffer.dtype.dtype:
                raise LoopIRError(
                    f"input `{buffer.name}` must be {buffer.dtype}{list(shape)}, "
                    f"and is {array.dtype}{list(array.shape)}"
                )
            if buffer.space == "output":  # a donated input
                array = array.copy()
            lane.memory[buffer] = self.allocator.wrap(array)
        for buffer in program.constants:
            lane.memory[buffer] = self.allocator.wrap(np.asarray(buffer.data))
        allocated = walk.allocated(program.body)
        for buffer in (*program.outputs, *program.arena):
            if buffer in allocated:
                continue
            shape = self.shape(buffer, lane)
            if buffer not in offsets and buffer not in lane.memory:
                lane.memory[buffer] = self.allocator.fresh(buffer, shape)
        shapes = {b: self.shape(b, lane) for b in offsets}
        positions = {b: int(self.value(at, lane)) for b, at in offsets.items()}
        lane.memory.update(self.allocator.laid_out(shapes, positions))
        self.shared = [b for b in program.arena if b.space == "shared"]
        return lane

    def shape(self, buffer: Buffer, lane: Lane) -> tuple[int, ...]:
        return tuple(int(self.value(extent, lane)) for extent in buffer.shape)

    # --- expressions

    def value(self, expr: Expr, lane: Lane) -> Any:
        """Return the current value of `expr` in `lane`."""
        function = self._compiled.get(expr)
        if function is None:
            function = self._compiled[expr] = _compile(expr)
        return function(lane)

    def values(self, exprs: Sequence[Expr], lane: Lane) -> list[Any]:
        return [self.value(e, lane) for e in exprs]

    # --- statements that each lane runs independently

    def _define(self, s: Let | Declare, lane: Lane) -> None:
        lane.vars[s.var] = self.value(s.value, lane)

    def _assign(self, s: Assign, lane: Lane) -> None:
        lane.assign(s.var, self.value(s.value, lane))

    def _accumulate(self, s: Accumulate, lane: Lane) -> None:
        combine = scalars.combine(s.combine, s.var.dtype)
        lane.assign(s.var, combine(lane.read(s.var), self.value(s.value, lane)))

    def _store(self, s: Store, lane: Lane) -> None:
        at = self.values(s.indices, lane)
        lane.memory[s.buffer].store(s.buffer, at, self.value(s.value, lane))

    def _copy(self, s: Copy, lane: Lane) -> None:
        source = lane.memory[s.source].read_part(s.source, ())
        target = lane.memory[s.target].write_part(s.target, ())
        if target.shape != source.shape:
            raise LoopIRError(
                f"copy {s.target.name} <- {s.source.name}: the shapes "
                f"{list(target.shape)} and {list(source.shape)} differ"
            )
        target[...] = source

    def _swap(self, s: Swap, lane: Lane) -> None:
        memory = lane.memory
        memory[s.a], memory[s.b] = memory[s.b], memory[s.a]

    def _allocate(self, s: Allocate, lane: Lane) -> None:
        shape = self.shape(s.buffer, lane)
        if any(n < 0 for n in shape):
            raise MemoryError(f"`{s.buffer.name}` of shape {list(shape)}")
        if s.keeps:
            lane.memory[s.buffer].grow(shape[0])
        else:
            lane.memory[s.buffer] = self.allocator.fresh(s.buffer, shape)

    def _trap(self, s: Trap, lane: Lane) -> None:
        if self.value(s.test, lane):
            values = tuple(int(v) for v in self.values(s.values, lane))
            raise Trapped(self.first_site + s.site, values)

    def _call(self, s: Call, lane: Lane) -> None:
        routine = ROUTINES[s.routine]
        rest = [a for a in s.args if not isinstance(a, Ref)]
        numbers = [int(v) for v in self.values(rest, lane)]
        shapes = routine.shapes(numbers[: len(routine.scalars)])
        refs = [a for a in s.args if isinstance(a, Ref)]
        arrays = []
        for role, ref, shape in zip(routine.arrays, refs, shapes, strict=True):
            if role.role in ("in", "inout"):
                part = self._read_part(ref, lane)
            if role.role != "in":
                part = self._write_part(ref, lane)
            if part.size != np.prod(shape, dtype=np.int64):
                raise LoopIRError(
                    f"{s.routine}: `{role.name}` must be {list(shape)}, and "
                    f"`{ref.buffer.name}` gives {list(part.shape)}"
                )
            arrays.append(part.reshape(shape))
        for k in routine.writes:
            others = [*arrays[:k], *arrays[k + 1 :]]
            if any(np.may_share_memory(arrays[k], other) for other in others):
                raise LoopIRError(f"{s.routine}: `{refs[k].buffer.name}` overlaps")
        status = routine.reference(arrays, numbers)
        if status != 0 and s.site is not None:
            raise Trapped(self.first_site + s.site, (status,))

    def _host_call(self, s: HostCall, lane: Lane) -> None:
        if self.host is None:
            raise LoopIRError("the program calls Python, and was given no `host`")
        self.host(self.first_site + s.site, *self._parts(s, lane))

    def _invoke(self, s: Invoke, lane: Lane) -> None:
        operands, results = self._parts(s, lane)
        sizes = [int(n) for n in self.values(s.sizes, lane)]
        before = self.first_site, self.shared
        self.first_site += s.site
        inner = self.load(s.function, sizes, operands, {})
        for _ in self.body(s.function.body, [inner]):
            pass
        self.first_site, self.shared = before
        for result, buffer in zip(results, s.function.outputs, strict=True):
            inner.memory[buffer].check_all_written(buffer)
            result[...] = inner.memory[buffer].array

    def _parts(
        self, s: HostCall | Invoke, lane: Lane
    ) -> tuple[list[NDArray], list[NDArray]]:
        """Return the arrays that are a call's operands and results."""
        operands = [self._read_part(ref, lane) for ref in s.operands]
        return operands, [self._write_part(ref, lane) for ref in s.results]

    def _read_part(self, ref: Ref, lane: Lane) -> NDArray:
        at, rows = self.values(ref.at, lane), self._rows(ref, lane)
        return lane.memory[ref.buffer].read_part(ref.buffer, at, rows)

    def _write_part(self, ref: Ref, lane: Lane) -> NDArray:
        at, rows = self.values(ref.at, lane), self._rows(ref, lane)
        return lane.memory[ref.buffer].write_part(ref.buffer, at, rows)

    def _rows(self, ref: Ref, lane: Lane) -> int | None:
        return None if ref.rows is None else int(self.value(ref.rows, lane))

    def _tick(self, s: Tick, lane: Lane) -> None:
        if self.host is None:
            raise LoopIRError("the program tells its progress, and was given no `host`")
        progress = [np.asarray(x) for x in self.values((s.done, s.total), lane)]
        if s.ends or progress[0] != progress[1]:
            self.host(self.first_site + s.site, progress, [])

    # --- control flow

    def body(self, statements: Sequence[Stmt], lanes: list[Lane]) -> Steps:
        """Run each statement for all `lanes` before the next one."""
        for s in statements:
            simple = self._simple.get(type(s))
            if simple is not None:
                for lane in lanes:
                    simple(s, lane)
            elif isinstance(s, For):
                yield from self._for(s, lanes)
            elif isinstance(s, While):
                yield from self._while(s, lanes)
            elif isinstance(s, If):
                yield from self._if(s, lanes)
            elif isinstance(s, Barrier):
                yield s
            if lanes[0].takes_turns:
                yield None

    def _if(self, s: If, lanes: list[Lane]) -> Steps:
        taken = [bool(self.value(s.test, lane)) for lane in lanes]
        for body, side in ((s.then, True), (s.else_, False)):
            active = [lane for lane, t in zip(lanes, taken, strict=True) if t is side]
            if active:
                yield from self.body(body, active)

    def _while(self, s: While, lanes: list[Lane]) -> Steps:
        while lanes:
            yield from self.body(s.head, lanes)
            lanes = [lane for lane in lanes if self.value(s.test, lane)]
            if lanes:
                yield from self.body(s.body, lanes)

    def _for(self, s: For, lanes: list[Lane]) -> Steps:
        extents = [(lane, int(self.value(s.extent, lane))) for lane in lanes]
        longest = max(n for _, n in extents)
        match s.binding.kind:
            case "gang":
                yield from self._gang(s, extents, longest)
            case "grid" | "block" | "thread":
                for lane, n in extents:
                    yield from self._axis(s, lane, n)
            case kind:
                order = list(range(longest))
                if kind == "threads":
                    order = self._shuffled_chunks(order)
                for i in order:
                    active = [lane for lane, n in extents if i < n]
                    for lane in active:
                        lane.vars[s.var] = np.int64(i)
                    yield from self.body(s.body, active)

    def _shuffled_chunks(self, order: list[int]) -> list[int]:
        size = max(1, -(-len(order) // CHUNKS))
        chunks = [order[i : i + size] for i in range(0, len(order), size)]
        self.random.shuffle(chunks)
        return [i for chunk in chunks for i in chunk]

    def _gang(self, s: For, extents: list[tuple[Lane, int]], longest: int) -> Steps:
        for start in range(0, longest, s.binding.width):
            stop = start + s.binding.width
            gang = [
                lane.fork(s.var, i)
                for lane, n in extents
                for i in range(start, min(stop, n))
            ]
            yield from self.body(s.body, gang)

    # --- GPU axes

    def _axis(self, s: For, outer: Lane, extent: int) -> Steps:
        """Run all iterations of a GPU axis concurrently, in a random order."""
        lanes = [self._iteration(s, outer, i) for i in range(extent)]
        running = {i: self.body(s.body, [lane]) for i, lane in enumerate(lanes)}
        waiting: dict[int, Barrier] = {}
        while running:
            ready = [i for i in running if i not in waiting]
            if not ready:
                yield from self._arrived(
                    s, set(waiting.values()), len(waiting) == extent
                )
                waiting.clear()
                continue
            self.random.shuffle(ready)
            for i in ready:
                step = self._turn(running[i])
                if isinstance(step, Barrier):
                    waiting[i] = step
                elif step == "done":
                    del running[i]
            if outer.takes_turns:
                yield None
        self._check_swaps(s, outer, lanes)

    def _turn(self, iteration: Steps) -> "Barrier | Literal['done'] | None":
        """Continue one iteration for a random while, to a barrier at most."""
        for _ in range(self.random.choice(TURNS)):
            step = next(iteration, "done")
            if step is not None:
                return step  # type: ignore[return-value]
        return None

    def _iteration(self, s: For, outer: Lane, position: int) -> Lane:
        lane = outer.fork(s.var, position)
        lane.takes_turns = True
        lane.memory = dict(outer.memory)
        if s.binding.kind == "grid":
            for b in self.shared:
                lane.memory[b] = self.allocator.fresh(b, self.shape(b, lane))
        return lane

    def _arrived(self, s: For, barriers: set[Barrier], all_wait: bool) -> Steps:
        """Continue iterations that all wait at a barrier, after those of the outer axes
        if the barrier is for these too."""
        if not all_wait or len(barriers) > 1:
            raise LoopIRError(
                f"not all iterations of `{s.var.name}` ({s.binding.kind}) arrive at "
                "the same barrier"
            )
        [barrier] = barriers
        if barrier.scope != s.binding.kind:
            yield barrier

    def _check_swaps(self, s: For, outer: Lane, lanes: list[Lane]) -> None:
        """Adopt the buffers that all iterations have swapped in the same way."""
        if not lanes:
            return
        buffers = [b for b in outer.memory if b not in self.shared]
        for b in buffers:
            if len({id(lane.memory[b]) for lane in lanes}) > 1:
                raise LoopIRError(
                    f"the iterations of `{s.var.name}` do not swap `{b.name}` alike"
                )
            outer.memory[b] = lanes[0].memory[b]


def _compile(expr: Expr) -> Callable[[Lane], Any]:
    """Return `expr` as a function of a lane, which computes each shared node once."""
    order = walk.nodes(expr)
    slots = {node: slot for slot, node in enumerate(order)}
    steps = [(_step(node), [slots[a] for a in node.args]) for node in order]

    def evaluate(lane: Lane) -> Any:
        values: list[Any] = []
        for step, args in steps:
            values.append(step(lane, *[values[a] for a in args]))
        return values[-1]

    return evaluate


def _step(node: Expr) -> Callable[..., Any]:
    """Return `node` as a function of a lane and the values of its operands."""
    attr = node.attr
    if node.op == "const":
        value = scalars.scalar(attr, node.dtype)
        return lambda _: value
    if node.op == "var":
        return lambda lane: lane.read(attr)
    if node.op == "load" and condition_of(node) is not None:
        zero = scalars.scalar(0, node.dtype)
        return lambda lane, *args: (
            lane.memory[attr].load(attr, args[:-1]) if args[-1] else zero
        )
    if node.op == "load":
        return lambda lane, *at: lane.memory[attr].load(attr, at)
    function = scalars.operation(node)
    return lambda _, *args: function(*args)
