"""Retracing of captured graphs, with a function that chooses the results of their
nodes.

`retraced` retraces a root graph, and `bind_retraced` the bodies of an operator. A body
keeps its inputs and their roles. A value that it newly reads from outside is lifted: it
becomes a capture of all bodies of the operator, as in a first trace.
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
    """Return the root graph of the results that `evaluate` computes for `graph`.

    Its inputs are those of `graph`. Tensors that it captures become attributes.

    Raises:
        GraphError: `evaluate` returns another number of results.
        MutationError: it writes to an input or to a captured tensor.
    """
    tracer = Tracer(None, graph.name, env=env_of(graph))
    outputs = _evaluated(tracer, graph, _inputs(tracer, graph, {}), evaluate)
    names = {id(value): name for name, value in graph.attributes.items()}
    taken = {*names.values(), *(v.node.name for v in graph.inputs)}
    for capture in tracer.captures.values():
        if id(capture.origin) not in names:
            names[id(capture.origin)] = name = _unused("tensor0", taken)
            taken.add(name)
    for value in graph.attributes.values():  # the writes of a call may read it
        tracer.localize(value)
    new_graph = tracer.close(outputs)
    new_graph.output_line = graph.output_line
    new_graph.inputs = [
        *_symbol_inputs(tracer, graph, {}),
        *(v for v in new_graph.inputs if v.node.section == "operand"),
    ]
    hold_captures(
        new_graph,
        [(c.input, names[id(c.origin)], c.origin) for c in tracer.captures.values()],
    )
    return new_graph


def with_graph(module: GraphModule, graph: Graph) -> GraphModule:
    """Return a module with another graph, and guards for all that was decided about
    sizes since its trace."""
    env = env_of(graph)
    guards = () if env is None else env.asked
    return module.with_graph(graph, guards[module.decided :])


def env_of(graph: Graph) -> ShapeEnv | None:
    """Return the environment of the symbols of a root graph, or None."""
    envs = [v.node.symbol.env for v in graph.symbols if v.node.symbol is not None]
    return next((env for env in envs if isinstance(env, ShapeEnv)), None)


def bind_retraced(
    op: Any, operands: Sequence[Operand], params: dict[str, Any], evaluate: Evaluate
) -> tuple[Value, ...]:
    """Return the results of an operator with retraced bodies, which compute what
    `evaluate` does for its graphs.

    Raises:
        CarryTypeError: a body changes the type of a carry.
        GraphError: `evaluate` returns another number of results.
        MutationError: it writes to an input or to a captured tensor.
    """

    def make() -> _Bodies:
        return _Bodies.of(op, operands, params, evaluate)

    bodies = of_call(op, params, ("retraced", evaluate), make)
    if bodies.captures and bodies.parent is not current():
        bodies = make()  # another interpreter does not have the lifted values
    return bodies.bind(op, operands)


@dataclass(frozen=True, slots=True)
class _Bodies:
    """The retraced bodies of an operator.

    parent     the interpreter that called it
    position   of the new symbols among the args
    symbols    those that the bodies have lifted
    captures   the tensors that the bodies have lifted
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
        roles = list(signature.args)
        role: Role = (
            "invariant" if any(r.repeats for r in signature.regions) else "operand"
        )
        roles[position:position] = ["symbol"] * len(symbols)
        roles += [role] * len(captures)
        new_params = map_graphs(params, lambda graph: graphs[id(graph)])
        return cls(
            current(),
            op.with_roles(new_params, roles, signature.results),
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
    """A retraced body; its tracer is open until `close`."""

    def __init__(
        self, region: Region, operands: Sequence[Operand], evaluate: Evaluate
    ) -> None:
        self.graph = region.graph
        here = current()
        enclosing = here if isinstance(here, Tracer) else None
        env = None if enclosing else user_env()
        parent = None if here.is_eager else here
        self.tracer = Tracer(parent, region.graph.name, env=env)
        self.renamed = _caller_symbols(region, operands)
        self.inputs = _inputs(self.tracer, region.graph, self.renamed)
        self.outputs = _evaluated(self.tracer, region.graph, self.inputs, evaluate)

    def close(self, symbols: Iterable[Symbol], captures: Iterable[int]) -> Graph:
        """Return the graph. In each section the lifted inputs follow the old ones."""
        tracer, graph = self.tracer, self.tracer.graph
        inputs = [x.source for x in self.inputs]
        lifted = [tracer.symbol(s) for s in symbols]
        graph.outputs = tuple(map(tracer.arg, self.outputs))
        graph.output_line = self.graph.output_line
        tracer.closed = True
        graph.inputs = [
            *(v for v in inputs if v.node.section == "symbol"),
            *lifted,
            *(v for v in inputs if v.node.section != "symbol"),
            *(tracer.captures[key].input for key in captures),
        ]
        graph.name_inputs()
        return graph


# --- inputs ---------------------------------------------------------------------------


def _caller_symbols(
    region: Region, operands: Sequence[Operand]
) -> dict[Symbol, Symbol]:
    """Return the symbols that the caller passes for symbols of a body. The types of
    lifted values are over the caller's symbols. If one is passed twice, it stands
    for the first."""
    outer_symbols: dict[Symbol, Symbol] = {}
    here = current()
    for var, port in region.ports:
        symbol = var.node.symbol
        passed = None if port.at is None else operands[port.at]
        if symbol is None or not isinstance(here, Tracer):
            continue
        if isinstance(passed, TracedTensor) and passed.tracer is here:
            size = here.known_size(here.read(passed))
            outer = None if size is None else plain_symbol(size)
            if outer is not None and outer not in outer_symbols.values():
                outer_symbols[symbol] = outer
    return outer_symbols


def _inputs(
    tracer: Tracer, graph: Graph, renamed: Mapping[Symbol, Symbol]
) -> list[TracedTensor]:
    """Return inputs of a new graph like those of `graph`, over renamed symbols."""
    sizes: dict[Symbol, Size] = {old: as_size(new) for old, new in renamed.items()}
    inputs: list[TracedTensor] = []
    for var in graph.inputs:
        node = var.node
        if node.symbol is not None:
            symbol = renamed.get(node.symbol, node.symbol)
            inputs.append(TracedTensor(tracer, tracer.define(symbol)))
            continue
        type_ = var.type.with_shape([substitute(n, sizes) for n in var.type.shape])
        new = {  # steps may change these sizes: only the input has them
            axis: n
            for axis, n in enumerate(type_.shape)
            if (symbol_ := plain_symbol(n)) is not None
            and symbol_ not in tracer.symbols
        }
        tensor = tracer.operand(type_, node.name, new)
        tensor.source.node.section = node.section
        inputs.append(tensor)
    return inputs


def _symbol_inputs(
    tracer: Tracer, graph: Graph, renamed: Mapping[Symbol, Symbol]
) -> list[Var]:
    symbols = [v.node.symbol for v in graph.symbols if v.node.symbol is not None]
    return [tracer.symbols[renamed.get(s, s)] for s in symbols]


# --- results --------------------------------------------------------------------------


def _evaluated(
    tracer: Tracer, graph: Graph, inputs: Sequence[TracedTensor], evaluate: Evaluate
) -> list[Operand]:
    """Return the outputs of `graph` on these inputs of `tracer`.

    Raises:
        GraphError: `evaluate` returns another number of results.
        MutationError: it writes to an input or to a captured tensor.
    """
    outputs = trace_into(tracer, evaluate, (graph, inputs))
    if len(outputs) != len(graph.outputs):
        raise GraphError(
            f"graph `{graph.name}` has {len(graph.outputs)} results, and its "
            f"transformation {len(outputs)}. Let it have as many."
        )
    tensors = [*tracer.operands, *(c.tensor for c in tracer.captures.values())]
    for tensor in filter(is_written, tensors):
        raise MutationError(
            f"the transformation of graph `{graph.name}` writes to a tensor "
            f"{tensor.type} that it is given or reads from outside. Return the new "
            "value instead."
        )
    return [tracer.localize(o) if isinstance(o, Value) else o for o in outputs]


def _check_carry(op: Any, body: _Body, region: Region, arg: int, result: int) -> None:
    """Check the type of a carry.

    Raises:
        CarryTypeError: the body returns it with another type.
    """
    before, after = region.input_of(arg), region.output_of(result)
    if before is None or after is None:
        return
    old, new = region.graph.inputs[before].type, region.graph.outputs[after].type
    sizes = {a: as_size(b) for a, b in body.renamed.items()}
    expected = new.with_shape([substitute(n, sizes) for n in new.shape])
    actual = body.outputs[after].type
    name = region.graph.inputs[before].node.name
    fixed = not free_symbols(*new.shape) or same_shape(old.shape, new.shape)
    if leaves := mismatches([name], [expected], [actual], sizes=fixed):
        raise CarryTypeError(op.name, region.name, "its transformation", leaves)


# --- lifted values --------------------------------------------------------------------


def _share(tracers: Sequence[Tracer]) -> dict[int, Value]:
    """Give each body an input for each tensor that any of the bodies has lifted."""
    union: dict[int, Value] = {}
    for tracer in tracers:
        union |= {key: c.origin for key, c in tracer.captures.items()}
    for tracer in tracers:
        for origin in union.values():
            tracer.localize(origin)
    return union


def _share_symbols(bodies: Sequence[_Body]) -> list[Symbol]:
    """Give each body an input for each symbol that any of the bodies has lifted."""
    union: dict[Symbol, None] = {}
    for body in bodies:
        inputs = {x.source for x in body.inputs}
        for symbol, var in body.tracer.symbols.items():
            if var.node.section == "symbol" and var not in inputs:
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
