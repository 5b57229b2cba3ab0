"""Directories in which processes announce their metrics, and checks that such a directory is safe to use.

Processes use one of `own_directories`. Empty directories are not removed, because Prometheus may watch them, and
containers may mount them.

A user who can change such a directory decides which addresses Prometheus and ``dpex top`` ask, and a symbolic link of
another user could redirect writes. So a directory is opened once and checked by its descriptor, and files are created
relative to this descriptor. Directories that dpex creates are accessible for this user only (mode 700).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

DIRECTORY_VARIABLE = "DPEX_METRICS_DIR"
LONGEST_FILE = 65536
"""Maximum bytes of an announcement that is read. dpex writes shorter ones."""
_REMEDY = f"remove it, or give a directory of yours by MetricsConfig(directory=...) or {DIRECTORY_VARIABLE}"


def own_directories(environment: Mapping[str, str]) -> list[Path]:
    """Return the directories of this user in order of preference. If another user owns a path, the next is used.

    The first is deleted with the session, the second with temporary files. The last is in the user's cache directory.
    """
    found = []
    runtime = environment.get("XDG_RUNTIME_DIR")
    if runtime and _is_mine(Path(runtime)):
        found.append(Path(runtime) / "dpex")
    found.append(Path(tempfile.gettempdir()) / f"dpex-{os.getuid()}")
    cache = environment.get("XDG_CACHE_HOME") or (environment["HOME"] + "/.cache" if environment.get("HOME") else "")
    if cache:
        found.append(Path(cache) / "dpex" / "metrics")
    return found


def announcement_directories(environment: Mapping[str, str]) -> list[Path]:
    """Return the directories of announcements: ``$DPEX_METRICS_DIR``, or the safe directories of `own_directories`."""
    given = environment.get(DIRECTORY_VARIABLE)
    return [Path(given)] if given else [path for path in own_directories(environment) if is_safe(path)]


def is_safe(own: Path) -> bool:
    """Return True for a directory that only this user can change."""
    try:
        with open_directory(own, own=True):
            return True
    except OSError:
        return False


def _is_mine(path: Path) -> bool:
    """Return True if this user owns the path. After su, XDG_RUNTIME_DIR may belong to the user who called su."""
    try:
        return path.stat().st_uid == os.getuid()
    except OSError:
        return False


def make_directory(directory: Path, *, own: bool) -> None:
    """Make the directory unless it exists. Raises OSError."""
    if own and directory.is_symlink():
        raise PermissionError(f"{directory} is a symbolic link: {_REMEDY}")
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)


@contextlib.contextmanager
def open_directory(directory: Path, *, own: bool) -> Iterator[int]:
    """Yield the descriptor of a directory. With ``own``, only this user may be able to change it; see `_check_owner`.

    Raises:
        OSError: it cannot be opened. PermissionError: it is not safe; the message gives the reason and the remedy.
    """
    if not own:
        _check_links(directory.absolute())
        directory = directory.resolve()
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        _check_owner(directory, os.fstat(descriptor), own=own)
        yield descriptor
    finally:
        os.close(descriptor)


def _check_links(path: Path) -> None:
    for part in (path, *path.parents):
        with contextlib.suppress(FileNotFoundError):
            found = part.lstat()
            if stat.S_ISLNK(found.st_mode) and found.st_uid not in (os.getuid(), 0):
                raise PermissionError(f"{part} is a symbolic link of another user (number {found.st_uid}): {_REMEDY}")


def _check_owner(directory: Path, found: os.stat_result, *, own: bool) -> None:
    """Check the owner and the mode of a directory. Without ``own``, root may use other users' directories, because a
    container may mount directories of its host."""
    me = os.getuid()
    if found.st_uid != me and (own or (found.st_uid != 0 and me != 0)):
        raise PermissionError(f"{directory} is another user's (number {found.st_uid}): {_REMEDY}")
    if own and found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"others may change the files in {directory}: chmod it to 700, or {_REMEDY}")
    if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
        raise PermissionError(f"all users may change the files in {directory}: chmod it, or {_REMEDY}")


def write_file(directory: Path, name: str, text: str, *, own: bool) -> None:
    """Write a file atomically. With ``own`` only this user may read it, otherwise all users. Raises OSError."""
    temporary = f"dpex-{secrets.token_hex(8)}.tmp"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open_directory(directory, own=own) as inside:
        number = os.open(temporary, flags, 0o600, dir_fd=inside)
        try:
            with os.fdopen(number, "w") as file:
                os.fchmod(number, 0o600 if own else 0o644)
                file.write(text)
            os.replace(temporary, name, src_dir_fd=inside, dst_dir_fd=inside)
        except BaseException:
            os.unlink(temporary, dir_fd=inside)
            raise


def read_file(path: Path) -> str:
    """Return the text of a file in an announcement directory, without blocking. The file may be of any user and have
    any content.

    Raises OSError, also for anything but a regular file, and ValueError if the content is too long or no text.
    """
    number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(number, "rb") as file:
        if not stat.S_ISREG(os.fstat(number).st_mode):
            raise OSError(f"{path} is no file")
        found = file.read(LONGEST_FILE + 1)
    if len(found) > LONGEST_FILE:
        raise ValueError(f"{path} is longer than {LONGEST_FILE} bytes")
    return found.decode()
