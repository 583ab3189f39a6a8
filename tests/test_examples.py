"""What docs/, docstrings and examples/ show is what happens."""

import ast
import contextlib
import inspect
import io
import re
import runpy
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import numpy as np
import pytest
from optree import tree_leaves

import hopflow
import hopflow as hf
import hopflow.testing
from hopflow.testing.executions import agree

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
    "mandelbrot": " " * 12 + "................:--:......",
    "pendulum": "damping  0.298  in truth: 0.300",
}
# As plain Python it would take minutes: a test of its own looks at its gradient.
ONLY_COMPILED = {"adaptive_computation"}
SLOW = {"mandelbrot"}


def blocks() -> Sequence[object]:
    """Each block: its code, and what it says that it prints."""
    found = []
    for page in PAGES:
        for i, block in enumerate(BLOCK.finditer(page.read_text())):
            code, output = block["code"], block["output"]
            said = SAID.findall(code) if output is None else output.splitlines()
            found.append(pytest.param(code, said, id=f"{page.stem}-{i}"))
    return found


def functions_of(code: CodeType) -> Iterator[str]:
    """The functions that code defines, within others too."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            if constant.co_flags & inspect.CO_NEWLOCALS:
                yield named(constant)
            yield from functions_of(constant)


def named(code: CodeType) -> str:
    if code.co_name == "<lambda>":
        return f"lambda in line {code.co_firstlineno}"
    return code.co_qualname


class Ran(NamedTuple):
    """What came of running an example."""

    printed: list[str]
    uncalled: set[str]
    names: dict[str, Any]


def run(code: str, file: Path, names: dict[str, Any]) -> Ran:
    """Run an example, and note which of its functions are called: one that is only
    defined, or given to a transform that is never applied, shows nothing."""
    file.write_text(code)  # some functions look at their source
    compiled = compile(code, str(file), "exec")
    called: set[str] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename == str(file):
            called.add(named(frame.f_code))

    printed, before = io.StringIO(), sys.getprofile()
    with contextlib.redirect_stdout(printed):
        sys.setprofile(note)
        try:
            exec(compiled, names)
        finally:
            sys.setprofile(before)
    uncalled = set(functions_of(compiled)) - called
    return Ran(printed.getvalue().splitlines(), uncalled, names)


@pytest.mark.parametrize(("code", "said"), blocks())
def test_a_block_of_the_documents_prints_what_it_says(
    code: str, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where examples write
    ran = run(code, tmp_path / "example.py", {"hf": hf})
    assert ran.printed == said
    assert not ran.uncalled


# --- docstrings -----------------------------------------------------------------------

INDENTED = re.compile(r"(?:\A|\n\n)((?: {4}.*(?:\n|\Z)|\n)+)")


def public_docstrings() -> Iterator[tuple[str, str]]:
    """The docstrings of what users call, by name: of functions, classes, methods."""
    homes = (hf, hf.nn, hf.fx, hf.linalg, hf.random, hopflow.testing)
    seen: set[int] = set()
    for home in homes:
        for name in home.__all__:
            thing = inspect.unwrap(getattr(home, name))
            if id(thing) in seen:  # by another name
                continue
            seen.add(id(thing))
            yield f"{home.__name__}.{name}", inspect.getdoc(thing) or ""
            if isinstance(thing, type):
                for member, method in vars(thing).items():
                    is_public = callable(method) and not member.startswith("_")
                    doc = inspect.getdoc(method) if is_public else None
                    yield f"{home.__name__}.{name}.{member}", doc or ""


def docstring_examples() -> dict[str, str]:
    """The indented blocks of public docstrings that are code, by name."""
    found: dict[str, str] = {}
    for name, doc in public_docstrings():
        for block in INDENTED.findall(doc):
            code = textwrap.dedent(block).strip()
            with contextlib.suppress(SyntaxError):
                if ast.parse(code).body:
                    found[name] = code
    return found


X = hf.asarray([0.5, 1.0])


def cond_operands() -> dict[str, Any]:
    pred, then, else_ = hf.asarray(True), hf.sin, hf.cos
    short = {"p": pred, "f": then, "g": else_}
    return {"pred": pred, "true_fn": then, "false_fn": else_, "x": X, **short}


def sees_operators(ran: Ran) -> None:
    assert ran.printed == ["cond"]


def is_wrapped(ran: Ran) -> None:
    length, lookup = ran.names["length"], ran.names["lookup"]
    traced = hf.symbolic_trace(lambda x: (length(x), lookup(x, x)))
    calls = [node.target for node in traced.graph.nodes if node.args]
    assert calls[:2] == [length, lookup]
    assert traced([1, 2]) == (2, None)
    assert length([1, 2]) == 2


def is_a_module(ran: Ran) -> None:
    square = hf.nn.Linear(hf.eye(2), hf.zeros(2))
    network = ran.names["Network"](square, square)
    agree(network(X), np.tanh(np.asarray(X)))
    found = hf.jit(hf.grad(lambda n: hf.sum(n(X))))(network)
    assert found.first.weight.shape == (2, 2)


def is_an_operator(ran: Ran) -> None:
    twice = ran.names["twice"]
    agree(twice(hf.sin, X), np.sin(np.sin(np.asarray(X))))
    for transform in (hf.jit, hf.vmap, lambda f: hf.grad(lambda x: hf.sum(f(x)))):
        wanted = transform(lambda x: hf.sin(hf.sin(x)))(X)
        agree(transform(lambda x: twice(hf.sin, x))(X), wanted)


def has_a_rule_for_tangents(ran: Ran) -> None:
    f, asked = ran.names["f"], []

    def rule(primals: Any, tangents: Any) -> Any:
        asked.append(primals)
        return f(*primals), tangents[0]

    f.defjvp(rule)
    f.fun = lambda x, y: x + y
    agree(hf.grad(lambda x: hf.sum(f(x, X)))(X), np.ones(2))
    assert asked


def has_rules_for_cotangents(ran: Ran) -> None:
    f = ran.names["f"]
    f.fun = lambda x, y: x + y
    f.defvjp(lambda x, y: (x + y, None), lambda _, ct: (2 * ct, None))
    agree(hf.grad(lambda x: hf.sum(f(x, X)))(X), np.full(2, 2.0))


def is_a_schema(ran: Ran) -> None:
    assert ran.printed[0] == "cond("


def module_names() -> dict[str, Any]:
    module = hf.symbolic_trace(lambda x: hf.sin(x) * 2.0)
    first = {"graph": module.graph, "FIRST": "first = 1\n"}
    return {"module": module, "fx": hf.fx, "Path": Path, **first}


def doubles_the_sine(module: Any) -> None:
    agree(module(X), np.sin(np.asarray(X)) * 2.0)


def writes_the_first_line(ran: Ran) -> None:
    first, *_ = str(ran.names["graph"]).partition(":\n")[2].splitlines()
    assert first.strip() == "first = 1"


def is_imported(ran: Ran) -> None:
    del sys.modules["layer"]
    doubles_the_sine(ran.names["FxModule"]())


def has_types(ran: Ran) -> None:
    types = [str(node.meta["type"]) for node in ran.names["module"].graph.nodes]
    assert types == ["f32[3, 4]"] * 4


def has_a_body(ran: Ran) -> None:
    module = ran.names["module"]
    assert [type(v) for v in module.attributes.values()] == [hf.fx.GraphModule]
    agree(module(X), np.sin(np.asarray(X)))


def is_split(ran: Ran) -> None:
    assert [n.kind for n in ran.names["parts"].graph.nodes][1] == "call_module"
    doubles_the_sine(ran.names["parts"])


def is_drawn(_: Ran) -> None:
    assert Path("model.dot").read_text().startswith('digraph "')


def jitted_names() -> dict[str, Any]:
    jitted = hf.jit(lambda x: hf.sin(x) * 2.0)
    jitted(X)
    return {"jitted": jitted}


def computes_the_graph(ran: Ran) -> None:
    [found] = ran.names["module"](X)
    agree(found, np.sin(np.asarray(X)) * 2.0)


class Frame(NamedTuple):
    """What stands around an example of a docstring.

    names    that it takes for known
    check    applies the transform that the example is about to what it has made
    stubs    its functions that are only headings, written with `...`
    """

    names: Callable[[], dict[str, Any]]
    check: Callable[[Ran], None]
    stubs: frozenset[str] = frozenset()


def no_names() -> dict[str, Any]:
    return {}


DOCSTRINGS: dict[str, Frame] = {
    "hopflow.HigherOrderOp": Frame(
        no_names, is_an_operator, frozenset(["Twice.debug"])
    ),
    "hopflow.Interpreter": Frame(cond_operands, sees_operators),
    "hopflow.custom_jvp": Frame(
        no_names, has_a_rule_for_tangents, frozenset(["f", "_"])
    ),
    "hopflow.custom_vjp": Frame(
        no_names, has_rules_for_cotangents, frozenset(["f", "forward", "backward"])
    ),
    "hopflow.fx.Graph.on_generate_code": Frame(module_names, writes_the_first_line),
    "hopflow.fx.GraphModule.to_folder": Frame(module_names, is_imported),
    "hopflow.fx.ShapeProp": Frame(module_names, has_types),
    "hopflow.fx.module_of": Frame(jitted_names, computes_the_graph),
    "hopflow.fx.open_bodies": Frame(no_names, has_a_body),
    "hopflow.fx.split_module": Frame(module_names, is_split),
    "hopflow.fx.to_dot": Frame(module_names, is_drawn),
    "hopflow.nn.Module": Frame(no_names, is_a_module, frozenset(["Network.forward"])),
    "hopflow.schema": Frame(cond_operands, is_a_schema),
    "hopflow.wrap": Frame(no_names, is_wrapped, frozenset(["lookup"])),
}
DOCSTRINGS_CODE = docstring_examples()


def test_each_example_of_a_docstring_has_a_frame_to_run_in() -> None:
    assert set(DOCSTRINGS_CODE) == set(DOCSTRINGS)


@pytest.mark.parametrize("name", DOCSTRINGS)
def test_the_example_of_a_docstring_does_what_it_is_about(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # where examples write
    monkeypatch.syspath_prepend(tmp_path)
    frame = DOCSTRINGS[name]
    names = {"hf": hf, "__name__": "example", **frame.names()}
    ran = run(DOCSTRINGS_CODE[name], tmp_path / "example.py", names)
    assert ran.uncalled <= frame.stubs
    frame.check(ran)


# --- examples/ ------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, marks=[pytest.mark.slow] * (path.stem in SLOW))
        for path in EXAMPLES
    ],
    ids=lambda path: path.stem,
)
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
