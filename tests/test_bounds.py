"""Native code stays within its memory: `config.check_bounds`, `config.guard_pages`."""

import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from textwrap import dedent
from typing import Any

import numpy as np
import pytest

import hopflow as hf
from hopflow.compiler import pipeline
from hopflow.compiler.schedule.schedule import schedule
from hopflow.errors import BoundsError
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.program import For, Program, Store
from hopflow.loop_ir.walk import functions
from hopflow.testing.executions import agree, run_debug

pytestmark = pytest.mark.slow

X = np.random.default_rng(0).normal(size=(7, 5))


def _gemm(x: Any) -> Any:
    return hf.scan(lambda c, _: (hf.tanh(c @ x.T @ x), None), x, None, length=3)[0]


@hf.subgraph
def block(x: Any) -> Any:
    """Too large to be inlined."""
    for k in range(30):
        x = hf.tanh(x) * 0.5 + hf.sin(x * k)[::-1]
    return x + hf.linalg.solve(x.T @ x, x[0])


def _calls(x: Any) -> Any:
    return hf.scan(lambda c, _: (block(c), None), block(block(x)), None, length=3)[0]


PROGRAMS: dict[str, Callable[[Any], Any]] = {
    "elementwise": lambda x: hf.exp(x) * 2 + x[::-1],
    "rank 0": lambda x: hf.sum(x) * 2,
    "narrow": lambda x: hf.astype(x > 0, hf.int8) + hf.astype(x, hf.int8),
    "reduction": lambda x: hf.sum(x, axis=1) + hf.max(x, axis=1),
    "prefix": lambda x: hf.cumulative_sum(x, axis=0),
    "sort": lambda x: hf.sort(x, axis=1),
    "gather": lambda x: hf.take(x, hf.argsort(x[:, 0]), axis=0),
    "pad": lambda x: hf.concat([hf.pad(x, 1), hf.zeros((1, 7))]),
    "empty": lambda x: hf.concat([x[:0], x]) @ hf.zeros((5, 0)),
    "mask": lambda x: x[x > 0] * 2,
    "ends of nothing": lambda x: hf.searchsorted(hf.flip(x[x > 9]), x[0]),
    "stack": lambda x: hf.scan(lambda c, r: (c + r, hf.sum(c * r)), x[0], x),
    "while": lambda x: hf.while_loop(
        lambda n, c: (n < 40) & (hf.sum(c) < 90),
        lambda n, c: (n + 1, hf.roll(c, 1, axis=0) * 1.1 + 0.1),
        (0, x),
    ),
    "in place": lambda x: hf.fori_loop(
        0, 5, lambda i, a: a.at[i, i].set(hf.sum(a[i])), x
    ),
    "gemm": _gemm,
    "calls": _calls,
    "solve": lambda x: hf.linalg.solve(x.T @ x, x[0]),
    "map": lambda x: hf.map(lambda r: hf.fori_loop(0, 9, lambda _, c: c * r, r), x),
    "grad of while": hf.grad(
        lambda x: hf.sum(
            hf.while_loop(
                lambda n, c: n < 20, lambda n, c: (n + 1, hf.sin(c) * x), (0, x)
            )[1]
        )
    ),
}


@pytest.fixture(params=["check_bounds", "guard_pages"])
def checked(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf.config, request.param, True)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", PROGRAMS)
def test_checked_code_computes_the_same(
    name: str, dynamic: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A process that ends here has read or written beside a buffer.
    f, x = PROGRAMS[name], hf.asarray(X)
    expected = hf.jit(f, dynamic=dynamic)(x)
    for setting in ("check_bounds", "guard_pages"):
        with monkeypatch.context() as patch:
            patch.setattr(hf.config, setting, True)
            agree(hf.jit(f, dynamic=dynamic)(x), expected)


@pytest.mark.usefixtures("checked")
def test_lanes_check_what_they_read_of_steps_that_they_share() -> None:
    """Of each step the loop keeps where it has updated the carry, for the gradient."""

    def end(c: Any, places: Any, w: Any) -> Any:
        def step(c: Any, i: Any) -> Any:
            return c.at[places[i]].set(w), i + 1

        more = lambda c, i: (i < 7) & (c[0] < 50.0)  # noqa: E731
        return hf.sum(hf.while_loop(more, step, (c, 0))[0] ** 2)

    f = hf.vmap(hf.grad(end, argnums=(0, 2)))
    places = hf.asarray(np.arange(119).reshape(17, 7) % 4)
    args = hf.ones((17, 4)), places, hf.linspace(1.0, 2.0, 17)
    agree(hf.jit(f)(*args), run_debug(f, *args))


def _of_data(x: Any) -> Any:
    """A result and temporaries whose sizes are known on the way."""
    rows = x[hf.nonzero(x[:, 0] > 2)[0]]
    return hf.concat([hf.ones((2, x.shape[1])), hf.sort(rows, axis=1), rows])


BESIDE: dict[str, Any] = {
    "concat": lambda x: hf.concat([hf.ones((3, x.shape[1])), x]),
    "concat of temporaries": lambda x: hf.concat(
        [hf.sort(x, axis=1), hf.ones((3, x.shape[1])), hf.sort(x + 1, axis=1)]
    ),
    "pad": lambda x: hf.pad(hf.sort(x, axis=1), ((2, 1), (0, 0))),
    "map": lambda x: hf.map(
        lambda k: hf.concat([hf.sort(x * k, axis=1), hf.ones((2, x.shape[1]))]),
        hf.arange(4.0, dtype=hf.float64),
    ),
    "calls": lambda x: hf.subgraph(
        lambda x: hf.concat([hf.sort(x, axis=1), hf.ones((2, x.shape[1]))])
    )(hf.sort(x, axis=1)),
    "vmap": lambda x: hf.vmap(lambda c: hf.concat([hf.ones(2), hf.sort(c)]), 1)(x),
    "sizes of data": _of_data,
    "batches": lambda x: hf.map(lambda r: hf.sort(r), x, batch_size=2),
}


@pytest.mark.parametrize("columns", [3, 4000])
@pytest.mark.parametrize("name", BESIDE)
@pytest.mark.usefixtures("checked")
def test_what_is_read_of_what_is_empty_is_memory(name: str, columns: int) -> None:
    f = BESIDE[name]
    for_all = hf.jit(f, dynamic=True)
    for rows in (2, 0, 1):
        x = np.cos(np.arange(rows * columns, dtype=np.float64)).reshape(rows, columns)
        agree(for_all(hf.asarray(x)), run_debug(f, hf.asarray(x)))


@pytest.mark.usefixtures("checked")
def test_what_is_empty_has_no_more_memory_than_is_read() -> None:
    total = hf.subgraph(lambda x: hf.cumulative_sum(hf.cos(x), axis=1))
    for_all = hf.jit(lambda x: hf.cos(total(x)), dynamic=True)
    for shape in ((2, 3), (0, 2**40), (0, 0)):
        assert for_all(hf.zeros(shape)).shape == shape


EMPTY: dict[str, Callable[[Any], Any]] = {
    "elementwise": lambda x: hf.cos(x) * 2 + x[:1],
    "slice": lambda x: x[:, ::2] * 2,
    "sum of rows": lambda x: hf.sum(x * 2, axis=0),
    "sum": lambda x: hf.sum(hf.cos(x)),
    "prefix": lambda x: hf.cumulative_sum(x, axis=1),
    "order": lambda x: hf.argsort(x, axis=1),
    "three axes": lambda x: hf.sum(x[:, None, :] * x[:, :, None], axis=-1),
    "for": lambda x: hf.fori_loop(0, 3, lambda _, c: hf.sin(c) + hf.sum(c, axis=0), x),
    "map": lambda x: hf.map(lambda row: hf.cos(row) * 2, x.mT),
    "grad": hf.grad(lambda x: hf.sum(hf.cos(x) * x)),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", EMPTY)
def test_loops_that_write_to_what_is_empty_take_no_steps(
    name: str, dynamic: bool
) -> None:
    f = hf.jit(EMPTY[name], dynamic=dynamic)
    few, many = f(hf.zeros((8, 0))), f(hf.zeros((2**40, 0)))
    assert many.shape == tuple(2**40 if n == 8 else n for n in few.shape)


BESIDE_EMPTY: dict[str, Callable[[Any, Any], Any]] = {
    "carry": lambda x, y: hf.scan(
        lambda c, r: (c + hf.sum(r[0]) + 1, hf.cos(r[1])), 0.0, (x, y)
    ),
    "carries": lambda x, y: hf.while_loop(
        lambda n, a, b: n < 7,
        lambda n, a, b: (n + 1, hf.cos(a), hf.sin(b) + hf.sum(a, axis=1)[:, None]),
        (0, x, y),
    ),
    "results": lambda x, y: hf.map(
        lambda r: (hf.sin(r[0]), hf.sum(r[1]), r[1]), (x, y)
    ),
    "prefix": lambda x, y: (hf.cumulative_sum(x, axis=1), hf.sum(y, axis=1) + 1),
    "while": lambda x, y: hf.map(
        lambda r: hf.while_loop(
            lambda n, c: n < 3,
            lambda n, c: (n + 1 + hf.sum(r[0]) ** 2, c * 2),
            (0.0, r[1]),
        ),
        (x, y),
    ),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", BESIDE_EMPTY)
def test_what_a_loop_does_beside_what_is_empty_is_done(
    name: str, dynamic: bool
) -> None:
    f = BESIDE_EMPTY[name]
    compiled = hf.jit(f, dynamic=dynamic)
    for rows, *columns in product((0, 1, 40), (0, 1, 33), (0, 2, 40)):
        pair = [
            hf.reshape(hf.cos(hf.arange(rows * n) + 1.0), (rows, n)) for n in columns
        ]
        agree(compiled(*pair), run_debug(f, *pair))


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_loop_that_writes_to_what_is_empty_stops_at_what_is_wrong(
    dynamic: bool,
) -> None:
    def kept(row: Any) -> Any:
        hf.check(hf.sum(row) < 3, "the sum is large")
        return row[:0]

    f = hf.jit(lambda x: hf.map(kept, x), dynamic=dynamic)
    assert f(hf.ones((4, 2))).shape == (4, 0)
    with pytest.raises(hf.errors.CheckError, match="the sum is large"):
        f(hf.ones((4, 5)))


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.usefixtures("checked")
def test_strided_and_donated_and_written_inputs(order: Any) -> None:
    x = hf.asarray(np.array(X, order=order))
    agree(
        hf.jit(lambda a: hf.sum(a * 2, axis=0))(x[1::2, ::-1]),
        (X * 2)[1::2, ::-1].sum(0),
    )

    @hf.jit
    def write(a: Any) -> None:
        a[1:] *= 3

    write(x)
    agree(x, np.concatenate([X[:1], X[1:] * 3]))
    agree(hf.jit(lambda a: a + 1, donate=(0,))(hf.asarray(X.copy())), X + 1)


@pytest.mark.usefixtures("checked")
def test_results_of_found_sizes_live_on() -> None:
    kept = [hf.jit(lambda x, n=n: x[x > 0] * n)(hf.asarray(X)) for n in range(4)]
    for n, result in enumerate(kept):
        agree(result, X[X > 0] * n)


def _longer(program: Program) -> Program:
    """A planted fault: each loop over elements takes one step too many."""

    def body(statements: Any) -> Any:
        return [
            replace(
                s,
                extent=e.add(s.extent, e.index(1)),
                body=s.body,
                binding=replace(s.binding, kind="serial", width=1),
            )
            if isinstance(s, For) and any(isinstance(t, Store) for t in s.body)
            else s
            for s in statements
        ]

    for each in functions(program):
        each.body = body(each.body)
    return replace(program, body=body(program.body))


@pytest.mark.parametrize("called", [False, True])
def test_an_index_out_of_range_is_an_error(
    called: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hf.config, "check_bounds", True)
    monkeypatch.setattr(
        pipeline, "schedule", lambda *args, **rest: _longer(schedule(*args, **rest))
    )

    @hf.subgraph
    def step(x: Any) -> Any:
        for k in range(40):
            x = hf.sin(x) * (k + 0.123456789)
        return x

    f = (lambda x: step(step(x))) if called else (lambda x: x * 0.123456789)
    before = hf.stats().functions
    with pytest.raises(BoundsError, match=r"reading `\w+`, axis 0: position 11 of 11"):
        hf.jit(f)(hf.asarray(np.ones(11)))
    assert (hf.stats().functions > before) == called


@pytest.mark.skipif(sys.platform == "win32", reason="closed pages are POSIX's")
def test_a_closed_page_ends_a_process_that_reads_on() -> None:
    """Vector code, with a planted fault."""
    script = """
        from dataclasses import replace
        import numpy as np
        import hopflow as hf
        from hopflow.compiler import pipeline
        from hopflow.loop_ir import expr as e

        schedule = pipeline.schedule

        def longer(*args, **rest):
            program = schedule(*args, **rest)
            (loop,) = program.body
            loop = replace(loop, extent=e.add(loop.extent, e.index(1)))
            return replace(program, body=[loop])

        hf.config.guard_pages = True
        print(hf.jit(lambda x: x * 2)(hf.asarray(np.ones(11)))[10].item())
        pipeline.schedule = longer
        hf.jit(lambda x: x * 3)(hf.asarray(np.ones(11)))
    """
    run = subprocess.run(
        [sys.executable, "-c", dedent(script)], capture_output=True, text=True
    )
    assert run.stdout.strip() == "2.0"
    assert run.returncode == -signal.SIGSEGV, run.stderr
