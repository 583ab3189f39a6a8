"""A Python integer means the same in all modes: one that does not fit is an error."""

import functools
import operator
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pytest

import hopflow as hf
from hopflow import pytree
from hopflow.errors import (
    ArgumentRangeError,
    ArgumentValueError,
    CheckError,
    DataDependentError,
    DTypeError,
    GuardError,
    PowerError,
)
from hopflow.testing.executions import agree

pytestmark = pytest.mark.slow

INTEGERS: Final = [
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
]
NARROW: Final = [d for d in INTEGERS if not d.endswith("64")]
COMPARISONS: Final[dict[str, Callable[[Any, Any], Any]]] = {
    name: getattr(operator, name) for name in ("lt", "le", "gt", "ge", "eq", "ne")
}
USES: Final[dict[str, Callable[[Any, Any], Any]]] = {
    "add": lambda x, n: x + n,
    "reflected": lambda x, n: n - x,
    "in place": lambda x, n: x.copy().__iadd__(n),
    "bits": lambda x, n: x & n,
    "where": lambda x, n: hf.where(x > 1, x, n),
    "maximum": lambda x, n: hf.maximum(x, n),
    "base": lambda x, n: n**x,
    "at": lambda x, n: x.at[0].set(n),
    "full": lambda x, n: hf.full((2,), n, dtype=x.dtype),
    "full_like": lambda x, n: hf.full_like(x, n),
    "astype": lambda x, n: hf.astype(n, x.dtype),
    "asarray": lambda x, n: hf.asarray(n, dtype=x.dtype),
    "pad": lambda x, n: hf.pad(x, 1, constant_values=n),
    "cond": lambda x, n: hf.cond(x[0] > 0, lambda: x + n, lambda: x),
    "loop": lambda x, n: hf.fori_loop(0, 2, lambda _, c: c + n, x),
    "vmap": lambda x, n: hf.vmap(lambda e: e * n)(x),
}


def debugged(f: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        with hf.debug():
            return f(*args)

    return run


def closed_over(f: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x, n: hf.jit(lambda x: f(x, n))(x)


MODES: Final[dict[str, Callable[..., Any]]] = {
    "eager": lambda f: f,
    "debug": debugged,
    "jit": hf.jit,
    "static": lambda f: hf.jit(f, dynamic=False),
    "dynamic": lambda f: hf.jit(f, dynamic=True),
    "closure": closed_over,
    "trace": lambda f: lambda x, n: hf.trace(f, x, n, mode="symbolic")(x, n),
}
every_mode = pytest.mark.parametrize("mode", MODES)


@every_mode
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("dtype", ["int8", "uint16"])
def test_an_integer_that_does_not_fit_is_an_error(
    mode: str, use: str, dtype: str
) -> None:
    x = hf.asarray([1, 2], dtype=dtype)
    for n in (70_000, -70_000):
        with pytest.raises(ArgumentRangeError, match=f"{n} does not fit {dtype}"):
            MODES[mode](USES[use])(x, n)
    found, wanted = MODES[mode](USES[use])(x, 5), USES[use](x, 5)
    assert found.dtype == wanted.dtype
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("dtype", NARROW)
def test_every_integer_dtype_has_its_own_limits(dtype: str) -> None:
    info = np.iinfo(dtype)
    x, add = hf.zeros((2,), dtype=dtype), hf.jit(lambda x, n: x + n)
    for n in (int(info.max), int(info.min), 1):
        np.testing.assert_array_equal(add(x, n), np.full(2, n, dtype))
    for n in (int(info.max) + 1, int(info.min) - 1):
        with pytest.raises(ArgumentRangeError, match=f"{n} does not fit {dtype}"):
            add(x, n)


def test_an_integer_beyond_all_floats_is_an_error() -> None:
    with pytest.raises(ArgumentRangeError, match="0 does not fit float32"):
        hf.ones(2) + 10**400


def test_one_trace_serves_all_integers_that_fit() -> None:
    add = hf.jit(lambda x, n: x + n)
    x = hf.zeros((2,), dtype="int8")
    before = hf.stats().traces
    for n in (1, 2, 100, -100):
        assert add(x, n).tolist() == [n, n]
    assert hf.stats().traces == before + 1
    assert any("127" in guard for guard in add.guards)


def test_an_integer_of_a_tensor_is_checked_by_the_run() -> None:
    @hf.jit
    def add(x: Any, n: Any) -> Any:
        return x + hf.sum(n).item()

    x = hf.asarray([1, 2], dtype="int8")
    assert add(x, hf.asarray([3, 4])).tolist() == [8, 9]
    with pytest.raises(CheckError, match=r"integer u0 must fit int8 \(test_numbers"):
        add(x, hf.asarray([100, 200]))


def test_an_integer_of_a_tensor_that_never_fits_is_refused() -> None:
    @hf.jit
    def add(x: Any, mask: Any) -> Any:
        return x + (x[mask].shape[0] + 300)

    x = hf.asarray([1, 2], dtype="int8")
    with pytest.raises(
        ArgumentRangeError, match=r"integer u0 \+ 300 does not fit int8"
    ):
        add(x, x > 1)


@every_mode
@pytest.mark.parametrize("name", COMPARISONS)
def test_comparisons_know_integers_of_any_size(mode: str, name: str) -> None:
    compare = COMPARISONS[name]
    for dtype in INTEGERS:
        info = np.iinfo(dtype)
        array = np.asarray([info.min, 1, info.max], dtype)
        limits = [int(info.min) - 1, 5, int(info.max) + 1]
        for n in limits if dtype.endswith("64") else [*limits, 2**40, -(2**40)]:
            wanted = [compare(int(e), n) for e in array]
            x = hf.asarray(array)
            assert MODES[mode](compare)(x, n).tolist() == wanted
            reflected = MODES[mode](lambda x, n: compare(n, x))(x, n)
            assert reflected.tolist() == [compare(n, int(e)) for e in array]


@pytest.mark.parametrize("name", COMPARISONS)
def test_comparisons_know_integers_of_the_run(name: str) -> None:
    compare = COMPARISONS[name]

    @hf.jit
    def run(x: Any, n: Any) -> Any:
        return compare(x, hf.sum(n).item())

    for n in (300, -300, 1):
        wanted = [compare(e, n) for e in (1, 127)]
        assert (
            run(hf.asarray([1, 127], dtype="int8"), hf.asarray([n])).tolist() == wanted
        )


@every_mode
def test_what_an_integer_becomes_is_as_strong_as_in_plain_python(mode: str) -> None:
    x = hf.asarray([1, 2], dtype="int8")
    assert MODES[mode](lambda x, n: x + hf.asarray(n))(x, 5).dtype == hf.int64
    assert MODES[mode](lambda x, n: x + n)(x, 5).dtype == hf.int8
    kept = MODES[mode](lambda x, n: hf.astype(x + 300.0, hf.result_type(x, n)))
    assert kept(x, 5).dtype == hf.int8


@every_mode
def test_zero_and_one_are_bools(mode: str) -> None:
    write = MODES[mode](lambda x, n: x.at[0].set(n))
    for n in (0, 1):
        assert write(hf.asarray([False, True]), n).tolist() == [bool(n), True]
    with pytest.raises(
        TypeError, match="cannot be written into a tensor of dtype bool"
    ):
        write(hf.asarray([False]), 2)


# --- powers of integers ---------------------------------------------------------------


@every_mode
@pytest.mark.parametrize("dtype", INTEGERS)
def test_powers_of_integers_are_those_of_numpy(mode: str, dtype: str) -> None:
    info, draw = np.iinfo(dtype), np.random.default_rng(0)
    base = draw.integers(info.min, info.max, 40, dtype=dtype)
    base[:5] = 0, 1, 2, 3, info.max
    exponent = draw.integers(0, min(info.max, 300), 40, dtype=dtype)
    wanted = np.power(base, exponent)
    found = MODES[mode](operator.pow)(hf.asarray(base), hf.asarray(exponent))
    np.testing.assert_array_equal(found, wanted)
    assert found.dtype.name == dtype


@every_mode
def test_an_exponent_may_be_a_number_of_any_size(mode: str) -> None:
    x = hf.asarray([2, 3, -1], dtype="int8")
    assert MODES[mode](operator.pow)(x, 301).tolist() == [0, pow(3, 301, 256), -1]


@every_mode
@pytest.mark.parametrize("exponent", [-1, np.int64(-2), np.asarray([1, -3])])
def test_an_integer_to_a_negative_power_is_an_error(mode: str, exponent: Any) -> None:
    with pytest.raises(PowerError, match=r"to the negative power -\d"):
        MODES[mode](operator.pow)(hf.asarray([2, 3]), exponent)
    with pytest.raises(PowerError, match=r"to the negative power -\d"):
        MODES[mode](lambda x, n: 2 ** (x * n))(hf.asarray([2, 3]), hf.asarray([1, -1]))


@pytest.mark.parametrize(
    "call",
    [
        lambda x, n: hf.vmap(operator.pow)(x, n),
        lambda x, n: hf.fori_loop(0, 2, lambda _, c: c**n, x),
        lambda x, n: hf.cond(x[0] > 0, lambda: x**n, lambda: x),
        lambda x, n: x ** hf.min(n).item(),
    ],
    ids=["vmap", "loop", "cond", "item"],
)
def test_compiled_code_names_the_line_of_a_negative_power(call: Any) -> None:
    x, n = hf.asarray([2, 3]), hf.asarray([2, -1])
    with pytest.raises(PowerError, match=r"pow \(test_numbers.py:\d+\): .* power -1"):
        hf.jit(call)(x, n)
    assert hf.jit(call)(x, hf.asarray([2, 1])).shape == (2,)


@every_mode
def test_what_is_not_computed_has_no_negative_power(mode: str) -> None:
    x, n = hf.asarray([2, 3]), hf.asarray(-1)
    assert MODES[mode](operator.pow)(x[:0], n).shape == (0,)
    unused = MODES[mode](lambda x, n: hf.cond(n > 0, lambda: x**n, lambda: x))
    assert unused(x, n).tolist() == [2, 3]
    half = MODES[mode](lambda x, n: x.astype(hf.float32) ** n)
    assert half(hf.asarray([2, 4]), n).tolist() == [0.5, 0.25]


@pytest.mark.parametrize("dynamic", [None, True], ids=["jit", "dynamic"])
@pytest.mark.parametrize(
    "f",
    [
        lambda _, u: u.item() + 0,
        lambda x, u: x * u.item(),
        lambda x, u: x[u:],
        lambda x, u: x[:u],
        lambda x, u: hf.sum(x[u:]),
        lambda x, u: operator.setitem(x, slice(u, None), 9.0),
        lambda _, u: hf.zeros(u),
    ],
)
def test_a_u64_beyond_i64_that_becomes_a_number_is_an_error(
    f: Callable[[Any, Any], Any], dynamic: bool | None
) -> None:
    jitted = hf.jit(f, dynamic=dynamic)
    x = hf.ones(3)
    for first in (2**63, 2**64 - 5, 2**64 - 10**9):
        with pytest.raises((ArgumentValueError, CheckError), match=f"{first}"):
            jitted(x, hf.asarray(first, dtype="uint64"))
        assert x.tolist() == [1.0, 1.0, 1.0]


def test_a_u64_that_only_the_run_knows_is_checked() -> None:
    @hf.jit
    def f(x: hf.Tensor, u: hf.Tensor) -> hf.Tensor:
        return x[(u + 1).item() :]

    assert f(hf.ones(3), hf.asarray(1, dtype="uint64")).shape == (1,)
    with pytest.raises(CheckError, match="18446744073709551612"):
        f(hf.ones(3), hf.asarray(2**64 - 5, dtype="uint64"))


@pytest.mark.parametrize("dtype", INTEGERS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e30])
def test_a_float_that_is_no_integer_of_a_dtype_is_an_error(
    value: float, dtype: str
) -> None:
    for make in (
        lambda: hf.full((2,), value, dtype=dtype),
        lambda: hf.full_like(hf.zeros(2, dtype=dtype), value),
        lambda: hf.asarray(value, dtype=dtype),
        lambda: hf.jit(lambda: hf.full((2,), value, dtype=dtype))(),
    ):
        with pytest.raises(ArgumentRangeError):
            make()


@pytest.mark.parametrize(
    "value", [1e30, 3e9, -(2.0**31) - 1, 2.0**31, float("nan"), -3.7]
)
@pytest.mark.parametrize(
    "f",
    [
        lambda v: hf.full((2,), v, dtype=hf.int32),
        lambda v: hf.full_like(hf.zeros(2, dtype=hf.int32), v),
        lambda v: hf.asarray(v, dtype=hf.int32),
        lambda v: hf.asarray([v, 1], dtype=hf.int32),
    ],
)
def test_a_float_of_the_arguments_fits_an_integer_dtype(f: Any, value: float) -> None:
    jitted = hf.jit(f)
    agree(jitted(1.5), f(1.5))
    if value == -3.7:
        agree(jitted(value), f(value))
        return
    for run in (f, jitted):
        with pytest.raises(ArgumentRangeError):
            run(value)


ROW: Final = hf.asarray([0.1, 0.2, 0.3], dtype=hf.float64)


def with_element(v: Any, key: Any = 0) -> Any:
    y = ROW.copy()
    y[key] = v
    y[1] += v
    return y


@pytest.mark.parametrize(
    "f",
    [
        with_element,
        lambda v: with_element(v, slice(1, None)),
        lambda v: with_element(v, ROW > 0.15),
        lambda v: with_element(v, [0, 2]),
        lambda v: ROW.at[0].add(v),
        lambda v: hf.asarray(v, dtype=hf.float64),
        lambda v: hf.asarray([[v, 1], [v / 3, ROW[0]]], dtype=hf.float64),
        lambda v: hf.fori_loop(0, 3, lambda i, c: c * ROW[i] + v, v),
        lambda v: hf.while_loop(lambda c: c < 9.0, lambda c: (c * 2.0 + ROW[0],), (v,)),
        lambda v: hf.scan(lambda c, x: (c * x + v, c), v, ROW),
        lambda v: hf.vmap(lambda x: hf.fori_loop(0, 2, lambda _, c: c * x, v))(ROW),
        lambda v: hf.grad(
            lambda x: hf.sum(hf.fori_loop(0, 2, lambda i, c: c * x[i] + v, v))
        )(ROW),
        lambda v: hf.cond(ROW[0] > 0, lambda: v / 7, lambda: ROW[0]),
    ],
)
@pytest.mark.parametrize("dynamic", [None, True])
def test_a_float_of_the_arguments_keeps_its_digits(f: Any, dynamic: Any) -> None:
    jitted = hf.jit(f, dynamic=dynamic)
    for v in (1.1, 0.3):
        pairs = zip(*(pytree.flatten(run(v))[0] for run in (jitted, f)), strict=True)
        for found, expected in pairs:
            assert found.dtype == expected.dtype
            np.testing.assert_allclose(np.asarray(found), np.asarray(expected), 1e-15)


# --- powers of constants --------------------------------------------------------------


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize(
    ("f", "numbers", "traces"),
    [
        (lambda x, t: x * 0.9**t, [1, 2, 7, 0, -3, 100], 1),
        (lambda x, t: x * 0.9**t, [1.0, 2.5, -3.0, 0.0], 1),
        (lambda x, t: x * (-2.0) ** t, [1, 2, 3, -1, -2], 1),
        (lambda x, t: x * 2**t, [1, 2, 0, 51, 7], 1),
        (lambda x, t: x * 2**t, [-1, -2, -60, -1000], 1),
        (lambda x, t: x * 2**t, [1, 2, -1, -2], 2),
        (lambda x, t: x * 2**t, [1, 2, 70, 80], 3),
        (lambda x, t: x * (-3) ** t, [1, 2, 3, 0, 32], 1),
        (lambda x, t: x * 10**t, [3, 15, 0, 1], 1),
        (lambda x, t: x * 0.0**t, [1, 2, 0], 1),
        (lambda x, t: x * (0**t + 1**t + (-1) ** t), [1, 2, 0, 33], 1),
        (lambda x, t: x * np.float64(0.9) ** t, [1, 2, -3], 1),
        (lambda x, t: x * 1.5 ** (2 * t + 1), [1, 2, -3], 1),
        (lambda x, t: x * True**t, [1, 2, 3], 1),
        (lambda x, t: x * (2**t % 5), [1, 2, 30], 1),
        (lambda x, t: hf.ones((2**t,)) * x[0], [1, 2, 5, 0], 1),
        (lambda x, t: x[: 2**t], [1, 2, 5, 0], 1),
    ],
)
def test_a_power_of_a_constant_is_one_program(
    f: Any, numbers: Any, traces: int, dynamic: Any
) -> None:
    x = hf.asarray([1.0, -0.5, 3.0], dtype=hf.float64)
    jitted = hf.jit(f, dynamic=dynamic)
    before = hf.stats().traces
    for t in numbers:
        agree(jitted(x, t), f(x, t))
    assert hf.stats().traces - before == traces


def test_a_power_of_an_integer_is_an_integer_where_it_is_pythons() -> None:
    def f(x: Any, t: Any) -> Any:
        return x * 3**t, 3**t

    jitted = hf.jit(f)
    x = hf.asarray([2, -5])
    for t in (0, 1, 5, 32, -1, -2):
        found, number = jitted(x, t)
        assert number == 3**t
        assert type(number) is type(3**t)
        assert found.dtype == (x * 3**t).dtype
        agree(found, x * 3**t)


@pytest.mark.parametrize("base", [0, 0.0])
def test_a_negative_power_of_zero_is_pythons_error(base: float) -> None:
    jitted = hf.jit(lambda x, t: x * base**t)
    assert jitted(hf.ones(1), 2).tolist() == [0]
    with pytest.raises(ZeroDivisionError):
        jitted(hf.ones(1), -1)
    huge = hf.jit(lambda x, t: x * (10**400) ** t)
    assert huge(hf.ones(1), 0).tolist() == [1]
    with pytest.raises(OverflowError, match="int too large to convert to float"):
        huge(hf.ones(1), -1)


# --- numbers in sets and dicts --------------------------------------------------------


@pytest.mark.parametrize("divisor", [7, 2**53 + 1, -3])
def test_a_quotient_of_large_integers_is_rounded_once(divisor: int) -> None:
    jitted = hf.jit(lambda n: hf.asarray(n / divisor, dtype=hf.float64))
    for n in (5, 2**53 + 3, -(2**53) - 3, 2**62 + 129, 9):
        assert jitted(n).item() == n / divisor


@pytest.mark.parametrize("dynamic", [None, True])
def test_powers_of_symbolic_bases_are_floats_where_those_of_python_are(
    dynamic: Any,
) -> None:
    def root(x: Any) -> Any:
        return x * (x.shape[0] - 4.0) ** 0.5

    def inverse(x: Any) -> Any:
        return x * (x.shape[0] - 4.0) ** -2

    def power(x: Any) -> Any:
        return x * (x.shape[0] - 4.0) ** (x.shape[0] / 2)

    for f, refused in ((root, 3), (inverse, 4), (power, 3)):
        jitted = hf.jit(f, dynamic=dynamic)
        agree(jitted(hf.ones(6)), f(hf.ones(6)))
        with pytest.raises((ZeroDivisionError, DTypeError)) as expected:
            f(hf.ones(refused))
        with pytest.raises(expected.type):
            jitted(hf.ones(refused))
        agree(jitted(hf.ones(5)), f(hf.ones(5)))


def cached(x: Any, k: Any) -> Any:
    @functools.cache
    def scale(n: Any) -> Any:
        return n + 1.0

    return x * scale(k) * scale(x.shape[0]) * scale(k)


def returned(x: Any, k: Any) -> Any:
    doubled = hf.pytree.tree_map(lambda v: 2 * v, {k: x})
    return hf.cond(x[0] > 0, lambda d: d[k], lambda d: -d[k], doubled)


@pytest.mark.parametrize(
    "f",
    [
        lambda x, k: x if k in {1, 2} else -x,
        lambda x, k: x if k in frozenset([2.0, 5.5]) else -x,
        lambda x, k: {1: x, 2: 2 * x, 5: -x, 2.5: x, 0: x, -1: 3 * x, -2: x}[k],
        lambda x, k: x * {2: 3.0}.get(k, 5.0),
        lambda x, k: x * {(2, 3): 3.0}.get((k, x.shape[0]), 5.0),
        lambda x, k: x * {(3,): 3.0}.get(x.shape, 5.0),
        lambda x, k: x * len({k, 2, k + 0, x.shape[0], 3}),
        lambda x, k: {k: x}[k] * (1 + [*dict.fromkeys([k, 2])].index(k)),
        lambda x, k: hf.fori_loop(0, 3, lambda i, c: c * {2: 3.0}.get(k, 0.5), x),
        lambda x, k: hf.vmap(lambda v: v * {2: 3.0}.get(k, 0.5))(x),
        lambda x, k: hf.grad(lambda v: hf.sum(v * {2: 3.0}.get(k, 0.5)))(x),
        lambda x, k: hash(k) * x,
        cached,
        returned,
    ],
)
@pytest.mark.parametrize("kind", [int, float])
@pytest.mark.parametrize("dynamic", [None, True])
def test_numbers_are_found_in_sets_and_dicts(f: Any, kind: Any, dynamic: Any) -> None:
    jitted = hf.jit(f, dynamic=dynamic)
    for k, size in ((2, 3), (5, 3), (2, 4), (-1, 3), (-2, 3), (0, 3), (2, 3)):
        x = hf.arange(1.0, size + 1.0)
        agree(jitted(x, kind(k)), f(x, kind(k)))
    before = hf.stats().traces
    jitted(hf.arange(1.0, 4.0), kind(2))
    assert hf.stats().traces == before


def test_a_number_that_is_looked_up_is_a_guard() -> None:
    jitted = hf.jit(lambda x, k: x if k in {1, 2} else -x)
    jitted(hf.ones(1), 2)
    assert [g.partition("  ")[0] for g in jitted.guards] == ["k == 2"]
    with pytest.raises(DataDependentError, match=r"`u0` is made by `hf\.sum"):
        hf.jit(lambda x: hf.sum(x).item() in {1, 2})(hf.ones(2, dtype=hf.int64))
    module = hf.trace(lambda x, k: x * {2: 3.0}[k], hf.ones(2), 2, mode="symbolic")
    agree(module(hf.ones(2), 2), hf.full((2,), 3.0))
    with pytest.raises(GuardError):
        module(hf.ones(2), 4)


def test_sizes_of_graphs_are_told_apart_by_their_expressions() -> None:
    graph = hf.trace(lambda x: hf.concat([x, x]), hf.spec("f32[n]"), mode="fake")
    [n], [m] = graph.graph.operands[0].type.shape, graph.graph.out_types[0].shape
    assert len({n, m, n + n, 2}) == 3


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_format_shows_the_value_of_a_number(dynamic: bool | None) -> None:
    seen: list[str] = []

    def shown(x: Any, k: Any, r: Any) -> Any:
        seen.append(f"{k:03d} {r:.2f} {x.shape[0]:>4} {k + x.shape[0]:x}")
        return x * k * r

    f = hf.jit(shown, dynamic=dynamic)
    for n, k, r in ((3, 7, 1.5), (4, 8, 2.25)):
        f(hf.ones(n), k, r)
        assert seen[-1] == f"{k:03d} {r:.2f} {n:>4} {k + n:x}"
