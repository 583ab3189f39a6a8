"""`import hopflow` is cheap: what is heavy is loaded by a call that needs it."""

import subprocess
import sys

HEAVY = (
    "hypothesis",
    "jax",
    "llvmlite",
    "matplotlib",
    "onnx",
    "optree.integrations.",  # the package is always there; its modules load the rest
    "pytest",
    "rich",
    "scipy",
    "sklearn",
    "sympy",
    "torch",
)


def test_importing_the_package_loads_no_heavy_library() -> None:
    code = "import sys, hopflow; print(*sys.modules, sep='\\n')"
    loaded = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    ).stdout.split()
    assert "hopflow" in loaded
    assert [
        module
        for module in loaded
        for heavy in HEAVY
        if module == heavy or module.startswith(heavy.removesuffix(".") + ".")
    ] == []
