"""Conditions and names: Python for known values, operators for traced ones."""

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
    *("python_containers", "refuse_changes", "run_with_state"),
]

State: TypeAlias = Callable[..., tuple[Any, ...]]
"""`state()` returns the values of names; `state(values)` assigns them."""
Containers: TypeAlias = Callable[[], Sequence[tuple[str, Any]]] | None
"""Returns the containers that a block changes, with the user's expressions."""


class _Unbound:
    def __repr__(self) -> str:
        return "<unbound>"


UNBOUND: Final = _Unbound()
"""The value of an unbound name."""


def run_with_state(
    state: State, values: Sequence[Any], before: Sequence[Any], run: Callable[[], Any]
) -> tuple[Any, tuple[Any, ...]]:
    """Call `run` with a state, and return its result and the final state; then restore
    the state `before`."""
    state(values)
    try:
        return run(), state()
    finally:
        state(before)


def load(get: Callable[[], Any]) -> Any:
    """Return the value of a name; `UNBOUND` if it has none."""
    try:
        return get()
    except NameError:
        return UNBOUND


def augmented(op: str, x: Any, y: Any) -> Any:
    """`x += y`: in place for a tensor, but not for a number that is traced as one."""
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
    """Whether a value is a tensor in plain Python too, and not a number."""
    return isinstance(value, Value) and not (value.type.weak and not value.type.shape)


# --- conditions -----------------------------------------------------------------------


def condition(test: Any) -> bool | Value:
    """Return a condition as a bool, or as a bool tensor if it is known at run time."""
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
    """`first < second() < …`: `pairs` are comparisons, each followed by its operand."""
    holds, value = pairs[:2]
    other = value()
    result = holds(first, other)
    if len(pairs) == 2:
        return result
    return and_(result, lambda: compare(other, *pairs[2:]))


def assert_(test: Any, message: Callable[[], Any]) -> None:
    """`assert test, message()`, as `hf.check` if the test is a tensor."""
    holds = condition(test)
    if isinstance(holds, Value):
        text = message()
        check(holds, "the assertion does not hold" if text is None else str(text))
    elif not holds:
        text = message()
        raise AssertionError(*([] if text is None else [text]))


def plain(test: Any, kind: str, reason: str) -> Any:
    """Return the condition of a statement that remains Python.

    Raises:
        ControlFlowError: the condition is known only at run time.
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
    """Return the subject of a `match` that compares it with constants.

    Raises:
        ControlFlowError: it is or contains a tensor.
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
    """Return a state and its names without unbound names in `captured`: only inner
    functions read these, and they remain unbound."""
    before = state()
    removed = [
        k for k, name in enumerate(names) if name in captured and before[k] is UNBOUND
    ]
    if not removed:
        return state, names

    def inner(values: tuple[Any, ...] | None = None) -> tuple[Any, ...]:
        current_values = state()
        if values is not None:
            remaining = iter(values)
            current_values = tuple(
                [
                    UNBOUND if k in removed else next(remaining)
                    for k in range(len(current_values))
                ]
            )
            state(current_values)
        return tuple([x for k, x in enumerate(current_values) if k not in removed])

    return inner, [name for k, name in enumerate(names) if k not in removed]


def refuse_changes(containers: Containers) -> None:
    """Check that a block which becomes the body of an operator changes no container.

    Raises:
        ControlFlowError: it does, and would do so only once, in its trace.
    """
    if container := python_containers(containers):
        name, kind = container
        raise ControlFlowError(
            f"control_flow: a block that depends on a tensor changes `{name}`, which "
            f"is a `{kind}`, and no tensor ({user_line()}). Assign local names in it, "
            f"and change `{name}` after."
        )


def python_containers(containers: Containers) -> tuple[str, str] | None:
    """Return the first of these that is a Python container: expression and type."""
    for name, container in containers() if containers is not None else ():
        if isinstance(container, _CONTAINERS):
            return name, type(container).__name__
    return None


_CONTAINERS: Final = (list, dict, set, bytearray, deque)
