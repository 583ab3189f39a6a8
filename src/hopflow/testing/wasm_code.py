"""Calls of programs as WebAssembly, in one process of Node.

Programs are compiled one by one, and linked together to one module. Each call has an
instance of its own, by the JavaScript that users have.
"""

import base64
import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from hopflow import pytree
from hopflow.export.native.build import compile_native
from hopflow.export.native.parameters import Parameter
from hopflow.export.native.targets import WASM
from hopflow.export.wasm.build import script
from hopflow.export.wasm.interface import interface, symbols
from hopflow.export.wasm.link import link

Array = np.ndarray[Any, Any]


class WasmOutcome(NamedTuple):
    """What a call gives.

    results  those of the program, and then what it has written
    text     of the error that it has thrown, or ""
    """

    results: list[Array]
    text: str


class WasmPrograms:
    """Programs as one WebAssembly module, by the names of their functions."""

    def __init__(self, programs: Mapping[str, Any], folder: Path) -> None:
        self.programs, self.folder = programs, folder
        self.compiled = {
            name: compile_native(program, name, WASM)
            for name, program in programs.items()
        }
        self.data = {
            name: interface(programs[name], compiled)
            for name, compiled in self.compiled.items()
        }
        all_ = self.compiled.values()
        names = [name for compiled in all_ for name in symbols(compiled)]
        module = link([compiled.code for compiled in all_], names)
        (folder / "programs.wasm").write_bytes(module)
        for name, data in self.data.items():
            (folder / f"{name}.mjs").write_text(script(data))

    def run(self, calls: Sequence[tuple[str, Sequence[Any]]]) -> list[WasmOutcome]:
        """Call programs with the arguments of their functions."""
        asked = [{"name": n, "given": self._given(n, args)} for n, args in calls]
        (self.folder / "calls.json").write_text(json.dumps(asked))
        driver = self.folder / "driver.mjs"
        driver.write_text(_DRIVER)
        ran = subprocess.run(
            ["node", str(driver)], capture_output=True, text=True, check=False
        )
        assert ran.returncode == 0, ran.stderr
        found = json.loads((self.folder / "results.json").read_text())
        return [
            self._outcome(name, outcome)
            for (name, _), outcome in zip(calls, found, strict=True)
        ]

    def _given(self, name: str, args: Sequence[Any]) -> dict[str, Any]:
        """The arguments as JSON."""
        parameters = self.compiled[name].parameters
        constants = self.programs[name].module.constants
        leaves = pytree.flatten(args)[0]
        given = [x for i, x in enumerate(leaves) if i not in constants]
        declared = [p for p in parameters.all if p.role in _ARGUMENTS]
        declared = [p for p in declared if p not in parameters.initial]
        pairs = zip(declared, given, strict=True)
        return {p.name: _written(p, x) for p, x in pairs}

    def _outcome(self, name: str, found: Any) -> WasmOutcome:
        outputs = self.compiled[name].parameters.outputs
        if "error" in found:
            return WasmOutcome([], found["error"])
        values = found["values"]
        return WasmOutcome([_read(p, values[p.name]) for p in outputs], "")


_ARGUMENTS: Final = ("input", "updated", "number")


def _written(parameter: Parameter, value: Any) -> dict[str, Any]:
    if parameter.role == "number":
        number = np.asarray(value).item()
        return {"number": repr(number), "dtype": parameter.type.dtype.name}
    array = np.ascontiguousarray(np.asarray(value))
    data = base64.b64encode(array.tobytes()).decode()
    shape = np.shape(value)
    return {"data": data, "shape": shape, "dtype": parameter.type.dtype.name}


def _read(parameter: Parameter, found: Any) -> Array:
    dtype = parameter.type.dtype.dtype
    if "number" in found:
        text = found["number"]
        value = text == "true" if dtype == np.bool_ else dtype.type(text)
        return np.array(value, dtype=dtype)
    data = np.frombuffer(base64.b64decode(found["data"]), dtype)
    return data.reshape(found["shape"])


_DRIVER: Final = """\
import { readFileSync, writeFileSync } from "node:fs";

const at = (name) => new URL(name, import.meta.url);
const module = await WebAssembly.compile(readFileSync(at("programs.wasm")));

const ARRAYS = {
  bool: Uint8Array, int8: Int8Array, int16: Int16Array, int32: Int32Array,
  int64: BigInt64Array, uint8: Uint8Array, uint16: Uint16Array, uint32: Uint32Array,
  uint64: BigUint64Array, float16: Uint16Array, bfloat16: Uint16Array,
  float32: Float32Array, float64: Float64Array,
};

function read({ number, data, shape, dtype }) {
  if (number !== undefined) return dtype === "int64" ? BigInt(number) : parsed(number);
  const bytes = new Uint8Array(Buffer.from(data, "base64"));
  return Object.assign(new ARRAYS[dtype](bytes.buffer), { shape });
}

const parsed = (text) =>
  ({ inf: Infinity, "-inf": -Infinity, nan: NaN })[text] ?? Number(text);

function written(value) {
  const text = Object.is(value, -0) ? "-0.0" : String(value);
  if (value.shape === undefined) return { number: text };
  const bytes = Buffer.from(value.buffer, value.byteOffset, value.byteLength);
  return { shape: value.shape, data: bytes.toString("base64") };
}

const found = [];
for (const { name, given } of JSON.parse(readFileSync(at("calls.json")))) {
  const { load } = await import(at(`${name}.mjs`));
  const program = await load(module);
  const args = Object.fromEntries(Object.entries(given).map(([k, v]) => [k, read(v)]));
  try {
    const results = { ...args, ...program.run(args), ...program.state };
    const values = Object.entries(results).map(([k, v]) => [k, written(v)]);
    found.push({ values: Object.fromEntries(values) });
  } catch (error) {
    found.push({ error: error.message });
  }
}
writeFileSync(at("results.json"), JSON.stringify(found));
"""
