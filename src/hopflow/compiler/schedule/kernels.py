"""Scheduling kernels: what is computed where it is read, and loops for the rest."""

from collections.abc import Sequence
from math import prod

from hopflow import dtypes
from hopflow.compiler.kernel_program.definitions import (
    Check,
    Compact,
    Pointwise,
    Prefix,
    Reduction,
    Scatter,
    axes,
)
from hopflow.compiler.schedule.builder import Builder
from hopflow.compiler.schedule.places import (
    Pending,
    Registers,
    Slot,
    Stored,
    indices_of,
    is_small,
    reads,
    static_size,
    weight,
)
from hopflow.errors import CompileError
from hopflow.graph.types import TensorType, is_one
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Expr, Index
from hopflow.loop_ir.kernels import Callback, Invocation, Library, Operand
from hopflow.loop_ir.nest import (
    Accumulate,
    Buffer,
    Call,
    Copy,
    HostCall,
    If,
    Invoke,
    Program,
    Ref,
    Store,
    Trap,
    Var,
)
from hopflow.loop_ir.walk import nodes, same

CHEAP = 6
"""A pending element of at most this cost may be computed again for each reader."""
SHORT_ROW = 16
"""So many sums at least are worth it to read a vector out of order."""
LONGEST = 1000
"""Instructions of an element: longer ones are stored. What a loop computes at once must
fit into the registers, and LLVM takes more than linear time for it."""


class Kernels:
    """Schedules the kernels of one node: `node` is its number, for traps."""

    def __init__(self, builder: Builder, node: int) -> None:
        self.b = builder
        self.node = node

    # --- checks ---

    def check(self, check: Check) -> None:
        """Stop the program unless the check holds everywhere."""
        site = self.b.site(check.kind, self.node)

        def trap(at: Index) -> None:
            fails = e.unary("not", self.b.at(check.holds, at))
            if not (fails.is_const and not fails.attr):
                values = tuple([self.b.at(v, at) for v in check.values])
                self.b.add(Trap(fails, site, values))

        if all(isinstance(n, int) and n <= 4 for n in check.shape):
            self.b.nest(check.shape, trap, independent=False)
            return
        # First one fast pass asks whether any fails; only then is the first one sought.
        failed = self.b.declare(e.const(False, dtypes.bool_), "failed")

        def accumulate(at: Index) -> None:
            fails = e.unary("not", self.b.at(check.holds, at))
            self.b.add(Accumulate(failed, "or", fails))

        self.b.nest(check.shape, accumulate)
        with self.b.into([]) as search:
            self.b.nest(check.shape, trap, independent=False)
        self.b.add(If(e.read(failed), search))

    # --- pointwise ---

    def pointwise(
        self,
        kernel: Pointwise,
        type_: TensorType,
        operands: Sequence[Slot],
        uses: int,
        hint: Buffer | None,
    ) -> Slot:
        """A slot for the result: registers if it is small, pending if that may pay."""
        for check in kernel.checks:
            self.check(check)
        if is_small(type_):
            elements = tuple(
                self.b.let(self.b.at(kernel.element, at)) for at in indices_of(type_)
            )
            return self.b.slot(Registers(type_, elements), uses)
        cost = self._settle_repeated(kernel.element, type_, operands)
        depth = 0
        reads: frozenset[Buffer] = frozenset()
        for slot in operands:
            reads |= slot.place.buffers
            if isinstance(slot.place, Pending):
                depth = max(depth, slot.place.depth)
        pending = Pending(type_, kernel.element, reads, cost, depth + 1, kernel.is_view)
        slot = self.b.slot(pending, uses)
        repeated = uses > 1 and cost > CHEAP and not kernel.is_view
        if repeated or hint is not None or cost > LONGEST:
            self.b.settle(slot, hint)
        return slot

    def _settle_repeated(
        self, element: Expr, type_: TensorType, operands: Sequence[Slot]
    ) -> int:
        """Store what an element would compute more than once; the cost of one."""
        for slot in operands:
            if _is_dear(slot) and _is_larger(type_, slot.type):
                self.b.settle(slot)
        counts = reads(element)
        for slot, count in counts.items():
            if _is_dear(slot) and count > 1 and slot.home is self.b.statements:
                self.b.settle(slot)
        cost = sum([weight(n) for n in nodes(element)])
        return cost + sum([slot.cost * count for slot, count in counts.items()])

    # --- reductions ---

    def reduction(
        self,
        kernel: Reduction,
        types: Sequence[TensorType],
        operands: Sequence[Slot],
        uses: Sequence[int],
        hints: Sequence[Buffer | None],
    ) -> list[Slot]:
        space = prod(
            n if isinstance(n, int) else 64 for n in (*types[0].shape, *kernel.space)
        )
        for slot in operands:
            size = static_size(slot.type)
            again = 1 if size is None else space // max(size, 1) - 1
            if isinstance(slot.place, Pending) and slot.place.cost * again > CHEAP:
                self.b.settle(slot)
        if all(is_small(t) for t in types):
            return self._reduce_to_registers(kernel, types, uses)
        targets = [
            hint or self.b.temporary(t) for hint, t in zip(hints, types, strict=True)
        ]
        axis = _last_axis(types[0])
        if self._reduces_rows(kernel, types[0], axis):
            self._reduce_rows(kernel, types[0], axis, targets[0])
        else:

            def row(at: Index) -> None:
                for target, value in zip(
                    targets, self._reduce(kernel, at), strict=True
                ):
                    self.b.add(Store(target, at, value))

            self.b.nest(types[0].shape, row)
        return [
            self.b.slot(Stored(t, buffer), n)
            for t, buffer, n in zip(types, targets, uses, strict=True)
        ]

    def _reduce_to_registers(
        self, kernel: Reduction, types: Sequence[TensorType], uses: Sequence[int]
    ) -> list[Slot]:
        columns: list[list[Expr]] = [[] for _ in types]
        for at in indices_of(types[0]):
            for column, value in zip(columns, self._reduce(kernel, at), strict=True):
                column.append(self.b.let(value))
        return [
            self.b.slot(Registers(t, tuple(column)), n)
            for t, column, n in zip(types, columns, uses, strict=True)
        ]

    def _reduce(self, kernel: Reduction, at: Index) -> list[Expr]:
        """The results for one output index: a loop over the kernel's space."""
        accumulators = [self.b.declare(x, "acc") for x in kernel.init]

        def step(r: Index) -> None:
            values = [self.b.at(element, (*at, *r)) for element in kernel.element]
            if isinstance(kernel.combine, str):
                self.b.add(Accumulate(accumulators[0], kernel.combine, values[0]))
                return
            given = [*map(e.read, accumulators), *map(self.b.let, values)]
            after = list(map(self.b.let, self.b.call(kernel.combine, given)))
            for var, value in zip(accumulators, after, strict=True):
                self.b.assign(var, value)

        self.b.nest(kernel.space, step, independent=isinstance(kernel.combine, str))
        totals = list(map(e.read, accumulators))
        return [self.b.call(finish, totals, at)[0] for finish in kernel.finish]

    def _reduces_rows(self, kernel: Reduction, type_: TensorType, axis: int) -> bool:
        """Whether memory runs along `axis` of the result, not along the space."""
        if not isinstance(kernel.combine, str) or axis < 0 or not kernel.space:
            return False
        at = axes(type_.ndim + len(kernel.space))
        i, r = at[axis], at[-1]
        along_result = along_space = shared = False
        for node in nodes(self.b.at(kernel.element[0], at)):
            at_load = e.index_of(node) if node.op == "load" else ()
            if at_load:
                runs = {id(x) for x in nodes(at_load[-1])}
                if all(x is not i for x in nodes(*at_load)):
                    shared |= id(r) in runs  # one element for the whole row
                else:
                    along_result |= id(i) in runs
                    along_space |= id(r) in runs
        n = type_.shape[axis]
        if isinstance(n, int) and n < (SHORT_ROW if shared else 4):
            return False
        return along_result and not along_space

    def _reduce_rows(
        self, kernel: Reduction, type_: TensorType, axis: int, out: Buffer
    ) -> None:
        """Accumulate whole rows of the result, so that vectors run along memory."""
        assert isinstance(kernel.combine, str)
        combine, [init] = kernel.combine, kernel.init
        is_direct = init.dtype is type_.dtype
        sums = (
            out
            if is_direct
            else self.b.temporary(TensorType(init.dtype, type_.shape), "sums")
        )
        outer_shape, row = type_.shape[:axis], type_.shape[axis:]

        def outer(at: Index) -> None:
            def clear(j: Index) -> None:
                self.b.add(Store(sums, (*at, *j), init))

            def accumulate(r: Index) -> None:
                def add(j: Index) -> None:
                    i = (*at, *j)
                    old, new = e.load(sums, i), self.b.at(kernel.element[0], (*i, *r))
                    self.b.add(Store(sums, i, e.binary(combine, old, new)))

                self.b.nest(row, add)

            def finish(j: Index) -> None:
                i = (*at, *j)
                [value] = self.b.call(kernel.finish[0], [e.load(sums, i)], i)
                self.b.add(Store(out, i, value))

            self.b.nest(row, clear)
            self.b.nest(kernel.space, accumulate, independent=False)
            [last], [total] = kernel.finish[0].results, kernel.finish[0].parameters
            if not is_direct or last is not total:
                self.b.nest(row, finish)

        self.b.nest(outer_shape, outer)

    # --- prefixes, scatters, libraries ---

    def prefix(
        self, kernel: Prefix, type_: TensorType, uses: int, hint: Buffer | None
    ) -> Slot:
        target = hint or self.b.temporary(type_)
        axis, n = kernel.axis, type_.shape[kernel.axis]
        others = (*type_.shape[:axis], *type_.shape[axis + 1 :])

        def line(at: Index) -> None:
            total = self.b.declare(kernel.init, "acc")

            def step(position: Index) -> None:
                k = position[0]
                if kernel.reverse:
                    k = e.sub(e.sub(self.b.extent(n), e.index(1)), k)
                i = (*at[:axis], k, *at[axis:])
                given = [e.read(total), self.b.at(kernel.element, i)]
                value = self.b.let(self.b.call(kernel.combine, given)[0])
                self.b.assign(total, value)
                self.b.add(Store(target, i, value))

            self.b.nest((n,), step, independent=False)

        self.b.nest(others, line)
        return self.b.slot(Stored(type_, target), uses)

    def compact(
        self, kernel: Compact, type_: TensorType, uses: int, hint: Buffer | None
    ) -> Slot:
        """Each position is stored where the next one goes, and stays if it is kept: the
        only branch, whether there is room, goes the same way almost always."""
        b, [size] = self.b, type_.shape
        target = hint or b.temporary(type_)
        count = b.declare(e.index(0), "count")
        room = b.extent(size)

        def step(at: Index) -> None:
            keep = b.let(e.cast(b.at(kernel.keep, at), dtypes.int64))
            with b.into([]) as body:
                b.add(Store(target, (e.read(count),), at[0]))
            b.add(If(e.compare("lt", e.read(count), room), body))
            b.assign(count, e.add(e.read(count), keep))

        def fill(at: Index) -> None:
            b.add(Store(target, (e.add(filled, at[0]),), e.index(0)))

        b.nest((kernel.length,), step, independent=False)
        filled = b.let(e.binary("min", e.read(count), room))
        rest = b.var(dtypes.int64, "i")
        with b.into([]) as body:
            fill((e.read(rest),))
        b.for_(rest, e.sub(room, filled), body, True)
        return b.slot(Stored(type_, target), uses)

    def scatter(
        self,
        kernel: Scatter,
        base: Slot,
        operands: Sequence[Slot],
        type_: TensorType,
        uses: int,
        hint: Buffer | None,
    ) -> Slot:
        """In place where the base dies here, else into a copy of it."""
        for check in kernel.checks:
            self.check(check)
        for slot in operands:
            if slot is not base and isinstance(base.place, Stored):
                reads_base = base.place.buffer in slot.place.buffers
                if _is_dear(slot) or (reads_base and isinstance(slot.place, Pending)):
                    self.b.settle(slot)
        if is_small(type_):
            return self._scatter_registers(kernel, base, type_, uses)
        in_place = base.place
        once = sum(slot is base for slot in operands) == 1
        if once and self.b.may_overwrite(base) and isinstance(in_place, Stored):
            target = in_place.buffer
        else:
            target = hint or self.b.temporary(type_)
            self.fill(base, Stored(type_, target))
        self._write_updates(kernel, target, independent=self._is_injective(kernel))
        return self.b.slot(Stored(type_, target), uses)

    def _write_updates(
        self, kernel: Scatter, target: Buffer, *, independent: bool
    ) -> None:
        def update(u: Index) -> None:
            def write() -> None:
                at = tuple([self.b.at(i, u) for i in kernel.position])
                value = self.b.at(kernel.value, u)
                if kernel.combine is not None:
                    given = [e.load(target, at), value]
                    [value] = self.b.call(kernel.combine, given)
                self.b.add(Store(target, at, value))

            if kernel.keep is None:
                write()
                return
            with self.b.into([]) as kept:
                write()
            self.b.add(If(self.b.at(kernel.keep, u), kept))

        self.b.nest(kernel.space, update, independent=independent)

    def _scatter_registers(
        self, kernel: Scatter, base: Slot, type_: TensorType, uses: int
    ) -> Slot:
        """Through memory, which LLVM turns into registers where positions are known."""
        buffer = self.b.temporary(type_)
        self.b.store([base], [Stored(type_, buffer)])

        self._write_updates(kernel, buffer, independent=False)
        elements = tuple(self.b.let(e.load(buffer, at)) for at in indices_of(type_))
        return self.b.slot(Registers(type_, elements), uses)

    def _is_injective(self, kernel: Scatter) -> bool:
        """Whether updates go to different positions: each axis of the space moves one
        coordinate by steps of one (`dynamic_update_slice`)."""
        if kernel.combine is not None or kernel.keep is not None:
            return False
        u = axes(len(kernel.space))
        position = [self.b.at(i, u) for i in kernel.position]
        for axis, var in enumerate(u):
            size = kernel.space[axis]
            if is_one(size):
                continue
            moved = [p for p in position if any(n is var for n in nodes(p))]
            if len(moved) != 1 or not _is_shift(moved[0], var):
                return False
        return True

    def fill(self, slot: Slot, target: Stored) -> None:
        """Write a value to memory, by a copy of whole buffers where it can be one."""
        place = slot.place
        if isinstance(place, Stored) and place.is_dense:
            if place.buffer is target.buffer and place.prefix == target.prefix:
                return
            if not place.prefix and not target.prefix:
                self.b.add(Copy(target.buffer, place.buffer))
                return
        self.b.store([slot], [target])

    def library(
        self,
        kernel: Library,
        types: Sequence[TensorType],
        uses: Sequence[int],
        hints: Sequence[Buffer | None],
    ) -> list[Slot]:
        batch = types[0].shape[: kernel.batch]
        results = [
            hint or self.b.temporary(t) for hint, t in zip(hints, types, strict=True)
        ]
        overwritten = {k for k in kernel.overwrites if k is not None}
        sources: list[Slot] = []
        routine = kernel.routine
        for k, operand in enumerate(kernel.operands):
            if not isinstance(operand, Slot):
                raise CompileError(f"{routine}: operand {k} is no value of a node")
            if k in overwritten:
                result = results[kernel.overwrites.index(k)]
                self.fill(operand, Stored(operand.type, result))
            else:
                sources.append(operand)
        if kernel.takes_transposed:
            probe = axes(kernel.batch)
            found = [self.matrix_at(slot, probe) for slot in sources]
            turned = ["t" if m and m[1] else "n" for m in found]
            routine += f"_{''.join(turned)}" if "t" in turned else ""
            copied = [s for s, m in zip(sources, found, strict=True) if m is None]
        else:
            copied = sources
        made = {slot: self.dense(slot) for slot in copied}
        scratch = [self.b.temporary(t, "work") for t in kernel.workspace]
        site = self.b.site("library", self.node) if kernel.can_fail else None

        scalars = [self.b.at(x, ()) for x in kernel.scalars]

        def source(slot: Slot, at: Index) -> Ref:
            if slot in made:
                buffer, prefix = made[slot]
                return Ref(buffer, (*prefix, *at))
            found = self.matrix_at(slot, at)
            assert found is not None
            return found[0]

        def call(at: Index) -> None:
            refs = [source(slot, at) for slot in sources]
            refs += [Ref(buffer, at) for buffer in results]
            refs += [Ref(buffer) for buffer in scratch]
            self.b.add(Call(routine, (*refs, *scalars), site))

        self.b.nest(batch, call, independent=False)
        return [
            self.b.slot(Stored(t, buffer), n)
            for t, buffer, n in zip(types, results, uses, strict=True)
        ]

    def callback(
        self,
        kernel: Callback,
        types: Sequence[TensorType],
        uses: Sequence[int],
        hints: Sequence[Buffer | None],
    ) -> list[Slot]:
        operands = tuple(map(self.ref, kernel.operands))
        results, slots = self.written(types, uses, hints)
        site = self.b.site("callback", self.node)
        self.b.add(HostCall(site, operands, results))
        return slots

    def invoke(
        self,
        function: Program,
        kernel: Invocation,
        types: Sequence[TensorType],
        uses: Sequence[int],
        hints: Sequence[Buffer | None],
    ) -> list[Slot]:
        """The nodes of the function have numbers from 0 on; in the whole graph they
        come after the one that calls it."""
        count = len(function.symbols)
        given = [as_slot(o).scalar for o in kernel.operands[:count]]
        with self.b.symbols_as(dict(zip(function.symbols, given, strict=True))):
            for known in function.types:
                self.b.note(known.type)
            sizes = (*given, *(self.b.extent(n.size) for n in function.derived))
        operands, hints = self._changed(function, kernel.operands[count:], types, hints)
        results, slots = self.written(types, uses, hints)
        first = len(self.b.program.sites)
        for site in function.sites:
            self.b.site(site.kind, self.node + 1 + site.node, site.what)
        self.b.add(Invoke(function, sizes, operands, results, first))
        return slots

    def _changed(
        self,
        function: Program,
        operands: Sequence[Operand],
        types: Sequence[TensorType],
        hints: Sequence[Buffer | None],
    ) -> tuple[tuple[Ref, ...], list[Buffer | None]]:
        """The operands of a function, and where its results are to be: of an operand
        that it changes a copy, unless the operand dies here."""
        refs, targets = list(map(self.ref, operands)), list(hints)
        for j, buffer in enumerate(function.outputs):
            if buffer not in function.inputs:
                continue
            k = function.inputs.index(buffer)
            base = as_slot(operands[k])
            once = sum(ref.buffer is refs[k].buffer for ref in refs) == 1
            if not (once and self.b.may_overwrite(base)):
                target = targets[j] or self.b.temporary(types[j])
                self.fill(base, Stored(types[j], target))
                refs[k] = Ref(target)
            targets[j] = refs[k].buffer
        return tuple(refs), targets

    def ref(self, operand: Operand) -> Ref:
        """The memory that a value is in, or is put in."""
        return Ref(*self.dense(as_slot(operand)))

    def written(
        self,
        types: Sequence[TensorType],
        uses: Sequence[int],
        hints: Sequence[Buffer | None],
    ) -> tuple[tuple[Ref, ...], list[Slot]]:
        """Memory that a call writes, and the values that it then holds."""
        pairs = zip(hints, types, strict=True)
        buffers = [hint or self.b.temporary(t) for hint, t in pairs]
        return tuple(map(Ref, buffers)), [
            self.b.slot(Stored(t, buffer), n)
            for t, buffer, n in zip(types, buffers, uses, strict=True)
        ]

    def matrix_at(self, slot: Slot, at: Index) -> tuple[Ref, bool] | None:
        """The dense sub-array that the matrix `slot[at]` is, and whether it is so
        transposed; None: there is none."""
        i, j = (e.read(Var(name, dtypes.int64)) for name in "ij")
        pairs = list(zip((i, j), slot.type.shape[-2:], strict=True))
        element = slot.at((*at, *(e.index(0) if is_one(n) else p for p, n in pairs)))
        if element.op != "load" or element.attr.strides is not None:
            return None
        if e.condition_of(element) is not None:
            return None
        own = [(p, self.b.extent(n)) for p, n in pairs if not is_one(n)]
        found = _merged(element.args, element.attr.shape)
        rest = found[len(found) - len(own) :]
        before = [x for x, _, _ in found[: len(found) - len(own)]]
        if len(rest) < len(own) or any(n is i or n is j for n in nodes(*before)):
            return None
        prefix = element.args[: rest[0][2]] if rest else element.args
        for order in (own, own[::-1]):
            both = zip(rest, order, strict=True)
            if all(x is p and same(extent, n) for (x, extent, _), (p, n) in both):
                return Ref(element.attr, prefix), order is not own
        return None

    def dense(self, slot: Slot) -> tuple[Buffer, Index]:
        """The value in memory, as a dense sub-array of a buffer."""
        place = slot.place
        if isinstance(place, Stored) and place.is_dense:
            return place.buffer, place.prefix
        buffer = self.b.temporary(place.type)
        self.b.store([slot], [Stored(place.type, buffer)])
        if not isinstance(place, Registers) and slot.home is self.b.statements:
            self.b.move(slot, Stored(place.type, buffer))
        return buffer, ()


def as_slot(operand: Operand) -> Slot:
    assert isinstance(operand, Slot)
    return operand


def _merged(at: Index, shape: Sequence[Expr]) -> list[tuple[Expr, Expr, int]]:
    """The index into a dense array, with axes merged that one position was split over,
    and without axes of size 1: the position, the size, and the first axis of each."""
    found: list[tuple[Expr, Expr, int]] = []
    for axis, (x, extent) in enumerate(zip(at, shape, strict=True)):
        if extent.is_const and extent.attr == 1:
            continue
        if found and x.op == "rem" and found[-1][0].op == "div":
            before, size, first = found[-1]
            (p, n), (q, m) = before.args, x.args
            if p is q and same(n, extent) and same(m, extent):
                found[-1] = p, e.mul(size, extent), first
                continue
        found.append((x, extent, axis))
    return found


def _is_shift(position: Expr, var: Expr) -> bool:
    """Whether `position` is `var` plus what does not depend on it."""
    if position is var:
        return True
    if position.op != "add":
        return False
    x, y = position.args
    inner, other = (x, y) if any(n is var for n in nodes(x)) else (y, x)
    return not any(n is var for n in nodes(other)) and _is_shift(inner, var)


def _is_dear(slot: Slot) -> bool:
    return slot.cost > CHEAP


def _last_axis(type_: TensorType) -> int:
    """The last axis of more than one element, or -1."""
    axes = [a for a, n in enumerate(type_.shape) if not is_one(n)]
    return axes[-1] if axes else -1


def _is_larger(result: TensorType, operand: TensorType) -> bool:
    a, b = static_size(result), static_size(operand)
    return result.ndim > operand.ndim if a is None or b is None else a > b
