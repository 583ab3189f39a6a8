"""Derivatives of operations on values, recorded once for operands of a kind.

A rule is Python that calls operations. Eager code asks the same few rules about the
same few types again and again; from the second time on, what a rule does is a row of
operations: those that make the residuals, those on tangents, and those on cotangents.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from hopflow.autograd.jvp import run_node
from hopflow.autograd.linearize import LinearTracer
from hopflow.autograd.rules import tangents
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
    """Operations in a row. Values are numbered: constants, inputs, then results."""

    constants: list[Operand]
    steps: list[tuple[Any, list[int], dict[str, Any]]]
    outputs: list[int]

    @classmethod
    def of(cls, graph: Graph, tensors: Mapping[Var, Value]) -> "_Program":
        """
        Args:
            tensors: What those inputs of the graph hold that are constant.
        """
        args = [*(a for node in graph.nodes for a in node.args), *graph.outputs]
        numbers = [a for a in args if isinstance(a, Constant)]
        inputs = [v for v in graph.inputs if v not in tensors]
        made = [v for node in graph.nodes for v in node.results]
        numbered = enumerate([*numbers, *tensors, *inputs, *made])
        places = {id(value): place for place, value in numbered}
        steps = [(n.op, [places[id(a)] for a in n.args], n.params) for n in graph.nodes]
        outputs = [places[id(a)] for a in graph.outputs]
        return cls([*numbers, *tensors.values()], steps, outputs)

    @classmethod
    def closed(cls, tracer: Tracer, outputs: Sequence[Operand]) -> "_Program":
        """All of a trace. What it captures are tensors that it has made of data."""
        graph = tracer.close(outputs)
        eliminate_dead_code(graph)
        captures = tracer.captures.values()
        return cls.of(graph, {c.input: c.origin for c in captures})

    def run(self, inputs: Sequence[Operand]) -> list[Any]:
        values = [*self.constants, *inputs]
        for op, places, params in self.steps:
            values += bind(op, [values[p] for p in places], params)
        return [values[p] for p in self.outputs]


class Recorded:
    """What the rule of an operation does for operands of certain types.

    residuals  a program of the operands that are no constants, and of the results
    pushed     a program of the residuals and the tangents that are not zero
    nonzero    which results that gives the tangents of
    types      of those tangents

    In a linear graph it stands where an operator does, in a node that takes tangents
    and has the residuals among its params, as `known`.
    """

    def __init__(
        self,
        op: OpDef,
        operands: Sequence[Operand],
        given: Sequence[Tangent],
        results: Sequence[Value],
        params: dict[str, Any],
    ) -> None:
        """
        Raises:
            HopflowError: the rule looks at values.
        """
        forward = Tracer(None, op.name)
        known = [
            o if isinstance(o, Constant) else forward.operand(o.type, "x")
            for o in operands
        ]
        outs = [forward.operand(r.type, "y") for r in results]
        linear = LinearTracer(forward, op.name, pushed=True)
        own = [t if isinstance(t, Zero) else linear.operand(t.type, "t") for t in given]
        with using(linear):
            found = tangents(op, known, own, outs, params)
        self.name = op.name
        self.nonzero = [i for i, t in enumerate(found) if not isinstance(t, Zero)]
        graph = self._graph = linear.close(_present(found))
        eliminate_dead_code(graph)
        read = read_vars(graph)
        kept = [c for c in linear.captures.values() if c.input in read]
        self._kept, self._own = [c.input for c in kept], graph.operands
        graph.inputs = [*self._kept, *self._own]
        self.types = graph.out_types
        self.pushed = _Program.of(graph, {})
        self.residuals = _Program.closed(forward, [c.origin for c in kept])
        self._pulled: dict[tuple[bool, ...], tuple[_Program, list[int]]] = {}

    def push(self, given: Sequence[Operand], known: Sequence[Value]) -> list[Value]:
        """The tangents of the results, from those that the node takes."""
        return self.pushed.run([*known, *given])

    def transpose_rule(
        self, given: Sequence[Tangent], operands: Sequence[Any], params: dict[str, Any]
    ) -> list[Tangent]:
        """The cotangents of the tangents that the node takes."""
        mask = tuple([isinstance(ct, Zero) for ct in given])
        if mask not in self._pulled:
            self._pulled[mask] = self._transposed(given)
        program, places = self._pulled[mask]
        values = program.run([*params["known"], *_present(given)])
        found: list[Tangent] = [Zero(o.type) for o in operands]
        for place, value in zip(places, values, strict=True):
            found[place] = value
        return found

    def _transposed(self, given: Sequence[Tangent]) -> tuple[_Program, list[int]]:
        """A program of the residuals and the cotangents that are not zero, and which
        operands it gives the cotangents of."""
        tracer = Tracer(None, self.name)
        origins: dict[Var, Operand] = {
            v: tracer.operand(v.type, "r") for v in self._kept
        }
        cotangents: list[Tangent] = [
            ct if isinstance(ct, Zero) else tracer.operand(t.strong(), "ct")
            for ct, t in zip(given, self.types, strict=True)
        ]
        with using(tracer):
            value = value_of_capture(origins)
            found = transpose(self._graph, self._own, value, cotangents)
        places = [i for i, ct in enumerate(found) if not isinstance(ct, Zero)]
        return _Program.closed(tracer, _present(found)), places


def _present(given: Sequence[Tangent]) -> list[Value]:
    """Those that are not zero."""
    return [t for t in given if not isinstance(t, Zero)]


# What was met before, by the operation, the types of operands and results, which of the
# tangents are zero, and the params. An entry keeps the types alive that it is found by.
# What is met for the first time is noted only: to record it costs more than to run it.
_met: Final[dict[tuple[Any, ...], tuple[list[TensorType], Recorded | None]]] = {}
_MOST: Final = 1 << 13


def _recorded(
    op: OpDef,
    operands: Sequence[Operand],
    given: Sequence[Tangent],
    results: Sequence[Value],
    params: dict[str, Any],
) -> Recorded | None:
    key: list[Any] = [op]
    for operand in (*operands, *results):
        type_ = operand.type
        if type(operand) is EagerTensor:
            key.append(id(type_))
        elif type(operand) is Constant:
            key.append((type_.dtype, type_.weak, repr(operand.value)))
        else:
            return None
    key += [type(t) is Zero for t in given]
    key += params.items()
    key += map(type, params.values())  # equal numbers may be of different kinds
    at = tuple(key)
    try:
        known = _met.get(at)
    except TypeError:  # a parameter that cannot be hashed
        return None
    if known is not None and known[1] is not None:
        return known[1]
    if len(_met) >= _MOST:
        _met.clear()
    rule = None
    if known is not None:
        try:
            rule = Recorded(op, operands, given, results, params)
        except HopflowError:  # an error of the rule is the same when it is run
            return None
    _met[at] = [v.type for v in (*operands, *results)], rule
    return rule


def run_recorded(
    op: Any,
    operands: Sequence[Operand],
    given: Sequence[Tangent],
    params: dict[str, Any],
    linear: LinearTracer | None,
) -> tuple[Sequence[Value], Sequence[Tangent]]:
    """What `run_node` gives where there is no trace below, by a recorded rule if the
    operation was met before."""
    if type(op) is not OpDef:
        return run_node(op, operands, given, params, linear)
    values = bind(op, operands, params)
    found: list[Tangent] = [Zero(v.type) for v in values]
    own = _present(given)
    if not own:
        return values, found
    rule = _recorded(op, operands, given, values, params)
    if rule is None:
        with using(linear or current()):
            return values, tangents(op, operands, given, values, params)
    inputs = [o for o in operands if type(o) is not Constant]
    known = rule.residuals.run([*inputs, *values])
    if linear is None:
        made: Sequence[Value] = rule.push(own, known)
    else:
        made = linear.derive(rule, own, known)
    for place, tangent in zip(rule.nonzero, made, strict=True):
        found[place] = tangent
    return values, found
