"""Notice the end of a process, and the forks of this process.

A forked child inherits every iterator that is alive. If the child read from an iterator, it would take its parent's
messages. A lock that another thread held during the fork is never released in the child. So `notify_in_forks` registers
objects whose method ``inherited`` is called in each child, before any of the child's own code runs. Comparing process
ids instead would cost a system call for each batch.
"""

from __future__ import annotations

import os
import weakref
from pathlib import Path
from typing import Protocol


def pidfd(pid: int) -> int:
    """Return a descriptor that turns readable when that process ends; -1 if the system has no such descriptor."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return -1


def parent_of(pid: int) -> int | None:
    """Return the parent of a process by ``/proc``; None if there is no process of that number."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[1])


class ProcessOwned(Protocol):
    """Something that belongs to the process that made it."""

    def inherited(self) -> None:
        """Run in a forked child of the owner. Take no lock, because another thread of the parent may hold it."""


_owned: weakref.WeakSet[ProcessOwned] = weakref.WeakSet()


def notify_in_forks(owned: ProcessOwned) -> None:
    """Call ``owned.inherited()`` in each process that is forked from this one while ``owned`` lives."""
    _owned.add(owned)


def _notify_owned() -> None:
    for owned in list(_owned):
        owned.inherited()
    _owned.clear()


os.register_at_fork(after_in_child=_notify_owned)
