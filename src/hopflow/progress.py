"""How far loops are: what `progress=` of `scan`, `while_loop`, `fori_loop` and `map`
shows."""

import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Final, TypeAlias

from hopflow.bind import using
from hopflow.errors import ArgumentTypeError

Sink: TypeAlias = Callable[[int, int | None], Any]
"""Called with the number of steps done, and of all, which is None until it is known."""

INTERVAL: Final = 0.1
"""Seconds between two calls for one loop."""
_BETWEEN_LINES: Final = 10.0  # seconds, where there is no terminal


class Progress:
    """Whom a loop tells how far it is. Graphs that differ only in it share a program.

    name   as the graph's text has it
    sink   a function of the user's; None: the name labels a bar of the terminal
    each, first   a step counts for `each`, after `first` that are done before
    """

    __slots__ = ("each", "first", "name", "sink")
    __hash__ = None  # type: ignore[assignment]  # no cache is to keep it alive
    has_portable_key = True

    def __init__(
        self, name: str, sink: Sink | None = None, each: int = 1, first: int = 0
    ) -> None:
        self.name, self.sink, self.each, self.first = name, sink, each, first

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


def in_batches(progress: Progress, each: int, first: int) -> Progress:
    """Whom a loop tells that takes `each` steps at once, after `first` others."""
    return Progress(progress.name, progress.sink, each, first)


def in_reverse(params: dict[str, Any]) -> dict[str, Any]:
    """The parameters of a loop for one that takes its steps backwards: the bar has a
    label of its own, and a function is not called."""
    params = dict(params)
    given = params.pop("progress", None)
    mark = " (backward)"
    if given is not None and getattr(given, "sink", None) is None:
        label = str(given).removesuffix(mark) + mark
        each, first = getattr(given, "each", 1), getattr(given, "first", 0)
        params["progress"] = Progress(label, None, each, first)
    return params


def tell(progress: "Progress | str", done: int, total: int | None) -> None:
    """Say how far a loop is; `total` is `done` once it has ended.

    Args:
        progress: As a graph has it: only the label, if it was read from a text.
    """
    sink = None
    if isinstance(progress, Progress):
        sink, each, first = progress.sink, progress.each, progress.first
        done = first + done * each if done or total == 0 else 0
        total = None if total is None else first + total * each
    if sink is None:
        _shown.show(str(progress), done, total)
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
            _shown.stop()


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


class _Shown(threading.local):
    """The loops of a thread that are shown, the outermost first, and where."""

    def __init__(self) -> None:
        self.loops: dict[str, tuple[int, int | None]] = {}
        self.view: _Bars | _Text | None = None

    def show(self, label: str, done: int, total: int | None) -> None:
        labels = list(self.loops)
        if label in labels:
            for inner in labels[labels.index(label) + 1 :]:
                del self.loops[inner]
        self.loops[label] = done, total
        if self.view is None:
            self.view = _view()
        self.view.show(self.loops)
        if done == total and len(self.loops) == 1:
            self.stop()

    def stop(self) -> None:
        if self.view is not None:
            self.view.stop()
        self.loops, self.view = {}, None


_shown: Final = _Shown()


def _view() -> "_Bars | _Text":
    if sys.stderr.isatty():
        try:
            return _Bars()
        except ImportError:
            pass
    return _Text()


class _Bars:
    """Bars of `rich`, one below the other."""

    def __init__(self) -> None:
        """
        Raises:
            ImportError: `rich` is not installed.
        """
        # Optional, and not worth waiting for before there is something to show.
        from rich import progress as rich
        from rich.console import Console

        columns = (
            rich.TextColumn("{task.description}", markup=False),
            rich.BarColumn(),
            rich.MofNCompleteColumn(),
            rich.TimeElapsedColumn(),
            rich.TimeRemainingColumn(),
        )
        console = Console(file=sys.stderr)
        # Loops say when there is something new: no thread is to look for it.
        self.bars = rich.Progress(*columns, console=console, auto_refresh=False)
        self.tasks: dict[str, Any] = {}
        self.bars.start()

    def show(self, loops: Mapping[str, tuple[int, int | None]]) -> None:
        for label in [label for label in self.tasks if label not in loops]:
            self.bars.remove_task(self.tasks.pop(label))
        for label, (done, total) in loops.items():
            if label not in self.tasks:
                self.tasks[label] = self.bars.add_task(label, total=total)
            task = self.tasks[label]
            if done < self.bars.tasks[self.bars.task_ids.index(task)].completed:
                self.bars.reset(task)  # the loop began anew
            self.bars.update(task, completed=done, total=total)
        self.bars.refresh()

    def stop(self) -> None:
        self.bars.stop()


class _Text:
    """One line for all: in a terminal it is written over, elsewhere there is one now
    and then, and none for what is soon done: it may go to a file."""

    def __init__(self) -> None:
        self.is_terminal = sys.stderr.isatty()
        self.text = ""
        self.printed, self.lines = time.monotonic(), 0

    def show(self, loops: Mapping[str, tuple[int, int | None]]) -> None:
        texts = (
            f"{label} {done}" + ("" if total is None else f"/{total}")
            for label, (done, total) in loops.items()
        )
        self.text = " | ".join(texts)
        if self.is_terminal:
            width = shutil.get_terminal_size().columns - 1
            print(f"\r{self.text[:width]}\x1b[K", end="", file=sys.stderr, flush=True)
        elif time.monotonic() - self.printed >= _BETWEEN_LINES:
            self._print()

    def _print(self) -> None:
        print(self.text, file=sys.stderr, flush=True)
        self.printed, self.lines = time.monotonic(), self.lines + 1

    def stop(self) -> None:
        if self.is_terminal:
            print(file=sys.stderr, flush=True)
        elif self.lines:
            self._print()
