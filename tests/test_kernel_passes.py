"""Passes over kernel programs: the text of small programs before and after."""

import contextlib
import re
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any, Final

import numpy as np
import pytest

import hopflow as hf
from hopflow import pytree
from hopflow.compiler.kernel_passes import Context
from hopflow.compiler.kernel_passes.branches import DEEPEST, branches
from hopflow.compiler.kernel_passes.carries import MOST_ROUNDS, carries
from hopflow.compiler.kernel_passes.checks import checks
from hopflow.compiler.kernel_passes.counters import counters
from hopflow.compiler.kernel_passes.flags import flags
from hopflow.compiler.kernel_passes.hoist import hoist
from hopflow.compiler.kernel_passes.implied_conditions import implied_conditions
from hopflow.compiler.kernel_passes.inline import inline
from hopflow.compiler.kernel_passes.pack import pack
from hopflow.compiler.kernel_passes.postpone import postpone
from hopflow.compiler.kernel_passes.short_updates import short_updates
from hopflow.compiler.kernel_passes.simplify import simplify
from hopflow.compiler.kernel_passes.split import BRIEF, MOST, split
from hopflow.compiler.kernel_passes.step_checks import step_checks
from hopflow.compiler.kernel_passes.transposed import transposed
from hopflow.compiler.kernel_passes.unit_axes import unit_axes
from hopflow.compiler.kernel_program.printer import format_kernels
from hopflow.compiler.kernel_program.rewriting import all_blocks
from hopflow.compiler.kernel_program.verifier import verify_kernels
from hopflow.compiler.pipeline import kernels_of
from hopflow.compiler.schedule import schedule as S
from hopflow.errors import CheckError, IndexingError
from hopflow.graph.rewriting import effects

pytestmark = pytest.mark.slow

X = np.arange(8.0)
Pass = Callable[..., None]


def after(*passes: Pass, of: Callable[..., Any], args: Any, **context: Any) -> str:
    """The text of a function's kernel program after some passes, without its first
    line."""
    program = kernels_of(hf.trace(of, *args).graph)
    for run in passes:
        run(program, Context(**context))
        verify_kernels(program)
    return "\n".join(format_kernels(program).splitlines()[1:])


def lines(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines()]


# --- carries --------------------------------------------------------------------------


def loop_of(text: str) -> list[str]:
    """The carries of the first loop in a text, by the values that they begin with."""
    header = next(line for line in lines(text) if ", carry " in line)
    parts = header.partition(", carry ")[2].rstrip(":").split(", ")
    return [part.partition(" = ")[2] for part in parts]


def counted(x: Any) -> Any:
    def step(i: Any, j: Any, y: Any, z: Any) -> Any:
        return i + 1, j + 1, y * x + i, z * x + j

    return hf.while_loop(lambda i, *_: i < 5, step, (0, 0, x, x))


def apart(x: Any) -> Any:
    """The counters are equal, and so are not what they count."""

    def step(i: Any, j: Any, y: Any, z: Any) -> Any:
        return i + 1, j + 1, y * x + i, z * x - j

    return hf.while_loop(lambda i, *_: i < 5, step, (0, 0, x, x))


def constant(x: Any) -> Any:
    def step(i: Any, c: Any, k: Any, y: Any) -> Any:
        return i + k, c, 1, y * c

    return hf.while_loop(lambda i, *_: i < 5, step, (0, x + 1.0, 1, x))


def nested(x: Any) -> Any:
    def step(_: Any, c: Any, e: Any) -> Any:
        inner = hf.fori_loop(0, 2, lambda _, a, b, d: (a * x, b, a), (c, e, e))
        return inner[:2]

    return hf.fori_loop(0, 3, step, (x, x * 2.0))


@pytest.mark.parametrize(
    ("f", "left"),
    [
        (counted, ["0", "x"]),
        (apart, ["0", "x", "x"]),
        (constant, ["0", "x"]),
        (nested, ["0", "x"]),
    ],
)
def test_carries_that_are_other_values_go(f: Any, left: list[str]) -> None:
    assert loop_of(after(carries, of=f, args=(X,))) == left
    for dynamic in (None, True):
        run = hf.jit(f, dynamic=dynamic)
        found, expected = pytree.flatten(run(X))[0], pytree.flatten(f(X))[0]
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def test_a_queue_of_carries_is_not_parted_one_by_one() -> None:
    """Numbering the body for each of them would take quadratic time."""

    def queue(x: Any) -> Any:
        def step(i: Any, *held: Any) -> Any:
            return hf.sum(x) + i, *held[:-1]

        return hf.fori_loop(0, 7, step, (0.0,) * (MOST_ROUNDS + 5))

    left = loop_of(after(carries, of=queue, args=(X,)))
    assert len(left) == MOST_ROUNDS + 6
    assert [float(v) for v in hf.jit(queue)(X)] == [float(v) for v in queue(X)]


def test_an_equation_that_only_a_carry_needed_goes_with_it() -> None:
    found = lines(after(carries, of=counted, args=(X,)))
    assert len([line for line in found if "x[i0]" in line]) == 1


def test_carries_of_changing_sizes_stay() -> None:
    def f(x: Any) -> Any:
        sizes = {"a": {0: True}, "b": {0: True}}
        return hf.while_loop(
            lambda i, a, b: i < 2,
            lambda i, a, b: (i + 1, hf.concat([a, a]), hf.concat([b, b])),
            (0, x, x),
            dynamic_carry=sizes,
        )[1:]

    for found, expected in zip(hf.jit(f)(X), f(X), strict=True):
        np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))


# --- hoist ----------------------------------------------------------------------------


def test_what_no_step_changes_is_computed_before_the_loop() -> None:
    found = after(
        hoist,
        of=lambda x, y: hf.fori_loop(0, 3, lambda _, c: c + y * 2.0, x),
        args=(X, X),
    )
    assert found.startswith("    v8: f64[8] = y[i0] * 2.0 for i0 < 8\n")


def test_an_equation_may_leave_several_loops() -> None:
    def inner(c: Any, y: Any) -> Any:
        return hf.fori_loop(0, 3, lambda _, c: c + y * 2.0, c)

    found = after(
        hoist,
        of=lambda x, y: hf.fori_loop(0, 3, lambda _, c: inner(c, y), x),
        args=(X, X),
    )
    assert lines(found)[0].endswith("y[i0] * 2.0 for i0 < 8")


@pytest.mark.parametrize(
    "body",
    [
        lambda c, y, k: c + y[k],  # may stop the program
        lambda c, y, k: c + hf.random.uniform(hf.random.key(k), (8,))[0] * c,
    ],
)
def test_what_may_stop_the_program_stays_in_the_loop(body: Any) -> None:
    found = after(
        checks,
        hoist,
        of=lambda x, y, k: hf.fori_loop(0, 3, lambda _, c: body(c, y, k), x),
        args=(X, X, hf.asarray(3)),
    )
    stops = [n for n, line in enumerate(lines(found)) if line.startswith("check ")]
    loop = next(n for n, line in enumerate(lines(found)) if " = while" in line)
    assert all(n > loop for n in stops)


def test_a_definition_with_a_check_stays_whatever_its_node_says() -> None:
    def f(x: Any, k: Any) -> Any:
        return hf.fori_loop(0, k, lambda _, c: c + x[k] * 2.0, 0.0)

    program = kernels_of(hf.trace(f, X, hf.asarray(3)).graph)
    found = [q for b in all_blocks(program.block) for q in b.equations]
    [reading] = [q for q in found if getattr(q.definition, "checks", ())]
    reading.node = next(q.node for q in found if not effects(q.node))
    hoist(program, Context())
    assert reading not in program.block.equations


# --- counters -------------------------------------------------------------------------


def counting(*args: Any, of: Callable[..., Any], **options: Any) -> list[str]:
    """The headers of the loops of a function after `counters`."""
    found = after(carries, hoist, counters, of=of, args=args, **options)
    return [x.partition(" = ")[2] for x in lines(found) if is_header(x)]


def is_header(line: str) -> bool:
    return " = for " in line or " = while" in line


def while_counts(test: Any, step: Any, first: Any = 0) -> Any:
    return lambda x: hf.while_loop(
        lambda i, _: test(i), lambda i, c: (step(i), c * 2.0 + x[0]), (first, 0.0)
    )


@pytest.mark.parametrize(
    ("f", "want"),
    [
        (lambda x: hf.fori_loop(0, 5, lambda i, c: c + x[i], 0.0), "for t0 < 5"),
        (lambda x: hf.fori_loop(2, 5, lambda i, c: c + x[i], 0.0), "for t0 < 3"),
        (while_counts(lambda i: i < 7, lambda i: i + 2), "for t0 < 4"),
        (while_counts(lambda i: hf.greater(7, i), lambda i: 2 + i), "for t0 < 4"),
        (while_counts(lambda i: i <= 6, lambda i: i + 2), "for t0 < 4"),
        (
            while_counts(lambda i: hf.greater_equal(6, i), lambda i: i - -2),
            "for t0 < 4",
        ),
        (while_counts(lambda i: i != 6, lambda i: i + 1, 4), "for t0 < 2"),
        (while_counts(lambda i: i > 0, lambda i: i - 1, 7), "for t0 < 7"),
        (while_counts(lambda i: i >= 1, lambda i: i - 3, 7), "for t0 < 3"),
        (while_counts(lambda i: hf.less(1, i), lambda i: -2 + i, 7), "for t0 < 3"),
        (while_counts(lambda i: i != -6, lambda i: i - 1, -4), "for t0 < 2"),
    ],
)
def test_a_loop_that_counts_is_a_counted_loop(f: Any, want: str) -> None:
    [found] = counting(X, of=f)
    assert found.partition(", carry ")[0] == want
    np.testing.assert_array_equal(
        np.asarray(pytree.flatten(hf.jit(f)(X))[0]),
        np.asarray(pytree.flatten(f(hf.asarray(X)))[0]),
    )


@pytest.mark.parametrize(
    "f",
    [
        while_counts(lambda i: i < 7, lambda i: i * 2, 1),
        while_counts(lambda i: i > 9, lambda i: i + 1, 9),
        while_counts(lambda i: i < 7, lambda i: i - 1, 7),
        while_counts(lambda i: i != 7, lambda i: i + 2, 1),
        while_counts(lambda i: i != 7, lambda i: i + 1, 8),
        while_counts(lambda i: i != 8, lambda i: i - 1, 7),
        while_counts(lambda i: i < 7.0, lambda i: i + 1.0, 0.0),
        while_counts(lambda i: hf.logical_and(i < 7, i < 8), lambda i: i + 1),
        lambda x: hf.while_loop(  # its end moves
            lambda i, n: i < n, lambda i, n: (i + 1, n - 1), (0, 9)
        ),
        lambda x: hf.while_loop(  # it might wrap around
            lambda i: i < hf.astype(hf.sum(x), hf.int64), lambda i: i + 2, 0
        ),
        lambda x: hf.while_loop(
            lambda i: i <= hf.astype(hf.sum(x), hf.int64), lambda i: i + 1, 0
        ),
        lambda x: hf.while_loop(  # its limit might be reached
            lambda i, c: i < 9, lambda i, c: (i + 1, c + x[0]), (0, 0.0), max_steps=8
        ),
        lambda x: hf.while_loop(  # it tells that it does not know its end
            lambda i: i < 9, lambda i: i + 1, 0, progress="loop"
        ),
    ],
)
def test_other_loops_keep_their_tests(f: Any) -> None:
    [found] = counting(X, of=f)
    assert found.startswith("while")


@pytest.mark.parametrize(
    "first", [lambda: 0, lambda: hf.full((), 12, dtype=hf.int64) % 4 - 1 + 1]
)
def test_a_loop_that_makes_no_step_is_gone_with_what_it_reads(first: Any) -> None:
    def f(x: Any) -> Any:
        def step(c: Any, y: Any) -> Any:
            order = hf.argsort(hf.sum(x[:, None] * x, axis=0))
            return c - 1, y + x[order]

        return hf.while_loop(lambda c, y: c > 0, step, (first(), x))

    found = lines(after(carries, hoist, counters, of=f, args=(X,)))
    assert not any("argsort" in x or is_header(x) for x in found)
    count, y = hf.jit(f)(X)
    assert int(count) == 0
    np.testing.assert_array_equal(np.asarray(y), X)


@pytest.mark.parametrize("reverse", [False, True])
def test_a_scan_of_no_rows_gives_its_carry_and_no_rows(reverse: bool) -> None:
    def f(x: Any) -> Any:
        def step(c: Any, row: Any) -> Any:
            y = c + row
            return y, (y > 0, hf.stack([y, y]))

        return hf.scan(step, x, hf.zeros((0, 8)), reverse=reverse)

    run = hf.jit(f)
    for got, want in zip(*(pytree.flatten(g(X))[0] for g in (run, f)), strict=True):
        assert got.shape == want.shape
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))
    assert "for step" not in run.loop_ir


def test_a_loop_of_no_steps_that_defines_a_size_stays() -> None:
    def f(x: Any) -> Any:
        _, y = hf.while_loop(
            lambda i, y: i < 0,
            lambda i, y: (i + 1, hf.concat([y, y[:1]])),
            (0, x),
            dynamic_carry={"y": {0: hf.Dim("n")}},
        )
        return hf.sum(y) * y

    np.testing.assert_allclose(np.asarray(hf.jit(f)(X)), X * np.sum(X))


def test_arrays_of_no_elements_read_nothing() -> None:
    def f(x: Any) -> Any:
        total = hf.sum(hf.exp(x))
        return hf.broadcast_to(total, (0, 3)), hf.sort(x)[:0] + total

    found = lines(after(of=f, args=(X,)))
    assert [x.split(" = ")[1].strip() for x in found if " = " in x] == [
        "0.0 for i0 < 0, i1 < 3",
        "0.0 for i0 < 0",
    ]
    assert [x.shape for x in hf.jit(f)(X)] == [(0, 3), (0,)]


def test_an_index_out_of_range_stops_even_if_nothing_is_read() -> None:
    run = hf.jit(lambda x, k: x[k])
    with pytest.raises(IndexingError):
        run(np.zeros((3, 0)), hf.asarray(5))


def test_a_limit_that_is_not_reached_is_gone() -> None:
    def f(x: Any) -> Any:
        return hf.while_loop(
            lambda i, c: i < 8, lambda i, c: (i + 1, c + x[i]), (0, 0.0), max_steps=8
        )

    [found] = counting(X, of=f)
    assert found.startswith("for t0 < 8")


def test_a_number_of_steps_that_only_the_run_knows_is_a_size() -> None:
    found = lines(
        after(
            counters,
            of=lambda x, n: hf.fori_loop(1, n, lambda i, c: c + x[i], 0.0),
            args=(X, hf.asarray(3)),
        )
    )
    assert found[0] == "steps0: i64[] is steps0 = max(n[], 1) - 1"
    assert " = for t0 < steps0, carry " in found[1]


@pytest.mark.parametrize("reverse", [False, True])
def test_integers_that_change_by_a_constant_are_no_carries(reverse: bool) -> None:
    def f(x: Any) -> Any:
        def step(c: Any, a: Any) -> Any:
            i, j, y = c
            return (i + 1, j - 3, y + a * j), i

        return hf.scan(step, (5, 7, 0.0), x, reverse=reverse)

    found = after(counters, of=f, args=(X,))
    assert loop_of(found) == ["0.0"]
    row = "7 - i0 + 5" if reverse else "i0 + 5"
    assert any(x.endswith(f" = {row} for i0 < 8") for x in lines(found))
    both = (pytree.flatten(g(X))[0] for g in (hf.jit(f), f))
    for got, want in zip(*both, strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


def test_a_loop_that_only_counts_takes_no_step() -> None:
    def f(n: Any) -> Any:
        return hf.while_loop(lambda i: i < n, lambda i: i + 1, 3)

    assert counting(hf.asarray(1 << 60), of=f) == []
    assert [int(hf.jit(f)(hf.asarray(n))) for n in (-1, 3, 1 << 60)] == [3, 3, 1 << 60]


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize(
    "f",
    [
        lambda x: hf.fori_loop(0, x.shape[0], lambda i, c: c + x[i], 0.0),
        lambda x: hf.fori_loop(
            1, x.shape[0] - 1, lambda i, c: c + x[i - 1] * x[i + 1], 0.0
        ),
        lambda x: hf.grad(
            lambda x: hf.fori_loop(0, x.shape[0], lambda i, c: c * x[i], 1.0)
        )(x),
        lambda x: hf.fori_loop(
            0,
            hf.asarray(3, dtype=hf.int32),
            lambda i, c: c * hf.full((3,), 2.0)[hf.minimum(i, 2)],
            x,
        ),
    ],
)
def test_an_index_that_a_loop_counts_is_not_checked(f: Any, dynamic: Any) -> None:
    run = hf.jit(f, dynamic=dynamic)
    np.testing.assert_array_equal(np.asarray(run(X)), np.asarray(f(hf.asarray(X))))
    assert "trap" not in run.loop_ir


def test_a_loop_of_more_steps_than_there_are_numbers_begins() -> None:
    """Its body ends it; the difference of its bounds is no i64."""

    def step(i: Any, c: Any) -> Any:
        hf.check(c < 3, "three steps")
        return c + 1

    run = hf.jit(lambda a, b: hf.fori_loop(a, b, step, 0))
    with pytest.raises(CheckError, match="three steps"):
        run(hf.asarray(-(2**63)), hf.asarray(2**63 - 1))


COUNTERS = (hf.int8, hf.uint8, hf.int32, hf.int64, hf.uint64)
TESTS: dict[str, Callable[[Any, Any], Any]] = {
    "<": lambda i, n: i < n,
    "<=": lambda i, n: i <= n,
    ">": lambda i, n: i > n,
    ">=": lambda i, n: i >= n,
    "!=": lambda i, n: i != n,
}


def simulated(test: Any, first: Any, last: Any, step: int) -> Any:
    """What a loop counts to, by numbers of NumPy that wrap around, and in how many
    steps; None: in too many."""
    with np.errstate(over="ignore"):
        for steps in range(300):
            if not test(first, last):
                return first, steps
            size = first.dtype.type(abs(step))
            first = first.dtype.type(first + size if step > 0 else first - size)
    return None


@pytest.mark.parametrize("known", ["none", "first", "last"])
@pytest.mark.parametrize("step", [1, 3, 100, -1, -3, -100])
@pytest.mark.parametrize("test", TESTS)
@pytest.mark.parametrize("dtype", COUNTERS, ids=str)
def test_loops_count_as_they_do_step_by_step(
    dtype: Any, test: str, step: int, known: str
) -> None:
    info, holds = np.iinfo(dtype.dtype), TESTS[test]
    ends = sorted({info.min, info.min + 2, 0, 5, 100, info.max - 2, info.max})
    numbers = [dtype.dtype.type(n) for n in ends]

    def f(first: Any, last: Any) -> Any:
        return hf.while_loop(
            lambda i, _: holds(i, last),
            lambda i, k: (i + size if step > 0 else i - size, k + 1),
            (first, 0),
        )

    size = hf.asarray(abs(step), dtype=dtype)
    run = hf.jit(f)
    for first, last in product(numbers, numbers):
        want = simulated(holds, first, last, step)
        if want is None:
            continue
        if known == "none":
            got = run(hf.asarray(first), hf.asarray(last))
        elif known == "first":
            got = hf.jit(partial(f, hf.asarray(first)))(hf.asarray(last))
        else:
            got = hf.jit(partial(f, last=hf.asarray(last)))(hf.asarray(first))
        assert [int(x) for x in got] == [int(x) for x in want], (first, last)


# --- checks ---------------------------------------------------------------------------


def test_a_check_is_an_equation_before_what_it_guards() -> None:
    args = X, hf.asarray(3)
    program = kernels_of(hf.trace(lambda x, k: x[k] * 2.0, *args).graph)
    assert len(program.block.equations) == 2
    checks(program, Context())
    check, view, _ = program.block.equations
    assert check.results == ()
    assert getattr(view.definition, "checks", None) == ()


AT = hf.asarray([0, 2, -1, 7, -8])
HOLDS = "k[i0] >= -8 and k[i0] < 8"


def test_where_each_element_has_a_check_nothing_relies_on_it() -> None:
    found = lines(after(checks, of=lambda x, k: x[k] * 2.0, args=(X, AT)))
    [read, check, *_] = found
    assert read.endswith(f"if {HOLDS}) for i0 < 5")
    assert check == f"free check index: {HOLDS} tell k[i0], 8 for i0 < 5"


@pytest.mark.parametrize(
    ("f", "args"),
    [
        (lambda x, k: x[:, None][k], (X, AT)),  # rows: fewer checks than elements
        (lambda a, b: a[:, None] // b, (AT, AT + 9)),  # fewer checks than elements
        (lambda x, k: hf.take(x, k[:4]), (X, AT)),  # in registers
    ],
)
def test_other_checks_come_before_the_elements(
    f: Any, args: tuple[hf.Tensor, ...]
) -> None:
    assert "free check" not in after(checks, of=f, args=args)
    agree(f, *args)


def test_a_check_is_made_once() -> None:
    def f(x: Any, k: Any) -> Any:
        return x[k] * 2.0, x[k] + x[: x.shape[0]][k], x[:7][k]

    found = after(checks, of=f, args=(X, AT))
    assert found.count("free check index: ") == 2  # below 8, and below 7
    agree(lambda x, k: f(x, k)[1], X, AT % 7)


def test_a_check_that_guards_is_not_left_to_a_free_one() -> None:
    def f(x: Any, y: Any, k: Any) -> Any:
        return x[k], y[k]  # elements, and rows

    found = after(checks, of=f, args=(X, np.ones((8, 3)), AT))
    assert found.count("check index: ") == 2
    assert found.count("free check index: ") == 1
    again = after(checks, of=lambda x, y, k: f(x, y, k)[::-1], args=(X, X, AT))
    assert again.count("check index: ") == 1
    turned = after(
        checks, of=lambda x, y, k: (y[k], x[k]), args=(X, np.ones((8, 3)), AT)
    )
    assert turned.count("check index: ") == 1


POSTPONED = carries, flags, hoist, checks, counters, inline, simplify, postpone


def order(f: Any, *args: Any) -> list[str]:
    """The names of the equations after `postpone`, "check" for free checks."""
    found = lines(after(*POSTPONED, of=f, args=args))
    names = [line.split(":")[0] for line in found]
    return ["check" if "check" in name else name for name in names]


def test_a_free_check_comes_after_loops_over_its_space() -> None:
    def f(x: Any, k: Any, l: Any) -> Any:  # noqa: E741
        a = hf.sin(x[k]) * x[l]
        return a, hf.sum(a), hf.sum(a[:3])

    assert order(f, X, AT, AT) == [
        "v3",
        "v4",
        "check",
        "check",
        "v6",
        "return v3, v4, v6",
    ]
    agree(lambda *args: f(*args)[0], X, AT, AT)
    jitted = hf.jit(f)
    jitted(X, AT, AT)
    # One for all, and two that seek what is out of range.
    assert jitted.loop_ir.count("for ") == 3


@pytest.mark.parametrize("effect", ["write", "print"])
def test_a_free_check_comes_before_effects(
    effect: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def f(x: Any, y: Any, k: Any) -> Any:
        y = y + x[k]
        if effect == "print":
            hf.print("reached {}", y[0])
        else:
            x[:5] += y
        return y

    jitted, x = hf.jit(f), hf.asarray(np.arange(8.0))
    jitted(x, X[:5], AT)
    assert (effect == "print") == ("reached" in capsys.readouterr().out)
    before = x.tolist()
    for bad in ([0, 1, 2, 3, 8], [-9, 0, 0, 0, 0], [1 << 62] * 5):
        with pytest.raises(IndexingError, match=f"index {max(bad, key=abs)} is out"):
            jitted(x, X[:5], hf.asarray(bad))
    assert x.tolist() == before
    assert capsys.readouterr().out == ""


def test_a_free_check_keeps_no_copy_of_what_it_asks() -> None:
    def f(k: Any) -> Any:
        return hf.fori_loop(0, 3, lambda _, c: c[c], k)

    args = (hf.asarray(np.arange(8)[::-1].copy()),)
    assert hf.jit(f)(*args).tolist() == f(*args).tolist()
    found = lines(after(*POSTPONED, of=f, args=args))
    check = next(n for n, line in enumerate(found) if line.startswith("free check"))
    assert " if c" in found[check + 1]  # the read, which may be made in what it reads


@pytest.mark.parametrize(
    "dtype", ["int8", "uint8", "int32", "uint32", "int64", "uint64"]
)
@pytest.mark.parametrize("n", [5, 64, 1000])
def test_an_index_out_of_range_stops_a_gather(dtype: str, n: int) -> None:
    x = hf.asarray(np.arange(100.0))
    f = hf.jit(lambda x, k: (hf.sum(hf.exp(-x[k])), x[k] + 1.0))
    good = np.arange(n) % 100
    total, moved = f(x, hf.asarray(good.astype(dtype)))
    np.testing.assert_allclose(total.item(), np.sum(np.exp(-good.astype(float))))
    assert moved.tolist() == (good + 1.0).tolist()
    for at in (0, n // 2, n - 1):
        bad = good.astype(dtype)
        bad[at] = 100
        with pytest.raises(IndexingError, match="index 100 is out of range"):
            f(x, hf.asarray(bad))


# --- implied conditions ---------------------------------------------------------------


IMPLIED = *POSTPONED, implied_conditions


def guarded(f: Any, *args: Any) -> list[str]:
    """The equations after `implied_conditions` that read under a condition."""
    found = lines(after(*IMPLIED, of=f, args=args))
    return [line for line in found if re.search(r"\(x\[.* if k\[", line)]


def test_what_an_earlier_check_has_found_guards_nothing() -> None:
    def f(x: Any, y: Any, k: Any) -> Any:
        return hf.segment_sum(x[k] * y, k * 2, 9)

    args = X, X[:5], AT
    assert "free check index: k" in after(*IMPLIED, of=f, args=args)
    assert guarded(f, *args) == []
    agree(f, *args)


@pytest.mark.parametrize(
    "f",
    [
        lambda x, k: x[k] + 1.0,
        lambda x, k: hf.sum(hf.sqrt(x[k])),
    ],
    ids=["element", "sum"],
)
def test_what_comes_before_its_check_is_guarded(f: Any) -> None:
    assert guarded(f, X, AT) != []
    agree(f, X, AT)


def test_a_guard_of_other_axes_of_the_same_sizes_is_redundant() -> None:
    def f(x: Any, y: Any, k: Any) -> Any:
        return y[:, None] + x[k]

    args = X, X[:1], AT
    assert "x[select(k[i1] < 0" in after(*IMPLIED, of=f, args=args)
    assert guarded(f, *args) == []
    agree(f, *args)


def test_a_check_of_a_part_says_nothing_of_the_whole() -> None:
    def f(x: Any, y: Any, k: Any) -> Any:
        return hf.segment_sum(x[k[:3]], k[:3] * 2, 9), hf.sum(hf.sqrt(x[k]))

    args = hf.asarray(X), hf.asarray(X), hf.asarray(np.array([0, 1, 2, 9, 9]))
    with pytest.raises(IndexingError, match="index 9 is out"):
        hf.jit(f)(*args)
    assert guarded(f, X, X, AT) != []


def test_a_check_of_the_first_elements_says_nothing_of_the_mask_that_counts_them() -> (
    None
):
    """The result of `nonzero` is as long as what the check is over; its mask is not."""

    def f(x: Any, k: Any, m: Any) -> Any:
        mask = (k < 8) & m
        n = hf.count_nonzero(mask).item()
        hf.check_is_size(n, max=k.shape[0])
        head = k[:n]
        return hf.segment_sum(x[head], head, 8), hf.nonzero(mask)[0]

    m = np.array([0, 1, 1, 0, 0, 0], bool)
    total, found = hf.jit(f)(X, np.array([0, 99, 1, 99, 2, 3]), m)
    assert total.tolist() == [0.0] * 8
    assert found.tolist() == [2]


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_check_of_no_elements_says_nothing(dynamic: bool) -> None:
    """No axis is in its condition, which fails, but there are no elements."""
    f = hf.jit(lambda d, rows: (rows // d, d != 0), dynamic=dynamic)
    assert [x.tolist() for x in f(np.array(2), np.array([4, 6]))] == [[2, 3], True]
    assert [x.tolist() for x in f(np.array(0), np.array([], int))] == [[], False]


def test_the_condition_of_a_check_is_true_in_inner_blocks_and_not_behind_its_own() -> (
    None
):
    def f(x: Any, y: Any, k: Any) -> Any:
        def step(i: Any, total: Any) -> Any:
            return total + hf.segment_sum(x[k + i] * y, k, 9)

        start = hf.zeros(9, dtype=hf.float64)
        return hf.fori_loop(0, hf.sum(k) * 0, step, start), x[k] + 1.0

    args = X, X[:5], AT
    assert guarded(f, *args) != []
    agree(lambda *args: f(*args)[0], *args)
    agree(lambda *args: f(*args)[1], *args)


def gathered(x: Any, k: Any) -> Any:
    return hf.fori_loop(0, 3, lambda _, c: c + x[k], x[:5] * 0.0)


def test_whether_a_check_passes_in_all_steps_is_computed_before_the_loop() -> None:
    found = lines(after(flags, hoist, checks, of=gathered, args=(X, AT)))
    loop = next(n for n, line in enumerate(found) if " = while" in line)
    holds = "k[i0] >= -8 and k[i0] < 8"
    flag = f"passed0: bool[] = reduce and from True of {holds} over i0 < 5"
    assert found.index(flag) < loop
    [check] = [n for n, line in enumerate(found) if line.startswith("check ")]
    assert check > loop
    assert found[check].startswith(f"check index: {holds} tell k[i0], 8 unless passed0")


def test_a_check_that_no_step_reaches_stops_nothing() -> None:
    def f(x: Any, k: Any, n: Any) -> Any:
        return hf.fori_loop(0, n, lambda _, c: c + x[k], x[:5] * 0.0)

    jitted, wrong = hf.jit(f), hf.asarray([0, 1, 2, 3, 8])
    assert jitted(X, wrong, hf.asarray(0)).tolist() == [0.0] * 5
    assert jitted(X, AT, hf.asarray(2)).tolist() == [0.0, 4.0, 14.0, 14.0, 0.0]
    with pytest.raises(IndexingError, match="index 8 is out of range"):
        jitted(X, wrong, hf.asarray(1))


def test_whether_a_proven_check_passes_is_not_computed() -> None:
    def f(x: Any) -> Any:
        return hf.fori_loop(0, 3, lambda _, c: c + x[hf.arange(5)], x[:5] * 0.0)

    found = after(flags, hoist, checks, inline, simplify, of=f, args=(X,))
    assert "passed" not in found
    assert "check" not in found


def test_a_check_of_what_a_step_computes_is_told_in_the_step() -> None:
    def f(x: Any, k: Any) -> Any:
        def step(i: Any, c: Any) -> Any:
            return c + x[(k + i) % 9]

        return hf.fori_loop(0, 3, step, x[:5] * 0.0)

    with pytest.raises(IndexingError, match="index 8 is out of range"):
        hf.jit(f)(X, AT)
    ours = hf.jit(f)(X, hf.asarray([0, 2, 1, 3, 4])).tolist()
    assert ours == f(hf.asarray(X), hf.asarray([0, 2, 1, 3, 4])).tolist()


# --- step checks ----------------------------------------------------------------------

STEPS = *IMPLIED, step_checks
TABLE, ROWS = np.arange(9.0), np.arange(48).reshape(6, 8) % 9


def looked_up(x: Any, table: Any, rows: Any) -> Any:
    """Steps that look numbers of their rows up."""
    step = lambda c, k: (c * 0.5 + table[k], None)  # noqa: E731
    return hf.vmap(lambda c, r: hf.scan(step, c, r)[0])(x, rows)


def neighbours(x: Any, table: Any, rows: Any) -> Any:
    n = rows.shape[1]

    def one(c: Any, r: Any) -> Any:
        step = lambda i, c: c * 0.5 + table[r[n - i]] * table[r[i - 1]]  # noqa: E731
        return hf.fori_loop(1, n, step, c)

    return hf.vmap(one)(x, rows)


def backwards(x: Any, table: Any, rows: Any) -> Any:
    step = lambda c, k: (c * 0.5 + table[k], None)  # noqa: E731
    scan = lambda c, r: hf.scan(step, c, r, reverse=True)[0]  # noqa: E731
    return hf.vmap(scan)(x, rows)


def in_other_steps(x: Any, table: Any, rows: Any) -> Any:
    """A check leaves both loops."""
    return hf.fori_loop(0, 2, lambda _, x: looked_up(x, table, rows), x)


def of_two_tables(x: Any, table: Any, rows: Any) -> Any:
    """Two checks of each step, of all rows after each other."""

    def step(c: Any, k: Any) -> Any:
        return c * 0.5 + table[k], table[:8][k - 1] + table[::-1][k * 1]

    return hf.vmap(lambda c, r: hf.scan(step, c, r))(x, rows)[0]


def with_a_number(x: Any, table: Any, rows: Any) -> Any:
    """A check of each row, and one of a number that all steps share."""
    first = rows[0, :1]

    def one(c: Any, r: Any) -> Any:
        step = lambda c, k: (c * 0.5 + table[k] * table[first[0]], None)  # noqa: E731
        return hf.scan(step, c, r)[0]

    return hf.vmap(one)(x, rows) if rows.shape[1] else x


LOOK_UPS = [looked_up, neighbours, backwards, in_other_steps]
LOOK_UPS += [of_two_tables, with_a_number]


def test_checks_of_steps_are_made_before_the_loop() -> None:
    text = lines(after(*STEPS, of=looked_up, args=(X[:6], TABLE, ROWS)))
    [at] = [k for k, line in enumerate(text) if " for t0 < 8, carry" in line]
    [flag] = [line for line in text if line.startswith("all_passed0: bool[] = reduce")]
    assert flag.endswith("over i0 < 6, i1 < 8")  # rows, as they lie
    [check] = [k for k, line in enumerate(text) if line.startswith("check index")]
    assert "rows[i0, t0_search] >= -9" in text[check]
    assert text.index(flag) < check < at
    assert not [line for line in text[at:] if " if " in line]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("f", LOOK_UPS)
def test_steps_without_checks_agree(f: Any, dynamic: bool) -> None:
    args = X[:6] / 9, TABLE, ROWS - 3
    with hf.debug():
        expected = np.asarray(f(*map(hf.asarray, args)))
    found = np.asarray(hf.jit(f, dynamic=dynamic)(*args))
    np.testing.assert_allclose(found, expected, rtol=1e-15)
    nothing = hf.jit(f)(args[0], TABLE, np.zeros((6, 0), np.int64))
    np.testing.assert_array_equal(np.asarray(nothing), args[0])


@pytest.mark.parametrize("bad", [{(4, 2): 9, (1, 5): 77}, {(0, 7): -10, (5, 0): 9}])
@pytest.mark.parametrize("f", LOOK_UPS)
def test_the_first_step_that_fails_is_reported(f: Any, bad: dict[Any, int]) -> None:
    rows = ROWS.copy()
    for at, index in bad.items():
        rows[at] = index
    args = [hf.asarray(x) for x in (X[:6], TABLE, rows)]
    with hf.debug(), pytest.raises(IndexingError) as expected:
        f(*args)
    with pytest.raises(IndexingError) as found:
        hf.jit(f)(*args)
    number = r"index (-?\d+) is out"
    assert re.findall(number, str(found.value)) == re.findall(
        number, str(expected.value)
    )


@pytest.mark.parametrize("kind", ["of the carry", "with another one", "ends early"])
def test_checks_that_are_not_alone_or_not_known_before_stay(kind: str) -> None:
    def f(x: Any, table: Any, rows: Any) -> Any:
        def step(c: Any, k: Any) -> Any:
            index = hf.astype(c, hf.int64) % 9 if kind == "of the carry" else k
            if kind == "with another one":
                hf.check(hf.all(c < 1e9), "large")
            return c * 0.5 + table[index], None

        if kind == "ends early":
            body = lambda c, i: (step(c, rows[:, i])[0], i + 1)  # noqa: E731
            head = lambda c, i: (i < 8) & (c[0] < 50)  # noqa: E731
            return hf.while_loop(head, body, (x, 0))[0]
        return hf.scan(step, x, rows.T)[0]

    args = X[:6], TABLE, ROWS
    assert "all_passed" not in after(*STEPS, of=f, args=args)
    agree(f, *args)


def test_a_check_that_all_steps_share_is_made_once() -> None:
    def f(x: Any, table: Any, rows: Any) -> Any:
        step = lambda c, _: (c * 0.5 + table[rows], None)  # noqa: E731
        return hf.scan(step, x, length=7)[0]

    args = X[:6], TABLE, ROWS[:, 0]
    text = lines(after(*STEPS, of=f, args=args))
    [check] = [line for line in text if line.startswith("check index")]
    assert check.endswith("unless passed0[] for i0 < 6")
    at = next(k for k, x in enumerate(text) if " for t0 < 7, carry" in x)
    assert text.index(check) < at
    assert not [x for x in text if "all_passed0: bool[] = reduce" in x]
    agree(f, *args)


def test_the_step_that_fails_is_sought_without_flags() -> None:
    def f(table: Any, rows: Any) -> Any:
        step = lambda c, k: (c * 0.5 + table[k], None)  # noqa: E731
        return hf.vmap(lambda r: hf.scan(step, hf.zeros(()), r)[0])(rows)

    table, rows = hf.ones(9), hf.asarray(np.arange(600).reshape(100, 6) % 9)
    jitted = hf.jit(f)
    agree(f, table, rows)
    jitted(table, rows)
    assert "failed" not in jitted.loop_ir
    with pytest.raises(IndexingError):
        jitted(table, rows + 1)


def test_a_check_that_all_steps_share_stays_where_there_may_be_none() -> None:
    def f(x: Any, rows: Any, table: Any) -> Any:
        step = lambda c, _: (c * 0.5 + table[rows], None)  # noqa: E731
        return hf.scan(step, x, table)[0]

    bad = hf.asarray(ROWS[:, 0] + 9)
    jitted = hf.jit(f, dynamic=True)
    with pytest.raises(IndexingError):
        jitted(hf.asarray(X[:6]), bad, hf.asarray(TABLE))
    nothing = jitted(hf.asarray(X[:6]), bad, hf.zeros((0,), dtype=hf.float64))
    np.testing.assert_array_equal(np.asarray(nothing), X[:6])


@pytest.mark.parametrize("steps", [51, 10**6, 10**8])
def test_no_step_behind_the_last_column_is_tested(steps: int) -> None:
    """The number of the step is checked, and then what is in that column."""

    def f(x: Any, table: Any, rows: Any, of_length: Any) -> Any:
        step = lambda i, c: c * 0.5 + table[rows[:, i]]  # noqa: E731
        return hf.fori_loop(0, of_length.shape[0], step, x)

    args = X[:6], TABLE, np.ones((6, 50), np.int64)
    jitted = hf.jit(f, dynamic=True)
    found = np.asarray(jitted(*args, np.zeros(30)))
    with hf.debug():
        expected = np.asarray(f(*map(hf.asarray, (*args, np.zeros(30)))))
    np.testing.assert_allclose(found, expected, rtol=1e-15)
    with pytest.raises(IndexingError, match="index 50 is out of range"):
        jitted(*args, np.broadcast_to(np.zeros(1), (steps,)))


@pytest.mark.parametrize("bad", [50, 10**9, -(10**11)])
def test_what_is_read_at_an_index_is_tested_after_the_index(bad: int) -> None:
    def f(x: Any, table: Any, rows: Any, ks: Any) -> Any:
        return hf.scan(lambda c, k: (c * 0.5 + table[rows[:, k]], None), x, ks)[0]

    def g(x: Any, table: Any, rows: Any, ks: Any) -> Any:
        step = lambda c, k: (c + table[rows[0][k]], None)  # noqa: E731
        return hf.vmap(lambda c: hf.scan(step, c, ks)[0])(x)

    ks = np.arange(30)
    ks[7] = bad
    args = X[:6], TABLE, np.ones((6, 50), np.int64), ks
    for h in (f, g):
        for dynamic in (False, True):
            with pytest.raises(IndexingError, match=f"index {bad} is out of range"):
                hf.jit(h, dynamic=dynamic)(*args)


# --- short updates --------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 4, 5])
def test_an_element_of_short_rows_is_chosen(size: int) -> None:
    def f(c: Any, k: Any, v: Any) -> Any:
        return hf.vmap(lambda c, k, v: c.at[k].add(v))(c, k, v)

    c = np.random.default_rng(0).normal(size=(6, size))
    args = c, np.arange(6) % size - size, X[:6]
    agree(f, *args)
    text = after(checks, short_updates, of=f, args=args)
    assert (" with [" in text) is (size > 4)


UPDATES: dict[str, Callable[..., Any]] = {
    "set": lambda c, k: c.at[k].set(9),
    "add": lambda c, k: c.at[k].add(5),
    "max": lambda c, k: c.at[k].max(4),
    "first": lambda c, k: c.at[0].set(c[k]),
    "last": lambda c, k: c.at[-1].mul(c[k - 1] + 2),
    "read and set": lambda c, k: c.at[k].set(c[k] * 2 - c[c.shape[0] - 1 - k]),
    "twice": lambda c, k: c.at[k].set(1).at[k - 1].add(c[k]),
    "branch": lambda c, k: hf.cond(k > 1, lambda: c.at[k].set(7), lambda: c * 2),
}


@pytest.mark.parametrize("dtype", ["float32", "float64", "int8", "uint32", "float16"])
@pytest.mark.parametrize("name", UPDATES)
def test_steps_that_update_short_rows(name: str, dtype: str) -> None:
    update = UPDATES[name]

    def one(c: Any, ks: Any) -> Any:
        step = lambda c, k: (hf.astype(update(c, k), c.dtype), c)  # noqa: E731
        return hf.scan(step, c, ks)

    for size in (3, 4):
        c = np.random.default_rng(0).integers(0, 9, (21, size)).astype(dtype)
        ks = np.random.default_rng(1).integers(0, size, (21, 7))
        for f in (hf.vmap(one), lambda c, ks: one(c[0], ks[0])):
            with hf.debug():
                expected = f(hf.asarray(c), hf.asarray(ks))
            for x, y in zip(hf.jit(f)(c, ks), expected, strict=True):
                np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def test_an_element_that_a_step_reads_of_short_rows_is_chosen() -> None:
    def f(c: Any, k: Any) -> Any:
        step = lambda c, k: (c.at[0].set(c[k] * 2), None)  # noqa: E731
        return hf.vmap(lambda c, k: hf.scan(step, c, k)[0])(c, k)

    c, k = np.random.default_rng(0).normal(size=(20, 4)), ROWS[:1].repeat(20, 0) % 4
    agree(f, c, k)
    text = after(*S.KERNEL_PASSES, of=f, args=(c, k))
    assert re.search(r"c\d+\[i0, 3\]", text)
    assert not re.search(r"c\d+\[i0, [^\]]*k\[", text)


def test_an_index_out_of_range_of_short_rows_stops_the_program() -> None:
    f = hf.vmap(lambda c, k: hf.fori_loop(0, 3, lambda i, c: c.at[k + i].add(1.0), c))
    with pytest.raises(IndexingError, match="index 3 is out of range"):
        hf.jit(f)(np.zeros((6, 3)), np.array([0, 0, 0, -3, 1, 0]))


def test_the_place_of_an_extremum_is_in_range() -> None:
    def f(c: Any) -> Any:
        step = lambda i, c: c.at[hf.argmin(c)].add(0.5)  # noqa: E731
        return hf.vmap(lambda c: hf.fori_loop(0, 5, step, c))(c)

    c = np.random.default_rng(0).normal(size=(6, 4))
    c[2, 1] = np.nan
    agree(f, c)
    passes = *POSTPONED[:-2], simplify
    assert "check" not in after(*passes, of=f, args=(c,))


# --- inline ---------------------------------------------------------------------------


def test_what_is_read_once_is_computed_where_it_is_read() -> None:
    found = after(
        checks,
        inline,
        of=lambda x: hf.sum((x * 2.0 + 1.0)[::-1]),
        args=(X,),
    )
    assert lines(found) == [
        "v3: f64[] = reduce add from 0.0 of x[i0 * -1 + 7] * 2.0 + 1.0 over i0 < 8",
        "return v3",
    ]


def test_what_is_dear_and_read_twice_is_stored() -> None:
    found = after(
        checks,
        inline,
        of=lambda x: hf.sin(x) + hf.roll(hf.sin(x), 1),
        args=(X,),
    )
    assert lines(found)[0] == "v0: f64[8] = sin(x[i0]) for i0 < 8"


@pytest.mark.parametrize(
    "f",
    [lambda y: y + hf.linalg.det(y), lambda y: (y.mT, y + 1.0)],
    ids=["library", "result"],
)
def test_a_view_in_memory_reads_what_it_views(f: Any) -> None:
    found = after(checks, inline, of=lambda x: f(hf.sin(x)), args=(np.eye(8),))
    assert found.count("sin(") == 1


def test_what_is_cheap_is_computed_again_for_each_reader() -> None:
    found = after(checks, inline, of=lambda x: (x + 1.0)[::-1] * (x + 1.0), args=(X,))
    assert len(lines(found)) == 2


@pytest.mark.parametrize(("side", "stored"), [(30, True), (600, False)])
def test_neighbours_of_a_large_array_are_computed_again(
    side: int, stored: bool
) -> None:
    """To store eight million bytes and to read them again costs more."""

    def edges(x: Any) -> Any:
        sums = x[:-2] + 2.0 * x[1:-1] + x[2:]
        return hf.abs(sums[:, 2:] - sums[:, :-2]) + hf.abs(sums[:, 1:-1])

    x = np.random.default_rng(0).normal(size=(side, side))
    found = lines(after(checks, inline, of=edges, args=(x,)))
    assert len(found) == (3 if stored else 2)
    agree(edges, x)


def test_what_is_dear_is_stored_whatever_its_size() -> None:
    def f(x: Any) -> Any:
        y = hf.sin(hf.exp(x))
        return y[2:] + y[1:-1] + y[:-2]

    found = lines(after(checks, inline, of=f, args=(np.zeros(1 << 18),)))
    assert len(found) == 3


SQUARE = np.arange(64.0).reshape(8, 8)


def before_steps(value: Any, read: Any, x: Any, y: Any) -> str:
    """The kernels before a loop whose steps read a value."""

    def f(x: Any, y: Any) -> Any:
        v = value(x)
        return hf.fori_loop(0, 8, lambda i, y: y * 0.5 + read(v, i), y)

    agree(f, x, y)
    found = after(flags, hoist, checks, counters, inline, of=f, args=(x, y))
    return found.partition(" loop ")[0]


@pytest.mark.parametrize(
    ("value", "read", "stored"),
    [
        (lambda x: x + x.T, lambda v, i: v, True),
        (lambda x: x * x[::-1] + 1.0, lambda v, i: v, True),
        (lambda x: (x * 2.0) + (x[::-1] - 1.0), lambda v, i: v, True),
        (lambda x: x + hf.sum(x, axis=0), lambda v, i: v, False),  # a row is smaller
        (lambda x: x * x, lambda v, i: v, False),  # one element of an array
        (lambda x: x + x.T, lambda v, i: v[i], False),  # of each element one step
    ],
)
def test_what_each_step_would_read_several_arrays_for_is_stored(
    value: Any, read: Any, stored: bool
) -> None:
    found = before_steps(value, read, SQUARE, SQUARE)
    assert ("f64[8, 8] = x" in found) == stored, found


def window(v: Any, i: Any) -> Any:
    return hf.sum(hf.dynamic_slice(v, (i, 0), (4, 8)), axis=0)


@pytest.mark.parametrize(
    ("value", "read", "stored"),
    [
        (lambda x: hf.pad(x, ((3, 0), (0, 0))), window, True),
        (lambda x: hf.concat([x[5:], x]), window, True),
        (lambda x: hf.roll(x, 3, axis=0), window, True),
        (lambda x: hf.where(x < 3.0, x, 0.0), window, False),  # no test of an index
        (lambda x: x[::-1] * 2.0, window, False),
        (lambda x: hf.pad(x, ((3, 0), (0, 0))), lambda v, i: v[i], False),  # once
    ],
)
def test_what_tests_of_indices_choose_is_stored_before_it_is_read_in_steps(
    value: Any, read: Any, stored: bool
) -> None:
    found = before_steps(value, read, SQUARE, SQUARE[0])
    assert bool(re.search(r"f64\[\d+, 8\] = ", found)) == stored, found


@pytest.mark.parametrize(
    ("update", "stored"),
    [
        (lambda rows: rows, False),
        (lambda rows: 3.0 * rows, False),
        (hf.exp, True),  # as vectors, and not for one index after the other
    ],
)
def test_a_scatter_computes_what_it_gathers(update: Any, stored: bool) -> None:
    """A row for each edge would be a large array."""

    def f(x: Any, heads: Any, tails: Any) -> Any:
        return hf.segment_sum(update(x[tails]), heads, 8)

    x, edges = np.random.default_rng(0).normal(size=(8, 3)), np.arange(20) % 8
    found = lines(after(checks, inline, of=f, args=(x, edges, edges[::-1])))
    assert any("f64[20" in line for line in found) == stored
    agree(f, x, edges, edges[::-1])


def test_a_scatter_reads_what_it_replaces_before_it_does() -> None:
    """Else all of the array had to be copied before, in each step."""

    def f(x: Any, at: Any) -> Any:
        def step(_: Any, x: Any) -> Any:
            return x.at[at].add(x[at[::-1]] * 2.0 + hf.sum(x[at[:2]]))

        return hf.fori_loop(0, 3, step, x)

    x, at = np.random.default_rng(0).normal(size=(50, 9)), np.array([3, 1, 4, 1, 5])
    jitted = hf.jit(f)
    with hf.debug():
        want = f(hf.asarray(x), hf.asarray(at))
    np.testing.assert_allclose(jitted(x, at), np.asarray(want), rtol=1e-12)
    steps = jitted.loop_ir.split("for step")[-1]
    assert "copy" not in steps
    assert "0..50" not in steps


def test_the_next_carries_of_one_shape_are_computed_at_once() -> None:
    found = after(
        hoist,
        checks,
        inline,
        of=lambda a, b: hf.fori_loop(0, 3, lambda _, a, b: (a + b, a - b), (a, b)),
        args=(X, X),
    )
    both = "c8[i0] + c9[i0], c8[i0] - c9[i0] for i0 < 8"
    assert any(line.endswith(both) for line in lines(found))


def test_what_reads_a_value_that_is_written_over_is_stored_before() -> None:
    """`y` is cheap, but its elements are of `c` before the update."""

    def step(_: Any, c: Any) -> Any:
        y = c[::-1] + 1.0
        c = c.at[0].set(5.0)
        return c * 2.0 + y

    found = lines(
        after(checks, inline, of=lambda x: hf.fori_loop(0, 3, step, x), args=(X,))
    )
    stored = next(n for n, line in enumerate(found) if "i0 * -1 + 7] + 1.0" in line)
    update = next(n for n, line in enumerate(found) if " with [" in line)
    assert stored < update


def test_a_value_that_got_memory_twice_is_stored_before_an_update() -> None:
    def f(x: Any) -> Any:
        y = x[::-1]
        first = hf.fori_loop(0, 2, lambda _, c: c * 2.0 + hf.sum(c), y)
        x = hf.cumulative_sum(x)
        z = x[::-1]
        second = hf.fori_loop(0, 2, lambda _, c: c * 2.0 + hf.sum(c), z)
        return first + second + x.at[0].set(5.0) + z

    jitted = hf.jit(f)
    np.testing.assert_array_equal(jitted(X), f(hf.asarray(X)))


def test_a_result_in_the_memory_of_a_parameter_is_computed_last() -> None:
    found = after(
        checks,
        inline,
        of=lambda x, y: (x + y, x * y),
        args=(X, X),
        reused={0: 0, 1: 1},
    )
    assert lines(found)[0].endswith("x[i0] + y[i0], x[i0] * y[i0] for i0 < 8")


# --- unit axes ------------------------------------------------------------------------


def test_a_product_with_a_vector_has_no_axis_of_one_column() -> None:
    found = after(
        checks,
        inline,
        unit_axes,
        of=lambda x, y: hf.matmul(x, y[..., None])[..., 0],
        args=(np.ones((6, 20, 20)), np.ones((6, 20))),
    )
    assert lines(found) == [
        "v2: f64[6, 20] = reduce add from 0.0 of x[i0, i1, i2] * y[i0, i2] over "
        "i2 < 20 for i0 < 6, i1 < 20",
        "return v2",
    ]


@pytest.mark.parametrize(
    ("f", "copies"),
    [
        (lambda y: y[:, None, :, None], 0),
        (lambda y: y[:3, :, None], 1),  # not all of it
        (lambda y: y.T[None], 1),
    ],
)
def test_sums_are_computed_in_the_shape_of_a_copy(f: Any, copies: int) -> None:
    def summed(x: Any) -> Any:
        return f(hf.sum(x, axis=2))

    x = np.random.default_rng(0).integers(0, 99, (6, 20, 20)) / 8
    agree(summed, x)
    text = after(checks, inline, unit_axes, of=summed, args=(x,))
    assert len(lines(text)) == 2 + copies


@pytest.mark.parametrize("shape", [(1, 40), (40, 1)])
def test_a_position_of_any_shape_is_found_in_one_pass(shape: tuple[int, ...]) -> None:
    def f(x: Any) -> Any:
        return hf.reshape(hf.argmax(x, axis=0), shape)

    x = np.random.default_rng(0).normal(size=(30, 40))
    agree(f, x)
    passes = S.KERNEL_PASSES[: S.KERNEL_PASSES.index(unit_axes) + 1]
    assert len(lines(after(*passes, of=f, args=(x,)))) == 2


def test_a_matrix_that_one_vector_multiplies_is_not_transposed() -> None:
    def f(a: Any, x: Any) -> Any:
        return hf.vmap(lambda a, x: a.T @ x)(a, x)

    args = np.ones((2000, 20, 20)), np.ones((2000, 20))
    passes = S.KERNEL_PASSES[: S.KERNEL_PASSES.index(transposed) + 1]
    assert len(lines(after(*passes, of=f, args=args))) == 2


# --- branches -------------------------------------------------------------------------

LONG = np.arange(1000.0)
FLAG = np.asarray(1.0)


def branched(f: Callable[..., Any], *args: Any) -> list[str]:
    return lines(after(flags, hoist, checks, inline, branches, of=f, args=args))


def test_what_one_test_chooses_is_computed_on_the_side_that_is_taken() -> None:
    found = branched(lambda x, s: hf.where(s > 0, hf.exp(hf.sin(x)), x), LONG, FLAG)
    assert found == [
        "v0: bool[] = s[] > 0.0",
        "v3: f64[1000] = switch v0:",
        "case 0:",
        "v3_false: f64[1000] = x[i0] for i0 < 1000",
        "yield v3_false",
        "case 1:",
        "v3_true: f64[1000] = exp(sin(x[i0])) for i0 < 1000",
        "yield v3_true",
        "return v3",
    ]


def test_what_one_side_alone_needs_goes_along() -> None:
    def f(x: Any, s: Any) -> Any:
        e = hf.exp(x - hf.max(x))
        return hf.where(s > 0, x, e / hf.sum(e))

    found = branched(f, LONG, FLAG)
    assert found[:7] == [
        "v3: bool[] = s[] > 0.0",
        "v6: f64[1000] = switch v3:",
        "case 0:",
        "v0: f64[] = reduce max from -inf of x[i0] over i0 < 1000",
        "v2: f64[1000] = exp(x[i0] - v0[]) for i0 < 1000",
        "v4: f64[] = reduce add from 0.0 of v2[i0] over i0 < 1000",
        "v6_false: f64[1000] = v2[i0] / v4[] for i0 < 1000",
    ]
    assert found[8:10] == ["case 1:", "v6_true: f64[1000] = x[i0] for i0 < 1000"]


def test_what_reads_the_choice_in_its_own_loop_is_on_both_sides() -> None:
    found = branched(lambda x, s: hf.sqrt(hf.where(s > 0, hf.exp(x), x)), LONG, FLAG)
    assert [line for line in found if "sqrt" in line] == [
        "v3_false: f64[1000] = sqrt(x[i0]) for i0 < 1000",
        "v3_true: f64[1000] = sqrt(exp(x[i0])) for i0 < 1000",
    ]


def test_equations_in_a_row_that_ask_the_same_become_one_branch() -> None:
    def f(x: Any, s: Any) -> Any:
        y = hf.where(s > 0, hf.exp(x), x)
        return y, hf.where(s > 0, y * 2.0, x) + 1.0

    found = branched(f, LONG, FLAG)
    assert found[1:] == [
        "v2: f64[1000], v5: f64[1000] = switch v0:",
        "case 0:",
        "v2_false: f64[1000] = x[i0] for i0 < 1000",
        "v5_false: f64[1000] = x[i0] + 1.0 for i0 < 1000",
        "yield v2_false, v5_false",
        "case 1:",
        "v2_true: f64[1000] = exp(x[i0]) for i0 < 1000",
        "v5_true: f64[1000] = v2_true[i0] * 2.0 + 1.0 for i0 < 1000",
        "yield v2_true, v5_true",
        "return v2, v5",
    ]


def test_what_a_side_does_not_need_is_not_computed_there() -> None:
    def f(x: Any, s: Any) -> Any:
        y = hf.exp(x)
        return hf.where(s > 0, y + y[::-1], x)

    found = branched(f, LONG, FLAG)
    assert found[2:5] == [
        "case 0:",
        "v4_false: f64[1000] = x[i0] for i0 < 1000",
        "yield v4_false",
    ]
    assert "v0: f64[1000] = exp(x[i0]) for i0 < 1000" in found


def test_sums_go_into_the_sides_that_need_them() -> None:
    def f(x: Any, s: Any) -> Any:
        return hf.where(s > 0, hf.sum(hf.exp(x)), hf.sum(hf.sin(x)))

    found = branched(f, LONG, FLAG)
    no, yes = found.index("case 0:"), found.index("case 1:")
    assert found[no + 1].endswith("reduce add from 0.0 of sin(x[i0]) over i0 < 1000")
    assert found[yes + 1].endswith("reduce add from 0.0 of exp(x[i0]) over i0 < 1000")


def test_a_sum_beside_a_choice_stays() -> None:
    def f(x: Any, s: Any) -> Any:
        return hf.where(s > 0, hf.exp(x), x), hf.sum(x)

    found = branched(f, LONG, FLAG)
    assert len([line for line in found if "switch" in line]) == 1
    assert found[-2] == "v3: f64[] = reduce add from 0.0 of x[i0] over i0 < 1000"


def test_small_values_and_views_do_not_part_what_asks_the_same() -> None:
    def f(x: Any, s: Any) -> Any:
        y = hf.where(s > 0, hf.exp(x), x)
        rate = hf.where(s > 1, 0.5, s) + 1
        return y, hf.where(s > 0, hf.sin(x) * rate, x), rate

    found = branched(f, LONG, FLAG)
    assert len([line for line in found if "switch" in line]) == 1


def test_what_is_read_between_is_computed_before() -> None:
    def f(x: Any, s: Any) -> Any:
        y = hf.where(s > 0, hf.exp(x), x)
        first = y[:2] * 2.0
        return y, hf.where(s > 0, hf.sin(x) * hf.sqrt(first[0]), x), first

    found = branched(f, LONG, FLAG)
    assert len([line for line in found if "switch" in line]) == 2


def test_what_would_be_copied_to_wait_does_not() -> None:
    """The carry is updated in place after it has been read."""

    def f(x: Any, s: Any) -> Any:
        def step(i: Any, c: Any, y: Any) -> Any:
            z = hf.cumulative_sum(hf.exp(c[:900]))
            c = hf.dynamic_update_slice(c, hf.zeros(1), (i,))
            return c, hf.where(i < s, z, y)

        return hf.fori_loop(0, 9, step, (x, x[:900]))

    run = hf.jit(f)
    run(LONG, FLAG)
    assert "before its elements are replaced" not in run.memory


def test_choices_nest() -> None:
    def f(x: Any, s: Any) -> Any:
        y = x
        for k in range(DEEPEST + 2):
            y = hf.where(s > k, hf.exp(x + k), y)
        return y

    found = branched(f, LONG, FLAG)
    assert len([line for line in found if "switch" in line]) == DEEPEST
    [rest] = [line for line in found if "select" in line]
    assert rest.count("select") == 2


def test_an_element_of_a_small_value_may_be_asked() -> None:
    def f(x: Any, flags: Any) -> Any:
        return hf.where(flags[1:2], hf.exp(x), x)

    found = branched(f, LONG, np.asarray([True, False, True]))
    assert "v2: f64[1000] = switch v2_test:" in found


def test_a_check_stays_where_it_is() -> None:
    def f(x: Any, k: Any, s: Any) -> Any:
        return hf.where(s > 0, hf.exp(x[k]), x)

    found = branched(f, LONG, np.zeros(1000, np.int64), FLAG)
    assert found[1].startswith("free check index: ")
    assert found[2] == "v3: f64[1000] = switch v0:"


def test_a_loop_updates_its_carry_on_one_side() -> None:
    def f(x: Any, n: Any) -> Any:
        def step(i: Any, c: Any) -> Any:
            return hf.where(i < n, hf.exp(c), c)

        return hf.fori_loop(0, 9, step, x)

    run = hf.jit(f)
    run(LONG, np.asarray(3))
    step = run.loop_ir.partition("for step")[2]
    assert lines(step)[2].startswith("if ")
    assert "else" not in step
    assert run.memory.count("copy ") == 1  # of the argument


def by_element(x: Any, _: Any) -> Any:
    return hf.where(x > 0, hf.exp(x), x)


def cheaply(x: Any, s: Any) -> Any:
    return hf.where(s > 0, x * 2.0 + 1.0, x)


def of_few(x: Any, s: Any) -> Any:
    return hf.where(s > 0, hf.exp(x[:8]), x[:8])


def for_both(x: Any, s: Any) -> Any:
    y = hf.exp(hf.sin(x))
    return hf.where(s > 0, y, y + 1.0)


def for_others(x: Any, s: Any) -> Any:
    """What the result does not need, others do."""
    y = hf.sum(hf.exp(x))
    return hf.where(s > 0, y, 1.0), y


def that_may_fail(x: Any, s: Any) -> Any:
    a = x[:900].reshape(30, 30)
    return hf.where(s > 0, hf.linalg.cholesky(a), a)


def in_blocks(x: Any, s: Any) -> Any:
    x = hf.broadcast_to(x, (100, 1000)).reshape(-1)
    return hf.fori_loop(0, 9, lambda _, c: hf.where(s > 0, hf.exp(c), c), x)


def that_is_a_part(x: Any, s: Any) -> Any:
    """The value is made in its part of the result, which a branch could not do."""
    y = hf.where(s > 0, hf.exp(x), x)
    return hf.concat([y, x]), hf.concat([x, y])


@pytest.mark.parametrize(
    "f",
    [
        by_element,
        cheaply,
        of_few,
        for_both,
        for_others,
        that_may_fail,
        in_blocks,
        that_is_a_part,
    ],
)
def test_a_branch_that_does_not_pay_is_none(f: Any) -> None:
    passes = flags, hoist, checks, counters, inline
    before = after(*passes, of=f, args=(LONG, FLAG))
    assert "select" in before
    assert after(*passes, branches, of=f, args=(LONG, FLAG)) == before


def test_what_varies_with_examples_is_no_choice() -> None:
    def f(x: Any, s: Any) -> Any:
        return hf.where(s > 0, hf.exp(x), x)

    found = branched(hf.vmap(f), np.ones((8, 1000)), np.arange(8.0))
    assert not any("switch" in line for line in found)
    found = branched(hf.vmap(f, in_dims=(0, None)), np.ones((8, 1000)), FLAG)
    assert any("switch" in line for line in found)


def test_many_tests_of_one_value_are_few_branches() -> None:
    """Two sides for each of them would be more than there are atoms."""

    def f(x: Any, s: Any) -> Any:
        return sum([hf.where(s[k] > 0, hf.exp(x + k), x) for k in range(8)], x)

    def text(*passes: Pass) -> str:
        return after(
            flags, hoist, checks, inline, *passes, of=f, args=(LONG, LONG[:300])
        )

    assert len(text(branches)) < 2 ** (DEEPEST + 1) * len(text())


# --- simplify -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("f", "want"),
    [
        (lambda x: hf.reshape(hf.reshape(x, (2, 4)), (8,)), "x[i0]"),
        (lambda x: hf.reshape(hf.reshape(x, (2, 4)) * 2.0, (8,)), "x[i0] * 2.0"),
        (lambda x: hf.concat([x, x])[:8] + 1.0, "x[i0] + 1.0"),
        (lambda x: hf.concat([x, x])[8:] + 1.0, "x[i0] + 1.0"),
        (lambda x: hf.roll(x, 8) + 1.0, "x[i0] + 1.0"),
    ],
)
def test_index_arithmetic_that_ranges_decide_is_gone(f: Any, want: str) -> None:
    found = after(checks, inline, simplify, of=f, args=(X,))
    assert lines(found)[0].split(" = ")[1] == f"{want} for i0 < 8"


def test_a_check_that_always_holds_is_gone() -> None:
    at = hf.asarray(np.arange(8))
    near = lambda x, k: hf.take(x, hf.clip(k, 0, 7))  # noqa: E731
    far = lambda x, k: hf.take(x, hf.clip(k, 0, 8))  # noqa: E731
    texts = [after(checks, inline, simplify, of=f, args=(X, at)) for f in (near, far)]
    assert ["check index" in text for text in texts] == [False, True]


INDICES: Final[dict[str, tuple[Any, bool]]] = {
    "mask": (lambda k: k & 7, True),
    "mask of more": (lambda k: k & 15, False),
    "mask of unsigned": (lambda k: k.astype(np.uint8) & np.uint8(7), True),
    "both": (lambda k: (k & 4) | (k & 3) ^ (k & 1), True),
    "modulo": (lambda k: k % 7, True),
    "modulo, a power of two": (lambda k: k % 8, True),
    "modulo of more": (lambda k: k % 9, False),
    "quotient": (lambda k: k % 100 // 15 + 1, True),
    "shifted right": (lambda k: (k & 63) >> 3, True),
    "shifted left": (lambda k: (k & 3) << 1, True),
    "shifted out": (lambda k: (k & 3) << 2, False),
    "wrapped around": (lambda k: (k & 127).astype(np.int8) * np.int8(2) // 8, False),
}


@pytest.mark.parametrize("is_scalar", [False, True])
@pytest.mark.parametrize("name", INDICES)
def test_an_index_within_its_range_is_not_checked(name: str, is_scalar: bool) -> None:
    make, is_proven = INDICES[name]
    k: Any = np.asarray(17) if is_scalar else np.arange(-3, 6) * 37
    run = hf.jit(lambda x, k: hf.take(x, make(k)), dynamic=False)
    x = hf.arange(8)
    try:
        found = run(x, k)
    except IndexError:
        assert not is_proven
    else:
        np.testing.assert_array_equal(np.asarray(found), np.asarray(x[make(k)]))
    assert ("trap" in run.loop_ir) is not is_proven


# --- simplify: floats that become indices ---------------------------------------------


CLAMPED: dict[str, tuple[Any, bool]] = {
    "scaled, then clamped": (lambda x: hf.clip(x * 64.0, 0.0, 255.0), True),
    "clamped, then scaled": (lambda x: hf.clip(x, 0.0, 1.0) * 255.0, True),
    "rounded and moved": (
        lambda x: hf.floor(hf.clip(x, -1.0, 1.0) * 127.0) + 128.0,
        True,
    ),
    "from the end": (lambda x: hf.clip(x, -256.0, 255.5), True),
    "negated": (lambda x: -hf.clip(x, 1.0, 256.0), True),
    "one too large": (lambda x: hf.clip(x, 0.0, 256.0), False),
    "one too small": (lambda x: -hf.clip(x, 1.0, 257.0), False),
    "only above": (lambda x: hf.minimum(x, 255.0), False),
    "of infinities": (lambda x: hf.clip(x * 0.0, 0.0, 1.0) + x, False),
}


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
@pytest.mark.parametrize("name", CLAMPED)
def test_what_a_float_is_clamped_to_bounds_an_index(name: str, dtype: Any) -> None:
    f, is_bounded = CLAMPED[name]
    table = np.arange(256.0)
    numbers = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, 255.0, 255.5, 254.99999]
    x = np.array([*numbers, *np.random.default_rng(0).normal(size=90)], dtype)

    def looked_up(table: Any, x: Any) -> Any:
        return table[f(x).astype(hf.int32)]

    jitted = hf.jit(looked_up)
    jitted(table, np.ones_like(x))
    assert ("trap" not in jitted.loop_ir) is is_bounded
    with contextlib.suppress(IndexError):
        want = np.asarray(hf.jit(looked_up, backend="interpreter")(table, x))
        assert np.asarray(jitted(table, x)).tobytes() == want.tobytes()


def turned(x: Any, u: Any) -> Any:
    """Read between two elements, by positions whose fraction is used, too."""
    at = hf.clip(u * 3.0 + 1.0, 0.0, 98.5)
    left = at.astype(hf.int32)
    part = at - left.astype(at.dtype)
    return x[left] * (1 - part) + x[left + 1] * part


def halved(x: Any, u: Any) -> Any:
    """The bounds of one value follow from those of another."""
    at = hf.clip(u, 0.0, 1.0)
    other = at * 99.0
    return x[other.astype(hf.int32)] + at + other


def sometimes(x: Any, u: Any) -> Any:
    """A value that is 0 where nothing is read of it."""
    at = hf.concat([hf.clip(u, 3.0, 98.0), hf.clip(u, 5.0, 99.0)])
    return x[at.astype(hf.int32)] + at


@pytest.mark.parametrize("f", [turned, halved, sometimes])
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_clamped_floats_that_are_used_twice_bound_an_index(f: Any, dtype: Any) -> None:
    x, special = np.arange(100.0), [np.nan, np.inf, -np.inf, -0.0, 33.0, 32.9999]
    u = np.array([*special, *np.random.default_rng(0).normal(size=91) * 40], dtype)
    jitted = hf.jit(f)
    want = np.asarray(hf.jit(f, backend="interpreter")(x, u))
    np.testing.assert_array_equal(np.asarray(jitted(x, u)), want)
    assert "trap" not in jitted.loop_ir


def test_clamped_floats_that_are_used_twice_are_converted_without_tests() -> None:
    jitted = hf.jit(turned)
    jitted(np.arange(100.0), np.ones(64))
    # NaN is the only one that becomes another integer.
    assert jitted.llvm_ir.count("fptosi") == jitted.llvm_ir.count("fcmp ord") > 0


@pytest.mark.parametrize("combine", ["logical_and", "logical_or", "logical_xor"])
def test_conditions_that_become_floats_are_at_most_one(combine: str) -> None:
    def f(x: Any, y: Any, table: Any) -> Any:
        weight = getattr(hf, combine)(x > 0, y > 0).astype(np.float64)
        return table[(weight * 3.0).astype(hf.int32)] + weight

    x, y = np.random.default_rng(0).normal(size=(2, 40))
    table = np.arange(4.0)
    jitted = hf.jit(f)
    weight = getattr(np, combine)(x > 0, y > 0).astype(float)
    np.testing.assert_array_equal(np.asarray(jitted(x, y, table)), 4 * weight)
    assert "trap" not in jitted.loop_ir


def test_counts_of_what_is_clamped_test_nothing() -> None:
    def counts(x: Any) -> Any:
        bins = hf.clip((x + 4.0) * 32.0, 0.0, 255.0).astype(np.int32)
        return hf.segment_sum(hf.ones_like(bins), bins, 256)

    x = np.array([np.nan, np.inf, -np.inf, *np.random.default_rng(0).normal(size=999)])
    jitted = hf.jit(counts)
    want = hf.jit(counts, backend="interpreter")(x)
    np.testing.assert_array_equal(np.asarray(jitted(x)), np.asarray(want))
    assert "if " not in jitted.loop_ir


# --- split ----------------------------------------------------------------------------


def pieces(f: Callable[..., Any], *args: Any) -> str:
    """What the result of a function is, once it is cut into pieces."""
    text = after(checks, inline, simplify, split, of=f, args=args)
    *_, found, _ = lines(text)
    return found.split(" = ", 1)[1]


def agree(f: Callable[..., Any], *args: Any) -> None:
    """Require of native code the numbers of the interpreter."""
    want = hf.jit(f, backend="interpreter")(*args)
    np.testing.assert_allclose(hf.jit(f)(*args), want, rtol=1e-15)


SPLIT: dict[str, tuple[Any, str]] = {
    "concat": (
        lambda x: hf.concat([x * 2.0, x[:3]]),
        "(x[i0] * 2.0 where i0 < 8, x[i0 - 8] elsewhere) for i0 < 11",
    ),
    "concat of three": (
        lambda x: hf.concat([x, x[:3], x[:2]]),
        "(x[i0] where i0 < 8, x[i0 - 8] where i0 < 11, x[i0 - 11] elsewhere)"
        " for i0 < 13",
    ),
    "roll": (
        lambda x: hf.roll(x, 2),
        "(x[i0 + 6] where i0 < 2, x[i0 - 2] elsewhere) for i0 < 8",
    ),
    "roll there and back": (
        lambda x: hf.roll(x, 1) * hf.roll(x, -1),
        "(x[i0 + 7] * x[i0 + 1] where i0 < 1, "
        "x[i0 - 1] * x[i0 + 1] where i0 < 7, x[i0 - 1] * x[i0 - 7] elsewhere)"
        " for i0 < 8",
    ),
    "pad": (
        lambda x: hf.pad(x, (1, 2)),
        "(0.0 where i0 < 1, x[i0 - 1] where i0 < 9, 0.0 elsewhere) for i0 < 11",
    ),
    "backwards": (
        lambda x: hf.concat([x, x[:3]])[::-1],
        "(x[i0 * -1 + 2] where i0 < 3, x[i0 * -1 + 10] elsewhere) for i0 < 11",
    ),
    "an index that wraps around": (
        lambda x: x[hf.arange(8) - 3],
        "(x[i0 + 5] where i0 < 3, x[i0 - 3] elsewhere) for i0 < 8",
    ),
    "dear sides": (
        lambda x: hf.where(hf.arange(8) < 3, hf.sin(x), hf.cos(x)),
        "(sin(x[i0]) where i0 < 3, cos(x[i0]) elsewhere) for i0 < 8",
    ),
    "a plane": (
        lambda x: hf.pad(x.reshape((2, 4)), ((0, 1), (1, 0)))[:, :3],
        "((0.0 where i1 < 1, x[i0 * 4 + (i1 - 1)] elsewhere) where i0 < 2, "
        "0.0 elsewhere) for i0 < 3, i1 < 3",
    ),
}


@pytest.mark.parametrize("name", SPLIT)
def test_tests_of_an_index_cut_its_axis_into_pieces(name: str) -> None:
    f, want = SPLIT[name]
    assert pieces(f, X) == want
    agree(f, X)


def test_a_few_bytes_that_fill_no_vector_are_no_reason_against_a_cut() -> None:
    x = np.arange(200, dtype=np.int8).reshape(2, 100)
    f = lambda x: hf.roll(x, 1, axis=1) + hf.roll(x, -1, axis=1)  # noqa: E731
    assert pieces(f, x).count(" where ") == 2
    agree(f, x)


@pytest.mark.parametrize(
    "f",
    [
        lambda x: hf.where(hf.arange(8) < 3, x * 2.0, x + 1.0),  # cheaper than a loop
        lambda x: hf.where(x < 3.0, hf.sin(x), hf.cos(x)),  # no index
        lambda x: hf.sum(hf.roll(x, 1) * x),  # no element of a result
        lambda x: hf.roll(x[:3], 1),  # in registers
        lambda x: hf.roll(x[:, None] * x, 1, axis=1),  # rows of 1 and 7
    ],
)
def test_what_gains_nothing_from_pieces_is_whole(f: Any) -> None:
    assert " where " not in after(checks, inline, simplify, split, of=f, args=(X,))
    agree(f, X)


LAST = BRIEF + 43
MANY = np.arange(LAST + 1.0) + 1.0
FAR = 1 << 60
SHIFTED: dict[str, tuple[Any, int]] = {
    "from the left": (lambda x, w, i: x[hf.maximum(i - w, 0)], 4),
    "from the right": (lambda x, w, i: x[hf.minimum(i + w, LAST)], 5),
    "both": (lambda x, w, i: x[hf.clip(i - w, 0, LAST)], 4),
    "backwards": (lambda x, w, i: x[hf.clip(w - i, 0, LAST)], 4),
    "a test of the shift": (
        lambda x, w, i: hf.where(i >= w, x[hf.maximum(i - w, 0)] + 1.0, x),
        4,
    ),
    "two shifts": (
        lambda x, w, i: x[hf.clip(i - w, 0, LAST)] * x[hf.clip(i - w * 5, 0, LAST)],
        4,
    ),
}
"""What reads at an index that a number of the run shifts, and in how many pieces."""

SHIFTS = [
    *range(-LAST - 2, LAST + 3, 23),
    -1,
    0,
    LAST,
    LAST + 1,
    *(k * FAR + d for k in (-1, 1) for d in (-1, 0, 1)),
]
SHIFTS += [2**63 - 1, 2**63 - 5, -(2**63), -(2**63) + 5]


@pytest.mark.parametrize("name", SHIFTED)
def test_a_shift_that_only_the_run_knows_cuts_an_axis(name: str) -> None:
    f, count = SHIFTED[name]
    found = after(
        *(checks, inline, simplify, split),
        of=lambda x, w: f(x, w, hf.arange(LAST + 1)),
        args=(MANY, np.int64(3)),
    )
    assert found.count(" where ") + 1 == count, found
    assert "where i0 < select(w" in found  # empty unless an index wraps around


@pytest.mark.parametrize("name", SHIFTED)
def test_a_shift_of_few_elements_cuts_nothing(name: str) -> None:
    f, _ = SHIFTED[name]
    found = after(
        *(checks, inline, simplify, split),
        of=lambda x, w: f(x, w, hf.arange(BRIEF)),
        args=(MANY[:BRIEF], np.int64(3)),
    )
    assert " where " not in found


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize("name", SHIFTED)
def test_shifts_of_any_size_give_what_plain_python_gives(
    name: str, dynamic: bool | None
) -> None:
    f, _ = SHIFTED[name]

    def one(x: Any, w: Any) -> Any:
        return f(x, w, hf.arange(x.shape[0]))

    def each(x: Any, ws: Any) -> Any:
        return hf.scan(lambda c, w: (c, one(x, w)), 0, ws)[1]

    def outcome(f: Any, *args: Any, **options: Any) -> Any:
        try:
            return np.asarray(hf.jit(f, **options)(*args)).tobytes()
        except IndexError:
            return "out of bounds"

    alone = hf.jit(one, dynamic=dynamic)
    good = []
    for w in SHIFTS:
        want = outcome(one, MANY, np.int64(w), backend="interpreter")
        assert outcome(alone, MANY, np.int64(w)) == want
        if want != "out of bounds":
            good.append(w)
    ws = np.asarray(good, np.int64)
    want = outcome(each, MANY, ws, backend="interpreter")
    assert outcome(each, MANY, ws, dynamic=dynamic) == want != "out of bounds"


def test_there_are_not_more_pieces_than_a_bound() -> None:
    def f(x: Any) -> Any:
        return hf.concat([x * float(k) for k in range(3 * MOST)])

    assert pieces(f, X).count(" where ") == MOST - 1
    agree(f, X)


# --- pack -----------------------------------------------------------------------------


def test_the_matrix_of_a_product_in_a_loop_is_copied_before_it() -> None:
    found = after(
        hoist,
        checks,
        inline,
        pack,
        of=lambda h, w: hf.fori_loop(0, 3, lambda _, c: c @ w, h),
        args=(np.ones((1, 128)), np.ones((128, 128))),
    )
    assert lines(found)[0].startswith("w_packed: f64[128, 128] = w[i0, i1]")
    assert "gemm(c6, w_packed, " in found


@pytest.mark.parametrize(
    ("layout", "copied"), [("dense", False), ("rows", True), ("strided", True)]
)
def test_an_input_that_a_loop_reads_becomes_dense(layout: Any, copied: bool) -> None:
    found = after(
        inline,
        pack,
        of=lambda x, y: hf.fori_loop(0, 3, lambda _, c: c + y, x),
        args=(X, X),
        layouts=("dense", layout),
    )
    assert ("y_packed" in found) == copied


def test_what_only_a_proven_check_reads_is_not_computed() -> None:
    def f(x: Any) -> Any:
        order = hf.argsort(x) % x.shape[0]
        unused = hf.take_along_axis(x, order, axis=0)
        return (x * 2.0, unused)[0]

    jitted = hf.jit(f)
    jitted(hf.asarray(np.ones(100)))
    assert "argsort" not in jitted.loop_ir


@pytest.mark.parametrize("operator", [hf.map, hf.vmap])
def test_a_loop_of_no_steps_computes_nothing(operator: Any) -> None:
    def f(x: Any, rows: Any) -> Any:
        each = lambda row: (row + hf.sum(x @ hf.sum(x, axis=0)), x)  # noqa: E731
        return hf.map(each, rows) if operator is hf.map else hf.vmap(each)(rows)

    jitted = hf.jit(f)
    results = jitted(hf.asarray(np.ones((30, 30))), hf.asarray(np.ones(0)))
    assert [r.shape for r in results] == [(0,), (0, 30, 30)]
    assert "gemm" not in jitted.loop_ir


def test_a_loop_whose_steps_only_the_run_counts_is_no_loop_of_no_steps() -> None:
    def twice(x: Any) -> Any:
        inner = lambda _, y: hf.sin(y)  # noqa: E731
        return hf.fori_loop(0, 3, lambda _, x: hf.fori_loop(0, 2, inner, x), x)

    np.testing.assert_allclose(hf.grad(twice)(0.7), 0.319759, rtol=1e-5)
