"""Matrix products without BLAS, of floats and of integers.

An element of the result is a chain of multiply-adds over k, in order and fused if it is
a float, in whatever tile it lies; its bits depend neither on the other sizes nor on the
width of vectors. (The exception is a product with a vector whose sum runs along memory:
there each lane has its own chain.)

A call computes a window of the result, from row `top` to `bottom` and from column
`left` to `right`, so that several threads can share a product (see `products`).

The result is computed in tiles that stay in registers, of some rows and some vectors.
Tiles below each other read the same panel of `b`, as wide as they are. If there are
many, or if the panel is not laid out as they need it (it is transposed, or at the right
edge), it is first copied to the stack, dense, and padded with zeros.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeAlias

from hopflow.compiler.cpu.blas import Wrapper
from hopflow.compiler.cpu.interleaving import transpose_block
from hopflow.compiler.cpu.target import HOT, CpuTarget
from hopflow.compiler.llvm.module import Function, Module
from hopflow.compiler.llvm.operations import broadcast
from hopflow.compiler.llvm.types import lanes, overload, register_type
from hopflow.dtypes import DType
from hopflow.loop_ir.routines import Routine

DEPTH: Final = 256
"""The number of rows of a panel that are used at a time: they stay in the caches."""
HEIGHT: Final = 256
"""The number of rows of the result that are computed at a time: their part of `a` stays
in the caches. It is a multiple of the tiles' heights."""
ROWS: Final = 8
"""The rows of a matrix that are added to a vector at a time: the CPU reads ahead in
about so many places of memory at once."""
REUSES: Final = 64
"""From this number of rows of the result on, every panel is copied."""
WINDOW: Final = ("top", "bottom", "left", "right")
"""The last parameters of a product."""
_ROWS: Final = ("%top", "%bottom")
_COLUMNS: Final = ("%left", "%right")


@dataclass(frozen=True, slots=True)
class _Tiles:
    """The tiles of one dtype on one target.

    heights   the rows of tiles: as many as fit into registers, then of the remainder
    wide      vectors of a tile; at the right edge a tile has one vector
    long      vectors of a tile in a product of one row
    sum       the intrinsic of a product that is added; the order of the sums differs
              between targets, and so may its rounding
    has_masks   whether a part of a vector is loaded or stored by one instruction
    has_vectors   whether there are vectors at all
    """

    lane: str
    width: int
    heights: tuple[int, ...]
    wide: int
    long: int
    sum: str
    has_masks: bool = False
    has_vectors: bool = True

    @staticmethod
    def of(target: CpuTarget, dtype: DType) -> "_Tiles":
        width = target.register_bits // dtype.bits
        lane = register_type(dtype)
        # A product of integers takes a register before it is added.
        wide = 3 if dtype.is_float else 2
        sum_ = "llvm.fma" if target.has_fma else "llvm.fmuladd"
        if target.register_bits == 64:  # no vectors: LLVM makes scalars of pairs
            return _Tiles(lane, 2, (2, 1), 2, 4, sum_, has_vectors=False)
        if target.register_bits == 256:  # 16 registers: 12 sums, 3 of `b`, 1 of `a`
            return _Tiles(lane, width, (4, 1), wide, 2 * wide, sum_, target.has("avx"))
        # 32 registers
        return _Tiles(lane, width, (8, 4, 1), 3, 8, sum_, target.has_masks)

    @property
    def size(self) -> int:
        """The bytes of an element."""
        return {"float": 4, "double": 8, "i32": 4, "i64": 8}[self.lane]

    def add_product(
        self, f: Function, register: str, width: int, x: str, y: str, total: str
    ) -> None:
        """Emit `register`, the sum of a total and a product."""
        t = lanes(self.lane, width)
        if self.lane in ("i32", "i64"):
            f.do(f"{register} = add {t} {total}, {f.emit(f'mul {t} {x}, {y}')}")
            return
        added = f"{t} @{self.sum}{overload(self.lane, width)}"
        f.module.declare(f"{added}({t}, {t}, {t})")
        f.do(f"{register} = call {added}({t} {x}, {t} {y}, {t} {total})")


def define(
    module: Module, name: str, routine: Routine, dtype: DType, target: CpuTarget
) -> None:
    """Define one of the matrix products of `loop_ir.routines`."""
    w = Wrapper(module, name, routine, dtype, target, WINDOW)
    out = w.buffers["out"]
    tiles = _Tiles.of(target, dtype)
    w.leave_if_empty(out)
    w.when(w.f.emit("icmp eq i64 %k, 0"), lambda: w.clear(out))
    if routine.name == "gemm_windows":
        windows = _Windows(w.f, tiles)
        w.when(w.f.emit("icmp eq i64 %m, 1"), windows.long_window)
        windows.all_tiles()
        w.finish()
        module.define(name, w.f.text)
        return
    a_transposed, b_transposed = (routine.name[k : k + 1] == "t" for k in (5, 6))
    product = _Product(w.f, tiles, a_transposed, b_transposed)
    # With one row or one column it is a product of a matrix and a vector.
    one_column, one_row = (w.f.emit(f"icmp eq i64 %{size}, 1") for size in "nm")
    if a_transposed:
        w.when(one_column, lambda: product.long_row("%b", "%a", "%m", _ROWS))
    else:
        w.when(one_column, lambda: product.dots("%a", "%b", _ROWS))
    if b_transposed:
        w.when(one_row, lambda: product.dots("%b", "%a", _COLUMNS))
    else:
        w.when(one_row, lambda: product.long_row("%a", "%b", "%n", _COLUMNS))
    product.all_tiles()
    w.finish()
    module.define(name, w.f.text)


Rows: TypeAlias = tuple[str, str]
"""The address of the first of some rows, and the distance between rows in elements."""


@dataclass(frozen=True, slots=True)
class _Block:
    """`rows` rows of the result from `top` on, and `count` columns of `a` from `depth`
    on.

    All are i64 registers except `begins`, an i1: whether `depth` is 0.
    """

    top: str
    rows: str
    depth: str
    count: str
    begins: str


class _Product:
    """An emitter of loops over tiles; `%a`, `%b`, `%out` and sizes are parameters."""

    def __init__(
        self, f: Function, tiles: _Tiles, a_transposed: bool, b_transposed: bool
    ) -> None:
        self.f, self.tiles = f, tiles
        self.a_transposed, self.b_transposed = a_transposed, b_transposed
        self.span = tiles.wide * tiles.width
        self.copy = f.slot(f"[{DEPTH * self.span} x {tiles.lane}]", "panel", 64)
        edge = tiles.heights[0] * tiles.width
        self.edge = f.slot(f"[{edge} x {tiles.lane}]", "edge", 64)

    # --- arithmetic on i64, addresses, loops

    def op(self, op: str, x: str, y: str | int) -> str:
        return self.f.emit(f"{op} i64 {x}, {y}")

    def least(self, x: str, y: int) -> str:
        self.f.module.declare("i64 @llvm.umin.i64(i64, i64)")
        return self.f.emit(f"call i64 @llvm.umin.i64(i64 {x}, i64 {y})")

    def at(self, pointer: str, *offsets: str) -> str:
        """Return the address of an element: `pointer` plus all offsets."""
        for offset in offsets:
            pointer = self.f.emit(
                f"getelementptr {self.tiles.lane}, ptr {pointer}, i64 {offset}"
            )
        return pointer

    def whole(self, start: str, end: str, step: int) -> str:
        """Return the end of the whole steps from `start` that `end` leaves room for."""
        steps = self.op("udiv", self.op("sub", end, start), step)
        return self.op("add", start, self.op("mul", steps, step))

    def chosen(self, test: str, t: str, yes: str | int, no: str | int) -> str:
        return self.f.emit(f"select i1 {test}, {t} {yes}, {t} {no}")

    def each(
        self, start: str, stop: str, step: int, body: Callable[[str], None]
    ) -> None:
        """Emit a loop: `body` for each position from `start` to `stop` by `step`."""
        f, name, before = self.f, self.f.name("each"), self.f.block
        some = f.emit(f"icmp slt i64 {start}, {stop}")
        f.branch_if(some, name, f"done.{name}")
        f.start(name)
        f.do(f"%i.{name} = phi i64 [ {start}, %{before} ], [ %j.{name}, %end.{name} ]")
        body(f"%i.{name}")
        f.branch(f"end.{name}")
        f.start(f"end.{name}")
        f.do(f"%j.{name} = add nuw nsw i64 %i.{name}, {step}")
        again = f.emit(f"icmp slt i64 %j.{name}, {stop}")
        f.branch_if(again, name, f"done.{name}")
        f.start(f"done.{name}")

    def if_(self, test: str, then: Callable[[], None]) -> None:
        name = self.f.name("if")
        self.f.branch_if(test, name, f"end.{name}")
        self.f.start(name)
        then()
        self.f.branch(f"end.{name}")
        self.f.start(f"end.{name}")

    # --- two matrices

    def all_tiles(self) -> None:
        """Emit the product of two matrices."""

        def at_depth(depth: str) -> None:
            count = self.least(self.op("sub", "%k", depth), DEPTH)
            begins = self.f.emit(f"icmp eq i64 {depth}, 0")

            def at_height(top: str) -> None:
                rows = self.least(self.op("sub", "%bottom", top), HEIGHT)
                self.block(_Block(top, rows, depth, count, begins))

            self.each("%top", "%bottom", HEIGHT, at_height)

        self.each("0", "%k", DEPTH, at_depth)

    def block(self, block: _Block) -> None:
        """Emit what some columns of `a` add to some rows of the result."""
        width = self.tiles.width
        whole = self.whole("%left", "%right", self.span)
        self.each("%left", whole, self.span, lambda j: self.inside(j, block))
        self.each(whole, "%right", width, lambda j: self.edge_panel(j, block))

    def inside(self, j: str, block: _Block) -> None:
        """Emit the tiles of a wide panel."""
        many = self.f.emit(f"icmp uge i64 {block.rows}, {REUSES}")
        panel, step = self.panel(j, block), "%n"
        if self.b_transposed:
            self.fill_transposed(panel, block, self.span)
            panel, step = self.copy, str(self.span)
        else:
            self.if_(many, lambda: self.fill_rows(panel, block, self.span))
            step = self.chosen(many, "i64", self.span, "%n")
            panel = self.chosen(many, "ptr", self.copy, panel)

        def tile(i: str, height: int) -> None:
            out = self.at("%out", self.op("mul", i, "%n"), j)
            a = self.left(i, block.depth)
            self.tile((height, self.tiles.wide), a, (panel, step), (out, "%n"), block)

        self.down(block, tile)

    def edge_panel(self, j: str, block: _Block) -> None:
        """Emit the tiles of a panel of at most one vector."""
        f, width = self.f, self.tiles.width
        columns = self.least(self.op("sub", "%right", j), width)
        partial = f.emit(f"icmp slt i64 {columns}, {width}")
        panel = self.edge_of_b(self.panel(j, block), block, columns, partial)
        if self.tiles.has_masks:

            def part(i: str, height: int) -> None:
                out = self.at("%out", self.op("mul", i, "%n"), j), "%n"
                a = self.left(i, block.depth)
                self.tile((height, 1), a, panel, out, block, columns)

            self.down(block, part)
            return
        goes_on = f.emit(f"icmp ult i1 {block.begins}, {partial}")

        def tile(i: str, height: int) -> None:
            out = self.at("%out", self.op("mul", i, "%n"), j)
            rows = (height, columns)
            edge = (self.edge, str(width))
            self.if_(goes_on, lambda: self.move((out, "%n"), edge, *rows))
            target = self.chosen(partial, "ptr", self.edge, out)
            row = self.chosen(partial, "i64", width, "%n")
            a = self.left(i, block.depth)
            self.tile((height, 1), a, panel, (target, row), block)
            self.if_(partial, lambda: self.move(edge, (out, "%n"), *rows))

        self.down(block, tile)

    def edge_of_b(self, panel: str, block: _Block, columns: str, partial: str) -> Rows:
        """Return a panel of at most one vector, copied if it is `partial` and cannot be
        loaded under a mask."""
        width = self.tiles.width
        if self.tiles.has_masks and not self.b_transposed:
            return panel, "%n"
        self.if_(partial, lambda: self.fill(panel, block, columns, width))
        if self.b_transposed:
            whole = self.f.emit(f"xor i1 {partial}, true")
            self.if_(whole, lambda: self.fill_transposed(panel, block, width))
            return self.copy, str(width)
        step = self.chosen(partial, "i64", width, "%n")
        return self.chosen(partial, "ptr", self.copy, panel), step

    def panel(self, j: str, block: _Block, /) -> str:
        """Return the address of `b[depth, j]`."""
        depth = block.depth
        if self.b_transposed:
            return self.at("%b", self.op("mul", j, "%k"), depth)
        return self.at("%b", self.op("mul", depth, "%n"), j)

    def left(self, i: str, depth: str) -> tuple[str, str, str]:
        """Return the address of `a[i, depth]`, and the steps along i and depth."""
        if self.a_transposed:
            return self.at("%a", self.op("mul", depth, "%m"), i), "1", "%m"
        return self.at("%a", self.op("mul", i, "%k"), depth), "%k", "1"

    def down(self, block: _Block, tile: Callable[[str, int], None]) -> None:
        """Emit `tile(i, height)` for tiles below each other, high ones first."""
        start, end = block.top, self.op("add", block.top, block.rows)
        for height in self.tiles.heights:
            stop = self.whole(start, end, height)

            def tile_at(i: str, height: int = height) -> None:
                tile(i, height)

            self.each(start, stop, height, tile_at)
            start = stop

    def row_of(self, panel: str, r: str, _: _Block) -> str:
        """Return the address of a row of a panel of `b`."""
        return self.at(panel, r if self.b_transposed else self.op("mul", r, "%n"))

    def fill_rows(self, panel: str, block: _Block, span: int) -> None:
        """Emit a copy of whole rows, of `span` elements, of a panel of `b`."""
        t = lanes(self.tiles.lane, span)

        def row(r: str) -> None:
            source = self.row_of(panel, r, block)
            target = self.at(self.copy, self.op("mul", r, span))
            align = self.tiles.size
            values = self.f.emit(f"load {t}, ptr {source}, align {align}")
            self.f.do(f"store {t} {values}, ptr {target}, align {align}")

        self.each("0", block.count, 1, row)

    def fill_transposed(self, panel: str, block: _Block, span: int) -> None:
        """Emit a copy of `span` columns, which are rows in memory."""
        width, first = self.tiles.width, "0"
        if self.tiles.has_vectors:
            transposition = _transposition(self.f.module, self.tiles)
            first = self.whole("0", block.count, width)

            def rows(r: str) -> None:
                for c in range(0, span, width):
                    source = self.at(panel, self.op("mul", "%k", c), r)
                    target = self.at(self.copy, self.op("mul", r, span), str(c))
                    self.f.do(
                        f"call void @{transposition}("
                        f"ptr {source}, i64 %k, ptr {target}, i64 {span})"
                    )

            self.each("0", first, width, rows)
        self.fill(panel, block, str(span), span, first)

    def fill(
        self, panel: str, block: _Block, columns: str, span: int, first: str = "0"
    ) -> None:
        """Emit a copy of a panel's first `columns`, padded with zeros to `span`, from
        row `first` on."""
        lane = self.tiles.lane
        along = "%k" if self.b_transposed else "1"

        def row(r: str) -> None:
            source = self.row_of(panel, r, block)
            target = self.at(self.copy, self.op("mul", r, span))

            def element(c: str) -> None:
                value = f"load {lane}, ptr {self.at(source, self.op('mul', c, along))}"
                register = self.f.emit(value)
                self.f.do(f"store {lane} {register}, ptr {self.at(target, c)}")

            def zero(c: str) -> None:
                self.f.do(f"store {lane} zeroinitializer, ptr {self.at(target, c)}")

            self.each("0", columns, 1, element)
            self.each(columns, str(span), 1, zero)

        self.each(first, block.count, 1, row)

    def move(self, source: Rows, target: Rows, height: int, columns: str) -> None:
        """Emit a copy of the first columns of a tile."""
        (source_, from_), (target_, to) = source, target
        lane = self.tiles.lane

        def row(r: str) -> None:
            first = self.at(source_, self.op("mul", r, from_))
            second = self.at(target_, self.op("mul", r, to))

            def column(c: str) -> None:
                value = self.f.emit(f"load {lane}, ptr {self.at(first, c)}")
                self.f.do(f"store {lane} {value}, ptr {self.at(second, c)}")

            self.each("0", columns, 1, column)

        self.each("0", str(height), 1, row)

    def tile(
        self,
        shape: tuple[int, int],
        a: tuple[str, str, str],
        panel: Rows,
        out: Rows,
        block: _Block,
        columns: str = "",
    ) -> None:
        """Emit the call that adds a block's contribution to a tile of this shape, or to
        its first `columns`."""
        name = _tile(self.f.module, self.tiles, *shape, is_part=bool(columns))
        panel_ = f"ptr {panel[0]}, i64 {panel[1]}"
        self.call_tile(name, a, panel_, out, block, columns)

    def call_tile(
        self,
        name: str,
        a: tuple[str, str, str],
        panel: str,
        out: Rows,
        block: _Block,
        columns: str = "",
    ) -> None:
        pointer, down, along = a
        more = f", i64 {columns}" if columns else ""
        self.f.do(
            f"call void @{name}(ptr {pointer}, i64 {down}, i64 {along}, {panel}, "
            f"ptr {out[0]}, i64 {out[1]}, i64 {block.count}, i1 {block.begins}{more})"
        )

    # --- products of a matrix and a vector

    def long_row(
        self, vector: str, matrix: str, size: str, window: tuple[str, str]
    ) -> None:
        """Emit `out[size] = vector[k] @ matrix[k, size]` for a window of `out`."""

        def at_depth(depth: str) -> None:
            start, end = window
            count = self.least(self.op("sub", "%k", depth), ROWS)
            begins = self.f.emit(f"icmp eq i64 {depth}, 0")
            block = _Block("0", "1", depth, count, begins)
            first = self.at(matrix, self.op("mul", depth, size))
            a = (self.at(vector, depth), "0", "1")

            def piece(j: str, vectors: int, columns: str = "") -> None:
                panel, out = (self.at(first, j), size), (self.at("%out", j), "0")
                self.tile((1, vectors), a, panel, out, block, columns)

            has_masks = self.tiles.has_masks
            for vectors in (
                (self.tiles.long, 1) if has_masks else (self.tiles.long, 1, 0)
            ):
                span = vectors * self.tiles.width or 1
                stop = self.whole(start, end, span)
                self.each(start, stop, span, partial(piece, vectors=vectors))
                start = stop
            if has_masks:
                some = self.f.emit(f"icmp slt i64 {start}, {end}")
                left = self.op("sub", end, start)
                self.if_(some, lambda: piece(start, 1, left))

        self.each("0", "%k", ROWS, at_depth)

    def dots(self, matrix: str, vector: str, window: tuple[str, str]) -> None:
        """Emit `out[i] = matrix[i] @ vector[k]` for a window of `out`."""
        start, end = window
        for height in (4, 1):
            stop = self.whole(start, end, height)
            name = _dots(self.f.module, self.tiles, height)

            def piece(i: str, name: str = name) -> None:
                row = self.at(matrix, self.op("mul", i, "%k"))
                out = self.at("%out", i)
                self.f.do(
                    f"call void @{name}(ptr {row}, ptr {vector}, ptr {out}, i64 %k)"
                )

            self.each(start, stop, height, piece)
            start = stop


class _Windows(_Product):
    """A product with a matrix of windows: row r of `b` is at `%offsets[r]` of `%b`."""

    def __init__(self, f: Function, tiles: _Tiles) -> None:
        super().__init__(f, tiles, False, False)
        self.last = self.op("sub", "%length", "%n")

    def panel(self, j: str, _: _Block, /) -> str:
        return self.at("%b", j)

    def offsets(self, block: _Block) -> str:
        return self.f.emit(f"getelementptr i64, ptr %offsets, i64 {block.depth}")

    def row_of(self, panel: str, r: str, block: _Block) -> str:
        place = self.f.emit(f"getelementptr i64, ptr {self.offsets(block)}, i64 {r}")
        return self.at(panel, _window(self.f, place, self.last))

    def edge_of_b(self, panel: str, block: _Block, columns: str, partial: str) -> Rows:
        width, whole = self.tiles.width, self.f.emit(f"xor i1 {partial}, true")
        self.if_(partial, lambda: self.fill(panel, block, columns, width))
        self.if_(whole, lambda: self.fill_rows(panel, block, width))
        return self.copy, str(width)

    def inside(self, j: str, block: _Block) -> None:
        """Emit the tiles of a wide panel. Few of them read the windows where they are;
        for many the panel is copied, so that each load is of whole cache lines."""
        f, panel, shape = self.f, self.panel(j, block), self.tiles.wide
        many = f.emit(f"icmp uge i64 {block.rows}, {REUSES}")
        few = f.emit(f"xor i1 {many}, true")

        def copied(i: str, height: int) -> None:
            out = self.at("%out", self.op("mul", i, "%n"), j), "%n"
            a, copy = self.left(i, block.depth), (self.copy, str(self.span))
            self.tile((height, shape), a, copy, out, block)

        def in_place(i: str, height: int) -> None:
            out = self.at("%out", self.op("mul", i, "%n"), j), "%n"
            a = self.left(i, block.depth)
            self.window_tile((height, shape), a, panel, out, block)

        def copy_and_multiply() -> None:
            self.fill_rows(panel, block, self.span)
            self.down(block, copied)

        self.if_(many, copy_and_multiply)
        self.if_(few, lambda: self.down(block, in_place))

    def window_tile(
        self,
        shape: tuple[int, int],
        a: tuple[str, str, str],
        panel: str,
        out: Rows,
        block: _Block,
    ) -> None:
        """Emit the call of a tile that reads windows where they are."""
        name = _tile(self.f.module, self.tiles, *shape, windows=True)
        windows = f"ptr {panel}, ptr {self.offsets(block)}, i64 {self.last}"
        self.call_tile(name, a, windows, out, block)

    def long_window(self) -> None:
        """Emit the product of one row."""
        (start, end), block = _COLUMNS, _Block("0", "1", "0", "%k", "true")
        for vectors in (self.tiles.long, 1, 0):
            span = vectors * self.tiles.width or 1
            stop = self.whole(start, end, span)

            def piece(j: str, vectors: int = vectors) -> None:
                a, out = ("%a", "0", "1"), (self.at("%out", j), "0")
                self.window_tile((1, vectors), a, self.panel(j, block), out, block)

            self.each(start, stop, span, piece)
            start = stop


def _window(f: Function, place: str, last: str) -> str:
    """Return the offset at an address, or `last` if it is not from 0 to that."""
    f.module.declare("i64 @llvm.umin.i64(i64, i64)")
    offset = f.emit(f"load i64, ptr {place}")
    return f.emit(f"call i64 @llvm.umin.i64(i64 {offset}, i64 {last})")


def _tile(
    module: Module,
    tiles: _Tiles,
    height: int,
    vectors: int,
    *,
    windows: bool = False,
    is_part: bool = False,
) -> str:
    """Define the function of a tile; with 0 `vectors` it is one element wide. If it
    `is_part`, it is the first `%columns` of one vector.

    For each of `count` rows of the panel it adds the product with a column of `a`: to
    zero if `begins`, else to `out`. Rows are `%step` apart, or windows at `%offsets`.
    """
    kind = "windows" if windows else "part" if is_part else "tile"
    name = f"{kind}.{height}.{vectors}.{tiles.lane}"
    if module.has_function(name):
        return name
    lane, width = tiles.lane, tiles.width if vectors else 1
    t = lanes(lane, width)
    panel_type = "ptr %offsets, i64 %last" if windows else "i64 %step"
    f = Function(
        module,
        f"internal void @{name}(ptr %a, i64 %down, i64 %along, ptr %b, {panel_type}, "
        f"ptr %out, i64 %row, i64 %count, i1 %begins{', i64 %columns' * is_part})",
        f"noinline {HOT}",
    )
    masked = _Masked(f, tiles, "%columns") if is_part else None

    def at(pointer: str, offset: str | int) -> str:
        return f.emit(f"getelementptr {lane}, ptr {pointer}, i64 {offset}")

    def load(place: str) -> str:
        if masked is not None:
            return masked.load(place)
        return f.emit(f"load {t}, ptr {place}, align {tiles.size}")

    rows = [at("%a", f.emit(f"mul i64 %down, {i}")) for i in range(height)]
    places = []
    for i in range(height):
        first = at("%out", f.emit(f"mul i64 %row, {i}"))
        places += [at(first, v * width) for v in range(max(1, vectors))]
    f.branch_if("%begins", "start", "more")
    f.start("more")
    old = [*map(load, places)]
    f.branch("start")
    f.start("start")
    begun = [
        f.emit(f"phi {t} [ zeroinitializer, %entry ], [ {x}, %more ]") for x in old
    ]
    f.branch("loop")
    f.start("loop")
    f.do("%r = phi i64 [ 0, %start ], [ %r.next, %loop ]")
    f.do("%pa = phi i64 [ 0, %start ], [ %pa.next, %loop ]")
    sums = [
        f.emit(f"phi {t} [ {x}, %start ], [ %sum{n}, %loop ]")
        for n, x in enumerate(begun)
    ]
    if windows:
        place = f.emit("getelementptr i64, ptr %offsets, i64 %r")
        row_of_b = at("%b", _window(f, place, "%last"))
    else:
        row_of_b = at("%b", f.emit("mul i64 %r, %step"))
    panel = [load(at(row_of_b, v * width)) for v in range(max(1, vectors))]
    _add_products(f, tiles, [at(row, "%pa") for row in rows], panel, sums, vectors)
    f.do("%pa.next = add i64 %pa, %along")
    f.do("%r.next = add nuw nsw i64 %r, 1")
    f.branch_if(f.emit("icmp ult i64 %r.next, %count"), "loop", "end")
    f.start("end")
    for n, place in enumerate(places):
        if masked is not None:
            masked.store(f"%sum{n}", place)
        else:
            f.do(f"store {t} %sum{n}, ptr {place}, align {tiles.size}")
    f.do("ret void")
    module.define(name, f.text)
    return name


def _add_products(
    f: Function,
    tiles: _Tiles,
    rows: list[str],
    panel: list[str],
    sums: list[str],
    vectors: int,
) -> None:
    """Emit `%sum<n>`: the sums of a tile, with the products of the elements of `a` at
    the addresses `rows` and the vectors of a row of the panel."""
    lane, width = tiles.lane, tiles.width if vectors else 1
    for i, row in enumerate(rows):
        x = f.emit(f"load {lane}, ptr {row}")
        if vectors:
            x = broadcast(f, x, lane, width)
        for v, y in enumerate(panel):
            n = i * len(panel) + v
            tiles.add_product(f, f"%sum{n}", width, x, y, sums[n])


class _Masked:
    """Loads and stores of the first `columns` lanes of vectors."""

    def __init__(self, f: Function, tiles: _Tiles, columns: str) -> None:
        width, bits = tiles.width, 8 * tiles.size
        count = columns
        if bits < 64:
            count = f.emit(f"trunc i64 {columns} to i{bits}")
        counts = broadcast(f, count, f"i{bits}", width)
        numbers = ", ".join(f"i{bits} {k}" for k in range(width))
        test = f.emit(f"icmp ugt {lanes(f'i{bits}', width)} {counts}, <{numbers}>")
        self._f, self._type = f, lanes(tiles.lane, width)
        self._mask = f"{lanes('i1', width)} {test}"
        self._align = f"ptr align {tiles.size}"
        self._name = f"{overload(tiles.lane, width)[1:]}.p0"
        mask, t = lanes("i1", width), self._type
        f.module.declare(f"{t} @llvm.masked.load.{self._name}(ptr, {mask}, {t})")
        f.module.declare(f"void @llvm.masked.store.{self._name}({t}, ptr, {mask})")

    def load(self, source: str) -> str:
        """Emit a load; the other lanes are 0."""
        t = self._type
        return self._f.emit(
            f"call {t} @llvm.masked.load.{self._name}({self._align} {source}, "
            f"{self._mask}, {t} zeroinitializer)"
        )

    def store(self, values: str, target: str) -> None:
        self._f.do(
            f"call void @llvm.masked.store.{self._name}({self._type} {values}, "
            f"{self._align} {target}, {self._mask})"
        )


def _transposition(module: Module, tiles: _Tiles) -> str:
    """Define the function that writes a square of `%from`, as wide as a vector, to
    `%to`, transposed."""
    name = f"transposition.{tiles.lane}"
    if module.has_function(name):
        return name
    f = Function(
        module,
        f"internal void @{name}(ptr %from, i64 %step, ptr %to, i64 %row)",
        f"noinline {HOT}",
    )
    source, target = (
        (pointer, f.emit(f"mul i64 {distance}, {tiles.size}"))
        for pointer, distance in (("%from", "%step"), ("%to", "%row"))
    )
    transpose_block(f, tiles.width, 8 * tiles.size, source, target)
    f.do("ret void")
    module.define(name, f.text)
    return name


def _dots(module: Module, tiles: _Tiles, height: int) -> str:
    """Define the function of the products of some rows with a vector."""
    name = f"dots.{height}.{tiles.lane}"
    if module.has_function(name):
        return name
    lane, width = tiles.lane, tiles.width
    t = lanes(lane, width)
    f = Function(
        module,
        f"internal void @{name}(ptr %a, ptr %x, ptr %out, i64 %k)",
        f"noinline {HOT}",
    )

    def at(pointer: str, offset: str | int) -> str:
        return f.emit(f"getelementptr {lane}, ptr {pointer}, i64 {offset}")

    rows = [at("%a", f.emit(f"mul i64 %k, {i}")) for i in range(height)]
    f.do(f"%whole = and i64 %k, {-width}")
    f.branch_if(f.emit("icmp eq i64 %whole, 0"), "tree", "loop")

    def loop(name: str, t: str, w: int, before: str, starts: list[str]) -> list[str]:
        f.start(name)
        first, stop = ("0", "%whole") if w > 1 else ("%whole", "%k")
        f.do(f"%r{w} = phi i64 [ {first}, %{before} ], [ %next{w}, %{name} ]")
        sums = [
            f.emit(f"phi {t} [ {x}, %{before} ], [ %sum{w}.{i}, %{name} ]")
            for i, x in enumerate(starts)
        ]
        align = f", align {tiles.size}"
        x = f.emit(f"load {t}, ptr {at('%x', f'%r{w}')}{align}")
        for i, row in enumerate(rows):
            y = f.emit(f"load {t}, ptr {at(row, f'%r{w}')}{align}")
            tiles.add_product(f, f"%sum{w}.{i}", w, x, y, sums[i])
        f.do(f"%next{w} = add nuw nsw i64 %r{w}, {w}")
        test = f.emit(f"icmp slt i64 %next{w}, {stop}")
        f.branch_if(test, name, {"loop": "tree", "rest": "end"}[name])
        return [f"%sum{w}.{i}" for i in range(height)]

    vectors = loop("loop", t, width, "entry", ["zeroinitializer"] * height)
    f.start("tree")
    totals = []
    for x in vectors:
        total = f.emit(f"phi {t} [ zeroinitializer, %entry ], [ {x}, %loop ]")
        totals.append(total)
    totals = [_sum_of_lanes(f, x, lane, width) for x in totals]
    f.branch_if(f.emit("icmp slt i64 %whole, %k"), "rest", "end")
    sums = loop("rest", lane, 1, "tree", totals)
    f.start("end")
    results = [
        f.emit(f"phi {lane} [ {x}, %tree ], [ {y}, %rest ]")
        for x, y in zip(totals, sums, strict=True)
    ]
    for i, x in enumerate(results):
        f.do(f"store {lane} {x}, ptr {at('%out', i)}")
    f.do("ret void")
    module.define(name, f.text)
    return name


def _sum_of_lanes(f: Function, x: str, lane: str, width: int) -> str:
    """Return the sum of the lanes, always added in the same tree."""
    while width > 1:
        t, width = lanes(lane, width), width // 2
        halves = [
            f.emit(
                f"shufflevector {t} {x}, {t} poison, <{width} x i32> "
                f"<{', '.join(f'i32 {first + i}' for i in range(width))}>"
            )
            for first in (0, width)
        ]
        half = f"<{width} x {lane}>"
        add = "add" if lane in ("i32", "i64") else "fadd"
        x = f.emit(f"{add} {half} {halves[0]}, {halves[1]}")
    return f.emit(f"extractelement <1 x {lane}> {x}, i64 0")
