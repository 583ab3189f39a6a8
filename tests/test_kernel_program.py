"""Definitions: kernels as data, and elements that are computed where they are read."""

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import hopflow as hf
from hopflow import dtypes
from hopflow.compiler.kernel_program import definitions
from hopflow.compiler.kernel_program.definitions import axes
from hopflow.compiler.kernel_program.lowering import definition
from hopflow.compiler.schedule.places import (
    Pending,
    Registers,
    Slot,
    Stored,
    evaluated,
    reads,
)
from hopflow.graph.types import TensorType
from hopflow.loop_ir import expr as e
from hopflow.loop_ir import kernels
from hopflow.loop_ir.nest import Buffer
from hopflow.loop_ir.printer import format_expr
from hopflow.loop_ir.walk import nodes

pytestmark = pytest.mark.slow

VECTOR = TensorType(dtypes.float64, (8,))
BUFFER = Buffer("x", dtypes.float64, (e.index(8),), "input")
[AXIS] = axes(1)
EVEN = e.compare("eq", e.binary("and", AXIS, e.index(1)), e.index(0))


def stored() -> Slot:
    return Slot(Stored(VECTOR, BUFFER))


def pending(element: e.Expr, *, cost: int = 1, is_view: bool = False) -> Slot:
    return Slot(Pending(VECTOR, element, frozenset(), cost, 1, is_view))


def double(x: Slot, at: e.Expr = AXIS) -> e.Expr:
    return e.binary("add", x[(at,)], x[(at,)])


def loaded(slot: Slot) -> set[str]:
    return {n.attr.name for n in nodes(slot.at((AXIS,))) if n.op == "load"}


# --- definitions ----------------------------------------------------------------------


def test_axes_are_the_same_variables_in_every_definition() -> None:
    assert axes(2)[0] is axes(3)[0]
    kernel = kernels.Pointwise(lambda at: at[0])
    first, second = (definition(kernel, [VECTOR]) for _ in range(2))
    assert isinstance(first, definitions.Pointwise)
    assert isinstance(second, definitions.Pointwise)
    assert first.element is second.element is AXIS


def test_each_function_of_a_kernel_is_called_once() -> None:
    calls: Counter[str] = Counter()

    def noted(name: str, f: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            calls[name] += 1
            return f(*args)

        return call

    x, n = stored(), e.const(0.0, dtypes.float64)
    check = kernels.Check("index", (8,), lambda at: e.compare("lt", at[0], e.index(9)))
    found: list[Any] = [
        kernels.Pointwise(lambda at: x[at], (check,)),
        kernels.Reduction((8,), (n,), "add", lambda _, r: (x[r],)),
        kernels.Reduction(
            (8,), (n,), lambda a, b: (a[0] if b else n,), lambda i, r: (x[r],)
        ),
        kernels.Prefix(0, n, lambda a, b: e.add(a, b), lambda at: x[at]),
        kernels.Scatter(
            x, (8,), lambda at: at, lambda at: x[at], lambda a, b: e.add(a, b)
        ),
        kernels.Compact(8, lambda at: e.compare("lt", x[at], n)),
    ]
    for kernel in found:
        functions = {
            f.name: noted(f.name, getattr(kernel, f.name))
            for f in dataclasses.fields(kernel)
            if callable(getattr(kernel, f.name))
        }
        calls.clear()
        definition(dataclasses.replace(kernel, **functions), [VECTOR])
        assert calls == dict.fromkeys(functions, 1)


def test_a_constant_operand_is_one_already() -> None:
    five = Slot(Registers(TensorType(dtypes.int64), (e.index(5),)))
    assert five[()].is_const
    assert stored()[(AXIS,)].op == "element"


# --- elements where they are read -----------------------------------------------------


def test_an_element_at_its_own_axes_is_the_definition_itself() -> None:
    at = e.binary("mul", AXIS, e.index(2))
    assert evaluated(at, {AXIS: AXIS}) is at


@pytest.mark.parametrize(
    ("make", "want"),
    [
        (lambda i: e.floor_div(i, e.index(4)), 9 // 4),
        (lambda i: e.floor_mod(i, e.index(4)), 9 % 4),
        (lambda i: e.floor_div(i, e.index(-3)), 9 // -3),
        (lambda i: e.floor_mod(e.sub(e.index(2), i), e.index(5)), (2 - 9) % 5),
        (lambda i: e.wrap_index(e.sub(i, e.index(12)), e.index(7)), 4),
        (lambda i: e.binary("shl", i, e.index(3)), 9 << 3),
        (lambda i: e.binary("lshr", e.unary("neg", i), e.index(60)), 15),
        (lambda i: e.cast(e.compare("lt", i, e.index(3)), dtypes.int64), 0),
    ],
)
def test_arithmetic_on_a_known_index_folds(make: Any, want: int) -> None:
    found = evaluated(make(AXIS), {AXIS: e.index(9)})
    assert found.is_const
    assert found.attr == want


def test_values_that_are_pending_on_each_other_need_no_stack() -> None:
    value = stored()
    for _ in range(20_000):
        value = pending(double(value))
    found = value.at((AXIS,))
    # An axis, two loads, and an addition for each.
    assert len(nodes(found)) == 20_003


def test_a_value_that_got_a_place_is_read_there() -> None:
    inner = pending(double(stored()))
    outer = pending(double(inner))
    assert loaded(outer) == {"x"}
    buffer = Buffer("stored", dtypes.float64, (e.index(8),), "arena")
    inner.place = Stored(VECTOR, buffer)
    outer.memo.clear()
    assert loaded(outer) == {"stored"}


def test_a_value_is_read_by_who_reads_its_views() -> None:
    """`x + x[::-1] + flip(x)`: at two different indices."""
    x = pending(double(stored()))
    back = e.sub(e.index(7), AXIS)
    flipped = pending(x[(back,)], is_view=True)
    again = pending(x[(e.sub(e.index(7), AXIS),)], is_view=True)
    twice = pending(flipped[(back,)], is_view=True)
    total = e.add(e.add(x[(AXIS,)], flipped[(AXIS,)]), again[(AXIS,)])
    assert reads(total) == {x: 2}
    assert reads(e.add(total, twice[(AXIS,)])) == {x: 3}


# --- conditional reads ----------------------------------------------------------------

NEAR = e.compare("lt", AXIS, e.index(5))
ZERO = e.const(0.0, dtypes.float64)


def conditions(root: e.Expr) -> list[str]:
    return [repr(e.condition_of(n)) for n in nodes(root) if n.op == "load"]


def test_a_condition_goes_to_every_read_inside() -> None:
    x = stored()
    inner = pending(e.add(x[(AXIS,)], x.where(EVEN, (e.index(7),), ZERO)))
    outer = pending(inner.where(NEAR, (AXIS,), ZERO))
    both = e.binary("and", NEAR, EVEN)
    assert conditions(outer.at((AXIS,))) == [repr(NEAR), repr(both)]


def test_one_condition_is_one_node() -> None:
    """So that what is read twice under it is computed once."""
    x = pending(double(stored()))
    inner = pending(e.add(x.where(EVEN, (AXIS,), ZERO), x.where(EVEN, (AXIS,), ZERO)))
    found = inner.where(NEAR, (AXIS,), ZERO)
    assert len(conditions(evaluated(found, {AXIS: AXIS}))) == 2


@pytest.mark.parametrize("holds", [True, False])
def test_a_condition_that_is_known_is_no_condition(holds: bool) -> None:
    x = pending(double(stored()))
    at = {AXIS: e.index(4 if holds else 6)}
    found = evaluated(x.where(NEAR, (AXIS,), ZERO), at)
    assert conditions(found) == (["None", "None"] if holds else [])
    assert holds or found.attr == 0


def test_what_was_computed_without_a_condition_is_used_under_one() -> None:
    x = pending(double(stored()))
    known = x.at((AXIS,))
    found = evaluated(x.where(NEAR, (AXIS,), ZERO), {AXIS: AXIS})
    assert found.args[1] is known


def test_a_load_that_gives_zero_needs_no_select() -> None:
    x = stored()
    loaded = evaluated(x.where(NEAR, (AXIS,), ZERO), {AXIS: AXIS})
    assert loaded.op == "load"
    minus = e.const(-0.0, dtypes.float64)
    assert evaluated(x.where(NEAR, (AXIS,), minus), {AXIS: AXIS}).op == "select"


@pytest.mark.parametrize("name", ["div", "rem"])
def test_nothing_divides_by_what_is_not_there(name: str) -> None:
    type_ = TensorType(dtypes.int64, (8,))
    x = Slot(Stored(type_, Buffer("x", dtypes.int64, (e.index(8),), "input")))
    quotient = e.binary(name, x[(AXIS,)], e.sub(x[(AXIS,)], e.index(1)))
    inner = Slot(Pending(type_, quotient, frozenset(), 1, 1))
    found = evaluated(inner.where(NEAR, (AXIS,), e.index(0)), {AXIS: AXIS})
    [division] = [n for n in nodes(found) if n.op == name]
    divisor = division.args[1]
    assert (divisor.op, divisor.args[0], divisor.args[2].attr) == ("select", NEAR, 1)


def test_a_read_under_a_condition_tells_it_in_text() -> None:
    x = stored()
    found = evaluated(x.where(NEAR, (AXIS,), ZERO), {AXIS: AXIS})
    assert format_expr(found) == "(x[i0] if i0 < 5 else 0)"


# --- programs -------------------------------------------------------------------------


def mirrored(x: Any) -> Any:
    n = x.shape[0]
    return hf.tanh(hf.concat([x, x[::-1]]))[1 : n + 1]


def loop_ir_of_calls(count: int) -> str:
    def f(x: Any) -> Any:
        for _ in range(count):
            x = mirrored(x)
        return x

    jitted = hf.jit(f)
    x = np.linspace(0, 1, 40)
    np.testing.assert_allclose(jitted(x), f(hf.asarray(x)))
    return str(jitted.loop_ir)


def test_what_a_program_reads_through_two_views_is_computed_once() -> None:
    four, eight = (len(loop_ir_of_calls(n).splitlines()) for n in (4, 8))
    assert eight < 2.5 * four


def test_a_long_chain_is_cut_into_loops() -> None:
    def f(x: Any) -> Any:
        for k in range(1500):
            x = x * 0.5 + k
        return x

    jitted = hf.jit(f)
    x = np.linspace(0, 1, 40)
    np.testing.assert_array_equal(jitted(x), f(x))
    assert str(jitted.loop_ir).count("vector") > 1
