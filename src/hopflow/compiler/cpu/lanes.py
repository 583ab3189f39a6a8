"""Vectors of several iterations of an expression, for vector loops and gangs.

An index that is `coefficient * variable + offset` gives contiguous, reversed or strided
access; any other index gathers or scatters.
"""

from collections.abc import Sequence

from hopflow.compiler.cpu.affine import Affine
from hopflow.compiler.cpu.distances import is_small, narrowed
from hopflow.compiler.cpu.emitter import CpuEmitter
from hopflow.compiler.cpu.interleaving import (
    Group,
    Member,
    deinterleaved,
    interleaved,
    joined,
    part,
    split,
    transposed,
)
from hopflow.compiler.llvm.expressions import MOST_TRIPS, Evaluator, apply
from hopflow.compiler.llvm.operations import broadcast, from_memory, to_memory
from hopflow.compiler.llvm.types import (
    lanes,
    memory_type,
    overload,
    register_type,
    splat,
)
from hopflow.compiler.reuse import rounded_up
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Buffer, Expr, Index, Var
from hopflow.loop_ir.program import For
from hopflow.loop_ir.walk import base_and_constant


class LaneLoop:
    """A loop whose iterations are lanes, with the queries of its expressions.

    width    the number of lanes of a vector
    affine   which indices are linear in `var`
    """

    def __init__(self, emitter: CpuEmitter, s: For, width: int, affine: Affine) -> None:
        self.emitter, self.s, self.var = emitter, s, s.var
        self.width, self.affine = width, affine

    def uniform(self, expr: Expr) -> str:
        """Return the scalar register of an expression that is uniform."""
        raise NotImplementedError

    def uniform_lanes(self, expr: Expr) -> str:
        """Return a vector with a uniform expression in every lane."""
        raise NotImplementedError

    def row(self, buffer: Buffer, offset: Expr) -> str:
        """Return the address of the element `offset` after the start of `buffer`."""
        raise NotImplementedError

    def member(self, buffer: Buffer, at: Index) -> Member | None:  # noqa: ARG002
        """Return the member of an interleave group that a read takes, or None."""
        return None

    def has_gather(self, buffer: Buffer) -> bool:
        """Return whether the CPU gathers and scatters elements of this size."""
        return self.emitter.unit.target.has_masks and buffer.dtype.itemsize >= 4

    def has_masked_loads(self, buffer: Buffer) -> bool:
        """Return whether the CPU loads contiguous elements under a mask."""
        target = self.emitter.unit.target
        return target.has_masks or (target.has("avx") and buffer.dtype.itemsize >= 4)

    def mask(self, position: str, stop: str) -> str:
        """Return the lanes of the iterations from `position` up to `stop`."""
        f, width = self.emitter.f, self.width
        if position.startswith("%") or stop.startswith("%"):
            remaining = self.unknown(f.emit(f"sub i64 {stop}, {position}"))
            f.module.declare("i64 @llvm.umin.i64(i64, i64)")
            active = f.emit(f"call i64 @llvm.umin.i64(i64 {remaining}, i64 {width})")
            # In lanes that fill a register: of a narrower comparison LLVM 22 takes the
            # undefined lanes above for part of a narrow store's mask.
            lane = f"i{max(8, 128 // width)}"
            if lane != "i64":
                active = f.emit(f"trunc i64 {active} to {lane}")
            count = broadcast(f, active, lane, width)
            steps = ", ".join(f"{lane} {k}" for k in range(width))
            return f.emit(f"icmp ugt {lanes(lane, width)} {count}, <{steps}>")
        n = int(stop) - int(position)
        bits = ", ".join(f"i1 {str(lane < n).lower()}" for lane in range(width))
        return f"<{bits}>"

    def unknown(self, number: str) -> str:
        """Return a number whose value LLVM cannot know.

        Under a mask that is known to have one lane LLVM 22 turns a store after a
        truncation (bf16, bool, a narrower integer) into a store of the untruncated
        element, which writes past the end: https://github.com/llvm/llvm-project/issues/179489
        """
        if not self.emitter.unit.target.has("avx512f"):
            return number
        return self.emitter.f.emit(f'call i64 asm "", "=r,0"(i64 {number})')


class Lanes(Evaluator):
    """An evaluator of vectors of `width` iterations from `position` on.

    An expression that does not depend on the loop's variable stays a scalar, computed
    before the loop, until an operation with a vector needs it in every lane.
    """

    def __init__(self, loop: LaneLoop, position: str, mask: str) -> None:
        super().__init__(loop.emitter.f, loop.width)
        self.loop, self.position, self.mask = loop, position, mask
        self.memory = loop.emitter.memory
        self.lets: dict[Var, str] = {}
        self.slots: dict[Var, str] = {}  # of mutable variables
        self._vectors: dict[tuple[Group, int, int], list[str]] = {}
        """Of a group, by the first iteration and the first member of a block."""
        self._members: dict[Group, dict[int, str]] = {}  # to be stored

    @property
    def is_full(self) -> bool:
        """Whether every lane is known to be active."""
        return not self.mask.startswith("%") and "false" not in self.mask

    def value(self, expr: Expr) -> str:
        """Return the vector of `expr`."""
        if self.loop.affine.is_uniform(expr):
            return self.loop.uniform_lanes(expr)
        return super().value(expr)

    def inputs(self, node: Expr) -> tuple[Expr, ...]:
        if self.loop.affine.is_uniform(node):
            return ()
        return super().inputs(node)

    def compute(self, node: Expr) -> str:
        if self.loop.affine.is_uniform(node):
            return self.loop.uniform_lanes(node)
        if self.mask and node.op in ("div", "rem") and node.dtype.kind in "iu":
            return self._masked_division(node)
        return super().compute(node)

    def _masked_division(self, node: Expr) -> str:
        """Emit a division by 1 in inactive lanes, where 0 would end the process."""
        t = register_type(node.dtype, self.width)
        x, y = (self.memo[a] for a in node.args)
        one = splat(register_type(node.dtype), "1", self.width)
        safe = self.f.emit(
            f"select {lanes('i1', self.width)} {self.mask}, {t} {y}, {t} {one}"
        )
        return apply(self.f, node, [x, safe], self.width)

    def variable(self, var: Var) -> str:
        if var is self.loop.var:
            position = self.position
            if self.mask:  # tests of the index become masks
                position = self.loop.unknown(position)
            first = broadcast(self.f, position, "i64", self.width)
            steps = ", ".join(f"i64 {lane}" for lane in range(self.width))
            t = lanes("i64", self.width)
            register = self.f.emit(f"add {t} {first}, <{steps}>")
            self.f.bounds[register] = MOST_TRIPS
            return register
        let = self.lets.get(var)
        if let is not None:
            return let
        slot = self.slots[var]
        return self.f.emit(f"load {register_type(var.dtype, self.width)}, ptr {slot}")

    def may_change(self, leaf: Expr) -> bool:
        if leaf.op == "var":
            return leaf.attr in self.slots
        return not self.memory.is_invariant(leaf.attr)

    # --- memory

    def load(self, buffer: Buffer, at: Index, condition: Expr | None) -> str:
        form = self.loop.affine.of(self.memory.linear(buffer, at))
        if form is None:
            return self._gather(buffer, self._addresses(buffer, at), condition)
        coefficient, offset = form
        if coefficient.is_const and coefficient.attr in (1, -1):
            is_reversed = coefficient.attr < 0
            if condition is None or self.loop.affine.is_uniform(condition):
                return self._load_run(buffer, offset, is_reversed, condition)
            if self.loop.has_masked_loads(buffer):
                mask = self._active(condition)
                return self._load_masked(buffer, offset, is_reversed, mask)
        if condition is None and not self.mask.startswith("%"):
            member = self.loop.member(buffer, at)
            if member is not None and (self.is_full or member.group.stride is not None):
                return self._load_member(member)
        if condition is None and self.is_full and not self.loop.has_gather(buffer):
            return self._load_each(buffer, self._each_strided(buffer, *form))
        return self._gather(buffer, self._strided(buffer, *form), condition)

    def _active(self, condition: Expr | None) -> str:
        """Return the lanes that have an iteration and satisfy the condition of a read.

        It is empty if these are all lanes.
        """
        if condition is None:
            return self.mask
        holds = self.value(condition)
        if not self.mask:
            return holds
        t = lanes("i1", self.width)
        return self.f.emit(f"and {t} {self.mask}, {holds}")

    def store(
        self, buffer: Buffer, at: Index, value: str, member: Member | None = None
    ) -> None:
        """Store the active lanes of a vector.

        Args:
            member: What it is of an interleave group. If all lanes are active, the
                group is stored when all its members are given.
        """
        if member is not None and self.is_full:
            members = self._members.setdefault(member.group, {})
            members[member.number] = value
            if len(members) == member.group.factor:
                del self._members[member.group]
                self._store_group(member.group, [x for _, x in sorted(members.items())])
            return
        form = self.loop.affine.of(self.memory.linear(buffer, at))
        bits = to_memory(self.f, value, buffer.dtype, self.width)
        if form is None:
            self._scatter(buffer, self._addresses(buffer, at), bits)
        elif form[0].is_const and form[0].attr in (1, -1):
            self._store_run(buffer, form[1], form[0].attr < 0, bits)
        elif not self.is_full or self.loop.has_gather(buffer):
            self._scatter(buffer, self._strided(buffer, *form), bits)
        else:
            self._store_each(buffer, self._each_strided(buffer, *form), bits)

    def _run_address(self, buffer: Buffer, offset: Expr, is_reversed: bool) -> str:
        """Return the lowest address of `width` contiguous elements.

        A constant in the offset is added last, where it is part of the instruction that
        reads: the elements of a stencil share the register of their address.
        """
        base, constant = base_and_constant(offset)
        address = self._address_of_run(buffer, base, is_reversed)
        if constant:
            element = memory_type(buffer.dtype)
            address = self.f.emit(
                f"getelementptr {element}, ptr {address}, i64 {constant}"
            )
        return address

    def _address_of_run(self, buffer: Buffer, offset: Expr, is_reversed: bool) -> str:
        row, position = self.loop.row(buffer, offset), self.position
        if is_reversed:
            position = self.f.emit(f"sub i64 {1 - self.width}, {position}")
        elif position == "0":
            return row
        element = memory_type(buffer.dtype)
        return self.f.emit(f"getelementptr {element}, ptr {row}, i64 {position}")

    def _load_run(
        self, buffer: Buffer, offset: Expr, is_reversed: bool, condition: Expr | None
    ) -> str:
        """Load contiguous elements under a condition that is uniform."""
        address = self._run_address(buffer, offset, is_reversed)
        if condition is not None:
            address = self.memory.readable(address, self.loop.uniform(condition))
        has_room = condition is None and self._has_room(buffer, offset, is_reversed)
        if self.mask and not has_room:
            return self._masked_at(buffer, address, is_reversed, self.mask)
        stored = memory_type(buffer.dtype, self.width)
        note, _ = self.memory.notes(buffer)
        align = buffer.dtype.itemsize
        value = self.f.emit(f"load {stored}, ptr {address}, align {align}{note}")
        if self.mask:  # what is behind the last element may never have been written
            value = self.f.emit(f"freeze {stored} {value}")
        return self._loaded(buffer, value, is_reversed)

    def _has_room(self, buffer: Buffer, offset: Expr, is_reversed: bool) -> bool:
        """Return whether each inactive lane is behind the end of a row of the arena,
        whose memory is rounded up to whole cache lines, and has a place there.

        A load under a mask waits until a store under a mask before it is in the cache:
        processors forward only whole vectors from one to the other.
        """
        if buffer.space != "arena" or len(buffer.shape) != 1 or is_reversed:
            return False
        [extent] = buffer.shape
        if self.loop.emitter.unit.guarded or not (extent.is_const and offset.is_const):
            return False
        if self.mask.startswith("%") or self.position.startswith("%"):
            return False
        first, itemsize = offset.attr + int(self.position), buffer.dtype.itemsize
        if first + self.mask.count("true") != extent.attr:
            return False
        end = (first + self.width) * itemsize
        return bool(end <= rounded_up(extent.attr * itemsize))

    def _load_masked(
        self, buffer: Buffer, offset: Expr, is_reversed: bool, mask: str
    ) -> str:
        """Load those of some contiguous elements that a mask selects.

        If it selects none, the address may lie outside of all pages of the process. The
        processor suppresses that fault in some hundred cycles, so zeros are read
        instead.
        """
        address = self._run_address(buffer, offset, is_reversed)
        bits = self.f.emit(f"bitcast {lanes('i1', self.width)} {mask} to i{self.width}")
        some = self.f.emit(f"icmp ne i{self.width} {bits}, 0")
        address = self.memory.readable(address, some)
        return self._masked_at(buffer, address, is_reversed, mask)

    def _masked_at(
        self, buffer: Buffer, address: str, is_reversed: bool, mask: str
    ) -> str:
        stored = memory_type(buffer.dtype, self.width)
        note, _ = self.memory.notes(buffer)
        mask = self._reverse(mask, "i1") if is_reversed else mask
        name = self._masked_name("load", buffer, f"{stored} @%s(ptr, %s, {stored})")
        value = self.f.emit(
            f"call {stored} @{name}(ptr align {buffer.dtype.itemsize} {address}, "
            f"{lanes('i1', self.width)} {mask}, {stored} zeroinitializer){note}"
        )
        return self._loaded(buffer, self._pinned(buffer, value), is_reversed)

    def _pinned(self, buffer: Buffer, value: str) -> str:
        """Keep a masked load or gather where it is, if a store may change the memory.

        LLVM 22 makes one masked load of a masked load and a select under its mask, and
        puts it where the select is, though a store to the memory is in between.
        """
        if self.memory.is_invariant(buffer):
            return value
        stored = memory_type(buffer.dtype, self.width)
        return self.f.emit(f"freeze {stored} {value}")

    def _loaded(self, buffer: Buffer, value: str, is_reversed: bool) -> str:
        if is_reversed:
            value = self._reverse(value, memory_type(buffer.dtype))
        return from_memory(self.f, value, buffer.dtype, self.width)

    def _store_run(
        self, buffer: Buffer, offset: Expr, is_reversed: bool, bits: str
    ) -> None:
        address = self._run_address(buffer, offset, is_reversed)
        stored = memory_type(buffer.dtype, self.width)
        _, note = self.memory.notes(buffer)
        align = buffer.dtype.itemsize
        mask = self.mask
        if is_reversed:
            bits = self._reverse(bits, memory_type(buffer.dtype))
            mask = mask and self._reverse(mask, "i1")
        if mask and not self._has_room(buffer, offset, is_reversed):
            name = self._masked_name("store", buffer, f"void @%s({stored}, ptr, %s)")
            self.f.do(
                f"call void @{name}({stored} {bits}, ptr align {align} {address}, "
                f"{lanes('i1', self.width)} {mask}){note}"
            )
        else:
            self.f.do(f"store {stored} {bits}, ptr {address}, align {align}{note}")

    def _masked_name(self, access: str, buffer: Buffer, declaration: str) -> str:
        """Declare a masked access, and return the name of its intrinsic."""
        name = f"llvm.masked.{access}{overload(memory_type(buffer.dtype), self.width)}"
        name += ".p0" if access in ("load", "store") else f".v{self.width}p0"
        mask = lanes("i1", self.width)
        self.f.module.declare(declaration % (name, mask))
        return name

    def _reverse(self, vector: str, scalar: str) -> str:
        t = lanes(scalar, self.width)
        order = ", ".join(f"i32 {lane}" for lane in reversed(range(self.width)))
        return self.f.emit(
            f"shufflevector {t} {vector}, {t} poison, <{self.width} x i32> <{order}>"
        )

    # --- interleaved accesses

    def _load_member(self, member: Member) -> str:
        """Load a member of the group of each iteration: see `interleaving`."""
        group, f = member.group, self.f
        dtype, width = group.buffer.dtype, self.register_lanes(group.buffer)
        scalar = memory_type(dtype)
        parts: list[str] = []
        block = group.block(member.number)
        for k in range(0, self.width, width):
            if block is not None and group.stride is not None:
                columns = self._columns(group, group.stride, block, k, width)
                parts.append(columns[member.number - block.start])
                continue
            vectors = self._group_vectors(group, k, width)
            if group.is_split:
                parts.append(vectors[member.number])
            else:
                parts.append(deinterleaved(f, vectors, scalar, width, member))
        whole = joined(f, parts, scalar, width)
        if not self.is_full:  # lanes without an iteration have no value
            whole = f.emit(f"freeze {memory_type(dtype, self.width)} {whole}")
        return from_memory(f, whole, dtype, self.width)

    def _group_vectors(self, group: Group, first: int, width: int) -> list[str]:
        """Load the groups of `width` iterations from `first` on: as they lie in memory,
        or, if all are shuffled together, as a vector of each member."""
        vectors = self._vectors.get((group, first, 0))
        if vectors is not None:
            return vectors
        dtype = group.buffer.dtype
        note, _ = self.memory.notes(group.buffer)
        stored = f"{memory_type(dtype, width)}, ptr"
        vectors = [
            self.f.emit(f"load {stored} {address}, align {dtype.itemsize}{note}")
            for address in self._group_addresses(group, first, width)
        ]
        if group.is_split:
            vectors = split(self.f, vectors, memory_type(dtype), width)
        self._vectors[group, first, 0] = vectors
        return vectors

    def _columns(
        self, group: Group, stride: Expr, block: range, first: int, width: int
    ) -> list[str]:
        """Load a block of the rows of `width` iterations from `first` on, as a vector
        of each member."""
        vectors = self._vectors.get((group, first, block.start))
        if vectors is not None:
            return vectors
        dtype, length = group.buffer.dtype, len(block)
        note, _ = self.memory.notes(group.buffer)
        offset = e.add(group.first, e.index(block.start))
        addresses = self._each_strided(group.buffer, stride, offset)
        stored, tail = memory_type(dtype, length), f", align {dtype.itemsize}{note}"
        active = self.mask.count("true") if self.mask else self.width
        rows = [
            self.f.emit(f"load {stored}, ptr {addresses[k]}{tail}")
            if k < active
            else "poison"
            for k in range(first, first + width)
        ]
        vectors = transposed(self.f, rows, memory_type(dtype), length)
        self._vectors[group, first, block.start] = vectors
        return vectors

    def _store_group(self, group: Group, members: Sequence[str]) -> None:
        """Store groups, of which the vector of each member is given."""
        f, dtype, width = self.f, group.buffer.dtype, self.register_lanes(group.buffer)
        scalar, stored = memory_type(dtype), memory_type(dtype, width)
        _, note = self.memory.notes(group.buffer)
        bits = [to_memory(f, x, dtype, self.width) for x in members]
        if group.stride is not None:
            self._store_rows(group, group.stride, bits)
            return
        for first in range(0, self.width, width):
            parts = [part(f, x, scalar, self.width, first, width) for x in bits]
            vectors = interleaved(f, parts, scalar, width)
            addresses = self._group_addresses(group, first, width)
            tail = f", align {dtype.itemsize}{note}"
            for vector, address in zip(vectors, addresses, strict=True):
                f.do(f"store {stored} {vector}, ptr {address}{tail}")

    def _store_rows(self, group: Group, stride: Expr, bits: Sequence[str]) -> None:
        """Store the members of groups in rows of their own: square blocks of as many
        iterations as members are transposed."""
        f, scalar, count = self.f, memory_type(group.buffer.dtype), group.factor
        _, note = self.memory.notes(group.buffer)
        tail = f", align {group.buffer.dtype.itemsize}{note}"
        addresses = self._each_strided(group.buffer, stride, group.first)
        for first in range(0, self.width, count):
            block = [part(f, x, scalar, self.width, first, count) for x in bits]
            rows = transposed(f, block, scalar, count)
            for row, address in zip(rows, addresses[first:], strict=False):
                f.do(f"store {lanes(scalar, count)} {row}, ptr {address}{tail}")

    def distance(self, step: str) -> str:
        """Return the position times a step."""
        return self.f.emit(f"mul i64 {self.position}, {step}")

    def _group_addresses(self, group: Group, first: int, width: int) -> list[str]:
        f, element = self.f, memory_type(group.buffer.dtype)
        start = self.loop.row(group.buffer, group.first)
        step, iteration = group.factor, first
        if group.is_reversed:  # the last iteration's elements are the first in memory
            step, iteration = -step, first + width - 1
        distance = self.distance(str(step))
        block = f.emit(f"getelementptr {element}, ptr {start}, i64 {distance}")
        return [
            f.emit(f"getelementptr {element}, ptr {block}, i64 {iteration * step + k}")
            for k in range(0, group.factor * width, width)
        ]

    def register_lanes(self, buffer: Buffer) -> int:
        """Return how many lanes one register has for a buffer's elements."""
        return min(self.width, self.loop.emitter.unit.target.lanes(buffer.dtype))

    def forget_loads(self) -> None:
        self.forget_changed(*[group.buffer for group, *_ in self._vectors])

    def forget_changed(self, *buffers: Buffer) -> None:
        """Remove the registers that a write to these buffers, or to variables, may have
        changed. The groups of other buffers stay: to load and to transpose them again
        takes long, and no two buffers share memory while both are read."""
        super().forget_loads()
        for key in [*self._vectors]:
            buffer = key[0].buffer
            if buffer in buffers and not self.memory.is_invariant(buffer):
                del self._vectors[key]

    # --- strided and other accesses

    def _strided(self, buffer: Buffer, coefficient: Expr, offset: Expr) -> str:
        """Return the addresses of elements `coefficient * variable + offset`.

        The distances from the first one are a constant, if the coefficient is: accesses
        share its register, and differ in the scalar address that each adds to it.
        """
        if coefficient.is_const and abs(coefficient.attr) * self.width < 1 << 31:
            return self._from_first(buffer, coefficient.attr, offset)
        t = lanes("i64", self.width)
        step = self.loop.uniform_lanes(coefficient)
        base = self.loop.uniform_lanes(offset)
        scaled = self.f.emit(f"mul {t} {self.variable(self.loop.var)}, {step}")
        distances = self.f.emit(f"add {t} {scaled}, {base}")
        if self._is_narrow(buffer):
            narrow = lanes("i32", self.width)
            distances = self.f.emit(f"trunc {t} {distances} to {narrow}")
        return self._at(buffer, distances)

    def _from_first(self, buffer: Buffer, step: int, offset: Expr) -> str:
        """Return addresses that are `step` elements apart."""
        base, constant = base_and_constant(offset)
        element, first = memory_type(buffer.dtype), self.loop.row(buffer, base)
        if self.position != "0":
            distance = self.distance(str(step))
            first = self.f.emit(f"getelementptr {element}, ptr {first}, i64 {distance}")
        if constant:
            first = self.f.emit(f"getelementptr {element}, ptr {first}, i64 {constant}")
        scalar = "i32" if self._is_wide() else "i64"
        distances = ", ".join(f"{scalar} {step * k}" for k in range(self.width))
        t = lanes(scalar, self.width)
        return self.f.emit(f"getelementptr {element}, ptr {first}, {t} <{distances}>")

    def _each_strided(
        self, buffer: Buffer, coefficient: Expr, offset: Expr
    ) -> list[str]:
        """Return the addresses of the lanes, each computed from the one before."""
        element, step = memory_type(buffer.dtype), self.loop.uniform(coefficient)
        distance = self.distance(step)
        row, addresses = self.loop.row(buffer, offset), list[str]()
        for _ in range(self.width):
            row = self.f.emit(f"getelementptr {element}, ptr {row}, i64 {distance}")
            addresses.append(row)
            distance = step
        return addresses

    def _addresses(self, buffer: Buffer, at: Index) -> str:
        """Return the addresses of elements at any index."""
        distances = self.memory.linear(buffer, at)
        if self._is_narrow(buffer):
            distances = narrowed(distances, self.loop.affine.is_uniform)
        return self._at(buffer, self.value(distances))

    def _is_narrow(self, buffer: Buffer) -> bool:
        """Return whether one register of 32-bit distances has all lanes, and is one
        gather."""
        return self._is_wide() and self.loop.has_gather(buffer) and is_small(buffer)

    def _is_wide(self) -> bool:
        """Return whether distances of 64 bits take several registers."""
        return self.width * 64 > self.loop.emitter.unit.target.register_bits

    def _at(self, buffer: Buffer, distances: str) -> str:
        element = memory_type(buffer.dtype)
        pointer = self.loop.row(buffer, e.index(0))
        t = lanes("i32" if self._is_narrow(buffer) else "i64", self.width)
        return self.f.emit(f"getelementptr {element}, ptr {pointer}, {t} {distances}")

    def _gather(self, buffer: Buffer, addresses: str, condition: Expr | None) -> str:
        stored, w = memory_type(buffer.dtype, self.width), self.width
        note, _ = self.memory.notes(buffer)
        active = self._active(condition)
        if self.loop.has_gather(buffer):
            pointers = lanes("ptr", w)
            name = self._masked_name(
                "gather", buffer, f"{stored} @%s({pointers}, %s, {stored})"
            )
            align = f"align {buffer.dtype.itemsize}"
            mask = active or "splat (i1 true)"
            result = self.f.emit(
                f"call {stored} @{name}({pointers} {align} {addresses}, "
                f"{lanes('i1', w)} {mask}, {stored} zeroinitializer){note}"
            )
            result = self._pinned(buffer, result)
            return from_memory(self.f, result, buffer.dtype, w)
        if active:
            t, zeros = lanes("ptr", w), self.f.module.zeros()
            addresses = self.f.emit(
                f"select {lanes('i1', w)} {active}, {t} {addresses}, "
                f"{t} splat (ptr {zeros})"
            )
        return self._load_each(buffer, self._each(addresses))

    def _load_each(self, buffer: Buffer, addresses: list[str]) -> str:
        """Load each lane from its own address."""
        stored, element = (memory_type(buffer.dtype, n) for n in (self.width, 1))
        note, _ = self.memory.notes(buffer)
        result = "poison"
        for lane, address in enumerate(addresses):
            value = self.f.emit(f"load {element}, ptr {address}{note}")
            result = self.f.emit(
                f"insertelement {stored} {result}, {element} {value}, i64 {lane}"
            )
        return from_memory(self.f, result, buffer.dtype, self.width)

    def _each(self, addresses: str) -> list[str]:
        t = lanes("ptr", self.width)
        return [
            self.f.emit(f"extractelement {t} {addresses}, i64 {lane}")
            for lane in range(self.width)
        ]

    def _scatter(self, buffer: Buffer, addresses: str, bits: str) -> None:
        stored, w = memory_type(buffer.dtype, self.width), self.width
        _, note = self.memory.notes(buffer)
        if self.mask or self.loop.has_gather(buffer):
            pointers = lanes("ptr", w)
            name = self._masked_name(
                "scatter", buffer, f"void @%s({stored}, {pointers}, %s)"
            )
            align = f"align {buffer.dtype.itemsize}"
            mask = self.mask or "splat (i1 true)"
            self.f.do(
                f"call void @{name}({stored} {bits}, {pointers} {align} {addresses}, "
                f"{lanes('i1', w)} {mask}){note}"
            )
            return
        self._store_each(buffer, self._each(addresses), bits)

    def _store_each(self, buffer: Buffer, addresses: list[str], bits: str) -> None:
        """Store each lane to its own address."""
        stored, element = (memory_type(buffer.dtype, n) for n in (self.width, 1))
        _, note = self.memory.notes(buffer)
        for lane, address in enumerate(addresses):
            value = self.f.emit(f"extractelement {stored} {bits}, i64 {lane}")
            self.f.do(f"store {element} {value}, ptr {address}{note}")
