"""Operands as lowering rules see them, where another system has their values."""

from dataclasses import dataclass
from typing import Generic, TypeVar

from hopflow.graph.types import TensorType
from hopflow.loop_ir import expr
from hopflow.loop_ir.expr import Expr, Index, element

V = TypeVar("V")


@dataclass(frozen=True, eq=False, slots=True)
class Operand(Generic[V]):
    """A value of another system, with its type."""

    type: TensorType
    value: V

    def __getitem__(self, at: Index) -> Expr:
        return element(self, self.type.dtype, at)

    def where(self, condition: Expr, at: Index, otherwise: Expr) -> Expr:
        found = element(self, self.type.dtype, at, condition)
        return expr.select(condition, found, otherwise)
