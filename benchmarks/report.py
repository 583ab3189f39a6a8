"""The table of a measurement, and the same as JSON with the machine's description."""

import datetime
import importlib.metadata
import json
import os
import platform
import re
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from math import exp, log
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.measure import Row, Times
from hopflow.compiler.cpu.target import host

LIBRARIES = ("jax", "jaxlib", "llvmlite", "numba", "numpy", "scipy")

HEADER = (
    f"{'':24}{'first call':^31}   {'run (of one step)':^31}   {'for all':>8}   "
    f"{'run in C':^31}   {'lax.map':^20}\n"
    f"{'row':24}{'JAX':>10} {'hopflow':>10} {'ratio':>9}   "
    f"{'JAX':>10} {'hopflow':>10} {'ratio':>9}   {'sizes':>8}   "
    f"{'C':>10} {'hopflow/C':>10} {'JAX/C':>9}   {'run':>10} {'ratio':>9}"
)
CALLS_HEADER = (
    f"{'':24}{'calls of many sizes':^31}\n"
    f"{'row':24}{'JAX':>10} {'hopflow':>10} {'ratio':>9}"
)


def format_row(row: Row) -> str:
    """A line of the table: medians, and how many times as long JAX takes; then, how
    many times as long a run takes where sizes are symbols; how many times as long as C
    hopflow takes, and JAX; and how many times as long JAX takes by `lax.map`."""
    ours = row.hopflow.run
    first = _cells(row.jax.first, row.hopflow.first)
    line = f"{row.name:24}{first}   {_cells(row.jax.run, ours)}"
    ratio, c, mapped = row.symbolic_ratio, row.c, row.lax_map
    line += f"   {'' if ratio is None else f'{ratio:.2f}x':>8}"
    in_c = "" if c is None else f"{format_time(c.run):>10} {ours / c.run:>9.2f}x "
    line += f"   {in_c:22}{'' if c is None else f'{row.jax.run / c.run:.2f}x':>9}"
    if mapped is not None:
        line += f"   {format_time(mapped.run):>10} {mapped.run / ours:>8.2f}x"
    return line.rstrip()


def format_calls(row: Row) -> str:
    """A line of the second table: as many times as long JAX takes."""
    return f"{row.name:24}{_cells(row.jax.run, row.hopflow.run)}"


def _cells(theirs: float, ours: float) -> str:
    return f"{format_time(theirs):>10} {format_time(ours):>10} {theirs / ours:>8.2f}x"


def format_means(rows: Sequence[Row]) -> str:
    """The geometric means of the ratios to JAX; the median of those for all sizes."""
    first, run = means(rows)
    line = f"{'geometric mean':24}{'':22}{first:>8.2f}x   {'':22}{run:>8.2f}x"
    ratios = symbolic_ratios(rows)
    return f"{line}   {median(ratios):>7.2f}x (median)" if ratios else line


def format_c(rows: Sequence[Row]) -> str:
    """A line of the rows in C: by how much C is faster than hopflow and than JAX."""
    if not (found := _beside_c(rows)):
        return "no row in C"
    name, ratio = found["worst"]
    return (
        f"beside C ({found['rows']} rows): hopflow takes {found['hopflow']:.2f} times "
        f"as long in the geometric mean, at most {ratio:.2f} times ({name}); JAX takes "
        f"{found['jax']:.2f} times as long"
    )


def format_lax_map(rows: Sequence[Row]) -> str:
    """A line of the rows by `vmap`: how many times as long JAX takes, by the faster of
    `vmap` and `lax.map`."""
    ratios = {
        row.name: min(row.jax.run, row.lax_map.run) / row.hopflow.run
        for row in rows
        if row.lax_map is not None
    }
    return _format_peer("the faster of vmap and lax.map", "JAX", ratios)


def format_dr_jit(rows: Sequence[Row]) -> str:
    """A line of the rows in Dr.Jit: how many times as long it takes."""
    ratios = {
        row.name: row.dr_jit.run / row.hopflow.run
        for row in rows
        if row.dr_jit is not None
    }
    return _format_peer("Dr.Jit", "Dr.Jit", ratios)


def format_numba(rows: Sequence[Row]) -> str:
    """A line of the rows in Numba: how many times as long it takes, and first calls."""
    ratios, firsts = {}, []
    for row in rows:
        if row.numba is not None:
            ratios[row.name] = row.numba.run / row.hopflow.run
            firsts.append(row.numba.first / row.hopflow.first)
    line = _format_peer("Numba", "Numba", ratios)
    return (
        f"{line}; first calls {_geometric_mean(firsts):.2f} times" if firsts else line
    )


def _format_peer(program: str, library: str, ratios: dict[str, float]) -> str:
    """A line of how many times as long a library takes, by row."""
    if not ratios:
        return f"no row beside {program}"
    name = min(ratios, key=ratios.__getitem__)
    return (
        f"beside {program} ({len(ratios)} rows): {library} takes "
        f"{_geometric_mean(ratios.values()):.2f} times as long in the geometric mean, "
        f"at least {ratios[name]:.2f} times ({name})"
    )


def _beside_c(rows: Sequence[Row]) -> dict[str, Any]:
    """Of the rows in C: the geometric means of hopflow's and JAX's times over those of
    C, and the row in which hopflow is slowest; nothing where there are none."""
    times = {row.name: (row, row.c.run) for row in rows if row.c is not None}
    if not times:
        return {}
    ours = {name: row.hopflow.run / c for name, (row, c) in times.items()}
    theirs = [row.jax.run / c for row, c in times.values()]
    return {
        "rows": len(times),
        "hopflow": _geometric_mean(ours.values()),
        "jax": _geometric_mean(theirs),
        "worst": max(ours.items(), key=lambda item: item[1]),
    }


def _geometric_mean(ratios: Iterable[float]) -> float:
    return exp(mean(map(log, ratios)))


def symbolic_ratios(rows: Sequence[Row]) -> list[float]:
    """Of the rows that have one."""
    return [row.symbolic_ratio for row in rows if row.symbolic_ratio is not None]


def means(rows: Sequence[Row]) -> tuple[float, float]:
    """Of first calls, of runs: the geometric mean of how many times JAX takes."""
    first = _geometric_mean(r.jax.first / r.hopflow.first for r in rows)
    run = _geometric_mean(r.jax.run / r.hopflow.run for r in rows)
    return first, run


def format_time(seconds: float) -> str:
    """Three digits and a unit: "1.23 ms"."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-12:.3g} ps"


def as_json(rows: Sequence[Row], calls: Sequence[Row] = ()) -> str:
    """Medians and the fastest, in seconds, and where they were measured."""
    report: dict[str, Any] = {"machine": describe_machine()}
    if rows:
        first, run = means(rows)
        report["geometric_mean"] = {"first": first, "run": run}
    if ratios := symbolic_ratios(rows):
        report["median_for_all_sizes"] = median(ratios)
    if beside_c := _beside_c(rows):
        report["beside_c"] = beside_c
    report |= {"rows": list(map(_entry, rows)), "calls": list(map(_entry, calls))}
    return json.dumps(report, indent=2) + "\n"


def _entry(row: Row) -> dict[str, Any]:
    first, run = (
        row.jax.first / row.hopflow.first,
        row.jax.run / row.hopflow.run,
    )
    ratio = {"first": first, "run": run}
    if row.symbolic_ratio is not None:
        ratio["for_all_sizes"] = row.symbolic_ratio
    times = {"jax": _times(row.jax), "hopflow": _times(row.hopflow)}
    for name, runs in (
        ("lax_map", row.lax_map),
        ("dr_jit", row.dr_jit),
        ("numba", row.numba),
        ("c", row.c),
    ):
        if runs is not None:
            times[name] = _times(runs)
    return {"name": row.name, "ratio": ratio, **times}


def _times(times: Times) -> dict[str, Any]:
    firsts = times.firsts
    first = {"first": times.first, "fastest_first": min(firsts)} if firsts else {}
    return first | {
        "run": times.run,
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
        **{
            name: importlib.metadata.version(name)
            for name in LIBRARIES
            if find_spec(name)
        },
    }


def _processor() -> str:
    """The CPU as its maker calls it."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor()
    found = re.search(r"model name\s*:\s*(.+)", text)
    return found[1] if found else platform.machine()
