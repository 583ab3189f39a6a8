"""Definitions: kernels as data, and elements that are computed where they are read."""

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import hopflow as hf
from hopflow import dtypes
from hopflow.compiler.kernel_passes.reads import counted_reads
from hopflow.compiler.kernel_passes.substitution import Substitution, under
from hopflow.compiler.kernel_program import definitions
from hopflow.compiler.kernel_program.definitions import axes
from hopflow.compiler.kernel_program.lowering import definition
from hopflow.compiler.kernel_program.program import Value
from hopflow.graph.types import TensorType
from hopflow.loop_ir import expr as e
from hopflow.loop_ir import kernels
from hopflow.loop_ir.printer import format_expr
from hopflow.loop_ir.walk import nodes

pytestmark = pytest.mark.slow

VECTOR = TensorType(dtypes.float64, (8,))
[AXIS] = axes(1)
EVEN = e.compare("eq", e.binary("and", AXIS, e.index(1)), e.index(0))


def double(x: Value, at: e.Expr = AXIS) -> e.Expr:
    return e.binary("add", x[(at,)], x[(at,)])


def inlined(root: e.Expr, **expressions: e.Expr) -> e.Expr:
    """An expression with the elements of values of these names computed."""
    elements = Substitution()
    for value in {n.attr for x in (root, *expressions.values()) for n in reads(x)}:
        if value.name in expressions:
            elements.add(value, nodes(expressions[value.name]))
    return elements.of([root])[0]


def reads(root: e.Expr) -> list[e.Expr]:
    return [n for n in nodes(root) if n.op == "element"]


# --- definitions ----------------------------------------------------------------------


def test_axes_are_the_same_variables_in_every_definition() -> None:
    assert axes(2)[0] is axes(3)[0]
    kernel = kernels.Pointwise(lambda at: at[0])
    first, second = (definition(kernel, [VECTOR]) for _ in range(2))
    assert isinstance(first, definitions.Pointwise)
    assert isinstance(second, definitions.Pointwise)
    assert first.elements[0] is second.elements[0] is AXIS


def test_each_function_of_a_kernel_is_called_once() -> None:
    calls: Counter[str] = Counter()

    def noted(name: str, f: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            calls[name] += 1
            return f(*args)

        return call

    x, n = Value("x", VECTOR), e.const(0.0, dtypes.float64)
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
    five = Value("5", TensorType(dtypes.int64), e.index(5))
    assert five[()].is_const
    assert Value("x", VECTOR)[(AXIS,)].op == "element"


# --- elements where they are read -----------------------------------------------------


def test_an_element_at_its_own_axes_is_the_definition_itself() -> None:
    x, y = Value("x", VECTOR), Value("y", VECTOR)
    own = e.unary("neg", x[(AXIS,)])
    assert inlined(y[(AXIS,)], y=own) is own


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
    y = Value("y", TensorType(dtypes.int64, (99,)))
    found = inlined(y[(e.index(9),)], y=make(AXIS))
    assert found.is_const
    assert found.attr == want


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_chain_of_values_needs_no_stack(is_shared: bool) -> None:
    value, elements = Value("x", VECTOR), Substitution()
    for _ in range(20_000):
        order = nodes(double(value))
        value = Value("y", VECTOR)
        elements.add(value, order, is_shared=is_shared)
    [found] = elements.of([value[(AXIS,)]])
    # An axis, a read, and an addition for each.
    assert len(nodes(found)) == 20_002


def test_values_of_one_reader_are_expanded_once() -> None:
    """A chain of values that are each read at another index takes linear time."""
    value, elements = Value("x", VECTOR), Substitution()
    for _ in range(1000):
        order = nodes(value[(e.binary("xor", AXIS, e.index(5)),)])
        value = Value("y", VECTOR)
        elements.add(value, order, is_shared=False)
    [found] = elements.of([value[(AXIS,)]])
    assert len(nodes(found)) == 1003


def test_a_value_that_got_memory_is_read_there() -> None:
    x, inner, outer = (Value(name, VECTOR) for name in ("x", "inner", "outer"))
    elements = Substitution()
    elements.add(inner, nodes(double(x)))
    elements.remove(inner)
    elements.add(outer, nodes(double(inner)))
    [read] = elements.of([outer[(AXIS,)]])
    assert {n.attr for n in reads(read)} == {inner}


def test_a_value_is_read_by_who_reads_its_views() -> None:
    """`x + x[::-1] + flip(x)`: at two different indices."""
    x, flipped, again, twice = (Value(name, VECTOR) for name in "xfat")
    back = e.sub(e.index(7), AXIS)
    views = {
        flipped: definitions.Pointwise((x[(back,)],), is_view=True),
        again: definitions.Pointwise((x[(e.sub(e.index(7), AXIS),)],), is_view=True),
        twice: definitions.Pointwise((flipped[(back,)],), is_view=True),
    }
    total = e.add(e.add(x[(AXIS,)], flipped[(AXIS,)]), again[(AXIS,)])
    assert counted_reads(nodes(total), views) == ({x: 2}, {flipped, again})
    counts, _ = counted_reads(nodes(e.add(total, twice[(AXIS,)])), views)
    assert counts == {x: 3}


# --- conditional reads ----------------------------------------------------------------

NEAR = e.compare("lt", AXIS, e.index(5))
ZERO = e.const(0.0, dtypes.float64)


def conditions(root: e.Expr) -> list[str]:
    return [repr(e.condition_of(n)) for n in reads(root)]


X, Y, Z = (Value(name, VECTOR) for name in "xyz")


def test_a_condition_goes_to_every_read_inside() -> None:
    inner = e.add(X[(AXIS,)], X.where(EVEN, (e.index(7),), ZERO))
    found = inlined(Y.where(NEAR, (AXIS,), ZERO), y=inner)
    both = e.binary("and", NEAR, EVEN)
    assert conditions(found) == [repr(NEAR), repr(both)]


def test_one_condition_is_one_node() -> None:
    """So that what is read twice under it is computed once."""
    first = X.where(EVEN, (AXIS,), ZERO)
    found = inlined(
        Y.where(NEAR, (AXIS,), ZERO),
        y=e.add(first, X.where(EVEN, (e.index(1),), ZERO)),
    )
    first_condition, second_condition = (e.condition_of(n) for n in reads(found))
    assert first_condition is second_condition


def test_a_condition_that_holds_is_not_asked_again() -> None:
    same = e.compare("lt", AXIS, e.index(5))
    own = X.where(e.binary("and", EVEN, same), (AXIS,), ZERO)
    found = inlined(Y.where(NEAR, (AXIS,), ZERO), y=own)
    assert conditions(found) == [repr(e.binary("and", NEAR, EVEN))]


def test_what_tells_a_condition_is_read_without_it() -> None:
    positive = e.compare("gt", X[(AXIS,)], ZERO)
    found = under(positive, e.add(X[(AXIS,)], Z[(AXIS,)]))
    assert conditions(found) == ["None", repr(positive)]


@pytest.mark.parametrize("holds", [True, False])
def test_a_condition_that_is_known_is_no_condition(holds: bool) -> None:
    own = X.where(NEAR, (AXIS,), ZERO)
    found = inlined(Y[(e.index(4 if holds else 6),)], y=own)
    assert conditions(found) == (["None"] if holds else [])
    assert holds or found.attr == 0


def test_what_was_computed_without_a_condition_is_used_under_one() -> None:
    root = e.add(Y[(AXIS,)], Y.where(NEAR, (AXIS,), ZERO))
    found = inlined(root, y=double(X))
    assert found.args[1].args[1] is found.args[0]


@pytest.mark.parametrize("name", ["div", "rem"])
def test_nothing_divides_by_what_is_not_there(name: str) -> None:
    type_ = TensorType(dtypes.int64, (8,))
    x, y = Value("x", type_), Value("y", type_)
    quotient = e.binary(name, x[(AXIS,)], e.sub(x[(AXIS,)], e.index(1)))
    found = inlined(y.where(NEAR, (AXIS,), e.index(0)), y=quotient)
    [division] = [n for n in nodes(found) if n.op == name]
    divisor = division.args[1]
    assert (divisor.op, divisor.args[0], divisor.args[2].attr) == ("select", NEAR, 1)


def test_a_read_under_a_condition_tells_it_in_text() -> None:
    found = X.where(NEAR, (AXIS,), ZERO)
    assert format_expr(found.args[1]) == "(x[i0] if i0 < 5)"


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
