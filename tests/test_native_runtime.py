"""Calling native programs: arguments, threads, interrupts, memory."""

import gc
import os
import signal
import threading
import time
import weakref

import numpy as np
import pytest

from hopflow.compiler.cpu.runtime import (
    Kernel,
    assembly,
    compile_program,
    interrupt,
    llvm_ir,
    optimised_llvm_ir,
)
from hopflow.compiler.cpu.target import host
from hopflow.dtypes import float64, int64
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Buffer, Var
from hopflow.loop_ir.program import (
    Assign,
    Binding,
    Declare,
    For,
    Program,
    Stmt,
    Store,
    While,
)

N = Var("n", int64)
SIZE = e.read(N)


def endless(inner: int = 0) -> Program:
    """`while i != -7: i = (i ^ 12345) + 1`, which never ends; or a loop of those."""
    out, i = Buffer("out", int64, (), "output"), Var("i", int64)
    step = e.add(e.binary("xor", e.read(i), e.index(12345)), e.index(1))
    body: list[Stmt] = [Assign(i, step)]
    if inner:
        body = [For(Var("j", int64), e.index(inner), body)]
    return Program(
        "endless",
        [],
        [],
        [out],
        [],
        [],
        [
            Declare(i, e.index(0)),
            While([], e.compare("ne", e.read(i), e.index(-7)), body),
            Store(out, (), e.read(i)),
        ],
        [],
    )


def counted() -> Program:
    """A loop of `n` steps that cannot be simplified away."""
    out, i, s = Buffer("out", int64, (), "output"), Var("i", int64), Var("s", int64)
    step = e.binary("xor", e.add(e.mul(e.read(s), e.index(5)), e.read(i)), e.index(77))
    return Program(
        "counted",
        [N],
        [],
        [out],
        [],
        [],
        [
            Declare(s, e.index(0)),
            For(i, SIZE, [Assign(s, step)]),
            Store(out, (), e.read(s)),
        ],
        [],
    )


def total() -> Program:
    """Sums of `n` numbers, through temporaries in the arena."""
    x, out = (
        Buffer("x", float64, (SIZE,), "input"),
        Buffer("out", float64, (SIZE,), "output"),
    )
    t = Buffer("t", float64, (SIZE,), "arena")
    j, k = Var("j", int64), Var("k", int64)
    double = e.add(e.load(x, (e.read(j),)), e.load(x, (e.read(j),)))
    vector = Binding("vector", 8)
    return Program(
        "total",
        [N],
        [x],
        [out],
        [t],
        [],
        [
            For(j, SIZE, [Store(t, (e.read(j),), double)], True, vector),
            For(
                k,
                SIZE,
                [Store(out, (e.read(k),), e.load(t, (e.read(k),)))],
                True,
                vector,
            ),
        ],
        [],
    )


def compiled(program: Program) -> Kernel:
    return compile_program(program, host())


RESULT = np.zeros((), np.int64)


@pytest.mark.usefixtures("ctrl_c")
@pytest.mark.parametrize(
    ("program", "sizes"),
    [(endless(), ()), (endless(1000), ()), (counted(), (10**13,))],
    ids=["while", "nested", "counted"],
)
def test_ctrl_c_stops_a_loop(program: Program, sizes: tuple[int, ...]) -> None:
    run = compiled(program)
    fired = 0.0

    def fire() -> None:
        nonlocal fired
        fired = time.perf_counter()
        os.kill(os.getpid(), signal.SIGINT)

    timer = threading.Timer(0.1, fire)
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        run(*sizes, RESULT.ctypes.data)
    assert time.perf_counter() - fired < 0.5  # 0.05 s on a machine at rest
    timer.join()


def test_a_signal_handler_that_returns_does_not_stop_the_loop() -> None:
    calls = []
    before = signal.signal(signal.SIGALRM, lambda *_: calls.append(time.perf_counter()))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        assert compiled(counted())(200_000_000, RESULT.ctypes.data) is None
        assert len(calls) == 1
    finally:
        signal.signal(signal.SIGALRM, before)


def test_interrupt_stops_the_thread_that_it_names_and_then_all() -> None:
    run = compiled(endless())
    stopped: list[int] = []

    def work() -> None:
        try:
            run(np.zeros((), np.int64).ctypes.data)
        except KeyboardInterrupt:
            stopped.append(threading.get_ident())

    threads = [threading.Thread(target=work, daemon=True) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    interrupt(threads[1].ident)
    threads[1].join(5)
    assert stopped == [threads[1].ident]
    interrupt()
    for thread in threads:
        thread.join(5)
    assert len(stopped) == 3


def test_an_interrupt_does_not_wait_for_a_program_that_starts_later() -> None:
    interrupt()
    interrupt(threading.get_ident())
    assert compiled(counted())(200_000_000, RESULT.ctypes.data) is None


def test_a_kernel_runs_in_several_threads_at_once() -> None:
    run, size = compiled(total()), 200_000  # long enough to release the GIL
    failures = []

    def work(seed: int) -> None:
        x = np.random.default_rng(seed).standard_normal(size)
        out = np.empty(size)
        for _ in range(50):
            out[:] = 0
            if (
                run(size, x.ctypes.data, out.ctypes.data) is not None
                or (out != 2 * x).any()
            ):
                failures.append(seed)

    threads = [threading.Thread(target=work, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_a_long_program_releases_the_gil_and_a_short_one_does_not() -> None:
    assert "hf_release" in llvm_ir(endless(), host())
    assert "icmp sgt" in llvm_ir(counted(), host())  # decided by its size
    short = Program("short", [N], [], [], [], [], [], [])
    assert "hf_release" not in llvm_ir(short, host())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1,), "3 ints was called with 1"),
        ((1, 2, 3, 4), "3 ints was called with 4"),
        ((1, "2", 3), "'str' object"),
    ],
)
def test_wrong_arguments_are_type_errors(
    arguments: tuple[object, ...], message: str
) -> None:
    with pytest.raises(TypeError, match=message):
        compiled(total()).call(*arguments)


def test_an_int_too_large_is_an_overflow_error() -> None:
    with pytest.raises(OverflowError, match="too large"):
        compiled(total())(2**70, 0, 0)


def test_no_memory_for_the_arena_is_a_memory_error() -> None:
    with pytest.raises(MemoryError):
        compiled(total())(2**58, 0, 0)


def test_a_function_keeps_its_code_alive_and_lets_it_go() -> None:
    kernel = compiled(total())
    call = kernel.call
    owner = call.__self__  # type: ignore[attr-defined]
    library = weakref.ref(owner.loaded.library)
    del kernel, owner
    x, out = np.arange(5.0), np.empty(5)
    assert call(5, x.ctypes.data, out.ctypes.data) is None
    np.testing.assert_array_equal(out, 2 * x)
    del call
    gc.collect()
    assert library() is None


def test_temporaries_are_freed() -> None:
    run, size = compiled(total()), 1_000_000
    x, out = np.zeros(size), np.zeros(size)

    def resident() -> int:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")

    if not os.path.exists("/proc/self/statm"):
        pytest.skip("no /proc")
    run(size, x.ctypes.data, out.ctypes.data)
    before = resident()
    for _ in range(100):
        run(size, x.ctypes.data, out.ctypes.data)
    assert resident() - before < 80_000_000  # ten of a hundred arenas


def test_a_kernel_shows_its_code() -> None:
    program = total()
    assert "define i64 @hf_kernel_total(ptr %block)" in llvm_ir(program, host())
    optimised = optimised_llvm_ir(program, host())
    assert "alloca" not in optimised.partition("@hf_kernel_total")[2]
    assert "hf_kernel_total:" in assembly(program, host())
    assert repr(compiled(program)).startswith("<native kernel 'total', ")


def test_several_threads_compile_at_once() -> None:
    results = []

    def work() -> None:
        x, out = np.arange(5.0), np.empty(5)
        compiled(total())(5, x.ctypes.data, out.ctypes.data)
        results.append(out)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    np.testing.assert_array_equal(results, [2 * np.arange(5.0)] * 4)
