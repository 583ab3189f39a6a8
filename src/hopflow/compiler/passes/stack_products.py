"""Turn the products of a loop's slices into one product before the loop.

A product of one row reads a whole matrix for it. One product of all slices reads the
matrix only once for each tile of many rows. An example is `x @ w` in a step of a
recurrent network, where `x` is the step's input and `w` is invariant.
"""

from typing import Any, Final

from hopflow.graph.core import Arg, Graph, Node, Var
from hopflow.graph.regions import Region, Role, has_regions, signature_of
from hopflow.graph.rewriting import replace_uses
from hopflow.graph.types import TensorType, is_one
from hopflow.ops.matmul import matmul_op
from hopflow.ops.views import reshape, transpose
from hopflow.symbolic.size import Size

FEW: Final = 4
"""The most rows of a product for which it pays to stack slices."""
LARGEST: Final = 1 << 26
"""The most bytes of all products, which are in memory together."""
WIDEST: Final = 4
"""The largest ratio of a product to its slice if the number of steps is symbolic. It
also bounds the ratio of the memory of all products to that of the stack."""


def stack_products(graph: Graph) -> Graph:
    """Transform a graph and all its subgraphs in place; return the graph."""
    at = 0
    while at < len(graph.nodes):
        node = graph.nodes[at]
        if has_regions(node):
            for region in signature_of(node).regions:
                stack_products(region.graph)
            regions = signature_of(node).regions
            if len(regions) == 1 and regions[0].repeats:
                at += _move_out(graph, at, node)
        at += 1
    return graph


def _move_out(graph: Graph, at: int, node: Node) -> int:
    """Move products out of a loop; return how many nodes are inserted before it."""
    before = len(graph.nodes)
    [region] = signature_of(node).regions
    for inner in filter(has_few_rows, list(region.graph.nodes)):
        [region] = signature_of(node).regions  # each product adds a slice
        xs = outside(node, region, source_of(inner.args[0]), "slice")
        ys = outside(node, region, inner.args[1], "invariant")
        if xs is None or ys is None or not _fits(inner, xs.type.shape[0], ys.type):
            continue
        place = at + len(graph.nodes) - before
        product = _product(graph, place, inner, xs, ys)
        slice_ = _add_slice(node, product, inner.results[0].type)
        replace_uses(region.graph, {inner.results[0]: slice_})
    return len(graph.nodes) - before


def outside(node: Node, region: Region, value: Arg, role: Role) -> Arg | None:
    """Return the arg of a loop for a value that is an input of this role, or None."""
    for var, port in zip(region.graph.inputs, region.inputs, strict=True):
        if var is value and port.role == role and port.at is not None:
            return node.args[port.at]
    return None


def source_of(arg: Arg) -> Arg:
    """Return the value that `arg` is a reshape of, with the same order of elements."""
    while isinstance(arg, Var) and (arg.node.op is reshape or _turns_a_row(arg.node)):
        arg = arg.node.args[0]
    return arg


def _turns_a_row(node: Node) -> bool:
    """Return whether a node transposes a matrix of one row or column."""
    if node.op is not transpose:
        return False
    return sum(not is_one(n) for n in node.results[0].type.shape) <= 1


def has_few_rows(product: Node) -> bool:
    """Return whether a product has so few rows that reading its matrix dominates."""
    if product.op is not matmul_op or product.args[0].type.ndim != 2:
        return False
    rows = product.args[0].type.shape[0]
    return isinstance(rows, int) and rows <= FEW


def _fits(product: Node, length: Size, matrix: TensorType) -> bool:
    """Return whether all products together are small enough."""
    rows = product.args[0].type.shape[0]
    inner, columns = matrix.shape
    if all(isinstance(n, int) for n in (length, rows, columns)):
        size = length * rows * columns * matrix.dtype.itemsize
        return bool(size <= LARGEST)
    narrow, wide = in_the_trace(inner), in_the_trace(columns)
    return narrow is not None and wide is not None and wide <= WIDEST * narrow


def in_the_trace(size: Size) -> float | None:
    """Return the size in the traced call, or None if it is unknown."""
    return size if isinstance(size, int) else size.hint


class Inserter:
    """Inserts nodes from position `at` on, with the source line of `like`."""

    def __init__(self, nodes: list[Node], at: int, like: Node) -> None:
        self.nodes, self.at, self.like = nodes, at, like

    def __call__(self, op: Any, *args: Arg, **params: Any) -> Var:
        """Insert a node, and return its result."""
        [type_] = op.result_types([a.type for a in args], params)
        node = Node("call_function", op, args, params, line=self.like.line)
        node.results = (Var(node, 0, type_),)
        node.meta.update(self.like.meta)
        self.nodes.insert(self.at, node)
        self.at += 1
        return node.results[0]

    def reshape(self, arg: Arg, *shape: Size) -> Var:
        return self(reshape, arg, shape=shape)


def _product(graph: Graph, at: int, like: Node, xs: Arg, matrix: Arg) -> Var:
    """Insert the product of all slices, and return it: [length, *, n]."""
    length, rows = xs.type.shape[0], like.args[0].type.shape[0]
    inner, columns = matrix.type.shape
    insert = Inserter(graph.nodes, at, like)
    left = insert.reshape(xs, length * rows, inner)
    return insert.reshape(insert(matmul_op, left, matrix), length, rows, columns)


def _add_slice(node: Node, stack: Var, type_: TensorType) -> Var:
    """Give a loop one more stack, after the others; return the input for its slice.

    The slice has a type in the symbols of the body.
    """
    signature = signature_of(node)
    [region] = signature.regions
    last = max(i for i, role in enumerate(signature.args) if role == "slice")
    position = region.input_of(last)
    assert position is not None
    inputs = region.graph.inputs
    var = region.graph.add_input(type_, f"product{len(inputs)}", "operand")
    inputs.insert(position + 1, inputs.pop())
    node.args = (*node.args[: last + 1], stack, *node.args[last + 1 :])
    roles = (*signature.args[: last + 1], "slice", *signature.args[last + 1 :])
    node.params = node.op.with_roles(node.params, roles, signature.results)
    return var
