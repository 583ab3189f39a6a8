"""Vector loops that transpose an array, by a function that programs share."""

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pytest
from tests.test_gangs import target
from tests.test_rows_in_registers import executed

import hopflow as hf
from hopflow import dtypes
from hopflow.compiler.cpu.target import CpuTarget, host

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("guarded")]

Array = np.ndarray[Any, Any]

DTYPES: Final = "float64 float32 float16 bfloat16 int64 uint32 int16 int8 bool".split()


@pytest.fixture(params=["host", "avx2"])
def cpu(request: pytest.FixtureRequest) -> CpuTarget:
    return target(request.param)


def drawn(*shape: int, dtype: str = "float32") -> Array:
    bits = np.random.default_rng(0).integers(-120, 120, shape)
    return bits.astype(dtypes.as_dtype(dtype).dtype)


def has_calls(f: Callable[..., Any], *args: Array, cpu: CpuTarget) -> bool:
    """Whether a program, whose results are compared, calls the function."""
    return "call void @hf_transpose_" in executed(f, *args, cpu=cpu).llvm_ir


def has_wide_registers(cpu: CpuTarget) -> bool:
    """Whether a register has 16 elements of 32 bits."""
    return cpu.vector_width(dtypes.float32) == 16


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(16, 16), (40, 37), (7, 50), (129, 64), (33, 16)])
def test_transposed_arrays(dtype: str, shape: tuple[int, int], cpu: CpuTarget) -> None:
    x = drawn(*shape, dtype=dtype)
    found = has_calls(lambda x: hf.copy(x.T), x, cpu=cpu)
    if x.itemsize == 4 and min(shape) >= 16 and has_wide_registers(cpu):
        assert found
    if x.itemsize == 8:
        assert not found


@pytest.mark.parametrize("rows", range(1, 36))
def test_the_rows_that_remain_are_the_only_ones_written(
    rows: int, cpu: CpuTarget
) -> None:
    x = drawn(rows, 48, dtype="float32" if has_wide_registers(cpu) else "int16")
    executed(lambda x: (hf.copy(x.T), hf.copy(x[:, :33].T)), x, cpu=cpu)


@pytest.mark.parametrize("shape", [(1, 20), (15, 16), (16, 40), (50, 33)])
def test_sizes_that_the_run_knows(shape: tuple[int, int]) -> None:
    jitted = hf.jit(lambda x: hf.copy(x.T), dynamic=True)
    for rows, columns in (shape, shape[::-1], (64, 64), (0, 5), (5, 0)):
        x = drawn(rows, columns)
        np.testing.assert_array_equal(np.asarray(jitted(x)), x.T)


PARTS: Final[dict[str, Callable[[Any], Any]]] = {
    "a part of each row": lambda x: hf.copy(x[:, 5:37].T),
    "rows from the second on": lambda x: hf.copy(x[1:].T),
    "every second row": lambda x: hf.copy(x[::2].T),
    "every second column": lambda x: hf.copy(x[:, ::2].T),
    "columns from the last on": lambda x: hf.copy(x[:, ::-1].T),
    "rows from the last on": lambda x: hf.copy(x[::-1].T),
    "a stack of matrices": lambda x: hf.copy(
        hf.swapaxes(hf.reshape(x, (2, 20, 40)), 1, 2)
    ),
    "three axes": lambda x: hf.copy(
        hf.permute_dims(hf.reshape(x, (20, 2, 40)), (2, 0, 1))
    ),
    "beside other rows": lambda x: hf.concat([x[:40].T, x[:40]], axis=0),
    "in steps": lambda x: hf.fori_loop(0, 3, lambda _, y: hf.copy(y.T), x),
}


@pytest.mark.parametrize("name", PARTS)
def test_parts_of_arrays(name: str, cpu: CpuTarget) -> None:
    for dtype in ("float32", "int16"):
        executed(PARTS[name], drawn(40, 40, dtype=dtype), cpu=cpu)


def test_computed_elements_are_no_copies(cpu: CpuTarget) -> None:
    for dtype in ("float32", "int16"):
        x = drawn(40, 37, dtype=dtype)
        assert not has_calls(lambda x: hf.copy(x.T) * 2, x, cpu=cpu)


@pytest.mark.parametrize("n", [16, 100, 5000])
def test_columns_of_scans(n: int) -> None:
    """Both inputs and the result of the steps are transposed, with rows that remain."""

    def step(c: Any, x: Any) -> Any:
        a, b = x
        c = hf.where(a > 0.5, c + b, c * 0.9)
        return c, c + a

    def f(a: Any, b: Any) -> Any:
        return hf.vmap(lambda a, b: hf.scan(step, hf.zeros(()), (a, b))[1])(a, b)

    random = np.random.default_rng(0)
    a, b = (random.uniform(size=(n, 100)).astype("f") for _ in range(2))
    executed(f, a, b)


def test_a_program_has_no_code_of_its_own_for_it() -> None:
    if not has_wide_registers(host()):
        pytest.skip("blocks of 16 vectors need registers of 512 bits")
    code = executed(lambda x: hf.copy(x.T), drawn(128, 128)).llvm_ir
    assert "shufflevector" not in code
