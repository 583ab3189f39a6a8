"""The progress of loops: `progress=` of `scan`, `while_loop`, `fori_loop` and `map`.

A loop's node has a `Progress` among its params. Compiled code and the interpreter call
`tell` with it, at most every `INTERVAL` seconds; it calls the user's function, or shows
a bar on stderr.
"""

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
"""(steps done, all steps; None while unknown) -> ignored."""

INTERVAL: Final = 0.1
"""The least number of seconds between two reports of one loop."""
_BETWEEN_LINES: Final = 10.0  # seconds, if stderr is no terminal


class Progress:
    """The receiver of a loop's progress.

    All have one structural key, so graphs that differ only in it share a program.

    name   its text in a printed graph
    sink   the user's function; None: a progress bar with the label `name`
    each   how many steps of the user's loop one step of this loop is: `map` runs many
           at once
    first  how many steps of the user's loop are done before this loop starts
    """

    __slots__ = ("each", "first", "name", "sink")
    # Not hashable, so that no cache keeps the user's function alive.
    __hash__ = None  # type: ignore[assignment]
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


def as_progress(op: str, option: Any) -> dict[str, Any]:
    """Return the parameter `progress` of a loop; an empty dict for None.

    Raises:
        ArgumentTypeError: the argument is neither a label nor a function.
    """
    if option is None:
        return {}
    if isinstance(option, Progress):  # that of the loop which this one replaces
        return {"progress": option}
    if isinstance(option, str):
        return {"progress": Progress(option)}
    if not callable(option):
        raise ArgumentTypeError(
            f"{op}: `progress` must be a label, or a function of the number of steps "
            f"done and of all, and is `{type(option).__name__}`."
        )
    name = getattr(option, "__name__", type(option).__name__)
    return {"progress": Progress(name, option)}


def progress_of(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameter `progress` of a loop, for another loop."""
    return {key: value for key, value in params.items() if key == "progress"}


def in_batches(progress: Progress, each: int, first: int) -> Progress:
    """Return the receiver for a loop that does `each` steps at once, after `first`."""
    return Progress(progress.name, progress.sink, each, first)


def in_reverse(params: dict[str, Any]) -> dict[str, Any]:
    """Return the parameters of the backward loop of a loop. Its progress bar has the
    label "... (backward)"; a user's function is not called."""
    params = dict(params)
    progress = params.pop("progress", None)
    mark = " (backward)"
    if progress is not None and getattr(progress, "sink", None) is None:
        label = str(progress).removesuffix(mark) + mark
        each, first = getattr(progress, "each", 1), getattr(progress, "first", 0)
        params["progress"] = Progress(label, None, each, first)
    return params


def tell(progress: "Progress | str", done: int, total: int | None) -> None:
    """Report the progress of a loop; `total` equals `done` at its end.

    The first report of a loop is 0 steps, also where `first` steps are done before it.

    Args:
        progress: The param of the loop's node, which is a mere label if the graph was
            read from a text.
    """
    sink = None
    if isinstance(progress, Progress):
        sink, each, first = progress.sink, progress.each, progress.first
        done = first + done * each if done or total == 0 else 0
        total = None if total is None else first + total * each
    if sink is None:
        _display.show(str(progress), done, total)
        return
    try:
        with using(None):
            sink(done, total)
    except Exception as error:
        error.add_note(f"raised in the function `{progress}` given as `progress`")
        raise


# --- loops run by Python --------------------------------------------------------------


class Meter:
    """Reports the progress of a loop that Python runs, like compiled code: at its start
    and end if it is the outermost loop, and at most once per `INTERVAL`."""

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
        # An inner loop has a new `Progress` in each step of the outer one, and is known
        # by its label or function.
        sink = getattr(self.progress, "sink", None)
        key = str(self.progress) if sink is None else id(sink)
        now, last = time.monotonic(), _running.reported.get(key)
        if always or last is None or now - last >= INTERVAL:
            _running.reported[key] = now
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
    """The running loops and programs of a thread that report their progress.

    depth     how deep they are nested
    reported  for each loop run by Python, the time of its last report
    """

    def __init__(self) -> None:
        self.depth = 0
        self.reported: dict[str | int, float] = {}

    def enter(self) -> None:
        self.depth += 1

    def leave(self) -> None:
        self.depth -= 1
        if not self.depth:  # the bars of failed loops remain until now
            self.reported.clear()
            _display.stop()


_running: Final = _Running()


def shown(program: Callable[..., Any]) -> Callable[..., Any]:
    """Return a compiled program that takes its progress bars away when it ends."""

    def call(*args: Any) -> Any:
        _running.enter()
        try:
            return program(*args)
        finally:
            _running.leave()

    return call


# --- the terminal ---------------------------------------------------------------------


class _Display(threading.local):
    """What a thread shows of its running loops.

    loops   by label, the outermost first: (steps done, all steps)
    view    bars or text; None while nothing is shown
    """

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
            self.view = _new_view()
        self.view.show(self.loops)
        if done == total and len(self.loops) == 1:
            self.stop()

    def stop(self) -> None:
        if self.view is not None:
            self.view.stop()
        self.loops, self.view = {}, None


_display: Final = _Display()


def _new_view() -> "_Bars | _Text":
    if sys.stderr.isatty():
        try:
            return _Bars()
        except ImportError:
            pass
    return _Text()


class _Bars:
    """Progress bars of `rich`, one below the other."""

    def __init__(self) -> None:
        """Start an empty display.

        Raises:
            ImportError: `rich` is not installed.
        """
        # `rich` is optional and slow to import, so it is imported at first use.
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
        # Loops refresh the bars themselves, without a thread.
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
                self.bars.reset(task)  # the loop has started again
            self.bars.update(task, completed=done, total=total)
        self.bars.refresh()

    def stop(self) -> None:
        self.bars.stop()


class _Text:
    """One line of text for all loops. A terminal's line is overwritten; elsewhere, as
    in a file, a line is printed every `_BETWEEN_LINES` seconds."""

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
