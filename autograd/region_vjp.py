"""Reverse derivatives of operators with subgraphs, from the roles of args and results.

A region is split into one that computes the results and the residuals, and one that is
linear in the tangents and takes the residuals; that one is transposed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hopflow import dtypes
from hopflow.autograd.jvp import run_graph
from hopflow.autograd.linearize import LinearTracer, linear_of
from hopflow.autograd.partition import Keep, dear_invariants, kept, silent
from hopflow.autograd.region_jvp import (
    Masks,
    duals,
    input_like,
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
    """A region split in two.

    forward   tracer of a graph of the region's inputs; its outputs and the residuals
    outputs   the results, there
    linear    a graph of tangents and residuals, to tangents of the results
    tangents  which inputs of the region the first operands of `linear` belong to
    needed    input of `linear` -> the var of `forward` that it takes
    residuals the vars of `forward` that are kept, for the needed ones to follow from
    invariants those of them that are the same in each step, and no inputs
    nonzero   which results the outputs of `linear` belong to
    """

    forward: Tracer
    outputs: list[Value]
    linear: LinearTracer
    tangents: list[int]
    needed: dict[Var, Var]
    residuals: list[Var]
    invariants: list[Var]
    nonzero: list[int]


_SAME: frozenset[Role] = frozenset(["symbol", "invariant"])
"""The inputs of a region that are the same in each step."""
_FREE: frozenset[Role] = _SAME | frozenset(["slice", "operand"])
"""The inputs of a region that its linear part can have as they are."""


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
        values[i] = input_like(forward, var)
        if nonzero and port.at is not None and masks.args[port.at]:
            tangents[i] = linear.operand(var.type.strong(), f"{var.node.name}_dot")
    with using(forward):
        symbols, inputs = duals(graph, values, tangents)
        found = run_graph(graph, symbols, inputs, linear)
    refuse_captures(forward)
    with using(linear):
        outputs = [instantiate(found[i].tangent) for i in nonzero]
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
    same = [v for v, p in pairs if p.role in _SAME]
    dear = dear_invariants(forward.graph, same) if region.repeats else set()
    free = dear.union(v for v, p in pairs if p.role in _FREE)
    residuals = kept(forward.graph, list(needed.values()), free, policy)
    results = [_value_in(forward, f.value) for f in found]
    invariants = [v for v in residuals if v in dear]
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
    """Which operator a body belongs to."""
    return min((node.operator_path for node in graph.nodes), key=len, default="")


def _value_in(tracer: Tracer, operand: Operand) -> Value:
    with using(tracer):
        return as_value(operand)


@dataclass(frozen=True, slots=True)
class _Residual:
    """A value that the linear node takes: an arg of the first node (`arg`), a result
    that was added to it, or an invariant that is computed beside it."""

    region: int
    var: Var
    type: TensorType
    role: Role
    arg: int | None = None

    def type_in(self, regions: Sequence[Region], k: int) -> TensorType:
        """Its type over the symbols of the region `k`: each may have its own."""
        if self.region == k or self.type.is_static:
            return self.type
        sizes = same_symbols(regions[self.region], regions[k])
        return self.type.with_shape([substitute(n, sizes) for n in self.type.shape])


@dataclass(slots=True)
class _Parts:
    """The two nodes that an operator becomes, but for their operands.

    forward    params of the first
    residuals  what the second takes of it; those `added` are further results of it
    linear     params of the second
    inputs     the args of the second after the symbols
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
        given: Sequence[Tangent],
        params: dict[str, Any],
        policy: Keep,
        *,
        pushed: bool,
    ) -> "_Parts":
        node, signature = node_and_signature(op, operands, params)
        masks = masks_of(signature, given, len(node.results))
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
        args += _same("symbol", signature.args.count("symbol"))
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
    given: Sequence[Tangent],
    params: dict[str, Any],
    policy: Keep = "cheapest",
) -> tuple[list[Value], LinearMap]:
    """The results of an operator, and a function from tangents of its operands to those
    of the results, which makes one node that is linear in them.

    For operators whose regions run at most once, or as often as a length says or the
    rows of their stacks do.

    Args:
        policy: Which values in the regions are kept.
    """
    mask = tuple(map(is_zero, given))
    pushed = linear_of(given).pushed
    parts = of_call(
        op,
        params,
        ("linearize", mask, policy, pushed),
        lambda: _Parts.of(op, operands, given, params, policy, pushed=pushed),
    )
    operands = [
        _number(o) if role == "symbol" else o
        for o, role in zip(operands, parts.signature.args, strict=True)
    ]
    results = bind(op, operands, parts.forward)
    masks, count = parts.masks, len(parts.masks.results)
    values = list(results[:count])
    made: dict[Var, Operand] = dict(
        zip([r.var for r in parts.added], results[count:], strict=False)
    )
    linear_op, linear = op.linear_part(parts.linear, results)
    for region, split in zip(parts.signature.regions, parts.splits, strict=True):
        made |= _run_invariants(region, split, operands)
    known = [
        operands[r.arg] if r.arg is not None else made[r.var] for r in parts.residuals
    ]

    def derivative(tangents: Sequence[Tangent]) -> list[Tangent]:
        args = _linear_args(op, operands, parts, known, tangents)
        found = bind(linear_op, args, linear)
        result: list[Tangent] = [Zero(v.type) for v in values]
        places = [i for i, nonzero in enumerate(masks.results) if nonzero]
        for place, tangent in zip(places, found, strict=True):
            if is_differentiable(values[place].type):
                result[place] = tangent
        return result

    return values, derivative


def _number(symbol: Operand) -> Operand:
    """A size as an arg of a node: one that is known tells the types of results."""
    size = current().symbol_of(as_value(symbol))
    return Constant(size, SYMBOL_TYPE) if isinstance(size, int) else symbol


def _residual(k: int, region: Region, split: _Split, var: Var) -> _Residual:
    role: Role = "slice" if region.repeats else "operand"
    for i, own in enumerate(split.forward.graph.inputs):
        if own is var:
            port = region.inputs[i]
            if port.role in _FREE:
                return _Residual(k, var, var.type, port.role, port.at)
    if var in split.invariants:
        role = "invariant"
    return _Residual(k, var, var.type, role)


def _run_invariants(
    region: Region, split: _Split, operands: Sequence[Operand]
) -> dict[Var, Operand]:
    """What is the same in each step, and kept: computed where the operator stands."""
    if not split.invariants:
        return {}
    copies: dict[Var, Var] = {}
    graph = clone(split.forward.graph, copies)
    graph.outputs = tuple([copies[v] for v in split.invariants])
    eliminate_dead_code(graph, with_effects=True)
    pairs = zip(graph.inputs, region.inputs, strict=True)
    same = [(v, p.at) for v, p in pairs if p.role in _SAME and p.at is not None]
    graph.inputs = [v for v, _ in same]
    found = interpret(graph, [operands[at] for _, at in same], bind)
    return dict(zip(split.invariants, found, strict=True))


def _forward_params(
    op: Any,
    params: dict[str, Any],
    signature: Signature,
    splits: Sequence[_Split],
    added: Sequence[_Residual],
) -> dict[str, Any]:
    """Those of the node with residuals for further results. Where only stacks tell how
    many steps there are, and no residual is stacked, one of empty rows is."""
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
            extra = []  # it tells only whether the others run
        graphs[region.name] = tracer.close([*split.outputs, *extra])
    role: Role = "stacked" if signature.regions[-1].repeats else "result"
    roles = [*signature.results, *[role] * (len(added) + len(rows))]
    return with_graphs(op, params, graphs, signature.args, roles)


_EMPTY = TensorType(dtypes.bool_, (0,))


def _same(role: Role, count: int) -> list[Role]:
    return [role] * count


# The args of a linear node, in order: the lead; symbols; carries, then slices or
# operands that are tangents, then those that are residuals; invariants likewise.
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
    found = [
        _Input(signature.args[i], tangent=i)
        for i, nonzero in enumerate(masks.args)
        if nonzero
    ]
    found += [_Input(r.role, residual=k) for k, r in enumerate(residuals)]
    found.sort(key=lambda i: _ORDER.index(i.role))
    return [i for i in found if i.role != "symbol"]


def _linear_args(
    op: Any,
    operands: Sequence[Operand],
    parts: _Parts,
    known: Sequence[Operand],
    tangents: Sequence[Tangent],
) -> list[Operand]:
    pairs = zip(operands, parts.signature.args, strict=True)
    symbols = [o for o, role in pairs if role == "symbol"]
    args: list[Operand] = [*operands[: op.lead], *symbols]
    for given in parts.inputs:
        if given.tangent is not None:
            args.append(instantiate(tangents[given.tangent]))
        else:
            assert given.residual is not None
            args.append(known[given.residual])
    return args


def _linear_region(
    k: int,
    regions: Sequence[Region],
    split: _Split,
    inputs: Sequence[_Input],
    residuals: Sequence[_Residual],
) -> Graph:
    """The linear part of a region as a graph of all the node's inputs."""
    region, old = regions[k], split.linear.graph
    tracer = Tracer(None, old.name, path=split.linear.path)
    tangents: dict[Arg, Operand] = {}
    places = {region.inputs[i].at: n for n, i in enumerate(split.tangents)}
    own = set(split.residuals)
    known: dict[Var, Operand] = {}
    pairs = zip(region.graph.symbols, split.forward.graph.symbols, strict=True)
    for old_symbol, symbol in pairs:
        known[symbol] = input_like(tracer, old_symbol)
    for given in inputs:
        section: Section = "capture" if given.role == "invariant" else "operand"
        if given.tangent is not None:
            n = places.get(given.tangent)
            type_ = _inner_type(region, given.tangent)
            made = tracer.graph.add_input(type_, "t", section)
            if n is not None:
                source = split.linear.operands[n].source
                tangents[source] = TracedTensor(tracer, made)
        else:
            assert given.residual is not None
            residual = residuals[given.residual]
            type_ = residual.type_in(regions, k)
            made = tracer.graph.add_input(type_.strong(), "r", section)
            if residual.region == k and residual.var in own:
                known[residual.var] = TracedTensor(tracer, made)
    again = Again(tracer, split.forward.graph, known)
    env: dict[Arg, Operand] = {v: again(kept) for v, kept in split.needed.items()}
    env |= tangents
    for node in old.nodes:
        args = [a if isinstance(a, Constant) else env[a] for a in node.args]
        env.update(zip(node.results, tracer.repeat(node, args), strict=True))
    return tracer.close([o if isinstance(o, Constant) else env[o] for o in old.outputs])


def _inner_type(region: Region, arg: int) -> TensorType:
    """The type of the input of a region that comes from an arg of the node."""
    return region.graph.inputs[_place(region, arg)].type.strong()


# --- transposition --------------------------------------------------------------------


@dataclass(slots=True)
class Pulled:
    """A linear region run backwards in a new graph, which is still open.

    tracer      of the new graph
    cotangents  of the linear inputs, by their positions
    """

    tracer: Tracer
    cotangents: dict[int, Tangent]


def pull(
    graph: Graph,
    linear: Sequence[int],
    inputs: Callable[[Tracer], tuple[dict[int, Value], Sequence[Tangent]]],
) -> Pulled:
    """Cotangents of the inputs at `linear` of a region's graph.

    Args:
        inputs: Makes the inputs of the new graph after the symbols, and gives what the
            others of `graph` hold, by position, and the cotangents of its outputs.
    """
    name = f"{graph.name}_transpose"
    tracer = Tracer(None, name, path=_path(graph), env=user_env())
    symbols = {
        i: input_like(tracer, v) for i, v in enumerate(graph.inputs) if v.node.symbol
    }
    values, given = inputs(tracer)
    again = Again(
        tracer, graph, {graph.inputs[i]: v for i, v in (symbols | values).items()}
    )
    for node in graph.nodes:
        if node.symbol is not None:
            again(node.results[0])  # types and params mention it
    vars_ = [graph.inputs[i] for i in linear]
    with using(tracer):
        found = transpose(graph, vars_, again, given)
    refuse_captures(tracer)
    return Pulled(tracer, dict(zip(linear, found, strict=True)))


class Again:
    """Values of a graph in another trace, where some are known: the nodes from which
    the others follow are repeated there, each once."""

    def __init__(self, tracer: Tracer, graph: Graph, known: dict[Var, Operand]) -> None:
        self.tracer = tracer
        self.known = known
        self.reads = reader(graph)

    def __call__(self, arg: Arg) -> Operand:
        if isinstance(arg, Constant):
            return arg
        known, waiting = self.known, [arg]
        while waiting:
            node = waiting[-1].node
            if waiting[-1] in known:
                waiting.pop()
            elif missing := [v for v in self.reads(node) if v not in known]:
                waiting += missing
            else:
                args = [a if isinstance(a, Constant) else known[a] for a in node.args]
                made = self.tracer.repeat(node, args, silent)
                known.update(zip(node.results, made, strict=True))
        return known[arg]


def _pull_once(
    region: Region, linear: Sequence[int], rest: Sequence[int], nonzero: Sequence[bool]
) -> Pulled:
    """A region of `transpose_once`: its inputs are those of the operands at `rest`, and
    the cotangents that are not zero."""

    outputs = region.graph.outputs

    def inputs(tracer: Tracer) -> tuple[dict[int, Value], list[Tangent]]:
        values: dict[int, Value] = {
            _place(region, i): tracer.operand(_inner_type(region, i), "r") for i in rest
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

    return pull(region.graph, [_place(region, i) for i in linear], inputs)


def _place(region: Region, arg: int) -> int:
    """The position of the input of a region that comes from an arg of the node."""
    at = region.input_of(arg)
    assert at is not None
    return at


def transpose_once(
    op: Any,
    given: Sequence[Tangent],
    operands: Sequence[Any],
    params: dict[str, Any],
) -> list[Tangent | None]:
    """The cotangents of the operands that are `Unknown`, for an operator whose regions
    run at most once: a node of it, of the transposed regions."""
    linear = tuple([i for i, o in enumerate(operands) if isinstance(o, Unknown)])
    nonzero = tuple([not isinstance(ct, Zero) for ct in given])
    passed, kept, changed = of_call(
        op,
        params,
        ("transpose", linear, nonzero),
        lambda: _transposed(op, operands, params, linear, nonzero),
    )
    cotangents = [ct for ct in given if not isinstance(ct, Zero)]
    args = [*operands[: op.lead], *(operands[i] for i in passed), *cotangents]
    by_arg = dict(zip(kept, bind(op, args, changed), strict=True))
    return [
        by_arg.get(i, Zero(o.type)) if i in linear else None
        for i, o in enumerate(operands)
    ]


def _transposed(
    op: Any,
    operands: Sequence[Any],
    params: dict[str, Any],
    linear: Sequence[int],
    nonzero: Sequence[bool],
) -> tuple[list[int], list[int], dict[str, Any]]:
    """The node that `transpose_once` makes: which operands it takes before the
    cotangents, which operands its results are cotangents of, and its params."""
    _, signature = node_and_signature(op, operands, params)
    of_role = [i for i, role in enumerate(signature.args) if role == "operand"]
    rest = [i for i in of_role if i not in linear]
    symbols = [i for i, role in enumerate(signature.args) if role == "symbol"]
    pulled = {
        region: _pull_once(region, linear, rest, nonzero)
        for region in signature.regions
    }
    kept = [
        i
        for i in linear
        if not all(is_zero(p.cotangents[_place(r, i)]) for r, p in pulled.items())
    ]
    graphs = {}
    for region, p in pulled.items():
        with using(p.tracer):
            outputs = [instantiate(p.cotangents[_place(region, i)]) for i in kept]
        graphs[region.name] = p.tracer.close(outputs)
    roles = [*signature.args[: op.lead], *_same("symbol", len(symbols))]
    roles += _same("operand", len(rest) + sum(nonzero))
    changed = with_graphs(op, params, graphs, roles, _same("result", len(kept)))
    return [*symbols, *rest], kept, changed
