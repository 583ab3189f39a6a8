"""Matrix products: our own code, on the calling thread.

An element of the result is one chain of fused multiply-adds over k, in order, whatever
tile it falls in; so its bits depend neither on the sizes around it nor on the width of
vectors. (But in a product with a vector whose sum runs along memory, each lane has a
chain of its own.)

The result is made in tiles that stay in registers, some rows by some vectors. The tiles
below each other read one panel of `b`, as wide as they are. Where they are many, or
where the panel does not lie in memory as they need it (it is transposed, or at the right
edge), it is first copied to the stack, dense, and filled up with zeros.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from hopflow.compiler.llvm.blas import Wrapper
from hopflow.compiler.llvm.module import HOT, Function, Module
from hopflow.compiler.llvm.target import Target
from hopflow.compiler.llvm.types import lanes, overload, register_type
from hopflow.dtypes import DType
from hopflow.loop_ir.routines import Routine

DEPTH: Final = 256
"""So many rows of a panel are used at a time: they stay in the caches."""
REUSES: Final = 64
"""From so many rows of the result on, a panel is copied wherever it lies."""


@dataclass(frozen=True, slots=True)
class _Tiles:
    """The tiles of one dtype on one target.

    heights   rows of a tile: as many as there are registers for, then what is left
    wide      vectors of a tile; at the right edge there are tiles of one vector
    long      vectors of a tile in a product of one row
    """

    lane: str
    width: int
    heights: tuple[int, ...]
    wide: int
    long: int

    @staticmethod
    def of(target: Target, dtype: DType) -> "_Tiles":
        width = target.register_bits // dtype.bits
        lane = register_type(dtype)
        if target.register_bits == 256:  # 16 registers: 12 sums, 3 of `b`, 1 of `a`
            return _Tiles(lane, width, (4, 1), 3, 6)
        return _Tiles(lane, width, (8, 4, 1), 3, 8)  # 32 registers

    @property
    def size(self) -> int:
        """Bytes of an element."""
        return {"float": 4, "double": 8}[self.lane]


def define(
    module: Module, name: str, routine: Routine, dtype: DType, target: Target
) -> None:
    """Define one of the four matrix products, as `loop_ir.routines` says."""
    w = Wrapper(module, name, routine, dtype, target)
    out = w.buffers["out"]
    a_transposed, b_transposed = (routine.name[k : k + 1] == "t" for k in (5, 6))
    product = _Product(w.f, _Tiles.of(target, dtype), a_transposed, b_transposed)
    w.leave_if_empty(out)
    w.when(w.f.emit("icmp eq i64 %k, 0"), lambda: w.clear(out))
    # With one row or column it is the product of a matrix and a vector.
    one_column, one_row = (w.f.emit(f"icmp eq i64 %{size}, 1") for size in "nm")
    if a_transposed:
        w.when(one_column, lambda: product.long_row("%b", "%a", "%m"))
    else:
        w.when(one_column, lambda: product.dots("%a", "%b", "%m"))
    if b_transposed:
        w.when(one_row, lambda: product.dots("%b", "%a", "%n"))
    else:
        w.when(one_row, lambda: product.long_row("%a", "%b", "%n"))
    product.all_tiles()
    w.finish()
    module.define(name, w.f.text)


@dataclass(frozen=True, slots=True)
class _Panel:
    """Columns `first`... of `b` from row `depth` on, and where they are.

    count    how many columns: a register, or all of `vectors`
    step     elements from one row to the next
    rows     how many of them
    begins   whether `depth` is 0: an i1
    """

    pointer: str
    step: str
    first: str
    depth: str
    rows: str
    begins: str
    vectors: int
    count: str = ""


class _Product:
    """Emits the loops over tiles. `%a`, `%b`, `%out`, `%m`, `%n`, `%k` are given."""

    def __init__(
        self, f: Function, tiles: _Tiles, a_transposed: bool, b_transposed: bool
    ) -> None:
        self.f, self.tiles = f, tiles
        self.a_transposed, self.b_transposed = a_transposed, b_transposed
        span = tiles.wide * tiles.width * tiles.size
        self.copy = f.slot(f"[{DEPTH * span} x i8]", "panel", 64)
        edge = tiles.heights[0] * tiles.width * tiles.size
        self.edge = f.slot(f"[{edge} x i8]", "edge", 64)

    # --- arithmetic on i64, addresses, loops

    def op(self, op: str, x: str, y: str | int) -> str:
        return self.f.emit(f"{op} i64 {x}, {y}")

    def least(self, x: str, y: int) -> str:
        self.f.module.declare("i64 @llvm.umin.i64(i64, i64)")
        return self.f.emit(f"call i64 @llvm.umin.i64(i64 {x}, i64 {y})")

    def at(self, pointer: str, *offsets: str) -> str:
        """The address of an element: `pointer` and all the offsets."""
        for offset in offsets:
            pointer = self.f.emit(
                f"getelementptr {self.tiles.lane}, ptr {pointer}, i64 {offset}"
            )
        return pointer

    def each(
        self, start: str, stop: str, step: int, body: Callable[[str], None]
    ) -> None:
        """`body` of each position from `start` up to `stop`, if there is any."""
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

    # --- the loops over tiles

    def all_tiles(self) -> None:
        """The product of two matrices."""
        f = self.f
        span = self.tiles.wide * self.tiles.width
        whole = self.op("mul", self.op("udiv", "%n", span), span)
        many = f.emit(f"icmp uge i64 %m, {REUSES}")
        copies = "true" if self.b_transposed else many

        def at_depth(depth: str) -> None:
            rows = self.least(self.op("sub", "%k", depth), DEPTH)
            begins = f.emit(f"icmp eq i64 {depth}, 0")

            def inside(first: str) -> None:
                panel = self.panel(first, depth, rows, begins, self.tiles.wide)
                self.if_(copies, lambda: self.fill(panel))
                self.below(self.chosen(copies, panel))

            self.each("0", whole, span, inside)
            self.each(
                whole, "%n", self.tiles.width, lambda j: self.edges(j, depth, rows)
            )

        self.each("0", "%k", DEPTH, at_depth)

    def panel(
        self, first: str, depth: str, rows: str, begins: str, vectors: int
    ) -> _Panel:
        """A panel where it lies in `b`."""
        if self.b_transposed:
            start = self.at("%b", self.op("mul", first, "%k"), depth)
            return _Panel(start, "1", first, depth, rows, begins, vectors)
        start = self.at("%b", self.op("mul", depth, "%n"), first)
        return _Panel(start, "%n", first, depth, rows, begins, vectors)
