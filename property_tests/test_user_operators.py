"""Operators of one's own in drawn programs: `programs(operators=[...])`."""

import contextlib
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis.errors import NoSuchExample

import hopflow
from hopflow.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    ProgramFormatError,
    ShapeError,
)
from hopflow.testing import Disagreement, Program, check, from_text, programs, to_text
from hopflow.testing.program import walk

pytestmark = pytest.mark.slow

hf: Any = hopflow


class Repeat(hopflow.HigherOrderOp):
    """`f` again and again."""

    def debug(self, f: Any, x: Any, *, times: int = 3) -> Any:
        for _ in range(times):
            x = f(x)
        return x


class Fold(hopflow.HigherOrderOp):
    """A function of two values, in a loop; with a result of several parts."""

    def debug(self, x: Any, combine: Any, w: Any) -> Any:
        y, z = hf.fori_loop(0, 2, lambda _, a, b: combine(a, b), (x, w))
        return {"last": y, "sum": hf.sum(z)}


class Blend(hopflow.HigherOrderOp):
    """No function at all."""

    def debug(self, x: Any, y: Any) -> Any:
        return x - 2 * y


class Either(hopflow.HigherOrderOp):
    """Two functions, of which a value decides."""

    def debug(self, f: Any, g: Any, x: Any) -> Any:
        return hf.cond(hf.sum(x) > 0, f, g, (x,))


class OfMatrices(hopflow.HigherOrderOp):
    """What refuses all but matrices."""

    def debug(self, f: Any, x: Any) -> Any:
        if x.ndim != 2:
            raise ShapeError("of_matrices: `x` must be a matrix.")
        return f(x)


repeat, fold, blend, either, of_matrices = (
    Repeat(),
    Fold(),
    Blend(),
    Either(),
    OfMatrices(),
)


def until_three(step: Any, x: Any) -> Any:
    """A function of the user's that gives our operator what it needs."""
    return hf.while_loop(lambda n, _: n < 3, lambda n, x: (n + 1, step(x)), (0, x))[1]


OWN = [repeat, fold, blend, either, of_matrices, until_three]
NAMES = {
    f"own_{x}"
    for x in ("repeat", "fold", "blend", "either", "of_matrices", "until_three")
}

some = settings(
    max_examples=25,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
smallest = settings(some, max_examples=500, phases=[Phase.generate, Phase.shrink])


def drawn(kind: str = "exact", own: Any = OWN, **options: Any) -> Any:
    return programs(kind, operators=["cond", "scan", *own], **options)


def first(when: Callable[[Program], bool], **options: Any) -> Program:
    found: Program = find(drawn(**options), when, settings=smallest)
    return found


@pytest.mark.parametrize("name", sorted(NAMES))
def test_each_is_drawn(name: str) -> None:
    # One takes matrices alone, which few of the values are.
    program = first(lambda p: name in p.operations, depth=1, weights={name: 4})
    assert name in program.operators
    assert name in program.source()


def test_they_are_within_each_other_and_within_ours() -> None:
    found = drawn(own=[repeat], size=3)
    find(
        found,
        lambda p: p.operations.count("own_repeat") > 1 and "scan" in p.operations,
        settings=settings(smallest, phases=[Phase.generate]),
    )


CHEAP = ["debug", "eager", "traced", "symbolic", "functionalized"]


@some
@given(drawn("exact"))
def test_executions_agree_in_each_bit(program: Program) -> None:
    check(program, [*CHEAP, "native"])


@settings(some, max_examples=8)
@given(drawn("smooth", size=2, depth=1))
def test_transforms_of_them_agree(program: Program) -> None:
    check(program, ["eager"], ["vmap", "grad", "jvp", "vmap of grad"])


def test_jax_is_not_asked() -> None:
    program = first(lambda p: bool(p.operators), depth=1)
    assert "jax" not in check(program).agreed


class WrongTangent(hopflow.HigherOrderOp):
    def debug(self, f: Any, x: Any) -> Any:
        return 2 * f(x)

    def jvp(self, primals: Any, tangents: Any) -> Any:
        (f, x), (_, dx) = primals, tangents
        return self(f, x), dx


class WrongBatch(hopflow.HigherOrderOp):
    def debug(self, f: Any, x: Any) -> Any:
        return f(x)

    def batch(self, size: Any, batched: Any, args: Any, params: Any) -> Any:
        values, mask = super().batch(size, batched, args, params)
        return [v + 1 for v in values], mask


@pytest.mark.parametrize(
    ("operator", "transform"),
    [(WrongTangent(), "grad"), (WrongTangent(), "jvp"), (WrongBatch(), "vmap")],
)
def test_a_rule_that_is_wrong_is_found(operator: Any, transform: str) -> None:
    def is_wrong(program: Program) -> bool:
        try:
            check(program, ["eager"], [transform])
        except Disagreement:
            return True
        return False

    options = {"own": [operator], "dtypes": ["float64"], "depth": 1, "size": 3}
    assert first(is_wrong, kind="smooth", **options).operators
    with pytest.raises(NoSuchExample):
        find(
            drawn("smooth", [repeat], dtypes=["float64"], depth=1, size=3),
            is_wrong,
            settings=settings(smallest, max_examples=15),
        )


def test_a_type_that_one_refuses_is_left_out() -> None:
    program = first(lambda p: bool(p.operators), own=[of_matrices], depth=1)
    for statement in walk(program.main):
        if statement.operation == "own_of_matrices":
            assert all(text.count(",") == 1 for text in statement.types)


def test_an_error_that_is_not_of_types_is_one_of_drawing() -> None:
    def faulty(f: Any, x: Any) -> Any:
        if x.ndim != 1:
            raise RuntimeError("it forgot scalars")
        return f(x)

    with pytest.raises(RuntimeError, match="it forgot scalars"):
        first(lambda _: False, own=[faulty], depth=1)


# --- text -----------------------------------------------------------------------------


@some
@given(drawn("exact"))
def test_texts_are_read_with_the_operators(program: Program) -> None:
    read = from_text(to_text(program), OWN)
    assert read.source() == program.source()
    assert set(read.operators) == set(program.operators)


def test_a_text_without_its_operators_is_refused() -> None:
    text = to_text(first(lambda p: "own_repeat" in p.operations, depth=1))
    for own in ([], [blend]):
        with pytest.raises(ProgramFormatError, match="give `operators`"):
            from_text(text, own)


def test_a_text_that_calls_one_otherwise_is_refused() -> None:
    program = first(lambda p: "own_repeat" in p.operations, depth=1)
    text = to_text(program).replace("= own_repeat(", "= own_blend(")
    with pytest.raises(ProgramFormatError, match="a wrong call of own_blend"):
        from_text(text, OWN)


def test_a_script_imports_them() -> None:
    program = first(lambda p: "own_until_three" in p.operations, depth=1)
    printed = io.StringIO()
    assert f"from {__name__} import until_three as own_until_three" in program.script()
    with contextlib.redirect_stdout(printed):
        exec(program.script(), {})
    assert printed.getvalue()


def test_a_script_says_what_cannot_be_imported() -> None:
    def local(step: Any, x: Any) -> Any:
        return step(step(x))

    program = first(lambda p: bool(p.operators), own=[local], depth=1)
    assert "# Define `own_local` here: your operator `local`." in program.script()


# --- what is refused ------------------------------------------------------------------


def of_a_number(f: Any, x: Any) -> Any:
    return x * f(3)


def of_two_types(f: Any, x: Any) -> Any:
    return hf.sum(f(x)) + f(hf.sum(x)[None, None])[0, 0]


def of_a_dict(x: Any) -> Any:
    return x["a"]


NUMBERED = lambda x: x  # noqa: E731


@pytest.mark.parametrize(
    ("own", "error", "text"),
    [
        (
            [3],
            ArgumentTypeError,
            "must have names, operators and functions, and has `in",
        ),
        ([of_a_dict], ArgumentValueError, "`of_a_dict` cannot be called with tensors"),
        ([of_a_number], ArgumentValueError, "`of_a_number` cannot be called with ten"),
        ([of_two_types], ArgumentValueError, "`of_two_types` cannot be called with t"),
        ([NUMBERED], ArgumentValueError, "of which a program can make no name"),
        ([repeat, Repeat()], ArgumentValueError, "two that are called `repeat`"),
        (["repeats"], ArgumentValueError, "'repeats', which is none of cond"),
        ("cond", ArgumentTypeError, "must be a list of names, and is 'cond'"),
    ],
)
def test_what_cannot_be_drawn_is_refused(own: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        programs(operators=own)


def test_the_reason_is_chained() -> None:
    with pytest.raises(ArgumentValueError) as caught:
        programs(operators=[of_a_dict])
    assert caught.value.__cause__ is not None


def test_weights_are_by_the_names_that_programs_have() -> None:
    none = drawn(own=[repeat], weights={"own_repeat": 0})
    with pytest.raises(NoSuchExample):
        find(none, lambda p: bool(p.operators), settings=some)
    with pytest.raises(ArgumentValueError, match="'repeats', which is none of"):
        drawn(own=[repeat], weights={"repeats": 0})


def test_plain_python_is_what_they_are_compared_with() -> None:
    program = first(lambda p: "own_blend" in p.operations, own=[blend], depth=1)
    values = program.values()
    got = program.function()(*map(hf.asarray, values))
    with hf.debug():
        want = program.function()(*map(hf.asarray, values))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
