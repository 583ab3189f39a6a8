"""Rows of a few elements in vector loops: contiguous vectors, and shuffles of them.

    for i in 0..n vector 4:                  v0, v1, v2 = x[i], ... as 12 elements
        out[i] = x[i, 0] * x[i, 2]     ->    x0 = lanes 0, 3, 6, 9 of them
                                             x2 = lanes 2, 5, 8, 11 of them

A gather of 16 elements takes as long as some 30 shuffles, and CPUs without gathers load
each lane alone. The components of a row that a body stores one after the other are put
between each other in the same way, and stored as contiguous vectors.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from hopflow.compiler.cpu.affine import Affine
from hopflow.compiler.cpu.target import CpuTarget
from hopflow.compiler.llvm.memory import Memory
from hopflow.compiler.llvm.module import Function
from hopflow.compiler.llvm.types import lanes
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Buffer, Expr, Index
from hopflow.loop_ir.program import For, Store
from hopflow.loop_ir.walk import loaded, same

MOST: Final = 9
"""The most elements of a row that is read as vectors: those of a matrix of 3 by 3."""


class Place(NamedTuple):
    """An element of a row that belongs to an iteration.

    row    the rows of all iterations
    place  the number of the element in the row
    """

    row: "Row"
    place: int


@dataclass(eq=False)
class Row:
    """Rows of `count` elements, one after the other.

    first   the distance of the first iteration's row from the start of the buffer
    loaded  the elements that the body reads
    stores  by element, the statement that writes it; None: not as vectors
    """

    buffer: Buffer
    count: int
    first: Expr
    loaded: set[int] = field(default_factory=set)
    stores: dict[int, Store] | None = field(default_factory=dict)


class Rows:
    """The rows that a straight-line body reads and writes as vectors."""

    def __init__(
        self, s: For, width: int, affine: Affine, memory: Memory, target: CpuTarget
    ) -> None:
        self._rows: dict[Buffer, list[Row]] = {}
        self._affine, self._memory = affine, memory
        self._width, self._target = width, target
        for statement in s.body:
            for node in loaded(statement):
                if e.condition_of(node) is None:
                    place = self._find(node.attr, e.index_of(node))
                    if place is not None:
                        place.row.loaded.add(place.place)
            if isinstance(statement, Store):
                place = self._find(statement.buffer, statement.indices)
                if place is not None and place.row.stores is not None:
                    if place.place in place.row.stores:
                        place.row.stores = None
                    else:
                        place.row.stores[place.place] = statement
        self.stores: dict[Store, Place] = {}
        for row in (row for rows in self._rows.values() for row in rows):
            self._settle(row, s)

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self.stores) or any(
            self._pays(row, len(row.loaded))
            for rows in self._rows.values()
            for row in rows
        )

    def load(self, buffer: Buffer, at: Index) -> Place | None:
        """Return the element that a read without condition takes; None: not so."""
        place = self._find(buffer, at) if buffer in self._rows else None
        if place is None or not self._pays(place.row, len(place.row.loaded)):
            return None
        return place

    def _settle(self, row: Row, s: For) -> None:
        """Decide whether the stores of a row are vectors.

        All its elements are stored, and until the last is, no one reads the buffer.
        """
        stores = row.stores or {}
        if len(stores) != row.count or not self._pays(row, row.count):
            return
        numbers = sorted(s.body.index(store) for store in stores.values())
        between = s.body[numbers[0] : numbers[-1] + 1]
        if any(
            node.attr is row.buffer for x in between[1:] for node in loaded(x)
        ) or any(
            isinstance(x, Store) and x.buffer is row.buffer and x not in stores.values()
            for x in between
        ):
            return
        self.stores |= {store: Place(row, k) for k, store in stores.items()}

    def _find(self, buffer: Buffer, at: Index) -> Place | None:
        """Return the element of a row that an iteration accesses."""
        if buffer.strides is not None or not at or not at[-1].is_const:
            return None
        form = self._affine.of(self._memory.linear(buffer, at))
        if form is None or not form[0].is_const or not 2 <= form[0].attr <= MOST:
            return None
        count, place = form[0].attr, 0
        elements, axis = 1, len(buffer.shape)
        while elements < count and axis > 1:
            axis -= 1
            extent, i = buffer.shape[axis], at[axis]
            if not (extent.is_const and i.is_const and 0 <= i.attr < extent.attr):
                return None
            place += i.attr * elements
            elements *= extent.attr
        if elements != count:
            return None
        zeros = [e.index(0)] * (len(at) - axis)
        start = self._affine.of(self._memory.linear(buffer, (*at[:axis], *zeros)))
        assert start is not None
        first = start[1]
        rows = self._rows.setdefault(buffer, [])
        for row in rows:
            if row.count == count and same(row.first, first):
                return Place(row, place)
        rows.append(Row(buffer, count, first))
        return Place(rows[-1], place)

    def _pays(self, row: Row, used: int) -> bool:
        """Return whether shuffles take less time than gathers."""
        if not used or self._target.lanes(row.buffer.dtype) < 2:
            return False
        shuffle = 1 if self._target.has_masks else 3
        return row.count + shuffle * used * (row.count - 1) <= 2 * used * self._width


def component(
    f: Function, vectors: Sequence[str], scalar: str, width: int, place: int
) -> str:
    """Emit the elements number `place` of `width` rows that lie in vectors."""
    count = len(vectors)
    return picked(
        f, vectors, scalar, [divmod(k * count + place, width) for k in range(width)]
    )


def woven(f: Function, components: Sequence[str], scalar: str, width: int) -> list[str]:
    """Emit rows as contiguous vectors, from the vector of each of their elements."""
    count = len(components)
    whole = [(k % count, k // count) for k in range(count * width)]
    return [
        picked(f, components, scalar, whole[k : k + width])
        for k in range(0, count * width, width)
    ]


def picked(
    f: Function, vectors: Sequence[str], scalar: str, sources: list[tuple[int, int]]
) -> str:
    """Emit a vector of as many lanes, each given as `(vector, lane)`."""
    width = len(sources)
    t = lanes(scalar, width)
    found = vectors[0]
    for j, vector in enumerate(vectors[1:], 1):
        order = []
        for k, (source, lane) in enumerate(sources):
            if source == j:
                order.append(f"i32 {width + lane}")
            elif source < j:  # it is in its lane already, unless this is the first step
                order.append(f"i32 {lane if j == 1 else k}")
            else:
                order.append("i32 poison")
        found = f.emit(
            f"shufflevector {t} {found}, {t} {vector}, "
            f"<{width} x i32> <{', '.join(order)}>"
        )
    return found


def part(f: Function, vector: str, scalar: str, width: int, at: int, of: int) -> str:
    """Emit `of` of the `width` lanes of a vector, from lane `at` on."""
    if of == width:
        return vector
    t, order = lanes(scalar, width), ", ".join(f"i32 {k}" for k in range(at, at + of))
    if of == 1:
        return f.emit(f"extractelement {t} {vector}, i64 {at}")
    return f.emit(f"shufflevector {t} {vector}, {t} poison, <{of} x i32> <{order}>")


def joined(f: Function, parts: list[str], scalar: str, width: int) -> str:
    """Emit vectors of `width` lanes, a power of two of them, as one."""
    while len(parts) > 1:
        t, order = lanes(scalar, width), ", ".join(f"i32 {k}" for k in range(2 * width))
        parts = [
            f.emit(f"shufflevector {t} {x}, {t} {y}, <{2 * width} x i32> <{order}>")
            for x, y in zip(parts[::2], parts[1::2], strict=True)
        ]
        width *= 2
    return parts[0]
