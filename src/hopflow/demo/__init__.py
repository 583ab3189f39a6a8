"""`hopflow demo`: k-means on handwritten digits, checked and timed against others.

Its libraries (`DISTRIBUTIONS`) are imported only when it runs.
"""

import importlib.util
import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import hopflow as hf
from hopflow.config import config
from hopflow.demo.checks import Array, as_arrays, compare, sklearn_fits
from hopflow.demo.kmeans import Fit, initial_centroids, study
from hopflow.demo.plot import draw
from hopflow.demo.reference_jax import jax_study
from hopflow.demo.report import Report
from hopflow.demo.timing import Timing, measure

__all__ = ["DISTRIBUTIONS", "missing_libraries", "run"]

# Names of modules to import, and of distributions to install.
DISTRIBUTIONS = {
    "jax": "jax",
    "matplotlib": "matplotlib",
    "rich": "rich",
    "sklearn": "scikit-learn",
}

CLUSTERS = 10
RUNS = 8
STEPS = 30  # of the recorded curves
SEED = 0
ROUNDS = 7  # of timed runs


def missing_libraries() -> list[str]:
    """Return the distributions to install before the demo can run."""
    return [
        distribution
        for name, distribution in DISTRIBUTIONS.items()
        if importlib.util.find_spec(name) is None
    ]


def run(folder: Path, runs: int = RUNS, steps: int = STEPS) -> bool:
    """Print the demo, write `kmeans.png` into a folder, and return whether all agree.

    Args:
        runs: The number of initialisations.
        steps: The number of steps to record of each, at least 3.
    """
    from rich.console import Console
    from sklearn.datasets import load_digits

    config.cache_dir = ""  # first calls are timed, which compile
    report = Report(Console())
    points, digits = load_digits(return_X_y=True)
    inits = np_inits(points, runs)
    show_program(report, points, runs, steps)
    # Time before the graph is shown, whose trace would save the first call work, and
    # without a spinner, which would take processor time.
    times, result, jax_result = race(points, inits, steps)
    show_graph(report, points, inits, steps)
    fits, curves = result
    report.title("The results")
    report.results(fits)
    with report.console.status("The same as plain Python, in hf.debug() …"):
        debug_fits, debug_curves = debugged(points, inits, steps)
    with report.console.status("The same in scikit-learn …"):
        sklearn_result = sklearn_fits(points, inits)
    agreements = [
        compare("scikit-learn", fits, sklearn_result),
        compare("plain Python", fits, debug_fits, curves, debug_curves),
        compare("JAX", fits, jax_result[0], curves, jax_result[1]),
    ]
    report.title(
        "Do they agree?",
        "With scikit-learn's KMeans from the same centroids; with this program as",
        "plain Python, in hf.debug(); and with the same program in JAX.",
    )
    report.agreements(agreements)
    show_times(report, times)
    show_picture(report, fits, curves, digits, folder)
    report.verdict(agreements)
    return all(agreement.ok for agreement in agreements)


def np_inits(points: Array, runs: int) -> Array:
    """Return the initial centroids for all implementations, f64[runs, CLUSTERS, d]."""
    return as_arrays([initial_centroids(hf.asarray(points), CLUSTERS, runs, SEED)])[0]


def show_program(report: Report, points: Array, runs: int, steps: int) -> None:
    """Print what will run, and with which versions."""
    n, d = points.shape
    report.title(
        "k-means on handwritten digits",
        f"{n:,} images of {d} pixels into {CLUSTERS} clusters, from {runs} sets of",
        "initial centroids: a map over these, in each a while_loop until no centroid",
        "moves, a cond that re-seeds empty clusters, and a scan that records "
        f"{steps} steps.",
        f"hopflow {version('hopflow')}, JAX {version('jax')}, scikit-learn "
        f"{version('scikit-learn')}, Python {platform.python_version()}, "
        f"{os.cpu_count()} cores",
    )


def show_graph(report: Report, points: Array, inits: Array, steps: int) -> None:
    """Print the captured graph as Python."""
    module = hf.trace(study, hf.asarray(points), hf.asarray(inits), steps)
    count = sum(1 for _ in module.graph.walk())
    report.title(
        "The graph",
        f"{count} operations, as Python that runs. Subgraphs are nested functions;",
        "what they close over stands behind `*`. Comments give lines of kmeans.py.",
    )
    report.source(module.print_readable(print_output=False))


def race(
    points: Array, inits: Array, steps: int
) -> tuple[dict[str, Timing], tuple[Fit, Array], tuple[Fit, Array]]:
    """Return the times of hopflow and JAX, and the results of both."""
    import jax

    compiled = hf.jit(study)
    arguments = hf.asarray(points), hf.asarray(inits)
    with jax.enable_x64(True):
        jax_arguments = jax.device_put(points), jax.device_put(inits)
        reference = jax_study(steps)
        # Exclude the start-up of both compilers.
        hf.jit(lambda x: x + 1.0)(arguments[1])
        jax.jit(lambda x: x + 1.0)(jax_arguments[1]).block_until_ready()
        times, results = measure(
            {
                "hopflow": lambda: compiled(*arguments, steps),
                "jax": lambda: jax.block_until_ready(reference(*jax_arguments)),
            },
            ROUNDS,
        )
        return times, as_result(results["hopflow"]), as_result(results["jax"])


def debugged(points: Array, inits: Array, steps: int) -> tuple[Fit, Array]:
    """Return the study with its operators run as plain Python control flow."""
    with hf.debug():
        return as_result(study(hf.asarray(points), hf.asarray(inits), steps))


def as_result(result: Any) -> tuple[Fit, Array]:
    """Return the result of `study` as NumPy arrays."""
    fits, curves = result
    return Fit(*as_arrays(fits)), as_arrays([curves])[0]


def show_times(report: Report, times: dict[str, Timing]) -> None:
    report.title(
        "How long did it take?",
        "The first call traces, compiles and runs, after an unrelated compile on both",
        f"sides. A run is the median of {ROUNDS}, in which the two take turns.",
    )
    report.times(times["hopflow"], times["jax"])


def show_picture(
    report: Report, fits: Fit, curves: Array, digits: Array, folder: Path
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "kmeans.png"
    draw(fits, curves, digits, path)
    report.title(
        "The picture", f"The best centroids, and how all runs converged: {path}"
    )
