"""Each recompile is logged with what changed; the eighth warns; a limit may be set."""

import logging
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import hopflow
from hopflow.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    RecompileLimitError,
    RecompileWarning,
)
from hopflow.tensor import EagerTensor

hf: Any = hopflow

Calls = list[tuple[Any, ...]]


def logged(caplog: pytest.LogCaptureFixture, f: Any, calls: Calls) -> list[str]:
    """What is logged of recompiles of a jitted function."""
    with caplog.at_level(logging.INFO, logger="hopflow.recompiles"):
        for args in calls:
            before, explained = len(caplog.records), f.explain(*args)
            f(*args)
            new = [record.getMessage() for record in caplog.records[before:]]
            assert (
                not new
                or explained.startswith("compiled")
                or new == [f"{f.__name__}: {explained}"]
            )
    return [record.getMessage() for record in caplog.records]


def scaled(x: Any, options: Any = None) -> Any:
    if isinstance(options, dict):
        return x * options.get("scale", 1) + options.get("shift", 0)
    return x if options == "same" else x * 2


class Layer(hf.nn.Module):  # type: ignore[misc]
    w: Any
    activation: Any = hf.nn.static()


class Other(hf.nn.Module):  # type: ignore[misc]
    w: Any


def local_class() -> Any:
    class Local(hf.nn.Module):  # type: ignore[misc]
        w: Any

    return Local


F32, F64 = hf.ones(3), hf.ones(3, dtype=hf.float64)

REASONS: dict[str, tuple[Calls, str]] = {
    "dtype": ([(F32,), (F64,)], "`x` was float32, and is float64"),
    "rank": ([(F32,), (hf.ones((2, 3)),)], "`x` was of rank 1, and is of rank 2"),
    "size": ([(F32,), (hf.ones(4),)], "`x.shape[0] == 3` no longer holds (4)"),
    "kind": (
        [(hf.ones(()),), (2.0,)],
        "`x` was a tensor of float32, and is of type float",
    ),
    "weak": (
        [(hf.ones(()),), (EagerTensor(np.asarray(1, np.float32), weak=True),)],
        "`x` was not weak, and is weak (made of a Python number)",
    ),
    "number": ([(F32, 2.0), (F32, 2)], "`options` was of type float, and is of type i"),
    "value": ([(F32, "same"), (F32, "x")], "`options` was 'same', and is 'x'"),
    "absent": ([(F32,), (F32, "same")], "`options` is new"),
    "given no more": ([(F32, "same"), (F32,)], "`options` is given no more"),
    "keys": (
        [(F32, {"scale": F32}), (F32, {"shift": F32})],
        "`options['scale']` is given no more and `options['shift']` is new",
    ),
    "order of keys": (
        [
            (F32, {"scale": F32, "shift": F32}),
            (F32, {"shift": F32, "scale": F32}),
        ],
        "the keys of `options` are in another order",
    ),
    "order of keys within": (
        [
            (F32, [{"scale": F32, "shift": F32}]),
            (F32, [{"shift": F32, "scale": F32}]),
        ],
        "the keys of `options[0]` are in another order",
    ),
    "container": ([(F32, [F32]), (F32, (F32,))], "`options` was a list, and is a tup"),
    "container within": (
        [(F32, {"a": [F32]}), (F32, {"a": OrderedDict(b=F32)})],
        "`options['a']` was a list, and is an OrderedDict",
    ),
    "a tensor for a container": (
        [(F32, [F32]), (F32, [[F32]])],
        "`options[0]` was a tensor of float32, and is a list",
    ),
    "length": ([(F32, [F32]), (F32, [F32, F32])], "`options[1]` is new"),
    "None": ([(F32, "a"), (F32, None)], "`options` was 'a', and is None"),
    "None within": ([(F32, [None]), (F32, ["a"])], "`options[0]` was None, and is 'a'"),
    "None for a default": ([(F32,), (F32, None)], "`options` is new"),
    "a long text": (
        [(F32, f"{'a' * 40}{k}{'a' * 40}") for k in "bc"],
        "`options` is another value that reads 'aaa",
    ),
    "a static field": (
        [(F32, [Layer(F32, "relu")]), (F32, [Layer(F32, "tanh")])],
        "`options[0].activation` was 'relu', and is 'tanh'",
    ),
    "a static number": (
        [(F32, Layer(F32, 1)), (F32, Layer(F32, True))],
        "`options.activation` was 1, and is True",
    ),
    "the part of a module": (
        [(F32, Layer(F32, 1)), (F32, Layer([F32], 1))],
        "`options.w` was a tensor of float32, and is a list",
    ),
    "a tied parameter": (
        [(F32, Layer([F32, F64], 1)), (F32, Layer([F32, F32], 1))],
        "`options` has other parts than before that are one tensor",
    ),
    "another module": (
        [(F32, Layer(F32, 1)), (F32, Other(F32))],
        "`options` was a Layer, and is an Other",
    ),
    "a class that is made anew": (
        [(F32, local_class()(F32)), (F32, local_class()(F32))],
        "`options` is of another class that is named like it was",
    ),
    "what a container keeps": (
        [(F32, deque([F32], 2)), (F32, deque([F32], 3))],
        "`options` holds something else besides its parts",
    ),
    "the nearest": (
        [(F32, "same"), (hf.ones((2, 3)), "other"), (F64, "same")],
        "`x` was float32, and is float64",
    ),
}


@pytest.mark.parametrize("kind", REASONS)
def test_the_reason_names_the_argument_and_what_changed(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    calls, reason = REASONS[kind]
    texts = logged(caplog, hf.jit(scaled), calls)
    assert len(texts) == len(calls) - 1
    assert f"scaled: recompiled because {reason}" in texts[-1]


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        (
            lambda f: f(F32, F32),
            lambda f: f(F32, y=F32),
            "`y` was given by position, and is given by name",
        ),
        (
            lambda f: f(y=F32, x=F32),
            lambda f: f(x=F32, y=F32),
            "the arguments that are given by name are in another order",
        ),
        (
            lambda f: f(F32, y=F32),
            lambda f: f(F32, y=[F32]),
            "`y` was a tensor of float32, and is a list",
        ),
    ],
)
def test_how_arguments_are_given_is_a_reason(
    first: Any, second: Any, reason: str
) -> None:
    f = hf.jit(lambda x, y: x)
    first(f)
    assert second(f.explain) == f"recompiled because {reason}"


def test_what_is_read_from_outside_is_named(caplog: pytest.LogCaptureFixture) -> None:
    scale = 2.0
    f = hf.jit(lambda x: x * scale)
    f(F32)
    scale = 3.0
    reason = "recompiled because `closure scale` was 2.0, and is 3.0"
    assert logged(caplog, f, [(F32,)]) == [f"<lambda>: {reason}"]


def test_tensors_that_share_memory_are_named(caplog: pytest.LogCaptureFixture) -> None:
    outer = hf.zeros(3)

    def f(x: Any, y: Any) -> Any:
        x[:] = x + 1
        return y * outer

    jitted = hf.jit(f)
    base = hf.zeros((2, 3))
    with caplog.at_level(logging.INFO, logger="hopflow.recompiles"):
        for x, y in [
            (hf.zeros(3), hf.ones(3)),
            (base[0], base[0]),
            (outer, hf.ones(3)),
        ]:
            explained, count = jitted.explain(x, y), len(caplog.records)
            jitted(x, y)
            new = [record.getMessage() for record in caplog.records[count:]]
            assert new in ([], [f"f: {explained}"])
            assert jitted.explain(x, y) == "runs what has been compiled"
    assert [record.getMessage() for record in caplog.records] == [
        "f: recompiled because `x` is written, and shares memory with `y`",
        "f: recompiled because `x` is written, and shares memory with `closure outer`",
    ]


def test_what_is_read_from_outside_beside_shared_memory_is_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    scale = 2.0

    def f(x: Any, y: Any) -> Any:
        x[0] = scale if x is y else 1.0
        return y

    jitted, t = hf.jit(f), hf.ones(3)
    jitted(t, t)
    scale = 3.0
    reason = "recompiled because `closure scale` was 2.0, and is 3.0"
    assert logged(caplog, jitted, [(t, t)]) == [f"f: {reason}"]


# --- the warning, and the limit -------------------------------------------------------


def rebinding(f: Callable[[Any], Any] | None = None) -> Callable[[int], Any]:
    """A call of a jitted function for which a number has been rebound."""
    scale = 0
    jitted = hf.jit(f or (lambda x: x * scale))

    def call(value: int) -> Any:
        nonlocal scale
        scale = value
        return jitted(F32)

    return call


@contextmanager
def limit(count: int | None) -> Iterator[None]:
    before = hf.config.recompile_limit
    hf.config.recompile_limit = count
    try:
        yield
    finally:
        hf.config.recompile_limit = before


def test_the_eighth_recompile_warns_once_and_of_the_users_line() -> None:
    call = rebinding()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for k in range(8):
            call(k)
    with pytest.warns(RecompileWarning, match="is compiled again for the 8th") as found:
        call(8)
    [warning] = found
    assert warning.filename == __file__
    assert "`closure scale` was 7, and is 8" in str(warning.message)
    assert "Pass numbers that change as arguments" in str(warning.message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for k in range(20):
            np.testing.assert_array_equal(np.asarray(call(k)), k)


def test_calls_that_are_served_are_no_recompiles() -> None:
    call = rebinding()
    with limit(1):
        for k in (1, 2) * 20:
            call(k)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_more_recompiles_than_the_limit_are_an_error(count: int) -> None:
    call = rebinding()
    with limit(count):
        for k in range(count + 1):
            call(k)
        for _ in range(2):
            text = (
                rf"again {count} times, and `hf.config.recompile_limit` allows {count}"
            )
            with pytest.raises(RecompileLimitError, match=text) as error:
                call(count + 1)
            assert f"`closure scale` was {count}, and is" in str(error.value)
        call(count)  # what was compiled still runs
    call(count + 1)


def test_the_first_compile_needs_no_limit_and_failures_do_not_count() -> None:
    is_bad = True

    def f(x: Any) -> Any:
        if is_bad:
            raise KeyError("bad")
        return x

    jitted = hf.jit(f)
    with limit(0):
        for _ in range(3):
            with pytest.raises(KeyError, match="bad"):
                jitted(F32)
        is_bad = False
        jitted(F32)


def test_the_limit_is_an_int_or_none() -> None:
    with pytest.raises(ArgumentValueError, match="`recompile_limit` must be an int of"):
        hf.config.recompile_limit = -1
    with pytest.raises(ArgumentTypeError, match="`recompile_limit` must be an int of"):
        hf.config.recompile_limit = 1.5
    assert hf.config.recompile_limit is None
