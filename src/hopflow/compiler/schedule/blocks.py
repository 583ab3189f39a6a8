"""Blocking: groups iterations of a loop into blocks."""

from hopflow import dtypes
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Expr, Var
from hopflow.loop_ir.program import Binding, For, Stmt
from hopflow.loop_ir.walk import replace, statements


def block_of(loop: For, size: int | Expr, number: Var | None = None) -> tuple[Var, For]:
    """Return the variable of a loop over blocks, and the loop inside a block.

    for i in 0..n:            for i_row in 0..min(8, n - i_block * 8):
        a[i] = b[i]    ->         a[i_block * 8 + i_row] = b[i_block * 8 + i_row]

    The body is rewritten in place.

    Args:
        number: The variable of a loop over blocks that is there already.
    """
    number = number or Var(f"{loop.var.name}_block", dtypes.int64)
    inner = Var(f"{loop.var.name}_row", dtypes.int64)
    extent = _as_index(size)
    first = e.mul(e.read(number), extent)
    position = e.add(first, e.read(inner))

    def moved(node: Expr) -> Expr | None:
        return position if node.op == "var" and node.attr is loop.var else None

    for statement in statements(loop.body):
        replace(statement, moved)
    sizes = loop.extent, extent
    if not all(n.is_const for n in sizes) or loop.extent.attr % extent.attr:
        extent = e.binary("min", extent, e.sub(loop.extent, first))
    rows = For(inner, extent, loop.body, loop.independent, loop.binding, loop.nodes)
    return number, rows


def over_blocks(
    number: Var, loop: For, size: int | Expr, body: list[Stmt], binding: Binding
) -> For:
    """Return the loop over the blocks of `loop`, each of which runs `body`."""
    extent = _as_index(size)
    blocks = e.div(e.add(loop.extent, e.sub(extent, e.index(1))), extent)
    return For(number, blocks, body, True, binding, loop.nodes)


def _as_index(size: int | Expr) -> Expr:
    return e.index(size) if isinstance(size, int) else size
