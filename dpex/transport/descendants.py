"""Forked processes that may still read a slot after this process has let go of it.

A process that is forked from this one inherits its views of shared slots and may read them for as long as it lives.
So a fork while slots are in use opens a pipe: the child keeps the writing end, and so do its own children; here the
reading end tells when none of them is left. Until then a slot that was in use at the fork stays lent.

Nothing happens where nobody forks. While a forked process lives, this one keeps one descriptor for it and asks about
it when a slot is taken or let go of. A program that a process executes does not inherit the pipe. If there is no
descriptor left for a pipe, the slots in use then are never given back: memory is lost rather than a batch changed.
"""

from __future__ import annotations

import contextlib
import math
import os
import select
import threading
import weakref
from typing import Any


class Fork:
    """One fork, and the slots that were let go of here and may still be read there."""

    def __init__(self) -> None:
        self.age = math.inf
        """Whatever is younger is not known to the child; while the fork is going on, nothing is."""
        self.thread = threading.get_ident()
        self.kept: list[tuple[float, Any, int]] = []
        try:
            self.reading, self.writing = os.pipe()
        except OSError:
            self.reading = self.writing = -1


forks: list[Fork] = []
"""Those of which some process is left, as far as is known."""
age = 0.0
"""Grows with each fork; a view that is made now is of this age."""

_segments: weakref.WeakSet[Any] = weakref.WeakSet()
_inherited: list[int] = []
_looking = threading.Lock()


def watch(segment: Any) -> None:
    """Have forks regarded while ``segment`` (shared memory, whose ``flags`` tell which slots are in use) lives."""
    _segments.add(segment)


def clear(born: float, flags: Any, at: int) -> None:
    """Set ``flags[at]`` to 0 as soon as no process is left that was forked since the view was made."""
    for fork in forks:
        if born < fork.age:
            fork.kept.append((born, flags, at))
            return
    flags[at] = 0


def look() -> None:
    """Give back what was kept for processes that are gone."""
    if not _looking.acquire(blocking=False):
        return
    try:
        for fork in _ended():
            forks.remove(fork)
            os.close(fork.reading)
            for born, flags, at in fork.kept:
                clear(born, flags, at)
    finally:
        _looking.release()


def _ended() -> list[Fork]:
    watched = {fork.reading: fork for fork in forks if fork.reading >= 0 and fork.writing < 0}
    poller = select.poll()
    for fd in watched:
        poller.register(fd, 0)  # only a hang-up is waited for
    return [watched[fd] for fd, _ in poller.poll(0)]


def forget_inherited() -> None:
    """This process will not read what it inherited: a process of dpex's own."""
    while _inherited:
        os.close(_inherited.pop())


def _before_fork() -> None:
    if any(1 in bytes(segment.flags) for segment in list(_segments)):
        forks.append(Fork())


def _after_fork_here() -> None:
    global age
    age += 1
    for fork in forks:
        if fork.age == math.inf and fork.thread == threading.get_ident():
            fork.age = age
            if fork.writing >= 0:
                os.close(fork.writing)
                fork.writing = -1


def _after_fork_there() -> None:
    """Keep what tells the parent of this process, and nothing else: slots in use are the parent's to give back."""
    global _looking
    _looking = threading.Lock()
    for fork in forks:
        with contextlib.suppress(OSError):
            os.close(fork.reading)
        if fork.writing >= 0:
            _inherited.append(fork.writing)
    forks.clear()
    _segments.clear()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_here, after_in_child=_after_fork_there)
