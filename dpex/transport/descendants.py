"""Forked processes that may still read a slot after this process has let go of it.

A process that is forked from this one inherits its views of shared slots and may read them for as long as it lives.
So a fork while slots are in use opens a pipe: the child keeps the writing end, and so do its own children; here the
reading end shows when none of them is left. Until then a slot that was in use at the fork stays in use.

Without a fork nothing happens. While a forked process lives, this one keeps one descriptor for it and polls it when a
slot is taken or released. A program that a process executes does not inherit the pipe. If there is no descriptor left
for a pipe, the slots in use then are never released: memory is lost rather than a batch changed.
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
    """A fork, and the slots that were released here and may still be read there."""

    def __init__(self) -> None:
        self.age = math.inf
        """The child does not know views that are younger. While the fork goes on, no view counts as younger."""
        self.thread = threading.get_ident()
        self.kept: list[tuple[float, Any, int]] = []
        try:
            self.reading, self.writing = os.pipe()
        except OSError:
            self.reading = self.writing = -1


forks: list[Fork] = []
"""The forks of which some process may be left."""
age = 0.0
"""The number of forks so far: the age of a view that is made now."""

_segments: weakref.WeakSet[Any] = weakref.WeakSet()
_inherited: list[int] = []
_looking = threading.Lock()


def watch(segment: Any) -> None:
    """Have forks look at ``segment`` while it lives: shared memory, whose ``flags`` show the slots in use."""
    _segments.add(segment)


def clear(born: float, flags: Any, at: int) -> None:
    """Set ``flags[at]`` to 0 once no process is left that was forked since the view was made."""
    for fork in forks:
        if born < fork.age:
            fork.kept.append((born, flags, at))
            return
    flags[at] = 0


def look() -> None:
    """Release the slots that were kept for processes that are gone."""
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
    """Close the pipes to the parent: dpex's own processes do not read slots that they inherited."""
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
    """Keep the pipes to the parent, and nothing else: the parent releases the slots in use."""
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
