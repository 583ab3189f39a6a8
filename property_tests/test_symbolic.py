"""Symbolic numbers against Python's own: values, ranges, decisions, guards."""

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hopflow.symbolic.boolean import SymBool, all_of, any_of, negation
from hopflow.symbolic.env import ShapeEnv
from hopflow.symbolic.ranges import ValueRange
from hopflow.symbolic.scalars import Number, SymInt, operand_of
from hopflow.symbolic.size import (
    Symbol,
    evaluate,
    free_symbols,
    substitute,
    sym_int,
    sym_max,
    sym_min,
)
from hopflow.symbolic.terms import compute

pytestmark = pytest.mark.slow

Table: TypeAlias = Mapping[str, Callable[..., Any]]
INTEGERS: Table = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
    "%": operator.mod,
    "min": min,
    "max": max,
    "neg": operator.neg,
    "abs": abs,
    "square": lambda x: x**2,
}
SYMBOLIC: Table = {**INTEGERS, "min": sym_min, "max": sym_max}
FLOATS: Table = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "%": operator.mod,
    "neg": operator.neg,
    "abs": abs,
}
ROUNDINGS: Table = {
    "floor": math.floor,
    "ceil": math.ceil,
    "round": round,
    "int": int,
}
COMPARISONS = [getattr(operator, name) for name in ("lt", "le", "gt", "ge", "eq", "ne")]
UNARY = ("neg", "abs", "square")

# A tree is the index of a symbol, an int constant in a list, or (name, *trees).
Tree: TypeAlias = Any


def trees(
    count: int, names: Sequence[str] = tuple(INTEGERS)
) -> st.SearchStrategy[Tree]:
    leaves = st.integers(0, count - 1) | st.integers(-6, 6).map(lambda k: [k])
    unary = st.sampled_from([n for n in names if n in UNARY])
    binary = st.sampled_from([n for n in names if n not in UNARY])

    def grow(inner: st.SearchStrategy[Tree]) -> st.SearchStrategy[Tree]:
        two = st.tuples(binary, inner, inner)
        return two | two | st.tuples(unary, inner) if "neg" in names else two

    return st.recursive(leaves, grow, max_leaves=7)


def build(
    tree: Tree, leaves: Sequence[Any], table: Mapping[str, Callable[..., Any]]
) -> Any:
    if isinstance(tree, int):
        return leaves[tree]
    if isinstance(tree, list):
        return tree[0]
    name, *parts = tree
    return table[name](*[build(part, leaves, table) for part in parts])


@dataclass
class World:
    """Symbols with ranges, and values that lie in them."""

    env: ShapeEnv
    sizes: list[SymInt]
    values: list[list[int]]  # several, each with one number a symbol

    def bind(self, values: Sequence[int]) -> dict[Symbol, int]:
        symbols = [free_symbols(size)[0] for size in self.sizes]
        return dict(zip(symbols, values, strict=True))


@st.composite
def worlds(draw: st.DrawFn, backed: bool = False, samples: int = 6) -> World:
    env = ShapeEnv()
    sizes: list[SymInt] = []
    columns: list[list[int]] = []
    for _ in range(3):
        low = draw(st.sampled_from([0, 1, 2, -5, -math.inf]))
        high = draw(st.sampled_from([math.inf, 3, 8]))
        numbers = st.integers(int(max(low, -9)), int(min(high, 12)))
        column = [draw(numbers) for _ in range(samples)]
        sizes.append(
            env.backed(None, column[0], low, high)
            if backed
            else env.unbacked(None, low, high)
        )
        columns.append(column)
    return World(env, sizes, [list(row) for row in zip(*columns, strict=True)])


def outcome(f: Callable[..., Any], *args: Any) -> Any:
    try:
        return f(*args)
    except (ZeroDivisionError, OverflowError, ValueError) as error:
        [kind] = [
            kind
            for kind in (ZeroDivisionError, OverflowError, ValueError)
            if isinstance(error, kind)
        ]
        return "raised", kind


def truth(condition: Callable[..., Any], *args: Any) -> bool:
    return bool(condition(*args))


# --- values ---------------------------------------------------------------------------


@given(worlds(), trees(3))
def test_an_expression_is_what_python_computes(world: World, tree: Tree) -> None:
    try:
        size = build(tree, world.sizes, SYMBOLIC)
    except ZeroDivisionError:
        for values in world.values:
            with pytest.raises(ZeroDivisionError):
                build(tree, values, INTEGERS)
        return
    for values in world.values:
        try:
            expected = build(tree, values, INTEGERS)
        except ZeroDivisionError:
            continue  # of a part that may have cancelled: `0 * (1 // n)`
        known = world.bind(values)
        assert evaluate(size, known.__getitem__, int) == expected
        assert substitute(size, known) == expected
        text = str(size)
        names = {s.name: v for s, v in known.items()}
        assert eval(text, {"min": min, "max": max}, names) == expected


@given(worlds(), trees(3))
def test_values_lie_in_the_range(world: World, tree: Tree) -> None:
    try:
        size = build(tree, world.sizes, SYMBOLIC)
    except ZeroDivisionError:
        return
    found = world.env.range_of(size)
    for values in world.values:
        value = outcome(evaluate, size, world.bind(values).__getitem__, int)
        if not isinstance(value, tuple):
            assert value in found


@given(worlds(), trees(3), trees(3))
def test_equal_normal_forms_are_equal_and_hash_alike(
    world: World, tree: Tree, other: Tree
) -> None:
    try:
        a, b = (build(t, world.sizes, SYMBOLIC) for t in (tree, other))
        again = build(tree, world.sizes, SYMBOLIC)
    except ZeroDivisionError:
        return
    assert a == again
    assert hash(a) == hash(again)
    if isinstance(a, SymInt) and a.same(b):
        for values in world.values:
            value = world.bind(values).__getitem__
            first = outcome(evaluate, a, value, int)
            second = outcome(evaluate, b, value, int)
            assert first == second or isinstance(first, tuple | type(second))


floats = st.sampled_from(
    [0.0, -0.0, 0.5, -1.5, 3.0, 1e300, math.inf, -math.inf, math.nan]
)


@given(worlds(), trees(4, tuple(FLOATS)), floats, st.sampled_from([0.5, 2.0, 1e300]))
def test_floats_round_as_python_does_and_lie_in_the_range(
    world: World, tree: Tree, x: float, k: float
) -> None:
    real = world.env.unbacked_float()

    def leaves(integers: Sequence[Any], number: Any) -> list[Any]:
        return [integers[0], integers[1], number, k]

    try:
        found = build(tree, leaves(world.sizes, real), FLOATS)
    except ZeroDivisionError:
        return
    range_ = world.env.range_of(found)
    for values in world.values:
        expected = outcome(build, tree, leaves(values, x), FLOATS)
        if isinstance(expected, tuple):
            continue
        known: dict[Symbol, Any] = {**world.bind(values)}
        assert isinstance(real.node, Symbol)
        known[real.node] = x
        got = compute(operand_of(found), known.__getitem__)
        assert repr(got) == repr(expected) or (got == expected and type(got) is int)
        assert expected in range_


@given(
    worlds(),
    floats.filter(math.isfinite),
    st.sampled_from("floor ceil round int".split()),
)
def test_floats_are_rounded_to_integers(world: World, x: float, name: str) -> None:
    assume(abs(x) < 1e6)
    f: Any = {"floor": math.floor, "ceil": math.ceil, "round": round, "int": sym_int}[
        name
    ]
    n: Any = world.sizes[0]
    size = f(n * x + 0.25)
    for values in world.values:
        value = evaluate(size, world.bind(values).__getitem__, int)
        assert value == ROUNDINGS[name](values[0] * x + 0.25)
        assert value in world.env.range_of(size)


# --- ranges of their own --------------------------------------------------------------

numbers = st.integers(-9, 9)
ends = st.sampled_from([-math.inf, math.inf]) | numbers


@st.composite
def members(draw: st.DrawFn) -> tuple[ValueRange, int]:
    value = draw(numbers)
    low = draw(st.just(-math.inf) | st.integers(-9, value))
    high = draw(st.just(math.inf) | st.integers(value, 9))
    return ValueRange(low, high), value


@given(members(), members(), st.sampled_from(["+", "-", "*", "//", "%"]))
def test_a_range_of_results_has_them_all(
    a: tuple[ValueRange, int], b: tuple[ValueRange, int], name: str
) -> None:
    (x, i), (y, j) = a, b
    assume(name not in ("//", "%") or j)
    assert INTEGERS[name](i, j) in INTEGERS[name](x, y)
    assert min(i, j) in x.minimum(y)
    assert max(i, j) in x.maximum(y)
    assert i**3 in x.power(3)
    assert i**2 in x.power(2)
    assert (not j) or i / j in x.true_divide(y)


# --- decisions ------------------------------------------------------------------------


@st.composite
def conditions(draw: st.DrawFn, world: World, depth: int = 1) -> Any:
    """A function of leaves and a table: a condition, symbolic or not."""
    kind = draw(st.sampled_from(["compare", "compare", "all", "any", "not"]))
    if depth == 0 or kind == "compare":
        op = draw(st.sampled_from(COMPARISONS))
        a, b = draw(trees(3)), draw(trees(3))
        return lambda leaves, table: op(
            build(a, leaves, table), build(b, leaves, table)
        )
    parts = [draw(conditions(world, depth - 1)) for _ in range(2)]
    if kind == "not":
        return lambda leaves, table: negation(parts[0](leaves, table))
    join = {"all": all_of, "any": any_of}[kind]
    return lambda leaves, table: join(*[part(leaves, table) for part in parts])


@given(worlds(samples=12), st.data())
def test_a_decision_is_right_for_every_value(world: World, data: st.DataObject) -> None:
    """Also under facts, for the values that fulfil them."""
    made = [data.draw(conditions(world)) for _ in range(4)]
    facts: list[SymBool] = []
    alive = [world.bind(values) for values in world.values]
    for make in made:
        try:
            condition = make(world.sizes, SYMBOLIC)
        except ZeroDivisionError:
            continue
        answers = {}
        for i, known in enumerate(alive):
            values = [known[free_symbols(size)[0]] for size in world.sizes]
            answer = outcome(make, values, INTEGERS)
            if not isinstance(answer, tuple):
                answers[i] = answer
        decided = world.env.decide(condition)
        if decided is not None:
            assert set(answers.values()) <= {decided}
            continue
        assert isinstance(condition, SymBool)
        for i, known in enumerate(alive):
            if i in answers:
                assert condition.evaluate(known.__getitem__) == answers[i]
        # The fact that the first value left makes true.
        if 0 not in answers:
            continue
        holds = condition if answers[0] else ~condition
        world.env.assume(holds)
        facts.append(holds)
        alive = [known for i, known in enumerate(alive) if answers.get(i) == answers[0]]
        assert world.env.decide(holds) is True
        assert world.env.decide(~holds) is False
    for size in world.sizes:
        for known in alive:
            value = evaluate(size, known.__getitem__, int)
            assert value in world.env.range_of(size)
            assert evaluate(world.env.simplify(size), known.__getitem__, int) == value


@given(worlds(backed=True), st.data())
def test_guards_hold_where_every_answer_is_the_same(
    world: World, data: st.DataObject
) -> None:
    made = [data.draw(conditions(world)) for _ in range(4)]
    answers = [outcome(truth, make, world.sizes, SYMBOLIC) for make in made]
    expected = [outcome(truth, make, world.values[0], INTEGERS) for make in made]
    for got, want in zip(answers, expected, strict=True):
        # A quotient by zero times zero is not computed.
        assert got == want or isinstance(want, tuple) or isinstance(got, tuple)
    guards = world.env.guards
    simple = guards.simplified()
    check, plain = simple.compile(), guards.compile()
    for values in world.values:
        known = world.bind(values)
        direct = all(
            outcome(g.holds.evaluate, known.__getitem__) is True for g in guards.guards
        )
        assert plain(known) == direct
        assert check(known) == direct
        assert (guards.explain(known) == []) == direct
        assert simple.compile_for(list(known))(*values) == direct
        if direct:
            for make, answer in zip(made, answers, strict=True):
                now = outcome(truth, make, values, INTEGERS)
                assert (
                    now == answer or isinstance(now, tuple) or isinstance(answer, tuple)
                )
    assert check(world.bind(world.values[0]))


@given(worlds(), trees(3), st.sampled_from(COMPARISONS), floats)
def test_comparisons_of_integers_with_floats_are_exact(
    world: World, tree: Tree, op: Callable[[Any, Any], Any], x: float
) -> None:
    try:
        size = build(tree, world.sizes, SYMBOLIC)
    except ZeroDivisionError:
        return
    condition = op(size, x)
    for values in world.values:
        known = world.bind(values).__getitem__
        value = outcome(evaluate, size, known, int)
        if not isinstance(value, tuple):
            got = (
                condition.evaluate(known)
                if isinstance(condition, SymBool)
                else condition
            )
            assert got == op(value, x)


@given(worlds(backed=True), st.data(), floats, floats)
def test_guards_on_floats_hold_for_the_same_answers(
    world: World, data: st.DataObject, x: float, y: float
) -> None:
    env, n = world.env, world.sizes[0]
    real = env.backed_float("x", x)
    a, b = (data.draw(trees(2, tuple(FLOATS))) for _ in range(2))
    op = data.draw(st.sampled_from(COMPARISONS))

    def ask(size: Number, number: Number) -> Any:
        return bool(
            op(build(a, [size, number], FLOATS), build(b, [size, number], FLOATS))
        )

    answer = outcome(ask, n, real)
    assert answer == outcome(ask, world.values[0][0], x)
    if isinstance(answer, tuple):
        return
    check = env.guards.compile()
    assert isinstance(real.node, Symbol)
    for values in world.values:
        known: dict[Symbol, Any] = {**world.bind(values), real.node: y}
        if check(known):
            assert outcome(ask, values[0], y) == answer
