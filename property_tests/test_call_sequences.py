"""Calls one after the other, against a model: caches, writes, failures, threads.

Whatever happened before, a call computes what NumPy does from what the arguments and
the captured tensors hold now; and what fails leaves nothing behind.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

import hopflow
from hopflow.bind import current
from hopflow.compiler.pipeline import clear_cache
from hopflow.errors import HopflowError, InvalidTensorError

hf: Any = hopflow
NDArray = np.ndarray[Any, Any]
BOTTOM: Final = current()
WIDTH: Final = 3


class Planted(Exception):
    """Raised by what the machine calls, where it is told to."""


class World:
    """What functions close over: a tensor, and whether something fails."""

    def __init__(self) -> None:
        self.weight = hf.asarray(np.linspace(0.5, 1.5, WIDTH))
        self.fails = ""

    def may_fail(self, where: str) -> None:
        if self.fails == where:
            raise Planted(where)


# Each function, and what NumPy makes of the same arrays.


def scan(world: World, x: Any) -> Any:
    def step(c: Any, row: Any) -> Any:
        world.may_fail("body")
        return c * 0.5 + row * world.weight, hf.sum(c)

    return hf.scan(step, hf.zeros(WIDTH, dtype=hf.float64), x)


def scan_model(w: NDArray, x: NDArray) -> Any:
    c, sums = np.zeros(WIDTH), []
    for row in x:
        sums.append(c.sum())
        c = c * 0.5 + row * w
    return c, np.asarray(sums)


def loop(world: World, x: Any) -> Any:
    pace = hf.sum(hf.abs(x), axis=0) * 0.1 + hf.abs(world.weight)

    def step(n: Any, c: Any) -> Any:
        total = hf.cond(hf.sum(c) > 5, lambda: c + 2 * pace, lambda: c + pace)
        return n + 1, total

    return hf.while_loop(lambda n, c: (n < 10) & (hf.sum(c) < 50), step, (0, pace * 0))


def loop_model(w: NDArray, x: NDArray) -> Any:
    pace = np.abs(x).sum(0) * 0.1 + np.abs(w)
    n, c = 0, pace * 0
    while n < 10 and c.sum() < 50:
        c = c + (2 * pace if c.sum() > 5 else pace)
        n += 1
    return n, c


def writes(world: World, x: Any) -> Any:
    before, total = world.weight * 1, hf.sum(hf.sin(hf.astype(x, hf.float64)))
    world.weight[1:] += hf.fori_loop(0, 3, lambda _, c: c * 0.5, total)
    return before


def writes_model(w: NDArray, x: NDArray) -> Any:
    before = w.copy()
    w[1:] += np.sin(x.astype(np.float64)).sum() / 8
    return before


def mask(world: World, x: Any) -> Any:
    return x[x > 0] * 2, hf.sum(world.weight)


def mask_model(w: NDArray, x: NDArray) -> Any:
    return x[x > 0] * 2, w.sum()


def slope(world: World, x: Any) -> Any:
    def loss(w: Any) -> Any:
        return hf.sum(hf.scan(lambda c, row: (c * w + row, None), w * 0 + 1, x)[0])

    return hf.grad(loss)(world.weight)


def slope_model(w: NDArray, x: NDArray) -> Any:
    c, d = np.ones(WIDTH), np.zeros(WIDTH)
    for row in x:
        c, d = c * w + row, d * w + c
    return d


def tells(world: World, x: Any) -> Any:
    def host(total: NDArray) -> NDArray:
        world.may_fail("callback")
        return np.asarray(total, np.float64) * 2

    return hf.map(
        lambda row: hf.callback(host, hf.spec("f64[]"), hf.sum(row)), x
    ) + hf.sum(world.weight)


def tells_model(w: NDArray, x: NDArray) -> Any:
    return x.sum(1) * 2 + w.sum()


Model = Callable[[NDArray, NDArray], Any]
FUNCTIONS: Final[dict[str, tuple[Callable[[World, Any], Any], Model]]] = {
    "scan": (scan, scan_model),
    "loop": (loop, loop_model),
    "writes": (writes, writes_model),
    "mask": (mask, mask_model),
    "slope": (slope, slope_model),
    "tells": (tells, tells_model),
}
names = st.sampled_from(sorted(FUNCTIONS))


def drawn(rows: int, seed: int, layout: str, dtype: str) -> NDArray:
    x = np.random.default_rng(seed).normal(size=(2 * rows, WIDTH)).astype(dtype)
    match layout:
        case "sliced":
            return x[::2]
        case "columns":
            return np.asfortranarray(x[:rows])
        case _:
            return x[:rows]


arrays = st.builds(
    drawn,
    st.integers(0, 5),
    st.integers(0, 3),
    st.sampled_from(["rows", "columns", "sliced"]),
    st.sampled_from(["float64", "float64", "float32"]),
)


def close(got: Any, expected: Any, tolerance: float = 1e-9) -> None:
    if isinstance(expected, tuple):
        for g, e in zip(got, expected, strict=True):
            close(g, e, tolerance)
    else:
        np.testing.assert_allclose(
            np.asarray(got), expected, rtol=tolerance, atol=tolerance
        )


def rounding(x: NDArray) -> float:
    """How far a result may be away."""
    return 1e-9 if x.dtype == np.float64 else 1e-5


def endless(x: Any) -> Any:
    return hf.while_loop(lambda c: hf.sum(c) > -1, lambda c: c * 0.5, x * x)


class Calls(RuleBasedStateMachine):
    @initialize(dynamic=st.sampled_from([None, True, False]))
    def begin(self, dynamic: Any) -> None:
        self.world, self.weight = World(), np.linspace(0.5, 1.5, WIDTH)
        self.jitted = {name: self.compiled(name, dynamic) for name in FUNCTIONS}
        self.endless = hf.jit(endless)
        self.double = hf.jit(lambda x: hf.exp(x) * 2, donate=(0,))

    def compiled(self, name: str, dynamic: Any) -> Callable[[Any], Any]:
        f, world = FUNCTIONS[name][0], self.world
        return hf.jit(lambda x: f(world, x), dynamic=dynamic)  # type: ignore[no-any-return]

    def check(self, run: Callable[[Any], Any], name: str, x: NDArray) -> None:
        got = run(hf.asarray(x))
        close(got, FUNCTIONS[name][1](self.weight, x), rounding(x))

    # --- what happens

    @rule(name=names, x=arrays)
    def call(self, name: str, x: NDArray) -> None:
        self.check(self.jitted[name], name, x)

    @rule(name=names, x=arrays)
    def call_eagerly(self, name: str, x: NDArray) -> None:
        self.check(lambda a: FUNCTIONS[name][0](self.world, a), name, x)

    @rule(name=names, x=arrays, dynamic=st.booleans())
    def jit_anew(self, name: str, x: NDArray, dynamic: bool) -> None:
        self.jitted[name] = self.compiled(name, dynamic)
        self.check(self.jitted[name], name, x)

    @rule(at=st.integers(0, WIDTH - 1), value=st.floats(-1, 1))
    def write(self, at: int, value: float) -> None:
        self.world.weight[at] = value
        self.weight[at] = value

    @rule(x=arrays)
    def several_threads(self, x: NDArray) -> None:
        quiet = sorted(set(FUNCTIONS) - {"writes"})
        with ThreadPoolExecutor(3) as pool:
            for _ in pool.map(lambda n: self.check(self.jitted[n], n, x), quiet * 2):
                pass

    @rule()
    def forget_kernels(self) -> None:
        clear_cache()

    @rule(size=st.sampled_from([1 << 17, 1 << 28]))  # for one kernel, or for all
    def bound_the_cache(self, size: int) -> None:
        hf.config.kernel_cache_bytes = size

    # --- what goes wrong

    @rule(x=arrays, jit=st.booleans())
    def a_trace_fails(self, x: NDArray, jit: bool) -> None:
        self.world.fails = "body"
        f = self.compiled("scan", dynamic=None)
        with pytest.raises(Planted):
            (f if jit else lambda a: scan(self.world, a))(hf.asarray(x))
        self.world.fails = ""
        self.check(f, "scan", x)

    @precondition(lambda self: hasattr(self, "world"))
    @rule(x=arrays.filter(len))
    def a_callback_fails(self, x: NDArray) -> None:
        self.check(self.jitted["tells"], "tells", x)
        self.world.fails = "callback"
        with pytest.raises(Planted):
            self.jitted["tells"](hf.asarray(x))
        self.world.fails = ""

    @rule(name=names, wrong=st.sampled_from([(), (2,), (2, WIDTH + 1), (1, 2, 2)]))
    def a_wrong_shape(self, name: str, wrong: Any) -> None:
        before = np.array(self.world.weight)
        try:
            self.jitted[name](hf.asarray(np.ones(wrong)))
        except HopflowError:  # some functions take some of them
            np.testing.assert_array_equal(np.asarray(self.world.weight), before)
        self.weight = np.array(self.world.weight)

    @rule(x=arrays)
    def a_donated_tensor_is_gone(self, x: NDArray) -> None:
        given = hf.asarray(x.copy())
        close(self.double(given), np.exp(x) * 2, rounding(x))
        with pytest.raises(InvalidTensorError):
            self.jitted["mask"](given)

    @rule()
    def an_interrupt(self) -> None:
        stopped: list[BaseException] = []
        running = threading.Event()

        def run() -> None:
            running.set()
            try:
                self.endless(hf.asarray(np.ones(4)))
            except KeyboardInterrupt as error:
                stopped.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        running.wait()
        while thread.is_alive():
            hf.interrupt(thread.ident)
            thread.join(0.05)
        assert len(stopped) == 1

    # --- what holds at all times

    @invariant()
    def nothing_is_left_behind(self) -> None:
        assert current() is BOTTOM

    @invariant()
    def the_captured_tensor_is_as_the_model_says(self) -> None:
        if hasattr(self, "world"):
            close(self.world.weight, self.weight)

    def teardown(self) -> None:
        hf.config.kernel_cache_bytes = 1 << 28


@pytest.fixture(autouse=True)
def own_cache_size() -> Iterator[None]:
    size = hf.config.kernel_cache_bytes
    yield
    hf.config.kernel_cache_bytes = size


TestCalls = Calls.TestCase
TestCalls.settings = settings(max_examples=12, stateful_step_count=20)
