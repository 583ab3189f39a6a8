"""Whether a condition on symbolic numbers holds, as Python's operators have to know.

An environment (`symbolic.env.Env`) belongs to a trace. It knows facts about symbols and
the hints, which are their values in the traced call, and records guards. A symbol
without an environment has nothing but its declared range.

    implied_truth    what facts and ranges imply; records nothing
    bool_if_implied  the same, or the condition itself, for a comparison's result
    guarded_truth    also what the hints say, which is recorded as a guard
"""

from typing import Any, Final

from hopflow.errors import DataDependentError, DivisionError
from hopflow.symbolic import atoms
from hopflow.symbolic.boolean import SymBool, compare_floats, relation
from hopflow.symbolic.facts import NOTHING
from hopflow.symbolic.terms import Operand, Terms, compute, format_operand, symbols_of


def hint_of(operand: Operand) -> Any:
    """Return the value of an operand in the traced call; None if a symbol has no hint,
    or the operand no value."""
    hints = {s: s.hint for s in symbols_of(operand, {})}
    if None in hints.values():
        return None
    try:
        return compute(operand, hints.__getitem__)
    except ArithmeticError:  # a division by zero, or too large for a float
        return None


def implied_truth(condition: bool | SymBool) -> bool | None:
    """Return whether a condition holds, if facts and ranges imply that; else None.

    Records nothing.
    """
    if not isinstance(condition, SymBool):
        return condition
    env = condition.env
    return (NOTHING if env is None else env).decide(condition)


def bool_if_implied(
    condition: bool | SymBool, x: Any, op: str, y: Any
) -> bool | SymBool:
    """Return a bool if facts and ranges imply one, else the condition `x op y` itself.

    Raises:
        DataDependentError: nothing implies one, and `bool()` of the condition could not
            ask an environment either.
    """
    truth = implied_truth(condition)
    if truth is not None:
        return truth
    assert isinstance(condition, SymBool)
    if condition.env is None:
        raise DataDependentError(f"{x} {_REPORTED.get(op, op)} {y}")
    return condition


def not_zero(divisor: Operand) -> bool:
    """Return True if a divisor is never 0, False if a run may divide by 0 and raise.

    Where the hints tell, this is a guard: an error then has the user's line, and the
    quotient the simple form.

    Args:
        divisor: A polynomial of integers, a constant float as hexadecimal text, or
            another float.

    Raises:
        DivisionError: the divisor is 0.
    """
    if isinstance(divisor, tuple):
        condition = relation("!=", divisor)
    elif isinstance(divisor, str):
        condition = float.fromhex(divisor) != 0
    else:
        condition = compare_floats("!=", divisor, (0.0).hex())
    truth = guarded_truth(condition)
    if truth is False:
        raise DivisionError(f"division by zero: `{format_operand(divisor)}` is 0")
    return truth is True


def guarded_truth(condition: bool | SymBool) -> bool | None:
    """Return whether a condition holds in the traced call, else None: a symbol has no
    hint, or there is no environment.

    Records a guard unless facts and ranges imply the answer.
    """
    truth = implied_truth(condition)
    if truth is None and isinstance(condition, SymBool):
        has_values = all(symbol.hint is not None for symbol in condition.symbols)
        if condition.env is not None and has_values:
            return condition.env.ask(condition)
    return truth


# An error about `x > y` names its negation, so that both have the same message.
_REPORTED: Final = {">": "<=", ">=": "<"}


def floor_divide(a: Terms, b: Terms) -> Terms:
    """Return `a // b`, in the simple form if `b` is never 0."""
    return atoms.floor_divide(a, b, not_zero(b))


def modulo(a: Terms, b: Terms) -> Terms:
    """Return `a % b`, in the simple form if `b` is never 0."""
    return atoms.modulo(a, b, not_zero(b))
