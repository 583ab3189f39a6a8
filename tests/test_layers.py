"""A machine holds the layers: which module may import which, and what a file may be.

CONTRIBUTING.md says why, and `ORDER` says what. There is no list of exceptions: what
does not fit belongs in another folder, or needs a place of its own in `ORDER`.
"""

import ast
import io
import os
import re
import tokenize
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = "hopflow"
CODE = ("src", "tests", "property_tests", "benchmarks", "examples")

# One entry a layer. A module may import from those that stand before it, in its own
# layer too, and freely within its own folder as long as no circle closes.
ORDER = (
    (
        *("errors", "synonyms", "config", "logs", "stats", "pytree", "dtypes"),
        *("agreement", "devices", "recursion", "pickling", "tracebacks", "entries"),
    ),
    ("symbolic",),
    ("graph", "loop_ir"),
    ("bind", "progress", "ops", "zeros", "tensor", "random"),
    ("trace",),
    ("batching", "autograd"),
    ("hops",),
    ("compiler",),
    (
        *("backends", "profile", "calls", "jit", "transforms"),
        *("fx", "nn", "rewrite", "export"),
        # The package itself, which re-exports the above; then what uses it as users do.
        *("reproduction", "__init__", "testing", "demo", "cli", "__main__"),
    ),
)
# Inside hops/ there is an order too. What is not named comes after, in any order.
HOPS = (
    *("subgraphs", "schema", "replay", "base"),
    *("rule_tracing", "rule_regions", "own_rules"),
    *("higher_order_op", "loops"),
    *("dynamic_shapes", "branches", "cond", "switch", "scan", "reverse_modes"),
    *("while_loop", "scanning", "map"),
)
# Above it in the order, or in the same folder, and yet not for it.
FORBIDDEN = {
    "compiler": ("hops", "autograd"),  # operators bring their own lowering
    # What targets share knows none of them; and before emission, nothing of LLVM.
    "compiler.passes": ("compiler.llvm", "compiler.cpu"),
    "compiler.kernel_program": ("compiler.llvm", "compiler.cpu"),
    "compiler.schedule": ("compiler.llvm", "compiler.cpu"),
    "compiler.llvm": ("compiler.cpu",),
}
# Third-party libraries that one folder alone may import.
HOMES = {"sympy": "symbolic"}

RANK = {
    name: (layer, place)
    for layer, names in enumerate(ORDER)
    for place, name in enumerate(names)
}


class Import(NamedTuple):
    """`importer` imports `imported`, both by the full names of their modules."""

    importer: str
    imported: str
    line: int
    in_function: bool  # runs when the function does
    for_types: bool  # under `if TYPE_CHECKING`: never runs

    def __str__(self) -> str:
        return f"{self.importer}:{self.line} imports {self.imported}"


def python_files(folder: Path) -> Iterator[Path]:
    for parent, folders, files in os.walk(folder, followlinks=True):
        folders[:] = sorted(set(folders) - {"__pycache__"})
        for file in sorted(files):
            if file.endswith(".py"):
                yield Path(parent, file)


def modules_of(src: Path) -> dict[str, Path]:
    """The modules of the package by full name; a package has its folder's name."""
    names = {}
    for path in python_files(src / PACKAGE):
        *folders, last = path.relative_to(src).with_suffix("").parts
        names[".".join(folders if last == "__init__" else [*folders, last])] = path
    return names


def component(module: str) -> str:
    """What has a place in `ORDER`: "graph" of "hopflow.graph.node"."""
    return [*module.split("."), "__init__"][1]


def is_within(module: str, folder: str) -> bool:
    return f"{module}.".startswith(f"{PACKAGE}.{folder}.")


def is_ours(module: str) -> bool:
    return module.split(".")[0] == PACKAGE


class ImportFinder(ast.NodeVisitor):
    def __init__(self, module: str, path: Path, modules: Mapping[str, Path]) -> None:
        self.module = module
        self.folder = module if path.stem == "__init__" else module.rpartition(".")[0]
        self.modules = modules
        self.depth = 0  # of functions around
        self.for_types = False
        self.found: list[Import] = []
        self.visit(ast.parse(path.read_text(), str(path)))

    def add(self, imported: str, line: int) -> None:
        self.found.append(
            Import(self.module, imported, line, self.depth > 0, self.for_types)
        )

    def absolute(self, name: str, dots: int) -> str:
        if not dots:
            return name
        above = self.folder.split(".")
        return ".".join([*above[: len(above) - dots + 1], *filter(None, [name])])

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.add(alias.name, node.lineno)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        source = self.absolute(node.module or "", node.level)
        for alias in node.names:
            inner = f"{source}.{alias.name}"
            self.add(inner if inner in self.modules else source, node.lineno)

    def visit_Call(self, node: ast.Call) -> None:
        match node:
            case ast.Call(
                func=ast.Name(id=name) | ast.Attribute(attr=name),
                args=[ast.Constant(value=str(target)), *_],
            ) if name in ("import_module", "__import__"):
                bare = target.lstrip(".")
                self.add(self.absolute(bare, len(target) - len(bare)), node.lineno)
        self.generic_visit(node)

    def visit_If(self, node: ast.If) -> None:
        before = self.for_types
        if ast.unparse(node.test).rpartition(".")[2] == "TYPE_CHECKING":
            self.for_types = True
        for statement in node.body:
            self.visit(statement)
        self.for_types = before
        for statement in node.orelse:
            self.visit(statement)

    def visit_function(self, node: ast.AST) -> None:
        self.depth += 1
        self.generic_visit(node)
        self.depth -= 1

    visit_FunctionDef = visit_AsyncFunctionDef = visit_Lambda = visit_function


def imports_of(src: Path) -> list[Import]:
    modules = modules_of(src)
    return [
        found
        for name, path in modules.items()
        for found in ImportFinder(name, path, modules).found
    ]


def breaks_the_order(edge: Import) -> str | None:
    """What is wrong with an import of our own, if anything is."""
    here, there = component(edge.importer), component(edge.imported)
    for name in (here, there):
        if name not in RANK:
            return f"{edge}, and ORDER has no place for `{name}`"
    for folder, others in FORBIDDEN.items():
        for other in others if is_within(edge.importer, folder) else ():
            if is_within(edge.imported, other):
                return f"{edge}: `{folder}` may not import `{other}`"
    if here == there:
        if here == "hops" and hops_rank(edge.imported) > hops_rank(edge.importer):
            return f"{edge}, which comes later in hops/"
        return None
    if RANK[there] > RANK[here]:
        return f"{edge}, which is below it in the order"
    return None


def hops_rank(module: str) -> int:
    _, _, file = module.removeprefix(f"{PACKAGE}.").partition(".")
    if not file:
        return len(HOPS) + 1  # hops/__init__, which may re-export all the rest
    return HOPS.index(file) if file in HOPS else len(HOPS)


def circles(edges: list[Import]) -> list[list[str]]:
    """The groups of modules that need each other before any of them is complete."""
    graph: dict[str, set[str]] = {}
    for edge in edges:
        if not edge.for_types:
            graph.setdefault(edge.importer, set()).add(edge.imported)

    reach: dict[str, set[str]] = {}
    for start in graph:
        seen: set[str] = set()
        stack = list(graph[start])
        while stack:
            if (module := stack.pop()) not in seen:
                seen.add(module)
                stack.extend(graph.get(module, ()))
        reach[start] = seen
    groups = {
        frozenset(m for m in reach[start] if start in reach.get(m, ()))
        for start in graph
        if start in reach[start]
    }
    return sorted(sorted(group) for group in groups)


def comments(path: Path) -> Iterator[tuple[int, str]]:
    for token in tokenize.generate_tokens(io.StringIO(path.read_text()).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


UNNUMBERED = re.compile(r"\b(TODO|FIXME|XXX)\b(?!\W{0,2}#\d)")
EDGES = imports_of(ROOT / "src")
OURS = [edge for edge in EDGES if is_ours(edge.imported)]
FILES = [ROOT / "conftest.py", *(f for d in CODE for f in python_files(ROOT / d))]


def test_the_package_is_found_with_the_folders_behind_links() -> None:
    names = modules_of(ROOT / "src")
    assert {PACKAGE, "hopflow.hops", "hopflow.autograd"} <= names.keys()


def test_every_import_is_of_something_above_in_the_order() -> None:
    assert [why for edge in OURS if (why := breaks_the_order(edge))] == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert circles(OURS) == []


def test_no_function_imports_our_own_package() -> None:
    assert [str(edge) for edge in OURS if edge.in_function] == []


@pytest.mark.parametrize("library", HOMES)
def test_a_library_with_a_home_is_imported_there_only(library: str) -> None:
    edges = [e for e in EDGES if e.imported.split(".")[0] == library]
    assert [str(e) for e in edges if component(e.importer) != HOMES[library]] == []
    assert [str(e) for e in edges if not (e.in_function or e.for_types)] == []


def test_every_note_of_work_to_do_names_its_issue() -> None:
    assert [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path in FILES
        for line, text in comments(path)
        if UNNUMBERED.search(text)
    ] == []


# The tests of the test: each on a package of a few lines.


Findings = Callable[[dict[str, str]], list[Import]]


@pytest.fixture
def findings(tmp_path: Path) -> Findings:
    """Write a package, given as {path: text}, and return its imports."""

    def write(files: dict[str, str]) -> list[Import]:
        for name, text in {"__init__.py": "", **files}.items():
            path = tmp_path / PACKAGE / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return imports_of(tmp_path)

    return write


@pytest.mark.parametrize(
    ("file", "text", "fault"),
    [
        ("graph/a.py", "import hopflow.trace", "below it in the order"),
        ("graph/a.py", "from hopflow import loop_ir", "below it in the order"),
        ("graph/a.py", "from ..loop_ir import b", "below it in the order"),
        ("graph/a.py", "from hopflow import jit", "below it in the order"),
        ("errors.py", "from hopflow.config import x", "below it in the order"),
        ("jit.py", "import hopflow", "below it in the order"),
        ("hops/cond.py", "from hopflow.hops.scan import x", "later in hops/"),
        ("hops/scan.py", "from hopflow.hops.flex import x", "later in hops/"),
        ("hops/flex.py", "from hopflow.hops import x", "later in hops/"),
        ("compiler/a.py", "from hopflow.hops import cond", "may not import `hops`"),
        ("compiler/a.py", "import hopflow.autograd", "may not import `autograd`"),
        (
            "compiler/llvm/a.py",
            "from hopflow.compiler.cpu import jit",
            "`compiler.llvm` may not import `compiler.cpu`",
        ),
        (
            "compiler/schedule/a.py",
            "from ..llvm import types",
            "`compiler.schedule` may not import `compiler.llvm`",
        ),
        ("helpers.py", "import hopflow.errors", "no place for `helpers`"),
        ("graph/a.py", "if True:\n    import hopflow.ops", "below it in the order"),
        (
            "graph/a.py",
            "import typing\nif typing.TYPE_CHECKING:\n    import hopflow.ops",
            "below it in the order",
        ),
        (
            "graph/a.py",
            "from importlib import import_module\nx = import_module('hopflow.ops')",
            "below it in the order",
        ),
    ],
)
def test_an_import_down_the_order_is_found(
    findings: Findings, file: str, text: str, fault: str
) -> None:
    edges = findings({file: text, "jit.py": "" if file != "jit.py" else text})
    [why] = [w for e in edges if is_ours(e.imported) and (w := breaks_the_order(e))]
    assert fault in why


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("loop_ir/a.py", "from hopflow.graph import Node"),
        ("graph/a.py", "from hopflow.graph.b import Node"),
        ("hops/map.py", "from hopflow.hops.scan import x"),
        ("hops/flex.py", "from hopflow.hops.check import x"),
        ("hops/__init__.py", "from hopflow.hops.flex import x"),
        ("compiler/llvm/a.py", "from hopflow.compiler.reuse import x"),
        ("compiler/cpu/a.py", "from hopflow.compiler.llvm import types"),
        ("compiler/a.py", "from hopflow.compiler.cpu import runtime"),
        ("cli.py", "import hopflow as hf"),
    ],
)
def test_an_import_up_the_order_is_not(
    findings: Findings, file: str, text: str
) -> None:
    assert [w for e in findings({file: text}) if (w := breaks_the_order(e))] == []


def test_a_circle_is_found_through_a_package_and_not_through_types(
    findings: Findings,
) -> None:
    edges = findings(
        {
            "graph/__init__.py": "from hopflow.graph.a import x",
            "graph/a.py": "from hopflow.graph import b",
            "graph/b.py": "from hopflow.graph import y",
            "ops/c.py": "from hopflow.ops.d import x",
            "ops/d.py": "from typing import TYPE_CHECKING\n"
            "if TYPE_CHECKING:\n    from hopflow.ops.c import x",
        }
    )
    assert circles(edges) == [["hopflow.graph", "hopflow.graph.a", "hopflow.graph.b"]]


@pytest.mark.parametrize(
    ("text", "hidden"),
    [
        ("def f():\n    import hopflow.errors", True),
        ("class C:\n    async def f(self):\n        from hopflow import errors", True),
        ("def f():\n    __import__('hopflow.errors')", True),
        ("class C:\n    import hopflow.errors", False),
        ("try:\n    import hopflow.errors\nexcept ImportError: pass", False),
    ],
)
def test_an_import_in_a_function_is_found(
    findings: Findings, text: str, hidden: bool
) -> None:
    [edge] = findings({"ops/a.py": text})
    assert edge.in_function is hidden


@pytest.mark.parametrize(
    ("comment", "bare"),
    [
        ("# TODO: later", True),
        ("# FIXME(someone)", True),
        ("# TODO(#12): later", False),
        ("# TODO #12", False),
        ("# FIXME: #3", False),
        ("# a to-do list", False),
    ],
)
def test_a_note_without_an_issue_is_found(comment: str, bare: bool) -> None:
    assert bool(UNNUMBERED.search(comment)) is bare
