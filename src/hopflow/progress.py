"""How far loops are: what `progress=` of `scan`, `while_loop` and `fori_loop` shows."""

import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Final, TypeAlias

from hopflow.bind import using
from hopflow.errors import ArgumentTypeError

__all__ = [
    "INTERVAL",
    "Meter",
    "Progress",
    "as_progress",
    "in_reverse",
    "progress_of",
    "shown",
    "tell",
]

Sink: TypeAlias = Callable[[int, int | None], Any]
"""Called with the number of steps done, and of all, which is None until it is known."""

INTERVAL: Final = 0.1
"""Seconds between two calls for one loop."""
_BETWEEN_LINES: Final = 10.0  # seconds, where there is no terminal
_WIDTH: Final = 20  # of a bar


class Progress:
    """Whom a loop tells how far it is. Graphs that differ only in it share a program.

    name   as the graph's text has it
    sink   a function of the user's; None: the name labels a bar of the terminal
    """

    __slots__ = ("name", "sink")
    __hash__ = None  # type: ignore[assignment]  # no cache is to keep it alive

    def __init__(self, name: str, sink: Sink | None = None) -> None:
        self.name, self.sink = name, sink

    def __str__(self) -> str:
        return self.name

    @staticmethod
    def structural_key(_: "Progress") -> str:
        return ""


def as_progress(op: str, given: Any) -> dict[str, Any]:
    """The parameter `progress` of a loop, if it is to have one.

    Raises:
        ArgumentTypeError: it is neither a label nor a function.
    """
    if given is None:
        return {}
    if isinstance(given, Progress):  # of a loop that this one stands for
        return {"progress": given}
    if isinstance(given, str):
        return {"progress": Progress(given)}
    if not callable(given):
        raise ArgumentTypeError(
            f"{op}: `progress` must be a label, or a function of the number of steps "
            f"done and of all, and is `{type(given).__name__}`."
        )
    name = getattr(given, "__name__", type(given).__name__)
    return {"progress": Progress(name, given)}


def progress_of(params: Mapping[str, Any]) -> dict[str, Any]:
    """The parameter `progress` of a loop, for another one; nothing if it has none."""
    return {key: value for key, value in params.items() if key == "progress"}


def in_reverse(params: dict[str, Any]) -> dict[str, Any]:
    """The parameters of a loop for one that takes its steps backwards: the bar has a
    label of its own, and a function is not called."""
    params = dict(params)
    given = params.pop("progress", None)
    mark = " (backward)"
    if given is not None and getattr(given, "sink", None) is None:
        label = str(given).removesuffix(mark) + mark
        params["progress"] = Progress(label)
    return params


def tell(progress: "Progress | str", done: int, total: int | None) -> None:
    """Say how far a loop is; `total` is `done` once it has ended.

    Args:
        progress: As a graph has it: only the label, if it was read from a text.
    """
    sink = None if isinstance(progress, str) else progress.sink
    if sink is None:
        _bars.show(str(progress), done, total)
        return
    try:
        with using(None):
            sink(done, total)
    except Exception as error:
        error.add_note(f"raised in the function `{progress}` given as `progress`")
        raise


# --- loops that Python runs -----------------------------------------------------------


class Meter:
    """Tells the progress of a loop that Python runs, as compiled ones do: when it
    begins and ends, if no such loop is around it, and else now and then."""

    def __init__(self, progress: "Progress | str | None", total: int | None) -> None:
        self.progress, self.total, self.done = progress, total, 0

    def __enter__(self) -> "Meter":
        if self.progress is not None:
            _running.enter()
            if self.total != 0:
                self._tell(self.total)
        return self

    def step(self) -> None:
        self.done += 1
        if self.progress is not None and self.done != self.total:
            self._tell(self.total)

    def _tell(self, total: int | None, *, always: bool = False) -> None:
        assert self.progress is not None
        # A loop in a loop comes with a new object each time.
        sink = getattr(self.progress, "sink", None)
        key = str(self.progress) if sink is None else id(sink)
        now, last = time.monotonic(), _running.told.get(key)
        if always or last is None or now - last >= INTERVAL:
            _running.told[key] = now
            tell(self.progress, self.done, total)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.progress is None:
            return
        try:
            if error is None:
                self._tell(self.done, always=_running.depth == 1)
        finally:
            _running.leave()


class _Running(threading.local):
    """What a thread runs that tells its progress: how many loops and programs in each
    other, and when each loop that Python runs was told of."""

    def __init__(self) -> None:
        self.depth = 0
        self.told: dict[str | int, float] = {}

    def enter(self) -> None:
        self.depth += 1

    def leave(self) -> None:
        self.depth -= 1
        if not self.depth:  # what is left has failed, or was told of too seldom
            self.told.clear()
            _bars.stop()


_running: Final = _Running()


def shown(program: Callable[..., Any]) -> Callable[..., Any]:
    """A program that tells its progress: when it ends, so does the line of bars."""

    def call(*args: Any) -> Any:
        _running.enter()
        try:
            return program(*args)
        finally:
            _running.leave()

    return call


# --- the terminal ---------------------------------------------------------------------


@dataclass(slots=True)
class _Bar:
    label: str
    done: int = 0
    total: int | None = None
    begun: float = field(default_factory=time.monotonic)

    def __str__(self) -> str:
        took = time.monotonic() - self.begun
        if self.total is None or self.total == 0:
            return f"{self.label} {self.done} steps, {_clock(took)}"
        part = self.done / self.total
        full = "#" * int(part * _WIDTH)
        left = f", {_clock(took / part - took)} left" if 0 < part < 1 else ""
        return (
            f"{self.label} [{full:-<{_WIDTH}}] {part:4.0%} {self.done}/{self.total}, "
            f"{_clock(took)}{left}"
        )


class _Bars(threading.local):
    """The line that shows the loops of a thread, the outermost first."""

    def __init__(self) -> None:
        self.bars: list[_Bar] = []
        self.printed: float | None = None  # when a line was, where there is no terminal

    def show(self, label: str, done: int, total: int | None) -> None:
        labels = [bar.label for bar in self.bars]
        if label in labels:
            del self.bars[labels.index(label) + 1 :]
        else:
            self.bars.append(_Bar(label))
        bar = self.bars[-1]
        if done < bar.done:  # the loop began anew
            bar = self.bars[-1] = _Bar(label)
        bar.done, bar.total = done, total
        ended = done == total and len(self.bars) == 1
        if sys.stderr.isatty():
            columns = shutil.get_terminal_size().columns
            line = " | ".join(map(str, self.bars))[: columns - 1]
            print(f"\r{line}\x1b[K", end="\n" * ended, file=sys.stderr, flush=True)
        else:
            self._line(ended)
        if ended:
            self.bars, self.printed = [], None

    def _line(self, ended: bool) -> None:
        """A line now and then, none for what is soon done: it may go to a file."""
        now = time.monotonic()
        last = self.bars[0].begun if self.printed is None else self.printed
        if now - last >= _BETWEEN_LINES or (ended and self.printed is not None):
            self.printed = now
            print(" | ".join(map(str, self.bars)), file=sys.stderr, flush=True)

    def stop(self) -> None:
        if self.bars and sys.stderr.isatty():
            print(file=sys.stderr, flush=True)
        self.bars, self.printed = [], None


_bars: Final = _Bars()


def _clock(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
