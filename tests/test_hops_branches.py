"""`cond` and `switch`: in every execution, with every kind of operand and closure."""

from typing import Any

import numpy as np
import pytest

import hopflow
from hopflow.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    BranchTypeError,
    CheckError,
    PredicateError,
    ResultTypeError,
    StructureError,
)
from hopflow.hops.base import RegionOperator
from hopflow.hops.cond import COND, Cond
from hopflow.hops.switch import SWITCH
from hopflow.testing.executions import (
    NAMES,
    RUNNERS,
    SYMBOLIC,
    agree,
    fails,
    interpreted,
    run_debug,
)

hf: Any = hopflow

each_execution = pytest.mark.parametrize("run", RUNNERS, ids=NAMES)
both_ways = pytest.mark.parametrize("pred", [True, False])

X = np.array([0.5, -1.0, 2.0], np.float32)
Y = np.array([1.0, 2.0, 3.0], np.float32)


# --- what cond computes ---------------------------------------------------------------


@each_execution
@both_ways
def test_the_branch_that_the_predicate_chooses_gives_the_result(
    run: Any, pred: bool
) -> None:
    def f(p: Any, x: Any) -> Any:
        return hf.cond(p, hf.sin, lambda a: a * 2, (x,))

    agree(run(f, hf.asarray(pred), hf.asarray(X)), np.sin(X) if pred else X * 2)


@each_execution
@both_ways
def test_a_python_bool_is_a_constant_predicate(run: Any, pred: bool) -> None:
    def f(x: Any) -> Any:
        return hf.cond(pred, lambda a: a + 1, lambda a: a - 1, (x,))

    agree(run(f, hf.asarray(X)), X + 1 if pred else X - 1)


@each_execution
@both_ways
def test_operands_and_results_are_pytrees_with_none(run: Any, pred: bool) -> None:
    def f(p: Any, x: Any) -> Any:
        operands = {"a": x, "b": [2, None], "c": (1.5, True)}
        return hf.cond(
            p,
            lambda t: (t["a"] * t["b"][0], None, {"k": t["c"][0]}),
            lambda t: (t["a"], None, {"k": t["c"][0] + 1}),
            operands,
        )

    want = (X * 2, None, {"k": 1.5}) if pred else (X, None, {"k": 2.5})
    agree(run(f, hf.asarray(pred), hf.asarray(X)), want)


@each_execution
@both_ways
def test_branches_close_over_tensors_and_numbers(run: Any, pred: bool) -> None:
    scale, y = 3, hf.asarray(Y)

    def f(p: Any, x: Any) -> Any:
        z = x + 1
        return hf.cond(p, lambda: z * scale, lambda: y + x)

    agree(run(f, hf.asarray(pred), hf.asarray(X)), (X + 1) * 3 if pred else Y + X)


@each_execution
@both_ways
def test_branches_nest(run: Any, pred: bool) -> None:
    def f(p: Any, x: Any) -> Any:
        return hf.cond(
            p,
            lambda: hf.cond(hf.sum(x) > 0, lambda: x + 1, lambda: x),
            lambda: hf.cond(p, lambda: x, lambda: hf.cond(p, lambda: x, lambda: -x)),
        )

    agree(run(f, hf.asarray(pred), hf.asarray(X)), X + 1 if pred else -X)


@each_execution
def test_a_branch_reads_the_variable_of_a_loop_around_it(run: Any) -> None:
    def f(x: Any) -> Any:
        def body(i: Any, total: Any) -> Any:
            return hf.cond(i % 2 == 0, lambda: total + x * i, lambda: total - 1)

        return hf.fori_loop(0, 5, body, hf.zeros(3))

    want = np.zeros(3, np.float32)
    for i in range(5):
        want = want + X * i if i % 2 == 0 else want - 1
    agree(run(f, hf.asarray(X)), want)


@each_execution
def test_a_number_takes_the_dtype_that_the_other_branch_returns(run: Any) -> None:
    x = hf.asarray(X.astype(np.float64))

    def f(p: Any, x: Any) -> Any:
        return hf.cond(p, lambda: hf.sum(x), lambda: 0)

    assert run(f, hf.asarray(True), x).dtype is hf.float64
    if run is not run_debug:  # debug mode knows one branch only
        assert run(f, hf.asarray(False), x).dtype is hf.float64


@each_execution
def test_the_other_branch_does_not_run(run: Any) -> None:
    def f(n: Any, x: Any) -> Any:
        return hf.cond(n > 0, lambda: x[n - 1], lambda: hf.zeros(()))

    agree(run(f, hf.asarray(0), hf.asarray(X)), np.float32(0))


@each_execution
def test_results_share_memory_with_nothing(run: Any) -> None:
    x = hf.asarray(X.copy())

    def f(p: Any, x: Any) -> Any:
        a, b, c = hf.cond(p, lambda: (x, x, x[:2]), lambda: (x, x, x[1:]))
        a += 1
        return a, b, c

    a, b, c = run(f, hf.asarray(True), x)
    agree((a, b, c, x), (X + 1, X, X[:2], X))


# --- writes ---------------------------------------------------------------------------


@each_execution
@both_ways
def test_a_write_to_a_captured_tensor_reaches_the_caller(run: Any, pred: bool) -> None:
    x = hf.asarray(X.copy())

    def f(p: Any) -> Any:
        def write() -> Any:
            x[0] = 10.0
            return hf.sum(x)

        return hf.cond(p, write, lambda: hf.sum(x) * 0)

    want = np.array([10.0, *X[1:]], np.float32)
    agree(run(f, hf.asarray(pred)), want.sum() if pred else np.float32(0))
    agree(x, want if pred else X)


@each_execution
@both_ways
def test_a_write_to_an_operand_reaches_the_caller(run: Any, pred: bool) -> None:
    def f(p: Any, x: Any) -> Any:
        y = x * 1

        def write(a: Any, b: Any) -> Any:
            a += b
            return None

        hf.cond(p, write, lambda a, b: None, (y, 2))
        return y

    agree(run(f, hf.asarray(pred), hf.asarray(X)), X + 2 if pred else X)


@each_execution
def test_writes_go_through_views_and_levels(run: Any) -> None:
    def f(p: Any, x: Any) -> Any:
        y = x * 1
        part = y[1:]

        def outer() -> None:
            def inner() -> None:
                part[0] = 7.0

            hf.cond(p, inner, lambda: None)
            part[1] = part[0] + 1

        hf.cond(p, outer, lambda: None)
        return y, part

    want = np.array([X[0], 7, 8], np.float32)
    agree(run(f, hf.asarray(True), hf.asarray(X)), (want, want[1:]))


@each_execution
def test_an_operand_given_twice_is_one_tensor(run: Any) -> None:
    def f(p: Any, x: Any) -> Any:
        y = x * 1

        def write(a: Any, b: Any) -> Any:
            a += 1
            return b + y

        return hf.cond(p, write, lambda a, b: b, (y, y)), y

    agree(run(f, hf.asarray(True), hf.asarray(X)), ((X + 1) * 2, X + 1))


@each_execution
@both_ways
@pytest.mark.parametrize(
    "results",
    [
        (lambda: 1, lambda: 2.5),
        (lambda: 1, lambda: hf.asarray(2.5, dtype=hf.float16)),
        (lambda: 1, lambda: hf.asarray(2, dtype=hf.int8)),
        (lambda: hf.cond(True, lambda: 0.5, lambda: 1), lambda: hf.asarray(2.5)),
        (lambda: True, lambda: hf.asarray(False)),
        (lambda: 1, lambda: 2),
    ],
)
def test_a_number_takes_its_dtype_from_all_branches(
    run: Any, pred: bool, results: Any
) -> None:
    f, g = results
    of_cond = run(lambda: hf.cond(hf.asarray(pred), f, g))
    of_switch = run(lambda: hf.switch(hf.asarray(int(pred)), [g, f]))
    expected = jit_type(lambda: hf.cond(hf.asarray(pred), f, g))
    assert (of_cond.type, of_cond.type.weak) == expected
    assert (of_switch.type, of_switch.type.weak) == expected


def jit_type(f: Any) -> Any:
    found = hf.jit(f)().type
    return found, found.weak


# --- switch ---------------------------------------------------------------------------


@pytest.mark.parametrize("run", [*RUNNERS, *SYMBOLIC])
@pytest.mark.parametrize("dtype", ["int8", "int64", "uint64"])
def test_an_index_is_checked_on_request(run: Any, dtype: str) -> None:
    def f(i: Any, x: Any) -> Any:
        return hf.switch(i, [lambda x: x, lambda x: -x], (x,), check=True)

    for i in (0, 1):
        agree(run(f, np.asarray(i, dtype), X), X if i == 0 else -X)
    for i in (2, 100) if dtype == "uint64" else (-1, 2, 100):
        with pytest.raises(CheckError, match="`index` must be from 0 to 1"):
            run(f, np.asarray(i, dtype), X)


def test_numbers_and_batches_of_them_are_checked_too() -> None:
    branches = [lambda: 1.0, lambda: 2.0]

    def f(i: Any) -> Any:
        return hf.switch(i, branches, check=True)

    for run in (f, hf.jit(f)):
        agree(run(1), np.float32(2))
        for i in (-1, 2):
            with pytest.raises(CheckError, match="from 0 to 1"):
                run(i)
    agree(hf.vmap(f)(hf.asarray([0, 1])), np.array([1, 2], np.float32))
    with pytest.raises(CheckError, match="from 0 to 1"):
        hf.vmap(f)(hf.asarray([0, 2]))
    with pytest.raises(ArgumentTypeError, match="`check` must be a bool"):
        hf.switch(0, branches, check="yes")


@each_execution
@pytest.mark.parametrize("index", [-7, -1, 0, 1, 2, 3, 100])
@pytest.mark.parametrize("dtype", [None, "int8", "int32", "uint64"])
def test_switch_moves_its_index_into_range(run: Any, index: int, dtype: Any) -> None:
    if dtype == "uint64" and index < 0:
        index = 2**63 + 5
    branches = [lambda a: a, lambda a: a * 2, lambda a: a * 3]

    def f(i: Any, x: Any) -> Any:
        return hf.switch(i, branches, (x,))

    i = index if dtype is None else hf.asarray(index, dtype=dtype)
    agree(run(f, i, hf.asarray(X)), X * (min(max(index, 0), 2) + 1))


@each_execution
def test_switch_closes_over_tensors_and_returns_pytrees(run: Any) -> None:
    y = hf.asarray(Y)

    def f(i: Any, x: Any) -> Any:
        branches = [lambda k=k: {"r": x * k + y, "n": None} for k in range(4)]
        return hf.switch(i, branches)

    agree(run(f, hf.asarray(3), hf.asarray(X)), {"r": X * 3 + Y, "n": None})


@each_execution
def test_switch_of_one_branch_and_switch_in_switch(run: Any) -> None:
    def f(i: Any, x: Any) -> Any:
        return hf.switch(
            i,
            [
                lambda: hf.switch(i, [lambda: x]),
                lambda: hf.switch(i - 1, [lambda: -x, lambda: x * 9]),
            ],
        )

    agree(run(f, hf.asarray(1), hf.asarray(X)), -X)


@each_execution
def test_a_write_in_one_branch_of_switch_reaches_the_caller(run: Any) -> None:
    def f(i: Any, x: Any) -> Any:
        y = x * 1

        def write() -> None:
            y[:] = 0.0

        hf.switch(i, [lambda: None, write, lambda: None])
        return y

    agree(run(f, hf.asarray(1), hf.asarray(X)), X * 0)
    agree(run(f, hf.asarray(2), hf.asarray(X)), X)


# --- errors ---------------------------------------------------------------------------


def then(*_: Any) -> Any:
    return hf.zeros(2), {"k": hf.zeros((), dtype="int32")}


def otherwise(*_: Any) -> Any:
    return hf.zeros((2, 1)), {"k": hf.zeros(())}


def test_branches_of_different_types_are_refused_by_leaf() -> None:
    fails(
        BranchTypeError,
        "cond: `then` (test_hops_branches.py:#) and `otherwise` "
        "(test_hops_branches.py:#) must return results of the same types.\n"
        "  result[0]       first f32[2], second f32[2, 1]  (rank 1 != 2)\n"
        "  result[1]['k']  first i32[], second f32[]  (dtype)\n"
        "Cast, reshape or broadcast in one branch so that both agree.",
        *(hf.cond, hf.asarray(True), then, otherwise),
    )


def test_branches_of_different_ranks_are_refused() -> None:
    fails(
        BranchTypeError,
        "switch: `<lambda>` (test_hops_branches.py:#) and `<lambda>` "
        "(test_hops_branches.py:#) must return results of the same types.\n"
        "  result  first f32[2], second f32[]  (rank 1 != 0)\n"
        "Cast, reshape or broadcast in one branch so that both agree.",
        *(hf.switch, hf.asarray(0), [lambda: hf.zeros(2), lambda: hf.zeros(())]),
    )


def test_branches_of_different_structure_are_refused() -> None:
    fails(
        StructureError,
        "cond: `<lambda>` (test_hops_branches.py:#) and `<lambda>` "
        "(test_hops_branches.py:#) must return the same structure.\n"
        "  true_fn   (*, *)\n"
        "  false_fn  *\n"
        "Return the same containers with as many leaves (`*` is a leaf) from each.",
        *(hf.cond, hf.asarray(True), lambda: (1, 2), lambda: 1),
    )


@pytest.mark.parametrize(
    ("pred", "text"),
    [
        (
            1,
            "cond: `pred` must be a bool scalar (bool[]), and is i64[]. Compare it "
            "with something: `x != 0`.",
        ),
        (
            X > 0,
            "cond: `pred` must be a bool scalar (bool[]), and is bool[3]. Reduce it "
            "with `hf.all` or `hf.any`, or use `hf.map` to decide for each element.",
        ),
    ],
)
def test_a_predicate_is_a_bool_scalar(pred: Any, text: str) -> None:
    fails(PredicateError, text, hf.cond, pred, then, then)


@pytest.mark.parametrize(
    ("index", "text"),
    [
        (
            0.5,
            "switch: `index` must be an integer scalar, and is f32[]. Convert it with "
            "`hf.astype`.",
        ),
        (
            True,
            "switch: `index` must be an integer scalar, and is bool[]. Convert it with "
            "`hf.astype`.",
        ),
        (
            np.array([1, 2]),
            "switch: `index` must be an integer scalar, and is i64[2]. Reduce it, or "
            "use `hf.map` to decide for each element.",
        ),
    ],
)
def test_an_index_is_an_integer_scalar(index: Any, text: str) -> None:
    fails(PredicateError, text, hf.switch, index, [then, then])


def test_branches_are_functions_and_there_is_one() -> None:
    fails(
        ArgumentTypeError,
        "cond: `false_fn` must be a function, and is `int`.",
        *(hf.cond, True, then, 3),
    )
    fails(
        ArgumentTypeError,
        "switch: `branches[1]` must be a function, and is `int`.",
        *(hf.switch, 0, [then, 3]),
    )
    fails(
        ArgumentTypeError,
        "switch: `branches` must be a sequence of functions, and is `function`.",
        *(hf.switch, 0, then),
    )
    fails(
        ArgumentValueError,
        "switch: `branches` must have a function, and is empty.",
        *(hf.switch, 0, []),
    )


def test_operands_are_tensors_and_numbers() -> None:
    fails(
        ArgumentTypeError,
        "cond: `operands[0]['a']` must be a tensor or a number, and is `str`. Pass "
        "what is not data through a closure.",
        *(hf.cond, True, then, then, ({"a": "no"},)),
    )


def test_results_are_tensors_and_numbers() -> None:
    fails(
        ResultTypeError,
        "cond: `<lambda>` (test_hops_branches.py:#) must return tensors or numbers, "
        "and its `result['k']` is `str`. Return the data alone, or None.",
        *(hf.cond, True, lambda: {"k": "no"}, then),
    )


# --- rules ----------------------------------------------------------------------------


def operators() -> list[type[RegionOperator]]:
    found: list[type[RegionOperator]] = []
    todo = [RegionOperator]
    while todo:
        todo += (known := todo.pop().__subclasses__())
        found += [c for c in known if c.__module__.startswith("hopflow.hops")]
    return [c for c in found if getattr(c, "__final__", False)]


@pytest.mark.parametrize("op", operators(), ids=lambda op: op.name)
@pytest.mark.parametrize("rule", RegionOperator.RULES)
def test_every_operator_names_every_rule(op: type[RegionOperator], rule: str) -> None:
    own = [c for c in op.__mro__ if rule in vars(c)]
    assert own[0] is not RegionOperator


def test_operators_print_as_what_they_are() -> None:
    assert [repr(COND), repr(SWITCH)] == ["<operator cond>", "<operator switch>"]


def test_graphs_that_disagree_are_refused_by_infer() -> None:
    one = hf.trace(lambda x: x, hf.zeros(2)).graph
    two = hf.trace(lambda x: (x, x), hf.zeros(2)).graph
    three = hf.trace(lambda x: x[0], hf.zeros(2)).graph
    one.name, two.name, three.name = "one", "two", "three"
    fails(
        StructureError,
        "cond: graphs `one` and `two` must return as many results, and return 1 and 2.",
        lambda: Cond().infer(hf.spec("bool[]"), then=one, else_=two),
    )
    fails(
        BranchTypeError,
        "cond: `one` and `three` must return results of the same types.\n"
        "  result[0]  first f32[2], second f32[]  (rank 1 != 0)\n"
        "Cast, reshape or broadcast in one branch so that both agree.",
        lambda: Cond().infer(hf.spec("bool[]"), then=one, else_=three),
    )


def test_debug_mode_is_left_at_the_end_of_its_block() -> None:
    seen, true = [], hf.asarray(True)

    def look(x: Any) -> Any:
        seen.append(type(x).__name__)
        return x

    with hf.debug():
        hf.cond(true, look, look, (hf.zeros(1),))
        with pytest.raises(ZeroDivisionError), hf.debug():
            raise ZeroDivisionError
        hf.cond(true, look, look, (hf.zeros(1),))
    with interpreted():
        hf.cond(true, look, look, (hf.zeros(1),))
    assert seen == ["EagerTensor", "EagerTensor", "TracedTensor", "TracedTensor"]
