"""Signal handlers of the trainer stay in the trainer.

A forked process inherits them. A handler that writes a checkpoint on SIGTERM must not run a second time in a worker,
and a trainer that ignores SIGCHLD must not keep the process that starts workers from learning how they end. So that
process forgets all of it before anything can arrive: signals are blocked in the trainer while it forks.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def blocked() -> Iterator[None]:
    """Block all signals in this thread; a process that is forked meanwhile has them blocked until it calls `forget`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def forget() -> None:
    """Give every signal that a Python function handles its default action, ignore SIGINT, and unblock all.

    SIGCHLD gets its default action in any case. What is handled outside of Python, as `faulthandler` does, stays.
    """
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if callable(signal.getsignal(number)) or number == signal.SIGCHLD:
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
