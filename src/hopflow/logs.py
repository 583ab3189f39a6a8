"""Logs of what hopflow does, and a trace of how long it takes; both on request.

    HOPFLOW_LOGS=graph,sizes,guards,recompiles,passes     texts, on stderr
    HOPFLOW_TRACE=trace.json                              events, for a trace viewer

The texts go through Python's `logging`, as `hopflow.graph` and so on, where a program
can send them elsewhere. The events are in the Trace Event Format
(https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU), which
Perfetto and chrome://tracing open.
"""

import json
import logging
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from difflib import unified_diff
from itertools import islice
from typing import Any, Final, TextIO

from hopflow.errors import ArgumentValueError

TOPICS: Final = ("graph", "sizes", "guards", "recompiles", "passes")
"""What can be logged: captured graphs; symbols as they are made; guards as they are
asked; why a function is compiled again; what each pass of the compiler changes, and how
long it takes."""

_LOGGERS: Final = {topic: logging.getLogger(f"hopflow.{topic}") for topic in TOPICS}


def start_logs(topics: str) -> None:
    """Write the texts of these topics (names with commas between) to stderr.

    Raises:
        ArgumentValueError: there is no such topic.
    """
    names = [name.strip() for name in topics.split(",") if name.strip()]
    for name in names:
        if name not in TOPICS:
            raise ArgumentValueError(
                f"HOPFLOW_LOGS: there is no topic {name!r}, only {', '.join(TOPICS)}."
            )
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("[%(name)s] %(message)s"))
    for name in names:
        _LOGGERS[name].addHandler(handler)
        _LOGGERS[name].setLevel(logging.INFO)
        _LOGGERS[name].propagate = False


def enabled(topic: str) -> bool:
    """Whether anybody reads a topic."""
    return _LOGGERS[topic].isEnabledFor(logging.INFO)


def log(topic: str, text: Callable[[], str]) -> None:
    """Log a text, made only if somebody reads it; an event of the trace too."""
    if enabled(topic):
        _LOGGERS[topic].info("%s", text())
    if _trace.file is not None:
        _trace.write({"name": topic, "ph": "i", "s": "t", "args": {"text": text()}})


@contextmanager
def passing(
    name: str, over: str, text: Callable[[], str] = lambda: ""
) -> Iterator[None]:
    """Log what the block, a pass of the compiler, changes, and how long it takes.

    Args:
        over: The name of what it passes over.
        text: The text of that, if it changes: the lines that go and come are logged.
    """
    if not enabled("passes"):
        with span(name, over=over):
            yield
        return

    def lines_now() -> list[str]:
        # The column of a comment depends on all lines.
        return [re.sub(" +# ", "  # ", line) for line in text().splitlines()]

    before, start = lines_now(), time.perf_counter_ns()
    with span(name, over=over):
        yield
    took = (time.perf_counter_ns() - start) / 1e6
    changes = unified_diff(before, lines_now(), lineterm="", n=0)
    lines = [line for line in islice(changes, 2, None) if not line.startswith("@@")]
    gone = sum(line.startswith("-") for line in lines)
    change = f", -{gone} +{len(lines) - gone} lines" if lines else ""
    head = f"{name} of {over}: {took:.2f} ms{change}"
    _LOGGERS["passes"].info("%s", "\n    ".join([head, *lines]))


# --- the trace ------------------------------------------------------------------------


class _Trace:
    """The file of events: one a line, so that a program that is killed leaves a trace
    that can be read. The format wants no closing bracket."""

    def __init__(self) -> None:
        self.file: TextIO | None = None
        self._lock = threading.Lock()

    def write(self, event: dict[str, Any]) -> None:
        event.setdefault("ts", time.perf_counter_ns() / 1e3)
        event |= {"pid": os.getpid(), "tid": threading.get_ident()}
        with self._lock:
            if self.file is not None:
                self.file.write(json.dumps(event) + ",\n")
                self.file.flush()


_trace = _Trace()


def start_trace(path: str | os.PathLike[str] | None) -> None:
    """Write events to a file, anew; None ends it.

    Raises:
        OSError: the file cannot be written.
    """
    if _trace.file is not None:
        _trace.file.close()
    _trace.file = None
    if path is not None:
        _trace.file = open(path, "w", encoding="utf-8")  # noqa: SIM115
        _trace.file.write("[\n")


@contextmanager
def span(name: str, **args: Any) -> Iterator[None]:
    """Note how long the block takes, as an event of the trace."""
    if _trace.file is None:
        yield
        return
    start = time.perf_counter_ns()
    try:
        yield
    finally:
        took = (time.perf_counter_ns() - start) / 1e3
        _trace.write(
            {"name": name, "ph": "X", "ts": start / 1e3, "dur": took, "args": args}
        )


if os.environ.get("HOPFLOW_LOGS"):
    start_logs(os.environ["HOPFLOW_LOGS"])
if os.environ.get("HOPFLOW_TRACE"):
    start_trace(os.environ["HOPFLOW_TRACE"])
