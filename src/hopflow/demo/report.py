"""The demo's output: short sections with titles."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hopflow.demo.checks import Agreement
from hopflow.demo.kmeans import Fit
from hopflow.demo.timing import Timing

if TYPE_CHECKING:
    from rich.console import Console


class Report:
    """Prints to a console of rich, which omits colours where they are not supported."""

    def __init__(self, console: "Console") -> None:
        self.console = console

    def title(self, text: str, *lines: str) -> None:
        """Print the title of a section, and its introduction."""
        self.console.print()
        self.console.rule(f"[bold]{text}", align="left", style="dim")
        for line in lines:
            self.line(line)

    def line(self, text: str) -> None:
        # The terminal wraps lines, so that output piped into a file is not broken.
        self.console.print(text, soft_wrap=True, highlight=False)

    def source(self, code: str) -> None:
        """Print Python code in colours, without breaking lines."""
        from rich.syntax import Syntax

        text = Syntax(code, "python", theme="ansi_dark").highlight(code)
        text.rstrip()
        self.console.print()
        self.console.print(text, soft_wrap=True)

    def results(self, fits: Fit) -> None:
        """Print a row for each run; the best is marked."""
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
        """Print compared quantities in rows and references in columns."""
        table = _table("", *(a.reference for a in agreements))
        for quantity in dict.fromkeys(q for a in agreements for q in a.findings):
            table.add_row(quantity, *(_finding(a, quantity) for a in agreements))
        self.console.print("", table)

    def times(self, hopflow_time: Timing, jax_time: Timing) -> None:
        """Print the times of hopflow and JAX, and their ratio."""
        table = _table("", ">hopflow", ">JAX", ">JAX / hopflow")
        for label, a, b in (
            ("first call", hopflow_time.first_call, jax_time.first_call),
            ("run", hopflow_time.run, jax_time.run),
        ):
            table.add_row(label, duration(a), duration(b), f"{b / a:.2f}")
        self.console.print("", table)

    def verdict(self, agreements: Sequence[Agreement]) -> None:
        """Print the last line."""
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
    """Format a duration: `1.24 s`, or `38.1 ms`."""
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def _table(*columns: str) -> Any:
    """Return a table; columns whose names begin with `>` are aligned to the right."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in columns:
        right = name.startswith(">")
        table.add_column(name.removeprefix(">"), justify="right" if right else "left")
    return table


def _finding(agreement: Agreement, quantity: str) -> str:
    if quantity not in agreement.findings:
        return "[dim]-"
    text, good = agreement.findings[quantity]
    return f"[green]✓[/] {text}" if good else f"[bold red]✗ {text}"
