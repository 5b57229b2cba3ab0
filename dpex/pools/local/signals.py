"""Signal handlers of the trainer stay in the trainer, and a signal that the trainer survives ends none of its workers.

A job scheduler sends a signal to every process of a job: Slurm SIGUSR1 before preemption, a terminal SIGHUP. A handler
that writes a checkpoint must run once, in the trainer, and its workers must live on, as torch's do. So a process that
dpex starts does nothing at a signal that the trainer handles in Python or ignores. It ends with the trainer anyway.

A process that is forked inherits the trainer's handlers. Signals are blocked in the trainer while it forks, until the
child has replaced them.
"""

from __future__ import annotations

import signal
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

_OF_FAULTS = {"SIGABRT", "SIGBUS", "SIGFPE", "SIGILL", "SIGSEGV", "SIGSYS", "SIGTRAP"}
"""Sent by the kernel for what the process itself did: to ignore them would repeat the fault."""
_NOT_OURS = {"SIGKILL", "SIGSTOP", "SIGCHLD", "SIGPIPE", "SIGXFSZ", "SIGINT"}
"""Cannot be handled, are needed as they are, or have a rule of their own."""
SENT = frozenset(
    number
    for number in signal.valid_signals()
    if not (isinstance(number, signal.Signals) and number.name in _OF_FAULTS | _NOT_OURS)
)
"""Signals that other processes send on purpose."""


@contextmanager
def blocked(numbers: Collection[int] | None = None) -> Iterator[None]:
    """Block these signals in this thread; None: all. A process that is started meanwhile has them blocked until
    `forget`."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals() if numbers is None else numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def survived() -> frozenset[int]:
    """Return the signals that do not end this process, as it handles them in Python or ignores them."""
    return frozenset(number for number in SENT if signal.getsignal(number) not in (signal.SIG_DFL, None))


def ignored() -> frozenset[int]:
    """Return the signals that this process ignores, as its workers shall, and the programs that these start."""
    return frozenset(number for number in SENT if signal.getsignal(number) is signal.SIG_IGN)


def ignore(numbers: Collection[int]) -> None:
    """Ignore these signals."""
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)


def forget(survives: Collection[int] | None = None) -> None:
    """Replace every handler of the trainer by one that does nothing, ignore SIGINT, and unblock all signals.

    Handlers outside of Python, as `faulthandler` has them, stay. A signal that is ignored stays so, as in torch's
    workers.

    Args:
        survives: Signals that do not end this process. None: those that the trainer survives, from which this process
            was forked.
    """
    kept = survived() if survives is None else survives
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals():
        if number in kept:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, _outlive)
        elif callable(signal.getsignal(number)) or number == signal.SIGCHLD:
            signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def outlive(numbers: Collection[int]) -> None:
    """Do nothing at these signals. At SIGINT, Ctrl-C reaches the whole terminal, and the trainer decides."""
    for number in numbers:
        signal.signal(number, _outlive)


def _outlive(_signal: int, _frame: Any) -> None:
    """Do nothing. A handler, unlike SIG_IGN, is not inherited by programs that the dataset may start."""
