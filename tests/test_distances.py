"""Distances of 32 bits, of the elements that vectors gather and scatter."""

from typing import Any, Final

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import hopflow as hf
from hopflow import dtypes
from hopflow.compiler.cpu.distances import narrowed
from hopflow.compiler.cpu.target import host
from hopflow.dtypes import DType
from hopflow.loop_ir import expr as e
from hopflow.loop_ir.expr import Buffer, Expr
from hopflow.loop_ir.interpreter import run
from hopflow.loop_ir.program import Program, Store

Array = np.ndarray[Any, Any]

NAMES: Final = ("int8", "uint8", "int16", "int32", "uint32", "int64", "bool_")
INPUTS: Final = [
    Buffer(f"of_{name}", getattr(dtypes, name), (), "input") for name in NAMES
]
NUMBERS: Final = [e.cast(e.load(buffer, ()), dtypes.int64) for buffer in INPUTS]


def _combined(parts: st.SearchStrategy[Expr]) -> st.SearchStrategy[Expr]:
    names = st.sampled_from(["add", "sub", "mul", "max", "shl"])
    tests = st.builds(e.compare, st.sampled_from(["lt", "ge", "eq"]), parts, parts)
    return st.builds(e.binary, names, parts, parts) | st.builds(
        e.select, tests, parts, parts
    )


CONSTANTS: Final = st.sampled_from([0, 1, -3, 64, 1 << 31, -(1 << 31), 1 << 40])
EXPRESSIONS: Final = st.recursive(
    st.sampled_from(NUMBERS) | CONSTANTS.map(e.index), _combined, max_leaves=8
)


def _check(wide: Expr, seed: int, stays: str | None = None) -> None:
    """Require that a distance is the same modulo 2^32, of random numbers."""
    outputs = [Buffer(t.name, t, (), "output") for t in (dtypes.int64, dtypes.int32)]
    values = [wide, narrowed(wide, lambda x: x.op == stays)]
    body: list[Any] = [Store(b, (), x) for b, x in zip(outputs, values, strict=True)]
    program = Program("test", [], [*INPUTS], outputs, [], [], body, [])
    random = np.random.default_rng(seed)
    inputs = [random.integers(-(2**62), 2**62).astype(b.dtype.dtype) for b in INPUTS]
    [expected, found] = run(program, [], inputs)
    assert found == expected.astype(np.int32)


@given(EXPRESSIONS, st.integers(0, 2**32), st.sampled_from([None, "mul", "select"]))
def test_distances_are_computed_modulo_two_to_the_32nd(
    wide: Expr, seed: int, stays: str | None
) -> None:
    _check(wide, seed, stays)


TYPES: Final = [b.dtype for b in INPUTS if b.dtype.is_integer]


@pytest.mark.parametrize("to", [*TYPES, dtypes.uint16, dtypes.uint64], ids=str)
@pytest.mark.parametrize("by", [None, *TYPES], ids=str)
def test_what_a_test_compares_is_converted(by: DType | None, to: DType) -> None:
    """Of a conversion that changes the value, the value before must not be compared."""
    for buffer in INPUTS:
        x = e.load(buffer, ())
        x = e.cast(x if by is None else e.cast(x, by), to)
        test = e.compare("lt", x, e.const(6, to))
        for seed in range(4):
            _check(e.select(test, e.index(1), e.index(3)), seed)


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "uint32", "int64"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_elements_are_gathered_by_indices_of_all_types(
    dtype: str, dynamic: bool
) -> None:
    random = np.random.default_rng(0)
    table = random.normal(size=(5, 7)).astype("f")
    low = 0 if dtype.startswith("u") else -5
    rows, columns = random.integers(low, 5, (2, 1003)).astype(dtype)

    wide = (columns.astype(np.int64) * 2**40) % 7
    jitted = hf.jit(
        lambda table, rows, columns: (
            table[rows, columns + 2]
            + table[rows, (columns.astype(hf.int64) * 2**40) % 7]
        ),
        dynamic=dynamic,
    )
    found = jitted(table, rows, columns)
    np.testing.assert_array_equal(found, table[rows, columns + 2] + table[rows, wide])


@pytest.mark.skipif(not host().has("avx512f"), reason="the CPU has no such gathers")
def test_one_register_has_the_distances_of_a_gather() -> None:
    jitted = hf.jit(lambda table, k: table[k, 3])
    jitted(np.ones((64, 8), "f"), np.zeros(1000, "i4"))
    assert "@llvm.masked.gather" in jitted.llvm_ir
    assert "<16 x i64>" not in jitted.llvm_ir
