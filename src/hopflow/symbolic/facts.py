"""What is known of expressions: bounds, equalities, and what follows from them.

A fact on integers is a range of a polynomial in the normal form of `boolean.relation`,
so that a bound on `2*x` serves `4*x`, and `x < y` is a bound on `x - y`. An equality
that gives a symbol replaces it everywhere.
"""

from collections.abc import Iterator
from math import inf
from typing import Final

from hopflow.symbolic import algebra
from hopflow.symbolic.atoms import (
    atom_range,
    declared,
    floor_divide,
    interval,
    modulo,
    monomial_range,
    replace,
    replace_terms,
)
from hopflow.symbolic.boolean import COMPARISONS, SymBool, difference_of, relation
from hopflow.symbolic.ranges import EVERY, Bound, ValueRange
from hopflow.symbolic.terms import (
    Atom,
    Factor,
    Monomial,
    Operand,
    Symbol,
    Terms,
    add,
    constant,
    content,
    has_atoms,
    is_constant,
    multiply,
    negate,
    of_factor,
    plus_constant,
    scale,
    split_constant,
    subtract,
    symbols_of,
    without,
)

__all__ = ["NOTHING", "Facts", "facts_of"]

DEPTH: Final = 2  # how many facts are added up in search of an answer
MANY: Final = 24  # facts: beyond, only one at a time
