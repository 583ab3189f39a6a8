"""What `control_flow` cannot rewrite stays Python, and says why."""

from typing import Any

import numpy as np
import pytest

import hopflow
from hopflow.errors import ArgumentTypeError, ControlFlowError
from hopflow.testing.meanings import agree

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


def returns_within(x: Any) -> Any:
    if x > 0:
        with np.errstate():
            return x
    return -x


def breaks_within(x: Any) -> Any:
    while x > 0:
        try:
            break
        finally:
            x = x - 1
    return x


def assigns_in_its_condition(x: Any) -> Any:
    while (y := x - 1) > 0:
        x = y
    return x


def deletes(x: Any) -> Any:
    y = x
    if x > 0:
        del y
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
        (returns_within, "a `return` stands within a `with`"),
        (breaks_within, "a `break` stands within a `try`"),
        (assigns_in_its_condition, "its condition assigns a name"),
        (deletes, "it deletes `y`"),
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


@pytest.mark.parametrize("f", [lambda x: x, 3, len, hf.jit(raises)])
def test_what_is_no_function_is_refused(f: Any) -> None:
    with pytest.raises((ArgumentTypeError, ControlFlowError)):
        hf.control_flow(f)


def test_a_generator_is_refused() -> None:
    def f(x: Any) -> Any:
        yield x

    with pytest.raises(ControlFlowError, match="generator"):
        hf.control_flow(f)


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
    for item in x * hf.ones(3):
        found["n"] = item
    return found


def item_of_own(x: Any) -> Any:
    if x > 0:
        found = [x, x]
        found[0] = x + 1
    else:
        found = [x, x]
    return found


def test_items_of_containers_are_set_by_python_alone() -> None:
    for f, line in (item_in_branch, 2), (item_in_while, 2), (item_in_for, 2):
        at = f"test_control_flow_errors.py:{f.__code__.co_firstlineno + line}"
        message = f"sets an item of `found`, which is a `.*{at}.*the item after"
        with pytest.raises(ControlFlowError, match=message):
            hf.jit(hf.control_flow(f))(hf.asarray(2.0))
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
