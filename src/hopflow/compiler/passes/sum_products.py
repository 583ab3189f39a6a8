"""Products that each step of a loop adds to a sum: one product after the loop.

The gradient of a matrix that each step of a recurrent network multiplies by is such a
sum, of `x.T @ ct`. Each step reads and writes all of it; the one product of all rows
`x` and `ct`, stacked, writes it once.
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
"""A sum of so few elements stays in the fastest cache, and costs a step little."""


def sum_products(graph: Graph) -> Graph:
    """In place, in all subgraphs; returns the graph."""
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
    """A loop over slices, to whose results stacks are added.

    stacks   what became of values of its body: the stack of all steps' values
    """

    node: Node
    region: Region
    stacks: dict[Var, Arg] = field(default_factory=dict)

    @property
    def body(self) -> Graph:
        return self.region.graph

    def ends(self, pair: CarryPair) -> tuple[int, int]:
        """Which input and which output of the body belong to a carry."""
        ends = self.region.input_of(pair.arg), self.region.output_of(pair.result)
        assert None not in ends
        return ends  # type: ignore[return-value]

    def pass_on(self, pair: CarryPair) -> None:
        """Let the body return a carry as it was given."""
        input_, output = self.ends(pair)
        outputs = list(self.body.outputs)
        outputs[output] = self.body.inputs[input_]
        self.body.outputs = tuple(outputs)

    def known(self, value: Var) -> Arg | None:
        """The stack of what `value` is in each step, if there is one."""
        source = source_of(value)
        found = outside(self.node, self.region, source, "slice")
        return found or self.stacks.get(source)  # type: ignore[arg-type]

    def stacked(self, value: Var, length: Size) -> Arg:
        """The same; a further result of the loop if there is none."""
        known = self.known(value)
        if known is not None:
            return known
        node, signature = self.node, signature_of(self.node)
        type_ = TensorType(value.type.dtype, (length, *value.type.shape))
        made = Var(node, len(node.results), type_)
        node.results = (*node.results, made)
        self.body.outputs = (*self.body.outputs, value)
        roles = (*signature.results, "stacked")
        node.params = node.op.with_roles(node.params, signature.args, roles)
        self.stacks[source_of(value)] = made  # type: ignore[index]
        return made


class _Sum(NamedTuple):
    """A carry to which each step adds the product `x^T @ y`: [k, m], [k, n] -> [m, n].

    `x` may be of the shape [m, 1] as well.
    """

    product: Node
    x: Var
    y: Var

    @property
    def sizes(self) -> tuple[Size, Size, Size]:
        """m, n, k."""
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
        found = _summed(loop, pair)
        if found is None or not _pays(loop, found, slices):
            continue
        m, n, k = found.sizes
        xs, ys = (loop.stacked(v, length) for v in (found.x, found.y))
        insert = Inserter(graph.nodes, graph.nodes.index(node) + 1, found.product)
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
    """What each step adds to a carry, if that is all that it does with it."""
    body = loop.body
    input_, output = loop.ends(pair)
    carry, result = body.inputs[input_], body.outputs[output]
    if not isinstance(result, Var) or result.node.op is not add:
        return None
    found = _product(result.node, carry)
    if found is None:
        return None
    reads = Counter([v for node in body.nodes for v in vars_of(node.args)])
    reads.update(vars_of(body.outputs))
    once = (carry, result, found.product.results[0])
    return found if all(reads[v] == 1 for v in once) else None


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
    """Whether the stacks are worth it: smaller, a step, than the sum, and not too large
    together."""
    if not all(isinstance(size, int) for size in sum_.sizes):
        return False
    m, n, k = map(int, sum_.sizes)
    if m * n <= max(SMALL, k * (m + n)):
        return False
    new = [v for v in (sum_.x, sum_.y) if loop.known(v) is None]
    row = sum(prod(map(int, v.type.shape)) for v in new)
    length = slices[0].type.shape[0]
    if isinstance(length, int):
        return length * row * sum_.y.type.dtype.itemsize <= LARGEST
    own = [_row_in_the_trace(a.type) for a in slices]
    return row <= WIDEST * sum(own)


def _row_in_the_trace(stack: TensorType) -> float:
    """How many elements a slice had in the call that was traced; 0: not known."""
    return prod(in_the_trace(n) or 0 for n in stack.shape[1:])
