"""Graphs for tests: minimal operators with subgraphs, and texts of graphs."""
# ruff: noqa: ARG002 -- rules have fixed signatures

from collections.abc import Sequence
from typing import Any

import numpy as np

from hopflow.bind import bind
from hopflow.graph.core import Graph, Node, Var, map_graphs
from hopflow.graph.interpreter import interpret
from hopflow.graph.parser import parse
from hopflow.graph.regions import (
    Port,
    Region,
    Role,
    Signature,
    roles,
)
from hopflow.graph.types import TensorType
from hopflow.ops import creation, elementwise, item, reduce, views  # noqa: F401
from hopflow.ops.opdef import OPERATIONS
from hopflow.symbolic.size import symbol
from hopflow.tensor import asarray


class Cond:
    """`cond(pred, *symbols, *operands, *captures; then, else_)`"""

    name = "cond"
    effects: frozenset[str] = frozenset()

    def result_types(
        self, types: Sequence[TensorType], params: dict[str, Any]
    ) -> tuple[TensorType, ...]:
        out_types: tuple[TensorType, ...] = params["then"].out_types
        return out_types

    def signature(self, node: Node) -> Signature:
        graphs = (node.params["then"], node.params["else_"])
        symbols, results = len(graphs[0].symbols), len(graphs[0].outputs)
        arg_roles = roles(
            ("symbol", symbols), ("operand", len(graphs[0].inputs) - symbols)
        )
        inputs = tuple(Port(r, i) for i, r in enumerate(arg_roles, start=1))
        outputs = tuple(Port("result", i) for i in range(results))
        regions = tuple(
            Region(name, graph, inputs, outputs, "at most once")
            for name, graph in zip(("then", "else_"), graphs, strict=True)
        )
        return Signature(("predicate", *arg_roles), roles(("result", results)), regions)

    def with_roles(
        self, params: dict[str, Any], args: Sequence[Role], results: Sequence[Role]
    ) -> dict[str, Any]:
        return params

    def format_sections(self, node: Node) -> list[tuple[Any, ...]]:
        end = 1 + len(node.params["then"].symbols)
        return [node.args[:1], node.args[1:end], node.args[end:]]

    def debug(self, pred: Any, *operands: Any, then: Any, else_: Any) -> Any:
        return then(*operands) if bool(pred) else else_(*operands)


class Loop:
    """`loop(*symbols, *carry, *xs, *captures; body, length, num_carry)`: a scan."""

    name = "loop"
    effects: frozenset[str] = frozenset()

    def result_types(
        self, types: Sequence[TensorType], params: dict[str, Any]
    ) -> tuple[TensorType, ...]:
        outs, n = params["body"].out_types, params["num_carry"]
        stacked = [t.with_shape((params["length"], *t.shape)) for t in outs[n:]]
        return (*outs[:n], *stacked)

    def signature(self, node: Node) -> Signature:
        body, n = node.params["body"], node.params["num_carry"]
        symbols, captures = len(body.symbols), len(body.captures)
        args = roles(
            ("symbol", symbols),
            ("carry", n),
            ("slice", len(node.args) - symbols - n - captures),
            ("invariant", captures),
        )
        results = roles(("carry", n), ("stacked", len(node.results) - n))
        region = Region(
            "body",
            body,
            tuple(Port(r, i) for i, r in enumerate(args)),
            tuple(Port(r, i) for i, r in enumerate(results)),
            "any times",
        )
        return Signature(args, results, (region,))

    def with_roles(
        self, params: dict[str, Any], args: Sequence[Role], results: Sequence[Role]
    ) -> dict[str, Any]:
        return {**params, "num_carry": list(args).count("carry")}

    def debug(self, *args: Any, body: Any, length: Any, num_carry: int) -> Any:
        carry, xs = args[:num_carry], args[num_carry:]
        stacks = []
        for i in range(length):
            slices = [asarray(np.asarray(x)[i]) for x in xs]
            results = body(*carry, *slices)
            carry = results[:num_carry]
            stacks.append(results[num_carry:])
        ys = [
            asarray(np.stack([np.asarray(y) for y in c]))
            for c in zip(*stacks, strict=True)
        ]
        return (*carry, *ys)


class Op:
    """An operation whose results have the types of its first operands."""

    def __init__(self, name: str, outputs: int = 1, *effects: str) -> None:
        self.name = name
        self.outputs = outputs
        self.effects = frozenset(effects)

    def result_types(
        self, types: Sequence[TensorType], params: dict[str, Any]
    ) -> tuple[TensorType, ...]:
        return tuple(types[: self.outputs])


class Compress:
    """An operation whose result has an unbacked size."""

    name = "compress"
    effects: frozenset[str] = frozenset()

    def result_types(
        self, types: Sequence[TensorType], params: dict[str, Any]
    ) -> tuple[TensorType, ...]:
        return (types[0].with_shape((symbol("n"),)),)


OPERATORS: dict[str, Any] = {
    **OPERATIONS,
    "cond": Cond(),
    "loop": Loop(),
    "compress": Compress(),
    "noise": Op("noise", 1, "random"),
    "pair": Op("pair", 2),
    "check": Op("check", 0, "trap"),
}

NESTED = """\
graph f(s0: i64[], s1: i64[], /, x: f32[s0, s1], p: bool[], q: bool[]) -> f32[s0, s1]:
    graph then(s0: i64[], s1: i64[], /, *, q: bool[], x: f32[s0, s1]) -> f32[s0, s1]:
        graph then(s0: i64[], s1: i64[], /, *, x: f32[s0, s1]) -> f32[s0, s1]:
            %0: f32[s0, s1] = sin(x)  # model.py:3
            return %0
        graph else(s0: i64[], s1: i64[], /, *, x: f32[s0, s1]) -> f32[s0, s1]:
            %0: f32[s0, s1] = cos(x)
            return %0
        %0: f32[s0, s1] = cond(q; s0, s1; x; then=then, else=else)
        return %0
    graph else(s0: i64[], s1: i64[], /, *, q: bool[], x: f32[s0, s1]) -> f32[s0, s1]:
        return x
    %0: f32[s0, s1] = cond(p; s0, s1; q, x; then=then, else=else)
    return %0
"""

ALL_SORTS = """\
graph f(x: f32[3], y: f64[3, 0]) -> (f32[3], bool[], f64[]):
    %w: f32[3] = get_attr("w")
    %layers_0_w: f32[3] = get_attr("layers.0.w")    # net.py:12
    %0: f32[3] = add(%w, x, 2.0, -1:i32, nan, -inf:f64, True, -0.0)
    check(%0, a=f32, b=f32[3], c=None, d=(1, (2.5,), ()), e="a \\"b\\"\\\\\\n\\u20ac")
    %1: f32[3], %2: f32[3] = pair(%0, %layers_0_w)  # net.py:13
    %3: f32[3] = noise(%1, flag=True, size=-3, axes=(1,), x=1e-07, y=nan)
    return %3, False, inf:f64                       # net.py:14
"""

SCAN = """\
graph f(n: i64[], /, c: f32[n], d: f32[], xs: f32[5, n], w: f32[n]) -> f32[n]:
    graph body(n: i64[], /, c: f32[n], d: f32[], x: f32[n], *, w: f32[n]) -> (f32[n], f32[], f32[n]):
        %0: f32[n] = sin(w)
        %1: f32[n] = multiply(x, %0)
        %2: f32[n] = add(c, %1)
        %3: f32[] = add(d, 1.0)
        return %2, %3, %1
    %0: f32[n], %1: f32[], %2: f32[5, n] = loop(n, c, d, xs, w; body=body, length=5, num_carry=2)
    return %0
"""  # noqa: E501


def read(text: str) -> Graph:
    return parse(text, OPERATORS)


def arrays(results: Sequence[Any]) -> list[Any]:
    return [np.asarray(r) for r in results]


X = np.arange(6, dtype=np.float32).reshape(2, 3)


def scan_args() -> list[Any]:
    values = (np.ones(3), np.float64(0), np.arange(15.0).reshape(5, 3), np.ones(3))
    return [3, *(asarray(np.asarray(v, np.float32)) for v in values)]


def run_nested(op: Any, args: Sequence[Any], params: dict[str, Any]) -> Any:
    """Evaluate a node like `bind`, and the operators of this file by `debug`."""
    if not isinstance(op, Cond | Loop):
        return bind(op, args, params)
    node = Node("call_function", op, tuple(args), params)
    types = op.result_types([], params)
    node.results = tuple(Var(node, i, t) for i, t in enumerate(types))
    signature = op.signature(node)

    def function(graph: Graph) -> Any:
        [region] = [r for r in signature.regions if r.graph is graph]

        def call(*operands: Any) -> Any:
            remaining = iter(operands)
            inputs = [
                args[p.at]
                if p.at is not None and (v.node.section != "operand")
                else next(remaining)
                for v, p in zip(graph.inputs, region.inputs, strict=True)
            ]
            return interpret(graph, inputs, run_nested)

        return call

    sections = zip(args, signature.args, strict=True)
    end = len(args) - len(signature.regions[0].graph.captures)
    operands = [a for i, (a, r) in enumerate(sections) if r != "symbol" and i < end]
    return op.debug(*operands, **map_graphs(params, function))
