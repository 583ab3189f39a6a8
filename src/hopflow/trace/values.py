"""`trace(mode="real")`: a trace that knows the values of its arguments."""

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
    """A tracer that computes a value when Python needs it: `if x > 0`, `float(x)`.

    The graph is specialised on this value, and checks it in each run.

    f              the traced function
    values         var -> its value, for inputs and for what was computed so far
    asked_values   the values that Python used, by the use and the line
    """

    __slots__ = ("_checked", "asked_values", "f", "values")

    def __init__(self, f: Callable[..., Any], *, allow_captures: bool) -> None:
        super().__init__(None, name_of(f), allow_captures=allow_captures)
        self.f = f
        self.values: dict[Var, Any] = {}
        self.asked_values: dict[str, Specialization] = {}
        self._checked: dict[tuple[Var, str], Node] = {}

    # --- values used by Python ---

    def concrete(self, tensor: TracedTensor, what: str) -> Any:
        var = self.read(tensor)
        if not self._compute(var):
            return super().concrete(tensor, what)
        value = np.asarray(self.values[var])
        conversion = what if what in _CONVERSIONS else ""
        # A rollback may have removed the node of a check.
        checks = [self._checked.get((var, kind)) for kind in {"", conversion}]
        if not any(node in self.graph.nodes for node in checks):
            self._expect(tensor, value, what, user_line(2))
            self._checked[var, conversion] = self.graph.nodes[-1]
        return value

    def number_of(self, tensor: TracedTensor) -> Any:
        return self.concrete(tensor, "item").item()

    def size_of(self, tensor: TracedTensor) -> Size:
        size = self.known_size(self.read(tensor))
        return int(self.concrete(tensor, "operator.index")) if size is None else size

    def symbol_of(
        self,
        value: Value,
        min: float = -inf,  # noqa: ARG002
        max: Size | float = inf,  # noqa: ARG002
    ) -> Size:
        return self.size_of(self.localize(value))

    # --- values ---

    def _compute(self, var: Var) -> bool:
        """Compute a var and its dependencies; return False if one of their nodes has
        effects, which must happen only in runs of the graph."""
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
                results = bind(node.op, args, node.params)
                self.values.update(zip(node.results, results, strict=True))
        return var in self.values

    def _value(self, arg: Arg) -> Any:
        return arg if isinstance(arg, Constant) else as_value(self.values[arg])

    def _expect(
        self, tensor: TracedTensor, expected: Any, use: str, line: SourceLine | None
    ) -> None:
        """Add a check to the graph that Python would get the same value of a tensor."""
        actual: Any = tensor
        is_exact = use not in _CONVERSIONS
        if not is_exact:
            with using(None):
                expected = np.asarray(_CONVERSIONS[use](EagerTensor(expected)))
        with using(self):
            if not is_exact:
                actual = _CONVERSIONS[use](tensor)
            condition = self._is(actual, expected, has_sign=is_exact)
            at = f" at {line}" if line else ""
            value = expected if expected.shape else expected.item()
            text = np.array2string(expected, threshold=8, separator=", ")
            if use == "int" and abs(value) < inf:
                text = str(value := int(value))
            message = (
                f"{name_of(self.f)}: `{use}` of {tensor.type}{at} was {text} in the "
                "trace, which took it for a constant, and is another one. Trace again, "
                "or leave it to the run: `hf.cond`, `hf.where`, `hf.while_loop`."
            )
            bind(check_op, [condition], {"message": Message(message)})
        self.asked_values[f"{use}{at}"] = Specialization(f"{use}(...)", value, line)

    def _is(self, tensor: Any, expected: Any, *, has_sign: bool) -> Any:
        """Return the condition that all elements of a tensor are the expected ones.

        has_sign   whether zeros must have equal signs
        """
        if not expected.shape and expected.dtype.kind == "b":
            return tensor if expected else ~tensor
        constant: Any = expected.item() if not expected.shape else None
        if (
            constant is None or abs(constant) >= 2**63
        ):  # others are constants of the graph
            constant = EagerTensor(expected.copy())
            self.adopt(constant)
        same = tensor == constant
        if not tensor.type.dtype.is_float:
            return same
        if has_sign and not expected.all():
            same &= elementwise.signbit(tensor) == elementwise.signbit(constant)
        if np.isnan(expected).any():
            return same | ((tensor != tensor) & (constant != constant))
        return same


def _truth(x: Any) -> Any:
    return astype(x, dtypes.bool_, copy=False)


def _integer(x: Any) -> Any:
    return elementwise.trunc(x) if x.dtype.is_float else x


# Conversions by Python that do not depend on the exact elements.
_CONVERSIONS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "bool": _truth,
    "int": _integer,
}

_HARMLESS = frozenset(["trap"])
