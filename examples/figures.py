"""What figures of a run are worth: whether other programs had the CPUs meanwhile, and what two loaders made then.

`conclusion` says what was measured, and nothing else. `look` reads Linux's ``/proc``; all else is arithmetic.
"""

import os
import time
from pathlib import Path
from typing import NamedTuple

from show import Stretch

BUSY_RATIO = 0.1
"""Other programs that keep this share of the CPUs busy change figures by as much, or more where all CPUs are used."""
SAME_RATIO = 0.05
"""Rates that differ by less are the same: seconds of training vary by as much."""
MANY_TIMES = 1.5
"""From here on a rate is said to be so many times another, and below it to be so many percent more."""


class Look(NamedTuple):
    """CPU seconds at one moment: of everybody on the CPUs of this process, and of this process with all below it."""

    at_s: float
    busy_s: float
    own_s: float


def look() -> Look | None:
    """Read the clocks of now; None on other systems than Linux."""
    try:
        return Look(time.monotonic(), _busy_s(), _own_s())
    except (OSError, ValueError, IndexError, AttributeError):
        return None


def others_cpus(before: Look | None, after: Look | None) -> float | None:
    """Return how many CPUs other programs kept busy between two looks, on average; None where it is not known."""
    if before is None or after is None or after.at_s <= before.at_s:
        return None
    others_s = (after.busy_s - before.busy_s) - (after.own_s - before.own_s)
    return max(0.0, others_s / (after.at_s - before.at_s))


def is_busy(others: float | None, cpus: int) -> bool:
    """Return True if other programs keep so many CPUs busy that figures mean little."""
    return others is not None and others >= BUSY_RATIO * cpus


def warning(others: float | None, cpus: int) -> str:
    """Return what is to be known before the figures are read; "" if the machine is quiet, or nothing is known of it."""
    if others is None or not is_busy(others, cpus):
        return ""
    return (
        f"This machine is busy: other programs keep {others:.1f} of its {cpus} CPUs busy. The figures below mean "
        "little until it is quiet."
    )


def conclusion(torch: Stretch, fixed: int, auto: Stretch, found: int, others: float | None, cpus: int) -> str:
    """Say what PyTorch's loader with ``fixed`` workers and a tuned one with ``found`` workers made, as it was measured.

    ``others``: CPUs that other programs kept busy meanwhile, at most; None: not known.
    """
    measured = (
        f"PyTorch's loader with {_workers(fixed)} made {torch.rate:.1f} batches/s, and the loop waited for "
        f'{torch.wait_ratio:.0%} of the time. "auto" made {auto.rate:.1f} in its last {auto.seconds:.0f} seconds, with '
        f"{_workers(found)}, and the loop waited for {auto.wait_ratio:.0%}"
    )
    said = f"{measured}: {_compared(torch.rate, auto.rate)}."
    if others is not None and is_busy(others, cpus):
        said += (
            f" Other programs kept up to {others:.1f} of the {cpus} CPUs busy meanwhile, so these figures mean little. "
            "Run it again when the machine is quiet."
        )
    return said


def _compared(before: float, now: float) -> str:
    if not before or not now:
        return "too little to compare"
    ratio = now / before
    if abs(ratio - 1.0) <= SAME_RATIO:
        return "the same rate, as exactly as this shows it"
    if ratio >= MANY_TIMES:
        return f"{ratio:.1f} times as many batches"
    return f"{abs(ratio - 1.0):.0%} {'more' if ratio > 1.0 else 'fewer'} batches"


def _workers(count: int) -> str:
    return f"{count} worker{'' if count == 1 else 's'}"


# -- Linux ---------------------------------------------------------------------------------------------------------


def _busy_s() -> float:
    """CPU seconds since boot of the CPUs that this process may use; guests are in "user"."""
    mine = {f"cpu{number}" for number in os.sched_getaffinity(0)}
    busy = 0
    for line in Path("/proc/stat").read_text().splitlines():
        name, *ticks = line.split()
        if name in mine:
            user, nice, system, _, _, *rest = map(int, ticks[:8])
            busy += user + nice + system + sum(rest)
    return busy * _tick_s()


def _own_s() -> float:
    """CPU seconds of this process and of all below it, those that have ended and were waited for included."""
    parents, used = {}, {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        pid = int(path.parent.name)
        parents[pid] = int(fields[1])
        used[pid] = sum(map(int, fields[11:15]))
    below = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in below and pid not in below}:
        below |= more
    return sum(used.get(pid, 0) for pid in below) * _tick_s()


def _tick_s() -> float:
    """Seconds of the unit in which the kernel counts CPU time."""
    return 1.0 / os.sysconf("SC_CLK_TCK")
