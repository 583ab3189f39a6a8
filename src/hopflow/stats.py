"""Counts of what was traced, compiled and found in caches; `hf.stats()` copies them."""

from dataclasses import dataclass, replace


@dataclass(slots=True)
class Stats:
    """What this process has done so far.

    traces       functions that `hf.jit` traced: once for each signature
    body_traces  functions given to operators that were traced, in a trace or by an
                 eager call: a loop's body a second time if its carry changes its dtype
    compiles     native programs made
    functions    functions of those programs: bodies that are called from many places
    cache_hits   programs that were found ready, for a new trace of an equal graph
    file_hits    programs whose code was found in a file (`config.cache_dir`)
    evictions    programs that the cache let go (`config.kernel_cache_bytes`)
    """

    traces: int = 0
    body_traces: int = 0
    compiles: int = 0
    functions: int = 0
    cache_hits: int = 0
    file_hits: int = 0
    evictions: int = 0


counts = Stats()


def stats() -> Stats:
    """A copy of the counts; subtract two to see what happened between."""
    return replace(counts)
