"""The documents are true: their links lead somewhere, and their examples run."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from hopflow.graph.parser import parse
from hopflow.graph.printer import format_graph
from hopflow.graph.verifier import verify
from hopflow.hops.cond import COND
from hopflow.hops.scan import SCAN
from hopflow.ops.opdef import OPERATIONS

ROOT = Path(__file__).parent.parent
DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]
LINK = re.compile(r"\]\((?!\w+:)([^)#\s]+)")
NOTE = re.compile(r"docs/notes/[\w-]+\.md")
GRAPH = re.compile(r"^    def .* -> .*\n(?:    .*\n)+", re.M)


def sources() -> Iterator[Path]:
    for folder in ("hops", "autograd", "src", "tests", "property_tests", "benchmarks"):
        yield from (ROOT / folder).rglob("*.py")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_leads_to_a_file(document: Path) -> None:
    links = LINK.findall(document.read_text())
    assert [to for to in links if not (document.parent / to).exists()] == []


def test_every_note_that_the_code_points_to_exists() -> None:
    assert [
        f"{path.relative_to(ROOT)}: {note}"
        for path in sources()
        for note in NOTE.findall(path.read_text())
        if not (ROOT / note).exists()
    ] == []


def test_the_code_points_to_every_note() -> None:
    named = {note for path in sources() for note in NOTE.findall(path.read_text())}
    notes = {f"docs/notes/{p.name}" for p in (ROOT / "docs" / "notes").glob("*_*.md")}
    assert notes
    assert notes - named == set()


def graphs_of_notes() -> Iterator[str]:
    for note in sorted((ROOT / "docs" / "notes").glob("*.md")):
        yield from map(dedent, GRAPH.findall(note.read_text()))


def test_the_graphs_in_the_notes_keep_the_rules() -> None:
    texts = list(graphs_of_notes())
    assert len(texts) >= 3
    for text in texts:
        graph = parse(text, {**OPERATIONS, "cond": COND, "scan": SCAN})
        verify(graph)
        assert format_graph(graph) == text


def test_every_page_is_reached_from_the_map() -> None:
    reached: set[Path] = set()
    pending = [ROOT / "docs" / "index.md"]
    while pending:
        page = pending.pop()
        if page not in reached and page.suffix == ".md" and page.exists():
            reached.add(page)
            links = LINK.findall(page.read_text())
            pending += [(page.parent / to).resolve() for to in links]
    assert {path for path in DOCUMENTS if path not in reached} == set()


def test_the_example_of_the_readme_prints_what_it_says() -> None:
    [example] = re.findall(
        r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S
    )
    said = re.findall(r"^print\(.*\)  # (.*)$", example, re.M)
    run = subprocess.run(
        [sys.executable, "-c", example], capture_output=True, text=True, check=False
    )
    assert run.stdout.splitlines() == said, run.stderr
