"""What a forked child of the trainer must not use: workers, sockets and locks that are its parent's.

A child inherits every iterator that is alive. If it read from one it would take its parent's messages; a lock that
another thread held when it was forked is held for ever. So whatever belongs to one process is told in each child that
it was inherited, before any of the child's own code runs. That costs nothing while nobody forks, where comparing
process ids would cost a system call for each batch.
"""

from __future__ import annotations

import os
import weakref
from typing import Protocol


class ProcessOwned(Protocol):
    """Something that belongs to the process that made it."""

    def inherited(self) -> None:
        """This process is a forked child of the owner. No lock may be taken: nobody might release it."""


_owned: weakref.WeakSet[ProcessOwned] = weakref.WeakSet()


def watch(owned: ProcessOwned) -> None:
    """Call ``owned.inherited()`` in each process that is forked from this one while ``owned`` lives."""
    _owned.add(owned)


def _tell_all() -> None:
    for owned in list(_owned):
        owned.inherited()
    _owned.clear()


os.register_at_fork(after_in_child=_tell_all)
