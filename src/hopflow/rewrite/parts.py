"""Division of named values into data for operators and static leaves."""

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from hopflow import pytree
from hopflow.bind import Value, current
from hopflow.errors import ControlFlowError
from hopflow.graph.types import TensorType
from hopflow.hops.subgraphs import Function, trace_body
from hopflow.ops.creation import zeros
from hopflow.ops.opdef import as_operand
from hopflow.pytree import Spec
from hopflow.rewrite.values import UNBOUND
from hopflow.symbolic.boolean import SymBool
from hopflow.symbolic.size import SymFloat, SymInt
from hopflow.trace.rollback import mark, rollback
from hopflow.trace.source import user_line
from hopflow.trace.tracer import Tracer

Named: TypeAlias = Callable[[], dict[str, Any]]


class Parts(NamedTuple):
    """Named values, divided into data (tensors and numbers) and static leaves.

    data    the values by name, with None for static leaves
    static  (name, position) -> the static leaf there
    specs   the structures by name
    """

    data: dict[str, Any]
    static: dict[tuple[str, int], Any]
    specs: dict[str, Spec]

    @staticmethod
    def of(values: dict[str, Any]) -> "Parts":
        """Divide values."""
        parts = Parts({}, {}, {})
        for name, value in values.items():
            leaves, spec = pytree.flatten(value)
            for k, leaf in enumerate(leaves):
                if not isinstance(leaf, _DATA):
                    parts.static[name, k], leaves[k] = leaf, None
            parts.specs[name] = spec
            parts.data[name] = pytree.unflatten(spec, leaves)
        return parts

    def joined(self, data: dict[str, Any]) -> dict[str, Any]:
        """Return values with other data and the same static leaves."""
        values: dict[str, Any] = {}
        for name, spec in self.specs.items():
            data_leaves = iter(pytree.flatten(data[name])[0])
            values[name] = pytree.unflatten(
                spec,
                [
                    self.static[name, k]
                    if (name, k) in self.static
                    else next(data_leaves)
                    for k in range(spec.num_leaves)
                ],
            )
        return values

    def check_same(self, other: "Parts", how: str) -> None:
        """Check that the static leaves equal those of `other`.

        Raises:
            ControlFlowError: one does not; `how` says why they are compared.
        """
        for name, k in {**self.static, **other.static}:
            leaf = self.static.get((name, k), _DATUM)
            other_leaf = other.static.get((name, k), _DATUM)
            if leaf is other_leaf or (
                type(leaf) is type(other_leaf) and bool(leaf == other_leaf)
            ):
                continue
            both = f"{leaf!r} and {other_leaf!r}"
            if UNBOUND in (leaf, other_leaf):
                raise ControlFlowError(
                    f"control_flow: `{name}` has a value in one of two cases only, and "
                    f"is used after them ({user_line()}). Assign `{name}` before."
                )
            raise ControlFlowError(
                f"control_flow: `{name}` is no tensor, and {how}: {both} "
                f"({user_line()}). Make it a tensor or a number, or leave it as it is."
            )


class _Datum:
    def __repr__(self) -> str:
        return "a tensor"


_DATUM: Final = _Datum()
_DATA: Final = (
    *(Value, np.ndarray, np.generic, bool, int, float),
    *(SymBool, SymInt, SymFloat),
)


def zeros_for(names: Sequence[str], functions: Sequence[Named]) -> dict[str, Any]:
    """Return zeros of the types that names have in the first function that binds them;
    a static value is returned itself."""
    zeros_by_name: dict[str, Any] = {}
    for f in functions:
        parts, types = dry_run(f, names)
        values = parts.joined(pytree.tree_map(zero, types))
        for name, value in values.items():
            zeros_by_name.setdefault(name, value)
    return zeros_by_name


def dry_run(
    f: Named, names: Sequence[str] | None = None
) -> tuple[Parts, dict[str, Any]]:
    """Trace `f`, roll the trace back, and return the values of these names as parts,
    with the types of their data."""
    parts: list[Parts] = []

    def data(_: Any) -> dict[str, Any]:
        values = f()
        bound = {
            name: value
            for name, value in values.items()
            if value is not UNBOUND and (names is None or name in names)
        }
        parts.append(Parts.of(bound))
        return parts[-1].data

    interpreter = current()
    marks = mark(interpreter) if isinstance(interpreter, Tracer) else []
    function = Function("f", f, (), data)
    body = trace_body("control_flow", "control_flow", function, [])
    rollback(marks)
    types: dict[str, Any] = pytree.unflatten(body.spec, body.types)
    return parts[-1], types


def unknown(value: Any) -> Any:
    """Return for a Python number one that the trace does not know, of its type."""
    if type(value) not in (bool, int, float):
        return value
    tracer = current()
    assert isinstance(tracer, Tracer)
    return tracer.operand(as_operand("control_flow", 0, value).type, "x")


def zero(type_: TensorType) -> Any:
    """Return the zero of a type; a Python number if it is weak."""
    if type_.weak and not type_.shape:
        return {"b": False, "f": 0.0}.get(type_.dtype.kind, 0)
    return zeros(type_.shape, dtype=type_.dtype)


def shown_as(
    written: Callable[..., Any], name: str, f: Callable[..., Any]
) -> Callable[..., Any]:
    """Return `f`, which errors show as the user's function `written`."""
    f.__name__ = name
    f.__wrapped__ = written  # type: ignore[attr-defined]
    return f
