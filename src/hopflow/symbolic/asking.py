"""Questions of Python's operators to an environment, or to ranges without one."""

from typing import Any, Final

from hopflow.errors import DataDependentError, DivisionError
from hopflow.symbolic import atoms
from hopflow.symbolic.boolean import SymBool, compare_floats, relation
from hopflow.symbolic.facts import NOTHING
from hopflow.symbolic.terms import Operand, Terms, compute, format_operand, symbols_of


def hint_of(operand: Operand) -> Any:
    hints = {s: s.hint for s in symbols_of(operand, {})}
    if None in hints.values():
        return None
    try:
        return compute(operand, hints.__getitem__)
    except ArithmeticError:  # a division by zero, or too large for a float
        return None


def answer(condition: bool | SymBool) -> bool | None:
    """Return the answer that ranges and facts imply, else None. Records nothing."""
    if not isinstance(condition, SymBool):
        return condition
    env = condition.env
    return (NOTHING if env is None else env).decide(condition)


def decided(condition: bool | SymBool, x: Any, op: str, y: Any) -> bool | SymBool:
    """Return a bool if ranges and facts decide the condition, else the condition.

    Raises:
        DataDependentError: it is undecided, and there is no environment to ask later.
    """
    truth = answer(condition)
    if truth is not None:
        return truth
    assert isinstance(condition, SymBool)
    if condition.env is None:
        raise DataDependentError(f"{x} {_ASKED.get(op, op)} {y}")
    return condition


def not_zero(divisor: Operand) -> bool:
    """Return True if a divisor is never 0, False if a run may divide by 0 and raise.

    An environment with hints is asked at once, so that an error has the user's line,
    and the quotient the simple form.

    Raises:
        DivisionError: the divisor is 0.
    """
    if isinstance(divisor, tuple):
        condition = relation("!=", divisor)
    elif isinstance(divisor, str):
        condition = float.fromhex(divisor) != 0
    else:
        condition = compare_floats("!=", divisor, (0.0).hex())
    truth = asked(condition)
    if truth is False:
        raise DivisionError(f"division by zero: `{format_operand(divisor)}` is 0")
    return truth is True


def asked(condition: bool | SymBool) -> bool | None:
    """Return whether it holds in the traced call, recording a guard if that depends on
    the call; None if a symbol has no hint, or there is no environment."""
    truth = answer(condition)
    if truth is None and isinstance(condition, SymBool):
        has_values = all(symbol.hint is not None for symbol in condition.symbols)
        if condition.env is not None and has_values:
            return condition.env.ask(condition)
    return truth


# `x > y` is reported as `x <= y`, so that both have the same message.
_ASKED: Final = {">": "<=", ">=": "<"}


def floor_divide(a: Terms, b: Terms) -> Terms:
    """Return `a // b`, in the simple form if `b` is never 0."""
    return atoms.floor_divide(a, b, not_zero(b))


def modulo(a: Terms, b: Terms) -> Terms:
    """Return `a % b`, in the simple form if `b` is never 0."""
    return atoms.modulo(a, b, not_zero(b))
