"""What reads a file of a stranger: all that it raises is ProgramFormatError.

Texts of graphs are in test_graph_text.py.
"""

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hopflow as hf
from hopflow.errors import ProgramFormatError
from hopflow.graph.parser import MAX_LENGTH, parse
from hopflow.hops.schema import Schema
from hopflow.testing.program import Program
from hopflow.testing.program_text import from_text, to_text
from hopflow.testing.strategies import programs

Reader = Callable[[str], Any]


def read_schema(text: str) -> Any:
    return Schema.from_dict(json.loads(text))


def some_schema() -> Any:
    f = lambda c, x: (c + x, c)  # noqa: E731
    return hf.schema(hf.scan, f, 0.0, hf.asarray([1.0, 2.0]))


changes = st.lists(
    st.tuples(st.integers(0, 5000), st.integers(0, 6), st.text(max_size=4)), min_size=1
)


def spoilt(text: str, edits: list[tuple[int, int, str]]) -> str:
    for at, removed, added in edits:
        place = at % (len(text) + 1)
        text = text[:place] + added + text[place + removed :]
    return text


def refuses_or_reads(read: Reader, text: str) -> None:
    try:
        read(text)
    except (ProgramFormatError, json.JSONDecodeError):
        return


@given(changes)
def test_a_spoilt_text_of_a_schema_is_read_or_refused(edits: Any) -> None:
    refuses_or_reads(read_schema, spoilt(json.dumps(some_schema().to_dict()), edits))


@given(programs(size=2, depth=1), changes)
def test_a_spoilt_program_is_read_or_refused(program: Program, edits: Any) -> None:
    refuses_or_reads(from_text, spoilt(to_text(program), edits))


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
trees = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(st.data())
def test_a_spoilt_schema_is_read_or_refused(data: Any) -> None:
    tree = some_schema().to_dict()
    key = data.draw(st.sampled_from(sorted(tree)))
    rows = tree[key]
    if isinstance(rows, list) and rows and data.draw(st.booleans()):
        row = rows[0]
        inner = sorted(row) if isinstance(row, dict) else range(len(row))
        row[data.draw(st.sampled_from(inner))] = data.draw(trees)
    else:
        tree[key] = data.draw(trees)
    refuses_or_reads(lambda _: Schema.from_dict(tree), "")


def nested(depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


@pytest.mark.parametrize("key", [None, "operator", "arguments", "functions"])
@pytest.mark.parametrize(
    "part", [nested(100_000), 10**5000, [0] * 10**6], ids=["deep", "digits", "long"]
)
def test_what_is_too_large_for_a_schema_is_refused_in_few_words(
    key: str | None, part: Any
) -> None:
    tree = part if key is None else some_schema().to_dict() | {key: part}
    with pytest.raises(ProgramFormatError, match="Schema: ") as caught:
        Schema.from_dict(tree)
    assert len(str(caught.value)) < 200


def test_the_text_of_a_graph_has_a_largest_length() -> None:
    with pytest.raises(ProgramFormatError, match="at most 16777216 are read"):
        parse(" " * (MAX_LENGTH + 1), {})
