"""What Python's operators ask of an environment, or of declared ranges without one."""

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
    """Whether it holds, by what is known; None: it depends. Records nothing."""
    if not isinstance(condition, SymBool):
        return condition
    env = condition.env
    return (NOTHING if env is None else env).decide(condition)


def decided(condition: bool | SymBool, x: Any, op: str, y: Any) -> bool | SymBool:
    """A bool if what is known decides it.

    Raises:
        DataDependentError: it does not, and there is no environment to ask later.
    """
    known = answer(condition)
    if known is not None:
        return known
    assert isinstance(condition, SymBool)
    if condition.env is None:
        raise DataDependentError(f"{x} {_ASKED.get(op, op)} {y}")
    return condition


def not_zero(divisor: Operand) -> bool:
    """Whether a divisor is surely not 0. False: a run may divide by 0, and raise then.

    Where the environment can tell, it is asked at once, so that an error has the line
    of the user, and the quotient a simple form.

    Raises:
        DivisionError: it is 0.
    """
    if isinstance(divisor, tuple):
        condition = relation("!=", divisor)
    elif isinstance(divisor, str):
        condition = float.fromhex(divisor) != 0
    else:
        condition = compare_floats("!=", divisor, (0.0).hex())
    known = asked(condition)
    if known is False:
        raise DivisionError(f"division by zero: `{format_operand(divisor)}` is 0")
    return known is True


def asked(condition: bool | SymBool) -> bool | None:
    """Whether it holds in the call that is traced, with a guard where that depends on
    the call; None: only a run can tell, or nobody is there to ask."""
    known = answer(condition)
    if known is None and isinstance(condition, SymBool):
        has_values = all(symbol.hint is not None for symbol in condition.symbols)
        if condition.env is not None and has_values:
            return condition.env.ask(condition)
    return known


# One question, whichever way it is asked: `x > y` is `not x <= y`.
_ASKED: Final = {">": "<=", ">=": "<"}


def floor_divide(a: Terms, b: Terms) -> Terms:
    """`a // b`, in the simple form if `b` is surely not 0."""
    return atoms.floor_divide(a, b, not_zero(b))


def modulo(a: Terms, b: Terms) -> Terms:
    """`a % b`, in the simple form if `b` is surely not 0."""
    return atoms.modulo(a, b, not_zero(b))
