"""The only use of sympy: irreducible factors of expressions with atoms.

Importing sympy takes a second, so it is imported only after the rules of `facts.py`
have failed on an expression that is not linear in its atoms (`//`, `%`, min, max).
Factors depend on the expression alone, and `Facts` memoises them.
"""

from typing import Any

from hopflow.symbolic.terms import Factor, Monomial, Terms, normal, order


def factors(terms: Terms) -> tuple[tuple[Terms, int], ...]:
    """Return the irreducible factors of `terms` with their powers.

    Atoms are treated as independent unknowns, so the factors hold for all their values.
    A constant factor other than 1 comes first.
    """
    import sympy

    unknowns: dict[Factor, Any] = {}
    for monomial, _ in terms:
        for factor in monomial:
            unknowns.setdefault(factor, sympy.Symbol(f"x{len(unknowns)}"))
    total = sympy.Add(
        *[sympy.Mul(f, *[unknowns[x] for x in monomial]) for monomial, f in terms]
    )
    scale, parts = sympy.factor_list(total, *unknowns.values())
    constant: list[tuple[Terms, int]] = [((((), int(scale)),), 1)] if scale != 1 else []
    return (*constant, *((_terms(part, unknowns), int(power)) for part, power in parts))


def _terms(part: Any, unknowns: dict[Factor, Any]) -> Terms:
    polynomial = part.as_poly(*unknowns.values())
    total: dict[Monomial, int] = {}
    for powers, factor in polynomial.terms():
        monomial: list[Factor] = []
        for unknown, power in zip(unknowns, powers, strict=True):
            monomial += [unknown] * power
        total[tuple(sorted(monomial, key=order))] = int(factor)
    return normal(total)
