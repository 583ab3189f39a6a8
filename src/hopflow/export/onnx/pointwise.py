"""Operations by what they lower to: kernels that say what each element is.

An elementwise operation is evaluated on whole tensors, which ONNX broadcasts. Of any
other the index is a tensor too: `x[i + 1]` is a `Gather` at positions in the flat `x`.
That is how operations are written that have no rule of their own.
"""

from collections.abc import Sequence
from functools import reduce
from math import prod
from typing import Any, Final

from hopflow import dtypes
from hopflow.errors import ExportError
from hopflow.export.onnx.frames import Site, Writer
from hopflow.export.onnx.library import DOMAIN, OPSET, library
from hopflow.export.onnx.scalars import evaluate
from hopflow.export.onnx.scopes import Scope, Value
from hopflow.export.onnx.sizes import Number
from hopflow.export.operands import Operand
from hopflow.graph.types import Shape, TensorType
from hopflow.loop_ir import expr
from hopflow.loop_ir.expr import Expr, Index, Var, condition_of, index_of, read
from hopflow.loop_ir.kernels import Check, Effect, Pointwise, Reduction
from hopflow.ops import batching

_MOST_INLINE: Final = 4
"""The most nodes of an elementwise operation that is no function of its own."""


def lowered(site: Site) -> list[Value]:
    """The results of an operation by its lowering rule.

    Raises:
        ExportError: it lowers to a routine, or to a loop in which steps depend on each
            other.
    """
    op = site.node.op
    operands = [Operand(t, v) for t, v in zip(site.types, site.operands, strict=True)]
    found = op.lower(tuple(site.results), *operands, **site.params)
    kernels = found if isinstance(found, tuple) else (found,)
    for kernel in kernels:
        for check in getattr(kernel, "checks", ()):
            _write_check(site, check)
    if isinstance(found, Effect):
        return []
    results = zip(kernels, site.results, strict=True)
    return [_kernel(site, kernel, type_, operands) for kernel, type_ in results]


def _kernel(
    site: Site, kernel: Any, type_: TensorType, operands: Sequence[Operand[Value]]
) -> Value:
    if isinstance(kernel, Pointwise) and site.node.op.batch is batching.pointwise:
        return _elementwise(site, kernel, type_, operands)
    if isinstance(kernel, Pointwise):
        grid = Grid(site, type_.shape)
        value = grid.evaluate(kernel.element(grid.index))
        return site.expanded(value, type_.shape)
    if isinstance(kernel, Reduction) and isinstance(kernel.combine, str):
        return _reduced(site, kernel, type_)
    raise ExportError("ONNX has no operator for it, nor any from which it is made.")


def _write_check(site: Site, check: Check) -> None:
    if site.writer.asserts == "outputs":
        grid = Grid(site, check.shape)
        holds = site.expanded(grid.evaluate(check.holds(grid.index)), check.shape)
    else:
        holds = site.constant(True, dtypes.bool_)
    message = site.params.get("message") or _MESSAGES[check.kind]
    site.check(holds, str(message), TensorType(dtypes.bool_, check.shape))


_MESSAGES: Final = {
    "index": "an index is out of range",
    "divide": "an integer is divided by 0",
    "power": "an integer has a negative power",
    "range": "an integer is out of its range",
    "check": "a condition does not hold",
}


# --- elementwise ----------------------------------------------------------------------


def _elementwise(
    site: Site, kernel: Pointwise, type_: TensorType, operands: Sequence[Operand[Value]]
) -> Value:
    grid = tuple(read(Var(f"i{a}", dtypes.int64)) for a in range(type_.ndim))
    expression = kernel.element(grid)
    used = _operands_of(expression)
    key = (
        site.node.op.name,
        tuple(o.type.dtype for o in operands),
        type_.dtype,
        repr(dict(site.params)),
    )
    functions = site.writer.functions
    if key not in functions:
        functions[key] = _function(site.writer, site.node.op.name, expression, operands)
    name = functions[key][0]
    if name is None:
        values = {o: o.value for o in operands}
        found = evaluate(site.scope, expression, lambda node: values[node.attr])
    else:
        inputs = [o.value.name for o in operands]
        [result] = site.scope.node(name, inputs, {}, domain=DOMAIN)
        found = Value(result, type_.dtype)
    if len(used) < len(set(operands)):  # the result has the shape of all of them
        found = site.expanded(found, type_.shape)
    return found


def _operands_of(expression: Expr) -> set[Any]:
    found: set[Any] = set()
    pending, seen = [expression], {expression}
    while pending:
        node = pending.pop()
        if node.op == "element":
            found.add(node.attr)
            continue
        new = [a for a in node.args if a not in seen]
        seen.update(new)
        pending += new
    return found


def _function(
    writer: Writer, name: str, expression: Expr, operands: Sequence[Operand[Value]]
) -> tuple[str | None, Any]:
    """A function of the model for an elementwise operation, and its name; None for one
    of a few nodes, which are written where it is used."""
    scope = Scope(writer.names, is_closed=True)
    inputs = {o: scope.input(f"x{i}", o.type.dtype) for i, o in enumerate(operands)}
    result = evaluate(scope, expression, lambda node: inputs[node.attr])
    outputs = scope.outputs([result])
    if len([n for n in scope.nodes if n.op_type != "Constant"]) <= _MOST_INLINE:
        return None, None
    dtype = operands[0].type.dtype if operands else result.dtype
    return function(
        writer, f"{name}_{dtype}", scope, list(inputs.values()), outputs, ""
    )


def function(
    writer: Writer,
    name: str,
    scope: Scope,
    inputs: Sequence[Value],
    outputs: Sequence[Value],
    doc: str,
) -> tuple[str, Any]:
    """A function of the model, which has what a scope has, and its name."""
    helper = library().helper
    name = writer.names.fresh(name)
    opsets = [helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, 1)]
    found = helper.make_function(
        DOMAIN,
        name,
        [v.name for v in inputs],
        [v.name for v in outputs],
        scope.nodes,
        opsets,
        doc_string=doc,
    )
    return name, found


# --- by index -------------------------------------------------------------------------


class Grid:
    """The index of each element of a shape, and what expressions of it are.

    index   for each axis a variable
    """

    def __init__(self, site: Site, shape: Shape, axes: Shape | None = None) -> None:
        """
        Args:
            axes: Further sizes of the grid, after those of the shape.
        """
        self.site = site
        self.sizes = (*shape, *(axes or ()))
        self.variables = [Var(f"i{a}", dtypes.int64) for a in range(len(self.sizes))]
        self.index: Index = tuple(map(read, self.variables))
        self._memo: dict[Expr, Value] = {}
        self._values: dict[Var, Value] = {}
        self._flat: dict[tuple[Any, bool], Value] = {}

    def evaluate(self, expression: Expr) -> Value:
        """An expression at each index; it broadcasts to the shape."""
        return evaluate(self.site.scope, expression, self.leaf, self._memo)

    def leaf(self, node: Expr) -> Value:
        if node.op == "var":
            return self._along(node.attr)
        if node.op == "size":
            return self.site.size(node.attr).tensor()
        operand: Operand[Value] = node.attr
        if self._reads_its_own_index(node):
            return operand.value
        return self._load(node, operand)

    def _along(self, variable: Var) -> Value:
        """The index along an axis, as a tensor that broadcasts."""
        if variable not in self._values:
            axis = self.variables.index(variable)
            along = positions(self.site, self.site.size(self.sizes[axis]))
            after = range(1, len(self.sizes) - axis)
            self._values[variable] = self.site.scope.unsqueezed(along, *after)
        return self._values[variable]

    def _reads_its_own_index(self, node: Expr) -> bool:
        return node.args == self.index

    def _load(self, node: Expr, operand: Operand[Value]) -> Value:
        """The elements at an index: those of a flat tensor at flat positions."""
        site, shape = self.site, operand.type.shape
        if not shape:
            return operand.value
        parts = [
            Number(site.scope, self.evaluate(at)) * _stride(site, shape, axis)
            for axis, at in enumerate(index_of(node))
        ]
        at = reduce(lambda x, y: x + y, parts).tensor()
        condition = condition_of(node)
        if condition is not None:
            # Where nothing may be read, what stands behind the last element is.
            total = _total(site, shape).tensor()
            at = site("Where", self.evaluate(condition), at, total)
        flat = self._flattened(operand, extended=condition is not None)
        return site("Gather", flat, at, axis=0)

    def _flattened(self, operand: Operand[Value], *, extended: bool) -> Value:
        key = operand, extended
        if key not in self._flat:
            flat = self.site.scope.flat(operand.value)
            if extended:
                zero = self.site.constant([0], operand.type.dtype)
                flat = self.site("Concat", flat, zero, axis=0)
            self._flat[key] = flat
        return self._flat[key]


def positions(site: Site, size: Number) -> Value:
    """0, 1, ..., size - 1 as i64[size]."""
    zero, one = site.constant(0), site.constant(1)
    return site("Range", zero, size.tensor(), one)


def _total(site: Site, shape: Shape) -> Number:
    return site.size(prod(shape, start=1))


def _stride(site: Site, shape: Shape, axis: int) -> Number:
    return _total(site, shape[axis + 1 :])


_REDUCED: Final = {
    "add": "ReduceSum",
    "mul": "ReduceProd",
    "min": "ReduceMin",
    "max": "ReduceMax",
}


def sum_of_rows(site: Site, rows: Value) -> Value:
    """The sums along the last axis, of integers: `ReduceSum` is for floats alone."""
    [name] = site.scope.node("Shape", [rows.name], {"start": -1})
    ones = site("Expand", site.constant(1, rows.dtype), Value(name, dtypes.int64))
    return site("MatMul", rows, ones)


def _reduced(site: Site, kernel: Reduction, type_: TensorType) -> Value:
    grid = Grid(site, type_.shape, kernel.space)
    at, along = grid.index[: type_.ndim], grid.index[type_.ndim :]
    [value] = kernel.element(at, along)
    elements = site.expanded(grid.evaluate(value), grid.sizes)
    operator = _REDUCED.get(str(kernel.combine))
    if operator is None or elements.dtype is dtypes.bool_:
        raise ExportError(f"ONNX has no reduction by `{kernel.combine}`.")
    if operator == "ReduceSum" and not elements.dtype.is_float:
        rows = (*type_.shape, prod(kernel.space, start=1))
        total = sum_of_rows(site, site.reshaped(elements, rows))
    else:
        axes = site.scope.integers(range(type_.ndim, len(grid.sizes)))
        total = site(operator, elements, axes, keepdims=0)
    accumulator = Var("total", elements.dtype)
    init = kernel.init[0]
    combined = expr.binary(str(kernel.combine), read(accumulator), init)
    result = kernel.finish[0](at, (combined,))

    def leaf(node: Expr) -> Value:
        return total if node.attr is accumulator else grid.leaf(node)

    return evaluate(site.scope, result, leaf)
