"""The one door to sympy: factors of expressions that are no polynomials in symbols.

sympy takes a second to import, so nobody goes through before the rules of `facts.py`
have all failed, on an expression with atoms (`//`, `%`, min, max) that is not linear in
them. Answers depend on the expression alone, and `Facts` keeps them for good.
"""

from typing import Any

from hopflow.symbolic.terms import Factor, Monomial, Terms, normal, order


def factors(terms: Terms) -> tuple[tuple[Terms, int], ...]:
    """The irreducible factors of `terms` with their powers, as sympy finds them.

    Atoms are taken as unknowns of their own, so the answer holds for all their values.
    A constant factor comes first, if it is not 1.
    """
    import sympy

    unknowns: dict[Factor, Any] = {}
    for monomial, _ in terms:
        for factor in monomial:
            unknowns.setdefault(factor, sympy.Symbol(f"x{len(unknowns)}"))
    total = sympy.Add(
        *[sympy.Mul(f, *[unknowns[x] for x in monomial]) for monomial, f in terms]
    )
    scale, found = sympy.factor_list(total, *unknowns.values())
    constant: list[tuple[Terms, int]] = [((((), int(scale)),), 1)] if scale != 1 else []
    return (*constant, *((_terms(part, unknowns), int(power)) for part, power in found))


def _terms(part: Any, unknowns: dict[Factor, Any]) -> Terms:
    polynomial = part.as_poly(*unknowns.values())
    total: dict[Monomial, int] = {}
    for powers, factor in polynomial.terms():
        monomial: list[Factor] = []
        for unknown, power in zip(unknowns, powers, strict=True):
            monomial += [unknown] * power
        total[tuple(sorted(monomial, key=order))] = int(factor)
    return normal(total)
