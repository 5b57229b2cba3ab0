"""How long workers and the training thread could have run and had no CPU, as the kernel counts it per thread.

``/proc/<pid>/task/<tid>/schedstat`` holds nanoseconds on a CPU, nanoseconds on a run queue, and slices. Where the
kernel does not keep it, nothing is known. Of many workers some are asked, and stand for all.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

_ASKED = 16
_PROC = Path("/proc")


@dataclass(frozen=True, kw_only=True)
class Queued:
    """Seconds on run queues since each began: worker processes by pid, of which there are ``workers``, and the training
    thread; None: not known."""

    by_pid: Mapping[int, float] = field(default_factory=dict)
    workers: int = 0
    trainer_s: float | None = None

    def since(self, then: Queued) -> tuple[float | None, float | None]:
        """What workers (in all) and the training thread queued between two looks, each None if not known."""
        both = [pid for pid in self.by_pid if pid in then.by_pid]
        local = sum(max(0.0, self.by_pid[pid] - then.by_pid[pid]) for pid in both)
        known = self.trainer_s is not None and then.trainer_s is not None
        trainer = max(0.0, (self.trainer_s or 0.0) - (then.trainer_s or 0.0)) if known else None
        return (local * self.workers / len(both) if both else None), trainer


def parse_schedstat(text: str) -> float:
    """Seconds on a run queue, from a ``schedstat``'s text."""
    return int(text.split()[1]) * 1e-9


def look(pids: Collection[int], thread: int, proc: Path = _PROC) -> Queued:
    """Now; ``thread`` is the training thread's native id, 0 if unknown."""
    step = max(1, len(pids) // _ASKED)
    by_pid = {}
    for pid in sorted(pids)[::step][:_ASKED]:
        with contextlib.suppress(OSError, ValueError, IndexError):
            by_pid[pid] = _process_s(proc / str(pid) / "task")
    trainer_s = None
    if thread:
        with contextlib.suppress(OSError, ValueError, IndexError):
            trainer_s = _thread_s(proc / "self" / "task" / str(thread))
    return Queued(by_pid=by_pid, workers=len(pids), trainer_s=trainer_s)


class OwnQueue:
    """How long the calling thread has been on run queues: 1 to 7 µs a question. Used by one thread at a time."""

    def __init__(self, proc: Path = _PROC) -> None:
        self._proc = proc
        self._thread = 0
        self._fd = -1

    def seconds(self) -> float | None:
        """Since the thread began; None: not known."""
        try:
            if self._thread != threading.get_native_id():
                self._open(threading.get_native_id())
            return parse_schedstat(os.pread(self._fd, 128, 0).decode())
        except (OSError, ValueError, IndexError):
            return None

    def __del__(self) -> None:
        self.close()

    def _open(self, thread: int) -> None:
        self.close()
        self._fd = os.open(self._proc / "self" / "task" / str(thread) / "schedstat", os.O_RDONLY | os.O_CLOEXEC)
        self._thread = thread

    def close(self) -> None:
        """Idempotent; a later question opens it again."""
        if self._fd >= 0:
            os.close(self._fd)
        self._fd, self._thread = -1, 0


def _process_s(tasks: Path) -> float:
    return sum(map(_thread_s, tasks.iterdir()))


def _thread_s(task: Path) -> float:
    with open(task / "schedstat") as file:  # noqa: PTH123  (Path.read_text takes twice as long)
        return parse_schedstat(file.read())
