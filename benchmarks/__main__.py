"""`python -m benchmarks`: hopflow and its peers, interleaved in one process."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import jax

from benchmarks import native
from benchmarks.measure import Disagreement, measure, measure_calls
from benchmarks.report import (
    CALLS_HEADER,
    HEADER,
    as_json,
    describe_machine,
    format_c,
    format_calls,
    format_dr_jit,
    format_lax_map,
    format_means,
    format_numba,
    format_row,
)
from benchmarks.workloads import all_calls, all_workloads
from hopflow.config import config

RESULTS = Path(__file__).parent / "results"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="benchmarks", description=__doc__)
    parser.add_argument("--rows", help="names of the rows to run, with commas between")
    parser.add_argument(
        "--repeat", type=int, default=5, help="first calls of each row, and least runs"
    )
    parser.add_argument("--scale", type=float, default=1.0, help="shrinks all sizes")
    parser.add_argument(
        "--json",
        type=Path,
        help="where the results go; all rows have a place of theirs",
    )
    options = parser.parse_args(argv)
    jax.config.update("jax_enable_x64", True)
    config.cache_dir = ""  # first calls compile
    workloads, calls = all_workloads(options.scale), all_calls(options.scale)
    if options.rows:
        wanted = options.rows.split(",")
        known = {w.name for w in workloads} | {c.name for c in calls}
        unknown = sorted(set(wanted) - known)
        if unknown:
            parser.error(f"there is no row {', '.join(unknown)}")
        workloads = [w for w in workloads if w.name in wanted]
        calls = [c for c in calls if c.name in wanted]
    machine = describe_machine()
    print(f"JAX {machine['jax']}, Python {machine['python']}, {machine['processor']}\n")
    rows, many, are_right = [], [], True
    if workloads:
        if why := native.missing():
            print(f"There are no times of C: {why}.\n")
        print(HEADER)
    for workload in workloads:
        try:
            rows.append(measure(workload, options.repeat))
        except Disagreement as error:  # the other rows stand
            are_right = False
            print(error, flush=True)
        else:
            print(format_row(rows[-1]), flush=True)
    if rows:
        print(f"{format_means(rows)}\n\n{format_c(rows)}\n{format_lax_map(rows)}")
        print(f"{format_dr_jit(rows)}\n{format_numba(rows)}")
    if calls:
        print(f"\n{CALLS_HEADER}")
    for call in calls:
        many.append(measure_calls(call, options.repeat))
        print(format_calls(many[-1]), flush=True)
    target = options.json
    if not (target or options.rows) and options.scale == 1:
        target = RESULTS / f"{machine['cpu']}-{machine['cores']}.json"
    if target:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(as_json(rows, many))
    return 0 if are_right else 1


if __name__ == "__main__":
    sys.exit(main())
