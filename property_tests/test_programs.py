"""Random programs mean the same however they are run, and their text is the program."""

import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, cast

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, find, given, settings
from hypothesis import strategies as st
from hypothesis.errors import NoSuchExample
from property_tests.trees import steps_of

import hopflow as hf
from hopflow.agreement import Rounding
from hopflow.autograd import rule_cache
from hopflow.dtypes import as_dtype
from hopflow.errors import HopflowError, ProgramFormatError
from hopflow.testing.checks import Disagreement, check
from hopflow.testing.executions import REGISTRY, ProgramExecution, register_execution
from hopflow.testing.libraries import names_of_jax
from hopflow.testing.orders import ORDERS
from hopflow.testing.plain import Plain
from hopflow.testing.products import PRODUCTS, WAYS
from hopflow.testing.program import Argument, Body, Name, Program, Statement
from hopflow.testing.program_text import LONGEST, from_text, to_text
from hopflow.testing.recorder import record
from hopflow.testing.requires import load
from hopflow.testing.strategies import BODIES, BRANCHES, KINDS, programs
from hopflow.testing.transforms import tape

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("verified")]

EVERY: Final = (*BRANCHES, *BODIES, "custom_vjp", "grow", "chosen", "examples")
Test = Callable[..., None]
CHEAP: Final = [name for name, execution in REGISTRY.items() if execution.cheap]
whole = programs("exact", operators=EVERY, mutation=True)
smooth = programs("smooth", operators=EVERY, mutation=True)
without_writes = programs("exact", depth=2)


def some(share: int) -> Callable[[Test], Test]:
    """A share of the examples that the profile allows."""
    profile: Any = settings.default
    return settings(max_examples=max(profile.max_examples // share, 1))


# --- executions -----------------------------------------------------------------------


@given(st.one_of(whole, smooth))
def test_cheap_executions_of_a_program_agree(program: Program) -> None:
    check(program, CHEAP)


@some(5)
@given(st.one_of(whole, smooth))
def test_all_executions_of_a_program_agree(program: Program) -> None:
    check(program)


@some(8)
@given(without_writes)
def test_programs_without_writes_mean_what_they_do_in_jax(program: Program) -> None:
    check(program, ["jit", "jax"])


@some(8)
@given(programs("exact"))
def test_all_executions_of_the_vmap_of_a_program_agree(program: Program) -> None:
    check(program, ["debug", "eager", "jit", "jit, 2 threads"], ["vmap"])


@some(12)
@given(programs("smooth", size=4))
def test_derivatives_of_a_program_agree(program: Program) -> None:
    check(program, ["eager", "jit", "dynamic"], ["grad", "jvp", "jvp of grad"])


# --- text -----------------------------------------------------------------------------


DRAWING: Final = """
from hypothesis import Phase, given, seed, settings
from hopflow.testing.program_text import to_text
from hopflow.testing.strategies import programs

@seed(1)
@settings(max_examples=20, database=None, deadline=None, phases=[Phase.generate])
@given(programs())
def draw(program):
    print(to_text(program))

draw()
"""


def test_programs_do_not_depend_on_the_modules_that_are_loaded(tmp_path: Path) -> None:
    """Constants of loaded modules are among what Hypothesis draws; see `LEAST`."""
    (tmp_path / "constants.py").write_text(f"CONSTANTS = {[*range(100, 20_000, 40)]}")

    def drawn(code: str) -> str:
        run = [sys.executable, "-c", code]
        return subprocess.run(
            run, check=True, cwd=tmp_path, capture_output=True, text=True
        ).stdout

    assert drawn(DRAWING) == drawn("import constants\n" + DRAWING)


@given(st.one_of(whole, smooth))
def test_a_program_is_its_text(program: Program) -> None:
    text = to_text(program)
    again = from_text(text)
    assert to_text(again) == text
    assert str(again) == str(program)


@some(50)
@given(whole)
def test_a_script_runs_alone(program: Program) -> None:
    run = subprocess.run(
        [sys.executable, "-c", str(program)], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr


STRANGE: Final = (
    *("", "None", "True", "-1", "1.5", "v1", "x0", "hf", "np", "os", "'a'", "[]", "{}"),
    *("__import__('os')", "10**30", "lambda: 0", "(v1 := 2)", "hf.debug", "import os"),
    *("# i64[3]", "\n", "    ", "return", "f'{v1}'", "v1.base", "hf.float64", "..."),
)


@given(whole, st.data())
def test_a_spoilt_text_is_a_program_or_says_that_it_is_none(
    program: Program, data: Any
) -> None:
    words = re.findall(r"\w+|\W", to_text(program))
    words[data.draw(st.integers(0, len(words) - 1))] = data.draw(
        st.sampled_from(STRANGE)
    )
    text = "".join(words)
    try:
        again = from_text(text)
    except ProgramFormatError:
        return
    assert to_text(again) == text
    compile(again.source(), "<program>", "exec")
    assert "import" not in again.source()


@given(st.binary(max_size=200).map(lambda data: data.decode("latin1")))
def test_no_other_text_is_a_program(text: str) -> None:
    with pytest.raises(ProgramFormatError, match="from_text: this is no program"):
        from_text(text)


def nested(what: str, depth: int) -> str:
    """A program whose parts are within each other."""
    statements: tuple[Statement, ...] = ()
    result: Any = None
    for k in range(depth):
        if what == "tuples":
            result = (result,)
        else:
            inner = Body(f"f{k}", (), statements, None)
            statements = (Statement(Name(f"v{k}"), "map", (inner,)),)
    return to_text(Program((), Body("program", (), statements, result)))


@pytest.mark.parametrize("what", ["tuples", "functions"])
def test_a_program_nests_as_deeply_as_python_reads(what: str) -> None:
    compile(from_text(nested(what, 60)).source(), "<program>", "exec")
    with pytest.raises(ProgramFormatError, match="its parts nest too deeply"):
        from_text(nested(what, 90))


def test_a_text_that_nests_too_deeply_is_no_program() -> None:
    with pytest.raises(ProgramFormatError, match="this is no program"):
        from_text("[" * 100_000)


def identity(*values: Any) -> Program:
    names = tuple(Name(f"x{k}") for k in range(len(values)))
    given = tuple(Argument(n.name, x) for n, x in zip(names, values, strict=True))
    return Program(given, Body("program", names, (), names))


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16"])
def test_what_is_not_finite_and_what_is_empty_is_text_too(dtype: str) -> None:
    found = as_dtype(dtype).dtype
    program = identity(
        np.array([np.nan, np.inf, -np.inf, -0.0]).astype(found),
        np.array(np.nan).astype(found),
        np.zeros((0, 3)).astype(found),
    )
    text = to_text(program)
    assert to_text(from_text(text)) == text
    assert check(program, ["debug"]).agreed == ["debug"]
    names: dict[str, Any] = {}
    exec(str(program), names)
    for argument in program.arguments:
        again, value = names[argument.name], argument.value
        assert (again.dtype.name, again.shape) == (dtype, value.shape)
        np.testing.assert_array_equal(
            np.asarray(again, np.float64), value.astype(np.float64)
        )


def one_statement(operation: str, *args: Any) -> Program:
    program = identity(np.zeros(3))
    statement = Statement(Name("v1"), operation, args)
    main = Body("program", (Name("x0"),), (statement,), (Name("v1"),))
    return replace(program, main=main)


X0: Final = Name("x0")


@pytest.mark.parametrize(
    ("target", "fault"),
    [
        ("() = ", "a target is missing"),
        ("[] = ", "a target is missing"),
        ("x0.base = ", "a target is missing"),
        ("", "a rule of nothing"),
        ("v1 = v2 = ", "line 10 is no statement of a program"),
    ],
)
def test_a_result_without_a_name_is_refused(target: str, fault: str) -> None:
    text = to_text(one_statement("abs", X0))
    with pytest.raises(ProgramFormatError, match=fault):
        from_text(text.replace("v1 = ", target))


@pytest.mark.parametrize("number", [float("nan"), float("-inf"), 1.5, 10**4000])
def test_every_number_of_a_text_is_one_in_python(number: float) -> None:
    told: list[Any] = []
    program = from_text(to_text(one_statement("abs", number)))
    program.function(SimpleNamespace(abs=told.append))(0)
    np.testing.assert_equal(told, [number])


@pytest.mark.parametrize(
    ("operation", "args", "text"),
    [
        ("pow", [-2, X0], "hf.pow(-2, x0)"),
        ("pow", [X0, -2], "x0 ** -2"),
        ("subtract", [-2, X0], "-2 - x0"),
        ("divide", [1, 0], "hf.divide(1, 0)"),
    ],
)
def test_what_people_read_is_what_runs(operation: str, args: Any, text: str) -> None:
    program = from_text(to_text(one_statement(operation, *args)))
    assert f"v1 = {text}\n" in program.source(infix=True)
    assert f"v1 = hf.{operation}(" in program.source()


def test_an_index_may_be_empty() -> None:
    program = from_text(to_text(one_statement("get", X0, ())))
    assert check(program, ["debug"]).agreed == ["debug"]


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("# A program of hopflow", "# A programme", "line 1 must be"),
        ("def program(x0)", "def other(x0)", "it has no function `program`"),
        ("(x0)\n", "(x0)  # here\n", "line 10 must be '    v1 = hf.abs(x0)'"),
        ("hf.abs(x0)", "hf.abs(x1)", "a name is not made"),
        ("hf.abs(x0)", "hf.load(x0)", "it has an unknown operation"),
        ("hf.abs(x0)", "hf.abs(x0, out=x0)", "an unknown option"),
        ("hf.abs(x0)", "hf.abs('a')", "a part of a statement is of no known kind"),
        ("return (v1,)", "return (v1,); x0", "a function has no result"),
        ("return (v1,)", "return (v2,)", "a name is not made"),
        ("print(program(x0))\n", "", "line 1"),
    ],
)
def test_a_text_that_is_another_says_where(old: str, new: str, fault: str) -> None:
    text = to_text(one_statement("abs", X0))
    with pytest.raises(ProgramFormatError, match=re.escape(fault)):
        from_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("dtype", "value"),
    [("int8", 1.5), ("int8", True), ("bool", 1), ("bool", 1.5), ("uint8", -1)],
)
def test_values_that_are_not_of_their_dtype_are_refused(dtype: str, value: Any) -> None:
    text = to_text(identity(np.zeros(1))).replace("float64", dtype)
    with pytest.raises(ProgramFormatError, match="this is no program"):
        from_text(text.replace("[0.0]", f"[{value}]"))


def test_a_text_is_read_in_bounded_time() -> None:
    with pytest.raises(ProgramFormatError, match="more than 16777216 characters"):
        from_text(" " * (LONGEST + 1))


# --- shrinking ------------------------------------------------------------------------


@contextmanager
def one_step_too_many() -> Iterator[None]:
    """A fault in plain Python's `while_loop`: to find it is to shrink it."""
    right = Plain.while_loop

    def wrong(self: Plain, test: Any, step: Any, carry: Any, **options: Any) -> Any:
        return step(*right(self, test, step, carry, **options))

    Plain.while_loop = wrong  # type: ignore[method-assign]
    try:
        yield
    finally:
        Plain.while_loop = right  # type: ignore[method-assign]


QUICK: Final = settings(
    max_examples=3000,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


def disagrees(program: Program) -> bool:
    try:
        check(program, ["debug"])
    except Disagreement:
        return True
    return False


def test_a_fault_in_while_loop_shrinks_to_a_few_lines() -> None:
    strategy = programs("exact", dtypes=["int64", "float64"])
    allowed = settings(QUICK, phases=[Phase.generate, Phase.shrink])
    with one_step_too_many():
        found = find(strategy, disagrees, settings=allowed)
    lines = found.source().strip().split("\n")
    assert len(lines) < 10, found.source()


# --- what a disagreement says ---------------------------------------------------------


def test_a_disagreement_comes_with_a_script() -> None:
    strategy = programs("exact", dtypes=["float64"])
    with one_step_too_many():
        found = find(strategy, disagrees, settings=QUICK)
        with pytest.raises(
            Disagreement, match=r"debug: result \d is .* away"
        ) as caught:
            check(found, ["debug"])
    assert "import hopflow as hf" in str(caught.value)
    assert caught.value.program == found


NO_NAMES: Final = (
    {"kind": "rough"},
    {"kind": ["exact"]},
    {"operators": ["unless"]},
    {"operations": ["conjure"]},
    {"weights": {"conjure": 3}},
)
NO_NUMBERS: Final = (
    {"depth": -1},
    {"depth": 2.5},
    {"size": -1},
    {"size": "3"},
    {"weights": {"add": -1}},
    {"weights": {"add": 1.5}},
)
NO_LISTS: Final = ({"operators": "cond"}, {"operators": None}, {"operations": 3})
NOTHING: Final[Sequence[Any]] = (
    {"dtypes": []},
    {"operations": []},
    {"operations": ["add"], "weights": {"add": 0}},
)
NO_PROGRAMS: Final[Sequence[tuple[str, Any]]] = (
    *product(["which is none of"], NO_NAMES),
    *product(["must be a whole number from 0 on"], NO_NUMBERS),
    *product(["must be a list of names"], NO_LISTS),
    *product(["leaves nothing to draw"], NOTHING),
    ('must be without "chosen"', {"operators": ["chosen"], "out_of_range": True}),
    ("`complex64` is not a hopflow dtype", {"dtypes": ["complex64"]}),
)


@pytest.mark.parametrize(("why", "options"), NO_PROGRAMS, ids=str)
def test_options_that_draw_nothing_are_refused(why: str, options: Any) -> None:
    with pytest.raises(HopflowError, match=why):
        programs(**options)


def test_an_operator_of_no_weight_is_not_drawn() -> None:
    found = programs(operators=["cond"], operations=["sum"], weights={"cond": 0})
    plan = settings(QUICK, max_examples=50)
    with pytest.raises(NoSuchExample):
        find(found, lambda p: "cond" in p.operations, settings=plan)


@pytest.mark.parametrize("name", ["vmap of vmap", "vmap of jvp", "grad of vmap"])
def test_transforms_are_done_to_each_other(name: str) -> None:
    steps = [("sin", NONE), ("cond", NONE, [("sum", NONE)], [])]
    program = record(KINDS["smooth"], steps_of(steps), (Argument("x0", np.ones(3)),))
    report = check(program, ["eager", "jit", "jax"], [name, f"jvp of {name}"])
    assert {f"jit of {name}", f"jit of jvp of {name}"}.issubset(report.agreed)


@pytest.mark.parametrize("name", ["jvp", "grad"])
def test_noise_is_in_rules_that_are_met_for_the_first_time(name: str) -> None:
    """They divide by how many elements equal the largest: a decision."""

    def derivative(x: Any) -> Any:
        return hf.jvp(hf.max, (x,), (x,)) if name == "jvp" else hf.grad(hf.max)(x)

    rule_cache._memo.clear()
    decisions: list[list[bytes]] = []
    for _ in range(3):
        tape(derivative, [np.array([1.0, 3.0, 2.0])], rounding := Rounding())
        decisions.append(rounding.decisions)
    assert decisions == [[bytes([0, 1, 0])]] * 3


def test_what_an_execution_lacks_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def lacking(*_: Any) -> Any:
        raise NotImplementedError("a transpose")

    program = identity(np.zeros(3))
    own = ProgramExecution("own", lacking, lacks=(NotImplementedError,))
    monkeypatch.setitem(REGISTRY, "own", own)
    assert list(check(program, ["own"]).refused) == ["own"]
    monkeypatch.setitem(REGISTRY, "own", ProgramExecution("own", lacking))
    with pytest.raises(Disagreement, match="own: NotImplementedError: a transpose"):
        check(program, ["own"])


def test_check_knows_what_it_is_to_compare() -> None:
    program: Any = identity(np.zeros(3))
    with pytest.raises(
        HopflowError, match="check: `executions` has 'nope', which is no"
    ):
        check(program, ["nope"])
    with pytest.raises(HopflowError, match="check: `transforms` has 'vmpa', which is"):
        check(program, ["debug"], ["vmpa"])
    with pytest.raises(HopflowError, match="`executions` must be a list of names"):
        check(program, "debug")
    with pytest.raises(HopflowError, match="check: `program` must be a Program"):
        check(program.main)
    assert check(program, []).agreed == []


def test_the_loop_ir_has_batches_and_derivatives_too() -> None:
    given = [Argument("x0", np.linspace(0.5, 1.5, 3))]
    program = record(KINDS["smooth"], steps_of([("map", NONE, [("sin", NONE)])]), given)
    names, transforms = ["loop ir", "loop ir, gangs and gpu"], ["vmap", "grad"]
    agreed = check(program, names, transforms).agreed
    assert {f"{n} of {t}" for n, t in product(names, transforms)} <= set(agreed)


def test_an_execution_of_ones_own_is_known_by_its_name_alone() -> None:
    execution = ProgramExecution(
        "wrong", lambda make, given: tuple(x + 1 for x in given)
    )
    program = identity(np.zeros(3))
    try:
        assert register_execution(execution) is execution
        with pytest.raises(Disagreement, match="wrong: result 0 is 1 away"):
            check(program, ["debug", "wrong"])
        with pytest.raises(HopflowError, match="an execution called 'wrong' already"):
            register_execution(execution)
    finally:
        REGISTRY.pop("wrong", None)
    with pytest.raises(HopflowError, match="must be a ProgramExecution"):
        register_execution(cast(Any, print))


def test_arguments_are_not_shared_by_runs() -> None:
    program = find(programs("exact"), lambda _: True, settings=QUICK)
    first, second = program.values()[0], program.values()[0]
    assert not np.shares_memory(first, second)


# --- products, and what moves elements ------------------------------------------------

SHAPES: Final = ((6, 3, 2), (2, 3, 2, 2), (3,), (2, 1, 3))


def drawn(name: str, dtype: str, *numbers: int) -> Program:
    """A program of one step, of arguments of several shapes."""
    kind = KINDS["exact"]
    given = [
        Argument(f"x{k}", kind.argument(as_dtype(dtype), shape, k))
        for k, shape in enumerate(SHAPES)
    ]
    return record(kind, steps_of([(name, numbers)]), given)


@pytest.mark.parametrize("dtype", KINDS["exact"].dtypes)
@pytest.mark.parametrize("name", [*PRODUCTS, *ORDERS])
def test_what_is_drawn_of_each_dtype_agrees(name: str, dtype: str) -> None:
    for a, b in product(range(len(SHAPES)), range(12)):
        program = drawn(name, dtype, a, b % 5, b, 7 * a + b)
        assert check(program, ["debug"]).agreed == ["debug"]


@pytest.mark.parametrize("way", range(len(WAYS)))
def test_matrices_are_multiplied_in_every_way(way: int) -> None:
    for a in range(len(SHAPES)):
        program = drawn("matmul", "float64", a, 1, way, 1)
        assert "matmul" in program.operations
        assert check(program, ["jit", "dynamic"]).agreed == ["jit", "dynamic"]


# --- indices out of range -------------------------------------------------------------

READS: Final = {"index": 4, "gather": 4, "take_along": 4, "sum_by": 4, "update": 2}
beyond = programs(
    "exact", mutation=True, out_of_range=True, weights=READS | {"write": 4}
)


def stops(program: Program) -> bool:
    """Whether plain Python finds an index out of range."""
    try:
        program.function(Plain())(*program.values())
    except IndexError:
        return True
    return False


@some(10)
@given(beyond)
def test_an_index_out_of_range_stops_a_program_in_all_cheap_executions(
    program: Program,
) -> None:
    check(program, CHEAP)


@some(15)
@given(programs("exact", out_of_range=True, weights=READS))
def test_an_index_out_of_range_stops_a_batch(program: Program) -> None:
    check(program, ["debug", "eager", "jit"], ["vmap"])


@pytest.mark.parametrize("operation", ["index", "gather", "take_along"])
def test_some_programs_are_stopped_by_an_index(operation: str) -> None:
    small = programs(size=3, depth=1, operations=[operation], out_of_range=True)
    found = find(small, stops, settings=QUICK)
    assert check(found, ["eager", "jit"]).agreed == ["eager", "jit"]


def test_maps_in_batches_have_rows_without_elements_in_jax_too() -> None:
    jnp = load("jax").numpy
    none = names_of_jax().map(lambda x: jnp.zeros(0), jnp.ones(3), batch_size=2)
    assert none.shape == (3, 0)


@pytest.mark.parametrize("lib", [hf, Plain()], ids=["hopflow", "plain"])
def test_a_row_at_an_index_of_no_axes_is_a_view(lib: Any) -> None:
    x = lib.copy(lib.asarray(np.arange(3.0)))
    row = x[lib.remainder(lib.asarray(np.array(4)), 3), ...]
    x[1] = 9.0
    assert float(row) == 9.0


@pytest.mark.parametrize("lib", [hf, Plain()], ids=["hopflow", "plain"])
def test_a_scan_reads_its_rows_as_they_were_at_the_call(lib: Any) -> None:
    x = lib.copy(lib.asarray(np.arange(1.0, 4.0)))

    def step(c: Any, row: Any) -> Any:
        x[1:] = x[:-1]
        return c, row

    _, rows = lib.scan(step, x[0], x)
    np.testing.assert_array_equal(np.asarray(rows), [1.0, 2.0, 3.0])
    np.testing.assert_array_equal(np.asarray(x), [1.0, 1.0, 1.0])


@pytest.mark.parametrize("lib", [hf, Plain()], ids=["hopflow", "plain"])
def test_a_scan_of_no_rows_writes_to_no_carry_of_the_loop_around_it(lib: Any) -> None:
    def step(x: Any) -> Any:
        def inner(c: Any, row: Any) -> Any:
            x[0] = 9.0
            return c, row

        _, rows = lib.scan(inner, x, x[:0])
        return x + lib.sum(rows)

    x = lib.fori_loop(0, 2, lambda _, x: step(x), lib.asarray(np.ones(2)))
    np.testing.assert_array_equal(np.asarray(x), [1.0, 1.0])


NONE: Final = (0, 0, 0, 0)
BFLOAT16: Final = as_dtype("bfloat16").dtype
PROMOTING: Final[dict[str, Any]] = {
    "bf16 with bf16": ([("matmul", NONE)], [np.ones((3, 3), BFLOAT16)]),
    "bf16 with i32": (
        [("matmul", (1, 0, 0, 0))],
        [np.ones((3, 3), BFLOAT16), np.ones((3, 3), np.int32)],
    ),
    "an index": (
        [("fori", NONE, [("add", (1, 0, 0, 0)), ("fori", NONE, [])])],
        [np.array([-5, -2, 1], np.int32)],
    ),
    "u64 with i64": (
        [("sum", NONE), ("subtract", (0, 2, 0, 0))],
        [np.array(5, np.int64), np.array([5, 3], np.uint8)],
    ),
}


@pytest.mark.parametrize("case", PROMOTING)
def test_arithmetic_promotes_as_in_numpy(case: str) -> None:
    steps, values = PROMOTING[case]
    arguments = [Argument(f"x{k}", value) for k, value in enumerate(values)]
    check(record(KINDS["exact"], steps_of(steps), arguments), ["debug", "eager", "jit"])
