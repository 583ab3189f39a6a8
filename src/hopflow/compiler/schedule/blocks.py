"""Blocking: groups iterations of a loop into blocks."""

from hopflow import dtypes
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Expr, Var
from hopflow.loop_ir.program import Binding, For, Stmt
from hopflow.loop_ir.walk import replace, statements


def block_of(loop: For, size: int) -> tuple[Var, For]:
    """Return the variable of a loop over blocks, and the loop inside a block.

    for i in 0..n:            for i_row in 0..min(8, n - i_block * 8):
        a[i] = b[i]    ->         a[i_block * 8 + i_row] = b[i_block * 8 + i_row]

    The body is rewritten in place.
    """
    number = Var(f"{loop.var.name}_block", dtypes.int64)
    inner = Var(f"{loop.var.name}_row", dtypes.int64)
    first = e.mul(e.read(number), e.index(size))
    position = e.add(first, e.read(inner))

    def moved(node: Expr) -> Expr | None:
        return position if node.op == "var" and node.attr is loop.var else None

    for statement in statements(loop.body):
        replace(statement, moved)
    extent = e.index(size)
    if not loop.extent.is_const or loop.extent.attr % size:
        extent = e.binary("min", extent, e.sub(loop.extent, first))
    return number, For(inner, extent, loop.body, True, loop.binding, loop.nodes)


def over_blocks(
    number: Var, loop: For, size: int, body: list[Stmt], binding: Binding
) -> For:
    """Return the loop over the blocks of `loop`, each of which runs `body`."""
    blocks = e.div(e.add(loop.extent, e.index(size - 1)), e.index(size))
    return For(number, blocks, body, True, binding, loop.nodes)
