"""Operators with subgraphs, by what they lower to: branches, loops, graphs in place.

A branch becomes `If`. A loop whose steps are counted becomes `Scan` if its body reads
nothing of the graph around it, which not every runtime allows in `Scan`; else, like a
loop that a test ends, `Loop`. A graph that several calls share becomes a function.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from hopflow import dtypes
from hopflow.export.onnx.frames import Check, Frame, Given, Site, Writer
from hopflow.export.onnx.library import DOMAIN
from hopflow.export.onnx.pointwise import function
from hopflow.export.onnx.scopes import Scope, Value, inner_info
from hopflow.export.onnx.sizes import Number
from hopflow.graph.core import Constant, Graph, Var, plain_symbol
from hopflow.graph.types import TensorType, is_zero, same_shape
from hopflow.loop_ir.kernels import Branch, CountedLoop, Inline, WhileLoop
from hopflow.ops.sizes import may_be_zero
from hopflow.symbolic.size import SymInt

_COUNT = TensorType(dtypes.int64)
_TRUTH = TensorType(dtypes.bool_)


def region(site: Site) -> list[Value]:
    """The results of an operator with subgraphs."""
    node = site.node
    body = node.params.get("body")
    if body in site.writer.shared:
        return _call(site, body)
    lowered = node.op.lower(tuple(site.results), *node.args, **node.params)
    if isinstance(lowered, Inline):
        return _inline(site, lowered)
    if isinstance(lowered, Branch):
        return _branch(site, lowered)
    if isinstance(lowered, WhileLoop):
        return _while(site, lowered)
    assert isinstance(lowered, CountedLoop)
    return _scan(site, lowered) if _may_scan(site, lowered) else _count(site, lowered)


def _given(site: Site, operands: Sequence[Any]) -> list[Given]:
    """What inputs of a region get: constants stay what they are, for symbols."""
    found: list[Given] = []
    for operand in operands:
        if isinstance(operand, Constant):
            found.append(operand)
        elif isinstance(operand, Var):
            found.append(site.frame.value(operand))
        else:
            found.append(site.frame.size(operand).value)
    return found


def _inline(site: Site, inline: Inline) -> list[Value]:
    args = _given(site, inline.operands)
    return Frame(site.writer, site.scope, inline.graph, args).run()


# --- functions ------------------------------------------------------------------------


def _call(site: Site, body: Graph) -> list[Value]:
    """A call of a function that the model has once."""
    writer = site.writer
    if body not in writer.functions:
        writer.functions[body] = _shared(writer, body)
    name, found = writer.functions[body]
    if found is None:
        return []
    inputs = [v.name for v in site.operands]
    names = site.scope.node(name, inputs, {}, len(found.output), DOMAIN)
    if len(names) > len(site.results):
        writer.merge(site.scope, Value(names[-1], dtypes.int64))
    types = zip(names, site.results, strict=False)
    return [Value(n, type_.dtype) for n, type_ in types]


def _shared(writer: Writer, body: Graph) -> tuple[str, Any]:
    """The function of a graph, and its name; None if it has no results."""
    scope = Scope(writer.names, is_closed=True)
    inputs = [scope.input(v.node.name or "x", v.type.dtype) for v in body.inputs]
    results = Frame(writer, scope, body, inputs).run()
    if scope.failed is not None:
        results.append(scope.failed)
    if not results:
        return body.name, None
    outputs = scope.outputs(results)
    return function(writer, body.name, scope, inputs, outputs, f"subgraph {body.name}")


# --- branches -------------------------------------------------------------------------


def _branch(site: Site, branch: Branch) -> list[Value]:
    args = _given(site, branch.operands)
    [selector] = _given(site, [branch.selector])

    def run(number: int) -> Callable[[Scope], list[Value]]:
        graph = branch.branches[number]
        return lambda scope: Frame(site.writer, scope, graph, args).run()

    if isinstance(selector, Constant):
        return run(int(selector.value))(site.scope)
    assert isinstance(selector, Value)
    types = [[a.type for a in graph.outputs] for graph in branch.branches]
    if selector.dtype is dtypes.bool_:
        return _if(site.writer, site.scope, selector, run(1), run(0), types[0])
    return _choose(site.writer, site.scope, selector, run, len(types), types[0])


def _choose(
    writer: Writer,
    scope: Scope,
    selector: Value,
    run: Callable[[int], Callable[[Scope], list[Value]]],
    count: int,
    types: Sequence[TensorType],
) -> list[Value]:
    """Branch number `selector` of `count`, by halves."""

    def among(low: int, high: int) -> Callable[[Scope], list[Value]]:
        if high - low == 1:
            return run(low)
        middle = (low + high) // 2

        def halves(scope: Scope) -> list[Value]:
            limit = scope.constant(middle, selector.dtype)
            is_below = scope("Less", selector, limit)
            first, second = among(low, middle), among(middle, high)
            return _if(writer, scope, is_below, first, second, types)

        return halves

    return among(0, count)(scope)


def _if(
    writer: Writer,
    scope: Scope,
    test: Value,
    then: Callable[[Scope], list[Value]],
    otherwise: Callable[[Scope], list[Value]],
    types: Sequence[TensorType],
) -> list[Value]:
    inner = [scope.inner(), scope.inner()]
    results = [then(inner[0]), otherwise(inner[1])]
    types = list(types)
    has_checks = any(part.failed is not None for part in inner)
    if has_checks:
        types.append(_COUNT)
        for part, row in zip(inner, results, strict=True):
            row.append(part.constant(0) if part.failed is None else part.failed)
    if not types:
        return []
    graphs = [
        _closed(part, name, [], row, types)
        for part, row, name in zip(inner, results, ("then", "else"), strict=True)
    ]
    attributes = {"then_branch": graphs[0], "else_branch": graphs[1]}
    names = scope.node("If", [test.name], attributes, len(types))
    values = _typed(names, types)
    if has_checks:
        writer.merge(scope, values.pop())
    return values


def _typed(names: Sequence[str], types: Sequence[TensorType]) -> list[Value]:
    return [Value(n, t.dtype) for n, t in zip(names, types, strict=True)]


def _closed(
    scope: Scope,
    name: str,
    inputs: Sequence[tuple[Value, TensorType]],
    outputs: Sequence[Value],
    types: Sequence[TensorType],
) -> Any:
    """The graph that a scope has become."""
    pairs = zip(scope.outputs(outputs), types, strict=True)
    infos = [inner_info(v, t) for v, t in pairs]
    return scope.graph(name, [inner_info(v, t) for v, t in inputs], infos)


# --- loops ----------------------------------------------------------------------------


class Step(NamedTuple):
    """What one step of a loop gives: whether there is another one (None: there is),
    the carry, and the rows of stacks."""

    again: Value | None
    carry: list[Value]
    rows: list[Value]


def _loop(
    site: Site,
    name: str,
    trips: Value | None,
    first: Value | None,
    carry: Sequence[tuple[Value, TensorType]],
    out_types: tuple[Sequence[TensorType], Sequence[TensorType]],
    body: Callable[[Scope, Value, list[Value]], Step],
) -> tuple[list[Value], list[Value]]:
    """ONNX's `Loop`.

    Args:
        trips: The most steps, i64[]; None: any number.
        first: Whether there is a first step, bool[]; None: there is.
        carry: The first values and their types in the body.
        out_types: The types of the carry and of the rows that the body gives.

    Returns:
        The last carry, and the stacks.
    """
    outer, inner = site.scope, site.scope.inner()
    number = inner.input("step", dtypes.int64)
    running = inner.input("running", dtypes.bool_)
    inputs = [inner.input("carry", v.dtype) for v, _ in carry]
    failed = inner.input("failed", dtypes.int64)
    inner.failed = failed
    step = body(inner, number, list(inputs))
    again = inner.constant(True, dtypes.bool_) if step.again is None else step.again
    checks = [] if inner.failed is failed else [(failed, _COUNT)]
    pairs = [(v, t) for v, (_, t) in zip(inputs, carry, strict=True)]
    carried, rows = out_types
    results = [again, *step.carry, *([inner.failed] if checks else []), *step.rows]
    types = [_TRUTH, *carried, *([_COUNT] if checks else []), *rows]
    if len(types) == 1:  # nothing that anyone could read
        return [], []
    graph = _closed(
        inner,
        name,
        [(number, _COUNT), (running, _TRUTH), *pairs, *checks],
        results,
        types,
    )
    starts = [v.name for v, _ in carry]
    if checks:
        starts.append((outer.failed or outer.constant(0)).name)
    head = ["" if x is None else x.name for x in (trips, first)]
    names = outer.node("Loop", [*head, *starts], {"body": graph}, len(types) - 1)
    values = _typed(names, types[1:])
    last, stacks = values[: len(carry)], values[len(starts) :]
    if checks:
        outer.failed = values[len(carry)]
    return last, stacks


def _carry(
    site: Site, operands: Sequence[Any], body: Graph, start: int
) -> list[tuple[Value, TensorType]]:
    inputs = body.inputs[start : start + len(operands)]
    values = [site.frame.value(o) for o in operands]
    return [(v, x.type) for v, x in zip(values, inputs, strict=True)]


def _while(site: Site, loop: WhileLoop) -> list[Value]:
    writer = site.writer
    before, after = _given(site, loop.before), _given(site, loop.after)
    carry = _carry(site, loop.carry, loop.body, len(before))
    count = len(carry)

    def test(scope: Scope, values: Sequence[Value]) -> Value:
        [holds] = Frame(writer, scope, loop.test, [*before, *values, *after]).run()
        return holds

    def body(scope: Scope, _: Value, values: list[Value]) -> Step:
        args = [*before, *values[:count], *after]
        results = Frame(writer, scope, loop.body, args).run()
        again = test(scope, results[:count])
        kept = results[:count] if loop.max_steps is None else [*results[:count], again]
        return Step(again, kept, results[count:])

    first = test(site.scope, [v for v, _ in carry])
    types = list(loop.body.out_types)
    starts, carried = carry, types[:count]
    trips = None
    if loop.max_steps is not None:  # one more carry: whether it would go on
        trips = site.constant(loop.max_steps)
        starts, carried = [*carry, (first, _TRUTH)], [*types[:count], _TRUTH]
    last, rows = _loop(
        site, "body", trips, first, starts, (carried, types[count:]), body
    )
    if loop.max_steps is not None:
        message = f"{site.node.op.name}: more than {loop.max_steps} steps"
        ended = site("Not", last.pop())
        writer.check(site.scope, ended, Check(message, site.node.line))
    return [*last, *_stacks(site, rows, None)]


def _count(site: Site, loop: CountedLoop) -> list[Value]:
    before, after = _given(site, loop.before), _given(site, loop.after)
    carry = _carry(site, loop.carry, loop.body, len(before))
    count, xs = len(carry), [site.frame.value(x) for x in loop.xs]
    length = site.size(loop.length)

    def body(scope: Scope, step: Value, values: list[Value]) -> Step:
        at = step
        if loop.reverse:
            last = Number(scope, length.value) - 1
            at = (last - Number(scope, step)).tensor()
        slices = [scope("Gather", x, at, axis=0) for x in xs]
        args = [*before, *values, *slices, *after]
        results = Frame(site.writer, scope, loop.body, args).run()
        return Step(None, results[:count], results[count:])

    types = list(loop.body.out_types)
    out_types = types[:count], types[count:]
    last, rows = _loop(site, "body", length.tensor(), None, carry, out_types, body)
    if loop.reverse:
        rows = [_turned(site, row) for row in rows]
    return [*last, *_stacks(site, rows, length)]


def _turned(site: Site, rows: Value) -> Value:
    """Rows in the opposite order."""
    ends = [[-1], [-(2**63) + 1], [0], [-1]]
    return site("Slice", rows, *map(site.scope.integers, ends))


def _stacks(site: Site, rows: list[Value], length: Number | None) -> list[Value]:
    """Stacks, of the shape that they have where there were no steps, too: of sizes that
    are not fixed, runtimes then know nothing."""
    if length is not None and isinstance(length.value, int) and length.value > 0:
        return rows
    found = []
    types = site.results[len(site.results) - len(rows) :]
    for value, type_ in zip(rows, types, strict=True):
        sizes = type_.shape[1:]
        if any(isinstance(n, SymInt) for n in sizes) and site.frame.symbols.knows(
            *sizes
        ):
            count = site.frame.axis_size(value, 0)
            head = site("Reshape", count, site.scope.integers((1,)))
            shape = site("Concat", head, site.shape(sizes), axis=0)
            value = site("Reshape", value, shape, allowzero=1)
        found.append(value)
    return found


# --- scan -----------------------------------------------------------------------------


def _may_scan(site: Site, loop: CountedLoop) -> bool:
    """Whether ONNX's `Scan` has what a loop has: slices, at least one step, a carry of
    fixed shapes, and a body that reads nothing else."""
    if loop.after or not loop.xs or may_be_zero(loop.length) or is_zero(loop.length):
        return False
    body, first = loop.body, len(loop.before)
    told = {plain_symbol(n) for v in body.inputs[first:] for n in v.type.shape}
    symbols = zip(body.inputs, _given(site, loop.before), strict=False)
    if any(isinstance(g, Value) and v.node.symbol not in told for v, g in symbols):
        return False
    carried = zip(body.inputs[first:], body.out_types, strict=False)
    pairs = list(carried)[: len(loop.carry)]
    return all(same_shape(v.type.shape, t.shape) for v, t in pairs)


def _scan(site: Site, loop: CountedLoop) -> list[Value]:
    outer, inner = site.scope, site.scope.inner(is_closed=True)
    before = [None if isinstance(g, Value) else g for g in _given(site, loop.before)]
    count, body = len(loop.carry), loop.body
    own = body.inputs[len(before) :]
    inputs = [
        inner.input("carry" if i < count else "slice", v.type.dtype)
        for i, v in enumerate(own)
    ]
    failed = inner.failed = inner.input("failed", dtypes.int64)
    results = Frame(site.writer, inner, body, [*before, *inputs]).run()
    types = list(body.out_types)
    has_checks = inner.failed is not failed
    pairs = [(v, x.type) for v, x in zip(inputs, own, strict=True)]
    starts = [site.frame.value(x) for x in loop.carry]
    if has_checks:
        pairs.insert(count, (failed, _COUNT))
        results.insert(count, inner.failed)
        types.insert(count, _COUNT)
        starts.append(outer.failed or outer.constant(0))
    if not types:  # nothing that anyone could read
        return []
    graph = _closed(inner, "body", pairs, results, types)
    xs = [site.frame.value(x) for x in loop.xs]
    attributes: dict[str, Any] = {"body": graph, "num_scan_inputs": len(xs)}
    if loop.reverse:
        attributes["scan_input_directions"] = [1] * len(xs)
        if rows := len(types) - len(starts):
            attributes["scan_output_directions"] = [1] * rows
    names = outer.node("Scan", [v.name for v in (*starts, *xs)], attributes, len(types))
    values = _typed(names, types)
    if has_checks:
        outer.failed = values.pop(count)
    return values
