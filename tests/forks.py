"""Work in a forked child of the test's process, as of a training that forks."""

import os
import traceback
from collections.abc import Callable
from typing import Any

import torch


def started(work: Callable[[], Any]) -> int:
    """Return the number of a forked process that does the work and ends: with 0, or with 1 and a traceback."""
    pid = os.fork()
    if pid:
        return pid
    try:
        torch.set_num_threads(1)  # the threads of a library do not survive a fork
        work()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def ended(pid: int) -> int:
    """Wait for the process, and return its exit code."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def in_a_child(work: Callable[[], Any]) -> None:
    """Do the work in a forked process. An AssertionError says that it raised something."""
    assert ended(started(work)) == 0
