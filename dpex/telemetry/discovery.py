"""How Prometheus finds training processes: a directory of ``file_sd`` files, one per process, written atomically.

A file's name holds node, process and the time that process started at, so that what a killed process left behind is
known for what it is, also once its number is in use again: every process that comes tidies up the dead of its node.
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

from dpex.core.names import encodable
from dpex.system.directories import opened, prepare, read, write

_NAME = re.compile(r"dpex-(?P<node>.+)-(?P<pid>\d+)-(?P<started>\d+)\.json")


def identity(environment: Mapping[str, str]) -> dict[str, str]:
    """Labels of this process: run_id, the same for all ranks of a job where the launcher tells it; rank; node."""
    found = {"run_id": _run_id(environment), "rank": environment.get("RANK", "0"), "node": socket.gethostname()}
    return {name: encodable(value) for name, value in found.items()}


def _run_id(environment: Mapping[str, str]) -> str:
    for name in ("DPEX_RUN_ID", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID"):
        found = environment.get(name, "")
        if found and found != "none":
            return found
    if "MASTER_PORT" in environment and "RANK" in environment:
        return f"{environment.get('MASTER_ADDR', 'localhost')}-{environment['MASTER_PORT']}"
    return f"{socket.gethostname()}-{os.getpid()}-{started_at(os.getpid()) or 0}"


ENDED = ("Z", "X")
"""States of a process that has ended, see proc(5)."""


def started_at(pid: int) -> int | None:
    """When that process started, in ticks since boot (0 where nobody can tell); None: there is none.

    One that has ended and was never waited for is none: in a container whose first process does not, it stays for ever.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] in ENDED else int(fields[19])
    except (ValueError, IndexError):
        return 0
    except OSError:
        pass
    if Path("/proc/self/stat").exists():
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except OSError:
        pass
    return 0


@dataclass(frozen=True, kw_only=True)
class ScrapeTarget:
    """A process that was announced: where it serves, who it is, and whether it is known to have ended."""

    url: str
    labels: Mapping[str, str]
    path: Path
    gone: bool = False


def targets(*directories: Path) -> list[ScrapeTarget]:
    """What is announced in these directories, by run and rank; what is no announcement is left out."""
    paths = [path for directory in directories for path in sorted(directory.glob("dpex-*.json"))]
    found = [target for path in paths for target in _targets_in(path)]
    return sorted(found, key=lambda one: (one.labels.get("run_id", ""), _number(one.labels.get("rank", "")), one.url))


def _number(text: str) -> tuple[int, str]:
    return (int(text) if text.isdecimal() else 0, text)


def _targets_in(path: Path) -> list[ScrapeTarget]:
    try:
        groups = json.loads(read(path))
        return [
            ScrapeTarget(
                url=f"{group['labels'].get('__scheme__', 'http')}://{address}",
                labels={str(name): str(value) for name, value in group["labels"].items()},
                path=path,
                gone=_has_ended(path, socket.gethostname()),
            )
            for group in groups
            for address in group["targets"]
        ]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return []


def _has_ended(path: Path, node: str) -> bool:
    """Of processes of this node only; of others nobody here can tell."""
    found = _NAME.fullmatch(path.name)
    return found is not None and found["node"] == node and started_at(int(found["pid"])) != int(found["started"])


class Announcement:
    """The file of this process; `withdraw` removes it.

    Raises OSError where the directory cannot be written to or is not safe (see `dpex.system.directories.opened`).
    """

    def __init__(self, directory: Path, target: str, labels: Mapping[str, str], *, own: bool = False) -> None:
        prepare(directory, own=own)
        with opened(directory, own=own):
            node = socket.gethostname()
            tidy_up(directory, node)
        self.path = directory / f"dpex-{node}-{os.getpid()}-{started_at(os.getpid()) or 0}.json"
        self._pid = os.getpid()
        content = json.dumps([{"targets": [target], "labels": dict(labels)}], indent=1) + "\n"
        write(directory, self.path.name, content, own=own)

    def withdraw(self) -> None:
        """Idempotent; does nothing in a forked process."""
        if os.getpid() == self._pid:
            with contextlib.suppress(OSError):
                self.path.unlink()


def tidy_up(directory: Path, node: str) -> list[Path]:
    """Remove files of processes of this node that have ended; returns them."""
    removed = []
    for path in sorted(directory.glob("dpex-*.json")):
        if not _has_ended(path, node):
            continue
        with contextlib.suppress(OSError):
            path.unlink()
            removed.append(path)
    return removed
