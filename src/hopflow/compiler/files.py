"""Files of compiled code, which all processes of a user share.

A file is named by a digest of everything that its content depends on: what was
compiled, for which CPU and under which settings, by which hopflow, LLVM and Python. So
a file is never out of date, and processes that write one file write the same bytes.

    <config.cache_dir>/0f3a…    a checksum of the content, and the content

A file appears as a whole, under its name, or not at all. One that is damaged is
removed, and counts as missing. All files together take at most
`config.cache_dir_bytes`; those that were not used for longest go first.

Whoever may write to the folder can have code run by the processes that read it. So the
folder is the user's own, and it is not used if anyone else may write to it.
"""

import contextlib
import os
import stat
import sys
import tempfile
from collections.abc import Iterator
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Final

from hopflow.config import config

_DIGEST_BYTES: Final = 16
_KEPT: Final = 3 / 4
"""The share of the files that is left, about, when there is no room for another."""
_PARTIAL: Final = ".partial"


def find(key: str) -> bytes | None:
    """Return the content that was stored under a key, or None."""
    folder = _folder()
    if folder is None:
        return None
    file = folder / _name(key)
    try:
        data = file.read_bytes()
        os.utime(file)  # it was used
    except OSError:
        return None
    checksum, content = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
    if checksum == _digest(content):
        return content
    with contextlib.suppress(OSError):
        file.unlink()
    return None


def store(key: str, content: bytes) -> None:
    """Store a content for other processes, if there is a folder with room for it."""
    folder = _folder()
    if folder is None or len(content) > config.cache_dir_bytes:
        return
    with contextlib.suppress(OSError):  # a full disk; another process has removed it
        descriptor, partial = tempfile.mkstemp(_PARTIAL, dir=folder)
        try:
            with open(descriptor, "wb") as stream:
                stream.write(_digest(content) + content)
            os.replace(partial, folder / _name(key))
        except BaseException:
            os.unlink(partial)
            raise
        _make_room(folder, len(content) + _DIGEST_BYTES)


def _digest(content: bytes) -> bytes:
    return blake2b(content, digest_size=_DIGEST_BYTES).digest()


def _name(key: str) -> str:
    text = f"{_toolchain()}\n{key}".encode()
    return blake2b(text, digest_size=_DIGEST_BYTES).hexdigest()


# --- the folder -----------------------------------------------------------------------


_sizes: Final[dict[Path, int]] = {}
"""Of the files in a folder, as far as this process knows."""


def _folder() -> Path | None:
    """The folder, which is made if there is none; None: there is none to be used."""
    return _usable(config.cache_dir) if config.cache_dir else None


@cache
def _usable(name: str) -> Path | None:
    folder = Path(name).expanduser()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError:
        return None
    if os.name == "posix":
        of_others = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
        if status.st_uid != os.geteuid() or of_others:
            return None
    return folder if os.access(folder, os.R_OK | os.W_OK | os.X_OK) else None


def _make_room(folder: Path, added: int) -> None:
    """Remove the files that were not used for longest, if all take too much room."""
    if folder not in _sizes:
        _sizes[folder] = sum(size for _, size, _ in _files(folder))
    else:
        _sizes[folder] += added
    if _sizes[folder] <= config.cache_dir_bytes:
        return
    files = sorted(_files(folder))
    total = sum(size for _, size, _ in files)
    for _, size, path in files:
        if total <= config.cache_dir_bytes * _KEPT:
            break
        with contextlib.suppress(OSError):
            os.unlink(path)
        total -= size
    _sizes[folder] = total


def _files(folder: Path) -> Iterator[tuple[float, int, str]]:
    """When each file was used last, its size, and its path."""
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):  # another process has removed it
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(status.st_mode):
                    yield status.st_mtime, status.st_size, entry.path


# --- the toolchain --------------------------------------------------------------------


@cache
def _toolchain() -> str:
    """Return the versions of everything that compiles, a part of each name."""
    import llvmlite  # which version there is, without LLVM itself

    interpreter = f"{sys.implementation.cache_tag} {sys.version_info} {sys.platform}"
    return f"{_source()} {llvmlite.__version__} {interpreter}"


@cache
def _source() -> str:
    """A digest of the source files of hopflow: of their names, sizes and times."""
    found = blake2b(digest_size=_DIGEST_BYTES)
    for root, folders, names in os.walk(Path(__file__).parents[1], followlinks=True):
        folders[:] = sorted(f for f in folders if f != "__pycache__")
        for name in sorted(names):
            if name.endswith(".py"):
                status = os.stat(os.path.join(root, name))
                facts = name, status.st_size, status.st_mtime_ns
                found.update(repr(facts).encode())
    return found.hexdigest()
