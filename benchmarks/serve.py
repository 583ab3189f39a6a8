"""`python -m benchmarks.serve SCALE`: measures hopflow when it is told to.

It reads commands from the standard input, one JSON list on each line, and writes an
answer for each, one JSON value on each line:

    ["row", name]   makes a row's function and calls it    -> true
    ["first"]       times a first call                     -> seconds
    ["run"]         times a run                            -> seconds of one step

The answer is null after an error, which is printed. `benchmarks.compare` starts it with
the sources of another revision: so it imports no more of hopflow than it needs.
"""

import gc
import json
import sys

from benchmarks.measure import SAMPLE, Hopflow, no_collection, timed
from benchmarks.workload import Calls, Workload
from benchmarks.workloads import all_calls, all_workloads


def all_rows(scale: float) -> dict[str, Workload | Calls]:
    """The rows of both tables, by name."""
    rows: list[Workload | Calls] = [*all_workloads(scale), *all_calls(scale)]
    return {row.name: row for row in rows}


def serve(scale: float) -> None:
    """Answer commands until the input ends."""
    rows = all_rows(scale)
    out, sys.stdout = sys.stdout, sys.stderr
    side, count = Hopflow(next(iter(rows.values()))), 1
    for line in sys.stdin:
        command, *names = json.loads(line)
        answer: float | bool | None
        try:
            gc.collect()
            if command == "row":
                side = Hopflow(rows[names[0]])
                once = min(timed(side.call) for _ in range(3))
                count, answer = max(1, round(SAMPLE / once)), True
            elif command == "first":
                side.renew()
                answer = timed(side.call)
            else:
                steps = getattr(side.work, "steps", 1)
                answer = timed(side.call, count) / count / steps
        except Exception as error:
            print(f"{command} {names}: {type(error).__name__}: {error}")
            answer = None
        print(json.dumps(answer), file=out, flush=True)


if __name__ == "__main__":
    with no_collection():
        serve(float(sys.argv[1]))
