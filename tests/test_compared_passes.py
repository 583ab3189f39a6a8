"""`hf.config.verify` runs programs before and after each pass, and tells which changes
what they compute."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Final

import numpy as np
import pytest

import hopflow
from hopflow.compiler import pipeline
from hopflow.compiler.kernel_passes.checks import checks
from hopflow.compiler.kernel_passes.hoist import hoist
from hopflow.compiler.kernel_program.definitions import Effect, Reduction, Scatter
from hopflow.compiler.kernel_program.program import (
    Branch,
    Equation,
    KernelProgram,
    Loop,
    Region,
    While,
    blocks,
)
from hopflow.compiler.kernel_program.rewriting import (
    all_blocks,
    all_expressions,
    elements,
    map_expressions,
)
from hopflow.compiler.schedule import compared_passes, schedule
from hopflow.config import config
from hopflow.errors import PassError
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Expr
from hopflow.loop_ir.walk import nodes

pytestmark = pytest.mark.slow

hf: Any = hopflow
X = np.arange(6.0) / 4 - 0.5
N = np.asarray(3)
NOWHERE: Final[list[object]] = []


@pytest.fixture(autouse=True)
def _verified(monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline.clear_cache()
    monkeypatch.setattr(config, "verify", True)


# --- programs -------------------------------------------------------------------------


def elementwise(x: Any, n: Any) -> Any:
    return x - 2.0 * x[::-1] + n


def looped(x: Any, n: Any) -> Any:
    return hf.fori_loop(0, n, lambda i, c: c - x * i + 1.0, x)


def until(x: Any, n: Any) -> Any:
    step = lambda a, k: (a + hf.maximum(a - 1.0, 0.5), k + 1)  # noqa: E731
    test = lambda a, k: (hf.sum(a) < 100.0) & (k < n)  # noqa: E731
    return hf.while_loop(test, step, (x, 0))


def stepped(x: Any, n: Any) -> Any:
    return hf.scan(lambda c, y: (c + y - n, c - 1.0), 0.0, x)


def branched(x: Any, n: Any) -> Any:
    return hf.cond(n > 1, lambda: x + 1.0, lambda: x - n)


def scattered(x: Any, n: Any) -> Any:
    return (x - 1.0).at[hf.where(n > 0, 0, 1)].add(n)


def summed(x: Any, n: Any) -> Any:
    return hf.sum(x[::-1] * x) - n, hf.cumulative_sum(x + n)


def kept(x: Any, n: Any) -> Any:
    return x[x > n] - 1.0


def called(x: Any, n: Any) -> Any:
    def chain(a: Any) -> Any:
        for _ in range(40):
            a = hf.sin(a - n) + 1.0
        return a

    function = hf.subgraph(chain)
    return function(function(x - 1.0))


def told(x: Any, n: Any) -> Any:
    hf.callback(NOWHERE.append, None, x - n)
    found = hf.callback(lambda a: a, hf.spec("f64[]"), hf.sum(x + 1.0) * 1.0)
    return x + found


PROGRAMS: Final[list[Callable[..., Any]]] = [
    *(elementwise, looped, until, stepped, branched, scattered, summed, kept, called),
    told,
]


# --- passes ---------------------------------------------------------------------------


def changing(change: Callable[[Expr], Expr | None]) -> Callable[..., None]:
    """A pass that changes nodes of floats, wherever they are."""

    def rewritten(root: Expr) -> Expr:
        values: dict[Expr, Expr] = {}
        for node in nodes(root):
            found = e.with_args(node, tuple([values[a] for a in node.args]))
            is_float = found.dtype.is_float and len(found.args) == 2
            values[node] = (change(found) if is_float else None) or found
        return values[root]

    def changed(program: KernelProgram, _: Any) -> None:
        for block in all_blocks(program.block):
            for equation in block.equations:
                own = equation.definition
                if not isinstance(own, Region):
                    equation.definition = map_expressions(own, rewritten)

    return changed


def first_of_sum(x: Expr) -> Expr | None:
    return x.args[0] if x.op in ("add", "sub") else None


def turned(*operations: str, into: str = "") -> Callable[[Expr], Expr | None]:
    """Other nodes for those of some operations, with operands the other way around."""

    def change(x: Expr) -> Expr | None:
        args = x.args[::-1]
        return Expr(into or x.op, args, x.dtype, None) if x.op in operations else None

    return change


WRONG: Final = {
    "without a term": changing(first_of_sum),
    "swapped": changing(turned("sub")),
    "added instead": changing(turned("sub", into="add")),
}


def compile_with(
    run: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    f: Callable[..., Any],
    *args: Any,
    dynamic: bool = False,
) -> None:
    """Schedule a function, `run` being the first pass."""
    monkeypatch.setattr(schedule, "KERNEL_PASSES", (run, *schedule.KERNEL_PASSES))
    arrays = map(hf.asarray, args)
    pipeline.lower(hf.trace(f, *arrays, mode="symbolic", dynamic=dynamic).graph)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("f", PROGRAMS)
@pytest.mark.parametrize("name", WRONG)
def test_a_pass_that_changes_arithmetic_is_named(
    name: str, f: Any, dynamic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(program: KernelProgram, context: Any) -> None:
        WRONG[name](program, context)

    with pytest.raises(PassError, match="after the pass `broken`, ") as found:
        compile_with(broken, monkeypatch, f, X, N, dynamic=dynamic)
    text = str(found.value)
    assert "before:\nprogram " in text
    assert "after:\nprogram " in text
    assert "and was" in text
    assert "\nfor " in text


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("f", PROGRAMS)
def test_a_pass_that_keeps_every_bit_is_none(
    f: Any, dynamic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = changing(turned("add", "mul"))
    compile_with(right, monkeypatch, f, X, N, dynamic=dynamic)
    compile_with(right, monkeypatch, f, X[:0], N, dynamic=dynamic)


# --- traps ----------------------------------------------------------------------------


def reading(x: Any, n: Any, k: Any) -> Any:
    return hf.fori_loop(0, n, lambda i, c: c + x[k], 0.0)


def reading_while(x: Any, n: Any, k: Any) -> Any:
    return hf.while_loop(lambda c: c < n, lambda c: c + 1 + hf.astype(x[k], int) * 0, k)


def dividing(x: Any, n: Any, k: Any) -> Any:
    return hf.fori_loop(0, n, lambda i, c: c + 7 // k, 0)


def choosing(x: Any, n: Any, k: Any) -> Any:
    return hf.cond(n > 1, lambda: x[k], lambda: x[0])


def move_effects(program: KernelProgram, _: Any) -> None:
    """Checks leave the blocks that are around them."""
    for block in all_blocks(program.block):
        kept: list[Equation] = []
        for equation in block.equations:
            for inner in blocks(equation.definition):
                own = {v for q in inner.equations for v in q.results}
                own |= set(inner.parameters)
                for one in inner.equations:
                    if isinstance(one.definition, Effect) and own.isdisjoint(
                        x.attr for x in elements(all_expressions(one.definition))
                    ):
                        kept.append(one)
                inner.equations = [q for q in inner.equations if q not in kept]
            kept.append(equation)
        block.equations = kept


def moving(program: KernelProgram, context: Any) -> None:
    hoist(program, context)
    checks(program, context)
    move_effects(program, context)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("f", [reading, reading_while, dividing, choosing])
def test_a_trap_that_leaves_a_region_is_found(
    f: Any, dynamic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(PassError, match=r"`moving`.* stops with .*: "):
        compile_with(moving, monkeypatch, f, X, N, np.asarray(1), dynamic=dynamic)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_trap_that_leaves_a_loop_over_no_rows_is_found(
    dynamic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def f(x: Any, xs: Any, k: Any) -> Any:
        return hf.scan(lambda c, y: (c + y, x[k]), 0.0, xs)

    xs = X if dynamic else X[:0]
    with pytest.raises(PassError, match=r"`moving`.* stops with index"):
        compile_with(moving, monkeypatch, f, X, xs, N, dynamic=dynamic)


def test_another_trap_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def another(program: KernelProgram, context: Any) -> None:
        checks(program, context)
        for equation in program.block.equations:
            if isinstance(own := equation.definition, Effect):
                less = tuple([replace(c, values=c.values[:1]) for c in own.checks])
                equation.definition = Effect(less)

    text = r"it stops with index: \[\d+\] .*, and stops with index: \[\d+, 6\]"
    with pytest.raises(PassError, match=text):
        compile_with(another, monkeypatch, lambda x, k: x[k], X, N)


# --- what else ------------------------------------------------------------------------


def swap_blocks(program: KernelProgram, _: Any) -> None:
    for block in all_blocks(program.block):
        for equation in block.equations:
            if isinstance(own := equation.definition, Branch):
                equation.definition = replace(own, blocks=own.blocks[::-1])


def shorten_loops(program: KernelProgram, _: Any) -> None:
    for block in all_blocks(program.block):
        for equation in block.equations:
            if isinstance(own := equation.definition, Loop):
                equation.definition = replace(own, reverse=not own.reverse)
            if isinstance(own := equation.definition, While):
                equation.definition = replace(own, max_steps=2)


def forget_updates(program: KernelProgram, _: Any) -> None:
    for block in all_blocks(program.block):
        for equation in block.equations:
            if isinstance(own := equation.definition, Scatter):
                equation.definition = replace(own, combine=None)


def drop_callbacks(program: KernelProgram, _: Any) -> None:
    for block in all_blocks(program.block):
        block.equations = [
            q for q in block.equations if q.results or isinstance(q.definition, Effect)
        ]


def read_beyond(program: KernelProgram, _: Any) -> None:
    for equation in program.block.equations:
        if isinstance(own := equation.definition, Reduction):
            equation.definition = replace(own, space=tuple(n + 1 for n in own.space))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    ("run", "f", "text"),
    [
        (swap_blocks, branched, "and was"),
        (shorten_loops, stepped, "and was"),
        (shorten_loops, until, "it stops with limit: .*, and ends before it"),
        (forget_updates, scattered, "and was"),
        (drop_callbacks, told, "other callbacks are called, or in another order"),
        (read_beyond, summed, "is read at"),
    ],
)
def test_a_pass_that_changes_regions_is_found(
    run: Any, f: Any, text: str, dynamic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(PassError, match=f"`{run.__name__}`.*{text}"):
        compile_with(run, monkeypatch, f, X, N, dynamic=dynamic)


@pytest.mark.parametrize("f", [elementwise, looped, until, called])
def test_memory_that_is_written_over_is_found(
    f: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def share_all(plan: Any) -> None:
        one: Any = {}
        for value in plan.live.defined:
            found = plan.of(value)
            if found is not None and found.type.ndim:
                plan.allocations.put(value, one.setdefault(str(found.type), found))

    passes = (*schedule.MEMORY_PASSES, share_all)
    monkeypatch.setattr(schedule, "MEMORY_PASSES", passes)
    monkeypatch.setattr(schedule, "verify_memory", lambda _: None)
    graph = hf.trace(f, hf.asarray(X), hf.asarray(N), mode="symbolic", dynamic=False)
    with pytest.raises(PassError, match=r"after the pass `memory`.* its memory holds"):
        pipeline.lower(graph.graph)


def test_callbacks_are_not_called_by_what_compares() -> None:
    NOWHERE.clear()
    hf.jit(told)(X, N)
    assert len(NOWHERE) == 1


@pytest.mark.parametrize(
    "f",
    [
        lambda x: hf.while_loop(lambda c: hf.sum(c) < hf.inf, lambda c: c * 0.5, x),
        lambda x: hf.fori_loop(0, 10**9, lambda i, c: c, x),
        lambda x: hf.fori_loop(0, 10**9, lambda i, c: c * 0.5, x),
        lambda x: hf.sum(hf.arange(10**9)),
        lambda x: hf.sum(hf.zeros((10**5, 10**5)) + x[0]),
        lambda x: hf.broadcast_to(x, (10**9, 6)) @ x,
    ],
)
def test_programs_that_take_long_are_not_compared(f: Any) -> None:
    graph = hf.trace(f, hf.asarray(X)).graph
    program = pipeline.kernels_of(graph)
    compared = compared_passes.ComparedPasses(program)
    assert all(run.steps <= compared_passes.STEPS for run in compared._runs)


def test_a_promise_that_no_check_holds_is_not_broken() -> None:
    """The number of a branch is moved to be in range outside of what is mapped."""

    def f(x: Any, k: Any) -> Any:
        return hf.switch(k, [hf.sin, hf.cos], (x,))

    hf.vmap(f)(hf.ones((3, 4)), hf.asarray([0, 7, -7]))
    hf.jit(hf.vmap(f))(hf.ones((3, 4)), hf.asarray([0, 7, -7]))


def test_sizes_fulfil_what_was_asked_of_them() -> None:
    """The steps read an element that there is where the program may be called."""

    def f(x: Any, y: Any) -> Any:
        def step(c: Any, row: Any) -> Any:
            return c + (hf.reshape(y, ()) if y.shape[0] == 1 else hf.sum(y)), row

        return hf.scan(step, hf.sum(x), x)

    for n in (1, 2):
        args = hf.asarray(X), hf.ones((n,), dtype=hf.float64)
        pipeline.lower(hf.trace(f, *args, mode="symbolic", dynamic=True).graph)


def test_inputs_are_the_same_each_time() -> None:
    def inputs() -> Iterator[Any]:
        program = pipeline.kernels_of(hf.trace(looped, X, hf.asarray(N)).graph)
        for run in compared_passes.ComparedPasses(program)._runs:
            yield [a.tolist() for a in run.inputs]

    first = list(inputs())
    assert len(first) == compared_passes.RUNS
    assert list(inputs()) == first


def test_runs_that_no_call_has_are_left_out() -> None:
    """There is a sum for two rows and more alone, and the size 0 is tried, too."""

    def added(x: Any) -> Any:
        return hf.linalg.qr(x)[1] + hf.eye(2, dtype="float32")

    x = np.arange(6.0, dtype="f").reshape(3, 2)
    found = hf.jit(added, dynamic=True)(x)
    np.testing.assert_allclose(found, added(hf.asarray(x)), 1e-5)
