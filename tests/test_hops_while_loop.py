"""`while_loop` and `fori_loop`: in every execution, against plain Python."""

from collections import namedtuple
from typing import Any

import numpy as np
import pytest

import hopflow
from hopflow.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    CarryTypeError,
    LoopLimitError,
    MutationError,
    PredicateError,
    ResultTypeError,
    StructureError,
)
from hopflow.testing.executions import NAMES, RUNNERS, agree, fails

pytestmark = pytest.mark.slow

hf: Any = hopflow

each_execution = pytest.mark.parametrize("run", RUNNERS, ids=NAMES)

X = np.array([0.5, -1.0, 2.0], np.float32)
State = namedtuple("State", "i x")


# --- what it computes -----------------------------------------------------------------


@each_execution
@pytest.mark.parametrize("n", [0, 1, 5])
def test_a_tuple_is_spread_and_comes_back_as_one(run: Any, n: int) -> None:
    def f(n: Any, x: Any) -> Any:
        return hf.while_loop(
            lambda i, a: i < n, lambda i, a: (i + 1, a * 0.5 + i), (0, x)
        )

    want = X
    for i in range(n):
        want = want * np.float32(0.5) + i
    agree(run(f, hf.asarray(n), hf.asarray(X)), (n, want))


@each_execution
@pytest.mark.parametrize("make", [list, State._make, lambda t: {"i": t[0], "x": t[1]}])
def test_any_other_tree_is_one_argument(run: Any, make: Any) -> None:
    def parts(t: Any) -> Any:
        return t.values() if isinstance(t, dict) else t

    def body(tree: Any) -> Any:
        i, x = parts(tree)
        return make((i + 1, hf.sin(x)))

    def f(x: Any) -> Any:
        return hf.while_loop(lambda t: next(iter(parts(t))) < 3, body, make((0, x)))

    agree(run(f, hf.asarray(X)), make((3, np.sin(np.sin(np.sin(X))))))


@each_execution
def test_one_tensor_is_a_carry(run: Any) -> None:
    def f(x: Any) -> Any:
        return hf.while_loop(lambda a: hf.sum(a) < 100, lambda a: a * 2, x)

    want = X
    while want.sum() < 100:
        want = want * 2
    agree(run(f, hf.asarray(X)), want)


@each_execution
def test_none_is_structure_and_bools_and_floats_are_leaves(run: Any) -> None:
    def f() -> Any:
        return hf.while_loop(
            lambda go, n, none, h: go,
            lambda go, n, none, h: (n < 3, n + 1, None, h / 2),
            (True, 0, None, 1.0),
        )

    agree(run(f), (False, 4, None, 0.0625))


@each_execution
def test_bodies_and_tests_close_over_tensors_and_numbers(run: Any) -> None:
    limit, y = 4, hf.asarray(X)

    def f(x: Any) -> Any:
        z = x + 1
        return hf.while_loop(
            lambda i, a: hf.logical_and(i < limit, a[0] < z[2] * 10),
            lambda i, a: (i + 1, a + z * y),
            (0, x),
        )

    z, a, i = X + 1, X, 0
    while i < limit and a[0] < z[2] * 10:
        i, a = i + 1, a + z * X
    agree(run(f, hf.asarray(X)), (i, a))


@each_execution
def test_loops_nest_and_read_the_outer_counter(run: Any) -> None:
    def f(x: Any) -> Any:
        def outer(i: Any, a: Any) -> Any:
            def inner(j: Any, b: Any) -> Any:
                return j + 1, b + x * i - j

            return i + 1, hf.while_loop(lambda j, b: j < i, inner, (0, a))[1]

        return hf.while_loop(lambda i, a: i < 4, outer, (0, x))

    a = X
    for i in range(4):
        for j in range(i):
            a = a + X * i - j
    agree(run(f, hf.asarray(X)), (4, a))


@each_execution
def test_a_write_to_a_carry_is_one_to_a_private_copy(run: Any) -> None:
    x = hf.asarray(X.copy())

    def body(i: Any, a: Any, b: Any) -> Any:
        a += 1
        b[0] = 9.0
        return i + 1, a, b * 1

    def test(i: Any, a: Any, b: Any) -> Any:
        a += 100
        return i < 2

    def f(x: Any) -> Any:
        return hf.while_loop(test, body, (0, x, x))

    agree(run(f, x), (2, X + 2, np.array([9.0, *X[1:]], np.float32)))
    agree(x, X)


@each_execution
def test_a_written_capture_is_a_hidden_carry(run: Any) -> None:
    def f(x: Any) -> Any:
        log = x * 0

        def body(i: Any) -> Any:
            log[i] = log[i - 1] + i
            return i + 1

        i = hf.while_loop(lambda i: hf.logical_and(i < 3, log[0] < 9), body, 0)
        return i, log

    log = X * 0
    for i in range(3):
        log[i] = log[i - 1] + i
    agree(run(f, hf.asarray(X)), (3, log))


@each_execution
def test_a_written_capture_of_a_loop_in_a_loop_reaches_the_caller(run: Any) -> None:
    total = hf.zeros(())

    def f() -> Any:
        def outer(i: Any) -> None:
            def inner(j: Any) -> None:
                total[...] = total + i * j

            hf.fori_loop(0, 3, inner, ())

        hf.fori_loop(0, 4, outer, ())

    run(f)
    agree(total, sum(i * j for i in range(4) for j in range(3)) * np.float32(1))


# --- numbers take a dtype -------------------------------------------------------------


@each_execution
@pytest.mark.parametrize("n", [0, 2])
def test_a_number_takes_the_dtype_that_the_body_returns(run: Any, n: int) -> None:
    x = hf.asarray(X.astype(np.float64))

    def f(x: Any) -> Any:
        return hf.while_loop(
            lambda i, a: i < n, lambda i, a: (i + 1, a + hf.sum(x)), (0, 0)
        )

    _, a = run(f, x)
    assert a.dtype is hf.float64
    agree(a, float(n * X.sum()))


@each_execution
def test_a_number_that_the_body_returns_takes_the_dtype_of_the_carry(run: Any) -> None:
    def f(x: Any) -> Any:
        return hf.while_loop(lambda i, a: i < 1, lambda i, a: (i + 1, 7), (0, x))

    _, a = run(f, hf.asarray(2.5, dtype="float64"))
    assert a.dtype is hf.float64
    agree(a, 7.0)


def test_a_weak_carry_is_traced_twice_at_most() -> None:
    traces = []

    def body(i: Any, a: Any) -> Any:
        traces.append(a.dtype)
        return i + 1, a + 0.5

    hf.trace(lambda: hf.while_loop(lambda i, a: i < 3, body, (0, 0)))
    assert traces == [hf.int64, hf.float32]


# --- max_steps and constant tests -----------------------------------------------------


@each_execution
def test_max_steps_is_no_limit_for_a_loop_that_ends(run: Any) -> None:
    def f() -> Any:
        return hf.while_loop(lambda i: i < 5, lambda i: i + 1, 0, max_steps=5)

    agree(run(f), 5)


@each_execution
@pytest.mark.parametrize("limit", [0, 4])
def test_a_loop_that_is_not_done_by_max_steps_fails(run: Any, limit: int) -> None:
    def f() -> Any:
        return hf.while_loop(lambda i: i < 5, lambda i: i + 1, 0, max_steps=limit)

    text = (
        rf"`max_steps` = {limit} steps were taken and the condition still holds. Raise "
        "`max_steps`, or check the condition."
    )
    # What knows the line that the user wrote says it.
    with pytest.raises(LoopLimitError, match=rf"^while_loop( \(.*\))?: {text}$"):
        run(f)


@each_execution
def test_a_test_that_is_constantly_false_makes_no_step(run: Any) -> None:
    def f(x: Any) -> Any:
        return hf.while_loop(lambda a, b: False, lambda a, b: (a + 1, b + 0.5), (x, 1))

    agree(run(f, hf.asarray(X)), (X, 1.0))


def test_a_test_that_is_constantly_false_leaves_no_loop() -> None:
    module = hf.trace(lambda x: hf.while_loop(lambda a: False, lambda a: a, x), X)
    assert module.graph.nodes_of("while_loop") == []


def test_the_body_of_a_loop_without_steps_is_checked() -> None:
    with pytest.raises(CarryTypeError):
        hf.while_loop(lambda a: False, lambda a: a[0], hf.zeros(3))


def test_a_test_that_is_constantly_true_needs_a_limit() -> None:
    def forever(i: Any) -> bool:
        return True

    fails(
        ArgumentValueError,
        "while_loop: `forever` (test_hops_while_loop.py:#) is always True, so the loop "
        "would never end. Give `max_steps`, or test the carry.",
        *(hf.while_loop, forever, lambda i: i, 0),
    )
    with pytest.raises(LoopLimitError):
        hf.trace(lambda: hf.while_loop(forever, lambda i: i + 1, 0, max_steps=3))()


# --- fori_loop ------------------------------------------------------------------------


@each_execution
@pytest.mark.parametrize(("lower", "upper"), [(0, 4), (2, 5), (3, 3), (5, 2), (-2, 1)])
def test_fori_loop_counts(run: Any, lower: int, upper: int) -> None:
    def f(n: Any, x: Any) -> Any:
        return hf.fori_loop(lower, n, lambda i, a, b: (a + x * i, b * 2), (x, 1))

    a, b = X, 1
    for i in range(lower, upper):
        a, b = a + X * i, b * 2
    agree(run(f, upper, hf.asarray(X)), (a, b))
    agree(run(f, hf.asarray(upper), hf.asarray(X)), (a, b))


@each_execution
def test_the_counter_has_the_dtype_of_the_bounds(run: Any) -> None:
    def f(n: Any) -> Any:
        return hf.fori_loop(0, n, lambda i, a: i, hf.asarray(9, dtype="int32"))

    last = run(f, hf.asarray(3, dtype="int32"))
    assert last.dtype is hf.int32
    agree(last, np.int32(2))


@each_execution
def test_a_body_may_write_to_its_counter(run: Any) -> None:
    def body(i: Any, total: Any) -> Any:
        i *= 10
        return total + i

    agree(run(lambda: hf.fori_loop(0, 4, body, 0)), 60)


@each_execution
def test_fori_loop_takes_any_tree_as_a_carry(run: Any) -> None:
    def f(x: Any) -> Any:
        return hf.fori_loop(0, 3, lambda i, t: {"a": t["a"] * 2, "n": None}, x)

    agree(run(f, {"a": hf.asarray(X), "n": None}), {"a": X * 8, "n": None})


def test_fori_loop_is_a_while_loop() -> None:
    module = hf.trace(lambda x: hf.fori_loop(0, 9, lambda i, a: a + i, x), X)
    [node] = module.graph.nodes
    assert node.op.name == "while_loop"
    assert [v.node.name for v in node.params["body"].inputs] == ["i", "a"]


def test_the_bounds_are_integers() -> None:
    fails(
        PredicateError,
        "fori_loop: `upper` must be an integer scalar, and is f32[]. Convert it with "
        "`hf.astype`.",
        *(hf.fori_loop, 0, 2.5, lambda i, a: a, 0),
    )


# --- errors ---------------------------------------------------------------------------


def below(*_: Any) -> Any:
    return hf.asarray(True)


@each_execution
def test_a_carry_that_changes_is_refused_by_leaf(run: Any) -> None:
    def step(carry: Any) -> Any:
        return {
            "count": hf.astype(carry["count"], hf.int32),
            "hidden": hf.concat([carry["hidden"], carry["hidden"]]),
        }

    def f() -> Any:
        carry = {"count": hf.zeros(()), "hidden": hf.zeros(8)}
        return hf.while_loop(below, step, carry)

    fails(
        CarryTypeError,
        "while_loop: `step` (test_hops_while_loop.py:#) must return its carry with the "
        "types it came in with.\n"
        "  carry['count']   in f32[], out i32[]  (dtype)\n"
        "  carry['hidden']  in f32[8], out f32[16]  (axis 0: 8 != 16)\n"
        "Cast or reshape in the body, or start from an `init` of that type.",
        *(run, f),
    )


@each_execution
def test_a_number_settles_once(run: Any) -> None:
    def f() -> Any:
        def body(i: Any, a: Any) -> Any:
            grown = hf.float64 if a.dtype is hf.float32 else hf.float32
            return i + 1, hf.astype(a, grown)

        return hf.while_loop(lambda i, a: i < 3, body, (0, 0.5))

    with pytest.raises(CarryTypeError, match=r"carry\[1\]  in f64\[\], out f32\[\]"):
        run(f)


@each_execution
def test_a_carry_of_another_structure_is_refused(run: Any) -> None:
    def step(a: Any, b: Any) -> Any:
        return a

    fails(
        StructureError,
        "while_loop: `step` (test_hops_while_loop.py:#) must return its carry in the "
        "structure it came in.\n"
        "  expected (*, *)\n"
        "  got      *\n"
        "Return the same containers with as many leaves (`*` is a leaf); only leaves "
        "may change.",
        *(run, lambda: hf.while_loop(below, step, (0, 1))),
    )


@each_execution
def test_fori_loop_speaks_of_the_carry_as_the_user_sees_it(run: Any) -> None:
    def step(i: Any, a: Any) -> Any:
        return a[0]

    fails(
        CarryTypeError,
        "fori_loop: `step` (test_hops_while_loop.py:#) must return its carry with the "
        "types it came in with.\n"
        "  carry  in f32[2], out f32[]  (rank 1 != 0)\n"
        "Cast or reshape in the body, or start from an `init` of that type.",
        *(run, lambda: hf.fori_loop(0, 3, step, hf.zeros(2))),
    )


@each_execution
@pytest.mark.parametrize(
    ("result", "text"),
    [
        (
            lambda i: i,
            "must be a bool scalar (bool[]), and is i64[]. Compare it with something: "
            "`x != 0`.",
        ),
        (
            lambda i: hf.zeros(3) > i,
            "must be a bool scalar (bool[]), and is bool[3]. Reduce it with `hf.all` "
            "or `hf.any`, or use `hf.map` to decide for each element.",
        ),
    ],
)
def test_a_test_returns_a_bool_scalar(run: Any, result: Any, text: str) -> None:
    fails(
        PredicateError,
        "while_loop: the result of `<lambda>` (test_hops_while_loop.py:#) " + text,
        *(run, lambda: hf.while_loop(result, lambda i: i + 1, 0)),
    )


@each_execution
def test_a_test_returns_one_tensor(run: Any) -> None:
    fails(
        PredicateError,
        "while_loop: `<lambda>` (test_hops_while_loop.py:#) must return a bool scalar "
        "(bool[]), and returns a tree of 2 tensors. Combine them with "
        "`hf.logical_and`.",
        *(run, lambda: hf.while_loop(lambda i: (i < 1, i < 2), lambda i: i + 1, 0)),
    )


@each_execution
@pytest.mark.parametrize("start", [0, 0.0])
@pytest.mark.parametrize("dtype", ["int8", "int64", "float16", "float32", "float64"])
def test_each_step_sees_the_carry_in_the_dtype_that_it_settles_on(
    run: Any, start: Any, dtype: str
) -> None:
    one, small = hf.asarray(1, dtype=dtype), hf.asarray(100, dtype="int8")

    def f() -> Any:
        def step(c: Any, x: Any) -> Any:
            # An integer sum wraps, or does not, by the carry's type.
            return c + x, c + 100 + small

        def fori(i: Any, c: Any, y: Any) -> Any:
            return c + one, y + hf.astype(c + small + 100, hf.float64)

        xs = hf.reshape(one, (1,))
        wide = hf.asarray(0.0, dtype="float64")
        return [
            *hf.scan(step, start, xs),
            *hf.scan(step, start, xs, until=lambda c: c > 5),
            *hf.fori_loop(0, 1, fori, (start, wide)),
            *hf.while_loop(
                lambda c, y: c < 1, lambda c, y: fori(0, c, y), (start, wide)
            ),
        ]

    found, expected = run(f), hf.jit(f)()
    agree(found, expected)
    assert [(t.type, t.type.weak) for t in found] == [
        (t.type, t.type.weak) for t in expected
    ]


def test_a_body_in_debug_mode_may_ask_for_values() -> None:
    with hf.debug():
        total = hf.fori_loop(0, 3, lambda i, c: c + float(i) * 2, 0)
        agree(total, 6.0)


@each_execution
def test_a_test_does_not_write_to_captures(run: Any) -> None:
    x = hf.zeros(1)

    def test(i: Any) -> Any:
        x[0] = i
        return i < 2

    fails(
        MutationError,
        "while_loop: `test` (test_hops_while_loop.py:#) writes to a captured tensor "
        "f32[1], but a condition only tests. Write to it in `body_fn`.",
        *(run, lambda: hf.while_loop(test, lambda i: i + 1, 0)),
    )
    agree(x, np.zeros(1, np.float32))


def test_arguments_are_checked_before_anything_runs() -> None:
    def never(*_: Any) -> Any:
        raise AssertionError

    loop = hf.while_loop
    cases: list[tuple[type[Exception], str, tuple[Any, ...], dict[str, Any]]] = [
        (
            ArgumentTypeError,
            "while_loop: `body_fn` must be a function, and is `NoneType`.",
            (never, None, 0),
            {},
        ),
        (
            ArgumentTypeError,
            "while_loop: `carry.x` must be a tensor or a number, and is `str`. Pass "
            "what is not data through a closure.",
            (never, never, State(1, "a")),
            {},
        ),
        (
            ArgumentTypeError,
            "while_loop: `max_steps` must be an int or None, and is `float`.",
            (never, never, 0),
            {"max_steps": 1.5},
        ),
        (
            ArgumentValueError,
            "while_loop: `max_steps` must not be negative, and is -1.",
            (never, never, 0),
            {"max_steps": -1},
        ),
        (
            ArgumentValueError,
            "while_loop: `reverse_mode` must be 'auto', 'save', 'recompute', "
            "'checkpoint' or an `hf.Checkpoint`, and is 'all'.",
            (never, never, 0),
            {"reverse_mode": "all"},
        ),
    ]
    for error, text, args, kwargs in cases:
        fails(error, text, loop, *args, **kwargs)
    fails(
        ArgumentValueError,
        "Checkpoint: `count` must be a positive int, and is 0.",
        *(hf.Checkpoint, 0),
    )


def test_a_checkpoint_mode_is_kept_in_the_graph() -> None:
    mode = hf.Checkpoint(3)
    module = hf.trace(
        lambda: hf.while_loop(lambda i: i < 3, lambda i: i + 1, 0, reverse_mode=mode)
    )
    assert module.graph.nodes[0].params["reverse_mode"] == mode
    assert mode.structural_key() == "checkpoint 3"


@each_execution
def test_a_body_returns_tensors_and_numbers(run: Any) -> None:
    fails(
        ResultTypeError,
        "while_loop: `<lambda>` (test_hops_while_loop.py:#) must return tensors or "
        "numbers, and its `result[1]` is `str`. Return the data alone, or None.",
        *(run, lambda: hf.while_loop(below, lambda i, j: (i, "j"), (0, 0))),
    )
