"""Tracebacks show the user's frames, and the path of operators between them."""

import gc
import subprocess
import sys
import textwrap
import traceback
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

import hopflow
from hopflow.errors import (
    ArgumentValueError,
    CarryTypeError,
    HopflowError,
    IndexingError,
    LoopLimitError,
    ShapeError,
)
from hopflow.graph.parser import parse
from hopflow.testing.requires import requires
from hopflow.tracebacks import is_own_file

hf: Any = hopflow

X = hf.asarray(np.arange(3.0))


def helper(x: Any, i: Any) -> Any:
    return x[i]


def product(*_: Any) -> Any:
    return X @ hf.ones((2,))


def loop(body: Callable[..., Any]) -> Any:
    return hf.while_loop(
        lambda i, _: i < 5, body, (0, hf.asarray(1.0, dtype=hf.float64))
    )


def broken(i: Any, a: Any) -> Any:
    return i + 1, hf.cond(a > 0, product, lambda _: a, (a,))


def out_of_range(i: Any, a: Any) -> Any:
    return i + 1, hf.cond(a > -1, lambda: helper(X, i), lambda: a * 1.0)


def path_of(f: Callable[..., Any], *args: Any) -> list[str]:
    """The functions in the traceback of the error that a call raises."""
    with pytest.raises(HopflowError) as caught:
        f(*args)
    error = caught.value
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    assert not any(map(is_own_file, files)), files
    names = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    return names[names.index("path_of") + 1 :]


def in_debug_mode(f: Callable[..., Any]) -> Any:
    with hf.debug():
        return f()


OPERATORS = ["while_loop/body", "broken", "cond/then", "product"]
WAYS: dict[str, Callable[[Callable[..., Any]], Any]] = {
    "eager": lambda f: f(),
    "jit": lambda f: hf.jit(f)(),
    "debug": in_debug_mode,
    "trace": lambda f: hf.trace(f, captures=True),
    "grad": lambda f: hf.grad(lambda x: f()[1] * x)(1.0),
    "jit of vmap": lambda f: hf.jit(hf.vmap(lambda x: x * f()[1]))(X),
    "checkpoint": lambda f: hf.checkpoint(f)(),
    "subgraph": lambda f: hf.subgraph(f)(),
    "functionalize": lambda f: hf.functionalize(f)(),
    "map": lambda f: hf.map(lambda x: x * f()[1], X),
}


@pytest.mark.parametrize("way", WAYS)
def test_the_path_goes_through_operators_in_every_mode(way: str) -> None:
    found = path_of(WAYS[way], lambda: loop(broken))
    assert [name for name in found if name != "<lambda>"][-5:] == ["loop", *OPERATORS]


@pytest.mark.parametrize(
    "f",
    [
        lambda: X @ hf.ones((2,)),
        lambda: hf.ones((2,)) * X,
        lambda: X.reshape(7),
        lambda: X.T,
        lambda: X[7],
        lambda: X.sum(axis=4),
        lambda: hf.sum(X, axis=4),
        lambda: hf.linalg.det(X),
        lambda: hf.random.normal(3, ()),
        lambda: float(X),
        lambda: hf.vjp(hf.sin, X)[1](hf.ones((2,))),
        lambda: hf.linearize(hf.sin, X)[1](hf.ones((2,))),
        lambda: hf.trace(hf.sin, X)(hf.ones((2,))),
        lambda: hf.jit(hf.sin, donate=(3,))(X),
        lambda: hf.custom_jvp(product)(),
        lambda: np.ones(4) + X,
        lambda: np.add(np.ones(4), X),
        lambda: np.concatenate([X, hf.ones((1, 2))]),
        lambda: X ** hf.ones(2),
        lambda: divmod(X, hf.ones(2)),
        lambda: X.__round__("a"),
        lambda: hf.Dim(3),
        lambda: hf.custom_jvp(3),
        lambda: hf.jit(dynamic=True)(3),
        lambda: hf.control_flow(3),
        lambda: parse("graph", {}),
    ],
)
def test_an_eager_error_comes_from_the_line_that_asked(f: Callable[..., Any]) -> None:
    assert path_of(f) in (["<lambda>"], ["<lambda>", "product"])


BAD = hf.symbolic_trace(lambda x: x @ hf.ones(7))
GRAPH = BAD.graph


class Leaking(hf.fx.Tracer):  # type: ignore[misc]
    proxies: ClassVar[list[Any]] = []

    def proxy(self, node: Any) -> Any:
        self.proxies.append(super().proxy(node))
        return self.proxies[-1]


Leaking().trace(lambda x: x)


@pytest.mark.parametrize(
    "f",
    [
        lambda: hf.fx.Interpreter(BAD).run(X),
        lambda: hf.fx.Interpreter(hf.trace(hf.sin, X)).run(hf.ones(2)),
        lambda: BAD.propagate(X),
        lambda: hf.fx.ShapeProp(BAD).propagate(X),
        lambda: hf.symbolic_trace(lambda x: x if x > 0 else -x),
        lambda: hf.symbolic_trace(lambda x: len(x)),
        lambda: hf.symbolic_trace(3),
        lambda: hf.fx.Tracer().trace(3),
        lambda: Leaking.proxies[0] + 1,
        lambda: Leaking.proxies[0][0],
        lambda: Leaking.proxies[0].sum(),
        lambda: Leaking.proxies[0](3),
        lambda: hf.fx.replace_pattern(hf.trace(hf.sin, X), hf.sin, hf.sum),
        lambda: hf.fx.replace_pattern(BAD, hf.sin, lambda *_: 3),
        lambda: hf.fx.split_module(BAD, None, lambda _: []),
        lambda: hf.fx.to_dot(3),
        lambda: hf.fx.FxGraphDrawer(3),
        lambda: hf.fx.open_bodies(3),
        lambda: hf.fx.Transformer(3),
        lambda: hf.fx.wrap(3),
        lambda: hf.wrap("missing"),
        lambda: hf.fx.module_of(3),
        lambda: hf.fx.GraphModule(3),
        lambda: hf.fx.GraphModule(hf.fx.Graph()),
        lambda: BAD.to_folder("folder", "1"),
        lambda: BAD.add_submodule("a", 3),
        lambda: hf.fx.Graph("1"),
        lambda: GRAPH.erase_node(GRAPH.nodes[0]),
        lambda: GRAPH.create_node("call", hf.sin),
        lambda: GRAPH.inserting_after(GRAPH.output_node()),
        lambda: GRAPH.inserting_before(hf.fx.Graph().placeholder("x")),
        lambda: GRAPH.on_generate_code(3),
        lambda: GRAPH.nodes[0].update_arg(3, 1),
        lambda: hf.fx.Graph().placeholder("x").append(GRAPH.nodes[0]),
        lambda: hf.fx.Graph().call_function(hf.cond).normalized_arguments(),
    ],
)
def test_errors_of_graphs_without_types_are_shortened(f: Callable[..., Any]) -> None:
    found = path_of(f)
    assert found[0] == "<lambda>"
    assert set(found) == {"<lambda>"}


def test_writes_are_shortened_too() -> None:
    def write() -> None:
        X[7] = 1.0

    def add() -> None:
        x = X
        x += hf.ones((2, 3))

    assert path_of(write) == ["write"]
    assert path_of(add) == ["add"]


def test_an_error_of_an_operator_ends_where_it_is_called() -> None:
    with pytest.raises(CarryTypeError):
        loop(lambda i, _: (i, X))
    assert path_of(loop, lambda i, _: (i, X)) == ["loop"]


def test_code_that_control_flow_rewrites_is_the_users() -> None:
    def f(x: Any) -> Any:
        while hf.sum(x) < 3:
            x = x + product()
        return x

    found = path_of(hf.control_flow(f), hf.zeros((3,)))
    assert found[0] == "f"
    assert found[-1] == "product"
    assert "while_loop/body" in found


def test_errors_of_the_user_keep_their_own_frames() -> None:
    def fails(*_: Any) -> Any:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine") as caught:
        hf.jit(lambda: loop(fails))()
    names = [f.name for f in traceback.extract_tb(caught.value.__traceback__)]
    assert names[-3:] == ["loop", "while_loop/body", "fails"]
    assert caught.value.__context__ is None


# --- errors of compiled code ----------------------------------------------------------


@pytest.mark.parametrize("way", ["eager", "jit"])
def test_a_trap_has_the_stack_that_it_was_traced_at(way: str) -> None:
    found = path_of(WAYS[way], lambda: loop(out_of_range))
    assert [name for name in found if name != "<lambda>"] == [
        *("loop", "while_loop/body", "out_of_range", "cond/then", "helper")
    ]


def test_a_trap_of_a_later_call_has_that_stack_too() -> None:
    jitted = hf.jit(lambda x, i: helper(x, i))
    jitted(X, hf.asarray(0))
    assert path_of(jitted, X, hf.asarray(8)) == ["<lambda>", "helper"]
    assert path_of(jitted, X, hf.asarray(9)) == ["<lambda>", "helper"]


def test_entries_of_a_trap_show_their_lines() -> None:
    with pytest.raises(IndexingError) as caught:
        hf.jit(lambda x, i: helper(x, i))(X, hf.asarray(8))
    last = traceback.extract_tb(caught.value.__traceback__)[-1]
    assert (Path(last.filename).name, last.line) == (Path(__file__).name, "return x[i]")
    assert "return x[i]" in "".join(traceback.format_exception(caught.value))


# --- nodes ----------------------------------------------------------------------------


def test_a_node_has_its_helper_and_the_callers_within_the_trace() -> None:
    def f(x: Any) -> Any:
        return hf.map(lambda v: helper(X, hf.astype(v, hf.int64)), x)

    [node] = hf.trace(f, X, captures=True).graph.nodes_of("map")
    inner = node.params["body"].nodes[-1]
    assert [line.function for line in inner.line.stack] == [
        *("f", "map/body", "<lambda>", "helper")
    ]
    assert [line.function for line in node.line.stack] == ["f"]


def test_nodes_of_transforms_have_the_stack_of_what_they_are_of() -> None:
    def f(x: Any) -> Any:
        return hf.sum(helper(x, hf.asarray([0, 1])) ** 2)

    nodes = hf.trace(hf.grad(f), X, captures=True).graph.nodes
    stacks = {tuple(s.function for s in n.line.stack) for n in nodes if n.line}
    assert ("f", "helper") in stacks


def test_a_reason_to_recompile_has_the_helper_and_its_caller() -> None:
    def even(x: Any) -> bool:
        return bool(x.shape[0] % 2 == 0)

    def f(x: Any) -> Any:
        return x if even(x) else -x

    jitted = hf.jit(f, dynamic=True)
    jitted(hf.ones((4,)))
    told = jitted.explain(hf.ones((5,)))
    assert "test_tracebacks.py" in told
    assert told.count("test_tracebacks.py") == 2
    assert "called at" in told


# --- what shows them ------------------------------------------------------------------


@pytest.fixture
def full() -> Iterator[None]:
    before, hf.config.traceback = hf.config.traceback, "full"
    yield
    hf.config.traceback = before


@pytest.mark.usefixtures("full")
def test_all_frames_are_shown_on_request() -> None:
    with pytest.raises(ShapeError) as caught:
        loop(broken)
    files = [f.filename for f in traceback.extract_tb(caught.value.__traceback__)]
    assert any(map(is_own_file, files))


def test_a_traceback_is_full_or_the_users() -> None:
    with pytest.raises(ArgumentValueError, match='must be "user" or "full", and is 3'):
        hf.config.traceback = 3


SCRIPT = """
import hopflow as hf

def body(i, a):
    return i + 1, a @ hf.ones((2,))

def run():
    return hf.jit(lambda: hf.while_loop(lambda i, a: i < 3, body, (0, hf.ones((3,)))))()
"""


def output(program: str, folder: Path, *command: str) -> str:
    path = folder / "test_script.py"
    path.write_text(textwrap.dedent(program))
    done = subprocess.run(
        [sys.executable, *command, str(path)],
        capture_output=True,
        text=True,
        cwd=folder,
        check=False,
    )
    return done.stdout + done.stderr


def test_plain_python_prints_only_the_users_frames(tmp_path: Path) -> None:
    found = output(SCRIPT + "\nrun()\n", tmp_path)
    frames = [line for line in found.splitlines() if line.startswith("  File ")]
    places = [line.split(", ")[2] for line in frames]
    assert places == [
        *("in <module>", "in run", "in <lambda>", "in while_loop/body", "in body")
    ]
    assert len(found.splitlines()) < 20


def test_pytest_shows_only_the_users_frames(tmp_path: Path) -> None:
    test = SCRIPT + "\ndef test_it():\n    run()\n"
    found = output(test, tmp_path, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    assert "while_loop/body" in found
    assert "hopflow/hops" not in found
    assert "hopflow/trace" not in found


def test_pdb_stops_in_the_users_frame(tmp_path: Path) -> None:
    program = f"""{SCRIPT}
import io, pdb, sys
try:
    run()
except Exception as error:
    debugger = pdb.Pdb(stdin=io.StringIO("where\\np i\\nquit\\n"), stdout=sys.stdout)
    debugger.reset()
    debugger.interaction(None, error.__traceback__)
"""
    found = output(program, tmp_path)
    assert "in body" in found or "body()" in found
    assert "trace_body" not in found


@requires("IPython")
def test_notebooks_show_only_the_users_frames(tmp_path: Path) -> None:
    program = f"""{SCRIPT}
from IPython.core.interactiveshell import InteractiveShell
InteractiveShell.instance().run_cell("run()")
"""
    found = output(program, tmp_path)
    assert "while_loop/body" in found
    assert "trace_body" not in found


class Held(list[int]):
    """What a weak reference is made of."""


def sum_of(held: Held) -> Callable[[Any], Any]:
    return lambda x: hf.sum(x) * len(held)


@pytest.mark.parametrize(
    "run",
    [
        lambda f, x: hf.jit(f)(x),
        lambda f, x: hf.cond(x[0] > 0, f, f, x),
        lambda f, x: hf.scan(lambda c, y: (c + f(x), y), 0.0, x),
        lambda f, x: hf.while_loop(lambda c: c < 9.0, lambda c: c + f(x), 1.0),
        lambda f, x: hf.vmap(lambda y: y * f(x))(x),
        lambda f, x: hf.grad(f)(x),
        lambda f, x: hf.grad(hf.checkpoint(f))(x),
    ],
)
def test_a_trace_keeps_no_frame(run: Any) -> None:
    """Else lists of the caller would live on, and seem to have another name."""

    def call() -> Any:
        held = Held([1])
        run(sum_of(held), hf.ones(3))
        return weakref.ref(held)

    gc.disable()
    try:
        call()
        assert call()() is None
    finally:
        gc.enable()


def test_the_error_of_a_loop_of_batch_elements_has_the_line_of_the_loop() -> None:
    def counted(n: Any) -> Any:
        return hf.while_loop(lambda i: i < n, lambda i: i + 1, 0, max_steps=7)

    line = counted.__code__.co_firstlineno + 1
    with pytest.raises(LoopLimitError, match=rf"test_tracebacks.py:{line}"):
        hf.jit(hf.vmap(counted))(hf.asarray([3, 9]))
