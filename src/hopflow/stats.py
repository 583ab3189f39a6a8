"""Counts of traces, compilations and cache hits; `hf.stats()` copies them."""

from dataclasses import dataclass, replace


@dataclass(slots=True)
class Stats:
    """Counts of this process.

    traces       traces by `hf.jit`: one for each signature
    body_traces  traces of functions given to operators, in a trace or an eager call; a
                 loop's body is traced again if its carry is promoted to another dtype
    compiles     compiled native programs
    functions    functions in those programs, for bodies with several callers
    cache_hits   programs found in the cache, for a new trace of an equal graph
    file_hits    programs whose code was found in a file (`config.cache_dir`)
    evictions    programs evicted from the cache (`config.kernel_cache_bytes`)
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
    """Return a copy of the counts.

    >>> before = hf.stats()
    >>> total = hf.jit(hf.sum)(hf.ones(3))
    >>> hf.stats().traces - before.traces
    1
    """
    return replace(counts)
