"""Logs of compilation and a trace of its times; both are off by default.

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
"""The topics: captured graphs; new symbols; new guards; the reasons of recompiles; the
change that each pass of the compiler makes, and its time."""

_LOGGERS: Final = {topic: logging.getLogger(f"hopflow.{topic}") for topic in TOPICS}


def start_logs(topics: str) -> None:
    """Write the texts of these topics, a comma-separated list, to stderr.

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
    """Whether a topic is logged."""
    return _LOGGERS[topic].isEnabledFor(logging.INFO)


def log(topic: str, text: Callable[[], str]) -> None:
    """Log a text and add it to the trace; it is computed only if one of them is on."""
    if enabled(topic):
        _LOGGERS[topic].info("%s", text())
    if _trace.file is not None:
        _trace.write({"name": topic, "ph": "i", "s": "t", "args": {"text": text()}})


@contextmanager
def passing(
    name: str, over: str, text: Callable[[], str] = lambda: ""
) -> Iterator[None]:
    """Log the change and the time of the block, which is a pass of the compiler.

    Args:
        over: The name of the program or graph that the pass works on.
        text: Prints it; the difference before and after the pass is logged.
    """
    if not enabled("passes"):
        with span(name, over=over):
            yield
        return

    def lines_now() -> list[str]:
        # A comment's column depends on all lines, so that alignment is no change.
        return [re.sub(" +# ", "  # ", line) for line in text().splitlines()]

    before, start = lines_now(), time.perf_counter_ns()
    with span(name, over=over):
        yield
    milliseconds = (time.perf_counter_ns() - start) / 1e6
    changes = unified_diff(before, lines_now(), lineterm="", n=0)
    lines = [line for line in islice(changes, 2, None) if not line.startswith("@@")]
    removed = sum(line.startswith("-") for line in lines)
    change = f", -{removed} +{len(lines) - removed} lines" if lines else ""
    head = f"{name} of {over}: {milliseconds:.2f} ms{change}"
    _LOGGERS["passes"].info("%s", "\n    ".join([head, *lines]))


# --- the trace ------------------------------------------------------------------------


class _Trace:
    """The file of events, one a line. The format needs no closing bracket, so that the
    trace of a killed process is valid."""

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
    """Start a trace in a new file; None ends the current trace.

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
    """Add the time of the block to the trace."""
    if _trace.file is None:
        yield
        return
    start = time.perf_counter_ns()
    try:
        yield
    finally:
        microseconds = (time.perf_counter_ns() - start) / 1e3
        _trace.write(
            {
                "name": name,
                "ph": "X",
                "ts": start / 1e3,
                "dur": microseconds,
                "args": args,
            }
        )


if os.environ.get("HOPFLOW_LOGS"):
    start_logs(os.environ["HOPFLOW_LOGS"])
if os.environ.get("HOPFLOW_TRACE"):
    start_trace(os.environ["HOPFLOW_TRACE"])
