"""What `control_flow` cannot rewrite stays Python, and says why."""

from collections import deque
from typing import Any

import pytest

import hopflow
from hopflow import control_flow
from hopflow.errors import ArgumentTypeError, ControlFlowError
from hopflow.testing.executions import agree

hf: Any = hopflow


class Holder:
    value = 0.0


holder = Holder()
total = 0.0


def raises(x: Any) -> Any:
    if x > 0:
        raise ValueError("positive")
    return x


def sets_an_attribute(x: Any) -> Any:
    if x > 0:
        holder.value = x
    return x


def sets_a_global(x: Any) -> Any:
    global total
    while x > 0:
        total = x
        x = x - 1
    return x


def assigns_in_an_operand(x: Any) -> Any:
    return (x > 0 and (y := x)) and y


def looks_at_names(x: Any) -> Any:
    if x > 0:
        x = len(locals())
    return x


def ranges_over(x: Any) -> Any:
    for holder.value in range(x):
        x = x + 0
    return x


@pytest.mark.parametrize(
    ("f", "reason"),
    [
        (raises, "a `raise` stands in it; use `hf.check`"),
        (sets_an_attribute, "it assigns `holder.value`"),
        (sets_a_global, "it assigns `total`, which is global"),
        (assigns_in_an_operand, "it assigns a name"),
        (looks_at_names, "it calls `locals`, which looks at the names around it"),
        (ranges_over, "it assigns `holder.value`"),
    ],
)
def test_what_stays_python_says_why(f: Any, reason: str) -> None:
    rewritten = hf.control_flow(f)
    line = f.__code__.co_firstlineno
    if f is not raises:
        assert rewritten(2) == f(2)
    with pytest.raises(ControlFlowError) as found:
        hf.jit(rewritten)(hf.asarray(2))
    assert reason in str(found.value)
    at = str(found.value).split("test_control_flow_errors.py:")[1].split(")")[0]
    assert line < int(at) <= line + 3


def unassigned(x: Any) -> Any:
    if x > 0:
        y = x
    return y


def unassigned_before(x: Any) -> Any:
    while x > 0:
        x = x - 1
        y = x
    return y


def of_two_kinds(x: Any) -> Any:
    mode = "low"
    if x > 0:
        mode = "high"
    return x if mode == "low" else -x


def changing(x: Any) -> Any:
    names = "a"
    while x > 0:
        x = x - 1
        names = names + "a"
    return x * len(names)


@pytest.mark.parametrize(
    ("f", "message"),
    [
        (unassigned, "`y` has a value in one of two cases only"),
        (unassigned_before, "`y` is used in or after a loop on a tensor"),
        (of_two_kinds, "`mode` is no tensor, and branches of an `if`"),
        (changing, "`names` is no tensor, and a step changes it: 'a' and 'aa'"),
    ],
)
def test_names_have_one_value_on_all_ways(f: Any, message: str) -> None:
    rewritten = hf.control_flow(f)
    assert rewritten(2) == f(2)
    with pytest.raises(ControlFlowError) as found:
        hf.jit(rewritten)(hf.asarray(2))
    assert message in str(found.value)


def test_an_unbound_name_stays_unbound() -> None:
    with pytest.raises(NameError, match="y"):
        hf.control_flow(unassigned)(-1)


def test_errors_name_the_line_of_the_user() -> None:
    def f(x: Any) -> Any:
        if x > 0:
            x = x + hf.ones(3)
        return x

    line = f.__code__.co_firstlineno
    with pytest.raises(hf.errors.BranchTypeError) as found:
        hf.jit(hf.control_flow(f))(hf.asarray(1.0))
    assert f"test_control_flow_errors.py:{line + 1}" in str(found.value)


@pytest.mark.parametrize("f", [3, len, hf.jit(raises)])
def test_what_is_no_function_is_refused(f: Any) -> None:
    with pytest.raises(ArgumentTypeError, match="must be a Python function"):
        hf.control_flow(f)


def test_code_without_source_is_refused() -> None:
    names: dict[str, Any] = {}
    exec("def f(x): return x", names)
    with pytest.raises(ControlFlowError, match="`f` has no source to rewrite"):
        hf.control_flow(names["f"])


def test_lambdas_are_told_apart_by_their_places() -> None:
    lambdas: Any = (lambda x: lambda x: x if x > 1 else 5), (lambda x: x + 1)
    first, second = lambdas
    assert [control_flow(first)(3)(n) for n in (1, 2)] == [5, 2]
    assert [control_flow(first(3))(n) for n in (1, 2)] == [5, 2]
    assert control_flow(second)(3) == 4


def test_an_asynchronous_generator_is_refused() -> None:
    with pytest.raises(ControlFlowError, match="an asynchronous generator"):

        @control_flow
        async def f(x: Any) -> Any:
            yield x


def item_in_branch(x: Any) -> Any:
    found = [x, x]
    if x > 0:
        found[0] = x + 1
    return found


def item_in_while(x: Any) -> Any:
    found = {"n": 0}
    while x > 0:
        found["n"] += 1
        x = x - 1
    return found


def item_in_for(x: Any) -> Any:
    found = {"n": 0}
    for item in range(x):
        found["n"] = item
    return found


def popped(x: Any) -> Any:
    found = [1, 2]
    while x > 0:
        x = x - found.pop()
    return found


def appended(x: Any) -> Any:
    found = [1, 2]
    if x > 0:
        found.append(x)
    return found


def of_steps_of_the_run(x: Any) -> Any:
    other = found = list[Any]()
    for k in range(x):
        found.append(k)
    return other


def items_of_a_known_number(x: Any) -> Any:
    found = {"n": 0}
    for item in x * hf.ones(3):
        found["n"] += item
    return found["n"]


def item_of_own(x: Any) -> Any:
    if x > 0:
        found = [x, x]
        found[0] = x + 1
    else:
        found = [x, x]
    return found


def test_items_of_containers_are_set_by_python_alone() -> None:
    for f, x in (
        (item_in_branch, 2.0),
        (item_in_while, 2.0),
        (item_in_for, 2),
        (popped, 2.0),
        (appended, 2.0),
        (of_steps_of_the_run, 2),
    ):
        at = f"test_control_flow_errors.py:{f.__code__.co_firstlineno + 2}"
        message = f"((changes|appends to) `found`, which is|a list that) .*{at}"
        with pytest.raises(ControlFlowError, match=message):
            hf.jit(hf.control_flow(f))(hf.asarray(x))
    found = hf.jit(hf.control_flow(items_of_a_known_number))(hf.asarray(2.0))
    assert found.item() == 6.0
    agree(hf.jit(hf.control_flow(item_of_own))(hf.asarray(2.0)), [hf.asarray(3.0), 2.0])
    assert hf.control_flow(item_in_while)(2.0) == {"n": 2}


def matched(x: Any, kind: Any) -> Any:
    match kind, x > 0:
        case "a", True:
            return 1
    return 0


def test_match_compares_no_tensors() -> None:
    assert hf.control_flow(matched)(2.0, "a") == 1
    line = matched.__code__.co_firstlineno + 1
    message = (
        rf"this `match` compares a tensor .*test_control_flow_errors.py:{line}.*`if`"
    )
    with pytest.raises(ControlFlowError, match=message):
        hf.jit(hf.control_flow(matched))(hf.asarray(2.0), "a")


def appended_elsewhere(x: Any, out: Any) -> Any:
    if x > 0:
        out.append(x)
    return x


def appended_and_returned(x: Any, out: Any) -> Any:
    if x > 0:
        out.append(x)
    x = x + len(out)
    return x * 2


def appended_of_two_kinds(x: Any) -> Any:
    out = []
    if x > 0:
        out.append(x)
        out.append((x, x))
    x = x + 1
    return x, out


@pytest.mark.parametrize(
    ("f", "more", "message"),
    [
        (appended_elsewhere, (deque(),), "appends to `out`, which is a `deque`"),
        (appended_elsewhere, ([],), "appends to `out`, a list that has another name"),
        (
            appended_and_returned,
            ([],),
            "appends to `out`, a list that has another name",
        ),
        (appended_of_two_kinds, (), "appends values of differing structures to `out`"),
    ],
)
def test_only_lists_of_the_function_grow_by_a_condition(
    f: Any, more: tuple[Any, ...], message: str
) -> None:
    with pytest.raises(ControlFlowError, match=message):
        hf.jit(lambda x: control_flow(f)(x, *more))(hf.asarray(2.0))


def test_items_side_by_side_are_as_many_and_lists_have_ends() -> None:
    @control_flow
    def f(xs: Any, ys: Any, at: int) -> Any:
        out = []
        for x, y in zip(xs, ys, strict=True):
            out.append(x * y)
        return out[at]

    x = hf.asarray([1.0, 2.0])
    assert hf.jit(lambda x: f(x, x, -1))(x).item() == 4.0
    with pytest.raises(ValueError, match=r"zip\(\) argument 2 has another length"):
        f(x, hf.ones(3), 0)
    with pytest.raises(IndexError, match="list index out of range"):
        f(x, x, 2)


def test_a_range_has_steps() -> None:
    @control_flow
    def f(n: Any) -> Any:
        return sum(k for k in range(0, n, 0))

    with pytest.raises(ValueError, match=r"range\(\) arg 3 must not be zero"):
        hf.jit(f)(hf.asarray(3))
