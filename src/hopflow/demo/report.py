"""What the demo prints: short sections, each with a title."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hopflow.demo.checks import Agreement
from hopflow.demo.kmeans import Fit
from hopflow.demo.timing import Timing

if TYPE_CHECKING:
    from rich.console import Console


class Report:
    """Prints to a console of rich's, which leaves colours out where none can be."""

    def __init__(self, console: "Console") -> None:
        self.console = console

    def title(self, text: str, *lines: str) -> None:
        """A section's title, and what it is about."""
        self.console.print()
        self.console.rule(f"[bold]{text}", align="left", style="dim")
        for line in lines:
            self.line(line)

    def line(self, text: str) -> None:
        # Left to the terminal to wrap: what is piped into a file stays whole.
        self.console.print(text, soft_wrap=True, highlight=False)

    def source(self, code: str) -> None:
        """Python, in colours; lines are never cut."""
        from rich.syntax import Syntax

        text = Syntax(code, "python", theme="ansi_dark").highlight(code)
        text.rstrip()
        self.console.print()
        self.console.print(text, soft_wrap=True)

    def results(self, fits: Fit) -> None:
        """One row a run; the best is marked."""
        table = _table("run", ">steps", ">inertia", ">largest", ">smallest", "")
        best = int(np.argmin(fits.inertia))
        last = len(fits.inertia) - 1
        for run, labels in enumerate(fits.labels):
            sizes = np.bincount(labels, minlength=fits.centroids.shape[1])
            notes = ["best"] * (run == best)
            notes += ["began with an empty cluster"] * (run == last)
            table.add_row(
                str(run + 1),
                str(fits.steps[run]),
                f"{fits.inertia[run]:,.1f}",
                str(sizes.max()),
                str(sizes.min()),
                ", ".join(notes),
                style="bold" if run == best else None,
            )
        self.console.print("", table)

    def agreements(self, agreements: Sequence[Agreement]) -> None:
        """What was compared in rows, the references in columns."""
        table = _table("", *(a.reference for a in agreements))
        for what in dict.fromkeys(w for a in agreements for w in a.findings):
            table.add_row(what, *(_finding(a, what) for a in agreements))
        self.console.print("", table)

    def times(self, ours: Timing, theirs: Timing) -> None:
        """Ours and JAX's, and how many times longer JAX's took."""
        table = _table("", ">hopflow", ">JAX", ">JAX / hopflow")
        for what, a, b in (
            ("first call", ours.first_call, theirs.first_call),
            ("run", ours.run, theirs.run),
        ):
            table.add_row(what, duration(a), duration(b), f"{b / a:.2f}")
        self.console.print("", table)

    def verdict(self, agreements: Sequence[Agreement]) -> None:
        """The last line."""
        self.console.print()
        wrong = [a.reference for a in agreements if not a.ok]
        if wrong:
            self.line(f"[bold red]hopflow does not agree with {', '.join(wrong)}.")
        else:
            *most, last = (a.reference for a in agreements)
            self.line(
                "[bold green]Everything agreed:[/] hopflow, "
                f"{', '.join(most)} and {last} came to the same clusters."
            )


def duration(seconds: float) -> str:
    """`1.24 s`, or `38.1 ms`."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def _table(*columns: str) -> Any:
    """A table; columns that begin with `>` are of numbers, and set to the right."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in columns:
        right = name.startswith(">")
        table.add_column(name.removeprefix(">"), justify="right" if right else "left")
    return table


def _finding(agreement: Agreement, what: str) -> str:
    if what not in agreement.findings:
        return "[dim]-"
    text, good = agreement.findings[what]
    return f"[green]✓[/] {text}" if good else f"[bold red]✗ {text}"
