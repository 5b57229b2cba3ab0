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
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

DIRECTORY_VARIABLE = "DPEX_METRICS_DIR"
_NAME = re.compile(r"dpex-(?P<node>.+)-(?P<pid>\d+)-(?P<started>\d+)\.json")


def default_directory(environment: Mapping[str, str]) -> Path:
    """This user's own, which goes with the session or the machine."""
    if runtime := environment.get("XDG_RUNTIME_DIR"):
        return Path(runtime) / "dpex"
    return Path(tempfile.gettempdir()) / f"dpex-{os.getuid()}"


def identity(environment: Mapping[str, str]) -> dict[str, str]:
    """Labels of this process: run_id, the same for all ranks of a job where the launcher tells it; rank; node."""
    return {"run_id": _run_id(environment), "rank": environment.get("RANK", "0"), "node": socket.gethostname()}


def _run_id(environment: Mapping[str, str]) -> str:
    for name in ("DPEX_RUN_ID", "TORCHELASTIC_RUN_ID", "SLURM_JOB_ID"):
        found = environment.get(name, "")
        if found and found != "none":
            return found
    if "MASTER_PORT" in environment and "RANK" in environment:
        return f"{environment.get('MASTER_ADDR', 'localhost')}-{environment['MASTER_PORT']}"
    return f"{socket.gethostname()}-{os.getpid()}-{started_at(os.getpid()) or 0}"


def started_at(pid: int) -> int | None:
    """When that process started, in ticks since boot (0 where nobody can tell); None: there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
        return int(text.rpartition(")")[2].split()[19])
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


class Announcement:
    """The file of this process; `withdraw` removes it.

    Raises OSError where the directory cannot be written or is not safe; with ``own`` it must be this user's.
    """

    def __init__(self, directory: Path, target: str, labels: Mapping[str, str], *, own: bool = False) -> None:
        _prepare(directory, own=own)
        node = socket.gethostname()
        tidy_up(directory, node)
        self.path = directory / f"dpex-{node}-{os.getpid()}-{started_at(os.getpid()) or 0}.json"
        self._pid = os.getpid()
        content = json.dumps([{"targets": [target], "labels": dict(labels)}], indent=1) + "\n"
        number, temporary = tempfile.mkstemp(".tmp", "dpex-", directory)
        with os.fdopen(number, "w") as file:
            os.fchmod(number, 0o644)
            file.write(content)
        Path(temporary).replace(self.path)

    def withdraw(self) -> None:
        """Idempotent; does nothing in a forked process."""
        if os.getpid() == self._pid:
            with contextlib.suppress(OSError):
                self.path.unlink()


def _prepare(directory: Path, *, own: bool) -> None:
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = directory.stat()
    if found.st_mode & stat.S_IWOTH and not found.st_mode & stat.S_ISVTX:
        raise PermissionError(f"everybody may change what is in {directory}")
    if own and found.st_uid != os.getuid():
        raise PermissionError(f"{directory} is another user's")


def tidy_up(directory: Path, node: str) -> list[Path]:
    """Remove files of processes of this node that have ended; returns them."""
    removed = []
    for path in sorted(directory.glob("dpex-*.json")):
        found = _NAME.fullmatch(path.name)
        if found is None or found["node"] != node or started_at(int(found["pid"])) == int(found["started"]):
            continue
        with contextlib.suppress(OSError):
            path.unlink()
            removed.append(path)
    return removed
