"""What becomes of a ticket beside its batch: the times of its stages, and what stands in place of a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from dpex._torch import ExceptionWrapper
from dpex.profile.live_timer import Row


class Stages(NamedTuple):
    """Seconds of wall time one ticket took, CPU seconds for it (of library threads, too: they may be more), how many
    samples it got, what its transforms took, where they were timed, of its slowest sample, where single ones are
    timed, seconds and place, and of the samples that could not be had, index and error.
    """

    load_s: float
    collate_s: float
    load_cpu_s: float
    collate_cpu_s: float
    samples: int
    steps: tuple[Row, ...] = ()
    slowest: tuple[()] | tuple[float, int] = ()
    failed: tuple[tuple[str, str], ...] = ()


stages_of: Callable[..., Stages] = tuple.__new__
"""``stages_of(Stages, tuple)``: `Stages` of a tuple, in a third of the time."""
NO_TIME = Stages(0.0, 0.0, 0.0, 0.0, 0)


class StreamEnd:
    """Made in place of a batch: the stream behind the ticket is exhausted."""


class Failure:
    """Made in place of a batch: the error, as torch wraps it, to be raised where the batch would have been."""

    __slots__ = ("wrapper",)

    def __init__(self, wrapper: ExceptionWrapper) -> None:
        self.wrapper = wrapper


def where(number: int) -> str:
    """The place torch names in an error that a worker caught."""
    return f"in DataLoader worker process {number}"
