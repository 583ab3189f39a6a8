"""Captures: values that code in a function of its own uses of the enclosing function.

The enclosing function stores them in an array of words, and passes its address.
"""

from collections.abc import Iterable, Sequence

from hopflow.compiler.llvm.module import Function
from hopflow.loop_ir import walk
from hopflow.loop_ir.expr import Buffer, Var
from hopflow.loop_ir.program import Accumulate, Assign, Declare, For, Let, Stmt


class Cells:
    """The words that a function passes to another, which has them at `%cells`."""

    def __init__(self) -> None:
        self._values: list[tuple[str, str]] = []

    def add(self, type_: str, register: str) -> int:
        """Pass a register of this LLVM type; return the number of its word."""
        self._values.append((type_, register))
        return len(self._values) - 1

    def stored(self, f: Function) -> str:
        """Store the words in `f`; return the register with their address."""
        cells = f.slot(f"[{len(self._values)} x i64]", "cells", 8)
        for k, (type_, register) in enumerate(self._values):
            cell = f.emit(f"getelementptr i64, ptr {cells}, i64 {k}")
            f.do(f"store {type_} {register}, ptr {cell}")
        return cells

    def loaded(self, f: Function, k: int) -> str:
        """Load word `k` in `f`, the function that has `%cells`; return its register."""
        cell = f.emit(f"getelementptr i64, ptr %cells, i64 {k}")
        return f.emit(f"load {self._values[k][0]}, ptr {cell}")


def captured(
    body: Sequence[Stmt], bound: Iterable[Var] = ()
) -> tuple[list[Var], list[Buffer]]:
    """Return the variables that `body` captures, and the buffers that it names.

    Args:
        bound: Variables that are defined for the body.
    """
    defined = set(bound)
    variables: dict[Var, None] = {}
    buffers: dict[Buffer, None] = {}
    for statement in walk.statements(body):
        match statement:
            case Let() | Declare() | For():
                defined.add(statement.var)
            case Assign() | Accumulate():
                variables[statement.var] = None
        named = list(walk.buffers(statement))
        buffers.update(dict.fromkeys(named))
        sizes = [n for b in named for n in (*b.shape, *(b.strides or ()))]
        for node in walk.nodes(*walk.expressions(statement), *sizes):
            if node.op == "var":
                variables[node.attr] = None
    return [v for v in variables if v not in defined], list(buffers)
