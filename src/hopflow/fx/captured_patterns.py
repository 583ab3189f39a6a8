"""`replace_pattern` on captured graphs, in the bodies of operators too.

A match is replaced in place by a graph of the same types, so that nothing else changes.
A tensor from outside that the replacement reads becomes an attribute of the root graph,
and a capture of each operator on the way to the body.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hopflow.bind import Value
from hopflow.errors import ArgumentValueError, GraphError
from hopflow.fx.match import Match
from hopflow.fx.retrace import with_graph
from hopflow.fx.typed_patterns import (
    Shadows,
    TypedPattern,
    kind_of_call,
    parameters_of,
    typed,
    typed_patterns,
)
from hopflow.graph.core import Arg, Constant, Graph, Node, Var, size_of, vars_of
from hopflow.graph.hashing import equal_constants, equal_nodes
from hopflow.graph.module import GraphModule
from hopflow.graph.regions import Role, Signature, has_regions, signature_of
from hopflow.graph.rewriting import (
    clone,
    inline,
    replace_uses,
    symbols_of,
)
from hopflow.graph.types import TensorType, same_type
from hopflow.graph.verifier import verify
from hopflow.symbolic.size import Size, Symbol, free_symbols
from hopflow.trace.captures import hold_captures
from hopflow.trace.source import name_of


def replace_in_captured(
    module: GraphModule,
    pattern: Callable[..., Any],
    replacement: Callable[..., Any],
    where: Callable[[Match], bool],
) -> list[Match]:
    """Replace what looks like `pattern` in the graph of `module`, at any depth."""
    names = parameters_of("pattern", pattern)
    others = parameters_of("replacement", replacement)
    if names != others:
        raise ArgumentValueError(
            f"replace_pattern: `{name_of(pattern)}` has the parameters {names}, and "
            f"`{name_of(replacement)}` has {others}. Let both have the same."
        )
    graph = clone(module.graph)
    operators = {n: signature_of(n) for n in graph.walk() if has_regions(n)}
    rewriter = _Rewriter(_Rule(pattern, replacement, names, where), operators)
    tensors = {v: graph.attributes[v.node.name] for v in _attributes(graph)}
    rewriter.graph(graph, tensors)
    rewriter.hold(graph)
    verify(graph)
    changed = with_graph(module, graph)
    module.graph, module.guards = changed.graph, changed.guards
    module.decided = changed.decided
    return rewriter.matches


@dataclass(frozen=True, slots=True)
class _Rule:
    """What is replaced by what."""

    pattern: Callable[..., Any]
    replacement: Callable[..., Any]
    names: Sequence[str]
    where: Callable[[Match], bool]


def _attributes(graph: Graph) -> list[Var]:
    return [n.results[0] for n in graph.nodes if n.kind == "get_attr"]


@dataclass(slots=True)
class _Rewriter:
    """Applies a rule to graphs, those of operators before what is around them.

    signatures   of the operators, as they were
    lifted   by the graph: the tensors from outside that it has come to read, by their
             identity, with the inputs that stand for them
    """

    rule: _Rule
    signatures: Mapping[Node, Signature]
    matches: list[Match] = field(default_factory=list)
    lifted: dict[int, dict[int, tuple[Value, Var]]] = field(default_factory=dict)

    def graph(self, graph: Graph, tensors: Mapping[Var, Value]) -> None:
        """Rewrite a graph and its subgraphs.

        Args:
            tensors: The tensors that vars of the graph are known to stand for.
        """
        if id(graph) in self.lifted:  # calls share it
            return
        own = self.lifted[id(graph)] = {}
        for node in list(graph.nodes):
            if not has_regions(node):
                continue
            signature = self.signatures[node]
            for region in signature.regions:
                inside = {
                    var: tensors[arg]
                    for var, port in region.ports
                    if port.role in _PASSED and port.at is not None
                    if isinstance(arg := node.args[port.at], Var) and arg in tensors
                }
                self.graph(region.graph, inside)
            self.pass_on(graph, node, signature)
        _GraphRewriter(self, graph, tensors, own).rewrite()

    def pass_on(self, graph: Graph, node: Node, signature: Signature) -> None:
        """Pass to a node what its graphs have lifted."""
        union: dict[int, Value] = {}
        for region in signature.regions:
            found = self.lifted[id(region.graph)]
            union |= {key: tensor for key, (tensor, _) in found.items()}
        if not union:
            return
        for body in {id(r.graph): r.graph for r in signature.regions}.values():
            inputs = [self.lift(body, tensor) for tensor in union.values()]
            kept = [v for v in body.inputs if v not in inputs]
            body.inputs = [*kept, *inputs]  # in the same order in each of them
            body.name_inputs()
        repeats = any(region.repeats for region in signature.regions)
        role: Role = "invariant" if repeats else "operand"
        node.args = (*node.args, *(self.lift(graph, t) for t in union.values()))
        roles = (*signature.args, *[role] * len(union))
        node.params = node.op.with_roles(node.params, roles, signature.results)

    def lift(self, graph: Graph, tensor: Value) -> Var:
        """The input of a graph that stands for a tensor from outside."""
        own = self.lifted.setdefault(id(graph), {})
        if id(tensor) not in own:
            own[id(tensor)] = tensor, graph.add_input(tensor.type, "tensor0", "capture")
        return own[id(tensor)][1]

    def hold(self, graph: Graph) -> None:
        """Turn what the root graph has lifted into attributes of it."""
        known = {id(value): name for name, value in graph.attributes.items()}
        vars_ = {v.node.name: v for v in _attributes(graph)}
        graph.inputs = [v for v in graph.inputs if v.node.section != "capture"]
        taken = {*graph.attributes, *(v.node.name for v in graph.inputs)}
        held: list[tuple[Var, str, Value]] = []
        for tensor, var in self.lifted[id(graph)].values():
            if id(tensor) in known:
                replace_uses(graph, {var: vars_[known[id(tensor)]]})
                continue
            number = next(i for i in range(len(taken) + 1) if f"tensor{i}" not in taken)
            taken.add(f"tensor{number}")
            held.append((var, f"tensor{number}", tensor))
        hold_captures(graph, held)


_PASSED = ("invariant", "operand")


class _GraphRewriter:
    """Applies a rule to the nodes of one graph.

    shadows   the types and symbols of the graph as patterns have them
    """

    def __init__(
        self,
        owner: _Rewriter,
        graph: Graph,
        tensors: Mapping[Var, Value],
        lifted: dict[int, tuple[Value, Var]],
    ) -> None:
        self.owner, self.rule, self.graph = owner, owner.rule, graph
        self.tensors = tensors
        self.lifted = lifted
        self.made: set[Node] = set()
        symbols: dict[Symbol, None] = {}
        for var in graph.inputs:
            symbols.update(dict.fromkeys(free_symbols(*var.type.shape)))
            if var.node.symbol is not None:
                symbols[var.node.symbol] = None
        for node in graph.nodes:
            symbols.update(dict.fromkeys(symbols_of(node)))
        self.shadows = Shadows(symbols)

    def rewrite(self) -> None:
        nodes = [node for node in self.graph.nodes if node.op is not None]
        rows = {node: [self.shadows.type(a.type) for a in node.args] for node in nodes}
        present = {kind_of_call(node.op, types) for node, types in rows.items()}
        types = [type_ for row in rows.values() for type_ in row]
        patterns = typed_patterns(self.rule.pattern, types, present)
        for pattern in patterns:
            self.check(pattern)
        gone: set[Node] = set()
        for anchor in nodes:
            if anchor in gone:
                continue
            for pattern, found in self.matches_from(anchor, patterns):
                if self.leaks(pattern, found):
                    continue
                match = self.match(pattern, found)
                if self.rule.where(match):
                    self.owner.matches.append(match)
                    gone |= self.replace(pattern, found, match)
                    break

    def check(self, pattern: TypedPattern) -> None:
        """Raises: ArgumentValueError: a pattern returns what it does not compute."""
        for result in pattern.results or (None,):
            if not isinstance(result, Var) or result.node.op is None:
                raise ArgumentValueError(
                    f"replace_pattern: `{name_of(self.rule.pattern)}` must return "
                    f"values that it computes, and returns {result!r}."
                )

    # --- matching ---

    def matches_from(
        self, anchor: Node, patterns: Sequence[TypedPattern]
    ) -> Iterator[tuple[TypedPattern, dict[Arg, Arg]]]:
        """The ways in which the results of a pattern are values of the graph, the first
        of them one of `anchor`."""
        for pattern in patterns:
            first, *others = pattern.results
            found: list[dict[Arg, Arg]] = []
            for var in anchor.results:
                known: dict[Arg, Arg] = {}
                if self.matches(pattern, first, var, known):
                    found.append(known)
            for result in others:
                everything = [v for n in self.graph.nodes for v in n.results]
                tried = [
                    (var, dict(known))
                    for known in found
                    for var in ([known[result]] if result in known else everything)
                ]
                found = [k for v, k in tried if self.matches(pattern, result, v, k)]
            for known in found:
                yield pattern, known

    def matches(
        self, pattern: TypedPattern, theirs: Arg, ours: Arg, known: dict[Arg, Arg]
    ) -> bool:
        """Whether a value looks like one of the pattern; what is learned joins
        `known`."""
        if isinstance(theirs, Constant):
            return isinstance(ours, Constant) and equal_constants(theirs, ours)
        if theirs in known:
            before = known[theirs]
            if isinstance(before, Constant) and isinstance(ours, Constant):
                return equal_constants(before, ours)
            return before is ours
        if not same_type(theirs.type, self.shadows.type(ours.type)):
            return False
        known[theirs] = ours
        if theirs in pattern.captures:
            tensor = self.tensors.get(ours) if isinstance(ours, Var) else None
            return tensor is pattern.captures[theirs]
        if theirs.node.op is None:
            symbol = theirs.node.symbol
            if symbol is None:
                return True
            return self.symbol_var(self.shadows.unshadowed[symbol]) is ours
        if not isinstance(ours, Var) or ours.index != theirs.index:
            return False
        node, other = theirs.node, ours.node
        if len(node.args) != len(other.args) or other in self.made:
            return False
        return equal_nodes(node, other, self.shadows.sizes) and all(
            self.matches(pattern, a, b, known)
            for a, b in zip(node.args, other.args, strict=True)
        )

    def symbol_var(self, symbol: Symbol) -> Var | None:
        """The var of the graph that holds the value of a symbol."""
        inputs = (var.node for var in self.graph.symbols)
        nodes = [n for n in (*inputs, *self.graph.nodes) if n.symbol is symbol]
        return nodes[0].results[0] if nodes else None

    # --- what may be replaced ---

    def inside(self, found: Mapping[Arg, Arg]) -> dict[Node, None]:
        """The nodes that a match is made of."""
        return {
            ours.node: None
            for theirs, ours in found.items()
            if isinstance(theirs, Var) and isinstance(ours, Var)
            if theirs.node.op is not None
        }

    def leaks(self, pattern: TypedPattern, found: Mapping[Arg, Arg]) -> bool:
        """Whether something else reads what is inside a match, or a result of it before
        the last, or its sizes are those of other values."""
        inside = self.inside(found)
        ends = {found[r] for r in pattern.results}
        if any(node.symbol is not None for node in inside):
            return True
        last = max(self.graph.nodes.index(node) for node in inside)
        inner = {v for node in inside for v in node.results if v not in ends}
        if not inner.isdisjoint(vars_of(self.graph.outputs)):
            return True
        for i, node in enumerate(self.graph.nodes):
            if node not in inside:
                read = set(vars_of(node.args))
                if read & inner or (i < last and read & ends):
                    return True
        return False

    def match(self, pattern: TypedPattern, found: Mapping[Arg, Arg]) -> Match:
        values = {self.rule.names[i]: found[v] for i, v in pattern.inputs.items()}
        ends = [v.node for r in pattern.results if isinstance(v := found[r], Var)]
        return Match(max(ends, key=self.graph.nodes.index), found, values)

    # --- replacing ---

    def replace(
        self, pattern: TypedPattern, found: Mapping[Arg, Arg], match: Match
    ) -> set[Node]:
        """Put the replacement in, and take out the nodes of the match: these."""
        types = {i: found[v].type.strong() for i, v in pattern.inputs.items()}
        new = typed(self.rule.replacement, self.rule.names, types)
        self.check_types([found[r].type for r in pattern.results], new)
        given = {new.inputs[i]: found[v] for i, v in pattern.inputs.items()}
        args: list[Arg] = []
        for var in new.graph.inputs:
            if var in given:
                args.append(given[var])
            elif var in new.captures:
                args.append(self.owner.lift(self.graph, new.captures[var]))
            else:
                args.append(self.size(var))
        sizes: dict[Symbol, Size] = {s: size_of(s) for s in self.shadows.shadows}
        before = set(self.graph.nodes)
        at = self.graph.nodes.index(match.anchor)
        outputs = inline(self.graph, at, new.graph, args, sizes)
        for node in self.graph.nodes:
            if node not in before:  # it is there for the line that was matched
                self.made.add(node)
                node.line = match.anchor.line
                node.module_path = match.anchor.module_path
                node.operator_path = match.anchor.operator_path
        pairs = zip(pattern.results, outputs, strict=True)
        ends = {found[r]: value for r, value in pairs}
        replace_uses(self.graph, {v: x for v, x in ends.items() if isinstance(v, Var)})
        gone = set(self.inside(found))
        self.graph.nodes = [n for n in self.graph.nodes if n not in gone]
        return gone

    def size(self, var: Var) -> Arg:
        assert var.node.symbol is not None
        found = self.symbol_var(var.node.symbol)
        if found is None:
            raise GraphError(
                f"replace_pattern: `{name_of(self.rule.replacement)}` needs the size "
                f"`{var.node.symbol}`, which graph `{self.graph.name}` has no value of."
            )
        return found

    def check_types(self, old: Sequence[TensorType], new: TypedPattern) -> None:
        """Raises: ArgumentValueError: the replacement has results of other types."""
        found = [r.type for r in new.results]
        if len(old) != len(found) or not all(map(same_type, old, found)):
            rows = (", ".join(map(str, types)) for types in (old, found))
            before, after = (f"({row})" for row in rows)
            raise ArgumentValueError(
                f"replace_pattern: `{name_of(self.rule.pattern)}` returns {before} "
                f"here, and `{name_of(self.rule.replacement)}` {after}. Let both "
                "return the same types."
            )
