"""The kernel program: the values of a graph in SSA form, without memory.

An equation binds values to a definition: an expression for each element, a reduction,
a call. Branches and loops hold blocks, which may read values of the enclosing blocks.
Nothing is overwritten and nothing aliases, so that the read of an element may always be
replaced by its expression.

    program f(x: f64[8]):
        v0: f64[] = reduce add from 0.0 of x[i0] * 2.0 over i0 < 8
        v1: f64[] = for t0 < 8, carry c2: f64[] = v0:
            v3: f64[] = c2[] * x[t0]
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

    scalar   the element of a constant, or of a size that is an operand; such a value is
             neither a parameter nor a result
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
        """Return the element at an index if the condition holds, or `otherwise`."""
        element = self.scalar or e.element(self, self.type.dtype, at, condition)
        return e.select(condition, element, otherwise)

    def __repr__(self) -> str:
        return f"<Value {self.name}: {self.type}>"


@dataclass(eq=False, slots=True)
class Block:
    """A sequence of equations, each of which may read the results of earlier ones."""

    parameters: list[Value]
    equations: "list[Equation]" = field(default_factory=list)
    results: list[Value] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class KernelProgram:
    """A block with the inputs and outputs of a graph, and the programs that it calls.

    symbols   the symbols of the sizes that are the first parameters
    updated   by the number of a result the parameter in whose memory a call leaves it,
              set when memory is planned
    """

    name: str
    block: Block
    functions: "list[KernelProgram]" = field(default_factory=list)
    symbols: tuple[Symbol, ...] = ()
    updated: dict[int, int] = field(default_factory=dict)


# --- regions --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Branch:
    """The results of `blocks[selector]`, the only block that runs.

    The selector is an i64[] in range, or a bool[] that selects the block of false or
    that of true.
    """

    selector: Value
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class Loop:
    """`length` steps of a block, with `counter` ascending from 0 or, `reverse`,
    descending.

    carry         the initial values of the block's parameters. The first results of the
                  block are the carry of the next step; the others are rows,
                  which are stacked along axis 0 by the counter
    independent   there is no carry, and steps may run in any order or in parallel
    unroll        how many steps the code of one iteration runs
    ticks         whether Python is notified of progress
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
    """Steps of `body` while the result of `test` holds; both are blocks over the carry.

    carry       as for a `Loop`; rows are stacked in the order of the steps
    max_steps   the limit of steps; to exceed it is an error
    bounds      the steps are at most those from the first number to the second
    """

    carry: tuple[Value, ...]
    test: Block
    body: Block
    max_steps: int | None = None
    ticks: bool = False
    bounds: tuple[Value, Value] | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """The results of another program for these arguments."""

    function: KernelProgram
    operands: tuple[Value, ...]


Region: TypeAlias = Branch | Loop | While | Call


@dataclass(eq=False, slots=True)
class Equation:
    """`results = definition`.

    node     the node of the graph: errors name it, and a `Callback` calls its function
    symbol   the symbol that the only result defines from here on
    inlined  further nodes that it computes, since nothing stores what they give
    """

    results: tuple[Value, ...]
    definition: Definition | Region
    node: Node
    symbol: Symbol | None = None
    inlined: tuple[Node, ...] = ()


def blocks(definition: Definition | Region) -> tuple[Block, ...]:
    """Return the blocks of a region."""
    match definition:
        case Branch():
            return definition.blocks
        case Loop():
            return (definition.body,)
        case While():
            return definition.test, definition.body
    return ()


def equations(block: Block) -> Iterator[Equation]:
    """Yield the equations of a block and of the blocks in it, in program order."""
    pending = [iter(block.equations)]
    while pending:
        equation = next(pending[-1], None)
        if equation is None:
            pending.pop()
            continue
        yield equation
        inner = blocks(equation.definition)
        pending += [iter(b.equations) for b in reversed(inner)]
