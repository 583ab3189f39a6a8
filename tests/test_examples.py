"""What docs/ and examples/ show is what happens."""

import contextlib
import io
import re
import runpy
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from optree import tree_leaves

import hopflow as hf

ROOT = Path(__file__).parent.parent
PAGES = sorted((ROOT / "docs").rglob("*.md"))
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
# A block of Python, and the output where it stands right behind.
BLOCK = re.compile(
    r"^```python\n(?P<code>.*?)^```\n(\n```text\n(?P<output>.*?)^```$)?", re.M | re.S
)
SAID = re.compile(r"^(?: *print\(.*\)  )?# (.*)$", re.M)

# What the last line begins with.
LAST_LINES = {
    "adaptive_computation": "recognized: 9",
    "bouncing_ball": "3 bounces",
    "fixed_point": "while_loop: the gradient of the unrolled loop, to 1e-10",
    "kalman": "wandering   1469.2  published:  1469.1",
    "life": "#.#...............#.#.",
    "mandelbrot": " " * 34 + "......=:......",
    "pendulum": "damping  0.298  in truth: 0.300",
}
# As plain Python it would take minutes: a test of its own looks at its gradient.
ONLY_COMPILED = {"adaptive_computation"}


def blocks() -> Sequence[object]:
    """Each block: its code, and what it says that it prints."""
    found = []
    for page in PAGES:
        for i, block in enumerate(BLOCK.finditer(page.read_text())):
            code, output = block["code"], block["output"]
            said = SAID.findall(code) if output is None else output.splitlines()
            found.append(pytest.param(code, said, id=f"{page.stem}-{i}"))
    return found


@pytest.mark.parametrize(("code", "said"), blocks())
def test_a_block_of_the_documents_prints_what_it_says(
    code: str, said: list[str], tmp_path: Path
) -> None:
    printed = io.StringIO()
    file = tmp_path / "example.py"  # some functions look at their source
    file.write_text(code)
    with contextlib.redirect_stdout(printed):
        exec(compile(code, str(file), "exec"), {"hf": hf})
    assert printed.getvalue().splitlines() == said


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_prints_the_same_compiled_and_as_plain_python(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main = runpy.run_path(str(path))["main"]
    main()
    compiled = capsys.readouterr().out
    assert compiled.splitlines()[-1].startswith(LAST_LINES[path.stem])
    if path.stem not in ONLY_COMPILED:
        with hf.debug():
            main()
        assert capsys.readouterr().out == compiled


def test_the_gradient_of_adaptive_computation_is_that_of_plain_python() -> None:
    example = runpy.run_path(str(ROOT / "examples" / "adaptive_computation.py"))
    (images, digits), _ = example["data"]()
    given = example["initial"](hf.random.key(3)), images[:4], digits[:4]
    compiled = tree_leaves(hf.jit(hf.grad(example["loss"]))(*given))
    with hf.debug():
        plain = tree_leaves(hf.grad(example["loss"])(*given))
    for found, expected in zip(compiled, plain, strict=True):
        np.testing.assert_allclose(np.asarray(found), np.asarray(expected), atol=1e-6)
