"""What Hypothesis draws. It is imported late: the package does not depend on it."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from hopflow.dtypes import as_dtype
from hopflow.errors import ArgumentTypeError, ArgumentValueError
from hopflow.testing.aliasing import (
    ALIASING_OPERATIONS,
    ALIASING_OPERATORS,
    ALIASING_SHAPES,
)
from hopflow.testing.arithmetic import Exact, Large, Smooth, Special
from hopflow.testing.program import Argument, Program
from hopflow.testing.programs import Pool
from hopflow.testing.recorder import record
from hopflow.testing.user_operators import UserOperator, as_user_operator

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

BRANCHES: Final = ("cond", "switch")
"""The operators of two bodies; the others have one."""

ALIASING: Final = {
    **dict.fromkeys(ALIASING_OPERATIONS, 6),
    **dict.fromkeys(ALIASING_OPERATORS, 6),
    "same": 3,
    "exchange": 16,
}
"""How often each step that reuses memory is drawn, beside 1 of the others, in programs
that are drawn for it; `exchange` has many forms."""

BODIES: Final = ("fori", "while", "scan", "map", "subgraph", "checkpoint", "custom")

KINDS: Final[dict[str, type[Pool]]] = {
    "exact": Exact,
    "large": Large,
    "special": Special,
    "smooth": Smooth,
}


def steps(
    names: Sequence[str],
    depth: int,
    most: int = 7,
    operators: Sequence[str | UserOperator] = (*BRANCHES, *BODIES),
) -> "SearchStrategy[Any]":
    """Programs of `testing.programs`.

    Args:
        names: Of the operations; one that is named more often is drawn more often.
        depth: How many operators may be within each other.
        most: Steps of the program, and of a body that has operators in it.
        operators: Which of them there may be, as `names`; and of the user's.
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
        lambda name: st.tuples(st.just(name), numbers, *[inner] * _bodies_of(name))
    )
    return st.lists(st.one_of(plain, plain, nested), max_size=most)


def _bodies_of(operator: str | UserOperator) -> int:
    if isinstance(operator, UserOperator):
        return operator.bodies
    return 2 if operator in BRANCHES else 1


def arguments(
    kind: type[Pool], dtypes: Sequence[str], most: int = 6
) -> "SearchStrategy[tuple[Argument, ...]]":
    """Arguments of programs."""
    from hypothesis import strategies as st

    one = st.tuples(
        st.sampled_from(list(dtypes)),
        st.sampled_from(kind.shapes),
        st.integers(0, 9),
    )
    return st.lists(one, min_size=1, max_size=most).map(
        lambda found: tuple(
            Argument(f"x{k}", kind.argument(as_dtype(name), shape, seed))
            for k, (name, shape, seed) in enumerate(found)
        )
    )


def programs(
    kind: str = "exact",
    *,
    operators: Sequence[str | Callable[..., Any]] = (*BRANCHES, *BODIES),
    operations: Sequence[str] | None = None,
    dtypes: Sequence[str] | None = None,
    depth: int = 2,
    size: int = 5,
    weights: Mapping[str, int] | None = None,
    mutation: bool = False,
    out_of_range: bool = False,
    aliasing: bool = False,
) -> "SearchStrategy[Program]":
    """Typed programs, which run, stop, and read within bounds unless told otherwise.

    Args:
        kind: "exact": of small whole numbers, whose meanings agree in every bit.
            "large": the same, of up to a million elements. "special": of NaN,
            infinities, signed zeros, denormals and the ends of integers, in every bit
            too. "smooth": of floats, for derivatives.
        operators: Of `OPERATORS`. "grow" and "chosen" have sizes that only the run
            knows; "custom_vjp" has no forward mode. And operators of your own, or
            functions that call them: with tensors of one type, and functions of tensors
            that return as many of the same types (`repeat(f, x)`). They must stop
            whatever the functions do. Options have their defaults.
        operations: The functions of arrays; None: all of the kind.
        dtypes: Of the arguments.
        depth: How many operators may be within each other.
        size: Steps of the program, and of each body that has operators in it.
        weights: How often an operator or operation is drawn, beside 1 of the others;
            your own `repeat` is called `own_repeat` here, and in programs.
        mutation: Whether programs write to tensors.
        out_of_range: Whether indices may miss: what reads or writes there stops the
            program, with an `IndexError` that all meanings must raise, and sums by
            segment leave it out. Starts of windows, and numbers of branches, are moved
            to lie within in all programs.
        aliasing: Whether programs copy, update and view the same arrays on purpose, and
            exchange the carries of loops: what a compiler must get right that reuses
            memory. Arguments have more elements then.

    Raises:
        ArgumentTypeError: what is to be a list of names is none, or has what is
            neither a name nor a function.
        ArgumentValueError: there is nothing of such a name, or nothing to draw from; a
            number is no whole one from 0 on; an operator of your own cannot be called
            so, or has the name of another one; or "chosen" is to be out of range: its
            loops may have no rows, of which nobody reads the types.
    """
    from hypothesis import strategies as st

    check_names("programs", "kind", [kind], KINDS)
    weights = dict(weights or {})
    counts = {f"weights[{name!r}]": n for name, n in weights.items()}
    _check_counts({"depth": depth, "size": size} | counts)
    found = _pool(kind, in_range=not out_of_range, mutation=mutation, aliasing=aliasing)
    optional = {"write", *ALIASING_OPERATIONS}
    plain = [name for name in found.operations if name not in optional]
    wanted = plain if operations is None else operations
    operators, own = _split(operators, found)
    check_names("programs", "operations", wanted, found.operations)
    more = ["write"] * mutation
    if aliasing:
        more += ALIASING_OPERATIONS
        operators += [name for name in ALIASING_OPERATORS if name not in operators]
        weights = ALIASING | weights
    names = [*wanted, *(name for name in more if name not in wanted)]
    given = [as_dtype(d).name for d in (found.dtypes if dtypes is None else dtypes)]
    known = [*names, *operators, *(x.name for x in own)]
    check_names("programs", "weights", list(weights), known)
    if out_of_range and "chosen" in operators:
        raise ArgumentValueError(
            'programs: with `out_of_range`, `operators` must be without "chosen".'
        )
    nested: list[str | UserOperator] = [*_weighted(operators, weights)]
    nested += [x for x in own for _ in range(weights.get(x.name, 1))]
    names = _weighted(names, weights)
    for what, choices in (("dtypes", given), ("operations", names)):
        if not choices:
            raise ArgumentValueError(
                f"programs: `{what}` leaves nothing to draw. Name one at least, whose "
                "weight is not 0."
            )
    trees = steps(names, depth if nested else 0, size, nested)
    return st.builds(
        lambda args, tree: record(found, tree, args), arguments(found, given), trees
    )


def _pool(kind: str, *, in_range: bool, mutation: bool, aliasing: bool) -> type[Pool]:
    """What programs are drawn from."""
    options: dict[str, Any] = {"in_range": in_range, "mutation": mutation}
    if aliasing and kind != "large":
        options["shapes"] = ALIASING_SHAPES
    return type(kind, (KINDS[kind],), options)


def _split(operators: Any, found: type[Pool]) -> tuple[list[str], list[UserOperator]]:
    """The names among operators, and those of the user's.

    Raises:
        ArgumentTypeError, ArgumentValueError: see `programs`.
    """
    is_list = isinstance(operators, Collection) and not isinstance(operators, str)
    names = [x for x in operators if isinstance(x, str)] if is_list else operators
    check_names("programs", "operators", names, found.operators)
    own = [as_user_operator(x) for x in operators if not isinstance(x, str)]
    for k, operator in enumerate(own):
        if operator.name in [x.name for x in own[:k]]:
            raise ArgumentValueError(
                f"programs: `operators` has two that are called `{operator}`. Give a "
                "function of another name that calls one of them."
            )
    return list(names), own


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
