"""The picture of the demo: the best centroids, and how all runs converged."""

from pathlib import Path
from typing import Any

import numpy as np

from hopflow.demo.checks import Array
from hopflow.demo.kmeans import Fit

INK = "#1f2933"
FAINT = "#b8c0ca"
ACCENT = "#c2410c"
RESEEDED = "#2563a8"


def draw(fits: Fit, curves: Array, digits: Array, path: Path) -> None:
    """Write a PNG.

    Args:
        fits: NumPy arrays, for all runs.
        curves: f64[r, steps], the inertia before each step.
        digits: i64[n], the digit that each point shows.
        path: The file, in an existing folder.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    best = int(np.argmin(fits.inertia))
    # The Agg backend needs no screen, and ignores the user's settings.
    figure = Figure(figsize=(11.0, 4.1), dpi=150, facecolor="white")
    FigureCanvasAgg(figure)
    halves: Any = figure.subfigures(1, 2, width_ratios=[1.12, 1.0])
    left, right = halves
    _draw_centroids(left, fits.centroids[best], fits.labels[best], digits)
    _draw_curves(right, curves, best)
    figure.savefig(path)


def _draw_centroids(
    figure: Any, centroids: Array, labels: Array, digits: Array
) -> None:
    """Draw the centroids as images, each with the most common digit of its points."""
    members = [digits[labels == k] for k in range(len(centroids))]
    common = [int(np.bincount(m).argmax()) if m.size else -1 for m in members]
    figure.subplots_adjust(0.05, 0.12, 0.97, 0.86, wspace=0.16, hspace=0.3)
    figure.text(
        0.05,
        0.91,
        "Centroids of the best run",
        fontsize=13,
        fontweight="bold",
        color=INK,
    )
    all_axes = figure.subplots(2, len(centroids) // 2)
    for axes, k in zip(all_axes.flat, np.argsort(common, kind="stable"), strict=True):
        axes.imshow(centroids[k].reshape(8, 8), cmap="Greys", vmin=0, vmax=16)
        axes.set_xticks([])
        axes.set_yticks([])
        axes.spines[:].set_color(FAINT)
        share = np.mean(members[k] == common[k]) if members[k].size else 0.0
        axes.set_xlabel(
            f"{members[k].size} points\n{share:.0%} are {common[k]}s",
            fontsize=8.5,
            color=INK,
            labelpad=5,
        )


def _draw_curves(figure: Any, curves: Array, best: int) -> None:
    """Draw the inertia before each step; the last run began with an empty cluster."""
    figure.subplots_adjust(0.12, 0.13, 0.96, 0.85)
    figure.text(
        0.12,
        0.91,
        "Inertia at each step, in thousands",
        fontsize=13,
        fontweight="bold",
        color=INK,
    )
    axes = figure.subplots()
    last = len(curves) - 1
    thousands = curves / 1e3
    for run, curve in enumerate(thousands):
        special = {best: ACCENT, last: RESEEDED}.get(run)
        axes.plot(
            curve,
            color=special or FAINT,
            linewidth=2.0 if special else 1.2,
            zorder=3 if special else 2,
            label={best: "the best run", last: "began with an empty cluster"}.get(run),
        )
    axes.plot([], [], color=FAINT, linewidth=1.2, label="other runs")
    # The curves start far above; cut them to the range in which they differ.
    low = thousands.min()
    high = max(thousands[:, 2:].max(), 1.01 * low)
    axes.set_ylim(low - 0.04 * (high - low), high + 0.12 * (high - low))
    axes.set_xlim(0, curves.shape[1] - 1)
    axes.set_xlabel("step", color=INK)
    axes.grid(axis="y", color="#e6e9ed", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(FAINT)
    axes.legend(frameon=False, labelcolor=INK, fontsize=9.5)
