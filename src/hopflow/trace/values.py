"""`trace(mode="real")`: a trace that has the values of its arguments at hand."""

from collections.abc import Callable, Mapping
from math import inf
from typing import Any, Final

import numpy as np

from hopflow import dtypes
from hopflow.bind import Value, bind, using
from hopflow.graph.core import Arg, Constant, Node, SourceLine, Var, vars_of
from hopflow.graph.module import Specialization
from hopflow.graph.rewriting import effects
from hopflow.ops import elementwise
from hopflow.ops.check import check_op
from hopflow.ops.convert import as_value, astype
from hopflow.ops.messages import Message
from hopflow.symbolic.size import Size
from hopflow.tensor import EagerTensor
from hopflow.trace.functional import TracedTensor
from hopflow.trace.source import name_of, user_line
from hopflow.trace.tracer import Tracer


class ValueTracer(Tracer):
    """A tracer that computes a value when Python asks for it: `if x > 0`, `float(x)`.

    The graph then is one for this value, and checks at each run that it is the same.

    f        what is traced
    values   var -> its value, of the inputs and of what was computed so far
    asked_values   what Python was told, by the use and the line
    """

    __slots__ = ("_checked", "asked_values", "f", "values")

    def __init__(self, f: Callable[..., Any], *, allow_captures: bool) -> None:
        super().__init__(None, name_of(f), allow_captures=allow_captures)
        self.f = f
        self.values: dict[Var, Any] = {}
        self.asked_values: dict[str, Specialization] = {}
        self._checked: dict[tuple[Var, str], Node] = {}

    # --- what Python asks for ---

    def concrete(self, tensor: TracedTensor, what: str) -> Any:
        var = self.read(tensor)
        if not self._compute(var):
            return super().concrete(tensor, what)
        found = np.asarray(self.values[var])
        taken = what if what in _TAKEN else ""
        # An error may have taken a node back since.
        checks = [self._checked.get((var, kind)) for kind in {"", taken}]
        if not any(node in self.graph.nodes for node in checks):
            self._expect(tensor, found, what, user_line(2))
            self._checked[var, taken] = self.graph.nodes[-1]
        return found

    def number_of(self, tensor: TracedTensor) -> Any:
        return self.concrete(tensor, "item").item()

    def size_of(self, tensor: TracedTensor) -> Size:
        known = self.known_size(self.read(tensor))
        return int(self.concrete(tensor, "operator.index")) if known is None else known

    def symbol_of(
        self,
        value: Value,
        min: float = -inf,  # noqa: ARG002
        max: Size | float = inf,  # noqa: ARG002
    ) -> Size:
        return self.size_of(self.localize(value))

    # --- values ---

    def _compute(self, var: Var) -> bool:
        """Compute a var, and what it depends on. False: a node on the way has effects,
        which are for runs of the graph."""
        needed: set[Var] = {var}
        pending: list[Node] = []
        for node in reversed(self.graph.nodes):
            if (
                not needed.isdisjoint(node.results)
                and node.results[0] not in self.values
            ):
                pending.append(node)
                needed.update(vars_of(node.args))
        if any(effects(node) - _HARMLESS for node in pending):
            return False
        for capture in self.captures.values():
            self.values[capture.input] = capture.origin
        with using(None):
            for node in reversed(pending):
                args = [self._value(arg) for arg in node.args]
                found = bind(node.op, args, node.params)
                self.values.update(zip(node.results, found, strict=True))
        return var in self.values

    def _value(self, arg: Arg) -> Any:
        return arg if isinstance(arg, Constant) else as_value(self.values[arg])

    def _expect(
        self, tensor: TracedTensor, found: Any, what: str, line: SourceLine | None
    ) -> None:
        """Have the graph check that Python would be told the same of a tensor."""
        taken: Any = tensor
        is_whole = what not in _TAKEN
        if not is_whole:
            with using(None):
                found = np.asarray(_TAKEN[what](EagerTensor(found)))
        with using(self):
            if not is_whole:
                taken = _TAKEN[what](tensor)
            condition = self._is(taken, found, has_sign=is_whole)
            at = f" at {line}" if line else ""
            value = found if found.shape else found.item()
            shown = np.array2string(found, threshold=8, separator=", ")
            if what == "int" and abs(value) < inf:
                shown = str(value := int(value))
            message = (
                f"{name_of(self.f)}: `{what}` of {tensor.type}{at} was {shown} in the "
                "trace, which took it for a constant, and is another one. Trace again, "
                "or leave it to the run: `hf.cond`, `hf.where`, `hf.while_loop`."
            )
            bind(check_op, [condition], {"message": Message(message)})
        self.asked_values[f"{what}{at}"] = Specialization(f"{what}(...)", value, line)

    def _is(self, tensor: Any, found: Any, *, has_sign: bool) -> Any:
        """Whether a tensor has the elements that were found, each of them.

        has_sign   a zero is to have the same sign
        """
        if not found.shape and found.dtype.kind == "b":
            return tensor if found else ~tensor
        known: Any = found.item() if not found.shape else None
        if known is None or abs(known) >= 2**63:  # else it is a constant of the graph
            known = EagerTensor(found.copy())
            self.adopt(known)
        same = tensor == known
        if not tensor.type.dtype.is_float:
            return same
        if has_sign and not found.all():
            same &= elementwise.signbit(tensor) == elementwise.signbit(known)
        if np.isnan(found).any():
            return same | ((tensor != tensor) & (known != known))
        return same


def _truth(x: Any) -> Any:
    return astype(x, dtypes.bool_, copy=False)


def _whole(x: Any) -> Any:
    return elementwise.trunc(x) if x.dtype.is_float else x


# What Python takes of the elements that it asks for, where that is less than all.
_TAKEN: Final[Mapping[str, Callable[[Any], Any]]] = {
    "bool": _truth,
    "int": _whole,
}

_HARMLESS = frozenset(["trap"])
