"""Reverse-mode derivatives of operators with subgraphs, derived from the roles of args.

Each region is split into a forward graph, which computes the results and the residuals,
and a linear graph, which maps tangents and residuals to tangents of the results. The
linear graph is then transposed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hopflow import dtypes
from hopflow.autograd.jvp import run_graph
from hopflow.autograd.linearize import LinearTracer, linear_of
from hopflow.autograd.partition import Keep, choose_residuals, costly_invariants, silent
from hopflow.autograd.region_jvp import (
    Masks,
    duals,
    masks_of,
    node_and_signature,
    refuse_captures,
    with_graphs,
)
from hopflow.autograd.rules import is_differentiable
from hopflow.autograd.transpose import transpose
from hopflow.bind import Operand, Value, bind, current, using
from hopflow.graph.core import Arg, Constant, Graph, Section, Var
from hopflow.graph.interpreter import interpret
from hopflow.graph.regions import Region, Role, Signature, same_symbols
from hopflow.graph.rewriting import (
    clone,
    eliminate_dead_code,
    read_vars,
    reader,
    symbols_read,
)
from hopflow.graph.types import SYMBOL_TYPE, TensorType
from hopflow.ops.convert import as_value
from hopflow.symbolic.size import substitute
from hopflow.trace.functional import TracedTensor
from hopflow.trace.sharing import of_call
from hopflow.trace.source import user_env
from hopflow.trace.tracer import Tracer
from hopflow.zeros import LinearMap, Tangent, Unknown, Zero, instantiate, is_zero


@dataclass(slots=True)
class _Split:
    """A region split into a forward graph and a linear graph.

    forward     the tracer of the forward graph, which has the inputs of the region
    outputs     the results of the region, as values of `forward`
    linear      the tracer of the linear graph
    tangents    for each tangent input of `linear`: the input of the region it belongs
                to
    needed      input of `linear` -> the var of `forward` that it takes
    residuals   the vars of `forward` to keep: all of `needed` can be computed from them
    invariants  the residuals that a loop computes alike in each step
    nonzero     for each output of `linear`: the result of the region it belongs to
    """

    forward: Tracer
    outputs: list[Value]
    linear: LinearTracer
    tangents: list[int]
    needed: dict[Var, Var]
    residuals: list[Var]
    invariants: list[Var]
    nonzero: list[int]


_INVARIANT: frozenset[Role] = frozenset(["symbol", "invariant"])
"""The roles of inputs that are the same in each step."""
_FREE: frozenset[Role] = _INVARIANT | frozenset(["slice", "operand"])
"""The roles of inputs that the linear node can take as args: they cost no memory."""


def _split(region: Region, masks: Masks, policy: Keep, *, pushed: bool) -> _Split:
    graph = region.graph
    forward = Tracer(None, graph.name, path=_path(graph), env=user_env())
    linear = LinearTracer(forward, f"{graph.name}_linear", pushed=pushed)
    linear.path = forward.path
    linear.is_body = True
    values: dict[int, Value] = {}
    tangents: dict[int, Value] = {}
    nonzero = [
        i
        for i, p in enumerate(region.outputs)
        if p.at is not None and masks.results[p.at]
    ]
    for i, (var, port) in enumerate(zip(graph.inputs, region.inputs, strict=True)):
        values[i] = forward.input_like(var, var.type.strong())
        if nonzero and port.at is not None and masks.args[port.at]:
            tangents[i] = linear.operand(var.type.strong(), f"{var.node.name}_dot")
    with using(forward):
        symbols, inputs = duals(graph, values, tangents)
        duals_out = run_graph(graph, symbols, inputs, linear)
    refuse_captures(forward)
    with using(linear):
        outputs = [instantiate(duals_out[i].tangent) for i in nonzero]
    linear.close(outputs)
    eliminate_dead_code(linear.graph)
    read = read_vars(linear.graph)
    needed = {
        c.input: forward.read(forward.localize(c.origin))
        for c in linear.captures.values()
        if c.input in read
    }
    for symbol in symbols_read(linear.graph):
        needed[linear.symbols[symbol]] = forward.symbols[symbol]
    pairs = list(zip(forward.graph.inputs, region.inputs, strict=True))
    invariant_inputs = [v for v, p in pairs if p.role in _INVARIANT]
    costly = (
        costly_invariants(forward.graph, invariant_inputs) if region.repeats else set()
    )
    free = costly.union(v for v, p in pairs if p.role in _FREE)
    residuals = choose_residuals(forward.graph, list(needed.values()), free, policy)
    results = [_value_in(forward, f.value) for f in duals_out]
    invariants = [v for v in residuals if v in costly]
    return _Split(
        forward,
        results,
        linear,
        list(tangents),
        needed,
        residuals,
        invariants,
        nonzero,
    )


def _path(graph: Graph) -> str:
    """Return the path of the operator that a body belongs to."""
    return min((node.operator_path for node in graph.nodes), key=len, default="")


def _value_in(tracer: Tracer, operand: Operand) -> Value:
    with using(tracer):
        return as_value(operand)


@dataclass(frozen=True, slots=True)
class _Residual:
    """A value that the linear node takes from the forward node.

    It is an arg of the forward node (at position `arg`), a result added to that node,
    or a loop invariant that is computed outside.
    """

    region: int
    var: Var
    type: TensorType
    role: Role
    arg: int | None = None

    def type_in(self, regions: Sequence[Region], k: int) -> TensorType:
        """Return its type over the symbols of region `k`, which may be others."""
        if self.region == k or self.type.is_static:
            return self.type
        sizes = same_symbols(regions[self.region], regions[k])
        return self.type.with_shape([substitute(n, sizes) for n in self.type.shape])


@dataclass(slots=True)
class _Parts:
    """The forward node and the linear node of an operator, without their operands.

    forward    params of the forward node
    residuals  what the linear node takes from the forward node
    added      the residuals that become further results of the forward node
    linear     params of the linear node
    inputs     the args of the linear node after the lead and the symbols
    """

    signature: Signature
    masks: Masks
    splits: list[_Split]
    forward: dict[str, Any]
    residuals: "list[_Residual]"
    added: "list[_Residual]"
    linear: dict[str, Any]
    inputs: "list[_Input]"

    @staticmethod
    def of(
        op: Any,
        operands: Sequence[Operand],
        tangents: Sequence[Tangent],
        params: dict[str, Any],
        policy: Keep,
        *,
        pushed: bool,
    ) -> "_Parts":
        node, signature = node_and_signature(op, operands, params)
        masks = masks_of(signature, tangents, len(node.results))
        splits = [
            _split(region, masks, policy, pushed=pushed) for region in signature.regions
        ]
        pairs = list(zip(signature.regions, splits, strict=True))
        residuals = [
            _residual(k, region, split, var)
            for k, (region, split) in enumerate(pairs)
            for var in split.residuals
        ]
        added = [r for r in residuals if r.arg is None and r.role != "invariant"]
        forward = _forward_params(op, params, signature, splits, added)
        inputs = _linear_inputs(signature, masks, residuals)
        graphs = {
            region.name: _linear_region(k, signature.regions, split, inputs, residuals)
            for k, (region, split) in enumerate(pairs)
        }
        args: list[Role] = [*signature.args[: op.lead]]
        args += _roles("symbol", signature.args.count("symbol"))
        args += [i.role for i in inputs]
        results = [
            r
            for r, nonzero in zip(signature.results, masks.results, strict=True)
            if nonzero
        ]
        linear = with_graphs(op, params, graphs, args, results)
        return _Parts(
            signature, masks, splits, forward, residuals, added, linear, inputs
        )


def linearize(
    op: Any,
    operands: Sequence[Operand],
    tangents: Sequence[Tangent],
    params: dict[str, Any],
    policy: Keep = "cheapest",
) -> tuple[list[Value], LinearMap]:
    """Return the results of an operator, and a linear function from tangents of its
    operands to tangents of the results. The function makes one node, linear in the
    tangents.

    It serves operators whose regions run at most once, or a number of times that a
    length or the rows of the stacks give.

    Args:
        tangents: Those of the operands. Only which of them are zero matters.
        policy: Which values in the regions are kept as residuals.
    """
    mask = tuple(map(is_zero, tangents))
    pushed = linear_of(tangents).pushed
    parts = of_call(
        op,
        params,
        ("linearize", mask, policy, pushed),
        lambda: _Parts.of(op, operands, tangents, params, policy, pushed=pushed),
    )
    operands = [
        _number(o) if role == "symbol" else o
        for o, role in zip(operands, parts.signature.args, strict=True)
    ]
    results = bind(op, operands, parts.forward)
    masks, count = parts.masks, len(parts.masks.results)
    values = list(results[:count])
    computed: dict[Var, Operand] = dict(
        zip([r.var for r in parts.added], results[count:], strict=False)
    )
    linear_op, linear = op.linear_part(parts.linear, results)
    for region, split in zip(parts.signature.regions, parts.splits, strict=True):
        computed |= _run_invariants(region, split, operands)
    residuals = [
        operands[r.arg] if r.arg is not None else computed[r.var]
        for r in parts.residuals
    ]

    def derivative(in_tangents: Sequence[Tangent]) -> list[Tangent]:
        args = _linear_args(op, operands, parts, residuals, in_tangents)
        dots = bind(linear_op, args, linear)
        out_tangents: list[Tangent] = [Zero(v.type) for v in values]
        positions = [i for i, nonzero in enumerate(masks.results) if nonzero]
        for position, tangent in zip(positions, dots, strict=True):
            if is_differentiable(values[position].type):
                out_tangents[position] = tangent
        return out_tangents

    return values, derivative


def _number(symbol: Operand) -> Operand:
    """Return a size as an arg: a constant if it is known, for the types of results."""
    size = current().symbol_of(as_value(symbol))
    return Constant(size, SYMBOL_TYPE) if isinstance(size, int) else symbol


def _residual(k: int, region: Region, split: _Split, var: Var) -> _Residual:
    role: Role = "slice" if region.repeats else "operand"
    for i, graph_input in enumerate(split.forward.graph.inputs):
        if graph_input is var:
            port = region.inputs[i]
            if port.role in _FREE:
                return _Residual(k, var, var.type, port.role, port.at)
    if var in split.invariants:
        role = "invariant"
    return _Residual(k, var, var.type, role)


def _run_invariants(
    region: Region, split: _Split, operands: Sequence[Operand]
) -> dict[Var, Operand]:
    """Compute the loop-invariant residuals of a region outside of the loop."""
    if not split.invariants:
        return {}
    copies: dict[Var, Var] = {}
    graph = clone(split.forward.graph, copies)
    graph.outputs = tuple([copies[v] for v in split.invariants])
    eliminate_dead_code(graph, with_effects=True)
    pairs = zip(graph.inputs, region.inputs, strict=True)
    invariant_inputs = [
        (v, p.at) for v, p in pairs if p.role in _INVARIANT and p.at is not None
    ]
    graph.inputs = [v for v, _ in invariant_inputs]
    values = interpret(graph, [operands[at] for _, at in invariant_inputs], bind)
    return dict(zip(split.invariants, values, strict=True))


def _forward_params(
    op: Any,
    params: dict[str, Any],
    signature: Signature,
    splits: Sequence[_Split],
    added: Sequence[_Residual],
) -> dict[str, Any]:
    """Return the params of the forward node: its regions return the residuals too.

    If the number of steps follows from stacks alone and no residual is stacked, a stack
    of empty rows is added, so that the linear node knows the number of steps.
    """
    graphs: dict[str, Graph] = {}
    rows = [] if added or not op.counts_by_rows else [Zero(_EMPTY)]
    for k, (region, split) in enumerate(zip(signature.regions, splits, strict=True)):
        tracer = split.forward
        with using(tracer):
            extra = [
                TracedTensor(tracer, r.var)
                if r.region == k
                else instantiate(Zero(r.type_in(signature.regions, k)))
                for r in added
            ]
            extra += map(instantiate, rows)
        if any(p.role == "predicate" for p in region.outputs):
            extra = []  # this region only computes the predicate
        graphs[region.name] = tracer.close([*split.outputs, *extra])
    role: Role = "stacked" if signature.regions[-1].repeats else "result"
    roles = [*signature.results, *[role] * (len(added) + len(rows))]
    return with_graphs(op, params, graphs, signature.args, roles)


_EMPTY = TensorType(dtypes.bool_, (0,))


def _roles(role: Role, count: int) -> list[Role]:
    return [role] * count


# The roles of the args of a linear node after the lead, in order. Among args of one
# role the tangents stand before the residuals.
_ORDER: tuple[Role, ...] = ("symbol", "carry", "slice", "operand", "invariant")


@dataclass(frozen=True, slots=True)
class _Input:
    """An input of a linear node: the tangent of an arg, or a residual."""

    role: Role
    tangent: int | None = None
    residual: int | None = None


def _linear_inputs(
    signature: Signature, masks: Masks, residuals: Sequence[_Residual]
) -> list[_Input]:
    inputs = [
        _Input(signature.args[i], tangent=i)
        for i, nonzero in enumerate(masks.args)
        if nonzero
    ]
    inputs += [_Input(r.role, residual=k) for k, r in enumerate(residuals)]
    inputs.sort(key=lambda i: _ORDER.index(i.role))
    return [i for i in inputs if i.role != "symbol"]


def _linear_args(
    op: Any,
    operands: Sequence[Operand],
    parts: _Parts,
    residuals: Sequence[Operand],
    tangents: Sequence[Tangent],
) -> list[Operand]:
    pairs = zip(operands, parts.signature.args, strict=True)
    symbols = [o for o, role in pairs if role == "symbol"]
    args: list[Operand] = [*operands[: op.lead], *symbols]
    for input_ in parts.inputs:
        if input_.tangent is not None:
            args.append(instantiate(tangents[input_.tangent]))
        else:
            assert input_.residual is not None
            args.append(residuals[input_.residual])
    return args


def _linear_region(
    k: int,
    regions: Sequence[Region],
    split: _Split,
    inputs: Sequence[_Input],
    residuals: Sequence[_Residual],
) -> Graph:
    """Return the linear graph of a region, with all inputs of the linear node."""
    region, old = regions[k], split.linear.graph
    tracer = Tracer(None, old.name, path=split.linear.path)
    tangents: dict[Arg, Operand] = {}
    numbers = {region.inputs[i].at: n for n, i in enumerate(split.tangents)}
    kept = set(split.residuals)
    values: dict[Var, Operand] = {}
    pairs = zip(region.graph.symbols, split.forward.graph.symbols, strict=True)
    for old_symbol, symbol in pairs:
        values[symbol] = tracer.input_like(old_symbol)
    for input_ in inputs:
        section: Section = "capture" if input_.role == "invariant" else "operand"
        if input_.tangent is not None:
            n = numbers.get(input_.tangent)
            type_ = _inner_type(region, input_.tangent)
            new_input = tracer.graph.add_input(type_, "t", section)
            if n is not None:
                source = split.linear.operands[n].source
                tangents[source] = TracedTensor(tracer, new_input)
        else:
            assert input_.residual is not None
            residual = residuals[input_.residual]
            type_ = residual.type_in(regions, k)
            new_input = tracer.graph.add_input(type_.strong(), "r", section)
            if residual.region == k and residual.var in kept:
                values[residual.var] = TracedTensor(tracer, new_input)
    recompute = Recomputation(tracer, split.forward.graph, values)
    env: dict[Arg, Operand] = {v: recompute(var) for v, var in split.needed.items()}
    env |= tangents
    for node in old.nodes:
        args = [a if isinstance(a, Constant) else env[a] for a in node.args]
        env.update(zip(node.results, tracer.repeat(node, args), strict=True))
    return tracer.close([o if isinstance(o, Constant) else env[o] for o in old.outputs])


def _inner_type(region: Region, arg: int) -> TensorType:
    """Return the type of the region's input that comes from an arg of the node."""
    return region.graph.inputs[_input_position(region, arg)].type.strong()


# --- transposition --------------------------------------------------------------------


@dataclass(slots=True)
class Pulled:
    """The transpose of a linear region, in a new graph that is still open.

    tracer      of the new graph
    cotangents  position of a linear input -> its cotangent
    """

    tracer: Tracer
    cotangents: dict[int, Tangent]


def pull(
    graph: Graph,
    linear: Sequence[int],
    inputs: Callable[[Tracer], tuple[dict[int, Value], Sequence[Tangent]]],
) -> Pulled:
    """Transpose a region's graph in its inputs at the positions `linear`.

    Args:
        inputs: Makes the inputs of the new graph after the symbols. Returns the values
            of the other inputs of `graph`, by position, and the cotangents of its
            outputs.
    """
    name = f"{graph.name}_transpose"
    tracer = Tracer(None, name, path=_path(graph), env=user_env())
    symbols = {
        i: tracer.input_like(v) for i, v in enumerate(graph.inputs) if v.node.symbol
    }
    values, cotangents = inputs(tracer)
    recompute = Recomputation(
        tracer, graph, {graph.inputs[i]: v for i, v in (symbols | values).items()}
    )
    for node in graph.nodes:
        if node.symbol is not None:
            recompute(node.results[0])  # types and params mention it
    vars_ = [graph.inputs[i] for i in linear]
    with using(tracer):
        in_cotangents = transpose(graph, vars_, recompute, cotangents)
    refuse_captures(tracer)
    return Pulled(tracer, dict(zip(linear, in_cotangents, strict=True)))


class Recomputation:
    """Recompute values of a graph in another trace.

    The nodes that a value follows from are repeated in `tracer`, each once. `values` is
    the memo table; it starts with the values that need no recomputation.
    """

    def __init__(
        self, tracer: Tracer, graph: Graph, values: dict[Var, Operand]
    ) -> None:
        self.tracer = tracer
        self.values = values
        self.reads = reader(graph)

    def __call__(self, arg: Arg) -> Operand:
        if isinstance(arg, Constant):
            return arg
        values, waiting = self.values, [arg]
        while waiting:
            node = waiting[-1].node
            if waiting[-1] in values:
                waiting.pop()
            elif missing := [v for v in self.reads(node) if v not in values]:
                waiting += missing
            else:
                args = [a if isinstance(a, Constant) else values[a] for a in node.args]
                results = self.tracer.repeat(node, args, silent)
                values.update(zip(node.results, results, strict=True))
        return values[arg]


def _pull_once(
    region: Region, linear: Sequence[int], rest: Sequence[int], nonzero: Sequence[bool]
) -> Pulled:
    """Return a region of the node that `transpose_once` makes. Its inputs are the
    operands at `rest` and the cotangents that are not zero."""

    outputs = region.graph.outputs

    def inputs(tracer: Tracer) -> tuple[dict[int, Value], list[Tangent]]:
        values: dict[int, Value] = {
            _input_position(region, i): tracer.operand(_inner_type(region, i), "r")
            for i in rest
        }
        types = {p.at: o.type for p, o in zip(region.outputs, outputs, strict=True)}
        outer = {
            k: tracer.operand(types[k].strong(), "ct")
            for k, is_nonzero in enumerate(nonzero)
            if is_nonzero
        }
        zeros = [Zero(o.type) for o in outputs]
        cotangents: list[Tangent] = [
            zero if p.at is None else outer.get(p.at, zero)
            for p, zero in zip(region.outputs, zeros, strict=True)
        ]
        return values, cotangents

    return pull(region.graph, [_input_position(region, i) for i in linear], inputs)


def _input_position(region: Region, arg: int) -> int:
    """Return the position of the region's input that comes from an arg of the node."""
    at = region.input_of(arg)
    assert at is not None
    return at


def transpose_once(
    op: Any,
    cotangents: Sequence[Tangent],
    operands: Sequence[Any],
    params: dict[str, Any],
) -> list[Tangent | None]:
    """Return the cotangents of the operands that are `Unknown`; None for the others.

    The operator's regions run at most once. Its transpose is a node of the same
    operator, with the transposed regions.

    Args:
        cotangents: Those of the results.
    """
    linear = tuple([i for i, o in enumerate(operands) if isinstance(o, Unknown)])
    nonzero = tuple([not isinstance(ct, Zero) for ct in cotangents])
    passed, targets, new_params = of_call(
        op,
        params,
        ("transpose", linear, nonzero),
        lambda: _transposed(op, operands, params, linear, nonzero),
    )
    nonzero_cotangents = [ct for ct in cotangents if not isinstance(ct, Zero)]
    args = [*operands[: op.lead], *(operands[i] for i in passed), *nonzero_cotangents]
    by_operand = dict(zip(targets, bind(op, args, new_params), strict=True))
    return [
        by_operand.get(i, Zero(o.type)) if i in linear else None
        for i, o in enumerate(operands)
    ]


def _transposed(
    op: Any,
    operands: Sequence[Any],
    params: dict[str, Any],
    linear: Sequence[int],
    nonzero: Sequence[bool],
) -> tuple[list[int], list[int], dict[str, Any]]:
    """Plan the node that `transpose_once` makes.

    Returns:
        The operands that it takes before the cotangents, the operands whose cotangents
        its results are, and its params.
    """
    _, signature = node_and_signature(op, operands, params)
    taken = [i for i, role in enumerate(signature.args) if role == "operand"]
    rest = [i for i in taken if i not in linear]
    symbols = [i for i, role in enumerate(signature.args) if role == "symbol"]
    pulled = {
        region: _pull_once(region, linear, rest, nonzero)
        for region in signature.regions
    }
    targets = [
        i
        for i in linear
        if not all(
            is_zero(p.cotangents[_input_position(r, i)]) for r, p in pulled.items()
        )
    ]
    graphs = {}
    for region, p in pulled.items():
        with using(p.tracer):
            outputs = [
                instantiate(p.cotangents[_input_position(region, i)]) for i in targets
            ]
        graphs[region.name] = p.tracer.close(outputs)
    roles = [*signature.args[: op.lead], *_roles("symbol", len(symbols))]
    roles += _roles("operand", len(rest) + sum(nonzero))
    new_params = with_graphs(op, params, graphs, roles, _roles("result", len(targets)))
    return [*symbols, *rest], targets, new_params
