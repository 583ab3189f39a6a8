"""The commands about exported programs: what they print, write and refuse."""

import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hopflow as hf
from hopflow import cli
from hopflow.errors import ArgumentValueError
from hopflow.export.specs import Specs
from hopflow.testing.requires import requires
from hopflow.trace.dims import Dim

SOURCE = """
import hopflow as hf


def settle(x, *, target):
    more = lambda x, _: hf.sum(x) < target
    return hf.while_loop(more, lambda x, n: (x + 1, n + 1), (x, 0))


def affine(params, x):
    return {"y": x @ params["w"] + params["b"], "rows": x.shape[0]}


def cut(x, keep_first):
    return x if keep_first else x[1:]


def twice(x):
    return x * 2


def tail(x):
    hf.check(hf.sum(x) > 0, "the sum is not positive")
    return x


class models:
    layer = hf.nn.Linear.init(hf.random.key(0), 3, 2)


wrong = None
"""


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """The command, in a folder with the module of `SOURCE`: status, stdout, stderr."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.py").write_text(SOURCE)

    def run(*arguments: str) -> tuple[int, str, str]:
        status = cli.main(arguments)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def test_a_function_is_exported_inspected_and_run(run: Any) -> None:
    target = ["--arg", "f64[rows]", "--arg", "target=10.0", "--dim", "rows=2..64"]
    status, said, _ = run("export", "model.py:settle", *target, "-o", "a.hopflow")
    assert status == 0
    assert "settle(x, *, target)" in said
    assert "x: f64[rows]" in said
    program = hf.load("a.hopflow")
    assert list(program.range_constraints["rows"]) == [2, 64]
    status, said, _ = run("inspect", "a.hopflow")
    assert status == 0
    assert "x.shape[0] <= 64" in said
    assert "while_loop 1" in said
    status, said, _ = run("run", "a.hopflow", "--input", "[0.25, 0.5]", "--input", "8")
    assert status == 0
    assert "result[0] = Tensor([4.25, 4.5 ], f64[2])" in said
    status, said, _ = run(
        "run", "a.hopflow", "--input", "target=1", "--input", "[1, 2]"
    )
    assert "result[1] = Tensor(0, i64[])" in said


def test_a_module_is_found_as_python_finds_it(run: Any) -> None:
    status, said, _ = run(
        "export", "model:models.layer", "--arg", "f32[n, 3]", "-o", "l.hopflow"
    )
    assert status == 0
    assert "weight: f32[3, 2]" in said
    assert "32 of them tensors" in run("inspect", "l.hopflow")[1]


def test_trees_go_in_by_their_paths_and_come_out_as_files(run: Any) -> None:
    tree = '{"w": f32[3, 2], "b": f32[2]}'
    run(
        "export",
        "model.py:affine",
        "--arg",
        tree,
        "--arg",
        "f32[n, 3]",
        "-o",
        "t.hopflow",
    )
    np.save("x.npy", np.ones((4, 3), np.float32))
    values = ["params['b']=[1, 2]", "params.w=[[1, 2], [3, 4], [5, 6]]", "x.npy"]
    inputs = [word for value in values for word in ("--input", value)]
    status, said, _ = run("run", "t.hopflow", *inputs, "--output", "out")
    assert status == 0
    assert "result.y.npy: f32[4, 2]" in said
    np.testing.assert_array_equal(np.load("out/result.y.npy"), [[10, 14]] * 4)
    assert int(np.load("out/result.rows.npy")) == 4


def test_a_constant_is_no_input(run: Any) -> None:
    run(
        "export", "model.py:cut", "--arg", "f32[3]", "--arg", "False", "-o", "c.hopflow"
    )
    status, said, _ = run("run", "c.hopflow", "--input", "[1, 2, 3]")
    assert status == 0
    assert "[2., 3.]" in said


@pytest.mark.parametrize("short", [dtype.short for dtype in hf.dtypes.ALL])
@pytest.mark.parametrize("shape", ["[]", "[0]", "[2, 3]"])
def test_arrays_of_each_dtype_are_saved_and_read(
    run: Any, short: str, shape: str
) -> None:
    run("export", "model.py:twice", "--arg", f"{short}{shape}", "-o", "d.hopflow")
    type_ = hf.load("d.hopflow").signature.inputs[0].type
    assert type_ is not None
    assert str(type_) == f"{short}{shape}"
    value = str(np.ones(type_.shape, int).tolist())
    run("run", "d.hopflow", "--input", value, "--output", "once")
    status, said, _ = run("run", "d.hopflow", "--input", "once/result.npy")
    assert status == (2 if short == "bool" else 0)
    if status == 0:
        program = hf.load("d.hopflow")
        once = program(hf.ones(type_.shape, dtype=type_.dtype))
        assert said == f"result = {program(once)}\n"


def test_programs_that_differ_have_the_status_1(run: Any) -> None:
    for name, spec in (("a", "f32[n]"), ("b", "f32[3]"), ("c", "f32[n]")):
        run("export", "model.py:twice", "--arg", spec, "-o", f"{name}.hopflow")
    assert run("diff", "a.hopflow", "c.hopflow") == (0, "", "")
    status, said, _ = run("diff", "a.hopflow", "b.hopflow")
    assert status == 1
    assert "f32[3]" in said


def test_a_program_is_data_for_other_tools(run: Any) -> None:
    run("export", "model.py:twice", "--arg", "f32[n]", "-o", "a.hopflow")
    assert json.loads(run("inspect", "a.hopflow", "--json")[1])["operators"]
    assert "multiply(x, 2.0)" in run("inspect", "a.hopflow", "--graph")[1]


@requires("onnx")
def test_a_program_is_converted(run: Any) -> None:
    import onnx

    run("export", "model.py:twice", "--arg", "f32[n]", "-o", "a.hopflow")
    status, said, _ = run("convert", "a.hopflow", "--to", "onnx", "-o", "a.onnx")
    assert (status, said) == (0, "a.onnx\n")
    assert "Mul" in [node.op_type for node in onnx.load("a.onnx").graph.node]


@requires("jax")
def test_an_artifact_of_jax_is_written(run: Any) -> None:
    import jax

    run("export", "model.py:twice", "--arg", "f32[n]", "-o", "a.hopflow")
    status, said, _ = run("convert", "a.hopflow", "--to", "stablehlo", "-o", "a.bin")
    assert (status, said) == (0, "a.bin\n")
    twice = jax.export.deserialize(bytearray(Path("a.bin").read_bytes())).call
    assert twice(np.ones(3, np.float32)).tolist() == [2, 2, 2]


@requires("cc")
def test_native_code_is_written(run: Any) -> None:
    run("export", "model.py:twice", "--arg", "f32[n]", "-o", "a.hopflow")
    status, said, _ = run("convert", "a.hopflow", "--to", "native", "-o", "built")
    assert (status, said) == (0, "built\n")
    assert Path("built/twice.h").exists()
    to_arm = ["--machine", "aarch64", "-o", "arm"]
    assert run("convert", "a.hopflow", "--to", "native", *to_arm)[0] == 0
    assert Path("arm/twice.o").read_bytes() != Path("built/twice.o").read_bytes()
    status, _, said = run("convert", "a.hopflow", "--to", "wasm", *to_arm)
    assert status == 2
    assert "`--machine` is for native code, not wasm." in said


WRONG = {
    "no_such:f": "there is no module `no_such`",
    "no_such.py:f": "there is no file `no_such.py`",
    "model.py": "`model.py` does not name a function as MODULE:FUNCTION",
    "model.py:twise": "Did you mean `twice`?",
    "model.py:wrong": "`f` must be a function",
}


@pytest.mark.parametrize("name", WRONG)
def test_a_function_that_is_not_there_is_named(run: Any, name: str) -> None:
    status, _, said = run("export", name, "--arg", "f32[n]", "-o", "x.hopflow")
    assert status == 2
    assert WRONG[name] in said
    assert not Path("x.hopflow").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arg", "f33[2]"], "`f33` is not a hopflow dtype"),
        (["--arg", "f32[n*m]"], "`n * m` is no size"),
        (["--arg", "f32[-1]"], "`-1` is no size"),
        (["--arg", "f32[n - 9]"], "[-4] is no shape: a size is negative"),
        (["--arg", "x"], "no literal, container or dtype"),
        (["--arg", "f32[n"], "describes no argument"),
        (["--arg", "[" * 5000 + "]" * 5000], "describes no argument"),
        (["--arg", "f64[1000000000000000]"], "nested too deep, or too large"),
        (["--arg", "@no.npy"], "`no.npy` is no .npy file"),
        (["--arg", "x=f32[2]", "--arg", "f32[2]"], "comes after one that has"),
        (["--arg", "f32[n]", "--dim", "n=3"], "`--dim n=3` is no range"),
        (["--arg", "f32[n]", "--dim", "n=5..3"], "cannot lie from 5 to 3"),
        ([], "twice"),
    ],
)
def test_an_argument_that_is_none_is_named(
    run: Any, arguments: list[str], message: str
) -> None:
    status, _, said = run("export", "model.py:twice", *arguments, "-o", "x.hopflow")
    assert status == 2
    assert said.startswith("hopflow export: ")
    assert message in said
    assert not Path("x.hopflow").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["no.hopflow"], "No such file"),
        (["model.py"], "no hopflow program"),
        (["a.hopflow"], "there is no `--input` for `x`"),
        (
            ["a.hopflow", "--input", "[1]", "--input", "2"],
            "`--input 2` is one too many",
        ),
        (["a.hopflow", "--input", "x=[1]", "--input", "x=2"], "one too many"),
        (["a.hopflow", "--input", "one"], "neither a .npy file nor a literal"),
        (["a.hopflow", "--input", "no.npy"], "is no .npy file"),
        (["a.hopflow", "--input", "[" * 5000 + "]" * 5000], "nor a literal"),
        (["a.hopflow", "--input", "[[1], [1, 2]]"], "must have equal lengths"),
        (["a.hopflow", "--input", "model.py.npy"], "is no .npy file"),
        (["a.hopflow", "--input", "[-1]"], "the sum is not positive"),
        (["a.hopflow", "--input", "[[1]]"], "is f32[1, 1]"),
    ],
)
def test_a_run_that_fails_says_why(
    run: Any, arguments: list[str], message: str
) -> None:
    run("export", "model.py:tail", "--arg", "f32[n]", "-o", "a.hopflow")
    Path("model.py.npy").write_text(SOURCE)
    status, _, said = run("run", *arguments)
    assert status == 2
    assert said.startswith("hopflow run: ")
    assert message in said


@requires("wasm-ld")
def test_a_web_page_is_written(run: Any) -> None:
    run("export", "model.py:twice", "--arg", "f32[n]", "-o", "a.hopflow")
    status, said, _ = run("convert", "a.hopflow", "--to", "wasm", "-o", "web")
    assert (status, said) == (0, "web\n")
    assert Path("web/index.html").exists()


@pytest.mark.parametrize("command", ["export", "inspect", "run", "convert", "diff"])
def test_help_has_an_example_that_parses(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        cli.main([command, "--help"])
    assert end.value.code == 0
    said = capsys.readouterr().out
    example = said.partition("example:\n")[2].replace("\\\n", "").split("hopflow ")[1]
    assert example.split()[0] == command


def test_specs_share_their_sizes() -> None:
    specs = Specs({"n": Dim("n", min=3, max=4)})
    first, second = specs.read("f32[n, m]"), specs.read("(i8[2*n + 1], [f64[m - 1]])")
    assert first.value.shape[0] == 4
    assert second.value[0].shape == (9,)
    assert second.value[1][0].shape[0] == first.value.shape[1] - 1
    assert repr(second.dynamic[0]) == "[2*n + 1]"


def test_specs_of_values_are_the_values() -> None:
    assert Specs({}).read('(1, -2.5, "f32[]", None)').value == (1, -2.5, "f32[]", None)
    with pytest.raises(ArgumentValueError, match="Examples"):
        Specs({}).read("lambda: 0")


@pytest.mark.parametrize("has_rich", [True, False])
def test_a_terminal_sees_that_the_command_works(
    run: Any, monkeypatch: pytest.MonkeyPatch, has_rich: bool
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name: find(name) if has_rich or name != "rich" else None,
    )
    status, said, _ = run(
        "export", "model.py:twice", "--arg", "f32[n]", "-o", "a.hopflow"
    )
    assert status == 0
    assert said.startswith("a.hopflow: ")
