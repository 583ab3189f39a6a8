"""Declared dimensions: the errors for guards that narrow one, and remedies."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

from hopflow.errors import DimError
from hopflow.symbolic.boolean import SymBool
from hopflow.symbolic.terms import Atom, Symbol, Terms


@dataclass(frozen=True, slots=True)
class Declaration:
    """A user's declaration of a size that guards must not narrow.

    text   the declaration as written: `hf.Dim("n", min=2)`, `hf.mark_dynamic(x, 0,
           min=2)`
    name   the name of the `hf.Dim`; "" for `mark_dynamic`
    """

    text: str
    name: str = ""


def ends(low: float, high: float) -> list[str]:
    """Return the arguments that declare the sizes `low` to `high`, if not default."""
    return [f"min={low}"] * (low != 0) + [f"max={high}"] * (high != inf)


def narrowed(
    condition: SymBool, declared: Mapping[Symbol, Declaration], where: str, shown: str
) -> DimError:
    """Return the error for a guard that holds for some declared sizes only.

    Args:
        condition: The guard, on declared sizes.
        where: The user's line that asked.
        shown: The condition in the user's names.
    """
    texts = dict.fromkeys(f"`{declared[s].text}`" for s in condition.symbols)
    at = f" ({where})" if where else ""
    return DimError(
        f"what was declared by {' and '.join(texts)} is narrowed to `{shown}`{at}: the "
        f"program would serve no other sizes. {_remedy(condition, declared)}"
    )


def _remedy(condition: SymBool, declared: Mapping[Symbol, Declaration]) -> str:
    """Return advice on what to declare instead."""
    allow = (
        "allow it with `may_narrow=True`, to compile again for other sizes, or choose "
        "with `hf.cond`."
    )
    symbols = condition.symbols
    if len(symbols) == 1 and (
        declaration := _single(condition, symbols[0], declared[symbols[0]].name)
    ):
        return f"{declaration}, or {allow}"
    if len(symbols) == 2 and _are_equal(condition):
        name = declared[symbols[0]].name
        remedy = f"one dimension, `{name}`" if name else "one `hf.Dim`"
        return f"Declare both by {remedy}, or {allow}"
    return allow[0].upper() + allow[1:]


def _are_equal(condition: SymBool) -> bool:
    terms, k = condition.args if condition.is_integral else ((), 1)
    return condition.op == "==" and not k and sorted(f for _, f in terms) == [-1, 1]


def _single(condition: SymBool, symbol: Symbol, name: str) -> str:
    """Return the declaration for a condition on one size; "" if there is none.

    Args:
        name: The name of its `hf.Dim`; "" for `mark_dynamic`.
    """
    if not condition.is_integral:
        return ""
    terms, k = condition.args
    low, high = symbol.range.low, symbol.range.high
    if terms != (((symbol,), 1),):
        factor = _divisor(terms, symbol) if condition.op == "==" and k == 0 else None
        is_known = factor is not None and name
        return f'Declare `{factor} * hf.Dim("{name}")`' if is_known else ""
    match condition.op:
        case "==":
            return f"Do not declare the size dynamic, as it is always {k}"
        case ">=":
            low = k
        case "<=":
            high = k
        case _ if k == low:
            low = k + 1
        case _ if k == high:
            high = k - 1
        case _:
            return ""
    limits = ends(low, high)
    if not name:
        return f"Mark it with `{', '.join(limits)}`"
    quoted = f'"{name}"'
    return f"Declare `hf.Dim({', '.join([quoted, *limits])})`"


def _divisor(terms: Terms, symbol: Symbol) -> int | None:
    """Return the k of `symbol % k`; None if the terms are another expression."""
    match terms:
        case (((Atom(op="%", args=(x, (((), divisor),))),), 1),):
            return divisor if x == (((symbol,), 1),) else None
    return None
