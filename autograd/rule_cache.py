"""Derivatives of operations on eager values, recorded once for each kind of operands.

A rule is Python code that calls operations. Eager code applies few rules to few types
many times. From the second time on, a rule is replayed as three flat programs: one that
computes the residuals, one for tangents, and one for cotangents.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from hopflow.autograd.jvp import run_node
from hopflow.autograd.linearize import LinearTracer
from hopflow.autograd.rules import apply_jvp
from hopflow.autograd.transpose import transpose, value_of_capture
from hopflow.bind import Operand, Value, bind, current, using
from hopflow.errors import HopflowError
from hopflow.graph.core import Constant, Graph, Var
from hopflow.graph.rewriting import eliminate_dead_code, read_vars
from hopflow.graph.types import TensorType
from hopflow.ops.opdef import OpDef
from hopflow.tensor import EagerTensor
from hopflow.trace.tracer import Tracer
from hopflow.zeros import Tangent, Zero


class _Program(NamedTuple):
    """Operations whose values are numbered: constants, inputs, then results."""

    constants: list[Operand]
    steps: list[tuple[Any, list[int], dict[str, Any]]]
    outputs: list[int]

    @classmethod
    def of(cls, graph: Graph, tensors: Mapping[Var, Value]) -> "_Program":
        """Return the program of a graph.

        Args:
            tensors: The values of the graph's inputs that are constant.
        """
        args = [*(a for node in graph.nodes for a in node.args), *graph.outputs]
        numbers = [a for a in args if isinstance(a, Constant)]
        inputs = [v for v in graph.inputs if v not in tensors]
        results = [v for node in graph.nodes for v in node.results]
        numbered = enumerate([*numbers, *tensors, *inputs, *results])
        positions = {id(value): position for position, value in numbered}
        steps = [
            (n.op, [positions[id(a)] for a in n.args], n.params) for n in graph.nodes
        ]
        outputs = [positions[id(a)] for a in graph.outputs]
        return cls([*numbers, *tensors.values()], steps, outputs)

    @classmethod
    def closed(cls, tracer: Tracer, outputs: Sequence[Operand]) -> "_Program":
        """Return the program of a trace, whose captures are tensors made from data."""
        graph = tracer.close(outputs)
        eliminate_dead_code(graph)
        captures = tracer.captures.values()
        return cls.of(graph, {c.input: c.origin for c in captures})

    def run(self, inputs: Sequence[Operand]) -> list[Any]:
        values = [*self.constants, *inputs]
        for op, positions, params in self.steps:
            values += bind(op, [values[p] for p in positions], params)
        return [values[p] for p in self.outputs]


class Recorded:
    """What the rule of an operation does for operands of certain types.

    residuals  a program of the operands that are no constants, and of the results
    pushed     a program of the residuals and the tangents that are not zero
    nonzero    the results whose tangents `pushed` returns
    types      the types of those tangents

    In a linear graph it stands as the operator of a node that takes tangents and has
    the residuals among its params.
    """

    def __init__(
        self,
        op: OpDef,
        operands: Sequence[Operand],
        tangents: Sequence[Tangent],
        results: Sequence[Value],
        params: dict[str, Any],
    ) -> None:
        """Record the rule.

        Raises:
            HopflowError: the rule reads values, which differ from call to call.
        """
        forward = Tracer(None, op.name)
        inputs = [
            o if isinstance(o, Constant) else forward.operand(o.type, "x")
            for o in operands
        ]
        outputs = [forward.operand(r.type, "y") for r in results]
        linear = LinearTracer(forward, op.name, pushed=True)
        linear_inputs = [
            t if isinstance(t, Zero) else linear.operand(t.type, "t") for t in tangents
        ]
        with using(linear):
            out_tangents = apply_jvp(op, inputs, linear_inputs, outputs, params)
        self.name = op.name
        self.nonzero = [
            i for i, t in enumerate(out_tangents) if not isinstance(t, Zero)
        ]
        graph = self._graph = linear.close(_nonzero(out_tangents))
        eliminate_dead_code(graph)
        read_inputs = read_vars(graph)
        captures = [c for c in linear.captures.values() if c.input in read_inputs]
        self._captured, self._linear = (
            [c.input for c in captures],
            graph.operands,
        )
        graph.inputs = [*self._captured, *self._linear]
        self.types = graph.out_types
        self.pushed = _Program.of(graph, {})
        self.residuals = _Program.closed(forward, [c.origin for c in captures])
        self._transposes: dict[tuple[bool, ...], tuple[_Program, list[int]]] = {}

    def push(
        self, tangents: Sequence[Operand], residuals: Sequence[Value]
    ) -> list[Value]:
        """Return the tangents of the results from the tangents that the node takes."""
        return self.pushed.run([*residuals, *tangents])

    def transpose_rule(
        self,
        cotangents: Sequence[Tangent],
        operands: Sequence[Any],
        params: dict[str, Any],
    ) -> list[Tangent]:
        """Return the cotangents of the tangents that the node takes."""
        mask = tuple([isinstance(ct, Zero) for ct in cotangents])
        if mask not in self._transposes:
            self._transposes[mask] = self._transposed(cotangents)
        program, positions = self._transposes[mask]
        values = program.run([*params["residuals"], *_nonzero(cotangents)])
        in_cotangents: list[Tangent] = [Zero(o.type) for o in operands]
        for position, value in zip(positions, values, strict=True):
            in_cotangents[position] = value
        return in_cotangents

    def _transposed(self, cotangents: Sequence[Tangent]) -> tuple[_Program, list[int]]:
        """Return a program of the residuals and the cotangents that are not zero,
        and the operands whose cotangents it returns."""
        tracer = Tracer(None, self.name)
        origins: dict[Var, Operand] = {
            v: tracer.operand(v.type, "r") for v in self._captured
        }
        inputs: list[Tangent] = [
            ct if isinstance(ct, Zero) else tracer.operand(t.strong(), "ct")
            for ct, t in zip(cotangents, self.types, strict=True)
        ]
        with using(tracer):
            value = value_of_capture(origins)
            in_cotangents = transpose(self._graph, self._linear, value, inputs)
        positions = [
            i for i, ct in enumerate(in_cotangents) if not isinstance(ct, Zero)
        ]
        return _Program.closed(tracer, _nonzero(in_cotangents)), positions


def _nonzero(tangents: Sequence[Tangent]) -> list[Value]:
    """Return the tangents that are not zero."""
    return [t for t in tangents if not isinstance(t, Zero)]


# The memo table of rules. A key holds the operation, the identities of the types of the
# operands and results, which tangents are zero, and the params; the entry keeps those
# types alive. At the first call the entry has no rule yet: recording costs more than
# running once.
_memo: Final[dict[tuple[Any, ...], tuple[list[TensorType], Recorded | None]]] = {}
_MEMO_SIZE: Final = 1 << 13


def _recorded(
    op: OpDef,
    operands: Sequence[Operand],
    tangents: Sequence[Tangent],
    results: Sequence[Value],
    params: dict[str, Any],
) -> Recorded | None:
    """Return the recorded rule; None at the first call, or if it reads values."""
    parts: list[Any] = [op]
    for operand in (*operands, *results):
        type_ = operand.type
        if type(operand) is EagerTensor:
            parts.append(id(type_))
        elif type(operand) is Constant:
            parts.append((type_.dtype, type_.weak, repr(operand.value)))
        else:
            return None
    parts += [type(t) is Zero for t in tangents]
    parts += params.items()
    parts += map(type, params.values())  # 1 == 1.0 == True
    key = tuple(parts)
    try:
        entry = _memo.get(key)
    except TypeError:  # a param is not hashable
        return None
    if entry is not None and entry[1] is not None:
        return entry[1]
    if len(_memo) >= _MEMO_SIZE:
        _memo.clear()
    rule = None
    if entry is not None:
        try:
            rule = Recorded(op, operands, tangents, results, params)
        except HopflowError:  # running the rule raises a user's error again
            return None
    _memo[key] = [v.type for v in (*operands, *results)], rule
    return rule


def run_recorded(
    op: Any,
    operands: Sequence[Operand],
    in_tangents: Sequence[Tangent],
    params: dict[str, Any],
    linear: LinearTracer | None,
) -> tuple[Sequence[Value], Sequence[Tangent]]:
    """Return what `run_node` does, at the top of the interpreter stack. It replays
    the recorded rule if the operation was called on such operands before."""
    if type(op) is not OpDef:
        return run_node(op, operands, in_tangents, params, linear)
    values = bind(op, operands, params)
    out_tangents: list[Tangent] = [Zero(v.type) for v in values]
    nonzero_tangents = _nonzero(in_tangents)
    if not nonzero_tangents:
        return values, out_tangents
    rule = _recorded(op, operands, in_tangents, values, params)
    if rule is None:
        with using(linear or current()):
            return values, apply_jvp(op, operands, in_tangents, values, params)
    inputs = [o for o in operands if type(o) is not Constant]
    residuals = rule.residuals.run([*inputs, *values])
    if linear is None:
        derived: Sequence[Value] = rule.push(nonzero_tangents, residuals)
    else:
        derived = linear.derive(rule, nonzero_tangents, residuals)
    for position, tangent in zip(rule.nonzero, derived, strict=True):
        out_tangents[position] = tangent
    return values, out_tangents
