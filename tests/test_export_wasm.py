"""Exported programs as WebAssembly: equal answers in Node and in a browser, and what
its JavaScript refuses."""

import runpy
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pytest

import hopflow as hf
from hopflow.ops import batching
from hopflow.ops.opdef import OPERATIONS
from hopflow.testing.onnx_models import difference
from hopflow.testing.requires import requires
from hopflow.testing.wasm_code import WasmOutcome, WasmPrograms

pytestmark = [requires("node", "wasm-ld")]

_NATIVE: Final = runpy.run_path(str(Path(__file__).parent / "test_export_native.py"))
Call, exported, leaves = (_NATIVE[n] for n in ("Call", "exported", "leaves"))
CALLS: Final = _NATIVE["CALLS"]
COMPILED: Final = _NATIVE["NATIVE"]

Array = np.ndarray[Any, Any]


class Ran(NamedTuple):
    """Programs, and what all calls of them in one process have given."""

    programs: dict[str, Any]
    outcomes: dict[Any, WasmOutcome]


def same(x: Array, y: Array) -> bool:
    """Whether arrays have the same bits; which ones a NaN has does not matter."""
    if x.dtype != y.dtype or x.shape != y.shape:
        return False
    is_float = np.issubdtype(x.dtype, np.inexact) or x.dtype.kind == "V"
    both = (x != x) & (y != y) if is_float else np.zeros(x.shape, np.bool_)
    return bool(np.all((x.view(f"u{x.itemsize}") == y.view(f"u{y.itemsize}")) | both))


@pytest.fixture(scope="module")
def of_operations(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    calls = {name: _NATIVE["operation"](OPERATIONS[name]) for name in COMPILED}
    programs = {f"op_{name}": call.program for name, call in calls.items()}
    wasm = WasmPrograms(programs, tmp_path_factory.mktemp("operations"))
    outcomes = wasm.run([(f"op_{name}", call.args) for name, call in calls.items()])
    return Ran(calls, dict(zip(calls, outcomes, strict=True)))


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
def test_an_operation_gives_equal_answers(name: str, of_operations: Ran) -> None:
    program, args = of_operations.programs[name]
    found = of_operations.outcomes[name]
    assert not found.text
    expected = leaves(hf.jit(program)(*args))
    assert len(expected) == len(found.results)
    for x, y in zip(found.results, expected, strict=True):
        if OPERATIONS[name].batch is batching.pointwise:
            assert same(x, y), (x, y)
        else:  # sums have another order of the terms
            assert difference(x, y, of_largest=True) <= 4
