"""What Hypothesis draws. It is imported late: the package does not depend on it."""

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from hopflow.dtypes import as_dtype
from hopflow.errors import ArgumentTypeError, ArgumentValueError
from hopflow.testing.arithmetic import Exact, Smooth
from hopflow.testing.program import Argument, Program
from hopflow.testing.programs import OPERATORS, Pool
from hopflow.testing.recorder import record

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

__all__ = ["BODIES", "KINDS", "check_names", "programs", "steps"]


BRANCHES: Final = ("cond", "switch")
"""The operators of two bodies; the others have one."""

BODIES: Final = ("fori", "while", "scan", "map", "subgraph", "checkpoint", "custom")

KINDS: Final[dict[str, type[Pool]]] = {"exact": Exact, "smooth": Smooth}

SHAPES: Final = ((), (3,), (4, 3), (2, 3), (0,), (5,), (2, 1, 3), (20,))

DTYPES: Final[dict[str, Sequence[str]]] = {
    "exact": (
        "float64 float32 int64 int32 bool int8 uint8 float16 bfloat16 int16".split()
    ),
    "smooth": "float64 float64 float32 int64 bool".split(),
}


def steps(
    names: Sequence[str],
    depth: int,
    most: int = 7,
    operators: Sequence[str] = (*BRANCHES, *BODIES),
) -> "SearchStrategy[Any]":
    """Programs of `testing.programs`.

    Args:
        names: Of the operations; one that is named more often is drawn more often.
        depth: How many operators may be within each other.
        most: Steps of the program, and of a body that has operators in it.
        operators: Which of them there may be, as `names`.
    """
    from hypothesis import strategies as st

    # One number and not four: Hypothesis takes away a few of its choices at a time, and
    # a step that is few choices goes as a whole.
    numbers = st.integers(0, 12**4 - 1).map(
        lambda n: (n % 12, n // 12 % 12, n // 144 % 12, n // 1728)
    )
    plain = st.tuples(st.sampled_from(names), numbers)
    if depth == 0:
        return st.lists(plain, max_size=4)
    inner = steps(names, depth - 1, most, operators)
    nested = st.sampled_from(operators).flatmap(
        lambda name: st.tuples(
            st.just(name), numbers, *[inner] * (2 if name in BRANCHES else 1)
        )
    )
    return st.lists(st.one_of(plain, plain, nested), max_size=most)


def arguments(
    kind: str, dtypes: Sequence[str], most: int = 6
) -> "SearchStrategy[tuple[Argument, ...]]":
    """Arguments of programs."""
    from hypothesis import strategies as st

    one = st.tuples(
        st.sampled_from(list(dtypes)), st.sampled_from(SHAPES), st.integers(0, 9)
    )
    return st.lists(one, min_size=1, max_size=most).map(
        lambda found: tuple(
            Argument(f"x{k}", _values(kind, *each)) for k, each in enumerate(found)
        )
    )


def _values(kind: str, dtype: str, shape: tuple[int, ...], seed: int) -> Any:
    """Numbers that differ, of a size that the kind of program keeps to."""
    found = as_dtype(dtype)
    count = int(np.prod(shape))
    if found.kind == "f" and kind == "smooth":
        values = np.sin(1.7 * np.arange(count) + seed + 1)
    else:
        spread = 5 if found.bits > 16 or found.kind != "f" else 2
        values = (np.arange(count) * 3 + seed) % (2 * spread + 1) - spread
        values = np.abs(values) if found.kind == "u" else values
    return values.reshape(shape).astype(found.dtype)


def programs(
    kind: str = "exact",
    *,
    operators: Sequence[str] = (*BRANCHES, *BODIES),
    operations: Sequence[str] | None = None,
    dtypes: Sequence[str] | None = None,
    depth: int = 2,
    size: int = 5,
    weights: Mapping[str, int] | None = None,
    mutation: bool = False,
    out_of_range: bool = False,
) -> "SearchStrategy[Program]":
    """Typed programs, which run, stop, and read within bounds unless told otherwise.

    Args:
        kind: "exact": of small whole numbers, whose meanings agree in every bit.
            "smooth": of floats, for derivatives.
        operators: Of `OPERATORS`. "grow" and "chosen" have sizes that only the run
            knows; "custom_vjp" has no forward mode.
        operations: The functions of arrays; None: all of the kind.
        dtypes: Of the arguments.
        depth: How many operators may be within each other.
        size: Steps of the program, and of each body that has operators in it.
        weights: How often an operator or operation is drawn, beside 1 of the others.
        mutation: Whether programs write to tensors.
        out_of_range: Whether indices may miss: what reads or writes there stops the
            program, with an `IndexError` that all meanings must raise, and sums by
            segment leave it out. Starts of windows, and numbers of branches, are moved
            to lie within in all programs.

    Raises:
        ArgumentTypeError: what is to be a list of names is none.
        ArgumentValueError: there is nothing of such a name, or nothing to draw from; a
            number is no whole one from 0 on; or "chosen" is to be out of range: its
            loops may have no rows, of which nobody reads the types.
    """
    from hypothesis import strategies as st

    check_names("programs", "kind", [kind], KINDS)
    weights = dict(weights or {})
    counts = {f"weights[{name!r}]": n for name, n in weights.items()}
    _check_counts({"depth": depth, "size": size} | counts)
    found: type[Pool] = type(kind, (KINDS[kind],), {"in_range": not out_of_range})
    plain = [name for name in found.operations if name != "write"]
    wanted = plain if operations is None else operations
    check_names("programs", "operators", operators, OPERATORS)
    check_names("programs", "operations", wanted, found.operations)
    names = [*wanted, *["write"] * (mutation and "write" not in wanted)]
    given = [as_dtype(d).name for d in (DTYPES[kind] if dtypes is None else dtypes)]
    check_names("programs", "weights", list(weights), [*names, *operators])
    if out_of_range and "chosen" in operators:
        raise ArgumentValueError(
            'programs: with `out_of_range`, `operators` must be without "chosen".'
        )
    nested = _weighted(operators, weights)
    names = _weighted(names, weights)
    for what, choices in (("dtypes", given), ("operations", names)):
        if not choices:
            raise ArgumentValueError(
                f"programs: `{what}` leaves nothing to draw. Name one at least, whose "
                "weight is not 0."
            )
    trees = steps(names, depth if nested else 0, size, nested)
    return st.builds(
        lambda args, tree: record(found, tree, args), arguments(kind, given), trees
    )


def _check_counts(counts: Mapping[str, Any]) -> None:
    """
    Raises:
        ArgumentValueError: one is no whole number from 0 on.
    """
    for what, n in counts.items():
        if type(n) is not int or n < 0:
            raise ArgumentValueError(
                f"programs: `{what}` must be a whole number from 0 on, and is {n!r}."
            )


def _weighted(names: Sequence[str], weights: Mapping[str, int]) -> list[str]:
    return [name for name in names for _ in range(weights.get(name, 1))]


def check_names(
    function: str, what: str, names: Any, known: Collection[str] | None = None
) -> None:
    """Check that an argument is a list of names; of `known` ones, where that is given.

    Raises:
        ArgumentTypeError: it is none.
        ArgumentValueError: there is nothing of such a name.
    """
    if isinstance(names, str) or not isinstance(names, Collection):
        raise ArgumentTypeError(
            f"{function}: `{what}` must be a list of names, and is {names!r}."
        )
    if known is None:
        return
    if unknown := [name for name in names if name not in list(known)]:
        raise ArgumentValueError(
            f"{function}: `{what}` has {unknown[0]!r}, which is none of "
            f"{', '.join(known)}."
        )
