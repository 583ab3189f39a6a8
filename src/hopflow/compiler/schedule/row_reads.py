"""Reads the elements of a row that all its steps read once, before them.

    for i in 0..n gang 16 independent:         for i in 0..n gang 16 independent:
        for step in 0..100:                        let row0: f32 = w[i, 0]
            x[i] = x[i] * w[i, 0]      ->          for step in 0..100:
                                                       x[i] = x[i] * row0

Lanes would gather them in each step: LLVM moves no gather out of a loop.
"""

from collections.abc import Collection

from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Buffer, Expr, Var
from hopflow.loop_ir.program import For, Let, Stmt, While
from hopflow.loop_ir.walk import bodies, loaded, replace, same, statements


def rows_read_before(loop: For, stored: Collection[Buffer]) -> list[Stmt]:
    """Replace the elements of rows that all steps of the loops inside `loop` would
    read, and return the statements that read them.

    Args:
        stored: The buffers that the loop writes.
    """
    reads: list[tuple[Expr, Let]] = []
    for outer in loop.body:
        inside = [s for inner in bodies(outer) for s in statements(inner)]
        for s in (outer, *inside) if isinstance(outer, While) else inside:
            replaced: dict[Expr, Expr] = {}
            for node in loaded(s):
                if _is_row(node, loop) and node.attr not in stored:
                    replaced[node] = _row(node, loop, reads)
            if replaced:
                replace(s, replaced.get)
    return [let for _, let in reads]


def _row(node: Expr, loop: For, reads: list[tuple[Expr, Let]]) -> Expr:
    for element, let in reads:
        if same(element, node):
            return e.read(let.var)
    var = Var(f"{loop.var.name}_row{len(reads)}", node.dtype)
    reads.append((node, Let(var, node)))
    return e.read(var)


def _is_row(node: Expr, loop: For) -> bool:
    """Return whether a load's index is constant but for the loop's variable."""
    buffer: Buffer = node.attr
    if e.condition_of(node) is not None:
        return False
    matches = 0
    for i, extent in zip(e.index_of(node), buffer.shape, strict=True):
        if i.op == "var" and i.attr is loop.var and same(extent, loop.extent):
            matches += 1
        elif not (i.is_const and extent.is_const and 0 <= i.attr < extent.attr):
            return False
    return matches > 0
