"""Planted faults, which `check` must find: compilers have had each of them.

with MUTANTS["swapped carry"].planted():
    ...     # the library is wrong
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import reduce
from math import prod
from types import MappingProxyType, SimpleNamespace
from typing import Any, Final

import numpy as np

from hopflow import dtypes
from hopflow.autograd import preaccumulation, region_vjp, rule_cache, rules
from hopflow.batching import graphs
from hopflow.batching import operators as batched_operators
from hopflow.compiler import entry_sizes, pipeline
from hopflow.compiler.cpu import gang, interleaving, lanes, transposition, vector
from hopflow.compiler.cpu.interleaving import Groups, Member
from hopflow.compiler.cpu.vector import VectorLoop
from hopflow.compiler.interface import Interface
from hopflow.compiler.kernel_passes import (
    branches,
    checks,
    counters,
    hoist,
    masked_updates,
    positions,
    split,
    substitution,
)
from hopflow.compiler.llvm.memory import Memory
from hopflow.compiler.memory import allocations
from hopflow.compiler.memory.live_ranges import LiveRanges
from hopflow.compiler.passes import PASSES
from hopflow.compiler.schedule import (
    blocked_sums,
    blocks,
    carries,
    coalesce,
    contract,
    copies,
    expansion,
    groups,
    privatize,
    register_tiles,
    rotations,
    row_steps,
    rows_in_registers,
    scalar_replacement,
    short_states,
    threads,
    unroll_and_jam,
    unswitch,
)
from hopflow.config import config
from hopflow.dtypes import DType
from hopflow.graph.core import Graph, Var
from hopflow.graph.forwarding import first_same
from hopflow.graph.types import Shape, TensorType, same_size
from hopflow.hops import invoke_subgraph, replay, subgraphs
from hopflow.hops.scan import Scan
from hopflow.loop_ir import expr as e
from hopflow.loop_ir import interpreter
from hopflow.loop_ir.expr import Buffer, Expr
from hopflow.loop_ir.expr import Var as LoopVar
from hopflow.loop_ir.program import For, Program, Stmt, Store, Swap
from hopflow.ops import opdef, views
from hopflow.ops.manipulation import roll
from hopflow.ops.opdef import OPERATIONS
from hopflow.symbolic.size import Symbol, evaluate
from hopflow.symbolic.terms import OPERATIONS as OPERATIONS_OF_SIZES
from hopflow.tensor import aligned
from hopflow.testing.strategies import ALIASING
from hopflow.trace.outside import guard
from hopflow.trace.tracer import Tracer
from hopflow.zeros import unbroadcast

Patches = Sequence[tuple[Any, str, Any]]
"""(object, attribute, value)."""


@dataclass(frozen=True)
class Mutant:
    """A fault, and the parameters of programs that find it.

    patches         makes the attributes to replace while the fault is planted
    executions      the executions that have the fault
    transforms      the transforms that find it
    kind, options   the arguments of `programs`
    """

    patches: Callable[[], Patches]
    executions: Sequence[str]
    transforms: Sequence[str] = ("value",)
    kind: str = "exact"
    options: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    @contextmanager
    def planted(self) -> Iterator[None]:
        """Plant the fault for the block; caches are cleared before and after it."""
        patches = self.patches()
        originals = [getattr(holder, name) for holder, name, _ in patches]
        _forget()
        try:
            for holder, name, value in patches:
                _set(holder, name, value)
            yield
        finally:
            for (holder, name, _), value in zip(patches, originals, strict=True):
                _set(holder, name, value)
            _forget()


def _forget() -> None:
    """Clear the caches that depend on patched code."""
    pipeline.clear_cache()
    for cache in (
        opdef._promoted,
        opdef._inferred,
        rule_cache._memo,
        graphs._memo,
        invoke_subgraph._cache,
    ):
        cache.clear()


def _set(holder: Any, name: str, value: Any) -> None:
    if isinstance(holder, type):
        setattr(holder, name, value)
    else:  # records of operations are frozen
        object.__setattr__(holder, name, value)


# --- faults of the compiler -----------------------------------------------------------


def _with_pass(change: Callable[[Graph], None]) -> Callable[[], Patches]:
    """Return the patch that adds a compiler pass, which changes graphs."""

    def run(graph: Graph) -> Graph:
        change(graph)
        for node in graph.nodes:
            for inner in node.graphs.values():
                run(inner)
        return graph

    return lambda: [(pipeline, "PASSES", (run, *PASSES))]


def _swap_carry(graph: Graph) -> None:
    """Swap two leaves of a carry, but never a counter, which ends its loop."""
    for node in graph.nodes:
        if node.op is not None and node.op.name == "while_loop":
            body = node.params["body"]
            outputs = list(body.outputs)
            first = int(outputs[0].type == TensorType(dtypes.int64))
            for k, other in enumerate(outputs[first:], first):
                if other.type == outputs[first].type and other is not outputs[first]:
                    outputs[first], outputs[k] = other, outputs[first]
                    body.outputs = tuple(outputs)
                    break


def _lift_wrongly(graph: Graph) -> None:
    """Replace the last capture of a loop by another value of the same type."""
    for node in graph.nodes:
        if node.op is None or node.op.name not in ("while_loop", "scan"):
            continue
        *others, last = node.args
        if len(node.args) > len(node.params["body"].outputs):
            like = [a for a in others if a.type == last.type and a is not last]
            node.args = (*others, (like or [last])[0])


def _stale_cache() -> Patches:
    def key(graph: Graph) -> str:
        """Return a key without the numbers of a graph and the order of its nodes."""
        operations = sorted(str(n.op and n.op.name) for n in graph.nodes)
        types = [v.type for v in (*graph.inputs, *graph.outputs)]
        return f"{operations} {types}"

    return [(pipeline, "structural_hash", key)]


def _other_side() -> Patches:
    right = branches._side

    def side(*args: Any, holds: bool) -> Any:
        return right(*args, holds=not holds)

    return [(branches, "_side", side)]


def _mask_slip() -> Patches:
    right, right_one_by_one = VectorLoop.mask, VectorLoop._one_by_one

    def one_by_one(self: VectorLoop, start: str, stop: str, trips: Expr) -> None:
        """Omit the last lane where the target has no masks."""
        if start.startswith("%") or stop.startswith("%"):
            f = self.emitter.f
            left = f.emit(f"sub i64 {stop}, {start}")
            is_short = f.emit(f"icmp sgt i64 {left}, 2")
            before = f.emit(f"sub i64 {stop}, 1")
            last = f.emit(f"select i1 {is_short}, i64 {before}, i64 {stop}")
        else:
            last = str(int(stop) - (int(stop) - int(start) > 2))
        right_one_by_one(self, start, last, trips)

    def mask(self: VectorLoop, position: str, stop: str) -> str:
        """Omit the last lane, but never the only one; see `VectorLoop._rest`."""
        if position.startswith("%") or stop.startswith("%"):
            return right(self, position, self.emitter.f.emit(f"sub i64 {stop}, 1"))
        lanes = int(stop) - int(position)
        return right(self, position, str(int(stop) - (lanes > 2)))

    # Guard pages poison memory, so that unwritten elements are the same in each run.
    return [
        (VectorLoop, "mask", mask),
        (VectorLoop, "_one_by_one", one_by_one),
        (config, "guard_pages", True),
    ]


def _idle_lane() -> Patches:
    right = interpreter._Interpreter._gang

    def gang(self: Any, s: For, extents: Any, longest: int) -> Any:
        """Omit the last lane of a gang that is not full."""
        rest = longest % s.binding.width
        fewer = [(lane, n - (rest > 1 and n == longest)) for lane, n in extents]
        return right(self, s, fewer, longest)

    return [(interpreter._Interpreter, "_gang", gang)]


def _busy_lane() -> Patches:
    def change(self: gang.Part, var: LoopVar, value: str, keeps: bool) -> None:  # noqa: ARG001
        """In all lanes, those that are off too."""
        self.set(var, value)

    return [(gang.Part, "change", change)]


def _of_two_minds() -> Patches:
    right = entry_sizes.call_sizes

    def call_sizes(graph: Graph, program: Interface, shapes: Any) -> Any:
        """Compute the sizes for the program in 64 bits, and powers of floats by
        logarithms, but the shapes of results exactly."""
        exact = right(graph, program, shapes)

        def sizes(*values: int) -> Any:
            _, out_shapes = exact(*values)
            numbers = dict(zip(program.symbols, map(np.int64, values), strict=True))
            derived = [
                evaluate(d.size, numbers.__getitem__, np.int64, _WRAPPED)
                for d in program.derived
            ]
            return tuple(map(int, derived)), out_shapes

        return sizes

    return [(pipeline, "call_sizes", call_sizes)]


def _power(x: Any, y: Any) -> Any:
    return np.exp(y * np.log(np.float64(x)))


_WRAPPED: Final[Mapping[str, Callable[..., Any]]] = {
    **OPERATIONS_OF_SIZES,
    "floor": lambda x: np.int64(np.floor(x)),
    "**.": _power,
}


def _misplaced() -> Patches:
    right = Memory.linear

    def linear(self: Memory, buffer: Buffer, at: Sequence[Expr]) -> Expr:
        """Address a part of a reshaped batch as if it had no other axes."""
        if buffer.strides is None and any(position.op == "rem" for position in at):
            buffer = replace(buffer, shape=buffer.shape[: len(at)])
        return right(self, buffer, at)

    return [(Memory, "linear", linear)]


def _one_late(holder: Any, name: str) -> Patches:
    """Add one to the position or the number that a function returns."""
    right = getattr(holder, name)

    def later(*args: Any, **options: Any) -> Expr | None:
        value: Expr | None = right(*args, **options)
        return None if value is None else e.add(value, e.index(1))

    return [(holder, name, later)]


def _lost_block() -> Patches:
    right = blocks.over_blocks

    def over_blocks(number: LoopVar, loop: For, size: int, *rest: Any) -> For:
        """Omit the last block, if it is not a whole one."""
        every = right(number, loop, size, *rest)
        whole = e.div(loop.extent, e.index(size))
        return replace(every, extent=e.binary("max", whole, e.index(1)))

    return [(threads, "over_blocks", over_blocks), _defined_results()]


def _without_last(number: LoopVar, loop: For, size: Any, *rest: Any) -> For:
    """Omit the last block, even if it is a whole one."""
    every = blocks.over_blocks(number, loop, size, *rest)
    return replace(every, extent=e.sub(every.extent, e.index(1)))


def _first_element() -> Patches:
    right = preaccumulation._unit

    def unit(tangents: Sequence[Any], column: Any) -> list[Any]:
        """Take each column of a Jacobian for the first element of its operand."""
        first = column._replace(element=(0,) * len(column.element))
        return right(tangents, first)

    return [(preaccumulation, "_unit", unit)]


def _defined_results() -> tuple[Any, str, Any]:
    """Return a patch that fills the memory of results before a kernel writes them.

    Where a fault leaves elements unwritten, memory that NumPy had used before may hold
    the right ones: the same program would be wrong once, and right the next time.
    """
    right = aligned.aligned_empty

    def filled(shape: Sequence[int], dtype: np.dtype[Any]) -> Any:
        array = right(shape, dtype)
        array[...] = 90
        return array

    return pipeline, "aligned_empty", filled


def _lost_part() -> Patches:
    right = threads._in_parts

    def in_parts(var: LoopVar, loop: For, program: Program) -> For:
        """Combine the results of all blocks but the last one."""
        every = right(var, loop, program)
        return replace(every, extent=e.sub(every.extent, e.index(1)))

    return [(threads, "_in_parts", in_parts)]


def _columns_for_rows() -> Patches:
    right = interleaving.transposed
    return [(lanes, "transposed", lambda *args: right(*args)[::-1])]


def _lost_row_of_a_block() -> Patches:
    right = transposition.transpose

    def transpose(f: Any, dtype: Any, size: int, *rest: Any) -> None:
        """Transpose all rows of a block but the last one."""
        source, target, rows = rest
        fewer = f.emit(f"call i64 @llvm.smin.i64(i64 {rows}, i64 {size - 1})")
        right(f, dtype, size, source, target, fewer)

    return [(vector, "transpose", transpose)]


def _other_end() -> Patches:
    right = Groups._find_strided

    def find(self: Groups, buffer: Buffer, at: Any) -> Member | None:
        """Count the members of a group from its other end, if steps are negative."""
        member = right(self, buffer, at)
        if member is None or not member.group.is_reversed:
            return member
        return Member(member.group, member.group.factor - 1 - member.number)

    return [(Groups, "_find_strided", find)]


def _lost_rows() -> Patches:
    right = coalesce._one_loop

    def one_loop(nest: Sequence[For], target: Any) -> For:
        """Make a loop as long as the outermost and the innermost loop of a nest."""
        extent = e.mul(nest[0].extent, nest[-1].extent)
        return replace(right(nest, target), extent=extent)

    return [(coalesce, "_one_loop", one_loop)]


def _other_length() -> Patches:
    right = coalesce._one_loop

    def one_loop(nest: Sequence[For], target: Any) -> For:
        """Divide positions by the extent of the loop around the innermost one, if it is
        the longer one: all positions are within the array then."""
        *outer, innermost = nest
        if outer[-1].extent.attr <= innermost.extent.attr:
            return right(nest, target)
        extent = reduce(e.mul, [loop.extent for loop in nest])
        shifted = [*outer, replace(innermost, extent=outer[-1].extent)]
        return replace(right(shifted, target), extent=extent)

    return [(coalesce, "_one_loop", one_loop)]


def _lost_step() -> Patches:
    right = expansion.Expansion._add_steps

    def add_steps(self: expansion.Expansion, loop: For) -> bool:
        """Omit the last step of a row."""
        fewer = e.index(loop.extent.attr - 1)
        return right(self, replace(loop, extent=fewer))

    return [(expansion.Expansion, "_add_steps", add_steps), _defined_results()]


def _first_copy() -> Patches:
    right = copies.copied
    first: dict[Stmt, Expr] = {}

    def copied(statement: Stmt, values: dict[LoopVar, Expr], suffix: str) -> Stmt:
        """Let all copies store what the first one does."""
        copy = right(statement, values, suffix)
        if isinstance(copy, Store):
            copy = replace(copy, value=first.setdefault(statement, copy.value))
        return copy

    return [(where, "copied", copied) for where in (expansion, unroll_and_jam, groups)]


def _one_memory(of: Callable[[str], str]) -> Patches:
    right, grouped = groups._copy, groups.in_groups
    copies_of: dict[tuple[Buffer, str], Buffer] = {}

    def copy(buffer: Buffer, suffix: str) -> Buffer:
        """Let some rows of the tiles of a loop share what is private to each."""
        return copies_of.setdefault((buffer, of(suffix)), right(buffer, suffix))

    def in_groups(*args: Any) -> groups.Groups | None:
        found = grouped(*args)
        return found and found._replace(buffers=[*dict.fromkeys(found.buffers)])

    return [(groups, "_copy", copy), (register_tiles, "in_groups", in_groups)]


def _far_as_near() -> Patches:
    right = scalar_replacement._Positions.distance

    def distance(self: Any, load: Expr, store: Store) -> int | None:
        """Take what was stored further back for what was stored last."""
        return right(self, load, store) and 1

    return [(scalar_replacement._Positions, "distance", distance)]


def _lost_rest() -> Patches:
    right = rotations._unrolled

    def unrolled(loop: For, count: int) -> list[Stmt]:
        """Leave out the steps that remain after all turns of a rotation."""
        *before, last = right(loop, count)
        is_rest = isinstance(last, For) and last.var.name.endswith("_rest")
        return before if is_rest else [*before, last]

    return [(rotations, "_unrolled", unrolled)]


def _without_axis() -> Patches:
    right = row_steps.key_of

    def key(buffer: Buffer, at: Any, row: LoopVar) -> Any:
        """Take two columns for one."""
        found = right(buffer, at, row)
        if found is None:
            return None
        return buffer, tuple([None if i is None else i // 2 * 2 for i in found[1]])

    return [(row_steps, "key_of", key)]


def _assigned_in_turn() -> Patches:
    right = row_steps._exchanged

    def exchanged(*args: Any) -> Any:
        """Assign each element before the next one is read."""
        found = right(*args)
        half = len(found or ()) // 2
        return found and [
            s for pair in zip(found[:half], found[half:], strict=True) for s in pair
        ]

    return [(row_steps, "_exchanged", exchanged)]


def _other_case_of_rows() -> Patches:
    right = expansion.Expansion._add_sides

    def add_sides(self: expansion.Expansion, test: Any, then: Any, else_: Any) -> bool:
        """Select what the other side of a branch assigns."""
        return right(self, test, else_, then)

    return [(expansion.Expansion, "_add_sides", add_sides)]


def _rows_last_first() -> Patches:
    right = interleaving.Groups._store_rows

    def store_rows(self: Any, run: Any) -> None:
        known = {*self.stores}
        right(self, run)
        for store in self.stores.keys() - known:
            group, number = self.stores[store]
            self.stores[store] = interleaving.Member(group, group.factor - 1 - number)

    return [(interleaving.Groups, "_store_rows", store_rows)]


def _mirrored_state() -> Patches:
    right = short_states._element

    def element(key: Any) -> Any:
        """Keep the last element of a state in the variable of the first one."""
        buffer, at = key
        sizes = [extent.attr for extent in buffer.shape]
        mirrored = tuple([n - 1 - i for n, i in zip(sizes, at, strict=True)])
        return right((buffer, mirrored))

    return [(short_states, "_element", element)]


def _same_mask() -> Patches:
    right = masked_updates._choices

    def choices(equation: Any) -> Iterator[Any]:
        """Take the test itself where an update is what a select has elsewhere."""
        found = [*right(equation)]
        yield from (choice._replace(test=found[0].test) for choice in found)

    return [(masked_updates, "_choices", choices)]


def _last_of_equals() -> Patches:
    """Replace the best element by one that equals it."""
    return [(positions, "_NOT_BEYOND", {"max": "lt", "min": "gt"})]


def _row_of_shared() -> Patches:
    def same_value(keys: Any) -> list[int]:
        """Take an operand that all examples share for one of which each has a row."""
        return first_same(value for value, _ in keys)

    return [(batched_operators, "first_same", same_value)]


def _lost_mask() -> Patches:
    right = masked_updates._mask

    def mask(choice: Any, update: Any) -> Expr | None:
        """Keep all elements of an update."""
        found = right(choice, update)
        return None if found is None else e.const(True, dtypes.bool_)

    return [(masked_updates, "_mask", mask)]


def _copy_of_another() -> Patches:
    right = masked_updates._is_copy

    def is_copy(equation: Any, base: Any) -> bool:
        """Accept a copy of any array."""
        elements = getattr(equation and equation.definition, "elements", ())
        arrays = [x.attr for x in elements if x.op == "element"]
        return right(equation, [*arrays, base][0])

    return [(masked_updates, "_is_copy", is_copy)]


def _other_case() -> Patches:
    right = unswitch._side

    def side(body: Sequence[Stmt], test: Expr, *, holds: bool) -> list[Stmt]:
        """Exchange the cases of a test."""
        return right(body, test, holds=not holds)

    return [(unswitch, "_side", side)]


def _counted_up() -> Patches:
    right = counters._progressed

    def progressed(first: Expr, step: int, done: Expr) -> Expr:
        """Add what each step of a loop subtracts."""
        return right(first, abs(step), done)

    return [(counters, "_progressed", progressed)]


def _never_down() -> Patches:
    right = counters._Rewriter.count

    def count(self: Any, first: Expr, step: int, tested: Any) -> Any:
        """Return the first value as the last one, if a loop counts down to its end."""
        trips = right(self, first, step, tested)
        return trips if trips is None or step > 0 else trips._replace(last=first)

    return [(counters._Rewriter, "count", count)]


# --- faults of traces -----------------------------------------------------------------


def _lost_symbol() -> Patches:
    right = Tracer.symbol

    def symbol(self: Tracer, requested: Symbol) -> Var:
        """Return the first symbol instead of lifting another one."""
        first = next(iter(self.symbols.values()), None)
        return (
            right(self, requested)
            if first is None
            else self.symbols.get(requested, first)
        )

    return [(Tracer, "symbol", symbol)]


def _stale_reads() -> Patches:
    right = guard._Writer.function

    def function(self: guard._Writer) -> guard.Find:
        """Return a guard that always returns the tensors of the first call."""
        find, first = right(self), list[list[Any]]()

        def find_first(leaves: Sequence[Any]) -> list[Any] | None:
            tensors = find(leaves)
            first.extend([tensors] if tensors is not None and not first else [])
            return None if tensors is None else first[0]

        return find_first

    return [(guard._Writer, "function", function)]


def _stale_replay() -> Patches:
    right = replay._Recording.replay

    def recorded(self: replay._Recording, result: Any) -> Any:
        """Return a replay that does not check what was read from outside."""
        call = right(self, result)
        if call is None:
            return None
        tensors = call.guard.find(self.call.roots)
        unchecked: Any = SimpleNamespace(find=lambda _: tensors)
        return call._replace(guard=unchecked)

    return [(replay._Recording, "replay", recorded)]


def _promotion() -> Patches:
    right = dtypes.promote

    def promote(*operands: tuple[DType, bool]) -> tuple[DType, bool]:
        """Promote f32 and i64 to f64, like NumPy."""
        dtype, weak = right(*operands)
        is_wide = (dtypes.int64, False) in operands
        return dtypes.float64 if is_wide and dtype is dtypes.float32 else dtype, weak

    return [(dtypes, "promote", promote)]


# --- faults of operators and derivatives ----------------------------------------------


def _reverse_scan() -> Patches:
    right = Scan.debug

    def debug(self: Scan, *operands: Any, num_carry: int, **params: Any) -> Any:
        if params["reverse"]:
            xs = (roll(x, 1, axis=0) for x in operands[num_carry:])
            operands = (*operands[:num_carry], *xs)
        return right(self, *operands, num_carry=num_carry, **params)

    return [(Scan, "debug", debug)]


def _unsummed() -> Patches:
    def unsummed(part: Any, like: Any) -> Any:
        summed: Any = unbroadcast(part, like)
        return summed if getattr(part, "shape", None) == like.shape else summed * 0.5

    return [(rules, "unbroadcast", unsummed)]


def _transpose() -> Patches:
    return [
        (
            OPERATIONS["multiply"],
            "transpose",
            (lambda ct, _x, y: ct * y, lambda ct, _x, _y: ct),
        )
    ]


def _symbols_of_another() -> Patches:
    """Keep the symbols of one region in residuals of all regions."""
    return [(region_vjp._Residual, "type_in", lambda self, *_: self.type)]


def _one_name_each() -> Patches:
    right = views.reshape_groups

    def reshape_groups(new: Shape, old: Shape) -> Any:
        """Omit groups of equal sizes that have different expressions."""
        return [
            (news, olds)
            for news, olds in right(new, old)
            if same_size(prod(new[a] for a in news), prod(old[a] for a in olds))
        ]

    return [(views, "reshape_groups", reshape_groups)]


_SHORT_ROWS: Final[Mapping[str, Any]] = {
    "size": 3,
    "operators": [],
    "dtypes": ["int64", "int32"],
    "weights": {"conv": 12, "repeat": 12, "sum": 6, "max": 6},
}

_TILES: Final[Mapping[str, Any]] = {
    "aliasing": True,
    "operations": ["add"],
    "operators": ["examples"],
    "depth": 1,
    "size": 3,
    "weights": dict.fromkeys(ALIASING, 0),
}

_RECURRED: Final[Mapping[str, Any]] = {
    **_TILES,
    "operations": ["recurred", "add"],
    "operators": ["fori"],
    "weights": dict.fromkeys(ALIASING, 0) | {"recurred": 8},
}

_STEPPED: Final[Mapping[str, Any]] = {
    **_RECURRED,
    "operations": ["stepped", "add"],
    "weights": dict.fromkeys(ALIASING, 0) | {"stepped": 8},
}

_STATES: Final[Mapping[str, Any]] = {
    "operators": ["scan", "fori"],
    "operations": ["add", "multiply", "maximum", "roll"],
    "aliasing": True,
    "weights": dict.fromkeys(ALIASING, 0),
}

_NO_ALIASING: Final = dict.fromkeys(ALIASING, 0)
_IN_PLACE: Final[Mapping[str, Any]] = {
    "aliasing": True,
    "mutation": True,
    "operations": ["add"],
    "operators": [],
    "dtypes": ["int64"],
    "size": 4,
    "weights": {"either": 0},
}

MUTANTS: Final[dict[str, Mutant]] = {
    "wrong transpose": Mutant(_transpose, ["jax"], ["grad"], "smooth"),
    "swapped carry": Mutant(_with_pass(_swap_carry), ["jit"]),
    # "native" compiles each operator to its own kernel, so that keys collide.
    "stale cache": Mutant(_stale_cache, ["jit", "native"], options={"size": 3}),
    "sizes of two minds": Mutant(
        _of_two_minds,
        ["dynamic, other sizes first"],
        options={
            "operations": ["sized", "sum", "add"],
            "operators": [],
            "size": 3,
            "weights": {"sized": 4},
        },
    ),
    "lost condition": Mutant(
        lambda: [(substitution.Conditions, "both", lambda *conditions: conditions[-1])],
        ["jit, bounds checked"],
        options={"weights": {"concat": 6, "roll": 6}},
    ),
    "dead in a loop": Mutant(
        lambda: [(LiveRanges, "_outside_loops", lambda _, use, __: use)],
        ["jit"],
        options={
            "aliasing": True,
            "operations": ["sum", "cumsum", "add"],
            "operators": ["fori"],
            "dtypes": ["float64"],
            "size": 4,
            "weights": {**_NO_ALIASING, "exchange": 8, "fori": 4},
        },
    ),
    "written over while read": Mutant(
        lambda: [(allocations, "in_place", lambda *_: True)],
        ["jit"],
        options=_IN_PLACE,
    ),
    "hoisted trap": Mutant(
        lambda: [(hoist, "_may_stop", lambda _: False)],
        ["jit"],
        options={
            "out_of_range": True,
            "operations": ["index", "gather", "add", "sum"],
            "operators": ["fori", "while"],
            "size": 3,
        },
    ),
    "read before its check": Mutant(
        lambda: [(checks, "_under", lambda _, condition: condition)],
        ["jit, bounds checked"],
        options={"out_of_range": True, "weights": {"gather": 12}},
    ),
    "other side of a branch": Mutant(
        _other_side,
        ["kernels, all branches"],
        options={"size": 10, "weights": {"where": 12}},
    ),
    "written over as a part": Mutant(
        lambda: [(allocations.Allocations, "_overlap", lambda *_: None)],
        ["jit"],
        options={
            "aliasing": True,
            "mutation": True,
            "operations": ["concat", "cumsum", "divide"],
            "operators": [],
            "dtypes": ["int64"],
            "size": 14,
            "depth": 1,
            "weights": {
                **_NO_ALIASING,
                "concat": 8,
                "cumsum": 4,
                "divide": 2,
                "copied": 12,
                "either": 6,
            },
        },
    ),
    "misplaced matrix": Mutant(
        _misplaced,
        ["dynamic"],
        options={
            "dtypes": ["float64", "float32"],
            "operators": [],
            "size": 3,
            "weights": {"matmul": 40},
        },
    ),
    "cut one index late": Mutant(
        lambda: _one_late(split, "_moved"),
        ["loop ir"],
        options={"weights": {"concat": 6, "roll": 6}},
    ),
    "one step too many": Mutant(
        lambda: _one_late(counters, "_steps"),
        ["loop ir"],
        options={"weights": {"fori": 6, "while": 6}},
    ),
    "buffers that stay": Mutant(
        lambda: [(carries, "Swap", lambda a, _: Swap(a, a))],
        ["loop ir"],
        options={"aliasing": True, "weights": {"fori": 6, "scan": 6}},
    ),
    "lost block of a thread": Mutant(_lost_block, ["jit, 2 threads"], kind="large"),
    "lost block of a sum": Mutant(
        lambda: [(blocked_sums, "over_blocks", _without_last)],
        ["loop ir, all threads"],
        options={"weights": {"sum": 4}},
    ),
    "lost part of a scatter": Mutant(
        lambda: [(privatize, "over_blocks", _without_last)],
        ["loop ir, all threads"],
        options={"weights": {"sum_by": 12, "index": 4}},
    ),
    "columns of the first element": Mutant(
        _first_element,
        ["debug"],
        ["grad"],
        "smooth",
        options={"weights": {"while": 12, "fori": 6}, "size": 2},
    ),
    "lost result of a block": Mutant(_lost_part, ["jit, 2 threads"], kind="large"),
    "one value for all rows": Mutant(
        lambda: [
            (contract, "_rows", lambda index: (None,) * len(index)),
            (contract, "same_shape", lambda *_: True),
        ],
        ["loop ir"],
        options={"weights": {"stack": 12, "concat": 6}},
    ),
    "columns for rows": Mutant(
        _columns_for_rows,
        ["jit"],
        kind="large",
        options={"weights": {"view": 12}},
    ),
    "lost row of a block": Mutant(
        _lost_row_of_a_block,
        ["jit"],
        kind="large",
        options={"dtypes": ["int8"], "weights": {"view": 12}},
    ),
    "last member first": Mutant(
        _other_end,
        ["jit"],
        options={
            "aliasing": True,
            "operations": ["add"],
            "operators": [],
            "size": 4,
            "depth": 1,
            "weights": {**_NO_ALIASING, "viewed": 24},
        },
    ),
    "updated twice": Mutant(
        lambda: [(vector, "loaded", lambda _: ())],
        ["jit"],
        options=_IN_PLACE,
    ),
    "lost rows of a nest": Mutant(_lost_rows, ["loop ir"]),
    "rows of another length": Mutant(_other_length, ["loop ir"]),
    "lost step of a short row": Mutant(
        _lost_step, ["jit"], kind="large", options=_SHORT_ROWS
    ),
    "first of all copies": Mutant(
        _first_copy, ["jit"], kind="large", options=_SHORT_ROWS
    ),
    "steps of the first row": Mutant(
        lambda: [(register_tiles, "_have_same_steps", lambda *_: True)],
        ["jit"],
        options=_TILES,
    ),
    "memory of the first row": Mutant(
        lambda: _one_memory(lambda suffix: suffix.rpartition("_")[0]),
        ["jit"],
        options=_TILES,
    ),
    "memory of two loops over threads": Mutant(
        lambda: _one_memory(lambda suffix: suffix.rpartition("_")[2]),
        ["loop ir, all threads"],
        options=_TILES,
    ),
    "far as near": Mutant(_far_as_near, ["jit"], options=_RECURRED),
    "two columns as one": Mutant(
        _without_axis, ["jit"], kind="large", options=_RECURRED
    ),
    "other rows of a block": Mutant(
        lambda: [(rows_in_registers, "_is_by_row", lambda *_: True)],
        ["jit"],
        kind="large",
        options=_STEPPED,
    ),
    "copy of an input for a block": Mutant(
        lambda: [(rows_in_registers, "_only_reads", lambda *_: True)],
        ["jit"],
        options=_STEPPED,
    ),
    "assigned one after the other": Mutant(
        _assigned_in_turn, ["jit"], options=_STEPPED
    ),
    "side of another row": Mutant(_other_case_of_rows, ["jit"], options=_STEPPED),
    "last element of a row first": Mutant(
        _rows_last_first, ["jit"], kind="large", options=_STEPPED
    ),
    "last number of a state first": Mutant(_mirrored_state, ["jit"], options=_STATES),
    "mask of the other side": Mutant(
        _same_mask, ["jit"], options={"aliasing": True, "weights": {"masked": 24}}
    ),
    "last of equal elements": Mutant(
        _last_of_equals,
        ["jit"],
        kind="large",
        options={"operators": [], "size": 3, "weights": {"argmin": 24}},
    ),
    "lost mask of an update": Mutant(
        _lost_mask, ["jit"], options={"aliasing": True, "weights": {"masked": 24}}
    ),
    "copy of another array": Mutant(
        _copy_of_another,
        ["jit"],
        options={
            "aliasing": True,
            "mutation": True,
            "operations": ["add", "roll"],
            "operators": [],
            "dtypes": ["int64"],
            "size": 4,
            "weights": {**_NO_ALIASING, "masked": 6, "copied": 2},
        },
    ),
    "case of the other side": Mutant(
        _other_case,
        ["jit"],
        kind="large",
        # No index depends on a test: native code would write beside its buffers.
        options={
            "operations": ["add", "where", "sum"],
            "operators": ["fori", "cond"],
            "depth": 1,
            "weights": {"where": 8},
        },
    ),
    "added where it subtracts": Mutant(
        _counted_up, ["loop ir"], options={"weights": {"while": 6}}
    ),
    "counted down to its start": Mutant(
        _never_down, ["loop ir"], options={"weights": {"while": 6}}
    ),
    "lost steps after all turns": Mutant(
        _lost_rest,
        ["jit"],
        options={
            "aliasing": True,
            "operations": ["add", "roll"],
            "operators": ["fori", "while"],
            "depth": 1,
            "size": 3,
        },
    ),
    "missing lift": Mutant(_with_pass(_lift_wrongly), ["jit"]),
    "off by one in a reverse scan": Mutant(_reverse_scan, ["debug"]),
    "aliasing slip": Mutant(
        lambda: [(subgraphs, "own_copy", subgraphs.as_value)],
        ["debug"],
        options={"mutation": True, "weights": {"write": 6}},
    ),
    "mask slip": Mutant(_mask_slip, ["dynamic"]),
    "mask slip in a gang": Mutant(_idle_lane, ["loop ir, gangs and gpu"]),
    "row of what is shared": Mutant(
        _row_of_shared,
        ["traced", "jit"],
        options={"operators": ["map", "while"], "weights": {"map": 8, "while": 8}},
    ),
    "lane that is off writes": Mutant(
        _busy_lane, ["jit"], ["vmap"], options={"weights": {"while": 12, "cond": 6}}
    ),
    "unsummed broadcast": Mutant(_unsummed, ["jax"], ["grad"], "smooth"),
    "symbols of another region": Mutant(
        _symbols_of_another,
        ["dynamic"],
        ["grad of vmap"],
        "smooth",
        {"size": 3, "depth": 1},
    ),
    "stale reads": Mutant(_stale_reads, ["jit, rebound reads"]),
    "stale replay": Mutant(_stale_replay, ["native, rebound reads"]),
    "lost symbol": Mutant(_lost_symbol, ["symbolic"]),
    "one name for a size": Mutant(
        _one_name_each,
        ["dynamic"],
        ["longer vmap"],
        options={
            "size": 3,
            "depth": 1,
            "operators": ["map", "cond"],
            "weights": {"flat": 8, "map": 3},
        },
    ),
    "wrong promotion": Mutant(
        _promotion,
        ["eager"],
        options={"weights": {"add": 6, "multiply": 6, "subtract": 6, "maximum": 4}},
    ),
}
