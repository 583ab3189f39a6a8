"""Values by name, as operators take them: tensors and numbers apart from the rest."""

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np

from hopflow import pytree
from hopflow.bind import Value, current
from hopflow.errors import ControlFlowError
from hopflow.graph.types import TensorType
from hopflow.hops.subgraphs import Function, trace_body
from hopflow.ops.creation import zeros
from hopflow.pytree import Spec
from hopflow.rewrite.values import UNBOUND
from hopflow.symbolic.boolean import SymBool
from hopflow.symbolic.size import SymFloat, SymInt
from hopflow.trace.rollback import mark, rollback
from hopflow.trace.source import user_line
from hopflow.trace.tracer import Tracer

Named: TypeAlias = Callable[[], dict[str, Any]]


class Parts(NamedTuple):
    """Values by name, apart: tensors and numbers, which operators take, and the rest.

    data    the values, with None for each leaf of the rest
    rest    by name and position, the leaves that are neither tensor nor number
    specs   by name
    """

    data: dict[str, Any]
    rest: dict[tuple[str, int], Any]
    specs: dict[str, Spec]

    @staticmethod
    def of(values: dict[str, Any]) -> "Parts":
        found = Parts({}, {}, {})
        for name, value in values.items():
            leaves, spec = pytree.flatten(value)
            for k, leaf in enumerate(leaves):
                if not isinstance(leaf, _DATA):
                    found.rest[name, k], leaves[k] = leaf, None
            found.specs[name] = spec
            found.data[name] = pytree.unflatten(spec, leaves)
        return found

    def joined(self, data: dict[str, Any]) -> dict[str, Any]:
        """Values as `of` took them apart, with other data."""
        found: dict[str, Any] = {}
        for name, spec in self.specs.items():
            own = iter(pytree.flatten(data[name])[0])
            found[name] = pytree.unflatten(
                spec,
                [
                    self.rest[name, k] if (name, k) in self.rest else next(own)
                    for k in range(spec.num_leaves)
                ],
            )
        return found

    def check_same(self, other: "Parts", how: str) -> None:
        """Raises: ControlFlowError: a leaf of the rest is not the same in `other`."""
        for name, k in {**self.rest, **other.rest}:
            here = self.rest.get((name, k), _DATUM)
            there = other.rest.get((name, k), _DATUM)
            if here is there or (type(here) is type(there) and bool(here == there)):
                continue
            both = f"{here!r} and {there!r}"
            if UNBOUND in (here, there):
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
    """Zeros of the types that names have in the first of these that gives them any;
    for what is neither tensor nor number, what it is."""
    found: dict[str, Any] = {}
    for f in functions:
        parts, types = tried(f, names)
        values = parts.joined(pytree.tree_map(zero, types))
        for name, value in values.items():
            found.setdefault(name, value)
    return found


def tried(f: Named, names: Sequence[str] | None = None) -> tuple[Parts, dict[str, Any]]:
    """The values that `f` gives to names, as parts, and the types of their data; by a
    trace that leaves nothing."""
    kept: list[Parts] = []

    def data(_: Any) -> dict[str, Any]:
        values = f()
        given = {
            name: value
            for name, value in values.items()
            if value is not UNBOUND and (names is None or name in names)
        }
        kept.append(Parts.of(given))
        return kept[-1].data

    around = current()
    marks = mark(around) if isinstance(around, Tracer) else []
    function = Function("f", f, (), data)
    body = trace_body("control_flow", "control_flow", function, [])
    rollback(marks)
    types: dict[str, Any] = pytree.unflatten(body.spec, body.types)
    return kept[-1], types


def zero(type_: TensorType) -> Any:
    if type_.weak and not type_.shape:
        return {"b": False, "f": 0.0}.get(type_.dtype.kind, 0)
    return zeros(type_.shape, dtype=type_.dtype)


def standing_for(
    written: Callable[..., Any], name: str, f: Callable[..., Any]
) -> Callable[..., Any]:
    """`f`, which errors show as what the user has written."""
    f.__name__ = name
    f.__wrapped__ = written  # type: ignore[attr-defined]
    return f
