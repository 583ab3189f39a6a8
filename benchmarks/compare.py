"""Two states of hopflow, by turns: how long the rows take in both.

    python -m benchmarks.compare OLD [NEW] [--rows median-filter,adam] [--rounds 15]

OLD and NEW are revisions of Git; without NEW it is the working tree. The rows are those
of the working tree in both. Each state has a process of its own, whose turn it is in
each round of each row, so that both meet the same load of the machine. A row that a
state cannot run has a dash.
"""

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from io import BytesIO
from math import exp, log
from pathlib import Path
from statistics import mean, median
from typing import Any, Final

from benchmarks.measure import Times
from benchmarks.report import describe_machine, format_time
from benchmarks.serve import all_rows

ROOT: Final = Path(__file__).parent.parent
HEADER: Final = (
    f"{'':24}{'first call':^31}   {'run (of one step)':^31}\n"
    f"{'row':24}{'old':>10} {'new':>10} {'ratio':>9}   "
    f"{'old':>10} {'new':>10} {'ratio':>9}"
)


@dataclass(frozen=True)
class Pair:
    """The times of a row in both states; None: a state cannot run it."""

    name: str
    old: Times | None
    new: Times | None

    @property
    def ratios(self) -> tuple[float, float] | None:
        """Of first calls and of runs: the time in the new state, divided by that in the
        old one. Of runs it is the median over the rounds, which were measured by
        turns."""
        if self.old is None or self.new is None:
            return None
        runs = zip(self.new.runs, self.old.runs, strict=True)
        return self.new.first / self.old.first, median([n / o for n, o in runs])


def format_pair(pair: Pair) -> str:
    """A line of the table."""
    ratios = [f"{r:8.3f}x" for r in pair.ratios or ()] or ["-", "-"]
    cells = []
    for which, ratio in zip(("first", "run"), ratios, strict=True):
        times = [
            "-" if side is None else format_time(getattr(side, which))
            for side in (pair.old, pair.new)
        ]
        cells.append(f"{times[0]:>10} {times[1]:>10} {ratio:>9}")
    return f"{pair.name:24}{'   '.join(cells)}"


def format_means(pairs: Sequence[Pair]) -> str:
    """The geometric means of the ratios, over the rows that both states run."""
    ratios = [p.ratios for p in pairs if p.ratios is not None]
    if not ratios:
        return "no row that both states run"
    first, run = (exp(mean(log(r[k]) for r in ratios)) for k in (0, 1))
    return f"{'geometric mean':24}{'':22}{first:>8.3f}x   {'':22}{run:>8.3f}x"


# --- the processes of the states ------------------------------------------------------


class State:
    """A process with the sources of a state, which runs `benchmarks.serve`."""

    def __init__(self, sources: Path, scale: float) -> None:
        paths = os.pathsep.join([str(sources), str(ROOT)])
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.serve", str(scale)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": paths, "HOPFLOW_CACHE_DIR": ""},
            cwd=sources,
            text=True,
        )

    def ask(self, *command: str) -> Any:
        """Return the answer to a command of `benchmarks.serve`."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(command) + "\n")
        process.stdin.flush()
        answer = process.stdout.readline()
        if not answer:
            raise SystemExit(f"a process has ended: {process.wait()}")
        return json.loads(answer)

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


@contextmanager
def sources_of(revision: str | None) -> Iterator[Path]:
    """The folder with the sources of a revision; None: of the working tree.

    Raises:
        SystemExit: Git knows no such revision.
    """
    if revision is None:
        yield ROOT / "src"
        return
    command = ["git", "-C", str(ROOT), "archive", revision]
    archive = subprocess.run(command, capture_output=True, check=False)
    if archive.returncode:
        raise SystemExit(archive.stderr.decode().strip())
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=BytesIO(archive.stdout)) as tar:
            tar.extractall(folder, filter="data")
        yield Path(folder, "src")


def compare(name: str, old: State, new: State, rounds: int) -> Pair:
    """Measure a row in both states, by turns."""
    states = [old, new]
    times: dict[State, Times | None] = {
        state: Times([], []) if state.ask("row", name) else None for state in states
    }
    for which, count in (("first", min(rounds, 5)), ("run", rounds)):
        for _ in range(count):
            for state in states:
                found = times[state]
                if found is None:
                    continue
                seconds = state.ask(which)
                if seconds is None:
                    times[state] = None
                else:
                    (found.firsts if which == "first" else found.runs).append(seconds)
            states.reverse()
    return Pair(name, times[old], times[new])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.compare", description=__doc__)
    parser.add_argument("old", help="a revision of Git")
    parser.add_argument("new", help="another; without it, the working tree", nargs="?")
    parser.add_argument("--rows", help="names of the rows to run, with commas between")
    parser.add_argument("--rounds", type=int, default=15, help="runs of each row")
    parser.add_argument("--scale", type=float, default=1.0, help="shrinks all sizes")
    options = parser.parse_args(argv)
    known = all_rows(0.0001)
    names = options.rows.split(",") if options.rows else [*known]
    if unknown := sorted({*names} - known.keys()):
        parser.error(f"there is no row {', '.join(unknown)}")
    machine = describe_machine()
    print(f"Python {machine['python']}, {machine['processor']}\n\n{HEADER}")
    with ExitStack() as stack:

        def started(revision: str | None) -> State:
            state = State(stack.enter_context(sources_of(revision)), options.scale)
            stack.callback(state.close)
            return state

        old, new = started(options.old), started(options.new)
        pairs = []
        for name in names:
            pairs.append(compare(name, old, new, options.rounds))
            print(format_pair(pairs[-1]), flush=True)
    print(format_means(pairs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
