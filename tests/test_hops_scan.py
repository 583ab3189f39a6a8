"""`scan`: in every execution, against a plain Python loop."""

from typing import Any

import numpy as np
import pytest

import hopflow
from hopflow import pytree
from hopflow.compiler.pipeline import Executable
from hopflow.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    AxisError,
    CarryTypeError,
    LengthError,
    PredicateError,
    ResultTypeError,
    StructureError,
)
from hopflow.graph.verifier import verify
from hopflow.testing.executions import NAMES, RUNNERS, agree, fails, interpreted

pytestmark = pytest.mark.slow

hf: Any = hopflow

each_execution = pytest.mark.parametrize("run", RUNNERS, ids=NAMES)

X = np.arange(12, dtype=np.float32).reshape(4, 3) / 4 - 1


def loop(f: Any, carry: Any, rows: Any, *, reverse: bool = False) -> Any:
    """The reference: NumPy arrays in a Python loop."""
    ys = []
    for x in rows[::-1] if reverse else rows:
        carry, y = f(carry, x)
        ys.append(y)
    return carry, np.stack(ys[::-1] if reverse else ys)


# --- what it computes -----------------------------------------------------------------


@each_execution
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("unroll", [1, 3])
def test_it_is_the_loop(run: Any, reverse: bool, dim: int, unroll: int) -> None:
    def step(c: Any, x: Any) -> Any:
        return c * 0.5 + x, c - x

    def f(x: Any) -> Any:
        init = hf.zeros(x.shape[0 if dim else 1])
        return hf.scan(step, init, x, dim=dim, reverse=reverse, unroll=unroll)

    rows = np.moveaxis(X, dim, 0)
    init = np.zeros(rows.shape[1], np.float32)
    agree(run(f, hf.asarray(X)), loop(step, init, rows, reverse=reverse))


def recurrence(x: Any, unroll: int) -> Any:
    def step(c: Any, v: Any) -> Any:
        return (c[0] * 3 + v, c[1].at[0].add(v)), c[0] - v

    return hf.scan(step, (0.5, hf.zeros(2)), x, unroll=unroll)


@pytest.mark.parametrize("n", [2, 3, 4, 7, 8])
def test_an_unrolled_loop_has_its_body_several_times(n: int) -> None:
    x = hf.asarray(np.linspace(0.0, 1.0, n), dtype=hf.float32)
    plain, unrolled = hf.jit(recurrence), hf.jit(recurrence)
    agree(unrolled(x, 4), plain(x, 1))
    assert " by 4:" in unrolled.loop_ir
    assert " by " not in plain.loop_ir
    copies = unrolled.llvm_ir.count("fmul"), plain.llvm_ir.count("fmul")
    assert copies[0] == copies[1] * (4 * (n > 3) + (n % 4 > 0))


@pytest.mark.parametrize("n", [0, 1, 3, 4, 7, 8])
def test_an_unrolled_loop_may_have_any_length(n: int) -> None:
    types = hf.spec("f32[n]")
    graph = hf.trace(lambda x: recurrence(x, 4), types, mode="fake").graph
    x = hf.asarray(np.linspace(0.0, 1.0, n), dtype=hf.float32)
    agree(Executable(graph)([x]), pytree.flatten(recurrence(x, 1))[0])


@each_execution
def test_carries_slices_and_results_are_pytrees_and_never_spread(run: Any) -> None:
    def step(c: Any, x: Any) -> Any:
        total, (count, none) = c
        new = (total + x["a"] * x["b"], (count + 1, none))
        return new, {"t": total, "n": None, "k": (count, 2.5)}

    def f(x: Any) -> Any:
        xs = {"a": x, "b": x[:, 0], "c": None}
        return hf.scan(step, (hf.zeros(3), (0, None)), xs)

    total, totals = np.zeros(3, np.float32), []
    for row in X:
        totals.append(total)
        total = total + row * row[0]
    ys = {"t": np.stack(totals), "n": None, "k": (np.arange(4), np.full(4, 2.5))}
    agree(run(f, hf.asarray(X)), ((total, (4, None)), ys))


@each_execution
def test_without_slices_it_makes_length_steps(run: Any) -> None:
    agree(
        run(lambda: hf.scan(lambda c, _: (c + 2, c), 1, length=4)),
        (9, np.array([1, 3, 5, 7])),
    )


@each_execution
def test_a_carry_may_be_empty(run: Any) -> None:
    def f(x: Any) -> Any:
        return hf.scan(lambda c, row: (c, hf.sum(row)), None, x)

    agree(run(f, hf.asarray(X)), (None, X.sum(1)))


@each_execution
def test_there_may_be_nothing_to_stack(run: Any) -> None:
    def f(x: Any) -> Any:
        return hf.scan(lambda c, row: (c + row, None), hf.zeros(3), x)

    agree(run(f, hf.asarray(X)), (X.sum(0), None))


@each_execution
@pytest.mark.parametrize("reverse", [False, True])
def test_no_steps_give_the_first_carry_and_empty_stacks(
    run: Any, reverse: bool
) -> None:
    def f(x: Any) -> Any:
        def step(c: Any, row: Any) -> Any:
            return c + hf.sum(row), {"y": row * 2, "k": c > 0}

        return hf.scan(step, 0, x, reverse=reverse)

    carry, ys = run(f, hf.asarray(X[:0].astype(np.float64)))
    assert (carry.dtype, ys["y"].dtype, ys["k"].dtype) == (
        hf.float64,
        hf.float64,
        hf.bool,
    )
    agree((carry, ys), (0.0, {"y": X[:0], "k": np.zeros(0, bool)}))


@each_execution
def test_bodies_close_over_tensors_and_numbers_at_any_depth(run: Any) -> None:
    scale, y = 2, hf.asarray(X[0])

    def f(x: Any) -> Any:
        z = x * scale

        def outer(c: Any, row: Any) -> Any:
            def inner(d: Any, a: Any) -> Any:
                e = hf.cond(a > 0, lambda: d + c, lambda: d * y)
                return e, hf.sum(z) + a

            return hf.scan(inner, c, row)

        return hf.scan(outer, hf.zeros(3), x)

    def inner(c: Any) -> Any:
        return lambda d, a: (d + c if a > 0 else d * X[0], (X * 2).sum() + a)

    want = loop(lambda c, row: loop(inner(c), c, row), np.zeros(3, np.float32), X)
    agree(run(f, hf.asarray(X)), want)


@each_execution
def test_numbers_take_the_dtype_that_the_body_returns(run: Any) -> None:
    def f(x: Any) -> Any:
        return hf.scan(lambda c, row: (c + row[0], 1), 0, x)

    carry, ys = run(f, hf.asarray(X.astype(np.float64)))
    assert (carry.dtype, ys.dtype) == (hf.float64, hf.int64)
    agree(carry, X[:, 0].sum().astype(np.float64))


@each_execution
def test_writes_to_carries_and_slices_stay_private(run: Any) -> None:
    x, c = hf.asarray(X.copy()), hf.zeros(3)

    def step(c: Any, row: Any) -> Any:
        row *= 2
        c += row
        return c, row

    want = (X.sum(0) * 2, X * 2)
    agree(run(lambda c, x: hf.scan(step, c, x), c, x), want)
    agree((x, c), (X, np.zeros(3, np.float32)))


@each_execution
def test_a_written_capture_is_a_hidden_carry(run: Any) -> None:
    def f(x: Any) -> Any:
        seen, out = x[0] * 0, x * 1

        def step(i: Any, row: Any) -> Any:
            seen[:] = seen * 0.5 + row
            out[i] = seen
            return i + 1, hf.sum(seen)

        return hf.scan(step, 0, x), seen, out

    seen, out = X[0] * 0, X * 0
    for i, row in enumerate(X):
        seen = seen * np.float32(0.5) + row
        out[i] = seen
    agree(run(f, hf.asarray(X)), ((4, out.sum(1)), seen, out))


@each_execution
def test_a_carry_returned_from_a_capture_is_a_value(run: Any) -> None:
    y = hf.asarray(X[0].copy())

    def step(c: Any, row: Any) -> Any:
        c += row
        return y, c

    def f(x: Any) -> Any:
        return hf.scan(step, hf.zeros(3), x)

    ys = np.concatenate([X[:1], X[1:] + X[0]])
    agree(run(f, hf.asarray(X)), (X[0], ys))
    agree(y, X[0])


# --- until ----------------------------------------------------------------------------


@each_execution
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("limit", [-100.0, -0.9, 0.5, 100.0])
def test_until_ends_the_loop_after_a_step(
    run: Any, limit: float, reverse: bool
) -> None:
    def f(x: Any) -> Any:
        def step(c: Any, row: Any) -> Any:
            return {"c": c["c"] + row[0]}, (row * 2, c["c"])

        def until(c: Any) -> Any:
            return hf.abs(c["c"]) > limit

        return hf.scan(step, {"c": 0}, x, reverse=reverse, until=until)

    c, steps = np.float32(0), 0
    ys, cs = np.zeros((4, 3), np.float32), np.zeros(4, np.float32)
    for i in range(4)[::-1] if reverse else range(4):
        ys[i], cs[i] = X[i] * 2, c
        c, steps = c + X[i, 0], steps + 1
        if abs(c) > limit:
            break
    agree(run(f, hf.asarray(X)), ({"c": c}, (ys, cs), steps))


@each_execution
def test_until_of_no_steps(run: Any) -> None:
    def f(x: Any) -> Any:
        return hf.scan(lambda c, r: (c + 1, r), 0, x, until=lambda c: c > 3)

    agree(run(f, hf.asarray(X[:0])), (0, X[:0], 0))


@each_execution
def test_until_returns_a_bool_scalar(run: Any) -> None:
    def late(c: Any) -> Any:
        return c

    def pair(c: Any) -> Any:
        return c > 1, c > 2

    def f(until: Any) -> Any:
        return run(
            lambda x: hf.scan(lambda c, r: (c + 1, r), 0, x, until=until), hf.asarray(X)
        )

    fails(
        PredicateError,
        "scan: the result of `late` (test_hops_scan.py:#) must be a bool scalar "
        "(bool[]), and is i64[]. Compare it with something: `x != 0`.",
        *(f, late),
    )
    fails(
        PredicateError,
        "scan: `pair` (test_hops_scan.py:#) must return a bool scalar (bool[]), and "
        "returns 2 tensors.",
        *(f, pair),
    )


# --- errors ---------------------------------------------------------------------------


@each_execution
def test_a_carry_that_changes_is_refused(run: Any) -> None:
    def step(c: Any, x: Any) -> Any:
        return {"h": hf.concat([c["h"], x])}, None

    fails(
        CarryTypeError,
        "scan: `step` (test_hops_scan.py:#) must return its carry with the types it "
        "came in with.\n"
        "  carry['h']  in f32[2], out f32[5]  (axis 0: 2 != 5)\n"
        "Cast or reshape in the body, or start from an `init` of that type.",
        *(run, lambda: hf.scan(step, {"h": hf.zeros(2)}, X)),
    )


@each_execution
@pytest.mark.parametrize(
    ("result", "shown"), [(1, "*"), ((1, 2, 3), "(*, *, *)"), ([1, 2], "[*, *]")]
)
def test_a_body_returns_a_pair(run: Any, result: Any, shown: str) -> None:
    fails(
        StructureError,
        "scan: `<lambda>` (test_hops_scan.py:#) must return a pair `(carry, y)`, and "
        f"returns {shown}. Return `(carry, None)` if there is no `y`.",
        *(run, lambda: hf.scan(lambda c, x: result, 0, X)),
    )


@each_execution
def test_a_carry_of_another_structure_is_refused(run: Any) -> None:
    fails(
        StructureError,
        "scan: `<lambda>` (test_hops_scan.py:#) must return its carry in the structure "
        "it came in.\n"
        "  expected *\n"
        "  got      (*, *)\n"
        "Return the same containers with as many leaves (`*` is a leaf); only leaves "
        "may change.",
        *(run, lambda: hf.scan(lambda c, x: ((c, c), x), 0, X)),
    )


@each_execution
def test_a_body_returns_tensors_and_numbers(run: Any) -> None:
    fails(
        ResultTypeError,
        "scan: `<lambda>` (test_hops_scan.py:#) must return tensors or numbers, and "
        "its `result[1]['y']` is `object`. Return the data alone, or None.",
        *(run, lambda: hf.scan(lambda c, x: (c, {"y": object()}), 0, X)),
    )


def never(*_: Any) -> Any:
    raise AssertionError


@pytest.mark.parametrize(
    ("error", "text", "args", "kwargs"),
    [
        (
            LengthError,
            "scan: the tensors of `xs` must have as many slices along axis 0.\n"
            "  xs['a']     f32[4, 3], with 4\n"
            "  xs['b'][0]  f32[3], with 3\n"
            "Cut or pad them to one size.",
            (0, {"a": X, "b": [X[0]]}),
            {},
        ),
        (
            LengthError,
            "scan: `length` is 3, and `xs` has 4 slices along axis 0. Leave `length` "
            "out.",
            (0, X),
            {"length": 3},
        ),
        (
            LengthError,
            "scan: without tensors in `xs` the number of steps is unknown. Give "
            "`length`.",
            (0, None),
            {},
        ),
        (
            LengthError,
            "scan: `xs[1]` is a scalar (i64[]), and has no axis to take slices along. "
            "Close over it, or repeat it with `hf.broadcast_to`; of a list of numbers "
            "`hf.asarray` makes one tensor.",
            (0, (X, 3)),
            {},
        ),
        (
            ArgumentTypeError,
            "scan: `length` must be an int, and is `float`. Use `hf.fori_loop` for a "
            "number of steps that is known at run time.",
            (0, None),
            {"length": 2.0},
        ),
        (
            ArgumentValueError,
            "scan: `length` must not be negative, and is -1.",
            (0, None),
            {"length": -1},
        ),
        (
            ArgumentValueError,
            "scan: `unroll` must be a positive int, and is 0.",
            (0, X),
            {"unroll": 0},
        ),
        (
            ArgumentTypeError,
            "scan: `reverse` must be a bool, and is `int`.",
            (0, X),
            {"reverse": 1},
        ),
        (
            ArgumentTypeError,
            "scan: `init[0]` must be a tensor or a number, and is `str`. Pass what is "
            "not data through a closure.",
            (["a"], X),
            {},
        ),
        (
            ArgumentTypeError,
            "scan: `until` must be a function, and is `int`.",
            (0, X),
            {"until": 3},
        ),
    ],
)
def test_arguments_are_checked_before_anything_runs(
    error: type[Exception], text: str, args: Any, kwargs: Any
) -> None:
    fails(error, text, hf.scan, never, *args, **kwargs)


def test_an_axis_that_is_not_there_is_refused() -> None:
    with pytest.raises(AxisError, match="scan"):
        hf.scan(never, 0, X, dim=2)
    fails(
        ArgumentTypeError,
        "scan: `combine_fn` must be a function, and is `NoneType`.",
        *(hf.scan, None, 0, X),
    )


# --- the node -------------------------------------------------------------------------


def test_a_hidden_carry_stands_behind_the_carry() -> None:
    def f(x: Any) -> Any:
        seen, w = x[0] * 0, x[0] + 1

        def step(c: Any, row: Any) -> Any:
            seen[:] = seen + row
            return c + hf.sum(w), hf.sum(row)

        return hf.scan(step, 0.0, x), seen

    module = hf.trace(f, X)
    [node] = module.graph.nodes_of("scan")
    names = [v.node.name for v in node.params["body"].inputs]
    assert names == ["c", "c0", "row", "c1"]
    signature = node.op.signature(node)
    assert signature.args == ("carry", "carry", "slice", "invariant")
    assert signature.results == ("carry", "carry", "stacked")
    [region] = signature.regions
    assert region.runs == "at least once"
    assert [p.at for p in region.inputs] == [0, 1, 2, 3]


def test_types_follow_the_sizes_of_the_caller() -> None:
    def f(x: Any) -> Any:
        return hf.scan(lambda c, row: (c, row * 2), 0.0, x)

    inner = hf.trace(f, hf.spec("f32[n, m]"), mode="fake")
    # The module's own symbols give way to those of the graph that it becomes part of.
    outer = hf.trace(lambda y: inner(y[:, 1:]), hf.spec("f32[k, 5]"), mode="fake")
    verify(outer.graph)
    assert [str(t) for t in outer.graph.out_types] == ["f32[]", "f32[k, 4]"]
    with interpreted():
        got = outer(np.ones((2, 5), np.float32))
    agree(got, (0.0, np.full((2, 4), 2.0)))


@pytest.mark.parametrize("run", RUNNERS, ids=NAMES)
def test_a_step_of_a_scan_that_may_stop_writes_to_its_own_slice(run: Any) -> None:
    def step(carry: Any, row: Any) -> Any:
        row[0] = 9.0
        return carry + hf.sum(row), row

    def f(x: Any) -> Any:
        return hf.scan(step, 0.0, x, until=lambda carry: carry > 100.0)

    x = hf.asarray(np.ones((3, 2), np.float32))
    carry, ys, steps = run(f, x)
    assert (float(carry), int(steps)) == (30.0, 3)
    agree(ys, np.array([[9, 1]] * 3))
    agree(x, np.ones((3, 2)))


@each_execution
def test_a_value_may_be_a_row_of_a_loop_and_of_one_inside_it(run: Any) -> None:
    def f(x: Any) -> Any:
        def step(c: Any, _: Any) -> Any:
            row = hf.while_loop(lambda c: hf.sum(c) < 10.0, lambda c: c * 2.0, c)
            rows = hf.scan(lambda s, _: (s, row), c, x)[1]
            return hf.tanh(hf.sum(rows, axis=0)), row

        return hf.scan(step, x, x)[1]

    first = np.linspace(0.5, 1.5, 40)  # rows that are too long for registers
    carry, wanted = first, []
    for _ in range(40):
        while carry.sum() < 10.0:
            carry = carry * 2.0
        wanted.append(carry)
        carry = np.tanh(40 * carry)
    np.testing.assert_allclose(run(f, first), np.stack(wanted), rtol=1e-13)


def test_slices_that_steps_return_are_not_stacked_anew() -> None:
    def f(x: Any) -> Any:
        def step(c: Any, row: Any) -> Any:
            kept = hf.cond(c > 1, lambda r: r, lambda r: r, row)
            return c + row[0], (c, kept, row)

        _, (sums, kept, rows) = hf.scan(step, 0.0, x, reverse=True)
        return sums, kept + rows

    jitted = hf.jit(f)
    sums, doubled = jitted(X)
    agree(sums, np.array([1.5, 1.75, 1.25, 0.0], np.float32))
    agree(doubled, X * 2)
    assert " in arena" not in str(jitted.loop_ir)
