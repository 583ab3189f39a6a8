"""`callback` and `print`: when Python is called, how often, with what; its errors."""

import contextvars
import gc
import threading
import time
import weakref
from typing import Any

import numpy as np
import pytest

import hopflow
from hopflow.bind import bind
from hopflow.compiler.callbacks import Callbacks
from hopflow.compiler.cpu.runtime import compile_program
from hopflow.compiler.cpu.target import host
from hopflow.compiler.interface import Interface
from hopflow.compiler.pipeline import lower
from hopflow.errors import (
    ArgumentTypeError,
    ArgumentValueError,
    CompileError,
    GraphError,
    LoopIRError,
    ResultTypeError,
    StructureError,
)
from hopflow.graph.interpreter import interpret
from hopflow.graph.parser import parse
from hopflow.graph.printer import format_graph, named_objects
from hopflow.jit import jit
from hopflow.loop_ir.interpreter import run as run_loop_ir
from hopflow.ops.opdef import OPERATIONS
from hopflow.testing.calls import Calls
from hopflow.testing.executions import NAMES, RUNNERS, SYMBOLIC, agree, fails, run_debug

hf: Any = hopflow

each_execution = pytest.mark.parametrize("run", RUNNERS, ids=NAMES)
every_execution = pytest.mark.parametrize(
    "run", [*RUNNERS, *SYMBOLIC], ids=[*NAMES, *(f.__name__ for f in SYMBOLIC)]
)

X = np.array([1.0, 2.0, 3.0], np.float32)


@pytest.fixture
def log() -> Calls:
    return Calls()


# --- every operator -------------------------------------------------------------------


def in_cond(log: Calls, x: Any) -> Any:
    def taken(x: Any) -> Any:
        log.note("then", x)
        return x + 1

    def other(x: Any) -> Any:
        log.note("else", x)
        return x - 1

    return hf.cond(hf.sum(x) > 0, taken, other, (x,))


def in_switch(log: Calls, x: Any) -> Any:
    def branch(k: int) -> Any:
        return lambda x: (log.note(k), x + k)[1]

    return hf.switch(hf.astype(x[1], "int64"), [branch(k) for k in range(4)], (x,))


def in_while(log: Calls, x: Any) -> Any:
    def goes_on(i: Any, _: Any) -> Any:
        log.note("test", i)
        return i < 2

    def step(i: Any, x: Any) -> Any:
        log.note("step", i)
        return i + 1, log.through(x) * 2

    return hf.while_loop(goes_on, step, (0, x))[1]


def in_fori(log: Calls, x: Any) -> Any:
    return hf.fori_loop(0, 3, lambda i, x: (log.note(i), x + i)[1], x)


def in_scan(log: Calls, x: Any) -> Any:
    def step(total: Any, x: Any) -> Any:
        log.note(x)
        return total + x, log.through(total)

    return hf.scan(step, hf.sum(x) * 0, x)


def in_map(log: Calls, x: Any) -> Any:
    return hf.map(lambda x: log.through(x) * 2, x)


def in_subgraph(log: Calls, x: Any) -> Any:
    return hf.invoke_subgraph(lambda x: (log.note(x), x * 2)[1], x)


def in_checkpoint(log: Calls, x: Any) -> Any:
    return hf.checkpoint(lambda x: (log.note(x), x * 2)[1])(x)


def in_nested(log: Calls, x: Any) -> Any:
    """A branch in a loop in a map."""

    def one(x: Any) -> Any:
        def step(i: Any, c: Any) -> Any:
            log.note(i, c)
            return hf.cond(c > 2, lambda: log.through(c), lambda: c + 1)

        return hf.fori_loop(0, 2, step, x)

    return hf.map(one, x)


STEPS = [("test", 0), ("step", 0), X.tolist(), ("test", 1), ("step", 1)]
CASES = {
    in_cond: [("then", X.tolist())],
    in_switch: [2],
    in_while: [*STEPS, (X * 2).tolist(), ("test", 2)],
    in_fori: [0, 1, 2],
    in_scan: [1.0, 0.0, 2.0, 1.0, 3.0, 3.0],
    in_map: [1.0, 2.0, 3.0],
    in_subgraph: [X.tolist()],
    in_checkpoint: [X.tolist()],
    in_nested: [
        (0, 1.0),
        (1, 2.0),
        (0, 2.0),
        (1, 3.0),
        3.0,
        (0, 3.0),
        3.0,
        (1, 3.0),
        3,
    ],
}
each_operator = pytest.mark.parametrize(
    ("f", "expected"), CASES.items(), ids=lambda f: getattr(f, "__name__", "")
)


@every_execution
@each_operator
def test_python_is_called_in_order_as_plain_python_would(
    run: Any, f: Any, expected: list[Any], log: Calls
) -> None:
    wanted = run_debug(lambda x: f(Calls(), x), hf.asarray(X))
    got: list[Any] = []
    assert log.of(lambda: got.append(run(lambda x: f(log, x), hf.asarray(X)))) == (
        expected
    )
    agree(got[0], wanted)


@each_execution
def test_associative_scan_calls_python_as_often_as_it_combines(
    run: Any, log: Calls
) -> None:
    def combine(a: Any, b: Any) -> Any:
        log.note("combined")
        return a + b

    f = lambda x: hf.associative_scan(combine, x)  # noqa: E731
    assert set(log.of(lambda: agree(run(f, hf.asarray(X)), np.cumsum(X)))) == {
        "combined"
    }


@pytest.mark.parametrize("seed", range(3))
@each_operator
def test_the_loop_ir_interpreter_calls_in_the_same_order(
    f: Any, expected: list[Any], seed: int, log: Calls
) -> None:
    graph = hf.trace(lambda x: f(log, x), hf.asarray(X), mode="fake").graph
    _, program = lower(graph)
    host = Callbacks(graph, Interface.of(program)).run
    run_loop_ir(program, [], [X], seed=seed, host=host)
    assert log.seen == expected


# --- what may not be done with it -----------------------------------------------------


@every_execution
def test_a_loop_of_no_steps_calls_nothing(run: Any, log: Calls) -> None:
    def f(x: Any, n: Any) -> Any:
        # What is the same in each step is not moved out of the loop.
        x = hf.fori_loop(0, n, lambda _, c: c + log.through(x), x)
        return hf.while_loop(lambda _: n > 0, log.through, x)

    assert log.of(lambda: run(f, hf.asarray(X), hf.asarray(0))) == []


@every_execution
def test_calls_are_neither_merged_nor_left_out_nor_moved(run: Any, log: Calls) -> None:
    def f(x: Any) -> Any:
        log.through(x)
        log.through(x)
        return hf.fori_loop(0, 2, lambda _, c: (log.through(x), c)[1], x)

    assert log.of(lambda: run(f, hf.asarray(X))) == [X.tolist()] * 4


@each_execution
def test_a_callback_may_return_something_else_each_time(run: Any) -> None:
    numbers = iter(range(10))

    def f(x: Any) -> Any:
        def draw(_: Any, c: Any) -> Any:
            return c + hf.callback(lambda: next(numbers), hf.spec("f32[]"))

        return hf.fori_loop(0, 4, draw, x)

    agree(run(f, hf.asarray(np.float32(0))), np.float32(6))


# --- what goes in and out -------------------------------------------------------------


@each_execution
def test_arguments_and_results_are_trees(run: Any) -> None:
    given: list[Any] = []

    def fn(tree: Any, *rest: Any) -> Any:
        given.append((tree, rest))
        return {"a": tree["x"] * 2, "b": (hf.sum(tree["x"]), 7)}

    spec = {"a": hf.spec("f32[3]"), "b": (hf.spec("f32[]"), hf.spec("i64[]"))}

    def f(x: Any) -> Any:
        return hf.callback(fn, spec, {"x": x}, "text", None, 3, np.arange(2), [1.5])

    got = run(f, hf.asarray(X))
    agree(got, {"a": X * 2, "b": (X.sum(), np.int64(7))})
    [(tree, (text, none, number, array, list_))] = given
    assert isinstance(tree["x"], hf.Tensor)
    assert (text, none, number, array.tolist(), list_) == (
        "text",
        None,
        3,
        [0, 1],
        [1.5],
    )


@pytest.mark.parametrize(
    "dtype", ["bool", "int8", "uint16", "int64", "float16", "bfloat16", "float64"]
)
@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (5, 2)], ids=str)
@each_execution
def test_every_dtype_and_shape_goes_through(run: Any, dtype: str, shape: Any) -> None:
    x = hf.astype(hf.reshape(hf.arange(int(np.prod(shape))) % 2, shape), dtype)

    def f(x: Any) -> Any:
        return hf.callback(lambda a, b: (b, a), (x, x), x, x[...])

    a, b = run(f, x)
    assert a.type == b.type == x.type
    assert a.tolist() == b.tolist() == x.tolist()


@each_execution
def test_what_a_function_is_given_is_its_own(run: Any) -> None:
    kept: list[Any] = []

    def fn(x: Any) -> Any:
        kept.append(x)
        x[0] = 100.0
        return x

    def f(x: Any) -> Any:
        return hf.fori_loop(0, 3, lambda _, c: (hf.callback(fn, c, c), c + 1)[1], x)

    x = hf.asarray(X)
    agree(run(f, x), X + 3)
    assert x.tolist() == X.tolist()
    assert [k.tolist() for k in kept] == [[100.0, 2 + i, 3 + i] for i in range(3)]


def test_a_strided_argument_is_read_as_it_is(log: Calls) -> None:
    f = hf.jit(lambda x: log.note(x))
    x = hf.reshape(hf.arange(6.0), (2, 3))
    for value in (x, hf.matrix_transpose(x)[:, ::-1], x[:, 1:]):
        assert log.of(f, value) == [value.tolist()]


@pytest.mark.parametrize("run", SYMBOLIC, ids=lambda f: f.__name__)
def test_symbolic_sizes_are_numbers_in_python_and_sizes_of_results(run: Any) -> None:
    seen: list[Any] = []

    def fn(n: Any, x: Any) -> Any:
        seen.append(n)
        return x + n

    def f(x: Any) -> Any:
        return hf.callback(fn, x, x.shape[0], x)

    agree(run(f, hf.asarray(X)), X + 3)
    assert seen == [3]
    assert type(seen[0]) is int


def test_one_kernel_serves_every_size(log: Calls) -> None:
    f = hf.jit(lambda x: log.through(x) + 1, dynamic=True)
    before = hf.stats().compiles
    for n in (2, 5, 3):
        agree(f(hf.asarray(X[:1].repeat(n))), np.full(n, 2, np.float32))
    assert hf.stats().compiles <= before + 1


@pytest.mark.parametrize("run", [run_debug, *SYMBOLIC], ids=lambda f: f.__name__)
def test_sizes_that_only_the_run_knows(run: Any, log: Calls) -> None:
    def f(x: Any) -> Any:
        kept = x[x > 1]
        log.note(kept)
        return hf.sum(hf.callback(lambda a: a * 2, kept, kept))

    assert log.of(lambda: agree(run(f, hf.asarray(X)), np.float32(10))) == [[2.0, 3.0]]


# --- errors in it ---------------------------------------------------------------------


class OwnError(Exception):
    pass


@every_execution
def test_an_exception_surfaces_as_itself_and_stops_the_program(
    run: Any, log: Calls
) -> None:
    def refuse(i: Any) -> None:
        if int(i) == 2:
            raise OwnError("enough")

    def f(x: Any) -> Any:
        def step(i: Any, c: Any) -> Any:
            log.note(i)
            hf.callback(refuse, None, i)
            return c + 1

        return hf.fori_loop(0, 5, step, x)

    with pytest.raises(OwnError, match="enough") as caught:
        run(f, hf.asarray(X))
    assert log.seen == [0, 1, 2]
    [note] = caught.value.__notes__
    assert note.startswith("raised in the callback `refuse` (test_callbacks.py:")


def test_a_program_that_was_stopped_runs_again_and_writes_nothing(log: Calls) -> None:
    fail = True

    def maybe() -> None:
        if fail:
            raise OwnError

    @jit
    def f(x: Any, y: Any) -> Any:
        y += 1
        hf.callback(maybe, None)
        return x + y

    x, y = hf.asarray(X), hf.asarray(X, copy=True)
    with pytest.raises(OwnError):
        f(x, y)
    assert y.tolist() == X.tolist()
    fail = False
    agree(f(x, y), 2 * X + 1)


@each_execution
@pytest.mark.parametrize(
    ("returned", "error", "text"),
    [
        (
            lambda x: {"a": x[:2]},
            ResultTypeError,
            r"`result\['a'\]` of .* must be f32\[3",
        ),
        (lambda x: {"a": hf.astype(x, "int64")}, ResultTypeError, "and is i64"),
        (lambda _: {"a": "text"}, ResultTypeError, r"its `result\['a'\]` is `str`"),
        (lambda x: {"b": x}, StructureError, "must return what `result_spec` says"),
        (lambda _: None, StructureError, "must return what `result_spec` says"),
    ],
)
def test_a_result_of_another_type_is_refused_by_its_path(
    run: Any, returned: Any, error: Any, text: str
) -> None:
    with pytest.raises(error, match=text):
        run(lambda x: hf.callback(returned, {"a": x}, x), hf.asarray(X))


def test_what_is_wrong_before_anything_runs() -> None:
    x = hf.asarray(X)
    fails(
        ArgumentTypeError,
        "callback: `fn` must be a function, and is `int`.",
        lambda: hf.callback(3, None, x),
    )
    fails(
        ArgumentTypeError,
        'callback: `result_spec[1]` must be a type, as `hf.spec("f32[3]")` is, or a '
        "tensor, and is `str`.",
        lambda: hf.callback(print, (x, "f32[3]"), x),
    )
    fails(
        ArgumentValueError,
        "callback: the size `n` of `result_spec`, f32[n], is that of no tensor here. "
        "Give a number, or a tensor of the type that is returned.",
        lambda: hf.callback(print, hf.spec("f32[n]"), x),
    )


@every_execution
def test_ctrl_c_in_a_callback_stops_the_program(run: Any) -> None:
    def stop() -> None:
        raise KeyboardInterrupt

    def f(x: Any) -> Any:
        return hf.while_loop(
            lambda c: c < 5, lambda c: (hf.callback(stop, None), c)[1], x
        )

    with pytest.raises(KeyboardInterrupt):
        run(f, hf.asarray(0))


def test_interrupt_stops_a_loop_of_callbacks_in_another_thread() -> None:
    started, stopped = threading.Event(), threading.Event()

    @jit
    def endless(x: Any) -> Any:
        def step(c: Any) -> Any:
            hf.callback(started.set, None)
            return c

        return hf.while_loop(lambda c: c < 5, step, x)

    def work() -> None:
        try:
            endless(hf.asarray(0))
        except KeyboardInterrupt:
            stopped.set()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert started.wait(60)
    hf.interrupt(thread.ident)
    assert stopped.wait(60)
    thread.join()


def test_threads_run_one_program_each_with_its_own_order() -> None:
    seen: dict[int, list[int]] = {}

    def note(i: Any) -> None:
        seen.setdefault(threading.get_ident(), []).append(int(i))
        time.sleep(0)

    @jit
    def f(x: Any) -> Any:
        def step(i: Any, c: Any) -> Any:
            hf.callback(note, None, i)
            return c + 1

        return hf.fori_loop(0, 200, step, x)

    x = hf.asarray(0)
    f(x)
    seen.clear()
    threads = [threading.Thread(target=f, args=(x,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert list(seen.values()) == [list(range(200))] * 4


def test_a_callback_may_run_programs_itself(log: Calls) -> None:
    inner = hf.jit(lambda x: log.through(x) * 2)
    outer = hf.jit(lambda x: hf.map(lambda e: hf.callback(inner, e, e), x))
    agree(outer(hf.asarray(X)), X * 2)
    assert log.seen == [1.0, 2.0, 3.0]


@every_execution
def test_the_function_sees_the_context_of_the_caller(run: Any) -> None:
    name = contextvars.ContextVar("name", default="none")
    seen: list[str] = []
    f = lambda x: hf.callback(lambda: seen.append(name.get()), None)  # noqa: E731
    token = name.set("set")
    run(f, hf.asarray(X))
    name.reset(token)
    assert seen == ["set"]


# --- one kernel, and what is kept -----------------------------------------------------


def test_programs_that_call_other_functions_share_a_kernel() -> None:
    def program(fn: Any) -> Any:
        return hf.jit(lambda x: hf.callback(fn, x, x) + 1)

    one, two = program(lambda x: x * 2), program(lambda x: x * 3)
    x = hf.asarray(X)
    agree(one(x), X * 2 + 1)
    before = hf.stats().compiles
    agree(two(x), X * 3 + 1)
    assert hf.stats().compiles == before
    agree(one(x), X * 2 + 1)


def test_no_cache_keeps_a_function_alive() -> None:
    def use() -> weakref.ref[Any]:
        class Large:
            def __call__(self, x: Any) -> Any:
                return x

        fn = Large()
        hf.callback(fn, hf.spec("f32[3]"), hf.asarray(X))
        hf.jit(lambda x: hf.fori_loop(0, 2, lambda _, c: hf.callback(fn, c, c), x))(
            hf.asarray(X)
        )
        return weakref.ref(fn)

    found = use()
    gc.collect()
    assert found() is None


def test_a_text_has_the_name_and_parses_back() -> None:
    def record(x: Any) -> None:
        raise AssertionError(x)

    graph = hf.trace(lambda x: hf.callback(record, None, x), hf.asarray(X)).graph
    text = format_graph(graph)
    assert "callback(x, fn=objects.record, types=())" in text
    module = parse(text, OPERATIONS, objects=named_objects(graph))
    assert format_graph(module) == text
    with pytest.raises(AssertionError):
        interpret(module, [hf.asarray(X)], bind)
    module = parse(text.replace("objects.record", '"record"'), OPERATIONS)
    with pytest.raises(GraphError, match="only the name `record`"):
        interpret(module, [hf.asarray(X)], bind)


def test_a_program_must_be_told_what_it_calls() -> None:
    graph = hf.trace(lambda x: hf.callback(print, None, x), hf.asarray(X)).graph
    _, program = lower(graph)
    with pytest.raises(LoopIRError, match="was given no `host`"):
        run_loop_ir(program, [], [X])
    with pytest.raises(CompileError, match="was not told what"):
        compile_program(program, host())(X)


def test_a_symbolic_trace_keeps_calls_that_nothing_reads(log: Calls) -> None:
    def f(x: Any) -> Any:
        hf.callback(log.seen.append, None, x[0])
        hf.callback(lambda a: a, x, x)
        return x + 1

    module = hf.symbolic_trace(f)
    assert module.graph.eliminate_dead_code() == 0
    module(hf.asarray(X))
    assert len(log.seen) == 1


def test_fake_arguments_run_nothing(log: Calls) -> None:
    graph = hf.trace(lambda x: log.through(x), hf.spec("f32[3]"), mode="fake").graph
    assert log.seen == []
    assert graph.out_types == (hf.spec("f32[3]"),)


# --- print ----------------------------------------------------------------------------


@every_execution
def test_print_formats_as_python_does(run: Any, capsys: Any) -> None:
    def f(x: Any) -> Any:
        def step(i: Any, c: Any) -> Any:
            hf.print("step {0}: {x} {0:03d} {y:.2f} {name!r}", i, x=c, y=c[0], name="a")
            return c * 2

        hf.print("{{ no fields }}")
        hf.print("{t[a]} {n}", t={"a": x}, n=x.shape[0])
        return hf.fori_loop(0, 2, step, x)

    run(f, hf.asarray(X))
    assert capsys.readouterr().out.splitlines() == [
        "{ no fields }",
        "[1. 2. 3.] 3",
        "step 0: [1. 2. 3.] 000 1.00 'a'",
        "step 1: [2. 4. 6.] 001 2.00 'a'",
    ]


@pytest.mark.parametrize(
    ("args", "error", "text"),
    [
        ((3,), ArgumentTypeError, "`fmt` must be a string"),
        (("{} {}", 1), ArgumentValueError, "names an argument that is not given"),
        (("{x}", 1), ArgumentValueError, "names an argument that is not given"),
        (("{",), ArgumentValueError, "is no format string"),
        (("loss", 1), ArgumentValueError, r"argument 0, .* `hf.print\('loss \{\}', "),
        (("{1}", 1, 2), ArgumentValueError, r"argument 0, .*'\{1\} \{0\}'"),
        (("{} {}", 1, 2, 3, 4), ArgumentValueError, "argument 2 and argument 3, .*"),
    ],
)
def test_a_format_that_does_not_fit_is_refused(
    args: Any, error: Any, text: str
) -> None:
    with pytest.raises(error, match=text):
        hf.print(*args)


def test_every_argument_of_print_is_printed(capsys: Any) -> None:
    message = r"no field for argument 1 and `y`, .*\{\} \{\} y=\{y\}"
    with pytest.raises(ArgumentValueError, match=message):
        hf.print("{}", 1, hf.ones(3), y=2)
    hf.print("{0.shape} {1:>{2}} {y!r}", hf.ones(3), 7, 4, y="z")
    assert capsys.readouterr().out == "(3,)    7 'z'\n"


@every_execution
@pytest.mark.parametrize(
    "fmt", ["{:d}", "{:.2q}", "{0.absent}", "{0[absent]}", "{:>3}"]
)
def test_a_format_of_another_type_is_refused_by_the_run(run: Any, fmt: str) -> None:
    x = hf.asarray([1.5, 2.5])
    with pytest.raises(ArgumentValueError, match="does not format what it is given"):
        run(lambda x: (hf.print(fmt, x), x)[1], x)
