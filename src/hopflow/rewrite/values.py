"""Names and conditions: Python where it can tell, operators where only a run can."""

import operator
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

from hopflow import pytree
from hopflow.bind import Value, current
from hopflow.errors import ControlFlowError, DataDependentError, TraceError
from hopflow.hops.cond import cond
from hopflow.ops.check import check
from hopflow.ops.elementwise import logical_not, not_equal
from hopflow.symbolic.boolean import SymBool
from hopflow.trace.source import user_line

__all__ = [
    *("UNBOUND", "Containers", "State", "and_", "assert_", "augmented", "compare"),
    *(
        "condition",
        "is_tensor",
        "load",
        "narrowed",
        "not_",
        "or_",
        "plain",
        "plain_subject",
    ),
    *("python_containers", "refuse_changes", "run_within"),
]

State: TypeAlias = Callable[..., tuple[Any, ...]]
"""`state()` is what names hold; `state(values)` has them hold these."""
Containers: TypeAlias = Callable[[], Sequence[tuple[str, Any]]] | None
"""The containers that a block changes, as the user calls them."""


class _Unbound:
    def __repr__(self) -> str:
        return "<unbound>"


UNBOUND: Final = _Unbound()
"""The value of a name that has none."""


def run_within(
    state: State, own: Sequence[Any], before: Sequence[Any], run: Callable[[], Any]
) -> tuple[Any, tuple[Any, ...]]:
    """What `run` returns where the state is `own`, and the state that it leaves; the
    state is then what it was before."""
    state(own)
    try:
        return run(), state()
    finally:
        state(before)


def load(get: Callable[[], Any]) -> Any:
    """What a name holds, `UNBOUND` if nothing."""
    try:
        return get()
    except NameError:
        return UNBOUND


def augmented(op: str, x: Any, y: Any) -> Any:
    """`x += y`: into a tensor, but not into a number that a trace has for a tensor."""
    name = _OPERATORS[op]
    in_place = "" if isinstance(x, Value) and not is_tensor(x) else "i"
    return getattr(operator, f"__{in_place}{name}__")(x, y)


_OPERATORS: Final = dict(
    pair.split(":")
    for pair in (
        "Add:add Sub:sub Mult:mul MatMult:matmul Div:truediv FloorDiv:floordiv Mod:mod "
        "Pow:pow LShift:lshift RShift:rshift BitAnd:and BitOr:or BitXor:xor"
    ).split()
)


def is_tensor(value: Any) -> bool:
    """Whether it is a tensor in plain Python too, which `+=` writes to."""
    return isinstance(value, Value) and not (value.type.weak and not value.type.shape)


# --- conditions -----------------------------------------------------------------------


def condition(test: Any) -> bool | Value:
    """A condition as a bool, or as a tensor of bools if only a run can tell."""
    if isinstance(test, SymBool):
        try:
            return bool(test)
        except DataDependentError:
            return current().value_of(test)
    if isinstance(test, Value):
        return test if test.type.dtype.kind == "b" else not_equal(test, 0)
    return bool(test)


def and_(first: Any, second: Callable[[], Any]) -> Any:
    """`first and second()`."""
    holds = condition(first) if isinstance(first, Value | SymBool) else first
    if not isinstance(holds, Value):
        return holds and second()
    return cond(holds, lambda: condition(second()), lambda: False)


def or_(first: Any, second: Callable[[], Any]) -> Any:
    """`first or second()`."""
    holds = condition(first) if isinstance(first, Value | SymBool) else first
    if not isinstance(holds, Value):
        return holds or second()
    return cond(holds, lambda: True, lambda: condition(second()))


def not_(test: Any) -> Any:
    """`not test`."""
    holds = condition(test)
    return logical_not(holds) if isinstance(holds, Value) else not holds


def compare(first: Any, *pairs: Callable[..., Any]) -> Any:
    """`first < second() < …`: comparisons, each followed by what it compares with."""
    holds, value = pairs[:2]
    other = value()
    found = holds(first, other)
    if len(pairs) == 2:
        return found
    return and_(found, lambda: compare(other, *pairs[2:]))


def assert_(test: Any, message: Callable[[], Any]) -> None:
    """`assert test, message()`, as `hf.check` if only a run can tell."""
    holds = condition(test)
    if isinstance(holds, Value):
        text = message()
        check(holds, "the assertion does not hold" if text is None else str(text))
    elif not holds:
        text = message()
        raise AssertionError(*([] if text is None else [text]))


def plain(test: Any, kind: str, reason: str) -> Any:
    """The condition of what must stay Python.

    Raises:
        ControlFlowError: only a run can tell it.
    """
    try:
        bool(test)
    except (TraceError, DataDependentError) as error:
        raise ControlFlowError(
            f"control_flow: this `{kind}` depends on a tensor and cannot be rewritten: "
            f"{reason} ({user_line()})."
        ) from error
    return test


def plain_subject(subject: Any) -> Any:
    """What a `match` compares with constants.

    Raises:
        ControlFlowError: it is a tensor, or holds one.
    """
    if any(isinstance(leaf, Value) for leaf in pytree.flatten(subject)[0]):
        raise ControlFlowError(
            "control_flow: this `match` compares a tensor with a constant, and cannot "
            f"be rewritten ({user_line()}). Write `if`."
        )
    return subject


def narrowed(
    state: State, names: Sequence[str], captured: Sequence[str]
) -> tuple[State, Sequence[str]]:
    """A state, and its names, without those of `captured` that have no value: only
    functions defined within read them, and they are left without one."""
    before = state()
    out = [
        k for k, name in enumerate(names) if name in captured and before[k] is UNBOUND
    ]
    if not out:
        return state, names

    def inner(values: tuple[Any, ...] | None = None) -> tuple[Any, ...]:
        now = state()
        if values is not None:
            rest = iter(values)
            now = tuple([UNBOUND if k in out else next(rest) for k in range(len(now))])
            state(now)
        return tuple([x for k, x in enumerate(now) if k not in out])

    return inner, [name for k, name in enumerate(names) if k not in out]


def refuse_changes(containers: Containers) -> None:
    """Called where a block becomes a part of an operator.

    Raises:
        ControlFlowError: it changes a container, which Python would do only once.
    """
    if changed := python_containers(containers):
        name, kind = changed
        raise ControlFlowError(
            f"control_flow: a block that depends on a tensor changes `{name}`, which "
            f"is a `{kind}`, and no tensor ({user_line()}). Assign local names in it, "
            f"and change `{name}` after."
        )


def python_containers(containers: Containers) -> tuple[str, str] | None:
    """The first of these that is Python's, by name and type."""
    for name, container in containers() if containers is not None else ():
        if isinstance(container, _CONTAINERS):
            return name, type(container).__name__
    return None


_CONTAINERS: Final = (list, dict, set, bytearray, deque)
