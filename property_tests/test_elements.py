"""An element is a value, a row is a view: in every mode as in NumPy."""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hopflow as hf

ROWS, COLUMNS = 3, 4


class Step(NamedTuple):
    """One statement: what it does, at which row and column, and to which value."""

    action: str
    row: int
    column: int
    kept: int
    kind: str  # of the indices: Python's ints, tensors of no axes, or NumPy's ints


ACTIONS: Final = [
    *("keep", "keep at last", "store", "store number", "add to element"),
    *("change kept", "keep row", "store into row", "swap", "keep slice", "new axis"),
]
steps = st.lists(
    st.builds(
        Step,
        st.sampled_from(ACTIONS),
        st.integers(-ROWS, ROWS - 1),
        st.integers(-COLUMNS, COLUMNS - 1),
        st.integers(0, 3),
        st.sampled_from(["int", "tensor", "numpy"]),
    ),
    max_size=8,
)


def program(script: list[Step], index: Callable[[int, str], Any]) -> Any:
    """A function that runs the statements on a matrix `x` and a vector `y`."""

    def run(x: Any, y: Any) -> Any:
        kept = [y[0], y[1]]
        for s in script:
            at = index(s.row, s.kind), index(s.column, s.kind)
            place = s.kept % len(kept)
            match s.action:
                case "keep":
                    kept.append(x[at])
                case "keep at last":
                    kept.append(y[at[1]])
                case "store":
                    x[at] = kept[place]
                case "store number":
                    y[at[1]] = 7.0
                case "add to element":
                    x[at] += 10.0
                    y[at[1]] *= 2.0
                case "change kept":
                    kept[place] += 100.0
                case "keep row":
                    row = x[at[0]]
                    row[at[1]] = kept[place]
                    kept.append(row[at[1]])
                case "store into row":
                    x[at[0]][at[1]] -= 3.0
                case "swap":
                    x[at], y[at[1]] = y[at[1]], x[at]
                case "keep slice":
                    part = x[s.row : s.row + 1 or None, s.column, None]
                    part[0] += 1000.0
                    kept.append(part[0, 0])
                case _:
                    x[(*at, None)][0] = kept[place]
        return tuple(kept), x.copy(), y.copy()

    return run


def as_python(number: int, _: str) -> int:
    return number


def as_asked(number: int, kind: str) -> Any:
    if kind == "tensor":
        return hf.asarray(number)
    return np.int64(number) if kind == "numpy" else number


def debugged(f: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        with hf.debug():
            return f(*args)

    return run


def in_a_body(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, y: hf.cond(hf.asarray(True), f, f, (x, y))


def in_a_loop(f: Callable[..., Any]) -> Callable[..., Any]:
    def run(x: Any, y: Any) -> Any:
        kept, *_ = f(x.copy(), y.copy())

        def step(_: Any, __: Any, x: Any, y: Any) -> Any:
            return f(x, y)

        found = hf.fori_loop(0, 1, step, (kept, x, y))
        x[:], y[:] = found[1:]
        return found

    jitted: Callable[..., Any] = hf.jit(run)
    return jitted


MODES: Final[dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]]] = {
    "eager": lambda f: f,
    "debug": debugged,
    "jit": hf.jit,
    "dynamic": lambda f: hf.jit(f, dynamic=True),
    "interpreter": lambda f: hf.jit(f, backend="interpreter"),
    "functionalize": hf.functionalize,
    "trace": lambda f: lambda *args: hf.trace(f, *args)(*args),
    "body": in_a_body,
    "loop": in_a_loop,
}


@pytest.mark.parametrize("mode", MODES)
@given(script=steps)
def test_elements_are_values_and_rows_are_views(mode: str, script: list[Step]) -> None:
    x, y = np.arange(12.0).reshape(ROWS, COLUMNS), np.arange(20.0, 24.0)
    mine = hf.asarray(x.copy()), hf.asarray(y.copy())
    wanted = program(script, as_python)(x, y)
    found = MODES[mode](program(script, as_asked))(*mine)
    for got, want in zip(found[0], wanted[0], strict=True):
        np.testing.assert_array_equal(got, want)
    for got, want in zip((*found[1:], *mine), (*wanted[1:], x, y), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("mode", [m for m in MODES if m not in ("body", "loop")])
@pytest.mark.parametrize(
    ("take", "is_view"),
    [
        (lambda x: x[1], False),
        (lambda x: x[-1], False),
        (lambda x: x[np.int8(1)], False),
        (lambda x: x[x.shape[0] - 1], False),
        (lambda x: x[hf.asarray(1)], False),
        (lambda x: x[1, ...], True),
        (lambda x: x[1, None], True),
        (lambda x: x[1:], True),
        (lambda x: hf.reshape(x, (1, 2))[0], True),
        (lambda x: hf.reshape(x, (2, 1))[1, 0], False),
        (lambda x: x[hf.asarray([1])], False),
        (lambda x: list(x)[1], False),
        (lambda x: hf.sum(x)[()], False),
    ],
)
def test_which_index_gives_a_view(mode: str, take: Any, is_view: bool) -> None:
    def write(x: Any) -> Any:
        part = take(x)
        before = part + 0
        x += 5.0
        return hf.all(part == before)

    assert bool(MODES[mode](write)(hf.asarray([1.0, 2.0]))) is not is_view


@pytest.mark.parametrize("mode", [m for m in MODES if m not in ("body", "loop")])
def test_a_result_that_is_an_element_is_a_value(mode: str) -> None:
    x = hf.asarray([1.0, 2.0])
    element = MODES[mode](lambda x: x[0])(x)
    x[0] = 5.0
    element += 1.0
    assert (float(element), x.tolist()) == (2.0, [5.0, 2.0])
