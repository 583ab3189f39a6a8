"""The kernel program: what a graph computes, as values in SSA form, without memory.

An equation binds values to a definition: an expression for each element, a reduction,
a call. Branches and loops hold blocks, which read values of the blocks around them
freely. Nothing is overwritten and nothing aliases, so that a read may be replaced by
what it reads, anywhere.

    program f(x: f64[8]):
        v0[i0 < 8]: f64 = x[i0] * 2.0
        v1: f64[] = for t0 < 8, carry c2: f64[] = v0:
            v3: f64 = c2[] * x[t0]
            yield v3
        return v1

The printer writes such text, the verifier checks a program, and the interpreter runs
it.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from hopflow.compiler.kernel_program.definitions import Definition
from hopflow.dtypes import DType
from hopflow.graph.core import Node
from hopflow.graph.types import Shape, TensorType
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Expr, Index, Var
from hopflow.symbolic.size import Size, Symbol


@dataclass(eq=False, slots=True)
class Value:
    """A parameter of a block or a result of an equation, as lowering rules see it.

    scalar   of a constant, or of a size that is an operand: it is no parameter and no
             result, and has this one element
    """

    name: str
    type: TensorType
    scalar: Expr | None = None

    @property
    def dtype(self) -> DType:
        return self.type.dtype

    @property
    def shape(self) -> Shape:
        return self.type.shape

    def __getitem__(self, at: Index) -> Expr:
        return self.scalar or e.element(self, self.type.dtype, at)

    def where(self, condition: Expr, at: Index, otherwise: Expr) -> Expr:
        """The element at an index where the condition holds; elsewhere `otherwise`."""
        element = self.scalar or e.element(self, self.type.dtype, at, condition)
        return e.select(condition, element, otherwise)

    def __repr__(self) -> str:
        return f"<Value {self.name}: {self.type}>"


@dataclass(eq=False, slots=True)
class Block:
    """Equations in order, of which each may read the results of those before it."""

    parameters: list[Value]
    equations: "list[Equation]" = field(default_factory=list)
    results: list[Value] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class KernelProgram:
    """A block whose parameters and results are the inputs and outputs of a graph; and
    the programs that it calls.

    symbols   the sizes that the first parameters are
    updated   by the number of a result the parameter in whose memory a call leaves it,
              once memory has been planned
    """

    name: str
    block: Block
    functions: "list[KernelProgram]" = field(default_factory=list)
    symbols: tuple[Symbol, ...] = ()
    updated: dict[int, int] = field(default_factory=dict)


# --- regions --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Branch:
    """The results of `blocks[selector]`, which is run alone: by an i64[] in range, or a
    bool[] (the blocks are then those of false and of true)."""

    selector: Value
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class Loop:
    """`length` steps of a block over `counter`, from 0 on or `reverse`.

    carry         the first values of the block's parameters. Its first results are the
                  next ones; the others are rows, stacked by the counter along axis 0
    independent   there is no carry, and steps may run in any order or at once
    unroll        how many steps the code has in a row
    ticks         Python is told how far it is
    """

    counter: Var
    length: Size
    carry: tuple[Value, ...]
    body: Block
    reverse: bool = False
    independent: bool = False
    unroll: int = 1
    ticks: bool = False


@dataclass(frozen=True, slots=True)
class While:
    """Steps of `body` while the result of `test` holds: both are blocks over the carry.

    carry       as of a `Loop`; rows are stacked in the order of the steps
    max_steps   one more is an error
    bounds      the steps are no more than from the first number to the second
    """

    carry: tuple[Value, ...]
    test: Block
    body: Block
    max_steps: int | None = None
    ticks: bool = False
    bounds: tuple[Value, Value] | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """The results of a program of its own, for these parameters."""

    function: KernelProgram
    operands: tuple[Value, ...]


Region: TypeAlias = Branch | Loop | While | Call


@dataclass(eq=False, slots=True)
class Equation:
    """`results = definition`.

    node     of the graph, which errors name, and whose function a `Callback` calls
    symbol   the size that the one result is the value of, from here on
    """

    results: tuple[Value, ...]
    definition: Definition | Region
    node: Node
    symbol: Symbol | None = None


def blocks(definition: Definition | Region) -> tuple[Block, ...]:
    """The blocks of a region."""
    match definition:
        case Branch():
            return definition.blocks
        case Loop():
            return (definition.body,)
        case While():
            return definition.test, definition.body
    return ()


def equations(block: Block) -> Iterator[Equation]:
    """All equations of a block, and of the blocks in it, in the order of the text."""
    pending = [iter(block.equations)]
    while pending:
        equation = next(pending[-1], None)
        if equation is None:
            pending.pop()
            continue
        yield equation
        inner = blocks(equation.definition)
        pending += [iter(b.equations) for b in reversed(inner)]
