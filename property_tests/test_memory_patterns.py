"""The fuzzer draws programs that reuse memory, of each kind, and often."""

from collections import Counter
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from property_tests.trees import steps_of

from hopflow.testing.aliasing import ALIASING_OPERATIONS, ALIASING_OPERATORS
from hopflow.testing.checks import check
from hopflow.testing.memory_patterns import PATTERNS, memory_patterns
from hopflow.testing.program import Argument, Body, Name, Program, Statement
from hopflow.testing.recorder import record
from hopflow.testing.strategies import KINDS, programs

pytestmark = pytest.mark.slow

DRAWN: Final = 30
SEEDS: Final = range(30)
"""Programs of one seed are alike, and which they are depends on what was imported."""

LEAST: Final = 9
"""Programs of those, at least, that contain a pattern: one in a hundred."""

WRITES: Final = frozenset(p for p in PATTERNS if "write" in p)

some = settings(
    max_examples=DRAWN,
    database=None,
    deadline=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


def counted(strategy: Any) -> Counter[str]:
    """How many of the programs drawn contain each pattern."""
    found: Counter[str] = Counter()

    for k in SEEDS:

        @seed(k)
        @some
        @given(strategy)
        def count(program: Program) -> None:
            found.update(memory_patterns(program))

        count()
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["exact", "smooth"])
def test_programs_that_write_contain_every_pattern(kind: str) -> None:
    found = counted(programs(kind, mutation=True, aliasing=True))
    assert not {p: found[p] for p in PATTERNS if found[p] < LEAST}


@pytest.mark.slow
def test_programs_that_do_not_write_contain_every_other_pattern() -> None:
    found = counted(programs("exact", aliasing=True))
    assert not {p: found[p] for p in PATTERNS if found[p] < LEAST and p not in WRITES}
    assert not {p for p in WRITES if found[p]} - {
        "array read before and after an update"
    }


def test_these_steps_are_drawn_only_where_they_are_asked_for() -> None:
    drawn: set[str] = set()

    @some
    @given(programs("exact", mutation=True))
    def look(program: Program) -> None:
        drawn.update(program.operations)

    look()
    assert not drawn & {"flip", "positive"}


@pytest.mark.parametrize("mutation", [False, True])
@pytest.mark.parametrize("kind", ["exact", "special", "smooth"])
@pytest.mark.parametrize("name", [*ALIASING_OPERATIONS, *ALIASING_OPERATORS])
def test_each_step_means_the_same_everywhere(
    name: str, kind: str, mutation: bool
) -> None:
    pool: Any = type(kind, (KINDS[kind],), {"mutation": mutation})
    x, y = np.arange(1.0, 18.0) % 7, np.arange(17.0) % 5
    given = (Argument("x0", x), Argument("x1", y))
    body = [[("add", (0, 1, 0, 0))]] * (name in ALIASING_OPERATORS)
    for k in range(6):
        numbers = (k, (5 * k + 1) % 12, (7 * k + 2) % 12, k)
        program = record(pool, steps_of([(name, numbers, *body)]), given)
        check(program, ["debug", "eager", "jit", "dynamic"])


# --- what counts as a pattern ---------------------------------------------------------


def of_statements(*statements: Statement, result: tuple[Name, ...]) -> set[str]:
    given = Argument("x0", np.zeros(17))
    main = Body("program", (Name("x0"),), statements, result)
    return memory_patterns(Program((given,), main))


def statement(target: str | None, operation: str, *args: Any) -> Statement:
    if target is None:
        return Statement(None, operation, args)
    return Statement(Name(target), operation, args, types=("f64[17]",))


X0, V1, V2, V3 = map(Name, ("x0", "v1", "v2", "v3"))
COPY = statement("v1", "copy", X0)
WRITE = statement(None, "set", V1, 3, 1.0)


def test_a_copy_that_is_written_is_a_pattern_by_what_is_read_later() -> None:
    dead, live = (
        "copied array not read after the write",
        "copied array read after the write",
    )
    assert of_statements(COPY, WRITE, result=(V1,)) == {dead}
    kept = of_statements(COPY, WRITE, result=(V1, X0))
    assert kept == {live, "output that is an input"}
    assert of_statements(COPY, result=(V1,)) == set()


def test_a_view_is_a_pattern_if_it_is_read_after_the_write() -> None:
    seen = statement("v2", "flip", V1)
    doubled = statement("v3", "add", V2, V2)
    pattern = "view read after a write to its base"
    assert pattern in of_statements(COPY, seen, WRITE, doubled, result=(V3,))
    assert pattern not in of_statements(COPY, seen, doubled, WRITE, result=(V3, V1))


def carried(count: int, next_carries: Callable[..., tuple[Name, ...]]) -> set[str]:
    """The patterns of a loop that moves carries, and adds the first two in `v9`."""
    names = tuple(Name(f"c{k}") for k in range(count))
    added = statement("v9", "add", *names[:2])
    step = Body("step1", (Name("i1"), *names), (added,), next_carries(*names))
    targets = tuple(Name(f"r{k}") for k in range(count))
    loop = Statement(
        targets, "fori_loop", (0, 3, step, (X0,) * count), types=("f64[17]",) * count
    )
    return of_statements(loop, result=targets)


V9: Final = Name("v9")


@pytest.mark.parametrize(
    ("count", "next_carries", "pattern"),
    [
        (2, lambda a, b: (b, a), "carries swapped"),
        (3, lambda a, b, c: (b, c, a), "three carries rotated"),
        (2, lambda a, _b: (V9, a), "carry passed on beside a new one"),
        (2, lambda a, _b: (a, V9), "carry unchanged beside a new one"),
        (2, lambda _a, _b: (V9, V9), "one value for two carries"),
    ],
)
def test_a_loop_is_a_pattern_by_where_its_carries_come_from(
    count: int, next_carries: Any, pattern: str
) -> None:
    assert pattern in carried(count, next_carries)
