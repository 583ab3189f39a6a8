"""Captured graphs traced again, with results of their nodes that a function chooses.

`retraced` does that for a whole graph, and `bind_retraced` for the bodies of one
operator. A body keeps its inputs and their roles. What it comes to read of outside is
lifted: it becomes a capture of all bodies of the operator, as in a first trace.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hopflow.bind import Operand, Value, bind, current
from hopflow.errors import CarryTypeError, GraphError, MutationError
from hopflow.graph.core import Graph, Node, Var, map_graphs, plain_symbol
from hopflow.graph.core import size_of as as_size
from hopflow.graph.interpreter import Evaluate
from hopflow.graph.module import GraphModule
from hopflow.graph.regions import Region, Role, Signature, carries
from hopflow.graph.types import same_shape
from hopflow.hops.subgraphs import mismatches
from hopflow.symbolic.env import ShapeEnv
from hopflow.symbolic.size import Size, Symbol, free_symbols, substitute
from hopflow.trace.captures import hold_captures, is_written
from hopflow.trace.functional import TracedTensor
from hopflow.trace.sharing import of_call
from hopflow.trace.source import user_env
from hopflow.trace.tracer import Tracer, trace_into


def retraced(graph: Graph, evaluate: Evaluate) -> Graph:
    """The root graph that computes what `evaluate` makes of `graph`.

    Its inputs are those of `graph`. Tensors from outside become attributes.

    Raises:
        GraphError: `evaluate` gives another number of results.
        MutationError: it writes to an input or to a tensor from outside.
    """
    tracer = Tracer(None, graph.name, env=env_of(graph))
    outputs = _evaluated(tracer, graph, _inputs(tracer, graph, {}), evaluate)
    names = {id(value): name for name, value in graph.attributes.items()}
    taken = {*names.values(), *(v.node.name for v in graph.inputs)}
    for capture in tracer.captures.values():
        if id(capture.origin) not in names:
            names[id(capture.origin)] = name = _unused("tensor0", taken)
            taken.add(name)
    for value in graph.attributes.values():  # a write at each call may need it
        tracer.localize(value)
    found = tracer.close(outputs)
    found.output_line = graph.output_line
    found.inputs = [
        *_symbol_inputs(tracer, graph, {}),
        *(v for v in found.inputs if v.node.section == "operand"),
    ]
    hold_captures(
        found,
        [(c.input, names[id(c.origin)], c.origin) for c in tracer.captures.values()],
    )
    return found


def with_graph(module: GraphModule, graph: Graph) -> GraphModule:
    """A module with another graph, and guards for all that was decided by sizes since
    it was traced: what was decided once is not asked again."""
    env = env_of(graph)
    asked = () if env is None else env.asked
    return module.with_graph(graph, asked[module.decided :])


def env_of(graph: Graph) -> ShapeEnv | None:
    """The environment of the symbols of a root graph, if they have one."""
    envs = [v.node.symbol.env for v in graph.symbols if v.node.symbol is not None]
    return next((env for env in envs if isinstance(env, ShapeEnv)), None)


def bind_retraced(
    op: Any, operands: Sequence[Operand], params: dict[str, Any], evaluate: Evaluate
) -> tuple[Value, ...]:
    """The results of an operator whose bodies are what `evaluate` makes of its graphs.

    Raises:
        CarryTypeError: a carry comes out of a body with another type.
        GraphError: `evaluate` gives another number of results.
        MutationError: it writes to an input or to a tensor from outside.
    """

    def make() -> _Bodies:
        return _Bodies.of(op, operands, params, evaluate)

    made = of_call(op, params, ("retraced", evaluate), make)
    if made.captures and made.parent is not current():
        made = make()  # what one call has lifted is not where another one stands
    return made.bind(op, operands)


@dataclass(frozen=True, slots=True)
class _Bodies:
    """The bodies of an operator, traced again.

    parent     where it was called
    position   where the new symbols stand among the args
    symbols    those that the bodies have lifted, besides those they had
    captures   the tensors that they have lifted
    """

    parent: Any
    params: dict[str, Any]
    position: int
    symbols: tuple[Symbol, ...]
    captures: tuple[Value, ...]

    @classmethod
    def of(
        cls,
        op: Any,
        operands: Sequence[Operand],
        params: dict[str, Any],
        evaluate: Evaluate,
    ) -> "_Bodies":
        args: Any = tuple(operands)
        signature: Signature = op.signature(Node("call_function", op, args, params))
        bodies = {
            id(region.graph): _Body(region, operands, evaluate)
            for region in signature.regions
        }
        for pair in carries(signature):
            for region in signature.regions:
                _check_carry(
                    op, bodies[id(region.graph)], region, pair.arg, pair.result
                )
        captures = _share([body.tracer for body in bodies.values()])
        symbols = _share_symbols(list(bodies.values()))
        graphs = {key: body.close(symbols, captures) for key, body in bodies.items()}
        position = op.lead + signature.args.count("symbol")
        kept = list(signature.args)
        role: Role = (
            "invariant" if any(r.repeats for r in signature.regions) else "operand"
        )
        kept[position:position] = ["symbol"] * len(symbols)
        kept += [role] * len(captures)
        changed = map_graphs(params, lambda graph: graphs[id(graph)])
        return cls(
            current(),
            op.with_roles(changed, kept, signature.results),
            position,
            tuple(symbols),
            tuple(captures.values()),
        )

    def bind(self, op: Any, operands: Sequence[Operand]) -> tuple[Value, ...]:
        here = current()
        symbols = [here.value_of(as_size(symbol)) for symbol in self.symbols]
        first, rest = operands[: self.position], operands[self.position :]
        return bind(op, [*first, *symbols, *rest, *self.captures], self.params)


class _Body:
    """One body, traced again; its tracer is open until `close`."""

    def __init__(
        self, region: Region, operands: Sequence[Operand], evaluate: Evaluate
    ) -> None:
        self.graph = region.graph
        here = current()
        around = here if isinstance(here, Tracer) else None
        env = None if around else user_env()
        parent = None if here.is_eager else here
        self.tracer = Tracer(parent, region.graph.name, env=env)
        self.renamed = _caller_symbols(region, operands)
        self.inputs = _inputs(self.tracer, region.graph, self.renamed)
        self.outputs = _evaluated(self.tracer, region.graph, self.inputs, evaluate)

    def close(self, symbols: Iterable[Symbol], captures: Iterable[int]) -> Graph:
        """The graph: the old inputs, and those that were lifted behind them, section by
        section."""
        tracer, graph = self.tracer, self.tracer.graph
        own = [x.source for x in self.inputs]
        lifted = [tracer.symbol(s) for s in symbols]
        graph.outputs = tuple(map(tracer.arg, self.outputs))
        graph.output_line = self.graph.output_line
        tracer.closed = True
        graph.inputs = [
            *(v for v in own if v.node.section == "symbol"),
            *lifted,
            *(v for v in own if v.node.section != "symbol"),
            *(tracer.captures[key].input for key in captures),
        ]
        graph.name_inputs()
        return graph


# --- inputs ---------------------------------------------------------------------------


def _caller_symbols(
    region: Region, operands: Sequence[Operand]
) -> dict[Symbol, Symbol]:
    """For symbols of a body those that the caller passes for them: what a body lifts
    has a type over these. A symbol that is passed twice stands for the first."""
    found: dict[Symbol, Symbol] = {}
    here = current()
    for var, port in region.ports:
        symbol = var.node.symbol
        passed = None if port.at is None else operands[port.at]
        if symbol is None or not isinstance(here, Tracer):
            continue
        if isinstance(passed, TracedTensor) and passed.tracer is here:
            known = here.known_size(here.read(passed))
            outer = None if known is None else plain_symbol(known)
            if outer is not None and outer not in found.values():
                found[symbol] = outer
    return found


def _inputs(
    tracer: Tracer, graph: Graph, renamed: Mapping[Symbol, Symbol]
) -> list[TracedTensor]:
    """Inputs of a new graph like those of `graph`, over symbols of other names."""
    sizes: dict[Symbol, Size] = {old: as_size(new) for old, new in renamed.items()}
    found: list[TracedTensor] = []
    for var in graph.inputs:
        node = var.node
        if node.symbol is not None:
            symbol = renamed.get(node.symbol, node.symbol)
            found.append(TracedTensor(tracer, tracer.define(symbol)))
            continue
        type_ = var.type.with_shape([substitute(n, sizes) for n in var.type.shape])
        new = {  # a size that each step may change is told by the input itself
            axis: n
            for axis, n in enumerate(type_.shape)
            if (symbol_ := plain_symbol(n)) is not None
            and symbol_ not in tracer.symbols
        }
        tensor = tracer.operand(type_, node.name, new)
        tensor.source.node.section = node.section
        found.append(tensor)
    return found


def _symbol_inputs(
    tracer: Tracer, graph: Graph, renamed: Mapping[Symbol, Symbol]
) -> list[Var]:
    symbols = [v.node.symbol for v in graph.symbols if v.node.symbol is not None]
    return [tracer.symbols[renamed.get(s, s)] for s in symbols]


# --- results --------------------------------------------------------------------------


def _evaluated(
    tracer: Tracer, graph: Graph, inputs: Sequence[TracedTensor], evaluate: Evaluate
) -> list[Operand]:
    """The outputs of `graph` on these inputs of `tracer`."""
    found = trace_into(tracer, evaluate, (graph, inputs))
    if len(found) != len(graph.outputs):
        raise GraphError(
            f"graph `{graph.name}` has {len(graph.outputs)} results, and its "
            f"transformation {len(found)}. Let it have as many."
        )
    tensors = [*tracer.operands, *(c.tensor for c in tracer.captures.values())]
    for tensor in filter(is_written, tensors):
        raise MutationError(
            f"the transformation of graph `{graph.name}` writes to a tensor "
            f"{tensor.type} that it is given or reads from outside. Return the new "
            "value instead."
        )
    return [tracer.localize(o) if isinstance(o, Value) else o for o in found]


def _check_carry(op: Any, body: _Body, region: Region, arg: int, result: int) -> None:
    """Raises: CarryTypeError: a carry comes out of a body with another type."""
    before, after = region.input_of(arg), region.output_of(result)
    if before is None or after is None:
        return
    old, new = region.graph.inputs[before].type, region.graph.outputs[after].type
    sizes = {a: as_size(b) for a, b in body.renamed.items()}
    expected = new.with_shape([substitute(n, sizes) for n in new.shape])
    found = body.outputs[after].type
    name = region.graph.inputs[before].node.name
    fixed = not free_symbols(*new.shape) or same_shape(old.shape, new.shape)
    if leaves := mismatches([name], [expected], [found], sizes=fixed):
        raise CarryTypeError(op.name, region.name, "its transformation", leaves)


# --- what was lifted ------------------------------------------------------------------


def _share(tracers: Sequence[Tracer]) -> dict[int, Value]:
    """Give each body an input for each tensor that any of them has lifted."""
    union: dict[int, Value] = {}
    for tracer in tracers:
        union |= {key: c.origin for key, c in tracer.captures.items()}
    for tracer in tracers:
        for origin in union.values():
            tracer.localize(origin)
    return union


def _share_symbols(bodies: Sequence[_Body]) -> list[Symbol]:
    """Give each body an input for each symbol that any of them has lifted."""
    union: dict[Symbol, None] = {}
    for body in bodies:
        own = {x.source for x in body.inputs}
        for symbol, var in body.tracer.symbols.items():
            if var.node.section == "symbol" and var not in own:
                union[symbol] = None
    for body in bodies:
        for symbol in union:
            body.tracer.symbol(symbol)
    return list(union)


def _unused(name: str, taken: Collection[str]) -> str:
    number, base = 0, name.rstrip("0123456789")
    while name in taken:
        number, name = number + 1, f"{base}{number + 1}"
    return name
