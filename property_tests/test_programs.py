"""Random programs mean the same however they are run.

A program is a tree of numbers: what each step does is decided while it runs, from the
types of the values that there are. All floats are small whole numbers, so that every
order of a sum gives the same bits, and what is compared is compared exactly.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import pytest
from hypothesis import assume, given

import hopflow
from hopflow.compiler.pipeline import lower
from hopflow.dtypes import as_dtype
from hopflow.errors import MutationError
from hopflow.loop_ir import interpreter
from hopflow.testing.meanings import MEANINGS
from hopflow.testing.programs import (
    Operation,
    Pool,
    Step,
    axis,
    broadcasts,
    run,
    write,
)
from hopflow.testing.strategies import steps

hf: Any = hopflow
pytestmark = pytest.mark.usefixtures("verified")

BOUND: Final = 400.0
DTYPES: Final = ("float64", "float32", "int64", "int32", "int8", "bool", "float16")
ARGUMENTS: Final = (
    np.arange(20, dtype=np.float64) % 7 - 3,
    np.arange(12, dtype=np.float32).reshape(4, 3) - 5,
    np.array([4, -2, 7], np.int32),
    np.array([[2.0, -1.0, 3.0]] * 4),
    np.int64(3),
    np.array([True, False, True]),
)


# --- programs -------------------------------------------------------------------------


class Exact(Pool):
    """Values that are small whole numbers."""

    def bounded(self, x: Any) -> Any:
        if x.dtype.kind != "f":
            return x
        return hf.minimum(hf.maximum(x, -BOUND), BOUND)

    def number(self, x: Any) -> Any:
        return hf.astype(x, hf.int32) if x.dtype.kind == "b" else x


# --- operations on arrays -------------------------------------------------------------


def _binary(f: Callable[[Any, Any], Any]) -> Operation:
    def apply(p: Pool, a: int, b: int, *_: int) -> Any:
        x = p.number(p.pick(a))
        return p.bounded(f(x, p.number(p.mate(b, x))))

    return apply


def _convert(p: Pool, a: int, b: int, *_: int) -> Any:
    x, dtype = p.pick(a), as_dtype(DTYPES[b % len(DTYPES)])
    return p.bounded(hf.astype(x, dtype))


def _divide(p: Pool, a: int, b: int, c: int, _: int) -> Any:
    x = p.number(p.pick(a))
    y = p.number(p.mate(b, x))
    f = hf.floor_divide if c % 2 else hf.remainder
    return p.bounded(f(x, hf.where(y == 0, 1, y)))


def _bits(p: Pool, a: int, b: int, c: int, _: int) -> Any:
    x = p.like(a, lambda v: v.dtype.kind == "i")
    y = p.like(b, lambda v: v.dtype.kind == "i" and broadcasts(v.shape, x.shape))
    return (hf.bitwise_and, hf.bitwise_or, hf.bitwise_xor)[c % 3](x, y)


def _unary(p: Pool, a: int, b: int, *_: int) -> Any:
    x = p.number(p.pick(a))
    return p.bounded((hf.negative, hf.abs, hf.sign, hf.square, hf.trunc)[b % 5](x))


OPERATIONS: Final[dict[str, Callable[..., Any]]] = {
    "add": _binary(lambda x, y: x + y),
    "subtract": _binary(lambda x, y: x - y),
    "multiply": _binary(lambda x, y: x * y),
    "maximum": _binary(lambda x, y: hf.maximum(x, y)),
    "less": _binary(lambda x, y: x < y),
    "equal": _binary(lambda x, y: x == y),
    "any": axis(lambda m, x, axis: m.any(x > 0, axis=axis)),
    "unary": _unary,
    "argmin": axis(lambda m, x, axis: m.argmin(x, axis=axis)),
    "convert": _convert,
    "divide": _divide,
    "bits": _bits,
    "write": write,
}
Exact.operations = OPERATIONS


def program(body: Sequence[Step]) -> Callable[..., Any]:
    """A function of `ARGUMENTS` that returns its newest values."""

    def f(*args: Any) -> Any:
        p = Exact(args)
        run(p, body)
        return (*(p.pick(k) for k in range(6)), *p.owned[:4])

    return f


# --- the property ---------------------------------------------------------------------


def same(name: str, got: Sequence[Any], want: Sequence[Any]) -> None:
    assert len(got) == len(want)
    for k, (a, b) in enumerate(zip(got, want, strict=True)):
        x, y = (np.asarray(v) for v in (a, b))
        assert x.dtype == y.dtype, f"{name}, result {k}"
        np.testing.assert_array_equal(x, y, f"{name}, result {k}")


def loop_ir_results(f: Callable[..., Any], args: Sequence[Any]) -> list[Any]:
    """The results of the scheduled program, by the interpreter of the Loop IR."""
    jitted = hf.jit(f)
    jitted(*args)
    _, scheduled = lower(jitted.graph)
    arrays = [np.asarray(a) for a in (*args, *jitted._present.compiled.captured)]
    return interpreter.run(scheduled, (), arrays)


@given(steps([*sorted(OPERATIONS), *["write"] * 6], depth=2))
def test_all_meanings_of_a_program_agree(body: Any) -> None:
    f = program(body)
    results: dict[str, Any] = {}
    for meaning in MEANINGS:
        args = [hf.asarray(np.array(a)) for a in ARGUMENTS]
        try:
            results[meaning.name] = meaning.run(f, *args)
        except MutationError:  # what tracing cannot do, it says
            assume(False)
        for arg, before in zip(args, ARGUMENTS, strict=True):
            np.testing.assert_array_equal(np.asarray(arg), before)
    want = results.pop("debug")
    for name, got in results.items():
        same(name, got, want)
    same("loop ir", loop_ir_results(f, ARGUMENTS), want)
