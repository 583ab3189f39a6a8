"""Exported programs as WebAssembly, called in Node."""

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from property_tests.targets.running import IsRight, is_close, run

import hopflow as hf
from hopflow.errors import ExportError
from hopflow.testing.wasm_code import WasmPrograms


def check(
    program: Any, values: Sequence[Any], dynamic: bool | None, is_right: IsRight
) -> None:
    """Compare a program with its WebAssembly: what it gives, what it writes, and what
    it says when it stops. Sizes are computed in int64, as by native code."""
    with TemporaryDirectory() as folder:
        try:
            linked = WasmPrograms({"drawn": program}, Path(folder))
        except ExportError as refused:
            if "calls LAPACK's" not in str(refused):
                raise
            return
        [found] = linked.run([("drawn", [np.array(x) for x in values])])
    expected = run(program, values, hf.jit(program, dynamic=dynamic))
    if expected.error:
        assert found.text == expected.error
        return
    if dynamic and "int64 cannot hold" in found.text:
        return
    assert not found.text
    arrays = [*expected.new, *expected.written]
    if not is_close(program, found.results, arrays):
        results = found.results[: len(expected.new)]
        assert is_right(results), (results, expected)
