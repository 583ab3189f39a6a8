"""Sizes that a user declares dynamic: guards must not narrow them."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import hopflow
from hopflow.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    AxisError,
    DataDependentError,
    DimError,
    GuardError,
    ShapeCheckError,
)

hf: Any = hopflow
Run = Callable[..., Any]
N = hf.Dim("n", min=2, max=4)
M = hf.Dim("m")


def ones(*shape: int) -> Any:
    return hf.ones(shape)


NARROWED: dict[str, tuple[Run, dict[str, Any], str]] = {
    "a constant": (
        lambda x: hf.reshape(x, (2, 3)),
        {"x": {0: N}},
        r'declared by `hf.Dim\("n", min=2, max=4\)` is narrowed to `x.shape\[0\] == 2` '
        r"\(test_declared_sizes.py:\d+\).*always 2, or allow it with `may_narrow=True`",
    ),
    "a Python number": (
        lambda x: [x] * int(x.shape[0]),
        {"x": {0: N}},
        "Do not declare the size dynamic, as it is always 2",
    ),
    "an upper end": (
        lambda x: x if x.shape[0] < 3 else -x,
        {"x": {0: N}},
        r'Declare `hf.Dim\("n", min=2, max=2\)`',
    ),
    "a lower end": (
        lambda x: x if x.shape[0] > 1 else -x,
        {"x": {0: M}},
        r'Declare `hf.Dim\("m", min=2\)`',
    ),
    "not empty": (
        lambda x: hf.max(x),
        {"x": {0: M}},
        r'`x.shape\[0\] != 0`.*Declare `hf.Dim\("m", min=1\)`',
    ),
    "a multiple": (
        lambda x: x if x.shape[0] % 2 == 0 else -x,
        {"x": {0: M}},
        r'`x.shape\[0\] % 2 == 0`.*Declare `2 \* hf.Dim\("m"\)`',
    ),
    "two that are equal": (
        lambda x, y: x + y,
        {"x": {0: M}, "y": {0: N}},
        "Declare both by one dimension, `[nm]`",
    ),
    "another condition": (
        lambda x: x if x.shape[0] != 7 else -x,
        {"x": {0: M}},
        "Allow it with `may_narrow=True`, to compile again for other sizes, or choose",
    ),
}


@pytest.mark.parametrize("name", NARROWED)
def test_a_declared_size_is_not_narrowed(name: str) -> None:
    f, dynamic, match = NARROWED[name]
    args = [ones(2, 3)] * len(dynamic)
    with pytest.raises(DimError, match=match):
        hf.jit(f, dynamic=dynamic)(*args)
    with pytest.raises(DimError, match=match):
        hf.trace(f, *args, mode="symbolic", dynamic=dynamic)


def test_a_size_that_may_be_narrowed_is_compiled_again() -> None:
    n = hf.Dim("n", may_narrow=True)
    f = hf.jit(lambda x: x if x.shape[0] > 2 else -x, dynamic={"x": {0: n}})
    start = hf.stats().traces
    assert [f(ones(k)).tolist() for k in (2, 3, 1)] == [[-1] * 2, [1] * 3, [-1]]
    assert hf.stats().traces - start == 2
    assert (2 * n).may_narrow


def test_what_follows_from_a_declared_size_is_no_narrowing() -> None:
    f = hf.jit(lambda x, y, z: x[:-1] + y + z[0], dynamic=[{0: N}, {0: N - 1}, True])
    start = hf.stats().traces
    for n in (2, 3, 4):
        assert f(ones(n), ones(n - 1), ones(1, n - 1)).shape == (n - 1,)
    assert hf.stats().traces - start == 1


def test_may_narrow_is_a_bool() -> None:
    with pytest.raises(ArgumentTypeError, match="Dim: `may_narrow` must be a bool"):
        hf.Dim("n", may_narrow="yes")


# --- marks ----------------------------------------------------------------------------


def test_a_marked_size_is_a_symbol_from_the_first_call() -> None:
    f = hf.jit(lambda x: x * 2 + x.shape[0])
    start = hf.stats().traces
    x = ones(5, 3)
    hf.mark_dynamic(x, 0)
    for arg in (x, ones(7, 3), ones(1, 3), x):
        np.testing.assert_array_equal(f(arg), 2 + np.full(arg.shape, arg.shape[0]))
    assert hf.stats().traces - start == 1
    assert str(f.graph.operands[0].type) == "f32[s0, 3]"


def test_a_mark_counts_where_a_program_for_the_size_exists() -> None:
    f = hf.jit(lambda x: x * 2)
    f(ones(5, 3))
    start = hf.stats().traces
    x = ones(5, 3)
    hf.mark_dynamic(x, -2)
    f(x), f(x), f(ones(6, 3)), f(ones(5, 3))
    assert hf.stats().traces - start == 1


def test_a_marked_size_is_not_narrowed_unless_it_may_be() -> None:
    f = hf.jit(lambda x: x if x.shape[0] > 2 else -x)
    x = ones(5)
    for limits, text in (({}, "x, 0"), ({"min": 2, "max": 8}, "x, 0, min=2, max=8")):
        hf.mark_dynamic(x, 0, **limits)
        match = rf"mark_dynamic\({text}\)` is narrowed .*Mark it with `min=3"
        with pytest.raises(DimError, match=match):
            f(x)
    hf.mark_dynamic(x, 0, may_narrow=True)
    assert f(x).tolist() == [1] * 5
    hf.mark_dynamic(x, 0, min=3)
    g = hf.jit(lambda x: x if x.shape[0] > 2 else -x)
    assert g(x).tolist() == [1] * 5
    assert g(ones(2)).tolist() == [-1] * 2


def test_an_unbacked_mark_has_no_value_in_the_trace() -> None:
    f = hf.jit(lambda x: x + hf.arange(5))
    start = hf.stats().traces
    assert f(unbacked(5)).shape == f(unbacked(1)).shape == (5,)
    assert f.guards == ()
    assert hf.stats().traces - start == 1
    with pytest.raises(ShapeCheckError, match=r"`x.shape\[0\] == 5` .* it is `3 == 5`"):
        f(unbacked(3))


def test_a_decision_by_an_unbacked_size_is_an_error() -> None:
    x = ones(5)
    hf.mark_unbacked(x, 0)
    for run in (hf.jit(decided), lambda x: hf.trace(decided, x, mode="symbolic")):
        with pytest.raises(DataDependentError, match=r"`u0` is `x.shape\[0\]`, and"):
            run(x)


def decided(x: Any) -> Any:
    return x if x.shape[0] > 2 else -x


def unbacked(size: int, **limits: int) -> Any:
    x = ones(size)
    hf.mark_unbacked(x, 0, **limits)
    return x


def dynamic(size: int, **limits: int) -> Any:
    x = ones(size)
    hf.mark_dynamic(x, 0, **limits)
    return x


@pytest.mark.parametrize("marked", [dynamic, unbacked])
@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: {"a": [x]}])
def test_a_mark_says_nothing_of_other_tensors(marked: Run, wrap: Run) -> None:
    f = hf.jit(lambda tree: hf.sum(tree if wrap(0) == 0 else tree["a"][0]))
    outside = [ones(9), marked(12, min=10, max=30), ones(1)]
    for x in (marked(4, min=2, max=8), *outside, marked(4, min=2, max=8)):
        assert f(wrap(x)).item() == x.shape[0]


@pytest.mark.parametrize("marked", [dynamic, unbacked])
def test_a_tensor_that_is_not_marked_is_specialised(marked: Run) -> None:
    g = hf.jit(lambda x: x if x.shape[0] == 4 else -x)
    with pytest.raises((DimError, DataDependentError)):
        g(marked(4))
    assert [g(ones(n)).tolist() for n in (4, 5)] == [[1] * 4, [-1] * 5]
    with pytest.raises((DimError, DataDependentError)):
        g(marked(4))


def test_unbacked_marks_refuse_no_sizes_of_other_tensors() -> None:
    f = hf.jit(lambda x, y: x + y)
    assert f(unbacked(5), unbacked(5)).shape == f(ones(1), ones(5)).shape == (5,)


@pytest.mark.parametrize("marked", [dynamic, unbacked])
def test_the_range_of_a_mark_is_a_guard(marked: Run) -> None:
    x = marked(4, min=2, max=8)
    module = hf.trace(lambda x: hf.sum(x), x, mode="symbolic")
    assert module(ones(8)).item() == 8
    match = r"`x.shape\[0\] <= 8`, as declared, fails: x.shape\[0\] = 9"
    with pytest.raises(GuardError, match=match):
        module(ones(9))


def test_a_recompile_names_the_mark() -> None:
    f = hf.jit(lambda x: x * 2)
    f(ones(4))
    x = dynamic(4, min=2, max=8)
    text = "was not marked, and is marked by `hf.mark_dynamic(x, 0, min=2, max=8)`"
    assert text in f.explain(x)
    f(x)
    assert f.explain(x) == f.explain(ones(8)) == "runs what has been compiled"
    assert "`x.shape[0] <= 8`, as declared, no longer holds" in f.explain(ones(9))
    narrow = dynamic(4, may_narrow=True)
    assert "max=8)`, and is marked by `hf.mark_dynamic(x, 0, may" in f.explain(narrow)
    g = hf.jit(lambda x: x * 2)
    g(unbacked(4))
    text = "`x.shape[0]` was marked by `hf.mark_unbacked(x, 0)`, and is not marked"
    assert g.explain(ones(4)) == f"recompiled because {text}"


def test_an_axis_without_a_choice_is_as_it_is_marked() -> None:
    for dynamic_ in (None, {"x": {0: None}}, {"x": None}):
        module = hf.trace(lambda x: x, dynamic(4), mode="symbolic", dynamic=dynamic_)
        assert str(module.graph.operands[0].type) == "f32[s0]"


def test_a_mark_is_of_one_tensor_and_no_part_of_its_type() -> None:
    x = ones(5)
    plain = x.type
    hf.mark_dynamic(x, 0)
    assert x.type == plain
    assert plain == x.type
    assert hash(x.type) == hash(plain)
    assert x.type != ones(4).type
    f = hf.jit(lambda x: x)
    f(x + 1)
    assert str(f.graph.operands[0].type) == "f32[5]"


def test_what_is_chosen_for_an_argument_goes_before_its_marks() -> None:
    x = ones(5)
    hf.mark_dynamic(x, 0)
    f = hf.jit(lambda x: x, dynamic=False)
    f(x)
    assert str(f.graph.operands[0].type) == "f32[5]"


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: hf.mark_dynamic(3, 0), ArgumentTypeError, "must be a tensor with mem"),
        (lambda: hf.mark_dynamic(ones(3), 1), AxisError, "mark_dynamic: `axis` is 1"),
        (
            lambda: hf.mark_unbacked(ones(3), 0, min=4),
            ArgumentValueError,
            "mark_unbacked: axis 0 of the tensor has size 3, and must have one from 4",
        ),
        (
            lambda: hf.mark_dynamic(ones(3), 0, max=2),
            ArgumentValueError,
            "from 0 to 2, with a `min` of at least 0",
        ),
    ],
)
def test_marks_are_checked(make: Run, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        make()


# --- 0 and 1 --------------------------------------------------------------------------


def test_explain_says_which_sizes_are_0_or_1() -> None:
    f = hf.jit(lambda x, y: x + y)
    x, y = ones(3, 4), ones(3, 1)
    f(x, y)
    expected = "runs what has been compiled, which is for y.shape[1] == 1 only"
    assert f.explain(x, y) == expected
    g = hf.jit(lambda x, y: x + y, dynamic=True)
    g(x, y)
    text = g.explain(x, y)
    assert text.startswith(
        "runs what has been compiled, which is for y.shape[1] == 1 ("
    )
    assert "test_declared_sizes.py:" in text
    assert g.explain(x, x) != text
