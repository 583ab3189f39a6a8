"""Three models whose work depends on their data give the same answers in every target
of exports, and in a process that has the file alone."""

import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from tests.targets.models import LETTERS, MODELS, Model, trained

import hopflow as hf
from hopflow import pytree
from hopflow.errors import ExportError
from hopflow.testing.native_code import run_native
from hopflow.testing.onnx_models import Session
from hopflow.testing.requires import load, requires
from hopflow.testing.wasm_code import WasmPrograms

pytestmark = [pytest.mark.slow]

Array = np.ndarray[Any, Any]
Args = tuple[Any, ...]


def arrays(tree: Any) -> list[Array]:
    return [np.asarray(x) for x in pytree.flatten(tree)[0]]


@cache
def model(name: str) -> Model:
    return MODELS[name]()


def by_onnx(program: Any, calls: Sequence[Args], _folder: Path) -> list[list[Array]]:
    session = Session(program.to_onnx())
    return [session(*map(np.asarray, args)).results for args in calls]


def by_jax(program: Any, calls: Sequence[Args], _folder: Path) -> list[list[Array]]:
    jax = load("jax")
    with jax.enable_x64(True):
        run = jax.jit(program.to_jax())
        return [arrays(run(*arrays(args))) for args in calls]


def by_stablehlo(
    program: Any, calls: Sequence[Args], folder: Path
) -> list[list[Array]]:
    jax = load("jax")
    program.to_stablehlo(folder / "model")
    run = jax.export.deserialize(bytearray((folder / "model").read_bytes())).call
    with jax.enable_x64(True):
        return [arrays(run(*arrays(args))) for args in calls]


def by_native(program: Any, calls: Sequence[Args], _folder: Path) -> list[list[Array]]:
    return [run_native(program, *arrays(args)).results for args in calls]


def by_wasm(program: Any, calls: Sequence[Args], folder: Path) -> list[list[Array]]:
    linked = WasmPrograms({"model": program}, folder)
    return [x.results for x in linked.run([("model", args) for args in calls])]


_READER: Final = """
import sys
import numpy as np
import hopflow as hf
from hopflow import pytree
from hopflow.errors import ExportError
program = hf.load(sys.argv[1])
for path in sys.argv[2:]:
    args = np.load(path)
    numbers = [x.kind == "number" for x in program.signature.inputs]
    values = [
        x.item() if is_number else hf.asarray(x)
        for x, is_number in zip(args.values(), numbers)
    ]
    np.savez(path, *map(np.asarray, pytree.flatten(program(*values))[0]))
"""


def by_file(program: Any, calls: Sequence[Args], folder: Path) -> list[list[Array]]:
    program.save(folder / "model.hopflow")
    paths = [folder / f"{k}.npz" for k in range(len(calls))]
    for path, args in zip(paths, calls, strict=True):
        np.savez(path, *arrays(args))
    files = [str(path) for path in (folder / "model.hopflow", *paths)]
    command = [sys.executable, "-c", _READER, *files]
    subprocess.run(command, check=True, cwd=folder)
    return [list(np.load(path).values()) for path in paths]


WAYS: Final[dict[str, tuple[Callable[..., list[list[Array]]], tuple[str, ...]]]] = {
    "ONNX": (by_onnx, ("onnx>=1.23", "onnxruntime>=1.32")),
    "JAX": (by_jax, ("jax>=0.12",)),
    "StableHLO": (by_stablehlo, ("jax>=0.12",)),
    "native code": (by_native, ()),
    "WebAssembly": (by_wasm, ("node", "wasm-ld")),
    "a file": (by_file, ()),
}


@requires("sklearn")
@pytest.mark.parametrize(
    "way",
    [pytest.param(w, id=n, marks=requires(*needs)) for n, (w, needs) in WAYS.items()],
)
@pytest.mark.parametrize("name", MODELS)
def test_a_model_gives_the_same_answers(name: str, way: Any, tmp_path: Path) -> None:
    program, calls = model(name)
    if name == "fit" and way in (by_jax, by_stablehlo):
        # The slopes of a loop are kept, and JAX does not know of how many steps.
        with pytest.raises(ExportError, match=r"while_loop` \(pendulum.py:\d+\)"):
            way(program, calls, tmp_path)
        return
    for args, found in zip(calls, way(program, calls, tmp_path), strict=True):
        expected = arrays(program(*args))
        for x, y in zip(found, expected, strict=True):
            assert x.dtype == y.dtype
            if y.dtype.kind == "f":
                close = 1e-3 if y.dtype == np.float32 else 1e-7
                np.testing.assert_allclose(x, y, rtol=close, atol=close * 1e-3)
            else:
                np.testing.assert_array_equal(x, y)


@requires("sklearn")
def test_the_classifier_takes_several_numbers_of_steps() -> None:
    program, calls = model("classifier")
    _, steps, _ = program(*calls[0])
    assert len(np.unique(np.asarray(steps))) > 1


def test_the_speller_has_learned_to_spell() -> None:
    assert trained()
    program, calls = model("speller")
    words = []
    for args in calls:
        texts, *_ = program(*args)
        letters = [LETTERS[int(k)] for k in np.asarray(texts)[0]]
        words.append("".join(letters).strip())
    assert words[0].startswith("one")


def test_models_may_be_compiled_where_they_are_loaded(tmp_path: Path) -> None:
    program, calls = model("speller")
    program.save(tmp_path / "speller.hopflow")
    found = hf.jit(hf.load(tmp_path / "speller.hopflow"))(*calls[0])
    for x, y in zip(arrays(found), arrays(program(*calls[0])), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5)
