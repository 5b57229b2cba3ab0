"""Announcements of training processes for Prometheus: ``file_sd`` files, one per process, written atomically.

A file's name holds the node, the process ID and the start time of that process. So the file of a killed process is
recognised even if its ID was reused. Each starting process removes the files of ended processes of its node.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dpex.schedule.names import encodable
from dpex.system.cpus import rank
from dpex.system.directories import make_directory, open_directory, read_file, write_file

_NAME = re.compile(r"dpex-(?P<node>.+)-(?P<pid>\d+)-(?P<started>\d+)\.json")
_SAME = 200
"""Hundredths of a second by which two readings of a start time can differ if the clock is set between them."""


def identity(environment: Mapping[str, str]) -> dict[str, str]:
    """Return ``run_id``, ``rank`` and ``node`` of this process. Ranks share a ``run_id`` if the launcher sets one."""
    found = {"run_id": _run_id(environment), "rank": str(rank(environment)), "node": socket.gethostname()}
    return {name: encodable(value) for name, value in found.items()}


def _run_id(environment: Mapping[str, str]) -> str:
    for name in ("DPEX_RUN_ID", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID"):
        found = environment.get(name, "")
        if found and found != "none":
            return found
    if "MASTER_PORT" in environment and "RANK" in environment:
        return f"{environment.get('MASTER_ADDR', 'localhost')}-{environment['MASTER_PORT']}"
    return f"{socket.gethostname()}-{os.getpid()}-{started_at(os.getpid()) or 0}"


def started_at(pid: int) -> int | None:
    """Return when a process started, in hundredths of a second since boot; None if it has ended, 0 if unknown.

    A zombie counts as ended. It stays for ever if the first process of a container reaps no children.
    """
    import psutil  # takes 10 ms to import

    try:
        booted = psutil.boot_time()  # this and create_time both move with the clock; their difference is fixed
        process = psutil.Process(pid)
        if process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
            return None
        started_s: float = process.create_time() - booted
        return round(100 * started_s)
    except psutil.NoSuchProcess:
        return None
    except psutil.Error:
        return 0


@dataclass(frozen=True, kw_only=True)
class ScrapeTarget:
    """An announced process: its address, its labels, its file, and whether it is known to have ended."""

    url: str
    labels: Mapping[str, str]
    path: Path
    gone: bool = False


def targets(*directories: Path) -> list[ScrapeTarget]:
    """Return the processes announced in these directories, by run and rank. Files of another form are left out."""
    paths = [path for directory in directories for path in sorted(directory.glob("dpex-*.json"))]
    found = [target for path in paths for target in _targets_in(path)]
    return sorted(found, key=lambda one: (one.labels.get("run_id", ""), _number(one.labels.get("rank", "")), one.url))


def _number(text: str) -> tuple[int, str]:
    return (int(text) if text.isdecimal() else 0, text)


def _targets_in(path: Path) -> list[ScrapeTarget]:
    try:
        return [
            ScrapeTarget(
                url=f"{group['labels'].get('__scheme__', 'http')}://{address}",
                labels={str(name): str(value) for name, value in group["labels"].items()},
                path=path,
                gone=_has_ended(path, socket.gethostname()),
            )
            for group in json.loads(read_file(path))
            for address in group["targets"]
        ]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return []


def _has_ended(path: Path, node: str) -> bool:
    """Return True if the process of a file has ended; False for processes of other nodes, which cannot be seen."""
    found = _NAME.fullmatch(path.name)
    if found is None or found["node"] != node:
        return False
    started = started_at(int(found["pid"]))
    return started is None or (started > 0 and abs(started - int(found["started"])) > _SAME)


class Announcement:
    """The file of this process; `withdraw` removes it.

    Raises OSError if the directory cannot be written to or is not safe (see `dpex.system.directories.open_directory`).
    """

    def __init__(self, directory: Path, target: str, labels: Mapping[str, str], *, own: bool = False) -> None:
        make_directory(directory, own=own)
        with open_directory(directory, own=own):
            node = socket.gethostname()
            tidy_up(directory, node)
        self.path: Path = directory / f"dpex-{node}-{os.getpid()}-{started_at(os.getpid()) or 0}.json"
        self._pid = os.getpid()
        content = json.dumps([{"targets": [target], "labels": dict(labels)}], indent=1) + "\n"
        write_file(directory, self.path.name, content, own=own)

    def withdraw(self) -> None:
        """Remove the file, but not in a forked process. Idempotent."""
        if os.getpid() == self._pid:
            with contextlib.suppress(OSError):
                self.path.unlink()


def tidy_up(directory: Path, node: str) -> list[Path]:
    """Remove and return the files of processes of this node that have ended."""
    removed = []
    for path in sorted(directory.glob("dpex-*.json")):
        if _has_ended(path, node):
            with contextlib.suppress(OSError):
                path.unlink()
                removed.append(path)
    return removed
