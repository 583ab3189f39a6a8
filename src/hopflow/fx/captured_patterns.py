"""`replace_pattern` on captured graphs, and in the bodies of their operators.

A match is replaced in place by a graph with results of the same types, so that the rest
of the graph does not change. A tensor that the replacement captures becomes an
attribute of the root graph, and a capture of each operator around the body.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hopflow.bind import Value
from hopflow.errors import ArgumentValueError, GraphError
from hopflow.fx.match import Match
from hopflow.fx.retrace import with_graph
from hopflow.fx.typed_patterns import (
    Renaming,
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
    """Replace the matches of `pattern` in the graph of `module`, at any depth."""
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
    """A pattern, its replacement, and the condition for replacing a match."""

    pattern: Callable[..., Any]
    replacement: Callable[..., Any]
    names: Sequence[str]
    where: Callable[[Match], bool]


def _attributes(graph: Graph) -> list[Var]:
    return [n.results[0] for n in graph.nodes if n.kind == "get_attr"]


@dataclass(slots=True)
class _Rewriter:
    """Apply a rule to graphs; the bodies of an operator come before the graph around
    it.

    signatures   of the operators before rewriting
    lifted       id of a graph -> the tensors that it now captures, by id, with their
                 inputs
    """

    rule: _Rule
    signatures: Mapping[Node, Signature]
    matches: list[Match] = field(default_factory=list)
    lifted: dict[int, dict[int, tuple[Value, Var]]] = field(default_factory=dict)

    def graph(self, graph: Graph, tensors: Mapping[Var, Value]) -> None:
        """Rewrite a graph and its subgraphs.

        Args:
            tensors: The vars of the graph that are known to be certain tensors.
        """
        if id(graph) in self.lifted:  # several nodes share it
            return
        lifted = self.lifted[id(graph)] = {}
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
        _GraphRewriter(self, graph, tensors, lifted).rewrite()

    def pass_on(self, graph: Graph, node: Node, signature: Signature) -> None:
        """Pass the tensors that the graphs of a node have lifted to the node."""
        union: dict[int, Value] = {}
        for region in signature.regions:
            lifted = self.lifted[id(region.graph)]
            union |= {key: tensor for key, (tensor, _) in lifted.items()}
        if not union:
            return
        for body in {id(r.graph): r.graph for r in signature.regions}.values():
            inputs = [self.lift(body, tensor) for tensor in union.values()]
            others = [v for v in body.inputs if v not in inputs]
            body.inputs = [*others, *inputs]  # in the same order in all bodies
            body.name_inputs()
        repeats = any(region.repeats for region in signature.regions)
        role: Role = "invariant" if repeats else "operand"
        node.args = (*node.args, *(self.lift(graph, t) for t in union.values()))
        roles = (*signature.args, *[role] * len(union))
        node.params = node.op.with_roles(node.params, roles, signature.results)

    def lift(self, graph: Graph, tensor: Value) -> Var:
        """Return the input of a graph for a captured tensor."""
        lifted = self.lifted.setdefault(id(graph), {})
        if id(tensor) not in lifted:
            lifted[id(tensor)] = (
                tensor,
                graph.add_input(tensor.type, "tensor0", "capture"),
            )
        return lifted[id(tensor)][1]

    def hold(self, graph: Graph) -> None:
        """Convert the tensors that the root graph has lifted to attributes."""
        names = {id(value): name for name, value in graph.attributes.items()}
        vars_ = {v.node.name: v for v in _attributes(graph)}
        graph.inputs = [v for v in graph.inputs if v.node.section != "capture"]
        taken = {*graph.attributes, *(v.node.name for v in graph.inputs)}
        captures: list[tuple[Var, str, Value]] = []
        for tensor, var in self.lifted[id(graph)].values():
            if id(tensor) in names:
                replace_uses(graph, {var: vars_[names[id(tensor)]]})
                continue
            number = next(i for i in range(len(taken) + 1) if f"tensor{i}" not in taken)
            taken.add(f"tensor{number}")
            captures.append((var, f"tensor{number}", tensor))
        hold_captures(graph, captures)


_PASSED = ("invariant", "operand")


class _GraphRewriter:
    """Apply a rule to the nodes of one graph.

    renaming   of the symbols of the graph to those of patterns
    inserted   the nodes of replacements, which are not matched again
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
        self.inserted: set[Node] = set()
        symbols: dict[Symbol, None] = {}
        for var in graph.inputs:
            symbols.update(dict.fromkeys(free_symbols(*var.type.shape)))
            if var.node.symbol is not None:
                symbols[var.node.symbol] = None
        for node in graph.nodes:
            symbols.update(dict.fromkeys(symbols_of(node)))
        self.renaming = Renaming(symbols)

    def rewrite(self) -> None:
        nodes = [node for node in self.graph.nodes if node.op is not None]
        rows = {node: [self.renaming.type(a.type) for a in node.args] for node in nodes}
        present = {kind_of_call(node.op, types) for node, types in rows.items()}
        types = [type_ for row in rows.values() for type_ in row]
        patterns = typed_patterns(self.rule.pattern, types, present)
        for pattern in patterns:
            self.check(pattern)
        removed: set[Node] = set()
        for anchor in nodes:
            if anchor in removed:
                continue
            for pattern, bindings in self.matches_from(anchor, patterns):
                if self.leaks(pattern, bindings):
                    continue
                match = self.match(pattern, bindings)
                if self.rule.where(match):
                    self.owner.matches.append(match)
                    removed |= self.replace(pattern, bindings, match)
                    break

    def check(self, pattern: TypedPattern) -> None:
        """Check the results of a pattern.

        Raises:
            ArgumentValueError: it returns a value that it does not compute.
        """
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
        """Yield the matches of the patterns whose first result is one of `anchor`:
        each a pattern, and bindings of its args to args of the graph."""
        for pattern in patterns:
            first, *others = pattern.results
            matches: list[dict[Arg, Arg]] = []
            for var in anchor.results:
                bindings: dict[Arg, Arg] = {}
                if self.matches(pattern, first, var, bindings):
                    matches.append(bindings)
            for result in others:
                values = [v for n in self.graph.nodes for v in n.results]
                candidates = [
                    (var, dict(bindings))
                    for bindings in matches
                    for var in ([bindings[result]] if result in bindings else values)
                ]
                matches = [
                    k for v, k in candidates if self.matches(pattern, result, v, k)
                ]
            for bindings in matches:
                yield pattern, bindings

    def matches(
        self,
        pattern: TypedPattern,
        pattern_arg: Arg,
        arg: Arg,
        bindings: dict[Arg, Arg],
    ) -> bool:
        """Whether `arg` matches an arg of the pattern; adds to `bindings`."""
        if isinstance(pattern_arg, Constant):
            return isinstance(arg, Constant) and equal_constants(pattern_arg, arg)
        if pattern_arg in bindings:
            bound = bindings[pattern_arg]
            if isinstance(bound, Constant) and isinstance(arg, Constant):
                return equal_constants(bound, arg)
            return bound is arg
        if not same_type(pattern_arg.type, self.renaming.type(arg.type)):
            return False
        bindings[pattern_arg] = arg
        if pattern_arg in pattern.captures:
            tensor = self.tensors.get(arg) if isinstance(arg, Var) else None
            return tensor is pattern.captures[pattern_arg]
        if pattern_arg.node.op is None:
            symbol = pattern_arg.node.symbol
            if symbol is None:
                return True
            return self.symbol_var(self.renaming.original[symbol]) is arg
        if not isinstance(arg, Var) or arg.index != pattern_arg.index:
            return False
        pattern_node, node = pattern_arg.node, arg.node
        if len(pattern_node.args) != len(node.args) or node in self.inserted:
            return False
        return equal_nodes(pattern_node, node, self.renaming.sizes) and all(
            self.matches(pattern, a, b, bindings)
            for a, b in zip(pattern_node.args, node.args, strict=True)
        )

    def symbol_var(self, symbol: Symbol) -> Var | None:
        """Return the var of the graph that has the value of a symbol, or None."""
        inputs = (var.node for var in self.graph.symbols)
        nodes = [n for n in (*inputs, *self.graph.nodes) if n.symbol is symbol]
        return nodes[0].results[0] if nodes else None

    # --- conditions ---

    def inside(self, bindings: Mapping[Arg, Arg]) -> dict[Node, None]:
        """Return the nodes of a match."""
        return {
            arg.node: None
            for pattern_arg, arg in bindings.items()
            if isinstance(pattern_arg, Var) and isinstance(arg, Var)
            if pattern_arg.node.op is not None
        }

    def leaks(self, pattern: TypedPattern, bindings: Mapping[Arg, Arg]) -> bool:
        """Whether a match cannot be replaced: another node reads a value inside of
        it, or a result before the last one is computed, or a node of it defines a
        symbol."""
        inside = self.inside(bindings)
        ends = {bindings[r] for r in pattern.results}
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

    def match(self, pattern: TypedPattern, bindings: Mapping[Arg, Arg]) -> Match:
        values = {self.rule.names[i]: bindings[v] for i, v in pattern.inputs.items()}
        ends = [v.node for r in pattern.results if isinstance(v := bindings[r], Var)]
        return Match(max(ends, key=self.graph.nodes.index), bindings, values)

    # --- replacing ---

    def replace(
        self, pattern: TypedPattern, bindings: Mapping[Arg, Arg], match: Match
    ) -> set[Node]:
        """Insert the replacement, remove the nodes of the match, and return these."""
        types = {i: bindings[v].type.strong() for i, v in pattern.inputs.items()}
        new = typed(self.rule.replacement, self.rule.names, types)
        self.check_types([bindings[r].type for r in pattern.results], new)
        passed = {new.inputs[i]: bindings[v] for i, v in pattern.inputs.items()}
        args: list[Arg] = []
        for var in new.graph.inputs:
            if var in passed:
                args.append(passed[var])
            elif var in new.captures:
                args.append(self.owner.lift(self.graph, new.captures[var]))
            else:
                args.append(self.size(var))
        sizes: dict[Symbol, Size] = {s: size_of(s) for s in self.renaming.fresh}
        old_nodes = set(self.graph.nodes)
        position = self.graph.nodes.index(match.anchor)
        outputs = inline(self.graph, position, new.graph, args, sizes)
        for node in self.graph.nodes:
            if node not in old_nodes:  # it takes the place of the match in messages
                self.inserted.add(node)
                node.line = match.anchor.line
                node.module_path = match.anchor.module_path
                node.operator_path = match.anchor.operator_path
        pairs = zip(pattern.results, outputs, strict=True)
        ends = {bindings[r]: value for r, value in pairs}
        replace_uses(self.graph, {v: x for v, x in ends.items() if isinstance(v, Var)})
        removed = set(self.inside(bindings))
        self.graph.nodes = [n for n in self.graph.nodes if n not in removed]
        return removed

    def size(self, var: Var) -> Arg:
        assert var.node.symbol is not None
        value = self.symbol_var(var.node.symbol)
        if value is None:
            raise GraphError(
                f"replace_pattern: `{name_of(self.rule.replacement)}` needs the size "
                f"`{var.node.symbol}`, which graph `{self.graph.name}` has no value of."
            )
        return value

    def check_types(self, old: Sequence[TensorType], new: TypedPattern) -> None:
        """Check the results of the replacement.

        Raises:
            ArgumentValueError: their types differ from those of the match.
        """
        new_types = [r.type for r in new.results]
        if len(old) != len(new_types) or not all(map(same_type, old, new_types)):
            rows = (", ".join(map(str, types)) for types in (old, new_types))
            old_text, new_text = (f"({row})" for row in rows)
            raise ArgumentValueError(
                f"replace_pattern: `{name_of(self.rule.pattern)}` returns {old_text} "
                f"here, and `{name_of(self.rule.replacement)}` {new_text}. Let both "
                "return the same types."
            )
