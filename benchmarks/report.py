"""The table of a measurement, and the same as JSON with the machine's description."""

import datetime
import importlib.metadata
import json
import os
import platform
import re
from collections.abc import Sequence
from math import exp, log
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.measure import Row, Times
from hopflow.compiler.llvm.target import host

LIBRARIES = ("jax", "jaxlib", "llvmlite", "numpy", "scipy")

HEADER = (
    f"{'':24}{'first call':^31}   {'run (of one step)':^31}\n"
    f"{'row':24}{'JAX':>10} {'hopflow':>10} {'ratio':>9}   "
    f"{'JAX':>10} {'hopflow':>10} {'ratio':>9}"
)


def format_row(row: Row) -> str:
    """A line of the table: medians, and how many times as long JAX takes."""
    cells = [f"{row.name:24}"]
    for jax_time, ours in (
        (row.jax.first, row.hopflow.first),
        (row.jax.run, row.hopflow.run),
    ):
        cells.append(
            f"{format_time(jax_time):>10} {format_time(ours):>10} "
            f"{jax_time / ours:>8.2f}x   "
        )
    return "".join(cells).rstrip()


def format_means(rows: Sequence[Row]) -> str:
    """The geometric means of the ratios."""
    first, run = means(rows)
    return f"{'geometric mean':24}{'':22}{first:>8.2f}x   {'':22}{run:>8.2f}x"


def means(rows: Sequence[Row]) -> tuple[float, float]:
    """Of first calls, of runs: the geometric mean of how many times JAX takes."""
    first = exp(mean(log(r.jax.first / r.hopflow.first) for r in rows))
    run = exp(mean(log(r.jax.run / r.hopflow.run) for r in rows))
    return first, run


def format_time(seconds: float) -> str:
    """Three digits and a unit: "1.23 ms"."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-12:.3g} ps"


def as_json(rows: Sequence[Row]) -> str:
    """Medians and the fastest, in seconds, and where they were measured."""
    first, run = means(rows)
    report = {
        "machine": describe_machine(),
        "geometric_mean": {"first": first, "run": run},
        "rows": [
            {
                "name": row.name,
                "ratio": {
                    "first": row.jax.first / row.hopflow.first,
                    "run": row.jax.run / row.hopflow.run,
                },
                "jax": _times(row.jax),
                "hopflow": _times(row.hopflow),
            }
            for row in rows
        ],
    }
    return json.dumps(report, indent=2) + "\n"


def _times(times: Times) -> dict[str, Any]:
    return {
        "first": times.first,
        "run": times.run,
        "fastest_first": min(times.firsts),
        "fastest_run": min(times.runs),
        "rounds": len(times.runs),
    }


def describe_machine() -> dict[str, str]:
    """What the figures depend on."""
    load = f"{os.getloadavg()[0]:.2f}" if hasattr(os, "getloadavg") else "unknown"
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cpu": host().cpu,
        "processor": _processor(),
        "cores": str(os.cpu_count()),
        "load": load,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in LIBRARIES},
    }


def _processor() -> str:
    """The CPU as its maker calls it."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    found = re.search(r"model name\s*:\s*(.+)", text)
    return found[1] if found else platform.machine()
