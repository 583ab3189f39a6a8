"""Symbols in `trace` and `jit`: sizes, numbers, guards, and what is compiled when."""

import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

import hopflow as hf
from hopflow.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    CheckError,
    DataDependentError,
    GuardError,
    HopflowError,
    ShapeError,
    TraceError,
)


def compiled(f: Any, *calls: tuple[Any, ...]) -> list[int]:
    """How often the function had been traced after each of the calls."""
    found = []
    start = hf.stats().traces
    for args in calls:
        f(*args)
        found.append(hf.stats().traces - start)
    return found


def ones(*shape: int) -> Any:
    return hf.ones(shape)


# --- what is compiled when ------------------------------------------------------------


@pytest.mark.parametrize(
    ("dynamic", "traces"),
    [
        (None, [1, 2, 2, 2, 2, 2]),
        (True, [1, 1, 1, 1, 1, 1]),
        (False, [1, 2, 3, 3, 4, 5]),
        ((True,), [1, 1, 1, 1, 1, 1]),
        (({0: True},), [1, 1, 1, 1, 1, 1]),
        (((True,),), [1, 1, 1, 1, 1, 1]),
        ({"x": True}, [1, 1, 1, 1, 1, 1]),
        ((hf.Dim("n"),), [1, 1, 1, 1, 1, 1]),
        (({0: hf.Dim("n", max=9)},), [1, 1, 1, 1, 1, 1]),
    ],
)
def test_sizes_become_symbols(dynamic: Any, traces: list[int]) -> None:
    f = hf.jit(lambda x: hf.sum(x * 2) + x.shape[0], dynamic=dynamic)
    sizes = (3, 5, 7, 3, 0, 1)
    assert compiled(f, *((ones(n),) for n in sizes)) == traces
    for n in sizes:
        assert f(ones(n)).item() == 3 * n


def test_only_the_sizes_that_change_become_symbols() -> None:
    f = hf.jit(lambda x, w: x @ w)
    calls = [(ones(n, 4), ones(4, 3)) for n in (2, 5, 6, 1, 0)]
    assert compiled(f, *calls) == [1, 2, 2, 2, 2]
    assert "x: f32[s0, 4], w: f32[4, 3]" in f.graph_text.replace("\n", "")
    assert compiled(f, (ones(2, 7), ones(7, 3)), (ones(3, 9), ones(9, 3))) == [1, 1]


def test_equal_sizes_are_one_symbol_by_a_guard() -> None:
    f = hf.jit(lambda x, y: x + y, dynamic=True)
    assert compiled(f, (ones(3), ones(3)), (ones(5), ones(5))) == [1, 1]
    assert f.guards[0].startswith("x.shape[0] == y.shape[0]  (test_dynamic.py:")
    # A size of 1 that is broadcast is another trace, and then it is one for all sizes.
    assert compiled(f, (ones(1), ones(5)), (ones(1), ones(6))) == [1, 1]
    assert compiled(f, (ones(7), ones(1)), (ones(8), ones(1))) == [1, 1]
    assert f(ones(4), ones(1)).shape == (4,)
    with pytest.raises(ShapeError, match="do not broadcast"):
        f(ones(4), ones(3))


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_python_branch_is_a_guard(dynamic: Any) -> None:
    def f(x: Any) -> Any:
        if x.shape[0] % 4 == 0:
            return hf.sum(hf.reshape(x, (-1, 4)), axis=0)
        return x

    g = hf.jit(f, dynamic=dynamic)
    for n in (4, 8, 3, 16, 5, 12):
        np.testing.assert_array_equal(np.asarray(g(ones(n))), np.asarray(f(ones(n))))
    assert [text.split("  ")[0] for text in g.guards] == ["x.shape[0] % 4 == 0"]
    g(ones(4))
    g(ones(20))
    assert g.explain(ones(24)) == "runs what has been compiled"


def test_explain_says_why_a_call_is_compiled() -> None:
    def f(x: Any) -> Any:
        return x * 2 if x.shape[0] % 8 == 0 else x

    g = hf.jit(f, dynamic=True)
    assert g.explain(ones(8)).startswith("compiled, as no call had this structure")
    g(ones(8))
    line = f.__code__.co_firstlineno + 1
    assert g.explain(ones(9)) == (
        f"recompiled because `x.shape[0] % 8 == 0` at test_dynamic.py:{line} "
        "no longer holds"
    )
    static = hf.jit(f)
    static(ones(8))
    assert static.explain(ones(9)) == (
        "recompiled because `x.shape[0] == 8` no longer holds (9)"
    )


def test_guards_that_others_imply_are_left_out() -> None:
    def f(x: Any) -> Any:
        if x.shape[0] > 3 and x.shape[0] > 2 and x.shape[0] != 1:
            return x + 1
        return x

    g = hf.jit(f, dynamic=True)
    g(ones(5))
    assert [text.split("  ")[0] for text in g.guards] == ["x.shape[0] >= 4"]


# --- numbers --------------------------------------------------------------------------


def test_a_number_does_not_recompile_unless_it_decides() -> None:
    f = hf.jit(lambda x, n, lr: x * n - lr)
    calls = [(ones(3), n, lr) for n, lr in ((2, 0.5), (3, -0.0), (-7, math.inf))]
    assert compiled(f, *calls) == [1, 1, 1]
    for x, n, lr in calls:
        want = np.ones(3, np.float32) * n - np.float32(lr)
        np.testing.assert_array_equal(np.asarray(f(x, n, lr)), want)
    g = hf.jit(lambda x, n: x if n > 2 else x + 1)
    assert compiled(g, (ones(3), 1), (ones(3), 2), (ones(3), 3), (ones(3), 9)) == [
        1,
        1,
        2,
        2,
    ]


@pytest.mark.parametrize("key", [None, 0, "n"])
def test_calls_by_turns_find_their_traces_again(key: Any) -> None:
    def f(x: Any, tree: Any) -> Any:
        n = tree if key is None else tree[key]
        return x * n if n > 2 else x - n

    g = hf.jit(f)
    x = np.arange(4, dtype=np.float32)
    start = hf.stats().traces
    for n in (1, 5, 1, 5, 2, 7):
        tree = n if key is None else [n] if key == 0 else {key: n}
        for given in (x, hf.asarray(x)):
            np.testing.assert_array_equal(np.asarray(g(given, tree)), f(x, tree))
        assert ("<=" in g.guards[0]) == (n <= 2)  # of the trace that ran last
    assert hf.stats().traces - start == 2


def test_a_number_of_a_loop_guards_its_value() -> None:
    def f(x: Any, n: int) -> Any:
        for _ in range(n):
            x = x + 1
        return x

    g = hf.jit(f)
    assert compiled(g, (ones(2), 3), (ones(2), 4), (ones(2), 3)) == [1, 2, 2]
    assert g.guards[0].startswith("n == 3")


@pytest.mark.parametrize(
    ("f", "args"),
    [
        (lambda x, n: x * n, (3,)),
        (lambda x, n: hf.full((n, 2), 1.5), (4,)),
        (lambda x, n: hf.reshape(x, (n, -1)), (3,)),
        (lambda x, n: x[n], (2,)),
        (lambda x, n: x[n], (-2,)),
        (lambda x, n: x[:n], (2,)),
        (lambda x, n: x[n:], (-3,)),
        (lambda x, n: hf.sum(x, axis=n), (0,)),
        (lambda x, n: hf.arange(n) * 2, (5,)),
        (lambda x, n: hf.fori_loop(0, n, lambda i, c: c + i, 0), (5,)),
        (lambda x, n: hf.scan(lambda c, _: (c + 1, c), 0, None, length=n)[1], (5,)),
        (lambda x, n: n + 1, (5,)),
        (lambda x, n: (n // 2, n % 3, n * n, -n, n / 2, n - 0.5), (7,)),
        (lambda x, n: n > 3, (7,)),
        (lambda x, n: (n * 2.0, n + 1, abs(n), -n), (-0.5,)),
        (lambda x, n: x * n, (0.25,)),
        (lambda x, n: hf.sin(n), (0.25,)),
        (lambda x, n: hf.cond(x[0] > n, lambda: x, lambda: x * n), (0.25,)),
        (lambda x, n: hf.cond(x[0] > n, lambda: x, lambda: x * n), (2,)),
        (lambda x, n: hf.map(lambda v: v * n, x), (2.5,)),
        (lambda x, n: hf.while_loop(lambda c: c < n, lambda c: c * 2, 1.0), (20.5,)),
    ],
)
def test_numbers_mean_what_they_mean_in_python(f: Any, args: tuple[Any, ...]) -> None:
    x = np.arange(6, dtype=np.float32)
    number = args[0]
    others = [number + 1, number] if isinstance(number, int) else [number * 0.5, number]
    jitted = hf.jit(f)
    jitted(x, number)
    for other in others:
        try:
            want = f(hf.asarray(x), other)
        except HopflowError as error:
            with pytest.raises(type(error)):
                jitted(x, other)
            continue
        got = jitted(x, other)
        for a, b in zip(_leaves(got), _leaves(want), strict=True):
            assert type(a) is type(b)
            np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-6)


def _leaves(tree: Any) -> list[Any]:
    return list(tree) if isinstance(tree, tuple) else [tree]


def test_an_integer_beyond_int64_is_a_constant() -> None:
    f = hf.jit(lambda x, n: (x, n // 2**40))
    for n in (2**63 - 1, -(2**63), 2**63, 2**80):
        assert f(hf.ones(1), n)[1] == n // 2**40


def test_the_item_of_an_input_is_backed() -> None:
    def f(x: Any, n: Any) -> Any:
        k = n.item()
        return hf.full((k,), 2.0) + x, k

    g = hf.jit(f)
    y, k = g(hf.asarray(1.0), hf.asarray(3))
    assert (y.shape, k) == ((3,), 3)
    assert compiled(g, (hf.asarray(1.0), hf.asarray(5))) == [0]
    assert g(hf.asarray(1.0), hf.asarray(5))[1] == 5

    h = hf.jit(lambda x, n: x if n.item() > 2 else -x)
    calls = [(ones(2), hf.asarray(n)) for n in (3, 4, 1, 2)]
    assert compiled(h, *calls) == [1, 1, 2, 2]
    assert h.guards[0].startswith("n.item() <= 2")
    assert h(ones(2), hf.asarray(9)).tolist() == [1, 1]

    lr = hf.jit(lambda x, lr: x * lr.item() if lr.item() < 1 else x)
    assert lr(ones(2), np.asarray(0.5)).tolist() == [0.5, 0.5]
    assert lr(ones(2), np.asarray(0.25)).tolist() == [0.25, 0.25]
    assert lr(ones(2), np.asarray(1.5)).tolist() == [1, 1]


# --- Dim ------------------------------------------------------------------------------


def test_dimensions_of_one_name_are_equal() -> None:
    n = hf.Dim("n", min=2, max=64)
    f = hf.jit(lambda x, y, z: x[1:] + y + z[::2], dynamic=(n + 1, n, 2 * n))
    for k in (4, 9, 2):
        assert f(ones(k + 1), ones(k), ones(2 * k)).shape == (k,)
    assert "x: f32[n + 1], y: f32[n], z: f32[2*n]" in f.graph_text
    for sizes in ((5, 5, 8), (5, 4, 7), (66, 65, 130), (2, 1, 2)):
        with pytest.raises(ArgumentValueError, match="is declared as"):
            f(*map(ones, sizes))
    with pytest.raises(ArgumentValueError, match=r"`y.shape\[0\]` is declared as `n`"):
        f(ones(5), ones(5), ones(8))


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (
            lambda: hf.Dim(3),  # type: ignore[arg-type]
            ArgumentTypeError,
            "`name` must be a string",
        ),
        (lambda: hf.Dim("a b"), ArgumentValueError, "is no name"),
        (lambda: hf.Dim("a", min=-1), ArgumentValueError, "cannot lie from -1"),
        (lambda: hf.Dim("a", min=3, max=2), ArgumentValueError, "cannot lie from 3"),
        (
            lambda: hf.Dim("a", max=2.5),  # type: ignore[arg-type]
            ArgumentTypeError,
            "`max` must be an int",
        ),
        (lambda: hf.Dim("a") * 0, ArgumentValueError, "times 0 is no size"),
    ],
)
def test_dimensions_are_checked(make: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        make()


@pytest.mark.parametrize(
    ("dynamic", "error", "text"),
    [
        (3, ArgumentTypeError, "`dynamic` must be True, False, None"),
        ({"y": True}, ArgumentValueError, "names an argument 'y'"),
        ((True, True), ArgumentValueError, "is for 2 arguments, and there are 1"),
        (({1: True},), ArgumentValueError, "names axis 1, and the argument has 1"),
        (((True, True),), ArgumentValueError, "is for 2 axes"),
        ((("n",),), ArgumentTypeError, "and is 'n'"),
    ],
)
def test_dynamic_is_checked(dynamic: Any, error: type[Exception], text: str) -> None:
    for call in (
        lambda: hf.jit(lambda x: x, dynamic=dynamic)(ones(3)),
        lambda: hf.trace(lambda x: x, ones(3), mode="symbolic", dynamic=dynamic),
    ):
        with pytest.raises(error, match=text):
            call()


def test_dynamic_follows_the_structure_of_arguments() -> None:
    n = hf.Dim("n")

    def f(params: Any, *, scale: float) -> Any:
        return hf.sum(params["w"][0]) * scale

    g = hf.jit(f, dynamic={"params": {"w": [({0: n}, None)]}})
    with pytest.raises(ArgumentValueError, match=r"\['w'\]\[0\]` is for 2 axes"):
        g({"w": [ones(3)]}, scale=2.0)
    g = hf.jit(f, dynamic={"params": {"w": [{0: n}]}})
    assert compiled(g) == []
    for k in (3, 4, 5):
        assert g({"w": [ones(k)]}, scale=k * 0.5).item() == k * k * 0.5
    assert "f32[n]" in g.graph_text


# --- trace(mode="symbolic") -----------------------------------------------------------


def test_a_symbolic_trace_serves_all_sizes_and_numbers() -> None:
    def f(x: Any, n: int, lr: float) -> Any:
        return hf.sum(x, axis=0) * n + lr, n + 1, lr * 2

    gm = hf.trace(f, ones(3, 4), 2, 0.5, mode="symbolic")
    assert not gm.specializations
    for shape, n, lr in (((3, 4), 2, 0.5), ((5, 1), 7, -1.0), ((0, 0), 0, 0.0)):
        got, want = gm(ones(*shape), n, lr), f(ones(*shape), n, lr)
        np.testing.assert_allclose(np.asarray(got[0]), np.asarray(want[0]))
        assert got[1:] == want[1:]
        assert [type(v) for v in got[1:]] == [int, float]
    jitted = hf.jit(lambda x: gm(x, 3, 0.25))
    want = f(ones(2, 2), 3, 0.25)[0]
    np.testing.assert_allclose(np.asarray(jitted(ones(2, 2))[0]), np.asarray(want))


def test_a_symbolic_trace_checks_its_guards() -> None:
    def f(x: Any, n: int) -> Any:
        return x[:2] if x.shape[0] > 2 and n != 0 else x

    gm = hf.trace(f, ones(5), 1, mode="symbolic")
    assert gm(ones(3), 7).shape == (2,)
    with pytest.raises(
        GuardError,
        match=r"`x.shape\[0\] >= 3`, which test_dynamic.py:\d+ asked, fails: "
        r"x.shape\[0\] = 2",
    ):
        gm(ones(2), 1)
    with pytest.raises(
        CheckError,
        match=r"`n != 0` \(test_dynamic.py:\d+\) no longer holds, it is `0 != 0`",
    ):
        gm(ones(4), 0)
    with pytest.raises(ArgumentValueError, match="`n` was an int in the trace"):
        gm(ones(4), 2.0)


def guards_of(gm: Any) -> list[str]:
    return [str(guard.holds) for guard in gm.guards.guards]


SUM = "(s0 + s1) % 4 == 0"
REST = ["a != 1", "b % (a - 1) == 0"]  # a is 1 modulo a - 1


def checks_of(gm: Any) -> list[str]:
    nodes = gm.graph.nodes_of("check")
    return [n.params["message"].split("`")[1] for n in nodes]


@pytest.mark.parametrize(
    ("question", "shapes", "others", "guards", "checks"),
    [
        (lambda a, b, c: a > 2, (3, 3, 3), (2, 3, 3), ["s0 >= 3"], []),
        (lambda a, b, c: a == b, (3, 3, 3), (3, 4, 3), ["s0 == s1"], []),
        (lambda a, b, c: 2 * a + 1 == b, (3, 7, 3), (3, 3, 3), ["2*s0 == s1 - 1"], []),
        (lambda a, b, c: (a + b) % 4 == 0, (3, 5, 3), (3, 3, 3), [SUM], []),
        (lambda a, b, c: a * b == c, (3, 4, 12), (3, 4, 11), [], ["a*b == c"]),
        (lambda a, b, c: a * b % (a - 1) == 0, (3, 4, 1), (3, 5, 1), [], REST),
        (lambda a, b, c: a == b, (3, 4, 12), (3, 3, 1), [], ["a != b"]),
        (lambda a, b, c: a < b, (3, 4, 12), (4, 3, 1), [], ["a < b"]),
    ],
)
def test_what_is_more_than_a_range_is_checked_by_the_run(
    question: Any,
    shapes: tuple[int, ...],
    others: tuple[int, ...],
    guards: list[str],
    checks: list[str],
) -> None:
    def f(x: Any, y: Any, z: Any) -> Any:
        answer = question(x.shape[0], y.shape[0], z.shape[0])
        return hf.sum(x) + (1 if answer else 2)

    args = tuple(map(ones, shapes))
    gm = hf.trace(f, *args, mode="symbolic")
    assert guards_of(gm) == guards
    names = {"a": "x.shape[0]", "b": "y.shape[0]", "c": "z.shape[0]"}
    shown = [re.sub(r"\b[abc]\b", lambda m: names[m[0]], text) for text in checks]
    assert checks_of(gm) == shown
    gm(*args)
    with pytest.raises((GuardError, CheckError)):
        gm(*map(ones, others))
    loose = hf.trace(f, *args, mode="symbolic", runtime_asserts=False)
    assert checks_of(loose) == []
    assert guards_of(loose) == guards


def test_a_reshape_and_an_add_are_a_check() -> None:
    def f(x: Any, y: Any) -> Any:
        return hf.reshape(x, (-1,)) + y

    gm = hf.trace(f, ones(3, 4), ones(12), mode="symbolic")
    assert checks_of(gm) == ["x.shape[0]*x.shape[1] == y.shape[0]"]
    assert gm.graph.nodes[-1].op.name == "add"
    assert gm(ones(2, 5), ones(10)).shape == (10,)
    with pytest.raises(
        CheckError, match=r"\(test_dynamic.py:\d+\) no longer holds, it is `10 == 11`"
    ):
        gm(ones(2, 5), ones(11))


def test_checks_stand_in_the_bodies_of_operators() -> None:
    def f(x: Any) -> Any:
        def body(c: Any, v: Any) -> Any:
            n = hf.astype(v, "int32").item()
            hf.check(n < 3, "too large")
            return c + (1 if n < 5 else 2), None

        return hf.scan(body, 0, x)[0]

    gm = hf.trace(f, hf.asarray([1.0, 2.0]), mode="symbolic")
    [scan] = gm.graph.nodes_of("scan")
    [body] = scan.graphs.values()
    assert [n.op.name for n in body.nodes].index("check") <= 4
    assert gm(hf.asarray([0.0, 1.0, 2.0])).item() == 3
    with pytest.raises(CheckError, match="too large"):
        gm(hf.asarray([0.0, 3.0]))


def test_dynamic_chooses_in_a_trace() -> None:
    n = hf.Dim("n", max=8)
    gm = hf.trace(lambda x, y: x + y, ones(3), ones(3), mode="symbolic", dynamic=(n, n))
    assert "x: f32[n], y: f32[n]" in str(gm)
    assert gm(ones(8), ones(8)).shape == (8,)
    with pytest.raises(GuardError, match=r"`x.shape\[0\] <= 8`, as declared, fails"):
        gm(ones(9), ones(9))
    with pytest.raises(ShapeError):
        gm(ones(4), ones(3))


# --- unbacked numbers -----------------------------------------------------------------


def test_a_number_of_the_run_is_no_branch() -> None:
    def f(x: Any) -> Any:
        n = hf.sum(x).item()
        return x if n > 3 else -x

    for run in (
        lambda: hf.jit(f)(hf.ones(3)),
        lambda: hf.trace(f, hf.ones(3), mode="symbolic"),
    ):
        with pytest.raises(DataDependentError, match=r"hf.check_is_size"):
            run()
    with pytest.raises(TraceError, match="item"):
        hf.trace(f, hf.ones(3), mode="fake")


def test_a_number_of_the_run_is_computed_with() -> None:
    def f(x: Any) -> Any:
        total = hf.sum(x)
        assert total.item().same(total.item())
        k = hf.astype(total, "int32").item()
        return x * total.item(), k * 2 + 1, total.item() / 2

    got = hf.jit(f)(hf.arange(4.0))
    assert got[0].tolist() == [0, 6, 12, 18]
    assert got[1:] == (13, 3.0)


def test_checks_on_numbers_decide_later_questions() -> None:
    def f(x: Any) -> Any:
        n = hf.sum(x).item()
        hf.check(n > 2, "too few")
        return x if n > 1 else -x

    g = hf.jit(f)
    assert g(hf.asarray([1, 2])).tolist() == [1, 2]
    with pytest.raises(CheckError, match="too few"):
        g(hf.asarray([1, 1]))
    assert [n.op.name for n in g.graph.nodes].index("check") <= 4


def test_check_is_size() -> None:
    def f(x: Any) -> Any:
        n = hf.sum(x).item()
        hf.check_is_size(n, max=10)
        return x if n >= 0 and n <= 12 else -x

    g = hf.jit(f)
    assert g(hf.asarray([1, 2])).tolist() == [1, 2]
    for values in ([-1, 0], [10, 1]):
        with pytest.raises(CheckError, match="check_is_size"):
            g(hf.asarray(values))
    hf.check_is_size(3)
    hf.check_is_size(hf.asarray(3))
    with pytest.raises(CheckError):
        hf.check_is_size(-1)
    with pytest.raises(CheckError, match=f"`n` is {2**66}, which int64 cannot hold"):
        hf.check_is_size(2**66)


@pytest.mark.parametrize("value", [2.5, 2.0, True, float("nan"), float("inf"), [2]])
def test_check_is_size_takes_integers_alone(value: Any) -> None:
    f = hf.check_is_size
    tensor = hf.asarray(value)
    runs: list[Callable[[], Any]] = [
        lambda: f(value),
        lambda: f(np.asarray(value)),
        lambda: f(tensor),
        lambda: hf.jit(f)(tensor),
        lambda: hf.vmap(f)(hf.stack([tensor, tensor])),
        *(partial(hf.trace, f, tensor, mode=m) for m in ("real", "fake", "symbolic")),
    ]
    for run in runs:
        with pytest.raises(
            ArgumentTypeError, match="check_is_size: `n` must be an int"
        ):
            run()


# --- what the property test found -----------------------------------------------------


def test_a_size_that_is_known_to_be_1_broadcasts() -> None:
    def f(x: Any, y: Any) -> Any:
        return x - hf.reshape(y, (-1, 2))[:, :1], hf.map(lambda v: v + y[::2], x)

    g = hf.jit(f, dynamic=True)
    for n in (3, 5, 0):
        args = hf.arange(4.0 * n).reshape(n, 4)[:, :1], hf.asarray([5.0, 7.0])
        for got, want in zip(g(*args), f(*args), strict=True):
            np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


@pytest.mark.parametrize(
    "f",
    [
        lambda x, a: hf.full((2,), a),
        lambda x, a: hf.where(x > 1, a, a + 1),
        lambda x, a: hf.where(x > 1, x, a),
        lambda x, a: hf.sum(a),
        lambda x, a: hf.linspace(0, a, 3),
        lambda x, a: hf.arange(a),
        lambda x, a: hf.asarray([a, 1.0]),
        lambda x, a: hf.asarray([[a], [2]]),
        lambda x, a: x % a,
    ],
)
@pytest.mark.parametrize("a", [2.5, 3])
def test_numbers_give_the_dtypes_that_constants_do(f: Any, a: Any) -> None:
    x = hf.arange(4)
    got, want = hf.jit(f)(x, a), f(x, a)
    assert got.dtype is want.dtype
    np.testing.assert_array_equal(np.asarray(got), np.asarray(want))


@pytest.mark.parametrize(
    "f",
    [
        lambda n: (n & 3, n | 4, n ^ 1, n << 2, n >> 1, ~n, 1 << n, 99 >> n, 7 & n),
        lambda n: (2**n, n**n, n**2),
        lambda n: divmod(n + 0.5, 2) + divmod(7, n + 0.5),
        lambda n: (+(n + 0.5), round(n + 0.26, 1), round(n + 0.5)),
        lambda n: n << -1,
        lambda n: math.floor(n * math.inf),
        lambda n: math.trunc(n * math.nan),
        lambda n: (int(n * 1.5), int(-n / 2)),
        lambda n: int(n * math.inf),
        lambda n: int(n * math.nan),
    ],
)
def test_operators_of_python_on_numbers(f: Any) -> None:
    g = hf.jit(f)
    for n in (3, 5, 3):
        try:
            want = f(n)
        except (ValueError, OverflowError) as error:
            with pytest.raises(type(error)):
                g(n)
            continue
        assert g(n) == want


def test_an_integer_to_a_power_that_is_a_number() -> None:
    g = hf.jit(lambda x, n: x**n)
    assert [g(hf.asarray([2, 3]), n).tolist() for n in (2, 3)] == [[4, 9], [8, 27]]
    with pytest.raises(ArgumentValueError, match="negative power -1"):
        g(hf.asarray([2, 3]), -1)


def test_operators_of_a_symbolic_trace_run_at_other_sizes() -> None:
    def f(x: Any, n: int) -> Any:
        y = hf.full((n % 6, x.shape[0]), 2.0)
        return hf.map(lambda row: row * x + n, y)

    gm = hf.trace(f, ones(3), 4, mode="symbolic")
    for args in ((ones(3), 4), (ones(2), 5), (ones(0), 6)):
        np.testing.assert_array_equal(np.asarray(gm(*args)), np.asarray(f(*args)))


def test_names_of_dimensions_are_nobody_elses() -> None:
    names = [hf.Dim(f"{letter}{k}") for letter in "tsvi" for k in range(1, 9)]

    def f(*xs: Any) -> Any:
        total = sum(hf.sum(x) for x in xs)
        return hf.fori_loop(0, xs[0].shape[0], lambda i, c: c + i + total, 0.0)

    g = hf.jit(f, dynamic=tuple(names))
    assert g(*[ones(2)] * len(names)).item() == f(*[ones(2)] * len(names)).item()


def test_a_call_that_fails_leaves_nothing_that_could_serve_another() -> None:
    g = hf.jit(lambda x: hf.reshape(x, (-1, 2)), dynamic=True)
    with pytest.raises(ShapeError):
        g(ones(1))
    assert g.explain(ones(2)).startswith("compiled, as no call had this structure")
    assert g(ones(2)).shape == (1, 2)


def test_a_size_that_is_a_number_in_a_branch_is_known_after_it() -> None:
    def f(x: Any, w: Any) -> Any:
        return hf.cond(hf.sum(w) > 0, lambda: w * 2, lambda: w + x.shape[0])

    gm = hf.trace(f, ones(0), ones(0, 2), mode="symbolic")
    g = hf.jit(lambda x, w: hf.sum(gm(x, w)))
    assert [g(ones(0), ones(0, n)).item() for n in (2, 3, 0)] == [0, 0, 0]
    assert g(ones(2), ones(2, 3)).item() == 12


def test_dynamic_may_name_an_argument_that_is_left_out() -> None:
    g = hf.jit(lambda x, n=2, *, m=3: x * n + m, dynamic={"n": False, "m": False})
    calls = [(ones(2),), (ones(2), 2), (ones(2), 4)]
    assert compiled(g, *calls) == [1, 2, 3]
    assert g(ones(1), m=5).tolist() == [7]


class Model:
    @hf.jit(dynamic={"x": True})  # type: ignore[untyped-decorator]
    def method(self, x: Any) -> Any:
        return x * 2 if x.shape[0] > 3 else x

    def plain(self, x: Any) -> Any:
        return x * 2 if x.shape[0] > 3 else x


@pytest.mark.parametrize("bound", [Model().method, hf.jit(Model().plain, dynamic=True)])
def test_methods_have_names_for_their_arguments(bound: Any) -> None:
    assert compiled(bound, (ones(2),), (ones(3),), (ones(4),)) == [1, 1, 2]
    assert bound.guards[0].startswith("x.shape[0] >= 4  (test_dynamic.py:")


def test_checks_in_the_graph_are_in_the_order_in_which_they_were_asked() -> None:
    gm = hf.trace(lambda x, n: hf.reshape(x, (n, -1)), ones(6), 2, mode="symbolic")
    assert gm(ones(12), 3).shape == (3, 4)
    with pytest.raises(CheckError, match="`n != 0`"):
        gm(ones(6), 0)
    with pytest.raises(CheckError, match=r"`x.shape\[0\] % n == 0`"):
        gm(ones(6), 4)
