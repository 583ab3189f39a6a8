"""`control_flow`: plain Python gives the same on numbers as, rewritten, on tensors."""

from typing import Any

import numpy as np
import pytest

import hopflow
from hopflow import control_flow, pytree
from hopflow.errors import CheckError
from hopflow.testing.executions import NAMES, RUNNERS, agree

hf: Any = hopflow

# --- functions ------------------------------------------------------------------------


def sign(x: Any) -> Any:
    if x > 0:
        return 1
    if x < 0:
        return -1
    return 0


def one_branch(x: Any) -> Any:
    y = x + 1
    if y > 2:
        y = y * 10
    return y


def collatz(n: Any) -> Any:
    steps = 0
    while n != 1:
        if n % 2 == 0:
            n = n // 2
        else:
            n = 3 * n + 1
            steps += 1
        steps += 1
    return steps


def halves(n: Any) -> Any:
    k = 0
    while n > -1:
        n = n // 2
        k += 1
        if n == 0:
            break
        if n == 3:
            k = k * 100
            continue
        k += 10
    else:
        k = -1
    return k


def first_multiple(n: Any) -> Any:
    for i in range(2, n, 3):
        if i % 4 == 0:
            return i
    return -n


def pairs(n: Any) -> Any:
    total = 0
    for i in range(n):
        for j in range(i, -1, -1):
            if (i + j) % 3 == 0 and not j > 2:
                continue
            if i * j > 12:
                break
            total += i * j
        else:
            total += 1000
    return total


def search(n: Any) -> Any:
    for i in range(1, n):
        for j in range(1, i):
            if i * i + j * j == 25:
                return i * 10 + j
    return 0


def not_found(n: Any) -> Any:
    found = 0
    for i in range(n):
        if i > 6:
            found = i * 100
            break
    else:
        found = -1
    return found


def conditions(n: Any) -> Any:
    a = 1 if n > 2 else 2
    b = 0 < n <= 4 < 7
    c = n > 3 and (n % 2 == 0 or n == 5)
    return a + (10 if b else 20) + (100 if not c else 200)


def guarded(n: Any) -> Any:
    if n != 0 and 12 // n > 2:
        return 12 // n
    return 0


def truth(n: Any) -> Any:
    count = 0
    while n:
        n = n // 2
        count = count + 1
    return count


def steps_down(n: Any) -> Any:
    last = 0
    for i in range(n, 0, -2):
        last = last * 3 + i
    return last


def temporaries(n: Any) -> Any:
    total = 0
    for i in range(n):
        if i % 2 == 0:
            square = i * i
            total += square
        else:
            cube = i * i * i
            total -= cube
    return total


def deep(n: Any) -> Any:
    if n > 1:
        if n > 3:
            if n > 5:
                return 5
            n = n + 1
        else:
            n = n * 7
        n = n + 100
    return n * 2


def of_functions(n: Any) -> Any:
    scale = 3

    def inner(k: Any) -> Any:
        if k > 2:
            return k * scale
        return k

    total = 0
    for i in range(n):
        total += inner(i)
    return total


def with_pairs(n: Any) -> Any:
    a, b = {"x": 0}, (1, 2)
    for _ in range(n):
        a, b = {"x": a["x"] + b[1]}, (b[1], b[0] + b[1])
    return a["x"] + b[0]


def unrolled(n: Any) -> Any:
    out = []
    for k in (1, 2, 3):
        for name in ["a", "b"]:
            out.append(n * k if name == "a" else n - k)
    kind = "long" if len(out) > 3 else "short"
    if kind == "long":
        out = out[::-1]
    found = 0
    for value in out:
        if value > 6:
            break
        found += value
    return found


FUNCTIONS = [
    *(sign, one_branch, collatz, halves, first_multiple, pairs, search, not_found),
    *(conditions, guarded, truth, steps_down, temporaries, deep, of_functions),
    *(with_pairs, unrolled),
]


def run_eager(f: Any, *args: Any) -> Any:
    return f(*args)


def run_debug(f: Any, *args: Any) -> Any:
    with hf.debug():
        return f(*args)


def run_jit(f: Any, *args: Any) -> Any:
    return hf.jit(f)(*args)


def run_traced(f: Any, *args: Any) -> Any:
    return hf.trace(f, *args)(*args)


def run_vmap(f: Any, *args: Any) -> Any:
    return hf.vmap(f)(*[hf.stack([a, a]) for a in args])[1]


RUNS = [run_eager, run_debug, run_jit, run_traced, run_vmap]


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("f", FUNCTIONS)
def test_tensors_go_the_way_that_numbers_go(run: Any, f: Any) -> None:
    rewritten = hf.control_flow(f)
    for n in range(-2 if f in (sign, conditions, guarded) else 1, 9, 1):
        assert rewritten(n) == f(n)  # numbers stay Python
        assert run(rewritten, hf.asarray(n)).item() == f(n)


# --- tensors --------------------------------------------------------------------------


@control_flow
def clipped_sum(rows: Any, most: Any) -> Any:
    total = hf.zeros(rows.shape[1])
    for row in rows:
        if hf.sum(row) < 0:
            continue
        total += row
        if hf.max(total) > most:
            return total, True
    return total, False


@pytest.mark.parametrize("run", RUNS[:-1])
@pytest.mark.parametrize("most", [2.0, 9.0])
def test_a_loop_over_a_tensor_takes_its_rows(run: Any, most: float) -> None:
    rows = np.array([[1, 1], [-5, 1], [2, 0], [1, 1]], np.float32)
    want = ([3.0, 1.0], True) if most == 2 else ([4.0, 2.0], False)
    found = run(clipped_sum, hf.asarray(rows), hf.asarray(most))
    agree(found, (np.array(want[0], np.float32), np.array(want[1])))


def test_a_loop_over_a_symbolic_size_is_one_program() -> None:
    @control_flow
    def f(x: Any) -> Any:
        total = 0.0
        for i in range(x.shape[0]):
            total += x[i] * i
        return total

    jitted = hf.jit(f, dynamic=True)
    before = hf.stats().traces
    for n in (0, 1, 4):
        agree(jitted(hf.ones(n)), np.float32(sum(range(n))))
    assert hf.stats().traces == before + 1


def test_gradients_go_through() -> None:
    def power(x: Any, n: Any) -> Any:
        y = x
        while n > 1:
            y = y * x if n % 2 == 0 else y + y
            n -= 1
        return y

    want = 3 * 1.5**2 * 2  # y = 2 x**3 for n = 4
    grad = hf.grad(hf.control_flow(power))
    agree(grad(hf.asarray(1.5), hf.asarray(4)), np.float32(want))
    agree(hf.jit(grad)(hf.asarray(1.5), hf.asarray(4)), np.float32(want))


def test_writes_reach_the_tensor() -> None:
    @control_flow
    def f(x: Any) -> Any:
        for i in range(hf.asarray(3)):
            if x[i] > 1:
                x[i] = 0.0

    x = hf.asarray([0.5, 2.0, 3.0])
    hf.jit(f)(x)
    assert x.tolist() == [0.5, 0.0, 0.0]


@pytest.mark.parametrize("run", RUNNERS, ids=NAMES)
def test_the_condition_of_a_loop_is_asked_once_a_step(run: Any) -> None:
    asked: list[int] = []

    def f(n: Any) -> Any:
        def positive(n: Any) -> Any:
            hf.callback(lambda n: asked.append(n.item()), None, n)
            return n > 0

        while positive(n):
            n = n - 1
        return n

    for n, expected in ((3, [3, 2, 1, 0]), (0, [0])):
        asked.clear()
        assert run(control_flow(f), hf.asarray(n)).item() == 0
        assert asked == expected


def chosen(n: Any) -> Any:
    first = (n > 2 and n) or -1
    second = n and n > 1 and n * 2.0
    third = (n > 5 or n) + (n < 3 or n < 2 or 7)
    return first * 100 + second * 10 + third if not (n > 6 and n < 8) else 0


@pytest.mark.parametrize("run", RUNNERS, ids=NAMES)
def test_and_and_or_have_the_values_that_python_gives_them(run: Any) -> None:
    for n in range(9):
        assert run(control_flow(chosen), hf.asarray(n)).item() == chosen(n)


@control_flow
def factorial(n: Any) -> Any:
    return 1 if n <= 1 else n * factorial(n - 1)


class Doubling:
    factor = 2

    @control_flow
    def past(self, x: Any) -> Any:
        while x < 100:
            x = x * Doubling.factor
        return x


def test_a_function_may_name_itself_and_a_method_its_class() -> None:
    assert factorial(5) == 120
    assert hf.jit(Doubling().past)(hf.asarray(3)).item() == 192


def test_an_assertion_is_a_check() -> None:
    @control_flow
    def f(x: Any) -> Any:
        assert x > 0, "it must be positive"
        return x

    assert hf.jit(f)(hf.asarray(1.0)).item() == 1.0
    with pytest.raises(CheckError, match="it must be positive"):
        hf.jit(f)(hf.asarray(-1.0))
    with pytest.raises(AssertionError, match="it must be positive"):
        f(-1.0)


def test_the_closure_and_the_class_stay() -> None:
    calls = 0

    class Base:
        def scale(self) -> Any:
            return 2

    class Model(Base):
        def __init__(self) -> None:
            self.__hidden = 5

        @control_flow
        def scale(self, x: Any = 1, *, more: Any = 0) -> Any:
            """Says so."""
            nonlocal calls
            calls += 1
            if x > 0:
                return x * super().scale() + self.__hidden + more
            return -x

    model = Model()
    assert [model.scale(), model.scale(3, more=1), model.scale(-1)] == [7, 12, 1]
    assert hf.jit(model.scale)(hf.asarray(3)).item() == 11
    assert calls == 4
    assert Model.scale.__doc__ == "Says so."


def test_skip_leaves_a_function_alone() -> None:
    @control_flow
    def f(x: Any) -> Any:
        @control_flow.skip
        def g(y: Any) -> Any:
            return 1 if y > 0 else 2

        return g(x)

    def h(x: Any) -> Any:
        return x

    assert hf.control_flow(hf.control_flow.skip(h)) is h
    assert f(3) == 1
    with pytest.raises(hf.errors.TraceError, match="bool"):
        hf.jit(f)(hf.asarray(3))


# --- updates --------------------------------------------------------------------------


def updated_while(x: Any, y: Any) -> Any:
    other = y
    n = 0
    while n < x:
        y += x
        if n > 1:
            y *= 2
        n += 1
    return y, other, n


def updated_for(x: Any, y: Any) -> Any:
    other = y[::-1]
    total = 0
    for item in y * x:
        if item > 3:
            break
        y -= item
        total += item * other[0]
    return y, other, total


@pytest.mark.parametrize("f", [updated_while, updated_for])
@pytest.mark.parametrize("way", [lambda f: f, hf.jit, hf.functionalize])
def test_an_update_writes_to_the_tensor_which_other_names_may_have(
    f: Any, way: Any
) -> None:
    def arguments() -> tuple[Any, Any]:
        return hf.asarray(3.0), hf.asarray([0.25, 0.5, 2.0])

    expected, given = arguments(), arguments()
    with hf.debug():
        want = f(*expected)
    agree(way(hf.control_flow(f))(*given), want)
    agree(given, expected)
    slope, wanted = (
        hf.grad(lambda x, f=f: hf.sum(f(x, arguments()[1])[0]))(hf.asarray(3.0))
        for f in (way(hf.control_flow(f)), f)
    )
    agree(slope, wanted)
    rows = (hf.stack([row, row]) for row in arguments())
    found = hf.vmap(way(hf.control_flow(f)))(*rows)
    for k in range(2):
        agree(pytree.tree_map(lambda leaf, k=k: leaf[k], found), want)


@pytest.mark.parametrize("way", [lambda f: f, hf.jit])
def test_a_number_that_is_updated_is_another_one(way: Any) -> None:
    def f(xs: Any) -> Any:
        total: Any = 0
        for x in xs:
            total += x if x > 1 else 0.5
        return total

    agree(way(hf.control_flow(f))(hf.asarray([1.0, 2.0, 3.0])), hf.asarray(5.5))


def first_above(x: Any) -> Any:
    for item in x:
        if item > 2:
            return item
    else:
        return -1.0


def test_a_loop_may_return_and_so_may_its_else() -> None:
    for x in [1.0, 3.0], [1.0, 1.0]:
        found = hf.jit(hf.control_flow(first_above))(hf.asarray(x))
        agree(found, hf.asarray(first_above(x)))


def returns_from_a_for(x: Any) -> Any:
    total = 0.0
    for item in x:
        if total > 3:
            return total
        total += item
    return -total


def returns_from_a_range(x: Any) -> Any:
    total = 0
    for k in range(x.shape[0]):
        if total > 3:
            return total
        total += x[k]
    return -total


def returns_from_a_while(x: Any) -> Any:
    total, k = 0.0, 0
    while k < x[0]:
        if total > 3:
            return total, k
        total, k = total + x[1], k + 1
    return -total, k


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("x", [[1.0, 1.0], [2.0, 3.0, 4.0], [5.0, 3.0], [0.0, 9.0]])
@pytest.mark.parametrize(
    "f", [returns_from_a_for, returns_from_a_range, returns_from_a_while]
)
def test_a_return_may_depend_on_what_begins_as_a_number(
    f: Any, x: list[float], dynamic: bool
) -> None:
    rewritten = hf.control_flow(f)
    expected = f(hf.asarray(x))
    for result in (
        rewritten(hf.asarray(x)),
        hf.jit(rewritten, dynamic=dynamic)(hf.asarray(x)),
    ):
        for a, b in zip(
            *(pytree.flatten(t)[0] for t in (result, expected)), strict=True
        ):
            assert float(a) == float(b)
