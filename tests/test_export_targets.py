"""The table of what each operation and operator becomes in each target of exports.

`make tables` (or `HOPFLOW_WRITE_TABLES=1`) writes docs/export_targets.md.
"""

import os
from pathlib import Path
from typing import Any, Final

from tests.targets import jax, native, onnx, wasm
from tests.targets.calls import CALLS

from hopflow.ops.opdef import OPERATIONS
from hopflow.testing.requires import requires

pytestmark = [requires("jax>=0.12", "onnx>=1.23")]

PAGE: Final = Path(__file__).parent.parent / "docs" / "export_targets.md"
TARGETS: Final[dict[str, Any]] = {
    "ONNX": onnx,
    "JAX": jax,
    "native code": native,
    "WebAssembly": wasm,
}

_TOP: Final = """\
# Operators and targets

What an exported program becomes elsewhere, for each operation and operator. Each cell
was run with drawn operands, in all dtypes that the operation has, and gave equal
answers: integers and booleans exactly, floats up to rounding (see
[ONNX](export.md#onnx), [JAX](export.md#jax-and-stablehlo),
[native code](export.md#native-code) and [WebAssembly](export.md#webassembly)).
`tests/targets/` has the calls, `tests/test_export_onnx.py` and its like run them, and
`make tables` writes this page; `property_tests/` has drawn programs of them.

The cell of an operation names the operators of ONNX, or the primitives of JAX, that it
is made of, conversions aside, in its most usual dtype; "composed" is of more than four,
and "a function" one that the model brings with it. Native code and
WebAssembly are compiled as by `hf.jit`.
"""


def table(title: str, names: Any, cells: str, quote: str = "") -> str:
    head = [title, *TARGETS]
    rows = [
        [f"{quote}{name}{quote}", *(getattr(t, cells)(name) for t in TARGETS.values())]
        for name in names
    ]
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def page() -> str:
    parts = [
        _TOP,
        f"## Operators\n\n{table('operator', CALLS, 'operator')}\n",
        f"## Operations\n\n{table('operation', OPERATIONS, 'operation', '`')}\n",
    ]
    return "\n".join(parts)


def test_the_table_in_the_documents_is_that_of_this_run() -> None:
    text = page()
    if os.environ.get("HOPFLOW_WRITE_TABLES"):
        PAGE.write_text(text)
    assert PAGE.read_text() == text, "write it with `make tables`"
