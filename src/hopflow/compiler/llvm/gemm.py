"""Matrix products: our own code, on the calling thread, the same for every size.

An element of the result is one chain of fused multiply-adds over k, in order, whatever
tile it falls in (but for products with a vector whose sum runs along memory: those have
a chain for each lane). So its bits do not depend on the sizes around it.

The result is made in tiles that stay in registers: `rows` rows by some vectors. For a
tile a panel of `b` as wide as the tile is read again and again. Where that would be many
times, or where it does not lie in memory as the tile needs it (transposed, or at the
right edge), the panel is first copied to the stack, dense and filled up with zeros.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from hopflow.compiler.llvm.blas import Wrapper
from hopflow.compiler.llvm.module import HOT, Function, Module
from hopflow.compiler.llvm.target import Target
from hopflow.compiler.llvm.types import lanes, overload, register_type
from hopflow.dtypes import DType
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.nest import Buffer
from hopflow.loop_ir.routines import Routine

DEPTH: Final = 256
"""So many rows of a panel are used at a time: they stay in the second-level cache."""
REUSES: Final = 64
"""From so many rows of the result on, a panel is copied wherever it lies."""


@dataclass(frozen=True, slots=True)
class _Shape:
    """How the tiles of one target and dtype are: heights, and vectors wide."""

    lane: str
    width: int
    heights: tuple[int, ...]
    wide: int  # vectors of a tile's full width
    row: int  # of a tile of one row, in a product of one row

    @staticmethod
    def of(target: Target, dtype: DType) -> "_Shape":
        width = target.register_bits // dtype.bits
        # With 32 registers: 24 sums, 3 vectors of `b`. With 16: 12 and 3.
        many = target.register_bits != 256
        heights = (8, 4, 1) if many else (4, 1)
        return _Shape(register_type(dtype), width, heights, 3, 8 if many else 6)

    @property
    def vector(self) -> str:
        return lanes(self.lane, self.width)


def define(
    module: Module, name: str, routine: Routine, dtype: DType, target: Target
) -> None:
    """Define one of the four matrix products, as `loop_ir.routines` says."""
    shape = _Shape.of(target, dtype)
    w = Wrapper(module, name, routine, dtype, target)
    a, b, out = (w.buffers[array] for array in ("a", "b", "out"))
    a_transposed, b_transposed = (
        routine.name[5:6] == "t",
        routine.name[6:7] == "t",
    )
    w.leave_if_empty(out)
    w.when(w.f.emit("icmp eq i64 %k, 0"), lambda: w.clear(out))
    product = _Product(w, shape, a_transposed, b_transposed)
    # A product with one row or column is that of a matrix and a vector.
    column, row = (w.f.emit(f"icmp eq i64 %{size}, 1") for size in ("n", "m"))
    if not a_transposed:
        w.when(column, lambda: product.dots("%a", "%b", "%m"))
    else:
        w.when(column, lambda: product.one_row("%b", "%a", "%m"))
    if b_transposed:
        w.when(row, lambda: product.dots("%b", "%a", "%n"))
    else:
        w.when(row, lambda: product.one_row("%a", "%b", "%n"))
    product.tiles()
    w.finish()
    module.define(name, w.f.text)
    assert isinstance(a, Buffer)
    assert isinstance(b, Buffer)


class _Product:
    """The driver: which tiles there are, and where each finds its panel."""

    def __init__(
        self, w: Wrapper, shape: _Shape, a_transposed: bool, b_transposed: bool
    ) -> None:
        self.w, self.f, self.shape = w, w.f, shape
        self.a_transposed, self.b_transposed = a_transposed, b_transposed
        bits = {"float": 4, "double": 8}[shape.lane]
        span = shape.wide * shape.width
        self.panel = self.f.slot(f"[{DEPTH * span * bits} x i8]", "panel", 64)
        self.edge = self.f.slot(
            f"[{shape.heights[0] * shape.width * bits} x i8]", "edge", 64
        )

    # --- small helpers: i64 arithmetic and addresses

    def op(self, op: str, x: str, y: str | int) -> str:
        return self.f.emit(f"{op} i64 {x}, {y}")

    def least(self, x: str, y: str | int) -> str:
        self.f.module.declare("i64 @llvm.umin.i64(i64, i64)")
        return self.f.emit(f"call i64 @llvm.umin.i64(i64 {x}, i64 {y})")

    def at(self, pointer: str, *offsets: str) -> str:
        """The address of an element: `pointer` plus the sum of the offsets."""
        for offset in offsets:
            pointer = self.f.emit(
                f"getelementptr {self.shape.lane}, ptr {pointer}, i64 {offset}"
            )
        return pointer

    def each(
        self, start: str, stop: str, step: int, body: Callable[[str], None]
    ) -> None:
        """A loop; it may have no iteration at all."""
        unknown = e.binary("max", e.read(_UNKNOWN), e.index(0))
        self.w.emitter.loop(start, stop, step, unknown, body, polls=False)

    def if_(self, test: str, then: Callable[[], None]) -> None:
        name = self.f.name("if")
        self.f.branch_if(test, name, f"end.{name}")
        self.f.start(name)
        with self.w.emitter.values.scope():
            then()
        self.f.branch(f"end.{name}")
        self.f.start(f"end.{name}")
