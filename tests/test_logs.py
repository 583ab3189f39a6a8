"""Logs on request, the trace of events, and the counts: what hopflow says it does."""

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import hopflow as hf
from hopflow.errors import ArgumentValueError
from hopflow.logs import TOPICS, start_logs, start_trace

PROGRAM = """\
import hopflow as hf

@hf.jit
def f(x, n):
    if x.shape[0] > n:
        return x * n
    return x

for size in (4, 5, 2):
    f(hf.ones(size), 3)
"""
SAID = {
    "graph": ["def f(s0: i64, /, x: f32[4]) -> f32[4]:", "multiply(x, v0)"],
    "sizes": ["s0 = x.shape[0], ", "s1 = n, "],
    "guards": ["x.shape[0] > n  (program.py:5)", "x.shape[0] <= n  (program.py:5)"],
    "passes": [
        "own_symbols of f: ",
        "inline of f: ",
        "+    out0[0] = ",
        "merge of f: ",
        "machine code of f: ",
    ],
    "recompiles": [
        "f: recompiled because `x.shape[0] == 4` no longer holds (5)",
        "`x.shape[0] > n` at program.py:5 no longer holds",
    ],
}


def run(tmp_path: Path, **env: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "program.py").write_text(PROGRAM)
    return subprocess.run(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize(
    "topics", ["graph", "sizes", "guards, recompiles", "passes", ""]
)
def test_logs_are_written_on_request(tmp_path: Path, topics: str) -> None:
    done = run(tmp_path, HOPFLOW_LOGS=topics)
    assert done.returncode == 0, done.stderr
    for topic in TOPICS:
        assert (f"[hopflow.{topic}]" in done.stderr) == (topic in topics)
        for text in SAID[topic] if topic in topics else ():
            assert text in done.stderr
    assert not done.stdout


def test_a_topic_that_there_is_not(tmp_path: Path) -> None:
    done = run(tmp_path, HOPFLOW_LOGS="graph,graphs")
    assert done.returncode != 0
    assert "there is no topic 'graphs', only graph, sizes, guards, rec" in done.stderr
    with pytest.raises(ArgumentValueError, match="no topic 'nothing'"):
        start_logs("nothing")


def test_a_program_may_listen_itself(caplog: Any) -> None:
    with caplog.at_level(logging.INFO, logger="hopflow.guards"):
        hf.jit(lambda x: x if x.shape[0] > 2 else -x, dynamic=True)(hf.ones(3))
    [record] = caplog.records
    assert record.name == "hopflow.guards"
    assert record.getMessage().startswith("x.shape[0] >= 3  (test_logs.py:")


def events(path: Path) -> list[dict[str, Any]]:
    """Those of a file in the Trace Event Format, which wants no closing bracket."""
    found: list[dict[str, Any]] = json.loads(path.read_text().rstrip(",\n") + "]")
    return found


def test_the_trace_is_of_events_with_their_times(tmp_path: Path) -> None:
    done = run(tmp_path, HOPFLOW_TRACE="trace.json")
    assert done.returncode == 0, done.stderr
    found = events(tmp_path / "trace.json")
    for event in found:
        assert event["ph"] in ("X", "i")
        assert {"name", "ts", "pid", "tid", "args"} <= {*event}
    spans = [e for e in found if e["ph"] == "X"]
    names = [e["name"] for e in spans]
    stages = ("trace", "lower", "compile")
    assert [name for name in names if name in stages] == [*stages] * 3
    assert {"own_symbols", "inline", "loops", "merge", "machine code"} < {*names}
    first = {e["name"]: e for e in reversed(spans)}
    assert first["trace"]["args"] == {"function": "f"}
    end = first["trace"]["ts"] + first["trace"]["dur"]
    assert end <= first["lower"]["ts"] < first["compile"]["ts"]
    texts = [e["args"]["text"] for e in found if e["name"] == "guards"]
    assert [text for text in texts if text in SAID["guards"]] == SAID["guards"]


def test_the_trace_begins_and_ends(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    start_trace(path)
    try:
        hf.jit(lambda x: x + 41)(hf.ones(3))
    finally:
        start_trace(None)
    hf.jit(lambda x: x + 43)(hf.ones(3))
    assert [e["name"] for e in events(path)].count("trace") == 1


def test_counts() -> None:
    def f(x: Any) -> Any:
        return hf.sum(x * 47) - 53

    before = hf.stats()
    first, second = hf.jit(f), hf.jit(f)
    for size in (2, 3, 5):
        first(hf.ones(size))
    second(hf.ones(2))
    after = hf.stats()
    assert after.traces - before.traces == 3
    assert after.compiles - before.compiles == 2
    assert after.cache_hits - before.cache_hits == 1
    assert before != after  # a copy, which does not count on
