"""Exported programs as native code: equal answers through the C function, in C programs
too, and what is refused.
"""

import ctypes
import re
import runpy
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pytest

import hopflow as hf
from hopflow import pytree
from hopflow.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    CheckError,
    ExportError,
    HopflowError,
)
from hopflow.export.native.targets import MACHINES, TARGETS
from hopflow.ops import batching
from hopflow.ops.opdef import OPERATIONS, OpDef
from hopflow.testing.native_code import NativeLibrary, Outcome
from hopflow.testing.onnx_models import difference
from hopflow.testing.requires import requires

pytestmark = [requires("cc")]

_SHARED: Final = runpy.run_path(str(Path(__file__).parent / "test_export_onnx.py"))
CALLS: Final = _SHARED["CALLS"]
cases, function_of = _SHARED["cases"], _SHARED["function_of"]

Array = np.ndarray[Any, Any]
A: Final = hf.asarray([0.5, 1.5], dtype=hf.float64)
ROWS: Final = hf.asarray(np.linspace(0.2, 1.2, 6).reshape(3, 2))


class Call(NamedTuple):
    """A program, and arguments to call it with."""

    program: Any
    args: tuple[Any, ...]


def exported(f: Callable[..., Any], *args: Any, **options: Any) -> Call:
    return Call(hf.export(f, args, **options), args)


def leaves(tree: Any) -> list[Array]:
    return [np.asarray(x) for x in pytree.flatten(tree)[0]]


# --- every operation and operator, in one library -------------------------------------

ULPS: Final = {"erfc": 256, "lgamma": 8192, "sin": 4, "cos": 4, "tan": 4}
"""How many units in the last place results may differ by from NumPy's and SciPy's, which
are less exact; of all others it is 3."""
REFUSED: Final = {
    "cholesky": "potrf",
    "eigh": "syevd",
    "lu": "getrf",
    "qr": "geqrf_orgqr",
    "svd": "gesdd_full",
    "triangular_solve": "trsm",
}
"""Operations that are factorisations, and LAPACK's routine of each."""
NATIVE: Final = [n for n in OPERATIONS if n not in REFUSED and n != "callback"]


def operation(op: OpDef) -> Call:
    """All samples of an operation, in all dtypes."""
    rows = cases(op)
    flat = tuple(x for row in rows for x in row.operands)
    return exported(function_of(op, rows), *map(hf.asarray, flat))


def operation_of_symbolic_sizes(op: OpDef) -> Call:
    row = cases(op)[0]
    operands = tuple(map(hf.asarray, row.operands))
    return exported(function_of(op, [row]), *operands, dynamic_shapes=True)


def programs() -> dict[str, Call]:
    """By the name of the C function."""
    found = {}
    for name in NATIVE:
        found[f"op_{name}"] = operation(OPERATIONS[name])
        found[f"sym_{name}"] = operation_of_symbolic_sizes(OPERATIONS[name])
    for k, call in enumerate(CALLS.values()):
        found[f"call{k}"] = exported(call.function, *call.args)
        found[f"call{k}_sym"] = exported(
            call.function, *call.args, dynamic_shapes=True
        )
    return found | {f.__name__: f() for f in _MORE}


_MORE: Final[list[Callable[[], Call]]] = []


def in_library(f: Callable[[], Call]) -> Callable[[], Call]:
    """Put one more program into the library."""
    _MORE.append(f)
    return f


class Native(NamedTuple):
    calls: dict[str, Call]
    library: NativeLibrary

    def run(self, name: str, *args: Any) -> Outcome:
        return self.library(name, *(args or self.calls[name].args))

    def check(self, name: str, *args: Any) -> list[Array]:
        """See that a call gives the bits of the jitted program; return what it gives."""
        given = args or self.calls[name].args
        outcome = self.run(name, *given)
        assert outcome.status == 0, outcome.text
        expected = leaves(hf.jit(self.calls[name].program)(*given))
        for x, y in zip(outcome.results, expected, strict=True):
            assert x.dtype == y.dtype
            assert x.shape == y.shape
            assert x.tobytes() == y.tobytes(), (x, y)
        return outcome.results


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory) -> Native:
    calls = programs()
    folder = tmp_path_factory.mktemp("native")
    library = NativeLibrary({n: call.program for n, call in calls.items()}, folder)
    return Native(calls, library)


@pytest.mark.slow
@pytest.mark.parametrize("name", NATIVE)
def test_an_operation_gives_equal_answers(name: str, native: Native) -> None:
    op = OPERATIONS[name]
    outcome = native.run(f"op_{name}")
    assert outcome.status == 0, outcome.text
    results, is_pointwise = iter(outcome.results), op.batch is batching.pointwise
    for row in cases(op):
        with np.errstate(all="ignore"):
            expected = op.run(*row.operands, **row.params)
        for y in expected if isinstance(expected, tuple) else (expected,):
            found = difference(next(results), np.asarray(y), of_largest=not is_pointwise)
            assert found <= ULPS.get(name, 3)
    assert next(results, None) is None


@pytest.mark.slow
@pytest.mark.parametrize("name", NATIVE)
def test_an_operation_has_the_same_bits_for_symbolic_sizes(
    name: str, native: Native
) -> None:
    row = cases(OPERATIONS[name])[0]
    outcome = native.run(f"sym_{name}")
    assert outcome.status == 0, outcome.text
    fixed = native.run(f"op_{name}", *native.calls[f"op_{name}"].args)
    for x, y in zip(outcome.results, fixed.results, strict=False):
        assert difference(x, y, of_largest=True) <= 2, row


@pytest.mark.slow
@pytest.mark.parametrize("suffix", ["", "_sym"])
@pytest.mark.parametrize("k", range(len(CALLS)), ids=list(CALLS))
def test_an_operator_has_the_bits_of_the_jitted_program(
    k: int, suffix: str, native: Native
) -> None:
    native.check(f"call{k}{suffix}")


@pytest.mark.parametrize("name", REFUSED)
def test_a_factorisation_is_refused_with_the_operation_and_the_line(
    name: str, tmp_path: Path
) -> None:
    program = operation(OPERATIONS[name]).program
    with pytest.raises(ExportError, match=rf"`{name}` \(.*:\d+\) calls LAPACK's `"):
        program.to_native(tmp_path)


# --- arguments, results, state --------------------------------------------------------


@in_library
def tree() -> Call:
    def f(p: Any, n: int, flag: bool, scale: float) -> Any:
        return {"a": p["w"][0] * scale, "b": (p["w"][1] + n, n + 1, flag)}

    return exported(f, {"w": [A, A * 2]}, 3, True, 2.5)


def test_arguments_are_parameters_and_results_are_too(native: Native) -> None:
    native.check("tree")
    native.check("tree", {"w": [A, A * 3]}, -7, True, 0.1)
    text = native.library.compiled["tree"].header
    declared = [" ".join(x.split("/*")[0].split()) for x in declaration(text, "tree")]
    assert declared == [
        "const double *p_w_0,",
        "const double *p_w_1,",
        "int64_t n,",
        "double scale,",
        "double *result_a,",
        "double *result_b_0,",
        "int64_t *result_b_1,",
        "bool *result_b_2,",
        "void *workspace,",
        "int64_t workspace_bytes,",
        "int64_t *details);",
    ]


def declaration(text: str, name: str) -> list[str]:
    """The lines of the parameters of a function."""
    return text.split(f"int {name}(\n")[1].split("\n\n")[0].split("\n")


@in_library
def counting() -> Call:
    counts = hf.zeros((2,), dtype=hf.int64)

    def f(x: Any) -> Any:
        nonlocal counts
        counts += 1
        x *= 2.0
        hf.check(hf.all(x < 100), "too large")
        return x + counts, x

    return exported(f, hf.asarray([1.0, 2.0], dtype=hf.float64))


def test_what_a_call_writes_is_written_when_nothing_has_failed(native: Native) -> None:
    outcome = native.run("counting", np.array([1.0, 2.0]))
    assert [x.tolist() for x in outcome.results] == [[3.0, 5.0], [2.0, 4.0], [1, 1]]
    assert "counting_counts_initial" in native.library.compiled["counting"].header
    failed = native.run("counting", np.array([1.0, 60.0]))
    assert re.match(r"CheckError: too large \(test_export_native.py:\d+\)", failed.text)


@in_library
def without_axes() -> Call:
    return exported(lambda x, n: (x * n, hf.arange(3) + n), hf.asarray(2.0), 4)


@in_library
def halves() -> Call:
    def f(x: Any, y: Any) -> Any:
        half = x.shape[0] // 2
        return x[:half] * (x.shape[0] % 3), hf.concat([x, y[:, 0]]), hf.sum(y, axis=0)

    n, m = hf.Dim("n", min=1, max=1 << 20), hf.Dim("m")
    y = hf.ones((3, 2), dtype=hf.float64)
    return exported(f, A, y, dynamic_shapes=[{0: n}, {0: m}])


@in_library
def positive() -> Call:
    """Results whose sizes only a run knows."""
    return exported(
        lambda x: (x[x > 0.4], hf.nonzero(x), hf.sum(x)), ROWS, dynamic_shapes=True
    )


@in_library
def steps() -> Call:
    def f(x: Any, rows: Any, n: int) -> Any:
        y = hf.fori_loop(0, n, lambda i, y: y * 0.5 + i, x)
        last, sums = hf.scan(lambda c, r: (c + r, hf.sum(c * r)), x, rows)
        return y, last, sums, hf.map(lambda r: r * x, rows)

    return exported(f, A, ROWS, 3, dynamic_shapes=[None, {0: True}, None])


@in_library
def slope() -> Call:
    """Reverse mode of a loop whose steps the data tell: a stack that grows."""

    def loss(x: Any) -> Any:
        def step(x: Any, n: Any) -> Any:
            return hf.sin(x) * 1.01 + 0.3 * x, n + 1

        return hf.sum(
            hf.while_loop(lambda x, n: hf.sum(x) + n < 900, step, (x, 0))[0]
        )

    return exported(hf.value_and_grad(loss), hf.asarray(np.linspace(0, 1, 200)))


@pytest.mark.parametrize("name", ["without_axes", "steps", "positive", "slope"])
def test_bits_are_those_of_the_jitted_program(name: str, native: Native) -> None:
    native.check(name)


@pytest.mark.parametrize("n", [1, 2, 7, 1000])
@pytest.mark.parametrize("m", [0, 1, 5])
def test_sizes_are_told_before_the_call(n: int, m: int, native: Native) -> None:
    y = hf.asarray(np.arange(2.0 * m).reshape(m, 2))
    native.check("halves", hf.asarray(np.arange(float(n))), y)


@pytest.mark.parametrize("rows", [0, 1, 40])
def test_empty_arrays_and_loops_of_no_steps(rows: int, native: Native) -> None:
    given = hf.asarray(np.sin(np.arange(2.0 * rows)).reshape(rows, 2))
    native.check("steps", A, given, rows)
    native.check("positive", given)


def test_a_size_that_breaks_a_constraint_has_a_status(native: Native) -> None:
    x, y = np.zeros(0), np.ones((3, 2))
    outcome = native.run("halves", x, y)
    assert outcome.status > 0
    assert outcome.text == "GuardError: x.shape[0] >= 1  (declared)"


# --- errors ---------------------------------------------------------------------------


@in_library
def stops() -> Call:
    def f(x: Any, i: Any, n: int) -> Any:
        hf.check(hf.all(x < 40), "too large")
        y = hf.while_loop(lambda y: hf.sum(y) < n, lambda y: (y * 2,), (x,), max_steps=9)
        return y[0][i] + i // n

    return exported(f, A, hf.asarray(1), 3)


STOPS: Final[dict[str, tuple[tuple[Any, ...], str]]] = {
    "check": ((A * 40, hf.asarray(1), 3), "failed_check"),
    "index": ((A, hf.asarray(-3), 3), "bad_index"),
    "division": ((A, hf.asarray(0), 0), "division_by_zero"),
    "steps": ((A, hf.asarray(0), 10**6), "too_many_steps"),
}


@pytest.mark.parametrize("name", STOPS)
def test_the_text_of_a_status_is_that_of_the_error(name: str, native: Native) -> None:
    args, kind = STOPS[name]
    outcome = native.run("stops", *args)
    text = outcome.text
    for k in range(2):
        text = text.replace(f"{{{k}}}", str(outcome.details[k]))
    with pytest.raises(HopflowError) as found:
        hf.jit(native.calls["stops"].program)(*args)
    assert text == f"{type(found.value).__name__}: {found.value}"
    member = f"STOPS_{kind.upper()}_{outcome.status} = {outcome.status}"
    assert member in native.library.compiled["stops"].header
