"""The processes that Ray started below this one: whether they have come to rest, and the memory of those that work.

A node's memory is the proportional set size (PSS) of Ray's worker processes there and of all processes below them: a
page that several map counts for each in part. It is compared with what those processes had before there was a loader,
as Ray itself keeps some that are idle.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress

import psutil

from benchmarks.course import cpu_times, used_s

REST_RATIO, REST_STRETCH_S = 0.25, 1.0
"""A cluster at rest takes less than so much of a core: its own processes look around now and then."""
MOST_REST_S = 60.0
RAYLET = "raylet"
WORKER_TITLE, WORKER_SCRIPT = "ray::", "default_worker.py"
"""By which a worker process of Ray is known, once it has a title, and before."""
OTHER_TITLES = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")
"""Of processes that every node has."""


def wait_for_rest() -> None:
    """Return once the processes below this one do nothing, after `MOST_REST_S` at the latest."""
    until_s = time.monotonic() + MOST_REST_S
    while time.monotonic() < until_s:
        before, began_s = cpu_times(), time.monotonic()
        time.sleep(REST_STRETCH_S)
        if used_s(before, cpu_times()) < REST_RATIO * (time.monotonic() - began_s):
            return


def workers() -> Iterator[psutil.Process]:
    """Ray's worker processes on the nodes below this process, and all processes below them."""
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if process.name() == RAYLET:
                for child in process.children():
                    yield from _with_children(child)


def _with_children(child: psutil.Process) -> Iterator[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        if is_worker(child.cmdline()):
            yield child
            yield from child.children(recursive=True)


def is_worker(command: Sequence[str]) -> bool:
    """Whether this is the command line of a process that Ray started for tasks and actors."""
    if not command or command[0].startswith(OTHER_TITLES):
        return False
    return command[0].startswith(WORKER_TITLE) or any(WORKER_SCRIPT in word for word in command)


def worker_memory_bytes() -> tuple[int, int]:
    """The memory of all worker processes, and their number."""
    sizes = []
    for process in workers():
        with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            sizes.append(process.memory_full_info().pss)
    return sum(sizes), len(sizes)
