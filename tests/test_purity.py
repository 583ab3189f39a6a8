"""`trace(strict=True)`: what happens in the trace alone is an error, with its line."""

import csv
import importlib
import io
import itertools
import logging
import os
import random
import re
import socket
import sys
import time
import warnings
from array import array
from collections import deque
from contextvars import ContextVar
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

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


def test_an_empty_line_is_printed_too() -> None:
    with pytest.raises(ImpurityError, match=": it prints\n"):
        hf.trace(lambda x: (print(), x)[1], hf.ones(3), strict=True)


@pytest.mark.parametrize("hidden", [time.perf_counter, time.monotonic])
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


# --- what is reached by other ways ----------------------------------------------------


def keeps_in_closures() -> Any:
    kept: list[Any] = []
    count = 0

    def outer() -> Any:
        def inner(x: Any) -> Any:
            nonlocal count
            kept.append(1)
            count += 1
            return x

        return lambda x: inner(x)

    inner = outer()
    return lambda x: inner(x)


def fills_given(x: Any, out: list[Any]) -> Any:
    out.append(1)
    return x


def fills_named(x: Any, *, out: dict[str, Any]) -> Any:
    out["x"] = 1
    return x


class Counted:
    count = 0
    all: ClassVar[list[Any]] = []

    def __call__(self, x: Any) -> Any:
        Counted.count += 1
        return x

    @classmethod
    def note(cls, x: Any) -> Any:
        cls.all.append(1)
        return x


class Slotted:
    __slots__ = ("n",)

    def __init__(self) -> None:
        self.n = 0

    def __call__(self, x: Any) -> Any:
        self.n += 1
        return x


class Holder:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, x: Any) -> Any:
        self.calls += 1
        return x


def calls_of_function(x: Any) -> Any:
    calls_of_function.calls = 1  # type: ignore[attr-defined]
    return x


queue: deque[int] = deque([1])


def shifts(x: Any) -> Any:
    queue.rotate()
    queue.append(2)
    return x


class Meta(type):
    made = 0


class Base(metaclass=Meta):
    log: ClassVar[list[Any]] = []
    count = 0

    def __call__(self, x: Any) -> Any:
        self.log.append(1)
        return x


class Derived(Base):
    def counts(self, x: Any) -> Any:
        Base.count += 1
        return x

    @classmethod
    def meta(cls, x: Any) -> Any:
        Meta.made += 1
        return x


class Table(dict[str, int]):
    calls = 0

    def note(self, x: Any) -> Any:
        self.calls += 1
        return x


class Pair(NamedTuple):
    log: list[Any]


append: Any = [0].append
numbers: Any = array("d", [0.0])
var = ContextVar("var", default=0)
members = frozenset((Holder(),))


def of_a_property() -> Any:
    log: list[Any] = []

    class Lazy:
        @property
        def value(self) -> int:
            log.append(1)
            return 1

    lazy = Lazy()
    return lambda x: x * lazy.value


@pytest.mark.parametrize(
    ("f", "what"),
    [
        (Derived(), "it changes `Base.log`"),
        (Derived().counts, "it changes `Base`"),
        (Derived.meta, "it changes `Meta`"),
        (Table().note, "it changes `self`"),
        (partial(lambda p, x: (p.log.append(1), x)[1], Pair([])), "it changes `p[0]`"),
        (lambda x: (append(1), x)[1], "it changes `append`"),
        (lambda x: (numbers.append(1.0), x)[1], "it changes `numbers`"),
        (lambda x: (var.set(1000), x)[1], "it changes the state of `var`"),
        (lambda x: next(iter(members))(x), "it changes `members`"),
        (of_a_property(), "it changes `log`"),
    ],
)
def test_effects_are_seen_wherever_an_object_keeps_its_parts(f: Any, what: str) -> None:
    with pytest.raises(ImpurityError, match=re.escape(f": {what}\n")):
        hf.trace(f, hf.ones(3), strict=True)


def test_keys_may_have_braces() -> None:
    nested: Any = {"{a}": {"{": [[1]]}}
    with pytest.raises(ImpurityError, match=re.escape("`nested['{a}']['{']`")):
        hf.trace(lambda x: (nested["{a}"]["{"].clear(), x)[1], hf.ones(3), strict=True)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: Any) -> Any:
    """A module of the user's in a package, in which all is 0 or empty."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "purity_package").mkdir()
    text = "count, items, table = 0, [], {'a': []}\ndef bump():\n    count = 0\n"
    (tmp_path / "purity_package" / "state.py").write_text(text)
    yield importlib.import_module("purity_package.state")
    for name in ("purity_package", "purity_package.state"):
        del sys.modules[name]


def test_a_module_that_is_imported_by_its_siblings_is_watched(package: Any) -> None:
    text = (
        "def f(x):\n    from . import state\n    state.items.append(1)\n    return x\n"
    )
    Path(package.__file__).with_name("sibling.py").write_text(text)
    importlib.invalidate_caches()
    sibling = importlib.import_module("purity_package.sibling")
    del sys.modules["purity_package.sibling"]
    with pytest.raises(ImpurityError, match=r": it changes `state.items`\n"):
        hf.trace(sibling.f, hf.ones(3), strict=True)


def imports_within(x: Any) -> Any:
    from purity_package import state  # type: ignore[import-not-found]

    state.items.append(1)
    return x


def test_modules_of_the_user_are_watched(package: Any) -> None:
    def assigns(x: Any) -> Any:
        package.count += 1
        return x

    def makes(x: Any) -> Any:
        package.another = 1
        return x

    def appends(x: Any) -> Any:
        package.items.append(1)
        return x

    def inner(x: Any) -> Any:
        whole.state.table["a"].append(1)
        return x

    whole = sys.modules["purity_package"]
    own = sys.modules[__name__]

    def of_itself(x: Any) -> Any:
        own.count += 1  # type: ignore[attr-defined]
        return x

    def reads(x: Any) -> Any:
        return x * len(package.items) * package.count

    for f, what in (
        (assigns, "package.count"),
        (makes, "package.another"),
        (appends, "package.items"),
        (inner, "whole.state.table['a']"),
        (imports_within, "purity_package.state.items"),
        (of_itself, "count"),
    ):
        with pytest.raises(ImpurityError, match=re.escape(f": it changes `{what}`\n")):
            hf.trace(f, hf.ones(3), strict=True)
    hf.trace(reads, hf.ones(3), strict=True)


ITERATORS: dict[str, Any] = {
    "a list": lambda: iter([1, 2, 3]),
    "a range": lambda: iter(range(10**30, 10**30 + 9)),
    "a dict": lambda: iter({1: 1, 2: 2}),
    "a set": lambda: iter({1, 2}),
    "text": lambda: iter("abc"),
    "zip": lambda: zip(range(3), iter([1, 2, 3]), strict=True),
    "map": lambda: map(abs, (1, 2)),
    "enumerate": lambda: enumerate(iter([1, 2])),
    "reversed": lambda: reversed([1, 2]),
    "count": itertools.count,
    "cycle": lambda: itertools.cycle([1, 2, 3]),
    "chain": lambda: itertools.chain([1], [2]),
    "a function": lambda: iter(itertools.count().__next__, 9),
    "a generator": lambda: (n for n in range(3)),
    "one that generates for ever": lambda: forever(itertools.count()),
    "one in another": lambda: enumerate(zip(forever(itertools.count()), strict=True)),
    "csv": lambda: csv.reader(iter(["a", "b"])),
}


def forever(source: Any) -> Any:
    while True:
        yield next(source)


@pytest.mark.parametrize("name", ITERATORS)
def test_an_iterator_that_is_advanced_is_an_effect(name: str) -> None:
    stream: Any = None
    tree: dict[str, Any] = {}

    def takes(x: Any) -> Any:
        next(stream)
        return x

    def loops(x: Any) -> Any:
        for _ in zip(range(1), tree["a"][0], strict=False):
            x = x + 1
        return x

    def reads(x: Any) -> Any:
        return x + (stream is tree)

    for f, what in ((takes, "stream"), (loops, "tree['a'][0]")):
        stream, tree["a"] = ITERATORS[name](), [ITERATORS[name]()]
        with pytest.raises(ImpurityError) as found:
            hf.trace(f, hf.ones(3), strict=True)
        assert f"it changes the state of `{what}`" in str(found.value)
        hf.trace(reads, hf.ones(3), strict=True)


def test_the_iterators_that_a_function_makes_are_its_own() -> None:
    rows = [1, 2]

    def f(x: Any, *_: Any) -> Any:
        numbers = (n for n in rows)
        pairs = zip(itertools.count(), numbers, strict=False)
        buffer = io.StringIO()
        buffer.write("seen")
        return x * next(pairs)[1] * sum(n for _, n in pairs)

    with warnings.catch_warnings(record=True) as caught:
        hf.trace(f, hf.ones(3), iter(rows), itertools.count(), strict=True)
    assert not caught


@pytest.mark.parametrize(
    ("f", "what"),
    [
        (keeps_in_closures(), "it changes `kept`"),
        (keeps_in_closures(), "it changes `count`"),
        (partial(fills_given, out=[]), "it changes `out`"),
        (partial(fills_named, out={}), "it changes `out`"),
        (partial(partial(fills_named, out={})), "it changes `out`"),
        (partial(Model().note), "it changes `self.history`"),
        (Holder(), "it changes `self`"),
        (Slotted(), "it changes `self`"),
        (Counted(), "it changes `Counted`"),
        (Counted().note, "it changes `self.all`"),
        (lambda x: Counted()(x), "it changes `Counted`"),
        (calls_of_function, "it changes `calls_of_function`"),
        (shifts, "it changes `queue`"),
    ],
)
def test_effects_are_seen_by_whatever_way_they_are_reached(f: Any, what: str) -> None:
    with pytest.raises(ImpurityError) as found:
        hf.trace(f, hf.ones(3), strict=True)
    assert f": {what}" in str(found.value)
    assert "test_purity.py:" in str(found.value)


@pytest.mark.parametrize("args", [([], {}), ([1.0], {"a": {"b": 2.0}})])
def test_containers_that_are_given_are_watched(args: Any) -> None:
    def grows(x: Any, items: Any, table: Any) -> Any:
        items.append(x)
        return x

    def fills(x: Any, items: Any, table: Any) -> Any:
        table.setdefault("a", {})["b"] = x
        return x

    def reads(x: Any, items: Any, table: Any) -> Any:
        return x * len(items) + len(table)

    with pytest.raises(ImpurityError, match="it changes `items`"):
        hf.trace(grows, hf.ones(3), *args, strict=True)
    with pytest.raises(ImpurityError, match="it changes `table"):
        hf.trace(fills, hf.ones(3), *args, strict=True)
    hf.trace(reads, hf.ones(3), *args, strict=True)


# --- what is done to the process ------------------------------------------------------

log = logging.getLogger("test_purity")
generator, own_random = np.random.default_rng(0), random.Random(0)
NAME = "HOPFLOW_TEST_PURITY"
pipes = socket.socketpair()
streams: Any = sys
system: Any = os


def to_stderr(x: Any) -> Any:
    print("seen", file=sys.stderr)
    return x


def logs(x: Any) -> Any:
    log.warning("seen %s", x.shape)
    return x


def sets_environ(x: Any) -> Any:
    os.environ[NAME] = os.environ.get(NAME, "") + "1"
    return x


@pytest.mark.parametrize(
    ("f", "what"),
    [
        (to_stderr, "it prints to stderr"),
        (lambda x: (streams.__stderr__.write("seen"), x)[1], "it prints to stderr"),
        (lambda x: (streams.__stdout__.write("seen"), x)[1], "it prints"),
        (lambda x: (os.write(2, b"seen"), x)[1], "it calls `os.write`"),
        (lambda x: (system.chdir("."), x)[1], "it calls `os.chdir`"),
        (lambda x: (os.umask(os.umask(0o22)), x)[1], "it calls `os.umask`"),
        (lambda x: (pipes[1].send(b"seen"), x)[1], "it writes to the file PIPE"),
        (logs, "it logs"),
        (sets_environ, "it changes `os.environ`"),
        (lambda x: (random.random(), x)[1], "it changes the state of `random`"),
        (lambda x: (np.random.rand(), x)[1], "it changes the state of `numpy.random`"),
        (lambda x: (generator.normal(), x)[1], "it changes the state of `generator`"),
        (lambda x: (own_random.random(), x)[1], "it changes the state of `own_random`"),
    ],
)
def test_what_is_done_to_the_process_is_an_effect(
    f: Any, what: str, monkeypatch: Any
) -> None:
    monkeypatch.setenv(NAME, "")
    hf.trace(f, hf.ones(3))
    with pytest.raises(ImpurityError) as found:
        hf.trace(f, hf.ones(3), strict=True)
    what = what.replace("PIPE", str(pipes[1].fileno()))
    at = rf"test_purity\.py:\d+: {re.escape(what)}\n"
    assert len(re.findall(at, str(found.value))) == 1, str(found.value)


def test_what_is_written_to_files_is_an_effect(tmp_path: Path) -> None:
    path, kept = tmp_path / "a.txt", (tmp_path / "b.txt").open("w+")

    def opens(x: Any) -> Any:
        with open(path, "a") as file:
            file.write("seen")
        return x

    def writes_text(x: Any) -> Any:
        path.write_text("seen")
        return x

    def writes_kept(x: Any) -> Any:
        kept.write("seen")
        return x

    def removes(x: Any) -> Any:
        path.unlink(missing_ok=True)
        return x

    def reads(x: Any) -> Any:
        return x * len(path.read_text())

    def writes_lines(x: Any) -> Any:
        kept.writelines(["seen"])
        return x

    with kept:
        for f, what in (
            (writes_lines, f"it writes to the file {kept.fileno()}"),
            (opens, f"it writes to the file `{path}`"),
            (writes_text, f"it writes to the file `{path}`"),
            (writes_kept, "it changes the state of `kept`"),
            (removes, "it calls `os.remove`"),
        ):
            with pytest.raises(ImpurityError) as found:
                hf.trace(f, hf.ones(3), strict=True)
            line = f.__code__.co_firstlineno + 1
            assert f"test_purity.py:{line}: {what}\n" in str(found.value)
    path.write_text("abc")
    module = hf.trace(reads, hf.ones(3), strict=True)
    assert module(hf.ones(1 + 2)).tolist() == [3.0] * 3


def test_afterwards_nothing_is_watched(tmp_path: Path, capsys: Any) -> None:
    before = logging.Logger.handle, sys.stdout, sys.stderr
    for f in (to_stderr, divides):
        with pytest.raises((ImpurityError, ZeroDivisionError)):
            hf.trace(f, hf.ones(3), strict=True)
    assert (logging.Logger.handle, sys.stdout, sys.stderr) == before
    (tmp_path / "c.txt").write_text("free")
    hf.trace(lambda x: x + 1, hf.ones(3), strict=True)
    assert capsys.readouterr().err == "seen\n"


def test_a_profiler_goes_on() -> None:
    calls: list[Any] = []
    sys.setprofile(lambda frame, *_: calls.append(frame.f_code.co_name))
    try:
        hf.trace(divides_nothing, hf.ones(3), strict=True)
        assert sys.getprofile() is not None
    finally:
        sys.setprofile(None)
    assert "divides_nothing" in calls


def divides_nothing(x: Any) -> Any:
    return x


def divides(x: Any) -> Any:
    return x * (1 / 0)


def test_what_hopflow_and_imports_do_is_no_effect() -> None:
    def f(x: Any) -> Any:
        import colorsys

        y = hf.scan(lambda c, v: (c + v, c), x[0], x)[0]
        return y * colorsys.rgb_to_hsv(1.0, 1.0, 1.0)[2] + float(
            os.environ["PATH"] != ""
        )

    sys.modules.pop("colorsys", None)
    hf.trace(f, hf.ones(3), strict=True)
