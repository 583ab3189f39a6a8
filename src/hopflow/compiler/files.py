"""Files of compiled code, shared by all processes of a user.

A file is named by a digest of everything that its content depends on: the source, the
CPU, the settings, and the versions of hopflow, LLVM and Python. Therefore a file is
never out of date, and processes that write the same file write the same bytes.

    <config.cache_dir>/0f3a…    a checksum of the content, and the content

A file appears as a whole under its name, or not at all. A damaged one is removed, and
counts as missing. All files together take at most `config.cache_dir_bytes`; the least
recently used are removed first.

Whoever may write to the folder can make the processes that read it run any code.
Therefore the folder belongs to the user, and it is not used if anyone else may write to
it.
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
"""About the share of the files that is kept when there is no room for another."""
_PARTIAL: Final = ".partial"


def find(key: str) -> bytes | None:
    """Return the content that was stored under a key, or None."""
    folder = _folder()
    if folder is None:
        return None
    file = folder / _name(key)
    try:
        data = file.read_bytes()
        os.utime(file)  # mark it as used
    except OSError:
        return None
    checksum, content = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
    if checksum == _digest(content):
        return content
    with contextlib.suppress(OSError):
        file.unlink()
    return None


def store(key: str, content: bytes) -> None:
    """Store content for other processes, if there is a folder with room for it."""
    folder = _folder()
    if folder is None or len(content) > config.cache_dir_bytes:
        return
    with contextlib.suppress(OSError):  # a full disk, or another process has removed it
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
"""The size of the files in a folder, as far as this process knows."""


def _folder() -> Path | None:
    """Return the folder, created if it is missing, or None if none can be used."""
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
    """Remove the least recently used files if all of them take too much room."""
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
    """Yield the time of last use, the size and the path of each file."""
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):  # another process has removed it
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(status.st_mode):
                    yield status.st_mtime, status.st_size, entry.path


# --- the toolchain --------------------------------------------------------------------


@cache
def _toolchain() -> str:
    """Return the versions of everything that affects code, a part of each file name."""
    import llvmlite  # its version, without loading LLVM

    interpreter = f"{sys.implementation.cache_tag} {sys.version_info} {sys.platform}"
    return f"{_source()} {llvmlite.__version__} {interpreter}"


@cache
def _source() -> str:
    """Return a digest of the names, sizes and times of hopflow's source files."""
    digest = blake2b(digest_size=_DIGEST_BYTES)
    for root, folders, names in os.walk(Path(__file__).parents[1], followlinks=True):
        folders[:] = sorted(f for f in folders if f != "__pycache__")
        for name in sorted(names):
            if name.endswith(".py"):
                status = os.stat(os.path.join(root, name))
                facts = name, status.st_size, status.st_mtime_ns
                digest.update(repr(facts).encode())
    return digest.hexdigest()
