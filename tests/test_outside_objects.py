"""Classes, and objects that a jitted function makes: what they lead to outside."""

import copy
import functools
import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np
import pytest

import hopflow as hf
from hopflow.errors import ImpurityError


class Metres(hf.Tensor):
    """Where there are tensor types of a user's, arguments are taken apart."""

    @classmethod
    def process(cls, op: Any, args: Any, params: Any) -> Any:
        return NotImplemented


class Base:
    rate = 2.0
    rows: ClassVar[list[int]] = []
    table: ClassVar[dict[str, int]] = {}
    weight: ClassVar[Any] = None
    made = 0
    serial = itertools.count()

    def scale(self) -> float:
        return 3.0

    @classmethod
    def create(cls) -> Any:
        return cls()


class Child(Base):
    def __init__(self) -> None:
        type(self).made += 1

    def scale(self) -> float:
        return super().scale() + self.rate

    def numbered(self) -> int:
        return next(self.serial)


class Scope:
    depth = 0

    def __enter__(self) -> Any:
        type(self).depth += 1
        return self

    def __exit__(self, *_error: object) -> None:
        type(self).depth -= 1


class Pair(NamedTuple):
    first: Any
    second: Any


class Wrapper:
    def __init__(self, inner: Any) -> None:
        self.inner = inner


@dataclass
class Settings:
    rate: float = 1.0


@dataclass(frozen=True, slots=True)
class Frozen:
    count: int = 0

    def increase(self) -> None:
        object.__setattr__(self, "count", self.count + 1)


@functools.lru_cache
def cached(n: int) -> float:
    return n * float(OUTER.rate)


OUTER: Final[Any] = SimpleNamespace()


def reset() -> None:
    vars(OUTER).clear()
    vars(OUTER).update(
        rate=1.0, rows=[1], array=np.zeros(3), matrix=np.zeros((2, 2)), log=[]
    )
    OUTER.settings, OUTER.inner = Settings(), Wrapper(Settings())
    Base.rate, Base.weight, Base.made, Child.made = 2.0, hf.ones(()), 0, 0
    Base.rows.clear()
    Base.table.clear()
    cached.cache_clear()


def state() -> Any:
    held = {k: v for k, v in vars(OUTER).items() if isinstance(v, float | list)}
    arrays = OUTER.array.tolist(), OUTER.matrix.tolist()
    classes = Base.rate, [*Base.rows], dict(Base.table), Base.made, Child.made
    return copy.deepcopy((held, arrays, classes, Scope.depth))


def sets_rate(value: float) -> Callable[[], None]:
    def change() -> None:
        Base.rate = value

    return change


def sets_weight() -> None:
    Base.weight = hf.full((), 7.0)


def sets_scale() -> None:
    Base.scale = lambda self: 11.0  # type: ignore[method-assign]


def appends() -> None:
    OUTER.rows.append(2)


def changes_settings() -> None:
    OUTER.settings.rate = OUTER.inner.inner.rate = OUTER.rate = 5.0


def clears() -> None:
    OUTER.rate = 4.0
    cached.cache_clear()


def writes() -> None:
    OUTER.array[1] = 2.0


def bump(view: Any) -> None:
    view += 1.0


def counts(x: Any) -> Any:
    Child()
    return x * Child.made


def appends_to_the_class(x: Any) -> Any:
    Child().rows.append(1)
    return x * len(Base.rows)


def sets_an_item_of_the_class(x: Any) -> Any:
    child = Child()
    child.table["n"] = child.table.get("n", 0) + 1
    return x * Base.table["n"]


def enters(x: Any) -> Any:
    with Scope():
        return x * Scope.depth * Base.rate


def copies(x: Any) -> Any:
    settings = copy.copy(OUTER.settings)
    return x * settings.rate * copy.deepcopy(OUTER.inner).inner.rate


def updates_a_transposed_array(x: Any) -> Any:
    OUTER.matrix.T[0] += 1.0
    return x * OUTER.matrix[1, 0]


def updates_rows_in_a_helper(x: Any) -> Any:
    bump(OUTER.matrix[1])
    return x * OUTER.matrix[1, 1]


def fills(x: Any) -> Any:
    OUTER.array.fill(OUTER.array[0] + 1.0)
    return x * OUTER.array[2]


def keeps_sizes(x: Any) -> Any:
    OUTER.log.append((x.shape, {x.shape[0]: [x.shape[0] + 1]}))
    return x * len(OUTER.log)


def keeps_a_size_in_a_new_object(x: Any) -> Any:
    OUTER.size = Pair(x.shape[0], 1)
    return x * OUTER.size.first


def largest(x: Any) -> Any:
    OUTER.largest = max(vars(OUTER).get("largest", 0), x.shape[0])
    return x * OUTER.largest


def increases_globals(x: Any) -> Any:
    globals()["COUNT"] += 1
    return x * COUNT


COUNT = 0

PROGRAMS: Final[list[tuple[Callable[..., Any], Callable[[], None]]]] = [
    (lambda x: x * Child().rate, sets_rate(3.0)),
    (lambda x: x * getattr(Child(), "rate"), sets_rate(3.0)),  # noqa: B009
    (lambda x: x * type(Child()).rate, sets_rate(3.0)),
    (lambda x: x * Child.create().rate, sets_rate(3.0)),
    (lambda x: x * Child().scale(), sets_rate(3.0)),
    (lambda x: x * Child().scale(), sets_scale),
    (lambda x: x * Child().weight, sets_weight),
    (lambda x: x * Wrapper(OUTER.rows).inner[0] * len(OUTER.rows), appends),
    (lambda x: x * len(Pair(OUTER.rows, 1).first), appends),
    (lambda x: x * len(Wrapper(Wrapper(OUTER.rows)).inner.inner), appends),
    (lambda x: x * [OUTER.settings][0].rate, changes_settings),
    (copies, changes_settings),
    (lambda x: x * cached(3), clears),
    (lambda x: x * float(OUTER.array.sum()), writes),
    (counts, appends),
    (appends_to_the_class, appends),
    (sets_an_item_of_the_class, appends),
    (enters, sets_rate(3.0)),
    (updates_a_transposed_array, appends),
    (updates_rows_in_a_helper, appends),
    (fills, writes),
    (keeps_sizes, appends),
    (keeps_a_size_in_a_new_object, appends),
    (largest, appends),
    (increases_globals, appends),
]


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize(("f", "change"), PROGRAMS)
def test_jitted_functions_do_at_each_call_what_python_does(
    f: Callable[..., Any], change: Callable[[], None], dynamic: bool | None
) -> None:
    def calls(run: Callable[..., Any]) -> list[Any]:
        global COUNT
        COUNT, scale = 0, Base.scale
        reset()
        found = []
        try:
            for n in (2, 2, 3):
                found.append((run(hf.ones(n)).tolist(), state(), COUNT))
                change()
                found.append((run(hf.ones(n)).tolist(), state(), COUNT))
        finally:
            Base.scale = scale  # type: ignore[method-assign]
        return found

    assert calls(hf.jit(f, dynamic=dynamic)) == calls(f)


@pytest.mark.parametrize(
    "f",
    [
        lambda x: OUTER.log.append((x * 2,)) or x,
        lambda x: OUTER.log.append({"a": [x * 2]}) or x,
        lambda x: OUTER.log.append(Wrapper(x * 2)) or x,
        lambda x: OUTER.log.append(functools.partial(max, x * 2)) or x,
        lambda x: OUTER.log.append((lambda y: lambda: y)(x * 2)) or x,
        lambda x: x * Child().numbered(),
    ],
)
def test_what_outlives_a_trace_within_new_objects_is_refused(f: Any) -> None:
    reset()
    before = state()
    with pytest.raises(ImpurityError):
        hf.jit(f)(hf.ones(2))
    assert (state(), OUTER.log) == (before, [])


def test_frozen_objects_are_as_they_were_after_an_error() -> None:
    frozen, log = Frozen(), list[Any]()

    @hf.jit
    def f(x: Any) -> Any:
        frozen.increase()
        log.append(x)
        return x

    with pytest.raises(ImpurityError):
        f(hf.ones(2))
    assert (frozen.count, log) == (0, [])


def test_what_is_outside_for_a_while_is_no_loss() -> None:
    @hf.jit
    def f(x: Any) -> Any:
        OUTER.current = []
        OUTER.current.append(x * 2)
        found = OUTER.current[0]
        del OUTER.current
        return found

    reset()
    assert f(hf.ones(2)).tolist() == [2.0, 2.0]


def test_other_items_than_those_that_are_bound_may_change() -> None:
    log = {"last": "", "other": ""}

    @hf.jit
    def f(x: Any) -> Any:
        log["last"] = "f"
        return x

    for _ in range(2):
        f(hf.ones(2))
    traces = hf.stats().traces
    log["other"] = "changed"
    f(hf.ones(2))
    assert hf.stats().traces == traces
    log["last"] = "changed"
    f(hf.ones(2))
    assert log["last"] == "f"


@pytest.mark.parametrize("is_written", ["argument", "outside"])
def test_a_container_that_is_passed_and_read_is_refused(is_written: str) -> None:
    outer = [1]

    @hf.jit
    def f(x: Any, passed: list[int]) -> Any:
        (passed if is_written == "argument" else outer).append(2)
        return x * len(outer if is_written == "argument" else passed)

    for _ in range(2):
        with pytest.raises(ImpurityError, match="reads from outside too"):
            f(hf.ones(2), outer)
        assert outer == [1]
        f(hf.ones(2), [1])
        outer[:] = [1]


@pytest.mark.parametrize(
    "array",
    [
        np.zeros(2, hf.bfloat16.dtype),
        np.zeros((2, 3), np.float16)[::-1, ::2],
        np.array(3),
        np.zeros((0, 2)),
        np.array(["2026-01-01", "2026-01-02"], "datetime64[D]"),
        np.array([(1, 2.0)], [("a", "i4"), ("b", "f8")]),
        np.array([None, "a"], object),
        np.array(["a", "bc"]),
    ],
    ids=lambda array: str(array.dtype),
)
def test_arrays_of_any_dtype_may_be_read(array: Any) -> None:
    f = hf.jit(lambda x: x * len(array.shape) * array.itemsize)
    for _ in range(2):
        assert f(hf.ones(())).item() == array.ndim * array.itemsize


class Stack(list[Any]):
    """A list that is made of nothing, and that counts."""

    def __init__(self) -> None:
        super().__init__()
        self.pushed = 0

    def push(self, value: Any) -> None:
        self.pushed += 1
        self.append(value)


def test_lists_of_a_class_of_ones_own_are_changed_and_kept() -> None:
    def calls(transform: Callable[..., Any]) -> list[Any]:
        stack = Stack()

        def f(x: Any) -> Any:
            inner = Stack()
            inner.push(x.shape[0])
            stack.push(inner)
            return x * len(stack) * stack.pushed * stack[-1][0]

        run, found = transform(f), []
        for n in (2, 2, 3):
            found.append((run(hf.ones(n)).tolist(), [*map(list, stack)], stack.pushed))
        return found

    assert calls(hf.jit) == calls(lambda f: f)


@pytest.mark.parametrize("write", ["fill", "item", "view", "attribute"])
def test_all_is_as_it_was_after_an_error(write: str) -> None:
    array, stack, log = np.zeros(3), Stack(), list[Any]()

    @hf.jit
    def f(x: Any) -> Any:
        match write:
            case "fill":
                array.fill(array[0] + 1.0)
            case "item":
                array[1] = 5.0
            case "view":
                array[::-1][0] += 1.0
            case _:
                stack.push(1)
        log.append(x)
        return x

    with pytest.raises(ImpurityError):
        f(hf.ones(2))
    assert (array.tolist(), stack, stack.pushed, log) == ([0.0] * 3, [], 0, [])


def test_a_method_that_is_called_copy_reads_no_whole_objects() -> None:
    def scaled(inner: Any, x: Any) -> Any:
        return x * inner.settings.rate

    def f(x: Any) -> Any:
        return scaled(outer, x.copy())

    outer = SimpleNamespace(settings=Settings(), step=0)
    run, traces = hf.jit(f), hf.stats().traces
    for step in range(4):
        outer.step = step
        run(hf.ones(2))
    assert hf.stats().traces == traces + 1


def test_a_module_may_hold_something_for_a_while() -> None:
    module: Any = sys.modules[__name__]

    @hf.jit
    def f(x: Any) -> Any:
        module.CURRENT = []
        module.CURRENT.append(x * 2)
        found = module.CURRENT[0]
        del module.CURRENT
        return found

    assert f(hf.ones(2)).tolist() == [2.0, 2.0]
