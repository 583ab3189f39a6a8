"""`.hopflow` files: what is in them, who reads them, and what is refused."""

import io
import json
import os
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

import hopflow as hf
from hopflow.errors import DerivativeError, ProgramFormatError
from hopflow.export import document, files, operators
from hopflow.export.container import read_members, write_members
from hopflow.export.fields import written
from hopflow.ops.opdef import OPERATIONS, OpDef
from hopflow.tensor import EagerTensor
from hopflow.testing.requires import load

ROOT: Final = Path(__file__).parent
OLD: Final = ROOT / "exported"
X = hf.asarray(np.arange(6.0).reshape(2, 3))
WRITES: Final = bool(os.environ.get("HOPFLOW_WRITE_TABLES"))


WEIGHT = hf.asarray(np.eye(3))


def small(x: Any, n: int) -> Any:
    def step(c: Any, i: Any) -> Any:
        return hf.cond(hf.sum(c) > 9, lambda: hf.sin(c), lambda: c @ WEIGHT + 1), i + 1

    return hf.while_loop(lambda c, i: i < n, step, (x, 0))[0]


@pytest.fixture(scope="module")
def program() -> hf.ExportedProgram:
    return hf.export(small, (X, 3), dynamic_shapes={"x": {0: hf.Dim("rows", min=1)}})


@pytest.fixture
def path(tmp_path: Path, program: hf.ExportedProgram) -> Path:
    found = tmp_path / "program.hopflow"
    program.save(found)
    return found


def parts(path: Path) -> tuple[Any, bytes]:
    data = path.read_bytes()
    members = read_members(memoryview(data), (files.WEIGHTS, files.PROGRAM))
    weights, text = (
        data[members[name].start : members[name].start + members[name].size]
        for name in (files.WEIGHTS, files.PROGRAM)
    )
    return json.loads(text), weights


def packed(data: Any, weights: bytes) -> bytes:
    file = io.BytesIO()
    text = data if isinstance(data, bytes) else written(data)
    members = [(files.WEIGHTS, weights), (files.PROGRAM, text)]
    write_members(file, [(name, len(part), [part]) for name, part in members])
    return file.getvalue()


# --- what is in them ------------------------------------------------------------------


def test_the_bytes_depend_on_the_program_alone(
    path: Path, program: hf.ExportedProgram
) -> None:
    first = path.read_bytes()
    hf.load(path).save(path)  # which the program is mapped from
    assert path.read_bytes() == first
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.requires("safetensors")
def test_other_tools_open_a_file(path: Path) -> None:
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        infos = archive.infolist()
        weights = archive.read(files.WEIGHTS)
        for info in infos:
            with archive.open(info) as member:
                assert member.tell() == 0
            assert info.compress_type == zipfile.ZIP_STORED
    assert [info.filename for info in infos] == [files.WEIGHTS, files.PROGRAM]
    safetensors: Any = import_module("safetensors.numpy")
    [(name, found)] = safetensors.load(weights).items()
    assert name == "WEIGHT"
    np.testing.assert_array_equal(found, np.eye(3))


def test_tensors_stay_where_they_are_in_the_file(
    tmp_path: Path,
) -> None:
    names = ["?", "b", "e", "f", "d", "Q"]
    held = [hf.asarray(np.arange(3).astype(name)) for name in names]
    held += [hf.asarray([1.0, 2.0], dtype=hf.bfloat16), hf.asarray(np.ones((), "H"))]
    shared = held[3]
    path = tmp_path / "program.hopflow"
    hf.export(lambda: (*held, shared[:0], shared)).save(path)
    state = hf.load(path).state
    for tensor in state.values():
        assert isinstance(tensor, EagerTensor)
        assert tensor.pointer % tensor.array.dtype.itemsize == 0
        assert tensor.array.base is not None or not tensor.array.size
    _, weights = parts(path)
    total = sum(np.asarray(x).nbytes for x in held)
    header = int.from_bytes(weights[:8], "little")
    assert len(weights) == 8 + header + total
    assert len(state) == len(held)


def test_writes_to_a_loaded_program_do_not_reach_the_file(path: Path) -> None:
    before = path.read_bytes()
    found = hf.load(path)
    found.state["WEIGHT"][0, 0] = 9.0
    assert path.read_bytes() == before
    assert float(hf.load(path).state["WEIGHT"][0, 0]) == 1.0


@pytest.mark.requires("jsonschema")
def test_a_file_keeps_the_published_schema(path: Path) -> None:
    jsonschema: Any = load("jsonschema")
    text = Path(document.__file__).with_name("program.schema.json").read_text()
    validator = jsonschema.Draft202012Validator(json.loads(text))
    validator.check_schema(json.loads(text))
    for file in (path, *OLD.glob("*.hopflow")):
        validator.validate(parts(file)[0])
    data, _ = parts(path)
    del data["graphs"][0]["nodes"]
    assert not validator.is_valid(data)


# --- other processes, and other versions ----------------------------------------------


RUN = """
import sys, numpy as np, hopflow as hf
program = hf.load(sys.argv[1])
x = hf.asarray(np.arange(12.0).reshape(4, 3))
print(np.asarray(program(x, 5)).tobytes().hex(), flush=True)
print(np.asarray(hf.grad(lambda x: hf.sum(program(x, 5)))(x)).tobytes().hex())
"""


def test_another_process_computes_the_same_bits(
    path: Path, program: hf.ExportedProgram
) -> None:
    found = subprocess.run(
        [sys.executable, "-c", RUN, str(path)],
        capture_output=True,
        text=True,
        check=True,
    )
    x = hf.asarray(np.arange(12.0).reshape(4, 3))
    results = [program(x, 5), hf.grad(lambda x: hf.sum(program(x, 5)))(x)]
    expected = [np.asarray(r).tobytes().hex() for r in results]
    assert found.stdout.split() == expected


OLD_PROGRAMS: dict[str, Callable[[], hf.ExportedProgram]] = {
    "loops": lambda: hf.export(
        small, (X, 3), dynamic_shapes={"x": {0: hf.Dim("rows", min=1)}}
    ),
    "sizes": lambda: hf.export(
        lambda x, n: (x[x > n], hf.reshape(x, (-1,)), hf.concat([x, x])[1:], x[0] * n),
        (X, 2),
        dynamic_shapes=True,
    ),
    "derivatives": lambda: hf.export(
        lambda x, n: hf.grad(lambda x: hf.sum(small(x, 3)) * n)(x), (X, 2)
    ),
}


@pytest.mark.parametrize("name", OLD_PROGRAMS)
def test_files_of_every_version_are_readable(name: str) -> None:
    current = OLD / f"{name}.v{document.VERSION}.hopflow"
    if WRITES and not current.exists():
        program = OLD_PROGRAMS[name]()
        program.save(current)
        results = program(X, 2)
        leaves = results if isinstance(results, tuple) else (results,)
        values = [np.asarray(r).tolist() for r in leaves]
        current.with_suffix(".json").write_text(f"{json.dumps(values)}\n")
    old = sorted(OLD.glob(f"{name}.v*.hopflow"))
    assert current in old
    for file in old:
        results = hf.load(file)(X, 2)
        leaves = results if isinstance(results, tuple) else (results,)
        expected = json.loads(file.with_suffix(".json").read_text())
        for found, wanted in zip(leaves, expected, strict=True):
            np.testing.assert_allclose(np.asarray(found), wanted, rtol=1e-12)


def test_rules_in_a_file_of_an_earlier_version_are_regions(tmp_path: Path) -> None:
    """Of `custom_jvp`, of `custom_vjp` and of an operator, in a batch and in a loop."""
    expected = json.loads((OLD / "rules.v1.json").read_text())
    path, old = tmp_path / "again.hopflow", hf.load(OLD / "rules.v1.hopflow")
    old.save(path)
    for program in (old, hf.load(path)):
        first = hf.grad(lambda x: program(x, 2))  # noqa: B023
        results = (program(X, 2), first(X), hf.grad(lambda x: hf.sum(first(x)))(X))  # noqa: B023
        for found, wanted in zip(results, expected, strict=True):
            np.testing.assert_allclose(np.asarray(found), wanted, rtol=1e-12)
        with pytest.raises(DerivativeError, match="larger `derivatives`"):
            hf.grad(lambda x: hf.sum(hf.grad(lambda x: hf.sum(first(x)))(x)))(X)  # noqa: B023
    assert hf.load(path) == old


def test_the_schema_of_an_operator_changes_with_its_version_alone() -> None:
    file = OLD / "operators.json"
    known = json.loads(file.read_text()) if file.exists() else {}
    found = {n: operators.schema(op) for n, op in sorted(operators.operators().items())}
    if WRITES:
        rows = {**{n: s for n, s in found.items() if n not in known}, **known}
        for name, schema in found.items():
            if schema["version"] > known.get(name, schema)["version"]:
                rows[name] = schema
        file.write_text(json.dumps(dict(sorted(rows.items())), indent=1) + "\n")
        known = rows
    changed = sorted(n for n in found | known if found.get(n) != known.get(n))
    assert not changed, "CONTRIBUTING.md says how the schema of an operator is recorded"


def test_params_of_earlier_versions_are_made_those_of_this_one(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    renamed = OpDef(
        **{
            **{f: getattr(OPERATIONS["sin"], f) for f in OpDef.__dataclass_fields__},
            "name": "sine",
            "version": 3,
            "upgrades": {2: lambda params: {}},
        }
    )
    try:
        assert operators.least_version(renamed) == 2
        data, weights = parts(path)
        for graph in data["graphs"]:
            for node in graph["nodes"]:
                if node.get("op") == "sin":
                    node["op"], node["params"] = "sine", {"fast": True}
        schema = data["operators"].pop("sin")
        for version, is_readable in ((1, False), (2, True), (3, False), (4, False)):
            data["operators"]["sine"] = {**schema, "version": version}
            path.write_bytes(packed(data, weights))
            if is_readable:
                assert hf.load(path)(X, 2).shape == (2, 3)
            else:
                with pytest.raises(ProgramFormatError):
                    hf.load(path)
    finally:
        del OPERATIONS["sine"]


# --- what is refused ------------------------------------------------------------------

LARGE: Final = (2**62, -(2**62), 10**30)


@pytest.mark.parametrize("name", sorted(OPERATIONS))
@pytest.mark.timeout(20)  # of which each takes milliseconds
def test_types_of_hostile_params_are_inferred_in_no_time(name: str) -> None:
    op = OPERATIONS[name]
    for sample in op.samples:
        types = [hf.spec(text.replace("T", "f32")) for text in sample.operands]
        for key, value in sample.params.items():
            for large in LARGE:
                hostile: list[Any] = [large] if type(value) is int else []
                if type(value) is tuple:
                    hostile = [(*value[:-1], large), (large,)]
                for other in hostile:
                    with suppress(Exception):
                        op.result_types(types, {**sample.params, key: other})


def with_member(name: str, **options: Any) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", **options) as archive:
        archive.writestr(name, b"\0" * 1_000_000)
    return file.getvalue()


NO_FILES: Final = {
    "empty": b"",
    "text": b"a text, and no zip" * 10,
    "a bomb": with_member(files.PROGRAM, compression=zipfile.ZIP_DEFLATED),
    "a path": with_member("../../etc/passwd"),
    "an end alone": b"PK\5\6" + bytes(18),
    "no json": packed(b"{", b""),
    "deep": packed(b"[" * 100_000, b""),
    "a long number": packed(b'{"format":' + b"9" * 5000 + b"}", b""),
    "a name twice": packed(b'{"format":1,"format":2}', b""),
    "nan": packed(b'{"format":NaN}', b""),
    "no bytes of text": packed(b"\xff\xfe", b""),
}


@pytest.mark.parametrize("name", NO_FILES)
def test_what_is_no_file_of_a_program_is_refused(name: str, tmp_path: Path) -> None:
    path = tmp_path / "wrong.hopflow"
    path.write_bytes(NO_FILES[name])
    with pytest.raises(ProgramFormatError):
        hf.load(path)


def test_a_file_that_is_not_there_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        hf.load(tmp_path / "nothing.hopflow")
    with pytest.raises(FileNotFoundError):
        hf.export(hf.sin, (X,)).save(tmp_path / "no folder" / "program.hopflow")


def graph(data: Any) -> Any:
    return data["graphs"][-1]


def loop(data: Any) -> Any:
    [node] = [n for n in graph(data)["nodes"] if n.get("op") == "while_loop"]
    return node


def set_in(owner: Callable[[Any], Any], key: Any, value: Any) -> Callable[[Any], None]:
    def change(data: Any) -> None:
        owner(data)[key] = value

    return change


def signature(data: Any) -> Any:
    return data["signature"]


def top(data: Any) -> Any:
    return data


def symbol(data: Any) -> Any:
    return data["symbols"][0]


def nested(depth: int) -> Any:
    tree: Any = "*"
    for _ in range(depth):
        tree = {"list": [tree]}
    return tree


HOSTILE: list[tuple[Callable[[Any], None], str]] = [
    (set_in(top, "format", "another"), "expected 'hopflow program'"),
    (set_in(top, "version", 2), "an integer from 1 to 1 at `version`"),
    (set_in(top, "extra", 1), "expected an object with format"),
    (set_in(top, "graphs", []), "at least one graph"),
    (set_in(top, "graphs", 3), "a list at `graphs`, and found an integer"),
    (set_in(top, "derivatives", 1.5), "an integer at `derivatives`, and found 1.5"),
    (set_in(lambda d: loop(d)["params"], "body", {"graph": 10}), "a graph before it"),
    (
        set_in(lambda d: loop(d)["params"], "body", {"graph": -1}),
        "a graph before it, below",
    ),
    (set_in(lambda d: loop(d)["params"], "num_carry", 10**15), "carry"),
    (set_in(lambda d: loop(d)["params"], "num_carry", "x"), "carry"),
    (set_in(lambda d: loop(d)["params"], "body", {"what": 1}), "a kind of value"),
    (set_in(lambda d: loop(d)["params"], "max_steps", {"a": 1, "b": 2}), "one member"),
    (set_in(lambda d: loop(d)["params"], "test", nested(99)), "a kind of value"),
    (set_in(loop, "op", "callback"), "the name of an operator of the file"),
    (set_in(loop, "args", [99]), "the number of a value before it, below"),
    (set_in(loop, "args", [[1, 0]]), "program: |expected"),
    (set_in(loop, "line", 10**6), "the number of a line"),
    (set_in(loop, "attribute", "WEIGHT"), "an object with attribute, results"),
    (set_in(loop, "results", [0, 0]), "program: graph `small`"),
    (set_in(top, "operators", {"os.system": {}}), "an operator of this version"),
    (
        set_in(lambda d: d["operators"]["sin"], "version", 2),
        "a version of `sin` from 1 to 1",
    ),
    (set_in(lambda d: d["types"][0], "dtype", "c64"), "the name of a dtype"),
    (set_in(lambda d: d["types"][0], "shape", [1] * 65), "at most 64 axes"),
    (set_in(lambda d: d["types"][0], "shape", [-1]), "a size, which is not negative"),
    (set_in(lambda d: d["types"][0], "shape", [2**63]), "an integer from"),
    (set_in(lambda d: d["types"][0], "shape", ["nothing"]), "the name of a symbol"),
    (set_in(lambda d: d["types"][1], "number", True), "the type of a number"),
    (
        set_in(
            lambda d: d["types"][0],
            "shape",
            [{"op": "+", "args": ["rows", k]} for k in range(1, 12)],
        ),
        "sizes whose product is a smaller expression",
    ),
    (
        set_in(
            lambda d: d["types"][0],
            "shape",
            [{"op": "*", "args": [{"op": "+", "args": ["rows", 1]}] * 64}],
        ),
        "an expression that (is smaller|has a value)",
    ),
    (
        set_in(lambda d: d["types"][0], "shape", [{"op": "//", "args": ["rows", 0]}]),
        "an expression that has a value",
    ),
    (
        set_in(lambda d: d["types"][0], "shape", [{"op": "exec", "args": [1]}]),
        "an operation at",
    ),
    (set_in(symbol, "hint", 0), "a number of the symbol's range"),
    (set_in(symbol, "min", 5), "a number of the symbol's range"),
    (set_in(symbol, "max", -5), "an end that is no less"),
    (set_in(symbol, "name", ""), "a name of its own"),
    (set_in(top, "symbols", []), "the name of a symbol"),
    (set_in(signature, "arguments", ["x", "x"]), "names that differ"),
    (set_in(signature, "arguments", ["x", "n", "m"]), "a tuple with one item"),
    (set_in(signature, "arguments", ["class", "n"]), "no words of Python"),
    (set_in(signature, "positional", 5), "an integer from 0 to 2"),
    (set_in(signature, "inputs", nested(99)), "a tree that is less deep"),
    (set_in(signature, "inputs", {"what": []}), "a kind of container"),
    (set_in(signature, "outputs", {"tuple": ["*", "*"]}), "a structure of 1 leaves"),
    (set_in(signature, "outputs", {"deque": [None, "*"]}), "a list at"),
    (set_in(signature, "outputs", {"defaultdict": ["exec", []]}), "the name of a def"),
    (
        set_in(signature, "outputs", {"dict": [["a", "*"], ["a", "*"]]}),
        "keys that differ",
    ),
    (
        set_in(signature, "outputs", {"dict": [[{"graph": 0}, "*"], [[1], None]]}),
        "a kind of value",
    ),
    (
        set_in(
            signature,
            "outputs",
            {"namedtuple": {"class": "os:stat_result", "names": ["a"], "of": []}},
        ),
        "1 parts",
    ),
    (
        set_in(
            signature,
            "outputs",
            {"object": {"class": "a:b", "names": ["x"] * 1001, "of": ["*"] * 1001}},
        ),
        "at most 1000 names",
    ),
    (
        set_in(
            signature,
            "outputs",
            {
                "object": {
                    "class": "hopflow.nn.layers:Linear",
                    "names": ["weight"],
                    "of": ["*"],
                    "rest": 3,
                }
            },
        ),
        "parts that its class takes",
    ),
    (set_in(signature, "paths", []), "2 paths"),
    (set_in(signature, "numbers", [7]), "an integer from 0 to 1"),
    (set_in(signature, "numbers", []), "a leaf for each operand"),
    (set_in(signature, "sources", []), "a source for each symbol"),
    (
        set_in(signature, "constants", [{"leaf": 1, "value": 2}]),
        "another leaf",
    ),
    (set_in(lambda d: signature(d)["sources"][0], "axis", 7), "an integer from 0"),
    (set_in(lambda d: signature(d)["sources"][0], "axis", None), "an axis of the arg"),
    (set_in(lambda d: signature(d)["sources"][0], "factor", 0), "an integer from 1"),
    (set_in(signature, "results", 2), "an integer from 0 to 1"),
    (set_in(signature, "written", [0]), "0 operands or attributes"),
    (set_in(signature, "same", [[0, 5]]), "an integer from 0 to 0"),
    (set_in(signature, "number_results", [0]), "results without axes"),
    (set_in(lambda d: d["constraints"][0], "condition", True), "an object"),
    (
        set_in(
            lambda d: d["constraints"][0],
            "condition",
            {"op": "<=", "args": ["rows", -1]},
        ),
        "can hold beside|depends on symbols",
    ),
    (
        set_in(
            lambda d: d["constraints"][0], "condition", {"op": "<=", "args": [1, 2]}
        ),
        "a condition that depends on symbols",
    ),
    (
        set_in(
            lambda d: d["constraints"][0], "condition", {"op": "is", "args": [1, 2]}
        ),
        "a comparison",
    ),
    (set_in(lambda d: d["weights"], "sha256", "0"), "the checksum of the weights"),
    (set_in(lambda d: d["weights"], "tensors", {}), "a name for each tensor"),
    (
        set_in(lambda d: d["weights"], "tensors", {"WEIGHT": "../weight"}),
        "a tensor of the weights",
    ),
]


@pytest.mark.parametrize(("change", "why"), HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_program_is_refused(change: Any, why: str, path: Path) -> None:
    data, weights = parts(path)
    change(data)
    path.write_bytes(packed(data, weights))
    with pytest.raises(ProgramFormatError, match=why):
        hf.load(path)


@hf.custom_vjp
def ruled(x: Any) -> Any:
    return hf.sin(x)


ruled.defvjp(lambda x: (ruled(x), x), lambda x, ct: (hf.cos(x) * ct,))


def call(data: Any) -> Any:
    [node] = [n for n in graph(data)["nodes"] if n.get("op") == "custom_call"]
    return node


def params(data: Any) -> Any:
    return call(data)["params"]


def with_depth(data: Any) -> None:
    params(data)["depth"] = 0


def without_backward(data: Any) -> None:
    del params(data)["backward"]


HOSTILE_RULES: list[tuple[Callable[[Any], None], str]] = [
    (set_in(params, "results", 2), "rules of says"),
    (set_in(params, "results", "x"), "program: "),
    (set_in(params, "wrt", [1]), "rules of says"),
    (set_in(params, "wrt", [0, 0]), "rules of says"),
    (set_in(params, "wrt", "x"), "program: "),
    (set_in(params, "cotangents", [3]), "rules of says"),
    (set_in(params, "cotangents", []), "rules of says"),
    (set_in(params, "examples", [[False]]), "rules of says"),
    (set_in(params, "examples", [3]), "program: "),
    (set_in(params, "forward", {"graph": 0}), "program: "),
    (set_in(params, "backward", {"graph": 0}), "program: "),
    (set_in(params, "backward", {"graph": 99}), "a graph before it"),
    (set_in(params, "forward", 1), "program: "),
    (set_in(params, "late", 1), "a param of `custom_call`"),
    (without_backward, "program: "),
    (with_depth, "the rules of one that is not around it"),
]


@pytest.mark.parametrize(
    ("change", "why"), HOSTILE_RULES, ids=range(len(HOSTILE_RULES))
)
def test_hostile_rules_are_refused(change: Any, why: str, path: Path) -> None:
    hf.export(lambda x: ruled(x) * 2, (X,), derivatives=1).save(path)
    assert hf.load(path)(X).shape == (2, 3)
    data, weights = parts(path)
    change(data)
    path.write_bytes(packed(data, weights))
    with pytest.raises(ProgramFormatError, match=why):
        hf.load(path)


def tensors(rows: Any, elements: bytes = b"") -> bytes:
    header = rows if isinstance(rows, bytes) else written(rows)
    return len(header).to_bytes(8, "little") + header + elements


def row(dtype: str, shape: list[int], start: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


NO_WEIGHTS: list[tuple[bytes, str]] = [
    (b"", "a header of"),
    (struct.pack("<Q", 2**60), "a header of 1152921504606846976 bytes"),
    (tensors(b"["), "no JSON"),
    (tensors({"w": row("F128", [], 0, 0)}), "the name of a dtype"),
    (tensors({"w": row("F64", [2**62, 2**62], 0, 8)}, bytes(8)), "as many bytes"),
    (tensors({"w": row("F64", [1] * 65, 0, 8)}, bytes(8)), "as many bytes"),
    (tensors({"w": row("U8", [8], 0, 9)}, bytes(8)), "offsets within the file"),
    (tensors({"w": row("U8", [-8], 0, 8)}, bytes(8)), "an integer from 0"),
    (tensors({"w": row("U8", [7], 1, 8)}, bytes(8)), "gaps between"),
    (
        tensors({"v": row("U8", [8], 0, 8), "w": row("U8", [8], 0, 8)}, bytes(8)),
        "gaps between, or overlaps",
    ),
    (tensors({"w": row("U8", [7], 0, 7)}, bytes(8)), "belong to no tensor"),
    (tensors({"w": row("BOOL", [1], 0, 1)}, b"\2"), "truth values of 0 and 1"),
    (tensors({"w": row("F64", [1], 0, 8)}, bytes(8)), "elements that are aligned"),
]


@pytest.mark.parametrize(("weights", "why"), NO_WEIGHTS, ids=range(len(NO_WEIGHTS)))
def test_hostile_weights_are_refused(weights: bytes, why: str, path: Path) -> None:
    data, _ = parts(path)
    path.write_bytes(packed(data, weights))
    with pytest.raises(ProgramFormatError, match=why):
        hf.load(path, verify=False)


def test_checksums_tell_of_other_bytes(path: Path) -> None:
    whole = bytearray(path.read_bytes())
    at = whole.index(b"layers" if b"layers" in whole else b"while_loop")
    whole[at] ^= 1
    path.write_bytes(whole)
    with pytest.raises(ProgramFormatError, match=r"other bytes in 'program\.json'"):
        hf.load(path)


def test_a_large_file_is_refused_before_it_is_read(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "MAX_PROGRAM", 1000)
    with pytest.raises(ProgramFormatError, match="at most 1000 are read"):
        hf.load(path)
