"""Settings, read when they are used; assign to change: `hf.config.verify = True`."""

import ctypes
import os
from dataclasses import dataclass, field

from hopflow.errors import ArgumentValueError


def _flag(name: str) -> bool:
    return os.environ.get(name, "") not in ("", "0")


def _threads() -> ctypes.c_int64:
    """As many as `HOPFLOW_NUM_THREADS` says, or as CPUs that the process may use."""
    given = os.environ.get("HOPFLOW_NUM_THREADS", "")
    if given.isdecimal() and int(given) > 0:
        return ctypes.c_int64(int(given))
    affinity = getattr(os, "sched_getaffinity", None)
    return ctypes.c_int64(len(affinity(0)) if affinity else os.cpu_count() or 1)


@dataclass(slots=True)
class Config:
    """The process's settings.

    verify              run the verifiers of every IR between all passes, and compare
                        each new kernel's first call with the graph interpreter
    check_bounds        code checks each index of each access to memory; what is out of
                        range, which is a defect of ours, raises BoundsError
    guard_pages         what native code reads and writes is copied between memory pages
                        that are closed: an access beside it ends the process
    print_width         columns that printed graphs may take
    kernel_cache_size   native programs kept for new traces of equal graphs; the one not
                        asked for the longest goes first
    num_threads         threads that share the examples of a `map` or `vmap` whose body
                        has loops; results do not depend on it
    """

    verify: bool = field(default_factory=lambda: _flag("HOPFLOW_VERIFY"))
    check_bounds: bool = field(default_factory=lambda: _flag("HOPFLOW_CHECK_BOUNDS"))
    guard_pages: bool = field(default_factory=lambda: _flag("HOPFLOW_GUARD_PAGES"))
    print_width: int = 100
    kernel_cache_size: int = 4096
    threads: ctypes.c_int64 = field(default_factory=_threads, repr=False)

    @property
    def num_threads(self) -> int:
        return self.threads.value

    @num_threads.setter
    def num_threads(self, count: int) -> None:
        if type(count) is not int or count < 1:
            raise ArgumentValueError(
                f"config: `num_threads` must be an int of at least 1, and is {count!r}."
            )
        self.threads.value = count


config = Config()
