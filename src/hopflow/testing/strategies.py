"""Strategies for programs. Hypothesis is optional, and so imported late."""

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
from hopflow.testing.programs import Pool, Steps, run
from hopflow.testing.recorder import record
from hopflow.testing.user_operators import UserOperator, as_user_operator

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

BRANCHES: Final = ("cond", "switch")
"""The operators with two bodies; the others have one."""

ALIASING: Final = {
    **dict.fromkeys(ALIASING_OPERATIONS, 6),
    **dict.fromkeys(ALIASING_OPERATORS, 6),
    "same": 3,
    "exchange": 16,
    "recurred": 0,
    "stepped": 0,
}
"""The weights of steps that reuse memory, relative to 1 for other steps, in programs
with `aliasing`; `exchange` has many variants. `recurred` and `stepped`, which are loops
of their own, are drawn where a weight is given for them."""

BODIES: Final = ("fori", "while", "scan", "map", "subgraph", "checkpoint", "custom")

LEAST: Final = 2**100
"""What is added to drawn numbers. Hypothesis also draws integers that are constants in
the modules loaded so far, which differ between runs; no module has such large ones."""

KINDS: Final[dict[str, type[Pool]]] = {
    "exact": Exact,
    "large": Large,
    "special": Special,
    "smooth": Smooth,
}


def numbers() -> "SearchStrategy[tuple[int, ...]]":
    """Return a strategy for the four numbers of a step, from 0 to 11.

    One number is drawn instead of four: Hypothesis shrinks by deleting a few choices at
    a time, so that a step with few choices is deleted as a whole.
    """
    from hypothesis import strategies as st

    return st.integers(LEAST, LEAST + 12**4 - 1).map(
        lambda n: tuple((n - LEAST) // 12**k % 12 for k in range(4))
    )


def _steps(
    draw: Any,
    names: Sequence[str],
    operators: Sequence[str | UserOperator],
    depth: int,
    most: int,
) -> Steps:
    """Return steps that are drawn while they run.

    Args:
        draw: Draws from a strategy.
        names: The operations, repeated by their weights.
        operators: The operators, repeated by their weights.
        depth: The deepest nesting of operators.
        most: The most steps; bodies that may not have operators have at most 4.
    """
    from hypothesis import strategies as st

    inner = most if depth > 1 else min(most, 4)
    more = st.sampled_from((False, *[True] * (1 + most // 2)))  # about half of the most
    none = st.integers(0, 0)
    # About half of the steps are operators. One choice, in which an operation has the
    # same number at each depth: so a step can take the place of one around it.
    often = max(len(names) // len(operators), 1) if depth else 0
    kinds = st.sampled_from([*names, *[*operators] * often])

    @st.composite
    def step(draw: Any, p: Pool, count: int) -> bool:
        """Run a step after `count` others, or return False. Hypothesis makes programs
        small by deleting the choices of a step, or by replacing a step by one of its
        body. So the end is a choice also behind the last of the most steps: it remains
        when a step is deleted."""
        if not draw(more if count < most else none):
            return False
        kind, ns = draw(kinds), draw(numbers())
        bodies: list[Steps] = []
        if kind in operators:
            body = _steps(draw, names, operators, depth - 1, inner)
            bodies = [body] * _bodies_of(kind)
        run(p, kind, ns, bodies)
        return True

    def steps(p: Pool) -> None:
        count = 0
        while draw(step(p, count)):
            count += 1

    return steps


def _bodies_of(operator: str | UserOperator) -> int:
    if isinstance(operator, UserOperator):
        return operator.bodies
    return 2 if operator in BRANCHES else 1


def arguments(
    kind: type[Pool], dtypes: Sequence[str], most: int = 6
) -> "SearchStrategy[tuple[Argument, ...]]":
    """Return a strategy for the arguments of programs."""
    from hypothesis import strategies as st

    choices = st.tuples(
        st.sampled_from(list(dtypes)),
        st.sampled_from(kind.shapes),
        st.integers(0, 9),
    )
    return st.lists(choices, min_size=1, max_size=most).map(
        lambda drawn: tuple(
            Argument(f"x{k}", kind.argument(as_dtype(name), shape, seed))
            for k, (name, shape, seed) in enumerate(drawn)
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
    """Return a Hypothesis strategy for typed programs, which terminate and, by default,
    index within bounds.

    Args:
        kind: "exact": small whole numbers, for which all executions agree in every bit.
            "large": the same, with up to a million elements. "special": NaN,
            infinities, signed zeros, denormals and extremes of integers, also in every
            bit. "smooth": floats, for derivatives.
        operators: Names of `OPERATORS`; "grow" and "chosen" have sizes that are known
            only at run time, "custom_vjp" has no forward mode, "examples" maps over
            rows that are multiplied and make steps of their own. And your operators, or
            functions that call them: with tensors of one type, and functions from
            tensors to as many of the same types (`repeat(f, x)`). They must terminate
            for all functions. Options have their defaults.
        operations: The array functions; None: all of the kind.
        dtypes: The dtypes of arguments; None: all of the kind.
        depth: The deepest nesting of operators.
        size: The most steps of the program, and of each body that may have operators.
        weights: Name -> how often an operator or operation is drawn, relative to 1 for
            others. Your operator `repeat` has the name `own_repeat`, in programs too.
        mutation: Whether programs write to tensors.
        out_of_range: Whether indices may be out of range: reads and writes there end
            the program with an `IndexError`, in all executions, and sums by segment
            omit them. Starts of windows and numbers of branches are always clamped.
        aliasing: Whether programs copy, update and view the same arrays often, and
            exchange the carries of loops, to test compilers that reuse memory.
            Arguments then have more elements.

    Raises:
        ArgumentTypeError: a list of names is none, or has an element that is neither a
            name nor a function.
        ArgumentValueError: there is no such name, or nothing to draw from; a count is
            no whole number from 0 on; your operator cannot be called like this, or has
            the name of another one; or "chosen" is combined with `out_of_range`: its
            loops may have no rows, whose types are unknown then.
    """
    from hypothesis import strategies as st

    check_names("programs", "kind", [kind], KINDS)
    weights = dict(weights or {})
    counts = {f"weights[{name!r}]": n for name, n in weights.items()}
    _check_counts({"depth": depth, "size": size} | counts)
    pool = _pool(kind, in_range=not out_of_range, mutation=mutation, aliasing=aliasing)
    optional = {"write", *ALIASING_OPERATIONS}
    plain = [name for name in pool.operations if name not in optional]
    chosen_operations = plain if operations is None else operations
    operators, users = _split(operators, pool)
    check_names("programs", "operations", chosen_operations, pool.operations)
    extra = ["write"] * mutation
    if aliasing:
        extra += ALIASING_OPERATIONS
        operators += [name for name in ALIASING_OPERATORS if name not in operators]
        weights = ALIASING | weights
    names = [
        *chosen_operations,
        *(name for name in extra if name not in chosen_operations),
    ]
    dtype_names = [
        as_dtype(d).name for d in (pool.dtypes if dtypes is None else dtypes)
    ]
    known_names = [*names, *operators, *(x.name for x in users)]
    check_names("programs", "weights", list(weights), known_names)
    if out_of_range and "chosen" in operators:
        raise ArgumentValueError(
            'programs: with `out_of_range`, `operators` must be without "chosen".'
        )
    nested: list[str | UserOperator] = [*_weighted(operators, weights)]
    nested += [x for x in users for _ in range(weights.get(x.name, 1))]
    names = _weighted(names, weights)
    for label, choices in (("dtypes", dtype_names), ("operations", names)):
        if not choices:
            raise ArgumentValueError(
                f"programs: `{label}` leaves nothing to draw. Name one at least, whose "
                "weight is not 0."
            )

    @st.composite
    def program(draw: Any) -> Program:
        given = draw(arguments(pool, dtype_names))
        steps = _steps(draw, names, nested, depth if nested else 0, size)
        return record(pool, steps, given)

    return program()


def _pool(kind: str, *, in_range: bool, mutation: bool, aliasing: bool) -> type[Pool]:
    """Return the kind of programs with these options."""
    options: dict[str, Any] = {"in_range": in_range, "mutation": mutation}
    if aliasing and kind != "large":
        options["shapes"] = ALIASING_SHAPES
    return type(kind, (KINDS[kind],), options)


def _split(operators: Any, pool: type[Pool]) -> tuple[list[str], list[UserOperator]]:
    """Divide operators into names and users' operators.

    Raises:
        ArgumentTypeError, ArgumentValueError: see `programs`.
    """
    is_list = isinstance(operators, Collection) and not isinstance(operators, str)
    names = [x for x in operators if isinstance(x, str)] if is_list else operators
    check_names("programs", "operators", names, pool.operators)
    user_operators = [as_user_operator(x) for x in operators if not isinstance(x, str)]
    for k, operator in enumerate(user_operators):
        if operator.name in [x.name for x in user_operators[:k]]:
            raise ArgumentValueError(
                f"programs: `operators` has two that are called `{operator}`. Give a "
                "function of another name that calls one of them."
            )
    return list(names), user_operators


def _check_counts(counts: Mapping[str, Any]) -> None:
    """Check that counts are whole numbers from 0 on.

    Raises:
        ArgumentValueError: one is not.
    """
    for option, n in counts.items():
        if type(n) is not int or n < 0:
            raise ArgumentValueError(
                f"programs: `{option}` must be a whole number from 0 on, and is {n!r}."
            )


def _weighted(names: Sequence[str], weights: Mapping[str, int]) -> list[str]:
    return [name for name in names for _ in range(weights.get(name, 1))]


def check_names(
    function: str, argument: str, names: Any, allowed: Collection[str] | None = None
) -> None:
    """Check that an argument is a list of names; of those in `allowed`, if not None.

    Args:
        function: The public function, for messages.
        argument: The name of its argument.

    Raises:
        ArgumentTypeError: it is no list of names.
        ArgumentValueError: a name is unknown.
    """
    if isinstance(names, str) or not isinstance(names, Collection):
        raise ArgumentTypeError(
            f"{function}: `{argument}` must be a list of names, and is {names!r}."
        )
    if allowed is None:
        return
    if unknown := [name for name in names if name not in list(allowed)]:
        raise ArgumentValueError(
            f"{function}: `{argument}` has {unknown[0]!r}, which is none of "
            f"{', '.join(allowed)}."
        )
