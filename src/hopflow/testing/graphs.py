"""Graphs for tests: minimal operators with subgraphs, and texts of graphs."""
# ruff: noqa: ARG002 -- rules have fixed signatures

from collections.abc import Sequence
from typing import Any

import numpy as np

from hopflow.bind import bind
from hopflow.graph.core import Graph, Node
from hopflow.graph.interpreter import Evaluate, interpret
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

    def interpret(
        self, args: Sequence[Any], params: dict[str, Any], evaluate: Evaluate
    ) -> Sequence[Any]:
        graph = params["then" if bool(args[0]) else "else_"]
        return evaluate(graph, args[1:])


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

    def interpret(
        self, args: Sequence[Any], params: dict[str, Any], evaluate: Evaluate
    ) -> Sequence[Any]:
        body, count = params["body"], params["num_carry"]
        first, last = len(body.symbols), len(args) - len(body.captures)
        symbols, captures = args[:first], args[last:]
        carry, xs = args[first : first + count], args[first + count : last]
        stacks = []
        for i in range(params["length"]):
            slices = [asarray(np.asarray(x)[i]) for x in xs]
            results = evaluate(body, [*symbols, *carry, *slices, *captures])
            carry = results[:count]
            stacks.append(results[count:])
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
def f(s0: i64, s1: i64, /, x: f32[s0, s1], p: bool, q: bool) -> f32[s0, s1]:
    def then(s0: i64, s1: i64, /, *, q: bool, x: f32[s0, s1]) -> f32[s0, s1]:
        def then(s0: i64, s1: i64, /, *, x: f32[s0, s1]) -> f32[s0, s1]:
            v0: f32[s0, s1] = sin(x)  # model.py:3
            return v0
        def else_(s0: i64, s1: i64, /, *, x: f32[s0, s1]) -> f32[s0, s1]:
            v0: f32[s0, s1] = cos(x)
            return v0
        v0: f32[s0, s1] = cond(q, s0, s1, x, then=then, else_=else_)
        return v0
    def else_(s0: i64, s1: i64, /, *, q: bool, x: f32[s0, s1]) -> f32[s0, s1]:
        return x
    v0: f32[s0, s1] = cond(p, s0, s1, q, x, then=then, else_=else_)
    return v0
"""

ALL_SORTS = """\
def f(x: f32[3], y: f64[3, 0]) -> tuple[f32[3], bool, f64]:
    w: f32[3] = get_attr("w")
    layers_0_w: f32[3] = get_attr("layers.0.w")       # net.py:12
    v0: f32[3] = add(w, x, 2.0, i32(-1), nan, f64(-inf), True, -0.0)
    check(v0, a=f32, b=f32[3], c=None, d=(1, (2.5,), ()), e="a \\"b\\"\\\\\\n\\u20ac")
    v1: tuple[f32[3], f32[3]] = pair(v0, layers_0_w)  # net.py:13
    v2: f32[3] = noise(v1[0], flag=True, size=-3, axes=(1,), x=1e-07, y=nan)
    return v2, False, f64(inf)                        # net.py:14
"""

SCAN = """\
def f(n: i64, /, c: f32[n], d: f32, xs: f32[5, n], w: f32[n]) -> f32[n]:
    def body(n: i64, /, c: f32[n], d: f32, x: f32[n], *, w: f32[n]) -> tuple[f32[n], f32, f32[n]]:
        v0: f32[n] = sin(w)
        v1: f32[n] = multiply(x, v0)
        v2: f32[n] = add(c, v1)
        v3: f32 = add(d, 1.0)
        return v2, v3, v1
    v0: tuple[f32[n], f32, f32[5, n]] = loop(n, c, d, xs, w, body=body, length=5, num_carry=2)
    return v0[0]
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
    return op.interpret(args, params, lambda g, xs: interpret(g, xs, run_nested))
