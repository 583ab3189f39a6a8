"""Symbolic numbers: what is known, what is asked, what is recorded."""

import itertools
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import pytest

import hopflow as hf
from hopflow.errors import (
    ArgumentValueError,
    CheckError,
    DataDependentError,
)
from hopflow.symbolic import algebra
from hopflow.symbolic.boolean import SymBool, all_of, any_of, negation
from hopflow.symbolic.env import ShapeEnv
from hopflow.symbolic.facts import Facts
from hopflow.symbolic.guards import Guard
from hopflow.symbolic.ranges import ANY_FLOAT, EVERY, ValueRange
from hopflow.symbolic.size import (
    Symbol,
    SymFloat,
    SymInt,
    evaluate,
    free_symbols,
    substitute,
    sym_float,
    sym_int,
    sym_max,
    sym_min,
    symbol,
)


@pytest.fixture
def env() -> ShapeEnv:
    return ShapeEnv()


def unbacked(env: ShapeEnv, count: int = 3) -> list[SymInt]:
    return [env.unbacked(name) for name in "xyz"[:count]]


def of(size: SymInt) -> Symbol:
    [found] = free_symbols(size)
    return found


# --- normal forms and text ------------------------------------------------------------


def test_expressions_print_as_python(env: ShapeEnv) -> None:
    s0, s1 = env.backed(None, 4), env.backed(None, 5)
    u0 = env.unbacked()
    n: Any = s0
    shown = {
        "s0": s0,
        "u0": u0,
        "s0*s1 + 1": s0 * s1 + 1,
        "2*s0 - s1": 2 * s0 - s1,
        "-s0 + 3": 3 - s0,
        "(s0 + 1) // 2": (s0 + 1) // 2,
        "3*(s0 // 2)": s0 // 2 * 3,
        "-(s0 // 2)": -(s0 // 2),
        "-(s0 // 2) + s1": s1 - s0 // 2,
        "s0*(s1 % 4)": s1 % 4 * s0,
        "(2*s0) // (u0 + 1)": 2 * s0 // (u0 + 1),
        "min(s0, s1)": sym_min(s1, s0),
        "max(3, s0)": sym_max(3, s0),
        "s0 / 2": s0 / 2,
        "((s0 * 0.5) + 1.0) * s1": (n * 0.5 + 1.0) * s1,
        "floor(s0 * 0.5)": math.floor(n * 0.5),
        "int(s0 * 0.5)": sym_int(n * 0.5),
        "-(s0 * 0.5)": -(n * 0.5),
        "float(s0)": sym_float(s0),
    }
    assert {str(number): number for number in shown.values()} == shown


def test_conditions_print_as_they_are_asked(env: ShapeEnv) -> None:
    x, y, _ = unbacked(env)
    r = env.unbacked_float("r")
    asked = {
        "x <= 4": x < 5,
        "x >= 5": x > 4,
        "x < y": x < y,
        "x > y": y < x,
        "x <= y + 1": 2 * x <= 2 * y + 3,
        "x == y": x == y,
        "x != 3": x != 3,
        "x < y and x != 3": all_of(x < y, x != 3),
        "x == 1 or (x < y and x != 3)": any_of(x == 1, all_of(x < y, x != 3)),
        "r < 2.0": r < 2.0,
        "not r < 2.0": negation(r < 2.0),
        "1 <= r": r >= 1,
    }
    assert {str(condition): condition for condition in asked.values()} == asked


def test_conditions_on_signs_omit_powers(env: ShapeEnv) -> None:
    x, y, _ = unbacked(env)
    z = env.unbacked("z", -9)
    same: list[tuple[Any, Any]] = [
        (x**40 * y**3 == 0, x * y == 0),
        (x * x * y != 0, x * y != 0),
        (x**3 > 0, x > 0),
        (x**3 * y + x * x <= 0, x * (x * y + 1) <= 0),
        (z**4 == 0, z == 0),
        (z**3 * x < 0, z * x < 0),
        (z**4 > 0, z**2 > 0),
        (z**5 * x**2 >= 0, z * x >= 0),
    ]
    for condition, simpler in same:
        assert str(condition) == str(simpler)
    different = [z**2 > 0, x * x > 1, x * x == 4, x * x < y * y]
    shown = ["z*z >= 1", "x*x >= 2", "x*x == 4", "x*x < y*y"]
    assert [str(condition) for condition in different] == shown


def test_quotients_and_remainders_have_a_normal_form(env: ShapeEnv) -> None:
    s, t, u = (env.unbacked(name) for name in "stu")
    p = env.unbacked("p", 1)
    same: list[tuple[Any, Any]] = [
        ((6 * s + 4) // 2, 3 * s + 2),
        ((s + 7) // 4, (s + 3) // 4 + 1),
        ((2 * s + 3) // 4, (s + 1) // 2),
        (s // 2 // 3, s // 6),
        (s // -2, -s // 2),
        (s * p // p, s),
        ((s * p + p) // p, s + 1),
        (s * t * p // (p * u), s * t // u),
        ((p * p - 1) // (p + 1), p - 1),
        ((s + 8) % 4, s % 4),
        (2 * s % 4, 2 * (s % 2)),
        (s % 8 % 4, s % 4),
        (s * p % p, 0),
        (s % -3, -(-s % 3)),
        (s % 4 // 4, 0),
        (s % 4 % 7, s % 4),
        (-(-s // 4), (s + 3) // 4 * 0 - (-s // 4)),
        (sym_min(s, s + 1, t), sym_min(t, s)),
        (sym_max(s, -1), s),
        (abs(s), s),
        (divmod(s, 2), (s // 2, s % 2)),
        (divmod(7, p), (7 // p, 7 % p)),
        (s**2, s * s),
        (s**0, 1),
        (round(s), s),
        (math.floor(s), s),
    ]
    for a, b in same:
        assert a == b


def test_nothing_is_cancelled_that_may_be_zero() -> None:
    n, m = symbol("n"), symbol("m")
    assert str(n * m // m) == "(m*n) // m"
    with pytest.raises(ZeroDivisionError):
        substitute(n * m // m, {of(m): 0})
    for make in (lambda: n // 0, lambda: n % 0, lambda: n / 0, lambda: 1 / (m - m)):
        with pytest.raises(ZeroDivisionError):
            make()


def test_hashes_are_of_expressions_and_collide_no_more_than_others() -> None:
    n, m = symbol("n"), symbol("m")
    assert hash(n + m) == hash(m + n)
    assert hash((n + 1) // 2) == hash((1 + n) // 2)
    # hash(-1) == hash(-2), and to compare these two is an error
    assert len({n - m, n - 2 * m}) == 2


def test_a_symbol_without_environment_is_known_not_to_be_negative() -> None:
    n, m = symbol("n"), symbol("m")
    assert n >= 0
    assert n + m + 1 > 0
    assert n * m != -1
    assert n // 2 >= 0
    assert n % 4 < 4
    asked: list[Callable[[], bool]] = [
        lambda: n > 3,
        lambda: n == m,
        lambda: n // 2 == 1,
        lambda: bool(n),
    ]
    for ask in asked:
        with pytest.raises(DataDependentError, match="cannot decide"):
            ask()
    with pytest.raises(DataDependentError, match="`n` as a Python number"):
        int(n)
    with pytest.raises(DataDependentError, match="`n / 2` as a Python number"):
        float(n / 2)
    with pytest.raises(DataDependentError, match="n / 2 < 3"):
        assert n / 2 < 3


def test_sizes_are_computed_in_any_arithmetic() -> None:
    n, m = symbol("n"), symbol("m")
    size = (n + 1) // 2 * m + sym_min(n, m) - n % 3
    known = {of(n): 7, of(m): 5}
    assert evaluate(size, known.__getitem__, int) == 4 * 5 + 5 - 1
    assert substitute(size, {of(n): m}) == (m + 1) // 2 * m + m - m % 3
    assert substitute(size, {of(n): m}).same((m + 1) // 2 * m + m - m % 3)  # type: ignore[union-attr]
    assert free_symbols(size, n) == (of(n), of(m))
    halves = evaluate(2 * n + 1, lambda _: Fraction(1, 2), Fraction)
    assert halves == 2


def test_operators_refuse_what_is_no_number() -> None:
    n: Any = symbol("n")
    refused: list[Callable[[], Any]] = [
        lambda: n + "a",
        lambda: "a" + n,
        lambda: n // None,
        lambda: n < "a",
        lambda: n / "a",
        lambda: n / 2 + "a",
        lambda: n / 2 < "a",
    ]
    for operation in refused:
        with pytest.raises(TypeError):
            operation()


# --- ranges ---------------------------------------------------------------------------


def test_ranges_go_through_expressions(env: ShapeEnv) -> None:
    x, y = env.unbacked("x", 2, 5), env.unbacked("y", -3)
    ranges = {
        x + y: (-1, math.inf),
        x * y: (-15, math.inf),
        x * x: (4, 25),
        y * y: (0, math.inf),
        x // 2: (1, 2),
        y // x: (-2, math.inf),
        y % x: (0, 4),
        y % 4: (0, 3),
        sym_min(x, y): (-3, 5),
        sym_max(x, y): (2, math.inf),
        (x / 2): (1.0, 2.5),
        math.ceil(x / 2): (1, 3),
    }
    for number, (low, high) in ranges.items():
        assert env.range_of(number) == ValueRange(low, high)
    assert env.range_of(env.unbacked_float()) == ANY_FLOAT
    assert env.range_of(7) == ValueRange(7, 7)


def test_ranges_hold_integers_that_no_float_holds(env: ShapeEnv) -> None:
    big = 10**400
    x = env.unbacked("x", big)
    assert env.range_of(x * 2 + 1) == ValueRange(2 * big + 1, math.inf)
    assert x > 10**399
    assert env.range_of(sym_float(x)).low == sys.float_info.max


def test_ranges_that_say_nothing() -> None:
    zero = ValueRange(0, 0)
    assert ValueRange(1, 2) // zero == EVERY
    assert (ValueRange(2, 3) & ValueRange(4, 5)).is_empty
    assert ValueRange(2, 3) | ValueRange(5, 6) == ValueRange(2, 6)
    assert math.nan in ANY_FLOAT
    assert math.nan not in EVERY


def test_floats_that_may_be_nan_are_not_decided(env: ShapeEnv) -> None:
    r, n = env.unbacked_float("r"), env.unbacked("n")
    assert env.decide(r == r) is None
    assert env.decide(r * 0.0 == 0.0) is None
    assert env.decide(abs(r) >= 0.0) is None
    assert not abs(r) < 0.0
    assert n / 2 >= 0.0
    assert (n + 1) / 2 > 0
    assert env.decide(r < math.inf) is None


def test_a_range_that_is_left_out_at_its_end_shrinks(env: ShapeEnv) -> None:
    x = env.unbacked("x", 0, 5)
    for k in (0, 5, 1):
        assert env.assume(x != k) is False
    assert env.range_of(x) == ValueRange(2, 4)
    assert x > 1


# --- facts ----------------------------------------------------------------------------


def test_a_bound_on_a_multiple_decides_another(env: ShapeEnv) -> None:
    x, *_ = unbacked(env)
    env.assume(2 * x < 9)
    assert 4 * x < 17
    assert x <= 4
    assert env.decide(4 * x < 13) is None


def test_an_order_decides_the_reverse(env: ShapeEnv) -> None:
    x, y, _ = unbacked(env)
    env.assume(x < y)
    assert y > x
    assert 3 * y >= 3 * x + 3
    assert x != y
    assert not y <= x


def test_orders_are_put_together(env: ShapeEnv) -> None:
    x, y, z = unbacked(env)
    env.assume(x < y)
    env.assume(y < z)
    env.assume(z <= 10)
    assert x + 1 < z
    assert x <= 8
    assert z >= 2


def test_equalities_unify_symbols(env: ShapeEnv) -> None:
    x, y, z = unbacked(env)
    env.assume(x == y)
    env.assume(2 * y == 2 * z + 2)
    assert x == z + 1
    assert x == y
    assert not x.same(y)  # what a run is to check proves nothing of a type
    assert not x.same(z)
    assert str(env.simplify(x * y)) == "x*x"
    env.assume(z == 3)
    assert x == 4
    assert int(y) == 4
    assert env.simplify(x + y) == 8


def test_a_symbol_of_a_run_gives_way_to_one_of_the_inputs(env: ShapeEnv) -> None:
    u, s = env.unbacked("u", 2), env.backed("s", 5)
    env.assume(u == s)
    assert str(env.simplify(u + 1)) == "s + 1"
    assert s >= 2  # what was known of the one is known of the other


def test_facts_are_carried_over_when_symbols_unify(env: ShapeEnv) -> None:
    x, y, z = unbacked(env)
    env.assume(x + y < 10)
    env.assume(x != 4)
    env.assume(x == z + 1)
    assert z + y < 9
    assert z != 3
    assert z >= -1
    env.assume(z * y == x)
    assert z * y == z + 1


def test_facts_on_results_say_something_of_the_arguments(env: ShapeEnv) -> None:
    x, y, z = unbacked(env)
    env.assume(x // 4 == 3)
    assert x >= 12
    assert x < 16
    env.assume(sym_min(y, z) > 2)
    assert y > 2
    assert z > 2
    env.assume(sym_max(y, z) < 7)
    assert y + z < 13
    a, b = env.unbacked("a"), env.unbacked("b")
    env.assume(a * b > 0)
    assert a > 0
    assert b >= 1


def test_laws_of_quotients_and_remainders_decide(env: ShapeEnv) -> None:
    x, y, _ = unbacked(env)
    p = env.unbacked("p", 1)
    assert x // 2 * 2 <= x
    assert x // 2 * 2 + x % 2 == x
    assert x // 2 <= x
    assert x - x // 2 >= 0
    assert x % p < p
    assert x % p <= x
    assert x // p * p <= x
    assert x // p <= x
    assert sym_min(x, y) <= x
    assert sym_max(x, y) >= y
    assert sym_min(x, y) + sym_max(x, y) >= x
    env.assume(x % 2 == 0)
    assert x // 2 * 2 == x


def test_a_common_positive_factor_does_not_count(env: ShapeEnv) -> None:
    p, x = env.unbacked("p", 1), env.unbacked("x")
    env.assume(x > 1)
    assert p * x > p
    env.assume(x * p == 4 * p)
    assert x == 4


def test_connectives_are_decided_by_their_parts(env: ShapeEnv) -> None:
    x, y, z = unbacked(env)
    env.assume(x < y)
    assert env.decide(all_of(x < y, x < z)) is None
    assert env.decide(any_of(x < y, x < z)) is True
    assert env.decide(all_of(y < z, x > y)) is False
    either = any_of(y < z, z < x)
    assert isinstance(either, SymBool)
    assert env.decide(either) is None
    env.assume(either)
    assert env.decide(either) is True
    assert env.decide(~either) is False
    assert all_of() is True
    assert any_of() is False
    low: Any = y < z
    assert (low & ~low) is False
    assert (low | ~low) is True
    assert (True & low) == low
    assert (low | True) is True


def test_an_assumption_that_never_holds_is_an_error(env: ShapeEnv) -> None:
    x, *_ = unbacked(env)
    assert env.assume(x >= 0) is True
    assert env.assume(x > 3) is False
    assert env.assume(x > 2) is True
    condition = SymBool("<=", (x.expression, 1))
    with pytest.raises(CheckError, match="`x <= 1` never holds"):
        env.assume(condition)
    assert [str(fact) for fact in env.facts] == ["x >= 4"]


# --- guards ---------------------------------------------------------------------------


def test_a_question_on_inputs_is_answered_and_recorded_once() -> None:
    seen: list[Guard] = []
    env = ShapeEnv(line=lambda: "model.py:12", on_guard=seen.append)
    n = env.backed(None, 8)
    assert bool(n > 3)
    assert bool(n > 3)
    assert bool(2 * n > 5)
    assert not bool(n == 5)
    assert [str(guard) for guard in seen] == [
        "s0 >= 4  (model.py:12)",
        "s0 != 5  (model.py:12)",
    ]
    assert seen == [*env.guards.guards]


def test_python_asks_too(env: ShapeEnv) -> None:
    n = env.backed("n", 3)
    x = env.backed_float("x", 0.5)
    assert n in (2, 3)
    assert len(range(n)) == 3
    assert max(n, 2) == 3
    assert float(x) == 0.5
    assert int(x * 7) == 3
    assert str(env.guards).splitlines() == [
        *("n != 2", "n == 3", "x == 0.5", "abs(x * 7) < inf", "int(x * 7) == 3")
    ]
    m = env.backed("m", 4)
    assert not (m if m < 4 else 0)
    assert bool(m)


def test_zero_and_nan_are_told_from_what_equals_them(env: ShapeEnv) -> None:
    x, y = env.backed_float("x", -0.0), env.backed_float("y", math.nan)
    assert math.copysign(1, float(x)) == -1
    assert math.isnan(float(y))
    check = env.guards.compile_for([s for s in env.symbols])
    assert check(-0.0, math.nan)
    assert not check(0.0, math.nan)
    assert not check(-0.0, 1.0)


def test_a_question_on_the_run_is_an_error_with_its_line() -> None:
    env = ShapeEnv(line=lambda: "model.py:7")
    u, s = env.unbacked(), env.backed(None, 3)
    with pytest.raises(
        DataDependentError, match=r"cannot decide `u0 >= 4` \(model.py:7\)"
    ):
        bool(u > 3)
    with pytest.raises(DataDependentError, match=r"u0 > s0|s0 < u0"):
        bool(u > s)
    with pytest.raises(DataDependentError, match=r"`u0` as a Python num.*model.py:7"):
        int(u)
    with pytest.raises(DataDependentError, match="`u0 / 2` as a Python number"):
        float(u / 2)
    assert env.guards.guards == ()


def test_symbols_of_another_environment_are_not_answered(env: ShapeEnv) -> None:
    n, m = env.backed("n", 3), ShapeEnv().backed("m", 3)
    with pytest.raises(DataDependentError, match="m == n"):
        bool(n == m)


def test_a_declared_range_is_a_guard_and_must_hold(env: ShapeEnv) -> None:
    n = env.backed("n", 3, 1, 4096, source="x.shape[0]")
    assert n > 0
    assert str(env.guards) == "n >= 1  (declared)\nn <= 4096  (declared)"
    assert env.symbols[of(n)] == "x.shape[0]"
    with pytest.raises(ArgumentValueError, match=r"x.shape\[0\]: 0 is not from 1 to 9"):
        env.backed("n", 0, 1, 9, source="x.shape[0]")


def test_guards_that_others_imply_are_dropped(env: ShapeEnv) -> None:
    n, m = env.backed("n", 20, 1), env.backed("m", 20)
    for condition in (n > 2, n > 5, n != 4, m < 30, n <= m, m == n, n < 25):
        assert bool(condition)
    assert str(env.guards.simplified()) == "n >= 6\nm == n\nn <= 24"
    check = env.guards.simplified().compile()
    assert check({of(n): 7, of(m): 7})
    assert not check({of(n): 7, of(m): 8})


def test_guards_that_are_left_out_follow_in_the_order_of_the_others() -> None:
    """Facts can prove `s != 0` from the other three, but only in another order."""
    env = ShapeEnv()
    s, n, m = env.backed("s", 1), env.backed("n", 2), env.backed("m", 3)
    for condition in (s != 0, s * n * m == n * m, m != 0, n != 0):
        assert bool(condition)
    facts = Facts()
    for guard in env.guards.simplified().guards:
        facts.learn(guard.holds)
    assert [facts.decide(guard.holds) for guard in env.guards.guards] == [True] * 4


@pytest.mark.parametrize("order", [*itertools.permutations(range(3))])
def test_numbers_follow_from_facts_in_any_order(order: Sequence[int]) -> None:
    """`s` is replaced by `n - min(1, n)` first, or found to be 4 first."""
    env = ShapeEnv()
    n, s, m = env.backed("n", 5), env.backed("s", 4), env.backed("m", 5)
    conditions = (sym_min(1, n) + s == n, s * m == 20, s == 4)
    for k in order:
        assert bool(conditions[k])
    decided = [n == 5, s == 4, m == 5, 4 * m == 20]
    assert all(x is True for x in decided), decided  # and no condition


@pytest.mark.parametrize("order", [*itertools.permutations(range(4))])
def test_products_are_divided_by_what_is_known_to_be_positive_later(
    order: Sequence[int],
) -> None:
    env = ShapeEnv()
    x, y, n, m = (
        env.backed(name, k) for name, k in zip("xynm", (1, 2, 4, 3), strict=True)
    )
    conditions = (x * y == y, x * y * 6 == n * m, n == 4, m == 3)
    for k in order:
        assert bool(conditions[k])
    decided = [x == 1, y == 2]
    assert all(answer is True for answer in decided), decided


@pytest.mark.parametrize("order", [*itertools.permutations(range(2))])
def test_inequalities_of_products_are_divided_too(order: Sequence[int]) -> None:
    env = ShapeEnv()
    x, y = env.backed("x", 3), env.backed("y", 2)
    conditions = (x * y > y, y > 0)
    for k in order:
        assert bool(conditions[k])
    assert (x > 1) is True


def test_a_symbol_with_one_value_left_is_that_number(env: ShapeEnv) -> None:
    x, n, m = env.backed("x", 2), env.backed("n", 3), env.backed("m", 3)
    asked: list[Any] = [x == 2, n == m]
    for condition in (x * n == x * m, sym_min(1, x) == x - 1):
        assert bool(condition)
    facts = Facts()
    for guard in env.guards.simplified().guards:
        facts.learn(guard.holds)
    assert [facts.decide(condition) for condition in asked] == [True, True]


def test_guards_are_compiled_and_explained(env: ShapeEnv) -> None:
    n, m = env.backed("not a name", 8), env.backed("m", 2)
    env.guard((n + 1) // 2 == 4, "model.py:3")
    env.guard(n % m == 0, "model.py:4")
    assert "def check(v0, v1):" in env.guards.source([of(n), of(m)])
    check = env.guards.compile()
    assert check({of(n): 8, of(m): 2})
    assert check({of(n): 7, of(m): 7})
    assert not check({of(n): 9, of(m): 3})
    assert not check({of(n): 8, of(m): 0})
    assert env.guards.explain({of(n): 9, of(m): 2}) == [
        "`(not a name + 1) // 2 == 4`, which model.py:3 asked, fails: not a name = 9",
        "`not a name % m == 0`, which model.py:4 asked, fails: not a name = 9, m = 2",
    ]
    [first, second] = env.guards.explain({of(n): 8, of(m): 0})
    assert first == "`m != 0` fails: m = 0"
    assert "zero" in second
    assert env.guards.explain({of(n): 8, of(m): 4}) == []
    assert ShapeEnv().guards.compile()({}) is True


def test_a_division_asks_whether_it_can_be_done(env: ShapeEnv) -> None:
    n, m, zero = env.backed("n", 6), env.backed("m", 3), env.backed("z", 0)
    assert n * m // m == n  # for `m` is known not to be 0
    assert str(env.guards) == "m != 0"
    with pytest.raises(ZeroDivisionError, match="`z` is 0"):
        assert n // zero
    with pytest.raises(ZeroDivisionError, match="`float\\(z\\)` is 0"):
        assert n / sym_float(zero)
    u = env.unbacked("u")
    assert str(n // u) == "n // u"  # the run will see


def test_hints_are_values(env: ShapeEnv) -> None:
    n: Any = env.backed("n", 7)
    m, x = env.backed("m", 2), env.backed_float("x", 0.5)
    assert (n // 2 + m).hint == 5
    assert (n * x).hint == 3.5
    assert isinstance(n * x, SymFloat)
    assert (n + env.unbacked()).hint is None
    assert (symbol("k", 3) * 2).hint == 6  # type: ignore[union-attr]


def test_conditions_may_be_said_of_other_symbols(env: ShapeEnv) -> None:
    x, y, z = unbacked(env)
    r = env.unbacked_float("r")
    condition = all_of(x < y, any_of(y == 3, r < 2.0), negation(r < 1.0))
    assert isinstance(condition, SymBool)
    known = {of(x): z.expression}
    assert str(condition.substitute(known.get)) == (
        "y > z and (y == 3 or r < 2.0) and not r < 1.0"
    )
    assert condition.symbols == (of(x), of(y), r.node)


# --- sympy ----------------------------------------------------------------------------


def factored(env: ShapeEnv) -> bool | SymBool:
    """A question for sympy: `(x % 5 - 4) * (y + 1) <= 0`, multiplied out."""
    x, y, _ = unbacked(env)
    return (x % 5) * y + x % 5 - 4 * y - 4 <= 0


def test_sympy_decides_by_factors(env: ShapeEnv) -> None:
    assert factored(env) is True


def test_a_repeated_question_does_not_enter_sympy_again(
    env: ShapeEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[object] = []
    real = algebra.factors

    def counted(terms: Any) -> Any:
        calls.append(terms)
        return real(terms)

    monkeypatch.setattr(algebra, "factors", counted)
    x, y, _ = unbacked(env)
    size = (x % 5) * y - 3 * (x % 5) - y
    for _ in range(3):
        assert env.decide(size > 4) is None
    assert len(calls) == 1
    env.assume(y < 100)  # more is known, but the factors are the same
    assert env.decide(size > 4) is None
    assert len(calls) == 1
    assert env.decide(size + 0 > 4) is None
    assert env.decide(size > 4) is None
    assert len(calls) == 1


PROGRAM = """
import sys
import numpy as np
import hopflow as hf
from hopflow.symbolic.env import ShapeEnv
from hopflow.symbolic.size import sym_min

hf.jit(lambda x: hf.sum(x * 2))(hf.asarray(np.ones(3, np.float32)))
env = ShapeEnv()
n, m, k = env.backed("n", 6), env.backed("m", 4), env.unbacked("k", 1)
assert bool(n * m + 2 * n > m) and bool(n * m * n != m * m) and bool(n == m + 2)
env.assume(k < n)
assert n // 2 * 2 <= n and bool(n % 4 == 2) and k % 8 < 8 and bool(n / 2 == 3.0)
env.guards.simplified().compile()
env.guards.explain({s: 3 for s in env.guards.symbols})
assert "sympy" not in sys.modules
print((k % 5) * m + k % 5 - 4 * m - 4 <= 0)
assert "sympy" in sys.modules
"""


def test_a_linear_or_polynomial_program_does_not_import_sympy() -> None:
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False
    )
    assert (run.stdout, run.stderr) == ("True\n", "")


@pytest.mark.parametrize(
    "f",
    [
        lambda n: (n > 3) * n,
        lambda n: n * (n > 3),
        lambda n: (n > 3) + 1,
        lambda n: 1 - (n > 3),
        lambda n: 2 ** (n > 3) + (n > 3) ** 2,
        lambda n: (7 << (n > 3)) // (1 + (n > 3)) % 5,
        lambda n: int(n > 3) + abs(-(n > 3)),
        lambda n: sum([n > 3, n > 2]),
        lambda n: [5, 7][n > 3],
        lambda n: int((n > 3) / 2 + 1.5 * (n * 0.5 > 1.2)),
        lambda n: pow(n, 5, 7),
        lambda n: n.bit_length() + (n + 1).bit_count(),
        lambda n: 1 if (n > 3) == True else 2,  # noqa: E712
        lambda n: 1 if (n > 3) != False else 2,  # noqa: E712
        lambda n: 1 + (n == (n > 3)) + (n < (n > 3)) + ((n > 3) in [True]),
        lambda n: 1 + ((n > 3) > 0) + ((n > 3) <= 0.5) + max(n > 3, 0),
        lambda n: 2 - ((n > 3) == (n < 8)) + ((n > 3) != (n > 4)),
        lambda n: {True: 5, False: 7}[n > 3] + ((n > 3) in {True}),
        lambda n: len({n > 3, n < 8, True}) + len(dict.fromkeys([n > 3, n > 4])),
        lambda n: 1 + ((n > 3, n) == (True, 5)) + [n > 3, n < 8].count(True),
        lambda n: ((n > 3) | 2) + ((n > 3) & 1) + ((n > 3) ^ 1),
        lambda n: sum(divmod(n > 3, 2)) + round(n > 3) + round(n < 3, 1) + 1,
    ],
)
def test_conditions_and_sizes_compute_as_python_does(f: Any) -> None:
    jitted = hf.jit(lambda x: hf.zeros(f(x.shape[0])), dynamic=True)
    for n in (5, 3, 8, 4):
        assert jitted(hf.ones(n)).shape == (f(n),)


def test_a_condition_is_a_mask_and_an_operand_of_tensors() -> None:
    def f(x: Any) -> Any:
        condition = x.shape[0] > 3
        return x[condition], x * condition, condition * x

    jitted = hf.jit(f, dynamic=True)
    for n in (5, 3):
        x = hf.arange(float(n))
        for ours, eager in zip(jitted(x), f(x), strict=True):
            assert ours.shape == eager.shape
            assert ours.tolist() == eager.tolist()
