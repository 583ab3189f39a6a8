"""Settings, read when they are used; assign to change: `hf.config.verify = True`."""

import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any, Final

from platformdirs import user_cache_dir

from hopflow.errors import ArgumentTypeError, ArgumentValueError

_SWITCHES: Final = {"": False, "0": False, "false": False, "1": True, "true": True}


def _flag(name: str) -> bool:
    """Return whether a setting's environment variable switches it on; unset is False.

    Raises:
        ArgumentValueError: it is none of 0, 1, true and false.
    """
    text = os.environ.get(name, "")
    if text.lower() not in _SWITCHES:
        raise ArgumentValueError(
            f"config: the environment variable {name} must be 0, 1, true or false, and "
            f"is {text!r}."
        )
    return _SWITCHES[text.lower()]


def _cache_dir() -> str:
    """Return `HOPFLOW_CACHE_DIR`, or the cache folder of the platform."""
    text = os.environ.get("HOPFLOW_CACHE_DIR")
    return user_cache_dir("hopflow", appauthor=False) if text is None else text


def _threads() -> ctypes.c_int64:
    """Return `HOPFLOW_NUM_THREADS`, or the number of CPUs the process may use.

    Raises:
        ArgumentValueError: the variable is no positive integer.
    """
    text = os.environ.get("HOPFLOW_NUM_THREADS", "")
    if text:
        if not (text.isdecimal() and 0 < int(text) <= _MOST_THREADS):
            raise ArgumentValueError(
                "config: the environment variable HOPFLOW_NUM_THREADS must be an "
                f"integer from 1 to {_MOST_THREADS}, and is {text!r}."
            )
        return ctypes.c_int64(int(text))
    affinity = getattr(os, "sched_getaffinity", None)
    return ctypes.c_int64(len(affinity(0)) if affinity else os.cpu_count() or 1)


_MOST_THREADS: Final = 1 << 20


def _check_flag(name: str, value: Any) -> None:
    """Check that the new value of a setting is a bool."""
    if type(value) is not bool:
        raise ArgumentTypeError(
            f"config: `{name}` must be True or False, and is {value!r} "
            f"(`{type(value).__name__}`)."
        )


def _count_check(least: int, most: int | None = None) -> Callable[[str, Any], None]:
    """Return a check that a new value is an int from `least` to `most`."""

    def check(name: str, value: Any) -> None:
        expected = f"an int of at least {least}"
        if most is not None:
            expected = f"an int from {least} to {most}"
        text = f"config: `{name}` must be {expected}, and is {value!r}"
        if type(value) is not int:
            raise ArgumentTypeError(f"{text} (`{type(value).__name__}`).")
        if value < least or (most is not None and value > most):
            raise ArgumentValueError(f"{text}.")

    return check


def _check_limit(name: str, value: Any) -> None:
    """Check that the new value of a setting is an int of at least 0, or None."""
    if value is not None:
        _count_check(0)(name, value)


def _check_shared_integer(name: str, value: Any) -> None:
    """Check that a setting remains an integer in memory, which compiled code reads."""
    if type(value) is not ctypes.c_int64:
        raise ArgumentTypeError(
            f"config: `{name}` is memory of compiled code, and must not become "
            f"{value!r}. Assign `num_threads`."
        )


def _check_text(name: str, value: Any) -> None:
    """Check that the new value of a setting is a str."""
    if type(value) is not str:
        raise ArgumentTypeError(
            f"config: `{name}` must be a str, and is {value!r} "
            f"(`{type(value).__name__}`)."
        )


def _check_traceback(name: str, value: Any) -> None:
    """Check that the new value is "user" or "full"."""
    if value not in _TRACEBACKS:
        raise ArgumentValueError(
            f'config: `{name}` must be "user" or "full", and is {value!r}.'
        )


_TRACEBACKS: Final = ("user", "full")


def _traceback() -> str:
    """Return `HOPFLOW_TRACEBACK`, "user" by default.

    Raises:
        ArgumentValueError: it is neither "user" nor "full".
    """
    text = os.environ.get("HOPFLOW_TRACEBACK", "")
    if text not in ("", *_TRACEBACKS):
        raise ArgumentValueError(
            "config: the environment variable HOPFLOW_TRACEBACK must be user or full, "
            f"and is {text!r}."
        )
    return text or "user"


def _setting(check: Callable[[str, Any], None], **options: Any) -> Any:
    """Declare a field whose new values are passed to `check`, which may raise."""
    return field(**options, metadata={"check": check})


@dataclass(slots=True)
class Config:
    """The settings of the process. An assignment checks the type and the range.

    verify              run the verifier of every IR after each pass, and compare the
                        first call of each new program, a backend's too, with the graph
                        interpreter
    check_bounds        compiled code checks the index of every memory access; one out
                        of range, which is a defect of hopflow, raises BoundsError
    guard_pages         compiled code works on copies between protected memory pages: an
                        access out of bounds ends the process
    require_in_place    loops must update arrays in place: one that each step of a
                        compiled loop copies is an InPlaceError, which says why (also
                        HOPFLOW_REQUIRE_IN_PLACE)
    traceback           "user": tracebacks show the user's frames and the operators
                        between them; "full": all frames
    print_width         the width of printed graphs, in columns
    kernel_cache_bytes  the memory for native programs kept for new traces of equal
                        graphs; the least recently used program is evicted first
    cache_dir           the folder for compiled code, shared by the user's processes
                        (also HOPFLOW_CACHE_DIR); "": no files are kept
    cache_dir_bytes     the space for these files; the least recently used one is
                        deleted first
    recompile_limit     how often a jitted function may be compiled again before a
                        RecompileLimitError; None: without limit
    num_threads         the threads that share the batch elements of a `map` or `vmap`
                        whose body has loops, the elements of long loops, large
                        products of matrices, and the functions of a program while
                        they are compiled; results do not depend on it

    Raises:
        ArgumentTypeError, ArgumentValueError: the new value has another type, or is out
            of range.
        AttributeError: there is no such setting.
    """

    verify: bool = _setting(
        _check_flag, default_factory=lambda: _flag("HOPFLOW_VERIFY")
    )
    check_bounds: bool = _setting(
        _check_flag, default_factory=lambda: _flag("HOPFLOW_CHECK_BOUNDS")
    )
    guard_pages: bool = _setting(
        _check_flag, default_factory=lambda: _flag("HOPFLOW_GUARD_PAGES")
    )
    require_in_place: bool = _setting(
        _check_flag, default_factory=lambda: _flag("HOPFLOW_REQUIRE_IN_PLACE")
    )
    traceback: str = _setting(_check_traceback, default_factory=_traceback)
    print_width: int = _setting(_count_check(1), default=100)
    kernel_cache_bytes: int = _setting(_count_check(0), default=1 << 28)
    cache_dir: str = _setting(_check_text, default_factory=_cache_dir)
    cache_dir_bytes: int = _setting(_count_check(0), default=1 << 30)
    recompile_limit: int | None = _setting(_check_limit, default=None)
    # The memory that compiled code reads; users assign `num_threads`.
    threads: ctypes.c_int64 = field(
        default_factory=_threads, repr=False, metadata={"check": _check_shared_integer}
    )

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _CHECKS:
            names = sorted({*_CHECKS} - {"threads"})
            close = get_close_matches(name, names, 1)
            remedy = f"Did you mean `{close[0]}`?" if close else f"There are {names}."
            raise AttributeError(f"config: there is no setting `{name}`. {remedy}")
        _CHECKS[name](name, value)
        object.__setattr__(self, name, value)

    @property
    def num_threads(self) -> int:
        """The threads that share batch elements, long loops and matrix products."""
        return self.threads.value

    @num_threads.setter
    def num_threads(self, count: int) -> None:
        self.threads.value = count


_CHECKS: Final = {
    **{f.name: f.metadata["check"] for f in fields(Config)},
    "num_threads": _count_check(1, _MOST_THREADS),
}

config = Config()
