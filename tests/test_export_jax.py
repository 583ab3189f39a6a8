"""Exported programs as functions of JAX, and as StableHLO: equal answers and equal
derivatives, and what is refused."""

import importlib
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import numpy as np
import pytest
from tests.targets import jax as column
from tests.targets.calls import (
    CALLS,
    ROWS,
    A,
    Case,
    W,
    case,
    exported,
    f64,
    function_of,
    grown,
    last_and_sums,
    scaled,
    shared,
    special_operands,
    squashed,
)

import hopflow as hf
from hopflow import dtypes, pytree
from hopflow.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    DerivativeError,
    DTypeError,
    ExportError,
    GuardError,
    ShapeError,
    StructureError,
)
from hopflow.export.jax.library import library
from hopflow.ops import batching
from hopflow.ops.opdef import OPERATIONS, OpDef
from hopflow.testing.requires import load, requires
from hopflow.testing.units import difference

pytestmark = requires("jax>=0.11")

EXAMPLES: Final = Path(__file__).parent.parent / "examples"


@pytest.fixture(autouse=True)
def wide() -> Iterator[None]:
    """JAX makes arrays of 64 bits."""
    with load("jax").enable_x64(True):
        yield


def jax() -> Any:
    return load("jax")


def arrays(tree: Any) -> list[Any]:
    return [np.asarray(x) for x in pytree.flatten(tree)[0]]


def as_numpy(args: Any) -> Any:
    """Arguments for JAX: arrays of NumPy, and numbers."""
    return pytree.tree_map(lambda x: x if isinstance(x, int) else np.asarray(x), args)


def check_equal(found: Any, expected: Any, ulps: float = 64) -> None:
    pairs = list(zip(arrays(found), arrays(expected), strict=True))
    for x, y in pairs:
        assert difference(x, y, of_largest=True) <= ulps, (x, y)


def check(program: Any, *args: Any, ulps: float = 64, **options: Any) -> Any:
    """Run a program and its function of JAX, compare their answers, and return the
    function."""
    fn = program.to_jax()
    found = jax().jit(fn, **options)(*as_numpy(args))
    check_equal(found, program(*args), ulps)
    return fn


# --- every operation ------------------------------------------------------------------

ULPS: Final = {
    "cosh": 16,
    "exp2": 32,
    "lgamma": 128,
    "log10": 16,
    "pow": 1 << 15,  # the error of the logarithm, times the exponent
    "sinh": 16,
}
"""How many units in the last place JAX may differ by; of all others it is 8. Where
elements are computed from many others, these are units of the largest element."""

RUN: Final = [name for name in OPERATIONS if name != "callback"]


def rows_of(op: OpDef) -> list[Case]:
    """The samples of an operation, one of them in all dtypes; of an elementwise one
    special values in all dtypes."""
    if op.batch is batching.pointwise:
        first, *samples = op.samples
        found = [
            Case(special_operands(op, first.operands, dtype), first.params)
            for dtype in first.dtypes
        ]
    else:
        widest = max(op.samples, key=lambda s: len(s.dtypes))
        samples = [s for s in op.samples if s is not widest]
        found = [case(op, widest, dtype) for dtype in widest.dtypes]
    return [*found, *(case(op, s, s.dtypes[-1]) for s in samples)]


@pytest.mark.parametrize("name", RUN)
def test_an_operation_gives_equal_answers_in_jax(name: str) -> None:
    op = OPERATIONS[name]
    rows = rows_of(op)
    flat = [x for row in rows for x in row.operands]
    program = exported(
        function_of(op, rows), *map(hf.asarray, flat), dynamic_shapes=True
    )
    found = iter(jax().jit(program.to_jax())(*flat))
    is_elementwise = op.batch is batching.pointwise
    for row in rows:
        with np.errstate(all="ignore"):
            expected = op.run(*row.operands, **row.params)
        for y in expected if isinstance(expected, tuple) else (expected,):
            x, y = np.asarray(next(found)), np.asarray(y)
            if row.params.get("vectors"):  # whose signs are LAPACK's choice
                x, y = np.abs(x), np.abs(y)
            units = difference(x, y, of_largest=not is_elementwise, flushed=True)
            assert units <= ULPS.get(name, 8), (row, x, y)
    assert next(found, None) is None


DIFFERENTIABLE: Final = [
    name
    for name in RUN
    if OPERATIONS[name].jvp is not None
    and any(d.is_float for s in OPERATIONS[name].samples for d in s.dtypes)
]


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_an_operation_has_equal_derivatives_in_jax(name: str) -> None:
    op = OPERATIONS[name]
    [sample, *_] = [
        s
        for s in op.samples
        if s.dtypes[-1].is_float and s.params.get("mode") != "full"
    ]
    row = case(op, sample, dtypes.float64)
    if name == "cholesky":
        row.operands[0] = np.eye(3) * 3 + row.operands[0] @ row.operands[0].T
    if name == "eigh":  # of which JAX has the derivative in both halves
        row.operands[0] = row.operands[0] + row.operands[0].T
    operands = list(map(hf.asarray, row.operands))
    program = exported(function_of(op, [row]), *operands)
    floats = [x for x in row.operands if x.dtype.kind == "f"]

    def pushed(library: Any, f: Any) -> Any:
        def run(*own: Any) -> Any:
            rest = iter(own)
            args = [next(rest) if x.dtype.kind == "f" else x for x in row.operands]
            return [x for x in f(*args) if x.dtype in (np.float64, hf.float64)]

        primals = tuple(map(library.asarray, floats))
        dots = tuple(library.asarray(np.cos(x) / 2) for x in floats)
        return library.jvp(run, primals, dots)

    def jvp(run: Any, primals: Any, dots: Any) -> Any:
        return jax().jit(lambda *both: jax().jvp(run, *both))(primals, dots)

    names = SimpleNamespace(asarray=jax().numpy.asarray, jvp=jvp)
    found, expected = pushed(names, program.to_jax()), pushed(hf, program)
    check_equal(found, expected, 1 << 12)


def test_what_is_refused_says_so() -> None:
    assert column.operation("callback").startswith("*refused: it calls Python")


# --- every operator -------------------------------------------------------------------

UNBOUNDED: Final = ("while_loop", "a user's own")
"""Those of which JAX has no reverse mode."""
CALLED: Final = [name for name in CALLS if name not in column.REFUSED]


@pytest.mark.parametrize("name", CALLED)
def test_an_operator_gives_equal_answers_and_gradients_in_jax(name: str) -> None:
    call = CALLS[name]
    program = exported(call.function, *call.args, derivatives=1)
    assert column.KINDS[name] in column.traced(program, *call.args)
    numbers = [i for i, x in enumerate(call.args) if isinstance(x, int)]
    fn = check(program, *call.args, static_argnums=numbers)
    if name in UNBOUNDED or name.startswith("derivatives"):
        return
    tensors = tuple(i for i in range(len(call.args)) if i not in numbers)

    def total(m: Any, f: Any) -> Any:
        def run(*args: Any) -> Any:
            floats = [x for x in pytree.flatten(f(*args))[0] if "f" in str(x.dtype)]
            return sum(m.sum(m.sin(x)) for x in floats)

        return run

    slope = jax().grad(total(jax().numpy, fn), argnums=tensors)
    found = jax().jit(slope, static_argnums=numbers)(*as_numpy(call.args))
    check_equal(found, hf.grad(total(hf, program), argnums=tensors)(*call.args))


@pytest.mark.parametrize("name", CALLED)
def test_an_operator_is_stablehlo_of_symbolic_sizes(name: str) -> None:
    call = CALLS[name]
    program = exported(call.function, *call.args, dynamic_shapes=True)
    read = jax().export.deserialize(bytearray(program.to_stablehlo()))
    check_equal(read.call(*map(np.asarray, call.args)), program(*call.args))


def test_a_loop_without_a_limit_has_no_reverse_mode_and_one_with_it_has() -> None:
    fn = exported(grown, A).to_jax()
    assert jax().jvp(lambda x: fn(x)[0], (np.ones(2),), (np.ones(2),))[1].shape == (2,)
    with pytest.raises(ValueError, match="Reverse-mode differentiation does not work"):
        jax().grad(lambda x: fn(x)[0].sum())(np.ones(2))


def test_a_loop_of_a_known_number_of_steps_is_a_scan() -> None:
    call = CALLS["fori_loop"]
    fn = exported(call.function, *call.args).to_jax()
    jaxpr = jax().make_jaxpr(lambda x: fn(x, 3))(np.ones(2))
    assert "scan" in column.primitives(jaxpr.jaxpr)
    jaxpr = jax().make_jaxpr(fn)(np.ones(2), 3)
    assert "while" in column.primitives(jaxpr.jaxpr)


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_loops_of_no_steps_give_empty_stacks(rows: int) -> None:
    n = hf.Dim("n")
    program = exported(
        lambda x, xs: (
            last_and_sums(x, xs),
            hf.map(lambda r: r * x, xs),
            hf.associative_scan(hf.multiply, xs),
            hf.fori_loop(0, xs.shape[0], lambda i, x: x * 2 + i, x),
        ),
        *(A, ROWS),
        dynamic_shapes=[None, {0: n}],
    )
    check(program, A, ROWS[:rows])


def test_functions_of_many_examples() -> None:
    program = exported(lambda x: grown(x)[0] + last_and_sums(x, ROWS)[0], A)
    xs = np.asarray(ROWS)
    check_equal(jax().vmap(program.to_jax())(xs), hf.vmap(program)(ROWS))
    batched = exported(hf.vmap(lambda x: scaled(squashed(x), x)), ROWS, derivatives=1)
    fn = check(batched, ROWS)
    found = jax().grad(lambda x: fn(x).sum())(xs)
    check_equal(found, hf.grad(lambda x: hf.sum(batched(x)))(ROWS))


# --- derivatives of one's own ---------------------------------------------------------


@hf.custom_jvp
def doubled(x: Any) -> Any:
    return hf.sin(x)


@doubled.defjvp
def _(primals: Any, tangents: Any) -> Any:
    [x], [dx] = primals, tangents
    return doubled(x), 2 * dx * doubled(x)


@hf.custom_vjp
def clipped(x: Any, n: Any) -> Any:
    return x * n, n


clipped.defvjp(
    lambda x, n: (clipped(x, n), (x, n)),
    lambda kept, cts: (hf.clip(cts[0], -1, 1) * kept[0], None),
)


def test_rules_of_ones_own_are_those_of_jax() -> None:
    program = exported(lambda x: hf.sum(doubled(x)), A, derivatives=2)
    fn, x = program.to_jax(), np.asarray(A)
    check_equal(jax().grad(fn)(x), 2 * np.sin(x))
    check_equal(jax().jacfwd(jax().grad(fn))(x), hf.hessian(program)(A))
    program = exported(lambda x: clipped(x, 3)[0] * 5, A, derivatives=1)
    fn = program.to_jax()
    check_equal(jax().grad(lambda x: fn(x).sum())(x), x)
    with pytest.raises(TypeError, match="forward-mode"):
        jax().jvp(fn, (x,), (x,))


def test_a_derivative_that_was_not_kept_is_an_error() -> None:
    fn = exported(lambda x: hf.sum(doubled(x)), A).to_jax()
    assert fn(np.asarray(A)).shape == ()
    with pytest.raises(DerivativeError, match="larger `derivatives`"):
        jax().grad(fn)(np.asarray(A))


@pytest.mark.parametrize("rule", ["jvp", "vjp"])
def test_what_a_rule_does_not_take_must_not_be_differentiated(rule: str) -> None:
    def f(x: Any, y: Any) -> Any:
        made = getattr(hf, f"custom_{rule}")(lambda x: x * y)
        if rule == "jvp":
            made.defjvp(lambda primals, tangents: (made(*primals), tangents[0]))
        else:
            made.defvjp(lambda x: (made(x), None), lambda _, ct: (ct,))
        return hf.sum(made(x))

    fn = exported(f, A, W, derivatives=1).to_jax()
    assert jax().grad(fn)(np.ones(2), np.ones(2)).tolist() == [1.0, 1.0]
    with pytest.raises(DerivativeError, match="Make it an argument"):
        jax().grad(fn, argnums=1)(np.ones(2), np.ones(2))


def test_linear_systems_have_the_derivatives_of_solutions() -> None:
    x = hf.asarray(np.random.default_rng(0).normal(size=(2, 4, 4)))

    def f(x: Any) -> Any:
        right = hf.sin(x[..., :2])
        both = hf.linalg.solve(x, right), hf.linalg.inv(x), hf.linalg.det(x)
        return sum(hf.sum(hf.sin(v)) for v in both)

    program = exported(f, x)
    fn = check(program, x, ulps=1 << 12)
    slope = jax().grad(fn)
    found = jax().jit(lambda x: (slope(x), jax().jacfwd(slope)(x)))(np.asarray(x))
    check_equal(found[0], hf.grad(program)(x), 1 << 16)
    check_equal(found[1], hf.jacfwd(hf.grad(program))(x), 1 << 24)


# --- arguments, results and state -----------------------------------------------------


class Point(NamedTuple):
    x: Any
    y: Any


def test_containers_constants_and_numbers() -> None:
    def f(p: Any, n: int, kind: str, *, scale: float) -> Any:
        x = p["w"][0] * scale if kind == "scaled" else p["w"][0]
        return Point(x + n, [p["w"][1].x, None, n + 1])

    program = hf.export(f, ({"w": [A, Point(W, 1.0)]}, 3, "scaled"), {"scale": 2.0})
    fn, p = program.to_jax(), {"w": [np.asarray(A), Point(np.asarray(W), 1.0)]}
    found = fn(p, 4, "scaled", scale=0.5)
    assert type(found) is Point
    assert found.x.tolist() == [4.25, 4.75]
    assert found.y[1] is None
    assert found.y[2] == 5
    jitted = jax().jit(fn, static_argnums=2)
    check_equal(jitted(p, 4, "scaled", scale=0.5), found)
    with pytest.raises(ArgumentValueError, match="was 'scaled' in the trace"):
        fn(p, 4, "other", scale=0.5)
    flagged = exported(lambda x, up: x + 1 if up else x, A, True)
    with pytest.raises(ArgumentValueError, match="static_argnums"):
        jax().jit(flagged.to_jax())(np.ones(2), True)
    with pytest.raises(ArgumentValueError, match="`n` is an integer"):
        fn(p, 4.0, "scaled", scale=0.5)
    with pytest.raises(StructureError, match="missing"):
        fn(p, 4)
    with pytest.raises(StructureError, match="another structure"):
        fn([p], 4, "scaled", scale=0.5)


def test_arguments_of_other_types_are_refused() -> None:
    n = hf.Dim("n", min=2, max=4)
    fn = exported(lambda x, y: x * y, A, A, dynamic_shapes=[{0: n}, {0: n}]).to_jax()
    assert fn(np.ones(4), np.ones(4)).shape == (4,)
    with pytest.raises(DTypeError, match=r"`x` is f64\[n\] in the program, and f32"):
        fn(np.ones(3, np.float32), np.ones(3))
    with pytest.raises(ShapeError, match=r"`y` is f64\[n\] .* and f64\[2, 2\] here"):
        fn(np.ones(2), np.ones((2, 2)))
    with pytest.raises(ShapeError, match=r"`y` is f64\[n\] .* and f64\[3\] here"):
        fn(np.ones(2), np.ones(3))
    with pytest.raises(GuardError, match=r"x.shape\[0\] <= 4"):
        fn(np.ones(5), np.ones(5))


def test_sizes_of_numbers_are_known_where_the_numbers_are() -> None:
    program = exported(lambda x, n: (x[:n], hf.arange(n)), A, 1)
    fn = program.to_jax()
    check_equal(fn(np.ones(2), 2), program(hf.ones((2,), dtype=hf.float64), 2))
    jitted = jax().jit(fn, static_argnums=1)
    assert jitted(np.ones(2), 1)[1].shape == (1,)
    with pytest.raises(ExportError, match=r"export_jax.py:\d+\).*static_argnums"):
        jax().jit(fn)(np.ones(2), 1)


def test_arithmetic_of_numbers_that_jax_traces() -> None:
    def f(x: Any, n: int, s: float) -> Any:
        pairs = n // 3, n % 4, (n + 1) // 2, n * n - 1
        floats = s / 2, s**2, s // 0.5, s % 0.3, -s, abs(s), n / 7
        return [x * k for k in (*pairs, *floats)]

    program = exported(f, A, 3, 1.5)
    for n, s in ((3, 1.5), (-5, -2.25), (0, 0.5)):
        check_equal(jax().jit(program.to_jax())(np.asarray(A), n, s), program(A, n, s))


def test_parameters_may_be_arguments() -> None:
    model = hf.nn.Linear.init(hf.random.key(0), 2, 3)
    program = hf.export(model, (hf.ones((1, 2)),), dynamic_shapes=[{0: True}])
    fn, x = program.to_jax(), np.ones((4, 2), np.float32)
    assert list(fn.parameters) == ["weight", "bias"]
    assert fn.buffers == {}
    loss = jax().jit(lambda fn, x: (fn(x) ** 2).sum())
    by_tree = jax().grad(loss)(fn, x)
    by_name = jax().grad(lambda p: loss(fn.with_state(p), x))(fn.parameters)
    expected = hf.grad(lambda p: hf.sum(p(hf.asarray(x)) ** 2))(program)
    for name in fn.parameters:
        check_equal(by_tree.state[name], expected.state[name])
        check_equal(by_name[name], expected.state[name])
    shapes = jax().tree.map(lambda x: x.shape, fn)
    assert shapes.state == {"weight": (2, 3), "bias": (3,)} or shapes.state == {
        "weight": (3, 2),
        "bias": (3,),
    }
    with pytest.raises(StructureError, match="no `other` in the state"):
        fn.with_state({"other": x})
    assert repr(fn).startswith("<JaxFunction ")


def test_what_a_call_writes_is_returned() -> None:
    counts = hf.zeros((2,), dtype=hf.int64)

    def f(x: Any) -> Any:
        nonlocal counts
        counts += 1
        x *= 2.0
        return x + counts

    fn = exported(f, f64(1.0, 2.0)).to_jax()
    result, written = jax().jit(lambda fn, x: fn(x))(fn, np.array([1.0, 2.0]))
    assert result.tolist() == [3.0, 5.0]
    assert written["x"].tolist() == [2.0, 4.0]
    again = fn.with_state({"counts": written["counts"]})
    assert again(np.array([1.0, 2.0]))[0].tolist() == [4.0, 6.0]
    assert list(fn.buffers) == ["counts"]


def test_bfloat16_and_float16_round_as_they_do_here() -> None:
    for dtype in (hf.bfloat16, hf.float16):
        x = hf.astype(hf.asarray(np.linspace(-2, 2, 9)), dtype)
        check(exported(lambda x: hf.tanh(x) + hf.exp(x), x), x, ulps=2)


def test_random_numbers_are_the_same() -> None:
    def f(seed: int) -> Any:
        first, second = hf.random.split(hf.random.key(seed))
        return (
            hf.random.normal(first, (3, 4)),
            hf.random.permutation(second, 9),
            hf.random.randint(first, (5,), 0, 1000),
        )

    check(exported(f, 3), 2**40)


def test_programs_of_files_and_decomposed_ones(tmp_path: Path) -> None:
    program = exported(last_and_sums, A, ROWS, dynamic_shapes=[None, {0: True}])
    program.save(tmp_path / "program.hopflow")
    check(hf.load(tmp_path / "program.hopflow"), A, ROWS)
    check(exported(shared, A).decompose(), A)


# --- checks ---------------------------------------------------------------------------


def checked(x: Any, i: Any) -> Any:
    def step(n: Any, x: Any) -> Any:
        hf.check(hf.all(x < 40), "too {large}")
        return n + 1, x * 2

    _, x = hf.while_loop(lambda n, x: n < 3, step, (0, x), max_steps=3)
    return x[i] + 6 // i


def test_checks_are_those_of_checkify() -> None:
    program = exported(checked, A, hf.asarray(1))
    checkify = jax().experimental.checkify
    fn = jax().jit(checkify.checkify(program.to_jax(asserts="checkify")))
    messages = {
        (1.0, 1): None,
        (1.0, -1): None,
        (20.0, 1): "too {large}",
        (1.0, 2): "an index is out of range",
        (1.0, 0): "an integer is divided by 0",
    }
    for (scale, i), message in messages.items():
        error, found = fn(np.asarray(A) * scale, np.asarray(i))
        text = error.get()
        assert (text is None) is (message is None), text
        if message is None:
            check_equal(found, program(A * scale, hf.asarray(i)))
        else:
            assert message in text
            assert "test_export_jax.py:" in text
    assert np.isfinite(program.to_jax()(np.asarray(A), np.asarray(2)))


def test_limits_and_constraints_are_checks() -> None:
    program = exported(
        lambda x, n: hf.while_loop(
            lambda x: hf.sum(x) < (100 if n > 2 else 10),
            lambda x: (x * 2,),
            (x,),
            max_steps=4,
        ),
        *(A, 3),
    )
    fn = program.to_jax(asserts="checkify")
    run = jax().jit(jax().experimental.checkify.checkify(fn))
    assert run(np.asarray(A) * 10, 3)[0].get() is None
    assert "n >= 3" in run(np.asarray(A) * 10, 2)[0].get()
    assert "`max_steps` = 4" in run(np.asarray(A), 3)[0].get()
    with pytest.raises(GuardError, match="n >= 3"):
        fn(np.asarray(A), 2)


# --- StableHLO ------------------------------------------------------------------------


def test_an_artifact_runs_in_another_process(tmp_path: Path) -> None:
    rows = hf.Dim("rows", min=2)
    weights = hf.asarray([0.5, -0.25])

    def f(x: Any, target: float, kind: str) -> Any:
        grown = hf.while_loop(
            lambda x: hf.sum(x) < target, lambda x: (x * 2 + 1,), (x,)
        )[0]
        return {"grown": grown, "product": grown @ weights}

    x = hf.ones((3, 2))
    program = hf.export(f, (x, 10.0, "plain"), dynamic_shapes=[{0: rows}, None, None])
    path = tmp_path / "program.stablehlo"
    artifact = program.to_stablehlo(path, platforms=["cpu", "cuda", "tpu"])
    assert path.read_bytes() == artifact
    code = f"""
import sys
import jax, jax.export, numpy as np
exported = jax.export.deserialize(bytearray(open({str(path)!r}, "rb").read()))
print(exported.in_avals[0], exported.platforms)
with jax.enable_x64(True):
    found = exported.call(np.ones((4, 2), np.float32), 20.0, None)
print(found["grown"].shape, found["product"].tolist())
try:
    exported.call(np.ones((1, 2), np.float32), np.float64(20.0), None)
except Exception as error:
    print(type(error).__name__)
print("hopflow" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    expected = program(hf.ones((4, 2)), 20.0, "plain")["product"].tolist()
    assert done.stdout.splitlines() == [
        "float32[rows,2] ('cpu', 'cuda', 'tpu')",
        f"(4, 2) {expected}",
        "ValueError",
        "False",
    ]


def test_constraints_of_sizes_are_those_of_the_artifact() -> None:
    n = hf.Dim("n", min=2, max=9)

    def f(x: Any, y: Any) -> Any:
        return x[2:] + y[: x.shape[0] - 2], x.reshape(2, -1)

    program = exported(
        f, hf.ones((4,)), hf.ones((4,)), dynamic_shapes=[{0: 2 * n}, True]
    )
    read = jax().export.deserialize(bytearray(program.to_stablehlo()))
    ones = np.ones(8, np.float32)
    check_equal(read.call(ones, ones), program(hf.ones((8,)), hf.ones((8,))))
    for sizes in ((7, 8), (20, 30), (8, 5)):
        with pytest.raises(ValueError, match=r"Input shapes|Error refining"):
            read.call(*(np.ones(k, np.float32) for k in sizes))


def test_an_artifact_may_hold_derivatives() -> None:
    program = exported(lambda x: last_and_sums(x, ROWS)[1], A)
    read = jax().export.deserialize(bytearray(program.to_stablehlo(derivatives=1)))
    found = jax().grad(lambda x: read.call(x).sum())(np.asarray(A))
    check_equal(found, hf.grad(lambda x: hf.sum(program(x)))(A))


def test_the_reference_interpreter_of_stablehlo_gives_equal_answers() -> None:
    ir = importlib.import_module("jaxlib.mlir.ir")
    stablehlo = importlib.import_module("jaxlib.mlir.dialects.stablehlo")
    program = exported(lambda x, rows: (*grown(x), *last_and_sums(x, rows)), A, ROWS)
    read = jax().export.deserialize(bytearray(program.to_stablehlo()))
    with ir.Context() as context:
        module = stablehlo.deserialize_portable_artifact(
            context, read.mlir_module_serialized
        )
        operands = [
            ir.DenseElementsAttr.get(np.asarray(x, order="C")) for x in (A, ROWS)
        ]
        found = [np.array(x) for x in stablehlo.eval_module(module, operands)]
    check_equal(found, program(A, ROWS))


# --- many devices ---------------------------------------------------------------------


def test_the_page_on_many_devices_prints_what_it_says(tmp_path: Path) -> None:
    page = (EXAMPLES.parent / "docs" / "scaling.md").read_text()
    [code] = re.findall(r"^```py\n(.*?)^```$", page, re.M | re.S)
    artifact = """
exported = jax.export.deserialize(bytearray(program.to_stablehlo()))
answers, steps = jax.jit(
    jax.shard_map(
        exported.call, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data"),
        check_vma=False,
    )
)(weights, rows)
print(np.array_equal(steps, fn(weights, rows)[1]))  # True
"""
    (tmp_path / "page.py").write_text(code + artifact)
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, tmp_path / "page.py"],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    said = re.findall(r"^print\(.*\)  # (.*)$", code + artifact, re.M)
    assert done.stdout.splitlines() == said, done.stderr


# --- errors ---------------------------------------------------------------------------


def test_sizes_that_only_a_run_knows_are_refused() -> None:
    program = exported(lambda x: hf.sum(x[x > 0.4]), A)
    with pytest.raises(ExportError, match=r"\(test_export_jax.py:\d+\).*hf.where"):
        program.to_jax()


def test_loops_that_change_sizes_are_refused() -> None:
    def f(x: Any) -> Any:
        return hf.while_loop(
            lambda x: hf.sum(x) < 9,
            lambda x: (hf.concat([x, x]),),
            (x,),
            dynamic_carry=[{0: hf.Dim("k")}],
        )[0]

    with pytest.raises(ExportError, match=r"test_export_jax.py:\d+"):
        exported(f, A).to_jax()(np.asarray(A))


def test_symbolic_sizes_that_jax_cannot_decide_are_refused() -> None:
    program = exported(
        lambda x: hf.linalg.qr(x).R, f64([1.0, 2.0], [3.0, 5.0]), dynamic_shapes=True
    )
    with pytest.raises(ExportError, match="inconclusive"):
        program.to_stablehlo()


def test_without_64_bits_the_error_says_what_to_do() -> None:
    program = exported(hf.sin, A)
    fn = program.to_jax()
    with jax().enable_x64(False):
        for call in (program.to_jax, lambda: fn(np.ones(2))):
            with pytest.raises(ExportError, match="'jax_enable_x64', True"):
                call()
        assert len(program.to_stablehlo()) > 100


def test_arguments_of_another_kind_are_refused() -> None:
    program = exported(hf.sin, A)
    with pytest.raises(ArgumentTypeError, match="to_stablehlo: `path` must be a path"):
        program.to_stablehlo(3)
    with pytest.raises(ArgumentValueError, match="'drop' or 'checkify'"):
        program.to_jax(asserts="stop")


def test_without_the_library_the_error_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = exported(hf.sin, A)
    library.cache_clear()
    monkeypatch.setitem(sys.modules, "jax", None)
    with pytest.raises(ExportError, match=r"pip install 'hopflow\[jax\]'"):
        program.to_jax()
    monkeypatch.undo()
    library.cache_clear()
