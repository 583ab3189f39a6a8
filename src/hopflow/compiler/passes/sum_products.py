"""Turn products that the steps of a loop add to a sum into one product after the loop.

An example is the gradient of a matrix that each step of a recurrent network multiplies
by: a sum of `x.T @ ct`. Each step reads and writes all of the sum; the one product of
all rows `x` and `ct`, stacked, writes it once.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Final, NamedTuple

from hopflow.compiler.passes.stack_products import (
    LARGEST,
    WIDEST,
    Inserter,
    in_the_trace,
    outside,
    source_of,
)
from hopflow.graph.core import Arg, Graph, Node, Var, vars_of
from hopflow.graph.regions import (
    CarryPair,
    Region,
    carries,
    drop_results,
    has_regions,
    signature_of,
)
from hopflow.graph.rewriting import eliminate_dead_code, replace_uses
from hopflow.graph.types import TensorType, is_one
from hopflow.ops.elementwise import add
from hopflow.ops.matmul import matmul_op
from hopflow.ops.views import transpose
from hopflow.symbolic.size import Size

SMALL: Final = 1 << 10
"""A sum of at most this many elements stays in the fastest cache."""


def sum_products(graph: Graph) -> Graph:
    """Transform a graph and all its subgraphs in place; return the graph."""
    for node in list(graph.nodes):
        if has_regions(node):
            signature = signature_of(node)
            for region in signature.regions:
                sum_products(region.graph)
            if {"slice", "carry"} <= {*signature.args}:
                _move_out(graph, node)
    return graph


@dataclass(slots=True)
class _Loop:
    """A loop over slices, which may get further stacks as results.

    stacks   by value of the body the result that stacks the values of all steps
    """

    node: Node
    region: Region
    stacks: dict[Var, Arg] = field(default_factory=dict)

    @property
    def body(self) -> Graph:
        return self.region.graph

    def ends(self, pair: CarryPair) -> tuple[int, int]:
        """Return the numbers of the body's input and output for a carry."""
        ends = self.region.input_of(pair.arg), self.region.output_of(pair.result)
        assert None not in ends
        return ends  # type: ignore[return-value]

    def pass_on(self, pair: CarryPair) -> None:
        """Make the body return a carry unchanged."""
        input_, output = self.ends(pair)
        outputs = list(self.body.outputs)
        outputs[output] = self.body.inputs[input_]
        self.body.outputs = tuple(outputs)

    def existing_stack(self, value: Var) -> Arg | None:
        """Return the existing stack of a value of the body, or None."""
        source = source_of(value)
        stack = outside(self.node, self.region, source, "slice")
        return stack or self.stacks.get(source)  # type: ignore[arg-type]

    def stacked(self, value: Var, length: Size) -> Arg:
        """Return the stack of a value of the body, a new result if there is none."""
        stack = self.existing_stack(value)
        if stack is not None:
            return stack
        node, signature = self.node, signature_of(self.node)
        type_ = TensorType(value.type.dtype, (length, *value.type.shape))
        result = Var(node, len(node.results), type_)
        node.results = (*node.results, result)
        self.body.outputs = (*self.body.outputs, value)
        roles = (*signature.results, "stacked")
        node.params = node.op.with_roles(node.params, signature.args, roles)
        self.stacks[source_of(value)] = result  # type: ignore[index]
        return result


class _Sum(NamedTuple):
    """A carry to which each step adds the product `x^T @ y`: [k, m], [k, n] -> [m, n].

    `x` may also have the shape [m, 1].
    """

    product: Node
    x: Var
    y: Var

    @property
    def sizes(self) -> tuple[Size, Size, Size]:
        """The sizes m, n and k."""
        m, n = self.product.results[0].type.shape
        return m, n, self.y.type.shape[0]


def _move_out(graph: Graph, node: Node) -> None:
    signature = signature_of(node)
    [region] = signature.regions
    loop = _Loop(node, region)
    slices = [a for a, r in zip(node.args, signature.args, strict=True) if r == "slice"]
    length = slices[0].type.shape[0]
    dropped: list[int] = []
    for pair in carries(signature):
        sum_ = _summed(loop, pair)
        if sum_ is None or not _pays(loop, sum_, slices):
            continue
        m, n, k = sum_.sizes
        xs, ys = (loop.stacked(v, length) for v in (sum_.x, sum_.y))
        insert = Inserter(graph.nodes, graph.nodes.index(node) + 1, sum_.product)
        left = insert(transpose, insert.reshape(xs, length * k, m), axes=(1, 0))
        total = insert(matmul_op, left, insert.reshape(ys, length * k, n))
        total = insert(add, node.args[pair.arg], total)
        replace_uses(graph, {node.results[pair.result]: total})
        loop.pass_on(pair)
        dropped.append(pair.result)
    if dropped:
        eliminate_dead_code(loop.body)
        drop_results(node, dropped)


def _summed(loop: _Loop, pair: CarryPair) -> _Sum | None:
    """Return what each step adds to a carry, if the carry has no other use."""
    body = loop.body
    input_, output = loop.ends(pair)
    carry, result = body.inputs[input_], body.outputs[output]
    if not isinstance(result, Var) or result.node.op is not add:
        return None
    sum_ = _product(result.node, carry)
    if sum_ is None:
        return None
    reads = Counter([v for node in body.nodes for v in vars_of(node.args)])
    reads.update(vars_of(body.outputs))
    once = (carry, result, sum_.product.results[0])
    return sum_ if all(reads[v] == 1 for v in once) else None


def _product(sum_: Node, carry: Var) -> _Sum | None:
    x, y = sum_.args
    other = y if x is carry else x
    if carry not in sum_.args or not isinstance(other, Var):
        return None
    product = other.node
    if product.op is not matmul_op or other.type.ndim != 2:
        return None
    x, y = product.args
    if isinstance(x, Var) and x.node.op is transpose:
        x = x.node.args[0]
    elif not is_one(x.type.shape[1]):
        return None
    if not (isinstance(x, Var) and isinstance(y, Var)):
        return None
    return _Sum(product, x, y)


def _pays(loop: _Loop, sum_: _Sum, slices: Sequence[Arg]) -> bool:
    """Return whether the stacks are worth their memory.

    A step's part of the stacks must be smaller than the sum, and all of them not too
    large.
    """
    if not all(isinstance(size, int) for size in sum_.sizes):
        return False
    m, n, k = map(int, sum_.sizes)
    if m * n <= max(SMALL, k * (m + n)):
        return False
    new = [v for v in (sum_.x, sum_.y) if loop.existing_stack(v) is None]
    row = sum(prod(map(int, v.type.shape)) for v in new)
    length = slices[0].type.shape[0]
    if isinstance(length, int):
        return length * row * sum_.y.type.dtype.itemsize <= LARGEST
    widths = [_row_in_the_trace(a.type) for a in slices]
    return row <= WIDEST * sum(widths)


def _row_in_the_trace(stack: TensorType) -> float:
    """Return the number of elements of a slice in the traced call, 0 if unknown."""
    return prod(in_the_trace(n) or 0 for n in stack.shape[1:])
