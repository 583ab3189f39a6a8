"""What `cond` and `switch` share: functions of the same operands, one of which runs."""

from collections.abc import Sequence
from typing import Any

from hopflow import dtypes, pytree
from hopflow.bind import bind
from hopflow.errors import BranchTypeError, StructureError
from hopflow.graph.core import Graph
from hopflow.graph.types import TensorType
from hopflow.hops.base import (
    Body,
    Call,
    Function,
    HigherOrderOp,
    Recorder,
    Written,
    as_value,
    cast_output,
    close_bodies,
    commit,
    flatten_operands,
    mismatches,
    present_value,
    require_callable,
    share_captures,
    trace_body,
    written_inputs,
)
from hopflow.trace.functional import TracedTensor


class Branching(HigherOrderOp):
    """An operator that runs one of several branches on the same operands."""

    lead = 1

    def prepare_branches(
        self, selector: Any, branches: dict[str, tuple[str, Any]], operands: Any
    ) -> Call:
        """A call whose functions are called as `fn(*operands)`.

        Args:
            branches: For each param its role (the argument's name) and the function.
        """
        for role, fn in branches.values():
            require_callable(self.name, role, fn)
        flat, spec = flatten_operands(self.name, "operands", operands)
        names = [f"x{i}" for i in range(len(flat))]
        is_spread = type(operands) is tuple

        def caller(fn: Any) -> Any:
            def call(leaves: Sequence[Any]) -> Any:
                tree = pytree.unflatten(spec, leaves)
                return fn(*tree) if is_spread else fn(tree)

            return call

        functions = {
            key: Function(role, fn, names, caller(fn))
            for key, (role, fn) in branches.items()
        }
        return Call([selector], flat, functions)

    def run_debug(self, call: Call) -> Any:
        recorders = {k: Recorder(self.name, f) for k, f in call.functions.items()}
        operands = [as_value(o) for o in call.operands]
        results = self.debug(*call.lead, *operands, **self.pack(recorders))
        [spec] = [r.spec for r in recorders.values() if r.spec is not None]
        return pytree.unflatten(spec, results)

    def pack(self, functions: dict[str, Any]) -> dict[str, Any]:
        """Functions or graphs by their `Call` name as the params of a node."""
        return functions

    def trace(self, call: Call) -> Any:
        types = [o.type for o in call.operands]
        bodies = [trace_body(self.name, f, types) for f in call.functions.values()]
        self.unify(bodies)
        spec, count = bodies[0].spec, len(bodies[0].outputs)
        written = self.functionalize(bodies)
        targets = [bodies[0].tracer.captures[k].origin for k in written.captures]
        closed = close_bodies(bodies)
        graphs = dict(zip(call.functions, closed.graphs, strict=True))
        args = [*call.lead, *closed.symbols, *call.operands, *closed.captures]
        results = bind(self, args, self.pack(graphs))
        commit([*targets, *(call.operands[i] for i in written.operands)], results[count:])
        return pytree.unflatten(spec, results[:count])

    def unify(self, bodies: Sequence[Body]) -> None:
        """Make all bodies return the same types, weak dtypes giving way.

        Raises:
            StructureError, BranchTypeError: they differ beyond that.
        """
        first = bodies[0]
        for other in bodies[1:]:
            if other.spec != first.spec:
                raise StructureError(
                    f"{self.name}: `{first.role}` ({first.where}) and `{other.role}` "
                    f"({other.where}) must return the same structure.\n"
                    f"  {first.role}: {first.spec}\n  {other.role}: {other.spec}"
                )
        for i in range(len(first.outputs)):
            types = [b.outputs[i].type for b in bodies]
            dtype, weak = _common_dtype(types)
            if dtype is not None:
                for body in bodies:
                    cast_output(body, i, dtype, weak=weak)
        paths = pytree.leaf_paths(first.spec, "result")
        for other in bodies[1:]:
            if leaves := mismatches(paths, first.types, other.types):
                raise BranchTypeError(
                    self.name,
                    f"`{first.role}` ({first.where})",
                    f"`{other.role}` ({other.where})",
                    leaves,
                )

    def functionalize(self, bodies: Sequence[Body]) -> Written:
        """A write in one branch is a result of all: the others return the old value."""
        written = written_inputs(bodies)
        if written.captures:
            share_captures(bodies)
        for body in bodies:
            body.outputs += [present_value(body, k) for k in written.captures]
            tracer = body.tracer
            body.outputs += [
                TracedTensor(tracer, tracer.read(tracer.operands[i]))
                for i in written.operands
            ]
        return written

    def branch_types(self, branches: Sequence[Graph]) -> tuple[TensorType, ...]:
        """The results' types, which all branches of a node must return.

        Raises:
            BranchTypeError: they do not.
        """
        first = branches[0]
        paths = [f"result[{i}]" for i in range(len(first.out_types))]
        for other in branches[1:]:
            if len(first.out_types) != len(other.out_types):
                raise StructureError(
                    f"{self.name}: graphs `{first.name}` and `{other.name}` must return "
                    f"as many results, and return {len(first.out_types)} and "
                    f"{len(other.out_types)}."
                )
            if leaves := mismatches(paths, first.out_types, other.out_types):
                raise BranchTypeError(
                    self.name, f"`{first.name}`", f"`{other.name}`", leaves
                )
        return first.out_types


def _common_dtype(types: Sequence[TensorType]) -> tuple[dtypes.DType | None, bool]:
    """The dtype that weak results take beside the others; None if strong ones differ."""
    strong = {t.dtype for t in types if not t.weak}
    dtype, weak = dtypes.promote(*((t.dtype, t.weak) for t in types))
    return (dtype if strong <= {dtype} else None), weak
