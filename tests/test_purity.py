"""`trace(strict=True)`: what happens in the trace alone is an error, with its line."""

import random
import time
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

import hopflow
from hopflow.errors import ImpurityError

hf: Any = hopflow

count = 0
table: dict[str, Any] = {}


class Model:
    def __init__(self) -> None:
        self.calls = 0
        self.history: list[int] = []

    def __call__(self, x: Any) -> Any:
        self.calls += 1
        return x * 2

    def note(self, x: Any) -> Any:
        self.history.append(1)
        return x


model, seen, row = Model(), [0], np.zeros(2)


def prints(x: Any) -> Any:
    y = x + 1
    print("y is", y.shape)
    return y


def counts(x: Any) -> Any:
    global count
    count += 1
    return x


def fills(x: Any) -> Any:
    table["x"] = [x.shape]
    return x


def calls_a_model(x: Any) -> Any:
    y = x - 1
    return model(y)


def in_a_body(x: Any) -> Any:
    def body(c: Any, v: Any) -> Any:
        seen.append(2)
        return c + v, None

    return hf.scan(body, x[0], x)[0]


def writes_an_array(x: Any) -> Any:
    row[0] += 1
    return x


def fills_a_default(x: Any, known: list[Any] = []) -> Any:  # noqa: B006
    known.append(x.shape)
    return x


EFFECTS = [
    (fills_a_default, "it changes `known`", 1),
    (prints, "it prints", 2),
    (counts, "it changes `count`", 2),
    (fills, "it changes `table`", 1),
    (calls_a_model, "it changes `model`", None),
    (in_a_body, "it changes `seen`", 2),
    (writes_an_array, "it changes `row`", 1),
]


@pytest.mark.parametrize(("f", "what", "line"), EFFECTS)
def test_effects_are_named_with_their_lines(f: Any, what: str, line: Any) -> None:
    hf.trace(f, hf.ones(3))
    with pytest.raises(ImpurityError) as found:
        hf.trace(f, hf.ones(3), strict=True)
    first = (f if line else Model.__call__).__code__.co_firstlineno
    at = f"test_purity.py:{first + (line or 1)}: {what}"
    assert str(found.value).count("test_purity.py") == 1
    assert at in str(found.value)


def test_the_lists_of_an_instance_and_of_closures_are_watched() -> None:
    results: list[Any] = []
    total = 0

    def f(x: Any) -> Any:
        nonlocal total
        results.append(x)
        total = total + 1
        return x

    with pytest.raises(ImpurityError) as found:
        hf.trace(f, hf.ones(3), strict=True)
    line = f.__code__.co_firstlineno
    assert f"{line + 2}: it changes `results`" in str(found.value)
    assert f"{line + 3}: it changes `total`" in str(found.value)
    with pytest.raises(ImpurityError, match=r"it changes `self\.history`"):
        hf.trace(model.note, hf.ones(3), strict=True)


@pytest.mark.parametrize("hidden", [random.random, time.perf_counter])
def test_what_is_hidden_changes_the_graph(hidden: Any) -> None:
    def f(x: Any) -> Any:
        y = x + 1
        return y * hidden()

    with pytest.raises(ImpurityError, match="gives another graph each time") as found:
        hf.trace(f, hf.ones(3), strict=True)
    line = f.__code__.co_firstlineno + 2
    assert str(found.value).count(f"test_purity.py:{line}") == 2


def test_a_pure_function_may_use_what_it_makes() -> None:
    def helper(out: list[Any], x: Any) -> None:
        out.append(x)

    def f(x: Any, options: Any) -> Any:
        out: list[Any] = []
        memo = {}
        for k in range(3):
            helper(out, x * k)
            memo[k] = len(out)
        x[0] = 5.0
        return hf.scan(lambda c, v: (c + v, c), out[0], hf.stack(out)), memo

    module = hf.trace(f, hf.ones(3), {"a": 1}, strict=True)
    plain = hf.trace(f, hf.ones(3), {"a": 1})
    assert str(module) == str(plain)


def test_what_is_printed_is_printed_once(capsys: Any) -> None:
    with pytest.raises(ImpurityError):
        hf.trace(prints, hf.ones(3), strict=True)
    assert capsys.readouterr().out == "y is (3,)\n"


def test_what_libraries_remember_is_not_the_users_effect() -> None:
    def drawn(x: Any) -> Any:
        return x * np.random.default_rng().random() * float(Fraction("0.5"))

    with pytest.raises(ImpurityError, match="gives another graph each time"):
        hf.trace(drawn, hf.ones(2), strict=True)
